"""The kernel of scales of rows and columns, and of blocks of 128, which it finds itself: numbers are read once.

As in `kernel.py`, but values and their transpose are rounded with scales of their own. A tile of
128 x 128 holds all numbers of its blocks, in both directions. A row of it lies in a warp; the largest numbers of its columns
in four warps, which exchange theirs through shared memory. Then numbers are loaded again, from the L1 cache: in registers,
as floats, they would leave no room for other blocks.
"""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core import engine
from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.narrow import floats, four
from mgpu_ops.core.registers import i32
from mgpu_ops.matmul.quantizing.problem import ROWS, WARPS, Config, Problem, scale_shapes, tiles
from mgpu_ops.matmul.quantizing.tile import (
    Chunk,
    Place,
    Tile,
    address,
    i64,
    i64_of,
    less,
    load,
    offset_of,
    square,
    store,
    store_transposed,
    word,
)
from mgpu_ops.matmul.rounding import finite_size, scale_or_one


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """(values, values_t) of x and its scales of rows and columns; of blocks (values, values_t, scales, scales_t) of x."""
    p, c = problem, config
    down, across = tiles(p, c)
    kind = jnp.dtype(p.to)
    out = [jax.ShapeDtypeStruct((p.rows, p.columns), kind), jax.ShapeDtypeStruct((p.columns, p.rows), kind)]
    scratch: dict[str, Any] = {"smem": plgpu.SMEM((BLOCK * BLOCK,), jnp.uint8)}
    if p.by_tile:
        out += [jax.ShapeDtypeStruct(shape, jnp.float32) for shape in scale_shapes(p)]
        scratch["largest_smem"] = plgpu.SMEM((WARPS * BLOCK,), jnp.int32)

    def body(*refs: Any, smem: Any, largest_smem: Any = None) -> None:
        tile = Tile.of(p, c)
        run = _interpreted if interpreting() else _compiled
        x, *others = refs
        if p.by_tile:
            run(tile, x, others[:2], others[2:], smem, largest_smem)
        else:
            run(tile, x, others[2:], others[:2], smem, None)

    run = engine.kernel(
        body,
        engine.Launch(f"mgpu_ops_quantize_{p.scheme}", {"block": down * across}, warpgroups=1, interpret=interpret),
        out_type=tuple(out),
        scratch_types=scratch,
    )
    return run(*arrays)


def _interpreted(tile: Tile, x: Any, values: Sequence[Any], scales: Sequence[Any], smem: Any, largest: Any) -> None:
    """On a window of the array that has the tile, and at the array's end others before it, which count for nothing."""
    p = tile.problem
    height, width = min(BLOCK, p.rows), min(BLOCK, p.columns)
    row, column = jnp.minimum(tile.row, p.rows - height), jnp.minimum(tile.column, p.columns - width)
    numbers = x[pl.ds(row, height), pl.ds(column, width)].astype(jnp.float32)
    rows = lax.broadcasted_iota(jnp.int32, numbers.shape, 0) + row
    columns = lax.broadcasted_iota(jnp.int32, numbers.shape, 1) + column
    size = jnp.where((rows >= tile.row) & (columns >= tile.column), finite_size(numbers), 0.0)

    def scale_of(scheme: str, axis: int) -> jax.Array:
        largest = jnp.max(size, axis, keepdims=True) if scheme == "block" else jnp.max(size)
        return jnp.broadcast_to(scale_or_one(largest, jnp.dtype(p.to)), (height, 1) if axis else (1, width))

    if p.by_tile:
        by, by_t = scale_of(p.scheme, 1), scale_of(p.scheme_t, 0)
    else:
        by, by_t = scales[0][pl.ds(row, height)][:, None], scales[1][pl.ds(column, width)][None]
    one, other = (with_scale(numbers, scale, jnp.dtype(p.to)) for scale in (by, by_t))
    block, block_t = (lax.div(tile.row, jnp.int32(BLOCK)), lax.div(tile.column, jnp.int32(BLOCK)))
    for i in range(0, height, ROWS):
        for j in range(0, width, ROWS):
            own = (row + i >= tile.row) & (column + j >= tile.column)

            @pl.when(own)
            def _(i: int = i, j: int = j) -> None:
                at, part = square(row + i, column + j), np.s_[i : i + ROWS, j : j + ROWS]
                values[0][at] = one[part]
                values[1][at[::-1]] = other[part].T

        if p.by_tile and p.scheme == "block":

            @pl.when(row + i >= tile.row)
            def _(i: int = i) -> None:
                scales[0][pl.ds(row + i, ROWS), pl.ds(block_t, 1)] = by[i : i + ROWS]

    for j in range(0, width, ROWS) if p.by_tile and p.scheme_t == "block" else ():

        @pl.when(column + j >= tile.column)
        def _(j: int = j) -> None:
            scales[1][pl.ds(column + j, ROWS), pl.ds(block, 1)] = by_t[:, j : j + ROWS].T

    if p.scheme == "square":
        scales[0][block, block_t] = by[0, 0]
    if p.scheme_t == "square":
        scales[1][block_t, block] = by_t[0, 0]


# --- In a thread's registers ----------------------------------------------------------------------------------------------


def _compiled(tile: Tile, x: Any, values: Sequence[Any], scales: Sequence[Any], smem: Any, largest: Any) -> None:
    p, c = tile.problem, tile.config
    scalar, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    operands = (x, tuple(values), tuple(scales), smem, () if largest is None else (largest,))

    @plgpu.inline_mgpu(arg_types=(scalar, scalar, jax.tree.map(lambda _: ref, operands)))
    def run(_: Any, row: Any, column: Any, operands: Any) -> None:
        source, values, scales, smem, largest = jax.tree.map(address, operands)
        row, column = (one.registers.item() for one in (row, column))
        place = Place.of(p, c, row, column)
        chunks = place.chunks()
        by: list[list[Any]] = []
        if p.by_tile:
            by, by_t = _found(place, chunks, source, largest[0])
        else:
            by_t = _load_floats(scales[1], place.first, 4)
        same = p.scheme == p.scheme_t == "square"
        for number, chunk in enumerate(chunks):
            loaded = [load(p, c, source, chunk.offset(i), "") for i in range(ROWS)]
            of_rows = by[number] if by else [_load_floats(scales[0], arith.addi(chunk.row, i32(i)), 1)[0] for i in range(ROWS)]
            transposed = []
            for i, (words, scale) in enumerate(zip(loaded, of_rows, strict=True)):
                numbers = floats(p.dtype, words)
                rounded = four(p.to, numbers, [scale] * 4)
                store(values[0], chunk.offset(i), [rounded], "global", chunk.mine)
                transposed.append([rounded if same else four(p.to, numbers, by_t)])
            chunk.store_transposed(smem, transposed)
        if p.by_tile:
            _store_scales(p, place, chunks, by, by_t, scales)
        mosaic.warpgroup_barrier()
        store_transposed(place, smem, values[1])

    run(tile.row, tile.column, operands)


def _found(place: Place, chunks: Sequence[Chunk], source: Any, largest: Any) -> tuple[list[list[Any]], list[Any]]:
    """The scales of each row that a thread has, and of each of its columns, of the largest numbers of the tile."""
    p, c = place.problem, place.config
    columns, of_rows = [i32(0)] * 4, []
    for chunk in chunks:
        loaded = [load(p, c, source, chunk.offset(i), ".nc") for i in range(ROWS)]
        sizes = [[_size(x) for x in floats(p.dtype, words)] for words in loaded]
        columns = [_largest([columns[j], *(one[j] for one in sizes)]) for j in range(4)]
        if p.scheme == "block":
            of_rows.append([_of_warp(_largest(one)) for one in sizes])
    store(largest, arith.muli(place.thread, i32(16)), columns, "shared")  # 128 columns of each warp
    mosaic.warpgroup_barrier()
    code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
    of_warps = []
    for warp in range(WARPS):
        there = arith.addi(largest, arith.addi(arith.muli(place.lane, i32(16)), i32(4 * BLOCK * warp)))
        of_warps.append(mosaic.inline_ptx(code, there, result_types=[word()] * 4, has_side_effects=True))
    columns = [_largest([one[j] for one in of_warps]) for j in range(4)]
    of_tile = _scale(p, _of_warp(_largest(columns))) if "square" in (p.scheme, p.scheme_t) else None
    by_t = [of_tile] * 4 if p.scheme_t == "square" else [_scale(p, one) for one in columns]
    if p.scheme == "square":
        return [[of_tile] * ROWS for _ in chunks], by_t
    return [[_scale(p, one) for one in rows] for rows in of_rows], by_t


def _size(x: Any) -> Any:
    """The bits of an absolute value, 0 where it is not finite."""
    code = (
        "{ .reg .b32 a; .reg .pred p; mov.b32 a, $1; and.b32 a, a, 0x7fffffff; testp.finite.f32 p, $1; selp.b32 $0, a, 0, p; }"
    )
    return mosaic.inline_ptx(code, x, result_types=word())


def _largest(sizes: Sequence[Any]) -> Any:
    """Of bits of numbers that are not negative."""
    first, *others = sizes
    for other in others:
        first = arith.maxui(first, other)
    return first


def _of_warp(largest: Any) -> Any:
    code = "redux.sync.max.u32 $0, $1, 0xffffffff;"
    return mosaic.inline_ptx(code, largest, result_types=word(), has_side_effects=True, convergent=True)


def _scale(p: Problem, largest: Any) -> Any:
    """`rounding.scale_or_one` of the bits of a number. XLA, too, multiplies by the inverse of the constant."""
    inverse = np.float32(1) / np.float32(jnp.finfo(p.to).max)
    code = (
        "{ .reg .f32 s; .reg .pred p; mov.b32 s, $1; setp.eq.f32 p, s, 0f00000000;"
        f" mul.rn.f32 s, s, 0f{inverse.view(np.uint32):08x}; max.f32 s, s, 0f00800000; selp.f32 $0, 0f3f800000, s, p; }}"
    )
    return mosaic.inline_ptx(code, largest, result_types=ir.F32Type.get())


def _load_floats(start: Any, index: Any, count: int) -> list[Any]:
    """So many float32 of global memory that follow each other."""
    names = ", ".join(f"${i}" for i in range(count))
    vector = f".v{count}" if count > 1 else ""
    names = f"{{{names}}}" if vector else names
    place = arith.addi(start, arith.muli(i64_of(index), i64(4)))
    code = f"ld.global{vector}.f32 {names}, [${count}];"
    loaded = mosaic.inline_ptx(code, place, result_types=[ir.F32Type.get()] * count, has_side_effects=True)
    return list(loaded)


def _store_scales(p: Problem, place: Place, chunks: Sequence[Chunk], by: Sequence[Any], by_t: Sequence[Any], to: Any) -> None:
    """Of scales that several threads have, one thread stores each."""
    down, across = ((arith.divui(x, i32(BLOCK))) for x in (place.row, place.column))
    blocks_down, blocks_across = (math.ceil(size / BLOCK) for size in (p.rows, p.columns))

    def put(start: Any, row: Any, columns: int, column: Any, scale: Any, mine: Any) -> None:
        at = arith.muli(offset_of(row, columns, column), i64(4))
        mosaic.inline_ptx("st.global.f32 [$0], $1;", arith.addi(start, at), scale, predicate=mine, has_side_effects=True)

    first_lane, first = less(place.lane, 1), less(place.thread, 1)
    if p.scheme == "square":
        put(to[0], down, blocks_across, across, by[0][0], first)
    else:  # of each row, the first of the warp's threads, whose columns lie in the array
        for chunk, scales in zip(chunks, by, strict=True):
            mine = arith.andi(first_lane, chunk.mine)
            for i, scale in enumerate(scales):
                put(to[0], arith.addi(chunk.row, i32(i)), blocks_across, across, scale, mine)
    if p.scheme_t == "square":
        put(to[1], across, blocks_down, down, by_t[0], first)
    else:  # of each column, the first warp
        mine = arith.andi(less(place.warp, 1), place.inside)
        for j, scale in enumerate(by_t):
            put(to[1], arith.addi(place.first, i32(j)), blocks_down, down, scale, mine)
