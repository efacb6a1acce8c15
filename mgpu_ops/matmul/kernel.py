"""The kernel of matmul: out[m, n] = sum_k A[m, k] B[k, n], float32 accumulation, for NVIDIA Hopper.

Persistent and warp-specialised: an SM runs one block, which computes output tiles one after the other; blocks form clusters.
A producer warpgroup loads tiles of A and B with TMA into a pipeline of shared-memory stages. One or two consumer warpgroups
multiply them with wgmma and store the output tile. Producer and consumers run at the same time. The pipeline counts its steps
over all output tiles of the block: while consumers store one tile, the producer loads the first stages of the next.

`work.py` says which tile a block computes; `block_scales.py` scales blocks of k before they are added up; `store.py` is the
epilogue.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler, tma
from mgpu_ops.core.cluster import ClusterShares, ClusterSum
from mgpu_ops.core.epilogue import deferred_stores
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import resident_clusters
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.scaled import Sums
from mgpu_ops.core.tile_scheduler import Int
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.block_scales import add_scaled, load_scales
from mgpu_ops.matmul.epilogue import by_name, ranks, with_epilogue
from mgpu_ops.matmul.problem import (
    SLOTS,
    Config,
    Problem,
    accumulators,
    across_lines,
    as_computed,
    cluster_size,
    columns_of_b,
    computes_transposed,
    consumer_registers,
    dtype_of_b,
    has_producer,
    k_steps,
    last_step,
    neighbours,
    partial_problem,
    products,
    residual_steps,
    steps_in_all,
    storage,
    swizzle_bytes,
    transposed,
)
from mgpu_ops.matmul.store import (
    arrays_of_epilogue,
    if_it_stores,
    kept,
    load_residual,
    load_residual_slab,
    load_slots,
    refs_of,
    residual_in,
    store,
    store_kept,
    store_share,
    store_slots,
)
from mgpu_ops.matmul.work import Place, Tile, Work, clusters_of_tiles, ends_with_rows, step_of_k, tile_of


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

    def a_index(at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k = _block_of_part(work, k, 0)
        return (k, at.row) if a_t else (at.row, k)

    def b_index(shift: int, at: Tile, k: jax.Array) -> tuple[Int, Int]:
        k, column = _block_of_part(work, k, 1), at.column + shift if shift else at.column
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


def _drop_what_is_not_finite(work: Work, acc: Any, at: Tile, k: jax.Array) -> None:
    """Consumer, after step k of a tile: where all products but the last are added up, takes 0 for sums that are not finite.

    The last products, of the parts with the leading bits, are the same infinities and NaNs; these ones may have others, as of
    infinity times a part that is zero.
    """
    p, c = work.problem, work.config
    pairs, steps = products(p), k_steps(p, c)
    end, step = steps_in_all(p, c) // len(pairs) * (len(pairs) - 1), step_of_k(work, at, k)
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
    a, b = (c.tile_m, c.tile_k), (c.tile_k, columns_of_b(p, c))
    return a[::-1] if a_t else a, (c.tile_n, c.tile_k) if b_t else b


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


def _kernel(
    work: Work,
    *refs: Any,
    accumulator: Any,
    out_smem: Any,
    cluster_sum: Any = None,
    residual_arrived: Any = None,
    factors_smem: Any = None,
) -> None:
    """One block: a pipeline over (its output tiles) x (steps of k), with a store after the last step of each tile."""
    p, c = work.problem, work.config
    of = refs_of(p, *refs)
    epilogue = {"out_smem": out_smem, "cluster_sum": cluster_sum, "residual_arrived": residual_arrived}
    scales = (of.scale_a, of.scale_b) if p.scales == "block" else ()
    steps, last = k_steps(p, c), last_step(p, c)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)

    # Consumers run `step` when the stage is full, and declare it empty after it. The producer meanwhile loads up to
    # `max_concurrent_steps` steps ahead, also over the end of an output tile.
    def step(indices: tuple[jax.Array, jax.Array], a_smem: Any, b_smem: Any, *rest: Any) -> Any:
        (t, k), (*scale_smem, accs) = indices, rest
        if p.residual:  # it arrives while the second half of k is multiplied

            @pl.when(k == steps // 2)
            def _() -> None:
                if_it_stores(c, lambda: load_residual(work, t, of, out_smem, residual_arrived))

        def product(depth: int | None = None) -> None:
            if scale_smem:
                add_scaled(work, accs, a_smem, b_smem, *scale_smem)
            else:
                multiply(p, c, accs[0], a_smem, b_smem, depth)
            if p.normalised:
                square_rows(c, accs[1], a_smem)
            engine.wgmma_wait(0)  # the stage may be refilled when the step is done, so no wgmma may still read it

        if last is None:
            product()
        else:
            lax.cond(k == steps - 1, functools.partial(product, last), product)
        if len(products(p)) > 1:
            _drop_what_is_not_finite(work, accs[0], tile_of(work, t), k)

        # After the last step of k the sum is complete. Its copies to global memory run on under the next tile's steps.
        @pl.when(k == steps - 1)
        def _() -> None:
            sums = Sums.of(c, accs) if scale_smem else None
            norm = {"rows_squared": accs[1], "factors_smem": factors_smem} if p.normalised else {}
            store(work, t, sums or accs[0], of, **epilogue, **norm)
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
        in_specs=[*load(work, of.a, of.b), *(load_scales(work, *scales) if scales else ())],
        max_concurrent_steps=c.max_concurrent_steps,
        num_compute_wgs=c.compute_warpgroups,
        memory_registers=c.memory_registers,
        wg_axis="wg",
        compute_context=consumer,
    )(of.a, of.b, *scales)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends


_STAGES_AHEAD = 4  # with which a stage may be held for a step more: with two, loads then come 1.6 times too late


def _kernel_deferred(work: Work, gpu: Gpu, *refs: Any, accumulator: Any, stages: Stages, out_smem: Any) -> None:
    """One block whose consumers share each output tile, and store it while the tensor cores compute the next one.

    At its end a tile is rounded and kept in registers. Each of the next tile's first steps starts its wgmma, stores an epilogue
    tile of what is kept, or several, and then waits for the wgmma of the step before; with few stages, for its own.
    """
    p, c = work.problem, work.config
    of, steps, slabs = refs_of(p, *refs), k_steps(p, c), residual_steps(p, c)
    each_tile = steps + slabs
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)
    pipeline = Pipeline(c.max_concurrent_steps, stages.full, stages.empty)
    number = epilogue_tiles(c)
    stores = deferred_stores(number, steps)

    # The residual comes in steps of its own after those of k.
    def keep(t: jax.Array, acc: Any) -> tuple[jax.Array, ...]:
        if not slabs:
            return kept(work, t, acc, of)
        arrived = [pipeline.wait(t * each_tile + steps + i) for i in range(slabs)]
        parts = kept(work, t, acc, of, residual_in(work, stages, arrived))
        plgpu.commit_smem()  # the reads come before TMA fills the stages again
        for stage in arrived:
            engine.barrier_arrive(pipeline.empty.at[stage])
        return parts

    def consumer(acc: Any) -> None:
        def start(stage: jax.Array, depth: int | None = None) -> None:
            multiply(p, c, acc, stages.a.at[stage], stages.b.at[stage], depth)

        def compute_tile(t: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
            before = Place.of(work, t - 1)

            def store_some(some: range) -> None:
                @pl.when(t > 0)
                def _() -> None:
                    for i in some:
                        store_kept(before, i, parts[i], of, out_smem)

            beside = [functools.partial(store_some, some) for some in stores]
            in_flight = int(c.max_concurrent_steps >= _STAGES_AHEAD)
            pipeline.multiply(t * each_tile, steps, start, beside, in_flight, shorter(start, last_step(p, c)))
            return keep(t, acc)

        shape = (ROWS, c.epilogue_tile_n)
        nothing = tuple(jnp.zeros(shape, p.out_dtype) for _ in range(number))
        parts = lax.fori_loop(0, own_tiles, compute_tile, nothing)

        @pl.when(own_tiles > 0)
        def _() -> None:
            for i, part in enumerate(parts):
                store_kept(Place.of(work, own_tiles - 1), i, part, of, out_smem)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    engine.specialize(
        lambda: _produce(work, (of.a, of.b), stages, own_tiles, lambda _: pipeline, of.residual if slabs else None),
        lambda: accumulator.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


def _kernel_ahead(work: Work, gpu: Gpu, *refs: Any, accumulator: Any, stages: Stages, **smem: Any) -> None:
    """One block of a matmul whose consumers have the next step's wgmma in flight, and share output tiles or take turns."""
    p, c, of = work.problem, work.config, refs_of(work.problem, *refs)

    def begin(t: jax.Array) -> None:
        if p.residual:  # it arrives while the tile is multiplied
            if c.takes_turns:
                load_slots(work, t, of, smem["out_smem"], smem["residual_arrived"])
            else:
                if_it_stores(c, lambda: load_residual(work, t, of, smem["out_smem"], smem["residual_arrived"]))

    def finish(t: jax.Array, acc: Any) -> None:
        if c.takes_turns and p.residual:
            store_slots(work, t, acc, of, smem["out_smem"], smem["residual_arrived"])
        elif c.cluster == "k":
            store_share(work, t, acc, of, **smem)
        else:
            store(work, t, acc, of, **smem)

    cluster_sum = smem.get("cluster_sum")  # other blocks' last sums read this block's shared memory, or are sent to it
    compute_ahead(work, gpu, (of.a, of.b), accumulator, stages, begin, finish, cluster_sum and cluster_sum.finish)


def shorter(start: Callable[..., None], depth: int | None) -> Callable[[jax.Array], None] | None:
    """What starts the wgmma of the last step, where that has fewer of k."""
    return None if depth is None else functools.partial(start, depth=depth)


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


def _copies(work: Work, refs: tuple[Any, Any], stages: Stages) -> Callable[[tuple[jax.Array, jax.Array], jax.Array, Any], None]:
    """What starts the copies of step (tile, k) into a stage, which arrive at its `full` barrier: copy((t, k), stage, full)."""
    specs = list(zip(load(work, *refs), refs, (stages.a, stages.b), strict=True))

    def copy(indices: tuple[jax.Array, jax.Array], stage: jax.Array, full: Any) -> None:
        for spec, ref, smem in specs:
            if ref is refs[1] and widened(work.problem, work.config):
                _copy_widened(work, spec, ref, indices, smem.at[stage], full)
            else:
                engine.copy_block(spec, ref, indices, smem.at[stage], full)

    return copy


def _produce(
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
    steps = k_steps(work.problem, work.config)
    slabs = 0 if residual is None else residual_steps(work.problem, work.config)
    each_tile = steps + slabs
    copy = _copies(work, refs, stages)

    def load_tile(t: jax.Array, _: None) -> None:
        pipeline = pipeline_of(t)

        def load_step(k: jax.Array, _: None) -> None:
            pipeline.fill(t * each_tile + k, functools.partial(copy, (t, k)))

        lax.fori_loop(0, steps, load_step, None)
        for slab in range(slabs):
            load_slab = functools.partial(load_residual_slab, work, t, residual, slab, stages)
            pipeline.fill(t * each_tile + steps + slab, load_slab)

    lax.fori_loop(0, own_tiles, load_tile, None)
    pipeline_of(jnp.int32(0)).drain(own_tiles * each_tile)  # a block does not end before its last stages are read


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


def compute_ahead(
    work: Work,
    gpu: Gpu,
    refs: tuple[Any, Any],
    accumulator: Any,
    scratch: Stages,
    begin: Callable[[jax.Array], None],
    finish: Callable[[jax.Array, Any], None],
    end: Callable[[], None] | None = None,
) -> None:
    """One block whose consumers start the wgmma of the next step before they wait for the last one's.

    They share each output tile, or compute tiles in turn: while one stores a tile, the other multiplies the next. Both read one
    pipeline, in which the steps of a tile lie together. So the next tile's multiplication begins when the last one's ends,
    without another barrier, and stages that one consumer has read are filled for the other.

    Three consumers need the registers of a producer, so there is none: the first of them fills the stage that all have declared
    empty, while the next step is multiplied.

    refs: A and B. begin(t) and finish(t, accumulator): what a consumer does before and after the multiplication of tile t.
    """
    p, c, steps = work.problem, work.config, k_steps(work.problem, work.config)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)
    pipeline, turns = Pipeline(c.max_concurrent_steps, scratch.full, scratch.empty), c.compute_warpgroups

    def its_pipeline(t: jax.Array) -> Pipeline:
        return pipeline.of_consumer(lax.rem(t, jnp.int32(turns))) if c.takes_turns else pipeline

    copy: Any = None if has_producer(c) else _copies(work, refs, scratch)

    def fill(wg: jax.Array, step: jax.Array) -> None:
        @pl.when((wg == 0) & (step < own_tiles * steps))
        def _() -> None:
            indices = lax.div(step, jnp.int32(steps)), lax.rem(step, jnp.int32(steps))
            pipeline.fill(step, functools.partial(copy, indices))

    def consumer(acc: Any) -> None:
        wg = lax.axis_index("wg")
        own_pipeline = pipeline.of_consumer(wg) if c.takes_turns else pipeline
        released = None if has_producer(c) else lambda step: fill(wg, step + pipeline.stages)
        if not has_producer(c):
            for step in range(pipeline.stages):
                fill(wg, jnp.int32(step))

        def compute_tile(i: jax.Array, _: None) -> None:
            t = i * turns + wg if c.takes_turns else i
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
            begin(t)

            def start(stage: jax.Array, depth: int | None = None) -> None:
                multiply(p, c, acc, scratch.a.at[stage], scratch.b.at[stage], depth)

            first, last = t * steps, steps // len(products(p))
            if last < steps:
                own_pipeline.multiply(first, steps - last, start, released=released)
                _keep_finite(acc)  # as in `_drop_what_is_not_finite`
                first += steps - last
            own_pipeline.multiply(first, last, start, last=shorter(start, last_step(p, c)), released=released)
            finish(t, acc)

        own = tile_scheduler.tiles_of_block(own_tiles, wg, turns) if c.takes_turns else own_tiles
        lax.fori_loop(0, own, compute_tile, None)
        if end is not None:
            pl.when(own_tiles > 0)(end)
        if not has_producer(c):
            pl.when(wg == 0)(lambda: pipeline.drain(own_tiles * steps))
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    if not has_producer(c):
        accumulator.scope(consumer)
        return
    engine.specialize(
        lambda: _produce(work, refs, scratch, own_tiles, its_pipeline),
        lambda: accumulator.scope(consumer),
        consumers=turns,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


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
    operands = (b, a) if flips else (a, b)
    if widened(p, c):
        operands = (operands[0], operands[1].reshape(1, -1, *operands[1].shape[-2:]))
    out = engine.kernel(
        _body(work, gpu),
        engine.Launch(
            "mgpu_ops_matmul",
            grid={"block": work.blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + has_producer(c),
            approx_math=p.activation != "none",
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(anywhere if ends_with_rows(p, c) else shape, p.out_dtype),
        scratch_types=_scratch(work),
    )(*operands, *arrays_of_epilogue(work, extra, anywhere)).reshape(shape)
    if parts > 1:  # XLA sums the parts in a fixed order: the result has the same bits in every run
        out = with_epilogue(whole, out.reshape(*((-1,) if batched else ()), parts, m, n).sum(-3), **extra)
    return out


def _body(work: Work, gpu: Gpu) -> Callable[..., None]:
    """The kernel of a schedule."""
    p, c = work.problem, work.config
    if c.schedule == "cooperative" and not widened(p, c):
        kernel: Callable[..., None] = functools.partial(_kernel, work)
    else:
        kernel = functools.partial(_kernel_deferred if c.schedule == "deferred" else _kernel_ahead, work, gpu)

    def body(*refs: Any, **scratch: Any) -> None:
        if across_lines(p):
            engine.load_whole_lines()
        if widened(p, c):
            engine.narrow_wgmma(columns_of_b(p, c), c.tile_n)
        kernel(*refs, **scratch)

    return body


def _as_multiplied(p: Problem, c: Config, a: jax.Array, b: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The arrays that `problem.multiplied` is of."""
    if p.dtype != "float32":
        return a, b
    a_t, b_t = transposed(p)
    if p.algorithm not in algorithms.PRODUCTS:
        return a.mT if a_t else a, b if b_t else b.mT
    parts = algorithms.parts_of(p.algorithm)
    return algorithms.split(a, parts, -2 if a_t else -1, c.tile_k), algorithms.split(b, parts, -1 if b_t else -2, c.tile_k)


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
    if p.residual and not residual_steps(p, c):
        arrivals, slots = (1, SLOTS) if c.takes_turns else (epilogue_tiles(c), 1)
        scratch["residual_arrived"] = plgpu.Barrier(num_arrivals=arrivals, num_barriers=slots * c.compute_warpgroups)
    if c.schedule != "cooperative":
        scratch["stages"] = stages_of(p, c)
    if c.cluster == "k" and c.schedule == "ahead":
        scratch["cluster_sum"] = ClusterShares(
            (rows, columns), epilogue_tiles(c), c.compute_warpgroups, cluster_size(c), "cluster"
        )
    elif c.cluster == "k":
        scratch["cluster_sum"] = ClusterSum((rows, columns), c.compute_warpgroups, cluster_size(c), "cluster")
        if p.normalised:
            scratch["factors_smem"] = plgpu.SMEM((c.compute_warpgroups, ROWS), jnp.float32)
    return scratch
