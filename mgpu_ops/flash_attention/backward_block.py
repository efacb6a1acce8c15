"""What the backward kernels of attention that keep keys share: a block's tiles, its copies, the weights, and the way out."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops import core
from mgpu_ops.core import schedule
from mgpu_ops.core.ring import Ring
from mgpu_ops.flash_attention.operands import LOG2E, Operands
from mgpu_ops.flash_attention.problem import PANEL, ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.flash_attention.visible import Order, row_steps

TILE_COST = 4  # what a tile of keys takes beside its tiles of rows, in tiles of 64 rows


@functools.cache
def deal(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    """Which block works on which tiles of keys."""
    steps = row_steps(p, c.tile_kv, c.tile_q) * (p.q_heads // p.kv_heads) * (c.tile_q // 64)
    return schedule.deal_heads(steps + TILE_COST, p.batch * p.kv_heads, c.section_waves, blocks)


def _tile(p: BackwardProblem, c: BackwardConfig, number: Any) -> tuple[Any, Any, Any]:
    """Batch entry, head of keys and first key of a tile."""
    tiles = jnp.int32(math.ceil(p.kv_tokens / c.tile_kv))
    head, tile = lax.div(number, tiles), lax.rem(number, tiles)
    return lax.div(head, jnp.int32(p.kv_heads)), lax.rem(head, jnp.int32(p.kv_heads)), tile * c.tile_kv


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The tiles of query rows that a tile of keys meets, of all heads that share it: those to mask, and those not to."""

    order: Order
    group: int

    @property
    def masked(self) -> Any:
        return self.order.masked * self.group

    @property
    def unmasked(self) -> Any:
        return self.order.unmasked * self.group

    def masked_tile(self, i: Any) -> tuple[Any, Any]:
        """Which head of the group, and which tile of rows, the i-th to be masked is."""
        member, i = self._member(i, self.order.masked)
        return member, self.order.masked_tile(i)

    def unmasked_tile(self, i: Any) -> tuple[Any, Any]:
        member, i = self._member(i, self.order.unmasked)
        return member, self.order.unmasked_tile(i)

    def _member(self, i: Any, tiles: Any) -> tuple[Any, Any]:
        return (jnp.int32(0), i) if self.group == 1 else (lax.div(i, tiles), lax.rem(i, tiles))


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of keys: its batch entry, head and first key, and the query rows that meet it."""

    b: Any
    kv_head: Any
    key: Any
    rows: _Rows


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a kernel: its problem and config, its arrays in global memory, and its shared memory."""

    p: BackwardProblem
    c: BackwardConfig
    x: Operands
    table: Any  # of `deal`
    out_grad: Any
    stats: dict[str, Any]  # lse and delta, [batch, q_heads, rows]
    dq: Any  # float32 [1, batch, rows, q_heads, head_dim], or None: another kernel computes it
    dbias: Any  # [batch * q_heads, keys, rows] or None
    dk: Any
    dv: Any
    smem: dict[str, Any]
    rows_ring: Ring
    kv_ring: Ring

    @property
    def panels(self) -> range:
        return range(self.p.head_dim // PANEL)

    @property
    def group(self) -> int:
        return self.p.q_heads // self.p.kv_heads

    @property
    def turns(self) -> schedule.Turns:
        # Opaque: what the copying and the computing side have in common the compiler would compute once, and spill for both.
        return schedule.Turns(self.table, lax.optimization_barrier(lax.axis_index("block")))

    def tile(self, number: Any) -> Tile:
        b, kv_head, key = _tile(self.p, self.c, number)
        order = Order.of(*self.x.row_tiles(b, key, self.c.tile_kv, self.c.tile_q))
        return Tile(b, kv_head, key, _Rows(order, self.group))

    def copying(self) -> None:
        """What the copying warpgroup does: for each tile of keys it and its values, then all rows that see some of them."""
        p, c, x, smem, turns = self.p, self.c, self.x, self.smem, self.turns

        def tile(i: Any, carry: Any) -> Any:
            number, done = carry
            following = turns.number(i + 1)  # read a tile ahead: global memory is far
            t = self.tile(number)

            def keys(slot: Any, filled: Any) -> None:
                del slot
                x.load_keys(x.k, t.b, t.kv_head, t.key, smem["k_smem"], filled)
                x.load_keys(x.v, t.b, t.kv_head, t.key, smem["v_smem"], filled)

            self.kv_ring.fill(i, keys)

            def step(member: Any, row_tile: Any, done: Any) -> Any:
                row, n = row_tile * c.tile_q, t.kv_head * self.group + member

                def copy(slot: Any, filled: Any) -> None:
                    x.load_block(x.q, t.b, n, row, p.q_tokens, smem["q_smem"].at[slot], filled)
                    x.load_block(self.out_grad, t.b, n, row, p.q_tokens, smem["do_smem"].at[slot], filled)
                    for name in ("lse", "delta"):
                        values = self.stats[name].at[t.b, n, core.ds(row, c.tile_q)]
                        core.copy_gmem_to_smem(values, smem[f"{name}_smem"].at[slot], filled)
                    if p.segments:
                        ids = x.inputs.segments[0].at[t.b, core.ds(row, c.tile_q)]
                        core.copy_gmem_to_smem(ids, smem["segments_smem"].at[slot], filled)
                    if p.bias != "none":
                        x.load_bias(t.b, n, t.key, row, smem["bias_smem"].at[slot], filled)

                self.rows_ring.fill(done, copy)
                return done + 1

            done = lax.fori_loop(0, t.rows.masked, lambda j, done: step(*t.rows.masked_tile(j), done), done)
            done = lax.fori_loop(0, t.rows.unmasked, lambda j, done: step(*t.rows.unmasked_tile(j), done), done)
            return following, done

        _, steps = lax.fori_loop(0, turns.count, tile, (turns.number(0), jnp.int32(0)))
        self.rows_ring.drain(steps)
        self.kv_ring.drain(turns.count)

    def number_rows(self) -> None:
        """Writes 0 to 63 to shared memory: from there they take registers only while a tile is masked."""
        numbers = core.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_column())
        self.smem["numbers_smem"][lax.axis_index("wg")] = numbers

    def weights(self, t: Tile, s: Any, slot: Any, part: int, row: Any, wg: Any, own: Any, masked: bool) -> tuple[Any, Any]:
        """2^(scores - lse) of 64 keys, from key `own` of the tile on, and 64 rows from `row` on; 0 where not visible.

        wg: this warpgroup. Second, what to multiply the scores' gradient by for a soft cap, or None.
        """
        p, x, smem = self.p, self.x, self.smem
        columns, slope = core.ds(part * ROWS, ROWS), None
        first_key = t.key + own
        lse = core.load(smem["lse_smem"].at[slot, columns], layout=by_column(), optimized=False)
        if p.soft_cap:
            tanh = x.capped(s)
            s, slope = tanh * (x.inputs.options[1] * LOG2E), 1.0 - tanh * tanh
        else:
            s = s * (x.inputs.options[0] * LOG2E)
        if p.bias != "none":
            tile = smem["bias_smem"].at[slot, core.ds(own, ROWS), columns]
            s = s + core.load(tile, layout=core.Layout.WGMMA, optimized=False).astype(jnp.float32) * LOG2E
        weights = jnp.exp2(s - along_column(lse))
        if p.segments:
            q_ids = core.load(smem["segments_smem"].at[slot, columns], layout=by_column(), optimized=False)
            ids = x.inputs.segments[1].at[t.b, core.ds(first_key, ROWS)]
            kv_ids = core.load(ids, layout=core.Layout.WGMMA.reduce(1), optimized=False)
            same = lax.broadcast_in_dim(kv_ids, SQUARE, (0,)) == along_column(q_ids)
            weights = jnp.where(same, weights, 0.0)
        if masked:
            rows = core.load(smem["numbers_smem"].at[wg], layout=by_column(), optimized=False) + row
            keys = core.broadcasted_iota(jnp.int32, SQUARE, 0, layout=core.Layout.WGMMA) + first_key
            weights = jnp.where(x.tokens(t.b).sees(along_column(rows), keys), weights, 0.0)
        return weights, slope

    def delta(self, slot: Any, part: int) -> Any:
        """delta of 64 rows, along columns."""
        values = self.smem["delta_smem"].at[slot, core.ds(part * ROWS, ROWS)]
        return along_column(core.load(values, layout=by_column(), optimized=False))

    def for_each_tile(self, body: Any) -> None:
        """body(tile, steps done so far) -> steps done, for each tile of keys; it releases the tile's keys."""

        turns = self.turns

        def tile(i: Any, carry: Any) -> Any:
            number, done = carry
            following = turns.number(i + 1)
            core.barrier_wait(self.kv_ring.filled.at[opaque_zero()])
            return following, body(self.tile(number), done)

        lax.fori_loop(0, turns.count, tile, (turns.number(0), jnp.int32(0)))
        core.wait_smem_to_gmem(0)

    def for_each_row_tile(self, t: Tile, step: Any, done: Any) -> Any:
        """step(member of the group, row tile, steps done, masked) for the row tiles of a tile of keys, then steps done."""
        p = self.p
        masks = p.right is not None or p.left is not None or p.lengths or p.kv_tokens % self.c.tile_kv != 0
        rows = t.rows
        done = lax.fori_loop(0, rows.masked, lambda j, done: step(*rows.masked_tile(j), done, masks), done)
        return lax.fori_loop(0, rows.unmasked, lambda j, done: step(*rows.unmasked_tile(j), done, False), done)

    def release_keys(self) -> None:
        """Once dk and dv have left the place of the keys and values, they are the copying warpgroup's again."""
        core.wait_smem_to_gmem(0, wait_read_only=True)
        core.barrier_arrive(self.kv_ring.released.at[opaque_zero()])

    def add_dq(self, t: Tile, src: Any, row: Any, n: Any, column: Any, columns: int) -> None:
        """Starts adding `src` [64, columns] to the gradient of 64 query rows."""
        # The interpreter cannot add: each tile of keys has an array of its own there.
        part = lax.div(t.key, jnp.int32(self.c.tile_kv)) if core.interpreting() else 0
        core.add_tile(src, self.dq.at[part, t.b, core.ds(row, ROWS), n, core.ds(column, columns)])

    def store(self, t: Tile, ref: Any, staging: Any, values: Any, own: Any) -> None:
        """Starts the copies of dk or dv of 64 keys, `own` of the tile, through `staging` [panels, 64, PANEL]."""
        start = t.b * self.p.kv_tokens
        zero = opaque_zero()
        for panel in self.panels:
            place = staging.at[zero + panel]
            place[...] = values[:, panel * PANEL : (panel + 1) * PANEL].astype(self.p.dtype)
            core.commit_smem()
            column = t.kv_head * self.p.head_dim + panel * PANEL
            core.store_rows(place, ref, start + t.key + own, start + self.p.kv_tokens, column)


SQUARE = (ROWS, ROWS)


def opaque_zero() -> Any:
    """0, unknown to the compiler: addresses that it kept in registers across steps would spill."""
    return lax.optimization_barrier(jnp.int32(0))


def by_column() -> Any:
    return core.Layout.WGMMA.reduce(0)


def along_column(values: Any) -> Any:
    return lax.broadcast_in_dim(values, SQUARE, (1,))
