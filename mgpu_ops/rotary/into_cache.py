"""rotary_into_cache: what decoding does between the product for q, k and v and attention, in one kernel.

Here: the public function, its batching rule, and the same through XLA. `into_cache_kernel.py`: the kernel.
`into_cache_arrays.py`: what both take. Nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import floats, integers, kv_cache
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import limits, mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.rms_rows import checked_norm, divided, supports_rows
from mgpu_ops.rotary import Problem, checked_norms
from mgpu_ops.rotary import reference as rotary_reference
from mgpu_ops.rotary.into_cache_arrays import AT_ONCE, Arrays
from mgpu_ops.rotary.problem import HEAD_DIMS

_THREADS = 128  # of a warpgroup, each of which rotates as many pairs
_BOX = 256  # a TMA copy's largest side
_UNIT = 16  # bytes: a TMA copy's rows are whole ones
_ALIGNED = 128  # bytes: where a TMA copy begins in shared memory
_READ = {"bfloat16", "float16", "float32"}  # dtypes of weights that the kernel reads


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays. paged: with a table of pages. of_rows, of_heads: norms that there are."""

    backend: dispatch.Backend | None
    paged: bool
    of_rows: bool
    of_heads: bool

    def apart(self, arrays: Sequence[Any]) -> Arrays:
        """The arrays by name, or what there is of each, such as whether vmap maps it."""
        first = 6 + self.paged
        end = first + 2 * self.of_rows
        last = end + 3 * self.of_heads
        return Arrays._make((*arrays[:6], arrays[6:first], arrays[first:end], arrays[end:last], arrays[last:]))


def rotary_into_cache(
    qkv: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    k_cache: ArrayLike,
    v_cache: ArrayLike,
    positions: ArrayLike,
    *,
    page_table: ArrayLike | None = None,
    rms_rows: ArrayLike | None = None,
    rms_epsilon: float = 1e-6,
    q_norm: ArrayLike | None = None,
    k_norm: ArrayLike | None = None,
    epsilon: float = 1e-6,
    k_scale: ArrayLike | None = None,
    v_scale: ArrayLike | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Rotates q and k of one new token of each sequence and writes k and v to the KV cache: decoding, before attention.

    A head of q or k with halves x1 and x2 becomes (x1 cos - x2 sin, x2 cos + x1 sin), in float32, rounded once; values are
    copied. With norms of heads, a head x of q is first x q_norm / sqrt(mean of x^2 + epsilon), and one of k likewise with
    k_norm: keys in the cache are normalised and rotated. It is one kernel, where XLA takes three or more. In a jitted function
    that donates the cache it is written in place.

    Args:
      qkv: [batch, (q_heads + 2 kv_heads) head_dim]: the heads of the queries, then of the keys, then of the values.
      cos, sin: floats [batch, head_dim / 2], of each sequence's angles, or [head_dim / 2].
      k_cache, v_cache: [batch, tokens, kv_heads, head_dim], of qkv's dtype, or both float8_e4m3fn or int8. With page_table
        pools of pages, [pages, page_size, kv_heads, head_dim].
      positions: integers [batch] or a scalar: the row of the cache to write. One out of range counts as the nearest.
      page_table: integers [batch, pages of a sequence], as in `flash_attention`. Position p of sequence b is row p % page_size
        of page page_table[b, p // page_size]; where that names no page, nothing is written. No two sequences may write to one
        row. Default: no pages.
      rms_rows: floats [batch, width]. qkv is first divided by sqrt(mean over the row of rms_rows^2 + rms_epsilon): the RMS norm
        in front of the projection qkv = rms_rows @ w, whose weight is a factor of w's rows. Default: none.
      rms_epsilon: a number of at least 0.
      q_norm, k_norm: weights [head_dim] of an RMS norm of each head of q and of k, used as float32, after the division by
        rms_rows. Default: no norm.
      epsilon: of both norms of heads, a Python number of at least 0.
      k_scale, v_scale: of caches of 8 bits, floats above 0, a scalar, [kv_heads] or [batch, kv_heads]; 1 by default. The new
        keys and values, rounded to qkv's dtype, are divided by them, rounded to 8 bits and saturated at +-448 or +-127, as
        `flash_attention` takes them with the same scales. An infinity becomes NaN in float8_e4m3fn, NaN 0 in int8.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla". Default: $MGPU_OPS_BACKEND, else the kernel where it runs.

    Returns:
      q, [batch, 1, q_heads, head_dim], and both caches, as `flash_attention` takes them.

    The kernel takes 16-bit floats, kv_heads that divide q_heads, a head_dim that is a multiple of 16 (of 32 with caches of 8
    bits) up to 512, and kv_heads head_dim a multiple of 256. With norms of heads head_dim is 64, 128 or 256, and kv_heads a
    multiple of 4.

    Works under jit, vmap (with a page_table one after the other) and scan. Sequences may be split over devices, but not those
    that share a pool of pages. There is no gradient.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, one of q_norm and k_norm alone, an epsilon below 0 or not
        finite, a known k_scale or v_scale that is not finite (traced ones: see `matmul`), an unknown backend, or one that
        cannot run the kernel.
      TypeError: not arrays of floats, positions that are no integers; a scale without a cache of 8 bits; a gradient.

    Example:
      >>> qkv = jnp.ones((2, (4 + 2 * 4) * 64), jnp.bfloat16)
      >>> k_cache, v_cache = jnp.zeros((2, 2, 1024, 4, 64), jnp.bfloat16)
      >>> angles = 7 * 10000.0 ** (-jnp.arange(32) / 32)
      >>> q, k_cache, v_cache = mgpu_ops.rotary_into_cache(qkv, jnp.cos(angles), jnp.sin(angles), k_cache, v_cache, 7)
      >>> q.shape
      (2, 1, 4, 64)

    Source: as for `rotary_qkv`; measurements in docs/ops/attention.md.
    """
    given = (floats.array("rotary_into_cache", name, x) for name, x in (("qkv", qkv), ("cos", cos), ("sin", sin)))
    rows, cosines, sines = given
    k, v = (kv_cache.array("rotary_into_cache", name, x) for name, x in (("k_cache", k_cache), ("v_cache", v_cache)))
    where = integers.array("positions", positions)
    _check(rows, k, v, page_table is not None)
    (_, tokens, kv_heads, head_dim), batch = k.shape, rows.shape[0]
    tables = [] if page_table is None else [_checked_pages(page_table, batch, k.shape[0])]
    angles = []
    for name, x in (("cos", cosines), ("sin", sines)):
        if x.shape not in ((batch, head_dim // 2), (head_dim // 2,)):
            raise ValueError(
                f"{name} has shape {x.shape}: it must be [batch, head_dim / 2] = {(batch, head_dim // 2)}, or without batch"
            )
        angles.append(x.astype(jnp.float32).reshape(-1, head_dim // 2))
    if where.shape not in ((batch,), ()):
        raise ValueError(f"positions has shape {where.shape}: it must be [batch] = {(batch,)}, or a scalar")
    where = integers.clipped(where, tokens * (tables[0].shape[1] if tables else 1) - 1).reshape(-1)
    norm = checked_norm("rotary_into_cache", batch, rms_rows, rms_epsilon)
    weights, number = checked_norms("rotary_into_cache", head_dim, q_norm, k_norm, epsilon)
    of_heads = [*_as_the_kernel_reads(weights), jnp.full((1,), number, np.float32)] if weights else []
    scales: Sequence[jax.Array] = ()
    if k.dtype == rows.dtype:
        kv_cache.without_scales(k.dtype, k_scale, v_scale)
    else:
        scales = kv_cache.checked_scales("rotary_into_cache", batch, kv_heads, k_scale, v_scale)
    call = _Call(dispatch.requested_backend(backend), bool(tables), bool(norm), bool(of_heads))
    arrays = mesh.same_mesh_axes(rows, *angles, k, v, where, *tables, *norm, *of_heads, *scales)
    q, k, v = _rotated(call, *arrays)
    return q, k, v


def _as_the_kernel_reads(weights: Sequence[jax.Array]) -> list[jax.Array]:
    """Weights of both norms in one dtype: their own, where TMA can bring halves of them, as XLA takes a kernel to cast each."""
    dtypes = {weight.dtype.name for weight in weights}
    if len(dtypes) == 1 and dtypes <= _READ and weights[0].size // 2 * weights[0].dtype.itemsize % _ALIGNED == 0:
        return list(weights)
    return [weight.astype(np.float32) for weight in weights]


def _checked_pages(table: Any, batch: int, pages: int) -> jax.Array:
    """The table of pages as int32, with -1 where an entry of another dtype names none."""
    found = kv_cache.page_table(table, batch)
    if found.dtype == jnp.int32:
        return jnp.asarray(found)
    names_one = (found >= 0) & (found < pages)
    return jnp.where(names_one, found.astype(np.int32), -1)


def _check(qkv: jax.Array, k: jax.Array, v: jax.Array, paged: bool) -> None:
    if k.ndim != 4 or k.shape != v.shape or 0 in k.shape:
        sides = "[pages, page_size, kv_heads, head_dim], with a page_table" if paged else "[batch, tokens, kv_heads, head_dim]"
        raise ValueError(f"k_cache{k.shape} and v_cache{v.shape} must both be {sides}, none of them 0")
    if k.dtype != v.dtype or (k.dtype != qkv.dtype and k.dtype.name not in kv_cache.DTYPES):
        raise ValueError(
            f"qkv is {qkv.dtype}, k_cache {k.dtype} and v_cache {v.dtype}: cast them to one, or both caches to "
            f"{' or '.join(kv_cache.DTYPES)}"
        )
    batch, _, kv_heads, head_dim = k.shape
    if head_dim % 2:
        raise ValueError(f"head_dim={head_dim} has no halves: it must be even")
    fits = qkv.ndim == 2 and (paged or qkv.shape[0] == batch)
    if not fits or qkv.shape[1] % head_dim or qkv.shape[1] <= 2 * kv_heads * head_dim:
        raise ValueError(
            f"qkv{qkv.shape} does not fit k_cache{k.shape}: it must be [batch, (q_heads + 2 kv_heads) head_dim] with "
            f"{'' if paged else f'batch={batch}, '}kv_heads={kv_heads}, head_dim={head_dim}"
        )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _rotated(call: _Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Of qkv, cos and sin [batch or 1, head_dim / 2], both caches, positions [batch or 1], what norms take, and scales."""
    found: tuple[jax.Array, jax.Array, jax.Array] = _batchable(call)(*arrays)
    return found


def _no_gradient(*_: Any) -> Any:
    raise TypeError(
        "rotary_into_cache has no gradient: it is for decoding. Train with mgpu_ops.rotary_qkv or mgpu_ops.rotary_attention, "
        "or stop the gradients of its arguments (jax.lax.stop_gradient)"
    )


_rotated.defvjp(_no_gradient, _no_gradient)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. vmap makes one launch of it, with more sequences."""

    def one_device(*arrays: jax.Array) -> tuple[jax.Array, ...]:
        return _run(call, *arrays)

    def rule(*arrays: jax.Array) -> partition.Rule:
        """Sequences are split, but for those that write to one pool of pages."""
        batch = "BATCH" if call.paged else "batch"
        turned, position = ("ONE" if x.shape[0] == 1 else batch for x in (arrays[1], arrays[5]))
        cache, table = ("PAGES S KV D", f", {batch} N") if call.paged else (f"{batch} S KV D", "")
        norms = f", {batch} K, ONE" * call.of_rows + ", D, D, ONE" * call.of_heads
        scales = "".join(f", {'ONE' if x.shape[0] == 1 else batch} KV" for x in call.apart(arrays).scales)
        operands = f"{batch} JOINED, {turned} HALF, {turned} HALF, {cache}, {cache}, {position}{table}{norms}{scales}"
        return partition.Rule("rotary_into_cache", f"{operands} -> {batch} T H D, {cache}, {cache}")

    rotate = jax.custom_batching.custom_vmap(partition.partitioned(one_device, rule, call.backend))

    @rotate.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        if not size or call.paged or any(call.apart(batched).of_heads):  # a launch takes one pool, and one weight of each norm
            return one_after_the_other(rotate, batched, arrays), (True,) * 3
        scaled = len(call.apart(arrays).scales)
        first, last = 6 + call.of_rows, len(arrays) - scaled
        own, others = (*arrays[:first], *arrays[last:]), arrays[first:last]
        mapped_own = (*batched[:first], *batched[last:])

        batch = arrays[0].shape[1 if batched[0] else 0]

        def fold(x: jax.Array, mapped: bool) -> jax.Array:
            x = x if mapped else x[None]
            if x.shape[:2] == (1, 1):  # one for all sequences
                return x[0]
            return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(-1, *x.shape[2:])

        folded = [fold(x, mapped) for x, mapped in zip(own, mapped_own, strict=True)]
        out = rotate(*folded[:first], *others, *folded[first:])
        return tuple(x.reshape(size, batch, *x.shape[1:]) for x in out), (True,) * 3

    return jax.jit(rotate)


def _run(call: _Call, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """On the backend that the call asks for; where it asks for none, the kernel where it can run."""
    given = call.apart(arrays)
    rows = given.of_rows[0] if given.of_rows else None
    choice = dispatch.choose_for(
        "rotary_into_cache",
        f"of k_cache{given.k.shape}",
        lambda device: supports(given.qkv, given.k, rows, call.of_heads, device),
        call.backend,
    )
    if choice.device is None:
        return reference(given)
    from mgpu_ops.rotary import into_cache_kernel  # it imports Pallas

    return into_cache_kernel.launch(given, interpret=choice.backend == "interpret")


def supports(qkv: jax.Array, k: jax.Array, rows: jax.Array | None, of_heads: bool, gpu: gpus.Gpu) -> str | None:
    """Why the kernel cannot run on `gpu`, or None. of_heads: with norms of heads."""
    entries, tokens, kv_heads, head_dim = k.shape
    if reason := limits.supports_dtypes(qkv.dtype.name, qkv.dtype.name, gpu):
        return reason
    q_heads = qkv.shape[1] // head_dim - 2 * kv_heads
    if q_heads % kv_heads:
        return f"kv_heads={kv_heads} does not divide q_heads={q_heads}"
    unit = 2 * _UNIT // k.dtype.itemsize  # halves of heads are whole 16 bytes, in the cache too
    if head_dim % unit:
        why = f"is no multiple of {unit}, whose halves are whole {_UNIT} bytes"
        return f"head_dim={head_dim} of {k.dtype.name} {why}: pad it, or use backend='xla'"
    if head_dim > 2 * _BOX or kv_heads > _BOX:
        return f"head_dim={head_dim} is above {2 * _BOX}, or kv_heads={kv_heads} above {_BOX}: use backend='xla'"
    if rows is not None and (reason := supports_rows(rows)):
        return reason
    if kv_heads * head_dim % (2 * _THREADS):
        return f"kv_heads * head_dim = {kv_heads * head_dim} is no multiple of {2 * _THREADS}"
    if of_heads and (head_dim not in HEAD_DIMS or kv_heads % AT_ONCE):
        takes = f"kv_heads that are a multiple of {AT_ONCE} and a head_dim of {', '.join(map(str, HEAD_DIMS))}"
        return f"kv_heads={kv_heads} and head_dim={head_dim}: norms of heads take {takes}, or backend='xla'"
    if kv_heads * head_dim * 10 > gpu.smem_per_block // 2 or max(qkv.size, entries, tokens) >= 2**31:
        return f"k_cache{k.shape} has too large heads, or too many tokens"
    return None


def reference(arrays: Arrays) -> tuple[jax.Array, ...]:
    """The same through XLA."""
    qkv, cos, sin, k, v, positions, page_table, of_rows, of_heads, scales = arrays
    dtype = qkv.dtype
    if of_heads and of_rows:  # rounded once, after both norms
        qkv = qkv.astype(np.promote_types(dtype, np.float32))
    qkv = divided(qkv, *of_rows) if of_rows else qkv
    (entries, tokens, kv_heads, head_dim), batch = k.shape, qkv.shape[0]
    rows = qkv.reshape(batch, -1, head_dim)
    heads, normalised = rows.shape[1] - 2 * kv_heads, bool(of_heads)
    problem = Problem(batch, cos.shape[0], heads, kv_heads, head_dim, dtype.name, normalised=normalised)
    of_heads = [x.astype(np.float32) for x in of_heads]
    q, *new = (x[:, None].astype(dtype) for x in rotary_reference(problem, rows, cos, sin, *of_heads))
    if scales:
        new = [with_scale(x, scale[:, None, :, None], k.dtype) for x, scale in zip(new, scales, strict=True)]
    if page_table:
        number, row = jnp.divmod(jnp.clip(positions, 0, page_table[0].shape[1] * tokens - 1), tokens)
        page = jnp.take_along_axis(page_table[0], jnp.broadcast_to(number, batch)[:, None], 1)[:, 0]
        page = jnp.where((page >= 0) & (page < entries), page, entries)  # which is dropped
        return q, *(cache.at[page, row].set(x[:, 0], mode="drop") for cache, x in zip((k, v), new, strict=True))
    positions = jnp.clip(positions, 0, tokens - 1)
    if positions.shape[0] == 1:
        write = functools.partial(lax.dynamic_update_slice_in_dim, start_index=positions[0], axis=1)
        return q, write(k, new[0]), write(v, new[1])
    each = jax.vmap(functools.partial(lax.dynamic_update_slice_in_dim, axis=0))
    return q, each(k, new[0], positions), each(v, new[1], positions)
