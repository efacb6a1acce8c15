"""What the tests of contractions of operands that are stored transposed share: drawn operands, and the truth in float64."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
import numpy as np

from mgpu_ops import RaggedContractionProblem
from tests.mgpu_ops.grouped import ragged

E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def problem_of(m: int, n: int, k: int, groups: int, **fields: Any) -> RaggedContractionProblem:
    """Of e4m3 and e5m2, unless others are named."""
    return RaggedContractionProblem(m, n, k, groups, **{"dtype": E4M3, "rhs_dtype": E5M2, "transposed": True, **fields})


def spans(problem: Any, sizes: Sequence[int]) -> list[slice]:
    """The columns of each group with its padding."""
    return list(ragged.spans([-(-max(size, 0) // 128) * 128 for size in sizes], problem.m))


def operands(problem: Any, sizes: Sequence[int], seed: int = 0) -> tuple[np.ndarray, ...]:
    """lhs, rhs, sizes and a scale: zeros between a group's end and the next begin, NaN behind the last group."""
    rng, found = np.random.default_rng(seed), spans(problem, sizes)
    arrays = []
    for rows, dtype in ((problem.k, problem.dtype), (problem.n, problem.rhs_dtype)):
        values = np.zeros((rows, problem.m), np.float32)
        for size, columns in zip(sizes, found, strict=True):
            end = min(columns.start + max(size, 0), columns.stop)
            values[:, columns.start : end] = rng.standard_normal((rows, end - columns.start))
        values[:, found[-1].stop :] = np.nan
        arrays.append(values.astype(jnp.dtype(problem.dtype if dtype == "none" else dtype)))
    return *arrays, np.array(sizes, np.int32), np.float32([0.375])


def truth(problem: Any, lhs: Any, rhs: Any, sizes: Any, scale: Any) -> np.ndarray:
    lhs, rhs = ragged.float64(lhs), ragged.float64(rhs)
    return np.stack([lhs[:, s] @ rhs[:, s].T for s in spans(problem, sizes.tolist())]) * float(scale[0])


def assert_right(problem: Any, out: Any, arrays: Sequence[Any], tolerance: float, assert_near: Any) -> None:
    """max |out - truth| / (|truth| + rms) is below `tolerance`, over groups with columns; the others are zeros."""
    assert out.dtype == problem.out_dtype
    wanted, out = truth(problem, *arrays), ragged.float64(out)
    empty = np.array([s.start == s.stop for s in spans(problem, arrays[2].tolist())])
    np.testing.assert_array_equal(out[empty], 0)
    if not empty.all():
        assert_near(out[~empty], wanted[~empty], tolerance)
