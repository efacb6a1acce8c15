"""Products of int8 in `mgpu_ops.matmul`: exact sums, floats where they are scaled, and errors."""

from __future__ import annotations

from dataclasses import replace

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import MatmulProblem, matmul, spec_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import resolution
from tests.arrays import normal
from tests.configs import BASE

pytestmark = pytest.mark.usefixtures("no_races")
BACKENDS = pytest.mark.parametrize("backend", ["xla", "interpret"])
SMALL = replace(BASE, tile_m=64, tile_n=64, tile_k=128, max_concurrent_steps=2, compute_warpgroups=1)
P = MatmulProblem(72, 136, 272, "int8", "int32", "nt")


def operands(*shapes: tuple[int, ...]) -> list[jax.Array]:
    rng = np.random.default_rng(0)
    return [jnp.asarray(rng.integers(-128, 128, shape, np.int8)) for shape in shapes]


@pytest.mark.parametrize(("backend", "split_k"), [("xla", 1), ("interpret", 2)])
def test_sums_are_exact_int32(split_k, backend):
    a, b = operands((72, 272), (136, 272))
    config = replace(SMALL, split_k=split_k, epilogue_tile_n=32) if backend == "interpret" else None
    out = matmul(a, b, transpose_b=True, backend=backend, config=config)
    assert out.dtype == jnp.int32
    np.testing.assert_array_equal(out, np.asarray(a, np.int64) @ np.asarray(b, np.int64).T)


@BACKENDS
def test_scaled_products_are_floats_with_an_epilogue(backend, assert_matmul):
    a, b = operands((9, 272), (136, 272))
    scales, bias = (jnp.exp(normal(2, 9)) / 1000, jnp.exp(normal(3, 136)) / 1000), normal(4, 136)
    out = matmul(a, b, scale_a=scales[0], scale_b=scales[1], bias=bias, activation="silu", transpose_b=True, backend=backend)
    problem = replace(P, m=9, out_dtype="bfloat16", scales="row", bias=True, activation="silu")
    assert_matmul(problem, out, a, b, *scales, bias)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"out_dtype": "bfloat16"}, None),
        ({"layout": "nn"}, "layout nn of 8-bit integers"),
        ({"scales": "block", "out_dtype": "float32"}, "scales='block' of int8 are not one of none, tensor, row"),
        ({"out_dtype": "int8"}, "out_dtype int8 is not one of bfloat16, float16, float32, int32"),
    ],
    ids=str,
)
def test_what_the_kernel_runs_or_why_not(changes, reason):
    found = mgpu_ops.spec_of("matmul").supports(replace(P, **changes), gpu.find("h200"))
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_sums_that_are_float32_are_no_config_of_integers():
    spec, device = mgpu_ops.spec_of("matmul"), gpu.find("h200")
    assert "sums of int8 are int32" in spec.check(P, replace(SMALL, cluster="k", split_k=2), device)
    assert spec.check(P, spec.default(P, device), device) is None


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_the_kernel_multiplies_integers_without_spills():
    spec, device = mgpu_ops.spec_of("matmul"), gpu.find("h200")
    problem = replace(P, m=4096, n=4096, k=4096)
    config = spec.default(problem, device)
    arrays = jax.eval_shape(lambda key: spec.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(device, lambda *x: spec.run(problem, config, device, *x), *arrays)
    assert (report.spills, report.serialized) == (0, "")
    assert "s32.s8.s8" in report.ptx


@pytest.mark.parametrize("extra", ["scale_a", "bias", "activation", "residual"])
def test_an_int32_result_has_nothing_of_floats_beside_it(extra):
    """It would be cut to whole numbers; neither the kernel nor XLA does that."""
    a, b = operands((72, 272), (136, 272))
    value = {"scale_a": 0.01, "bias": jnp.ones(136), "activation": "silu", "residual": jnp.ones((72, 136), jnp.int32)}[extra]
    for backend in ("xla", "interpret"):
        with pytest.raises((ValueError, TypeError), match=r"out_dtype int32 of int8 has no scales|residual has dtype int32"):
            matmul(a, b, out_dtype=jnp.int32, transpose_b=True, backend=backend, **{extra: value})
    with pytest.raises(ValueError, match=r"out_dtype int32 of int8 has no scales.*: ask for out_dtype bfloat16"):
        replace(P, scales="row")


@pytest.mark.parametrize(("out_dtype", "scales", "runs"), [("int32", "none", "xla"), ("bfloat16", "row", "kernel")])
def test_large_products_run_what_was_faster(out_dtype, scales, runs):
    """An H200 takes 94.1 us for the first, XLA 90.5 (docs/kernels/matmul.md, "Eight bits")."""
    problem = MatmulProblem(4096, 4096, 4096, "int8", out_dtype, "nt", scales=scales)
    assert resolution.resolve(spec_of("matmul"), problem, gpu.find("h200")).runs == runs


def test_inputs_with_an_epilogue_and_no_scales_stay_int8():
    problem = replace(P, out_dtype="bfloat16", activation="silu", bias=True)
    arrays = jax.eval_shape(lambda key: mgpu_ops.spec_of("matmul").inputs(problem, key), jax.random.key(0))
    assert [x.dtype for x in arrays] == [jnp.int8, jnp.int8, jnp.bfloat16]
