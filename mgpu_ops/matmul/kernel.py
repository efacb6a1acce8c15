"""The kernel of matmul: out[m, n] = sum_k A[m, k] B[k, n], float32 accumulation, for NVIDIA Hopper.

Persistent and warp-specialised: an SM runs one block, which computes output tiles one after the other; blocks form clusters.
A producer warpgroup loads tiles of A and B with TMA into a pipeline of shared-memory stages. One or two consumer warpgroups
multiply them with wgmma and store the output tile. Producer and consumers run at the same time. The pipeline counts its steps
over all output tiles of the block: while consumers store one tile, the producer loads the first stages of the next.

`mainloop.py` loads and multiplies; `work.py` says which tile a block computes; `block_scales.py` scales blocks of k before they
are added up; `store.py` is the epilogue.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.cluster import ClusterShares, ClusterSum
from mgpu_ops.core.epilogue import deferred_stores, if_it_stores
from mgpu_ops.core.gemm import ROWS, epilogue_tiles
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.scaled import Sums
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.block_scales import add_scaled, load_scales
from mgpu_ops.matmul.epilogue import by_name, ranks, with_epilogue
from mgpu_ops.matmul.mainloop import (
    Stages,
    compute_ahead,
    keep_finite,
    load,
    multiply,
    multiply_tile,
    produce,
    square_rows,
    stages_of,
    widened,
)
from mgpu_ops.matmul.problem import (
    SLOTS,
    Config,
    Problem,
    accumulators,
    adds_shares,
    as_computed,
    cluster_size,
    columns_of_b,
    computes_transposed,
    consumer_registers,
    has_producer,
    k_steps,
    last_step,
    partial_problem,
    products,
    residual_steps,
    steps_in_all,
    storage,
    transposed,
    vector_names,
)
from mgpu_ops.matmul.store import (
    Vectors,
    arrays_of_epilogue,
    kept,
    load_residual,
    load_slots,
    load_vectors,
    refs_of,
    residual_in,
    store,
    store_kept,
    store_share,
    store_slots,
    vectors_scratch,
)
from mgpu_ops.matmul.work import Place, Tile, Work, ends_with_rows, step_of_k, tile_of


def _keep_finite_at_end(work: Work, acc: Any, at: Tile, k: jax.Array) -> None:
    """Consumer, after step k of a tile: `keep_finite` where all products but the last are added up."""
    p, c = work.problem, work.config
    pairs, steps = products(p), k_steps(p, c)
    end, step = steps_in_all(p, c) // len(pairs) * (len(pairs) - 1), step_of_k(work, at, k)
    is_end = step == end - 1
    if c.split_k > 1:
        is_end |= (step < end) & (k == steps - 1)
    pl.when(is_end)(lambda: keep_finite(acc))


def _kernel(
    work: Work,
    *refs: Any,
    accumulator: Any,
    out_smem: Any,
    cluster_sum: Any = None,
    residual_arrived: Any = None,
    factors_smem: Any = None,
    vectors: Vectors | None = None,
) -> None:
    """One block: a pipeline over (its output tiles) x (steps of k), with a store after the last step of each tile."""
    p, c = work.problem, work.config
    of = refs_of(p, *refs, vectors=vectors)
    epilogue = {"out_smem": out_smem, "cluster_sum": cluster_sum, "residual_arrived": residual_arrived}
    scales = (of.scale_a, of.scale_b) if p.scales == "block" else ()
    steps, last = k_steps(p, c), last_step(p, c)
    own_tiles = work.own_tiles()

    # Consumers run `step` when the stage is full, and declare it empty after it. The producer meanwhile loads up to
    # `max_concurrent_steps` steps ahead, also over the end of an output tile.
    def step(indices: tuple[jax.Array, jax.Array], a_smem: Any, b_smem: Any, *rest: Any) -> Any:
        (t, k), (*scale_smem, accs) = indices, rest
        if of.vectors is not None:
            pl.when(k == 0)(lambda: load_vectors(work, t, of))
        if p.residual:  # it arrives while the second half of k is multiplied

            @pl.when(k == steps // 2)
            def _() -> None:
                if_it_stores(c.cluster, lambda: load_residual(work, t, of, out_smem, residual_arrived))

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
            _keep_finite_at_end(work, accs[0], tile_of(work, t), k)

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


def _kernel_deferred(
    work: Work, gpu: Gpu, *refs: Any, accumulator: Any, stages: Stages, out_smem: Any, vectors: Vectors | None = None
) -> None:
    """One block whose consumers share each output tile, and store it while the tensor cores compute the next one.

    At its end a tile is rounded and kept in registers. Each of the next tile's first steps starts its wgmma, stores an epilogue
    tile of what is kept, or several, and then waits for the wgmma of the step before; with few stages, for its own.
    """
    p, c = work.problem, work.config
    of, steps, slabs = refs_of(p, *refs, vectors=vectors), k_steps(p, c), residual_steps(p, c)
    each_tile = steps + slabs
    own_tiles = work.own_tiles()
    pipeline = Pipeline(c.max_concurrent_steps, stages.full, stages.empty)
    number, in_flight = epilogue_tiles(c), int(c.max_concurrent_steps >= _STAGES_AHEAD)

    # The residual comes in steps of its own after those of k.
    def keep(t: jax.Array, acc: Any) -> tuple[jax.Array, ...]:
        if not slabs:
            parts = kept(work, acc, of)
            if of.vectors is not None:  # the reads come before TMA loads the next tile's vectors
                plgpu.commit_smem()
            return parts
        arrived = [pipeline.wait(t * each_tile + steps + i) for i in range(slabs)]
        parts = kept(work, acc, of, residual_in(work, stages, arrived))
        plgpu.commit_smem()  # the reads come before TMA fills the stages again
        for stage in arrived:
            engine.barrier_arrive(pipeline.empty.at[stage])
        return parts

    def consumer(acc: Any) -> None:
        def compute_tile(t: jax.Array, parts: tuple[jax.Array, ...]) -> tuple[jax.Array, ...]:
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
            before = Place.of(work, t - 1)
            load_vectors(work, t, of)

            def store_some(some: range) -> None:
                @pl.when(t > 0)
                def _() -> None:
                    for i in some:
                        store_kept(before, i, parts[i], of, out_smem)

            beside = [functools.partial(store_some, some) for some in deferred_stores(number, steps)]
            multiply_tile(work, acc, stages, pipeline, t * each_tile, beside=beside, in_flight=in_flight)
            return keep(t, acc)

        shape = (ROWS, c.epilogue_tile_n)
        nothing = tuple(jnp.zeros(shape, p.out_dtype) for _ in range(number))
        parts = lax.fori_loop(0, own_tiles, compute_tile, nothing)

        @pl.when(own_tiles > 0)
        def _() -> None:
            last = Place.of(work, own_tiles - 1)
            for i, part in enumerate(parts):
                store_kept(last, i, part, of, out_smem)

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

    engine.specialize(
        lambda: produce(work, (of.a, of.b), stages, own_tiles, lambda _: pipeline, of.residual if slabs else None),
        lambda: accumulator.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
        copies_alone=True,
    )


def _kernel_ahead(
    work: Work, gpu: Gpu, *refs: Any, accumulator: Any, stages: Stages, vectors: Vectors | None = None, **smem: Any
) -> None:
    """One block of a matmul whose consumers have the next step's wgmma in flight, and share output tiles or take turns."""
    p, c, of = work.problem, work.config, refs_of(work.problem, *refs, vectors=vectors)

    def begin(t: jax.Array) -> None:
        load_vectors(work, t, of)
        if p.residual:  # it arrives while the tile is multiplied
            if c.takes_turns:
                load_slots(work, t, of, smem["out_smem"], smem["residual_arrived"])
            else:
                if_it_stores(c.cluster, lambda: load_residual(work, t, of, smem["out_smem"], smem["residual_arrived"]))

    def finish(t: jax.Array, acc: Any) -> None:
        if c.takes_turns and p.residual:
            store_slots(work, t, acc, of, smem["out_smem"], smem["residual_arrived"])
        elif adds_shares(p, c):
            store_share(work, t, acc, of, **smem)
        else:
            store(work, t, acc, of, **smem)

    cluster_sum = smem.get("cluster_sum")  # other blocks' last sums read this block's shared memory, or are sent to it
    compute_ahead(work, gpu, (of.a, of.b), accumulator, stages, begin, finish, cluster_sum and cluster_sum.finish)


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on A and B as they are stored, then scales, bias and residual where the problem has them.

    Each has a leading batch dimension, or is shared by all products.
    """
    whole, extra = p, by_name(p, arrays[2:])
    if p.bias and extra["bias"].dtype.itemsize not in (2, 4):  # tiles begin at multiples of eight, TMA at multiples of 16 bytes
        extra["bias"] = extra["bias"].astype(jnp.float32)
    a, b = _as_multiplied(p, c, *arrays[:2])
    batched = any(x.ndim > rank for x, rank in zip(arrays, ranks(p), strict=True))
    p = partial_problem(p, c)
    m, n, parts = p.m, p.n, 1 if c.cluster == "k" else c.split_k
    shape = (p.batch, m, n) if batched or parts > 1 else (m, n)
    flips = computes_transposed(c)
    p, c = as_computed(p, c)
    cluster = cluster_size(c)
    work = Work.of(p, c, gpu, transposed=flips)
    anywhere = (1, p.batch, m, n)
    operands = (b, a) if flips else (a, b)
    if widened(p, c):
        operands = (operands[0], operands[1].reshape(1, -1, *operands[1].shape[-2:]))
    out = engine.kernel(
        _body(work, gpu),
        engine.Launch(
            "mgpu_ops_matmul",
            grid={"block": work.rounds.blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + has_producer(c),
            approx_math=p.activation != "none",
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct(anywhere if ends_with_rows(p, c) else shape, p.out_dtype),
        scratch_types=_scratch(work, extra),
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
        engine.load_whole_lines(*refs[:2])
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


def _scratch(work: Work, extra: dict[str, jax.Array]) -> dict[str, Any]:
    """Accumulators, the buffers of the epilogue, and what adds up the parts of k of a cluster. extra: the epilogue's arrays."""
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
    if vector_names(p):
        scratch["vectors"] = vectors_scratch(work, extra)
    if c.schedule != "cooperative":
        scratch["stages"] = stages_of(p, c)
    if adds_shares(p, c):
        scratch["cluster_sum"] = ClusterShares(
            (rows, columns), epilogue_tiles(c), c.compute_warpgroups, cluster_size(c), "cluster"
        )
    elif c.cluster == "k":
        scratch["cluster_sum"] = ClusterSum((rows, columns), c.compute_warpgroups, cluster_size(c), "cluster")
        if p.normalised:
            scratch["factors_smem"] = plgpu.SMEM((c.compute_warpgroups, ROWS), jnp.float32)
    return scratch
