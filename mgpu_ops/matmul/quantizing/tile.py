"""What the kernels of `quantize` share: the tile of a block, a thread's place in it, and bytes on their way through it.

Instructions are PTX: prmt, cvt and div.full have no name in Mosaic. Source: PTX ISA.
"""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Sequence
from typing import Any, Self

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.limits import WARPGROUP
from mgpu_ops.core.registers import i32
from mgpu_ops.matmul.quantizing.problem import ROWS, WARPS, Config, Problem, tiles

_LANES = 32
_MOVED = 8  # 16 bytes that a thread has on their way from shared to global memory


@dataclasses.dataclass(frozen=True)
class Tile:
    """A block's rows and columns, some of which may lie beyond the array. matrix: the number of its matrix."""

    problem: Problem
    config: Config
    block: jax.Array
    matrix: jax.Array
    row: jax.Array
    column: jax.Array

    @classmethod
    def of(cls, p: Problem, c: Config) -> Self:
        """The tile of the block that asks."""
        block = lax.axis_index("block")
        down, across = tiles(p, c)
        matrix = jnp.int32(0)
        of_matrix = block
        if p.batch > 1:
            matrix, of_matrix = lax.div(block, jnp.int32(down * across)), lax.rem(block, jnp.int32(down * across))
        if c.order == "rows":  # blocks that run together are below each other
            row, column = lax.rem(of_matrix, jnp.int32(down)), lax.div(of_matrix, jnp.int32(down))
        else:
            row, column = lax.div(of_matrix, jnp.int32(across)), lax.rem(of_matrix, jnp.int32(across))
        return cls(p, c, block, matrix, row * c.tile_rows, column * c.tile_columns)


def square(row: Any, column: Any) -> tuple[Any, Any]:
    """The index of 16 x 16 numbers. A tile's lie in the array, or outside."""
    return pl.ds(row, ROWS), pl.ds(column, ROWS)


# --- A thread's place -----------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Place:
    """A thread of a block, whose tile begins at a row and a column.

    first: its first column, or of the array's last ones where that lies beyond. inside: whether it does not.
    """

    problem: Problem
    config: Config
    thread: Any
    row: Any
    column: Any
    first: Any
    inside: Any

    @classmethod
    def of(cls, p: Problem, c: Config, row: Any, column: Any) -> Self:
        thread = arith.remui(mosaic.thread_idx(), i32(WARPGROUP))
        first = arith.addi(column, arith.muli(arith.remui(thread, i32(_LANES)), i32(c.lane)))
        return cls(p, c, thread, row, column, least(first, p.columns - c.lane), less(first, p.columns))

    @property
    def lane(self) -> Any:
        return arith.remui(self.thread, i32(_LANES))

    @property
    def warp(self) -> Any:
        return arith.divui(self.thread, i32(_LANES))

    def chunks(self) -> list[Chunk]:
        """The rows that the thread's warp takes, 16 at a time."""
        return [Chunk.of(self, turn) for turn in range(self.config.tile_rows // (ROWS * WARPS))]


@dataclasses.dataclass(frozen=True)
class Chunk:
    """16 rows of a thread's columns.

    number: of the 16 rows in the tile. row: the first one; beyond the array the last 16, of which nothing is stored. mine:
    whether they lie in the array. start: how many numbers lie before the first one.
    """

    place: Place
    number: Any
    row: Any
    mine: Any
    start: Any

    @classmethod
    def of(cls, place: Place, turn: int) -> Self:
        p = place.problem
        number = arith.addi(place.warp, i32(turn * WARPS))
        top = arith.addi(place.row, arith.muli(number, i32(ROWS)))
        row = least(top, p.rows - ROWS)
        mine = arith.andi(place.inside, less(top, p.rows))
        return cls(place, number, row, mine, offset_of(row, p.columns, place.first))

    def offset(self, i: int) -> Any:
        """How many numbers lie before those of row i."""
        return arith.addi(self.start, i64(i * self.place.problem.columns))

    def of_rows(self, numbers: Any, kind: Any) -> list[Any]:
        """What there is for each of the 16 rows, of numbers of 32 bits for all rows."""
        start = arith.addi(numbers, arith.muli(i64_of(self.row), i64(4)))
        found: list[Any] = []
        for i in range(0, ROWS, 4):
            code = f"ld.global.nc.v4.b32 {{$0, $1, $2, $3}}, [$4+{4 * i}];"
            found += mosaic.inline_ptx(code, start, result_types=[kind] * 4)
        return found

    def store_transposed(self, smem: Any, rows: Sequence[Sequence[Any]]) -> None:
        """The bytes of 16 rows, a list of words for each, into shared memory: 16 bytes of each column.

        They are chunk `number` of a column, exchanged with another one.
        """
        c, lane = self.place.config, self.place.lane
        place = arith.xori(self.number, arith.andi(lane, i32(7)))
        start = arith.addi(arith.muli(lane, i32(c.lane * c.tile_rows)), arith.muli(place, i32(ROWS)))
        for j, words in enumerate(_transposed_bytes(rows)):
            store(smem, arith.addi(start, i32(j * c.tile_rows)), words, "shared")


# --- Bytes ----------------------------------------------------------------------------------------------------------------


def load(p: Problem, c: Config, source: Any, at: Any, how: str) -> list[Any]:
    """A thread's columns of a row, as words of 32 bits. how: words of PTX between ld.global and the type."""
    itemsize = jnp.dtype(p.dtype).itemsize
    address = arith.addi(source, arith.muli(at, i64(itemsize)))
    words: list[Any] = []
    for start in range(0, c.lane * itemsize, 16):
        count = min(4, c.lane * itemsize // 4)
        names = ", ".join(f"${i}" for i in range(count))
        code = f"ld.global{how}.v{count}.b32 {{{names}}}, [${count}+{start}];"
        words += mosaic.inline_ptx(code, address, result_types=[word()] * count, has_side_effects=True)
    return words


def _transposed_bytes(rows: Sequence[Sequence[Any]]) -> list[list[Any]]:
    """Of words of 16 rows, four columns each, the words of each column."""
    columns: list[list[Any]] = [[] for _ in range(4 * len(rows[0]))]
    for i in range(0, ROWS, 4):
        for group in range(len(rows[0])):
            a, b, c, d = (row[group] for row in rows[i : i + 4])
            # prmt picks four of the eight bytes of two words: first those of two columns of two rows
            left, right = (0x5140, 0x7362), (0x5410, 0x7632)
            upper, lower = [_pick(a, b, which) for which in left], [_pick(c, d, which) for which in left]
            words = [_pick(upper[half], lower[half], which) for half in range(2) for which in right]
            for j, word in enumerate(words):
                columns[4 * group + j].append(word)
    return columns


def _pick(a: Any, b: Any, which: int) -> Any:
    return mosaic.inline_ptx(f"prmt.b32 $0, $1, $2, 0x{which:x};", a, b, result_types=word())


def store_transposed(place: Place, smem: Any, transposed: Any) -> None:
    """The tile from shared to global memory: neighbouring threads store neighbouring 16 bytes of a transposed row."""
    p, c, thread = place.problem, place.config, place.thread
    chunks = c.tile_rows // ROWS
    chunk, first = arith.remui(thread, i32(chunks)), arith.divui(thread, i32(chunks))
    below = arith.addi(place.row, arith.muli(chunk, i32(ROWS)))
    inside = less(below, p.rows)
    step = WARPGROUP // chunks
    turns = range(c.tile_columns // step)
    for batch in itertools.batched(turns, _MOVED):
        moved = []
        for turn in batch:
            of_tile = arith.addi(first, i32(turn * step))
            there = arith.xori(chunk, arith.andi(arith.divui(of_tile, i32(c.lane)), i32(7)))
            offset = arith.addi(arith.muli(of_tile, i32(c.tile_rows)), arith.muli(there, i32(ROWS)))
            code = "ld.shared.v4.b32 {$0, $1, $2, $3}, [$4];"
            words = mosaic.inline_ptx(code, arith.addi(smem, offset), result_types=[word()] * 4, has_side_effects=True)
            moved.append((arith.addi(place.column, of_tile), words))
        for at, words in moved:
            store(transposed, offset_of(at, p.rows, below), words, "global", arith.andi(inside, less(at, p.columns)))


def store(start: Any, offset: Any, words: Sequence[Any], space: str, predicate: Any = None) -> None:
    """Words to a byte address."""
    names = ", ".join(f"${i + 1}" for i in range(len(words)))
    vector = f".v{len(words)}" if len(words) > 1 else ""
    code = f"st.{space}{vector}.b32 [$0], {{{names}}};" if vector else f"st.{space}.b32 [$0], {names};"
    mosaic.inline_ptx(code, arith.addi(start, offset), *words, predicate=predicate, has_side_effects=True)


def address(ref: Any) -> Any:
    """Of a ref's first byte: in 64 bits in global memory, in 32 in shared memory."""
    bits = 32 if mosaic.is_smem_ref(ref) else 64
    kind = ir.IntegerType.get_signless(bits)
    return mosaic.inline_ptx(f"mov.b{bits} $0, $1;", mosaic.memref_ptr(ref), result_types=kind)


def offset_of(row: Any, columns: int, column: Any) -> Any:
    """row * columns + column in 64 bits."""
    return arith.addi(arith.muli(i64_of(row), i64(columns)), i64_of(column))


def i64_of(x: Any) -> Any:
    return arith.extui(ir.IntegerType.get_signless(64), x)


def i64(x: int) -> Any:
    return mosaic.c(x, ir.IntegerType.get_signless(64))


def word() -> Any:
    return ir.IntegerType.get_signless(32)


def less(x: Any, bound: int) -> Any:
    return arith.cmpi(arith.CmpIPredicate.slt, x, i32(bound))


def least(x: Any, bound: int) -> Any:
    return arith.minsi(x, i32(bound))
