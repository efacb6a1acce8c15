"""The kernel of quantized_grouped_matmul: rows of a group times weights of 8 or 4 bits of its own, for NVIDIA Hopper.

A block is that of quantized_matmul (`matmul/quantized/kernel.py`), which loads, multiplies, scales and stores a tile. Here are
the tiles of groups of rows, whose sizes a block reads on its way: a tile ends where its group does, in loads and in stores.
Tiles of a group with the same weights are neighbours, so that they find them in L2; those of empty groups are not read.
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

from mgpu_ops.core import engine, group_scheduler, tile_scheduler
from mgpu_ops.core.gemm import ROWS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import Groups, GroupTile, StaticScheduler
from mgpu_ops.core.limits import consumer_registers
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import rows_view, store_rows
from mgpu_ops.grouped.kernel import zeros_to
from mgpu_ops.matmul.quantized.kernel import Block, Tile, scratch
from mgpu_ops.matmul.quantized.problem import Config, epilogue_rows, k_steps, storing_warpgroups
from mgpu_ops.quantized_grouped.problem import Problem, helper_registers, most_tiles


@dataclasses.dataclass(frozen=True)
class _Tile(Tile):
    """An output tile of the group that ends at row `end`."""

    end: Any = None


@dataclasses.dataclass(frozen=True)
class _Block(Block):
    """A block of products of groups, at one of its tiles.

    sizes: of the groups, int32 in global memory. x and out are `rows_view`s.
    """

    sizes: Any = None
    current: Any = None

    def tile(self, number: jax.Array) -> _Tile:
        """The tile at which the block is."""
        found: _Tile = self.current
        return found

    def row_end(self, tile: Tile) -> jax.Array:
        """The end of the tile's group: the other rows of the tile arrive as zeros."""
        assert isinstance(tile, _Tile)
        end: jax.Array = tile.end
        return end

    def store_rows(self, tile: Tile, staged: Any, row: jax.Array, column: jax.Array) -> None:
        """The group's rows; the others of the tile are not written."""
        assert isinstance(tile, _Tile)
        store_rows(staged, self.out, row, tile.end, column)

    def for_each_tile(self, body: Callable[[_Tile, Any], Any], carry: Any) -> tuple[jax.Array, Any]:
        """(row where the last group ends, carry) of `carry = body(tile, carry)` for this block's tiles."""
        p, c = self.p, self.c
        assert isinstance(p, Problem)
        columns = math.ceil(p.n / c.tile_n)

        def at(tile: GroupTile, carry: Any) -> Any:
            rows = tile_scheduler.cdiv(tile.end - tile.start, c.tile_m)
            row = tile.start + lax.rem(tile.number, rows) * c.tile_m
            return body(_Tile(row, lax.div(tile.number, rows) * c.tile_n, 0, (tile.group,), tile.end), carry)

        groups = Groups(self.sizes, p.m, p.group_offset)
        tiles = lambda size: tile_scheduler.cdiv(size, c.tile_m) * columns  # noqa: E731
        return group_scheduler.for_each_group_tile(
            groups, tiles, StaticScheduler(lax.axis_index("block"), self.blocks), at, carry
        )

    def store_zeros(self, end: jax.Array) -> None:
        """Stores zeros to the rows of no group, those from `end` on and of a shard those before its first group."""
        p, wg = self.p, lax.axis_index("wg")
        assert isinstance(p, Problem)
        storing = storing_warpgroups(self.c)
        staging = self.out_smem.at[0 if storing == 1 else wg]

        def store() -> None:
            stores = [zeros_to(self.out, end, p.m, staging, self.blocks, storing)]
            if p.group_offset:
                stores.append(zeros_to(self.out, 0, jnp.clip(self.sizes[0], 0, p.m), staging, self.blocks, storing))
            plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffer
            zeros = plgpu.layout_cast(jnp.zeros((ROWS, epilogue_rows(self.c)), staging.dtype), plgpu.Layout.WGMMA_TRANSPOSED)
            engine.transpose_ref(staging.at[0])[...] = zeros
            plgpu.commit_smem()
            for one in stores:
                one()

        if storing == self.c.compute_warpgroups:
            store()
        else:
            pl.when(wg < storing)(store)


def _kernel(p: Problem, c: Config, gpu: Gpu, blocks: int, *refs: Any, accumulators: Any, barriers: Any, **smem: Any) -> None:
    """One block: its output tiles one after the other, group after group, each in steps of k."""
    sizes, x, w, scales, *zero_points, out = refs
    engine.describe_from_start()
    engine.load_whole_lines(x, w)
    block = _Block(p, c, blocks, x, w, scales, zero_points[0] if zero_points else None, out, sizes=sizes, **smem)
    pipeline, steps = Pipeline(c.max_concurrent_steps, *barriers), k_steps(p, c)

    def producer() -> None:
        def load_tile(tile: _Tile, done: jax.Array) -> jax.Array:
            def load(step: jax.Array, _: None) -> None:
                pipeline.fill(step, lambda stage, full: block.load(tile, step - done, stage, full))

            # For a few steps the compiler would unroll the loop, but the producer has few registers.
            end = engine.opaque(done) + steps
            lax.fori_loop(done, end, load, None)
            return end

        _, done = block.for_each_tile(load_tile, jnp.int32(0))
        pipeline.drain(done)  # a block does not end before its last stages are read

    def helper() -> None:
        block.for_each_tile(lambda _, stage: block.order(pipeline, steps, stage), jnp.int32(0))

    def consumer(*accs: Any) -> None:
        own = dataclasses.replace(block, wg=lax.axis_index("wg"))  # asked for once: it takes a shuffle

        def tile(tile: _Tile, number: jax.Array) -> jax.Array:
            at = dataclasses.replace(own, current=tile)
            at.store(number, at.compute(accs, pipeline, number))
            return number + 1

        end, _ = block.for_each_tile(tile, jnp.int32(0))
        own.store_zeros(end)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends

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
    """Runs the kernel on x, weights, scales, int32 sizes of any values (with an offset, as `sizes.of_shard` gives them), and
    zero points where the problem has them.
    """
    x, w, scales, sizes, *zero_points = arrays
    blocks = min(gpu.sms, most_tiles(p, c.tile_m, c.tile_n))
    if not p.group_size:  # read up to the end of the last tile
        more = ((0, 0), (0, -p.n % c.tile_n))
        scales, *zero_points = (jnp.pad(vectors, more) for vectors in (scales, *zero_points))
    run = engine.kernel(
        functools.partial(_kernel, p, c, gpu, blocks),
        engine.Launch(
            "mgpu_ops_quantized_grouped_matmul",
            grid={"block": blocks},
            warpgroups=c.compute_warpgroups + 1 + (c.exchange == "x"),
            interpret=interpret,
        ),
        out_type=jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype),
        scratch_types=scratch(p, c),
    )
    out: jax.Array = run(sizes, rows_view(x), w, scales, *zero_points)
    return out.reshape(p.m, p.n)
