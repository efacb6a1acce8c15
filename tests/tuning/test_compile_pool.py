"""Candidates compile side by side in processes that may hang or die; what comes out needs no compiler where it runs."""

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
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import find
from mgpu_ops.tuning import compile_pool
from mgpu_ops.tuning.compile_pool import Candidates, CompileJob, Pool, build, cores
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.worker import WorkerError
from tests.tuning import serving

GPU = find("h200")
MATMUL = spec_of("matmul")
PROBLEM = MatmulProblem(512, 512, 512)
DEFAULT = MATMUL.default(PROBLEM, GPU)
MADE = Executable(b"machine code", (None, None), registers=168, spills=0)
REFUSED = Outcome("compile", detail="ValueError: tile too large")
ANSWERS = {"ok": pickle.dumps(MADE), "refused": pickle.dumps(REFUSED)}

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=f"needs the extra aot: {aot.available()}")


def task(config: Any) -> CompileJob:
    return CompileJob("matmul", PROBLEM, config, GPU)


@pytest.fixture
def pool(tmp_path: Path) -> Iterator[Callable[..., Pool]]:
    pools: list[Pool] = []

    def started(processes: int = 1, seconds: float = 30.0, serve: Any = None) -> Pool:
        serve = serve or functools.partial(serving.compile_words, ANSWERS, str(tmp_path / "log"))
        pools.append(Pool(processes, seconds, serve))
        return pools[-1]

    yield started
    for each in pools:
        each.close()
    assert multiprocessing.active_children() == []


def test_what_is_made_comes_back_and_what_is_not_says_why(pool: Callable[..., Pool]) -> None:
    jobs = [pool().submit(task(config)) for config in ("ok", "refused")]
    assert [job.result() for job in jobs] == [MADE, REFUSED]


def test_candidates_compile_at_the_same_time(pool: Callable[..., Pool]) -> None:
    two = pool(processes=2)
    jobs = [two.submit(task("meet")) for _ in range(2)]  # each waits for the other
    assert [job.result(600) for job in jobs] == [MADE, MADE]


def test_a_candidate_that_compiles_too_long_is_cut_off_and_its_process_replaced(
    pool: Callable[..., Pool], tmp_path: Path
) -> None:
    one = pool(seconds=2.0)
    jobs = [one.submit(task(config)) for config in ("ok", "hang", "ok")]
    assert [job.result() for job in jobs] == [MADE, Outcome("timeout", detail="compiling took more than 2 s"), MADE]
    assert (tmp_path / "log").read_text().split() == ["start"] * 2


def test_a_candidate_that_takes_the_compiler_down_costs_itself(pool: Callable[..., Pool]) -> None:
    one = pool()
    jobs = [one.submit(task(config)) for config in ("die", "ok")]
    assert [job.result() for job in jobs] == [Outcome("compile", detail="compiling, the process died (exit code 9)"), MADE]


def test_the_time_to_start_does_not_count_as_the_first_candidates(
    pool: Callable[..., Pool], monkeypatch: pytest.MonkeyPatch
) -> None:
    limits: list[float] = []
    receive = compile_pool.Child.receive

    def recorded(child: Any, seconds: float, check: Any) -> Any:
        limits.append(seconds)
        return receive(child, seconds, check)

    monkeypatch.setattr(compile_pool.Child, "receive", recorded)
    one = pool(seconds=30.0)
    assert [one.submit(task("ok")).result() for _ in range(2)] == [MADE, MADE]
    assert limits == [compile_pool._START, 30.0, 30.0]


def test_processes_that_do_not_start_are_a_worker_error(pool: Callable[..., Pool]) -> None:
    with pytest.raises(WorkerError, match=r"a process that compiles did not start: the process died \(exit code 5\)"):
        pool(serve=serving.never_ready).submit(task("ok")).result()


def test_closing_ends_processes_at_work_at_once(pool: Callable[..., Pool]) -> None:
    one = pool()
    job = one.submit(task("hang"))
    while one._idle.qsize():
        time.sleep(0.01)
    one.close()
    with pytest.raises(WorkerError, match="closing"):
        job.result()


def test_by_default_there_is_a_process_a_core(monkeypatch: pytest.MonkeyPatch) -> None:
    started: list[Any] = []
    monkeypatch.setattr("mgpu_ops.tuning.compile_pool.Child", started.append)
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(16)))
    assert cores() == Pool().processes == len(started) == 16
    monkeypatch.setattr(os, "sched_getaffinity", lambda pid: set(range(224)))
    assert Pool().processes == 32


def test_a_line_gives_each_candidate_with_what_became_of_it(pool: Callable[..., Pool]) -> None:
    line = Candidates(pool(), MATMUL, PROBLEM, GPU)
    for config in ("ok", "refused", "ok2"):
        line.submit(config)
    assert dict(line) == {"ok": MADE, "refused": REFUSED, "ok2": MADE}
    with pytest.raises(LookupError):
        line.next()


# --- for real


def test_what_processes_warn_of_is_said_once(pool: Callable[..., Pool], tmp_path: Path, caplog: Any, monkeypatch: Any) -> None:
    monkeypatch.setattr(compile_pool, "_said", set())
    answers = {"ok": pickle.dumps(dataclasses.replace(MADE, warnings=("an old ptxas",)))}
    two = pool(2, serve=functools.partial(serving.compile_words, answers, str(tmp_path / "log")))
    line = Candidates(two, MATMUL, PROBLEM, GPU)
    for config in ("meet", "meet", "ok"):
        line.submit(config)
    assert len(list(line)) == 3
    assert [record.getMessage() for record in caplog.records] == ["an old ptxas"]


@needs_compiler
def test_a_process_of_the_pool_compiles_for_a_gpu_that_it_does_not_have() -> None:
    made, refused = (DEFAULT, dataclasses.replace(DEFAULT, tile_k=4096))
    with Pool(1) as pool:
        good, bad = [pool.submit(task(config)).result() for config in (made, refused)]
    assert isinstance(good, Executable)
    assert good.spills == 0 < good.registers
    assert b"ptxas" in good.data  # which signs what it made: nothing is left to compile
    assert isinstance(bad, Outcome)
    assert bad.kind == "compile"


@needs_compiler
def test_an_executable_is_for_the_topology_that_it_is_built_for() -> None:
    described = aot._topology(dataclasses.replace(GPU, name="NVIDIA H200 of another name"), 1).serialize()
    made = build(dataclasses.replace(task(DEFAULT), topology=described), spec_of)
    assert isinstance(made, Executable)
    assert b"of another name" in made.data
    assert pickle.loads(pickle.dumps(made)) == made


@needs_compiler
def test_building_leaves_standard_output_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    build(task(DEFAULT), spec_of)
    print("after")
    assert capfd.readouterr().out == "after\n"
    assert "MOSAIC_GPU_DUMP_PTXAS" not in os.environ


def scaled(factor: float, x: Any) -> Any:
    import jax

    assert jax.devices()[0].core_count == GPU.sms  # as JAX's own kernels ask
    return x * factor


@needs_compiler
def test_any_function_that_pickle_finds_is_compiled_for_the_gpu() -> None:
    import jax

    devices = jax.devices()
    shape = jax.ShapeDtypeStruct((8,), "float32")
    call = pickle.loads(pickle.dumps(compile_pool.Call(functools.partial(scaled, 2.0), (shape,), GPU)))
    made = build(call, spec_of)
    assert isinstance(made, Executable), made
    assert made.data
    assert jax.devices() == devices
    failed = build(dataclasses.replace(call, function=functools.partial(scaled, "two")), spec_of)
    assert isinstance(failed, Outcome)
    assert failed.kind == "compile"
