"""What is timed in place of one call: of a collective, several in a row, each of which waits for the one before."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import SPECS
from mgpu_ops.tuning.timing import Timing, timing_of

COLLECTIVES = ("all_reduce", "reduce_scatter", "all_gather")


def test_a_call_of_any_other_op_is_timed_alone() -> None:
    for op in SPECS.keys() - set(COLLECTIVES):
        assert timing_of(op) == Timing(1, None)
        run = jnp.sin
        assert timing_of(op).program(run) is run
        assert timing_of(op).result("out") == "out"


@pytest.mark.parametrize("op", COLLECTIVES)
def test_each_call_of_a_collective_waits_for_the_one_before_and_the_first_result_is_the_calls(op: str) -> None:
    """Every call adds 1 to what it is given, in the shape of the op's result."""
    shape = {"all_reduce": (4, 64), "reduce_scatter": (4, 16), "all_gather": (4, 256)}[op]
    timing = timing_of(op)

    def run(x: jax.Array) -> jax.Array:
        return jnp.broadcast_to(x[:, :1] + 1, shape)

    returned = jax.jit(timing.program(run))(jnp.zeros((4, 64)))
    first, last = returned
    assert timing.calls == 16
    np.testing.assert_array_equal(timing.result(returned), np.ones(shape))
    np.testing.assert_array_equal(first, np.ones(shape))
    np.testing.assert_array_equal(last, np.full(shape, 16))
