"""Where a thread's registers lie in a tile, and what else PTX written by hand needs."""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
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
