"""The backward kernel of attention for head dim 256: two warpgroups with the same 64 keys, one for dv, one for dk.

dk and dv of 64 keys fill half of an SM's registers, so that each warpgroup can hold one of them. The first computes the weights,
hands them to the second through shared memory and adds to dv; the second computes their gradients, hands those to the first,
and adds to dk; dq they share by columns. Each is at most one step ahead of the other.
"""

from __future__ import annotations

import functools
from typing import Any

import jax.numpy as jnp
from jax import lax

from mgpu_ops import core
from mgpu_ops.flash_attention.backward_block import SQUARE, Block, Tile
from mgpu_ops.flash_attention.problem import PANEL, ROWS

DQ_COLUMNS = 32  # float32 elements of a row of a 128-byte swizzle: dq leaves in pieces that wide


def accumulators(head_dim: int, fused: bool) -> tuple[tuple[int, int], ...]:
    """Scores or the gradient of the weights, dv or dk, and a half of dq's tile by panels."""
    return (SQUARE, (ROWS, head_dim), *([SQUARE] * (head_dim // PANEL // 2) * fused))


def compute(block: Block, weighed: Any, differentiated: Any, accumulators: Any) -> None:
    """What the compute warpgroups do. `weighed` and `differentiated`: barriers for what they hand to each other."""
    for wg in (0, 1):

        @core.when(lax.axis_index("wg") == wg)
        def _(wg: int = wg) -> None:
            # Scopes of their own: in one for both, accumulators would live across both branches, and spill.
            accumulators.scope(functools.partial(_compute, wg, block, weighed, differentiated))


def _compute(wg: int, block: Block, weighed: Any, differentiated: Any, s_acc: Any, sum_acc: Any, *dq_accs: Any) -> None:
    """One of the two: 0 for dv, 1 for dk."""
    c, smem, panels = block.c, block.smem, block.panels
    block.number_rows()

    def opaque(i: int) -> Any:
        """i, unknown to the compiler: addresses kept in registers across steps would spill."""
        return lax.optimization_barrier(jnp.int32(i))

    def transposed(name: str, rows: Any) -> Any:
        """Keys or values times rows^T."""
        s_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        first = opaque(0)
        for panel in panels:
            columns = rows.at[:, core.ds(panel * PANEL, PANEL)]
            core.wgmma(s_acc, smem[name].at[first + panel], core.transpose_ref(columns))
        return core.accumulated(s_acc, 0)

    def for_dv(t: Tile, slots: tuple[Any, Any], row: Any, masked: bool) -> None:
        q_slot, do_slot = slots
        core.barrier_wait(block.q_ring.filled.at[q_slot])
        weights, slope = block.weights(t, transposed("k_smem", smem["q_smem"].at[q_slot]), q_slot, 0, row, 0, masked)
        smem["weights_smem"][opaque(0)] = (weights if slope is None else weights * slope).astype(block.p.dtype)
        core.commit_smem()
        core.barrier_arrive(weighed)
        core.barrier_wait(block.do_ring.filled.at[do_slot])
        core.wgmma(sum_acc, weights.astype(block.p.dtype), smem["do_smem"].at[do_slot])
        core.barrier_wait(differentiated)

    def for_dk(t: Tile, slots: tuple[Any, Any], row: Any, masked: bool) -> None:
        del t, row, masked
        q_slot, do_slot = slots
        core.barrier_wait(block.do_ring.filled.at[do_slot])
        dp = transposed("v_smem", smem["do_smem"].at[do_slot]) - block.delta(do_slot, 0)
        core.barrier_wait(weighed)
        weights = core.load(smem["weights_smem"].at[opaque(0)], layout=core.Layout.WGMMA, optimized=False).astype(jnp.float32)
        ds = (weights * dp).astype(block.p.dtype)
        if block.dbias is not None:
            core.wait_smem_to_gmem(0, wait_read_only=True)  # the last ones on their way to the bias's gradient
        smem["ds_smem"][opaque(0), 0] = ds
        core.commit_smem()
        core.barrier_arrive(differentiated)
        core.barrier_wait(block.q_ring.filled.at[q_slot])
        core.wgmma(sum_acc, ds, smem["q_smem"].at[q_slot])

    def tile(t: Tile, done: Any) -> Any:
        def step(member: Any, row_tile: Any, step: Any, masked: bool) -> Any:
            n, row = t.kv_head * block.group + member, row_tile * c.tile_q
            slots = lax.rem(step, jnp.int32(block.q_ring.slots)), lax.rem(step, jnp.int32(block.do_ring.slots))
            (for_dk if wg else for_dv)(t, slots, row, masked)
            if block.dbias is not None and wg:
                place = block.dbias.at[t.b, n, core.ds(t.key, ROWS), core.ds(row, ROWS)]
                core.copy_smem_to_gmem(smem["ds_smem"].at[0, 0], place)
            mine = opaque(wg)
            for i, acc in enumerate(dq_accs):
                acc[...] = jnp.zeros(SQUARE, jnp.float32)
                keys = smem["k_smem"].at[mine * len(dq_accs) + i]
                core.wgmma(acc, core.transpose_ref(smem["ds_smem"].at[opaque(0), 0]), keys)
            for i, acc in enumerate(dq_accs):
                dq = core.accumulated(acc, len(dq_accs) - 1 - i)
                for half in range(PANEL // DQ_COLUMNS):
                    piece = (PANEL // DQ_COLUMNS * i + half) % smem["dq_smem"].shape[1]
                    core.wait_smem_to_gmem(smem["dq_smem"].shape[1] - 1, wait_read_only=True)
                    smem["dq_smem"][mine, piece] = dq[:, half * DQ_COLUMNS : (half + 1) * DQ_COLUMNS]
                    core.commit_smem()
                    column = mine * (len(dq_accs) * PANEL) + (i * PANEL + half * DQ_COLUMNS)
                    block.add_dq(t, smem["dq_smem"].at[mine, piece], row, n, column, DQ_COLUMNS)
            core.wgmma_wait(0)
            core.barrier_arrive(block.q_ring.released.at[slots[0]])
            core.barrier_arrive(block.do_ring.released.at[slots[1]])
            return step + 1

        done = block.for_each_row_tile(t, step, done)
        total = sum_acc[...]
        # The values are this warpgroup's own to overwrite; the keys both have read for dq.
        ref, staging = (block.dk, smem["k_smem"]) if wg else (block.dv, smem["v_smem"])
        if wg:
            total = total * block.x.inputs.options[0]
        core.barrier_arrive(differentiated if wg else weighed)
        core.barrier_wait(weighed if wg else differentiated)
        block.store(t, ref, staging, total, 0)
        sum_acc[...] = jnp.zeros(sum_acc.shape, jnp.float32)
        core.wait_smem_to_gmem(0, wait_read_only=True)
        core.barrier_arrive(block.kv_ring.released.at[0])
        return done

    block.for_each_tile(tile)
