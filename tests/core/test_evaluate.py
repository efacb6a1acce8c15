"""What runs op by op on NumPy's arrays is what JAX computes."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks
from jax.experimental import io_callback

from mgpu_ops.core import evaluate
from tests.arrays import normal


def evaluated(f: Callable[..., Any], *args: Any) -> list[np.ndarray]:
    jaxpr = jax.make_jaxpr(f)(*args)
    return evaluate.run(jaxpr.jaxpr, jaxpr.consts, *jax.tree.leaves(args))


def assert_same(f: Callable[..., Any], *args: Any, rtol: float = 0.0) -> None:
    wanted = jax.tree.leaves(jax.jit(f)(*args))
    for found, x in zip(evaluated(f, *args), wanted, strict=True):
        assert isinstance(found, np.ndarray)
        assert (found.dtype, found.shape) == (x.dtype, x.shape)
        np.testing.assert_allclose(found.astype(np.float64), np.asarray(x, np.float64), rtol=rtol, atol=rtol)


INTEGERS = np.array([7, -7, 2**31 - 1, -(2**31), 0, 5], np.int32), np.array([3, 3, 2, -1, 4, -9], np.int32)
FLOATS = np.array([1.5, -0.25, np.nan, np.inf, -np.inf, 3e38], np.float32), np.array([2, -3, 1, np.nan, 7, 9], np.float32)
BINARY = [lax.add, lax.sub, lax.mul, lax.max, lax.min, lax.div, lax.rem, lax.eq, lax.ne, lax.lt, lax.le, lax.gt, lax.ge]


@pytest.mark.parametrize("op", BINARY, ids=lambda op: op.__name__)
@pytest.mark.parametrize("dtype", ["int32", "float32", "bfloat16"])
def test_arithmetic_of_two(op, dtype):
    x, y = INTEGERS if dtype == "int32" else (jnp.asarray(x, dtype) for x in FLOATS)
    assert_same(op, x, y)


def test_division_by_zero_of_integers():
    x = np.array([7, -7, 0], np.int32)
    assert_same(lambda x: (lax.div(x, x * 0), lax.rem(x, x * 0)), x)


@pytest.mark.parametrize("dtype", ["float32", "bfloat16"])
def test_functions(dtype):
    x = jnp.abs(normal(0, 8, 16, dtype=dtype))
    near = 1e-6 if dtype == "float32" else 1e-2
    assert_same(
        lambda x: (jnp.exp2(x), jnp.exp(x), jnp.log(x), jnp.log2(x), jnp.tanh(x), jnp.sqrt(x), lax.rsqrt(x)), x, rtol=near
    )
    assert_same(lambda x: (-x, jnp.abs(x), jnp.sign(x), lax.clamp(jnp.asarray(0.2, x.dtype), x, jnp.asarray(0.7, x.dtype))), x)


def test_bits():
    x, y = INTEGERS
    assert_same(lambda x, y: (x & y, x | y, x ^ y, ~x, x << 2, x >> 2, (x > 0) & ~(y > 0)), x, y)


@pytest.mark.parametrize("new", ["int8", "int32", "float16", "bfloat16", "float8_e4m3fn", "int4", "bool"])
def test_conversions(new):
    x = np.array([0.3, -2.7, 300.0, 7.5, -1e9, 3e9], np.float32)
    assert_same(lambda x: x.astype(new), x)
    assert_same(lambda x: x.astype("int32").astype(new).astype("float32"), np.clip(x, -8, 7))


def test_shapes():
    x = np.arange(24, dtype=np.float32).reshape(4, 6)

    def f(x, i):
        rows = lax.broadcasted_iota(jnp.int32, (4, 6), 0)
        parts = lax.dynamic_slice(x, (i, i + 9), (2, 3)), lax.dynamic_slice(x, (i - 9, i), (2, 3))  # starts out of range
        padded = jnp.pad(x, ((1, 2), (0, 3))), lax.pad(x, 0.0, ((-1, 1, 0), (0, 0, 2)))
        others = (
            x.T,
            x[None, 1:3, ::2],
            jnp.concatenate([x, x], 1),
            jnp.where(rows > i, x, 0),
            jnp.broadcast_to(x[:, :1], (4, 3)),
        )
        return parts, padded, others, lax.dynamic_update_slice(x, parts[0], (i, i)), lax.select_n(i, x, 2 * x, 3 * x)

    assert_same(f, x, np.int32(2))


@pytest.mark.parametrize("dtype", ["float32", "bfloat16", "int8"])
def test_sums_and_products(dtype):
    x = (10 * normal(1, 8, 16)).astype(dtype)
    out = jnp.int32 if dtype == "int8" else jnp.float32
    products = [((1,), (1,)), ((0,), (0,))]
    assert_same(
        lambda x: [lax.dot_general(x, x, (over, ((), ())), preferred_element_type=out) for over in products], x, rtol=1e-5
    )
    assert_same(lambda x: jnp.dot(x, x.T, preferred_element_type=out), x, rtol=1e-5)
    assert_same(
        lambda x: (x.sum(1), x.max(0), x.min(), (x > 0).all(0), (x > 0).any()), x, rtol=1e-2 if dtype == "bfloat16" else 1e-5
    )


def test_loops_and_branches():
    def f(n, x):
        x = lax.fori_loop(0, n, lambda i, x: x + i * x, x)  # so many steps are not known
        x = lax.fori_loop(0, 3, lambda i, x: x * (i + 1), x)
        x, rows = lax.scan(lambda c, row: (c + row.sum(), c * row), x, jnp.ones((4, 2)), reverse=True)
        branches = [lambda x: x, lambda x: 2 * x, lambda x: 3 * x]
        return x, rows, [lax.switch(n - i, branches, x) for i in range(5)], lax.cond(n > 1, branches[0], branches[2], x)

    assert_same(f, np.int32(3), np.float32(1.5))


def test_what_the_simulator_returns_may_change_later():
    memory = np.zeros(2, np.int32)

    def add() -> np.ndarray:
        memory[...] += 1
        return memory

    add.__module__ = gpu_callbacks.__name__  # whose functions get and return NumPy's arrays
    of = jax.ShapeDtypeStruct((2,), jnp.int32)
    first, second = evaluated(lambda: (io_callback(add, of), io_callback(add, of)))
    assert (first.tolist(), second.tolist()) == ([1, 1], [2, 2])
