"""Kernels on a GPU whose SMs other kernels share: their blocks come in several rounds, and compute the same."""

from __future__ import annotations

import functools
import math
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops.core import engine, gpu
from mgpu_ops.matmul import work
from mgpu_ops.ops import spec_of
from mgpu_ops.registry.spec import problem_of
from mgpu_ops.tuning import measure
from tests.mgpu_ops.interpreter import quiet_interpreter

ALONE = replace(gpu.find("h200"), sms=2)
SHARED = replace(ALONE, shares_sms=True)
TILE = {"tile_m": 64, "tile_n": 64, "tile_k": 64, "max_concurrent_steps": 2, "compute_warpgroups": 1, "epilogue_tile_n": 64}
DEFERRED = {**TILE, "tile_m": 128, "wg_dimension": "m", "compute_warpgroups": 2}
PRODUCT = {"m": 456, "n": 128, "k": 128}
HEADS = {"batch": 1, "q_tokens": 600, "kv_tokens": 600, "q_heads": 2, "kv_heads": 1, "head_dim": 64, "causal": True}
CASES: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "matmul, cooperative": ("matmul", PRODUCT, TILE),
    "matmul, cluster": ("matmul", PRODUCT, {**TILE, "cluster": "m"}),
    "matmul, pingpong": ("matmul", PRODUCT, {**TILE, "compute_warpgroups": 2, "wg_dimension": "m", "schedule": "pingpong"}),
    "matmul, deferred": ("matmul", PRODUCT, {**DEFERRED, "schedule": "deferred"}),
    "gated_matmul": ("gated_matmul", PRODUCT, TILE),
    "gated_matmul, stored": (
        "gated_matmul",
        {**PRODUCT, "stored": True},
        {**TILE, "compute_warpgroups": 2, "wg_dimension": "m", "schedule": "pingpong"},
    ),
    "flash_attention": ("flash_attention", HEADS, {"tile_kv": 64, "section_waves": 1}),
    "flash_attention_backward": ("flash_attention_backward", HEADS, {}),
    "rms_norm": ("rms_norm", {"rows": 61, "width": 256}, {"blocks": 1}),
    "rms_norm, gradient": ("rms_norm", {"rows": 61, "width": 256, "gradient": True}, {"blocks": 1}),
    "cross_entropy": ("cross_entropy", {"rows": 41, "vocabulary": 1024}, {"blocks": 1}),
    "cross_entropy, gradient": ("cross_entropy", {"rows": 41, "vocabulary": 1024, "gradient": True}, {"blocks": 1}),
    "rotary": ("rotary", {"rows": 40, "positions": 20, "heads": 8, "kv_heads": 8, "head_dim": 64}, {"blocks": 1}),
    "embedding": ("embedding", {"rows": 90, "vocabulary": 50, "width": 256}, {"blocks": 2}),
}


@pytest.mark.parametrize("case", CASES)
def test_blocks_in_rounds_compute_the_same_without_races(case, monkeypatch):
    op, sides, fields = CASES[case]
    spec, blocks = spec_of(op), []
    problem = problem_of(spec, {"dtype": "bfloat16", **sides})
    config = replace(spec.default(problem, ALONE), **fields)
    kernel = engine.kernel

    def counted(body: Any, launch: Any, **kwargs: Any) -> Any:
        blocks.append(math.prod(launch.grid.values()))
        return kernel(body, launch, **kwargs)

    monkeypatch.setattr(engine, "kernel", counted)
    monkeypatch.setattr(work, "_LONG", 0.0)
    arrays = spec.inputs(problem, jax.random.key(0))
    found = []
    for device in (ALONE, SHARED):
        assert spec.check(problem, config, device) is None
        with quiet_interpreter():
            run = jax.jit(functools.partial(spec.run, problem, config, device, interpret=True))
            found.append([np.asarray(x.astype(jnp.float32)) for x in jax.tree.leaves(run(*arrays))])
        assert not engine.races_found()
    alone, shared = blocks[: len(blocks) // 2], blocks[len(blocks) // 2 :]
    assert shared != alone, blocks
    assert all(more >= few for few, more in zip(alone, shared, strict=True)), blocks
    wanted = spec.reference(problem, *arrays)
    for out in found:
        assert measure.error(out, wanted) <= spec.tolerance(problem)
    for x, y in zip(*found, strict=True):  # two programs: the interpreter may round either otherwise in the last place
        np.testing.assert_allclose(x, y, rtol=1e-2, atol=1e-2)


@pytest.mark.parametrize(("m", "rounds"), [(64, 1), (512, 1), (8192, 4)])
def test_products_of_few_rows_keep_one_round_as_no_collective_is_done_beside_them(m, rounds):
    h200 = gpu.find("h200")
    matmul = spec_of("matmul")
    problem = matmul.Problem(m, 4096, 14336)
    config = matmul.default(problem, h200)
    assert len(work.Work.of(problem, config, replace(h200, shares_sms=True)).rounds.sizes) == rounds
    assert len(work.Work.of(problem, config, h200).rounds.sizes) == 1
