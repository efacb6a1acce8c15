"""The op of `quantize` and `fp8_matmul`: an array as 8-bit floats, as it lies and transposed, in one pass.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel.
Here: its calls by other functions, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.jax_names import Layout, with_layout_constraint
from mgpu_ops.matmul.quantizing.model import baseline_cost, candidates, cost, default, distance, space
from mgpu_ops.matmul.quantizing.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    computed,
    flops,
    inputs,
    of_row_scale,
    row_of,
    smem_bytes,
    supports,
    tolerance,
)
from mgpu_ops.matmul.rounding import finite_size, largest_finite, rounded, scale_or_one
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec


@functools.partial(jax.custom_jvp, nondiff_argnums=(1, 2, 3))
def quantized(
    x: jax.Array, schemes: tuple[str, str], out_dtype: Any, backend: dispatch.Backend | None
) -> tuple[jax.Array, ...]:
    """(values, scales, values_t, scales_t) of x[rows, columns]: as it lies, and transposed, by schemes of one kind."""
    scheme, _ = schemes
    both = functools.partial(both_ways, (x,), out_dtype=out_dtype, backend=backend)
    if scheme == "tensor":
        scale = scale_or_one(largest_finite(x), out_dtype)
        values, values_t = both((scale,))
        return values, scale, values_t, scale
    if scheme == "row":
        scales, scales_t = (scale_or_one(jnp.max(finite_size(x), axis, initial=0.0), out_dtype) for axis in (1, 0))
        values, values_t = both((scales, scales_t), schemes=schemes)
    else:
        values, values_t, scales, scales_t = both((), schemes=schemes)
    return values, scales, values_t, scales_t


@quantized.defjvp
def _(schemes: tuple[str, str], out_dtype: Any, _: Any, primals: tuple[jax.Array], tangents: tuple[jax.Array]) -> Any:
    """Through XLA."""

    def both(x: jax.Array) -> tuple[jax.Array, ...]:
        (values, scales), (values_t, scales_t) = (rounded(y, s, -1, out_dtype) for y, s in zip((x, x.mT), schemes, strict=True))
        return values, scales, values_t, scales_t

    return jax.jvp(both, primals, tangents)


def both_ways(
    arrays: Sequence[jax.Array],
    scales: Sequence[jax.Array],
    out_dtype: Any,
    *,
    of: str = "array",
    amax: str = "none",
    schemes: tuple[str, str] = ("tensor", "tensor"),
    index: jax.Array | None = None,
    row_scale: jax.Array | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, ...]:
    """What a `Problem` of these arrays gives: values and transpose of each result, then what is found.

    arrays: [rows, columns], or [batch, rows, columns]. index: of each row of the result, the number of one of the array's, and
    else of none. row_scale: a factor of each row, float32.
    """
    if index is not None and not arrays[0].shape[0]:
        arrays = [jnp.pad(x, ((0, 1), (0, 0))) for x in arrays]  # zeros, as of what names no row
    *batch, rows, columns = arrays[0].shape
    problem = Problem(
        rows if index is None else index.size,
        columns,
        arrays[0].dtype.name,
        jnp.dtype(out_dtype).name,
        of,
        amax,
        *schemes,
        batch=math.prod(batch),
        gathered=0 if index is None else rows,
        row_scale=row_scale is not None,
    )
    of_rows = [one for one in (index, row_scale) if one is not None]
    if problem.batch == 1 and batch:
        found = both_ways([x[0] for x in arrays], scales, out_dtype, of=of, amax=amax, schemes=schemes, backend=backend)
        count = 2 * problem.results * problem.writes
        return (*(x[None] for x in found[:count]), *found[count:])
    return tuple(_batchable(problem, backend)(*arrays, *of_rows, *scales))


def _rule(problem: Problem, *_: jax.Array) -> partition.Rule:
    """Rows and columns are split, but not tiles that have a scale of their own."""
    p = problem
    if p.by_tile:
        return partition.Rule("quantize", "ROWS COLUMNS -> ROWS COLUMNS, COLUMNS ROWS, R_A C_A, R_B C_B")
    scales = ["rows", "columns"] if p.scheme == "row" else [""] * p.results * p.writes
    batch = "batch " * (p.batch > 1)
    values = [f"{batch}rows columns", f"{batch}columns rows"] * p.results * p.writes
    found = [""] * p.results * p.finds
    source = "ROWS columns" if p.gathered else values[0] if p.writes else "rows columns"
    given = [*[source] * p.sources, *["rows"] * (p.given - p.sources), *scales]
    dimensions = f"{', '.join(given)} -> {', '.join([*values, *found, *['rows'] * p.sums_rows])}"
    return partition.Rule("quantize", dimensions, largest=tuple(range(len(values), len(values) + len(found))))


@functools.cache
def _batchable(problem: Problem, backend: dispatch.Backend | None) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""

    def one_device(*arrays: jax.Array) -> Any:
        # What was asked for the products says nothing of this kernel, but that XLA is to run all.
        named = "xla" if backend == "xla" else None
        own = _of_part(problem, *arrays)
        return dispatch.run(SPEC, own, arrays, config=None, backend=named)

    rounded_once = jax.custom_batching.custom_vmap(
        partition.partitioned(one_device, functools.partial(_rule, problem), backend)
    )

    @rounded_once.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        """Through XLA: each of the arrays has scales of its own."""
        del size
        out = jax.vmap(functools.partial(reference, problem), [0 if one else None for one in batched])(*arrays)
        return out, jax.tree.map(lambda _: True, out)

    return jax.jit(rounded_once)


def _of_part(p: Problem, *arrays: jax.Array) -> Problem:
    """The problem of one device's part of the arrays."""
    *batch, rows, columns = arrays[0].shape
    if p.gathered:
        return dataclasses.replace(p, rows=arrays[1].size, columns=columns)
    return dataclasses.replace(p, rows=rows, columns=columns, batch=math.prod(batch))


def reference(problem: Problem, *arrays: jax.Array) -> Any:
    """The same through XLA. It likes to transpose what values are computed from: told how arrays lie, it transposes 8 bits."""
    p, kind = problem, jnp.dtype(problem.to)
    if p.by_tile:
        (values, scales), (values_t, scales_t) = (rounded(*one, -1, kind) for one in _both(p, arrays[0]))
        return values, values_t, scales, scales_t
    if p.scheme == "row":
        array, scales, scales_t = arrays
        return with_scale(array, scales[:, None], kind), with_scale(array.mT, scales_t[:, None], kind)
    read, of_rows = arrays[: p.sources], arrays[p.sources : p.given]
    if p.gathered:
        rows, known = row_of(of_rows[0], p.gathered)
        read = (jnp.where(known[:, None], read[0][rows], 0),)
    x = computed(p.of, *(_rows_first(one) for one in read), by=of_rows[-1] if p.row_scale else None)
    out: list[jax.Array] = []
    for array, scale in zip(x, arrays[p.given :], strict=False):
        # One kernel rounds, another transposes.
        values = jax.lax.optimization_barrier(_rows_first(with_scale(array, scale, kind)))
        out += [values, values.mT]
    sums = (of_row_scale(*read),) if p.sums_rows else ()
    return (*out, *(largest_finite(one) for one in x if p.finds), *sums)


def _both(p: Problem, x: jax.Array) -> tuple[tuple[jax.Array, str], tuple[jax.Array, str]]:
    return (x, p.scheme), (x.mT, p.scheme_t)


def _rows_first(x: jax.Array) -> jax.Array:
    """Stored row by row on a GPU. Elsewhere as XLA likes: what says so is in no program that `jax.export` writes."""
    if gpus.current() is None:
        return x
    return with_layout_constraint(x, Layout(major_to_minor=tuple(range(x.ndim))))


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose modules import Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.matmul.quantizing import blocks, kernel

    run = kernel.launch if problem.scheme == "tensor" else blocks.launch
    return run(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="quantize",
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
    baseline_cost=baseline_cost,
    distance=distance,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=launch,
    reference=reference,
    tolerance=tolerance,
)

__all__ = ["SPEC", "Config", "Problem", "both_ways", "default", "launch", "reference", "smem_bytes"]
