"""The kernel of a gated gradient: the product u = g w_down^T by group, and in its epilogue all that is made of it.

Of out = scale * (hidden w_down) with hidden = activation(gate) * up, and out's gradient g, the results are

    dgate = scale * u * up * activation'(gate)      dup = scale * u * activation(gate)
    scaled = scale * hidden                         dscale = sum of u * hidden over the columns of each row

It is the kernel of grouped_matmul with further pipeline steps for each output tile: into the stages, where operands were, the
producer loads gate and up, 64 columns a step, while the last products are computed. u never leaves the registers. A row's
dscale is summed in each tile, and the tiles' sums are added by XLA, in one order: the same inputs give the same bits.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.activations import with_derivative
from mgpu_ops.core.epilogue import Copy, along, store_in_turn
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.group_scheduler import GroupTile
from mgpu_ops.core.rows import load_rows, rows_view, store_rows, store_scattered
from mgpu_ops.grouped import kernel
from mgpu_ops.grouped.config import PANEL, Config
from mgpu_ops.grouped.grouped_matmul.kernel import GroupedStages, most_tiles
from mgpu_ops.grouped.grouped_matmul.problem import Problem, by_name
from mgpu_ops.grouped.sizes import in_a_group

_PER_ROW = plgpu.Layout.WGMMA.reduce(1)


@dataclasses.dataclass(frozen=True)
class _Refs(kernel.Refs):
    """Those of grouped_matmul, whose out is the gradient of gate.

    dup, scaled: results. sums: float32 [column tiles * m], each tile's part of the row scale's gradient. gate, up: as kept.
    """

    dup: Any = None
    scaled: Any = None
    sums: Any = None
    gate: Any = None
    up: Any = None


@dataclasses.dataclass(frozen=True)
class _Stages(GroupedStages):
    """`kernel.Stages` of a gated gradient: what differs from grouped_matmul."""

    refs: _Refs

    @property
    def further_steps(self) -> int:
        return self.config.tile_n // PANEL

    def gate_and_up(self, stage: jax.Array) -> tuple[Any, Any]:
        """Where 64 columns of gate and of up lie in a stage, for all rows of the tile: in lhs's panels, or up in rhs's tile."""
        refs, c = self.refs, self.config
        of_up = refs.lhs_smem.at[stage, 1] if c.tile_k > PANEL else refs.rhs_smem.at[stage, pl.ds(0, c.tile_m), :]
        return refs.lhs_smem.at[stage, 0], of_up

    def load_further(self, tile: GroupTile, position: Any, step: int, rows: int, stage: jax.Array, full: Any) -> None:
        """64 columns of the tile's rows of gate and of up."""
        row, column = position
        for ref, smem in zip((self.refs.gate, self.refs.up), self.gate_and_up(stage), strict=True):
            load_rows(ref, row, tile.end, column + step * PANEL, smem.at[pl.ds(0, rows)], full)
        for _ in range(self.config.tile_k // PANEL - 1):  # a step that is multiplied has that many copies more
            plgpu.barrier_arrive(full)

    def store(self, tile: GroupTile, accs: tuple[Any, ...], staging: Any, read: kernel.Read) -> None:
        """The four results. Rows beyond the group are not written: they are the next group's."""
        refs, (acc,) = self.refs, accs
        height, width = warpgroup_tile(self.config)
        first, column = self.position(tile)
        own, _ = self.share(tile)
        row = first + own
        u = acc[...]
        sums = [jnp.zeros((ROWS,), jnp.float32)] * (height // ROWS)
        sums = [plgpu.layout_cast(x, _PER_ROW) for x in sums]

        def copy_to(out: Any) -> Copy:
            return lambda staged, i, j: store_rows(staged, out, row + i, tile.end, column + j)

        outs = [copy_to(out) for out in self.outs()]

        def parts(stage: jax.Array, j: int) -> Iterator[tuple[jax.Array, Copy, int, int]]:
            for i in range(0, height, ROWS):
                of_u = u[i : i + ROWS, j : j + PANEL]
                gate, up = (x[pl.ds(own + i, ROWS), :].astype(jnp.float32) for x in self.gate_and_up(stage))
                scale = along(refs.row_scale, row + i, of_u.shape, 0)
                activated, slope = with_derivative(self.problem.activation, gate)
                hidden = activated * up
                sums[i // ROWS] += jnp.sum(of_u * hidden, axis=1)
                for value, copy in zip(
                    (scale * of_u * up * slope, scale * of_u * activated, scale * hidden), outs, strict=True
                ):
                    yield value, copy, i, j

        def store_step(step: int, stage: jax.Array) -> None:
            store_in_turn(staging, parts(stage, step * PANEL), before=step * len(outs) * len(sums))

        for step in range(width // PANEL):
            read(step, functools.partial(store_step, step))
        tile_column = lax.div(column, jnp.int32(self.config.tile_n))
        for i, one in enumerate(sums):
            rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=_PER_ROW) + (row + i * ROWS)
            store_scattered(one, refs.sums, jnp.where(rows < tile.end, rows + tile_column * self.problem.m, -1))

    def outs(self) -> tuple[Any, ...]:
        return self.refs.out, self.refs.dup, self.refs.scaled


def launch(p: Problem, c: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> tuple[jax.Array, ...]:
    """Runs the kernel on g, w_down as stored, int32 sizes of any values (with an offset, as `sizes.of_shard` gives them), gate,
    up and the row scale [m].
    """
    g, w_down, sizes, *rest = arrays
    extra = by_name(p, rest)
    extra |= {name: rows_view(extra[name]) for name in ("gate", "up")}
    extra["row_scale"] = jnp.pad(extra["row_scale"], (0, c.tile_m))  # a group's last tile reads beyond it
    blocks = min(gpu.sms, most_tiles(p, c))

    def body(*refs: Any, **scratch: Any) -> None:
        sizes, g, w_down, *further, dgate, dup, scaled, sums, counter = kernel.counter_last(c, refs)
        results = {"out": dgate, "dup": dup, "scaled": scaled, "sums": sums}
        refs_of = _Refs(sizes, g, w_down, counter=counter, **results, **by_name(p, further), **scratch)
        kernel.run_block(_Stages(p, c, blocks, refs_of), gpu)

    panels, across = c.tile_k // PANEL, math.ceil(p.n / c.tile_n)
    out = jax.ShapeDtypeStruct((1, 1, p.m, p.n), p.out_dtype)
    *outs, sums = engine.kernel(
        body,
        engine.Launch(
            "mgpu_ops_gated_gradient",
            {"block": blocks},
            warpgroups=c.compute_warpgroups + 1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(out, out, out, jax.ShapeDtypeStruct((across * p.m,), jnp.float32)),
        scratch_types=kernel.scratch_types(p, c, (panels, c.tile_m, PANEL), (c.tile_n, c.tile_k), copies=panels + 1),
    )(sizes, *kernel.counter(c), rows_view(g), w_down, *extra.values())
    inside = in_a_group(sizes, p.m, p.group_offset)[:, 0]  # elsewhere nothing was written
    dscale = jnp.where(inside, sums.reshape(across, p.m).sum(axis=0), 0)
    return *(x.reshape(p.m, p.n) for x in outs), dscale
