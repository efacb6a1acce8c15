"""The consumers of the dk/dv kernel with `dq_step="next"`: dq and dk of a q block are computed a step later.

Two warpgroups. At head dim 128 each has 64 keys and the gradients of these, as in `backward_narrow.py`. The tensor cores get,
in this order,

    S = k q^T of this q block, dq = dS^T k and dk += dS q of the last one, dP = v dO^T - delta and dv += P dO of this one,

so that they work on dq and dk while a warpgroup computes the weights P, and on dv while it computes dS = P dP. The warpgroups
need each other's dS for dq alone, and by then each has started its next scores.

At head dim 64 the gradients of 128 keys take the same registers. Each warpgroup has two *parts* of 64 keys, one after the
other: the last q block above is then the part before, and dq, once a q block, is a product with the own 128 keys, so that the
warpgroups never meet.

With deterministic=True, a warpgroup adds to a tile of dq when it is its turn (`ThreadBlock.turns`): it looks at the end of a
step, waits at the beginning of the next one if it has to, and gives the turn on when dS is written, long after dq has left.
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
from mgpu_ops.attention.mask import TurnOrder
from mgpu_ops.attention.problem import ROWS, BackwardProblem
from mgpu_ops.core import engine
from mgpu_ops.core.tile_scheduler import Int


class _Last(NamedTuple):
    """The q block of the last step, of which dq and dk (of the last part of keys) are still to be computed from dS."""

    stage: jax.Array
    head: Int
    q_block: Int
    ds: jax.Array | None  # of the last part's keys, in registers, or None: in shared memory
    seen: jax.Array | None = None  # whose turn it was a moment ago at its dq


def parts(p: BackwardProblem) -> int:
    """How many times 64 keys each warpgroup has."""
    return 128 // p.head_dim


def accumulators(p: BackwardProblem) -> tuple[tuple[int, int], ...]:
    """Scores, gradient of the weights, dk and dv of each part, 64 columns of dq."""
    return (SQUARE, SQUARE, *[(ROWS, p.head_dim)] * (2 * parts(p)), SQUARE)


def consume(block: ThreadBlock, scratch: Scratch) -> None:
    """What the consumers do."""
    (together,) = scratch.barriers["between"]
    count = parts(block.p)

    def run(s_acc: Any, dp_acc: Any, *accs: Any) -> None:
        dk_accs, dv_accs, dq_acc = accs[:count], accs[count : 2 * count], accs[2 * count]
        _Consumer(block, lax.axis_index("wg"), together, s_acc, dp_acc, dk_accs, dv_accs, dq_acc).run()

    scratch.accumulators.scope(run)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: its parts of 64 keys of each kv block."""

    block: ThreadBlock
    number: jax.Array  # of the warpgroup: 0 or 1
    # A barrier for both consumers, of which every other phase says that both have computed dq, so that the place of dS is free,
    # and the next one that both have written dS. Not used where a warpgroup computes dq of its own keys.
    together: Any
    s_acc: Any
    dp_acc: Any
    dk_accs: tuple[Any, ...]  # of each part
    dv_accs: tuple[Any, ...]
    dq_acc: Any

    def run(self) -> None:
        self.block.mask.write_numbers()
        self.block.for_each_kv_block(self._kv_block)

    def _kv_block(self, kv: KvBlock, done: jax.Array) -> jax.Array:
        """Adds up dk and dv over all q blocks; the producer meanwhile loads what comes next."""
        block, order = self.block, kv.q_blocks
        members, masks = block.group, block.p.masks(block.c.tile_kv)
        self._arrive()  # the place of dS is free
        # 1. The first q block, but for its dq and dk.
        last = self._first(kv, masks, done)
        # 2. The others, each with dq and dk of the one before: first those with a mask.
        if isinstance(order, TurnOrder):
            last = self._visits(kv, False, 1, order.unmasked * members, last)
            if masks:
                last = self._visits(kv, True, jnp.maximum(order.unmasked * members, 1), order.count * members, last)
        else:
            if masks or members > 1:
                last = self._loop(kv, masks, 1, last)
            last = self._loop(kv, False, 0, last)
        # 3. dq and dk of the last one.
        self._await_turn(kv, last)
        self._wait_for_other()
        self._start_dq(last)
        self._start_dk(last.stage, self.parts[-1], last.ds)
        self._add_dq(kv, last)  # while dk is computed
        engine.wgmma_wait(0)
        if block.refs.turns is not None:
            engine.warpgroup_barrier()
            self._give_turn(kv, last)
        engine.barrier_arrive(block.q_pipeline.empty.at[last.stage])
        # 4. The way out.
        gradients = [
            (dk_acc[...] * block.x.inputs.options[0], dv_acc[...]) for dk_acc, dv_acc in zip(self.dk_accs, self.dv_accs)
        ]
        self._wait_for_other()  # both are done with keys and values: the gradients leave from there
        for part, (dk, dv) in enumerate(gradients):
            own = self._key_part(part) * ROWS
            at = kv.at._replace(token=kv.at.token + own)
            for name, ref, values in (("k", block.dk, dk), ("v", block.dv, dv)):
                block.store(ref, at, block.smem[name].at[:, pl.ds(own, ROWS), :], values)
        for acc in (*self.dk_accs, *self.dv_accs):
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        block.release_keys()
        return done + (order.count if isinstance(order, TurnOrder) else order.masked + order.unmasked) * members

    # --- Steps

    def _first(self, kv: KvBlock, masks: bool, done: jax.Array) -> _Last:
        """The first q block of the first head, but for its dq and dk."""
        order = kv.q_blocks
        q_block = order.block(0) if isinstance(order, TurnOrder) else order.masked_block(0)
        tile, head = self._wait(kv, 0, q_block, lax.rem(done, jnp.int32(self.block.q_pipeline.stages)), masks)
        self._start_scores(tile)
        weights, _ = self.block.weights(tile, engine.accumulated(self.s_acc, 0), self.wg)
        self._start_dp(tile)
        ds = self._start_dv(tile, 0, weights)
        self._hand_over(0, ds)
        ds = self._other_parts(tile, ds)
        this = self._seen(kv, _Last(tile.stage, head, q_block, ds if self.held else None))
        engine.wgmma_wait(0)  # nobody needs it, but ptxas serializes where a product runs on into a loop
        return this

    def _loop(self, kv: KvBlock, masked: bool, first: int, last: _Last) -> _Last:
        """The q blocks with a mask of all heads of the group but for the `first` of the first head; or those without."""
        order, members = kv.q_blocks, self.block.group
        count, number = (order.masked, order.masked_block) if first else (order.unmasked, order.unmasked_block)

        def head(member: Int, last: _Last) -> _Last:
            step = functools.partial(self._step, kv, masked, member, number)
            start: Int = first if members == 1 else jnp.where(member == 0, first, 0)
            found: _Last = lax.fori_loop(start, count, step, last)
            return found

        # One loop in another: to divide a step's number by their count would take as long as some products.
        return head(0, last) if members == 1 else lax.fori_loop(0, members, head, last)

    def _visits(self, kv: KvBlock, masked: bool, start: Int, end: Int, last: _Last) -> _Last:
        """The visits [start, end) of a `TurnOrder`."""

        def visit(i: jax.Array, last: _Last) -> _Last:
            member, q_block = kv.q_blocks.visit(i, self.block.group)
            return self._step(kv, masked, member, lambda _: q_block, i, last)

        found: _Last = lax.fori_loop(start, end, visit, last)
        return found

    def _step(self, kv: KvBlock, masked: bool, member: Int, number: Callable[[Int], Int], i: jax.Array, last: _Last) -> _Last:
        """The i-th q block of a head, but for its dq and dk, and those of the last one."""
        q_block, stage = number(i), last.stage + 1
        tile, head = self._wait(kv, member, q_block, jnp.where(stage == self.block.q_pipeline.stages, 0, stage), masked)
        # 1. The scores of this q block; then, when both have written dS, dq and dk of the last one.
        self._await_turn(kv, last)
        self._start_scores(tile)
        self._wait_for_other()
        self._start_dq(last)
        self._start_dk(last.stage, self.parts[-1], last.ds)
        # 2. Scores become weights, while the tensor cores compute dq and dk. The last q block's dq leaves: where dS takes
        # registers, it has to be first, and dk's product with them done before dP takes others.
        s = engine.accumulated(self.s_acc, 2)
        if self.held:
            self._add_dq(kv, last)
        weights, _ = self.block.weights(tile, s, self.wg)
        if self.held:
            self._finish_dk(weights)
        else:
            self._add_dq(kv, last)
        # 3. dP and dv; while dv is computed, dP becomes dS.
        self._start_dp(tile)
        ds = self._start_dv(tile, 0, weights)
        self._hand_over(0, ds)
        self._give_turn(kv, last)
        if len(self.parts) > 1:
            engine.barrier_arrive(self.block.q_pipeline.empty.at[last.stage], 1)
            ds = self._other_parts(tile, ds)
        this = self._seen(kv, _Last(tile.stage, head, q_block, ds if self.held else None))
        # 4. dv is done, and with it all products with the last q block.
        engine.wgmma_wait(0)
        if len(self.parts) == 1:
            engine.barrier_arrive(self.block.q_pipeline.empty.at[last.stage])
        return this

    def _other_parts(self, tile: ScoreTile, ds: jax.Array) -> jax.Array:
        """The parts of the keys but for the first, whose dS is given, each with dk of the one before. Returns the last dS."""
        for part in self.parts[1:]:
            tile = dataclasses.replace(tile, key_part=self._key_part(part))
            self._start_scores(tile)
            self._start_dk(tile.stage, part - 1, ds if self.held else None)
            weights, _ = self.block.weights(tile, engine.accumulated(self.s_acc, 1), self.wg)
            if self.held:
                self._finish_dk(weights)
            self._start_dp(tile)
            ds = self._start_dv(tile, part, weights)
            self._hand_over(part, ds)
        return ds

    # --- Their parts

    @property
    def parts(self) -> range:
        """Of the keys, 64 each."""
        return range(len(self.dk_accs))

    @property
    def alone(self) -> bool:
        """Whether each warpgroup computes dq of its own keys."""
        return len(self.parts) > 1

    @property
    def held(self) -> bool:
        """Whether a step leaves dS in registers to the next one."""
        return self.block.c.dk_operand == "registers"

    @property
    def wg(self) -> jax.Array:
        """This warpgroup: see `layouts.opaque`."""
        return opaque(self.number)

    def _key_part(self, part: int) -> Int:
        """Which 64 keys of the kv block are this warpgroup's part."""
        return self.wg * len(self.parts) + part if self.alone else self.wg

    def _arrive(self) -> None:
        """Says to the other warpgroup that this one is so far."""
        if not self.alone:
            engine.barrier_arrive(self.together)

    def _wait_for_other(self) -> None:
        if not self.alone:
            plgpu.barrier_wait(self.together)

    def _wait(self, kv: KvBlock, member: Int, q_block: Int, stage: jax.Array, masked: bool) -> tuple[ScoreTile, Int]:
        """Waits for a q block of a head of the group: the tile of its scores, and the head's number."""
        plgpu.barrier_wait(self.block.q_pipeline.full.at[stage])
        row = q_block * self.block.c.tile_q
        return ScoreTile(kv, self._key_part(0), stage, 0, row, masked), kv.at.head * self.block.group + member

    def _start_scores(self, tile: ScoreTile) -> None:
        """Starts S = k q^T."""
        self.s_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        self._start_product(self.s_acc, "k", tile, self._rows("q", tile.stage))

    def _start_dp(self, tile: ScoreTile) -> None:
        """Starts dP = v dO^T - delta."""
        self.dp_acc[...] = self.block.delta(tile)  # with its sign changed
        self._start_product(self.dp_acc, "v", tile, self._rows("do", tile.stage))

    def _start_product(self, acc: Any, name: str, tile: ScoreTile, rows: Any) -> None:
        """Starts acc += own keys or values times rows^T, in as many products as there are panels."""
        own = pl.ds(tile.key_part * ROWS if self.alone else self.wg * ROWS, ROWS)
        for panel in self.block.panels:
            columns = rows.at[:, pl.ds(panel * PANEL, PANEL)]
            engine.wgmma(acc, self.block.smem[name].at[panel, own, :], engine.transpose_ref(columns))

    def _start_dv(self, tile: ScoreTile, part: int, weights: jax.Array) -> jax.Array:
        """Starts dv += P dO. Returns dS, once dP is done; dv's product may go on."""
        dtype = self.block.p.dtype
        engine.wgmma(self.dv_accs[part], weights.astype(dtype), self._rows("do", tile.stage))
        return (weights * engine.accumulated(self.dp_acc, 1)).astype(dtype)

    def _hand_over(self, part: int, ds: jax.Array) -> None:
        """Writes dS of a part of the own keys, and says so."""
        self._wait_for_other()
        if self.alone and part == 0:
            engine.warpgroup_barrier()  # all warps' dq is done, which read dS of the last q block
        engine.write_tile(ds, self._own_ds(part))
        plgpu.commit_smem()  # wgmma sees what was written
        self._arrive()

    def _start_dq(self, last: _Last) -> None:
        """Starts dq = dS^T k: 64 columns of it, or that of the own keys."""
        smem = self.block.smem
        self.dq_acc[...] = jnp.zeros(SQUARE, jnp.float32)
        ds, keys = smem["ds"].at[opaque_zero()], smem["k"].at[0 if self.alone else self.wg]
        if self.alone:
            own = pl.ds(self._key_part(0) * ROWS, len(self.parts) * ROWS)
            ds, keys = ds.at[own], keys.at[own]
        engine.wgmma(self.dq_acc, engine.transpose_ref(ds), keys)

    def _start_dk(self, stage: jax.Array, part: int, ds: jax.Array | None) -> None:
        """Starts dk += dS q of a part of the own keys."""
        engine.wgmma(self.dk_accs[part], self._own_ds(part) if ds is None else ds, self._rows("q", stage))

    def _finish_dk(self, weights: jax.Array) -> None:
        """Waits for dk once the weights are computed."""
        engine.compute_here(weights.astype(self.block.p.dtype), self.block.smem["here"].at[self.wg])
        engine.wgmma_wait(0)  # nobody needs it, but ptxas, for the registers

    def _add_dq(self, kv: KvBlock, last: _Last) -> None:
        """Waits for dq, and starts adding it to global memory, when it is this kv block's turn. dk's product may go on."""
        block = self.block
        dq = engine.accumulated(self.dq_acc, 1)
        self._arrive()
        where = (
            (block.dq_part(kv, self.wg), self._tile(kv, last), 0)
            if self.alone
            else (block.dq_part(kv), self._tile(kv, last), self.wg)
        )
        first = block.is_first(kv, last.q_block)
        if first is not None and self.alone:
            first = jnp.where(self.wg == 0, first, 0)
        engine.add_fragments(dq, block.refs.dq.at[where], first)

    # --- Turns

    def _seen(self, kv: KvBlock, last: _Last) -> _Last:
        """Looks up whose turn it is at the last q block's dq. The load takes a while, beside what the caller does then."""
        if self.block.refs.turns is None:
            return last
        return last._replace(seen=engine.seen_count(self._turns(kv, last)))

    def _await_turn(self, kv: KvBlock, last: _Last) -> None:
        """Waits until it is this kv block's turn to add to the last q block's dq."""
        if last.seen is not None:
            engine.await_count(self._turns(kv, last), last.seen, self._own_turn(kv)[0])

    def _give_turn(self, kv: KvBlock, last: _Last) -> None:
        """The last q block's dq is added to: the next kv block's turn."""
        if self.block.refs.turns is not None:
            engine.set_count(self._turns(kv, last), self._own_turn(kv)[1])

    def _own_turn(self, kv: KvBlock) -> tuple[Int, Int]:
        """This warpgroup's number among those that add to one tile of dq, and the next one's."""
        own, following = self.block.turns(kv)
        return (2 * own + self.wg, jnp.where(self.wg == 0, 2 * own + 1, 2 * following)) if self.alone else (own, following)

    def _turns(self, kv: KvBlock, last: _Last) -> Any:
        """Whose turn it is at the last q block's dq, in global memory."""
        tile = opaque(self._tile(kv, last))
        return self.block.refs.turns.at[pl.ds(tile if self.alone else 2 * tile + self.wg, 1)]

    def _tile(self, kv: KvBlock, last: _Last) -> Int:
        """Which tile of 64 rows of a head dq of the last q block is."""
        return (kv.at.batch * (self.block.refs.lse.shape[2] // ROWS) + last.q_block) * self.block.p.q_heads + last.head

    def _own_ds(self, part: int) -> Any:
        return self.block.smem["ds"].at[opaque_zero(), pl.ds(self._key_part(part) * ROWS, ROWS), :]

    def _rows(self, name: str, stage: jax.Array) -> Any:
        return self.block.smem[name].at[stage]
