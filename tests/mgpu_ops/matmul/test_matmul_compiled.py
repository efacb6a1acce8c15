"""Schedules of the matmul kernel that no shipped config has, compiled for an H200: what they take, and by what they add up."""

from __future__ import annotations

import functools
import itertools
import re
from dataclasses import replace

import jax
import pytest

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.matmul.problem import smem_bytes
from tests import thorough
from tests.configs import BASE

pytestmark = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
MATMUL, H200 = spec_of("matmul"), gpu.find("h200")
FEW_ROWS = replace(BASE, tile_m=16, tile_n=64, compute_warpgroups=1, max_concurrent_steps=8)


def compiled(problem: MatmulProblem, config: MatmulConfig) -> aot.Report:
    assert MATMUL.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    return aot.compile_for(H200, functools.partial(MATMUL.run, problem, config, H200), *arrays)


SLOW = {"gelu": 1, "gelu_erf": 1, "silu": 2}  # an exponential, and of silu a reciprocal square root


@pytest.mark.parametrize("activation", thorough.cases(list(SLOW), ["gelu", "silu"]))
def test_an_epilogue_takes_one_or_two_slow_instructions_an_element_and_no_spills(activation):
    problem = MatmulProblem(4096, 14336, 4096, bias=True, activation=activation, residual=True)
    config = MATMUL.default(problem, H200)
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert report.spills == 0
    assert report.smem_bytes <= smem_bytes(problem, config)
    elements = config.tile_m * config.tile_n // config.compute_warpgroups // 128  # of a thread
    parts = 2 if config.takes_turns else 1  # of a tile, each of one consumer
    assert 0 <= kernel.sass.count("MUFU") - SLOW[activation] * elements * parts <= 8


@pytest.mark.parametrize(
    "problem",
    [
        MatmulProblem(70, 1792, 2200),
        MatmulProblem(64, 3584, 18944, residual=True),
        MatmulProblem(962, 1280, 3072, layout="nt", residual=True),
    ],
    ids=["parts of few rows", "halves of few rows share B", "a residual"],
)
def test_defaults_of_few_tiles_have_the_next_step_in_flight_and_do_not_spill(problem):
    config = MATMUL.default(problem, H200)
    report = compiled(problem, config)
    assert (config.schedule, report.spills, report.serialized) == ("ahead", 0, "")
    assert report.smem_bytes <= smem_bytes(problem, config)


@pytest.mark.parametrize(
    ("schedule", "tile_k", "instructions"),
    [
        ("cooperative", 64, 1),
        pytest.param("ahead", 64, 1, marks=thorough.only_in_all),
        pytest.param("deferred", 64, 1, marks=thorough.only_in_all),
        ("ahead", 128, 5),
    ],
)
def test_the_last_step_multiplies_what_is_left_of_k(schedule, tile_k, instructions):
    """An instruction multiplies 16 of k. Of 1352 a step of 64 has the last 8, a step of 128 the last 72."""
    config = replace(BASE, tile_k=tile_k, schedule=schedule)
    short, whole = (compiled(MatmulProblem(1024, 4096, k, layout="tn"), config) for k in (1352, 1408))
    assert short.sass.count("HGMMA") - whole.sass.count("HGMMA") == instructions
    assert (short.spills, short.serialized) == (0, "")


@pytest.mark.parametrize("sides", [(4096, 7168, 2048), (16, 7168, 2048)], ids=str)
def test_products_of_blocks_are_added_beside_the_tensor_cores_without_spills(sides):
    """Products of a block begin at zero without a move, and every sum of a step takes one instruction for each 128 of k."""
    problem = MatmulProblem(*sides, "float8_e4m3fn", "bfloat16", "nt", scales="block")
    config = MATMUL.default(problem, H200)
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert (report.spills, report.serialized) == (0, "")
    assert report.smem_bytes <= smem_bytes(problem, config)
    sums = config.tile_m * config.tile_n // config.compute_warpgroups // 128 * config.tile_k // 128  # of a thread
    assert sums <= kernel.sass.count("FFMA") <= sums + 8
    multiplied = [line for line in kernel.sass.splitlines() if "QGMMA" in line]
    assert len([line for line in multiplied if "RZ, !UPT" in line]) * 4 == len(multiplied) > 0


@pytest.mark.parametrize("scales", ["tensor", "row"])
@pytest.mark.parametrize("shape", [(9, 272, 528), (1000, 2640, 1040)], ids=str)
def test_scales_and_a_bias_of_any_length_are_read_by_tma_and_nothing_pads_them(shape, scales):
    """A kernel of XLA's that pads a vector to whole tiles takes 1 to 2 us, as long as a small product."""
    problem = MatmulProblem(*shape, "float8_e4m3fn", layout="nt", scales=scales, bias=True)
    config = MATMUL.default(problem, H200)
    run = functools.partial(MATMUL.run, problem, config, H200)
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    assert config.cluster != "k"
    assert "pad[" not in str(jax.make_jaxpr(run)(*arrays))
    assert " LDG." not in compiled(problem, config).kernels[0].sass  # no thread waits for global memory


@pytest.mark.parametrize("steps", [11, 12, 13])
def test_a_short_part_of_k_in_a_cluster_spills_nothing(steps):
    """With 12 stages ptxas unrolls the producer's loop."""
    problem = MatmulProblem(2, 1152, 2 * 64 * steps)
    clusters = (c for c in MATMUL.candidates(problem, H200) if (c.cluster, c.split_k, c.schedule) == ("k", 2, "ahead"))
    report = compiled(problem, next(c for c in clusters if (c.tile_m, c.tile_n, c.tile_k) == (8, 64, 64)))
    assert report.spills == 0


@pytest.mark.parametrize("scales", thorough.cases(["none", "tensor", "row"], ["row"]))
def test_operands_of_8_bits_compile_without_spills(scales):
    problem = MatmulProblem(
        4096, 4096, 4096, "float8_e5m2", "bfloat16", "nt", b_dtype="float8_e4m3fn", scales=scales, bias=True
    )
    config = MATMUL.default(problem, H200)
    report = compiled(problem, config)
    assert (report.spills, report.serialized) == (0, "")
    assert report.smem_bytes <= smem_bytes(problem, config)
    assert ".e5m2.e4m3" in report.ptx


@pytest.mark.parametrize(
    ("problem", "config", "expected"),
    [
        (MatmulProblem(72, 256, 256), {"tile_m": 64, "wg_dimension": "n", "schedule": "ahead"}, [64, 8, 128]),
        (MatmulProblem(16, 256, 200, layout="nt"), {"schedule": "deferred"}, [16, 128]),
        (
            MatmulProblem(200, 256, 200, layout="tt"),
            {"tile_n": 192, "schedule": "ahead", "cluster": "m"},
            [128, 32, 192, 64],
        ),
    ],
    ids=["the last tile of rows", "one tile", "the last step of k, and columns that a cluster shares"],
)
def test_rows_of_a_tile_outside_an_array_are_not_loaded(problem, config, expected):
    """TMA takes four times as long to fill them with zeros as to load rows. Each of 128 threads expects a byte of each line."""
    config = replace(BASE, **({"tile_n": 128} | config))
    assert MATMUL.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    ptx = "".join(aot.ptx(H200, functools.partial(MATMUL.run, problem, config, H200), *arrays))
    numbers = dict(re.findall(r"mov\.b32\s+(%r\d+), (\d+);", ptx))
    assert {int(numbers[name]) for name in re.findall(r"expect_tx[^;]*, (%r\d+);", ptx)} == set(expected)


@pytest.mark.parametrize(
    "config", [replace(BASE, schedule="ahead"), replace(BASE, schedule="deferred")], ids=["ahead", "deferred"]
)
def test_a_producers_warps_do_not_wait_for_each_other_before_a_copy(config):
    """Two copies a step take as long as the products of a small tile: with a barrier of four warps before each, longer."""
    sass = compiled(MatmulProblem(1024, 4096, 4096), config).sass.splitlines()
    first, *_, last = (i for i, line in enumerate(sass) if "UTMALDG" in line)
    assert not [line for line in sass[first:last] if "BAR.SYNC" in line]


def test_few_rows_lie_along_the_narrow_side_of_wgmma():
    problem = MatmulProblem(17, 4104, 4096, layout="nt")
    report = compiled(problem, FEW_ROWS)
    assert "wgmma.mma_async.sync.aligned.m64n16k16" in report.ptx
    assert report.spills == 0
    assert report.smem_bytes <= smem_bytes(problem, FEW_ROWS)


def test_parts_of_k_are_added_up_in_one_kernel_through_distributed_shared_memory():
    problem = MatmulProblem(256, 4096, 4096)
    config = replace(BASE, tile_n=256, wg_dimension="n", cluster="k", split_k=2, epilogue_tile_n=32)
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert report.smem_bytes <= smem_bytes(problem, config)
    assert "st.async" in kernel.ptx
    assert ".reqnctapercluster 2, 1, 1" in kernel.ptx
    assert report.spills == 0


def test_warpgroups_that_take_turns_start_a_step_before_they_wait_for_the_last_one():
    problem = MatmulProblem(4096, 14336, 4096)
    config = replace(BASE, tile_n=192, max_concurrent_steps=4, schedule="pingpong")
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert report.spills == 0
    assert not report.serialized
    assert report.smem_bytes <= smem_bytes(problem, config)
    multiply = kernel.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert len(multiply) == 2  # one main loop, in which the wgmma of the last step are waited for, not those of this one
    assert "HGMMA" in multiply[0]
    assert "HGMMA" not in multiply[1]


def test_with_schedule_ahead_blocks_of_a_cluster_share_tile_and_sum_and_have_a_wgmma_in_flight():
    problem = MatmulProblem(256, 6144, 4096)
    config = replace(BASE, tile_n=192, schedule="ahead", cluster="k", split_k=2, epilogue_tile_n=32)
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert (report.spills, report.serialized) == (0, "")
    assert report.smem_bytes <= smem_bytes(problem, config)
    assert "st.async" in kernel.ptx
    assert kernel.sass.count("UTMASTG") == 6  # of six epilogue tiles, each block stores three
    multiply = kernel.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert len(multiply) == 2  # one main loop, in which the wgmma of the last step are waited for, not those of this one
    assert "HGMMA" not in multiply[1]


@pytest.mark.parametrize("schedule", ["ahead", pytest.param("cooperative", marks=thorough.only_in_all)])
def test_a_block_sends_its_sum_without_waiting_for_what_it_has_stored_and_loaded(schedule):
    config = replace(FEW_ROWS, schedule=schedule, cluster="k", split_k=2)
    report = compiled(MatmulProblem(16, 4096, 4096, residual=True), config)
    (kernel,) = report.kernels
    assert (report.spills, report.serialized) == (0, "")
    assert "st.async" in kernel.ptx
    assert not re.search(r"MEMBAR\.\w+\.GPU", kernel.sass)


def test_the_residual_of_a_deferred_store_takes_no_shared_memory_of_its_own():
    config = replace(BASE, tile_n=256, max_concurrent_steps=4, schedule="deferred", epilogue_tile_n=32)
    problem = MatmulProblem(8192, 4096, 4096, residual=True)
    report = compiled(problem, config)
    assert (report.spills, report.serialized) == (0, "")
    assert smem_bytes(problem, config) == smem_bytes(replace(problem, residual=False), config)
    assert report.smem_bytes <= smem_bytes(problem, config)


@pytest.mark.parametrize("layout", ["nn", pytest.param("nt", marks=thorough.only_in_all), "tn"])
def test_the_default_of_a_large_product_keeps_a_tile_without_spills(layout):
    problem = MatmulProblem(4096, 14336, 4096, layout=layout)
    config = MATMUL.default(problem, H200)
    assert config.schedule == "deferred"
    assert compiled(problem, config).spills == 0


def test_a_tile_between_two_panels_multiplies_its_own_columns_only():
    config = replace(BASE, tile_n=160, max_concurrent_steps=4, schedule="deferred", epilogue_tile_n=32)
    report = compiled(MatmulProblem(1024, 480, 512), config)
    assert "HGMMA.64x160x16" in report.sass
    assert "HGMMA.64x192" not in report.sass
    assert report.spills == 0


def test_the_blocks_of_a_cluster_load_a_tile_between_two_panels_once():
    config = replace(BASE, tile_n=160, max_concurrent_steps=4, schedule="ahead", epilogue_tile_n=32, cluster="m")
    report = compiled(MatmulProblem(1024, 480, 512), config)
    assert "MULTICAST" in report.sass
    assert report.spills == 0


def test_a_deferred_store_runs_beside_the_wgmma_of_the_next_tile_of_which_the_next_one_is_in_flight():
    config = replace(BASE, tile_n=256, max_concurrent_steps=4, schedule="deferred")
    problem = MatmulProblem(4096, 14336, 4096)
    report = compiled(problem, config)
    (kernel,) = report.kernels
    assert report.spills == 0
    assert not report.serialized
    assert report.smem_bytes <= smem_bytes(problem, config)
    found = re.findall(r"HGMMA|UTMASTG|DEPBAR\.LE gsb0, 0x[01]", kernel.sass)
    order = [name for name, _ in itertools.groupby(found)]
    wait, begin_and_store = "DEPBAR.LE gsb0, 0x1", ["HGMMA", "UTMASTG"]
    storing = [*begin_and_store, *3 * [*begin_and_store, wait]]  # of the tile before, 64 columns a step
    assert order == [*storing, "HGMMA", wait, "DEPBAR.LE gsb0, 0x0", "UTMASTG"]  # all other steps; the last tile


def test_three_consumers_keep_a_wgmma_in_flight_in_the_registers_of_a_launch():
    config = replace(BASE, tile_m=192, tile_n=256, max_concurrent_steps=3, compute_warpgroups=3, schedule="ahead")
    report = compiled(MatmulProblem(8192, 6144, 4096), config)
    (kernel,) = report.kernels
    assert (report.spills, report.serialized) == (0, "")
    assert kernel.registers <= 168  # of 384 threads
    assert "setmaxnreg" not in kernel.ptx
    multiply = kernel.sass.split("WARPGROUP.DEPBAR.LE gsb0, 0x1")
    assert len(multiply) == 2  # the wgmma of the last step are waited for, and then its stage is filled
    assert "UTMALDG" in multiply[1]
    assert "HGMMA" not in multiply[1]


@pytest.mark.parametrize(
    "problem",
    [MatmulProblem(2**23, 520, 64, residual=True), MatmulProblem(512, 512, 2**21, batch=4)],
    ids=["output, whose tiles begin anywhere", "operands"],
)
def test_arrays_of_more_than_2_31_elements_compile(problem):
    """Copies name a row and a column, below 2^31 each, and no element: `check` sees to it."""
    assert max(problem.m * problem.n, problem.batch * problem.m * problem.k) > 2**31
    assert compiled(problem, BASE).spills == 0


@pytest.mark.parametrize(
    ("problem", "config", "dimensions"),
    [
        (MatmulProblem(2, 256, 64, layout="nt"), replace(FEW_ROWS, compute_warpgroups=2, wg_dimension="m"), "[45]d"),
        (MatmulProblem(256, 32, 64, layout="nt"), replace(BASE, tile_n=128), "[45]d"),
        # as an array of rows and columns, which are more than one
        (MatmulProblem(1112, 32, 72, "float16", "float32", "tt"), replace(BASE, tile_n=128, epilogue_tile_n=32), "2d"),
    ],
    ids=["rows", "columns", "where the last tile of rows ends with the array"],
)
def test_a_store_beyond_an_array_of_one_swizzle_tile_keeps_its_index(problem, config, dimensions):
    """Else TMA would store it at the array's beginning: Mosaic drops a dimension of size 1 and the index in it."""
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    ptx = "".join(aot.ptx(H200, functools.partial(MATMUL.run, problem, config, H200), *arrays))
    stores = set(re.findall(r"tensor\.(\dd)\.global\.shared", ptx))
    assert any(re.fullmatch(dimensions, found) for found in stores)
