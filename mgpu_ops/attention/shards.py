"""Attention over several devices: the batch and the heads are split, q's heads with their head of k and v or apart from it.

For this q's heads are two dimensions, heads of k times those of q that share one.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable
from typing import Any

import jax

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.registry import partition


def forward(product: Callable[..., Any], backend: str | None) -> Callable[..., Any]:
    """`product`, from (q, k, v, inputs) to (output, lse), split over devices where XLA partitions the program."""

    def joined(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs) -> Any:
        kv_heads = k.shape[2]
        out, lse = product(_join(q, 2), k, v, _inputs(inputs, _join))
        return _apart(out, 2, kv_heads), _apart(lse, 1, kv_heads)

    split = partition.partitioned(joined, _forward_rule, backend)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs) -> Any:
        if not partition.applies(backend, q, k, v, inputs):
            return product(q, k, v, inputs)
        kv_heads = k.shape[2]
        out, lse = split(_apart(q, 2, kv_heads), k, v, _inputs(inputs, lambda x, axis: _apart(x, axis, kv_heads)))
        return _join(out, 2), _join(lse, 1)

    return call


def backward(product: Callable[..., Any], bias_grad: bool, backend: str | None) -> Callable[..., Any]:
    """`product`, from (q, k, v, inputs, gradient of the output, lse, delta or None, output) to gradients, split likewise."""

    def joined(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs, *rest: jax.Array) -> Any:
        out_grad, lse, delta, out = (_where_there(_join, x, axis) for x, axis in zip(rest, _HEADS, strict=True))
        kv_heads = k.shape[2]
        dq, dk, dv, *dbias = product(_join(q, 2), k, v, _inputs(inputs, _join), out_grad, lse, delta, out)
        return _apart(dq, 2, kv_heads), dk, dv, *(_apart(x, 1, kv_heads) for x in dbias)

    split = partition.partitioned(joined, functools.partial(_backward_rule, bias_grad), backend)

    def call(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs, *rest: jax.Array) -> Any:
        if not partition.applies(backend, q, k, v, inputs, *rest):
            return product(q, k, v, inputs, *rest)
        kv_heads = k.shape[2]

        def apart(x: jax.Array, axis: int) -> jax.Array:
            return _apart(x, axis, kv_heads)

        given = (_where_there(apart, x, axis) for x, axis in zip(rest, _HEADS, strict=True))
        dq, dk, dv, *dbias = split(apart(q, 2), k, v, _inputs(inputs, apart), *given)
        return _join(dq, 2), dk, dv, *(_join(x, 1) for x in dbias)

    return call


_HEADS = 2, 1, 1, 2  # the dimension of heads of the output's gradient, lse, delta and output
_Q, _OUT, _ROWS = "batch T kv group D", "batch T kv group D_V", "batch kv group T"


def _operands(q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs) -> list[str]:
    """The dimensions of each."""
    of_keys = "batch S kv" if inputs.page_table is None else "PAGES PAGE kv"
    found = [_Q, f"{of_keys} D", f"{of_keys} D_V", "OPTIONS"]
    found += ["batch"] * len(inputs.lengths or ())
    found += ["batch T", "batch S"] if inputs.segments is not None else []
    found += [_broadcast("batch kv group T S", x) for x in [inputs.bias] if x is not None]
    found += [_broadcast("batch kv group", x) for x in [inputs.sinks] if x is not None]
    found += ["batch OF_ENTRY"] * (inputs.page_table is not None)
    return found + [_broadcast("batch kv", x) for x in inputs.kv_scales or ()]


def _broadcast(dimensions: str, x: jax.Array) -> str:
    """Those of an array that may have one entry for all."""
    names = zip(dimensions.split(), x.shape, strict=True)
    return " ".join(f"ONE_{name.upper()}" if size == 1 else name for name, size in names)


def _forward_rule(*arrays: Any) -> partition.Rule:
    return partition.Rule("flash_attention", f"{', '.join(_operands(*arrays))} -> {_OUT}, {_ROWS}")


def _backward_rule(bias_grad: bool, *arrays: Any) -> partition.Rule:
    operands = _operands(*arrays[:4])
    results = [_Q, "batch S kv D", "batch S kv D_V"]
    results += [_broadcast("batch kv group T S", arrays[3].bias)] if bias_grad else []
    given = [*operands, _OUT, *[_ROWS] * (1 if arrays[6] is None else 2), _OUT]
    return partition.Rule("flash_attention's gradient", f"{', '.join(given)} -> {', '.join(results)}")


def _apart(x: jax.Array, axis: int, kv_heads: int) -> jax.Array:
    """The heads as two dimensions; a single one for all heads as two of one."""
    heads = (1, 1) if x.shape[axis] == 1 else (kv_heads, x.shape[axis] // kv_heads)
    return x.reshape(*x.shape[:axis], *heads, *x.shape[axis + 1 :])


def _where_there(change: Callable[[jax.Array, int], jax.Array], x: jax.Array | None, axis: int) -> jax.Array | None:
    return None if x is None else change(x, axis)


def _join(x: jax.Array, axis: int) -> jax.Array:
    return x.reshape(*x.shape[:axis], x.shape[axis] * x.shape[axis + 1], *x.shape[axis + 2 :])


def _inputs(inputs: Inputs, change: Callable[[jax.Array, int], jax.Array]) -> Inputs:
    bias, sinks = (None if x is None else change(x, 1) for x in (inputs.bias, inputs.sinks))
    return dataclasses.replace(inputs, bias=bias, sinks=sinks)
