"""Queries, and keys and values of 8 bits with their scales, drawn for the tests of a quantized KV cache."""

from __future__ import annotations

import dataclasses

import jax.numpy as jnp
import numpy as np


@dataclasses.dataclass(frozen=True)
class Cache:
    q: jnp.ndarray
    k: jnp.ndarray  # 8 bits
    v: jnp.ndarray
    scales: dict[str, np.ndarray]  # k_scale and v_scale, [batch, kv_heads]

    def wide(self) -> tuple[np.ndarray, np.ndarray]:
        """Keys and values times their scales, in float64. [batch, tokens, kv_heads, head_dim]"""
        k, v = (np.asarray(x).astype(np.float64) for x in (self.k, self.v))
        return k * self.scales["k_scale"][:, None, :, None], v * self.scales["v_scale"][:, None, :, None]


def draw(
    seed: int,
    batch: int = 2,
    q_tokens: int = 1,
    kv_tokens: int = 200,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    kv_dtype: str = "int8",
) -> Cache:
    """Random normal numbers. Scales differ by head and entry."""
    rng = np.random.default_rng(seed)
    q = jnp.asarray(rng.normal(size=(batch, q_tokens, q_heads, head_dim)), dtype)
    scales = {name: np.float32(2.0 ** rng.uniform(-6, -4, (batch, kv_heads))) for name in ("k_scale", "v_scale")}
    eight_bits = []
    for scale in scales.values():
        x = rng.normal(size=(batch, kv_tokens, kv_heads, head_dim)) / scale[:, None, :, None]
        x = np.clip(np.rint(x), -127, 127) if kv_dtype == "int8" else np.clip(x, -448, 448)
        eight_bits.append(jnp.asarray(x, jnp.float32).astype(kv_dtype))
    return Cache(q, *eight_bits, scales)
