"""The sum of outputs of attention over some keys each, to that over all keys: of the thread blocks of `decode.py`.

Each part comes with log2 of its rows' sums of exponentials, -inf for none. A cluster's parts are `merged` in registers; those
of several clusters are read from memory by a kernel of its own, `add_up`, where XLA takes two.
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import LOG2E
from mgpu_ops.attention.layouts import along_rows
from mgpu_ops.attention.problem import Problem, stored_columns
from mgpu_ops.attention.softmax import LOWEST, OnlineSoftmax
from mgpu_ops.core import engine


def _weights(logs: Sequence[jax.Array]) -> tuple[list[jax.Array], jax.Array]:
    """What outputs over some keys each count in the output over all of them, and log2 of its sum of exponentials.

    logs: the same of each part's keys, -inf for none.
    """
    largest = functools.reduce(jnp.maximum, logs)
    largest = jnp.maximum(largest, LOWEST)  # -inf less -inf would be NaN
    weights = [jnp.exp2(log - largest) for log in logs]
    total: Any = functools.reduce(lambda x, y: x + y, weights)
    inverse = jnp.where(total == 0, 0.0, 1.0 / total)
    return [weight * inverse for weight in weights], largest + jnp.log2(total)


def merged(parts: Sequence[tuple[jax.Array, jax.Array]]) -> tuple[jax.Array, jax.Array]:
    """The output over all keys, from those over some keys each: (output, log2 of the row's sum of exponentials, -inf for none).

    The logarithm of the sum likewise. Outputs are [rows, columns], logarithms [rows].
    """
    weights, log_sum = _weights([log for _, log in parts])
    outs = (out * along_rows(weight, out.shape) for (out, _), weight in zip(parts, weights, strict=True))
    return functools.reduce(lambda x, y: x + y, outs), log_sum


COLUMNS = 128  # that a thread block of `add_up` computes, one a thread


def add_up(
    p: Problem, parts: int, outs: jax.Array, lses: jax.Array, sinks: jax.Array | None, interpret: bool
) -> tuple[jax.Array, jax.Array]:
    """The output over all keys and its lse from those of the clusters, by a kernel: `merged`, then `finished`.

    outs: float32 [parts, batch, q_tokens, q_heads, `stored_columns`], flat and with room for `COLUMNS` at the end. lses:
    float32 [parts, batch, q_heads, q_tokens], flat. sinks: [q_heads] or [batch * q_heads], or None. Returns both flat, the
    output with such room.
    """
    columns, rows = stored_columns(p.v_dim), lses.size // parts
    size = rows * columns

    def body(outs: Any, lses: Any, *given: Any) -> None:
        *sinks, out, lse = given
        start = lax.axis_index("block") * COLUMNS
        shares, log_sums = [], []
        for n in range(max(1, COLUMNS // columns)):  # rows of this block
            row = jnp.minimum(lax.div(start, jnp.int32(columns)) + n, rows - 1)
            entry, head, at = _places(p, row)
            weights, log_sum = _weights([lses[part * rows + at] for part in range(parts)])
            factor = None
            if sinks:
                shared = 0 if sinks[0].shape[0] == p.q_heads else entry * p.q_heads
                factor, log_sum = _with_sink(log_sum, sinks[0][shared + head])
            else:
                log_sum = jnp.where(log_sum == -jnp.inf, jnp.inf, log_sum * (1 / LOG2E))
            shares.append(weights if factor is None else [weight * factor for weight in weights])
            log_sums.append((at, log_sum))
        layout = plgpu.Layout.WG_STRIDED((COLUMNS,), vec_size=1)
        first = plgpu.broadcasted_iota(jnp.int32, (COLUMNS,), 0, layout=layout) < columns
        total: Any = 0.0
        for part in range(parts):
            share = shares[0][part]
            if len(shares) > 1:
                share = jnp.where(first, share, shares[1][part])
            total += plgpu.load(outs.at[pl.ds(part * size + start, COLUMNS)], optimized=False) * share
        # Given to the sum alone: Mosaic's search for layouts, which calls itself, would go deeper with each load that has one.
        out[pl.ds(start, COLUMNS)] = plgpu.layout_cast(total, layout).astype(out.dtype)

        @pl.when(lax.rem(start, jnp.int32(columns)) == 0)
        def store_log_sums() -> None:  # where a row's first columns are
            for at, log_sum in log_sums:
                lse[at] = log_sum

    return engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_flash_decoding_sum",
            {"block": -(-size // COLUMNS)},
            warpgroups=1,
            approx_math=True,
            interpret=interpret,
            share=0.0,
        ),
        out_type=(
            jax.ShapeDtypeStruct((-(-size // COLUMNS) * COLUMNS,), p.dtype),
            jax.ShapeDtypeStruct((rows,), jnp.float32),
        ),
        scratch_types={},
    )(outs, lses, *([] if sinks is None else [sinks]))


def _places(p: Problem, row: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Batch entry and head of a row of [batch, q_tokens, q_heads], and which one of [batch, q_heads, q_tokens] it is."""
    token, head = lax.div(row, jnp.int32(p.q_heads)), lax.rem(row, jnp.int32(p.q_heads))
    entry, token = lax.div(token, jnp.int32(p.q_tokens)), lax.rem(token, jnp.int32(p.q_tokens))
    return entry, head, (entry * p.q_heads + head) * p.q_tokens + token


def _with_sink(log_sum: jax.Array, sink: jax.Array) -> tuple[jax.Array, jax.Array]:
    """By what a sink scales the output of a row, and the row's lse as `finished` has it."""
    keys = OnlineSoftmax(jnp.maximum(log_sum, LOWEST), jnp.where(log_sum == -jnp.inf, 0.0, 1.0))
    softmax, rescale = keys.with_sink(sink * LOG2E)
    return jnp.where(softmax.row_sum == 0, 0.0, rescale / softmax.row_sum), softmax.log_sum_exp()


def finished(out: jax.Array, lse: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """Output and lse of all keys with the rows' sinks, and lse as backward wants it: +inf for a row that sees nothing."""
    if sinks is not None:
        keys = OnlineSoftmax(jnp.maximum(lse, LOWEST), jnp.where(lse == -jnp.inf, 0.0, 1.0))
        softmax, rescale = keys.with_sink(sinks * LOG2E)
        return softmax.normalise(out, some_see_nothing=True, rescale=rescale), softmax.log_sum_exp()
    return out, jnp.where(lse == -jnp.inf, jnp.inf, lse * (1 / LOG2E))
