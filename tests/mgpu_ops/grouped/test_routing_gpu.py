"""The kernel that routes and sorts few tokens on a Hopper GPU: what XLA finds, the same bits each time, and whole layers."""

from __future__ import annotations

import functools
import random

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import moe
from mgpu_ops.grouped import routing_kernel
from tests.arrays import normal
from tests.mgpu_ops.grouped.test_routing import by_xla

pytestmark = pytest.mark.gpu

TIES = np.array([0.0, -0.0, 1.5, 1.5, -np.inf, np.inf, np.nan, -np.nan, -1.0], np.float32)


@pytest.mark.parametrize("seed", range(12))
def test_random_tokens_are_routed_and_sorted_as_by_xla_with_the_same_bits_each_time(seed):
    draw = random.Random(seed)
    tokens, experts = draw.choice([1, 2, 5, 16, 33, 64]), draw.choice([8, 33, 64, 128, 200, 512])
    top_k, normalised = draw.randint(1, min(experts, 32)), draw.random() < 0.5
    logits = np.array(normal(seed, tokens, experts))
    if seed % 3 == 2:
        logits = np.random.default_rng(seed).choice(TIES, logits.shape)
    launch = jax.jit(functools.partial(routing_kernel.launch, top_k=top_k, normalised=normalised))
    found = launch(logits)
    for of_kernel, wanted in zip(found, by_xla(logits, top_k, normalised), strict=True):
        np.testing.assert_allclose(of_kernel, wanted, rtol=1e-5)
    for again in (launch(logits) for _ in range(8)):
        for one, other in zip(again, found, strict=True):
            np.testing.assert_array_equal(one, other)


@pytest.mark.parametrize("tokens", [1, 3, 17, 64])
def test_a_layer_whose_tokens_a_kernel_routes_is_that_of_xla(tokens, assert_near):
    experts, d, hidden = 16, 256, 512
    x, logits = normal(0, tokens, d, dtype=jnp.bfloat16), normal(1, tokens, experts)
    shapes = ((experts, d, hidden), (experts, d, hidden), (experts, hidden, d))
    matrices = [normal(2 + i, *shape, dtype=jnp.bfloat16) * 0.05 for i, shape in enumerate(shapes)]
    assert jax.device_count() > 1 or "mgpu_ops_moe_route" in str(
        jax.make_jaxpr(functools.partial(moe, top_k=4))(x, logits, *matrices)
    )
    by_kernels, plain = (jax.jit(functools.partial(moe, top_k=4, backend=backend)) for backend in (None, "xla"))
    assert_near(by_kernels(x, logits, *matrices), plain(x, logits, *matrices), 0.08)
