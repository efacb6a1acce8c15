"""Which output tiles of a ragged array's groups a block computes: the tiles are numbered group after group.

Sizes of groups are values in global memory, which each warpgroup reads on its way; there is no list of tiles.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Protocol

import jax
import jax.numpy as jnp
from jax import lax

from mgpu_ops.core import lanes
from mgpu_ops.core.limits import WARP


@dataclasses.dataclass(frozen=True)
class GroupTile:
    """One output tile of a group: the group, its rows [start, end) in the ragged array, and the tile's number in the group."""

    group: jax.Array
    start: jax.Array
    end: jax.Array
    number: jax.Array


type Tiles = Callable[[jax.Array], jax.Array]  # of a group of so many rows

_FEWEST = 8  # groups, of which it pays to look for one with all threads of a warp
_UNROLLED = 8  # groups of a thread, at most, that it reads without a loop


@dataclasses.dataclass(frozen=True)
class Groups:
    """The rows of each group, one group after the other.

    sizes: the groups' sizes in rows, int32 in global memory, of any values: a negative one counts as 0, and groups are cut
      where the array of `rows` rows ends.
    has_start: `sizes` begins with the row where the first group begins.
    by_warp: a warp's threads look for the group of a tile together. It takes two registers of each.
    """

    sizes: Any  # a ref
    rows: int
    has_start: bool = False
    by_warp: bool = True

    @property
    def count(self) -> int:
        size: int = self.sizes.shape[0]
        return size - self.has_start

    @property
    def start(self) -> jax.Array:
        """The row where the first group begins."""
        return jnp.clip(self.sizes[0], 0, self.rows) if self.has_start else jnp.int32(0)

    def first(self) -> tuple[jax.Array, jax.Array]:
        """The row where the first group begins, and its size."""
        return self.at(jnp.int32(0), self.start)

    def at(self, place: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and the size of the group at a place; 0 rows beyond the last. row: where the group before it ends."""
        index = jnp.minimum(place, jnp.int32(self.count - 1))
        size = self.sizes[index + 1 if self.has_start else index]
        return row, jnp.where(place < self.count, jnp.clip(size, 0, self.rows - row), 0)

    def number(self, place: jax.Array) -> jax.Array:
        """Which group is at a place."""
        return place

    def shares(self, tiles: Tiles) -> Shares:
        """The groups in as many shares of neighbours as a warp has threads: it takes one time of reading for all of them."""
        each = math.ceil(self.count / WARP)
        place, of_lane = lanes.number() * each, dataclasses.replace(self, sizes=lanes.readable(self.sizes))

        def for_each_group(body: Callable[[jax.Array, Any], Any], carry: Any) -> Any:
            if each > _UNROLLED:
                return lax.fori_loop(0, each, lambda i, carry: body(place + i, carry), carry)
            for i in range(each):
                carry = body(place + i, carry)
            return carry

        def add_rows(place: jax.Array, rows: jax.Array) -> jax.Array:
            return jnp.minimum(rows + of_lane.at(place, jnp.int32(0))[1], self.rows)  # which is below 2^28

        def add_tiles(place: jax.Array, state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            row, count = state
            row, size = of_lane.at(place, row)
            return row + size, count + jnp.where(place < self.count, tiles(size), 0)

        start, none = self.start, jnp.zeros_like(place)
        ends = jnp.minimum(start + lanes.sums(for_each_group(add_rows, none), self.rows), self.rows)
        begin = jnp.where(place > 0, lanes.of_lane(ends, lanes.number() - 1), start)
        _, count = for_each_group(add_tiles, (begin, none))
        return Shares(self, each, start, ends, lanes.sums(count))


@dataclasses.dataclass(frozen=True)
class Shares:
    """Shares of neighbouring groups, one for each thread of a warp.

    each: how many groups a share has. start: the row where the first one begins.
    ends, tiles: of this thread's share: the row where it ends, and the number of tiles up to there.
    """

    groups: Groups
    each: int
    start: jax.Array
    ends: jax.Array
    tiles: jax.Array

    def of(self, tile: jax.Array) -> tuple[jax.Array, ...]:
        """(place, first tile, first row, size) of the first group of the share in which `tile` is; or beyond all groups."""
        share = lanes.how_many(self.tiles <= tile)
        first = jnp.where(share > 0, lanes.of_lane(self.tiles, share - 1), 0)
        row = jnp.where(share > 0, lanes.of_lane(self.ends, share - 1), self.start)
        place = jnp.minimum(share * self.each, self.groups.count)
        return place, first, *self.groups.at(place, row)


@dataclasses.dataclass(frozen=True)
class OrderedGroups:
    """Groups in an order of their own.

    table: int32 in global memory; three words for each group: its number, its first row, its size. Then three zeros.
    """

    table: Any  # a ref
    count: int

    def first(self) -> tuple[jax.Array, jax.Array]:
        """The row where the first group of the order begins, and its size."""
        return self.at(jnp.int32(0), jnp.int32(0))

    def at(self, place: jax.Array, row: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The first row and the size of the group at a place <= count."""
        return self._word(3 * place + 1), self._word(3 * place + 2)

    def number(self, place: jax.Array) -> jax.Array:
        """Which group is at a place < count."""
        return self._word(3 * place)

    def _word(self, index: jax.Array) -> jax.Array:
        # Inside jax.shard_map, what a kernel reads is typed as varying over the mesh, unlike what it computes and begins with.
        word: jax.Array = self.table[index] + 0
        return word


@dataclasses.dataclass(frozen=True)
class StaticScheduler:
    """The tiles of one block: `first`, and then each `blocks`-th."""

    first: jax.Array
    blocks: int

    def following(self, tile: jax.Array, carry: Any) -> jax.Array:
        """The tile after `tile`."""
        return tile + self.blocks


class Scheduler(Protocol):
    """Which tiles are of a block, ever larger numbers. There may be some beyond the last tile, which are none."""

    @property
    def first(self) -> jax.Array: ...

    def following(self, tile: jax.Array, carry: Any) -> jax.Array:
        """The tile after `tile`, which has given `carry`."""


def for_each_group_tile(
    groups: Groups | OrderedGroups,
    tiles: Tiles,
    scheduler: Scheduler,
    body: Callable[[GroupTile, Any], Any],
    carry: Any,
) -> tuple[jax.Array, Any]:
    """carry = body(tile, carry) for the tiles of a block. Tiles are numbered group after group in the order of `groups`.

    Args:
      tiles: the number of tiles of a group of a given size, both traced.
      scheduler: which of them are the block's.

    Returns the row where the last group of the order ends, and the carry. Every warpgroup reads each size once or twice.
    """
    zero = jnp.int32(0)
    shares = None
    if isinstance(groups, Groups) and groups.by_warp and groups.count >= _FEWEST:
        shares = groups.shares(tiles)

    def find(tile: jax.Array, state: Any) -> Any:
        def before(s: Any) -> Any:
            place, first, _, size = s
            return (place < groups.count) & (tile >= first + tiles(size))

        def following(s: Any) -> Any:
            place, first, start, size = s
            return place + 1, first + tiles(size), *groups.at(place + 1, start + size)

        if shares is not None:
            state = lax.cond(before(state), lambda: shares.of(tile), lambda: state)
        return lax.while_loop(before, following, state)

    def step(s: Any) -> Any:
        tile, (place, first, start, size), carry = s
        carry = body(GroupTile(groups.number(place), start, start + size, tile - first), carry)
        tile = scheduler.following(tile, carry)
        return tile, find(tile, (place, first, start, size)), carry

    start = find(scheduler.first, (zero, zero, *groups.first()))
    _, last, carry = lax.while_loop(lambda s: s[1][0] < groups.count, step, (scheduler.first, start, carry))
    return last[2], carry
