"""quantized_grouped_matmul: rows of groups times weights of 8 or 4 bits, such as experts' in decoding, for NVIDIA Hopper.

It is made of quantized_matmul, whose Config and kernel's block it has, and of grouped_matmul's groups of rows. `problem.py`:
what is computed. `model.py`: which configs are worth trying. `kernel.py`: the tiles of groups. Here: the public function, its
gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats
from mgpu_ops.core import mesh
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.grouped import grouped_matmul
from mgpu_ops.grouped.batches import Kind, batchable
from mgpu_ops.grouped.calls import checked_sizes, checked_spread
from mgpu_ops.grouped.sizes import Spread, for_each_block
from mgpu_ops.matmul.arguments import float_dtype
from mgpu_ops.matmul.quantized import checked_weights, checked_zero_points, constant, dequantised, scaled_product
from mgpu_ops.quantized_grouped.model import candidates, cost, default, distance, space
from mgpu_ops.quantized_grouped.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    flops,
    inputs,
    supports,
    tolerance,
)
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call other than its arrays. group_offset: the sizes are those of a shard, of `sizes.of_shard`."""

    transpose_rhs: bool
    out_dtype: str
    spread: Spread
    config: Config | None
    backend: dispatch.Backend | None
    group_offset: bool


def quantized_grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    scales: ArrayLike,
    group_sizes: ArrayLike | Sequence[int],
    zero_points: ArrayLike | None = None,
    *,
    group_offset: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_rhs: bool = False,
    spread: Spread = "random",
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`grouped_matmul` with weights of 8 or 4 bits, which become 16-bit floats in registers; accumulated in float32.

    out[i, n] = sum_k lhs[i, k] (rhs[g, k, n] - zero_points[g, b, n]) scales[g, b, n] for each row i of group g, with
    b = k / group_size; zeros for rows of no group; rounded once, when stored.

    Args:
      lhs: [m, k], rows sorted by group. bfloat16 or float16 for the kernel; other floats run through XLA.
      rhs: int8 or int4, [groups, k, n], or for the kernel [groups, n, k] with `transpose_rhs`: bytes are read along k only. Two
        int4 lie in a byte on a GPU.
      scales: floats, [groups, k / group_size, n], also with `transpose_rhs`. The group size divides k, and is 32, 64 or 128 for
        the kernel. Or one scale for each column, [groups, n] or [groups, 1, n].
      group_sizes: [groups], integers, in rows, as in `grouped_matmul`.
      zero_points: numbers of the scales' shape, whole and of rhs's range. They are cast to the scales' dtype: store them so.
        Default: 0.
      group_offset: for a shard of the groups, the first of those that rhs has, as in `grouped_matmul`.
      out_dtype: of the result; lhs's dtype by default, or "float32".
      transpose_rhs: rhs is stored transposed.
      spread: how sizes are usually spread over the groups, as in `grouped_matmul`: chooses the config, never the answer.
      config: runs the kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known to be faster, otherwise "xla", and the log says why.

    Returns:
      [m, n] of out_dtype. Weights of groups without rows are not read. The kernel multiplies rhs - zero_points, exact in lhs's
      dtype, and scales float32 sums over each group along k; XLA rounds scaled weights to lhs's dtype on a GPU.

    Works under jit, grad (reverse mode) with respect to lhs, vmap (one launch, as `grouped_matmul`) and shard_map. The gradient
    of lhs is a `grouped_matmul` of weights that XLA dequantises, all groups' in 16 bits. Weights, scales and zero points are
    constants: a gradient of scales or zero points raises.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, known sizes that are negative or exceed m, an unknown spread or
        backend, a config that cannot run, a gradient that there is not, known scales that are not finite and known zero points
        that are not whole and of rhs's range (traced ones: see `matmul`), those of groups without rows too.
      TypeError: lhs or scales that are no floats, rhs that is no int8 or int4.

    Source: the kernel's own, in mgpu_ops/matmul/quantized/kernel.py and mgpu_ops/quantized_grouped/kernel.py; see
    docs/kernels/quantized_matmul.md.
    """
    op = "quantized_grouped_matmul"
    rows, weights = floats.array(op, "lhs", lhs), checked_weights(op, "rhs", rhs)
    if rows.ndim != 2 or weights.ndim != 3:
        raise ValueError(f"lhs has shape {rows.shape} and rhs {weights.shape}: {op} takes ranks 2 and 3; use jax.vmap")
    groups, *sides = weights.shape
    transpose_rhs = flags.checked("transpose_rhs", transpose_rhs)
    k, n = sides[::-1] if transpose_rhs else sides
    if rows.shape[1] != k:
        raise ValueError(
            f"lhs{rows.shape} and rhs{weights.shape} differ in k: {rows.shape[1]} != {k} (transpose_rhs={transpose_rhs})"
        )
    sizes = checked_sizes(op, group_sizes, groups, rows.shape[0], group_offset)
    first, *others = checked_scales(op, scales, zero_points, weights.dtype, (groups, k, n))
    check_config("config", config, Config, "QuantizedMatmulConfig")
    call = Call(
        transpose_rhs=transpose_rhs,
        out_dtype=float_dtype(out_dtype, None, rows.dtype).name,
        spread=checked_spread(spread),
        config=config,
        backend=dispatch.requested_backend(backend),
        group_offset=group_offset is not None,
    )
    return product(call, *mesh.same_mesh_axes(rows, weights, first, sizes, *others))


def checked_scales(
    op: str, scales: Any, zero_points: Any, of: Any, sides: tuple[int, int, int], prefix: str = ""
) -> list[jax.Array]:
    """Scales, and zero points if there are any, as the op takes them: [groups, n] or [groups, blocks, n], without a gradient.

    of: the weights' dtype. sides: groups, k, n. prefix: of the arguments' names. Raises for what does not fit.
    """
    found, (groups, k, n) = floats.scale(op, f"{prefix}scales", scales), sides
    shape = found.shape
    if shape in ((groups, n), (groups, 1, n)):
        own: tuple[int, ...] = (groups, n)
    elif len(shape) == 3 and shape[::2] == (groups, n) and shape[1] and k % shape[1] == 0:
        own = shape
    else:
        raise ValueError(
            f"{prefix}scales has shape {shape}: for {groups} groups, k={k} and n={n} it is [groups, n], or "
            "[groups, k / group size, n] with a size that divides k"
        )
    arrays = [found] if zero_points is None else [found, checked_zero_points(op, zero_points, found, of, prefix)]
    return [constant(a.reshape(own)) for a in arrays]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(call: Call, *arrays: jax.Array) -> jax.Array:
    """`quantized_grouped_matmul` of arguments that were checked: lhs, rhs, scales, sizes, and zero points if there are any."""
    out: jax.Array = _batchable(call, len(arrays) > 4)(*arrays)
    return out


def _forward(call: Call, *arrays: jax.Array) -> Any:
    return product(call, *arrays), arrays


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """That of lhs: g times the dequantised weights, group by group."""
    x, w, scales, sizes, *zero_points = saved
    weights = dequantised(_problem(call, *saved), w, scales, *zero_points).astype(x.dtype)
    # Stored as [groups, n, k], of which n is summed over, they are not transposed.
    transposed = grouped_matmul.Call(
        not call.transpose_rhs, x.dtype.name, "none", call.spread, None, call.backend, group_offset=call.group_offset
    )
    dx = grouped_matmul.product(transposed, g.astype(x.dtype), weights, sizes)
    return (dx, None, None, None, *(None for _ in zero_points))


product.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: Call, zero_points: bool) -> Any:
    """The call as a function of arrays."""

    def one_device(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, *arrays), arrays, config=call.config, backend=call.backend)

    plain = functools.partial(_batchable, dataclasses.replace(call, group_offset=False), zero_points)
    kinds: list[Kind] = ["rows", "matrices", "matrices", "sizes"]
    if zero_points:
        kinds.append("matrices")
    rule = functools.partial(_rule, call)
    return batchable(one_device, kinds, "rows", 1, call.group_offset, plain, rule=rule, backend=call.backend)


def _rule(
    call: Call, x: jax.Array, w: jax.Array, scales: jax.Array, sizes: jax.Array, *zero_points: jax.Array
) -> partition.Rule:
    """Columns are split, and k where parts of it have no scales of their own."""
    k, of_scales = ("K", "GROUPS PARTS n") if scales.ndim == 3 else ("k", "GROUPS n")
    of_w = f"GROUPS n {k}" if call.transpose_rhs else f"GROUPS {k} n"
    more = f", {of_scales}" * len(zero_points)
    return partition.Rule("quantized_grouped_matmul", f"ROWS {k}, {of_w}, {of_scales}, SIZES{more} -> ROWS n")


def _problem(call: Call, x: jax.Array, w: jax.Array, scales: jax.Array, sizes: jax.Array, *zero_points: jax.Array) -> Problem:
    k = x.shape[1]
    return Problem(
        m=x.shape[0],
        n=w.shape[1 if call.transpose_rhs else 2],
        k=k,
        w_dtype=w.dtype.name,
        group_size=k // scales.shape[1] if scales.ndim == 3 else 0,
        zero_points=bool(zero_points),
        dtype=x.dtype.name,
        out_dtype=call.out_dtype,
        layout="nt" if call.transpose_rhs else "nn",
        scale_dtype=scales.dtype.name,
        groups=w.shape[0],
        spread=call.spread,
        group_offset=call.group_offset,
    )


def reference(
    problem: Problem, x: jax.Array, w: jax.Array, scales: jax.Array, sizes: jax.Array, *zero_points: jax.Array
) -> jax.Array:
    """The same through XLA, in blocks of rows of one group, whose weights it dequantises as `quantized_matmul`'s does."""
    p = problem

    def block(out: jax.Array, group: Any, rows: jax.Array, inside: jax.Array) -> jax.Array:
        of_group = (a[group] for a in (w, scales, *zero_points))
        values = scaled_product(p, x[rows], *of_group)
        return out.at[jnp.where(inside, rows, p.m)].set(values.astype(p.out_dtype), mode="drop")

    zeros, *_ = mesh.same_mesh_axes(jnp.zeros((p.m, p.n), p.out_dtype), x)
    return zeros if 0 in (p.m, p.n) else for_each_block(sizes, p.m, block, zeros, p.group_offset)


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.quantized_grouped import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="quantized_grouped_matmul",
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

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "quantized_grouped_matmul", "reference"]
