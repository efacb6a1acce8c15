"""What a grouped product with quantized weights is (`Problem`), and which configs of quantized_matmul can run it."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from mgpu_ops.core.gemm import ROWS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import MAX_SIZE, itemsize_of, supports_sizes
from mgpu_ops.grouped.problem import LAYERS, MAX_ROWS
from mgpu_ops.grouped.sizes import SPREADS, draw_shard, draw_sizes
from mgpu_ops.matmul.quantized import problem as quantized
from mgpu_ops.matmul.quantized.problem import PANEL, Config, check_config, supports_operands, tolerance, weights_bytes

# --- What is computed -------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem(quantized.Product):
    """out[i, n] = sum_k x[i, k] (w[g, n, k] - zero_points[g, b, n]) scales[g, b, n], i in group g, b = k / group_size.

    m: rows of x of all groups (tokens).
    n: columns of the result.
    k: what is summed over.
    w_dtype: of the weights, "int8" or "int4", two of which lie in a byte.
    group_size: neighbours along k that share a scale: 32, 64 or 128 in the kernel; 0 where all of k does (scales [groups, n]).
    zero_points: whether zero points of the scales' shape are subtracted from the weights.
    dtype: of x, "bfloat16" or "float16" in the kernel.
    out_dtype: of the result, dtype or "float32".
    layout: how weights are stored, "nt" as [groups, n, k] (for the kernel), "nn" as [groups, k, n].
    scale_dtype: of scales and zero points, "float32", "bfloat16" or "float16".
    groups: how many matrices w holds, each with scales of its own.
    spread: how rows are spread over groups, "even", "random", "skewed" or "sparse". Chooses configs, never the result.
    group_offset: whether w holds a shard of the groups; the row where its first group begins then comes before the sizes.
    """

    groups: int = dataclasses.field(kw_only=True)
    spread: str = dataclasses.field(default="random", kw_only=True)
    group_offset: bool = dataclasses.field(default=False, kw_only=True)


_KINDS: dict[str, dict[str, Any]] = {"w8": {}, "w4": {"w_dtype": "int4", "group_size": 128}}
# (layer, tokens, spread) of decoding: 1 to 64 rows an expert, bound by reading the weights.
_DECODING = [
    *(("mixtral-8x7b-gate_up", tokens, "random") for tokens in (16, 128)),
    ("mixtral-8x7b-down", 128, "random"),
    *(("deepseek-v3-ep8-gate_up", tokens, "random") for tokens in (16, 64, 256)),
    ("deepseek-v3-ep8-down", 64, "random"),
    *(("qwen3-30b-gate_up", tokens, "random") for tokens in (64, 512)),
    ("qwen3-30b-down", 64, "random"),
    *(("qwen3-235b-gate_up", tokens, "random") for tokens in (64, 256)),
    ("qwen3-235b-down", 256, "skewed"),
]


def _decoding(layer: str, tokens: int, spread: str, kind: str) -> Problem:
    e = LAYERS[layer]
    return Problem(e.rows * tokens, e.n, e.k, **_KINDS[kind], groups=e.groups, spread=spread)


SHAPES: dict[str, Problem] = {
    f"{layer}-{tokens}-{spread}-{kind}": _decoding(layer, tokens, spread, kind)
    for kind in _KINDS
    for layer, tokens, spread in _DECODING
}
_MODELS = ("mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b")
SUITES: dict[str, Sequence[str]] = {
    **{kind: [name for name in SHAPES if name.endswith(kind)] for kind in _KINDS},
    **{model: [name for name in SHAPES if name.startswith(model)] for model in _MODELS},
}

# --- What can run -----------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if p.spread not in SPREADS:
        return f"spread {p.spread!r} is not one of {', '.join(SPREADS)}"
    if reason := supports_operands(p, gpu, "transpose_rhs") or supports_sizes(p, ("groups",)):
        return reason
    if p.m > MAX_ROWS:
        return f"m={p.m} rows are more than {MAX_ROWS}: split them, or use backend='xla'"
    steps = most_tiles(p, 8, ROWS) * math.ceil(p.k / PANEL)
    if steps > MAX_SIZE:
        return (
            f"{steps} steps of 8 rows, 64 columns and 128 of k are more than {MAX_SIZE}: split the groups, or use backend='xla'"
        )
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason. Kernel, tuner and tests ask here."""
    return supports(problem, gpu) or check_config(problem, config, gpu) or _check_cluster(config)


def _check_cluster(c: Config) -> str | None:
    if c.cluster != "none":
        return f"cluster={c.cluster!r} must be 'none' for products of groups: there are tiles enough for all SMs"
    return None


def helper_registers(c: Config) -> int:
    """As `quantized.helper_registers`, but 40 where the producer has 24 and the tile 8 rows: four consumers then share 104."""
    few = (c.tile_m, c.compute_warpgroups, c.memory_registers) == _LEAST
    return 40 if few and c.exchange == "x" else quantized.helper_registers(c)


_LEAST = 8, 4, 24  # rows, consumer warpgroups, the producer's registers


def most_tiles(p: Problem, tile_m: int, tile_n: int) -> int:
    """At least as many as there are output tiles, whatever the sizes are: each group's last tile may be a part of one."""
    return (p.groups + math.ceil(p.m / tile_m)) * math.ceil(p.n / tile_n)


# --- What a problem takes and gives -----------------------------------------------------------------------------------


def used_groups(p: Problem) -> int:
    """How many groups have rows, as expected from how these are spread."""
    return min(p.m, max(1, p.groups // 2) if p.spread == "sparse" else p.groups)


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem whose groups hold all rows."""
    return 2 * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Inputs read once, of packed weights, scales and zero points only those of groups with rows, and the output written."""
    p = problem
    scales = quantized.groups(p) * p.n * itemsize_of(p.scale_dtype) * (1 + p.zero_points)
    matrices = used_groups(p) * (weights_bytes(p, p.n * p.k) + scales)
    return p.m * p.k * itemsize_of(p.dtype) + matrices + p.m * p.n * itemsize_of(p.out_dtype) + 4 * p.groups


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """x, weights, scales, sizes spread as the problem says, and zero points where it has them: `quantized.inputs` by group."""
    p = problem
    draw = draw_shard if p.group_offset else draw_sizes
    sizes = draw(p.spread, p.m, p.groups, jax.random.fold_in(key, 1))
    x, *_ = quantized.inputs(p, key)
    keys = jax.random.split(jax.random.fold_in(key, 2), p.groups)
    one = dataclasses.replace(p, m=0)
    _, w, scales, *zero_points = jax.lax.map(lambda key: quantized.inputs(one, key), keys)
    return x, w, scales, sizes, *zero_points


__all__ = [
    "SHAPES",
    "SUITES",
    "Config",
    "Problem",
    "bytes_moved",
    "check",
    "flops",
    "helper_registers",
    "inputs",
    "most_tiles",
    "supports",
    "tolerance",
    "used_groups",
]
