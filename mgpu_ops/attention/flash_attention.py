"""flash_attention: softmax(scale q k^T + bias, where visible) v for each head, forward and backward, for NVIDIA Hopper.

`problem.py` says what is computed and which configs can run it, `visible.py` which key a row sees, `model.py` which configs are
worth trying; `forward.py` and `backward.py` are the kernels from load to store, `launch.py` and `operands.py` their
arrays, `reference.py` the same through XLA. Here is the public function with its gradient and batching rules, and the specs of
the two ops.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mgpu_ops import integers
from mgpu_ops.attention import cudnn, reference
from mgpu_ops.attention.inputs import LOG2E
from mgpu_ops.attention.mask import seen_tokens
from mgpu_ops.attention.model import (
    backward_candidates,
    backward_cost,
    backward_default,
    backward_inputs,
    backward_space,
    candidates,
    cost,
    default,
    distance,
    inputs,
    space,
)
from mgpu_ops.attention.problem import (
    BACKWARD_SHAPES,
    BACKWARD_SUITES,
    BIASES,
    SHAPES,
    SUITES,
    BackwardConfig,
    BackwardProblem,
    Config,
    Problem,
    check,
    check_backward,
    supports,
    supports_backward,
)
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call says beside its arrays."""

    causal: bool
    window: tuple[int, int]  # -1: no bound
    align: str
    lengths: bool
    segments: bool
    soft_cap: bool
    deterministic: bool
    bias_grad: bool  # the bias is more than a mask
    config: Config | None
    backward_config: BackwardConfig | None
    backend: dispatch.Backend | None


type Window = Sequence[int | None]
type Integers = ArrayLike | Sequence[int] | Sequence[Sequence[int]]


class _Options(TypedDict, total=False):
    """The options of `flash_attention`, for its overloads."""

    bias: ArrayLike | None
    mask: ArrayLike | None
    causal: bool
    window: Window | None
    q_lengths: Integers | None
    kv_lengths: Integers | None
    q_segment_ids: Integers | None
    kv_segment_ids: Integers | None
    scale: float | None
    soft_cap: float | None
    deterministic: bool
    config: Config | None
    backward_config: BackwardConfig | None
    backend: dispatch.Backend | None


@overload
def flash_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[False] = False, **options: Unpack[_Options]
) -> jax.Array: ...
@overload
def flash_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: Literal[True], **options: Unpack[_Options]
) -> tuple[jax.Array, jax.Array]: ...
@overload
def flash_attention(
    q: ArrayLike, k: ArrayLike, v: ArrayLike, *, return_lse: bool, **options: Unpack[_Options]
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def flash_attention(
    q: ArrayLike,
    k: ArrayLike,
    v: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    causal: bool = False,
    window: Window | None = None,
    q_lengths: Integers | None = None,
    kv_lengths: Integers | None = None,
    q_segment_ids: Integers | None = None,
    kv_segment_ids: Integers | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    return_lse: bool = False,
    deterministic: bool = False,
    config: Config | None = None,
    backward_config: BackwardConfig | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """out[b, t, n] = sum_s w[s] v[b, s, n'], w = softmax over visible s of scale q[b, t, n] . k[b, s, n'] + bias[b, n, t, s].

    n' is n's head of keys: n // (q heads / kv heads). The layout is that of `jax.nn.dot_product_attention`. Row t is aligned
    with key t + kv_tokens - q_tokens: the last query with the last key.

    Args:
      q: [batch, q_tokens, q_heads, head_dim], or without batch. bfloat16 or float16 and head_dim up to 256 for the kernels (64,
        128 and 256 as they are, others padded); other floats run through XLA.
      k: [batch, kv_tokens, kv_heads, head_dim] of q's dtype; kv_heads divides q_heads.
      v: [batch, kv_tokens, kv_heads, v_head_dim].
      bias: floats that broadcast to [batch, q_heads, q_tokens, kv_tokens], added to the scores. Differentiable.
      mask: booleans that broadcast to the same; False hides a key from a row.
      causal: a row sees no key after the one it is aligned with.
      window: (left, right): a row sees that many keys before and after the one it is aligned with; None: all.
      q_lengths, kv_lengths: integers [batch] (or a scalar, without batch): tokens from there on are padding, which no row sees
        and whose own rows give zeros. Rows are then aligned by these lengths. A length out of range counts as the nearest.
      q_segment_ids, kv_segment_ids: integers [batch, q_tokens] and [batch, kv_tokens] (or without batch): a row sees the keys
        of its own id only. kv_segment_ids defaults to q_segment_ids. Packed sequences, whose ids grow, skip what they
        cannot see. Ids of any integer dtype are compared by value.
      scale: of the scores; 1 / sqrt(head_dim) by default.
      soft_cap: scores become soft_cap * tanh(scale q . k / soft_cap), before the bias.
      return_lse: also return the natural logarithm of each row's sum of exponentials, [batch, q_heads, q_tokens] float32, -inf
        for a row that sees nothing. Differentiable.
      deterministic: the gradients are bitwise equal from run to run; slower.
      config, backward_config: run the kernels with these instead of the database's.
      backend: "mosaic" (the kernels; a Hopper GPU), "interpret" (the kernels in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and otherwise "xla", logging once why.

    Returns:
      [batch, q_tokens, q_heads, v_head_dim] of q's dtype: zeros, with zero gradients, for a row that sees nothing. Scores below
      -1e30 count as not visible. A NaN that a row sees shows in its output, its lse (but for a NaN in v) and its gradients.
      What lengths cut off, and queries, keys and values that segments or a mask hide from all, have no say, NaN or not; any
      other NaN may also show where it is not seen, as zero times NaN is NaN.

    Works under jit, grad (reverse mode), vmap (folded into the batch), scan, jax.checkpoint and shard_map.

    Raises:
      ValueError: ranks, shapes, dtypes, windows or lengths that do not fit each other, empty dimensions, an unknown backend, a
        config that cannot run.
      TypeError: floats, integers or booleans expected and not found.

    Source: Dao (arXiv 2307.08691), Shah et al. (arXiv 2407.08608); measurements in docs/kernels/flash_attention.md.
    """
    q, k, v = (jnp.asarray(x) for x in (q, k, v))
    batched = _check_qkv(q, k, v)
    if not batched:
        q, k, v = (x[None] for x in (q, k, v))
    call = _Call(
        causal=bool(causal),
        window=_checked_window(window),
        align="bottom_right",
        lengths=q_lengths is not None or kv_lengths is not None,
        segments=q_segment_ids is not None or kv_segment_ids is not None,
        soft_cap=soft_cap is not None,
        deterministic=bool(deterministic),
        bias_grad=bias is not None,
        config=_checked_config("config", config, Config),
        backward_config=_checked_config("backward_config", backward_config, BackwardConfig),
        backend=dispatch.requested_backend(backend),
    )
    lengths = _checked_lengths(q, k, q_lengths, kv_lengths) if call.lengths else ()
    segments = _checked_segments(q, k, q_segment_ids, kv_segment_ids) if call.segments else ()
    hides = mask is not None or kv_segment_ids is not None or (call.lengths and call.segments)
    out, lse = attend(call, q, k, v, _checked_bias(q, k, bias, mask), scale, soft_cap, lengths, segments, hides)
    if not batched:
        out, lse = out[0], lse[0]
    return (out, lse) if return_lse else out


def attend(
    call: _Call,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    bias: jax.Array | None,
    scale: float | None,
    soft_cap: float | None,
    lengths: tuple[jax.Array, ...],
    segments: tuple[jax.Array, ...],
    hides: bool,
) -> tuple[jax.Array, jax.Array]:
    """Checked, batched arguments to output and natural-log lse.

    hides: bias or segments may hide a token from all. Zeros then take its place: in a kernel, its NaN times 0 would be NaN.
    """
    if hides:
        seen = seen_tokens(_problem(call, q, k, bias), lengths or None, segments or None, bias)
        rows, keys = (x[..., None] for x in seen)
        q, k, v = jnp.where(rows, q, 0), jnp.where(keys, k, 0), jnp.where(keys, v, 0)
    scale = 1.0 / math.sqrt(q.shape[-1]) if scale is None else _checked_number("scale", scale, positive=False)
    cap = 0.0 if soft_cap is None else _checked_number("soft_cap", soft_cap, positive=True)
    if scale < 0:  # the kernel takes the largest score before it scales
        q, scale = -q, -scale
    options = jnp.array([scale, cap, scale / cap if cap else 0.0], np.promote_types(q.dtype, np.float32))
    wide = max(q.shape[-1], v.shape[-1])
    v_dim = v.shape[-1]
    q, k, v = (jnp.pad(x, [(0, 0)] * 3 + [(0, wide - x.shape[-1])]) for x in (q, k, v))
    extra = tuple(x for x in (*lengths, *segments) if x is not None)
    q, k, v, options, *rest = mesh.same_mesh_axes(q, k, v, options, *extra, *(() if bias is None else (bias,)))
    bias = None if bias is None else rest.pop()
    out, lse = _attention(call, q, k, v, bias, options, tuple(rest))
    return out[..., :v_dim], jnp.where(lse == jnp.inf, -jnp.inf, lse / LOG2E)


def top_left_attention(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    *,
    bias: ArrayLike | None,
    mask: ArrayLike | None,
    causal: bool,
    window: tuple[int, int] | None,
    q_lengths: ArrayLike | None,
    kv_lengths: ArrayLike | None,
    scale: float | None,
    backend: dispatch.Backend | None,
) -> tuple[jax.Array, jax.Array]:
    """`flash_attention` of batched arguments that fit each other, with lse; row t is aligned with key t, beside lengths too."""
    call = _Call(
        causal=causal,
        window=_checked_window(window),
        align="top_left",
        lengths=q_lengths is not None or kv_lengths is not None,
        segments=False,
        soft_cap=False,
        deterministic=False,
        bias_grad=bias is not None,
        config=None,
        backward_config=None,
        backend=backend,
    )
    lengths = _checked_lengths(q, k, q_lengths, kv_lengths) if call.lengths else ()
    return attend(call, q, k, v, _checked_bias(q, k, bias, mask), scale, None, lengths, (), mask is not None)


def _problem(call: _Call, q: jax.Array, k: jax.Array, bias: jax.Array | None) -> Problem:
    return Problem(
        batch=q.shape[0],
        q_tokens=q.shape[1],
        kv_tokens=k.shape[1],
        q_heads=q.shape[2],
        kv_heads=k.shape[2],
        head_dim=q.shape[3],
        dtype=q.dtype.name,
        causal=call.causal,
        window_left=call.window[0],
        window_right=call.window[1],
        align=call.align,
        lengths=call.lengths,
        segments=call.segments,
        bias="none" if bias is None else bias.dtype.name,
        soft_cap=call.soft_cap,
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(
    call: _Call, q: jax.Array, k: jax.Array, v: jax.Array, bias: jax.Array | None, options: jax.Array, extra: tuple[Any, ...]
) -> tuple[jax.Array, jax.Array]:
    """Output and log2 of each row's sum of exponentials. extra: lengths and segments, as in `Inputs.arrays()`."""
    return _forward_product(call)(q, k, v, bias, options, extra)


def _attention_forward(call: _Call, q: Any, k: Any, v: Any, bias: Any, options: Any, extra: Any) -> Any:
    out, lse = _attention(call, q, k, v, bias, options, extra)
    return (out, lse), (q, k, v, bias, options, extra, out, lse)


def _attention_backward(call: _Call, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[Any, ...]:
    q, k, v, bias, options, extra, out, lse = saved
    out_grad, lse_grad = gradients
    accurate = np.promote_types(q.dtype, np.float32)
    delta = jnp.einsum("btnd,btnd->bnt", out.astype(accurate), out_grad.astype(accurate)) - LOG2E * lse_grad
    delta = jnp.where(lse == jnp.inf, 0.0, delta)  # rows that see nothing, whatever their output's gradient
    dq, dk, dv, *dbias = _backward_product(call)(q, k, v, bias, options, extra, out_grad.astype(q.dtype), lse, delta)
    if bias is not None and not dbias:
        dbias = [jnp.zeros_like(bias)]  # a mask
    return dq, dk, dv, dbias[0] if dbias else None, jnp.zeros_like(options), None


_attention.defvjp(_attention_forward, _attention_backward)


@functools.cache
def _forward_product(call: _Call) -> Any:
    """(q, k, v, bias, options, extra) to (output, lse): one kernel, or XLA. Jitted, so that eager calls trace once."""

    @jax.custom_batching.custom_vmap
    def product(q: Any, k: Any, v: Any, bias: Any, options: Any, extra: Any) -> Any:
        problem = _problem(call, q, k, bias)
        arrays = q, k, v, options, *extra, *(() if bias is None else (bias,))
        return dispatch.run(FORWARD, problem, arrays, config=call.config, backend=call.backend)

    @product.def_vmap
    def _(size: int, batched: Any, *arrays: Any) -> Any:
        if size == 0:
            out = _of_none(run, batched, arrays)
            return out, (True,) * len(out)
        folded = _fold(size, batched, arrays)
        return jax.tree.map(lambda x: _unfold(size, x), run(*folded)), (True, True)

    run = jax.jit(product)
    return run


@functools.cache
def _backward_product(call: _Call) -> Any:
    """(q, k, v, bias, options, extra, gradient of the output, lse, delta) to the gradients of q, k, v and the bias if any."""

    @jax.custom_batching.custom_vmap
    def product(q: Any, k: Any, v: Any, bias: Any, options: Any, extra: Any, out_grad: Any, lse: Any, delta: Any) -> Any:
        has_bias = bias is not None
        fields = dataclasses.asdict(_problem(call, q, k, bias))
        problem = BackwardProblem(**fields, deterministic=call.deterministic, bias_grad=call.bias_grad)
        arrays = q, k, v, out_grad, lse, delta, options, *extra, *((bias,) if has_bias else ())
        return dispatch.run(BACKWARD, problem, arrays, config=call.backward_config, backend=call.backend)

    @product.def_vmap
    def _(size: int, batched: Any, *arrays: Any) -> Any:
        if size == 0:
            out = _of_none(run, batched, arrays)
            return out, (True,) * len(out)
        dq, dk, dv, *dbias = (_unfold(size, x) for x in run(*_fold(size, batched, arrays, whole_bias=True)))
        if dbias and arrays[3].shape[-4] == 1:  # one bias for the whole batch of an example
            dbias = [dbias[0].sum(1, keepdims=True)]
        out = dq, dk, dv, *dbias
        return out, (True,) * len(out)

    run = jax.jit(product)
    return run


def _of_none(product: Any, batched: Any, arrays: tuple[Any, ...]) -> tuple[jax.Array, ...]:
    """What a product gives that is mapped over no examples."""
    one = jax.tree.map(
        lambda x, mapped: jax.ShapeDtypeStruct(x.shape[1:] if mapped else x.shape, x.dtype), arrays, tuple(batched)
    )
    return tuple(jnp.zeros((0, *x.shape), x.dtype) for x in jax.eval_shape(product, *one))


def _fold(size: int, batched: Any, arrays: tuple[Any, ...], whole_bias: bool = False) -> tuple[Any, ...]:
    """A vmapped product's arguments with the mapped axis, of `size`, folded into the batch.

    A bias with one entry for all of the batch stays that where every example shares it, unless `whole_bias`.
    """
    batch = arrays[0].shape[1] if batched[0] else arrays[0].shape[0]

    def fold(x: jax.Array, mapped: bool) -> jax.Array:
        x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
        return x.reshape(-1, *x.shape[2:])

    def fold_bias(x: jax.Array, mapped: bool) -> jax.Array:
        x = x if mapped else x[None]
        if x.shape[:2] == (1, 1) and not whole_bias:
            return x[0]
        return jnp.broadcast_to(x, (size, batch, *x.shape[2:])).reshape(-1, *x.shape[2:])

    q, k, v, bias, options, *rest = arrays
    mapped = batched[0], batched[1], batched[2]
    folded = [fold(x, m) for x, m in zip((q, k, v), mapped, strict=True)]
    folded_bias = None if bias is None else fold_bias(bias, batched[3])
    return (*folded, folded_bias, options, *jax.tree.map(fold, tuple(rest), tuple(batched[5:])))


def _unfold(size: int, x: jax.Array) -> jax.Array:
    return x.reshape(size, -1, *x.shape[1:])


# --- Arguments -------------------------------------------------------------------------------------------------------


def _check_qkv(q: jax.Array, k: jax.Array, v: jax.Array) -> bool:
    """Raises for q, k and v that do not fit each other; whether they have a batch."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {x.dtype}: flash_attention takes floats; cast it first")
        if x.ndim not in (3, 4) or x.ndim != q.ndim:
            raise ValueError(
                f"{name} has shape {x.shape}: q, k and v must all be [batch, tokens, heads, head_dim] or all [tokens, heads, "
                "head_dim]"
            )
        if x.dtype != q.dtype:
            raise ValueError(f"{name} has dtype {x.dtype} and q {q.dtype}: cast them to one")
        if not all(isinstance(n, int) for n in x.shape[-3:]):
            raise ValueError(
                f"{name} has shape {x.shape}: only the batch may be symbolic. Export a function for each number of tokens, or "
                "for the most there are, and say with q_lengths and kv_lengths how many count"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: an empty dimension leaves nothing to attend to")
    if q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q{q.shape} and k{k.shape} differ in batch: {q.shape[0]} != {k.shape[0]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(f"k{k.shape} and v{v.shape} differ: each key needs a value, so all but head_dim must be equal")
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q{q.shape} and k{k.shape} differ in head_dim: {q.shape[-1]} != {k.shape[-1]}")
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q has {q.shape[-2]} heads and k {k.shape[-2]}: each key head serves the same number of query heads, so the first "
            "must be a multiple of the second"
        )
    return q.ndim == 4


def _checked_window(window: Any) -> tuple[int, int]:
    """(left, right) with -1 for no bound."""
    if window is None:
        return -1, -1
    if not isinstance(window, Sequence) or len(window) != 2:
        raise ValueError(f"window={window!r} must be (left, right): keys before and after the aligned one, None for all")
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if not isinstance(side, int | np.integer) or isinstance(side, bool):
            raise TypeError(f"window={window!r}: {name} must be a whole number of keys, or None for all")
        if side < 0:
            raise ValueError(f"window={window!r}: {name} must be 0 or more keys, or None for all")
    left, right = (-1 if side is None else min(int(side), 2**30) for side in window)
    return left, right


def _checked_number(name: str, value: Any, *, positive: bool) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced: it must be known before the function runs (scale q by a traced value instead)")
    number = float(value)
    if not math.isfinite(number) or number == 0 or (positive and number < 0):
        raise ValueError(f"{name}={value!r} must be a finite number {'above' if positive else 'other than'} 0")
    return number


def _checked_config(name: str, config: Any, kind: type) -> Any:
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{name} is {config!r}: pass a mgpu_ops.FlashAttention{'Backward' * ('back' in name)}Config")
    return config


def _check_shape(name: str, x: Any, shape: tuple[int, ...], meaning: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: it must be {meaning} = {shape}")


def _checked_lengths(q: jax.Array, k: jax.Array, q_lengths: Any, kv_lengths: Any) -> tuple[jax.Array, jax.Array]:
    def one(name: str, lengths: Any, x: jax.Array) -> jax.Array:
        if lengths is None:
            return jnp.full((x.shape[0],), x.shape[1], jnp.int32)
        lengths = integers.array(name, lengths)
        lengths = lengths.reshape(1) if lengths.ndim == 0 and x.shape[0] == 1 else lengths
        _check_shape(name, lengths, x.shape[:1], "[batch]")
        return integers.clipped(lengths, x.shape[1])

    return one("q_lengths", q_lengths, q), one("kv_lengths", kv_lengths, k)


def _checked_segments(q: jax.Array, k: jax.Array, q_ids: Any, kv_ids: Any) -> tuple[jax.Array, jax.Array]:
    if q_ids is None:
        raise ValueError("kv_segment_ids without q_segment_ids: give the queries' segments too")
    if kv_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens and k {k.shape[1]}: give kv_segment_ids beside q_segment_ids")

    def one(name: str, ids: Any, x: jax.Array) -> Any:
        ids = integers.array(name, ids)
        ids = ids[None] if ids.ndim == 1 and x.shape[0] == 1 else ids
        _check_shape(name, ids, x.shape[:2], "[batch, tokens]")
        return ids

    names = "q_segment_ids", "kv_segment_ids"
    q_ids, kv_ids = one(names[0], q_ids, q), one(names[1], q_ids if kv_ids is None else kv_ids, k)
    return integers.comparable(names[0], q_ids, names[1], kv_ids)


def _checked_bias(q: jax.Array, k: jax.Array, bias: Any, mask: Any) -> jax.Array | None:
    """bias, -inf where the mask is False: [batch or 1, q_heads or 1, q_tokens, kv_tokens], or None."""
    shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]

    def four(name: str, x: jax.Array) -> jax.Array:
        full = (1,) * (4 - x.ndim) + x.shape
        if len(full) != 4 or any(have not in (1, want) for have, want in zip(full, shape, strict=True)):
            raise ValueError(
                f"{name} has shape {x.shape}: it must broadcast to [batch, q_heads, q_tokens, kv_tokens] = {shape}"
            )
        return x.reshape(full)

    if bias is not None:
        bias = jnp.asarray(bias)
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias has dtype {bias.dtype}: it must hold floats; pass booleans as mask")
        bias = four("bias", bias)
        if bias.dtype.name not in BIASES and bias.dtype != q.dtype:
            bias = bias.astype(jnp.float32)
    if mask is not None:
        mask = jnp.asarray(mask)
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask has dtype {mask.dtype}: it must hold booleans; pass floats as bias")
        dtype = q.dtype if q.dtype.name in BIASES else jnp.float32
        bias = jnp.where(four("mask", mask), jnp.zeros((), dtype) if bias is None else bias, -jnp.inf)
    return None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], *shape[2:]))


# --- The ops ---------------------------------------------------------------------------------------------------------


def _run(
    problem: Problem, config: Config, gpu: gpus.Gpu, *arrays: jax.Array, interpret: bool = False
) -> tuple[jax.Array, jax.Array]:
    """The forward kernel with `config` on q, k, v and `Inputs.arrays()`. Raises ValueError if it cannot run."""
    from mgpu_ops.attention.forward import launch

    _require("flash_attention", problem, config, supports(problem, gpu) or check(problem, config, gpu), gpu)
    return launch(problem, config, gpu, *arrays, interpret=interpret)


def _run_backward(
    problem: BackwardProblem, config: BackwardConfig, gpu: gpus.Gpu, *arrays: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """The backward kernels with `config` on q, k, v, the output's gradient, lse, delta and `Inputs.arrays()`."""
    from mgpu_ops.attention.backward import launch

    reason = supports_backward(problem, gpu) or check_backward(problem, config, gpu)
    _require("flash_attention_backward", problem, config, reason, gpu)
    return launch(problem, config, gpu, *arrays, interpret=interpret)


def _require(name: str, problem: Any, config: Any, reason: str | None, gpu: gpus.Gpu) -> None:
    if reason is not None:
        raise ValueError(f"{config} cannot run {name} {problem} on {gpu.name}: {reason}")


FORWARD = OpSpec(
    name="flash_attention",
    version=2,
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
    flops=reference.flops,
    bytes=reference.bytes_moved,
    inputs=inputs,
    run=_run,
    reference=reference.forward,
    tolerance=reference.tolerance,
    baseline=cudnn.baseline,
)

BACKWARD = OpSpec(
    name="flash_attention_backward",
    version=1,
    Problem=BackwardProblem,
    Config=BackwardConfig,
    shapes=BACKWARD_SHAPES,
    suites=BACKWARD_SUITES,
    space=backward_space,
    supports=supports_backward,
    check=check_backward,
    candidates=backward_candidates,
    default=backward_default,
    cost=backward_cost,
    distance=distance,
    flops=reference.backward_flops,
    bytes=reference.backward_bytes_moved,
    inputs=backward_inputs,
    run=_run_backward,
    reference=reference.backward,
    tolerance=reference.backward_tolerance,
    baseline=cudnn.backward_baseline,
)
