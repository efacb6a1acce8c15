"""`ragged_dot_general`: JAX's function, by our kernels in the forms that a grouped product and its gradients have."""

from __future__ import annotations

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

    All else (batch dimensions, other orders, ragged batches, integers, a group_offset, which JAX does not compute either) is
    JAX's own, and so is every error in the arguments.

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
    arrays = mesh.same_mesh_axes(lhs, rhs, integers.clipped(group_sizes, lhs.shape[0]))
    out = checked_out_dtype(preferred_element_type, lhs.dtype)
    if form == _CONTRACTION:
        return contraction(ContractionCall(out, "random", None, wanted), *arrays)
    return product(Call(form == _TRANSPOSED, out, "none", "random", None, wanted), *arrays)


def _form(lhs: Any, rhs: Any, sizes: Any, numbers: Any, precision: Any, out_dtype: Any) -> str | None:
    """Which of the forms it is, of arrays that ours multiply as JAX does; else None."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in (lhs, rhs, sizes)):
        return None
    lhs, rhs, sizes = (jax.typeof(x) for x in (lhs, rhs, sizes))
    contracting, batch = numbers.dot_dimension_numbers
    ragged, groups = numbers.lhs_ragged_dimensions, numbers.rhs_group_dimensions
    form = _FORMS.get((tuple(map(tuple, contracting)), tuple(ragged), tuple(groups)))
    ranks = (2, 2, 1) if form == _CONTRACTION else (2, 3, 1)
    if form is None or any(map(len, batch)) or (lhs.ndim, rhs.ndim, sizes.ndim) != ranks:
        return None
    of_lhs, of_rhs = contracting
    same = lhs.shape[of_lhs[0]] == rhs.shape[of_rhs[0]] and sizes.shape[0] > 0
    same = same and (form == _CONTRACTION or rhs.shape[0] == sizes.shape[0])
    return form if same and are_plain(lhs, rhs, sizes, precision, out_dtype) else None
