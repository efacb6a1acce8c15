"""The epilogue in the kernel: scales of sums, bias, activation and residual of an output tile, and its store."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.epilogue import along, epilogue_origins, if_it_stores, residual_of_tile, store_in_turn, store_tile
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.row_norm import factor_of_squares
from mgpu_ops.core.scaled import Sums
from mgpu_ops.matmul.block_scales import scales_for_tma
from mgpu_ops.matmul.epilogue import by_name
from mgpu_ops.matmul.problem import (
    SCALAR,
    SLOTS,
    Problem,
    cluster_size,
    has_epilogue,
    scales_sums,
    transposed,
    vector_names,
    vector_room,
)
from mgpu_ops.matmul.work import Place, Work, ends_with_rows


@dataclasses.dataclass(frozen=True)
class Refs:
    """Arrays in global memory, as the product `as_computed` has them. All but a, b and out: None where there is none.

    A bias, and a scale of rows or columns, is as long as its side of out, or to the next 16 bytes where a batch has several.
    residual has the shape of out. scale_a and scale_b are those of the call, also where A and B have changed places; for those
    of blocks see `load_scales`. vectors is shared memory.
    """

    a: Any
    b: Any
    out: Any
    scale_a: Any = None
    scale_b: Any = None
    epsilon: Any = None
    bias: Any = None
    residual: Any = None
    vectors: Vectors | None = None


def refs_of(p: Problem, a: Any, b: Any, *rest: Any, vectors: Vectors | None = None) -> Refs:
    """The arguments of the kernel by name, in the order in which `launch` passes them."""
    *extra, out = rest
    return Refs(a, b, out, **by_name(p, extra), vectors=vectors)


def arrays_of_epilogue(work: Work, extra: dict[str, jax.Array], shape: tuple[int, ...]) -> list[jax.Array]:
    """What follows A and B as the kernel reads it: vectors whose rows begin at 16 bytes; a residual [1, ...] where out is."""
    p, c, found = work.problem, work.config, []

    def aligned(vector: jax.Array) -> jax.Array:
        missing = -vector.shape[-1] % (16 // vector.dtype.itemsize) if vector.ndim > 1 else 0
        return jnp.pad(vector, [(0, 0)] * (vector.ndim - 1) + [(0, missing)]) if missing else vector

    if scales_sums(p):
        found += [aligned(extra["scale_a"]), aligned(extra["scale_b"])]
    if p.scales == "block":
        found += scales_for_tma(extra["scale_a"], extra["scale_b"], c.tile_n if work.transposed else c.tile_m)
    if p.normalised:
        found.append(extra["epsilon"])
    if p.bias:
        found.append(aligned(extra["bias"]))
    if p.residual:
        residual = extra["residual"]
        if ends_with_rows(p, c):
            residual = jnp.broadcast_to(residual, shape[1:])[None]
        found.append(residual)
    return found


class Vectors(NamedTuple):
    """The epilogue's vectors of a tile in shared memory, as scratch of a launch.

    scales, bias: [consumers, `vector_room` of what a warpgroup has of each], or None. The scales of A come first. arrived: a
    barrier of each consumer.
    """

    scales: Any
    bias: Any
    arrived: Any

    def part(self, work: Work, name: str) -> Any:
        """A consumer's part of a vector."""
        first = vector_room(_length(work, "scale_a")) if name == "scale_b" else 0
        buffer = self.bias if name == "bias" else self.scales
        return buffer.at[lax.axis_index("wg"), pl.ds(first, _length(work, name))]


def vectors_scratch(work: Work, extra: dict[str, jax.Array]) -> Vectors:
    """The types of `Vectors`. extra: the epilogue's arrays."""
    names, wgs = vector_names(work.problem), work.config.compute_warpgroups

    def buffer(*own: str) -> Any:
        room = sum(vector_room(_length(work, name)) for name in own)
        return plgpu.SMEM((wgs, room), extra[own[0]].dtype) if own[0] in names else None

    arrived = plgpu.Barrier(num_arrivals=len(names), num_barriers=wgs)
    return Vectors(buffer("scale_a", "scale_b"), buffer("bias"), arrived)


def _side(work: Work, name: str) -> int | None:
    """The side of a tile that a vector lies along, which is the other one of the transposed product; None for a number."""
    if name != "bias" and work.problem.scales == "tensor":
        return None
    return int((name == "scale_a") == work.transposed)


def _length(work: Work, name: str) -> int:
    """How many elements of a vector a consumer loads for a tile; with a number the zeros behind it, as TMA has 16 bytes."""
    side = _side(work, name)
    return SCALAR if side is None else warpgroup_tile(work.config)[side]


def load_vectors(work: Work, t: jax.Array, refs: Refs) -> None:
    """Consumer: starts to load its part of tile t's vectors; all its threads have read what was there."""
    if refs.vectors is None:
        return
    place, wg = Place.of(work, t), lax.axis_index("wg")
    for name in vector_names(work.problem):
        side = _side(work, name)
        start = 0 * wg if side is None else place.start(side, 0)  # traced: JAX lets no constant slice end behind the array
        own = _of_product(getattr(refs, name), place).at[pl.ds(start, _length(work, name))]
        engine.copy_gmem_to_smem(own, refs.vectors.part(work, name), refs.vectors.arrived.at[wg])


def wait_for_vectors(refs: Refs) -> None:
    """Consumer: until they are there."""
    if refs.vectors is not None:
        plgpu.barrier_wait(refs.vectors.arrived.at[lax.axis_index("wg")])


def load_residual(work: Work, t: jax.Array, refs: Refs, out_smem: Any, arrived: Any) -> None:
    """Consumer: starts to load the residual of tile t into the epilogue's buffers, one for each epilogue tile."""
    place, wg = Place.of(work, t), lax.axis_index("wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffers, long ago
    for number, (i, j) in enumerate(epilogue_origins(work.config)):
        engine.copy_gmem_to_smem(place.block(refs.residual, i, j), out_smem.at[wg, number], arrived.at[wg])


def load_slot(place: Place, refs: Refs, out_smem: Any, arrived: Any, number: int) -> None:
    """Consumer: starts to load the residual of epilogue tile `number` at `place` into its slot of the epilogue's buffers."""
    wg, slot = lax.axis_index("wg"), number % SLOTS
    block = place.block(refs.residual, *epilogue_origins(place.work.config)[number])
    engine.copy_gmem_to_smem(block, out_smem.at[wg, slot], arrived.at[wg * SLOTS + slot])


def load_slots(work: Work, t: jax.Array, refs: Refs, out_smem: Any, arrived: Any) -> None:
    """Consumer: as `load_residual`, but of the first epilogue tiles only: as many as there are slots."""
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the slots, long ago
    place = Place.of(work, t)
    for number in range(min(SLOTS, epilogue_tiles(work.config))):
        load_slot(place, refs, out_smem, arrived, number)


def store_slots(work: Work, t: jax.Array, acc: Any, refs: Refs, out_smem: Any, arrived: Any) -> None:
    """Consumer: as `store` after `load_slots`; each slot is loaded again once its store has read it.

    The other consumer multiplies meanwhile, so that nothing waits for these loads.
    """
    place, wg, values = Place.of(work, t), lax.axis_index("wg"), acc[...]
    origins = epilogue_origins(work.config)
    wait_for_vectors(refs)
    for number, (i, j) in enumerate(origins):
        slot = number % SLOTS
        buffer = out_smem.at[wg, slot]
        plgpu.barrier_wait(arrived.at[wg * SLOTS + slot])
        part = values[i : i + ROWS, j : j + work.config.epilogue_tile_n].astype(jnp.float32)
        buffer[...] = _finish(work, refs, part, buffer, (i, j)).astype(buffer.dtype)
        plgpu.commit_smem()  # TMA sees what was written
        place.store(buffer, refs.out, i, j)
        if number + SLOTS < len(origins):
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            load_slot(place, refs, out_smem, arrived, number + SLOTS)


def load_residual_slab(work: Work, t: jax.Array, residual: Any, slab: int, stages: Any, stage: jax.Array, arrived: Any) -> None:
    """Producer: starts to load a part of the residual of tile t into a stage (`residual_steps`).

    In two copies, as a step of k has two.
    """
    place, half = Place.of(work, t), ROWS // 2
    if transposed(work.problem)[1]:
        place, rows = dataclasses.replace(place, share=(0, 0)), work.config.tile_m
        for number, buffers in enumerate((stages.a, stages.b)):
            block = place.rows(residual, rows, (2 * slab + number) * ROWS, ROWS)
            engine.copy_gmem_to_smem(block, buffers.at[stage, pl.ds(0, rows)], arrived)
        return
    for row in (0, half):
        block = dataclasses.replace(place, share=(ROWS * slab + row, 0)).rows(residual, half)
        engine.copy_gmem_to_smem(block, stages.b.at[stage, pl.ds(row, half)], arrived)


def residual_in(work: Work, stages: Any, arrived: Sequence[jax.Array]) -> Callable[[int], Any]:
    """Consumer: the residual of this warpgroup's rows and of 64 columns from column j on, in the stages that have `arrived`."""
    wg = lax.axis_index("wg")
    if transposed(work.problem)[1]:
        own = pl.ds(wg * ROWS, ROWS)
        return lambda j: (stages.a, stages.b)[j // ROWS % 2].at[arrived[j // ROWS // 2], own]
    stage = arrived[0]
    for number in range(1, len(arrived)):
        stage = jnp.where(wg == number, arrived[number], stage)
    return lambda j: stages.b.at[stage, :, pl.ds(j, ROWS)]


def store(
    work: Work,
    t: jax.Array,
    acc: Any,
    refs: Refs,
    *,
    out_smem: Any,
    cluster_sum: Any = None,
    residual_arrived: Any = None,
    rows_squared: Any = None,
    factors_smem: Any = None,
) -> None:
    """Consumer: rounds what the epilogue makes of the accumulator of tile number t to the output's dtype and stores it.

    TMA clips what lies outside the array. In a cluster along k the first block stores the sum of all blocks' accumulators.
    rows_squared: the accumulator of A's rows times themselves, where they are normalised. factors_smem: [warpgroups, 64], where
      the first block of a cluster along k keeps the rows' factors.
    """
    p, c, place = work.problem, work.config, Place.of(work, t)
    factors: Any = None
    norms = int(rows_squared is not None)
    if rows_squared is not None and cluster_sum is None:
        factors = row_factors(rows_squared[...], p.k, refs.epsilon)
    elif rows_squared is not None:

        def keep(total: jax.Array) -> None:
            factors_smem[lax.axis_index("wg")] = row_factors(total, p.k, refs.epsilon)
            engine.warpgroup_barrier()

        cluster_sum.add(rows_squared[...], t * (epilogue_tiles(c) + norms), keep)

    def finish(part: jax.Array, buffer: Any, i: int, j: int) -> jax.Array:
        if rows_squared is not None:
            of_rows = factors
            if cluster_sum is not None:
                own = factors_smem.at[lax.axis_index("wg")]
                of_rows = plgpu.load(own, layout=plgpu.Layout.WGMMA.reduce(1), optimized=False)
            part *= lax.broadcast_in_dim(of_rows, part.shape, (0,))
        return _finish(work, refs, part, buffer, (i, j))

    # The cluster's accumulators are added up an epilogue tile at a time: there is room for one of each block.
    def add(part: jax.Array, number: int, store: Callable[[jax.Array], None]) -> None:
        cluster_sum.add(part, t * (epilogue_tiles(c) + norms) + (norms + number), store)

    wait_for_vectors(refs)
    if refs.residual is not None:
        if_it_stores(c.cluster, lambda: plgpu.barrier_wait(residual_arrived.at[lax.axis_index("wg")]))
    wide = cluster_sum is not None or has_epilogue(p)
    values = acc if isinstance(acc, Sums) else acc[...]
    if not isinstance(acc, Sums) and warpgroup_tile(c)[1] < acc.shape[1]:  # `columns_of_b`
        values = values[:, : warpgroup_tile(c)[1]]
    store_tile(
        values.astype(jnp.float32 if wide else refs.out.dtype),
        out_smem.at[lax.axis_index("wg")],
        place.copies_to(refs.out),
        transpose=work.transposed,
        add=None if cluster_sum is None else add,
        finish=finish if has_epilogue(p) else None,
    )


def row_factors(rows_squared: jax.Array, k: int, epsilon: Any) -> jax.Array:
    """1 / sqrt(mean of squares + epsilon) of 64 rows, from their product with themselves, whose diagonal has the sums."""
    shape, layout = rows_squared.shape, plgpu.Layout.WGMMA
    row, column = (plgpu.broadcasted_iota(jnp.int32, shape, axis, layout=layout) for axis in (0, 1))
    squares = jnp.sum(jnp.where(row == column, rows_squared, 0.0), 1)
    return factor_of_squares(squares, k, epsilon[0])


def store_share(work: Work, t: jax.Array, acc: Any, refs: Refs, *, out_smem: Any, cluster_sum: Any) -> None:
    """Consumer: as `store`, of the epilogue tiles that are this block's share of the sum of a cluster along k."""
    c, place, blocks, values = work.config, Place.of(work, t), cluster_size(work.config), acc[...]
    origins = epilogue_origins(c)
    wait_for_vectors(refs)

    def use(number: int, total: jax.Array) -> None:
        at = origins[number]
        if has_epilogue(work.problem):
            total = _finish(work, refs, total, None, at)
        stores = iter([(total, place.copies_to(refs.out), *at)])
        store_in_turn(out_smem.at[lax.axis_index("wg")], stores, number // blocks, transpose=work.transposed)

    cluster_sum.add([values[i : i + ROWS, j : j + c.epilogue_tile_n] for i, j in origins], t, use)


def kept(work: Work, acc: Any, refs: Refs, residual: Callable[[int], Any] | None = None) -> tuple[jax.Array, ...]:
    """Consumer: the epilogue tiles of a tile in registers, in the output's dtype, for `store_kept`.

    residual: `residual_in`.
    """
    values, parts = acc[...], []
    width = work.config.epilogue_tile_n
    wait_for_vectors(refs)
    for i, j in epilogue_origins(work.config):
        part = values[i : i + ROWS, j : j + width]
        buffer = None if residual is None else residual(j // ROWS * ROWS)[...][:, j % ROWS : j % ROWS + width]
        part = _finish(work, refs, part, buffer, (i, j)) if has_epilogue(work.problem) else part
        parts.append(part.astype(refs.out.dtype))
    return tuple(parts)


def store_kept(place: Place, number: int, part: jax.Array, refs: Refs, out_smem: Any) -> None:
    """Consumer: stores epilogue tile `number` of those `kept` of the tile at `place`."""
    at = epilogue_origins(place.work.config)[number]

    stores = iter([(part, place.copies_to(refs.out), *at)])
    store_in_turn(out_smem.at[lax.axis_index("wg")], stores, number, transpose=place.work.transposed)


def _finish(work: Work, refs: Refs, values: jax.Array, buffer: Any, at: tuple[int, int]) -> jax.Array:
    """Consumer: the epilogue of an epilogue tile at (row, column) `at`, in float32; the residual lies in its buffer."""

    def vector(name: str) -> jax.Array:
        assert refs.vectors is not None
        side, part = _side(work, name), refs.vectors.part(work, name)
        found: jax.Array = part[0] if side is None else along(part, at[side], values.shape, side)
        return found

    if work.problem.scales == "tensor":
        values *= vector("scale_a") * vector("scale_b")
    if work.problem.scales == "row":
        values *= vector("scale_a")
        values *= vector("scale_b")
    if refs.bias is not None:
        values += vector("bias")
    values = in_registers(work.problem.activation, values)
    if refs.residual is not None:
        values += residual_of_tile(buffer, work.transposed)
    return values


def _of_product(ref: Any, place: Place) -> Any:
    """The vector of this product, of those of a batch or of one that all share."""
    return ref.at[place.product()] if ref.ndim == 2 else ref
