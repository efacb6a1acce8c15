"""The kernel of grouped_matmul: rows of group g of lhs[m, k] times rhs[g, k, n], float32 accumulation, for NVIDIA Hopper.

`grouped/kernel.py` has the block, which runs the stages below. An output tile takes ceil(k / tile_k) steps.

A group's tiles begin at its first row, whatever that is, and end at its last. TMA does not write the rows beyond when it
stores (`rows.store_rows`), and when it loads fills a few with zeros; most are not loaded (`heights`). So no tile needs a mask
or a second pass, and no list of tiles is made beforehand. Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas
Mosaic GPU documentation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, fp8, tile_scheduler, tma
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.epilogue import along, deferred_stores, epilogue_origins, store_tile
from mgpu_ops.core.fp8 import BLOCK, SCALES_IN_LINE
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import Groups, GroupTile
from mgpu_ops.core.rows import load_gathered, load_rows, row_places, rows_view, store_rows
from mgpu_ops.core.scaled import Sums, add_scaled
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import Config, defers, heights, panel, short
from mgpu_ops.grouped.grouped_matmul.problem import Problem, by_name, residual_barriers
from mgpu_ops.grouped.kernel import Refs


@dataclasses.dataclass(frozen=True)
class GroupedStages:
    """`kernel.Stages` of grouped_matmul."""

    problem: Problem
    config: Config
    blocks: int
    refs: Refs
    short: bool = False  # whether the stages are those of a short tile

    @property
    def shared(self) -> Config:
        """How the consumers share the tile."""
        return short(self.config) if self.short else self.config

    def of_short_tiles(self) -> GroupedStages | None:
        return dataclasses.replace(self, short=True) if self.config.short_tiles else None

    @property
    def rows(self) -> int:
        return self.problem.m

    @property
    def most_tiles(self) -> int:
        return most_tiles(self.problem, self.config)

    def groups(self) -> Groups:
        """In their own order: all tiles take equally long."""
        full = self.refs.bias is not None and defers(self.config)  # registers: of a tile that is held, its sums, a bias
        return Groups(self.refs.sizes, self.rows, self.problem.group_offset, by_warp=not full)

    def tiles(self, size: jax.Array) -> jax.Array:
        p, c = self.problem, self.config
        return tile_scheduler.cdiv(size, c.tile_m) * math.ceil(p.n / c.tile_n)

    def steps(self, tile: GroupTile) -> int:
        return (1 + self.problem.second) * self.steps_of_one

    @property
    def fewest_steps(self) -> int:
        return (1 + self.problem.second) * self.steps_of_one

    @property
    def further_steps(self) -> int:
        return 0

    @property
    def steps_of_one(self) -> int:
        """Of one product."""
        return math.ceil(self.problem.k / self.config.tile_k)

    def place(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """The first row of an output tile, and its column counted in tiles."""
        p, c = self.problem, self.config
        rows = tile_scheduler.cdiv(tile.end - tile.start, c.tile_m)
        row, column = tile_scheduler.strips(tile.number, rows, math.ceil(p.n / c.tile_n), c.raster_width)
        return tile.start + row * c.tile_m, column

    def position(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """Where operands are loaded: a wide block of rhs that would reach beyond a row comes from where the row ends."""
        row, column = self.place(tile)
        return row, column * self.config.tile_n

    def origin(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """Where the output tile lies.

        The last one of a row may begin within the one before; both store the same values there.
        """
        p, c = self.problem, self.config
        row, column = self.place(tile)
        return row, tma.block_start(column, c.tile_n, p.n, p.dtype, 128) if self.ends_with_rows else column * c.tile_n

    @property
    def ends_with_rows(self) -> bool:
        """Whether the last tile of a row of the output ends with it, and so may begin anywhere."""
        p, c = self.problem, self.config
        return p.layout == "nn" and tma.last_start(p.n, c.tile_n, panel(p.dtype)) is not None

    @property
    def behind(self) -> int:
        return 0 if self.refs.row_indices is None else min(self.config.max_concurrent_steps - 1, 3)

    def begin_loads(self, tile: GroupTile) -> tuple[Any, ...]:
        """The position, and with row indices where the tile's rows of lhs lie."""
        refs, position = self.refs, self.position(tile)
        if refs.row_indices is None:
            return position
        return *position, row_places(refs.row_indices, position[0], tile.end, self.config.tile_m, refs.lhs)

    @property
    def heights(self) -> tuple[int, ...]:
        """Of lhs. What a stage has beyond is what was there: it makes rows of the output that are not stored."""
        return heights(self.config, self.rows, self.problem.groups, self.refs.row_indices is not None)

    def load(self, tile: GroupTile, position: tuple[Any, ...], step: jax.Array, rows: int, stage: jax.Array, full: Any) -> None:
        """tile_k columns of the tile's rows of lhs, and as many of the group's rhs as stored; of two products, one by one."""
        refs = self.refs

        def load_one(lhs: Any, rhs: Any, step: jax.Array) -> None:
            gathers = refs.row_indices is not None
            if not gathers:
                self.load_lhs(lhs, tile, position, step, rows, stage, full)
            self.load_rhs(rhs, refs.rhs_smem, tile, position, step, stage, full)
            if gathers:  # which takes longer to start than TMA's copies
                self.load_lhs(lhs, tile, position, step, rows, stage, full)

        if refs.lhs_scale_smem is not None:
            self.load_scales(tile, position, step, stage, full)
        if refs.lhs2 is None:
            load_one(refs.lhs, refs.rhs, step)
            return
        first = self.steps_of_one
        pl.when(step < first)(lambda: load_one(refs.lhs, refs.rhs, step))
        pl.when(step >= first)(lambda: load_one(refs.lhs2, refs.rhs2, step - first))

    def load_lhs(
        self, lhs: Any, tile: GroupTile, position: Any, step: jax.Array, rows: int, stage: jax.Array, full: Any
    ) -> None:
        """tile_k columns of the tile's rows, in panels of one swizzle row."""
        c, width = self.config, panel(self.problem.dtype)
        if self.refs.row_indices is not None:
            load_gathered(lhs, position[2], step * c.tile_k, self.refs.lhs_smem.at[stage], full, rows)
            return
        for number in range(c.tile_k // width):
            first = step * c.tile_k + number * width
            load_rows(lhs, position[0], tile.end, first, self.refs.lhs_smem.at[stage, number, pl.ds(0, rows)], full)

    def load_rhs(self, rhs: Any, smem: Any, tile: GroupTile, position: Any, step: Any, stage: jax.Array, full: Any) -> None:
        """tile_k x tile_n of the group's matrix, as stored."""
        c = self.config
        ks, ns = pl.ds(step * c.tile_k, c.tile_k), pl.ds(position[1], c.tile_n)
        window = (ks, ns) if self.problem.layout == "nn" else (ns, ks)
        engine.copy_gmem_to_smem(rhs.at[tile.group, *window], smem.at[stage], full)

    def load_scales(self, tile: GroupTile, position: Any, step: jax.Array, stage: jax.Array, full: Any) -> None:
        """Those of the tile's rows, and of the group's matrix one for each 64 of the tile's columns, of each 128 of k.

        TMA begins at multiples of 16 bytes of a row: at those scales or up to three before.
        """
        c, refs = self.config, self.refs
        ks = pl.ds(step * (c.tile_k // BLOCK), c.tile_k // BLOCK)
        row, column = aligned(position[0]), aligned(lax.div(position[1], jnp.int32(ROWS)))
        rows = refs.scale_lhs.at[ks, pl.ds(row, c.tile_m + SCALES_IN_LINE)]
        of_columns = [(scales.at[tile.group, ks, pl.ds(column, SCALES_IN_LINE)], smem) for scales, smem in self.scale_buffers()]
        for scales, smem in ((rows, refs.lhs_scale_smem), *of_columns):
            engine.copy_gmem_to_smem(scales, smem.at[stage], full)

    def load_further(self, tile: GroupTile, position: Any, step: int, rows: int, stage: jax.Array, full: Any) -> None:
        """Nothing: all steps are multiplied."""

    def staging(self) -> Any:
        return self.refs.out_smem.at[lax.axis_index("wg")]

    def share(self, tile: GroupTile) -> tuple[Any, ...]:
        """The first row and column of this consumer within a block's tile; with scales of blocks, also of its scales."""
        row, column = tile_scheduler.warpgroup_origin(self.shared)
        if self.refs.lhs_scale_smem is None:
            return row, column
        first, columns = self.position(tile)
        columns = lax.div(columns, jnp.int32(ROWS))
        of_rows, of_columns = first - aligned(first), columns - aligned(columns)
        return row, column, of_rows + row, of_columns + lax.div(jnp.int32(column), jnp.int32(ROWS))

    def begin_step(self, tile: GroupTile, step: jax.Array, share: tuple[Any, ...]) -> None:
        """Starts to load a residual: it arrives while further steps are multiplied. Bias and scale are read in the end."""
        if self.refs.residual is not None and self.residual_step < self.fewest_steps:
            pl.when(step == self.residual_step)(lambda: self.load_first_of_residual(tile))

    @property
    def residual_step(self) -> int:
        """The step before which the residual begins to be loaded: half of them hide it. Where a tile is held, its stores have
        the epilogue's buffers before; all steps: when they are done.
        """
        steps, tiles = self.fewest_steps, epilogue_tiles(self.config)
        return max(steps // 2, len(deferred_stores(tiles, steps)) if defers(self.config) else 0)

    def load_first_of_residual(self, tile: GroupTile) -> None:
        """Consumer: starts to load a tile's residual, as many epilogue tiles as there are buffers."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffers, long ago
        for number in range(min(self.config.epilogue_slots, epilogue_tiles(self.shared))):
            self.load_residual(tile, number)

    def load_residual(self, tile: GroupTile, number: int) -> None:
        """Consumer: starts to load the residual of epilogue tile `number` of its share into the buffer that this has."""
        row, column = self.first(tile)
        i, j = epilogue_origins(self.shared)[number]
        buffer, arrived = self.residual_slot(number)
        load_rows(self.refs.residual, row + i, tile.end, column + j, buffer, arrived, self.ends_with_rows)

    def residual_slot(self, number: int) -> tuple[Any, Any]:
        """The buffer of epilogue tile `number`, and the barrier on which its residual arrives."""
        wg, slots = lax.axis_index("wg"), self.config.epilogue_slots
        slot = number % slots
        return self.refs.out_smem.at[wg, slot], self.refs.residual_arrived.at[wg * slots + slot]

    def add_residual(self, tile: GroupTile, part: jax.Array, number: int, free: Callable[[], None]) -> jax.Array:
        """Consumer: an epilogue tile and its residual. The next one that has no buffer of its own is loaded before that.

        free: waits until the buffer that is loaded into has been read.
        """
        slots = self.config.epilogue_slots
        following = number + (slots > 1)
        if slots <= following < epilogue_tiles(self.shared):
            free()
            self.load_residual(tile, following)
        buffer, arrived = self.residual_slot(number)
        plgpu.barrier_wait(arrived)
        return part + buffer[...].astype(jnp.float32)

    def first(self, tile: GroupTile) -> tuple[Any, Any]:
        """The first row and column of this consumer's share of an output tile, in the output."""
        (row, column), share = self.origin(tile), tile_scheduler.warpgroup_origin(self.shared)
        return row + share[0], column + share[1]

    def rhs_buffers(self) -> tuple[Any, ...]:
        """The stages of each matrix that is multiplied, as many as there are accumulators."""
        return (self.refs.rhs_smem,)

    def scale_buffers(self) -> tuple[tuple[Any, Any], ...]:
        """With scales of blocks: those of each matrix, and their stages."""
        return ((self.refs.scale_rhs, self.refs.rhs_scale_smem),)

    def multiply(
        self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...], meanwhile: Callable[[], None] | None = None
    ) -> None:
        c, refs = self.config, self.refs
        if refs.lhs_scale_smem is not None:
            self.multiply_scaled(accs, stage, share)
            return
        wg_m, wg_n = warpgroup_tile(self.shared)
        row, column = share
        width = panel(self.problem.dtype)
        # The wgmma of all panels are in flight together; the stage is free when the last has read it.
        for number in range(c.tile_k // width):
            lhs = refs.lhs_smem.at[stage, number, pl.ds(row, wg_m), :] if wg_m < c.tile_m else refs.lhs_smem.at[stage, number]
            ks, ns = pl.ds(number * width, width), pl.ds(column, wg_n)
            for acc, rhs in zip(accs, self.rhs_buffers(), strict=True):
                if self.problem.layout == "nn":
                    engine.wgmma(acc, lhs, rhs.at[stage, ks, ns])
                else:
                    engine.wgmma(acc, lhs, engine.transpose_ref(rhs.at[stage, ns, ks]))
        if meanwhile is not None:
            meanwhile()
        engine.wgmma_wait(0)

    def multiply_scaled(self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...]) -> None:
        """The products of each 128 of k times their scales."""
        self.add_all_products(accs, stage, share)
        engine.wgmma_wait(0)

    def add_all_products(self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...]) -> None:
        """Of all matrices."""
        self.add_products(accs, stage, share, self.refs.rhs_smem, self.refs.rhs_scale_smem)

    def add_products(self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...], rhs_smem: Any, scales: Any) -> None:
        """Of one matrix, the products of each 128 of k times their scales (`core/scaled.py`)."""
        c, refs = self.config, self.refs
        row, column, of_row, of_column = share
        width = warpgroup_tile(c)[1]

        def scale(i: int, j: int, part: int) -> jax.Array:
            of_rows = along(refs.lhs_scale_smem.at[stage, part], of_row + i * ROWS, (ROWS, min(ROWS, width)), 0)
            return of_rows * scales[stage, part, of_column + j]

        def multiply(product: Any, i: int, part: int) -> None:
            lhs = refs.lhs_smem.at[stage, part, pl.ds(row + i * ROWS, ROWS), :]
            rhs = rhs_smem.at[stage, pl.ds(column, width), pl.ds(part * BLOCK, BLOCK)]
            engine.wgmma(product, lhs, engine.transpose_ref(rhs))

        add_scaled(c, accs, multiply, scale)

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: kernel.Read) -> None:
        """row_scale * activation(scales * acc + bias) + residual, rounded to out_dtype, of the rows of the group alone."""
        refs = self.refs
        row, column = self.first(tile)
        origins = epilogue_origins(self.shared)

        def copy(staged: Any, i: int, j: int) -> None:
            store_rows(staged, refs.out, row + i, tile.end, column + j, self.ends_with_rows)

        def finish(values: jax.Array, buffer: Any, i: int, j: int) -> jax.Array:
            values = self.with_epilogue(values, tile.group, row + i, column + j)
            if refs.residual is None:
                return values
            in_flight = max(self.config.epilogue_slots - 2, 0)  # stores after the one from the buffer that comes next
            free = functools.partial(plgpu.wait_smem_to_gmem, in_flight, wait_read_only=True)
            return self.add_residual(tile, values, origins.index((i, j)), free)

        if refs.lhs_scale_smem is not None:  # of sums in several accumulators
            store_tile(Sums.of(self.config, accs), staging, copy, finish=finish)
        elif refs.residual is not None:  # an epilogue tile at a time too: registers do not suffice for all of float32
            store_tile(accs[0][...], staging, copy, finish=finish)
        else:
            values = self.with_epilogue(accs[0][...], tile.group, row, column)
            store_tile(values.astype(refs.out.dtype), staging, copy)

    def nothing_held(self) -> kernel.Held:
        return kernel.nothing_held(self.config, self.problem.out_dtype, 3)

    def keep(self, tile: GroupTile, accs: tuple[Any, ...]) -> kernel.Held:
        """What `store` stores; its first row, its first column in units and the end of its group."""
        row, column = self.first(tile)
        place = row, kernel.in_units(column, self.ends_with_rows), tile.end
        if self.refs.residual is None:
            finished = self.with_epilogue(accs[0][...], tile.group, row, column)
            return kernel.hold(self.config, self.shared, finished, self.refs.out.dtype, place)
        if self.residual_step >= self.fewest_steps:
            self.load_first_of_residual(tile)

        def finish(part: jax.Array, number: int) -> jax.Array:
            i, j = epilogue_origins(self.shared)[number]
            part = self.with_epilogue(part, tile.group, row + i, column + j)
            return self.add_residual(tile, part, number, engine.warpgroup_barrier)  # buffers are read here, none is stored

        return kernel.hold(self.config, self.shared, accs[0][...], self.refs.out.dtype, place, finish)

    def store_held(self, held: kernel.Held, number: int, staging: Any) -> None:
        row, units, end = held.place
        column = kernel.of_units(units, self.ends_with_rows)

        def copy(staged: Any, i: int, j: int) -> None:
            store_rows(staged, self.refs.out, row + i, end, column + j, self.ends_with_rows)

        kernel.store_part(self.config, held, number, staging, copy)

    def with_epilogue(self, values: jax.Array, group: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        """row_scale * activation(scales * values + bias) in float32; scales of blocks are in the values."""
        values = self.activated(self.scaled(values, self.refs.scale_rhs, group, row, column), group, column)
        if self.refs.row_scale is not None:
            values *= kernel.of_rows(self.refs.row_scale, row, values.shape)
        return values

    def scaled(self, values: jax.Array, scale: Any, group: jax.Array, row: jax.Array, column: jax.Array) -> jax.Array:
        """values * scales of operands, or of rows and columns; `scale` has those of the matrices."""
        refs = self.refs
        if self.problem.scales == "tensor":
            values *= refs.scale_lhs[0] * scale[group]
        if self.problem.scales == "row":
            values *= along(refs.scale_lhs, row, values.shape, 0)
            values *= along(scale.at[group], column, values.shape, 1)
        return values

    def activated(self, values: jax.Array, group: jax.Array, column: jax.Array) -> jax.Array:
        """activation(values + bias) in float32."""
        if self.refs.bias is not None:
            values += along(self.refs.bias.at[group], column, values.shape, 1)
        return in_registers(self.problem.activation, values)

    def finish(self, end: jax.Array, staging: Any) -> None:
        """Stores zeros to the rows of no group, those from `end` on and of a shard those before its first group.

        They are stored in epilogue tiles, of which each consumer of each block has its share. All come from one buffer, so that
        no store waits for another.
        """
        p = self.problem
        stores = [self.zeros_to(out, end, p.m, staging) for out in self.outs()]
        if p.group_offset:
            stores += [self.zeros_to(out, 0, jnp.clip(self.refs.sizes[0], 0, p.m), staging) for out in self.outs()]
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffer
        staging[0] = jnp.zeros(staging.shape[1:], staging.dtype)
        plgpu.commit_smem()
        for store in stores:
            store()

    def outs(self) -> tuple[Any, ...]:
        """What is stored."""
        return (self.refs.out,)

    def zeros_to(self, out: Any, start: Any, end: Any, staging: Any) -> Callable[[], None]:
        """What stores this consumer's share of the rows from `start` to `end`, from the first buffer, which is zeros then."""
        return kernel.zeros_to(out, start, end, staging, self.blocks, self.config.compute_warpgroups)


def aligned(index: jax.Array) -> jax.Array:
    """The last multiple of four up to an index: where TMA can begin to copy float32 numbers."""
    return lax.div(index, jnp.int32(4)) * 4


def most_tiles(p: Any, c: Config) -> int:
    """At least as many as there are output tiles, whatever the sizes are: each group's last tile may be a part of one."""
    return (p.groups + math.ceil(p.m / c.tile_m)) * math.ceil(p.n / c.tile_n)


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on lhs, rhs as stored, int32 sizes of any values (with an offset, as `sizes.of_shard` gives them) and,
    where the problem has them, lhs and rhs of a second product, scales, a bias [groups, n], a row scale [m], a residual [m, n]
    and row indices [m].
    """
    lhs, rhs, sizes, *rest = arrays
    extra = by_name(p, rest)
    extra |= padded_scales(p, c, extra)
    if p.bias:
        extra["bias"] = jnp.pad(extra["bias"], ((0, 0), (0, -p.n % c.tile_n)))
    if p.second:
        extra["lhs2"] = rows_view(extra["lhs2"])
    if p.residual:
        extra["residual"] = rows_view(extra["residual"])
    blocks = min(gpu.sms, most_tiles(p, c))

    def body(*refs: Any, **scratch: Any) -> None:
        sizes, lhs, rhs, *further, out, counter = kernel.counter_last(c, refs)
        refs_of = Refs(sizes, lhs, rhs, out, counter=counter, **by_name(p, further), **scratch)
        kernel.run_block(GroupedStages(p, c, blocks, refs_of), gpu)

    width = panel(p.dtype)
    panels = c.tile_k // width
    copies = (1 if p.lhs_rows else panels) + 1 + 2 * (p.scales == "block")
    rhs_tile = (c.tile_k, c.tile_n) if p.layout == "nn" else (c.tile_n, c.tile_k)
    scratch = kernel.scratch_types(p, c, (panels, c.tile_m, width), rhs_tile, copies) | of_blocks(p, c)
    if p.residual:
        scratch["residual_arrived"] = plgpu.Barrier(num_arrivals=1, num_barriers=residual_barriers(p, c))
    out = engine.kernel(
        body,
        engine.Launch("mgpu_ops_grouped_matmul", {"block": blocks}, warpgroups=c.compute_warpgroups + 1, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype),
        scratch_types=scratch,
    )(sizes, *kernel.counter(c), rows_view(lhs), rhs, *extra.values())
    return out.reshape(p.m, p.n)


def of_blocks(p: Problem, c: Config) -> dict[str, Any]:
    """What scales of blocks change of `kernel.scratch_types`: the sums, and stages of their own."""
    if p.scales != "block":
        return {}
    stages, parts = c.max_concurrent_steps, c.tile_k // BLOCK
    return {
        "accumulator": engine.Accumulators(fp8.accumulators(c, p.scales), c.compute_warpgroups),
        "lhs_scale_smem": plgpu.SMEM((stages, parts, c.tile_m + SCALES_IN_LINE), jnp.float32),
        "rhs_scale_smem": plgpu.SMEM((stages, parts, SCALES_IN_LINE), jnp.float32),
    }


def padded_scales(p: Any, c: Config, extra: dict[str, Any]) -> dict[str, Any]:
    """The scales as the kernel reads them, up to the end of the last tile.

    Those of blocks: scale_lhs [k / 128, m and more], and scale_rhs [groups, k / 128, n / 64 and more], each twice.
    """
    if p.scales not in ("row", "block"):
        return {}
    lhs, rhs = extra["scale_lhs"], extra["scale_rhs"]
    if p.scales == "row":
        return {"scale_lhs": jnp.pad(lhs, (0, c.tile_m)), "scale_rhs": jnp.pad(rhs, ((0, 0), (0, -p.n % c.tile_n)))}
    parts = lhs.shape[1]
    more = -parts % (c.tile_k // BLOCK)  # of k
    lhs = jnp.pad(lhs.T, ((0, more), (0, c.tile_m + SCALES_IN_LINE + -p.m % 4)))  # rows of 16 bytes
    rhs = jnp.repeat(rhs.mT, BLOCK // ROWS, 2)
    return {"scale_lhs": lhs, "scale_rhs": jnp.pad(rhs, ((0, 0), (0, more), (0, SCALES_IN_LINE + -rhs.shape[2] % 4)))}
