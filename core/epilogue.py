"""The epilogue: an output tile goes from the registers through shared memory to global memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store_tile(values: Any, staging: Any, copy: Callable[[Any, int, int], None]) -> None:
    """Stores `values` [rows, columns] of one warpgroup in epilogue tiles, through the buffers of `staging`.

    staging: [buffers, rows, columns of an epilogue tile] in shared memory.
    copy(buffer, i, j): starts the copy of an epilogue tile to global memory; (i, j) is its first row and column in `values`.

    While one buffer is copied out, the next is written. The last copies run on after the return, so a kernel ends with
    `plgpu.wait_smem_to_gmem(0)`.
    """
    buffers, height, width = staging.shape
    rows, columns = values.shape
    tiles = [(i, j) for i in range(0, rows, height) for j in range(0, columns, width)]
    for number, (i, j) in enumerate(tiles):
        buffer = number % buffers
        # Wait until the buffer's last copy has read it. The first tile waits for all copies of the output tile before:
        # they started a whole main loop ago.
        plgpu.wait_smem_to_gmem(buffers - 1 if number else 0, wait_read_only=True)
        staging[buffer] = values[i : i + height, j : j + width]
        plgpu.commit_smem()  # TMA sees what was written
        copy(staging.at[buffer], i, j)
