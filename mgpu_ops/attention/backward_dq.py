"""The backward kernel of attention that keeps query rows: dq alone, its sums always in one order."""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import Extras, as_blocks, as_rows, kernel, pad_tokens, rows_like, specialize, swizzled
from mgpu_ops.attention.mask import BlockOrder, kv_blocks
from mgpu_ops.attention.operands import Operands, place
from mgpu_ops.attention.problem import PANEL, ROWS, BackwardConfig, BackwardProblem, dq_steps, dq_value_steps
from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline

WARPGROUPS = 2  # that compute
TILE_Q, TILE_KV = WARPGROUPS * ROWS, 64
TILE_COST = 4  # what a tile of rows takes beside its tiles of keys, in tiles of keys


@tile_scheduler.cached
def _schedule(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    return tile_scheduler.assign_heads(kv_blocks(p, TILE_Q, TILE_KV) + TILE_COST, p.batch * p.q_heads, c.section_waves, blocks)


def _kernel(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    bias_shape: tuple[int, int],
    *refs: Any,
    accumulators: Any,
    barriers: dict[str, Any],
    smem: dict[str, Any],
) -> None:
    """One block: its tiles of rows, each a loop over tiles of keys."""
    table_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *extras, dq_ref = refs
    x = Operands.of(p, q_ref, k_ref, v_ref, extras, bias_shape)
    k_pipeline, v_pipeline = Pipeline(dq_steps(p), *barriers["k"]), Pipeline(dq_value_steps(p), *barriers["v"])
    q_pipeline = Pipeline(1, *barriers["q"])
    panels, shape = range(p.head_dim // PANEL), (ROWS, TILE_KV)
    by_row, by_column = plgpu.Layout.WGMMA.reduce(1), plgpu.Layout.WGMMA.reduce(0)

    def for_each_key_tile(b: Any, row: Any, step: Any, carry: Any) -> Any:
        order = BlockOrder.of(x.kv_range(b, row, TILE_Q, TILE_KV))
        if not p.masks(TILE_KV):  # one loop: a second one spills where head_dim is 256
            count = order.blocks.end - order.blocks.first
            return lax.fori_loop(0, count, lambda j, s: step((order.blocks.end - 1 - j) * TILE_KV, s, False), carry)
        return order.for_each(lambda _, tile, s, masked: step(tile * TILE_KV, s, masked), carry)

    def for_each_tile(body: Any) -> Any:
        # Opaque: the compiler would compute once what producer and consumers have in common, and spill it for both.
        tiles = tile_scheduler.AssignedTiles(table_ref, lax.optimization_barrier(lax.axis_index("block")))

        def tile(i: Any, number: Any, done: Any) -> Any:
            return body(i, *place(number, p.q_tokens, p.q_heads, TILE_Q), done)

        steps = tiles.for_each(tile, jnp.int32(0))
        return tiles.count, steps

    def producer() -> None:
        def tile(i: Any, b: Any, n: Any, row: Any, done: Any) -> Any:
            def rows(stage: Any, full: Any) -> None:
                del stage
                x.load_rows(x.q, b, n, row, smem["q_smem"], full)
                x.load_rows(do_ref, b, n, row, smem["do_smem"], full)

            q_pipeline.fill(i, rows)
            kv_head = lax.div(n, jnp.int32(p.q_heads // p.kv_heads))

            def step(key: Any, step: Any, masked: bool) -> Any:
                del masked

                def keys(stage: Any, full: Any) -> None:
                    x.load_block(x.k, "keys", b, kv_head, key, smem["k_smem"].at[stage], full)
                    x.load_extras("rows", b, n, row, key, smem, stage, full)

                k_pipeline.fill(step, keys)
                v_pipeline.fill(step, lambda stage, full: x.load_keys(x.v, b, kv_head, key, smem["v_smem"].at[stage], full))
                return step + 1

            return for_each_key_tile(b, row, step, done)

        count, steps = for_each_tile(tile)
        k_pipeline.drain(steps)
        v_pipeline.drain(steps)
        q_pipeline.drain(count)

    def consumer(s_acc: Any, dp_acc: Any, dq_acc: Any) -> None:
        wg = lax.axis_index("wg")
        smem["numbers_smem"][wg] = plgpu.broadcasted_iota(jnp.int32, (TILE_KV,), 0, layout=by_column)

        def along_row(values: Any) -> Any:
            return lax.broadcast_in_dim(values, shape, (0,))

        def tile(i: Any, b: Any, n: Any, row: Any, done: Any) -> Any:
            del i
            plgpu.barrier_wait(q_pipeline.full.at[0])
            own = row + wg * ROWS
            lse, delta = (
                plgpu.load(ref.at[b, n, pl.ds(own, ROWS)], layout=by_row, optimized=False) for ref in (lse_ref, delta_ref)
            )

            def step(key: Any, step: Any, masked: bool) -> Any:
                # Opaque: addresses that the compiler kept in registers across steps would spill.
                k_stage, v_stage = (
                    lax.optimization_barrier(lax.rem(step, jnp.int32(pipeline.stages))) for pipeline in (k_pipeline, v_pipeline)
                )
                wg = lax.optimization_barrier(lax.axis_index("wg"))
                mine = pl.ds(wg * ROWS, ROWS)
                plgpu.barrier_wait(k_pipeline.full.at[k_stage])
                s_acc[...] = jnp.zeros(shape, jnp.float32)
                dp_acc[...] = jnp.zeros(shape, jnp.float32)
                for panel in panels:
                    keys = smem["k_smem"].at[k_stage, :, pl.ds(panel * PANEL, PANEL)]
                    engine.wgmma(s_acc, smem["q_smem"].at[panel, mine, :], engine.transpose_ref(keys))
                plgpu.barrier_wait(v_pipeline.full.at[v_stage])
                for panel in panels:
                    engine.wgmma(
                        dp_acc, smem["do_smem"].at[panel, mine, :], engine.transpose_ref(smem["v_smem"].at[v_stage, panel])
                    )
                s = engine.accumulated(s_acc, len(panels))
                s, slope = x.scores(s, smem["bias_smem"].at[k_stage, mine, :] if p.bias != "none" else None)
                weights = jnp.exp2(s - along_row(lse))
                if p.segments:
                    ids = x.inputs.segments[0].at[b, pl.ds(own, ROWS)]
                    q_ids = plgpu.load(ids, layout=by_row, optimized=False)
                    kv_ids = plgpu.load(smem["segments_smem"].at[k_stage], layout=by_column, optimized=False)
                    weights = jnp.where(along_row(q_ids) == lax.broadcast_in_dim(kv_ids, shape, (1,)), weights, 0.0)
                if masked:
                    numbers = plgpu.load(smem["numbers_smem"].at[wg], layout=by_column, optimized=False) + key
                    rows = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=plgpu.Layout.WGMMA) + own
                    weights = jnp.where(x.mask_terms(b).sees(rows, lax.broadcast_in_dim(numbers, shape, (1,))), weights, 0.0)
                ds = weights * (engine.accumulated(dp_acc, 0) - along_row(delta))
                engine.barrier_arrive(v_pipeline.empty.at[v_stage])
                engine.wgmma(dq_acc, (ds if slope is None else ds * slope).astype(p.dtype), smem["k_smem"].at[k_stage])
                engine.wgmma_wait(0)
                engine.barrier_arrive(k_pipeline.empty.at[k_stage])
                return step + 1

            done = for_each_key_tile(b, row, step, done)
            dq = (dq_acc[...] * x.inputs.options[0]).astype(p.dtype)
            dq_acc[...] = jnp.zeros(dq_acc.shape, jnp.float32)
            mine = pl.ds(lax.optimization_barrier(wg) * ROWS, ROWS)
            start = b * p.q_tokens
            for panel in panels:  # the queries are done with: their place takes their gradient on its way out
                staging = smem["q_smem"].at[panel, mine, :]
                staging[...] = dq[:, panel * PANEL : (panel + 1) * PANEL]
                plgpu.commit_smem()
                engine.store_rows(staging, dq_ref, start + own, start + p.q_tokens, n * p.head_dim + panel * PANEL)
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            engine.barrier_arrive(q_pipeline.empty.at[0])
            return done

        for_each_tile(tile)

    specialize(producer, lambda: accumulators.scope(consumer), WARPGROUPS, c, gpu)


def launch(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out_grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    inputs: Inputs,
    interpret: bool,
) -> jax.Array:
    """dq of padded head_dim."""
    panels, tiles, steps = p.head_dim // PANEL, math.ceil(p.q_tokens / TILE_Q), dq_steps(p)
    blocks = min(gpu.sms, p.batch * p.q_heads * tiles)
    v_steps = dq_value_steps(p)
    extras = Extras.of(inputs, "rows", TILE_Q, TILE_KV, steps)
    dq = kernel(
        functools.partial(_kernel, p, c, gpu, extras.bias_shape),
        name="mgpu_ops_flash_attention_dq",
        blocks=blocks,
        compute_warpgroups=WARPGROUPS,
        out_type=rows_like(q),
        accumulators=((ROWS, TILE_KV), (ROWS, TILE_KV), (ROWS, p.head_dim)),
        smem={
            "q_smem": swizzled((panels, TILE_Q, PANEL), p.dtype),
            "do_smem": swizzled((panels, TILE_Q, PANEL), p.dtype),
            "k_smem": swizzled((steps, TILE_KV, p.head_dim), p.dtype),
            "v_smem": swizzled((v_steps, panels, TILE_KV, PANEL), p.dtype),
            "numbers_smem": plgpu.SMEM((WARPGROUPS, TILE_KV), jnp.int32),
            **extras.smem,
        },
        barriers={
            "q": Pipeline.barriers(1, copies=2 * panels, consumers=WARPGROUPS),
            "k": Pipeline.barriers(steps, copies=1 + len(extras.smem), consumers=WARPGROUPS),
            "v": Pipeline.barriers(v_steps, copies=panels, consumers=WARPGROUPS),
        },
        interpret=interpret,
    )(
        _schedule(p, c, blocks),
        as_rows(q),
        as_blocks(k, TILE_KV, p),
        as_rows(v),
        as_rows(out_grad),
        pad_tokens(lse, TILE_Q, math.inf),
        pad_tokens(delta, TILE_Q),
        *extras.arrays,
    )
    return dq.reshape(q.shape)
