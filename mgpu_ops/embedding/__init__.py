"""embedding: rows of a table by token, whose gradient is one pass over the table; for NVIDIA Hopper.

`problem.py`: what the gradient is, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the
kernel. Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import NamedSharding, PartitionSpec
from jax.typing import ArrayLike

from mgpu_ops import floats, integers
from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.embedding.model import baseline_cost, candidates, cost, default, distance, space
from mgpu_ops.embedding.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    flops,
    inputs,
    supports,
    tolerance,
)
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import Baseline, OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    config: Config | None
    backend: dispatch.Backend | None


def embedding(
    table: ArrayLike,
    tokens: ArrayLike,
    *,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """table[tokens], whose gradient is one pass over the table and sums in float32.

    Args:
      table: floats [vocabulary, width]. For the kernel bfloat16 or float16 with a width that is a multiple of 256,
        up to 8192.
      tokens: integers [...] of any dtype. One that is out of range counts as the nearest valid one.
      config: runs the gradient's kernel with this Config instead of the database's.
      backend: of the gradient: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race
        detection; any machine, slow), "xla" (`reference`, a scatter that adds in float32). Default: $MGPU_OPS_BACKEND, else
        "mosaic" where GPU and problem allow it and XLA is not known or predicted to be faster. If XLA is, it runs JAX's own
        scatter for table[tokens], which rounds each sum; if the kernel cannot run, the scatter in float32.

    Returns:
      [..., width] of the table's dtype. XLA gathers it, whatever the backend.

    Works under jit, grad (reverse mode), vmap and shard_map. The gradient keeps only the tokens. With the kernel, each row of
    the gradient is rounded once, and is the same from run to run.

    Raises:
      ValueError: a table of another rank, an empty vocabulary, an unknown backend, a config that cannot run.
      TypeError: a table that holds no floats, tokens that are no integers.

    Measurements are in docs/ops/embedding.md.
    """
    rows, numbers = floats.array("embedding", "table", table), integers.array("tokens", tokens)
    if rows.ndim != 2 or not rows.shape[0]:
        raise ValueError(f"table has shape {rows.shape}: it is [vocabulary, width], with a word or more")
    integers.check_count("the words of table", rows.shape[0])
    check_config("config", config, Config, "EmbeddingConfig")
    call, last = _Call(config, dispatch.requested_backend(backend)), rows.shape[0] - 1
    known = jnp.clip(integers.clipped(numbers, last), 0, last)
    out = _look_up(call, *mesh.same_mesh_axes(rows, mesh.as_rows("tokens", known, 0)))
    return out.reshape(*known.shape, rows.shape[1])


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _look_up(call: _Call, table: jax.Array, tokens: jax.Array) -> jax.Array:
    over, split = mesh.mesh_of((table, tokens)), None
    if mesh.explicit_axes(over):  # JAX wants to be told, and a caller cannot
        (_, width), (of_tokens,) = (jax.typeof(x).sharding.spec for x in (table, tokens))
        split = NamedSharding(over, PartitionSpec(of_tokens, width))
    return table.at[tokens].get(mode="promise_in_bounds", out_sharding=split)


def _forward(call: _Call, table: jax.Array, tokens: jax.Array) -> Any:
    return _look_up(call, table, tokens), (tokens, table[:, :0])


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, None]:
    tokens, like = saved
    gradient = _gradient(call, like.shape[0])(g, tokens)
    over = mesh.mesh_of((like, tokens))
    if mesh.explicit_axes(over):  # each device then has all words' rows
        (words, _), (_, width) = (jax.typeof(x).sharding.spec for x in (like, gradient))
        gradient = jax.sharding.reshard(gradient, NamedSharding(over, PartitionSpec(words, width)))
    return gradient, None


_look_up.defvjp(*first_order("embedding", _forward, _backward))


@functools.cache
def _gradient(call: _Call, vocabulary: int) -> Any:
    """The gradient of the table from that of its rows and from the tokens. It is jitted, so that eager calls trace once."""

    def of_first(words: int, g: jax.Array, tokens: jax.Array) -> jax.Array:
        """The gradient of the first rows of the table."""
        problem = Problem(g.shape[0], words, g.shape[1], g.dtype.name)
        return dispatch.run(SPEC, problem, (g, tokens), config=call.config, backend=call.backend)

    def of_words(parts: int, number: jax.Array, g: jax.Array, tokens: jax.Array) -> jax.Array:
        """The gradient of the rows of a part of the words."""
        words = vocabulary // parts
        own = tokens - number * words
        return of_first(words, g, jnp.where((own >= 0) & (own < words), own, words))

    def rule(*_: jax.Array) -> partition.Rule:
        """Tokens, which are summed, words and columns are split."""
        return partition.Rule("embedding", "tokens width, tokens -> v width", counted="v", of_part=of_words)

    gradient = jax.custom_batching.custom_vmap(
        partition.partitioned(functools.partial(of_first, vocabulary), rule, call.backend)
    )

    @gradient.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return one_after_the_other(run, batched, arrays), True

    run = jax.jit(gradient)
    return run


def reference(problem: Problem, g: jax.Array, tokens: jax.Array) -> jax.Array:
    """The same through XLA."""
    p = problem
    zeros = jnp.zeros((p.vocabulary, p.width), np.promote_types(p.dtype, np.float32))
    return zeros.at[tokens].add(g.astype(zeros.dtype), mode="drop").astype(p.dtype)


def _scattered(problem: Problem, g: jax.Array, tokens: jax.Array) -> jax.Array:
    """As JAX has the gradient of a lookup: each sum is rounded."""
    zeros = jnp.zeros((problem.vocabulary, problem.width), problem.dtype)
    return zeros.at[tokens].add(g, mode="drop")


def _baseline(problem: Problem) -> Baseline:
    """What a program without this op runs."""
    return Baseline("xla", _scattered)


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.embedding import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="embedding",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes=SHAPES,
    suites=SUITES,
    space=space,
    supports=supports,
    check=check,
    candidates=candidates,
    default=default,
    cost=cost,
    distance=distance,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=launch,
    reference=reference,
    tolerance=tolerance,
    baseline=_baseline,
    baseline_cost=baseline_cost,
)

__all__ = ["SPEC", "Config", "Problem", "default", "embedding", "launch", "reference"]
