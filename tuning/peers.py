"""Other implementations of an op, for `bench` to measure beside ours."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import math
import os
import re
from collections.abc import Callable, Hashable, Iterable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, wait
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mgpu_ops import SPECS, RaggedContractionProblem
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.flash_attention import cudnn
from mgpu_ops.flash_attention.model import SOFT_CAP
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


@dataclass(frozen=True)
class Peer:
    """Another implementation of an op.

    `unavailable(problem, gpu)` says why it cannot run a problem, or None. `prepare` tunes it. A yardstick computes something
    else of the same cost: its result is not compared. `arrays(problem, *arrays)` makes what its function takes of what ours
    takes, in advance and untimed.
    """

    unavailable: Callable[[Any, Gpu], str | None]
    prepare: Callable[[Task], Prepared]
    differentiable: bool
    yardstick: bool = False
    arrays: Callable[..., tuple] | None = None


def compiled(function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
    """The call `function(*arrays)`, compiled ahead."""
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
    tile: Callable[[Any], Hashable] | None = None,
    text: Callable[[Any], str] = _text,
) -> Prepared:
    """The function of the fastest of `settings`, and which that is."""
    best, said = _best(task, settings, build, tile, text)
    return build(best), said


def _best(
    task: Task,
    settings: Sequence[Hashable],
    build: Callable[[Any], Callable[..., Any]],
    tile: Callable[[Any], Hashable] | None = None,
    text: Callable[[Any], str] = _text,
) -> tuple[Any, str]:
    """The fastest of `settings` in interleaved rounds, with an L2 flush before each call; and the same as text.

    Where `tile` is given there are two passes: the first takes one setting, the middle one, of those that share a tile, the
    second all settings of the two fastest tiles. Settings that do not compile, within the task's seconds, are passed over.
    """
    again = [s for s in settings if text(s) in task.known]
    calls: dict[Hashable, Callable[[], Any]] = {}
    if again or tile is None:
        ranking = _ranking(task, again or settings, build, calls)
    else:
        tiles: dict[Hashable, list[Hashable]] = {}
        for setting in settings:
            tiles.setdefault(tile(setting), []).append(setting)
        half = dataclasses.replace(task, seconds=task.seconds / 2)
        ranking = _ranking(half, [group[len(group) // 2] for group in tiles.values()], build, calls)
        ranking = _ranking(half, [s for best in ranking[:2] for s in tiles[tile(best)]], build, calls)
    found = f"fastest of {len(calls)}" + " that won before" * bool(again)
    return ranking[0], f"{text(ranking[0])}; {found}"


def _ranking(
    task: Task,
    settings: Sequence[Hashable],
    build: Callable[[Any], Callable[..., Any]],
    calls: dict[Hashable, Callable[[], Any]],
) -> list[Any]:
    """Those of the settings that compile, the fastest first; `calls` keeps them. ValueError where none does."""
    pool = ThreadPoolExecutor(8)
    jobs = {s: pool.submit(lambda s: compiled(build(s), task.arrays), s) for s in settings if s not in calls}
    wait(jobs.values(), task.seconds)
    pool.shutdown(cancel_futures=True)  # those in progress come to their end
    errors = ["too slow to compile"] * any(job.cancelled() for job in jobs.values())
    for setting, job in jobs.items():
        if job.cancelled():
            continue
        if error := job.exception():  # its limits, as of shared memory, raise
            errors.append(brief(error))
        else:
            calls[setting] = job.result()
    legal = [setting for setting in settings if setting in calls]
    if not legal:
        raise ValueError(f"none of {len(settings)} settings compiles{'; the last: ' + errors[-1] if errors else ''}")
    samples = task.timer([calls[setting] for setting in legal], task.gpu, 3)
    times = dict(zip(legal, map(median_us, samples)))
    return sorted(times, key=lambda setting: times[setting])


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

_TILE_K, _STEPS, _STRIP = 64, 4, 8


def pallas_tilings(problem: Any) -> Iterator[dict[str, Any]]:
    """The settings of JAX's own Hopper matmul that divisibility and registers allow.

    Its tile_m and tile_n are those of one of two warpgroups, and the tile of both must divide the
    problem. The space is that of the tuning loop in its own main(), with smaller and wider tiles
    added and one strip width instead of three.
    """
    for tile_m, tile_n, wg in itertools.product((64, 128), (64, 128, 256), "MN"):
        rows, columns = tile_m * (1 + (wg == "M")), tile_n * (1 + (wg == "N"))
        if tile_m * tile_n // 128 > 200:  # registers of each thread for the accumulator
            continue
        if problem.m % rows or problem.n % columns or problem.k % _TILE_K:
            continue
        one_strip = problem.m == rows or problem.n == columns  # then both orders are the same
        for minor in "N" if one_strip else "MN":
            yield {
                "tile_m": tile_m,
                "tile_n": tile_n,
                "tile_k": _TILE_K,
                "max_concurrent_steps": _STEPS,
                "wg_dimension": wg,
                "grid_minor_dim": minor,
                "grid_tile_width": _STRIP,
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


def _pallas_call(tiling: dict[str, Any]) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    sides = {key: theirs.MatmulDimension[tiling[key]] for key in ("wg_dimension", "grid_minor_dim")}
    config = theirs.TuningConfig(**{**tiling, **sides})
    return lambda a, b: theirs.matmul(a, b, None, config)


def _pallas_prepare(task: Task) -> Prepared:
    settings = [tuple(tiling.items()) for tiling in pallas_tilings(task.problem)]
    return _fastest(task, settings, lambda setting: _pallas_call(dict(setting)))


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

_RASTER = "grid_block_n"


def jax_grouped_settings(problem: Any) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's ragged_dot_mgpu.

    As there, the tiles and the raster divide n. Left out are tiles whose accumulator one warpgroup cannot hold: 192x192 takes
    288 of a thread's 255 registers.
    """
    for block_m, block_n, steps, raster in itertools.product((192, 128, 64), (192, 128, 64), (2, 4, 5, 6), (1, 2, 4, 8, 16)):
        if block_m * block_n // 128 < 255 and problem.n % (raster * block_n) == 0:
            yield {"block_m": block_m, "block_n": block_n, "block_k": 64, "max_concurrent_steps": steps, _RASTER: raster}


def jax_contraction_settings(problem: Any) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's transposed_ragged_dot_mgpu, where block_m divides k and block_n divides n.

    Left out is the pipeline of one step, which copies and multiplies in turn.
    """
    space = ((128, 64), (128, 64), (128, 64), (2, 4, 5, 6), (1, 2, 4, 8, 16))
    for block_m, block_n, block_k, steps, raster in itertools.product(*space):
        if problem.k % block_m == 0 and problem.n % block_n == 0:
            yield {
                "block_m": block_m,
                "block_n": block_n,
                "block_k": block_k,
                "max_concurrent_steps": steps,
                _RASTER: raster,
            }


def _jax_fastest(task: Task, settings: Iterable[dict[str, int]], function: Callable[..., Any]) -> Prepared:
    def build(setting: Any) -> Callable[..., Any]:
        return lambda lhs, rhs, sizes: function(lhs, rhs, group_sizes=sizes, **dict(setting))

    def tile(setting: Any) -> Hashable:
        return tuple(pair for pair in setting if pair[0] != _RASTER)

    return _fastest(task, [tuple(s.items()) for s in settings], build, tile)


def _jax_grouped(task: Task) -> Prepared:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as theirs

    function = partial(theirs.ragged_dot, transpose_rhs=task.problem.layout == "nt")
    return _jax_fastest(task, jax_grouped_settings(task.problem), function)


def _jax_contraction(task: Task) -> Prepared:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as theirs

    return _jax_fastest(task, jax_contraction_settings(task.problem), theirs.transposed_ragged_dot)


def _jax_unavailable(module: str, problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _no_epilogue(problem) or _other_dtype(problem):
        return reason
    if problem.k % 64 or problem.n % 64:
        return f"takes n and k in multiples of 64, not n={problem.n}, k={problem.k}"
    return _not_importable(_jax_sample(module), _NEEDS_ABSL)


# --- tokamax ----------------------------------------------------------------------------------------------------------

_TOKAMAX_RASTER = ("grid_minor_dim", "grid_tile_width")
_TOKAMAX_FIELDS = ("block_m", "block_n", "block_k", "num_stages", "persistent", *_TOKAMAX_RASTER)


def _dimensions(contract: tuple[int, int], ragged: int, group: Sequence[int]) -> jax.lax.RaggedDotDimensionNumbers:
    """Contracted dimensions of lhs and rhs, the ragged one of lhs, the groups' one of rhs if it has one."""
    lhs, rhs = contract
    return jax.lax.RaggedDotDimensionNumbers((((lhs,), (rhs,)), ((), ())), [ragged], list(group))


_GROUPED = {"nn": _dimensions((1, 1), 0, [0]), "nt": _dimensions((1, 2), 0, [0])}
_CONTRACTION = _dimensions((0, 0), 0, [])


def _of_problem(problem: Any) -> jax.lax.RaggedDotDimensionNumbers:
    return _GROUPED[problem.layout] if hasattr(problem, "layout") else _CONTRACTION


def _tokamax(task: Task) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try, and of wider ones.

    They are compiled and timed here: its autotuner tries all 384 with a warm L2, minutes a problem, and draws sizes of its own
    where the contraction is ragged. Left out are those that cannot compile: wgmma takes 64 rows, and of block_k 512 not even
    two stages fit shared memory.
    """
    tokamax = importlib.import_module("tokamax")  # not by name: it is optional, and unknown to type checkers
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each problem that is not in its database

    def call(implementation: Any) -> Callable[..., Any]:
        return lambda lhs, rhs, sizes: tokamax.ragged_dot_general(
            lhs,
            rhs,
            sizes,
            _of_problem(task.problem),
            preferred_element_type=task.problem.out_dtype,
            implementation=implementation,
        )

    (bound,) = tokamax.autotuning.get_bound_args(jax.jit(call("mosaic")), *task.arrays)
    configs = [c for c in bound.autotuning_configs if c.block_m % 64 == 0 and c.block_k <= 256]
    if task.problem.__class__ is RaggedContractionProblem:  # whose kernel reads neither the raster nor `persistent`
        configs = [c for c in configs if not c.persistent and (c.grid_minor_dim, c.grid_tile_width) == (0, 1)]

    def fields(config: Any, names: Sequence[str] = _TOKAMAX_FIELDS) -> tuple:
        return tuple((name, getattr(config, name)) for name in names)

    def tile(config: Any) -> tuple:
        return fields(config, [name for name in _TOKAMAX_FIELDS if name not in _TOKAMAX_RASTER])

    def build(config: Any) -> Callable[..., Any]:
        return call((bound.op.replace(config=config),))

    # Its space has block_n = 64 only; 128 and shallower steps are faster on large problems, so they join. The largest tiles
    # come first: in the time there is, the small ones are what may be left out.
    wider = {dataclasses.replace(c, block_n=n, block_k=k) for c in configs for n in (c.block_n, 128) for k in (64, c.block_k)}
    ordered = sorted(wider, key=lambda c: (-c.block_m * c.block_n, -c.num_stages, fields(c)))
    return _fastest(task, ordered, build, tile, text=lambda config: _text(fields(config)))


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


def _jax_attention(task: Task) -> Prepared:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    def build(setting: Any) -> Callable[..., Any]:
        config = theirs.TuningConfig(**dict(setting), causal=task.problem.right == 0)
        return lambda q, k, v: theirs.attention(q, k, v, config)

    settings = [tuple(s.items()) for s in jax_attention_settings(task.problem)]
    return _fastest(task, settings, build, text=lambda setting: f"float16 {_text(setting)}")


def _tokamax_attention_unavailable(problem: Any, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _attention_limits(problem):
        return reason
    if problem.soft_cap and problem.bias != "none":
        return "caps scores after the bias, not before"
    return _not_importable("tokamax", "`pip install tokamax`")


def _tokamax_attention(task: Task) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try; with `task.grad` of its
    backward kernels' too, which are tuned after, with the forward kernel as found. The text tells both."""
    tokamax = importlib.import_module("tokamax")  # not by name: it is optional, and unknown to type checkers
    logging.getLogger("absl").setLevel(logging.ERROR)  # it warns of each problem that is not in its database
    p = task.problem
    window = None if p.left is None and p.right in (None, 0) else _tokamax_window(p)

    def call(implementation: Any) -> Callable[..., Any]:
        return lambda q, k, v, bias=None: tokamax.dot_product_attention(
            q,
            k,
            v,
            bias,
            scale=_scale(p),
            is_causal=p.right == 0,
            local_window_size=window,
            logits_soft_cap=SOFT_CAP if p.soft_cap else None,
            implementation=implementation,
        )

    def pulled(function: Callable[..., Any]) -> Callable[..., tuple]:
        def gradients(*arrays: jax.Array) -> tuple:
            out, pull = jax.vjp(function, *arrays)
            return pull(out)

        return gradients

    def text(config: Any) -> str:
        return _text((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))

    def tuned(task: Task, bound: Any, build: Callable[[Any], Callable[..., Any]]) -> tuple[Any, str]:
        return _best(task, sorted(bound.autotuning_configs, key=text), build, text=text)

    bound_args = tokamax.autotuning.get_bound_args
    (forward,) = bound_args(jax.jit(call("mosaic")), *task.arrays)
    best, said = tuned(task, forward, lambda config: call((forward.op.replace(config=config),)))
    if not task.grad:
        return call((forward.op.replace(config=best),)), said
    (backward,) = (b for b in bound_args(jax.jit(pulled(call("mosaic"))), *task.arrays) if type(b.op) is not type(forward.op))

    def both(config: Any) -> Callable[..., Any]:
        return call((forward.op.replace(config=best, vjp=backward.op.replace(config=config)),))

    best_backward, said_backward = tuned(task, backward, lambda config: pulled(both(config)))
    return both(best_backward), f"{said} | {said_backward}"


def _tokamax_window(problem: Any) -> tuple[int, int]:
    """Keys before and after a row's own that it sees: all of them where there is no bound."""
    left, right = problem.left, problem.right
    return (problem.q_tokens if left is None else left), (problem.kv_tokens if right is None else right)


PEERS: dict[str, dict[str, Peer]] = {
    "matmul": {
        "xla": _baseline("matmul"),
        "jax-pallas": Peer(_pallas_unavailable, _pallas_prepare, differentiable=False),
    },
    "grouped_matmul": {
        "dense": _baseline("grouped_matmul"),
        "jax-pallas": Peer(
            partial(_jax_unavailable, "ragged_dot_mgpu"),
            partial(_with_backward, _jax_grouped, _jax_contraction),
            differentiable=True,
        ),
        "tokamax": Peer(_tokamax_unavailable, partial(_with_backward, _tokamax, _tokamax), differentiable=True),
        "lax": Peer(_lax_unavailable, partial(_under_jit, _lax), differentiable=True),
    },
    "ragged_contraction": {
        "dense": _baseline("ragged_contraction"),
        "jax-pallas": Peer(partial(_jax_unavailable, "transposed_ragged_dot_mgpu"), _jax_contraction, differentiable=False),
        "tokamax": Peer(_tokamax_unavailable, _tokamax, differentiable=False),
        "lax": Peer(_lax_unavailable, partial(_under_jit, _lax), differentiable=False),
    },
    "flash_attention": {
        "cudnn": Peer(_cudnn_unavailable, partial(_under_jit, cudnn.attention), differentiable=True),
        "tokamax": Peer(_tokamax_attention_unavailable, _tokamax_attention, differentiable=True),
        "jax-pallas": Peer(_jax_attention_unavailable, _jax_attention, differentiable=False, arrays=_scaled),
    },
    "flash_attention_backward": {
        "cudnn": Peer(_cudnn_unavailable, partial(_under_jit, cudnn.gradients), differentiable=False, arrays=cudnn.residuals),
    },
}
