"""How an output tile leaves the registers: piece by piece through shared memory."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from jax.experimental.pallas import mosaic_gpu as plgpu


def store_tile(values: Any, staging: Any, copy: Callable[[Any, int, int], None]) -> None:
    """Writes `values` [rows, columns] of one warpgroup to its `staging` slots and starts `copy(piece, i, j)` for each piece.

    staging: [slots, piece rows, piece columns] in shared memory. The piece at (i, j) of the tile goes out while the next one is
    written; the last ones drain while the next tile is computed. End a kernel with `plgpu.wait_smem_to_gmem(0)`.
    """
    slots, height, width = staging.shape
    rows, columns = values.shape
    pieces = [(i, j) for i in range(0, rows, height) for j in range(0, columns, width)]
    for number, (i, j) in enumerate(pieces):
        slot = number % slots
        # The slot's last copy has read it. At a new tile all are waited for: they started a whole main loop ago.
        plgpu.wait_smem_to_gmem(slots - 1 if number else 0, wait_read_only=True)
        staging[slot] = values[i : i + height, j : j + width]
        plgpu.commit_smem()
        copy(staging.at[slot], i, j)
