"""The backward kernel of attention for head dims 64 and 128: two warpgroups, each with 64 keys and the gradients of these."""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import SQUARE, Block, Tile
from mgpu_ops.attention.problem import PANEL, ROWS
from mgpu_ops.core import engine


def accumulators(head_dim: int, fused: bool) -> tuple[tuple[int, int], ...]:
    """Scores, gradient of the weights, dk, dv, and a quarter of dq's tile."""
    return (SQUARE, SQUARE, (ROWS, head_dim), (ROWS, head_dim), *([SQUARE] * fused))


def compute(block: Block, together: Any, accumulators: Any) -> None:
    """What the consumer warpgroups do. `together`: a barrier for them to meet at."""
    accumulators.scope(functools.partial(_compute, block, together))


def _compute(block: Block, together: Any, s_acc: Any, dp_acc: Any, dk_acc: Any, dv_acc: Any, *dq_acc: Any) -> None:
    """What a consumer warpgroup does: weights and their gradients of its keys, in registers as the operands of dv and dk; dq,
    for which the warpgroups meet, shared between them by columns or, where head_dim is one panel, by rows.
    """
    c, smem, panels, parts = block.c, block.smem, block.panels, range(block.c.tile_q // ROWS)
    block.number_rows()

    def warpgroup() -> Any:
        """This warpgroup, opaque to the compiler: addresses that it kept in registers across steps would spill."""
        return lax.optimization_barrier(lax.axis_index("wg"))

    def meet() -> None:
        """The warpgroups wait for each other, and see what the other wrote to shared memory before."""
        engine.barrier_arrive(together)
        plgpu.barrier_wait(together)

    def rows_of(name: str, stage: Any, part: int) -> Any:
        return smem[name].at[stage, pl.ds(part * ROWS, ROWS)]

    def transposed(acc: Any, name: str, rows: Any) -> None:
        """acc = own keys or values times rows^T: starts as many products as there are panels."""
        mine = pl.ds(warpgroup() * ROWS, ROWS)
        acc[...] = jnp.zeros(SQUARE, jnp.float32)
        for panel in panels:
            columns = rows.at[:, pl.ds(panel * PANEL, PANEL)]
            engine.wgmma(acc, smem[name].at[panel, mine, :], engine.transpose_ref(columns))

    def tile(t: Tile, done: Any) -> Any:
        def step(member: Any, row_tile: Any, step: Any, masked: bool) -> Any:
            n, row = t.kv_head * block.group + member, row_tile * c.tile_q
            stage, buffer, wg = lax.rem(step, jnp.int32(block.rows_pipeline.stages)), lax.rem(step, jnp.int32(2)), warpgroup()
            mine = pl.ds(wg * ROWS, ROWS)
            plgpu.barrier_wait(block.rows_pipeline.full.at[stage])
            for part in parts:
                transposed(s_acc, "k_smem", rows_of("q_smem", stage, part))
                transposed(dp_acc, "v_smem", rows_of("do_smem", stage, part))
                s = engine.accumulated(s_acc, len(panels))
                weights, slope = block.weights(t, s, stage, part, row + part * ROWS, wg, wg * ROWS, masked)
                engine.wgmma(dv_acc, weights.astype(block.p.dtype), rows_of("do_smem", stage, part))
                ds = weights * (engine.accumulated(dp_acc, 1) - block.delta(stage, part))
                ds = (ds if slope is None else ds * slope).astype(block.p.dtype)
                if "ds_smem" in smem:
                    smem["ds_smem"][buffer, part, mine, :] = ds
                    plgpu.commit_smem()
                engine.wgmma(dk_acc, ds, rows_of("q_smem", stage, part))
            if block.dbias is not None:
                for part in parts:
                    place = block.dbias.at[
                        t.b * block.p.q_heads + n, pl.ds(t.key + wg * ROWS, ROWS), pl.ds(row + part * ROWS, ROWS)
                    ]
                    plgpu.copy_smem_to_gmem(smem["ds_smem"].at[buffer, part, mine, :], place)
            part, panel = (0, wg) if len(parts) == 1 else (wg, 0)  # of dq, this warpgroup's
            dq: Any = None
            if dq_acc:
                meet()
                dq_acc[0][...] = jnp.zeros(SQUARE, jnp.float32)
                engine.wgmma(dq_acc[0], engine.transpose_ref(smem["ds_smem"].at[buffer, part]), smem["k_smem"].at[panel])
                dq = engine.accumulated(dq_acc[0], 0)
            else:
                engine.wgmma_wait(0)
            engine.barrier_arrive(block.rows_pipeline.empty.at[stage])
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            if dq_acc:
                smem["dq_smem"][wg] = dq
                plgpu.commit_smem()
                block.add_dq(t, smem["dq_smem"].at[wg], row + part * ROWS, n, panel * PANEL, PANEL)
            return step + 1

        done = block.for_each_row_tile(t, step, done)
        dk, dv = dk_acc[...] * block.x.inputs.options[0], dv_acc[...]
        meet()  # the keys are done with: their place, and the values', takes the gradients on their way out
        own = warpgroup() * ROWS
        for name, ref, values in (("k_smem", block.dk, dk), ("v_smem", block.dv, dv)):
            block.store(t, ref, smem[name].at[:, pl.ds(own, ROWS), :], values, own)
        for acc in (dk_acc, dv_acc):
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        block.release_keys()
        return done

    block.for_each_tile(tile)
