"""The main loop of matmul's kernels: what a producer loads into the stages of a pipeline, and what consumers multiply.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import functools
import math
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler, tma
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    cluster_size,
    columns_of_b,
    consumer_registers,
    dtype_of_b,
    has_producer,
    k_steps,
    last_step,
    neighbours,
    products,
    residual_steps,
    steps_in_all,
    swizzle_bytes,
    transposed,
)
from mgpu_ops.matmul.store import load_residual_slab
from mgpu_ops.matmul.work import Tile, Work, step_of_k, tile_of


def load(work: Work, a_ref: Any, *b_refs: Any, shifts: Sequence[int] = ()) -> list[Any]:
    """Producer: what step (tile, k) loads, a tile of A and one of each B in the layout that they are stored in.

    shifts: how many tiles behind its first column each B begins, 0 by default.

    TMA fills what lies outside an array with zeros, so ragged m, n and k need no masks. The blocks of a cluster
    along m or n need the same tile of one operand: each loads half of it and multicasts that half to both.
    """
    p, c = work.problem, work.config
    a_t, b_t = transposed(p)
    swizzle = swizzle_bytes(p, c)
    down, across = neighbours(c)

    def spec(ref: Any, tile: tuple[int, int], index: Callable[[Tile, jax.Array], tuple[Int, Int]], shared: bool) -> Any:
        batched = ref.ndim == 3 or (ref.ndim == 4 and ref.shape[1] > 1)  # of 4: see `_copy_widened`

        def where(t: jax.Array, k: jax.Array) -> tuple[Int, ...]:
            at = tile_of(work, t)
            return ((at.batch,) if batched else ()) + index(at, step_of_k(work, at, k))

        return plgpu.BlockSpec(
            (None, *tile) if batched else tile,
            where,
            transforms=engine.operand_transforms(tile[1], ref.dtype, swizzle),
            memory_space=plgpu.SMEM,
            collective_axes=("cluster",) if shared else (),
        )

    # Blocks of a cluster that have no tile of their own load the last one: zeros take longer.
    def there(index: Int, side: int, tile: int, blocks: int) -> Int:
        tiles = math.ceil(side / tile)
        return jnp.minimum(index, jnp.int32(tiles - 1)) if tiles % blocks else index

    def a_index(at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k, row = _block_of_part(work, k, 0), there(at.row, p.m, c.tile_m, down)
        return (k, row) if a_t else (row, k)

    def b_index(shift: int, at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k, column = _block_of_part(work, k, 1), there(at.column, p.n, c.tile_n, across)
        column = column + shift if shift else column
        return (column, k) if b_t else (k, column)

    a_tile, b_tile = _operand_tiles(p, c)
    return [
        spec(a_ref, a_tile, a_index, shared=across > 1),
        *(
            spec(b_ref, b_tile, functools.partial(b_index, shift), shared=down > 1)
            for b_ref, shift in zip(b_refs, shifts or (0,) * len(b_refs), strict=True)
        ),
    ]


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


def _operand_tiles(p: Problem, c: Config) -> tuple[tuple[int, int], tuple[int, int]]:
    """The tiles of A and B of a pipeline step, as they are stored."""
    a_t, b_t = transposed(p)
    a, b = (c.tile_m, c.tile_k), (c.tile_k, columns_of_b(p, c))
    return a[::-1] if a_t else a, (c.tile_n, c.tile_k) if b_t else b


class Stages(NamedTuple):
    """Scratch of a pipeline: the stages of A and of B, and its barriers."""

    a: Any
    b: Any
    full: Any
    empty: Any


def stages_of(p: Problem, c: Config) -> Stages:
    """The types of `Stages`, in a kernel's `scratch_types`, for a problem and a config `as_computed`."""
    count, swizzle = c.max_concurrent_steps, swizzle_bytes(p, c)
    cluster_axes = ("cluster",) if cluster_size(c) > 1 else ()
    a, b = (
        plgpu.SMEM((count, *tile), jnp.dtype(dtype), transforms=engine.operand_transforms(tile[1], dtype, swizzle))
        for tile, dtype in zip(_operand_tiles(p, c), (p.dtype, dtype_of_b(p)), strict=True)
    )
    barriers = Pipeline.barriers_in_turn if c.takes_turns else Pipeline.barriers
    return Stages(a, b, *barriers(count, copies=2, consumers=c.compute_warpgroups, cluster_axes=cluster_axes))


type Copy = Callable[..., None]  # copy((t, k), stage, full, rows=...)


def _copies(work: Work, refs: tuple[Any, Any], stages: Stages) -> Copy:
    """What starts the copies of step (tile, k) into a stage, which arrive at its `full` barrier.

    rows: how many rows of the stages of A and B are loaded, all by default.
    """
    specs = load(work, *refs)

    def copy(
        indices: tuple[jax.Array, jax.Array], stage: jax.Array, full: Any, rows: Sequence[int | None] = (None, None)
    ) -> None:
        for number, (spec, ref, smem) in enumerate(zip(specs, refs, (stages.a, stages.b), strict=True)):
            if number == 1 and widened(work.problem, work.config):
                _copy_widened(work, spec, ref, indices, smem.at[stage], full)
            else:
                _copy_rows(spec, ref, indices, smem.at[stage], full, rows[number])

    return copy


def _copy_rows(spec: Any, ref: Any, indices: tuple[jax.Array, jax.Array], stage: Any, full: Any, rows: int | None) -> None:
    """Producer: starts the copy of a tile, or of its first `rows` rows."""
    sizes = spec.block_shape
    window = tuple(
        index if size is None else pl.ds(index * size, rows if rows and i == len(sizes) - 2 else size)
        for i, (index, size) in enumerate(zip(spec.index_map(*indices), sizes, strict=True))
    )
    there = stage.at[pl.ds(0, rows)] if rows else stage
    engine.copy_gmem_to_smem(ref.at[window], there, full, collective_axes=spec.collective_axes)


def _rows_inside(work: Work, number: int) -> tuple[int | None, int | None]:
    """How many rows of the last tile of A (number 0) or B (1), and of its last step of k, lie in the array. None: all.

    TMA takes 6 cycles to fill a row outside with zeros, 1.5 to load one from L2. Nothing stored depends on them: they are rows
    or columns of the output that there are not, or of k what `last_step` leaves out.
    """
    p, c = work.problem, work.config
    unit = 8 * neighbours(c)[1 - number]  # each block of a cluster loads as many
    if transposed(p)[1] if number else not transposed(p)[0]:  # stored along k
        side, tile = ((p.m, c.tile_m), (p.n, c.tile_n))[number]
        left = math.ceil(side % tile / unit) * unit
        return (left if 0 < left < tile else None), None
    left = last_step(p, c) or 0
    return None, (left if left and left % unit == 0 and not (number and widened(p, c)) else None)


def widened(p: Problem, c: Config) -> bool:
    """Whether tiles of B in shared memory have more columns than those of the output (`columns_of_b`)."""
    return columns_of_b(p, c) != c.tile_n


def _copy_widened(work: Work, spec: Any, ref: Any, indices: tuple[jax.Array, jax.Array], stage: Any, full: Any) -> None:
    """Producer: starts the copy of a tile of B, stored as [1, batch, k, n], that begins at a multiple of tile_n."""
    c = work.config
    *batch, k, column = spec.index_map(*indices)
    rows, columns = pl.ds(k * c.tile_k, c.tile_k), pl.ds(column * c.tile_n, columns_of_b(work.problem, c))
    block = tma.block_anywhere(ref, *(batch or [0]), rows, columns)
    engine.copy_gmem_to_smem(block, stage, full, collective_axes=spec.collective_axes)


def produce(
    work: Work,
    refs: tuple[Any, Any],
    stages: Stages,
    own_tiles: jax.Array,
    pipeline_of: Callable[[jax.Array], Pipeline],
    residual: Any = None,
) -> None:
    """Producer: loads the steps of all tiles of a block, one tile after the other, each into its pipeline.

    residual: what the steps after those of k bring, where stores are deferred.
    """
    p, c = work.problem, work.config
    steps, slabs = k_steps(p, c), 0 if residual is None else residual_steps(p, c)
    each_tile = steps + slabs
    copy = _copies(work, refs, stages)
    (a_rows, a_last), (b_rows, b_last) = (_rows_inside(work, number) for number in (0, 1))

    def load_tile(t: jax.Array, _: None) -> None:
        pipeline, at = pipeline_of(t), tile_of(work, t)

        def load_steps(a: int | None, b: int | None) -> None:
            def load_step(k: jax.Array, stage: jax.Array, rows: Sequence[int | None] = (a, b)) -> jax.Array:
                pipeline.fill(t * each_tile + k, functools.partial(copy, (t, k), rows=rows), stage)
                return pipeline.next(stage)

            whole = steps - 1 if a_last or b_last else steps
            # There are several of these loops: unrolled, where steps are few, their addresses would spill.
            end = engine.opaque(own_tiles * 0 + whole) if a_rows or b_rows else whole
            stage = lax.fori_loop(0, end, load_step, pipeline.first(t * each_tile))
            if whole < steps:
                load_step(jnp.int32(whole), stage, (a_last or a, b_last or b))

        # Branches around the loop over k: one for each step takes longer than it gains.
        def load_columns(a: int | None) -> None:
            _where_inside(at.column, p.n // c.tile_n, b_rows, functools.partial(load_steps, a))

        _where_inside(at.row, p.m // c.tile_m, a_rows, load_columns)
        for slab in range(slabs):
            load_slab = functools.partial(load_residual_slab, work, t, residual, slab, stages)
            pipeline.fill(t * each_tile + steps + slab, load_slab)

    lax.fori_loop(0, own_tiles, load_tile, None)
    pipeline_of(jnp.int32(0)).drain(own_tiles * each_tile)  # a block does not end before its last stages are read


def _where_inside(tile: Int, whole: int, rows: int | None, load: Callable[[int | None], None]) -> None:
    """Producer: load(None) for the first `whole` tiles along a side, load(rows) for the last one, where it has only these."""
    if rows is None or whole == 0:
        load(rows)
    else:
        lax.cond(tile < whole, functools.partial(load, None), functools.partial(load, rows))


def multiply(p: Problem, c: Config, acc: Any, a_smem: Any, b_smem: Any, depth: int | None = None) -> None:
    """Consumer: starts acc += A tile @ B tile, for this warpgroup's rows or columns of the output tile.

    depth: how many of k the tiles hold, where the others are zeros.
    """
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
        depth,
    )


def square_rows(c: Config, acc: Any, a_smem: Any) -> None:
    """Consumer: starts acc += A tile @ A tile^T, of this warpgroup's rows: their squares are on its diagonal.

    With few rows the tensor cores wait for memory anyway.
    """
    rows, _ = tile_scheduler.warpgroup_origin(c)
    if warpgroup_tile(c)[0] < c.tile_m:
        a_smem = a_smem.at[pl.ds(rows, ROWS), :]
    engine.wgmma(acc, a_smem, engine.transpose_ref(a_smem))


def keep_finite(acc: Any) -> None:
    """Consumer: takes 0 for sums that are not finite, where all products of parts of float32 but the last are added up.

    The last products, of the parts with the leading bits, are the same infinities and NaNs; these ones may have others, as of
    infinity times a part that is zero.
    """
    sums = acc[...]
    acc[...] = jnp.where(jnp.abs(sums) < jnp.inf, sums, 0.0)


def multiply_tile(
    work: Work,
    acc: Any,
    stages: Stages,
    pipeline: Pipeline,
    first: jax.Array,
    *,
    beside: Sequence[Callable[[], None]] = (),
    in_flight: int = 1,
    released: Callable[[jax.Array], None] | None = None,
) -> None:
    """Consumer: acc = the sum over the steps of k of a tile, of which `first` is the first. See `Pipeline.multiply`."""
    p, c = work.problem, work.config
    steps, depth = k_steps(p, c), last_step(p, c)

    def start(stage: jax.Array, depth: int | None = None) -> None:
        multiply(p, c, acc, stages.a.at[stage], stages.b.at[stage], depth)

    of_last_product = steps // len(products(p))
    if of_last_product < steps:
        pipeline.multiply(first, steps - of_last_product, start, released=released)
        keep_finite(acc)
        first += steps - of_last_product
    shorter = None if depth is None else functools.partial(start, depth=depth)
    pipeline.multiply(first, of_last_product, start, beside, in_flight, shorter, released)


def compute_ahead(
    work: Work,
    gpu: Gpu,
    refs: tuple[Any, Any],
    accumulator: Any,
    stages: Stages,
    begin: Callable[[jax.Array], None],
    finish: Callable[[jax.Array, Any], None],
    end: Callable[[], None] | None = None,
) -> None:
    """One block whose consumers start the wgmma of the next step before they wait for the last one's.

    They share each output tile, or compute tiles in turn: while one stores a tile, the other multiplies the next. Both read one
    pipeline, in which the steps of a tile lie together. So the next tile's multiplication begins when the last one's ends,
    without another barrier, and stages that one consumer has read are filled for the other.

    Three consumers need the registers of a producer, so there is none: see `_fill_as_consumer`.

    refs: A and B. begin(t) and finish(t, accumulator): what a consumer does before and after the multiplication of tile t.
    """
    c, steps = work.config, k_steps(work.problem, work.config)
    own_tiles = work.own_tiles()
    pipeline, turns = Pipeline(c.max_concurrent_steps, stages.full, stages.empty), c.compute_warpgroups

    def its_pipeline(t: jax.Array) -> Pipeline:
        return pipeline.of_consumer(lax.rem(t, jnp.int32(turns))) if c.takes_turns else pipeline

    fill: Any = None if has_producer(c) else _fill_as_consumer(work, refs, stages, pipeline, own_tiles)

    def consumer(acc: Any) -> None:
        wg = lax.axis_index("wg")
        own_pipeline = pipeline.of_consumer(wg) if c.takes_turns else pipeline
        released = None if fill is None else lambda step: fill(wg, step + pipeline.stages)
        for step in range(0 if fill is None else pipeline.stages):
            fill(wg, jnp.int32(step))

        def compute_tile(i: jax.Array, _: None) -> None:
            t = i * turns + wg if c.takes_turns else i
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
            begin(t)
            multiply_tile(work, acc, stages, own_pipeline, t * steps, released=released)
            finish(t, acc)

        own = tile_scheduler.tiles_of_block(own_tiles, wg, turns) if c.takes_turns else own_tiles
        lax.fori_loop(0, own, compute_tile, None)
        if end is not None:
            pl.when(own_tiles > 0)(end)
        if fill is not None:
            pl.when(wg == 0)(lambda: pipeline.drain(own_tiles * steps))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    if fill is not None:
        accumulator.scope(consumer)
        return
    engine.specialize(
        lambda: produce(work, refs, stages, own_tiles, its_pipeline),
        lambda: accumulator.scope(consumer),
        consumers=turns,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
        copies_alone=True,
    )


def _fill_as_consumer(
    work: Work, refs: tuple[Any, Any], stages: Stages, pipeline: Pipeline, own_tiles: jax.Array
) -> Callable[[jax.Array, jax.Array], None]:
    """What fills stages where there is no producer, fill(wg, step): the first consumer, as soon as all have emptied the stage.

    The next step is multiplied meanwhile.
    """
    copy, steps = _copies(work, refs, stages), k_steps(work.problem, work.config)

    def fill(wg: jax.Array, step: jax.Array) -> None:
        @pl.when((wg == 0) & (step < own_tiles * steps))
        def _() -> None:
            indices = lax.div(step, jnp.int32(steps)), lax.rem(step, jnp.int32(steps))
            pipeline.fill(step, functools.partial(copy, indices))

    return fill
