"""grouped_matmul of 8-bit floats on a Hopper GPU: what the interpreter cannot show, the sums of its tensor cores above all."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, GroupedMatmulProblem, grouped_matmul, quantize, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.grouped.grouped_matmul.problem import scale_shapes
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE
from tests.mgpu_ops.grouped.test_grouped_gpu import assert_right_for, drawn_sizes, kinds_of_sizes, launch
from tests.mgpu_ops.matmul import hopper_sums

pytestmark = pytest.mark.gpu

GROUPED = spec_of("grouped_matmul")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIDES = [(1, 264, 144, 3), (200, 136, 272, 5), (1000, 1032, 2000, 13), (3000, 1024, 512, 8), (4097, 384, 1024, 33)]


def problem_of(*sides: int, **fields: Any) -> GroupedMatmulProblem:
    return GroupedMatmulProblem(*sides, E4M3, layout="nt", **fields)


def by_tile(problem: Any) -> list[Any]:
    """The best modelled candidates that differ in tile and in what warpgroups share."""
    found: dict[Any, Any] = {}
    for c in GROUPED.candidates(problem, gpu.current()):
        found.setdefault((c.tile_n, c.tile_k, c.wg_dimension), c)
    return list(found.values())[:4]


@pytest.mark.parametrize("scales", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_every_kind_of_scales_is_right_for_all_kinds_of_sizes(sides, scales, assert_grouped):
    for rhs_dtype, out_dtype, more in ((E4M3, "bfloat16", False), (E5M2, "float32", True)):
        epilogue = {"bias": more, "activation": "silu" if more else "none", "row_scale": more}
        problem = problem_of(*sides, out_dtype=out_dtype, rhs_dtype=rhs_dtype, scales=scales, **epilogue)
        for config in by_tile(problem)[:2]:
            assert_right_for(problem, launch(problem, config), kinds_of_sizes(sides[0], sides[3]), assert_grouped)


@pytest.mark.parametrize("scales", ["none", "tensor"])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_two_products_in_one_are_right_for_all_kinds_of_sizes(sides, scales, assert_grouped):
    for dtype, rhs_dtype, out_dtype in ((E5M2, E4M3, "bfloat16"), (E4M3, E4M3, "float32")):
        problem = problem_of(*sides, out_dtype=out_dtype, scales=scales, second=True)
        problem = replace(problem, dtype=dtype, rhs_dtype=rhs_dtype)
        for config in by_tile(problem)[:2]:
            assert_right_for(problem, launch(problem, config), kinds_of_sizes(sides[0], sides[3]), assert_grouped)


@pytest.mark.parametrize("seed", range(16))
def test_random_legal_config_is_right(seed, assert_grouped):
    rng = random.Random(seed)
    scales = ["block", "block", "row", "tensor"][seed % 4]
    sides = rng.randint(1, 2000), 8 * rng.randint(1, 120), 16 * rng.randint(1, 60), rng.choice([1, 3, 8, 40])
    more = {"bias": rng.random() < 0.5, "row_scale": rng.random() < 0.3, "group_offset": rng.random() < 0.3}
    problem = problem_of(*sides, scales=scales, out_dtype=rng.choice(["bfloat16", "float16", "float32"]), **more)
    problem = replace(problem, dtype=rng.choice([E4M3, E5M2]), rhs_dtype=rng.choice([E4M3, E5M2]))
    space, device = GROUPED.space(problem, gpu.current()), gpu.current()
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    config = next(c for c in drawn if GROUPED.check(problem, c, device) is None)
    sizes = np.random.default_rng(seed)
    all_sizes = [drawn_sizes(sizes, problem.m, problem.groups + problem.group_offset) for _ in range(4)]
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)


@pytest.mark.parametrize("scales", ["none", "block"])
@pytest.mark.parametrize("one_sign", [False, True], ids=["both signs", "one sign"])
def test_sums_are_those_of_the_documented_arithmetic_to_the_bit(one_sign, scales):
    """docs/kernels/matmul.md, "Eight bits"."""
    m, n, k, sizes = 72, 40, 1024, (40, 32)
    lhs, rhs = (jax.random.normal(jax.random.key(i), shape) for i, shape in enumerate([(m, k), (2, n, k)]))
    lhs, rhs = (x.astype(E4M3) for x in ((jnp.abs(lhs), jnp.abs(rhs)) if one_sign else (lhs, rhs)))
    problem = problem_of(m, n, k, 2, out_dtype="float32", scales=scales)
    config = replace(BASE, tile_k=128, max_concurrent_steps=4, epilogue_tile_n=32)
    arrays = lhs, rhs, jnp.array(sizes, jnp.int32), *(jnp.ones(shape) for shape in scale_shapes(problem))
    out = np.asarray(jax.jit(launch(problem, config))(*arrays))
    block = 128 if scales == "block" else None
    wanted = [hopper_sums.sums(lhs[rows], rhs[i], block) for i, rows in enumerate(ragged.spans(sizes, m))]
    np.testing.assert_array_equal(out, np.concatenate(wanted))


def test_quantized_arrays_give_the_product_of_what_they_were():
    x, w = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate([(512, 768), (4, 384, 768)]))
    sizes = jnp.array([200, 0, 100, 150])
    wanted = grouped_matmul(x, w, sizes, transpose_rhs=True, backend="xla")
    for of_x, of_w in (("tensor", "tensor"), ("row", "row"), ("block", "square")):
        (x8, scale_lhs), (w8, scale_rhs) = quantize(x, of_x), quantize(w, of_w)
        call = functools.partial(grouped_matmul, scale_lhs=scale_lhs, scale_rhs=scale_rhs, transpose_rhs=True)
        out = call(x8, w8, sizes, backend="mosaic")
        error = jnp.abs(out.astype(jnp.float32) - wanted.astype(jnp.float32))
        assert float(error.max() / jnp.std(wanted.astype(jnp.float32))) < 0.25
