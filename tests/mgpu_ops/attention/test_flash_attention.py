"""What a user of `mgpu_ops.flash_attention` relies on: values, gradients, masks, transforms, errors."""

from __future__ import annotations

import functools
import importlib
import itertools
import logging
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

import mgpu_ops
from mgpu_ops import flash_attention, use_configs
from mgpu_ops.core import gpu
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.capture import capture
from tests.mgpu_ops.attention import cases
from tests.mgpu_ops.attention.cases import BASE, FUSED_64, SPLIT_64, Shape, normal, one_step, qkv
from tests.mgpu_ops.grouped.ragged import float64
from tests.thorough import cases as cases_of
from tests.thorough import examples, only_in_all

pytestmark = pytest.mark.usefixtures("no_races")

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TOLERANCE = {"bfloat16": 2e-2, "float16": 3e-3, "float32": 2e-5, "float64": 1e-12}
OTHER = replace(BASE, max_concurrent_steps=3)


def with_gradients(arrays: tuple[Any, ...], **kwargs: Any) -> dict[str, np.ndarray]:
    """Output, lse and the gradients of q, k, v and perhaps a bias, the fourth, for random gradients of the first two."""

    def both(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        return flash_attention(q, k, v, bias=bias[0] if bias else None, return_lse=True, **kwargs)

    @jax.jit
    def run(*arrays: Any) -> Any:
        outs, pull = jax.vjp(both, *arrays)
        return outs, pull(cotangents(*outs))

    return dict(zip(["out", "lse", "q", "k", "v", "bias"], itertools.chain(*run(*arrays))))


def cotangents(out: Any, lse: Any) -> tuple[Any, Any]:
    return normal(7, *out.shape, dtype=out.dtype), normal(8, *lse.shape, dtype=lse.dtype)


def assert_true(found: dict[str, Any], arrays: tuple[Any, ...], assert_near: Any, **kwargs: Any) -> None:
    """`found` is `attention.truth`, and where that is zero for being masked, exactly so."""
    tolerance = TOLERANCE[arrays[0].dtype.name]
    out_grad, lse_grad = cotangents(found["out"], found["lse"])
    bias = arrays[3] if len(arrays) > 3 else None
    wanted = cases.truth(*arrays[:3], bias=bias, out_grad=out_grad, lse_grad=lse_grad, **kwargs)
    assert found.keys() == wanted.keys()
    assert found["out"].dtype == arrays[0].dtype
    assert [found[name].dtype for name, _ in zip(["q", "k", "v", "bias"], arrays)] == [x.dtype for x in arrays]
    lse = wanted.pop("lse")
    assert found["lse"].dtype == F32
    np.testing.assert_array_equal(np.isneginf(found["lse"]), np.isneginf(lse))
    np.testing.assert_allclose(found["lse"], lse, rtol=max(tolerance, 1e-6), atol=max(tolerance, 1e-6))
    for name, x in wanted.items():
        np.testing.assert_array_equal(float64(found[name])[x == 0], 0)
        if x.any():
            of_dtype = TOLERANCE[found[name].dtype.name]
            assert_near(found[name], x, of_dtype if name == "out" else max(tolerance, of_dtype, 1e-6))  # lse is float32


# --- values and gradients

EQUAL = Shape(kv_tokens=7)
LONGER = Shape()  # than the queries are
SHORTER = Shape(q_tokens=9, kv_tokens=6)
GROUPED = Shape(q_heads=6, kv_heads=2)
THREE = Shape(batch=3)


def dots(x: str) -> np.ndarray:
    """Rows of "x" and "." as booleans."""
    return np.array([[c == "x" for c in row] for row in x.split()])


IDS = np.array([[0, 0, 1, 1, 1, 2, 2], [5, 5, 5, 5, 5, 5, 9]])
MIXED_IDS = np.array([[1, 0, 1, 2, 0, 1, 1], [-3, 7, 7, -3, 7, 2**31 - 1, 7]])
KEY_IDS = np.array([[0, 0, 0, 1, 1, 1, 2, 2, 3], [5, 5, 5, 5, 5, 5, 5, 5, 5]])

MASKS: dict[str, tuple[Shape, dict[str, Any]]] = {
    "no mask": (LONGER, {}),
    "one token": (Shape(1, 1, 1, 1, 1), {"causal": True}),
    "one key": (Shape(q_tokens=5, kv_tokens=1), {}),
    "causal": (EQUAL, {"causal": True}),
    "causal, more keys": (LONGER, {"causal": True}),
    "causal, fewer keys, so that the first rows see none": (SHORTER, {"causal": True}),
    "causal, one query": (Shape(q_tokens=1), {"causal": True}),
    "window to the left": (LONGER, {"window": (2, None)}),
    "window to the right, so that the first rows see few": (LONGER, {"window": (None, 1)}),
    "window to both sides": (LONGER, {"window": (1, 2)}),
    "window of one key": (EQUAL, {"window": (0, 0)}),
    "window wider than all": (LONGER, {"window": (100, 2**40)}),
    "window, fewer keys": (SHORTER, {"window": (1, 1)}),
    "window, causal": (LONGER, {"window": (3, 5), "causal": True}),
    "lengths of keys": (LONGER, {"kv_lengths": [9, 4]}),
    "lengths of queries": (LONGER, {"q_lengths": [3, 7]}),
    "lengths of both, causal": (THREE, {"q_lengths": [3, 7, 5], "kv_lengths": [9, 4, 5], "causal": True}),
    "lengths of both, window": (THREE, {"q_lengths": [3, 7, 5], "kv_lengths": [9, 4, 6], "window": (2, 1)}),
    "lengths of zero": (THREE, {"q_lengths": [0, 7, 0], "kv_lengths": [9, 0, 0]}),
    "lengths out of range count as the nearest": (THREE, {"q_lengths": [-1, 70, 3], "kv_lengths": [5, 90, -4], "causal": True}),
    "lengths, one out of range, window": (LONGER, {"kv_lengths": [10, 8], "window": (1, 1)}),
    "segments": (EQUAL, {"q_segment_ids": IDS}),
    "segments, causal": (EQUAL, {"q_segment_ids": IDS, "causal": True}),
    "segments in any order": (EQUAL, {"q_segment_ids": MIXED_IDS}),
    "segments of keys of their own": (LONGER, {"q_segment_ids": IDS, "kv_segment_ids": KEY_IDS}),
    "segments, window, lengths": (EQUAL, {"q_segment_ids": IDS, "window": (2, 1), "q_lengths": [6, 7], "kv_lengths": [5, 7]}),
    "segments, lengths out of range, causal": (
        EQUAL,
        {"q_segment_ids": IDS, "causal": True, "q_lengths": [100, 6], "kv_lengths": [7, 90]},
    ),
    "segments, lengths of keys": (EQUAL, {"q_segment_ids": IDS, "causal": True, "kv_lengths": [5, 7]}),
    "mask of rows and keys": (LONGER, {"mask": dots("xxxxxxxxx ......... x.x.x.x.x ........x x........ xxx...xxx .xxxxxxxx")}),
    "mask of keys": (LONGER, {"mask": dots("xx.xxx..x")}),
    "mask of rows": (LONGER, {"mask": dots("x x . x . . x")}),
    "mask of heads": (LONGER, {"mask": np.array([True, False])[:, None, None]}),
    "mask of batch entries": (LONGER, {"mask": np.array([True, False])[:, None, None, None]}),
    "mask, full": (LONGER, {"mask": np.random.default_rng(0).random(LONGER.scores) < 0.5}),
    "mask, one boolean, False": (LONGER, {"mask": np.bool_(False)}),
    "mask, causal, lengths": (LONGER, {"mask": dots(".xxxxxxxx"), "causal": True, "kv_lengths": [9, 3]}),
    "soft cap": (LONGER, {"soft_cap": 0.7}),
    "soft cap, causal, scale": (LONGER, {"soft_cap": 2.0, "causal": True, "scale": 1.5}),
    "scale": (LONGER, {"scale": 0.1}),
    "negative scale": (LONGER, {"scale": -0.5, "causal": True}),
    "negative scale, soft cap": (LONGER, {"scale": -2, "soft_cap": 0.7}),
    "grouped heads": (GROUPED, {"causal": True}),
    "one head of keys": (Shape(q_heads=3, kv_heads=1), {"window": (2, None)}),
    "grouped heads, mask of heads": (GROUPED, {"mask": np.arange(6)[:, None, None] % 2 == 0}),
    "short values": (Shape(v_dim=3), {"causal": True}),
    "long values": (Shape(v_dim=13, q_heads=4), {}),
}


MASKS_IN_ALL = [  # what others show together or one by one
    "causal, more keys",
    "window of one key",
    "window to both sides",
    "lengths of both, window",
    "lengths, one out of range, window",
    "mask of batch entries",
    "soft cap, causal, scale",
    "one key",
    "causal, one query",
    "causal",
    "window to the left",
    "window wider than all",
    "window, fewer keys",
    "lengths of keys",
    "lengths of queries",
    "lengths of both, causal",
    "segments",
    "segments, causal",
    "mask of keys",
    "mask of rows",
    "mask of heads",
    "scale",
    "soft cap",
    "negative scale",
    "mask, full",
    "one head of keys",
]


@pytest.mark.parametrize("name", cases_of(MASKS, MASKS_IN_ALL))
def test_output_lse_and_gradients_are_those_of_the_formula(name, assert_near):
    shape, kwargs = MASKS[name]
    with jax.enable_x64(True):
        arrays = qkv(shape, "float64")
        assert_true(with_gradients(arrays, **kwargs), arrays, assert_near, **kwargs)


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32"])
@pytest.mark.parametrize("name", cases_of(["causal, fewer keys, so that the first rows see none", "soft cap"], ["soft cap"]))
def test_dtypes(name, dtype, assert_near):
    shape, kwargs = MASKS[name]
    arrays = qkv(shape, dtype)
    assert_true(with_gradients(arrays, **kwargs), arrays, assert_near, **kwargs)


WIDE = {  # lengths that count as 7 and 0 queries, or 9 and 3 keys
    "numpy, int64": np.array([2**32 + 1, -(2**32) + 5]),
    "list": [2**32 + 1, -(2**40)],
    "numpy, uint64": np.array([2**64 - 1, 0], np.uint64),
}


@pytest.mark.parametrize("name", WIDE)
def test_lengths_wider_than_int32_count_as_the_nearest(name, assert_near):
    arrays = qkv(LONGER)
    out = flash_attention(*arrays, kv_lengths=WIDE[name])
    assert_near(out, cases.truth(*arrays, kv_lengths=[9, 0])["out"], TOLERANCE["float32"])


@pytest.mark.parametrize("x64", [False, True])
def test_traced_lengths_wider_than_int32_count_as_the_nearest(x64, assert_near):
    arrays = qkv(LONGER)
    with jax.enable_x64(x64):
        f = jax.jit(lambda lengths: flash_attention(*arrays, q_lengths=lengths, causal=True))
        wanted = cases.truth(*arrays, q_lengths=[7, 3], causal=True)["out"]
        for dtype in ["uint32", "uint64", "int64"] if x64 else ["uint32"]:
            lengths = jnp.array([2**31 + 2 if dtype == "uint32" else 2**32 + 2, 3], dtype)
            assert_near(f(lengths), wanted, TOLERANCE["float32"])
    with_zero = flash_attention(*arrays, kv_lengths=jnp.array([-1, 9], "int8"))  # whose type does not hold large numbers
    assert_near(with_zero, cases.truth(*arrays, kv_lengths=[0, 9])["out"], TOLERANCE["float32"])


@pytest.mark.parametrize("dtype", ["uint32", "int64", "uint64"])
@pytest.mark.parametrize("traced", [False, True])
def test_segments_whose_ids_differ_in_high_bits_are_different(dtype, traced, assert_near):
    high = 2**31 if dtype == "uint32" else 2**32
    ids = np.array([[0, high, high, 1, 1, high + 1, high + 1], [3, 3, 3, high + 3, high + 3, high + 3, high + 3]], dtype)
    with jax.enable_x64(True):
        arrays = qkv(EQUAL)
        f = lambda ids: flash_attention(*arrays, q_segment_ids=ids)  # noqa: E731
        out = jax.jit(f)(jnp.asarray(ids)) if traced else f(ids)
    assert_near(out, cases.truth(*arrays, q_segment_ids=ids)["out"], TOLERANCE["float32"])


def test_segments_of_two_integer_types_are_compared_by_value(assert_near):
    """2^32 - 1 and -1 have the same 32 bits."""
    arrays = qkv(EQUAL)
    q_ids = np.array([[0, 2**32 - 1, 0, 5, 5, 0, 0]] * 2, np.uint32)
    kv_ids = np.array([[-1, -1, 0, 0, 5, 5, 0]] * 2, np.int32)
    wanted = cases.truth(*arrays, q_segment_ids=q_ids.astype(np.int64), kv_segment_ids=kv_ids)["out"]
    found = flash_attention(*arrays, q_segment_ids=q_ids, kv_segment_ids=kv_ids)
    assert_near(found, wanted, TOLERANCE["float32"])
    with jax.enable_x64(True):
        f = jax.jit(lambda q_ids, kv_ids: flash_attention(*arrays, q_segment_ids=q_ids, kv_segment_ids=kv_ids))
        assert_near(f(jnp.asarray(q_ids), jnp.asarray(kv_ids)), wanted, TOLERANCE["float32"])
    with pytest.raises(ValueError, match=r"q_segment_ids are uint32 and kv_segment_ids int32: .* cast both to int32"):
        flash_attention(*arrays, q_segment_ids=jnp.asarray(q_ids), kv_segment_ids=jnp.asarray(kv_ids))


@pytest.mark.parametrize("window", [(2**62, None), (2**31 - 1, 0), (np.int64(2**62), 2**62)], ids=str)
@pytest.mark.parametrize("lengths", [None, [4, 9]], ids=["", "lengths"])
def test_a_window_wider_than_any_integer_of_the_kernel_hides_nothing(window, lengths, assert_near):
    arrays = qkv(SHORTER)
    kwargs = {"kv_lengths": lengths, "causal": window[1] == 0}
    found = flash_attention(*arrays, window=window, **kwargs)
    assert_near(found, cases.truth(*arrays, **kwargs)["out"], TOLERANCE["float32"])


BIASES = {
    "full": (2, 2, 7, 9),
    "of all batch entries": (1, 2, 7, 9),
    "of all heads": (2, 1, 7, 9),
    "of all batch entries and heads": (1, 1, 7, 9),
    "of heads": (2, 1, 1),
    "of heads and keys": (2, 1, 9),
    "of rows": (7, 1),
    "of keys": (9,),
    "of batch entries and keys": (2, 1, 1, 9),
    "of batch entries and rows": (2, 1, 7, 1),
    "one number": (),
}


BIASES_IN_ALL = [  # what others show together or one by one
    "of all batch entries",
    "of all heads",
    "of heads",
    "of keys",
    "of rows",
]


@pytest.mark.parametrize("name", cases_of(BIASES, BIASES_IN_ALL))
def test_bias_of_any_shape_has_a_gradient_of_that_shape(name, assert_near):
    with jax.enable_x64(True):
        arrays = *qkv(LONGER, "float64"), normal(3, *BIASES[name])
        kwargs = {"mask": dots("x.xxxxxxx"), "causal": True}
        found = with_gradients(arrays, **kwargs)
        assert found["bias"].shape == BIASES[name]
        assert_true(found, arrays, assert_near, **kwargs)


@pytest.mark.parametrize("dtype", cases_of(["bfloat16", "float16", "float32", "float64"], ["float16"]))
def test_bias_of_any_float_dtype(dtype, assert_near):
    with jax.enable_x64(True):
        arrays = *qkv(GROUPED, "float32"), normal(3, 6, 7, 9, dtype=dtype)
        assert_true(with_gradients(arrays, soft_cap=1.5), arrays, assert_near, soft_cap=1.5)


@pytest.mark.parametrize("options", [{}, {"mask": dots("xx.xxx..x"), "causal": True}, {"scale": -0.5}], ids=str)
def test_a_soft_cap_after_the_bias_caps_their_sum_and_hides_what_a_mask_hides(options, assert_near):
    arrays, options = (*qkv(GROUPED), normal(3, 2, 1, 7, 9)), options | {"soft_cap": 1.5, "soft_cap_after_bias": True}
    assert_true(with_gradients(arrays, **options), arrays, assert_near, **options)


def test_infinities_in_a_bias_hide_before_and_after_the_soft_cap():
    q, k, v = qkv(LONGER)
    bias = np.where(dots("xx.xxx..x"), 0.0, -np.inf)
    for after in (False, True):
        out = flash_attention(q, k, v, bias=bias, soft_cap=1.5, soft_cap_after_bias=after)
        np.testing.assert_array_equal(out, flash_attention(q, k, v, mask=dots("xx.xxx..x"), soft_cap=1.5))


@pytest.mark.parametrize("options", [{"soft_cap": 2.0, "mask": dots("xx.xxx..x")}, {"bias": np.ones((7, 9), F32)}], ids=str)
def test_the_order_of_soft_cap_and_bias_says_nothing_where_one_is_not_there(options):
    """So that the same problem, and its entry, is found either way."""

    def problems(after: bool) -> Any:
        return capture(functools.partial(flash_attention, soft_cap_after_bias=after, **options))(*qkv(LONGER))

    assert problems(False) == problems(True)


def test_bias_in_float64_is_added_in_float64(assert_near):
    with jax.enable_x64(True):
        arrays = *qkv(GROUPED, "float64"), normal(3, 6, 7, 9, dtype="float64")
        assert_true(with_gradients(arrays, mask=dots("x.xxxxxxx")), arrays, assert_near, mask=dots("x.xxxxxxx"))


def test_bias_of_minus_infinity_is_a_mask(assert_near):
    mask = dots("xxxxxxxxx ......... x.x.x.x.x ........x x........ xxx...xxx .xxxxxxxx")
    arrays = qkv(LONGER)
    with_bias = with_gradients((*arrays, jnp.where(mask, 0.0, -jnp.inf)))
    hidden = with_bias.pop("bias")[~mask]
    np.testing.assert_array_equal(hidden, 0)
    for name, x in with_gradients(arrays, mask=mask).items():
        np.testing.assert_allclose(with_bias[name], x, rtol=1e-5, atol=1e-5)


def test_scores_below_the_documented_floor_count_as_not_visible():
    q, k, v = qkv(LONGER)
    bias = jnp.zeros((7, 9)).at[2].set(-1e31).at[3, 4:].set(-1e31)
    out, lse = flash_attention(q, k, v, bias=bias, return_lse=True)
    np.testing.assert_array_equal(out[:, 2], 0)
    assert np.isneginf(lse[:, :, 2]).all()
    np.testing.assert_allclose(out[:, 3], flash_attention(q, k[:, :4], v[:, :4])[:, 3], rtol=1e-5, atol=1e-5)


@pytest.mark.parametrize("dtype", cases_of(["bfloat16", "float16", "float32"], ["float16"]))
def test_rows_that_see_nothing_are_zero_for_any_reason_and_nothing_is_nan(dtype):
    shape = Shape(batch=3, q_tokens=6, kv_tokens=6)
    nobody = np.ones((6, 6), bool)
    nobody[1] = False
    ids = np.array([[0, 0, 3, 0, 0, 0]] * 3)
    arrays = tuple(30 * x for x in qkv(shape, dtype)) + (jnp.zeros((6, 6), dtype).at[3].set(-jnp.inf),)
    with jax.debug_nans(True):
        found = with_gradients(
            arrays,
            mask=nobody,
            causal=True,
            q_lengths=[6, 5, 6],
            kv_lengths=[6, 6, 0],
            q_segment_ids=ids,
            kv_segment_ids=np.zeros((3, 6), int),
        )
    found = {name: float64(x) for name, x in found.items()}
    sees = np.ones((3, 6), bool)
    sees[:, [1, 2, 3]] = sees[1, 5] = sees[2] = False
    for name in ("out", "q"):
        np.testing.assert_array_equal(found[name].any((2, 3)), sees)
    np.testing.assert_array_equal(np.isfinite(found["lse"]).all(1), sees)
    np.testing.assert_array_equal(np.isneginf(found["lse"]).all(1), ~sees)
    np.testing.assert_array_equal(found["k"][2], 0)
    np.testing.assert_array_equal(found["v"][2], 0)
    np.testing.assert_array_equal(found["bias"][[1, 2, 3]], 0)
    assert all(np.isfinite(x).all() for name, x in found.items() if name != "lse")


@pytest.mark.parametrize("scale", [1e-30, 1e4])
def test_extreme_scales_and_large_scores(scale, assert_near):
    arrays = *qkv(LONGER), normal(3, 7, 9) * 1e3
    assert_true(with_gradients(arrays, scale=scale), arrays, assert_near, scale=scale)


def test_numbers_in_padding_have_no_say():
    kwargs = {"q_lengths": jnp.array([3, 7]), "kv_lengths": jnp.array([9, 4]), "causal": True}
    q, k, v = qkv(LONGER)
    clean = with_gradients((q, k, v), **kwargs)
    dirty = with_gradients((q.at[0, 3:].set(1e4), k.at[1, 4:].set(-1e4), v.at[1, 4:].set(1e4)), **kwargs)
    for name, x in clean.items():
        np.testing.assert_array_equal(dirty[name], x)


# --- NaN: shown by whoever sees it, and by nobody else

SEEN: dict[str, tuple[Any, list[int], dict[str, Any]]] = {  # where in batch entry 1 and head 0 a NaN is, and which rows see it
    "q": ((1, 4, 0, 3), [4], {"causal": True}),
    "k": ((1, 5, 0, 3), [3, 4, 5, 6], {"causal": True, "soft_cap": 2.0}),
    "k behind a mask": ((1, 5, 0, 3), [3, 4, 5, 6], {"mask": np.tri(7, 9, 2, bool)}),
    "v": ((1, 5, 0, slice(None)), [3, 4, 5, 6], {"causal": True}),
    "bias": ((1, 0, 4, 2), [4], {"causal": True}),
}


def test_a_row_of_nan_shows_where_xlas_own_maximum_leaves_it_out():
    """XLA's CPU code for the maxima of 64 x 64 numbers passes over NaN, and gives -inf for a row that has nothing else."""
    q, k, v = qkv(Shape(1, 64, 64, 1, 1, 8))
    for causal in (False, True):
        out, lse = flash_attention(q.at[0, 3, 0, 0].set(jnp.nan), k, v, causal=causal, return_lse=True, backend="xla")
        np.testing.assert_array_equal(np.isnan(out).all(-1)[0, :, 0], np.arange(64) == 3)
        np.testing.assert_array_equal(np.isnan(lse)[0, 0], np.arange(64) == 3)


@pytest.mark.parametrize("name", SEEN)
def test_nan_shows_in_the_rows_that_see_it_and_in_their_gradients(name):
    place, rows, kwargs = SEEN[name]
    arrays = dict(zip(["q", "k", "v", "bias"], [*qkv(LONGER), normal(3, 2, 2, 7, 9)]))
    x = name.split()[0]
    arrays[x] = arrays[x].at[place].set(jnp.nan)
    found = {name: np.isnan(y) for name, y in with_gradients(tuple(arrays.values()), **kwargs).items()}
    shown = np.isin(np.arange(7), rows)
    lse = np.zeros((2, 2, 7), bool)
    lse[1, 0] = shown & (x != "v")
    np.testing.assert_array_equal(found["lse"], lse)
    assert found["out"][1, shown, 0].all()
    assert found["q"][1, shown, 0].all()
    assert found["k"][1, : rows[0] + 3, 0].all()  # keys that such a row sees
    assert found["v"][1, : rows[0] + 3, 0].all() == (x != "v")  # the gradient of values depends on none
    if x != "v":  # others, with the weight 0, may show it
        np.testing.assert_array_equal(found["out"][1, :, 0].all(-1), shown)
    for name, y in found.items():  # other batch entries and heads
        heads = 1 if name in ("lse", "bias") else 2
        assert not y[0].any()
        assert not np.moveaxis(y, heads, 0)[1].any()


UNSEEN: dict[str, tuple[Shape, dict[str, Any]]] = {
    "lengths": (LONGER, {"q_lengths": [7, 5], "kv_lengths": [4, 9]}),
    "lengths, causal": (LONGER, {"q_lengths": [7, 0], "kv_lengths": [4, 9], "causal": True}),
    "segments": (LONGER, {"q_segment_ids": IDS, "kv_segment_ids": KEY_IDS + (KEY_IDS == 3) * 90}),
    "segments, lengths": (EQUAL, {"q_segment_ids": IDS, "q_lengths": [5, 6], "kv_lengths": [7, 6]}),
    "mask of keys": (LONGER, {"mask": dots("xx.xxx..x")}),
    "mask of rows": (LONGER, {"mask": dots("x x . x . . x")}),
    "mask of the keys of a batch entry": (LONGER, {"mask": np.stack([dots("xx.xxx..x"), dots(".xxxxxxxx")])[:, None]}),
    "mask of heads": (GROUPED, {"mask": np.arange(6)[:, None, None] < 3}),
    "mask, causal": (
        LONGER,
        {"mask": dots("xxxxxxxxx xxxxxxxxx xxxxxxxxx xxxxxxxxx xxxxxxxxx xxxxxxx.x xxxxxxx.x"), "causal": True},
    ),
    "causal, fewer keys": (SHORTER, {"causal": True}),
    "window, more keys": (LONGER, {"window": (1, 0)}),
}


def poisoned(shape: Shape, dtype: Any, kwargs: dict[str, Any]) -> tuple[tuple[jax.Array, ...], tuple[jax.Array, ...]]:
    """q, k, v and a bias; and the same with NaN wherever no row sees a key or value, a row sees no key, or a pair is hidden."""
    arrays = *qkv(shape, dtype), normal(3, *shape.scores, dtype=dtype)
    seen = cases.visible(shape.scores, **kwargs)
    rows = seen.any(3).swapaxes(1, 2)
    keys = seen.any(2).reshape(shape.batch, shape.kv_heads, -1, shape.kv_tokens).any(2).swapaxes(1, 2)
    return arrays, tuple(
        jnp.where(kept, x, jnp.nan) for x, kept in zip(arrays, (rows[..., None], keys[..., None], keys[..., None], seen))
    )


@pytest.mark.parametrize(
    "name", cases_of(UNSEEN, ["lengths, causal", "segments", "mask of keys", "mask of rows", "causal, fewer keys"])
)
def test_nan_that_no_row_sees_has_no_say(name, assert_near):
    shape, kwargs = UNSEEN[name]
    clean, dirty = (x[: 4 if "causal" in kwargs else 3] for x in poisoned(shape, "float32", kwargs))
    assert any(np.isnan(x).any() for x in dirty[:3])
    assert_true(with_gradients(dirty, **kwargs), clean, assert_near, **kwargs)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"q_lengths": 5, "kv_lengths": jnp.int32(8), "causal": True},
        {"q_lengths": [5], "window": (3, None)},
        {"q_segment_ids": IDS[0], "kv_segment_ids": KEY_IDS[0]},
        {"mask": dots("x.xxxxxxx"), "bias": np.linspace(-1, 1, 2 * 7 * 9).reshape(2, 7, 9)},
    ],
    ids=str,
)
def test_arrays_without_batch(kwargs, assert_near):
    arrays = tuple(x[0] for x in qkv(Shape(batch=1)))
    out, lse = flash_attention(*arrays, return_lse=True, **kwargs)
    wanted = cases.truth(*arrays, **kwargs)
    assert out.shape == (7, 2, 8)
    assert_near(out, wanted["out"], TOLERANCE["float32"])
    np.testing.assert_allclose(lse, wanted["lse"], atol=1e-5)


def test_lse_comes_only_on_request_and_changes_nothing():
    arrays = qkv(LONGER)
    out, lse = flash_attention(*arrays, return_lse=True)
    np.testing.assert_array_equal(out, flash_attention(*arrays))
    assert lse.shape == (2, 2, 7)


def test_causal_is_a_window_with_nothing_to_the_right(assert_near):
    arrays = qkv(LONGER)
    assert_near(flash_attention(*arrays, causal=True), flash_attention(*arrays, window=(None, 0)), 1e-5)


def test_options_are_taken_as_numpy_numbers_too():
    arrays = qkv(LONGER)
    ours = flash_attention(*arrays, window=[np.int64(2), None], scale=np.float32(0.5), soft_cap=jnp.float32(3), causal=np.True_)
    np.testing.assert_array_equal(ours, flash_attention(*arrays, window=(2, None), scale=0.5, soft_cap=3.0, causal=True))


def test_numpy_arrays_are_taken_as_jax_takes_them():
    arrays = [np.asarray(x, np.float64) for x in qkv(LONGER)]
    out = flash_attention(*arrays)
    assert out.dtype == F32
    np.testing.assert_array_equal(out, flash_attention(*(x.astype(np.float32) for x in arrays)))


def test_deterministic_gradients_are_the_same(assert_near):
    plain, deterministic = (with_gradients(qkv(LONGER), deterministic=x) for x in (False, True))
    for name, x in plain.items():
        assert_near(deterministic[name], x, TOLERANCE["float32"])


@st.composite
def calls(draw: Any) -> tuple[Shape, dict[str, Any], dict[str, Any]]:
    """The shape of a legal call, its arrays that have gradients, and those that have none."""
    size, array = st.integers(1, 300), jax.ShapeDtypeStruct
    kv_heads, dtype = draw(st.integers(1, 4)), draw(st.sampled_from(["bfloat16", "float16", "float32"]))
    s = Shape(*(draw(size) for _ in range(3)), kv_heads * draw(st.integers(1, 3)), kv_heads, draw(size), draw(size))
    spread = tuple(draw(st.sampled_from([1, n])) for n in s.scores)[draw(st.integers(0, 4)) :]
    floats = {
        "q": array((s.batch, s.q_tokens, s.q_heads, s.head_dim), dtype),
        "k": array((s.batch, s.kv_tokens, s.kv_heads, s.head_dim), dtype),
        "v": array((s.batch, s.kv_tokens, s.kv_heads, s.v_dim), dtype),
    }
    if draw(st.booleans()):
        floats["bias"] = array(spread, draw(st.sampled_from(["bfloat16", "float16", "float32"])))
    others = {"mask": array(spread, "bool"), "q_lengths": array((s.batch,), "int32"), "kv_lengths": array((s.batch,), "uint8")}
    others = {name: x for name, x in others.items() if draw(st.booleans())}
    if draw(st.booleans()):
        others["q_segment_ids"] = array((s.batch, s.q_tokens), "int32")
        others["kv_segment_ids"] = array((s.batch, s.kv_tokens), "int16")
    return s, floats, others


@examples(5)
@hypothesis.given(calls(), st.booleans())
def test_shapes_and_dtypes_of_outputs_and_gradients(call, causal):
    shape, floats, others = call

    def both(floats: Any, others: Any) -> Any:
        outs, pull = jax.vjp(lambda floats: flash_attention(**floats, **others, causal=causal, return_lse=True), floats)
        return outs, pull(outs)

    (out, lse), (gradients,) = jax.eval_shape(both, floats, others)
    assert (out.shape, out.dtype) == (shape.out, floats["q"].dtype)
    assert (lse.shape, lse.dtype) == (shape.scores[:3], F32)
    assert {name: (x.shape, x.dtype) for name, x in gradients.items()} == {
        name: (x.shape, x.dtype) for name, x in floats.items()
    }


# --- transforms


def test_forward_mode_is_refused_rather_than_wrong():
    q, k, v = qkv(LONGER)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: flash_attention(q, k, v), (q,), (q,))


def test_eager_and_jitted_calls_agree(assert_near):
    arrays = qkv(LONGER)
    f = functools.partial(flash_attention, causal=True)
    assert_near(f(*arrays), jax.jit(f)(*arrays), 1e-5)


NAMES = ["q", "k", "v", "bias", "mask", "kv_lengths", "q_segment_ids"]
MAPPED = {
    "queries": "q",
    "keys": "k",
    "values": "v",
    "bias of all batch entries": "bias",
    "bias of each batch entry": "bias",
    "mask": "mask",
    "lengths": "kv_lengths",
    "segments": "q_segment_ids",
    "queries and bias": "q bias",
    "all arrays": "q k v",
    "everything": " ".join(NAMES),
}


def arguments_of_three(name: str) -> tuple[dict[str, Any], dict[str, int | None]]:
    """Arguments of three calls, and which of them differ between the calls: those have a leading axis."""
    mapped = MAPPED[name].split()
    shape, many = Shape(q_tokens=5, kv_tokens=5, q_heads=2, kv_heads=1, head_dim=4), 3
    arrays = [qkv(shape, seed=10 * i) for i in range(many)]
    batch = 1 if "all" in name else 2
    every = dict(zip("qkv", (jnp.stack(x) for x in zip(*arrays)))) | {
        "bias": normal(3, many, batch, 2, 5, 5),
        "mask": normal(4, many, 1, 1, 5, 5) < 1,
        "kv_lengths": jnp.array([[5, 3], [4, 5], [0, 1]]),
        "q_segment_ids": jnp.asarray(np.random.default_rng(0).integers(0, 2, (many, 2, 5)), jnp.int32),
    }
    axes = {x: 0 if x in mapped else None for x in NAMES}
    return {x: y if x in mapped else y[0] for x, y in every.items()}, axes


def truth_of_three(arguments: dict[str, Any], axes: dict[str, int | None], out_grad: Any) -> tuple[np.ndarray, dict[str, Any]]:
    """Outputs, and the gradients: those of an argument that all calls share are summed."""
    calls = [{x: y if axes[x] is None else y[i] for x, y in arguments.items()} for i in range(3)]
    found = [cases.truth(**call, out_grad=out_grad[i], causal=True) for i, call in enumerate(calls)]
    gradients = {x: np.stack([call[x] for call in found]) for x in NAMES[:4]}
    return np.stack([call["out"] for call in found]), {x: y.sum(0) if axes[x] is None else y for x, y in gradients.items()}


@pytest.mark.parametrize(
    "name", cases_of(MAPPED, ["queries", "keys", "values", "bias of each batch entry", "queries and bias", "all arrays"])
)
def test_vmap_maps_any_of_the_arguments(name, assert_near):
    arguments, axes = arguments_of_three(name)
    out_grad = normal(7, 3, 2, 5, 2, 4)

    def call(arguments: Any) -> jax.Array:
        return flash_attention(**arguments, causal=True)

    @jax.jit
    def run(arguments: Any) -> Any:
        out, pull = jax.vjp(jax.vmap(call, (axes,)), arguments)
        return out, pull(out_grad)[0]

    out, gradients = run(arguments)
    wanted, wanted_gradients = truth_of_three(arguments, axes, out_grad)
    assert_near(out, wanted, TOLERANCE["float32"])
    for x, y in wanted_gradients.items():
        assert gradients[x].shape == arguments[x].shape
        assert_near(gradients[x], y, TOLERANCE["float32"])


def test_gradients_of_each_call_of_a_vmap(assert_near):
    """A shared bias has a gradient in each of the calls."""
    arguments, axes = arguments_of_three("queries and bias")
    arguments["bias"], axes["bias"] = arguments["bias"][0, :1], None

    def loss(arguments: Any) -> jax.Array:
        return (flash_attention(**arguments, causal=True) * normal(7, 2, 5, 2, 4)).sum()

    gradients = jax.jit(jax.vmap(jax.grad(loss, allow_int=True), (axes,)))(arguments)
    for i in range(3):
        call = {x: y if axes[x] is None else y[i] for x, y in arguments.items()}
        wanted = cases.truth(**call, out_grad=normal(7, 2, 5, 2, 4), causal=True)
        for x in NAMES[:4]:
            assert_near(gradients[x][i], wanted[x], TOLERANCE["float32"])


def test_vmap_of_a_cond_maps_the_scale_too(assert_near):
    """JAX maps whatever the branches of a mapped condition read."""
    q, k, v = (jnp.stack([x, x[::-1]]) for x in qkv(LONGER))
    f = functools.partial(flash_attention, causal=True, scale=0.4, soft_cap=3.0)

    def out_and_gradients(q: Any, k: Any, v: Any) -> Any:
        out, pull = jax.vjp(f, q, k, v)
        return out, *pull(out)

    def either(yes: Any, *arrays: Any) -> Any:
        return jax.lax.cond(yes, out_and_gradients, lambda *arrays: tuple(2 * x for x in out_and_gradients(*arrays)), *arrays)

    found = jax.vmap(either)(jnp.array([True, False]), q, k, v)
    for i in range(2):
        for x, wanted in zip(found, out_and_gradients(q[i], k[i], v[i])):
            assert_near(x[i], (1 + i) * wanted, TOLERANCE["float32"])


def test_nested_vmap_over_other_axes(assert_near):
    shape = Shape(batch=6, q_tokens=3, kv_tokens=4, q_heads=1, kv_heads=1, head_dim=2)
    q, k, v = (x.reshape(2, 3, *x.shape[1:]) for x in qkv(shape))
    inner = jax.vmap(flash_attention, (1, 0, 0), 2)
    out = jax.vmap(inner, (0, 0, None))(jnp.moveaxis(q, 1, 2), k, v[0])
    wanted = [[cases.truth(q[i, j], k[i, j], v[0, j])["out"] for j in range(3)] for i in range(2)]
    assert_near(jnp.moveaxis(out, 3, 1), np.array(wanted), TOLERANCE["float32"])


@pytest.mark.parametrize("axes", [(0, 0, 0), (0, None, None), (None, None, 0)], ids=str)
@pytest.mark.parametrize("backend", cases_of([None, "interpret"], ["interpret"]))
def test_vmap_over_no_calls_gives_empty_arrays_and_gradients(axes, backend):
    arrays = [jnp.zeros((0, *x.shape), BF16) if axis == 0 else x for x, axis in zip(qkv(LONGER, BF16), axes)]
    f = functools.partial(flash_attention, return_lse=True, backend=backend)
    (out, lse), pull = jax.vjp(jax.vmap(f, axes), *arrays)
    assert (out.shape, lse.shape) == ((0, 2, 7, 2, 8), (0, 2, 2, 7))
    assert [x.shape for x in pull((out, lse))] == [x.shape for x in arrays]
    biased = jax.vmap(jax.grad(lambda q, bias: flash_attention(q, *qkv(LONGER)[1:], bias=bias, causal=True).sum(), 1))
    assert biased(jnp.zeros((0, 2, 7, 2, 8)), jnp.zeros((0, 7, 9))).shape == (0, 7, 9)
    nested = jax.vmap(jax.vmap(lambda q: flash_attention(q, *qkv(LONGER)[1:])))
    assert nested(jnp.zeros((3, 0, 2, 7, 2, 8))).shape == (3, 0, 2, 7, 2, 8)
    assert nested(jnp.zeros((0, 3, 2, 7, 2, 8))).shape == (0, 3, 2, 7, 2, 8)


def test_scan_and_checkpoint_and_their_gradients(assert_near):
    x, weights = normal(0, 2, 6, 2, 4), normal(1, 3, 3, 4, 4) / 2

    def layer(x: Any, weight: Any) -> Any:
        q, k, v = jnp.einsum("btnd,kde->kbtne", x, weight)
        return x + flash_attention(q, k, v, causal=True, window=(3, None)), None

    def scanned(x: Any, weights: Any) -> Any:
        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0] ** 2).sum()

    def unrolled(x: Any, weights: Any) -> Any:
        for weight in weights:
            x, _ = layer(x, weight)
        return (x**2).sum()

    (value, gradients), (wanted, wanted_gradients) = (
        jax.jit(jax.value_and_grad(f, argnums=(0, 1)))(x, weights) for f in (scanned, unrolled)
    )
    np.testing.assert_allclose(value, wanted, rtol=1e-5)
    for y, z in zip(gradients, wanted_gradients):
        assert_near(y, z, 1e-4)


@pytest.mark.parametrize(
    "kwargs", [{"causal": True, "soft_cap": 3.0}, {"mask": dots("xx.xxx..x"), "window": (3, None)}], ids=str
)
def test_export_with_a_symbolic_batch_and_its_gradients(kwargs, assert_near):
    (batch,) = jax.export.symbolic_shape("b")
    arrays = *qkv(THREE), jnp.array([9, 4, 0]), normal(3, 3, 1, 7, 9)

    def f(q: Any, k: Any, v: Any, lengths: Any, bias: Any) -> Any:
        return flash_attention(q, k, v, kv_lengths=lengths, bias=bias, **kwargs)

    shapes = [jax.ShapeDtypeStruct((batch, *x.shape[1:]), x.dtype) for x in arrays]
    exported = jax.export.export(jax.jit(f))(*shapes)
    out_grad = normal(7, *THREE.out)
    wanted = cases.truth(*arrays[:3], kv_lengths=arrays[3], bias=arrays[4], out_grad=out_grad, **kwargs)
    for n in (1, 3):
        some = [x[:n] for x in arrays]
        assert_near(exported.call(*some), wanted["out"][:n], TOLERANCE["float32"])
    gradients = exported.vjp().call(*arrays, out_grad)
    for found, name in zip((*gradients[:3], gradients[4]), ["q", "k", "v", "bias"]):
        assert_near(found, wanted[name], TOLERANCE["float32"])


def test_export_for_a_gpu_with_a_symbolic_batch_runs_through_xla_or_raises():
    (batch,) = jax.export.symbolic_shape("b")
    shapes = [jax.ShapeDtypeStruct((batch, 7, 2, 64), BF16)] * 3
    with gpu.target("h200"):
        exported = jax.export.export(jax.jit(flash_attention), platforms=["cuda"])(*shapes)
        with pytest.raises(ValueError, match="batch=b is not known when the program is traced"):
            jax.export.export(jax.jit(functools.partial(flash_attention, backend="mosaic")), platforms=["cuda"])(*shapes)
    assert "mosaic_gpu" not in exported.mlir_module()


@pytest.mark.parametrize("shape", ["2, t, 2, 8", "2, 7, h, 8", "2, 7, 2, d"])
def test_other_symbolic_dimensions_raise_with_a_way_out(shape):
    shapes = [jax.ShapeDtypeStruct(jax.export.symbolic_shape(shape), F32)] * 3
    with pytest.raises(ValueError, match=r"q has shape .*: only the batch may be symbolic.* kv_lengths"):
        jax.export.export(jax.jit(flash_attention))(*shapes)


# --- several devices

X = PartitionSpec("x")
HEADS = PartitionSpec(None, None, "x")
WHOLE = PartitionSpec()
BATCH_AND_HEADS = PartitionSpec("x", None, "y")


def mesh(**axes: int) -> jax.sharding.Mesh:
    devices = jax.devices()[: int(np.prod(list(axes.values())))]
    return jax.make_mesh(tuple(axes.values()), tuple(axes), axis_types=(AxisType.Auto,) * len(axes), devices=devices)


SHARDINGS: dict[str, tuple[dict[str, int], Any, Any, Any]] = {  # mesh, q and k and v, bias, lengths
    "batch": ({"x": 4}, X, WHOLE, X),
    "heads": ({"x": 2}, HEADS, PartitionSpec(None, "x"), WHOLE),
    "batch and heads": ({"x": 4, "y": 2}, BATCH_AND_HEADS, PartitionSpec(None, "y"), X),
}


def assert_shards_are_true(
    name: str, devices: dict[str, int], shape: Shape, dtype: str, assert_near: Any, **kwargs: Any
) -> None:
    """Causal attention with bias and lengths, and its gradients, sharded as `SHARDINGS` says over a mesh of `devices`."""
    _, qkv_spec, bias_spec, lengths_spec = SHARDINGS[name]
    arrays = (*qkv(shape, dtype), normal(3, 1, *shape.scores[1:], dtype=dtype))
    lengths, out_grad = jnp.array([6, 3, 0, 5])[: shape.batch], normal(7, *shape.out, dtype=dtype)

    def call(q: Any, k: Any, v: Any, bias: Any, lengths: Any) -> jax.Array:
        return flash_attention(q, k, v, bias=bias, kv_lengths=lengths, causal=True, **kwargs)

    specs = qkv_spec, qkv_spec, qkv_spec, bias_spec, lengths_spec
    sharded = jax.shard_map(call, mesh=mesh(**devices), in_specs=specs, out_specs=qkv_spec)

    @jax.jit
    def run(*arrays: Any) -> Any:
        out, pull = jax.vjp(lambda *arrays: sharded(*arrays, lengths), *arrays)
        return out, *pull(out_grad)

    wanted = cases.truth(*arrays[:3], bias=arrays[3], kv_lengths=lengths, causal=True, out_grad=out_grad)
    for found, x in zip(run(*arrays), ["out", "q", "k", "v", "bias"], strict=True):
        assert_near(found, wanted[x], (1 if x == "out" else 2) * TOLERANCE[dtype])


@pytest.mark.parametrize("given", [{"kv_lengths": [9, 4, 5, 0]}, {"q_lengths": [3, 7, 5, 6]}], ids=["of keys", "of queries"])
def test_lengths_of_one_side_beside_a_batch_split_over_explicit_axes(given, assert_near):
    q, k, v = qkv(Shape(batch=4), "float32")
    devices = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:2])
    with jax.set_mesh(devices):
        q, k, v, lengths = (jax.device_put(x, PartitionSpec("x")) for x in (q, k, v, np.array(*given.values())))
        out = jax.jit(lambda *x, lengths: flash_attention(*x, **dict.fromkeys(given, lengths)))(q, k, v, lengths=lengths)
    assert jax.typeof(out).sharding.spec == PartitionSpec("x", None, None, None)
    assert_near(out, cases.truth(q, k, v, **given)["out"], TOLERANCE["float32"])


def test_gradients_where_xla_splits_the_batch(assert_near):
    arrays, out_grad = qkv(Shape(batch=4), "float32"), normal(7, *Shape(batch=4).out, dtype="float32")

    @jax.jit
    def gradients(*arrays: Any) -> Any:
        return jax.vjp(functools.partial(flash_attention, causal=True), *arrays)[1](out_grad)

    placed = [jax.device_put(x, jax.NamedSharding(mesh(x=2), X)) for x in arrays]
    wanted = cases.truth(*arrays, causal=True, out_grad=out_grad)
    for found, name in zip(gradients(*placed), ["q", "k", "v"], strict=True):
        assert_near(found, wanted[name], 2 * TOLERANCE["float32"])


@pytest.mark.parametrize("name", cases_of(SHARDINGS, ["batch", "heads"]))
def test_shard_map_and_its_gradients(name, assert_near):
    shape = Shape(batch=4, q_tokens=5, kv_tokens=6, q_heads=4, kv_heads=2, head_dim=4)
    assert_shards_are_true(name, SHARDINGS[name][0], shape, "float32", assert_near)


@pytest.mark.parametrize("backend", ["xla", "mosaic"])
@pytest.mark.parametrize("argument", ["q", "k", "v", "bias", "sinks", "q_lengths", "q_segment_ids"])
def test_output_varies_over_the_mesh_axes_that_any_argument_varies_over(backend, argument):
    """Else shard_map would take an output that differs between devices for a replicated one."""
    seen = []

    def product(arguments: Any) -> jax.Array:
        out = flash_attention(**arguments, backend=backend)
        seen.append(jax.typeof(out).manual_axis_type.varying)
        return out

    shapes = dict.fromkeys("qkv", ((2, 64, 2, 64), BF16)) | {
        "bias": ((2, 1, 64, 64), BF16),
        "sinks": ((2,), F32),
        "q_lengths": ((2,), "int32"),
        "q_segment_ids": ((2, 64), "int32"),
    }
    devices = {name: 2 if name == argument else 1 for name in shapes}
    arrays = {name: jax.ShapeDtypeStruct((devices[name] * s[0], *s[1:]), dtype) for name, (s, dtype) in shapes.items()}
    specs = {name: X if name == argument else WHOLE for name in shapes}
    abstract = AbstractMesh((2,), ("x",), axis_types=(AxisType.Auto,))
    with gpu.target("h200"):
        jax.eval_shape(jax.shard_map(product, mesh=abstract, in_specs=(specs,), out_specs=X), arrays)
    assert seen == [{"x"}]


# --- sinks

SINK_CASES: dict[str, tuple[Shape, dict[str, Any]]] = {
    "no mask": (LONGER, {}),
    "grouped heads, causal, window, lengths, rows that see nothing": (
        Shape(3, 9, 7, 6, 2),
        {"causal": True, "window": (3, None), "q_lengths": [9, 5, 3], "kv_lengths": [7, 6, 0]},
    ),
    "soft cap, bias, mask, negative scale": (
        LONGER,
        {"soft_cap": 0.7, "bias": np.linspace(-2, 2, 63).reshape(7, 9), "mask": dots("xx.xxx..x"), "scale": -0.5},
    ),
    "segments": (EQUAL, {"q_segment_ids": IDS, "causal": True}),
}


def with_sinks(arrays: tuple[Any, ...], sinks: Any, **kwargs: Any) -> dict[str, Any]:
    """Output, lse and the gradients of q, k, v and the sinks, for random gradients of the first two."""

    @jax.jit
    def run(*arrays: Any) -> Any:
        f = lambda q, k, v, sinks: flash_attention(q, k, v, sinks=sinks, return_lse=True, **kwargs)  # noqa: E731
        outs, pull = jax.vjp(f, *arrays)
        return outs, pull(cotangents(*outs))

    return dict(zip(["out", "lse", "q", "k", "v", "sinks"], itertools.chain(*run(*arrays, sinks)), strict=True))


def assert_true_with_sinks(arrays: tuple[Any, ...], sinks: Any, assert_near: Any, tolerance: float, **kwargs: Any) -> None:
    """Output, lse and gradients are those of the formula. The named backend and configs say nothing of the formula."""
    found = with_sinks(arrays, sinks, **kwargs)
    out_grad, lse_grad = cotangents(found["out"], found["lse"])
    formula = {name: x for name, x in kwargs.items() if name not in ("backend", "config", "backward_config")}
    wanted = cases.truth(*arrays, sinks=sinks, out_grad=out_grad, lse_grad=lse_grad, **formula)
    wanted.pop("bias", None)
    assert found.keys() == wanted.keys()
    assert found["sinks"].dtype == sinks.dtype
    np.testing.assert_allclose(found["lse"], wanted["lse"], rtol=max(tolerance, 1e-6), atol=max(tolerance, 1e-6))
    for name in ("out", "q", "k", "v", "sinks"):
        np.testing.assert_array_equal(float64(found[name])[wanted[name] == 0], 0)
        assert_near(found[name], wanted[name], tolerance if name == "out" else max(tolerance, 1e-6))  # lse is float32


@pytest.mark.parametrize("name", cases_of(SINK_CASES, ["no mask", "segments"]))
def test_sinks_count_in_the_sums_and_have_a_gradient(name, assert_near):
    shape, kwargs = SINK_CASES[name]
    with jax.enable_x64(True):
        sinks = normal(4, shape.q_heads, dtype="float64")
        assert_true_with_sinks(qkv(shape, "float64"), sinks, assert_near, TOLERANCE["float64"], **kwargs)


@pytest.mark.parametrize("dtype", cases_of(["bfloat16", "float32"], ["float32"]))
def test_sinks_of_the_inputs_dtype_or_float32(dtype, assert_near):
    sinks = normal(4, 6, dtype=dtype)
    assert_true_with_sinks(qkv(GROUPED, "bfloat16"), sinks, assert_near, TOLERANCE["bfloat16"], causal=True)


def test_a_sink_of_minus_infinity_is_none_and_a_huge_one_leaves_nothing():
    arrays, kwargs = qkv(Shape(q_tokens=9, kv_tokens=6, q_heads=6, kv_heads=6)), {"causal": True}
    sinks = jnp.array([-jnp.inf, -3e38, 1e4, 1e30, 3e38, jnp.inf], "float32")
    with jax.debug_nans(True):
        found, none = with_sinks(arrays, sinks, **kwargs), with_gradients(arrays, **kwargs)
    np.testing.assert_array_equal(found["out"][:, :, :2], none["out"][:, :, :2])
    np.testing.assert_array_equal(found["lse"][:, 0], none["lse"][:, 0])
    np.testing.assert_array_equal(found["out"][:, :, 2:], 0)
    for name in ("q", "k", "v"):  # as many heads of keys as of queries
        np.testing.assert_allclose(found[name][:, :, :2], none[name][:, :, :2], rtol=1e-6, atol=1e-6)
        np.testing.assert_array_equal(found[name][:, :, 2:], 0)
    np.testing.assert_allclose(found["lse"][:, 2:], np.broadcast_to(sinks[2:, None], (2, 4, 9)), rtol=1e-6)
    lse_grad = cotangents(found["out"], found["lse"])[1]
    np.testing.assert_allclose(found["sinks"][2:4], lse_grad.sum((0, 2))[2:4], rtol=1e-4)  # lse is the sink
    np.testing.assert_array_equal(found["sinks"][0], 0)
    assert np.isfinite(found["sinks"]).all()


def test_a_nan_sink_shows_in_its_head_alone():
    found = with_sinks(qkv(LONGER), jnp.array([0.5, jnp.nan]), causal=True)
    for name in ("out", "lse", "q", "sinks"):
        heads = np.moveaxis(np.asarray(found[name]), {"lse": 1, "sinks": 0}.get(name, 2), 0)
        assert np.isfinite(heads[0]).all()
        assert np.isnan(heads[1]).all()


@pytest.mark.parametrize("axes", cases_of([(None, 0), (0, None), (0, 0)], [(0, None), (0, 0)]), ids=str)
def test_vmap_of_sinks_and_their_gradients(axes, assert_near):
    """Also of sinks alone, which makes them ones of batch entries."""
    q, k, v = qkv(replace(GROUPED, batch=6))
    q, sinks = q.reshape(3, 2, *q.shape[1:]), normal(4, 3, 6)
    k, v = k[:2], v[:2]
    given = tuple(x if axis == 0 else x[0] for x, axis in zip((q, sinks), axes))
    out_grad = normal(7, 2, 7, 6, 8)

    def loss(q: Any, sinks: Any) -> jax.Array:
        return (flash_attention(q, k, v, sinks=sinks, causal=True) * out_grad).sum()

    gradients = jax.jit(jax.vmap(jax.grad(loss, (0, 1)), axes))(*given)
    for i in range(3):
        one_q, one = (x[i] if axis == 0 else x for x, axis in zip(given, axes))
        wanted = cases.truth(one_q, k, v, sinks=one, causal=True, out_grad=out_grad)
        for found, name in zip(gradients, ("q", "sinks")):
            assert_near(found[i], wanted[name], TOLERANCE["float32"])


def test_sinks_under_shard_map_and_checkpoint(assert_near):
    """Sinks are replicated over devices that share out the batch: their gradients add up."""
    arrays, sinks, out_grad = qkv(replace(GROUPED, batch=4)), normal(4, 6), normal(7, 4, 7, 6, 8)
    f = jax.checkpoint(functools.partial(flash_attention, causal=True))
    sharded = jax.shard_map(lambda *x: f(*x[:3], sinks=x[3]), mesh=mesh(x=4), in_specs=(X, X, X, WHOLE), out_specs=X)

    @jax.jit
    def run(*given: Any) -> Any:
        out, pull = jax.vjp(sharded, *given)
        return out, *pull(out_grad)

    wanted = cases.truth(*arrays, sinks=sinks, causal=True, out_grad=out_grad)
    for found, name in zip(run(*arrays, sinks), ("out", "q", "k", "v", "sinks")):
        assert_near(found, wanted[name], TOLERANCE["float32"])


@only_in_all
def test_gradients_of_sinks_through_the_kernels(assert_near):
    """Some rows see nothing, and some are padding."""
    arrays, sinks = qkv(Shape(2, 5, 6, 2, 1, 64), "bfloat16"), normal(4, 2)
    kwargs = {"q_lengths": [5, 2], "kv_lengths": [6, 0], "causal": True}
    configs = {"config": BASE, "backward_config": FUSED_64, "backend": "interpret"}
    assert_true_with_sinks(arrays, sinks, assert_near, 2 * TOLERANCE["bfloat16"], **kwargs, **configs)


# --- through the kernel, interpreted


@pytest.mark.parametrize("backward_config", [FUSED_64, pytest.param(SPLIT_64, marks=only_in_all)], ids=["fused", "split"])
def test_shard_map_and_its_gradients_through_the_kernels(backward_config, assert_near):
    """On one device: two would share the interpreter's memory. dq and the bias's gradient are what fused blocks add to."""
    shape = Shape(batch=2, q_tokens=5, kv_tokens=6, q_heads=2, kv_heads=1, head_dim=64)
    kwargs = {"config": BASE, "backward_config": one_step(backward_config), "deterministic": backward_config.mode == "split"}
    assert_shards_are_true("batch and heads", {"x": 1, "y": 1}, shape, "bfloat16", assert_near, backend="interpret", **kwargs)


def test_vmap_through_the_kernel(assert_near):
    """Queries that are mapped, a bias, a padded head_dim, values of another one, a negative scale."""
    q, k, v = qkv(Shape(batch=2, q_tokens=5, kv_tokens=9, q_heads=1, kv_heads=1, head_dim=24, v_dim=40), "bfloat16")
    bias = normal(3, 5, 9, dtype="bfloat16")
    f = functools.partial(flash_attention, bias=bias, scale=-0.3, causal=True, config=BASE, backend="interpret")
    out = jax.vmap(f, (0, None, None))(q, k[0], v[0])
    wanted = [cases.truth(x, k[0], v[0], bias=bias, scale=-0.3, causal=True)["out"] for x in q]
    assert_near(out, np.array(wanted), TOLERANCE["bfloat16"])


# --- which backend and config runs


def test_why_xla_runs_is_logged_once_per_reason(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    arrays = qkv(replace(LONGER, q_tokens=3))
    with caplog.at_level(logging.WARNING, "mgpu_ops"), gpu.target("h200"):
        for window in (1, 2):
            jax.eval_shape(functools.partial(flash_attention, window=(window, 3)), *arrays)
    messages = [record.getMessage() for record in caplog.records]
    assert messages == ["flash_attention runs through XLA: " + reason_of(arrays)]


def reason_of(arrays: tuple[jax.Array, ...]) -> str:
    (b, t, n, d), (_, s, m, _) = arrays[0].shape, arrays[1].shape
    spec = mgpu_ops.spec_of("flash_attention")
    return spec.supports(spec.Problem(b, t, s, n, m, d, arrays[0].dtype.name), gpu.find("h200"))


def test_rows_that_32_bits_cannot_count_are_refused():
    spec = mgpu_ops.spec_of("flash_attention")
    at_most = spec.Problem(1, 64, 64, 2**23 - 1, 2**23 - 1, 256)
    assert spec.supports(at_most, gpu.find("h200")) is None
    reason = spec.supports(replace(at_most, q_heads=2**23, kv_heads=2**23), gpu.find("h200"))
    assert reason == "q_heads=8388608 of 256 are rows of more than 2147483392: split them, or use backend='xla'"


@pytest.fixture
def configs_that_run(monkeypatch: pytest.MonkeyPatch) -> Iterator[list[Any]]:
    """The op and config of every kernel that is traced from now on; the kernel itself is XLA's product."""
    seen: list[Any] = []
    module = importlib.import_module("mgpu_ops.attention.flash_attention")

    def stand_in(spec: Any) -> Any:
        def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool) -> Any:
            seen.append((spec.name, config))
            return spec.reference(problem, *arrays)

        return replace(spec, run=run)

    jax.clear_caches()
    for name in ("FORWARD", "BACKWARD"):
        monkeypatch.setattr(module, name, stand_in(getattr(module, name)))
    yield seen
    jax.clear_caches()


def test_use_configs_retraces_and_ends_with_its_block(configs_that_run):
    arrays = qkv(replace(LONGER, head_dim=64), "bfloat16")
    f = jax.jit(lambda *arrays: flash_attention(*arrays))
    with gpu.target("h20"):
        f(*arrays)
        with use_configs({"flash_attention": OTHER}):
            f(*arrays)
            f(*arrays)  # traced already
        f(*arrays)
    (_, first), *rest = configs_that_run
    assert first != OTHER
    assert rest == [("flash_attention", OTHER)]


def test_each_pass_has_a_config_of_its_own(configs_that_run):
    arrays = qkv(replace(LONGER, head_dim=64), "bfloat16")
    backward = mgpu_ops.spec_of("flash_attention_backward")
    problem = backward.Problem(2, 7, 9, 2, 2, 64)
    other = backward.candidates(problem, gpu.find("h20"))[-1]
    with gpu.target("h20"), use_configs({"flash_attention": BASE}):
        loss = lambda *x: flash_attention(*x, config=OTHER, backward_config=other).sum().astype(F32)  # noqa: E731
        jax.eval_shape(jax.grad(loss), *arrays)
    assert configs_that_run == [("flash_attention", OTHER), ("flash_attention_backward", other)]


def test_config_that_cannot_run_raises_at_the_call_with_its_reason():
    arrays = qkv(LONGER, "bfloat16")
    bad = replace(BASE, tile_kv=96)
    for where in ("argument", "override"):
        with (
            pytest.raises(ValueError, match=r"(?s)tile_kv=96.*cannot run .*must be a multiple of 64"),
            use_configs({"flash_attention": bad} if where == "override" else {}),
        ):
            flash_attention(*arrays, config=bad if where == "argument" else None, backend="interpret")


# --- errors: the value, the rule, the way out

ARRAYS = (2, 7, 4, 8), (2, 9, 2, 8), (2, 9, 2, 8)


def shaped(q: Any = ARRAYS[0], k: Any = ARRAYS[1], v: Any = ARRAYS[2]) -> tuple[jax.Array, ...]:
    return tuple(jnp.ones(s, BF16) for s in (q, k, v))


Q, K, V = shaped()
IDS_2x7, IDS_2x9 = np.zeros((2, 7), int), np.zeros((2, 9), int)

BAD_ARRAYS = {
    "heads": (shaped(q=(2, 7, 3, 8)), ValueError, "q has 3 heads and k 2: .* the first must be a multiple of the second"),
    "more heads of keys": (shaped(q=(2, 7, 1, 8)), ValueError, "q has 1 heads and k 2: .*must be a multiple"),
    "heads of values": (
        shaped(v=(2, 9, 1, 8)),
        ValueError,
        r"k\(2, 9, 2, 8\) and v\(2, 9, 1, 8\) differ: each key needs a value",
    ),
    "tokens of values": (shaped(v=(2, 8, 2, 8)), ValueError, r"v\(2, 8, 2, 8\) differ: each key needs a value.*must be equal"),
    "head_dim": (shaped(k=(2, 9, 2, 4)), ValueError, r"q\(2, 7, 4, 8\) and k\(2, 9, 2, 4\) differ in head_dim: 8 != 4"),
    "batch": (shaped(q=(3, 7, 4, 8)), ValueError, r"q\(3, 7, 4, 8\) and k\(2, 9, 2, 8\) differ in batch: 3 != 2"),
    "rank": (
        shaped(q=(7, 8)),
        ValueError,
        r"q has shape \(7, 8\): .* \[batch, tokens, heads, head_dim\] or all \[tokens, heads",
    ),
    "other rank": (shaped(k=(9, 2, 8)), ValueError, r"k has shape \(9, 2, 8\): q, k and v must all be"),
    "rank of values": (shaped(v=(1, 2, 9, 2, 8)), ValueError, r"v has shape \(1, 2, 9, 2, 8\): q, k and v must all be"),
    "no queries": (
        shaped(q=(2, 0, 4, 8)),
        ValueError,
        r"q has shape \(2, 0, 4, 8\): an empty dimension leaves nothing to attend",
    ),
    "no keys": (shaped(k=(2, 0, 2, 8), v=(2, 0, 2, 8)), ValueError, r"k has shape \(2, 0, 2, 8\): an empty dimension"),
    "no batch entries": (shaped((0, 7, 4, 8), (0, 9, 2, 8), (0, 9, 2, 8)), ValueError, r"q has shape \(0, 7, 4, 8\): an empty"),
    "no heads": (shaped(q=(2, 7, 0, 8)), ValueError, r"q has shape \(2, 7, 0, 8\): an empty dimension"),
    "dtypes": ((Q, K.astype(F16), V), ValueError, "k has dtype float16 and q bfloat16: cast them to one"),
    "dtype of values": ((Q, K, V.astype(F32)), ValueError, "v has dtype float32 and q bfloat16: cast them to one"),
    "integers": ((Q.astype(int), K, V), TypeError, "q has dtype int32: flash_attention takes floats; cast it first"),
    "booleans": ((Q, K.astype(bool), V), TypeError, "k has dtype bool: flash_attention takes floats; cast it first"),
    "none": ((None, K, V), TypeError, "q is None, which is no array: flash_attention takes arrays of floats"),
    "complex numbers": ((Q, K, V.astype("complex64")), TypeError, "v has dtype complex64: flash_attention takes floats"),
}


@pytest.mark.parametrize("name", BAD_ARRAYS)
def test_arrays_that_do_not_fit_each_other_raise(name):
    arrays, error, message = BAD_ARRAYS[name]
    with pytest.raises(error, match=f"(?s){message}"):
        flash_attention(*arrays)


BAD_OPTIONS: list[tuple[dict[str, Any], type[Exception], str]] = [
    # windows
    ({"window": 4}, ValueError, r"window=4 must be \(left, right\): keys before and after the aligned one, None for all"),
    ({"window": (4,)}, ValueError, r"window=\(4,\) must be \(left, right\)"),
    ({"window": (1, 2, 3)}, ValueError, r"window=\(1, 2, 3\) must be \(left, right\)"),
    ({"window": (-1, 2)}, ValueError, r"window=\(-1, 2\): left must be 0 or more keys, or None for all"),
    ({"window": (2, -3)}, ValueError, r"window=\(2, -3\): right must be 0 or more keys, or None for all"),
    ({"window": (2.0, 1)}, TypeError, r"window=\(2.0, 1\): left must be a whole number of keys, or None for all"),
    ({"window": (1, True)}, TypeError, r"window=\(1, True\): right must be a whole number of keys"),
    # lengths
    ({"q_lengths": [1, 2, 3]}, ValueError, r"q_lengths has shape \(3,\): it must be \[batch\] = \(2,\)"),
    ({"kv_lengths": 4}, ValueError, r"kv_lengths has shape \(\): it must be \[batch\] = \(2,\)"),
    ({"kv_lengths": [[1], [2]]}, ValueError, r"kv_lengths has shape \(2, 1\): it must be \[batch\] = \(2,\)"),
    ({"q_lengths": [1.0, 2.0]}, TypeError, "q_lengths has dtype float64: it must hold integers"),
    ({"kv_lengths": [True, False]}, TypeError, "kv_lengths has dtype bool: it must hold integers"),
    ({"kv_lengths": "all"}, TypeError, "kv_lengths is 'all', which is no array of integers"),
    # segments
    ({"q_segment_ids": IDS_2x7}, ValueError, "q has 7 tokens and k 9: give kv_segment_ids beside q_segment_ids"),
    ({"kv_segment_ids": IDS_2x9}, ValueError, "kv_segment_ids without q_segment_ids: give the queries' segments too"),
    (
        {"q_segment_ids": IDS_2x9, "kv_segment_ids": IDS_2x9},
        ValueError,
        r"q_segment_ids has shape \(2, 9\): it must be \[batch, tokens\] = \(2, 7\)",
    ),
    (
        {"q_segment_ids": IDS_2x7, "kv_segment_ids": IDS_2x9[0]},
        ValueError,
        r"kv_segment_ids has shape \(9,\): it must be \[batch, tokens\] = \(2, 9\)",
    ),
    (
        {"q_segment_ids": IDS_2x7 * 1.0, "kv_segment_ids": IDS_2x9},
        TypeError,
        "q_segment_ids has dtype float64: it must hold integers",
    ),
    # bias and mask
    ({"bias": np.ones((3, 9))}, ValueError, r"bias has shape \(3, 9\): it must broadcast to .* = \(2, 4, 7, 9\)"),
    ({"bias": np.ones((1, 2, 4, 7, 9))}, ValueError, r"bias has shape \(1, 2, 4, 7, 9\): it must broadcast to"),
    ({"bias": np.ones((7, 9), int)}, TypeError, "bias has dtype int32: it must hold floats; pass booleans as mask"),
    ({"bias": "alibi"}, TypeError, "bias is 'alibi', which is no array: flash_attention takes arrays of floats"),
    ({"mask": "causal"}, TypeError, "mask is 'causal', which is no array: flash_attention takes arrays of booleans"),
    ({"bias": np.ones((7, 9), bool)}, TypeError, "bias has dtype bool: it must hold floats; pass booleans as mask"),
    (
        {"mask": np.ones((2, 1, 9, 7), bool)},
        ValueError,
        r"mask has shape \(2, 1, 9, 7\): .*\[batch, q_heads, q_tokens, kv_tokens\]",
    ),
    ({"mask": np.ones((7, 9))}, TypeError, "mask has dtype float32: it must hold booleans; pass floats as bias"),
    ({"sinks": np.ones(3)}, ValueError, r"sinks has shape \(3,\): it must be \[q_heads\] = \(4,\)"),
    ({"sinks": np.ones(4, int)}, TypeError, "sinks has dtype int32: flash_attention takes floats; cast it first"),
    # numbers
    ({"scale": 0}, ValueError, "scale=0 must be a finite number other than 0"),
    ({"scale": "x"}, TypeError, "scale='x' is no number"),
    ({"scale": True}, TypeError, "scale=True is no number"),
    ({"soft_cap": 10**400}, ValueError, "soft_cap=10000.* must be a finite number above 0"),
    ({"scale": float("nan")}, ValueError, "scale=nan must be a finite number other than 0"),
    ({"scale": float("inf")}, ValueError, "scale=inf must be a finite number"),
    ({"soft_cap": 0.0}, ValueError, "soft_cap=0.0 must be a finite number above 0"),
    ({"soft_cap": -5}, ValueError, "soft_cap=-5 must be a finite number above 0"),
    # configs and backends
    ({"config": {"tile_kv": 64}}, TypeError, "config is .*64.*: pass a mgpu_ops.FlashAttentionConfig"),
    ({"backward_config": BASE}, TypeError, "backward_config is .*: pass a mgpu_ops.FlashAttentionBackwardConfig"),
    ({"backend": "cuda"}, ValueError, "backend='cuda' is not one of mosaic, interpret, xla"),
    ({"backend": "mosaic"}, ValueError, "backend='mosaic' cannot run flash_attention .*: no NVIDIA GPU is in use"),
]


@pytest.mark.parametrize(("kwargs", "error", "message"), BAD_OPTIONS, ids=[" ".join(x[0]) for x in BAD_OPTIONS])
def test_error_names_the_value_the_rule_and_the_way_out(kwargs, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        flash_attention(Q, K, V, **kwargs)


@pytest.mark.parametrize("name", ["scale", "soft_cap"])
def test_traced_numbers_raise_with_a_way_out(name):
    f = jax.jit(lambda x: flash_attention(Q, K, V, **{name: x}))
    with pytest.raises(TypeError, match=f"{name} is traced: it must be known before the function runs"):
        f(0.5)


def test_wide_heads_are_refused_by_the_kernel_only():
    arrays = qkv(replace(LONGER, head_dim=264), "bfloat16")
    assert flash_attention(*arrays).shape == (2, 7, 2, 264)
    with pytest.raises(ValueError, match="head_dim=264 is more than 256: use backend='xla'"):
        flash_attention(*arrays, backend="interpret")


def test_lengths_that_are_traced_raise_only_for_their_shape_and_dtype():
    f = jax.jit(lambda lengths: flash_attention(Q, K, V, kv_lengths=lengths))
    assert np.isfinite(float64(f(jnp.array([-1, 100])))).all()
    with pytest.raises(ValueError, match=r"kv_lengths has shape \(3,\)"):
        f(jnp.array([1, 2, 3]))
    with pytest.raises(TypeError, match="kv_lengths has dtype float32"):
        f(jnp.ones(2))
