"""dot_general: takes the place of `jax.lax.dot_general`, with its arguments, through `matmul`."""

from __future__ import annotations

import dataclasses
import math
import operator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops.core import gpu
from mgpu_ops.matmul import SPEC, Problem, matmul
from mgpu_ops.matmul.algorithms import algorithm_of
from mgpu_ops.registry import capture, dispatch, resolution

_jax_dot_general = lax.dot_general  # bound here: a program may put ours in its place


def dot_general(
    lhs: ArrayLike,
    rhs: ArrayLike,
    dimension_numbers: lax.DotDimensionNumbers,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    *,
    out_sharding: Any = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`jax.lax.dot_general` with its arguments, through `matmul` where that computes the same, else JAX's: for `dot_general=`.

    `dimension_numbers` = ((lhs contracting, rhs contracting), (lhs batch, rhs batch)); the result has the batch dimensions,
    then those of lhs that are left, then those of rhs.

    `matmul` runs two arrays of bfloat16 or float16 and known dimensions, with a result of their dtype or float32, no
    `out_sharding`, no explicit mesh axes, and any precision (their products are exact in float32), where each operand can be
    read in place: batch dimensions first and alike in both, contracted dimensions side by side, first or last of what is left.
    Dense layers and their gradients are such. float32 runs too, where its kernel would run, with `matmul`'s meaning of
    `precision`. All else, and every error in the arguments, is JAX's own.

    Where `matmul` runs, two things differ from JAX: gradients are products of cotangents rounded to the operands' dtype, and
    forward-mode differentiation (`jax.jvp`, `jax.hessian`) raises TypeError: call `jax.lax.dot_general` for it.

    Raises ValueError for a backend that is unknown, or that is named and is a kernel which cannot run this.
    """
    wanted = dispatch.requested_backend(backend)
    product = None if out_sharding is not None else _product(lhs, rhs, dimension_numbers, precision, preferred_element_type)
    if product is not None and product.problem.dtype == "float32" and not _runs_kernel(product.problem, wanted):
        product = None
    if product is None:
        if backend not in (None, "xla"):
            raise ValueError(f"backend={backend!r} cannot run this dot_general, which only JAX's own does: pass backend=None")
        return _jax_dot_general(lhs, rhs, dimension_numbers, precision, preferred_element_type, out_sharding=out_sharding)
    a, b = jnp.asarray(lhs), jnp.asarray(rhs)

    def multiply(a: jax.Array, b: jax.Array) -> jax.Array:
        return matmul(
            a,
            b,
            out_dtype=preferred_element_type,
            transpose_a=product.transpose_a,
            transpose_b=product.transpose_b,
            precision=precision,
            backend=wanted,
        )

    a, b = a.reshape(product.a), b.reshape(product.b)
    return (jax.vmap(multiply) if len(product.a) == 3 else multiply)(a, b).reshape(product.out)


@dataclasses.dataclass(frozen=True)
class _Product:
    """A dot_general as one matmul, or a batch of them: the shapes of its operands, and that of the result.

    problem: what the op computes then.
    """

    a: tuple[int, ...]
    b: tuple[int, ...]
    transpose_a: bool
    transpose_b: bool
    out: tuple[int, ...]
    problem: Problem


def _runs_kernel(problem: Problem, wanted: dispatch.Backend | None) -> bool:
    """Whether `matmul` would run a problem in the kernel; what is captured counts, since tuning may bring that about."""
    if wanted is not None or capture.capturing():
        return wanted != "xla"
    device = gpu.current()
    if device is None or SPEC.supports(problem, device) is not None:
        return False
    return resolution.resolve(SPEC, problem, device, None).runs == "kernel"


def _product(lhs: Any, rhs: Any, numbers: Any, precision: Any, out_dtype: Any) -> _Product | None:
    """The matmul that computes the same, if there is one. None also for what JAX refuses."""
    if not all(isinstance(x, jax.Array | np.ndarray) for x in (lhs, rhs)):
        return None
    types = jax.typeof(lhs), jax.typeof(rhs)
    if not (
        types[0].dtype == types[1].dtype
        and types[0].dtype.name in ("bfloat16", "float16", "float32")
        and jnp.dtype(types[0].dtype if out_dtype is None else out_dtype) in (types[0].dtype, jnp.float32)
        and all(isinstance(size, int) for x in types for size in x.shape)  # an exported function may have symbolic ones
        and not any(AxisType.Explicit in x.sharding.mesh.axis_types for x in types)
    ):
        return None
    try:
        algorithm = algorithm_of(precision, types[0].dtype.name)
        contracted, batched = (tuple(tuple(operator.index(d) for d in side) for side in pair) for pair in numbers)
        if len(contracted[0]) == len(contracted[1]):  # in which order they are summed up is no matter
            contracted = tuple(zip(*sorted(zip(*contracted, strict=True)), strict=True)) or contracted
        a, b = (_side(x.shape, c, d) for x, c, d in zip(types, contracted, batched, strict=True))
    except (TypeError, ValueError, IndexError):
        return None
    if a is None or b is None or (a.batch, a.contracted) != (b.batch, b.contracted):
        return None
    dtype, out = types[0].dtype.name, jnp.dtype(types[0].dtype if out_dtype is None else out_dtype).name
    problem = Problem(
        math.prod(a.free),
        math.prod(b.free),
        math.prod(a.contracted),
        dtype,
        out,
        "nt"[a.first] + "tn"[b.first],
        math.prod(a.batch),
        algorithm=algorithm,
    )
    return _Product(a.matrix(), b.matrix(), a.first, not b.first, (*a.batch, *a.free, *b.free), problem)


Sizes = tuple[int, ...]


@dataclasses.dataclass(frozen=True)
class _Side:
    """The sizes of an operand that a matmul reads in place. first: the contracted dimensions come before the free ones."""

    batch: Sizes
    free: Sizes
    contracted: Sizes
    first: bool

    def matrix(self) -> Sizes:
        """The shape as one matrix, or as a batch of them."""
        free, contracted = math.prod(self.free), math.prod(self.contracted)
        return (*([math.prod(self.batch)] if self.batch else ()), *((contracted, free) if self.first else (free, contracted)))


def _side(shape: Sizes, contracted: Sizes, batched: Sizes) -> _Side | None:
    rank, lead, count = len(shape), len(batched), len(contracted)
    if not contracted or batched != tuple(range(lead)) or contracted != tuple(range(contracted[0], contracted[0] + count)):
        return None
    first, last = contracted[0] == lead, contracted[-1] == rank - 1
    free = [d for d in range(lead, rank) if d not in contracted]
    if not (first or last):
        return None
    batch, left, summed = (tuple(shape[d] for d in dims) for dims in (batched, free, contracted))
    return _Side(batch, left, summed, first and bool(free))
