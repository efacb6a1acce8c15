"""The kernel of gated_grouped_matmul: activation(lhs w_gate) * (lhs w_up) by group, float32 accumulation, for NVIDIA Hopper.

That of grouped_matmul, with the tiles of two matrices in each pipeline step and two accumulators: both products share the
tile of lhs, and what is stored is made of both sums in registers. The gradient is the same kernel with another epilogue: it
computes both products again, and stores the gradients of gate and up.
"""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.epilogue import tile_origins
from mgpu_ops.core.gated import store_gated, store_gated_and_kept, store_gated_gradients
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.rows import load_rows, rows_view, store_rows
from mgpu_ops.core.tile_scheduler import GroupTile
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import PANEL, Config
from mgpu_ops.grouped.gated.problem import Problem, gradient_buffers, results
from mgpu_ops.grouped.grouped_matmul.kernel import GroupedStages, most_tiles


@dataclasses.dataclass(frozen=True)
class _Refs(kernel.Refs):
    """Those of grouped_matmul, whose rhs is w_gate and whose out is the result or the gradient of gate.

    up, up_smem: w_up and its stages. out2, out3: gate and up, where these are kept; or out2 is the gradient of up.
    g: the result's gradient, or None; it is loaded into `g_smem`, which has a buffer for each epilogue tile of each consumer,
    on whose barrier it has `g_arrived`.
    """

    up: Any = None
    up_smem: Any = None
    out2: Any = None
    out3: Any = None
    g: Any = None
    g_smem: Any = None
    g_arrived: Any = None


@dataclasses.dataclass(frozen=True)
class _Stages(GroupedStages):
    """`kernel.Stages` of gated_grouped_matmul: what differs from grouped_matmul."""

    problem: Any
    refs: _Refs

    def steps(self, tile: GroupTile) -> int:
        return self.steps_of_one

    def load(
        self, tile: GroupTile, position: tuple[jax.Array, jax.Array], step: jax.Array, stage: jax.Array, full: Any
    ) -> None:
        """tile_k columns of the tile's rows of lhs, and as many of the group's two matrices as stored."""
        refs = self.refs
        self.load_lhs(refs.lhs, tile, position, step, stage, full)
        self.load_rhs(refs.rhs, refs.rhs_smem, tile, position, step, stage, full)
        self.load_rhs(refs.up, refs.up_smem, tile, position, step, stage, full)

    def rhs_buffers(self) -> tuple[Any, ...]:
        return self.refs.rhs_smem, self.refs.up_smem

    def begin_step(self, tile: GroupTile, step: jax.Array, share: tuple[Any, ...]) -> None:
        """Of a gradient: loads the result's gradient, which arrives while the second half of k is multiplied."""
        if self.problem.gradient:
            pl.when(step == self.steps(tile) // 2)(lambda: self.load_gradient(tile, share))

    def load_gradient(self, tile: GroupTile, share: tuple[Any, ...]) -> None:
        refs, wg = self.refs, lax.axis_index("wg")
        _, _, height, width = refs.g_smem.shape
        row, column = (x + y for x, y in zip(self.origin(tile), share, strict=True))
        origins = tile_origins(warpgroup_tile(self.config), height, width)
        # The last tile's stores have read the buffers: they started half a tile ago.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (i, j) in enumerate(origins):
            to, arrived = refs.g_smem.at[wg, number], refs.g_arrived.at[wg]
            load_rows(refs.g, row + i, tile.end, column + j, to, arrived, self.ends_with_rows)

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: kernel.Read) -> None:
        """activation(gate) * up, or the gradients of both. Rows beyond the group are not written: they are the next group's."""
        refs, (gate, up) = self.refs, accs
        row, column = (x + y for x, y in zip(self.origin(tile), self.share(tile), strict=True))

        def copy_to(out: Any) -> Any:
            return lambda staged, i, j: store_rows(staged, out, row + i, tile.end, column + j, self.ends_with_rows)

        activation = self.problem.activation
        if not self.problem.gradient:
            store_one = store_gated_and_kept if self.problem.keep else store_gated
            store_one(activation, gate[...], up[...], staging, *map(copy_to, self.outs()))
            return
        wg = lax.axis_index("wg")
        plgpu.barrier_wait(refs.g_arrived.at[wg])
        copies = copy_to(refs.out), copy_to(refs.out2)
        store_gated_gradients(activation, gate[...], up[...], refs.g_smem.at[wg], staging, *copies)

    def outs(self) -> tuple[Any, ...]:
        refs = self.refs
        return (refs.out, refs.out2, refs.out3)[: results(self.problem)]


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel on lhs, w_gate and w_up as stored, int32 sizes of any values (with an offset, as `sizes.of_shard` gives
    them) and, where the problem is the gradient's, the result's gradient; then there are two results.
    """
    lhs, w_gate, w_up, sizes, *g = arrays
    blocks = min(gpu.sms, most_tiles(p, c))

    def body(*refs: Any, **scratch: Any) -> None:
        sizes, lhs, gate, up, *rest, counter = kernel.counter_last(c, refs)
        g, *outs = rest if p.gradient else (None, *rest)
        out, out2, out3 = (*outs, None, None)[:3]
        refs_of = _Refs(sizes, lhs, gate, out, up=up, out2=out2, out3=out3, g=g, counter=counter, **scratch)
        kernel.run_block(_Stages(p, c, blocks, refs_of), gpu)

    out = jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype)
    outs = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_gated_grouped_matmul",
            {"block": blocks},
            warpgroups=c.compute_warpgroups + 1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(out,) * results(p) if results(p) > 1 else out,
        scratch_types=_scratch(p, c),
    )(sizes, *kernel.counter(c), rows_view(lhs), w_gate, w_up, *map(rows_view, g))
    return jax.tree.map(lambda x: x.reshape(p.m, p.n), tuple(outs) if results(p) > 1 else outs)


def _scratch(p: Problem, c: Config) -> dict[str, Any]:
    """Stages of lhs and of both matrices, two accumulators, the epilogue's buffers, and where the result's gradient arrives."""
    panels = c.tile_k // PANEL
    tile = (c.tile_k, c.tile_n) if p.layout == "nn" else (c.tile_n, c.tile_k)
    scratch = kernel.scratch_types(p, c, (panels, c.tile_m, PANEL), tile, copies=panels + 2)
    scratch["accumulator"] = engine.Accumulators((warpgroup_tile(c),) * 2, c.compute_warpgroups)
    scratch["up_smem"] = scratch["rhs_smem"]
    if p.gradient:
        shape = (c.compute_warpgroups, gradient_buffers(p, c), ROWS, c.epilogue_tile_n)
        transforms = engine.operand_transforms(c.epilogue_tile_n, p.dtype, 128)
        scratch["g_smem"] = plgpu.SMEM(shape, jnp.dtype(p.dtype), transforms=transforms)
        scratch["g_arrived"] = plgpu.Barrier(num_arrivals=epilogue_tiles(c), num_barriers=c.compute_warpgroups)
    return scratch
