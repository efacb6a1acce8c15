"""What a user of `mgpu_ops.fp8_gated_mlp` relies on: values, gradients, shapes, what is rounded and what is refused."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import MatmulProblem, QuantizeProblem, fp8_gated_mlp, fp8_matmul
from tests.arrays import normal

M, K, N, WIDTH = 48, 80, 112, 64
BF16, F32 = jnp.bfloat16, jnp.float32


def operands(dtype: Any = BF16) -> tuple[jax.Array, ...]:
    shapes = (M, K), (K, N), (K, N), (N, WIDTH)
    return tuple(normal(i, *shape, dtype=dtype) / (shape[0] ** 0.5 if i else 1) for i, shape in enumerate(shapes))


def of_products(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, *residual: jax.Array) -> jax.Array:
    hidden = jax.nn.silu(fp8_matmul(x, w_gate)) * fp8_matmul(x, w_up)
    return fp8_matmul(hidden, w_down, residual=residual[0] if residual else None)


def in_16_bits(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, *residual: jax.Array) -> jax.Array:
    return (jax.nn.silu(x @ w_gate) * (x @ w_up)) @ w_down + sum(residual)


def fused(*arrays: jax.Array) -> jax.Array:
    return fp8_gated_mlp(*arrays[:4], residual=arrays[4] if len(arrays) > 4 else None)


def with_gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> list[np.ndarray]:
    weights = normal(9, M, WIDTH)

    def value(*arrays: jax.Array) -> Any:
        out = function(*arrays)
        return jnp.sum(out.astype(F32) * weights), out

    grads, out = jax.jit(jax.grad(value, range(len(arrays)), has_aux=True))(*arrays)
    assert [(g.dtype, g.shape) for g in grads] == [(a.dtype, a.shape) for a in arrays]
    return [np.asarray(a, np.float64) for a in (out, *grads)]


def share(found: Any, wanted: Any) -> float:
    """The error's norm as a share of what is wanted."""
    return float(np.linalg.norm(found - wanted) / np.linalg.norm(wanted))


@pytest.mark.parametrize("dtype", [BF16, F32])
def test_values_and_gradients_are_those_of_three_fp8_products_within_rounding(dtype: Any) -> None:
    arrays = (*operands(dtype), normal(7, M, WIDTH, dtype=dtype))
    found, products, exact = (with_gradients(f, *arrays) for f in (fused, of_products, in_16_bits))
    for one, other, wanted in zip(found, products, exact, strict=True):
        assert share(one, wanted) < 1.1 * share(other, wanted) + 1e-6  # not farther from what is exact
        assert share(one, wanted) < 0.15
    np.testing.assert_array_equal(found[-1], products[-1])  # of the residual


def test_leading_dimensions_are_rows_and_vmap_has_scales_for_each() -> None:
    x, *weights = operands()
    np.testing.assert_array_equal(fp8_gated_mlp(x.reshape(3, 16, K), *weights).reshape(M, WIDTH), fp8_gated_mlp(x, *weights))
    parts = x.reshape(3, 16, K) * jnp.asarray([1, 8, 64], BF16)[:, None, None]
    mapped = jax.vmap(lambda x: fp8_gated_mlp(x, *weights))(parts)
    each = jnp.stack([fp8_gated_mlp(part, *weights) for part in parts])
    assert share(np.asarray(mapped, np.float64), np.asarray(each, np.float64)) < 0.02


def test_each_array_is_rounded_once_and_the_hidden_one_where_it_is_computed() -> None:
    arrays = operands()
    with mgpu_ops.target("h200"):
        step = jax.grad(lambda *arrays: jnp.sum(fused(*arrays).astype(F32)), range(4))
        uses = {use.problem: use.count for use in mgpu_ops.capture(step)(*arrays).problems}
    rounded = {problem: count for problem, count in uses.items() if isinstance(problem, QuantizeProblem)}
    e5m2 = {"to": "float8_e5m2"}
    assert rounded == {
        QuantizeProblem(M, K): 1,
        QuantizeProblem(K, N): 2,
        QuantizeProblem(N, WIDTH): 1,
        QuantizeProblem(M, N, of="gate", amax="only"): 1,
        QuantizeProblem(M, N, of="gate"): 1,
        QuantizeProblem(M, WIDTH, **e5m2): 1,
        QuantizeProblem(M, N, of="gate_gradient", amax="only", **e5m2): 1,
        QuantizeProblem(M, N, of="gate_gradient", **e5m2): 1,
    }
    assert sum(count for problem, count in uses.items() if isinstance(problem, MatmulProblem)) == 9


@pytest.mark.parametrize(
    ("change", "error", "message"),
    [
        ({0: jnp.ones((M, K), jnp.int32)}, TypeError, "x"),
        ({1: jnp.ones((K, N + 1), BF16)}, ValueError, r"do not fit: they are \[..., k\], \[k, n\]"),
        ({3: jnp.ones((2, N, WIDTH), BF16)}, ValueError, "weights of rank 2"),
        ({4: jnp.ones((M, WIDTH + 1), BF16)}, ValueError, "residual"),
        ({4: jnp.ones((M, WIDTH), F32)}, ValueError, "residual"),
    ],
)
def test_what_no_call_can_be_is_refused(change: dict[int, Any], error: Any, message: str) -> None:
    arrays = [*operands(), jnp.ones((M, WIDTH), BF16)]
    for i, array in change.items():
        arrays[i] = array
    with pytest.raises(error, match=message):
        fused(*arrays)
