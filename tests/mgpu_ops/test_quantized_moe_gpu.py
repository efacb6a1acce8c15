"""quantized_moe on a Hopper GPU: random layers, whose kernels give what XLA gives."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import moe_route, quantized_moe, quantized_moe_experts
from mgpu_ops.core.activations import ACTIVATIONS
from tests.mgpu_ops.test_quantized_moe import matrices, share, tokens

pytestmark = pytest.mark.gpu

# Of the result and of gradients: each layer rounds to its dtype where the other does, and XLA rounds scaled weights as well.
LIMITS = {"bfloat16": (0.08, 0.2), "float16": (0.01, 0.025)}


@pytest.mark.parametrize("seed", range(12))
def test_random_layers_of_kernels_are_those_of_xla(seed, assert_near):
    """Also with gradients, for a share of the experts, and with experts and tokens that none has chosen."""
    rng = random.Random(seed)
    experts, count, dtype = rng.choice([2, 4, 9, 32]), rng.choice([1, 7, 64, 300]), rng.choice([jnp.bfloat16, jnp.float16])
    d, hidden, group = 128 * rng.randint(1, 8), 128 * rng.randint(1, 8), rng.choice([0, 32, 64, 128])
    x, logits = tokens(count, d, experts, dtype)
    given = matrices(rng.choice(["int8", "int4"]), group, rng.random() < 0.5, d=d, hidden=hidden, experts=experts)
    options: dict[str, Any] = {"activation": rng.choice(ACTIVATIONS)}
    top_k = rng.randint(1, min(experts, 8))
    logits = logits.at[:, : (experts - top_k) // 2].add(-30)  # experts without rows

    def whole(x: jax.Array, logits: jax.Array, given: Any, backend: Any) -> Any:
        out = quantized_moe(x, logits, **given, top_k=top_k, norm_topk_prob=False, backend=backend, **options)
        return (out.astype(jnp.float32) ** 2).sum(), out

    def part(x: jax.Array, logits: jax.Array, given: Any, offset: Any, backend: Any) -> jax.Array:
        routed, of = moe_route(logits, top_k), {"num_experts": experts, "group_offset": offset, "backend": backend}
        return quantized_moe_experts(x, *routed, **given, **of, **options)

    run = jax.jit(jax.grad(whole, (0, 1), has_aux=True), static_argnames="backend")
    (ours, out), (wanted, by_xla) = (run(x, logits, given, backend=backend) for backend in ("mosaic", "xla"))
    limit, of_gradients = LIMITS[x.dtype.name]
    assert_near(out, by_xla, limit)
    for gradient, of_xla in zip(ours, wanted, strict=True):
        assert_near(gradient, of_xla, of_gradients)
    first = rng.randrange(experts)
    held = share(given, first, rng.randint(1, experts - first))
    run_part = jax.jit(functools.partial(part, offset=first), static_argnames="backend")
    mine, of_xla = (np.asarray(run_part(x, logits, held, backend=backend), np.float32) for backend in ("mosaic", "xla"))
    if of_xla.any():
        assert_near(mine, of_xla, limit)
    else:
        assert not mine.any()
