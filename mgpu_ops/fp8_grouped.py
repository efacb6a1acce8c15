"""fp8_grouped_matmul: `grouped_matmul` of 16-bit arrays that is computed in 8-bit floats, and can be trained with.

Sources: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433 (e4m3 forward, e5m2 gradients); DeepSeek-V3,
arXiv:2412.19437 (scales of blocks).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats
from mgpu_ops.core import mesh
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.grouped.calls import checked_sizes, checked_spread
from mgpu_ops.grouped.grouped_matmul import Call, product
from mgpu_ops.grouped.ragged_contraction import Call as ContractionCall
from mgpu_ops.grouped.ragged_contraction import contraction
from mgpu_ops.grouped.sizes import Spread, in_a_group
from mgpu_ops.matmul.arguments import float_dtype
from mgpu_ops.matmul.fp8 import FP8_SCHEMES, Fp8Scheme
from mgpu_ops.matmul.quantize import Scheme, quantize
from mgpu_ops.registry import dispatch

_E4M3, _E5M2 = "float8_e4m3fn", "float8_e5m2"
_FLOATS = ("bfloat16", "float16", "float32")


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    scheme: Fp8Scheme
    transpose_rhs: bool
    out_dtype: str
    lhs_dtype: str
    rhs_dtype: str
    spread: Spread
    backend: dispatch.Backend | None
    group_offset: bool


def fp8_grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike | Sequence[int],
    *,
    scheme: Fp8Scheme = "block",
    group_offset: ArrayLike | None = None,
    transpose_rhs: bool = False,
    out_dtype: DTypeLike | None = None,
    spread: Spread = "random",
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`grouped_matmul` for training in FP8: the result and the gradient of lhs are products of 8-bit floats.

    out[i, n] = sum_k lhs[i, k] rhs[g, k, n] for each row i of group g, computed as sl sr (l8 r8) with l8 = round(lhs / sl) and
    r8 = round(rhs / sr) in float8_e4m3fn.
    dlhs = sg sr (g8 r8^T) with g8 = round(g / sg) of the result's gradient g in float8_e5m2.
    drhs = lhs^T g by group is a product of lhs and g themselves (`ragged_contraction`): the tensor cores read 8 bits along what
    is summed over, and here rows are, which are stored across it.

    Args:
      lhs: [m, k] bfloat16, float16 or float32.
      rhs: [groups, k, n], or [groups, n, k] with `transpose_rhs`; bfloat16, float16 or float32.
      group_sizes, group_offset, spread: as in `grouped_matmul`. Rows of no group are zeros in the result and in the gradient,
        whatever lhs holds there, and count for no scale.
      scheme: what shares a scale: "tensor", all of lhs, and of rhs a group's matrix; "row", a row or column of an operand;
        "block" (default), 1 x 128 of lhs and of g, and 128 x 128 of rhs.
      transpose_rhs: rhs is stored as [groups, n, k].
      out_dtype: of the result, bfloat16, float16 or float32; lhs's dtype by default.
      backend: as in `grouped_matmul`, of all three products.

    Returns:
      [m, n] of out_dtype. Sums are those of `grouped_matmul` of 8-bit floats. Gradients have the dtypes of their arrays; that
      of rhs is computed in lhs's dtype, of float32 through XLA.

    Works under jit, grad (reverse mode, once), vmap, scan, checkpoint and shard_map. The backward pass keeps lhs, and the
    weights in 8 bits, quantized anew along n unless there is one scale. For the kernels k and n are multiples of 16; else XLA
    runs, and a log line says why.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown scheme, spread or backend, and group sizes that `grouped_matmul`
        refuses.
      TypeError: not arrays of floats, or sizes that are no integers.

    Example:
      >>> lhs, rhs = jnp.ones((96, 128), jnp.bfloat16), jnp.ones((3, 128, 256), jnp.bfloat16)
      >>> mgpu_ops.fp8_grouped_matmul(lhs, rhs, jnp.array([32, 0, 64])).shape
      (96, 256)

    Source: Micikevicius et al., arXiv:2209.05433 (e4m3 forward, e5m2 gradients); DeepSeek-V3, arXiv:2412.19437 (scales of
    blocks).
    """
    name = "fp8_grouped_matmul"
    lhs, rhs = floats.array(name, "lhs", lhs), floats.array(name, "rhs", rhs)
    transpose_rhs = flags.checked("transpose_rhs", transpose_rhs)
    _check(lhs, rhs, scheme, transpose_rhs)
    out = float_dtype(out_dtype, None, lhs.dtype).name
    if out not in _FLOATS:
        raise ValueError(f"out_dtype={out} is not one of {', '.join(_FLOATS)}: cast the result")
    sizes = checked_sizes(name, group_sizes, rhs.shape[0], lhs.shape[0], group_offset)
    call = _Call(
        scheme,
        transpose_rhs,
        out,
        lhs.dtype.name,
        rhs.dtype.name,
        checked_spread(spread),
        dispatch.requested_backend(backend),
        group_offset is not None,
    )
    return _product(call, *mesh.same_mesh_axes(lhs, rhs, sizes))


def _check(lhs: jax.Array, rhs: jax.Array, scheme: str, transpose_rhs: bool) -> None:
    for name, array in (("lhs", lhs), ("rhs", rhs)):
        if array.dtype.name not in _FLOATS:
            raise ValueError(
                f"{name} is {array.dtype}: fp8_grouped_matmul quantizes {', '.join(_FLOATS)}; cast it, or call grouped_matmul"
            )
    if lhs.ndim != 2 or rhs.ndim != 3:
        raise ValueError(f"lhs has shape {lhs.shape} and rhs {rhs.shape}: pass ranks 2 and 3, and use jax.vmap for batches")
    if lhs.shape[1] != rhs.shape[2 if transpose_rhs else 1]:
        raise ValueError(f"lhs{lhs.shape} and rhs{rhs.shape} differ in k (transpose_rhs={transpose_rhs})")
    flags.one_of("scheme", scheme, FP8_SCHEMES)


Quantized = tuple[jax.Array, jax.Array]  # values, stored along what the product sums over, and their scales


def _of_rows(call: _Call, x: jax.Array, sizes: jax.Array, dtype: str) -> Quantized:
    """x[m, columns] in 8 bits for a product that sums over its columns; rows of no group are zeros, and NaN there is none."""
    x = jnp.where(in_a_group(sizes, x.shape[0], call.group_offset), x, 0)
    values, scales = quantize(x, call.scheme, dtype=dtype)
    return values, scales


def _of_groups(call: _Call, rhs: jax.Array) -> tuple[Quantized, Quantized]:
    """rhs[groups, ., .] in 8 bits along its last dimension, and along the one before, stored so."""
    if call.scheme == "tensor":
        values, scales = jax.vmap(lambda x: quantize(x, "tensor"))(rhs)
        values = lax.optimization_barrier(values)  # one kernel rounds, another transposes
        return (values, scales), (values.mT, scales)
    scheme: Scheme = "square" if call.scheme == "block" else call.scheme
    last, other = quantize(rhs, scheme), quantize(rhs.mT, scheme)
    return (last[0], last[1]), (other[0], other[1])


def _matmul(call: _Call, lhs: Quantized, rhs: Quantized, sizes: jax.Array, out_dtype: str) -> jax.Array:
    """lhs[m, k] rhs[groups, n, k]^T by group."""
    (l8, scale_lhs), (r8, scale_rhs) = lhs, rhs
    of = Call(True, out_dtype, "none", call.spread, None, call.backend, call.group_offset, scales=call.scheme)
    arrays = l8, r8, sizes, scale_lhs.reshape(1) if call.scheme == "tensor" else scale_lhs, scale_rhs
    l8, r8, sizes, scale_lhs, scale_rhs = mesh.same_mesh_axes(*arrays)
    return product(of, l8, r8, sizes, scale_lhs=scale_lhs, scale_rhs=scale_rhs)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """lhs[m, k] rhs by group, rhs as it is stored."""
    return _forward(call, lhs, rhs, sizes)[0]


def _forward(call: _Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Any:
    along_last, along_other = _of_groups(call, rhs)
    along_k, along_n = (along_last, along_other) if call.transpose_rhs else (along_other, along_last)
    out = _matmul(call, _of_rows(call, lhs, sizes, _E4M3), along_k, sizes, call.out_dtype)
    return out, (lhs, along_n, sizes)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    """dlhs = g rhs^T by group, of e5m2 and e4m3; drhs = lhs^T g by group in lhs's dtype."""
    lhs, rhs, sizes = saved
    dlhs = _matmul(call, _of_rows(call, g, sizes, _E5M2), rhs, sizes, call.lhs_dtype)
    of = ContractionCall(call.lhs_dtype, call.spread, None, call.backend, call.group_offset)
    g = g.astype(lhs.dtype)
    drhs = contraction(of, *((g, lhs) if call.transpose_rhs else (lhs, g)), sizes)
    return dlhs, drhs.astype(call.rhs_dtype), None


_product.defvjp(*first_order("fp8_grouped_matmul", _forward, _backward))
