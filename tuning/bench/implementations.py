"""Other implementations of an op, which `bench` measures beside ours."""

from __future__ import annotations

import dataclasses
import importlib
import itertools
import logging
import math
import os
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

import mgpu_ops
from mgpu_ops import SPECS, FlashAttentionProblem, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem
from mgpu_ops.attention import cudnn
from mgpu_ops.attention.model import SOFT_CAP
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.matmul.epilogue import by_name, rows_of_blocks, scaled
from mgpu_ops.matmul.problem import transposed
from mgpu_ops.registry.spec import baseline_of
from mgpu_ops.tuning import public
from mgpu_ops.tuning.bench import layers
from mgpu_ops.tuning.bench.settings import (
    CompiledCall,
    Function,
    Precompiled,
    Prepared,
    SettingSpace,
    TuningContext,
    as_text,
    best_setting,
    compiled,
    fastest,
)
from mgpu_ops.tuning.measure import median_us
from mgpu_ops.tuning.terminal import brief

Grouped = GroupedMatmulProblem | RaggedContractionProblem


@dataclass(frozen=True)
class Competitor:
    """Another implementation of an op.

    `unavailable(problem, gpu)` says why it cannot run a problem, or None. `prepare` returns a function of the context's arrays
    and its settings; where it is `tuned`, it searches the fastest of these. `arrays(problem, *arrays)` makes what the function
    takes of what ours takes, in advance and untimed, and `answers(results)` what ours gives of what the function gives, for the
    comparison. A yardstick computes something else of the same cost: its result is not compared.
    """

    unavailable: Callable[[Any, Gpu], str | None]
    prepare: Callable[[TuningContext], Prepared]
    differentiable: bool
    yardstick: bool = False
    arrays: Callable[..., tuple] | None = None
    answers: Callable[[Any], Any] | None = None
    tuned: bool = False


# --- XLA --------------------------------------------------------------------------------------------------------------


def _under_jit(function: Function, context: TuningContext) -> Prepared:
    flags = os.environ.get("XLA_FLAGS", "").split()
    return partial(function, context.problem), " ".join(["jit", *flags])


def _baseline(op: str) -> Competitor:
    """What the tuner times beside candidates: cuBLAS or XLA's own kernels, as XLA's autotuning chooses."""
    spec = SPECS[op]

    def run(problem: Any, *arrays: jax.Array) -> Any:
        return baseline_of(spec, problem).run(problem, *arrays)

    usual = baseline_of(spec, next(iter(spec.shapes.values())))
    yardstick = usual.run is not spec.reference
    return Competitor(_always, partial(_under_jit, run), differentiable=True, yardstick=yardstick)


# --- jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu ---------------------------------------------------------------

_SMEM = 227 * 1024
_PALLAS_PASSES = (
    ("tile_m", "tile_n", "wg_dimension"),
    ("tile_k", "max_concurrent_steps", "cluster_dimension"),
    ("grid_minor_dim", "grid_tile_width"),
)


def pallas_tilings(problem: MatmulProblem) -> Iterator[dict[str, Any]]:
    """The settings of JAX's own Hopper matmul that divisibility, registers and shared memory allow, the most promising first.

    Two warpgroups each compute a tile of tile_m x tile_n; the tile of both, or of a cluster of two blocks, must divide the
    problem. The space holds all settings of the tuning loop in the sample's own main(). It adds clusters, which main() does not
    try, other tiles, deeper and shallower pipelines, wider steps of k, and the default raster. Values of main() come first.
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
            output = min(2, tile_m * tile_n // 64**2) * 2 * 64 * 64  # buffers of both warpgroups
            if 2 * (steps * (rows + columns) * tile_k + output) + 1024 > _SMEM:
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


def _pallas_unavailable(problem: MatmulProblem, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu):
        return reason
    if problem.layout != "nn" or problem.batch != 1:
        return f"takes layout nn and batch 1, not layout {problem.layout} and batch {problem.batch}"
    if reason := _other_dtype(problem):
        return reason
    if next(pallas_tilings(problem), None) is None:
        return f"has no tile that divides m={problem.m}, n={problem.n}, k={problem.k}"
    return _not_importable(_jax_sample("hopper_matmul_mgpu"), _NEEDS_ABSL)


def _other_dtype(problem: MatmulProblem | Grouped) -> str | None:
    if problem.dtype not in ("bfloat16", "float16") or problem.out_dtype != problem.dtype:
        return f"gives a 16-bit input's dtype, not {problem.dtype} to {problem.out_dtype}"
    return None


def _pallas(setting: tuple, a: jax.Array, b: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    sides = ("wg_dimension", "cluster_dimension", "grid_minor_dim")
    fields = {key: theirs.MatmulDimension[value] if key in sides and value else value for key, value in setting}
    return theirs.matmul(a, b, None, theirs.TuningConfig(**fields))


def _pallas_prepare(context: TuningContext) -> Prepared:
    settings = [tuple(tiling.items()) for tiling in pallas_tilings(context.problem)]
    return fastest(context, SettingSpace(settings, lambda setting: partial(_pallas, setting), _PALLAS_PASSES))


# --- Ours of 16 bits, beside products of 8 ------------------------------------------------------------------------------


def _bf16_unavailable(problem: MatmulProblem, gpu: Gpu) -> str | None:
    if itemsize_of(problem.dtype) != 1 or problem.out_dtype == "int32":
        return f"is for products of 8 bits with results that are floats, not {problem.dtype} to {problem.out_dtype}"
    return None


def _in_bf16(problem: MatmulProblem) -> MatmulProblem:
    """The product of the same sides of bfloat16, with B stored as programs store a weight."""
    return dataclasses.replace(problem, dtype="bfloat16", b_dtype="none", scales="none", layout="nn")


def _dequantized(problem: MatmulProblem, a: jax.Array, b: jax.Array, *extra: jax.Array) -> tuple[jax.Array, ...]:
    """The operands in bfloat16, with their scales multiplied in, and the rest of the arrays."""
    p, by = problem, by_name(problem, extra)
    a_t, b_t = transposed(p)
    a, b = a.mT if a_t else a, b if b_t else b.mT
    if p.scales != "none":
        of_a, of_b = by.pop("scale_a"), by.pop("scale_b")
        if p.scales == "block":
            a, b = scaled(a, of_a), scaled(b, rows_of_blocks(of_b, p.n))
        else:
            a, b = a.astype("float32") * of_a[..., None], b.astype("float32") * of_b[..., None]
    return a.astype("bfloat16"), b.mT.astype("bfloat16"), *by.values()


def _bf16(context: TuningContext) -> Prepared:
    return public.CALLS["matmul"](_in_bf16(context.problem), None), "ours, of bfloat16"


# --- Grouped products: each a function of (lhs, rhs, sizes) -----------------------------------------------------------


def _no_epilogue(problem: Grouped) -> str | None:
    if isinstance(problem, GroupedMatmulProblem) and (problem.bias or problem.activation != "none"):
        return "adds no bias and applies no activation"
    return None


def _with_backward(
    grouped: Callable[[TuningContext], Prepared], contraction: Callable[[TuningContext], Prepared], context: TuningContext
) -> Prepared:
    """A tuned grouped matmul; with `context.grad` also with gradients, for kernels that have none of their own.

    dlhs = g rhs^T is a grouped matmul on rhs as stored, drhs = lhs^T g a ragged contraction; each is tuned apart. The text has
    the settings of the forward product, dlhs and drhs.
    """
    forward, text = grouped(context)
    if not context.grad:
        return forward, text
    p, (lhs, rhs, sizes) = context.problem, context.arrays
    operands: Callable[..., tuple] = (lambda lhs, g: (lhs, g)) if p.layout == "nn" else (lambda lhs, g: (g, lhs))
    g = jax.random.normal(jax.random.key(1), (p.m, p.n), p.dtype)
    flipped = dataclasses.replace(p, n=p.k, k=p.n, layout="nt" if p.layout == "nn" else "nn", out_dtype=p.dtype)
    dlhs, text_lhs = grouped(dataclasses.replace(context, problem=flipped, arrays=(g, rhs, sizes)))
    pair = operands(lhs, g)
    k, n = (x.shape[1] for x in pair)
    weights = RaggedContractionProblem(p.m, n, k, p.groups, p.dtype, p.dtype, p.spread)
    drhs, text_rhs = contraction(dataclasses.replace(context, problem=weights, arrays=(*pair, sizes)))

    @jax.custom_vjp
    def product(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        return forward(lhs, rhs, sizes)

    def backward(saved: tuple, g: jax.Array) -> tuple:
        lhs, rhs, sizes = saved
        g = g.astype(lhs.dtype)
        return dlhs(g, rhs, sizes), drhs(*operands(lhs, g), sizes), None

    product.defvjp(lambda *arrays: (product(*arrays), arrays), backward)
    return product, " | ".join((text, text_lhs, text_rhs))


# --- jax.experimental.pallas.ops.gpu.ragged_dot_mgpu and transposed_ragged_dot_mgpu -----------------------------------

_JAX_PASSES = (("block_m", "block_n", "block_k"), ("max_concurrent_steps",), ("grid_block_n",))
_STEPS, _RASTERS = (4, 2, 5, 6), (4, 2, 8, 1, 16)


def _fits(block_m: int, block_n: int, block_k: int, steps: int) -> bool:
    """Whether a pipeline and an output tile of 16-bit elements fit into shared memory."""
    return 2 * (steps * (block_m + block_n) * block_k + block_m * block_n) + 1024 <= _SMEM


def jax_grouped_settings(problem: GroupedMatmulProblem) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's ragged_dot_mgpu.

    As there, the tiles and the raster divide n. Tiles whose accumulator does not fit one warpgroup's registers are left out:
    192x192 would take 288 registers a thread, of at most 255.
    """
    for block_m, block_n, steps, raster in itertools.product((192, 128, 64), (192, 128, 64), _STEPS, _RASTERS):
        if block_m * block_n // 128 < 255 and problem.n % (raster * block_n) == 0 and _fits(block_m, block_n, 64, steps):
            yield _jax_setting(block_m, block_n, 64, steps, raster)


def jax_contraction_settings(problem: RaggedContractionProblem) -> Iterator[dict[str, int]]:
    """The settings of the tuning loop of JAX's transposed_ragged_dot_mgpu, where block_m divides k and block_n divides n.

    The pipeline of one stage is left out: it never copies while it multiplies.
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


def _jax_grouped(context: TuningContext) -> Prepared:
    settings = [tuple(s.items()) for s in jax_grouped_settings(context.problem)]
    layout = context.problem.layout
    return fastest(context, SettingSpace(settings, lambda setting: partial(_jax_ragged_dot, setting, layout), _JAX_PASSES))


def _jax_contraction(context: TuningContext) -> Prepared:
    settings = [tuple(s.items()) for s in jax_contraction_settings(context.problem)]
    return fastest(context, SettingSpace(settings, lambda setting: partial(_jax_transposed_ragged_dot, setting), _JAX_PASSES))


def _jax_unavailable(module: str, problem: Grouped, gpu: Gpu) -> str | None:
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


def _of_problem(problem: Grouped) -> jax.lax.RaggedDotDimensionNumbers:
    return _GROUPED[problem.layout] if isinstance(problem, GroupedMatmulProblem) else _CONTRACTION


def _tokamax_ragged(problem: Grouped, implementation: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    out: jax.Array = _tokamax_itself().ragged_dot_general(
        lhs, rhs, sizes, _of_problem(problem), preferred_element_type=problem.out_dtype, implementation=implementation
    )
    return out


def _no_gradient(*arrays: Any, **more: Any) -> Any:
    """Replaces tokamax's own gradient, which pickle cannot take; `_with_backward` tunes the products of the gradient."""
    raise NotImplementedError("the gradients of tokamax's ragged_dot are tuned apart")


def _tokamax(context: TuningContext) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try, and of wider ones.

    They are compiled and timed here, because its autotuner takes minutes a problem: it tries all 384 configs, with a warm L2,
    and with group sizes of its own for a ragged contraction. Configs that cannot compile are left out: wgmma takes 64 rows, and
    two stages of block_k 512 do not fit shared memory. block_n 128 and smaller block_k, which its space lacks, are added: they
    are faster on large problems. Its own heuristic's config comes first, then the largest tiles and the deepest pipelines.
    """
    call = partial(_tokamax_ragged, context.problem)
    (bound,) = _tokamax_itself().autotuning.get_bound_args(jax.jit(partial(call, "mosaic")), *context.arrays)
    configs = [c for c in bound.autotuning_configs if c.block_m % 64 == 0 and c.block_k <= 256]
    if context.problem.__class__ is RaggedContractionProblem:  # whose kernel reads neither the raster nor `persistent`
        configs = [c for c in configs if not c.persistent and (c.grid_minor_dim, c.grid_tile_width) == (0, 1)]
    wider = {dataclasses.replace(c, block_n=n, block_k=k) for c in configs for n in (c.block_n, 128) for k in (64, c.block_k)}
    wider = {c for c in wider if _fits(c.block_m, c.block_n, c.block_k, c.num_stages)}

    def fields(config: Any) -> tuple:
        return tuple((name, getattr(config, name)) for names in _TOKAMAX_PASSES for name in names)

    def promise(config: Any) -> tuple:
        own = config == bound.heuristics_config
        return not own, -config.block_m * config.block_n, -config.num_stages, not config.persistent, fields(config)

    def build(config: Any) -> Function:
        return partial(call, (bound.op.replace(config=config, vjp=_no_gradient),))

    ordered = sorted(wider, key=promise)
    return fastest(context, SettingSpace(ordered, build, _TOKAMAX_PASSES, fields, text=lambda config: as_text(fields(config))))


def _tokamax_unavailable(problem: Grouped, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _no_epilogue(problem):
        return reason
    if problem.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit floats, not {problem.dtype}"
    return _not_importable("tokamax", "`pip install tokamax`")


# --- jax.lax.ragged_dot -----------------------------------------------------------------------------------------------


def _lax(problem: Grouped, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return jax.lax.ragged_dot_general(
        lhs, rhs, sizes, _of_problem(problem), preferred_element_type=jax.numpy.dtype(problem.out_dtype)
    )


def _lax_unavailable(problem: Grouped, gpu: Gpu) -> str | None:
    """XLA has no grouped matmul for GPUs: it multiplies all rows for each group, with those of other groups set to zero."""
    p = problem
    expanded = p.groups * p.m * (p.k + p.n) * jax.numpy.dtype(p.dtype).itemsize
    if expanded > gpu.memory_bytes / 4:
        size = f"{expanded / 1e9:.0f} GB of [groups, m, k] and [groups, m, n]"
        return f"is not run: it expands its operands, up to {size}, and takes {p.groups} times the arithmetic"
    if isinstance(p, RaggedContractionProblem) and p.transposed:
        return "takes operands that are stored in rows"
    return _no_epilogue(problem)


# --- Attention: each a function of (q, k, v), then lengths, segments and the bias if there are any ------------------------


def _scale(problem: FlashAttentionProblem) -> float:
    return 1 / math.sqrt(problem.head_dim)


def _cudnn_unavailable(problem: FlashAttentionProblem, gpu: Gpu) -> str | None:
    paged = problem.page_size != 0
    if paged and (problem.left is not None or problem.right is not None or problem.bias != "none"):
        return "is called with pages for lengths alone, without causal mask, window or bias"
    return cudnn.refuses(dataclasses.replace(problem, page_size=0) if paged else problem)


def _attention_limits(problem: FlashAttentionProblem) -> str | None:
    """Why neither of the two competitors in Pallas runs a problem, or only with a mask of all scores in memory."""
    p = problem
    if p.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit floats, not {p.dtype}"
    if p.lengths or p.segments:
        return "takes lengths and segment ids only as a mask of all scores"
    if p.sinks:
        return "takes no sinks"
    if p.page_size:
        return "takes no pages"
    if p.eight_bits:
        return "takes keys and values of the queries' dtype"
    if not (p.left is None and p.right is None) and not cudnn.same_alignment(p):
        return "aligns the first query with the first key, not the last with the last"
    return None


def jax_attention_settings(problem: FlashAttentionProblem) -> Iterator[dict[str, int]]:
    """The settings of JAX's attention_mgpu that its divisibility rules, shared memory and registers allow.

    They are those of the tuning loop in its own main(), and also 128 rows a warpgroup and deeper pipelines.
    """
    p = problem
    for block_q, block_kv, steps in itertools.product((64, 128), (256, 128, 64), (2, 3, 4)):
        if p.q_tokens % (2 * block_q) or p.kv_tokens % block_kv or steps > p.kv_tokens // block_kv:
            continue
        registers = block_q * (block_kv + p.head_dim) // 128  # of each thread for scores and output
        smem = 2 * p.head_dim * (2 * block_q + 2 * steps * block_kv)
        if registers < 232 and smem < 227 * 1024:
            yield {"block_q": block_q, "block_kv": block_kv, "max_concurrent_steps": steps}


def _jax_attention_unavailable(problem: FlashAttentionProblem, gpu: Gpu) -> str | None:
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


def _scaled(problem: FlashAttentionProblem, q: jax.Array, k: jax.Array, v: jax.Array) -> tuple[jax.Array, ...]:
    """q times the scale, k and v, in float16: JAX's kernel does not scale, and its buffers are float16. Not timed."""
    return tuple(x.astype("float16") for x in (q.astype("float32") * _scale(problem), k, v))


def _jax_attention_call(setting: tuple, causal: bool, q: jax.Array, k: jax.Array, v: jax.Array) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import attention_mgpu as theirs

    return theirs.attention(q, k, v, theirs.TuningConfig(**dict(setting), causal=causal))


def _jax_attention(context: TuningContext) -> Prepared:
    causal = context.problem.right == 0
    settings = [tuple(s.items()) for s in jax_attention_settings(context.problem)]
    space = SettingSpace(
        settings,
        lambda setting: partial(_jax_attention_call, setting, causal),
        text=lambda setting: f"float16 {as_text(setting)}",
    )
    return fastest(context, space)


def _tokamax_attention_unavailable(problem: FlashAttentionProblem, gpu: Gpu) -> str | None:
    if reason := _not_hopper(gpu) or _attention_limits(problem):
        return reason
    if problem.soft_cap and problem.bias != "none" and not problem.soft_cap_after_bias:
        return "caps scores after the bias, not before"
    return _not_importable("tokamax", "`pip install tokamax`")


def _tokamax_attention_call(problem: FlashAttentionProblem, implementation: Any, *arrays: jax.Array) -> jax.Array:
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


def _gradients(function: Function, *arrays: jax.Array) -> tuple:
    """The gradients of a function, with its own result as the cotangent."""
    out, pull = jax.vjp(function, *arrays)
    gradients: tuple = pull(out)
    return gradients


def _tokamax_attention(context: TuningContext) -> Prepared:
    """Its Mosaic GPU kernel with the fastest of the configs that its own autotuner would try.

    With `context.grad` its backward kernels are tuned too, after the forward kernel and with the config that won there; the
    text has both configs.
    """
    call = partial(_tokamax_attention_call, context.problem)
    bound_args = _tokamax_itself().autotuning.get_bound_args
    (forward,) = bound_args(jax.jit(partial(call, "mosaic")), *context.arrays)

    def alone(config: Any) -> Function:
        return partial(call, (forward.op.replace(config=config),))

    best, best_call, text = _best_tokamax_config(context, forward, alone)
    if not context.grad:
        return Precompiled(alone(best), context.arrays, best_call), text
    gradients = jax.jit(partial(_gradients, partial(call, "mosaic")))
    (backward,) = (b for b in bound_args(gradients, *context.arrays) if type(b.op) is not type(forward.op))

    def both(config: Any) -> Function:
        return partial(call, (forward.op.replace(config=best, vjp=backward.op.replace(config=config)),))

    best_backward, _, text_backward = _best_tokamax_config(context, backward, lambda config: partial(_gradients, both(config)))
    return both(best_backward), f"{text} | {text_backward}"


def _best_tokamax_config(context: TuningContext, bound: Any, build: Callable[[Any], Function]) -> tuple[Any, CompiledCall, str]:
    """The fastest of an op's configs: its own heuristic's comes first, then the largest tiles and the deepest pipelines."""

    def pairs(config: Any) -> tuple:
        return tuple((f.name, getattr(config, f.name)) for f in dataclasses.fields(config))

    def promise(config: Any) -> tuple:
        fields = dict(pairs(config))
        tile = math.prod(fields[name] for name in fields if name.startswith("block_"))
        return config != bound.heuristics_config, -tile, -config.num_stages, str(config)

    ordered = sorted(bound.autotuning_configs, key=promise)
    return best_setting(context, SettingSpace(ordered, build, pairs=pairs, text=lambda config: as_text(pairs(config))))


def _tokamax_window(problem: FlashAttentionProblem) -> tuple[int, int]:
    """How many keys before and after a row's own it sees: all tokens where there is no bound."""
    left, right = problem.left, problem.right
    return (problem.q_tokens if left is None else left), (problem.kv_tokens if right is None else right)


# --- A whole layer of experts -----------------------------------------------------------------------------------------


def _faster(context: TuningContext) -> Prepared:
    """A grouped matmul by the faster of JAX's kernel and tokamax's, each tuned in half of the time."""
    found, errors = [], []
    for prepare in (_jax_grouped, _tokamax):
        try:
            found.append(prepare(dataclasses.replace(context, seconds=context.seconds / 2)))
        except ValueError as error:
            errors.append(brief(error))
    if not found:
        raise ValueError(f"neither kernel runs: {'; '.join(errors)}")
    samples = context.timer([compiled(function, context.arrays) for function, _ in found], context.gpu, 3)
    return min(zip(found, map(median_us, samples), strict=True), key=lambda pair: pair[1])[0]


def _layer_of(
    grouped: Callable[[TuningContext], Prepared], contraction: Callable[[TuningContext], Prepared], context: TuningContext
) -> Prepared:
    """Of others' kernels, each product tuned by itself: gate and up in one, and down, with their gradients."""
    p = context.problem
    x, logits, gate_up, down = context.arrays
    _, experts = mgpu_ops.moe_route(logits, p.top_k)
    rows, sizes, _, _ = jax.jit(mgpu_ops.moe_dispatch, static_argnums=2)(x, experts, p.groups)
    hidden = jax.random.normal(jax.random.key(2), (p.rows, p.hidden), p.dtype)
    parts = []
    for problem, arrays in ((p.gate_up, (rows, gate_up, sizes)), (p.down, (hidden, down, sizes))):
        one = dataclasses.replace(context, problem=problem, arrays=arrays, seconds=context.seconds / 2)
        parts.append(_with_backward(grouped, contraction, one))
    (first, first_text), (second, second_text) = parts
    return partial(layers.composed, p, first, second), f"{first_text} || {second_text}"


def _tokamax_layer_unavailable(problem: layers.Problem, gpu: Gpu) -> str | None:
    return _tokamax_unavailable(problem.gate_up, gpu)


def _faster_unavailable(problem: layers.Problem, gpu: Gpu) -> str | None:
    """tokamax's gradient of weights is wrong with the compiler there is, so that JAX's kernel has to run."""
    return _jax_unavailable("transposed_ragged_dot_mgpu", problem.gate_up, gpu) or _tokamax_layer_unavailable(problem, gpu)


def _layer_of_8_bits(context: TuningContext) -> Prepared:
    state = layers.state_after(context.problem, context.arrays)
    return partial(layers.in_8_bits, context.problem, state=state), "delayed scaling, after two steps"


def _always(problem: Any, gpu: Gpu) -> None:
    return None


def _quantized_layer(w_dtype: str) -> Competitor:
    """For serving: it is not timed with gradients."""
    prepare, arrays = partial(_under_jit, layers.of_quantized), partial(layers.quantized, w_dtype)
    return Competitor(partial(layers.unfit, w_dtype), prepare, differentiable=False, yardstick=True, arrays=arrays)


_XLA = ("gated_matmul", "quantized_matmul", "quantize", "quantized_grouped_matmul", "cross_entropy", "rms_norm", "rotary")
_FUSED: dict[str, Any] = {"differentiable": True, "arrays": layers.fused, "answers": layers.unfused}

COMPETITORS: dict[str, dict[str, Competitor]] = {
    "moe": {
        "fastest-parts": Competitor(_faster_unavailable, partial(_layer_of, _faster, _jax_contraction), tuned=True, **_FUSED),
        "tokamax": Competitor(_tokamax_layer_unavailable, partial(_layer_of, _tokamax, _tokamax), tuned=True, **_FUSED),
        "tokamax-default": Competitor(_tokamax_layer_unavailable, partial(_under_jit, layers.composed_of_tokamax), **_FUSED),
        "lax": Competitor(layers.expanded_bytes, partial(_under_jit, layers.composed_of_lax), **_FUSED),
        # Yardsticks: rounded to 8 or 4 bits, whose errors are not those of 16.
        "fp8": Competitor(_always, partial(_under_jit, layers.in_8_bits), differentiable=True, yardstick=True),
        "fp8-delayed": Competitor(_always, _layer_of_8_bits, differentiable=True, yardstick=True),
        "int8": _quantized_layer("int8"),
        "int4": _quantized_layer("int4"),
    },
    "matmul": {
        "xla": _baseline("matmul"),
        "jax-pallas": Competitor(_pallas_unavailable, _pallas_prepare, differentiable=False, tuned=True),
        # A yardstick: operands that are rounded to bfloat16 with their scales may miss the tolerance of a product of 8 bits.
        "bf16": Competitor(_bf16_unavailable, _bf16, differentiable=False, yardstick=True, arrays=_dequantized),
    },
    **{op: {"xla": _baseline(op)} for op in (*_XLA, "embedding")},
    "grouped_matmul": {
        "dense": _baseline("grouped_matmul"),
        "jax-pallas": Competitor(
            partial(_jax_unavailable, "ragged_dot_mgpu"),
            partial(_with_backward, _jax_grouped, _jax_contraction),
            differentiable=True,
            tuned=True,
        ),
        "tokamax": Competitor(
            _tokamax_unavailable, partial(_with_backward, _tokamax, _tokamax), differentiable=True, tuned=True
        ),
        "lax": Competitor(_lax_unavailable, partial(_under_jit, _lax), differentiable=True),
    },
    "gated_grouped_matmul": {"dense": _baseline("gated_grouped_matmul")},
    "ragged_contraction": {
        "dense": _baseline("ragged_contraction"),
        "jax-pallas": Competitor(
            partial(_jax_unavailable, "transposed_ragged_dot_mgpu"), _jax_contraction, differentiable=False, tuned=True
        ),
        "tokamax": Competitor(_tokamax_unavailable, _tokamax, differentiable=False, tuned=True),
        "lax": Competitor(_lax_unavailable, partial(_under_jit, _lax), differentiable=False),
    },
    "flash_attention": {
        "cudnn": Competitor(_cudnn_unavailable, partial(_under_jit, cudnn.attention), differentiable=True),
        "tokamax": Competitor(_tokamax_attention_unavailable, _tokamax_attention, differentiable=True, tuned=True),
        "jax-pallas": Competitor(_jax_attention_unavailable, _jax_attention, differentiable=False, arrays=_scaled, tuned=True),
    },
    "flash_attention_backward": {
        "cudnn": Competitor(
            _cudnn_unavailable, partial(_under_jit, cudnn.gradients), differentiable=False, arrays=cudnn.residuals
        ),
    },
}
