"""Models whose products the ops are tuned for, as data: dimensions of the published configs, one place for all ops.

Sources: each model's config.json as its authors published it (Llama 3, Mixtral, DeepSeek-V3, Qwen3, gpt-oss, Gemma 2, Mistral,
GPT-2).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Mapping


@dataclasses.dataclass(frozen=True)
class Projection:
    """x[tokens, k] times a matrix [k, n], `count` times in one pass through the model."""

    n: int
    k: int
    count: int


@dataclasses.dataclass(frozen=True)
class Experts:
    """A grouped product of experts on one GPU: a token brings `rows` rows, and `groups` matrices [k, n] share them."""

    rows: int
    n: int
    k: int
    groups: int
    count: int


@dataclasses.dataclass(frozen=True)
class Attention:
    """Causal attention in `count` layers.

    window: how many keys a row sees at most, its own included, or None for all. sinks: each query head has one.
    """

    q_heads: int
    kv_heads: int
    head_dim: int
    count: int
    window: int | None = None
    soft_cap: bool = False
    sinks: bool = False


@dataclasses.dataclass(frozen=True)
class Model:
    """The 16-bit products of one forward pass. Routers, which are small and in float32, are left out."""

    projections: Mapping[str, Projection]
    attention: Mapping[str, Attention]
    experts: Mapping[str, Experts] = dataclasses.field(default_factory=dict)


def _projections(layers: int, width: int, heads: Attention, vocabulary: int) -> dict[str, Projection]:
    """q, k and v in one product, the output's, and the logits'."""
    return {
        "qkv": Projection((heads.q_heads + 2 * heads.kv_heads) * heads.head_dim, width, layers),
        "out": Projection(width, heads.q_heads * heads.head_dim, layers),
        "logits": Projection(vocabulary, width, 1),
    }


def _gated(layers: int, width: int, hidden: int, prefix: str = "") -> dict[str, Projection]:
    """A gated feed-forward network: gate and up in one product."""
    return {
        f"{prefix}gate_up": Projection(2 * hidden, width, layers),
        f"{prefix}down": Projection(width, hidden, layers),
    }


def _experts(layers: int, width: int, hidden: int, top_k: int, groups: int) -> dict[str, Experts]:
    return {
        "gate_up": Experts(top_k, 2 * hidden, width, groups, layers),
        "down": Experts(top_k, width, hidden, groups, layers),
    }


def _dense(
    layers: int, width: int, heads: tuple[int, int, int], hidden: int, vocabulary: int, *, window: int | None = None
) -> Model:
    attention = Attention(*heads, layers, window)
    projections = _projections(layers, width, attention, vocabulary)
    return Model(projections | _gated(layers, width, hidden), {"attention": attention})


def _mixture(
    layers: int, width: int, heads: tuple[int, int, int], hidden: int, vocabulary: int, *, experts: int, top_k: int
) -> Model:
    attention = Attention(*heads, layers)
    projections = _projections(layers, width, attention, vocabulary)
    return Model(projections, {"attention": attention}, _experts(layers, width, hidden, top_k, experts))


def _gemma2_9b() -> Model:
    """Every other layer sees a window; scores are capped."""
    window, everything = Attention(16, 8, 256, 21, window=4096, soft_cap=True), Attention(16, 8, 256, 21, soft_cap=True)
    projections = _projections(42, 3584, everything, 256000) | _gated(42, 3584, 14336)
    return Model(projections, {"window": window, "attention": everything})


def _gpt2() -> Model:
    attention = Attention(12, 12, 64, 12)
    projections = _projections(12, 768, attention, 50257)
    return Model(projections | {"up": Projection(3072, 768, 12), "down": Projection(768, 3072, 12)}, {"attention": attention})


def _gpt_oss(layers: int, experts: int) -> Model:
    """Every other layer sees a window, and all heads have sinks."""
    window = Attention(64, 8, 64, layers // 2, window=128, sinks=True)
    everything = dataclasses.replace(window, window=None)
    projections = _projections(layers, 2880, everything, 201088)
    return Model(projections, {"window": window, "attention": everything}, _experts(layers, 2880, 2880, 4, experts))


def _deepseek_v3() -> Model:
    """Latent attention as in training and prefill: heads of 192 for queries and keys (128 without and 64 with positions), of
    128 for values. The first 3 of 61 layers are dense. One GPU of eight has 32 of the 256 experts, and gets all their tokens.
    """
    width, heads, q_rank, kv_rank = 7168, 128, 1536, 512
    projections = {
        "q_a": Projection(q_rank, width, 61),
        "q_b": Projection(heads * 192, q_rank, 61),
        "kv_a": Projection(kv_rank + 64, width, 61),
        "kv_b": Projection(heads * (128 + 128), kv_rank, 61),
        "out": Projection(width, heads * 128, 61),
        "logits": Projection(129280, width, 1),
    }
    projections |= _gated(3, width, 18432) | _gated(58, width, 2048, "shared_")
    return Model(projections, {"attention": Attention(heads, heads, 192, 61)}, _experts(58, width, 2048, 8, 32))


MODELS: dict[str, Model] = {  # dense: layers, width, (heads of queries, of keys, their size), hidden, vocabulary
    "llama3-8b": _dense(32, 4096, (32, 8, 128), 14336, 128256),
    "llama3-70b": _dense(80, 8192, (64, 8, 128), 28672, 128256),
    "mistral-7b": _dense(32, 4096, (32, 8, 128), 14336, 32000, window=4096),
    "gemma2-9b": _gemma2_9b(),
    "gpt2": _gpt2(),
    "mixtral-8x7b": _mixture(32, 4096, (32, 8, 128), 14336, 32000, experts=8, top_k=2),
    "qwen3-30b-a3b": _mixture(48, 2048, (32, 4, 128), 768, 151936, experts=128, top_k=8),
    "qwen3-235b-a22b": _mixture(94, 4096, (64, 4, 128), 1536, 151936, experts=128, top_k=8),
    "deepseek-v3": _deepseek_v3(),
    "gpt-oss-20b": _gpt_oss(24, 32),
    "gpt-oss-120b": _gpt_oss(36, 128),
}
