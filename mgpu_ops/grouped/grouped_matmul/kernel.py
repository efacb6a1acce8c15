"""The kernel of grouped_matmul: rows of group g of lhs[m, k] times rhs[g, k, n], float32 accumulation, for NVIDIA Hopper.

A warp-specialised, persistent kernel: each block takes output tiles in turn, group after group, finding its way through
group_sizes as it goes. One warpgroup copies tiles of lhs and rhs into a pipeline of shared-memory stages with TMA, one or
two others multiply them with wgmma.
A group's tiles begin at its first row, whatever that is, and end at its last: TMA fills the rows
beyond with zeros and leaves them unwritten (`engine.load_rows`, `engine.store_rows`), so that no tile needs masks, a second
pass or a list of tiles made beforehand. Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU
documentation.
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
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.grouped.grouped_matmul.problem import Problem
from mgpu_ops.grouped.groups import PANEL, Config, consumer_registers, storage


def _position(p: Problem, c: Config, tile: tile_scheduler.GroupTile) -> tuple[Any, Any]:
    """First row of an output tile, and its first column."""
    rows = tile_scheduler.cdiv(tile.end - tile.start, c.tile_m)
    row, column = tile_scheduler.strips(tile.number, rows, math.ceil(p.n / c.tile_n), c.raster_width)
    return tile.start + row * c.tile_m, column * c.tile_n


def _load(p: Problem, c: Config, pipeline: Pipeline, lhs_ref: Any, rhs_ref: Any, lhs_smem: Any, rhs_smem: Any) -> Any:
    """What the producer warpgroup does for an output tile: the pipeline's next steps, each tile_k of k."""

    def load(tile: tile_scheduler.GroupTile, done: Any) -> Any:
        row, column = _position(p, c, tile)

        def k_step(k: Any, step: Any) -> Any:
            def copy(stage: Any, full: Any) -> None:
                for panel in range(c.tile_k // PANEL):
                    engine.load_rows(lhs_ref, row, tile.end, k * c.tile_k + panel * PANEL, lhs_smem.at[stage, panel], full)
                ks, ns = pl.ds(k * c.tile_k, c.tile_k), pl.ds(column, c.tile_n)
                window = (ks, ns) if p.layout == "nn" else (ns, ks)
                engine.copy_gmem_to_smem(rhs_ref.at[tile.group, *window], rhs_smem.at[stage], full)

            pipeline.fill(step, copy)
            return step + 1

        return lax.fori_loop(0, _steps(p, c), k_step, done)

    return load


def _multiply(p: Problem, c: Config, pipeline: Pipeline, acc: Any, lhs_smem: Any, rhs_smem: Any, done: Any) -> Any:
    """acc = the rows of lhs @ rhs[group]: this warpgroup's share of an output tile."""
    wg_m, wg_n = warpgroup_tile(c)
    row, column = tile_scheduler.warpgroup_origin(c)

    def k_step(k: Any, step: Any) -> Any:
        def multiply(stage: Any) -> None:
            for panel in range(c.tile_k // PANEL):
                a = lhs_smem.at[stage, panel, pl.ds(row, wg_m), :] if wg_m < c.tile_m else lhs_smem.at[stage, panel]
                ks, ns = pl.ds(panel * PANEL, PANEL), pl.ds(column, wg_n)
                if p.layout == "nn":
                    engine.wgmma(acc, a, rhs_smem.at[stage, ks, ns])
                else:
                    engine.wgmma(acc, a, engine.transpose_ref(rhs_smem.at[stage, ns, ks]))
            engine.wgmma_wait(0)

        pipeline.read(step, multiply)
        return step + 1

    return lax.fori_loop(0, _steps(p, c), k_step, done)


def _epilogue(p: Problem, values: Any, bias_refs: list[Any], group: Any, column: Any) -> Any:
    """activation(values + bias) in float32."""
    for bias_ref in bias_refs:  # one or none
        columns = bias_ref.at[group, pl.ds(column, values.shape[1])]
        bias = plgpu.load(columns, layout=plgpu.Layout.WGMMA.reduce(0), optimized=False)
        values += lax.broadcast_in_dim(bias, values.shape, (1,))
    if p.activation == "relu":
        return jnp.maximum(values, 0.0)
    if p.activation == "silu":
        return values / (1.0 + jnp.exp(-values))
    if p.activation == "gelu":  # 0.5 x (1 + tanh(sqrt(2 / pi) (x + 0.044715 x^3)))
        return values * (0.5 + 0.5 * jnp.tanh(math.sqrt(2 / math.pi) * (values + 0.044715 * values * values * values)))
    return values


def _zero_rest(p: Problem, c: Config, blocks: int, out_ref: Any, first: Any, staging: Any) -> None:
    """Zeros for the rows from `first` on, which belong to no group: the consumer warpgroups take pieces in turn."""
    across = math.ceil(p.n / c.epilogue_tile_n)
    pieces = tile_scheduler.cdiv(p.m - first, ROWS) * across
    workers = blocks * c.compute_warpgroups
    worker = lax.axis_index("block") * c.compute_warpgroups + lax.axis_index("wg")
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)
    staging[0] = jnp.zeros(staging.shape[1:], out_ref.dtype)
    plgpu.commit_smem()

    def store(i: Any, _: Any) -> Any:
        piece = worker + i * workers
        row, column = lax.div(piece, jnp.int32(across)) * ROWS, lax.rem(piece, jnp.int32(across)) * c.epilogue_tile_n
        engine.store_rows(staging.at[0], out_ref, first + row, p.m, column)
        return _

    lax.fori_loop(0, tile_scheduler.tiles_of_block(pieces, worker, workers), store, ())


def _kernel(
    p: Problem,
    c: Config,
    gpu: Gpu,
    blocks: int,
    sizes_ref: Any,
    lhs_ref: Any,
    rhs_ref: Any,
    *refs: Any,
    accumulator: Any,
    lhs_smem: Any,
    rhs_smem: Any,
    out_smem: Any,
    barriers: Any,
) -> None:
    """One block: its output tiles, each a loop over k and a store; then its share of the rows that belong to no group."""
    *bias_refs, out_ref = refs
    pipeline = Pipeline(c.max_concurrent_steps, *barriers)

    def for_each_tile(body: Any) -> tuple[Any, Any]:
        def tiles(size: Any) -> Any:
            return tile_scheduler.cdiv(size, c.tile_m) * math.ceil(p.n / c.tile_n)

        block = lax.axis_index("block")
        return tile_scheduler.for_each_group_tile(sizes_ref, p.m, tiles, block, blocks, body, jnp.int32(0))

    def producer() -> None:
        _, steps = for_each_tile(_load(p, c, pipeline, lhs_ref, rhs_ref, lhs_smem, rhs_smem))
        pipeline.drain(steps)

    def consumer(acc: Any) -> None:
        staging = out_smem.at[lax.axis_index("wg")]

        def compute(tile: tile_scheduler.GroupTile, done: Any) -> Any:
            done = _multiply(p, c, pipeline, acc, lhs_smem, rhs_smem, done)
            row, column = (x + y for x, y in zip(_position(p, c, tile), tile_scheduler.warpgroup_origin(c), strict=True))
            values = _epilogue(p, acc[...], bias_refs, tile.group, column)
            store_tile(
                values.astype(out_ref.dtype),
                staging,
                lambda staged, i, j: engine.store_rows(staged, out_ref, row + i, tile.end, column + j),
            )
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
            return done

        end, _ = for_each_tile(compute)
        _zero_rest(p, c, blocks, out_ref, end, staging)
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    engine.specialize(
        producer,
        lambda: accumulator.scope(consumer),
        consumers=c.compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=consumer_registers(c, gpu),
    )


def _steps(p: Problem, c: Config) -> int:
    return math.ceil(p.k / c.tile_k)


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on lhs, rhs as stored, int32 sizes of any values and, where the problem has one, a bias [groups, n]."""
    lhs, rhs, sizes, *bias = arrays
    steps = c.max_concurrent_steps
    tiles = p.groups * math.ceil(p.n / c.tile_n) + math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    blocks = min(gpu.sms, tiles)
    panel = engine.operand_transforms(PANEL, p.dtype, 128)
    out = engine.kernel(
        functools.partial(_kernel, p, c, gpu, blocks),
        engine.Launch("mgpu_ops_grouped_matmul", {"block": blocks}, warpgroups=c.compute_warpgroups + 1, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype),
        scratch_types={
            "accumulator": engine.Accumulators((warpgroup_tile(c),), c.compute_warpgroups),
            "lhs_smem": plgpu.SMEM((steps, c.tile_k // PANEL, c.tile_m, PANEL), p.dtype, transforms=panel),
            "rhs_smem": plgpu.SMEM(
                (steps, *((c.tile_k, c.tile_n) if p.layout == "nn" else (c.tile_n, c.tile_k))), p.dtype, transforms=panel
            ),
            "out_smem": plgpu.SMEM(
                storage(p, c).out_shape,
                p.out_dtype,
                transforms=engine.operand_transforms(c.epilogue_tile_n, p.out_dtype, 128),
            ),
            "barriers": Pipeline.barriers(steps, copies=c.tile_k // PANEL + 1, consumers=c.compute_warpgroups),
        },
    )(sizes, engine.rows_view(lhs), rhs, *(jnp.pad(b, ((0, 0), (0, -p.n % c.tile_n))) for b in bias))
    return out.reshape(p.m, p.n)
