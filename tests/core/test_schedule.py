"""Tile orders: every tile is visited once, by the block whose turn it is, in strips that snake."""

from __future__ import annotations

import functools
import itertools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.core import schedule


@given(st.integers(1, 3000), st.integers(1, 200))
def test_blocks_that_take_turns_cover_every_tile_once(tiles, blocks):
    blocks = min(blocks, tiles)
    counts = schedule.tiles_of_block(tiles, np.arange(200, dtype=np.int32), blocks)[:blocks]
    assert counts.dtype == jnp.int32
    assert counts.tolist() == [len(range(block, tiles, blocks)) for block in range(blocks)]


@functools.cache
def walk(shape: tuple[int, int], minor: int, width: int) -> list[tuple[int, int]]:
    def tile(index: jax.Array) -> tuple[jax.Array, jax.Array]:
        return schedule.raster(index, shape, minor, width)

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
