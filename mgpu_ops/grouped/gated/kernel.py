"""The kernel of gated_grouped_matmul: activation(lhs w_gate) * (lhs w_up) by group, float32 accumulation, for NVIDIA Hopper.

That of grouped_matmul, with the tiles of two matrices in each pipeline step and two accumulators: both products share the
tile of lhs, and what is stored is made of both sums in registers. The gradient is the same kernel with another epilogue: it
computes both products again, and stores the gradients of gate and up.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.epilogue import epilogue_origins
from mgpu_ops.core.gated import store_gated, store_gated_and_kept, store_gated_gradients
from mgpu_ops.core.gemm import ROWS, epilogue_tiles
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import GroupTile
from mgpu_ops.core.rows import load_rows, rows_view, store_rows
from mgpu_ops.core.scaled import Sums
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import Config, panel
from mgpu_ops.grouped.gated.problem import Problem, accumulators, gradient_buffers, of_one, results, sums_of_one
from mgpu_ops.grouped.grouped_matmul.kernel import GroupedStages, most_tiles, of_blocks, padded_scales


@dataclasses.dataclass(frozen=True)
class _Refs(kernel.Refs):
    """Those of grouped_matmul, whose rhs is w_gate and whose out is the result or the gradient of gate.

    up, up_smem: w_up and its stages. out2, out3: gate and up, where these are kept; or out2 is the gradient of up.
    g: the result's gradient, or None; it is loaded into `g_smem`, which has a buffer for each epilogue tile of each consumer,
    on whose barrier it has `g_arrived`.
    scale_up, up_scale_smem: as scale_rhs and rhs_scale_smem, of w_up.
    """

    up: Any = None
    up_smem: Any = None
    out2: Any = None
    out3: Any = None
    g: Any = None
    g_smem: Any = None
    g_arrived: Any = None
    scale_up: Any = None
    up_scale_smem: Any = None


@dataclasses.dataclass(frozen=True)
class _Stages(GroupedStages):
    """`kernel.Stages` of gated_grouped_matmul: what differs from grouped_matmul."""

    problem: Any
    refs: _Refs

    def steps(self, tile: GroupTile) -> int:
        return self.steps_of_one

    def load(self, tile: GroupTile, position: tuple[Any, ...], step: jax.Array, rows: int, stage: jax.Array, full: Any) -> None:
        """tile_k columns of the tile's rows of lhs, and as many of the group's two matrices as stored."""
        refs = self.refs
        gathers = refs.row_indices is not None
        if refs.lhs_scale_smem is not None:
            self.load_scales(tile, position, step, stage, full)
        if not gathers:
            self.load_lhs(refs.lhs, tile, position, step, rows, stage, full)
        self.load_rhs(refs.rhs, refs.rhs_smem, tile, position, step, stage, full)
        self.load_rhs(refs.up, refs.up_smem, tile, position, step, stage, full)
        if gathers:  # which takes longer to start than TMA's copies
            self.load_lhs(refs.lhs, tile, position, step, rows, stage, full)

    def rhs_buffers(self) -> tuple[Any, ...]:
        return self.refs.rhs_smem, self.refs.up_smem

    def scale_buffers(self) -> tuple[tuple[Any, Any], ...]:
        refs = self.refs
        return (refs.scale_rhs, refs.rhs_scale_smem), (refs.scale_up, refs.up_scale_smem)

    def add_all_products(self, accs: tuple[Any, ...], stage: jax.Array, share: tuple[Any, ...]) -> None:
        """Of gate and then of up, which take the same accumulators for their products of 128 of k."""
        refs = self.refs
        gate, up, products = self.sums(accs)
        self.add_products((*gate, *products), stage, share, refs.rhs_smem, refs.rhs_scale_smem)
        self.add_products((*up, *products), stage, share, refs.up_smem, refs.up_scale_smem)

    def sums(self, accs: tuple[Any, ...]) -> tuple[tuple[Any, ...], tuple[Any, ...], tuple[Any, ...]]:
        """The accumulators of gate, of up, and those that products take in turn."""
        count = sums_of_one(self.problem, self.config)
        return accs[:count], accs[count : 2 * count], accs[2 * count :]

    def begin_step(self, tile: GroupTile, step: jax.Array, share: tuple[Any, ...]) -> None:
        """Of a gradient: loads the result's gradient, which arrives while the second half of k is multiplied."""
        if self.problem.gradient:
            pl.when(step == self.steps(tile) // 2)(lambda: self.load_gradient(tile, share))

    def load_gradient(self, tile: GroupTile, share: tuple[Any, ...]) -> None:
        refs, wg = self.refs, lax.axis_index("wg")
        row, column = (x + y for x, y in zip(self.origin(tile), share, strict=True))
        # The last tile's stores have read the buffers: they started half a tile ago.
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (i, j) in enumerate(epilogue_origins(self.config)):
            to, arrived = refs.g_smem.at[wg, number], refs.g_arrived.at[wg]
            load_rows(refs.g, row + i, tile.end, column + j, to, arrived, self.ends_with_rows)

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: kernel.Read) -> None:
        """activation(gate) * up, or the gradients of both. Rows beyond the group are not written: they are the next group's."""
        refs = self.refs
        row, column = (x + y for x, y in zip(self.origin(tile), self.share(tile)[:2], strict=True))

        def copy_to(out: Any) -> Any:
            return lambda staged, i, j: store_rows(staged, out, row + i, tile.end, column + j, self.ends_with_rows)

        activation = self.problem.activation
        if self.problem.scales != "none":
            gate, up = self.both(accs, tile.group, row, column)
            store_gated(activation, gate, up, staging, copy_to(refs.out))
            return
        gate, up = accs
        if not self.problem.gradient:
            store_one = store_gated_and_kept if self.problem.keep else store_gated
            store_one(activation, gate[...], up[...], staging, *map(copy_to, self.outs()))
            return
        wg = lax.axis_index("wg")
        plgpu.barrier_wait(refs.g_arrived.at[wg])
        copies = copy_to(refs.out), copy_to(refs.out2)
        store_gated_gradients(activation, gate[...], up[...], refs.g_smem.at[wg], staging, *copies)

    def both(self, accs: tuple[Any, ...], group: jax.Array, row: jax.Array, column: jax.Array) -> tuple[Any, Any]:
        """Gate and up of 8-bit floats, scaled."""
        if self.problem.scales == "block":
            of_gate, of_up, _ = self.sums(accs)
            return Sums.of(self.config, of_gate), Sums.of(self.config, of_up)
        scales = self.refs.scale_rhs, self.refs.scale_up
        gate, up = (self.scaled(acc[...], scale, group, row, column) for acc, scale in zip(accs, scales, strict=True))
        return gate, up

    def outs(self) -> tuple[Any, ...]:
        refs = self.refs
        return (refs.out, refs.out2, refs.out3)[: results(self.problem)]


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel on lhs, w_gate and w_up as stored, int32 sizes of any values (with an offset, as `sizes.of_shard` gives
    them) and, where the problem has them, scales of lhs, w_gate and w_up, or the result's gradient; then there are two results;
    or indices of rows.
    """
    lhs, w_gate, w_up, sizes, *rest = arrays
    scales, further = (_scales(p, c, rest), []) if p.scales != "none" else ([], rest)
    blocks = min(gpu.sms, most_tiles(p, c))

    def body(*refs: Any, **scratch: Any) -> None:
        sizes, lhs, gate, up, *rest, counter = kernel.counter_last(c, refs)
        names = ["scale_lhs", "scale_rhs", "scale_up"] if scales else []
        names += ["g"] * p.gradient + ["row_indices"] * (p.lhs_rows > 0)
        more = dict(zip(names, rest, strict=False))
        out, out2, out3 = (*rest[len(names) :], None, None)[:3]
        refs_of = _Refs(sizes, lhs, gate, out, up=up, out2=out2, out3=out3, counter=counter, **more, **scratch)
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
    )(sizes, *kernel.counter(c), rows_view(lhs), w_gate, w_up, *scales, *(map(rows_view, further) if p.gradient else further))
    return jax.tree.map(lambda x: x.reshape(p.m, p.n), tuple(outs) if results(p) > 1 else outs)


def _scales(p: Problem, c: Config, scales: Sequence[jax.Array]) -> list[jax.Array]:
    """The scales of lhs, w_gate and w_up as the kernel reads them."""
    lhs, *others = scales
    padded = [{"scale_lhs": lhs, "scale_rhs": x} for x in others]
    padded = [found | padded_scales(p, c, found) for found in padded]
    return [padded[0]["scale_lhs"], *(found["scale_rhs"] for found in padded)]


def _scratch(p: Problem, c: Config) -> dict[str, Any]:
    """Stages of lhs and of both matrices, two accumulators, the epilogue's buffers, and where the result's gradient arrives."""
    width = panel(p.dtype)
    panels = c.tile_k // width
    tile = (c.tile_k, c.tile_n) if p.layout == "nn" else (c.tile_n, c.tile_k)
    copies = (1 if p.lhs_rows else panels) + 2 + 3 * (p.scales == "block")
    scratch = kernel.scratch_types(p, c, (panels, c.tile_m, width), tile, copies=copies)
    scratch |= of_blocks(of_one(p), c)
    scratch |= kernel.accumulators(c, lambda shared: accumulators(p, shared))
    scratch["up_smem"] = scratch["rhs_smem"]
    if p.scales == "block":
        scratch["up_scale_smem"] = scratch["rhs_scale_smem"]
    if p.gradient:
        shape = (c.compute_warpgroups, gradient_buffers(p, c), ROWS, c.epilogue_tile_n)
        transforms = engine.operand_transforms(c.epilogue_tile_n, p.dtype, 128)
        scratch["g_smem"] = plgpu.SMEM(shape, jnp.dtype(p.dtype), transforms=transforms)
        scratch["g_arrived"] = plgpu.Barrier(num_arrivals=epilogue_tiles(c), num_barriers=c.compute_warpgroups)
    return scratch
