"""flash_attention with keys and values of 8 bits on a Hopper GPU, with shapes and configs drawn at random."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import flash_attention, rotary_into_cache, spec_of
from mgpu_ops.core import gpu
from tests.mgpu_ops.attention import cases
from tests.mgpu_ops.attention.quantized import draw

pytestmark = pytest.mark.gpu

FORWARD = spec_of("flash_attention")
KV_DTYPES = ["float8_e4m3fn", "int8"]


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_every_number_of_eight_bits_is_exact(kv_dtype, head_dim):
    """With one key the output is its value: of 256 heads of keys each number is in each column."""
    codes = np.arange(256, dtype=np.uint8)[:, None] + np.arange(head_dim, dtype=np.uint8)
    v = jax.lax.bitcast_convert_type(jnp.asarray(codes)[None, None], jnp.dtype(kv_dtype))
    q = jnp.zeros((1, 1, 256, head_dim), jnp.float16)
    found = flash_attention(q, jnp.zeros_like(v), v, backend="mosaic")
    np.testing.assert_array_equal(np.asarray(found), np.asarray(v.astype(jnp.float16)))


def drawn(seed: int) -> tuple[dict[str, Any], dict[str, Any], Any]:
    """What `draw` takes, options, and a legal config."""
    rng = random.Random(seed)
    kv_heads, group, tokens = rng.choice([1, 2, 8]), rng.choice([1, 4, 8]), rng.choice([1, 65, 200, 1000, 4100])
    changes = {
        "batch": rng.choice([1, 3, 17]),
        "q_tokens": rng.choice([1, 1, 2, 9]),
        "kv_tokens": tokens,
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": rng.choice([64, 128, 128, 256]),
        "dtype": rng.choice(["bfloat16", "float16"]),
        "kv_dtype": rng.choice(KV_DTYPES),
    }
    options: dict[str, Any] = {"causal": rng.random() < 0.4}
    if rng.random() < 0.5:
        options["kv_lengths"] = [rng.randint(0, tokens) for _ in range(changes["batch"])]
    if rng.random() < 0.3:
        options["window"] = (rng.choice([0, 50, 700]), None)
    if rng.random() < 0.3:
        options["soft_cap"] = 20.0
    if rng.random() < 0.3:
        options["sinks"] = np.random.default_rng(seed).normal(size=changes["q_heads"]).astype(np.float32)
    fields = {name: changes[name] for name in ("batch", "q_tokens", "kv_tokens", "q_heads", "kv_heads", "head_dim", "kv_dtype")}
    problem, device = FORWARD.Problem(**fields), gpu.current()
    space = FORWARD.space(problem, device)
    configs = (FORWARD.Config(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return changes, options, next(c for c in configs if FORWARD.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(24))
def test_random_problems_are_right_and_have_the_same_bits_each_time(seed, assert_near):
    changes, options, config = drawn(seed)
    cache = draw(seed, **changes)
    run = jax.jit(functools.partial(flash_attention, return_lse=True, config=config, backend="mosaic", **options))
    out, lse = run(cache.q, cache.k, cache.v, **cache.scales)
    wanted = cases.truth(cache.q, *cache.wide(), **options)
    assert_near(out, wanted["out"], 0.1 if changes["dtype"] == "bfloat16" else 0.015)
    np.testing.assert_allclose(np.asarray(lse, np.float64), wanted["lse"], rtol=1e-3, atol=1e-3)
    np.testing.assert_array_equal(np.asarray(run(cache.q, cache.k, cache.v, **cache.scales)[0]), np.asarray(out))


@pytest.mark.parametrize("kv_dtype", KV_DTYPES)
def test_rows_are_written_to_a_cache_as_xla_writes_them(kv_dtype):
    keys = jax.random.split(jax.random.key(0), 4)
    qkv = 3 * jax.random.normal(keys[0], (16, 48 * 128), jnp.bfloat16)
    angles = jax.random.normal(keys[1], (16, 64))
    caches = [(20 * jax.random.normal(key, (16, 96, 8, 128))).astype(kv_dtype) for key in keys[2:]]
    scales = {"k_scale": np.linspace(0.01, 0.1, 8, dtype=np.float32), "v_scale": np.float32(0.05)}
    write = functools.partial(rotary_into_cache, qkv, jnp.cos(angles), jnp.sin(angles), *caches, np.arange(16), **scales)
    for found, wanted in zip(write(backend="mosaic"), write(backend="xla"), strict=True):
        x, y = (np.asarray(z).astype(np.float64) for z in (found, wanted))
        assert (x != y).mean() < 1e-3  # a rotation may be rounded the other way
        np.testing.assert_allclose(x, y, rtol=0.13, atol=1)
