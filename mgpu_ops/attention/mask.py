"""Which keys a query row sees: as a boolean array, as ranges of kv and q blocks for the kernels, and as counts for the model.

A kv block is `tile_kv` keys with their values, a q block `tile_q` query rows. `score_mask.py` applies the mask to scores.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.problem import Problem
from mgpu_ops.core.tile_scheduler import Int, cdiv

FEW_PAIRS = 2**26  # an H200 asks 4 million in 6 us, and sorts and searches the ids of as many in 75

type Pair = tuple[jax.Array, jax.Array]  # of queries and of keys


class BlockRange(NamedTuple):
    """Blocks [first, end) hold every visible pair, and there is at least one; in [whole, whole_end) every pair is visible."""

    first: Int
    whole: Int
    whole_end: Int
    end: Int


@dataclasses.dataclass(frozen=True)
class MaskTerms:
    """What the mask of one batch entry depends on, segments and bias apart. All but `problem` may be traced int32."""

    problem: Problem
    q_end: Int  # query rows from here on are padding
    kv_end: Int  # keys from here on are padding
    offset: Int  # row t is aligned with key t + offset

    @staticmethod
    def of(problem: Problem, q_end: Int, kv_end: Int) -> MaskTerms:
        return MaskTerms(problem, q_end, kv_end, kv_end - q_end if problem.align == "bottom_right" else 0)

    def bounds(self) -> tuple[Int | None, Int | None]:
        """(low, high): row t sees key s where low <= s - t <= high. None: no bound."""
        left, right = self.problem.left, self.problem.right
        return None if left is None else self.offset - left, None if right is None else self.offset + right

    def kv_range(self, row: Int, rows: Int, tile_kv: int) -> BlockRange:
        """The kv blocks that the rows [row, row + rows) visit. Each of these rows sees all of a whole block."""
        low, high = self.bounds()
        last = jnp.minimum(row + rows, self.q_end) - 1
        end = self.kv_end if high is None else jnp.minimum(self.kv_end, last + high + 1)
        whole_end = self.kv_end if high is None else jnp.minimum(self.kv_end, row + high + 1)
        if self.problem.lengths:
            end = jnp.where(row < self.q_end, end, 0)  # rows that are all padding see nothing
        first = 0 if low is None else row + low
        whole = 0 if low is None else last + low
        return _blocks(BlockRange(first, whole, whole_end, end), tile_kv, self.problem.kv_tokens)

    def q_range(self, key: Int, keys: int, tile_q: int) -> BlockRange:
        """The q blocks that the keys [key, key + keys) visit. Each row of a whole block sees all of these keys."""
        low, high = self.bounds()
        last = jnp.minimum(key + keys, self.kv_end) - 1
        first = 0 if high is None else key - high
        whole = 0 if high is None else last - high
        end = self.q_end if low is None else jnp.minimum(self.q_end, last - low + 1)
        whole_end = self.q_end if low is None else jnp.minimum(self.q_end, key - low + 1)
        if self.problem.lengths:
            end = jnp.where(key < self.kv_end, end, 0)
        padded = key + keys > self.kv_end  # some keys are padding, so that every row needs a mask
        whole_end = jnp.where(padded, 0, whole_end)
        # Rows past the end add zeros to every sum, so that the last block needs no mask for them.
        whole_end = jnp.where(whole_end == self.q_end, cdiv(self.q_end, tile_q) * tile_q, whole_end)
        return _blocks(BlockRange(first, whole, whole_end, end), tile_q, self.problem.q_tokens)

    @property
    def last_key(self) -> Callable[[jax.Array], jax.Array] | None:
        """The last key that a row sees, as a function of rows, where it sees all keys up to there. Or None, also with segments:
        at head dim 192 their ids leave no registers for it.
        """
        low, high = self.bounds()
        if low is not None or high is None or self.problem.segments:
            return None
        return lambda row: jnp.minimum(row + high, self.kv_end - 1)

    def sees(self, row: jax.Array, key: jax.Array) -> jax.Array:
        """Whether each row sees each key, segments apart. row, key: int32 arrays that broadcast to one shape."""
        low, high = self.bounds()
        seen = key < self.kv_end
        if high is not None:
            seen &= key - row <= high
        if low is not None:
            seen &= key - row >= low
        return seen


@dataclasses.dataclass(frozen=True)
class BlockOrder:
    """The order in which the blocks of a `BlockRange` are visited: first those with a mask, at least one, then the others. Or
    none (`none_where`).

    Each list runs from the last block to the first, but for `start`. Two loops, one with a mask and one without, have no branch
    inside.
    """

    blocks: BlockRange  # in [whole, whole_end) no block is masked
    start: Int | None = None  # of those without a mask, which one is the first: they then run upwards and round to it

    @staticmethod
    def of(blocks: BlockRange) -> BlockOrder:
        """Where no block needs a mask, the last one is masked all the same: the first loop is never empty."""
        all_whole = (blocks.whole == blocks.first) & (blocks.whole_end == blocks.end)
        return BlockOrder(blocks._replace(whole_end=jnp.where(all_whole, blocks.end - 1, blocks.whole_end)))

    @staticmethod
    def all_masked(blocks: BlockRange) -> BlockOrder:
        """All of them masked, from the last to the first."""
        return BlockOrder(blocks._replace(whole=blocks.first, whole_end=blocks.first))

    def none_where(self, nothing: bool | jax.Array) -> BlockOrder:
        """No block at all where `nothing`."""
        first, whole, whole_end, end = self.blocks
        return BlockOrder(BlockRange(first, *(jnp.where(nothing, first, x) for x in (whole, whole_end, end))))

    @property
    def masked(self) -> Int:
        """The number of blocks with a mask."""
        return self.blocks.end - self.blocks.first - self.unmasked

    @property
    def unmasked(self) -> Int:
        """The number of blocks without one."""
        return self.blocks.whole_end - self.blocks.whole

    def unseen(self, own: BlockRange) -> Int:
        """How many of the first blocks with a mask hold nothing that some rows see, which visit `own`. One is left."""
        return jnp.clip(self.blocks.end - own.end, 0, self.masked - 1)

    def masked_block(self, i: Int) -> Int:
        """The i-th block with a mask: first those after the whole ones, then those before."""
        _, whole, whole_end, end = self.blocks
        return jnp.where(i < end - whole_end, end - 1 - i, whole - 1 - (i - (end - whole_end)))

    def unmasked_block(self, i: Int) -> Int:
        """The i-th block without a mask."""
        if self.start is None:
            return self.blocks.whole_end - 1 - i
        if isinstance(self.start, int):
            return self.blocks.whole + self.start + i
        i = i + self.start
        return self.blocks.whole + jnp.where(i >= self.unmasked, i - self.unmasked, i)

    def for_each(self, step: Callable[..., Any], carry: Any, *, masks: bool = True, members: Int = 1) -> Any:
        """carry = step(member, block, carry, masked) for the blocks with a mask, of each of `members` heads, then the others.

        masks: False where no block needs a mask (`Problem.masks`): then `masked` is False in the first loop too.
        """

        def loop(count: Any, block: Callable[[Any], Any], masked: bool, carry: Any) -> Any:
            def body(i: Any, carry: Any) -> Any:
                member, i = (jnp.int32(0), i) if is_one(members) else (lax.div(i, count), lax.rem(i, count))
                return step(member, block(i), carry, masked)

            return lax.fori_loop(0, count * members, body, carry)

        carry = loop(self.masked, self.masked_block, masks, carry)
        return loop(self.unmasked, self.unmasked_block, False, carry)


@dataclasses.dataclass(frozen=True)
class TurnOrder:
    """The order in which a kv block visits the q blocks of a `BlockRange`, where kv blocks take turns at adding to dq.

    They run upwards, and all heads of a group visit one before the next. The blocks from `masked` to `unmasked` in this order
    have no mask.
    """

    blocks: BlockRange
    start: Int | None  # which one is the first, round to which they run: where only keys that are padding need a mask
    # Whether the first ones, or the last ones, may have a mask.
    front: bool
    back: bool

    @property
    def count(self) -> Int:
        return self.blocks.end - self.blocks.first

    @property
    def masked(self) -> Int:
        return self.blocks.whole - self.blocks.first if self.front else 0

    @property
    def unmasked(self) -> Int:
        return self.blocks.whole_end - self.blocks.first

    def block(self, i: Int) -> Int:
        """The i-th block."""
        if self.start is None:
            return self.blocks.first + i
        i = i + self.start
        return self.blocks.first + jnp.where(i >= self.count, i - self.count, i)

    def visit(self, i: Int, members: Int) -> tuple[Int, Int]:
        """The i-th visit: the member of the group, and the block."""
        if is_one(members):
            return 0, self.block(i)
        return lax.rem(i, jnp.int32(members)), self.block(lax.div(i, jnp.int32(members)))


def is_one(members: Int) -> bool:
    """Whether it is known that there is one member."""
    return isinstance(members, int) and members == 1


def _blocks(tokens: BlockRange, tile: int, count: int) -> BlockRange:
    """The blocks for ranges of `count` tokens, clipped to those that exist; at least one."""
    most = -(-count // tile)
    first, whole, whole_end, end = (jnp.clip(jnp.int32(x), 0, most * tile) for x in tokens)
    low = jnp.minimum(lax.div(first, jnp.int32(tile)), most - 1)
    high = jnp.maximum(cdiv(end, tile), low + 1)
    whole_low = jnp.clip(cdiv(whole, tile), low, high)
    return BlockRange(low, whole_low, jnp.clip(lax.div(whole_end, jnp.int32(tile)), whole_low, high), high)


# --- The mask as an array --------------------------------------------------------------------------------------------


def mask_of(problem: Problem, lengths: Pair | None = None, segments: Pair | None = None) -> jax.Array:
    """Whether row t of a batch entry sees key s: [batch or 1, q_tokens, kv_tokens].

    lengths: (q_lengths, kv_lengths), each [batch]; segments: (q_segments [batch, q_tokens], kv_segments [batch, kv_tokens]).
    """
    p = problem
    rows, keys = jnp.arange(p.q_tokens)[None, :, None], jnp.arange(p.kv_tokens)[None, None, :]
    q_end: Any = p.q_tokens
    kv_end: Any = p.kv_tokens
    if lengths is not None:
        q_end, kv_end = (jnp.clip(x, 0, n)[:, None, None] for x, n in zip(lengths, (q_end, kv_end), strict=True))
    mask = MaskTerms.of(p, q_end, kv_end).sees(rows, keys) & (rows < q_end)
    if segments is not None:
        mask &= segments[0][:, :, None] == segments[1][:, None, :]
    return jnp.broadcast_to(mask, (mask.shape[0], p.q_tokens, p.kv_tokens))


def zero_unseen(
    problem: Problem, inputs: Inputs, q: jax.Array, k: jax.Array, v: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v with zeros in each query row that sees no key and in each key and value that no row sees, NaN or not."""
    rows, keys = (seen[..., None] for seen in _seen_tokens(problem, inputs))
    return jnp.where(rows, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)


def _seen_tokens(problem: Problem, inputs: Inputs) -> tuple[jax.Array, jax.Array]:
    """Which query rows see a key, and which keys a row sees: booleans that broadcast to q and k [batch, tokens, heads]."""
    if inputs.bias is None and inputs.segments is not None:
        return _seen_in_segments(problem, inputs.lengths, *inputs.segments)
    p, seen = problem, mask_of(problem, inputs.lengths, inputs.segments)[:, None]
    if inputs.bias is not None:
        seen &= inputs.bias != -jnp.inf
    keys = seen.any(2)
    if keys.shape[1] != 1:
        keys = keys.reshape(keys.shape[0], p.kv_heads, p.q_heads // p.kv_heads, p.kv_tokens).any(2)
    return seen.any(3).swapaxes(1, 2), keys.swapaxes(1, 2)


def _seen_in_segments(problem: Problem, lengths: Pair | None, q_ids: jax.Array, kv_ids: jax.Array) -> Pair:
    """`_seen_tokens` without a bias."""
    p = problem
    rows, keys = jnp.arange(p.q_tokens)[None], jnp.arange(p.kv_tokens)[None]
    q_end: Any = p.q_tokens
    kv_end: Any = p.kv_tokens
    if lengths is not None:
        q_end, kv_end = (jnp.clip(x, 0, n)[:, None] for x, n in zip(lengths, (q_end, kv_end), strict=True))
    low, high = MaskTerms.of(p, q_end, kv_end).bounds()
    first, last = 0 * rows if low is None else rows + low, kv_end - 1 if high is None else jnp.minimum(kv_end - 1, rows + high)
    seeing = (rows < q_end) & _any_equal(q_ids, kv_ids, first, last)
    first, last = 0 * keys if high is None else keys - high, q_end - 1 if low is None else jnp.minimum(q_end - 1, keys - low)
    seen = (keys < kv_end) & _any_equal(kv_ids, q_ids, first, last)
    return seeing[..., None], seen[..., None]


def _any_equal(ids: jax.Array, others: jax.Array, first: jax.Array, last: Int) -> jax.Array:
    """Whether ids[b, i] is one of others[b, first[b, i] : last[b, i] + 1]: booleans [batch, tokens].

    To ask each pair is one kernel, of many pairs a long one; to sort and search the ids takes some twenty short ones.
    """
    pairs = ids.size * others.shape[1] if isinstance(ids.shape[0], int) else math.inf
    if pairs <= FEW_PAIRS:
        place = jnp.arange(others.shape[1], dtype=jnp.int32)[None, None]
        in_range = (first[..., None] <= place) & (place <= jnp.broadcast_to(last, ids.shape)[..., None])
        return (in_range & (ids[..., None] == others[:, None])).any(-1)
    order = jnp.argsort(others, axis=1, stable=True).astype(jnp.int32)
    in_order = jnp.take_along_axis(others, order, 1)
    count = others.shape[1]

    def halve(_: Any, ends: Pair) -> Pair:
        start, end = ends
        middle = (start + end) // 2
        at = jnp.minimum(middle, count - 1)
        known, place = (jnp.take_along_axis(x, at, 1) for x in (in_order, order))
        before = (start < end) & ((known < ids) | ((known == ids) & (place < first)))
        return jnp.where(before, middle + 1, start), jnp.where(before, end, middle)

    start = jnp.zeros_like(ids, jnp.int32)  # of those that come at or after `first` among equal ones
    start, _ = lax.fori_loop(0, count.bit_length(), halve, (start, start + count))
    at = jnp.minimum(start, count - 1)
    found, place = (jnp.take_along_axis(x, at, 1) for x in (in_order, order))
    return (start < count) & (found == ids) & (place <= last)


def some_see_nothing(problem: Problem) -> bool:
    """Whether there may be rows that see no key."""
    p = problem
    before = p.right is not None and p.offset + p.right < 0  # the first row's keys
    beyond = p.left is not None and p.q_tokens - 1 + p.offset - p.left >= p.kv_tokens  # the last row's
    return p.lengths or p.segments or p.bias != "none" or before or beyond


# --- How many blocks, for the schedule and the model -----------------------------------------------------------------


def kv_blocks(problem: Problem, tile_q: int, tile_kv: int) -> np.ndarray:
    """How many kv blocks each q block visits, at least one; lengths and segments apart."""
    return _count(*keys_seen(problem, tile_q), tile_kv)


def q_blocks(problem: Problem, tile_kv: int, tile_q: int) -> np.ndarray:
    """How many q blocks each kv block visits, at least one; lengths and segments apart."""
    return _count(*rows_seeing(problem, tile_kv), tile_q)


def whole_kv_blocks(problem: Problem, tile_q: int, tile_kv: int) -> np.ndarray:
    """How many kv blocks each q block sees whole, every row of it; lengths and segments apart."""
    p = problem
    rows = np.arange(0, p.q_tokens, tile_q)
    last = np.minimum(rows + tile_q, p.q_tokens) - 1
    first = 0 * rows if p.left is None else last + p.offset - p.left
    end = 0 * rows + p.kv_tokens if p.right is None else rows + p.offset + p.right + 1
    first, end = (np.clip(x, 0, p.kv_tokens) for x in (first, end))
    return np.maximum(0, end // tile_kv - -(-first // tile_kv))


def _count(first: np.ndarray, end: np.ndarray, tile: int) -> np.ndarray:
    return np.maximum(1, -(-end // tile) - first // tile)


def keys_seen(problem: Problem, tile_q: int) -> tuple[np.ndarray, np.ndarray]:
    """For each q block the first key that one of its rows sees, and the end of these keys; lengths and segments apart."""
    p = problem
    rows = np.arange(0, p.q_tokens, tile_q)
    last = np.minimum(rows + tile_q, p.q_tokens) - 1
    first = 0 * rows if p.left is None else rows + p.offset - p.left
    end = 0 * rows + p.kv_tokens if p.right is None else last + p.offset + p.right + 1
    return np.clip(first, 0, p.kv_tokens), np.clip(end, 0, p.kv_tokens)


def rows_seeing(problem: Problem, tile_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """For each kv block the first query row that sees one of its keys, and the end of these rows, likewise."""
    p = problem
    keys = np.arange(0, p.kv_tokens, tile_kv)
    last = np.minimum(keys + tile_kv, p.kv_tokens) - 1
    first = 0 * keys if p.right is None else keys - p.offset - p.right
    end = 0 * keys + p.q_tokens if p.left is None else last - p.offset + p.left + 1
    return np.clip(first, 0, p.q_tokens), np.clip(end, 0, p.q_tokens)
