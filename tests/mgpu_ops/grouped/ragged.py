"""What the tests of grouped_matmul and ragged_contraction share: a small config, the truth in float64, gradients, compiling."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, GroupedMatmulProblem, RaggedContractionProblem
from mgpu_ops.core import aot, gpu
from mgpu_ops.grouped.config import smem_bytes
from mgpu_ops.grouped.grouped_matmul.problem import by_name
from mgpu_ops.grouped.grouped_matmul.problem import smem_bytes as own_bytes
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


def static(config: Any) -> Any:
    """The config that computes each tile whole and stores it at once, one after the other in a fixed order."""
    return replace(config, schedule="static", short_tiles=False)


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


def spans(sizes: Iterable[Any], rows: int, start: int = 0) -> Iterator[slice]:
    """The rows of each group: a negative size is 0, groups end where the rows end, and the first begins at row `start`."""
    end = min(max(int(start), 0), rows)
    for size in sizes:
        start, end = end, min(end + max(int(size), 0), rows)
        yield slice(start, end)


def spans_of(problem: Any, sizes: Sequence[int]) -> list[slice]:
    """The rows of each group of a problem; with a group_offset, the first of `sizes` is the row where the groups begin."""
    start, *sizes = sizes if problem.group_offset else (0, *sizes)
    return list(spans(sizes, problem.m, start))


def grouped(
    lhs: Any,
    rhs: Any,
    sizes: Any,
    bias: Any = None,
    row_scale: Any = None,
    residual: Any = None,
    *,
    start: int = 0,
    activation: str = "none",
    transpose_rhs: bool = False,
    lhs2: Any = None,
    rhs2: Any = None,
    scale_lhs: Any = None,
    scale_rhs: Any = None,
) -> np.ndarray:
    """The grouped matmul in float64, or the sum of two; zeros for rows of no group. Scales are those of the op's arrays."""
    if lhs2 is not None:  # side by side, they are one
        axis = 2 if transpose_rhs else 1
        lhs, rhs = np.concatenate([lhs, lhs2], 1), np.concatenate([rhs, rhs2], axis)
    lhs, rhs = float64(lhs), float64(rhs)
    if scale_lhs is not None:
        lhs, rhs = lhs * of_each(scale_lhs, lhs.shape), rhs * of_each(scale_rhs, rhs.shape)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in enumerate(spans(sizes, lhs.shape[0], start)):
        values = lhs[rows] @ rhs[group]
        values = ACTIVATIONS[activation](values if bias is None else values + float64(bias)[group])
        values = values if row_scale is None else values * float64(row_scale)[rows, None]
        out[rows] = values if residual is None else values + float64(residual)[rows]
    return out


def of_each(scales: Any, shape: tuple[int, ...]) -> np.ndarray:
    """Scales of the whole, of rows or of blocks of 128 of lhs [m, k] or of rhs [g, n, k], as an array of its shape."""
    scales = float64(scales)
    if scales.ndim == len(shape):
        for axis in range(1, len(shape)):
            scales = np.repeat(scales, 128, axis)
        return scales[tuple(map(slice, shape))]
    return scales.reshape(*scales.shape, *(1,) * (len(shape) - scales.ndim))


def contraction(lhs: Any, rhs: Any, sizes: Any, start: int = 0) -> np.ndarray:
    """The ragged contraction in float64; zeros for an empty group."""
    lhs, rhs = float64(lhs), float64(rhs)
    return np.stack([lhs[rows].T @ rhs[rows] for rows in spans(sizes, lhs.shape[0], start)])


def truth(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *extra: Any) -> np.ndarray:
    """What a problem of either op gives, in float64."""
    start, *sizes = sizes if problem.group_offset else (0, *sizes)
    if isinstance(problem, RaggedContractionProblem):
        return contraction(lhs, rhs, sizes, start)
    arrays = by_name(problem, extra)
    transpose = problem.layout == "nt"
    return grouped(lhs, rhs, sizes, **arrays, start=start, activation=problem.activation, transpose_rhs=transpose)


def rest(problem: Any, sizes: Sequence[int]) -> Any:
    """Index of what must be zero in the output: rows of no group, or the contractions of empty groups."""
    groups = spans_of(problem, sizes)
    if isinstance(problem, RaggedContractionProblem):
        return np.array([rows.start == rows.stop for rows in groups])
    row = np.arange(problem.m)
    return (row < groups[0].start) | (row >= groups[-1].stop)


def poisoned(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *extra: Any) -> tuple[np.ndarray, ...]:
    """The operands, with NaN wherever the output does not depend on them: rows of no group, matrices of empty groups."""
    lhs, rhs, *extra = (np.array(x) for x in (lhs, rhs, *extra))
    groups = spans_of(problem, sizes)
    row = np.arange(problem.m)
    outside = (row < groups[0].start) | (row >= groups[-1].stop)
    empty = [rows.start == rows.stop for rows in groups]
    lhs[outside] = np.nan
    if isinstance(problem, RaggedContractionProblem):
        rhs[outside] = np.nan
    else:
        rhs[empty] = np.nan
        for name, x in by_name(problem, extra).items():
            if x.shape[0] > 1:  # not one number for all
                x[outside if name in ("row_scale", "residual", "lhs2", "scale_lhs") and len(x) == problem.m else empty] = np.nan
    return lhs, rhs, *extra


def plain_grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    transpose_rhs: bool = False,
    row_scale: jax.Array | None = None,
    residual: jax.Array | None = None,
    group_offset: int | None = None,
) -> jax.Array:
    """The grouped matmul in plain JAX, for gradients: each row times the matrix of its group."""
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    if group_offset is not None:
        group, inside = group - group_offset, (group >= group_offset) & (group < group_offset + rhs.shape[0]) & inside
    values = jnp.einsum("mk,mnk->mn" if transpose_rhs else "mk,mkn->mn", lhs, rhs[group], precision="highest")
    if bias is not None:
        values += bias[group]
    functions = {"none": lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    values = functions[activation](values)
    if row_scale is not None:
        values *= row_scale[:, None]
    if residual is not None:
        values += residual
    return jnp.where(inside[:, None], values, 0)


def plain_contraction(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    member = (group[:, None] == jnp.arange(len(sizes))) & inside[:, None]
    return jnp.einsum("mg,mk,mn->gkn", member.astype(lhs.dtype), lhs, rhs, precision="highest")


def of_arrays(f: Callable[..., jax.Array], sizes: Any, **kwargs: Any) -> Callable[..., jax.Array]:
    """f as a function of lhs, rhs and perhaps bias."""
    return lambda lhs, rhs, *bias: f(lhs, rhs, jnp.asarray(sizes), **kwargs, **({"bias": bias[0]} if bias else {}))


def of_scaled(f: Callable[..., jax.Array], sizes: Any, **kwargs: Any) -> Callable[..., jax.Array]:
    """f as a function of lhs, rhs, row_scale and perhaps bias."""

    def g(lhs: jax.Array, rhs: jax.Array, row_scale: jax.Array, bias: jax.Array | None = None) -> jax.Array:
        return f(lhs, rhs, jnp.asarray(sizes), row_scale=row_scale, bias=bias, **kwargs)

    return g


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
    assert report.smem_bytes == (own_bytes if isinstance(problem, GroupedMatmulProblem) else smem_bytes)(problem, config)
    assert report.spills == 0
    assert all(instruction in report.sass for instruction in ("HGMMA", "UTMALDG", "UTMASTG"))


def _group_of_rows(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return jnp.minimum(group, len(sizes) - 1), group < len(sizes)
