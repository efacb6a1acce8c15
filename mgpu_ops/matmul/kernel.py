"""The kernel of matmul: out[m, n] = sum_k A[m, k] B[k, n], float32 accumulation, for NVIDIA Hopper.

Persistent and warp-specialised: an SM runs one block, which computes output tiles one after the other; blocks form clusters.
A producer warpgroup loads tiles of A and B with TMA into a pipeline of shared-memory stages. One or two consumer warpgroups
multiply them with wgmma and store the output tile. Producer and consumers run at the same time. The pipeline counts its steps
over all output tiles of the block: while consumers store one tile, the producer loads the first stages of the next.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
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

from mgpu_ops.core import engine, tile_scheduler, tma
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.cluster import ClusterSum
from mgpu_ops.core.epilogue import along, store_tile, tile_origins
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import resident_clusters
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.epilogue import by_name, ranks, with_epilogue
from mgpu_ops.matmul.problem import (
    BLOCK,
    SCALES_IN_LINE,
    Config,
    Problem,
    accumulators,
    as_computed,
    cluster_size,
    computes_transposed,
    consumer_registers,
    dtype_of_b,
    has_epilogue,
    k_steps,
    panel,
    partial_problem,
    products,
    steps_in_all,
    storage,
    swizzle_bytes,
    transposed,
)


@dataclasses.dataclass(frozen=True)
class Work:
    """What a launch computes, and by how many blocks or, where config.cluster is not "none", clusters.

    Problem and config are those of `as_computed`. transposed: tiles are of out^T, and are transposed again when stored.
    """

    problem: Problem
    config: Config
    blocks: int
    transposed: bool


@dataclasses.dataclass(frozen=True)
class _Refs:
    """Arrays in global memory, as the product `as_computed` has them. All but a, b and out: None where there is none.

    A bias, and a scale of rows or columns, is as long as its side of all tiles; residual has the shape of out. scale_a and
    scale_b are those of the call, also where A and B have changed places; those of blocks are as `_load_scales` says.
    """

    a: Any
    b: Any
    out: Any
    scale_a: Any = None
    scale_b: Any = None
    bias: Any = None
    residual: Any = None


@dataclasses.dataclass(frozen=True)
class Tile:
    """An output tile: the product of the batch, the part of k, and its row and column counted in tiles. All traced int32."""

    batch: jax.Array
    part: jax.Array
    row: Int
    column: Int


def _tile(work: Work, step: jax.Array) -> Tile:
    """This block's output tile number `step`, or its part of one.

    The two blocks of a cluster along m or n take tiles next to each other. Those of a cluster along k take one tile, and each
    its part of k.
    """
    p, c = work.problem, work.config
    rows, columns = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    rows //= 2 if c.cluster == "m" else 1
    columns //= 2 if c.cluster == "n" else 1
    # The number of a cluster of tiles: product after product, and within one in the order of `raster`.
    index = step * work.blocks + lax.axis_index("block")
    batch, index = (
        (lax.div(index, jnp.int32(rows * columns)), lax.rem(index, jnp.int32(rows * columns)))
        if p.batch > 1
        else (jnp.int32(0), index)
    )
    row, column = tile_scheduler.raster(index, (rows, columns), 0 if c.raster_dimension == "m" else 1, c.raster_width)
    if c.cluster == "m":
        row = row * 2 + lax.axis_index("cluster")
    if c.cluster == "n":
        column = column * 2 + lax.axis_index("cluster")
    part = jnp.int32(0)
    if c.cluster == "k":
        part = lax.axis_index("cluster")
    elif c.split_k > 1:
        batch, part = lax.div(batch, jnp.int32(c.split_k)), lax.rem(batch, jnp.int32(c.split_k))
    return Tile(batch, part, row, column)


def load(work: Work, a_ref: Any, *b_refs: Any) -> list[Any]:
    """Producer: what step (tile, k) loads, a tile of A and one of each B in the layout that they are stored in.

    TMA fills what lies outside an array with zeros, so ragged m, n and k need no masks. The blocks of a cluster
    along m or n need the same tile of one operand: each loads half of it and multicasts that half to both.
    """
    p, c = work.problem, work.config
    a_t, b_t = transposed(p)
    swizzle = swizzle_bytes(p, c)

    def spec(ref: Any, tile: tuple[int, int], index: Callable[[Tile, jax.Array], tuple[Int, Int]], shared: bool) -> Any:
        batched = ref.ndim == 3

        def where(t: jax.Array, k: jax.Array) -> tuple[Int, ...]:
            at = _tile(work, t)
            return ((at.batch,) if batched else ()) + index(at, _step_of_k(work, at, k))

        return plgpu.BlockSpec(
            (None, *tile) if batched else tile,
            where,
            transforms=engine.operand_transforms(tile[1], ref.dtype, swizzle),
            memory_space=plgpu.SMEM,
            collective_axes=("cluster",) if shared else (),
        )

    def a_index(at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k = _block_of_part(work, k, 0)
        return (k, at.row) if a_t else (at.row, k)

    def b_index(at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k = _block_of_part(work, k, 1)
        return (at.column, k) if b_t else (k, at.column)

    a_tile, b_tile = _operand_tiles(p, c)
    return [
        spec(a_ref, a_tile, a_index, shared=c.cluster == "n"),
        *(spec(b_ref, b_tile, b_index, shared=c.cluster == "m") for b_ref in b_refs),
    ]


def _step_of_k(work: Work, at: Tile, step: jax.Array) -> jax.Array:
    """The number of a tile's step among all steps of k, of which a part of k has some."""
    return step + at.part * k_steps(work.problem, work.config) if work.config.split_k > 1 else step


def _block_of_part(work: Work, step: jax.Array, side: int) -> jax.Array:
    """The block along k of A (side 0) or B that a step among all of k loads: step, but where there are parts of float32.

    These lie one after the other along k. Surplus steps load a part that there is not, and so zeros.
    """
    p, pairs = work.problem, products(work.problem)
    if len(pairs) == 1:
        return step
    if work.transposed:  # A and B have changed places
        side = 1 - side
    blocks = jnp.int32(steps_in_all(p, work.config) // len(pairs))
    number = jnp.minimum(lax.div(step, blocks), 15)
    part = lax.shift_right_arithmetic(jnp.int32(algorithms.packed(pairs, side)), 2 * number) & 3
    return part * blocks + lax.rem(step, blocks)


def _drop_what_is_not_finite(work: Work, acc: Any, at: Tile, k: jax.Array) -> None:
    """Consumer, after step k of a tile: where all products but the last are added up, takes 0 for sums that are not finite.

    The last products, of the parts with the leading bits, are the same infinities and NaNs; these ones may have others, as of
    infinity times a part that is zero.
    """
    p, c = work.problem, work.config
    pairs, steps = products(p), k_steps(p, c)
    end, step = steps_in_all(p, c) // len(pairs) * (len(pairs) - 1), _step_of_k(work, at, k)
    is_end = step == end - 1
    if c.split_k > 1:
        is_end |= (step < end) & (k == steps - 1)
    pl.when(is_end)(lambda: _keep_finite(acc))


def _keep_finite(acc: Any) -> None:
    sums = acc[...]
    acc[...] = jnp.where(jnp.abs(sums) < jnp.inf, sums, 0.0)


def _operand_tiles(p: Problem, c: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles of A and B of a pipeline step, as they are stored."""
    a_t, b_t = transposed(p)
    return (c.tile_k, c.tile_m) if a_t else (c.tile_m, c.tile_k), (c.tile_n, c.tile_k) if b_t else (c.tile_k, c.tile_n)


def _load_scales(work: Work, scale_a: Any, scale_b: Any) -> list[Any]:
    """Producer: the scales that step (tile, k) loads, of A's rows and of each 64 columns of B.

    scale_a: [..., k / 128, tiles, rows of a tile and what fills up 128 bytes]. scale_b: [..., n / 64, k / 128, 32], all 32 the
    same: TMA writes to multiples of 128 bytes of shared memory.
    """
    c, parts = work.config, work.config.tile_k // BLOCK
    columns = c.tile_m if work.transposed else c.tile_n  # of the output's tile

    def spec(ref: Any, block: tuple[int | None, ...], index: Callable[[Tile, Int], tuple[Int, ...]]) -> Any:
        lead = (None,) * (ref.ndim - 3)

        def where(t: jax.Array, k: jax.Array) -> tuple[Int, ...]:
            at = _tile(work, t)
            return (*(at.batch for _ in lead), *index(at, _step_of_k(work, at, k)))

        return plgpu.BlockSpec((*lead, *block), where, memory_space=plgpu.SMEM)

    def of_a(at: Tile, k: Int) -> tuple[Int, ...]:
        return k, at.column if work.transposed else at.row, 0

    def of_b(at: Tile, k: Int) -> tuple[Int, ...]:
        return at.row if work.transposed else at.column, k, 0

    return [
        spec(scale_a, (parts, None, scale_a.shape[-1]), of_a),
        spec(scale_b, (columns // ROWS, parts, scale_b.shape[-1]), of_b),
    ]


def _add_scaled(work: Work, accs: tuple[Any, ...], a_smem: Any, b_smem: Any, a_scales: Any, b_scales: Any) -> None:
    """Consumer: sums += scales * (A tile @ B tile) in float32, for products of 64 rows and 128 of k at a time.

    accs: the `_Sums`, then accumulators that products take in turn. While a product is added, the tensor cores compute the next
    one, if there are two accumulators for them, or that of the other warpgroup.
    """
    c, sums = work.config, _Sums.of(work, accs)
    products = accs[len(sums.accs) :]
    rows, columns = (1, 0) if work.transposed else (0, 1)  # the axes of the tile along the output's rows and columns
    share, shape = tile_scheduler.warpgroup_origin(c), products[0].shape
    units = [(i, part) for i in range(sums.rows) for part in range(c.tile_k // BLOCK)]
    size = min(ROWS, shape[1])

    def scale(i: int, j: int, part: int) -> jax.Array:
        start = [share[0] + i * ROWS, share[1] + j * size]
        of_rows = along(a_scales.at[part], start[rows], (ROWS, size), rows)
        return of_rows * b_scales[start[columns] // ROWS, part, 0]

    def start(unit: int) -> None:
        i, part = units[unit]
        k = pl.ds(part * BLOCK, BLOCK)
        product = products[unit % len(products)]
        product[...] = jnp.zeros(shape, jnp.float32)
        b = b_smem.at[pl.ds(share[1], shape[1]), k]
        engine.wgmma(product, a_smem.at[pl.ds(share[0] + i * ROWS, ROWS), k], engine.transpose_ref(b))

    # The scales arrive while the tensor cores multiply.
    scales = [[scale(i, j, part) for j in range(sums.columns)] for i, part in units]
    for unit in range(len(products)):
        start(unit)
    for unit, (i, _) in enumerate(units):
        left = min(len(units) - 1 - unit, len(products) - 1)
        value = engine.accumulated(products[unit % len(products)], left)
        for j in range(sums.columns):
            acc = sums.accs[i * sums.columns + j]
            acc[...] = engine.accumulated(acc, left) + value[:, j * size : (j + 1) * size] * scales[unit][j]
        if unit + len(products) < len(units):
            start(unit + len(products))


@dataclasses.dataclass(frozen=True)
class _Sums:
    """A warpgroup's part of the output tile as accumulators of 64 x 64, each with one scale of B: what `store_tile` reads."""

    accs: tuple[Any, ...]
    rows: int
    columns: int
    dtype: Any = jnp.float32

    @staticmethod
    def of(work: Work, accs: tuple[Any, ...]) -> _Sums:
        rows, columns = warpgroup_tile(work.config)
        rows, columns = rows // ROWS, max(1, columns // ROWS)
        return _Sums(accs[: rows * columns], rows, columns)

    @property
    def shape(self) -> tuple[int, int]:
        rows, columns = self.accs[0].shape
        return self.rows * rows, self.columns * columns

    def astype(self, dtype: Any) -> _Sums:
        return dataclasses.replace(self, dtype=dtype)

    def __getitem__(self, at: tuple[slice, slice]) -> jax.Array:
        rows, columns = at
        i, j = rows.start // ROWS, columns.start // ROWS
        start = columns.start - j * ROWS
        values: jax.Array = self.accs[i * self.columns + j][...]
        width = columns.stop - columns.start
        return (values if width == values.shape[1] else values[:, start : start + width]).astype(self.dtype)


def multiply(p: Problem, c: Config, acc: Any, a_smem: Any, b_smem: Any) -> None:
    """Consumer: starts acc += A tile @ B tile, for this warpgroup's rows or columns of the output tile."""
    a_t, b_t = transposed(p)
    wg_m, wg_n = warpgroup_tile(c)
    row, column = tile_scheduler.warpgroup_origin(c)
    if wg_m < c.tile_m:
        a_smem = a_smem.at[:, pl.ds(row, wg_m)] if a_t else a_smem.at[pl.ds(row, wg_m), :]
    if wg_n < c.tile_n:
        b_smem = b_smem.at[pl.ds(column, wg_n), :] if b_t else b_smem.at[:, pl.ds(column, wg_n)]
    engine.wgmma(
        acc,
        engine.transpose_ref(a_smem) if a_t else a_smem,
        engine.transpose_ref(b_smem) if b_t else b_smem,
    )


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
        p, c, tile = work.problem, work.config, _tile(work, t)
        share = tile_scheduler.warpgroup_origin(c)
        a_t, b_t = transposed(p)
        swizzle = swizzle_bytes(p, c)
        # Where the operand's rows run along m or n, the tile begins where `load`'s block of that operand does.
        first_row = tma.block_start(tile.row, c.tile_m, p.m, p.dtype, swizzle) if a_t else tile.row * c.tile_m
        first_column = tile.column * c.tile_n if b_t else tma.block_start(tile.column, c.tile_n, p.n, p.dtype, swizzle)
        return Place(work, tile, (first_row, first_column), share)

    def product(self) -> jax.Array:
        """The number of the product, or of its part."""
        c = self.work.config
        return self.tile.batch if c.cluster == "k" else self.tile.batch * c.split_k + self.tile.part

    def start(self, axis: int, offset: int) -> Int:
        """The row (axis 0) or column at an offset from where this part begins."""
        return self.first[axis] + self.share[axis] + offset

    def block(self, ref: Any, i: int, j: int) -> Any:
        """The epilogue tile that begins at row i and column j of this part, in an array like the output."""
        c = self.work.config
        rows, columns = pl.ds(self.start(0, i), ROWS), pl.ds(self.start(1, j), c.epilogue_tile_n)
        if self.work.transposed:
            rows, columns = columns, rows
        if ends_with_rows(self.work.problem, c):
            return tma.block_anywhere(ref, self.product(), rows, columns)
        return ref.at[(self.product(), rows, columns) if ref.ndim == 3 else (rows, columns)]


def _load_residual(work: Work, t: jax.Array, refs: _Refs, out_smem: Any, arrived: Any) -> None:
    """Consumer: starts to load the residual of tile t into the epilogue's buffers, one for each epilogue tile."""
    place, wg = Place.of(work, t), lax.axis_index("wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffers, long ago
    for number, (i, j) in enumerate(epilogue_origins(work.config)):
        engine.copy_gmem_to_smem(place.block(refs.residual, i, j), out_smem.at[wg, number], arrived.at[wg])


def epilogue_origins(c: Config) -> list[tuple[int, int]]:
    """`tile_origins` of a warpgroup's part of the output tile."""
    return tile_origins(warpgroup_tile(c), ROWS, c.epilogue_tile_n)


def _finish(work: Work, refs: _Refs, place: Place, values: jax.Array, buffer: Any, at: tuple[int, int]) -> jax.Array:
    """Consumer: the epilogue of an epilogue tile at (row, column) `at`, in float32; the residual lies in its buffer."""
    rows, columns = (1, 0) if work.transposed else (0, 1)  # the axes of `values` along the output's rows and columns

    def vector(ref: Any, axis: int) -> jax.Array:
        return along(_of_product(ref, place), place.start(axis, at[axis]), values.shape, axis)

    if work.problem.scales == "tensor":
        scale_a, scale_b = (_of_product(ref, place)[0] for ref in (refs.scale_a, refs.scale_b))
        values *= scale_a * scale_b
    if work.problem.scales == "row":
        values *= vector(refs.scale_a, rows)
        values *= vector(refs.scale_b, columns)
    if refs.bias is not None:
        values += vector(refs.bias, columns)
    values = in_registers(work.problem.activation, values)
    if refs.residual is not None:
        if work.transposed:
            residual = plgpu.load(engine.transpose_ref(buffer), layout=plgpu.Layout.WGMMA_TRANSPOSED)
            residual = plgpu.layout_cast(residual, plgpu.Layout.WGMMA)
        else:
            residual = buffer[...]
        values += residual.astype(jnp.float32)
    return values


def _of_product(ref: Any, place: Place) -> Any:
    """The vector of this product, of those of a batch or of one that all share."""
    return ref.at[place.product()] if ref.ndim == 2 else ref


def _store(
    work: Work,
    t: jax.Array,
    acc: Any,
    refs: _Refs,
    *,
    out_smem: Any,
    cluster_sum: Any = None,
    residual_arrived: Any = None,
) -> None:
    """Consumer: rounds what the epilogue makes of the accumulator of tile number t to the output's dtype and stores it.

    TMA clips what lies outside the array. In a cluster along k the first block stores the sum of all blocks' accumulators.
    """
    p, c, place = work.problem, work.config, Place.of(work, t)

    def copy(staged: Any, i: int, j: int) -> None:
        plgpu.copy_smem_to_gmem(staged, place.block(refs.out, i, j))

    def finish(part: jax.Array, buffer: Any, i: int, j: int) -> jax.Array:
        return _finish(work, refs, place, part, buffer, (i, j))

    # The cluster's accumulators are added up an epilogue tile at a time: there is room for one of each block.
    def add(part: jax.Array, number: int, store: Callable[[jax.Array], None]) -> None:
        cluster_sum.add(part, t * epilogue_tiles(c) + number, store)

    if refs.residual is not None:
        _if_it_stores(c, lambda: plgpu.barrier_wait(residual_arrived.at[lax.axis_index("wg")]))
    wide = cluster_sum is not None or has_epilogue(p)
    values = acc if isinstance(acc, _Sums) else acc[...]
    store_tile(
        values.astype(jnp.float32 if wide else refs.out.dtype),
        out_smem.at[lax.axis_index("wg")],
        copy,
        transpose=work.transposed,
        add=None if cluster_sum is None else add,
        finish=finish if has_epilogue(p) else None,
    )


def _if_it_stores(c: Config, then: Callable[[], None]) -> None:
    """Runs `then` in the blocks that store output tiles: of a cluster along k, the first."""
    if c.cluster == "k":
        pl.when(lax.axis_index("cluster") == 0)(then)
    else:
        then()


def _kernel(
    work: Work, *refs: Any, accumulator: Any, out_smem: Any, cluster_sum: Any = None, residual_arrived: Any = None
) -> None:
    """One block: a pipeline over (its output tiles) x (steps of k), with a store after the last step of each tile."""
    p, c = work.problem, work.config
    of = _refs(p, *refs)
    epilogue = {"out_smem": out_smem, "cluster_sum": cluster_sum, "residual_arrived": residual_arrived}
    scales = (of.scale_a, of.scale_b) if p.scales == "block" else ()
    steps = k_steps(p, c)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)

    # Consumers run `step` when the stage is full, and declare it empty after it. The producer meanwhile loads up to
    # `max_concurrent_steps` steps ahead, also over the end of an output tile.
    def step(indices: tuple[jax.Array, jax.Array], a_smem: Any, b_smem: Any, *rest: Any) -> Any:
        (t, k), (*scale_smem, accs) = indices, rest
        if p.residual:  # it arrives while the second half of k is multiplied

            @pl.when(k == steps // 2)
            def _() -> None:
                _if_it_stores(c, lambda: _load_residual(work, t, of, out_smem, residual_arrived))

        if scale_smem:
            _add_scaled(work, accs, a_smem, b_smem, *scale_smem)
        else:
            multiply(p, c, accs[0], a_smem, b_smem)
        engine.wgmma_wait(0)  # the stage may be refilled when the step is done, so no wgmma may still read it
        if len(products(p)) > 1:
            _drop_what_is_not_finite(work, accs[0], _tile(work, t), k)

        # After the last step of k the sum is complete. Its copies to global memory run on under the next tile's steps.
        @pl.when(k == steps - 1)
        def _() -> None:
            sums = _Sums.of(work, accs) if scale_smem else None
            _store(work, t, sums or accs[0], of, **epilogue)
            for acc in sums.accs if sums else accs:
                acc[...] = jnp.zeros(acc.shape, acc.dtype)

        return accs

    # Only consumers have accumulators: their registers live around the whole loop.
    def consumer(pipeline: Any) -> None:
        accumulator.scope(lambda *accs: (pipeline(accs), None)[1])
        if cluster_sum is not None:  # other blocks' last sums read this block's shared memory, or are sent to it
            pl.when(own_tiles > 0)(cluster_sum.finish)

    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(own_tiles, steps),
        in_specs=[*load(work, of.a, of.b), *(_load_scales(work, *scales) if scales else ())],
        max_concurrent_steps=c.max_concurrent_steps,
        num_compute_wgs=c.compute_warpgroups,
        memory_registers=c.memory_registers,
        wg_axis="wg",
        compute_context=consumer,
    )(of.a, of.b, *scales)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends


def _kernel_in_turn(
    work: Work, gpu: Gpu, *refs: Any, accumulator: Any, operands: tuple[Any, Any], barriers: Any, **smem: Any
) -> None:
    """One block whose consumers compute its output tiles in turn: while one stores a tile, the other multiplies the next.

    Both read one pipeline, in which the steps of a tile lie together. So the next tile's multiplication begins when the last
    one's ends, without another barrier, and stages that one consumer has read are filled for the other.
    """
    p, c = work.problem, work.config
    of, steps = _refs(p, *refs), k_steps(p, c)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)
    pipeline, turns = Pipeline(c.max_concurrent_steps, *barriers), c.compute_warpgroups

    def producer() -> None:
        specs = list(zip(load(work, of.a, of.b), (of.a, of.b), operands, strict=True))

        def load_tile(t: jax.Array, _: None) -> None:
            its_pipeline = pipeline.of_consumer(lax.rem(t, jnp.int32(turns)))

            def load_step(k: jax.Array, _: None) -> None:
                def copy(stage: jax.Array, full: Any) -> None:
                    for spec, ref, smem in specs:
                        engine.copy_block(spec, ref, (t, k), smem.at[stage], full)

                its_pipeline.fill(t * steps + k, copy)

            lax.fori_loop(0, steps, load_step, None)

        lax.fori_loop(0, own_tiles, load_tile, None)
        pipeline.drain(own_tiles * steps)  # a block does not end before its last stages are read

    def consumer(acc: Any) -> None:
        wg = lax.axis_index("wg")
        own_pipeline = pipeline.of_consumer(wg)

        def compute_tile(i: jax.Array, _: None) -> None:
            t = i * turns + wg
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
            if p.residual:  # it arrives while the tile is multiplied
                _load_residual(work, t, of, smem["out_smem"], smem["residual_arrived"])

            def start(stage: jax.Array) -> None:
                multiply(p, c, acc, *(operand.at[stage] for operand in operands))

            first, last = t * steps, steps // len(products(p))
            if last < steps:
                own_pipeline.multiply(first, steps - last, start)
                _keep_finite(acc)  # as in `_drop_what_is_not_finite`
                first += steps - last
            own_pipeline.multiply(first, last, start)
            _store(work, t, acc, of, **smem)

        lax.fori_loop(0, tile_scheduler.tiles_of_block(own_tiles, wg, turns), compute_tile, None)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    engine.specialize(
        producer,
        lambda: accumulator.scope(consumer),
        consumers=turns,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


def _refs(p: Problem, a: Any, b: Any, *rest: Any) -> _Refs:
    """The arguments of the kernel by name, in the order in which `launch` passes them."""
    *extra, out = rest
    return _Refs(a, b, out, **by_name(p, extra))


def ends_with_rows(p: Problem, c: Config) -> bool:
    """Whether the last tile along m or n ends with the array, and so may begin anywhere (`tma.block_start`)."""
    a_t, b_t = transposed(p)
    width = panel(p, c)
    along_m, along_n = tma.last_start(p.m, c.tile_m, width), tma.last_start(p.n, c.tile_n, width)
    return (a_t and along_m is not None) or (not b_t and along_n is not None)


def clusters_of_tiles(p: Problem, c: Config) -> int:
    """How many output tiles, or pairs of them in clusters along m or n, there are."""
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    return tiles // (2 if c.cluster in ("m", "n") else 1)


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on A and B as they are stored, then scales, bias and residual where the problem has them.

    Each has a leading batch dimension, or is shared by all products.
    """
    whole, extra = p, by_name(p, arrays[2:])
    a, b = _as_multiplied(p, c, *arrays[:2])
    batched = any(x.ndim > rank for x, rank in zip(arrays, ranks(p), strict=True))
    p = partial_problem(p, c)
    m, n, parts = p.m, p.n, 1 if c.cluster == "k" else c.split_k
    shape = (p.batch, m, n) if batched or parts > 1 else (m, n)
    flips = computes_transposed(c)
    p, c = as_computed(p, c)
    cluster = cluster_size(c)
    work = Work(p, c, min(resident_clusters(cluster, gpu), clusters_of_tiles(p, c)), flips)
    anywhere = (1, p.batch, m, n)
    out = engine.kernel(
        functools.partial(_kernel_in_turn, work, gpu) if c.takes_turns else functools.partial(_kernel, work),
        engine.Launch(
            "mgpu_ops_matmul",
            grid={"block": work.blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + 1,
            approx_math=p.activation != "none",
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(anywhere if ends_with_rows(p, c) else shape, p.out_dtype),
        scratch_types=_scratch(work),
    )(*((b, a) if flips else (a, b)), *_extra(work, extra, anywhere)).reshape(shape)
    if parts > 1:  # XLA sums the parts in a fixed order: the result has the same bits in every run
        out = with_epilogue(whole, out.reshape(*((-1,) if batched else ()), parts, m, n).sum(-3), **extra)
    return out


def _as_multiplied(p: Problem, c: Config, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The arrays that `problem.multiplied` is of."""
    if p.dtype != "float32":
        return a, b
    a_t, b_t = transposed(p)
    if p.algorithm not in algorithms.PRODUCTS:
        return a.mT if a_t else a, b if b_t else b.mT
    parts = algorithms.parts_of(p.algorithm)
    return algorithms.split(a, parts, -2 if a_t else -1, c.tile_k), algorithms.split(b, parts, -1 if b_t else -2, c.tile_k)


def _extra(work: Work, extra: dict[str, jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
    """What follows A and B as the kernel reads it: vectors up to the end of the last tile, a residual [1, ...] where out is."""
    p, c, found = work.problem, work.config, []
    rows, columns = (p.m, c.tile_m), (p.n, c.tile_n)
    if work.transposed:
        rows, columns = columns, rows

    def padded(vector: jax.Array, side: tuple[int, int]) -> jax.Array:
        length, tile = side
        return jnp.pad(vector, [(0, 0)] * (vector.ndim - 1) + [(0, -length % tile)])

    if p.scales == "tensor":
        found += [extra["scale_a"], extra["scale_b"]]
    if p.scales == "row":
        found += [padded(extra["scale_a"], rows), padded(extra["scale_b"], columns)]
    if p.scales == "block":
        found += _scales_for_tma(extra["scale_a"], extra["scale_b"], rows[1])
    if p.bias:
        found.append(padded(extra["bias"], columns))
    if p.residual:
        residual = extra["residual"]
        if ends_with_rows(p, c):
            residual = jnp.broadcast_to(residual, shape[1:])[None]
        found.append(residual)
    return found


def _scales_for_tma(scale_a: jax.Array, scale_b: jax.Array, tile: int) -> list[jax.Array]:
    """The scales of blocks as `_load_scales` reads them, for tiles of so many rows of A."""
    a = scale_a.mT
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -a.shape[-1] % tile)]).reshape(*a.shape[:-1], -1, tile)
    a = jnp.pad(a, [(0, 0)] * (a.ndim - 1) + [(0, -tile % SCALES_IN_LINE)])
    b = jnp.repeat(scale_b, BLOCK // ROWS, -2)[..., None]
    return [a, jnp.broadcast_to(b, (*b.shape[:-1], SCALES_IN_LINE))]


def _scratch(work: Work) -> dict[str, Any]:
    """Accumulators, the buffers of the epilogue, and what adds up the parts of k of a cluster."""
    p, c = work.problem, work.config
    *buffers, rows, columns = storage(p, c).out_shape
    tile = (columns, rows) if work.transposed else (rows, columns)
    scratch = {
        "accumulator": engine.Accumulators(
            accumulators(p, c), c.compute_warpgroups, jnp.int32 if p.dtype == "int8" else jnp.float32
        ),
        "out_smem": plgpu.SMEM(
            (*buffers, *tile), jnp.dtype(p.out_dtype), transforms=engine.operand_transforms(tile[1], p.out_dtype)
        ),
    }
    if p.residual:
        scratch["residual_arrived"] = plgpu.Barrier(num_arrivals=epilogue_tiles(c), num_barriers=c.compute_warpgroups)
    if c.takes_turns:
        stages, swizzle = c.max_concurrent_steps, swizzle_bytes(p, c)
        cluster_axes = ("cluster",) if cluster_size(c) > 1 else ()
        scratch["operands"] = tuple(
            plgpu.SMEM((stages, *tile), jnp.dtype(dtype), transforms=engine.operand_transforms(tile[1], dtype, swizzle))
            for tile, dtype in zip(_operand_tiles(p, c), (p.dtype, dtype_of_b(p)), strict=True)
        )
        scratch["barriers"] = Pipeline.barriers_in_turn(
            stages, copies=2, consumers=c.compute_warpgroups, cluster_axes=cluster_axes
        )
    if c.cluster == "k":
        scratch["cluster_sum"] = ClusterSum((rows, columns), c.compute_warpgroups, cluster_size(c), "cluster")
    return scratch
