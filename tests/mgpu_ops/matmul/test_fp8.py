"""What a user of 8-bit floats in `mgpu_ops.matmul` relies on: values with each kind of scale, shapes of scales, errors."""

from __future__ import annotations

import functools
import gzip
import json
import math
import re
from dataclasses import replace
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import MatmulProblem, matmul
from mgpu_ops.core import gpu
from mgpu_ops.matmul.quantities import accumulation_error
from tests import thorough
from tests.arrays import normal
from tests.configs import BASE
from tests.mgpu_ops.matmul import hopper_sums

pytestmark = pytest.mark.usefixtures("no_races")

RESULTS = Path(__file__).parents[3] / "results"
E4M3, E5M2, BF16, F32 = "float8_e4m3fn", "float8_e5m2", jnp.bfloat16, jnp.float32
M, N, K = 40, 136, 272
SMALL = replace(BASE, tile_m=64, tile_n=64, tile_k=128, max_concurrent_steps=2, compute_warpgroups=1)
P = functools.partial(MatmulProblem, M, N, K, E4M3, "bfloat16", "nt")
BACKENDS = pytest.mark.parametrize("backend", ["xla", "interpret"])


def operands(*lead: int, b_dtype: str = E4M3) -> tuple[jax.Array, jax.Array]:
    return normal(0, *lead, M, K, dtype=E4M3), normal(1, N, K, dtype=b_dtype)


def positive(seed: int, *shape: int) -> jax.Array:
    return jnp.exp(normal(seed, *shape))


SCALES = {  # scale_a, scale_b, the kind that they are, and the shapes that the op has of them
    "numbers": (positive(2), positive(3), "tensor"),
    "arrays of one number": (positive(2, 1), positive(3, 1), "tensor"),
    "rows and columns": (positive(2, M), positive(3, N), "row"),
    "rows and columns of rank 2": (positive(2, M, 1), positive(3, 1, N), "row"),
    "a number and columns": (positive(2), positive(3, N), "row"),
    "blocks": (positive(2, M, 3), positive(3, 2, 3), "block"),
    "blocks and a number": (positive(2, M, 3), positive(3), "block"),
}


def as_stored(kind: str, scale_a: jax.Array, scale_b: jax.Array) -> tuple[jax.Array, jax.Array]:
    shapes = {"tensor": ((1,), (1,)), "row": ((M,), (N,)), "block": ((M, 3), (2, 3))}[kind]
    stored = (x.reshape(shape) if x.size > 1 else jnp.full(shape, x.ravel()[0]) for x, shape in zip((scale_a, scale_b), shapes))
    return next(stored), next(stored)


@pytest.mark.parametrize(
    ("backend", "name"),
    [
        pytest.param(
            backend, name, marks=[thorough.only_in_all] * (backend == "interpret" and name not in ("blocks", "numbers"))
        )
        for backend in ("xla", "interpret")
        for name in SCALES
    ],
)
def test_the_product_is_that_of_the_scaled_operands(name, backend, assert_matmul):
    a, b = operands()
    scale_a, scale_b, kind = SCALES[name]
    config = SMALL if backend == "interpret" else None
    out = matmul(a, b, scale_a=scale_a, scale_b=scale_b, transpose_b=True, backend=backend, config=config)
    assert_matmul(P(scales=kind), out, a, b, *as_stored(kind, scale_a, scale_b))


@BACKENDS
def test_two_kinds_of_8_bits_mix_and_the_epilogue_follows_the_scales(backend, assert_matmul):
    a, b = operands(b_dtype=E5M2)
    scales, bias, residual = (positive(2, M), positive(3, N) / 64), normal(4, N, dtype=BF16), normal(5, M, N)
    out = matmul(
        a,
        b,
        scale_a=scales[0],
        scale_b=scales[1],
        bias=bias,
        activation="silu",
        residual=residual,
        transpose_b=True,
        out_dtype=F32,
        backend=backend,
    )
    problem = P(scales="row", b_dtype=E5M2, bias=True, activation="silu", residual=True)
    assert_matmul(replace(problem, out_dtype="float32"), out, a, b, *scales, bias, residual)


def test_without_scales_the_result_is_bfloat16_of_the_plain_product(assert_matmul):
    a, b = operands()
    assert_matmul(P(), matmul(a, b, transpose_b=True), a, b)
    stored = matmul(a, b.T, backend="xla")  # other layouts run through XLA
    assert_matmul(replace(P(), layout="nn"), stored, a, b.T)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_leading_dimensions_and_vmap_take_scales_along(kind, assert_near):
    (a, b), shapes = operands(2, 3), {"tensor": ((), ()), "row": ((2, 3, M), (N,)), "block": ((2, 3, M, 3), (2, 3))}[kind]
    scale_a, scale_b = positive(2, *shapes[0]), positive(3, *shapes[1])
    product = functools.partial(matmul, transpose_b=True, backend="xla")
    wanted = np.stack([
        np.stack([product(a[i, j], b, scale_a=scale_a[i, j] if shapes[0] else scale_a, scale_b=scale_b) for j in range(3)])
        for i in range(2)
    ])  # fmt: skip
    assert_near(product(a, b, scale_a=scale_a, scale_b=scale_b), wanted, 1e-6)
    in_axes = (0, None, 0 if shapes[0] else None, None)

    def one(a: Any, b: Any, scale_a: Any, scale_b: Any) -> jax.Array:
        return product(a, b, scale_a=scale_a, scale_b=scale_b)

    mapped = jax.vmap(jax.vmap(one, in_axes), in_axes)
    assert_near(mapped(a, b, scale_a, scale_b), wanted, 1e-6)
    twice = jnp.stack([b, b[::-1]])  # another B for each: a batch of products
    out = jax.vmap(one, (0, 0, 0 if shapes[0] else None, None))(a, twice, scale_a, scale_b)
    assert_near(out[0], wanted[0], 1e-6)


@pytest.mark.parametrize("kind", ["tensor", "row", "block"])
def test_a_batch_with_shared_rows_is_one_product(kind):
    a, b = operands(2)
    scales = {"tensor": (positive(2), positive(3)), "row": (positive(2, 2, M), positive(3, N)),
              "block": (positive(2, 2, M, 3), positive(3, 2, 3))}[kind]  # fmt: skip

    def call(a: Any, b: Any, scale_a: Any, scale_b: Any) -> jax.Array:
        product = functools.partial(matmul, transpose_b=True)
        axes = (0, None, None if kind == "tensor" else 0, None)
        run = jax.vmap(lambda a, b, x, y: product(a, b, scale_a=x, scale_b=y), axes)
        return run(a, b, scale_a, scale_b)

    with mgpu_ops.target("h200"):
        (use,) = mgpu_ops.capture(call)(a, b, *scales).problems
    assert use.problem == replace(P(scales=kind), m=2 * M)


@pytest.mark.parametrize(("scales", "b_dtype", "k"), [("none", E4M3, 128), ("none", E5M2, 4096), ("block", E4M3, 1024)])
def test_sums_as_the_tensor_cores_make_them_stay_within_the_stated_error(scales, b_dtype, k):
    a, b = normal(0, 48, k, dtype=E4M3), normal(1, 48, k, dtype=b_dtype)
    wanted = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T
    out = hopper_sums.sums(a, b, 128 if scales == "block" else None)
    error = np.max(np.abs(out - wanted) / (np.abs(wanted) + np.sqrt(np.mean(wanted**2))))
    stated = accumulation_error(MatmulProblem(48, 48, k, E4M3, "float32", "nt", b_dtype=b_dtype, scales=scales))
    assert stated / 10 < error < stated


def test_nan_and_infinity_in_operands_and_scales_are_those_of_arithmetic():
    a, b = operands()
    a = a.at[3, 5].set(jnp.nan)
    product = jax.jit(lambda scale_b: matmul(a, b, transpose_b=True, scale_a=1.0, scale_b=scale_b))  # traced, it is not known
    out = np.asarray(product(jnp.ones(N).at[7].set(jnp.inf))).astype(np.float32)
    assert np.isnan(out[3]).all()
    finite = np.delete(out, 3, 0)
    assert not np.isfinite(finite[:, 7]).any()
    assert np.isfinite(np.delete(finite, 7, 1)).all()


@pytest.mark.parametrize(
    ("scales", "reason"),
    [
        ({"scale_a": jnp.ones(M + 1)}, r"scale_a has shape \(41,\) and scale_b \(\): .* rows and columns \(40,\) and \(136,\)"),
        ({"scale_a": jnp.ones((M, 3)), "scale_b": jnp.ones(N)}, r"blocks of 128 \(40, 3\) and \(2, 3\)"),
        ({"scale_b": jnp.ones((M, 1))}, r"scale_b \(40, 1\)"),
    ],
)
def test_scales_of_a_wrong_shape_are_told_with_the_shapes_there_are(scales, reason):
    a, b = operands()
    with pytest.raises(ValueError, match=reason):
        matmul(a, b, transpose_b=True, **scales)


def test_a_gradient_is_refused_with_the_way_out():
    a, b = operands()

    def loss(scale: jax.Array, a: jax.Array) -> jax.Array:
        return matmul(a, b, transpose_b=True, scale_a=scale, out_dtype=F32).sum()

    with pytest.raises(ValueError, match=r"has no gradient: 8 bits (.|\n)*fp8_matmul(.|\n)*stop_gradient"):
        jax.grad(loss)(jnp.ones(()), a)
    held = jax.lax.stop_gradient
    assert jax.grad(lambda x: x * loss(held(jnp.float32(2.0)), held(a)))(1.0) == pytest.approx(loss(jnp.float32(2.0), a))


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_gradient_with_scales_of_wider_operands_is_refused_with_its_own_way_out(dtype):
    a, b = jnp.ones((16, 32), dtype), jnp.ones((32, 48), dtype)

    def loss(a: jax.Array) -> jax.Array:
        return matmul(a, b, scale_a=2.0).sum()

    told = f"^matmul of {dtype} has no gradient with scales .*: multiply the operand or the result by the scale .*stop_gradient"
    with pytest.raises(ValueError, match=told):
        jax.grad(loss)(a)
    assert jnp.all(jax.grad(lambda a: 2.0 * matmul(a, b).sum())(a) == 2.0 * 48)


def test_the_default_is_what_was_measured_to_be_fastest_or_nearly():
    """Of 48 problems of FP8 and int8, each with eight configs (docs/kernels/matmul.md, "Eight bits")."""
    spec, device, found = mgpu_ops.spec_of("matmul"), gpu.find("h200"), []
    with gzip.open(RESULTS / "2026-11-29-h200-matmul-8-bits.jsonl.gz", "rt") as lines:
        measured = [of for of in map(json.loads, lines) if of.get("run") == 2]
    for of in measured:
        times = {mgpu_ops.MatmulConfig(**each["config"]): each["us"] for each in of["configs"]}
        default = spec.default(MatmulProblem(**of["problem"]), device)
        if default in times:
            found.append(times[default] / min(times.values()))
    assert len(found) >= 44
    assert math.prod(found) ** (1 / len(found)) < 1.02
    assert max(found) < 1.08


def test_where_xla_was_slower_the_kernel_runs():
    measured = [json.loads(line) for path in RESULTS.glob("*-h200-matmul-fp8*.jsonl") for line in path.read_text().splitlines()]
    slower = (of for of in measured if of["others"]["xla"][0] > 1.1 * min(each["us"] for each in of["configs"] if "us" in each))
    problems = {MatmulProblem(**of["problem"]) for of in slower}
    assert len(problems) >= 8
    for problem in problems:
        assert re.search("runs +the kernel", mgpu_ops.explain("matmul", problem, gpu="h200"))


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"layout": "nn"}, r"layout nn of 8-bit floats: .* b as \[n, k\] \(transpose_b=True\)"),
        ({"out_dtype": E4M3}, "out_dtype float8_e4m3fn is not one of bfloat16"),
        ({"b_dtype": "bfloat16"}, "a is float8_e4m3fn and b is bfloat16: only float8_e4m3fn and float8_e5m2 mix"),
        ({"k": 264}, "k=264 needs 16-byte rows of a .* pad to 272"),
        ({"scales": "column"}, "scales='column' is not one of none, tensor, row, block"),
        ({"dtype": "bfloat16", "scales": "row"}, "scales='row' are of 8-bit floats, not bfloat16"),
    ],
    ids=str,
)
def test_what_the_kernel_runs_or_why_not(changes, reason):
    found = mgpu_ops.spec_of("matmul").supports(replace(P(), **changes), gpu.find("h200"))
    if reason is None:
        assert found is None
    else:
        with pytest.raises(ValueError, match=reason):
            raise ValueError(found)


def test_operands_of_8_and_16_bits_do_not_mix():
    a, b = operands()
    with pytest.raises(ValueError, match=r"a is float8_e4m3fn and b is bfloat16: cast one with .astype"):
        matmul(a, b.astype(BF16), transpose_b=True)


def test_a_second_dtype_like_the_first_is_the_same_problem():
    assert P(b_dtype=E4M3) == P()
    assert P(b_dtype=E5M2) != P()
