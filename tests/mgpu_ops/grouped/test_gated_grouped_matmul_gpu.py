"""gated_grouped_matmul on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GatedGroupedMatmulProblem, GroupedMatmulConfig, gated_grouped_matmul, spec_of
from mgpu_ops.core import gpu
from tests.mgpu_ops.grouped import ragged

pytestmark = pytest.mark.gpu

SPEC = spec_of("gated_grouped_matmul")
P = GatedGroupedMatmulProblem


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it."""
    rng = random.Random(seed)
    unit = rng.choice([8, 64])
    n, k = (unit * rng.randint(1, 800 // unit) for _ in "nk")
    dtype = rng.choice(["bfloat16", "float16"])
    gradient = seed % 2 == 1
    problem = P(
        m=rng.randint(1, 2000),
        n=n,
        k=k,
        groups=rng.choice([1, 3, 8, 40]),
        dtype=dtype,
        out_dtype=dtype if gradient else rng.choice([dtype, "float32"]),
        layout=rng.choice(["nn", "nt"]),
        activation=rng.choice(["none", "relu", "silu", "gelu"]),
        gradient=gradient,
        group_offset=rng.random() < 0.4,
    )
    if not gradient and rng.random() < 0.5:
        problem = replace(problem, keep=True, out_dtype=dtype)
    if not gradient and seed % 4:
        problem = replace(problem, lhs_rows=rng.randint(1, 2000))
    device = gpu.current()
    space = SPEC.space(problem, device)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if SPEC.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(16))
def test_random_legal_config_is_right(seed, assert_near):
    assert_right(*draw(seed), seed, assert_near)


@pytest.mark.parametrize("kind", [{}, {"keep": True}, {"lhs_rows": 300}], ids=str)
@pytest.mark.parametrize("n", [136, 712])
def test_short_tiles_are_right(n, kind, assert_near):
    problem = P(900, n, 328, 7, **kind)
    config = replace(ragged.BASE, tile_m=128, tile_n=128, compute_warpgroups=2, schedule="dynamic", short_tiles=True)
    assert SPEC.check(problem, config, gpu.current()) is None
    assert_right(problem, config, n, assert_near)


@pytest.mark.parametrize("kind", [{}, {"keep": True}, {"gradient": True}, {"gradient": True, "group_offset": True}], ids=str)
@pytest.mark.parametrize("n", [136, 712])
def test_wide_tiles_of_rows_that_swizzle_tiles_do_not_divide_are_right(n, kind, assert_near):
    """The last tile ends with the row and overlaps the one before."""
    problem = P(900, n, 200, 7, **kind)
    wide = replace(ragged.BASE, tile_m=128, tile_n=128, compute_warpgroups=2)
    assert SPEC.check(problem, wide, gpu.current()) is None
    assert_right(problem, wide, n, assert_near)


def assert_right(p: Any, config: Any, seed: int, assert_near: Any) -> None:
    """For three draws of sizes; rows of no group, which are NaN, are not read and their results are zero."""
    rng = np.random.default_rng(seed)
    clean, gate, up, _, *further = (np.asarray(x) for x in SPEC.inputs(p, jax.random.key(seed)))
    run = jax.jit(functools.partial(SPEC.run, p, config, gpu.current()))
    reference = jax.jit(functools.partial(SPEC.reference, p))
    for _ in range(3):
        shares = rng.gamma(0.5, size=p.groups + p.group_offset) + 1e-9
        sizes = rng.multinomial(rng.integers(0, p.m + 1), shares / shares.sum()).astype(np.int32)
        spans, row = ragged.spans_of(p, sizes), np.arange(p.m)
        outside = (row < spans[0].start) | (row >= spans[-1].stop)
        unread = ~np.isin(np.arange(p.lhs_rows), further[0][~outside]) if p.lhs_rows else outside
        lhs = np.where(unread[:, None], np.nan, clean).astype(clean.dtype)
        g = further if p.lhs_rows else [np.where(outside[:, None], np.nan, x).astype(x.dtype) for x in further]
        outs, wanted = run(lhs, gate, up, sizes, *g), reference(lhs, gate, up, sizes, *g)
        for out, value in zip(jax.tree.leaves(outs), jax.tree.leaves(wanted), strict=True):
            np.testing.assert_array_equal(np.asarray(out)[outside], 0)
            if np.asarray(value).any():
                assert_near(out, value, 2 * SPEC.tolerance(p))  # the reference rounds, too


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_gradients_are_those_of_the_reference(layout, assert_near):
    problem = P(600, 264, 136, 5, layout=layout)
    lhs, gate, up, _ = SPEC.inputs(problem, jax.random.key(0))
    sizes = np.array([100, 0, 33, 250, 1], np.int32)

    def grads(backend: str) -> Any:
        def loss(*arrays: jax.Array) -> jax.Array:
            out = gated_grouped_matmul(*arrays, sizes, transpose_w=layout == "nt", backend=backend).astype(jnp.float32)
            return (out * jax.random.normal(jax.random.key(9), out.shape)).sum()

        return jax.jit(jax.grad(loss, (0, 1, 2)))(lhs, gate, up)

    for x, y in zip(grads("mosaic"), grads("xla"), strict=True):
        assert_near(x, y, 3e-2)


def test_two_runs_give_the_same_bits():
    problem = replace(SPEC.shapes["qwen3-30b-16384-random-gradient"], m=16384)
    arrays = jax.jit(functools.partial(SPEC.inputs, problem))(jax.random.key(0))
    config = SPEC.default(problem, gpu.current())
    run = jax.jit(functools.partial(SPEC.run, problem, config, gpu.current()))
    first = run(*arrays)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, run(*arrays))
