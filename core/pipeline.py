"""A pipeline of shared-memory stages between a producer warpgroup and consumer warpgroups."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
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
    first_full: Any = 0  # of the `full` barriers, where consumers have their own
    first_empty: Any = 0  # of the `empty` ones, likewise

    def __post_init__(self) -> None:
        inflight.has_pipeline(self.full, self.empty)

    @staticmethod
    def barriers(stages: int, *, copies: int, consumers: int, cluster_axes: tuple[str, ...] = ()) -> Barriers:
        """The two barriers: `copies` arrive when a stage is full, `consumers` warpgroups when it is empty again.

        cluster_axes: of the blocks that share copies, all of which must have read a stage.
        """
        return Barriers(plgpu.Barrier(num_arrivals=copies, num_barriers=stages), _empty(stages, consumers, cluster_axes))

    @staticmethod
    def barriers_in_turn(stages: int, *, copies: int, consumers: int, cluster_axes: tuple[str, ...] = ()) -> Barriers:
        """Those of a pipeline whose steps are each read by one of `consumers` warpgroups; `of_consumer` makes its Pipeline.

        A thread knows a barrier's phase by the number of its own waits. So each consumer has its own `full` barriers, on which
        only its steps arrive. cluster_axes: of the blocks that share copies, all of which must have read a stage.
        """
        full = plgpu.Barrier(num_arrivals=copies, num_barriers=consumers * stages)
        return Barriers(full, _empty(stages, 1, cluster_axes))

    def of_consumer(self, consumer: jax.Array) -> Pipeline:
        """The pipeline with the steps of one consumer, where consumers take turns (`barriers_in_turn`)."""
        return dataclasses.replace(self, first_full=consumer * self.stages)

    def own(self, consumer: Any) -> Pipeline:
        """The pipeline of one consumer, where each has its own part of each stage, and `stages` barriers of each kind."""
        return dataclasses.replace(self, first_full=consumer * self.stages, first_empty=consumer * self.stages)

    def _full(self, stage: jax.Array) -> Any:
        return self.full.at[_after(self.first_full, stage)]

    def _empty(self, stage: Any) -> Any:
        return self.empty.at[_after(self.first_empty, stage)]

    def fill(self, step: jax.Array, copy: Callable[[jax.Array, Any], None], stage: jax.Array | None = None) -> None:
        """Producer: waits until the stage of `step` is empty, then starts `copy(stage, full barrier of the stage)`.

        stage: of the step, where a loop counts it (`next`).
        """
        stage = self.first(step) if stage is None else stage

        @pl.when(step >= self.stages)  # every stage starts empty
        def _() -> None:
            plgpu.barrier_wait(self._empty(stage))

        copy(stage, self._full(stage))

    def filled(self, step: jax.Array) -> None:
        """Producer, where what fills a stage arrives at no barrier: tells that it is there, for the stage of `step`."""
        plgpu.barrier_arrive(self._full(self.first(step)))

    def drain(self, steps: jax.Array) -> None:
        """Producer, at its end: waits until consumers have read all of `steps` steps."""
        for stage in range(self.stages):

            @pl.when(steps > stage)
            def _(stage: int = stage) -> None:
                plgpu.barrier_wait(self._empty(stage))

    def multiply(
        self,
        first: jax.Array,
        steps: int,
        start: Callable[[jax.Array], None],
        beside: Sequence[Callable[[], None]] = (),
        in_flight: int = 1,
        last: Callable[[jax.Array], None] | None = None,
        released: Callable[[jax.Array], None] | None = None,
    ) -> None:
        """Consumer: runs `start(stage)`, which starts one wgmma, for `steps` steps from `first` on.

        beside: what the first steps do, one each, when they have started their wgmma.
        in_flight: 1, a stage is declared empty when the wgmma of the step after it has started, so that the tensor cores always
          have work; or 0, when its own wgmma is done.
        last: what the last step runs in place of `start`.
        released: called with each step whose stage this consumer has declared empty.
        """

        def begin(stage: jax.Array, start: Callable[[jax.Array], None] = start) -> jax.Array:
            plgpu.barrier_wait(self._full(stage))
            start(stage)
            return self.next(stage)

        def release(step: jax.Array, stage: jax.Array, in_flight: int) -> jax.Array:
            engine.wgmma_wait(in_flight)
            engine.barrier_arrive(self._empty(stage), in_flight)
            if released is not None:
                released(step)
            return self.next(stage)

        def step(i: jax.Array, stages: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, jax.Array]:
            with inflight.iteration():
                started = begin(stages[0])
                return started, release(first + i - in_flight, stages[1], in_flight)

        alone = max(in_flight, len(beside))
        started = done = self.first(first)  # the stages of the next step to start, and to declare empty
        for i in range(alone):
            started = begin(started, last if last is not None and i == steps - 1 else start)
            if i < len(beside):
                beside[i]()
            if i >= in_flight:
                done = release(first + (i - in_flight), done, in_flight)
        alike = steps if last is None else max(alone, steps - 1)
        started, done = lax.fori_loop(alone, alike, step, (started, done))
        if alike < steps and last is not None:
            begin(started, last)
            done = release(first + (alike - in_flight), done, in_flight)
        if in_flight:
            release(first + (steps - 1), done, 0)

    def first(self, step: jax.Array) -> jax.Array:
        """The stage of a step. A loop counts on from it with `next`, which takes fewer instructions."""
        return lax.rem(step, jnp.int32(self.stages))

    def next(self, stage: jax.Array) -> jax.Array:
        """The stage of the step after that of `stage`."""
        return jnp.where(stage == self.stages - 1, 0, stage + 1)

    def read_stage(self, stage: jax.Array, compute: Callable[[jax.Array], None]) -> None:
        """Consumer: as `read`, of the step that is in `stage`."""
        plgpu.barrier_wait(self._full(stage))
        compute(stage)
        engine.barrier_arrive(self._empty(stage))

    def read(self, step: jax.Array, compute: Callable[[jax.Array], None]) -> None:
        """Consumer: waits until the stage of `step` is full, runs `compute(stage)`, and declares the stage empty.

        At the end of `compute`, nothing may still read the stage: no wgmma on it is in flight.
        """
        stage = self.wait(step)
        compute(stage)
        engine.barrier_arrive(self._empty(stage))

    def release(self, step: jax.Array) -> None:
        """Consumer: declares the stage of `step` empty."""
        engine.barrier_arrive(self._empty(self.first(step)))

    def wait(self, step: jax.Array) -> jax.Array:
        """Waits until the stage of `step` is full, and returns its number."""
        stage = self.first(step)
        plgpu.barrier_wait(self._full(stage))
        return stage


def _after(first: Any, stage: Any) -> Any:
    return stage if isinstance(first, int) and first == 0 else first + stage


def _empty(stages: int, arrivals: int, cluster_axes: tuple[str, ...]) -> Any:
    """The barriers at which so many warpgroups of each block of a cluster declare stages empty."""
    if cluster_axes:
        return plgpu.ClusterBarrier(collective_axes=cluster_axes, num_arrivals=arrivals, num_barriers=stages)
    return plgpu.Barrier(num_arrivals=arrivals, num_barriers=stages)
