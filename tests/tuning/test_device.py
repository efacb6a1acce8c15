"""Where candidates are judged: a worker process that hangs or dies costs one candidate, not the run; and the model."""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import multiprocessing
import os
import pickle
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core import aot
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import find
from mgpu_ops.registry.spec import baseline_of
from mgpu_ops.tuning import neighbours, worker
from mgpu_ops.tuning.compile_pool import CompileJob
from mgpu_ops.tuning.device import Measured, Modelled
from mgpu_ops.tuning.outcome import Final, Outcome, SustainedFinal, Turn
from tests.tuning import serving

GPU = find("h200")
MATMUL = spec_of("matmul")
PROBLEM = MatmulProblem(512, 512, 512)
OK = Outcome("ok", 10.0, 12.0, 0.001)
WRONG = Outcome("wrong", error=0.5, detail="error 0.5 exceeds 0.008")
POISON = Outcome("crash", detail="XlaRuntimeError: CUDA_ERROR_ILLEGAL_ADDRESS")
FINAL = Final({"ok": [1.0, 2.0]}, [3.0, 4.0])
SUSTAINED = SustainedFinal({"ok": [Turn(1.0, 1500.0, 700.0, 7e-4)]}, [Turn(2.0)])
ANSWERS = {
    name: pickle.dumps(answer)
    for name, answer in {
        "ready": worker.Ready(GPU, {"driver": "1.2", "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": "13000"}, b"topology"),
        "opened": worker.Opened("cudnn", 20.0),
        "failed": worker.Failed("ValueError: no such thing"),
        "ok": worker.Verdict(OK),
        "wrong": worker.Verdict(WRONG),
        "poison": worker.Verdict(POISON, spoilt=True),
        "note": worker.Note("the clock has drifted"),
        "final": FINAL,
        "sustained": SUSTAINED,
    }.items()
}
Start = Callable[..., Measured]


class Compiler:
    """In place of a pool: "spills" and "compile" fail, "late" takes until it is let go; the rest compiles at once."""

    processes = 2

    def __init__(self) -> None:
        self.tasks: list[CompileJob] = []
        self.late: concurrent.futures.Future[Executable | Outcome] = concurrent.futures.Future()
        self.closed = False

    def submit(self, task: CompileJob) -> concurrent.futures.Future[Executable | Outcome]:
        self.tasks.append(task)
        if task.config == "late":
            return self.late
        future: concurrent.futures.Future[Executable | Outcome] = concurrent.futures.Future()
        if task.config == "compile":
            future.set_result(Outcome("compile", detail="ptxas fatal"))
        else:
            future.set_result(executable(spills=48 * (task.config in ("spills", MATMUL.default(PROBLEM, GPU)))))
        return future

    def close(self) -> None:
        self.closed = True


def executable(spills: int = 0) -> Executable:
    return Executable(b"machine code", (None, None), registers=168, spills=spills)


@pytest.fixture
def log(tmp_path: Path) -> Path:
    return tmp_path / "log"


@pytest.fixture
def start(log: Path) -> Iterator[Start]:
    """Starts a device with stand-ins for the worker and the compilers, opened for a problem; closes it at the end."""
    devices: list[Measured] = []

    def started(serve: Any = serving.serve, timeout: float = 300.0) -> Measured:
        device = Measured(timeout=timeout, pool=Compiler(), serve=functools.partial(serve, ANSWERS, str(log)))  # type: ignore[arg-type]
        devices.append(device)
        device.open(MATMUL, PROBLEM, 0)
        return device

    yield started
    for device in devices:
        device.close()


def judged(device: Any, *configs: Any) -> list[tuple[Any, Outcome]]:
    for config in configs:
        device.submit(config)
    return [device.next() for _ in configs]


def judge(device: Any, *configs: Any) -> list[tuple[Any, str]]:
    return [(config, outcome.kind) for config, outcome in judged(device, *configs)]


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
    assert baseline_of(spec, problem).name == name


def test_outcomes_come_back_whole(start: Start, log: Path) -> None:
    configs = ["ok", "wrong", "ok2", "ok3"]
    device = start()
    assert judged(device, *configs) == list(zip(configs, [OK, WRONG, OK, OK]))
    assert device.finals(["ok"], 0.1) == FINAL
    assert log.read_text().split() == ["start", "open", *["judge"] * 4, "finals"]


def test_nothing_under_way_is_a_lookup_error(start: Start) -> None:
    with pytest.raises(LookupError, match="no candidate is under way"):
        start().next()


def test_what_does_not_compile_or_spills_never_reaches_the_gpu(start: Start, log: Path) -> None:
    device = start()
    assert judged(device, "compile", "spills") == [
        ("compile", Outcome("compile", detail="ptxas fatal")),
        ("spills", Outcome("compile", detail="48 bytes of registers spill")),
    ]
    assert "judge" not in log.read_text()


def test_what_spills_where_no_loop_reads_it_is_measured(start: Start) -> None:
    device = start()
    device.open(dataclasses.replace(MATMUL, spills_outside_loops=lambda config: 48), PROBLEM, 0)
    assert judge(device, "spills") == [("spills", "ok")]
    device.open(dataclasses.replace(MATMUL, spills_outside_loops=lambda config: 47), PROBLEM, 0)
    assert judge(device, "spills") == [("spills", "compile")]


def test_the_default_is_measured_even_if_it_spills(start: Start) -> None:
    """It is what runs where nothing is stored: whatever is stored must be known to be faster."""
    default = MATMUL.default(PROBLEM, GPU)
    assert judge(start(), default) == [(default, "ok")]


def test_candidates_are_measured_as_they_are_compiled_not_as_they_were_submitted(start: Start) -> None:
    device = start()
    device.submit("late")
    device.submit("ok")
    assert device.next() == ("ok", OK)
    device._pool.late.set_result(executable())  # type: ignore[attr-defined]
    assert device.next() == ("late", OK)


def test_candidates_compile_for_the_very_gpu_that_runs_them(start: Start) -> None:
    device = start()
    judge(device, "ok")
    assert device._pool.tasks == [CompileJob("matmul", PROBLEM, "ok", GPU, b"topology")]  # type: ignore[attr-defined]


def test_a_problem_opened_anew_forgets_candidates_of_the_one_before(start: Start) -> None:
    device = start()
    device.submit("late")
    device.open(MATMUL, PROBLEM, 0)
    device._pool.late.set_result(executable())  # type: ignore[attr-defined]
    assert judge(device, "ok") == [("ok", "ok")]
    with pytest.raises(LookupError):
        device.next()


def test_candidates_of_a_problem_that_comes_later_compile_in_advance_and_are_under_way_once_it_is_open(start: Start) -> None:
    device, later = start(), dataclasses.replace(PROBLEM, m=1024)
    device.prepare(MATMUL, later, ["ok1", "ok2"])  # type: ignore[list-item]
    assert [task.config for task in device._pool.tasks] == ["ok1", "ok2"]  # type: ignore[attr-defined]
    assert judge(device, "ok") == [("ok", "ok")]
    device.open(MATMUL, later, 0)
    assert [device.next()[0] for _ in range(2)] == ["ok1", "ok2"]
    with pytest.raises(LookupError):
        device.next()


def test_a_candidate_that_hangs_is_a_timeout_and_the_rest_are_judged(start: Start, log: Path) -> None:
    device = start(timeout=2.0)
    configs = ["ok1", "hang", "ok2", "ok3"]
    outcomes = dict(judged(device, *configs))
    assert outcomes["hang"] == Outcome("timeout", detail="no answer for 2 s")
    assert [outcomes[c] for c in ("ok1", "ok2", "ok3")] == [OK, OK, OK]
    assert starts(log) == 2


def test_a_candidate_has_a_hundred_times_the_baselines_time_beyond_the_timeout(start: Start) -> None:
    """20 us here: what takes long because the problem is large is not a hang."""
    assert start(timeout=0.5)._limit == pytest.approx(0.5 + 100 * 20e-6)


def test_a_candidate_that_takes_the_process_down_twice_is_a_crash_and_the_rest_are_judged(start: Start, log: Path) -> None:
    outcomes = dict(judged(start(), "die", "ok1", "ok2"))
    assert outcomes["die"] == Outcome("crash", detail="the process died (exit code -9)")
    assert [outcomes["ok1"], outcomes["ok2"]] == [OK, OK]
    assert starts(log) == 3


def test_a_candidate_at_which_the_worker_was_killed_from_outside_is_measured_after_all(start: Start, log: Path) -> None:
    assert judged(start(), "die once", "ok") == [("die once", OK), ("ok", OK)]
    assert starts(log) == 2


def test_a_candidate_that_has_spoilt_the_worker_keeps_its_outcome_and_the_next_gets_a_new_one(start: Start, log: Path) -> None:
    """An illegal address poisons the CUDA context: every later call of the process fails."""
    assert judged(start(), "poison", "ok") == [("poison", POISON), ("ok", OK)]
    assert starts(log) == 2


def test_every_candidate_may_fail_in_its_own_way(start: Start) -> None:
    device = start(timeout=2.0)
    wanted = [("compile", "compile"), ("die", "crash"), ("hang", "timeout"), ("wrong", "wrong"), ("raise", "crash")]
    assert judge(device, *(config for config, _ in wanted)) == wanted
    assert judge(device, "ok") == [("ok", "ok")]


def test_a_worker_that_dies_between_two_candidates_is_replaced_and_nobody_is_blamed(start: Start) -> None:
    """The out-of-memory killer comes at any time."""
    device = start()
    assert judge(device, "ok, then die") == [("ok, then die", "ok")]
    device._child._process.join(300)
    assert judge(device, "ok1", "ok2") == [("ok1", "ok"), ("ok2", "ok")]


def test_the_new_worker_learns_how_fast_the_gpu_was(start: Start, monkeypatch: pytest.MonkeyPatch) -> None:
    """Times of both are compared with each other."""
    device = start()
    sent: list[Any] = []
    send = type(device._child).send
    monkeypatch.setattr(type(device._child), "send", lambda self, request: sent.append(request) or send(self, request))
    judge(device, "die")
    assert [request for request in sent if isinstance(request, worker.Open)] == [worker.Open("matmul", PROBLEM, 0, 20.0)]


def test_an_answer_that_ctrl_c_cut_off_is_not_taken_for_a_later_one(start: Start, log: Path) -> None:
    device = start()

    def ctrl_c() -> None:
        raise KeyboardInterrupt

    device._check = ctrl_c  # type: ignore[method-assign]
    device.submit("wrong")
    with pytest.raises(KeyboardInterrupt):
        device.next()
    del device._check
    assert judge(device, "ok") == [("ok", "ok")]
    assert starts(log) == 2


def test_a_device_that_is_stopped_interrupts_the_thread_that_waits_for_it(start: Start) -> None:
    device = start()
    for config in ("hang", "late"):  # it waits for the worker, for a compiler
        device._stopped.clear()
        device.submit(config)
        threading.Timer(0.2, device.stop).start()
        with pytest.raises(KeyboardInterrupt):
            device.next()


def test_notes_are_kept_and_logged_once(start: Start, caplog: pytest.LogCaptureFixture) -> None:
    device = start()
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        assert judge(device, "note") == [("note", "ok")]
        device._note("the clock has drifted")
    assert device.notes == ["the clock has drifted"]
    assert caplog.messages == ["the clock has drifted"]


# --- finals


def test_finalists_without_an_executable_are_compiled_and_those_that_fail_left_out(start: Start, monkeypatch: Any) -> None:
    """As where they were measured by another process, or before a tuner was killed."""
    device = start()
    judge(device, "ok")
    sent: list[Any] = []
    ask = device._ask
    monkeypatch.setattr(device, "_ask", lambda seconds, request: sent.append(request) or ask(seconds, request))
    assert device.finals(["ok", "other", "compile"], 0.1) == FINAL
    assert [config for config, _ in sent[0].candidates] == ["ok", "other"]
    assert len(device._pool.tasks) == 3  # type: ignore[attr-defined]


def test_a_worker_that_died_before_the_final_is_replaced(start: Start) -> None:
    device = start()
    judge(device, "ok, then die")
    device._child._process.join(300)
    assert device.finals(["ok"], 0.1) == FINAL


def test_a_finalist_that_hangs_is_found_and_the_others_are_measured(start: Start, monkeypatch: Any) -> None:
    device = start(timeout=2.0)
    sent: list[Any] = []
    ask = device._ask
    monkeypatch.setattr(device, "_ask", lambda seconds, request: sent.append(request) or ask(seconds, request))
    assert device.finals(["ok", "hang"], 0.1) == FINAL
    finals = [request for request in sent if isinstance(request, worker.Finals)]
    assert [[config for config, _ in request.candidates] for request in finals] == [["ok", "hang"], ["ok"]]


def test_the_finalists_run_without_pause_in_the_worker(start: Start) -> None:
    device = start()
    judge(device, "ok")
    assert device.sustained(["ok", "compile"], 0.1) == SUSTAINED


def test_sustained_turns_that_take_the_worker_down_are_a_worker_error_and_the_next_candidate_is_judged(start: Start) -> None:
    device = start()
    judge(device, "ok")
    with pytest.raises(worker.WorkerError, match="the finalists could not be measured sustained"):
        device.sustained(["ok", "die"], 0.1)
    assert judge(device, "ok") == [("ok", "ok")]


def test_finals_that_always_take_the_worker_down_are_a_worker_error(start: Start, monkeypatch: Any) -> None:
    device = start()
    monkeypatch.setattr(device, "_judge", lambda config, made: OK)
    with pytest.raises(worker.WorkerError, match=r"the finalists could not be measured: the process died"):
        device.finals(["die"], 0.1)
    assert judge(device, "ok") == [("ok", "ok")]


# --- workers that do not start, and that end


def test_a_worker_that_cannot_be_replaced_is_lost(start: Start) -> None:
    device = start(serving.start_once)
    with pytest.raises(worker.Lost, match=r"did not start: the process died \(exit code 4\)"):
        judge(device, "die", "ok")


def test_a_problem_that_cannot_be_prepared_is_a_worker_error_that_names_it() -> None:
    device = Measured(timeout=300.0, pool=Compiler(), serve=functools.partial(serving.refuse_to_open, ANSWERS))  # type: ignore[arg-type]
    with pytest.raises(worker.WorkerError, match=r"could not prepare Problem\(m=512.*: ValueError: no such"):
        device.open(MATMUL, PROBLEM, 0)
    device.close()


@pytest.mark.parametrize(
    ("serve", "reason"),
    [
        (serving.exit_at_once, r"died \(exit code 3\)"),
        (functools.partial(serving.refuse, ANSWERS), "ValueError: no such thing"),
        (serving.say_nothing, "no answer for 2 s"),
    ],
    ids=["exits", "refuses", "says nothing"],
)
def test_a_worker_that_never_starts_is_a_worker_error_and_leaves_no_process(
    serve: Any, reason: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr("mgpu_ops.tuning.device._START", 2.0 if serve is serving.say_nothing else 300.0)
    pool = Compiler()
    with pytest.raises(worker.WorkerError, match=f"the GPU worker did not start: .*{reason}"):
        Measured(pool=pool, serve=serve)  # type: ignore[arg-type]
    assert multiprocessing.active_children() == []
    assert not pool.closed  # it is somebody else's


def test_closing_ends_the_process(start: Start) -> None:
    device = start()
    assert device._child._process.is_alive()
    device.close()
    assert multiprocessing.active_children() == []


def test_the_worker_gets_the_gpu_that_was_named_or_the_first_visible(monkeypatch: pytest.MonkeyPatch, log: Path) -> None:
    monkeypatch.setattr(neighbours, "visible", lambda: ["2", "3"])
    monkeypatch.setattr(neighbours, "others", lambda gpu, mine: [f"python (pid 17) on {gpu}"] if gpu == "3" else [])
    for gpu, wanted in ((None, "2"), ("3", "3")):
        device = Measured(gpu, pool=Compiler(), serve=functools.partial(serving.serve, ANSWERS, str(log)))  # type: ignore[arg-type]
        assert device._serve.keywords["visible"] == wanted
        deadline = time.monotonic() + 300
        while gpu and not device.notes and time.monotonic() < deadline:
            time.sleep(0.01)
        device.close()
    assert device.notes == ["another process uses GPU 3: python (pid 17) on 3; times may be off"]


def test_the_real_worker_refuses_a_machine_without_a_hopper_gpu() -> None:
    if os.environ.get("JAX_PLATFORMS") != "cpu":
        pytest.skip("this machine's own devices are in use")
    with pytest.raises(worker.WorkerError, match="did not start: WorkerError: cpu is not a Hopper GPU"):
        Measured(pool=Compiler())  # type: ignore[arg-type]


# --- the model


def modelled(compile: bool | None, pool: Any = None) -> Modelled:
    device = Modelled(GPU, compile, pool)
    device.open(MATMUL, PROBLEM, 0)
    return device


def test_the_model_judges_by_cost_in_microseconds() -> None:
    device = modelled(compile=False)
    config = MATMUL.default(PROBLEM, GPU)
    us = MATMUL.cost(PROBLEM, config, GPU) * 1e6
    assert judged(device, config) == [(config, Outcome("ok", us))]
    assert device.finals([config], 1.0) == Final({config: [us]}, [])
    assert (device.kind, device.baseline, device.versions["driver"]) == ("modelled", None, None)
    with pytest.raises(LookupError):
        device.next()


def test_candidates_are_compiled_where_the_compilers_are_installed(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "available", lambda: None)
    assert Modelled(GPU, pool=Compiler()).compiles  # type: ignore[arg-type]
    monkeypatch.setattr(aot, "available", lambda: "ptxas is missing")
    assert not Modelled(GPU).compiles


def test_the_model_refuses_what_does_not_compile_or_spills() -> None:
    first, *_, last = MATMUL.candidates(PROBLEM, GPU)
    pool = Compiler()
    device = modelled(compile=True, pool=pool)
    pool.submit = lambda task: _through(executable(spills=48 * (task.config == last)))  # type: ignore[method-assign]
    assert first != last != MATMUL.default(PROBLEM, GPU)
    outcomes = dict(judged(device, first, last))
    assert outcomes[first].kind == "ok"
    assert outcomes[last] == Outcome("compile", detail="48 bytes of registers spill")
    with pytest.raises(LookupError):
        device.next()


def _through(made: Executable | Outcome) -> concurrent.futures.Future[Executable | Outcome]:
    future: concurrent.futures.Future[Executable | Outcome] = concurrent.futures.Future()
    future.set_result(made)
    return future
