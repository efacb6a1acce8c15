"""matmul: activation(scales A B + bias) + residual, float32 accumulation, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `quantities.py`: what it takes and gives. `model.py`: which configs
are worth trying. `kernel.py`: the kernel, from load to launch, of `work.py` (whose tile is where), `block_scales.py` and
`store.py`. `epilogue.py`: what follows the product, through XLA. `arguments.py`, `scales.py`: checks of arrays, dtypes and
scales. Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import flags
from mgpu_ops.core import activations, mesh, order
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.activations import Activation, checked_activation
from mgpu_ops.core.derivatives import refuse_8_bits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.matmul import algorithms, xla
from mgpu_ops.matmul.arguments import checked_arrays, checked_bias, checked_out_dtype, epsilon_of
from mgpu_ops.matmul.checks import check, supports
from mgpu_ops.matmul.choices import candidates, default, distance, space, thrifty
from mgpu_ops.matmul.epilogue import by_name, names, ranks, rows_of_blocks, scaled, with_epilogue
from mgpu_ops.matmul.model import cost
from mgpu_ops.matmul.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    plain,
    smem_bytes,
    transposed,
)
from mgpu_ops.matmul.quantities import bytes_moved, flops, inputs, tolerance
from mgpu_ops.matmul.scales import checked_scales
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rms_rows import normalised


@dataclasses.dataclass(frozen=True)
class Call:
    """The arguments of a call other than its arrays, `epilogue.names`."""

    transpose_a: bool
    transpose_b: bool
    out_dtype: str
    config: Config | None
    backend: dispatch.Backend | None
    activation: Activation = "none"
    bias: bool = False
    residual: bool = False
    scales: str = "none"
    algorithm: str = "none"
    normalised: bool = False

    def plain(self, **changes: Any) -> Call:
        """A product without an epilogue, with the database's config."""
        return dataclasses.replace(
            self, config=None, activation="none", bias=False, residual=False, normalised=False, **changes
        )


def matmul(
    a: ArrayLike,
    b: ArrayLike,
    *,
    bias: ArrayLike | None = None,
    activation: Activation | None = None,
    residual: ArrayLike | None = None,
    scale_a: ArrayLike | None = None,
    scale_b: ArrayLike | None = None,
    rms_epsilon: float | None = None,
    out_dtype: DTypeLike | None = None,
    preferred_element_type: DTypeLike | None = None,
    precision: lax.PrecisionLike = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """activation(A B + bias) + residual, accumulated in float32, by the kernel tuned for the running GPU.

    out[..., m, n] = activation(scale_a scale_b sum_k A[..., m, k] B[..., k, n] + bias[n]) + residual[..., m, n], rounded once,
    when stored.

    Args:
      a: A, [..., m, k], or [..., k, m] with `transpose_a`. For the kernel bfloat16, float16 or float32, or float8_e4m3fn or
        float8_e5m2 with `transpose_b` and without `transpose_a`: wgmma reads 8 bits along k only. int8 likewise. All else runs
        through XLA.
      b: B, [..., k, n], or [..., n, k] with `transpose_b`, of a's dtype; the two 8-bit floats mix.
      scale_a, scale_b: what the operands were divided by, float32 (`mgpu_ops.quantize`). Numbers; or of the rows of A and the
        columns of B, [..., m] or [..., m, 1] and [..., n] or [..., 1, n]; or of blocks of 1 x 128 and 128 x 128,
        [..., m, k / 128] and [..., n / 128, k / 128], rounded up. Default: 1. One may be a number, whatever the other is. The
        product of two numbers, or of two scales of blocks, must be within float32's range, 1.2e-38 to 3.4e38, or 0; of rows and
        columns a sum times scale_a must be.
      bias: [n] floats. Default: none.
      activation: "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf" of float32 values. Default: none.
      residual: of the result's dtype, and of its shape or one that broadcasts to it. Default: none.
      rms_epsilon: a number of at least 0: each row of A is first divided by sqrt(mean over k of A^2 + rms_epsilon). That is an
        RMS norm in front, whose weight is a factor of B's rows, `weight[:, None] * b`. The kernel finds the squares while it
        multiplies. Default: no norm.
      out_dtype: of the result; a's dtype by default, bfloat16 for 8-bit floats and for int8 with scales, int32 for int8
        without an epilogue. "float32" keeps the accumulator as it is.
      preferred_element_type: another name for out_dtype, as in `jax.numpy.matmul`.
      precision: how float32 is multiplied, as in `jax.numpy.matmul`, by default as `jax.default_matmul_precision` says: a name
        below, a `jax.lax.Precision`, or a `jax.lax.DotAlgorithmPreset`. Has no effect on 16 bits, whose products are exact.
      transpose_a, transpose_b: the operand is stored transposed; it is read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and XLA is not known or predicted to be faster, otherwise "xla", and the log says why.

    Leading dimensions are those of `jax.numpy.matmul`. If only a has some, they become more rows of one product. Otherwise they
    are a batch of products in one launch; an operand without them is shared by all. Where both operands have some and they
    differ, they are broadcast, which copies. A vector a or b is a row or column; n = 1 runs through XLA.

    Returns:
      [..., m, n] of out_dtype, without m or n where a or b is a vector. Over a k of zero the product is zeros, as in
      `jax.numpy.matmul`.

    Works under jit, grad (reverse mode), vmap (one launch for the whole batch) and shard_map. The config is looked up when a
    shape is traced: `mgpu_ops.explain` says which one and why.

    float32, with errors of its products as parts of abs(A) abs(B), beside those of float32 sums over k:

    - "default", "tensorfloat32": tf32, the first 11 of 24 bits; 2^-9. The kernel reads it along k: others are transposed first.
    - "high": each operand in two bfloat16 parts, three products; 2^-14.
    - "highest": three parts, six products; 2^-23, so that from k = 2 on the bound is float32's own, k 2^-24.

    Parts take 4 or 6 bytes beside each 4 of an operand while the kernel runs.

    8-bit floats are multiplied exactly, and summed with less than float32: of 32 products and the sum so far, Hopper keeps 13
    bits behind the leading one of the largest. With both signs the error grows as 2^-13 sqrt(k) of typical results, with one
    sign alone to 7 % of the sum at k = 4096 (docs/kernels/matmul.md). Scales of blocks end such a sum at every 128 of k and add
    up in float32; so do equal scales of blocks in place of one number.

    Both gradients of the product run the same kernels, on cotangents rounded to a's dtype. Nothing is kept for them but a and
    b, and with an activation A B + bias: the kernel then stores that, rounded to out_dtype, and XLA applies activation and
    residual. `jax.checkpoint` computes it again instead.

    8-bit operands have no gradient: JAX would return it in 8 bits without a scale, where most of it is lost. Call
    `mgpu_ops.fp8_matmul` on the numbers before `mgpu_ops.quantize` instead. Nor is there a gradient with scales of 16-bit or
    float32 operands: multiply the operand or the result by the scale instead.

    Raises:
      ValueError: shapes or dtypes that do not fit each other, an unknown activation or backend, a config that cannot run, a
        gradient that there is not, known scales that are not finite. Traced scales, as under jit, are not checked: a NaN in
        the result may come from them, and `jax.config.update("jax_debug_nans", True)` tells where the first one arises.
      TypeError: not arrays of floats, nor a and b of int8.

    Example:
      >>> a, b = jnp.ones((128, 256), jnp.bfloat16), jnp.ones((256, 512), jnp.bfloat16)
      >>> out = mgpu_ops.matmul(a, b, bias=jnp.full(512, -64, jnp.bfloat16), activation="relu")
      >>> out.shape, float(out[0, 0])
      ((128, 512), 192.0)

    Source: the kernel's own, in mgpu_ops/matmul/kernel.py; measurements in docs/kernels/matmul.md.
    """
    arrays = checked_arrays(a=a, b=b, scale_a=scale_a, scale_b=scale_b, bias=bias, residual=residual)
    out = checked_out_dtype(out_dtype, preferred_element_type, arrays)
    check_config("config", config, Config, "MatmulConfig")
    call = Call(
        flags.checked("transpose_a", transpose_a),
        flags.checked("transpose_b", transpose_b),
        out.name,
        config,
        dispatch.requested_backend(backend),
        checked_activation(activation),
        bias is not None,
        residual is not None,
        algorithm=algorithms.algorithm_of(precision, arrays["a"].dtype.name),
        normalised=rms_epsilon is not None,
    )
    if rms_epsilon is not None:
        if transpose_a or "scale_a" in arrays or "scale_b" in arrays:
            raise ValueError("rms_epsilon divides rows of A stored as [..., m, k], without scales: leave one of them out")
        arrays["epsilon"] = epsilon_of(rms_epsilon, arrays["a"])
    return products(call, **arrays)


def products(
    call: Call,
    a: jax.Array,
    b: jax.Array,
    scale_a: jax.Array | None = None,
    scale_b: jax.Array | None = None,
    bias: jax.Array | None = None,
    residual: jax.Array | None = None,
    epsilon: jax.Array | None = None,
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
    if bias is not None:
        bias = checked_bias(bias, n)
    if residual is not None:
        residual = like_the_result(residual, shape, call.out_dtype).reshape(*lead, m, n)
    kind, (scale_a, scale_b) = checked_scales((scale_a, scale_b), (m, n, k_a), (wide_a.shape[:-2], wide_b.shape[:-2]))
    call = dataclasses.replace(call, scales=kind)
    operands = [x for x in (wide_a, wide_b, scale_a, scale_b, epsilon, bias, residual) if x is not None]
    if not lead:
        return _matmul(call, *mesh.same_mesh_axes(*operands)).reshape(shape)
    size = math.prod(lead)
    own = list(zip(operands, ranks(_shapeless(call)), strict=True))  # with the rank of one product's
    if wide_b.ndim == 2 and not call.transpose_a:  # more rows of one product
        rows = (x if x.ndim == rank else mesh.as_rows("a", x, x.ndim - len(lead) - 1) for x, rank in own)
        return _matmul(call, *mesh.same_mesh_axes(*rows)).reshape(shape)
    in_axes = tuple(0 if x.ndim > rank else None for x, rank in own)
    batch = (x if x.ndim == rank else _broadcast(x, lead, rank).reshape(size, *x.shape[-rank:]) for x, rank in own)
    return jax.vmap(functools.partial(_matmul, call), in_axes)(*mesh.same_mesh_axes(*batch)).reshape(shape)


def _broadcast(x: jax.Array, lead: tuple[int, ...], rank: int) -> jax.Array:
    return jnp.broadcast_to(x, (*lead, *x.shape[x.ndim - rank :]))


def _broadcast_batches(a: jax.Array, b: jax.Array) -> tuple[int, ...]:
    try:
        return jnp.broadcast_shapes(a.shape[:-2], b.shape[:-2])
    except ValueError:
        raise ValueError(f"the leading dimensions of a{a.shape} and b{b.shape} do not broadcast to each other") from None


def like_the_result(residual: jax.Array, shape: tuple[int, ...], dtype: str) -> jax.Array:
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
def _matmul(call: Call, *arrays: jax.Array) -> jax.Array:
    """The product of A and B of rank 2, with what the call has beside them."""
    return _batchable(call)(*arrays)


def _forward(call: Call, *arrays: jax.Array) -> Any:
    """The result, and what the backward pass needs: A, B, and with an activation its argument."""
    if call.normalised:
        return _matmul(call, *arrays), arrays
    a, b, *extra = arrays
    refuse_8_bits("matmul", "mgpu_ops.fp8_matmul", a, b, scales=call.scales)
    saved = (a, b, extra[0] if call.bias else None, None)
    if call.activation == "none":
        return _matmul(call, *arrays), saved
    linear = _matmul(dataclasses.replace(call, activation="none", residual=False), a, b, *extra[: call.bias])
    out = activations.activate_as_kernels(call.activation, linear)
    return (out + extra[-1] if call.residual else out), (*saved[:3], linear)


def _backward(call: Call, saved: Any, g: jax.Array) -> tuple[jax.Array, ...]:
    """dA = g B^T and dB = A^T g, written so that each stored operand is read in place; dbias is the sum of g's rows.

    dB is taken to be that of a weight, and computed first.
    """
    if call.normalised:
        return _normalised_backward(call, saved, g)
    a, b, bias, linear = saved
    dresidual = (g,) if call.residual else ()
    if linear is not None:
        g = activations.gradient(call.activation, linear, g)
    dbias = () if bias is None else (jnp.sum(g, 0, dtype=np.promote_types(g.dtype, np.float32)).astype(bias.dtype),)
    g = g.astype(a.dtype)
    ta, tb = call.transpose_a, call.transpose_b

    def product(x: jax.Array, y: jax.Array, tx: bool, ty: bool) -> jax.Array:
        return _matmul(call.plain(transpose_a=tx, transpose_b=ty, out_dtype=a.dtype.name), x, y)

    db = product(g, a, True, ta) if tb else product(a, g, not ta, False)
    db, g = order.weights_first(db, g)
    da = product(b, g, tb, True) if ta else product(g, b, False, not tb)
    return da, db, *dbias, *dresidual


def _normalised_backward(call: Call, arrays: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, ...]:
    """Through A's rows as XLA normalises them, which nothing was kept of."""
    a, b, epsilon, *extra = arrays
    rows, back = jax.vjp(normalised, a, epsilon)
    later = dataclasses.replace(call, normalised=False, config=None)
    drows, *rest = jax.vjp(functools.partial(_matmul, later), rows, b, *extra)[1](g)
    return *back(drows)[:1], rest[0], jnp.zeros_like(epsilon), *rest[1:]


_matmul.defvjp(_forward, _backward)


@functools.cache
def _one_device(call: Call) -> Callable[..., jax.Array]:
    """The call as one device runs it."""

    def product(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, arrays), arrays, config=call.config, backend=call.backend)

    return product


def _rule(call: Call, *arrays: jax.Array) -> partition.Rule:
    """Over devices, batches, rows and columns are split; k too, with the epilogue behind the sum of the parts' products."""
    block = call.scales == "block"
    k, n = "K" if block or call.normalised else "k", "N" if block else "n"
    dimensions = {
        "a": f"{k} m" if call.transpose_a else f"m {k}",
        "b": f"{n} {k}" if call.transpose_b else f"{k} {n}",
        "scale_a": {"row": "m", "block": "m BLOCKS_K"}.get(call.scales, "ONE"),
        "scale_b": {"row": "n", "block": "BLOCKS_N BLOCKS_K"}.get(call.scales, "ONE"),
        "epsilon": "ONE",
        "bias": n,
        "residual": f"m {n}",
    }
    own = _shapeless(call)
    each = zip(names(own), ranks(own), arrays, strict=True)
    operands = ["batch " * (x.ndim > rank) + dimensions[name] for name, rank, x in each]
    result = "batch " * any(x.startswith("batch") for x in operands) + f"m {n}"
    partial, finish = _in_parts(call) if call.activation != "none" or call.bias or call.residual else (None, None)
    return partition.Rule("matmul", f"{', '.join(operands)} -> {result}", partial=partial, finish=finish)


@functools.cache
def _in_parts(call: Call) -> tuple[Callable[..., jax.Array], Callable[..., jax.Array]]:
    """Of the same arrays a part's product without an epilogue, and the epilogue of the sum of the parts' products."""
    linear = dataclasses.replace(call, config=None, activation="none", bias=False, residual=False)
    own, count = names(_shapeless(call)), len(names(_shapeless(linear)))

    def partial(*arrays: jax.Array) -> jax.Array:
        return _one_device(linear)(*arrays[:count])

    def finish(product: jax.Array, *arrays: jax.Array) -> jax.Array:
        extra = {name: x for name, x in zip(own, arrays, strict=True) if name in ("bias", "residual")}
        wide = product.astype(np.promote_types(product.dtype, np.float32))
        return with_epilogue(_problem(call, arrays), wide, **extra)

    return partial, finish


@functools.cache
def _batchable(call: Call) -> Any:
    """The call as a function of arrays. vmap makes one launch of it. It is jitted, so that eager calls trace once."""

    product = jax.custom_batching.custom_vmap(
        partition.partitioned(_one_device(call), functools.partial(_rule, call), call.backend)
    )

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        own = ranks(_shapeless(call))  # of one product
        if _is_more_rows(call, batched, arrays):
            each, joined = zip(names(_shapeless(call)), own, arrays, strict=True), _of_rows(call)
            rows = [lax.collapse(x, 0, x.ndim - rank + 1) if name in joined else x for name, rank, x in each]
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
            return lax.collapse(jnp.broadcast_to(x, (size, batches[0], *x.shape[x.ndim - rank :])), 0, 2)

        out = run(*map(flat, arrays, batched, own))
        return out.reshape(size, batches[0], *out.shape[-2:]), True

    run = jax.jit(product)
    return run


def _of_rows(call: Call) -> set[str]:
    """The arrays of which a product with more rows has more."""
    return {"a", "residual"} if call.scales == "tensor" else {"a", "scale_a", "residual"}


def _is_more_rows(call: Call, batched: Sequence[bool], arrays: Sequence[jax.Array]) -> bool:
    """Whether a batch of products is one with more rows: all that has rows is batched alike, and all else is shared."""
    if call.transpose_a:
        return False
    own, lead, of_rows = _shapeless(call), arrays[0].ndim - 2, _of_rows(call)
    each = zip(names(own), ranks(own), batched, arrays, strict=True)
    return all(b == (name in of_rows) and x.ndim - rank == lead * b for name, rank, b, x in each)


def _shapeless(call: Call) -> Problem:
    """A problem with the names and ranks of the call's arrays."""
    return Problem(1, 1, 1, bias=call.bias, residual=call.residual, scales=call.scales, normalised=call.normalised)


def _problem(call: Call, arrays: Sequence[jax.Array]) -> Problem:
    a, b = arrays[:2]
    m, k = a.shape[-2:][::-1] if call.transpose_a else a.shape[-2:]
    n = b.shape[-2] if call.transpose_b else b.shape[-1]
    layout = "nt"[call.transpose_a] + "nt"[call.transpose_b]
    problem = Problem(
        m,
        n,
        k,
        a.dtype.name,
        call.out_dtype,
        layout,
        1,
        call.bias,
        call.activation,
        call.residual,
        b.dtype.name,
        call.scales,
        call.algorithm,
        call.normalised,
    )
    batches = (x.shape[0] for x, rank in zip(arrays, ranks(problem), strict=True) if x.ndim > rank)
    return dataclasses.replace(problem, batch=max(batches, default=1))


def reference(problem: Problem, a: jax.Array, b: jax.Array, *extra: jax.Array) -> jax.Array:
    """The same through XLA (cuBLAS on a GPU): float32 accumulation, then rounding to out_dtype.

    On a GPU a product of 16-bit floats is rounded to out_dtype before the epilogue, as a program written with jnp would.
    Operands of 8 bits are products in cuBLASLt, of float32 numbers where blocks have scales.
    """
    a_t, b_t = transposed(problem)
    by = by_name(problem, extra)
    if problem.normalised:
        a = normalised(a, by["epsilon"])
    if problem.scales == "block":
        a, b = lax.optimization_barrier((a, b))  # a GPU's XLA would leave out a rounding to 8 bits before a widening
        a = scaled(a.mT if a_t else a, by["scale_a"])
        b = scaled(b if b_t else b.mT, rows_of_blocks(by["scale_b"], problem.n)).mT
        return with_epilogue(problem, jnp.matmul(a, b), **by)
    if problem.dtype == "int8":
        return with_epilogue(problem, _product(a.mT if a_t else a, b.mT if b_t else b, np.int32), **by)
    wide = np.promote_types(problem.dtype, np.float32)
    if problem.dtype == problem.out_dtype:
        wide = jnp.dtype(problem.dtype)  # XLA accumulates 16-bit floats in float32; asking for it costs a second pass
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        wide = np.promote_types(problem.dtype, np.float32)
        a, b = a.astype(wide), b.astype(wide)
    product = _product(a.mT if a_t else a, b.mT if b_t else b, wide, _precision(problem))
    return with_epilogue(problem, product, **by)


def _precision(p: Problem) -> lax.PrecisionLike:
    """JAX's name for the algorithm of a product through XLA, whose CPU backend has only float32's own."""
    if p.algorithm == "none":
        return None
    algorithm = "float32" if gpus.current() is None else algorithms.of_xla(p.algorithm, p.m, p.n)
    common = {"float32": lax.Precision.HIGHEST, "tf32": lax.Precision.DEFAULT}
    return common.get(algorithm) or algorithms.PRESETS[algorithm]


def _product(a: jax.Array, b: jax.Array, wide: Any, precision: lax.PrecisionLike = None) -> jax.Array:
    """a @ b, also of two 8-bit floats, which jnp.matmul does not mix."""
    if a.dtype == b.dtype:
        return jnp.matmul(a, b, precision=precision, preferred_element_type=wide)
    if a.ndim != b.ndim:
        lead = (a if a.ndim > b.ndim else b).shape[:1]
        a, b = (x if x.ndim > 2 else jnp.broadcast_to(x, (*lead, *x.shape)) for x in (a, b))
    batch = tuple(range(a.ndim - 2))
    numbers = ((a.ndim - 1,), (a.ndim - 2,)), (batch, batch)
    return jax.lax.dot_general(a, b, numbers, preferred_element_type=wide)


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
    thrifty=thrifty,
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
    baseline_keeps_sms=True,
    modelled_margin=xla.margin,
    sustained_margin=xla.sustained_margin,
    plain=plain,
)

__all__ = ["SPEC", "Config", "Problem", "default", "launch", "matmul", "reference", "smem_bytes"]
