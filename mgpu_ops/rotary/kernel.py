"""The kernel of rotary embeddings: one pass over the rows of q, k and v joined, which takes them apart; or joins gradients.

A block is one warpgroup and takes every so-many-th row, whole. TMA loads the left and the right halves of all heads into a
stage, each half contiguous, and stores them from there: what is not rotated never leaves shared memory. A thread rotates pairs
of numbers in place, for the same places of several heads, so that it keeps their cosines and sines in registers for all heads.

With norms of q and k it keeps the weights there too. The threads of a warp that have a head exchange their sums of its
squares. In the gradient the heads before the norm come with those of the gradients, and a block adds up its rows' part of the
weights' gradients in registers and writes it once; XLA adds up the blocks' parts.
"""

from __future__ import annotations

import dataclasses
import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.row_norm import factor_of_squares, sums_of_rows
from mgpu_ops.core.tile_scheduler import Rounds
from mgpu_ops.rotary.problem import Config, Problem, heads_at_once

_TOGETHER = 2  # groups of heads that are normalised before any is stored: a store waits for all threads, sums for some


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """q, k and v [rows, heads, head_dim] of qkv [rows, all heads, head_dim]; or the gradient of qkv from those of q, k and v.

    Behind these arrays are cosines and sines, float32 [positions, head_dim / 2]. With `normalised` the gradient takes qkv
    behind those of q, k and v, and last are the weights of both norms, float32 [head_dim], and epsilon [1]. It then gives the
    gradients of the weights too.
    """
    p, c, half, dtype = problem, config, problem.head_dim // 2, jnp.dtype(problem.dtype)
    at_once, sums = heads_at_once(p), p.normalised and p.gradient
    rounds = Rounds.of(p.rows, gpu.sms * c.blocks, gpu, most=2 if sums else None)
    given, turned, norms = arrays[: p.by_row], arrays[p.by_row : p.by_row + 2], arrays[p.by_row + 2 :]
    apart = tuple(jax.ShapeDtypeStruct((p.rows, heads, 2, half), dtype) for heads in p.parts)
    joined = jax.ShapeDtypeStruct((p.rows, sum(p.parts), 2, half), dtype)
    count, kinds = 3 if p.gradient else 1, _kinds(p)
    parts = jax.ShapeDtypeStruct((rounds.blocks, len(kinds), 2, at_once, half), jnp.float32)  # of the weights' gradients

    def kernel(*refs: Any, **scratch: Any) -> None:
        refs, outs = refs[: len(arrays)], refs[len(arrays) :]
        norm = _Norm(p, refs[count : p.by_row], refs[p.by_row + 2 :], **scratch.pop("norm")) if p.normalised else None
        totals = _Rows(
            p, c, rounds, refs[:count], outs[: len(outs) - sums], refs[p.by_row : p.by_row + 2], norm, **scratch
        ).run()
        for kind, halves in enumerate(totals):
            for number, total in enumerate(halves):
                outs[-1][lax.axis_index("block"), kind, number] = total
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it

    buffers: dict[str, Any] = {
        "halves": tuple(plgpu.SMEM((c.stages, sum(p.parts), half), dtype) for _ in range(2)),
        "turns": tuple(plgpu.SMEM((c.stages, at_once, half), jnp.float32) for _ in range(2)),
        "full": plgpu.Barrier(num_arrivals=2 * p.by_row + 2 * at_once, num_barriers=c.stages),
    }
    if p.normalised:
        buffers["norm"] = {
            "weights_full": plgpu.Barrier(num_arrivals=4 * at_once),
            "before": tuple(plgpu.SMEM((c.stages, p.rotated, half), dtype) for _ in range(2 * sums)),
        }
    run = engine.kernel(
        kernel,
        engine.Launch(
            f"mgpu_ops_rotary{'_normalised' * p.normalised}{'_gradient' * p.gradient}",
            {"block": rounds.blocks},
            warpgroups=1,
            approx_math=False,
            interpret=interpret,
        ),
        out_type=(joined, parts) if sums else joined if p.gradient else apart,
        scratch_types=buffers,
    )
    weights = [w.reshape(2, half) for w in norms[:2]]
    found = run(*(a.reshape(p.rows, -1, 2, half) for a in given), *turned, *weights, *norms[2:])
    if not sums:
        return jax.tree.map(lambda x: x.reshape(p.rows, -1, p.head_dim), tuple(found) if not p.gradient else found)
    of_q = np.array([[head < at_once - kind for head in range(at_once)] for kind in kinds])[:, None, :, None]
    of_weights = (jnp.where(own, found[1], 0).sum((0, 1, 3)).reshape(p.head_dim) for own in (of_q, ~of_q))
    return found[0].reshape(p.rows, -1, p.head_dim), *of_weights


def _kind(p: Problem, head: int) -> int:
    """How many of the heads that are rotated at once from `head` on are of k."""
    return min(max(head + heads_at_once(p) - p.heads, 0), heads_at_once(p))


def _kinds(p: Problem) -> list[int]:
    """Those that occur: groups of heads of q, of both, of k."""
    return sorted({_kind(p, head) for head in range(0, p.rotated, heads_at_once(p))})


def _layout(p: Problem) -> Any:
    """Of the halves of the heads that are rotated at once: a thread has one to four numbers next to each other."""
    at_once = heads_at_once(p)
    return plgpu.Layout.WG_STRIDED((at_once, p.head_dim // 2), at_once * p.head_dim // 256)


def _read(p: Problem, ref: Any) -> jax.Array:
    values: jax.Array = plgpu.load(ref, layout=_layout(p), optimized=False)
    return values.astype(jnp.float32)


type Halves = tuple[jax.Array, jax.Array]  # left and right ones of the heads that are rotated at once
type Held = tuple[jax.Array, dict[int, Halves]]  # in registers: epsilon, and the weights of each kind of group


@dataclasses.dataclass(frozen=True)
class _Norm:
    """The norms of q and k in a block.

    joined: of a gradient, the array that was normalised, as `_Rows` has joined ones. arrays: both weights [2, head_dim / 2]
    and epsilon. weights_full: the weights are in shared memory. before: of a gradient, the halves of the heads of q and k
    before the norm, [stages, heads, head_dim / 2] each.
    """

    problem: Problem
    joined: tuple[Any, ...]
    arrays: tuple[Any, ...]
    weights_full: Any
    before: tuple[Any, ...]

    def copies(self, row: jax.Array, stage: jax.Array) -> Iterator[tuple[Any, Any]]:
        """(in global memory, in shared memory) of what was normalised of a row."""
        for ref in self.joined:
            for number, half in enumerate(self.before):
                yield ref.at[row, pl.ds(0, self.problem.rotated), number], half.at[stage]

    def load(self, turns: tuple[Any, ...]) -> Held:
        """Epsilon and the weights, by way of the last two stages of cosines and sines, which are not loaded yet."""
        p, at_once, (q_norm, k_norm, epsilon) = self.problem, heads_at_once(self.problem), self.arrays
        places = [[turn.at[turn.shape[0] - back] for turn in turns] for back in (2, 1)]
        for weight, halves in zip((q_norm, k_norm), places, strict=True):
            for number, half in enumerate(halves):
                for head in range(at_once):
                    engine.copy_gmem_to_smem(weight.at[number], half.at[head], self.weights_full)
        plgpu.barrier_wait(self.weights_full)
        of_q, of_k = ([_read(p, half) for half in halves] for halves in places)
        plgpu.commit_smem()  # TMA writes there once all have read

        def of(kind: int) -> Halves:
            is_q = lax.broadcasted_iota(jnp.int32, of_q[0].shape, 0) < at_once - kind
            left, right = (jnp.where(is_q, q, k) for q, k in zip(of_q, of_k, strict=True))
            return left, right

        return epsilon[0], {kind: of(kind) for kind in _kinds(p)}

    def _factor(self, left: jax.Array, right: jax.Array, epsilon: jax.Array) -> jax.Array:
        """1 / sqrt(mean of x^2 + epsilon) of each head, in all its places."""
        return factor_of_squares(sums_of_rows(left * left + right * right), self.problem.head_dim, epsilon)

    def apply(self, left: jax.Array, right: jax.Array, head: int, held: Held) -> Halves:
        """The heads from `head` on, normalised."""
        weights, factor = held[1][_kind(self.problem, head)], self._factor(left, right, held[0])
        return left * factor * weights[0], right * factor * weights[1]

    def pull(self, g: Halves, stage: jax.Array, head: int, held: Held) -> tuple[Halves, Halves]:
        """The gradients of the heads from `head` on, and their part of the weights', from those of what `apply` gives."""
        p, weights = self.problem, held[1][_kind(self.problem, head)]
        left, right = (_read(p, half.at[stage, pl.ds(head, heads_at_once(p))]) for half in self.before)
        factor = self._factor(left, right, held[0])
        of_left, of_right = g[0] * weights[0], g[1] * weights[1]
        mean = sums_of_rows(of_left * left + of_right * right) * (1.0 / p.head_dim)
        along = factor * factor * mean
        gradients = factor * (of_left - left * along), factor * (of_right - right * along)
        return gradients, (g[0] * left * factor, g[1] * right * factor)


@dataclasses.dataclass(frozen=True)
class _Rows:
    """The rows of a block. given, outs: the joined array, or its three parts, [rows, heads, 2, head_dim / 2] each.

    turned: cosines and sines. norm: of q and k, if there is one. halves: of all heads, [stages, heads, head_dim / 2] each.
    turns: cosines and sines of a row, once for each of the heads that are rotated at once.
    """

    problem: Problem
    config: Config
    rounds: Rounds
    given: tuple[Any, ...]
    outs: tuple[Any, ...]
    turned: tuple[Any, ...]
    norm: _Norm | None
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

    def _load(self, first: jax.Array, i: jax.Array) -> None:
        row, stage = first + i * self.rounds.at_once, lax.rem(i, jnp.int32(self.config.stages))
        copies = [*self._parts(self.given, row, stage), *(self.norm.copies(row, stage) if self.norm else ())]
        for ref, smem in copies:
            engine.copy_gmem_to_smem(ref, smem, self.full.at[stage])
        token = lax.rem(row, jnp.int32(self.problem.positions))
        for ref, smem in zip(self.turned, self.turns, strict=True):
            for head in range(smem.shape[1]):
                engine.copy_gmem_to_smem(ref.at[token], smem.at[stage, head], self.full.at[stage])

    def _rotate(self, stage: jax.Array, held: Held | None, totals: dict[int, Halves]) -> dict[int, Halves]:
        """Rotates a row, and normalises it before, or of a gradient after that. Returns the sums of the weights' gradients."""
        p, at_once, totals = self.problem, heads_at_once(self.problem), dict(totals)
        cos, sin = (_read(p, turn.at[stage]) for turn in self.turns)
        sin = -sin if p.gradient else sin
        groups = range(0, p.rotated, at_once)  # those of v stay as they are
        places = {head: [half.at[stage, pl.ds(head, at_once)] for half in self.halves] for head in groups}
        if not (self.norm and held):
            for of_left, of_right in places.values():
                left, right = _read(p, of_left), _read(p, of_right)
                of_left[...] = (left * cos - right * sin).astype(of_left.dtype)
                of_right[...] = (right * cos + left * sin).astype(of_right.dtype)
            return totals
        for some in itertools.batched(groups, _TOGETHER):
            found: list[Halves] = []
            for head in some:
                left, right = (_read(p, half) for half in places[head])
                if not p.gradient:
                    left, right = self.norm.apply(left, right, head, held)
                left, right = left * cos - right * sin, right * cos + left * sin
                if p.gradient:
                    kind = _kind(p, head)
                    (left, right), parts = self.norm.pull((left, right), stage, head, held)
                    totals[kind] = totals[kind][0] + parts[0], totals[kind][1] + parts[1]
                found.append((left, right))
            for head, halves in zip(some, found, strict=True):
                for place, values in zip(places[head], halves, strict=True):
                    place[...] = values.astype(place.dtype)
        return totals

    def run(self) -> list[Halves]:
        """Returns this block's sums of the weights' gradients, of each kind of group; none where there are none."""
        p, stages, stride = self.problem, self.config.stages, self.rounds.at_once
        first, count = self.rounds.of_block(lax.axis_index("block"))
        ahead = stages - 2

        for i in range(ahead):
            pl.when(i < count)(functools.partial(self._load, first, jnp.int32(i)))
        held = self.norm.load(self.turns) if self.norm else None

        def step(i: jax.Array, totals: dict[int, Halves]) -> dict[int, Halves]:
            # Into the stage of the row before the last one, whose stores have had a row's time to read it.
            plgpu.wait_smem_to_gmem(1, wait_read_only=True)
            pl.when(i + ahead < count)(lambda: self._load(first, i + ahead))
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(self.full.at[stage])
            totals = self._rotate(stage, held, totals)
            plgpu.commit_smem()  # TMA sees what was written
            copies = list(self._parts(self.outs, first + i * stride, stage))
            for number, (ref, smem) in enumerate(copies, 1):
                plgpu.copy_smem_to_gmem(smem, ref, commit_group=number == len(copies))
            return totals

        kinds, shape = _kinds(p) if self.norm and p.gradient else [], (heads_at_once(p), p.head_dim // 2)
        nothing = {kind: (jnp.zeros(shape, jnp.float32), jnp.zeros(shape, jnp.float32)) for kind in kinds}
        return list(lax.fori_loop(0, count, step, nothing).values())
