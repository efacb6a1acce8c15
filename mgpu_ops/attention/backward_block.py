"""What the backward kernels of attention that keep keys share: a block's tiles, its copies, the weights, and the way out."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.mask import BlockOrder, q_blocks
from mgpu_ops.attention.operands import Operands, place
from mgpu_ops.attention.problem import PANEL, ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.pipeline import Pipeline

TILE_COST = 4  # what a tile of keys takes beside its tiles of rows, in tiles of 64 rows


@tile_scheduler.cached
def schedule(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    """Which block works on which tiles of keys."""
    steps = q_blocks(p, c.tile_kv, c.tile_q) * (p.q_heads // p.kv_heads) * (c.tile_q // 64)
    return tile_scheduler.assign_heads(steps + TILE_COST, p.batch * p.kv_heads, c.section_waves, blocks)


@dataclasses.dataclass(frozen=True)
class Tile:
    """A tile of keys: its batch entry, head and first key, and which tiles of query rows meet it, in each head of its group."""

    b: Any
    kv_head: Any
    key: Any
    rows: BlockOrder


@dataclasses.dataclass(frozen=True)
class Block:
    """One block of a kernel: its problem and config, its arrays in global memory, and its shared memory."""

    p: BackwardProblem
    c: BackwardConfig
    x: Operands
    table: Any  # of `schedule`
    out_grad: Any
    stats: dict[str, Any]  # lse and delta, [batch, q_heads, rows]
    dq: Any  # float32 [1, batch, rows, q_heads, head_dim], or None: another kernel computes it
    dbias: Any  # [batch * q_heads, keys, rows] or None
    dk: Any
    dv: Any
    smem: dict[str, Any]
    rows_pipeline: Pipeline
    kv_pipeline: Pipeline

    @property
    def panels(self) -> range:
        return range(self.p.head_dim // PANEL)

    @property
    def group(self) -> int:
        return self.p.q_heads // self.p.kv_heads

    @property
    def tiles(self) -> tile_scheduler.AssignedTiles:
        # Opaque: the compiler would compute once what producer and consumers have in common, and spill it for both.
        return tile_scheduler.AssignedTiles(self.table, lax.optimization_barrier(lax.axis_index("block")))

    def tile(self, number: Any) -> Tile:
        b, kv_head, key = place(number, self.p.kv_tokens, self.p.kv_heads, self.c.tile_kv)
        return Tile(b, kv_head, key, BlockOrder.of(self.x.q_range(b, key, self.c.tile_kv, self.c.tile_q)))

    def producer(self) -> None:
        """What the producer warpgroup does: for each tile of keys it and its values, then all rows that see some of them."""
        c, x, smem, tiles = self.c, self.x, self.smem, self.tiles

        def tile(i: Any, number: Any, done: Any) -> Any:
            t = self.tile(number)

            def keys(stage: Any, full: Any) -> None:
                del stage
                x.load_keys(x.k, t.b, t.kv_head, t.key, smem["k_smem"], full)
                x.load_keys(x.v, t.b, t.kv_head, t.key, smem["v_smem"], full)

            self.kv_pipeline.fill(i, keys)

            def step(member: Any, row_tile: Any, done: Any, masked: bool) -> Any:
                del masked
                row, n = row_tile * c.tile_q, t.kv_head * self.group + member

                def copy(stage: Any, full: Any) -> None:
                    x.load_block(x.q, "rows", t.b, n, row, smem["q_smem"].at[stage], full)
                    x.load_block(self.out_grad, "rows", t.b, n, row, smem["do_smem"].at[stage], full)
                    for name in ("lse", "delta"):
                        values = self.stats[name].at[t.b, n, pl.ds(row, c.tile_q)]
                        engine.copy_gmem_to_smem(values, smem[f"{name}_smem"].at[stage], full)
                    x.load_extras("keys", t.b, n, t.key, row, smem, stage, full)

                self.rows_pipeline.fill(done, copy)
                return done + 1

            return t.rows.for_each(step, done, members=self.group)

        steps = tiles.for_each(tile, jnp.int32(0))
        self.rows_pipeline.drain(steps)
        self.kv_pipeline.drain(tiles.count)

    def number_rows(self) -> None:
        """Writes 0 to 63 to shared memory: from there they take registers only while a tile is masked."""
        numbers = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_column())
        self.smem["numbers_smem"][lax.axis_index("wg")] = numbers

    def weights(self, t: Tile, s: Any, stage: Any, part: int, row: Any, wg: Any, own: Any, masked: bool) -> tuple[Any, Any]:
        """2^(scores - lse) of 64 keys, from key `own` of the tile on, and 64 rows from `row` on; 0 where not visible.

        wg: this warpgroup. Second, what to multiply the scores' gradient by for a soft cap, or None.
        """
        p, x, smem = self.p, self.x, self.smem
        columns = pl.ds(part * ROWS, ROWS)
        first_key = t.key + own
        lse = plgpu.load(smem["lse_smem"].at[stage, columns], layout=by_column(), optimized=False)
        s, slope = x.scores(s, smem["bias_smem"].at[stage, pl.ds(own, ROWS), columns] if p.bias != "none" else None)
        weights = jnp.exp2(s - along_column(lse))
        if p.segments:
            q_ids = plgpu.load(smem["segments_smem"].at[stage, columns], layout=by_column(), optimized=False)
            ids = x.inputs.segments[1].at[t.b, pl.ds(first_key, ROWS)]
            kv_ids = plgpu.load(ids, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            same = lax.broadcast_in_dim(kv_ids, SQUARE, (0,)) == along_column(q_ids)
            weights = jnp.where(same, weights, 0.0)
        if masked:
            rows = plgpu.load(smem["numbers_smem"].at[wg], layout=by_column(), optimized=False) + row
            keys = plgpu.broadcasted_iota(jnp.int32, SQUARE, 0, layout=plgpu.Layout.WGMMA) + first_key
            weights = jnp.where(x.mask_terms(t.b).sees(along_column(rows), keys), weights, 0.0)
        return weights, slope

    def delta(self, stage: Any, part: int) -> Any:
        """delta of 64 rows, along columns."""
        values = self.smem["delta_smem"].at[stage, pl.ds(part * ROWS, ROWS)]
        return along_column(plgpu.load(values, layout=by_column(), optimized=False))

    def for_each_tile(self, body: Any) -> None:
        """body(tile, steps done so far) -> steps done, for each tile of keys; it releases the tile's keys."""

        def tile(i: Any, number: Any, done: Any) -> Any:
            del i
            plgpu.barrier_wait(self.kv_pipeline.full.at[opaque_zero()])
            return body(self.tile(number), done)

        self.tiles.for_each(tile, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def for_each_row_tile(self, t: Tile, step: Any, done: Any) -> Any:
        """step(member of the group, row tile, steps done, masked) for the row tiles of a tile of keys, then steps done."""
        return t.rows.for_each(step, done, masks=self.p.masks(self.c.tile_kv), members=self.group)

    def release_keys(self) -> None:
        """Once dk and dv have left the place of the keys and values, they are the producer's again."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        engine.barrier_arrive(self.kv_pipeline.empty.at[opaque_zero()])

    def add_dq(self, t: Tile, src: Any, row: Any, n: Any, column: Any, columns: int) -> None:
        """Starts adding `src` [64, columns] to the gradient of 64 query rows."""
        # The interpreter cannot add: each tile of keys has an array of its own there.
        part = lax.div(t.key, jnp.int32(self.c.tile_kv)) if engine.interpreting() else 0
        engine.add_tile(src, self.dq.at[part, t.b, pl.ds(row, ROWS), n, pl.ds(column, columns)])

    def store(self, t: Tile, ref: Any, staging: Any, values: Any, own: Any) -> None:
        """Starts the copies of dk or dv of 64 keys, `own` of the tile, through `staging` [panels, 64, PANEL]."""
        start = t.b * self.p.kv_tokens
        zero = opaque_zero()
        for panel in self.panels:
            place = staging.at[zero + panel]
            place[...] = values[:, panel * PANEL : (panel + 1) * PANEL].astype(self.p.dtype)
            plgpu.commit_smem()
            column = t.kv_head * self.p.head_dim + panel * PANEL
            engine.store_rows(place, ref, start + t.key + own, start + self.p.kv_tokens, column)


SQUARE = (ROWS, ROWS)


def opaque_zero() -> Any:
    """0, unknown to the compiler: addresses that it kept in registers across steps would spill."""
    return lax.optimization_barrier(jnp.int32(0))


def by_column() -> Any:
    return plgpu.Layout.WGMMA.reduce(0)


def along_column(values: Any) -> Any:
    return lax.broadcast_in_dim(values, SQUARE, (1,))
