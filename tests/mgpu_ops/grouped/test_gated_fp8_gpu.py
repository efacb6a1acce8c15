"""gated_grouped_matmul of 8-bit floats on a Hopper GPU: what the interpreter cannot show."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.core.fp8 import accumulation_error
from mgpu_ops.grouped.gated.problem import of_one
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.test_gated_fp8 import E4M3, E5M2, P, truth

pytestmark = pytest.mark.gpu

OP = spec_of("gated_grouped_matmul")


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind of scales and a legal config for it."""
    rng = random.Random(seed)
    sides = rng.randint(1, 1500), 8 * rng.randint(1, 80), 16 * rng.randint(1, 50), rng.choice([1, 3, 8, 40])
    fields: dict[str, Any] = {
        "scales": ["block", "row", "block", "tensor", "none"][seed % 5],
        "rhs_dtype": rng.choice([E4M3, E5M2]),
    }
    fields |= {"out_dtype": rng.choice(["bfloat16", "float32"]), "group_offset": rng.random() < 0.3}
    problem = P(*sides, **fields, activation=rng.choice(["silu", "gelu", "relu"]))
    space, device = OP.space(problem, gpu.current()), gpu.current()
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if OP.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(12))
def test_any_legal_config_is_right(seed, assert_near):
    problem, config = draw(seed)
    lhs, *rest = jax.jit(functools.partial(OP.inputs, problem))(jax.random.key(seed))
    run = jax.jit(functools.partial(OP.run, problem, config, gpu.current())).lower(lhs, *rest).compile()
    rng = np.random.default_rng(seed)
    for sizes in (rng.integers(-2, 2 * problem.m // problem.groups + 1, problem.groups + problem.group_offset), [0] * 41):
        sizes = list(map(int, sizes))[: problem.groups + problem.group_offset]
        nowhere = ragged.rest(of_one(problem), sizes)
        poisoned = jnp.where(jnp.asarray(nowhere)[:, None], jnp.nan, lhs.astype(jnp.float32)).astype(lhs.dtype)
        arrays = [poisoned, *rest]
        arrays[3] = jnp.array(sizes, jnp.int32)
        jnp.full(
            4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype
        ).block_until_ready()  # freed memory holds NaN
        out = run(*arrays)
        assert (run(*arrays) == out).all()
        assert not out[jnp.asarray(nowhere)].any()
        if not nowhere.all():
            error = accumulation_error(problem.dtype, problem.k, problem.scales)
            allowed = (8e-3 if problem.out_dtype == "bfloat16" else 1e-4) + 3 * error
            assert_near(out[jnp.asarray(~nowhere)], truth(problem, *arrays)[~nowhere], allowed)
