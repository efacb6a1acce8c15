"""Sizes of groups: `group_sizes[g]` consecutive rows belong to group g.

Sizes are values, not shapes: the kernels read them on the device. They are not known when a function is traced, so any
values are safe: a negative size counts as 0, groups end where the rows end, and rows that belong to no group come
after all groups.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
from jax import lax

# How sizes are spread over groups. Sizes are not known to a database, so a config is tuned for one of these.
type Spread = Literal["even", "random", "skewed", "sparse"]
SPREADS: tuple[Spread, ...] = get_args(Spread.__value__)
_HALF = 14  # bits: about half of what MAX_ROWS has
_BLOCK = 128  # rows that the XLA reference takes at a time


def draw_sizes(spread: str, rows: int, groups: int, key: Any) -> jax.Array:
    """Sizes of `groups` groups, int32, that sum to `rows`.

    "even": equal, up to one row. "random": shares drawn from a Dirichlet distribution of concentration 4, a coefficient of
    variation near 0.5, as routers with a load-balancing loss give. "skewed": the g-th share is proportional to 1 / (g + 1), in
    random order. "sparse": half of the groups, at random, are empty; the others are as in "random".
    """
    key_shares, key_order = jax.random.split(key)
    if spread == "even":
        shares = jnp.ones(groups)
    elif spread == "skewed":
        shares = jax.random.permutation(key_order, 1.0 / jnp.arange(1, groups + 1))
    elif spread in ("random", "sparse"):
        shares = jax.random.gamma(key_shares, 4.0, (groups,))
        if spread == "sparse":
            shares *= jax.random.permutation(key_order, jnp.arange(groups)) < max(1, groups // 2)
    else:
        raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
    ends = jnp.round(jnp.cumsum(shares) / jnp.sum(shares) * rows).astype(jnp.int32)
    return jnp.diff(ends.at[-1].set(rows), prepend=0)


def draw_shard(spread: str, rows: int, groups: int, key: Any) -> jax.Array:
    """What `of_shard` gives, drawn: `draw_sizes` of the rows but for an eighth before the groups."""
    start = rows // 8
    return jnp.concatenate([jnp.full(1, start, jnp.int32), draw_sizes(spread, rows - start, groups, key)])


def safe_sizes(sizes: jax.Array, rows: int | jax.Array) -> jax.Array:
    """The sizes as they count: a negative one as 0, and the last ones cut where the rows end."""
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.clip(sizes, 0, rows))
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def of_shard(sizes: jax.Array, rows: int, offset: jax.Array, groups: int) -> jax.Array:
    """int32 [1 + groups]: the row where group `offset` begins, and the sizes of the `groups` groups from there on.

    Groups that `sizes` has not, before its first or after its last, have no rows. It is what kernels read instead of the sizes
    where a problem has a `group_offset`.
    """
    sizes = safe_sizes(sizes, rows)
    starts = jnp.cumsum(sizes, dtype=jnp.int32) - sizes
    first = jnp.clip(offset, -groups, sizes.size) + groups
    inside = lax.dynamic_slice_in_dim(jnp.pad(sizes, groups), first, groups)
    end = jnp.sum(sizes, keepdims=True, dtype=jnp.int32)
    every_start = jnp.concatenate([jnp.zeros(groups, jnp.int32), starts, jnp.broadcast_to(end, groups)])
    return jnp.concatenate([lax.dynamic_slice_in_dim(every_start, first, 1), inside])


def split(sizes: jax.Array, rows: int, group_offset: bool) -> tuple[jax.Array, jax.Array]:
    """The row where the first group begins, and the sizes as they count: of sizes, or of what `of_shard` gives."""
    if not group_offset:
        return jnp.zeros((), jnp.int32), safe_sizes(sizes, rows)
    start = jnp.clip(sizes[0], 0, rows)
    return start, safe_sizes(sizes[1:], rows - start)


def largest_first(sizes: jax.Array, rows: int, group_offset: bool) -> jax.Array:
    """The number, first row and size of each group, the largest first, then three zeros: int32 [3 groups + 3].

    It is the table of `group_scheduler.OrderedGroups`. sizes: of any values, or with a `group_offset` what `of_shard` gives. Of
    equal groups the first is first. It compares every group with every other: two small kernels of XLA's, of which sorting
    takes five.
    """
    first = jnp.clip(sizes[0], 0, rows) if group_offset else jnp.int32(0)
    sizes = jnp.clip(sizes[1:] if group_offset else sizes, 0, rows)
    number = jnp.arange(sizes.size, dtype=jnp.int32)
    before = number[None, :] < number[:, None]
    # Sums of sizes that are none may not fit into 32 bits: high and low halves are summed apart.
    high, low = (jnp.where(before, half, 0).sum(1, dtype=jnp.int32) for half in (sizes >> _HALF, sizes & (2**_HALF - 1)))
    high += low >> _HALF
    starts = jnp.where(high > rows >> _HALF, rows, (high << _HALF) + (low & (2**_HALF - 1)) + first)
    starts = jnp.minimum(starts, rows)
    larger = (sizes[None, :] > sizes[:, None]) | ((sizes[None, :] == sizes[:, None]) & before)
    place = larger.sum(1, dtype=jnp.int32)
    words = jnp.stack([number, starts, jnp.minimum(sizes, rows - starts)])
    chosen = place[None, None] == jnp.arange(sizes.size + 1, dtype=jnp.int32)[:, None, None]
    return jnp.where(chosen, words[None], 0).sum(2, dtype=jnp.int32).reshape(-1)


def in_a_group(sizes: jax.Array, rows: int, group_offset: bool) -> jax.Array:
    """Which of the rows belong to a group, bool [rows, 1]."""
    start, sizes = split(sizes, rows, group_offset)
    row = lax.broadcasted_iota(jnp.int32, (rows, 1), 0)
    return (row >= start) & (row < start + jnp.sum(sizes, dtype=jnp.int32))


def for_each_block(sizes: jax.Array, rows: int, body: Callable[..., Any], carry: Any, group_offset: bool = False) -> Any:
    """carry = body(carry, group, index[block], inside[block]) for blocks of rows of one group each, through XLA.

    `index` are the rows, within the array; `inside` says which of them belong to the group. Empty groups have no block.
    group_offset: `sizes` are those of a shard, as `of_shard` gives them.
    """
    block = max(1, min(_BLOCK, rows)) if isinstance(rows, int) else _BLOCK  # an exported function may have a symbolic number
    # XLA for GPUs fails to compile the loop where it finds out the number of its turns by running it, with sizes that it knows.
    start, sizes = split(lax.optimization_barrier(sizes), rows, group_offset)
    ends = start + jnp.cumsum(sizes, dtype=jnp.int32)  # not the int64 that JAX's 64-bit mode would take
    blocks = -(-sizes // block)
    last = jnp.cumsum(blocks, dtype=jnp.int32)

    def step(i: Any, carry: Any) -> Any:
        group = jnp.searchsorted(last, i, side="right", method="scan_unrolled").astype(jnp.int32)
        first = ends[group] - sizes[group] + (i - (last[group] - blocks[group])) * block
        row = first + jnp.arange(block, dtype=jnp.int32)
        return body(carry, group, jnp.minimum(row, rows - 1), row < ends[group])

    return lax.fori_loop(jnp.int32(0), last[-1], step, carry)
