"""Routing and sort of few tokens by one kernel: what XLA's kernels find, and the layers that take it."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import moe, moe_dispatch, moe_route, quantized_moe
from mgpu_ops.core import aot, gpu
from mgpu_ops.grouped import routing, routing_kernel
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
pytestmark = pytest.mark.usefixtures("no_races")


def by_xla(logits: jax.Array, top_k: int, normalised: bool) -> list[np.ndarray]:
    """The same as the fields of `routing.Sorted`."""
    weights, experts = moe_route(logits, top_k, norm_topk_prob=normalised)
    _, sizes, order, positions = moe_dispatch(jnp.zeros((logits.shape[0], 1)), experts, logits.shape[1])
    return [np.asarray(x) for x in (order // top_k, weights.reshape(-1)[order], sizes, positions)]


def by_kernel(logits: Any, top_k: int, normalised: bool = True) -> tuple[jax.Array, ...]:
    return routing_kernel.launch(logits, top_k, normalised, interpret=True)


@pytest.mark.parametrize(
    ("tokens", "experts", "top_k", "normalised"),
    [
        (1, 128, 8, True),
        (1, 128, 8, False),
        (3, 40, 4, True),
        (4, 5, 5, False),
        (2, 160, 20, False),
        (5, 33, 1, True),
        (16, 8, 2, True),
        (33, 256, 3, False),
        (64, 36, 8, True),
    ],
)
def test_tokens_are_routed_and_sorted_as_by_xla(tokens, experts, top_k, normalised):
    logits = normal(tokens + experts, tokens, experts)
    for found, wanted in zip(by_kernel(logits, top_k, normalised), by_xla(logits, top_k, normalised), strict=True):
        assert found.dtype == wanted.dtype
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("seed", range(4))
def test_equal_and_infinite_logits_and_nans_are_in_the_order_of_xla(seed):
    values = np.array([0.0, -0.0, 1.5, 1.5, -np.inf, np.inf, np.nan, -np.nan, -1.0], np.float32)
    logits = np.random.default_rng(seed).choice(values, (18, 40))
    for found, wanted in zip(by_kernel(logits, 7), by_xla(logits, 7, True), strict=True):
        np.testing.assert_allclose(found, wanted, rtol=2e-6)


@pytest.mark.parametrize("logit", [0.0, -np.inf, -np.nan])
def test_tokens_whose_logits_are_all_equal_have_the_first_experts_in_their_order(logit):
    tokens, weights, sizes, places = by_kernel(np.full((6, 70), logit, np.float32), 3)
    assert tokens.tolist() == 3 * list(range(6))
    assert sizes.tolist() == 3 * [6] + 67 * [0]
    assert places.T.tolist() == np.arange(18).reshape(3, 6).tolist()
    np.testing.assert_allclose(weights, 1 / 3 if logit == 0 else np.nan, rtol=2e-6)


def test_many_tokens_of_one_expert_are_counted_in_a_byte():
    tokens, _, sizes, places = by_kernel(np.tile(np.array([[0, 2, 1]], np.float32), (255, 1)), 1)
    assert tokens.tolist() == places.reshape(-1).tolist() == list(range(255))
    assert sizes.tolist() == [0, 255, 0]


def layer(tokens: int) -> list[jax.Array]:
    experts, d, hidden = 4, 64, 64
    shapes = (tokens, d), (tokens, experts), (experts, d, hidden), (experts, d, hidden), (experts, hidden, d)
    return [normal(i, *shape, dtype=F32 if i == 1 else BF16) for i, shape in enumerate(shapes)]


def traced(function: Any, *arrays: jax.Array) -> str:
    """A call as it is traced for an H200, with the names of the kernels that it launches."""
    with gpu.target("h200"):
        return str(jax.make_jaxpr(function)(*arrays))


def test_a_layer_of_few_tokens_is_that_of_xla_also_mapped_and_differentiated(assert_near):
    arrays = layer(6)
    run = functools.partial(moe, top_k=2)
    assert_near(jax.jit(functools.partial(run, backend="interpret"))(*arrays), run(*arrays, backend="xla"), 8e-3)
    both = [jnp.stack([x, 2 * x]) for x in arrays[:2]]
    through = lambda backend: jax.vmap(lambda x, logits: run(x, logits, *arrays[2:], backend=backend))(*both)  # noqa: E731
    assert_near(through("interpret"), through("xla"), 8e-3)
    loss = lambda *xs, backend: run(*xs, backend=backend).astype(F32).sum()  # noqa: E731
    gradients = [jax.grad(functools.partial(loss, backend=backend), (0, 1, 4)) for backend in ("interpret", "xla")]
    for found, wanted in zip(*(gradient(*arrays) for gradient in gradients), strict=True):
        assert_near(found, wanted, 2e-2)


def test_a_layer_of_8_bits_is_that_of_xla_and_has_the_gradients_that_it_has_there(assert_near):
    x, logits, *_ = layer(5)
    w_gate_up, w_down = (
        jnp.round(40 * normal(seed, *shape)).astype(jnp.int8) for seed, shape in ((5, (4, 128, 64)), (6, (4, 64, 64)))
    )
    scales = jnp.full((4, 128), 0.01), jnp.full((4, 64), 0.01)

    def run(x: jax.Array, logits: jax.Array, *scales: jax.Array, backend: Any) -> jax.Array:
        return quantized_moe(x, logits, w_gate_up, w_down, *scales, top_k=2, backend=backend).astype(F32)

    by_kernel, by_xla = (functools.partial(run, backend=backend) for backend in ("interpret", "xla"))
    assert_near(by_kernel(x, logits, *scales), by_xla(x, logits, *scales), 8e-3)
    found, wanted = (jax.grad(lambda *of, f=f: jnp.sum(f(*of, *scales) ** 2), (0, 1))(x, logits) for f in (by_kernel, by_xla))
    for one, other in zip(found, wanted, strict=True):
        assert_near(one, other, 2e-2)
    with pytest.raises(ValueError, match="no gradient of scales"):
        jax.grad(lambda *scales: jnp.sum(by_kernel(x, logits, *scales)))(*scales)


@pytest.mark.parametrize("tokens", [1, 64])
def test_layers_of_few_tokens_route_by_the_kernel_and_mapped_ones_do_not(tokens):
    x, logits, *matrices = layer(tokens)
    run = functools.partial(moe, top_k=2)
    assert "mgpu_ops_moe_route" in traced(run, x, logits, *matrices)
    mapped = jax.vmap(lambda x, logits: run(x, logits, *matrices))
    assert "mgpu_ops_moe_route" not in traced(mapped, x[None], logits[None])
    assert "mgpu_ops_moe_route" not in traced(jax.grad(lambda x: run(x, logits, *matrices).astype(F32).sum()), x)


@pytest.mark.parametrize("tokens", [0, 65])
def test_layers_of_no_and_of_many_tokens_route_by_xla(tokens):
    assert "mgpu_ops_moe_route" not in traced(functools.partial(moe, top_k=2), *layer(tokens))


def test_other_floats_more_experts_or_choices_and_machines_without_such_a_gpu_have_no_such_kernel():
    few = jnp.zeros((64, 8), F32)
    assert routing.kernel(few, 2, True, "interpret") is not None
    with gpu.target("h200"):
        assert routing.kernel(few, 2, True, None) is not None
        assert routing.kernel(few, 2, True, "xla") is None
    for logits, top_k in ((few.astype(BF16), 2), (jnp.zeros((1, 513), F32), 8), (jnp.zeros((1, 64), F32), 33)):
        assert routing.kernel(logits, top_k, True, "interpret") is None
    with gpu.target("b200"):
        assert routing.kernel(few, 2, True, None) is None


@pytest.mark.parametrize("devices", [1, 2])
def test_a_process_with_several_gpus_leaves_routing_to_xla_which_may_split_the_program(devices, monkeypatch):
    monkeypatch.setattr(gpu, "current", lambda: gpu.find("h200"))
    monkeypatch.setattr(jax, "device_count", lambda: devices)
    assert (routing.kernel(jnp.zeros((1, 8), F32), 2, True, None) is None) == (devices > 1)


@pytest.mark.parametrize(("tokens", "experts", "top_k"), [(256, 8, 2), (0, 8, 2), (4, 8, 9), (4, 64, 33)])
def test_more_tokens_or_choices_than_are_counted_are_refused(tokens, experts, top_k):
    with pytest.raises(ValueError, match=f"{tokens} tokens, {experts} experts and top_k={top_k}"):
        routing_kernel.launch(jnp.zeros((tokens, experts)), top_k, True)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    ("tokens", "experts", "top_k"), [(1, 128, 8), (1, 512, 32), (5, 40, 3), (33, 33, 1), (64, 128, 8), (64, 512, 32)]
)
@pytest.mark.parametrize("normalised", [True, False])
def test_the_kernel_compiles_without_spills(tokens, experts, top_k, normalised):
    route = functools.partial(routing_kernel.launch, top_k=top_k, normalised=normalised)
    assert aot.build("h200", route, jax.ShapeDtypeStruct((tokens, experts), F32)).spills == 0
