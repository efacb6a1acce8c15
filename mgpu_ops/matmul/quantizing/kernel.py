"""The kernel that rounds an array to 8-bit floats and stores them twice, as they lie and transposed, in one pass.

A block is one warpgroup and has a tile. A warp takes 16 rows of it at a time, a thread 4 or 8 neighbouring columns of them. It
loads them from global memory as they are, divides by the scale, rounds, and stores the bytes of a row. Bytes of four rows by
four columns are then transposed in registers (prmt), so that a thread has 16 bytes of each of its columns. With them it goes
through shared memory, from which the block stores rows of the transposed array. 16-byte chunks of a column change places, so
that the threads that store or load at a time use all banks of shared memory.

Nothing is loaded by TMA: there is no arithmetic to hide, and an SM has room for many blocks, whose loads are in flight at once.
Source: PTX ISA, "prmt", "cvt", "div.full".
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core import engine
from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.narrow import floats, four
from mgpu_ops.core.registers import i32
from mgpu_ops.matmul.quantizing.problem import ROWS, WARPS, Config, Problem, computed, tiles
from mgpu_ops.matmul.quantizing.tile import (
    Chunk,
    Place,
    Tile,
    address,
    i64,
    less,
    load,
    offset_of,
    square,
    store,
    store_transposed,
    word,
)
from mgpu_ops.matmul.rounding import largest_finite


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """For each result its values and their transpose; then the largest absolute value of each (`Problem`).

    arrays: those of `Problem.of`, then a scale for each result unless only the largest are asked for.
    """
    p, c = problem, config
    down, across = tiles(p, c)
    results, sources = p.results, p.sources
    kind = jnp.dtype(p.to)
    both = [jax.ShapeDtypeStruct((p.rows, p.columns), kind), jax.ShapeDtypeStruct((p.columns, p.rows), kind)]
    values = both * (results * p.writes)
    largest = [jax.ShapeDtypeStruct((down * across * WARPS,), jnp.float32)] * (results * p.finds)

    def body(*refs: Any, smem: Any = None) -> None:
        taken = iter(refs)
        read, scales = (tuple(itertools.islice(taken, count)) for count in (sources, results * p.writes))
        written = tuple((next(taken), next(taken)) for _ in scales)
        held = _Refs(read, scales, written, tuple(taken), smem)
        (_interpreted if interpreting() else _compiled)(Tile.of(p, c), held)

    run = engine.kernel(
        body,
        engine.Launch(f"mgpu_ops_quantize_{p.of}", {"block": down * across}, warpgroups=1, interpret=interpret),
        out_type=(*values, *largest),
        scratch_types={"smem": plgpu.SMEM((results, c.tile_columns * c.tile_rows), jnp.uint8)} if p.writes else {},
    )
    found = run(*arrays[:sources], *(jnp.reshape(scale, (1,)) for scale in arrays[sources:]))
    return (*found[: len(values)], *(jnp.max(of_warps) for of_warps in found[len(values) :]))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The arrays of a launch: what is read, and of each result its scale, values and their transpose, and the largest."""

    sources: tuple[Any, ...]
    scales: tuple[Any, ...]
    values: tuple[tuple[Any, Any], ...]
    largest: tuple[Any, ...]
    smem: Any


def _interpreted(tile: Tile, refs: _Refs) -> None:
    """The tile in squares of 16 x 16, of which each lies within the array or outside."""
    p, c = tile.problem, tile.config
    for largest in refs.largest:
        for warp in range(WARPS):
            largest[tile.block * WARPS + warp] = jnp.float32(0.0)
    across = c.tile_columns // ROWS

    def each(i: jax.Array, carry: None) -> None:
        down = lax.div(i, jnp.int32(across))
        row, column = tile.row + down * ROWS, tile.column + lax.rem(i, jnp.int32(across)) * ROWS

        @pl.when((row < p.rows) & (column < p.columns))
        def _() -> None:
            at = square(row, column)
            found = computed(p.of, *(source[at] for source in refs.sources))
            for number, scale, (values, transposed) in zip(found, refs.scales, refs.values, strict=False):
                rounded = with_scale(number, scale[0], jnp.dtype(p.to))
                values[at] = rounded
                transposed[at[::-1]] = rounded.T
            for number, largest in zip(found, refs.largest, strict=False):
                warp = tile.block * WARPS + lax.rem(down, jnp.int32(WARPS))
                largest[warp] = jnp.maximum(largest[warp], largest_finite(number))

    lax.fori_loop(0, c.tile_rows // ROWS * across, each, None)


# --- In a thread's registers ----------------------------------------------------------------------------------------------


def _compiled(tile: Tile, refs: _Refs) -> None:
    p, c = tile.problem, tile.config
    scalar, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    smem = () if refs.smem is None else (refs.smem,)
    operands = (refs.sources, refs.scales, refs.values, refs.largest, smem)

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, scalar, jax.tree.map(lambda _: ref, operands)))
    def run(_: Any, block: Any, row: Any, column: Any, operands: Any) -> None:
        sources, scales, values, largest, smem = jax.tree.map(address, operands)
        block, row, column = (one.registers.item() for one in (block, row, column))
        place = Place.of(p, c, row, column)
        by = [mosaic.inline_ptx("ld.global.nc.f32 $0, [$1];", scale, result_types=ir.F32Type.get()) for scale in scales]
        own = [arith.addi(smem[0], i32(number * c.tile_columns * c.tile_rows)) for number in range(len(values))]
        seen = [i32(0)] * len(largest)
        for chunk in place.chunks():
            found, seen = _round(chunk, sources, by, [first for first, _ in values], seen)
            for rows, start in zip(found, own, strict=True):
                chunk.store_transposed(start, rows)
        for one, where in zip(seen, largest, strict=True):
            _store_largest(one, block, place, where)
        if values:
            mosaic.warpgroup_barrier()
        for start, (_, transposed) in zip(own, values, strict=True):
            store_transposed(place, start, transposed)

    run(tile.block, tile.row, tile.column, operands)


def _round(
    chunk: Chunk, sources: Sequence[Any], by: Sequence[Any], values: Sequence[Any], seen: Sequence[Any]
) -> tuple[list[list[list[Any]]], list[Any]]:
    """Of each result 16 rows of a thread's columns, each as words of 4 bytes, and the largest absolute value with them.

    The rows are stored into each result's values.
    """
    p, c = chunk.place.problem, chunk.place.config
    # The compiler moves loads of what it knows to be constant (.nc) ahead of stores, as many as it has registers for.
    how = ".L1::no_allocate" if c.ahead else ".nc.L1::no_allocate"
    found: list[list[list[Any]]] = [[] for _ in by]
    seen = list(seen)
    for rows in itertools.batched(range(ROWS), c.ahead or ROWS):  # so many are loaded before the first is rounded
        loaded = [[load(p, c, source, chunk.offset(i), how) for source in sources] for i in rows]
        for i, words in zip(rows, loaded, strict=True):
            numbers = [floats(p.dtype, of_one) for of_one in words]
            results = list(zip(*(_COMPUTED[p.of](*each) for each in zip(*numbers, strict=True)), strict=True))
            for number, scale in enumerate(by):
                x = results[number]
                rounded = [four(p.to, x[j : j + 4], [scale] * 4) for j in range(0, c.lane, 4)]
                found[number].append(rounded)
                store(values[number], chunk.offset(i), rounded, "global", chunk.mine)
            seen = [_larger(largest, results[number]) for number, largest in enumerate(seen)]
        for largest in seen:
            _settle(largest)
    return found, seen


_SIGMOID = (
    "{ .reg .f32 e; mul.f32 e, $1, 0fbfb8aa3b; ex2.approx.ftz.f32 e, e; add.f32 e, e, 0f3f800000; rcp.approx.ftz.f32 $0, e; }"
)


def _sigmoid(x: Any) -> Any:
    return mosaic.inline_ptx(_SIGMOID, x, result_types=ir.F32Type.get())


def _gate(gate: Any, up: Any) -> tuple[Any, ...]:
    """silu(gate) up."""
    return (arith.mulf(arith.mulf(gate, _sigmoid(gate)), up),)


def _gate_gradient(gradient: Any, gate: Any, up: Any) -> tuple[Any, ...]:
    """Of the gate and of up: with s = sigmoid(gate), gradient up s (1 + gate (1 - s)) and gradient gate s."""
    code = "{ .reg .f32 n; sub.f32 n, 0f3f800000, $1; fma.rn.f32 n, n, $2, 0f3f800000; mul.f32 $0, n, $1; }"
    s = _sigmoid(gate)
    slope = mosaic.inline_ptx(code, s, gate, result_types=ir.F32Type.get())
    return arith.mulf(arith.mulf(gradient, up), slope), arith.mulf(gradient, arith.mulf(gate, s))


_COMPUTED: dict[str, Callable[..., tuple[Any, ...]]] = {
    "array": lambda x: (x,),
    "gate": _gate,
    "gate_gradient": _gate_gradient,
}


def _larger(largest: Any, x: Sequence[Any]) -> Any:
    """The larger of the bits of an absolute value and those of finite numbers."""
    one = "mov.b32 a, ${0}; and.b32 a, a, 0x7fffffff; testp.finite.f32 p, ${0}; @p max.u32 $0, $0, a;"
    each = " ".join(one.format(i + 2) for i in range(len(x)))
    code = f"{{ .reg .b32 a; .reg .pred p; mov.b32 $0, $1; {each} }}"
    return mosaic.inline_ptx(code, largest, *x, result_types=word())


def _settle(largest: Any) -> None:
    """Has the largest value computed here. ptxas would put it off to the end, and keep all numbers in registers until then."""
    code = "{ .reg .pred p; setp.eq.u32 p, $0, 0x7fc00000; @p trap; }"  # no number that is finite: it never traps
    mosaic.inline_ptx(code, largest, has_side_effects=True)


def _store_largest(largest: Any, block: Any, place: Place, where: Any) -> None:
    """The largest of a warp."""
    code = "redux.sync.max.u32 $0, $1, 0xffffffff;"
    of_warp = mosaic.inline_ptx(code, largest, result_types=word(), has_side_effects=True, convergent=True)
    at = offset_of(block, WARPS, place.warp)
    address = arith.addi(where, arith.muli(at, i64(4)))
    mosaic.inline_ptx("st.global.b32 [$0], $1;", address, of_warp, predicate=less(place.lane, 1))
