"""The kernels of cross-entropy: one pass over the logits for loss and lse, and one for their gradient.

A block is one warpgroup: Mosaic's sums and maxima go through shared memory that all warpgroups of a block would write. It
takes every so-many-th row, tile after tile of its columns. While it works on one, TMA loads the next ones, also those of its
next row. The last tile of a row ends with the row, and so may begin within the one before: Mosaic stores a tile that lies
contiguous in memory by a plain bulk copy, which nothing clips. Where they overlap, both store the same gradient, in turn. A
gradient in the place of the logits is stored once the logits of the next tile that it overlaps have arrived.
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

from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.tile_scheduler import Rounds
from mgpu_ops.cross_entropy.problem import LANES, Config, Problem

LOG2E = math.log2(math.e)


def launch(
    problem: Problem,
    config: Config,
    gpu: Gpu,
    logits: jax.Array,
    labels: jax.Array,
    *rows: jax.Array,
    interpret: bool = False,
    in_place: bool = False,
) -> Any:
    """(loss, lse) of float32, or the gradient of the logits; `rows` are then lse, p and q of float32.

    in_place: the gradient takes the place of the logits, if these can be read before.
    """
    p, c = problem, config
    rounds, parts = Rounds.of(p.rows, gpu.sms * c.blocks, gpu), (p.vocabulary // LANES, LANES)
    tile, dtype = (c.tile // LANES, LANES), jnp.dtype(p.dtype)
    # Of two stages none is free for a last tile's logits while the tile before it is still to be stored.
    in_place = in_place and p.gradient and (p.vocabulary % c.tile == 0 or c.stages > 2)
    number = jax.ShapeDtypeStruct((p.rows,), jnp.float32)
    scratch: dict[str, Any] = {
        "smem": plgpu.SMEM((c.stages, *tile), dtype),
        "full": plgpu.Barrier(num_barriers=c.stages),
    }
    if p.gradient:
        scratch["out_smem"] = plgpu.SMEM((2, *tile), dtype)
    body = _gradient if p.gradient else _forward
    name = f"mgpu_ops_cross_entropy{'_gradient' * p.gradient}"

    def kernel(*refs: Any, smem: Any, full: Any, **more: Any) -> None:
        body(_Rows(p, c, rounds, refs[0], smem, full, in_place), *refs, *refs[: int(in_place)], **more)

    run = engine.kernel(
        kernel,
        engine.Launch(name, {"block": rounds.blocks}, warpgroups=1, approx_math=True, interpret=interpret),
        out_type=() if in_place else jax.ShapeDtypeStruct((p.rows, *parts), dtype) if p.gradient else (number, number),
        scratch_types=scratch,
    )
    given = logits.reshape(p.rows, *parts)
    if in_place:
        ref = jax.new_ref(given)
        run(ref, labels, *rows)
        return engine.frozen(ref, given, labels).reshape(logits.shape)
    out = run(given, labels, *rows)
    return out.reshape(logits.shape) if p.gradient else out


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a block, and their tiles as they come through shared memory."""

    problem: Problem
    config: Config
    rounds: Rounds
    logits: Any  # [rows, vocabulary / 128, 128]
    smem: Any  # [stages, tile / 128, 128]
    full: Any
    in_place: bool  # whether tiles are stored where they were loaded

    @property
    def parts(self) -> int:
        return self.problem.vocabulary // LANES

    @property
    def tile(self) -> int:
        return self.config.tile // LANES

    @property
    def tiles(self) -> int:
        """Of a row."""
        return math.ceil(self.parts / self.tile)

    def _start(self, tile: jax.Array) -> jax.Array:
        """The first part of a tile of a row."""
        return jnp.minimum(tile * self.tile, self.parts - self.tile)

    def _wait(self, i: jax.Array, j: jax.Array) -> jax.Array:
        """Waits for the logits of a row's tile j, the i-th of all, and returns their stage.

        In place, of the last two tiles if these overlap: what is stored of the first overwrites logits of the second.
        """

        def full(i: jax.Array) -> Any:
            return self.full.at[lax.rem(i, jnp.int32(self.config.stages))]

        if self.in_place and self.parts % self.tile:
            pl.when(j < self.tiles - 1)(lambda: plgpu.barrier_wait(full(i)))
            pl.when(j == self.tiles - 2)(lambda: plgpu.barrier_wait(full(i + 1)))
        else:
            plgpu.barrier_wait(full(i))
        return lax.rem(i, jnp.int32(self.config.stages))

    def for_each(self, row: Callable[[jax.Array, Callable[..., Any]], None]) -> None:
        """Runs `row(number, for_each_tile)` for each row of this block.

        `for_each_tile(fn, carry)` runs `carry = fn(at, values, before, i, carry)` for each tile of the row and returns the last
        carry. at: the tile's first part of the row. values: float32 [tile / 128, 128]. before: how many of its first parts were
        in the tile before. i: counts the tiles of all rows.
        """
        first, rows = self.rounds.of_block(lax.axis_index("block"))
        stride, count, ahead = self.rounds.at_once, rows * self.tiles, self.config.stages - 1

        def load(i: jax.Array) -> None:
            stage = lax.rem(i, jnp.int32(self.config.stages))
            at = first + lax.div(i, jnp.int32(self.tiles)) * stride
            part = self._start(lax.rem(i, jnp.int32(self.tiles)))
            engine.copy_gmem_to_smem(self.logits.at[at, pl.ds(part, self.tile)], self.smem.at[stage], self.full.at[stage])

        for i in range(ahead):
            pl.when(i < count)(functools.partial(load, jnp.int32(i)))

        def one(r: jax.Array, _: None) -> None:
            def for_each_tile(fn: Callable[..., Any], carry: Any) -> Any:
                def step(j: jax.Array, carry: Any) -> Any:
                    i = r * self.tiles + j
                    stage = self._wait(i, j)
                    values = self.smem[stage].astype(jnp.float32)
                    plgpu.commit_smem()  # all threads have read the tile: the stage of the one before it may be filled again
                    pl.when(i + ahead < count)(functools.partial(load, i + ahead))
                    at = self._start(j)
                    return fn(at, values, j * self.tile - at, i, carry)

                return lax.fori_loop(0, self.tiles, step, carry)

            row(first + r * stride, for_each_tile)

        lax.fori_loop(0, rows, one, None)


def _forward(x: _Rows, logits: Any, labels: Any, loss: Any, lse: Any) -> None:
    p = x.problem

    def row(number: jax.Array, for_each_tile: Callable[..., Any]) -> None:
        label = labels[number]
        seen = jnp.clip(label, 0, p.vocabulary - 1)
        of_label = logits[number, lax.div(seen, jnp.int32(LANES)), lax.rem(seen, jnp.int32(LANES))].astype(jnp.float32)

        def add(at: jax.Array, values: jax.Array, before: jax.Array, i: jax.Array, carry: Any) -> Any:
            """The largest logit until now, and the sum of exponentials beside it."""
            largest, total = carry
            if x.parts % x.tile:
                values = jnp.where(_iota(values.shape, 0) >= before, values, -jnp.inf)  # each logit once
            now = jnp.maximum(largest, jnp.max(values))
            kept = jnp.where(largest == -jnp.inf, 0.0, jnp.exp2((_finite(largest) - _finite(now)) * LOG2E))
            return now, total * kept + jnp.sum(jnp.exp2((values - _finite(now)) * LOG2E))

        largest, total = for_each_tile(add, (jnp.float32(-jnp.inf), jnp.float32(0.0)))
        found = _finite(largest) + jnp.log(total)
        beyond = jnp.where(label < p.vocabulary, found - of_label, jnp.nan)
        lse[number] = found
        loss[number] = jnp.where(label < 0, 0.0, beyond)

    x.for_each(row)


def _gradient(x: _Rows, logits: Any, labels: Any, lse: Any, p: Any, q: Any, out: Any, *, out_smem: Any) -> None:
    def row(number: jax.Array, for_each_tile: Callable[..., Any]) -> None:
        label, sums, of_all, of_label = labels[number], lse[number], p[number], q[number]

        def store(at: jax.Array, values: jax.Array, before: jax.Array, i: jax.Array, carry: None) -> None:
            column = (at + _iota(values.shape, 0)) * LANES + _iota(values.shape, 1)
            gradient = jnp.exp2((values - sums) * LOG2E) * of_all - jnp.where(column == label, of_label, 0.0)
            slot = out_smem.at[lax.rem(i, jnp.int32(2))]
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)  # the store before the last one has read its slot
            if x.parts % x.tile:
                pl.when(before > 0)(lambda: plgpu.wait_smem_to_gmem(0))  # the tile before is written
            slot[...] = gradient.astype(out.dtype)
            plgpu.commit_smem()  # TMA sees what was written
            plgpu.copy_smem_to_gmem(slot, out.at[number, pl.ds(at, x.tile)])
            return carry

        for_each_tile(store, None)

    x.for_each(row)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it


def _finite(x: jax.Array) -> jax.Array:
    """x, or 0 where it is infinite: what is taken off before exponentials."""
    return jnp.where(jnp.abs(x) == jnp.inf, 0.0, x)


def _iota(shape: tuple[int, ...], dimension: int) -> jax.Array:
    return lax.broadcasted_iota(jnp.int32, shape, dimension)
