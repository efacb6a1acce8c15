"""A mixture-of-experts layer whose experts devices share, forward and backward, beside the same layer on one device.

    python examples/expert_parallel.py                                              # small, on all devices
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/expert_parallel.py    # on a machine without a GPU

Tokens and experts are both divided over the mesh axis "expert". Each device routes its own tokens, gathers the tokens and
routes of all, and computes what its experts make of them: `moe_experts` is told the first of its experts (`group_offset`) and
skips the rows of all others. A reduce-scatter adds the parts and gives each device its own tokens back. No token is dropped,
and all shapes are known before the routing is, as they would not be with an all-to-all of just the rows that experts need.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops

Arrays = tuple[jax.Array, ...]  # x [tokens, width], the router's matrix, and gate, up and down of all experts
SHARES = (P("expert"), P(), P("expert"), P("expert"), P("expert"))


def init(tokens: int, width: int, hidden: int, experts: int) -> Arrays:
    """Random bfloat16 tokens and matrices, whose outputs have about the size of their inputs; the router is float32."""
    keys = jax.random.split(jax.random.key(0), 5)
    shapes = ((tokens, width), (width, experts), *[(experts, width, hidden)] * 2, (experts, hidden, width))
    x, router, *weights = (jax.random.normal(k, s) * (s[-2] ** -0.5 if i else 1) for i, (k, s) in enumerate(zip(keys, shapes)))
    return x.astype(jnp.bfloat16), router, *(w.astype(jnp.bfloat16) for w in weights)


def logits(x: jax.Array, router: jax.Array) -> jax.Array:
    return jnp.matmul(x.astype(jnp.float32), router, precision="highest")


def alone(top_k: int, x: jax.Array, router: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The layer on one device."""
    return mgpu_ops.moe(x, logits(x, router), gate, up, down, top_k)


def shard(top_k: int, experts: int, x: jax.Array, router: jax.Array, *weights: jax.Array) -> jax.Array:
    """A device's part: the tokens x and the experts of `weights` are its own."""
    routed = mgpu_ops.moe_route(logits(x, router), top_k)
    x, scale, chosen = (jax.lax.all_gather(y, "expert", tiled=True) for y in (x, *routed))
    first = jax.lax.axis_index("expert") * weights[0].shape[0]
    part = mgpu_ops.moe_experts(x, scale, chosen, *weights, num_experts=experts, group_offset=first)
    total: jax.Array = jax.lax.psum_scatter(part.astype(jnp.float32), "expert", tiled=True)
    return total.astype(x.dtype)


def shared(mesh: Mesh, top_k: int, experts: int) -> Callable[..., jax.Array]:
    """The layer on all devices of the mesh."""
    return jax.shard_map(functools.partial(shard, top_k, experts), mesh=mesh, in_specs=SHARES, out_specs=P("expert"))


def with_gradients(layer: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    """The layer's output, and the gradients of half the sum of its squares."""

    def run(*arrays: jax.Array) -> Arrays:
        out, pull = jax.vjp(layer, *arrays)
        return out, *pull(out)

    return jax.jit(run)


def apart(x: jax.Array, y: jax.Array) -> float:
    """How far two arrays are apart, as a share of their size."""
    x, y = (jax.device_get(z).astype("float32") for z in (x, y))
    return float(jnp.sqrt(jnp.mean((x - y) ** 2) / jnp.mean(y**2)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare a layer of experts that devices share with the layer on one device.")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--devices", type=int, default=jax.local_device_count())
    a = parser.parse_args(arguments)
    for name, most in (("devices", jax.local_device_count()), ("top_k", a.experts)):
        if not 1 <= getattr(a, name) <= most:
            parser.error(f"--{name.replace('_', '-')} {getattr(a, name)} is not from 1 to {most}")
    for name in ("tokens", "experts"):
        if getattr(a, name) % a.devices:
            parser.error(f"--{name} {getattr(a, name)} is no multiple of the {a.devices} devices")
    mesh = jax.make_mesh((a.devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[: a.devices])
    arrays = init(a.tokens, a.width, a.hidden, a.experts)
    on_mesh = tuple(jax.device_put(x, NamedSharding(mesh, share)) for x, share in zip(arrays, SHARES, strict=True))
    ours = with_gradients(shared(mesh, a.top_k, a.experts))(*on_mesh)
    wanted = with_gradients(functools.partial(alone, a.top_k))(*arrays)
    names = ("output", "gradient of x", "of the router", "of gate", "of up", "of down")
    for name, x, y in zip(names, ours, wanted, strict=True):
        print(f"{name}: {apart(x, y):.1e} of its size apart")


if __name__ == "__main__":
    main()
