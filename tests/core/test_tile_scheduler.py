"""Tile orders: every tile is visited once, by the block that it belongs to, in strips or by cost."""

from __future__ import annotations

import dataclasses
import functools
import heapq
import itertools
from collections.abc import Iterable

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.core import gpu, tile_scheduler
from mgpu_ops.core.tile_scheduler import Rounds
from tests.thorough import examples


@given(st.integers(1, 3000), st.integers(1, 200))
def test_blocks_that_take_turns_cover_every_tile_once(tiles, blocks):
    blocks = min(blocks, tiles)
    counts = tile_scheduler.tiles_of_block(tiles, np.arange(200, dtype=np.int32), blocks)[:blocks]
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [len(range(block, tiles, blocks)) for block in range(blocks)]


# --- rounds of blocks

ALONE = gpu.find("h200")
SHARED = dataclasses.replace(ALONE, shares_sms=True)


def tiles_of_rounds(rounds: Rounds) -> list[list[int]]:
    """The tiles of each block."""
    firsts, counts = rounds.of_block(jnp.arange(rounds.blocks, dtype=jnp.int32))
    assert firsts.dtype == counts.dtype == jnp.int32
    return [
        list(range(f, f + c * rounds.at_once, rounds.at_once)) for f, c in zip(firsts.tolist(), counts.tolist(), strict=True)
    ]


@given(st.integers(1, 5000), st.integers(1, 200), st.sampled_from([ALONE, SHARED]))
def test_blocks_of_all_rounds_have_every_tile_once_and_none_is_idle(tiles, at_once, device):
    of_blocks = tiles_of_rounds(Rounds.of(tiles, at_once, device))
    assert sorted(itertools.chain(*of_blocks)) == list(range(tiles))
    assert all(of_blocks)
    if device is ALONE:
        assert len(of_blocks) == min(tiles, at_once)


@given(st.integers(1, 5000), st.integers(1, 200), st.integers(1, 3))
def test_rounds_grow_shorter_until_a_block_has_a_small_part_of_a_whole_ones_tiles(tiles, at_once, least):
    rounds = Rounds.of(tiles, at_once, SHARED, least)
    whole = -(-tiles // at_once)
    assert list(rounds.sizes[1:]) == sorted(rounds.sizes[1:], reverse=True)
    assert rounds.sizes[0] <= max(least, -(-3 * whole // 8))
    assert rounds.sizes[-1] <= max(least, -(-whole // 16))
    assert all(size >= least for size in rounds.sizes[:-1])


def test_kernels_whose_blocks_write_sums_have_two_rounds():
    assert Rounds.of(8192, 132, SHARED, most=2).sizes == (32, 31)
    assert Rounds.of(8192, 132, ALONE, most=2).sizes == (63,)
    assert Rounds.of(100, 132, SHARED, most=2).sizes == (1,)


def end(costs: Iterable[float], at_once: int, late: int = 0, until: float = 0.0) -> float:
    """When the last block ends, where a GPU gives each SM that is idle the next block, and some SMs are free only later."""
    idle = [0.0] * (at_once - late) + [until] * late
    for cost in costs:
        heapq.heapreplace(idle, idle[0] + cost)
    return max(idle)


@pytest.mark.parametrize("tiles", [1024, 1536, 1792, 7168])
def test_a_kernel_in_rounds_needs_little_longer_where_some_sms_are_taken_for_half_of_it(tiles):
    alone, shared = ([len(x) for x in tiles_of_rounds(Rounds.of(tiles, 132, device))] for device in (ALONE, SHARED))
    whole = tiles / 132
    assert end(alone, 132, 16, whole / 2) > 1.4 * whole
    assert end(shared, 132, 16, whole / 2) < 1.1 * whole + 1  # 1.06, and a tile
    assert end(shared, 132) <= end(alone, 132)


@functools.cache
def walk(shape: tuple[int, int], minor: int, width: int) -> list[tuple[int, int]]:
    def tile(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return tile_scheduler.raster(index, shape, minor, width)

    rows, columns = jax.jit(jax.vmap(tile))(jnp.arange(shape[0] * shape[1], dtype=jnp.int32))
    assert rows.dtype == columns.dtype == jnp.int32
    return list(zip(rows.tolist(), columns.tolist()))


SHAPES = [(1, 1), (1, 7), (7, 1), (2, 3), (6, 6), (16, 9)]
WIDTHS = [1, 2, 4, 100]


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_raster_visits_every_tile_once_whatever_the_width(shape, minor):
    everything = [(r, c) for r in range(shape[0]) for c in range(shape[1])]
    for width in WIDTHS:
        assert sorted(walk(shape, minor, width)) == everything


@pytest.mark.parametrize("minor", [0, 1])
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_raster_finishes_a_strip_before_the_next_and_turns_round_at_its_end(shape, minor):
    for width in WIDTHS:
        path = walk(shape, minor, width)
        strips = [tile[minor] // width for tile in path]
        if shape[1 - minor] > 1:  # one line of tiles has no strips
            assert strips == sorted(strips)
        # What is in flight stays compact: along the strip, the next tile is at most a step away.
        along = [tile[1 - minor] for tile in path]
        assert all(abs(x - y) <= 1 for x, y in itertools.pairwise(along))


# --- tiles assigned beforehand

COSTS = st.lists(st.integers(1, 50), min_size=1, max_size=80)


def assigned(table: np.ndarray) -> list[list[int]]:
    """The tiles of each block, as a kernel reads them."""
    assert table.dtype == np.int32
    blocks = [tile_scheduler.AssignedTiles(jnp.asarray(table), block) for block in range(len(table))]
    return [[int(t.number(jnp.int32(i))) for i in range(int(t.count))] for t in blocks]


@given(COSTS, st.integers(1, 20))
def test_tiles_are_dealt_once_each_and_no_block_has_more_than_a_tile_above_the_mean(costs, blocks):
    shares = assigned(tile_scheduler.assign_tiles(costs, blocks))
    assert sorted(itertools.chain(*shares)) == list(range(len(costs)))
    assert all(share == sorted(share) for share in shares)  # in the order of the tiles
    loads = [sum(costs[tile] for tile in share) for share in shares]
    assert max(loads) <= sum(costs) / blocks + max(costs)
    assert all(shares) or len(costs) < blocks


def in_sections(shares: list[list[int]], costs: list[int], heads: int, longest: int) -> bool:
    """Whether each block has its tiles section after section, the longest first; sections have `longest` heads, or are even."""
    tiles = len(costs)

    def holds(section: int) -> bool:
        orders = ([(number // tiles // section, -costs[number % tiles]) for number in share] for share in shares)
        return all(order == sorted(order) for order in orders)

    return any(map(holds, (longest, -(-heads // -(-heads // longest)))))


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 9), st.sampled_from([1, 2, 1024]), st.integers(1, 20)
)
def test_heads_are_dealt_section_after_section_their_longest_tiles_first(costs, heads, waves, blocks):
    tiles = len(costs)
    shares = assigned(tile_scheduler.assign_heads(np.array(costs), heads, waves, blocks))
    assert sorted(itertools.chain(*shares)) == list(range(heads * tiles))
    loads = [sum(costs[tile % tiles] for tile in share) for share in shares]
    assert max(loads) <= sum(costs) * heads / blocks + max(costs)
    assert in_sections(shares, costs, heads, -(-waves * blocks // tiles))


@pytest.mark.parametrize("heads", [8, 10, 20, 25, 40])
def test_causal_heads_that_no_section_divides_end_as_soon_as_others(heads):
    costs = np.arange(1, 65) + 4  # kv blocks of 8192 tokens, of which a section has those of nine heads
    table = tile_scheduler.assign_heads(costs, heads, 4, 132)
    whole = heads * costs.sum() / 132
    assert max(costs[np.array(share) % 64].sum() for share in assigned(table)) < 1.05 * whole


@given(st.integers(1, 5), st.integers(1, 4), st.integers(1, 3), st.integers(1, 5), st.integers(1, 9))
def test_entries_of_a_batch_come_together_by_groups_of_heads(batch, groups, group, tiles, blocks):
    heads = groups * group
    table = tile_scheduler.assign_heads(np.ones(tiles), batch * heads, 1, blocks)
    shares = assigned(tile_scheduler.entries_together(table, tiles, batch, heads, group))
    assert sorted(itertools.chain(*shares)) == list(range(batch * heads * tiles))
    for share in shares:
        entries, own_heads = zip(*(divmod(number // tiles, heads) for number in share), strict=True) if share else ((), ())
        order = [(head // group, entry) for head, entry in zip(own_heads, entries, strict=True)]
        assert order == sorted(order)


@given(
    st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 20), st.sampled_from([1, 2, 1024]), st.integers(1, 9)
)
def test_heads_in_rounds_are_dealt_once_each_the_last_tiles_one_by_one(costs, heads, waves, blocks):
    tiles = len(costs)
    shares = assigned(tile_scheduler.assign_heads(np.array(costs), heads, waves, blocks, True))
    assert sorted(itertools.chain(*shares)) == list(range(heads * tiles))
    assert all(shares)
    if heads * tiles > blocks:
        assert all(len(share) == 1 for share in shares[-blocks:])


def test_causal_tiles_in_rounds_need_little_longer_where_some_sms_are_taken_for_half_of_it():
    costs = np.arange(1, 65) + 4  # kv blocks of 8192 tokens
    alone, shared = (
        [
            sum(costs[number % 64] for number in share)
            for share in assigned(tile_scheduler.assign_heads(costs, 32, 4, 132, rounds))
        ]
        for rounds in (False, True)
    )
    whole = 32 * costs.sum() / 132
    assert end(alone, 132, 16, whole / 2) > 1.4 * whole
    assert end(shared, 132, 16, whole / 2) < 1.1 * whole
    assert end(shared, 132) < 1.02 * whole


@pytest.mark.parametrize("most", [1, 2, 3, 9])
def test_tables_have_four_columns_at_least_so_that_no_index_is_a_condition(most):
    table = tile_scheduler.table_of([range(most), range(1)])
    assert table.shape == (2, max(4, 1 + most))
    assert assigned(table) == [list(range(most)), [0]]


@examples(10)
@given(st.lists(st.integers(1, 50), min_size=1, max_size=12), st.integers(1, 40), st.sampled_from([1, 2]), st.integers(1, 20))
def test_many_heads_are_dealt_some_at_a_time_once_each_and_as_evenly(costs, heads, waves, blocks):
    tiles = len(costs)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(tile_scheduler, "AT_ONCE", 60)
        shares = assigned(tile_scheduler.assign_heads(np.array(costs), heads, waves, blocks))
    assert sorted(itertools.chain(*shares)) == list(range(heads * tiles))
    loads = [sum(costs[tile % tiles] for tile in share) for share in shares]
    assert max(loads) <= sum(costs) * heads / blocks + max(costs)
    assert in_sections(shares, costs, heads, -(-waves * blocks // tiles))


def test_of_a_million_tiles_few_are_dealt_one_by_one(monkeypatch):
    counted, assign = [], tile_scheduler.assign_tiles
    monkeypatch.setattr(
        tile_scheduler, "assign_tiles", lambda costs, blocks: (counted.append(len(costs)), assign(costs, blocks))[1]
    )
    table = tile_scheduler.assign_heads(np.arange(1, 1025), 1024, 8, 132)
    assert table[:, 0].sum() == 1024 * 1024
    assert sum(counted) <= 2 * tile_scheduler.AT_ONCE


def test_tables_are_cached_up_to_so_many_bytes_the_last_used_longest(monkeypatch):
    made = []

    @tile_scheduler.cached
    def table(number: int) -> np.ndarray:
        made.append(number)
        return np.zeros(100, np.int32)

    monkeypatch.setattr(tile_scheduler, "CACHE_BYTES", 1000)
    for number in (1, 2, 1, 3, 1, 2):
        assert table(number).nbytes == 400
    assert made == [1, 2, 3, 2]
    with pytest.raises(ValueError, match="read-only"):
        table(2)[0] = 1


def test_a_turn_beyond_the_last_reads_inside_the_table():
    """The tile after the last is read ahead."""
    table = tile_scheduler.assign_tiles([1] * 5, 2)
    tiles = tile_scheduler.AssignedTiles(jnp.asarray(table), 0)
    assert int(tiles.number(jnp.int32(table.shape[1]))) == int(tiles.number(jnp.int32(2))) == 4


# --- strips


@given(st.integers(0, 2**30), st.integers(1, 300))
def test_cdiv_rounds_up(x, y):
    assert tile_scheduler.cdiv(np.int32(x), y) == -(-x // y)


@given(st.integers(1, 300), st.data())
def test_cdiv_of_a_little_less_than_nothing_is_zero(y, data):
    """So that a block beyond the last tile has none."""
    assert tile_scheduler.cdiv(np.int32(-data.draw(st.integers(0, y - 1))), y) == 0


@functools.cache
def strip_walk(rows: int, columns: int, width: int) -> list[tuple[int, int]]:
    tile = lambda number, rows: tile_scheduler.strips(number, rows, columns, width)  # noqa: E731
    numbers = jnp.arange(rows * columns, dtype=jnp.int32)
    row, column = jax.jit(jax.vmap(tile, (0, None)))(numbers, jnp.int32(rows))
    assert row.dtype == column.dtype == jnp.int32
    return list(zip(row.tolist(), column.tolist()))


@pytest.mark.parametrize("columns", [1, 3])
@pytest.mark.parametrize("rows", [1, 2, 5, 8])
def test_strips_are_walked_one_after_the_other_column_by_column(rows, columns):
    for width in (1, 2, 4, 100):
        wanted = [
            (row, column)
            for first in range(0, rows, width)
            for column in range(columns)
            for row in range(first, min(first + width, rows))
        ]
        assert strip_walk(rows, columns, width) == wanted
