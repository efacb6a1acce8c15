"""flash_attention with keys and values of 8 bits, a quantized KV cache. The truth is float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mgpu_ops import flash_attention, spec_of
from mgpu_ops.attention.problem import ONE_WARPGROUP
from mgpu_ops.core import engine, gpu
from tests import thorough
from tests.mgpu_ops.attention import cases, compiled
from tests.mgpu_ops.attention.compiled import needs_compiler
from tests.mgpu_ops.attention.quantized import draw
from tests.mgpu_ops.interpreter import quiet_interpreter

FORWARD, H200 = spec_of("flash_attention"), gpu.find("h200")
P = FORWARD.Problem
ONE = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=1, **ONE_WARPGROUP)
TWO = replace(ONE, kv_splits=2, kv_cluster=2)
FP8 = "float8_e4m3fn"

CASES: dict[str, tuple[dict[str, Any], dict[str, Any], Any]] = {  # of `draw`, options, config
    "int8, lengths, a cluster": ({}, {"kv_lengths": [200, 70]}, TWO),
    "e4m3, query tokens, causal, head_dim of 128": (
        {"kv_dtype": FP8, "q_tokens": 3, "head_dim": 128, "kv_tokens": 130},
        {"causal": True},
        replace(ONE, max_concurrent_steps=2),
    ),
    "e4m3, float16, soft cap, sinks, parts added up by a kernel": (
        {"kv_dtype": FP8, "dtype": "float16"},
        {"soft_cap": 5.0, "sinks": np.linspace(-1, 1, 4, dtype=np.float32)},
        replace(TWO, kv_cluster=1, max_concurrent_steps=2),
    ),
    "int8, tiles of 128 keys, window": (
        {"kv_tokens": 300},
        {"causal": True, "window": (180, None)},
        replace(TWO, tile_kv=128, max_concurrent_steps=2),
    ),
    "int8, head_dim of 256": ({"head_dim": 256, "kv_heads": 1, "kv_tokens": 100}, {}, replace(ONE, max_concurrent_steps=2)),
}
IN_ALL = ["int8, tiles of 128 keys, window", "int8, head_dim of 256"]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_right_and_without_a_race(name, backend, assert_near):
    drawn, options, config = CASES[name]
    cache = draw(0, **drawn)
    how = {"config": config} if backend == "interpret" else {}
    with quiet_interpreter():
        run = functools.partial(flash_attention, backend=backend, return_lse=True, **how, **options)
        out, lse = run(cache.q, cache.k, cache.v, **cache.scales)
    assert backend == "xla" or not engine.races_found()
    wanted = cases.truth(cache.q, *cache.wide(), **options)
    assert_near(out, wanted["out"], 0.03 if cache.q.dtype == jnp.bfloat16 else 0.004)
    np.testing.assert_allclose(np.asarray(lse, np.float64), wanted["lse"], rtol=1e-3, atol=1e-3)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_pages_of_eight_bits(backend, assert_near):
    cache = draw(1, kv_tokens=192, kv_dtype=FP8)
    pages = 192 // 16
    order = np.random.default_rng(0).permutation(2 * pages).astype(np.int32)
    pools = []
    for x in (cache.k, cache.v):
        pool = np.zeros((2 * pages, 16, *x.shape[2:]), x.dtype)
        pool[order] = np.asarray(x).reshape(-1, 16, *x.shape[2:])
        pools.append(jnp.asarray(pool))
    with quiet_interpreter():
        run = functools.partial(flash_attention, page_table=order.reshape(2, -1), kv_lengths=[190, 33], backend=backend)
        out = run(cache.q, *pools, **cache.scales)
    assert_near(out, cases.truth(cache.q, *cache.wide(), kv_lengths=[190, 33])["out"], 0.03)


MASK = np.arange(200) < 150
OTHERS: dict[str, tuple[dict[str, Any], dict[str, Any]]] = {  # that become q's dtype first
    "more query tokens than the kernel packs": ({"q_tokens": 140, "kv_tokens": 140}, {"causal": True}),
    "a head_dim that is padded": ({"head_dim": 80}, {}),
    "a mask": ({}, {"mask": MASK}),
    "segments": ({}, {"q_segment_ids": np.zeros((2, 1), np.int32), "kv_segment_ids": np.tile(np.arange(200) // 70, (2, 1))}),
}


@pytest.mark.parametrize("name", OTHERS)
def test_what_the_kernel_does_not_take_is_right_too(name, assert_near):
    drawn, options = OTHERS[name]
    cache = draw(2, kv_dtype=FP8, **drawn)
    found = flash_attention(cache.q, cache.k, cache.v, **cache.scales, **options)
    assert_near(found, cases.truth(cache.q, *cache.wide(), **options)["out"], 0.04)


def test_scales_for_all_entries_and_for_all_heads(assert_near):
    cache = draw(3)
    k_scale, v_scale = cache.scales["k_scale"][0], 0.03
    found = flash_attention(cache.q, cache.k, cache.v, k_scale=k_scale, v_scale=v_scale)
    k, v = (np.asarray(x, np.float64) for x in (cache.k, cache.v))
    assert_near(found, cases.truth(cache.q, k * k_scale[:, None], v * v_scale)["out"], 0.03)
    alone = flash_attention(cache.q, cache.k, cache.v.astype(jnp.int8))  # 1 each
    assert_near(alone, cases.truth(cache.q, k, v)["out"], 0.03)


@pytest.mark.parametrize("mapped", [(0, 0, 0, 0), (0, None, None, None), (None, 0, 0, None), (None, None, None, 0)])
def test_vmap_is_one_call_for_each_example(mapped, assert_near):
    examples = [draw(seed, dtype="float32") for seed in (4, 5)]
    each = [(x.q, x.k, x.v, x.scales["k_scale"]) for x in examples]
    arrays = [jnp.stack([e[i] for e in each]) if axis == 0 else each[0][i] for i, axis in enumerate(mapped)]
    found = jax.vmap(lambda q, k, v, s: flash_attention(q, k, v, k_scale=s, v_scale=0.1), mapped)(*arrays)
    for number in range(2):
        q, k, v, scale = (x[number] if axis == 0 else x for x, axis in zip(arrays, mapped, strict=True))
        assert_near(found[number], flash_attention(q, k, v, k_scale=scale, v_scale=0.1), 1e-5)


@pytest.mark.parametrize("split", [PartitionSpec("x"), PartitionSpec(None, None, "x")], ids=["batch", "heads"])
def test_devices_share_entries_or_heads(split, assert_near):
    cache = draw(6, batch=4, q_heads=8, kv_heads=4)
    mesh = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])
    arrays = [jax.device_put(x, NamedSharding(mesh, split)) for x in (cache.q, cache.k, cache.v)]
    found = jax.jit(functools.partial(flash_attention, **cache.scales))(*arrays)
    assert_near(found, cases.truth(cache.q, *cache.wide())["out"], 0.03)


Q, K = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((2, 96, 2, 64), jnp.int8)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "said"),
    [
        ((Q, K, K.astype(FP8)), {}, ValueError, "k has dtype int8 and v float8_e4m3fn: cast them to one"),
        (
            (Q, K.astype(jnp.float8_e5m2), K),
            {},
            ValueError,
            "k has dtype float8_e5m2 and q bfloat16: cast them to one, or k and v",
        ),
        ((Q, K.astype(jnp.int16), K), {}, TypeError, "k has dtype int16: flash_attention takes floats"),
        (
            (Q, K, K),
            {"k_scale": np.ones(3, np.float32)},
            ValueError,
            r"k_scale has shape \(3,\): it must be a scalar, \[kv_heads\]",
        ),
        ((Q, K, K), {"v_scale": [1, 2]}, TypeError, "v_scale has dtype int32: flash_attention takes floats"),
        ((Q, K, K), {"k_scale": -0.5}, ValueError, "k_scale=-0.5 must be above 0"),
        ((Q, K, K), {"v_scale": np.float32([1, np.nan])}, ValueError, r"v_scale has 1 of 2 values .* v_scale\[1\]=nan"),
        ((Q, Q, Q), {"v_scale": 2.0}, TypeError, "v_scale is for keys and values of 8 bits, and they are bfloat16"),
    ],
    ids=str,
)
def test_what_does_not_fit_says_why(arrays, options, error, said):
    with pytest.raises(error, match=said):
        flash_attention(*arrays, **options)


@pytest.mark.parametrize("what", ["q", "k_scale"])
@pytest.mark.parametrize(("tokens", "head_dim"), [(1, 64), (300, 64), (1, 16)])  # the last two no kernel reads in 8 bits
def test_a_gradient_names_the_way_out(tokens, head_dim, what):
    k = jnp.ones((2, 13, 2, head_dim), jnp.int8)
    given = {"q": jnp.ones((2, tokens, 4, head_dim), jnp.bfloat16), "k_scale": jnp.ones(2)}
    with pytest.raises(TypeError, match="k and v of int8 has no gradient: cast k k_scale and v v_scale to q's dtype"):
        jax.grad(lambda x: flash_attention(**{**given, what: x}, k=k, v=k).astype(jnp.float32).sum())(given[what])


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"kv_dtype": "float8_e5m2"}, "kv_dtype 'float8_e5m2' is not one of none, float8_e4m3fn, int8: cast keys"),
        ({"head_dim": 80}, "kv_dtype=int8 is for a head_dim of 64, 128, 256 of keys and of values, not 80 and 80"),
        ({"q_tokens": 200}, "the kernel with kv_dtype=int8 is for 256 query tokens times query heads of a head of keys"),
        ({"bias": "bfloat16"}, "the kernel with kv_dtype=int8 takes no bias, mask or segments: cast keys and values"),
    ],
)
def test_problems_that_no_kernel_runs_say_why(changes, reason):
    assert reason in str(FORWARD.supports(replace(P(2, 1, 512, 8, 2, 64, kv_dtype="int8"), **changes), H200))


COMPILED: dict[str, tuple[Any, Any]] = {
    "e4m3, head_dim of 128, lengths": (P(64, 1, 4096, 32, 8, 128, lengths=True, kv_dtype=FP8), TWO),
    "int8, head_dim of 128, tiles of 128 keys": (
        P(16, 1, 8192, 32, 8, 128, kv_dtype="int8"),
        replace(TWO, tile_kv=128, max_concurrent_steps=2),
    ),
    "int8, head_dim of 64": (P(64, 1, 1024, 12, 12, 64, kv_dtype="int8"), ONE),
    "e4m3, pages": (P(64, 1, 4096, 32, 8, 128, lengths=True, page_size=64, kv_dtype=FP8), TWO),
}


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(COMPILED, ["int8, head_dim of 64", "e4m3, pages"]))
def test_compiles_without_spills(name):
    compiled.without_spills(*COMPILED[name])


def test_the_modelled_time_of_heads_of_64_numbers_of_eight_bits_is_near_what_was_measured():
    """Though such heads share lines of memory: 47.5 us, in results/2026-11-27-h100-flash_attention-kv8.jsonl."""
    problem, config = P(64, 1, 1024, 12, 12, 64, kv_dtype=FP8), replace(ONE, tile_kv=128)
    assert FORWARD.cost(problem, config, gpu.find("h100-sxm")) * 1e6 == pytest.approx(47.5, rel=0.1)


@pytest.mark.parametrize("kv_dtype", [FP8, "int8"])
def test_keys_of_eight_bits_are_half_of_the_bytes_and_of_the_modelled_time(kv_dtype):
    problem = P(64, 1, 8192, 32, 8, 128)
    narrow = replace(problem, kv_dtype=kv_dtype)
    assert FORWARD.bytes(narrow) == pytest.approx(FORWARD.bytes(problem) / 2, rel=0.01)
    times = [FORWARD.cost(p, FORWARD.default(p, H200), H200) for p in (narrow, problem)]
    assert 0.45 < times[0] / times[1] < 0.7
