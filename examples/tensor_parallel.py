"""Steps of decoding through a stack of feed-forward layers that GPUs share, with XLA's all-reduce and with ours in a workspace.

    python examples/tensor_parallel.py                                                          # small, on all devices
    python examples/tensor_parallel.py --layers 32 --width 4096 --hidden 14336 --tokens 16      # Llama-3 8B's, on GPUs

Each device has some columns of a layer's first matrices and the same rows of its last. So it computes, for every token, a part
of a sum, and an all-reduce adds the parts. Source: Shoeybi et al., Megatron-LM, section 3, arXiv:1909.08053. With few tokens a
layer takes tens of microseconds, and the all-reduce is small: what counts is how soon it begins and ends.
"""

from __future__ import annotations

import argparse
import functools
import statistics
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops

# gate and up: [layers, width, 2, hidden]; down: [layers, hidden, width]. The axis "model" shares out the hidden columns.
SHARES = {"gate_up": P(None, None, None, "model"), "down": P(None, "model", None)}
STEPS, ROUNDS = 20, 7

Params = dict[str, jax.Array]
Reduce = Callable[[jax.Array], jax.Array]


def init(mesh: Mesh, layers: int, width: int, hidden: int) -> Params:
    """Random bfloat16 matrices whose outputs have about the size of their inputs, each device's share made there."""
    shapes = {"gate_up": (layers, width, 2, hidden), "down": (layers, hidden, width)}

    @functools.partial(jax.jit, out_shardings={name: NamedSharding(mesh, share) for name, share in SHARES.items()})
    def made() -> Params:
        keys = dict(zip(shapes, jax.random.split(jax.random.key(0)), strict=True))
        return {name: jax.random.normal(keys[name], s, jnp.bfloat16) * s[1] ** -0.5 for name, s in shapes.items()}

    return made()


def decode(params: Params, x: jax.Array, reduce: Reduce) -> jax.Array:
    """x [tokens, width] through all layers, on a device with its share of the matrices."""
    for gate_up, down in zip(params["gate_up"], params["down"], strict=True):
        normal = x.astype(jnp.float32)
        normal *= jax.lax.rsqrt(jnp.mean(normal**2, axis=-1, keepdims=True) + 1e-6)
        gate, up = jnp.einsum("tw,wgh->gth", normal.astype(x.dtype), gate_up)
        x += reduce((jax.nn.silu(gate) * up) @ down)
    return x


def through_xla(mesh: Mesh) -> Callable[..., Any]:
    def step(params: Params, x: jax.Array) -> jax.Array:
        return decode(params, x, lambda part: jax.lax.psum(part, "model"))

    return jax.jit(jax.shard_map(step, mesh=mesh, in_specs=(SHARES, P()), out_specs=P()))


def in_workspace(mesh: Mesh) -> Callable[..., Any]:
    workspace = mgpu_ops.collective_workspace(mesh, "model")

    def step(params: Params, x: jax.Array, workspace: Any) -> jax.Array:
        opened = workspace.open()
        return decode(params, x, lambda part: mgpu_ops.all_reduce(part, "model", workspace=opened))

    specs = (SHARES, P(), P("model"))
    run = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P(), check_vma=False))
    return lambda params, x: run(params, x, workspace)


def milliseconds(steps: dict[str, Callable[..., Any]], params: Params, x: jax.Array) -> dict[str, float]:
    """Of a step of each, in turn: one after the other, each with what the one before returned, as in decoding."""
    taken: dict[str, list[float]] = {name: [] for name in steps}
    for _ in range(1 + ROUNDS):
        for name, step in steps.items():
            start, y = time.perf_counter(), x
            for _ in range(STEPS):
                y = step(params, y)
            jax.block_until_ready(y)
            taken[name].append((time.perf_counter() - start) / STEPS * 1e3)
    return {name: statistics.median(times[1:]) for name, times in taken.items()}


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Time steps of decoding with either all-reduce, and compare what they return.")
    parser.add_argument("--layers", type=int, default=4)
    parser.add_argument("--width", type=int, default=256)
    parser.add_argument("--hidden", type=int, default=512, help="a multiple of the devices")
    parser.add_argument("--tokens", type=int, default=16)
    parser.add_argument("--devices", type=int, default=jax.local_device_count())
    a = parser.parse_args(arguments)
    for name in ("layers", "width", "hidden", "tokens"):
        if getattr(a, name) < 1:
            parser.error(f"--{name} {getattr(a, name)} is not 1 or more")
    if not 1 <= a.devices <= jax.local_device_count():
        parser.error(f"--devices {a.devices} is not from 1 to {jax.local_device_count()}")
    if a.hidden % a.devices:
        parser.error(f"--hidden {a.hidden} is no multiple of the {a.devices} devices")
    mesh = jax.make_mesh((a.devices,), ("model",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[: a.devices])
    params = init(mesh, a.layers, a.width, a.hidden)
    x = jax.device_put(jax.random.normal(jax.random.key(1), (a.tokens, a.width), jnp.bfloat16), NamedSharding(mesh, P()))
    steps = {"through XLA": through_xla(mesh), "in a workspace": in_workspace(mesh)}
    theirs, ours = (step(params, x).astype(jnp.float32) for step in steps.values())
    apart = jnp.sqrt(jnp.mean((ours - theirs) ** 2) / jnp.mean(theirs**2))
    taken = milliseconds(steps, params, x)
    size = f"{a.layers} layers of {a.width} x {a.hidden} on {a.devices} devices, {a.tokens} tokens"
    for name, ms in taken.items():
        print(f"{size}, all-reduce {name}: {ms:.3f} ms a step")
    ratio = taken["in a workspace"] / taken["through XLA"]
    print(f"in a workspace a step takes {ratio:.3f} of the time; the results are {float(apart):.1e} of their size apart")


if __name__ == "__main__":
    main()
