"""Rows of arrays in global memory: windows that begin and end anywhere, by TMA, and single rows at any place.

- `load_rows` and `store_rows` copy a window of rows of an array that `rows_view` has marked (`core/tma.py`).
- `load_pages` copies rows that lie in pages of such an array, which a table in shared memory names.
- `load_gathered` copies rows that lie anywhere in an array, to the places that `row_places` finds.
- `load_scattered`, `load_columns` and `store_scattered` read and write rows of a tile in registers, each at its own address.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from mgpu_ops.core import engine, inflight, tma
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32, laid_out, row_and_column
from mgpu_ops.core.tile_scheduler import Int


def rows_view(x: jax.Array) -> jax.Array:
    """[rows, columns] as [1, 1, rows, columns], for `load_rows` and `store_rows`. The first two indices mark windows."""
    return x.reshape(1, 1, *x.shape)


class OfHead(NamedTuple):
    """Columns of an array whose rows are heads of `size` columns each: those from `first` of one head on, up to its end."""

    head: Int
    first: int
    size: int  # a multiple of 8

    @property
    def column(self) -> Int:
        """The first of them, in the array."""
        return self.head * self.size + self.first

    def clipped(self, columns: int) -> int:
        """How many of `columns` there are before the head's end."""
        return max(0, min(columns, self.size - self.first))


def load_rows(src: Any, row: Int, end: Int, column: Int | OfHead, dst: Any, barrier: Any, anywhere: bool = False) -> None:
    """Starts the copy dst[i, j] = src[row + i, column + j], with zeros from row `end` on; arrives at `barrier` when done.

    src: a `rows_view` in global memory of fewer than 2^28 rows.
    row, end: traced integers of any value, end <= the rows of src.
    column: a multiple of the swizzle tile's columns, as the compiler can see. With `anywhere` any integer below 2^25 whose
      block ends within src's rows, which need not be whole tiles then. Or of a head: columns behind its end become zeros where
      dst is one swizzle tile wide; in a wider one they hold whatever comes next in src.
    dst: [rows, columns] in shared memory, tiled and swizzled (`operand_transforms`). If it is wider than one swizzle tile,
      tiles divide the rows of src. Or [panels, rows, columns of a swizzle tile], of which each has the columns that follow.
    """
    inflight.copies(dst, barrier)
    if not interpreting():
        plgpu.copy_gmem_to_smem(_window(src, row, end, column, dst.shape, anywhere), dst, barrier)
        return
    *panels, _, columns = dst.shape
    assert not (panels and isinstance(column, OfHead)), "a block of a head is [rows, columns]"
    for panel in range(math.prod(panels)):
        there = column if isinstance(column, OfHead) else column + panel * columns
        _load_interpreted(src, row, end, there, dst.at[panel] if panels else dst)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def _load_interpreted(src: Any, row: Int, end: Int, column: Int | OfHead, dst: Any) -> None:
    rows, columns = dst.shape
    counts = columns
    if isinstance(column, OfHead):
        counts, column = column.clipped(columns), column.column
    dst[...] = jnp.zeros(dst.shape, dst.dtype)
    for offset, count, some in _binary(jnp.clip(end - row, 0, rows), rows):

        @pl.when(some)
        def _(offset: jax.Array = offset, count: int = count) -> None:
            # The row may end inside of the block: pad with zeros.
            whole = jnp.pad(src[0, 0, pl.ds(row + offset, count), :], ((0, 0), (0, columns)))
            found = lax.dynamic_slice(whole, (jnp.int32(0), jnp.int32(column)), (count, counts))
            dst[pl.ds(offset, count), :] = jnp.pad(found, ((0, 0), (0, columns - counts)))


@dataclasses.dataclass(frozen=True)
class Pages:
    """Rows in pages: row i is row i % size of page table[entry + i // size]. Numbers out of range count as the nearest."""

    table: Any  # int32 [chunks, entries of a chunk] in shared memory, as if it were flat
    entry: Int
    size: int  # rows of a page, a multiple of 8


def load_pages(src: Any, pages: Pages, count: Int, column: Int, dst: Any, barrier: Any) -> None:
    """Starts the copy of rows from pages of src to dst; arrives at `barrier` when done, once for all.

    Rows of dst from `count` on become zeros; for pages with none before, neither table nor src is read.

    src: a `rows_view` in global memory of fewer than 2^28 rows, whole pages.
    column, dst: as for `load_rows`; dst has whole pages.
    """
    inflight.copies(dst, barrier)
    table, entry, size = pages.table, pages.entry, pages.size
    if not interpreting():
        place, kind = _shared_address(table) + 4 * entry, jnp.int32(tma.PAGES + size)
        rows, columns = pl.ds(count * tma.ROW_UNIT, dst.shape[0]), pl.ds(column, dst.shape[1])
        plgpu.copy_gmem_to_smem(src.at[place, kind, rows, columns], dst, barrier)
        return
    last = src.shape[2] // size - 1

    def piece(i: jax.Array, _: None) -> None:
        number = entry + jnp.minimum(i, lax.div(jnp.maximum(count, 1) - 1, jnp.int32(size)))
        page = table[lax.div(number, jnp.int32(table.shape[1])), lax.rem(number, jnp.int32(table.shape[1]))]
        whole = src[0, 0, pl.ds(jnp.clip(page, 0, last) * size, size), :]
        found = lax.dynamic_slice(whole, (jnp.int32(0), jnp.int32(column)), (size, dst.shape[1]))
        counts = lax.broadcasted_iota(jnp.int32, found.shape, 0) < count - i * size
        dst[pl.ds(i * size, size), :] = jnp.where(counts, found, jnp.zeros((), found.dtype))

    lax.fori_loop(0, dst.shape[0] // size, piece, None)
    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def row_places(indices: Any, row: Int, end: Int, rows: int, src: Any) -> jax.Array:
    """Where the rows indices[row : row + rows] of src lie, for `load_gathered`: in a thread's registers, once for a tile.

    indices: int32 [m] in global memory, of any values: those out of range count as the nearest row of src.
    row, end: traced integers, row < end <= m. What comes from `end` on counts as the row before `end`: any row will do there.
    rows: a multiple of 16. src: a `rows_view`, of at most 2^34 bytes.
    """
    last = src.shape[2] - 1
    if interpreting():
        at = jnp.minimum(row + lax.broadcasted_iota(jnp.int32, (rows,), 0), end - 1)
        return jnp.clip(indices[...][at], 0, last)
    chunks = _CHUNK // jnp.dtype(src.dtype).itemsize  # elements of a chunk
    scalar, layout = plgpu.Layout.WG_SPLAT, _places_layout(rows)
    result = plgpu.ShapeDtypeStruct((rows * _CHUNKS,), jnp.dtype(jnp.int32), layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar), return_type=result)
    def find(_: Any, indices: Any, row: Any, end: Any) -> Any:
        first, chunk = _row_and_chunk()
        row, before = row.registers.item(), arith.subi(end.registers.item(), i32(1))
        places = np.empty((rows // _AT_ONCE,), dtype=object)
        for number in range(places.size):
            at = arith.minsi(arith.addi(row, arith.addi(first, i32(number * _AT_ONCE))), before)
            index = mosaic.inline_ptx(
                "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.b32 $0, [a]; }",
                mosaic.memref_ptr(indices),
                at,
                result_types=ir.IntegerType.get_signless(32),
                has_side_effects=True,
            )
            index = arith.minsi(arith.maxsi(index, i32(0)), i32(last))
            place = arith.addi(arith.muli(index, i32(src.shape[3] // chunks)), chunk)
            places[number] = vector.broadcast(ir.VectorType.get((1,), place.type), place)
        there = mosaic_gpu.WGStridedFragLayout((rows * _CHUNKS,), 1)
        return mosaic_gpu.FragmentedArray(_registers=places, _layout=there, _is_signed=True)

    found: jax.Array = find(indices, row, end)
    return found


def load_gathered(src: Any, places: jax.Array, column: Int, dst: Any, barrier: Any, count: int) -> None:
    """Starts the copies dst[j, i] = src[row i of places, column + j * panel :][: panel], a group for `wait_gathered`.

    count: rows i that are copied, the first ones, a multiple of 16.

    All threads of the warpgroup make them, 16 bytes at a time. Nothing arrives at `barrier` by itself: `wait_gathered`, then
    arrive there. Columns beyond the end of src's rows become zeros.

    src: a `rows_view` in global memory. column: a multiple of a panel, traced. places: of `row_places`.
    dst: [panels, rows, panel] in shared memory, panels of one row of the 128-byte swizzle (`operand_transforms`).
    Source: PTX ISA, "cp.async".
    """
    inflight.copies(dst, barrier)
    panels, rows, width = dst.shape
    if interpreting():
        found = jnp.pad(src[0, 0, :, :], ((0, 0), (0, panels * width)))[places]
        for number in range(panels):
            start = (jnp.int32(0), jnp.int32(column + number * width))
            dst[number, :count] = lax.dynamic_slice(found, start, (count, width))
        return
    stage = plgpu.RefType(engine.operand_transforms(width, src.dtype, 128))
    types = (plgpu.RefType(), _places_layout(rows), plgpu.Layout.WG_SPLAT, stage)
    plgpu.inline_mgpu(arg_types=types)(functools.partial(_copy_gathered, panels, rows, count))(src, places, column, dst)


def wait_gathered(in_flight: int) -> None:
    """Waits until all groups of `load_gathered` but the last `in_flight` are in shared memory, for wgmma to read.

    Each thread waits for its own copies; an arrival of all of them then tells that the rows are there.
    Source: PTX ISA, "cp.async.wait_group", and "fence.proxy.async" between such copies and wgmma.
    """
    if interpreting():
        plgpu.commit_smem()
        return

    @plgpu.inline_mgpu()
    def wait(_: Any) -> None:
        for text in (f"cp.async.wait_group {in_flight};", "fence.proxy.async.shared::cta;"):
            mosaic.inline_ptx(text, has_side_effects=True)

    wait()


_CHUNK, _CHUNKS = 16, 8  # bytes that one cp.async copies, and how many make a row of the swizzle
_AT_ONCE = 128 // _CHUNKS  # rows that the threads of a warpgroup copy at a time


def _places_layout(rows: int) -> Any:
    return plgpu.Layout.WG_STRIDED((rows * _CHUNKS,), 1)


def _row_and_chunk() -> tuple[Any, Any]:
    """Of the rows that are copied at a time, the one of this thread, and its chunk of that row."""
    thread = arith.remui(mosaic.thread_idx(), i32(128))
    return arith.divui(thread, i32(_CHUNKS)), arith.remui(thread, i32(_CHUNKS))


def _copy_gathered(panels: int, rows: int, count: int, _: Any, src: Any, places: Any, column: Any, dst: Any) -> None:
    """`load_gathered`, compiled: chunk c of row r is stored as chunk c ^ (r % 8), as the swizzle has it."""
    columns, size = ir.MemRefType(src.type).shape[3], mosaic.bitwidth(ir.MemRefType(src.type).element_type) // 8
    panel = _CHUNK * _CHUNKS // size
    first, chunk = _row_and_chunk()
    swizzled = arith.xori(chunk, arith.remui(first, i32(8)))
    word, address = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    start = mosaic.inline_ptx("mov.u32 $0, $1;", mosaic.memref_ptr(dst), result_types=word)
    start = arith.addi(start, arith.addi(arith.muli(first, i32(_CHUNK * _CHUNKS)), arith.muli(swizzled, i32(_CHUNK))))
    column = column.registers.item()
    for number in range(panels):
        at = arith.addi(column, i32(number * panel))
        source = mosaic.inline_ptx(f"mad.wide.u32 $0, $1, {size}, $2;", at, mosaic.memref_ptr(src), result_types=address)
        rest, counts = "", tuple[Any, ...]()
        if columns % (panels * panel):  # in the last step, chunks lie beyond the rows' end; of size 0 they are not read
            own = arith.addi(at, arith.muli(chunk, i32(_CHUNK // size)))
            inside = arith.cmpi(arith.CmpIPredicate.slt, own, i32(columns))
            rest, counts = ", $3", (arith.select(inside, i32(_CHUNK), i32(0)),)
        for i, register in enumerate(places.registers.flat[: count // _AT_ONCE]):
            place = vector.extract(register, dynamic_position=[], static_position=[0])
            to = (number * rows + i * _AT_ONCE) * _CHUNK * _CHUNKS
            copy = f"cp.async.cg.shared.global [$0+{to}], [a], {_CHUNK}{rest};"
            text = f"{{ .reg .u64 a; mad.wide.u32 a, $2, {_CHUNK}, $1; {copy} }}"
            mosaic.inline_ptx(text, start, source, place, *counts, has_side_effects=True)
    mosaic.inline_ptx("cp.async.commit_group;", has_side_effects=True)


def _shared_address(ref: Any) -> jax.Array:
    """The address of a ref in the block's shared memory, int32."""
    result = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def address(_: Any, ref: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        place = mosaic.inline_ptx("mov.u32 $0, $1;", mosaic.memref_ptr(ref), result_types=word)
        return mosaic_gpu.FragmentedArray.splat(place, (), is_signed=True)

    found: jax.Array = address(ref)
    return found


def store_rows(src: Any, dst: Any, row: Int, end: Int, column: Int | OfHead, anywhere: bool = False) -> None:
    """Starts the copy dst[row + i, column + j] = src[i, j] of the rows before `end`, the reverse of `load_rows`.

    It is a group of copies of its own for `wait_smem_to_gmem`. Columns of a head: src is one swizzle tile wide.
    """
    rows, columns = src.shape
    if not interpreting():
        plgpu.copy_smem_to_gmem(src, _window(dst, row, end, column, src.shape, anywhere))
        return
    if isinstance(column, OfHead):
        columns, column = column.clipped(columns), column.column
    length = jnp.clip(end - row, 0, rows)
    for offset, count, some in _binary(length, rows):

        @pl.when(some)
        def _(offset: jax.Array = offset, count: int = count) -> None:
            window = dst.at[0, 0, pl.ds(row + offset, count), pl.ds(column, columns)]
            plgpu.copy_smem_to_gmem(src.at[pl.ds(offset, count), pl.ds(0, columns)], window, commit_group=False)

    plgpu.commit_smem_to_gmem_group()
    # The interpreter counts copies instead of groups, and would miss an empty group.
    pl.when(length == 0)(functools.partial(plgpu.wait_smem_to_gmem, 0, wait_read_only=True))


def _window(ref: Any, row: Int, end: Int, column: Int | OfHead, shape: tuple[int, ...], anywhere: bool) -> Any:
    """A window of rows as `core/tma.py` takes it. Mosaic only takes multiples of 8 rows, so the row is written times 8.

    And of columns multiples of what the swizzle tile has, so that with `anywhere`, and of a head, these are written times 64.
    shape: [rows, columns], or [panels, rows, columns of each]: then `end` is a slice of as many.
    """
    *panels, rows, columns = shape
    kind = tma.WINDOW_ANYWHERE if anywhere else tma.WINDOW
    if isinstance(column, OfHead):
        kind, anywhere, column = tma.WINDOW_OF_HEAD + column.size, True, column.head * tma.HEAD_UNIT + column.first
    first = column * tma.COLUMN_UNIT if anywhere else column
    # Of a number that is known Pallas would see that the slice is none of the array.
    last = pl.ds(jnp.int32(end) + 0 * row, *panels) if panels else jnp.int32(end)
    return ref.at[last, jnp.int32(kind), pl.ds(row * tma.ROW_UNIT, rows), pl.ds(first, columns)]


def _binary(length: jax.Array, limit: int) -> Iterator[tuple[jax.Array, int, jax.Array]]:
    """A traced length <= limit as a sum of powers of two: (offset, power, whether the length has it), the largest first."""
    offset, size = jnp.int32(0), 1 << (limit.bit_length() - 1)
    while size:
        yield offset, size, length & size != 0
        offset, size = offset + (length & size), size // 2


def store_scattered(values: jax.Array, dst: Any, offsets: jax.Array) -> None:
    """dst[offsets[i] + j] = values[i, j] in global memory, for the rows i of a warpgroup's 64 whose offset is not negative.

    values: [64, columns] with columns a multiple of 8, or [64] for one column, in wgmma's layout. dst: rank 1. Offsets are even
    where there are several columns.
    """
    columns = 1 if values.ndim == 1 else values.shape[1]
    if interpreting():

        def row(i: jax.Array, _: None) -> None:
            start = lax.dynamic_index_in_dim(offsets, i, keepdims=False)
            pl.when(start >= 0)(lambda: _set(dst, start, columns, lax.dynamic_index_in_dim(values, i, keepdims=False)))

        lax.fori_loop(0, 64, row, None)
        return
    _store_compiled(values, dst, offsets)


def load_scattered(src: Any, offsets: jax.Array) -> jax.Array:
    """src[offsets[i]] in global memory for each row i of a warpgroup's tile: float32 [rows] in wgmma's layout.

    src: float32 of rank 1. offsets: int32 [rows] in that layout.
    """
    if interpreting():
        rows = jnp.zeros(offsets.shape, jnp.float32)
        return lax.fori_loop(0, rows.size, lambda i, rows: rows.at[i].set(src[offsets[i]]), rows)
    return _load_compiled(src, offsets)


def load_columns(src: Any, offsets: jax.Array, columns: int, end: Int, even: bool) -> jax.Array:
    """src[offsets[i] + j] in global memory for each of a warpgroup's 64 rows i: [64, columns] in wgmma's layout.

    Columns from `end` on are -inf, and are not read. src: floats of 16 or 32 bits, of rank 1. offsets: int32 [64] in that
    layout. even: whether offsets and `end` are, so that a thread reads two columns at a time. columns: a multiple of 8.
    """
    if interpreting():
        at = offsets[:, None] + lax.broadcasted_iota(jnp.int32, (64, columns), 1)
        inside = lax.broadcasted_iota(jnp.int32, (64, columns), 1) < end
        return jnp.where(inside, src[...][jnp.minimum(at, src.shape[0] - 1)], jnp.asarray(-jnp.inf, src.dtype))
    layout, scalar = plgpu.Layout.WGMMA, plgpu.Layout.WG_SPLAT
    result = plgpu.ShapeDtypeStruct((64, columns), jnp.dtype(src.dtype), layout=layout)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), layout.reduce(1), scalar), return_type=result)
    def load(_: Any, src: Any, offsets: Any, end: Any) -> Any:
        start, element, end = mosaic.memref_ptr(src), ir.MemRefType(src.type).element_type, end.registers.item()
        bits = mosaic.bitwidth(element)
        pair = ir.VectorType.get((2,), element)
        tile = mosaic_gpu.FragmentedArray.splat(mosaic.c(0.0, element), (64, columns), mosaic_gpu.WGMMA_LAYOUT)
        registers = np.empty_like(tile.registers)
        _, column = row_and_column(mosaic.thread_idx())
        for half, one in enumerate(offsets.registers.flat):
            first = arith.addi(vector.extract(one, dynamic_position=[], static_position=[0]), column)
            pointer = mosaic.getelementptr(start, [first], element)
            for n in range(columns // 8):
                left = arith.subi(end, arith.addi(column, i32(8 * n)))  # of the pair's columns, those that are read
                words = _load_pair(pointer, 8 * n * bits // 8, left, element, even)
                registers.flat[2 * n + half] = mosaic.bitcast(words, pair)
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    loaded: jax.Array = load(src, laid_out(offsets, layout.reduce(1)), laid_out(jnp.int32(end), scalar))
    return loaded


def _load_pair(pointer: Any, further: int, left: Any, element: Any, even: bool) -> Any:
    """Two numbers of 16 or 32 bits, `further` bytes behind the pointer, as one or two words; -inf beyond the `left` ones."""
    bits, word = mosaic.bitwidth(element), ir.IntegerType.get_signless(32)
    lowest = {"bf16": 0xFF80, "f16": 0xFC00, "f32": 0xFF800000}[str(element)]
    some = ".reg .pred a, b; setp.gt.s32 a, $2, 0; setp.gt.s32 b, $2, 1;"
    if bits == 16:
        both = f"@a ld.global.b32 $0, [$1+{further}];"
        each = f"@a ld.global.b16 x, [$1+{further}]; @b ld.global.b16 y, [$1+{further + 2}];"
        each = f".reg .b16 x, y; mov.b16 x, {lowest}; mov.b16 y, {lowest}; {each}"
        code = (
            f"{{ {some} mov.b32 $0, {lowest << 16 | lowest}; {both} }}"
            if even
            else f"{{ {some} {each} mov.b32 $0, {{x, y}}; }}"
        )
        found = mosaic.inline_ptx(code, pointer, left, result_types=word, has_side_effects=True)
        return vector.broadcast(ir.VectorType.get((1,), word), found)
    some = ".reg .pred a, b; setp.gt.s32 a, $3, 0; setp.gt.s32 b, $3, 1;"
    some += f" mov.b32 $0, {lowest}; mov.b32 $1, {lowest};"
    both = f"@a ld.global.v2.b32 {{$0, $1}}, [$2+{further}];"
    each = f"@a ld.global.b32 $0, [$2+{further}]; @b ld.global.b32 $1, [$2+{further + 4}];"
    code = f"{{ {some} {both if even else each} }}"
    words = mosaic.inline_ptx(code, pointer, left, result_types=(word, word), has_side_effects=True)
    return vector.from_elements(ir.VectorType.get((2,), word), words)


def _set(dst: Any, start: jax.Array, columns: int, values: jax.Array) -> None:
    dst[pl.ds(start, columns)] = values.reshape(columns)


def _store_compiled(values: jax.Array, dst: Any, offsets: jax.Array) -> None:
    """`store_scattered`, compiled."""
    layout = plgpu.Layout.WGMMA
    columns = 1 if values.ndim == 1 else values.shape[1]
    layouts = layout if values.ndim == 2 else layout.reduce(1), layout.reduce(1)

    @plgpu.inline_mgpu(arg_types=(*layouts, plgpu.RefType()))
    def store(_: Any, values: Any, offsets: Any, dst: Any) -> None:
        start, element = mosaic.memref_ptr(dst), ir.MemRefType(dst.type).element_type
        _, column = row_and_column(mosaic.thread_idx())
        for half, one in enumerate(offsets.registers.flat):
            offset = vector.extract(one, dynamic_position=[], static_position=[0])
            mine = arith.cmpi(arith.CmpIPredicate.sge, offset, i32(0))
            if columns == 1:
                mine = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.eq, column, i32(0)))
                _store_global(values.registers.flat[half], mosaic.getelementptr(start, [offset], element), mine)
                continue
            first = mosaic.getelementptr(start, [arith.addi(offset, column)], element)
            with mosaic.when(mine):
                for n in range(columns // 8):
                    _store_global(values.registers.flat[2 * n + half], mosaic.getelementptr(first, [8 * n], element))

    store(laid_out(values, layouts[0]), laid_out(offsets, layouts[1]), dst)


def _load_compiled(src: Any, offsets: jax.Array) -> jax.Array:
    """`load_scattered`, compiled."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct(offsets.shape, jnp.dtype(jnp.float32), layout=per_row)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), per_row), return_type=result)
    def load(_: Any, src: Any, offsets: Any) -> Any:
        start, element = mosaic.memref_ptr(src), ir.F32Type.get()
        registers = np.empty_like(offsets.registers)
        for i, one in np.ndenumerate(offsets.registers):
            pointer = mosaic.getelementptr(start, [vector.extract(one, dynamic_position=[], static_position=[0])], element)
            word = mosaic.inline_ptx("ld.global.f32 $0, [$1];", pointer, result_types=element, has_side_effects=True)
            registers[i] = vector.broadcast(ir.VectorType.get((1,), element), word)
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=offsets.layout, _is_signed=None)

    loaded: jax.Array = load(src, laid_out(offsets, per_row))
    return loaded


def _store_global(register: Any, pointer: Any, mine: Any = None) -> None:
    """Stores a vector of 32 or 64 bits; where `mine`, if given: a branch in its place would make ptxas wait for products."""
    kind = ir.VectorType(register.type)
    bits = kind.shape[0] * mosaic.bitwidth(kind.element_type)
    word = mosaic.bitcast(register, ir.IntegerType.get_signless(bits))
    if mine is None:
        mosaic.inline_ptx(f"st.global.b{bits} [$0], $1;", pointer, word, has_side_effects=True)
        return
    mine = arith.extui(ir.IntegerType.get_signless(32), mine)
    text = f"{{ .reg .pred p; setp.ne.s32 p, $2, 0; @p st.global.b{bits} [$0], $1; }}"
    mosaic.inline_ptx(text, pointer, word, mine, has_side_effects=True)
