"""The online softmax of the forward kernel: scores of a row arrive one kv block after the other."""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import LOG2E
from mgpu_ops.attention.layouts import PER_ROW, TILE, along_rows
from mgpu_ops.attention.problem import ROWS
from mgpu_ops.core import regions
from mgpu_ops.core.tile_scheduler import Int

HIGHEST = 3e38  # the row max where a sink is larger: less the sink itself, an infinite one leaves an infinite sum, not NaN
THRESHOLD = 8.0  # of a row max that is kept: weights are up to 2^8, of which a row's sum and float16 have room for many
_LANES = 8  # columns of wgmma's layout in which each thread has two: 4 threads have a row
LOWEST = -1e30  # the row max before any score: scores below count as masked, and 2^(-inf - LOWEST) is 0, not NaN


@dataclasses.dataclass(frozen=True)
class Scores:
    """Scores times log2(e) of a warpgroup's rows and a kv block: values * factor, [64, tile_kv].

    The factor is positive, so that the row max can be taken first; multiplying then fuses with subtracting it. None: 1.
    """

    values: jax.Array
    factor: jax.Array | float | None

    def scaled(self, x: jax.Array) -> jax.Array:
        return x if self.factor is None else x * self.factor


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class OnlineSoftmax:
    """Row max and row sum of the scores so far, [64] each in registers. Exponentials are powers of 2.

    The output so far is the sum of weights times values, not yet divided by the row sum. When the row max grows, weights that
    were taken with the old one are too large: row sum and output are multiplied by a rescale factor of at most 1.
    Started `by_lanes`, the row sum is [64, 8], each thread's own part of it, until `added_up`: threads exchange nothing for it.
    Started with a `threshold`, the row max is the largest score but for that much: it changes when a score is greater than it
    by more, and most rescale factors are 1. Weights are then up to 2^threshold.
    """

    row_max: jax.Array
    row_sum: jax.Array
    threshold: float = dataclasses.field(default=0.0, metadata={"static": True})

    @staticmethod
    def start(by_lanes: bool = False, threshold: float = 0.0) -> OnlineSoftmax:
        row_max, row_sum = (plgpu.layout_cast(jnp.full((ROWS,), x, jnp.float32), PER_ROW) for x in (LOWEST, 0.0))
        if by_lanes:
            row_sum = plgpu.layout_cast(jnp.full((ROWS, _LANES), 0.0, jnp.float32), TILE)
        return OnlineSoftmax(row_max, row_sum, threshold)

    def _with(self, row_max: jax.Array, row_sum: jax.Array) -> OnlineSoftmax:
        return dataclasses.replace(self, row_max=row_max, row_sum=row_sum)

    @property
    def by_lanes(self) -> bool:
        return self.row_sum.ndim == 2

    def added_up(self) -> OnlineSoftmax:
        """With one row sum a row, after the last kv block."""
        return self._with(self.row_max, jnp.sum(self.row_sum, axis=1)) if self.by_lanes else self

    def update(self, scores: Scores, dtype: Any) -> tuple[jax.Array, OnlineSoftmax, jax.Array]:
        """With one more kv block: its weights 2^(score - row max) in `dtype`, the new state, and the rescale factor."""
        return self.update_in_halves(scores, dtype)[:3]

    @regions.region("softmax")
    def update_in_halves(self, scores: Scores, dtype: Any) -> tuple[jax.Array, OnlineSoftmax, jax.Array, jax.Array]:
        """`update`; and by lanes the row sum with the first half of the block's columns only, else the whole one."""
        row_max = jnp.maximum(self.row_max, scores.scaled(jnp.max(scores.values, axis=1)))
        if self.threshold:
            row_max = jnp.where(row_max > self.row_max + self.threshold, row_max, self.row_max)
        weights = jnp.exp2(scores.scaled(scores.values) - along_rows(row_max, scores.values.shape))
        rescale = jnp.exp2(self.row_max - row_max)
        rounded = weights.astype(dtype)
        if not self.by_lanes:
            half = row_sum = self.row_sum * rescale + jnp.sum(weights, axis=1)
        else:
            parts = [weights[:, i : i + _LANES] for i in range(0, weights.shape[1], _LANES)]
            first, second = parts[: len(parts) // 2], parts[len(parts) // 2 :]
            half = functools.reduce(jnp.add, first, self.row_sum * along_rows(rescale, self.row_sum.shape))
            row_sum = functools.reduce(jnp.add, second, half)
        return rounded, self._with(row_max, row_sum), rescale, half

    def without_padding(self, row: Int, q_end: Int) -> OnlineSoftmax:
        """For rows from `row` on: those from `q_end` on are padding, and see nothing."""
        rows = plgpu.broadcasted_iota(jnp.int32, (ROWS,), 0, layout=PER_ROW) + row
        return self._with(self.row_max, jnp.where(rows < q_end, self.row_sum, 0.0))

    def with_sink(self, sink: jax.Array) -> tuple[OnlineSoftmax, jax.Array]:
        """With one more key, of score `sink` (times log2(e); one, or one a row) and without a value; and the rescale factor.

        After all other keys. A row that sees none of them still sees nothing.
        """
        row_max = jnp.minimum(jnp.maximum(self.row_max, sink), HIGHEST)
        rescale = jnp.exp2(self.row_max - row_max)
        row_sum = self.row_sum * rescale + jnp.exp2(sink - row_max)
        return self._with(row_max, jnp.where(self.row_sum == 0, 0.0, row_sum)), rescale

    def normalise(self, out: jax.Array, *, some_see_nothing: bool, rescale: jax.Array | None = None) -> jax.Array:
        """The output, times any rescale factor, divided by the row sum.

        Rows that see nothing get zeros, even where `out` holds NaN: values times 0.
        """
        inverse = jnp.where(self.row_sum == 0, 0.0, 1.0 / self.row_sum)
        if rescale is not None:
            inverse *= rescale
        normalised = out * along_rows(inverse, out.shape)
        if some_see_nothing:
            normalised = jnp.where(along_rows(self.row_sum, out.shape) == 0, 0.0, normalised)
        return normalised

    def log_sum_exp(self) -> jax.Array:
        """The logarithm of each row's sum of exponentials; +inf for a row that sees nothing, so that e^(score - it) is 0."""
        return jnp.where(self.row_sum == 0, jnp.inf, (self.row_max + jnp.log2(self.row_sum)) * (1 / LOG2E))
