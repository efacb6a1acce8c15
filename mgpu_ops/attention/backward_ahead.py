"""The consumers of the dk/dv kernel with `dq_step="next"`: dq and dk of a q block are computed a step later.

Two warpgroups. At head dim 128 each has 64 keys and the gradients of these, as in `backward_narrow.py`. The tensor cores get,
in this order,

    S = k q^T of this q block, dq = dS^T k and dk += dS q of the last one, dP = v dO^T - delta and dv += P dO of this one,

so that they work on dq and dk while a warpgroup computes the weights P, and on dv while it computes dS = P dP. The warpgroups
need each other's dS for dq alone, and by then each has started its next scores.

At head dim 64 a q block has 128 rows, in two *halves* of 64, for products as long as at 128. The scores of both are started
first; while those of the second become weights, dP and dv of the first are computed. Each warpgroup computes dq of one half.

With deterministic=True, the warpgroups add to dq of a q block when a helper says that it is the thread block's turn
(`ThreadBlock.take_turns`), and tell it when they have.
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

from mgpu_ops.attention.backward_block import SQUARE, KvBlock, ScoreTile, ThreadBlock, opaque_zero, skips_padding
from mgpu_ops.attention.heads import PANEL
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import opaque
from mgpu_ops.attention.mask import BlockOrder, TurnOrder, is_one
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.core import engine, fragments
from mgpu_ops.core.tile_scheduler import Int


class _Last(NamedTuple):
    """The q block of the last step, of which dq and dk are still to be computed from dS."""

    stage: jax.Array
    head: Int
    q_block: Int
    ds: jax.Array | None  # of the own keys, in registers, or None: in shared memory


def accumulators(p: BackwardProblem, c: BackwardConfig) -> tuple[tuple[int, int], ...]:
    """Scores of each half of the rows, gradient of the weights of one, dk, dv, a quarter of dq's tile."""
    return (*[SQUARE] * (c.tile_q // ROWS), SQUARE, (ROWS, p.head_dim), (ROWS, p.head_dim), SQUARE)


def consume(block: ThreadBlock, scratch: Scratch) -> None:
    """What the consumers do."""
    (together,) = scratch.barriers["between"]
    halves = block.c.tile_q // ROWS
    scratch.accumulators.scope(
        lambda *accs: _Consumer(block, lax.axis_index("wg"), together, accs[:halves], *accs[halves:]).run()
    )


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: 64 keys of each kv block."""

    block: ThreadBlock
    number: jax.Array  # of the warpgroup: 0 or 1
    # A barrier for both consumers, of which every other phase says that both have computed dq, so that the place of dS is free,
    # and the next one that both have written dS.
    together: Any
    s_accs: tuple[Any, ...]  # of each half of the rows
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
        members, masks = block.members(kv), block.p.masks(block.c.tile_kv)
        engine.barrier_arrive(self.together)  # the place of dS is free

        def visit(_: Int, nothing: None) -> None:
            self._visit(kv, masks, done)

        # Steps 1 to 3, where there is a q block: a branch, in the form of a loop, which takes accumulators.
        if isinstance(order, BlockOrder) and skips_padding(block.p, block.c):
            lax.fori_loop(0, jnp.minimum(order.masked, 1), visit, None)
        else:
            visit(0, None)
        # 4. The way out.
        dk, dv = self.dk_acc[...] * block.x.inputs.options[0], self.dv_acc[...]
        plgpu.barrier_wait(self.together)  # both are done with keys and values: the gradients leave from there
        own = self.wg * ROWS
        at = kv.at._replace(token=kv.at.token + own)
        for name, ref, values in (("k", block.dk, dk), ("v", block.dv, dv)):
            block.store(ref, at, block.place(name, kv.slot).at[:, pl.ds(own, ROWS), :], values)
        for acc in (self.dk_acc, self.dv_acc):
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        block.release_keys(kv)
        return done + (order.count if isinstance(order, TurnOrder) else order.masked + order.unmasked) * members

    def _visit(self, kv: KvBlock, masks: bool, done: jax.Array) -> None:
        """Adds to dk, dv and dq all q blocks, at least one."""
        block, order, members = self.block, kv.q_blocks, self.block.members(kv)
        # 1. The first q block, but for its dq and dk.
        last = self._first(kv, masks, done)
        # 2. The others, each with dq and dk of the one before: first those with a mask.
        if isinstance(order, TurnOrder):
            masked, unmasked = order.masked * members, order.unmasked * members
            if order.front:
                last = self._visits(kv, True, 1, masked, last)
            last = self._visits(kv, False, jnp.maximum(masked, 1), unmasked, last)
            if order.back:
                last = self._visits(kv, True, jnp.maximum(unmasked, 1), order.count * members, last)
        else:
            if masks or not is_one(members):
                last = self._loop(kv, masks, 1, last)
            last = self._loop(kv, False, 0, last)
        # 3. dq and dk of the last one.
        plgpu.barrier_wait(self.together)
        self._start_dq_and_dk(kv, last)
        self._add_dq(kv, last)  # while dk is computed
        engine.wgmma_wait(0)
        engine.barrier_arrive(block.q_pipeline.empty.at[last.stage])

    # --- Steps

    def _first(self, kv: KvBlock, masks: bool, done: jax.Array) -> _Last:
        """The first q block of the first head, but for its dq and dk."""
        order = kv.q_blocks
        q_block = order.block(0) if isinstance(order, TurnOrder) else order.masked_block(0)
        tile, head = self._wait(kv, 0, q_block, lax.rem(done, jnp.int32(self.block.q_pipeline.stages)), masks)
        self._start_scores(tile)
        weights = self._weights(tile, 0, len(self.halves) - 1)
        ds = self._hand_over(tile, weights)
        this = _Last(tile.stage, head, q_block, ds if self.held else None)
        engine.wgmma_wait(0)  # nobody needs it, but ptxas serializes where a product runs on into a loop
        return this

    def _loop(self, kv: KvBlock, masked: bool, first: int, last: _Last) -> _Last:
        """The q blocks with a mask of all heads of the group but for the `first` of the first head; or those without."""
        order, members = kv.q_blocks, self.block.members(kv)
        assert isinstance(order, BlockOrder)
        count, number = (order.masked, order.masked_block) if first else (order.unmasked, order.unmasked_block)

        def head(member: Int, last: _Last) -> _Last:
            step = functools.partial(self._step, kv, masked, member, number)
            start: Int = first if is_one(members) else jnp.where(member == 0, first, 0)
            found: _Last = lax.fori_loop(start, count, step, last)
            return found

        # One loop in another: to divide a step's number by their count would take as long as some products.
        return head(0, last) if is_one(members) else lax.fori_loop(0, members, head, last)

    def _visits(self, kv: KvBlock, masked: bool, start: Int, end: Int, last: _Last) -> _Last:
        """The visits [start, end) of a `TurnOrder`."""

        order = kv.q_blocks
        assert isinstance(order, TurnOrder)

        def visit(i: jax.Array, last: _Last) -> _Last:
            member, q_block = order.visit(i, self.block.members(kv))
            return self._step(kv, masked, member, lambda _: q_block, i, last)

        found: _Last = lax.fori_loop(start, end, visit, last)
        return found

    def _step(self, kv: KvBlock, masked: bool, member: Int, number: Callable[[Int], Int], i: jax.Array, last: _Last) -> _Last:
        """The i-th q block of a head, but for its dq and dk, and those of the last one."""
        q_block, stage = number(i), last.stage + 1
        tile, head = self._wait(kv, member, q_block, jnp.where(stage == self.block.q_pipeline.stages, 0, stage), masked)
        # 1. The scores of this q block; then, when both have written dS, dq and dk of the last one.
        self._start_scores(tile)
        plgpu.barrier_wait(self.together)
        self._start_dq_and_dk(kv, last)
        # 2. Scores become weights, while the tensor cores compute dq and dk. The last q block's dq leaves. Where dS takes
        # registers, it has to be first, and dk's product with them done before dP takes others. Elsewhere ptxas puts it first,
        # and starts dP, which gets its registers, beside the exponentials; but it does not move a turn's barriers.
        dq_first = self.held or self.block.turn is not None
        s = engine.accumulated(self.s_accs[0], 2 * len(self.halves))
        if dq_first:
            self._add_dq(kv, last)
        weights, _ = self.block.weights(tile, s, self.wg)
        if self.held:
            fragments.compute_here(weights.astype(self.block.p.dtype), self.block.smem["here"].at[self.wg])
            engine.wgmma_wait(0)  # nobody needs it, but ptxas, for the registers
        if not dq_first:
            self._add_dq(kv, last)
        # 3. dP and dv; while dv is computed, dP becomes dS.
        ds = self._hand_over(tile, weights)
        this = _Last(tile.stage, head, q_block, ds if self.held else None)
        # 4. dv is done, and with it all products with the last q block.
        engine.wgmma_wait(0)
        engine.barrier_arrive(self.block.q_pipeline.empty.at[last.stage])
        return this

    # --- Their parts

    @property
    def halves(self) -> range:
        """Of the rows of a q block, 64 each: two, or the one that it has."""
        return range(len(self.s_accs))

    @property
    def held(self) -> bool:
        """Whether a step leaves dS in registers to the next one."""
        return self.block.c.dk_operand == "registers"

    @property
    def wg(self) -> jax.Array:
        """This warpgroup: see `layouts.opaque`."""
        return opaque(self.number)

    def _wait(self, kv: KvBlock, member: Int, q_block: Int, stage: jax.Array, masked: bool) -> tuple[ScoreTile, Int]:
        """Waits for a q block of a head of the group: the tile of its scores, and the head's number."""
        plgpu.barrier_wait(self.block.q_pipeline.full.at[stage])
        row = q_block * self.block.c.tile_q
        return ScoreTile(kv, self.wg, stage, 0, row, masked), self.block.query_head(kv, member)

    def _start_scores(self, tile: ScoreTile) -> None:
        """Starts S = k q^T."""
        for half in self.halves:
            self.s_accs[half][...] = jnp.zeros(SQUARE, jnp.float32)
            self._start_product(tile.kv, self.s_accs[half], "k", self._rows("q", tile.stage, half))

    def _weights(self, tile: ScoreTile, half: int, in_flight: int) -> jax.Array:
        """The weights of a half of the rows, when all products but the last `in_flight` are done."""
        weights, _ = self.block.weights(self._half(tile, half), engine.accumulated(self.s_accs[half], in_flight), self.wg)
        return weights

    def _start_dp(self, tile: ScoreTile, half: int) -> None:
        """Starts dP = v dO^T - delta."""
        self.dp_acc[...] = self.block.delta(self._half(tile, half))  # with its sign changed
        self._start_product(tile.kv, self.dp_acc, "v", self._rows("do", tile.stage, half))

    def _start_product(self, kv: KvBlock, acc: Any, name: str, rows: Any) -> None:
        """Starts acc += own keys or values times rows^T, in as many products as there are panels."""
        own = pl.ds(self.wg * ROWS, ROWS)
        for panel in self.block.panels:
            columns = rows.at[:, pl.ds(panel * PANEL, PANEL)]
            engine.wgmma(acc, self.block.place(name, kv.slot).at[panel, own, :], engine.transpose_ref(columns))

    def _start_dv(self, tile: ScoreTile, half: int, weights: jax.Array) -> None:
        """Starts dv += P dO."""
        engine.wgmma(self.dv_acc, weights.astype(self.block.p.dtype), self._rows("do", tile.stage, half))

    def _ds(self, weights: jax.Array) -> jax.Array:
        """dS, once dP is done; dv's product may go on."""
        return (weights * engine.accumulated(self.dp_acc, 1)).astype(self.block.p.dtype)

    def _hand_over(self, tile: ScoreTile, weights: jax.Array) -> jax.Array:
        """Starts dP and dv, given the first half's weights, writes dS of the own keys, and says so. Returns the last dS."""
        ds: Any = None
        for half in self.halves:
            self._start_dp(tile, half)
            self._start_dv(tile, half, weights)
            following = self._weights(tile, half + 1, 2) if half + 1 < len(self.halves) else weights
            if half:
                fragments.write_tile(ds, self._own_ds(half - 1))
            ds, weights = self._ds(weights), following
            if half == 0:
                plgpu.barrier_wait(self.together)
        fragments.write_tile(ds, self._own_ds(self.halves[-1]))
        plgpu.commit_smem()  # wgmma sees what was written
        engine.barrier_arrive(self.together)
        return ds

    def _start_dq_and_dk(self, kv: KvBlock, last: _Last) -> None:
        """Starts dq = dS^T k, of which each warpgroup computes 64 columns or, where these are all, 64 rows; and dk += dS q."""
        smem = self.block.smem
        self.dq_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        rows, panel = (opaque_zero(), self.wg) if len(self.halves) == 1 else (self.wg, 0)
        engine.wgmma(self.dq_acc, engine.transpose_ref(smem["ds"].at[rows]), self.block.place("k", kv.slot).at[panel])
        for half in self.halves:
            engine.wgmma(self.dk_acc, self._own_ds(half) if last.ds is None else last.ds, self._rows("q", last.stage, half))

    def _add_dq(self, kv: KvBlock, last: _Last) -> None:
        """Waits for dq, and starts adding it to global memory, when it is this kv block's turn. dk's product may go on."""
        block = self.block
        dq = engine.accumulated(self.dq_acc, len(self.halves))
        engine.barrier_arrive(self.together)
        # A warpgroup has 64 columns of dq or, where these are all, 64 rows.
        part, whole = block.dq_part(kv), len(self.halves) == 1
        if block.turn is None:
            rows = last.q_block if whole else 2 * last.q_block + self.wg
            tile, first = block.dq_tile(kv, last.head, rows), None
        else:
            plgpu.barrier_wait(block.turn[0].at[last.stage])
            tile, first = block.tile_in_turn(last.stage)
            tile = tile if whole else tile + self.wg * block.p.q_heads
        fragments.add(dq, block.refs.dq.at[part, tile, self.wg if whole else 0], first)
        if block.turn is not None:
            engine.barrier_arrive(block.turn[1].at[last.stage])

    def _half(self, tile: ScoreTile, half: int) -> ScoreTile:
        return dataclasses.replace(tile, part=half)

    def _own_ds(self, half: int) -> Any:
        return self.block.smem["ds"].at[opaque_zero() + half if half else opaque_zero(), pl.ds(self.wg * ROWS, ROWS), :]

    def _rows(self, name: str, stage: jax.Array, half: int) -> Any:
        rows = self.block.smem[name].at[stage]
        return rows if len(self.halves) == 1 else rows.at[pl.ds(half * ROWS, ROWS)]
