"""fp8_matmul: a product of 16-bit arrays that is computed in 8-bit floats, forward and backward, and can be trained with.

Sources: Micikevicius et al., FP8 Formats for Deep Learning, arXiv:2209.05433 (e4m3 forward, e5m2 gradients, delayed scaling);
DeepSeek-V3, arXiv:2412.19437 (scales of blocks).
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, NamedTuple, Self, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats
from mgpu_ops.core import mesh, order
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.matmul import Call, like_the_result, matmul, products, quantizing
from mgpu_ops.matmul.arguments import checked_bias, float_dtype
from mgpu_ops.matmul.rounding import scale_of, scale_or_one
from mgpu_ops.registry import dispatch

type Fp8Scheme = Literal["tensor", "row", "block"]
FP8_SCHEMES: tuple[Fp8Scheme, ...] = get_args(Fp8Scheme.__value__)
E4M3, E5M2 = jnp.dtype("float8_e4m3fn"), jnp.dtype("float8_e5m2")
FLOATS = ("bfloat16", "float16", "float32")


class Fp8State(NamedTuple):
    """What delayed scaling knows of one product's arrays from earlier calls: float32. `Fp8State.init` makes the first.

    Each call puts the largest absolute value of an array into its history, in place of the oldest. The next scale is the
    largest of the history divided by the dtype's largest number (448 of float8_e4m3fn, 57344 of float8_e5m2); where all are 0,
    the scale stays.

    input_scale, kernel_scale, output_grad_scale: [], what the next call divides x, w and the gradient of the result by.
    input_amax_history, kernel_amax_history, output_grad_amax_history: [length], the latest first, and 0 where there was no
      call.
    """

    input_scale: jax.Array
    input_amax_history: jax.Array
    kernel_scale: jax.Array
    kernel_amax_history: jax.Array
    output_grad_scale: jax.Array
    output_grad_amax_history: jax.Array

    @classmethod
    def init(cls, amax_history_length: int = 1024) -> Self:
        """A state that has seen nothing: scales of 1, and so many zeros in each history."""
        whole = isinstance(amax_history_length, int | np.integer) and not isinstance(amax_history_length, bool)
        if not whole or amax_history_length < 1:
            raise ValueError(f"amax_history_length={amax_history_length!r} must be an integer of 1 or more")
        return cls(*(x for _ in range(3) for x in (jnp.ones((), jnp.float32), jnp.zeros(amax_history_length, jnp.float32))))


@dataclasses.dataclass(frozen=True)
class Products:
    """How the products of a call are computed."""

    scheme: Fp8Scheme
    backend: dispatch.Backend | None


@dataclasses.dataclass(frozen=True)
class _Call(Products):
    """The arguments of a call other than its arrays."""

    transpose_b: bool
    high_precision_weight_grad: bool
    x_dtype: str
    w_dtype: str
    out_dtype: str
    epilogue: tuple[str, ...]


def fp8_matmul(
    x: ArrayLike,
    w: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    state: Fp8State | None = None,
    scheme: Fp8Scheme = "tensor",
    high_precision_weight_grad: bool = False,
    transpose_b: bool = False,
    out_dtype: DTypeLike | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """x w + bias + residual in 8-bit floats, forward and backward: `matmul` for training in FP8.

    out = sx sw (x8 w8) + bias + residual with x8 = round(x / sx) and w8 = round(w / sw) in float8_e4m3fn.
    dx = sg sw (g8 w8^T) and dw = sx sg (x8^T g8) with g8 = round(g / sg) of the result's gradient g in float8_e5m2.

    Args:
      x: [..., m, k] bfloat16, float16 or float32; leading dimensions are more rows.
      w: [k, n], or [n, k] with `transpose_b`; bfloat16, float16 or float32.
      bias: [n] floats. Default: none.
      residual: of the result's dtype, and of its shape or one that broadcasts to it. Default: none.
      state: None (default): current scaling, scales are found from the arrays themselves. A `Fp8State`: delayed scaling, its
        scales are used, and what is larger saturates.
      scheme: what shares a scale in current scaling: "tensor" (default), an array; "row", a row or column of an operand;
        "block", 1 x 128 of the left operand of a product and 128 x 128 of the right one.
      high_precision_weight_grad: dw is a product of x and g themselves, in x's dtype. x is then kept for the backward pass
        instead of its copy in 8 bits.
      transpose_b: w is stored as [n, k].
      out_dtype: of the result, bfloat16, float16 or float32; x's dtype by default.
      backend: as in `matmul`, of all three products.

    Returns:
      [..., m, n] of out_dtype. Sums are those of `matmul` of 8-bit floats. Gradients have the dtypes of their arrays.

    Works under jit, grad (reverse mode, once), scan, checkpoint and shard_map; under vmap without a state. For the kernel k, n
    and the number of rows are multiples of 16; else XLA runs, and a log line says why.

    Delayed scaling: the gradient with respect to the state is the next call's state, as in flax's fp8 ops. Take it from
    `jax.grad` and put it in place of the old one, with no optimizer in between. A state is of one product in a program: where
    two share one, JAX adds their next states up. Without a gradient, as in inference, no state changes. In `jax.shard_map` a
    state that is the same everywhere stays so: it sees the whole mesh.

    Memory: the tensor cores read 8 bits along what a product sums over, so the backward pass has transposed copies: of the same
    numbers where an array has one scale, else quantized anew.

    Raises:
      ValueError: shapes or dtypes that do not fit, an unknown scheme or backend, a state with a scheme other than "tensor",
        known scales of a state that are not finite (traced ones: see `matmul`).
      TypeError: not arrays of floats, or a state that is no `Fp8State`.

    Example:
      >>> x, w = jnp.ones((128, 256), jnp.bfloat16), jnp.ones((256, 512), jnp.bfloat16)
      >>> loss = lambda w, state: mgpu_ops.fp8_matmul(x, w, state=state, out_dtype=jnp.float32).sum()
      >>> dw, state = jax.grad(loss, argnums=(0, 1))(w, mgpu_ops.Fp8State.init())
      >>> dw.shape
      (256, 512)

    Source: Micikevicius et al., arXiv:2209.05433 (e4m3 forward, e5m2 gradients, delayed scaling); DeepSeek-V3, arXiv:2412.19437
    (scales of blocks).
    """
    arrays = {"x": x, "w": w} | {name: y for name, y in (("bias", bias), ("residual", residual)) if y is not None}
    found = {name: floats.array("fp8_matmul", name, value) for name, value in arrays.items()}
    transpose_b = flags.checked("transpose_b", transpose_b)
    _check(found["x"], found["w"], scheme, transpose_b)
    if state is not None:
        state = checked_state("fp8_matmul", "state", state)
        if scheme != "tensor":
            raise ValueError(f"scheme={scheme!r} with a state: delayed scaling has one scale for each array; leave scheme out")
    out = float_dtype(out_dtype, None, found["x"].dtype).name
    if out not in FLOATS:
        raise ValueError(f"out_dtype={out} is not one of {', '.join(FLOATS)}: cast the result")
    call = _Call(
        scheme,
        dispatch.requested_backend(backend),
        transpose_b,
        flags.checked("high_precision_weight_grad", high_precision_weight_grad),
        found["x"].dtype.name,
        found["w"].dtype.name,
        out,
        tuple(name for name in ("bias", "residual") if name in found),
    )
    return _of_rows(call, state, *mesh.same_mesh_axes(*found.values()))


def _of_rows(call: _Call, state: Fp8State | None, x: jax.Array, w: jax.Array, *more: jax.Array) -> jax.Array:
    """The product of x's rows, in x's leading dimensions. Raises for another shape of bias or residual."""
    shape = (*x.shape[:-1], w.shape[0 if call.transpose_b else 1])
    by = dict(zip(call.epilogue, more, strict=True))
    if "bias" in by:
        by["bias"] = checked_bias(by["bias"], shape[-1])
    if "residual" in by:
        by["residual"] = mesh.as_rows("residual", like_the_result(by["residual"], shape, call.out_dtype))
    return _product(call, mesh.as_rows("x", x), w, state, *by.values()).reshape(shape)


def _check(x: jax.Array, w: jax.Array, scheme: str, transpose_b: bool) -> None:
    for name, array in (("x", x), ("w", w)):
        if array.dtype.name not in FLOATS:
            raise ValueError(f"{name} is {array.dtype}: fp8_matmul quantizes {', '.join(FLOATS)}; cast it, or call matmul")
    if x.ndim < 2 or w.ndim != 2:
        raise ValueError(f"x has shape {x.shape} and w {w.shape}: pass x of rank 2 or more, and w of rank 2")
    if x.shape[-1] != w.shape[-1 if transpose_b else 0]:
        raise ValueError(f"x{x.shape} and w{w.shape} differ in k (transpose_b={transpose_b})")
    flags.one_of("scheme", scheme, FP8_SCHEMES)


def checked_state(op: str, name: str, state: Any) -> Fp8State:
    """A state of float32 arrays of the right ranks, its scales finite. Raises, with op and argument, for what is none."""
    if not isinstance(state, Fp8State):
        raise TypeError(f"{name} is {state!r:.80}: pass a mgpu_ops.Fp8State, as Fp8State.init() makes it")
    arrays = Fp8State(*(floats.array(op, f"{name}.{field}", x) for field, x in zip(state._fields, state, strict=True)))
    for field, x in zip(arrays._fields, arrays, strict=True):
        rank = 0 if field.endswith("_scale") else 1
        if x.ndim != rank or x.dtype != jnp.float32 or x.size == 0:
            shape = "[]" if rank == 0 else "[length]"
            raise ValueError(
                f"{name}.{field} is {x.dtype}{list(x.shape)}: it must be float32{shape}, as Fp8State.init() makes it"
            )
        if rank == 0:
            floats.check_finite(f"{name}.{field}", x, np.float32)
    return arrays


# --- Products of quantized arrays ---------------------------------------------------------------------------------------

Quantized = tuple[jax.Array, jax.Array]  # values, stored along what the product sums over, and their scales


def both_ways(
    call: Products, x: jax.Array, scale: jax.Array | None, right: tuple[bool, bool], dtype: Any = E4M3
) -> tuple[Quantized, Quantized, jax.Array | None]:
    """x[rows, columns] in 8 bits for a product that sums over its columns, and transposed for one that sums over its rows.

    scale: a known one; then also the largest absolute value that is finite. right: whether each is the right operand of its
    product. With one scale for all of x both are the same numbers.
    """
    if scale is not None:
        values, values_t, largest = quantizing.both_ways((x,), (scale,), dtype, amax="also", backend=call.backend)
        return (values, scale), (values_t, scale), largest
    along, other = ("square" if is_right and call.scheme == "block" else call.scheme for is_right in right)
    values, scales, values_t, scales_t = quantizing.quantized(x, (along, other), dtype, call.backend)
    return (values, scales), (values_t, scales_t), None


def of_gates(
    call: Products,
    of: str,
    arrays: tuple[jax.Array, ...],
    dtype: Any,
    scales: Sequence[Any],
    shared: bool = False,
    row_scale: jax.Array | None = None,
) -> tuple[list[tuple[Quantized, Quantized]], tuple[jax.Array, ...]]:
    """Each result of `quantizing.both_ways`, quantized, and the same transposed; then what else that gives.

    scales: of each result. Known ones: then also its largest value. None: it is found before. shared: all results have the
    largest of their scales. row_scale: as there.
    """
    quantized = functools.partial(
        quantizing.both_ways, arrays, out_dtype=dtype, of=of, row_scale=row_scale, backend=call.backend
    )
    known = None not in scales
    if not known:
        largest = quantized((), amax="only")
        scales = [scale_or_one(one, dtype) for one in ([functools.reduce(jnp.maximum, largest)] if shared else largest)]
    if shared:
        scales = [functools.reduce(jnp.maximum, scales)] * (2 if of == "gate_gradient" else 1)
    found, count = quantized(scales, amax="also" if known else "none"), 2 * len(scales)
    pairs = zip(found[:count:2], found[1:count:2], scales, strict=True)
    return [((values, scale), (values_t, scale)) for values, values_t, scale in pairs], found[count:]


def of_quantized(call: Products, a: Quantized, b: Quantized, out_dtype: str, **epilogue: Any) -> jax.Array:
    """a[m, k] b[n, k]^T, with a bias and a residual if they are given."""
    (a8, scale_a), (b8, scale_b) = a, b
    of = Call(False, True, out_dtype, None, call.backend, bias="bias" in epilogue, residual="residual" in epilogue)
    return products(of, a8, b8, scale_a, scale_b, **epilogue)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _product(call: _Call, x: jax.Array, w: jax.Array, state: Fp8State | None, *more: jax.Array) -> jax.Array:
    """x[m, k] w, w as it is stored; then the bias [n] and the residual [m, n] that the call has."""
    return _forward(call, x, w, state, *more)[0]


def _forward(call: _Call, x: jax.Array, w: jax.Array, state: Fp8State | None, *more: jax.Array) -> Any:
    """The result, and for the backward pass w and x quantized along their other dimension, or x itself, and what they show.

    dw is computed as it is stored: x is its left operand where w is [k, n], else its right one.
    """
    scale_x, scale_w = (None, None) if state is None else (state.input_scale, state.kernel_scale)
    a, a_t, largest_x = both_ways(call, x, scale_x, (False, call.transpose_b))
    b_t, b, largest_w = both_ways(call, w, scale_w, (True, True))
    if call.transpose_b:
        b_t, b = b, b_t
    out = of_quantized(call, a, b, call.out_dtype, **dict(zip(call.epilogue, more, strict=True)))
    seen = None if state is None else (of_mesh(largest_x, x, state), of_mesh(largest_w, w, state))
    bias = more[0] if "bias" in call.epilogue else None
    return out, (x if call.high_precision_weight_grad else a_t, b_t, state, seen, bias)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    x, w8, state, seen, bias = saved
    scale = None if state is None else state.output_grad_scale
    g8, g8_t, largest = both_ways(call, g, scale, (False, not call.transpose_b), E5M2)
    if call.high_precision_weight_grad:
        pair = (g.astype(x.dtype), x) if call.transpose_b else (x, g.astype(x.dtype))
        dw = matmul(*pair, transpose_a=True, out_dtype=call.w_dtype, backend=call.backend)
    else:
        left, right = (g8_t, x) if call.transpose_b else (x, g8_t)
        dw = of_quantized(call, left, right, call.w_dtype)
    dw, g8 = order.weights_first(dw, g8)
    dx = of_quantized(call, g8, w8, call.x_dtype)
    more = {} if bias is None else {"bias": jnp.sum(g, 0, dtype=jnp.float32).astype(bias.dtype)}
    more["residual"] = g
    new = None if state is None else next_state(state, (*seen, of_mesh(largest, g, state)))
    return dx, dw, new, *(more[name] for name in call.epilogue)


_product.defvjp(*first_order("fp8_matmul", _forward, _backward))


# --- Delayed scaling ----------------------------------------------------------------------------------------------------


def of_mesh(largest: jax.Array | None, x: jax.Array, state: Fp8State) -> jax.Array:
    """The largest absolute value of x over the mesh axes along which x differs and the state does not."""
    assert largest is not None
    over = jax.typeof(x).manual_axis_type.varying - jax.typeof(state.input_scale).manual_axis_type.varying
    return lax.pmax(largest, tuple(sorted(over))) if over else largest


def next_state(state: Fp8State, seen: tuple[jax.Array, ...]) -> Fp8State:
    """The state of the next call. seen: the largest values of input, kernel and gradient of the result."""
    found: list[jax.Array] = []
    for amax, dtype, scale, history in zip(seen, (E4M3, E4M3, E5M2), state[::2], state[1::2], strict=True):
        history = jnp.concatenate([amax[None], history[:-1]])
        largest = jnp.max(history)
        found += [jnp.where(largest > 0.0, scale_of(largest, dtype), scale), history]
    return Fp8State(*found)
