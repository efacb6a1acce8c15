"""Orders in which the blocks of a persistent kernel work through output tiles."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
import math
import threading
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.core.gemm import Tiled, warpgroup_tile
from mgpu_ops.core.gpu import Gpu

type Int = int | jax.Array  # a number that is known, or a traced int32


def tiles_of_block(tiles: Int, block: Int, blocks: int) -> jax.Array:
    """The number of tiles t < `tiles` of one block (int32), where tile t belongs to block t % blocks."""
    return cdiv(tiles - block, blocks)


# --- Rounds of blocks

_FIRST, _FURTHER = 3 / 8, 1 / 2  # of the tiles that are left: what the first round takes, and each further one
_LEAST = 1 / 16  # of a block's tiles in one round


@dataclasses.dataclass(frozen=True)
class Rounds:
    """`tiles` tiles of equal cost, shared among blocks in rounds of `at_once` blocks, as many as run at one time.

    One round makes a persistent kernel. Where another kernel may hold some SMs for a while (`Gpu.shares_sms`), a block that
    waits for one of these begins when the others end. In several rounds the GPU starts a block of the next one wherever a block
    has ended. Each takes a part of what is left: the last blocks are short, and there are few beginnings and ends of blocks,
    which nothing overlaps (some 3 us of a product's).

    Tiles that are computed at the same time are neighbours: those of a block are `at_once` apart.

    sizes: how many tiles a block of each round has. One of the last round may have fewer.
    """

    tiles: int
    at_once: int
    sizes: tuple[int, ...]

    @staticmethod
    def of(tiles: int, at_once: int, gpu: Gpu, least: int = 1, most: int | None = None) -> Rounds:
        """Those of a GPU on which `at_once` blocks run at one time.

        least: tiles of a block, if it has not the last ones. most: rounds, where each block writes sums of its own.
        """
        at_once = min(at_once, tiles)
        left = math.ceil(tiles / at_once)
        if not gpu.shares_sms:
            return Rounds(tiles, at_once, (left,))
        sizes: list[int] = []
        least = max(least, math.ceil(left * _LEAST if most is None else left / most))
        while left:
            size = math.ceil(left * (_FURTHER if sizes else _FIRST))
            sizes.append(min(left, max(least, size)))
            left -= sizes[-1]
        return Rounds(tiles, at_once, tuple(sizes))

    @property
    def blocks(self) -> int:
        """How many there are."""
        *before, _ = self.sizes
        return len(before) * self.at_once + min(self.at_once, self.tiles - sum(before) * self.at_once)

    def of_block(self, block: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The number of a block's first tile, and how many it has."""
        first, most = block, jnp.int32(self.sizes[0])
        for number, (before, size) in enumerate(itertools.pairwise(self.sizes), start=1):
            is_later = block >= number * self.at_once
            if before > 1:
                first += jnp.where(is_later, jnp.int32((before - 1) * self.at_once), 0)
            if before > size:
                most -= jnp.where(is_later, jnp.int32(before - size), 0)
        left = tiles_of_block(self.tiles, first, self.at_once)
        return first, left if len(self.sizes) == 1 else jnp.minimum(left, most)


# --- Tables of assigned tiles

_COLUMNS = 4  # of a table, at least
_SOONER = 0.98  # of the time: where even sections of heads end before that, they are taken
AT_ONCE = 1 << 16  # tiles that `assign_heads` assigns one by one
CACHE_BYTES = 1 << 26


def cached[**P](make: Callable[P, np.ndarray]) -> Callable[P, np.ndarray]:
    """A cache of `make`, a function of hashable arguments: the results used last, up to CACHE_BYTES in all, read-only."""
    tables: dict[Any, np.ndarray] = {}  # the last used one last
    lock = threading.Lock()

    @functools.wraps(make)
    def get(*args: P.args, **kwargs: P.kwargs) -> np.ndarray:
        key = args, tuple(sorted(kwargs.items()))
        with lock:
            table = tables.pop(key, None)
        if table is None:
            table = make(*args, **kwargs)
            table.flags.writeable = False
        with lock:
            tables[key] = table
            while sum(other.nbytes for other in tables.values()) > CACHE_BYTES:
                del tables[next(iter(tables))]
        return table

    return get


def assign_tiles(costs: Sequence[float], blocks: int) -> np.ndarray:
    """Assigns tiles to blocks: in their order, each to the block that is idle first, as a dynamic scheduler would.

    Args:
      costs: time of each tile, in any unit.

    Returns int32 [blocks, 1 + most tiles of a block]: how many tiles a block has, then their numbers. `AssignedTiles` reads it.
    """
    busy = [(0.0, block) for block in range(blocks)]
    assigned: list[list[int]] = [[] for _ in range(blocks)]
    for number, cost in enumerate(costs):
        until, block = busy[0]
        assigned[block].append(number)
        heapq.heapreplace(busy, (until + cost, block))
    return table_of(assigned)


def table_of(assigned: Sequence[Any]) -> np.ndarray:
    """int32 [blocks, 1 + most tiles of a block], as `AssignedTiles` reads it, from the numbers of each block's tiles.

    At least `_COLUMNS`: where the index of a tile is only 0 or 1, the compiler makes a condition of it, which took the backward
    kernel of attention so many registers that its products no longer overlapped.
    """
    table = np.zeros((len(assigned), max(_COLUMNS, 1 + max(map(len, assigned)))), np.int32)
    for block, numbers in enumerate(assigned):
        table[block, : 1 + len(numbers)] = [len(numbers), *numbers]
    return table


def assign_heads(costs: np.ndarray, heads: int, waves: float, blocks: int, in_rounds: bool = False) -> np.ndarray:
    """`assign_tiles` for `heads` heads of equal tiles: section after section of heads, the longest tiles of a section first.

    Args:
      costs: time of each tile of a head. Tile t of head h has the number h * len(costs) + t.
      waves: length of a section, in tiles per block. In short sections, the keys and values that the tiles of a head share
        stay in L2; in long ones, the tiles that start last are shorter, so that blocks end closer together.
      in_rounds: the table has the blocks of several rounds, as `Rounds` describes them. `blocks` of them run at one time.

    Sections are those of `in_sections`.

    Above `AT_ONCE` tiles the sections of the first `AT_ONCE` are assigned once, and this assignment is repeated for the others:
    each time, the block with the least work so far gets the largest share. Blocks still differ by one tile at most.
    """
    tables = functools.partial(_assign_in, costs=costs, heads=heads, blocks=blocks)
    section, table = in_sections(tables, costs, heads, math.ceil(waves * blocks / len(costs)))
    if in_rounds and heads <= _sections_at_once(section, len(costs)):
        return _assign_sections(costs, heads, section, blocks, in_rounds)
    return table


def in_sections(assign: Callable[[int], np.ndarray], costs: np.ndarray, heads: int, section: int) -> tuple[int, np.ndarray]:
    """How many heads a section has, and the table that `assign` makes of such sections.

    Where the heads are no multiple of `section`, the longest tiles of a short last section would begin late: sections that
    are as even as can be take its place if the last block then ends sooner by 2 %.
    """
    table = assign(section)
    if section < heads:
        even = math.ceil(heads / math.ceil(heads / section))
        other = assign(even)
        if _end(other, costs) < _SOONER * _end(table, costs):
            return even, other
    return section, table


def _end(table: np.ndarray, costs: np.ndarray) -> float:
    """When the last block ends."""
    return max(float(costs[row[1 : 1 + row[0]] % len(costs)].sum()) for row in table)


def _sections_at_once(section: int, tiles: int) -> int:
    """How many heads are assigned one by one."""
    return max(1, AT_ONCE // (section * tiles)) * section


def _assign_in(section: int, costs: np.ndarray, heads: int, blocks: int) -> np.ndarray:
    """`assign_heads` in sections of so many heads."""
    tiles = len(costs)
    at_once = _sections_at_once(section, tiles)
    if heads <= at_once:
        return _assign_sections(costs, heads, section, blocks)
    loads: Any = np.zeros(blocks)
    assigned: list[list[np.ndarray]] = [[] for _ in range(blocks)]
    tables = {some: _assign_sections(costs, some, section, blocks) for some in {at_once, heads % at_once or at_once}}
    for first in range(0, heads, at_once):
        table = tables[min(at_once, heads - first)]
        shares = [row[1 : 1 + row[0]] for row in table]
        work = np.array([costs[share % tiles].sum() for share in shares])
        for block, share in zip(np.argsort(loads, kind="stable"), np.argsort(-work, kind="stable"), strict=True):
            assigned[block].append(first * tiles + shares[share])
            loads[block] += work[share]
    return table_of([np.concatenate(numbers) for numbers in assigned])


def _assign_sections(costs: np.ndarray, heads: int, section: int, blocks: int, in_rounds: bool = False) -> np.ndarray:
    tiles = len(costs)
    uniform = bool((costs == costs[0]).all())
    longest_first = np.argsort(-costs, kind="stable")
    order = []
    for head in range(0, heads, section):
        some = np.arange(head, min(head + section, heads)) * tiles
        in_order = some[:, None] + longest_first if uniform else some[None, :] + longest_first[:, None]
        order.append(in_order.ravel())
    numbers = np.concatenate(order)
    if in_rounds:
        return table_of(_in_rounds(numbers, costs[numbers % tiles], blocks))
    table = assign_tiles(costs[numbers % tiles].tolist(), blocks)
    table[:, 1:] = numbers[table[:, 1:]]
    return table


def entries_together(table: np.ndarray, tiles: int, batch: int, heads: int, group: int = 1) -> np.ndarray:
    """A table of `assign_heads` for heads [batch, heads] of `tiles` tiles, with all entries of the batch one after the other.

    Of the first `group` heads, then of the next ones: so that what the entries share stays in L2.
    """
    order = np.arange(batch * heads, dtype=np.int32).reshape(batch, heads // group, group).swapaxes(0, 1).ravel()
    found = table.copy()
    found[:, 1:] = order[table[:, 1:] // tiles] * tiles + table[:, 1:] % tiles
    return found


def _in_rounds(numbers: np.ndarray, costs: np.ndarray, at_once: int) -> list[np.ndarray]:
    """The tiles of each block, in the order in which the GPU starts the blocks. numbers: of all tiles, in their order."""
    assigned: list[np.ndarray] = []
    while len(numbers) > 2 * at_once:
        end = int(np.searchsorted(costs.cumsum(), _FIRST * costs.sum())) + 1
        rows = assign_tiles(costs[:end].tolist(), at_once)
        shares = [row[1 : 1 + row[0]] for row in rows if row[0]]
        shares.sort(key=lambda share: -costs[share].sum())  # the longest one where an SM is free first
        assigned += [numbers[share] for share in shares]
        numbers, costs = numbers[end:], costs[end:]
    return assigned + [numbers[i : i + 1] for i in range(len(numbers))]


@dataclasses.dataclass(frozen=True)
class AssignedTiles:
    """The tiles of one block, in a table of `assign_tiles` or `assign_heads` that lies in global memory."""

    table: Any  # a ref
    block: Int

    @property
    def count(self) -> jax.Array:
        return self.table[self.block, 0]

    def number(self, i: Int) -> jax.Array:
        """The number of the i-th tile; of the last one, where i is beyond."""
        return self.table[self.block, 1 + jnp.minimum(i, self.table.shape[1] - 2)]

    def for_each(self, body: Callable[[jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
        """carry = body(i, number of the i-th tile, carry) for all tiles.

        Numbers are read one tile ahead, which hides the latency of global memory.
        """

        def step(i: Any, state: Any) -> Any:
            number, carry = state
            return self.number(i + 1), body(i, number, carry)

        return lax.fori_loop(0, self.count, step, (self.number(0), carry))[1]


@dataclasses.dataclass(frozen=True)
class OwnTile:
    """The tile of a block where no block has more than one: that of its own number. No table is read."""

    block: jax.Array

    @property
    def count(self) -> jax.Array:
        return jnp.int32(1)

    def number(self, i: Int) -> jax.Array:
        """The number of the tile, for any i."""
        return self.block

    def for_each(self, body: Callable[[jax.Array, jax.Array, Any], Any], carry: Any) -> Any:
        """As `AssignedTiles.for_each`."""
        return body(jnp.int32(0), self.block, carry)


def raster(index: jax.Array, shape: tuple[int, int], minor: int, width: int) -> tuple[Int, Int]:
    """Row and column of the `index`-th tile (int32) of a grid of `shape`, walked in strips, back and forth.

    A strip is `width` tiles wide along axis `minor` and as long as the other axis. Tiles that are computed at the same time
    then form a compact patch of the output, and find the operands that they share in L2.
    """
    width = min(width, shape[minor])
    if shape[0] == 1:
        return jnp.int32(0), index
    if shape[1] == 1:
        return index, jnp.int32(0)
    return _snake()(index, shape, minor, width)


@functools.cache
def _snake() -> Any:
    """`planar_snake`, which a kernel traces once, however often it asks."""
    from jax.experimental.pallas import mosaic_gpu as plgpu  # here, because models import this module and stay light

    return jax.jit(plgpu.planar_snake, static_argnums=(1, 2, 3), inline=True)


def cdiv(x: Int, y: int) -> jax.Array:
    """ceil(x / y) of an int32 x > -y and a positive y."""
    return lax.div(x + jnp.int32(y - 1), jnp.int32(y))


def strips(number: jax.Array, rows: jax.Array, columns: int, width: int) -> tuple[jax.Array, jax.Array]:
    """Row and column of tile `number` of `rows` (traced) x `columns`, walked in strips of `width` rows, column by column."""
    width = min(width, (2**31 - 1) // columns)  # 32 bits count a strip's tiles
    strip = lax.div(number, jnp.int32(width * columns))
    inside = number - strip * (width * columns)
    height = jnp.minimum(jnp.int32(width), rows - strip * width)  # the last strip may be lower
    return strip * width + lax.rem(inside, height), lax.div(inside, height)


def warpgroup_origin(c: Tiled) -> tuple[Int, Int]:
    """First row and column of this consumer warpgroup within the block's tile."""
    if c.compute_warpgroups == 1 or c.takes_turns:
        return 0, 0
    wg = lax.axis_index("wg")
    wg_m, wg_n = warpgroup_tile(c)
    return (wg * wg_m, 0) if c.wg_dimension == "m" else (0, wg * wg_n)
