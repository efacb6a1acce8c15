"""A wait for the tensor cores that is missing, or waits for too little, is found when the kernel is traced: in each of ours.

JAX's interpreter computes a product at once, so that no result and no race of it tells of such a wait.
"""

from __future__ import annotations

import functools
import re
import sys
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

import mgpu_ops
from mgpu_ops import spec_of
from mgpu_ops.core import engine, gpu, inflight, scaled
from mgpu_ops.core.inflight import InFlight
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.tuning import suites

H200 = gpu.find("h200")

_DEFERRED = {"schedule": "deferred", "epilogue_tile_n": 64, "epilogue_slots": 1}
KERNELS = {  # op, name of the shape, changes to the default config; which between them have all the waits that there are
    "matmul": ("matmul", "square-4096", {}),
    "matmul, deferred": ("matmul", "square-4096", {"schedule": "deferred", "wg_dimension": "m"}),
    "matmul, scales of blocks": ("matmul", "llama3-8b-qkv-4096-fp8-block", {}),
    "gated_matmul": ("gated_matmul", "llama3-8b-4096", {}),
    "gated_matmul, a stored gate": ("gated_matmul", "llama3-8b-4096-stored-gradient", {}),
    "quantized_matmul": ("quantized_matmul", "llama3-8b-down-16-w8", {}),
    "quantized_matmul of groups": ("quantized_matmul", "llama3-8b-down-16-w4", {}),
    "quantized_grouped_matmul": ("quantized_grouped_matmul", "qwen3-30b-gate_up-64-random-w4", {}),
    "grouped_matmul": ("grouped_matmul", "mixtral-8x7b-gate_up-2048-even", {}),
    "grouped_matmul, deferred": ("grouped_matmul", "mixtral-8x7b-gate_up-2048-even", _DEFERRED),
    "grouped_matmul, scales of blocks": ("grouped_matmul", "qwen3-30b-gate_up-16384-random-fp8-block", {}),
    "ragged_contraction": ("ragged_contraction", "mixtral-8x7b-gate_up-2048-even-drhs", {}),
    "ragged_contraction, deferred": ("ragged_contraction", "mixtral-8x7b-gate_up-2048-even-drhs", _DEFERRED),
    "forward": ("flash_attention", "mistral-7b-16384-window", {}),
    "decoding": ("flash_attention", "llama3-8b-decode-16x8192", {}),
    "backward, fused": (
        "flash_attention_backward",
        "mha64-4096",
        {"mode": "fused", "max_concurrent_steps": 2, "dq_step": "same", "q_order": "together", "kv_slots": 1},
    ),
    "backward, dq in the next step, halves of rows": ("flash_attention_backward", "mha64-4096", {"dq_step": "next"}),
    "backward, dq in the next step": ("flash_attention_backward", "mha128-4096", {"mode": "fused", "dq_step": "next"}),
    "backward, dk from registers": (
        "flash_attention_backward",
        "mha128-4096-causal",
        {"mode": "fused", "max_concurrent_steps": 3, "dq_step": "next", "q_order": "apart", "dk_operand": "registers"},
    ),
    "backward, in turns": (
        "flash_attention_backward",
        "mha64-4096-causal",
        {"mode": "fused", "tile_q": 128, "max_concurrent_steps": 3, "dq_step": "next", "q_order": "apart"},
    ),
    "backward, split": (
        "flash_attention_backward",
        "mha64-4096",
        {"mode": "split", "dq_step": "same", "q_order": "together", "kv_slots": 1},
    ),
    "backward, narrow": ("flash_attention_backward", "phi3-mini-4096-causal", {}),
    "backward, narrow, split": ("flash_attention_backward", "phi3-mini-4096-causal", {"mode": "split"}),
    "backward, wide": ("flash_attention_backward", "gemma2-9b-8192-causal", {}),
}
# Where in our kernels something is waited for: by `wgmma_wait`, or by `accumulated` before it reads. (File, line)
# A wait that only ptxas needs says so in its line; tests of the SASS hold these.
LOOP = Path(scaled.__file__)  # a main loop of several ops
SITES = [
    (str(path), number)
    for path in [LOOP, *(p for p in sorted(Path(mgpu_ops.__path__[0]).rglob("*.py")) if p.parent.name != "core")]
    for number, line in enumerate(path.read_text().splitlines(), 1)
    if re.search(r"engine\.(wgmma_wait|accumulated)\(", line) and "ptxas" not in line
]


def trace(name: str, *, interpret: bool = False) -> None:
    """Traces a kernel, or two that belong together; nothing is compiled or run."""
    op, shape, changes = KERNELS[name]
    spec = spec_of(op)
    problem = (spec.shapes | suites.problems(spec, "fp8-block") if shape.endswith("fp8-block") else spec.shapes)[shape]
    if name == "backward, in turns":
        problem = replace(problem, deterministic=True)
    config = replace(spec.default(problem, H200), **changes)
    assert spec.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    jax.eval_shape(lambda *arrays: spec.run(problem, config, H200, *arrays, interpret=interpret), *arrays)


def caller() -> tuple[str, int]:
    frame = sys._getframe(2)
    return frame.f_code.co_filename, frame.f_lineno


@functools.cache
def waits_of(name: str) -> dict[tuple[str, int], bool]:
    """What tracing a kernel meets, and whether what it waits for is ever in flight: a wgmma, or one to the accumulator read."""
    met: dict[tuple[str, int], bool] = {}
    with pytest.MonkeyPatch.context() as patch:
        engine_wait = engine.wgmma_wait
        for function in ("wgmma_wait", "accumulated"):
            kept = getattr(engine, function)

            def note(*args: Any, kept: Any = kept) -> Any:
                kernel = inflight._kernel.get()
                assert kernel is not None
                written = [product.accumulator for product in kernel.products]
                waited = written if kept is engine_wait else [acc for acc in written if acc is inflight._base(args[0])]
                met[caller()] = met.get(caller(), False) or bool(waited)
                return kept(*args)

            patch.setattr(engine, function, note)
        trace(name)
    return met


@pytest.mark.parametrize("name", KERNELS)
def test_kernels_as_they_are_wait_for_all_that_they_must(name):
    assert waits_of(name)


@pytest.mark.parametrize("site", SITES, ids=lambda site: f"{Path(site[0]).parent.name}-{Path(site[0]).stem}-{site[1]}")
def test_each_wait_that_is_left_out_or_leaves_one_wgmma_more_in_flight_is_found(site, monkeypatch):
    kernels = [name for name in KERNELS if site in waits_of(name)]
    assert kernels
    waits, reads = engine.wgmma_wait, engine.accumulated
    monkeypatch.setattr(engine, "wgmma_wait", lambda n: None if caller() == site else waits(n))
    monkeypatch.setattr(engine, "accumulated", lambda acc, n: reads(acc, n + (caller() == site)))
    for name in kernels:
        if waits_of(name)[site]:
            with pytest.raises(InFlight):
                trace(name)
        else:
            trace(name)  # an accumulator that is read when everything is done


def test_an_interpreted_kernel_is_watched_too(monkeypatch):
    trace("grouped_matmul", interpret=True)
    monkeypatch.setattr(engine, "wgmma_wait", lambda n: None)
    with pytest.raises(InFlight):
        trace("grouped_matmul", interpret=True)


# --- rule by rule


def traced(compute: Callable[..., Any]) -> None:
    """compute(accs, a, b, pipeline), by a consumer; the producer fills b, of two stages, over and over."""

    def body(x_ref: Any, out_ref: Any, *, a: Any, b: Any, accs: Any, barriers: Any) -> None:
        pipeline = Pipeline(2, *barriers)

        def producer() -> None:
            pl.loop(0, 8)(
                lambda i: pipeline.fill(jnp.int32(i), lambda stage, full: engine.copy_gmem_to_smem(x_ref, b.at[stage], full))
            )

        def consumer(*accs: Any) -> None:
            compute(accs, a, b, pipeline)
            out_ref[...] = accs[0][...]

        engine.specialize(producer, lambda: accs.scope(consumer), consumers=1, producer_registers=40, consumer_registers=232)

    tiles = engine.operand_transforms(64, jnp.bfloat16)
    launch = engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=2),
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types={
            "a": plgpu.SMEM((64, 64), jnp.bfloat16, transforms=tiles),
            "b": plgpu.SMEM((2, 64, 64), jnp.bfloat16, transforms=tiles),
            "accs": engine.Accumulators(((64, 64), (64, 64)), 1),
            "barriers": Pipeline.barriers(2, copies=1, consumers=1),
        },
    )
    jax.eval_shape(launch, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))


def test_the_other_accumulator_may_be_read_meanwhile():
    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        engine.wgmma(accs[0], a, b.at[0])
        engine.wgmma(accs[1], a, b.at[0])
        engine.accumulated(accs[0], 1)
        engine.accumulated(accs[1], 0)

    traced(compute)


def test_an_accumulator_that_is_read_with_its_wgmma_in_flight_is_an_error_that_says_what_to_do():
    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        engine.wgmma(accs[0], a, b.at[0])
        engine.wgmma(accs[1], a, b.at[0])
        engine.accumulated(accs[1], 1)

    with pytest.raises(InFlight, match=r"accumulated\(acc, 1\) reads .*: leave fewer in flight"):
        traced(compute)


@pytest.mark.parametrize("waits", [0, 1])
def test_a_stage_is_declared_empty_after_what_reads_it_and_not_before(waits):
    """With one in flight, that is the one which reads no stage of the pipeline."""

    def step(first: Any, second: Any, accs: Any, a: Any, pipeline: Pipeline) -> Any:
        def turn(i: Any, _: Any) -> Any:
            engine.wgmma(accs[0], a, first)
            engine.wgmma(accs[1], a, second)
            engine.wgmma_wait(waits)
            engine.barrier_arrive(pipeline.empty.at[lax.rem(i, jnp.int32(2))])
            engine.wgmma_wait(0)
            return _

        return lax.fori_loop(0, 8, turn, ())

    traced(lambda accs, a, b, pipeline: step(b.at[0], a, accs, a, pipeline))
    if waits:
        with pytest.raises(InFlight, match=r"declared empty .* before barrier_arrive, call wgmma_wait"):
            traced(lambda accs, a, b, pipeline: step(a, b.at[0], accs, a, pipeline))


@pytest.mark.parametrize("site", [None, 0, 1])
def test_steps_with_the_next_one_in_flight_declare_only_the_stage_before_empty(site, monkeypatch):
    """Each of the two waits, in the loop and after it, is found when it leaves one wgmma more in flight."""

    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        pipeline.multiply(jnp.int32(0), 8, lambda stage: engine.wgmma(accs[0], a, b.at[stage]))

    waits = engine.wgmma_wait
    monkeypatch.setattr(engine, "wgmma_wait", lambda n: waits(n + (n == site)))
    if site is None:
        traced(compute)
    else:
        with pytest.raises(InFlight, match="declared empty"):
            traced(compute)


def test_a_loop_must_begin_and_end_with_equally_many_wgmma_in_flight():
    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        def turn(_: Any, state: Any) -> Any:
            with inflight.iteration():
                engine.wgmma(accs[0], a, a)
            return state

        lax.fori_loop(0, 8, turn, ())

    with pytest.raises(InFlight, match="begins with 0 wgmma in flight and ends with 1"):
        traced(compute)


def test_a_loop_that_leaves_a_wgmma_of_registers_in_flight_is_an_error():
    """The next iteration may overwrite the registers while they are read."""

    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        def turn(_: Any, state: Any) -> Any:
            with inflight.iteration():
                engine.wgmma(accs[0], a[...], a)
                engine.wgmma_wait(1)
            return state

        engine.wgmma(accs[0], a, a)
        lax.fori_loop(0, 8, turn, ())

    with pytest.raises(InFlight, match="leaves a wgmma in flight whose left operand is in registers"):
        traced(compute)


def test_a_wgmma_that_a_turn_of_a_loop_leaves_in_flight_is_an_error():
    def compute(accs: Any, a: Any, b: Any, pipeline: Pipeline) -> None:
        lax.fori_loop(0, 8, lambda i, _: (engine.wgmma(accs[0], a, a), _)[1], ())

    with pytest.raises(InFlight, match="at the end of the loop or branch that started it"):
        traced(compute)
