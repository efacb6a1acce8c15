"""What the worker makes of candidates, with a toy op on the CPU in place of a kernel and a clock in place of CUPTI."""

from __future__ import annotations

import dataclasses
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax.numpy as jnp
import pytest

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.core.op import Baseline
from mgpu_ops.tuning import measure, worker

TIMES = {"fast": 1.0, "slow": 3.0}


@dataclasses.dataclass(frozen=True)
class Problem:
    m: int


ran: list[str] = []  # which of the functions below were traced


def reference(problem: Problem, x: Any) -> Any:
    ran.append("reference")
    return 2 * x


def yardstick(problem: Problem, x: Any) -> Any:
    ran.append("yardstick")
    return x + 1


def halves(problem: Problem, x: Any) -> tuple[Any, Any]:
    ran.append("halves")
    return x[::2], x[1::2]


def longer(problem: Problem, even: Any, odd: Any) -> Any:
    return even + odd


def refused(problem: Problem, *arrays: Any) -> Any:
    raise RuntimeError("a library that does not take the problem")


def run(problem: Problem, config: str, device: Any, x: Any, interpret: bool = False) -> Any:
    if config == "does not compile":
        raise ValueError("tile too large\nand more")
    return {"wrong": x, "nan": x * jnp.nan}.get(config, 2 * x)


@pytest.fixture
def spec() -> types.SimpleNamespace:
    ran.clear()
    return types.SimpleNamespace(
        Problem=Problem,
        inputs=lambda problem, key: (jnp.arange(1.0, 1.0 + problem.m),),
        reference=reference,
        run=run,
        tolerance=lambda problem: 1e-3,
        baseline=None,
    )


@pytest.fixture
def judged(monkeypatch: pytest.MonkeyPatch, spec: types.SimpleNamespace) -> Callable[[], worker._Session]:
    monkeypatch.setattr(mgpu_ops, "spec_of", lambda op: spec)
    monkeypatch.setattr(gpu, "from_device", lambda device: gpu.find("h200"))

    def session() -> worker._Session:
        made = worker._Session("toy", {"m": 8}, seed=0)
        names = lambda: {id(compiled): config for config, compiled in made.compiled.items()}  # noqa: E731

        def interleaved(functions: Sequence[Callable[[], Any]], device: Any, rounds: int) -> list[list[float]]:
            times = []
            for f in functions:
                f()
                config = names().get(id(f.func), "baseline")  # type: ignore[attr-defined]
                if config == "breaks":
                    raise RuntimeError("illegal address")
                times.append([TIMES.get(config, 2.0)] * rounds)
            return times

        monkeypatch.setattr(measure, "interleaved", interleaved)
        return made

    return session


def test_each_candidate_gets_its_kind_in_order_and_none_ends_the_batch(judged: Callable[[], worker._Session]) -> None:
    configs = ["fast", "does not compile", "wrong", "nan", "breaks", "slow"]
    outcomes = list(judged().judge(configs))
    assert [o.kind for o in outcomes] == ["ok", "compile", "wrong", "wrong", "crash", "ok"]
    assert outcomes[1].detail == "ValueError: tile too large"
    assert "exceeds 0.001" in outcomes[2].detail
    assert outcomes[4].detail == "RuntimeError: illegal address"


def test_a_good_candidate_comes_with_its_time_the_baselines_and_its_error(judged: Callable[[], worker._Session]) -> None:
    (outcome,) = judged().judge(["slow"])
    assert (outcome.us, outcome.baseline_us, outcome.error) == (3.0, 2.0, 0.0)


def test_a_wrong_candidate_is_never_timed(judged: Callable[[], worker._Session]) -> None:
    (outcome,) = judged().judge(["wrong"])
    assert outcome.us is None


def test_the_final_measures_candidates_that_were_judged_by_an_earlier_worker_too(
    judged: Callable[[], worker._Session],
) -> None:
    final = judged().finals(["slow", "fast"], 0.001)
    assert set(final.samples["slow"]) == {3.0}
    assert set(final.samples["fast"]) == {1.0}
    assert set(final.baseline) == {2.0}


def test_without_a_baseline_of_its_own_an_op_is_measured_beside_its_reference(
    judged: Callable[[], worker._Session], spec: types.SimpleNamespace
) -> None:
    made = judged()
    assert made.baseline == "xla"
    assert made.baseline_call().tolist() == made.expected.tolist()
    assert ran == ["reference"]  # compiled once, for both


def test_a_baseline_is_timed_and_the_reference_is_what_results_are_compared_with(
    judged: Callable[[], worker._Session], spec: types.SimpleNamespace
) -> None:
    """The baseline computes something else: candidates that agree with the reference are right all the same."""
    spec.baseline = lambda problem: Baseline("dense", yardstick)
    made = judged()
    assert made.baseline == "dense"
    assert made.baseline_call().tolist() == (made.arrays[0] + 1).tolist()
    right, wrong = made.judge(["fast", "wrong"])
    assert (right.kind, right.error, right.baseline_us, wrong.kind) == ("ok", 0.0, 2.0, "wrong")


def test_a_baseline_may_start_from_arrays_that_are_made_once_and_not_timed(
    judged: Callable[[], worker._Session], spec: types.SimpleNamespace
) -> None:
    spec.baseline = lambda problem: Baseline("pairs", longer, halves)
    made = judged()
    assert (made.baseline, made.baseline_call().tolist()) == ("pairs", [3.0, 7.0, 11.0, 15.0])
    list(made.judge(["fast"]))
    assert ran.count("halves") == 1


@pytest.mark.parametrize("wanted", [None, Baseline("library", refused), Baseline("library", longer, refused)])
def test_the_reference_stands_in_for_a_baseline_that_is_none_of_a_problem_or_cannot_run(
    wanted: Baseline | None, judged: Callable[[], worker._Session], spec: types.SimpleNamespace
) -> None:
    spec.baseline = lambda problem: wanted
    made = judged()
    assert made.baseline == "xla"
    assert made.baseline_call().tolist() == made.expected.tolist()


def test_an_op_may_have_several_results(judged: Callable[[], worker._Session], spec: types.SimpleNamespace) -> None:
    """One is infinite where it should be."""
    spec.reference = lambda problem, x: (2 * x, x / 0)
    spec.run = lambda problem, config, device, x: (2 * x, x / 0 if config == "fast" else x)
    assert [o.kind for o in judged().judge(["fast", "wrong"])] == ["ok", "wrong"]
