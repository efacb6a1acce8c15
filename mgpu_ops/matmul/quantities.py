"""What a matmul takes and gives: operations, bytes, random inputs, and how far a result may be off."""

from __future__ import annotations

import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import fp8
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.matmul.problem import Problem, dtype_of_b, has_epilogue, transposed


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem."""
    return 2 * problem.batch * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    outputs = (1 + p.residual) * p.m * p.n * itemsize_of(p.out_dtype)
    scales = 4 * sum(map(math.prod, scale_shapes(p)))
    return p.batch * ((p.m + p.n) * p.k * itemsize_of(p.dtype) + outputs + scales) + p.bias * p.n * bias_itemsize(p)


def bias_itemsize(p: Problem) -> int:
    """Bytes of an element of the bias of `inputs`."""
    return itemsize_of(_of_16_bits(p.dtype))


def _of_16_bits(dtype: str) -> str:
    """The dtype, bfloat16 in place of one of 8 bits."""
    return "bfloat16" if itemsize_of(dtype) == 1 else dtype


def scale_shapes(p: Problem) -> tuple[tuple[int, ...], ...]:
    """The shapes of scale_a and scale_b of one product; none without scales."""
    columns, parts = (-(-size // BLOCK) for size in (p.n, p.k))  # of symbolic sizes too, as an exported function may have
    return {
        "tensor": ((1,), (1,)),
        "row": ((p.m,), (p.n,)),
        "block": ((p.m, parts), (columns, parts)),
    }.get(p.scales, ())


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal operands, stored as `problem.layout` says; then scales, a bias and a residual, where it has them.

    With an epilogue, B is divided by the square root of k, as weights are: the product is as large as bias and residual. B with
    scales keeps its size, and they have that factor; so does B of int8. The bias has A's dtype, beside 8 bits bfloat16.
    """
    p = problem
    a_t, b_t = transposed(p)
    lead = (p.batch,) if p.batch > 1 else ()
    key_a, key_b = jax.random.split(key)
    a = _normal(key_a, (*lead, p.k, p.m) if a_t else (*lead, p.m, p.k), p.dtype)
    b = _normal(key_b, (*lead, p.n, p.k) if b_t else (*lead, p.k, p.n), dtype_of_b(p))
    shapes = [((p.n,), _of_16_bits(p.dtype))] * p.bias + [((*lead, p.m, p.n), p.out_dtype)] * p.residual
    keys = jax.random.split(jax.random.fold_in(key, 1), 2)
    b = b / math.sqrt(p.k) if has_epilogue(p) and p.scales == "none" and p.dtype != "int8" else b
    extra = (jax.random.normal(k, *x) for k, x in zip(keys, shapes, strict=False))
    epsilon = [jnp.full((1,), EPSILON, "float32")] * p.normalised
    return a, b, *_scales(p, lead, jax.random.fold_in(key, 2)), *epsilon, *extra


EPSILON = 1e-5  # of the inputs of problems with one


def _normal(key: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    """Random normal numbers; those of 8 bits are rounded, integers any that there are."""
    if dtype == "int8":
        return jax.random.randint(key, shape, -128, 128, dtype)
    return jax.random.normal(key, shape, _of_16_bits(dtype)).astype(dtype)


def _scales(p: Problem, lead: tuple[int, ...], key: Any) -> Iterator[jax.Array]:
    """Scales from 1/2 to 2, those of B divided by the square root of k."""
    factors = (1.0, 1.0 / math.sqrt(p.k or 1))
    for shape, factor, k in zip(scale_shapes(p), factors, jax.random.split(key, 2), strict=False):
        yield 2.0 ** jax.random.uniform(k, (*lead, *shape), "float32", -1.0, 1.0) * factor


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): about two roundings of the output's dtype."""
    rounded = problem.dtype if problem.normalised else problem.out_dtype
    rounding = {"bfloat16": 8e-3, "float16": 1e-3}.get(rounded, 1e-4)
    if problem.normalised:
        rounding *= 1.5  # the reference rounds the normalised rows, too, also beside a float32 output
    return rounding + accumulation_error(problem) + _ROUNDING_OF_OPERANDS.get(problem.algorithm, 0.0)


_ROUNDING_OF_OPERANDS = {"bf16": 2.0**-5, "tf32": 2.0**-7, "bf16_x3": 2.0**-12}  # of random operands; 4 times algorithms.py's


def accumulation_error(p: Problem) -> float:
    """`fp8.accumulation_error`, by the scale of `tolerance`."""
    return fp8.accumulation_error(p.dtype, p.k, p.scales)
