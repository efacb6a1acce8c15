"""The gated gradient on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random

import jax
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig
from mgpu_ops.core import gpu
from tests.mgpu_ops.grouped.test_gated_gradient import SPEC, P, assert_right, operands

pytestmark = pytest.mark.gpu


@pytest.mark.parametrize("seed", range(12))
def test_random_legal_config_is_right_and_gives_the_same_bits_again(seed, assert_near):
    rng, sizes_of = random.Random(seed), np.random.default_rng(seed)
    dtype = rng.choice(["bfloat16", "float16"])
    unit = rng.choice([8, 64])
    n, k = (unit * rng.randint(1, 800 // unit) for _ in "nk")
    groups, shard = rng.choice([1, 3, 8, 40]), rng.random() < 0.4
    activation = rng.choice(["none", "relu", "silu", "gelu"])
    problem = P(rng.randint(1, 2000), n, k, groups, dtype, dtype, activation=activation, group_offset=shard)
    device = gpu.current()
    space = SPEC.space(problem, device)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    config = next(c for c in drawn if SPEC.check(problem, c, device) is None)
    run = jax.jit(functools.partial(SPEC.run, problem, config, device))
    for _ in range(3):
        shares = sizes_of.gamma(0.5, size=groups + shard) + 1e-9
        sizes = sizes_of.multinomial(sizes_of.integers(0, problem.m + 1), shares / shares.sum()).tolist()
        arrays = operands(problem, sizes)
        outs = run(*arrays)
        assert_right(problem, sizes, outs, arrays, assert_near)
        jax.tree.map(np.testing.assert_array_equal, outs, run(*arrays))
