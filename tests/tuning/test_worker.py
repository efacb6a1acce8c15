"""What the worker makes of candidates, with a toy op on the CPU in place of a kernel and a clock in place of CUPTI."""

from __future__ import annotations

import collections
import dataclasses
import functools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry.spec import Baseline
from mgpu_ops.tuning import measure, worker
from mgpu_ops.tuning.outcome import Outcome, SustainedFinal, Turn

TIMES = {"fast": 1.0, "slow": 3.0}


@dataclasses.dataclass(frozen=True)
class Problem:
    m: int


PROBLEM = Problem(8)

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


runs: collections.Counter[str] = collections.Counter()


def run(problem: Problem, config: str, device: Any, x: Any, interpret: bool = False) -> Any:
    if config == "does not compile":
        raise ValueError("tile too large\nand more")
    if config in ("varies", "varies later", "varies much"):
        return jax.pure_callback(functools.partial(_varying, config), jax.ShapeDtypeStruct(x.shape, x.dtype), x)
    return {"wrong": x, "nan": x * jnp.nan}.get(config, 2 * x)


def _varying(config: str, x: Any) -> Any:
    """Not the same in every run: at once, or from the third one on; by less than is tolerated, or more."""
    runs[config] += 1
    size = 1e-2 if config == "varies much" else 1e-5
    return np.asarray(2 * x) * np.float32(1 + size * (runs[config] > (2 if config == "varies later" else 1)))


@pytest.fixture
def spec() -> types.SimpleNamespace:
    ran.clear()
    runs.clear()
    return types.SimpleNamespace(
        name="double",
        Problem=Problem,
        inputs=lambda problem, key: (jnp.arange(1.0, 1.0 + problem.m),),
        reference=reference,
        run=run,
        tolerance=lambda problem: 1e-3,
        baseline=None,
        devices=lambda problem: 1,
    )


class Judge:
    """A session whose executables are the configs' own names, and whose GPU takes TIMES; `speed` slows it by the call."""

    def __init__(self, spec: Any, monkeypatch: pytest.MonkeyPatch, problem: Any = PROBLEM, baseline_us: float | None = None):
        self.speed: Callable[[int], float] = lambda call: 1.0
        self.calls = 0
        self.timed: list[list[str]] = []
        self.said: list[str] = []
        self.during: Callable[[str], None] = lambda config: None  # what a candidate does while it is timed
        monkeypatch.setattr(measure, "interleaved", self._interleaved)
        monkeypatch.setattr(worker, "_PAUSE", 0.0)
        monkeypatch.setattr(aot, "load", self._load)
        self.session: Any = None
        self.session = worker._Session(spec, problem, 0, baseline_us, self.said.append)
        self.timed.clear()

    def __call__(self, *configs: str) -> list[Outcome]:
        return [self.session.judge(config, config) for config in configs]

    def _load(self, executable: Any) -> Any:
        x = self.session.arrays[0]
        return jax.jit(lambda x: self.session.spec.run(self.session.problem, executable, None, x)).lower(x).compile()

    def _interleaved(self, functions: Sequence[Any], device: Any, rounds: int, *_: int) -> list[list[float]]:
        names = {id(call): config for config, call in (self.session.calls if self.session else {}).items()}
        configs = [names.get(id(f.func), "baseline") for f in functions]
        self.timed.append(configs)
        for f, config in zip(functions, configs):
            f()
            self.during(config)
        speed = self.speed(self.calls)
        self.calls += 1
        return [[TIMES.get(config, 2.0) * speed] * rounds for config in configs]


@pytest.fixture
def start(monkeypatch: pytest.MonkeyPatch, spec: types.SimpleNamespace) -> Callable[..., Judge]:
    monkeypatch.setattr(gpu, "from_device", lambda device: gpu.find("h200"))
    return functools.partial(Judge, spec, monkeypatch)


# --- what becomes of a candidate


def test_each_candidate_gets_its_kind(start: Callable[..., Judge]) -> None:
    judge = start()
    judge.during = breaks
    outcomes = judge("fast", "does not compile", "wrong", "nan", "breaks", "slow", "does not fit")
    assert [o.kind for o in outcomes] == ["ok", "compile", "wrong", "wrong", "crash", "ok", "memory"]
    assert outcomes[1].detail == "ValueError: tile too large"
    assert "exceeds 0.001" in outcomes[2].detail
    assert outcomes[4].detail == "RuntimeError: illegal address"
    assert outcomes[6].detail == "RuntimeError: RESOURCE_EXHAUSTED: Out of memory"
    assert not judge.session.spoilt


def breaks(config: str) -> None:
    if config == "breaks":
        raise RuntimeError("illegal address")
    if config == "does not fit":
        raise RuntimeError("RESOURCE_EXHAUSTED: Out of memory\nallocating 1 TB")


def test_a_good_candidate_comes_with_its_times_the_baselines_and_its_error(start: Callable[..., Judge]) -> None:
    (outcome,) = start()("slow")
    assert (outcome.us, outcome.baseline_us, outcome.error, outcome.detail) == (3.0, 2.0, 0.0, "")
    assert len(outcome.samples) >= 5
    assert set(outcome.samples) == {3.0}


def test_a_wrong_candidate_is_never_timed(start: Callable[..., Judge]) -> None:
    judge = start()
    (outcome,) = judge("wrong")
    assert outcome.us is None
    assert judge.timed == []


def test_a_result_that_is_not_the_same_twice_is_wrong(start: Callable[..., Judge]) -> None:
    """Each is within tolerance: what races today by little, may tomorrow by much."""
    judge = start()
    for config in ("varies", "varies later"):  # in the second run, and after it was timed
        (outcome,) = judge(config)
        assert (outcome.kind, outcome.detail, outcome.us) == ("wrong", "two runs on the same inputs differ", None)
    assert judge.timed.count(["varies later", "baseline"]) >= 1


@dataclasses.dataclass(frozen=True)
class Loose:
    m: int = 8
    deterministic: bool = False


def test_a_problem_may_say_that_its_results_need_not_be_the_same_but_each_must_be_right(start: Callable[..., Judge]) -> None:
    assert [o.kind for o in start(Loose())("varies")] == ["ok"]
    (outcome,) = start(Loose(deterministic=True))("varies later")
    assert outcome.kind == "wrong"


def test_the_second_run_must_be_right_too(start: Callable[..., Judge]) -> None:
    (outcome,) = start(Loose())("varies much")
    assert (outcome.kind, outcome.us) == ("wrong", None)
    assert "exceeds 0.001" in outcome.detail


def test_a_candidate_that_leaves_the_gpu_broken_spoils_the_worker(start: Callable[..., Judge]) -> None:
    judge = start()
    judge.during = breaks

    def broken() -> None:
        raise RuntimeError("CUDA_ERROR_ILLEGAL_ADDRESS")

    judge.session.baseline_call = broken
    (outcome,) = judge("breaks")
    assert outcome.kind == "crash"
    assert judge.session.spoilt


def test_a_candidate_that_writes_to_the_inputs_is_wrong_and_spoils_the_worker(start: Callable[..., Judge]) -> None:
    judge = start()

    def overwrites(config: str) -> None:
        if config == "overwrites":
            judge.session.expected = judge.session.expected.at[3].add(1e-4)  # less than is tolerated

    judge.during = overwrites
    assert [o.kind for o in judge("fast", "overwrites")] == ["ok", "wrong"]
    assert judge.session.spoilt


def test_where_executables_are_not_loaded_candidates_compile_here_and_that_is_said_once(
    start: Callable[..., Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = start()
    tried: list[Any] = []

    def refused(executable: Any) -> Any:
        tried.append(executable)
        raise RuntimeError("UNIMPLEMENTED: deserialize")

    monkeypatch.setattr(aot, "load", refused)
    assert [o.kind for o in judge("fast", "slow", "does not compile")] == ["ok", "ok", "compile"]
    assert tried == ["fast", "slow"]  # twice: the first may only want for a library that compiling opens
    assert judge.said == [
        "candidates compile a second time, beside the measurements: what was compiled is not loaded"
        " (RuntimeError: UNIMPLEMENTED: deserialize)"
    ]


# --- a clock that drifts


def test_samples_are_taken_again_while_the_gpu_is_slower_than_it_was(start: Callable[..., Judge]) -> None:
    judge = start()
    first = judge.calls
    judge.speed = lambda call: 1.5 if call in (first + 1, first + 2) else 1.0  # not the rough times, but the first two takes
    (outcome,) = judge("slow")
    assert (outcome.us, outcome.baseline_us, outcome.detail) == (3.0, 2.0, "")
    assert len(judge.timed) == 4
    assert judge.said == []


def test_where_the_gpu_stays_slower_times_are_scaled_to_the_first_and_that_is_said_once(start: Callable[..., Judge]) -> None:
    judge = start()
    judge.speed = lambda call: 1.25
    for outcome in judge("slow", "fast", "slow"):
        assert outcome.us == {True: 3.0, False: 1.0}[outcome.us > 2]
        assert outcome.baseline_us == 2.0
        assert set(outcome.samples) == {outcome.us}
        assert outcome.detail == "times scaled by 0.800: the GPU's clock has drifted"
    assert len(judge.timed) == (1 + 4) + 2 + 2  # once it is known, samples are taken once
    (said,) = judge.said
    assert said.startswith("the GPU's clock has drifted: xla took 2.0 us and takes 2.5 us;")


def test_a_clock_that_comes_back_is_followed(start: Callable[..., Judge]) -> None:
    judge = start()
    judge.speed = lambda call: 1.25
    judge("slow")
    judge.speed = lambda call: 1.0
    (outcome,) = judge("fast")
    assert (outcome.us, outcome.detail) == (1.0, "")


def test_a_few_percent_are_not_a_drift(start: Callable[..., Judge]) -> None:
    judge = start()
    judge.speed = lambda call: 1.03
    (outcome,) = judge("slow")
    assert outcome.us == pytest.approx(3.09)
    assert len(judge.timed) == 2


def test_a_worker_that_replaces_another_scales_to_that_ones_times(start: Callable[..., Judge]) -> None:
    (outcome,) = start(PROBLEM, 1.0)("slow")  # the baseline took 1 us then, and 2 us now
    assert (outcome.us, outcome.baseline_us) == (1.5, 1.0)


# --- finals


def test_the_final_measures_candidates_that_were_judged_by_an_earlier_worker_too(start: Callable[..., Judge]) -> None:
    judge = start()
    final = judge.session.finals([("slow", "slow"), ("fast", "fast")], 0.001)
    assert set(final.samples["slow"]) == {3.0}
    assert set(final.samples["fast"]) == {1.0}
    assert set(final.baseline) == {2.0}
    assert judge.timed[-1] == ["slow", "fast", "baseline"]


def test_a_finalist_that_is_wrong_now_is_out_and_that_is_said(start: Callable[..., Judge]) -> None:
    judge = start()
    final = judge.session.finals([("slow", "slow"), ("varies", "varies"), ("wrong", "wrong")], 0.001)
    assert list(final.samples) == ["slow"]
    assert [text.partition(":")[0] for text in judge.said] == ["a finalist is out"] * 2


def test_a_final_in_which_inputs_were_overwritten_is_none(start: Callable[..., Judge]) -> None:
    judge = start()

    def overwrites(config: str) -> None:
        judge.session.arrays = (judge.session.arrays[0] + 1,)

    judge.during = overwrites
    with pytest.raises(RuntimeError, match="writes outside its result"):
        judge.session.finals([("slow", "slow")], 0.001)


def test_sustained_turns_are_of_the_candidates_that_are_right_and_of_the_baseline(
    start: Callable[..., Judge], monkeypatch: pytest.MonkeyPatch
) -> None:
    judge = start()
    asked: list[tuple[int, float]] = []

    def sustained(functions: Sequence[Any], seconds: float, meter: Any) -> list[list[Turn]]:
        asked.append((len(functions), seconds))
        return [[Turn(float(i))] for i, f in enumerate(functions) if f() is not None]

    monkeypatch.setattr(measure, "sustained", sustained)
    monkeypatch.setitem(sys.modules, "pynvml", None)
    final = judge.session.sustained([("slow", "slow"), ("wrong", "wrong"), ("fast", "fast")], 0.5)
    assert final == SustainedFinal({"slow": [Turn(0.0)], "fast": [Turn(1.0)]}, [Turn(2.0)])
    assert asked == [(3, 0.5)]
    assert [text.partition(":")[0] for text in judge.said] == ["a finalist is out", "clock, watts and joules are not measured"]


# --- what is timed beside candidates


def test_without_a_baseline_of_its_own_an_op_is_measured_beside_its_reference(
    start: Callable[..., Judge], spec: types.SimpleNamespace
) -> None:
    judge = start()
    made = judge.session
    assert made.baseline == "xla"
    assert made.baseline_call().tolist() == made.expected.tolist()
    assert ran == ["reference"]  # compiled once, for both


def test_a_baseline_is_timed_and_the_reference_is_what_results_are_compared_with(
    start: Callable[..., Judge], spec: types.SimpleNamespace
) -> None:
    """The baseline computes something else: candidates that agree with the reference are right all the same."""
    spec.baseline = lambda problem: Baseline("dense", yardstick)
    judge = start()
    made = judge.session
    assert made.baseline == "dense"
    assert made.baseline_call().tolist() == (made.arrays[0] + 1).tolist()
    right, wrong = judge("fast", "wrong")
    assert (right.kind, right.error, right.baseline_us, wrong.kind) == ("ok", 0.0, 2.0, "wrong")


def test_a_baseline_may_start_from_arrays_that_are_made_once_and_not_timed(
    start: Callable[..., Judge], spec: types.SimpleNamespace
) -> None:
    spec.baseline = lambda problem: Baseline("pairs", longer, halves)
    judge = start()
    made = judge.session
    assert (made.baseline, made.baseline_call().tolist()) == ("pairs", [3.0, 7.0, 11.0, 15.0])
    judge("fast")
    assert ran.count("halves") == 1


@pytest.mark.parametrize("wanted", [None, Baseline("library", refused), Baseline("library", longer, refused)])
def test_the_reference_stands_in_for_a_baseline_that_is_none_of_a_problem_or_cannot_run(
    wanted: Baseline | None, start: Callable[..., Judge], spec: types.SimpleNamespace
) -> None:
    spec.baseline = lambda problem: wanted
    judge = start()
    made = judge.session
    assert made.baseline == "xla"
    assert made.baseline_call().tolist() == made.expected.tolist()


def test_an_op_may_have_several_results(start: Callable[..., Judge], spec: types.SimpleNamespace) -> None:
    """One is infinite where it should be."""
    spec.reference = lambda problem, x: (2 * x, x / 0)
    spec.run = lambda problem, config, device, x: (2 * x, x / 0 if config == "fast" else x)
    assert [o.kind for o in start()("fast", "wrong")] == ["ok", "wrong"]


# --- requests


class Pipe:
    """Gives the process these requests, then closes; keeps its answers."""

    def __init__(self, *requests: worker.Request):
        self.requests, self.answers = list(requests), list[worker.Answer]()

    def recv(self) -> worker.Request:
        if not self.requests:
            raise EOFError
        return self.requests.pop(0)

    def send(self, answer: worker.Answer) -> None:
        self.answers.append(answer)


def test_every_request_is_answered_and_one_that_fails_with_its_reason(
    start: Callable[..., Judge], spec: types.SimpleNamespace, monkeypatch: pytest.MonkeyPatch
) -> None:
    ready = worker.Ready(gpu.find("h200"), {})
    monkeypatch.setattr(worker, "settle", lambda: None)
    monkeypatch.setattr(worker, "_ready", lambda: ready)
    monkeypatch.setattr(measure, "interleaved", lambda functions, device, rounds, *_: [[2.0] * rounds for _ in functions])
    monkeypatch.setattr(aot, "load", lambda executable: jax.jit(functools.partial(run, PROBLEM, executable, None)))
    judge: Any = worker.Judge("fast", "fast")
    pipe = Pipe(judge, worker.Open("double", PROBLEM, 0), judge, worker.Finals([("fast", judge.executable)], 0.001))
    worker.serve(pipe, specs=lambda op: spec)
    said, failed, opened, verdict, final = pipe.answers
    assert said == ready
    assert failed == worker.Failed("WorkerError: no problem is open")
    assert opened == worker.Opened("xla", 2.0)
    assert (verdict.outcome.kind, verdict.spoilt) == ("ok", False)  # type: ignore[union-attr]
    assert list(final.samples) == ["fast"]  # type: ignore[union-attr]


# --- problems of several devices


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_a_collective_is_judged_on_as_many_devices_as_it_takes(kind: str, start: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """With XLA's algorithm, which runs on any device: inputs lie on four, and the first of sixteen results counts."""
    spec = mgpu_ops.spec_of(kind)
    shares: list[tuple[int, ...]] = []

    def interleaved(functions: Sequence[Any], device: Any, rounds: int, *of: int) -> list[list[float]]:
        shares.append(of)
        for function in functions:
            jax.block_until_ready(function())
        return [[1.0] * rounds for _ in functions]

    monkeypatch.setattr(measure, "interleaved", interleaved)
    monkeypatch.setattr(worker, "_PAUSE", 0.0)
    problem = mgpu_ops.CollectiveProblem(4096, 4, "float32")
    session = worker._Session(spec, problem, 0, None, print)
    session.loads = 0
    assert len(session.arrays[0].sharding.device_set) == 4
    outcome = session.judge(mgpu_ops.CollectiveConfig("xla", 1, 2048, 2), None)
    assert (outcome.kind, outcome.us) == ("ok", 1.0)
    assert outcome.error < 1e-6
    assert set(shares) == {(4, 16)}


def test_more_devices_than_there_are_is_an_error_that_says_so(start: Any) -> None:
    with pytest.raises(worker.WorkerError, match="it takes 16 GPUs, and the worker has 8"):
        worker._Session(mgpu_ops.spec_of("all_reduce"), mgpu_ops.CollectiveProblem(4096, 16), 0, None, print)
