"""A language model of Llama's shape in plain JAX: its training on a text that it makes, its decoding, and the time of both.

    python examples/llama.py                            # trains a small model on any machine, and lets it write
    python examples/llama.py --backend fp8 --steps 100
    python examples/llama.py --bench --csv results/2026-01-31-h200-llama.csv   # times steps of Llama-3 8B's layers, on a GPU
    python examples/llama.py --bench --model qwen3-4b                                        # of another model's
    python examples/llama.py --bench --model qwen3-30b-a3b --qk-norm                         # with a mixture of experts
    python examples/llama.py --bench --width 2048 --heads 16 --kv-heads 4 --hidden 5632      # of any sizes
    python examples/llama.py --bench --shard fsdp --batches ''                               # a step that GPUs share

The backends of training share all but a few functions (`BACKENDS`): "xla" is jnp and cuDNN's attention; "mgpu_ops" is this
library in 16 bits; "fp8" the same with the layers' products in 8 bits, forward and backward; "fp8_delayed" that with scales
from earlier steps. Weights are multiplied in bfloat16, and the optimizer's are float32. Those of decoding (`SERVING`) are
"xla", "mgpu_ops" in 16 bits, "int8", whose layers have weights of 8 bits, "kv8" with a cache of 8 bits, and "int8_kv8" with
both. In decoding, ours apply rotary embeddings and update the cache in one kernel.

A layer: x += attention(rope(norm(x) w_qkv)) w_out; x += (silu(norm(x) w_gate) * (norm(x) w_up)) w_down. A model with experts
has these three matrices for each expert, and a router that chooses `top_k` of them for each token.
Source: Touvron et al., arXiv:2302.13971; grouped heads and sizes of Llama 3, arXiv:2407.21783; experts as in Mixtral,
arXiv:2401.04088.
"""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import functools
import math
import re
import sys
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops
from mgpu_ops.core import gpu as gpus

if TYPE_CHECKING:
    from mgpu_ops.tuning.bench.program import Bench

Params = dict[str, Any]  # a layer's matrix may be a pair, with what its backend knows of it
Cache = list[tuple[jax.Array, jax.Array]]  # of each layer keys and values, [batch, tokens, kv_heads, head_dim]


@dataclasses.dataclass(frozen=True)
class Model:
    width: int = 128
    layers: int = 2
    heads: int = 4
    kv_heads: int = 2
    head_dim: int = 64
    hidden: int = 384  # of a gated layer, or of each expert
    experts: int = 0  # of a layer; 0: it has one gated layer for all tokens
    top_k: int = 0  # experts of each token
    vocabulary: int = 128  # ASCII
    rope_base: float = 500_000.0
    qk_norm: bool = False  # an RMS norm of each head of q and of k, as in Qwen3


# Four layers of Llama-3 8B's 32, and an eighth of its vocabulary: so the head's share of a step is that of the whole model.
# The others likewise, with the nearest multiple of 128 words; of their sizes alone.
LLAMA3_8B = Model(4096, 4, 32, 8, 128, 14336, vocabulary=16384)
MODELS = {
    "llama3-8b": LLAMA3_8B,
    "llama3-70b": Model(8192, 2, 64, 8, 128, 28672, vocabulary=3200),
    "llama3.2-1b": Model(2048, 4, 32, 8, 64, 8192, vocabulary=32128),
    "llama3.2-3b": Model(3072, 4, 24, 8, 128, 8192, vocabulary=18304),
    "mistral-nemo-12b": Model(5120, 4, 32, 8, 128, 14336, vocabulary=16384),
    "phi3-mini": Model(3072, 4, 32, 32, 96, 8192, vocabulary=4096),
    "phi-4": Model(5120, 4, 40, 10, 128, 17920, vocabulary=12544),
    "qwen2.5-7b": Model(3584, 4, 28, 4, 128, 18944, vocabulary=19008),
    "qwen3-4b": Model(2560, 4, 32, 8, 128, 9728, vocabulary=16896),
    "gemma2-2b": Model(2304, 4, 8, 4, 256, 9216, vocabulary=39424),
    "mixtral-8x7b": Model(4096, 2, 32, 8, 128, 14336, 8, 2, vocabulary=2048),
    "qwen3-30b-a3b": Model(2048, 4, 32, 4, 128, 768, 128, 8, vocabulary=12672),
    "olmoe-1b-7b": Model(2048, 4, 16, 16, 128, 1024, 64, 8, vocabulary=12544),
    "granite3-3b-a800m": Model(1536, 4, 24, 8, 64, 512, 40, 8, vocabulary=6144),
    "phi3.5-moe": Model(4096, 2, 32, 8, 128, 6400, 16, 2, vocabulary=2048),
    "small": Model(),
}
SIZES = {  # of a layer, and what they are
    "width": "of rows between layers",
    "heads": "of queries",
    "kv_heads": "of keys and values",
    "head_dim": "width of a head",
    "hidden": "width of a gated layer, or of an expert",
    "experts": "of a layer",
    "top_k": "experts of each token",
}


def init(model: Model, key: jax.Array, dtype: Any = jnp.float32) -> Params:
    """Random weights whose outputs have about the size of their inputs. q, k and v are one matrix; experts come first."""
    m = model
    experts = (m.experts,) if m.experts else ()
    q, kv = m.heads * m.head_dim, m.kv_heads * m.head_dim
    shapes: dict[str, tuple[int, ...]] = {
        "qkv": (m.width, q + 2 * kv),
        "out": (q, m.width),
        "gate": (*experts, m.width, m.hidden),
        "up": (*experts, m.width, m.hidden),
        "down": (*experts, m.hidden, m.width),
    }
    if experts:
        shapes["router"] = (m.width, m.experts)

    def normal(key: jax.Array, shape: tuple[int, ...]) -> jax.Array:
        return (jax.random.normal(key, shape, dtype) / shape[-2] ** 0.5).astype(dtype)

    def layer(key: jax.Array) -> Params:
        keys = jax.random.split(key, len(shapes))
        widths = dict.fromkeys(("attention_norm", "ffn_norm"), m.width) | dict.fromkeys(
            ("q_norm", "k_norm") * m.qk_norm, m.head_dim
        )
        norms = {name: jnp.ones(width, dtype) for name, width in widths.items()}
        return norms | {name: normal(k, shape) for k, (name, shape) in zip(keys, shapes.items(), strict=True)}

    first, last, *keys = jax.random.split(key, m.layers + 2)
    embedding = jax.random.normal(first, (m.vocabulary, m.width), dtype)
    ends = {"embedding": embedding, "norm": jnp.ones(m.width, dtype), "head": normal(last, (m.width, m.vocabulary))}
    return ends | {"layers": [layer(k) for k in keys]}


# --- What a backend computes ------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Backend:
    """The functions in which backends differ.

    embedding: rows of a table [vocabulary, width], of tokens [n].
    product: x w, or with a third argument x w + residual. x [tokens, k], w [k, n].
    gated: silu(x w_gate) * (x w_up) in one, of which the backward pass computes both products again.
    mlp: (silu(x w_gate) * (x w_up)) w_down + residual, of which gate and up are kept for the backward pass.
    experts: of x, a layer with experts and top_k: the same of each token's top_k experts, added up with the router's weights.
    attention: causal, of what a layer's first product yields, q, k and v joined, once q and k are rotated, if the model has it
      after a norm: of the model, the layer, that, the batch and positions; [batch, tokens, heads, head_dim].
    loss: of logits [tokens, vocabulary] and labels, each token's cross-entropy.
    norm: RMS norm of x [tokens, width] with a weight [width]; with return_x=True that and x, for what goes around it.
    amax_history: of delayed scaling, how many steps count. Each matrix of a layer then is a pair, with a state of its own,
      whose gradient is the next step's. 0: no states.
    """

    embedding: Callable[[jax.Array, jax.Array], jax.Array]
    product: Callable[..., jax.Array]
    gated: Callable[[jax.Array, Any, Any], jax.Array]
    mlp: Callable[[jax.Array, Any, Any, Any, jax.Array], jax.Array]
    experts: Callable[[jax.Array, Params, int], jax.Array]
    attention: Callable[[Model, Params, jax.Array, int, jax.Array], jax.Array]
    loss: Callable[[jax.Array, jax.Array], jax.Array]
    norm: Callable[..., Any]
    amax_history: int = 0


EPSILON = 1e-5  # of norms


def _xla_norm(x: jax.Array, weight: jax.Array, return_x: bool = False) -> Any:
    wide = x.astype(jnp.float32)
    scaled = wide * jax.lax.rsqrt(jnp.mean(wide * wide, -1, keepdims=True) + EPSILON)
    normal = (scaled * weight).astype(x.dtype)
    return (normal, x) if return_x else normal


def _xla_product(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return x @ w if residual is None else residual + x @ w


@jax.checkpoint
def _xla_gated(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    return jax.nn.silu(x @ w_gate) * (x @ w_up)


def mlp_of(
    product: Callable[..., jax.Array], x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, residual: jax.Array
) -> jax.Array:
    """A gated layer by three products."""
    return product(jax.nn.silu(product(x, w_gate)) * product(x, w_up), w_down, residual=residual)


def _xla_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    """Tokens gathered by a sort, three grouped products, a scatter-add. On a GPU the products are JAX's Pallas kernels, since
    XLA multiplies all rows by each expert's matrices there."""
    product: Callable[..., jax.Array] = jax.lax.ragged_dot
    if jax.default_backend() == "gpu":
        from mgpu_ops.tuning.bench.layers import ragged_dot_of_jax as product
    weights, experts = _xla_route(x, layer, top_k)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token, sizes = order // top_k, jnp.bincount(experts.reshape(-1), length=layer["router"].shape[1]).astype(jnp.int32)
    rows = x[token]
    hidden = jax.nn.silu(product(rows, layer["gate"], sizes)) * product(rows, layer["up"], sizes)
    scaled = product(hidden, layer["down"], sizes).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(scaled).astype(x.dtype)


def _xla_route(x: jax.Array, layer: Params, top_k: int) -> tuple[jax.Array, jax.Array]:
    """Weights and numbers of each token's experts, [tokens, top_k]."""
    logits = jnp.matmul(x, layer["router"], preferred_element_type=jnp.float32)
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), top_k)
    return weights / weights.sum(1, keepdims=True), experts


def _xla_attention(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array | None = None) -> jax.Array:
    """cuDNN's on a GPU. It is causal without lengths."""
    through: Literal["cudnn", "xla"] = "cudnn" if jax.default_backend() == "gpu" else "xla"
    return jax.nn.dot_product_attention(
        q, k, v, is_causal=lengths is None, key_value_seq_lengths=lengths, implementation=through
    )


def _product(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return mgpu_ops.matmul(x, w, residual=residual)


def _gated_mlp(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, residual: jax.Array) -> jax.Array:
    return mgpu_ops.gated_mlp(x, w_gate, w_up, w_down, residual=residual)


def _scores(x: jax.Array, layer: Params) -> jax.Array:
    """The router's logits [tokens, experts], in float32."""
    return mgpu_ops.matmul(x, layer["router"], out_dtype=jnp.float32)


def _experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    return mgpu_ops.moe(x, _scores(x, layer), layer["gate"], layer["up"], layer["down"], top_k)


def _fp8_product(x: jax.Array, w: jax.Array, residual: jax.Array | None = None) -> jax.Array:
    return mgpu_ops.fp8_matmul(x, w, residual=residual)


def _fp8_mlp(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, w_down: jax.Array, residual: jax.Array) -> jax.Array:
    return mgpu_ops.fp8_gated_mlp(x, w_gate, w_up, w_down, residual=residual)


def _fp8_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    return mgpu_ops.fp8_moe(x, _scores(x, layer), layer["gate"], layer["up"], layer["down"], top_k)


_WithState = tuple[jax.Array, mgpu_ops.Fp8State]  # a matrix


def delayed_product(x: jax.Array, w: _WithState, residual: jax.Array | None = None) -> jax.Array:
    return mgpu_ops.fp8_matmul(x, w[0], residual=residual, state=w[1])


@jax.checkpoint
def _delayed_gated(x: jax.Array, gate: _WithState, up: _WithState) -> jax.Array:
    return jax.nn.silu(delayed_product(x, gate)) * delayed_product(x, up)


def _delayed_mlp(x: jax.Array, gate: _WithState, up: _WithState, down: _WithState, residual: jax.Array) -> jax.Array:
    state = mgpu_ops.Fp8GatedState(gate[1], up[1], down[1])
    return mgpu_ops.fp8_gated_mlp(x, gate[0], up[0], down[0], residual=residual, state=state)


def _delayed_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    gate, up, down = (layer[name] for name in ("gate", "up", "down"))
    state = mgpu_ops.Fp8GatedState(gate[1], up[1], down[1])
    return mgpu_ops.fp8_moe(x, _scores(x, layer), gate[0], up[0], down[0], top_k, state=state)


def _rotary_attention(model: Model, layer: Params, qkv: jax.Array, batch: int, positions: jax.Array) -> jax.Array:
    cos, sin = turns(model, positions)
    qkv = qkv.reshape(batch, len(positions), -1)
    norms = _norms_of_heads(layer)
    return mgpu_ops.rotary_attention(qkv, cos, sin, heads=model.heads, kv_heads=model.kv_heads, causal=True, **norms)


def _norms_of_heads(layer: Params) -> dict[str, Any]:
    """What `rotary_attention` and `rotary_into_cache` take of a layer with norms of q and k."""
    return {"q_norm": layer["q_norm"], "k_norm": layer["k_norm"], "epsilon": EPSILON} if "q_norm" in layer else {}


OURS = Backend(
    mgpu_ops.embedding,
    _product,
    mgpu_ops.gated_matmul,
    _gated_mlp,
    _experts,
    _rotary_attention,
    mgpu_ops.cross_entropy,
    functools.partial(mgpu_ops.rms_norm, epsilon=EPSILON),
)
BACKENDS = {
    # The loss through XLA is written so that its gradient keeps the logits and their sums of exponentials alone.
    "xla": Backend(
        lambda table, tokens: table[tokens],
        _xla_product,
        _xla_gated,
        functools.partial(mlp_of, _xla_product),
        _xla_experts,
        lambda *given: _xla_attention(*heads(*given)),
        functools.partial(mgpu_ops.cross_entropy, backend="xla"),
        _xla_norm,
    ),
    "mgpu_ops": OURS,
    # XLA makes the largest number of what a norm yields in the norm's own pass.
    "fp8": dataclasses.replace(OURS, product=_fp8_product, mlp=_fp8_mlp, experts=_fp8_experts, norm=_xla_norm),
    "fp8_delayed": dataclasses.replace(
        OURS, product=delayed_product, gated=_delayed_gated, mlp=_delayed_mlp, experts=_delayed_experts, amax_history=16
    ),
}


# --- The model --------------------------------------------------------------------------------------------------------


def turns(model: Model, positions: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Cosine and sine of position * base^(-2 i / head_dim) for i from 0, [positions, head_dim / 2]."""
    angles = positions[:, None] * model.rope_base ** (-jnp.arange(0, model.head_dim, 2) / model.head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def rope(model: Model, x: jax.Array, positions: jax.Array) -> jax.Array:
    """Each pair of a head's numbers, one of either half, rotated by its angle.

    x: [batch, tokens, heads, head_dim]; positions: [tokens].
    """
    return rotated(x, *(turn[:, None] for turn in turns(model, positions)))


def rotated(x: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
    left, right = jnp.split(x.astype(jnp.float32), 2, -1)
    return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(x.dtype)


def heads(model: Model, layer: Params, qkv: jax.Array, batch: int, positions: jax.Array) -> list[jax.Array]:
    """q, k and v of a layer, [batch, tokens, heads, head_dim] each, of what its first product yields for [batch * tokens]."""
    m = model
    q, k, v = _split(layer, qkv.reshape(batch, -1, m.heads + 2 * m.kv_heads, m.head_dim), m.kv_heads)
    return [rope(m, q, positions), rope(m, k, positions), v]


def _split(layer: Params, qkv: jax.Array, kv_heads: int) -> list[jax.Array]:
    """q, k and v, the first two normalised if the layer has norms of them, of [batch, tokens, all heads, head_dim]."""
    q, k, v = jnp.split(qkv, (qkv.shape[2] - 2 * kv_heads, qkv.shape[2] - kv_heads), 2)
    return [_xla_norm(q, layer["q_norm"]), _xla_norm(k, layer["k_norm"]), v] if "q_norm" in layer else [q, k, v]


def ffn(model: Model, backend: Backend, layer: Params, x: jax.Array, recompute: bool) -> jax.Array:
    """x plus the gated layer, or the experts. Without `recompute`, gate and up are kept: faster, with more memory."""
    normal, x = backend.norm(x, layer["ffn_norm"], return_x=True)
    if model.experts:
        experts = jax.checkpoint(backend.experts, static_argnums=2) if recompute else backend.experts
        return x + experts(normal, layer, model.top_k)
    if recompute:
        return backend.product(backend.gated(normal, layer["gate"], layer["up"]), layer["down"], x)
    return backend.mlp(normal, layer["gate"], layer["up"], layer["down"], x)


def loss(model: Model, backend: Backend, params: Params, tokens: jax.Array, recompute: bool = False) -> jax.Array:
    """The mean cross-entropy of tokens [batch, n + 1], each from those before it."""
    batch, n = tokens.shape[0], tokens.shape[1] - 1
    positions = jnp.arange(n)
    x = backend.embedding(params["embedding"], tokens[:, :-1].reshape(-1))
    for layer in params["layers"]:
        normal, x = backend.norm(x, layer["attention_norm"], return_x=True)
        attended = backend.attention(model, layer, backend.product(normal, layer["qkv"]), batch, positions)
        x = backend.product(attended.reshape(x.shape[0], -1), layer["out"], x)
        x = ffn(model, backend, layer, x, recompute)
    logits = _head(backend, params, x)
    return jnp.mean(backend.loss(logits, tokens[:, 1:].reshape(-1)))


def _head(backend: Backend, params: Params, x: jax.Array) -> jax.Array:
    """The logits: in 16 bits with each backend, as recipes of 8 bits have it."""
    product = _xla_product if backend.product is _xla_product else _product
    return product(backend.norm(x, params["norm"]), params["head"])


def gradients(
    model: Model, backend: Backend, params: Params, tokens: jax.Array, recompute: bool = False
) -> tuple[jax.Array, Params]:
    """The loss and its gradient: what is timed as a step of training."""
    return jax.value_and_grad(functools.partial(loss, model, backend, recompute=recompute))(params, tokens)


def with_states(params: Params, states: Sequence[Params]) -> Params:
    """With a state for each matrix of each layer. Of no states: the weights as they are."""

    def paired(layer: Params, states: Params) -> Params:
        return layer | {name: (layer[name], state) for name, state in states.items()}

    layers = params["layers"]
    return params | {"layers": [paired(*both) for both in zip(layers, states or [{}] * len(layers), strict=True)]}


def states_of(params: Params) -> list[Params]:
    """The states of `with_states`, or the next ones of its gradient."""
    return [{name: w[1] for name, w in layer.items() if isinstance(w, tuple)} for layer in params["layers"]]


def without_states(params: Params) -> Params:
    """The weights alone, or their gradients."""
    return _of_layers(params, lambda layer: {name: w[0] if isinstance(w, tuple) else w for name, w in layer.items()})


def first_states(params: Params, backend: Backend) -> list[Params]:
    """One that has seen nothing for each matrix of each layer, if the backend has any."""
    if not backend.amax_history:
        return []
    of_layer = dict.fromkeys(("qkv", "out", "gate", "up", "down"), mgpu_ops.Fp8State.init(backend.amax_history))
    return [of_layer for _ in params["layers"]]


def empty_cache(model: Model, batch: int, tokens: int, dtype: Any = jnp.bfloat16) -> Cache:
    shape = (batch, tokens, model.kv_heads, model.head_dim)
    return [(jnp.zeros(shape, dtype), jnp.zeros(shape, dtype)) for _ in range(model.layers)]


# --- Decoding ---------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Serving:
    """The functions in which backends of decoding differ.

    prepared: trained weights, in bfloat16, as the other functions take them: a layer's by name, and the head.
    product: x w + residual, with a layer's weight.
    cached: of x and a layer, cos and sin [head_dim / 2], the cache's keys and values, and the position: rotated queries of
      norm(x) w_qkv, and the cache with rotated keys and with values.
    gated: silu(norm(x) w_gate) * (norm(x) w_up), of x and a layer.
    experts: of x, a layer with experts and top_k: what the layer adds to x.
    head: norm(x) w_head, of x and the model.
    look_up: attention of one token to the first `lengths` [batch] of a cache's keys.
    kv_dtype: of the cache.
    """

    prepared: Callable[[Params], Params]
    product: Callable[[jax.Array, Any, jax.Array], jax.Array]
    cached: Callable[..., tuple[jax.Array, jax.Array, jax.Array]]
    gated: Callable[[jax.Array, Params], jax.Array]
    experts: Callable[[jax.Array, Params, int], jax.Array]
    head: Callable[[jax.Array, Params], jax.Array]
    look_up: Callable[[jax.Array, jax.Array, jax.Array, jax.Array], jax.Array]
    kv_dtype: Any = jnp.bfloat16


def _of_layers(params: Params, change: Callable[[Params], Params]) -> Params:
    return params | {"layers": [change(layer) for layer in params["layers"]]}


def joined(params: Params) -> Params:
    """With gate and up as one matrix, which suits products of few tokens. The gradients of many would be joined by a copy.

    Experts' stay apart.
    """

    def join(layer: Params) -> Params:
        if "router" in layer:
            return layer
        others = {name: w for name, w in layer.items() if name not in ("gate", "up")}
        return others | {"gate_up": jnp.concatenate([layer["gate"], layer["up"]], 1)}

    return _of_layers(params, join)


def folded(params: Params) -> Params:
    """With the weights of the layers' norms as factors of rows of what they go into, and gate and up as one matrix.

    Products then are of rows as they are, and what reads a product divides by the root mean square of its rows. Experts get
    rows with a norm.
    """

    def fold(of: Params, norm: str, *names: str) -> Params:
        rows = of[norm].astype(jnp.float32)[:, None]
        return of | {name: (of[name] * rows).astype(of[name].dtype) for name in names}

    def both(layer: Params) -> Params:
        layer = fold(layer, "attention_norm", "qkv")
        return layer if "router" in layer else fold(layer, "ffn_norm", "gate", "up")

    return joined(_of_layers(params, both))


def in_int8(params: Params) -> Params:
    """With the layers' weights as int8 [n, k], and a scale for each column, whose largest is 127. Head and router stay."""

    def quantized(w: jax.Array) -> tuple[jax.Array, jax.Array]:
        wide = w.astype(jnp.float32).mT
        scales = jnp.maximum(jnp.max(jnp.abs(wide), -1), 1e-30) / 127
        return jnp.round(wide / scales[..., None]).astype(jnp.int8), scales

    def change(layer: Params) -> Params:
        if "router" in layer:
            apart = {name: w for name, w in layer.items() if name not in ("gate", "up")}
            layer = apart | {"gate_up": jnp.concatenate([layer["gate"], layer["up"]], 2)}
        return {name: w if name.endswith("norm") or name == "router" else quantized(w) for name, w in layer.items()}

    return _of_layers(folded(params), change)


def _silu_of_both(gate_up: jax.Array) -> jax.Array:
    gate, up = jnp.split(gate_up, 2, -1)
    return jax.nn.silu(gate) * up


def _xla_cached(
    x: jax.Array, layer: Params, cos: jax.Array, sin: jax.Array, k: jax.Array, v: jax.Array, position: jax.Array
) -> tuple[jax.Array, jax.Array, jax.Array]:
    batch, _, kv_heads, head_dim = k.shape
    rows = (_xla_norm(x, layer["attention_norm"]) @ layer["qkv"]).reshape(batch, 1, -1, head_dim)
    q, new_k, new_v = _split(layer, rows, kv_heads)
    write = functools.partial(jax.lax.dynamic_update_slice_in_dim, start_index=position, axis=1)
    return rotated(q, cos, sin), write(k, rotated(new_k, cos, sin)), write(v, new_v)


def _xla_gated_joined(x: jax.Array, layer: Params) -> jax.Array:
    return _silu_of_both(_xla_norm(x, layer["ffn_norm"]) @ layer["gate_up"])


def _xla_served_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    """A single token's matrices are gathered, which is faster than a grouped product with groups of a row and none."""
    normal = _xla_norm(x, layer["ffn_norm"])
    if x.shape[0] > 1:
        return _xla_experts(normal, layer, top_k)
    weights, experts = _xla_route(normal, layer, top_k)
    gate, up, down = (layer[name][experts[0]] for name in ("gate", "up", "down"))
    hidden = jax.nn.silu(jnp.einsum("td,kdh->kh", normal, gate)) * jnp.einsum("td,kdh->kh", normal, up)
    return jnp.einsum("kh,khd,tk->td", hidden, down, weights, preferred_element_type=jnp.float32).astype(x.dtype)


def _xla_head(x: jax.Array, params: Params) -> jax.Array:
    return _xla_norm(x, params["norm"]) @ params["head"]


def _cached(x: jax.Array, layer: Params, *others: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    norms = _norms_of_heads(layer)
    return mgpu_ops.rotary_into_cache(_served_product(x, layer["qkv"]), *others, rms_rows=x, rms_epsilon=EPSILON, **norms)


def _gated_joined(x: jax.Array, layer: Params) -> jax.Array:
    return mgpu_ops.gated_matmul(x, layer["gate_up"], None, rms_epsilon=EPSILON)


def _served_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    normal = mgpu_ops.rms_norm(x, layer["ffn_norm"], epsilon=EPSILON)
    return _experts(normal, layer, top_k)


def _int8_experts(x: jax.Array, layer: Params, top_k: int) -> jax.Array:
    normal = mgpu_ops.rms_norm(x, layer["ffn_norm"], epsilon=EPSILON)
    (gate_up, gate_up_scales), (down, down_scales) = layer["gate_up"], layer["down"]
    return mgpu_ops.quantized_moe(normal, _scores(normal, layer), gate_up, down, gate_up_scales, down_scales, top_k)


def _int8_gated(x: jax.Array, layer: Params) -> jax.Array:
    return mgpu_ops.gated_activation(_served_product(x, layer["gate_up"]), rms_rows=x, rms_epsilon=EPSILON)


def _served_product(x: jax.Array, w: Any, residual: jax.Array | None = None) -> jax.Array:
    if not isinstance(w, tuple):
        return _product(x, w, residual)
    return mgpu_ops.quantized_matmul(x, *w, residual=residual, transpose_w=True)


def _normed_head(x: jax.Array, params: Params) -> jax.Array:
    return mgpu_ops.matmul(mgpu_ops.rms_norm(x, params["norm"], epsilon=EPSILON), params["head"])


def _look_up(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
    return mgpu_ops.flash_attention(q, k, v, kv_lengths=lengths)


SERVING = {
    "xla": Serving(joined, _xla_product, _xla_cached, _xla_gated_joined, _xla_served_experts, _xla_head, _xla_attention),
    "mgpu_ops": Serving(folded, _served_product, _cached, _gated_joined, _served_experts, _normed_head, _look_up),
    "int8": Serving(in_int8, _served_product, _cached, _int8_gated, _int8_experts, _normed_head, _look_up),
}
SERVING |= {  # keys and values have a scale of 1: float8_e4m3fn goes from 2^-9 to 448
    "kv8": dataclasses.replace(SERVING["mgpu_ops"], kv_dtype=jnp.float8_e4m3fn),
    "int8_kv8": dataclasses.replace(SERVING["int8"], kv_dtype=jnp.float8_e4m3fn),
}


def decode(
    model: Model, backend: Serving, params: Params, cache: Cache, tokens: jax.Array, position: jax.Array
) -> tuple[jax.Array, Cache]:
    """The logits after one more token for each sequence, tokens [batch], and the cache with its keys and values.

    params: as the backend has `prepared` them.
    """
    batch = tokens.shape[0]
    lengths = jnp.full(batch, position + 1, jnp.int32)
    cos, sin = (turn[0] for turn in turns(model, position[None]))
    x, grown = params["embedding"][tokens], []
    for layer, known in zip(params["layers"], cache, strict=True):
        q, k, v = backend.cached(x, layer, cos, sin, *known, position)
        grown.append((k, v))
        x = backend.product(backend.look_up(q, k, v, lengths).reshape(batch, -1), layer["out"], x)
        if model.experts:
            x += backend.experts(x, layer, model.top_k)
        else:
            x = backend.product(backend.gated(x, layer), layer["down"], x)
    return backend.head(x, params), grown


# --- Training on sums -------------------------------------------------------------------------------------------------


def text(lines: int, seed: int = 0) -> str:
    """Sums, one a line, such as "7+5=12"."""
    numbers = np.random.default_rng(seed).integers(0, 10, (lines, 2))
    return "".join(f"{a}+{b}={a + b}\n" for a, b in numbers)


def adam(params: Params, grads: Params, state: Any, step: jax.Array, rate: float | jax.Array) -> tuple[Params, Any]:
    """One step of Adam in float32; `state` holds the means of the gradients and of their squares."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], grads)
    square = jax.tree.map(lambda v, g: 0.99 * v + 0.01 * g.astype(jnp.float32) ** 2, state[1], grads)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.99**step)) + 1e-8)

    return jax.tree.map(updated, params, mean, square), (mean, square)


def train(model: Model, name: str, steps: int, batch: int = 16, tokens: int = 64, seed: int = 0) -> tuple[Params, list[float]]:
    """The weights, float32, and the loss of each step, on another part of the text every time."""
    return trained_by(BACKENDS[name], model, steps, batch, tokens, seed)


def trained_by(
    backend: Backend,
    model: Model,
    steps: int,
    batch: int = 16,
    tokens: int = 64,
    seed: int = 0,
    rate: Callable[[jax.Array], float | jax.Array] = lambda step: 3e-3,
) -> tuple[Params, list[float]]:
    """`train` by any backend, with a learning rate for each step."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(
        params: Params, state: Any, scaling: Any, data: jax.Array, step: jax.Array
    ) -> tuple[Params, Any, Any, jax.Array]:
        value, grads = gradients(model, backend, with_states(_in_bfloat16(params), scaling), data)
        return *adam(params, without_states(grads), state, step, rate(step)), states_of(grads), value

    data = np.frombuffer(text(steps * batch * (tokens + 1) // 5).encode(), np.uint8).astype(np.int32)
    params = jax.jit(functools.partial(init, model))(jax.random.key(seed))
    state = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    scaling, losses = first_states(params, backend), []
    for step, part in enumerate(data[: steps * batch * (tokens + 1)].reshape(steps, batch, tokens + 1), 1):
        params, state, scaling, value = update(params, state, scaling, jnp.asarray(part), jnp.int32(step))
        losses.append(float(value))
    return params, losses


def _in_bfloat16(params: Params) -> Params:
    return jax.tree.map(lambda x: x.astype(jnp.bfloat16), params)


def write(model: Model, name: str, params: Params, prompt: str, count: int) -> str:
    """The prompt and the likeliest `count` characters after it, one token at a time."""
    backend = SERVING.get(name, SERVING["mgpu_ops"])  # to quantize weights at each step would take longer than to multiply them
    step = jax.jit(functools.partial(decode, model, backend), donate_argnums=(1,))
    weights = jax.jit(lambda params: backend.prepared(_in_bfloat16(params)))(params)
    written = list(prompt.encode())
    cache = empty_cache(model, 1, len(written) + count, backend.kv_dtype)
    for position in range(len(written) + count - 1):
        logits, cache = step(weights, cache, jnp.asarray(written[position : position + 1]), jnp.int32(position))
        if position + 1 == len(written):
            written.append(int(jnp.argmax(logits[0])))
    return bytes(written).decode(errors="replace")


# --- Times on a GPU ---------------------------------------------------------------------------------------------------


# Which results are rows of an op, and as whose: those of 8 bits are ours too, beside the same steps of XLA in 16 bits.
OPS = {
    "step": {
        f"llama-{kind}step": {"xla": "xla", name: "mgpu_ops"}
        for kind, name in (("", "mgpu_ops"), ("fp8-", "fp8"), ("fp8-delayed-", "fp8_delayed"))
    },
    "decode": {
        f"llama-{kind}decode": {"xla": "xla", name: "mgpu_ops"}
        for kind, name in (("", "mgpu_ops"), ("int8-", "int8"), ("kv8-", "kv8"), ("int8-kv8-", "int8_kv8"))
    },
}


_SETTLING = 3  # steps until scales are those of gradients that were not rounded with a scale of 1

# How devices share a step: what each has.
SHARDS = {"data": "a sequence and all parameters", "fsdp": "a sequence and a part of each parameter"}


def bench_step(
    bench: Bench,
    model: Model,
    backends: Sequence[str],
    tokens: int,
    recompute: bool,
    shard: str | None = None,
    mesh: Mesh | None = None,
) -> None:
    """A step on one sequence of so many random tokens: the loss and its gradient, both compared with the first backend's.

    On a mesh each device has a sequence, and all parameters or, with shard "fsdp", its part of each. The optimizer is left
    out: it is the same for all backends.
    """
    weights, devices = _weights(model), 1 if mesh is None else mesh.size
    data = jax.random.randint(jax.random.key(1), (devices, tokens + 1), 0, model.vocabulary)
    states = {name: first_states(weights, BACKENDS[name]) for name in backends}
    results: dict[str, Any] = dict.fromkeys(backends)  # how they are sharded: the loss, and each gradient as its parameter
    if mesh is not None:
        every, each = NamedSharding(mesh, P()), NamedSharding(mesh, P("data"))
        of_weights = jax.tree.map(lambda _: each if shard == "fsdp" else every, weights)
        of_states = {name: jax.tree.map(lambda _: every, own) for name, own in states.items()}
        results = {name: (every, with_states(of_weights, own)) for name, own in of_states.items()}
        weights, states, data = jax.device_put((weights, states, data), (of_weights, of_states, each))
    params = {name: with_states(weights, own) for name, own in states.items()}
    steps = {
        name: jax.jit(functools.partial(gradients, model, BACKENDS[name], recompute=recompute), out_shardings=results[name])
        for name in backends
    }
    programs = bench.compiled(steps, {name: (params[name], data) for name in backends})
    errors = {}
    wanted = programs[backends[0]].step(params[backends[0]], data)
    for name in backends:
        for _ in range(_SETTLING if states[name] else 0):
            params[name] = with_states(weights, states_of(programs[name].step(params[name], data)[1]))
        value, grads = programs[name].step(params[name], data)
        errors[name] = abs(float(value) / float(wanted[0]) - 1)
        apart = float(_apart(without_states(grads), without_states(wanted[1])))
        print(f"{name}: loss {float(value):.6f}, gradients {apart:.4f} of their size apart", flush=True)
        del grads
    del wanted
    calls = {name: functools.partial(_loss_of, programs[name].step, params[name], data) for name in backends}
    flops = 6 * _multiplied(model) * tokens + 7 * model.layers * model.heads * model.head_dim * tokens**2
    label = f"{_label(model)}-{tokens}{'-recompute' * recompute}" + (f"-{shard}-{devices}-gpus" if shard else "")
    queued = 2 if mesh is None else 8  # those of several devices take longer to launch; a training loop does not wait for them
    work = flops, 4 * _read(model, tokens)
    bench.measure(OPS["step"], label, work, programs, calls, errors, queued=queued, layers=model.layers)


def bench_decode(bench: Bench, model: Model, backends: Sequence[str], batch: int, cached: int) -> None:
    """A step of decoding for `batch` sequences of `cached` tokens each, the new one among them; logits are compared."""
    weights, tokens = _weights(model), jax.random.randint(jax.random.key(1), (batch,), 0, model.vocabulary)
    params = {name: jax.jit(SERVING[name].prepared)(weights) for name in backends}
    empty = empty_cache(model, batch, cached)
    full = jax.tree.map(lambda x: jax.random.normal(jax.random.key(2), x.shape, x.dtype), empty)
    caches = {name: jax.tree.map(lambda x, to=SERVING[name].kv_dtype: x.astype(to), full) for name in backends}
    position = jnp.int32(cached - 1)
    steps = {name: jax.jit(functools.partial(decode, model, SERVING[name]), donate_argnums=(1,)) for name in backends}
    programs = bench.compiled(steps, {name: (params[name], caches[name], tokens, position) for name in backends})
    calls = {
        name: _Decoding(programs[name].step, params[name], jax.tree.map(jnp.copy, caches[name]), tokens, position)
        for name in backends
    }
    del full, caches
    logits = {name: {"logits": call().astype(jnp.float32)} for name, call in calls.items()}
    errors = {name: float(_apart(of, logits[backends[0]])) for name, of in logits.items()}
    print(", ".join(f"{name}: logits {error:.4f} of their size apart" for name, error in errors.items()), flush=True)
    kept = model.layers * batch * cached * model.head_dim
    flops, moved = 2 * _multiplied(model) * batch + 4 * kept * model.heads, 2 * _read(model, batch) + 4 * kept * model.kv_heads
    bench.measure(OPS["decode"], f"{_label(model)}-{batch}x{cached}", (flops, moved), programs, calls, errors, queued=50)


def _weights(model: Model) -> Params:
    weights: Params = jax.jit(functools.partial(init, model, dtype=jnp.bfloat16))(jax.random.key(0))
    return weights


def _multiplied(model: Model) -> int:
    """Weights that a token is multiplied with."""
    return int(_weights_of(model, model.top_k))


def _read(model: Model, tokens: int) -> float:
    """Weights that so many tokens are multiplied with: on average, of experts that are chosen at random."""
    return _weights_of(model, model.experts and model.experts * (1 - (1 - model.top_k / model.experts) ** tokens))


def _weights_of(model: Model, experts: float) -> float:
    """Weights of the products, with so many experts of each layer."""
    m = model
    gated = 3 * m.width * m.hidden
    ffn = m.width * m.experts + experts * gated if m.experts else gated
    return m.layers * (2 * m.width * m.head_dim * (m.heads + m.kv_heads) + ffn) + m.width * m.vocabulary


def _label(model: Model) -> str:
    """Of the model, its layers and its vocabulary; one of other sizes is width x heads x kv_heads x head_dim x hidden, and of
    experts x experts x top_k."""
    sizes = [getattr(model, name) for name in SIZES]
    named = (name for name, known in MODELS.items() if sizes == [getattr(known, size) for size in SIZES])
    name = next(named, "x".join(str(size) for size in sizes if size)) + "-qk-norm" * model.qk_norm
    return f"{name}-{model.layers}-layers-{model.vocabulary}"


def _loss_of(step: Callable[..., Any], *arguments: Any) -> jax.Array:
    """The loss alone: gradients are dropped while the step runs, so that those of several steps never lie in memory."""
    value: jax.Array = step(*arguments)[0]
    return value


@jax.jit
def _apart(x: Params, y: Params) -> jax.Array:
    """||x - y|| / ||y|| of all arrays together."""

    def square(x: jax.Array) -> jax.Array:
        return jnp.sum(x.astype(jnp.float32) ** 2)

    pairs = zip(jax.tree.leaves(x), jax.tree.leaves(y), strict=True)
    difference = sum(square(a.astype(jnp.float32) - b.astype(jnp.float32)) for a, b in pairs)
    return jnp.sqrt(difference / sum(map(square, jax.tree.leaves(y))))


class _Decoding:
    """Steps of decoding, each of which is given the cache that the one before returned."""

    def __init__(self, step: Callable[..., Any], weights: Params, cache: Cache, tokens: jax.Array, position: jax.Array):
        self._step, self._weights, self._cache, self._rest = step, weights, cache, (tokens, position)

    def __call__(self) -> jax.Array:
        logits, self._cache = self._step(self._weights, self._cache, *self._rest)
        return logits


def step() -> tuple[jax.Array, Params]:
    """A step of 8192 tokens of Llama-3 8B's layers: `mgpu-tune capture examples.llama:step` lists what to tune for it."""
    params = jax.jit(functools.partial(init, LLAMA3_8B, dtype=jnp.bfloat16))(jax.random.key(0))
    return jax.jit(functools.partial(gradients, LLAMA3_8B, OURS))(params, jnp.zeros((1, 8193), jnp.int32))


def decoding() -> list[jax.Array]:
    """Steps of decoding with 1, 16 and 64 sequences of 4096 tokens: `mgpu-tune capture examples.llama:decoding`."""
    backend = SERVING["mgpu_ops"]
    params = jax.jit(lambda: backend.prepared(init(LLAMA3_8B, jax.random.key(0), jnp.bfloat16)))()
    one = jax.jit(functools.partial(decode, LLAMA3_8B, backend))
    caches = {batch: empty_cache(LLAMA3_8B, batch, 4096) for batch in (1, 16, 64)}
    return [one(params, cache, jnp.zeros(n, jnp.int32), jnp.int32(4095))[0] for n, cache in caches.items()]


def _positive(text: str) -> int:
    with contextlib.suppress(ValueError):
        if 1 <= (number := int(text)) < 2**31:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no whole number from 1 to 2**31 - 1")


def _numbers(text: str) -> list[int]:
    return [_positive(number) for number in _words(text)]


def _words(text: str) -> list[str]:
    """Those of "a, b", each once."""
    return list(dict.fromkeys(word for part in text.split(",") if (word := part.strip())))


def _seconds(text: str) -> float:
    with contextlib.suppress(ValueError):
        if 0 <= (number := float(text)) < math.inf:
            return number
    raise argparse.ArgumentTypeError(f"{text!r} is no number of seconds, such as 5; 0: none")


def _joined(arguments: Sequence[str]) -> list[str]:
    """With "--tokens=-5,3" for "--tokens -5,3": by itself argparse takes a list that begins with a minus for an option."""
    found: list[str] = []
    for word in arguments:
        if re.match(r"\s*-\d", word) and found and re.fullmatch(r"--[a-z-]+", found[-1]):
            found[-1] += f"={word}"
        else:
            found.append(word)
    return found


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a small language model on sums, or time steps of a large one.")
    every = list(BACKENDS | SERVING)
    parser.add_argument("--backend", choices=every, default="mgpu_ops", help="int8, kv8 are of decoding (default: mgpu_ops)")
    parser.add_argument("--steps", type=_positive, default=60, help="of training")
    parser.add_argument("--bench", action="store_true", help="time steps of training and decoding, all backends in turn")
    parser.add_argument("--backends", type=_words, default=every, help="that are timed; the others are compared with the first")
    parser.add_argument("--model", choices=list(MODELS), default="llama3-8b", help="that is timed, with the sizes that follow")
    for name, what in (SIZES | {"layers": "of it", "vocabulary": "of it"}).items():
        parser.add_argument(f"--{name.replace('_', '-')}", type=_positive, help=f"{what} (default: the model's)")
    parser.add_argument("--qk-norm", action="store_true", help="with an RMS norm of each head of q and k, as in Qwen3")
    parser.add_argument("--tokens", type=_numbers, default=[8192, 32768], help="of a step, e.g. 8192,32768; empty: none")
    parser.add_argument("--batches", type=_numbers, default=[1, 16, 64], help="of decoding, e.g. 1,16,64; empty: none")
    parser.add_argument("--cache", type=_positive, default=4096, help="tokens of each sequence")
    parser.add_argument("--rounds", type=_positive, default=10, help="of all backends in turn")
    parser.add_argument("--sustained", type=_seconds, default=0.0, metavar="SECONDS", help="also let each run without pause")
    kinds = "; ".join(f"{name}: {what}" for name, what in SHARDS.items())
    parser.add_argument("--shard", choices=SHARDS, help=f"time a step of training that devices share, where each has ({kinds})")
    parser.add_argument("--devices", type=_positive, help="that share a step (default: all)")
    parser.add_argument("--recompute", action="store_true", help="compute gate and up, or experts, again in the backward pass")
    parser.add_argument("--profile", type=Path, metavar="FOLDER", help="write the kernels of a step, and a layer's picture")
    parser.add_argument("--csv", type=Path, metavar="FILE", help="write the times, on a GPU")
    arguments = _joined(sys.argv[1:] if arguments is None else arguments)
    args = parser.parse_args(arguments)
    without_defaults = parser.parse_args(arguments, argparse.Namespace(**dict.fromkeys(vars(args))))
    given, of_training = {name for name, value in vars(without_defaults).items() if value is not None}, {"backend", "steps"}
    wrong = sorted(given & of_training if args.bench else given - of_training)
    options = ", ".join(f"--{name.replace('_', '-')}" for name in wrong)
    if options and args.bench:
        parser.error(f"{options}: of training a small model: leave them out; --backends and --rounds say what is timed")
    if options:
        parser.error(f"{options}: of --bench alone: add it, or leave them out to train a small model")
    if args.bench:
        _bench(parser, args)
        return
    params, losses = train(Model(), args.backend if args.backend in BACKENDS else "mgpu_ops", args.steps)
    for number, value in enumerate(losses, 1):
        print(f"step {number:3}  loss {value:.4f}")
    print(write(Model(), args.backend, params, "3+4=", 12))


def _bench(parser: argparse.ArgumentParser, args: argparse.Namespace) -> None:
    from mgpu_ops.tuning.bench.program import Bench  # the tuner's extra is needed for this alone

    if not args.tokens and not args.batches:
        parser.error("--tokens and --batches are both empty: there is nothing to time, name a number in one of them")
    backends, every = args.backends, BACKENDS | SERVING
    if not backends:
        parser.error(f"--backends is empty: name one or more of {', '.join(every)}")
    if unknown := [name for name in backends if name not in every]:
        parser.error(f"--backends {','.join(backends)}: {', '.join(unknown)} is none of {', '.join(every)}")
    for name in ("csv", "profile"):
        if getattr(args, name) is not None and gpus.current() is None:
            parser.error(f"--{name} {getattr(args, name)} is of a GPU, and none is in use: leave it out to see the times")
    names = [*SIZES, "layers", "vocabulary"]
    given = {name: getattr(args, name) for name in names if getattr(args, name) is not None}
    model = dataclasses.replace(MODELS[args.model], qk_norm=args.qk_norm, **given)
    if model.heads % model.kv_heads or model.head_dim % 2:
        parser.error(
            f"--heads {model.heads} --kv-heads {model.kv_heads} --head-dim {model.head_dim}: heads are a multiple of kv-heads, "
            "and head-dim is even"
        )
    if model.vocabulary < 2:
        parser.error(f"--vocabulary {model.vocabulary}: each loss is 0 of a single word, take 2 or more")
    if model.experts and not 1 <= model.top_k <= model.experts:
        told = f"--top-k is {model.top_k}" if model.top_k else "there is no --top-k"
        parser.error(f"of {model.experts} experts each token has --top-k, from 1 to {model.experts}, and {told}")
    if model.top_k and not model.experts:
        parser.error(f"--top-k {model.top_k} is of --experts, and the model has none")
    if model.experts and (model.width % 64 or model.hidden % 64) and gpus.current() is not None and "xla" in backends:
        parser.error(f"JAX's ragged_dot takes multiples of 64: --width {model.width} --hidden {model.hidden}, or leave xla out")
    mesh = _mesh(parser, model, args)
    bench = Bench(args.rounds, args.sustained, args.profile, args.csv)
    for tokens in args.tokens:
        trained = [name for name in backends if name in BACKENDS] or ["mgpu_ops"]
        with _fitting(parser, f"a step of --tokens {tokens}: take fewer, --recompute"):
            bench_step(bench, model, trained, tokens, args.recompute, args.shard, mesh)
    for batch in args.batches:
        served = [name for name in backends if name in SERVING] or ["mgpu_ops"]
        with _fitting(parser, f"decoding with --batches {batch} --cache {args.cache}: take less of either"):
            bench_decode(bench, model, served, batch, args.cache)


@contextlib.contextmanager
def _fitting(parser: argparse.ArgumentParser, what: str) -> Iterator[None]:
    """Where memory does not hold what is timed, that is told in place of a traceback."""
    try:
        yield
    except jax.errors.JaxRuntimeError as error:
        if "out of memory" not in str(error).lower():
            raise
        device = "the GPU's" if gpus.current() else "this machine's"
        parser.error(f"{device} memory does not hold {what}, fewer --layers, or a smaller model such as --model small")


def _mesh(parser: argparse.ArgumentParser, model: Model, args: argparse.Namespace) -> Mesh | None:
    """The devices that share a step; None where one runs it."""
    if args.shard is not None and model.experts:
        parser.error(f"--shard {args.shard}: XLA does not split JAX's ragged_dot over devices: take a model without experts")
    if args.shard is None:
        if args.devices is not None:
            parser.error(f"--devices {args.devices} share a step as --shard says: add --shard {' or '.join(SHARDS)}")
        return None
    if not args.tokens:
        parser.error(f"--shard {args.shard} is of steps of training, and --tokens is empty: name a number there")
    devices = args.devices or jax.local_device_count()
    if devices > jax.local_device_count():
        parser.error(f"--devices {devices} is more than the {jax.local_device_count()} that there are")
    sides = sorted({x.shape[0] for x in jax.tree.leaves(jax.eval_shape(functools.partial(init, model), jax.random.key(0)))})
    if args.shard == "fsdp" and any(side % devices for side in sides):
        parser.error(f"--shard fsdp: {devices} devices do not divide all first sides of the parameters, {sides}")
    if args.profile is not None:
        parser.error(f"--profile {args.profile} is of a step on one device: leave --shard {args.shard} out")
    return jax.make_mesh((devices,), ("data",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[:devices])


if __name__ == "__main__":
    main()
