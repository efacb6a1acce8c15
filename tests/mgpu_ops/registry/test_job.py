"""Processes of one job: whatever files their machines have, they resolve one config. Two real processes, on the CPU."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database, job
from mgpu_ops.registry.database import Evidence
from tests.jobs import run_job

MATMUL = spec_of("matmul")
H200 = gpu.find("h200")
STORED, OTHER, PLAIN = MatmulProblem(512, 512, 512), MatmulProblem(1024, 512, 512), MatmulProblem(256, 4096, 512)

PROGRAM = """
import dataclasses, json, sys
import jax
process, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, process)
import mgpu_ops
from mgpu_ops.registry import database, job, resolution; from mgpu_ops.core import gpu

spec, h200 = mgpu_ops.spec_of("matmul"), gpu.find("h200")
stored, other, plain = (mgpu_ops.MatmulProblem(*sides) for sides in json.loads(sys.argv[3]))
mine = dataclasses.replace(spec.default(stored, h200), raster_width=process + 1)
told = {}

def tell(name, found):
    told[name] = [found.source, dataclasses.asdict(found.config), found.runs]

tell("stored", resolution.resolve(spec, stored, h200))
tell("again", resolution.resolve(spec, stored, h200))
tell("other", resolution.resolve(spec, other, h200))
tell("plain", resolution.resolve(spec, plain, h200))
tell("argument", resolution.resolve(spec, stored, h200, mine))
with mgpu_ops.use_configs({"matmul": mine}):
    tell("override", resolution.resolve(spec, stored, h200))
told["explained"] = mgpu_ops.explain("matmul", stored, "h200")
told["zero"] = job.from_zero("number", lambda: f"from {process}", 60)
try:
    job.from_zero("failing", lambda: str(1 / 0), 60)
except Exception as error:
    told["failed"] = f"{type(error).__name__}: {error}"
print(json.dumps(told))
"""


def store(folder: Path, problem: MatmulProblem, xla_us: float | None = None, **changes: Any) -> MatmulConfig:
    """Puts an entry of 12.5 us into the database that a machine has in `folder`."""
    evidence = Evidence(
        kind="measured", gpu="NVIDIA H200", driver="1.2", jax="0.11.2", jaxlib="0.11.2", cuda=None,
        kernel_version=MATMUL.version, median_us=12.5, spread_us=0.5, default_us=15.0, baseline="xla", baseline_us=xla_us,
        error=0.001, trials=48, seed=0, date="2025-11-20",
    )  # fmt: skip
    config = dataclasses.replace(MATMUL.default(problem, H200), **changes)
    assert MATMUL.check(problem, config, H200) is None
    entry = database.to_entry(problem, config, evidence)
    database.update(folder / "h200" / "matmul.json", [entry], gpu_key="h200", op="matmul")
    return config


def test_a_process_alone_is_a_job_of_one_and_asks_nobody(monkeypatch: pytest.MonkeyPatch) -> None:
    assert job.size() == 1
    assert job.first("key", "mine") == "mine"
    assert job.first("key", "another") == "another"
    assert job.from_zero("key", lambda: "made", 0.001) == "made"


def test_two_processes_with_different_databases_resolve_the_same_configs(tmp_path: Path) -> None:
    folders = [tmp_path / "zero", tmp_path / "one"]
    # To the machine of process 0, XLA is the faster; to that of 1, the kernel.
    own = [
        store(folder, STORED, us, raster_width=width) for folder, us, width in zip(folders, (10.0, 15.0), (2, 8), strict=True)
    ]
    only_one = store(folders[1], OTHER, raster_width=4)
    sides = json.dumps([[p.m, p.n, p.k] for p in (STORED, OTHER, PLAIN)])
    zero, one = run_job(PROGRAM, folders, sides)

    for name in ("stored", "other", "plain"):
        assert zero[name][1:] == one[name][1:], name
        assert sorted((zero[name][0] == "job", one[name][0] == "job")) in ([False, True], [False, False]), name
    assert zero["again"] == zero["stored"]
    assert one["again"] == one["stored"]
    assert zero["stored"][2] == ("kernel" if zero["stored"][0] == "job" else "xla")
    assert zero["stored"][1] in [dataclasses.asdict(config) for config in own]
    assert sorted((zero["stored"][0], one["stored"][0])) == ["job", "user"]
    assert one["other"][1] in (dataclasses.asdict(only_one), zero["other"][1])
    assert "from      " in zero["explained"]
    loser = zero if zero["stored"][0] == "job" else one
    assert "another process of this job chose first" in loser["explained"]

    # What the program itself says is the program's to keep alike: here it says two things on purpose.
    for name in ("argument", "override"):
        assert [p[name][1]["raster_width"] for p in (zero, one)] == [1, 2]
        assert [p[name][0] for p in (zero, one)] == [name, name]

    assert zero["zero"] == one["zero"] == "from 0"
    assert zero["failed"] == "ZeroDivisionError: division by zero"
    assert one["failed"] == "RuntimeError: process 0 of the job failed: ZeroDivisionError: division by zero"
