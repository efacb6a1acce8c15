"""The forward kernel of attention for few query tokens and many keys: decoding, and checking drafted tokens.

What takes the time is to read the keys and values once from memory, so that they are read once for all query heads that share
them, and by as many thread blocks as there is room for:

- *Packed rows.* The 64 rows of a tile are pairs of a query token and a query head of the group: row t * group + g. The tensor
  cores would multiply 64 rows anyway.
- *Split keys.* The kv blocks that a tile sees are dealt to `kv_splits` thread blocks in turn (`_Share`). Those of a
  cluster then send each other columns of their outputs through distributed shared memory (`cluster.ClusterColumns`), and each
  stores its columns of the sum: there is no second pass over memory. Several clusters write an output each, a few rows, which a
  second kernel adds up (`add_up`): XLA takes two for it.
- *Heads together.* With `kv_heads_per_tile` a tile has the keys of all heads, as they lie in memory: 64 rows are 8 tokens of 8
  heads. All query heads are rows of it, and each sees the keys of its own head: weights of the others are 0. The products are
  the same, as a tile of 64 rows has room for 64 query heads. The kernel then takes [kv_tokens, kv_heads] for the tokens of one
  head (`problem.as_loaded`); masks are still of tokens. A NaN or infinite value of one head makes NaN of all, as 0 times it is.
- *Pages.* A thread block first copies its share of the table of pages to shared memory. Each tile of keys (and of values) is
  then loaded by a copy for each of its pages, or for its part of one; all else is as without pages.
- *Keys and values of 8 bits* are half of the bytes to read. All threads write a tile to shared memory once more, as float16,
  which holds each of them exactly. Weights are float16 then too, and queries, which are rounded where they have arrived. Scales
  of heads are applied to scores and output.
- A thread block is one warpgroup, which starts its own copies as soon as a stage is read. Two or more blocks fit on an SM:
  while one waits or takes exponentials, another loads.

Weights, masks and online softmax are those of `forward.py`.
Sources: Flash-Decoding (Dao et al., 2023, crfm.stanford.edu/2023/10/12/flashdecoding.html); PTX ISA ("st.async", wgmma).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.decode_sum import COLUMNS, add_up, finished, merged
from mgpu_ops.attention.heads import PANEL, Part, panels, parts, rounded, rounded_values, whole
from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.launch import as_blocks, as_rows, in_panels, in_rows, pad_head
from mgpu_ops.attention.layouts import PER_COLUMN, PER_ROW, along_columns, along_rows, load_per_row, load_tile, opaque
from mgpu_ops.attention.mask import BlockRange, MaskTerms
from mgpu_ops.attention.operands import Operands, OptionalRefs, Position
from mgpu_ops.attention.problem import (
    PAGE_INDICES_COPIED,
    ROWS,
    Config,
    Problem,
    as_loaded,
    page_indices,
    split_stages,
    stored_columns,
)
from mgpu_ops.attention.softmax import OnlineSoftmax, Scores
from mgpu_ops.core import engine
from mgpu_ops.core.cluster import ClusterColumns, Exchange
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.rows import Pages, load_columns, load_pages, load_rows, load_scattered, rows_view, store_scattered
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.core.upcast import widen


def _rounds_queries(p: Problem) -> bool:
    """Whether the kernel rounds queries to float16."""
    return p.eight_bits and p.dtype == "bfloat16"


def _knows_first(p: Problem) -> bool:
    """Whether a thread block knows its first keys without the lengths, which take a microsecond to come from memory.

    They may then lie beyond the entry's length, and are not used.
    """
    return p.lengths and p.left is None and not p.page_size


def _parts(p: Problem) -> tuple[Part, ...]:
    """Of a head of queries and keys. Copies from pages begin at multiples of a panel."""
    return (whole(p.head_dim),) if p.page_size or p.eight_bits else parts(p.head_dim)


def _copies(p: Problem) -> int:
    """How many copies bring a tile of queries, or of keys without pages: one where a panel's width divides what precedes."""
    return 1 if p.head_dim % PANEL == 0 else len(panels(_parts(p)))


def _load_queries(packing: _Packing, q: Any, at: Position, smem: dict[str, Any], full: Any) -> None:
    """Starts the copies of a tile's packed rows. Rows beyond the last arrive as zeros."""
    p = packing.problem
    start = (at.batch * p.kv_heads + at.head) * packing.rows
    row, end = start + at.token, start + packing.rows
    if _copies(p) == 1:
        load_rows(q, row, end, 0, smem["q"], full)
        return
    for part, panel in panels(_parts(p)):
        load_rows(q, row, end, part.column(panel), smem[part.name("q")].at[panel], full)


def _load_keys(p: Problem, k: Any, at: Position, smem: dict[str, Any], stage: Int, full: Any) -> None:
    """Starts the copies of a tile of keys. Those beyond the entry's length, whatever they hold, are masked."""
    start, first = at.batch * p.kv_tokens, at.head * p.head_dim
    row, end = start + at.token, start + p.kv_tokens
    if _copies(p) == 1:
        load_rows(k, row, end, first, smem["k"].at[stage], full)
        return
    for part, panel in panels(_parts(p)):
        dst = smem[part.name("k")].at[stage, panel]
        load_rows(k, row, end, first + part.column(panel), dst, full, part.anywhere)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class _Refs:
    """The arguments of the kernel: arrays outside of it, refs in global memory within."""

    q: Any  # packed rows, [batch * kv_heads * rows, head_dim] as `rows.load_rows` takes them
    k: Any
    v: Any
    optional: OptionalRefs


@dataclasses.dataclass(frozen=True)
class _Packing:
    """Which query token and head a packed row is, and which tile of which head of keys a thread block works on."""

    problem: Problem

    @property
    def group(self) -> int:
        return self.problem.q_heads // self.problem.kv_heads

    @property
    def rows(self) -> int:
        """Packed rows of a head of keys."""
        return self.problem.q_tokens * self.group

    @property
    def tiles(self) -> int:
        return math.ceil(self.rows / ROWS)

    @property
    def entries(self) -> int:
        """Tiles of all heads of keys of all batch entries."""
        return self.problem.batch * self.problem.kv_heads * self.tiles

    def position(self, entry: jax.Array) -> Position:
        """Batch entry, head of keys and first packed row of a tile. Tiles of one head are neighbours, then heads."""
        p = self.problem
        head, tile = lax.div(entry, jnp.int32(self.tiles)), lax.rem(entry, jnp.int32(self.tiles))
        return Position(lax.div(head, jnp.int32(p.kv_heads)), lax.rem(head, jnp.int32(p.kv_heads)), tile * ROWS)

    def row_numbers(self, at: Position) -> jax.Array:
        """The packed rows of a tile, [64]."""
        return plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW) + at.token

    def tokens(self, rows: jax.Array) -> jax.Array:
        """The query tokens of packed rows."""
        return rows if self.group == 1 else lax.div(rows, jnp.full_like(rows, self.group))

    def token_range(self, at: Position) -> tuple[jax.Array, jax.Array]:
        """The first query token of a tile, and how many it has."""
        first = lax.div(at.token, jnp.int32(self.group))
        last = lax.div(jnp.minimum(at.token + ROWS, self.rows) - 1, jnp.int32(self.group))
        return first, last - first + 1


@dataclasses.dataclass(frozen=True)
class _Share:
    """The kv blocks of one of several thread blocks: `origin + n * stride` for n of `blocks`, of which there may be none.

    It visits those without a mask first, upwards from the first one. They are dealt in turn: which one is the first does not
    depend on lengths then. With pages they are a run: their entries of the table of pages then are one too.
    """

    blocks: BlockRange
    origin: Int
    stride: int

    @staticmethod
    def of(seen: BlockRange, mine: Any, shares: int, run: bool) -> _Share:
        if not run:
            numbers = (lax.div(block - mine + (shares - 1), jnp.int32(shares)) for block in seen)
            return _Share(BlockRange(*numbers), mine, shares)
        count = seen.end - seen.first
        first, end = (seen.first + lax.div(count * n, jnp.int32(shares)) for n in (mine, mine + 1))
        whole = jnp.clip(seen.whole, first, end)
        return _Share(BlockRange(first, whole, jnp.clip(seen.whole_end, whole, end), end), 0, 1)

    @property
    def unmasked(self) -> Any:
        return self.blocks.whole_end - self.blocks.whole

    def kv_block(self, step: Int) -> jax.Array:
        """Of a step: those without a mask, those behind them, those before."""
        first, whole, _, end = self.blocks
        number = whole + step
        return self.origin + jnp.where(number < end, number, number - end + first) * self.stride


@dataclasses.dataclass(frozen=True)
class _ThreadBlock:
    """One thread block: a tile of packed rows, and its share of the kv blocks."""

    p: Problem  # `as_loaded`
    seen: Problem  # as the caller has it
    c: Config
    packing: _Packing
    x: Operands
    at: Position  # batch entry, head of keys and first packed row of the tile
    part: jax.Array  # which cluster of those that share the tile
    share: _Share  # which kv blocks are this thread block's
    terms: MaskTerms
    factor: jax.Array  # of scores: scale or soft cap, times log2(e)
    smem: dict[str, Any]
    full: dict[str, Any]  # barriers: one for q, one for each stage of k and of v
    s_acc: Any
    o_acc: Any

    @staticmethod
    def of(
        seen: Problem, c: Config, x: Operands, smem: dict[str, Any], full: dict[str, Any], accs: Sequence[Any]
    ) -> _ThreadBlock:
        p = x.problem
        packing = _Packing(p)
        number = lax.axis_index("block")
        part, entry = lax.div(number, jnp.int32(packing.entries)), lax.rem(number, jnp.int32(packing.entries))
        at, mine = packing.position(entry), part * c.kv_cluster + lax.axis_index("split")
        if _knows_first(p):
            _load_keys(p, x.k, Position(at.batch, at.head, mine * c.tile_kv), smem, 0, full["k"].at[0])
        _load_queries(packing, x.q, at, smem, full["q"])
        terms = dataclasses.replace(x, problem=seen).mask_terms(at.batch)
        share = _Share.of(terms.kv_range(*packing.token_range(at), c.tile_tokens), mine, c.kv_splits, p.page_size > 0)
        factor = x.inputs.options[1 if p.soft_cap else 0] * LOG2E
        if p.eight_bits and not p.soft_cap:
            factor *= x.kv_scale("k", at)
        return _ThreadBlock(p, seen, c, packing, x, at, part, share, terms, factor, smem, full, *accs)

    # --- Pages

    def load_page_table(self) -> None:
        """Copies this thread block's share of the table of pages to shared memory, and waits for it."""
        table, dst = self.x.inputs.page_table, self.smem["page_table"]
        for i in range(dst.shape[0]):
            entries = table.at[0, pl.ds(self._first_entry + i * dst.shape[1], dst.shape[1])]
            engine.copy_gmem_to_smem(entries, dst.at[i], self.full["page_table"])
        plgpu.barrier_wait(self.full["page_table"])

    @property
    def _first_entry(self) -> jax.Array:
        """The first entry of the flat table that is copied, at whole 16 bytes: of this block's first key, or before."""
        first = lax.div(self.share.blocks.first * self.c.tile_kv, jnp.int32(self.p.page_size))
        room = self.x.inputs.page_table.shape[1] - math.prod(self.smem["page_table"].shape)
        return jnp.minimum(lax.div(self.at.batch * self._pages + first, jnp.int32(4)) * 4, room)

    @property
    def _pages(self) -> int:
        """Entries of the table for a sequence."""
        return self.p.kv_tokens // self.p.page_size

    def _load_pages(self, what: Literal["k", "v"], stage: jax.Array, token: Int) -> None:
        """Starts the copies of a tile from its pages. Rows behind the entry's length arrive as zeros, and are not read."""
        size, full = jnp.int32(self.p.page_size), self.full[what].at[stage]
        entry = self.at.batch * self._pages + lax.div(jnp.int32(token), size) - self._first_entry
        count = jnp.clip(self.terms.kv_end - token, 0, self.c.tile_kv)  # rows of the tile

        def load(src: Any, column: Int, dst: Any) -> None:
            if self.p.page_size < self.c.tile_kv:
                load_pages(src, Pages(self.smem["page_table"], entry, self.p.page_size), count, column, dst, full)
            else:
                row = self._page(src, entry) * size + lax.rem(jnp.int32(token), size)
                load_rows(src, row, row + count, column, dst, full)

        if what == "v":
            load(self.x.v, self.at.head * self.p.v_dim, self.smem["v"].at[stage])
            return
        first = self.at.head * self.p.head_dim
        if self.p.eight_bits:
            load(self.x.k, first, self.smem["k"].at[stage])
            return
        for part, panel in panels(_parts(self.p)):
            load(self.x.k, first + part.column(panel), self.smem["k"].at[stage, panel])

    def _page(self, pool: Any, entry: jax.Array) -> jax.Array:
        """The page that an entry of the copied table names, the nearest where it names none."""
        table = self.smem["page_table"]
        page = table[lax.div(entry, jnp.int32(table.shape[1])), lax.rem(entry, jnp.int32(table.shape[1]))]
        return jnp.clip(page, 0, pool.shape[2] // self.p.page_size - 1)

    # --- Copies

    def load_first(self) -> None:
        """Starts the copies of as many keys and values as there are stages, but of keys that have started."""
        k_stages, v_stages = split_stages(self.c)

        def load(step: jax.Array, _: None) -> None:
            pl.when(step >= int(_knows_first(self.p)))(lambda: self._load("k", step))
            pl.when(step < v_stages)(lambda: self._load("v", step))

        lax.fori_loop(0, jnp.minimum(self.steps, k_stages), load, None)

    def _load(self, what: Literal["k", "v"], step: jax.Array) -> None:
        stage, token = self._stage(what, step), self.share.kv_block(step) * self.c.tile_kv
        first, full = self.at._replace(token=token), self.full[what].at[stage]
        if self.p.page_size:
            self._load_pages(what, stage, first.token)
        elif what == "k":
            _load_keys(self.p, self.x.k, first, self.smem, stage, full)
        elif self.p.lengths:
            start, column = self.at.batch * self.p.kv_tokens, self.at.head * self.p.v_dim
            end = start + self.terms.kv_end * self.c.kv_heads_per_tile
            load_rows(self.x.v, start + first.token, end, column, self.smem["v"].at[stage], full)
        else:
            self.x.load_block(self.x.v, "kv", first, self.smem["v"].at[stage], full)

    def _refill(self, what: Literal["k", "v"], step: jax.Array) -> None:
        """Starts a copy to the stage that `step` was the last to read."""
        engine.warpgroup_barrier()  # each warp has waited for its own part of the product only
        following = step + self._stages(what)
        pl.when(following < self.steps)(lambda: self._load(what, following))

    def _stages(self, what: Literal["k", "v"]) -> int:
        return split_stages(self.c)[0 if what == "k" else 1]

    def _stage(self, what: Literal["k", "v"], step: jax.Array) -> jax.Array:
        return lax.rem(step, jnp.int32(self._stages(what)))

    @property
    def steps(self) -> Any:
        return self.share.blocks.end - self.share.blocks.first

    # --- The loop over kv blocks

    def attend(self) -> OnlineSoftmax:
        """Adds the weights times values of all kv blocks to the output; returns row max and row sum."""
        plgpu.barrier_wait(self.full["q"])
        if _rounds_queries(self.p):
            self._round_queries()
        masks = self._masks
        softmax, unmasked = OnlineSoftmax.start(), 0
        if not masks or self.p.bias == "none":  # beside a bias there are no registers for two loops
            unmasked = self.share.unmasked if masks else self.steps
            softmax = lax.fori_loop(0, unmasked, functools.partial(self._step, False), softmax)
        if masks:
            # ptxas serializes products where it sees that this is one step at most.
            softmax = lax.fori_loop(unmasked, engine.opaque(self.steps), functools.partial(self._step, True), softmax)
        if _knows_first(self.p):  # no copy outlives the block
            pl.when(self.steps == 0)(lambda: plgpu.barrier_wait(self.full["k"].at[0]))
        return softmax

    @property
    def _masks(self) -> bool:
        """Whether some tile needs a mask. Where a bias ends with the keys, it hides what lies behind them (`load_columns`)."""
        p = self.seen
        return p.masks(self.c.tile_tokens) and (p.bias == "none" or p.left is not None or p.right is not None or p.lengths)

    def _round_queries(self) -> None:
        """Queries, which came as the bits of bfloat16, become float16: XLA would take a kernel for it."""
        for panel in range(self.p.head_dim // PANEL):
            ref = self.smem["q"].at[panel]
            bits = plgpu.load(ref, layout=plgpu.Layout.WGMMA)
            ref[...] = lax.bitcast_convert_type(bits, jnp.bfloat16).astype(jnp.float16)
        plgpu.commit_smem()

    def _step(self, masked: bool, step: jax.Array, softmax: OnlineSoftmax) -> OnlineSoftmax:
        k_stage, v_stage = opaque(self._stage("k", step)), opaque(self._stage("v", step))
        # 1. Scores.
        self._wait("k", k_stage, step)
        self.s_acc[...] = jnp.zeros(self.s_acc.shape, jnp.float32)
        for part, panel in panels(_parts(self.p)):
            queries = self.smem[part.name("q")].at[panel]
            engine.wgmma(self.s_acc, queries, engine.transpose_ref(self._keys(k_stage, part, panel)))
        bias = self._bias(step) if self.p.bias != "none" else None  # on its way beside the product
        s = engine.accumulated(self.s_acc, 0)
        self._release("k", step)
        # 2. Weights.
        scores = self._scores(s, bias, step, masked)
        weights, softmax, rescale = softmax.update(scores, self.smem["q"].dtype)
        self.o_acc[...] = engine.accumulated(self.o_acc, 0) * along_rows(rescale, self.o_acc.shape)
        # 3. Weights times values.
        self._wait("v", v_stage, step)
        if bias is not None:
            self._zero_unseen(scores.values, v_stage)
        engine.wgmma(self.o_acc, weights, self.smem["wide"] if self.p.eight_bits else self.smem["v"].at[v_stage])
        engine.wgmma_wait(0)
        self._release("v", step)
        return softmax

    def _zero_unseen(self, scores: jax.Array, stage: jax.Array) -> None:
        """Writes zeros over the values of keys that none of the tile's rows sees: a weight of 0 times NaN would be NaN."""
        largest, seen = jnp.max(scores, axis=0), self.smem["seen"]
        seen[...] = largest
        engine.warpgroup_barrier()

        @pl.when(jnp.min(largest) == -jnp.inf)
        def write() -> None:
            part = whole(self.p.v_dim)
            for first in range(0, self.c.tile_kv, ROWS):
                unseen = load_per_row(seen.at[pl.ds(first, ROWS)]) == -jnp.inf
                for panel in range(part.panels):  # registers are scarce
                    values = self.smem["v"].at[stage, pl.ds(first, ROWS), pl.ds(part.column(panel), part.panel)]
                    tile = load_tile(values)
                    values[...] = jnp.where(along_rows(unseen, tile.shape), jnp.zeros((), tile.dtype), tile)
            plgpu.commit_smem()

    def _wait(self, what: Literal["k", "v"], stage: jax.Array, step: jax.Array) -> None:
        """Waits for a tile. One of 8 bits is written to where it is multiplied, as float16, and its stage filled again."""
        plgpu.barrier_wait(self.full[what].at[stage])
        if self.p.eight_bits:
            engine.warpgroup_barrier()  # each warp has waited for its own part of the last product from there
            widen(self.smem[what].at[stage], self.smem["wide"])
            plgpu.commit_smem()
            self._refill(what, step)

    def _release(self, what: Literal["k", "v"], step: jax.Array) -> None:
        """Fills the stage of a tile that was multiplied again, if it was multiplied from there."""
        if not self.p.eight_bits:
            self._refill(what, step)

    def _keys(self, stage: jax.Array, part: Part, panel: int) -> Any:
        """A panel of a tile of keys, as it is multiplied."""
        if self.p.eight_bits:
            return self.smem["wide"].at[:, pl.ds(panel * PANEL, PANEL)]
        return self.smem[part.name("k")].at[stage, panel]

    def _bias(self, step: jax.Array) -> jax.Array:
        """Of the tile of a step: each row's part of a row of the bias, which is read where it lies."""
        p, (batch, heads) = self.p, self.x.optional.bias_shape
        token, head = self._indices(jnp.minimum(self.packing.row_numbers(self.at), self.packing.rows - 1))
        row = (self.at.batch if batch > 1 else 0) * heads * p.q_tokens + token + (head * p.q_tokens if heads > 1 else 0)
        first = self.share.kv_block(step) * self.c.tile_kv
        even = p.kv_tokens % 2 == 0
        return load_columns(self.x.inputs.bias, row * p.kv_tokens + first, self.c.tile_kv, p.kv_tokens - first, even)

    def _scores(self, s: jax.Array, bias: jax.Array | None, step: jax.Array, masked: bool) -> Scores:
        p = self.p
        factor: Any = self.factor
        bias = None if bias is None else bias.astype(jnp.float32)  # not before: registers are scarce
        if p.soft_cap and p.eight_bits:
            s = s * self.x.kv_scale("k", self.at)
        if bias is not None and p.soft_cap_after_bias:
            s = self.x.capped(s, bias)
        elif p.soft_cap:
            s = self.x.capped(s)
        if bias is not None and not p.soft_cap_after_bias:  # not yet times log2(e): that is part of the exponentials' arguments
            s, factor = s * (factor * (1 / LOG2E)) + bias, LOG2E
        if bias is not None:  # also of NaN
            s = jnp.where(bias == -jnp.inf, -jnp.inf, s)
        if self.c.kv_heads_per_tile > 1:
            s = jnp.where(self._own_head(s.shape), s, -jnp.inf)
        if masked:
            s = jnp.where(self._sees(step, s.shape), s, -jnp.inf)
        return Scores(s, factor)

    def _sees(self, step: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        """Which rows see which keys of a kv block, if they are of their head."""
        heads = self.c.kv_heads_per_tile
        keys = plgpu.broadcasted_iota(jnp.int32, (shape[1],), 0, layout=PER_COLUMN)
        if heads > 1:
            keys = lax.shift_right_logical(keys, jnp.full_like(keys, heads.bit_length() - 1))
        keys += self.share.kv_block(step) * self.c.tile_tokens
        rows: Any = 0
        if self.p.q_tokens > 1 and self.terms.bounds() != (None, None):
            rows = along_rows(self.packing.tokens(self.packing.row_numbers(self.at)), shape)
        return self.terms.sees(rows, along_columns(keys, shape))

    def _own_head(self, shape: tuple[int, ...]) -> jax.Array:
        """Which rows are of the head of which row of keys, of all heads in turn."""
        heads, rows = self.c.kv_heads_per_tile, self.packing.row_numbers(self.at)
        _, q_head = self._indices(rows)
        of_row = lax.div(q_head, jnp.full_like(q_head, self.seen.q_heads // self.seen.kv_heads))
        columns = plgpu.broadcasted_iota(jnp.int32, (shape[1],), 0, layout=PER_COLUMN)
        of_column = columns & jnp.full_like(columns, heads - 1)
        return along_rows(of_row, shape) == along_columns(of_column, shape)

    # --- The way out

    def store(self, softmax: OnlineSoftmax, exchange: Exchange, out: Any, log_sums: Any) -> None:
        """Adds up the outputs of the cluster, and stores this thread block's columns of the sum."""
        rows = self.packing.row_numbers(self.at)
        if self.p.lengths:  # query tokens from there on are padding
            padding = self.packing.tokens(rows) >= self.terms.q_end
            softmax = OnlineSoftmax(softmax.row_max, jnp.where(padding, 0.0, softmax.row_sum))
        scale = self.x.kv_scale("v", self.at) if self.p.eight_bits else None
        partial = softmax.normalise(engine.accumulated(self.o_acc, 0), some_see_nothing=True, rescale=scale)
        lse = jnp.where(softmax.row_sum == 0, -jnp.inf, softmax.row_max + jnp.log2(softmax.row_sum))
        parts = exchange(partial, lse)
        total, log_sum = merged(parts)
        if self.c.kv_cluster == self.c.kv_splits:  # else there are other parts to come
            sinks = self._sinks(rows) if self.p.sinks else None
            total, log_sum = finished(total, log_sum, sinks)
        at, split = self._offsets(rows), lax.axis_index("split")
        first, columns = split * total.shape[1], _columns(self.p, self.c)

        def store_columns() -> None:
            store_scattered(total.astype(out.dtype), out, jnp.where(at < 0, at, at * columns + first))

        if total.shape[1] * self.c.kv_cluster > self.p.v_dim:  # blocks without columns
            pl.when(first < self.p.v_dim)(store_columns)
        else:
            store_columns()
        by_head = jnp.where(at < 0, at, self._lse_offsets(rows))
        pl.when(split == 0)(lambda: store_scattered(log_sum, log_sums, by_head))

    def _sinks(self, rows: jax.Array) -> jax.Array:
        """Of the heads of packed rows; of those beyond the last, that of the last."""
        p, (_, head) = self.p, self._indices(jnp.minimum(rows, self.packing.rows - 1))
        sinks = self.x.inputs.sinks
        entry = self.at.batch if sinks.shape[0] > p.q_heads else 0
        return load_scattered(sinks, entry * p.q_heads + head)

    def _offsets(self, rows: jax.Array) -> jax.Array:
        """Which row of [parts, batch, q_tokens, q_heads] a packed row is; -1 for none."""
        p, (token, head) = self.p, self._indices(rows)
        entry = self.part * p.batch + self.at.batch
        return jnp.where(rows < self.packing.rows, (entry * p.q_tokens + token) * p.q_heads + head, -1)

    def _lse_offsets(self, rows: jax.Array) -> jax.Array:
        """Which row of [parts, batch, q_heads, q_tokens]."""
        p, (token, head) = self.p, self._indices(rows)
        entry = self.part * p.batch + self.at.batch
        return (entry * p.q_heads + head) * p.q_tokens + token

    def _indices(self, rows: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Query token and query head of packed rows."""
        token = self.packing.tokens(rows)
        return token, self.at.head * self.packing.group + rows - token * self.packing.group


# Keys of a block of a cluster, from which whole lines cost heads whose rows begin within one 4 % in the mean of six
# measurements; elsewhere they gain (docs/kernels/flash_attention.md).
_LONG_SHARE = 8192


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, jax.Array]:
    """Runs the kernel, as `forward.launch`."""
    del gpu
    v_dim, d, v_d = p.v_dim, rounded(p.head_dim), rounded_values(p.head_dim, p.v_dim)
    p = dataclasses.replace(_without_needless_bounds(p), head_dim=d, v_head_dim=v_d if v_d < d else 0)
    q, k, v = (pad_head(x, to) for x, to in zip(arrays[:3], (d, d, v_d), strict=True))
    seen, p = p, as_loaded(p, c)
    packing, clusters, columns = _Packing(p), c.kv_splits // c.kv_cluster, _columns(p, c)
    if p is not seen:
        k, v = (x.reshape(x.shape[0], -1, 1, x.shape[3]) for x in (k, v))
    inputs = Inputs.of(seen, arrays[3:])
    if p.sinks:
        inputs = dataclasses.replace(inputs, sinks=inputs.sinks.reshape(-1))
    if p.page_size:
        inputs = dataclasses.replace(inputs, page_table=_flat_table(inputs.page_table, page_indices(p, c)))
    if p.eight_bits:
        q = lax.bitcast_convert_type(q, jnp.float16) if _rounds_queries(p) else q.astype(jnp.float16)
        inputs = dataclasses.replace(inputs, kv_scales=tuple(x.reshape(-1) for x in inputs.kv_scales))
    if p.lengths:  # one array, which XLA makes in one kernel where they are computed
        inputs = dataclasses.replace(inputs, lengths=jnp.stack(inputs.lengths))
    bias_shape = (1, 1)
    if p.bias != "none":
        bias_shape = inputs.bias.shape[:2]
        inputs = dataclasses.replace(inputs, bias=inputs.bias.reshape(-1))
    optional = OptionalRefs(inputs, None, bias_shape)
    packed = q.reshape(p.batch, p.q_tokens, p.kv_heads, packing.group, p.head_dim).transpose(0, 2, 1, 3, 4)
    values = as_rows(v) if p.page_size else as_blocks(v, c.tile_kv, p)
    refs = _Refs(rows_view(packed.reshape(-1, p.head_dim)), as_rows(k), values, optional)
    flat, tree = jax.tree.flatten(refs)

    def body(*given: Any, accumulators: Any, memory: Any, barriers: dict[str, Any], **smem: Any) -> None:
        of, (out, lse) = jax.tree.unflatten(tree, given[: len(flat)]), given[len(flat) :]
        if c.kv_cluster == 1 or c.kv_heads_per_tile > 1 or p.kv_tokens < _LONG_SHARE * c.kv_splits:
            engine.load_whole_lines(of.k, columns=p.head_dim)
            engine.load_whole_lines(of.v, columns=p.v_dim)
        given_inputs = of.optional.inputs
        if p.lengths:
            lengths = given_inputs.lengths
            given_inputs = dataclasses.replace(given_inputs, lengths=(lengths.at[0], lengths.at[1]))
        x = Operands(p, of.q, of.k, of.v, dataclasses.replace(of.optional, inputs=given_inputs))

        def run(*accs: Any) -> None:
            block = _ThreadBlock.of(seen, c, x, {**smem, **memory.before}, barriers, accs)
            if p.page_size:
                block.load_page_table()
            block.load_first()
            block.store(block.attend(), memory.exchange, out, lse)

        accumulators.scope(run)

    rows = p.batch * p.q_tokens * p.q_heads
    out, lse = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_flash_decoding",
            {"block": clusters * packing.entries},
            warpgroups=1,
            cluster={"split": c.kv_cluster},
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(
            jax.ShapeDtypeStruct((rows * columns,), p.dtype)
            if clusters == 1
            else jax.ShapeDtypeStruct((clusters * rows * columns + COLUMNS,), jnp.float32),
            jax.ShapeDtypeStruct((clusters * rows,), jnp.float32),
        ),
        scratch_types=_scratch(p, c),
    )(*flat)
    if clusters > 1:
        out, lse = add_up(p, clusters, out, lse, inputs.sinks if p.sinks else None, interpret)
    out = out[: rows * columns].reshape(p.batch, p.q_tokens, p.q_heads, columns)
    return out[..., :v_dim], lse.reshape(p.batch, p.q_heads, p.q_tokens)


def _columns(p: Problem, c: Config) -> int:
    """Columns of a row of what thread blocks store: those of an output, or of what is to be added up."""
    return p.v_dim if c.kv_cluster == c.kv_splits else stored_columns(p.v_dim)


def _scratch(p: Problem, c: Config) -> dict[str, Any]:
    (k_stages, v_stages), head = split_stages(c), _parts(p)
    dtype = jnp.float16 if p.eight_bits else p.dtype  # of what is multiplied
    if p.eight_bits:
        stored = {what: _in_rows((n, c.tile_kv, p.head_dim), p.kv_dtype) for what, n in (("k", k_stages), ("v", v_stages))}
        stored["wide"] = _in_rows((c.tile_kv, p.head_dim), dtype)
    else:
        stored = {part.name("k"): in_panels(part, (k_stages,), c.tile_kv, dtype) for part in head}
        stored["v"] = in_rows(whole(p.v_dim), (v_stages, c.tile_kv), dtype)
    indices = page_indices(p, c)
    chunk = min(indices, PAGE_INDICES_COPIED)
    table = {"page_table": plgpu.SMEM((indices // chunk, chunk), jnp.int32)} if indices else {}
    return {
        "accumulators": engine.Accumulators(((ROWS, c.tile_kv), (ROWS, p.v_dim)), 1),
        "memory": ClusterColumns(p.v_dim, min(ROWS, _Packing(p).rows), c.kv_cluster, "split", stored),
        **{part.name("q"): in_panels(part, (), ROWS, dtype) for part in head},
        "barriers": {
            "q": plgpu.Barrier(num_arrivals=_copies(p)),
            "k": plgpu.Barrier(
                num_arrivals=len(panels(head)) if p.page_size and not p.eight_bits else _copies(p), num_barriers=k_stages
            ),
            "v": plgpu.Barrier(num_barriers=v_stages),
            **({"page_table": plgpu.Barrier(num_arrivals=indices // chunk)} if indices else {}),
        },
        **table,
        **({"seen": plgpu.SMEM((c.tile_kv,), jnp.float32)} if p.bias != "none" else {}),
    }


def _in_rows(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles of whole rows, with the widest swizzle."""
    return plgpu.SMEM(shape, dtype, transforms=engine.operand_transforms(shape[-1], dtype))


def _flat_table(table: jax.Array, indices: int) -> jax.Array:
    """The table of pages, [batch, pages of a sequence], as one row of no fewer entries than the `indices` of a thread block.

    TMA wants whole 16 bytes of it: where those are missing, XLA makes a copy of the table at each call.
    """
    size = max(-(-table.size // 4) * 4, indices)
    return jnp.pad(table.reshape(1, -1), ((0, 0), (0, size - table.size)))


def _without_needless_bounds(p: Problem) -> Problem:
    """The only query is aligned with the last key: no bound to the right hides anything from it."""
    alone = p.q_tokens == 1 and p.align == "bottom_right"
    return dataclasses.replace(p, causal=False, window_right=-1) if alone else p
