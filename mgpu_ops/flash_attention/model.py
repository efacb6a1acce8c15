"""What is worth trying for attention, and a model of its time."""

from __future__ import annotations

import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import rates
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.flash_attention import reference
from mgpu_ops.flash_attention.problem import (
    ROWS,
    BackwardConfig,
    BackwardProblem,
    Config,
    Problem,
    check,
    check_backward,
    supports,
    supports_backward,
)


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    del problem, gpu
    return {
        "compute_warpgroups": (1, 2, 3),
        "tile_kv": (64, 128, 192, 256),
        "max_concurrent_steps": (2, 3, 4),
        "q_slots": (1, 2),
        "memory_registers": (24, 32, 40, 56),
    }


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal q, k and v, and what the problem has beside them: half-random lengths, packed segments, a bias."""
    p = problem
    keys = jax.random.split(key, 8)
    shapes = ((p.q_tokens, p.q_heads), (p.kv_tokens, p.kv_heads), (p.kv_tokens, p.kv_heads))
    qkv = [jax.random.normal(k, (p.batch, *s, p.head_dim), p.dtype) for k, s in zip(keys, shapes, strict=False)]
    cap = 30.0 if p.soft_cap else 0.0
    scale = 1 / math.sqrt(p.head_dim)
    rest = [jnp.array([scale, cap, scale / cap if cap else 0.0], jnp.float32)]
    if p.lengths:
        rest += [jax.random.randint(k, (p.batch,), n // 2, n + 1) for k, n in zip(keys[3:], (p.q_tokens, p.kv_tokens), strict=False)]
    if p.segments:
        rest += [jnp.broadcast_to(jnp.arange(n) * 4 // n, (p.batch, n)).astype(jnp.int32) for n in (p.q_tokens, p.kv_tokens)]
    if p.bias != "none":
        rest.append(jax.random.normal(keys[5], (1, p.q_heads, p.q_tokens, p.kv_tokens), p.bias))
    return (*qkv, *rest)


def backward_inputs(problem: BackwardProblem, key: Any) -> tuple[jax.Array, ...]:
    """`inputs`, a random gradient of the output, and the lse and delta that the forward pass leaves."""
    p = problem
    q, k, v, *rest = inputs(p, key)
    out, lse = reference.forward(p, q, k, v, *rest)
    out_grad = jax.random.normal(jax.random.fold_in(key, 1), out.shape, out.dtype)
    delta = jnp.einsum("btnd,btnd->bnt", out.astype(jnp.float32), out_grad.astype(jnp.float32))
    return (q, k, v, out_grad, lse, delta, *rest)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason."""
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of flash_attention fits {problem} on {gpu.name}: {reason}")
    found = []
    for warpgroups, tile_kv, q_slots in itertools.product((1, 2, 3), (64, 128, 192), (2, 1)):
        for steps in (4, 3, 2):
            config = Config(warpgroups, tile_kv, steps, q_slots, 32 if warpgroups == 3 else 40)
            if check(problem, config, gpu) is None:
                found.append(config)
                break  # a deeper ring is never slower
    return sorted(found, key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`."""
    return candidates(problem, gpu)[0]


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds."""
    p, c = problem, config
    tile = ROWS * c.compute_warpgroups
    tiles = p.batch * p.q_heads * math.ceil(p.q_tokens / tile)
    steps = max(1.0, reference.pairs(p) / p.q_tokens / c.tile_kv + 0.5)
    rate = gpu.bf16_flops * rates.POWER / gpu.sms
    step = 4 * tile * c.tile_kv * p.head_dim / rate + 0.2e-6
    return rates.LAUNCH + math.ceil(tiles / gpu.sms) * (steps * step + 2e-6 / c.q_slots)


def distance(x: Problem, y: Problem) -> float | None:
    """How far a config tuned for `x` is from `y`: |log2| ratios of the sizes; None where it does not carry over."""
    if x.head_dim != y.head_dim or (x.bias != "none") != (y.bias != "none"):
        return None
    sides = ((x.batch * x.q_heads, y.batch * y.q_heads), (x.q_tokens, y.q_tokens), (x.kv_tokens, y.kv_tokens))
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    return near if near <= 6.0 else None


def backward_space(problem: BackwardProblem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of BackwardConfig, in order; `check_backward` says which combinations run."""
    del problem, gpu
    return {
        "mode": ("fused", "split"),
        "tile_q": (64, 128),
        "tile_kv": (64, 128),
        "max_concurrent_steps": (1, 2, 3),
        "memory_registers": (24, 40),
    }


def backward_candidates(problem: BackwardProblem, gpu: Gpu) -> list[BackwardConfig]:
    reason = supports_backward(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of flash_attention_backward fits {problem} on {gpu.name}: {reason}")
    every = [BackwardConfig(*choice) for choice in itertools.product(*backward_space(problem, gpu).values())]
    return [c for c in every if check_backward(problem, c, gpu) is None]


def backward_default(problem: BackwardProblem, gpu: Gpu) -> BackwardConfig:
    return backward_candidates(problem, gpu)[0]


def backward_cost(problem: BackwardProblem, config: BackwardConfig, gpu: Gpu) -> float:
    return 1.0
