"""What the tests of flash_attention share: random arguments, and attention and its gradients in NumPy's float64.

The truth is written from the documentation of the public function, one boolean for each pair of row and key, and shares no code
with the op.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops import FlashAttentionBackwardConfig, FlashAttentionConfig, FlashAttentionProblem
from mgpu_ops.attention.inputs import Inputs
from tests.arrays import normal
from tests.mgpu_ops.grouped.ragged import float64

BASE = FlashAttentionConfig(
    compute_warpgroups=1,
    tile_kv=64,
    max_concurrent_steps=2,
    q_slots=1,
    section_waves=1,
    memory_registers=40,
    pv_wait="early",
)
FUSED_64 = FlashAttentionBackwardConfig(
    mode="fused",
    tile_q=128,
    tile_kv=128,
    max_concurrent_steps=2,
    section_waves=1,
    memory_registers=40,
)
FUSED_128 = dataclasses.replace(FUSED_64, tile_q=64)
AHEAD_128 = dataclasses.replace(FUSED_128, max_concurrent_steps=3, dq_step="next")
AHEAD_64 = dataclasses.replace(AHEAD_128, tile_q=128)
SPLIT_64, SPLIT_128 = (dataclasses.replace(config, mode="split") for config in (FUSED_64, FUSED_128))
SPLIT_256 = dataclasses.replace(SPLIT_128, tile_kv=64)


def one_step(config: FlashAttentionBackwardConfig) -> FlashAttentionBackwardConfig:
    """A tile of bias leaves no shared memory for a second step."""
    return dataclasses.replace(config, max_concurrent_steps=1)


@dataclasses.dataclass(frozen=True)
class Shape:
    """Of q, k and v."""

    batch: int = 2
    q_tokens: int = 7
    kv_tokens: int = 9
    q_heads: int = 2
    kv_heads: int = 2
    head_dim: int = 8
    v_dim: int | None = None

    @property
    def scores(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_heads, self.q_tokens, self.kv_tokens

    @property
    def out(self) -> tuple[int, int, int, int]:
        return self.batch, self.q_tokens, self.q_heads, self.v_dim or self.head_dim


def qkv(shape: Shape, dtype: Any = "float32", seed: int = 0) -> tuple[jax.Array, jax.Array, jax.Array]:
    s = shape
    return (
        normal(seed, s.batch, s.q_tokens, s.q_heads, s.head_dim, dtype=dtype),
        normal(seed + 1, s.batch, s.kv_tokens, s.kv_heads, s.head_dim, dtype=dtype),
        normal(seed + 2, s.batch, s.kv_tokens, s.kv_heads, s.v_dim or s.head_dim, dtype=dtype),
    )


def arguments(problem: FlashAttentionProblem) -> tuple[Any, ...]:
    """q, k, v and `Inputs.arrays()`: random, lengths from half on, four packed segments."""
    p, tokens = problem, (problem.q_tokens, problem.kv_tokens)
    scale, cap = 1 / math.sqrt(p.head_dim), 3.0 if p.soft_cap else 0.0
    rng = np.random.default_rng(0)
    inputs = Inputs(
        options=jnp.asarray([scale, cap, scale / cap if cap else 0.0], jnp.float32),
        lengths=tuple(jnp.asarray(rng.integers(n // 2, n + 1, p.batch), jnp.int32) for n in tokens) if p.lengths else None,
        segments=tuple(jnp.asarray([np.arange(n) * 4 // n] * p.batch, jnp.int32) for n in tokens) if p.segments else None,
        bias=normal(3, 1, p.q_heads, *tokens, dtype=p.bias) if p.bias != "none" else None,
        sinks=normal(4, 1, p.q_heads) + 1 if p.sinks else None,
    )
    return *qkv(Shape(p.batch, *tokens, p.q_heads, p.kv_heads, p.head_dim, p.v_head_dim or None), p.dtype), *inputs.arrays()


def visible(
    scores: tuple[int, int, int, int],
    *,
    mask: Any = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_lengths: Any = None,
    kv_lengths: Any = None,
    q_segment_ids: Any = None,
    kv_segment_ids: Any = None,
    align: str = "bottom_right",
) -> np.ndarray:
    """Whether each row sees each key: booleans of shape `scores`, [batch, heads, rows, keys].

    align "top_left": rows are aligned by their number and not by the last.
    """
    batch, _, rows, keys = scores
    seen = np.ones(scores, bool)
    row, key = np.arange(rows)[:, None], np.arange(keys)[None, :]
    left, right = window or (None, None)
    for b in range(batch):
        row_end = rows if q_lengths is None else min(max(int(np.ravel(q_lengths)[b]), 0), rows)
        key_end = keys if kv_lengths is None else min(max(int(np.ravel(kv_lengths)[b]), 0), keys)
        seen[b, :, row_end:] = False
        seen[b, :, :, key_end:] = False
        aligned = row + (key_end - row_end if align == "bottom_right" else 0)
        if causal:
            seen[b] &= key <= aligned
        if left is not None:
            seen[b] &= key >= aligned - left
        if right is not None:
            seen[b] &= key <= aligned + right
        if q_segment_ids is not None:
            ids = np.reshape(q_segment_ids, (batch, rows))
            others = ids if kv_segment_ids is None else np.reshape(kv_segment_ids, (batch, keys))
            seen[b] &= ids[b][:, None] == others[b][None, :]
    return seen if mask is None else seen & np.asarray(mask)


def truth(
    q: Any,
    k: Any,
    v: Any,
    *,
    bias: Any = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    soft_cap_after_bias: bool = False,
    sinks: Any = None,
    out_grad: Any = None,
    lse_grad: Any = None,
    **masks: Any,
) -> dict[str, np.ndarray]:
    """ "out" and "lse" for the arguments of `flash_attention`.

    With `out_grad` (or `lse_grad`) also "q", "k", "v" and, with a bias, "bias": the gradients that those of the output (and of
    the lse) bring, and with sinks [q_heads] "sinks".
    """
    if np.ndim(q) == 3:
        batched = [None if x is None else np.asarray(x)[None] for x in (q, k, v, out_grad, lse_grad)]
        found = truth(
            *batched[:3],
            bias=bias,
            scale=scale,
            soft_cap=soft_cap,
            soft_cap_after_bias=soft_cap_after_bias,
            sinks=sinks,
            out_grad=batched[3],
            lse_grad=batched[4],
            **masks,
        )
        return {name: x if name in ("bias", "sinks") else x[0] for name, x in found.items()}
    q, k, v = float64(q), float64(k), float64(v)
    group = q.shape[2] // k.shape[2]
    every_k, every_v = (np.repeat(x, group, 2) for x in (k, v))
    scale = 1 / math.sqrt(q.shape[-1]) if scale is None else scale
    capped = raw = np.einsum("btnd,bsnd->bnts", q, every_k, optimize=True) * scale
    after = soft_cap_after_bias and bias is not None
    if after:
        raw = raw + float64(bias)
    if soft_cap is not None:
        capped = soft_cap * np.tanh(raw / soft_cap)
    seen = visible(raw.shape, **masks)
    s = np.where(seen, capped if bias is None or after else capped + float64(bias), -np.inf)
    s = np.where(np.isneginf(raw), -np.inf, s)  # by the bias
    sink = np.full((1, 1, 1), -np.inf) if sinks is None else float64(sinks)[:, None, None]
    largest = np.maximum(s.max(-1, keepdims=True), sink)
    finite = np.where(np.isfinite(largest), largest, 0)
    e = np.exp(s - finite)
    total = e.sum(-1, keepdims=True) + np.exp(sink - finite)
    with np.errstate(divide="ignore"):
        lse = (largest + np.log(total))[..., 0]
    w = e / np.where(total > 0, total, 1)
    found = {"out": np.einsum("bnts,bsnd->btnd", w, every_v, optimize=True), "lse": lse}
    if out_grad is None and lse_grad is None:
        return found

    def by_kv_head(x: np.ndarray) -> np.ndarray:
        return x.reshape(*k.shape[:3], group, x.shape[-1]).sum(3)

    do = np.zeros(found["out"].shape) if out_grad is None else float64(out_grad)
    dlse = np.zeros(lse.shape) if lse_grad is None else float64(lse_grad)
    dw = np.einsum("btnd,bsnd->bnts", do, every_v, optimize=True)
    ds = w * (dw - (w * dw).sum(-1, keepdims=True) + dlse[..., None])
    if sinks is not None:
        of_sink = np.exp(np.where(np.isneginf(sink), -np.inf, sink - np.where(np.isneginf(lse), 0, lse)[..., None]))[..., 0]
        found["sinks"] = (of_sink * (dlse - (w * dw).sum(-1))).sum((0, 2))
    found["v"] = by_kv_head(np.einsum("bnts,btnd->bsnd", w, do, optimize=True))
    slope = 1 if soft_cap is None else 1 - (capped / soft_cap) ** 2
    if bias is not None:
        found["bias"] = sum_to(ds * slope if after else ds, np.shape(bias))
    ds = ds * scale * slope
    found["q"] = np.einsum("bnts,bsnd->btnd", ds, every_k, optimize=True)
    found["k"] = by_kv_head(np.einsum("bnts,btnd->bsnd", ds, q, optimize=True))
    return found


def sum_to(x: np.ndarray, shape: tuple[int, ...]) -> np.ndarray:
    """The gradient of an array of `shape` that was broadcast to that of x."""
    full = (1,) * (x.ndim - len(shape)) + tuple(shape)
    return x.sum(tuple(i for i, n in enumerate(full) if n == 1), keepdims=True).reshape(shape)
