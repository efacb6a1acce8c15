"""quantized_grouped_matmul on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import QuantizedGroupedMatmulProblem as P
from mgpu_ops import QuantizedMatmulConfig, spec_of
from mgpu_ops.core import gpu
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.test_quantized_grouped_matmul import truth

pytestmark = pytest.mark.gpu

OP = spec_of("quantized_grouped_matmul")
ROUNDING = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}  # one of the output, or float32 sums


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it."""
    rng = random.Random(seed)
    group_size, w_dtype = rng.choice([0, 32, 64, 128]), rng.choice(["int8", "int4"])
    k = 128 * rng.randint(1, 12) if group_size or w_dtype == "int4" else 16 * rng.randint(1, 100)
    dtype = rng.choice(["bfloat16", "float16"])
    out = rng.choice([dtype, dtype, "float32"])
    n = 64 * rng.randint(1, 10) if out == "float32" else 8 * rng.randint(1, 80)
    fields = {"groups": rng.choice([1, 3, 8, 40]), "group_offset": rng.random() < 0.3}
    scales = rng.choice(["bfloat16", "float32"])
    problem = P(rng.randint(1, 700), n, k, w_dtype, group_size, rng.random() < 0.5, dtype, out, "nt", scales, **fields)
    space, device = OP.space(problem, gpu.current()), gpu.current()
    drawn = (QuantizedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    return problem, next(c for c in drawn if OP.check(problem, c, device) is None)


def kinds_of_sizes(problem: P, seed: int) -> list[list[int]]:
    """Spread at random, with empty groups, negative ones, more than there are rows, or none at all."""
    rng = np.random.default_rng(seed)
    most = 2 * problem.m // problem.groups + 1
    count = problem.groups + problem.group_offset
    some = rng.integers(0, most, count)
    return [
        some.tolist(),
        (some * rng.integers(0, 2, count)).tolist(),
        (some - 2).tolist(),
        [0] * count,
        [2**31 - 1] * count if not problem.group_offset else [0, *[2**31 - 1] * problem.groups],
    ]


@pytest.mark.parametrize("seed", range(16))
def test_any_legal_config_is_right_everywhere(seed, assert_near):
    problem, config = draw(seed)
    x, w, scales, sizes, *zero_points = jax.jit(functools.partial(OP.inputs, problem))(jax.random.key(seed))
    arrays = (x, w, scales, sizes, *zero_points)
    run = jax.jit(functools.partial(OP.run, problem, config, gpu.current())).lower(*arrays).compile()
    for sizes in kinds_of_sizes(problem, seed):
        nowhere = ragged.rest(problem, sizes)
        poisoned = x.at[jnp.asarray(nowhere)].set(jnp.nan)
        arrays = poisoned, w, scales, jnp.array(sizes, jnp.int32), *zero_points
        jnp.full(
            4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype
        ).block_until_ready()  # freed memory holds NaN
        out = run(*arrays)
        assert (run(*arrays) == out).all()
        assert not out[jnp.asarray(nowhere)].any()
        if not nowhere.all():
            assert_near(out[jnp.asarray(~nowhere)], truth(problem, *arrays)[~nowhere], ROUNDING[problem.out_dtype])


@pytest.mark.parametrize("name", ["deepseek-v3-ep8-down-64-random-w4", "qwen3-30b-gate_up-512-random-w8"])
def test_a_named_problem_is_what_xla_computes(name, assert_near):
    problem = OP.shapes[name]
    arrays = jax.jit(functools.partial(OP.inputs, problem))(jax.random.key(0))
    out = jax.jit(functools.partial(OP.run, problem, OP.default(problem, gpu.current()), gpu.current()))(*arrays)
    assert_near(out, jax.jit(functools.partial(OP.reference, problem))(*arrays), OP.tolerance(problem))
