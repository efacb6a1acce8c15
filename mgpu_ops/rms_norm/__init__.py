"""rms_norm: rows divided by their root mean square, times a weight, in one pass; for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernels.
Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import flags, floats
from mgpu_ops.core import mesh, order
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rms_norm.model import candidates, cost, default, distance, space
from mgpu_ops.rms_norm.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    flops,
    inputs,
    smem_bytes,
    supports,
    tolerance,
)
from mgpu_ops.rms_rows import checked_epsilon


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays. kept: x is returned too, and its gradient added to that of the norm."""

    epsilon: float
    config: Config | None
    backend: dispatch.Backend | None
    kept: bool = False
    gradient: bool = False


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    epsilon: float = 1e-6,
    return_x: Literal[False] = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array: ...


@overload
def rms_norm(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    epsilon: float = 1e-6,
    return_x: Literal[True],
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def rms_norm(
    x: ArrayLike,
    weight: ArrayLike,
    *,
    epsilon: float = 1e-6,
    return_x: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """x[..., j] weight[j] / sqrt(mean over j of x[..., j]^2 + epsilon), in float32, rounded once.

    Args:
      x: floats [..., width]. For the kernel bfloat16 or float16 with a width that is a multiple of 128 up to 8192; others run
        through XLA.
      weight: [width], of x's dtype.
      epsilon: a Python number of at least 0.
      return_x: also return x, for a residual connection around the norm. The norm's backward kernel then adds the gradient of
        that connection, which saves a pass over both.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it and
        XLA was not measured to be faster for this problem or one near it, otherwise "xla".

    Returns:
      [..., width] of x's dtype; with `return_x` that and x.

    Works under jit, grad (reverse mode), vmap and shard_map. The gradient keeps x and weight, and one kernel computes both
    their gradients in one pass over x and the result's gradient.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an epsilon below 0 or not finite, an unknown backend, a config
        that cannot run.
      TypeError: not arrays of floats.

    Source: Zhang and Sennrich, arXiv:1910.07467; measurements in docs/ops/rms_norm.md.
    """
    rows, w = floats.array("rms_norm", "x", x), floats.array("rms_norm", "weight", weight)
    if rows.ndim == 0 or w.shape != rows.shape[-1:]:
        raise ValueError(f"x{rows.shape} and weight{w.shape} do not fit: they are [..., width] and [width]")
    if w.dtype != rows.dtype:
        raise ValueError(f"x is {rows.dtype} and weight is {w.dtype}: cast one with .astype")
    check_config("config", config, Config, "RmsNormConfig")
    call = _Call(
        checked_epsilon("epsilon", epsilon), config, dispatch.requested_backend(backend), flags.checked("return_x", return_x)
    )
    found = _norm(call, *mesh.same_mesh_axes(mesh.as_rows("x", rows), w))
    return jax.tree.map(lambda y: y.reshape(rows.shape), found)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _norm(call: _Call, x: jax.Array, w: jax.Array) -> Any:
    out = _batchable(call)(x, w)
    return (out, x) if call.kept else out


def _forward(call: _Call, x: jax.Array, w: jax.Array) -> Any:
    return _norm(call, x, w), (x, w)


def _backward(call: _Call, saved: Any, gradients: Any) -> tuple[jax.Array, jax.Array]:
    x, w = saved
    dx, dw = _batchable(dataclasses.replace(call, config=None, gradient=True))(
        x, w, *(gradients if call.kept else (gradients,))
    )
    dw, dx = order.weights_first(dw.astype(w.dtype), dx)  # or the blocks' parts of dw would be kept
    return dx, dw


_norm.defvjp(*first_order("rms_norm", _forward, _backward))


def _rule(call: _Call, *arrays: jax.Array) -> partition.Rule:
    """Rows are split; the gradient of the weight is their sum."""
    others = ", rows WIDTH" * (len(arrays) - 2)
    return partition.Rule("rms_norm", f"rows WIDTH, WIDTH{others} -> rows WIDTH{', WIDTH' * call.gradient}")


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""

    def of_rows(x: jax.Array, w: jax.Array, *others: jax.Array) -> Any:
        rows, width = x.shape
        problem = Problem(rows, width, x.dtype.name, call.gradient, call.gradient and call.kept)
        arrays = (x, w, jnp.full((1,), call.epsilon, np.float32), *others)
        return dispatch.run(SPEC, problem, arrays, config=call.config, backend=call.backend)

    norm = jax.custom_batching.custom_vmap(partition.partitioned(of_rows, functools.partial(_rule, call), call.backend))

    @norm.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        if list(batched) == [True, False]:  # more rows; a gradient's dw is a sum over one norm's
            x = arrays[0]
            return run(lax.collapse(x, 0, -1), arrays[1]).reshape(x.shape), True
        return one_after_the_other(run, batched, arrays), (True, True) if call.gradient else True

    run = jax.jit(norm)
    return run


def reference(problem: Problem, x: jax.Array, w: jax.Array, epsilon: jax.Array, *others: jax.Array) -> Any:
    """The same through XLA: the normalised rows, or (dx, dw)."""
    dtype = np.promote_types(problem.dtype, np.float32)

    def norm(x: jax.Array, w: jax.Array) -> jax.Array:
        return x * lax.rsqrt(jnp.mean(x * x, -1, keepdims=True) + epsilon[0].astype(dtype)) * w[None]

    if not problem.gradient:
        return norm(x.astype(dtype), w.astype(dtype)).astype(problem.dtype)
    dx, dw = jax.vjp(norm, x.astype(dtype), w.astype(dtype))[1](others[0].astype(dtype))
    if problem.residual:
        dx += others[1].astype(dtype)
    return dx.astype(problem.dtype), dw


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.rms_norm import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="rms_norm",
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
)

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "reference", "rms_norm", "smem_bytes"]
