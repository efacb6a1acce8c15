"""The kernel of decoding_layer: the products between two layers' attention, one after the other in one launch, for few rows.

With few rows a product takes as long as its weights take to come. Where each product is a launch of its own, memory waits while
one ends and the next begins. Here all are one persistent launch: a producer warpgroup loads the first weights of the next
product into the stages of its pipeline while rows are still missing, which other blocks compute. Only the rows are waited for,
at counters in global memory (`core/grid.py`), by a warpgroup that loads them into the same stages.

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
import math
from collections.abc import Callable
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
from mgpu_ops.core.row_norm import factor_of_squares
from mgpu_ops.decoding.products import COLUMNS, MOST_ROWS, Cut, Product, counters_of, products_of


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

    # --- Producer, and its helper

    def produce(self) -> None:
        """Loads the weights of all units, whether or not the rows for them are there."""
        self.pipeline.drain(self._each_unit(self._load_weights))

    def load_rows(self) -> None:
        """Loads the rows of all units into the same stages, each when it is there; and finds the factors of some rows."""
        self._each_unit(self._load_rows, self._find_factors)

    def _each_unit(
        self, do: Callable[[int, jax.Array, jax.Array, jax.Array], None], without: Callable[[int], None] | None = None
    ) -> jax.Array:
        """Runs do(product, which of this block's units of it, unit, steps before it); returns all steps.

        without: runs for a product with a norm of which this block has no units.
        """
        done = jnp.int32(0)
        for i, product in enumerate(self.products):
            first, number = self.units(i)

            def one(
                j: jax.Array, done: jax.Array, i: int = i, first: jax.Array = first, steps: int = product.steps
            ) -> jax.Array:
                do(i, j, first + j * self.blocks, done)
                return done + steps

            done = lax.fori_loop(0, number, one, done)
            if without is not None and product.normalised:
                pl.when(number == 0)(functools.partial(without, i))
        return done

    def _weights_of(self, i: int, unit: jax.Array, k: jax.Array) -> list[Any]:
        """The tiles of a step of a unit."""
        product = self.products[i]
        part, group = self._place(i, unit)
        columns = [group * product.columns + tile * COLUMNS for tile in range(self.cut.tiles)]
        of_up = product.n - product.columns  # up's columns are behind all of gate's
        columns = [column + of_up if tile >= product.stored else column for tile, column in enumerate(columns)]
        return [self.weights[i].at[self._part_of_k(i, part, k), pl.ds(column, COLUMNS)] for column in columns]

    def _place(self, i: int, unit: jax.Array) -> tuple[jax.Array, jax.Array]:
        """Which part of k a unit is of, and which group of columns."""
        groups = jnp.int32(self.products[i].groups)
        return lax.div(unit, groups), lax.rem(unit, groups)

    def _part_of_k(self, i: int, part: jax.Array, k: jax.Array) -> Any:
        return pl.ds((part * self.products[i].steps + k) * self.cut.step, self.cut.step)

    def _load_weights(self, i: int, j: jax.Array, unit: jax.Array, done: jax.Array) -> None:
        def load(k: jax.Array, _: None) -> None:
            def copy(stage: jax.Array, full: Any) -> None:
                for tile, source in enumerate(self._weights_of(i, unit, k)):
                    engine.copy_gmem_to_smem(source, self.smem["weights"].at[stage, tile], full)

            self.pipeline.fill(done + k, copy)

        lax.fori_loop(0, self.products[i].steps, load, None)

    def _load_rows(self, i: int, j: jax.Array, unit: jax.Array, done: jax.Array) -> None:
        product, (part, _) = self.products[i], self._place(i, unit)
        if i:  # of the first product all is there
            self.wait_for_rows(i, part)
            if interpreting():
                pl.when(j == 0)(lambda: plgpu.barrier_wait(self.smem["met"].at[i - 1]))
            engine.global_memory_fence()

        def load(k: jax.Array, _: None) -> None:
            source = self.rows_of[i].at[self.rows, self._part_of_k(i, part, k)]
            copy = lambda stage, full: engine.copy_gmem_to_smem(source, self.smem["x"].at[stage], full)  # noqa: E731
            self.pipeline.fill(done + k, copy)
            if product.normalised:  # once consumers have something to do
                early = min(self.pipeline.stages, product.steps) - 1
                pl.when(jnp.logical_and(j == 0, k == early))(functools.partial(self._find_factors, i))

        lax.fori_loop(0, product.steps, load, None)
        if product.normalised:
            pl.when(j == 0)(functools.partial(self._load_factors, i))

    def _find_factors(self, i: int) -> None:
        """Of one row, or of some where there are more rows than blocks."""
        block = lax.axis_index("block")

        @pl.when(block < self.count)
        def _() -> None:
            for part in range(self.products[i].parts if i else 0):
                self.wait_for_rows(i, part)

            def find(n: jax.Array, _: None) -> None:
                row = block + n * self.blocks
                self.factors[i, row] = self._factor(self.rows_of[i].at[row])
                grid.arrive(self.counter(counters_of(self.products)[i].normed))

            lax.fori_loop(0, tile_scheduler.tiles_of_block(jnp.int32(self.count), block, self.blocks), find, None)

    def _factor(self, row: Any) -> jax.Array:
        """1 / the root mean square of a row, piece by piece, as the helper has few registers."""
        (width,) = row.shape
        piece = math.gcd(width, 1024)

        def add(n: jax.Array, squares: jax.Array) -> jax.Array:
            values = row[pl.ds(n * piece, piece)].astype(jnp.float32)
            return squares + values * values

        squares = lax.fori_loop(0, width // piece, add, jnp.zeros(piece, jnp.float32))
        return factor_of_squares(jnp.sum(squares), width, self.epsilon[0])

    def _load_factors(self, i: int) -> None:
        """Of all rows, which other blocks have found."""
        grid.wait(self.counter(counters_of(self.products)[i].normed), self.count)
        engine.global_memory_fence()
        engine.copy_gmem_to_smem(self.factors.at[i], self.smem["factors"].at[i], self.smem["factors_arrived"].at[i])

    # --- Consumers, each of which computes one of a unit's two tiles

    def consume(self, acc: Any) -> None:
        """Multiplies and stores its tile of all units."""
        done = jnp.int32(0)
        for i in range(len(self.products)):
            first, number = self.units(i)

            def compute(j: jax.Array, done: jax.Array, i: int = i, first: jax.Array = first) -> jax.Array:
                self._compute_unit(i, j, first + j * self.blocks, done, acc)
                return done + self.products[i].steps

            done = lax.fori_loop(0, number, compute, done)
            if interpreting():  # counters in global memory tell the race detector nothing
                plgpu.barrier_arrive(self.smem["met"].at[i])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def _compute_unit(self, i: int, j: jax.Array, unit: jax.Array, done: jax.Array, acc: Any) -> None:
        product, smem, tile = self.products[i], self.smem, lax.axis_index("wg")
        group = lax.rem(unit, jnp.int32(product.groups))

        def load_residual() -> None:
            """While the unit is multiplied, once its first rows are there: then the product before is, and those before it."""
            engine.global_memory_fence()
            source = self.residuals[i].at[self.rows, self._columns(i, group, tile)]
            engine.copy_gmem_to_smem(source, self.out, smem["residual_arrived"].at[tile])

        acc[...] = jnp.zeros(acc.shape, acc.dtype)

        def multiply(stage: jax.Array) -> None:
            weights, x = smem["weights"].at[stage, tile], smem["x"].at[stage]
            engine.wgmma(acc, engine.transpose_ref(weights), engine.transpose_ref(x))

        self.pipeline.multiply(done, product.steps, multiply, [load_residual] if self.residuals[i] is not None else ())
        if product.normalised:
            pl.when(j == 0)(lambda: plgpu.barrier_wait(smem["factors_arrived"].at[i]))
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
        return values * along(self.smem["factors"].at[i], 0, values.shape, 1)

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
            producer_registers=40,
            consumer_registers=200 if tiles == 2 else 96,
            helper=block.load_rows,
            helper_registers=72 if tiles == 2 else 56,
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
            "mgpu_ops_decoding_layer", {"block": blocks, "rows": 1}, warpgroups=tiles + 2, approx_math=True, interpret=interpret
        ),
        out_type=(
            *(jax.ShapeDtypeStruct((count, product.n), dtype) for product in products),
            *(floats((product.units if product.parts > 1 else 1, tiles, COLUMNS, rows)) for product in products),
            floats((len(products), MOST_ROWS)),
        ),
        scratch_types={
            "accumulators": engine.Accumulators(((COLUMNS, rows),), tiles),
            "smem": {
                "weights": plgpu.SMEM((cut.stages, tiles, cut.step, COLUMNS), dtype, transforms=transforms(COLUMNS)),
                "x": plgpu.SMEM((cut.stages, rows, cut.step), dtype, transforms=transforms(cut.step)),
                "staging": staging if interpret else plgpu.RefUnion(*staging),
                "factors": plgpu.SMEM((len(products), MOST_ROWS), jnp.float32),
                "ticket": plgpu.SMEM((tiles, 4), jnp.int32),
                "residual_arrived": plgpu.Barrier(num_barriers=tiles),
                "factors_arrived": plgpu.Barrier(num_barriers=len(products)),
                "offered": plgpu.Barrier(num_barriers=tiles // 2),
                "up_there": plgpu.Barrier(num_barriers=tiles // 2),
                "gated": plgpu.Barrier(num_barriers=tiles // 2),
                **Pipeline.barriers(cut.stages, copies=tiles + 1, consumers=tiles)._asdict(),
                **({"met": plgpu.Barrier(num_arrivals=tiles, num_barriers=len(products))} if interpret else {}),
            },
        },
    )(attended, x, epsilon, *weights, counts)
    return tuple(found[2 : len(products)])
