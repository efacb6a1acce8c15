"""The kernel of rotary_into_cache: a block of one warpgroup for each kv_heads heads of a sequence's new token.

TMA loads the halves of the heads apart, so that both lie alike in registers, and stores each where it belongs: to the queries,
or to the row of the cache that the sequence's position names, in a pool of pages that of a page of the sequence's table. A
block finds the norm of its row by itself.

With norms of heads, four heads at once are normalised, one by each warp, whose threads exchange their sums of squares. Weights
come with the halves, from where they are: had XLA to lay them out first, that would take a kernel in front of this one.

For a cache of 8 bits the heads of keys and values, as they would be stored, are divided by their scales and rounded once more.
"""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.limits import WARP
from mgpu_ops.core.narrow import narrow
from mgpu_ops.core.row_norm import factor_of_squares, row_factor, sums_of_rows
from mgpu_ops.rotary.into_cache_arrays import AT_ONCE, Arrays


def launch(arrays: Arrays, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Runs the kernel; the caches are written in place where XLA can give them up."""
    qkv, cos, sin, k, v, positions, page_table, of_rows, of_heads, scales = arrays
    (entries, tokens, kv_heads, head_dim), batch = k.shape, qkv.shape[0]
    half, heads = head_dim // 2, qkv.shape[1] // head_dim - 2 * kv_heads
    groups = heads // kv_heads + 2  # of queries, and one of keys and of values
    # Cosines and sines for each head, so that one copy brings them: XLA writes them so, in one kernel, where it computes them.
    angles = jnp.stack(jnp.broadcast_arrays(cos, sin), 1)
    angles = jnp.broadcast_to(angles[:, :, None], (angles.shape[0], 2, kv_heads, half))
    caches = [jax.new_ref(cache.reshape(entries, tokens, kv_heads, 2, half)) for cache in (k, v)]
    flat, count = [x.reshape(-1) for x in scales], len(of_rows) + len(of_heads)
    pages, tables = page_table[0].shape[1] if page_table else 1, [table.reshape(-1) for table in page_table]
    norms = [*(weight.reshape(2, half) for weight in of_heads[:2]), *of_heads[2:]]

    def body(
        x: Any, angles: Any, positions: Any, k: Any, v: Any, *rest: Any, halves: Any, turns: Any, full: Any, **more: Any
    ) -> None:
        *given, q = rest
        norm, norms, scales = given[: len(of_rows)], given[len(of_rows) : count], given[count : count + len(flat)]
        weights, narrowed = more.get("weights"), more.get("narrowed", halves)
        row, group = lax.axis_index("row"), lax.axis_index("group")
        of_group = pl.ds(group * kv_heads, kv_heads)
        for i, smem in enumerate(halves):
            engine.copy_gmem_to_smem(x.at[row, of_group, i], smem, full)
        engine.copy_gmem_to_smem(angles.at[_of(angles, row)], turns, full)
        if norms:
            pl.when(group < groups - 2)(lambda: _load(norms[0], weights, full))
            pl.when(group >= groups - 2)(lambda: _load(norms[1], weights, full))  # values leave it, but wait for as many copies
        factor = row_factor(norm[0].at[row], norm[1][0]) if norm else None
        at, entry, known = jnp.clip(positions[_of(positions, row)], 0, pages * tokens - 1), row, True
        if tables:
            page = given[-1][row * pages + lax.div(at, jnp.int32(tokens))]
            at, entry, known = lax.rem(at, jnp.int32(tokens)), jnp.clip(page, 0, entries - 1), (page >= 0) & (page < entries)
        plgpu.barrier_wait(full)
        if norms:
            _normalise_and_rotate(halves, turns, factor, weights, norms[2][0], group < groups - 1)
        else:
            _rotate(halves, turns, factor, group < groups - 1)
        if scales:
            engine.warpgroup_barrier()  # all threads have written their part of a head
            for number, of_heads in enumerate(scales):
                first = row * (kv_heads if of_heads.shape[0] > kv_heads else 0)
                pl.when(group == groups - 2 + number)(functools.partial(_narrow, halves, narrowed, of_heads, first))
        plgpu.commit_smem()  # TMA sees what was written
        _store(halves, q.at[row, of_group], group < groups - 2)
        _store(narrowed, k.at[entry, at], (group == groups - 2) & known)
        _store(narrowed, v.at[entry, at], (group == groups - 1) & known)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    q = engine.kernel(
        body,
        engine.Launch(
            f"mgpu_ops_rotary{'_normalised' * bool(norms)}_into_cache",
            {"row": batch, "group": groups},
            warpgroups=1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((batch, heads, 2, half), qkv.dtype),
        scratch_types={
            "halves": tuple(plgpu.SMEM((kv_heads, half), qkv.dtype) for _ in range(2)),
            "turns": plgpu.SMEM((2, kv_heads, half), jnp.float32),
            "full": plgpu.Barrier(num_arrivals=3 + (2 * AT_ONCE if norms else 0)),
            **({"weights": plgpu.SMEM((2, AT_ONCE, half), norms[0].dtype)} if norms else {}),
            **({"narrowed": tuple(plgpu.SMEM((kv_heads, half), k.dtype) for _ in range(2))} if scales else {}),
        },
    )(qkv.reshape(batch, heads + 2 * kv_heads, 2, half), angles, positions, *caches, *of_rows, *norms, *flat, *tables)
    return q.reshape(batch, 1, heads, head_dim), *(jax.freeze(cache).reshape(k.shape) for cache in caches)


def _rotate(halves: tuple[Any, Any], turns: Any, factor: jax.Array | None, here: jax.Array) -> None:
    """Heads times the factor of their row, if there is one; where `here` says so turned by the cosines and sines of `turns`."""
    dtype = halves[0].dtype
    if factor is not None:
        for smem in halves:
            smem[...] = (smem[...].astype(jnp.float32) * factor).astype(dtype)

    @pl.when(here)
    def _() -> None:
        left, right = (smem[...].astype(jnp.float32) for smem in halves)
        c, s = (turns[i] for i in range(2))
        halves[0][...] = (left * c - right * s).astype(dtype)
        halves[1][...] = (right * c + left * s).astype(dtype)


def _narrow(halves: tuple[Any, Any], narrowed: tuple[Any, Any], scales: Any, first: jax.Array) -> None:
    """Heads divided by their scales, in 8 bits."""
    for src, dst in zip(halves, narrowed, strict=True):
        narrow(src, dst, scales, first)


def _load(weight: Any, smem: Any, full: Any) -> None:
    """Both halves of a weight [2, half], once for each of the heads that are normalised at once."""
    for number in range(2):
        for head in range(AT_ONCE):
            engine.copy_gmem_to_smem(weight.at[number], smem.at[number, head], full)


def _normalise_and_rotate(
    halves: tuple[Any, Any], turns: Any, factor: jax.Array | None, weights: Any, epsilon: jax.Array, here: jax.Array
) -> None:
    """As `_rotate`; before they are turned, heads are divided by their root mean square and multiplied by their weight."""
    (heads, half), dtype = halves[0].shape, halves[0].dtype
    layout = plgpu.Layout.WG_STRIDED((AT_ONCE, half), half // WARP)  # a head for each warp

    def read(ref: Any) -> jax.Array:
        values: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
        return values.astype(jnp.float32)

    @pl.when(here)
    def _() -> None:
        of_left, of_right = (read(weights.at[i]) for i in range(2))
        c, s = (read(turns.at[i, pl.ds(0, AT_ONCE)]) for i in range(2))  # the same for all heads
        turned = []
        for head in range(0, heads, AT_ONCE):
            left, right = (read(smem.at[pl.ds(head, AT_ONCE)]) for smem in halves)
            if factor is not None:
                left, right = left * factor, right * factor
            own = factor_of_squares(sums_of_rows(left * left + right * right), 2 * half, epsilon)
            left, right = left * own * of_left, right * own * of_right
            turned.append((left * c - right * s, right * c + left * s))
        for number, both in enumerate(turned):  # after all sums: a store waits for all threads
            for smem, values in zip(halves, both, strict=True):
                smem[pl.ds(number * AT_ONCE, AT_ONCE)] = values.astype(dtype)

    if factor is not None:

        @pl.when(jnp.logical_not(here))
        def _() -> None:
            for smem in halves:
                smem[...] = (smem[...].astype(jnp.float32) * factor).astype(dtype)


def _store(halves: tuple[Any, Any], out: Any, here: jax.Array) -> None:
    """Heads to out[heads, 2, half], where `here` says that they belong there."""

    @pl.when(here)
    def _() -> None:
        for i, smem in enumerate(halves):
            plgpu.copy_smem_to_gmem(smem, out.at[:, i])


def _of(ref: Any, row: jax.Array) -> Any:
    """The index of a sequence's own, or of the only one."""
    return row if ref.shape[0] > 1 else 0
