"""What a ragged contraction is (`Problem`), and which configs of grouped matmuls can run it (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mgpu_ops.core import fp8
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import DTYPES, FLOAT8, check_fields, itemsize_of, supports_dtypes, supports_gpu
from mgpu_ops.grouped import problem as common
from mgpu_ops.grouped.config import PANEL, Config, check_deferred, check_last_tile, check_short_tiles, check_smem, check_tiles
from mgpu_ops.grouped.problem import MODELS, TRAINING, dtype_of_rhs, layer_problem
from mgpu_ops.grouped.sizes import draw_shard, draw_sizes

PADDED = 128  # a group's columns are padded to a multiple, where operands are stored transposed: a swizzle row of 8 bits


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[g, k, n]: lhs[m, k]^T times rhs[m, n], summed over the rows of group g.

    In its Config, tile_m is a tile of k, and tile_k are the rows of one pipeline step.

    m: rows of both operands.
    n: columns of rhs.
    k: columns of lhs.
    groups: into how many the rows are divided.
    dtype, out_dtype, spread, group_offset: as in grouped_matmul.
    rhs_dtype: of rhs where it is the other of the two 8-bit floats; "none" where it is dtype.
    transposed: whether the operands are 8-bit floats stored transposed, lhs[k, m] and rhs[n, m], each group padded with zeros
      to a multiple of 128 columns (m counts the padding, the sizes do not). A factor, float32 [1], follows the sizes.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    spread: str = "random"
    group_offset: bool = False
    rhs_dtype: str = "none"
    transposed: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rhs_dtype == self.dtype:  # one problem, written in one way
            object.__setattr__(self, "rhs_dtype", "none")


# The gradients of the weights in grouped_matmul's training problems.
SHAPES = {"-".join(map(str, case)) + "-drhs": layer_problem(Problem, *case) for case in TRAINING}
SUITES: dict[str, Sequence[str]] = {
    "moe": list(SHAPES),
    **{model: [name for name in SHAPES if name.startswith(model)] for model in MODELS},
}


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if p.dtype in FLOAT8 and not p.transposed:
        return (
            f"dtype {p.dtype}: wgmma reads 8 bits along what is summed over, here the rows, and operands are stored across "
            "them; cast both to bfloat16, or use backend='xla'"
        )
    reason = _supports_transposed(p, gpu) if p.transposed else _supports_rows(p, gpu)
    tiles = lambda: p.groups * math.ceil(p.k / ROWS) * math.ceil(p.n / ROWS)  # noqa: E731
    sides = {"lhs": ("m", p.m), "rhs": ("m", p.m)} if p.transposed else {"lhs": ("k", p.k), "rhs": ("n", p.n)}
    return reason or common.supports_sides(p, sides, tiles)


def _supports_rows(p: Problem, gpu: Gpu) -> str | None:
    """Why wgmma cannot multiply operands of these dtypes that are stored in rows, or None."""
    if p.rhs_dtype != "none":
        return f"lhs is {p.dtype} and rhs is {p.rhs_dtype}: cast one, or use backend='xla'"
    return supports_dtypes(p.dtype, p.out_dtype, gpu)


def _supports_transposed(p: Problem, gpu: Gpu) -> str | None:
    """Why the kernel cannot run a problem of operands that are stored transposed, or None."""
    if reason := supports_gpu(gpu):
        return reason
    if p.dtype not in FLOAT8 or dtype_of_rhs(p) not in FLOAT8:
        return f"{p.dtype} and {dtype_of_rhs(p)} stored transposed: only {' and '.join(FLOAT8)} are; store 16 bits in rows"
    if p.out_dtype not in (*DTYPES, "float32"):
        return f"out_dtype {p.out_dtype} is not one of bfloat16, float16, float32: cast the result, or use backend='xla'"
    if p.group_offset:
        return "a shard of the groups is not read from arrays that hold all, stored transposed: pass its groups' columns alone"
    if type(p.m) is int and p.m % PADDED:
        return f"m={p.m} is no multiple of {PADDED}, to which each group's columns are padded: pad the arrays"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    p, c = problem, config
    reason = supports(p, gpu) or check_tiles(c, itemsize_of(p.out_dtype), gpu, p.dtype) or check_deferred(c, p, None)
    reason = reason or check_short_tiles(c, "a contraction")
    return reason or (_check_transposed(p, c) if p.transposed else _check_windows(p, c)) or check_smem(p, c, gpu)


def _check_transposed(p: Problem, c: Config) -> str | None:
    """Why a config's tiles of operands that are stored transposed cannot be loaded or stored, or None."""
    if c.tile_k != PADDED:
        return f"tile_k={c.tile_k} must be {PADDED}, to whose multiples groups are padded: a step is of one group"
    row = 128 // itemsize_of(p.out_dtype)
    if (p.n % row or p.k % 8) and c.epilogue_tile_n != row:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {row} because k={p.k}, n={p.n} are no multiples of 8, {row}: "
            "TMA clips one swizzle row only"
        )
    return None


def _check_windows(p: Problem, c: Config) -> str | None:
    """Why TMA cannot copy a config's tiles of operands that are stored in rows, or None."""
    for field, width, name, length in zip(("tile_m", "tile_n"), warpgroup_tile(c), "kn", (p.k, p.n), strict=True):
        if width % PANEL:
            return f"a warpgroup's {width} of {field}={getattr(c, field)} must be a multiple of {PANEL}, one swizzle row"
        if reason := check_last_tile(name, length, field, getattr(c, field), width):
            return reason
    row, rows = 128 // itemsize_of(p.out_dtype), 8 if warpgroup_tile(c)[0] == PANEL else PANEL
    if (p.n % row or p.k % rows) and c.epilogue_tile_n != row:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {row} because k={p.k}, n={p.n} are no multiples of {rows}, {row}: "
            "TMA clips one swizzle row only"
        )
    return None


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once; empty groups write zeros."""
    p = problem
    operands = p.m * (p.k + p.n) * itemsize_of(p.dtype) + 4 * p.groups + 4 * p.transposed
    return operands + p.groups * p.k * p.n * itemsize_of(p.out_dtype)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal lhs and rhs, and sizes spread as the problem says; stored transposed, also a scale from 1/2 to 2."""
    p = problem
    key_l, key_r, key_s = jax.random.split(key, 3)
    if p.transposed:
        return _transposed_inputs(p, key_l, key_r, key_s)
    lhs, rhs = jax.random.normal(key_l, (p.m, p.k), p.dtype), jax.random.normal(key_r, (p.m, p.n), p.dtype)
    return lhs, rhs, (draw_shard if p.group_offset else draw_sizes)(p.spread, p.m, p.groups, key_s)


def padded(sizes: jax.Array, m: int) -> jax.Array:
    """The columns of each group with its padding, of sizes of any values."""
    return lax.div(jnp.clip(sizes, 0, m) + (PADDED - 1), jnp.int32(PADDED)) * PADDED


def _transposed_inputs(p: Problem, key_l: Any, key_r: Any, key_s: Any) -> tuple[jax.Array, ...]:
    """Of groups that fill m with their padding."""
    key_b, key_p, key_f = jax.random.split(key_s, 3)
    whole = PADDED * draw_sizes(p.spread, p.m // PADDED, p.groups, key_b)
    sizes = jnp.maximum(whole - jax.random.randint(key_p, (p.groups,), 0, PADDED, jnp.int32), 0)
    column, ends = jnp.arange(p.m, dtype=jnp.int32), jnp.cumsum(whole, dtype=jnp.int32)
    group = jnp.minimum(jnp.searchsorted(ends, column, side="right", method="scan_unrolled"), p.groups - 1)
    inside = column < (ends - whole + sizes)[group]

    def operand(key: Any, rows: int, dtype: str) -> jax.Array:
        return jnp.where(inside, jax.random.normal(key, (rows, p.m), jnp.bfloat16), 0).astype(dtype)

    scale = 2.0 ** jax.random.uniform(key_f, (1,), jnp.float32, -1.0, 1.0)
    return operand(key_l, p.k, p.dtype), operand(key_r, p.n, dtype_of_rhs(p)), sizes, scale


def tolerance(problem: Problem) -> float:
    """`common.tolerance`, and of 8-bit floats what their sums add (`fp8.accumulation_error`): a group may have all rows."""
    return common.tolerance(problem) + fp8.accumulation_error(problem.dtype, problem.m, "none")


def plain(problem: Problem) -> Problem:
    """The problem whose entries count as this one's: the same contraction of all groups."""
    return dataclasses.replace(problem, group_offset=False)
