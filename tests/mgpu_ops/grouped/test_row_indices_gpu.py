"""grouped_matmul with row_indices on a Hopper GPU: rows loaded from where they are, in any order and as often as named.

Rows that no index names, indices of rows of no group and matrices of empty groups are NaN or no rows at all, and outputs lie
between arrays of NaN.
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

from mgpu_ops import GroupedMatmulConfig, GroupedMatmulProblem, grouped_matmul, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.grouped.grouped_matmul.problem import by_name
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.test_grouped_gpu import between_guards, drawn_sizes, kinds_of_sizes

pytestmark = pytest.mark.gpu

SPEC = spec_of("grouped_matmul")
P = GroupedMatmulProblem


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind whose rows have indices, and a legal config for it."""
    rng = random.Random(seed)
    unit = rng.choice([8, 64])
    n, k = (unit * rng.randint(1, 1000 // unit) for _ in "nk")
    dtype = rng.choice(["bfloat16", "float16"])
    problem = P(
        m=rng.randint(1, 2000),
        n=n,
        k=k,
        groups=rng.choice([1, 3, 8, 40]),
        dtype=dtype,
        out_dtype=rng.choice([dtype, "float32"]),
        layout=rng.choice(["nn", "nt"]),
        bias=rng.random() < 0.3,
        activation=rng.choice(["none", "relu", "silu", "gelu"]),
        group_offset=rng.random() < 0.3,
        row_scale=rng.random() < 0.3,
        lhs_rows=rng.choice([1, 7, rng.randint(1, 2000)]),
    )
    device = gpu.current()
    space = SPEC.space(problem, device)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if SPEC.check(problem, c, device) is None)


def drawn_indices(rng: np.random.Generator, rows: int, count: int) -> np.ndarray:
    """In any order, in order, in reverse, one for all, or a few often."""
    found = rng.integers(0, rows, count)
    kinds = [
        found,
        np.sort(found),
        np.sort(found)[::-1],
        np.full(count, found[0]),
        found[rng.integers(0, min(3, count), count)],
    ]
    return kinds[rng.integers(len(kinds))].astype(np.int32)


def assert_right(p: Any, config: Any, seed: int, all_sizes: Any, assert_near: Any) -> None:
    """For all sizes, compiled once, beside the product in float64; and twice the same bits."""
    rng = np.random.default_rng(seed)
    clean, rhs, _, *extra = (np.asarray(x) for x in jax.jit(functools.partial(SPEC.inputs, p))(jax.random.key(seed)))
    run = jax.jit(functools.partial(SPEC.run, p, config, gpu.current()))
    for sizes in all_sizes:
        spans, row = ragged.spans_of(p, sizes), np.arange(p.m)
        outside = (row < spans[0].start) | (row >= spans[-1].stop)
        indices = drawn_indices(rng, p.lhs_rows, p.m)
        unread = ~np.isin(np.arange(p.lhs_rows), indices[~outside])
        lhs = np.where(unread[:, None], np.nan, clean).astype(clean.dtype)
        given = np.where(outside, rng.choice([-(2**31), -1, 2**31 - 1, 0], p.m), indices).astype(np.int32)
        empty = np.array([span.start == span.stop for span in spans])
        matrices = np.where(empty[:, None, None], np.nan, rhs).astype(rhs.dtype)
        named = by_name(p, extra) | {"row_indices": given}
        if p.bias:
            named["bias"] = np.where(empty[:, None], np.nan, named["bias"]).astype(np.float32)
        if p.row_scale:
            named["row_scale"] = np.where(outside, np.nan, named["row_scale"]).astype(np.float32)
        arrays = jax.device_put((lhs, matrices, np.array(sizes, np.int32), *named.values()))
        jax.block_until_ready(arrays)
        with between_guards(p):
            out = np.asarray(run(*arrays))
        np.testing.assert_array_equal(out[outside], 0)
        np.testing.assert_array_equal(out, run(*arrays))
        wanted = ragged.truth(replace(p, lhs_rows=0), sizes, clean[indices], rhs, *extra[:-1])
        if (~outside).any():
            assert_near(out[~outside], wanted[~outside], SPEC.tolerance(p))


@pytest.mark.parametrize("seed", range(24))
def test_random_legal_config_is_right(seed, assert_near):
    problem, config = draw(seed)
    rng = np.random.default_rng(seed)
    all_sizes = [drawn_sizes(rng, problem.m, problem.groups + problem.group_offset) for _ in range(4)]
    assert_right(problem, config, seed, all_sizes, assert_near)


@pytest.mark.parametrize(
    "problem",
    [
        P(1, 8, 8, 1, lhs_rows=1),
        P(7, 136, 64, 3, lhs_rows=1),
        P(129, 264, 136, 2, lhs_rows=4097),
        P(1000, 520, 1032, 13, lhs_rows=77),
        P(4097, 136, 72, 33, lhs_rows=129),
        P(300, 64, 64, 256, lhs_rows=8, layout="nt"),
        P(3, 1032, 128, 64, lhs_rows=100, layout="nt"),
        P(2048, 256, 4096, 8, lhs_rows=512, layout="nt"),
    ],
    ids=str,
)
def test_odd_sizes_are_right_for_all_kinds_of_groups(problem, assert_near):
    config = SPEC.default(problem, gpu.current())
    assert_right(problem, config, 0, kinds_of_sizes(problem.m, problem.groups), assert_near)


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_gradients_are_those_of_rows_gathered_before_and_the_same_each_time(layout, assert_near):
    lhs, rhs, *_ = SPEC.inputs(P(900, 264, 200, 5, layout=layout), jax.random.key(0))
    indices = np.random.default_rng(0).integers(0, 300, 900)
    sizes = np.array([100, 0, 33, 700, 1], np.int32)

    def loss(named: bool, lhs: jax.Array, rhs: jax.Array, indices: jax.Array) -> jax.Array:
        call = functools.partial(grouped_matmul, transpose_rhs=layout == "nt", backend="mosaic")
        if named:
            out = call(lhs, rhs, sizes, row_indices=indices)
        else:
            out = call(lhs[indices].astype(jnp.bfloat16), rhs, sizes)
        return (out.astype(jnp.float32) * jax.random.normal(jax.random.key(9), out.shape)).sum()

    ours, before = (jax.jit(jax.grad(functools.partial(loss, named), (0, 1))) for named in (True, False))
    first = ours(lhs, rhs, indices)
    for x, y in zip(first, before(lhs.astype(jnp.float32), rhs, indices), strict=True):  # rows are added up in float32
        assert_near(x, y, 2e-2)
    for _ in range(3):
        jax.tree.map(np.testing.assert_array_equal, first, ours(lhs, rhs, indices))
