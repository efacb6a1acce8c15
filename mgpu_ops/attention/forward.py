"""The forward kernel of attention, for NVIDIA Hopper: softmax(scale q k^T + bias, where visible) v, one pass over the keys.

Persistent thread blocks, specialised by warpgroup, work through output tiles of 64 query rows a consumer:

- The producer warpgroup loads the q block of each output tile, and its kv blocks from the last to the first, with TMA. It runs
  ahead, over the ends of output tiles, as far as the stages of three pipelines (q, k, v) allow.
- One to three consumer warpgroups own 64 rows each. While the tensor cores compute the scores of the next kv block, a consumer
  multiplies the weights of the last one by its values and takes exponentials. Consumers do not wait for each other, or only
  (`turns`) to start products one after the other, so that one's exponentials run beside another's products.

A stage's full barrier says that its copies have arrived; its empty barrier, that all consumers are done with it. The softmax
is online (`softmax.py`). Scores are kept times log2(e), as exponentials are powers of two. kv blocks that no row sees are
skipped; those that all rows see are not masked (`mask.py`).
Sources: FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608); PTX ISA (wgmma, cp.async.bulk.tensor).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import Part, has_room, panels, parts, rounded, rounded_values, whole
from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.launch import (
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
    with_room,
)
from mgpu_ops.attention.layouts import PER_ROW, along_rows, load_per_column, load_per_row, load_tile, opaque
from mgpu_ops.attention.mask import BlockOrder, BlockRange, MaskTerms, kv_blocks, some_see_nothing
from mgpu_ops.attention.operands import Operands, OptionalRefs, Position, Stage, columns_of
from mgpu_ops.attention.problem import ROWS, Config, Problem, bias_steps, deals_tiles, masks_all, output_tiles
from mgpu_ops.attention.score_mask import ScoreMask
from mgpu_ops.attention.softmax import THRESHOLD, OnlineSoftmax, Scores
from mgpu_ops.core import engine, fragments, regions, tile_scheduler
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import store_rows, store_scattered
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.core.turns import Turns

TILE_COST = 4  # what an output tile takes beside its kv blocks, in kv blocks: measured, docs/kernels/flash_attention.md


@tile_scheduler.cached
def _schedule(p: Problem, c: Config, blocks: int, in_rounds: bool) -> np.ndarray:
    """Which thread block works on which output tiles."""
    steps = kv_blocks(p, ROWS * c.compute_warpgroups, c.tile_kv)
    return tile_scheduler.assign_heads(steps + TILE_COST, p.batch * p.q_heads, c.section_waves, blocks, in_rounds)


def _thread_blocks(p: Problem, c: Config, tiles: int, gpu: Gpu) -> int:
    """How many there are: persistent ones; or as many as output tiles, which the GPU deals (`deals_tiles`)."""
    return tiles if deals_tiles(p, c, tiles, gpu) else min(gpu.sms, tiles)


def _masks_many(p: Problem, tile_q: int, tile_kv: int) -> bool:
    """Whether some output tile may need a mask with more than one kv block."""
    aligned = p.right == 0 and tile_kv % tile_q == 0 and p.offset % tile_q == 0
    return p.lengths or p.left is not None or (p.right is not None and not aligned)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Refs:
    """The arguments of the kernel: arrays outside of it, refs in global memory within."""

    schedule: Any  # of `_schedule`; None where each thread block has one output tile
    q: Any
    k: Any
    v: Any
    optional: OptionalRefs


@dataclasses.dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: what its warpgroups have in common, and what the producer does."""

    p: Problem
    c: Config
    x: Operands
    tiles: tile_scheduler.AssignedTiles | tile_scheduler.OwnTile
    out: Any  # as `rows.store_rows` takes it
    lse: Any  # [batch, q_heads, q_tokens], or flat where tiles do not divide tokens
    smem: dict[str, Any]
    q_pipeline: Pipeline
    k_pipeline: Pipeline
    v_pipeline: Pipeline
    bias_pipeline: Pipeline | None  # of each consumer where `splits_bias`, else one

    @staticmethod
    def of(p: Problem, c: Config, refs: _Refs, outputs: tuple[Any, ...], scratch: Scratch) -> _ThreadBlock:
        out, lse = outputs
        number = own = lax.axis_index("block")
        if refs.schedule is None and p.segments and p.right is not None:  # the longest tiles of a head first
            own = output_tiles(p, c) - 1 - number
        return _ThreadBlock(
            p=p,
            c=c,
            x=Operands(p, refs.q, refs.k, refs.v, refs.optional),
            tiles=tile_scheduler.OwnTile(own) if refs.schedule is None else tile_scheduler.AssignedTiles(refs.schedule, number),
            out=out,
            lse=lse,
            smem=scratch.smem,
            q_pipeline=Pipeline(c.q_slots, *scratch.barriers["q"]),
            k_pipeline=Pipeline(c.max_concurrent_steps, *scratch.barriers["k"]),
            v_pipeline=Pipeline(c.max_concurrent_steps, *scratch.barriers["v"]),
            bias_pipeline=Pipeline(scratch.smem["bias"].shape[0], *scratch.barriers["bias"]) if p.bias != "none" else None,
        )

    @property
    def tile_q(self) -> int:
        return ROWS * self.c.compute_warpgroups

    @property
    def parts(self) -> tuple[Part, ...]:
        """Of a head of queries and keys."""
        return parts(self.p.head_dim)

    def position(self, number: jax.Array) -> Position:
        """The first row of an output tile."""
        return Position.of(number, self.p.q_tokens, self.p.q_heads, self.tile_q)

    def order(self, at: Position, terms: MaskTerms) -> BlockOrder:
        """The kv blocks of an output tile, in the order in which producer and consumers go through them."""
        blocks = self.x.kv_range(at.batch, at.token, self.tile_q, self.c.tile_kv, terms)
        return BlockOrder.all_masked(blocks) if masks_all(self.p, self.c) else BlockOrder.of(blocks)

    @property
    def turns(self) -> Turns | None:
        """Of the consumers at starting products; None where they take none."""
        return Turns(self.c.compute_warpgroups) if self.c.turns == "products" else None

    @property
    def splits_bias(self) -> bool:
        """Whether each consumer has a pipeline of its own rows of the bias: with one stage, none waits for the others then."""
        return self.bias_pipeline is not None and self.bias_pipeline.stages == 1

    def bias_of(self, wg: Int) -> Pipeline | None:
        """The pipeline of a consumer's rows of the bias."""
        return self.bias_pipeline.own(wg) if self.bias_pipeline is not None and self.splits_bias else self.bias_pipeline

    def skip(self, wg: jax.Array, count: Int, step: jax.Array) -> jax.Array:
        """Consumer: passes over `count` kv blocks that rows of others see, but none of its own. Returns the next step."""

        def one(_: jax.Array, step: jax.Array) -> jax.Array:
            # No wait is left out: a barrier's phase is known by counting them.
            for pipeline in filter(None, (self.k_pipeline, self.v_pipeline, self.bias_of(wg))):
                pipeline.wait(step)
                pipeline.release(step)
            return step + 1

        return lax.fori_loop(0, count, one, step)

    def producer(self) -> None:
        """Loads the blocks of all output tiles, each as soon as a stage is empty. Consumers compute meanwhile."""
        steps = self.tiles.for_each(self._load_output_tile, jnp.int32(0))
        # The producer ends when the consumers have declared every stage empty.
        self.k_pipeline.drain(steps)
        self.v_pipeline.drain(steps)
        for bias, _ in self._bias_parts():
            bias.drain(steps)
        self.q_pipeline.drain(self.tiles.count)

    def _load_output_tile(self, i: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
        x, at = self.x, self.position(number)
        terms = x.mask_terms(at.batch)

        def queries(stage: jax.Array, full: Any) -> None:
            for part in self.parts:
                x.load_rows(x.q, at, self.smem[part.name("q")].at[stage], full, part, terms)

        # Waits until the consumers have stored the output tile that was in this stage of q: outputs leave from there.
        self.q_pipeline.fill(i, queries)
        order = self.order(at, terms)
        kv_head = lax.div(at.head, jnp.int32(self.p.q_heads // self.p.kv_heads))
        return order.for_each(functools.partial(self._load_kv_block, at, terms, kv_head), step)

    def _load_kv_block(
        self,
        at: Position,
        terms: MaskTerms,
        kv_head: jax.Array,
        member: jax.Array,
        block: jax.Array,
        step: jax.Array,
        masked: bool,
    ) -> jax.Array:
        del member, masked
        x, first = self.x, Position(at.batch, kv_head, block * self.c.tile_kv)

        def keys(stage: jax.Array, full: Any) -> None:
            for part in self.parts:
                x.load_keys(x.k, first, self.smem[part.name("k")].at[stage], full, part, terms)
            x.load_segments("kv", at, first.token, Stage(self.smem, stage, full))

        # Keys and values have pipelines of their own: keys are empty again a step earlier than the values of their block.
        self.k_pipeline.fill(step, keys)
        for bias, rows in self._bias_parts():
            bias.fill(step, functools.partial(self._load_bias, at, first.token, rows))
        self.v_pipeline.fill(step, lambda stage, full: x.load_block(x.v, "kv", first, self.smem["v"].at[stage], full, terms))
        return step + 1

    def _bias_parts(self) -> list[tuple[Pipeline, pl.Slice]]:
        """The pipelines of the bias, and which rows of a tile each brings."""
        if self.bias_pipeline is None:
            return []
        if not self.splits_bias:
            return [(self.bias_pipeline, pl.ds(0, self.tile_q))]
        return [(self.bias_pipeline.own(wg), pl.ds(wg * ROWS, ROWS)) for wg in range(self.c.compute_warpgroups)]

    def _load_bias(self, at: Position, column: Int, rows: pl.Slice, stage: jax.Array, full: Any) -> None:
        """Starts the copy of some rows of a tile of the bias."""
        self.x.load_bias(at._replace(token=at.token + rows.start), column, self.smem["bias"].at[stage, rows, :], full)


@dataclasses.dataclass(frozen=True)
class _Consumer:
    """One consumer warpgroup: 64 rows of each output tile."""

    block: _ThreadBlock
    wg: jax.Array
    own: pl.Slice  # its rows within an output tile
    tiles: jax.Array  # how many output tiles there are
    mask: ScoreMask
    score_scale: jax.Array  # the scale of the scores times log2(e)
    s_acc: Any
    o_acc: Any

    @staticmethod
    def run(block: _ThreadBlock, s_acc: Any, o_acc: Any) -> None:
        """Works through all output tiles."""
        wg, tiles = lax.axis_index("wg"), block.tiles.count
        own, mask = pl.ds(wg * ROWS, ROWS), ScoreMask(block.smem["numbers"])
        mask.write_numbers(wg)
        if block.turns is not None and not masks_all(block.p, block.c):
            block.turns.start()
        consumer = _Consumer(block, wg, own, tiles, mask, block.x.inputs.options[0] * LOG2E, s_acc, o_acc)
        number = block.tiles.number(0)
        carry: Any = (number, *consumer._ends(number)), jnp.int32(0), *([jnp.int32(0)] if masks_all(block.p, block.c) else [])
        if isinstance(block.tiles, tile_scheduler.OwnTile):
            carry = consumer._output_tile(jnp.int32(0), carry)
        else:
            carry = lax.fori_loop(0, tiles, consumer._output_tile, carry)
        if masks_all(block.p, block.c):
            block.skip(wg, carry[2], carry[1])
        if block.c.q_slots > 1:
            pl.when(tiles > 0)(lambda: consumer._release_queries(tiles - 1))

    def _output_tile(self, i: jax.Array, carry: Any) -> Any:
        """Stages of an output tile; the producer meanwhile loads what comes next."""
        (number, *ends), step, *skipped = carry
        tiles, several_q_stages = self.block.tiles, self.block.c.q_slots > 1
        # The number of the next tile is read early, as global memory is far. Configs of one q stage have no register for it.
        following = tiles.number(i + 1) if several_q_stages else None
        rows = self._rows(i, number, *ends)
        all_masked = masks_all(self.block.p, self.block.c)
        if all_masked:
            step = rows.skip_unseen(step, *skipped)
        # 1. Wait for the queries.
        plgpu.barrier_wait(self.block.q_pipeline.full.at[rows.q_stage])
        # 2. kv blocks with a mask, one after the other. Of the last, the weights are left in registers.
        weights, softmax, step = rows.first_of_all(step) if all_masked else rows.masked_blocks(step)
        if several_q_stages:
            # The last tile's output left from its q stage during step 2: the producer may now fill that stage.
            pl.when(i > 0)(lambda: self._release_queries(i - 1))
        # 3. The other kv blocks: scores of one overlap with weights times values of the block before.
        count, overlapped = (
            (rows.own.seen - 1, rows.overlapped_masked) if all_masked else (rows.order.unmasked, rows.overlapped)
        )
        weights, softmax, step = lax.fori_loop(0, count, overlapped, (weights, softmax, step + 1))
        if following is None:
            following = tiles.number(i + 1)
        next_tile = following, *self._ends(following)
        # 4. The last weights times values, and the way out.
        rows.store(rows.last_values(weights, step - 1), softmax.added_up())
        if not several_q_stages:
            self._release_queries(i)
        return (next_tile, step, rows.own.after) if all_masked else (next_tile, step)

    def _ends(self, number: jax.Array) -> tuple[Int, ...]:
        """Where queries and keys of a tile's batch entry end, read ahead as the tile's number is; where no register is free for
        it, nothing.
        """
        if not self.block.p.lengths or self.block.p.segments or self.block.c.q_slots == 1:
            return ()
        terms = self.block.x.mask_terms(self.block.position(number).batch)
        return terms.q_end, terms.kv_end

    def _rows(self, i: jax.Array, number: jax.Array, *ends: Int) -> _Rows:
        """Those of output tile i. Its queries may not have come yet. ends: of `_ends`."""
        block = self.block
        at = block.position(number)
        terms = MaskTerms.of(block.p, *ends) if ends else block.x.mask_terms(at.batch)
        order = block.order(at, terms)
        at = at._replace(token=at.token + self.wg * ROWS)
        stage = opaque(lax.rem(i, jnp.int32(block.c.q_slots)))
        q = [block.smem[part.name("q")].at[stage, panel, self.own, :] for part, panel in panels(block.parts)]
        segments = block.x.inputs.segments
        q_segments = load_per_row(segments[0].at[at.batch, pl.ds(at.token, ROWS)]) if segments is not None else None
        own = _OwnBlocks.of(order, terms.kv_range(at.token, ROWS, block.c.tile_kv)) if masks_all(block.p, block.c) else None
        return _Rows(self, at, order, terms, stage, q, q_segments, own)

    def _release_queries(self, i: jax.Array) -> None:
        """Waits until the output of tile i has left its q stage, and declares the stage empty."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        engine.barrier_arrive(self.block.q_pipeline.empty.at[lax.rem(i, jnp.int32(self.block.c.q_slots))])


class _OwnBlocks(NamedTuple):
    """Of the kv blocks of an output tile, from the last to the first, those that one consumer's rows see: at least one."""

    before: Int  # how many come before them
    seen: Int
    after: Int

    @staticmethod
    def of(order: BlockOrder, own: BlockRange) -> _OwnBlocks:
        first, end = order.blocks.first, order.blocks.end
        before = jnp.clip(end - own.end, 0, end - first - 1)
        after = jnp.clip(own.first - first, 0, end - first - 1 - before)
        return _OwnBlocks(before, end - first - before - after, after)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The 64 rows of an output tile that one consumer warpgroup works on."""

    consumer: _Consumer
    at: Position  # the first of them
    order: BlockOrder
    terms: MaskTerms
    q_stage: jax.Array
    q: list[Any]  # their queries in shared memory, by panels
    q_segments: jax.Array | None  # their segment ids in registers, or None
    own_blocks: _OwnBlocks | None  # where every kv block is masked (`masks_all`)

    @property
    def own(self) -> _OwnBlocks:
        assert self.own_blocks is not None
        return self.own_blocks

    @property
    def block(self) -> _ThreadBlock:
        return self.consumer.block

    # --- Steps of the loops over kv blocks

    def masked_blocks(self, step: jax.Array) -> tuple[jax.Array, OnlineSoftmax, jax.Array]:
        """All kv blocks with a mask: (weights of the last one, softmax, its step). Its values are still to be added."""
        p, c = self.block.p, self.block.c
        many = _masks_many(p, self.block.tile_q, c.tile_kv)
        softmax = self._start_softmax()
        if many:
            # The first of them may be for rows of other consumers alone. With a window it is not worth the registers.
            causal = p.right is not None and p.left is None
            unseen = self.order.unseen(self.terms.kv_range(self.at.token, ROWS, c.tile_kv)) if causal else 0
            step = self.block.skip(self.consumer.wg, unseen, step) if causal else step
            softmax, step = lax.fori_loop(unseen, self.order.masked - 1, self._alone, (softmax, step))
        stage = self._start_scores(step)
        scores = self._scores(step, stage, self.order.masked_block(self.order.masked - 1), p.masks(c.tile_kv), in_flight=0)
        weights, softmax, rescale = softmax.update(scores, p.dtype)
        if many:
            self._rescale_output(rescale)
        return weights, softmax, step

    def _alone(self, i: jax.Array, carry: Any) -> Any:
        """A kv block by itself: nothing overlaps within the warpgroup. The other consumers keep the tensor cores busy."""
        softmax, step = carry
        stage = self._start_scores(step)
        scores = self._scores(step, stage, self.order.masked_block(i), True, in_flight=0)
        weights, softmax, rescale = softmax.update(scores, self.block.p.dtype)
        self._rescale_output(rescale)
        v_stage = self._start_values(weights, step)
        engine.wgmma_wait(0)
        engine.barrier_arrive(self.block.v_pipeline.empty.at[v_stage])
        return softmax, step + 1

    def skip_unseen(self, step: jax.Array, skipped: Int) -> jax.Array:
        """Passes over the kv blocks, where all are masked, that come before the first that these rows see.

        skipped: the last kv blocks of the output tile before, which its rows did not see. ptxas overlaps no products where a
        loop passes over them behind the products of their own tile. Not after a wait for the queries: the producer loads them
        when it has found a stage for each of these blocks.
        """
        return self.block.skip(self.consumer.wg, skipped + self.own.before, step)

    def first_of_all(self, step: jax.Array) -> tuple[jax.Array, OnlineSoftmax, jax.Array]:
        """As `masked_blocks`, of the first kv block that these rows see, where all are masked."""
        softmax = self._start_softmax()
        scores = self._scores(step, self._start_scores(step), self._own_block(0), True, in_flight=0)
        weights, softmax, _ = softmax.update(scores, self.block.p.dtype)  # there is no output to rescale
        return weights, softmax, step

    def _own_block(self, i: Int) -> Int:
        return self.order.masked_block(self.own.before + i)

    def overlapped_masked(self, i: jax.Array, carry: Any) -> Any:
        """`overlapped`, of a masked kv block, the (i + 1)th of `own`. No turns: consumers have different numbers of them."""
        return self._overlapped(self._own_block(i + 1), carry, None, True)

    def overlapped(self, i: jax.Array, carry: Any) -> Any:
        """A kv block without a mask: the tensor cores get its scores and the last block's weights times values together."""
        return self._overlapped(self.order.unmasked_block(i), carry, self.block.turns, False)

    def _overlapped(self, kv_block: Int, carry: Any, turns: Turns | None, masked: bool) -> Any:
        weights, softmax, step = carry
        block, w = self.block, self.consumer
        if turns is not None:
            turns.wait()
        # Two products are started, in this order: the scores of this block, and the last block's weights times its values.
        k_stage = self._start_scores(step)
        v_stage = self._start_values(weights, step - 1)
        if turns is not None:
            turns.release()
        # Waits for the scores alone (one product may be in flight). The softmax runs beside weights times values.
        stores, bias = block.c.pv_wait != "early", block.bias_of(w.wg)
        keeps_bias = stores and bias is not None and bias.stages > 1 and self._bias_beside
        scores = self._scores(step, k_stage, kv_block, masked, in_flight=1, keeps_bias=keeps_bias)
        weights, softmax, rescale, half = softmax.update_in_halves(scores, block.p.dtype)
        if stores:
            # Keeps ptxas from moving the next wait ahead of the softmax, or of its first half. Nobody reads what it stores.
            fragments.store_volatile(half, block.smem["lse"].at[w.wg])
        if keeps_bias and bias is not None:
            # The store needs the row maxima, and so the whole tile of the bias: it has come to registers.
            bias.release(step)
        # Waits for weights times values; then the stage is empty and the output may be rescaled.
        out = engine.accumulated(w.o_acc, 0)
        engine.barrier_arrive(block.v_pipeline.empty.at[v_stage])
        w.o_acc[...] = self._rescaled(out, rescale)
        return weights, softmax, step + 1

    def last_values(self, weights: jax.Array, step: jax.Array) -> jax.Array:
        """The sum of all weights times values, after the product for the last kv block. Sets the accumulator to 0 again."""
        o_acc = self.consumer.o_acc
        stage = self._start_values(weights, step)
        out = engine.accumulated(o_acc, 0)
        engine.barrier_arrive(self.block.v_pipeline.empty.at[stage])
        o_acc[...] = jnp.zeros(o_acc.shape, jnp.float32)
        return out

    # --- Their parts

    def _start_softmax(self) -> OnlineSoftmax:
        c = self.block.c
        return OnlineSoftmax.start(by_lanes=c.pv_wait == "half", threshold=THRESHOLD if c.rescale == "conditional" else 0.0)

    def _start_scores(self, step: jax.Array) -> jax.Array:
        """Waits for the keys of a step and starts q k^T. Returns their stage."""
        k, s_acc = self.block.k_pipeline, self.consumer.s_acc
        stage = lax.rem(step, jnp.int32(k.stages))
        plgpu.barrier_wait(k.full.at[stage])
        s_acc[...] = jnp.zeros(s_acc.shape, jnp.float32)  # here, and not where they were read: registers are scarce
        keys = (self.block.smem[part.name("k")].at[stage, panel] for part, panel in panels(self.block.parts))
        for q, k in zip(self.q, keys, strict=True):
            engine.wgmma(s_acc, q, engine.transpose_ref(k))
        return stage

    def _scores(
        self, step: jax.Array, stage: jax.Array, kv_block: Int, masked: bool, in_flight: int, keeps_bias: bool = False
    ) -> Scores:
        """Waits until q k^T is done; products started later, `in_flight` of them, may go on. Declares the keys' stage empty,
        and that of the bias, unless the caller `keeps_bias` until it has read it.
        """
        block, x, w = self.block, self.block.x, self.consumer
        bias = self._bias(step, keeps_bias) if block.bias_pipeline is not None and self._bias_beside else None
        s, scale = engine.accumulated(w.s_acc, in_flight), w.score_scale
        if block.p.soft_cap and not block.p.soft_cap_after_bias:
            s, scale = x.capped(s), x.inputs.options[1] * LOG2E
        factor: jax.Array | float | None = scale
        if block.bias_pipeline is not None:
            bias = self._bias(step, keeps_bias) if bias is None else bias
            if block.p.soft_cap_after_bias:
                s, factor = x.scores(s, bias)[0], None
            else:  # not yet times log2(e): that is part of the exponentials' arguments
                s, factor = s * (scale * (1 / LOG2E)) + bias.astype(jnp.float32), LOG2E
        if self.q_segments is not None:
            s = w.mask.hide_by_segment(s, -jnp.inf, self.q_segments, load_per_column(block.smem["segments"].at[stage]))
            engine.shared_memory_fence()
        engine.barrier_arrive(block.k_pipeline.empty.at[stage])
        if masked:
            key, columns = kv_block * block.c.tile_kv, w.mask.column_numbers(w.wg)
            s = w.mask.hide_keys(s, -jnp.inf, self.terms, self.at.token, key, columns)
        return Scores(s, factor)

    @property
    def _bias_beside(self) -> bool:
        """Whether the bias is read beside the product of queries and keys: where registers are left for both."""
        return self.block.p.head_dim < 256 and self.block.c.compute_warpgroups < 3

    def _bias(self, step: jax.Array, keeps: bool) -> jax.Array:
        """Waits for the tile of the bias of a step and takes it to registers. Declares its stage empty, unless it `keeps` it.

        To arrive at a barrier does not wait for loads that were started before: where products of all warpgroups keep shared
        memory busy, TMA may overwrite what a load is still to read.
        """
        pipeline = self.block.bias_of(self.consumer.wg)
        assert pipeline is not None
        tile = load_tile(self.block.smem["bias"].at[pipeline.wait(step), self.consumer.own, :])
        if not keeps:
            engine.shared_memory_fence()
            pipeline.release(step)
        return tile

    def _start_values(self, weights: jax.Array, step: jax.Array) -> jax.Array:
        """Waits for the values of a step and starts adding weights times values to the output. Returns their stage."""
        v = self.block.v_pipeline
        stage = lax.rem(step, jnp.int32(v.stages))
        plgpu.barrier_wait(v.full.at[stage])
        engine.wgmma(self.consumer.o_acc, weights, self.block.smem["v"].at[stage])
        return stage

    def _rescale_output(self, rescale: jax.Array) -> None:
        """No product may be in flight."""
        o_acc = self.consumer.o_acc
        o_acc[...] = engine.accumulated(o_acc, 0) * along_rows(rescale, o_acc.shape)

    def _rescaled(self, out: jax.Array, rescale: jax.Array) -> jax.Array:
        """The output times the rescale factor, in the loop. Elsewhere a branch would make ptxas wait for each product."""

        def scaled() -> jax.Array:
            return out * along_rows(rescale, out.shape)

        if self.block.c.rescale == "always":
            return scaled()
        return lax.cond(fragments.any_of_warp(rescale != 1.0) != 0, scaled, lambda: out)

    # --- The way out

    @regions.region("store")
    def store(self, out: jax.Array, softmax: OnlineSoftmax) -> None:
        """Starts the copies of output and lse to global memory. They run on beside the next output tile."""
        block, p, at, wg = self.block, self.block.p, self.at, self.consumer.wg
        if p.lengths:
            softmax = softmax.without_padding(at.token, self.terms.q_end)
        rescale = None
        if p.sinks:
            softmax, rescale = softmax.with_sink(block.x.sink(at.batch, at.head) * LOG2E)
        normalised = softmax.normalise(out, some_see_nothing=some_see_nothing(p), rescale=rescale).astype(p.dtype)
        # This warpgroup's queries are done with: the output leaves from their place, panel by panel. It may have fewer.
        columns = [(part.column(panel), part.panel) for part, panel in panels(block.parts)]
        stored = block.out.shape[-1] // p.q_heads
        places = [(place, first, width) for place, (first, width) in zip(self.q, columns, strict=True) if first < stored]
        for place, first, width in places:
            place[...] = normalised[:, first : first + width]
        by_copy = block.lse.ndim == 3
        if by_copy:
            block.smem["lse"][wg] = softmax.log_sum_exp()
        plgpu.commit_smem()  # TMA sees what was written
        start = at.batch * p.q_tokens
        for place, first, width in places:
            row, end = start + at.token, start + p.q_tokens
            column = columns_of(block.out, p.q_heads, at.head, p.v_dim, first)
            store_rows(place, block.out, row, end, column, p.v_dim % width != 0)
        if by_copy:
            plgpu.copy_smem_to_gmem(block.smem["lse"].at[wg], block.lse.at[at.batch, at.head, pl.ds(at.token, ROWS)])
        else:
            token = at.token + plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW)
            place = (at.batch * p.q_heads + at.head) * p.q_tokens + token
            store_scattered(softmax.log_sum_exp(), block.lse, jnp.where(token < p.q_tokens, place, -1))


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel on q, k, v and `Inputs.arrays()`.

    Returns the output, and for each row the logarithm of its sum of exponentials [batch, q_heads, q_tokens], float32,
    +inf where the row sees nothing, so that e^(score - it) is 0.
    """
    v_dim, d, v_d = p.v_dim, rounded(p.head_dim), rounded_values(p.head_dim, p.v_dim)
    p = dataclasses.replace(p, head_dim=d, v_head_dim=v_d if v_d < d else 0)
    q, k, v = (with_room(x, to) for x, to in zip(arrays[:3], (d, d, v_d), strict=True))
    tile_q, stages, consumers = ROWS * c.compute_warpgroups, c.max_concurrent_steps, c.compute_warpgroups
    tiles, copies = math.ceil(p.q_tokens / tile_q), len(panels(parts(d)))
    blocks = _thread_blocks(p, c, output_tiles(p, c), gpu)
    bias_stages = bias_steps(p, c, gpu)
    bias_parts = consumers if bias_stages == 1 else 1  # `_ThreadBlock.splits_bias`
    bias_barriers = Pipeline.barriers(bias_stages * bias_parts, copies=1, consumers=consumers // bias_parts)
    optional, smem = optional_refs(Inputs.of(p, arrays[3:]), "kv", tile_q, c.tile_kv, stages, bias_stages)

    def body(refs: _Refs, outputs: tuple[Any, ...], scratch: Scratch) -> None:
        block = _ThreadBlock.of(p, c, refs, outputs, scratch)
        consumer = functools.partial(scratch.accumulators.scope, functools.partial(_Consumer.run, block))
        specialize(block.producer, consumer, consumers, c, gpu)

    spec = BlockSpec(
        consumers=consumers,
        accumulators=((ROWS, c.tile_kv), (ROWS, v_d)),
        smem={
            **{part.name("q"): in_panels(part, (c.q_slots,), tile_q, p.dtype) for part in parts(d)},
            **{part.name("k"): in_panels(part, (stages,), c.tile_kv, p.dtype) for part in parts(d)},
            "v": in_rows(whole(v_d), (stages, c.tile_kv), p.dtype),
            "lse": plgpu.SMEM((consumers, ROWS), jnp.float32),
            "numbers": plgpu.SMEM((consumers, c.tile_kv), jnp.int32),
            **smem,
        },
        barriers={
            "q": Pipeline.barriers(c.q_slots, copies=copies, consumers=consumers),
            "k": Pipeline.barriers(stages, copies=copies + ("segments" in smem), consumers=consumers),
            "v": Pipeline.barriers(stages, copies=1, consumers=consumers),
            **({"bias": bias_barriers} if "bias" in smem else {}),
        },
    )
    # Where each thread block has one output tile, none reads a schedule.
    schedule = None if output_tiles(p, c) <= blocks else _schedule(p, c, blocks, comes_in_rounds(gpu, blocks))
    if schedule is not None and optional.share_bias:
        schedule = tile_scheduler.entries_together(schedule, tiles, p.batch, p.q_heads, p.q_heads // p.kv_heads)
    refs = _Refs(schedule, as_rows(q), as_rows(k), as_blocks(v, c.tile_kv, p), optional)
    out_like = jax.ShapeDtypeStruct((*q.shape[:3], v_dim if has_room(p.q_heads, v_dim) else v_d), q.dtype)
    # A copy ends where a tile does; where tokens do not, each row is stored by itself.
    rows = p.batch, p.q_heads, p.q_tokens
    lse_like = jax.ShapeDtypeStruct(rows if p.q_tokens % tile_q == 0 else (math.prod(rows),), jnp.float32)
    out, lse = run(
        body,
        "mgpu_ops_flash_attention",
        blocks if schedule is None else len(schedule),
        spec,
        refs,
        (rows_like(out_like), lse_like),
        interpret,
    )
    return out.reshape(out_like.shape)[..., :v_dim], lse.reshape(rows)
