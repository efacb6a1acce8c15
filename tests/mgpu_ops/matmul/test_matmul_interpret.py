"""The matmul kernel in JAX's GPU interpreter: right on every schedule, and free of data races.

The GPU has four SMs here, so that a block works through several tiles and its pipeline of stages wraps.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops import MatmulConfig, MatmulProblem, spec_of
from mgpu_ops.core import engine, gpu
from mgpu_ops.core.tile_scheduler import Rounds
from mgpu_ops.core.tma import block_start
from mgpu_ops.matmul.work import Tile, Work, step_of_k
from tests import thorough
from tests.arrays import inputs
from tests.configs import BASE
from tests.mgpu_ops.interpreter import has_a_race, quiet_interpreter, wait_for_all_stores_only

MATMUL = spec_of("matmul")
FEW_SMS = replace(gpu.find("h200"), sms=4)

P = MatmulProblem
ONE = replace(BASE, tile_m=64, tile_n=64, compute_warpgroups=1)
FEW_ROWS = replace(ONE, tile_m=16)  # the transposed product
DEFERRED = replace(BASE, tile_n=128, max_concurrent_steps=4, schedule="deferred")
AHEAD = replace(DEFERRED, max_concurrent_steps=2, schedule="ahead")
THREE = replace(AHEAD, tile_m=192, compute_warpgroups=3, max_concurrent_steps=3)
IN_TURN = replace(BASE, tile_m=64, tile_n=64, schedule="pingpong")
WIDE_8, ONE_8, FEW_ROWS_8 = (replace(config, tile_k=128) for config in (BASE, ONE, FEW_ROWS))


def interpret(problem: Any, config: Any, arrays: Any, gpu: Any = FEW_SMS) -> jax.Array:
    assert MATMUL.check(problem, config, gpu) is None
    with quiet_interpreter():
        run = jax.jit(functools.partial(MATMUL.run, problem, config, gpu, interpret=True))
        return run(*arrays).block_until_ready()


ALL = {"bias": True, "activation": "gelu", "residual": True}


def of_8_bits(m: int, n: int, k: int, scales: str, out_dtype: str = "bfloat16", **more: Any) -> MatmulProblem:
    return P(m, n, k, "float8_e4m3fn", out_dtype, "nt", scales=scales, **more)


# Where n is no multiple of a swizzle row (64 elements), `check` wants epilogue tiles that wide.
CASES = {
    # whole tiles and tails
    "whole tiles": (P(256, 256, 192), BASE),
    "tails of a tile in m and n": (P(200, 320, 192), BASE),
    "tails of a swizzle row in m, n and k": (P(200, 136, 72), ONE),
    "wide tiles at the end of rows that no swizzle row divides": (P(200, 328, 136), replace(BASE, tile_n=128)),
    "wide tiles at the end of rows of A": (P(200, 264, 136, layout="tt"), BASE),
    "wide tiles, both operands ragged, k no multiple of 8": (P(264, 328, 131, layout="tn"), replace(BASE, tile_n=192)),
    "wide tiles shared in a cluster": (P(200, 328, 136), replace(BASE, cluster="m", tile_n=128)),
    "tiles wider than rows of A": (P(72, 136, 72, layout="tn"), replace(BASE, epilogue_tile_n=64, tile_n=64)),
    "tiles wider than rows of B, narrow epilogue tiles": (P(72, 80, 72), replace(BASE, tile_n=128)),
    "four blocks of a cluster along m, tiles beyond the last": (P(360, 136, 136), replace(ONE, cluster="m4")),
    "four blocks of a cluster along n, transposed, A transposed": (
        P(40, 456, 136, layout="tn"),
        replace(FEW_ROWS, tile_m=64, cluster="n4", schedule="ahead"),
    ),
    "one row": (P(1, 136, 72), ONE),
    "33 rows": (P(33, 136, 200), ONE),
    "201 rows, wide tiles": (P(201, 320, 64), BASE),
    "one short step of k": (P(72, 72, 8), ONE),
    # normalised rows
    "normalised rows, tails": (P(37, 136, 200, normalised=True), ONE),
    "normalised rows, two warpgroups share columns": (
        P(64, 256, 192, normalised=True, **ALL),
        replace(BASE, tile_m=64, wg_dimension="n"),
    ),
    "normalised rows, parts of k, several tiles": (
        P(64, 256, 192, normalised=True, residual=True),
        replace(BASE, tile_m=64, tile_n=128, wg_dimension="n", cluster="k", split_k=2, epilogue_tile_n=64),
    ),
    "normalised rows, two warpgroups share rows, several tiles": (P(300, 320, 136, normalised=True), BASE),
    # several tiles a block
    "pipeline wraps over many tiles": (P(450, 136, 136), replace(ONE, max_concurrent_steps=2)),
    "pipeline longer than all steps": (P(200, 136, 72), replace(ONE, max_concurrent_steps=12)),
    "blocks with unequal shares": (P(330, 200, 128), replace(ONE, max_concurrent_steps=4)),
    # warpgroups
    "two warpgroups share columns": (P(200, 320, 128), replace(BASE, wg_dimension="n")),
    "two warpgroups of 128 rows": (P(300, 72, 136), replace(BASE, tile_m=256, tile_n=64)),
    "one warpgroup": (P(200, 320, 128), replace(ONE, tile_n=128)),
    # clusters
    "cluster along m": (P(200, 320, 192), replace(BASE, cluster="m")),
    "cluster along m, one warpgroup": (P(450, 72, 136), replace(ONE, cluster="m")),
    "cluster along n": (P(200, 200, 136), replace(ONE, cluster="n", max_concurrent_steps=2)),
    "cluster along n, columns shared": (
        P(200, 448, 128),
        replace(BASE, cluster="n", tile_n=256, wg_dimension="n"),
    ),
    "cluster and a batch": (P(100, 72, 72, batch=3), replace(ONE, cluster="m")),
    # raster
    "strips of one tile": (P(300, 200, 64), replace(ONE, raster_width=1)),
    "strips of two along n": (
        P(300, 200, 64),
        replace(ONE, raster_dimension="n", raster_width=2),
    ),
    "strips of four along m, cluster along n": (
        P(330, 376, 64),
        replace(ONE, raster_width=4, cluster="n"),
    ),
    # steps of k
    "tile_k of 128": (P(200, 192, 192), replace(BASE, tile_k=128)),
    "tile_k of 32": (P(200, 192, 192), replace(BASE, tile_k=32)),
    # epilogue tiles
    "one epilogue tile, one buffer": (P(200, 136, 64), replace(ONE, epilogue_tile_n=64)),
    "three epilogue tiles": (P(320, 192, 64), replace(BASE, tile_n=96, epilogue_tile_n=32)),
    "seven epilogue tiles": (P(136, 448, 64), replace(BASE, tile_n=224, epilogue_tile_n=32)),
    "one epilogue tile per 64 rows": (P(304, 192, 64), replace(BASE, epilogue_tile_n=128)),
    # storage
    "B transposed": (P(200, 320, 192, layout="nt"), BASE),
    "A transposed": (P(192, 320, 136, layout="tn"), replace(BASE, wg_dimension="n")),
    "A transposed, rows shared": (P(320, 192, 128, layout="tn"), BASE),
    "both transposed": (P(192, 264, 128, layout="tt"), BASE),
    "both transposed, clusters": (P(192, 264, 128, layout="tt"), replace(BASE, cluster="m")),
    "B transposed, tails": (P(136, 136, 72, layout="nt"), ONE),
    "A transposed, tails": (P(136, 136, 72, layout="tn"), ONE),
    "both transposed, tails": (P(136, 136, 72, layout="tt"), ONE),
    "batch of 3": (P(72, 136, 72, batch=3), ONE),
    "batch of 3, A transposed": (P(72, 136, 72, layout="tn", batch=3), ONE),
    # parts of k
    "two parts of k": (P(128, 192, 256), replace(ONE, split_k=2, epilogue_tile_n=32)),
    "parts of k of unequal length": (
        P(72, 136, 328),
        replace(ONE, split_k=4, epilogue_tile_n=32),
    ),
    "parts of k, batch and cluster": (
        P(72, 136, 200, layout="nt", batch=2),
        replace(ONE, split_k=3, epilogue_tile_n=32, cluster="m"),
    ),
    # the transposed product
    "transposed, one row": (P(1, 136, 72), replace(FEW_ROWS, tile_m=8)),
    "transposed, 24 rows, B transposed": (P(24, 200, 136, layout="nt"), replace(FEW_ROWS, tile_m=24)),
    "transposed, 17 rows, stages reused": (P(17, 712, 136), replace(FEW_ROWS, max_concurrent_steps=2)),
    "transposed, warpgroups share columns": (
        P(30, 392, 264),
        replace(FEW_ROWS, tile_m=32, tile_n=128, compute_warpgroups=2, wg_dimension="n"),
    ),
    "transposed, warpgroups share rows": (P(40, 136, 72), replace(FEW_ROWS, tile_m=48, compute_warpgroups=2)),
    "transposed, 104 rows a tile": (
        P(200, 136, 72, layout="nt"),
        replace(FEW_ROWS, tile_m=104, tile_n=128, compute_warpgroups=2, wg_dimension="n"),
    ),
    "transposed, three parts of the rows, ahead, residual": (
        P(70, 328, 264, residual=True),
        replace(FEW_ROWS, tile_m=24, max_concurrent_steps=3, schedule="ahead"),
    ),
    "transposed, halves of the rows share B": (
        P(64, 192, 320, residual=True),
        replace(FEW_ROWS, tile_m=32, tile_k=128, cluster="m", schedule="ahead"),
    ),
    "transposed, A transposed": (P(40, 200, 136, layout="tn"), replace(FEW_ROWS, tile_m=32)),
    "rows of A shorter than a line, steps of k rotated": (P(24, 456, 328, layout="tn"), replace(FEW_ROWS, tile_m=32)),
    "transposed, both transposed, raster along n": (
        P(40, 328, 128, layout="tt"),
        replace(FEW_ROWS, tile_m=32, raster_dimension="n", raster_width=2),
    ),
    "transposed, columns shared in a cluster": (P(33, 256, 128), replace(FEW_ROWS, cluster="n")),
    "transposed, batch, parts of k": (P(8, 160, 328, batch=2), replace(FEW_ROWS, split_k=4)),
    "transposed, float32": (P(16, 192, 136, "float16", "float32"), FEW_ROWS),
    # parts of k added up in a cluster
    "two blocks share k": (P(200, 136, 328), replace(ONE, cluster="k", split_k=2, epilogue_tile_n=32)),
    "four blocks share k unequally, several tiles": (P(200, 200, 328), replace(ONE, cluster="k", split_k=4)),
    "two warpgroups in each of two blocks, a batch": (
        P(72, 136, 200, batch=2, layout="nt"),
        replace(BASE, cluster="k", split_k=2),
    ),
    "transposed, four blocks share k": (P(9, 456, 1000), replace(FEW_ROWS, cluster="k", split_k=4)),
    "transposed, float32, two blocks share k": (
        P(32, 192, 136, "float16", "float32"),
        replace(FEW_ROWS, cluster="k", split_k=2),
    ),
    # epilogues
    "bias, gelu and residual, tails, one warpgroup": (P(200, 136, 72, **ALL), ONE),
    "bias of columns that end with the row": (P(200, 328, 136, **ALL), replace(BASE, tile_n=128)),
    "bias and residual in a cluster, columns shared": (
        P(200, 320, 192, bias=True, residual=True),
        replace(BASE, cluster="m", wg_dimension="n"),
    ),
    "residual, one step of k": (P(200, 136, 64, residual=True, activation="gelu_erf"), ONE),
    "silu, A transposed": (P(192, 264, 136, layout="tn", activation="silu"), BASE),
    "relu, float32": (
        P(200, 136, 136, out_dtype="float32", activation="relu", residual=True),
        replace(ONE, epilogue_tile_n=32),
    ),
    "epilogue after the sum of two parts": (P(72, 136, 200, **ALL), replace(ONE, split_k=2, epilogue_tile_n=32)),
    "epilogue of a sum in a cluster, a batch": (P(72, 136, 328, batch=2, **ALL), replace(ONE, cluster="k", split_k=2)),
    "transposed, bias, gelu and residual": (P(17, 712, 136, **ALL), replace(FEW_ROWS, max_concurrent_steps=2)),
    "transposed, epilogue of a sum in a cluster": (P(9, 456, 1000, **ALL), replace(FEW_ROWS, cluster="k", split_k=4)),
    "transposed, float32 residual": (P(16, 192, 136, "float16", "float32", residual=True, bias=True), FEW_ROWS),
    # warpgroups that take turns
    "in turn, many tiles and tails": (P(450, 136, 264), IN_TURN),
    "in turn, one tile, one step": (P(64, 64, 64), IN_TURN),
    "in turn, stages that divide the steps, unequal shares": (P(330, 200, 256), replace(IN_TURN, max_concurrent_steps=2)),
    "in turn, cluster along m": (P(200, 320, 192), replace(IN_TURN, cluster="m", max_concurrent_steps=2)),
    "in turn, cluster along n, B transposed": (P(200, 384, 128, layout="nt"), replace(IN_TURN, cluster="n")),
    "in turn, A transposed, a batch": (P(200, 320, 192, layout="tn", batch=3), replace(BASE, schedule="pingpong")),
    "in turn, wide tiles at the end of rows": (P(200, 328, 136), replace(BASE, schedule="pingpong")),
    "in turn, bias, gelu and residual": (P(450, 136, 264, **ALL), IN_TURN),
    "in turn, a residual in more parts than it has buffers": (
        P(330, 384, 136, residual=True),
        replace(IN_TURN, tile_m=128, tile_n=192, epilogue_tile_n=32),
    ),
    "in turn, three parts of k": (P(72, 136, 328), replace(IN_TURN, split_k=3, epilogue_tile_n=32)),
    # tiles that are stored while the next one is multiplied
    "deferred, many tiles and tails": (P(450, 136, 264), DEFERRED),
    "deferred, one tile, one step": (P(64, 64, 64), replace(DEFERRED, tile_m=64, compute_warpgroups=1)),
    "deferred, two stages, each read alone": (P(450, 136, 264), replace(DEFERRED, max_concurrent_steps=2)),
    "deferred, fewer steps than epilogue tiles": (P(300, 320, 128), replace(DEFERRED, tile_n=192, epilogue_tile_n=32)),
    "deferred, cluster along m, columns shared": (P(450, 320, 200), replace(DEFERRED, cluster="m", wg_dimension="n")),
    "deferred, cluster along n, a batch": (P(200, 512, 128, batch=2), replace(DEFERRED, cluster="n")),
    "deferred, both transposed, wide tiles at the end of rows": (P(200, 328, 136, layout="tt"), DEFERRED),
    "deferred, bias and gelu": (P(450, 136, 264, bias=True, activation="gelu"), DEFERRED),
    "ahead, many tiles and tails": (P(450, 136, 264), AHEAD),
    "ahead, one tile, one step": (P(64, 64, 64), replace(AHEAD, tile_m=64, tile_n=64, compute_warpgroups=1)),
    "ahead, cluster along m, columns shared": (P(450, 320, 200), replace(AHEAD, cluster="m", wg_dimension="n")),
    "ahead, two blocks share k and the sum": (P(200, 136, 328), replace(AHEAD, cluster="k", split_k=2, epilogue_tile_n=32)),
    "ahead, four blocks share k unequally, several tiles": (
        P(400, 264, 328, bias=True, activation="gelu"),
        replace(AHEAD, cluster="k", split_k=4, epilogue_tile_n=32),
    ),
    "ahead, two blocks share k, a batch": (
        P(72, 136, 328, batch=2),
        replace(AHEAD, tile_m=64, tile_n=128, compute_warpgroups=1, cluster="k", split_k=2, epilogue_tile_n=64),
    ),
    "ahead, transposed": (P(9, 456, 200), replace(FEW_ROWS, schedule="ahead")),
    "ahead, two blocks share k, one stores, several tiles, a residual": (
        P(9, 456, 328, bias=True, residual=True),
        replace(FEW_ROWS, schedule="ahead", cluster="k", split_k=2),
    ),
    "ahead, transposed, two blocks share k and the sum": (
        P(9, 456, 328),
        replace(FEW_ROWS, schedule="ahead", tile_n=128, compute_warpgroups=1, cluster="k", split_k=2),
    ),
    "ahead, bias and a residual": (P(200, 136, 264, bias=True, residual=True), AHEAD),
    "ahead, three parts of k": (P(72, 136, 328), replace(AHEAD, split_k=3, epilogue_tile_n=32)),
    "three consumers without a producer, many tiles and tails": (P(520, 264, 328, layout="tn"), THREE),
    "three consumers, cluster along n, fewer steps than stages": (
        P(520, 392, 128, bias=True, activation="gelu"),
        replace(THREE, cluster="n"),
    ),
    "three consumers, cluster along m, B transposed, a batch": (
        P(400, 264, 200, layout="nt", batch=2),
        replace(THREE, cluster="m"),
    ),
    "deferred, a residual, two tiles a block, a batch": (
        P(264, 256, 136, batch=2, bias=True, activation="silu", residual=True),
        replace(DEFERRED, epilogue_tile_n=32),
    ),
    "deferred, a residual, B stored [n, k], cluster along n, tails": (
        P(200, 448, 136, layout="nt", residual=True),
        replace(DEFERRED, tile_n=128, max_concurrent_steps=4, cluster="n"),
    ),
    "deferred, a residual in two steps, B stored [n, k]": (
        P(392, 448, 136, layout="nt", bias=True, residual=True),
        replace(DEFERRED, tile_n=256, max_concurrent_steps=3),
    ),
    "deferred, a residual of one row's tiles, cluster along m": (
        P(400, 192, 72, residual=True),
        replace(DEFERRED, cluster="m"),
    ),
    "deferred, three parts of k": (P(72, 136, 328), replace(DEFERRED, split_k=3, epilogue_tile_n=32)),
    "tiles of 104 columns, the last epilogue tile overlaps": (
        P(130, 216, 136, layout="nt", bias=True, residual=True),
        replace(BASE, tile_n=104, epilogue_tile_n=64),
    ),
    "ahead, tiles of 104 columns of B in whole panels, a batch": (
        P(136, 200, 136, batch=2),
        replace(AHEAD, tile_n=104, epilogue_tile_n=64),
    ),
    "ahead, tiles of 104 columns shared in a cluster of four, of which one has no tile": (
        P(300, 200, 136, batch=2),
        replace(AHEAD, tile_n=104, epilogue_tile_n=64, cluster="m4"),
    ),
    "ahead, tiles that begin in the middle of B's panels": (P(130, 192, 136), replace(AHEAD, tile_n=96, epilogue_tile_n=32)),
    "deferred, tiles that begin in the middle of B's panels": (
        P(300, 384, 136, batch=2),
        replace(DEFERRED, tile_n=96, epilogue_tile_n=32),
    ),
    "cluster along n, an odd number of tiles": (P(200, 320, 136, bias=True), replace(BASE, cluster="n")),
    "ahead, 72 rows a tile, transposed, A transposed": (
        P(136, 200, 72, layout="tn"),
        replace(AHEAD, tile_m=72, wg_dimension="n", epilogue_tile_n=64),
    ),
    "deferred, tiles of 168 columns, k no multiple of 8": (
        P(200, 328, 203, layout="tn"),
        replace(DEFERRED, tile_n=168, epilogue_tile_n=64),
    ),
    "deferred, 8 bits, scales of rows": (of_8_bits(330, 200, 400, "row"), replace(DEFERRED, tile_k=128)),
    # operands of 8 bits
    "8 bits, no scales, two panels of k": (of_8_bits(200, 136, 384, "none"), replace(ONE, tile_k=256)),
    "8 bits, two dtypes, scales of rows, epilogue": (
        of_8_bits(200, 136, 272, "row", b_dtype="float8_e5m2", **ALL),
        replace(ONE_8, max_concurrent_steps=2),
    ),
    "8 bits, a number, cluster along m": (of_8_bits(200, 320, 400, "tensor"), replace(WIDE_8, cluster="m")),
    "8 bits, transposed, scales of rows": (of_8_bits(17, 712, 272, "row", bias=True), FEW_ROWS_8),
    "8 bits, parts of k, a batch, scales of rows": (
        of_8_bits(72, 136, 400, "row", batch=2),
        replace(ONE_8, split_k=2, epilogue_tile_n=32),
    ),
    "8 bits, two dtypes, in turn": (of_8_bits(200, 200, 400, "row", b_dtype="float8_e5m2"), replace(IN_TURN, tile_k=128)),
    "8 bits, two dtypes, transposed": (
        of_8_bits(17, 200, 2704, "tensor", b_dtype="float8_e5m2"),
        FEW_ROWS_8,
    ),
    "8 bits, two dtypes, transposed, ahead": (
        of_8_bits(17, 136, 272, "row", b_dtype="float8_e5m2"),
        replace(FEW_ROWS_8, schedule="ahead"),
    ),
    "blocks, two warpgroups": (of_8_bits(330, 264, 400, "block", bias=True), replace(WIDE_8, max_concurrent_steps=2)),
    "blocks, columns shared, cluster along n": (
        of_8_bits(200, 448, 272, "block", "float32"),
        replace(WIDE_8, cluster="n", wg_dimension="n", epilogue_tile_n=32),
    ),
    "blocks, cluster along m": (of_8_bits(330, 136, 272, "block"), replace(WIDE_8, cluster="m")),
    "blocks, transposed, cluster along m": (
        of_8_bits(40, 136, 272, "block"),
        replace(FEW_ROWS_8, tile_m=16, cluster="m"),
    ),
    "blocks, parts of k, a batch": (of_8_bits(72, 136, 656, "block", batch=2), replace(ONE_8, split_k=4, epilogue_tile_n=32)),
    "blocks, two blocks share k": (of_8_bits(72, 136, 656, "block"), replace(ONE_8, split_k=2, cluster="k")),
    "blocks, two of k a step, epilogue": (of_8_bits(200, 136, 640, "block", **ALL), replace(ONE, tile_k=256)),
    "blocks, tiles across two of n": (of_8_bits(200, 456, 272, "block"), replace(WIDE_8, tile_n=192)),
    "blocks, transposed, warpgroups share columns": (
        of_8_bits(17, 328, 400, "block", residual=True),
        replace(FEW_ROWS_8, tile_m=24, tile_n=128, compute_warpgroups=2, wg_dimension="n"),
    ),
    # dtypes
    "float16": (P(200, 192, 128, "float16", "float16"), BASE),
    "float16 to float32": (
        P(201, 320, 128, "float16", "float32"),
        replace(BASE, tile_n=192, epilogue_tile_n=32),
    ),
    "bfloat16 to float32, tails": (
        P(200, 136, 136, out_dtype="float32"),
        replace(ONE, epilogue_tile_n=32),
    ),
}


IN_ALL = [  # what others show together or one by one
    "33 rows",
    "wide tiles at the end of rows of A",
    "two warpgroups share columns",
    "one warpgroup",
    "cluster along m, one warpgroup",
    "strips of one tile",
    "seven epilogue tiles",
    "A transposed, rows shared",
    "B transposed",
    "both transposed",
    "batch of 3",
    "two parts of k",
    "float16",
    "pipeline longer than all steps",
    "whole tiles",
    "one short step of k",
    "cluster along m",
    "strips of two along n",
    "tile_k of 128",
    "three epilogue tiles",
    "A transposed, tails",
    "both transposed, tails",
    "bfloat16 to float32, tails",
    "201 rows, wide tiles",
    "wide tiles shared in a cluster",
    "silu, A transposed",
    "relu, float32",
    "epilogue after the sum of two parts",
    "epilogue of a sum in a cluster, a batch",
    "transposed, float32 residual",
    "in turn, many tiles and tails",
    "in turn, cluster along m",
    "in turn, bias, gelu and residual",
    "deferred, one tile, one step",
    "deferred, cluster along n, a batch",
    "deferred, both transposed, wide tiles at the end of rows",
    "deferred, a residual of one row's tiles, cluster along m",
    "ahead, one tile, one step",
    "ahead, cluster along m, columns shared",
    "ahead, two blocks share k and the sum",
    "ahead, two blocks share k, a batch",
    "ahead, transposed",
    "ahead, two blocks share k, one stores, several tiles, a residual",
    "ahead, bias and a residual",
    "ahead, three parts of k",
    "deferred, three parts of k",
    "deferred, 8 bits, scales of rows",
    "8 bits, no scales, two panels of k",
    "8 bits, two dtypes, scales of rows, epilogue",
    "blocks, columns shared, cluster along n",
    "8 bits, a number, cluster along m",
    "8 bits, two dtypes, in turn",
    "8 bits, two dtypes, transposed",
    "8 bits, parts of k, a batch, scales of rows",
    "blocks, parts of k, a batch",
    "blocks, two blocks share k",
    "blocks, two warpgroups",
]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_and_has_no_race(name, assert_matmul):
    problem, config = CASES[name]
    arrays = inputs(MATMUL, problem)
    out = interpret(problem, config, arrays)
    assert_matmul(problem, out, *arrays)
    assert not engine.races_found()


@pytest.mark.parametrize("seed", thorough.seeds(2, 16))
def test_random_legal_config_is_right_and_has_no_race(seed, assert_matmul):
    rng = random.Random(seed)
    layout = rng.choice(["nn", "nt", "tn", "tt"])
    m = rng.randint(1, 300) if layout[0] == "n" else 8 * rng.randint(1, 40)
    n, k = 8 * rng.randint(1, 40), 8 * rng.randint(1, 24)
    problem = P(m, n, k, layout=layout, batch=rng.choice([1, 2]))
    space = MATMUL.space(problem, FEW_SMS)
    drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(20_000))
    config = next(c for c in drawn if MATMUL.check(problem, c, FEW_SMS) is None)
    arrays = inputs(MATMUL, problem, seed)
    assert_matmul(problem, interpret(problem, config, arrays), *arrays)
    assert not engine.races_found()


@pytest.mark.parametrize("layout", thorough.cases(["nn", "nt", "tn", "tt"], ["nt", "tn"]))
def test_one_operand_without_the_batch_is_read_by_every_product(layout, assert_matmul):
    problem = P(72, 136, 72, layout=layout, batch=3)
    a, b = inputs(MATMUL, problem)
    assert_matmul(problem, interpret(problem, ONE, (a[0], b)), a[:1], b)
    assert_matmul(problem, interpret(problem, ONE, (a, b[0])), a, b[:1])


@pytest.mark.parametrize("shared", ["bias", "residual"])
def test_products_of_a_batch_share_bias_and_residual_or_have_their_own(shared, assert_matmul):
    problem = P(72, 136, 72, batch=2, bias=True, residual=True)
    a, b, bias, residual = inputs(MATMUL, problem)
    own = jax.numpy.stack([bias, bias[::-1]])
    given, added = (bias, residual) if shared == "bias" else (own, residual[0])
    out = interpret(problem, ONE, (a, b, given, added))
    assert_matmul(problem, out, a, b, given if given.ndim == 1 else given[:, None], added)
    assert not engine.races_found()


def test_detector_finds_a_residual_that_is_loaded_into_a_buffer_still_being_stored(monkeypatch):
    wait = plgpu.wait_smem_to_gmem
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda n, wait_read_only=False: None if wait_read_only else wait(n))
    problem, config = P(512, 128, 64, residual=True), ONE  # several tiles a block
    assert has_a_race(lambda: interpret(problem, config, inputs(MATMUL, problem)))


def test_default_config_is_right_on_a_gpu_of_full_size(assert_matmul):
    problem = P(201, 264, 136)
    arrays = inputs(MATMUL, problem)
    h200 = gpu.find("h200")
    out = interpret(problem, MATMUL.default(problem, h200), arrays, h200)
    assert_matmul(problem, out, *arrays)
    assert not engine.races_found()


def test_tiles_that_share_rows_sum_them_in_one_order():
    """On a GPU the last of six tiles of 728 rows of A, stored transposed, begins within the one before: both store what they
    share, in any order.
    """
    problem = P(728, 32, 896, layout="tn")
    config = replace(AHEAD, tile_m=128, tile_n=128, split_k=1)
    work = Work(problem, config, Rounds(6, 6, (1,)), transposed=False)
    firsts = [int(step_of_k(work, Tile(jnp.int32(0), jnp.int32(0), row, jnp.int32(0)), jnp.int32(0))) for row in range(6)]
    assert firsts == [0, 3, 6, 9, 12, 12]
    assert [block_start(jnp.int32(row), 128, 728, "bfloat16", 128) for row in (4, 5)] == [512, 600]


def test_same_inputs_give_the_same_bits():
    problem = P(200, 136, 136)
    arrays = inputs(MATMUL, problem)
    first = interpret(problem, ONE, arrays)
    assert (first == interpret(problem, ONE, arrays)).all()


def test_detector_finds_a_store_that_does_not_wait_for_its_buffer(monkeypatch):
    """What passes above is not passed by a detector that is off."""
    wait_for_all_stores_only(monkeypatch)
    problem, config = P(128, 128, 64), replace(BASE, epilogue_tile_n=32)  # four epilogue tiles, two buffers
    assert has_a_race(lambda: interpret(problem, config, inputs(MATMUL, problem)))
