"""matmul: out[m, n] = sum_k A[m, k] B[k, n], float32 accumulation, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel,
from load to store. Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.matmul import xla
from mgpu_ops.matmul.model import candidates, cost, default, distance, space
from mgpu_ops.matmul.problem import (
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
    transposed,
)
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    transpose_a: bool
    transpose_b: bool
    out_dtype: str
    config: Config | None
    backend: dispatch.Backend | None


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    out_dtype: DTypeLike | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """out[m, n] = sum_k A[m, k] B[k, n], accumulated in float32, by the kernel tuned for the running GPU.

    Args:
      a: A, [m, k], or [k, m] with `transpose_a`. bfloat16 or float16 for the kernel; other floats run through XLA.
      b: B, [k, n], or [n, k] with `transpose_b`, of a's dtype.
      out_dtype: of the result; a's dtype by default. "float32" keeps the accumulator as it is.
      transpose_a, transpose_b: the operand is stored transposed; it is read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known or modelled to be faster, otherwise "xla", and the log says why.

    Returns:
      [m, n] of out_dtype. A zero-size k gives zeros, as in `jax.numpy.matmul`.

    Works under jit, grad (both gradients run the same kernels, on cotangents rounded to a's dtype; reverse mode only), vmap
    (one launch for the whole batch) and shard_map. The config is looked up when a shape is traced: `mgpu_ops.explain` says
    which one and why.

    Raises:
      ValueError: rank other than 2, different k, different dtypes, an unknown backend, a config that cannot run.
      TypeError: not arrays of floats.

    Source: the kernel's own, in mgpu_ops/matmul/kernel.py; measurements in docs/kernels/matmul.md.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    for name, x in (("a", a), ("b", b)):
        if jnp.ndim(x) != 2:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: matmul takes rank 2; use jax.vmap for batches")
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(f"{name} has dtype {jnp.result_type(x)}: matmul takes floats; cast it first")
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}: cast one with .astype")
    k_a, k_b = a.shape[0 if transpose_a else 1], b.shape[1 if transpose_b else 0]
    if k_a != k_b:
        raise ValueError(
            f"a{a.shape} and b{b.shape} differ in k: {k_a} != {k_b} (transpose_a={transpose_a}, transpose_b={transpose_b})"
        )
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is {config!r}: pass a mgpu_ops.MatmulConfig")
    out = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"out_dtype {out} is not a float: cast the result instead")
    call = _Call(bool(transpose_a), bool(transpose_b), out.name, config, dispatch.requested_backend(backend))
    return _matmul(call, *mesh.same_mesh_axes(a, b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: _Call, a: jax.Array, b: jax.Array) -> jax.Array:
    return _batchable(call)(a, b)


def _forward(call: _Call, a: jax.Array, b: jax.Array) -> Any:
    return _matmul(call, a, b), (a, b)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dA = g B^T and dB = A^T g, written so that each stored operand is read in place."""
    a, b = saved
    g = g.astype(a.dtype)
    ta, tb = call.transpose_a, call.transpose_b

    def product(x: jax.Array, y: jax.Array, tx: bool, ty: bool) -> jax.Array:
        return _matmul(_Call(tx, ty, a.dtype.name, None, call.backend), x, y)

    da = product(b, g, tb, True) if ta else product(g, b, False, not tb)
    db = product(g, a, True, ta) if tb else product(a, g, not ta, False)
    return da, db


_matmul.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. vmap makes one launch of it. It is jitted, so that eager calls trace once."""

    @jax.custom_batching.custom_vmap
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, a, b), (a, b), config=call.config, backend=call.backend)

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1] and b.ndim == 2 and not call.transpose_a:  # one product with more rows
            out = run(a.reshape(-1, a.shape[-1]), b)
            return out.reshape(*a.shape[:-1], out.shape[-1]), True
        inner = max(x.ndim - is_batched for x, is_batched in zip((a, b), batched, strict=True)) == 3
        if not inner:
            return run(a, b), True
        lead = (size, next(x.shape[-3] for x, y in zip((a, b), batched, strict=True) if x.ndim - y == 3))

        def flat(x: jax.Array, is_batched: bool) -> jax.Array:
            if x.ndim - is_batched == 2:
                if not is_batched:
                    return x
                x = x[:, None]
            return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])

        out = run(flat(a, batched[0]), flat(b, batched[1]))
        return out.reshape(*lead, *out.shape[-2:]), True

    run = jax.jit(product)
    return run


def _problem(call: _Call, a: jax.Array, b: jax.Array) -> Problem:
    m, k = a.shape[-2:][::-1] if call.transpose_a else a.shape[-2:]
    n = b.shape[-2] if call.transpose_b else b.shape[-1]
    batch = max((x.shape[0] for x in (a, b) if x.ndim == 3), default=1)
    layout = "nt"[call.transpose_a] + "nt"[call.transpose_b]
    return Problem(m, n, k, a.dtype.name, call.out_dtype, layout, batch)


def reference(problem: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """The same through XLA (cuBLAS on a GPU): float32 accumulation, then rounding to out_dtype."""
    a_t, b_t = transposed(problem)
    wide = np.promote_types(problem.dtype, np.float32)
    if problem.dtype == problem.out_dtype:
        wide = jnp.dtype(problem.dtype)  # XLA accumulates 16-bit floats in float32; asking for it costs a second pass
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        wide = np.promote_types(problem.dtype, np.float32)
        a, b = a.astype(wide), b.astype(wide)
    return jnp.matmul(a.mT if a_t else a, b.mT if b_t else b, preferred_element_type=wide).astype(problem.out_dtype)


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.matmul import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="matmul",
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
    baseline_cost=xla.cost,
)

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "matmul", "reference", "smem_bytes"]
