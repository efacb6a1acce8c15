"""gated_matmul: activation(x w_gate) * (x w_up) in one kernel, float32 accumulation, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel,
of matmul's parts. Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
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

from mgpu_ops import flags, floats
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh, order
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.derivatives import first_order, refuse_8_bits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.matmul import SPEC as PRODUCT
from mgpu_ops.matmul import Problem as Product
from mgpu_ops.matmul import matmul
from mgpu_ops.matmul.arguments import epsilon_of, float_dtype
from mgpu_ops.matmul.gated.activation import FEW, run_gated_activation
from mgpu_ops.matmul.gated.model import baseline_cost, candidates, cost, default, distance, margin, space
from mgpu_ops.matmul.gated.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    flops,
    halves,
    inputs,
    join,
    smem_bytes,
    supports,
    tolerance,
)
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rms_rows import normalised


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call other than its arrays."""

    activation: Activation
    transpose_w: bool
    out_dtype: str
    config: Config | None
    backend: dispatch.Backend | None
    gradient: bool = False
    stored: bool = False
    normalised: bool = False
    joined: bool = False  # one weight, of gate and up
    in_place: bool = False  # the gradients of a stored gate, and of up: where these lie


def gated_matmul(
    x: ArrayLike,
    w_gate: ArrayLike,
    w_up: ArrayLike | None,
    *,
    activation: Activation | None = "silu",
    rms_epsilon: float | None = None,
    out_dtype: DTypeLike | None = None,
    transpose_w: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """activation(x w_gate) * (x w_up) in one kernel, accumulated in float32 and rounded once: the first half of a gated layer.

    out[..., n] = activation(sum_k x[..., k] w_gate[k, n]) * sum_k x[..., k] w_up[k, n]

    Args:
      x: [..., k]. bfloat16 or float16 for the kernel; other floats run through XLA.
      w_gate, w_up: [k, n], or [n, k] with `transpose_w`, of x's dtype. With w_up=None, w_gate is both, [k, 2 n] or [2 n, k],
        gate's columns before up's. XLA then has one product, and with few rows is faster.
      activation: "silu", "gelu" (the tanh approximation), "gelu_erf", "relu", or "none" or None for a bilinear layer.
      rms_epsilon: where given, each row of x is first divided by sqrt(mean over k of x^2 + rms_epsilon), as in `matmul`.
      out_dtype: of the result; x's dtype by default, or "float32".
      transpose_w: both weights are stored transposed; they are read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known or predicted to be faster, otherwise "xla", and the log says why.

    Returns:
      [..., n] of out_dtype. The forward pass stores nothing else of that size.

    Works under jit, grad (reverse mode), vmap (one launch where x alone is mapped, else one after the other) and shard_map.
    The gradient keeps x and the weights, and neither gate nor up. A kernel of its own computes both products again, and of them
    the gradients of gate and up, two arrays [..., n] of x's dtype; four products of `matmul` follow. So the backward pass takes
    half as much arithmetic again as one that finds gate and up stored.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown activation or backend, a config that cannot run.
      TypeError: not arrays of floats.

    Source: the kernel's own, in mgpu_ops/matmul/gated/kernel.py; see docs/kernels/gated_matmul.md.
    """
    given = {"x": x, "w_gate": w_gate} | ({} if w_up is None else {"w_up": w_up})
    arrays = {name: floats.array("gated_matmul", name, a) for name, a in given.items()}
    for name, a in arrays.items():
        if a.dtype != arrays["x"].dtype:
            raise ValueError(f"x is {arrays['x'].dtype} and {name} is {a.dtype}: cast one with .astype")
        if a.ndim != 2 and (name != "x" or a.ndim == 0):
            raise ValueError(f"{name} has shape {a.shape}: gated_matmul takes x[..., k] and weights of rank 2; use jax.vmap")
    rows, *weights = arrays.values()
    transpose_w = flags.checked("transpose_w", transpose_w)
    k, n = _sides(transpose_w, *weights)
    if rows.shape[-1] != k:
        raise ValueError(
            f"x{rows.shape} and w_gate{weights[0].shape} differ in k: {rows.shape[-1]} != {k} (transpose_w={transpose_w})"
        )
    out = float_dtype(out_dtype, None, rows.dtype)
    check_config("config", config, Config, "GatedMatmulConfig")
    call = Call(
        checked_activation(activation),
        transpose_w,
        out.name,
        config,
        dispatch.requested_backend(backend),
        normalised=rms_epsilon is not None,
        joined=w_up is None,
    )
    epsilon = [] if rms_epsilon is None else [epsilon_of(rms_epsilon, rows)]
    return _gated(call, *mesh.same_mesh_axes(mesh.as_rows("x", rows), *weights, *epsilon)).reshape(*rows.shape[:-1], n)


def _sides(transpose_w: bool, gate: jax.Array, up: jax.Array | None = None) -> tuple[int, int]:
    """k and n of the weights, or of the one that has both."""
    k, n = gate.shape[::-1] if transpose_w else gate.shape
    if up is not None:
        if gate.shape != up.shape:
            raise ValueError(f"w_gate{gate.shape} and w_up{up.shape} differ: both are [k, n], or [n, k] with transpose_w")
        return k, n
    if n % 2:
        raise ValueError(f"w_gate{gate.shape} has an odd number of columns: with w_up=None it has as many of gate as of up")
    return k, n // 2


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _gated(call: Call, *arrays: jax.Array) -> jax.Array:
    """Of x, w_gate and w_up or one weight of both, and epsilon where x is normalised."""
    out: jax.Array = batchable(call)(*arrays)
    return out


def _forward(call: Call, *arrays: jax.Array) -> Any:
    refuse_8_bits("gated_matmul", "mgpu_ops.fp8_gated_mlp", *arrays)
    return _gated(call, *arrays), arrays


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[Any, ...]:
    """dgate and dup by the kernel; dx = dgate w_gate^T + dup w_up^T, dw_gate = x^T dgate and dw_up = x^T dup by matmul's."""
    if call.joined:
        x, both, *epsilon = saved
        problem = _problem(call, x, both)
        dx, dgate, dup, *rest = _backward(dataclasses.replace(call, joined=False), (x, *halves(problem, both), *epsilon), g)
        return dx, join(problem, dgate, dup), *rest
    x, w_gate, w_up, *epsilon = saved
    if epsilon:  # through x's rows as XLA normalises them
        rows, back = jax.vjp(normalised, x, *epsilon)
        drows, *of_weights = _backward(dataclasses.replace(call, normalised=False), (rows, w_gate, w_up), g)
        return *back(drows)[:1], *of_weights, jnp.zeros_like(*epsilon)
    again = dataclasses.replace(call, out_dtype=x.dtype.name, config=None, gradient=True)
    dgate, dup = batchable(again)(x, w_gate, w_up, g.astype(x.dtype))
    t = call.transpose_w

    def dw(of: jax.Array) -> jax.Array:
        a, b = (of, x) if t else (x, of)
        return matmul(a, b, transpose_a=True, backend=call.backend)

    weights, (dgate, dup) = order.weights_first((dw(dgate), dw(dup)), (dgate, dup))
    dx = matmul(dgate, w_gate, transpose_b=not t, backend=call.backend)
    dx = matmul(dup, w_up, transpose_b=not t, residual=dx, backend=call.backend)
    return dx, *weights


_gated.defvjp(*first_order("gated_matmul", _forward, _backward))


@functools.cache
def batchable(call: Call) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""

    def one_device(*arrays: jax.Array) -> Any:
        problem = _problem(call, *arrays)
        if not call.joined:
            spec = _IN_PLACE if call.in_place else SPEC
            return dispatch.run(spec, problem, arrays, config=call.config, backend=call.backend)
        both, instead = (arrays[0], arrays[1], *arrays[1:]), functools.partial(_joined_apart, problem)
        return dispatch.run(SPEC, problem, both, config=call.config, backend=call.backend, instead=instead)

    product = jax.custom_batching.custom_vmap(partition.partitioned(one_device, functools.partial(_rule, call), call.backend))

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        marks = (True, True) if call.gradient or call.stored else True
        end = (2 if call.stored or call.joined else 3) + call.normalised
        if not any(batched[1:end]) and all((batched[0], *batched[end:])):  # one product with more rows
            x, *weights = arrays[:end]
            out = run(lax.collapse(x, 0, -1), *weights, *(lax.collapse(y, 0, -1) for y in arrays[end:]))
            return jax.tree.map(lambda y: y.reshape(*x.shape[:-1], y.shape[-1]), out), marks
        return one_after_the_other(run, batched, arrays), marks

    run = jax.jit(product)
    return run


def _rule(call: Call, *arrays: jax.Array) -> partition.Rule:
    """Rows and columns are split, the latter not of one weight of both products."""
    n, columns = ("N", "BOTH") if call.joined else ("n", "n")
    weights = (1 if call.stored or call.joined else 2) * (f"{columns} K" if call.transpose_w else f"K {columns}",)
    operands = ["m K", *weights, *("ONE",) * call.normalised]
    operands += [f"m {n}"] * (len(arrays) - len(operands))
    results = ", ".join([f"m {n}"] * (2 if call.gradient or call.stored else 1))
    return partition.Rule("gated_matmul", f"{', '.join(operands)} -> {results}")


def _problem(call: Call, x: jax.Array, w_gate: jax.Array, *_: jax.Array) -> Problem:
    n = w_gate.shape[0 if call.transpose_w else 1] // (2 if call.joined else 1)
    layout = "nt" if call.transpose_w else "nn"
    return Problem(
        x.shape[0],
        n,
        x.shape[1],
        x.dtype.name,
        call.out_dtype,
        layout,
        call.activation,
        call.gradient,
        call.stored,
        call.normalised,
        call.joined,
    )


def reference(problem: Problem, x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *g: jax.Array) -> Any:
    """The same through XLA: two products (cuBLAS on a GPU) and what is made of them.

    On a GPU gate and up are rounded to out_dtype, as a program written with jnp would.
    """
    p = problem
    if p.stored:
        return _of_stored(p, x, w_gate, w_up, *g)
    if p.normalised:
        x = normalised(x, g[0])
    wide = np.promote_types(p.dtype, np.float32)
    kept = jnp.dtype(p.dtype) if p.dtype == p.out_dtype and gpus.current() is not None else wide
    weights = [w_gate] if p.joined else [w_gate, w_up]
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        x, *weights = (a.astype(wide) for a in (x, *weights))
    found = [jnp.matmul(x, w.mT if p.layout == "nt" else w, preferred_element_type=kept) for w in weights]
    gate, up = jnp.split(found[0], 2, -1) if len(found) == 1 else found
    if not p.gradient:
        return (activate(p.activation, gate) * up).astype(p.out_dtype)
    activated, backward = jax.vjp(functools.partial(activate, p.activation), gate)
    cotangent = g[0].astype(gate.dtype)
    return backward(cotangent * up)[0].astype(p.out_dtype), (cotangent * activated).astype(p.out_dtype)


def _joined_apart(p: Problem, x: jax.Array, w: jax.Array, _: jax.Array, *epsilon: jax.Array) -> jax.Array:
    """Of few rows, `matmul`, and `gated_activation`'s kernel behind it, which also divides by the norm of x's rows."""
    if p.m > FEW or p.out_dtype != p.dtype:
        return reference(p, x, w, w, *epsilon)
    both = Product(p.m, 2 * p.n, p.k, p.dtype, p.out_dtype, p.layout)
    product = dispatch.run(PRODUCT, both, (x, w), config=None, backend=None)
    norm = (x, *epsilon) if epsilon else ()
    return run_gated_activation(checked_activation(p.activation), None, product, *norm)


def _of_stored(p: Problem, x: jax.Array, w: jax.Array, gate: jax.Array, *up: jax.Array) -> Any:
    """`reference` with a stored gate: of up = x w activation(gate) * up, and up; or of g = x w the gradients of both."""
    wide = np.promote_types(p.dtype, np.float32)
    kept = jnp.dtype(p.dtype) if gpus.current() is not None else wide
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        x, w = x.astype(wide), w.astype(wide)
    product = jnp.matmul(x, w.mT if p.layout == "nt" else w, preferred_element_type=kept)
    if not p.gradient:
        return (activate(p.activation, gate.astype(kept)) * product).astype(p.out_dtype), product.astype(p.out_dtype)
    activated, backward = jax.vjp(functools.partial(activate, p.activation), gate.astype(kept))
    return backward(product * up[0].astype(kept))[0].astype(p.out_dtype), (product * activated).astype(p.out_dtype)


def launch(
    problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False, in_place: bool = False
) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.matmul.gated import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret, in_place=in_place)


SPEC = OpSpec(
    name="gated_matmul",
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
    modelled_margin=margin,
    baseline_keeps_sms=True,
)
_IN_PLACE = dataclasses.replace(SPEC, run=functools.partial(launch, in_place=True))

__all__ = ["SPEC", "Config", "Problem", "default", "gated_matmul", "launch", "reference", "smem_bytes"]
