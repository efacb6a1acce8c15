"""Both grouped kernels in JAX's GPU interpreter: right on every schedule, for any sizes, and free of data races.

The GPU has three SMs here, so that a block works through tiles of several groups and its pipeline of stages wraps. What the
interpreter's memory holds before it is written is NaN, in shared memory and in outputs; here rows of no group and matrices of
empty groups are NaN as well. An output without NaN was written everywhere, from what it may depend on alone.
"""

from __future__ import annotations

import contextlib
import functools
import importlib
import random
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import GroupedMatmulConfig, GroupedMatmulProblem, RaggedContractionProblem, spec_of
from mgpu_ops.core import dynamic_scheduler, engine, gpu
from mgpu_ops.core.pipeline import Pipeline
from tests import thorough
from tests.arrays import inputs
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE, static
from tests.mgpu_ops.interpreter import FEW_SMS, has_a_race, quiet_interpreter, wait_for_all_stores_only

GROUPED, CONTRACTION = spec_of("grouped_matmul"), spec_of("ragged_contraction")
P, R = GroupedMatmulProblem, RaggedContractionProblem


def compiled(problem: Any, config: Any, gpu: Any = FEW_SMS) -> Callable[..., jax.Array]:
    """The kernel as a function of its arrays, lowered once for all sizes."""
    spec = GROUPED if isinstance(problem, P) else CONTRACTION
    assert spec.check(problem, config, gpu) is None
    run = jax.jit(functools.partial(spec.run, problem, config, gpu, interpret=True))

    def interpret(*arrays: Any) -> jax.Array:
        with quiet_interpreter():
            return run(*arrays).block_until_ready()

    return interpret


@functools.cache
def operands(problem: Any) -> tuple[np.ndarray, ...]:
    """lhs, rhs and perhaps a bias and a row scale."""
    spec = GROUPED if isinstance(problem, P) else CONTRACTION
    lhs, rhs, _, *bias = inputs(spec, problem)
    return tuple(np.array(x) for x in (lhs, rhs, *bias))


def assert_right(problem: Any, run: Any, sizes: Sequence[int], assert_grouped: Any) -> None:
    lhs, rhs, *bias = ragged.poisoned(problem, sizes, *operands(problem))
    out = run(lhs, rhs, np.array(sizes, np.int32), *bias)
    assert not engine.races_found()
    assert_grouped(problem, sizes, out, lhs, rhs, *bias)


TWO = replace(BASE, tile_m=128, compute_warpgroups=2)
WIDE = replace(TWO, tile_n=128)
HALVES = replace(BASE, tile_n=128, compute_warpgroups=2, wg_dimension="n")
SHORT = replace(WIDE, schedule="dynamic", short_tiles=True)

# Sizes are raw values here, for four groups and some 150 rows.
ODD, ONE_HOT, TILES = (33, 0, 71, 1), (0, 0, 150, 0), (64, 0, 64, 0)
WILD = (-7, 40, 2**31 - 1, 5)
MANY = (1, 1, 90, 3)

CASES: dict[str, tuple[Any, Any, tuple[Sequence[int], ...]]] = {
    # one warpgroup
    "tails in m, n and k": (P(150, 72, 72, 4), BASE, (ODD, ONE_HOT, TILES, WILD, (0, 0, 0, 0))),
    "one row": (P(1, 72, 8, 3), BASE, ((0, 1, 0), (0, 0, 0), (7, 7, 7))),
    "tall tiles": (P(150, 64, 64, 4), replace(BASE, tile_m=192), (ODD, ONE_HOT)),
    "steps of 128, the last one short, and a pipeline longer than all": (
        P(150, 64, 200, 4),
        replace(BASE, tile_k=128, max_concurrent_steps=4),
        (ODD, MANY),
    ),
    "strips of one, float16": (P(260, 200, 64, 4, "float16", "float16"), replace(BASE, raster_width=1), ((200, 1, 0, 30),)),
    "strips of three, pipeline of three": (
        P(300, 136, 136, 4),
        replace(BASE, raster_width=3, max_concurrent_steps=3),
        ((280, 0, 2, 10),),
    ),
    # two warpgroups
    "rows shared, bias": (P(150, 72, 72, 4, bias=True), TWO, (ODD, ONE_HOT, WILD)),
    "rows shared, wide tiles, two buffers": (P(150, 192, 64, 4), replace(WIDE, epilogue_slots=2), (ODD, MANY)),
    "columns shared, tile_k of 128, silu": (P(150, 192, 128, 4, activation="silu"), replace(HALVES, tile_k=128), (ODD, WILD)),
    # epilogue tiles
    "four epilogue tiles, one buffer": (P(150, 128, 64, 4), replace(WIDE, compute_warpgroups=1), (ODD, ONE_HOT)),
    "four epilogue tiles, two buffers": (
        P(150, 128, 64, 4),
        replace(WIDE, compute_warpgroups=1, epilogue_slots=2),
        (ODD, MANY),
    ),
    "epilogue tiles of two swizzle rows": (P(150, 128, 64, 4), replace(WIDE, epilogue_tile_n=128), (ODD, TILES)),
    "float32 out": (P(150, 72, 72, 4, "bfloat16", "float32"), replace(TWO, epilogue_tile_n=32), (ODD, MANY)),
    # rhs stored transposed
    "transposed rhs, tails, bias, gelu": (P(150, 72, 136, 4, layout="nt", bias=True, activation="gelu"), TWO, (ODD, WILD)),
    "transposed rhs, steps of 128, relu": (
        P(150, 72, 192, 4, layout="nt", activation="relu"),
        replace(HALVES, tile_k=128),
        (ODD, ONE_HOT),
    ),
    "transposed rhs, float16 to float32, two buffers": (
        P(150, 128, 72, 4, "float16", "float32", "nt"),
        replace(HALVES, epilogue_tile_n=32, epilogue_slots=2),
        (ODD,),
    ),
    # the last tile ends with the row, within the one before
    "wide tiles, n ends within one, bias": (P(150, 200, 72, 4, bias=True), WIDE, (ODD, WILD)),
    "wide parts, n ends within one": (P(150, 328, 64, 4), replace(HALVES, tile_n=256), (ODD,)),
    "contraction, wide tiles, k and n end within one": (
        R(150, 136, 200, 4),
        replace(BASE, tile_m=128, tile_n=128),
        (ODD, MANY),
    ),
    "contraction, wide parts of n": (R(150, 328, 136, 4), replace(HALVES, tile_m=128, tile_n=256), (ODD,)),
    # a scale for each row; a shard of the groups, whose sizes begin with its first row
    "row scale, rows shared": (P(150, 72, 72, 4, row_scale=True), TWO, (ODD, WILD)),
    "row scale, bias, silu, tall tiles, float32 out": (
        P(150, 64, 64, 4, "bfloat16", "float32", bias=True, activation="silu", row_scale=True),
        replace(BASE, tile_m=192, epilogue_tile_n=32),
        (ODD,),
    ),
    "shard": (P(150, 72, 72, 3, group_offset=True), BASE, ((33, 1, 0, 71), (0, 64, 64, 22), (150, 7, 7, 7), (-1, 0, 0, 0))),
    "shard, row scale, columns shared, transposed": (
        P(150, 192, 128, 3, layout="nt", group_offset=True, row_scale=True),
        HALVES,
        ((65, 30, 1, 2), (2**31 - 1, 5, 5, 5)),
    ),
    "two products added up, k no multiple of a step": (P(150, 72, 72, 4, second=True), BASE, (ODD, WILD)),
    "two products of a shard, transposed, steps of 128": (
        P(150, 136, 192, 3, layout="nt", group_offset=True, second=True),
        replace(TWO, tile_k=128, max_concurrent_steps=3),
        ((65, 30, 1, 2),),
    ),
    # a last tile of at most 64 rows is shared along n
    "short tiles, two buffers, bias, silu, n ends within a tile": (
        P(150, 200, 264, 4, bias=True, activation="silu", row_scale=True),
        replace(SHORT, epilogue_slots=2),
        (ODD, ONE_HOT, TILES, WILD, (1, 129, 0, 20)),
    ),
    "short tiles of a shard, transposed, float32 out": (
        P(260, 192, 128, 3, "bfloat16", "float32", layout="nt", group_offset=True),
        replace(SHORT, tile_k=128, epilogue_tile_n=32, max_concurrent_steps=3),
        ((3, 64, 65, 128),),
    ),
    "contraction of a shard": (R(150, 72, 72, 3, group_offset=True), BASE, ((33, 1, 0, 71), (140, 3, 9, 9), (0, 0, 0, 0))),
    # contraction: k is the side of tile_m, m the depth
    "contraction, tails": (R(150, 72, 72, 4), BASE, (ODD, ONE_HOT, TILES, WILD, (0, 0, 0, 0))),
    "contraction of one row": (R(1, 72, 8, 3), BASE, ((0, 1, 0), (0, 0, 0), (7, 7, 7))),
    "contraction, 128 rows a step": (R(300, 64, 64, 4), replace(BASE, tile_k=128), ((129, 0, 127, 1), (5, 290, 0, 1))),
    "contraction, deep pipeline, strips of one": (
        R(70, 136, 200, 2),
        replace(BASE, max_concurrent_steps=8, raster_width=1),
        ((31, 20),),
    ),
    "contraction, k shared": (R(150, 72, 136, 4), TWO, (ODD, WILD)),
    "contraction, k shared, wide tiles, two buffers": (R(150, 192, 128, 4), replace(WIDE, epilogue_slots=2), (ODD, MANY)),
    "contraction, n shared, float16": (R(150, 192, 64, 4, "float16", "float16"), HALVES, (ODD,)),
    "contraction, four epilogue tiles": (R(150, 128, 128, 4), replace(WIDE, compute_warpgroups=1), (ODD,)),
    "contraction, epilogue tiles of two swizzle rows": (R(150, 128, 128, 4), replace(WIDE, epilogue_tile_n=128), (ODD,)),
    "contraction, float32 out": (R(150, 72, 72, 4, out_dtype="float32"), replace(TWO, epilogue_tile_n=32), (ODD,)),
}


IN_ALL = [  # what others show together or one by one
    "tall tiles",
    "strips of one, float16",
    "rows shared, wide tiles, two buffers",
    "four epilogue tiles, one buffer",
    "epilogue tiles of two swizzle rows",
    "float32 out",
    "transposed rhs, steps of 128, relu",
    "contraction, deep pipeline, strips of one",
    "contraction, k shared",
    "contraction, n shared, float16",
    "contraction, four epilogue tiles",
    "contraction, epilogue tiles of two swizzle rows",
    "strips of three, pipeline of three",
    "contraction, 128 rows a step",
    "short tiles of a shard, transposed, float32 out",
    "row scale, rows shared",
]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_grouped):
    problem, config, all_sizes = CASES[name]
    run = compiled(problem, config)
    for sizes in all_sizes:
        assert_right(problem, run, sizes, assert_grouped)


GATHERED: dict[str, tuple[Any, Any, Sequence[int]]] = {  # rows of lhs by index
    "tails in m, n and k": (P(150, 72, 72, 4, lhs_rows=37), BASE, WILD),
    "scaled, biased rows of a shard, two warpgroups, three steps of 128": (
        P(150, 136, 128, 3, layout="nt", bias=True, row_scale=True, group_offset=True, activation="relu", lhs_rows=300),
        replace(TWO, tile_k=128, max_concurrent_steps=3),
        (33, 1, 0, 71),
    ),
}


@pytest.mark.parametrize(
    "name", thorough.cases(GATHERED, ["scaled, biased rows of a shard, two warpgroups, three steps of 128"])
)
def test_rows_taken_by_index_give_the_bits_of_rows_gathered_before(name):
    problem, config, sizes = GATHERED[name]
    *arrays, indices = operands(problem)
    lhs, *rest = ragged.poisoned(replace(problem, lhs_rows=0), sizes, arrays[0][indices], *arrays[1:])
    groups = ragged.spans_of(problem, sizes)
    named = np.isin(np.arange(problem.lhs_rows), indices[groups[0].start : groups[-1].stop])
    anywhere = np.where(named[:, None], arrays[0], np.nan).astype(lhs.dtype)
    indices[: groups[0].start], indices[groups[-1].stop :] = -(2**31), 2**31 - 1  # of no group: they name nothing
    rhs, *rest = rest
    out = compiled(problem, config)(anywhere, rhs, np.array(sizes, np.int32), *rest, indices)
    assert not engine.races_found()
    wanted = compiled(replace(problem, lhs_rows=0), config)(lhs, rhs, np.array(sizes, np.int32), *rest)
    np.testing.assert_array_equal(out, wanted)


def kinds_of_sizes() -> st.SearchStrategy[int]:
    return st.integers(0, 90) | st.sampled_from([0, 1, 63, 64, 65, -1, -(2**31), 2**31 - 1])


@pytest.mark.parametrize("problem", [P(150, 64, 72, 5), R(150, 64, 64, 5)], ids=["grouped", "contraction"])
def test_any_sizes_are_right(problem, assert_grouped):
    run = compiled(problem, BASE)

    @thorough.examples(8, phases=[hypothesis.Phase.generate])
    @hypothesis.given(st.lists(kinds_of_sizes(), min_size=5, max_size=5))
    def check(sizes: list[int]) -> None:
        assert_right(problem, run, sizes, assert_grouped)

    check()


def test_256_groups(assert_grouped):
    sizes = np.random.default_rng(0).multinomial(130, np.ones(256) / 256).tolist()
    problem = P(150, 64, 64, 256)
    assert_right(problem, compiled(problem, BASE, replace(FEW_SMS, sms=2)), sizes, assert_grouped)


def test_nan_in_a_group_reaches_the_outputs_of_that_group_only():
    problem, sizes = P(150, 72, 72, 4), (33, 30, 41, 40)
    run, (lhs, rhs) = compiled(problem, BASE), operands(problem)
    clean = np.asarray(run(lhs, rhs, np.array(sizes, np.int32)))
    for group, rows in enumerate(ragged.spans(sizes, problem.m)):
        x, y = lhs.copy(), rhs.copy()
        if group % 2:
            x[rows] = np.nan
        else:
            y[group] = np.nan
        out = np.asarray(run(x, y, np.array(sizes, np.int32)))
        assert np.isnan(out[rows]).all()
        np.testing.assert_array_equal(np.delete(out, rows, 0), np.delete(clean, rows, 0))


def test_nan_in_a_group_reaches_the_contraction_of_that_group_only():
    problem, sizes = R(150, 72, 72, 4), (33, 30, 41, 40)
    run, (lhs, rhs) = compiled(problem, BASE), operands(problem)
    clean = np.asarray(run(lhs, rhs, np.array(sizes, np.int32)))
    for group, rows in enumerate(ragged.spans(sizes, problem.m)):
        x, y = lhs.copy(), rhs.copy()
        (x if group % 2 else y)[rows] = np.nan
        out = np.asarray(run(x, y, np.array(sizes, np.int32)))
        assert np.isnan(out[group]).all()
        np.testing.assert_array_equal(np.delete(out, group, 0), np.delete(clean, group, 0))


@pytest.mark.parametrize("seed", thorough.seeds(1, 4))
@pytest.mark.parametrize("op", [GROUPED, CONTRACTION], ids=lambda spec: spec.name)
def test_random_legal_config_is_right_and_has_no_race(op, seed, assert_grouped):
    rng = random.Random(seed)
    m, n, k = rng.randint(1, 300), 8 * rng.randint(1, 30), 8 * rng.randint(1, 24)
    problem = op.Problem(m, n, k, 4)
    if op is GROUPED:
        problem = replace(problem, layout=rng.choice(["nn", "nt"]), bias=rng.random() < 0.5)
    space = op.space(problem, FEW_SMS)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    config = next(c for c in drawn if op.check(problem, c, FEW_SMS) is None)
    sizes = np.random.default_rng(seed).multinomial(rng.randint(0, m), np.ones(4) / 4)
    assert_right(problem, compiled(problem, config), sizes.tolist(), assert_grouped)


@pytest.mark.parametrize("problem", [P(201, 136, 72, 4), R(201, 136, 72, 4)], ids=["grouped", "contraction"])
def test_default_config_is_right_on_a_gpu_of_full_size(problem, assert_grouped):
    h200 = gpu.find("h200")
    spec = GROUPED if isinstance(problem, P) else CONTRACTION
    assert_right(problem, compiled(problem, spec.default(problem, h200), h200), ODD, assert_grouped)


# --- tiles handed out as blocks become free

ORDERS: dict[str, Callable[[jax.Array, jax.Array, int], jax.Array]] = {
    "by a hash": dynamic_scheduler.owns,
    "all to the last block": lambda tile, block, blocks: block == blocks - 1,
    "back and forth": lambda tile, block, blocks: jnp.abs(tile % (2 * blocks) - blocks) % blocks == block,
}
HANDED_OUT = {
    "grouped": (P(150, 128, 64, 5), "by a hash", BASE),
    "contraction": (R(150, 64, 136, 5), "back and forth", BASE),
    "a shard": (R(150, 136, 136, 4, group_offset=True), "all to the last block", TWO),
}


@pytest.mark.parametrize("name", thorough.cases(HANDED_OUT, ["a shard"]))
def test_tiles_handed_out_in_any_order_give_the_bits_of_fixed_ones(name, assert_grouped, monkeypatch):
    problem, order, config = HANDED_OUT[name]
    orders, kinds = (ORDERS, 3) if thorough.ALL else ([order], 1)
    run_static = compiled(problem, config)
    for one in orders:
        monkeypatch.setattr(dynamic_scheduler, "owns", ORDERS[one])
        run = compiled(problem, replace(config, schedule="dynamic"))
        for sizes in ((33, 0, 65, 1, 20), (0, 150, 0, 0, 0), (-7, 40, 2**31 - 1, 5, 0))[:kinds]:
            assert_right(problem, run, sizes, assert_grouped)
            lhs, rhs, *bias = operands(problem)
            arrays = lhs, rhs, np.array(sizes, np.int32), *bias
            np.testing.assert_array_equal(run(*arrays), run_static(*arrays))


# --- tiles stored while the next one is multiplied


DEFERRED = {
    "one step for two epilogue tiles": (P(150, 128, 64, 4), replace(WIDE, compute_warpgroups=1), "deferred"),
    "an epilogue, the last tile ends with the row": (
        P(150, 136, 264, 4, layout="nn", bias=True, activation="silu", row_scale=True),
        replace(TWO, tile_n=128),
        "deferred",
    ),
    "a shard, transposed, tiles handed out": (
        P(150, 72, 136, 4, layout="nt", group_offset=True),
        replace(HALVES, tile_m=64),
        "dynamic-deferred",
    ),
    "short tiles, more stores than steps": (
        P(150, 256, 128, 4),
        replace(SHORT, tile_n=256, epilogue_slots=2),
        "dynamic-deferred",
    ),
    "a contraction of small and empty groups": (R(150, 136, 136, 5), replace(HALVES, tile_n=256, epilogue_slots=2), "deferred"),
    "a contraction, tiles handed out": (R(150, 136, 200, 4), replace(TWO, epilogue_slots=1), "dynamic-deferred"),
}


@pytest.mark.parametrize(
    "name",
    thorough.cases(
        DEFERRED,
        [
            "an epilogue, the last tile ends with the row",
            "short tiles, more stores than steps",
            "a contraction, tiles handed out",
        ],
    ),
)
def test_tiles_stored_beside_the_next_one_have_the_bits_of_those_stored_at_once(name, assert_grouped):
    problem, config, schedule = DEFERRED[name]
    problem = replace(problem, n=max(problem.n, config.tile_n) if isinstance(problem, R) else problem.n)
    run, at_once = (compiled(problem, c) for c in (replace(config, schedule=schedule), static(config)))
    for sizes in ((33, 0, 65, 1, 20), (0, 150, 0, 0, 0), (-7, 40, 2**31 - 1, 5, 0), (0, 0, 0, 0, 0))[
        : None if thorough.ALL else 2
    ]:
        sizes = sizes[: problem.groups + problem.group_offset]
        assert_right(problem, run, sizes, assert_grouped)
        lhs, rhs, *extra = operands(problem)
        arrays = lhs, rhs, np.array(sizes, np.int32), *extra
        np.testing.assert_array_equal(run(*arrays), at_once(*arrays))


class HastyAnswers(Pipeline):
    """Declares an answer's slot empty before it has read it."""

    def read(self, step: Any, compute: Callable[[Any], None]) -> None:
        if self.stages == dynamic_scheduler.SLOTS:
            Hasty(self.stages, self.full, self.empty).read(step, compute)
        else:
            super().read(step, compute)


def test_detector_finds_an_answer_that_is_overwritten_before_it_was_read(monkeypatch):
    monkeypatch.setattr(importlib.import_module("mgpu_ops.grouped.kernel"), "Pipeline", HastyAnswers)
    problem = R(70, 256, 256, 4)  # of one step a tile, so that the producer is far ahead
    assert has_a_race(of_odd_sizes(problem, replace(BASE, schedule="dynamic")))


# --- what passes above is not passed by a detector that is off


class Hasty(Pipeline):
    """Declares a stage empty before it has read it."""

    def read(self, step: Any, compute: Callable[[Any], None]) -> None:
        stage = jax.lax.rem(step, jnp.int32(self.stages))
        plgpu.barrier_wait(self.full.at[stage])
        engine.barrier_arrive(self.empty.at[stage])
        compute(stage)


def of_odd_sizes(problem: Any, config: Any) -> Callable[[], jax.Array]:
    return lambda: compiled(problem, config)(*operands(problem), np.array(ODD, np.int32))


BOTH = pytest.mark.parametrize("problem", [P(150, 128, 136, 4), R(150, 128, 64, 4)], ids=["grouped", "contraction"])
FOUR_EPILOGUE_TILES = replace(BASE, tile_m=128, tile_n=128, epilogue_slots=2)


@BOTH
def test_detector_finds_nothing_as_the_kernels_are(problem):
    assert not has_a_race(of_odd_sizes(problem, FOUR_EPILOGUE_TILES))


@BOTH
def test_detector_finds_a_stage_that_is_declared_empty_before_it_was_read(problem, monkeypatch):
    monkeypatch.setattr(importlib.import_module("mgpu_ops.grouped.kernel"), "Pipeline", Hasty)
    assert has_a_race(of_odd_sizes(problem, BASE))


@BOTH
def test_detector_finds_a_store_that_does_not_wait_for_its_buffer(problem, monkeypatch):
    wait_for_all_stores_only(monkeypatch)
    assert has_a_race(of_odd_sizes(problem, FOUR_EPILOGUE_TILES))


# --- several devices, which the interpreter simulates at once: one has tiles left when another's have ended


def of_two_devices(sizes: Sequence[int]) -> tuple[Callable[[], jax.Array], np.ndarray]:
    """Two groups of each of two devices, 70 rows and 192 columns: the kernel interpreted for both, and what it should give."""
    problem, config = P(70, 192, 64, 2), replace(BASE, epilogue_slots=2)
    lhs, rhs = (np.concatenate([x, x[::-1]]) for x in operands(problem))
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    run = functools.partial(GROUPED.run, problem, config, FEW_SMS, interpret=True)
    both = jax.jit(jax.shard_map(run, mesh=mesh, in_specs=PartitionSpec("x"), out_specs=PartitionSpec("x"), check_vma=False))
    shards = zip(*(np.split(x.astype(np.float64), 2) for x in (lhs, rhs)), np.split(np.array(sizes), 2), strict=True)
    wanted = [np.zeros((70, 192)) for _ in range(2)]
    for out, (rows, matrices, counts) in zip(wanted, shards, strict=True):
        first = 0
        for matrix, count in zip(matrices, counts, strict=True):
            out[first : first + count] = rows[first : first + count] @ matrix
            first += count
    return lambda: both(lhs, rhs, np.array(sizes, np.int32)), np.concatenate(wanted)


@pytest.mark.parametrize("sizes", [(1, 0, 5, 65), (70, 0, 0, 2)], ids=["the first ends first", "the second ends first"])
def test_several_devices_are_interpreted_at_once_without_a_race(sizes, assert_near):
    run, wanted = of_two_devices(sizes)
    with quiet_interpreter():
        out = run().block_until_ready()
    assert not engine.races_found()
    assert_near(np.asarray(out).astype(np.float64), wanted, 8e-3)


def test_detector_finds_a_race_of_several_devices(monkeypatch):
    monkeypatch.setattr(importlib.import_module("mgpu_ops.grouped.kernel"), "Pipeline", Hasty)
    found = has_a_race(of_two_devices((20, 50, 5, 65))[0])
    with contextlib.suppress(Exception):  # of the other device, which may be at work still
        jax.effects_barrier()
    engine.reset_interpreter()
    assert found


def test_rows_that_nothing_writes_show_as_nan(monkeypatch):
    monkeypatch.setattr(
        importlib.import_module("mgpu_ops.grouped.grouped_matmul.kernel").GroupedStages, "finish", lambda *_: None
    )
    problem = P(150, 64, 64, 4)
    out = of_odd_sizes(problem, BASE)()
    assert np.isnan(np.asarray(out)[sum(ODD) :]).all()
