"""Jobs on several devices at once: each takes the next, one that is lost leaves its job to others, Ctrl-C stops all."""

from __future__ import annotations

import functools
import os
import pickle
import signal
import threading
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops.core.gpu import find
from mgpu_ops.tuning import compile_pool, many, neighbours, worker
from mgpu_ops.tuning.many import FinishedJob
from tests.tuning import serving


class Device:
    """Waits until it is stopped where `work` asks it to."""

    def __init__(self, name: str):
        self.name = name
        self.stopped = threading.Event()

    def stop(self) -> None:
        self.stopped.set()

    def wait(self) -> None:
        assert self.stopped.wait(10)
        raise KeyboardInterrupt


@pytest.fixture
def four() -> list[Device]:
    return [Device(name) for name in "abcd"]


def test_each_job_is_done_once_and_gives_its_result(four: list[Device]) -> None:
    done = list(many.each(range(50), four, lambda job, device: job * job))
    assert sorted((d.job, d.result) for d in done) == [(i, i * i) for i in range(50)]


def test_devices_work_at_the_same_time_each_at_one_job(four: list[Device]) -> None:
    meet = threading.Barrier(4, timeout=300)
    used: dict[int, str] = {}

    def work(job: int, device: Device) -> None:
        meet.wait()
        used[job] = device.name

    assert len(list(many.each(range(4), four, work))) == 4
    assert sorted(used.values()) == list("abcd")


def test_one_device_works_in_this_thread_in_order(four: list[Device]) -> None:
    threads = list(many.each("xyz", four[:1], lambda job, device: threading.current_thread()))
    assert [d.job for d in threads] == list("xyz")
    assert {d.result for d in threads} == {threading.current_thread()}


@pytest.mark.parametrize("devices", [1, 4])
def test_a_job_that_fails_is_told_and_the_rest_are_done(devices: int, four: list[Device]) -> None:
    def work(job: int, device: Device) -> int:
        if job == 3:
            raise ValueError("it cannot be tuned")
        return job

    done = {d.job: d for d in many.each(range(6), four[:devices], work)}
    assert set(done) == set(range(6))
    assert str(done[3].error) == "it cannot be tuned"
    assert all(d.error is None and d.result == d.job for job, d in done.items() if job != 3)


def test_a_lost_device_leaves_its_job_to_another_even_when_that_has_nothing_left_to_do(four: list[Device]) -> None:
    others_are_through = threading.Event()

    def work(job: int, device: Device) -> str:
        if device.name == "b":
            others_are_through.wait(10)
            raise worker.Lost("the GPU worker did not start: no device")
        return device.name

    done = {}
    for d in many.each(range(20), four[:2], work):
        done[d.job] = d.result
        if len(done) == 19:
            others_are_through.set()
    assert done == dict.fromkeys(range(20), "a")


@pytest.mark.parametrize("devices", [1, 3])
def test_without_a_device_left_the_remaining_jobs_fail_with_the_reason(devices: int, four: list[Device]) -> None:
    lost = worker.Lost("the GPU worker did not start: no device")

    def work(job: int, device: Device) -> int:
        if job >= 2:
            raise lost
        return job

    done = {d.job: d for d in many.each(range(6), four[:devices], work)}
    assert {job: d.error for job, d in done.items()} == {0: None, 1: None} | dict.fromkeys(range(2, 6), lost)


def test_ctrl_c_stops_all_devices_and_what_is_done_still_comes(four: list[Device]) -> None:
    started = threading.Barrier(5, timeout=300)

    def work(job: int, device: Device) -> str:
        started.wait()
        try:
            device.wait()
        except KeyboardInterrupt:
            return "interrupted, and stored"
        return "never"

    def ctrl_c() -> None:
        started.wait()
        os.kill(os.getpid(), signal.SIGINT)

    threading.Thread(target=ctrl_c).start()
    done: list[FinishedJob] = []

    def collect() -> None:
        for each in many.each(range(10), four, work):
            done.append(each)  # noqa: PERF402  what comes before the exception counts

    with pytest.raises(KeyboardInterrupt):
        collect()
    assert [d.result for d in done] == ["interrupted, and stored"] * 4


def test_ctrl_c_on_one_device_comes_through(four: list[Device]) -> None:
    def work(job: int, device: Device) -> None:
        raise KeyboardInterrupt

    with pytest.raises(KeyboardInterrupt):
        list(many.each(range(3), four[:1], work))


# --- the devices of a machine

ANSWERS = {"ready": pickle.dumps(worker.Ready(find("h200"), {}))}


@pytest.fixture
def serve(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[Callable[..., None]]:
    monkeypatch.setattr(neighbours, "visible", lambda: ["0", "1", "5"])
    monkeypatch.setattr(neighbours, "Watch", lambda *arguments: None)
    pools: list[Any] = []

    class Pool:
        def __init__(self, processes: int):
            self.processes, self.open = processes, True
            pools.append(self)

        def __enter__(self) -> Pool:
            return self

        def __exit__(self, *_: Any) -> None:
            self.open = False

    monkeypatch.setattr(compile_pool, "Pool", Pool)
    monkeypatch.setattr(compile_pool, "cores", lambda: 64)
    yield functools.partial(serving.serve, ANSWERS, str(tmp_path / "log"))
    assert [pool.open for pool in pools] in ([], [False])


@pytest.mark.parametrize(("workers", "names"), [(1, ["0"]), (2, ["0", "1"]), (None, ["0", "1", "5"])])
def test_each_device_has_a_gpu_of_its_own_and_all_share_the_compilers(
    workers: int | None, names: list[str], serve: Callable[..., None]
) -> None:
    with many.devices(workers, serve=serve) as devices:
        assert [device._name for device in devices] == names
        (pool,) = {id(device._pool): device._pool for device in devices}.values()
        assert pool.processes == 16 * len(names)
        children = [device._child._process for device in devices]
    assert not any(child.is_alive() for child in children)


def test_a_device_that_has_nothing_to_do_hears_of_the_stop(serve: Callable[..., None]) -> None:
    with many.devices(1, serve=serve) as (device,):
        device.wait(0.0)
        device.stop()
        with pytest.raises(KeyboardInterrupt):
            device.wait(60)


@pytest.mark.parametrize("workers", [0, 4])
def test_more_workers_than_gpus_are_refused(workers: int, serve: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match=rf"workers={workers}: 3 GPUs are visible"), many.devices(workers, serve=serve):
        pass


def test_a_gpu_that_cannot_be_measured_on_is_an_error_and_leaves_no_process(tmp_path: Path, serve: Callable[..., None]) -> None:
    with (
        pytest.raises(worker.WorkerError, match="did not start: the process died"),
        many.devices(None, serve=functools.partial(serving.start_once, ANSWERS, str(tmp_path / "log"))),
    ):
        pass


@pytest.mark.parametrize(("gpus", "names"), [(2, ["0,1"]), (3, ["0,1,5"])])
def test_a_device_may_be_several_gpus(gpus: int, names: list[str], serve: Callable[..., None]) -> None:
    with many.devices(None, gpus, serve=serve) as devices:
        assert [device._name for device in devices] == names


def test_a_problem_of_more_gpus_than_there_are_is_refused(serve: Callable[..., None]) -> None:
    with pytest.raises(ValueError, match="the problem takes 4 GPUs: 3 GPUs are visible"), many.devices(1, 4, serve=serve):
        pass
    told = "workers=2: 3 GPUs are visible here, 2 for each worker"
    with pytest.raises(ValueError, match=told), many.devices(2, 2, serve=serve):
        pass
