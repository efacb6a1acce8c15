"""The kernel of decoding_layer: the products between two layers' attention, one after the other in one launch, for few rows.

With few rows a product takes as long as its weights take to come. Where each product is a launch of its own, memory waits while
one ends and the next begins. Here all are one persistent launch: a producer warpgroup loads the first weights of the next
product into the stages of its pipeline while rows are still missing, which other blocks compute. Only the rows are waited for,
at counters in global memory (`core/grid.py`).

- *Transposed.* wgmma computes 64 columns of weights by 8 to 64 rows, as matmul's kernel does with few rows. A step of the
  pipeline brings rows and two tiles of 64 columns, neighbours or gate and up of the same columns, one for each consumer.
- *Units.* A unit is two tiles over a part of k. The units of all products follow each other and are dealt to the blocks in
  turn, the parts of k that are there first before others. The block that is last to finish a part adds up all parts in their
  order: the same values give the same bits.
- *Norms.* A row's factor is found once, by one block, and applied to what the row was multiplied with: (x r) w = r (x w).

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor, memory consistency model).
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, grid, tile_scheduler
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.epilogue import along
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.row_norm import row_factor
from mgpu_ops.decoding.products import COLUMNS, Cut, Product, counters_of, products_of


@dataclasses.dataclass(frozen=True)
class _Block:
    """One block's part of all products.

    rows_of: what each product multiplies. outs: the results. sums: float32 [units, 2, 64, rows] of products in parts of k.
    residuals: what is added to each result, or None. factors: of a product's rows, float32, where they are normalised.
    counts: int32, all counters; `counters_of` says which is which.
    """

    products: tuple[Product, ...]
    activation: str
    count: int  # rows
    blocks: int
    rows_of: tuple[Any, ...]
    weights: tuple[Any, ...]
    residuals: tuple[Any, ...]
    outs: tuple[Any, ...]
    sums: tuple[Any, ...]
    factors: Any
    epsilon: Any
    counts: Any
    smem: dict[str, Any]

    @property
    def cut(self) -> Cut:
        return self.products[0].cut

    @property
    def pipeline(self) -> Pipeline:
        return Pipeline(self.cut.stages, self.smem["full"], self.smem["empty"])

    @property
    def out(self) -> Any:
        """This consumer's buffer of results, and of residuals before them."""
        wg, half = lax.axis_index("wg"), self.cut.tiles // 2
        return self.smem["staging"][0].at[lax.rem(wg, jnp.int32(half)) * 2 + lax.div(wg, jnp.int32(half))]

    @property
    def up(self) -> Any:
        """Sums of up, float32, each where the buffers of the two consumers are that have gate and up of the same columns."""
        return self.smem["staging"][1]

    @property
    def rows(self) -> Any:
        """All rows of an array, with some beyond the last, which TMA fills with zeros and does not store."""
        return pl.ds(lax.axis_index("rows") * self.cut.rows, self.cut.rows)

    def counter(self, at: Any) -> Any:
        return self.counts.at[pl.ds(at, 1)]

    def units(self, i: int) -> tuple[jax.Array, jax.Array]:
        """This block's first unit of product i, and how many it has: every `blocks`-th of the units of all products."""
        before = sum(product.units for product in self.products[:i])
        first = lax.rem(lax.axis_index("block") + (-before % self.blocks), jnp.int32(self.blocks))
        return first, tile_scheduler.tiles_of_block(jnp.int32(self.products[i].units), first, self.blocks)

    def wait_for_rows(self, i: int, part: Any) -> None:
        """Until what a part of k of product i multiplies is there, of the product before it."""
        self._wait_for(i - 1, part, self.products[i].parts)

    def _wait_for(self, i: int, chunk: Any, chunks: int) -> None:
        """Until one of so many chunks of the result of product i is there."""
        product = self.products[i]
        grid.wait(self.counter(counters_of(self.products)[i].done + chunk), product.groups // chunks * product.stored)

    # --- Producer

    def produce(self) -> None:
        """Loads the steps of all units."""
        done = jnp.int32(0)
        for i in range(len(self.products)):
            first, number = self.units(i)

            def load(j: jax.Array, done: jax.Array, i: int = i, first: jax.Array = first) -> jax.Array:
                self._load_unit(i, j, first + j * self.blocks, done)
                return done + self.products[i].steps

            done = lax.fori_loop(0, number, load, done)
        self.pipeline.drain(done)

    def _load_unit(self, i: int, j: jax.Array, unit: jax.Array, done: jax.Array) -> None:
        """The steps of this block's unit number j of product i: weights at once, rows when they are there."""
        product, pipeline = self.products[i], self.pipeline
        part, group = lax.div(unit, jnp.int32(product.groups)), lax.rem(unit, jnp.int32(product.groups))

        def load_weights(k: jax.Array, stage: jax.Array, full: Any) -> None:
            down = pl.ds((part * product.steps + k) * self.cut.step, self.cut.step)
            for tile in range(self.cut.tiles):
                column = group * product.columns + tile * COLUMNS
                if tile >= product.stored:  # of up
                    column += product.n - product.columns
                source = self.weights[i].at[down, pl.ds(column, COLUMNS)]
                engine.copy_gmem_to_smem(source, self.smem["weights"].at[stage, tile], full)

        def load_rows(k: jax.Array, stage: jax.Array, full: Any) -> None:
            source = self.rows_of[i].at[self.rows, pl.ds((part * product.steps + k) * self.cut.step, self.cut.step)]
            engine.copy_gmem_to_smem(source, self.smem["x"].at[stage], full)

        def load(k: jax.Array, _: None) -> None:
            def copy(stage: jax.Array, full: Any) -> None:
                load_weights(k, stage, full)
                load_rows(k, stage, full)

            pipeline.fill(done + k, copy)

        def load_late(k: jax.Array, _: None) -> None:
            stage = lax.rem(done + k, jnp.int32(pipeline.stages))
            load_rows(k, stage, pipeline.full.at[stage])

        ahead = min(pipeline.stages, product.steps) if i else 0
        if i:  # of the first product all is there
            fill = lambda k, _: pipeline.fill(done + k, functools.partial(load_weights, k))  # noqa: E731
            lax.fori_loop(0, ahead, fill, None)
            self.wait_for_rows(i, part)
            if interpreting():
                pl.when(j == 0)(lambda: plgpu.barrier_wait(self.smem["met"].at[2 * i - 1]))
            engine.global_memory_fence()
            lax.fori_loop(0, ahead, load_late, None)
        lax.fori_loop(ahead, product.steps, load, None)

    # --- Consumers, each of which computes one of a unit's two tiles

    def consume(self, acc: Any) -> None:
        """Multiplies and stores its tile of all units."""
        done = jnp.int32(0)
        for i, product in enumerate(self.products):
            first, number = self.units(i)
            if product.normalised:
                pl.when(lax.axis_index("wg") == 0)(functools.partial(self._find_factors, i))
                self._meet(2 * i)

            def compute(j: jax.Array, done: jax.Array, i: int = i, first: jax.Array = first) -> jax.Array:
                self._compute_unit(i, first + j * self.blocks, done, acc)
                return done + self.products[i].steps

            done = lax.fori_loop(0, number, compute, done)
            self._meet(2 * i + 1)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _meet(self, number: int) -> None:
        """Interpreted, the consumers wait for each other: counters in global memory tell the race detector nothing."""
        if interpreting():
            plgpu.barrier_arrive(self.smem["met"].at[number])
            plgpu.barrier_wait(self.smem["met"].at[number])

    def _find_factors(self, i: int) -> None:
        """Of one row, or of some where there are more rows than blocks."""
        block = lax.axis_index("block")

        @pl.when(block < self.count)
        def _() -> None:
            for part in range(self.products[i].parts if i else 0):
                self.wait_for_rows(i, part)

            def find(n: jax.Array, _: None) -> None:
                row = block + n * self.blocks
                self.factors[i, row] = row_factor(self.rows_of[i].at[row], self.epsilon[0])
                grid.arrive(self.counter(counters_of(self.products)[i].normed))

            lax.fori_loop(0, tile_scheduler.tiles_of_block(jnp.int32(self.count), block, self.blocks), find, None)

    def _compute_unit(self, i: int, unit: jax.Array, done: jax.Array, acc: Any) -> None:
        product, smem, tile = self.products[i], self.smem, lax.axis_index("wg")
        group = lax.rem(unit, jnp.int32(product.groups))
        if self.residuals[i] is not None:  # it arrives while the unit is multiplied
            if i:  # the result of the first product; this block may have had no unit that waited for it
                self._wait_for(0, 0, 1)
                engine.global_memory_fence()
            source = self.residuals[i].at[self.rows, self._columns(i, group, tile)]
            engine.copy_gmem_to_smem(source, self.out, smem["residual_arrived"].at[tile])
        acc[...] = jnp.zeros(acc.shape, acc.dtype)

        def multiply(stage: jax.Array) -> None:
            weights, x = smem["weights"].at[stage, tile], smem["x"].at[stage]
            engine.wgmma(acc, engine.transpose_ref(weights), engine.transpose_ref(x))

        self.pipeline.multiply(done, product.steps, multiply)
        if product.gated:
            pl.when(tile >= product.stored)(lambda: self._give_up(acc))
            pl.when(tile < product.stored)(lambda: self._gate(i, group, acc))
        elif product.parts == 1:
            self._finish(i, group, acc[...])
        else:
            self.sums[i][unit, tile] = acc[...]
            ticket = smem["ticket"].at[tile]
            grid.take_ticket(self.counter(counters_of(self.products)[i].tickets + self.cut.tiles * group + tile), ticket)
            last = ticket[0] == product.parts - 1
            pl.when(last)(lambda: self._finish(i, group, self._sum(i, group)))
            if self.residuals[i] is not None:
                pl.when(jnp.logical_not(last))(lambda: plgpu.barrier_wait(smem["residual_arrived"].at[tile]))

    def _give_up(self, acc: Any) -> None:
        """Hands the sums of up to the consumer that has those of gate, through the buffers of both."""
        number = lax.axis_index("wg") - self.cut.tiles // 2
        plgpu.barrier_wait(self.smem["offered"].at[number])
        self.up.at[number][...] = acc[...]
        engine.warpgroup_barrier()
        plgpu.barrier_arrive(self.smem["up_there"].at[number])
        plgpu.barrier_wait(self.smem["gated"].at[number])  # the buffers are free again

    def _gate(self, i: int, group: jax.Array, acc: Any) -> None:
        """Stores activation(gate) * up."""
        number = lax.axis_index("wg")
        plgpu.barrier_arrive(self.smem["offered"].at[number])  # it has no copies on their way to or from its buffer
        plgpu.barrier_wait(self.smem["up_there"].at[number])
        up = plgpu.load(self.up.at[number], layout=plgpu.Layout.WGMMA, optimized=False)
        engine.warpgroup_barrier()
        gate, up = (self._normalised(i, values) for values in (acc[...], up))
        self._store(i, group, in_registers(self.activation, gate) * up)
        plgpu.barrier_arrive(self.smem["gated"].at[number])

    def _sum(self, i: int, group: jax.Array) -> jax.Array:
        """Of all parts of k of this consumer's tile."""
        product, tile = self.products[i], lax.axis_index("wg")
        parts = (self.sums[i].at[part * product.groups + group, tile] for part in range(product.parts))
        loaded = (plgpu.load(part, layout=plgpu.Layout.WGMMA, optimized=False) for part in parts)
        return functools.reduce(lambda x, y: x + y, loaded)

    def _finish(self, i: int, group: jax.Array, values: jax.Array) -> None:
        """Stores this consumer's tile of a result without a gate."""
        values = self._normalised(i, values)
        if self.residuals[i] is not None:
            tile = lax.axis_index("wg")
            plgpu.barrier_wait(self.smem["residual_arrived"].at[tile])
            buffer = engine.transpose_ref(self.out)
            residual = plgpu.layout_cast(plgpu.load(buffer, layout=plgpu.Layout.WGMMA_TRANSPOSED), plgpu.Layout.WGMMA)
            values += residual.astype(jnp.float32)
        self._store(i, group, values)

    def _normalised(self, i: int, values: jax.Array) -> jax.Array:
        if not self.products[i].normalised:
            return values
        grid.wait(self.counter(counters_of(self.products)[i].normed), self.count)
        return values * along(self.factors.at[i], 0, values.shape, 1)

    def _columns(self, i: int, group: jax.Array, tile: jax.Array) -> Any:
        """Of the result, of a tile."""
        return pl.ds(group * self.products[i].columns + tile * COLUMNS, COLUMNS)

    def _store(self, i: int, group: jax.Array, values: jax.Array) -> None:
        """Stores 64 columns of the result, of which `values` [64, rows] are the transposed ones, and says so."""
        tile, product, places = lax.axis_index("wg"), self.products[i], counters_of(self.products)[i]
        buffer = self.out
        rounded = plgpu.layout_cast(values.astype(buffer.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
        engine.transpose_ref(buffer)[...] = rounded
        plgpu.commit_smem()  # TMA sees what was written
        plgpu.copy_smem_to_gmem(buffer, self.outs[i].at[self.rows, self._columns(i, group, tile)])
        plgpu.wait_smem_to_gmem(0)
        grid.arrive(self.counter(places.done + lax.div(group * places.chunks, jnp.int32(product.groups))))


def launch(
    activation: str, next_normalised: bool, gpu: Gpu, *arrays: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Runs the kernel on attended, x, epsilon [1], and the weights; returns the new x, and what follows it where w_next is."""
    attended, x, epsilon, *weights = arrays
    blocks = 1 if interpret else gpu.sms
    count, dtype = len(x), x.dtype
    cut = Cut.of(count, gpu)
    products, rows, tiles = products_of(cut, attended, weights, next_normalised, gpu.sms), cut.rows, cut.tiles
    counts = jax.new_ref(jnp.zeros(counters_of(products)[-1].end, jnp.int32))

    def body(*refs: Any, accumulators: Any, smem: dict[str, Any]) -> None:
        attended, x, epsilon, *rest = refs
        own, counts, rest = rest[: len(weights)], rest[len(weights)], rest[len(weights) + 1 :]
        outs, sums, factors = rest[: len(products)], rest[len(products) : -1], rest[-1]
        block = _Block(
            products=products,
            activation=activation,
            count=count,
            blocks=blocks,
            rows_of=(attended, *outs[:-1]),
            weights=tuple(own),
            residuals=(x, None, outs[0], None)[: len(products)],
            outs=tuple(outs),
            sums=tuple(sums),
            factors=factors,
            epsilon=epsilon,
            counts=counts,
            smem=smem,
        )
        engine.specialize(
            block.produce,
            lambda: accumulators.scope(block.consume),
            consumers=tiles,
            producer_registers=56,
            consumer_registers=448 // tiles,
        )

    floats = functools.partial(jax.ShapeDtypeStruct, dtype=jnp.float32)
    transforms = functools.partial(engine.operand_transforms, dtype=dtype)
    staging = (
        plgpu.SMEM((tiles, rows, COLUMNS), dtype, transforms=transforms(COLUMNS)),
        plgpu.SMEM((tiles // 2, COLUMNS, rows), jnp.float32),
    )
    found = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_decoding_layer", {"block": blocks, "rows": 1}, warpgroups=tiles + 1, approx_math=True, interpret=interpret
        ),
        out_type=(
            *(jax.ShapeDtypeStruct((count, product.n), dtype) for product in products),
            *(floats((product.units if product.parts > 1 else 1, tiles, COLUMNS, rows)) for product in products),
            floats((len(products), max(rows, count))),
        ),
        scratch_types={
            "accumulators": engine.Accumulators(((COLUMNS, rows),), tiles),
            "smem": {
                "weights": plgpu.SMEM((cut.stages, tiles, cut.step, COLUMNS), dtype, transforms=transforms(COLUMNS)),
                "x": plgpu.SMEM((cut.stages, rows, cut.step), dtype, transforms=transforms(cut.step)),
                "staging": staging if interpret else plgpu.RefUnion(*staging),
                "ticket": plgpu.SMEM((tiles, 4), jnp.int32),
                "residual_arrived": plgpu.Barrier(num_barriers=tiles),
                "offered": plgpu.Barrier(num_barriers=tiles // 2),
                "up_there": plgpu.Barrier(num_barriers=tiles // 2),
                "gated": plgpu.Barrier(num_barriers=tiles // 2),
                **Pipeline.barriers(cut.stages, copies=tiles + 1, consumers=tiles)._asdict(),
                **({"met": plgpu.Barrier(num_arrivals=tiles, num_barriers=2 * len(products))} if interpret else {}),
            },
        },
    )(attended, x, epsilon, *weights, counts)
    return tuple(found[2 : len(products)])
