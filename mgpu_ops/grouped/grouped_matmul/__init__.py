"""grouped_matmul: each group of rows of lhs times a matrix of its own, float32 accumulation, for NVIDIA Hopper.

`problem.py` says what is computed and which configs can run it, `model.py` which are worth trying, `kernel.py` is the kernel
from load to store; here are the public functions with their gradient and batching rules, the reference, and the op's SPEC.
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
from jax.sharding import AxisType
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags, floats, integers
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, check_config, result_dtype
from mgpu_ops.grouped.batches import Kind, batchable
from mgpu_ops.grouped.calls import (
    check_finite_scales,
    checked_offset,
    checked_operands,
    checked_out_dtype,
    checked_residual,
    checked_row_indices,
    checked_row_scale,
    checked_scales,
    checked_sizes,
    checked_spread,
)
from mgpu_ops.grouped.config import Config
from mgpu_ops.grouped.grouped_matmul.model import candidates, cost, default, distance, space
from mgpu_ops.grouped.grouped_matmul.problem import (
    SHAPES,
    SUITES,
    Problem,
    by_name,
    bytes_moved,
    check,
    flops,
    inputs,
    plain,
    supports,
    tolerance,
)
from mgpu_ops.grouped.sizes import Spread, for_each_block, of_shard
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import Baseline, OpSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call says beside its arrays."""

    transpose_rhs: bool
    out_dtype: str
    activation: Activation
    spread: Spread
    config: Config | None
    backend: dispatch.Backend | None
    group_offset: bool = False  # the sizes are those of a shard, as `sizes.of_shard` gives them
    scales: str = "none"


def grouped_matmul(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike | Sequence[int],
    *,
    row_indices: ArrayLike | None = None,
    bias: ArrayLike | None = None,
    activation: Activation = "none",
    row_scale: ArrayLike | None = None,
    residual: ArrayLike | None = None,
    scale_lhs: ArrayLike | None = None,
    scale_rhs: ArrayLike | None = None,
    group_offset: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_rhs: bool = False,
    spread: Spread = "random",
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """out[i, n] = activation(sum_k lhs[i, k] rhs[g, k, n] + bias[g, n]) for each row i of group g; zeros for rows of no group.

    With a factor for each row and an array to add, out[i, n] = row_scale[i] activation(...) + residual[i, n], rounded once, for
    rows of groups.

    The first group_sizes[0] rows belong to group 0, the next group_sizes[1] to group 1, and so on, as in `jax.lax.ragged_dot`:
    the tokens of a mixture of experts, sorted by expert. With row_indices, lhs[row_indices[i]] is in the place of lhs[i].

    Args:
      lhs: [m, k]; with row_indices [rows, k], in any order. bfloat16 or float16 for the kernel, or with `transpose_rhs`
        float8_e4m3fn or float8_e5m2: wgmma reads 8 bits along k only. All else runs through XLA.
      rhs: [groups, k, n], or [groups, n, k] with `transpose_rhs`, of lhs's dtype; the two 8-bit floats mix.
      group_sizes: [groups], integers, in rows; any sizes, 0 included. Their sum may be less than m: the rows beyond are zeros
        in the output, are not read, and cost no arithmetic. Where the sizes are known before the function runs, a negative one
        or a sum above m raises; where they are traced, a negative one counts as 0 and groups end at row m. Nothing is read or
        written out of bounds whatever they are.
      row_indices: [m] integers, the row of lhs for each row of the result, sorted by group, each from 0 to rows - 1; a row may
        come several times. Indices beyond those count as the nearest where they are not known, as under jit. The kernel reads
        16-bit rows where they are: no sorted copy of them is made. Default: lhs has the m rows in their order.
      bias: [groups, n] floats, added in float32. Default: none.
      activation: "none", "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf", applied in float32 before rounding.
      row_scale: [m] floats, by which the rows of the result are multiplied in float32 before rounding, such as the routing
        weights of a mixture of experts. Default: none.
      residual: [m, n] of the result's dtype, added last to rows of groups, in float32 before rounding. Rows of no group are
        zeros with it too: their residual counts for nothing and has no gradient. So the results of shards of the groups add up
        to that of all of them, with each residual once. Default: none.
      scale_lhs, scale_rhs: what 8-bit floats were divided by, float32 (`mgpu_ops.quantize`), by which the products are
        multiplied before the bias. Numbers, or of rhs one for each group, [groups]; or of the rows of lhs and the columns of
        rhs, [m] or [m, 1] and [groups, n] or [groups, 1, n]; or of blocks of 1 x 128 and 128 x 128, [m, k / 128] and
        [groups, n / 128, k / 128], rounded up. Default: 1. A number goes with any of them.
      group_offset: an integer, of shape () or (1,), for a shard of the groups: group_sizes are then those of all groups, and
        rhs has those from number `group_offset` on. Rows of groups that rhs has not are zeros in the output, and are not read.
        A known one is refused where rhs reaches beyond the groups; traced, groups that do not exist have no rows.
      out_dtype: of the result; lhs's dtype by default, or "float32". Of 8-bit floats bfloat16 by default, or any float.
      transpose_rhs: rhs is stored transposed; it is read in place, not copied.
      spread: how sizes are usually spread over the groups, which decides which tuned config runs and nothing else: "even",
        "random" (the default), "skewed" or "sparse" (half of the groups empty).
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and otherwise "xla", logging once why.

    Returns:
      [m, n] of out_dtype.

    Works under jit, grad (reverse mode; lhs's gradient runs this kernel on rhs as stored, rhs's runs `ragged_contraction`;
    with an activation the forward pass then stores its argument; row_scale's gradient takes the rows of lhs and of its
    gradient, and no further product; with row_indices the backward pass gathers the rows first, and adds the gradients of a row
    that comes several times in float32, in an order that the indices fix), vmap, scan and shard_map.

    vmap is one launch: XLA brings the rows of all products into the order of their groups and puts the results back. Where rhs
    is not mapped, rows of one group come together from all products, and its matrix is read once. A bias or scales that are
    mapped where rhs is not, and scales of whole operands, make it one launch after the other.

    8-bit floats are multiplied exactly, and summed over k as in `matmul`, which tells the error: it grows as 2^-13 sqrt(k) of
    typical results of both signs. Scales of blocks end such a sum at every 128 of k and add up in float32. There is no gradient
    with scales or operands of 8 bits, as JAX would have it in their 8 bits, without a scale of its own:
    `mgpu_ops.fp8_grouped_matmul` of the numbers before `mgpu_ops.quantize` has one.

    Raises:
      ValueError: ranks, shapes or dtypes that do not fit each other, known sizes that are negative or exceed m, known indices
        of no row, an unknown activation, spread or backend, a config that cannot run, a gradient that there is not, a known
        scale_lhs or scale_rhs that is not finite (traced ones: see `matmul`). A row's counts where a group has the row, and so
        where the sizes are known too.
      TypeError: floats or integers expected and not found.

    Example:
      >>> lhs = jnp.ones((96, 128), jnp.bfloat16)
      >>> rhs = jnp.ones((3, 128, 256), jnp.bfloat16) * jnp.array([1, 2, 3])[:, None, None]
      >>> out = mgpu_ops.grouped_matmul(lhs, rhs, jnp.array([32, 0, 64]))  # rows 32 and on are of the last group
      >>> out.shape, float(out[31, 0]), float(out[32, 0])
      ((96, 256), 128.0, 384.0)

    Source: the kernel's own, in kernel.py; measurements in docs/kernels/grouped_matmul.md.
    """
    lhs, rhs = checked_operands("grouped_matmul", ("lhs", lhs, 2), ("rhs", rhs, 3), mixed=FLOAT8)
    transpose_rhs = flags.checked("transpose_rhs", transpose_rhs)
    k, n = rhs.shape[:0:-1] if transpose_rhs else rhs.shape[1:]
    if lhs.shape[1] != k:
        raise ValueError(
            f"lhs{lhs.shape} and rhs{rhs.shape} differ in k: {lhs.shape[1]} != {k} (transpose_rhs={transpose_rhs})"
        )
    indices = {} if row_indices is None else {"row_indices": checked_row_indices(row_indices, lhs.shape[0])}
    m = indices["row_indices"].shape[0] if indices else lhs.shape[0]
    sizes = checked_sizes("grouped_matmul", group_sizes, rhs.shape[0], m, group_offset)
    if bias is not None:
        bias = floats.array("grouped_matmul", "bias", bias)
        if bias.shape != (rhs.shape[0], n):
            raise ValueError(f"bias has shape {bias.shape}: it must be [groups, n] = {(rhs.shape[0], n)}")
        bias = bias.astype(np.promote_types(bias.dtype, np.float32))
    check_config("config", config, Config, "GroupedMatmulConfig")
    scales, extra = checked_scales((scale_lhs, scale_rhs), (m, n, k), rhs.shape[0])
    check_finite_scales(sizes, group_offset is not None, scale_lhs=scale_lhs, scale_rhs=scale_rhs)
    extra |= {} if bias is None else {"bias": bias}
    if row_scale is not None:
        extra["row_scale"] = checked_row_scale("grouped_matmul", row_scale, m)
    out = checked_out_dtype(out_dtype, result_dtype(lhs.dtype.name))
    if residual is not None:
        extra["residual"] = checked_residual("grouped_matmul", residual, (m, n), out)
    extra |= indices
    call = Call(
        transpose_rhs=transpose_rhs,
        out_dtype=out,
        activation=checked_activation(activation),
        spread=checked_spread(spread),
        config=config,
        backend=dispatch.requested_backend(backend),
        group_offset=group_offset is not None,
        scales=scales,
    )
    lhs, rhs, sizes, *rest = mesh.same_mesh_axes(lhs, rhs, sizes, *extra.values())
    return product(call, lhs, rhs, sizes, **dict(zip(extra, rest, strict=True)))


_jax_ragged_dot = lax.ragged_dot  # bound here: a program may put ours in its place


def ragged_dot(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike,
    precision: lax.PrecisionLike = None,
    preferred_element_type: DTypeLike | None = None,
    group_offset: ArrayLike | None = None,
    out_sharding: Any = None,
    *,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """`jax.lax.ragged_dot` with its arguments, through `grouped_matmul` where that computes the same, else through JAX.

    lhs[m, k], rhs[g, k, n], group_sizes[g] -> [m, n]. `grouped_matmul` runs two operands of one dtype, bfloat16, float16,
    float32 or float64, with a result of that dtype or float32, known dimensions, no `out_sharding`, no explicit mesh axes and a
    default `precision`; products of 16-bit floats, exact in float32, may have any. All else, and every error in the arguments,
    is JAX's own.

    With a `group_offset`, which JAX documents but does not compute, rhs may have fewer groups than group_sizes: those from that
    number on, as in `grouped_matmul`.

    Where `grouped_matmul` runs, three things differ from JAX: negative sizes count as 0, vmap takes any axis of any argument,
    and forward-mode differentiation (`jax.jvp`, `jax.hessian`) raises TypeError: call `jax.lax.ragged_dot` for it.

    Raises ValueError for a backend that is unknown, or that is named and is a kernel which cannot run this.
    """
    wanted = dispatch.requested_backend(backend)
    part = group_offset is not None
    if out_sharding is not None or not _is_grouped_matmul(lhs, rhs, group_sizes, precision, preferred_element_type, part):
        if backend not in (None, "xla"):
            raise ValueError(f"backend={backend!r} cannot run this ragged_dot, which only JAX's own does: pass backend=None")
        jaxs: Any = _jax_ragged_dot  # whose types are narrower than what it takes
        return jaxs(lhs, rhs, group_sizes, precision, preferred_element_type, group_offset, out_sharding)
    lhs, rhs = jnp.asarray(lhs), jnp.asarray(rhs)
    sizes = integers.clipped(group_sizes, lhs.shape[0])
    if part:
        groups = rhs.shape[0]
        sizes = of_shard(sizes, lhs.shape[0], checked_offset(group_offset, sizes.shape[0], groups), groups)
    out = checked_out_dtype(preferred_element_type, lhs.dtype)
    call = Call(False, out, "none", "random", None, wanted, group_offset=part)
    return product(call, *mesh.same_mesh_axes(lhs, rhs, sizes))


def _is_grouped_matmul(lhs: Any, rhs: Any, sizes: Any, precision: Any, out_dtype: Any, part: bool) -> bool:
    """Whether these are arrays that `grouped_matmul` multiplies as `jax.lax.ragged_dot` does; part: rhs has some groups."""
    arrays = lhs, rhs, sizes
    if not all(isinstance(x, jax.Array | np.ndarray) for x in arrays):
        return False
    lhs, rhs, sizes = (jax.typeof(x) for x in arrays)
    return (
        (lhs.ndim, rhs.ndim, sizes.ndim) == (2, 3, 1)
        and lhs.shape[1] == rhs.shape[1]
        and (0 < rhs.shape[0] <= sizes.shape[0] if part else rhs.shape[0] == sizes.shape[0] > 0)
        and are_plain(lhs, rhs, sizes, precision, out_dtype)
    )


def are_plain(lhs: Any, rhs: Any, sizes: Any, precision: Any, out_dtype: Any) -> bool:
    """Whether arrays of these types are multiplied by ours as by JAX, whatever their ranks are."""
    types = lhs, rhs, sizes
    return (
        all(isinstance(size, int) for x in types for size in x.shape)  # an exported function may have symbolic ones
        and lhs.dtype == rhs.dtype
        and lhs.dtype.name in ("bfloat16", "float16", "float32", "float64")
        and precision in (None, "default", *(lax.Precision if lhs.dtype.itemsize == 2 else [lax.Precision.DEFAULT]))
        and jnp.dtype(lhs.dtype if out_dtype is None else out_dtype) in (lhs.dtype, jnp.float32)
        and jnp.issubdtype(sizes.dtype, jnp.integer)
        and not any(AxisType.Explicit in x.sharding.mesh.axis_types for x in types)
    )


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def product(
    call: Call,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    scale_lhs: jax.Array | None = None,
    scale_rhs: jax.Array | None = None,
    row_indices: jax.Array | None = None,
    residual: jax.Array | None = None,
) -> jax.Array:
    """`grouped_matmul` of arguments that were checked. `gradients.py` makes it differentiable."""
    every = {"scale_lhs": scale_lhs, "scale_rhs": scale_rhs, "bias": bias, "row_scale": row_scale, "residual": residual}
    every["row_indices"] = row_indices
    extra = {name: x for name, x in every.items() if x is not None}
    return _batchable(call, tuple(extra))(lhs, rhs, sizes, *extra.values())


def sum_of_two(
    call: Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, lhs2: jax.Array, rhs2: jax.Array, *scales: jax.Array
) -> jax.Array:
    """lhs rhs + lhs2 rhs2 by group, accumulated in float32 and rounded once. It has no gradient.

    scales: scale_lhs and scale_rhs of both products, where the call has them.
    """
    names = ("lhs2", "rhs2", "scale_lhs", "scale_rhs")[: 2 + len(scales)]
    return _batchable(call, names)(lhs, rhs, sizes, lhs2, rhs2, *scales)


def gated_gradients(
    call: Call,
    g: jax.Array,
    w_down: jax.Array,
    sizes: jax.Array,
    gate: jax.Array,
    up: jax.Array,
    row_scale: jax.Array,
) -> tuple[jax.Array, jax.Array, jax.Array, jax.Array]:
    """Of out = row_scale * (hidden w_down) by group, hidden = activation(gate) * up, and its gradient g [m, k]:

    the gradients of gate and of up, both [m, n]; row_scale * hidden, [m, n], whose contraction with g is the gradient of
    w_down; and that of row_scale, [m], float32 or wider. One kernel. w_down: [groups, n, k]. It has no gradient.
    """
    return _batchable(call, ("gate", "up", "row_scale"))(g, w_down, sizes, gate, up, row_scale)


@functools.cache
def _batchable(call: Call, extra: tuple[str, ...]) -> Any:
    """The call as a function of arrays; `extra` names those beside lhs, rhs and sizes."""

    def product(lhs: jax.Array, rhs: jax.Array, *rest: jax.Array) -> jax.Array:
        rows = rest[-1].shape[0] if "row_indices" in extra else lhs.shape[0]
        problem = _problem(call, extra, rows, lhs, rhs)
        return dispatch.run(SPEC, problem, (lhs, rhs, *rest), config=call.config, backend=call.backend)

    of_lhs: Kind = "named" if "row_indices" in extra else "rows"
    kinds: list[Kind] = [of_lhs, "matrices", "sizes", *(_kind(call, name) for name in extra)]
    plain = functools.partial(_batchable, dataclasses.replace(call, group_offset=False), extra)
    rule = functools.partial(_rule, call, extra)
    count = 4 if "gate" in extra else 1
    return batchable(product, kinds, "rows", count, call.group_offset, plain, rule=rule, backend=call.backend)


def _rule(call: Call, extra: tuple[str, ...], *_: jax.Array) -> partition.Rule:
    """Columns are split, and k where nothing but a factor follows its sum. Rows are not: groups begin anywhere in them."""
    linear = call.activation == "none" and call.scales != "block" and not {"bias", "gate", "residual"} & {*extra}
    k, n = "k" if linear else "K", "N" if call.scales == "block" else "n"
    rows = "NAMED" if "row_indices" in extra else "ROWS"
    rhs = f"GROUPS {n} {k}" if call.transpose_rhs else f"GROUPS {k} {n}"
    scale = {"row": ("ROWS", "GROUPS n"), "block": ("ROWS K_BLOCKS", "GROUPS A B")}.get(call.scales, ("ONE", "GROUPS"))
    dimensions = {
        "bias": f"GROUPS {n}",
        "lhs2": f"{rows} {k}",
        "rhs2": rhs,
        "gate": f"ROWS {n}",
        "up": f"ROWS {n}",
        "row_scale": "ROWS",
        "residual": f"ROWS {n}",
        "row_indices": "ROWS",
        "scale_lhs": scale[0],
        "scale_rhs": scale[1],
    }
    operands = [f"{rows} {k}", rhs, "SIZES", *(dimensions[name] for name in extra)]
    results = [f"ROWS {n}"] * 3 + ["ROWS"] if "gate" in extra else [f"ROWS {n}"]
    return partition.Rule("grouped_matmul", f"{', '.join(operands)} -> {', '.join(results)}")


def _kind(call: Call, name: str) -> Kind:
    """What the first axis of one of the extra arrays counts."""
    if name in ("bias", "rhs2", "scale_rhs"):
        return "matrices"
    if name == "row_indices":
        return "indices"
    return "others" if name == "scale_lhs" and call.scales == "tensor" else "rows"


def _problem(call: Call, extra: Sequence[str], rows: int, lhs: jax.Array, rhs: jax.Array) -> Problem:
    """Of a result of so many rows."""
    return Problem(
        m=rows,
        n=rhs.shape[1 if call.transpose_rhs else 2],
        k=lhs.shape[1],
        groups=rhs.shape[0],
        dtype=lhs.dtype.name,
        out_dtype=call.out_dtype,
        layout="nt" if call.transpose_rhs else "nn",
        bias="bias" in extra,
        activation=call.activation,
        spread=call.spread,
        group_offset=call.group_offset,
        row_scale="row_scale" in extra,
        second="lhs2" in extra,
        rhs_dtype=rhs.dtype.name,
        scales=call.scales,
        gated_gradient="gate" in extra,
        lhs_rows=lhs.shape[0] if "row_indices" in extra else 0,
        residual="residual" in extra,
    )


def reference(problem: Problem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *rest: jax.Array) -> Any:
    """The same through XLA, in blocks of rows of one group: float32 accumulation, then rounding to out_dtype."""
    p = problem
    extra = by_name(p, rest)
    if p.dtype in FLOAT8:  # a GPU's XLA would leave out a rounding to 8 bits that is followed by a widening
        lhs, rhs = lax.optimization_barrier((lhs, rhs))
    wide = np.promote_types(p.dtype, np.float32)
    contracted = 1 if p.layout == "nt" else 0  # of b, which is not transposed for it
    # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others; nor does it scale blocks of 8 bits.
    exact = gpus.current() is None or p.rhs_dtype != "none" or p.scales == "block"

    def multiplied(lhs: jax.Array, rhs: jax.Array, group: Any, rows: jax.Array) -> jax.Array:
        a, b = lhs[extra["row_indices"][rows] if p.lhs_rows else rows], rhs[group]
        if exact:
            a, b = a.astype(wide), b.astype(wide)
        if p.scales == "block":  # the numbers themselves, in float32
            a *= of_each(extra["scale_lhs"][rows], a.shape, (1,))
            b *= of_each(extra["scale_rhs"][group], b.shape, (0, 1) if contracted else (1, 0))
        return lax.dot_general(a, b, (((1,), (contracted,)), ((), ())), preferred_element_type=wide)

    def scaled(values: jax.Array, group: Any, rows: jax.Array) -> jax.Array:
        """Times the scales of operands, or of rows and columns."""
        if p.scales == "tensor":
            values *= extra["scale_lhs"][0] * extra["scale_rhs"][group]
        if p.scales == "row":
            values *= extra["scale_lhs"][rows][:, None]
            values *= extra["scale_rhs"][group][None]
        return values

    def block(out: jax.Array, group: Any, rows: jax.Array, inside: jax.Array) -> jax.Array:
        values = multiplied(lhs, rhs, group, rows)
        if p.second:
            values += multiplied(extra["lhs2"], extra["rhs2"], group, rows)
        values = scaled(values, group, rows)
        if p.bias:
            values += extra["bias"][group][None]
        values = activate(p.activation, values)
        if p.row_scale:
            values *= extra["row_scale"][rows][:, None].astype(wide)
        if p.residual:
            values = values + extra["residual"][rows].astype(np.promote_types(wide, p.out_dtype))
        return out.at[jnp.where(inside, rows, p.m)].set(values.astype(p.out_dtype), mode="drop")

    if p.gated_gradient:
        return _reference_of_gated(p, multiplied, lhs, rhs, sizes, extra)
    zeros = jnp.zeros((p.m, p.n), p.out_dtype)
    (zeros,) = mesh.same_mesh_axes(zeros, lhs)[:1]
    return zeros if 0 in (p.m, p.n) else for_each_block(sizes, p.m, block, zeros, p.group_offset)


def of_each(scales: jax.Array, shape: tuple[int, ...], axes: tuple[int, ...]) -> jax.Array:
    """Scales of blocks of 128 along these axes of an array, in the order of their own, as an array of its shape."""
    last = scales.ndim - len(axes)
    if axes == (1, 0):  # the array is stored the other way round
        scales, axes = scales.T, (0, 1)
    for number, axis in enumerate(axes):
        scales = jnp.repeat(scales, BLOCK, last + number)
        scales = lax.slice_in_dim(scales, 0, shape[axis], axis=last + number)
    return scales


def _reference_of_gated(
    p: Problem, multiplied: Any, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, extra: dict[str, jax.Array]
) -> tuple[jax.Array, ...]:
    """`reference` of a gated gradient: the gradients of gate, up and row_scale, and row_scale * hidden as the third of four."""
    wide = np.promote_types(p.dtype, np.float32)

    def block(outs: tuple[jax.Array, ...], group: Any, rows: jax.Array, inside: jax.Array) -> tuple[jax.Array, ...]:
        u, scale = multiplied(lhs, rhs, group, rows), extra["row_scale"][rows][:, None].astype(wide)
        gate, up = (extra[name][rows].astype(wide) for name in ("gate", "up"))
        activated, backward = jax.vjp(functools.partial(activate, p.activation), gate)
        values = backward(scale * u * up)[0], scale * u * activated, scale * activated * up, (u * activated * up).sum(axis=1)
        at = jnp.where(inside, rows, p.m)
        return tuple(out.at[at].set(x.astype(out.dtype), mode="drop") for out, x in zip(outs, values, strict=True))

    made = *[jnp.zeros((p.m, p.n), p.out_dtype)] * 3, jnp.zeros((p.m,), wide)
    zeros = tuple(mesh.same_mesh_axes(x, lhs)[0] for x in made)
    return zeros if 0 in (p.m, p.n) else for_each_block(sizes, p.m, block, zeros, p.group_offset)


def dense(problem: Problem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *rest: jax.Array) -> jax.Array:
    """A plain matmul through XLA of as many operations: what a grouped one is measured against."""
    if problem.lhs_rows:
        lhs = lhs[rest[-1]]
    return jnp.matmul(lhs, rhs[0].mT if problem.layout == "nt" else rhs[0])


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.grouped.grouped_matmul import gradient_kernel, kernel

    if problem.gated_gradient:
        return gradient_kernel.launch(problem, config, gpu, *arrays, interpret=interpret)
    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="grouped_matmul",
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
    baseline=lambda problem: Baseline("dense", dense, differs="it multiplies all rows by one matrix"),
    plain=plain,
)

__all__ = ["SPEC", "Config", "Problem", "default", "grouped_matmul", "launch", "ragged_dot", "reference"]
