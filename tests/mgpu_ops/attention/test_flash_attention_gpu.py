"""flash_attention on a Hopper GPU: what the interpreter and the compiler cannot show. The truth is NumPy's float64."""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Iterator
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import FlashAttentionConfig, flash_attention, spec_of, use_configs
from mgpu_ops.attention.problem import ONE_WARPGROUP
from mgpu_ops.core import gpu
from tests.mgpu_ops.attention import cases
from tests.mgpu_ops.attention.cases import Shape, normal, qkv
from tests.mgpu_ops.grouped.ragged import float64

pytestmark = pytest.mark.gpu

FORWARD, BACKWARD = spec_of("flash_attention"), spec_of("flash_attention_backward")
BF16, F32 = jnp.bfloat16, jnp.float32
TOLERANCE = {"bfloat16": (1e-2, 0.1), "float16": (1.5e-3, 1.5e-2)}  # of the root mean square of errors, and of any one
NAMES = ["out", "lse", "q", "k", "v", "bias"]


@pytest.fixture
def assert_close(assert_near: Any) -> Any:
    """Both the root mean square of the error and every single one are small, each as `TOLERANCE` has it."""

    def check(out: Any, wanted: Any, dtype: Any, roundings: int = 1) -> None:
        rms, largest = TOLERANCE[jnp.dtype(dtype).name]
        error = np.sqrt(np.mean((float64(out) - float64(wanted)) ** 2) / np.mean(float64(wanted) ** 2))
        assert error < roundings * rms
        assert_near(out, wanted, roundings * largest)

    return check


def poison(*arrays: Any) -> None:
    """Frees memory full of NaN, which outputs of the arrays' sizes will be put in: an element left unwritten shows."""
    blocks = [jnp.full(x.shape, jnp.nan, dtype) for x in arrays for dtype in (x.dtype, F32) for _ in range(2)]
    jax.block_until_ready(blocks)


def cotangents(out: Any, lse: Any) -> tuple[jax.Array, jax.Array]:
    return normal(7, *out.shape, dtype=out.dtype), normal(8, *lse.shape, dtype=lse.dtype)


def runner(**kwargs: Any) -> Any:
    """Output, lse and gradients by the kernels, as one jitted function of q, k, v and perhaps a bias."""

    def both(q: Any, k: Any, v: Any, *bias: Any) -> Any:
        return flash_attention(q, k, v, bias=bias[0] if bias else None, return_lse=True, **{"backend": "mosaic"} | kwargs)

    @jax.jit
    def run(*arrays: Any) -> Any:
        outs, pull = jax.vjp(both, *arrays)
        return *outs, *pull(cotangents(*outs))

    return run


def with_gradients(arrays: tuple[Any, ...], **kwargs: Any) -> dict[str, jax.Array]:
    run = runner(**kwargs).lower(*arrays).compile()
    poison(*arrays)
    return dict(zip(NAMES, run(*arrays)))


def assert_true(found: dict[str, Any], arrays: tuple[Any, ...], assert_close: Any, **kwargs: Any) -> None:
    """`found` is `attention.truth`, exactly zero where nothing is visible, and has no NaN."""
    out_grad, lse_grad = cotangents(found["out"], found["lse"])
    bias = arrays[3] if len(arrays) > 3 else None
    wanted = cases.truth(*arrays[:3], bias=bias, out_grad=out_grad, lse_grad=lse_grad, **kwargs)
    lse = wanted.pop("lse")
    assert found.keys() == {"lse", *wanted}
    np.testing.assert_array_equal(np.isneginf(found["lse"]), np.isneginf(lse))
    np.testing.assert_allclose(found["lse"], lse, rtol=1e-4, atol=1e-4)
    nothing, unseen = np.isneginf(lse).swapaxes(1, 2), ~wanted["v"].any(-1)
    for name, hidden in (("out", nothing), ("q", nothing), ("k", unseen), ("v", unseen)):
        np.testing.assert_array_equal(float64(found[name])[hidden], 0)
    for name, x in wanted.items():
        if np.abs(x).max() < 1e-6:
            np.testing.assert_allclose(float64(found[name]), 0, atol=1e-5)
        else:
            assert_close(found[name], x, arrays[0].dtype)


# --- values and gradients

SHAPES = [  # batch, q_tokens, kv_tokens, q_heads, kv_heads, head_dim, v_dim
    Shape(1, 1, 1, 1, 1, 64),
    Shape(3, 1, 1000, 8, 2, 128),
    Shape(2, 127, 129, 3, 3, 64),
    Shape(1, 1024, 1024, 4, 4, 128),
    Shape(3, 333, 777, 6, 2, 64),
    Shape(1, 777, 333, 4, 1, 128),
    Shape(2, 200, 200, 2, 1, 256),
    Shape(1, 257, 511, 4, 2, 256),
    Shape(1, 520, 300, 2, 2, 80),
    Shape(1, 300, 520, 4, 2, 96, 160),
    Shape(2, 65, 4097, 1, 1, 64),
    Shape(1, 4097, 65, 1, 1, 128),
    Shape(5, 100, 100, 40, 8, 64),
]
MASKS: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "window": {"window": (100, 30)},
    "causal window": {"causal": True, "window": (200, None)},
}


@pytest.mark.parametrize("mask", MASKS)
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_right(shape, mask, assert_close):
    arrays = qkv(shape, BF16)
    assert_true(with_gradients(arrays, **MASKS[mask]), arrays, assert_close, **MASKS[mask])


def segments(batch: int, tokens: int, packed: bool, seed: int = 0) -> np.ndarray:
    ids = np.random.default_rng(seed).integers(0, 4, (batch, tokens))
    return np.sort(ids, axis=1) if packed else ids


MIDDLE = Shape(3, 250, 390, 4, 2, 64)
OPTIONS: dict[str, dict[str, Any]] = {
    "lengths": {"q_lengths": [250, 0, 77], "kv_lengths": [0, 390, 200]},
    "lengths, causal, window": {
        "q_lengths": [250, 130, 77],
        "kv_lengths": [380, 390, 60],
        "causal": True,
        "window": (90, None),
    },
    "lengths out of range": {"q_lengths": [-5, 300, 77], "kv_lengths": [10, 1000, -1], "causal": True},
    "segments": {"q_segment_ids": segments(3, 250, True), "kv_segment_ids": segments(3, 390, True)},
    "segments, causal": {"q_segment_ids": segments(3, 250, True), "kv_segment_ids": segments(3, 390, True), "causal": True},
    "segments in any order": {"q_segment_ids": segments(3, 250, False), "kv_segment_ids": segments(3, 390, False)},
    "soft cap": {"soft_cap": 2.0},
    "soft cap, causal": {"soft_cap": 30.0, "causal": True, "scale": 2.0},
    "soft cap after the bias": {"soft_cap": 2.0, "soft_cap_after_bias": True},
    "negative scale": {"scale": -0.3, "window": (None, 4)},
    "mask": {"mask": np.random.default_rng(0).random((3, 1, 250, 390)) < 0.3},
    "mask of rows and heads": {"mask": np.random.default_rng(0).random((4, 250, 1)) < 0.5, "causal": True},
}


@pytest.mark.parametrize("causal", [True, False])
@pytest.mark.parametrize("head_dim", [64, 80, 128, 160, 256])
def test_packed_sequences_are_right_where_tiles_are_dealt(head_dim, causal, assert_close):
    """There are more tiles than SMs, and an SM gets the next one when it is idle; the same bits each time."""
    arrays = qkv(Shape(4, 1555, 1555, 9, 3, head_dim), BF16)
    ids = segments(4, 1555, True, head_dim)
    options = {"causal": causal, "q_segment_ids": ids, "kv_segment_ids": ids}
    found = with_gradients(arrays, **options)
    assert_true(found, arrays, assert_close, **options)
    np.testing.assert_array_equal(found["out"], with_gradients(arrays, **options)["out"])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", OPTIONS)
def test_any_option_is_right(name, head_dim, assert_close):
    arrays = qkv(replace(MIDDLE, head_dim=head_dim), BF16)
    arrays += (normal(5, 1, 4, 250, 390, dtype=BF16),) if "soft_cap_after_bias" in OPTIONS[name] else ()
    assert_true(with_gradients(arrays, **OPTIONS[name]), arrays, assert_close, **OPTIONS[name])


HEAD_DIMS = [(80, 80), (96, 96), (112, 112), (160, 160), (192, 192), (192, 128), (224, 224), (96, 64), (72, 72), (128, 40)]


@pytest.mark.parametrize("name", ["segments, causal", "lengths, causal, window", "soft cap", "bias"])
@pytest.mark.parametrize(("head_dim", "v_dim"), HEAD_DIMS)
def test_any_head_dim_is_right(head_dim, v_dim, name, assert_close):
    arrays = qkv(replace(MIDDLE, head_dim=head_dim, v_dim=v_dim), BF16)
    options: dict[str, Any] = OPTIONS[name] if name != "bias" else {}
    arrays += (normal(5, 1, 4, 250, 390, dtype=BF16),) if name == "bias" else ()
    assert_true(with_gradients(arrays, **options), arrays, assert_close, **options)


@pytest.mark.parametrize("seed", range(20))
def test_random_shape_of_any_head_dim_is_right(seed, assert_close):
    rng = random.Random(seed)
    (head_dim, v_dim), kv_heads = HEAD_DIMS[seed % len(HEAD_DIMS)], rng.choice([1, 2, 3, 5])
    q_tokens = rng.randint(1, 1000)
    tokens = q_tokens, q_tokens + rng.randint(20, 500)  # rows that see few keys or none have gradients of q that are noise
    shape = Shape(rng.randint(1, 3), *tokens, kv_heads * rng.choice([1, 2, 4]), kv_heads, head_dim, v_dim)
    mask = MASKS[rng.choice(list(MASKS))]
    arrays = qkv(shape, BF16)
    assert_true(with_gradients(arrays, **mask), arrays, assert_close, **mask)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["causal", "segments, causal", "soft cap"])
def test_float16_is_right(name, head_dim, assert_close):
    kwargs = (MASKS | OPTIONS)[name]
    arrays = qkv(replace(MIDDLE, head_dim=head_dim), "float16")
    assert_true(with_gradients(arrays, **kwargs), arrays, assert_close, **kwargs)


BIASES = [(3, 4, 250, 390), (1, 4, 250, 390), (3, 1, 250, 390), (250, 390), (4, 1, 390), (3, 1, 250, 1)]


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
@pytest.mark.parametrize("shape", BIASES, ids=str)
def test_bias_of_any_shape_and_its_gradient_are_right(shape, dtype, assert_close):
    arrays = *qkv(MIDDLE, BF16), normal(3, *shape, dtype=dtype)
    found = with_gradients(arrays, causal=True)
    assert (found["bias"].shape, found["bias"].dtype) == (shape, dtype)
    assert_true(found, arrays, assert_close, causal=True)


def test_bias_of_one_head_and_its_gradient_are_right(assert_close):
    """Where leading dimensions of one may not be taken for those of a window of rows (core/tma.py)."""
    arrays = *qkv(Shape(1, 150, 200, 1, 1, 64), BF16), normal(3, 1, 1, 150, 200, dtype=BF16)
    assert_true(with_gradients(arrays), arrays, assert_close)


@pytest.mark.parametrize("head_dim", [128, 256])
def test_bias_of_wide_heads_and_its_gradient_are_right(head_dim, assert_close):
    arrays = *qkv(replace(MIDDLE, head_dim=head_dim), BF16), normal(3, 3, 4, 250, 390, dtype=BF16)
    assert_true(with_gradients(arrays), arrays, assert_close)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_a_bias_gives_the_same_bits_each_time(dtype):
    """Its tiles are read while the tensor cores keep shared memory busy, and the next ones are on their way to their places."""
    q, k, v = qkv(Shape(4, 1024, 1024, 8, 8, 128), BF16)
    bias = normal(3, 1, 8, 1024, 1024, dtype=dtype)
    call = jax.jit(functools.partial(flash_attention, causal=True, bias=bias, backend="mosaic"))
    first, *others = [np.asarray(call(q, k, v), np.float32) for _ in range(20)]
    assert all((first == other).all() for other in others)


@pytest.mark.parametrize("shape", [MIDDLE, replace(MIDDLE, q_tokens=384, kv_tokens=512)], ids=["odd", "whole tiles"])
def test_nan_in_padding_has_no_say(shape):
    """The weight of a padded value is zero, and zero times NaN would be NaN."""
    q, k, v = qkv(shape, BF16)
    q_lengths, kv_lengths = np.array([250, 130, 77]), np.array([380, 390, 60])
    dirty = []
    for x, lengths in ((q, q_lengths), (k, kv_lengths), (v, kv_lengths)):
        padding = np.arange(x.shape[1]) >= lengths[:, None]
        dirty.append(jnp.where(padding[..., None, None], jnp.asarray(jnp.nan, BF16), x))
    kwargs = {"q_lengths": q_lengths, "kv_lengths": kv_lengths, "causal": True, "deterministic": True}
    found, clean = with_gradients(tuple(dirty), **kwargs), with_gradients((q, k, v), **kwargs)
    for name, x in clean.items():
        np.testing.assert_array_equal(found[name], x)


@pytest.mark.parametrize(
    "shape", [Shape(3, 77, 130, 2, 2, 64), Shape(3, 100, 200, 4, 2, 128), Shape(3, 77, 130, 2, 2, 72)], ids=str
)
def test_nan_stays_in_its_batch_entry_and_with_the_heads_that_share_keys(shape):
    """Whose last tiles reach into the next entry."""
    q, k, v = qkv(shape, BF16)
    kwargs = {"causal": True, "deterministic": True}
    clean = with_gradients((q, k, v), **kwargs)
    by_entry = with_gradients(tuple(x.at[1].set(jnp.nan) for x in (q, k, v)), **kwargs)
    by_head = with_gradients((q, k.at[:, :, 1].set(jnp.nan), v), **kwargs)
    first = shape.q_heads // shape.kv_heads  # heads of queries with the first head of keys
    assert np.isnan(float64(by_entry["out"][1])).all()
    assert np.isnan(float64(by_entry["lse"][1])).all()
    assert np.isnan(float64(by_entry["v"][1])).all()
    for name, x in clean.items():
        np.testing.assert_array_equal(by_entry[name][::2], x[::2])
        heads = 1 if name == "lse" else 2
        kept = slice(first if name in ("out", "lse", "q") else 1)
        np.testing.assert_array_equal(*(jnp.moveaxis(y, heads, 0)[kept] for y in (by_head[name], x)))


# --- sinks


def assert_true_with_sinks(shape: Shape, assert_close: Any, **kwargs: Any) -> None:
    """Of all rows: one that sees nothing has its head's sink as its lse."""
    sinks = jnp.linspace(-2.0, 6.0, shape.q_heads).at[0].set(-jnp.inf)

    def both(q: Any, k: Any, v: Any, sinks: Any) -> Any:
        return flash_attention(q, k, v, sinks=sinks, return_lse=True, **{"backend": "mosaic"} | kwargs)

    @jax.jit
    def run(*arrays: Any) -> Any:
        outs, pull = jax.vjp(both, *arrays)
        return *outs, *pull(cotangents(*outs))

    arrays = *qkv(shape, BF16), sinks
    compiled = run.lower(*arrays).compile()
    poison(*arrays)
    found = dict(zip(["out", "lse", "q", "k", "v", "sinks"], compiled(*arrays), strict=True))
    out_grad, lse_grad = cotangents(found["out"], found["lse"])
    formula = {name: x for name, x in kwargs.items() if name != "config"}
    wanted = cases.truth(*arrays[:3], sinks=sinks, out_grad=out_grad, lse_grad=lse_grad, **formula)
    np.testing.assert_allclose(found["lse"], wanted.pop("lse"), rtol=1e-4, atol=1e-4)
    assert not np.asarray(found["sinks"])[0]
    for name, x in wanted.items():
        np.testing.assert_array_equal(float64(found[name])[x == 0], 0)
        assert_close(found[name], x, BF16)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", ["lengths", "lengths, causal, window", "segments, causal", "soft cap, causal"])
def test_sinks_and_their_gradient_are_right(name, head_dim, assert_close):
    assert_true_with_sinks(replace(MIDDLE, head_dim=head_dim), assert_close, **OPTIONS[name])


@pytest.mark.parametrize(("kv_splits", "kv_cluster"), [(1, 1), (8, 8), (16, 8)])
@pytest.mark.parametrize(
    "name",
    [
        "one token, 4 heads of queries a head of keys",
        "one token, lengths",
        "eight tokens, causal, rows that fill two tiles",
        "sixteen tokens, lengths, causal, window",
    ],
)
def test_split_keys_with_sinks_are_right(name, kv_splits, kv_cluster, assert_close):
    shape, kwargs = DECODING[name]
    config = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=kv_splits, kv_cluster=kv_cluster, **ONE_WARPGROUP)
    assert_true_with_sinks(shape, assert_close, config=config, **kwargs)


# --- few query tokens: keys split over thread blocks

DECODING: dict[str, tuple[Shape, dict[str, Any]]] = {
    "one token, 4 heads of queries a head of keys": (Shape(3, 1, 5000, 8, 2, 128), {}),
    "one token, lengths": (Shape(4, 1, 3000, 8, 1, 64), {"kv_lengths": [3000, 0, 1, 1733], "causal": True}),
    "one token, window, soft cap": (Shape(2, 1, 2100, 4, 2, 256), {"window": (700, None), "soft_cap": 20.0}),
    "one token, one head each, head_dim padded": (Shape(2, 1, 777, 3, 3, 72), {}),
    "one token, head_dim of 80, lengths": (Shape(3, 1, 1777, 6, 3, 80), {"kv_lengths": [1777, 0, 900]}),
    "one token, head_dim of 96": (Shape(2, 1, 2048, 8, 8, 96), {}),
    "three tokens, head_dim of 112, causal": (Shape(2, 3, 1000, 8, 2, 112), {"causal": True}),
    "one token, head_dim of 160, window": (Shape(2, 1, 1500, 8, 2, 160), {"window": (700, None)}),
    "one token, head_dim of 192": (Shape(2, 1, 900, 4, 2, 192), {}),
    "one token, head_dim of 224": (Shape(2, 1, 900, 4, 2, 224), {}),
    "eight tokens, causal, rows that fill two tiles": (Shape(2, 8, 2500, 12, 1, 128), {"causal": True}),
    "sixteen tokens, lengths, causal, window": (
        Shape(2, 16, 1500, 4, 2, 64),
        {"q_lengths": [16, 5], "kv_lengths": [1500, 300], "causal": True, "window": (400, None)},
    ),
}


@pytest.mark.parametrize(("kv_splits", "kv_cluster"), [(1, 1), (8, 8), (16, 8)])
@pytest.mark.parametrize("name", DECODING)
def test_split_keys_are_right_and_so_are_their_gradients(name, kv_splits, kv_cluster, assert_close):
    shape, kwargs = DECODING[name]
    config = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=kv_splits, kv_cluster=kv_cluster, **ONE_WARPGROUP)
    arrays = qkv(shape, BF16)
    assert_true(with_gradients(arrays, config=config, **kwargs), arrays, assert_close, **kwargs)


@pytest.mark.parametrize(("kv_splits", "kv_cluster"), [(1, 1), (3, 1), (16, 2)])
@pytest.mark.parametrize("tile_kv", [64, 128])
@pytest.mark.parametrize(
    ("shape", "kwargs"),
    [
        (Shape(3, 1, 1777, 32, 32, 80), {"kv_lengths": [1777, 0, 900]}),
        (Shape(2, 1, 2048, 32, 8, 96), {}),
        (Shape(2, 3, 1000, 8, 4, 112), {"causal": True, "window": (300, None)}),
        (Shape(2, 1, 1501, 40, 8, 160), {"soft_cap": 20.0}),
        (Shape(2, 2, 900, 32, 16, 128), {"kv_lengths": [900, 77], "causal": True}),
    ],
    ids=["80, lengths", "96", "112, window, query tokens", "160, soft cap", "128, lengths, query tokens"],
)
def test_heads_of_keys_in_one_tile_are_right(shape, kwargs, tile_kv, kv_splits, kv_cluster, assert_close):
    config = FORWARD.Config(
        tile_kv=tile_kv,
        max_concurrent_steps=2,
        kv_splits=kv_splits,
        kv_cluster=kv_cluster,
        kv_heads_per_tile=shape.kv_heads,
        **ONE_WARPGROUP,
    )
    assert_true_with_sinks(shape, assert_close, config=config, **kwargs)


@pytest.mark.parametrize(("kv_splits", "kv_cluster"), [(1, 1), (8, 8), (16, 8)])
@pytest.mark.parametrize(
    ("shape", "dtype", "kwargs"),
    [
        (Shape(3, 1, 2100, 8, 2, 128), "bfloat16", {"soft_cap": 20.0}),
        (Shape(2, 3, 1777, 4, 2, 96), "float32", {"causal": True}),
        (Shape(2, 16, 1501, 4, 1, 64), "float16", {"kv_lengths": [1501, 300], "q_lengths": [16, 3]}),
    ],
    ids=["16 bits", "32 bits in odd rows, head_dim of 96", "16 bits in odd rows, lengths"],
)
def test_split_keys_with_a_bias_and_a_mask_are_right(shape, dtype, kwargs, kv_splits, kv_cluster, assert_close):
    q, k, v = qkv(shape, BF16)
    bias = normal(7, shape.batch, shape.q_heads, shape.q_tokens, shape.kv_tokens, dtype=dtype)
    mask = np.random.default_rng(0).random((shape.batch, 1, 1, shape.kv_tokens)) < 0.5
    config = FORWARD.Config(tile_kv=64, max_concurrent_steps=2, kv_splits=kv_splits, kv_cluster=kv_cluster, **ONE_WARPGROUP)
    run = functools.partial(flash_attention, bias=bias, mask=mask, config=config, backend="mosaic", **kwargs)
    assert_close(run(q, k, v), cases.truth(q, k, v, bias=bias, mask=mask, **kwargs)["out"], BF16)


def test_split_keys_have_the_same_bits_in_every_run_and_nan_in_padding_has_no_say():
    q, k, v = qkv(Shape(32, 1, 4096, 32, 8, 128), BF16)
    lengths = np.random.default_rng(0).integers(0, 4097, 32)
    padding = (np.arange(4096) >= lengths[:, None])[..., None, None]
    config = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=8, kv_cluster=8, **ONE_WARPGROUP)
    run = jax.jit(functools.partial(flash_attention, kv_lengths=lengths, config=config, backend="mosaic", return_lse=True))
    first = run(q, k, v)
    for _ in range(20):
        for x, y in zip(run(q, *(jnp.where(padding, jnp.asarray(jnp.nan, BF16), x) for x in (k, v))), first):
            np.testing.assert_array_equal(x, y)


def test_a_cluster_of_16_is_right(assert_close):
    """More than every GPU must have: Mosaic asks the driver for it, and ends the process where it is refused."""
    arrays = qkv(Shape(1, 1, 65536, 32, 8, 128), BF16)
    config = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=16, kv_cluster=16, **ONE_WARPGROUP)
    assert_true(with_gradients(arrays, config=config), arrays, assert_close)


@pytest.mark.parametrize(
    "name",
    [
        *FORWARD.suites["decode"],
        *(n for n in FORWARD.suites["decode-heads"] if "paged" not in n),
        *(n for n in FORWARD.suites["sinks"] if "-decode-" in n),
    ],
)
def test_default_of_a_decoding_problem_is_right(name):
    problem = FORWARD.shapes[name]
    arrays = jax.jit(functools.partial(FORWARD.inputs, problem))(jax.random.key(0))
    config = FORWARD.default(problem, gpu.current())
    run = jax.jit(functools.partial(FORWARD.run, problem, config, gpu.current())).lower(*arrays).compile()
    poison(arrays[0])
    found, wanted = run(*arrays), jax.jit(functools.partial(FORWARD.reference, problem))(*arrays)
    for x, y in zip(found, wanted):
        np.testing.assert_allclose(float64(x), float64(y), rtol=0.05, atol=0.01)


def draw(spec: Any, seed: int) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it."""
    rng = random.Random(seed)
    device = gpu.current()
    kv_heads = rng.choice([1, 2, 3])
    problem = spec.Problem(
        rng.choice([1, 3]),
        rng.randint(1, 700),
        rng.randint(1, 700),
        kv_heads * rng.choice([1, 1, 4]),
        kv_heads,
        rng.choice([64, 128, 256, 72]),
        rng.choice(["bfloat16", "float16"]),
        causal=rng.random() < 0.5,
        window_left=rng.choice([-1, -1, 1, 100, 300]),  # with 0 and causal, gradients of q and k are noise
        window_right=rng.choice([-1, -1, 0, 100]),
        align=rng.choice(["bottom_right", "top_left"]),
        lengths=rng.random() < 0.3,
        segments=rng.random() < 0.3,
        bias=rng.choice(["none", "none", "bfloat16", "float32"]),
        soft_cap=rng.random() < 0.2,
        sinks=rng.random() < 0.2,
    )
    if problem.soft_cap and problem.bias != "none":
        problem = replace(problem, soft_cap_after_bias=seed % 2 == 1)
    if spec is BACKWARD:
        with_bias = problem.bias != "none" and (problem.soft_cap_after_bias or not problem.soft_cap)
        problem = replace(problem, deterministic=rng.random() < 0.5, bias_grad=with_bias and rng.random() < 0.5)
    space = spec.space(problem, device)
    drawn = (spec.Config(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if spec.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(20))
@pytest.mark.parametrize("spec", [FORWARD, BACKWARD], ids=lambda spec: spec.name)
def test_random_legal_config_is_right(spec, seed, assert_close):
    problem, config = draw(spec, seed)
    arrays = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(seed))
    with jax.default_matmul_precision("highest"):
        exact = replace(problem, dtype="float32")
        wanted = jax.jit(functools.partial(spec.reference, exact))(
            *(x.astype(F32) if x.dtype == problem.dtype else x for x in arrays)
        )
    run = jax.jit(functools.partial(spec.run, problem, config, gpu.current())).lower(*arrays).compile()
    poison(*arrays)
    coarse = "bfloat16" if "bfloat16" in (problem.dtype, problem.bias) else problem.dtype
    dtypes = (problem.dtype,) * 3 + (coarse,)  # the last of four is the gradient of the bias
    for x, y, dtype in zip(run(*arrays), wanted, dtypes):
        x, y = float64(x), float64(y)
        np.testing.assert_array_equal(np.isposinf(x), np.isposinf(y))
        known = np.isfinite(y)
        if np.abs(y[known]).max(initial=0) > 1e-6:
            assert_close(x[known], y[known], dtype)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"causal": True},
        {"window_left": 300, "window_right": 20},
        {"causal": True, "lengths": True},
        {"segments": True, "dtype": "float16"},
    ],
    ids=str,
)
@pytest.mark.parametrize(
    ("head_dim", "steps", "how"),
    [
        (128, 2, ("together", "memory")),
        (128, 3, ("apart", "memory")),
        (128, 3, ("apart", "registers")),
        (64, 2, ("apart", "memory")),
        (64, 3, ("together", "memory")),
    ],
)
def test_dq_a_step_later_gives_what_it_gives_in_the_same_step(head_dim, steps, how, kwargs, assert_close):
    problem = BACKWARD.Problem(
        **{"batch": 2, "q_tokens": 1000, "kv_tokens": 1300, "q_heads": 4, "kv_heads": 2, "head_dim": head_dim} | kwargs
    )
    tile_q = 8192 // head_dim
    later = BACKWARD.Config("fused", tile_q, 128, steps, 4, 24, "next", *how)
    arrays = jax.jit(functools.partial(BACKWARD.inputs, problem))(jax.random.key(0))
    found, wanted = (
        jax.jit(functools.partial(BACKWARD.run, problem, config, gpu.current()))(*arrays)
        for config in (later, BACKWARD.Config("fused", tile_q, 128, 2, 4, 24))
    )
    for x, y in zip(found, wanted):
        assert_close(float64(x), float64(y), problem.dtype)


@pytest.mark.parametrize("kv_slots", [1, 2])
@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"causal": True},
        {"window_left": 150, "window_right": 20},
        {"lengths": True},
        {"lengths": True, "q_tokens": 130, "kv_tokens": 130, "batch": 30, "dtype": "float16"},
    ],
    ids=str,
)
def test_many_kv_blocks_in_one_place_and_in_two(kwargs, kv_slots, assert_close):
    """More kv blocks than SMs, so that a thread block has several in turn; with lengths they are handed out."""
    sizes = {"batch": 9, "q_tokens": 500, "kv_tokens": 700, "q_heads": 6, "kv_heads": 6, "head_dim": 64}
    problem = BACKWARD.Problem(**sizes | kwargs)
    config = BACKWARD.Config("fused", 128, 128, 3, 4, 24, "next", "apart", kv_slots=kv_slots)
    arrays = jax.jit(functools.partial(BACKWARD.inputs, problem))(jax.random.key(0))
    run, same_step = (
        jax.jit(functools.partial(BACKWARD.run, problem, config, gpu.current()))
        for config in (config, BACKWARD.Config("fused", 128, 128, 2, 4, 24))
    )
    wanted = same_step(*arrays)
    for _ in range(3):  # another order each time
        for x, y in zip(run(*arrays), wanted):
            assert_close(float64(x), float64(y), problem.dtype)


VARLEN: list[dict[str, Any]] = [
    {"lengths": True},
    {"segments": True},
    {"window_left": 333, "window_right": 40},
    {"lengths": True, "causal": True, "window_left": 150},
    {"segments": True, "causal": True},
    {"lengths": True, "segments": True},
]


@pytest.mark.parametrize("seed", range(12))
def test_random_lengths_segments_and_windows_are_right_with_dq_a_step_later_at_head_dim_64(seed, assert_close):
    rng = random.Random(seed)
    kv_heads, sizes = rng.choice([1, 2, 4]), (rng.randint(1, 3), rng.randint(1, 1500), rng.randint(1, 1500))
    heads = kv_heads * rng.choice([1, 2, 3]), kv_heads
    problem = BACKWARD.Problem(*sizes, *heads, 64, rng.choice(["bfloat16", "float16"]), **VARLEN[seed % len(VARLEN)])
    config = BACKWARD.Config("fused", 128, 128, rng.choice([2, 3]), 4, 24, "next", rng.choice(["apart", "together"]))
    arrays = jax.jit(functools.partial(BACKWARD.inputs, problem))(jax.random.key(seed))
    with jax.default_matmul_precision("highest"):
        wanted = jax.jit(functools.partial(BACKWARD.reference, replace(problem, dtype="float32")))(
            *(x.astype(F32) if x.dtype == problem.dtype else x for x in arrays)
        )
    for x, y in zip(jax.jit(functools.partial(BACKWARD.run, problem, config, gpu.current()))(*arrays), wanted):
        assert_close(float64(x), float64(y), problem.dtype)


@pytest.mark.parametrize(
    "kwargs",
    [
        {},
        {"causal": True},
        {"causal": True, "q_tokens": 1777},
        {"window_right": 100, "align": "top_left"},
        {"window_left": 300, "window_right": 40},
        {"lengths": True, "causal": True},
        {"segments": True},
        {"batch": 3, "q_tokens": 130, "dtype": "float16"},
        {"batch": 9},  # from here on there are more kv blocks than SMs
        {"batch": 9, "causal": True},
        {"batch": 9, "lengths": True, "causal": True},
    ],
    ids=str,
)
@pytest.mark.parametrize("head_dim", [64, 128])
def test_sums_in_turns_have_the_same_bits_each_time_and_are_those_of_two_kernels(head_dim, kwargs, assert_close):
    sizes = {"batch": 2, "q_tokens": 1000, "kv_tokens": 1300, "q_heads": 8, "kv_heads": 2, "head_dim": head_dim}
    problem = BACKWARD.Problem(**sizes | {"deterministic": True} | kwargs)
    tile_q = 8192 // head_dim
    in_turns = BACKWARD.Config("fused", tile_q, 128, 3, 1024, 24, "next", "apart")
    arrays = jax.jit(functools.partial(BACKWARD.inputs, problem))(jax.random.key(0))
    run, two = (
        jax.jit(functools.partial(BACKWARD.run, problem, config, gpu.current()))
        for config in (in_turns, BACKWARD.Config("split", tile_q, 128, 2, 4, 24))
    )
    found, wanted = run(*arrays), two(*arrays)
    for x, y in zip(found, wanted):
        assert_close(float64(x), float64(y), problem.dtype)
    for _ in range(20):
        for x, y in zip(found, run(*arrays)):
            np.testing.assert_array_equal(x, y)


@pytest.mark.parametrize("kwargs", [{}, {"causal": True}], ids=str)
def test_sums_in_turns_of_one_program_do_not_wait_for_each_other(kwargs):
    """XLA may make a CUDA graph of it, and runs one after the other there too: side by side, neither would end."""
    problem = BACKWARD.Problem(9, 1000, 1300, 8, 2, 128, deterministic=True, **kwargs)
    run = functools.partial(
        BACKWARD.run, problem, BACKWARD.Config("fused", 64, 128, 3, 1024, 24, "next", "apart"), gpu.current()
    )
    inputs = [jax.jit(functools.partial(BACKWARD.inputs, problem))(jax.random.key(i)) for i in range(3)]
    together = jax.jit(lambda *inputs: [run(*arrays) for arrays in inputs])
    wanted = [jax.jit(run)(*arrays) for arrays in inputs]
    for _ in range(10):
        jax.tree.map(np.testing.assert_array_equal, together(*inputs), wanted)


# --- beside cuDNN: no error more than twice its


def errors(found: dict[str, Any], wanted: dict[str, np.ndarray]) -> dict[str, tuple[float, float]]:
    """For each array the root mean square of the error, and the largest one."""
    each = {name: np.abs(float64(x) - wanted[name]) for name, x in found.items()}
    return {name: (float(np.sqrt(np.mean(error**2))), float(error.max())) for name, error in each.items()}


def by_cudnn(q: Any, k: Any, v: Any, *bias: Any, **kwargs: Any) -> jax.Array:
    named = {"bias": bias[0]} if bias else {}
    return jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **named, **kwargs)


def by_kernels(q: Any, k: Any, v: Any, *bias: Any, **kwargs: Any) -> jax.Array:
    return flash_attention(q, k, v, bias=bias[0] if bias else None, backend="mosaic", **kwargs)


def assert_as_right_as_cudnn(arrays: tuple[Any, ...], ours: dict[str, Any], theirs: dict[str, Any]) -> None:
    """`theirs` are the arguments by which cuDNN computes what `ours` say.

    No single error is more than twice its largest, but for what rounding the largest output to its dtype may add.
    """
    bias = arrays[3] if len(arrays) > 3 else None
    out = cases.truth(*arrays[:3], bias=bias, **ours)["out"]
    # Padding has no gradient here, as libraries differ in what its output is.
    out_grad = jnp.where(out == 0, 0, normal(7, *out.shape, dtype=arrays[0].dtype)).astype(arrays[0].dtype)
    wanted = cases.truth(*arrays[:3], bias=bias, out_grad=out_grad, **ours)

    def errors_of(f: Any, kwargs: dict[str, Any]) -> dict[str, tuple[float, float]]:
        @jax.jit
        def run(*arrays: Any) -> Any:
            out, pull = jax.vjp(functools.partial(f, **kwargs), *arrays)
            return jnp.where(wanted["out"] == 0, 0, out), *pull(out_grad)

        return errors(dict(zip(["out", *NAMES[2:]], run(*arrays))), wanted)

    our_errors, their_errors = errors_of(by_kernels, ours), errors_of(by_cudnn, theirs)
    for name, (rms, largest) in our_errors.items():
        assert rms <= 2 * their_errors[name][0], (name, our_errors, their_errors)
        rounding = float(np.abs(wanted[name]).max() * jnp.finfo(arrays[0].dtype).eps / 2)
        assert largest <= 2 * their_errors[name][1] + rounding, (name, our_errors, their_errors)


CAUSAL = {"causal": True}, {"is_causal": True}
BESIDE_CUDNN: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {
    "full": ({}, {}),
    "causal": CAUSAL,
    "window": ({"causal": True, "window": (200, None)}, {"is_causal": True, "local_window_size": (200, 0)}),
    "small scale": ({"scale": 1e-4}, {"scale": 1e-4}),
    "large scale, causal": ({"scale": 5.0, **CAUSAL[0]}, {"scale": 5.0, **CAUSAL[1]}),
}


@pytest.mark.parametrize("name", BESIDE_CUDNN)
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_no_error_is_more_than_twice_that_of_cudnn(head_dim, name):
    arrays = qkv(Shape(2, 1024, 1024, 4, 4, head_dim), BF16)
    assert_as_right_as_cudnn(arrays, *BESIDE_CUDNN[name])


@pytest.mark.parametrize("mask", ["full", "causal"])
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_large_scores_beside_cudnn(head_dim, mask):
    q, k, v = qkv(Shape(2, 1024, 1024, 4, 4, head_dim), BF16)
    assert_as_right_as_cudnn((q * 30, k * 30, v * 30), *BESIDE_CUDNN[mask])
    assert_as_right_as_cudnn((q * 30, k, v), *BESIDE_CUDNN[mask])


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("tokens", [(128, 16384), (16384, 128)], ids=["keys", "queries"])
def test_long_rows_and_columns_beside_cudnn(head_dim, tokens):
    arrays = qkv(Shape(1, *tokens, 2, 2, head_dim), BF16)
    assert_as_right_as_cudnn(arrays, {}, {})


@pytest.mark.parametrize("shape", [Shape(2, 1024, 1024, 8, 2, 128), Shape(1, 1000, 1016, 4, 1, 64)], ids=str)
def test_grouped_heads_beside_cudnn(shape):
    assert_as_right_as_cudnn(qkv(shape, BF16), {}, {})


def test_float16_beside_cudnn():
    assert_as_right_as_cudnn(qkv(Shape(2, 1024, 1024, 4, 4, 128), "float16"), *CAUSAL)


@pytest.mark.parametrize("head_dim", [64, 128])
def test_bias_beside_cudnn(head_dim):
    arrays = *qkv(Shape(2, 512, 512, 4, 4, head_dim), BF16), normal(3, 1, 4, 512, 512, dtype=BF16)
    assert_as_right_as_cudnn(arrays, {}, {})


def test_lengths_beside_cudnn():
    q_lengths, kv_lengths = jnp.array([512, 130, 77]), jnp.array([400, 512, 60])
    ours = {"q_lengths": q_lengths, "kv_lengths": kv_lengths}
    theirs = {"query_seq_lengths": q_lengths, "key_value_seq_lengths": kv_lengths}
    assert_as_right_as_cudnn(qkv(Shape(3, 512, 512, 4, 4, 128), BF16), ours, theirs)


def test_extreme_scales_give_no_nan(assert_close):
    for scale in (1e-30, 100.0, -100.0):
        arrays = qkv(MIDDLE, BF16)
        found = with_gradients(arrays, scale=scale)
        assert not any(np.isnan(float64(x)).any() for x in found.values())
        assert_close(found["out"], cases.truth(*arrays, scale=scale)["out"], BF16)


# --- the same each time

REPEATED: dict[str, dict[str, Any]] = {
    "full": {},
    "causal": {"causal": True},
    "segments": OPTIONS["segments"],
    "lengths": OPTIONS["lengths"],
    "window": {"window": (100, 30)},
}


@pytest.mark.parametrize("head_dim", [64, 128, 256])
@pytest.mark.parametrize("name", REPEATED)
def test_deterministic_gradients_have_the_same_bits_each_time_and_are_right(name, head_dim, assert_close):
    arrays = qkv(replace(MIDDLE, head_dim=head_dim), BF16)
    run = runner(deterministic=True, **REPEATED[name])
    first = run(*arrays)
    for _ in range(5):
        for x, y in zip(first, run(*arrays)):
            np.testing.assert_array_equal(x, y)
    assert_true(dict(zip(NAMES, first)), arrays, assert_close, **REPEATED[name])


def test_forward_has_the_same_bits_in_many_launches_in_a_row():
    """A barrier out of phase, or a store that outlives its block, shows now and then only."""
    run = jax.jit(functools.partial(flash_attention, backend="mosaic", causal=True))
    inputs = [qkv(Shape(2, 900, 900, 8, 2, 128), BF16, seed) for seed in (0, 10, 20)]
    wanted = [np.asarray(run(*arrays)) for arrays in inputs]
    outs = [run(*arrays) for _ in range(50) for arrays in inputs]
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, wanted[i % 3])


def test_gradients_are_right_in_many_launches_in_a_row(assert_close):
    arrays = qkv(Shape(2, 900, 900, 8, 2, 128), BF16)
    run = runner(causal=True)
    for found in [run(*arrays) for _ in range(50)][::10]:
        assert_true(dict(zip(NAMES, found)), arrays, assert_close, causal=True)


# --- transforms


@pytest.mark.parametrize("mapped", ["q", "q k v", "bias", "q k v bias"])
def test_vmap_and_its_gradients(mapped, assert_close):
    shape = Shape(2, 100, 130, 4, 2, 64)
    every = [(*qkv(shape, BF16, 10 * i), normal(100 + i, 1, 4, 100, 130, dtype=BF16)) for i in range(3)]
    names = ["q", "k", "v", "bias"]
    axes = tuple(0 if name in mapped.split() else None for name in names)
    arguments = tuple(every[0][i] if axis is None else jnp.stack([x[i] for x in every]) for i, axis in enumerate(axes))
    out_grad = normal(7, 3, *shape.out, dtype=BF16)

    def call(q: Any, k: Any, v: Any, bias: Any) -> jax.Array:
        return flash_attention(q, k, v, bias=bias, causal=True, backend="mosaic")

    @jax.jit
    def run(*arguments: Any) -> Any:
        out, pull = jax.vjp(jax.vmap(call, axes), *arguments)
        return out, *pull(out_grad)

    calls = [[x if axis is None else x[i] for x, axis in zip(arguments, axes)] for i in range(3)]
    wanted = [cases.truth(*x[:3], bias=x[3], out_grad=out_grad[i], causal=True) for i, x in enumerate(calls)]
    out, *gradients = run(*arguments)
    assert_close(out, np.stack([x["out"] for x in wanted]), BF16)
    for name, axis, gradient in zip(names, axes, gradients):
        each = np.stack([x[name] for x in wanted])
        assert_close(gradient, each.sum(0) if axis is None else each, BF16)


def test_scan_and_checkpoint_run_the_kernels(assert_close):
    x, weights = normal(0, 2, 200, 4, 64, dtype=BF16), normal(1, 3, 3, 64, 64, dtype=BF16) / 8

    def loss(x: jax.Array, weights: jax.Array, **kwargs: Any) -> jax.Array:
        def layer(x: jax.Array, weight: jax.Array) -> Any:
            q, k, v = jnp.einsum("btnd,kde->kbtne", x, weight)
            return x + flash_attention(q, k, v, causal=True, **kwargs), None

        return (jax.lax.scan(jax.checkpoint(layer), x, weights)[0].astype(F32) ** 2).sum()

    found = jax.jit(jax.grad(functools.partial(loss, backend="mosaic"), argnums=(0, 1)))(x, weights)
    with jax.default_matmul_precision("highest"):
        plain = jax.jit(jax.grad(functools.partial(loss, backend="xla"), argnums=(0, 1)))
        wanted = plain(x.astype(F32), weights.astype(F32))
    for y, z in zip(found, wanted):
        assert_close(y, z, BF16, roundings=6)  # of three layers, and of the arguments of the kernels


def assert_right_over_devices(devices: int, spec: PartitionSpec, assert_close: Any) -> None:
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    call = functools.partial(flash_attention, causal=True, backend="mosaic")
    sharded = jax.shard_map(call, mesh=mesh, in_specs=(spec,) * 3, out_specs=spec)
    shape = Shape(2, 300, 300, 4, 2, 128)
    arrays, out_grad = qkv(shape, BF16), normal(7, *shape.out, dtype=BF16)

    @jax.jit
    def run(*arrays: Any) -> Any:
        out, pull = jax.vjp(sharded, *arrays)
        return out, *pull(out_grad)

    wanted = cases.truth(*arrays, out_grad=out_grad, causal=True)
    for x, name in zip(run(*arrays), ["out", "q", "k", "v"]):
        assert_close(x, wanted[name], BF16)


SPECS = pytest.mark.parametrize("spec", [PartitionSpec("x"), PartitionSpec(None, None, "x")], ids=["batch", "heads"])


@SPECS
def test_shard_map_and_its_gradients_on_one_device(spec, assert_close):
    assert_right_over_devices(1, spec, assert_close)


@SPECS
@pytest.mark.gpu(2)
def test_shard_map_and_its_gradients_on_two_gpus(spec, assert_close):
    assert_right_over_devices(2, spec, assert_close)


# --- which kernel runs


def test_default_backend_is_the_kernels():
    arrays = qkv(Shape(16, 512, 512, 32, 8, 128), BF16)  # stored, and faster than cuDNN
    attend = functools.partial(flash_attention, causal=True)
    assert "mosaic_gpu" in jax.jit(attend).lower(*arrays).as_text()
    pulled = jax.jit(jax.grad(lambda *x: attend(*x).astype(F32).sum(), argnums=(0, 1, 2))).lower(*arrays).as_text()
    assert "mgpu_ops_flash_attention_backward" in pulled


@pytest.mark.parametrize("shape", [Shape(2, 520, 520, 4, 2, 128), Shape(1, 300, 300, 2, 2, 64)], ids=str)
@pytest.mark.parametrize("kwargs", [{}, {"causal": True}, {"causal": True, "window": (99, None)}, {"scale": 0.3}], ids=str)
@pytest.mark.parametrize("through", [[FORWARD.name], [BACKWARD.name], [FORWARD.name, BACKWARD.name]], ids="+".join)
def test_cudnn_in_the_place_of_either_pass_or_of_both_computes_the_same(shape, kwargs, through, assert_close):
    arrays = qkv(shape, BF16)

    def run(backend: str | None) -> Any:
        out, pull = jax.vjp(lambda *x: flash_attention(*x, backend=backend, **kwargs), *arrays)
        return out, *pull(normal(7, *out.shape, dtype=out.dtype))

    kernels = jax.jit(lambda: run("mosaic"))()
    with use_configs(dict.fromkeys(through, "xla")):
        compiled = jax.jit(lambda: run(None)).lower().compile()
    calls = {FORWARD.name: '"__cudnn$fmhaSoftmax"', BACKWARD.name: '"__cudnn$fmhaSoftmaxBackward"'}
    assert all(calls[name] in compiled.as_text() for name in through)
    for found, wanted in zip(compiled(), kernels, strict=True):
        assert_close(found, wanted, BF16, roundings=2)


@contextlib.contextmanager
def given(config: Any, where: str) -> Iterator[dict[str, Any]]:
    """The arguments that make a call use `config`, within which it does."""
    with use_configs({"flash_attention": config} if where == "override" else {}):
        yield {} if where == "override" else {"config": config}


@pytest.mark.parametrize("head_dim", [64, 160, 192, 256])
@pytest.mark.parametrize("causal", [False, True])
def test_output_is_rescaled_by_condition_where_scores_grow(head_dim, causal, assert_close):
    """Keys grow to the first one, the last that a row meets: the largest score grows in most blocks, in some rows little."""
    q, k, v = qkv(Shape(2, 700, 900, 4, 2, head_dim), BF16)
    k = (k * jnp.linspace(12, 0.5, 900)[None, :, None, None]).astype(k.dtype)
    q = (q * jnp.where(jnp.arange(700) % 3 == 0, 0.1, 1.0)[None, :, None, None]).astype(q.dtype)
    problem = FORWARD.Problem(2, 700, 900, 4, 2, head_dim, causal=causal)
    config = replace(FORWARD.default(problem, gpu.current()), rescale="conditional")
    out = flash_attention(q, k, v, causal=causal, config=config, backend="mosaic")
    assert_close(out, cases.truth(q, k, v, causal=causal)["out"], BF16)


@pytest.mark.parametrize("where", ["argument", "override"])
def test_configs_run_other_kernels_to_the_same_end(where, assert_close):
    arrays = qkv(Shape(2, 500, 500, 4, 4, 64), BF16)
    wanted = cases.truth(*arrays, causal=True)["out"]
    for warpgroups, tile_kv, q_slots in ((1, 64, 2), (2, 128, 1), (3, 128, 1)):
        config = FlashAttentionConfig(
            compute_warpgroups=warpgroups,
            tile_kv=tile_kv,
            max_concurrent_steps=2,
            q_slots=q_slots,
            section_waves=1,
            memory_registers=32 if warpgroups == 3 else 40,
            pv_wait=("early", "late", "half")[warpgroups - 1],
            turns="products" if warpgroups == 3 else "none",
            rescale="conditional" if warpgroups == 2 else "always",
        )
        with given(config, where) as kwargs:
            assert_close(flash_attention(*arrays, causal=True, backend="mosaic", **kwargs), wanted, BF16)
