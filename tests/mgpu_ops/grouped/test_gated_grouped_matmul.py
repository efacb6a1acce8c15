"""gated_grouped_matmul: values and gradients beside float64, its kernels interpreted and compiled, transforms, errors."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.test_util import check_grads

import mgpu_ops
from mgpu_ops import GatedGroupedMatmulProblem, gated_grouped_matmul
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.gated.problem import smem_bytes
from tests import thorough
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE, BF16, F16, F32, gradients, needs_compiler, normal
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter

SPEC = mgpu_ops.spec_of("gated_grouped_matmul")
P = GatedGroupedMatmulProblem
H200 = gpu.find("h200")
TOLERANCE = {BF16: 8e-3, F16: 1e-3, F32: 1e-4}
pytestmark = pytest.mark.usefixtures("no_races")


def operands(m: int, n: int, k: int, groups: int, dtype: Any = BF16, transpose_w: bool = False) -> tuple[jax.Array, ...]:
    shape = (groups, n, k) if transpose_w else (groups, k, n)
    gate, up = (normal(seed, *shape, dtype=dtype) / np.sqrt(k).astype(dtype) for seed in (1, 2))
    return normal(0, m, k, dtype=dtype), gate, up


def truth(
    lhs: Any, gate: Any, up: Any, sizes: Any, *, activation: str = "silu", transpose_w: bool = False, start: int = 0
) -> np.ndarray:
    of = functools.partial(ragged.grouped, start=start, transpose_rhs=transpose_w)
    return ragged.ACTIVATIONS[activation](of(lhs, gate, sizes)) * of(lhs, up, sizes)


# --- values


@pytest.mark.parametrize("transpose_w", [False, True])
@pytest.mark.parametrize("sizes", [[30, 0, 41, 1], [5, 9, 2, 0], [0, 0, 72, 0]], ids=str)
def test_each_group_of_rows_goes_through_its_own_gated_layer(sizes, transpose_w, assert_near):
    lhs, gate, up = operands(72, 40, 24, 4, transpose_w=transpose_w)
    lhs = lhs.at[sum(sizes) :].set(jnp.nan)
    out = gated_grouped_matmul(lhs, gate, up, sizes, transpose_w=transpose_w)
    assert out.dtype == BF16
    assert_near(out, truth(lhs, gate, up, sizes, transpose_w=transpose_w), TOLERANCE[BF16])
    np.testing.assert_array_equal(out[sum(sizes) :], 0)


@pytest.mark.parametrize("activation", ["none", None, "relu", "silu", "gelu", "gelu_erf"])
def test_activation_is_applied_to_the_gate(activation, assert_near):
    lhs, gate, up = operands(40, 24, 16, 2)
    out = gated_grouped_matmul(lhs, gate, up, [19, 21], activation=activation, out_dtype=F32)
    assert_near(out, truth(lhs, gate, up, [19, 21], activation=activation or "none"), TOLERANCE[F32])


@pytest.mark.parametrize("offset", [0, 1, 2])
def test_group_offset_takes_a_shards_groups(offset, assert_near):
    lhs, gate, up = operands(72, 40, 24, 2)
    sizes = np.array([20, 12, 0, 30])
    out = jax.jit(lambda o: gated_grouped_matmul(lhs, gate, up, sizes, group_offset=o))(offset)
    wanted = truth(lhs, gate, up, sizes[offset : offset + 2], start=sizes[:offset].sum())
    assert_near(out, wanted, TOLERANCE[BF16])


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_row_indices_take_rows_in_any_order_as_often_as_named(backend, assert_near):
    lhs, gate, up = operands(24, 40, 24, 3)
    indices = np.random.default_rng(0).integers(0, 24, 72)
    lhs = lhs.at[5].set(jnp.nan)
    indices[indices == 5] = 6
    out = gated_grouped_matmul(lhs, gate, up, [30, 0, 41], row_indices=indices, backend=backend)
    assert_near(out, truth(np.nan_to_num(lhs)[indices], gate, up, [30, 0, 41]), TOLERANCE[BF16])
    np.testing.assert_array_equal(out[71:], 0)


@pytest.mark.parametrize("dtype", ["int8", "uint32", "int64"])
def test_traced_indices_of_no_row_count_as_the_nearest(dtype):
    lhs, gate, up = operands(8, 16, 16, 2)
    low, high = jnp.iinfo(dtype).min, jnp.iinfo(dtype).max
    with jax.enable_x64(dtype == "int64"):
        indices = np.array([low, 0, 3, 7, high, 100], dtype)
        out = jax.jit(lambda i: gated_grouped_matmul(lhs, gate, up, [2, 4], row_indices=i))(indices)
    wanted = gated_grouped_matmul(lhs, gate, up, [2, 4], row_indices=[0, 0, 3, 7, 7, 7])
    np.testing.assert_array_equal(out, wanted)


@pytest.mark.parametrize("shape", [(0, 8, 8), (8, 0, 8), (8, 8, 0)], ids=str)
def test_dimensions_of_zero(shape):
    m, n, k = shape
    lhs, matrices = jnp.ones((m, k), BF16), [jnp.ones((2, k, n), BF16)] * 2
    np.testing.assert_array_equal(gated_grouped_matmul(lhs, *matrices, [m // 2, 0]), np.zeros((m, n)))
    for indices in (np.arange(m), np.zeros(0, int)):
        out = gated_grouped_matmul(lhs, *matrices, [len(indices) // 2, 0], row_indices=indices)
        np.testing.assert_array_equal(out, np.zeros((len(indices), n)))


def test_nan_stays_in_its_rows_and_in_its_group():
    lhs, gate, up = operands(24, 16, 8, 3)
    clean = gated_grouped_matmul(lhs, gate, up, [8, 9, 7])
    out = gated_grouped_matmul(lhs, gate, up.at[1].set(jnp.nan), [8, 9, 7])
    assert np.isnan(out[8:17]).all()
    np.testing.assert_array_equal(np.delete(out, range(8, 17), 0), np.delete(clean, range(8, 17), 0))


# --- gradients


def plain(sizes: Any, lhs: Any, gate: Any, up: Any, *, activation: str, **kwargs: Any) -> jax.Array:
    of = functools.partial(ragged.plain_grouped, lhs, sizes=jnp.asarray(sizes), **kwargs)
    return of(gate, activation=activation) * of(up)


CASES = {
    "silu": {},
    "gelu, transposed": {"activation": "gelu", "transpose_w": True},
    "bilinear, shard": {"activation": "none", "group_offset": 1},
    "gathered rows": {"row_indices": np.random.default_rng(0).integers(0, 40, 72)},
}


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", thorough.cases(CASES, ["gelu, transposed", "bilinear, shard", "gathered rows"]))
def test_gradients_are_those_of_plain_jax(name, backend, assert_near):
    kwargs = {"activation": "silu", **CASES[name]}
    arrays = operands(72, 40, 24, 3, transpose_w="transpose_w" in kwargs)
    sizes = [7, 30, 0, 31, 4] if "group_offset" in kwargs else [30, 0, 33]
    if (indices := kwargs.get("row_indices")) is not None:
        arrays = arrays[0][:40], *arrays[1:]
    ours = gradients(lambda *a: gated_grouped_matmul(*a, sizes, backend=backend, **kwargs), arrays)
    kwargs.pop("row_indices", None)
    kwargs["transpose_rhs"] = kwargs.pop("transpose_w", False)
    take = (lambda x: x) if indices is None else (lambda x: x[indices])
    of_plain = lambda lhs, *w: plain(sizes, take(lhs), *w, **kwargs)  # noqa: E731
    wanted = gradients(of_plain, tuple(x.astype(F32) for x in arrays))
    for x, y, argument in zip(ours, wanted, arrays, strict=True):
        assert x.dtype == argument.dtype
        assert_near(x, y, 2e-2)  # the cotangent and both gradients in between are rounded to bfloat16


def test_first_and_second_derivatives_agree_with_differences():
    with jax.enable_x64(True):
        arrays = operands(7, 5, 3, 3, "float64")
        f = jax.jit(lambda *a: gated_grouped_matmul(*a, jnp.array([3, 0, 3]), activation="gelu"))
        check_grads(f, arrays, order=1, modes=["rev"], rtol=1e-3, atol=1e-3)


def test_rows_of_no_group_have_no_gradient_whatever_they_and_their_cotangents_are():
    lhs, gate, up = operands(40, 24, 16, 3)
    lhs = lhs.at[31:].set(jnp.nan)
    cotangent = jnp.ones((40, 24), BF16).at[31:].set(jnp.nan)
    grads = jax.vjp(lambda *a: gated_grouped_matmul(*a, [9, 0, 22]), lhs, gate, up)[1](cotangent)
    assert all(np.isfinite(np.asarray(x, np.float32)).all() for x in grads)
    np.testing.assert_array_equal(grads[0][31:], 0)
    np.testing.assert_array_equal(grads[1][1], 0)


def test_vmap_scan_and_checkpoint(assert_near):
    x, gate, up = normal(0, 24, 16, dtype=F32), *(normal(s, 2, 3, 16, 16, dtype=F32) / 4 for s in (1, 2))
    sizes = jnp.array([[9, 0, 15], [8, 8, 7]])

    def layers(x: jax.Array, gate: jax.Array, up: jax.Array, *, wrap: Any = lambda f: f) -> jax.Array:
        body = wrap(lambda x, layer: (x + gated_grouped_matmul(x, *layer), None))
        return jax.lax.scan(body, x, (gate, up, sizes))[0]

    saved, again = (gradients(functools.partial(layers, wrap=f), (x, gate, up)) for f in (lambda f: f, jax.checkpoint))
    jax.tree.map(np.testing.assert_array_equal, saved, again)
    mapped = jax.vmap(gated_grouped_matmul, (None, 0, 0, 0))(x, gate, up, sizes)
    for i in range(2):
        assert_near(mapped[i], gated_grouped_matmul(x, gate[i], up[i], sizes[i]), 1e-6)
    dx = jax.grad(lambda x: jax.vmap(gated_grouped_matmul, (None, 0, 0, 0))(x, gate, up, sizes).sum())(x)
    wanted = sum(jax.grad(lambda x: gated_grouped_matmul(x, gate[i], up[i], sizes[i]).sum())(x) for i in range(2))  # noqa: B023
    assert_near(dx, wanted, 1e-5)


# --- the kernels, interpreted

TWO = replace(BASE, tile_m=128, compute_warpgroups=2)
HALVES = replace(BASE, tile_n=128, compute_warpgroups=2, wg_dimension="n")
ODD, WILD, SHARD = (33, 0, 71, 1), (-7, 40, 2**31 - 1, 5), (33, 1, 0, 71)
INTERPRETED: dict[str, tuple[Any, Any, Any]] = {
    "tails in m, n and k": (P(150, 72, 72, 4), BASE, (ODD, WILD, (0, 0, 0, 0))),
    "rows shared, gelu, float32 out": (
        P(150, 72, 72, 4, out_dtype="float32", activation="gelu"),
        replace(TWO, epilogue_tile_n=32),
        (ODD,),
    ),
    "columns shared, steps of 128, transposed, shard": (
        P(150, 192, 128, 3, layout="nt", group_offset=True),
        replace(HALVES, tile_k=128),
        (SHARD,),
    ),
    "kept, rows shared, two epilogue tiles, two buffers": (
        P(150, 192, 72, 4, keep=True),
        replace(TWO, tile_n=128, epilogue_slots=2),
        (ODD, WILD),
    ),
    "kept, short tiles": (
        P(150, 200, 136, 4, keep=True),
        replace(TWO, tile_n=128, schedule="dynamic", short_tiles=True),
        (ODD, WILD, (1, 129, 0, 20)),
    ),
    "short tiles, rows gathered": (
        P(150, 128, 72, 4, lhs_rows=37),
        replace(TWO, tile_n=128, epilogue_slots=2, schedule="dynamic", short_tiles=True),
        (ODD,),
    ),
    "rows gathered, tails": (P(150, 72, 72, 4, lhs_rows=37), BASE, (ODD, WILD, (0, 0, 0, 0))),
    "rows gathered, kept, shard, steps of 128, more rows than are named": (
        P(150, 64, 128, 3, layout="nt", group_offset=True, keep=True, lhs_rows=200),
        replace(TWO, tile_k=128),
        (SHARD,),
    ),
    "gradient, tails": (P(150, 72, 72, 4, gradient=True), BASE, (ODD, WILD)),
    "gradient, rows shared, two epilogue tiles, one buffer": (
        P(150, 128, 136, 4, gradient=True, activation="relu"),
        replace(TWO, tile_n=128),
        (ODD,),
    ),
    "gradient, columns shared, transposed, shard, float16": (
        P(150, 192, 128, 3, "float16", "float16", "nt", gradient=True, group_offset=True),
        replace(HALVES, max_concurrent_steps=3),
        (SHARD,),
    ),
}


@pytest.mark.parametrize(
    "name",
    thorough.cases(
        INTERPRETED,
        [
            "rows shared, gelu, float32 out",
            "short tiles, rows gathered",
            "gradient, rows shared, two epilogue tiles, one buffer",
            "rows gathered, kept, shard, steps of 128, more rows than are named",
        ],
    ),
)
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_near):
    problem, config, all_sizes = INTERPRETED[name]
    p = problem
    assert SPEC.check(p, config, FEW_SMS) is None
    clean, gate, up, _, *further = (np.asarray(x) for x in SPEC.inputs(p, jax.random.key(0)))
    run = jax.jit(functools.partial(SPEC.run, p, config, FEW_SMS, interpret=True))
    for sizes in all_sizes:
        spans = ragged.spans_of(p, sizes)
        row = np.arange(p.m)
        outside = (row < spans[0].start) | (row >= spans[-1].stop)
        unread = ~np.isin(np.arange(p.lhs_rows), further[0][~outside]) if p.lhs_rows else outside
        lhs = np.where(unread[:, None], np.nan, clean).astype(clean.dtype)
        g = further if p.lhs_rows else [np.where(outside[:, None], np.nan, x).astype(x.dtype) for x in further]
        with quiet_interpreter():
            outs = run(lhs, gate, up, np.array(sizes, np.int32), *g)
        assert not engine.races_found()
        wanted = SPEC.reference(p, *map(jnp.asarray, (lhs, gate, up, np.array(sizes, np.int32), *g)))
        for out, value in zip(jax.tree.leaves(outs), jax.tree.leaves(wanted), strict=True):
            assert out.dtype == p.out_dtype
            np.testing.assert_array_equal(np.asarray(out)[outside], 0)
            assert_near(out, value, SPEC.tolerance(p)) if np.asarray(value).any() else np.testing.assert_array_equal(out, 0)


@needs_compiler
@pytest.mark.parametrize(
    "results",
    [{}, {"gradient": True}, {"keep": True}, {"keep": True, "lhs_rows": 2048}],
    ids=["result", "gradients", "kept", "gathered"],
)
@pytest.mark.parametrize("layout", thorough.cases(["nn", "nt"], ["nn"]))
def test_default_compiles_without_spills_into_the_bytes_that_check_counts(results, layout):
    problem = P(8192, 1280, 2560, 8, layout=layout, **results)
    config = SPEC.default(problem, H200)
    arrays = jax.eval_shape(functools.partial(SPEC.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(SPEC.run, problem, config, H200), *arrays)
    assert report.smem_bytes == smem_bytes(problem, config)
    assert report.spills == 0


# --- errors

LHS, RHS = jnp.ones((8, 16), BF16), jnp.ones((2, 16, 8), BF16)


@pytest.mark.parametrize(
    ("arrays", "kwargs", "error", "message"),
    [
        ((LHS, RHS, RHS[:1], [3, 5]), {}, ValueError, r"w_gate\(2, 16, 8\) and w_up\(1, 16, 8\) differ"),
        ((LHS, RHS, RHS.astype(F16), [3, 5]), {}, ValueError, "lhs is bfloat16 and w_up is float16: cast one"),
        ((LHS, RHS, RHS[0], [3, 5]), {}, ValueError, r"w_up has shape \(16, 8\): gated_grouped_matmul takes rank 3"),
        ((LHS, RHS, RHS, [3, 5]), {"transpose_w": True}, ValueError, r"differ in k: 16 != 8 \(transpose_w=True\)"),
        ((LHS, RHS, RHS, [3, 5, 1]), {}, ValueError, "group_sizes has 3 entries but w_gate has 2 groups"),
        (
            (LHS, RHS, RHS, [3, 5]),
            {"group_offset": 1},
            ValueError,
            "group_offset=1 is not from 0 to 0: group_sizes has 2 groups, of which w_gate has 2",
        ),
        (
            (LHS, RHS, RHS, [3, 5]),
            {"row_indices": [0, 1, 8, 2, -1]},
            ValueError,
            r"row_indices\[2\]=8 is not from 0 to 7: lhs has 8 rows",
        ),
        ((LHS, RHS, RHS, [1, 1]), {"row_indices": [[0, 1]]}, ValueError, r"row_indices has shape \(1, 2\): it is \[m\]"),
        (
            (LHS, RHS, RHS, [1, 1]),
            {"row_indices": [0.0, 1.0]},
            TypeError,
            "row_indices has dtype float64: it must hold integers",
        ),
        ((LHS[:0], RHS, RHS, [0, 0]), {"row_indices": [0]}, ValueError, "row_indices has 1 entries, but lhs has no rows"),
        ((LHS, RHS, RHS, [3, 5]), {"row_indices": [0, 1]}, ValueError, "group_sizes sum to 8, more than the 2 rows"),
        ((LHS, RHS, RHS, [3, 5]), {"activation": "swish"}, ValueError, "activation='swish' is not one of"),
        ((LHS, RHS, RHS, [3, 5]), {"config": 3}, TypeError, "config is 3: pass a mgpu_ops.GroupedMatmulConfig"),
        ((LHS, RHS, RHS, [3, 5]), {"backend": "mosaic"}, ValueError, "cannot run gated_grouped_matmul.*no NVIDIA GPU"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(arrays, kwargs, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        gated_grouped_matmul(*arrays, **kwargs)


def test_check_counts_both_accumulators():
    config = replace(BASE, tile_m=128, tile_n=256, compute_warpgroups=2)
    assert "accumulator takes 256 registers" in str(SPEC.check(P(512, 256, 256, 4), config, H200))
    assert SPEC.check(P(512, 256, 256, 4), replace(config, tile_n=128), H200) is None


def test_check_counts_the_places_of_rows_by_index():
    config = replace(BASE, memory_registers=24)
    assert SPEC.check(P(512, 256, 256, 4), config, H200) is None
    reason = SPEC.check(P(512, 256, 256, 4, lhs_rows=64), config, H200)
    assert reason == "memory_registers=24 must be at least 40 where 64 rows come by index"


@needs_compiler
def test_gradients_through_xla_compile_for_a_gpu_where_the_sizes_are_known():
    """XLA runs a loop to find out how often it turns, where it can, and failed in this one."""
    sizes = np.array([100, 0, 33, 250, 1], np.int32)
    arrays = [jax.ShapeDtypeStruct(s, BF16) for s in ((600, 136), (5, 136, 264), (5, 136, 264))]
    loss = lambda *a: gated_grouped_matmul(*a, sizes, backend="xla").astype(F32).sum()  # noqa: E731
    aot.compile_for(H200, jax.grad(loss, (0, 1, 2)), *arrays)
