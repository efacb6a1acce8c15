"""ragged_contraction of 8-bit floats that are stored transposed: the kernel in the interpreter and compiled, and through XLA.

Outputs, and what a stage holds before it is filled, are NaN in the interpreter; columns behind the last group are NaN here.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mgpu_ops import GroupedMatmulConfig, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.config import SCHEDULES, smem_bytes
from mgpu_ops.grouped.ragged_contraction import Call, transposed_contraction
from mgpu_ops.grouped.ragged_contraction.problem import padded
from mgpu_ops.registry import capture
from tests import thorough
from tests.mgpu_ops.grouped import ragged, transposed
from tests.mgpu_ops.grouped.test_grouped_interpret import Hasty
from tests.mgpu_ops.grouped.transposed import E4M3, E5M2
from tests.mgpu_ops.grouped.transposed import problem_of as P
from tests.mgpu_ops.interpreter import FEW_SMS, has_a_race, quiet_interpreter

SPEC = spec_of("ragged_contraction")
H200 = gpu.find("h200")
TOLERANCE = {"bfloat16": 8e-3, "float16": 1e-3, "float32": 1e-5}  # the interpreter's sums are float32

BASE = replace(ragged.BASE, tile_k=128)
TWO = replace(BASE, tile_m=128, compute_warpgroups=2)
WIDE = replace(TWO, tile_n=256, epilogue_slots=2)
HALVES = replace(BASE, tile_n=128, compute_warpgroups=2, wg_dimension="n")

ODD, ONE_HOT, WHOLE = (33, 0, 200, 1), (0, 0, 640, 0), (128, 256, 0, 128)
WILD = (-7, 130, 2**31 - 1, 5)
NONE = (0, 0, 0, 0)

CASES: dict[str, tuple[Any, Any, tuple[Sequence[int], ...]]] = {
    "tails in k and n": (P(640, 80, 144, 4), BASE, (ODD, ONE_HOT, WHOLE, WILD, NONE)),
    "one group, one step": (P(128, 16, 24, 1), BASE, ((77,), (128,))),
    "e5m2 and e4m3, float16, k shared, three stages": (
        P(640, 48, 208, 4, dtype=E5M2, rhs_dtype=E4M3, out_dtype="float16"),
        replace(TWO, max_concurrent_steps=3),
        (ODD,),
    ),
    "one dtype, float32 out, 32 columns a warpgroup": (
        P(640, 116, 72, 4, rhs_dtype=E4M3, out_dtype="float32"),
        replace(BASE, compute_warpgroups=2, wg_dimension="n", epilogue_tile_n=32),
        (ODD, WILD),
    ),
    "n shared, epilogue tiles of two swizzle rows": (
        P(640, 256, 72, 4),
        replace(HALVES, tile_n=256, epilogue_tile_n=128),
        (ODD,),
    ),
    "k no multiple of 8, tiles larger than both sides": (P(640, 72, 20, 4), replace(WIDE, raster_width=1), (ODD,)),
    "handed out": (P(640, 144, 144, 4), replace(TWO, schedule="dynamic"), (ODD, WILD)),
    "deferred": (P(640, 272, 144, 4), replace(WIDE, schedule="deferred"), (ODD, NONE)),
    "handed out, deferred, n shared": (P(640, 272, 144, 4), replace(HALVES, schedule="dynamic-deferred"), (ODD, WILD)),
}
IN_ALL = ["n shared, epilogue tiles of two swizzle rows"]


def test_every_schedule_is_in_a_case():
    assert {config.schedule for _, config, _ in CASES.values()} == {*SCHEDULES}


def interpreted(problem: Any, config: Any, *arrays: Any) -> jax.Array:
    assert SPEC.check(problem, config, FEW_SMS) is None
    run = jax.jit(functools.partial(SPEC.run, problem, config, FEW_SMS, interpret=True))
    with quiet_interpreter():
        out: jax.Array = run(*arrays).block_until_ready()
    assert not engine.races_found()
    return out


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_near):
    problem, config, all_sizes = CASES[name]
    for sizes in all_sizes:
        arrays = transposed.operands(problem, sizes)
        out = interpreted(problem, config, *arrays)
        transposed.assert_right(problem, out, arrays, TOLERANCE[problem.out_dtype], assert_near)


@pytest.mark.parametrize("seed", thorough.seeds(1, 6))
def test_random_legal_config_is_right_and_has_no_race(seed, assert_near):
    rng = random.Random(seed)
    out_dtype = rng.choice(["bfloat16", "float16", "float32"])
    sides = 128 * rng.randint(4, 6), 8 * rng.randint(1, 40), 8 * rng.randint(1, 30), 4
    problem = P(*sides, dtype=rng.choice([E4M3, E5M2]), rhs_dtype=rng.choice([E4M3, E5M2]), out_dtype=out_dtype)
    space = SPEC.space(problem, FEW_SMS)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    config = next(c for c in drawn if SPEC.check(problem, c, FEW_SMS) is None)
    sizes = np.random.default_rng(seed).multinomial(rng.randint(0, problem.m - 3 * 127), np.ones(4) / 4)
    arrays = transposed.operands(problem, sizes.tolist())
    transposed.assert_right(problem, interpreted(problem, config, *arrays), arrays, TOLERANCE[out_dtype], assert_near)


def test_detector_finds_a_stage_that_is_declared_empty_before_it_was_read(monkeypatch):
    problem = P(640, 128, 64, 4)
    run = functools.partial(SPEC.run, problem, BASE, FEW_SMS, *transposed.operands(problem, ODD), interpret=True)
    assert not has_a_race(run)
    monkeypatch.setattr(importlib.import_module("mgpu_ops.grouped.kernel"), "Pipeline", Hasty)
    assert has_a_race(run)


# --- through XLA, and the function that calls it


@pytest.mark.parametrize("sizes", [ODD, ONE_HOT, WHOLE, WILD, NONE], ids=str)
@pytest.mark.parametrize("rhs_dtype", [E4M3, E5M2])
def test_reference_is_a_dense_product_of_each_group(rhs_dtype, sizes, assert_near):
    problem = P(640, 40, 24, 4, rhs_dtype=rhs_dtype, out_dtype="float32")
    arrays = transposed.operands(problem, sizes)
    transposed.assert_right(problem, SPEC.reference(problem, *arrays), arrays, 1e-5, assert_near)


def call_of(problem: Any, backend: Any, **more: Any) -> Call:
    return Call(problem.out_dtype, problem.spread, None, backend, **more)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_function_is_right_under_jit_and_vmap(backend, assert_near):
    problem = P(640, 80, 144, 4)
    each = [transposed.operands(problem, sizes, seed) for seed, sizes in enumerate((ODD, WHOLE))]
    run = functools.partial(transposed_contraction, call_of(problem, backend))
    with quiet_interpreter():
        outs = [jax.jit(run)(*arrays) for arrays in each]
        mapped = jax.vmap(run)(*(jnp.stack(x) for x in zip(*each, strict=True)))
    for arrays, out in zip(each, outs, strict=True):
        transposed.assert_right(problem, out, arrays, 8e-3, assert_near)
    np.testing.assert_array_equal(mapped, jnp.stack(outs))


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_sides_of_the_result_are_split_over_devices(kind, assert_near):
    problem, x = P(640, 80, 144, 4), "x"
    arrays = transposed.operands(problem, ODD)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    specs = PartitionSpec(x), PartitionSpec(), PartitionSpec(), PartitionSpec()
    on_devices = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    with jax.set_mesh(mesh):
        out = jax.jit(functools.partial(transposed_contraction, call_of(problem, "xla")))(*on_devices)
    assert tuple(out.sharding.spec)[:2] == (None, x)
    transposed.assert_right(problem, np.asarray(out), arrays, 8e-3, assert_near)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_of_every_schedule_can_be_traced_inside_shard_map(schedule):
    call = Call("bfloat16", "random", replace(WIDE, schedule=schedule), "mosaic")
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    whole, last, of_groups = PartitionSpec(), PartitionSpec(None, "x"), PartitionSpec("x")
    shapes = ((256, 2048), E4M3), ((512, 2048), E5M2), ((8,), "int32"), ((1,), "float32")
    product = jax.shard_map(
        functools.partial(transposed_contraction, call),
        mesh=mesh,
        in_specs=(last, last, of_groups, whole),  # each device has experts, and the columns that were sent to them
        out_specs=of_groups,
    )
    with gpu.target("h200"):
        out = jax.eval_shape(product, *(jax.ShapeDtypeStruct(*shape) for shape in shapes))
    assert out.shape == (8, 256, 512)


def test_capture_tells_the_problem():
    problem = P(640, 80, 144, 4)
    run = functools.partial(transposed_contraction, call_of(problem, None))
    captured = capture.capture(run, gpu="h200")(*transposed.operands(problem, ODD))
    assert [use.problem for use in captured.problems] == [problem]


def test_a_shard_is_told_to_pass_its_columns():
    problem = P(640, 80, 144, 4)
    with pytest.raises(ValueError, match="hold the columns of its groups alone"):
        transposed_contraction(call_of(problem, "xla", group_offset=True), *transposed.operands(problem, ODD))


# --- problems and configs


@pytest.mark.parametrize("spread", ["even", "random", "skewed", "sparse"])
def test_drawn_groups_fill_m_and_padding_is_zero(spread):
    problem = P(128 * 40, 16, 24, 16, spread=spread)
    lhs, rhs, sizes, scale = SPEC.inputs(problem, jax.random.key(3))
    assert (lhs.dtype, rhs.dtype, scale.shape) == (E4M3, E5M2, (1,))
    assert padded(sizes, problem.m).sum() == problem.m
    assert (sizes % 128).any()
    for columns, size in zip(transposed.spans(problem, sizes.tolist()), sizes.tolist(), strict=True):
        for x in (lhs, rhs):
            assert (np.asarray(x, np.float32)[:, columns.start + size : columns.stop] == 0).all()
            assert size == 0 or (np.asarray(x, np.float32)[:, columns.start + size - 1] != 0).any()


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (P(640, 64, 64, 2, transposed=False), "cast both to bfloat16"),
        (P(640, 64, 64, 2, dtype="bfloat16", rhs_dtype="none"), "bfloat16 and bfloat16 stored transposed: only float8_e4m3fn"),
        (P(640, 64, 64, 2, rhs_dtype="bfloat16"), "float8_e4m3fn and bfloat16 stored transposed"),
        (P(640, 64, 64, 2, dtype="bfloat16", rhs_dtype="float16", transposed=False), "lhs is bfloat16 and rhs is float16"),
        (P(640, 64, 64, 2, out_dtype=E4M3), "out_dtype float8_e4m3fn is not one of"),
        (P(640, 64, 64, 2, group_offset=True), "pass its groups' columns alone"),
        (P(600, 64, 64, 2), "m=600 is no multiple of 128"),
        (P(640, 60, 64, 2), "n=60 needs 16-byte rows of the output"),
        (P(0, 64, 64, 2), "is zero: there is nothing to compute"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_run_is_told(problem, reason):
    assert reason in SPEC.supports(problem, H200)


def test_other_architectures_are_refused():
    assert "is not a Hopper GPU" in SPEC.supports(P(640, 64, 64, 2), gpu.find("b200"))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(640, 64, 64, 2), replace(BASE, tile_k=256), "tile_k=256 must be 128"),
        (P(640, 64, 64, 2), replace(BASE, tile_k=64), r"tile_k=64 is not one of (128, 256)"),
        (P(640, 72, 64, 2), replace(WIDE, epilogue_tile_n=128), "epilogue_tile_n=128 must be 64 because k=64, n=72"),
        (P(640, 128, 68, 2), replace(WIDE, epilogue_tile_n=128), "epilogue_tile_n=128 must be 64 because k=68, n=128"),
        (P(640, 64, 64, 2, out_dtype="float32"), replace(WIDE, schedule="deferred"), "keeps tiles of 16 bits, not of float32"),
        (P(640, 64, 64, 2), replace(WIDE, max_concurrent_steps=5), "bytes of shared memory exceed"),
    ],
    ids=str,
)
def test_what_a_config_cannot_run_is_told(problem, config, reason):
    assert reason in SPEC.check(problem, config, H200)


def test_a_problem_of_one_dtype_is_written_in_one_way_and_unlike_one_of_rows():
    one = P(640, 64, 64, 2, rhs_dtype=E4M3)
    assert one == P(640, 64, 64, 2, rhs_dtype="none")
    two = P(640, 64, 64, 2)
    assert SPEC.distance(one, two) == SPEC.distance(two, one) == pytest.approx(0.05)
    assert SPEC.distance(two, replace(two, dtype="bfloat16", rhs_dtype="none", transposed=False)) is None
    assert SPEC.distance(one, replace(one, transposed=False)) is None
    assert SPEC.plain(two) == two


def test_a_group_may_have_all_columns_and_sums_be_so_imprecise():
    short, long = (SPEC.tolerance(P(m, 64, 64, 8)) for m in (1024, 65536))
    assert long - short == pytest.approx(2.0**-12 * (256 - 32))


# --- compiled, without a GPU

LAYERS = [(1280, 2560, 64, 65536), (2048, 7168, 32, 32768), (4096, 14336, 8, 32768)]  # k, n, groups, rows


@ragged.needs_compiler
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        *((P((rows + 127 * groups) // 128 * 128, n, k, groups), None) for k, n, groups, rows in LAYERS),
        (P(640, 264, 136, 4, dtype=E5M2, rhs_dtype=E4M3), None),
        (P(640, 256, 256, 4, out_dtype="float32"), None),
        (P(640, 116, 72, 4, out_dtype="float32"), replace(HALVES, tile_n=64, epilogue_tile_n=32)),
        (P(640, 72, 20, 4), replace(WIDE, schedule="dynamic")),
        (P(640, 256, 256, 4), replace(HALVES, tile_n=256, epilogue_tile_n=128)),
    ],
    ids=str,
)
def test_kernel_compiles_without_spills_and_without_waits_between_products(problem, config):
    config = config or SPEC.default(problem, H200)
    assert SPEC.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(SPEC.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(SPEC.run, problem, config, H200), *arrays)
    assert report.spills == 0
    assert report.serialized == ""
    assert report.smem_bytes == smem_bytes(problem, config)
    assert all(instruction in report.sass for instruction in ("QGMMA", "UTMALDG", "UTMASTG"))


@pytest.mark.parametrize(("k", "n", "groups", "rows"), LAYERS)
def test_default_has_large_tiles_and_four_stages(k, n, groups, rows):
    config = SPEC.default(P((rows + 127 * groups) // 128 * 128, n, k, groups), H200)
    assert (config.tile_m, config.tile_n, config.tile_k, config.compute_warpgroups) == (128, 256, 128, 2)
    assert config.max_concurrent_steps == 4
