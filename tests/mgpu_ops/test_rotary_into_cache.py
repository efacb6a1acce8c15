"""rotary_into_cache: values and transforms; the kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import rotary_into_cache
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import dispatch
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
H200 = gpu.find("h200")


def arrays(
    batch: int = 3, tokens: int = 5, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 128, dtype: Any = BF16
) -> list[Any]:
    """qkv, cos, sin, both caches, and positions."""
    angles = normal(1, batch, head_dim // 2)
    caches = [normal(seed, batch, tokens, kv_heads, head_dim, dtype=dtype) for seed in (2, 3)]
    positions = jax.random.randint(jax.random.key(4), (batch,), 0, tokens)
    return [
        normal(0, batch, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        *caches,
        positions,
    ]


def written_out(qkv: Any, cos: Any, sin: Any, k: Any, v: Any, positions: Any) -> list[np.ndarray]:
    """With complex numbers, one head after the other, in float64."""
    qkv, cos, sin, k, v = (np.array(x, np.float64) for x in (qkv, cos, sin, k, v))
    batch, _, kv_heads, head_dim = k.shape
    heads = qkv.reshape(batch, -1, head_dim)
    turned = (heads[..., : head_dim // 2] + 1j * heads[..., head_dim // 2 :]) * (cos + 1j * sin)[:, None]
    turned = np.concatenate([turned.real, turned.imag], -1)
    for b, at in enumerate(np.clip(np.broadcast_to(positions, (batch,)), 0, k.shape[1] - 1)):
        k[b, at], v[b, at] = turned[b, -2 * kv_heads : -kv_heads], heads[b, -kv_heads:]
    return [turned[:, None, : -2 * kv_heads], k, v]


CASES: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group, float16": {"q_heads": 2, "dtype": jnp.float16},
    "head dim 64": {"kv_heads": 4, "head_dim": 64},
}


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("case", thorough.cases(CASES, ["one group, float16"]))
def test_rotated_and_written_where_positions_say(case, backend, assert_near):
    given = arrays(**CASES[case])
    out = jax.jit(functools.partial(rotary_into_cache, backend=backend))(*given)
    for y, z in zip(out, written_out(*given), strict=True):
        assert (y.shape, y.dtype) == (z.shape, given[0].dtype)
        assert_near(y, z, 4e-3)
    kept = np.array(given[3] == out[1]).all((2, 3))  # all rows but one of each sequence
    assert kept.sum() == kept.size - len(kept)
    assert backend == "xla" or not engine.races_found()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("position", [-7, 99, jnp.int32(-1), jnp.array([-1, -7, 99])], ids=str)
def test_a_position_out_of_range_is_the_nearest(position, backend, assert_near):
    given = [*arrays()[:5], position]
    for y, z in zip(rotary_into_cache(*given, backend=backend), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)


def test_angles_without_a_batch_and_vmap_over_sequences(assert_near):
    qkv, cos, sin, k, v, positions = arrays()
    of_both = rotary_into_cache(qkv, cos, sin[0], k, v, positions, backend="interpret")
    for y, z in zip(of_both, written_out(qkv, cos, sin[:1], k, v, positions), strict=True):
        assert_near(y, z, 4e-3)
    for y, z in zip(rotary_into_cache(qkv, cos[0], sin[0], k, v, 2), written_out(qkv, cos[:1], sin[:1], k, v, 2), strict=True):
        assert_near(y, z, 4e-3)
    one = jax.vmap(lambda x, k, v, at: rotary_into_cache(x[None], cos[0], sin[0], k[None], v[None], at), (0, 0, 0, 0))
    for y, z in zip(one(qkv, k, v, positions), written_out(qkv, cos[:1], sin[:1], k, v, positions), strict=True):
        assert_near(y[:, 0], z, 4e-3)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_a_product_of_rows_is_divided_by_their_norm(backend, assert_near):
    qkv, *others = arrays()
    rows = 3 * normal(5, 3, 384, dtype=BF16)
    norm = jnp.sqrt(jnp.mean(rows.astype(F32) ** 2, -1, keepdims=True) + 0.5)
    found = rotary_into_cache(qkv, *others, rms_rows=rows, rms_epsilon=0.5, backend=backend)
    for y, z in zip(found, written_out((qkv.astype(F32) / norm).astype(BF16), *others), strict=True):
        assert_near(y, z, 8e-3)
    mapped = jax.vmap(lambda *x: rotary_into_cache(*(y[None] for y in x[:-1]), rms_rows=x[-1][None], rms_epsilon=0.5))
    for y, z in zip(mapped(qkv, *others, rows), found, strict=True):
        assert_near(y[:, 0], z, 8e-3)


def test_there_is_no_gradient_and_the_error_says_so():
    qkv, *others = arrays()
    with pytest.raises(TypeError, match="rotary_into_cache has no gradient: it is for decoding"):
        jax.grad(lambda x: rotary_into_cache(x, *others)[0].astype(F32).sum())(qkv)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({0: jnp.ones((3, 128), BF16)}, ValueError, r"qkv\(3, 128\) does not fit k_cache\(3, 5, 2, 128\)"),
        ({0: jnp.ones((2, 1024), BF16)}, ValueError, "does not fit .* batch=3"),
        ({0: jnp.ones((3, 1024), F32)}, ValueError, "qkv is float32, k_cache bfloat16"),
        ({4: jnp.ones((3, 6, 2, 128), BF16)}, ValueError, "must both be"),
        ({1: jnp.ones((3, 128))}, ValueError, r"cos has shape \(3, 128\): it must be \[batch, head_dim / 2\] = \(3, 64\)"),
        ({5: jnp.zeros((2,), jnp.int32)}, ValueError, r"positions has shape \(2,\): it must be \[batch\] = \(3,\)"),
        ({5: 0.5}, TypeError, "positions"),
    ],
)
def test_error_names_the_value_and_the_rule(changed, error, message):
    given = arrays()
    for i, x in changed.items():
        given[i] = x
    with pytest.raises(error, match=message):
        rotary_into_cache(*given)


def test_a_mapped_axis_of_no_size_has_no_sequences():
    found = jax.vmap(rotary_into_cache)(*(jnp.zeros((0, *x.shape), x.dtype) for x in map(jnp.asarray, arrays())))
    assert [x.shape for x in found] == [(0, *x.shape) for x in rotary_into_cache(*arrays())]


def test_an_epsilon_that_is_none_is_refused_without_rows_too():
    with pytest.raises(ValueError, match="rms_epsilon=-1 must be a finite number of at least 0"):
        rotary_into_cache(*arrays(), rms_epsilon=-1)


def test_what_the_kernel_does_not_take_runs_through_xla_or_says_why(assert_near):
    given = arrays(kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"backend='interpret' cannot run .*kv_heads \* head_dim = 64 is no multiple of 256"):
        rotary_into_cache(*given, backend="interpret")
    for y, z in zip(rotary_into_cache(*given), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)


def test_why_xla_runs_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    given = arrays(kv_heads=1, head_dim=64)
    with caplog.at_level(logging.WARNING, "mgpu_ops"), gpu.target("h200"):
        for _ in range(2):
            jax.eval_shape(lambda *x: rotary_into_cache(*x), *given)
        jax.eval_shape(lambda *x: rotary_into_cache(*x, backend="xla"), *given)
    reason = "kv_heads * head_dim = 64 is no multiple of 256"
    assert [record.getMessage() for record in caplog.records] == [f"rotary_into_cache runs through XLA: {reason}"]


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_one_kernel_writes_a_donated_cache_in_place():
    shapes = jax.eval_shape(functools.partial(arrays, batch=16, tokens=512, q_heads=32, kv_heads=8))
    rows = jax.ShapeDtypeStruct((16, 4096), BF16)
    report = aot.compile_for(H200, lambda *given: rotary_into_cache(*given[:-1], rms_rows=given[-1]), *shapes, rows)
    (kernel,) = report.kernels
    assert kernel.spill_stores == 0
    context, place = aot.elsewhere(H200)
    with context:
        compiled = jax.jit(rotary_into_cache, donate_argnums=(3, 4)).lower(*place(shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < shapes[3].size  # no copy of a cache
    assert compiled.as_text().count(" fusion(") == 1  # XLA's kernels: cosines and sines as the kernel reads them


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_sizes_are_right(seed, assert_near):
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = [(8, 128), (4, 64), (2, 256), (16, 64), (8, 192), (1, 256)][seed]
    batch, tokens, group = (int(rng.integers(1, n)) for n in (70, 300, 9))
    given = arrays(batch, tokens, kv_heads * group, kv_heads, head_dim)
    run = jax.jit(functools.partial(rotary_into_cache, backend="mosaic"), donate_argnums=(3, 4))
    for y, z in zip(run(*given[:3], *(jnp.copy(x) for x in given[3:5]), given[5]), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)
    rows = normal(5, batch, 128 * int(rng.integers(1, 65)), dtype=BF16)
    wanted = rotary_into_cache(*given, rms_rows=rows, backend="xla")
    for y, z in zip(run(*given, rms_rows=rows), wanted, strict=True):
        assert_near(y, z, 8e-3)
    assert mgpu_ops.rotary_into_cache is rotary_into_cache
