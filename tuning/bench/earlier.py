"""Which rows of benchmarks were timed with another config than a call uses now."""

from __future__ import annotations

import re
from collections.abc import Mapping

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.tuning.bench import runner
from mgpu_ops.tuning.bench.results import GRAD, SUSTAINED, base_op
from mgpu_ops.tuning.labels import problem_of

XLA = {"runs": "xla"}  # in place of the fields of a config


def earlier_config(row: Mapping[str, str]) -> bool | None:
    """Whether a row of ours, as a CSV file has it, was timed with another config than a call uses now; also with the kernel
    where a call now runs XLA, and the other way round. Only fields that both configs have are compared.

    None where that cannot be said: rows of whole layers and programs, which tell no config; rows timed without pause, whose
    entries may be chosen for that; and problems, ops and GPUs that are no longer known.
    """
    op, then = base_op(row["op"]), _configs(row.get("config", ""))
    if not all(then) or op not in mgpu_ops.SPECS or row["op"].endswith(SUSTAINED):
        return None
    spec = mgpu_ops.spec_of(op)
    try:
        problem, on = problem_of(spec, row["problem"]), gpu.find(row["gpu"])
    except ValueError:
        return None
    now = _configs(runner.our_config(spec, problem, on, grad=row["op"].endswith(GRAD)))
    return any((a is XLA) != (b is XLA) or any(a[field] != b[field] for field in a.keys() & b) for a, b in zip(then, now))


def _configs(text: str) -> list[dict[str, str]]:
    """The fields of the config of each pass, or `XLA`, of a text that `runner.our_config` wrote."""
    passes = [part.removeprefix("forward ").removeprefix("backward ").partition(";")[0] for part in text.split(" | ")]
    is_xla = [config.startswith(("xla", "backend=xla", "algorithm=xla ")) for config in passes]
    return [XLA if xla else dict(re.findall(r"(\w+)=(\S+)", config)) for config, xla in zip(passes, is_xla)]
