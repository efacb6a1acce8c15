"""What a user of `mgpu_ops.fp8_gated_mlp` relies on: values, gradients, shapes, what is rounded and what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import Fp8GatedState, Fp8State, MatmulProblem, QuantizeProblem, fp8_gated_mlp, fp8_matmul
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


def with_state(state: Fp8GatedState, *arrays: jax.Array) -> jax.Array:
    return fp8_gated_mlp(*arrays, state=state)


def next_of(state: Fp8GatedState, *arrays: jax.Array) -> Fp8GatedState:
    def value(*given: Any) -> jax.Array:
        return jnp.sum(with_state(*given).astype(F32) * normal(9, M, WIDTH))

    found: Fp8GatedState = jax.jit(jax.grad(value))(state, *arrays)
    return found


def test_the_gradient_of_a_state_is_the_next_one_of_all_three_products() -> None:
    arrays = operands(F32)

    def of_products(states: Fp8GatedState, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array) -> jax.Array:
        hidden = jax.nn.silu(fp8_matmul(x, w_gate, state=states.gate)) * fp8_matmul(x, w_up, state=states.up)
        return jnp.sum(fp8_matmul(hidden, w_down, state=states.down) * normal(9, M, WIDTH))

    first = Fp8GatedState.init(2)
    second, wanted = next_of(first, *arrays), jax.grad(of_products)(first, *arrays)
    for name, found, expected in zip(Fp8State._fields * 3, jax.tree.leaves(second), jax.tree.leaves(wanted), strict=True):
        np.testing.assert_allclose(found, expected, rtol=1e-5 if name.startswith("kernel") else 0.05, err_msg=name)
    larger = [2 * arrays[0], *arrays[1:]]
    third = next_of(second, *larger)
    np.testing.assert_allclose(third.gate.input_scale, 2 * second.gate.input_scale, rtol=1e-6)
    assert third.up.input_scale == third.gate.input_scale  # x is one array
    fourth = next_of(third, *arrays)  # the largest of the history counts, until it is forgotten
    np.testing.assert_allclose(fourth.gate.input_scale, third.gate.input_scale, rtol=1e-6)
    np.testing.assert_allclose(next_of(fourth, *arrays).gate.input_scale, second.gate.input_scale, rtol=1e-6)


def test_with_a_state_that_has_seen_the_arrays_a_layer_is_that_of_current_scaling() -> None:
    arrays = operands()
    state = Fp8GatedState.init(2)
    for _ in range(3):  # gradients are rounded with scales of their own from the second on
        state = next_of(state, *arrays)
    found = with_gradients(functools.partial(with_state, state), *arrays)
    for one, other in zip(found, with_gradients(fused, *arrays), strict=True):
        assert share(one, other) < 0.03
    clipped = jnp.clip(arrays[0] * 64, *(448.0 * float(state.gate.input_scale) * sign for sign in (-1, 1)))
    np.testing.assert_array_equal(with_state(state, 64 * arrays[0], *arrays[1:]), with_state(state, clipped, *arrays[1:]))


def test_with_a_state_no_array_is_read_for_its_largest_value_alone() -> None:
    with mgpu_ops.target("h200"):
        step = jax.grad(lambda *arrays: jnp.sum(with_state(*arrays).astype(F32)), range(5))
        uses = {use.problem: use.count for use in mgpu_ops.capture(step)(Fp8GatedState.init(), *operands()).problems}
    rounded = {problem: count for problem, count in uses.items() if isinstance(problem, QuantizeProblem)}
    also = {"amax": "also"}
    e5m2 = {"to": "float8_e5m2", **also}
    assert rounded == {
        QuantizeProblem(M, K, **also): 1,
        QuantizeProblem(K, N, **also): 2,
        QuantizeProblem(N, WIDTH, **also): 1,
        QuantizeProblem(M, N, of="gate", **also): 1,
        QuantizeProblem(M, WIDTH, **e5m2): 1,
        QuantizeProblem(M, N, of="gate_gradient", **e5m2): 1,
    }


def test_layers_of_a_scan_have_a_state_each() -> None:
    x, w_gate, w_up, _ = operands()
    weights = jnp.stack([w_gate, w_gate * 2]), jnp.stack([w_up, w_up]), jnp.stack([w_gate.T, w_gate.T])
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), Fp8GatedState.init(2))

    def loss(states: Fp8GatedState) -> jax.Array:
        layer = jax.checkpoint(lambda x, of: (fp8_gated_mlp(x, *of[0], state=of[1], residual=x), None))
        return jnp.sum(jax.lax.scan(layer, x, (weights, states))[0].astype(F32))

    new = jax.jit(jax.grad(loss))(states)
    largest = jnp.max(jnp.abs(w_gate)).astype(F32)
    np.testing.assert_allclose(new.gate.kernel_amax_history[:, 0], [largest, 2 * largest])
    assert (new.down.input_amax_history[:, 0] > 0).all()
    assert (new.gate.output_grad_amax_history[:, 0] > 0).all()


def test_a_state_that_all_devices_share_is_that_of_the_mesh() -> None:
    arrays, state = operands(F32), Fp8GatedState.init(2)
    mesh = jax.make_mesh((4,), ("data",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.devices()[:4])
    of_rows, whole = jax.P("data"), jax.P()

    def step(state: Fp8GatedState, x: jax.Array, *weights: jax.Array) -> Fp8GatedState:
        def loss(state: Fp8GatedState) -> jax.Array:
            return jnp.sum(with_state(state, x, *weights) ** 2)

        found: Fp8GatedState = jax.grad(loss)(state)
        return found

    split = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(whole, of_rows, whole, whole, whole), out_specs=whole))
    for found, wanted in zip(
        jax.tree.leaves(split(state, *arrays)), jax.tree.leaves(jax.jit(step)(state, *arrays)), strict=True
    ):
        np.testing.assert_allclose(found, wanted, rtol=1e-3)


@pytest.mark.parametrize(
    ("state", "error", "message"),
    [
        (Fp8State.init(), TypeError, r"state is Fp8State.*: pass a mgpu_ops.Fp8GatedState"),
        (Fp8GatedState.init()._replace(up=None), TypeError, "state.up is None: pass a mgpu_ops.Fp8State"),
        (
            Fp8GatedState.init()._replace(down=Fp8State(*Fp8State.init(4)[::-1])),
            ValueError,
            r"state.down.input_scale is float32\[4\]: it must be float32\[\]",
        ),
    ],
)
def test_what_is_no_state_is_refused(state: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        fp8_gated_mlp(*operands(), state=state)


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
