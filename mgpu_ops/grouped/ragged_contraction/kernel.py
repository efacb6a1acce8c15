"""The kernel of ragged_contraction: lhs[m, k]^T rhs[m, n] over the rows of each group, float32 accumulation, for NVIDIA Hopper.

`grouped/kernel.py` has the block, which runs the stages below. The output is [groups, k, n], and the steps of an output tile
are the group's rows, tile_k at a time; an empty group's tiles take none and are stored as zeros. The last step may run over the
group's end: TMA fills those rows of both operands with zeros (`rows.load_rows`). Whatever lies there, in another group or in
padding, cannot reach the sum, not even a NaN.

8-bit floats are stored transposed, lhs[k, m] and rhs[n, m], for wgmma reads them along what is summed over. Their groups begin
at multiples of 128 columns, behind zeros, so that a step is of one group and its loads are plain copies.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler, tma
from mgpu_ops.core.epilogue import Copy, store_tile
from mgpu_ops.core.gemm import warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import Groups, GroupTile, OrderedGroups
from mgpu_ops.core.rows import load_rows, rows_view
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import PANEL, Config, is_dynamic
from mgpu_ops.grouped.kernel import Refs
from mgpu_ops.grouped.ragged_contraction.problem import PADDED, Problem, padded
from mgpu_ops.grouped.sizes import largest_first


@dataclasses.dataclass(frozen=True)
class _Stages:
    """`kernel.Stages` of ragged_contraction. A stage holds the operands in parts, one for each share of the output tile."""

    problem: Problem
    config: Config
    blocks: int
    refs: Refs

    @property
    def rows(self) -> int:
        return self.problem.m

    def of_short_tiles(self) -> None:
        """None: rows are what is summed over."""

    @property
    def most_tiles(self) -> int:
        return most_tiles(self.problem, self.config)

    def groups(self) -> Groups | OrderedGroups:
        """The largest first where tiles are handed out: what is handed out last is short, and blocks end close together."""
        p, refs = self.problem, self.refs
        if refs.order is not None:
            return OrderedGroups(refs.order, p.groups)
        return Groups(refs.sizes, p.m, p.group_offset)

    def tiles(self, size: jax.Array) -> jax.Array:
        return jnp.int32(math.prod(_tiles(self.problem, self.config)))

    def steps(self, tile: GroupTile) -> Any:
        """As many as the group's rows take."""
        return tile_scheduler.cdiv(tile.end - tile.start, self.config.tile_k)

    @property
    def fewest_steps(self) -> int:
        return 0

    @property
    def further_steps(self) -> int:
        return 0

    def position(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """First k and first n of an output tile: the last one of an operand's row may begin within the one before.

        Both store the same values there.
        """
        p, c = self.problem, self.config
        tiles = zip((c.tile_m, c.tile_n), (p.k, p.n), _ends_with_rows(p, c), strict=True)
        rows, columns = _tiles(p, c)
        place = tile_scheduler.strips(tile.number, jnp.int32(rows), columns, c.raster_width)
        row, column = (
            tma.block_start(index, width, length, p.dtype, 128) if ends else index * width
            for index, (width, length, ends) in zip(place, tiles, strict=True)
        )
        return row, column

    @property
    def behind(self) -> int:
        return 0

    def begin_loads(self, tile: GroupTile) -> tuple[Any, ...]:
        return self.position(tile)

    @property
    def heights(self) -> tuple[int, ...]:
        """None: rows are what sums are taken over."""
        return ()

    def load(self, tile: GroupTile, position: tuple[Any, ...], step: jax.Array, rows: int, stage: jax.Array, full: Any) -> None:
        """tile_k of the group's rows of both operands: of lhs the tile's k, of rhs the tile's n."""
        refs = self.refs
        sides = zip(
            (refs.lhs, refs.rhs), (refs.lhs_smem, refs.rhs_smem), _ends_with_rows(self.problem, self.config), strict=True
        )
        for (ref, smem, anywhere), first in zip(sides, position, strict=True):
            _, parts, _, width = smem.shape
            for part in range(parts):
                row, column = tile.start + step * self.config.tile_k, first + part * width
                load_rows(ref, row, tile.end, column, smem.at[stage, part], full, anywhere)

    def load_further(self, *_: Any) -> None:
        """Nothing: no step is `store`'s."""

    def staging(self) -> Any:
        """Of all consumers: `store` takes this one's."""
        return self.refs.out_smem

    def share(self, tile: GroupTile) -> tuple[Any, Any]:
        """Which part of lhs's and of rhs's tile this consumer multiplies."""
        c = self.config
        if c.compute_warpgroups == 1:
            return 0, 0
        wg = lax.axis_index("wg")
        return (wg, 0) if c.wg_dimension == "m" else (0, wg)

    def begin_step(self, tile: GroupTile, step: jax.Array, share: tuple[Any, ...]) -> None:
        """Nothing: sums are all that is stored."""

    def multiply(
        self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...], meanwhile: Callable[[], None] | None = None
    ) -> None:
        (acc,) = accs
        engine.wgmma(acc, *self.operands(stage, share))
        if meanwhile is not None:
            meanwhile()
        engine.wgmma_wait(0)  # the stage is read

    def operands(self, stage: jax.Array, share: tuple[Any, ...]) -> tuple[Any, Any]:
        """What this consumer multiplies of a stage: [its rows, tile_k] and [tile_k, its columns]."""
        lhs_part, rhs_part = share
        return engine.transpose_ref(self.refs.lhs_smem.at[stage, lhs_part]), self.refs.rhs_smem.at[stage, rhs_part]

    def sums(self, accs: tuple[Any, ...]) -> jax.Array:
        """What is rounded and stored, float32."""
        (acc,) = accs
        values: jax.Array = acc[...]
        return values

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: kernel.Read) -> None:
        """The sums, rounded to out_dtype. TMA clips what lies outside the array."""
        copy = self.copy(tile.group, *self.own_position(tile), staging)
        store_tile(self.sums(accs).astype(self.refs.out.dtype), staging.at[lax.axis_index("wg")], copy)

    def own_position(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """First k and first n of this consumer's share of an output tile."""
        first, parts = self.position(tile), self.share(tile)
        row, column = (at + part * width for at, part, width in zip(first, parts, warpgroup_tile(self.config), strict=True))
        return row, column

    def copy(self, group: jax.Array, row: jax.Array, column: jax.Array, staging: Any) -> Copy:
        """What stores the epilogue tiles of a consumer's share that begins there."""
        anywhere = any(_ends_with_rows(self.problem, self.config))
        out, (height, width) = self.refs.out, staging.shape[2:]

        def copy(staged: Any, i: int, j: int) -> None:
            at = group, pl.ds(row + i, height), pl.ds(column + j, width)
            plgpu.copy_smem_to_gmem(staged, tma.block_anywhere(out, *at) if anywhere else out.at[at])

        return copy

    def nothing_held(self) -> kernel.Held:
        return kernel.nothing_held(self.config, self.problem.out_dtype, 3)

    def keep(self, tile: GroupTile, accs: tuple[Any, ...]) -> kernel.Held:
        """What `store` stores; its group, and its first k and first n in units."""
        ends = _ends_with_rows(self.problem, self.config)
        place = map(kernel.in_units, self.own_position(tile), ends)
        return kernel.hold(self.config, self.config, self.sums(accs), self.refs.out.dtype, (tile.group, *place))

    def store_held(self, held: kernel.Held, number: int, staging: Any) -> None:
        group, *place = held.place
        row, column = map(kernel.of_units, place, _ends_with_rows(self.problem, self.config))
        copy = self.copy(group, row, column, staging)
        kernel.store_part(self.config, held, number, staging.at[lax.axis_index("wg")], copy)

    def finish(self, end: jax.Array, staging: Any) -> None:
        """Nothing: rows of no group are in no sum."""


class _TransposedStages(_Stages):
    """Of operands that are stored transposed. A stage holds 128 columns of the output tile's rows of each."""

    def load(self, tile: GroupTile, position: tuple[Any, ...], step: jax.Array, rows: int, stage: jax.Array, full: Any) -> None:
        """Of rows outside an array TMA makes zeros."""
        c, refs = self.config, self.refs
        columns = pl.ds((lax.div(tile.start, jnp.int32(PADDED)) + step) * PADDED, PADDED)  # a multiple, as the compiler sees
        arrays = (refs.lhs, refs.rhs), (refs.lhs_smem, refs.rhs_smem)
        for ref, smem, first, width in zip(*arrays, position, (c.tile_m, c.tile_n), strict=True):
            engine.copy_gmem_to_smem(ref.at[pl.ds(first, width), columns], smem.at[stage], full)

    def operands(self, stage: jax.Array, share: tuple[Any, ...]) -> tuple[Any, Any]:
        sides = zip((self.refs.lhs_smem, self.refs.rhs_smem), share, warpgroup_tile(self.config), strict=True)
        lhs, rhs = (smem.at[stage, pl.ds(part * width, width)] for smem, part, width in sides)
        return lhs, engine.transpose_ref(rhs)

    def sums(self, accs: tuple[Any, ...]) -> jax.Array:
        """Times the scale."""
        values: jax.Array = super().sums(accs) * self.refs.scale[0]
        return values


def _tiles(p: Problem, c: Config) -> tuple[int, int]:
    """Output tiles of a group along k and n."""
    return math.ceil(p.k / c.tile_m), math.ceil(p.n / c.tile_n)


def _ends_with_rows(p: Problem, c: Config) -> tuple[bool, bool]:
    """Whether the last tile of lhs's, and of rhs's, rows ends with them, and so may begin anywhere."""
    if p.transposed:
        return False, False
    sides = zip((p.k, p.n), (c.tile_m, c.tile_n), warpgroup_tile(c), strict=True)
    along_k, along_n = (part > PANEL and tma.last_start(length, tile, PANEL) is not None for length, tile, part in sides)
    return along_k, along_n


def most_tiles(p: Problem, c: Config) -> int:
    """Output tiles of all groups."""
    return p.groups * math.prod(_tiles(p, c))


def launch(
    p: Problem,
    c: Config,
    gpu: Gpu,
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    *scale: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel on lhs, rhs and int32 sizes of any values; stored transposed, also on the scale."""
    blocks = min(gpu.sms, most_tiles(p, c))
    sizes = padded(sizes, p.m) if p.transposed else sizes
    order = (largest_first(sizes, p.m, p.group_offset),) if is_dynamic(c) else ()
    names = ("scale",) * p.transposed + ("order",) * is_dynamic(c)

    def body(*refs: Any, **scratch: Any) -> None:
        sizes, lhs, rhs, *further, out, counter = kernel.counter_last(c, refs)
        refs_of = Refs(sizes, lhs, rhs, out, counter=counter, **dict(zip(names, further, strict=True)), **scratch)
        kernel.run_block((_TransposedStages if p.transposed else _Stages)(p, c, blocks, refs_of), gpu)

    name, shape = "mgpu_ops_ragged_contraction", (p.groups, p.k, p.n)
    out: jax.Array = engine.kernel(
        body,
        engine.Launch(name, {"block": blocks}, warpgroups=c.compute_warpgroups + 1, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((1, *shape) if any(_ends_with_rows(p, c)) else shape, p.out_dtype),
        scratch_types=_scratch_types(p, c),
    )(sizes, *kernel.counter(c), *((lhs, rhs) if p.transposed else map(rows_view, (lhs, rhs))), *scale, *order)
    return out.reshape(shape)


def _scratch_types(p: Problem, c: Config) -> dict[str, Any]:
    """The shared memory of a block: operands in parts, one for each share of the output tile; stored transposed, whole."""
    if p.transposed:
        return kernel.scratch_types(p, c, (c.tile_m, c.tile_k), (c.tile_n, c.tile_k), copies=2)
    wg_m, wg_n = warpgroup_tile(c)
    parts_m, parts_n = c.tile_m // wg_m, c.tile_n // wg_n
    return kernel.scratch_types(p, c, (parts_m, c.tile_k, wg_m), (parts_n, c.tile_k, wg_n), copies=parts_m + parts_n)
