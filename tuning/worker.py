"""The process that runs candidates on the GPU. What a bad kernel breaks, it breaks here.

It answers messages over a pipe: ("open", op, problem, seed), ("judge", configs) with one Outcome each, in order,
("finals", configs, seconds).
"""

from __future__ import annotations

import concurrent.futures
import contextlib
import dataclasses
import functools
import os
import signal
from collections.abc import Callable
from typing import Any

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.op import Baseline, OpSpec
from mgpu_ops.tuning.outcome import Final, Outcome


class WorkerError(RuntimeError):
    """The worker process cannot do its work at all; the message says why."""


@dataclasses.dataclass(frozen=True)
class Ready:
    gpu: Gpu
    versions: dict[str, str | None]


@dataclasses.dataclass(frozen=True)
class Opened:
    baseline: str  # the name of what is timed beside candidates


@dataclasses.dataclass(frozen=True)
class Failed:
    reason: str


def baseline_of(spec: OpSpec, problem: Any) -> Baseline:
    """What is timed beside candidates: the reference, "xla", unless the op names another for the problem."""
    return (spec.baseline and spec.baseline(problem)) or Baseline("xla", spec.reference)


def first_line(error: BaseException) -> str:
    """An exception on one line of at most 200 characters."""
    text = str(error).strip().splitlines() or [""]
    return f"{type(error).__name__}: {text[0]}"[:200]


def serve(pipe: Any) -> None:
    """Answers messages until the pipe closes."""
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is the parent's to handle
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    try:
        pipe.send(_ready())
    except Exception as e:
        pipe.send(Failed(first_line(e)))
        return
    session = None
    while True:
        try:
            message, *arguments = pipe.recv()
        except EOFError:
            return
        try:
            if message == "open":
                session = _Session(*arguments)
                pipe.send(Opened(session.baseline))
            elif message == "judge":
                for outcome in session.judge(*arguments):  # type: ignore[union-attr]
                    pipe.send(outcome)
            elif message == "finals":
                pipe.send(session.finals(*arguments))  # type: ignore[union-attr]
        except Exception as e:
            pipe.send(Failed(first_line(e)))


def _ready() -> Ready:
    import jax
    import jaxlib

    from mgpu_ops.core import gpu

    device = jax.devices()[0]
    found = gpu.from_device(device)
    if found is None or found.architecture != "hopper":
        raise WorkerError(f"{device.device_kind} is not a Hopper GPU")
    versions = {
        "driver": gpu.driver_version(),
        "jax": jax.__version__,
        "jaxlib": jaxlib.__version__,
        "cuda": _cuda_version(device),
    }
    return Ready(found, versions)


def _cuda_version(device: Any) -> str | None:
    """The CUDA version in XLA's platform version, e.g. "13000" of "PJRT C API\\ncuda 13000"."""
    words = device.client.platform_version.split()
    return words[words.index("cuda") + 1] if "cuda" in words[:-1] else None


class _Session:
    """One problem: its inputs, the reference's result, and the baseline to time beside candidates.

    The reference runs once, for its result; it may be far slower than any candidate. It replaces a baseline that cannot run.
    """

    def __init__(self, op: str, problem: dict[str, Any], seed: int):
        import jax

        import mgpu_ops
        from mgpu_ops.core import gpu

        self.spec = mgpu_ops.spec_of(op)
        self.problem = self.spec.Problem(**problem)
        device = gpu.from_device(jax.devices()[0])
        assert device is not None
        self.gpu = device
        self.arrays = jax.jit(lambda key: self.spec.inputs(self.problem, key))(jax.random.key(seed))
        reference = self._ahead(self.spec.reference)
        self.expected = reference(*self.arrays)
        self.baseline = "xla"
        self.baseline_call: Callable[[], Any] = functools.partial(reference, *self.arrays)
        baseline = baseline_of(self.spec, self.problem)
        if baseline.run is not self.spec.reference:
            with contextlib.suppress(Exception):  # whatever a library makes of a problem that it does not take
                self.baseline, self.baseline_call = baseline.name, self._call_of(baseline)
        self.compiled: dict[Any, Any] = {}

    def _ahead(self, function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
        import jax

        call = jax.jit(lambda *arrays: function(self.problem, *arrays))
        return call.lower(*(arrays or self.arrays)).compile()

    def _call_of(self, baseline: Baseline) -> Callable[[], Any]:
        """The baseline's call, which has run once."""
        import jax

        arrays = self.arrays if baseline.arrays is None else self._ahead(baseline.arrays)(*self.arrays)
        call = functools.partial(self._ahead(baseline.run, *arrays), *arrays)
        jax.block_until_ready(call())
        return call

    def judge(self, configs: list[Any]) -> Any:
        """One Outcome a config, in order.

        All compile first, side by side in threads, and only then is anything timed: XLA runs kernels of its own while it
        compiles, which would disturb the times and be counted with them.
        """
        with concurrent.futures.ThreadPoolExecutor(min(8, os.cpu_count() or 1)) as pool:
            jobs = [pool.submit(self._compile, config) for config in configs]
        for config, job in zip(configs, jobs, strict=True):
            try:
                self.compiled[config] = job.result()
            except Exception as e:
                yield Outcome("compile", detail=first_line(e))
                continue
            try:
                yield self._measure(config)
            except Exception as e:
                yield Outcome("crash", detail=first_line(e))

    def _compile(self, config: Any) -> Any:
        return self._ahead(lambda problem, *arrays: self.spec.run(problem, config, self.gpu, *arrays))

    def _measure(self, config: Any) -> Outcome:
        from mgpu_ops.tuning import measure

        error = measure.error(self.compiled[config](*self.arrays), self.expected)
        limit = self.spec.tolerance(self.problem)
        if not error <= limit:
            return Outcome("wrong", error=error, detail=f"error {error:.3g} exceeds {limit:.3g}")
        ours, theirs = self._times([config], rounds=3)
        rounds = measure.rounds_for(0.05, measure.median_us(ours), low=5, high=15)
        ours, theirs = self._times([config], rounds)
        return Outcome("ok", measure.median_us(ours), measure.median_us(theirs), error)

    def finals(self, configs: list[Any], seconds: float) -> Final:
        from mgpu_ops.tuning import measure

        for config in configs:
            self.compiled.setdefault(config, None)
            self.compiled[config] = self.compiled[config] or self._compile(config)
        once = sum(min(samples) for samples in self._times(configs, rounds=3))
        *ours, theirs = self._times(configs, measure.rounds_for(seconds, once, low=11, high=101))
        return Final(dict(zip(configs, ours, strict=True)), theirs)

    def _times(self, configs: list[Any], rounds: int) -> list[list[float]]:
        from mgpu_ops.tuning import measure

        calls = [functools.partial(self.compiled[config], *self.arrays) for config in configs]
        return measure.interleaved([*calls, self.baseline_call], self.gpu, rounds)
