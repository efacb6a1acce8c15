"""Rows of an array by index through XLA, and the transpose: rows added up where their indices say.

Both give the same bits each time. XLA's scatter, which adds as its threads come, does not.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.core import mesh

_AT_ONCE = 8  # rows that one pass adds up


def rows_at(x: jax.Array, indices: jax.Array) -> jax.Array:
    """x[indices], indices within x. Of 16 bits, two numbers are gathered as one, which takes XLA three quarters of the time."""
    if x.dtype not in (jnp.bfloat16, jnp.float16) or x.shape[1] % 2:
        return x.at[indices].get(mode="promise_in_bounds")
    pairs = lax.bitcast_convert_type(x.reshape(x.shape[0], x.shape[1] // 2, 2), jnp.uint32)
    found = lax.bitcast_convert_type(pairs.at[indices].get(mode="promise_in_bounds"), x.dtype)
    return found.reshape(indices.size, x.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(2,))
def sums_at(rows: jax.Array, indices: jax.Array, count: int) -> jax.Array:
    """out[r] = sum of rows[i] over all i with indices[i] = r, [count, columns], float32 or wider; 0 <= indices < count.

    Rows are sorted by index, and those of an index added up eight at a time, then the sums of eight, until each index has one:
    one pass where no index comes more than eight times. The order of the additions depends on the indices alone.
    """
    wide = np.promote_types(rows.dtype, np.float32)
    if not indices.size:
        return mesh.same_mesh_axes(jnp.zeros((count, rows.shape[1]), wide), rows)[0]
    rows, indices, zeros = mesh.same_mesh_axes(rows, indices, jnp.zeros((count,), jnp.int32))
    order = jnp.argsort(indices, stable=True).astype(jnp.int32)
    each = zeros.at[indices].add(1, mode="promise_in_bounds")  # integers: in any order the same
    most = min(rows.shape[0], count) + rows.shape[0] // _AT_ONCE  # of all sums that a pass makes

    def several(state: tuple[jax.Array, jax.Array]) -> jax.Array:
        return (state[1] > 1).any()

    def again(state: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
        return _pass(*state, lambda at: at, most)

    sums, each = lax.while_loop(several, again, _pass(rows, each, lambda at: order[at], most))
    # Found once, not for each element.
    first, there = lax.optimization_barrier((jnp.minimum(_before(each), most - 1), each > 0))
    return jnp.where(there[:, None], sums.at[first].get(mode="promise_in_bounds"), 0)


def _pass(rows: jax.Array, each: jax.Array, place: Callable[[jax.Array], jax.Array], most: int) -> tuple[jax.Array, jax.Array]:
    """Sums of up to eight rows of one index each, [most, columns], and how many of them each index has.

    each: how many rows an index has, one index after the other; place: from the number of a row in that order to its place.
    """
    sums_of = -(-each // _AT_ONCE)
    index = jnp.repeat(jnp.arange(each.size, dtype=jnp.int32), sums_of, total_repeat_length=most)
    number = jnp.arange(most, dtype=jnp.int32)
    first = (number - _before(sums_of)[index]) * _AT_ONCE  # within the rows of the index
    left = jnp.where(number < sums_of.sum(dtype=jnp.int32), each[index] - first, 0)
    start = jnp.where(left > 0, _before(each)[index] + first, 0)
    wide, nth = np.promote_types(rows.dtype, np.float32), jnp.arange(_AT_ONCE, dtype=jnp.int32)[:, None]
    # XLA would work out the places of a row's elements for each of them again.
    places, left = lax.optimization_barrier((place(start[None] + jnp.where(nth < left[None], nth, 0)), left))

    def row(i: int) -> jax.Array:
        found = rows.at[places[i]].get(mode="promise_in_bounds")
        return jnp.where((i < left)[:, None], found.astype(wide), 0)

    return functools.reduce(jnp.add, map(row, range(_AT_ONCE))), sums_of


def _before(each: jax.Array) -> jax.Array:
    """The sums of what comes before each number."""
    return jnp.cumsum(each, dtype=jnp.int32) - each


def _sums_forward(rows: jax.Array, indices: jax.Array, count: int) -> Any:
    return sums_at(rows, indices, count), (jnp.zeros((0,), rows.dtype), indices)


def _sums_backward(count: int, saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    like, indices = saved
    return rows_at(g.astype(like.dtype), indices), None


sums_at.defvjp(_sums_forward, _sums_backward)
