"""Which keys a query row sees: what kernels ask of a `Problem` for one batch entry, and the same as a boolean array."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.attention.problem import Problem
from mgpu_ops.core.tile_scheduler import cdiv


@dataclasses.dataclass(frozen=True)
class Tokens:
    """The tokens of one batch entry. All but `problem` may be traced int32."""

    problem: Problem
    q_end: Any  # query rows from here on are padding
    kv_end: Any  # and so are keys
    offset: Any  # row t is aligned with key t + offset

    def bounds(self) -> tuple[Any, Any]:
        """Row t sees keys whose s - t is between the two, both included; None: no bound."""
        left, right = self.problem.left, self.problem.right
        return None if left is None else self.offset - left, None if right is None else self.offset + right

    def key_tiles(self, row: Any, rows: int, tile: int) -> tuple[Any, Any, Any, Any]:
        """Tiles of keys for the rows [row, row + rows): (first, first whole, end of whole, end).

        Tiles in [first, end) hold what any of the rows sees, at least one tile; each row sees all of those in [first whole, end
        of whole).
        """
        low, high = self.bounds()
        last = jnp.minimum(row + rows, self.q_end) - 1
        end = self.kv_end if high is None else jnp.minimum(self.kv_end, last + high + 1)
        whole_end = self.kv_end if high is None else jnp.minimum(self.kv_end, row + high + 1)
        if self.problem.lengths:
            end = jnp.where(row < self.q_end, end, 0)  # rows that are all padding see nothing
        first = 0 if low is None else row + low
        whole = 0 if low is None else last + low
        return _tiles(first, whole, whole_end, end, tile, self.problem.kv_tokens)

    def row_tiles(self, key: Any, keys: int, tile: int) -> tuple[Any, Any, Any, Any]:
        """Tiles of query rows for the keys [key, key + keys), as `key_tiles`: a whole tile's rows all see all of the keys."""
        low, high = self.bounds()
        last = jnp.minimum(key + keys, self.kv_end) - 1
        first = 0 if high is None else key - high
        whole = 0 if high is None else last - high
        end = self.q_end if low is None else jnp.minimum(self.q_end, last - low + 1)
        whole_end = self.q_end if low is None else jnp.minimum(self.q_end, key - low + 1)
        if self.problem.lengths:
            end = jnp.where(key < self.kv_end, end, 0)
        none = key + keys > self.kv_end  # such keys need a mask in every row
        whole_end = jnp.where(none, 0, whole_end)
        # Rows past the end have no say in any sum, so that the last tile is whole too.
        whole_end = jnp.where(whole_end == self.q_end, cdiv(self.q_end, tile) * tile, whole_end)
        return _tiles(first, whole, whole_end, end, tile, self.problem.q_tokens)

    def sees(self, row: Any, key: Any) -> Any:
        """Whether each row sees each key, segments apart: int32 arrays of one shape, or of shapes that broadcast."""
        low, high = self.bounds()
        visible = key < self.kv_end
        if high is not None:
            visible &= key - row <= high
        if low is not None:
            visible &= key - row >= low
        return visible


@dataclasses.dataclass(frozen=True)
class Order:
    """Tiles [first, end) in two lists: those that need a mask, at least one, and those in [whole, whole_end), which do not."""

    first: Any
    whole: Any
    whole_end: Any
    end: Any

    @staticmethod
    def of(first: Any, whole: Any, whole_end: Any, end: Any) -> Order:
        """Where no tile needs a mask, the last one is listed as if it did."""
        all_whole = (whole == first) & (whole_end == end)
        return Order(first, whole, jnp.where(all_whole, end - 1, whole_end), end)

    @property
    def masked(self) -> Any:
        """How many tiles are listed as to be masked."""
        return self.end - self.first - self.unmasked

    @property
    def unmasked(self) -> Any:
        return self.whole_end - self.whole

    def masked_tile(self, i: Any) -> Any:
        """The i-th tile to be masked: the last ones come first."""
        return jnp.where(i < self.end - self.whole_end, self.end - 1 - i, self.whole - 1 - (i - (self.end - self.whole_end)))

    def unmasked_tile(self, i: Any) -> Any:
        """The i-th tile that needs no mask, from the last on."""
        return self.whole_end - 1 - i

    def for_each(self, step: Any, carry: Any, *, masks: bool = True, members: int = 1) -> Any:
        """carry = step(member, tile, carry, masked): the tiles to be masked, of each of `members` heads, then the others.

        masks: False where none needs a mask (`Problem.masks`): the first list then goes without too.
        """

        def loop(count: Any, tile: Any, masked: bool, carry: Any) -> Any:
            def body(i: Any, carry: Any) -> Any:
                member, i = (jnp.int32(0), i) if members == 1 else (lax.div(i, count), lax.rem(i, count))
                return step(member, tile(i), carry, masked)

            return lax.fori_loop(0, count * members, body, carry)

        carry = loop(self.masked, self.masked_tile, masks, carry)
        return loop(self.unmasked, self.unmasked_tile, False, carry)


def _tiles(first: Any, whole: Any, whole_end: Any, end: Any, tile: int, tokens: int) -> tuple[Any, Any, Any, Any]:
    """Tiles for the token ranges [first, end) and [whole, whole_end), clipped to those that exist, at least one."""
    count = -(-tokens // tile)
    first, whole, whole_end, end = (jnp.clip(jnp.int32(x), 0, count * tile) for x in (first, whole, whole_end, end))
    low = jnp.minimum(lax.div(first, jnp.int32(tile)), count - 1)
    high = jnp.maximum(cdiv(end, tile), low + 1)
    whole_low = jnp.clip(cdiv(whole, tile), low, high)
    return low, whole_low, jnp.clip(lax.div(whole_end, jnp.int32(tile)), whole_low, high), high


def visible(problem: Problem, lengths: Any = None, segments: Any = None) -> Any:
    """Whether row t of a batch entry sees key s: [batch or 1, q_tokens, kv_tokens].

    lengths: (q_lengths, kv_lengths), each [batch]; segments: (q_segments [batch, q_tokens], kv_segments [batch, kv_tokens]).
    """
    p = problem
    rows, keys = jnp.arange(p.q_tokens)[None, :, None], jnp.arange(p.kv_tokens)[None, None, :]
    q_end: Any = p.q_tokens
    kv_end: Any = p.kv_tokens
    if lengths is not None:
        q_end, kv_end = (jnp.clip(x, 0, n)[:, None, None] for x, n in zip(lengths, (q_end, kv_end), strict=True))
    offset = kv_end - q_end if p.align == "bottom_right" else 0
    out = Tokens(p, q_end, kv_end, offset).sees(rows, keys) & (rows < q_end)
    if segments is not None:
        out &= segments[0][:, :, None] == segments[1][:, None, :]
    return jnp.broadcast_to(out, (out.shape[0], p.q_tokens, p.kv_tokens))


def seen_tokens(problem: Problem, lengths: Any = None, segments: Any = None, bias: Any = None) -> tuple[Any, Any]:
    """Which query rows see a key, and which keys a row sees: booleans that broadcast to q and k [batch, tokens, heads].

    bias: [batch or 1, q_heads or 1, q_tokens, kv_tokens], -inf where it hides a key.
    """
    p, seen = problem, visible(problem, lengths, segments)[:, None]
    if bias is not None:
        seen &= bias != -jnp.inf
    keys = seen.any(2)
    if keys.shape[1] != 1:
        keys = keys.reshape(keys.shape[0], p.kv_heads, p.q_heads // p.kv_heads, p.kv_tokens).any(2)
    return seen.any(3).swapaxes(1, 2), keys.swapaxes(1, 2)


def some_see_nothing(problem: Problem) -> bool:
    """Whether there may be rows that see no key."""
    p = problem
    offset = p.kv_tokens - p.q_tokens if p.align == "bottom_right" else 0
    before = p.right is not None and offset + p.right < 0  # the first row's keys
    beyond = p.left is not None and p.q_tokens - 1 + offset - p.left >= p.kv_tokens  # the last row's
    return p.lengths or p.segments or p.bias != "none" or before or beyond


def key_steps(problem: Problem, tile: int, step: int) -> np.ndarray:
    """How many tiles of `step` keys each tile of query rows goes through, at least one; lengths and segments apart."""
    return _steps(*key_range(problem, tile), step)


def row_steps(problem: Problem, tile: int, step: int) -> np.ndarray:
    """How many tiles of `step` query rows each tile of keys goes through, likewise."""
    return _steps(*row_range(problem, tile), step)


def _steps(first: np.ndarray, end: np.ndarray, step: int) -> np.ndarray:
    return np.maximum(1, -(-end // step) - first // step)


def key_range(problem: Problem, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """The first key that some row of each tile of query rows sees, and the end of them, lengths and segments apart."""
    p = problem
    offset = p.kv_tokens - p.q_tokens if p.align == "bottom_right" else 0
    rows = np.arange(0, p.q_tokens, tile)
    last = np.minimum(rows + tile, p.q_tokens) - 1
    first = 0 * rows if p.left is None else rows + offset - p.left
    end = 0 * rows + p.kv_tokens if p.right is None else last + offset + p.right + 1
    return np.clip(first, 0, p.kv_tokens), np.clip(end, 0, p.kv_tokens)


def row_range(problem: Problem, tile: int) -> tuple[np.ndarray, np.ndarray]:
    """The first query row that sees some key of each tile of keys, and the end of them, lengths and segments apart."""
    p = problem
    offset = p.kv_tokens - p.q_tokens if p.align == "bottom_right" else 0
    keys = np.arange(0, p.kv_tokens, tile)
    last = np.minimum(keys + tile, p.kv_tokens) - 1
    first = 0 * keys if p.right is None else keys - offset - p.right
    end = 0 * keys + p.q_tokens if p.left is None else last - offset + p.left + 1
    return np.clip(first, 0, p.q_tokens), np.clip(end, 0, p.q_tokens)
