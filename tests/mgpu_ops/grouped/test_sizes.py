"""Sizes of groups: how they are drawn, and what any sizes count as."""

from __future__ import annotations

import functools

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops.grouped import sizes
from mgpu_ops.grouped.calls import checked_sizes
from mgpu_ops.grouped.sizes import SPREADS, draw_sizes
from tests.mgpu_ops.grouped.ragged import spans

INT32 = st.integers(-(2**31), 2**31 - 1)

# --- drawing


draw = jax.jit(draw_sizes, static_argnums=(0, 1, 2))


@functools.cache
def drawn(spread: str, rows: int, count: int, seed: int = 0) -> np.ndarray:
    return np.asarray(draw(spread, rows, count, jax.random.key(seed)))


@pytest.mark.parametrize("spread", SPREADS)
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
    for spread in SPREADS[1:]:
        first, second, other = (draw(spread, 1000, 8, jax.random.key(seed)) for seed in (0, 0, 1))
        assert (first == second).all()
        assert (first != other).any()


def test_unknown_spread_is_an_error_that_names_the_known_ones():
    with pytest.raises(ValueError, match="spread='wide' is not one of even, random, skewed, sparse"):
        draw_sizes("wide", 10, 2, jax.random.key(0))


# --- sizes that count

safe_sizes = jax.jit(sizes.safe_sizes, static_argnums=1)


@given(st.lists(INT32 | st.integers(-3, 200), min_size=6, max_size=6), st.sampled_from([0, 1, 100, 2**30]))
def test_any_sizes_count_as_groups_that_end_where_the_rows_end(sizes, rows):
    out = safe_sizes(np.array(sizes, np.int32), rows)
    assert out.dtype == jnp.int32
    assert out.tolist() == [s.stop - s.start for s in spans(sizes, rows)]


@pytest.mark.parametrize("sizes", [[3, 0, 5], (3, 0, 5), np.array([3, 0, 5], "int8"), np.array([3, 0, 5], "uint64")], ids=repr)
def test_sizes_of_any_integer_type_become_int32(sizes):
    out = checked_sizes("f", sizes, 3, 8)
    assert isinstance(out, jax.Array)
    assert out.dtype == jnp.int32
    assert out.tolist() == [3, 0, 5]


@functools.partial(jax.jit, static_argnums=(1, 2))
def ordered(values: jax.Array, rows: int, group_offset: bool) -> jax.Array:
    return sizes.largest_first(values, rows, group_offset)


@given(st.lists(st.integers(-2, 90) | INT32, min_size=6, max_size=6), st.sampled_from([0, 150, 2**28]), st.booleans())
def test_groups_are_ordered_largest_first_with_the_rows_that_any_sizes_count_as(values, rows, group_offset):
    *table, last = np.asarray(ordered(np.array(values, np.int32), rows, group_offset)).reshape(-1, 3).tolist()
    start, *rest = values if group_offset else (0, *values)
    wanted = [[i, x.start, x.stop - x.start] for i, x in enumerate(spans(rest, rows, start))]
    assert sorted(table) == wanted
    assert last == [0, 0, 0]
    if min(rest) >= 0 and start + sum(rest) <= rows:  # others fill the rows with groups that are cut
        assert table == sorted(wanted, key=lambda entry: (-entry[2], entry[0]))
