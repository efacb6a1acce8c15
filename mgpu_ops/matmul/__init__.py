"""matmul: activation(A B + bias) + residual, float32 accumulation, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel,
from load to store. `epilogue.py`: what follows the product, through XLA. Here: the public function, its gradient and batching
rules, the reference, and the op's SPEC.
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
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.activations import Activation, activate, checked_activation
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.matmul import xla
from mgpu_ops.matmul.epilogue import by_name, ranks, with_epilogue
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
    plain,
    smem_bytes,
    supports,
    tolerance,
    transposed,
)
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays, of which the last may be a bias and a residual."""

    transpose_a: bool
    transpose_b: bool
    out_dtype: str
    config: Config | None
    backend: dispatch.Backend | None
    activation: Activation = "none"
    bias: bool = False
    residual: bool = False

    def plain(self, **changes: Any) -> _Call:
        """A product without an epilogue, with the database's config."""
        return dataclasses.replace(self, config=None, activation="none", bias=False, residual=False, **changes)


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    out_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """activation(A B + bias) + residual, accumulated in float32, by the kernel tuned for the running GPU.

    out[..., m, n] = activation(sum_k A[..., m, k] B[..., k, n] + bias[n]) + residual[..., m, n], rounded once, when stored.

    Args:
      a: A, [..., m, k], or [..., k, m] with `transpose_a`. bfloat16 or float16 for the kernel; other floats run through XLA.
      b: B, [..., k, n], or [..., n, k] with `transpose_b`, of a's dtype.
      bias: [n] floats. Default: none.
      activation: "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf" of float32 values. Default: none.
      residual: of the result's dtype, and of its shape or one that broadcasts to it. Default: none.
      out_dtype: of the result; a's dtype by default. "float32" keeps the accumulator as it is.
      preferred_element_type: another name for out_dtype, as in `jax.numpy.matmul`.
      transpose_a, transpose_b: the operand is stored transposed; it is read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known or modelled to be faster, otherwise "xla", and the log says why.

    Leading dimensions are those of `jax.numpy.matmul`. Those of a alone are more rows of one product; else they are a batch of
    products in one launch, which all read an operand that has none. Where both operands have some and they differ, they are
    broadcast, which copies. A vector a or b is a row or column; n = 1 runs through XLA.

    Returns:
      [..., m, n] of out_dtype, without m or n where a or b is a vector. Over a k of zero the product is zeros, as in
      `jax.numpy.matmul`.

    Works under jit, grad (reverse mode), vmap (one launch for the whole batch) and shard_map. The config is looked up when a
    shape is traced: `mgpu_ops.explain` says which one and why.

    Both gradients of the product run the same kernels, on cotangents rounded to a's dtype. Nothing is kept for them but a and
    b, and with an activation A B + bias: the kernel then stores that, rounded to out_dtype, and XLA applies activation and
    residual. `jax.checkpoint` computes it again instead.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown activation or backend, a config that cannot run.
      TypeError: not arrays of floats.

    Source: the kernel's own, in mgpu_ops/matmul/kernel.py; measurements in docs/kernels/matmul.md.
    """
    arrays = _checked(a, b, bias, residual)
    out = float_dtype(out_dtype, preferred_element_type, arrays["a"].dtype)
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is {config!r}: pass a mgpu_ops.MatmulConfig")
    call = _Call(
        bool(transpose_a),
        bool(transpose_b),
        out.name,
        config,
        dispatch.requested_backend(backend),
        checked_activation(activation),
        bias is not None,
        residual is not None,
    )
    return products(call, **arrays)


def _checked(a: ArrayLike, b: ArrayLike, bias: ArrayLike | None, residual: ArrayLike | None) -> dict[str, jax.Array]:
    """The arrays there are, by name. Raises for one that is no array of floats, and for two dtypes of a and b."""
    given = {"a": a, "b": b} | {k: x for k, x in (("bias", bias), ("residual", residual)) if x is not None}
    arrays = {name: floats("matmul", name, x) for name, x in given.items()}
    for name in ("a", "b"):
        if arrays[name].ndim == 0:
            raise ValueError(f"{name} is a scalar: matmul takes arrays of rank 1 or more; multiply by it")
    if arrays["a"].dtype != arrays["b"].dtype:
        raise ValueError(f"a is {arrays['a'].dtype} and b is {arrays['b'].dtype}: cast one with .astype")
    return arrays


def floats(op: str, name: str, x: Any) -> jax.Array:
    """The argument as an array. TypeError where it is none, or none of floats."""
    try:
        array = jnp.asarray(x)
    except (TypeError, ValueError):
        shapes = "; jax.eval_shape takes shapes" if isinstance(x, jax.ShapeDtypeStruct) else ""
        raise TypeError(f"{name} is {x!r:.80}, which is no array: {op} takes arrays of floats{shapes}") from None
    if not jnp.issubdtype(array.dtype, jnp.floating):
        raise TypeError(f"{name} has dtype {array.dtype}: {op} takes floats; cast it first")
    return array


def _dtype(x: DTypeLike) -> Any:
    try:
        return jnp.dtype(x)
    except TypeError:
        raise TypeError(f"out_dtype={x!r} is no dtype: name a float's, such as jnp.float32") from None


def float_dtype(out_dtype: DTypeLike | None, preferred: DTypeLike | None, dtype: DTypeLike) -> Any:
    """The dtype of the result. Raises for one that is no float, and for two that differ."""
    named = [_dtype(x) for x in (out_dtype, preferred) if x is not None]
    if len({*named}) == 2:
        raise ValueError(f"out_dtype={named[0]} and preferred_element_type={named[1]} are one argument: pass one of them")
    out = named[0] if named else jnp.dtype(dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"out_dtype {out} is not a float: cast the result instead")
    return out


def products(
    call: _Call, a: jax.Array, b: jax.Array, bias: jax.Array | None = None, residual: jax.Array | None = None
) -> jax.Array:
    """`matmul` of operands of any rank: as one product of more rows, or as a batch of products."""
    if (call.transpose_a and a.ndim == 1) or (call.transpose_b and b.ndim == 1):
        raise ValueError(f"a{a.shape} and b{b.shape} with transpose_a={call.transpose_a}, transpose_b={call.transpose_b}: "
                         "a vector has no transpose; leave the argument out")  # fmt: skip
    a_axes, b_axes = (-1, -2) if call.transpose_a else (-2, -1), (-1, -2) if call.transpose_b else (-2, -1)
    wide_a, wide_b = a[None] if a.ndim == 1 else a, b[:, None] if b.ndim == 1 else b
    (m, k_a), (k_b, n) = (wide_a.shape[i] for i in a_axes), (wide_b.shape[i] for i in b_axes)
    if k_a != k_b:
        raise ValueError(
            f"a{a.shape} and b{b.shape} differ in k: {k_a} != {k_b} "
            f"(transpose_a={call.transpose_a}, transpose_b={call.transpose_b})"
        )
    lead = _broadcast_batches(wide_a, wide_b)
    shape = (*lead, *(m,) * (a.ndim > 1), *(n,) * (b.ndim > 1))
    if bias is not None and bias.shape != (n,):
        raise ValueError(f"bias has shape {bias.shape}: it must be [n] = {(n,)}")
    if residual is not None:
        residual = _like_the_result(residual, shape, call.out_dtype).reshape(*lead, m, n)
    operands = [wide_a, wide_b, *(x for x in (bias, residual) if x is not None)]
    if not lead:
        return _matmul(call, *mesh.same_mesh_axes(*operands)).reshape(shape)
    size = math.prod(lead)
    if wide_b.ndim == 2 and not call.transpose_a:  # more rows of one product
        rows = (x if x.ndim < 3 else x.reshape(size * m, x.shape[-1]) for x in operands)
        return _matmul(call, *mesh.same_mesh_axes(*rows)).reshape(shape)
    in_axes = tuple(0 if x.ndim > 2 else None for x in operands)
    batch = (x if x.ndim < 3 else _broadcast(x, lead).reshape(size, *x.shape[-2:]) for x in operands)
    return jax.vmap(functools.partial(_matmul, call), in_axes)(*mesh.same_mesh_axes(*batch)).reshape(shape)


def _broadcast(x: jax.Array, lead: tuple[int, ...]) -> jax.Array:
    return jnp.broadcast_to(x, (*lead, *x.shape[-2:]))


def _broadcast_batches(a: jax.Array, b: jax.Array) -> tuple[int, ...]:
    try:
        return jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"the leading dimensions of a{a.shape} and b{b.shape} do not broadcast to each other") from None


def _like_the_result(residual: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """The residual in the shape of the result. Raises for another shape or dtype."""
    if residual.dtype != dtype:
        raise ValueError(f"residual is {residual.dtype} and the result {dtype}: cast it, or pass its dtype as out_dtype")
    try:
        fits = jnp.broadcast_shapes(residual.shape, shape) == shape
    except ValueError:
        fits = False
    if not fits:
        raise ValueError(f"residual has shape {residual.shape}: it must broadcast to the result's, {shape}")
    return jnp.broadcast_to(residual, shape)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: _Call, *arrays: jax.Array) -> jax.Array:
    """The product of A and B of rank 2, then bias [n] and residual [m, n] where the call has them."""
    return _batchable(call)(*arrays)


def _forward(call: _Call, *arrays: jax.Array) -> Any:
    """The result, and what the backward pass needs: A, B, and with an activation its argument."""
    a, b, *extra = arrays
    saved = (a, b, extra[0] if call.bias else None, None)
    if call.activation == "none":
        return _matmul(call, *arrays), saved
    linear = _matmul(dataclasses.replace(call, activation="none", residual=False), a, b, *extra[: call.bias])
    out = activate(call.activation, linear)
    return (out + extra[-1] if call.residual else out), (*saved[:3], linear)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    """dA = g B^T and dB = A^T g, written so that each stored operand is read in place; dbias is the sum of g's rows."""
    a, b, bias, linear = saved
    dresidual = (g,) if call.residual else ()
    if linear is not None:
        (g,) = jax.vjp(functools.partial(activate, call.activation), linear)[1](g)
    dbias = () if bias is None else (jnp.sum(g, 0, dtype=np.promote_types(g.dtype, np.float32)).astype(bias.dtype),)
    g = g.astype(a.dtype)
    ta, tb = call.transpose_a, call.transpose_b

    def product(x: jax.Array, y: jax.Array, tx: bool, ty: bool) -> jax.Array:
        return _matmul(call.plain(transpose_a=tx, transpose_b=ty, out_dtype=a.dtype.name), x, y)

    da = product(b, g, tb, True) if ta else product(g, b, False, not tb)
    db = product(g, a, True, ta) if tb else product(a, g, not ta, False)
    return da, db, *dbias, *dresidual


_matmul.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. vmap makes one launch of it. It is jitted, so that eager calls trace once."""

    @jax.custom_batching.custom_vmap
    def product(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, arrays), arrays, config=call.config, backend=call.backend)

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        own = ranks(_problem(call, arrays))  # of one product
        if _is_more_rows(call, batched, arrays):
            rows = [x.reshape(-1, x.shape[-1]) if i in (0, call.bias + 2) else x for i, x in enumerate(arrays)]
            out = run(*rows)
            return out.reshape(*arrays[0].shape[:-1], out.shape[-1]), True
        batches = [x.shape[y] for x, y, rank in zip(arrays, batched, own, strict=True) if x.ndim - y > rank]
        if not batches:
            return run(*arrays), True

        def flat(x: jax.Array, is_batched: bool, rank: int) -> jax.Array:
            if x.ndim - is_batched == rank:
                if not is_batched:
                    return x
                x = x[:, None]
            return jnp.broadcast_to(x, (size, batches[0], *x.shape[x.ndim - rank :])).reshape(-1, *x.shape[x.ndim - rank :])

        out = run(*map(flat, arrays, batched, own))
        return out.reshape(size, batches[0], *out.shape[-2:]), True

    run = jax.jit(product)
    return run


def _is_more_rows(call: _Call, batched: Sequence[bool], arrays: Sequence[jax.Array]) -> bool:
    """Whether a batch of products is one with more rows: B and bias are shared, and A and residual are not."""
    a, b = arrays[:2]
    shared = not batched[1] and b.ndim == 2 and not (call.bias and (batched[2] or arrays[2].ndim > 1))
    rows = batched[0] and not (call.residual and not (batched[-1] and arrays[-1].ndim == a.ndim))
    return shared and rows and not call.transpose_a


def _problem(call: _Call, arrays: Sequence[jax.Array]) -> Problem:
    a, b = arrays[:2]
    m, k = a.shape[-2:][::-1] if call.transpose_a else a.shape[-2:]
    n = b.shape[-2] if call.transpose_b else b.shape[-1]
    layout = "nt"[call.transpose_a] + "nt"[call.transpose_b]
    problem = Problem(m, n, k, a.dtype.name, call.out_dtype, layout, 1, call.bias, call.activation, call.residual)
    batches = (x.shape[0] for x, rank in zip(arrays, ranks(problem), strict=True) if x.ndim > rank)
    return dataclasses.replace(problem, batch=max(batches, default=1))


def reference(problem: Problem, a: jax.Array, b: jax.Array, *extra: jax.Array) -> jax.Array:
    """The same through XLA (cuBLAS on a GPU): float32 accumulation, then rounding to out_dtype.

    On a GPU a product of 16-bit floats is rounded to out_dtype before the epilogue, as a program written with jnp would.
    """
    a_t, b_t = transposed(problem)
    wide = np.promote_types(problem.dtype, np.float32)
    if problem.dtype == problem.out_dtype:
        wide = jnp.dtype(problem.dtype)  # XLA accumulates 16-bit floats in float32; asking for it costs a second pass
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        wide = np.promote_types(problem.dtype, np.float32)
        a, b = a.astype(wide), b.astype(wide)
    product = jnp.matmul(a.mT if a_t else a, b.mT if b_t else b, preferred_element_type=wide)
    return with_epilogue(problem, product, **by_name(problem, extra))


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
    plain=plain,
)

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "matmul", "reference", "smem_bytes"]
