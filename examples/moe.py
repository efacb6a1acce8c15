"""A mixture-of-experts layer on `mgpu_ops.moe`, and some steps of its training.

    python examples/moe.py --steps 20                  # through the kernels on a Hopper GPU, elsewhere through XLA
    python examples/moe.py --steps 20 --backend xla    # through XLA anywhere: the same losses within rounding
    python examples/moe.py --steps 20 --fp8            # all products of the experts, forward and backward, in 8-bit floats

A router scores the experts for each token; the best `top_k` of them each compute down(silu(gate(x)) * up(x)) with matrices of
their own, and the results are summed with the router's weights. An expert's matrices meet only the tokens that were sent to it,
and no token is dropped, however uneven the routing. `expert_parallel.py` shares the experts among devices.

Parameters, router and optimizer are float32. The experts multiply bfloat16, or 8-bit floats, and accumulate float32.
"""

from __future__ import annotations

import argparse
import dataclasses
import functools
from typing import Any, Literal

import jax
import jax.numpy as jnp

import mgpu_ops

Params = dict[str, jax.Array]
type Backend = Literal["mosaic", "interpret", "xla"]


@dataclasses.dataclass(frozen=True)
class Layer:
    width: int = 128  # of a token; widths in multiples of 8 suit the kernel
    hidden: int = 256  # of an expert
    experts: int = 8
    top_k: int = 2  # experts per token
    fp8: bool = False  # the experts' products


def init(layer: Layer, key: jax.Array) -> Params:
    """Random matrices whose outputs have about the size of their inputs."""

    def normal(key: jax.Array, *shape: int) -> jax.Array:
        return jax.random.normal(key, shape) / shape[-2] ** 0.5

    keys = jax.random.split(key, 4)
    return {
        "router": normal(keys[0], layer.width, layer.experts),
        "gate": normal(keys[1], layer.experts, layer.width, layer.hidden),
        "up": normal(keys[2], layer.experts, layer.width, layer.hidden),
        "down": normal(keys[3], layer.experts, layer.hidden, layer.width),
    }


def balance_loss(layer: Layer, logits: jax.Array) -> jax.Array:
    """experts * sum_e (share of the assignments that e got) * (mean probability of e), for logits [tokens, experts].

    It is 1 where all experts are used alike, and more where the router prefers some. Only the probabilities have a gradient.
    Source: Fedus et al., Switch Transformers, section 2.2, arXiv:2101.03961.
    """
    _, experts = mgpu_ops.moe_route(logits, layer.top_k)
    shares = jnp.bincount(experts.ravel(), length=layer.experts) / experts.size
    return layer.experts * jnp.sum(shares * jax.nn.softmax(logits).mean(axis=0))


def moe(layer: Layer, params: Params, x: jax.Array, backend: Backend | None = None) -> tuple[jax.Array, jax.Array]:
    """The layer's output [tokens, width] and the balance loss, for x [tokens, width]."""
    logits = jnp.matmul(x, params["router"], precision="highest")
    x, gate, up, down = (y.astype(jnp.bfloat16) for y in (x, params["gate"], params["up"], params["down"]))
    run = mgpu_ops.fp8_moe if layer.fp8 else mgpu_ops.moe
    out = run(x, logits, gate, up, down, layer.top_k, backend=backend)
    return out.astype(jnp.float32), balance_loss(layer, logits)


def batch(layer: Layer, tokens: int, key: jax.Array, kinds: int = 8) -> tuple[jax.Array, jax.Array]:
    """Tokens of several kinds, each around a centre of its own, and targets: a kind's tokens times that kind's matrix.

    Centres and matrices are the same for every key. No single matrix fits all kinds, experts that share them out do.
    """
    centres = jax.random.normal(jax.random.key(1), (kinds, layer.width))
    matrices = jax.random.normal(jax.random.key(2), (kinds, layer.width, layer.width)) / layer.width**0.5
    key_kind, key_noise = jax.random.split(key)
    kind = jax.random.randint(key_kind, (tokens,), 0, kinds)
    x = centres[kind] + 0.3 * jax.random.normal(key_noise, (tokens, layer.width))
    products = jnp.einsum("ti,kij->tkj", x, matrices, precision="highest")
    return x, products[jnp.arange(tokens), kind]


def loss(layer: Layer, params: Params, x: jax.Array, target: jax.Array, backend: Backend | None = None) -> jax.Array:
    """The squared error as a share of the target's square, and a little of the balance loss."""
    out, balance = moe(layer, params, x, backend)
    return jnp.mean((out - target) ** 2) / jnp.mean(target**2) + 0.01 * balance


def adam(params: Params, grads: Params, state: Any, step: jax.Array, rate: float = 3e-3) -> tuple[Params, Any]:
    """One step of Adam with its usual constants; `state` holds the means of the gradients and of their squares."""
    mean = jax.tree.map(lambda m, g: 0.9 * m + 0.1 * g, state[0], grads)
    square = jax.tree.map(lambda v, g: 0.999 * v + 0.001 * g**2, state[1], grads)

    def updated(p: jax.Array, m: jax.Array, v: jax.Array) -> jax.Array:
        return p - rate * (m / (1 - 0.9**step)) / (jnp.sqrt(v / (1 - 0.999**step)) + 1e-8)

    return jax.tree.map(updated, params, mean, square), (mean, square)


def train(layer: Layer, steps: int, tokens: int, backend: Backend | None = None) -> list[float]:
    """The loss of each step, on a new batch every time."""

    @functools.partial(jax.jit, donate_argnums=(0, 1))
    def update(params: Params, state: Any, step: jax.Array) -> tuple[Params, Any, jax.Array]:
        x, target = batch(layer, tokens, jax.random.fold_in(jax.random.key(3), step))
        value, grads = jax.value_and_grad(lambda p: loss(layer, p, x, target, backend))(params)
        return *adam(params, grads, state, step), value

    params = init(layer, jax.random.key(0))
    state = (jax.tree.map(jnp.zeros_like, params), jax.tree.map(jnp.zeros_like, params))
    losses = []
    for step in range(1, steps + 1):
        params, state, value = update(params, state, jnp.int32(step))
        losses.append(float(value))
    return losses


def step() -> tuple[jax.Array, Params]:
    """The loss and the gradients of a step of training: `mgpu-tune capture examples.moe:step` lists what to tune for it."""
    layer = Layer()
    params, (x, target) = init(layer, jax.random.key(0)), batch(layer, 1024, jax.random.key(3))
    return jax.jit(jax.value_and_grad(functools.partial(loss, layer)))(params, x, target)


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Train a mixture-of-experts layer for some steps and print the losses.")
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--tokens", type=int, default=1024, help="per step")
    parser.add_argument("--fp8", action="store_true", help="multiply in 8-bit floats (current scaling)")
    parser.add_argument("--backend", choices=["mosaic", "xla"], help="default: mosaic on a Hopper GPU, elsewhere xla")
    args = parser.parse_args(arguments)
    for name in ("steps", "tokens"):
        if getattr(args, name) < 1:
            parser.error(f"--{name} {getattr(args, name)} is not 1 or more")
    for step, value in enumerate(train(Layer(fp8=args.fp8), args.steps, args.tokens, args.backend), 1):
        print(f"step {step:3}  loss {value:.4f}")


if __name__ == "__main__":
    main()
