"""The kernel of grouped_matmul: rows of group g of lhs[m, k] times rhs[g, k, n], float32 accumulation, for NVIDIA Hopper.

`grouped/kernel.py` has the block, which runs the stages below. An output tile takes ceil(k / tile_k) steps.

A group's tiles begin at its first row, whatever that is, and end at its last. TMA fills the rows beyond with zeros when it
loads, and does not write them when it stores (`rows.load_rows`, `rows.store_rows`). So no tile needs a mask or a second
pass, and no list of tiles is made beforehand. Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU
documentation.
"""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.epilogue import along, store_tile
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.rows import load_rows, rows_view, store_rows
from mgpu_ops.core.tile_scheduler import GroupTile
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import PANEL, Config
from mgpu_ops.grouped.grouped_matmul.problem import Problem
from mgpu_ops.grouped.kernel import Refs


@dataclasses.dataclass(frozen=True)
class _Stages:
    """`kernel.Stages` of grouped_matmul."""

    problem: Problem
    config: Config
    blocks: int
    refs: Refs

    @property
    def rows(self) -> int:
        return self.problem.m

    def tiles(self, size: jax.Array) -> jax.Array:
        p, c = self.problem, self.config
        return tile_scheduler.cdiv(size, c.tile_m) * math.ceil(p.n / c.tile_n)

    def steps(self, tile: GroupTile) -> int:
        return math.ceil(self.problem.k / self.config.tile_k)

    def position(self, tile: GroupTile) -> tuple[jax.Array, jax.Array]:
        p, c = self.problem, self.config
        rows = tile_scheduler.cdiv(tile.end - tile.start, c.tile_m)
        row, column = tile_scheduler.strips(tile.number, rows, math.ceil(p.n / c.tile_n), c.raster_width)
        return tile.start + row * c.tile_m, column * c.tile_n

    def load(
        self, tile: GroupTile, position: tuple[jax.Array, jax.Array], step: jax.Array, stage: jax.Array, full: Any
    ) -> None:
        """tile_k columns of the tile's rows of lhs, in panels of one swizzle row, and as many of the group's rhs as stored."""
        c, refs = self.config, self.refs
        row, column = position
        for panel in range(c.tile_k // PANEL):
            first = step * c.tile_k + panel * PANEL
            load_rows(refs.lhs, row, tile.end, first, refs.lhs_smem.at[stage, panel], full)
        ks, ns = pl.ds(step * c.tile_k, c.tile_k), pl.ds(column, c.tile_n)
        window = (ks, ns) if self.problem.layout == "nn" else (ns, ks)
        engine.copy_gmem_to_smem(refs.rhs.at[tile.group, *window], refs.rhs_smem.at[stage], full)

    def staging(self) -> Any:
        return self.refs.out_smem.at[lax.axis_index("wg")]

    def share(self) -> tuple[Any, Any]:
        """The first row and column of this consumer within a block's tile."""
        return tile_scheduler.warpgroup_origin(self.config)

    def multiply(self, acc: Any, stage: jax.Array, share: tuple[Any, Any]) -> None:
        c, refs = self.config, self.refs
        wg_m, wg_n = warpgroup_tile(c)
        row, column = share
        # The wgmma of all panels are in flight together; the stage is free when the last has read it.
        for panel in range(c.tile_k // PANEL):
            lhs = refs.lhs_smem.at[stage, panel, pl.ds(row, wg_m), :] if wg_m < c.tile_m else refs.lhs_smem.at[stage, panel]
            ks, ns = pl.ds(panel * PANEL, PANEL), pl.ds(column, wg_n)
            if self.problem.layout == "nn":
                engine.wgmma(acc, lhs, refs.rhs_smem.at[stage, ks, ns])
            else:
                engine.wgmma(acc, lhs, engine.transpose_ref(refs.rhs_smem.at[stage, ns, ks]))
        engine.wgmma_wait(0)

    def store(self, tile: GroupTile, acc: Any, staging: Any) -> None:
        """activation(acc + bias), rounded to out_dtype. Rows beyond the group are not written: they are the next group's."""
        refs = self.refs
        row, column = (x + y for x, y in zip(self.position(tile), self.share(), strict=True))
        values = self.with_epilogue(acc[...], tile.group, column)
        store_tile(
            values.astype(refs.out.dtype),
            staging,
            lambda staged, i, j: store_rows(staged, refs.out, row + i, tile.end, column + j),
        )

    def with_epilogue(self, values: jax.Array, group: jax.Array, column: jax.Array) -> jax.Array:
        """activation(values + bias) in float32."""
        if self.refs.bias is not None:
            values += along(self.refs.bias.at[group], column, values.shape, 1)
        return in_registers(self.problem.activation, values)

    def finish(self, end: jax.Array, staging: Any) -> None:
        """Stores zeros to the rows from `end` on, which belong to no group: in epilogue tiles, of which each consumer of each
        block has its share. They all come from one buffer, so that no store waits for another.
        """
        p, c, out = self.problem, self.config, self.refs.out
        across = math.ceil(p.n / c.epilogue_tile_n)
        tiles = tile_scheduler.cdiv(p.m - end, ROWS) * across
        workers = self.blocks * c.compute_warpgroups
        worker = lax.axis_index("block") * c.compute_warpgroups + lax.axis_index("wg")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the buffer
        staging[0] = jnp.zeros(staging.shape[1:], out.dtype)
        plgpu.commit_smem()

        def store(i: jax.Array, _: tuple[()]) -> tuple[()]:
            tile = worker + i * workers
            row, column = lax.div(tile, jnp.int32(across)) * ROWS, lax.rem(tile, jnp.int32(across)) * c.epilogue_tile_n
            store_rows(staging.at[0], out, end + row, p.m, column)
            return _

        lax.fori_loop(0, tile_scheduler.tiles_of_block(tiles, worker, workers), store, ())


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel on lhs, rhs as stored, int32 sizes of any values and, where the problem has one, a bias [groups, n]."""
    lhs, rhs, sizes, *bias = arrays
    tiles = p.groups * math.ceil(p.n / c.tile_n) + math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    blocks = min(gpu.sms, tiles)

    def body(sizes: Any, lhs: Any, rhs: Any, *rest: Any, **scratch: Any) -> None:
        *bias, out = rest
        kernel.run_block(_Stages(p, c, blocks, Refs(sizes, lhs, rhs, out, *bias, **scratch)), gpu)

    panels = c.tile_k // PANEL
    rhs_tile = (c.tile_k, c.tile_n) if p.layout == "nn" else (c.tile_n, c.tile_k)
    out = engine.kernel(
        body,
        engine.Launch("mgpu_ops_grouped_matmul", {"block": blocks}, warpgroups=c.compute_warpgroups + 1, interpret=interpret),
        out_type=jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype),
        scratch_types=kernel.scratch_types(p, c, (panels, c.tile_m, PANEL), rhs_tile, copies=panels + 1),
    )(sizes, rows_view(lhs), rhs, *(jnp.pad(b, ((0, 0), (0, -p.n % c.tile_n))) for b in bias))
    return out.reshape(p.m, p.n)
