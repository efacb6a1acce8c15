"""What the kernels of grouped_matmul and ragged_contraction share: the block, warp-specialised and persistent (`run_block`).

A block has each `blocks`-th output tile, group after group, and reads the groups' sizes on its way; or, with a schedule that is
"dynamic", it takes the next one when it is free (`core/dynamic_scheduler.py`). Its warpgroups work at the
same time: the producer loads operands with TMA into the stages of a pipeline in shared memory, and the one or two consumers
multiply them with wgmma, each its share of the output tile. The pipeline runs over the ends of output tiles: the producer loads
the first stages of the next tile while consumers store the last one.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Iterable, Sequence
from typing import Any, NamedTuple, Protocol

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import dynamic_scheduler, engine, group_scheduler, inflight, tile_scheduler
from mgpu_ops.core.dynamic_scheduler import DynamicScheduler
from mgpu_ops.core.epilogue import Copy, deferred_stores, epilogue_origins, store_in_turn
from mgpu_ops.core.gemm import ROWS, SLOTS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import Groups, GroupTile, OrderedGroups, StaticScheduler
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import load_scattered, store_rows, wait_gathered
from mgpu_ops.grouped.config import PANEL, Config, consumer_registers, defers, is_dynamic, panel, short, storage
from mgpu_ops.grouped.problem import GroupedProblem, MixedProblem, dtype_of_rhs


@dataclasses.dataclass(frozen=True)
class Refs:
    """The refs of a kernel: arrays in global memory, and the shared memory of a block.

    lhs2, rhs2: the operands of a second product, or None.
    lhs_smem, rhs_smem: the pipeline's stages, [stages, ...]. out_smem: [consumers, buffers, rows, columns of an epilogue tile].
    accumulator: the handle of `engine.Accumulators`. short_accumulator: that of short tiles, or None.
    barriers: the pipeline's. bias: [groups, n] float32, or None.
    row_scale: [m] float32, of a gated gradient [m + tile_m], or None.
    residual: a `rows_view` of an array like the output, or None; its epilogue tiles are loaded into those of out_smem, and each
      buffer of each consumer has one of the barriers residual_arrived.
    row_indices: int32 [m], which rows of lhs are multiplied, or None: the m rows in their order.
    scale: of a contraction's 8-bit floats, [1], or None.
    scale_lhs, scale_rhs: of 8-bit floats, or None. With scales of blocks, their stages in shared memory are
      lhs_scale_smem, [stages, blocks of k, rows of a tile and 32 more], and rhs_scale_smem, [stages, blocks of k, 32], of which
      one for each 64 columns.
    counter: with a dynamic schedule what `counter` makes, else None. answered, work_smem: its barriers and slots.
    order: of a contraction with a dynamic schedule, what `sizes.largest_first` gives.
    """

    sizes: Any
    lhs: Any
    rhs: Any
    out: Any
    lhs2: Any = None
    rhs2: Any = None
    bias: Any = None
    row_scale: Any = None
    residual: Any = None
    row_indices: Any = None
    scale: Any = None
    scale_lhs: Any = None
    scale_rhs: Any = None
    lhs_scale_smem: Any = None
    rhs_scale_smem: Any = None
    accumulator: Any = None
    short_accumulator: Any = None
    lhs_smem: Any = None
    rhs_smem: Any = None
    out_smem: Any = None
    residual_arrived: Any = None
    barriers: Any = None
    counter: Any = None
    order: Any = None
    answered: Any = None
    work_smem: Any = None


type Read = Callable[[int, Callable[[jax.Array], None]], None]


class Stages(Protocol):
    """What a kernel does with an output tile, stage by stage. `tile.start` and `tile.end` are the rows of its group."""

    @property
    def problem(self) -> GroupedProblem: ...

    @property
    def rows(self) -> int:
        """Of lhs, those of no group included."""

    @property
    def blocks(self) -> int: ...

    @property
    def most_tiles(self) -> int:
        """At least as many as there are tiles, whatever the sizes are."""

    @property
    def config(self) -> Config: ...

    @property
    def refs(self) -> Refs: ...

    def of_short_tiles(self) -> Stages | None:
        """Consumer: the stages of a short tile. None: the config has no short tiles."""

    def groups(self) -> Groups | OrderedGroups:
        """The groups, in the order in which their tiles are numbered."""

    def tiles(self, size: jax.Array) -> jax.Array:
        """How many output tiles a group of `size` rows has (int32, traced)."""

    def steps(self, tile: GroupTile) -> Any:
        """How many pipeline steps of an output tile are multiplied."""

    @property
    def fewest_steps(self) -> int:
        """Any output tile has so many pipeline steps, where stores are deferred; 0: it depends on the tile."""

    @property
    def further_steps(self) -> int:
        """How many pipeline steps of an output tile come after those: `store` reads them."""

    def position(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        """The first row and column of an output tile."""

    @property
    def behind(self) -> int:
        """How many steps later the producer tells that what `load` copies without TMA is there. 0: it copies nothing so."""

    def begin_loads(self, tile: GroupTile) -> tuple[Any, ...]:
        """Producer, before an output tile: its `position`, and what else its loads need."""

    @property
    def heights(self) -> tuple[int, ...]:
        """How many rows a tile's loads can have, from the fewest to all. Empty: there is no choice."""

    def load(self, tile: GroupTile, position: tuple[Any, ...], step: jax.Array, rows: int, stage: jax.Array, full: Any) -> None:
        """Producer: starts the copies of the tile's `step`-th step into a stage; they arrive on the barrier `full`.

        rows: of the tile, the first ones that are loaded, one of `heights`; 0 where there is no choice.
        """

    def load_further(
        self, tile: GroupTile, position: tuple[Any, ...], step: int, rows: int, stage: jax.Array, full: Any
    ) -> None:
        """Producer: as `load`, for a step that `store` reads."""

    def staging(self) -> Any:
        """Consumer, before all tiles: the epilogue buffers that `store` and `finish` are given."""

    def share(self, tile: GroupTile) -> tuple[Any, ...]:
        """Consumer: which part of an output tile is this warpgroup's, and what else of the tile its steps need."""

    def begin_step(self, tile: GroupTile, step: jax.Array, share: tuple[Any, ...]) -> None:
        """Consumer, before a step is multiplied: starts loads that `store` needs."""

    def multiply(
        self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...], meanwhile: Callable[[], None] | None = None
    ) -> None:
        """Consumer: accs += the products of a full stage, this warpgroup's share. No wgmma is in flight afterwards.

        meanwhile: what to do beside them, where stores are deferred.
        """

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: Read) -> None:
        """Consumer: starts the stores of this warpgroup's share of an output tile, through its epilogue buffers.

        read(i, compute): waits for the i-th of the further steps, runs `compute(stage)` and declares the stage empty.
        """

    def nothing_held(self) -> Held:
        """Consumer, where stores are deferred: what is held before the first tile."""

    def keep(self, tile: GroupTile, accs: tuple[Any, ...]) -> Held:
        """Consumer, where stores are deferred: what `store` would store of an output tile, and where."""

    def store_held(self, held: Held, number: int, staging: Any) -> None:
        """Consumer: starts the store of one of the epilogue tiles of `held`, after those before it."""

    def finish(self, end: jax.Array, staging: Any) -> None:
        """Consumer: what is left to do after all tiles; groups end at row `end`."""


class Held(NamedTuple):
    """An output tile that was multiplied and not stored yet, of a consumer.

    place: int32 numbers that tell where it lies. parts: its epilogue tiles, rounded; a short tile has the first ones.
    """

    place: tuple[jax.Array, ...]
    parts: tuple[jax.Array, ...]


type ForEachTile = Callable[..., tuple[jax.Array, Any]]  # (row where the last group ends, carry) of carry = body(tile, carry)


def run_block(kernel: Stages, gpu: Gpu) -> None:
    """One block of a kernel."""
    c, refs = kernel.config, kernel.refs
    engine.load_whole_lines(refs.lhs, refs.rhs)
    pipeline = Pipeline(c.max_concurrent_steps, *refs.barriers)

    def for_each_tile(body: Callable[[GroupTile, Any], Any], carry: Any, asks: bool = False) -> tuple[jax.Array, Any]:
        block, groups = lax.axis_index("block"), kernel.groups()
        if refs.counter is None:
            static = StaticScheduler(block, kernel.blocks)
            return group_scheduler.for_each_group_tile(groups, kernel.tiles, static, body, carry)
        answers = Pipeline(SLOTS, *refs.answered)
        dynamic = DynamicScheduler(block, kernel.blocks, refs.counter.at[0], refs.work_smem, answers, kernel.most_tiles)
        return dynamic.for_each_group_tile(groups, kernel.tiles, body, carry, asks)

    def consumer(*accs: Any) -> None:
        staging = kernel.staging()
        compute = _compute_deferred if defers(c) else _compute
        kernel.finish(compute(kernel, pipeline, for_each_tile, accs, staging), staging)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    engine.specialize(
        lambda: _load(kernel, pipeline, for_each_tile),
        lambda: refs.accumulator.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


def _load(kernel: Stages, pipeline: Pipeline, for_each_tile: ForEachTile) -> None:
    """The producer loads the steps of all tiles."""
    behind = kernel.behind

    def landed(later: int, step: jax.Array) -> None:
        """Tells that the rows of the step `later` ones before the last are there, when they are."""
        wait_gathered(later)
        pipeline.filled(step)

    def load_tile(tile: GroupTile, before: jax.Array) -> jax.Array:
        position, steps = kernel.begin_loads(tile), kernel.steps(tile)
        done = before + steps

        def load_steps(rows: int = 0) -> None:
            def load_step(i: jax.Array, step: jax.Array) -> jax.Array:
                if behind:  # before it waits for an empty stage: consumers may need those rows to empty one
                    pl.when(i >= behind)(lambda: landed(behind - 1, step - behind))
                # Waits until the consumers have read what was in the stage; does not wait for the copies that it starts.
                pipeline.fill(step, functools.partial(kernel.load, tile, position, i, rows))
                return step + 1

            lax.fori_loop(0, steps, load_step, before)
            for later in reversed(range(behind)):
                pl.when(steps > later)(functools.partial(landed, later, done - 1 - later))
            for i in range(kernel.further_steps):
                pipeline.fill(done + i, functools.partial(kernel.load_further, tile, position, i, rows))

        _with_fewest(tile.end - position[0], kernel.heights, load_steps)
        return done + kernel.further_steps if kernel.further_steps else done

    _, steps = for_each_tile(load_tile, jnp.int32(0), asks=True)
    pipeline.drain(steps)  # a block does not end before its last stages are read


def _with_fewest(count: jax.Array, heights: Sequence[int], load: Callable[..., None]) -> None:
    """load(height) with the first of `heights` that is at least `count`, else with the last; load() if there are none.

    TMA takes 6 cycles to fill a row beyond a group's end with zeros, 1.6 to load one. The branches are around the steps of a
    tile, not in each.
    """
    if len(heights) < 2:
        load(*heights)
        return
    height, *higher = heights
    lax.cond(count <= height, functools.partial(load, height), lambda: _with_fewest(count, higher, load))


def _compute(kernel: Stages, pipeline: Pipeline, for_each_tile: ForEachTile, accs: tuple[Any, ...], staging: Any) -> jax.Array:
    """The row where the last group ends. A consumer computes all tiles, and stores each before it multiplies the next."""

    def compute_share(tile: GroupTile, before: jax.Array, kernel: Stages, accs: tuple[Any, ...]) -> jax.Array:
        share = kernel.share(tile)
        _clear(accs)

        def multiply_step(i: jax.Array, step: jax.Array) -> jax.Array:
            kernel.begin_step(tile, i, share)
            # Waits until the copies into the stage have arrived, and declares it empty when wgmma has read it.
            pipeline.read(step, lambda stage: kernel.multiply(accs, stage, share))
            return step + 1

        done = lax.fori_loop(0, kernel.steps(tile), multiply_step, before)
        # The stores leave shared memory while the next tile is multiplied. Meanwhile the producer fills the stages.
        kernel.store(tile, accs, staging, lambda i, compute: pipeline.read(done + i, compute))
        return done + kernel.further_steps if kernel.further_steps else done

    def compute_tile(tile: GroupTile, done: jax.Array) -> jax.Array:
        return _as_shared(kernel, tile, accs, functools.partial(compute_share, tile, done))

    return for_each_tile(compute_tile, jnp.int32(0))[0]


def _as_shared[T](kernel: Stages, tile: GroupTile, accs: tuple[Any, ...], compute: Callable[..., T]) -> T:
    """compute(kernel, accs) with the stages and the accumulators of the tile's kind."""
    of_short = kernel.of_short_tiles()
    if of_short is None:
        return compute(kernel, accs)
    result: T = lax.cond(
        _is_short(kernel, tile),
        lambda: kernel.refs.short_accumulator.scope(lambda *own: compute(of_short, own)),
        lambda: compute(kernel, accs),
    )
    return result


def _compute_deferred(
    kernel: Stages, pipeline: Pipeline, for_each_tile: ForEachTile, accs: tuple[Any, ...], staging: Any
) -> jax.Array:
    """As `_compute`, but each tile is stored while the next one is multiplied.

    At its end a tile is rounded, which halves its registers, and kept. Each of the next tile's first steps stores an epilogue
    tile of it, or several, between the start of its wgmma and the wait for them. One of too few steps begins after the store.
    """
    tiles = epilogue_tiles(kernel.config)
    stores = deferred_stores(tiles, kernel.fewest_steps or tiles)

    def store_some(held: Held, there: jax.Array, some: range) -> None:
        """there: how many epilogue tiles are held."""

        def store_parts(numbers: Iterable[int]) -> None:
            for i in numbers:
                kernel.store_held(held, i, staging)

        for numbers in ((i,) for i in some) if kernel.config.short_tiles else (some,):
            pl.when(there > numbers[0])(functools.partial(store_parts, numbers))

    def store_all(held: Held, there: jax.Array) -> None:
        for some in stores:
            store_some(held, there, some)

    def compute_share(tile: GroupTile, state: Any, kernel: Stages, accs: tuple[Any, ...]) -> tuple[jax.Array, Held]:
        before, there, held = state
        share, steps = kernel.share(tile), kernel.steps(tile)
        before = engine.opaque(before)  # the compiler would change loops of a known number of steps

        def multiply(i: Any, meanwhile: Callable[[], None] | None) -> None:
            kernel.begin_step(tile, i, share)
            pipeline.read(before + i, lambda stage: kernel.multiply(accs, stage, share, meanwhile))

        def step(i: jax.Array, _: None) -> None:
            with inflight.iteration():
                multiply(i, None)

        _clear(accs)  # here, not at its end: while the next tile is looked for, sums need no second registers

        def store_beside_steps() -> None:
            for i, some in enumerate(stores):
                multiply(i, functools.partial(store_some, held, there, some))

        first: Any = len(stores)
        if not kernel.fewest_steps:
            first = jnp.where(steps < len(stores), 0, first)
            pl.when(steps < len(stores))(lambda: store_all(held, there))
            pl.when(steps >= len(stores))(store_beside_steps)
        else:
            store_beside_steps()
        lax.fori_loop(before + first, before + steps, lambda at, _: step(at - before, None), None)
        return before + steps, kernel.keep(tile, accs)

    def compute_tile(tile: GroupTile, state: Any) -> tuple[jax.Array, jax.Array, Held]:
        done, held = _as_shared(kernel, tile, accs, functools.partial(compute_share, tile, state))
        if not kernel.config.short_tiles:
            return done, jnp.int32(tiles), held
        return done, jnp.where(_is_short(kernel, tile), epilogue_tiles(short(kernel.config)), tiles), held

    end, (_, there, held) = for_each_tile(compute_tile, (jnp.int32(0), jnp.int32(0), kernel.nothing_held()))
    store_all(held, there)
    return end


def _is_short(kernel: Stages, tile: GroupTile) -> jax.Array:
    return tile.end - kernel.position(tile)[0] <= ROWS


def _clear(accs: tuple[Any, ...]) -> None:
    for acc in accs:
        acc[...] = jnp.zeros(acc.shape, jnp.float32)


def nothing_held(c: Config, dtype: str, places: int) -> Held:
    """A `Held` of no tile, with so many numbers for its place."""
    return Held((jnp.int32(0),) * places, (_empty_part(c, dtype),) * epilogue_tiles(c))


def _empty_part(c: Config, dtype: Any) -> jax.Array:
    return plgpu.layout_cast(jnp.zeros((ROWS, c.epilogue_tile_n), dtype), plgpu.Layout.WGMMA)


def of_rows(vector: Any, row: jax.Array, shape: tuple[int, ...]) -> jax.Array:
    """The elements of a float32 vector in global memory for the rows of a tile from `row` on, as values of `shape`.

    Those of rows beyond its end, which are not stored, are its last one: it needs no padding.
    """
    rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=plgpu.Layout.WGMMA.reduce(1)) + row
    return lax.broadcast_in_dim(load_scattered(vector, jnp.minimum(rows, vector.shape[0] - 1)), shape, (0,))


type Finish = Callable[[jax.Array, int], jax.Array]  # of an epilogue tile and its number: what is stored in its place


def in_units(index: jax.Array, anywhere: bool) -> jax.Array:
    """Where a tile lies that is held, so that `of_units` gives it back and the compiler sees of what it is a multiple.

    anywhere: it may be any multiple of 8, as tiles are that end with a row; others are multiples of a panel.
    """
    return lax.div(jnp.int32(index), jnp.int32(8 if anywhere else PANEL))


def of_units(units: jax.Array, anywhere: bool) -> jax.Array:
    """The reverse of `in_units`."""
    return units * (8 if anywhere else PANEL)


def hold(
    c: Config, shared: Config, values: jax.Array, dtype: Any, place: tuple[Any, ...], finish: Finish | None = None
) -> Held:
    """A `Held` of a consumer's share of an output tile, float32; of each epilogue tile, what `finish` makes of it.

    shared: `c`, or of a short tile `config.short(c)`.
    """
    parts = []
    for number, (i, j) in enumerate(epilogue_origins(shared)):
        part = values[i : i + ROWS, j : j + c.epilogue_tile_n]
        part = part if finish is None else finish(part, number)
        parts.append(part.astype(dtype))
    parts += [_empty_part(c, dtype) for _ in range(epilogue_tiles(c) - len(parts))]
    return Held(tuple(map(jnp.int32, place)), tuple(parts))


def store_part(c: Config, held: Held, number: int, staging: Any, copy: Copy) -> None:
    """Starts the store of one of the epilogue tiles that are held, through a consumer's buffers in turn."""
    store_in_turn(staging, iter([(held.parts[number], copy, *epilogue_origins(c)[number])]), number)


def scratch_types(p: MixedProblem, c: Config, lhs: tuple[int, ...], rhs: tuple[int, ...], copies: int) -> dict[str, Any]:
    """The shared memory of a block, for `Refs`: stages of shapes `lhs` and `rhs`, each filled by so many copies."""
    stages = c.max_concurrent_steps
    lhs_row, rhs_row = (engine.operand_transforms(panel(dtype), dtype, 128) for dtype in (p.dtype, dtype_of_rhs(p)))
    out_transforms = engine.operand_transforms(c.epilogue_tile_n, p.out_dtype, 128)
    return (dynamic_scheduler.scratch_types(c.compute_warpgroups) if is_dynamic(c) else {}) | {
        **accumulators(c, lambda shared: (warpgroup_tile(shared),)),
        "lhs_smem": plgpu.SMEM((stages, *lhs), p.dtype, transforms=lhs_row),
        "rhs_smem": plgpu.SMEM((stages, *rhs), dtype_of_rhs(p), transforms=rhs_row),
        "out_smem": plgpu.SMEM(storage(p, c).out_shape, p.out_dtype, transforms=out_transforms),
        "barriers": Pipeline.barriers(stages, copies=copies, consumers=c.compute_warpgroups),
    }


def accumulators(c: Config, shapes: Callable[[Config], tuple[tuple[int, int], ...]]) -> dict[str, Any]:
    """Of `Refs`: a consumer's accumulators, whose shapes follow from how a tile is shared, and those of a short tile."""
    made = {"accumulator": engine.Accumulators(shapes(c), c.compute_warpgroups)}
    if c.short_tiles:
        made["short_accumulator"] = engine.Accumulators(shapes(short(c)), c.compute_warpgroups)
    return made


def zeros_to(out: Any, start: Any, end: Any, staging: Any, blocks: int, consumers: int) -> Callable[[], None]:
    """What stores this warpgroup's share of the rows of `out` from `start` to `end`, one of so many blocks' first consumers.

    out: a `rows_view`. staging: a warpgroup's epilogue buffers, of which the first is zeros when the stores are made.
    """
    _, height, width = staging.shape
    across = math.ceil(out.shape[3] / width)
    tiles = tile_scheduler.cdiv(end - start, height) * across
    workers = blocks * consumers
    worker = lax.axis_index("block") * consumers + lax.axis_index("wg")

    def store(i: jax.Array, _: tuple[()]) -> tuple[()]:
        tile = worker + i * workers
        row, column = lax.div(tile, jnp.int32(across)) * height, lax.rem(tile, jnp.int32(across)) * width
        store_rows(staging.at[0], out, start + row, end, column)
        return _

    def run() -> None:
        lax.fori_loop(0, tile_scheduler.tiles_of_block(tiles, worker, workers), store, ())

    return run


def counter(c: Config) -> tuple[Any, ...]:
    """What a launch passes after the sizes: with a dynamic schedule a ref to a counter of tiles, int32 [1].

    XLA sets it to zero for each call. So calls know nothing of each other, in whatever stream or CUDA graph they run.
    """
    return (jax.new_ref(jnp.zeros(1, jnp.int32)),) if is_dynamic(c) else ()


def counter_last(c: Config, refs: Sequence[Any]) -> tuple[Any, ...]:
    """A kernel's refs with that of `counter` at the end; with a static schedule None is there."""
    sizes, *rest = refs
    return (sizes, *rest[1:], rest[0]) if is_dynamic(c) else (sizes, *rest, None)
