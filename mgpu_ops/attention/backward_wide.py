"""The consumers of the dk/dv kernel for head dims above 128: two warpgroups with the same 64 keys, one for dv, one for dk.

dk and dv of 64 keys fill half of an SM's registers, so that each warpgroup can keep one of them. For each q block the first
computes S = k q^T and the weights P, hands these to the second through shared memory, and adds to dv; the second computes
dP = v dO^T and dS = P (dP - delta) and adds to dk. There is no room for dq: `backward_dq.py` computes that.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import SQUARE, KvBlock, ScoreTile, ThreadBlock, opaque_zero
from mgpu_ops.attention.heads import whole
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import load_tile
from mgpu_ops.attention.operands import Position
from mgpu_ops.attention.problem import ROWS, BackwardProblem
from mgpu_ops.core import engine

DV, DK = 0, 1  # which warpgroup computes what


def accumulators(p: BackwardProblem) -> tuple[tuple[int, int], ...]:
    """Scores or the gradient of the weights, dv, dk."""
    return (SQUARE, (ROWS, p.head_dim), (ROWS, p.head_dim))


def consume(block: ThreadBlock, scratch: Scratch) -> None:
    """What the consumers do."""
    written, read = scratch.barriers["between"]
    for wg in (DV, DK):

        @pl.when(lax.axis_index("wg") == wg)
        def _(wg: int = wg) -> None:
            # Scopes of their own: in one for both, accumulators would live across both branches, and spill.
            scratch.accumulators.scope(lambda *accs: _Consumer(wg, block, written, read, *accs).run(), (0, 1 + wg))


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup, for dv or for dk."""

    wg: int
    block: ThreadBlock
    written: Any  # barrier: dv's warpgroup has written weights
    read: Any  # barrier: dk's warpgroup has read them
    s_acc: Any
    sum_acc: Any  # dv or dk

    def run(self) -> None:
        self.block.mask.write_numbers()
        self.block.for_each_kv_block(self._kv_block)
        if self.wg == DV:  # the last arrival at `read`, too, is waited for
            pl.when(self.block.tiles.count > 0)(lambda: plgpu.barrier_wait(self.read))

    def _kv_block(self, kv: KvBlock, done: jax.Array) -> jax.Array:
        """Adds up dv or dk over all q blocks; the producer meanwhile loads what comes next."""
        block = self.block
        done = block.for_each_q_block(kv, self._q_block, done)
        total = self.sum_acc[...]
        # Only dv's warpgroup reads the keys, only dk's the values: each is free to send its result out from there.
        ref, staging = (block.dk, block.smem["v"]) if self.wg == DK else (block.dv, block.smem["k"])
        if self.wg == DK:
            total = total * block.x.inputs.options[0]
        block.store(ref, kv.at, staging, total)
        self.sum_acc[...] = jnp.zeros(self.sum_acc.shape, jnp.float32)
        block.release_keys(kv)
        return done

    def _q_block(self, kv: KvBlock, member: jax.Array, q_block: jax.Array, step: jax.Array, masked: bool) -> jax.Array:
        block, q = self.block, self.block.q_pipeline
        at = Position(kv.at.batch, block.query_head(kv, member), q_block * block.c.tile_q)
        stage = lax.rem(step, jnp.int32(q.stages))
        plgpu.barrier_wait(q.full.at[stage])
        tile = ScoreTile(kv, 0, stage, 0, at.token, masked)
        if self.wg == DV:
            self._add_to_dv(tile, step)
        else:
            self._add_to_dk(tile, at)
        # The stage is empty when both have waited for their products with it.
        engine.wgmma_wait(0)
        engine.barrier_arrive(q.empty.at[stage])
        return step + 1

    def _add_to_dv(self, tile: ScoreTile, step: jax.Array) -> None:
        """Starts dv += P dO, once the weights P are handed over."""
        block, smem, dtype = self.block, self.block.smem, self.block.p.dtype
        s = self._product("k", smem["q"].at[tile.stage])
        weights, slope = block.weights(tile, s, self.wg)
        pl.when(step > 0)(lambda: plgpu.barrier_wait(self.read))  # the last step's weights have been read
        smem["weights"][opaque_zero()] = (weights if slope is None else weights * slope).astype(dtype)
        plgpu.commit_smem()
        engine.barrier_arrive(self.written)
        engine.wgmma(self.sum_acc, weights.astype(dtype), smem["do"].at[tile.stage])

    def _add_to_dk(self, tile: ScoreTile, at: Position) -> None:
        """Starts dk += dS q. dP is computed while the other warpgroup computes the weights."""
        block, smem, dtype = self.block, self.block.smem, self.block.p.dtype
        dp = self._product("v", smem["do"].at[tile.stage]) - block.delta(tile)
        plgpu.barrier_wait(self.written)
        weights = load_tile(smem["weights"].at[opaque_zero()]).astype(jnp.float32)
        engine.barrier_arrive(self.read)
        ds = (weights * dp).astype(dtype)
        engine.wgmma(self.sum_acc, ds, smem["q"].at[tile.stage])
        if block.refs.dbias is not None:
            self._store_dbias(tile, at, ds)

    def _store_dbias(self, tile: ScoreTile, at: Position, ds: jax.Array) -> None:
        """Starts the copy of dS, the gradient of the bias, to global memory, once the last one has left shared memory."""
        block, staging = self.block, self.block.smem["ds"]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        staging[opaque_zero(), 0] = ds
        plgpu.commit_smem()
        keys, rows = pl.ds(tile.kv.at.token, ROWS), pl.ds(tile.q_row, ROWS)
        plgpu.copy_smem_to_gmem(staging.at[0, 0], block.refs.dbias.at[at.batch * block.p.q_heads + at.head, keys, rows])

    def _product(self, name: str, rows: Any) -> jax.Array:
        """Keys or values times rows^T, when it is done."""
        self.s_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        first = opaque_zero()
        part = whole(rows.shape[1])
        for panel in range(part.panels):
            columns = rows.at[:, pl.ds(panel * part.panel, part.panel)]
            engine.wgmma(self.s_acc, self.block.smem[name].at[first + panel], engine.transpose_ref(columns))
        return engine.accumulated(self.s_acc, 0)
