"""The consumers of the dk/dv kernel for head dims up to 128: two warpgroups, each with 64 keys and the gradients of these.

For each q block a consumer computes S = k q^T and dP = v dO^T of its keys, the weights P and dS = P (dP - delta); P and dS are
the operands, in registers, of dv += P dO and dk += dS q. In mode "fused", dq = dS^T k needs dS of all keys: the consumers
write theirs to shared memory, wait for each other, and compute one half of dq each: columns in whole panels, or rows.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import SQUARE, KvBlock, ScoreTile, ThreadBlock, opaque_zero
from mgpu_ops.attention.heads import PANEL, whole
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import opaque
from mgpu_ops.attention.operands import Position
from mgpu_ops.attention.problem import ROWS, BackwardProblem
from mgpu_ops.core import engine
from mgpu_ops.core.tile_scheduler import Int


def shares(head_dim: int) -> tuple[int, int] | None:
    """How many columns of dq each warpgroup computes, where head_dim has narrow panels; None: a quarter of its tile each."""
    part = whole(head_dim)
    first = -(-part.panels // 2) * part.panel
    return None if part.panel == PANEL else (first, head_dim - first)


def accumulators(p: BackwardProblem, fused: bool) -> tuple[tuple[int, int], ...]:
    """Scores, gradient of the weights, dk, dv, and a quarter of dq's tile or the `shares` of both warpgroups."""
    own = shares(p.head_dim)
    dq = [SQUARE] if own is None else [(ROWS, columns) for columns in own]
    return (SQUARE, SQUARE, (ROWS, p.head_dim), (ROWS, p.head_dim), *(dq * fused))


def consume(block: ThreadBlock, scratch: Scratch) -> None:
    """What the consumers do."""
    (together,) = scratch.barriers["between"]
    all_the_time = range(4) if _by_share(block) else None
    scratch.accumulators.scope(lambda *accs: _Consumer(block, together, scratch.accumulators, *accs).run(), all_the_time)


def _by_share(block: ThreadBlock) -> bool:
    return block.c.mode == "fused" and shares(block.p.head_dim) is not None


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: 64 keys of each kv block."""

    block: ThreadBlock
    together: Any  # a barrier for both consumers
    accumulators: Any  # all of them
    s_acc: Any
    dp_acc: Any
    dk_acc: Any
    dv_acc: Any
    dq_acc: Any = None  # in mode "fused"

    @property
    def parts(self) -> range:
        """A q block is computed in parts of 64 rows."""
        return range(self.block.c.tile_q // ROWS)

    def run(self) -> None:
        self.block.mask.write_numbers()
        self.block.for_each_kv_block(self._kv_block)

    def _kv_block(self, kv: KvBlock, done: jax.Array) -> jax.Array:
        """Adds up dk and dv over all q blocks; the producer meanwhile loads what comes next."""
        block = self.block
        done = block.for_each_q_block(kv, self._q_block, done)
        dk, dv = self.dk_acc[...] * block.x.inputs.options[0], self.dv_acc[...]
        self._meet()  # both are done with keys and values: the gradients leave from there
        own = _warpgroup() * ROWS
        at = kv.at._replace(token=kv.at.token + own)
        for name, ref, values in (("k", block.dk, dk), ("v", block.dv, dv)):
            place = block.smem[name]
            place = place.at[:, pl.ds(own, ROWS), :] if len(place.shape) == 3 else place.at[pl.ds(own, ROWS), :]
            block.store(ref, at, place, values)
        for acc in (self.dk_acc, self.dv_acc):
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        block.release_keys(kv)
        return done

    def _q_block(self, kv: KvBlock, member: jax.Array, q_block: jax.Array, step: jax.Array, masked: bool) -> jax.Array:
        block, q = self.block, self.block.q_pipeline
        at = Position(kv.at.batch, block.query_head(kv, member), q_block * block.c.tile_q)
        stage, buffer, wg = lax.rem(step, jnp.int32(q.stages)), lax.rem(step, jnp.int32(2)), _warpgroup()
        own = pl.ds(wg * ROWS, ROWS)
        # 1. Wait for the q block. Add to dk and dv.
        plgpu.barrier_wait(q.full.at[stage])
        for part in self.parts:
            ds = self._add_part(ScoreTile(kv, wg, stage, part, at.token, masked), wg)
            if "ds" in block.smem:
                block.smem["ds"][buffer, part, own, :] = ds
                plgpu.commit_smem()  # TMA and wgmma see what was written
            engine.wgmma(self.dk_acc, ds, self._rows("q", stage, part))
        if block.refs.dbias is not None:
            self._store_dbias(kv, at, buffer, wg)
        # 2. dq, or else a wait for the products with this stage. The stage is then empty.
        if _by_share(block):
            self._add_shares_of_dq(kv, at, buffer)
            engine.wgmma_wait(0)
            engine.barrier_arrive(q.empty.at[stage])
            return step + 1
        half: tuple[Int, Int] = (0, wg) if len(self.parts) == 1 else (wg, 0)  # of dq: part of the rows, panel
        dq = self._dq(buffer, *half)
        engine.barrier_arrive(q.empty.at[stage])
        # 3. The copies of dq and dbias out of shared memory that were started earlier have read it; dq leaves.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        if dq is not None:
            block.smem["dq"][wg] = dq
            plgpu.commit_smem()
            at = at._replace(token=at.token + half[0] * ROWS)
            block.add_dq(kv, block.smem["dq"].at[wg], at, half[1] * PANEL)
        return step + 1

    def _add_part(self, tile: ScoreTile, wg: jax.Array) -> jax.Array:
        """Starts dv += P dO for 64 rows. Returns dS, in registers."""
        block, dtype = self.block, self.block.p.dtype
        # Scores and dP are started together: while dP is computed, scores become weights.
        self._start_product(self.s_acc, "k", self._rows("q", tile.stage, tile.part))
        self._start_product(self.dp_acc, "v", self._rows("do", tile.stage, tile.part))
        s = engine.accumulated(self.s_acc, whole(block.p.head_dim).panels)
        weights, slope = block.weights(tile, s, wg)
        engine.wgmma(self.dv_acc, weights.astype(dtype), self._rows("do", tile.stage, tile.part))
        # dv's product may go on.
        ds = weights * (engine.accumulated(self.dp_acc, 1) - block.delta(tile))
        return (ds if slope is None else ds * slope).astype(dtype)

    def _start_product(self, acc: Any, name: str, rows: Any) -> None:
        """Starts acc = own keys or values times rows^T, in as many products as there are panels."""
        own = pl.ds(_warpgroup() * ROWS, ROWS)
        acc[...] = jnp.zeros(SQUARE, jnp.float32)
        place, part = self.block.smem[name], whole(rows.shape[1])
        for panel in range(part.panels):
            columns = pl.ds(panel * part.panel, part.panel)
            mine = place.at[panel, own, :] if len(place.shape) == 3 else place.at[own, columns]
            engine.wgmma(acc, mine, engine.transpose_ref(rows.at[:, columns]))

    def _dq(self, buffer: jax.Array, part: Int, panel: Int) -> jax.Array | None:
        """This warpgroup's half of dq = dS^T k, of 64 rows by 64 columns; None where another kernel computes it.

        All products are then done. Halves are columns or, where head_dim is one panel, rows.
        """
        if self.dq_acc is None:
            engine.wgmma_wait(0)
            return None
        # Both have written dS. There are two buffers for it, so that the next step's does not wait until both have read this.
        self._meet()
        self.dq_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        ds = self.block.smem["ds"].at[buffer, part]
        engine.wgmma(self.dq_acc, engine.transpose_ref(ds), self.block.smem["k"].at[panel])
        return engine.accumulated(self.dq_acc, 0)

    def _add_shares_of_dq(self, kv: KvBlock, at: Position, buffer: jax.Array) -> None:
        """dq = dS^T k of the q block's rows, some of the columns by each warpgroup, starts its way to global memory."""
        self._meet()  # as in `_dq`
        for wg in range(2):
            # In a scope of its own: an accumulator of each would live all the time, and spill.
            share = functools.partial(self._add_share_of_dq, kv, at, buffer, wg)
            pl.when(_warpgroup() == wg)(functools.partial(self.accumulators.scope, share, (4 + wg,)))

    def _add_share_of_dq(self, kv: KvBlock, at: Position, buffer: jax.Array, wg: int, acc: Any) -> None:
        block, smem, columns = self.block, self.block.smem, acc.shape[1]
        column = wg * (block.p.head_dim - columns)
        ds = engine.transpose_ref(smem["ds"].at[buffer, 0])
        engine.wgmma(acc, ds, smem["k"].at[:, pl.ds(column, columns)])
        dq = engine.accumulated(acc, 0)
        # The copies of dq and dbias out of shared memory that were started earlier have read it.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        place = smem[f"dq{wg}"].at[opaque_zero()]
        place[...] = dq
        plgpu.commit_smem()
        block.add_dq(kv, place, at, column)

    def _store_dbias(self, kv: KvBlock, at: Position, buffer: jax.Array, wg: jax.Array) -> None:
        """Starts the copies of dS, the gradient of the bias, to global memory."""
        block = self.block
        for part in self.parts:
            head, key, row = at.batch * block.p.q_heads + at.head, kv.at.token + wg * ROWS, at.token + part * ROWS
            place = block.refs.dbias.at[head, pl.ds(key, ROWS), pl.ds(row, ROWS)]
            plgpu.copy_smem_to_gmem(block.smem["ds"].at[buffer, part, pl.ds(wg * ROWS, ROWS), :], place)

    def _rows(self, name: str, stage: jax.Array, part: int) -> Any:
        return self.block.smem[name].at[stage, pl.ds(part * ROWS, ROWS)]

    def _meet(self) -> None:
        """The consumers wait for each other, and see what the other wrote to shared memory before."""
        engine.barrier_arrive(self.together)
        plgpu.barrier_wait(self.together)


def _warpgroup() -> jax.Array:
    """This warpgroup: see `layouts.opaque`."""
    return opaque(lax.axis_index("wg"))
