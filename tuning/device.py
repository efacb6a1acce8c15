"""Where candidates are judged: on a GPU, in a worker process that may die, or by the op's model."""

from __future__ import annotations

import contextlib
import dataclasses
import multiprocessing
import time
from collections.abc import Iterator, Sequence
from typing import Any, Protocol

import jax
import jaxlib

from mgpu_ops.core import aot
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.op import OpSpec
from mgpu_ops.tuning import worker
from mgpu_ops.tuning.outcome import Final, Outcome


class Device(Protocol):
    """Judges configs of one problem at a time."""

    kind: str  # "measured" or "modelled"
    gpu: Gpu
    baseline: str | None  # the name of what is timed beside candidates; of the problem that is open
    versions: dict[str, str | None]  # driver, jax, jaxlib, cuda

    def open(self, spec: OpSpec, problem: Any, seed: int) -> None: ...
    def judge(self, configs: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]: ...
    def finals(self, configs: Sequence[Any], seconds: float) -> Final: ...
    def close(self) -> None: ...


class Modelled:
    """Judges by `spec.cost`, and where the `aot` extra is installed refuses what does not compile or spills."""

    kind = "modelled"
    baseline = None

    def __init__(self, gpu: Gpu, compile: bool | None = None):
        self.gpu = gpu
        self.compiles = aot.available() is None if compile is None else compile
        self.versions = {
            "driver": None, "jax": jax.__version__, "jaxlib": jaxlib.__version__, "cuda": None
        }  # fmt: skip

    def open(self, spec: OpSpec, problem: Any, seed: int) -> None:
        self._spec, self._problem = spec, problem

    def judge(self, configs: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        for config in configs:
            us = self._us(config)
            reason = self._compile(config) if self.compiles else None
            yield config, Outcome("compile", detail=reason) if reason else Outcome("ok", us)

    def finals(self, configs: Sequence[Any], seconds: float) -> Final:
        return Final({config: [self._us(config)] for config in configs}, [])

    def close(self) -> None:
        pass

    def _us(self, config: Any) -> float:
        return self._spec.cost(self._problem, config, self.gpu) * 1e6

    def _compile(self, config: Any) -> str | None:
        spec, problem = self._spec, self._problem
        shapes = jax.eval_shape(lambda: spec.inputs(problem, jax.random.key(0)))
        try:
            report = aot.compile_for(self.gpu, lambda *arrays: spec.run(problem, config, self.gpu, *arrays), *shapes)
        except Exception as e:
            return worker.first_line(e)
        return f"{report.spills} bytes of registers spill" if report.spills else None


class Measured:
    """Judges on the GPU of this machine, in a worker process: one that hangs is killed, one that dies is replaced."""

    kind = "measured"
    baseline: str | None = None

    def __init__(self, timeout: float = 60.0, serve: Any = worker.serve):
        """`timeout`: seconds a candidate may take to compile, run and be timed. Raises WorkerError without a Hopper GPU."""
        self._timeout = timeout
        self._serve = serve
        self._opened: tuple[Any, ...] | None = None
        self._start()

    def _start(self) -> None:
        context = multiprocessing.get_context("spawn")
        self._pipe, theirs = context.Pipe()
        self._process = context.Process(target=self._serve, args=(theirs,), daemon=True)
        self._process.start()
        theirs.close()
        ready = self._receive(120.0)
        if isinstance(ready, worker.Ready):
            self.gpu, self.versions = ready.gpu, ready.versions
        else:
            self.close()
            raise worker.WorkerError(f"the GPU worker did not start: {_text(ready)}")

    def open(self, spec: OpSpec, problem: Any, seed: int) -> None:
        self._opened = (spec.name, dataclasses.asdict(problem), seed)
        self._send("open", *self._opened)
        reply = self._receive(300.0)
        if not isinstance(reply, worker.Opened):
            self._restart(reopen=False)
            raise worker.WorkerError(f"the worker could not prepare {problem}: {_text(reply)}")
        self.baseline = reply.baseline

    def judge(self, configs: Sequence[Any]) -> Iterator[tuple[Any, Outcome]]:
        """An outcome for each config, in order.

        All compile before the first is answered: where that takes too long or takes the worker down, nobody knows who it was,
        and they are judged again one by one.
        """
        left = list(configs)
        together = len(left)
        while left:
            batch = left[:together]
            if not self._send("judge", batch):  # it died after its last answer, which no candidate of these is to blame for
                self._restart()
                self._send("judge", batch)
            for number in range(len(batch)):
                reply = self._receive(self._timeout)
                if isinstance(reply, Outcome):
                    yield left.pop(0), reply
                    continue
                self._restart()
                if number == 0 and len(batch) > 1:
                    together = 1
                    break
                limit = f"no answer for {self._timeout:g} s"
                yield (
                    left.pop(0),
                    (Outcome("timeout", detail=limit) if reply is None else Outcome("crash", detail=_text(reply))),
                )
                break

    def finals(self, configs: Sequence[Any], seconds: float) -> Final:
        self._send("finals", list(configs), seconds)
        reply = self._receive(self._timeout * len(configs) + seconds)
        if isinstance(reply, Final):
            return reply
        self._restart()
        raise worker.WorkerError(f"the finalists could not be measured: {_text(reply)}")

    def close(self) -> None:
        self._process.kill()
        self._process.join()
        self._pipe.close()

    def _restart(self, reopen: bool = True) -> None:
        self.close()
        self._start()
        if reopen and self._opened is not None:
            self._send("open", *self._opened)
            reply = self._receive(300.0)
            if not isinstance(reply, worker.Opened):
                raise worker.WorkerError(f"the GPU worker could not be replaced: {_text(reply)}")

    def _send(self, *message: Any) -> bool:
        """Whether the worker was there to take it; where it was not, `_receive` tells what ended it."""
        with contextlib.suppress(OSError):
            self._pipe.send(message)
            return True
        return False

    def _receive(self, seconds: float) -> Any:
        """The worker's next message; None after `seconds`; what ended it where it died."""
        end = time.monotonic() + seconds
        while (left := end - time.monotonic()) > 0:
            with contextlib.suppress(EOFError, OSError):
                if self._pipe.poll(min(left, 1.0)):
                    return self._pipe.recv()
                if self._process.is_alive():
                    continue
            self._process.join(5.0)
            return worker.Failed(f"the worker process died (exit code {self._process.exitcode})")
        return None


def _text(reply: Any) -> str:
    return "no answer in time" if reply is None else getattr(reply, "reason", repr(reply))
