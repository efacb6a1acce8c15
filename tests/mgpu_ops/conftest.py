"""What the tests of ops share: how right an output is."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import numpy as np
import pytest

from mgpu_ops import SPECS


def float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def assert_matmul(problem: Any, out: Any, a: Any, b: Any) -> None:
    """`out` is `problem`'s dtype and shape and within the op's tolerance of NumPy's product in float64."""
    a, b = (float64(x).swapaxes(-1, -2) if t == "t" else float64(x) for x, t in zip((a, b), problem.layout))
    wanted = a @ b
    assert out.dtype == problem.out_dtype
    assert out.shape == wanted.shape
    error = np.abs(float64(out) - wanted) / (np.abs(wanted) + np.sqrt(np.mean(wanted**2)))
    assert error.max() < SPECS["matmul"].tolerance(problem)  # false for NaN, too


@pytest.fixture(name="assert_matmul")
def _assert_matmul() -> Callable[[Any, Any, Any, Any], None]:
    return assert_matmul
