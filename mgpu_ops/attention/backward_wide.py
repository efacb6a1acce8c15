"""The backward kernel of attention for head dim 256: two warpgroups with the same 64 keys, one for dv, one for dk.

dk and dv of 64 keys fill half of an SM's registers, so that each warpgroup can hold one of them. The first computes the
weights, hands them to the second through shared memory and adds to dv; the second multiplies them with their gradients and
adds to dk. There is no room for dq: `backward_dq.py` computes that.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import SQUARE, Block, Tile, opaque_zero
from mgpu_ops.attention.problem import PANEL, ROWS
from mgpu_ops.core import engine


def accumulators(head_dim: int) -> tuple[tuple[int, int], ...]:
    """Scores or the gradient of the weights, and dv or dk."""
    return (SQUARE, (ROWS, head_dim))


def compute(block: Block, weighed: Any, read: Any, accumulators: Any) -> None:
    """What the consumer warpgroups do. `weighed` and `read`: barriers for the weights that one hands to the other."""
    for wg in (0, 1):

        @pl.when(lax.axis_index("wg") == wg)
        def _(wg: int = wg) -> None:
            # Scopes of their own: in one for both, accumulators would live across both branches, and spill.
            accumulators.scope(functools.partial(_compute, wg, block, weighed, read))


def _compute(wg: int, block: Block, weighed: Any, read: Any, s_acc: Any, sum_acc: Any) -> None:
    """One of the two: 0 for dv, 1 for dk."""
    c, smem, panels, dtype = block.c, block.smem, block.panels, block.p.dtype
    block.number_rows()

    def transposed(name: str, rows: Any) -> Any:
        """Keys or values times rows^T."""
        s_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        first = opaque_zero()
        for panel in panels:
            columns = rows.at[:, pl.ds(panel * PANEL, PANEL)]
            engine.wgmma(s_acc, smem[name].at[first + panel], engine.transpose_ref(columns))
        return engine.accumulated(s_acc, 0)

    def add_to_dv(t: Tile, step: Any, stage: Any, row: Any, masked: bool) -> None:
        s = transposed("k_smem", smem["q_smem"].at[stage])
        weights, slope = block.weights(t, s, stage, 0, row, wg, 0, masked)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(read))
        smem["weights_smem"][opaque_zero()] = (weights if slope is None else weights * slope).astype(dtype)
        plgpu.commit_smem()
        engine.barrier_arrive(weighed)
        engine.wgmma(sum_acc, weights.astype(dtype), smem["do_smem"].at[stage])

    def add_to_dk(t: Tile, step: Any, stage: Any, row: Any, n: Any) -> None:
        del step
        dp = transposed("v_smem", smem["do_smem"].at[stage]) - block.delta(stage, 0)
        plgpu.barrier_wait(weighed)
        handed = smem["weights_smem"].at[opaque_zero()]
        weights = plgpu.load(handed, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32)
        engine.barrier_arrive(read)
        ds = (weights * dp).astype(dtype)
        engine.wgmma(sum_acc, ds, smem["q_smem"].at[stage])
        if block.dbias is not None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            smem["ds_smem"][opaque_zero(), 0] = ds
            plgpu.commit_smem()
            place = block.dbias.at[t.b * block.p.q_heads + n, pl.ds(t.key, ROWS), pl.ds(row, ROWS)]
            plgpu.copy_smem_to_gmem(smem["ds_smem"].at[0, 0], place)

    def tile(t: Tile, done: Any) -> Any:
        def step(member: Any, row_tile: Any, step: Any, masked: bool) -> Any:
            n, row = t.kv_head * block.group + member, row_tile * c.tile_q
            stage = lax.rem(step, jnp.int32(block.rows_pipeline.stages))
            plgpu.barrier_wait(block.rows_pipeline.full.at[stage])
            if wg == 0:
                add_to_dv(t, step, stage, row, masked)
            else:
                add_to_dk(t, step, stage, row, n)
            engine.wgmma_wait(0)
            engine.barrier_arrive(block.rows_pipeline.empty.at[stage])
            return step + 1

        done = block.for_each_row_tile(t, step, done)
        total = sum_acc[...]
        # Only dv's warpgroup reads the keys, only dk's the values: each is free to send its result out from there.
        ref, staging = (block.dk, smem["v_smem"]) if wg else (block.dv, smem["k_smem"])
        if wg:
            total = total * block.x.inputs.options[0]
        block.store(t, ref, staging, total, 0)
        sum_acc[...] = jnp.zeros(sum_acc.shape, jnp.float32)
        block.release_keys()
        return done

    block.for_each_tile(tile)
    if wg == 0:
        pl.when(block.tiles.count > 0)(lambda: plgpu.barrier_wait(read))
