"""Tiles of groups: every tile is visited once, by the block that it belongs to, group after group."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.core import group_scheduler, tile_scheduler
from mgpu_ops.core.group_scheduler import Groups, GroupTile, OrderedGroups, StaticScheduler
from mgpu_ops.core.interpreter import interpreted

INT32 = st.integers(-(2**31), 2**31 - 1)


TILE_ROWS, ACROSS, LIMIT = 16, 3, 200  # rows and columns of tiles; more tiles than any example below has


@functools.partial(jax.jit, static_argnums=(1, 2, 3))
def visits(sizes: jax.Array, rows: int, blocks: int, has_start: bool) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For each block: the tiles it visits, how many, and where it says that the last group ends."""

    def tiles(size: jax.Array) -> jax.Array:
        return tile_scheduler.cdiv(size, TILE_ROWS) * ACROSS

    def visit(tile: GroupTile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seen, count = carry
        return seen.at[count].set(jnp.stack([tile.group, tile.start, tile.end, tile.number])), count + 1

    def walk(block: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
        start = (jnp.zeros((LIMIT, 4), jnp.int32), jnp.int32(0))
        end, (seen, count) = group_scheduler.for_each_group_tile(
            Groups(sizes, rows, has_start), tiles, StaticScheduler(block, blocks), visit, start
        )
        return seen, count, end

    with interpreted(True):
        return jax.vmap(walk)(jnp.arange(blocks, dtype=jnp.int32))


def group_tiles(sizes: list[int], rows: int, first: int = 0) -> tuple[list[tuple[int, int, int, int]], int]:
    """(group, start, end, number) of all tiles in order, and where the last group ends. first: where the first one begins."""
    found, end = [], min(max(first, 0), rows)
    for group, size in enumerate(sizes):
        start, end = end, min(rows, end + max(size, 0))
        found += [(group, start, end, number) for number in range(-(-(end - start) // TILE_ROWS) * ACROSS)]
    return found, end


def assert_blocks_share_out_the_tiles(sizes: list[int], rows: int, blocks: int, first: int | None = None) -> None:
    given = sizes if first is None else [first, *sizes]
    seen, counts, ends = visits(np.array(given, np.int32), rows, blocks, first is not None)
    wanted, end = group_tiles(sizes, rows, first or 0)
    assert ends.tolist() == [end] * blocks
    for block in range(blocks):
        assert [tuple(tile) for tile in seen[block, : counts[block]].tolist()] == wanted[block::blocks]


@given(
    st.sampled_from([7, 21, 70]).flatmap(  # of many, a warp's threads have shares: of 70, three each
        lambda count: st.lists(INT32 | st.integers(-2, 120) | st.sampled_from([0, 1, 16, 17]), min_size=count, max_size=count)
    ),
    st.sampled_from([(0, 1), (1, 3), (300, 1), (300, 4), (300, 64)]),
)
def test_blocks_take_the_tiles_of_all_groups_in_turn_whatever_the_sizes_are(sizes, rows_and_blocks):
    assert_blocks_share_out_the_tiles(sizes, *rows_and_blocks)


@pytest.mark.parametrize("groups", [7, 33, 300])
@given(st.sampled_from([0, 1, 299, 300]) | INT32, st.integers(0, 2**31 - 1))
def test_groups_that_begin_at_a_row_of_their_own_have_the_tiles_from_there_on(groups, first, seed):
    sizes = np.random.default_rng(seed).integers(-1, 3, groups)
    assert_blocks_share_out_the_tiles(sizes.tolist(), 300, 3, first)


@pytest.mark.parametrize("blocks", [1, 5])
def test_blocks_take_the_tiles_of_one_group_and_of_very_many_in_turn(blocks):
    assert_blocks_share_out_the_tiles([300], 300, blocks)
    for groups in (256, 300):  # of 300 a thread's share is read in a loop
        sizes = np.random.default_rng(0).multinomial(60, np.ones(groups) / groups)
        assert_blocks_share_out_the_tiles(sizes.tolist(), 64, blocks)


@given(st.lists(st.integers(0, 60), min_size=5, max_size=5), st.permutations(range(5)), st.sampled_from([1, 3]))
def test_groups_in_an_order_of_their_own_have_the_same_tiles(sizes, order, blocks):
    wanted, _ = group_tiles(sizes, 300)
    starts = np.cumsum([0, *sizes[:-1]])
    table = np.array([[group, starts[group], sizes[group]] for group in order] + [[0, 0, 0]], np.int32).reshape(-1)
    in_order = [tile for group in order for tile in wanted if tile[0] == group]
    seen, counts = ordered_visits(table, blocks)
    for block in range(blocks):
        assert [tuple(tile) for tile in seen[block, : counts[block]].tolist()] == in_order[block::blocks]


@functools.partial(jax.jit, static_argnums=1)
def ordered_visits(table: jax.Array, blocks: int) -> tuple[jax.Array, jax.Array]:
    """For each block: the tiles it visits, and how many."""

    def visit(tile: GroupTile, carry: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        seen, count = carry
        return seen.at[count].set(jnp.stack([tile.group, tile.start, tile.end, tile.number])), count + 1

    def walk(block: jax.Array) -> tuple[jax.Array, jax.Array]:
        start = (jnp.zeros((LIMIT, 4), jnp.int32), jnp.int32(0))
        groups = OrderedGroups(table, table.shape[0] // 3 - 1)
        tiles = lambda size: tile_scheduler.cdiv(size, TILE_ROWS) * ACROSS  # noqa: E731
        return group_scheduler.for_each_group_tile(groups, tiles, StaticScheduler(block, blocks), visit, start)[1]

    with interpreted(True):
        return jax.vmap(walk)(jnp.arange(blocks, dtype=jnp.int32))
