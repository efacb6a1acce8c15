"""Products of float32 in `mgpu_ops.matmul`: how precise each algorithm is, what names it, and which the kernel computes."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import MatmulConfig, MatmulProblem, matmul
from mgpu_ops.core import aot, gpu
from mgpu_ops.matmul import algorithms, smem_bytes
from mgpu_ops.registry import resolution
from mgpu_ops.tuning import labels, public
from tests import thorough
from tests.arrays import normal
from tests.configs import BASE

pytestmark = pytest.mark.usefixtures("no_races")
SPEC, H200 = mgpu_ops.spec_of("matmul"), gpu.find("h200")
IN_TURN = {"tile_m": 128, "compute_warpgroups": 2, "schedule": "pingpong"}
SMALL = replace(BASE, tile_m=64, tile_n=64, max_concurrent_steps=2, compute_warpgroups=1, epilogue_tile_n=32)
P = MatmulProblem(40, 72, 80, "float32", "float32", "nt")
BOUNDS = {"bf16": 2.0**-7, "bf16_x3": 2.0**-14, "bf16_x6": 2.0**-23, "bf16_x9": 0.0}  # of the products, as algorithms.py says


def operands(problem: MatmulProblem) -> tuple[jax.Array, jax.Array]:
    p = problem
    return (
        normal(0, *((p.k, p.m) if p.layout[0] == "t" else (p.m, p.k))),
        normal(1, *((p.n, p.k) if p.layout[1] == "t" else (p.k, p.n))),
    )


def call(problem: MatmulProblem, **options: Any) -> functools.partial:
    a_t, b_t = (side == "t" for side in problem.layout)
    precision = algorithms.PRESETS[problem.algorithm]
    return functools.partial(matmul, transpose_a=a_t, transpose_b=b_t, precision=precision, **options)


def in_float64(problem: MatmulProblem, a: jax.Array, b: jax.Array) -> tuple[np.ndarray, np.ndarray]:
    """The product, and that of the magnitudes."""
    wide = [np.asarray(x, np.float64) for x in (a, b)]
    left, right = (x.T if t == "t" else x for x, t in zip(wide, problem.layout, strict=True))
    return left @ right, np.abs(left) @ np.abs(right)


def relative(out: jax.Array, wanted: np.ndarray, sizes: np.ndarray) -> float:
    """The largest error, as a part of the product of the magnitudes."""
    return float(np.max(np.abs(np.asarray(out, np.float64) - wanted) / sizes))


# --- how precise


@pytest.mark.parametrize(
    ("algorithm", "layout", "changes"),
    [
        pytest.param("bf16", "nn", {}, marks=thorough.only_in_all),
        pytest.param("bf16_x3", "nt", {"split_k": 4}, marks=thorough.only_in_all),
        pytest.param("bf16_x3", "nn", {"tile_m": 8, "epilogue_tile_n": 64, "n": 128}, marks=thorough.only_in_all),
        ("bf16_x6", "nn", {"split_k": 2}),
        pytest.param("bf16_x6", "nn", {"split_k": 2, "cluster": "k"}, marks=thorough.only_in_all),
        pytest.param("bf16_x6", "nt", IN_TURN, marks=thorough.only_in_all),
        pytest.param("bf16_x9", "nt", {"split_k": 8}, marks=thorough.only_in_all),
    ],
)
def test_parts_of_float32_are_as_precise_as_stated(algorithm, layout, changes):
    changes = dict(changes)
    problem = replace(P, layout=layout, algorithm=algorithm, n=changes.pop("n", P.n))
    a, b = operands(problem)
    out = call(problem, backend="interpret", config=replace(SMALL, **changes))(a, b)
    error = relative(out, *in_float64(problem, a, b))
    sums = problem.k * 2.0**-24  # of float32's bound
    assert error <= BOUNDS[algorithm] + sums
    if algorithm in ("bf16_x6", "bf16_x9"):
        assert error <= sums
    else:
        assert error > BOUNDS[algorithm] / 100


@pytest.mark.parametrize(
    ("layout", "changes"),
    [
        ("nt", {}),
        pytest.param("nn", {"tile_m": 16, "epilogue_tile_n": 64, "n": 128, "split_k": 3}, marks=thorough.only_in_all),
        pytest.param("tt", {"cluster": "k", "split_k": 2}, marks=thorough.only_in_all),
    ],
)
def test_tf32_in_any_layout(layout, changes, assert_matmul):
    changes = dict(changes)
    problem = replace(P, layout=layout, n=changes.pop("n", P.n))
    a, b = operands(problem)
    out = call(problem, backend="interpret", config=replace(SMALL, tile_k=32, **changes))(a, b)
    assert_matmul(problem, out, a, b)


@pytest.mark.parametrize("precision", thorough.cases(["default", "highest"], ["default"]))
def test_epilogue_and_batch_of_float32(precision, assert_matmul):
    a, b, bias, residual = normal(0, 2, 24, 40), normal(1, 2, 40, 72), normal(2, 72), normal(3, 2, 24, 72)
    out = matmul(a, b, bias=bias, activation="relu", residual=residual, precision=precision, backend="interpret")
    problem = MatmulProblem(24, 72, 40, "float32", "float32", bias=True, activation="relu", residual=True)
    assert_matmul(problem, out, a, b, bias, residual)


@pytest.mark.parametrize(("algorithm", "backend"), [("tf32", "xla"), ("bf16_x6", "xla"), ("bf16_x3", "interpret")])
def test_gradients_of_float32_run_the_same_algorithm(algorithm, backend, assert_near):
    if backend == "interpret" and not thorough.ALL:
        pytest.skip("the interpreter repeats what XLA shows: it runs in `make test-all`")
    problem = MatmulProblem(16, 24, 40, "float32", "float32", algorithm=algorithm)
    a, b = operands(problem)
    grads = jax.grad(lambda a, b: (call(problem, backend=backend)(a, b) ** 2).sum(), (0, 1))(a, b)
    g = 2 * np.asarray(a) @ np.asarray(b)
    for found, wanted in zip(grads, (g @ np.asarray(b).T, np.asarray(a).T @ g), strict=True):
        assert_near(found, wanted, 1e-4 if backend == "interpret" else 1e-5)
    with mgpu_ops.target("h200"):
        uses = mgpu_ops.capture(jax.grad(lambda a, b: call(problem)(a, b).sum(), (0, 1)))(a, b).problems
    assert [use.problem.algorithm for use in uses] == [algorithm] * len(uses)


@pytest.mark.parametrize(
    "changes", [{}, *(pytest.param(x, marks=thorough.only_in_all) for x in ({"split_k": 4}, {"tile_m": 8}, IN_TURN))]
)
def test_numbers_that_are_not_finite_are_those_of_arithmetic(changes):
    """Also beside zeros among the parts; and the largest float32, which rounds to infinity in bfloat16, is finite."""
    largest = np.finfo(np.float32).max
    a = normal(0, 64, 72).at[:, 0].set(1.0).at[3, 0].set(np.inf).at[4, 0].set(-np.inf).at[5, 1].set(np.nan)
    a = a.at[6].set(0.0).at[6, 0].set(largest)
    b = jnp.minimum(jnp.abs(normal(1, 72, 64)), 0.9).at[0, ::2].set(0.5)  # has one part only
    config = replace(SMALL, epilogue_tile_n=64 if "tile_m" in changes else 32, **changes)
    out = np.asarray(matmul(a, b, precision="highest", backend="interpret", config=config))
    np.testing.assert_array_equal(out[3:5], [[np.inf] * 64, [-np.inf] * 64])
    assert np.isnan(out[5]).all()
    np.testing.assert_allclose(out[6, ::2], largest * 0.5, rtol=2e-7)
    assert np.isfinite(np.delete(out, (3, 4, 5), 0)).all()


@pytest.mark.parametrize("parts", [1, 2, 3])
def test_the_parts_of_a_number_add_up_to_its_leading_bits(parts):
    x = normal(0, 8, 20) * jnp.exp2(jnp.arange(20.0) * 8 - 80)
    found = np.asarray(jax.jit(algorithms.split, static_argnums=(1, 2, 3))(x, parts, -1, 16), np.float64).reshape(8, parts, 32)
    assert not found[..., 20:].any()
    errors = np.abs(found.sum(1)[:, :20] / np.asarray(x, np.float64) - 1)
    assert errors.max() <= (0.0 if parts == 3 else 2.0 ** (-8 * parts))


# --- what names it


@pytest.mark.parametrize(
    ("precision", "algorithm"),
    [
        (None, "tf32"),
        ("default", "tf32"),
        ("tensorfloat32", "tf32"),
        ("high", "bf16_x3"),
        ("bfloat16_3x", "bf16_x3"),
        ("highest", "bf16_x6"),
        ("float32", "bf16_x6"),
        (jax.lax.Precision.HIGHEST, "bf16_x6"),
        (("default", "highest"), "bf16_x6"),
        ("BF16_BF16_F32_X9", "bf16_x9"),
        (jax.lax.DotAlgorithmPreset.F32_F32_F32, "float32"),
    ],
    ids=str,
)
def test_precision_names_what_jax_names_so(precision, algorithm):
    a, b = operands(P)
    product = functools.partial(matmul, transpose_b=True)
    with mgpu_ops.target("h200"):
        (use,) = mgpu_ops.capture(functools.partial(product, precision=precision))(a, b).uses
        assert use.problem.algorithm == algorithm
        if isinstance(precision, str) and precision != "bfloat16_3x":  # which cannot be the default
            with jax.default_matmul_precision(precision):
                (use,) = mgpu_ops.capture(product)(a, b).uses
            assert use.problem.algorithm == algorithm


@pytest.mark.parametrize(
    ("dtype", "precision", "reason"),
    [
        ("float32", "fast", "precision='fast' is not a jax.lax.Precision"),
        ("float32", ("high", "BF16_BF16_F32"), r"precision=\('high', 'BF16_BF16_F32'\) is not"),
        ("float32", 3.5, "precision=3.5 is not"),
        ("float32", "F16_F16_F32", "F16_F16_F32 is no algorithm for float32 here: pass one of .*BF16_BF16_F32_X6"),
        ("bfloat16", "TF32_TF32_F32", "TF32_TF32_F32 is no algorithm for bfloat16 here"),
    ],
    ids=str,
)
def test_a_precision_that_there_is_not_is_told(dtype, precision, reason):
    a = jnp.ones((8, 8), dtype)
    with pytest.raises(ValueError, match=reason):
        matmul(a, a, precision=precision)


@pytest.mark.parametrize(
    ("algorithm", "m", "wanted"),
    [
        ("tf32", 1, jax.lax.Precision.DEFAULT),
        ("bf16_x3", 1, jax.lax.Precision.HIGHEST),
        ("bf16_x3", 64, jax.lax.DotAlgorithmPreset.BF16_BF16_F32_X3),
        ("bf16_x6", 64, jax.lax.Precision.HIGHEST),
        ("bf16_x9", 64, jax.lax.Precision.HIGHEST),
    ],
)
def test_xla_computes_what_it_is_precise_at(algorithm, m, wanted):
    """Of XLA's own names: the nine products, and three with a vector, were as imprecise as tf32 on an H200."""
    problem = replace(P, m=m, algorithm=algorithm)
    arrays = jax.eval_shape(functools.partial(SPEC.inputs, problem), jax.random.key(0))
    with mgpu_ops.target("h200"):
        jaxpr = jax.make_jaxpr(functools.partial(SPEC.reference, problem))(*arrays)
    (product,) = [e for e in jaxpr.eqns if e.primitive.name == "dot_general"] or [
        e
        for call in jaxpr.eqns
        if "jaxpr" in call.params
        for e in call.params["jaxpr"].eqns
        if e.primitive.name == "dot_general"
    ]
    precision = product.params["precision"]
    assert (precision[0] if isinstance(precision, tuple) else precision) == wanted


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_any_precision_is_that_of_16_bits(dtype):
    a, b = normal(0, 16, 24, dtype=dtype), normal(1, 24, 32, dtype=dtype)
    for precision in ("high", jax.lax.Precision.HIGHEST):
        np.testing.assert_array_equal(matmul(a, b, precision=precision), matmul(a, b))


# --- what the kernel computes


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"k": 81, "algorithm": "bf16_x6"}, None),
        ({"k": 82}, "k=82 needs 16-byte rows of a"),
        ({"m": 1, "k": 2**30}, None),
        ({"m": 1, "k": 2**30, "algorithm": "bf16"}, None),
        ({"m": 1, "k": 2**30, "algorithm": "bf16_x3"}, "k=1073741824 in the 3 products of algorithm='bf16_x3' is more than"),
        ({"n": 138}, "n=138 needs 16-byte rows of the output"),
        ({"n": 140, "layout": "nn", "algorithm": "bf16_x3"}, "n=140 needs 16-byte rows of b"),
        ({"algorithm": "float32"}, "algorithm='float32' is not one of tf32, bf16,"),
        ({"algorithm": "none", "dtype": "bfloat16", "out_dtype": "bfloat16"}, None),
        ({"algorithm": "tf32", "dtype": "bfloat16"}, "algorithm='tf32' is one of float32, not bfloat16"),
        ({"out_dtype": "bfloat16"}, "out_dtype bfloat16 of float32 operands is not float32"),
        ({"scales": "row"}, "scales='row' are of 8-bit floats, not float32"),
    ],
    ids=str,
)
def test_what_the_kernel_runs_or_why_not(changes, reason):
    found = SPEC.supports(replace(P, **changes), H200)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_a_config_that_cannot_run_is_told():
    x6 = replace(P, algorithm="bf16_x6")
    turns = replace(SMALL, tile_m=128, compute_warpgroups=2, schedule="pingpong", split_k=2)
    assert "split_k=2 must be 1 with schedule='pingpong'" in SPEC.check(x6, turns, H200)
    assert SPEC.check(x6, replace(turns, split_k=1), H200) is None
    assert "from 1 to the 12 steps" in SPEC.check(x6, replace(SMALL, split_k=13), H200)  # six times two
    assert SPEC.check(P, replace(SMALL, tile_k=16), H200) is None  # 64-byte swizzles
    assert "swizzle" in SPEC.check(P, replace(SMALL, tile_k=8), H200)


@pytest.mark.parametrize("algorithm", algorithms.KERNEL)
def test_more_products_take_longer_and_have_a_config_for_each_size(algorithm):
    for sides in ((1, 136, 80), (128, 4096, 4096), (4000, 5000, 3000), (8192, 8192, 8192)):
        problem = MatmulProblem(*sides, "float32", "float32", algorithm=algorithm)
        config = SPEC.default(problem, H200)
        assert SPEC.check(problem, config, H200) is None
        plain = MatmulProblem(*sides, out_dtype="float32")
        assert SPEC.cost(problem, config, H200) > SPEC.cost(plain, SPEC.default(plain, H200), H200)
        assert SPEC.distance(problem, plain) is None


@pytest.mark.parametrize(
    ("algorithm", "runs"), [("tf32", "xla"), ("bf16_x3", "kernel"), ("bf16_x6", "kernel"), ("bf16_x9", "kernel")]
)
def test_models_leave_tf32_to_xla_and_run_products_of_parts_in_the_kernel(algorithm, runs):
    """As measured at 4096^3, where the kernel took 1.09, 0.80 and 0.41 of XLA's time."""
    problem = MatmulProblem(4096, 4096, 4096, "float32", "float32", algorithm=algorithm)
    assert resolution.resolve(SPEC, problem, H200, None).runs == runs


@pytest.mark.parametrize(
    ("sides", "layout", "measured"),
    [  # us on an H200, the kernel's default config and XLA: results/2026-11-22-h200-matmul-float32.jsonl
        ((4096, 4096, 4096), "nn", {"tf32": (378.2, 343.9), "bf16_x3": (584.5, 726.5), "bf16_x6": (1106.1, 2707.7)}),
        ((1024, 6144, 4096), "nn", {"tf32": (181.5, 151.3), "bf16_x3": (256.3, 353.5), "bf16_x6": (458.3, 1069.2)}),
        ((8192, 8192, 8192), "nt", {"tf32": (2763.2, 3026.8), "bf16_x3": (4376.7, 4964.1), "bf16_x6": (8769.2, 26828.4)}),
    ],
    ids=str,
)
def test_models_of_both_times_are_near_what_was_measured(sides, layout, measured):
    for algorithm, (kernel, xla) in measured.items():
        problem = MatmulProblem(*sides, "float32", "float32", layout, algorithm=algorithm)
        modelled = SPEC.cost(problem, SPEC.default(problem, H200), H200), SPEC.baseline_cost(problem, H200)
        assert modelled[0] * 1e6 == pytest.approx(kernel, rel=0.1)
        assert modelled[1] * 1e6 == pytest.approx(xla, rel=0.25)


def test_a_problem_is_told_with_its_algorithm_and_read_back():
    problem = replace(P, algorithm="bf16_x6")
    text = labels.describe(problem)
    assert text == "40x72x80 float32 nt algorithm=bf16_x6"
    assert labels.problem_of(SPEC, text) == problem
    a, b = operands(problem)
    with mgpu_ops.target("h200"):
        (use,) = mgpu_ops.capture(public.CALLS["matmul"](problem, None))(a, b).problems
    assert use.problem == problem


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    ("algorithm", "instruction", "schedule"),
    [
        pytest.param("tf32", "tf32.tf32", "cooperative", marks=thorough.only_in_all),
        pytest.param("bf16_x6", "bf16.bf16", "cooperative", marks=thorough.only_in_all),
        pytest.param("bf16_x3", "bf16.bf16", "pingpong", marks=thorough.only_in_all),
    ],
)
def test_the_kernel_multiplies_float32_without_spills(algorithm, instruction, schedule):
    problem = MatmulProblem(4096, 4096, 4096, "float32", "float32", algorithm=algorithm)
    config = next(c for c in SPEC.candidates(problem, H200) if c.schedule == schedule)
    arrays = jax.eval_shape(lambda key: SPEC.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(H200, lambda *x: SPEC.run(problem, config, H200, *x), *arrays)
    assert (report.spills, report.serialized) == (0, "")
    assert f"f32.{instruction}" in report.ptx
    assert report.smem_bytes == smem_bytes(problem, config)


def test_sizes_that_count_beyond_32_bits_are_told():
    config = MatmulConfig(**{**vars(SMALL), "split_k": 1})
    problem = MatmulProblem(64, 64, 2**29, "float32", "float32", "nt", algorithm="bf16_x9")
    assert "is more than 2147483392 in all: split k" in SPEC.check(problem, config, H200)
