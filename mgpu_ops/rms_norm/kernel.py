"""The kernels of an RMS norm: one pass over the rows for the result, and one for the gradients of x and w.

A block is one warpgroup: Mosaic's sums go through shared memory that all warpgroups of a block would write. It takes every
so-many-th row, whole, and TMA loads the next ones meanwhile. In the gradient a block adds up its rows' part of dw in registers
and writes it once; XLA adds up the blocks' parts.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.row_norm import row_factor
from mgpu_ops.core.tile_scheduler import Rounds
from mgpu_ops.rms_norm.problem import LANES, Config, Problem, inputs_of_a_row, reads_again


def launch(
    problem: Problem,
    config: Config,
    gpu: Gpu,
    x: jax.Array,
    w: jax.Array,
    epsilon: jax.Array,
    *others: jax.Array,
    interpret: bool = False,
) -> Any:
    """The normalised rows; or with g, and a gradient that is added, (dx, dw), dw of float32."""
    p, c = problem, config
    rounds, parts, dtype = (
        Rounds.of(p.rows, gpu.sms * c.blocks, gpu, most=2 if p.gradient else None),
        (p.width // LANES, LANES),
        jnp.dtype(p.dtype),
    )
    rows, read = jax.ShapeDtypeStruct((p.rows, *parts), dtype), inputs_of_a_row(p)

    def kernel(w: Any, epsilon: Any, *refs: Any, **scratch: Any) -> None:
        of = _Rows(p, c, rounds, refs[:read], **scratch)
        of.load_weights(w)
        (_gradient if p.gradient else _forward)(of, epsilon[0], *refs[read:])
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    run = engine.kernel(
        kernel,
        engine.Launch(
            f"mgpu_ops_rms_norm{'_gradient' * p.gradient}",
            {"block": rounds.blocks},
            warpgroups=1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(rows, jax.ShapeDtypeStruct((rounds.blocks, *parts), jnp.float32)) if p.gradient else rows,
        scratch_types={
            "smem": tuple(plgpu.SMEM((c.stages, *parts), dtype) for _ in range(read)),
            "w_smem": plgpu.SMEM(parts, dtype),
            "out_smem": plgpu.SMEM((2, *parts), dtype),
            "full": plgpu.Barrier(num_arrivals=read, num_barriers=c.stages),
            "w_full": plgpu.Barrier(),
        },
    )
    found = run(w.reshape(parts), epsilon, *(a.reshape(p.rows, *parts) for a in (x, *others)))
    if not p.gradient:
        return found.reshape(p.rows, p.width)
    dx, dw = found
    return dx.reshape(p.rows, p.width), dw.sum(0).reshape(p.width)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a block as they come through shared memory, and go out again."""

    problem: Problem
    config: Config
    rounds: Rounds
    refs: tuple[Any, ...]  # arrays of x's shape, [rows, width / 128, 128]
    smem: tuple[Any, ...]  # of each, [stages, width / 128, 128]
    w_smem: Any
    out_smem: Any  # two rows
    full: Any
    w_full: Any

    def load_weights(self, w: Any) -> None:
        engine.copy_gmem_to_smem(w, self.w_smem, self.w_full)
        plgpu.barrier_wait(self.w_full)

    def for_each(
        self, row: Callable[[Callable[[], list[jax.Array]], Callable[[Any, jax.Array], None], Any], Any], carry: Any
    ) -> Any:
        """`carry = row(read, store, carry)` for each row of this block.

        read(): float32 values of each array. store(out, values): starts to store them as this row of `out`; once for each row.
        """
        first, count = self.rounds.of_block(lax.axis_index("block"))
        stride, ahead = self.rounds.at_once, self.config.stages - 1

        def load(i: jax.Array) -> None:
            stage = lax.rem(i, jnp.int32(self.config.stages))
            for ref, smem in zip(self.refs, self.smem, strict=True):
                engine.copy_gmem_to_smem(ref.at[first + i * stride], smem.at[stage], self.full.at[stage])

        for i in range(ahead):
            pl.when(i < count)(functools.partial(load, jnp.int32(i)))

        def step(i: jax.Array, carry: Any) -> Any:
            # Into the stage of the row before, which all threads have read: its `commit_smem` waited for them.
            pl.when(i + ahead < count)(lambda: load(i + ahead))
            stage = lax.rem(i, jnp.int32(self.config.stages))
            plgpu.barrier_wait(self.full.at[stage])
            read = lambda: [smem[stage].astype(jnp.float32) for smem in self.smem]  # noqa: E731
            return row(read, functools.partial(self._store, i, first + i * stride), carry)

        return lax.fori_loop(0, count, step, carry)

    def _store(self, i: jax.Array, number: jax.Array, out: Any, values: jax.Array) -> None:
        slot = self.out_smem.at[lax.rem(i, jnp.int32(2))]
        plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last one has read its slot
        slot[...] = values.astype(out.dtype)
        plgpu.commit_smem()  # TMA sees what was written
        plgpu.copy_smem_to_gmem(slot, out.at[number])


def _forward(rows: _Rows, epsilon: jax.Array, out: Any) -> None:
    weights = rows.w_smem[...].astype(jnp.float32)

    def row(read: Callable[[], list[jax.Array]], store: Callable[[Any, jax.Array], None], carry: None) -> None:
        (x,) = read()
        store(out, x * row_factor(x, epsilon) * weights)
        return carry

    rows.for_each(row, None)


def _gradient(rows: _Rows, epsilon: jax.Array, dx: Any, dw: Any) -> None:
    p = rows.problem

    def row(read: Callable[[], list[jax.Array]], store: Callable[[Any, jax.Array], None], total: jax.Array) -> jax.Array:
        x, g, *added = read()
        scale = row_factor(x, epsilon)
        if reads_again(p):  # after each sum, as registers do not hold wide rows
            x, g, *added = read()
        of_x = g * rows.w_smem[...].astype(jnp.float32)
        mean = jnp.sum(of_x * x) * (1.0 / p.width)
        if reads_again(p):
            x, g, *_ = read()
            total += g * x * scale
            x, g, *added = read()
            of_x = g * rows.w_smem[...].astype(jnp.float32)
        gradient = scale * (of_x - x * (scale * scale * mean))
        store(dx, gradient + added[0] if added else gradient)
        return total if reads_again(p) else total + g * x * scale

    dw[lax.axis_index("block")] = rows.for_each(row, jnp.zeros(rows.w_smem.shape, jnp.float32))
