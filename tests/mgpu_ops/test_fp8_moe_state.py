"""Delayed scaling in `mgpu_ops.fp8_moe`: the gradient of a state is the next one, what it has seen, and what it does."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import Fp8GatedState, QuantizeProblem, fp8_moe, fp8_moe_experts, moe_route
from tests.mgpu_ops.test_fp8_moe import ALIKE, NAMES, share
from tests.mgpu_ops.test_moe import layer

F32 = jnp.float32
TOKENS, D, HIDDEN, EXPERTS, TOP_K = 40, 32, 48, 4, 2
ARRAYS = layer(TOKENS, D, HIDDEN, EXPERTS, F32)
WEIGHTS = np.random.default_rng(9).standard_normal((TOKENS, D)).astype(np.float32)


@jax.jit
def step(state: Fp8GatedState | None, *arrays: jax.Array) -> tuple[list[jax.Array], Fp8GatedState | None]:
    """The result and the gradients of all arrays, and the next state."""

    def value(state: Fp8GatedState | None, *arrays: jax.Array) -> Any:
        out = fp8_moe(*arrays, TOP_K, state=state)
        return jnp.sum(out.astype(F32) * WEIGHTS), out

    (new, *grads), out = jax.grad(value, range(6), has_aux=True)(state, *arrays)
    return [out, *grads], new


def seen(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> list[float]:
    """The largest values of inputs, kernels and gradients of the results of the three products, in float32."""
    weights, experts = moe_route(logits, TOP_K)
    of_token = [w[experts] for w in matrices]  # [tokens, top_k, ...]
    multiplied = functools.partial(jnp.einsum, precision="highest")
    gate, up = (multiplied("td,tjdh->tjh", x, w) for w in of_token[:2])

    def hidden(gate: jax.Array, up: jax.Array) -> jax.Array:
        found: jax.Array = jax.nn.silu(gate) * up * weights[..., None]
        return found

    of_hidden = multiplied("td,tjhd->tjh", WEIGHTS, of_token[2])
    values, back = jax.vjp(hidden, gate, up)
    inputs, gradients = (x, x, values), (*back(of_hidden), WEIGHTS)
    return [float(jnp.max(jnp.abs(one))) for three in zip(inputs, matrices, gradients, strict=True) for one in three]


def histories(state: Fp8GatedState) -> list[Any]:
    return [history for of in state for history in of[1::2]]


def scales(state: Fp8GatedState) -> list[Any]:
    return [scale for of in state for scale in of[::2]]


LARGEST = 448.0, 448.0, 57344.0  # of e4m3 and e5m2: of a product's input, kernel and gradient of the result


def test_the_gradient_of_a_state_is_the_next_which_has_seen_the_largest_values() -> None:
    _, second = step(Fp8GatedState.init(2), *ARRAYS)
    wanted = seen(*ARRAYS)
    for i, (history, scale, value) in enumerate(zip(histories(second), scales(second), wanted, strict=True)):
        exactly = i % 3 == 1 or i in (0, 3, 8)  # of what is given; others are computed in 8 bits
        np.testing.assert_allclose(history, [value, 0], rtol=1e-6 if exactly else 0.15, err_msg=str(i))
        np.testing.assert_allclose(scale, history[0] / LARGEST[i % 3], rtol=1e-6)
    _, third = step(second, 2 * ARRAYS[0], *ARRAYS[1:])
    np.testing.assert_allclose(third.gate.input_amax_history, [2 * wanted[0], wanted[0]], rtol=1e-6)
    np.testing.assert_allclose(third.up.input_scale, 2 * wanted[0] / 448, rtol=1e-6)  # x is one array
    _, fourth = step(third, *ARRAYS)  # the largest of the history counts, until it is forgotten
    np.testing.assert_allclose(fourth.gate.input_scale, 2 * second.gate.input_scale, rtol=1e-6)
    _, fifth = step(fourth, *ARRAYS)
    np.testing.assert_allclose(fifth.gate.input_scale, second.gate.input_scale, rtol=1e-6)


def test_gate_and_up_have_histories_of_their_own_and_share_the_larger_scale() -> None:
    x, logits, gate, up, down = ARRAYS
    arrays = x, logits, gate, 16 * up, down
    state = Fp8GatedState.init(2)
    for _ in range(2):
        _, state = step(state, *arrays)
    wanted = seen(*arrays)
    for of, which in ((state.gate, wanted[:3]), (state.up, wanted[3:6])):
        np.testing.assert_allclose(of.kernel_amax_history[0], which[1], rtol=1e-6)
        np.testing.assert_allclose(of.output_grad_amax_history[0], which[2], rtol=0.15)
    larger = state.up.kernel_scale
    both = state._replace(gate=state.gate._replace(kernel_scale=larger))
    for one, other in zip(step(both, *arrays)[0], step(state, *arrays)[0], strict=True):
        assert share(one, other) < ALIKE


def test_with_a_state_that_has_seen_the_arrays_a_layer_is_that_of_current_scaling() -> None:
    state: Any = Fp8GatedState.init(2)
    for _ in range(3):  # gradients are rounded with scales of their own from the second on
        _, state = step(state, *ARRAYS)
    found, following = step(state, *ARRAYS)
    for name, one, other in zip(NAMES, found, step(None, *ARRAYS)[0], strict=True):
        assert share(one, other) < ALIKE, name
    for one, other in zip(jax.tree.leaves(following), jax.tree.leaves(state), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)


def test_what_is_larger_than_a_state_has_seen_saturates() -> None:
    _, state = step(Fp8GatedState.init(1), *ARRAYS)
    limit = 448.0 * float(state.gate.input_scale)
    run = jax.jit(lambda x, state: fp8_moe(x, *ARRAYS[1:], TOP_K, state=state))
    larger = 64 * ARRAYS[0]
    np.testing.assert_array_equal(run(larger, state), run(jnp.clip(larger, -limit, limit), state))


def test_a_token_of_no_expert_counts_for_no_history() -> None:
    x, logits, *matrices = ARRAYS
    weights, experts = moe_route(logits, TOP_K)
    experts = experts.at[3].set(-1)
    x = x.at[3].set(1e6)

    def value(state: Fp8GatedState) -> jax.Array:
        return jnp.sum(fp8_moe_experts(x, weights, experts, *matrices, state=state))

    new = jax.jit(jax.grad(value))(Fp8GatedState.init(1))
    rows = np.delete(np.asarray(x), 3, 0)
    np.testing.assert_allclose(new.gate.input_amax_history, [np.abs(rows).max()], rtol=1e-6)


def test_layers_of_a_scan_have_a_state_each() -> None:
    x, logits, gate, up, down = ARRAYS
    states = jax.tree.map(lambda leaf: jnp.stack([leaf] * 2), Fp8GatedState.init(2))
    of_layers = jnp.stack([gate, 2 * gate]), jnp.stack([up, up]), jnp.stack([down, down])

    def loss(states: Fp8GatedState) -> jax.Array:
        each = jax.checkpoint(lambda x, of: (x + fp8_moe(x, logits, *of[0], TOP_K, state=of[1]), None))
        return jnp.sum(jax.lax.scan(each, x, (of_layers, states))[0])

    new = jax.jit(jax.grad(loss))(states)
    largest = jnp.max(jnp.abs(gate))
    np.testing.assert_allclose(new.gate.kernel_amax_history[:, 0], [largest, 2 * largest], rtol=1e-6)
    assert all((history[:, 0] > 0).all() for history in histories(new))


def test_a_state_that_all_devices_share_is_that_of_the_mesh() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    of_rows, whole = PartitionSpec("data"), PartitionSpec()

    def next_of(state: Fp8GatedState, weights: jax.Array, *arrays: jax.Array) -> Fp8GatedState:
        found: Fp8GatedState = jax.grad(lambda state: jnp.sum(fp8_moe(*arrays, TOP_K, state=state) * weights))(state)
        return found

    specs = whole, of_rows, of_rows, of_rows, whole, whole, whole
    split = jax.jit(jax.shard_map(next_of, mesh=mesh, in_specs=specs, out_specs=whole))
    given = Fp8GatedState.init(2), WEIGHTS, *ARRAYS
    for found, wanted in zip(jax.tree.leaves(split(*given)), jax.tree.leaves(jax.jit(next_of)(*given)), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=1e-3)


def test_over_automatic_axes_of_a_mesh_a_state_has_seen_all_devices() -> None:
    mesh = jax.make_mesh((4,), ("data",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    of_rows, whole = (NamedSharding(mesh, PartitionSpec(*axes)) for axes in (["data"], []))
    state = Fp8GatedState.init(2)
    placed = [jax.device_put(x, of_rows if i < 2 else whole) for i, x in enumerate(ARRAYS)]
    (found, new), (wanted, expected) = step(jax.device_put(state, whole), *placed), step(state, *ARRAYS)
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert share(one, other) < ALIKE, name
    for one, other in zip(jax.tree.leaves(new), jax.tree.leaves(expected), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3)


def test_with_a_state_no_array_is_read_for_its_largest_value_alone() -> None:
    with mgpu_ops.target("h200"):
        uses = {use.problem: use.count for use in mgpu_ops.capture(step)(Fp8GatedState.init(2), *ARRAYS).problems}
    rows, also = 512, {"dtype": "float32", "amax": "also"}
    e5m2 = {"to": "float8_e5m2", **also}
    assert {problem: count for problem, count in uses.items() if isinstance(problem, QuantizeProblem)} == {
        QuantizeProblem(rows, D, gathered=TOKENS, **also): 1,
        QuantizeProblem(D, HIDDEN, batch=EXPERTS, **also): 2,
        QuantizeProblem(HIDDEN, D, batch=EXPERTS, **also): 1,
        QuantizeProblem(rows, HIDDEN, of="gate", row_scale=True, **also): 1,
        QuantizeProblem(rows, D, gathered=TOKENS, **e5m2): 1,
        QuantizeProblem(rows, HIDDEN, of="gate_gradient", row_scale=True, **e5m2): 1,
    }


@pytest.mark.parametrize("length", [1, 7])
def test_a_state_has_the_length_that_it_began_with(length: int) -> None:
    first = Fp8GatedState.init(length)
    shapes = [jax.tree.map(jnp.shape, state) for state in (first, jax.eval_shape(step, first, *ARRAYS)[1])]
    assert shapes[0] == shapes[1]
