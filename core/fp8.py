"""Products of 8-bit floats with scales: which scales there are, which tiles can have them, and how precise sums are.

Kernels of them are in `core/scaled.py`. It is for the Problems and Configs of all ops that multiply 8-bit floats.
"""

from __future__ import annotations

import math

from mgpu_ops.core import gemm
from mgpu_ops.core.limits import FLOAT8

SCALES = ("none", "tensor", "row", "block")
BLOCK = 128  # of k, and of n, that has one scale
SCALES_IN_LINE = 32  # in 128 bytes, to whose multiples in shared memory TMA writes


def check_blocks(c: gemm.Tiled) -> str | None:
    """Why a config's tiles cannot have scales of blocks, or None.

    A step is one or two blocks of k, and a warpgroup's part of the tile has one scale of B for each 64 columns.
    """
    if c.tile_k not in (BLOCK, 2 * BLOCK):
        return f"tile_k={c.tile_k} must be {BLOCK}, the k of a block that has a scale, or {2 * BLOCK}"
    rows, columns = gemm.warpgroup_tile(c)
    if rows > 2 * gemm.ROWS:
        return (
            f"a warpgroup's {rows} rows of tile_m={c.tile_m} must be at most {2 * gemm.ROWS} with scales of blocks: more spill"
        )
    if c.tile_n % gemm.ROWS or (columns % gemm.ROWS and columns not in (8, 16, 32)) or c.epilogue_tile_n > gemm.ROWS:
        return (
            f"a warpgroup's {columns} columns of tile_n={c.tile_n}, and epilogue_tile_n={c.epilogue_tile_n}, must be 8, 16, 32 "
            f"or, but for the last, a multiple of {gemm.ROWS}: each {gemm.ROWS} columns have one scale"
        )
    return None


def accumulators(c: gemm.Tiled, scales: str) -> tuple[tuple[int, int], ...]:
    """The shapes of a consumer warpgroup's accumulators.

    With scales of blocks: sums of 64 x 64, which have one scale of B; and two that products of 64 rows and 128 of k take in
    turn, or one for the only product of a step.
    """
    rows, columns = gemm.warpgroup_tile(c)
    if scales != "block":
        return ((rows, columns),)
    count, width = rows // gemm.ROWS, min(gemm.ROWS, columns)
    products = min(2, count * c.tile_k // BLOCK)
    return ((gemm.ROWS, width),) * (count * (columns // width)) + ((gemm.ROWS, columns),) * products


def accumulators_in_all(c: gemm.Tiled, scales: str) -> float:
    """What `accumulators` take, in accumulators of a warpgroup's part of the tile."""
    return sum(map(math.prod, accumulators(c, scales))) / math.prod(gemm.warpgroup_tile(c))


def accumulation_error(dtype: str, k: int, scales: str) -> float:
    """The error of sums over k on the tensor cores, beside that of float32, as a part of typical results: 2^-12 sqrt(k).

    On 8-bit floats an instruction of Hopper adds 32 products and the sum so far. It aligns them to the largest exponent among
    them, keeps 13 bits behind that one's leading bit, and cuts off the rest of each: a product loses less than 2^-13 of the
    largest addend. Of addends of both signs the losses have both signs too, and their sum grows as sqrt(k). Computed so, random
    normal numbers have errors whose root of mean squares is up to 0.2 of 2^-13 sqrt(k) of the result's, and the largest of
    10^4 errors is 0.8 of it; 2 leaves room for more results, and for an epilogue that makes them smaller.

    Block scales end such sums at every 128 of k. Addends of one sign lose more (docs/kernels/matmul.md, "Eight bits").
    Other dtypes: 0.
    """
    if dtype not in FLOAT8:
        return 0.0
    return 2.0**-12 * math.sqrt(min(k, BLOCK) if scales == "block" else k)
