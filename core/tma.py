"""TMA copies that Mosaic GPU lacks: of arrays of any shape, of windows of rows that end anywhere, and of rows in pages.

`copy_any_shape` extends `LaunchContext.async_copy`, through which every TMA copy of a compiled kernel goes, for kernels of
`engine.kernel`. `block_start` and `block_anywhere` are for kernels; windows and pages are copied by `core/rows.py`.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, Self, overload

import jax
import jax.numpy as jnp
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import launch_context, utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref, scf
from jax.typing import DTypeLike

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.jax_patches import is_marked
from mgpu_ops.core.tile_scheduler import Int

# Mosaic insists that a tile of 8 rows begins at a multiple of 8, and of columns likewise. A copy that begins anywhere gives its
# first row times ROW_UNIT and its first column times COLUMN_UNIT; an index of one of the values below marks such a copy.
ROW_UNIT = 8
COLUMN_UNIT = 64
ANYWHERE = 0x414E5957  # in the first dimension, of size 1: a block that begins anywhere
WINDOW = 0x57494E44  # in the second dimension, of size 1: a window of rows
WINDOW_ANYWHERE = 0x57414E59  # likewise: a window whose columns begin anywhere
WINDOW_OF_HEAD = 0x57480000  # likewise, plus the columns of a head: a window whose columns end with a head
HEAD_UNIT = 512  # a column of such a window is the head's number times this, plus the column within the head
PAGES = 0x50470000  # likewise, plus the rows of a page: rows in pages, which a table in shared memory names
type Slice = tuple[Any, ...]  # an index or a DynamicSlice for each dimension of the array
type Transforms = tuple[launch_context.MemRefTransform, ...]

_ROWS = 1 << 30  # the size of the dimension that rows are counted in: a window's end lies at this coordinate
_WRAP_BYTES = 1 << 34  # times _ROWS, a stride of 2^64 bytes: nothing, in 64-bit addresses


@dataclasses.dataclass(frozen=True)
class _WindowOfRows(launch_context.MemRefTransform):
    """Views an array [1, 1, rows, columns] so that TMA clips a block at row `end`, which the kernel computes.

    TMA clips at the ends of dimensions only, and a descriptor's dimensions are fixed on the host. Here the array gets three
    dimensions for its rows, at distances of W - S, S and S bytes (S: one row; W: 2^34). Row r is addressed as
    (2^30, end, 2^30 - end + r): 2^30 (W - S) + end S + (2^30 - end + r) S = 2^64 + r S bytes, and as the last of the three
    has size 2^30, what lies at end or beyond counts as outside: read as zeros, not written. With `panel`, the columns are
    split into panels of that width, which come one after the other in shared memory. After Triton's "ragged TMA".
    anywhere: the columns may begin at any column, not only at a panel's first: `_panels`.
    """

    panel: int | None
    end: Any = dataclasses.field(compare=False)  # ir.Value of index type; the same descriptor serves every end
    anywhere: bool = False

    def apply(self, ref: ir.Value) -> ir.Value:
        ty = ir.MemRefType(ref.type)
        row = ty.shape[3]
        itemsize = utils.bitwidth(ty.element_type) // 8
        columns = (self.panel, row, 1) if self.panel else (row, 1)
        strides = [_WRAP_BYTES // itemsize - row, row, *columns]
        return _view(ref, self.transform_gmem_shape(ty.shape), strides)

    def transform_index(self, idx: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        *_, row, column = idx
        row = arith.addi(arith.subi(_index(_ROWS), self.end), row)
        if not self.panel:
            return (_index(_ROWS), self.end, row, column)
        panel, within = _panel_index(column, self.panel, self.anywhere)
        return (_index(_ROWS), self.end, panel, row, within)

    def transform_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *_, rows, columns = shape
        return (1, 1, columns // self.panel, rows, self.panel) if self.panel else (1, 1, rows, columns)

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        row = shape[3]
        if not self.panel:
            return (_ROWS + 1, _ROWS, _ROWS, row)
        panels, width = _panels(row, self.panel, self.anywhere)
        return (_ROWS + 1, _ROWS, panels, _ROWS, width)

    def batch(self, leading_rank: int) -> _WindowOfRows:
        return self  # the two leading dimensions are those that `copy` squeezes


@dataclasses.dataclass(frozen=True)
class _WindowOfHead(launch_context.MemRefTransform):
    """As `_WindowOfRows`, of rows that are heads of `size` columns each: TMA also clips a block where its head ends.

    The column of a block is its head's number times HEAD_UNIT plus the column within the head. Blocks are one panel wide.
    """

    size: int
    end: Any = dataclasses.field(compare=False)

    def apply(self, ref: ir.Value) -> ir.Value:
        ty = ir.MemRefType(ref.type)
        row, itemsize = ty.shape[3], utils.bitwidth(ty.element_type) // 8
        return _view(ref, self.transform_gmem_shape(ty.shape), [_WRAP_BYTES // itemsize - row, row, self.size, row, 1])

    def transform_index(self, idx: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        *_, row, column = idx
        row = arith.addi(arith.subi(_index(_ROWS), self.end), row)
        unit = _index(HEAD_UNIT)
        return (_index(_ROWS), self.end, arith.divui(column, unit), row, arith.remui(column, unit))

    def transform_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *_, rows, columns = shape
        return (1, 1, 1, rows, columns)

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return (_ROWS + 1, _ROWS, shape[3] // self.size, _ROWS, self.size)

    def batch(self, leading_rank: int) -> _WindowOfHead:
        return self


@dataclasses.dataclass(frozen=True)
class _RowsAnywhere(launch_context.MemRefTransform):
    """Views an array [1, 1, rows, columns] in tiles of `tile` rows by `panel` columns that may begin at any row.

    TMA then brings [rows / tile, panels, tile, panel] in one copy, the order in which shared memory holds a block of several
    panels. Row r is addressed as (r // tile, r % tile + i), so that the tile's dimension is nearly twice as long as a tile.
    anywhere: columns likewise (`_panels`); else they begin at a panel's first.
    """

    tile: int
    panel: int
    anywhere: bool = False

    def apply(self, ref: ir.Value) -> ir.Value:
        ty = ir.MemRefType(ref.type)
        row = ty.shape[3]
        shape = self.transform_gmem_shape(ty.shape)
        strides = [ty.shape[2] * row, ty.shape[2] * row, self.tile * row, self.panel, row, 1]
        return _view(ref, shape, strides)

    def transform_index(self, idx: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        *lead, row, column = idx
        tile = _index(self.tile)
        first = arith.divui(row, tile)
        panel, within = _panel_index(column, self.panel, self.anywhere)
        return (*lead, first, panel, arith.remui(row, tile), within)

    def transform_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, rows, columns = shape
        return (*lead, rows // self.tile, columns // self.panel, self.tile, self.panel)

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, rows, columns = shape
        panels, width = _panels(columns, self.panel, self.anywhere)
        return (*lead, -(-rows // self.tile), panels, 2 * self.tile - 1, width)

    def batch(self, leading_rank: int) -> _RowsAnywhere:
        return self


def _panels(columns: int, panel: int, anywhere: bool) -> tuple[int, int]:
    """How many panels a row of `columns` is viewed in, and how wide they are.

    Column c is addressed as (c // panel, c % panel + i). Where a block may begin anywhere, panels are nearly twice as wide.
    """
    return (-(-columns // panel), 2 * panel - 1) if anywhere else (columns // panel, panel)


def _panel_index(column: ir.Value, panel: int, anywhere: bool) -> tuple[ir.Value, ir.Value]:
    """The panel that a block begins in, and where in it."""
    return arith.divui(column, _index(panel)), arith.remui(column, _index(panel)) if anywhere else _index(0)


def _view(ref: ir.Value, shape: Sequence[int], strides: Sequence[int], offset: int = 0) -> ir.Value:
    ty = ir.MemRefType(ref.type)
    view = ir.MemRefType.get(shape, ty.element_type, ir.StridedLayoutAttr.get(offset, strides), ty.memory_space)
    return memref.reinterpret_cast(view, ref, [], [], [], static_offsets=[offset], static_sizes=shape, static_strides=strides)


def copy_any_shape() -> None:
    """Marked kernels can copy arrays of any shape, and windows of rows (`core/jax_patches.py`)."""
    copy = launch_context.LaunchContext.async_copy

    @functools.wraps(copy)
    def async_copy(
        self: Any, *, src_ref: Any, dst_ref: Any, gmem_slice: Any = (), gmem_transform: Any = (), **options: Any
    ) -> None:
        if not is_marked(self):
            copy(self, src_ref=src_ref, dst_ref=dst_ref, gmem_slice=gmem_slice, gmem_transform=gmem_transform, **options)
            return
        to_smem = utils.is_smem_ref(dst_ref)
        gmem, smem = (src_ref, dst_ref) if to_smem else (dst_ref, src_ref)

        def one(
            smem: ir.Value,
            gmem_slice: Slice,
            gmem_transform: Transforms,
            only: ir.Value | None = None,
            thread: ir.Value | None = None,  # in place of the one thread that `options` names
        ) -> None:
            src, dst = (gmem, smem) if to_smem else (smem, gmem)
            given = dict(options, predicate=thread) if thread is not None else options
            given = dict(given, predicate=arith.andi(given["predicate"], only)) if only else given
            copy(self, src_ref=src, dst_ref=dst, gmem_slice=gmem_slice, gmem_transform=gmem_transform, **given)

        anywhere = len(gmem_slice) > 2 and _is_constant(gmem_slice[0], ANYWHERE)
        if anywhere:
            gmem_slice = _anywhere(gmem_slice)
        if anywhere and to_smem and len(smem.type.shape) == 4 and smem.type.shape[1] > 1:
            _panels_anywhere(gmem, smem, gmem_slice, one)
        elif page_size := _page_size(gmem_slice):
            _pages(gmem, smem, gmem_slice, page_size, one)
        elif _is_window(gmem_slice):
            if not to_smem and _head_size(gmem_slice) and smem.type.shape[1] > 1:
                raise NotImplementedError("a store of several panels of a head, which would overwrite the next one")
            _window_of_rows(gmem, smem, gmem_slice, one)
        elif len(smem.type.shape) == 4 and (tiling := _ragged_tiling(gmem, smem, gmem_slice, gmem_transform, anywhere)):
            _ragged(gmem, smem, gmem_slice, tiling, to_smem, one)
        else:
            one(smem, gmem_slice, _clipped(gmem, gmem_slice, gmem_transform))

    launch_context.LaunchContext.async_copy = async_copy  # type: ignore[method-assign]


@dataclasses.dataclass(frozen=True)
class _ClippedTiles(launch_context.TileTransform):
    """Views an array in tiles, with a dimension that counts them also where the array is no larger than one tile.

    Mosaic drops a dimension of size 1 together with its index. A block that lies beyond such an array would then be copied to
    or from the array's beginning; TMA clips it if the dimension stays. Mosaic keeps what it is told to be of size 2.
    """

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, tiles, panels, tile, panel = super().transform_gmem_shape(shape)
        return (*lead, max(tiles, 2), max(panels, 2), tile, panel)


_TMA_RANK = 5  # dimensions of a tensor map, at most


def _clipped(gmem: ir.Value, gmem_slice: Slice, gmem_transform: Transforms) -> Transforms:
    """The transforms of a copy whose block may begin beyond an array of one tile: with `_ClippedTiles`."""
    lead = gmem.type.shape[:-2]
    if len(gmem_slice) != gmem.type.rank or sum(size > 1 for size in lead) + 4 > _TMA_RANK:
        return gmem_transform
    match gmem_transform:
        case (launch_context.TileTransform(tiling=(_, _) as tiling, rounding=rounding),):
            parts = zip(gmem_slice[-2:], gmem.type.shape[-2:], tiling, strict=True)
            if any(size <= tile and _may_be_beyond(part) for part, size, tile in parts):
                return (_ClippedTiles(tiling, rounding),)
    return gmem_transform


def _may_be_beyond(part: Any) -> bool:
    """Whether a slice of a dimension may begin elsewhere than at 0."""
    if not isinstance(part, utils.DynamicSlice):
        return False
    return part.base != 0 if isinstance(part.base, int) else not _is_constant(part.base, 0)


def _is_window(gmem_slice: Slice) -> bool:
    """Whether the slice is (end, one of WINDOW..., rows, columns). Of several panels `end` is a slice of as many."""
    match gmem_slice:
        case (_, index, _, _):
            return _is_constant(index, WINDOW) or _is_constant(index, WINDOW_ANYWHERE) or _head_size(gmem_slice) is not None
    return False


def _page_size(gmem_slice: Slice) -> int | None:
    """The rows of a page where the slice is (address, PAGES + rows of a page, rows, columns), else None."""
    return _plus(PAGES, gmem_slice)


def _head_size(gmem_slice: Slice) -> int | None:
    """The columns of a head where the slice is (end, WINDOW_OF_HEAD + columns of a head, rows, columns), else None."""
    return _plus(WINDOW_OF_HEAD, gmem_slice)


def _plus(mark: int, gmem_slice: Slice) -> int | None:
    """What the second index of a slice is beside a mark, else None."""
    match gmem_slice:
        case (_, index, _, _):
            value = _constant(index)
            return value - mark if value is not None and 0 < value - mark < 2**16 else None
    return None


def _is_constant(x: Any, value: int) -> bool:
    return _constant(x) == value


def _constant(x: Any) -> int | None:
    """The value of a constant integer; None for what is none."""
    owner: Any = getattr(x, "owner", None)
    while isinstance(owner, ir.Operation | ir.OpView) and owner.name == "arith.index_cast":
        owner = owner.operands[0].owner
    constant = isinstance(owner, ir.Operation | ir.OpView) and owner.name == "arith.constant"
    return int(ir.IntegerAttr(owner.attributes["value"]).value) if constant else None


def _anywhere(gmem_slice: Slice) -> Slice:
    """The slice (ANYWHERE, ..., 8 rows, 64 columns) as it is meant: (0, ..., rows, columns)."""
    _, *lead, rows, columns = gmem_slice
    units = ((rows, ROW_UNIT), (columns, COLUMN_UNIT))
    there = [utils.DynamicSlice(arith.divui(part.base, _index(unit)), part.length) for part, unit in units]
    return (_index(0), *lead, *there)


def _ragged_tiling(
    gmem: ir.Value, smem: ir.Value, gmem_slice: Slice, gmem_transform: Transforms, anywhere: bool
) -> tuple[int, int] | None:
    """The swizzle tile of the copy, where it does not divide the array: Mosaic then refuses the array.

    anywhere: also where it does, but a block of one panel may begin within a tile.
    """
    match gmem_transform:
        case (launch_context.TileTransform(tiling=(rows, columns)),):
            *_, m, n = gmem.type.shape
            divided = (m <= rows or m % rows == 0) and (n <= columns or n % columns == 0)
            divided &= not anywhere or smem.type.shape[1] > 1
            whole_rows = all(isinstance(part, utils.DynamicSlice) for part in gmem_slice[-2:])
            if not divided and (smem.type.shape[1] == 1 or whole_rows):  # heads between tokens and features are no rows
                return rows, columns
    return None


def _ragged(
    gmem: ir.Value, smem: ir.Value, gmem_slice: Slice, tiling: tuple[int, int], to_smem: bool, copy: Callable[..., None]
) -> None:
    """Copies between an array that swizzle tiles do not divide and a block in shared memory, [tiles, panels, 8, panel].

    A block of one panel lies in shared memory as plain rows: one copy without tiles, which TMA clips at the array's true end.
    Several panels interleave every 8 rows and come in tiles (`_in_tiles`), which do not reach the array's last rows where they
    are no multiple of 8: a block that holds some of these comes one tile at a time, clipped (`_tile_by_tile`). Where a block is
    wider than a row, its tiles hold what follows the row in memory, and so whatever: `last_start`.
    """
    _, panels, _, panel = smem.type.shape
    if panels == 1:
        copy(utils.memref_fold(smem, 0, 3), gmem_slice, ())
        return
    *_, m, n = gmem.type.shape
    width = panels * panel
    if not to_smem:
        raise NotImplementedError(f"a store of blocks {width} wide to an array of rows of {n}: see `last_start`")
    *lead, rows, columns = gmem_slice
    if width > n:
        kinds, end = [(_TilesBeyond(tiling, panels), columns, None)], _rows_in_tiles(m, n, width, tiling[0])
    else:
        kinds, end = _in_tiles(n, columns, tiling), m // tiling[0] * tiling[0]
    whole = _ends_by(rows, end) if end < m else None
    for transform, at, only in kinds:
        copy(smem, (*lead, rows, at), (transform,), _both(only, whole))
    if whole is not None:
        with ir.InsertionPoint(scf.IfOp(_not(whole)).then_block):  # type: ignore[arg-type, call-arg]
            first = arith.minui(columns.base, _index(n - width)) if n % tiling[1] and width < n else columns.base
            _tile_by_tile(smem, lead, rows.base, first, copy)
            scf.YieldOp([])


def _panels_anywhere(gmem: ir.Value, smem: ir.Value, gmem_slice: Slice, copy: Callable[..., None]) -> None:
    """Copies a block of several panels from an array [1, batch, rows, columns]. It begins at any column, and may end beyond it.

    One copy, whose columns beyond a row are those of the next one, which are in the array but for the last rows. A block
    that holds some of the last rows comes one tile at a time, clipped, where it ends beyond the columns or in part of a tile.
    """
    _, panels, tile, panel = smem.type.shape
    _, _, m, n = gmem.type.shape
    *lead, rows, columns = gmem_slice
    inside = _ends_by(columns, n)
    if m % tile:
        inside = utils.c(0, inside.type)
    whole = arith.ori(inside, _ends_by(rows, max(0, m // tile - math.ceil(panels * panel / tile / n) - 1) * tile))
    copy(smem, gmem_slice, (_RowsAnywhere(tile, panel, True),), whole)
    with ir.InsertionPoint(scf.IfOp(_not(whole)).then_block):  # type: ignore[arg-type, call-arg]
        _tile_by_tile(smem, lead, rows.base, columns.base, copy)
        scf.YieldOp([])


def _in_tiles(n: int, columns: utils.DynamicSlice, tiling: tuple[int, int]) -> list[tuple[Any, Any, Any]]:
    """The copies of which one brings a block of several panels from rows of n.

    Each as: the tensor map's view of the array, the block's columns in it, and a flag that says whether this copy is the one;
    None for always. A block that would reach beyond the end of the rows is the one that ends with them (`last_start`). Its
    tensor map has tiles that end there too.
    """
    down = launch_context.TileTransform(tiling, launch_context.Rounding.DOWN)
    if n % tiling[1] == 0:
        return [(down, columns, None)]
    inside = _ends_by(columns, n)
    last = utils.DynamicSlice(_index(n - n % tiling[1] - columns.length), columns.length)
    return [(down, columns, inside), (_TilesToTheEnd(tiling), last, _not(inside))]


def _tile_by_tile(smem: ir.Value, lead: Sequence[Any], row: ir.Value, column: ir.Value, copy: Callable[..., None]) -> None:
    """Copies the block at (row, column) in a loop over its swizzle tiles, each of which TMA clips at the array's true end."""
    tiles, panels, tile, panel = smem.type.shape
    loop = scf.ForOp(_index(0), _opaque(tiles * panels), _index(1))  # type: ignore[arg-type, call-arg]
    with ir.InsertionPoint(loop.body):
        i = arith.divui(loop.induction_variable, _index(panels))
        j = arith.remui(loop.induction_variable, _index(panels))
        at = (
            utils.DynamicSlice(arith.addi(row, arith.muli(i, _index(tile))), tile),
            utils.DynamicSlice(arith.addi(column, arith.muli(j, _index(panel))), panel),
        )
        copy(utils.memref_slice(smem, (i, j)), (*lead, *at), ())
        scf.YieldOp([])


@overload
def block_start(index: jax.Array, width: int, length: int, dtype: DTypeLike, swizzle: int) -> jax.Array: ...
@overload
def block_start(index: Int, width: int, length: int, dtype: DTypeLike, swizzle: int) -> Int: ...
def block_start(index: Int, width: int, length: int, dtype: DTypeLike, swizzle: int) -> Int:
    """The first element of block `index` when `copy_gmem_to_smem` copies a row of `length` in blocks of `width`.

    It is index * width, with one exception. TMA cannot clip a block of several swizzle tiles where these do not divide the row:
    the last block then ends with the row and overlaps the one before. The interpreter clips it instead.
    """
    last = last_start(length, width, swizzle // jnp.dtype(dtype).itemsize)
    start = index * width
    return start if last is None or interpreting() else jnp.minimum(start, jnp.int32(last))


def block_anywhere(ref: Any, *index: Any) -> Any:
    """The block of an array [1, ..., rows, columns] at `index`, for a copy. Its two slices may begin at any multiple of 8.

    Mosaic accepts only starts that it can prove to be multiples of the swizzle tile. So the starts are written multiplied by
    ROW_UNIT and COLUMN_UNIT, and the copy divides them again (`copy_any_shape`). Columns are then below 2^25, rows below 2^28.
    """
    *lead, rows, columns = index
    if interpreting():
        return ref.at[(0, *index)]
    there = (pl.ds(rows.start * ROW_UNIT, rows.size), pl.ds(columns.start * COLUMN_UNIT, columns.size))
    return ref.at[(jnp.int32(ANYWHERE), *lead, *there)]


def _opaque(count: int) -> ir.Value:
    """The number of a loop's iterations that the compiler does not see: unrolled, the loop's addresses spill."""
    i32 = ir.IntegerType.get_signless(32)
    moved = utils.inline_ptx(f"mov.b32 $0, {count};", result_types=i32, has_side_effects=True)
    return arith.index_cast(ir.IndexType.get(), moved)  # type: ignore[arg-type, return-value]


def last_start(length: int, width: int, panel: int) -> int | None:
    """Where the last block of a row of `length` begins, if not at a multiple of its `width`: see `_ragged`.

    Blocks of several panels never reach beyond a longer row that panels do not divide. None: as any other. What lies beyond the
    array then reads as zeros, but in a block of several panels, longer than such a row, as any values.
    """
    return length - width if panel < width <= length and length % panel else None


def _index(x: int) -> ir.Value:
    return utils.c(x, ir.IndexType.get())


def _ends_by(part: utils.DynamicSlice, end: int) -> ir.Value:
    """Whether a slice ends at `end` or before."""
    return arith.cmpi(arith.CmpIPredicate.ule, arith.addi(part.base, _index(part.length)), _index(end))


def _not(flag: ir.Value) -> ir.Value:
    return arith.xori(flag, utils.c(1, flag.type))


def _both(x: ir.Value | None, y: ir.Value | None) -> ir.Value | None:
    """x and y, of which None stands for true."""
    return arith.andi(x, y) if x is not None and y is not None else y if x is None else x


@dataclasses.dataclass(frozen=True)
class _InTiles(launch_context.MemRefTransform):
    """A view of an array in tiles, as of whole ones."""

    tiling: tuple[int, int]

    @property
    def _tiles(self) -> Any:
        return launch_context.TileTransform(self.tiling, launch_context.Rounding.DOWN)

    def transform_index(self, idx: Sequence[ir.Value]) -> tuple[ir.Value, ...]:
        return self._tiles.transform_index(idx)

    def transform_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        return self._tiles.transform_shape(shape)

    def batch(self, leading_rank: int) -> Self:
        return self


@dataclasses.dataclass(frozen=True)
class _TilesToTheEnd(_InTiles):
    """Views an array in tiles of which the last of a row ends with the row; the first columns, less than one, are left out."""

    def apply(self, ref: ir.Value) -> ir.Value:
        ty = ir.MemRefType(ref.type)
        *lead, columns = ty.shape
        first = columns % self.tiling[1]
        return self._tiles.apply(_view(ref, [*lead, columns - first], ty.get_strides_and_offset()[0], first))

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, columns = shape
        return self._tiles.transform_gmem_shape((*lead, columns - columns % self.tiling[1]))


def _rows_in_tiles(rows: int, length: int, width: int, tile: int) -> int:
    """The end of the last whole tile of rows after which an array has as many elements as a block is wider than a row."""
    return max(0, rows - -(-(width - length) // length)) // tile * tile


@dataclasses.dataclass(frozen=True)
class _TilesBeyond(_InTiles):
    """Views an array in tiles, more panels of them than a row has: the last ones hold what follows the row, the next rows.

    A copy must end where as much of the array follows (`_rows_in_tiles`).
    """

    panels: int

    def apply(self, ref: ir.Value) -> ir.Value:
        ty = ir.MemRefType(ref.type)
        *lead, row, _ = ty.get_strides_and_offset()[0]
        return _view(ref, self.transform_gmem_shape(ty.shape), [*lead, self.tiling[0] * row, self.tiling[1], row, 1])

    def transform_gmem_shape(self, shape: Sequence[int]) -> tuple[int, ...]:
        *lead, rows, _ = shape
        return (*lead, max(1, rows // self.tiling[0]), self.panels, *self.tiling)


def _window_of_rows(gmem: ir.Value, smem: ir.Value, gmem_slice: Slice, copy: Callable[..., None]) -> None:
    """Copies between a block in shared memory, tiled [rows / 8, panels, 8, panel], and rows up to `end` of an array.

    One panel lies in shared memory as plain rows, and so do panels that come one after the other: one copy. Several interleave
    every 8 rows: one copy where all rows come before `end`, else one for each 8, in a loop, so that the rare case takes few
    registers. A block of a head: as one panel, or `_panels_of_head`.
    """
    end, kind, rows, columns = gmem_slice
    size = _head_size(gmem_slice)
    anywhere = size is not None or _is_constant(kind, WINDOW_ANYWHERE)
    if anywhere:  # given times COLUMN_UNIT
        columns = utils.DynamicSlice(arith.divui(columns.base, _index(COLUMN_UNIT)), columns.length)
    row = arith.divui(rows.base, _index(ROW_UNIT))
    block = (0, 0, utils.DynamicSlice(row, rows.length), columns)
    if isinstance(end, utils.DynamicSlice):  # panels one after the other, [panels, rows / 8, 1, 8, panel]
        panels, _, _, _, panel = smem.type.shape
        block = (*block[:3], utils.DynamicSlice(columns.base, panels * panel))
        copy(utils.memref_fold(smem, 1, 3), block, (_WindowOfRows(panel, end.base),))
        return
    tiles, panels, tile, panel = smem.type.shape
    if panels == 1:
        plain = utils.memref_fold(smem, 0, 3)
        if size is None:
            copy(plain, block, (_WindowOfRows(None, end),))
        else:
            copy(utils.memref_unsqueeze(plain, 0), block, (_WindowOfHead(size, end),))
        return
    if size is not None:
        _panels_of_head(gmem, smem, row, end, columns, size, copy)
        return
    whole = arith.cmpi(arith.CmpIPredicate.ule, arith.addi(row, _index(rows.length)), end)
    copy(smem, block, (_RowsAnywhere(tile, panel, anywhere),), whole)
    with ir.InsertionPoint(scf.IfOp(_not(whole)).then_block):  # type: ignore[arg-type, call-arg]
        narrow = panel * utils.bitwidth(smem.type.element_type) < 8 * 128  # rows of less than 128 bytes
        count = _opaque(tiles) if narrow else _index(tiles)  # unrolled, the producer's addresses would spill
        loop = scf.ForOp(_index(0), count, _index(1))  # type: ignore[arg-type, call-arg]
        with ir.InsertionPoint(loop.body):
            first = arith.addi(row, arith.muli(loop.induction_variable, _index(tile)))
            window = (0, 0, utils.DynamicSlice(first, tile), columns)
            copy(utils.memref_slice(smem, loop.induction_variable), window, (_WindowOfRows(panel, end, anywhere),))
            scf.YieldOp([])
        scf.YieldOp([])


def _panels_of_head(
    gmem: ir.Value,
    smem: ir.Value,
    row: ir.Value,
    end: ir.Value,
    columns: utils.DynamicSlice,
    size: int,
    copy: Callable[..., None],
) -> None:
    """Loads a block of several panels of a head, rows up to `end`. Columns beyond the head are those that follow in the array.

    As other windows, in one copy or one for each 8 rows. But where nothing follows, behind the array's last rows, one for each
    panel of 8 rows, which TMA clips at the head's end.
    """
    tiles, panels, tile, panel = smem.type.shape
    unit, (*_, m, n) = _index(HEAD_UNIT), gmem.type.shape
    head, within = arith.divui(columns.base, unit), arith.remui(columns.base, unit)
    there = utils.DynamicSlice(arith.addi(arith.muli(head, _index(size)), within), columns.length)
    after = _not(_ends_by(there, n))
    last = max(0, m - math.ceil((columns.length - size) / n))  # up to here as many columns follow in the array

    def beyond(row: ir.Value, rows: int) -> ir.Value:
        """Whether a block of so many rows ends behind the array."""
        return arith.andi(after, arith.cmpi(arith.CmpIPredicate.ugt, arith.addi(row, _index(rows)), _index(last)))

    rows = tiles * tile
    whole = arith.cmpi(arith.CmpIPredicate.ule, arith.addi(row, _index(rows)), end)
    whole = arith.andi(whole, _not(beyond(row, rows)))
    copy(smem, (0, 0, utils.DynamicSlice(row, rows), there), (_RowsAnywhere(tile, panel, True),), whole)
    with ir.InsertionPoint(scf.IfOp(_not(whole)).then_block):  # type: ignore[arg-type, call-arg]
        loop = scf.ForOp(_index(0), _opaque(tiles), _index(1))  # type: ignore[arg-type, call-arg]
        with ir.InsertionPoint(loop.body):
            first = arith.addi(row, arith.muli(loop.induction_variable, _index(tile)))
            window, alone = (0, 0, utils.DynamicSlice(first, tile)), beyond(first, tile)
            own = utils.memref_slice(smem, loop.induction_variable)
            copy(own, (*window, there), (_WindowOfRows(panel, end, True),), _not(alone))
            with ir.InsertionPoint(scf.IfOp(alone).then_block):  # type: ignore[arg-type, call-arg]
                by_panel = scf.ForOp(_index(0), _opaque(panels), _index(1))  # type: ignore[arg-type, call-arg]
                with ir.InsertionPoint(by_panel.body):
                    number = by_panel.induction_variable
                    at = utils.DynamicSlice(arith.addi(columns.base, arith.muli(number, _index(panel))), panel)
                    place = utils.memref_slice(own, utils.DynamicSlice(number, 1))
                    copy(place, (*window, at), (_WindowOfHead(size, end),))
                    scf.YieldOp([])
                scf.YieldOp([])
            scf.YieldOp([])
        scf.YieldOp([])


def _pages(gmem: ir.Value, smem: ir.Value, gmem_slice: Slice, page_size: int, copy: Callable[..., None]) -> None:
    """Copies pages of an array of rows to a block of several pages in shared memory, tiled [rows / 8, panels, 8, panel].

    The block is one copy to Mosaic: one barrier among the warps before it, one arrival for all its bytes. Its pages are dealt
    to the warps, and one thread of each starts their copies. The slice is (address, PAGES + page_size, count, columns): the
    numbers of the pages lie from that address in shared memory on, 32 bits each; the first `count` rows of the block count, and
    the others arrive as zeros. Numbers of pages that count are clamped to those there are, others are not read.
    """
    address, _, rows, columns = gmem_slice
    pages, pieces, tiles = gmem.type.shape[2] // page_size, rows.length // page_size, page_size // smem.type.shape[2]
    count = arith.divui(rows.base, _index(ROW_UNIT))
    last = arith.divui(arith.subi(arith.maxui(count, _index(1)), _index(1)), _index(page_size))  # page that counts
    warp = arith.remui(utils.warp_idx(sync=True), utils.c(utils.WARPS_IN_WARPGROUP, ir.IntegerType.get_signless(32)))
    thread = utils.single_thread_predicate(utils.ThreadSubset.WARP)
    for first in range(0, pieces, utils.WARPS_IN_WARPGROUP):
        piece = arith.addi(arith.index_cast(ir.IndexType.get(), warp), _index(first))
        mine = thread
        if pieces - first < utils.WARPS_IN_WARPGROUP:
            mine = arith.andi(thread, arith.cmpi(arith.CmpIPredicate.ult, piece, _index(pieces)))
            piece = arith.minui(piece, _index(pieces - 1))
        row = arith.muli(_page(address, arith.minui(piece, last), pages), _index(page_size))
        before = arith.muli(piece, _index(page_size))
        left = arith.minui(arith.subi(arith.maxui(count, before), before), _index(page_size))
        window = utils.DynamicSlice(arith.muli(row, _index(ROW_UNIT)), page_size)
        own = utils.memref_slice(smem, (utils.DynamicSlice(arith.muli(piece, _index(tiles)), tiles),))
        there = (arith.addi(row, left), _index(WINDOW), window, columns)
        _window_of_rows(gmem, own, there, functools.partial(copy, thread=mine))


def _page(address: ir.Value, piece: ir.Value, pages: int) -> ir.Value:
    """The number of a page from the table in shared memory, clamped to the pages there are."""
    i32 = ir.IntegerType.get_signless(32)
    place = arith.index_cast(i32, arith.addi(address, arith.muli(piece, _index(4))))
    page = utils.inline_ptx("ld.shared.b32 $0, [$1];", place, result_types=i32, has_side_effects=True)
    page = arith.minsi(arith.maxsi(page, utils.c(0, i32)), utils.c(pages - 1, i32))
    return arith.index_cast(ir.IndexType.get(), page)
