"""Attention through XLA, for any floats on any machine: the truth for the kernels, and what runs where they cannot."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any, Literal

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.mask import keys_seen, mask_of, some_see_nothing, zero_unseen
from mgpu_ops.attention.problem import BackwardProblem, Problem
from mgpu_ops.core.limits import itemsize_of

_CHUNK_BYTES = 2**31  # of scores in memory at a time


def forward(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array) -> tuple[jax.Array, jax.Array]:
    """Output [batch, q_tokens, q_heads, v_dim] of q's dtype, and the logarithms of rows' sums of exponentials, +inf for none.

    `rest`: `Inputs.arrays()`. Scores and softmax are float32 (float64 where q is). Keys and values of 8 bits become q's dtype,
    in which they are exact, and their scales count in the scores and the output.
    """
    p, inputs = problem, Inputs.of(problem, tuple(rest))
    if inputs.page_table is not None:
        k, v = (_gather_pages(x, inputs.page_table) for x in (k, v))
        p, inputs = dataclasses.replace(p, page_size=0), dataclasses.replace(inputs, page_table=None)
    if p.eight_bits:
        k, v = k.astype(q.dtype), v.astype(q.dtype)
    if some_see_nothing(p) or p.left is not None or p.right is not None:
        q, k, v = zero_unseen(p, inputs, q, k, v)
    group, count = p.q_heads // p.kv_heads, p.batch * p.kv_heads
    row_bytes = group * p.kv_tokens * np.promote_types(q.dtype, np.float32).itemsize
    rows = min(p.q_tokens, max(1, _CHUNK_BYTES // row_bytes))
    of_head = _KvHead.of(p, inputs, rows, -(-p.q_tokens // rows))

    number = jnp.arange(count)
    by_head = q.reshape(p.batch, p.q_tokens, p.kv_heads, group, p.head_dim).transpose(0, 2, 1, 3, 4)
    keys, values = (x.transpose(0, 2, 1, 3).reshape(count, p.kv_tokens, x.shape[3]) for x in (k, v))
    each = (number // p.kv_heads, number % p.kv_heads, by_head.reshape(count, *by_head.shape[2:]), keys, values)
    at_once = max(1, _CHUNK_BYTES // (row_bytes * p.q_tokens))
    known = isinstance(p.batch, int)  # a symbolic number cannot be cut into chunks
    out, lse = _mapped(of_head, each, at_once, count) if known else lax.map(of_head, each)
    out = out.reshape(p.batch, p.kv_heads, p.q_tokens, group, p.v_dim).transpose(0, 2, 1, 3, 4)
    return out.reshape(*q.shape[:3], p.v_dim), lse.reshape(p.batch, p.q_heads, p.q_tokens)


def _mapped(f: Callable[[Any], Any], each: Any, at_once: int, count: int) -> Any:
    """f of each of `count`, `at_once` at a time.

    One iteration is no loop: of one within the other, partitioned over CPUs, XLA's passes did not end.
    """
    return jax.vmap(f)(each) if at_once >= count else lax.map(f, each, batch_size=at_once if at_once > 1 else None)


def _gather_pages(pool: jax.Array, table: jax.Array) -> jax.Array:
    """pool[pages, page_size, heads, head_dim] as [batch, tokens, heads, head_dim]; an index out of range is the nearest."""
    gathered = pool.at[jnp.clip(table, 0, pool.shape[0] - 1)].get(mode="promise_in_bounds")
    return gathered.reshape(table.shape[0], -1, *pool.shape[2:])


@dataclasses.dataclass(frozen=True)
class _KvHead:
    """Attention of the query heads that share one kv head, in chunks of `rows` query rows to save memory."""

    problem: Problem
    inputs: Inputs  # bias padded to whole chunks of rows
    mask: jax.Array  # [batch or 1, rows, kv_tokens], padded likewise
    rows: int
    chunks: int

    @staticmethod
    def of(problem: Problem, inputs: Inputs, rows: int, chunks: int) -> _KvHead:
        mask = _pad_rows(mask_of(problem, inputs.lengths, inputs.segments), 1, chunks * rows)
        bias = None if inputs.bias is None else _pad_rows(inputs.bias, 2, chunks * rows)
        return _KvHead(problem, dataclasses.replace(inputs, bias=bias), mask, rows, chunks)

    def __call__(self, x: tuple[jax.Array, ...]) -> tuple[jax.Array, jax.Array]:
        """(batch entry, kv head, q [q_tokens, group, head_dim], k [kv_tokens, head_dim], v [kv_tokens, v_dim]) -> both."""
        b, n, q, k, v = x

        @jax.checkpoint  # where a gradient is taken, the scores of a chunk are computed again instead of kept
        def chunk(x: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            first, q = x
            out, lse = _softmax_of(self._scores(b, n, first, _product("tgd,sd->gts", q, k)), v, self._sinks(b, n, q.shape[1]))
            if self.inputs.kv_scales is not None:
                out = out * self._kv_scale("v", b, n)
            return out.astype(q.dtype), lse[..., 0].T.astype(jnp.float32)

        starts = jnp.arange(self.chunks) * self.rows
        by_chunk = _pad_rows(q, 0, self.chunks * self.rows).reshape(self.chunks, self.rows, *q.shape[1:])
        out, lse = _mapped(chunk, (starts, by_chunk), 1, self.chunks)
        p, group = self.problem, q.shape[1]
        return out.reshape(-1, group, p.v_dim)[: p.q_tokens], lse.reshape(-1, group)[: p.q_tokens].T

    def _sinks(self, b: jax.Array, n: jax.Array, group: int) -> jax.Array | None:
        """The sinks [group, 1, 1] of the query heads, or None."""
        if (sinks := self.inputs.sinks) is None:
            return None
        of_batch = sinks[0 if sinks.shape[0] == 1 else b]
        return lax.dynamic_slice_in_dim(of_batch, n * group, group)[:, None, None]

    def _kv_scale(self, what: Literal["k", "v"], b: jax.Array, n: jax.Array) -> jax.Array:
        """Of a head's keys or values of 8 bits."""
        scales = self.inputs.kv_scales[0 if what == "k" else 1]
        scale: jax.Array = scales[0 if scales.shape[0] == 1 else b, n]
        return scale

    def _scores(self, b: jax.Array, n: jax.Array, first: jax.Array, products: jax.Array) -> jax.Array:
        """The scores [group, rows, kv_tokens] of a chunk of rows from their products with the keys: -inf where not visible."""
        options = self.inputs.options
        s = products * options[0]
        if self.inputs.kv_scales is not None:
            s = s * self._kv_scale("k", b, n)
        after = self.problem.soft_cap_after_bias
        if self.problem.soft_cap and not after:
            s = options[1] * jnp.tanh(s / options[1])
        if (bias := self.inputs.bias) is not None:
            of_batch = lax.dynamic_slice_in_dim(bias[0 if bias.shape[0] == 1 else b], first, self.rows, 1)
            group = s.shape[0]
            heads = lax.dynamic_slice_in_dim(of_batch, n * group, group) if of_batch.shape[0] > 1 else of_batch
            s = s + heads.astype(s.dtype)
            if after:
                s = options[1] * jnp.tanh(s / options[1])
            s = jnp.where(heads == -jnp.inf, -jnp.inf, s)
        mask = lax.dynamic_slice_in_dim(self.mask[0 if self.mask.shape[0] == 1 else b], first, self.rows)
        return jnp.where(mask[None] & ~(s <= -1e30), s, -jnp.inf)  # NaN stays


def _softmax_of(s: jax.Array, v: jax.Array, sinks: jax.Array | None) -> tuple[jax.Array, jax.Array]:
    """softmax(s) v [rows, group, v_dim], and the logarithms of the sums of exponentials [group, rows, 1], `sinks` among them.

    0 and +inf for a row whose scores are all -inf.
    """
    m = lax.stop_gradient(jnp.max(s, axis=-1, keepdims=True))
    nothing = (s == -jnp.inf).all(-1, keepdims=True)  # not by m: XLA's maxima on CPUs may leave out NaN
    m = jnp.where(m == -jnp.inf, 0.0, m)
    if sinks is not None:  # of which the largest may be +inf
        m = jnp.minimum(jnp.maximum(m, jnp.where(nothing, 0.0, sinks)), jnp.finfo(m.dtype).max)
    e = jnp.exp(s - m)
    total = e.sum(-1, keepdims=True)
    if sinks is not None:
        total = total + jnp.exp(jnp.where(nothing, 0.0, sinks) - m)
    total = jnp.where(nothing, 1.0, total)
    out = _product("gts,sd->tgd", (e / total).astype(v.dtype), v)
    out = jnp.where(nothing.swapaxes(0, 1), 0.0, out)
    return out, jnp.where(nothing, jnp.inf, m + jnp.log(total))


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


def delta_of(out: jax.Array, out_grad: jax.Array, lse: jax.Array, lse_grad: ArrayLike = 0.0) -> jax.Array:
    """The rows' sums of output times its gradient, less the gradient of lse; [batch, q_heads, q_tokens]."""
    accurate = np.promote_types(out.dtype, np.float32)
    delta = jnp.einsum("btnd,btnd->bnt", out.astype(accurate), out_grad.astype(accurate)) - lse_grad
    return jnp.where(lse == jnp.inf, 0.0, delta)  # rows that see nothing, whatever their output's gradient


def backward(problem: BackwardProblem, *arrays: jax.Array) -> tuple[jax.Array, ...]:
    """The gradients of q, k, v and, with `bias_grad`, the bias, from q, k, v, the output's gradient, lse, out_or_delta, inputs.

    out_or_delta: the output, or delta [batch, q_heads, q_tokens], the rows' sums of output times its gradient, less lse's
    gradient. XLA differentiates `forward`, so that of lse, output and delta only lse's gradient is used here.
    """
    q, k, v, out_grad, _, out_or_delta, *rest = arrays
    inputs = Inputs.of(problem, tuple(rest))

    def of(q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None) -> tuple[jax.Array, jax.Array]:
        with_bias = dataclasses.replace(inputs, bias=bias)
        out, lse = forward(problem, q, k, v, *with_bias.arrays())
        return out, jnp.where(lse == jnp.inf, 0.0, lse)

    (out, lse), pull = jax.vjp(of, q, k, v, inputs.bias)
    lse_grad = jnp.zeros_like(lse)
    if out_or_delta.ndim == 3:
        rows = jnp.einsum("btnd,btnd->bnt", out.astype(out_or_delta.dtype), out_grad.astype(out_or_delta.dtype))
        lse_grad = (rows - out_or_delta).astype(jnp.float32)
    # Reshaped: to JAX a symbolic batch that one of its caches remembers is another one.
    dq, dk, dv, dbias = pull((out_grad.reshape(out.shape), lse_grad.reshape(lse.shape)))
    return (dq, dk, dv, dbias) if problem.bias_grad else (dq, dk, dv)


SEGMENTS = 4  # of equal size, that `model.inputs` packs into a sequence


def flops(problem: Problem) -> int:
    """Multiplications and additions of the two products of the forward pass, over what is visible of random inputs."""
    return 2 * problem.batch * problem.q_heads * (problem.head_dim + problem.v_dim) * pairs(problem)


def least_length(tokens: int) -> int:
    """The least length of a batch entry that `model.inputs` draws; the most is `tokens`."""
    return max(1, tokens // 2)


def of_mean_length(problem: Problem) -> Problem:
    """A problem with lengths as one without, whose sequences are as long as the mean of those that `model.inputs` draws.

    With pages, in whole pages.
    """
    p = problem
    if not p.lengths:
        return p
    q, kv = ((least_length(n) + n + 1) // 2 for n in (p.q_tokens, p.kv_tokens))
    if p.page_size:
        kv = math.ceil(kv / p.page_size) * p.page_size
    return dataclasses.replace(p, q_tokens=q, kv_tokens=kv, lengths=False)


def pairs(problem: Problem) -> int:
    """How many (row, key) pairs of one head are visible, of sequences of the mean length and segments of `model.inputs`."""
    p = of_mean_length(problem)
    if p.segments:
        return _pairs_within_segments(p)
    rows = np.arange(p.q_tokens) + p.offset
    low = 0 if p.left is None else np.maximum(0, rows - p.left)
    high = p.kv_tokens if p.right is None else np.minimum(p.kv_tokens, rows + p.right + 1)
    return int(np.maximum(0, high - low + 0 * rows).sum())


def _pairs_within_segments(p: Problem) -> int:
    rows = np.arange(p.q_tokens)
    first, end = (-(-(rows * SEGMENTS // p.q_tokens + i) * p.kv_tokens // SEGMENTS) for i in (0, 1))  # its segment's keys
    low = first if p.left is None else np.maximum(first, rows + p.offset - p.left)
    high = end if p.right is None else np.minimum(end, rows + p.offset + p.right + 1)
    return int(np.maximum(0, high - low).sum())


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms of the row or of all): weights and output are rounded."""
    return 0.03 if problem.dtype == "bfloat16" else 0.004


def backward_tolerance(problem: BackwardProblem) -> float:
    """Largest allowed error of any gradient, as `tolerance`. The true dq of a row that sees one key is 0, a difference of
    terms that were rounded.
    """
    return 5 * tolerance(problem)


def bytes_moved(problem: Problem) -> int:
    """Each input read once, of keys, values and the table of pages what some row sees, and each output written once.

    Of lengths the mean of those that `model.inputs` draws, but for the output, of which the padding is written too.
    """
    whole, p = problem, of_mean_length(problem)
    first, end = keys_seen(p, max(1, p.q_tokens))  # by all rows together
    queries, keys = p.batch * p.q_tokens * p.q_heads, p.batch * int((end - first).sum()) * p.kv_heads
    bias = p.q_heads * p.q_tokens * p.kv_tokens * itemsize_of(p.bias) if p.bias != "none" else 0
    columns = p.head_dim + p.v_dim
    pages = p.batch * math.ceil(int((end - first).sum()) / p.page_size) if p.page_size else 0
    rest = 4 * queries + bias + 4 * p.q_heads * p.sinks + 4 * pages
    rest += 0 if not p.eight_bits else 8 * p.kv_heads
    padding = p.batch * (whole.q_tokens - p.q_tokens) * p.q_heads * (4 + p.v_dim * itemsize_of(p.dtype))
    return columns * (queries * itemsize_of(p.dtype) + keys * p.kv_itemsize) + rest + padding


def backward_flops(problem: BackwardProblem) -> int:
    """Multiplications and additions of the five products of the backward pass, as `flops`: three of head_dim, two of v_dim."""
    p = problem
    return 2 * p.batch * p.q_heads * (3 * p.head_dim + 2 * p.v_dim) * pairs(p)


def backward_bytes_moved(problem: BackwardProblem) -> int:
    """Each input read once and each output written once; of lengths the mean of those that `model.inputs` draws."""
    p, bias_grad = of_mean_length(problem), problem.bias_grad
    queries, keys = p.batch * p.q_tokens * p.q_heads, p.batch * p.kv_tokens * p.kv_heads
    bias = p.q_heads * p.q_tokens * p.kv_tokens * itemsize_of(p.bias) if p.bias != "none" else 0
    columns = 2 * (queries + keys) * (p.head_dim + p.v_dim)
    return columns * itemsize_of(p.dtype) + 4 * queries + bias * (1 + bias_grad)
