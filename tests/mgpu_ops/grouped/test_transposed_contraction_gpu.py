"""ragged_contraction of 8-bit floats that are stored transposed, on a Hopper GPU: random problems, configs and sizes.

Columns behind the last group are NaN.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.grouped.ragged_contraction import Call, transposed_contraction
from tests.mgpu_ops.grouped import ragged, transposed
from tests.mgpu_ops.grouped.test_grouped_gpu import between_guards, drawn_sizes, kinds_of_sizes
from tests.mgpu_ops.grouped.transposed import E4M3, E5M2, problem_of
from tests.mgpu_ops.matmul import hopper_sums

pytestmark = pytest.mark.gpu

SPEC = spec_of("ragged_contraction")


def assert_right_for(problem: Any, config: Any, all_sizes: Any, assert_near: Any) -> None:
    run = jax.jit(functools.partial(SPEC.run, problem, config, gpu.current()))
    for seed, sizes in enumerate(all_sizes):
        arrays = transposed.operands(problem, sizes, seed)
        on_gpu = jax.block_until_ready(jax.device_put(arrays))
        with between_guards(problem):
            out = np.asarray(run(*on_gpu))
        transposed.assert_right(problem, out, arrays, SPEC.tolerance(problem), assert_near)


SHAPES = [  # m, n, k, groups
    (128, 8, 8, 1),
    (256, 72, 20, 2),
    (640, 136, 272, 5),
    (2560, 1032, 520, 13),
    (4096, 1024, 512, 8),
    (8320, 384, 1040, 33),
]


@pytest.mark.parametrize("dtypes", [(E4M3, E5M2), (E5M2, E4M3), (E4M3, E4M3)], ids=str)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_right_for_all_kinds_of_sizes(shape, dtypes, assert_near):
    problem = problem_of(*shape, dtype=dtypes[0], rhs_dtype=dtypes[1])
    sizes = kinds_of_sizes(max(problem.m - 127 * problem.groups, 1), problem.groups)
    assert_right_for(problem, SPEC.default(problem, gpu.current()), sizes, assert_near)


@pytest.mark.parametrize("seed", range(24))
def test_random_legal_config_is_right(seed, assert_near):
    rng = random.Random(seed)
    groups = rng.choice([1, 3, 8, 40])
    sides = 128 * rng.randint(groups, groups + 20), 8 * rng.randint(1, 120), 8 * rng.randint(1, 120), groups
    problem = problem_of(*sides, dtype=rng.choice([E4M3, E5M2]), rhs_dtype=rng.choice([E4M3, E5M2]))
    problem = replace(problem, out_dtype=rng.choice(["bfloat16", "float16", "float32"]))
    space, device = SPEC.space(problem, gpu.current()), gpu.current()
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    config = next(c for c in drawn if SPEC.check(problem, c, device) is None)
    sizes = np.random.default_rng(seed)
    assert_right_for(problem, config, [drawn_sizes(sizes, problem.m, groups) for _ in range(4)], assert_near)


TWO = replace(ragged.BASE, tile_k=128, tile_m=128, tile_n=256, compute_warpgroups=2, max_concurrent_steps=4, epilogue_slots=2)


@pytest.mark.parametrize("schedule", ["dynamic", "deferred", "dynamic-deferred"])
def test_every_schedule_gives_the_same_bits_each_time(schedule):
    problem = problem_of(20480, 1032, 776, 16)
    rng = np.random.default_rng(0)
    runs = [
        jax.jit(functools.partial(SPEC.run, problem, replace(TWO, schedule=s), gpu.current())) for s in ("static", schedule)
    ]
    for seed in range(4):
        arrays = jax.device_put(transposed.operands(problem, drawn_sizes(rng, problem.m - 127 * 16, 16), seed))
        first, *others = (np.asarray(run(*arrays)) for run in [*runs, runs[1], runs[1]])
        for other in others:
            np.testing.assert_array_equal(first, other)


def test_sums_are_those_of_the_documented_arithmetic_to_the_bit():
    """docs/kernels/matmul.md, "Eight bits"."""
    problem, sizes = problem_of(1024, 40, 72, 2, out_dtype="float32", rhs_dtype=E4M3), (500, 384)
    lhs, rhs, *rest = transposed.operands(problem, sizes)
    config = replace(ragged.BASE, tile_k=128, max_concurrent_steps=4, epilogue_tile_n=32)
    run = functools.partial(SPEC.run, problem, config, gpu.current())
    out = np.asarray(jax.jit(run)(lhs, rhs, rest[0], np.float32([1.0])))
    wanted = [hopper_sums.sums(lhs[:, columns], rhs[:, columns], None) for columns in transposed.spans(problem, sizes)]
    np.testing.assert_array_equal(out, np.stack(wanted))


def test_function_agrees_with_xla_on_a_layers_gradient():
    problem = problem_of(18304, 2560, 1280, 16)
    arrays = jax.jit(functools.partial(SPEC.inputs, problem))(jax.random.key(0))
    kernel, xla = (
        jax.jit(functools.partial(transposed_contraction, Call(problem.out_dtype, "random", None, backend)))(*arrays)
        for backend in ("mosaic", "xla")
    )
    kernel, xla = kernel.astype(jnp.float32), xla.astype(jnp.float32)
    size = jnp.sqrt(jnp.mean(xla**2))
    assert float((jnp.abs(kernel - xla) / (jnp.abs(xla) + size)).max()) < SPEC.tolerance(problem)
