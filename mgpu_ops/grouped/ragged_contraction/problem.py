"""What a ragged contraction is (`Problem`), and which configs of grouped matmuls can run it (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, check_fields, itemsize_of
from mgpu_ops.grouped import problem as common
from mgpu_ops.grouped.config import PANEL, Config, check_deferred, check_last_tile, check_smem, check_tiles
from mgpu_ops.grouped.problem import MODELS, TRAINING, layer_problem
from mgpu_ops.grouped.sizes import draw_shard, draw_sizes


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[g, k, n]: lhs[m, k]^T times rhs[m, n], summed over the rows of group g.

    m, n, k: rows of both operands, columns of rhs and of lhs.
    groups: into how many the rows are divided.
    dtype, out_dtype, spread, group_offset: as in grouped_matmul.

    In its Config, tile_m is a tile of k, and tile_k are the rows of one pipeline step.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    spread: str = "random"
    group_offset: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


# The gradients of the weights in grouped_matmul's training problems.
SHAPES = {"-".join(map(str, case)) + "-drhs": layer_problem(Problem, *case) for case in TRAINING}
SUITES: dict[str, Sequence[str]] = {
    "moe": list(SHAPES),
    **{model: [name for name in SHAPES if name.startswith(model)] for model in MODELS},
}


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if p.dtype in FLOAT8:
        return (
            f"dtype {p.dtype}: wgmma reads 8 bits along what is summed over, here the rows, and operands are stored across "
            "them; cast both to bfloat16, or use backend='xla'"
        )
    return common.supports(p, gpu, ("n", p.n), lambda: p.groups * math.ceil(p.k / ROWS) * math.ceil(p.n / ROWS))


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    p, c = problem, config
    reason = supports(p, gpu) or check_tiles(c, itemsize_of(p.out_dtype), gpu) or check_deferred(c, p, None)
    if reason is not None:
        return reason
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
    return check_smem(p, c, gpu)


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once; empty groups write zeros."""
    p = problem
    return p.m * (p.k + p.n) * itemsize_of(p.dtype) + 4 * p.groups + p.groups * p.k * p.n * itemsize_of(p.out_dtype)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal lhs and rhs, and sizes spread as the problem says."""
    p = problem
    key_l, key_r, key_s = jax.random.split(key, 3)
    lhs, rhs = jax.random.normal(key_l, (p.m, p.k), p.dtype), jax.random.normal(key_r, (p.m, p.n), p.dtype)
    return lhs, rhs, (draw_shard if p.group_offset else draw_sizes)(p.spread, p.m, p.groups, key_s)


def plain(problem: Problem) -> Problem:
    """The problem whose entries count as this one's: the same contraction of all groups."""
    return dataclasses.replace(problem, group_offset=False)
