"""Times what each fusion of a layer of experts gives: the fused part beside the same through more kernels. Needs a Hopper GPU.

    python scripts/moe_fusions.py [--output results/DATE-GPU-moe-fusions.txt] [--tokens 16384]

Kernel times, cold L2, both in turn; default configs where the database has none. Each part is one jitted function, and what is
not a kernel of ours is XLA's.
"""

from __future__ import annotations

import argparse
import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp

import mgpu_ops
from mgpu_ops.core import gpu as gpus
from mgpu_ops.grouped import gated
from mgpu_ops.grouped.grouped_matmul import Call, sum_of_two
from mgpu_ops.tuning import measure

WIDTH, HIDDEN, EXPERTS, TOP_K, ROUNDS = 2560, 1280, 64, 4, 7
F32 = jnp.float32


def arrays(tokens: int) -> dict[str, Any]:
    """Tokens, routes and matrices, bfloat16, and what lies between the products of a layer."""
    keys = iter(jax.random.split(jax.random.key(0), 8))
    normal = lambda *shape: jax.random.normal(next(keys), shape, jnp.bfloat16) / shape[-2] ** 0.5  # noqa: E731
    x, logits = normal(tokens, WIDTH), jax.random.normal(next(keys), (tokens, EXPERTS))
    made: dict[str, Any] = {"gate": normal(EXPERTS, WIDTH, HIDDEN), "up": normal(EXPERTS, WIDTH, HIDDEN)}
    made["down"] = normal(EXPERTS, HIDDEN, WIDTH)
    weights, chosen = mgpu_ops.moe_route(logits, TOP_K)
    sent = mgpu_ops.moe_dispatch(x, chosen, EXPERTS)
    made |= {"x": x, "weights": weights, "chosen": chosen, **sent._asdict()}
    made["tokens"] = sent.order // TOP_K
    made["scale"] = weights.reshape(-1)[sent.order]
    made["hidden"], made["results"] = normal(tokens * TOP_K, HIDDEN), normal(tokens * TOP_K, WIDTH)
    return made


def silu_up(gate: jax.Array, up: jax.Array) -> jax.Array:
    return (jax.nn.silu(gate.astype(F32)) * up.astype(F32)).astype(gate.dtype)


def gated_apart(rows: Any, both: Any, sizes: Any) -> jax.Array:
    return silu_up(*jnp.split(mgpu_ops.grouped_matmul(rows, both, sizes), 2, axis=1))


def in_the_load(x: Any, gate: Any, up: Any, sizes: Any, tokens: Any) -> jax.Array:
    return mgpu_ops.gated_grouped_matmul(x, gate, up, sizes, row_indices=tokens)


def gathered_before(x: Any, gate: Any, up: Any, sizes: Any, tokens: Any) -> jax.Array:
    return mgpu_ops.gated_grouped_matmul(x.at[tokens].get(mode="promise_in_bounds"), gate, up, sizes)


def scaled_sum(hidden: Any, down: Any, sizes: Any, scale: Any, order: Any, positions: Any) -> jax.Array:
    return mgpu_ops.moe_combine(mgpu_ops.grouped_matmul(hidden, down, sizes, row_scale=scale), order, positions)


def sum_scaled(hidden: Any, down: Any, sizes: Any, weights: Any, positions: Any) -> jax.Array:
    results = mgpu_ops.grouped_matmul(hidden, down, sizes)
    return sum(weights[:, j, None] * results[positions[:, j]].astype(F32) for j in range(TOP_K)).astype(hidden.dtype)


def scattered(rows: Any, order: Any) -> jax.Array:
    zeros = jnp.zeros((rows.shape[0] // TOP_K, rows.shape[1]), F32)
    return zeros.at[order // TOP_K].add(rows.astype(F32)).astype(rows.dtype)


def two_added(dgate: Any, gate: Any, dup: Any, up: Any, sizes: Any) -> jax.Array:
    product = functools.partial(mgpu_ops.grouped_matmul, transpose_rhs=True)
    return product(dgate, gate, sizes) + product(dup, up, sizes)


def from_kept(gate: Any, up: Any, g: Any) -> Any:
    return jax.vjp(silu_up, gate, up)[1](g)


def parts(made: dict[str, Any]) -> dict[str, list[tuple[str, Callable[..., Any], list[str]]]]:
    """By fusion: the fused part, then what it is instead of, each with the names of its arrays."""
    of = Call(True, "bfloat16", "none", "random", None, None)
    again = gated.Call("silu", False, "bfloat16", "random", None, None, group_offset=False)
    made["both"] = jnp.concatenate([made["gate"], made["up"]], axis=2)
    made["hidden2"], made["hidden3"] = made["hidden"] * 0.5, made["hidden"] * 0.25
    in_one = lambda a, wa, b, wb, sizes: sum_of_two(of, a, wa, sizes, b, wb)  # noqa: E731
    recomputed = lambda rows, gate, up, sizes, g: gated.gradients(again, rows, gate, up, sizes, g)  # noqa: E731
    row_sums = lambda u, h: (u.astype(F32) * h.astype(F32)).sum(1)  # noqa: E731
    of_results = lambda y, dy, order: row_sums(y, dy[order // TOP_K])  # noqa: E731
    two = ["hidden", "gate", "hidden2", "up", "group_sizes"]
    return {
        "activation(gate) * up in the epilogue": [
            ("fused", mgpu_ops.gated_grouped_matmul, ["rows", "gate", "up", "group_sizes"]),
            ("one product, then XLA", gated_apart, ["rows", "both", "group_sizes"]),
        ],
        "rows gathered in the load": [
            ("in the load", in_the_load, ["x", "gate", "up", "group_sizes", "tokens"]),
            ("XLA's gather before", gathered_before, ["x", "gate", "up", "group_sizes", "tokens"]),
        ],
        "routing weight as row scale": [
            ("fused", scaled_sum, ["hidden", "down", "group_sizes", "scale", "order", "positions"]),
            ("scaled while it is summed", sum_scaled, ["hidden", "down", "group_sizes", "weights", "positions"]),
        ],
        "the weights' gradient from hidden": [
            ("from hidden", row_sums, ["hidden", "hidden2"]),
            ("from the results", of_results, ["results", "x", "order"]),
        ],
        "a sum of gathered rows": [
            ("gathered", mgpu_ops.moe_combine, ["results", "order", "positions"]),
            ("scatter-add in float32", scattered, ["results", "order"]),
        ],
        "dgate w_gate^T + dup w_up^T in one kernel": [("fused", in_one, two), ("two, then added", two_added, two)],
        "gate and up computed again": [
            ("again", recomputed, ["rows", "gate", "up", "group_sizes", "hidden"]),
            ("from kept ones", from_kept, ["hidden", "hidden2", "hidden3"]),
        ],
        "rows sorted by expert": [("moe_dispatch", lambda x, e: mgpu_ops.moe_dispatch(x, e, EXPERTS), ["x", "chosen"])],
    }


def main(arguments: list[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--output", type=Path, help="also write the lines to this file")
    parser.add_argument("--tokens", type=int, default=16384)
    given = parser.parse_args(arguments)
    device = gpus.current()
    if device is None:
        parser.error("this machine has no Hopper GPU")
    lines = [
        f"{device.name}, {gpus.driver_version()}, jax {jax.__version__}; kernel times, cold L2",
        f"d {WIDTH}, {EXPERTS} experts of {HIDDEN}, top-{TOP_K}, {given.tokens} tokens, random routes",
    ]

    def tell() -> None:
        print(lines[-1], flush=True)
        if given.output:
            given.output.write_text("\n".join(lines) + "\n")

    made = arrays(given.tokens)
    for fusion, ways in parts(made).items():
        calls = []
        for _, function, names in ways:
            of = [made[name] for name in names]
            calls.append(functools.partial(jax.jit(function).lower(*of).compile(), *of))
        times = measure.interleaved(calls, device, ROUNDS)
        told = ", ".join(f"{name} {measure.median_us(us):.1f} us" for (name, *_), us in zip(ways, times, strict=True))
        lines.append(f"{fusion}: {told}")
        tell()


if __name__ == "__main__":
    main()
