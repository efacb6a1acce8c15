"""quantized_grouped_matmul: values, gradients, transforms, the kernel interpreted on every schedule, compiled for an H200."""

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
from mgpu_ops import QuantizedGroupedMatmulProblem as P
from mgpu_ops import QuantizedMatmulConfig, quantized_grouped_matmul, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.sizes import of_shard
from mgpu_ops.matmul.quantized import smem_bytes
from tests import thorough
from tests.arrays import normal
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter
from tests.mgpu_ops.matmul.test_quantized_matmul import BASE, BASE4, SHARED_K, X4, overwritten, wide

OP, H200 = spec_of("quantized_grouped_matmul"), gpu.find("h200")
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


def arrays_of(problem: P, sizes: Any = None) -> list[Any]:
    """Random arrays, with these sizes where given; of a shard, with the groups' first row before them."""
    x, w, scales, drawn, *zero_points = OP.inputs(problem, jax.random.key(0))
    return [x, w, scales, drawn if sizes is None else jnp.array(sizes, jnp.int32), *zero_points]


def matrices(problem: P, w: Any, scales: Any, *zero_points: Any) -> np.ndarray:
    """The dequantised weights [groups, k, n] in float64."""
    values = wide(w) if problem.layout == "nn" else wide(w).swapaxes(1, 2)
    each = (
        np.repeat(wide(a), problem.group_size, 1) if problem.group_size else wide(a)[:, None] for a in (scales, *zero_points)
    )
    scale, *zero = each
    found: np.ndarray = (values - (zero[0] if zero else 0.0)) * scale
    return found


def truth(problem: P, x: Any, w: Any, scales: Any, sizes: Any, *zero_points: Any) -> np.ndarray:
    """The result in float64; zeros for rows of no group."""
    start, *sizes = np.asarray(sizes) if problem.group_offset else (0, *np.asarray(sizes))
    return ragged.grouped(wide(x), matrices(problem, w, scales, *zero_points), sizes, start=int(start))


# --- the kernel, interpreted


def interpret(problem: P, config: QuantizedMatmulConfig, arrays: Any) -> Any:
    assert OP.check(problem, config, FEW_SMS) is None
    with quiet_interpreter():
        out = jax.jit(functools.partial(OP.run, problem, config, FEW_SMS, interpret=True))(*arrays)
        return jax.block_until_ready(out)


CASES: dict[str, tuple[P, QuantizedMatmulConfig, list[int]]] = {
    "columns, tails of all sides, empty groups, rows of none": (P(29, 72, 272, groups=3), BASE, [5, 0, 18]),
    "columns with zero points, int4, float16, negative and too large sizes": (
        P(40, 136, 256, "int4", 0, True, "float16", "float16", groups=3),
        BASE4,
        [-3, 17, 2**31 - 1],
    ),
    "groups of 128, warpgroups share n, several tiles of rows": (
        P(45, 128, 384, group_size=128, groups=2),
        replace(BASE, tile_n=128, compute_warpgroups=2, max_concurrent_steps=3),
        [34, 9],
    ),
    "groups of 64 with zero points, warpgroups share k, a shard": (
        P(45, 136, 512, "int8", 64, True, groups=3, group_offset=True),
        SHARED_K,
        [7, 3, 0, 18],
    ),
    "float32, groups of 32, int4": (
        P(29, 128, 256, "int4", 32, out_dtype="float32", scale_dtype="float32", groups=3),
        replace(BASE4, tile_n=128),
        [9, 1, 12],
    ),
    "x in order, int4, groups of 128, zero points": (
        P(29, 72, 512, "int4", 128, True, groups=3),
        replace(X4, max_concurrent_steps=3),
        [9, 0, 18],
    ),
    "x in order, steps in turn, an odd number of steps": (
        P(29, 128, 640, "int8", 64, groups=3),
        replace(BASE, exchange="x", compute_warpgroups=2, wg_dimension="steps", max_concurrent_steps=4),
        [5, 0, 18],
    ),
    "x in order, columns, all groups empty": (P(13, 136, 128, groups=2), replace(BASE, exchange="x"), [0, 0]),
}
IN_ALL = CASES.keys() - {
    "columns, tails of all sides, empty groups, rows of none",
    "x in order, int4, groups of 128, zero points",
}


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_reads_no_other_rows_and_has_no_race(name, assert_near):
    problem, config, sizes = CASES[name]
    arrays = arrays_of(problem, sizes)
    nowhere = ragged.rest(problem, sizes)
    arrays[0] = arrays[0].at[jnp.asarray(nowhere)].set(jnp.nan)
    out = np.asarray(interpret(problem, config, arrays)).astype(np.float64)
    rounding = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 2e-6}[problem.out_dtype]  # one, of the output
    assert (out[nowhere] == 0).all()
    if not nowhere.all():
        assert_near(out[~nowhere], truth(problem, *arrays)[~nowhere], rounding)
    assert not engine.races_found()


# --- the kernel, compiled

COMPILED: dict[str, tuple[P, QuantizedMatmulConfig | None]] = {
    **{name: (OP.shapes[name], None) for name in ("deepseek-v3-ep8-gate_up-16-random-w8", "qwen3-235b-gate_up-256-random-w4")},
    **{name: case[:2] for name, case in CASES.items()},
}
COMPILED_IN_ALL = {*COMPILED} - {"qwen3-235b-gate_up-256-random-w4"}


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


@needs_compiler
@pytest.mark.parametrize(
    "other", [{}, {"group_offset": True}, {"group_size": 32}], ids=["all groups", "a shard", "groups of 32"]
)
def test_the_default_of_8_rows_and_long_steps_of_int4_by_group_spills_nothing(other):
    problem = replace(OP.shapes["mixtral-8x7b-gate_up-16-random-w4"], **other)
    config = OP.default(problem, H200)
    assert (config.tile_m, config.tile_k, config.compute_warpgroups) == (8, 512, 4)
    arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(OP.run, problem, config, H200), *arrays)
    assert (report.spills, report.serialized) == (0, "")


# --- the function


def experts(dtype: Any = BF16, w_dtype: str = "int8", group_size: int = 32, k: int = 64, n: int = 24) -> list[Any]:
    """x [10, k], w [3, n, k], scales, sizes of which one is 0, and zero points."""
    problem = P(10, n, k, w_dtype, group_size, True, scale_dtype="float32", groups=3)
    _, *others = arrays_of(problem, [4, 0, 5])
    return [normal(0, 10, k, dtype=dtype), *others]


@pytest.mark.parametrize("w_dtype", ["int8", "int4"])
def test_weights_are_read_in_either_order_and_scales_are_not_transposed(w_dtype, assert_near):
    x, w, *others = experts(w_dtype=w_dtype)
    stored = quantized_grouped_matmul(x, w, *others, transpose_rhs=True)
    assert stored.dtype == BF16
    assert_near(stored, truth(P(10, 24, 64, w_dtype, 32, groups=3), x, w, *others), 4e-3)
    assert (stored == quantized_grouped_matmul(x, w.astype(jnp.int8).mT.astype(w.dtype), *others)).all()


@pytest.mark.parametrize("shape", [(3, 24), (3, 1, 24)])
def test_one_scale_a_column_needs_no_groups_along_k(shape, assert_near):
    x, w, scales, sizes, zero_points = experts()
    first, zero = (a[:, 0].reshape(shape) for a in (scales, zero_points))
    out = quantized_grouped_matmul(x, w, first, sizes, zero, transpose_rhs=True, out_dtype=F32)
    assert out.dtype == F32
    problem = P(10, 24, 64, groups=3)
    assert_near(out, truth(problem, x, w, scales[:, 0], sizes, zero_points[:, 0]), 1e-6)


def test_a_shard_computes_its_part_of_all_groups():
    x, w, scales, sizes, zero_points = experts()
    every = quantized_grouped_matmul(x, w, scales, sizes, zero_points, transpose_rhs=True)
    parts = [
        quantized_grouped_matmul(
            x, w[g : g + 1], scales[g : g + 1], sizes, zero_points[g : g + 1], group_offset=g, transpose_rhs=True
        )
        for g in range(3)
    ]
    assert (sum(parts) == every).all()


@thorough.only_in_all
def test_the_reference_of_a_shard_starts_where_the_sizes_say(assert_near):
    problem = P(45, 136, 512, "int8", 64, True, groups=2, group_offset=True)
    arrays = arrays_of(problem)
    arrays[3] = of_shard(jnp.array([7, 3, 20]), 45, jnp.int32(1), 2)
    assert_near(jax.jit(functools.partial(OP.reference, problem))(*arrays), truth(problem, *arrays), 4e-3)


def test_gradient_of_lhs_is_that_of_the_weights_as_floats(assert_near):
    x, w, scales, sizes, zero_points = experts(F32)
    f = functools.partial(quantized_grouped_matmul, transpose_rhs=True)
    g = normal(3, 10, 24, dtype=F32)
    (dx,) = jax.vjp(lambda x: f(x, w, scales, sizes, zero_points), x)[1](g)
    floats = matrices(P(10, 24, 64, group_size=32, groups=3), w, scales, zero_points)
    assert_near(dx, ragged.grouped(g, floats, sizes, transpose_rhs=True), 1e-5)


@pytest.mark.parametrize("which", [2, 4])
def test_gradients_of_scales_and_zero_points_are_refused_and_constants_are_not(which):
    arrays = experts()

    def loss(x: Any, hold: bool) -> Any:
        scaled = [*arrays]
        scaled[which] = jax.lax.stop_gradient(x) if hold else x
        return quantized_grouped_matmul(*scaled, transpose_rhs=True, out_dtype=F32).sum()

    with pytest.raises(ValueError, match="no gradient of scales or zero points: hold them constant"):
        jax.grad(loss)(arrays[which], False)
    assert not jax.grad(loss)(arrays[which], True).any()


@thorough.only_in_all
@pytest.mark.parametrize("in_axes", [(0, None, None, None), (0, 0, 0, 0), (None, None, None, 0)])
def test_vmap_is_the_product_of_each(in_axes):
    arrays = experts()[:4]
    mapped = [a if axis is None else jnp.stack([a, a[::-1]]) for a, axis in zip(arrays, in_axes)]
    f = functools.partial(quantized_grouped_matmul, transpose_rhs=True)
    out = jax.vmap(f, in_axes)(*mapped)
    for i in range(2):
        assert (out[i] == f(*(a if axis is None else a[i] for a, axis in zip(mapped, in_axes)))).all()


@thorough.only_in_all
def test_it_runs_in_shard_map_over_the_groups():
    """Expert parallel: each device has some of the experts, and the sum over devices has the rows of all."""
    mesh = jax.make_mesh((3,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    x, w, scales, sizes, _ = experts()
    part, whole = PartitionSpec("d"), PartitionSpec()

    def shard(x: Any, w: Any, scales: Any, sizes: Any) -> Any:
        offset = jax.lax.axis_index("d")
        return jax.lax.psum(quantized_grouped_matmul(x, w, scales, sizes, group_offset=offset, transpose_rhs=True), "d")

    sharded = jax.shard_map(shard, mesh=mesh, in_specs=(whole, part, part, whole), out_specs=whole)
    assert (sharded(x, w, scales, sizes) == quantized_grouped_matmul(x, w, scales, sizes, transpose_rhs=True)).all()


X, W, S, G = jnp.ones((4, 64), BF16), jnp.ones((3, 64, 24), jnp.int8), jnp.ones((3, 2, 24), F32), np.array([1, 2, 0])


@pytest.mark.parametrize(
    ("arrays", "options", "error", "text"),
    [
        ((X, W.astype(BF16), S, G), {}, TypeError, r"rhs has dtype bfloat16: .*mgpu_ops.grouped_matmul takes floats"),
        ((X.astype(jnp.int8), W, S, G), {}, TypeError, "lhs has dtype int8: quantized_grouped_matmul takes floats"),
        ((X, W, S.astype(jnp.int32), G), {}, TypeError, "scales has dtype int32"),
        ((X, W[0], S, G), {}, ValueError, r"lhs has shape \(4, 64\) and rhs \(64, 24\): .*use jax.vmap"),
        ((X, W, S, G), {"transpose_rhs": True}, ValueError, r"differ in k: 64 != 24 \(transpose_rhs=True\)"),
        ((X, W, S[..., :8], G), {}, ValueError, r"scales has shape \(3, 2, 8\): for 3 groups, k=64 and n=24"),
        ((X, W, jnp.ones((3, 3, 24)), G), {}, ValueError, "a size that divides k"),
        ((X, W, S, G, S[0]), {}, ValueError, r"zero_points has shape \(2, 24\) and scales \(3, 2, 24\)"),
        ((X, W, S, G[:2]), {}, ValueError, "group_sizes has 2 entries but rhs has 3 groups"),
        ((X, W, S, G * 2), {}, ValueError, "sum to 6, more than the 4 rows"),
        ((X, W, S, -G), {}, ValueError, r"group_sizes\[1\]=-2 is negative"),
        ((X, W, S, G), {"group_offset": 1}, ValueError, "group_offset=1 is not from 0 to 0"),
        ((X, W, S, G), {"spread": "wide"}, ValueError, "spread='wide' is not one of"),
        ((X, W, S, G), {"config": BASE, "backend": "interpret"}, ValueError, r"\(transpose_rhs=True\)"),
        ((X, W, S, G), {"config": {"tile_m": 16}}, TypeError, "pass a mgpu_ops.QuantizedMatmulConfig"),
        ((X, W, S, G), {"out_dtype": "int8"}, TypeError, "out_dtype int8 is not a float"),
    ],
)
def test_what_no_call_can_be_is_told(arrays, options, error, text):
    with pytest.raises(error, match=text):
        quantized_grouped_matmul(*arrays, **options)


@pytest.mark.parametrize(
    ("problem", "text"),
    [
        (P(16, 128, 256, layout="nn", groups=2), r"store them once as \[n, k\] \(transpose_rhs=True\)"),
        (P(16, 128, 264, groups=2), "k=264 needs 16-byte rows of the weights"),
        (P(13, 136, 256, out_dtype="float32", groups=2), "n=136 columns in float32 are no multiple of 64"),
        (P(2**28, 128, 256, groups=2), "rows are more than 268435200"),
        (P(2**27, 2**20, 256, groups=2), "split the groups"),
    ],
)
def test_what_the_kernel_cannot_run_is_told(problem, text):
    reason = OP.supports(problem, H200)
    assert reason is not None
    assert re.search(text, reason), reason
    assert "backend='xla'" in reason


@pytest.mark.parametrize("w_dtype", ["int8", "int4"])
@pytest.mark.parametrize("group_size", [0, 32, 128])
@pytest.mark.parametrize("rows", [1, 40, 300, 70000])
def test_any_number_of_rows_has_a_config(rows, group_size, w_dtype):
    problem = P(rows, 1032, 1152, w_dtype, group_size, True, groups=16)
    assert OP.check(problem, OP.default(problem, H200), H200) is None


def test_clusters_are_refused():
    reason = OP.check(P(16, 256, 256, groups=2), replace(BASE, cluster="n"), H200)
    assert "cluster='n' must be 'none'" in reason


def test_only_groups_with_rows_count_as_read():
    few, many = (mgpu_ops.spec_of("quantized_grouped_matmul").bytes(P(m, 128, 256, groups=8)) for m in (1, 8))
    assert many - few == 7 * (128 * 256 + 128 * 2 + 256 * 2 + 128 * 2)
