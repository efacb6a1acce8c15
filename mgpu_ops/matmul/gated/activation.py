"""gated_activation: activation(gate) * up of a product's two halves, in one small kernel, and a norm behind the product.

Here: the public function, its gradient and batching rules, and the same through XLA. `activation_kernel.py`: the kernel.
Nothing is tuned.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import floats
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import limits, mesh
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.rms_rows import checked_norm, factors, supports_rows

FEW = 256  # rows up to which the kernel runs: with more it is bytes that take time, and XLA's kernel moves as many
_COLUMNS = 128  # that a block computes are a multiple of this


@dataclasses.dataclass(frozen=True)
class _Call:
    activation: Activation
    backend: dispatch.Backend | None


def gated_activation(
    gate_up: ArrayLike,
    *,
    activation: Activation | None = "silu",
    rms_rows: ArrayLike | None = None,
    rms_epsilon: float = 1e-6,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """activation(gate) * up of gate_up = [gate, up], in float32, rounded once: what follows a gated layer's joined product.

    Args:
      gate_up: floats [..., 2 n], gate's columns before up's.
      activation: "silu", "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None.
      rms_rows: rows [..., width], of any floats. Where given, gate_up is first divided by sqrt(mean over the row of
        rms_rows^2 + rms_epsilon): an RMS norm in front of the product that gate_up is of, gate_up = rms_rows @ w, with the
        norm's weight as a factor of w's rows.
      rms_epsilon: a number of at least 0.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla". Default: $MGPU_OPS_BACKEND, else the kernel for up to 256 rows of 16-bit floats with an n that
        is a multiple of 128, otherwise "xla".

    Returns:
      [..., n] of gate_up's dtype.

    Works under jit, grad (reverse mode; through XLA) and vmap.

    Raises:
      ValueError: shapes that do not fit each other, an unknown activation or backend, or one that cannot run the kernel.
      TypeError: not arrays of floats.
    """
    x = floats.array("gated_activation", "gate_up", gate_up)
    if x.ndim == 0 or x.shape[-1] % 2 or not x.shape[-1]:
        raise ValueError(f"gate_up has shape {x.shape}: it must be [..., 2 n]")
    count = math.prod(x.shape[:-1])
    arrays = [x.reshape(count, x.shape[-1])]
    rows = None if rms_rows is None else floats.array("gated_activation", "rms_rows", rms_rows)
    if rows is not None:
        if rows.shape[:-1] != x.shape[:-1]:
            raise ValueError(
                f"rms_rows{rows.shape} and gate_up{x.shape} differ in rows: all but the last dimension must be equal"
            )
        rows = rows.reshape(count, rows.shape[-1])
    arrays += checked_norm("gated_activation", count, rows, rms_epsilon)
    out = gated(checked_activation(activation), dispatch.requested_backend(backend), *arrays)
    return out.reshape(*x.shape[:-1], x.shape[-1] // 2)


def gated(activation: Activation, backend: dispatch.Backend | None, *arrays: jax.Array) -> jax.Array:
    """The same of checked arrays: gate_up [rows, 2 n], and rows with epsilon [1], if there are any."""
    out: jax.Array = _gated(_Call(activation, backend), *mesh.same_mesh_axes(*arrays))
    return out


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(call: _Call, *arrays: jax.Array) -> jax.Array:
    """Of gate_up, and rows with epsilon [1], if there are any."""
    out: jax.Array = _batchable(call)(*arrays)
    return out


def _forward(call: _Call, *arrays: jax.Array) -> Any:
    return _gated(call, *arrays), arrays


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    gradients: tuple[jax.Array, ...] = jax.vjp(functools.partial(reference, call.activation), *saved)[1](g)
    return gradients


_gated.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays: vmap gives it more rows."""

    def one_device(*arrays: jax.Array) -> jax.Array:
        return run_gated_activation(call.activation, call.backend, *arrays)

    def rule(*arrays: jax.Array) -> partition.Rule:
        return partition.Rule("gated_activation", "m BOTH" + ", m K, ONE" * (len(arrays) > 1) + " -> m N")

    gated = jax.custom_batching.custom_vmap(partition.partitioned(one_device, rule, call.backend))

    @gated.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        def fold(x: jax.Array, mapped: bool) -> jax.Array:
            x = x if mapped else jnp.broadcast_to(x, (size, *x.shape))
            return lax.collapse(x, 0, -1)

        rows = [fold(x, mapped) for x, mapped in zip(arrays[:2], batched[:2], strict=True)]
        count = arrays[0].shape[1 if batched[0] else 0]
        return gated(*rows, *arrays[2:]).reshape(size, count, arrays[0].shape[-1] // 2), True

    return jax.jit(gated)


def run_gated_activation(activation: Activation, backend: dispatch.Backend | None, *arrays: jax.Array) -> jax.Array:
    """Of gate_up, and rows and epsilon [1]. Where no backend is asked for, by the kernel if it can run and rows are few."""
    rows = arrays[0].shape[0]
    if backend is None and not (isinstance(rows, int) and rows <= FEW):  # an exported function may have a symbolic number
        return reference(activation, *arrays)
    of = f"of gate_up{arrays[0].shape}"
    choice = dispatch.choose_for("gated_activation", of, lambda device: supports(device, *arrays), backend)
    if choice.device is None:
        return reference(activation, *arrays)
    from mgpu_ops.matmul.gated import activation_kernel  # it imports Pallas

    return activation_kernel.launch(activation, *arrays, interpret=choice.backend == "interpret")


def supports(gpu: gpus.Gpu, gate_up: jax.Array, *norm: jax.Array) -> str | None:
    """Why the kernel cannot run on `gpu`, or None."""
    if reason := limits.supports_dtypes(gate_up.dtype.name, gate_up.dtype.name, gpu):
        return reason
    if gate_up.shape[1] % (2 * _COLUMNS):
        return f"n={gate_up.shape[1] // 2} is no multiple of {_COLUMNS}"
    if gate_up.size >= 2**31 or not gate_up.shape[0]:
        return f"gate_up{gate_up.shape} has no rows, or 2^31 elements or more"
    return supports_rows(norm[0]) if norm else None


def reference(activation: Activation, gate_up: jax.Array, *norm: jax.Array) -> jax.Array:
    """The same through XLA."""
    wide = gate_up.astype(np.promote_types(gate_up.dtype, np.float32))
    if norm:
        wide = wide * factors(*norm)
    gate, up = jnp.split(wide, 2, -1)
    return (activate(activation, gate) * up).astype(gate_up.dtype)
