"""`scripts/tune_drawn.py`: which configs of a drawn problem are tried, and what is written of them."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path
from typing import Any

import jax
import pytest

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.tuning import suites
from mgpu_ops.tuning.bench import results
from mgpu_ops.tuning.outcome import Outcome
from scripts import tune_drawn

MATMUL, H200 = spec_of("matmul"), gpu.find("h200")


def test_problems_are_asked_for_by_name_or_number():
    suite = {f"anywhere-{i}": MatmulProblem(8 * i, 64, 64) for i in (1, 2, 3)}
    assert list(tune_drawn.named(suite, "3,anywhere-1")) == ["anywhere-3", "anywhere-1"]
    assert tune_drawn.named(suite, "") == suite
    with pytest.raises(ValueError, match="no problem 4 in the suite"):
        tune_drawn.named(suite, "4")


def test_the_fastest_of_earlier_runs_are_found_beside_xla(tmp_path):
    problem = MatmulProblem(4096, 4096, 4096)
    first, second, third = tune_drawn.promising(problem, H200, 3)

    def line(xla_us: float, **us: float) -> str:
        configs = {"first": first, "second": second, "third": third}
        times = [{"config": dataclasses.asdict(configs[name]), "us": time} for name, time in us.items()]
        times.append({"config": dataclasses.asdict(dataclasses.replace(first, tile_k=48)), "us": 1.0})  # refused
        return json.dumps({"problem": dataclasses.asdict(problem), "xla_us": xla_us, "configs": times})

    (tmp_path / "before.jsonl").write_text(line(100.0, first=90.0, second=99.0) + "\n" + line(200.0, third=110.0))
    assert tune_drawn.fastest_before(tmp_path / "before.jsonl", problem, H200, 2) == [third, first]
    assert tune_drawn.fastest_before(tmp_path / "before.jsonl", MatmulProblem(8, 8, 8), H200, 2) == []
    assert tune_drawn.fastest_before(tmp_path / "missing.jsonl", problem, H200, 2) == []


@pytest.mark.parametrize("name", ["anywhere-0", "anywhere-6", "anywhere-20", "anywhere-90"])
def test_the_default_and_the_most_promising_configs_of_different_tiles_are_tried(name: str) -> None:
    problem: Any = suites.problems(MATMUL, "anywhere")[name]
    found = tune_drawn.promising(problem, H200, 6)
    assert found[0] == MATMUL.default(problem, H200)
    assert 2 <= len(found) == len({dataclasses.astuple(c) for c in found}) <= 6
    assert all(MATMUL.check(problem, c, H200) is None for c in found)


def test_the_fastest_right_config_is_timed_beside_xla_alone_and_written_as_bench_does(
    monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    problem = MatmulProblem(64, 64, 64)
    slow, fast, wrong, broken = tune_drawn.promising(MatmulProblem(4096, 4096, 4096), H200, 4)

    class Built(aot.Executable):
        def __init__(self, config: MatmulConfig) -> None:
            object.__setattr__(self, "config", config)
            object.__setattr__(self, "spills", 0)

    def load(built: Any) -> Any:
        return lambda a, b: (a @ b) * (2 if built.config == wrong else 1)

    monkeypatch.setattr(tune_drawn, "Executable", Built)
    monkeypatch.setattr(aot, "load", load)
    monkeypatch.setattr(tune_drawn, "_NO_SEARCH", {})
    turns = [[[10.0], [20.0], [8.0]], [[10.0, 11.0, 12.0], [7.0, 8.0, 9.0]]]
    rounds: list[int] = []

    def timer(calls: Any, count: int) -> list[list[float]]:
        rounds.append(len(calls))
        return turns[len(rounds) - 1]

    arrays = lambda shape, start: jax.random.normal(jax.random.key(start), shape, "bfloat16")  # noqa: E731
    made = [(slow, Built(slow)), (wrong, Built(wrong)), (broken, Outcome("compile", detail="spills")), (fast, Built(fast))]
    found = tune_drawn.tuned(problem, made, arrays, timer)
    assert (found.fastest, found.xla_us, rounds) == (fast, 10.0, [3, 2])
    assert [record.get("us") for record in found.configs] == [20.0, None, None, 8.0]
    assert found.configs[2]["failed"] == "spills"
    stamp: Any = {"op": "matmul", "gpu": "NVIDIA H200", "driver": "", "jax": "", "date": "2026-11-22"}
    path = tmp_path / "tuned.csv"
    results.write_csv(tune_drawn.rows(problem, "made-up", found, stamp), path)
    ours, theirs = results.read_csv(path)
    assert (ours.impl, ours.median_us, theirs.impl, theirs.median_us) == ("mgpu_ops", 8.0, "xla", 11.0)
    assert f"tile_m={fast.tile_m}" in ours.config
    assert "fastest of 4" in ours.config
    assert "XLA 11.0, ours 8.0 (1.375) by config 3" in tune_drawn.told_of("made-up", problem, found)
    assert tune_drawn.told([11 / 8]) == "1 problems: 1.375x of XLA, worst 1.375, below 0.95 0"


def test_a_problem_of_which_no_config_is_right_is_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tune_drawn, "_NO_SEARCH", {})
    arrays = lambda shape, start: jax.random.normal(jax.random.key(start), shape, "bfloat16")  # noqa: E731
    made = [(MATMUL.default(MatmulProblem(64, 64, 64), H200), Outcome("compile", detail="spills"))]
    with pytest.raises(ValueError, match=r"no config of .* is right: .*spills"):
        tune_drawn.tuned(MatmulProblem(64, 64, 64), made, arrays, lambda calls, count: [])
