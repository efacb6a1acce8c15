"""The shared-memory count: by hand, and against what Mosaic GPU launches."""

from __future__ import annotations

import functools
import importlib
from dataclasses import replace
from typing import Any

import jax
import pytest

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.attention.backward_check import backward_smem_bytes, dq_smem_bytes
from mgpu_ops.attention.problem import smem_bytes
from mgpu_ops.core import aot, gpu, limits
from tests import thorough
from tests.configs import BASE
from tests.mgpu_ops.attention import cases

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
    assert limits.block_bytes(buffers, barriers) == wanted


CASES = {
    "plain": (MatmulProblem(512, 512, 512), BASE),
    "two steps": (MatmulProblem(512, 512, 512), replace(BASE, max_concurrent_steps=2)),
    "wide": (MatmulProblem(512, 512, 512), replace(BASE, tile_n=256, max_concurrent_steps=4)),
    "one warpgroup": (MatmulProblem(512, 512, 512), replace(BASE, tile_m=64, compute_warpgroups=1)),
    "cluster": (MatmulProblem(512, 512, 512), replace(BASE, cluster="m")),
    "cluster n": (MatmulProblem(512, 512, 512), replace(BASE, cluster="n", wg_dimension="n")),
    "short k steps": (MatmulProblem(512, 512, 512), replace(BASE, tile_k=32)),
    "one epilogue buffer": (
        MatmulProblem(512, 512, 512),
        replace(BASE, tile_m=64, tile_n=64, compute_warpgroups=1),
    ),
    "small odd epilogue tiles": (MatmulProblem(512, 512, 512), replace(BASE, tile_n=96, epilogue_tile_n=32)),
    "float32 out": (
        MatmulProblem(512, 512, 512, out_dtype="float32"),
        replace(BASE, epilogue_tile_n=32),
    ),
    "split k": (MatmulProblem(512, 512, 512), replace(BASE, split_k=3, epilogue_tile_n=32)),
    "transposed batch": (MatmulProblem(256, 256, 256, layout="tt", batch=3), BASE),
    "in turn": (MatmulProblem(512, 512, 512, residual=True), replace(BASE, schedule="pingpong")),
    "deferred": (MatmulProblem(512, 512, 512), replace(BASE, schedule="deferred")),
    "normalised": (MatmulProblem(512, 512, 512, normalised=True), BASE),
    "normalised, parts of k in a cluster": (
        MatmulProblem(512, 512, 512, normalised=True),
        replace(BASE, cluster="k", split_k=2),
    ),
}


needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


IN_ALL = ["two steps", "one warpgroup", "cluster", "short k steps", "transposed batch", "in turn", "deferred", "normalised"]


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_matmul_counts_the_bytes_that_mosaic_launches(name):
    problem, config = CASES[name]
    assert MATMUL.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(MATMUL.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(MATMUL.run, problem, config, H200), *arrays)
    assert report.smem_bytes == matmul.smem_bytes(problem, config)


FORWARD, BACKWARD = spec_of("flash_attention"), spec_of("flash_attention_backward")
P, B, ONE = FORWARD.Problem, BACKWARD.Problem, cases.BASE

FORWARD_CASES: dict[str, tuple[Any, Any]] = {
    "plain": (P(1, 256, 256, 1, 1, 64), ONE),
    "two q stages, three warpgroups, padded": (P(1, 256, 250, 1, 1, 72), replace(ONE, compute_warpgroups=3, q_slots=2)),
    "head_dim in narrow panels": (P(1, 256, 256, 1, 1, 96), replace(ONE, compute_warpgroups=2)),
    "fewer columns of values": (P(1, 256, 256, 1, 1, 192, v_head_dim=128), ONE),
    "bias and segments": (P(1, 256, 256, 1, 1, 128, segments=True, bias="float32"), ONE),
}


def launched(spec: Any, problem: Any, config: Any) -> dict[str, int]:
    """Bytes of shared memory of each kernel."""
    assert spec.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(spec.run, problem, config, H200), *arrays)
    return {
        kernel.name.removesuffix("_mosaic_gpu_kernel").removeprefix("mgpu_ops_"): kernel.smem_bytes for kernel in report.kernels
    }


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(FORWARD_CASES, ["plain", "fewer columns of values"]))
def test_attention_counts_the_bytes_that_mosaic_launches(name):
    problem, config = FORWARD_CASES[name]
    assert launched(FORWARD, problem, config) == {"flash_attention": smem_bytes(problem, config, H200)}


FUSED = BACKWARD.Config(mode="fused", tile_q=128, tile_kv=128, max_concurrent_steps=1, section_waves=1, memory_registers=24)
SPLIT = replace(FUSED, mode="split", tile_q=64)
AHEAD = replace(FUSED, max_concurrent_steps=3, dq_step="next", q_order="apart")

BACKWARD_CASES: dict[str, tuple[Any, Any]] = {
    "fused": (B(1, 256, 256, 1, 1, 64), replace(FUSED, max_concurrent_steps=2)),
    "fused, narrow panels": (B(1, 256, 256, 1, 1, 96), replace(FUSED, tile_q=64)),
    "fewer columns of values": (B(1, 128, 128, 1, 1, 192, v_head_dim=128), replace(SPLIT, tile_kv=64)),
    "two places for kv blocks": (B(1, 256, 256, 1, 1, 64), replace(AHEAD, kv_slots=2)),
    "kv blocks handed out": (B(64, 128, 256, 2, 2, 64, lengths=True), replace(AHEAD, kv_slots=2)),
    "fused, bias": (B(1, 256, 256, 1, 1, 128, bias="float32"), replace(FUSED, tile_q=64)),
    "split, segments, bias gradient": (B(1, 256, 256, 1, 1, 64, segments=True, bias="bfloat16", bias_grad=True), SPLIT),
    "head_dim of 256, bias gradient": (B(1, 128, 128, 1, 1, 256, bias="bfloat16", bias_grad=True), replace(SPLIT, tile_kv=64)),
}
BACKWARD_IN_ALL = [
    "fused",
    "two places for kv blocks",
    "fused, bias",
    "fewer columns of values",
    "head_dim of 256, bias gradient",
]


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(BACKWARD_CASES, BACKWARD_IN_ALL))
def test_gradients_of_attention_count_the_bytes_that_mosaic_launches(name):
    problem, config = BACKWARD_CASES[name]
    wanted = {"flash_attention_backward": backward_smem_bytes(problem, config)}
    if config.mode == "split":
        wanted["flash_attention_dq"] = dq_smem_bytes(problem)
    found = launched(BACKWARD, problem, config)
    if config.dq_step == "next":
        del found["flash_attention_round_dq"]  # of one tile, whatever the config
    found.pop("flash_attention_prepare", None)  # likewise
    assert found == wanted
