"""Groups of rows: how sizes are drawn, what sizes count, and what the configs of both ops must fulfil."""

from __future__ import annotations

import functools
from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.core import gemm, gpu
from mgpu_ops.grouped import groups
from tests.mgpu_ops.grouped.ragged import BASE, spans

H200 = gpu.find("h200")
INT32 = st.integers(-(2**31), 2**31 - 1)

# --- drawing


@functools.cache
def drawn(spread: str, rows: int, count: int, seed: int = 0) -> np.ndarray:
    return np.asarray(groups.draw_sizes(spread, rows, count, jax.random.key(seed)))


@pytest.mark.parametrize("spread", groups.SPREADS)
def test_drawn_sizes_are_counts_that_hold_all_rows(spread):
    for rows, count in ((0, 3), (100, 1), (1000, 256)):
        sizes = drawn(spread, rows, count)
        assert sizes.dtype == np.int32
        assert sizes.shape == (count,)
        assert sizes.min() >= 0
        assert sizes.sum() == rows


@pytest.mark.parametrize(("rows", "count"), [(1000, 7), (5, 8), (4096, 256)])
def test_even_sizes_differ_by_one_row_at_most(rows, count):
    assert np.ptp(drawn("even", rows, count)) <= 1


def test_random_sizes_vary_as_much_as_those_of_a_balanced_router():
    sizes = drawn("random", 2**20, 256)
    assert 0.4 < sizes.std() / sizes.mean() < 0.6


def test_skewed_sizes_are_inverse_to_their_rank_in_random_order():
    sizes = drawn("skewed", 2**16, 8)
    shares = 1 / np.arange(1, 9)
    np.testing.assert_allclose(sorted(sizes, reverse=True), shares / shares.sum() * 2**16, atol=1)
    assert (sizes != drawn("skewed", 2**16, 8, seed=1)).any()


@pytest.mark.parametrize(("count", "empty"), [(8, 4), (7, 4), (1, 0)])
def test_half_of_the_sparse_groups_are_empty(count, empty):
    assert (drawn("sparse", 2**16, count) == 0).sum() == empty


def test_sizes_are_the_same_for_the_same_key():
    for spread in groups.SPREADS[1:]:
        first, second, other = (groups.draw_sizes(spread, 1000, 8, jax.random.key(seed)) for seed in (0, 0, 1))
        assert (first == second).all()
        assert (first != other).any()


def test_unknown_spread_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="spread='wide' is not one of even, random, skewed, sparse"):
        groups.draw_sizes("wide", 10, 2, jax.random.key(0))


# --- sizes that count

safe_sizes = jax.jit(groups.safe_sizes, static_argnums=1)


@given(st.lists(INT32 | st.integers(-3, 200), min_size=6, max_size=6), st.sampled_from([0, 1, 100, 2**30]))
def test_any_sizes_count_as_groups_that_end_where_the_rows_end(sizes, rows):
    out = safe_sizes(np.array(sizes, np.int32), rows)
    assert out.dtype == jnp.int32
    assert out.tolist() == [s.stop - s.start for s in spans(sizes, rows)]


@pytest.mark.parametrize("sizes", [[3, 0, 5], (3, 0, 5), np.array([3, 0, 5], "int8"), np.array([3, 0, 5], "uint64")], ids=repr)
def test_sizes_of_any_integer_type_become_int32(sizes):
    out = groups.checked_sizes("f", sizes, 3, 8)
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.int32
    assert out.tolist() == [3, 0, 5]


# --- registers and shared memory of a config


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_registers_of_all_warpgroups_fit_in_the_register_file(warpgroups):
    for memory in range(24, 129, 8):
        compute = groups.consumer_registers(replace(BASE, compute_warpgroups=warpgroups, memory_registers=memory), H200)
        assert compute % 8 == 0
        assert compute <= 240
        assert 128 * (memory + warpgroups * compute) <= H200.registers_per_sm


@pytest.mark.parametrize(
    ("warpgroups", "side", "wanted"), [(1, "m", (128, 192)), (1, "n", (128, 192)), (2, "m", (64, 192)), (2, "n", (128, 96))]
)
def test_warpgroups_share_out_one_side_of_the_tile(warpgroups, side, wanted):
    config = replace(BASE, tile_m=128, tile_n=192, compute_warpgroups=warpgroups, wg_dimension=side)
    assert gemm.warpgroup_tile(config) == wanted
    assert gemm.Storage(config, 1, 2).out_shape == (warpgroups, 1, 64, 64)


WIDE = replace(BASE, tile_m=128, tile_n=256, compute_warpgroups=2)


@pytest.mark.parametrize("config", [BASE, WIDE, replace(BASE, tile_k=128)], ids=str)
def test_good_tiles_have_no_reason_against_them(config):
    assert groups.check_tiles(config, 2, H200) is None


@pytest.mark.parametrize(
    ("config", "itemsize", "reason"),
    [
        (replace(BASE, compute_warpgroups=3), 2, r"compute_warpgroups=3 is not one of \(1, 2\)"),
        (replace(BASE, wg_dimension="k"), 2, r"wg_dimension='k' is not one of \('m', 'n'\)"),
        (replace(BASE, tile_k=96), 2, r"tile_k=96 is not one of \(64, 128\)"),
        (replace(BASE, tile_m=0), 2, "tile_m=0 must be at least 1"),
        (replace(BASE, raster_width=0), 2, "raster_width=0 must be from 1 to 1024"),
        (replace(BASE, epilogue_tile_n=0), 2, "epilogue_tile_n=0 must be at least 1"),
        (replace(BASE, epilogue_slots=0), 2, "epilogue_slots=0 must be from 1 to the 1 epilogue tiles of a warpgroup"),
        (replace(BASE, tile_m=320), 2, "tile_m, tile_n and tile_k must be at most 256: a TMA box"),
        (replace(BASE, tile_n=512), 2, "tile_m, tile_n and tile_k must be at most 256: a TMA box"),
        (replace(BASE, max_concurrent_steps=1), 2, "max_concurrent_steps=1: loading ahead takes at least 2 stages"),
        (replace(BASE, memory_registers=30), 2, "memory_registers=30 must be a multiple of 8 from 24 to 128"),
        (replace(BASE, memory_registers=136), 2, "memory_registers=136 must be a multiple of 8 from 24 to 128"),
        (replace(BASE, tile_m=96), 2, "96 rows of tile_m=96 must be a multiple of 64"),
        (replace(BASE, compute_warpgroups=2), 2, "32 rows of tile_m=64 must be a multiple of 64"),
        (replace(BASE, tile_n=68), 2, "68 columns of tile_n=68 must be a multiple of 8"),
        (replace(WIDE, wg_dimension="n", tile_n=136), 2, "68 columns of tile_n=136 must be a multiple of 8"),
        (replace(BASE, epilogue_tile_n=32), 2, "epilogue_tile_n=32 must divide a warpgroup's 64 columns and be .* of 64"),
        (replace(BASE, epilogue_tile_n=48), 4, "epilogue_tile_n=48 must divide a warpgroup's 64 columns and be .* of 32"),
        (replace(BASE, tile_n=192, epilogue_tile_n=128), 2, "epilogue_tile_n=128 must divide a warpgroup's 192 columns"),
        (replace(BASE, epilogue_slots=2), 2, "epilogue_slots=2 must be from 1 to the 1 epilogue tiles of a warpgroup"),
        (replace(BASE, tile_m=128, tile_n=256), 2, "accumulator takes 256 registers a thread.*240 are left: use smaller tiles"),
    ],
)
def test_reason_names_the_field_the_value_and_the_rule(config, itemsize, reason):
    with pytest.raises(ValueError, match=reason):  # pytest.raises prints what did not match
        raise ValueError(groups.check_tiles(config, itemsize, H200))
