"""Benchmarks: an op through its public function, timed beside other implementations.

All implementations of a problem are timed in turn within one run. `bench/collectives.py` measures collectives.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import functools
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from functools import partial

import jax
import jax.numpy as jnp

import mgpu_ops
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import ptxas
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import dispatch, resolution
from mgpu_ops.registry.spec import OpSpec, Problem
from mgpu_ops.tuning import measure, public
from mgpu_ops.tuning.bench import layers
from mgpu_ops.tuning.bench.implementations import COMPETITORS, Competitor
from mgpu_ops.tuning.bench.results import (
    GRAD,
    OURS,
    ROOFLINE,
    SUSTAINED,
    Libraries,
    Measurement,
    Stamp,
    six_digits,
    tolerance,
)
from mgpu_ops.tuning.bench.settings import CompiledCall, Function, Timer, TuningContext, compiled, settings_in
from mgpu_ops.tuning.compile_pool import Pool
from mgpu_ops.tuning.labels import label
from mgpu_ops.tuning.nvml import Meter
from mgpu_ops.tuning.outcome import Turn
from mgpu_ops.tuning.public import BACKWARD
from mgpu_ops.tuning.terminal import brief

_GRAD_FACTOR = 3  # forward and backward are three products of the same size, but for attention and these:
_GRADIENTS = ("cross_entropy", "rms_norm", "rotary")  # ops whose own problem with `gradient` computes all of their gradient
_UNTUNED = {"xla_gpu_autotune_level": 0}  # what runs once need not be fast: XLA times no kernels for it


@dataclass(frozen=True)
class BenchOptions:
    """How problems are measured."""

    gpu: Gpu
    seconds: float  # for the rounds of one problem with a cold L2; with a warm one they take half of it more
    against: Sequence[str] = ()  # names of competitors
    grad: bool = False  # forward and backward together, applied to a random cotangent
    backend: dispatch.Backend | None = None  # of ours
    seed: int = 0  # of the inputs
    timer: Timer = measure.interleaved
    warm_timer: Timer = measure.warm
    sustained: float | None = None  # seconds of a turn without pause; None: bursts
    sustained_timer: Callable[..., list[list[Turn]]] = measure.sustained
    competitor_seconds: float = 60.0  # that a tuned competitor may take to compile its settings, for each problem
    earlier: Sequence[Measurement] = ()  # competitors whose best settings for a problem are told here are not tuned again
    pool: Pool | None = None  # processes that compile competitors' settings


def run(
    spec: OpSpec,
    problems: Mapping[str, Problem],
    options: BenchOptions,
    *,
    progress: Callable[[str], None],
    save: Callable[[list[Measurement]], None] | None = None,
) -> list[Measurement]:
    """Measures `problems` (name -> Problem): ours, each competitor that can run the problem, and the roofline.

    `progress` gets a line of text before anything compiles or is timed, and for each problem that was measured, each competitor
    that cannot run it, each wrong result and each problem that failed; the run goes on, and `results.failures` lists afterwards
    what failed. `save` gets all measurements so far after each problem.

    Raises ValueError for an unknown competitor, and for `grad` of an op that is a gradient itself.
    """
    if options.grad and spec.name in BACKWARD.values():
        raise ValueError(f"{spec.name} is a gradient itself: measure it without --grad, or the forward op with it")
    competitors = {name: _competitor(spec, name) for name in options.against}
    options = dataclasses.replace(options, backend=dispatch.requested_backend(options.backend))
    stamp = stamp_of(spec.name + GRAD * options.grad + SUSTAINED * (options.sustained is not None), options.gpu)
    measured: list[Measurement] = []
    with contextlib.nullcontext() if options.sustained is None else measure.metered(progress) as meter:
        for name, problem in problems.items():
            text = label(spec, name, problem)
            one = _ProblemRun(spec, problem, text, options, stamp, partial(_say, progress, text), meter)
            try:
                with gpus.target(options.gpu):  # what is compiled is what `resolve` is asked for
                    new = one.measure(competitors)
            except Exception as error:
                one.say(f"failed: {brief(error)}")
                continue
            measured += new
            one.say(", ".join(f"{row.impl} {_us(row)}" for row in new))
            if save:
                save(measured)
    return measured


def _say(progress: Callable[[str], None], problem: str, message: str) -> None:
    progress(f"{problem}: {message}")


def stamp_of(name: str, gpu: Gpu) -> Stamp:
    """What all measurements of a run have in common: op, GPU, date, and the versions of what runs."""
    return {
        "op": name,
        "gpu": gpu.name,
        "driver": gpus.driver_version() or "",
        "jax": jax.__version__,
        "date": datetime.date.today().isoformat(),
        **_libraries(),
    }


@functools.cache
def _libraries() -> Libraries:
    """Versions of the libraries that XLA calls and of the assembler, "" of those that are not here."""
    from jax._src.lib import cuda_versions

    def version(name: str) -> str:
        try:
            number = getattr(cuda_versions, f"{name}_get_version")()
        except (AttributeError, RuntimeError):  # no CUDA plugin, no library, or no GPU
            return ""
        return f"{number // 10000}.{number // 100 % 100}.{number % 100}"

    isa = ptxas.isa()
    return {"cudnn": version("cudnn"), "cublas": version("cublas"), "ptxas": "" if isa is None else f"{isa // 10}.{isa % 10}"}


def _us(row: Measurement) -> str:
    told = f"{row.median_us:.4g} us"
    if row.warm_us is not None:
        told += f" ({row.warm_us:.4g} warm)"
    return told if row.watts is None else f"{told} ({row.watts:.4g} W)"


def _competitor(spec: OpSpec, name: str) -> Competitor:
    known = COMPETITORS.get(spec.name, {})
    if name not in known:
        raise ValueError(f"{name!r} is no competitor of {spec.name}: name one of {', '.join(known)}")
    return known[name]


def config_text(spec: OpSpec, problem: Problem, gpu: Gpu, backend: str | None = None) -> str:
    """The config that a call of ours uses, or "xla" and both times where it runs XLA; and where that comes from."""
    if backend == "xla":
        return "backend=xla"
    found = resolution.resolve(spec, problem, gpu)
    if found.runs == "xla" and backend is None:
        return f"xla{f', {found.times}' if found.times else ''}; source={found.source}"
    fields = dataclasses.asdict(found.config).items()
    return f"{' '.join(f'{key}={value}' for key, value in fields)}; source={found.source}"


def our_config(spec: OpSpec, problem: Problem, gpu: Gpu, *, grad: bool = False, backend: str | None = None) -> str:
    """The config of a call of ours and where it comes from, with `grad` also that of a backward op.

    A gradient that is computed by products of the same op has configs of its own, which are not told.
    """
    if backend == "xla":
        return "backend=xla"
    if spec is layers.SPEC:
        return "of its products"

    def told(spec: OpSpec, problem: Problem) -> str:
        if reason := spec.supports(problem, gpu):
            return f"backend=xla, for {reason}"
        alone = spec.name in BACKWARD.values() and not grad  # a gradient by itself is that of the kernel
        return config_text(spec, problem, gpu, "mosaic" if alone else backend)

    text = f"{'forward ' * grad}{told(spec, problem)}"
    if grad and (backward := _backward(spec, problem)):
        text += f" | backward {told(*backward)}"
    return text


def _backward(spec: OpSpec, problem: Problem) -> tuple[OpSpec, Problem] | None:
    """The op that computes the gradient, where it is a kernel of its own, and its problem."""
    if spec.name in _GRADIENTS:
        return spec, dataclasses.replace(problem, gradient=True)
    if spec.name not in BACKWARD:
        return None
    backward = mgpu_ops.spec_of(BACKWARD[spec.name])
    fields = dataclasses.asdict(problem)
    return backward, backward.Problem(**fields, bias_grad=fields["bias"] != "none")


# --- One problem ----------------------------------------------------------------------------------


@dataclass(frozen=True)
class _Implementation:
    """A compiled implementation that has run once."""

    impl: str
    config: str
    call: CompiledCall
    error: float | None  # None of a yardstick


@dataclass(frozen=True)
class _ProblemRun:
    """The measuring of one problem."""

    spec: OpSpec
    problem: Problem
    label: str
    options: BenchOptions
    stamp: Stamp
    say: Callable[[str], None]
    meter: Meter | None = None  # of what is measured sustained

    def measure(self, competitors: Mapping[str, Competitor]) -> list[Measurement]:
        """Ours, the competitors that can run the problem, and the roofline."""
        found = self.implementations(competitors)
        self.say(f"times {', '.join(each.impl for each in found)}")
        return [*self.timed(found), self.roofline()]

    # Implementations

    def implementations(self, competitors: Mapping[str, Competitor]) -> list[_Implementation]:
        """Ours and every competitor that can run the problem, compiled and compared with float32."""
        key, cotangent_key = jax.random.split(jax.random.key(self.options.seed))
        arrays = public.arrays_of(self.spec, jax.jit(partial(self.spec.inputs, self.problem))(key))
        ours = _call(self.spec)(self.problem, self.options.backend)
        self.say("compiles and runs the same in float32 through XLA, to compare results with")
        check = _Check(self, ours, arrays, cotangent_key)
        self.say(f"compiles {OURS}")
        found = [check(OURS, ours, self.our_config(), arrays)]
        for name, competitor in competitors.items():
            try:
                reason = self.unavailable(competitor)
                if reason is not None:
                    self.say(f"{name} {reason}")
                    continue
                self.say(f"compiles {name}{self.settings_of(name) if competitor.tuned else ''}")
                theirs = arrays if competitor.arrays is None else jax.jit(partial(competitor.arrays, self.problem))(*arrays)
                function, config = competitor.prepare(self.tuning_context(name, theirs))
                found.append(check(name, function, config, theirs, competitor))
            except Exception as error:
                self.say(f"{name} failed: {brief(error)}")
        return found

    def unavailable(self, competitor: Competitor) -> str | None:
        if self.options.grad and not competitor.differentiable:
            return "is measured forward only"
        return competitor.unavailable(self.problem, self.options.gpu)

    def known(self, competitor: str) -> frozenset[str]:
        """The settings that won an earlier run of this op and problem."""
        of_problem = (self.op, self.label, competitor, self.options.gpu.name)
        for row in reversed(self.options.earlier):
            if (row.op.removesuffix(SUSTAINED), row.problem, row.impl, row.gpu) == of_problem:
                return settings_in(row.config)
        return frozenset()

    @property
    def op(self) -> str:
        """As rows name it, with or without a pause."""
        op: str = self.stamp["op"].removesuffix(SUSTAINED)
        return op

    def settings_of(self, competitor: str) -> str:
        """Which settings of a tuned competitor are tried, and for how long."""
        which = "its settings"
        if self.options.earlier:
            which = "those that won before" if self.known(competitor) else f"its settings (no earlier ones of {self.op} for it)"
        return f", {which} for up to {self.options.competitor_seconds:g} s"

    def tuning_context(self, competitor: str, arrays: tuple) -> TuningContext:
        o = self.options
        return TuningContext(
            problem=self.problem,
            gpu=o.gpu,
            arrays=arrays,
            timer=o.timer,
            grad=o.grad,
            seconds=o.competitor_seconds,
            known=self.known(competitor),
            pool=o.pool,
        )

    def our_config(self) -> str:
        o = self.options
        return our_config(self.spec, self.problem, o.gpu, grad=o.grad, backend=o.backend)

    # Times

    def timed(self, implementations: Sequence[_Implementation]) -> list[Measurement]:
        """Cold and warm, each in rounds of all implementations in turn; or sustained, in longer turns without pause."""
        o, calls = self.options, [each.call for each in implementations]
        if o.sustained is not None:
            turns = o.sustained_timer(calls, o.sustained, meter=self.meter)
            return [self.sustained(each, of_one) for each, of_one in zip(implementations, turns, strict=True)]
        once_us = sum(map(measure.median_us, o.timer(calls, o.gpu, 3)))
        flush_us = measure.FLUSHED * o.gpu.l2_bytes / o.gpu.memory_bytes_per_s * 1e6 + 10  # 10 us is for the launches
        cold = o.timer(calls, o.gpu, measure.rounds_for(o.seconds, once_us + len(calls) * flush_us))
        warm = o.warm_timer(calls, o.gpu, measure.rounds_for(o.seconds / 2, 2 * once_us))
        return [
            self.measurement(each.impl, each.config, each.error, cold_us, warm_us)
            for each, cold_us, warm_us in zip(implementations, cold, warm, strict=True)
        ]

    def sustained(self, each: _Implementation, turns: Sequence[Turn]) -> Measurement:
        row = self.measurement(each.impl, each.config, each.error, [turn.us for turn in turns], None)
        typical = measure.typical(turns)
        watts, clock, joules = (x and six_digits(x) for x in (typical.watts, typical.clock_mhz, typical.joules))
        return dataclasses.replace(row, watts=watts, clock_mhz=clock, joules=joules)

    def roofline(self) -> Measurement:
        """The least time by the datasheet: max(flops / tensor-core rate, bytes / memory bandwidth)."""
        flops, moved = self.work()
        rate = self.options.gpu.flops(getattr(self.problem, "dtype", "bfloat16"))
        seconds = max(flops / rate, moved / self.options.gpu.memory_bytes_per_s)
        return self.measurement(ROOFLINE, "datasheet", 0.0, [seconds * 1e6], None)

    def measurement(
        self, impl: str, config: str, error: float | None, cold_us: Sequence[float], warm_us: Sequence[float] | None
    ) -> Measurement:
        flops, moved = self.work()
        median_us = measure.median_us(cold_us)
        return Measurement(
            problem=self.label,
            impl=impl,
            config=config,
            median_us=six_digits(median_us),
            spread_us=six_digits(measure.spread_us(cold_us)),
            tflops=six_digits(flops / median_us / 1e6),
            gbs=six_digits(moved / median_us / 1e3),
            error=None if error is None else six_digits(error),
            warm_us=None if warm_us is None else six_digits(measure.median_us(warm_us)),
            **self.stamp,
        )

    def work(self) -> tuple[int, int]:
        """Operations and bytes."""
        flops, moved = self.spec.flops(self.problem), self.spec.bytes(self.problem)
        if not self.options.grad:
            return flops, moved
        if backward := _backward(self.spec, self.problem):
            spec, problem = backward
            return flops + spec.flops(problem), moved + spec.bytes(problem)
        return _GRAD_FACTOR * flops, _GRAD_FACTOR * moved


# --- Compiled and checked -------------------------------------------------------------------------


class _Check:
    """Compiles implementations of a problem and compares their results with float32."""

    def __init__(self, one: _ProblemRun, ours: Function, arrays: tuple, cotangent_key: jax.Array):
        self._one, self._grad = one, one.options.grad
        self._cotangent = functools.cache(partial(jax.random.normal, cotangent_key))
        self._expected = _expected(one.spec, one.problem, self._operands(ours, arrays), grad=self._grad)
        self._limit = tolerance(one.spec, one.problem, self._grad)

    def __call__(
        self, impl: str, function: Function, config: str, arrays: tuple, competitor: Competitor | None = None
    ) -> _Implementation:
        """Compiled, run once and compared; a wrong result is said. A yardstick is not compared."""
        call = compiled(_with_gradient(function) if self._grad else function, self._operands(function, arrays))
        answers = call()
        if competitor is not None and competitor.yardstick:
            return _Implementation(impl, config, call, None)
        if competitor is not None and competitor.answers is not None:
            answers = competitor.answers(answers)
        error = measure.error(answers, self._expected)
        if not error <= self._limit:
            self._one.say(f"WRONG RESULT of {impl}: error {error:.2g} is above {self._limit:.2g}")
        return _Implementation(impl, config, call, error)

    def _operands(self, function: Function, arrays: tuple) -> tuple:
        """The arrays, with `grad` also a cotangent: the same for all results of one shape and dtype."""
        if not self._grad:
            return arrays
        out = jax.eval_shape(function, *arrays)
        if not _is_float(out):
            raise ValueError(f"results in {out.dtype} have no gradient: measure them without --grad")
        return *arrays, self._cotangent(out.shape, out.dtype)


def _call(spec: OpSpec) -> Callable[..., Function]:
    """Of a problem and a backend, the public function."""
    return layers.call if spec is layers.SPEC else public.CALLS[spec.name]


def _is_float(x: jax.Array | jax.ShapeDtypeStruct) -> bool:
    return jnp.issubdtype(x.dtype, jnp.floating)


def _with_gradient(function: Function) -> Callable[..., tuple]:
    """The function with its gradients with respect to all inputs that are floats, which group sizes are not."""

    def forward_and_backward(*operands: jax.Array) -> tuple:
        *arrays, cotangent = operands
        which = [i for i, x in enumerate(arrays) if _is_float(x)]

        def of_floats(*floats: jax.Array) -> jax.Array:
            given = dict(zip(which, floats))
            out: jax.Array = function(*(given.get(i, x) for i, x in enumerate(arrays)))
            return out

        out, pull = jax.vjp(of_floats, *(arrays[i] for i in which))
        return out, *pull(cotangent)

    return forward_and_backward


def _expected(spec: OpSpec, problem: Problem, operands: tuple, *, grad: bool) -> tuple[jax.Array, ...]:
    """The results in float32, by the public function through XLA at its highest precision, from the same inputs.

    Operands of int8 products become floats too: XLA's own integer products were wrong on an H200 where it times no kernels.
    """
    integers = getattr(problem, "dtype", None) == "int8"
    wide = tuple(x.astype(jnp.float32) if _is_float(x) or (integers and x.dtype == jnp.int8) else x for x in operands)
    function = _call(spec)(_in_float32(problem), "xla")
    if grad:
        function = _with_gradient(function)
    with jax.default_matmul_precision("highest"):
        answers = jax.jit(function, compiler_options=_UNTUNED)(*wide)
    return tuple(jax.tree.leaves(answers))


def _in_float32(problem: Problem) -> Problem:
    names = {field.name for field in dataclasses.fields(problem)} & {"dtype", "out_dtype"}
    return dataclasses.replace(problem, **dict.fromkeys(names, "float32"))
