"""Scales that a caller gives: known ones that are not finite are told by name, and traced ones cost nothing."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops

BF16, F8 = jnp.bfloat16, jnp.float8_e4m3fn
SIZES = np.array([5, 6], np.int32)  # of 16 rows: five belong to no group


def ones(*shape: int, dtype: Any = BF16) -> jax.Array:
    return jnp.ones(shape, dtype)


def scales(*shape: int) -> np.ndarray:
    return np.full(shape, 0.5, np.float32)


W8, W8_DOWN = ones(2, 64, 32, dtype=jnp.int8), ones(2, 32, 32, dtype=jnp.int8)
MOE = {"gate_up_scales": scales(2, 64), "down_scales": scales(2, 32)}
CACHE = ones(2, 8, 2, 64, dtype=jnp.int8)
QKV = ones(2, 8 * 64)
ANGLES = ones(2, 32)
ROUTED = (jnp.full((16, 1), 0.5), jnp.zeros((16, 1), jnp.int32))
CALLS: dict[str, tuple[Callable[..., Any], dict[str, np.ndarray]]] = {  # each by its scales, and good ones
    "matmul": (
        lambda **s: mgpu_ops.matmul(ones(16, 32, dtype=F8), ones(48, 32, dtype=F8), transpose_b=True, **s),
        {"scale_a": scales(16), "scale_b": scales(48)},
    ),
    "quantized_matmul": (
        lambda **s: mgpu_ops.quantized_matmul(ones(4, 64), ones(16, 64, dtype=jnp.int8), transpose_w=True, **s),
        {"scales": scales(2, 16)},
    ),
    "quantized_grouped_matmul": (
        lambda scales, **s: mgpu_ops.quantized_grouped_matmul(ones(16, 32), W8, scales, SIZES, transpose_rhs=True, **s),
        {"scales": scales(2, 64)},
    ),
    "quantized_moe": (lambda **s: mgpu_ops.quantized_moe(ones(16, 32), ones(16, 2), W8, W8_DOWN, top_k=1, **s), MOE),
    "quantized_moe_experts": (lambda **s: mgpu_ops.quantized_moe_experts(ones(16, 32), *ROUTED, W8, W8_DOWN, **s), MOE),
    "grouped_matmul": (
        lambda **s: mgpu_ops.grouped_matmul(ones(16, 32, dtype=F8), ones(2, 48, 32, dtype=F8), SIZES, transpose_rhs=True, **s),
        {"scale_lhs": scales(16), "scale_rhs": scales(2, 48)},
    ),
    "gated_grouped_matmul": (
        lambda **s: mgpu_ops.gated_grouped_matmul(
            ones(16, 32, dtype=F8), *[ones(2, 48, 32, dtype=F8)] * 2, SIZES, transpose_w=True, **s
        ),
        {"scale_lhs": scales(16), "scale_gate": scales(2, 48), "scale_up": scales(2, 48)},
    ),
    "flash_attention": (
        lambda **s: mgpu_ops.flash_attention(ones(2, 1, 4, 64), CACHE, CACHE, **s),
        {"k_scale": scales(2), "v_scale": scales(2)},
    ),
    "rotary_into_cache": (
        lambda **s: mgpu_ops.rotary_into_cache(QKV, ANGLES, ANGLES, CACHE, CACHE, jnp.zeros(2, jnp.int32), **s),
        {"k_scale": scales(2), "v_scale": scales(2)},
    ),
}
ARGUMENTS = [(op, name) for op, (_, given) in CALLS.items() for name in given]


def bad(scale: np.ndarray) -> tuple[np.ndarray, str]:
    """The scale with a NaN, and its index."""
    wrong, at = scale.copy(), (0,) * (scale.ndim - 1) + (1,)
    wrong[at] = np.nan
    return wrong, ", ".join(map(str, at))


@pytest.mark.parametrize("of", [np.asarray, jnp.asarray], ids=["numpy", "jax"])
@pytest.mark.parametrize(("op", "name"), ARGUMENTS)
def test_a_known_scale_that_is_not_finite_is_told_with_its_place(op: str, name: str, of: Callable[..., Any]) -> None:
    call, given = CALLS[op]
    wrong, at = bad(given[name])
    told = rf"^{name} has 1 of \d+ values that are not finite, the first {name}\[{at}\]=nan: .*jnp.isfinite\({name}\)"
    with pytest.raises(ValueError, match=told):
        call(**given | {name: of(wrong)})


def test_several_are_counted() -> None:
    wrong = scales(48)
    wrong[[3, 7]] = -np.inf, np.nan
    with pytest.raises(ValueError, match=r"^scale_b has 2 of 48 values that are not finite, the first scale_b\[3\]=-inf: "):
        CALLS["matmul"][0](scale_a=1.0, scale_b=wrong)


@pytest.mark.parametrize("op", CALLS)
def test_finite_scales_of_any_kind_are_taken_zeros_and_negative_ones_too(op: str) -> None:
    call, given = CALLS[op]
    call(**given)
    call(**{name: jnp.asarray(scale) for name, scale in given.items()})
    if "k_scale" not in given:  # whose documented rule is above 0
        call(**{name: scale * np.float32(-1) for name, scale in given.items()})
        call(**{name: np.zeros_like(scale) for name, scale in given.items()})


@pytest.mark.parametrize("op", CALLS)
def test_a_traced_scale_is_not_checked_and_the_result_is_that_of_arithmetic(op: str) -> None:
    call, given = CALLS[op]
    wrong = {name: bad(scale)[0] for name, scale in given.items()}
    out = jax.jit(call)(**wrong)
    assert any(np.isnan(np.asarray(x, np.float32)).any() for x in jax.tree.leaves(out)) or op == "rotary_into_cache"


@pytest.mark.parametrize("op", CALLS)
def test_a_scale_that_a_jitted_function_closes_over_is_known(op: str) -> None:
    call, given = CALLS[op]
    name = list(given)[-1]
    for of in (np.asarray, jnp.asarray):
        wrong = of(bad(given[name])[0])
        with pytest.raises(ValueError, match=rf"^{name} has 1 of"):
            jax.jit(lambda wrong=wrong: call(**given | {name: wrong}))()


def test_one_number_is_told_without_a_place_also_where_float32_does_not_hold_it() -> None:
    a, b = ones(16, 32, dtype=F8), ones(48, 32, dtype=F8)
    product = functools.partial(mgpu_ops.matmul, a, b, transpose_b=True)
    for wrong in (float("nan"), np.float32("nan"), jnp.float32(jnp.nan), np.array(np.nan)):
        with pytest.raises(ValueError, match=r"^scale_b=nan is not finite: "):
            product(scale_b=wrong)
    with pytest.raises(ValueError, match=r"^scale_a=inf in float32 is not finite"):
        product(scale_a=1e39)
    jax.jit(lambda: product(scale_a=2.0, scale_b=np.float32(3)))()
    with pytest.raises(ValueError, match=r"^k_scale=inf is not finite"):
        mgpu_ops.flash_attention(ones(2, 1, 4, 64), CACHE, CACHE, k_scale=float("inf"))


@pytest.mark.parametrize("op", ["grouped_matmul", "gated_grouped_matmul"])
def test_scales_of_rows_of_no_group_may_be_anything(op: str) -> None:
    call, given = CALLS[op]
    of_rows = given["scale_lhs"].copy()
    of_rows[SIZES.sum() :] = np.nan
    out = np.asarray(call(**given | {"scale_lhs": jnp.asarray(of_rows)}), np.float32)
    assert np.isfinite(out).all()
    of_rows[3] = np.inf
    with pytest.raises(ValueError, match=r"^scale_lhs has 1 of 11 values .* scale_lhs\[3\]=inf"):
        call(**given | {"scale_lhs": of_rows})


def test_of_a_shard_of_the_groups_only_its_rows_scales_count() -> None:
    of_rows = scales(16)
    of_rows[:5] = np.nan  # of the group that is elsewhere
    f8 = functools.partial(ones, dtype=F8)

    def product(of_rows: Any) -> jax.Array:
        return mgpu_ops.grouped_matmul(
            f8(16, 32), f8(1, 48, 32), SIZES, group_offset=1, transpose_rhs=True, scale_lhs=of_rows, scale_rhs=scales(1, 48)
        )

    assert np.isfinite(np.asarray(product(of_rows), np.float32)).all()
    of_rows[7] = np.nan
    with pytest.raises(ValueError, match=r"scale_lhs\[7\]=nan"):
        product(of_rows)


# --- zero points

ZERO_POINTS = [(op, name) for op, name in ARGUMENTS if op.startswith("quantized")]


@pytest.mark.parametrize("value", [0.5, 128, -129, np.nan])
@pytest.mark.parametrize(("op", "scales"), ZERO_POINTS)
def test_a_known_zero_point_that_is_not_whole_or_not_of_the_weights_range_is_told_with_its_place(
    op: str, scales: str, value: float
) -> None:
    call, given = CALLS[op]
    name, wrong = scales.replace("scales", "zero_points"), np.zeros_like(given[scales])
    wrong[..., 1] = value
    at = ", ".join("0" * (wrong.ndim - 1) + "1")
    told = rf"^{name} has \d of {wrong.size} values that are not whole and from -128 to 127, the first {name}\[{at}\]={value}"
    for known in (wrong, jnp.asarray(wrong)):
        product = functools.partial(call, **given, **{name: known})
        for run in (product, jax.jit(product)):
            with pytest.raises(ValueError, match=told):
                run()


@pytest.mark.parametrize(("op", "scales"), ZERO_POINTS)
def test_nothing_is_known_of_a_traced_zero_point(op: str, scales: str) -> None:
    call, given = CALLS[op]
    name, wrong = scales.replace("scales", "zero_points"), np.full_like(given[scales], 0.5)
    jax.eval_shape(lambda zero_points: call(**given, **{name: zero_points}), wrong)


def test_zero_points_are_of_the_range_of_their_weights() -> None:
    x, of_columns = ones(4, 64), scales(16)

    def product(value: float, dtype: Any, of: Any = np.int32) -> None:
        mgpu_ops.quantized_matmul(x, ones(64, 16, dtype=dtype), of_columns, np.full(16, value, of))

    for dtype, low, high in ((jnp.int4, -8, 7), (jnp.int8, -128, 127)):
        for of in (np.int32, np.float16, jnp.bfloat16):
            product(low, dtype, of)
            product(high, dtype, of)
        for value in (low - 1, high + 1):
            with pytest.raises(ValueError, match=rf"from {low} to {high}, .*\[0\]={value}: .*take {-low} off both"):
                product(value, dtype)
    shared = jnp.full(16, 100)  # good zero points of int8 are none of int4
    mgpu_ops.quantized_matmul(x, ones(64, 16, dtype=jnp.int8), of_columns, shared)
    with pytest.raises(ValueError, match="zero points of int4 weights are"):
        mgpu_ops.quantized_matmul(x, ones(64, 16, dtype=jnp.int4), of_columns, shared)


STATE = mgpu_ops.Fp8State.init(2)
GATED_STATE = mgpu_ops.Fp8GatedState.init(2)
NAN = jnp.full((), jnp.nan)


def test_a_scale_of_an_fp8_state_that_is_not_finite_is_told() -> None:
    x, w, w3 = ones(16, 32), ones(32, 32), ones(2, 32, 32)
    for field in ("input_scale", "kernel_scale", "output_grad_scale"):
        with pytest.raises(ValueError, match=rf"^state\.{field}=nan is not finite"):
            mgpu_ops.fp8_matmul(x, w, state=STATE._replace(**{field: NAN}))
    wrong = GATED_STATE._replace(up=STATE._replace(kernel_scale=NAN))
    for call in (
        lambda: mgpu_ops.fp8_gated_mlp(x, w, w, w, state=wrong),
        lambda: mgpu_ops.fp8_moe(x, ones(16, 2), w3, w3, w3, 1, state=wrong),
    ):
        with pytest.raises(ValueError, match=r"^state\.up\.kernel_scale=nan is not finite"):
            call()


def test_each_known_scale_is_read_once(monkeypatch: pytest.MonkeyPatch) -> None:
    """Neither by a function within another nor by the next call with the same arrays; a scale of our own is not read."""
    read: list[Any] = []
    device_get = jax.device_get
    monkeypatch.setattr(jax, "device_get", lambda x: read.append(x) or device_get(x))
    call, given = CALLS["quantized_moe"]
    arrays = {name: jnp.asarray(scale) for name, scale in given.items()}
    arrays |= {name.replace("scales", "zero_points"): jnp.zeros(scale.shape, jnp.int8) for name, scale in given.items()}
    for _ in range(2):
        call(**arrays)
    assert len(read) == len(arrays)
    read.clear()
    mgpu_ops.fp8_matmul(ones(16, 32), ones(32, 32))
    mgpu_ops.fp8_gated_mlp(ones(16, 32), *[ones(32, 32)] * 3)
    jax.jit(lambda **s: CALLS["matmul"][0](**s))(**CALLS["matmul"][1])
    assert not read


def test_jaxs_debug_nans_tells_of_a_traced_one() -> None:
    call, given = CALLS["matmul"]
    wrong = {**given, "scale_b": bad(given["scale_b"])[0]}
    with jax.debug_nans(True), pytest.raises(FloatingPointError, match="nan"):
        jax.jit(lambda **s: call(**s).astype(jnp.float32))(**wrong)
