"""Which tiles a GEMM kernel can run on Hopper, what they take, and that a model of their time orders them as it should."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

import pytest

from mgpu_ops.core import gemm, gpu, limits
from tests.configs import BASE

H200 = gpu.find("h200")


def check(config: Any) -> str | None:
    return (
        gemm.check_choices(config, {"cluster": ("none", "m", "n")})
        or gemm.check_tile(config)
        or gemm.check_pipeline(config)
        or gemm.check_epilogue(config, 8)
        or gemm.check_accumulator(config, limits.consumer_registers(config.compute_warpgroups, config.memory_registers, H200))
    )


@pytest.mark.parametrize("changes", [{}, {"tile_k": 128}, {"wg_dimension": "n"}, {"tile_n": 256}, {"tile_m": 256}], ids=str)
def test_tiles_that_wgmma_and_tma_take_have_no_reason_against_them(changes):
    assert check(replace(BASE, **changes)) is None


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute_warpgroups": 3}, r"compute_warpgroups=3 is not one of \(1, 2\)"),
        ({"wg_dimension": "k"}, r"wg_dimension='k' is not one of \('m', 'n'\)"),
        ({"cluster": "both"}, r"cluster='both' is not one of \('none', 'm', 'n'\)"),
        ({"tile_m": 0}, "tile_m=0 must be at least 1"),
        ({"epilogue_tile_n": 0}, "epilogue_tile_n=0 must be at least 1"),
        ({"tile_k": 512}, "tile_m, tile_n and tile_k must be at most 256: a TMA box"),
        ({"tile_m": 192}, "a warpgroup's 96 rows of tile_m=192 must be a multiple of 64"),
        ({"tile_m": 129}, "a warpgroup's 64 rows of tile_m=129 must be a multiple of 64"),  # a row would belong to neither
        ({"tile_n": 132, "wg_dimension": "n"}, "a warpgroup's 66 columns of tile_n=132 must be a multiple of 8"),
        ({"tile_n": 129, "wg_dimension": "n"}, "a warpgroup's 64 columns of tile_n=129 must be a multiple of 8"),
        ({"max_concurrent_steps": 1}, "max_concurrent_steps=1: loading ahead takes at least 2 stages"),
        ({"memory_registers": 30}, "memory_registers=30 must be a multiple of 8 from 24 to 128"),
        ({"epilogue_tile_n": 48}, "epilogue_tile_n=48 must divide a warpgroup's 128 columns and be a multiple of 8"),
        ({"tile_m": 256, "tile_n": 256}, "accumulator takes 256 registers a thread .* are left: use smaller tiles"),
    ],
    ids=str,
)
def test_reason_names_the_field_the_value_and_the_rule(changes, reason):
    with pytest.raises(ValueError, match=reason):  # pytest.raises prints what did not match
        raise ValueError(check(replace(BASE, **changes)))


@pytest.mark.parametrize("consumers", [1, 2, 3])
def test_registers_of_producer_and_consumers_fit_in_the_register_file(consumers):
    for producer in range(24, 129, 8):
        registers = limits.consumer_registers(consumers, producer, H200)
        assert registers % 8 == 0
        assert registers <= 240
        assert limits.WARPGROUP * (producer + consumers * registers) <= H200.registers_per_sm


def test_tensor_cores_are_modelled_faster_with_wider_tiles():
    narrow, wide = replace(BASE, tile_n=64), replace(BASE, tile_n=256)
    times = [gemm.multiply_seconds(c, H200, gemm.efficiency(c)) / c.tile_n for c in (narrow, wide)]
    assert times[1] < times[0]
