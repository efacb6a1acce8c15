"""Which output tiles a block of the kernel computes, which part of k, and where they lie in global memory."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import tile_scheduler, tma
from mgpu_ops.core.epilogue import Copy
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import resident_clusters
from mgpu_ops.core.tile_scheduler import Int, Rounds
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    cluster_size,
    columns_of_b,
    crowds,
    k_steps,
    neighbours,
    panel,
    swizzle_bytes,
    transposed,
)

_LONG = 50e-6  # seconds at the tensor cores' rate


@dataclasses.dataclass(frozen=True)
class Work:
    """What a launch computes, and by which blocks or, where config.cluster is not "none", clusters.

    Problem and config are those of `as_computed`. transposed: tiles are of out^T, and are transposed again when stored.
    """

    problem: Problem
    config: Config
    rounds: Rounds
    transposed: bool

    @staticmethod
    def of(problem: Problem, config: Config, gpu: Gpu, *, transposed: bool = False) -> Work:
        """Short kernels have one round: a collective is not done beside them, and blocks begin and end as slowly."""
        p, at_once = problem, resident_clusters(cluster_size(config), gpu)
        seconds = 2 * p.batch * p.m * p.n * p.k / gpu.flops(p.dtype)
        if seconds < _LONG:
            gpu = dataclasses.replace(gpu, shares_sms=False)
        least = config.compute_warpgroups if config.takes_turns else 1
        return Work(p, config, Rounds.of(clusters_of_tiles(p, config), at_once, gpu, least), transposed)

    def own_tiles(self) -> jax.Array:
        """How many output tiles this block has."""
        return self.rounds.of_block(lax.axis_index("block"))[1]


@dataclasses.dataclass(frozen=True)
class Tile:
    """An output tile: the product of the batch, the part of k, and its row and column counted in tiles. All traced int32."""

    batch: jax.Array
    part: jax.Array
    row: Int
    column: Int


def tile_of(work: Work, step: jax.Array) -> Tile:
    """This block's output tile number `step`, or its part of one.

    The blocks of a cluster along m or n take tiles next to each other, of which some may lie beyond the last. Those of a
    cluster along k take one tile, and each its part of k.
    """
    p, c = work.problem, work.config
    rows, columns = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    down, across = neighbours(c)
    rows, columns = math.ceil(rows / down), math.ceil(columns / across)
    # The number of a cluster of tiles: product after product, and within one in the order of `raster`.
    index = step * work.rounds.at_once + work.rounds.of_block(lax.axis_index("block"))[0]
    batch, index = (
        (lax.div(index, jnp.int32(rows * columns)), lax.rem(index, jnp.int32(rows * columns)))
        if p.batch > 1
        else (jnp.int32(0), index)
    )
    row, column = tile_scheduler.raster(index, (rows, columns), 0 if c.raster_dimension == "m" else 1, c.raster_width)
    if down > 1:
        row = row * down + lax.axis_index("cluster")
    if across > 1:
        column = column * across + lax.axis_index("cluster")
    part = jnp.int32(0)
    if c.cluster == "k":
        part = lax.axis_index("cluster")
    elif c.split_k > 1:
        batch, part = lax.div(batch, jnp.int32(c.split_k)), lax.rem(batch, jnp.int32(c.split_k))
    return Tile(batch, part, row, column)


def step_of_k(work: Work, at: Tile, step: jax.Array) -> jax.Array:
    """The number of a tile's step among all steps of k, of which a part of k has some.

    Where all blocks would ask for the same few lines at once (`crowds`), each begins with a step of its own: a tile's order of
    sums is the same in every run. A last tile that begins within the one before has the order of that one, as both store what
    they share.
    """
    p, c = work.problem, work.config
    steps = k_steps(p, c)
    if crowds(p, c):
        a_t, b_t = transposed(p)

        def number(index: Int, width: int, length: int, along: bool) -> Int:
            if not along or tma.last_start(length, width, panel(p, c)) is None:
                return index
            return jnp.minimum(index, jnp.int32(max(0, math.ceil(length / width) - 2)))

        tile = number(at.row, c.tile_m, p.m, a_t) + number(at.column, c.tile_n, p.n, not b_t)
        step = lax.rem(step + _APART * tile, jnp.int32(steps))
    return step + at.part * steps if c.split_k > 1 else step


_APART = 3  # steps between those that neighbours begin with


@dataclasses.dataclass(frozen=True)
class Place:
    """Where this warpgroup's part of the output tile number t begins, and how its epilogue tiles lie in global memory.

    first: row and column of the block's tile. share: of the warpgroup's part in it.
    """

    work: Work
    tile: Tile
    first: tuple[Int, Int]
    share: tuple[Int, Int]

    @staticmethod
    def of(work: Work, t: jax.Array) -> Place:
        """The last tile of a row may begin within the one before (`tma.block_start`); both store the same values there."""
        p, c, tile = work.problem, work.config, tile_of(work, t)
        share = tile_scheduler.warpgroup_origin(c)
        a_t, b_t = transposed(p)
        swizzle = swizzle_bytes(p, c)
        # Where the operand's rows run along m or n, the tile begins where `load`'s block of that operand does.
        first_row = tma.block_start(tile.row, c.tile_m, p.m, p.dtype, swizzle) if a_t else tile.row * c.tile_m
        plain = b_t or columns_of_b(p, c) != c.tile_n
        first_column = tile.column * c.tile_n if plain else tma.block_start(tile.column, c.tile_n, p.n, p.dtype, swizzle)
        return Place(work, tile, (first_row, first_column), share)

    def product(self) -> jax.Array:
        """The number of the product, or of its part."""
        c = self.work.config
        return self.tile.batch if c.cluster == "k" else self.tile.batch * c.split_k + self.tile.part

    def start(self, axis: int, offset: int) -> Int:
        """The row (axis 0) or column at an offset from where this part begins."""
        return self.first[axis] + self.share[axis] + offset

    def rows(self, ref: Any, count: int, column: int = 0, width: int | None = None) -> Any:
        """The first `count` rows of this part in an array like the output, which tiles divide, from a column on.

        Over all of the tile's columns, or `width` of them.
        """
        rows, columns = pl.ds(self.start(0, 0), count), pl.ds(self.start(1, column), width or self.work.config.tile_n)
        return ref.at[(self.product(), rows, columns) if ref.ndim == 3 else (rows, columns)]

    def store(self, staged: Any, ref: Any, i: int, j: int) -> None:
        """Starts the copy of the epilogue tile `staged` in shared memory to row i and column j of this part of the output.

        An epilogue tile may overlap the one before (`tile_origins`): both hold the same values there. The interpreter would
        call that a race, so there the columns that were stored before are left out.
        """
        width = self.work.config.epilogue_tile_n
        before = -j % width if interpreting() else 0
        if before:
            left = pl.ds(before, width - before)
            staged = staged.at[left] if self.work.transposed else staged.at[:, left]
        plgpu.copy_smem_to_gmem(staged, self.block(ref, i, j + before, width - before))

    def copies_to(self, ref: Any) -> Copy:
        """What stores epilogue tiles to this part of `ref`, for `core.epilogue`."""
        return lambda staged, i, j: self.store(staged, ref, i, j)

    def block(self, ref: Any, i: int, j: int, width: int | None = None) -> Any:
        """The epilogue tile that begins at row i and column j of this part, or `width` columns, in an array like the output."""
        c = self.work.config
        rows, columns = pl.ds(self.start(0, i), ROWS), pl.ds(self.start(1, j), width or c.epilogue_tile_n)
        if self.work.transposed:
            rows, columns = columns, rows
        if ends_with_rows(self.work.problem, c):
            return tma.block_anywhere(ref, self.product(), rows, columns)
        return ref.at[(self.product(), rows, columns) if ref.ndim == 3 else (rows, columns)]


def ends_with_rows(p: Problem, c: Config) -> bool:
    """Whether epilogue tiles may begin anywhere.

    So where the last tile along m or n ends with the array (`tma.block_start`), and where the last epilogue tile of a
    warpgroup's part ends with that (`tile_origins`).
    """
    a_t, b_t = transposed(p)
    width = panel(p, c)
    along_m, along_n = tma.last_start(p.m, c.tile_m, width), tma.last_start(p.n, c.tile_n, width)
    b_t |= columns_of_b(p, c) != c.tile_n  # such tiles begin at multiples of tile_n
    overlaps = warpgroup_tile(c)[1] % c.epilogue_tile_n != 0
    return (a_t and along_m is not None) or (not b_t and along_n is not None) or overlaps


def clusters_of_tiles(p: Problem, c: Config) -> int:
    """How many output tiles, or rows or columns of some in clusters along m or n, there are."""
    down, across = neighbours(c)
    return p.batch * math.ceil(math.ceil(p.m / c.tile_m) / down) * math.ceil(math.ceil(p.n / c.tile_n) / across)
