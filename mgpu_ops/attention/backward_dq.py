"""The dq kernel: the gradient of the queries alone, its sums always in one order.

A persistent thread block keeps a q block of 128 rows, with their gradient dO of the output, while the kv blocks that they see
go by. One producer warpgroup loads, and two consumers, which own 64 rows each, do not wait for each other. A consumer computes
S = q k^T, P = 2^(S - lse), dP = dO v^T, dS = P (dP - delta), and adds dS k to dq, with dS as an operand from registers.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_block import waves
from mgpu_ops.attention.backward_check import DQ_TILE_KV, DQ_TILE_Q, backward_blocks, dq_steps, dq_value_steps
from mgpu_ops.attention.backward_prepare import Prepared
from mgpu_ops.attention.heads import Part, whole
from mgpu_ops.attention.launch import (
    BackwardArrays,
    BlockSpec,
    Scratch,
    as_blocks,
    as_rows,
    comes_in_rounds,
    in_panels,
    in_rows,
    optional_refs,
    rows_like,
    run,
    specialize,
)
from mgpu_ops.attention.layouts import along_rows, load_per_column, load_per_row, opaque
from mgpu_ops.attention.mask import BlockOrder, kv_blocks
from mgpu_ops.attention.operands import BackwardRefs, Operands, Position, Stage
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.attention.score_mask import ScoreMask
from mgpu_ops.core import engine, regions, tile_scheduler
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import store_rows

CONSUMERS = DQ_TILE_Q // ROWS
TILE = (ROWS, DQ_TILE_KV)  # of scores, of a consumer
TILE_COST = 4  # what a q block takes beside its kv blocks, in kv blocks


@tile_scheduler.cached
def _schedule(p: BackwardProblem, c: BackwardConfig, blocks: int, sms: int, in_rounds: bool) -> np.ndarray:
    """Which thread block works on which q blocks."""
    steps = kv_blocks(p, DQ_TILE_Q, DQ_TILE_KV)
    return tile_scheduler.assign_heads(steps + TILE_COST, p.batch * p.q_heads, waves(c, blocks, sms), blocks, in_rounds)


@dataclasses.dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: what its warpgroups have in common, and what the producer does."""

    p: BackwardProblem
    x: Operands
    refs: BackwardRefs
    dq: Any  # as `rows.store_rows` takes it
    smem: dict[str, Any]
    q_pipeline: Pipeline  # of one stage: q block and dO
    k_pipeline: Pipeline
    v_pipeline: Pipeline

    @staticmethod
    def of(p: BackwardProblem, refs: BackwardRefs, dq: Any, scratch: Scratch) -> _ThreadBlock:
        return _ThreadBlock(
            p=p,
            x=Operands(p, refs.q, refs.k, refs.v, refs.optional),
            refs=refs,
            dq=dq,
            smem=scratch.smem,
            k_pipeline=Pipeline(dq_steps(p), *scratch.barriers["k"]),
            v_pipeline=Pipeline(dq_value_steps(p), *scratch.barriers["v"]),
            q_pipeline=Pipeline(1, *scratch.barriers["q"]),
        )

    @property
    def part(self) -> Part:
        """A head of queries, keys, values and the output's gradient."""
        return whole(self.p.head_dim)

    def for_each_q_block(self, body: Callable[[jax.Array, Position, jax.Array], jax.Array]) -> tuple[jax.Array, jax.Array]:
        """step = body(i, first row of the i-th q block, step). Returns how many q blocks and steps there were."""
        # Opaque: the compiler would compute once what producer and consumers have in common, and spill it for both.
        tiles = tile_scheduler.AssignedTiles(self.refs.schedule, opaque(lax.axis_index("block")))

        def tile(i: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
            return body(i, Position.of(number, self.p.q_tokens, self.p.q_heads, DQ_TILE_Q), step)

        steps = tiles.for_each(tile, jnp.int32(0))
        return tiles.count, steps

    def for_each_kv_block(
        self, at: Position, body: Callable[[jax.Array, jax.Array, bool], jax.Array], step: jax.Array
    ) -> jax.Array:
        """step = body(first key of the kv block, step, masked) for the kv blocks that a q block visits."""
        order = BlockOrder.of(self.x.kv_range(at.batch, at.token, DQ_TILE_Q, DQ_TILE_KV))
        if not self.p.masks(DQ_TILE_KV):  # one loop: a second one spills where head_dim is 256
            count = order.blocks.end - order.blocks.first
            return lax.fori_loop(0, count, lambda j, s: body((order.blocks.end - 1 - j) * DQ_TILE_KV, s, False), step)
        return order.for_each(lambda _, block, s, masked: body(block * DQ_TILE_KV, s, masked), step)

    def producer(self) -> None:
        """Loads each q block, then all its kv blocks, each as soon as a stage is empty. Consumers compute meanwhile."""
        tiles, steps = self.for_each_q_block(self._load_q_block)
        # The producer ends when the consumers have declared every stage empty.
        self.k_pipeline.drain(steps)
        self.v_pipeline.drain(steps)
        self.q_pipeline.drain(tiles)

    def _load_q_block(self, i: jax.Array, at: Position, step: jax.Array) -> jax.Array:
        x, smem = self.x, self.smem

        def copy(stage: jax.Array, full: Any) -> None:
            del stage
            x.load_rows(x.q, at, smem["q"], full)
            x.load_rows(self.refs.out_grad, at, smem["do"], full)

        # Waits until dq of the last q block has left: it leaves from the place of its queries.
        self.q_pipeline.fill(i, copy)
        kv_head = lax.div(at.head, jnp.int32(self.p.q_heads // self.p.kv_heads))
        return self.for_each_kv_block(at, functools.partial(self._load_kv_block, at, kv_head), step)

    def _load_kv_block(self, at: Position, kv_head: jax.Array, key: jax.Array, step: jax.Array, masked: bool) -> jax.Array:
        del masked
        x, smem, first = self.x, self.smem, Position(at.batch, kv_head, key)

        def keys(stage: jax.Array, full: Any) -> None:
            x.load_block(x.k, "kv", first, smem["k"].at[stage], full)
            x.load_optional("kv", at, key, Stage(smem, stage, full))

        self.k_pipeline.fill(step, keys)
        self.v_pipeline.fill(step, lambda stage, full: x.load_keys(x.v, first, smem["v"].at[stage], full, self.part))
        return step + 1


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: 64 rows of each q block."""

    block: _ThreadBlock
    wg: jax.Array
    mask: ScoreMask
    s_acc: Any
    dp_acc: Any
    dq_acc: Any

    @staticmethod
    def run(block: _ThreadBlock, *accumulators: Any) -> None:
        wg, mask = lax.axis_index("wg"), ScoreMask(block.smem["numbers"])
        mask.write_numbers(wg)
        block.for_each_q_block(_Consumer(block, wg, mask, *accumulators)._q_block)

    def _q_block(self, i: jax.Array, at: Position, done: jax.Array) -> jax.Array:
        """Adds up dq over all kv blocks; the producer meanwhile loads what comes next."""
        del i
        block = self.block
        plgpu.barrier_wait(block.q_pipeline.full.at[0])
        own = at._replace(token=at.token + self.wg * ROWS)
        lse, delta = (
            load_per_row(ref.at[at.batch, at.head, pl.ds(own.token, ROWS)]) for ref in (block.refs.lse, block.refs.delta)
        )
        done = block.for_each_kv_block(at, functools.partial(self._kv_block, own, lse, delta), done)
        dq = (self.dq_acc[...] * block.x.inputs.options[0]).astype(block.p.dtype)
        self.dq_acc[...] = jnp.zeros(self.dq_acc.shape, jnp.float32)
        self._store(own, dq)
        # Waits until dq has left the place of the queries, and declares it empty.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        engine.barrier_arrive(block.q_pipeline.empty.at[0])
        return done

    def _kv_block(
        self, at: Position, lse: jax.Array, delta: jax.Array, key: jax.Array, step: jax.Array, masked: bool
    ) -> jax.Array:
        """Adds dS k of a kv block."""
        block, k, v = self.block, self.block.k_pipeline, self.block.v_pipeline
        k_stage, v_stage = (opaque(lax.rem(step, jnp.int32(pipeline.stages))) for pipeline in (k, v))
        wg = opaque(lax.axis_index("wg"))
        rows = pl.ds(wg * ROWS, ROWS)
        # 1. Start the scores when the keys are there, then dP when the values are there: it is computed beside 2.
        self._start_products(rows, k_stage, v_stage)
        # 2. Wait for the scores; they become weights.
        s = engine.accumulated(self.s_acc, block.part.panels)
        weights, slope = self._weights(s, at, lse, k_stage, rows)
        if masked:
            tokens = self.mask.tokens(TILE, at.token, self.mask.column_numbers(wg) + key)
            weights = self.mask.hide_by_position(weights, 0.0, block.x.mask_terms(at.batch), tokens)
        # 3. Wait for dP: the values' stage is empty.
        ds = weights * (engine.accumulated(self.dp_acc, 0) - along_rows(delta, TILE))
        engine.barrier_arrive(v.empty.at[v_stage])
        # 4. Add dS k, and wait for it: the keys' stage is empty.
        ds = (ds if slope is None else ds * slope).astype(block.p.dtype)
        engine.wgmma(self.dq_acc, ds, block.smem["k"].at[k_stage])
        engine.wgmma_wait(0)
        engine.barrier_arrive(k.empty.at[k_stage])
        return step + 1

    def _start_products(self, rows: pl.Slice, k_stage: jax.Array, v_stage: jax.Array) -> None:
        """Starts S = q k^T and dP = dO v^T, in this order, in as many products each as there are panels."""
        block, smem = self.block, self.block.smem
        plgpu.barrier_wait(block.k_pipeline.full.at[k_stage])
        self.s_acc[...] = jnp.zeros(TILE, jnp.float32)
        self.dp_acc[...] = jnp.zeros(TILE, jnp.float32)
        for panel in range(block.part.panels):
            keys = smem["k"].at[k_stage, :, pl.ds(panel * block.part.panel, block.part.panel)]
            engine.wgmma(self.s_acc, smem["q"].at[panel, rows, :], engine.transpose_ref(keys))
        plgpu.barrier_wait(block.v_pipeline.full.at[v_stage])
        for panel in range(block.part.panels):
            values = smem["v"].at[v_stage, panel]
            engine.wgmma(self.dp_acc, smem["do"].at[panel, rows, :], engine.transpose_ref(values))

    @regions.region("softmax")
    def _weights(
        self, s: jax.Array, at: Position, lse: jax.Array, stage: jax.Array, rows: pl.Slice
    ) -> tuple[jax.Array, jax.Array | None]:
        """The weights 2^(scores - lse), 0 in other segments; and the slope of the soft cap, or None."""
        x, smem = self.block.x, self.block.smem
        s, slope = x.scores(s, smem["bias"].at[stage, rows, :] if x.inputs.bias is not None else None)
        weights = jnp.exp2(s - along_rows(lse, TILE))
        if x.inputs.segments is not None:
            q_ids = load_per_row(x.inputs.segments[0].at[at.batch, pl.ds(at.token, ROWS)])
            weights = self.mask.hide_by_segment(weights, 0.0, q_ids, load_per_column(smem["segments"].at[stage]))
        return weights, slope

    @regions.region("store")
    def _store(self, at: Position, dq: jax.Array) -> None:
        """Starts the copies of dq to global memory, from the place of the queries, which are done with."""
        block, p = self.block, self.block.p
        rows = pl.ds(opaque(self.wg) * ROWS, ROWS)
        start = at.batch * p.q_tokens
        for panel in range(block.part.panels):
            staging = block.smem["q"].at[panel, rows, :]
            staging[...] = dq[:, block.part[panel]]
            plgpu.commit_smem()  # TMA sees what was written
            row, end = start + at.token, start + p.q_tokens
            store_rows(staging, block.dq, row, end, at.head * p.head_dim + block.part.column(panel))


def launch(
    p: BackwardProblem, c: BackwardConfig, gpu: Gpu, arrays: BackwardArrays, prepared: Prepared, interpret: bool
) -> jax.Array:
    """dq of padded head_dim."""
    part, k_stages, v_stages = whole(p.head_dim), dq_steps(p), dq_value_steps(p)
    blocks = backward_blocks(p, p.batch * p.q_heads * math.ceil(p.q_tokens / DQ_TILE_Q), gpu)
    optional, smem = optional_refs(arrays.inputs, "kv", DQ_TILE_Q, DQ_TILE_KV, k_stages)

    def body(refs: BackwardRefs, outputs: tuple[Any, ...], scratch: Scratch) -> None:
        (dq,) = outputs
        block = _ThreadBlock.of(p, refs, dq, scratch)
        consumer = functools.partial(scratch.accumulators.scope, functools.partial(_Consumer.run, block))
        specialize(block.producer, consumer, CONSUMERS, c, gpu)

    spec = BlockSpec(
        consumers=CONSUMERS,
        accumulators=(TILE, TILE, (ROWS, p.head_dim)),
        smem={
            "q": in_panels(part, (), DQ_TILE_Q, p.dtype),
            "do": in_panels(part, (), DQ_TILE_Q, p.dtype),
            "k": in_rows(part, (k_stages, DQ_TILE_KV), p.dtype),
            "v": in_panels(part, (v_stages,), DQ_TILE_KV, p.dtype),
            "numbers": plgpu.SMEM((CONSUMERS, DQ_TILE_KV), jnp.int32),
            **smem,
        },
        barriers={
            "q": Pipeline.barriers(1, copies=2 * part.panels, consumers=CONSUMERS),
            "k": Pipeline.barriers(k_stages, copies=1 + len(smem), consumers=CONSUMERS),
            "v": Pipeline.barriers(v_stages, copies=part.panels, consumers=CONSUMERS),
        },
    )
    table = _schedule(p, c, blocks, gpu.sms, comes_in_rounds(gpu, blocks))
    if optional.share_bias:
        tiles, group = math.ceil(p.q_tokens / DQ_TILE_Q), p.q_heads // p.kv_heads
        table = tile_scheduler.entries_together(table, tiles, p.batch, p.q_heads, group)
    refs = BackwardRefs(
        schedule=table,
        q=as_rows(arrays.q),
        k=as_blocks(arrays.k, DQ_TILE_KV, p),
        v=as_rows(arrays.v),
        out_grad=as_rows(arrays.out_grad),
        lse=prepared.lse,
        delta=prepared.delta,
        optional=optional,
    )
    (dq,) = run(body, "mgpu_ops_flash_attention_dq", len(table), spec, refs, (rows_like(arrays.q),), interpret, 3 / 7)
    return dq.reshape(arrays.q.shape)
