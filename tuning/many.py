"""Several problems at once, each on a GPU of its own; the GPUs share one pool of processes that compile."""

from __future__ import annotations

import collections
import concurrent.futures
import contextlib
import logging
import queue
import signal
import threading
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from mgpu_ops.tuning import compile_pool, neighbours
from mgpu_ops.tuning.device import Measured
from mgpu_ops.tuning.terminal import count
from mgpu_ops.tuning.worker import Lost

_log = logging.getLogger("mgpu_ops")
_COMPILERS = 16  # processes a GPU, where there are cores for them


@dataclass(frozen=True)
class FinishedJob[J]:
    """What became of a job: the result of `work`, or the exception that it raised."""

    job: J
    result: Any = None
    error: Exception | None = None


@dataclass(frozen=True)
class _LostDevice[J]:
    """A device that is lost, and the job that it was at."""

    device: Any
    job: J
    error: Lost


@contextlib.contextmanager
def devices(workers: int | None = 1, gpus: int = 1, **options: Any) -> Iterator[list[Measured]]:
    """So many of the GPUs that are visible here (None: all), ready to measure; `options` are Measured's.

    gpus: each device is so many of them, for problems that take several. Raises ValueError where there are fewer, WorkerError
    where one cannot be measured on.
    """
    seen = neighbours.visible()
    here = f"{count(len(seen), 'GPU')} {'is' if len(seen) == 1 else 'are'} visible here"
    if gpus > max(len(seen), 1):
        raise ValueError(f"the problem takes {count(gpus, 'GPU')}: {here}")
    names: list[str | None] = [",".join(seen[i : i + gpus]) for i in range(0, len(seen) - gpus + 1, gpus)] or [None]
    if workers is not None and not 1 <= workers <= len(names):
        each = f", {gpus} for each worker" if gpus > 1 else ""
        raise ValueError(f"workers={workers}: {here}{each}: ask for at most so many, or for all")
    names = names[:workers]
    with (
        compile_pool.Pool(min(compile_pool.cores(), _COMPILERS * len(names))) as pool,
        concurrent.futures.ThreadPoolExecutor(len(names)) as threads,
    ):
        starting = [threads.submit(Measured, name, pool=pool, **options) for name in names]
        concurrent.futures.wait(starting)
        started = [job.result() for job in starting if job.exception() is None]
        try:
            for job in starting:
                job.result()
            yield started
        finally:
            for device in started:
                device.close()


def each[J](jobs: Iterable[J], devices: Sequence[Any], work: Callable[[J, Any], Any]) -> Iterator[FinishedJob[J]]:
    """Runs `work(job, device)` for every job, one at a time on each device, and gives what is done as it is done.

    With several devices `work` runs in threads. A device that is `Lost` takes no more jobs: what it was at goes to another.
    Ctrl-C stops all devices (`device.stop()` makes `work` see KeyboardInterrupt); what is done still comes, then
    KeyboardInterrupt.
    """
    waiting = collections.deque(jobs)
    alive = list(devices)
    lost: Lost | None = None
    while waiting and alive:
        for done in _one(waiting, alive[0], work) if len(alive) == 1 else _several(waiting, alive, work):
            if isinstance(done, _LostDevice):
                lost = done.error
                alive.remove(done.device)
                waiting.appendleft(done.job)
                _log.warning("a GPU is lost, and with it a worker: %s", lost)
            else:
                yield done
    for job in waiting:
        yield FinishedJob(job, error=lost)


def _one[J](
    waiting: collections.deque[J], device: Any, work: Callable[[J, Any], Any]
) -> Iterator[FinishedJob[J] | _LostDevice[J]]:
    """On this thread, until nothing waits or the device is lost."""
    while waiting:
        job = waiting.popleft()
        try:
            done = FinishedJob(job, work(job, device))
        except Lost as e:
            yield _LostDevice(device, job, e)
            return
        except Exception as e:
            done = FinishedJob(job, error=e)
        yield done


def _several[J](
    waiting: collections.deque[J], devices: Sequence[Any], work: Callable[[J, Any], Any]
) -> Iterator[FinishedJob[J] | _LostDevice[J]]:
    """On a thread for each device, until nothing waits and all have ended."""
    found: queue.SimpleQueue[FinishedJob[J] | _LostDevice[J] | None] = queue.SimpleQueue()

    def run(device: Any) -> None:
        try:
            with contextlib.suppress(KeyboardInterrupt, IndexError):  # another took the last one
                for done in _one(waiting, device, work):
                    found.put(done)
        finally:
            found.put(None)

    def stop() -> None:
        waiting.clear()
        for device in devices:
            device.stop()

    threads = [threading.Thread(target=run, args=(device,), daemon=True) for device in devices]
    with _ctrl_c(stop) as interrupted:
        for thread in threads:
            thread.start()
        running = len(threads)
        try:
            while running:
                with contextlib.suppress(queue.Empty):
                    done = found.get(timeout=0.2)  # not for ever: a signal may come just before it waits
                    running -= done is None
                    if done is not None:
                        yield done
        finally:
            if running:  # nobody wants the rest
                stop()
            for thread in threads:
                thread.join()
    if interrupted.is_set():
        raise KeyboardInterrupt


@contextlib.contextmanager
def _ctrl_c(stop: Callable[[], None]) -> Iterator[threading.Event]:
    """The first Ctrl-C calls `stop` instead of interrupting whatever this thread is at; a second one interrupts."""
    pressed = threading.Event()
    if threading.current_thread() is not threading.main_thread():
        yield pressed
        return

    def handler(*_: Any) -> None:
        signal.signal(signal.SIGINT, before)
        pressed.set()
        stop()

    before = signal.signal(signal.SIGINT, handler)
    try:
        yield pressed
    finally:
        signal.signal(signal.SIGINT, before)
