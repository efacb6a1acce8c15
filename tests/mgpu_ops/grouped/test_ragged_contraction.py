"""What a user of `mgpu_ops.ragged_contraction` relies on: values, sizes of any kind, transforms, configs, errors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType, PartitionSpec
from jax.test_util import check_grads

import mgpu_ops
from mgpu_ops import RaggedContractionProblem, ragged_contraction, use_configs
from mgpu_ops.core import gpu
from mgpu_ops.grouped.config import SCHEDULES, is_dynamic
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import (
    BASE,
    BF16,
    F16,
    F32,
    TOLERANCE,
    assert_same_gradients,
    gradients,
    needs_compiler,
    normal,
    of_arrays,
)

SPEC = mgpu_ops.spec_of("ragged_contraction")
H200 = gpu.find("h200")
pytestmark = pytest.mark.usefixtures("no_races")


def operands(m: int, n: int, k: int, dtype: Any = BF16) -> tuple[jax.Array, jax.Array]:
    return normal(0, m, k, dtype=dtype), normal(1, m, n, dtype=dtype)


# --- values

SIZES = {
    "sums to m": [30, 0, 41, 1],
    "first rows only": [5, 9, 2, 0],
    "all empty": [0, 0, 0, 0],
    "one-hot": [0, 0, 72, 0],
    "one row each": [1, 1, 1, 1],
}


@pytest.mark.parametrize("name", SIZES)
def test_rows_of_each_group_are_contracted_and_empty_groups_give_zeros(name, assert_near):
    lhs, rhs = operands(72, 40, 24)
    sizes = np.array(SIZES[name])
    out = ragged_contraction(lhs, rhs, sizes)
    assert out.dtype == BF16
    if sizes.any():
        assert_near(out, ragged.contraction(lhs, rhs, sizes), TOLERANCE[BF16])
    np.testing.assert_array_equal(out[sizes == 0], 0)


@pytest.mark.parametrize("rows", [1000, 40])
def test_256_groups(rows, assert_near):
    lhs, rhs = operands(rows, 16, 8)
    sizes = np.random.default_rng(0).multinomial(rows - rows // 10, np.ones(256) / 256)
    assert_near(ragged_contraction(lhs, rhs, sizes), ragged.contraction(lhs, rhs, sizes), TOLERANCE[BF16])


@pytest.mark.parametrize(("m", "n", "k"), [(1, 1, 1), (131, 3, 17), (300, 72, 200)])
def test_odd_shapes(m, n, k, assert_near):
    lhs, rhs = operands(m, n, k)
    sizes = np.array([m // 3, 0, m - m // 3])
    assert_near(ragged_contraction(lhs, rhs, sizes), ragged.contraction(lhs, rhs, sizes), TOLERANCE[BF16])


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=str)
def test_dimensions_of_zero_give_zeros(shape):
    m, n, k = shape
    out = ragged_contraction(jnp.ones((m, k), BF16), jnp.ones((m, n), BF16), [m // 2, 0])
    assert out.dtype == BF16
    np.testing.assert_array_equal(out, np.zeros((2, k, n)))


@pytest.mark.parametrize(("dtype", "out_dtype"), [(BF16, F32), (F16, F16), (F16, F32)], ids=lambda d: d.__name__)
def test_dtypes_of_operands_and_output(dtype, out_dtype, assert_near):
    lhs, rhs = operands(72, 40, 24, dtype)
    out = ragged_contraction(lhs, rhs, [30, 0, 40], out_dtype=out_dtype)
    assert out.dtype == out_dtype
    assert_near(out, ragged.contraction(lhs, rhs, [30, 0, 40]), TOLERANCE[out_dtype])


def test_long_groups_are_summed_in_float32():
    out = ragged_contraction(jnp.ones((1001, 8), BF16), jnp.ones((1001, 8), BF16), [1001], out_dtype=F32)
    np.testing.assert_array_equal(out, np.full((1, 8, 8), 1001))  # not a bfloat16


@pytest.mark.parametrize("dtype", ["float32", "float64"])
def test_wide_floats_run_through_xla(dtype, assert_near):
    with jax.enable_x64(True):
        lhs, rhs = operands(24, 40, 16, dtype)
        out = ragged_contraction(lhs, rhs, [9, 11])
        assert out.dtype == dtype
    assert_near(out, ragged.contraction(lhs, rhs, [9, 11]), {"float32": 1e-5, "float64": 1e-13}[dtype])


@pytest.mark.parametrize("dtype", ["int8", "uint8", "uint32"])
def test_sizes_of_any_integer_dtype(dtype, assert_near):
    lhs, rhs = operands(300, 8, 8)
    sizes = np.array([120, 0, 100], dtype)
    assert_near(jax.jit(ragged_contraction)(lhs, rhs, sizes), ragged.contraction(lhs, rhs, sizes), TOLERANCE[BF16])


@jax.jit
def traced(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    return ragged_contraction(lhs, rhs, sizes)


@pytest.mark.parametrize(
    "sizes",
    [[-7, 30, 10, -1], [30, 10, 50, 9], [1000, 1, 1, 1], [2**31 - 1] * 4, [-(2**31), 2**31 - 1, -(2**31), 5]],
    ids=str,
)
def test_traced_sizes_count_from_zero_to_the_end_of_the_rows_whatever_they_are(sizes, assert_near):
    lhs, rhs = operands(72, 16, 8)
    out = traced(lhs, rhs, np.array(sizes, np.int32))
    assert_near(out, ragged.contraction(lhs, rhs, sizes), TOLERANCE[BF16])


def test_nan_stays_in_its_group_and_its_row_or_column():
    lhs, rhs = operands(72, 40, 24)
    sizes = np.array([20, 0, 11, 30])
    clean = np.array(traced(lhs, rhs, sizes).astype(F32))
    lhs = lhs.at[25, 3].set(jnp.nan).at[61:].set(jnp.nan)  # in group 2, and rows of no group
    rhs = rhs.at[30, 7].set(jnp.inf).at[61:].set(jnp.inf)
    out = np.asarray(traced(lhs, rhs, sizes).astype(F32))
    clean[2, 3, :] = np.nan
    np.testing.assert_array_equal(np.isnan(out), np.isnan(clean))
    assert np.isinf(np.delete(out[2, :, 7], 3)).all()
    clean[2, :, 7] = out[2, :, 7]
    np.testing.assert_array_equal(out, clean)


@pytest.mark.parametrize("spread", ["even", "skewed", "sparse"])
def test_spread_never_changes_the_answer(spread, assert_near):
    lhs, rhs = operands(24, 16, 8)
    wanted = ragged_contraction(lhs, rhs, [9, 11])
    assert_near(ragged_contraction(lhs, rhs, [9, 11], spread=spread), wanted, 1e-2)


# --- gradients


@pytest.mark.parametrize(("backend", "dtype"), [("xla", BF16), ("xla", F32), ("interpret", BF16)])
def test_gradients_are_those_of_plain_jax(backend, dtype, assert_near):
    arrays = operands(72, 40, 24, dtype)
    f = of_arrays(ragged_contraction, [30, 0, 33], backend=backend)
    plain = of_arrays(ragged.plain_contraction, [30, 0, 33])
    assert_same_gradients(f, plain, arrays, assert_near, 1e-5 if dtype == F32 else 1.5e-2)


def test_first_and_second_derivatives_agree_with_differences():
    with jax.enable_x64(True):
        f = jax.jit(of_arrays(ragged_contraction, [3, 0, 3]))
        check_grads(f, operands(7, 5, 3, "float64"), order=2, modes=["rev"], rtol=1e-3, atol=1e-3)


def test_rows_of_no_group_have_no_gradient():
    arrays = [x.at[31:].set(jnp.nan) for x in operands(40, 24, 16)]
    for x in gradients(of_arrays(ragged_contraction, [9, 0, 22]), arrays):
        assert np.isfinite(np.asarray(x, np.float32)).all()
        np.testing.assert_array_equal(x[31:], 0)


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_a_shards_groups_are_those_of_all(offset, assert_near):
    sizes = np.array([9, 0, 20, 11])
    lhs, rhs = operands(45, 24, 16)
    out = jax.jit(lambda o: ragged_contraction(lhs, rhs, sizes, group_offset=o, num_groups=2))(offset)
    assert_near(out, ragged_contraction(lhs, rhs, sizes)[offset : offset + 2], TOLERANCE[BF16])


def test_gradients_of_a_shard_are_zeros_in_other_shards_rows(assert_near):
    sizes, shard = np.array([9, 0, 20, 11]), {"group_offset": 1, "num_groups": 2}
    lhs, rhs = operands(45, 24, 16, dtype=F32)
    ours = gradients(lambda x, y: ragged_contraction(x, y, sizes, **shard), (lhs, rhs))
    plain = gradients(lambda x, y: ragged.plain_contraction(x, y, jnp.asarray(sizes))[1:3], (lhs, rhs))
    for x, y in zip(ours, plain, strict=True):
        assert_near(x, y, 1e-5)
        np.testing.assert_array_equal(x[:9], 0)
        np.testing.assert_array_equal(x[29:], 0)


def test_forward_mode_is_refused_rather_than_wrong():
    lhs, rhs = operands(8, 8, 8)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda lhs: ragged_contraction(lhs, rhs, [3, 5]), (lhs,), (lhs,))


# --- transforms

NAMES = ["lhs", "rhs", "sizes"]


def batched_arguments(batched: str) -> tuple[jax.Array, ...]:
    """Arguments of three calls; those that are not batched are the same in all."""
    arrays = (normal(0, 3, 24, 16), normal(1, 3, 24, 40), jnp.array([[5, 11], [0, 24], [3, 0]]))
    return tuple(x if name in batched else x[0] for x, name in zip(arrays, NAMES))


def stacked(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    each = lambda x, rank, i: np.asarray(x)[i] if np.ndim(x) > rank else x  # noqa: E731
    return np.stack([ragged.contraction(each(lhs, 2, i), each(rhs, 2, i), each(sizes, 1, i)) for i in range(3)])


@pytest.mark.parametrize("batched", ["lhs", "rhs", "sizes", "lhs rhs", "lhs rhs sizes"])
def test_vmap_maps_any_of_the_arguments(batched, assert_near):
    arrays = batched_arguments(batched)
    out = jax.vmap(ragged_contraction, [0 if name in batched else None for name in NAMES])(*arrays)
    assert_near(out, stacked(*arrays), TOLERANCE[BF16])


def test_vmap_over_other_axes_and_nested(assert_near):
    lhs, rhs, sizes = batched_arguments("lhs rhs sizes")
    inner = jax.vmap(ragged_contraction, (1, -1, None), 1)
    out = jax.vmap(inner, (None, None, 1))(jnp.moveaxis(lhs, 0, 1), jnp.moveaxis(rhs, 0, -1), sizes.T)
    wanted = np.stack([stacked(lhs, rhs, s) for s in sizes])
    assert_near(jnp.moveaxis(out, 2, 1), wanted, TOLERANCE[BF16])


def test_gradients_of_a_vmap(assert_near):
    lhs, rhs, sizes = batched_arguments("lhs sizes")
    mapped = lambda f: lambda lhs, rhs: jax.vmap(f, (0, None, 0))(lhs, rhs, sizes)  # noqa: E731
    arrays = (lhs.astype(F32), rhs.astype(F32))
    assert_same_gradients(mapped(ragged_contraction), mapped(ragged.plain_contraction), arrays, assert_near, 1e-5)


def test_scan_and_checkpoint_and_their_gradients(assert_near):
    lhs, rhs, sizes = (x.astype(F32) if x.dtype == BF16 else x for x in batched_arguments("lhs rhs sizes"))

    def summed(f: Any) -> Any:
        body = jax.checkpoint(lambda total, x: (jnp.tanh(total + f(*x)), None))
        return lambda lhs, rhs: jax.lax.scan(body, jnp.zeros((2, 16, 40)), (lhs, rhs, sizes))[0]

    ours, plain = summed(ragged_contraction), summed(ragged.plain_contraction)
    assert_same_gradients(ours, plain, (lhs, rhs), assert_near, 1e-4)


WIDE = replace(BASE, tile_m=128, tile_n=128, compute_warpgroups=2)
X, WHOLE, LAST = PartitionSpec("x"), PartitionSpec(), PartitionSpec(None, "x")
SHARDED = {  # in_specs, out_specs
    "experts": ((X, X, X), X),  # each device has its experts, and the rows that were sent to them
    "columns": ((WHOLE, LAST, WHOLE), PartitionSpec(None, None, "x")),
    "rows of the output": ((LAST, WHOLE, WHOLE), LAST),
}


@pytest.mark.parametrize("name", SHARDED)
def test_shard_map_and_its_gradients(name, assert_near):
    in_specs, out_specs = SHARDED[name]
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    ours = jax.jit(jax.shard_map(ragged_contraction, mesh=mesh, in_specs=in_specs, out_specs=out_specs))
    lhs, rhs = operands(64, 64, 32)
    sizes = jnp.array([3, 5, 0, 16, 1, 0, 7, 9])

    def plain(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
        if name != "experts":
            return ragged.plain_contraction(lhs, rhs, sizes)
        shards = [jnp.split(x, 4) for x in (lhs, rhs, sizes)]
        return jnp.concatenate([ragged.plain_contraction(*shard) for shard in zip(*shards)])

    assert_near(ours(lhs, rhs, sizes), plain(lhs.astype(F32), rhs.astype(F32), sizes), TOLERANCE[BF16])
    arrays = (lhs.astype(F32), rhs.astype(F32))
    assert_same_gradients(of_arrays(ours, sizes), of_arrays(plain, sizes), arrays, assert_near, 1e-5)


@pytest.mark.parametrize("schedule", SCHEDULES)
def test_the_kernel_of_every_schedule_can_be_traced_inside_shard_map(schedule):
    config = replace(WIDE, tile_n=256, epilogue_slots=2, schedule=schedule)
    product = functools.partial(ragged_contraction, config=config, backend="mosaic")
    mesh = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    shapes = jax.ShapeDtypeStruct((512, 256), BF16), jax.ShapeDtypeStruct((512, 512), BF16), jax.ShapeDtypeStruct((8,), "int32")
    with gpu.target("h200"):
        out = jax.eval_shape(jax.shard_map(product, mesh=mesh, in_specs=X, out_specs=X), *shapes)
    assert out.shape == (8, 256, 512)


# --- which config runs

P = RaggedContractionProblem


def test_config_that_cannot_run_raises_at_the_call_with_its_reason():
    lhs, rhs = operands(64, 64, 64)
    bad = replace(BASE, tile_m=96)
    with pytest.raises(ValueError, match=r"(?s)tile_m=96.*from argument cannot run .*m=64.*96"):
        ragged_contraction(lhs, rhs, [9, 11], config=bad, backend="interpret")
    with use_configs({"ragged_contraction": bad}), pytest.raises(ValueError, match=r"(?s)tile_m=96.*from override cannot run"):
        ragged_contraction(lhs, rhs, [9, 11], backend="interpret")


def test_explain_names_the_problem_the_config_and_where_it_is_from():
    problem = P(8192, 1536, 2048, 128, spread="skewed")
    with use_configs({"ragged_contraction": BASE}):
        text = mgpu_ops.explain("ragged_contraction", problem, gpu="h200")
    assert str(problem) in text
    assert str(BASE) in text
    assert "from      override" in text
    fields = {"m": 8192, "n": 1536, "k": 2048, "groups": 128, "spread": "skewed"}
    with use_configs({"ragged_contraction": BASE}):
        assert mgpu_ops.explain("ragged_contraction", fields, gpu="h200") == text


@pytest.mark.parametrize(
    ("problem", "message"),
    [
        ({"m": 1, "n": 8, "k": 8}, "is no ragged_contraction problem: it needs groups too"),
        ({"m": 1, "n": 8, "k": 8, "groups": 2, "bias": True}, "no bias: the fields are dtype, group_offset, groups"),
        (P(8, 8, 8, 2), "name one, e.g. gpu='h200'"),
    ],
)
def test_explain_says_what_is_wrong_with_its_arguments(problem, message):
    with pytest.raises(ValueError, match=message):
        mgpu_ops.explain("ragged_contraction", problem)


@pytest.mark.parametrize(
    ("problem", "handed_out"),
    [
        (P(65536, 2048, 768, 128, spread="skewed"), True),
        (P(65536, 2048, 768, 128, spread="even"), False),
        (P(41, 3184, 6944, 13, spread="skewed"), False),  # every tile takes one step
        (P(44, 7992, 12256, 14, spread="even"), True),  # rows begin within sectors, which tiles share
        (P(44, 8000, 12256, 14, spread="even"), False),
    ],
)
def test_by_default_tiles_are_handed_out_where_groups_are_very_unlike_or_stores_should_come_together(problem, handed_out):
    assert is_dynamic(SPEC.default(problem, H200)) == handed_out


@pytest.mark.parametrize("rows", [0, 8, 64, 4096])
def test_stores_are_not_deferred_by_the_model_where_groups_have_few_rows(rows):
    """They have too few steps to store another tile beside."""
    problem = P(max(16 * rows, 1), 2048, 2048, 16)
    static = replace(BASE, tile_m=128, tile_n=256, compute_warpgroups=2, max_concurrent_steps=4, epilogue_slots=2)
    costs = [SPEC.cost(problem, replace(static, schedule=schedule), H200) for schedule in ("static", "deferred")]
    assert (costs[1] < costs[0]) == (rows == 4096)


@pytest.mark.parametrize(("rows", "deferred"), [(41, False), (262, False), (4096, True)])
def test_of_skewed_groups_one_must_have_rows_enough_for_stores_to_be_deferred(rows, deferred):
    """41 rows in 13 groups took 175 us with stores deferred, without 168."""
    assert SPEC.default(P(rows, 3184, 6944, 13, spread="skewed"), H200).schedule.endswith("deferred") == deferred


# --- compiled, without a GPU


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(512, 192, 136, 4), None),
        (P(512, 256, 192, 4, "float16", "float32"), None),
        (P(512, 256, 256, 4), replace(WIDE, tile_k=128, epilogue_tile_n=128, schedule="dynamic")),
        (P(512, 256, 256, 4), replace(WIDE, tile_n=256, epilogue_slots=2, schedule="dynamic-deferred")),
    ],
    ids=[
        "default, tails",
        "default, float32",
        "two warpgroups, wide epilogue tiles, tiles handed out",
        "stores deferred, tiles handed out",
    ],
)
def test_kernel_compiles_without_spills_into_the_bytes_that_check_counts(problem, config):
    ragged.assert_compiles(SPEC, problem, config)


@needs_compiler
@pytest.mark.parametrize("n", [16136, 16128], ids=["columns that TMA clips", "whole swizzle rows"])
@pytest.mark.parametrize("tile_k", [64, 128])
def test_the_producer_of_tiles_of_64x256_has_registers_enough(n, tile_k):
    problem = P(1674, n, 272, 196, spread="even")
    tiles = [c for c in SPEC.candidates(problem, H200) if (c.tile_m, c.tile_n, c.tile_k) == (64, 256, tile_k)]
    ragged.assert_compiles(SPEC, problem, next(c for c in tiles if c.schedule == "dynamic"))


# --- errors: the value, the rule, the way out

S = jax.ShapeDtypeStruct
LHS, RHS, TWO = S((8, 16), BF16), S((8, 24), BF16), np.array([3, 5])


@pytest.mark.parametrize(
    ("lhs", "rhs", "sizes", "kwargs", "error", "message"),
    [
        (S((8,), BF16), RHS, TWO, {}, ValueError, r"lhs has shape \(8,\): ragged_contraction takes rank 2; use jax.vmap"),
        (LHS, S((2, 8, 8), BF16), TWO, {}, ValueError, r"rhs has shape \(2, 8, 8\): ragged_contraction takes rank 2"),
        (LHS, S((9, 24), BF16), TWO, {}, ValueError, r"lhs\(8, 16\) and rhs\(9, 24\) differ in rows: 8 != 9"),
        (LHS, S((8, 24), F16), TWO, {}, ValueError, "lhs is bfloat16 and rhs is float16: cast one with .astype"),
        (S((8, 16), "int32"), RHS, TWO, {}, TypeError, "lhs has dtype int32: ragged_contraction takes floats; cast it first"),
        (LHS, S((8, 24), bool), TWO, {}, TypeError, "rhs has dtype bool: ragged_contraction takes floats; cast it first"),
        (LHS, RHS, 8, {}, ValueError, r"group_sizes has shape \(\): ragged_contraction takes one size per group"),
        (LHS, RHS, [], {}, ValueError, r"group_sizes has shape \(0,\).*at least one"),
        (LHS, RHS, [3.0, 5.0], {}, TypeError, "group_sizes has dtype float64: it must hold integers; cast it"),
        (LHS, RHS, [4, -3], {}, ValueError, r"group_sizes\[1\]=-3 is negative: a group has 0 rows or more"),
        (LHS, RHS, [4, 5], {}, ValueError, "group_sizes sum to 9, more than the 8 rows of lhs"),
        (LHS, RHS, TWO, {"group_offset": 1}, ValueError, "group_offset=1 and num_groups=None: a shard.*takes both"),
        (LHS, RHS, TWO, {"num_groups": 1}, ValueError, "group_offset=None and num_groups=1: a shard.*takes both"),
        (LHS, RHS, TWO, {"group_offset": 0, "num_groups": 3}, ValueError, "num_groups=3 is not from 1 to the 2 groups"),
        (LHS, RHS, TWO, {"group_offset": 2, "num_groups": 1}, ValueError, "group_offset=2 is not from 0 to 1"),
        (LHS, RHS, TWO, {"spread": "wide"}, ValueError, "spread='wide' is not one of even, random, skewed, sparse"),
        (LHS, RHS, TWO, {"out_dtype": "int8"}, TypeError, "out_dtype int8 is not a float: cast the result instead"),
        (LHS, RHS, TWO, {"config": 64}, TypeError, "config is 64: pass a mgpu_ops.GroupedMatmulConfig"),
        (LHS, RHS, TWO, {"backend": "cuda"}, ValueError, "backend='cuda' is not one of mosaic, interpret, xla"),
        (LHS, RHS, TWO, {"backend": "mosaic"}, ValueError, "cannot run ragged_contraction.*no NVIDIA GPU is in use"),
        (
            LHS,
            S((8, 100), BF16),
            TWO,
            {"backend": "interpret"},
            ValueError,
            "n=100 needs 16-byte rows of rhs.*pad to 104 or pass backend='xla'",
        ),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(lhs, rhs, sizes, kwargs, error, message):
    lhs, rhs = (jnp.zeros(x.shape, x.dtype) for x in (lhs, rhs))
    with pytest.raises(error, match=f"(?s){message}"):
        ragged_contraction(lhs, rhs, sizes, **kwargs)


# --- supports and check


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (P(64, 64, 64, 2, "float32", "float32"), "dtype float32 is not one of bfloat16, float16: cast, or use backend='xla'"),
        (P(64, 64, 64, 2, "float16", "bfloat16"), "out_dtype bfloat16 is neither the inputs' float16 nor float32: cast the"),
        (P(64, 64, 64, 2, spread="wide"), "spread 'wide' is not one of even, random, skewed, sparse"),
        (P(0, 64, 64, 2), "a dimension of .*m=0.* is zero: there is nothing to compute"),
        (P(64, 64, 60, 2), "k=60 needs 16-byte rows of lhs .*: pad to 64 or pass backend='xla'"),
        (P(64, 60, 64, 2), "n=60 needs 16-byte rows of rhs .*: pad to 64 or pass backend='xla'"),
    ],
)
def test_supports_says_why_no_config_can_run(problem, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(SPEC.supports(problem, H200))
    with pytest.raises(ValueError, match=f"no config of ragged_contraction fits .*: {reason}"):
        SPEC.default(problem, H200)


def test_supports_refuses_other_architectures():
    assert "B200 is not a Hopper GPU: the kernel uses wgmma" in SPEC.supports(P(64, 64, 64, 2), gpu.find("b200"))


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (
            P(64, 128, 64, 2, out_dtype="float32"),
            replace(BASE, tile_n=96, epilogue_tile_n=32),
            "a warpgroup's 96 of tile_n=96 must be a multiple of 64, one swizzle row",
        ),
        (P(64, 128, 72, 2), replace(WIDE, wg_dimension="n"), "tile_m=128 must be at most k=72, which is no multiple of 64"),
        (
            P(64, 72, 128, 2),
            WIDE,
            "tile_n=128 must be at most n=72, which is no multiple of 64: TMA clips one swizzle row only",
        ),
        (
            P(64, 128, 200, 2),
            replace(WIDE, tile_m=256, tile_n=64),
            "tile_m=256 must be at most k=200, which is no multiple of 64",
        ),
        (
            P(64, 72, 128, 2, out_dtype="float32"),
            replace(WIDE, wg_dimension="n", tile_n=128, epilogue_tile_n=64, epilogue_slots=1),
            "epilogue_tile_n=64 must be 32 because k=128, n=72 are no multiples of 64, 32: TMA clips one swizzle row only",
        ),
        (
            P(64, 128, 200, 2),
            replace(WIDE, wg_dimension="n", tile_n=256, epilogue_tile_n=128),
            "epilogue_tile_n=128 must be 64 because k=200, n=128 are no multiples of 64, 64: TMA clips one swizzle row only",
        ),
        (P(64, 128, 128, 2), replace(WIDE, max_concurrent_steps=12), "bytes of shared memory exceed the 232448 of NVIDIA H200"),
        (P(64, 64, 64, 2), replace(BASE, tile_k=32), r"tile_k=32 is not one of \(64, 128\)"),
    ],
)
def test_check_says_why_a_config_cannot_run(problem, config, reason):
    with pytest.raises(ValueError, match=reason):
        raise ValueError(SPEC.check(problem, config, H200))


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(1, 8, 8, 256), BASE),
        (P(64, 72, 128, 2), replace(WIDE, tile_n=64)),
        (P(64, 128, 72, 2), WIDE),
        (P(64, 136, 200, 2), replace(WIDE, wg_dimension="n", tile_n=128)),
        (P(64, 136, 200, 2), WIDE),
        (P(64, 128, 128, 2), replace(WIDE, epilogue_tile_n=128)),
    ],
    ids=str,
)
def test_check_allows_what_tma_clips(problem, config):
    assert SPEC.check(problem, config, H200) is None
