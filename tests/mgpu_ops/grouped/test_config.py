"""What the configs of both ops must fulfil, whatever the problem."""

from __future__ import annotations

from dataclasses import replace

import pytest

from mgpu_ops import GroupedMatmulProblem, RaggedContractionProblem, spec_of
from mgpu_ops.core import gemm, gpu
from mgpu_ops.grouped.config import check_tiles, consumer_registers
from tests.mgpu_ops.grouped.ragged import BASE, assert_compiles, needs_compiler

H200 = gpu.find("h200")


@pytest.mark.parametrize("warpgroups", [1, 2])
def test_registers_of_all_warpgroups_fit_in_the_register_file(warpgroups):
    for memory in range(24, 129, 8):
        compute = consumer_registers(replace(BASE, compute_warpgroups=warpgroups, memory_registers=memory), H200)
        assert compute % 8 == 0
        assert compute <= 240
        assert 128 * (memory + warpgroups * compute) <= H200.registers_per_sm


@pytest.mark.parametrize(
    ("warpgroups", "side", "wanted"), [(1, "m", (128, 192)), (1, "n", (128, 192)), (2, "m", (64, 192)), (2, "n", (128, 96))]
)
def test_warpgroups_share_out_one_side_of_the_tile(warpgroups, side, wanted):
    config = replace(BASE, tile_m=128, tile_n=192, compute_warpgroups=warpgroups, wg_dimension=side)
    assert gemm.warpgroup_tile(config) == wanted
    assert gemm.Storage(config, 1, 2).out_shape == (warpgroups, 1, 64, 64)


WIDE = replace(BASE, tile_m=128, tile_n=256, compute_warpgroups=2)


@pytest.mark.parametrize("config", [BASE, WIDE, replace(BASE, tile_k=128)], ids=str)
def test_good_tiles_have_no_reason_against_them(config):
    assert check_tiles(config, 2, H200) is None


@pytest.mark.parametrize(
    ("config", "itemsize", "reason"),
    [
        (replace(BASE, compute_warpgroups=3), 2, r"compute_warpgroups=3 is not one of \(1, 2\)"),
        (replace(BASE, wg_dimension="k"), 2, r"wg_dimension='k' is not one of \('m', 'n'\)"),
        (replace(BASE, tile_k=96), 2, r"tile_k=96 is not one of \(64, 128\)"),
        (
            replace(BASE, schedule="fair"),
            2,
            r"schedule='fair' is not one of \('static', 'dynamic', 'deferred', 'dynamic-deferred'\)",
        ),
        (replace(BASE, tile_m=0), 2, "tile_m=0 must be at least 1"),
        (replace(BASE, raster_width=0), 2, "raster_width=0 must be from 1 to 1024"),
        (replace(BASE, epilogue_tile_n=0), 2, "epilogue_tile_n=0 must be at least 1"),
        (replace(BASE, epilogue_slots=0), 2, "epilogue_slots=0 must be from 1 to the 1 epilogue tiles of a warpgroup"),
        (replace(BASE, tile_m=320), 2, "tile_m, tile_n and tile_k must be at most 256: a TMA box"),
        (replace(BASE, tile_n=512), 2, "tile_m, tile_n and tile_k must be at most 256: a TMA box"),
        (replace(BASE, max_concurrent_steps=1), 2, "max_concurrent_steps=1: loading ahead takes at least 2 stages"),
        (replace(BASE, memory_registers=30), 2, "memory_registers=30 must be a multiple of 8 from 24 to 128"),
        (replace(BASE, memory_registers=136), 2, "memory_registers=136 must be a multiple of 8 from 24 to 128"),
        (replace(BASE, tile_m=96), 2, "96 rows of tile_m=96 must be a multiple of 64"),
        (replace(BASE, compute_warpgroups=2), 2, "32 rows of tile_m=64 must be a multiple of 64"),
        (replace(BASE, tile_n=68), 2, "68 columns of tile_n=68 must be a multiple of 8"),
        (replace(WIDE, wg_dimension="n", tile_n=136), 2, "68 columns of tile_n=136 must be a multiple of 8"),
        (replace(BASE, epilogue_tile_n=32), 2, "epilogue_tile_n=32 must divide a warpgroup's 64 columns and be .* of 64"),
        (replace(BASE, epilogue_tile_n=48), 4, "epilogue_tile_n=48 must divide a warpgroup's 64 columns and be .* of 32"),
        (replace(BASE, tile_n=192, epilogue_tile_n=128), 2, "epilogue_tile_n=128 must divide a warpgroup's 192 columns"),
        (replace(BASE, epilogue_slots=2), 2, "epilogue_slots=2 must be from 1 to the 1 epilogue tiles of a warpgroup"),
        (replace(BASE, tile_m=128, tile_n=256), 2, "accumulator takes 256 registers a thread.*240 are left: use smaller tiles"),
    ],
)
def test_reason_names_the_field_the_value_and_the_rule(config, itemsize, reason):
    with pytest.raises(ValueError, match=reason):  # pytest.raises prints what did not match
        raise ValueError(check_tiles(config, itemsize, H200))


SHORT = replace(WIDE, max_concurrent_steps=4, schedule="dynamic", short_tiles=True)
PROBLEM = GroupedMatmulProblem(4096, 2048, 1024, 8)


@pytest.mark.parametrize("config", [SHORT, replace(SHORT, schedule="dynamic-deferred", tile_n=128)], ids=str)
def test_short_tiles_run_where_tiles_are_handed_out_to_two_consumers(config):
    assert spec_of("grouped_matmul").check(PROBLEM, config, H200) is None


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (PROBLEM, replace(SHORT, schedule="deferred"), "takes tiles handed out, not schedule='deferred'"),
        (PROBLEM, replace(SHORT, wg_dimension="n"), "two consumers that share tile_m=128 along m, not 2 that share .* along n"),
        (PROBLEM, replace(SHORT, tile_m=256, tile_n=128), "share tile_m=128 along m, not 2 that share tile_m=256"),
        (PROBLEM, replace(SHORT, tile_n=64), "epilogue_tile_n=64 must divide the 32 columns that a consumer has"),
        (PROBLEM, replace(SHORT, tile_n=192), "epilogue_tile_n=64 must divide the 96 columns"),
        (
            PROBLEM,
            replace(SHORT, epilogue_tile_n=256, max_concurrent_steps=3),
            "epilogue_tile_n=256 must divide the 128 columns",
        ),
        (
            replace(PROBLEM, out_dtype="float32"),
            replace(SHORT, tile_n=192, epilogue_tile_n=32),
            "tile_n=192 must be a multiple of 128 with short_tiles=True",
        ),
        (
            replace(PROBLEM, layout="nt", row_scale=True, gated_gradient=True),
            replace(SHORT, epilogue_slots=1, max_concurrent_steps=3),
            "short_tiles=True does not run with a gated gradient: use False",
        ),
        (
            RaggedContractionProblem(4096, 2048, 1024, 8),
            replace(SHORT, epilogue_slots=1),
            "short_tiles=True does not run with a contraction",
        ),
    ],
)
def test_the_reason_against_short_tiles_names_the_rule(problem, config, reason):
    op = "grouped_matmul" if isinstance(problem, GroupedMatmulProblem) else "ragged_contraction"
    with pytest.raises(ValueError, match=reason):
        raise ValueError(spec_of(op).check(problem, config, H200))


@pytest.mark.parametrize("op", ["grouped_matmul", "ragged_contraction"])
@pytest.mark.parametrize("field", ["m", "n", "k", "groups"])
def test_a_config_for_twice_as_many_rows_columns_or_groups_is_farther(op, field):
    spec = spec_of(op)
    problem = spec.Problem(4096, 2048, 1024, 8)
    assert spec.distance(problem, replace(problem, **{field: 2 * getattr(problem, field)})) == 1


# --- rows that swizzle tiles do not divide

RAGGED = {
    "grouped_matmul": GroupedMatmulProblem(15580, 7880, 2472, 16),
    "ragged_contraction": RaggedContractionProblem(2584, 2960, 2360, 6),
}


@needs_compiler
@pytest.mark.parametrize("op", RAGGED)
def test_the_default_has_wide_tiles_where_rows_are_no_multiples_of_64_and_compiles_without_spills(op):
    spec, problem = spec_of(op), RAGGED[op]
    config = spec.default(problem, H200)
    assert gemm.warpgroup_tile(config)[1] > 64
    assert_compiles(spec, problem, config)


def test_a_contraction_whose_rows_begin_within_sectors_has_the_widest_tiles():
    """Stores of 14 groups of 12256 x 7992 took 3064, 1939 and 1531 us with tiles of 64, 128 and 256 columns."""
    spec, problem = spec_of("ragged_contraction"), RaggedContractionProblem(44, 7992, 12256, 14, spread="even")
    assert spec.default(problem, H200).tile_n == 256
    times = [
        spec.cost(problem, replace(BASE, tile_m=128, tile_n=n, compute_warpgroups=2, max_concurrent_steps=4), H200)
        for n in (64, 128, 256)
    ]
    assert times == sorted(times, reverse=True)
