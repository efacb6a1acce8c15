"""rms_norm: values, gradients and transforms; the kernels interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
import re
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import RmsNormConfig as C
from mgpu_ops import RmsNormProblem as P
from mgpu_ops import capture, explain, rms_norm, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import resolution
from mgpu_ops.rms_norm import smem_bytes
from tests import thorough
from tests.arrays import normal

NORM, H200 = spec_of("rms_norm"), gpu.find("h200")
FEW_SMS = replace(H200, sms=2)
BF16, F32 = jnp.bfloat16, jnp.float32


def written_out(x: jax.Array, w: jax.Array, epsilon: float = 1e-6) -> jax.Array:
    x, w = x.astype(F32), w.astype(F32)
    return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * w


def arrays() -> tuple[jax.Array, jax.Array]:
    return 3 * normal(0, 2, 9, 256, dtype=BF16), normal(1, 256, dtype=BF16)


CASES = {
    "more rows than stages": (P(11, 256), C(1, 2)),
    "fewer rows than blocks": (P(3, 384, "float16"), C(4, 6)),
    "gradient": (P(11, 256, gradient=True), C(1, 3)),
    "gradient, another is added": (P(9, 384, gradient=True, residual=True), C(2, 2)),
    "gradient, wide rows": (P(5, 4224, gradient=True, residual=True), C(1, 2)),
}


@pytest.mark.parametrize("name", thorough.cases(CASES, ["fewer rows than blocks", "gradient"]))
def test_kernel_is_right_and_has_no_race(name, assert_near):
    problem, config = CASES[name]
    given = NORM.inputs(problem, jax.random.key(0))
    assert NORM.check(problem, config, FEW_SMS) is None
    out = jax.jit(functools.partial(NORM.run, problem, config, FEW_SMS, interpret=True))(*given)
    x, w, epsilon, *others = (a.astype(F32) for a in given)
    f = functools.partial(written_out, epsilon=epsilon[0])
    wanted = (f(x, w),)
    if problem.gradient:
        dx, dw = jax.vjp(f, x, w)[1](others[0])
        wanted = (dx + sum(others[1:]), dw)
    for y, z in zip(jax.tree.leaves(out), wanted, strict=True):
        assert_near(y, z, NORM.tolerance(problem) / 2)
    assert not engine.races_found()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    "name",
    thorough.cases(
        ["llama3-8b-8192", "llama3-8b-8192-gradient", "llama3-70b-8192-gradient"],
        ["llama3-8b-8192", "llama3-70b-8192-gradient"],
    ),
)
def test_nothing_spills_and_shared_memory_is_as_computed(name):
    problem = NORM.shapes[name]
    config = NORM.default(problem, H200)
    shapes = jax.eval_shape(functools.partial(NORM.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(NORM.run, problem, config, H200), *shapes)
    assert (report.spills, report.smem_bytes) == (0, smem_bytes(problem, config))


@pytest.mark.parametrize("backend", ["xla", pytest.param("interpret", marks=thorough.only_in_all)])
def test_result_and_gradients_are_those_in_float32(backend, assert_near):
    x, w = arrays()
    weights = normal(2, 2, 9, 256)
    ours = functools.partial(rms_norm, epsilon=1e-2, backend=backend)
    assert_near(ours(x, w), written_out(x, w, 1e-2), 8e-3)
    found = jax.grad(lambda x, w: (ours(x, w).astype(F32) * weights).sum(), argnums=(0, 1))(x, w)
    wanted = jax.grad(lambda x, w: (written_out(x, w, 1e-2) * weights).sum(), argnums=(0, 1))(x.astype(F32), w.astype(F32))
    for y, z, argument in zip(found, wanted, (x, w), strict=True):
        assert (y.dtype, y.shape) == (BF16, argument.shape)
        assert_near(y, z, 1.5e-2)  # cotangents are rounded to bfloat16


def test_the_gradient_that_x_gets_beside_the_norm_is_added_by_the_norm_s_kernel(assert_near):
    x, w = arrays()

    def block(x: jax.Array, w: jax.Array) -> jax.Array:
        normal, x = rms_norm(x, w, return_x=True)
        return (jnp.sin(normal.astype(F32)) + x.astype(F32) ** 2).sum()

    wanted = jax.grad(lambda x, w: (jnp.sin(written_out(x, w)) + x**2).sum(), argnums=(0, 1))(x.astype(F32), w.astype(F32))
    for y, z in zip(jax.grad(block, argnums=(0, 1))(x, w), wanted, strict=True):
        assert_near(y, z, 1.5e-2)
    kept = [p.problem for p in capture(jax.grad(block, argnums=(0, 1)), gpu="h200")(x, w).problems]
    assert P(18, 256, gradient=True, residual=True) in kept


def test_vmap_maps_rows_and_weights(assert_near):
    x, w = arrays()
    ours = functools.partial(rms_norm, backend="xla")
    assert_near(jax.vmap(ours, (0, None))(x, w), written_out(x, w), 8e-3)
    both = jnp.stack([w, 2 * w])
    assert_near(jax.vmap(ours)(x, both), jax.vmap(written_out)(x, both), 8e-3)
    each = jax.vmap(jax.grad(lambda x, w: ours(x, w).astype(F32).sum(), argnums=1), (0, None))(x, w)
    wanted = jax.vmap(jax.grad(lambda x, w: written_out(x, w).sum(), argnums=1), (0, None))(x.astype(F32), w.astype(F32))
    assert_near(each, wanted, 1.5e-2)


def test_gradients_through_shard_map_over_rows(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w = arrays()
    rows, whole = PartitionSpec("x"), PartitionSpec()
    f = jax.shard_map(functools.partial(rms_norm, backend="xla"), mesh=mesh, in_specs=(rows, whole), out_specs=rows)
    found = jax.grad(lambda x, w: f(x, w).astype(F32).sum(), argnums=(0, 1))(x, w)
    wanted = jax.grad(lambda x, w: written_out(x, w).sum(), argnums=(0, 1))(x.astype(F32), w.astype(F32))
    for y, z in zip(found, wanted, strict=True):
        assert_near(y, z, 1.5e-2)


X, W = np.ones((4, 256), BF16), np.ones(256, BF16)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((X, W[:128]), {}, ValueError, r"x\(4, 256\) and weight\(128,\) do not fit"),
        ((X, W.astype(np.float32)), {}, ValueError, "x is bfloat16 and weight is float32: cast one"),
        ((X.astype(int), W), {}, TypeError, "x has dtype int.*cast it first"),
        ((X, W), {"epsilon": -1.0}, ValueError, "epsilon=-1.0 must be a finite number of at least 0"),
        ((X, W), {"epsilon": float("nan")}, ValueError, "epsilon=nan must be a finite number"),
        ((X, W), {"epsilon": "x"}, TypeError, "epsilon='x' is no Python number"),
        ((X, W), {"epsilon": np.ones(2)}, TypeError, "is no Python number"),
        ((X, W), {"epsilon": 10**400}, ValueError, "epsilon=10000.* must be a finite number"),
        ((X, W), {"epsilon": True}, TypeError, "epsilon=True is no Python number"),
        ((X, W), {"config": 3}, TypeError, "pass a mgpu_ops.RmsNormConfig"),
        ((X[:, :100], W[:100]), {"backend": "interpret"}, ValueError, "width=100 is no multiple of 128 up to 8192"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(given: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        rms_norm(*given, **options)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(64, 4096), C(4, 3), None),
        (P(64, 4096), C(3, 2), "blocks=3 is not one of 1, 2, 4"),
        (P(64, 8192), C(4, 3), "bytes of shared memory do not fit"),
        (P(64, 4096, gradient=True), C(4, 2), "do not fit"),
        (P(64, 1024, gradient=True, residual=True), C(4, 4), None),
        (P(64, 8192, gradient=True, residual=True), C(1, 2), None),
        (P(64, 8320, gradient=True), C(1, 2), "width=8320 is no multiple of 128 up to 8192"),
        (P(64, 4096, residual=True), C(1, 2), "residual=True is of the gradient"),
        (P(64, 4096, "float32"), C(1, 2), "float32"),
    ],
    ids=str,
)
def test_a_config_runs_or_the_reason_names_the_rule(problem, config, reason):
    found = NORM.check(problem, config, H200)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


def test_the_config_of_narrow_rows_is_none_for_the_gradient_of_wide_ones():
    narrow, wide = (P(8192, width, gradient=True, residual=True) for width in (4096, 6144))
    assert NORM.distance(narrow, wide) is None
    assert NORM.distance(wide, replace(wide, width=8192)) < 1
    assert resolution.resolve(NORM, wide, gpu.find("h200")).source == "default"


@pytest.mark.parametrize("problem", [P(1, 128), P(300, 2304), P(8192, 6144, gradient=True), P(64, 8192, "float16")], ids=str)
def test_a_call_runs_the_kernel_where_nothing_is_tuned(problem):
    assert re.search("runs +the kernel", explain("rms_norm", problem, gpu="h200"))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_and_configs_are_right(seed, assert_near):
    rng, device = np.random.default_rng(seed), gpu.current()
    gradient = bool(rng.integers(2))
    problem = P(int(rng.integers(1, 3000)), 128 * int(rng.integers(1, 65)), gradient=gradient, residual=gradient)
    legal = NORM.candidates(problem, device)
    config = legal[rng.integers(len(legal))]
    given = NORM.inputs(problem, jax.random.key(seed))
    out = jax.jit(functools.partial(NORM.run, problem, config, device))(*given)
    for y, z in zip(jax.tree.leaves(out), jax.tree.leaves(NORM.reference(problem, *given)), strict=True):
        assert_near(y, z, NORM.tolerance(problem))
