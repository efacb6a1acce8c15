"""quantized_matmul: values, gradients and transforms, the kernel interpreted on every schedule, and compiled for an H200."""

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

import mgpu_ops
from mgpu_ops import QuantizedMatmulConfig, quantized_matmul, spec_of
from mgpu_ops import QuantizedMatmulProblem as P
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.matmul.quantized import kernel, smem_bytes
from mgpu_ops.registry.capture import capture
from tests import thorough
from tests.arrays import normal
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter

OP, H200 = spec_of("quantized_matmul"), gpu.find("h200")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

BASE = QuantizedMatmulConfig(
    tile_m=16,
    tile_n=64,
    tile_k=128,
    max_concurrent_steps=2,
    compute_warpgroups=1,
    wg_dimension="n",
    cluster="none",
    split_k=1,
    memory_registers=40,
)
BASE4 = replace(BASE, tile_k=256)
X, X4 = replace(BASE, exchange="x"), replace(BASE4, exchange="x")
SHARED_K = replace(BASE, tile_k=256, compute_warpgroups=2, wg_dimension="k")


def arrays_of(problem: P) -> tuple[jax.Array, ...]:
    arrays: tuple[jax.Array, ...] = OP.inputs(problem, jax.random.key(0))
    return arrays


def wide(a: jax.Array) -> np.ndarray:
    return np.asarray(a.astype(jnp.int8 if a.dtype == jnp.int4 else F32)).astype(np.float64)


def truth(problem: P, x: jax.Array, w: jax.Array, scales: jax.Array, *others: jax.Array) -> np.ndarray:
    """The result in float64, group by group as its formula says."""
    values, size = wide(w) if problem.layout == "nt" else wide(w).T, problem.group_size or problem.k
    count = len(others) - problem.bias - problem.residual
    zero_points, added = others[:count], others[count:]
    total = sum((wide(a) for a in added), np.zeros((problem.m, problem.n)))
    for group in range(problem.k // size):
        at = slice(group * size, (group + 1) * size)
        scale, *zero = (wide(a if a.ndim == 1 else a[group]) for a in (scales, *zero_points))
        total = total + wide(x)[:, at] @ (values[:, at].T - (zero[0] if zero else 0.0)) * scale
    return total


# --- the kernel, interpreted


def interpret(problem: P, config: QuantizedMatmulConfig, arrays: Any) -> Any:
    assert OP.check(problem, config, FEW_SMS) is None
    with quiet_interpreter():
        out = jax.jit(functools.partial(OP.run, problem, config, FEW_SMS, interpret=True))(*arrays)
        return jax.block_until_ready(out)


CASES = {
    "columns, tails of all sides": (P(13, 200, 272), BASE),
    "columns with zero points, int4, float16": (
        P(13, 136, 384, "int4", 0, True, "float16", "float16", scale_dtype="float32"),
        BASE4,
    ),
    "columns, warpgroups share k": (P(8, 192, 640), SHARED_K),
    "groups of 128, warpgroups share n": (
        P(20, 256, 384, group_size=128),
        replace(BASE, tile_n=128, compute_warpgroups=2, max_concurrent_steps=3),
    ),
    "groups of 64 with zero points, warpgroups share k": (P(13, 192, 512, "int8", 64, True), SHARED_K),
    "groups of 32, int4, rows of several wgmma": (P(13, 128, 256, "int4", 32, True), replace(BASE4, tile_n=128)),
    "float32": (P(16, 128, 256, "int4", 128, out_dtype="float32", scale_dtype="float32"), BASE4),
    "many rows, several epilogue tiles": (P(200, 128, 256), replace(BASE, tile_m=128)),
    "x shared in a cluster": (P(32, 256, 384, group_size=64), replace(BASE, cluster="n")),
    "k split in a cluster": (P(13, 136, 1152, "int8"), replace(BASE, cluster="k", split_k=2)),
    "k split in a cluster and in its blocks": (
        P(5, 128, 896, "int4", 64, True),
        replace(SHARED_K, tile_m=8, cluster="k", split_k=2),
    ),
    "steps in turn, columns with zero points, several tiles a block": (
        P(40, 328, 656, zero_points=True),
        replace(BASE, compute_warpgroups=2, wg_dimension="steps"),
    ),
    "steps in turn, groups of 64 with zero points, fewer steps than warpgroups": (
        P(13, 192, 256, "int8", 64, True),
        replace(BASE, compute_warpgroups=3, wg_dimension="steps", max_concurrent_steps=3),
    ),
    "steps in turn, x in order, int4, k split in a cluster": (
        P(13, 448, 1792, "int4", 128),
        replace(X4, tile_m=8, compute_warpgroups=2, wg_dimension="steps", max_concurrent_steps=4, cluster="k", split_k=2),
    ),
    "steps in turn, parts of the rows, weights shuffled, k split in a cluster": (
        P(20, 200, 1152),
        replace(BASE, tile_m=8, compute_warpgroups=2, wg_dimension="steps", max_concurrent_steps=4, cluster="k", split_k=2),
    ),
    "steps in turn, 64 rows, x in order": (
        P(64, 128, 640),
        replace(X, tile_m=64, tile_k=128, compute_warpgroups=3, wg_dimension="steps", max_concurrent_steps=3),
    ),
    "x in order, columns, tails of all sides": (P(13, 200, 272, zero_points=True), X),
    "x in order, groups of 32, int4, x shared in a cluster": (
        P(32, 256, 384, "int4", 32, True, "float16", "float16"),
        replace(X4, cluster="n", max_concurrent_steps=3),
    ),
    "x in order, groups of 64, k split in a cluster and in its blocks": (
        P(5, 128, 768, "int4", 64),
        replace(SHARED_K, tile_m=8, cluster="k", split_k=2, exchange="x"),
    ),
    "bias, tails of all sides": (P(13, 200, 272, bias=True), BASE),
    "bias and residual, one row, several tiles a block": (P(1, 328, 272, bias=True, residual=True), BASE),
    "residual, several tiles along both sides a block": (P(20, 328, 272, residual=True), replace(BASE, tile_m=8)),
    "residual, int4, groups of 128 with zero points, float16": (
        P(5, 136, 384, "int4", 128, True, "float16", "float16", bias=True, residual=True),
        replace(BASE4, tile_m=8),
    ),
    "residual, k split in a cluster, several tiles a block": (
        P(13, 200, 1152, bias=True, residual=True),
        replace(BASE, cluster="k", split_k=2),
    ),
    "residual, warpgroups share k, x in order": (P(13, 392, 640, residual=True), replace(SHARED_K, exchange="x")),
    "residual, steps in turn, k split in a cluster": (
        P(5, 200, 1792, bias=True, residual=True),
        replace(X, tile_m=8, compute_warpgroups=2, wg_dimension="steps", cluster="k", split_k=2),
    ),
    "residual, rows of several wgmma, several epilogue tiles": (
        P(200, 456, 256, bias=True, residual=True),
        replace(BASE, tile_m=128, tile_n=128),
    ),
    "residual, rows of several wgmma, warpgroups share n, k split in a cluster": (
        P(8, 456, 512, residual=True),
        replace(BASE, tile_n=256, compute_warpgroups=2, cluster="k", split_k=2),
    ),
    "residual in float32, x shared in a cluster": (
        P(32, 256, 384, "int4", 64, out_dtype="float32", bias=True, residual=True),
        replace(X4, cluster="n"),
    ),
    "residual in float32, fewer rows than a tile": (
        P(5, 128, 256, out_dtype="float32", residual=True),
        replace(BASE, tile_m=8),
    ),
}
ONE_OF_A_BLOCK = [  # where one of several warpgroups waits, for sums or for a residual
    name
    for name, (p, c) in CASES.items()
    if c.wg_dimension != "n" and (c.cluster == "k" or p.residual or "several tiles a block" in name)
]
ALWAYS = {
    "k split in a cluster and in its blocks",
    "bias and residual, one row, several tiles a block",
    "residual, int4, groups of 128 with zero points, float16",
    "residual, steps in turn, k split in a cluster",
    "steps in turn, parts of the rows, weights shuffled, k split in a cluster",
    "residual, rows of several wgmma, several epilogue tiles",
    "residual, rows of several wgmma, warpgroups share n, k split in a cluster",
}
IN_ALL = [name for name in CASES if name not in ALWAYS]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_and_has_no_race(name, assert_near):
    if name in ONE_OF_A_BLOCK and jax.__version_info__ < (0, 12):
        pytest.skip("jax 0.11's interpreter wants each phase of a barrier seen by all warpgroups: here one waits for the block")
    problem, config = CASES[name]
    arrays = arrays_of(problem)
    out = interpret(problem, config, arrays)
    assert out.dtype == problem.out_dtype
    rounding = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 2e-6}[problem.out_dtype]  # one, of the output
    assert_near(out, truth(problem, *arrays), rounding)
    assert not engine.races_found()


@pytest.mark.parametrize(
    ("problem", "config"),
    [(P(8, 64, 272, zero_points=True), X), (P(8, 64, 256, "int4", 64, True, out_dtype="float32"), X4)],
    ids=["int8, a tail of k", "int4, groups"],
)
def test_what_is_not_finite_stays_in_its_row_and_has_its_sign(problem, config):
    x, *others = arrays_of(problem)
    x = x.at[1, 3].set(jnp.inf).at[2, -1].set(-jnp.inf).at[5, 70].set(jnp.nan)
    with np.errstate(invalid="ignore"):
        wanted = truth(problem, x, *others)  # an infinity times a weight of 0 is no number
    out = np.asarray(interpret(problem, config, (x, *others)).astype(F32))
    finite = np.isfinite(wanted)
    assert finite.all(axis=1).tolist() == [True, False, False, True, True, False, True, True]
    assert np.isinf(wanted).any()
    np.testing.assert_array_equal(out[~finite], wanted[~finite])
    np.testing.assert_allclose(out[finite], wanted[finite], atol=2e-2)


# --- the kernel, compiled

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
LLAMA = [
    f"llama3-{name}" for name in ("8b-down-16-w8", "8b-down-16-w4", "8b-out-64-w8", "70b-gate_up-16-w4", "70b-gate_up-64-w4")
]
COMPILED = {
    **{name: (OP.shapes[name], None) for name in LLAMA},
    **{name: CASES[name] for name in CASES},
}
COMPILED_IN_ALL = set(COMPILED) - set(LLAMA[2:])


def overwritten(sass: str) -> list[str]:
    """Instructions that write a register of a left operand which an HGMMA in flight reads, in the order of the text."""
    found: list[str] = []
    groups: list[set[int]] = [set()]  # registers of each group of HGMMA; the last one is not complete
    for code, operands in re.findall(r"\*/\s+(?:@!?U?P\d\s+)?([A-Z][\w.]*)\s+(.*)", sass):
        written = re.match(r"(?:PT, )?R(\d+)\b", operands)
        if code.startswith("HGMMA"):
            first = int(re.findall(r"\bR(\d+)", operands)[1])
            groups[-1] |= set(range(first, first + 4))
            groups += [set()] if "gsb0" in operands else []
        elif code.startswith("WARPGROUP.DEPBAR"):
            left = int(operands.split(",")[1].strip(" ;"), 16)
            groups = groups[len(groups) - left - 1 :]
        elif written and not code.startswith(("ST", "SYNCS", "BRA")):
            width = 4 if code.startswith("LDSM") and code.endswith(".4") else 2 if code.startswith("CS2R") else 1
            if any(registers & set(range(int(written[1]), int(written[1]) + width)) for registers in groups):
                found.append(f"{code} {operands}")
    return found


@needs_compiler
def test_one_copy_brings_the_rows_of_x_of_a_step():
    """Beside two of weights and one of scales: the producer takes as long for each copy, however small it is."""
    problem = OP.shapes["llama3-8b-down-1-w4"]
    arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(OP.run, problem, OP.default(problem, H200), H200), *arrays)
    assert len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", report.ptx)) == 4


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(COMPILED, COMPILED_IN_ALL))
def test_compiled_it_spills_nothing_no_wgmma_waits_for_another_and_its_shared_memory_is_as_counted(name):
    problem, config = COMPILED[name]
    config = config or OP.default(problem, H200)
    arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(OP.run, problem, config, H200), *arrays)
    assert (report.spills, report.serialized) == (0, "")
    assert report.smem_bytes == smem_bytes(problem, config)
    assert overwritten(report.sass) == []
    assert report.ptx.count(", 16383;") <= 1  # bits of an address: a descriptor's, of the buffer's start alone
    assert not re.search(r"I2F\S*(F16|BF16|S8)", report.sass)  # integers become floats without the slow conversion


# --- the function


def layer(dtype: Any = BF16, w_dtype: str = "int8", group_size: int = 32, k: int = 64, n: int = 24) -> tuple[jax.Array, ...]:
    """x [2, 5, k], w [n, k], scales and zero points."""
    _, w, scales, zero_points = arrays_of(P(1, n, k, w_dtype, group_size, True, scale_dtype="float32"))
    return normal(0, 2, 5, k, dtype=dtype), w, scales, zero_points


@pytest.mark.parametrize("w_dtype", ["int8", "int4"])
def test_weights_are_read_in_either_order_and_scales_are_not_transposed(w_dtype, assert_near):
    x, w, scales, zero_points = layer(w_dtype=w_dtype)
    wanted = truth(P(10, 24, 64, w_dtype, 32), x.reshape(10, 64), w, scales, zero_points).reshape(2, 5, 24)
    stored = quantized_matmul(x, w, scales, zero_points, transpose_w=True)
    assert stored.dtype == BF16
    assert_near(stored, wanted, 4e-3)
    assert (stored == quantized_matmul(x, w.astype(jnp.int8).T.astype(w.dtype), scales, zero_points)).all()


@pytest.mark.parametrize("shape", [(24,), (1, 24)])
def test_one_scale_a_column_needs_no_groups(shape, assert_near):
    x, w, scales, _ = layer()
    out = quantized_matmul(x[0], w, scales[0].reshape(shape), transpose_w=True, out_dtype=F32)
    assert out.dtype == F32
    assert_near(out, truth(P(5, 24, 64), x[0], w, scales[0]), 1e-6)


def test_zero_points_may_be_integers(assert_near):
    x, w, scales, zero_points = layer()
    out = quantized_matmul(x, w, scales, zero_points.astype(jnp.int8), transpose_w=True)
    assert (out == quantized_matmul(x, w, scales, zero_points, transpose_w=True)).all()


@thorough.only_in_all
def test_the_kernel_runs_where_it_is_asked_for(assert_near):
    x, w, scales, _ = layer(k=128, group_size=64)
    f = functools.partial(quantized_matmul, transpose_w=True)
    with quiet_interpreter():
        ours = f(x, w, scales, backend="interpret")
    assert_near(ours, f(x, w, scales, backend="xla"), 4e-3)


def test_gradient_of_x_is_that_of_the_weights_as_floats(assert_near):
    x, w, scales, zero_points = layer(F32)
    g = normal(3, 2, 5, 24, dtype=F32)
    (dx,) = jax.vjp(lambda x: quantized_matmul(x, w, scales, zero_points, transpose_w=True), x)[1](g)
    of_each = (np.repeat(wide(a), 32, 0).T for a in (zero_points, scales))
    zero, scale = of_each
    assert_near(dx, wide(g) @ ((wide(w) - zero) * scale), 1e-5)


@pytest.mark.parametrize("which", [2, 3])
def test_gradients_of_scales_and_zero_points_are_refused_and_constants_are_not(which):
    arrays = layer()

    def loss(x: Any, hold: bool) -> Any:
        scaled = [*arrays]
        scaled[which] = jax.lax.stop_gradient(x) if hold else x
        return quantized_matmul(*scaled, transpose_w=True, out_dtype=F32).sum()

    with pytest.raises(
        ValueError, match=r"no gradient of scales or zero points: hold them constant with jax\.lax\.stop_gradient"
    ):
        jax.grad(loss)(arrays[which], False)
    assert not jax.grad(loss)(arrays[which], True).any()


@pytest.mark.parametrize("in_axes", [(0, None, None, None), (0, 0, 0, 0), (None, 0, None, None)])
def test_vmap_is_the_product_of_each(in_axes):
    x, w, scales, zero_points = layer()
    arrays = [a if axis is None else jnp.stack([a, a[::-1]]) for a, axis in zip((x, w, scales, zero_points), in_axes)]
    f = functools.partial(quantized_matmul, transpose_w=True)
    out = jax.vmap(f, in_axes)(*arrays)
    for i in range(2):
        one = f(*(a if axis is None else a[i] for a, axis in zip(arrays, in_axes)))
        assert (out[i] == one).all()


def test_gradients_through_shard_map_over_rows():
    mesh = jax.make_mesh((2,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    x, w, scales, _ = layer()
    rows, whole = PartitionSpec("d"), PartitionSpec()
    f = functools.partial(quantized_matmul, transpose_w=True)
    sharded = jax.shard_map(f, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    (out, dx), (wanted, wanted_dx) = (
        jax.value_and_grad(lambda x, f=f: f(x, w, scales).astype(F32).sum())(x) for f in (sharded, f)
    )
    assert out == pytest.approx(float(wanted), rel=1e-2)
    assert (dx == wanted_dx).all()


# --- what is added to the product


def added(*lead: int, n: int = 24, dtype: Any = BF16) -> tuple[jax.Array, jax.Array]:
    return normal(4, n, dtype=F32), normal(5, *lead, n, dtype=dtype)


def test_bias_and_residual_are_added_before_the_one_rounding(assert_near):
    x, w, scales, zero_points = layer()
    bias, residual = added(2, 5)
    out = quantized_matmul(x, w, scales, zero_points, bias=bias, residual=residual, transpose_w=True)
    problem = P(10, 24, 64, group_size=32, zero_points=True, bias=True, residual=True)
    flat = (x.reshape(10, 64), w, scales, zero_points, bias, residual.reshape(10, 24))
    assert out.dtype == BF16
    assert_near(out, truth(problem, *flat).reshape(2, 5, 24), 4e-3)


@pytest.mark.parametrize("shape", [(), (24,), (5, 1), (1, 1, 24), (2, 1, 24)])
def test_a_residual_broadcasts_to_the_result_and_its_gradient_is_summed(shape, assert_near):
    x, w, scales, _ = layer(F32)
    residual, g = normal(6, *shape, dtype=F32), normal(3, 2, 5, 24, dtype=F32)
    f = functools.partial(quantized_matmul, x, w, scales, transpose_w=True)
    out, back = jax.vjp(lambda r: f(residual=r), residual)
    assert_near(out, wide(f()) + wide(residual), 1e-6)
    assert_near(back(g)[0], jax.vjp(lambda r: jnp.broadcast_to(r, g.shape), residual)[1](g)[0], 1e-6)


def test_gradients_of_bias_and_residual_are_those_of_a_sum(assert_near):
    x, w, scales, zero_points = layer()
    bias, residual = added(2, 5)
    g = normal(3, 2, 5, 24, dtype=BF16)
    f = lambda x, b, r: quantized_matmul(x, w, scales, zero_points, bias=b, residual=r, transpose_w=True)  # noqa: E731
    dx, dbias, dresidual = jax.vjp(f, x, bias.astype(BF16), residual)[1](g)
    (wanted,) = jax.vjp(lambda x: quantized_matmul(x, w, scales, zero_points, transpose_w=True), x)[1](g)
    assert (dx == wanted).all()
    assert (dresidual == g).all()
    assert dbias.dtype == BF16
    assert_near(dbias, wide(g).sum((0, 1)), 4e-3)


@pytest.mark.parametrize(
    ("in_axes", "launches"),
    [((0, None, 0), 1), ((0, None, None), 1), ((None, None, 0), 1), ((0, 0, 0), 2), ((None, 0, None), 2)],
)
def test_vmap_of_rows_is_one_product_and_of_a_bias_one_for_each(in_axes, launches, assert_near):
    x, w, scales, _ = layer()
    own = (x[0], *added(5))
    arrays = [a if axis is None else jnp.stack([a, a[::-1]]) for a, axis in zip(own, in_axes)]
    f = lambda x, b, r: quantized_matmul(x, w, scales, bias=b, residual=r, transpose_w=True)  # noqa: E731
    assert {use.problem.m for use in capture(jax.vmap(f, in_axes), H200)(*arrays).uses} == {10 // launches}
    out = jax.vmap(f, in_axes)(*arrays)
    for i in range(2):
        assert_near(out[i], f(*(a if axis is None else a[i] for a, axis in zip(arrays, in_axes))), 8e-3)  # of other programs


@needs_compiler
def test_the_residual_is_loaded_before_the_weights_are_multiplied():
    problem = replace(OP.shapes["llama3-8b-down-1-w8"], residual=True)
    arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    ptx = aot.compile_for(H200, functools.partial(OP.run, problem, OP.default(problem, H200), H200), *arrays).ptx
    plain = replace(problem, residual=False)
    before = aot.compile_for(H200, functools.partial(OP.run, plain, OP.default(problem, H200), H200), *arrays[:-1]).ptx
    loads = [found.start() for found in re.finditer(r"cp\.async\.bulk\.tensor\.\dd\.shared", ptx)]
    assert len(loads) == len(re.findall(r"cp\.async\.bulk\.tensor\.\dd\.shared", before)) + 1
    assert any(at < ptx.index("wgmma.mma_async") for at in loads)


def test_a_config_that_was_tuned_without_a_residual_serves_a_call_with_one():
    tuned = OP.shapes["llama3-70b-gate_up-16-w8"]
    for added in ({"bias": True}, {"residual": True}, {"bias": True, "residual": True}):
        assert 0 < (OP.distance(replace(tuned, **added), tuned) or 0.0) < 0.2
        assert OP.plain(replace(tuned, **added)) == tuned
    told = mgpu_ops.explain("quantized_matmul", vars(replace(tuned, residual=True)), gpu="h200")
    assert "runs      the kernel" in told
    assert re.search("from      near, .*: measured for residual=False", told)


def test_a_residual_takes_a_buffer_for_each_epilogue_tile_and_a_barrier():
    config = replace(BASE, tile_m=128, tile_n=128)  # two blocks of 64 rows, each with two epilogue tiles
    plain = P(200, 256, 256)
    more = smem_bytes(replace(plain, residual=True), config) - smem_bytes(plain, config)
    assert more == 2 * 64 * 64 * 2 + 8
    assert smem_bytes(replace(plain, bias=True), config) == smem_bytes(plain, config)


X, W, S = jnp.ones((4, 64), BF16), jnp.ones((64, 24), jnp.int8), jnp.ones((2, 24), F32)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "text"),
    [
        ((X, W.astype(BF16), S), {}, TypeError, "w has dtype bfloat16: quantized_matmul takes int8 or int4"),
        ((X, "weights", S), {}, TypeError, "w is 'weights', which is no array"),
        ((X.astype(jnp.int8), W, S), {}, TypeError, "x has dtype int8: quantized_matmul takes floats"),
        ((X, W, S.astype(jnp.int32)), {}, TypeError, "scales has dtype int32"),
        ((X, W[None], S), {}, ValueError, r"w \(1, 64, 24\): .*use jax.vmap"),
        ((X, W, S), {"transpose_w": True}, ValueError, r"differ in k: 64 != 24 \(transpose_w=True\)"),
        ((X, W, S[:, :8]), {}, ValueError, r"scales has shape \(2, 8\): for k=64 and n=24"),
        ((X, W, jnp.ones((3, 24))), {}, ValueError, r"scales has shape \(3, 24\): .*a size that divides k"),
        ((X, W, S, S[0]), {}, ValueError, r"zero_points has shape \(24,\) and scales \(2, 24\)"),
        ((X, W, S), {"transpose_w": np.ones(2)}, TypeError, "transpose_w=array.* is neither True nor False"),
        ((X, W, S, "zero"), {}, TypeError, "zero_points is 'zero', which is no array: quantized_matmul takes"),
        ((X, W, S, S == 1), {}, TypeError, "zero_points has dtype bool"),
        ((X, W, S), {"config": BASE, "backend": "interpret"}, ValueError, "store them once as"),
        ((X, W, S), {"config": {"tile_m": 16}}, TypeError, "pass a mgpu_ops.QuantizedMatmulConfig"),
        ((X, W, S), {"out_dtype": "int8"}, TypeError, "out_dtype int8 is not a float"),
        ((X, W, S), {"bias": S}, ValueError, r"bias has shape \(2, 24\): it must be \[n\] = \(24,\)"),
        ((X, W, S), {"bias": jnp.ones(24, int)}, TypeError, "bias has dtype int32: quantized_matmul takes floats"),
        ((X, W, S), {"residual": S}, ValueError, "residual is float32 and the result bfloat16: cast it, or pass its dtype as"),
        ((X, W, S), {"residual": X}, ValueError, r"residual has shape \(4, 64\): it must broadcast to the result's, \(4, 24\)"),
    ],
)
def test_what_no_call_can_be_is_told(arrays, options, error, text):
    with pytest.raises(error, match=text):
        quantized_matmul(*arrays, **options)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (P(16, 128, 256, layout="nn"), r"store them once as \[n, k\] \(transpose_w=True\)"),
        (P(16, 128, 256, "uint4"), "w_dtype uint4 is not one of int8, int4"),
        (P(16, 128, 512, group_size=256), "group_size=256 is not one of 32, 64, 128, or 0"),
        (P(16, 128, 264), "k=264 needs 16-byte rows of the weights"),
        (P(16, 132, 256), "n=132 needs 16-byte rows of the output"),
        (P(16, 128, 320, "int4"), "k=320 is no multiple of 128, which int4 weights are read in"),
        (P(16, 128, 320, group_size=128), "k=320 is no multiple of group_size=128"),
        (P(13, 128, 256, out_dtype="float32"), "m=13 rows in float32 are no multiple of 8"),
    ],
)
def test_what_the_kernel_cannot_run_is_told(problem, text):
    reason = OP.supports(problem, H200)
    assert reason is not None
    assert re.search(text, reason), reason
    assert "backend='xla'" in reason


def test_a_call_for_few_rows_runs_the_kernel_and_one_for_many_xla():
    few, some, many, most = (
        mgpu_ops.explain("quantized_matmul", {"m": m, "n": 4096, "k": 14336, "w_dtype": "int4"}, gpu="h200")
        for m in (16, 512, 2048, 8192)
    )
    assert "runs      the kernel" in few
    assert "runs      the kernel" in some
    assert "runs      XLA: kernel " in many  # by the models
    assert "was measured with up to 2048 rows, not with m=8192" in most


def test_a_call_of_int4_whose_last_row_of_256_is_half_runs_the_kernel():
    told = mgpu_ops.explain("quantized_matmul", {"m": 16, "n": 4096, "k": 14336 + 128, "w_dtype": "int4"}, gpu="h200")
    assert "runs      the kernel" in told


def test_a_wgmma_that_needs_more_registers_than_all_warps_are_launched_with_is_refused():
    config = QuantizedMatmulConfig(256, 128, 128, 2, 2, "n", "none", 1, 40, "x")
    reason = OP.check(P(1024, 4096, 4096), config, H200)
    assert reason is not None
    assert "a wgmma of tile_m=256 takes 158 registers a thread" in reason
    assert "launched with, but 128 are left" in reason
    assert OP.check(P(1024, 4096, 4096), replace(config, exchange="weights"), H200) is None


def test_where_warpgroups_take_steps_in_turn_a_stage_has_one_reader():
    config = QuantizedMatmulConfig(8, 64, 512, 3, 2, "steps", "none", 1, 40, "x")
    reason = OP.check(P(1, 4096, 4096), config, H200)
    assert reason is not None
    assert "max_concurrent_steps=3 must be a multiple of 2 warpgroups" in reason
    assert OP.check(P(1, 4096, 4096), replace(config, max_concurrent_steps=4), H200) is None
    assert "2 or more" in (OP.check(P(1, 4096, 4096), replace(config, compute_warpgroups=1), H200) or "")


@pytest.mark.parametrize(
    ("m", "n", "k", "wanted"),
    [
        (1, 8192, 8192, ("steps", "none")),
        (8, 4096, 14336, ("steps", "k")),
        (16, 4096, 14336, ("steps", "k")),
        (17, 4096, 4096, ("steps", "k")),
        (64, 4096, 4096, ("steps", "k")),
        (1, 57344, 8192, ("n", None)),
        (16, 57344, 8192, ("n", None)),
        (64, 57344, 8192, ("n", None)),
    ],
)
@pytest.mark.parametrize(("w_dtype", "group_size"), [("int8", 0), ("int4", 128)])
def test_warpgroups_take_steps_in_turn_where_few_rows_have_few_tiles(m, n, k, wanted, w_dtype, group_size):
    config = OP.default(P(m, n, k, w_dtype, group_size), H200)
    assert wanted in {(config.wg_dimension, config.cluster), (config.wg_dimension, None)}


def test_warpgroups_share_columns_or_k_where_rows_are_many():
    assert all(c.wg_dimension != "steps" for c in OP.candidates(P(65, 4096, 4096), H200))


@pytest.mark.parametrize(("w_dtype", "group_size"), [("int8", 0), ("int4", 128)])
def test_few_columns_by_64_rows_are_tiles_with_a_part_of_the_rows(w_dtype, group_size):
    assert OP.default(P(64, 2048, 2048, w_dtype, group_size), H200).tile_m < 64
    assert OP.default(P(64, 57344, 8192, w_dtype, group_size), H200).tile_m == 64


@pytest.mark.parametrize(("m", "early"), [(32, True), (64, False)])
def test_few_rows_are_loaded_ahead_of_the_weights_that_they_are_multiplied_with(m, early, monkeypatch):
    """Where x is put in order, which takes a while. Many rows are more bytes than the weights."""
    loaded: list[str] = []
    copy, load_x = kernel.engine.copy_gmem_to_smem, kernel.Block.load_x
    monkeypatch.setattr(kernel.engine, "copy_gmem_to_smem", lambda *args: (loaded.append("w"), copy(*args))[1])
    monkeypatch.setattr(kernel.Block, "load_x", lambda self, *args: (loaded.append("x"), load_x(self, *args))[1])
    problem = P(m, 256, 512)
    config = QuantizedMatmulConfig(m, 64, 128, 4, 2, "steps", "none", 1, 40, "x")
    arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    with gpu.target("h200"):
        jax.eval_shape(functools.partial(OP.run, problem, config, H200), *arrays)
    assert loaded == (["x", "w"] if early else ["w", "x"])


def test_sixteen_rows_of_int4_and_long_k_share_the_k_of_a_step():
    """128 tiles of 64 columns were 5 % slower in turn: many steps, whose instructions weigh."""
    assert OP.default(P(16, 8192, 28672, "int4", 128), H200).wg_dimension == "k"
