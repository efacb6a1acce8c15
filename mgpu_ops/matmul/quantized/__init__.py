"""quantized_matmul: x (w - zero points) scales, weights of 8 or 4 bits beside 16-bit floats, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel.
Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.matmul import like_the_result
from mgpu_ops.matmul.arguments import checked_bias, float_dtype
from mgpu_ops.matmul.epilogue import by_name, with_epilogue
from mgpu_ops.matmul.quantized.model import baseline_cost, candidates, cost, default, distance, space
from mgpu_ops.matmul.quantized.problem import (
    SHAPES,
    SUITES,
    W_DTYPES,
    Config,
    Problem,
    Product,
    as_matmul,
    bytes_moved,
    check,
    flops,
    inputs,
    plain,
    smem_bytes,
    supports,
    tolerance,
    unmeasured,
)
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    transpose_w: bool
    out_dtype: str
    config: Config | None
    backend: dispatch.Backend | None
    zero_points: bool = False
    bias: bool = False
    residual: bool = False


def quantized_matmul(
    x: ArrayLike,
    w: ArrayLike,
    scales: ArrayLike,
    zero_points: ArrayLike | None = None,
    *,
    bias: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_w: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """x times weights of 8 or 4 bits, which become 16-bit floats in the tensor cores' registers; accumulated in float32.

    out[..., n] = sum_k x[..., k] (w[k, n] - zero_points[g, n]) scales[g, n] + bias[n] + residual[..., n] with
    g = k / group_size; rounded once, when stored.

    Args:
      x: [..., k]. bfloat16 or float16 for the kernel; other floats run through XLA.
      w: int8 or int4, [k, n], or for the kernel [n, k] with `transpose_w`: bytes are read along k only. Two int4
        lie in a byte on a GPU.
      scales: floats, [k / group_size, n], also with `transpose_w`. The group size divides k, and is 32, 64 or 128 for the
        kernel. Or one scale for each column, [n] or [1, n].
      zero_points: numbers of the scales' shape, whole and of w's range. They are cast to the scales' dtype: store them so.
        Default: 0.
      bias: [n] floats. Default: none.
      residual: of the result's dtype, and of its shape or one that broadcasts to it. Default: none.
      out_dtype: of the result; x's dtype by default, or "float32".
      transpose_w: w is stored transposed.
      config: runs the kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known or predicted to be faster, otherwise "xla", and the log says why.

    Returns:
      [..., n] of out_dtype. The kernel multiplies w - zero_points, exact in x's dtype, and scales float32 sums over each group.
      XLA scales the weights first and rounds them to x's dtype on a GPU.

    uint4 as AWQ and GPTQ store it is int4 and its zero points less 8: `(w - 8).astype(jnp.int4)`, `zero_points - 8`.

    Works under jit, grad (reverse mode) with respect to x, bias and residual, vmap (one launch where x and residual alone are
    mapped, else one after the other) and shard_map. The backward pass, dx = g times the scaled weights, runs through XLA.
    Weights, scales and zero points are constants: a gradient of scales or zero points raises.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown backend, a config that cannot run, a gradient that
        there is not, known scales that are not finite and known zero points that are not whole and of w's range (traced ones:
        see `matmul`).
      TypeError: x, scales, bias or residual that are no floats, weights that are no int8 or int4.

    Source: the kernel's own, in mgpu_ops/matmul/quantized/kernel.py; see docs/kernels/quantized_matmul.md.
    """
    rows, weights = floats.array("quantized_matmul", "x", x), checked_weights("quantized_matmul", "w", w)
    of_groups = floats.scale("quantized_matmul", "scales", scales)
    if rows.ndim == 0 or weights.ndim != 2:
        raise ValueError(f"x has shape {rows.shape} and w {weights.shape}: they are [..., k] and of rank 2; use jax.vmap")
    transpose_w = flags.checked("transpose_w", transpose_w)
    k, n = weights.shape[::-1] if transpose_w else weights.shape
    if rows.shape[-1] != k:
        raise ValueError(f"x{rows.shape} and w{weights.shape} differ in k: {rows.shape[-1]} != {k} (transpose_w={transpose_w})")
    arrays = [of_groups]
    if zero_points is not None:
        arrays.append(checked_zero_points("quantized_matmul", zero_points, of_groups, weights.dtype))
    arrays = [constant(a.reshape(_scale_shape(of_groups.shape, k, n))) for a in arrays]
    out = float_dtype(out_dtype, None, rows.dtype)
    if bias is not None:
        arrays.append(checked_bias(floats.array("quantized_matmul", "bias", bias), n))
    if residual is not None:
        added = floats.array("quantized_matmul", "residual", residual)
        arrays.append(mesh.as_rows("residual", like_the_result(added, (*rows.shape[:-1], n), out.name)))
    check_config("config", config, Config, "QuantizedMatmulConfig")
    backend = dispatch.requested_backend(backend)
    call = _Call(transpose_w, out.name, config, backend, zero_points is not None, bias is not None, residual is not None)
    flat = mesh.same_mesh_axes(mesh.as_rows("x", rows), weights, *arrays)
    return _quantized(call, *flat).reshape(*rows.shape[:-1], n)


def checked_weights(op: str, name: str, w: Any) -> jax.Array:
    """Weights as an array. TypeError, which names op and argument, for what is neither int8 nor int4."""
    weights = floats.any_array(op, name, w, "int8 or int4")
    if weights.dtype.name not in W_DTYPES:
        floats_take = f"mgpu_ops.{op.removeprefix('quantized_')}"
        raise TypeError(f"{name} has dtype {weights.dtype}: {op} takes int8 or int4; {floats_take} takes floats")
    return weights


def checked_zero_points(op: str, zero_points: Any, scales: jax.Array, of: Any, prefix: str = "") -> jax.Array:
    """Zero points in the scales' dtype. Raises what `floats.zero_points` raises, and for another shape than the scales'.

    of: the weights' dtype. prefix: of the arguments' names.
    """
    name = f"{prefix}zero_points"
    found = floats.zero_points(op, name, zero_points, of, scales.dtype)
    if found.shape != scales.shape:
        raise ValueError(f"{name} has shape {found.shape} and {prefix}scales {scales.shape}: they have one shape")
    return found


def _scale_shape(shape: tuple[int, ...], k: int, n: int) -> tuple[int, ...]:
    """The shape in which the op takes scales of this one: [n], or [groups, n]. Raises where it is none."""
    if shape in ((n,), (1, n)):
        return (n,)
    if len(shape) == 2 and shape[1] == n and shape[0] and k % shape[0] == 0:
        return shape
    raise ValueError(
        f"scales has shape {shape}: for k={k} and n={n} it is [n], or [k / group size, n] with a size that divides k"
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _quantized(call: _Call, *arrays: jax.Array) -> jax.Array:
    out: jax.Array = _batchable(call)(*arrays)
    return out


def _forward(call: _Call, *arrays: jax.Array) -> Any:
    return _quantized(call, *arrays), arrays


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dx = g times the scaled weights, through XLA; dbias is the sum of g's rows."""
    x, w, *others = saved
    scales, added = others[: 1 + call.zero_points], others[1 + call.zero_points :]
    wide = np.promote_types(x.dtype, np.float32)
    weights = dequantised(_problem(call, *saved), w, *scales).astype(product_dtype(x.dtype))
    dx = jnp.matmul(g.astype(weights.dtype), weights if call.transpose_w else weights.mT, preferred_element_type=wide)
    dbias = [jnp.sum(g, 0, dtype=np.promote_types(g.dtype, np.float32)).astype(a.dtype) for a in added[: call.bias]]
    return (dx.astype(x.dtype), None, *(None for _ in scales), *dbias, *[g] * call.residual)


_quantized.defvjp(_forward, _backward)


@jax.custom_jvp
def constant(a: jax.Array) -> jax.Array:
    """a, of which there is no gradient."""
    return a


@constant.defjvp
def _(*_: Any) -> Any:
    raise ValueError(
        "a product of quantized weights has no gradient of scales or zero points: hold them constant with "
        "jax.lax.stop_gradient, or multiply dequantised weights with mgpu_ops.matmul or mgpu_ops.grouped_matmul"
    )


@functools.cache
def _one_device(call: _Call) -> Callable[..., jax.Array]:
    """The call as one device runs it."""

    def product(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, *arrays), arrays, config=call.config, backend=call.backend)

    return product


def _rule(call: _Call, x: jax.Array, w: jax.Array, scales: jax.Array, *others: jax.Array) -> partition.Rule:
    """Rows and columns are split, and k where groups do not divide it; the epilogue follows the sum of the parts' products."""
    k, of_groups = ("K", "GROUPS n") if scales.ndim == 2 else ("k", "n")
    operands = [f"m {k}", f"n {k}" if call.transpose_w else f"{k} n", of_groups]
    operands += [of_groups] * call.zero_points + ["n"] * call.bias + ["m n"] * call.residual
    partial, finish = _in_parts(call) if call.bias or call.residual else (None, None)
    return partition.Rule("quantized_matmul", f"{', '.join(operands)} -> m n", partial=partial, finish=finish)


@functools.cache
def _in_parts(call: _Call) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Of the same arrays a part's product without an epilogue, and the epilogue of the sum of the parts' products."""
    linear, count = dataclasses.replace(call, config=None, bias=False, residual=False), 3 + call.zero_points

    def partial(*arrays: jax.Array) -> jax.Array:
        return _one_device(linear)(*arrays[:count])

    def finish(product: jax.Array, *arrays: jax.Array) -> jax.Array:
        wide = product.astype(np.promote_types(product.dtype, np.float32))
        return _with_epilogue(_problem(call, *arrays), wide, *arrays[count:])

    return partial, finish


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""
    rule = functools.partial(_rule, call)
    product = jax.custom_batching.custom_vmap(partition.partitioned(_one_device(call), rule, call.backend))

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        rows = [i in (0, len(arrays) - call.residual) for i in range(len(arrays))]
        if any(is_batched and not of_rows for is_batched, of_rows in zip(batched, rows, strict=True)):
            return one_after_the_other(run, batched, arrays), True

        def joined(a: jax.Array, is_batched: bool) -> jax.Array:  # one product with more rows
            return lax.collapse(a if is_batched else jnp.broadcast_to(a, (size, *a.shape)), 0, 2)

        out = run(*(joined(a, b) if r else a for a, b, r in zip(arrays, batched, rows, strict=True)))
        return out.reshape(size, arrays[0].shape[-2], out.shape[-1]), True

    run = jax.jit(product)
    return run


def _problem(call: _Call, x: jax.Array, w: jax.Array, scales: jax.Array, *_: jax.Array) -> Problem:
    k, n = x.shape[1], w.shape[0 if call.transpose_w else 1]
    group = k // scales.shape[0] if scales.ndim == 2 else 0
    return Problem(
        m=x.shape[0],
        n=n,
        k=k,
        w_dtype=w.dtype.name,
        group_size=group,
        zero_points=call.zero_points,
        dtype=x.dtype.name,
        out_dtype=call.out_dtype,
        layout="nt" if call.transpose_w else "nn",
        scale_dtype=scales.dtype.name,
        bias=call.bias,
        residual=call.residual,
    )


def product_dtype(dtype: Any) -> Any:
    """What XLA multiplies in: x's dtype, on a machine without a GPU in float32 at least."""
    return dtype if gpus.current() is not None else np.promote_types(dtype, np.float32)


def dequantised(problem: Product, w: jax.Array, scales: jax.Array, *zero_points: jax.Array) -> jax.Array:
    """(w - zero_points) scales as stored, in float32, or float64 as the scales; of several matrices those of each."""
    axis = -1 if problem.layout == "nt" else -2  # of w, along k
    wide = np.promote_types(scales.dtype, np.float32)

    def of_each(a: jax.Array) -> jax.Array:
        if not problem.group_size:
            return jnp.expand_dims(a, axis)
        return jnp.repeat(a.mT if axis == -1 else a, problem.group_size, axis)

    values = w.astype(wide)
    for zero in zero_points:
        values = values - of_each(zero.astype(problem.dtype).astype(wide))
    return values * of_each(scales.astype(wide))


def reference(problem: Problem, x: jax.Array, w: jax.Array, scales: jax.Array, *others: jax.Array) -> jax.Array:
    """The same through XLA: the weights, scaled and on a GPU rounded to x's dtype, then a product.

    Scales of columns multiply the product instead, so that 8 or 4 bits are exact in x's dtype.
    """
    zero_points, added = others[: problem.zero_points], others[problem.zero_points :]
    return _with_epilogue(problem, scaled_product(problem, x, w, scales, *zero_points), *added)


def _with_epilogue(p: Problem, product: jax.Array, *added: jax.Array) -> jax.Array:
    """The scaled product with what is added to it, rounded to out_dtype."""
    return with_epilogue(as_matmul(p), product, **by_name(as_matmul(p), added))


def scaled_product(p: Product, x: jax.Array, w: jax.Array, scales: jax.Array, *zero_points: jax.Array) -> jax.Array:
    """`reference` before it is rounded to out_dtype."""
    dtype, wide = product_dtype(x.dtype), np.promote_types(x.dtype, np.float32)
    ones = jnp.ones((), scales.dtype)[None]
    weights = dequantised(p, w, scales if p.group_size else ones, *zero_points).astype(dtype)
    # Rounded where nothing follows: XLA would write a wide product, and round that in a kernel of its own.
    alone = bool(p.group_size) and not (p.bias or p.residual)
    sums = np.dtype(p.out_dtype) if alone else wide
    out = jnp.matmul(x.astype(dtype), weights.mT if p.layout == "nt" else weights, preferred_element_type=sums)
    return out if p.group_size else out * scales.astype(wide)[None]


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.matmul.quantized import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="quantized_matmul",
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
    baseline_cost=baseline_cost,
    unmeasured=unmeasured,
    plain=plain,
)

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "quantized_matmul", "reference", "smem_bytes"]
