"""grouped_matmul with a residual on a Hopper GPU: what the interpreter cannot show of its loads into the epilogue's buffers.

The residual of rows of no group is NaN, and outputs lie between arrays of NaN.
"""

from __future__ import annotations

from dataclasses import replace

import jax
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulProblem, spec_of
from mgpu_ops.core import gpu
from tests.mgpu_ops.grouped.ragged import BASE
from tests.mgpu_ops.grouped.test_grouped_gpu import assert_right_for, draw, drawn_sizes, kinds_of_sizes, launch

pytestmark = pytest.mark.gpu

SPEC = spec_of("grouped_matmul")


@pytest.mark.parametrize("seed", range(8))
def test_random_legal_config_is_right(seed, assert_grouped):
    problem, config = draw(SPEC, 200 + seed, (None, "static", "deferred", "dynamic-deferred")[seed % 4])
    more = {"row_scale": seed % 2 == 0, "group_offset": seed % 3 == 0}
    problem = replace(problem, residual=True, **more)
    if SPEC.check(problem, config, gpu.current()) is not None:
        config = SPEC.default(problem, gpu.current())
    rng = np.random.default_rng(seed)
    all_sizes = [drawn_sizes(rng, problem.m, problem.groups + problem.group_offset) for _ in range(4)]
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)


TWO = replace(BASE, tile_m=128, tile_n=256, max_concurrent_steps=3, compute_warpgroups=2, epilogue_slots=2)


@pytest.mark.parametrize("schedule", ["static", "dynamic-deferred"])
@pytest.mark.parametrize("slots", [1, 2, 4])
def test_any_number_of_buffers_gives_the_same_bits(slots, schedule, assert_grouped):
    problem = GroupedMatmulProblem(3000, 1000, 520, 9, residual=True, bias=True, activation="silu", row_scale=True)
    config = replace(TWO, schedule=schedule, epilogue_slots=slots, max_concurrent_steps=2 if slots == 4 else 3)
    assert SPEC.check(problem, config, gpu.current()) is None
    rng = np.random.default_rng(0)
    assert_right_for(problem, launch(problem, config), [drawn_sizes(rng, 3000, 9) for _ in range(2)], assert_grouped)
    lhs, rhs, sizes, *extra = SPEC.inputs(problem, jax.random.key(1))
    first, again = (jax.jit(launch(problem, c))(lhs, rhs, sizes, *extra) for c in (config, replace(TWO, epilogue_slots=2)))
    np.testing.assert_array_equal(first, again)


@pytest.mark.parametrize(
    "problem",
    [
        GroupedMatmulProblem(4097, 136, 72, 33, residual=True),
        GroupedMatmulProblem(1111, 776, 1032, 5, out_dtype="float32", residual=True, layout="nt"),
        GroupedMatmulProblem(2000, 1024, 512, 8, "float8_e4m3fn", layout="nt", scales="block", residual=True),
        GroupedMatmulProblem(2000, 1024, 512, 8, "float8_e4m3fn", layout="nt", scales="row", residual=True),
    ],
    ids=str,
)
def test_default_config_is_right_for_all_kinds_of_sizes(problem, assert_grouped):
    run = launch(problem, SPEC.default(problem, gpu.current()))
    assert_right_for(problem, run, kinds_of_sizes(problem.m, problem.groups), assert_grouped)
