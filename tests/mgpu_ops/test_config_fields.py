"""A Config whose field holds a list cannot be compared with others: a call tells the field before it is traced."""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import pytest

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.ops import spec_of

X, W = jnp.ones((16, 16), jnp.bfloat16), jnp.ones((2, 16, 16), jnp.bfloat16)
SIZES = jnp.array([8, 8])
QKV = (jnp.ones((1, 16, 2, 64), jnp.bfloat16),) * 3
INT8 = jnp.ones((2, 16, 16), jnp.int8)
CALLS: dict[str, Callable[..., Any]] = {
    "cross_entropy": functools.partial(mgpu_ops.cross_entropy, X, jnp.zeros(16, jnp.int32)),
    "embedding": functools.partial(mgpu_ops.embedding, X, jnp.zeros(16, jnp.int32)),
    "flash_attention": functools.partial(mgpu_ops.flash_attention, *QKV),
    "gated_grouped_matmul": functools.partial(mgpu_ops.gated_grouped_matmul, X, W, W, SIZES),
    "gated_matmul": functools.partial(mgpu_ops.gated_matmul, X, X, X),
    "grouped_matmul": functools.partial(mgpu_ops.grouped_matmul, X, W, SIZES),
    "matmul": functools.partial(mgpu_ops.matmul, X, X),
    "quantized_grouped_matmul": functools.partial(mgpu_ops.quantized_grouped_matmul, X, INT8, jnp.ones((2, 1, 16)), SIZES),
    "quantized_matmul": functools.partial(mgpu_ops.quantized_matmul, X, INT8[0], jnp.ones((1, 16))),
    "ragged_contraction": functools.partial(mgpu_ops.ragged_contraction, X, X, SIZES),
    "rms_norm": functools.partial(mgpu_ops.rms_norm, X, X[0]),
    "rotary": functools.partial(
        mgpu_ops.rotary_qkv, jnp.ones((1, 16, 192), jnp.bfloat16), *[jnp.ones((16, 32))] * 2, heads=1, kv_heads=1
    ),
}


def broken(op: str, value: Any) -> tuple[Any, str]:
    """The op's default config with a value in its first field, and the start of what a call says."""
    spec = spec_of(op)
    config = spec.default(next(iter(spec.shapes.values())), gpu.find("h200"))
    field = dataclasses.fields(config)[0].name
    kind = type(getattr(config, field)).__name__
    told = f"{field}={value!r} of {spec.Config.__name__} must be of type {kind}, not {type(value).__name__}: give the field one"
    return dataclasses.replace(config, **{field: value}), told


@pytest.mark.parametrize("backend", [None, "xla", "interpret"])
@pytest.mark.parametrize("op", CALLS)
def test_a_list_in_a_field_is_told_by_the_call(op: str, backend: str | None) -> None:
    config, told = broken(op, [64])
    with pytest.raises(TypeError) as raised:
        CALLS[op](config=config, backend=backend)
    assert str(raised.value).startswith(f"config: {told}")


def test_of_the_backward_pass_too() -> None:
    config, told = broken("flash_attention_backward", {})
    with pytest.raises(TypeError) as raised:
        CALLS["flash_attention"](backward_config=config)
    assert str(raised.value).startswith(f"backward_config: {told}")


@pytest.mark.parametrize("of_problem", [False, True])
def test_use_configs_tells_it_where_it_is_entered(of_problem: bool) -> None:
    config, told = broken("matmul", [64])
    answer = [(mgpu_ops.MatmulProblem(16, 16, 16), config)] if of_problem else config
    with pytest.raises(TypeError) as raised, mgpu_ops.use_configs({"matmul": answer}):
        pass
    assert str(raised.value).startswith(f"use_configs: matmul: {told}")
