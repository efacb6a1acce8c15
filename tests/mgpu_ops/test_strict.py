"""JAX's strict promotion of dtypes and ranks: it refuses what a caller's program mixes, and nothing within an op."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import SPECS
from mgpu_ops.core import gpu
from mgpu_ops.registry.spec import OpSpec

H200 = gpu.find("h200")
SIZES = np.array([3, 0, 9], np.int32)
EXPERTS = [(12, 16), (12, 3), (3, 16, 16), (3, 16, 16), (3, 16, 16)]
QKV, TURNS, CACHE = (8, 8 * 16), (8, 8), (8, 4, 2, 16)
ATTENTION = [(2, 8, 4, 16), (2, 8, 2, 16), (2, 8, 2, 16)]
BYTES = np.ones((3, 16, 16), np.int8)
IDS, LENGTHS, PLACES = np.arange(16).reshape(2, 8) // 3, np.array([5, 8]), np.arange(8) % 4

CALLS: dict[str, Any] = {  # function, and shapes of the floats that it is differentiated by
    "matmul": (functools.partial(mgpu_ops.matmul, rms_epsilon=1e-5, activation="gelu"), [(6, 16), (16, 8)]),
    "gated_mlp": (mgpu_ops.gated_mlp, [(6, 16), (16, 8), (16, 8), (8, 16)]),
    "fp8_matmul": (mgpu_ops.fp8_matmul, [(16, 16), (16, 16)]),
    "quantized_matmul": (lambda x: mgpu_ops.quantized_matmul(x, BYTES[0], np.ones(16, np.float32)), [(6, 16)]),
    "quantized_grouped_matmul": (
        lambda x: mgpu_ops.quantized_grouped_matmul(x, BYTES, np.ones((3, 16), np.float32), SIZES),
        [(12, 16)],
    ),
    "grouped_matmul": (
        lambda x, w, b: mgpu_ops.grouped_matmul(x, w, SIZES, bias=b, row_indices=np.arange(12) % 6),
        [(6, 16), (3, 16, 8), (3, 8)],
    ),
    "fp8_grouped_matmul": (lambda x, w: mgpu_ops.fp8_grouped_matmul(x, w, SIZES), [(12, 16), (3, 16, 16)]),
    "moe": (functools.partial(mgpu_ops.moe, top_k=2), EXPERTS),
    "fp8_moe": (functools.partial(mgpu_ops.fp8_moe, top_k=2), EXPERTS),
    "rms_norm": (mgpu_ops.rms_norm, [(6, 16), (16,)]),
    "rotary_qkv": (
        lambda x, q, k: mgpu_ops.rotary_qkv(x, *np.ones((2, *TURNS)), heads=4, kv_heads=2, q_norm=q, k_norm=k)[0],
        [QKV, (16,), (16,)],
    ),
    "flash_attention": (lambda *x: mgpu_ops.flash_attention(*x, causal=True, kv_lengths=LENGTHS), ATTENTION),
    "flash_attention, segments": (
        lambda *x: mgpu_ops.flash_attention(*x, window=(3, 2), q_segment_ids=IDS, kv_segment_ids=IDS),
        ATTENTION,
    ),
    "embedding": (lambda table: mgpu_ops.embedding(table, PLACES), [(4, 16)]),
    "cross_entropy": (lambda x: mgpu_ops.cross_entropy(x, PLACES), [(8, 16)]),
}


@contextlib.contextmanager
def strict() -> Iterator[None]:
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        yield


@pytest.mark.parametrize("name", CALLS)
def test_a_call_and_its_gradients_pass(name: str) -> None:
    function, shapes = CALLS[name]
    given = [jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in shapes]
    total = lambda *xs: function(*xs).astype(jnp.float32).sum()  # noqa: E731
    with strict():
        found = jax.eval_shape(jax.grad(total, argnums=tuple(range(len(given)))), *given)
    assert [x.shape for x in found] == shapes


def test_a_cache_is_written() -> None:
    qkv, cos, cache, norm = (jnp.ones(shape, jnp.bfloat16) for shape in (QKV, TURNS, CACHE, (16,)))
    options = {"rms_rows": cache[:, 0, 0], "q_norm": norm, "k_norm": norm}
    with strict():
        mgpu_ops.rotary_into_cache(qkv, cos, cos, cache, cache, PLACES, **options)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_kernels_are_traced(spec: OpSpec) -> None:
    for name in sorted(spec.shapes)[:: max(1, len(spec.shapes) // 6)]:
        problem = spec.shapes[name]
        arrays = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
        with strict():
            jax.eval_shape(functools.partial(spec.run, problem, spec.default(problem, H200), H200), *arrays)
