"""A pipeline of shared-memory stages between a producer warpgroup and consumer warpgroups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, inflight


class Barriers(NamedTuple):
    """The barriers of a `Pipeline`, one of each for a stage: types in a kernel's `scratch_types`, refs in its body."""

    full: Any
    empty: Any


@dataclasses.dataclass(frozen=True)
class Pipeline:
    """`stages` buffers in shared memory, of which step i uses number i % stages.

    The producer waits until a stage is empty and fills it; consumers wait until it is full, read it, and declare it empty
    again. Both count steps from 0 over the whole kernel, not per output tile: the producer loads the next tile's first
    stages while consumers still store the last one.

    A kernel puts `Pipeline.barriers(...)` into its `scratch_types` and makes `Pipeline(stages, *barriers)` of the refs.
    """

    stages: int
    full: Any
    empty: Any

    def __post_init__(self) -> None:
        inflight.has_pipeline(self.full, self.empty)

    @staticmethod
    def barriers(stages: int, *, copies: int, consumers: int) -> Barriers:
        """The two barriers: `copies` arrive when a stage is full, `consumers` warpgroups when it is empty again."""
        return Barriers(
            full=plgpu.Barrier(num_arrivals=copies, num_barriers=stages),
            empty=plgpu.Barrier(num_arrivals=consumers, num_barriers=stages),
        )

    def fill(self, step: jax.Array, copy: Callable[[jax.Array, Any], None]) -> None:
        """Producer: waits until the stage of `step` is empty, then starts `copy(stage, full barrier of the stage)`."""
        stage = lax.rem(step, jnp.int32(self.stages))

        @pl.when(step >= self.stages)  # every stage starts empty
        def _() -> None:
            plgpu.barrier_wait(self.empty.at[stage])

        copy(stage, self.full.at[stage])

    def drain(self, steps: jax.Array) -> None:
        """Producer, at its end: waits until consumers have read all of `steps` steps."""
        for stage in range(self.stages):

            @pl.when(steps > stage)
            def _(stage: int = stage) -> None:
                plgpu.barrier_wait(self.empty.at[stage])

    def read(self, step: jax.Array, compute: Callable[[jax.Array], None]) -> None:
        """Consumer: waits until the stage of `step` is full, runs `compute(stage)`, and declares the stage empty.

        At the end of `compute`, nothing may still read the stage: no wgmma on it is in flight.
        """
        stage = lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.full.at[stage])
        compute(stage)
        engine.barrier_arrive(self.empty.at[stage])
