"""grouped_matmul with a residual: values, rows of no group, gradients, vmap, shards, and the kernel on every schedule."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import GroupedMatmulProblem, grouped_matmul
from mgpu_ops.core import gpu
from mgpu_ops.grouped.grouped_matmul import kernel
from mgpu_ops.grouped.grouped_matmul.problem import by_name
from tests import thorough
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE, BF16, F32, TOLERANCE, needs_compiler, normal
from tests.mgpu_ops.grouped.test_grouped_interpret import (
    HALVES,
    MANY,
    ODD,
    ONE_HOT,
    TWO,
    WIDE,
    WILD,
    assert_right,
    compiled,
    operands,
)
from tests.mgpu_ops.interpreter import has_a_race

SPEC = mgpu_ops.spec_of("grouped_matmul")
H200 = gpu.find("h200")


def P(*sides: Any, **fields: Any) -> GroupedMatmulProblem:
    return GroupedMatmulProblem(*sides, residual=True, **fields)


# --- values, through XLA


def arrays(m: int = 72, n: int = 40, k: int = 24, groups: int = 4, dtype: Any = BF16) -> tuple[jax.Array, ...]:
    return normal(0, m, k, dtype=dtype), normal(1, groups, k, n, dtype=dtype) / 4, normal(5, m, n, dtype=dtype)


@pytest.mark.parametrize("activation", ["none", "silu"])
@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_residual_is_added_last_in_float32_to_rows_of_groups_only(activation, backend, no_races, assert_near):
    lhs, rhs, residual = arrays()
    residual = residual.at[60:].set(jnp.nan)
    extra = {"bias": normal(2, 4, 40, dtype=F32), "row_scale": normal(3, 72, dtype=F32)}
    out = grouped_matmul(lhs, rhs, [30, 0, 29, 1], residual=residual, activation=activation, backend=backend, **extra)
    wanted = ragged.grouped(lhs, rhs, [30, 0, 29, 1], residual=residual, activation=activation, **extra)
    assert out.dtype == BF16
    assert_near(out, wanted, TOLERANCE[BF16])
    np.testing.assert_array_equal(out[60:], 0)


def test_residual_is_not_rounded_before_it_is_added():
    """1 + 2^-9 is no bfloat16: rounded first, the product would cancel with the residual."""
    lhs, rhs = jnp.ones((1, 2), BF16), jnp.array([[[1.0], [2.0**-9]]], BF16)
    out = grouped_matmul(lhs, rhs, [1], residual=jnp.full((1, 1), -1, BF16))
    assert float(out[0, 0]) == 2.0**-9


def test_residual_in_float64_keeps_its_digits():
    with jax.enable_x64(True):
        lhs, rhs, residual = arrays(dtype="float64")
        residual += 1 + 2.0**-40
        out = grouped_matmul(lhs, rhs, [30, 0, 29, 1], residual=residual)
        wanted = ragged.grouped(lhs, rhs, [30, 0, 29, 1], residual=residual)
        np.testing.assert_allclose(out, wanted, rtol=1e-14, atol=1e-14)


def test_rows_by_index_with_a_residual(assert_near):
    lhs, rhs, residual = arrays()
    indices = np.random.default_rng(0).integers(0, 72, 72)
    out = grouped_matmul(lhs, rhs, [30, 0, 29, 1], residual=residual, row_indices=indices)
    assert_near(out, ragged.grouped(lhs[indices], rhs, [30, 0, 29, 1], residual=residual), TOLERANCE[BF16])


def test_shards_of_the_groups_add_up_to_the_whole_with_each_residual_once():
    lhs, rhs, residual = arrays(groups=6)
    sizes = np.array([9, 0, 30, 12, 3, 10])
    parts = [grouped_matmul(lhs, rhs[g : g + 2], sizes, residual=residual, group_offset=g) for g in (0, 2, 4)]
    np.testing.assert_array_equal(sum(parts), grouped_matmul(lhs, rhs, sizes, residual=residual))


@pytest.mark.parametrize("batched", ["lhs", "residual", "lhs sizes", "rhs residual", "lhs rhs sizes residual"])
def test_vmap_maps_any_of_the_arguments(batched, assert_near):
    names = ["lhs", "rhs", "sizes", "residual"]
    sizes = jnp.array([[5, 11], [0, 24], [3, 0]])
    every = (normal(0, 3, 24, 16), normal(1, 3, 2, 16, 40), sizes, normal(3, 3, 24, 40))
    given = tuple(x if name in batched.split() else x[0] for x, name in zip(every, names, strict=True))
    axes = [0 if name in batched.split() else None for name in names]
    out = jax.vmap(lambda lhs, rhs, sizes, residual: grouped_matmul(lhs, rhs, sizes, residual=residual), axes)(*given)
    for i in range(3):
        lhs, rhs, sizes, residual = (x if axis is None else x[i] for x, axis in zip(given, axes, strict=True))
        assert_near(out[i], ragged.grouped(lhs, rhs, sizes, residual=residual), TOLERANCE[BF16])


@pytest.mark.parametrize("axis", ["k", "n"])
def test_arrays_sharded_over_devices_add_the_residual_once(axis, assert_near):
    lhs, rhs, residual = arrays(dtype=F32)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    k, n = ("x", None) if axis == "k" else (None, "x")
    specs = (PartitionSpec(None, k), PartitionSpec(None, k, n), PartitionSpec(None, n))
    given = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip((lhs, rhs, residual), specs, strict=True)]
    sizes = np.array([30, 0, 29, 1])

    def loss(lhs: jax.Array, rhs: jax.Array, residual: jax.Array) -> tuple[jax.Array, jax.Array]:
        out = grouped_matmul(lhs, rhs, sizes, residual=residual)
        return (out * normal(9, 72, 40, dtype=F32)).sum(), out

    f = jax.jit(jax.grad(loss, (0, 1, 2), has_aux=True))
    for x, y in zip(jax.tree.leaves(f(*given)), jax.tree.leaves(f(lhs, rhs, residual)), strict=True):
        assert_near(x, y, 1e-5)


# --- gradients

SCALED = {  # bias, row scale, the call's arguments
    "plain": (False, False, {}),
    "scale": (False, True, {}),
    "bias, silu": (True, False, {"activation": "silu"}),
    "scale, bias, gelu, shard": (True, True, {"activation": "gelu", "group_offset": 1}),
}


@pytest.mark.parametrize(("name", "dtype"), [*((name, F32) for name in SCALED), ("scale, bias, gelu, shard", BF16)])
def test_gradients_are_those_of_plain_jax(name, dtype, assert_near):
    bias, scale, kwargs = SCALED[name]
    lhs, rhs, residual = arrays(40, 24, 16, 3, dtype)
    sizes = jnp.asarray([2, 9, 0, 20, 3] if "group_offset" in kwargs else [9, 0, 22])
    names = ["residual", *["bias"] * bias, *["row_scale"] * scale]
    every = {"residual": residual, "bias": normal(2, 3, 24, dtype=dtype), "row_scale": normal(3, 40, dtype=F32)}

    def of(f: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
        return lambda lhs, rhs, *rest: f(lhs, rhs, sizes, **dict(zip(names, rest, strict=True)), **kwargs)

    given = (lhs, rhs, *(every[name] for name in names))
    ragged.assert_same_gradients(
        of(grouped_matmul), of(ragged.plain_grouped), given, assert_near, 1e-5 if dtype == F32 else 2e-2
    )


@pytest.mark.parametrize("activation", ["none", "silu"])
def test_the_residuals_gradient_is_the_cotangent_of_rows_of_groups_and_zeros_elsewhere(activation):
    lhs, rhs, residual = arrays()
    cotangent = normal(7, 72, 40).at[60:].set(jnp.nan)
    f = lambda residual: grouped_matmul(lhs, rhs, [30, 0, 29, 1], residual=residual, activation=activation)  # noqa: E731
    (gradient,) = jax.vjp(f, residual.at[60:].set(jnp.nan))[1](cotangent)
    np.testing.assert_array_equal(gradient[:60], cotangent[:60])
    np.testing.assert_array_equal(gradient[60:], 0)


def test_gradients_through_the_kernels(no_races, assert_near):
    lhs, rhs, residual = arrays(72, 40, 24, 3)

    def of(f: Any, **options: Any) -> Any:
        return lambda lhs, rhs, residual: f(lhs, rhs, jnp.array([30, 0, 33]), residual=residual, **options)

    ours = of(grouped_matmul, backend="interpret")
    ragged.assert_same_gradients(ours, of(ragged.plain_grouped), (lhs, rhs, residual), assert_near, 2e-2)


# --- the kernel, interpreted: what it does not write is NaN, as are rows of no group and empty groups' matrices

CASES: dict[str, tuple[Any, Any, tuple[Sequence[int], ...]]] = {
    "tails in m, n and k": (P(150, 72, 72, 4), BASE, (ODD, ONE_HOT, WILD, (0, 0, 0, 0))),
    "one row": (P(1, 72, 8, 3), BASE, ((0, 1, 0), (0, 0, 0), (7, 7, 7))),
    "one buffer for four epilogue tiles": (P(150, 128, 64, 4), replace(WIDE, compute_warpgroups=1), (ODD, ONE_HOT)),
    "two buffers for four, row scale, bias, silu": (
        P(150, 128, 136, 4, row_scale=True, bias=True, activation="silu"),
        replace(WIDE, compute_warpgroups=1, epilogue_slots=2),
        (ODD, MANY),
    ),
    "three buffers for four": (P(150, 128, 136, 4), replace(WIDE, compute_warpgroups=1, epilogue_slots=3), (ODD,)),
    "rows shared, float32 out, two buffers": (
        P(150, 72, 72, 4, "bfloat16", "float32"),
        replace(TWO, epilogue_tile_n=32, epilogue_slots=2),
        (ODD, MANY),
    ),
    "columns shared, float16, transposed": (P(150, 192, 136, 4, "float16", "float16", layout="nt"), HALVES, (ODD,)),
    "wide tiles, n ends within one, handed out": (P(150, 200, 72, 4), replace(WIDE, schedule="dynamic"), (ODD, WILD)),
    "shard": (P(150, 72, 72, 3, group_offset=True), TWO, ((33, 1, 0, 71), (150, 7, 7, 7), (-1, 0, 0, 0))),
    "short tiles, held, the residual behind the stores": (
        P(150, 256, 264, 4),
        replace(WIDE, tile_n=256, epilogue_slots=2, schedule="dynamic-deferred", short_tiles=True),
        (ODD, WILD),
    ),
    "short tiles, one buffer": (P(150, 136, 136, 4), replace(WIDE, schedule="dynamic", short_tiles=True), (ODD,)),
    "two products": (P(150, 72, 72, 4, second=True), BASE, (ODD,)),
    "deferred, one buffer, one step": (P(150, 128, 64, 4), replace(WIDE, schedule="deferred"), (ODD, WILD)),
    "deferred, as many steps as stores": (P(150, 128, 128, 4), replace(WIDE, schedule="deferred"), (ODD,)),
    "deferred, two buffers, seven steps, row scale": (
        P(150, 200, 400, 4, row_scale=True),
        replace(WIDE, compute_warpgroups=1, epilogue_slots=2, schedule="deferred"),
        (ODD, WILD, (0, 0, 0, 0)),
    ),
    "dynamic-deferred, all buffers, a shard": (
        P(150, 136, 264, 3, layout="nt", group_offset=True),
        replace(WIDE, epilogue_slots=2, schedule="dynamic-deferred"),
        ((33, 1, 0, 71),),
    ),
}
IN_ALL = [
    "short tiles, one buffer",
    "three buffers for four",
    "columns shared, float16, transposed",
    "two products",
    "deferred, as many steps as stores",
]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_grouped):
    problem, config, all_sizes = CASES[name]
    run = compiled(problem, config)
    for sizes in all_sizes:
        assert_right(problem, run, sizes, assert_grouped)


def test_kernel_with_rows_by_index(assert_grouped):
    problem = P(150, 72, 72, 4, lhs_rows=37)
    lhs, rhs, *extra = operands(problem)
    named = by_name(problem, extra)
    out = compiled(problem, TWO)(lhs, rhs, np.array(ODD, np.int32), *extra)
    gathered = replace(problem, lhs_rows=0)
    assert_grouped(gathered, ODD, out, lhs[named.pop("row_indices")], rhs, *named.values())


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_kernel_with_scales_of_8_bit_floats(scales, assert_grouped):
    problem = P(150, 136, 256, 4, "float8_e4m3fn", layout="nt", scales=scales)
    config = replace(TWO, tile_n=128, tile_k=128, epilogue_slots=2 if scales == "row" else 1)
    lhs, rhs, *extra = operands(problem)
    out = compiled(problem, config)(lhs, rhs, np.array(ODD, np.int32), *extra)
    assert_grouped(problem, ODD, out, lhs, rhs, *extra)


def of_odd_sizes(problem: Any, config: Any) -> Any:
    lhs, rhs, *extra = operands(problem)
    return lambda: compiled(problem, config)(lhs, rhs, np.array(ODD, np.int32), *extra)


ALL_BUFFERS = replace(BASE, tile_m=128, tile_n=128, epilogue_slots=4)


@pytest.mark.parametrize("config", [ALL_BUFFERS, replace(ALL_BUFFERS, schedule="deferred")], ids=["static", "deferred"])
def test_detector_finds_a_residual_that_is_loaded_where_a_tile_is_still_being_stored(config, monkeypatch):
    problem = P(150, 256, 400, 4)
    assert not has_a_race(of_odd_sizes(problem, config))

    def hasty(self: Any, tile: Any) -> None:
        for number in range(4):
            self.load_residual(tile, number)

    monkeypatch.setattr(kernel.GroupedStages, "load_first_of_residual", hasty)
    assert has_a_race(of_odd_sizes(problem, config))


# --- compiled for a Hopper GPU


@needs_compiler
@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(4096, 2048, 1024, 4, row_scale=True), None),
        (P(4096, 2048, 4096, 4, "bfloat16", "float32", bias=True, activation="gelu"), None),
        (P(16384, 4096, 2048, 8, bias=True, activation="silu"), None),
        (P(512, 200, 136, 4, layout="nt"), None),
    ],
    ids=["default, row scale", "default, float32, bias, gelu", "default, bias, silu", "default, small, odd"],
)
def test_kernel_compiles_without_spills_into_the_bytes_that_check_counts(problem, config):
    ragged.assert_compiles(SPEC, problem, config)


@pytest.mark.parametrize("schedule", ["static", "deferred"])
def test_a_residual_takes_the_configs_of_the_product_without_it(schedule):
    config = replace(WIDE, tile_n=256, max_concurrent_steps=3, epilogue_slots=2, schedule=schedule)
    assert SPEC.plain(P(4096, 2048, 1024, 4)) == GroupedMatmulProblem(4096, 2048, 1024, 4)
    assert SPEC.check(P(4096, 2048, 1024, 4), config, H200) is None


# --- errors: the value, the rule, the way out


@pytest.mark.parametrize(
    ("residual", "options", "error", "message"),
    [
        (jnp.ones((72, 8), BF16), {}, ValueError, r"residual has shape \(72, 8\): it must be \[m, n\] = \(72, 40\)"),
        (jnp.ones((1, 40), BF16), {}, ValueError, r"residual has shape \(1, 40\): it must be \[m, n\] = \(72, 40\)"),
        (jnp.ones((72, 40), F32), {}, ValueError, "residual is float32 and the result bfloat16: cast it, or pass its dtype as"),
        (jnp.ones((72, 40), BF16), {"out_dtype": F32}, ValueError, "residual is bfloat16 and the result float32: cast it, or"),
        (jnp.ones((72, 40), int), {}, TypeError, "residual has dtype int32: grouped_matmul takes floats; cast it first"),
        ("none", {}, TypeError, "residual is 'none', which is no array: grouped_matmul takes"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(residual, options, error, message):
    lhs, rhs, _ = arrays()
    with pytest.raises(error, match=message):
        grouped_matmul(lhs, rhs, [30, 0, 29, 1], residual=residual, **options)


def test_the_gradient_of_gated_activations_has_none():
    problem = GroupedMatmulProblem(64, 64, 64, 2, layout="nt", row_scale=True, gated_gradient=True, residual=True)
    assert "no bias, residual or second product" in (SPEC.supports(problem, H200) or "")
