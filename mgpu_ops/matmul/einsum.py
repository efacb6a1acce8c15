"""einsum: takes the place of `jax.numpy.einsum`, with its arguments, through `dot_general`."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops.matmul.dot_general import dot_general
from mgpu_ops.registry import dispatch


def einsum(
    subscripts: Any,
    /,
    *operands: ArrayLike | Any,
    out: None = None,
    optimize: str | bool | list[tuple[int, ...]] = "auto",
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    out_sharding: Any = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`jax.numpy.einsum` with its arguments, each of its products through `mgpu_ops.dot_general`.

    The order of the products is JAX's: `optimize` and `jax.numpy.einsum_path` mean the same. Which of them `matmul` runs, and
    what differs from JAX then, is described at `dot_general`. Products with a batch dimension that is not first in both
    operands, and sums that are no products, are JAX's own.

    Example: `einsum("btf,fh->bth", x, w)` is a dense layer, and one product of b t rows.

    Raises what `jax.numpy.einsum` raises, and ValueError for a backend that is unknown. With a named backend that is a kernel,
    every product must be one that it can run.
    """
    return jnp.einsum(
        subscripts,
        *operands,
        out=out,
        optimize=optimize,
        precision=precision,
        preferred_element_type=preferred_element_type,
        out_sharding=out_sharding,
        _dot_general=_multiply(backend, dispatch.requested_backend(backend)),
    )


@functools.cache
def _multiply(backend: dispatch.Backend | None, wanted: dispatch.Backend | None) -> Any:
    """`dot_general` on a backend; one for each that the environment names, since JAX keeps what it traced."""
    del wanted
    return functools.partial(dot_general, backend=backend)
