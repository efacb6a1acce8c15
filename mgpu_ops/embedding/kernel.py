"""The kernel of an embedding's gradient: one pass over its words, each the sum of its tokens' rows.

XLA sorts the tokens before. A block is one warpgroup and takes every so-many-th word: it finds where the word's tokens begin
and end among the sorted ones, adds up their rows in registers and writes the sum, or zeros. Rows are read once, from wherever
they are; nothing is read of words that no token is.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import WARPGROUP
from mgpu_ops.core.tile_scheduler import Rounds
from mgpu_ops.embedding.problem import Config, Problem, word


def launch(
    problem: Problem, config: Config, gpu: Gpu, g: jax.Array, tokens: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """The table's gradient, [vocabulary, width] of g [tokens, width] and tokens [tokens], int32 in [0, vocabulary].

    Rows of token `vocabulary` are of no word.
    """
    p, c, dtype = problem, config, jnp.dtype(problem.dtype)
    of_a_thread = word(p)
    rounds, shape = (
        Rounds.of(p.vocabulary, gpu.sms * c.blocks, gpu),
        (p.width // (WARPGROUP * of_a_thread), WARPGROUP * of_a_thread),
    )
    order, starts, first = by_word(p, tokens)
    layout = plgpu.Layout.WG_STRIDED(shape, of_a_thread)

    def kernel(g: Any, order: Any, starts: Any, first: Any, out: Any) -> None:
        first_word, count = rounds.of_block(lax.axis_index("block"))

        def of_word(i: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
            """Where the tokens of this block's word number i begin and end, and the first of them."""
            number = jnp.minimum(first_word + i * rounds.at_once, p.vocabulary - 1)
            return starts[number], starts[number + 1], first[number]

        def sum_up(i: jax.Array, this: tuple[jax.Array, jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array, jax.Array]:
            following = of_word(i + 1)  # on its way while this one's rows are
            begin, end, token = this

            def add(tokens: list[jax.Array], total: jax.Array) -> jax.Array:
                loaded = [plgpu.load(g.at[token], layout=layout, optimized=False) for token in tokens]
                for values in loaded:
                    total += values.astype(jnp.float32)
                return total

            total = plgpu.layout_cast(jnp.zeros(shape, jnp.float32), layout)
            total = lax.fori_loop(0, jnp.minimum(end - begin, 1), lambda _, total: add([token], total), total)
            begin += 1
            many = lax.div(jnp.maximum(end - begin, 0), jnp.int32(c.loads))

            def some(j: jax.Array, total: jax.Array) -> jax.Array:
                return add([order[begin + j * c.loads + k] for k in range(c.loads)], total)

            total = lax.fori_loop(0, many, some, total)
            total = lax.fori_loop(begin + many * c.loads, end, lambda j, total: add([order[j]], total), total)
            out[first_word + i * rounds.at_once] = total.astype(dtype)
            return following

        lax.fori_loop(0, count, sum_up, of_word(jnp.int32(0)))

    launch = engine.Launch("mgpu_ops_embedding_gradient", {"block": rounds.blocks}, warpgroups=1, interpret=interpret)
    out = jax.ShapeDtypeStruct((p.vocabulary, *shape), dtype)
    run = engine.kernel(kernel, launch, out_type=out, scratch_types={})
    return run(g.reshape(p.rows, *shape), order, starts, first).reshape(p.vocabulary, p.width)


def by_word(p: Problem, tokens: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Numbers of the tokens sorted by word, [tokens]; where each word's begin, [vocabulary + 1]; the first of each word.

    All int32. The first token of a word that has none is any. Tokens of no word come last.
    """
    words, order = sorted_tokens(p, tokens)
    starts = jnp.searchsorted(words, jnp.arange(p.vocabulary + 1, dtype=jnp.int32), method="scan_unrolled").astype(jnp.int32)
    return order, starts, order.at[starts].get(mode="clip")


def sorted_tokens(p: Problem, tokens: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The tokens by word, and their numbers."""
    numbers, bits = jnp.arange(p.rows, dtype=jnp.int32), max(p.rows - 1, 1).bit_length()
    if (p.vocabulary + 1) << bits > 2**31:
        words, order = lax.sort((tokens, numbers), num_keys=1, is_stable=True)
        return words, order
    keys = lax.sort((tokens << bits) + numbers, is_stable=False)  # both in one array, which is sorted faster
    return keys >> bits, keys & ((1 << bits) - 1)
