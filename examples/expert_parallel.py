"""A mixture-of-experts layer whose experts devices share, forward and backward, beside the same layer on one device.

    python examples/expert_parallel.py                                              # small, on all devices
    python examples/expert_parallel.py --exchange ragged --repeat 20                # on GPUs; and times it
    XLA_FLAGS=--xla_force_host_platform_device_count=4 python examples/expert_parallel.py    # on a machine without a GPU

Tokens and experts are both divided over the mesh axis "expert", and each device routes its own tokens. No token is dropped.
What devices send each other (`--exchange`):

- all-gather: all tokens and routes. Each device computes what its experts make of them: `moe_experts` is told the first of its
  experts (`group_offset`) and skips the rows of all others. A reduce-scatter adds the parts up.
- all-to-all: the rows that an expert needs go to its device, in blocks as long as the most rows that there may be, and their
  results come back to be added up.
- ragged: the same with `jax.lax.ragged_all_to_all`, which sends those rows alone, and puts them in their experts' order. XLA's
  CPU backend has none.
"""

from __future__ import annotations

import argparse
import functools
import time
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax.sharding import AxisType, Mesh, NamedSharding
from jax.sharding import PartitionSpec as P

import mgpu_ops

Exchange = Callable[[jax.Array, jax.Array, jax.Array, tuple[jax.Array, ...]], jax.Array]
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


def experts_of(rows: jax.Array, scale: jax.Array, sizes: jax.Array, *weights: jax.Array) -> jax.Array:
    """What a device's experts make of rows in their order, times each row's routing weight."""
    gate, up, down = weights
    hidden = mgpu_ops.gated_grouped_matmul(rows, gate, up, sizes)
    return mgpu_ops.grouped_matmul(hidden, down, sizes, row_scale=scale)


def before(x: jax.Array, axis: int = 0) -> jax.Array:
    """The sum of what comes before each number."""
    return jnp.cumsum(x, axis) - x


def in_blocks(counts: jax.Array, rows: jax.Array, scale: jax.Array, weights: Arrays) -> jax.Array:
    """The experts' results for this device's rows: by an all-to-all of blocks, as long as `rows`, one for each device.

    counts: [devices, experts], the rows that each device has for each expert.
    """
    devices, own, me = counts.shape[0], weights[0].shape[0], jax.lax.axis_index("expert")
    sent = counts[me].reshape(devices, own).sum(1)
    row, first = jnp.arange(rows.shape[0]), before(sent)
    device = jnp.searchsorted(first + sent, row, side="right")
    place = device * rows.shape[0] + row - first[device]  # of each row, in the blocks

    def swapped(x: jax.Array) -> jax.Array:
        return jax.lax.all_to_all(x, "expert", 0, 0, tiled=True)

    def sent_off(x: jax.Array) -> jax.Array:
        return swapped(jnp.zeros((devices * rows.shape[0], *x.shape[1:]), x.dtype).at[place].set(x, unique_indices=True))

    found = jax.lax.dynamic_slice_in_dim(counts, me * own, own, 1)  # the rows that come, by device and expert
    ends = jnp.cumsum(found, 1)
    expert = jax.vmap(lambda e: jnp.searchsorted(e, row, side="right"))(ends)  # of no expert: `own`
    here = mgpu_ops.moe_dispatch(sent_off(rows), expert.reshape(-1, 1), own)
    results = experts_of(here.rows, sent_off(scale)[here.order], here.group_sizes, *weights)
    return swapped(mgpu_ops.moe_combine(results, here.order, here.positions))[place]


def ragged(counts: jax.Array, rows: jax.Array, scale: jax.Array, weights: Arrays) -> jax.Array:
    """As `in_blocks`, by ragged all-to-alls of the rows alone: a slice for each expert, which lands in the expert's place."""
    devices, own, me = counts.shape[0], weights[0].shape[0], jax.lax.axis_index("expert")
    mine, came = counts[me], jax.lax.dynamic_slice_in_dim(counts, me * own, own, 1)
    starts = before(counts.sum(0).reshape(devices, own), 1).reshape(-1)  # of each expert, on its device
    there = starts + before(counts)  # of the rows that each device has for each expert
    here = jax.lax.dynamic_slice_in_dim(there, me * own, own, 1)
    start, back = before(mine), jax.lax.dynamic_slice_in_dim(before(counts, 1), me * own, own, 1)

    def sent_off(x: jax.Array) -> jax.Array:
        room = jax.lax.pcast(jnp.zeros((devices * rows.shape[0], *x.shape[1:]), x.dtype), "expert", to="varying")
        return jax.lax.ragged_all_to_all(x, room, start, mine, there[me], came.reshape(-1), axis_name="expert")

    results = experts_of(sent_off(rows), sent_off(scale), came.sum(0), *weights)
    room = jax.lax.pcast(jnp.zeros(rows.shape, rows.dtype), "expert", to="varying")
    return jax.lax.ragged_all_to_all(
        results, room, here.reshape(-1), came.reshape(-1), back.reshape(-1), mine, axis_name="expert"
    )


def exchanged(exchange: Exchange, top_k: int, experts: int, x: jax.Array, router: jax.Array, *weights: jax.Array) -> jax.Array:
    """A device's part, where rows go to their experts' devices and results come back."""
    scale, chosen = mgpu_ops.moe_route(logits(x, router), top_k)
    rows, sizes, order, positions = mgpu_ops.moe_dispatch(x, chosen, experts)
    counts = jax.lax.all_gather(sizes, "expert")
    return mgpu_ops.moe_combine(exchange(counts, rows, scale.reshape(-1)[order], weights), order, positions)


EXCHANGES: dict[str, Callable[..., jax.Array]] = {
    "all-gather": shard,
    "all-to-all": functools.partial(exchanged, in_blocks),
    "ragged": functools.partial(exchanged, ragged),
}


def shared(mesh: Mesh, top_k: int, experts: int, exchange: str) -> Callable[..., jax.Array]:
    """The layer on all devices of the mesh."""
    part = functools.partial(EXCHANGES[exchange], top_k, experts)
    return jax.shard_map(part, mesh=mesh, in_specs=SHARES, out_specs=P("expert"))


def lacks_ragged() -> bool:
    """Whether XLA's backend here has no ragged all-to-all."""
    return jax.default_backend() == "cpu"


def with_gradients(layer: Callable[..., jax.Array]) -> Callable[..., Arrays]:
    """The layer's output, and the gradients of half the sum of its squares."""

    def run(*arrays: jax.Array) -> Arrays:
        out, pull = jax.vjp(layer, *arrays)
        return out, *pull(out)

    return jax.jit(run)


def seconds(step: Callable[..., Any], arrays: Arrays, repeat: int) -> float:
    """The shortest of three times of a step, each over `repeat` steps one after the other."""
    jax.block_until_ready(step(*arrays))
    taken = []
    for _ in range(3):
        start = time.perf_counter()
        out: Any = None
        for _ in range(repeat):
            out = step(*arrays)
        jax.block_until_ready(out)
        taken.append((time.perf_counter() - start) / repeat)
    return min(taken)


def apart(x: jax.Array, y: jax.Array) -> float:
    """How far two arrays are apart, as a share of their size."""
    x, y = jax.device_put(x, y.sharding).astype("float32"), y.astype("float32")
    return float(jnp.sqrt(jnp.mean((x - y) ** 2) / jnp.mean(y**2)))


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description="Compare a layer of experts that devices share with the layer on one device.")
    parser.add_argument("--tokens", type=int, default=256)
    parser.add_argument("--width", type=int, default=128)
    parser.add_argument("--hidden", type=int, default=256)
    parser.add_argument("--experts", type=int, default=16)
    parser.add_argument("--top-k", type=int, default=2)
    parser.add_argument("--devices", type=int, default=jax.local_device_count())
    parser.add_argument(
        "--exchange", choices=EXCHANGES, default="all-gather", help="what devices send each other; ragged needs GPUs"
    )
    parser.add_argument("--repeat", type=int, default=0, help="also time so many steps, forward alone and with the gradients")
    a = parser.parse_args(arguments)
    if a.exchange == "ragged" and lacks_ragged():
        parser.error("--exchange ragged needs GPUs, and none is in use: take all-to-all or all-gather")
    for name in ("tokens", "width", "hidden", "experts"):
        if getattr(a, name) < 1:
            parser.error(f"--{name} {getattr(a, name)} is not 1 or more")
    for name, most in (("devices", jax.local_device_count()), ("top_k", a.experts)):
        if not 1 <= getattr(a, name) <= most:
            parser.error(f"--{name.replace('_', '-')} {getattr(a, name)} is not from 1 to {most}")
    for name in ("tokens", "experts"):
        if getattr(a, name) % a.devices:
            parser.error(f"--{name} {getattr(a, name)} is no multiple of the {a.devices} devices")
    mesh = jax.make_mesh((a.devices,), ("expert",), axis_types=(AxisType.Auto,), devices=jax.local_devices()[: a.devices])
    arrays = init(a.tokens, a.width, a.hidden, a.experts)
    on_mesh = tuple(jax.device_put(x, NamedSharding(mesh, share)) for x, share in zip(arrays, SHARES, strict=True))
    every = shared(mesh, a.top_k, a.experts, a.exchange)
    layers: Any = (every, on_mesh), (functools.partial(alone, a.top_k), arrays)
    steps = [with_gradients(layer) for layer, _ in layers]
    ours, wanted = (step(*of) for step, (_, of) in zip(steps, layers, strict=True))
    names = ("output", "gradient of x", "of the router", "of gate", "of up", "of down")
    for name, x, y in zip(names, ours, wanted, strict=True):
        print(f"{name}: {apart(x, y):.1e} of its size apart")
    for where, (layer, of), step in zip((f"{a.devices} devices, {a.exchange}", "one device"), layers, steps, strict=True):
        if a.repeat > 0:
            forward, both = (seconds(run, of, a.repeat) * 1e3 for run in (jax.jit(layer), step))
            print(f"{where}: {forward:.3f} ms forward, {both:.3f} ms with gradients")


if __name__ == "__main__":
    main()
