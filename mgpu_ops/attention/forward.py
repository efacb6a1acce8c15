"""The forward kernel of attention, for NVIDIA Hopper: softmax(scale q k^T + bias, where visible) v, one pass over the keys.

A warp-specialised, persistent kernel. One warpgroup copies tiles of q, k and v into shared memory with TMA, running ahead over
output tiles; two or three others own 64 query rows each. A consumer warpgroup starts the scores of the next tile of keys
before it turns those of this one into weights, so that the tensor cores work while it takes exponentials. The softmax is
online: the largest score m and the sum l of each row so far; the output is rescaled when m grows. Scores are kept times
log2(e), as exponentials are powers of two. Tiles of keys that no row sees are skipped; those that all rows see are not masked.
Sources: FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608); PTX ISA (wgmma, cp.async.bulk.tensor).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.launch import Extras, as_blocks, as_rows, kernel, pad_head, rows_like, specialize, swizzled
from mgpu_ops.attention.mask import BlockOrder, kv_blocks, some_see_nothing
from mgpu_ops.attention.operands import Operands, place
from mgpu_ops.attention.problem import PANEL, ROWS, Config, Problem, padded
from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline

TILE_COST = 4  # what an output tile takes beside its tiles of keys, in tiles of keys: measured, docs/kernels/flash_attention.md
LOWEST = -1e30  # what the largest score starts from: scores below count as masked, and 2^(-inf - LOWEST) is 0, not NaN


@tile_scheduler.cached
def _schedule(p: Problem, c: Config, blocks: int) -> np.ndarray:
    """Which block works on which output tiles."""
    steps = kv_blocks(p, ROWS * c.compute_warpgroups, c.tile_kv)
    return tile_scheduler.assign_heads(steps + TILE_COST, p.batch * p.q_heads, c.section_waves, blocks)


def _masks_many(p: Problem, tile_q: int, tile_kv: int) -> bool:
    """Whether some tile of rows may need a mask with more than one tile of keys."""
    offset = p.kv_tokens - p.q_tokens if p.align == "bottom_right" else 0
    aligned = p.right == 0 and tile_kv % tile_q == 0 and offset % tile_q == 0
    return p.lengths or p.left is not None or (p.right is not None and not aligned)


def _load(
    x: Operands,
    c: Config,
    tiles: tile_scheduler.AssignedTiles,
    k_pipeline: Pipeline,
    v_pipeline: Pipeline,
    q_pipeline: Pipeline,
    smem: Any,
) -> None:
    """Producer: for each output tile its queries, and the keys and values from the last to the first."""
    p, tile_q = x.problem, ROWS * c.compute_warpgroups

    def tile(i: Any, number: Any, done: Any) -> Any:
        b, n, row = place(number, p.q_tokens, p.q_heads, tile_q)
        q_pipeline.fill(i, lambda stage, full: x.load_rows(x.q, b, n, row, smem["q_smem"].at[stage], full))
        order = BlockOrder.of(x.kv_range(b, row, tile_q, c.tile_kv))
        kv_head = lax.div(n, jnp.int32(p.q_heads // p.kv_heads))

        def step(member: Any, key_tile: Any, step: Any, masked: bool) -> Any:
            del member, masked
            key = key_tile * c.tile_kv

            def keys(stage: Any, full: Any) -> None:
                x.load_keys(x.k, b, kv_head, key, smem["k_smem"].at[stage], full)
                x.load_extras("rows", b, n, row, key, smem, stage, full)

            k_pipeline.fill(step, keys)

            def values(stage: Any, full: Any) -> None:
                x.load_block(x.v, "keys", b, kv_head, key, smem["v_smem"].at[stage], full)

            v_pipeline.fill(step, values)
            return step + 1

        return order.for_each(step, done)

    steps = tiles.for_each(tile, jnp.int32(0))
    k_pipeline.drain(steps)
    v_pipeline.drain(steps)
    q_pipeline.drain(tiles.count)


def _kernel(
    p: Problem,
    c: Config,
    gpu: Gpu,
    bias_shape: tuple[int, int],
    *refs: Any,
    accumulators: Any,
    barriers: dict[str, Any],
    smem: dict[str, Any],
) -> None:
    """One block: its output tiles, each a loop over tiles of keys."""
    table_ref, q_ref, k_ref, v_ref, *extras, out_ref, lse_ref = refs
    tiles = tile_scheduler.AssignedTiles(table_ref, lax.axis_index("block"))
    x = Operands.of(p, q_ref, k_ref, v_ref, extras, bias_shape)
    q_pipeline = Pipeline(c.q_slots, *barriers["q"])
    k_pipeline, v_pipeline = (Pipeline(c.max_concurrent_steps, *barriers[name]) for name in ("k", "v"))
    tile_q, panels = ROWS * c.compute_warpgroups, range(p.head_dim // PANEL)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def along_row(values: Any, columns: int) -> Any:
        return lax.broadcast_in_dim(values, (ROWS, columns), (0,))

    def consumer(s_acc: Any, o_acc: Any) -> None:
        wg, count = lax.axis_index("wg"), tiles.count
        mine = pl.ds(wg * ROWS, ROWS)
        # From shared memory, the numbers of a tile's keys take registers only while a tile is masked.
        smem["numbers_smem"][wg] = plgpu.broadcasted_iota(jnp.int32, (c.tile_kv,), 0, layout=by_column)
        score_scale = x.inputs.options[0] * LOG2E

        def tile(i: Any, carry: Any) -> Any:
            number, done = carry
            # Configs of one q stage have no registers for it: they read it later.
            following = tiles.number(i + 1) if c.q_slots > 1 else None
            b, n, row = place(number, p.q_tokens, p.q_heads, tile_q)
            order = BlockOrder.of(x.kv_range(b, row, tile_q, c.tile_kv))
            row = row + wg * ROWS
            tokens = x.mask_terms(b)
            q_stage = lax.optimization_barrier(lax.rem(i, jnp.int32(c.q_slots)))
            plgpu.barrier_wait(q_pipeline.full.at[q_stage])
            q = [smem["q_smem"].at[q_stage, panel, mine, :] for panel in panels]
            if p.segments:
                q_segments = plgpu.load(x.inputs.segments[0].at[b, pl.ds(row, ROWS)], layout=by_row, optimized=False)

            def start_scores(step: Any) -> Any:
                stage = lax.rem(step, jnp.int32(k_pipeline.stages))
                plgpu.barrier_wait(k_pipeline.full.at[stage])
                s_acc[...] = jnp.zeros(s_acc.shape, jnp.float32)  # here, and not where they were read: registers are scarce
                for panel in panels:
                    engine.wgmma(s_acc, q[panel], engine.transpose_ref(smem["k_smem"].at[stage, panel]))
                return stage

            def scores(stage: Any, key_tile: Any, masked: bool, in_flight: int) -> tuple[Any, Any]:
                """Scores times log2(e), once divided by the second result: -inf where not visible. Releases the keys."""
                s, factor = engine.accumulated(s_acc, in_flight), score_scale
                shape = s.shape
                if p.soft_cap:
                    s, factor = x.capped(s), x.inputs.options[1] * LOG2E
                if p.bias != "none":
                    s, factor = s * factor + x.bias_term(smem["bias_smem"].at[stage, mine, :]), None
                if p.segments:
                    kv_segments = plgpu.load(smem["segments_smem"].at[stage], layout=by_column, optimized=False)
                    same = along_row(q_segments, c.tile_kv) == lax.broadcast_in_dim(kv_segments, shape, (1,))
                    s = jnp.where(same, s, -jnp.inf)
                engine.barrier_arrive(k_pipeline.empty.at[stage])
                if masked:
                    keys = plgpu.load(smem["numbers_smem"].at[wg], layout=by_column, optimized=False) + key_tile * c.tile_kv
                    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + row
                    s = jnp.where(tokens.sees(rows, lax.broadcast_in_dim(keys, shape, (1,))), s, -jnp.inf)
                return s, factor

            def softmax(s: Any, factor: Any, largest: Any, total: Any) -> tuple[Any, Any, Any, Any]:
                """The weights of one tile of keys, and m, l and what to multiply the output by."""
                m = jnp.max(s, axis=1)
                m = jnp.maximum(largest, m if factor is None else m * factor)
                weights = jnp.exp2((s if factor is None else s * factor) - along_row(m, c.tile_kv))
                rescale = jnp.exp2(largest - m)
                return weights.astype(out_ref.dtype), m, total * rescale + jnp.sum(weights, axis=1), rescale

            def add_values(weights: Any, step: Any) -> Any:
                stage = lax.rem(step, jnp.int32(v_pipeline.stages))
                plgpu.barrier_wait(v_pipeline.full.at[stage])
                engine.wgmma(o_acc, weights, smem["v_smem"].at[stage])
                return stage

            def rescaled(rescale: Any) -> None:
                o_acc[...] = engine.accumulated(o_acc, 0) * along_row(rescale, p.head_dim)

            def alone(i: Any, carry: Any) -> Any:
                """A tile of keys by itself."""
                m, l, step = carry
                s, factor = scores(start_scores(step), order.masked_block(i), True, in_flight=0)
                weights, m, l, rescale = softmax(s, factor, m, l)
                rescaled(rescale)
                v_stage = add_values(weights, step)
                engine.wgmma_wait(0)
                engine.barrier_arrive(v_pipeline.empty.at[v_stage])
                return m, l, step + 1

            def overlapped(i: Any, carry: Any) -> Any:
                """Starts the scores of this tile of keys and the products with the last one's values, in this order."""
                weights, m, l, step = carry
                k_stage = start_scores(step)
                v_stage = add_values(weights, step - 1)
                s, factor = scores(k_stage, order.unmasked_block(i), False, in_flight=1)
                weights, m, l, rescale = softmax(s, factor, m, l)
                if c.pv_wait == "late":
                    engine.store_volatile(l, smem["lse_smem"].at[wg])  # free until the tile ends; nobody reads it
                out = engine.accumulated(o_acc, 0)
                engine.barrier_arrive(v_pipeline.empty.at[v_stage])
                o_acc[...] = out * along_row(rescale, p.head_dim)
                return weights, m, l, step + 1

            many = _masks_many(p, tile_q, c.tile_kv)
            m, l = (plgpu.layout_cast(jnp.full((ROWS,), v, jnp.float32), by_row) for v in (LOWEST, 0.0))
            if many:
                m, l, done = lax.fori_loop(0, order.masked - 1, alone, (m, l, done))
            s, factor = scores(start_scores(done), order.masked_block(order.masked - 1), p.masks(c.tile_kv), in_flight=0)
            weights, m, l, rescale = softmax(s, factor, m, l)
            if many:
                rescaled(rescale)
            if c.q_slots > 1:
                pl.when(i > 0)(lambda: release(i - 1))  # now, when the last tile's output has had time to leave
            carry = weights, m, l, done + 1
            weights, m, l, done = lax.fori_loop(0, order.unmasked, overlapped, carry)
            if c.q_slots == 1:
                following = tiles.number(i + 1)
            v_stage = add_values(weights, done - 1)
            out = engine.accumulated(o_acc, 0)
            engine.barrier_arrive(v_pipeline.empty.at[v_stage])
            o_acc[...] = jnp.zeros(o_acc.shape, jnp.float32)
            if p.lengths:  # rows that are padding see nothing
                l = jnp.where(plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=by_row) + row < tokens.q_end, l, 0.0)
            scaled = out * along_row(jnp.where(l == 0, 0.0, 1.0 / l), p.head_dim)
            if some_see_nothing(p):  # zeros, also where the sum of values with weights of 0 is NaN
                scaled = jnp.where(along_row(l, p.head_dim) == 0, 0.0, scaled)
            out = scaled.astype(out_ref.dtype)
            for panel in panels:  # the queries are done with: their place takes the output on its way out
                q[panel][...] = out[:, panel * PANEL : (panel + 1) * PANEL]
            lse = jnp.where(l == 0, jnp.inf, m + jnp.log2(l))
            smem["lse_smem"][wg] = lse
            plgpu.commit_smem()
            start = b * p.q_tokens
            for panel in panels:
                engine.store_rows(q[panel], out_ref, start + row, start + p.q_tokens, n * p.head_dim + panel * PANEL)
            plgpu.copy_smem_to_gmem(smem["lse_smem"].at[wg], lse_ref.at[b, n, pl.ds(row, ROWS)])
            if c.q_slots == 1:
                release(i)
            return following, done

        def release(i: Any) -> None:
            """Gives back the place of tile i's queries, once its output has left it."""
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            engine.barrier_arrive(q_pipeline.empty.at[lax.rem(i, jnp.int32(c.q_slots))])

        lax.fori_loop(0, count, tile, (tiles.number(0), jnp.int32(0)))
        if c.q_slots > 1:
            pl.when(count > 0)(lambda: release(count - 1))

    def producer() -> None:
        _load(x, c, tiles, k_pipeline, v_pipeline, q_pipeline, smem)

    specialize(producer, lambda: accumulators.scope(consumer), c.compute_warpgroups, c, gpu)


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on q, k, v and `Inputs.arrays()`.

    Returns the output, and for each row the logarithm to base 2 of its sum of exponentials [batch, q_heads, q_tokens], float32,
    +inf where the row sees nothing, so that 2^(score - it) is 0.
    """
    head_dim, p = p.head_dim, dataclasses.replace(p, head_dim=padded(p.head_dim))
    q, k, v = (pad_head(x, p.head_dim) for x in arrays[:3])
    tile_q, steps = ROWS * c.compute_warpgroups, c.max_concurrent_steps
    tiles, panels = math.ceil(p.q_tokens / tile_q), p.head_dim // PANEL
    blocks = min(gpu.sms, p.batch * p.q_heads * tiles)
    extras = Extras.of(Inputs.of(p, arrays[3:]), "rows", tile_q, c.tile_kv, steps)
    out, lse = kernel(
        functools.partial(_kernel, p, c, gpu, extras.bias_shape),
        name="mgpu_ops_flash_attention",
        blocks=blocks,
        compute_warpgroups=c.compute_warpgroups,
        out_type=(rows_like(q), jax.ShapeDtypeStruct((p.batch, p.q_heads, tiles * tile_q), jnp.float32)),
        accumulators=((ROWS, c.tile_kv), (ROWS, p.head_dim)),
        smem={
            "q_smem": swizzled((c.q_slots, panels, tile_q, PANEL), p.dtype),
            "k_smem": swizzled((steps, panels, c.tile_kv, PANEL), p.dtype),
            "v_smem": swizzled((steps, c.tile_kv, p.head_dim), p.dtype),
            "numbers_smem": plgpu.SMEM((c.compute_warpgroups, c.tile_kv), jnp.int32),
            "lse_smem": plgpu.SMEM((c.compute_warpgroups, ROWS), jnp.float32),
            **extras.smem,
        },
        barriers={
            "q": Pipeline.barriers(c.q_slots, copies=panels, consumers=c.compute_warpgroups),
            "k": Pipeline.barriers(steps, copies=panels + len(extras.smem), consumers=c.compute_warpgroups),
            "v": Pipeline.barriers(steps, copies=1, consumers=c.compute_warpgroups),
        },
        interpret=interpret,
    )(_schedule(p, c, blocks), as_rows(q), as_rows(k), as_blocks(v, c.tile_kv, p), *extras.arrays)
    return out.reshape(q.shape)[..., :head_dim], lse[:, :, : p.q_tokens]
