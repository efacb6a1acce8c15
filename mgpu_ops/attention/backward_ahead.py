"""The consumers of the dk/dv kernel for head dim 128 with `dq_step="next"`: dq and dk of a q block are computed a step later.

Two warpgroups, each with 64 keys and the gradients of these, as in `backward_narrow.py`. The tensor cores get, in this order,

    S = k q^T of this q block, dq = dS^T k and dk += dS q of the last one, dP = v dO^T and dv += P dO of this one,

so that they work on dq and dk while a warpgroup computes the weights P, and on dv while it computes dS = P (dP - delta).
q blocks with a mask come first, one by one; dq and dk of the last of them are left to the others, which overlap.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import SQUARE, KvBlock, ScoreTile, ThreadBlock, opaque_zero
from mgpu_ops.attention.heads import PANEL
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import opaque
from mgpu_ops.attention.operands import Position
from mgpu_ops.attention.problem import ROWS
from mgpu_ops.core import engine
from mgpu_ops.core.tile_scheduler import Int


class _Last(NamedTuple):
    """The q block of the last step, of which dq and dk are still to be computed: dS is in shared memory."""

    stage: jax.Array
    head: Int
    q_block: Int


def consume(block: ThreadBlock, scratch: Scratch) -> None:
    """What the consumers do."""
    (together,) = scratch.barriers["between"]
    scratch.accumulators.scope(lambda *accs: _Consumer(block, lax.axis_index("wg"), together, *accs).run())


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: 64 keys of each kv block."""

    block: ThreadBlock
    number: jax.Array  # of the warpgroup: 0 or 1
    # A barrier for both consumers, of which every other phase says that both have computed dq, so that the place of dS is free,
    # and the next one that both have written dS.
    together: Any
    s_acc: Any
    dp_acc: Any
    dk_acc: Any
    dv_acc: Any
    dq_acc: Any

    def run(self) -> None:
        self.block.mask.write_numbers()
        self.block.for_each_kv_block(self._kv_block)

    def _kv_block(self, kv: KvBlock, done: jax.Array) -> jax.Array:
        """Adds up dk and dv over all q blocks; the producer meanwhile loads what comes next."""
        block, order = self.block, kv.q_blocks
        members, masks = block.group, block.p.masks(block.c.tile_kv)
        engine.barrier_arrive(self.together)  # the place of dS is free
        # 1. q blocks with a mask, one by one, and the last of them but for its dq and dk.
        last_masked = order.masked * members - 1
        if masks or members > 1:
            done = lax.fori_loop(0, last_masked, functools.partial(self._alone, kv, masks), done)
        last = self._first_half(kv, masks, last_masked, done)
        # 2. The others overlap, each with the one before.
        last = lax.fori_loop(0, order.unmasked * members, functools.partial(self._overlapped, kv), last)
        self._second_half(kv, last)
        # 3. The way out.
        dk, dv = self.dk_acc[...] * block.x.inputs.options[0], self.dv_acc[...]
        plgpu.barrier_wait(self.together)  # both are done with keys and values: the gradients leave from there
        own = self.wg * ROWS
        at = kv.at._replace(token=kv.at.token + own)
        for name, ref, values in (("k", block.dk, dk), ("v", block.dv, dv)):
            block.store(ref, at, block.smem[name].at[:, pl.ds(own, ROWS), :], values)
        for acc in (self.dk_acc, self.dv_acc):
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        block.release_keys()
        return done + order.unmasked * members + 1

    # --- Steps of the loops over q blocks

    def _alone(self, kv: KvBlock, masks: bool, i: jax.Array, step: jax.Array) -> jax.Array:
        """A q block by itself."""
        self._second_half(kv, self._first_half(kv, masks, i, step))
        return step + 1

    def _first_half(self, kv: KvBlock, masks: bool, i: Int, step: jax.Array) -> _Last:
        """The i-th q block with a mask, but for its dq and dk."""
        at, q_block = self._rows_of(kv, i, kv.q_blocks.masked, kv.q_blocks.masked_block)
        tile = self._wait(kv, at, lax.rem(step, jnp.int32(self.block.q_pipeline.stages)), masks)
        # Scores and dP are started together: while dP is computed, scores become weights.
        self._start_product(self.s_acc, "k", self._rows("q", tile.stage))
        self._start_product(self.dp_acc, "v", self._rows("do", tile.stage))
        s = engine.accumulated(self.s_acc, len(self.block.panels))
        weights, _ = self.block.weights(tile, s, self.wg)
        ds = self._start_dv(tile, weights)
        self._hand_over(ds)
        engine.wgmma_wait(0)  # nobody needs it, but ptxas serializes where a product runs on into a loop
        plgpu.barrier_wait(self.together)
        return _Last(tile.stage, at.head, q_block)

    def _second_half(self, kv: KvBlock, last: _Last) -> None:
        """Its dq and dk."""
        self._start_dq_and_dk(last)
        self._add_dq(kv, last)  # while dk is computed
        engine.wgmma_wait(0)
        engine.barrier_arrive(self.block.q_pipeline.empty.at[last.stage])

    def _overlapped(self, kv: KvBlock, i: jax.Array, last: _Last) -> _Last:
        """The i-th q block without a mask, but for its dq and dk, and those of the last one."""
        at, q_block = self._rows_of(kv, i, kv.q_blocks.unmasked, kv.q_blocks.unmasked_block)
        stage = last.stage + 1
        tile = self._wait(kv, at, jnp.where(stage == self.block.q_pipeline.stages, 0, stage), False)
        # 1. The scores of this q block; then dq and dk of the last one.
        self._start_product(self.s_acc, "k", self._rows("q", tile.stage))
        self._start_dq_and_dk(last)
        # 2. Scores become weights, while the tensor cores compute dq and dk.
        weights, _ = self.block.weights(tile, engine.accumulated(self.s_acc, 2), self.wg)
        # 3. The last q block's dq leaves.
        self._add_dq(kv, last)
        # 4. dP and dv; while dv is computed, dP becomes dS.
        self._start_product(self.dp_acc, "v", self._rows("do", tile.stage))
        ds = self._start_dv(tile, weights)
        self._hand_over(ds)
        # 5. dv is done, and with it all products with the last q block.
        engine.wgmma_wait(0)
        engine.barrier_arrive(self.block.q_pipeline.empty.at[last.stage])
        plgpu.barrier_wait(self.together)
        return _Last(tile.stage, at.head, q_block)

    # --- Their parts

    @property
    def wg(self) -> jax.Array:
        """This warpgroup: see `layouts.opaque`."""
        return opaque(self.number)

    def _rows_of(self, kv: KvBlock, i: Int, count: Int, q_block: Callable[[Int], Int]) -> tuple[Position, Int]:
        """Where the i-th q block begins of `count` in each head of the group; and its number."""
        block = self.block
        member, i = (0, i) if block.group == 1 else (lax.div(i, jnp.int32(count)), lax.rem(i, jnp.int32(count)))
        number = q_block(i)
        return Position(kv.at.batch, kv.at.head * block.group + member, number * block.c.tile_q), number

    def _wait(self, kv: KvBlock, at: Position, stage: jax.Array, masked: bool) -> ScoreTile:
        """Waits for a q block: the tile of its scores."""
        plgpu.barrier_wait(self.block.q_pipeline.full.at[stage])
        return ScoreTile(kv, self.wg, stage, 0, at.token, masked)

    def _start_product(self, acc: Any, name: str, rows: Any) -> None:
        """Starts acc = own keys or values times rows^T, in as many products as there are panels."""
        own = pl.ds(self.wg * ROWS, ROWS)
        acc[...] = jnp.zeros(SQUARE, jnp.float32)
        for panel in self.block.panels:
            columns = rows.at[:, pl.ds(panel * PANEL, PANEL)]
            engine.wgmma(acc, self.block.smem[name].at[panel, own, :], engine.transpose_ref(columns))

    def _start_dv(self, tile: ScoreTile, weights: jax.Array) -> jax.Array:
        """Starts dv += P dO. Returns dS, once dP is done; dv's product may go on."""
        dtype = self.block.p.dtype
        engine.wgmma(self.dv_acc, weights.astype(dtype), self._rows("do", tile.stage))
        return (weights * (engine.accumulated(self.dp_acc, 1) - self.block.delta(tile))).astype(dtype)

    def _hand_over(self, ds: jax.Array) -> None:
        """Writes dS of the own keys, and says so."""
        plgpu.barrier_wait(self.together)
        engine.write_tile(ds, self._own_ds())
        plgpu.commit_smem()  # wgmma sees what was written
        engine.barrier_arrive(self.together)

    def _start_dq_and_dk(self, last: _Last) -> None:
        """Starts dq = dS^T k, of which each warpgroup computes 64 columns, and dk += dS q."""
        smem = self.block.smem
        self.dq_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        engine.wgmma(self.dq_acc, engine.transpose_ref(smem["ds"].at[opaque_zero()]), smem["k"].at[self.wg])
        # dS of the own keys as well from shared memory: in registers, it would spill.
        engine.wgmma(self.dk_acc, self._own_ds(), self._rows("q", last.stage))

    def _add_dq(self, kv: KvBlock, last: _Last) -> None:
        """Waits for dq, and starts adding it to global memory. dk's product may go on."""
        block, wg = self.block, self.wg
        dq = engine.accumulated(self.dq_acc, 1)
        engine.barrier_arrive(self.together)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the one before has left
        engine.write_tile(dq, block.smem["dq"].at[wg])
        plgpu.commit_smem()
        at = Position(kv.at.batch, last.head, last.q_block * block.c.tile_q)  # a product: Mosaic sees what divides it
        block.add_dq(kv, block.smem["dq"].at[wg], at, wg * PANEL)

    def _own_ds(self) -> Any:
        return self.block.smem["ds"].at[opaque_zero(), pl.ds(self.wg * ROWS, ROWS), :]

    def _rows(self, name: str, stage: jax.Array) -> Any:
        return self.block.smem[name].at[stage]
