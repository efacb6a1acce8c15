"""The pipeline of shared-memory stages: what is copied into a stage is read once, and not overwritten before."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.pipeline import Pipeline


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """Each test starts with no kernel interpreted; the race detector's pages go nowhere."""
    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    engine.reset_interpreter()


def passed_on(
    stages: int, steps: int, *, consumers: int = 1, drain_first: bool = True, pipeline: type[Pipeline] = Pipeline
) -> Any:
    """A kernel: out[wg, i] = x[i] + wg. Both halves of x[i] are copied on their own; at last every stage is overwritten."""

    def body(x_ref: Any, out_ref: Any, *, buffer: Any, again: Any, barriers: Any) -> None:
        steps_of = pipeline(stages, *barriers)

        def producer() -> None:
            def step(i: Any, _: Any) -> Any:
                def copy(stage: Any, full: Any) -> None:
                    for half in range(2):
                        engine.copy_gmem_to_smem(x_ref.at[i, half], buffer.at[stage, half], full)

                steps_of.fill(i, copy)
                return _

            lax.fori_loop(0, steps, step, ())
            if drain_first:
                steps_of.drain(jnp.int32(steps))
            for stage in range(stages):
                engine.copy_gmem_to_smem(x_ref.at[0, 0], buffer.at[stage, 0], again)
            plgpu.barrier_wait(again)
            if not drain_first:
                steps_of.drain(jnp.int32(steps))

        def consumer() -> None:
            wg = lax.axis_index("wg")

            def step(i: Any, _: Any) -> Any:
                def compute(stage: Any) -> None:
                    out_ref[wg, i] = buffer[stage] + wg
                    plgpu.commit_smem()  # TMA is to overwrite what was read by other means

                steps_of.read(i, compute)
                return _

            lax.fori_loop(0, steps, step, ())

        engine.specialize(producer, consumer, consumers=consumers, producer_registers=40, consumer_registers=232)

    return engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=consumers + 1, interpret=True),
        out_type=jax.ShapeDtypeStruct((consumers, max(1, steps), 2, 128), jnp.int32),
        scratch_types={
            "buffer": plgpu.SMEM((stages, 2, 128), jnp.int32),
            "again": plgpu.Barrier(num_arrivals=stages),
            "barriers": Pipeline.barriers(stages, copies=2, consumers=consumers),
        },
    )


def numbers(steps: int) -> jax.Array:
    return jnp.arange(max(1, steps) * 256, dtype=jnp.int32).reshape(-1, 2, 128)


@pytest.mark.parametrize(("stages", "steps"), [(2, 1), (2, 2), (2, 7), (3, 7), (4, 3)])
@pytest.mark.parametrize("consumers", [1, 2])
def test_every_consumer_gets_every_step_in_order_without_a_race(stages, steps, consumers):
    x = numbers(steps)
    out = passed_on(stages, steps, consumers=consumers)(x)
    np.testing.assert_array_equal(out, [np.asarray(x) + wg for wg in range(consumers)])
    assert not engine.races_found()


def test_no_steps_are_nothing_to_wait_for():
    passed_on(2, 0)(numbers(0)).block_until_ready()
    assert not engine.races_found()


def has_a_race(**kwargs: Any) -> bool:
    """Up to jax 0.11 the interpreter notes a race and goes on, from 0.12 it raises."""
    try:
        passed_on(2, 5, **kwargs)(numbers(5)).block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return "RACE DETECTED" in str(error)
    return engine.races_found()


def test_slots_may_be_overwritten_after_a_drain_and_not_before():
    assert not has_a_race()
    engine.reset_interpreter()
    assert has_a_race(drain_first=False)


class Hasty(Pipeline):
    """Declares a stage empty before it has read it."""

    def read(self, step: Any, compute: Callable[[Any], None]) -> None:
        stage = lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.full.at[stage])
        engine.barrier_arrive(self.empty.at[stage])
        compute(stage)


def test_detector_finds_a_slot_that_is_released_before_it_was_read():
    assert has_a_race(pipeline=Hasty)


def products(stages: int, steps: int, in_flight: int, beside: int, last: bool) -> Any:
    """A kernel of x[2 steps, 64, 64], w[2, 64, 64] and a ref: of two tiles the sums of x[i] w[0] over their steps.

    last: the last step of a tile takes w[1]. The ref, at [0, t, i], counts the calls of the i-th of `beside`, at [1, t, i] how
    often step i of tile t was released.
    """

    def body(
        x_ref: Any, w_ref: Any, marks_ref: Any, out_ref: Any, *, x: Any, w: Any, acc: Any, loaded: Any, barriers: Any
    ) -> None:
        pipeline = Pipeline(stages, *barriers)

        def producer() -> None:
            engine.copy_gmem_to_smem(w_ref.at[0], w.at[0], loaded)
            engine.copy_gmem_to_smem(w_ref.at[1], w.at[1], loaded)

            def step(i: Any, stage: Any) -> Any:
                pipeline.fill(i, lambda stage, full: engine.copy_gmem_to_smem(x_ref.at[i], x.at[stage], full), stage)
                return pipeline.next(stage)

            lax.fori_loop(0, 2 * steps, step, jnp.int32(0))
            pipeline.drain(jnp.int32(2 * steps))

        def consumer(acc: Any) -> None:
            plgpu.barrier_wait(loaded)

            def tile(t: Any, _: None) -> None:
                def mark(kind: int, i: Any) -> None:
                    marks_ref[kind, t, i] = marks_ref[kind, t, i] + 1

                acc[...] = jnp.zeros(acc.shape, jnp.float32)
                pipeline.multiply(
                    t * steps,
                    steps,
                    lambda stage: engine.wgmma(acc, x.at[stage], w.at[0]),
                    [lambda i=i: mark(0, i) for i in range(beside)],
                    in_flight,
                    (lambda stage: engine.wgmma(acc, x.at[stage], w.at[1])) if last else None,
                    lambda step: mark(1, step - t * steps),
                )
                out_ref[t] = acc[...]

            lax.fori_loop(0, 2, tile, None)

        engine.specialize(producer, lambda: acc.scope(consumer), consumers=1, producer_registers=40, consumer_registers=232)

    def tiles(count: int) -> Any:
        return plgpu.SMEM((count, 64, 64), jnp.bfloat16, transforms=engine.operand_transforms(64, jnp.bfloat16))

    return engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=2, interpret=True),
        out_type=jax.ShapeDtypeStruct((2, 64, 64), jnp.float32),
        scratch_types={
            "x": tiles(stages),
            "w": tiles(2),
            "acc": engine.Accumulators(((64, 64),), 1),
            "loaded": plgpu.Barrier(num_arrivals=2),
            "barriers": Pipeline.barriers(stages, copies=1, consumers=1),
        },
    )


@pytest.mark.parametrize("in_flight", [0, 1])
@pytest.mark.parametrize(("steps", "beside", "last"), [(1, 0, False), (1, 1, True), (2, 0, True), (5, 2, False), (3, 3, True)])
def test_every_step_of_a_tile_is_multiplied_and_released_once(steps: int, beside: int, last: bool, in_flight: int) -> None:
    x, w = (
        jax.random.randint(jax.random.key(seed), (n, 64, 64), -2, 3).astype(jnp.bfloat16)
        for seed, n in ((0, 2 * steps), (1, 2))
    )
    marks = jax.new_ref(jnp.zeros((2, 2, steps, 128), jnp.int32))
    sums = products(3, steps, in_flight, beside, last)(x, w, marks)
    factors = np.asarray(w, np.float64)[[int(last and i == steps - 1) for i in range(steps)]]
    wanted = np.einsum("tsmk,skn->tmn", np.asarray(x, np.float64).reshape(2, steps, 64, 64), factors)
    np.testing.assert_array_equal(sums, wanted)
    called, released = np.asarray(marks[...])
    np.testing.assert_array_equal(called, np.broadcast_to(np.arange(steps)[:, None] < beside, called.shape))
    np.testing.assert_array_equal(released, np.ones_like(released))
    assert not engine.races_found()
