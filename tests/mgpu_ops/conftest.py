"""What the tests of ops share: how right an output is."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import numpy as np
import pytest

from mgpu_ops import SPECS, RaggedContractionProblem
from mgpu_ops.core import engine
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import float64


def _assert_near(out: Any, wanted: Any, tolerance: float) -> None:
    """max |out - wanted| / (|wanted| + rms(wanted)) < tolerance, in float64; a NaN fails."""
    out, wanted = float64(out), float64(wanted)
    assert out.shape == wanted.shape
    error = np.abs(out - wanted) / (np.abs(wanted) + np.sqrt(np.mean(wanted**2)))
    assert error.max() < tolerance


def _assert_matmul(problem: Any, out: Any, a: Any, b: Any, *extra: Any) -> None:
    """`out` has `problem`'s dtype and is within the op's tolerance of NumPy's float64 product and epilogue."""
    a, b = (float64(x.swapaxes(-1, -2) if t == "t" else x) for x, t in zip((a, b), problem.layout))
    assert out.dtype == problem.out_dtype
    arrays = iter(map(float64, extra))
    if problem.scales != "none":
        a, b = _dequantized(problem, a, b, next(arrays), next(arrays))
    if problem.normalised:
        a = a / np.sqrt(np.mean(a**2, -1, keepdims=True) + next(arrays))
    wanted = a @ b
    wanted = ragged.ACTIVATIONS[problem.activation](wanted + next(arrays) if problem.bias else wanted)
    wanted = wanted + next(arrays) if problem.residual else wanted
    _assert_near(out, wanted, SPECS["matmul"].tolerance(problem))


def _dequantized(problem: Any, a: Any, b: Any, scale_a: Any, scale_b: Any) -> tuple[Any, Any]:
    """The operands [..., m, k] and [..., k, n] times their scales."""
    if problem.scales == "tensor":
        return a * scale_a[..., None], b * scale_b[..., None]
    if problem.scales == "row":
        return a * scale_a[..., None], b * scale_b[..., None, :]
    of_a, of_b = scale_a.repeat(128, -1), scale_b.repeat(128, -1).repeat(128, -2)
    return a * of_a[..., : problem.k], b * of_b[..., : problem.n, : problem.k].swapaxes(-1, -2)


def _assert_grouped(problem: Any, sizes: Any, out: Any, *arrays: Any) -> None:
    """`out` is right for a problem of grouped_matmul or ragged_contraction.

    It has `problem`'s dtype, is within the op's tolerance of NumPy's float64 result, NaN where that is, and zero in rows of no
    group and for empty groups.
    """
    assert out.dtype == problem.out_dtype
    wanted, out = ragged.truth(problem, sizes, *arrays), float64(out)
    np.testing.assert_array_equal(out[ragged.rest(problem, sizes)], 0)
    np.testing.assert_array_equal(np.isnan(out), np.isnan(wanted))
    known = ~np.isnan(wanted)
    known[ragged.rest(problem, sizes)] = False  # errors are shares of typical results, which zeros are not
    if wanted[known].any():
        op = "ragged_contraction" if isinstance(problem, RaggedContractionProblem) else "grouped_matmul"
        _assert_near(out[known], wanted[known], SPECS[op].tolerance(problem))


@pytest.fixture
def assert_near() -> Callable[[Any, Any, float], None]:
    return _assert_near


@pytest.fixture
def assert_matmul() -> Callable[..., None]:
    return _assert_matmul


@pytest.fixture
def assert_grouped() -> Callable[..., None]:
    return _assert_grouped


@pytest.fixture
def no_races() -> Iterator[None]:
    """No kernel that the test interprets has a race; what a failed one leaves behind goes away."""
    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    with contextlib.suppress(RuntimeError):  # none was interpreted
        assert not engine.races_found()
    engine.reset_interpreter()
