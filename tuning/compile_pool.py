"""Candidates compile side by side, in processes without a GPU, while the GPU measures others.

What comes out is the executable itself (`core/aot.py`), which the process with the GPU loads without compiling anything. So
the only kernels on the GPU are those that are measured, and a compiler that hangs or dies costs one candidate.
"""

from __future__ import annotations

import concurrent.futures
import dataclasses
import functools
import logging
import os
import queue
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning.child import Child, Gone, first_line, settle
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.sharing import shared_out
from mgpu_ops.tuning.worker import WorkerError

SECONDS = 30.0  # a candidate may take to compile
_START = 180.0  # seconds for all processes to import JAX at once, on few cores
_MOST = 32  # processes; each takes half a gigabyte
_FORGET = 64  # tasks after which a process drops what JAX has cached of them
_log = logging.getLogger("mgpu_ops")
_said: set[str] = set()


@dataclass(frozen=True)
class CompileJob:
    op: str
    problem: Problem
    config: Config
    gpu: Gpu
    topology: bytes | None = None  # `aot.attached()` of the process that will run it; None: any GPU of that model


@dataclass(frozen=True)
class Call:
    """Any function that pickle finds by its name, or a `functools.partial` of one, to be called on arrays of these shapes."""

    function: Callable[..., Any]
    shapes: tuple[Any, ...]  # jax.ShapeDtypeStruct
    gpu: Gpu
    topology: bytes | None = None


class Pool:
    """Processes that compile. They start at once, in the background, and stay for all problems and GPUs of a run."""

    def __init__(self, processes: int | None = None, seconds: float = SECONDS, serve: Callable[[Any], None] | None = None):
        """`processes`: by default one a core. `seconds` a candidate may take, after which its process is replaced."""
        self.processes = processes or min(cores(), _MOST)
        self._seconds = seconds
        self._serve = serve or compile_jobs
        self._closed = False
        self._idle: queue.LifoQueue[Child] = queue.LifoQueue()  # one that has worked before is quicker than a new one
        for _ in range(self.processes):
            self._idle.put(Child(self._serve))
        self._threads = concurrent.futures.ThreadPoolExecutor(self.processes, thread_name_prefix="compile")

    def submit(self, task: CompileJob | Call) -> concurrent.futures.Future[Executable | Outcome]:
        """The executable, or why there is none: kind "compile", or "timeout". WorkerError where no process starts."""
        return self._threads.submit(self._compile, task)

    def close(self) -> None:
        """Ends the processes; what they were at comes out as WorkerError."""
        if self._closed:
            return
        self._closed = True
        self._threads.shutdown(wait=False, cancel_futures=True)
        for _ in range(self.processes):  # each comes back, within half a second where it was at work
            self._idle.get().kill()

    def __enter__(self) -> Pool:
        return self

    def __exit__(self, *_: Any) -> None:
        self.close()

    def _compile(self, task: CompileJob | Call) -> Executable | Outcome:
        child = self._idle.get()
        try:
            if child.busy:  # it has not said yet that it is ready
                reply = child.receive(_START, self._check)
                if isinstance(reply, Gone):
                    raise WorkerError(f"a process that compiles did not start: {reply.reason}")
            child.send(task)
            reply = child.receive(self._seconds, self._check)
        finally:
            self._idle.put(self._another(child) if child.busy else child)
        if not isinstance(reply, Gone):
            return reply
        if reply.late:
            return Outcome("timeout", detail=f"compiling took more than {self._seconds:g} s")
        return Outcome("compile", detail=f"compiling, {reply.reason}")

    def _another(self, child: Child) -> Child:
        if self._closed:
            return child
        child.kill()
        return Child(self._serve)

    def _check(self) -> None:
        if self._closed:
            raise WorkerError("the tuner is closing")


class Candidates:
    """The candidates of one problem on their way through a pool."""

    def __init__(self, pool: Pool, spec: OpSpec, problem: Problem, gpu: Gpu, topology: bytes | None = None):
        self.spec, self.problem = spec, problem
        self._pool = pool
        self._task = functools.partial(CompileJob, spec.name, problem, gpu=gpu, topology=topology)
        self._default = spec.default(problem, gpu)
        self._done: queue.SimpleQueue[tuple[Any, concurrent.futures.Future[Executable | Outcome]] | None] = queue.SimpleQueue()
        self._in_flight = 0

    def submit(self, config: Config) -> None:
        self._in_flight += 1
        self._pool.submit(self._task(config=config)).add_done_callback(lambda future: self._done.put((config, future)))

    def next(self) -> tuple[Config, Executable | Outcome]:
        """The next that is through. One that spills in a loop is refused, but for the default, which calls may run."""
        if not self._in_flight:
            raise LookupError("no candidate is under way")
        found = self._done.get()
        if found is None:
            raise KeyboardInterrupt
        self._in_flight -= 1
        config, future = found
        try:
            made = future.result()
        except concurrent.futures.CancelledError:
            raise WorkerError("the tuner is closing") from None
        if isinstance(made, Executable):
            for warning in set(made.warnings) - _said:  # each process of the pool has it to say
                _said.add(warning)
                _log.warning("%s", warning)
        if isinstance(made, Executable) and made.spills > self.spec.spills_outside_loops(config) and config != self._default:
            return config, Outcome("compile", detail=f"{made.spills} bytes of registers spill")
        return config, made

    def __iter__(self) -> Iterator[tuple[Config, Executable | Outcome]]:
        while self._in_flight:
            yield self.next()

    def stop(self) -> None:
        """Makes `next`, in another thread, raise KeyboardInterrupt."""
        self._done.put(None)


def cores() -> int:
    """How many processors this process may use."""
    return len(os.sched_getaffinity(0))


def compile_jobs(pipe: Any, specs: Callable[[str], OpSpec] | None = None) -> None:
    """What a process of the pool does: says "ready", then answers each CompileJob or Call with an Executable or an Outcome.

    `specs` finds an op by its name, `mgpu_ops.spec_of` by default.
    """
    settle()
    os.nice(10)  # behind the process that measures
    os.environ |= {"CUDA_VISIBLE_DEVICES": "", "JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    import jax

    jax.config.update("jax_platforms", "cpu")
    from mgpu_ops import ops

    heard = _Heard()
    _log.addHandler(heard)
    _log.propagate = False
    pipe.send("ready")
    done = 0
    while True:
        try:
            task = pipe.recv()
        except EOFError:
            return
        made = build(task, specs or ops.spec_of)
        pipe.send(dataclasses.replace(made, warnings=tuple(heard.messages)) if isinstance(made, Executable) else made)
        done += 1
        if done % _FORGET == 0:
            jax.clear_caches()


class _Heard(logging.Handler):
    """Keeps what is logged."""

    def __init__(self) -> None:
        super().__init__(logging.WARNING)
        self.messages: list[str] = []

    def emit(self, record: logging.LogRecord) -> None:
        self.messages.append(record.getMessage())


def build(task: CompileJob | Call, specs: Callable[[str], OpSpec]) -> Executable | Outcome:
    import jax

    from mgpu_ops.core import aot
    from mgpu_ops.tuning.timing import timing_of

    try:
        if isinstance(task, Call):
            call = functools.partial(_as_on_the_gpu, task.function)
            return aot.build(task.gpu, call, *task.shapes, topology=task.topology)
        spec = specs(task.op)
        devices = spec.devices(task.problem)
        shapes = jax.eval_shape(lambda: spec.inputs(task.problem, jax.random.key(0)))
        run = timing_of(task.op).program(functools.partial(spec.run, task.problem, task.config, task.gpu))
        return aot.build(task.gpu, run, *shared_out(shapes, devices), devices=devices, topology=task.topology)
    except Exception as e:
        return Outcome("compile", detail=first_line(e))


def _as_on_the_gpu(function: Callable[..., Any], *arrays: Any) -> Any:
    """Traces a function that may ask `jax.devices()` for the GPU it will run on, which this process does not have."""
    import jax

    mine = jax.devices
    jax.devices = lambda *_: [jax.config.jax_default_device]  # as core/aot.py sets it
    try:
        return function(*arrays)
    finally:
        jax.devices = mine
