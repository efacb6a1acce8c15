"""Attention through XLA, for any floats on any machine: what the kernels are held against, and what runs where they cannot."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.mask import mask_of, seen_tokens, some_see_nothing
from mgpu_ops.attention.problem import BackwardProblem, Problem
from mgpu_ops.core.limits import itemsize_of

_CHUNK_BYTES = 2**31  # of scores in memory at a time


def forward(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, *rest: Any) -> tuple[jax.Array, jax.Array]:
    """Output [batch, q_tokens, q_heads, head_dim] of q's dtype, and log2 of each row's sum of exponentials, +inf for none.

    `rest`: `Inputs.arrays()`. Scores and softmax are float32 (float64 where q is).
    """
    p, inputs = problem, Inputs.of(problem, tuple(rest))
    if some_see_nothing(p) or p.left is not None or p.right is not None:  # what nobody sees has no say, be it NaN
        rows_seen, keys_seen = (x[..., None] for x in seen_tokens(p, inputs.lengths, inputs.segments, inputs.bias))
        q, k, v = (jnp.where(seen, x, 0) for seen, x in ((rows_seen, q), (keys_seen, k), (keys_seen, v)))
    group = p.q_heads // p.kv_heads
    accurate = np.promote_types(q.dtype, np.float32)
    row_bytes = group * p.kv_tokens * accurate.itemsize
    rows = min(p.q_tokens, max(1, _CHUNK_BYTES // row_bytes))  # at a time, of the heads that share one head of keys
    pieces = -(-p.q_tokens // rows)
    seen = _pad_rows(mask_of(p, inputs.lengths, inputs.segments), 1, pieces * rows)
    bias = None if inputs.bias is None else _pad_rows(inputs.bias, 2, pieces * rows)

    def one(x: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
        """The heads that share one head of keys: q [q_tokens, group, head_dim], k and v [kv_tokens, head_dim]."""
        b, n, q, k, v = x

        @jax.checkpoint  # the scores of one piece are computed again where a gradient is taken, not kept
        def piece(x: tuple[Any, ...]) -> tuple[jax.Array, jax.Array]:
            first, q = x
            s = _product("tgd,sd->gts", q, k) * inputs.options[0]
            if p.soft_cap:
                s = inputs.options[1] * jnp.tanh(s / inputs.options[1])
            if bias is not None:
                of_batch = lax.dynamic_slice_in_dim(bias[0 if bias.shape[0] == 1 else b], first, rows, 1)
                heads = lax.dynamic_slice_in_dim(of_batch, n * group, group) if of_batch.shape[0] > 1 else of_batch
                s = jnp.where(heads == -jnp.inf, -jnp.inf, s + heads.astype(accurate))
            some_seen = lax.dynamic_slice_in_dim(seen[0 if seen.shape[0] == 1 else b], first, rows)
            s = jnp.where(some_seen[None] & ~(s <= -1e30), s, -jnp.inf)  # NaN stays
            m = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
            nothing = m == -jnp.inf
            m = jnp.where(nothing, 0.0, m)
            e = jnp.exp(s - m)
            total = jnp.where(nothing, 1.0, e.sum(-1, keepdims=True))
            out = _product("gts,sd->tgd", (e / total).astype(v.dtype), v)
            out = jnp.where(nothing.swapaxes(0, 1), 0.0, out)
            lse = jnp.where(nothing, jnp.inf, (m + jnp.log(total)) * LOG2E)
            return out.astype(q.dtype), lse[..., 0].T.astype(jnp.float32)

        starts = jnp.arange(pieces) * rows
        by_piece = _pad_rows(q, 0, pieces * rows).reshape(pieces, rows, *q.shape[1:])
        out, lse = lax.map(piece, (starts, by_piece))
        return out.reshape(-1, *q.shape[1:])[: p.q_tokens], lse.reshape(-1, group)[: p.q_tokens].T

    count = p.batch * p.kv_heads
    number = jnp.arange(count)
    by_head = q.reshape(p.batch, p.q_tokens, p.kv_heads, group, p.head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = (x.transpose(0, 2, 1, 3).reshape(count, p.kv_tokens, p.head_dim) for x in (k, v))
    chunk = max(1, _CHUNK_BYTES // (row_bytes * p.q_tokens))
    each = (number // p.kv_heads, number % p.kv_heads, by_head.reshape(count, *by_head.shape[2:]), keys, values)
    known = isinstance(p.batch, int)  # a symbolic number cannot be cut into chunks
    out, lse = lax.map(one, each, batch_size=min(chunk, count) if known else None)
    out = out.reshape(p.batch, p.kv_heads, p.q_tokens, group, p.head_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(q.shape), lse.reshape(p.batch, p.q_heads, p.q_tokens)


def _pad_rows(x: jax.Array, axis: int, rows: int) -> jax.Array:
    """x with zeros (False) up to `rows` along an axis."""
    widths = [(0, 0)] * x.ndim
    widths[axis] = (0, rows - x.shape[axis])
    return jnp.pad(x, widths)


def _product(axes: str, x: jax.Array, y: jax.Array) -> jax.Array:
    """einsum with sums in float32 at least. XLA's CPU has no such products of 16-bit floats for every shape."""
    accurate = np.promote_types(x.dtype, np.float32)

    def einsum(x: jax.Array, y: jax.Array) -> jax.Array:
        return jnp.einsum(axes, x, y, preferred_element_type=accurate)

    if x.dtype == accurate:
        return einsum(x, y)
    return lax.platform_dependent(x, y, cpu=lambda x, y: einsum(x.astype(accurate), y.astype(accurate)), default=einsum)


def backward(
    problem: BackwardProblem,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out_grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    *rest: Any,
) -> tuple[jax.Array, ...]:
    """Gradients with respect to q, k, v and, with `bias_grad`, the bias, from those of the output.

    delta: [batch, q_heads, q_tokens], the rows' sums of output times its gradient, less log2(e) times lse's gradient. Here it
    only brings in the latter: XLA differentiates `forward`.
    """
    inputs = Inputs.of(problem, tuple(rest))

    def of(q: jax.Array, k: jax.Array, v: jax.Array, bias: Any) -> tuple[jax.Array, jax.Array]:
        with_bias = Inputs(inputs.options, inputs.lengths, inputs.segments, bias)
        out, lse = forward(problem, q, k, v, *with_bias.arrays())
        return out, jnp.where(lse == jnp.inf, 0.0, lse)

    (out, lse), pull = jax.vjp(of, q, k, v, inputs.bias)
    rows = jnp.einsum("btnd,btnd->bnt", out.astype(delta.dtype), out_grad.astype(delta.dtype))
    lse_grad = ((rows - delta) / LOG2E).astype(jnp.float32)
    # Reshaped: to JAX a symbolic batch that one of its caches remembers is another one.
    dq, dk, dv, dbias = pull((out_grad.reshape(out.shape), lse_grad.reshape(lse.shape)))
    return (dq, dk, dv, dbias) if problem.bias_grad else (dq, dk, dv)


def flops(problem: Problem) -> int:
    """Multiplications and additions of the two products of the forward pass, over what is visible (lengths, segments apart)."""
    return 4 * problem.batch * problem.q_heads * problem.head_dim * pairs(problem)


def pairs(problem: Problem) -> int:
    """How many (row, key) pairs of one head are visible where no lengths or segments say less."""
    p = problem
    rows = np.arange(p.q_tokens) + (p.kv_tokens - p.q_tokens if p.align == "bottom_right" else 0)
    low = 0 if p.left is None else np.maximum(0, rows - p.left)
    high = p.kv_tokens if p.right is None else np.minimum(p.kv_tokens, rows + p.right + 1)
    return int(np.maximum(0, high - low + 0 * rows).sum())


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms of the row or of all): weights and output are rounded."""
    return 0.03 if problem.dtype == "bfloat16" else 0.004


def backward_tolerance(problem: BackwardProblem) -> float:
    """Largest allowed error of any gradient, as `tolerance`. The true dq of a row that sees one key is 0, a difference of
    terms that were rounded.
    """
    return 5 * tolerance(problem)


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    queries, keys = p.batch * p.q_tokens * p.q_heads, p.batch * p.kv_tokens * p.kv_heads
    bias = p.q_heads * p.q_tokens * p.kv_tokens * itemsize_of(p.bias) if p.bias != "none" else 0
    return 2 * (queries + keys) * p.head_dim * itemsize_of(p.dtype) + 4 * queries + bias


def backward_flops(problem: BackwardProblem) -> int:
    """Multiplications and additions of the five products of the backward pass."""
    return flops(problem) // 2 * 5


def backward_bytes_moved(problem: BackwardProblem) -> int:
    """Each input read once and each output written once."""
    p = problem
    queries, keys = p.batch * p.q_tokens * p.q_heads, p.batch * p.kv_tokens * p.kv_heads
    bias = p.q_heads * p.q_tokens * p.kv_tokens * itemsize_of(p.bias) if p.bias != "none" else 0
    return (3 * queries + 4 * keys) * p.head_dim * itemsize_of(p.dtype) + 8 * queries + bias * (1 + p.bias_grad)
