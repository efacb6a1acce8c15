"""The shared-memory count: by hand, and against what Mosaic GPU launches."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace

import jax
import pytest

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core import aot, gpu, smem
from tests.configs import BASE

H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
matmul = importlib.import_module("mgpu_ops.matmul")  # the function of that name hides the module


@pytest.mark.parametrize(
    ("buffers", "barriers", "wanted"),
    [
        ([], 0, 0),
        ([], 3, 24),
        ([((128, 64), 2)], 0, 16384),
        ([((10,), 4)], 1, 48),
        ([((10,), 4), ((10,), 4)], 0, 1024 + 40),
        ([((3, 64, 64), 2), ((2, 64, 32), 4)], 6, 24576 + 16384 + 48),
    ],
)
def test_buffers_start_at_multiples_of_1024_and_barriers_follow(buffers, barriers, wanted):
    assert smem.block_bytes(buffers, barriers) == wanted


CASES = {
    "plain": (MatmulProblem(512, 512, 512), BASE),
    "two steps": (MatmulProblem(512, 512, 512), replace(BASE, max_concurrent_steps=2)),
    "wide": (MatmulProblem(512, 512, 512), replace(BASE, tile_n=256, max_concurrent_steps=4)),
    "one warpgroup": (MatmulProblem(512, 512, 512), replace(BASE, tile_m=64, compute_warpgroups=1)),
    "cluster": (MatmulProblem(512, 512, 512), replace(BASE, cluster="m")),
    "cluster n": (MatmulProblem(512, 512, 512), replace(BASE, cluster="n", wg_dimension="n")),
    "short k steps": (MatmulProblem(512, 512, 512), replace(BASE, tile_k=32)),
    "one epilogue slot": (
        MatmulProblem(512, 512, 512),
        replace(BASE, tile_m=64, tile_n=64, compute_warpgroups=1),
    ),
    "small odd pieces": (MatmulProblem(512, 512, 512), replace(BASE, tile_n=96, epilogue_tile_n=32)),
    "float32 out": (
        MatmulProblem(512, 512, 512, out_dtype="float32"),
        replace(BASE, epilogue_tile_n=32),
    ),
    "split k": (MatmulProblem(512, 512, 512), replace(BASE, split_k=3, epilogue_tile_n=32)),
    "transposed batch": (MatmulProblem(256, 256, 256, layout="tt", batch=3), BASE),
}


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("name", CASES)
def test_matmul_counts_the_bytes_that_mosaic_launches(name):
    problem, config = CASES[name]
    assert MATMUL.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(MATMUL.run, problem, config, H200), *arrays)
    assert report.smem_bytes == matmul.smem_bytes(problem, config)
