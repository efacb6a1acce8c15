"""Routing's top k, and sorts by counting, through XLA: of few keys in few kernels, of many in passes over blocks.

Few tokens are decoded, and there each small kernel takes as long as its launch: all keys are compared with all. Under vmap few
may be many, and take their way.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mgpu_ops.core import mesh

_ONE_BY_ONE = 16  # experts of a token, at most, that are found by so many passes
_FEW = 1 << 22  # comparisons, at most, where all keys are compared with all
_BLOCK = 128  # keys that are compared with each other
_BLOCKS = 64  # whose counts are added up one by one


def best(logits: jax.Array, of: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """The numbers of the top_k largest logits, the largest first, and what `of` has there, both [..., top_k].

    Of equal logits the first comes first; a NaN counts as larger than all, and with a sign as less, as in
    `lax.top_k`.
    """
    if logits.dtype != jnp.float32 or top_k > _ONE_BY_ONE:
        without_signs = jnp.where(logits == 0, jnp.zeros((), logits.dtype), logits)  # -0 equals 0
        experts = lax.top_k(without_signs, top_k)[1].astype(jnp.int32)
    else:
        # As integers, floats have the same order, and there is one left that is less than all: for those that were found.
        key = in_order(lax.bitcast_convert_type(logits, jnp.int32), -(2**31))
        if are_few(*key.shape, key.shape[-1]):
            # One kernel for the places, and one for both results.
            place, number = _places_and_numbers(key, top_k)
            is_best = _places_of_best(key, top_k)[..., None, :] == place
            return jnp.where(is_best, number, 0).sum(-1, dtype=jnp.int32), jnp.where(is_best, of[..., None, :], 0).sum(-1)
        experts = _one_by_one(key, top_k)
    return experts, jnp.take_along_axis(of, experts, axis=-1, mode="promise_in_bounds")


def in_order(bits: jax.Array, least: int) -> jax.Array:
    """Of float32's bits: int32 above `least`, in the same order, both zeros 0.

    NaNs with a sign are the least, other NaNs the largest. It is its own reverse, but for NaNs that would be `least` or less:
    they are all the next number.
    """
    return jnp.maximum(jnp.where(bits < 0, -(2**31) - bits, bits), least + 1)


def _one_by_one(key: jax.Array, top_k: int) -> jax.Array:
    """The numbers of the top_k largest keys, a maximum for each: a small kernel, which finds the keys in L2.

    XLA's `top_k` sorts all of them.
    """
    number = lax.broadcasted_iota(jnp.int32, key.shape, key.ndim - 1)
    found = []
    for _ in range(top_k):
        found.append(lax.argmax(key, key.ndim - 1, jnp.int32))
        key = jnp.where(number == found[-1][..., None], jnp.int32(-(2**31)), key)
    return jnp.stack(found, axis=-1)


def _places_of_best(key: jax.Array, top_k: int) -> jax.Array:
    """The place of each of few keys, the largest first: of the top_k largest, if vmap makes them many."""

    @jax.custom_batching.custom_vmap
    def places(key: jax.Array) -> jax.Array:
        return _places(key, descending=True)

    @places.def_vmap
    def batched(size: int, _: Any, keys: jax.Array) -> tuple[jax.Array, bool]:
        if are_few(*keys.shape, keys.shape[-1]):
            return _places_of_best(keys, top_k), True
        place, number = _places_and_numbers(keys, top_k)
        is_best = _one_by_one(keys, top_k)[..., None] == number
        return jnp.where(is_best, place - top_k, 0).sum(-2, dtype=jnp.int32) + top_k, True

    found: jax.Array = places(key)
    return found


def _places_and_numbers(key: jax.Array, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Indices along the last two dimensions of [..., top_k, experts]."""
    shape = (*key.shape[:-1], top_k, key.shape[-1])
    return lax.broadcasted_iota(jnp.int32, shape, key.ndim - 1), lax.broadcasted_iota(jnp.int32, shape, key.ndim)


def are_few(*sizes: Any) -> bool:
    """Whether so many comparisons are few. A symbolic number is not known to be. What vmap adds is not among the sizes."""
    return all(isinstance(size, int) for size in sizes) and math.prod(sizes) <= _FEW


def _places(keys: jax.Array, descending: bool = False) -> jax.Array:
    """The place of each key in a stable sort along the last dimension."""
    key, other = keys[..., :, None], keys[..., None, :]
    less, no_more = (other > key, other >= key) if descending else (other < key, other <= key)
    earlier = _earlier(less.shape)
    # The choice is between integers: of booleans, XLA makes two kernels.
    return jnp.where(earlier, no_more.astype(jnp.int32), less.astype(jnp.int32)).sum(-1, dtype=jnp.int32)


def counting_sort(keys: jax.Array, buckets: int) -> tuple[jax.Array, jax.Array]:
    """The place of each key in a stable sort, and how many keys each bucket has, both int32. Keys are at most `buckets`, and
    those that are `buckets` are in none: they come last.

    A key's place is the sum of: the keys in smaller buckets, those of its bucket in blocks before its own, and those in its
    block before it. All are sums of comparisons, in a few passes, which take together what XLA's sort alone does. Of few keys,
    each is compared with all others.
    """
    in_blocks = functools.partial(_sorted_in_blocks, buckets=buckets)
    if not are_few(keys.size, max(keys.size, buckets)):
        return in_blocks(keys)

    def compared(keys: jax.Array) -> tuple[jax.Array, jax.Array]:
        return _places(keys), (keys[None] == _numbers(buckets)[:, None]).sum(1, dtype=jnp.int32)

    found: tuple[jax.Array, jax.Array] = of_few(compared, in_blocks)(keys)
    return found


def _sorted_in_blocks(keys: jax.Array, buckets: int) -> tuple[jax.Array, jax.Array]:
    """`counting_sort` of many keys."""
    blocks = -(-keys.size // _BLOCK)
    inner = max(1, min(blocks, _BLOCKS))
    padding = -keys.size % (inner * _BLOCK)
    of_block = jnp.pad(keys, (0, padding), constant_values=buckets + 1).reshape(-1, inner, _BLOCK)  # which no key is
    bucket = _numbers(buckets + 1)[None, None, :, None]
    counts = (of_block[:, :, None, :] == bucket).sum(3, dtype=jnp.int32)  # [outer, blocks, buckets]
    whole = counts.sum(1, dtype=jnp.int32)
    sizes = whole.sum(0, dtype=jnp.int32)
    smaller = _before(sizes, 0)[None]
    before = _before(counts, 1) + (_before(whole, 0) + smaller)[:, None]  # the bucket's first place in the block
    same = of_block[..., :, None] == of_block[..., None, :]
    rank = (same & _earlier(same.shape)).sum(3, dtype=jnp.int32)
    first = jnp.take_along_axis(before, of_block, axis=2, mode="clip")
    return (first + rank).reshape(-1)[: keys.size], sizes[:-1]


def _before(x: jax.Array, axis: int) -> jax.Array:
    """The sums along an axis of what comes before each element, in one pass. A cumulative sum would be many small steps."""
    x = jnp.moveaxis(x, axis, -1)
    earlier = _earlier((*x.shape, x.shape[-1]))
    return jnp.moveaxis(jnp.where(earlier, x[..., None, :], 0).sum(-1, dtype=jnp.int32), -1, axis)


def _earlier(shape: tuple[int, ...]) -> jax.Array:
    """Whether an element of the last dimension comes before that of the one before it."""
    of, other = (lax.broadcasted_iota(jnp.int32, shape, len(shape) - i) for i in (2, 1))
    return of > other


def _numbers(size: int) -> jax.Array:
    return jnp.arange(size, dtype=jnp.int32)


def inverse(positions: jax.Array) -> jax.Array:
    """Of a permutation of 0 to its size - 1."""

    def scattered(positions: jax.Array) -> jax.Array:
        positions, counted = mesh.same_mesh_axes(positions, _numbers(positions.size))
        return jnp.zeros_like(counted).at[positions].set(counted, unique_indices=True, mode="promise_in_bounds")

    def compared(positions: jax.Array) -> jax.Array:
        return in_places(positions, _numbers(positions.size))[0]

    if not are_few(positions.size, positions.size):
        return scattered(positions)
    found: jax.Array = of_few(compared, scattered)(positions)
    return found


def in_places(positions: jax.Array, *arrays: jax.Array) -> list[jax.Array]:
    """Each array with its i-th element at positions[i], a permutation of 0 to its size - 1: each place is compared with all.

    A zero there has no sign.
    """
    positions, counted, *given = mesh.same_mesh_axes(positions, _numbers(positions.size), *arrays)
    here = positions[None] == counted[:, None]
    return [jnp.where(here, x[None], jnp.zeros((), x.dtype)).sum(1, dtype=x.dtype) for x in given]


def of_few(few: Callable[..., Any], many: Callable[..., Any]) -> Callable[..., Any]:
    """`few`, but under vmap `many`: it may make them many. No gradient passes through."""
    function = jax.custom_batching.custom_vmap(few)

    @function.def_vmap
    def batched(size: int, mapped: Any, *arrays: jax.Array) -> tuple[Any, Any]:
        out = jax.vmap(many, [0 if one else None for one in mapped], axis_size=size)(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return function
