"""Other implementations of an op, for `bench` to measure beside ours."""

from __future__ import annotations

import dataclasses
import functools
import importlib
import itertools
import logging
import math
import os
import pickle
import re
import time
from collections.abc import Callable, Collection, Hashable, Iterable, Iterator, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mgpu_ops import SPECS, RaggedContractionProblem
from mgpu_ops.attention import cudnn
from mgpu_ops.attention.model import SOFT_CAP
from mgpu_ops.core import aot
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning.compile_pool import Call, Pool
from mgpu_ops.tuning.measure import median_us
from mgpu_ops.tuning.worker import baseline_of

Timer = Callable[[Sequence[Callable[[], Any]], Gpu, int], list[list[float]]]  # measure.interleaved
Prepared = tuple[Callable[..., Any], str]  # a function of the task's arrays that jax.jit can trace, and its settings as text


@dataclass(frozen=True)
class Task:
    """What a peer is tuned for."""

    problem: Any
    gpu: Gpu
    arrays: tuple  # what the function will take
    timer: Timer
    grad: bool = False  # whether the function will be differentiated
    seconds: float = 60.0  # that compiling its settings may take, about
    known: frozenset[str] = frozenset()  # settings, as text, that won an earlier run: others are not tried again
    pool: Pool | None = None  # processes that compile; None: threads of this one do


@dataclass(frozen=True)
class Peer:
    """Another implementation of an op.

    `unavailable(problem, gpu)` says why it cannot run a problem, or None. `prepare` tunes it, where it is `tuned`. A yardstick
    computes something else of the same cost: its result is not compared. `arrays(problem, *arrays)` makes what its function
    takes of what ours takes, in advance and untimed.
    """

    unavailable: Callable[[Any, Gpu], str | None]
    prepare: Callable[[Task], Prepared]
    differentiable: bool
    yardstick: bool = False
    arrays: Callable[..., tuple] | None = None
    tuned: bool = False


class Ready:
    """A function, and the call of it on certain arrays, which is compiled already."""

    def __init__(self, function: Callable[..., Any], arrays: tuple, call: Callable[[], Any]):
        self._function, self.arrays, self.call = function, arrays, call

    def __call__(self, *arrays: Any) -> Any:
        return self._function(*arrays)


def compiled(function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
    """The call `function(*arrays)`, compiled ahead."""
    if isinstance(function, Ready) and list(map(id, function.arrays)) == list(map(id, arrays)):
        return function.call
    return partial(jax.jit(function).lower(*arrays).compile(), *arrays)


def brief(error: BaseException) -> str:
    """An exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:300]}".rstrip(": ")


# --- Tuning a peer ----------------------------------------------------------------------------------------------------


def _text(setting: Any) -> str:
    """A setting, a tuple of (name, value), as "name=value ..."."""
    return " ".join(f"{name}={value}" for name, value in setting)


def settings_in(config: str) -> frozenset[str]:
    """The settings that a peer's config, as a result file has it, tells of."""
    return frozenset(part.strip() for part in re.split(r"[;|]", config))


def _fastest(
    task: Task,
    settings: Sequence[Hashable],
    build: Callable[[Any], Callable[..., Any]],
    passes: Sequence[Sequence[str]] = (),
    pairs: Callable[[Any], Iterable[tuple[str, Any]]] = tuple,
    text: Callable[[Any], str] = _text,
) -> Prepared:
    """The function of the fastest of `settings`, and which that is."""
    best, call, said = _best(task, settings, build, passes, pairs, text)
    return Ready(build(best), task.arrays, call), said


def _best(
    task: Task,
    settings: Sequence[Hashable],
    build: Callable[[Any], Callable[..., Any]],
    passes: Sequence[Sequence[str]] = (),
    pairs: Callable[[Any], Iterable[tuple[str, Any]]] = tuple,
    text: Callable[[Any], str] = _text,
) -> tuple[Any, Callable[[], Any], str]:
    """The fastest of `settings`, by the medians of interleaved rounds with an L2 flush before each call; its call; and as text.

    `settings` come in the order of what they promise, and compile in that order until the task's seconds are over: what does
    not compile, or not in time, is passed over. Without `passes` all are tried. With them, each pass tries what its fields may
    be: the first pass one setting, the first, of those that share them; a later one all settings that differ from one of the
    two fastest so far in these fields only. `pairs(setting)` are its fields. Functions that `build` makes compile in the task's
    pool if pickle takes them. ValueError where no setting compiles.
    """
    end = time.monotonic() + task.seconds
    calls: dict[Hashable, Callable[[], Any]] = {}
    errors: list[str] = []
    late = 0

    def ranking(some: Sequence[Hashable], seconds: float) -> list[Any]:
        nonlocal late
        made, failed = _compiled({s: build(s) for s in some if s not in calls}, task, seconds)
        calls.update(made)
        errors.extend(failed)
        late += failed.count(_LATE)
        legal = [setting for setting in some if setting in calls]
        if not legal:
            raise ValueError(f"none of {len(settings)} settings compiles{'; the last: ' + errors[-1] if errors else ''}")
        samples = task.timer([calls[setting] for setting in legal], task.gpu, 3)
        times = dict(zip(legal, map(median_us, samples), strict=True))
        return sorted(times, key=lambda setting: times[setting])

    def fields(setting: Any, names: Collection[str], within: bool) -> tuple:
        return tuple((name, value) for name, value in pairs(setting) if (name in names) == within)

    again = [s for s in settings if text(s) in task.known]
    if again or not passes:
        ranked = ranking(again or settings, task.seconds)
    else:
        first: dict[tuple, Hashable] = {}
        for setting in settings:
            first.setdefault(fields(setting, passes[0], within=True), setting)
        ranked = ranking(list(first.values()), task.seconds / len(passes))
        for number, names in enumerate(passes[1:], 1):
            near = {fields(best, names, within=False) for best in ranked[:2]}
            some = [setting for setting in settings if fields(setting, names, within=False) in near]
            ranked = ranking(some, max(0.0, end - time.monotonic()) / (len(passes) - number))
    found = f"fastest of {len(calls)}" + " that won before" * bool(again) + f", {late} were not in time" * bool(late)
    return ranked[0], calls[ranked[0]], f"{text(ranked[0])}; {found}"


_LATE = "too slow to compile"
_Calls = tuple[dict[Hashable, Callable[[], Any]], list[str]]  # what compiles, and why the rest does not


def _compiled(functions: Mapping[Hashable, Callable[..., Any]], task: Task, seconds: float) -> _Calls:
    """The calls of functions on the task's arrays, compiled side by side, in `seconds` or a little more.

    In the processes of the task's pool, or in threads where it has none or nothing comes of it: a function that pickle does not
    find, a machine that does not load what another process compiled.
    """
    start = time.monotonic()
    if task.pool is not None and functions:
        made, errors = _in_processes(task.pool, functions, task, seconds)
        if made or errors.count(_LATE) == len(errors):
            return made, errors
    return _in_threads(functions, task, max(0.0, seconds - (time.monotonic() - start)))


def _in_processes(pool: Pool, functions: Mapping[Hashable, Callable[..., Any]], task: Task, seconds: float) -> _Calls:
    shapes = tuple(jax.ShapeDtypeStruct(x.shape, x.dtype) for x in task.arrays)
    topology = _attached()
    jobs = {}
    made: dict[Hashable, Callable[[], Any]] = {}
    errors = []
    for key, function in functions.items():
        call = Call(function, shapes, task.gpu, topology)
        try:
            pickle.dumps(call)  # here: a process that is asked what it cannot be told is lost
        except Exception as error:
            errors.append(brief(error))
        else:
            jobs[key] = pool.submit(call)
    wait(jobs.values(), seconds)
    for key, job in jobs.items():
        if job.cancel() or not job.done():
            errors.append(_LATE)
            continue
        try:
            found = job.result()
            if isinstance(found, Executable):
                made[key] = partial(aot.load(found), *task.arrays)
            else:
                errors.append(_LATE if found.kind == "timeout" else found.detail)
        except Exception as error:  # of a machine that does not load it
            errors.append(brief(error))
    return made, errors


@functools.cache
def _attached() -> bytes | None:
    try:
        return aot.attached()
    except jax.errors.JaxRuntimeError:  # of a plugin that cannot describe a device
        return None


def _in_threads(functions: Mapping[Hashable, Callable[..., Any]], task: Task, seconds: float) -> _Calls:
    pool = ThreadPoolExecutor(8)
    jobs = {key: pool.submit(compiled, function, task.arrays) for key, function in functions.items()}
    wait(jobs.values(), seconds)
    pool.shutdown(cancel_futures=True)  # those in progress come to their end
    made: dict[Hashable, Callable[[], Any]] = {}
    errors = []
    for key, job in jobs.items():
        if job.cancelled():
            errors.append(_LATE)
        elif error := job.exception():  # its limits, as of shared memory, raise
            errors.append(brief(error))
        else:
            made[key] = job.result()
    return made, errors


# --- XLA --------------------------------------------------------------------------------------------------------------


def _under_jit(function: Callable[..., Any], task: Task) -> Prepared:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return partial(function, task.problem), " ".join(["jit", *flags])


def _baseline(op: str) -> Peer:
    """What the tuner times beside candidates: cuBLAS or XLA's own kernels, as XLA's autotuning chooses."""
    spec = SPECS[op]
    function = baseline_of(spec, None).run
    yardstick = function is not spec.reference
    return Peer(lambda problem, gpu: None, partial(_under_jit, function), differentiable=True, yardstick=yardstick)


# --- jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu ---------------------------------------------------------------

_SMEM = 227 * 1024
_PALLAS_PASSES = (
    ("tile_m", "tile_n", "wg_dimension"),
    ("tile_k", "max_concurrent_steps", "cluster_dimension"),
    ("grid_minor_dim", "grid_tile_width"),
)


def pallas_tilings(problem: Any) -> Iterator[dict[str, Any]]:
    """The settings of JAX's own Hopper matmul that divisibility, registers and shared memory allow, the most promising first.

    Its tile_m and tile_n are those of one of two warpgroups, and the tile of both, or of a cluster of two blocks, must divide
    the problem. The space is that of the tuning loop in its own main(), with the clusters that it has but does not try, other
    tiles, deeper and shallower pipelines, wider steps and the raster of its default beside. Of each field the values of main()
    come first.
    """
    p = problem
    steps_first = (4, 5, 6, 8, 3, 2)
    for tile_m, tile_n, wg in itertools.product((128, 256, 64), (64, 128, 256), "MN"):
        rows, columns = tile_m * (1 + (wg == "M")), tile_n * (1 + (wg == "N"))
        if tile_m * tile_n // 128 > 200:  # registers of each thread for the accumulator
            continue
        rasters = list(itertools.product("NM", (8, 4, 16, 1)))
        if p.m == rows or p.n == columns:
            rasters = rasters[:1]  # one strip: all orders are the same
        for tile_k, steps, cluster in itertools.product((64, 128), steps_first, (None, "M", "N")):
            across = {None: (1, 1), "M": (2, 1), "N": (1, 2)}[cluster]
            if p.m % (rows * across[0]) or p.n % (columns * across[1]) or p.k % tile_k:
                continue
            slots = min(2, tile_m * tile_n // 64**2) * 2 * 64 * 64  # for the output, of both warpgroups
            if 2 * (steps * (rows + columns) * tile_k + slots) + 1024 > _SMEM:
                continue
            for minor, width in rasters:
                yield {
                    "tile_m": tile_m,
                    "tile_n": tile_n,
                    "tile_k": tile_k,
                    "max_concurrent_steps": steps,
                    "wg_dimension": wg,
                    "cluster_dimension": cluster,
                    "grid_minor_dim": minor,
                    "grid_tile_width": width,
                }


def _not_hopper(gpu: Gpu) -> str | None:
    return f"is for Hopper GPUs, not for {gpu.name}" if gpu.architecture != "hopper" else None


def _not_importable(module: str, remedy: str) -> str | None:
    try:
        importlib.import_module(module)
    except ImportError as error:
        return f"cannot be imported ({error}): {remedy}"
    return None


def _jax_sample(name: str) -> str:
    return f"jax.experimental.pallas.ops.gpu.{name}"


_NEEDS_ABSL = "it needs absl, `pip install absl-py`"


def _pallas_unavailable(problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu):
        return reason
    if problem.layout != "nn" or problem.batch != 1:
        return f"takes layout nn and batch 1, not layout {problem.layout} and batch {problem.batch}"
    if reason := _other_dtype(problem):
        return reason
    if next(pallas_tilings(problem), None) is None:
        return f"has no tile that divides m={problem.m}, n={problem.n}, k={problem.k}"
    return _not_importable(_jax_sample("hopper_matmul_mgpu"), _NEEDS_ABSL)


def _other_dtype(problem: Any) -> str | None:
    if problem.dtype not in ("bfloat16", "float16") or problem.out_dtype != problem.dtype:
        return f"gives a 16-bit input's dtype, not {problem.dtype} to {problem.out_dtype}"
    return None


def _pallas(setting: tuple, a: jax.Array, b: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    sides = ("wg_dimension", "cluster_dimension", "grid_minor_dim")
    fields = {key: theirs.MatmulDimension[value] if key in sides and value else value for key, value in setting}
    return theirs.matmul(a, b, None, theirs.TuningConfig(**fields))


def _pallas_prepare(task: Task) -> Prepared:
    settings = [tuple(tiling.items()) for tiling in pallas_tilings(task.problem)]
    return _fastest(task, settings, lambda setting: partial(_pallas, setting), _PALLAS_PASSES)


# --- Grouped products: each a function of (lhs, rhs, sizes) -----------------------------------------------------------


def _no_epilogue(problem: Any) -> str | None:
    if getattr(problem, "bias", False) or getattr(problem, "activation", "none") != "none":
        return "adds no bias and applies no activation"
    return None


def _with_backward(grouped: Callable[[Task], Prepared], contraction: Callable[[Task], Prepared], task: Task) -> Prepared:
    """A tuned grouped matmul; with `task.grad` also its gradients, tuned apart, for kernels that have none of their own.

    dlhs = g rhs^T is a grouped matmul on rhs as stored, drhs = lhs^T g a ragged contraction. The text tells the settings of
    the forward product, dlhs and drhs.
    """
    forward, said = grouped(task)
    if not task.grad:
        return forward, said
    p, (lhs, rhs, sizes) = task.problem, task.arrays
    operands: Callable[..., tuple] = (lambda lhs, g: (lhs, g)) if p.layout == "nn" else (lambda lhs, g: (g, lhs))
    g = jax.random.normal(jax.random.key(1), (p.m, p.n), p.dtype)
    flipped = dataclasses.replace(p, n=p.k, k=p.n, layout="nt" if p.layout == "nn" else "nn", out_dtype=p.dtype)
    dlhs, said_lhs = grouped(dataclasses.replace(task, problem=flipped, arrays=(g, rhs, sizes)))
    pair = operands(lhs, g)
    k, n = (x.shape[1] for x in pair)
    weights = RaggedContractionProblem(p.m, n, k, p.groups, p.dtype, p.dtype, p.spread)
    drhs, said_rhs = contraction(dataclasses.replace(task, problem=weights, arrays=(*pair, sizes)))

    @jax.custom_vjp
    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return forward(lhs, rhs, sizes)

    def backward(saved: tuple, g: jax.Array) -> tuple:
        lhs, rhs, sizes = saved
        g = g.astype(lhs.dtype)
        return dlhs(g, rhs, sizes), drhs(*operands(lhs, g), sizes), None

    product.defvjp(lambda *arrays: (product(*arrays), arrays), backward)
    return product, " | ".join((said, said_lhs, said_rhs))


# --- jax.experimental.pallas.ops.gpu.ragged_dot_mgpu and transposed_ragged_dot_mgpu -----------------------------------

_JAX_PASSES = (("block_m", "block_n", "block_k"), ("max_concurrent_steps",), ("grid_block_n",))
_STEPS, _RASTERS = (4, 2, 5, 6), (4, 2, 8, 1, 16)


def _fits(block_m: int, block_n: int, block_k: int, steps: int) -> bool:
    """Whether a pipeline and an output tile of 16-bit elements fit into shared memory."""
    return 2 * (steps * (block_m + block_n) * block_k + block_m * block_n) + 1024 <= _SMEM


def jax_grouped_settings(problem: Any) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's ragged_dot_mgpu.

    As there, the tiles and the raster divide n. Left out are tiles whose accumulator one warpgroup cannot hold: 192x192 takes
    288 of a thread's 255 registers.
    """
    for block_m, block_n, steps, raster in itertools.product((192, 128, 64), (192, 128, 64), _STEPS, _RASTERS):
        if block_m * block_n // 128 < 255 and problem.n % (raster * block_n) == 0 and _fits(block_m, block_n, 64, steps):
            yield _jax_setting(block_m, block_n, 64, steps, raster)


def jax_contraction_settings(problem: Any) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's transposed_ragged_dot_mgpu, where block_m divides k and block_n divides n.

    Left out is the pipeline of one step, which copies and multiplies in turn.
    """
    for block_m, block_n, block_k, steps, raster in itertools.product((128, 64), (128, 64), (64, 128), _STEPS, _RASTERS):
        if problem.k % block_m == 0 and problem.n % block_n == 0 and _fits(block_m, block_n, block_k, steps):
            yield _jax_setting(block_m, block_n, block_k, steps, raster)


def _jax_setting(block_m: int, block_n: int, block_k: int, steps: int, raster: int) -> dict[str, int]:
    tile = {"block_m": block_m, "block_n": block_n, "block_k": block_k}
    return {**tile, "max_concurrent_steps": steps, "grid_block_n": raster}


def _jax_ragged_dot(setting: tuple, layout: str, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as theirs

    return theirs.ragged_dot(lhs, rhs, group_sizes=sizes, transpose_rhs=layout == "nt", **dict(setting))


def _jax_transposed_ragged_dot(setting: tuple, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as theirs

    return theirs.transposed_ragged_dot(lhs, rhs, group_sizes=sizes, **dict(setting))


def _jax_grouped(task: Task) -> Prepared:
    settings = [tuple(s.items()) for s in jax_grouped_settings(task.problem)]
    layout = task.problem.layout
    return _fastest(task, settings, lambda setting: partial(_jax_ragged_dot, setting, layout), _JAX_PASSES)


def _jax_contraction(task: Task) -> Prepared:
    settings = [tuple(s.items()) for s in jax_contraction_settings(task.problem)]
    return _fastest(task, settings, lambda setting: partial(_jax_transposed_ragged_dot, setting), _JAX_PASSES)


def _jax_unavailable(module: str, problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _no_epilogue(problem) or _other_dtype(problem):
        return reason
    if problem.k % 64 or problem.n % 64:
        return f"takes n and k in multiples of 64, not n={problem.n}, k={problem.k}"
    return _not_importable(_jax_sample(module), _NEEDS_ABSL)


# --- tokamax ----------------------------------------------------------------------------------------------------------

_TOKAMAX_PASSES = (("block_m", "block_n", "block_k"), ("num_stages", "persistent"), ("grid_minor_dim", "grid_tile_width"))


def _tokamax_itself() -> Any:
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each problem that is not in its database
    return importlib.import_module("tokamax")  # not by name: it is optional, and unknown to type checkers


def _dimensions(contract: tuple[int, int], ragged: int, group: Sequence[int]) -> jax.lax.RaggedDotDimensionNumbers:
    """Contracted dimensions of lhs and rhs, the ragged one of lhs, the groups' one of rhs if it has one."""
    lhs, rhs = contract
    return jax.lax.RaggedDotDimensionNumbers((((lhs,), (rhs,)), ((), ())), [ragged], list(group))


_GROUPED = {"nn": _dimensions((1, 1), 0, [0]), "nt": _dimensions((1, 2), 0, [0])}
_CONTRACTION = _dimensions((0, 0), 0, [])


def _of_problem(problem: Any) -> jax.lax.RaggedDotDimensionNumbers:
    return _GROUPED[problem.layout] if hasattr(problem, "layout") else _CONTRACTION


def _tokamax_ragged(problem: Any, implementation: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    out: jax.Array = _tokamax_itself().ragged_dot_general(
        lhs, rhs, sizes, _of_problem(problem), preferred_element_type=problem.out_dtype, implementation=implementation
    )
    return out


def _no_gradient(*arrays: Any, **more: Any) -> Any:
    """In place of tokamax's own, which pickle cannot take: `_with_backward` tunes what the gradients launch."""
    raise NotImplementedError("the gradients of tokamax's ragged_dot are tuned apart")


def _tokamax(task: Task) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try, and of wider ones.

    They are compiled and timed here: its autotuner tries all 384 with a warm L2, minutes a problem, and draws sizes of its own
    where the contraction is ragged. Left out are those that cannot compile: wgmma takes 64 rows, and of block_k 512 not even
    two stages fit shared memory. Its space has block_n = 64 only; 128 and shallower steps are faster on large problems, so they
    join. Its own heuristic's config comes first, then the largest tiles and the deepest pipelines.
    """
    call = partial(_tokamax_ragged, task.problem)
    (bound,) = _tokamax_itself().autotuning.get_bound_args(jax.jit(partial(call, "mosaic")), *task.arrays)
    configs = [c for c in bound.autotuning_configs if c.block_m % 64 == 0 and c.block_k <= 256]
    if task.problem.__class__ is RaggedContractionProblem:  # whose kernel reads neither the raster nor `persistent`
        configs = [c for c in configs if not c.persistent and (c.grid_minor_dim, c.grid_tile_width) == (0, 1)]
    wider = {dataclasses.replace(c, block_n=n, block_k=k) for c in configs for n in (c.block_n, 128) for k in (64, c.block_k)}
    wider = {c for c in wider if _fits(c.block_m, c.block_n, c.block_k, c.num_stages)}

    def fields(config: Any) -> tuple:
        return tuple((name, getattr(config, name)) for names in _TOKAMAX_PASSES for name in names)

    def promise(config: Any) -> tuple:
        own = config == bound.heuristics_config
        return not own, -config.block_m * config.block_n, -config.num_stages, not config.persistent, fields(config)

    def build(config: Any) -> Callable[..., Any]:
        return partial(call, (bound.op.replace(config=config, vjp=_no_gradient),))

    ordered = sorted(wider, key=promise)
    return _fastest(task, ordered, build, _TOKAMAX_PASSES, fields, text=lambda config: _text(fields(config)))


def _tokamax_unavailable(problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _no_epilogue(problem):
        return reason
    if problem.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit floats, not {problem.dtype}"
    return _not_importable("tokamax", "`pip install tokamax`")


# --- jax.lax.ragged_dot -----------------------------------------------------------------------------------------------


def _lax(problem: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(
        lhs, rhs, sizes, _of_problem(problem), preferred_element_type=jax.numpy.dtype(problem.out_dtype)
    )


def _lax_unavailable(problem: Any, gpu: Gpu) -> str | None:
    """XLA has no grouped matmul for GPUs: each group multiplies all rows, those of other groups zeroed."""
    p = problem
    expanded = p.groups * p.m * (p.k + p.n) * jax.numpy.dtype(p.dtype).itemsize
    if expanded > gpu.memory_bytes / 4:
        size = f"{expanded / 1e9:.0f} GB of [groups, m, k] and [groups, m, n]"
        return f"is not run: it expands its operands, up to {size}, and takes {p.groups} times the arithmetic"
    return _no_epilogue(problem)


# --- Attention: each a function of (q, k, v), then lengths, segments and the bias if there are any ------------------------


def _scale(problem: Any) -> float:
    return 1 / math.sqrt(problem.head_dim)


def _cudnn_unavailable(problem: Any, gpu: Gpu) -> str | None:
    return cudnn.refuses(problem)


def _attention_limits(problem: Any) -> str | None:
    """What neither of the two peers in Pallas takes, or not without a mask of all scores in memory."""
    p = problem
    if p.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit floats, not {p.dtype}"
    if p.lengths or p.segments:
        return "takes lengths and segment ids only as a mask of all scores"
    if not (p.left is None and p.right is None) and not cudnn.same_alignment(p):
        return "aligns the first query with the first key, not the last with the last"
    return None


def jax_attention_settings(problem: Any) -> Iterator[dict[str, int]]:
    """The settings of JAX's attention_mgpu that its divisibility rules, shared memory and registers allow.

    Those of the tuning loop in its own main(), and with 128 rows a warpgroup and deeper rings beside.
    """
    p = problem
    for block_q, block_kv, steps in itertools.product((64, 128), (256, 128, 64), (2, 3, 4)):
        if p.q_tokens % (2 * block_q) or p.kv_tokens % block_kv or steps > p.kv_tokens // block_kv:
            continue
        registers = block_q * (block_kv + p.head_dim) // 128  # of each thread for scores and output
        smem = 2 * p.head_dim * (2 * block_q + 2 * steps * block_kv)
        if registers < 232 and smem < 227 * 1024:
            yield {"block_q": block_q, "block_kv": block_kv, "max_concurrent_steps": steps}


def _jax_attention_unavailable(problem: Any, gpu: Gpu) -> str | None:
    p = problem
    if reason := _not_hopper(gpu) or _attention_limits(p):
        return reason
    if p.soft_cap or p.bias != "none":
        return "adds no bias and caps no scores"
    if p.left is not None or p.right not in (None, 0):
        return "has no window"
    if p.right == 0 and p.q_tokens != p.kv_tokens:
        return f"takes as many queries as keys where causal, not {p.q_tokens} and {p.kv_tokens}"
    if p.head_dim % 64:
        return f"takes a head_dim in multiples of 64, not {p.head_dim}"
    if next(jax_attention_settings(p), None) is None:
        return f"has no tile that divides q_tokens={p.q_tokens} and kv_tokens={p.kv_tokens}"
    return _not_importable(_jax_sample("attention_mgpu"), _NEEDS_ABSL)


def _scaled(problem: Any, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """What JAX's kernel leaves to its caller, outside of what is timed: the scale, and float16, in which its buffers are."""
    return tuple(x.astype("float16") for x in (q.astype("float32") * _scale(problem), k, v))


def _jax_attention_call(setting: tuple, causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    return theirs.attention(q, k, v, theirs.TuningConfig(**dict(setting), causal=causal))


def _jax_attention(task: Task) -> Prepared:
    causal = task.problem.right == 0
    settings = [tuple(s.items()) for s in jax_attention_settings(task.problem)]
    return _fastest(
        task,
        settings,
        lambda setting: partial(_jax_attention_call, setting, causal),
        text=lambda setting: f"float16 {_text(setting)}",
    )


def _tokamax_attention_unavailable(problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _attention_limits(problem):
        return reason
    if problem.soft_cap and problem.bias != "none":
        return "caps scores after the bias, not before"
    return _not_importable("tokamax", "`pip install tokamax`")


def _tokamax_attention_call(problem: Any, implementation: Any, *arrays: jax.Array) -> jax.Array:
    p = problem
    q, k, v, *bias = arrays
    window = None if p.left is None and p.right in (None, 0) else _tokamax_window(p)
    out: jax.Array = _tokamax_itself().dot_product_attention(
        q,
        k,
        v,
        *bias,
        scale=_scale(p),
        is_causal=p.right == 0,
        local_window_size=window,
        logits_soft_cap=SOFT_CAP if p.soft_cap else None,
        implementation=implementation,
    )
    return out


def _pulled(function: Callable[..., Any], *arrays: jax.Array) -> tuple:
    """The gradients of a function, with its result for a cotangent."""
    out, pull = jax.vjp(function, *arrays)
    gradients: tuple = pull(out)
    return gradients


def _tokamax_attention(task: Task) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try; with `task.grad` of its
    backward kernels' too, which are tuned after, with the forward kernel as found. The text tells both.

    Its own heuristic's config comes first, then the largest tiles and the deepest pipelines.
    """
    call = partial(_tokamax_attention_call, task.problem)

    def pairs(config: Any) -> tuple:
        return tuple((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))

    def tuned(bound: Any, build: Callable[[Any], Callable[..., Any]]) -> tuple[Any, Callable[[], Any], str]:
        def promise(config: Any) -> tuple:
            fields = dict(pairs(config))
            tile = math.prod(fields[name] for name in fields if name.startswith("block_"))
            return config != bound.heuristics_config, -tile, -config.num_stages, str(config)

        ordered = sorted(bound.autotuning_configs, key=promise)
        return _best(task, ordered, build, pairs=pairs, text=lambda config: _text(pairs(config)))

    bound_args = _tokamax_itself().autotuning.get_bound_args
    (forward,) = bound_args(jax.jit(partial(call, "mosaic")), *task.arrays)

    def alone(config: Any) -> Callable[..., Any]:
        return partial(call, (forward.op.replace(config=config),))

    best, best_call, said = tuned(forward, alone)
    if not task.grad:
        return Ready(alone(best), task.arrays, best_call), said
    gradients = jax.jit(partial(_pulled, partial(call, "mosaic")))
    (backward,) = (b for b in bound_args(gradients, *task.arrays) if type(b.op) is not type(forward.op))

    def both(config: Any) -> Callable[..., Any]:
        return partial(call, (forward.op.replace(config=best, vjp=backward.op.replace(config=config)),))

    best_backward, _, said_backward = tuned(backward, lambda config: partial(_pulled, both(config)))
    return both(best_backward), f"{said} | {said_backward}"


def _tokamax_window(problem: Any) -> tuple[int, int]:
    """Keys before and after a row's own that it sees: all of them where there is no bound."""
    left, right = problem.left, problem.right
    return (problem.q_tokens if left is None else left), (problem.kv_tokens if right is None else right)


PEERS: dict[str, dict[str, Peer]] = {
    "matmul": {
        "xla": _baseline("matmul"),
        "jax-pallas": Peer(_pallas_unavailable, _pallas_prepare, differentiable=False, tuned=True),
    },
    "grouped_matmul": {
        "dense": _baseline("grouped_matmul"),
        "jax-pallas": Peer(
            partial(_jax_unavailable, "ragged_dot_mgpu"),
            partial(_with_backward, _jax_grouped, _jax_contraction),
            differentiable=True,
            tuned=True,
        ),
        "tokamax": Peer(_tokamax_unavailable, partial(_with_backward, _tokamax, _tokamax), differentiable=True, tuned=True),
        "lax": Peer(_lax_unavailable, partial(_under_jit, _lax), differentiable=True),
    },
    "ragged_contraction": {
        "dense": _baseline("ragged_contraction"),
        "jax-pallas": Peer(
            partial(_jax_unavailable, "transposed_ragged_dot_mgpu"), _jax_contraction, differentiable=False, tuned=True
        ),
        "tokamax": Peer(_tokamax_unavailable, _tokamax, differentiable=False, tuned=True),
        "lax": Peer(_lax_unavailable, partial(_under_jit, _lax), differentiable=False),
    },
    "flash_attention": {
        "cudnn": Peer(_cudnn_unavailable, partial(_under_jit, cudnn.attention), differentiable=True),
        "tokamax": Peer(_tokamax_attention_unavailable, _tokamax_attention, differentiable=True, tuned=True),
        "jax-pallas": Peer(_jax_attention_unavailable, _jax_attention, differentiable=False, arrays=_scaled, tuned=True),
    },
    "flash_attention_backward": {
        "cudnn": Peer(_cudnn_unavailable, partial(_under_jit, cudnn.gradients), differentiable=False, arrays=cudnn.residuals),
    },
}
