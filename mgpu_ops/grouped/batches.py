"""vmap of the grouped ops: a batch of products of groups is one product of all their groups.

The kernels read groups that follow each other. So the rows of a batch are put in the order of their groups, those of no group
last, and the results are put back: two gathers by XLA beside one launch. Where all products of a batch have the same matrices,
rows of one group come together from all of them, and a matrix is read once.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax

from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.grouped.problem import MAX_ROWS
from mgpu_ops.grouped.sizes import split
from mgpu_ops.registry import partition

# What the first axis of an array of a product counts. "sizes": what kernels read as the groups' sizes. "named": rows of which
# the numbers in "indices" name one for each row. "others": none of these.
type Kind = Literal["rows", "matrices", "sizes", "named", "indices", "others"]


def batchable(
    product: Callable[..., Any],
    kinds: Sequence[Kind],
    result: Kind = "rows",
    count: int = 1,
    group_offset: bool = False,
    without_offset: Callable[[], Callable[..., Any]] | None = None,
    *,
    rule: Callable[..., partition.Rule],
    backend: str | None,
) -> Callable[..., Any]:
    """`product`, a function of arrays of these kinds, under jit, so that eager calls trace once; vmap makes it one launch.

    result, count: the kind of what it returns, "rows" or "matrices", and how many arrays it returns.
    group_offset: whether the sizes are those of a shard, as `sizes.of_shard` gives them; `without_offset` then makes the
      function of the same arrays that takes plain sizes.
    rule, backend: how the product is split over devices, as `partition.partitioned` takes them.
    """
    mapped = jax.custom_batching.custom_vmap(partition.partitioned(product, rule, backend))

    @mapped.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        yes = True if count == 1 else (True,) * count
        batch = _Batch.of(size, batched, arrays, kinds, result, group_offset)
        if batch is None:
            return one_after_the_other(run, batched, arrays), yes
        function = run if without_offset is None or not group_offset else without_offset()
        outs = function(*(batch.taken(x, kind, is_batched) for x, kind, is_batched in zip(arrays, kinds, batched, strict=True)))
        return jax.tree.map(lambda x: batch.put_back(x, result), outs), yes

    run = jax.jit(mapped)
    return run


@dataclasses.dataclass(frozen=True)
class _Batch:
    """`size` products of `rows` rows each, as one. Entries are the groups of all of them.

    shared: whether all products have the same matrices; entries are then in the order of groups, else of products.
    sizes: of the product of all, int32. taken_from: for each of its rows, which row of the batch it is, counted over all
      products. put_to: for each row of the batch its place there; of no group, one that is zeros.
    named: how many rows each product has that indices name; 0 where all products have the same ones, or none.
    """

    size: int
    rows: int
    shared: bool
    sizes: jax.Array
    taken_from: jax.Array
    put_to: jax.Array
    named: int = 0

    @classmethod
    def of(
        cls,
        size: int,
        batched: Sequence[bool],
        arrays: Sequence[jax.Array],
        kinds: Sequence[Kind],
        result: Kind,
        group_offset: bool,
    ) -> _Batch | None:
        """The batch of a vmap of so many products; None where one after the other is the way.

        That is for what is neither rows nor of groups, and for shared matrices with something else of the groups that is not:
        the matrices would have to be copied.
        """
        each = list(zip(arrays, batched, kinds, strict=True))
        rows, is_batched = next((x, b) for x, b, kind in each if kind in ("rows", "indices"))
        count = rows.shape[is_batched]
        of_groups = [b for _, b, kind in each if kind == "matrices"]
        shared = result != "matrices" and not any(of_groups)
        if size * count == 0 or size * count > MAX_ROWS or any(b for _, b, kind in each if kind == "others"):
            return None
        if any(of_groups) and not of_groups[0]:
            return None
        sizes, is_batched = next((x, b) for x, b, kind in each if kind == "sizes")
        sizes = sizes if is_batched else jnp.broadcast_to(sizes, (size, *sizes.shape))
        batch = cls._of_sizes(sizes, count, shared, group_offset)
        return dataclasses.replace(batch, named=next((x.shape[1] for x, b, kind in each if kind == "named" and b), 0))

    @classmethod
    def _of_sizes(cls, sizes: jax.Array, rows: int, shared: bool, group_offset: bool) -> _Batch:
        """sizes: [products, groups], or of shards."""
        number = len(sizes)
        firsts, sizes = jax.vmap(lambda one: split(one, rows, group_offset))(sizes)
        starts = rows * jnp.arange(number, dtype=jnp.int32)[:, None] + firsts[:, None]
        starts += jnp.cumsum(sizes, 1, dtype=jnp.int32) - sizes  # where the groups begin in the batch

        def in_order(x: jax.Array) -> jax.Array:
            return (x.T if shared else x).reshape(-1)

        places = jnp.cumsum(in_order(sizes), dtype=jnp.int32) - in_order(sizes)  # where they begin in the product of all
        places = places.reshape(sizes.shape[::-1]).T if shared else places.reshape(sizes.shape)

        row, *_ = mesh.same_mesh_axes(jnp.arange(number * rows, dtype=jnp.int32), sizes)
        taken_from = row + in_order(starts - places)[_entry(in_order(places + sizes), row)]
        ends = (starts + sizes).reshape(-1)  # they only grow: groups of a product lie within its rows
        entry = _entry(ends, row)
        inside = (row >= starts.reshape(-1)[entry]) & (row < ends[entry])
        put_to = jnp.where(inside, row + (places - starts).reshape(-1)[entry], number * rows - 1)
        merged = sizes.sum(0, dtype=jnp.int32) if shared else sizes.reshape(-1)
        return cls(number, rows, shared, merged, jnp.clip(taken_from, 0, number * rows - 1), put_to)

    def taken(self, x: jax.Array, kind: Kind, is_batched: bool) -> jax.Array:
        """What the product of all takes in place of an array of the products."""
        if kind == "sizes":
            return self.sizes
        every = lax.collapse(x, 0, 2) if is_batched else x
        if kind == "named":
            return every
        if kind in ("rows", "indices"):
            found = every[self.taken_from if is_batched else lax.rem(self.taken_from, jnp.int32(self.rows))]
            # counted over the rows of all products, where each has its own
            return found + lax.div(self.taken_from, jnp.int32(self.rows)) * self.named if kind == "indices" else found
        if kind == "others" or self.shared:
            return x
        every = x if is_batched else jnp.broadcast_to(x, (self.size, *x.shape))
        return lax.collapse(every, 0, 2)

    def put_back(self, x: jax.Array, kind: Kind) -> jax.Array:
        """The results of the products, of one of the product of all."""
        x = x[self.put_to] if kind == "rows" else x
        return x.reshape(self.size, x.shape[0] // self.size, *x.shape[1:])


def _entry(ends: jax.Array, row: jax.Array) -> jax.Array:
    """Which entry each row is in, by where the entries end; the last one beyond."""
    found = jnp.searchsorted(ends, row, side="right", method="scan_unrolled").astype(jnp.int32)
    return jnp.minimum(found, len(ends) - 1)
