"""An argument that is True or False takes nothing else: a string, though true in Python, is no yes."""

from __future__ import annotations

import inspect
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import PartitionSpec as P

import mgpu_ops

X = jnp.ones((16, 16), jnp.bfloat16)
W = jnp.ones((2, 16, 16), jnp.bfloat16)
SIZES = jnp.array([8, 8])
QKV = (jnp.ones((1, 16, 2, 16), jnp.bfloat16),) * 3
ANGLES = (jnp.ones((16, 8)),) * 2
ROW = jnp.ones(16, jnp.bfloat16)
INT8 = jnp.ones((16, 16), jnp.int8)
SCALES = jnp.ones((2, 32)), jnp.ones((2, 16))  # of gate and up, and of down


def collective(name: str) -> Any:
    """A collective under `shard_map` on one device."""

    def call(**flag: Any) -> jax.Array:
        mesh = jax.make_mesh((1,), ("x",))
        function = jax.shard_map(
            lambda x: getattr(mgpu_ops, name)(x, "x", **flag), mesh=mesh, in_specs=P(), out_specs=P(), check_vma=False
        )
        return function(X)

    return call


def of(name: str, *arrays: Any, **options: Any) -> Any:
    return lambda **flag: getattr(mgpu_ops, name)(*arrays, **options, **flag)


CALLS = {
    **{name: collective(name) for name in ("all_gather", "all_reduce", "reduce_scatter")},
    "autotune": of("autotune", lambda x: x),
    "cross_entropy": of("cross_entropy", X, jnp.zeros(16, jnp.int32)),
    "flash_attention": of("flash_attention", *QKV),
    "fp8_grouped_matmul": of("fp8_grouped_matmul", X, W, SIZES),
    "fp8_matmul": of("fp8_matmul", X, X),
    "fp8_moe": of("fp8_moe", X, jnp.ones((16, 2)), W, W, W, 1),
    "gated_grouped_matmul": of("gated_grouped_matmul", X, W, W, SIZES),
    "gated_matmul": of("gated_matmul", X, X, X),
    "grouped_matmul": of("grouped_matmul", X, W, SIZES),
    "matmul": of("matmul", X, X),
    "moe": of("moe", X, jnp.ones((16, 2)), W, W, W, 1),
    "moe_route": of("moe_route", jnp.ones((16, 2)), 1),
    "quantize": of("quantize", X, "tensor"),
    "quantized_grouped_matmul": of("quantized_grouped_matmul", X, jnp.stack([INT8] * 2), jnp.ones((2, 1, 16)), SIZES),
    "quantized_moe": of(
        "quantized_moe", X, jnp.ones((16, 2)), jnp.stack([INT8, INT8] * 2).reshape(2, 32, 16), jnp.stack([INT8] * 2), *SCALES, 1
    ),
    "quantized_matmul": of("quantized_matmul", X, INT8, jnp.ones((1, 16))),
    "rms_norm": of("rms_norm", X, ROW),
    "rotary_attention": of("rotary_attention", jnp.ones((1, 16, 48), jnp.bfloat16), *ANGLES, heads=1, kv_heads=1),
}
JAXS = {"dot_product_attention"}  # what it does not take goes to JAX's own


def flags(function: Any) -> list[str]:
    if not callable(function) or inspect.isclass(function):
        return []
    return [name for name, parameter in inspect.signature(function).parameters.items() if isinstance(parameter.default, bool)]


EVERY = [(name, flag) for name in mgpu_ops.__all__ if name not in JAXS for flag in flags(getattr(mgpu_ops, name))]


@pytest.mark.parametrize(("name", "flag"), EVERY, ids=[f"{name}-{flag}" for name, flag in EVERY])
def test_a_string_for_true_or_false_is_refused_by_name(name, flag):
    with pytest.raises(TypeError, match=f"^{flag}='no' is neither True nor False"):
        CALLS[name](**{flag: "no"})


def test_numpys_true_is_true():
    q, k, v = QKV
    ours = mgpu_ops.flash_attention(q, k, v, causal=np.bool_(True))
    assert (ours == mgpu_ops.flash_attention(q, k, v, causal=True)).all()
