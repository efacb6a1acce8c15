"""rotary_attention: attention of one projection's q, k and v, of which q and k are rotated: `rotary_qkv` and `flash_attention`.

The backward pass is where it gains: dq, which the kernel of attention's gradients adds up in float32, is rounded, rotated back
and joined with dk and dv by one kernel, where a call of each of the two takes two. With norms of q and k it is these two calls.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.typing import ArrayLike

from mgpu_ops.attention import flash_attention as attention
from mgpu_ops.attention.arguments import Arguments, Call, Window, check_qkv
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.problem import BackwardConfig, BackwardProblem, Config
from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.rotary import RotaryCall, rotary_qkv


def rotary_attention(
    qkv: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    heads: int,
    kv_heads: int,
    q_norm: ArrayLike | None = None,
    k_norm: ArrayLike | None = None,
    epsilon: float = 1e-6,
    causal: bool = False,
    window: Window | None = None,
    scale: float | None = None,
    soft_cap: float | None = None,
    deterministic: bool = False,
    config: Config | None = None,
    backward_config: BackwardConfig | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """Attention of one joined projection of q, k and v with rotary embeddings: `rotary_qkv`, then `flash_attention`.

    In training it takes one kernel less than these two calls: one kernel rounds the gradient of q, rotates those of q and k
    back, and joins them with that of v. With norms of q and k it is the two calls.

    Args:
      qkv: floats [..., tokens, (heads + 2 kv_heads) * head_dim]: the heads of q, then those of k, then those of v.
      cos, sin: [tokens, head_dim / 2], constants, as of `rotary_qkv`.
      heads, kv_heads: how many heads q has; and k, and v.
      q_norm, k_norm: weights [head_dim] of an RMS norm of each head of q and k, as of `rotary_qkv`. Default: no norm.
      epsilon: of both norms, a Python number of at least 0.
      causal, window, scale, soft_cap, deterministic, config, backward_config: as of `flash_attention`.
      backend: as of both. Default: for each of the two kernels what a call of its own would run.

    Returns:
      [..., tokens, heads, head_dim] of qkv's dtype.

    Works under jit, grad (reverse mode), vmap and shard_map. The gradient keeps q, k and v as they are rotated, and the output;
    with norms also qkv.

    Raises:
      ValueError, TypeError: as `rotary_qkv` and `flash_attention`.

    Example:
      >>> angles = jnp.arange(128)[:, None] * 10000.0 ** (-jnp.arange(32) / 32)
      >>> qkv = jnp.ones((2, 128, (4 + 2 * 2) * 64), jnp.bfloat16)
      >>> mgpu_ops.rotary_attention(qkv, jnp.cos(angles), jnp.sin(angles), heads=4, kv_heads=2, causal=True).shape
      (2, 128, 4, 64)

    Source: as for `rotary_qkv` and `flash_attention`.
    """
    rotary = RotaryCall.of(heads, kv_heads, None, backend)
    rows, *turned = rotary.checked("rotary_attention", qkv, cos, sin)
    tokens, head_dim = turned[0].shape[0], rows.shape[-1]
    lead = jnp.shape(qkv)[:-2]
    if not rows.size:
        raise ValueError(f"qkv has shape {jnp.shape(qkv)}: an empty dimension leaves nothing to attend to")
    counts = rotary.heads, rotary.kv_heads, rotary.kv_heads
    shapes: list[Any] = [jax.ShapeDtypeStruct((math.prod(lead), tokens, n, head_dim), rows.dtype) for n in counts]
    q, k, v = shapes
    check_qkv(q, k, v)
    arguments = Arguments(
        q,
        k,
        v,
        causal=causal,
        window=window,
        scale=scale,
        soft_cap=soft_cap,
        deterministic=deterministic,
        config=config,
        backward_config=backward_config,
        backend=backend,
    )
    _, norms = rotary.with_norms("rotary_attention", head_dim, q_norm, k_norm, epsilon)
    if norms:
        options: Any = {"q_norm": q_norm, "k_norm": k_norm, "epsilon": epsilon, "backend": backend}
        parts = rotary_qkv(qkv, cos, sin, heads=heads, kv_heads=kv_heads, **options)
        q, k, v = (x.reshape(-1, *x.shape[-3:]) for x in parts)
        attended = attention.attend(dataclasses.replace(arguments, q=q, k=k, v=v))[0]
        return attended.reshape(*lead, tokens, heads, head_dim)
    call = _Call(rotary, arguments.call())
    joined = rows.reshape(*q.shape[:2], -1, head_dim)
    if arguments.checked_scale() < 0:  # the kernels take the largest score before they scale
        sign = jnp.where(jnp.arange(joined.shape[2]) < heads, -1, 1)[:, None]
        joined *= sign.astype(joined.dtype)
    out = _attention(call, *mesh.same_mesh_axes(joined, *turned, arguments.inputs().options))
    return out.reshape(*lead, tokens, heads, head_dim)


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    rotary: RotaryCall
    attention: Call


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _attention(call: _Call, joined: jax.Array, cos: jax.Array, sin: jax.Array, options: jax.Array) -> jax.Array:
    """joined: [batch, tokens, heads + 2 kv_heads, head_dim]; options as of `Inputs`."""
    return _forward(call, joined, cos, sin, options)[0]


def _forward(call: _Call, joined: jax.Array, cos: jax.Array, sin: jax.Array, options: jax.Array) -> Any:
    batch, tokens, _, head_dim = joined.shape
    apart = call.rotary.run(joined.reshape(batch * tokens, -1, head_dim), cos, sin)
    q, k, v = (x.reshape(batch, tokens, -1, head_dim) for x in apart)
    out, lse = attention.forward_product(call.attention)(q, k, v, Inputs(options))
    return out, (q, k, v, options, out, lse, cos, sin)


def _backward(call: _Call, saved: Any, out_grad: jax.Array) -> tuple[jax.Array, ...]:
    q, k, v, options, out, lse, cos, sin = saved
    joined = _joined(call)(q, k, v, out_grad.astype(q.dtype), lse, out, options, cos, sin)
    return joined, *map(jnp.zeros_like, (cos, sin, options))


_attention.defvjp(*first_order("rotary_attention", _forward, _backward))


@functools.cache
def _joined(call: _Call) -> Any:
    """From q, k, v, the gradient of the output, lse, the output, options, cosines and sines to what `joined` gets."""

    def one_device(
        q: jax.Array,
        k: jax.Array,
        v: jax.Array,
        out_grad: jax.Array,
        lse: jax.Array,
        out: jax.Array,
        options: jax.Array,
        *turned: jax.Array,
    ) -> jax.Array:
        inputs, of = Inputs(options), call.attention
        problem = BackwardProblem(**dataclasses.asdict(of.problem(q, k, v, inputs)), deterministic=of.deterministic)
        if found := dispatch.kernel_of(attention.BACKWARD, problem, config=of.backward_config, backend=of.backend):
            config: Any = found[0]
            _, gpu, interpret = found
            if attention.joins(problem, config):
                arrays = turned, q, k, v, out_grad, lse, out, options
                with dispatch.told(attention.BACKWARD, problem, config, gpu):
                    return attention.joined(problem, config, gpu, *arrays, interpret=interpret)
        gradients = attention.backward_product(of)(q, k, v, inputs, out_grad, lse, None, out)
        batch, tokens, _, head_dim = q.shape
        joined = call.rotary.backward().run(*(x.reshape(batch * tokens, -1, head_dim) for x in gradients), *turned)
        return joined.reshape(batch, tokens, -1, head_dim)

    def rule(*_: jax.Array) -> partition.Rule:
        """The batch is split."""
        q, k, rows, turned = "batch T H D", "batch T KV D", "batch H T", "T HALF"
        operands = [q, k, k, q, rows, q, "OPTIONS", turned, turned]
        return partition.Rule("rotary_attention", f"{', '.join(operands)} -> batch T JOINED D")

    gradient = jax.custom_batching.custom_vmap(partition.partitioned(one_device, rule, call.attention.backend))

    @gradient.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        if size and all(batched[:-3]) and not any(batched[-3:]):  # more sequences
            out = run(*(x.reshape(-1, *x.shape[2:]) for x in arrays[:-3]), *arrays[-3:])
            return out.reshape(size, -1, *out.shape[1:]), True
        return one_after_the_other(run, batched, arrays), True

    run = jax.jit(gradient)
    return run
