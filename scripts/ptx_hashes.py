"""Prints a hash of the PTX of every shipped config, compiled for its GPU on a machine without one.

    python scripts/ptx_hashes.py --output before.txt     # then change what should leave the kernels as they are
    python scripts/ptx_hashes.py --against before.txt    # prints what differs; exit status 1 where anything does

A line is a hash and what it is of: the GPU, the op, the problem and the config. The names of kernels and what is for debuggers
(source files, lines, comments) do not count; "no-kernel" is a config that leaves its problem to XLA.
"""

from __future__ import annotations

import argparse
import functools
import hashlib
import json
import multiprocessing
import os
import re
import sys
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path

os.environ.setdefault("JAX_PLATFORMS", "cpu")  # nothing runs

import jax

import mgpu_ops
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import database

NO_KERNEL = "no-kernel"
_DEBUG = re.compile(r"\s*(\.loc\b|\.file\b|\.section\b|//).*|\$L__(tmp|func_begin|func_end)\d+:|\s*")
_ENTRY = re.compile(r"\.entry (\w+)")

Case = tuple[str, str, str, str]  # GPU's key, op, problem and config as JSON


def shipped(ops: Sequence[str]) -> Iterator[Case]:
    """Every shipped entry of these ops."""
    for path in sorted(Path(mgpu_ops.__path__[0], "configs").glob("*/*.json")):
        if path.stem in ops:
            for entry in database.read(path).entries:
                problem, config = (json.dumps(x, sort_keys=True) for x in (entry.problem, entry.config))
                yield path.parent.name, path.stem, problem, config


def named(ops: Sequence[str], gpu_key: str) -> Iterator[Case]:
    """The default config of every named problem of these ops."""
    device = gpu.find(gpu_key)
    for op in ops:
        spec = mgpu_ops.SPECS[op]
        for problem in dict.fromkeys(spec.shapes.values()):
            if spec.supports(problem, device) is None:
                fields, config = (json.dumps(vars(x), sort_keys=True) for x in (problem, spec.default(problem, device)))
                yield gpu_key, op, fields, config


def normalised(ptx: str) -> str:
    """PTX without the kernel's name and without debug information."""
    lines = [line for line in ptx.splitlines() if not _DEBUG.fullmatch(line)]
    text = "\n".join(lines)
    for name in _ENTRY.findall(text):
        text = re.sub(rf"\b{name}(?=\b|_param_)", "kernel", text)
    return text


def hash_of(kernels: Iterable[str]) -> str:
    """The hash of the PTX of all kernels of a function, whatever their order."""
    texts = sorted(map(normalised, kernels))
    return hashlib.sha256("\0".join(texts).encode()).hexdigest()[:16] if texts else NO_KERNEL


def hash_case(case: Case) -> str:
    gpu_key, op, problem_fields, config_fields = case
    spec, device = mgpu_ops.spec_of(op), gpu.find(gpu_key)
    problem = database.to_problem(spec, json.loads(problem_fields))
    config = database.to_config(spec, json.loads(config_fields))
    shapes = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    run = functools.partial(spec.run, problem, config, device)
    return hash_of(aot.ptx(device, run, *shapes, devices=spec.devices(problem)))


def lines_of(cases: Sequence[Case], hashes: Iterable[str]) -> Iterator[str]:
    for (gpu_key, op, problem, config), found in zip(cases, hashes, strict=True):
        yield f"{found} {gpu_key}/{op} {problem} {config}"


def differences(before: Iterable[str], now: Iterable[str], ops: Sequence[str]) -> list[str]:
    """The differences between the lines of two runs about these ops, a line for each."""
    old, new = (dict(_case_and_hash(line) for line in lines if _op(line) in ops) for lines in (before, now))
    changed = [f"changed: {key}: {old[key]} -> {new[key]}" for key in old.keys() & new.keys() if old[key] != new[key]]
    gone, added = ([f"{word}: {key}" for key in keys] for word, keys in _missing(old, new).items())
    return sorted([*changed, *gone, *added])


def _case_and_hash(line: str) -> tuple[str, str]:
    found, _, case = line.partition(" ")
    return case, found


def _op(line: str) -> str:
    return line.split(" ", 2)[1].partition("/")[2]


def _missing(old: Mapping[str, str], new: Mapping[str, str]) -> dict[str, set[str]]:
    return {"gone": old.keys() - new.keys(), "new": new.keys() - old.keys()}


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--op", action="append", choices=list(mgpu_ops.SPECS), help="only this op; may be repeated")
    parser.add_argument("--named", metavar="GPU", help="also the default config of every named problem, on this GPU")
    parser.add_argument("--output", type=Path, help="write the lines to this file instead of printing them")
    parser.add_argument("--against", type=Path, help="print what differs from this file, and exit with 1 where anything does")
    parser.add_argument("--jobs", type=int, default=len(os.sched_getaffinity(0)), help="processes (default: one a core)")
    given = parser.parse_args(arguments)
    if reason := aot.available():
        parser.error(reason)
    ops = given.op or list(mgpu_ops.SPECS)
    before = given.against.read_text().splitlines() if given.against else None
    cases = list(dict.fromkeys([*shipped(ops), *(named(ops, given.named) if given.named else ())]))
    with multiprocessing.get_context("spawn").Pool(given.jobs) as pool:
        lines = list(lines_of(cases, pool.imap(hash_case, cases, chunksize=4)))
    if given.output:
        given.output.write_text("".join(f"{line}\n" for line in lines))
    elif before is None:
        print(*lines, sep="\n")
    if before is None:
        return 0
    found = differences(before, lines, ops)
    print(*found, f"{len(lines)} hashes, {len(found)} differences from {given.against}", sep="\n")
    return 1 if found else 0


if __name__ == "__main__":
    sys.exit(main())
