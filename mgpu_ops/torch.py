"""The ops on PyTorch tensors, with their gradients: `mgpu_ops.torch.matmul(a, b)`, `grouped_matmul`, `flash_attention`.

A tensor is handed to JAX and back by DLPack: the memory is the same, unless the tensor is not contiguous. JAX runs the op on a
stream of its own, which waits for what torch's current stream was given before; that stream then waits for the result. Nothing
waits on the host, and the work is in the order in which it was asked for. Configs come from the same database as in JAX.

Both libraries take memory of the GPU for themselves: set XLA_PYTHON_CLIENT_PREALLOCATE=false before the first op, or JAX takes
three quarters of it.

Not through `jax.experimental.pallas.mosaic_gpu.as_torch_kernel`: that takes functions of one kernel and nothing else, on the
default stream, and the ops also reshape, pad and sum around their kernels.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

import jax

from mgpu_ops.attention import flash_attention as attention
from mgpu_ops.core import extras
from mgpu_ops.grouped import grouped_matmul as grouped
from mgpu_ops.matmul import matmul as jax_matmul

if not extras.installed("torch"):
    raise extras.MissingExtra("mgpu_ops.torch needs torch: run `pip install torch`, in a version with CUDA for the kernels")
import torch as pt
from torch.autograd.function import once_differentiable

if TYPE_CHECKING:
    from mgpu_ops.core.activations import Activation
    from mgpu_ops.grouped.sizes import Spread
    from mgpu_ops.registry.dispatch import Backend

__all__ = ["flash_attention", "grouped_matmul", "matmul"]


def matmul(
    a: pt.Tensor,
    b: pt.Tensor,
    *,
    bias: pt.Tensor | None = None,
    activation: Activation | None = None,
    residual: pt.Tensor | None = None,
    out_dtype: pt.dtype | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    backend: Backend | None = None,
) -> pt.Tensor:
    """activation(A B + bias) + residual, as `mgpu_ops.matmul`: a is [..., m, k], or [..., k, m] with `transpose_a`; b likewise.

    Tensors of one device and dtype. A weight of `torch.nn.Linear`, [n, k], is read in place with `transpose_b=True`.
    Differentiable once with respect to all tensors. Raises what `mgpu_ops.matmul` raises.
    """
    options = {"out_dtype": _name(out_dtype), "transpose_a": transpose_a, "transpose_b": transpose_b, "backend": backend}
    return _run(jax_matmul, {"a": a, "b": b, "bias": bias, "residual": residual}, options | {"activation": activation})


def grouped_matmul(
    lhs: pt.Tensor,
    rhs: pt.Tensor,
    group_sizes: pt.Tensor,
    *,
    bias: pt.Tensor | None = None,
    activation: Activation = "none",
    residual: pt.Tensor | None = None,
    out_dtype: pt.dtype | None = None,
    transpose_rhs: bool = False,
    spread: Spread = "random",
    backend: Backend | None = None,
) -> pt.Tensor:
    """The rows of each group of lhs[m, k] times that group's matrix of rhs[groups, k, n], as `mgpu_ops.grouped_matmul`.

    group_sizes is read on the device: a negative size counts as 0, and groups end at row m. Differentiable once with respect to
    lhs, rhs, bias and residual. Raises what `mgpu_ops.grouped_matmul` raises.
    """
    tensors = {"lhs": lhs, "rhs": rhs, "group_sizes": group_sizes, "bias": bias, "residual": residual}
    options = {
        "activation": activation,
        "out_dtype": _name(out_dtype),
        "transpose_rhs": transpose_rhs,
        "spread": spread,
        "backend": backend,
    }
    return _run(grouped.grouped_matmul, tensors, options)


def flash_attention(
    q: pt.Tensor,
    k: pt.Tensor,
    v: pt.Tensor,
    *,
    bias: pt.Tensor | None = None,
    mask: pt.Tensor | None = None,
    causal: bool = False,
    window: tuple[int | None, int | None] | None = None,
    q_lengths: pt.Tensor | None = None,
    kv_lengths: pt.Tensor | None = None,
    q_segment_ids: pt.Tensor | None = None,
    kv_segment_ids: pt.Tensor | None = None,
    sinks: pt.Tensor | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    soft_cap_after_bias: bool = False,
    deterministic: bool = False,
    backend: Backend | None = None,
) -> pt.Tensor:
    """Attention of q, k, v [batch, tokens, heads, head_dim], as `mgpu_ops.flash_attention`; its other arguments are the same.

    The layout is that of FlashAttention, not of `scaled_dot_product_attention` [batch, heads, tokens, head_dim], whose tensors
    would be copied after `transpose(1, 2)`. A causal mask aligns the last query with the last key. Differentiable once with
    respect to q, k, v, bias and sinks. Raises what `mgpu_ops.flash_attention` raises.
    """
    tensors = {"q": q, "k": k, "v": v, "bias": bias, "mask": mask, "q_lengths": q_lengths, "kv_lengths": kv_lengths}
    tensors |= {"q_segment_ids": q_segment_ids, "kv_segment_ids": kv_segment_ids, "sinks": sinks}
    options = {"causal": causal, "window": None if window is None else tuple(window), "scale": scale}
    options |= {"soft_cap": soft_cap, "soft_cap_after_bias": soft_cap_after_bias}
    return _run(attention.flash_attention, tensors, options | {"deterministic": deterministic, "backend": backend})


# --- From torch to JAX and back


def _name(dtype: pt.dtype | None) -> str | None:
    return None if dtype is None else str(dtype).removeprefix("torch.")


def _to_jax(tensor: pt.Tensor) -> jax.Array:
    """The same memory, or a copy of a tensor that is not contiguous."""
    return jax.dlpack.from_dlpack(tensor.detach().contiguous())


def _to_torch(array: jax.Array) -> pt.Tensor:
    return pt.from_dlpack(array)


def _run(function: Callable[..., jax.Array], tensors: dict[str, pt.Tensor | None], options: dict[str, Any]) -> pt.Tensor:
    given = {name: tensor for name, tensor in tensors.items() if tensor is not None}
    for name, tensor in given.items():
        if not isinstance(tensor, pt.Tensor):
            raise TypeError(
                f"{name} is {type(tensor).__name__}: mgpu_ops.torch takes tensors, and mgpu_ops itself JAX's arrays"
            )
    if len({tensor.device for tensor in given.values()}) > 1:
        raise ValueError(f"tensors of several devices: {', '.join(f'{name} {x.device}' for name, x in given.items())}")
    programs = _programs(function, tuple(sorted(options.items())))
    if not (pt.is_grad_enabled() and any(tensor.requires_grad for tensor in given.values())):
        with _on(arrays := {name: _to_jax(tensor) for name, tensor in given.items()}):
            return _to_torch(programs.forward(arrays, {}))
    return _Op.apply(programs, tuple(given), *given.values())


def _on(arrays: dict[str, jax.Array]) -> Any:
    """JAX traces and runs for the device of these arrays, which need not be its default one."""
    (device,) = next(iter(arrays.values())).devices()
    return jax.default_device(device)


@dataclasses.dataclass(frozen=True)
class _Programs:
    """A function and its gradient, jitted. Arguments are two dicts of arrays: those with a gradient, and the others."""

    forward: Callable[..., jax.Array]
    with_gradient: Callable[..., tuple[jax.Array, Any]]  # the result, and what the gradient needs: arrays, within a function
    gradient: Callable[..., dict[str, jax.Array]]  # of that and of the result's gradient


@functools.cache
def _programs(function: Callable[..., jax.Array], options: tuple[tuple[str, Any], ...]) -> _Programs:
    def call(some: dict[str, jax.Array], others: dict[str, jax.Array]) -> jax.Array:
        return function(**some, **others, **dict(options))

    def with_gradient(some: dict[str, jax.Array], others: dict[str, jax.Array]) -> tuple[jax.Array, Any]:
        return jax.vjp(lambda some: call(some, others), some)

    return _Programs(jax.jit(call), jax.jit(with_gradient), jax.jit(lambda pullback, g: pullback(g)[0]))


class _Op(pt.autograd.Function):
    """An op of JAX as one of torch's autograd functions."""

    @staticmethod
    def forward(ctx: Any, programs: _Programs, names: tuple[str, ...], *tensors: pt.Tensor) -> pt.Tensor:
        wanted = dict(zip(names, ctx.needs_input_grad[2:], strict=True))
        arrays = {name: _to_jax(tensor) for name, tensor in zip(names, tensors, strict=True)}
        some = {name: x for name, x in arrays.items() if wanted[name]}
        with _on(arrays):
            out, ctx.pullback = programs.with_gradient(some, {name: x for name, x in arrays.items() if not wanted[name]})
        ctx.programs, ctx.names = programs, names
        ctx.save_for_backward(*tensors)  # so that torch refuses a gradient after one was changed in place
        return _to_torch(out)

    @staticmethod
    @once_differentiable
    def backward(ctx: Any, g: pt.Tensor) -> tuple[Any, ...]:
        assert ctx.saved_tensors is not None  # looks whether they are still what they were
        cotangent = _to_jax(g)
        with _on({"g": cotangent}):
            found = ctx.programs.gradient(ctx.pullback, cotangent)
        return None, None, *(_to_torch(found[name]) if name in found else None for name in ctx.names)
