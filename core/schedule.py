"""Orders in which the blocks of a persistent kernel work through output tiles."""

from __future__ import annotations

from typing import Any

import jax.numpy as jnp
from jax import lax

from mgpu_ops import core


def tiles_of_block(tiles: int, block: Any, blocks: int) -> Any:
    """How many of `tiles` fall to `block` (int32) when `blocks` blocks take turns: tile t goes to block t % blocks."""
    return lax.div(jnp.int32(tiles - 1) - block, jnp.int32(blocks)) + 1


def raster(index: Any, shape: tuple[int, int], minor: int, width: int) -> tuple[Any, Any]:
    """Row and column of the `index`-th tile (int32) of a grid of `shape`, walked in strips that snake.

    A strip is `width` tiles wide along axis `minor` and as long as the other axis. Tiles in flight at one time then cover
    a compact patch of the output, so that the operand blocks they share are still in L2.
    """
    width = min(width, shape[minor])
    if shape[0] == 1:
        return jnp.int32(0), index
    if shape[1] == 1:
        return index, jnp.int32(0)
    return core.planar_snake(index, shape, minor, width)
