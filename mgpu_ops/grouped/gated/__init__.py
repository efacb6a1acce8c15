"""gated_grouped_matmul: activation(lhs w_gate) * (lhs w_up) by group in one kernel, float32 accumulation, for NVIDIA Hopper.

`problem.py` says what is computed and which configs can run it, `model.py` which are worth trying, `kernel.py` is the kernel,
of grouped_matmul's parts; here are the public function with its batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, check_config, result_dtype
from mgpu_ops.grouped.batches import Kind, batchable
from mgpu_ops.grouped.calls import (
    check_finite_scales,
    checked_operands,
    checked_out_dtype,
    checked_row_indices,
    checked_scales,
    checked_sizes,
    checked_spread,
)
from mgpu_ops.grouped.config import Config
from mgpu_ops.grouped.gated.model import candidates, cost, default, distance, space
from mgpu_ops.grouped.gated.problem import (
    SHAPES,
    SUITES,
    Problem,
    bytes_moved,
    check,
    flops,
    inputs,
    of_one,
    plain,
    results,
    smem_bytes,
    supports,
    tolerance,
)
from mgpu_ops.grouped.grouped_matmul import reference as product_of_one
from mgpu_ops.grouped.sizes import Spread, for_each_block
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import Baseline, OpSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call says beside its arrays. group_offset: the sizes are those of a shard, as `sizes.of_shard` gives them."""

    activation: Activation
    transpose_w: bool
    out_dtype: str
    spread: Spread
    config: Config | None
    backend: dispatch.Backend | None
    group_offset: bool
    gradient: bool = False
    keep: bool = False
    scales: str = "none"
    row_indices: bool = False  # the last array


def gated_grouped_matmul(
    lhs: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike,
    group_sizes: ArrayLike | Sequence[int],
    *,
    row_indices: ArrayLike | None = None,
    activation: Activation | None = "silu",
    scale_lhs: ArrayLike | None = None,
    scale_gate: ArrayLike | None = None,
    scale_up: ArrayLike | None = None,
    group_offset: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_w: bool = False,
    spread: Spread = "random",
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """activation(lhs w_gate) * (lhs w_up) by group in one kernel, accumulated in float32 and rounded once: experts' first half.

    out[i, n] = activation(sum_k lhs[i, k] w_gate[g, k, n]) * sum_k lhs[i, k] w_up[g, k, n] for each row i of group g; zeros for
    rows of no group. With row_indices, lhs[row_indices[i]] is in the place of lhs[i].

    Args:
      lhs: [m, k], rows sorted by group; with row_indices [rows, k], in any order. bfloat16 or float16 for the kernel, or with
        `transpose_w` float8_e4m3fn or float8_e5m2; other floats run through XLA.
      w_gate, w_up: [groups, k, n], or [groups, n, k] with `transpose_w`, of lhs's dtype; the two 8-bit floats mix, but both
        have one.
      group_sizes, group_offset, spread: as in `grouped_matmul`.
      row_indices: [m] integers, the row of lhs for each row of the result, sorted by group, each from 0 to rows - 1; a row may
        come several times. Indices beyond those count as the nearest where they are not known, as under jit. The kernel reads
        the rows where they are: no sorted copy of them is made.
      activation: "silu", "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None for a bilinear layer.
      scale_lhs, scale_gate, scale_up: what 8-bit floats were divided by (`mgpu_ops.quantize`), by which gate and up are
        multiplied before the activation, as scale_lhs and scale_rhs in `grouped_matmul`; both weights have scales of one kind.
      out_dtype: of the result; lhs's dtype by default, or "float32". Of 8-bit floats bfloat16 by default, or any float.
      transpose_w: both weights are stored transposed; they are read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic", "interpret" or "xla", as in `grouped_matmul`.

    Returns:
      [m, n] of out_dtype. The forward pass stores nothing else of that size.

    Works under jit, grad (reverse mode), vmap (one launch, as `grouped_matmul`), scan, checkpoint and shard_map. The gradient
    keeps lhs and the weights, and neither gate nor up. A kernel of its own computes both products again, and of them the
    gradients of gate and up, two arrays [m, n] of lhs's dtype. The gradient of lhs is then one grouped matmul of both, those of
    the weights two calls of `ragged_contraction`. There is no gradient of 8-bit floats. With row_indices, the backward pass
    gathers the rows first, and adds the gradients of a row that comes several times in float32, in an order that the
    indices fix.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, known sizes that are negative or exceed m, known indices of no
        row, an unknown activation, spread or backend, a config that cannot run, known scales that are not finite, as in
        `grouped_matmul`.
      TypeError: floats or integers expected and not found.

    Source: the kernel's own, in mgpu_ops/grouped/gated/kernel.py; see docs/kernels/moe.md.
    """
    name = "gated_grouped_matmul"
    lhs, w_gate, w_up = checked_operands(name, ("lhs", lhs, 2), ("w_gate", w_gate, 3), ("w_up", w_up, 3), mixed=FLOAT8)
    if w_gate.shape != w_up.shape:
        raise ValueError(f"w_gate{w_gate.shape} and w_up{w_up.shape} differ: both are [groups, k, n], or with transpose_w n, k")
    if w_gate.dtype != w_up.dtype:
        raise ValueError(f"w_gate is {w_gate.dtype} and w_up is {w_up.dtype}: both have one dtype; cast or quantize one")
    transpose_w = flags.checked("transpose_w", transpose_w)
    k = w_gate.shape[2 if transpose_w else 1]
    if lhs.shape[1] != k:
        raise ValueError(
            f"lhs{lhs.shape} and w_gate{w_gate.shape} differ in k: {lhs.shape[1]} != {k} (transpose_w={transpose_w})"
        )
    indices = () if row_indices is None else (checked_row_indices(row_indices, lhs.shape[0]),)
    rows = indices[0].shape[0] if indices else lhs.shape[0]
    sizes = checked_sizes(name, group_sizes, w_gate.shape[0], rows, group_offset, "w_gate")
    check_config("config", config, Config, "GroupedMatmulConfig")
    n = w_gate.shape[1 if transpose_w else 2]
    kind, scales = _checked_scales((scale_lhs, scale_gate, scale_up), (rows, n, k), w_gate.shape[0])
    is_shard = group_offset is not None
    check_finite_scales(sizes, is_shard, scale_lhs=scale_lhs, scale_gate=scale_gate, scale_up=scale_up)
    call = Call(
        activation=checked_activation(activation),
        transpose_w=transpose_w,
        out_dtype=checked_out_dtype(out_dtype, result_dtype(lhs.dtype.name)),
        spread=checked_spread(spread),
        config=config,
        backend=dispatch.requested_backend(backend),
        group_offset=is_shard,
        scales=kind,
        row_indices=row_indices is not None,
    )
    return gated(call, *mesh.same_mesh_axes(lhs, w_gate, w_up, sizes, *scales, *indices))


def _checked_scales(scales: tuple[Any, Any, Any], sides: tuple[int, int, int], groups: int) -> tuple[str, list[jax.Array]]:
    """The kind of scale_lhs, scale_gate and scale_up, and the three as float32 arrays of its shapes, or none."""
    if all(x is None for x in scales):
        return "none", []
    lhs, *others = (jnp.ones((), jnp.float32) if x is None else x for x in scales)
    names = ("scale_gate", "scale_up")
    found = [checked_scales((lhs, x), sides, groups, name) for name, x in zip(names, others, strict=True)]
    (kind, gate), (other, up) = found
    if kind != other:
        raise ValueError(
            f"scale_gate has the shape of scales of kind {kind!r} and scale_up of kind {other!r}: both have one kind"
        )
    return kind, [gate["scale_lhs"], gate["scale_rhs"], up["scale_rhs"]]


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def gated(call: Call, lhs: jax.Array, w_gate: jax.Array, w_up: jax.Array, sizes: jax.Array, *rest: jax.Array) -> jax.Array:
    """`gated_grouped_matmul` of arguments that were checked: scales, if any, and then the indices of rows, if any.

    `grouped/gradients.py` makes it differentiable.
    """
    out: jax.Array = _batchable(call)(lhs, w_gate, w_up, sizes, *rest)
    return out


def kept(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The result, gate and up, all of lhs's dtype, of lhs, w_gate, w_up, sizes and, if any, the indices of rows."""
    kept = dataclasses.replace(call, out_dtype=arrays[0].dtype.name, keep=True)
    out, gate, up = _batchable(kept)(*arrays)
    return out, gate, up


def gradients(call: Call, *arrays: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The gradients of gate and up, of lhs, w_gate, w_up, sizes and the result's gradient, which has lhs's dtype."""
    again = dataclasses.replace(call, out_dtype=arrays[0].dtype.name, config=None, gradient=True, row_indices=False)
    dgate, dup = _batchable(again)(*arrays)
    return dgate, dup


@functools.cache
def _batchable(call: Call) -> Any:
    """The call as a function of arrays."""

    def product(*arrays: jax.Array) -> Any:
        return dispatch.run(SPEC, _problem(call, *arrays), arrays, config=call.config, backend=call.backend)

    kinds: list[Kind] = ["named" if call.row_indices else "rows", "matrices", "matrices", "sizes"]
    if call.gradient:
        kinds.append("rows")
    if call.scales != "none":
        kinds += ["others" if call.scales == "tensor" else "rows", "matrices", "matrices"]
    if call.row_indices:
        kinds.append("indices")
    plain = functools.partial(_batchable, dataclasses.replace(call, group_offset=False))
    count = 2 if call.gradient else 3 if call.keep else 1
    rule = functools.partial(_rule, call, count)
    return batchable(product, kinds, "rows", count, call.group_offset, plain, rule=rule, backend=call.backend)


def _rule(call: Call, count: int, *_: jax.Array) -> partition.Rule:
    """Columns are split."""
    n = "N" if call.scales == "block" else "n"
    weights = [f"GROUPS {n} K" if call.transpose_w else f"GROUPS K {n}"] * 2
    operands = ["NAMED K" if call.row_indices else "ROWS K", *weights, "SIZES", *[f"ROWS {n}"] * call.gradient]
    if call.scales != "none":
        of_lhs, of_rhs = {"row": ("ROWS", "GROUPS n"), "block": ("ROWS K_BLOCKS", "GROUPS A B")}.get(
            call.scales, ("ONE", "GROUPS")
        )
        operands += [of_lhs, of_rhs, of_rhs]
    operands += ["ROWS"] * call.row_indices
    return partition.Rule("gated_grouped_matmul", f"{', '.join(operands)} -> {', '.join([f'ROWS {n}'] * count)}")


def _problem(call: Call, lhs: jax.Array, w_gate: jax.Array, w_up: jax.Array, sizes: jax.Array, *rest: jax.Array) -> Problem:
    return Problem(
        m=rest[-1].shape[0] if call.row_indices else lhs.shape[0],
        n=w_gate.shape[1 if call.transpose_w else 2],
        k=lhs.shape[1],
        groups=w_gate.shape[0],
        dtype=lhs.dtype.name,
        out_dtype=call.out_dtype,
        layout="nt" if call.transpose_w else "nn",
        activation=call.activation,
        spread=call.spread,
        gradient=call.gradient,
        group_offset=call.group_offset,
        keep=call.keep,
        rhs_dtype=w_gate.dtype.name,
        scales=call.scales,
        lhs_rows=lhs.shape[0] if call.row_indices else 0,
    )


def reference(problem: Problem, lhs: jax.Array, w_gate: jax.Array, w_up: jax.Array, sizes: jax.Array, *rest: jax.Array) -> Any:
    """The same through XLA, in blocks of rows of one group: float32 accumulation, then rounding to out_dtype."""
    p = problem
    wide = np.promote_types(p.dtype, np.float32)
    contracted = 1 if p.layout == "nt" else 0  # of a matrix, which is not transposed for it
    if p.dtype in FLOAT8:
        return _reference_of_8_bits(p, lhs, (w_gate, w_up), sizes, rest)
    exact = gpus.current() is None  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others

    def multiplied(rows: jax.Array, matrix: jax.Array) -> jax.Array:
        if exact:
            rows, matrix = rows.astype(wide), matrix.astype(wide)
        return lax.dot_general(rows, matrix, (((1,), (contracted,)), ((), ())), preferred_element_type=wide)

    def block(outs: tuple[jax.Array, ...], group: Any, rows: jax.Array, inside: jax.Array) -> tuple[jax.Array, ...]:
        gate, up = (multiplied(lhs[rest[0][rows] if p.lhs_rows else rows], w[group]) for w in (w_gate, w_up))
        values: tuple[jax.Array, ...]
        if p.gradient:
            activated, backward = jax.vjp(functools.partial(activate, p.activation), gate)
            cotangent = rest[0][rows].astype(wide)
            values = backward(cotangent * up)[0], cotangent * activated
        else:
            values = (activate(p.activation, gate) * up, gate, up)[: results(p)]
        at = jnp.where(inside, rows, p.m)
        return tuple(out.at[at].set(x.astype(p.out_dtype), mode="drop") for out, x in zip(outs, values, strict=True))

    zeros, *_ = mesh.same_mesh_axes(jnp.zeros((p.m, p.n), p.out_dtype), lhs)
    outs = (zeros,) * results(p)
    outs = outs if 0 in (p.m, p.n) else for_each_block(sizes, p.m, block, outs, p.group_offset)
    return outs if results(p) > 1 else outs[0]


def _reference_of_8_bits(
    p: Problem, lhs: jax.Array, weights: tuple[jax.Array, jax.Array], sizes: jax.Array, scales: Sequence[jax.Array]
) -> jax.Array:
    """`reference` of 8-bit floats: gate and up as grouped_matmul's in float32, and then the activation.

    scales: and the indices of rows, if any.
    """
    if p.lhs_rows:
        *scales, indices = scales
        lhs = lhs[indices]
    one = dataclasses.replace(of_one(p), out_dtype="float32", lhs_rows=0)
    of_each: list[Sequence[jax.Array]] = [(scales[0], scale) for scale in scales[1:]] if scales else [(), ()]
    gate, up = (product_of_one(one, lhs, w, sizes, *mine) for w, mine in zip(weights, of_each, strict=True))
    out: jax.Array = (activate(p.activation, gate) * up).astype(p.out_dtype)
    return out


def dense(problem: Problem, lhs: jax.Array, w_gate: jax.Array, w_up: jax.Array, *rest: jax.Array) -> Any:
    """As many operations through XLA, of all rows with the matrices of one group: what the kernel is measured against."""
    t = problem.layout == "nt"
    rows = lhs[rest[1]] if problem.lhs_rows else lhs
    gate, up = (jnp.matmul(rows, w[0].mT if t else w[0]) for w in (w_gate, w_up))
    if not problem.gradient:
        out = activate(problem.activation, gate) * up
        return (out, gate, up) if problem.keep else out
    activated, backward = jax.vjp(functools.partial(activate, problem.activation), gate)
    return backward(rest[1] * up)[0], rest[1] * activated


def _baseline(problem: Problem | None) -> Baseline | None:
    """As many dense operations; of 8-bit floats the reference."""
    if problem is not None and problem.dtype in FLOAT8:
        return None
    return Baseline("dense", dense, differs="it multiplies all rows by the matrices of one group")


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.grouped.gated import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="gated_grouped_matmul",
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
    plain=plain,
    baseline=_baseline,
)

__all__ = ["SPEC", "Config", "Problem", "default", "gated_grouped_matmul", "launch", "reference", "smem_bytes"]
