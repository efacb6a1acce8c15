"""What a ragged contraction is (`Problem`), and which configs of grouped matmuls can run it (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax

from mgpu_ops.core import smem
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.groups import (
    LAYERS,
    MAX_ROWS,
    MODELS,
    PANEL,
    SPREADS,
    TRAINING,
    Config,
    check_smem,
    check_tiles,
    draw_sizes,
    itemsize_of,
    out_smem_shape,
    supports_dtypes,
    supports_rows,
    warpgroup_tile,
)


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[g, k, n]: lhs[m, k]^T times rhs[m, n], summed over the rows of group g. dtypes and `spread` as in grouped_matmul.

    In its Config, tile_m is a tile of k, and tile_k are the rows of one pipeline step.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    spread: str = "random"


def _problem(layer: str, tokens: int, spread: str) -> Problem:
    per_token, n, k, groups = LAYERS[layer]
    return Problem(per_token * tokens, n, k, groups, spread=spread)


# The gradients of the weights in grouped_matmul's training problems.
SHAPES = {"-".join(map(str, case)) + "-drhs": _problem(*case) for case in TRAINING}
SUITES: dict[str, Sequence[str]] = {
    "moe": list(SHAPES),
    **{model: [name for name in SHAPES if name.startswith(model)] for model in MODELS},
}


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    reason = supports_dtypes(p.dtype, p.out_dtype, gpu)
    if reason is not None:
        return reason
    if p.spread not in SPREADS:
        return f"spread {p.spread!r} is not one of {', '.join(SPREADS)}"
    if min(p.m, p.n, p.k, p.groups) < 1:
        return f"a dimension of {p} is zero: there is nothing to multiply"
    if p.m > MAX_ROWS:
        return f"m={p.m} rows are more than {MAX_ROWS}: split them, or pass backend='xla'"
    out = ("n", p.n, itemsize_of(p.out_dtype))
    return supports_rows({"lhs": ("k", p.k, 2), "rhs": ("n", p.n, 2), "the output": out})


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    p, c = problem, config
    reason = check_tiles(c, itemsize_of(p.out_dtype), gpu)
    if reason is not None:
        return reason
    for field, width, name, length in zip(("tile_m", "tile_n"), warpgroup_tile(c), "kn", (p.k, p.n), strict=True):
        if width % PANEL:
            return f"a warpgroup's {width} of {field}={getattr(c, field)} must be a multiple of {PANEL}, one swizzle row"
        if length % PANEL and width != PANEL:
            return (
                f"a warpgroup's {width} of {field}={getattr(c, field)} must be {PANEL} because {name}={length} is no multiple "
                f"of {PANEL}: TMA clips one swizzle row only"
            )
    row = 128 // itemsize_of(p.out_dtype)
    if (p.n % row or p.k % 8) and c.epilogue_tile_n != row:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {row} because k={p.k}, n={p.n} are no multiples of 8, {row}: "
            "TMA clips one swizzle row only"
        )
    return check_smem(smem_bytes(p, c), gpu)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    c, steps = config, config.max_concurrent_steps
    return smem.block_bytes(
        [
            ((steps, c.tile_k, c.tile_m), 2),
            (out_smem_shape(c), itemsize_of(problem.out_dtype)),
            ((steps, c.tile_k, c.tile_n), 2),
        ],
        barriers=2 * steps,  # a slot is filled; a slot may be overwritten
    )


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem whose groups hold all rows."""
    return 2 * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once; empty groups write zeros."""
    p = problem
    return p.m * (p.k + p.n) * itemsize_of(p.dtype) + 4 * p.groups + p.groups * p.k * p.n * itemsize_of(p.out_dtype)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal lhs and rhs, and sizes spread as the problem says."""
    p = problem
    key_l, key_r, key_s = jax.random.split(key, 3)
    lhs, rhs = jax.random.normal(key_l, (p.m, p.k), p.dtype), jax.random.normal(key_r, (p.m, p.n), p.dtype)
    return lhs, rhs, draw_sizes(p.spread, p.m, p.groups, key_s)
