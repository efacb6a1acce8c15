"""quantized_matmul on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import QuantizedMatmulConfig, spec_of
from mgpu_ops import QuantizedMatmulProblem as P
from mgpu_ops.core import gpu

pytestmark = pytest.mark.gpu

OP = spec_of("quantized_matmul")
ROUNDING = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}  # one of the output, or float32 sums


def exact(problem: P, x: jax.Array, w: jax.Array, *others: jax.Array) -> np.ndarray:
    """In float64."""
    x, w, *wide = (np.asarray(a.astype(jnp.float32)).astype(np.float64) for a in (x, w.astype(jnp.int8), *others))
    size, count = problem.group_size, 1 + problem.zero_points
    scale, *zero = (np.repeat(a, size, 0).T if size else a[:, None] for a in wide[:count])
    return sum(wide[count:], x @ ((w - (zero[0] if zero else 0.0)) * scale).T)


def draw(
    seed: int,
    most_rows: int = 200,
    w_dtypes: tuple[str, ...] = ("int8", "int4"),
    odd: bool = False,
    added: dict[str, bool] | None = None,
    **fields: Any,
) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it, with these fields. odd: k is an odd multiple of 128. added: to the
    product.
    """
    rng = random.Random(seed)
    group_size, w_dtype = rng.choice([0, 32, 64, 128]), rng.choice(w_dtypes)
    k = 128 * rng.randint(1, 24) if group_size or w_dtype == "int4" else 16 * rng.randint(1, 200)
    k = k // 256 * 256 + 128 if odd else k
    dtype = rng.choice(["bfloat16", "float16"])
    out = rng.choice([dtype, dtype, "float32"])
    m, n = (
        (8 * rng.randint(1, most_rows // 10), 64 * rng.randint(1, 16))
        if out == "float32"
        else (rng.randint(1, most_rows), 8 * rng.randint(1, 130))
    )
    problem = P(m, n, k, w_dtype, group_size, rng.random() < 0.5, dtype, out, "nt", rng.choice(["bfloat16", "float32"]))
    problem = replace(problem, **(added or {}))
    device = gpu.current()
    space = OP.space(problem, device) | {field: (value,) for field, value in fields.items()}
    drawn = (QuantizedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    found = next((c for c in drawn if OP.check(problem, c, device) is None), None)
    return (problem, found) if found else draw(seed + 1000, most_rows, w_dtypes, odd, added, **fields)


@pytest.mark.parametrize("seed", range(24))
def test_any_legal_config_is_right_everywhere(seed, assert_near):
    assert_right(*draw(seed), seed, assert_near)


@pytest.mark.parametrize("seed", range(100, 116))
def test_any_legal_config_is_right_with_many_rows(seed, assert_near):
    assert_right(*draw(seed, most_rows=2500), seed, assert_near)


@pytest.mark.parametrize("seed", range(200, 216))
def test_any_legal_config_is_right_with_int4_whose_k_is_no_multiple_of_256(seed, assert_near):
    assert_right(*draw(seed, most_rows=600, w_dtypes=("int4",), odd=True), seed, assert_near)


@pytest.mark.parametrize("seed", range(300, 312))
def test_any_legal_config_is_right_whose_warpgroups_take_steps_in_turn(seed, assert_near):
    assert_right(*draw(seed, wg_dimension="steps"), seed, assert_near)


@pytest.mark.parametrize("wg_dimension", ["n", "k", "steps"])
@pytest.mark.parametrize("cluster", ["none", "n", "k"])
@pytest.mark.parametrize("added", [{"residual": True}, {"bias": True, "residual": True}], ids=["residual", "both"])
def test_any_legal_config_adds_bias_and_residual_right(added, cluster, wg_dimension, assert_near):
    for seed in range(400, 404):
        assert_right(*draw(seed, added=added, cluster=cluster, wg_dimension=wg_dimension), seed, assert_near)


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize("name", ["out", "down"])
def test_the_default_adds_the_residual_of_decoding_right(name, m, assert_near):
    problem = replace(OP.shapes[f"llama3-8b-{name}-{m}-w8"], residual=True)
    assert_right(problem, OP.default(problem, gpu.current()), m, assert_near)


@pytest.mark.parametrize(("w_dtype", "group_size"), [("int8", 0), ("int8", 128), ("int4", 0), ("int4", 128)])
@pytest.mark.parametrize(("m", "k"), [(201, 1152), (777, 2176), (1024, 1024)])
def test_the_default_is_right_with_many_rows(m, k, w_dtype, group_size, assert_near):
    problem = P(m, 1032, k, w_dtype, group_size, layout="nt")
    assert_right(problem, OP.default(problem, gpu.current()), m, assert_near)


def assert_right(problem: P, config: Any, seed: int, assert_near: Any) -> None:
    """Within rounding of float64, and of the same bits in a second run."""
    arrays = jax.jit(functools.partial(OP.inputs, problem))(jax.random.key(seed))
    run = jax.jit(functools.partial(OP.run, problem, config, gpu.current())).lower(*arrays).compile()
    jnp.full(4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype).block_until_ready()  # what is freed holds NaN
    out = run(*arrays)
    assert_near(out, exact(problem, *arrays), ROUNDING[problem.out_dtype])
    assert (run(*arrays) == out).all()


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("w_dtype", ["int8", "int4"])
@pytest.mark.parametrize("exchange", ["weights", "x"])
def test_every_integer_becomes_the_same_float_at_every_place_of_a_tile(exchange, w_dtype, dtype):
    """x is one 1 a row, at each of k: the result is the weights, transposed."""
    low, count = (-128, 256) if w_dtype == "int8" else (-8, 16)
    problem = P(256, 128, 256, w_dtype, 0, False, dtype, "float32", "nt", "float32")
    config = QuantizedMatmulConfig(64, 64, 256, 2, 1, "n", "none", 1, 40, exchange)
    x = jnp.eye(256, dtype=dtype)
    for shift in range(0, count, 7):
        numbers = np.arange(128 * 256).reshape(128, 256) * 3 + shift
        w = numbers % count + low
        out = OP.run(problem, config, gpu.current(), x, jnp.asarray(w, jnp.int8).astype(w_dtype), jnp.ones(128, jnp.float32))
        np.testing.assert_array_equal(out, w.T)
