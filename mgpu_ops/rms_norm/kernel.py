"""The kernels of an RMS norm: one pass over the rows for the result, and one for the gradients of x and w.

A block is one warpgroup: Mosaic's sums go through shared memory that all warpgroups of a block would write. It takes every
so-many-th row, whole, and TMA loads the next ones meanwhile. In the gradient a block adds up its rows' part of dw in registers and
writes it once; XLA adds up the blocks' parts.
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
from mgpu_ops.rms_norm.problem import LANES, Config, Problem, inputs_of_a_row


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
    blocks, parts, dtype = min(p.rows, gpu.sms * c.blocks), (p.width // LANES, LANES), jnp.dtype(p.dtype)
    rows = jax.ShapeDtypeStruct((p.rows, *parts), dtype)
    run = engine.kernel(
        functools.partial(_gradient if p.gradient else _forward, p, c, blocks),
        engine.Launch(
            f"mgpu_ops_rms_norm{'_gradient' * p.gradient}",
            {"block": blocks},
            warpgroups=1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(rows, jax.ShapeDtypeStruct((blocks, *parts), jnp.float32)) if p.gradient else rows,
        scratch_types={
            "smem": tuple(plgpu.SMEM((c.stages, *parts), dtype) for _ in range(inputs_of_a_row(p))),
            "w_smem": plgpu.SMEM(parts, dtype),
            "out_smem": plgpu.SMEM((2, *parts), dtype),
            "full": plgpu.Barrier(num_arrivals=inputs_of_a_row(p), num_barriers=c.stages),
            "w_full": plgpu.Barrier(),
        },
    )
    arrays = (a.reshape(p.rows, *parts) for a in (x, *others))
    found = run(w.reshape(parts), epsilon, *arrays)
    if not p.gradient:
        return found.reshape(p.rows, p.width)
    dx, dw = found
    return dx.reshape(p.rows, p.width), dw.sum(0).reshape(p.width)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a block as they come through shared memory."""

    problem: Problem
    config: Config
    blocks: int
    refs: tuple[Any, ...]  # arrays of x's shape, [rows, width / 128, 128]
    smem: tuple[Any, ...]  # of each, [stages, width / 128, 128]
    full: Any

    def for_each(self, row: Callable[[jax.Array, jax.Array, list[Any], Any], Any], carry: Any) -> Any:
        """`carry = row(i, number, smem, carry)` for each row of this block, counted by i; smem: a ref of each array's row."""
        first, stride = lax.axis_index("block"), self.blocks
        count, ahead = lax.div(self.problem.rows - first + stride - 1, stride), self.config.stages - 1

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
            return row(i, first + i * stride, [smem.at[stage] for smem in self.smem], carry)

        return lax.fori_loop(0, count, step, carry)


def _store(out: Any, out_smem: Any, i: jax.Array, number: jax.Array, values: jax.Array) -> None:
    """Starts to store a row, through one of two buffers."""
    slot = out_smem.at[lax.rem(i, jnp.int32(2))]
    plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last one has read its slot
    slot[...] = values.astype(out.dtype)
    plgpu.commit_smem()  # TMA sees what was written
    plgpu.copy_smem_to_gmem(slot, out.at[number])


def _forward(
    p: Problem, c: Config, blocks: int, w: Any, epsilon: Any, x: Any, out: Any, *, smem: Any, w_smem: Any, out_smem: Any, full: Any,
    w_full: Any,
) -> None:  # fmt: skip
    engine.copy_gmem_to_smem(w, w_smem, w_full)
    plgpu.barrier_wait(w_full)
    weights, least = w_smem[...].astype(jnp.float32), epsilon[0]

    def row(i: jax.Array, number: jax.Array, refs: list[Any], carry: None) -> None:
        values = refs[0][...].astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(values * values) * (1.0 / p.width) + least)
        _store(out, out_smem, i, number, values * scale * weights)
        return carry

    _Rows(p, c, blocks, (x,), smem, full).for_each(row, None)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it


def _gradient(
    p: Problem, c: Config, blocks: int, w: Any, epsilon: Any, *refs: Any, smem: Any, w_smem: Any, out_smem: Any, full: Any,
    w_full: Any,
) -> None:  # fmt: skip
    *arrays, dx, dw = refs
    engine.copy_gmem_to_smem(w, w_smem, w_full)
    plgpu.barrier_wait(w_full)
    least = epsilon[0]

    def row(i: jax.Array, number: jax.Array, refs: list[Any], total: jax.Array) -> jax.Array:
        x, g = refs[0][...].astype(jnp.float32), refs[1][...].astype(jnp.float32)
        scale = lax.rsqrt(jnp.sum(x * x) * (1.0 / p.width) + least)
        product = g * x
        of_x = g * w_smem[...].astype(jnp.float32)
        mean = jnp.sum(of_x * x) * (1.0 / p.width)
        gradient = scale * (of_x - x * (scale * scale * mean))
        if p.residual:
            gradient += refs[2][...].astype(jnp.float32)
        _store(dx, out_smem, i, number, gradient)
        return total + product * scale

    total = _Rows(p, c, blocks, tuple(arrays), smem, full).for_each(row, jnp.zeros(w.shape, jnp.float32))
    dw[lax.axis_index("block")] = total
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it
