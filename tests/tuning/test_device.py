"""Where candidates are judged: a worker process that hangs or dies costs one candidate, not the run; and the model."""

from __future__ import annotations

import dataclasses
import functools
import multiprocessing
import os
import pickle
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core import aot
from mgpu_ops.core.gpu import find
from mgpu_ops.tuning import worker
from mgpu_ops.tuning.device import Measured, Modelled
from mgpu_ops.tuning.outcome import Final, Outcome
from tests.tuning import serving

GPU = find("h200")
MATMUL = spec_of("matmul")
PROBLEM = MatmulProblem(512, 512, 512)
OK = Outcome("ok", 10.0, 12.0, 0.001)
WRONG = Outcome("wrong", error=0.5, detail="error 0.5 exceeds 0.008")
SPILLS = Outcome("compile", detail="XlaRuntimeError: too many registers")
FINAL = Final({"ok": [1.0, 2.0]}, [3.0, 4.0])
ANSWERS = {
    name: pickle.dumps(answer)
    for name, answer in {
        "ready": worker.Ready(GPU, {"driver": "1.2", "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": "13000"}),
        "opened": worker.Opened("cudnn"),
        "failed": worker.Failed("ValueError: no such thing"),
        "ok": OK,
        "wrong": WRONG,
        "compile": SPILLS,
        "final": FINAL,
    }.items()
}
Start = Callable[..., Measured]


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    """Starts a device with a stand-in for the worker, opened for a problem; closes it at the end."""
    devices: list[Measured] = []

    def started(serve: Any = serving.serve, timeout: float = 1.0) -> Measured:
        device = Measured(timeout, functools.partial(serve, ANSWERS, str(log)))
        devices.append(device)
        device.open(MATMUL, PROBLEM, 0)
        return device

    yield started
    for device in devices:
        device.close()


def judge(device: Measured, *configs: str) -> list[tuple[str, str]]:
    return [(config, outcome.kind) for config, outcome in device.judge(configs)]


def starts(log: Path) -> int:
    return log.read_text().split().count("start")


# --- a worker process


def test_the_worker_tells_the_gpu_and_the_versions(start: Start) -> None:
    device = start()
    assert device.gpu == GPU
    assert device.versions["driver"] == "1.2"
    assert device.kind == "measured"


def test_the_worker_tells_what_it_times_beside_candidates(start: Start) -> None:
    """It alone knows whether an op's baseline runs there."""
    assert start().baseline == "cudnn"


@pytest.mark.parametrize(
    ("op", "changes", "name"),
    [
        ("matmul", {}, "xla"),
        ("grouped_matmul", {}, "dense"),
        ("ragged_contraction", {}, "dense"),
        ("flash_attention", {}, "cudnn"),
        ("flash_attention", {"soft_cap": True}, "xla"),
        ("flash_attention_backward", {"causal": True, "window_left": 99}, "cudnn"),
        ("flash_attention_backward", {"window_left": 99}, "xla"),
    ],
)
def test_the_baseline_is_the_ops_own_where_that_takes_the_problem(op: str, changes: dict[str, Any], name: str) -> None:
    spec = spec_of(op)
    problem = dataclasses.replace(next(iter(spec.shapes.values())), **changes)
    assert worker.baseline_of(spec, problem).name == name


def test_outcomes_come_back_whole_and_in_order(start: Start, log: Path) -> None:
    configs = ["ok", "wrong", "ok", "compile", "ok"]
    device = start()
    assert list(device.judge(configs)) == list(zip(configs, [OK, WRONG, OK, SPILLS, OK]))
    assert list(device.judge([])) == []
    assert device.finals(["ok"], 0.1) == FINAL
    assert log.read_text().split() == ["start", "open", "judge", "finals"]


def test_a_candidate_that_hangs_is_a_timeout_and_the_rest_are_judged(start: Start, log: Path) -> None:
    device = start()
    begin = time.monotonic()
    configs = ["ok1", "hang", "ok2", "ok3"]
    outcomes = dict(device.judge(configs))
    assert time.monotonic() - begin < 10
    assert list(outcomes) == configs
    assert outcomes["hang"] == Outcome("timeout", detail="no answer for 1 s")
    assert [outcomes[c] for c in ("ok1", "ok2", "ok3")] == [OK, OK, OK]
    assert log.read_text().split() == ["start", "open", "judge"] * 2


def test_the_timeout_is_of_one_candidate_not_of_all(start: Start) -> None:
    device = start(timeout=0.5)
    assert judge(device, "hang", "ok", "hang") == [("hang", "timeout"), ("ok", "ok"), ("hang", "timeout")]


def test_a_timeout_below_a_second_is_told_as_it_is(start: Start) -> None:
    ((_, outcome),) = start(timeout=0.5).judge(["hang"])
    assert outcome.detail == "no answer for 0.5 s"


def test_a_candidate_that_takes_the_process_down_is_a_crash_and_the_rest_are_judged(start: Start, log: Path) -> None:
    device = start()
    outcomes = dict(device.judge(["die", "ok1", "ok2"]))
    assert outcomes["die"] == Outcome("crash", detail="the worker process died (exit code -9)")
    assert [outcomes["ok1"], outcomes["ok2"]] == [OK, OK]
    assert starts(log) == 3  # all together, then one by one to learn who it was, then the rest


def test_every_candidate_may_fail_in_its_own_way(start: Start) -> None:
    device = start(timeout=0.5)
    wanted = [("die", "crash"), ("hang", "timeout"), ("wrong", "wrong"), ("raise", "crash"), ("compile", "compile")]
    assert judge(device, *(config for config, _ in wanted)) == wanted
    assert judge(device, "ok") == [("ok", "ok")]


def test_an_exception_in_the_worker_is_a_crash_with_its_text(start: Start) -> None:
    outcomes = dict(start().judge(["raise", "ok"]))
    assert outcomes == {"raise": Outcome("crash", detail="ValueError: no such thing"), "ok": OK}


def test_a_worker_that_dies_between_two_batches_is_replaced(start: Start) -> None:
    """A kernel's illegal access may show after its result was read; the out-of-memory killer comes at any time."""
    device = start()
    assert judge(device, "answer, then die") == [("answer, then die", "ok")]
    device._process.join(10)
    kinds = dict(judge(device, "ok1", "ok2"))
    assert list(kinds) == ["ok1", "ok2"]
    assert kinds["ok2"] == "ok"


def test_a_worker_that_died_before_the_final_is_a_worker_error(start: Start) -> None:
    device = start()
    judge(device, "answer, then die")
    device._process.join(10)
    with pytest.raises(worker.WorkerError):
        device.finals(["ok"], 0.1)


def test_finals_that_hang_are_a_worker_error_and_the_worker_is_replaced(start: Start) -> None:
    device = start(timeout=0.5)
    with pytest.raises(worker.WorkerError, match="the finalists could not be measured: no answer in time"):
        device.finals(["hang"], 0.1)
    assert judge(device, "ok") == [("ok", "ok")]


def test_a_worker_that_cannot_be_replaced_is_a_worker_error(start: Start) -> None:
    device = start(serving.start_once)
    with pytest.raises(worker.WorkerError, match=r"did not start: the worker process died \(exit code 4\)"):
        judge(device, "die", "ok")


def test_a_problem_that_cannot_be_prepared_is_a_worker_error_that_names_it() -> None:
    device = Measured(1.0, functools.partial(serving.refuse_to_open, ANSWERS))
    with pytest.raises(worker.WorkerError, match=r"could not prepare Problem\(m=512.*: ValueError: no such"):
        device.open(MATMUL, PROBLEM, 0)
    device.close()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (serving.exit_at_once, r"died \(exit code 3\)"),
        (functools.partial(serving.refuse, ANSWERS), "ValueError: no such thing"),
        (serving.say_nothing, "no answer in time"),
    ],
    ids=["exits", "refuses", "says nothing"],
)
def test_a_worker_that_never_starts_is_a_worker_error_and_leaves_no_process(
    serve: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    receive = Measured._receive
    monkeypatch.setattr(Measured, "_receive", lambda self, seconds: receive(self, min(seconds, 2.0)))
    with pytest.raises(worker.WorkerError, match=f"the GPU worker did not start: .*{reason}"):
        Measured(1.0, serve)
    assert multiprocessing.active_children() == []


def test_closing_ends_the_process(start: Start) -> None:
    device = start()
    process = device._process
    assert process.is_alive()
    device.close()
    assert multiprocessing.active_children() == []


def test_the_real_worker_refuses_a_machine_without_a_hopper_gpu() -> None:
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        pytest.skip("this machine's own devices are in use")
    with pytest.raises(worker.WorkerError, match="did not start: WorkerError: cpu is not a Hopper GPU"):
        Measured()


@pytest.mark.parametrize(
    ("error", "line"),
    [
        (ValueError("one"), "ValueError: one"),
        (RuntimeError("\n first \nsecond\n"), "RuntimeError: first "),
        (KeyError(), "KeyError: "),
        (ValueError("x" * 1000), "ValueError: " + "x" * 188),
    ],
    ids=["one line", "many", "empty", "long"],
)
def test_an_exception_is_told_in_one_line_of_at_most_200_characters(error: Exception, line: str) -> None:
    assert worker.first_line(error) == line


# --- the model


def modelled(compile: bool | None) -> Modelled:
    device = Modelled(GPU, compile)
    device.open(MATMUL, PROBLEM, 0)
    return device


def test_the_model_judges_by_cost_in_microseconds() -> None:
    device = modelled(compile=False)
    config = MATMUL.default(PROBLEM, GPU)
    us = MATMUL.cost(PROBLEM, config, GPU) * 1e6
    assert list(device.judge([config])) == [(config, Outcome("ok", us))]
    assert device.finals([config], 1.0) == Final({config: [us]}, [])
    assert (device.kind, device.baseline, device.versions["driver"]) == ("modelled", None, None)


def test_candidates_are_compiled_where_the_compilers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "available", lambda: None)
    assert Modelled(GPU).compiles
    monkeypatch.setattr(aot, "available", lambda: "ptxas is missing")
    assert not Modelled(GPU).compiles


def test_what_does_not_compile_or_spills_is_a_compile_failure_with_its_reason(monkeypatch: pytest.MonkeyPatch) -> None:
    class Report:
        spills = 0

    device, config = modelled(compile=True), MATMUL.default(PROBLEM, GPU)
    monkeypatch.setattr(aot, "compile_for", lambda *args: Report)
    assert [outcome.kind for _, outcome in device.judge([config])] == ["ok"]
    monkeypatch.setattr(Report, "spills", 48)
    assert list(device.judge([config])) == [(config, Outcome("compile", detail="48 bytes of registers spill"))]

    def fails(*args: Any) -> Any:
        raise RuntimeError("ptxas fatal: too much\nmore lines")

    monkeypatch.setattr(aot, "compile_for", fails)
    assert list(device.judge([config])) == [(config, Outcome("compile", detail="RuntimeError: ptxas fatal: too much"))]


@pytest.mark.skipif(aot.available() is not None, reason=f"needs the extra aot: {aot.available()}")
def test_the_default_of_a_small_problem_compiles_for_real() -> None:
    ((_, outcome),) = modelled(compile=True).judge([MATMUL.default(PROBLEM, GPU)])
    assert (outcome.kind, outcome.detail) == ("ok", "")
