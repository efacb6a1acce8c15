"""What the tests of grouped_matmul and ragged_contraction share: a small config, the truth in float64, gradients, compiling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, RaggedContractionProblem
from mgpu_ops.core import aot, gpu
from mgpu_ops.grouped.config import smem_bytes
from tests.arrays import normal as numpy_normal

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TOLERANCE = {BF16: 8e-3, F16: 1e-3, F32: 1e-4}
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

BASE = GroupedMatmulConfig(
    tile_m=64,
    tile_n=64,
    tile_k=64,
    max_concurrent_steps=2,
    compute_warpgroups=1,
    wg_dimension="m",
    raster_width=2,
    epilogue_tile_n=64,
    epilogue_slots=1,
    memory_registers=40,
)

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
    "gelu_erf": lambda x: 0.5 * x * (1 + np.vectorize(math.erf)(x / np.sqrt(2))),
}


def float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


normal = functools.partial(numpy_normal, dtype=BF16)


def spans(sizes: Iterable[Any], rows: int) -> Iterator[slice]:
    """The rows of each group: a negative size is 0, and groups end where the rows end."""
    end = 0
    for size in sizes:
        start, end = end, min(end + max(int(size), 0), rows)
        yield slice(start, end)


def grouped(
    lhs: Any, rhs: Any, sizes: Any, bias: Any = None, *, activation: str = "none", transpose_rhs: bool = False
) -> np.ndarray:
    """The grouped matmul in float64; zeros for rows of no group."""
    lhs, rhs = float64(lhs), float64(rhs)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in enumerate(spans(sizes, lhs.shape[0])):
        values = lhs[rows] @ rhs[group]
        out[rows] = ACTIVATIONS[activation](values if bias is None else values + float64(bias)[group])
    return out


def contraction(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """The ragged contraction in float64; zeros for an empty group."""
    lhs, rhs = float64(lhs), float64(rhs)
    return np.stack([lhs[rows].T @ rhs[rows] for rows in spans(sizes, lhs.shape[0])])


def truth(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *bias: Any) -> np.ndarray:
    """What a problem of either op gives, in float64."""
    if isinstance(problem, RaggedContractionProblem):
        return contraction(lhs, rhs, sizes)
    return grouped(lhs, rhs, sizes, *bias, activation=problem.activation, transpose_rhs=problem.layout == "nt")


def rest(problem: Any, sizes: Sequence[int]) -> Any:
    """Index of what must be zero in the output: rows of no group, or the contractions of empty groups."""
    groups = list(spans(sizes, problem.m))
    if isinstance(problem, RaggedContractionProblem):
        return np.array([rows.start == rows.stop for rows in groups])
    return slice(groups[-1].stop, None)


def poisoned(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *bias: Any) -> tuple[np.ndarray, ...]:
    """The operands, with NaN wherever the output does not depend on them: rows of no group, matrices of empty groups."""
    lhs, rhs, *bias = (np.array(x) for x in (lhs, rhs, *bias))
    groups = list(spans(sizes, problem.m))
    lhs[groups[-1].stop :] = np.nan
    if isinstance(problem, RaggedContractionProblem):
        rhs[groups[-1].stop :] = np.nan
    else:
        for x in (rhs, *bias):
            x[[rows.start == rows.stop for rows in groups]] = np.nan
    return lhs, rhs, *bias


def plain_grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    transpose_rhs: bool = False,
) -> jax.Array:
    """The grouped matmul in plain JAX, for gradients: each row times the matrix of its group."""
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    values = jnp.einsum("mk,mnk->mn" if transpose_rhs else "mk,mkn->mn", lhs, rhs[group], precision="highest")
    if bias is not None:
        values += bias[group]
    functions = {"none": lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    return jnp.where(inside[:, None], functions[activation](values), 0)


def plain_contraction(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    member = (group[:, None] == jnp.arange(len(sizes))) & inside[:, None]
    return jnp.einsum("mg,mk,mn->gkn", member.astype(lhs.dtype), lhs, rhs, precision="highest")


def of_arrays(f: Callable[..., jax.Array], sizes: Any, **kwargs: Any) -> Callable[..., jax.Array]:
    """f as a function of lhs, rhs and perhaps bias."""
    return lambda lhs, rhs, *bias: f(lhs, rhs, jnp.asarray(sizes), **kwargs, **({"bias": bias[0]} if bias else {}))


def gradients(f: Callable[..., jax.Array], arrays: tuple[jax.Array, ...]) -> Any:
    """Gradients of a weighted sum of f's output with respect to each array."""

    def loss(*arrays: jax.Array) -> jax.Array:
        out = f(*arrays).astype(F32)
        return (out * normal(9, *out.shape, dtype=F32)).sum()

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))(*arrays)


def assert_same_gradients(f: Any, plain: Any, arrays: Any, assert_near: Any, tolerance: float) -> None:
    """f's gradients have the dtypes of its arguments and are those of `plain` in float32."""
    wanted = gradients(plain, tuple(x.astype(F32) for x in arrays))
    for x, y, argument in zip(gradients(f, arrays), wanted, arrays, strict=True):
        assert x.dtype == argument.dtype
        assert_near(x, y, tolerance)


def assert_compiles(spec: Any, problem: Any, config: Any) -> None:
    """For an H200, without spills, with the tensor core and TMA, into as many bytes of shared memory as `check` counts."""
    h200 = gpu.find("h200")
    config = config or spec.default(problem, h200)
    assert spec.check(problem, config, h200) is None
    arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    report = aot.compile_for(h200, functools.partial(spec.run, problem, config, h200), *arrays)
    assert report.smem_bytes == smem_bytes(problem, config)
    assert report.spills == 0
    assert all(instruction in report.sass for instruction in ("HGMMA", "UTMALDG", "UTMASTG"))


def _group_of_rows(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return jnp.minimum(group, len(sizes) - 1), group < len(sizes)
