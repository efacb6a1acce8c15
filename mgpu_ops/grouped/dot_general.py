"""`ragged_dot_general`: JAX's function, by our kernels in the forms that a grouped product and its gradients have."""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import integers
from mgpu_ops.core import mesh
from mgpu_ops.grouped.calls import checked_out_dtype
from mgpu_ops.grouped.grouped_matmul import Call, are_plain, product
from mgpu_ops.grouped.ragged_contraction import Call as ContractionCall
from mgpu_ops.grouped.ragged_contraction import contraction
from mgpu_ops.registry import dispatch

_jaxs: Any = lax.ragged_dot_general  # bound here: a program may put ours in its place

_PRODUCT = "product"  # of rows [m, k] and matrices [g, k, n]
_TRANSPOSED = "transposed"  # of rows [m, k] and matrices [g, n, k]: the gradient of the rows
_CONTRACTION = "contraction"  # of [m, k] and [m, n] over each group's rows: the gradient of the matrices
_FORMS: dict[Any, str] = {  # by contracting dimensions of lhs and rhs, lhs's ragged ones, and rhs's of groups
    (((1,), (1,)), (0,), (0,)): _PRODUCT,
    (((1,), (2,)), (0,), (0,)): _TRANSPOSED,
    (((0,), (0,)), (0,), ()): _CONTRACTION,
}


def ragged_dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    ragged_dot_dimension_numbers: lax.RaggedDotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot_general` with its arguments, through our kernels where these compute the same, else through JAX.

    The kernels run the forms that `jax.lax.ragged_dot` and its gradients have, for the dtypes that `ragged_dot` takes:

    - rows lhs[m, k] times matrices rhs[g, k, n] or rhs[g, n, k], of a sum over k: `grouped_matmul`, [m, n];
    - lhs[m, k] and rhs[m, n], of a sum over each group's rows: `ragged_contraction`, [g, k, n].

    Batch dimensions of lhs and rhs, which these have beside, anywhere, make it one product of the groups of all, as vmap does.
    All else (other orders, ragged batches, integers, a group_offset, which JAX does not compute either) is JAX's own, and so is
    every error in the arguments.

    As with `ragged_dot`, negative sizes count as 0, and the result has reverse-mode gradients, the contraction's too.

    Raises ValueError for a backend that is unknown, or that is named and is a kernel which cannot run this.
    """
    wanted = dispatch.requested_backend(backend)
    form = None
    if group_offset is None and out_sharding is None:
        form = _form(lhs, rhs, group_sizes, ragged_dot_dimension_numbers, precision, preferred_element_type)
    if form is None:
        if backend not in (None, "xla"):
            raise ValueError(
                f"backend={backend!r} cannot run this ragged_dot_general, which only JAX's own does: pass backend=None"
            )
        arguments = lhs, rhs, group_sizes, ragged_dot_dimension_numbers
        found: jax.Array = _jaxs(*arguments, precision, preferred_element_type, group_offset, out_sharding)
        return found
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    rows = lhs.shape[ragged_dot_dimension_numbers.lhs_ragged_dimensions[0]]
    arrays = mesh.same_mesh_axes(lhs, rhs, integers.clipped(group_sizes, rows))
    out = checked_out_dtype(preferred_element_type, lhs.dtype)
    call: Any
    if form == _CONTRACTION:
        call = functools.partial(contraction, ContractionCall(out, "random", None, wanted))
    else:
        call = functools.partial(product, Call(form == _TRANSPOSED, out, "none", "random", None, wanted))
    _, batch = ragged_dot_dimension_numbers.dot_dimension_numbers
    return _mapped(call, form, batch, arrays)


def _mapped(call: Callable[..., jax.Array], form: str, batch: Any, arrays: Sequence[jax.Array]) -> jax.Array:
    """`call` of each product of a batch, by vmap over the batch dimensions of lhs and rhs, the first the outermost."""
    number = len(batch[0])
    sizes = arrays[2].ndim > 1  # whether each product has its own

    def axes(dims: Sequence[int], i: int) -> int:
        """Where the i-th batch dimension is when those before it are gone."""
        at: int = dims[i] - sum(before < dims[i] for before in dims[:i])
        return at

    for i in reversed(range(number)):
        call = jax.vmap(call, (axes(batch[0], i), axes(batch[1], i), 0 if sizes else None))
    found = call(*arrays)
    return jnp.moveaxis(found, number, 0) if number and form == _CONTRACTION else found


def _form(lhs: Any, rhs: Any, sizes: Any, numbers: Any, precision: Any, out_dtype: Any) -> str | None:
    """Which of the forms it is, of arrays that ours multiply as JAX does; else None."""
    arrays = all(isinstance(x, jax.Array | np.ndarray) for x in (lhs, rhs, sizes))
    if not arrays or not isinstance(numbers, lax.RaggedDotDimensionNumbers):
        return None
    lhs, rhs, sizes = (jax.typeof(x) for x in (lhs, rhs, sizes))
    contracting, batch = numbers.dot_dimension_numbers
    try:
        of_lhs, of_rhs = (_without_batch(x.shape, dims) for x, dims in zip((lhs, rhs), batch, strict=True))
        where = tuple((of[1][dim],) for of, (dim,) in zip((of_lhs, of_rhs), contracting, strict=True))
        ragged = tuple(of_lhs[1][dim] for dim in numbers.lhs_ragged_dimensions)
        groups = tuple(of_rhs[1][dim] for dim in numbers.rhs_group_dimensions)
    except (KeyError, ValueError):  # dimensions that are of the batch, or more than one
        return None
    form = _FORMS.get((where, ragged, groups))
    lhs_shape, rhs_shape = of_lhs[0], of_rhs[0]
    products = tuple(lhs.shape[dim] for dim in batch[0])
    if form is None or (len(lhs_shape), len(rhs_shape)) != ((2, 2) if form == _CONTRACTION else (2, 3)):
        return None
    if products != tuple(rhs.shape[dim] for dim in batch[1]) or sizes.shape[:-1] not in ((), products) or not sizes.ndim:
        return None
    (left,), (right,) = where
    same = lhs_shape[left] == rhs_shape[right] and sizes.shape[-1] > 0
    same = same and (form == _CONTRACTION or rhs_shape[0] == sizes.shape[-1])
    return form if same and are_plain(lhs, rhs, sizes, precision, out_dtype) else None


def _without_batch(shape: Sequence[int], batch: Sequence[int]) -> tuple[tuple[int, ...], dict[int, int]]:
    """An array's shape without its batch dimensions, and the numbers of the others then."""
    kept = [dim for dim in range(len(shape)) if dim not in batch]
    return tuple(shape[dim] for dim in kept), {dim: number for number, dim in enumerate(kept)}
