"""The kernel that routes few tokens and sorts them by expert: a warp, whose threads share the experts.

Each thread has every 32nd logit of a token. The largest of all, and the first expert that has it, are found top_k times. Then
thread k has the token's k-th expert; a place in the sort is the number of assignments of earlier experts, and of earlier tokens
to the same one, which the threads tell each other. Nothing but the logits waits for memory.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import engine, lanes
from mgpu_ops.core.limits import WARP
from mgpu_ops.sorting import in_order

_LEAST = -(2**31)  # less than all keys


def launch(logits: jax.Array, top_k: int, normalised: bool, *, interpret: bool = False) -> tuple[jax.Array, ...]:
    """The token and the weight of each assignment, sorted, both [tokens * top_k]; sizes [experts]; places [tokens, top_k].

    logits: float32 [tokens, experts]. normalised: the weights of a token sum to 1; else the softmax is over all experts.
    """
    (tokens, experts), count = logits.shape, logits.shape[0] * top_k

    def body(logits: Any, *outs: Any) -> None:
        chosen, weights = zip(*(_best(logits, token, experts, top_k, normalised) for token in range(tokens)), strict=True)
        _sort(chosen, weights, outs, experts, top_k)

    int32 = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.int32)
    of_tokens, of_weights, sizes, places = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_moe_route", {"block": 1}, warpgroups=1, approx_math=True, interpret=interpret, reduces_across_warps=False
        ),
        out_type=(int32((count,)), jax.ShapeDtypeStruct((count,), jnp.float32), int32((experts,)), int32((count,))),
        scratch_types={},
    )(logits.reshape(tokens * experts))
    return of_tokens, of_weights, sizes, places.reshape(tokens, top_k)


def _best(logits: Any, token: int, experts: int, top_k: int, normalised: bool) -> tuple[jax.Array, jax.Array]:
    """The expert of a token's k-th choice, and its weight, in thread k; in others no expert, and 0."""
    own, readable, numbers, keys = lanes.number(), lanes.readable(logits), [], []
    for share in range(math.ceil(experts / WARP)):
        number = own + share * WARP
        logit = readable[token * experts + jnp.minimum(number, experts - 1)]
        numbers.append(number)
        keys.append(jnp.where(number < experts, _key(logit), _LEAST))
    left, expert, value = keys, own * 0 + experts, own.astype(jnp.float32)
    for k in range(top_k):
        best = lanes.largest(functools.reduce(jnp.maximum, left))
        those = (jnp.where(key == best, number, experts) for key, number in zip(left, numbers, strict=True))
        first = lanes.least(functools.reduce(jnp.minimum, those))
        expert, value = jnp.where(own == k, first, expert), jnp.where(own == k, _logit(best), value)
        left = [jnp.where(number == first, _LEAST, key) for key, number in zip(left, numbers, strict=True)]
    top = _logit(lanes.largest(functools.reduce(jnp.maximum, keys)))
    of_best = jnp.where(own < top_k, jnp.exp(value - top), 0.0)
    of_all = [jnp.where(key > _LEAST, jnp.exp(_logit(key) - top), 0.0) for key in keys]
    return expert, of_best / lanes.total(of_best if normalised else functools.reduce(jnp.add, of_all))


def _key(logit: jax.Array) -> jax.Array:
    return in_order(lanes.bits_of(jnp.where(logit == 0, 0.0, logit)))  # -0 equals 0


def _logit(key: jax.Array) -> jax.Array:
    return lanes.float_of(in_order(key))


def _sort(chosen: Any, weights: Any, outs: tuple[Any, ...], experts: int, top_k: int) -> None:
    """Stores what `launch` returns of each token's experts and their weights."""
    of_tokens, of_weights, sizes, places = outs
    own, place = lanes.number(), [jnp.int32(0) for _ in chosen]
    counts = [jnp.int32(0) for _ in range(math.ceil(experts / WARP))]
    for token, experts_of in enumerate(chosen):
        for k in range(top_k):
            other = lanes.of_lane(experts_of, jnp.int32(k))
            for i, expert in enumerate(chosen):
                before = other <= expert if token < i else other < expert  # a token has an expert once
                place[i] += before.astype(jnp.int32)
            for i in range(len(counts)):
                counts[i] += (other == own + i * WARP).astype(jnp.int32)
    for token, here in enumerate(place):
        lanes.store(of_tokens, here, own * 0 + token, own < top_k)
        lanes.store(of_weights, here, weights[token], own < top_k)
        lanes.store(places, own + token * top_k, here, own < top_k)
    for i, count in enumerate(counts):
        lanes.store(sizes, own + i * WARP, count, own + i * WARP < experts)
