"""The arrays that a kernel of attention receives, and how a thread block finds its part of them; `launch.py` lays them out."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mgpu_ops.attention.heads import Part, whole
from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.layouts import load_tile
from mgpu_ops.attention.mask import BlockRange, MaskTerms
from mgpu_ops.attention.problem import Problem
from mgpu_ops.core import engine
from mgpu_ops.core.rows import OfHead, load_rows
from mgpu_ops.core.tile_scheduler import Int


class Position(NamedTuple):
    """Where a tile begins: batch entry, head (of queries, or of keys and values) and token."""

    batch: Int
    head: Int
    token: Int

    @staticmethod
    def of(number: jax.Array, tokens: int, heads: int, tile: int) -> Position:
        """Of a tile of `tile_scheduler.assign_heads`, whose heads are those of all batch entries."""
        tiles = jnp.int32(math.ceil(tokens / tile))
        head, own = lax.div(number, tiles), lax.rem(number, tiles)
        return Position(lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads)), own * tile)


def columns_of(rows: Any, heads: int, head: Int, head_dim: int, first: int = 0) -> Int | OfHead:
    """Where the columns of a head, from `first` on, lie in rows [..., heads * size], of which a kernel takes `head_dim`."""
    size = rows.shape[-1] // heads
    return head * size + first if size == head_dim else OfHead(head, first, size)


@dataclasses.dataclass(frozen=True)
class Stage:
    """A pipeline stage that the producer fills: the buffers in shared memory, the stage's number, and its full barrier."""

    smem: dict[str, Any]
    number: jax.Array
    full: Any

    def __getitem__(self, name: str) -> Any:
        return self.smem[name].at[self.number]


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OptionalRefs:
    """`Inputs` as a kernel takes them: arrays outside of the kernel, refs in global memory within."""

    inputs: Inputs  # segments padded to whole tiles, bias as rows
    segment_blocks: Any  # [batch, tiles, 2] of `launch.segment_blocks`, or None
    bias_shape: tuple[int, int] = dataclasses.field(metadata={"static": True})  # batch entries and heads of the bias

    @property
    def share_bias(self) -> bool:
        """Whether the entries of the batch have one bias."""
        return self.inputs.bias is not None and self.bias_shape[0] == 1


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class BackwardRefs:
    """What both backward kernels read: arrays outside of a kernel, refs in global memory within."""

    schedule: Any  # which thread block works on which tiles
    q: Any
    k: Any
    v: Any
    out_grad: Any
    lse: Any  # [batch, q_heads, rows]
    delta: Any  # likewise
    optional: OptionalRefs


@dataclasses.dataclass(frozen=True)
class Operands:
    """q, k, v and `Inputs` in global memory, as a thread block of a kernel sees them."""

    problem: Problem
    q: Any  # rows of [batch * q_tokens, q_heads * head_dim], as `rows.load_rows` takes them; heads may have fewer columns
    k: Any  # [batch * kv_tokens, kv_heads * head_dim], likewise
    v: Any
    optional: OptionalRefs
    group_splits: int = 1  # `problem` has this many heads of keys for each of the arrays

    @property
    def inputs(self) -> Inputs:
        return self.optional.inputs

    # --- Which blocks to visit

    def mask_terms(self, b: Int) -> MaskTerms:
        """Of batch entry b. Lengths beyond the arrays count as the nearest."""
        p = self.problem
        q_end: Any = p.q_tokens
        kv_end: Any = p.kv_tokens
        if self.inputs.lengths is not None:
            q_end, kv_end = (
                jnp.clip(ref[b], 0, tokens) for ref, tokens in zip(self.inputs.lengths, (p.q_tokens, p.kv_tokens), strict=True)
            )
        return MaskTerms.of(p, q_end, kv_end)

    def kv_range(self, b: Int, row: Int, rows: Int, tile_kv: int, terms: MaskTerms | None = None) -> BlockRange:
        """`MaskTerms.kv_range`, less the blocks at both ends in which no key shares a segment with one of the rows.

        terms: of batch entry b, where they have been read. To read lengths again takes a trip to the L1.
        """
        terms = self.mask_terms(b) if terms is None else terms
        return self._within_segments(b, row, rows, terms.kv_range(row, rows, tile_kv))

    def q_range(self, b: Int, key: Int, keys: int, tile_q: int) -> BlockRange:
        """`MaskTerms.q_range`, less the blocks at both ends in which no row shares a segment with one of the keys."""
        return self._within_segments(b, key, keys, self.mask_terms(b).q_range(key, keys, tile_q))

    def _within_segments(self, b: Int, token: Int, tokens: Int, blocks: BlockRange) -> BlockRange:
        shared = self.optional.segment_blocks
        if shared is None:
            return blocks
        own = lax.div(token, jnp.int32(tokens))
        first = jnp.minimum(jnp.maximum(blocks.first, shared[b, own, 0]), blocks.end - 1)
        end = jnp.maximum(jnp.minimum(blocks.end, shared[b, own, 1]), first + 1)
        whole = jnp.clip(blocks.whole, first, end)
        return BlockRange(first, whole, jnp.clip(blocks.whole_end, whole, end), end)

    # --- Copies to shared memory, which arrive at a full barrier when they are done

    def load_rows(
        self, src: Any, at: Position, dst: Any, full: Any, part: Part | None = None, terms: MaskTerms | None = None
    ) -> None:
        """Starts the copies of query rows of one head: dst is [panels, rows, panel], for a part of the head.

        part: the whole head by default. Rows beyond the end arrive as zeros, here and below, and so do those beyond a length:
        whatever the padding holds, be it NaN, counts as 0. terms: as for `kv_range`.
        """
        p, terms = self.problem, self.mask_terms(at.batch) if terms is None else terms
        self._load_panels(src, p.q_heads, at.batch * p.q_tokens, terms.q_end, at, dst, full, part)

    def load_keys(
        self, src: Any, at: Position, dst: Any, full: Any, part: Part | None = None, terms: MaskTerms | None = None
    ) -> None:
        """Starts the copies of keys or values of one of their heads: dst is [panels, keys, panel], or a whole head's rows."""
        p, terms = self.problem, self.mask_terms(at.batch) if terms is None else terms
        heads = p.kv_heads // self.group_splits
        self._load_panels(src, heads, at.batch * p.kv_tokens, terms.kv_end, at, dst, full, part)

    def _load_panels(
        self, src: Any, heads: int, start: Int, end: Int, at: Position, dst: Any, full: Any, part: Part | None
    ) -> None:
        part = whole(self.problem.head_dim) if part is None else part
        if len(dst.shape) == 2:
            load_rows(src, start + at.token, start + end, columns_of(src, heads, at.head, part.head_dim), dst, full)
            return
        for panel in range(dst.shape[0]):
            column = columns_of(src, heads, at.head, part.head_dim, part.column(panel))
            load_rows(src, start + at.token, start + end, column, dst.at[panel], full, part.anywhere)

    def load_block(
        self, src: Any, kind: Literal["q", "kv"], at: Position, dst: Any, full: Any, terms: MaskTerms | None = None
    ) -> None:
        """Starts the copy of a q block (or the gradient of one) or a kv block: dst is [tokens, columns of a head].

        A product with a whole row of them takes fewer instructions than with one of panels. src: see `launch.as_blocks`. terms:
        as for `kv_range`.
        """
        rows, d = dst.shape
        if src.shape[:2] != (1, 1):
            engine.copy_gmem_to_smem(src.at[at.batch, pl.ds(at.token, rows), at.head], dst, full)
            return
        p, terms = self.problem, self.mask_terms(at.batch) if terms is None else terms
        tokens, end, heads = (
            (p.q_tokens, terms.q_end, p.q_heads)
            if kind == "q"
            else (p.kv_tokens, terms.kv_end, p.kv_heads // self.group_splits)
        )
        load_rows(src, at.batch * tokens + at.token, at.batch * tokens + end, columns_of(src, heads, at.head, d), dst, full)

    def load_optional(self, kind: Literal["q", "kv"], own: Position, token: Int, stage: Stage) -> None:
        """Starts the copies of what a q block or kv block that begins at `token` has beside its tokens: segments and bias.

        own: the other side of the tile of scores, which the thread block keeps; its head is one of queries.
        """
        self.load_segments(kind, own, token, stage)
        if self.inputs.bias is not None:
            self.load_bias(own, token, stage["bias"], stage.full)

    def load_segments(self, kind: Literal["q", "kv"], own: Position, token: Int, stage: Stage) -> None:
        """Its segments, if there are any."""
        if self.inputs.segments is not None:
            dst = stage["segments"]
            ids = self.inputs.segments[0 if kind == "q" else 1].at[own.batch, pl.ds(token, dst.shape[0])]
            engine.copy_gmem_to_smem(ids, dst, stage.full)

    def load_bias(self, own: Position, column: Int, dst: Any, full: Any) -> None:
        """A tile of the bias, to a place of its own."""
        batch, heads = self.optional.bias_shape
        rows = self.inputs.bias.shape[2] // (batch * heads)
        start = ((own.batch if batch > 1 else 0) * heads + (own.head if heads > 1 else 0)) * rows
        load_rows(self.inputs.bias, start + own.token, start + rows, column, dst, full)

    def sink(self, b: Int, head: Int) -> jax.Array:
        """Of a query head of batch entry b."""
        sinks = self.inputs.sinks
        sink: jax.Array = sinks[b if sinks.shape[0] > 1 else 0, head]
        return sink

    def kv_scale(self, what: Literal["k", "v"], at: Position) -> jax.Array:
        """Of a head's keys or values of 8 bits. The arrays are flat: entries of the batch, or one for all, times heads."""
        scales, heads = self.inputs.kv_scales[0 if what == "k" else 1], self.problem.kv_heads
        scale: jax.Array = scales[(at.batch * heads if scales.shape[0] > heads else 0) + at.head]
        return scale

    # --- From products of queries and keys to scores

    def capped(self, s: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        """The hyperbolic tangent of a soft cap: tanh((s scale + bias) / cap), from an exponential accurate to float32."""
        x = s * (self.inputs.options[2] * (2 * LOG2E))
        if bias is not None:
            x += bias * (2 * LOG2E / self.inputs.options[1])
        return 1.0 - 2.0 / (jnp.exp2(x) + 1.0)

    def scores(self, s: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array | None]:
        """Products of queries and keys to scores times log2(e); and the slope of the soft cap there, or None without one.

        bias: its tile, in shared memory or in registers, or None.
        """
        slope = None
        if self.problem.soft_cap_after_bias:
            term = (bias if isinstance(bias, jax.Array) else load_tile(bias)).astype(jnp.float32)
            tanh = self.capped(s, term)
            s, slope = tanh * (self.inputs.options[1] * LOG2E), 1.0 - tanh * tanh
            return jnp.where(term == -jnp.inf, -jnp.inf, s), slope
        if self.problem.soft_cap:
            tanh = self.capped(s)
            s, slope = tanh * (self.inputs.options[1] * LOG2E), 1.0 - tanh * tanh
        else:
            s = s * (self.inputs.options[0] * LOG2E)
        return s if bias is None else s + load_tile(bias).astype(jnp.float32) * LOG2E, slope
