"""The process that runs candidates on the GPU. What a bad kernel breaks, it breaks here.

It says `Ready` or `Failed` over a pipe. Then it answers requests: `Open` with `Opened`, `Judge` with a `Verdict`, `Finals`
with a `Final`, `Sustain` with a `SustainedFinal`, and any of them with `Failed`. A `Note` of what the tuner should say may come
before an answer.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import os
import time
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import Baseline, Config, OpSpec, Problem, baseline_of
from mgpu_ops.tuning.child import first_line, settle
from mgpu_ops.tuning.outcome import Final, Outcome, SustainedFinal
from mgpu_ops.tuning.sharing import first_devices, shared_out

_RETAKES = 3  # of samples, while the clock is not what it was
_PAUSE = 0.3  # seconds between two of them


class WorkerError(RuntimeError):
    """The worker process cannot do its work at all; the message says why."""


class Lost(WorkerError):
    """No worker starts any more: the GPU is gone, or no longer to be had."""


# --- requests


@dataclasses.dataclass(frozen=True)
class Open:
    """Prepare a problem. `baseline_us` is the baseline's time in the worker that this one replaces, or None."""

    op: str
    problem: Problem
    seed: int
    baseline_us: float | None = None


@dataclasses.dataclass(frozen=True)
class Judge:
    """Is this candidate of the open problem right, and how long does it take?"""

    config: Config
    executable: Executable


@dataclasses.dataclass(frozen=True)
class Finals:
    """Measure these candidates of the open problem in turn, for so many seconds."""

    candidates: list[tuple[Config, Executable]]
    seconds: float


@dataclasses.dataclass(frozen=True)
class Sustain:
    """Let these candidates of the open problem run without pause, in turns of so many seconds."""

    candidates: list[tuple[Config, Executable]]
    seconds: float


Request = Open | Judge | Finals | Sustain


# --- answers


@dataclasses.dataclass(frozen=True)
class Ready:
    gpu: Gpu
    versions: dict[str, str | None]
    topology: bytes | None = None  # these very GPUs, for those that compile for them


@dataclasses.dataclass(frozen=True)
class Opened:
    baseline: str  # the name of what is timed beside candidates
    baseline_us: float = 0.0  # its time


@dataclasses.dataclass(frozen=True)
class Verdict:
    outcome: Outcome
    spoilt: bool = False  # the process is not fit for another candidate, and ends


@dataclasses.dataclass(frozen=True)
class Note:
    text: str


@dataclasses.dataclass(frozen=True)
class Failed:
    """The request could not be carried out."""

    reason: str


Answer = Ready | Opened | Verdict | Final | SustainedFinal | Failed


# --- the process


def serve(pipe: Any, visible: str | None = None, specs: Callable[[str], OpSpec] | None = None) -> None:
    """Answers requests until the pipe closes, or until a candidate has spoilt the process.

    `visible`: the GPU or GPUs, as CUDA_VISIBLE_DEVICES names them; None: all. `specs` finds an op by its name,
    `mgpu_ops.spec_of` by default.
    """
    settle()
    os.environ.setdefault("XLA_PYTHON_CLIENT_PREALLOCATE", "false")
    if visible is not None:
        os.environ |= {"CUDA_VISIBLE_DEVICES": visible, "CUDA_DEVICE_ORDER": "PCI_BUS_ID"}
    try:
        pipe.send(_ready())
    except Exception as e:
        pipe.send(Failed(first_line(e)))
        return
    from mgpu_ops import ops

    find = specs or ops.spec_of
    session: _Session | None = None
    while session is None or not session.spoilt:
        try:
            request: Request = pipe.recv()
        except EOFError:
            return
        answer: Answer
        try:
            if isinstance(request, Open):
                session = None  # its arrays make room
                say = lambda text: pipe.send(Note(text))  # noqa: E731
                session = _Session(find(request.op), request.problem, request.seed, request.baseline_us, say)
            answer = _answer(session, request)
        except Exception as e:
            answer = Failed(first_line(e))
        pipe.send(answer)


def _answer(session: _Session | None, request: Request) -> Answer:
    if session is None:
        raise WorkerError("no problem is open")
    if isinstance(request, Open):
        return Opened(session.baseline, session.clock.first)
    if isinstance(request, Judge):
        outcome = session.judge(request.config, request.executable)
        return Verdict(outcome, session.spoilt)
    if isinstance(request, Sustain):
        return session.sustained(request.candidates, request.seconds)
    return session.finals(request.candidates, request.seconds)


def _ready() -> Ready:
    import jax
    import jaxlib

    from mgpu_ops.core import aot, gpu

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
    topology = None
    with contextlib.suppress(jax.errors.JaxRuntimeError):  # of a plugin that cannot describe a device
        topology = aot.attached()
    return Ready(found, versions, topology)


def _cuda_version(device: Any) -> str | None:
    """The CUDA version in XLA's platform version, e.g. "13000" of "PJRT C API\\ncuda 13000"."""
    words = device.client.platform_version.split()
    return words[words.index("cuda") + 1] if "cuda" in words[:-1] else None


class _Session:
    """One problem: its inputs, the reference's result, and the baseline to time beside candidates.

    The reference runs once, for its result; it may be far slower than any candidate. It replaces a baseline that cannot run.
    `baseline_us` is the baseline's time in the worker that this one replaces.
    """

    def __init__(self, spec: OpSpec, problem: Problem, seed: int, baseline_us: float | None, say: Callable[[str], None]):
        import jax

        from mgpu_ops.core import gpu
        from mgpu_ops.tuning import measure
        from mgpu_ops.tuning.timing import timing_of

        self.spec, self.problem, self.say = spec, problem, say
        device = gpu.from_device(jax.devices()[0])
        assert device is not None
        self.gpu = device
        self.devices = spec.devices(problem)
        self.timing = timing_of(spec.name)
        if self.devices > len(jax.local_devices()):
            raise WorkerError(f"it takes {self.devices} GPUs, and the worker has {len(jax.local_devices())}")
        arrays = jax.jit(lambda key: self.spec.inputs(self.problem, key))(jax.random.key(seed))
        self.arrays = shared_out(arrays, self.devices, first_devices(self.devices))
        reference = self._compiled(self.spec.reference)
        self.expected = reference(*self.arrays)
        self.baseline = "xla"
        self.baseline_call: Callable[[], Any] = functools.partial(reference, *self.arrays)
        baseline = baseline_of(self.spec, self.problem)
        if baseline.run is not self.spec.reference:
            with contextlib.suppress(Exception):  # whatever a library makes of a problem that it does not take
                self.baseline, self.baseline_call = baseline.name, self._call_of(baseline)
        self.calls: dict[Config, Callable[..., Any]] = {}
        self.loads = 2  # how often loading what another process compiled may fail before this one gives it up
        self.spoilt = False
        self.fingerprint = measure.fingerprint((self.arrays, self.expected))
        now = measure.median_us(self._samples([], rounds=9)[0])
        self.clock = measure.Clock(baseline_us or now, now)

    def _compiled(self, function: Callable[..., Any], *arrays: Any) -> Callable[..., Any]:
        import jax

        call = jax.jit(lambda *arrays: function(self.problem, *arrays))
        return call.lower(*(arrays or self.arrays)).compile()

    def _call_of(self, baseline: Baseline) -> Callable[[], Any]:
        """The baseline's call, which has run once."""
        import jax

        arrays = self.arrays if baseline.arrays is None else self._compiled(baseline.arrays)(*self.arrays)
        run = lambda problem, *arrays: self.timing.program(functools.partial(baseline.run, problem))(*arrays)  # noqa: E731
        call = functools.partial(self._compiled(run, *arrays), *arrays)
        jax.block_until_ready(call())
        return call

    def judge(self, config: Config, executable: Executable) -> Outcome:
        """Whether a candidate is right and how long it takes. `spoilt` where it has broken more than itself."""
        try:
            self._load(config, executable)
        except Exception as e:
            return Outcome("compile", detail=first_line(e))
        try:
            outcome = self._checked(config, self._timed)
            return self._overwritten() or outcome
        except Exception as e:
            self.spoilt = not self._gpu_works()
            return Outcome("memory" if "RESOURCE_EXHAUSTED" in str(e) else "crash", detail=first_line(e))

    def finals(self, candidates: Sequence[tuple[Config, Executable]], seconds: float) -> Final:
        """Samples of the candidates that are right, once more, in turn with the baseline's."""
        from mgpu_ops.tuning import measure

        configs = self._right(candidates)
        once = sum(min(samples) for samples in self._samples(configs, rounds=3))
        *ours, theirs = self._samples(configs, measure.rounds_for(seconds, once, low=11, high=101))
        if spoilt := self._overwritten():
            raise RuntimeError(spoilt.detail)
        return Final(dict(zip(configs, ours, strict=True)), theirs)

    def sustained(self, candidates: Sequence[tuple[Config, Executable]], seconds: float) -> SustainedFinal:
        """Turns of the candidates that are right, and of the baseline, each without pause."""
        from mgpu_ops.tuning import measure

        configs = self._right(candidates)
        with measure.metered(self.say) as meter:
            *ours, theirs = measure.sustained([*self._calls(configs), self.baseline_call], seconds, meter=meter)
        if spoilt := self._overwritten():
            raise RuntimeError(spoilt.detail)
        return SustainedFinal(dict(zip(configs, ours, strict=True)), theirs)

    def _right(self, candidates: Sequence[tuple[Config, Executable]]) -> list[Config]:
        """The candidates that are right, once more; says which are not."""
        for config, executable in candidates:
            self._load(config, executable)
        right = {config: self._checked(config) for config, _ in candidates}
        for config, outcome in right.items():
            if outcome.kind != "ok":
                self.say(f"a finalist is out: {config}: {outcome.detail}")
        return [config for config, outcome in right.items() if outcome.kind == "ok"]

    def _load(self, config: Config, executable: Executable) -> None:
        """Loads what was compiled elsewhere. Compiles here where that fails, with a `Note`.

        The first may be refused for want of Mosaic's run-time library, which a process opens when it compiles a kernel itself.
        """
        from mgpu_ops.core import aot

        if config in self.calls:
            return
        refused = ""
        if self.loads:
            try:
                self.calls[config] = aot.load(executable)
                return
            except Exception as e:
                refused = first_line(e)
        self.calls[config] = self._compile(config)
        if refused:
            self.loads -= 1
        if refused and not self.loads:
            self.say(f"candidates compile a second time, beside the measurements: what was compiled is not loaded ({refused})")

    def _compile(self, config: Config) -> Callable[..., Any]:
        import jax

        call = jax.jit(self.timing.program(functools.partial(self.spec.run, self.problem, config, self.gpu)))
        return call.lower(*self.arrays).compile(compiler_options={"xla_gpu_autotune_level": "0"})

    def _checked(self, config: Config, time: Callable[[Any], Outcome] | None = None) -> Outcome:
        """The outcome of two runs on the same inputs, and of one more after `time` has run the candidate many times.

        Of kind "ok" only if all results are right.
        """
        once = self.calls[config](*self.arrays)
        outcome = self._compared_with_reference(once, once)
        if outcome.kind == "ok":
            outcome = self._compared_with_reference(once, self.calls[config](*self.arrays))
        if outcome.kind == "ok" and time is not None:
            timed = time(config)
            outcome = self._compared_with_reference(once, self.calls[config](*self.arrays))
            if outcome.kind == "ok":
                return dataclasses.replace(timed, error=outcome.error)
        return outcome

    def _compared_with_reference(self, once: Any, again: Any) -> Outcome:
        """The outcome of comparing a result with the reference's, within tolerance, and bit for bit with an earlier result.

        The bits may differ where the problem says `deterministic=False`.
        """
        from mgpu_ops.tuning import measure

        error, limit = measure.error(self.timing.result(again), self.expected), self.spec.tolerance(self.problem)
        if not error <= limit:
            return Outcome("wrong", error=error, detail=f"error {error:.3g} exceeds {limit:.3g}")
        if getattr(self.problem, "deterministic", True) and not measure.same(once, again):
            return Outcome("wrong", error=error, detail="two runs on the same inputs differ")
        return Outcome("ok", error=error)

    def _timed(self, config: Config) -> Outcome:
        from mgpu_ops.tuning import measure

        ours, _ = self._samples([config], rounds=3)
        rounds = measure.rounds_for(0.05, measure.median_us(ours), low=5, high=15)
        ours, theirs = self._steady_samples(config, rounds)
        scale = self.clock.scale
        return Outcome(
            "ok",
            us=measure.median_us(ours) * scale,
            baseline_us=measure.median_us(theirs) * scale,
            samples=tuple(us * scale for us in ours),
            detail="" if scale == 1.0 else f"times scaled by {scale:.3f}: the GPU's clock has drifted",
        )

    def _steady_samples(self, config: Config, rounds: int) -> list[list[float]]:
        """Samples of a candidate and the baseline, taken again while the baseline is not as fast as it was.

        Where it stays so, that is the GPU's speed from now on, and times are scaled to what they were.
        """
        from mgpu_ops.tuning import measure

        ours, theirs = self._samples([config], rounds)
        for _ in range(_RETAKES):
            if self.clock.holds(measure.median_us(theirs)):
                return [ours, theirs]
            time.sleep(_PAUSE)
            ours, theirs = self._samples([config], rounds)
        if self.clock.holds(measure.median_us(theirs)):
            return [ours, theirs]
        self.clock.now = measure.median_us(theirs)
        self.say(
            f"the GPU's clock has drifted: {self.baseline} took {self.clock.first:.1f} us and takes {self.clock.now:.1f} us;"
            " samples were taken again, and from here on times are scaled to the first"
        )
        return [ours, theirs]

    def _samples(self, configs: Sequence[Config], rounds: int) -> list[list[float]]:
        from mgpu_ops.tuning import measure

        functions = [*self._calls(configs), self.baseline_call]
        return measure.interleaved(functions, self.gpu, rounds, self.devices, self.timing.calls)

    def _calls(self, configs: Sequence[Config]) -> list[Callable[[], Any]]:
        return [functools.partial(self.calls[config], *self.arrays) for config in configs]

    def _overwritten(self) -> Outcome | None:
        """The outcome of a candidate that has written to inputs or the expected result, which spoils the process; else None."""
        from mgpu_ops.tuning import measure

        if measure.fingerprint((self.arrays, self.expected)) == self.fingerprint:
            return None
        self.spoilt = True
        return Outcome("wrong", detail="it writes outside its result: inputs have changed")

    def _gpu_works(self) -> bool:
        """Whether the GPU still works for this process: after an illegal address every call fails."""
        import jax

        with contextlib.suppress(Exception):
            jax.block_until_ready(self.baseline_call())
            return True
        return False
