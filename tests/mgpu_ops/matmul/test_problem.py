"""Which configs of matmul run a problem: what `check` adds to the rules of every GEMM (tests/core/test_gemm.py)."""

from __future__ import annotations

import json
from dataclasses import replace
from pathlib import Path

import pytest

from mgpu_ops.core import gpu
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.matmul import SPEC, checks, problem, xla
from mgpu_ops.matmul.problem import Problem, vector_room
from mgpu_ops.registry import winner
from mgpu_ops.registry.spec import baseline_of
from tests.configs import BASE

H200 = gpu.find("h200")
P = Problem(512, 512, 512)
F8 = Problem(512, 512, 512, "float8_e4m3fn", "bfloat16", "nt")
FEW_ROWS = {"tile_m": 8, "tile_n": 64, "compute_warpgroups": 1}
THREE = {"tile_m": 192, "tile_n": 256, "tile_k": 64, "compute_warpgroups": 3, "max_concurrent_steps": 3, "schedule": "ahead"}


@pytest.mark.parametrize(
    ("p", "changes", "reason"),
    [
        (P, {"tile_m": 192}, "a warpgroup's 96 rows of tile_m=192 must be a multiple of 64"),
        (P, {"tile_m": 129}, "a warpgroup's 64 rows of tile_m=129 must be a multiple of 64"),
        (P, {"raster_dimension": "k"}, r"raster_dimension='k' is not one of \('m', 'n'\)"),
        (P, {"raster_width": 0}, "raster_width=0 must be at least 1"),
        (P, {"split_k": 9}, "split_k=9 must be from 1 to the 8 steps of k=512"),
        (P, {"cluster": "m", "tile_m": 256}, None),
        (replace(P, m=640), {"cluster": "m"}, None),  # some blocks have no tile
        (
            replace(P, m=24),
            {"tile_m": 24, "cluster": "n", "epilogue_tile_n": 64, "compute_warpgroups": 1},
            "shares tiles of 24 rows: .* a multiple of 16",
        ),
        (P, {"cluster": "m4"}, None),
        (replace(P, m=640), {"cluster": "m4"}, None),
        (replace(P, layout="nt"), {"cluster": "m4", "tile_n": 144, "epilogue_tile_n": 16}, "144 rows: .* a multiple of 32"),
        (P, {"tile_k": 48}, "tile_k=48 and the operand tiles' rows must be multiples of 32 .* one common swizzle"),
        (replace(P, layout="tn"), {"tile_m": 128, "wg_dimension": "m"}, None),
        (replace(P, n=520), {"epilogue_tile_n": 128}, "epilogue_tile_n=128 must be 64, .* the output is 512 x 520"),
        (replace(P, k=520), {"tile_k": 128}, "tile_k=128 must be 64, one swizzle tile, because A is 512 x 520"),
        (replace(P, n=520), {}, None),  # wider blocks along n: the last one ends with the row
        (replace(P, n=72, k=516), {"memory_registers": 24}, "16-byte rows"),
        (replace(P, n=72), {}, None),
        (replace(P, n=72), {"memory_registers": 24}, "tile_n=128 must be 64, one swizzle tile, because B is 512 x 72"),
        # tiles as wide as any wgmma
        (replace(P, layout="nt"), {"tile_n": 104, "epilogue_tile_n": 64}, None),
        (replace(P, layout="nt"), {"tile_n": 104, "epilogue_tile_n": 40}, "epilogue_tile_n=40 must divide a warpgroup's 104"),
        (P, {"tile_n": 104, "epilogue_tile_n": 64}, "one common swizzle of 64 or 128 bytes"),
        (P, {"tile_n": 104, "epilogue_tile_n": 64, "schedule": "ahead"}, None),
        (P, {"tile_n": 104, "epilogue_tile_n": 64, "schedule": "ahead", "cluster": "m4"}, None),
        (
            replace(P, k=513, layout="tn"),
            FEW_ROWS | {"tile_m": 64, "tile_n": 104, "epilogue_tile_n": 64, "schedule": "ahead", "cluster": "m"},
            "tile_n=104 must be a multiple of 64, because B is stored as .k, n., 513 x 512, with cluster='m'",
        ),
        (replace(P, k=513, layout="tn"), {"tile_m": 128}, None),
        (replace(P, n=520, k=513, layout="tn"), {"memory_registers": 24}, "tile_m=128 must be 64, .* A is 513 x 512"),
        # 32 bits: of tiles that begin anywhere, of all tiles, of their steps, and of k in parts
        (replace(P, m=2**28 - 8, n=520), {}, None),
        (
            replace(P, m=2**28, n=520),
            {},
            "tile_n=128 must be 64, .* 520 is no multiple of 64 and m=268435456 is not below 268435456",
        ),
        (replace(P, m=2**28, n=512), {}, None),
        (replace(P, n=2**25, m=520, layout="tn"), {}, "tile_m=128 must be 64, .* and n=33554432 is not below 33554432"),
        (replace(P, m=2**19, n=2**20, batch=16), {"tile_m": 64, "tile_n": 64, "compute_warpgroups": 1}, "split the batch"),
        (replace(P, m=2**21, n=2**21), {"split_k": 8}, "2147483648 tiles of 128 x 128 are .* 32 bits: use larger"),
        (replace(P, m=2**19, n=2**19, k=2**21), {}, "16659283968 steps of 64 of k in a block are more than .*backend='xla'"),
        (replace(P, m=2**19, n=2**19, k=2**18), FEW_ROWS, "4096 steps of k for each of 536870912 tiles are more than a block"),
        (
            replace(P, k=2**31 - 256),
            {"split_k": 16},
            "split_k=16 parts of 2097152 steps of tile_k=64 are more than a block counts",
        ),
        (P, {"schedule": "pingpong"}, None),
        (P, {"schedule": "stream"}, r"schedule='stream' is not one of \('cooperative', 'pingpong', 'deferred', 'ahead'\)"),
        (P, {"schedule": "pingpong", "wg_dimension": "n"}, "wg_dimension='n' must be 'm' with schedule='pingpong', as no side"),
        (P, {"schedule": "pingpong", "compute_warpgroups": 1}, "compute_warpgroups=1 must be 2 with schedule='pingpong'"),
        (
            P,
            {"schedule": "pingpong", "cluster": "k", "split_k": 2},
            "cluster='k' must be 'none' or 'm' or 'n' or 'm4' or 'n4' with schedule=",
        ),
        (P, {"schedule": "pingpong", "tile_m": 32}, "tile_m=32 must be a multiple of 64 with schedule='pingpong'"),
        (P, {"schedule": "pingpong", "tile_n": 256}, "accumulator takes 256 registers a thread"),
        (P, {"schedule": "deferred", "tile_n": 256}, None),
        (replace(P, out_dtype="float32"), {"schedule": "deferred", "tile_n": 256}, "accumulator takes 256 registers a thread"),
        (replace(P, residual=True), {"schedule": "deferred", "tile_n": 256}, None),
        (replace(P, residual=True, layout="nt"), {"schedule": "deferred", "tile_n": 256}, None),
        (
            replace(P, residual=True),
            {"schedule": "deferred", "wg_dimension": "n"},
            "schedule='deferred' does not run with this re",
        ),
        (
            replace(P, residual=True, layout="tn"),
            {"schedule": "deferred"},
            "schedule='deferred' does not run with this residual",
        ),
        (replace(P, k=512), {"schedule": "deferred", "cluster": "k", "split_k": 2}, "schedule='deferred' does not run with cl"),
        (P, {"schedule": "deferred", "tile_m": 32}, "schedule='deferred' does not run with tile_m=32 below 64"),
        (P, {"schedule": "ahead", "cluster": "k", "split_k": 2}, None),
        (P, THREE, None),
        (P, THREE | {"cluster": "n"}, None),
        (P, THREE | {"schedule": "deferred"}, "compute_warpgroups=3 does not run with schedule='deferred'"),
        (P, THREE | {"wg_dimension": "n"}, "compute_warpgroups=3 does not run with wg_dimension='n'"),
        (P, THREE | {"cluster": "k", "split_k": 2}, "compute_warpgroups=3 does not run with cluster='k'"),
        (P, THREE | {"tile_m": 128}, r"a warpgroup's 42 rows of tile_m=128 must be a multiple of 64"),
        (P, {"schedule": "ahead", "cluster": "k", "split_k": 4}, None),
        (replace(P, residual=True), {"schedule": "ahead", "cluster": "k", "split_k": 2}, None),
        (F8, {"tile_k": 128}, None),
        (F8, {"tile_k": 256, "max_concurrent_steps": 2}, None),
        (F8, {"tile_k": 32}, "tile_k=32 and the operand tiles' rows must be multiples"),
        (
            replace(F8, k=528),
            {"tile_k": 256, "max_concurrent_steps": 2},
            "tile_k=256 must be 128, one swizzle tile, .* 512 x 528",
        ),
        (replace(F8, scales="block"), {"tile_k": 128}, None),
        (F8, {"tile_k": 128, "schedule": "pingpong"}, None),
        (replace(F8, scales="block"), {"schedule": "pingpong"}, "schedule='pingpong' must be 'cooperative' with scales of"),
        (replace(F8, scales="block"), {}, "tile_k=64 must be 128, the k of a block that has a scale, or 256"),
        (replace(F8, scales="block"), {"tile_k": 128, "tile_n": 192}, None),
        (
            replace(F8, scales="block"),
            {"tile_k": 128, "tile_n": 160, "epilogue_tile_n": 32},
            "160 columns of tile_n=160, and epilogue_tile_n=32, must be",
        ),
        (
            replace(F8, scales="block"),
            {"tile_k": 128, "tile_n": 256},
            "the accumulator takes 256 registers a thread and addresses about 40 more",
        ),
        (replace(P, normalised=True), {}, None),
        (replace(P, normalised=True), {"tile_m": 256}, "tile_m=256: with normalised rows a warpgroup has 64 of them"),
        (replace(P, normalised=True), {"split_k": 2}, "split_k=2: with normalised rows"),
        (replace(P, normalised=True), {"schedule": "pingpong"}, "schedule='pingpong': with normalised rows"),
        (replace(P, normalised=True, layout="tn"), {}, "normalised rows of bfloat16 in layout tn, batch 1: the kernel has"),
        (P, {"max_concurrent_steps": 12}, "bytes of shared memory exceed the 232448 of NVIDIA H200"),
    ],
    ids=str,
)
def test_a_config_runs_or_the_reason_names_the_field_the_value_and_the_rule(p, changes, reason):
    found = checks.check(p, replace(BASE, **changes), H200)
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):  # pytest.raises prints what did not match
            raise ValueError(found)


def cost(p: Problem, **changes: object) -> float:
    return SPEC.cost(p, replace(BASE, max_concurrent_steps=4, **changes), H200)


@pytest.mark.parametrize("schedule", ["pingpong", "deferred"])
def test_the_model_hides_stores_that_run_beside_wgmma(schedule):
    p = replace(P, m=8192, n=8192)
    assert cost(p, schedule=schedule) < cost(p)


def test_rows_outside_an_array_cost_time_only_where_they_are_loaded():
    few, full = Problem(8, 4096, 4096), Problem(64, 4096, 4096)

    def over_ahead(p: Problem) -> float:
        tile = replace(BASE, tile_m=64, tile_n=64, compute_warpgroups=1, max_concurrent_steps=12)
        return SPEC.cost(p, tile, H200) / SPEC.cost(p, replace(tile, schedule="ahead"), H200)

    assert over_ahead(few) > 1.1 * over_ahead(full)


@pytest.mark.parametrize(
    ("sizes", "parts"),
    [((13, 232, 17816), 9), ((4, 144, 21000), 9), ((40, 200, 1248), 9), ((23, 776, 20208), 9), ((23, 1560, 20208), 5)],
)
def test_a_long_k_of_few_tiles_is_divided_into_as_many_parts_as_are_one_wave(sizes, parts):
    p = Problem(*sizes)
    found = SPEC.default(p, H200)
    tiles, steps = -(-p.m // found.tile_m) * -(-p.n // found.tile_n), -(-p.k // found.tile_k)
    assert found.split_k >= parts
    assert tiles * found.split_k <= H200.sms
    assert -(-steps // found.split_k) * (found.split_k - 1) < steps  # each part has a step
    assert tiles * (found.split_k + 1) > H200.sms or -(-steps // found.split_k) == -(-steps // min(H200.sms // tiles, steps))
    assert SPEC.check(p, found, H200) is None


def test_a_residual_costs_either_side_little_more_than_reading_it():
    """67 MB, 14 us of an H200's HBM."""
    plain = Problem(8192, 4096, 4096)
    with_residual = replace(plain, residual=True)
    xla = [SPEC.baseline_cost(p, H200) for p in (plain, with_residual)]
    ours = [SPEC.cost(p, SPEC.default(p, H200), H200) for p in (plain, with_residual)]
    assert 10e-6 < xla[1] - xla[0] < 20e-6
    assert ours[1] - ours[0] < 15e-6


@pytest.mark.parametrize(("sizes", "rows"), [((64, 4096, 4096), 32), ((95, 3584, 3696), 48), ((70, 1792, 2200), 24)])
def test_few_rows_and_columns_get_tiles_of_parts_of_the_rows(sizes, rows):
    """On an H200 they took 0.82 to 0.90 of the time of the default before."""
    p = Problem(*sizes)
    found = SPEC.default(p, H200)
    assert found.tile_m == rows
    assert (found.tile_n, found.cluster, found.split_k, found.schedule) == (64, "none", 1, "ahead")
    assert found.tile_m in SPEC.space(p, H200)["tile_m"]


def test_rows_of_a_stored_along_m_are_not_divided_below_64():
    found = {c.tile_m for c in SPEC.candidates(Problem(160, 2048, 4096, layout="tn"), H200)}
    assert min(found) == 64


def test_loads_of_few_blocks_take_less_time():
    """The same tiles of as many steps, on a fourth of the SMs and on nearly all: HBM alone makes a difference of 1 %."""
    tile = replace(BASE, tile_m=64, tile_n=64, compute_warpgroups=1, schedule="ahead", max_concurrent_steps=12)
    few, many = Problem(256, 512, 8192), Problem(1024, 512, 8192)
    assert SPEC.cost(few, tile, H200) < 0.95 * SPEC.cost(many, tile, H200)


@pytest.mark.parametrize(
    "p", [Problem(962, 1280, 3072, layout="nt"), Problem(395, 5776, 2688), Problem(424, 3888, 3456, layout="nt")]
)
def test_a_default_with_a_residual_has_the_next_step_in_flight_where_tiles_are_few(p):
    """1.12 to 1.30 times as fast as without."""
    with_residual = replace(p, residual=True)
    assert SPEC.default(with_residual, H200).schedule == "ahead"


@pytest.mark.parametrize(
    ("p", "margin"),
    [
        (Problem(245, 1096, 3072), 0.94),  # 18 tiles of 128 x 128
        (Problem(245, 1096, 1016), 0.86),  # a short k
        (Problem(16, 1096, 3072), 0.86),
        (Problem(245, 1096, 3072, activation="gelu"), 0.86),
        (Problem(245, 1096, 3072, batch=2), 0.86),
        (Problem(2012, 224, 4608, layout="nt"), 0.86),  # more rows, and fewer columns, than those measured
        (Problem(1232, 1280, 2048), 0.86),  # 100 tiles: the kernel was at 0.953x of XLA
        (Problem(480, 8512, 2432, layout="nt"), 0.86),  # 0.967x
        (Problem(640, 5120, 5120), 0.94),  # a long k
        (Problem(4096, 4096, 4096), 0.94),
    ],
    ids=str,
)
def test_the_kernel_must_be_modelled_less_far_ahead_where_the_models_are_right(p, margin):
    assert xla.margin(p) == margin


RESIDUALS = [  # us of XLA on an H200, and of the fastest config, in results/2026-11-29-h200-matmul-residual-drawn.jsonl.gz
    (Problem(11987, 6856, 5640, bias=True, residual=True), 1245.7, 1411.3),
    (Problem(7421, 2768, 7480, layout="nt", bias=True, residual=True), 408.1, 434.4),
    (Problem(7280, 6864, 1656, residual=True), 239.3, 275.5),
    (Problem(5069, 1984, 1208, layout="nt", residual=True), 40.7, 49.1),
    (Problem(983, 4328, 504, layout="nt", residual=True), 12.6, 14.7),
    (Problem(15601, 3432, 848, layout="nt", residual=True), 162.1, 145.3),
    (Problem(12429, 6896, 544, layout="nt", residual=True), 176.1, 160.6),
    (Problem(362, 1992, 1112, layout="nt", residual=True), 13.9, 7.0),
]


@pytest.mark.parametrize(("p", "xla_us", "kernel_us"), RESIDUALS, ids=str)
def test_a_drawn_product_with_a_residual_runs_what_was_faster(p, xla_us, kernel_us):
    assert SPEC.baseline_cost(p, H200) * 1e6 == pytest.approx(xla_us, rel=0.15)
    runs_kernel = SPEC.cost(p, SPEC.default(p, H200), H200) <= xla.margin(p) * xla.cost(p, H200)
    assert runs_kernel == (kernel_us < xla_us)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn"])
def test_thrifty_configs_of_a_large_product_run_and_have_longer_steps_or_larger_tiles(layout):
    p = Problem(8192, 10240, 8192, layout=layout)
    found = SPEC.thrifty(p, H200)
    assert [(c.tile_m, c.tile_n, c.tile_k, c.schedule) for c in found] == [(128, 256, 128, "deferred"), (192, 256, 64, "ahead")]
    assert [SPEC.check(p, c, H200) for c in found] == [None, None]
    assert not SPEC.thrifty(replace(p, m=128, n=256), H200)
    assert not SPEC.thrifty(Problem(8192, 8192, 8192, "float32", "float32"), H200)


def test_the_default_of_a_large_product_defers_its_stores():
    large = replace(P, m=8192, n=8192, k=4096)
    default = SPEC.default(large, H200)
    assert (default.schedule, default.tile_m, default.tile_n, default.epilogue_tile_n) == ("deferred", 128, 256, 32)
    assert SPEC.default(replace(large, residual=True), H200) == default
    assert SPEC.default(replace(large, layout="nt", residual=True), H200) == default
    assert SPEC.default(replace(large, layout="tn", residual=True), H200).schedule == "pingpong"  # there is no room for it


EPILOGUES = [  # us of XLA on an H200, in results/2026-11-28-h200-matmul-other-models.csv
    (Problem(25216, 3072, 768, bias=True, activation="gelu_erf"), 381.0),
    (Problem(24000, 5120, 1280, bias=True, activation="gelu_erf"), 746.9),
    (Problem(16384, 4608, 1152, bias=True, activation="gelu"), 334.7),
    (Problem(32760, 8960, 1536, bias=True, activation="gelu"), 1605.0),
]


@pytest.mark.parametrize(("problem", "us"), EPILOGUES, ids=str)
def test_an_activation_is_a_kernel_of_its_own_in_xla_and_costs_ours_less(problem, us):
    assert SPEC.baseline_cost(problem, H200) * 1e6 == pytest.approx(us, rel=0.08)
    config = SPEC.default(problem, H200)
    assert config.schedule == "pingpong"  # one consumer computes it while the other multiplies
    assert SPEC.cost(problem, config, H200) < 0.86 * SPEC.baseline_cost(problem, H200)


@pytest.mark.parametrize(("k", "width"), [(768, 64), (4096, 32)])
def test_an_epilogue_in_turn_has_wide_tiles_where_there_is_little_time_for_it(k, width):
    config = SPEC.default(Problem(25216, 3072, k, bias=True, activation="gelu_erf"), H200)
    assert (config.schedule, config.epilogue_tile_n) == ("pingpong", width)


@pytest.mark.parametrize("elements", [8, 96, 104, 168, 256])
@pytest.mark.parametrize("itemsize", [2, 4])
def test_every_consumer_s_part_of_a_vector_begins_where_tma_can_write(elements, itemsize):
    assert vector_room(elements) >= elements
    assert vector_room(elements) * itemsize % 128 == 0


@pytest.mark.parametrize("sides", [(256, 28672, 4096), (512, 14336, 3584), (1024, 3584, 14336)])
def test_a_few_hundred_rows_have_tiles_of_224_columns_which_fill_the_waves(sides):
    default = SPEC.default(Problem(*sides), H200)
    assert (default.tile_m, default.tile_n, default.split_k) == (128, 224, 1)
    assert default.schedule in ("ahead", "deferred")  # the plain one would have narrower swizzles


def test_a_product_that_waits_for_hbm_does_not_load_half_panels_twice():
    assert SPEC.default(Problem(128, 57344, 8192), H200).tile_n % 64 == 0


@pytest.mark.parametrize(
    ("p", "tile"),
    [
        (Problem(768, 9728, 2560), (160, 192)),
        (Problem(768, 9728, 2560, layout="nt"), (192, 112)),
        (Problem(3629, 14336, 4096), (248, 128)),
        (Problem(832, 57344, 8192), (120, 256)),
        (Problem(344, 21504, 4096, layout="tn"), (120, 256)),
    ],
)
def test_no_candidate_defers_stores_of_tiles_that_spill(p, tile):
    assert tile not in {(c.tile_m, c.tile_n) for c in SPEC.candidates(p, H200) if c.schedule == "deferred"}


@pytest.mark.parametrize(
    "p", [P, replace(P, m=16384, layout="nt"), Problem(24, 12416, 744, layout="tn"), Problem(4000, 136, 7576), replace(F8, m=8)]
)
def test_the_default_is_the_candidate_of_least_modelled_time(p):
    candidates = SPEC.candidates(p, H200)
    times = [SPEC.cost(p, config, H200) for config in candidates]
    assert times == sorted(times)
    assert SPEC.default(p, H200) == candidates[0]


@pytest.mark.parametrize("sizes", [(8192, 8192, 8192), (8192, 8192, 28672), (16384, 16384, 16384)])
def test_a_product_of_many_waves_is_not_divided_along_k_by_default(sizes):
    default = SPEC.default(Problem(*sizes), H200)
    assert (default.tile_m, default.tile_n, default.schedule, default.split_k) == (128, 256, "deferred", 1)


@pytest.mark.parametrize("tile_m", [8, 24, 64, 192])
def test_stages_of_scales_begin_where_tma_can_write(tile_m):
    """At multiples of 128 bytes of shared memory, which neither the compiler nor the interpreter asks for."""
    config = replace(BASE, tile_m=tile_m, tile_n=192 if tile_m < 192 else 64, tile_k=128, compute_warpgroups=1)
    p = replace(F8, scales="block")
    found = problem.storage(*problem.as_computed(p, config)).scales
    assert len(found) == 2
    assert all(numbers * 4 % 128 == 0 for numbers in found)


@pytest.mark.parametrize(
    "p", [Problem(16, 4096, 4096), Problem(24, 4096, 14336), Problem(90, 10160, 1112, layout="nt"), Problem(275, 2704, 8256)]
)
def test_the_tuner_may_choose_every_candidate_for_few_rows(p):
    space = SPEC.space(p, H200)
    for config in SPEC.candidates(p, H200):
        assert {field: value for field, value in vars(config).items() if value not in space[field]} == {}


@pytest.mark.parametrize(
    "p", [Problem(4096, 4096, 4096), Problem(16, 4096, 4096), replace(F8, m=4096), replace(P, residual=True)]
)
def test_no_candidate_has_room_for_more_steps(p):
    """But few rows, where blocks share k and have 96 KiB of B in flight."""
    steps = SPEC.space(p, H200)["max_concurrent_steps"]
    for config in SPEC.candidates(p, H200):
        assert problem.smem_bytes(p, config) <= H200.smem_per_block
        if problem.computes_transposed(config) and config.cluster == "k":
            in_flight = itemsize_of(p.dtype) * config.max_concurrent_steps * config.tile_n * config.tile_k
            assert in_flight <= 112 * 1024 or config.max_concurrent_steps == 2
            if in_flight > 80 * 1024:
                continue
        for more in (n for n in steps if n > config.max_concurrent_steps):
            assert problem.smem_bytes(p, replace(config, max_concurrent_steps=more)) > H200.smem_per_block, config


def test_the_parts_of_k_that_xla_makes_are_those_of_its_compiled_programs():
    """results/2026-11-23-h200-xla-parts.jsonl has those of drawn products, compiled for an H200 by jax 0.11.2."""
    lines = (Path(__file__).parents[3] / "results" / "2026-11-23-h200-xla-parts.jsonl").read_text().splitlines()
    programs = [json.loads(line) for line in lines]
    wrong = [one for one in programs if xla.split_k(Problem(**one["problem"]), H200) != one["parts"]]
    assert wrong == []
    assert {one["parts"] for one in programs} >= {1, 2, 4, 8, 16, 32, 64}


@pytest.mark.parametrize("p", [Problem(1032, 1536, 24576, bias=True), P])
def test_no_candidate_comes_twice(p):
    found = SPEC.candidates(p, H200)
    assert len(set(found)) == len(found)


@pytest.mark.parametrize("p", [Problem(16, 248, 2432, layout="tt"), Problem(816, 392, 1088, layout="tt")])
def test_the_smallest_tile_has_one_consumer_by_default(p):
    found = SPEC.default(p, H200)
    assert (found.tile_m, found.tile_n, found.compute_warpgroups) == (64, 64, 1)


@pytest.mark.parametrize(
    ("p", "kernel"),
    [
        (Problem(8192, 11008, 4096), True),
        (Problem(8192, 11008, 4096, layout="nt"), True),
        (Problem(8192, 11008, 4096, layout="tn"), False),
        (Problem(512, 11008, 4096), False),
    ],
    ids=str,
)
def test_without_pause_a_large_product_runs_the_kernel_where_in_bursts_xla_may_be_faster(p, kernel):
    of = {
        objective: winner.expected(SPEC, p, SPEC.default(p, H200), H200, baseline_of(SPEC, p), objective).winner
        for objective in ("burst", "sustained")
    }
    assert of == {"burst": "xla", "sustained": "kernel" if kernel else "xla"}


def test_large_outputs_of_short_k_are_left_to_xla_where_their_rows_begin_at_lines():
    p = Problem(4352, 8320, 384, layout="tt")  # 37.8 us, the kernel's default 43.5
    assert winner.expected(SPEC, p, SPEC.default(p, H200), H200, baseline_of(SPEC, p)).winner == "xla"
