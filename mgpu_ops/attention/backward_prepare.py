"""The kernel ahead of the dk/dv kernel: what that one reads of each row, and zeros where it adds.

    delta = sum over columns of output times its gradient, 0 for a row that sees nothing
    lse times log2(e), as exponentials are powers of two

By XLA these are two kernels, zeros for dq a third, and a zero for the counter of tiles a copy: each takes some 2 us beside its
bytes. A thread block makes the rows of one tile: 64 rows of one head.
"""

from __future__ import annotations

import functools
import math
import operator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import PANEL
from mgpu_ops.attention.inputs import LOG2E
from mgpu_ops.attention.launch import BackwardArrays, swizzled
from mgpu_ops.attention.layouts import load_per_row, load_tile
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.core import engine, limits

_SHARE = 0.05  # of the backward pass' time, about
_COUNTERS = 4  # int32: TMA stores 16 bytes at least


class Prepared(NamedTuple):
    """Arrays for the dk/dv kernel."""

    lse: jax.Array  # [batch, q_heads, q_tokens], times log2(e)
    delta: jax.Array  # likewise, times `sign_of_delta`
    zeros: jax.Array  # float32, of the shape that was asked for
    counter: jax.Array  # int32, zeros


def sign_of_delta(c: BackwardConfig) -> float:
    """With `dq_step="next"` a product adds to it."""
    return -1.0 if c.dq_step == "next" else 1.0


def launch(p: BackwardProblem, c: BackwardConfig, arrays: BackwardArrays, zeros: tuple[int, ...], interpret: bool) -> Prepared:
    """From output, its gradient and lse. zeros: a shape of as many numbers as q has. Only where `prepares_rows`."""
    panels, blocks = p.head_dim // PANEL, p.q_tokens // ROWS
    tiles = p.batch * blocks * p.q_heads

    def body(*refs: Any, here: Any, there: Any, stats: Any, zero: Any, none: Any, full: Any) -> None:
        out, out_grad, lse, lse_out, delta_out, zeros_out, counter = refs
        tile = lax.axis_index("tile")
        block, head = lax.div(tile, jnp.int32(p.q_heads)), lax.rem(tile, jnp.int32(p.q_heads))
        batch, rows = lax.div(block, jnp.int32(blocks)), pl.ds(lax.rem(block, jnp.int32(blocks)) * ROWS, ROWS)
        engine.copy_gmem_to_smem(lse.at[batch, head, rows], stats.at[0], full)
        for panel in range(panels):
            columns = pl.ds(panel * PANEL, PANEL)
            engine.copy_gmem_to_smem(out.at[batch, rows, head, columns], here.at[panel], full)
            engine.copy_gmem_to_smem(out_grad.at[batch, rows, head, columns], there.at[panel], full)
        # While these come, zeros leave.
        zero[...] = jnp.zeros(zero.shape, jnp.float32)
        none[...] = jnp.zeros(none.shape, jnp.int32)
        plgpu.commit_smem()
        for panel in range(panels):
            plgpu.copy_smem_to_gmem(zero, zeros_out.at[tile * panels + panel])
        pl.when(tile == 0)(lambda: plgpu.copy_smem_to_gmem(none.at[pl.ds(0, _COUNTERS)], counter))
        plgpu.barrier_wait(full)
        both = [[load_tile(ref.at[panel]).astype(jnp.float32) for ref in (here, there)] for panel in range(panels)]
        delta = functools.reduce(operator.add, (x * y for x, y in both)).sum(1)
        found = load_per_row(stats.at[0])
        stats[1] = found * LOG2E
        stats[2] = jnp.where(found == math.inf, 0.0, delta) * sign_of_delta(c)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(stats.at[1], lse_out.at[batch, head, rows])
        plgpu.copy_smem_to_gmem(stats.at[2], delta_out.at[batch, head, rows])
        plgpu.wait_smem_to_gmem(0)

    statistic = jax.ShapeDtypeStruct(arrays.lse.shape, jnp.float32)
    tile = swizzled((panels, ROWS, PANEL), p.dtype)
    found = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_flash_attention_prepare",
            {"tile": tiles},
            warpgroups=1,
            interpret=interpret,
            reduces_across_warps=False,
            share=_SHARE,
        ),
        out_type=(
            statistic,
            statistic,
            jax.ShapeDtypeStruct((tiles * panels, ROWS * PANEL), jnp.float32),
            jax.ShapeDtypeStruct((_COUNTERS,), jnp.int32),
        ),
        scratch_types={
            "here": tile,
            "there": tile,
            "stats": plgpu.SMEM((3, ROWS), jnp.float32),
            "zero": plgpu.SMEM((ROWS * PANEL,), jnp.float32),
            "none": plgpu.SMEM((limits.WARPGROUP,), jnp.int32),  # a number of each thread
            "full": plgpu.Barrier(num_arrivals=1 + 2 * panels),
        },
    )(arrays.out, arrays.out_grad, arrays.lse)
    return Prepared(found[0], found[1], found[2].reshape(zeros), found[3])
