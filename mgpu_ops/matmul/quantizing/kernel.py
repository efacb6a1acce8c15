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
import functools
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
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.core.narrow import floats, four
from mgpu_ops.core.registers import i32
from mgpu_ops.matmul.quantizing.problem import ROWS, WARPS, Config, Problem, computed, of_row_scale, row_of, tiles
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
from mgpu_ops.matmul.rounding import largest_finite


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """For each result its values and their transpose; then the largest absolute value of each, and sums of rows (`Problem`).

    arrays: those of `Problem.of`, numbers and scales of rows, then a scale for each result unless only the largest are asked
    for.
    """
    p, c = problem, config
    down, across = tiles(p, c)
    results, blocks = p.results, p.batch * down * across
    kind, batch = jnp.dtype(p.to), (p.batch,) * (p.batch > 1)
    both = [jax.ShapeDtypeStruct((*batch, *sides), kind) for sides in ((p.rows, p.columns), (p.columns, p.rows))]
    values = both * (results * p.writes)
    largest = [jax.ShapeDtypeStruct((blocks * WARPS,), jnp.float32)] * (results * p.finds)
    sums = [jax.ShapeDtypeStruct((across * p.rows,), jnp.float32)] * p.sums_rows  # of each tile's columns

    def body(*refs: Any, smem: Any = None) -> None:
        taken = iter(refs)
        counts = p.sources, p.gathered > 0, p.row_scale, results * p.writes
        read, index, of_rows, scales = (tuple(itertools.islice(taken, count)) for count in counts)
        written = tuple((next(taken), next(taken)) for _ in scales)
        found = tuple(itertools.islice(taken, len(largest)))
        held = _Refs(read, index, of_rows, scales, written, found, tuple(taken), smem)
        (_interpreted if interpreting() else _compiled)(Tile.of(p, c), held)

    run = engine.kernel(
        body,
        engine.Launch(f"mgpu_ops_quantize_{p.of}", {"block": blocks}, warpgroups=1, interpret=interpret),
        out_type=(*values, *largest, *sums),
        scratch_types={"smem": plgpu.SMEM((results, c.tile_columns * c.tile_rows), jnp.uint8)} if p.writes else {},
    )
    found = iter(run(*arrays[: p.given], *(jnp.reshape(scale, (1,)) for scale in arrays[p.given :])))
    rounded = list(itertools.islice(found, len(values)))
    most = [jnp.max(of_warps) for of_warps in itertools.islice(found, len(largest))]
    return (*rounded, *most, *(of_tiles.reshape(across, p.rows).sum(0) for of_tiles in found))


@dataclasses.dataclass(frozen=True)
class _Refs:
    """The arrays of a launch.

    sources: what is read. index, of_rows: the numbers of its rows and a factor of each row, if there are any. scales, values,
    largest: of each result its scale, values and their transpose, and the largest of each warp. sums: of rows, of each tile.
    """

    sources: tuple[Any, ...]
    index: tuple[Any, ...]
    of_rows: tuple[Any, ...]
    scales: tuple[Any, ...]
    values: tuple[tuple[Any, Any], ...]
    largest: tuple[Any, ...]
    sums: tuple[Any, ...]
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
            matrix = (tile.matrix,) * (p.batch > 1)
            if refs.index:
                numbers, known = row_of(refs.index[0][at[0]], p.gathered)
                read = [jnp.where(known[:, None], refs.sources[0][:, at[1]][numbers], 0)]
            else:
                read = [source[(*matrix, *at)] for source in refs.sources]
            found = computed(p.of, *read, by=refs.of_rows[0][at[0]] if refs.of_rows else None)
            for number, scale, (values, transposed) in zip(found, refs.scales, refs.values, strict=False):
                rounded = with_scale(number, scale[0], jnp.dtype(p.to))
                values[(*matrix, *at)] = rounded
                transposed[(*matrix, *at[::-1])] = rounded.T
            for number, largest in zip(found, refs.largest, strict=False):
                warp = tile.block * WARPS + lax.rem(down, jnp.int32(WARPS))
                largest[warp] = jnp.maximum(largest[warp], largest_finite(number))
            for sums in refs.sums:
                of_tile = pl.ds(lax.div(tile.column, jnp.int32(c.tile_columns)) * p.rows + row, ROWS)
                before = jnp.where(column == tile.column, 0.0, sums[of_tile])
                sums[of_tile] = before + of_row_scale(*read)

    lax.fori_loop(0, c.tile_rows // ROWS * across, each, None)


# --- In a thread's registers ----------------------------------------------------------------------------------------------


def _compiled(tile: Tile, refs: _Refs) -> None:
    p, c = tile.problem, tile.config
    scalar, ref = plgpu.Layout.WG_SPLAT, plgpu.RefType()
    smem = () if refs.smem is None else (refs.smem,)
    operands = (refs.sources, refs.index, refs.of_rows, refs.scales, refs.values, refs.largest, refs.sums, smem)
    places = (tile.block, tile.row, tile.column, *[tile.matrix] * (p.batch > 1))

    @plgpu.inline_mgpu(arg_types=((scalar,) * len(places), jax.tree.map(lambda _: ref, operands)))
    def run(_: Any, places: Any, operands: Any) -> None:
        sources, index, of_rows, scales, values, largest, sums, smem = jax.tree.map(address, operands)
        block, row, column, *matrix = (one.registers.item() for one in places)
        for number in matrix:
            before = arith.muli(i64_of(number), i64(p.rows * p.columns))
            sources = tuple(arith.addi(one, arith.muli(before, i64(itemsize_of(p.dtype)))) for one in sources)
            values = tuple((arith.addi(one, before), arith.addi(other, before)) for one, other in values)
        place = Place.of(p, c, row, column)
        by = [mosaic.inline_ptx("ld.global.nc.f32 $0, [$1];", scale, result_types=ir.F32Type.get()) for scale in scales]
        own = [arith.addi(smem[0], i32(number * c.tile_columns * c.tile_rows)) for number in range(len(values))]
        seen = [i32(0)] * len(largest)
        chunks = place.chunks()
        for chunk, rows_of in zip(chunks, [_Rows.of(chunk, index, of_rows, sums) for chunk in chunks], strict=True):
            found, seen = _round(chunk, sources, by, [first for first, _ in values], seen, rows_of)
            for rows, start in zip(found, own, strict=True):
                chunk.store_transposed(start, rows)
        for one, where in zip(seen, largest, strict=True):
            _store_largest(one, block, place, where)
        if values:
            mosaic.warpgroup_barrier()
        for start, (_, transposed) in zip(own, values, strict=True):
            store_transposed(place, start, transposed)

    run(places, operands)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """What a thread knows of the 16 rows of a chunk.

    numbers: of each row, which one it is of what is read; none where these are the chunk's own. factors: of each row, or none.
    sums: where the sums of the rows go, or nowhere.
    """

    numbers: list[Any]
    factors: list[Any]
    sums: tuple[Any, ...]

    @classmethod
    def of(cls, chunk: Chunk, index: Sequence[Any], factors: Sequence[Any], sums: Sequence[Any]) -> _Rows:
        numbers, floats = (
            chunk.of_rows(given[0], kind) if given else [] for given, kind in ((index, word()), (factors, ir.F32Type.get()))
        )
        return cls(numbers, floats, tuple(sums))

    def load(self, chunk: Chunk, source: Any, i: int, how: str) -> list[Any]:
        """A thread's columns of row i, as words."""
        p, c, at = chunk.place.problem, chunk.place.config, chunk.offset(i)
        if self.numbers:
            at = offset_of(arith.select(self._known(p, i), self.numbers[i], i32(0)), p.columns, chunk.place.first)
        return load(p, c, source, at, how)

    def read(self, p: Problem, i: int, words: Sequence[Any]) -> Sequence[Any]:
        """The words of row i that were loaded, zeros where there is no such row."""
        return [arith.select(self._known(p, i), one, i32(0)) for one in words] if self.numbers else words

    def _known(self, p: Problem, i: int) -> Any:
        return arith.cmpi(arith.CmpIPredicate.ult, self.numbers[i], i32(p.gathered))

    def scaled(self, i: int, results: Sequence[Any]) -> Sequence[Any]:
        """The results of a column times row i's factor."""
        return [arith.mulf(x, self.factors[i]) for x in results] if self.factors else results


def _round(
    chunk: Chunk, sources: Sequence[Any], by: Sequence[Any], values: Sequence[Any], seen: Sequence[Any], rows_of: _Rows
) -> tuple[list[list[list[Any]]], list[Any]]:
    """Of each result 16 rows of a thread's columns, each as words of 4 bytes, and the largest absolute value with them.

    The rows are stored into each result's values, and where they are wanted their sums.
    """
    p, c = chunk.place.problem, chunk.place.config
    # The compiler moves loads of what it knows to be constant (.nc) ahead of stores, as many as it has registers for.
    how = ".L1::no_allocate" if c.ahead else ".nc.L1::no_allocate"
    found: list[list[list[Any]]] = [[] for _ in by]
    seen, sums = list(seen), []
    for rows in itertools.batched(range(ROWS), c.ahead or ROWS):  # so many are loaded before the first is rounded
        loaded = [[rows_of.load(chunk, source, i, how) for source in sources] for i in rows]
        for i, words in zip(rows, loaded, strict=True):
            numbers = [floats(p.dtype, rows_of.read(p, i, of_one)) for of_one in words]
            each = [_COMPUTED[p.of](*of_column) for of_column in zip(*numbers, strict=True)]
            if rows_of.sums:  # of d silu(gate) times up
                products = [arith.mulf(of_up, up) for (_, of_up), up in zip(each, numbers[-1], strict=True)]
                sums.append(_of_warp(functools.reduce(arith.addf, products), chunk.place.inside))
            results = list(zip(*(rows_of.scaled(i, of_column) for of_column in each), strict=True))
            for number, scale in enumerate(by):
                x = results[number]
                rounded = [four(p.to, x[j : j + 4], [scale] * 4) for j in range(0, c.lane, 4)]
                found[number].append(rounded)
                store(values[number], chunk.offset(i), rounded, "global", chunk.mine)
            seen = [_larger(largest, results[number]) for number, largest in enumerate(seen)]
        for largest in seen:
            _settle(largest)
    for where in rows_of.sums:
        _store_sums(chunk, sums, where)
    return found, seen


def _of_warp(x: Any, counts: Any) -> Any:
    """The sum over a warp's threads, of those that count."""
    x = arith.select(counts, x, mosaic.c(0.0, ir.F32Type.get()))
    for distance in (16, 8, 4, 2, 1):
        code = f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;"
        x = arith.addf(x, mosaic.inline_ptx(code, x, result_types=ir.F32Type.get(), has_side_effects=True, convergent=True))
    return x


def _store_sums(chunk: Chunk, sums: Sequence[Any], where: Any) -> None:
    """The sums of 16 rows over a tile's columns, by the warp's first thread."""
    place = chunk.place
    tile = arith.divui(place.column, i32(place.config.tile_columns))
    at = arith.addi(where, arith.muli(offset_of(tile, place.problem.rows, chunk.row), i64(4)))
    mine = arith.andi(chunk.mine, less(place.lane, 1))
    for i in range(0, ROWS, 4):
        store(at, i64(4 * i), sums[i : i + 4], "global", mine)


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
