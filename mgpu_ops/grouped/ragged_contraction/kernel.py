"""The kernel of ragged_contraction: lhs[m, k]^T rhs[m, n] over the rows of each group, float32 accumulation, for NVIDIA Hopper.

Built as grouped_matmul's (see there), with other tiles: the output is [groups, k, n], and the steps of a tile are the group's
rows, tile_k at a time. The last step may run over the group's end: TMA fills those rows of both operands with zeros
(`engine.load_rows`), so that whatever lies there, in another group or in padding, cannot reach the sum, not even a NaN.
"""

from __future__ import annotations

import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.epilogue import store_tile
from mgpu_ops.core.gemm import warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.grouped.groups import PANEL, Config, consumer_registers, storage
from mgpu_ops.grouped.ragged_contraction.problem import Problem


def _tiles(p: Problem, c: Config) -> tuple[int, int]:
    """Output tiles of a group along k and n."""
    return math.ceil(p.k / c.tile_m), math.ceil(p.n / c.tile_n)


def _position(p: Problem, c: Config, tile: tile_scheduler.GroupTile) -> tuple[Any, Any]:
    """First k and first n of an output tile."""
    rows, columns = _tiles(p, c)
    row, column = tile_scheduler.strips(tile.number, jnp.int32(rows), columns, c.raster_width)
    return row * c.tile_m, column * c.tile_n


def _steps(c: Config, tile: tile_scheduler.GroupTile) -> Any:
    return tile_scheduler.cdiv(tile.end - tile.start, c.tile_k)


def _load(p: Problem, c: Config, pipeline: Pipeline, lhs_ref: Any, rhs_ref: Any, lhs_smem: Any, rhs_smem: Any) -> Any:
    """What the producer warpgroup does for an output tile: the pipeline's next steps, each tile_k rows of the group."""

    def load(tile: tile_scheduler.GroupTile, done: Any) -> Any:
        position = _position(p, c, tile)

        def row_step(i: Any, step: Any) -> Any:
            def copy(stage: Any, full: Any) -> None:
                for ref, smem, first in zip((lhs_ref, rhs_ref), (lhs_smem, rhs_smem), position, strict=True):
                    _, parts, _, width = smem.shape
                    for part in range(parts):
                        row, column = tile.start + i * c.tile_k, first + part * width
                        engine.load_rows(ref, row, tile.end, column, smem.at[stage, part], full)

            pipeline.fill(step, copy)
            return step + 1

        return lax.fori_loop(0, _steps(c, tile), row_step, done)

    return load


def _multiply(
    c: Config, pipeline: Pipeline, tile: tile_scheduler.GroupTile, acc: Any, lhs_smem: Any, rhs_smem: Any, done: Any
) -> Any:
    """acc = the group's rows of lhs^T @ rhs: this warpgroup's share of an output tile."""
    lhs_part, rhs_part = _warpgroup_parts(c)

    def row_step(i: Any, step: Any) -> Any:
        def multiply(stage: Any) -> None:
            engine.wgmma(acc, engine.transpose_ref(lhs_smem.at[stage, lhs_part]), rhs_smem.at[stage, rhs_part])
            engine.wgmma_wait(0)

        pipeline.read(step, multiply)
        return step + 1

    return lax.fori_loop(0, _steps(c, tile), row_step, done)


def _warpgroup_parts(c: Config) -> tuple[Any, Any]:
    """Which part of lhs's and of rhs's tile this consumer warpgroup multiplies."""
    if c.compute_warpgroups == 1:
        return 0, 0
    wg = lax.axis_index("wg")
    return (wg, 0) if c.wg_dimension == "m" else (0, wg)


def _kernel(
    p: Problem,
    c: Config,
    gpu: Gpu,
    blocks: int,
    sizes_ref: Any,
    lhs_ref: Any,
    rhs_ref: Any,
    out_ref: Any,
    *,
    accumulator: Any,
    lhs_smem: Any,
    rhs_smem: Any,
    out_smem: Any,
    barriers: Any,
) -> None:
    """One block: its output tiles, each a loop over the group's rows and a store. An empty group's tiles are zeros."""
    pipeline = Pipeline(c.max_concurrent_steps, *barriers)

    def for_each_tile(body: Any) -> tuple[Any, Any]:
        block = lax.axis_index("block")
        tiles = jnp.int32(math.prod(_tiles(p, c)))
        return tile_scheduler.for_each_group_tile(sizes_ref, p.m, lambda size: tiles, block, blocks, body, jnp.int32(0))

    def producer() -> None:
        _, steps = for_each_tile(_load(p, c, pipeline, lhs_ref, rhs_ref, lhs_smem, rhs_smem))
        pipeline.drain(steps)

    def consumer(acc: Any) -> None:
        wg_m, wg_n = warpgroup_tile(c)
        height, width = out_smem.shape[2:]

        def compute(tile: tile_scheduler.GroupTile, done: Any) -> Any:
            done = _multiply(c, pipeline, tile, acc, lhs_smem, rhs_smem, done)
            first, parts = _position(p, c, tile), _warpgroup_parts(c)
            row, column = first[0] + parts[0] * wg_m, first[1] + parts[1] * wg_n

            def store(staged: Any, i: int, j: int) -> None:
                plgpu.copy_smem_to_gmem(staged, out_ref.at[tile.group, pl.ds(row + i, height), pl.ds(column + j, width)])

            store_tile(acc[...].astype(out_ref.dtype), out_smem.at[lax.axis_index("wg")], store)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            return done

        for_each_tile(compute)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    engine.specialize(
        producer,
        lambda: accumulator.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


def launch(
    p: Problem, c: Config, gpu: Gpu, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *, interpret: bool = False
) -> jax.Array:
    """Runs the kernel on lhs, rhs and int32 sizes of any values."""
    steps = c.max_concurrent_steps
    blocks = min(gpu.sms, p.groups * math.prod(_tiles(p, c)))
    wg_m, wg_n = warpgroup_tile(c)
    panel = engine.operand_transforms(PANEL, p.dtype, 128)
    parts_m, parts_n = c.tile_m // wg_m, c.tile_n // wg_n
    return engine.kernel(
        functools.partial(_kernel, p, c, gpu, blocks),
        engine.Launch(
            "mgpu_ops_ragged_contraction", {"block": blocks}, warpgroups=c.compute_warpgroups + 1, interpret=interpret
        ),
        out_type=jax.ShapeDtypeStruct((p.groups, p.k, p.n), p.out_dtype),
        scratch_types={
            "accumulator": engine.Accumulators(((wg_m, wg_n),), c.compute_warpgroups),
            "lhs_smem": plgpu.SMEM((steps, parts_m, c.tile_k, wg_m), p.dtype, transforms=panel),
            "rhs_smem": plgpu.SMEM((steps, parts_n, c.tile_k, wg_n), p.dtype, transforms=panel),
            "out_smem": plgpu.SMEM(
                storage(p, c).out_shape,
                p.out_dtype,
                transforms=engine.operand_transforms(c.epilogue_tile_n, p.out_dtype, 128),
            ),
            "barriers": Pipeline.barriers(steps, copies=parts_m + parts_n, consumers=c.compute_warpgroups),
        },
    )(sizes, engine.rows_view(lhs), engine.rows_view(rhs))
