"""The kernel of rotary embeddings: one pass over the rows of q, k and v joined, which takes them apart; or joins gradients.

A block is one warpgroup and takes every so-many-th row, whole. TMA loads the left and the right halves of all heads into a
stage, each half contiguous, and stores them from there: what is not rotated never leaves shared memory. A thread rotates pairs
of numbers in place, for the same places of several heads, so that it keeps their cosines and sines in registers for all heads.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.rotary.problem import Config, Problem, heads_at_once


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """q, k and v [rows, heads, head_dim] of qkv [rows, all heads, head_dim]; or the gradient of qkv from those of q, k and v.

    The last two arrays are cosines and sines, float32 [positions, head_dim / 2].
    """
    p, c, half, dtype = problem, config, problem.head_dim // 2, jnp.dtype(problem.dtype)
    blocks = min(p.rows, gpu.sms * c.blocks)
    *given, cos, sin = arrays
    apart = [jax.ShapeDtypeStruct((p.rows, heads, 2, half), dtype) for heads in p.parts]
    joined = jax.ShapeDtypeStruct((p.rows, sum(p.parts), 2, half), dtype)
    count, at_once = 3 if p.gradient else 1, heads_at_once(p)

    def kernel(*refs: Any, **scratch: Any) -> None:
        _Rows(p, c, blocks, refs[:count], refs[count + 2 :], refs[count : count + 2], **scratch).run()
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    run = engine.kernel(
        kernel,
        engine.Launch(
            f"mgpu_ops_rotary{'_gradient' * p.gradient}",
            {"block": blocks},
            warpgroups=1,
            approx_math=False,
            interpret=interpret,
        ),
        out_type=joined if p.gradient else tuple(apart),
        scratch_types={
            "halves": tuple(plgpu.SMEM((c.stages, sum(p.parts), half), dtype) for _ in range(2)),
            "turns": tuple(plgpu.SMEM((c.stages, at_once, half), jnp.float32) for _ in range(2)),
            "full": plgpu.Barrier(num_arrivals=2 * count + 2 * at_once, num_barriers=c.stages),
        },
    )
    found = run(*(a.reshape(p.rows, -1, 2, half) for a in given), cos, sin)
    return jax.tree.map(lambda x: x.reshape(p.rows, -1, p.head_dim), tuple(found) if not p.gradient else found)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a block. given, outs: the joined array, or its three parts, [rows, heads, 2, head_dim / 2] each.

    turned: cosines and sines. halves: of all heads, [stages, heads, head_dim / 2] each. turns: cosines and sines of a row, once
    for each of the heads that are rotated at once.
    """

    problem: Problem
    config: Config
    blocks: int
    given: tuple[Any, ...]
    outs: tuple[Any, ...]
    turned: tuple[Any, ...]
    halves: tuple[Any, ...]
    turns: tuple[Any, ...]
    full: Any

    def _parts(self, refs: tuple[Any, ...], row: jax.Array, stage: jax.Array) -> Any:
        """(in global memory, in shared memory) of what is copied of a row."""
        begin = 0
        for ref in refs:
            heads = ref.shape[1]
            for number, half in enumerate(self.halves):
                yield ref.at[row, :, number], half.at[stage, pl.ds(begin, heads)]
            begin += heads

    def _load(self, i: jax.Array) -> None:
        row, stage = lax.axis_index("block") + i * self.blocks, lax.rem(i, jnp.int32(self.config.stages))
        for ref, smem in self._parts(self.given, row, stage):
            engine.copy_gmem_to_smem(ref, smem, self.full.at[stage])
        token = lax.rem(row, jnp.int32(self.problem.positions))
        for ref, smem in zip(self.turned, self.turns, strict=True):
            for head in range(smem.shape[1]):
                engine.copy_gmem_to_smem(ref.at[token], smem.at[stage, head], self.full.at[stage])

    def _rotate(self, stage: jax.Array) -> None:
        p, at_once = self.problem, heads_at_once(self.problem)
        layout = plgpu.Layout.WG_STRIDED((at_once, p.head_dim // 2), at_once * p.head_dim // 256)

        def read(ref: Any) -> jax.Array:
            values: jax.Array = plgpu.load(ref, layout=layout, optimized=False)
            return values.astype(jnp.float32)

        cos, sin = (read(turn.at[stage]) for turn in self.turns)
        sin = -sin if p.gradient else sin
        for head in range(0, p.heads + p.kv_heads, at_once):  # those of v stay as they are
            of_left, of_right = (half.at[stage, pl.ds(head, at_once)] for half in self.halves)
            left, right = read(of_left), read(of_right)
            of_left[...] = (left * cos - right * sin).astype(of_left.dtype)
            of_right[...] = (right * cos + left * sin).astype(of_right.dtype)

    def run(self) -> None:
        first, stride, stages = lax.axis_index("block"), self.blocks, self.config.stages
        count, ahead = lax.div(self.problem.rows - first + stride - 1, jnp.int32(stride)), stages - 2

        for i in range(ahead):
            pl.when(i < count)(functools.partial(self._load, jnp.int32(i)))

        def step(i: jax.Array, _: None) -> None:
            # Into the stage of the row before the last one, whose stores have had a row's time to read it.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when(i + ahead < count)(lambda: self._load(i + ahead))
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(self.full.at[stage])
            self._rotate(stage)
            plgpu.commit_smem()  # TMA sees what was written
            copies = list(self._parts(self.outs, first + i * stride, stage))
            for number, (ref, smem) in enumerate(copies, 1):
                plgpu.copy_smem_to_gmem(smem, ref, commit_group=number == len(copies))

        lax.fori_loop(0, count, step, None)
