"""Calls without pause on a Hopper GPU: turns are of the length that was asked for, and NVML's numbers fit each other."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mgpu_ops.tuning import measure

pytestmark = pytest.mark.gpu


def product(size: int) -> Callable[[], Any]:
    """A compiled product of random square matrices."""
    a, b = (jax.random.normal(jax.random.key(seed), (size, size), jnp.bfloat16) for seed in (0, 1))
    return functools.partial(jax.jit(jnp.matmul).lower(a, b).compile(), a, b)


def test_turns_tell_time_clock_and_energy_of_a_call(capsys: pytest.CaptureFixture[str]) -> None:
    said: list[str] = []
    with measure.metered(said.append) as meter:
        small, large = measure.sustained([product(4096), product(8192)], 0.5, 2, meter)
    with capsys.disabled():
        print("\n", small, large, *said, sep="\n")
    assert measure.typical(large).us > 4 * measure.typical(small).us  # eight times the work
    for turn in (*small, *large):
        if meter is not None and turn.watts is not None and turn.joules is not None:
            assert turn.joules == pytest.approx(turn.watts * turn.us * 1e-6, rel=1e-3)
            assert 100 < turn.watts < 1000


def test_calls_that_are_too_short_are_refused() -> None:
    with pytest.raises(measure.MeasurementError, match="measure them in bursts"):
        measure.sustained([product(64)], 0.2, 1)
