"""Where a thread's registers lie in a tile, and what else PTX written by hand needs."""

from __future__ import annotations

from typing import Any

import jax
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith


def row_and_column(thread: Any) -> tuple[Any, Any]:
    """The first row of a thread and its first column of eight, in wgmma's layout: warp w has rows 16 w to 16 w + 15.

    Four threads share a row and the one 8 below it.
    """
    lane, warp = arith.remui(thread, i32(32)), arith.divui(arith.remui(thread, i32(128)), i32(32))
    row = arith.addi(arith.muli(warp, i32(16)), arith.divui(lane, i32(4)))
    return row, arith.muli(arith.remui(lane, i32(4)), i32(2))


def i32(x: int) -> Any:
    """The 32-bit constant x."""
    return mosaic.c(x, ir.IntegerType.get_signless(32))


def laid_out(x: jax.Array, layout: Any) -> jax.Array:
    """x in the layout that `plgpu.inline_mgpu` is told to expect. Every array in registers goes to it through here.

    Mosaic keeps an array that is one number, by itself or once the compiler has simplified it (offset + row - row), in a single
    register, does not spread it over the layout of `arg_types`, and then fails with "LLVM Translation failed". An array that is
    in the layout stays as it is.
    """
    there: jax.Array = plgpu.layout_cast(x, layout)
    return there
