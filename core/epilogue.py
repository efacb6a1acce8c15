"""The epilogue: an output tile goes from the registers through shared memory to global memory."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Iterator
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, regions
from mgpu_ops.core.gemm import ROWS, Tiled, warpgroup_tile

type Copy = Callable[[Any, int, int], None]  # starts the copy of an epilogue tile: its buffer, its first row and column


@regions.region("store")
def store_tile(
    values: Any,
    staging: Any,
    copy: Copy,
    *,
    transpose: bool = False,
    add: Callable[[Any, int, Callable[[Any], None]], None] | None = None,
    finish: Callable[[Any, Any, int, int], Any] | None = None,
) -> None:
    """Stores `values` [rows, columns] of one warpgroup in epilogue tiles, through the buffers of `staging`.

    staging: [buffers, rows, columns of an epilogue tile] in shared memory.
    copy(buffer, i, j): starts the copy of an epilogue tile to global memory; (i, j) is its first row and column in `values`.
    transpose: the buffers hold epilogue tiles of the transposed values, [buffers, columns, rows].
    add(part, number, store): calls `store` with what is to be stored in place of `part`, epilogue tile `number` of the values;
      or does not, where another block stores it.
    finish(part, buffer, i, j): what is stored in place of `part`, the epilogue tile at (i, j), through this buffer.

    While one buffer is copied out, the next is written. The last copies run on after the return, so a kernel ends with
    `plgpu.wait_smem_to_gmem(0)`.
    """
    buffers, height, width = staging.shape
    if transpose:
        height, width = width, height
    tiles = tile_origins(values.shape, height, width)

    def store(number: int, part: Any) -> None:
        buffer = number % buffers
        _wait_for_buffer(number, buffers)
        if finish is not None:
            part = finish(part, staging.at[buffer], *tiles[number])
        _write(staging.at[buffer], part, transpose)
        plgpu.commit_smem()  # TMA sees what was written
        copy(staging.at[buffer], *tiles[number])

    for number, (i, j) in enumerate(tiles):
        part = values[i : i + height, j : j + width]
        if add is None:
            store(number, part)
        else:
            add(part, number, functools.partial(store, number))


def _write(buffer: Any, part: Any, transpose: bool) -> None:
    if transpose:  # registers then hold two neighbours of a column, which lie side by side in the transposed tile
        part = plgpu.layout_cast(part.astype(buffer.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        engine.transpose_ref(buffer)[...] = part
    else:
        buffer[...] = part.astype(buffer.dtype)


def if_it_stores(cluster: str, then: Callable[[], None]) -> None:
    """Runs `then` in the blocks that store output tiles: of a cluster along k, the first."""
    if cluster == "k":
        pl.when(lax.axis_index("cluster") == 0)(then)
    else:
        then()


def residual_of_tile(buffer: Any, transpose: bool = False) -> Any:
    """The epilogue tile of a residual that was loaded into its buffer, float32 in wgmma's layout."""
    if not transpose:
        return buffer[...].astype(jnp.float32)
    tile = plgpu.load(engine.transpose_ref(buffer), layout=plgpu.Layout.WGMMA_TRANSPOSED)
    return plgpu.layout_cast(tile, plgpu.Layout.WGMMA).astype(jnp.float32)


def _wait_for_buffer(number: int, buffers: int) -> None:
    """Waits until the last copy from the buffer of epilogue tile `number` has read it.

    The first tile waits for all copies of the output tile before: they started a whole main loop ago.
    """
    plgpu.wait_smem_to_gmem(buffers - 1 if number else 0, wait_read_only=True)


def store_in_turn(
    staging: Any, parts: Iterator[tuple[Any, Copy, int, int]], before: int = 0, *, transpose: bool = False
) -> None:
    """Stores epilogue tiles of several arrays, (values, copy, i, j) each, through the buffers of `staging` in turn.

    A part is asked for when the one before is on its way. `copy`, `transpose` and the copies that run on are those of
    `store_tile`.
    before: how many parts of the same output tile were stored so.
    """
    buffers = staging.shape[0]
    for number, (part, copy, i, j) in enumerate(parts, before):
        _wait_for_buffer(number, buffers)
        _write(staging.at[number % buffers], part, transpose)
        plgpu.commit_smem()  # TMA sees what was written
        copy(staging.at[number % buffers], i, j)


def tile_origins(shape: tuple[int, ...], height: int, width: int) -> list[tuple[int, int]]:
    """First row and column of the epilogue tiles of values of this shape, in the order in which they are stored.

    Where `width` does not divide the columns, the last tile ends with them: it stores some of the values before it again.
    """
    rows, columns = shape
    return [(i, min(j, columns - width)) for i in range(0, rows, height) for j in range(0, columns, width)]


def epilogue_origins(c: Tiled) -> list[tuple[int, int]]:
    """`tile_origins` of a warpgroup's part of the output tile."""
    return tile_origins(warpgroup_tile(c), ROWS, c.epilogue_tile_n)


def deferred_stores(tiles: int, steps: int) -> list[range]:
    """Which epilogue tiles of the tile before a tile's first steps store, at most `steps` of them: as many each, in order."""
    each = math.ceil(tiles / steps)
    return [range(first, min(first + each, tiles)) for first in range(0, tiles, each)]


def along(ref: Any, start: Any, shape: tuple[int, ...], axis: int) -> Any:
    """Elements of the vector `ref` from `start` on, float32, as values of `shape` in wgmma's layout that vary along `axis`."""
    vector = ref.at[pl.ds(start, shape[axis])]
    values = plgpu.load(vector, layout=plgpu.Layout.WGMMA.reduce(1 - axis), optimized=False)
    return lax.broadcast_in_dim(values.astype(jnp.float32), shape, (axis,))
