"""Where candidates are judged: on a GPU, in a worker process that may die, or by the op's model."""

from __future__ import annotations

import collections
import functools
import logging
import threading
from collections.abc import Callable, Sequence
from typing import Any, Protocol, runtime_checkable

import jax
import jaxlib

from mgpu_ops.core import aot
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import Config, OpSpec, Problem
from mgpu_ops.tuning import compile_pool, measure, neighbours, worker
from mgpu_ops.tuning.child import Child, Gone
from mgpu_ops.tuning.outcome import Final, Outcome, SustainedFinal

_log = logging.getLogger("mgpu_ops")
_START = 180.0  # seconds for a worker to start
_OPEN = 300.0  # for the inputs, the reference and the baseline of a problem
_CALLS = 100  # of the baseline: the time a candidate has, beyond `timeout`, to be run and timed beside it


class Device(Protocol):
    """Judges configs of one problem at a time. More may be submitted while some are under way."""

    kind: str  # "measured", "modelled" or "recorded"
    gpu: Gpu
    baseline: str | None  # the name of what is timed beside candidates; of the problem that is open
    versions: dict[str, str | None]  # driver, jax, jaxlib, cuda
    slots: int  # how many candidates may be under way
    notes: list[str]  # what a user should know of the measurements, each once

    def open(self, spec: OpSpec, problem: Problem, seed: int) -> None: ...
    def submit(self, config: Config) -> None: ...
    def next(self) -> tuple[Config, Outcome]: ...  # in any order; LookupError where none is under way
    def finals(self, configs: Sequence[Config], seconds: float) -> Final: ...
    def close(self) -> None: ...


@runtime_checkable
class Sustains(Protocol):
    """A device on which configs can run without pause."""

    def sustained(self, configs: Sequence[Config], seconds: float) -> SustainedFinal: ...


class Modelled:
    """Judges by `spec.cost`, and where the `aot` extra is installed refuses what does not compile or spills."""

    kind = "modelled"
    baseline: str | None = None

    def __init__(self, gpu: Gpu, compile: bool | None = None, pool: compile_pool.Pool | None = None):
        self.gpu = gpu
        self.compiles = aot.available() is None if compile is None else compile
        self.versions = {
            "driver": None, "jax": jax.__version__, "jaxlib": jaxlib.__version__, "cuda": None
        }  # fmt: skip
        self.notes: list[str] = []
        self._pool = pool or (compile_pool.Pool() if self.compiles else None)
        self._own = pool is None
        self.slots = 2 * self._pool.processes if self._pool else 1

    def open(self, spec: OpSpec, problem: Problem, seed: int) -> None:
        self._spec, self._problem = spec, problem
        self._candidates = compile_pool.Candidates(self._pool, spec, problem, self.gpu) if self._pool else None
        self._waiting: collections.deque[Any] = collections.deque()

    def submit(self, config: Config) -> None:
        (self._candidates.submit if self._candidates else self._waiting.append)(config)

    def next(self) -> tuple[Config, Outcome]:
        if self._candidates:
            config, made = self._candidates.next()
            return config, made if isinstance(made, Outcome) else Outcome("ok", self._us(config))
        if not self._waiting:
            raise LookupError("no candidate is under way")
        config = self._waiting.popleft()
        return config, Outcome("ok", self._us(config))

    def finals(self, configs: Sequence[Config], seconds: float) -> Final:
        return Final({config: [self._us(config)] for config in configs}, [])

    def close(self) -> None:
        if self._pool and self._own:
            self._pool.close()

    def _us(self, config: Config) -> float:
        return self._spec.cost(self._problem, config, self.gpu) * 1e6


class Measured:
    """Judges on a GPU of this machine: candidates compile in a pool of processes and run, one at a time, in a worker process.

    A worker that hangs is killed, and one that dies or that a candidate has spoilt is replaced.
    """

    kind = "measured"
    baseline: str | None = None

    def __init__(
        self,
        gpu: str | None = None,
        *,
        timeout: float = 15.0,
        slots: int = 8,
        pool: compile_pool.Pool | None = None,
        serve: Callable[..., None] = worker.serve,
    ):
        """Raises WorkerError without a Hopper GPU.

        Args:
          gpu: as CUDA_VISIBLE_DEVICES names it, "0", or for problems that take several "0,1"; by default the first visible one.
          timeout: seconds a compiled candidate has to run and be timed, beyond a hundred times the baseline's time.
          slots: candidates that may be under way.
          pool: compiles them; by default one of this device's own.
          serve: what the worker process does.
        """
        visible = neighbours.visible()
        self._name = gpu or (visible[0] if visible else None)
        self._timeout, self.slots = timeout, slots
        self._serve = functools.partial(serve, visible=self._name)
        self.notes: list[str] = []
        self._stopped = threading.Event()
        self._closed = False
        self._opened: worker.Open | None = None
        self._prepared: dict[tuple[str, Problem], compile_pool.Candidates] = {}
        self._pool, self._own = pool or compile_pool.Pool(), pool is None
        self._pids: set[int] = set()  # of all workers so far: one that was killed may be on the GPU a moment longer
        self._watch = neighbours.Watch(self._name, lambda: self._pids, self._note) if self._name else None
        self._replace()
        try:
            ready = self._started()
        except worker.WorkerError:
            self.close()
            raise
        self.gpu, self.versions, self._topology = ready.gpu, ready.versions, ready.topology

    def prepare(self, spec: OpSpec, problem: Problem, configs: Sequence[Config]) -> None:
        """Starts to compile candidates of a problem that is opened later. Then they are under way."""
        self._prepared[spec.name, problem] = found = compile_pool.Candidates(
            self._pool, spec, problem, self.gpu, self._topology
        )
        for config in configs:
            found.submit(config)

    def open(self, spec: OpSpec, problem: Problem, seed: int) -> None:
        self._opened = None
        prepared = self._prepared.pop((spec.name, problem), None)
        self._candidates = prepared or compile_pool.Candidates(self._pool, spec, problem, self.gpu, self._topology)
        self._passed: dict[Config, Executable] = {}
        reply = self._ask(_OPEN, worker.Open(spec.name, problem, seed))
        if not isinstance(reply, worker.Opened):
            self._restart()
            raise worker.WorkerError(f"the worker could not prepare {problem}: {_reason(reply)}")
        self.baseline = reply.baseline
        self._opened = worker.Open(spec.name, problem, seed, reply.baseline_us)
        self._limit = self._timeout + _CALLS * reply.baseline_us * 1e-6

    def submit(self, config: Config) -> None:
        self._candidates.submit(config)

    def next(self) -> tuple[Config, Outcome]:
        config, made = self._candidates.next()
        if isinstance(made, Outcome):
            return config, made
        outcome = self._judge(config, made)
        if outcome.kind == "ok":
            self._passed[config] = made
        return config, outcome

    def finals(self, configs: Sequence[Config], seconds: float) -> Final:
        """Where the finalists take the worker down, each is judged alone, and those that are right are measured again."""
        candidates = self._compiled(configs)
        limit = self._limit * (1 + len(configs)) + seconds
        reply: worker.Answer | Gone | None = None
        for again in (False, True):
            if again:
                candidates = [(config, made) for config, made in candidates if self._judge(config, made).kind == "ok"]
            reply = self._ask(limit, worker.Finals(candidates, seconds))
            if isinstance(reply, Final):
                return reply
            self._restart()
        raise worker.WorkerError(f"the finalists could not be measured: {_reason(reply)}")

    def sustained(self, configs: Sequence[Config], seconds: float) -> SustainedFinal:
        """Turns of `seconds` without pause. WorkerError where they cannot be measured, as of calls that are too short."""
        candidates = self._compiled(configs)
        functions = 1 + len(candidates)
        limit = self._limit * functions + measure.sustained_seconds(functions, seconds)
        reply = self._ask(limit, worker.Sustain(candidates, seconds))
        if isinstance(reply, SustainedFinal):
            return reply
        self._restart()
        raise worker.WorkerError(f"the finalists could not be measured sustained: {_reason(reply)}")

    def stop(self) -> None:
        """Makes what another thread waits for here raise KeyboardInterrupt."""
        self._stopped.set()
        if hasattr(self, "_candidates"):
            self._candidates.stop()

    def wait(self, seconds: float) -> None:
        """Nothing to do for a while; `stop` ends it as it ends all else."""
        if self._stopped.wait(seconds):
            raise KeyboardInterrupt

    def close(self) -> None:
        self._closed = True
        if self._watch:
            self._watch.close()
        self._child.kill()
        if self._own:
            self._pool.close()

    def _judge(self, config: Config, executable: Executable) -> Outcome:
        """A candidate with which the worker died is tried once more: what kills a worker may come from outside."""
        reply: worker.Answer | Gone | None = None
        for _ in range(2):
            reply = self._ask(self._limit, worker.Judge(config, executable))
            if isinstance(reply, worker.Verdict):
                if reply.spoilt:
                    self._restart()
                return reply.outcome
            self._restart()
            if isinstance(reply, Gone) and reply.late:
                return Outcome("timeout", detail=reply.reason)
        return Outcome("crash", detail=_reason(reply))

    def _compiled(self, configs: Sequence[Config]) -> list[tuple[Config, Executable]]:
        """With their executables. Those of another process's trials compile now, and are left out where they do not."""
        missing = compile_pool.Candidates(self._pool, self._candidates.spec, self._candidates.problem, self.gpu, self._topology)
        for config in configs:
            if config not in self._passed:
                missing.submit(config)
        for config, made in missing:
            if isinstance(made, Executable):
                self._passed[config] = made
        return [(config, self._passed[config]) for config in configs if config in self._passed]

    def _ask(self, seconds: float, request: worker.Request) -> worker.Answer | Gone:
        """The worker's answer, or `Gone`. One that died or was interrupted after its last answer is replaced first."""
        if self._child.busy and not self._fresh:
            self._restart()
        if self._fresh:
            self._started()
        if not self._child.send(request):
            self._restart()
            self._started()
            self._child.send(request)
        return self._receive(seconds)

    def _receive(self, seconds: float) -> worker.Answer | Gone:
        while isinstance(reply := self._child.receive(seconds, self._check), worker.Note):
            self._child.busy = True
            self._note(reply.text)
        return reply

    def _restart(self) -> None:
        """Replaces the worker; the new one starts in the background."""
        if self._closed:
            raise worker.Lost("the device is closed")
        self._child.kill()
        self._replace()

    def _replace(self) -> None:
        self._child, self._fresh = Child(self._serve), True
        self._pids.add(self._child.pid)

    def _started(self) -> worker.Ready:
        """Waits for a new worker, and lets it prepare the problem that is open."""
        ready = self._receive(_START)
        if not isinstance(ready, worker.Ready):
            raise worker.Lost(f"the GPU worker did not start: {_reason(ready)}")
        self._fresh = False
        if self._opened is not None:
            self._child.send(self._opened)
            reply = self._receive(_OPEN)
            if not isinstance(reply, worker.Opened):
                raise worker.Lost(f"the GPU worker could not be replaced: {_reason(reply)}")
        return ready

    def _check(self) -> None:
        if self._stopped.is_set():
            raise KeyboardInterrupt

    def _note(self, text: str) -> None:
        if text not in self.notes:
            self.notes.append(text)
            _log.warning("%s", text)


def _reason(reply: worker.Answer | Gone | None) -> str:
    """Why there is no answer of the kind that was asked for."""
    return reply.reason if isinstance(reply, worker.Failed | Gone) else repr(reply)
