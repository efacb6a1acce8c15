"""The kernel ahead of those for dk, dv and dq: what these read of each row, and zeros for dq where it is added to.

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

from mgpu_ops.attention.backward_block import in_turns
from mgpu_ops.attention.backward_check import DQ_TILE_Q
from mgpu_ops.attention.heads import PANEL, has_room, whole
from mgpu_ops.attention.inputs import LOG2E
from mgpu_ops.attention.launch import BackwardArrays, as_rows, pad_tokens, swizzled
from mgpu_ops.attention.layouts import PER_ROW, load_tile
from mgpu_ops.attention.operands import columns_of
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.attention.reference import delta_of
from mgpu_ops.core import engine, limits
from mgpu_ops.core.rows import load_rows, load_scattered

_SHARE = 0.05  # of the backward pass' time, about
_COUNTERS = 4  # int32: TMA stores 16 bytes at least


class Prepared(NamedTuple):
    """Arrays for the dk/dv kernel and the dq kernel: of each row, up to whole tiles, rows behind the last token see nothing."""

    lse: jax.Array  # [batch, q_heads, rows], times log2(e)
    delta: jax.Array  # likewise, times `sign_of_delta`
    zeros: jax.Array | None  # float32, as many as padded rows of q have columns; None: nobody made them
    counter: jax.Array | None  # int32, zeros


def sign_of_delta(c: BackwardConfig) -> float:
    """With `dq_step="next"` a product adds to it."""
    return -1.0 if c.dq_step == "next" else 1.0


def prepare(p: BackwardProblem, c: BackwardConfig, arrays: BackwardArrays, interpret: bool) -> Prepared:
    """By the kernel; by XLA where delta is given, TMA cannot take the output's heads, or dq is stored before it is added to."""
    tile = c.tile_q if c.mode == "fused" else DQ_TILE_Q
    rows = math.ceil(p.q_tokens / tile) * tile
    if arrays.out is not None and has_room(p.q_heads, arrays.out.shape[3]) and not in_turns(p, c):
        return _launch(p, c, arrays, arrays.out, rows, interpret)
    delta = arrays.out_or_delta
    if arrays.out is not None:
        delta = delta_of(arrays.out, arrays.out_grad[..., : arrays.out.shape[3]], arrays.lse)
    return Prepared(pad_tokens(arrays.lse * LOG2E, tile, math.inf), pad_tokens(delta * sign_of_delta(c), tile), None, None)


def _launch(
    p: BackwardProblem, c: BackwardConfig, arrays: BackwardArrays, out: jax.Array, rows: int, interpret: bool
) -> Prepared:
    """See `Prepared`: zeros where dq is added to them."""
    blocks, columns, zeros = rows // ROWS, out.shape[3], c.mode == "fused"
    panels, of_zeros = math.ceil(columns / PANEL), whole(p.head_dim)
    tiles = p.batch * blocks * p.q_heads

    def body(*refs: Any, here: Any, there: Any, stats: Any, none: Any, full: Any, zero: Any = None) -> None:
        out, out_grad, lse, lse_out, delta_out, counter, *zeros_out = refs
        tile = lax.axis_index("tile")
        block, head = lax.div(tile, jnp.int32(p.q_heads)), lax.rem(tile, jnp.int32(p.q_heads))
        batch, token = lax.div(block, jnp.int32(blocks)), lax.rem(block, jnp.int32(blocks)) * ROWS
        first, end = batch * p.q_tokens, (batch + 1) * p.q_tokens
        for src, place in (out, here), (out_grad, there):
            for panel in range(panels):
                column = columns_of(src, p.q_heads, head, panels * PANEL, panel * PANEL)
                load_rows(src, first + token, end, column, place.at[panel], full)
        # While these come, zeros leave.
        none[...] = jnp.zeros(none.shape, jnp.int32)
        if zeros_out:
            zero[...] = jnp.zeros(zero.shape, jnp.float32)
        plgpu.commit_smem()
        for ref in zeros_out:
            for panel in range(of_zeros.panels):
                plgpu.copy_smem_to_gmem(zero, ref.at[tile * of_zeros.panels + panel])
        pl.when(tile == 0)(lambda: plgpu.copy_smem_to_gmem(none.at[pl.ds(0, _COUNTERS)], counter))
        row = token + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
        last = jnp.int32(p.q_tokens - 1)
        found = load_scattered(lse, (batch * p.q_heads + head) * p.q_tokens + jnp.minimum(row, last))
        found = jnp.where(row <= last, found, math.inf)
        plgpu.barrier_wait(full)
        both = [[load_tile(ref.at[panel]).astype(jnp.float32) for ref in (here, there)] for panel in range(panels)]
        delta = functools.reduce(operator.add, (x * y for x, y in both)).sum(1)
        stats[0] = found * LOG2E
        stats[1] = jnp.where(found == math.inf, 0.0, delta) * sign_of_delta(c)
        plgpu.commit_smem()
        rows_of_tile = pl.ds(token, ROWS)
        plgpu.copy_smem_to_gmem(stats.at[0], lse_out.at[batch, head, rows_of_tile])
        plgpu.copy_smem_to_gmem(stats.at[1], delta_out.at[batch, head, rows_of_tile])
        plgpu.wait_smem_to_gmem(0)

    statistic = jax.ShapeDtypeStruct((p.batch, p.q_heads, rows), jnp.float32)
    size_of_zero = ROWS * of_zeros.panel
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
            jax.ShapeDtypeStruct((_COUNTERS,), jnp.int32),
            *([jax.ShapeDtypeStruct((tiles * of_zeros.panels, size_of_zero), jnp.float32)] if zeros else []),
        ),
        scratch_types={
            "here": tile,
            "there": tile,
            "stats": plgpu.SMEM((2, ROWS), jnp.float32),
            **({"zero": plgpu.SMEM((size_of_zero,), jnp.float32)} if zeros else {}),
            "none": plgpu.SMEM((limits.WARPGROUP,), jnp.int32),  # a number of each thread
            "full": plgpu.Barrier(num_arrivals=2 * panels),
        },
        constant=(2, 3),
    )(as_rows(out), as_rows(arrays.out_grad), arrays.lse.reshape(-1))
    lse, delta, counter, *of_dq = found
    return Prepared(lse, delta, of_dq[0] if of_dq else None, counter)
