"""Attention through cuDNN, as `jax.nn.dot_product_attention` calls it: timed beside the kernels, and run where it is faster."""

from __future__ import annotations

import math
from typing import Any, Literal

import jax
import jax.numpy as jnp

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.mask import some_see_nothing
from mgpu_ops.attention.problem import BackwardProblem, Problem
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import jax_names
from mgpu_ops.registry.spec import Baseline

_IMPLEMENTATION: Literal["cudnn", "xla"] = "cudnn"


def refuses(problem: Problem) -> str | None:
    """Why cuDNN through JAX does not compute a problem, or None."""
    p = problem
    if p.dtype not in ("bfloat16", "float16"):
        return f"takes 16-bit floats, not {p.dtype}"
    if p.head_dim % 8 or p.head_dim > 256:
        return f"takes a head_dim of up to 256 in multiples of 8, not {p.head_dim}"
    if p.v_head_dim and (p.head_dim, p.v_head_dim) != (192, 128):
        return f"is asked for values of another head_dim beside keys of 192 with 128 only, not {p.head_dim} with {p.v_head_dim}"
    if p.v_head_dim and (isinstance(p, BackwardProblem) or p.lengths or p.bias != "none"):
        return "takes values of another head_dim, through JAX, in a forward pass without lengths and bias only"
    if p.soft_cap:
        return "has no soft cap"
    if p.sinks:
        return "takes no sinks"
    if p.page_size:
        return "is not called with pages"
    if p.eight_bits:
        return "takes keys and values of the queries' dtype"
    if p.segments:
        return "takes no segment ids"
    if p.right is None and p.left is not None:
        return "has no window without a causal mask"
    if p.right:
        return f"sees no keys to the right: window_right={p.right}"
    if p.right == 0 and not same_alignment(p):
        return "aligns the first query with the first key, not the last with the last"
    return None


def same_alignment(problem: Problem) -> bool:
    """Whether a row's own key is the same whether the first query and key are aligned, or the last."""
    return problem.align == "top_left" or (problem.q_tokens == problem.kv_tokens and not problem.lengths)


def attention(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
    """The output, with the scale of `model.inputs`; `extra` is what `Inputs.arrays()` has after the options.

    A bias is rounded to q's dtype, the only one that cuDNN adds.
    """
    inputs = Inputs.of(problem, (None, *extra))
    q_lengths, kv_lengths = inputs.lengths or (None, None)
    if inputs.page_table is not None:
        full = (jnp.full(problem.batch, n, jnp.int32) for n in (problem.q_tokens, problem.kv_tokens))
        scale = 1 / math.sqrt(problem.head_dim)
        return jax_names.cudnn_paged_attention(q, (k, v), inputs.page_table, inputs.lengths or tuple(full), scale)
    return jax.nn.dot_product_attention(
        q,
        k,
        v,
        bias=None if inputs.bias is None else inputs.bias.astype(q.dtype),
        is_causal=problem.right == 0,
        query_seq_lengths=q_lengths,
        key_value_seq_lengths=kv_lengths,
        local_window_size=None if problem.left is None else (problem.left, 0),
        implementation=_IMPLEMENTATION,
    )


def gradients(problem: BackwardProblem, pull: Any, out_grad: jax.Array) -> tuple[jax.Array, ...]:
    """dq, dk, dv and, with `bias_grad`, dbias from the results of `residuals`: the backward pass alone."""
    return pull(out_grad)


def residuals(problem: BackwardProblem, *arrays: Any) -> tuple[Any, jax.Array]:
    """The forward pass: the arguments of `gradients` from the inputs of the backward op."""
    q, k, v, out_grad, _, _, _, *extra = arrays  # lse, output or delta, and options are the kernels' alone
    others, bias = (extra[:-1], extra[-1:]) if problem.bias_grad else (extra, [])

    def output(q: jax.Array, k: jax.Array, v: jax.Array, *bias: jax.Array) -> jax.Array:
        return attention(problem, q, k, v, *others, *bias)

    _, pull = jax.vjp(output, q, k, v, *bias)
    return pull, out_grad


# --- In a call's stead


def differs(problem: Problem) -> str | None:
    """How cuDNN's results differ from those of the kernels, of the problems that it takes; None where they are the same."""
    if problem.bias != "none":
        return "it rounds a bias to the dtype of q"
    if some_see_nothing(problem):
        return "its results are not zero where a row sees no key"
    if isinstance(problem, BackwardProblem) and problem.deterministic:
        return "its gradients differ from run to run"
    return None


def missing() -> str | None:
    """Why cuDNN cannot be called on the GPU in use, or None; None without a GPU."""
    return None if gpus.current() is None else jax_names.why_no_cudnn()


def forward(
    problem: Problem, scale: float, q: jax.Array, k: jax.Array, v: jax.Array, *_: jax.Array
) -> tuple[jax.Array, jax.Array]:
    """The results of the forward op, of a problem without `differs`: output, and the logarithms of the rows' sums."""
    return jax_names.cudnn_attention(q, k, v, scale, problem.right == 0, _window(problem))


def backward(
    problem: BackwardProblem, scale: float, out: jax.Array, q: jax.Array, k: jax.Array, v: jax.Array, *rest: jax.Array
) -> tuple[jax.Array, ...]:
    """The results of the backward op, likewise: dq, dk and dv. `out` is the output, whose lse has no gradient of its own."""
    out_grad, lse, *_ = rest
    return jax_names.cudnn_attention_gradients(q, k, v, (out, lse), out_grad, scale, problem.right == 0, _window(problem))


def _window(problem: Problem) -> int | None:
    """How many keys a row sees at most, its own included; None: as many as there are."""
    return None if problem.left is None else problem.left + 1


# --- What the tuner times


def baseline(problem: Problem) -> Baseline | None:
    """cuDNN's forward pass, of the forward op's inputs, for the problems it takes: with the lse where a call may run it."""
    if refuses(problem) is not None:
        return None
    return Baseline("cudnn", _timed, differs=differs(problem), missing=missing)


def _timed(problem: Problem, q: jax.Array, k: jax.Array, v: jax.Array, options: jax.Array, *extra: jax.Array) -> Any:
    """cuDNN's forward pass with the scale of `model.inputs`."""
    if differs(problem) is None:
        return forward(problem, 1 / math.sqrt(problem.head_dim), q, k, v)
    return attention(problem, q, k, v, *extra)


def backward_baseline(problem: BackwardProblem) -> Baseline | None:
    """cuDNN's backward pass without its forward one, for the problems it takes."""
    if refuses(problem) is not None:
        return None
    return Baseline("cudnn", gradients, residuals, differs=differs(problem), missing=missing)
