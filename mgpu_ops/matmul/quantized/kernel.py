"""The kernel of quantized_matmul: x (w - zero points) scales, weights of 8 or 4 bits, for NVIDIA Hopper.

Few rows of x take as long as reading the weights does. So the kernel computes out^T = w x^T: wgmma's 64 rows are weights, which
come from registers, where they are made 16-bit floats on the way from shared memory, and its columns are the rows of x.
Integers are exact in 16 bits, also behind a zero point; the product of a group is scaled when it is added to the float32 sum.

Persistent and warp-specialised, as matmul's kernel: a producer warpgroup loads weights, rows of x, scales and zero points with
TMA into the stages of a pipeline, and consumer warpgroups multiply them. They share the tile's columns; or each has a part of
the step's k, or they take whole steps in turn, and the first adds up their sums: then a narrow tile occupies several, which
hide each other's waits. Those that store load the residual of a tile before they multiply, into the epilogue's buffers.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, inflight, tile_scheduler
from mgpu_ops.core.cluster import ClusterSum
from mgpu_ops.core.epilogue import along, if_it_stores, residual_of_tile, store_tile
from mgpu_ops.core.gemm import ROWS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import consumer_registers, resident_clusters
from mgpu_ops.core.pipeline import Barriers, Pipeline
from mgpu_ops.core.rows import load_rows, rows_view
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.core.upcast import load_upcast, order_columns, unit
from mgpu_ops.matmul.quantized.problem import (
    PANEL,
    Config,
    Problem,
    Product,
    bits_of,
    cluster_size,
    clusters_of_tiles,
    epilogue_buffers,
    epilogue_rows,
    helper_registers,
    k_steps,
    names,
    readers,
    stored_panel,
    storing_warpgroups,
    waits_for_each,
    warpgroup_panels,
    warpgroup_rows,
    x_panel,
)


@dataclasses.dataclass(frozen=True)
class Tile:
    """An output tile: its first row of x, its first column of the result, and its first pipeline step of k.

    matrix: the index of its weights and scales where there are several matrices, else ().
    """

    row: jax.Array
    column: jax.Array
    step: Int
    matrix: tuple[jax.Array, ...] = ()


_EARLY = 32  # rows of a tile: up to as many are loaded ahead of the weights that they are multiplied with


@dataclasses.dataclass(frozen=True)
class Block:
    """One block: arrays in global memory, the stages of the pipeline, and what consumers add up in.

    x: a `rows_view`. A block of products of groups replaces `tile`, `row_end` and `store_rows`.

    zero_points, bias, residual: None where there are none. scales: [k / group_size, n], or [columns of all tiles] of which each
      has one scale; so has a bias. residual: as out.
    w_smem: [stages, panels, tile_n, 128 or, of int4, 256]. x_smem: [stages, panels, tile_m, x_panel]. s_smem, z_smem: [stages,
      groups, tile_n]. x_full: barriers of the stages' x, where one more warpgroup puts its columns in order.
    residual_arrived: a barrier of each warpgroup that stores.
    parts: [warpgroups - 1, rows / 64, 64, tile_m] float32, sums of the other warpgroups where they share k.
    wg: the number of a consumer's own warpgroup.
    """

    p: Product
    c: Config
    blocks: int
    x: Any
    w: Any
    scales: Any
    zero_points: Any
    out: Any
    w_smem: Any
    x_smem: Any
    out_smem: Any
    bias: Any = None
    residual: Any = None
    s_smem: Any = None
    z_smem: Any = None
    x_full: Any = None
    parts: Any = None
    parts_arrived: Any = None
    parts_taken: Any = None
    cluster_sum: Any = None
    residual_arrived: Any = None
    wg: Any = 0

    def tile(self, number: jax.Array) -> Tile:
        """This block's output tile. Tiles with the same weights are neighbours, so that they find them in L2."""
        p, c = self.p, self.c
        index = number * self.blocks + lax.axis_index("block")
        rows = jnp.int32(math.ceil(p.m / c.tile_m))
        row, column = lax.rem(index, rows), lax.div(index, rows)
        if c.cluster == "n":
            column = column * 2 + lax.axis_index("cluster")
        step = lax.axis_index("cluster") * k_steps(p, c) if c.cluster == "k" else 0
        return Tile(row * c.tile_m, column * c.tile_n, step)

    # --- Producer

    def load(self, tile: Tile, step: jax.Array, stage: jax.Array, full: Any) -> None:
        """Starts the copies of a step. TMA fills what lies outside an array with zeros."""
        p, c = self.p, self.c
        first = (tile.step + step) * c.tile_k
        columns = pl.ds(tile.column, c.tile_n)
        stored = stored_panel(p)
        if early := self.x_full is not None and c.tile_m <= _EARLY:  # x is put in order while the weights come
            self.load_x(tile, first, stage, self.x_full.at[stage])
        for i in range(c.tile_k // stored):
            src = self.w.at[*tile.matrix, columns, pl.ds(first + i * stored, stored)]
            engine.copy_gmem_to_smem(src, self.w_smem.at[stage, i], full)
        if not early:
            self.load_x(tile, first, stage, full if self.x_full is None else self.x_full.at[stage])
        if p.group_size:
            groups = c.tile_k // p.group_size
            at = *tile.matrix, pl.ds((tile.step + step) * groups, groups), columns
            engine.copy_gmem_to_smem(self.scales.at[at], self.s_smem.at[stage], full)
            if p.zero_points:
                engine.copy_gmem_to_smem(self.zero_points.at[at], self.z_smem.at[stage], full)

    def load_x(self, tile: Tile, first: jax.Array, stage: jax.Array, full: Any) -> None:
        """Starts the copies of the tile's rows of x, from column `first` on; `copies_of_x` of them."""
        smem, width = self.x_smem.at[stage], x_panel(self.p)
        if copies_of_x(self.p, self.c) == 1:
            load_rows(self.x, tile.row, self.row_end(tile), first, smem, full)
            return
        for i in range(smem.shape[0]):
            if self.c.cluster == "n":
                src = self.x.at[0, 0, pl.ds(tile.row, self.c.tile_m), pl.ds(first + i * width, width)]
                engine.copy_gmem_to_smem(src, smem.at[i], full, collective_axes="cluster")
            else:
                load_rows(self.x, tile.row, self.row_end(tile), first + i * width, smem.at[i], full)

    def row_end(self, tile: Tile) -> Int:
        """Where the rows of x that the tile may hold end."""
        return self.p.m

    # --- The warpgroup that puts the columns of x in order

    def order(self, pipeline: Pipeline, steps: Int, first: Int = 0) -> jax.Array:
        """Of so many steps puts the columns of x in the order of a thread's weights, then arrives for x at the stage's barrier.

        first: the stage of the first step. Returns that of the step after the last.
        """
        inflight.has_pipeline(self.x_full, pipeline.empty)

        def order(_: jax.Array, stage: jax.Array) -> jax.Array:
            plgpu.barrier_wait(self.x_full.at[stage])
            order_columns(self.x_smem.at[stage], bits_of(self.p))
            plgpu.commit_smem()  # wgmma sees what was written
            plgpu.barrier_arrive(pipeline.full.at[stage])
            return pipeline.next(stage)

        after: jax.Array = lax.fori_loop(0, steps, order, jnp.int32(first))
        return after

    # --- Consumers

    @property
    def unit(self) -> float:
        """What a weight of 1 is in the tensor cores."""
        return unit(self.p.dtype) if self.c.exchange == "x" else 1.0

    @property
    def row_blocks(self) -> range:
        """First rows of the wgmma of this warpgroup, counted from `first_row`."""
        return range(0, warpgroup_rows(self.c), ROWS)

    @property
    def first_row(self) -> Int:
        """The first weight row of this warpgroup in the tile."""
        return self.wg * warpgroup_rows(self.c) if self.c.wg_dimension == "n" else 0

    @property
    def first_panel(self) -> Int:
        """The first panel of weights of this warpgroup in a step."""
        return self.wg * warpgroup_panels(self.c) if self.c.wg_dimension == "k" else 0

    def zeros_of_columns(self, tile: Tile) -> list[jax.Array]:
        """Zero points of this warpgroup's rows, 64 at a time; none where there are none."""
        if self.zero_points is None:
            return []
        shape, first = (ROWS, PANEL), tile.column + self.first_row
        zeros = [along(_of(tile, self.zero_points), first + row, shape, 0) for row in self.row_blocks]
        return [(zero * jnp.asarray(self.unit, zero.dtype)).astype(self.p.dtype) for zero in zeros]

    def compute(self, accs: tuple[Any, ...], pipeline: Pipeline, number: jax.Array) -> tuple[jax.Array, ...]:
        """The sums of an output tile over this block's part of k, of 64 rows each."""
        steps, first, following = self._own_steps(pipeline, number)
        if not self.p.group_size:
            for acc in accs:
                acc[...] = jnp.zeros(acc.shape, jnp.float32)
            zeros = self.zeros_of_columns(self.tile(number))

            def multiply(_: jax.Array, stage: jax.Array) -> jax.Array:
                pipeline.read_stage(stage, lambda stage: self.multiply(accs, zeros, stage))
                return following(stage)

            lax.fori_loop(0, steps, multiply, first)
            return tuple(acc[...] for acc in accs)

        def add(_: jax.Array, carried: tuple[jax.Array, Any]) -> tuple[jax.Array, Any]:
            stage, sums = carried
            found: list[tuple[jax.Array, ...]] = []
            pipeline.read_stage(stage, lambda stage: found.append(self.multiply_groups(accs, stage, sums)))
            return following(stage), found[0]

        nothing = plgpu.layout_cast(jnp.zeros((ROWS, self.c.tile_m), jnp.float32), plgpu.Layout.WGMMA)
        sums: tuple[jax.Array, ...] = lax.fori_loop(0, steps, add, (first, (nothing,) * len(self.row_blocks)))[1]
        return sums

    def _own_steps(self, pipeline: Pipeline, number: jax.Array) -> tuple[Int, jax.Array, Callable[[jax.Array], jax.Array]]:
        """How many steps of an output tile this warpgroup reads, the stage of the first, and what gives the next of a stage."""
        steps, turns, stages = k_steps(self.p, self.c), self.c.compute_warpgroups, self.c.max_concurrent_steps
        first = number * steps
        if self.c.wg_dimension != "steps":
            return steps, pipeline.first(first), pipeline.next
        skipped = lax.rem(self.wg + turns - lax.rem(first, jnp.int32(turns)), jnp.int32(turns))  # counted over all tiles
        own = lax.div(steps - skipped + turns - 1, jnp.int32(turns))
        return own, pipeline.first(first + skipped), lambda stage: lax.rem(stage + turns, jnp.int32(stages))

    def multiply(self, accs: tuple[Any, ...], zeros: list[jax.Array], stage: jax.Array) -> None:
        """accs += weights x^T for all of this warpgroup's step, without scales; one accumulator for each 64 rows."""
        for number, row in enumerate(self.row_blocks):
            for i in range(warpgroup_panels(self.c)):
                panel = self.first_panel + i
                weights = self._weights(stage, panel, row)
                self._start(accs[number], weights - zeros[number] if zeros else weights, stage, panel, 0)
        engine.wgmma_wait(0)

    def multiply_groups(self, products: tuple[Any, ...], stage: jax.Array, sums: tuple[jax.Array, ...]) -> tuple[Any, ...]:
        """sums + scales * (weights x^T of each group), in float32.

        Two accumulators take groups in turn: the tensor cores multiply one while the last one is scaled and added.
        """
        p, totals = self.p, list(sums)
        units = [
            (number, row, i, first)
            for number, row in enumerate(self.row_blocks)
            for i in range(warpgroup_panels(self.c))
            for first in range(0, PANEL, p.group_size)
        ]
        started = p.group_size // x_panel(p)  # wgmma of a group
        # Scales arrive while the tensor cores multiply.
        scales = [self._of_group(self.s_smem, stage, *unit[1:]).astype(jnp.float32) * (1 / self.unit) for unit in units]
        weights: Any = None

        def add(which: int, in_flight: int) -> None:
            product = engine.accumulated(products[which % 2], in_flight)
            totals[units[which][0]] += product * lax.broadcast_in_dim(scales[which], product.shape, (0,))

        for which, (_, row, i, first) in enumerate(units):
            panel = self.first_panel + i
            if first == 0:
                weights = self._weights(stage, panel, row)
            product = products[which % 2]
            product[...] = jnp.zeros(product.shape, jnp.float32)
            part = weights[:, first : first + p.group_size]
            if p.zero_points:
                zero = self._of_group(self.z_smem, stage, row, i, first).astype(p.dtype) * jnp.asarray(self.unit, p.dtype)
                part -= lax.broadcast_in_dim(zero, part.shape, (0,))
            self._start(product, part, stage, panel, first)
            if which:
                add(which - 1, started)
        add(len(units) - 1, 0)
        return tuple(totals)

    def _weights(self, stage: jax.Array, panel: Int, row: int) -> jax.Array:
        """64 rows of a panel of weights, as 16-bit floats in registers."""
        both = stored_panel(self.p) // PANEL
        ref = self.w_smem.at[stage, _div(panel, both), pl.ds(self.first_row + row, ROWS)]
        return load_upcast(ref, self.p.dtype, _rem(panel, both), ordered=self.c.exchange == "x")

    def _start(self, acc: Any, weights: jax.Array, stage: jax.Array, panel: Int, first: int) -> None:
        """Starts acc += weights x^T, where the weights begin at element `first` of a panel of theirs."""
        width = x_panel(self.p)
        for j in range(weights.shape[1] // width):
            x = self.x_smem.at[stage, panel * (PANEL // width) + first // width + j]
            engine.wgmma(acc, weights[:, j * width : (j + 1) * width], engine.transpose_ref(x))
            if waits_for_each(self.c):
                engine.wgmma_wait(1)  # for ptxas, which lacks registers for more

    def _of_group(self, smem: Any, stage: jax.Array, row: int, panel: int, first: int) -> jax.Array:
        """Scales or zero points of 64 rows, of the group that begins at element `first` of this warpgroup's panel."""
        group = (self.first_panel + panel) * (PANEL // self.p.group_size) + first // self.p.group_size
        ref = smem.at[stage, group, pl.ds(self.first_row + row, ROWS)]
        return plgpu.load(ref, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)

    def load_residual(self, number: jax.Array) -> None:
        """Where this warpgroup stores: starts to load the residual of a tile into the epilogue's buffers, one for each copy."""
        tile, wg, rows = self.tile(number), self.wg if self.c.wg_dimension == "n" else 0, epilogue_rows(self.c)

        def load() -> None:
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffers
            origins = itertools.product(self.row_blocks, range(0, self.c.tile_m, rows))
            for buffer, (column, row) in enumerate(origins):
                src = self._epilogue_tile(self.residual, tile.row + row, tile.column + self.first_row + column)
                engine.copy_gmem_to_smem(src, self.out_smem.at[wg, buffer], self.residual_arrived.at[wg])

        if storing_warpgroups(self.c) < self.c.compute_warpgroups:
            pl.when(self.wg == 0)(lambda: if_it_stores(self.c.cluster, load))
        else:
            if_it_stores(self.c.cluster, load)

    def store(self, number: jax.Array, sums: tuple[jax.Array, ...]) -> None:
        """Adds up the sums of warpgroups and of the cluster where they share k, and stores the tile transposed."""
        tile = self.tile(number)
        if self.c.wg_dimension == "n" or self.c.compute_warpgroups == 1:
            self._store(number, tile, sums)
            return
        wg = lax.axis_index("wg")

        @pl.when(wg > 0)
        def _() -> None:
            @pl.when(number > 0)  # the last tile's parts are read
            def _() -> None:
                plgpu.barrier_wait(self.parts_taken)

            for i, part in enumerate(sums):
                self.parts[wg - 1, i] = part
            plgpu.commit_smem()  # all threads have written
            plgpu.barrier_arrive(self.parts_arrived)

        @pl.when(wg == 0)
        def _() -> None:
            plgpu.barrier_wait(self.parts_arrived)
            totals = list(sums)
            for other in range(self.c.compute_warpgroups - 1):
                totals = [total + self.parts[other, i] for i, total in enumerate(totals)]
            plgpu.barrier_arrive(self.parts_taken)
            self._store(number, tile, tuple(totals))

    def _store(self, number: jax.Array, tile: Tile, sums: tuple[jax.Array, ...]) -> None:
        wg = lax.axis_index("wg") if self.c.wg_dimension == "n" else 0
        if self.residual is not None:
            if_it_stores(self.c.cluster, lambda: plgpu.barrier_wait(self.residual_arrived.at[wg]))
        for i, (row, values) in enumerate(zip(self.row_blocks, sums, strict=True)):
            first = tile.column + self.first_row + row
            staging, added = self.out_smem.at[wg], None
            if self.residual is not None:
                own = epilogue_buffers(self.p, self.c) // len(sums)
                staging, added = self.out_smem.at[wg, pl.ds(i * own, own)], _add_residual

            def copy(staged: Any, _: int, j: int, first: jax.Array = first) -> None:
                self.store_rows(tile, staged, tile.row + j, first)

            def finish(total: jax.Array, first: jax.Array = first, staging: Any = staging, added: Any = added) -> None:
                if not self.p.group_size:
                    total *= along(_of(tile, self.scales), first, total.shape, 0) * (1 / self.unit)
                if self.bias is not None:
                    total += along(self.bias, first, total.shape, 0)
                values = total if added else total.astype(self.p.out_dtype)
                store_tile(values, staging, copy, transpose=True, finish=added)

            if self.cluster_sum is None:
                finish(values)
            else:
                self.cluster_sum.add(values, number * len(sums) + i, finish)

    def store_rows(self, tile: Tile, staged: Any, row: jax.Array, column: jax.Array) -> None:
        """Starts the copy of an epilogue tile from shared memory to the tile's rows of the result."""
        plgpu.copy_smem_to_gmem(staged, self._epilogue_tile(self.out, row, column))

    def _epilogue_tile(self, ref: Any, row: jax.Array, column: jax.Array) -> Any:
        """An epilogue tile in an array like the result."""
        return ref.at[pl.ds(row, epilogue_rows(self.c)), pl.ds(column, ROWS)]


def _add_residual(values: jax.Array, buffer: Any, *_: int) -> jax.Array:
    """An epilogue tile and its residual, which lies in its buffer."""
    return values + residual_of_tile(buffer, transpose=True)


def _of(tile: Tile, ref: Any) -> Any:
    """What a ref has of the tile's matrix."""
    return ref.at[*tile.matrix] if tile.matrix else ref


def _div(x: Int, y: int) -> Int:
    return x // y if isinstance(x, int) else lax.div(x, jnp.int32(y))


def _rem(x: Int, y: int) -> Int:
    return x % y if isinstance(x, int) else lax.rem(x, jnp.int32(y))


def _kernel(p: Problem, c: Config, gpu: Gpu, blocks: int, *refs: Any, accumulators: Any, barriers: Any, **smem: Any) -> None:
    """One block: its output tiles one after the other, each in steps of k."""
    arrays = dict.fromkeys(("zero_points",)) | dict(zip((*names(p), "out"), refs, strict=True))
    engine.describe_from_start()
    block = Block(p, c, blocks, **arrays, **smem)
    pipeline, steps = Pipeline(c.max_concurrent_steps, *barriers), k_steps(p, c)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), blocks)

    def producer() -> None:
        def load(step: jax.Array, _: None) -> None:
            tile, k = block.tile(lax.div(step, jnp.int32(steps))), lax.rem(step, jnp.int32(steps))
            pipeline.fill(step, lambda stage, full: block.load(tile, k, stage, full))

        # For a few steps the compiler would unroll the loop, but the producer has few registers.
        lax.fori_loop(0, engine.opaque(own_tiles * steps), load, None)
        pipeline.drain(own_tiles * steps)  # a block does not end before its last stages are read

    def consumer(*accs: Any) -> None:
        own = dataclasses.replace(block, wg=lax.axis_index("wg"))  # asked for once: it takes a shuffle

        def tile(t: jax.Array, _: None) -> None:
            if p.residual:  # it arrives while the tile is multiplied
                own.load_residual(t)
            own.store(t, own.compute(accs, pipeline, t))

        lax.fori_loop(0, own_tiles, tile, None)
        if block.cluster_sum is not None:  # other blocks' last sums read this block's shared memory, or are sent to it
            stores = lax.axis_index("wg") < storing_warpgroups(c)
            pl.when(jnp.logical_and(own_tiles > 0, stores))(block.cluster_sum.finish)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    ordered = own_tiles * steps if c.exchange == "x" else 0

    def helper() -> None:
        block.order(pipeline, ordered)

    engine.specialize(
        producer,
        lambda: accumulators.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c.compute_warpgroups, c.memory_registers, gpu, helper_registers(c)),
        helper=helper if c.exchange == "x" else None,
        helper_registers=helper_registers(c),
    )


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on the arrays of `names`."""
    named = dict(zip(names(p), arrays, strict=True))
    cluster = cluster_size(c)
    blocks = min(resident_clusters(cluster, gpu), clusters_of_tiles(p, c))
    vectors = ("bias",) if p.group_size else ("scales", "zero_points", "bias")
    for name in (name for name in vectors if name in named):  # read up to the end of the last tile
        named[name] = jnp.pad(named[name], (0, -p.n % c.tile_n))
    named["x"] = rows_view(named["x"])
    run = engine.kernel(
        functools.partial(_kernel, p, c, gpu, blocks),
        engine.Launch(
            "mgpu_ops_quantized_matmul",
            grid={"block": blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + 1 + (c.exchange == "x"),
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((p.m, p.n), p.out_dtype),
        scratch_types=scratch(p, c),
    )
    out: jax.Array = run(*named.values())
    return out


def scratch(p: Product, c: Config) -> dict[str, Any]:
    """The stages of the pipeline and their barriers, accumulators, and what sums and results go through."""
    stages, width, wgs, storing = c.max_concurrent_steps, x_panel(p), c.compute_warpgroups, storing_warpgroups(c)
    stored, row_blocks, epilogue = stored_panel(p), warpgroup_rows(c) // ROWS, epilogue_rows(c)
    of_x, ordered = copies_of_x(p, c), c.exchange == "x"
    copies = c.tile_k // stored_panel(p) + (1 if ordered else of_x) + bool(p.group_size) * (1 + p.zero_points)

    def smem(shape: tuple[int, ...], dtype: str) -> Any:
        transforms = engine.operand_transforms(shape[-1], dtype)
        return plgpu.SMEM(shape, jnp.dtype(dtype), transforms=transforms)

    accumulator = (ROWS, c.tile_m)
    made = {
        "accumulators": engine.Accumulators((accumulator,) * (2 if p.group_size else row_blocks), wgs),
        "w_smem": smem((stages, c.tile_k // stored, c.tile_n, stored), p.w_dtype),
        "x_smem": smem((stages, c.tile_k // width, c.tile_m, width), p.dtype),
        "out_smem": smem((storing, epilogue_buffers(p, c), epilogue, ROWS), p.out_dtype),
        "barriers": _barriers(c, copies),
    }
    if p.residual:
        made["residual_arrived"] = plgpu.Barrier(num_arrivals=epilogue_buffers(p, c), num_barriers=storing)
    if p.group_size:
        shape = (stages, c.tile_k // p.group_size, c.tile_n)
        made["s_smem"] = plgpu.SMEM(shape, jnp.dtype(p.scale_dtype))
        if p.zero_points:
            made["z_smem"] = plgpu.SMEM(shape, jnp.dtype(p.scale_dtype))
    if ordered:
        made["x_full"] = plgpu.Barrier(num_arrivals=of_x, num_barriers=stages)
    if c.wg_dimension != "n" and wgs > 1:
        made["parts"] = smem((wgs - 1, row_blocks, *accumulator), "float32")
        made["parts_arrived"] = plgpu.Barrier(num_arrivals=wgs - 1)
        made["parts_taken"] = plgpu.Barrier(num_arrivals=1)
    if c.cluster == "k":
        made["cluster_sum"] = ClusterSum(accumulator, storing, c.split_k, "cluster")
    return made


def copies_of_x(p: Product, c: Config) -> int:
    """How many copies bring a step's rows of x: one, where swizzle tiles divide the rows and blocks do not share them.

    Each copy takes the producer some 120 clocks: all of its threads arrive at the stage's barrier and wait for each other.
    """
    width = x_panel(p)
    return 1 if p.k % width == 0 and c.cluster != "n" else c.tile_k // width


def _barriers(c: Config, copies: int) -> Barriers:
    """Those of the pipeline. Where two blocks share copies, both must have read a stage before it is filled again."""
    if c.cluster != "n":
        return Pipeline.barriers(c.max_concurrent_steps, copies=copies, consumers=readers(c))
    stages = c.max_concurrent_steps
    empty = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=readers(c), num_barriers=stages)
    return Barriers(full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages), empty=empty)
