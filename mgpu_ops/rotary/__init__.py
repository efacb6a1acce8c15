"""rotary_qkv: q, k and v taken apart from one projection, q and k rotated, in one pass; for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel,
which is also that of the gradient. Here: the public function, its gradient and batching rules, the reference, the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import floats
from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rotary.model import candidates, cost, default, distance, space
from mgpu_ops.rotary.problem import (
    SHAPES,
    SUITES,
    Config,
    Problem,
    bytes_moved,
    check,
    flops,
    inputs,
    smem_bytes,
    supports,
    tolerance,
)


@dataclasses.dataclass(frozen=True)
class RotaryCall:
    """The arguments of a call other than its arrays."""

    heads: int
    kv_heads: int
    config: Config | None
    backend: dispatch.Backend | None
    gradient: bool = False

    @classmethod
    def of(cls, heads: int, kv_heads: int, config: Config | None, backend: dispatch.Backend | None) -> RotaryCall:
        """Raises for what is none of these."""
        for name, number in (("heads", heads), ("kv_heads", kv_heads)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
                raise ValueError(f"{name}={number!r} must be an integer of at least 1")
        if config is not None and not isinstance(config, Config):
            raise TypeError(f"config is {config!r}: pass a mgpu_ops.RotaryConfig")
        return cls(int(heads), int(kv_heads), config, dispatch.requested_backend(backend))

    def checked(self, op: str, qkv: ArrayLike, cos: ArrayLike, sin: ArrayLike) -> tuple[jax.Array, jax.Array, jax.Array]:
        """qkv as [rows, all heads, head_dim], and cosines and sines. Raises where they do not fit each other."""
        rows = floats.array(op, "qkv", qkv)
        turns = [floats.array(op, name, x).astype(np.float32) for name, x in (("cos", cos), ("sin", sin))]
        every = self.heads + 2 * self.kv_heads
        if rows.ndim < 2 or rows.shape[-1] % (2 * every) or not rows.shape[-1]:
            raise ValueError(
                f"qkv has shape {rows.shape}: it is [..., tokens, width], and width is {every} (heads + 2 kv_heads) times an "
                "even head_dim"
            )
        tokens, head_dim = rows.shape[-2], rows.shape[-1] // every
        for name, x in zip(("cos", "sin"), turns, strict=True):
            if x.shape != (tokens, head_dim // 2):
                raise ValueError(
                    f"{name} has shape {x.shape}: for qkv{rows.shape} it is [tokens, head_dim / 2] = {(tokens, head_dim // 2)}"
                )
        cos, sin = map(lax.stop_gradient, turns)
        return rows.reshape(math.prod(rows.shape[:-1]), every, head_dim), cos, sin

    def backward(self) -> RotaryCall:
        """The call of the gradient."""
        return dataclasses.replace(self, config=None, gradient=True)

    def run(self, *arrays: jax.Array) -> Any:
        """q, k and v of what is joined, cosines and sines; with `gradient`, what is joined of q, k, v, cosines and sines."""
        return _batchable(self)(*arrays)


def rotary_qkv(
    qkv: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    heads: int,
    kv_heads: int,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """q, k and v of one projection that yields them joined, with rotary embeddings of q and k.

    left' = left cos - right sin and right' = right cos + left sin, of the left and right half of each head of q and k.

    Args:
      qkv: floats [..., tokens, (heads + 2 kv_heads) * head_dim]: the heads of q, then those of k, then those of v. For the
        kernel bfloat16 or float16 with a head_dim of 64, 128 or 256; others run through XLA.
      cos, sin: [tokens, head_dim / 2] of the angles position * base^(-2 i / head_dim), or whatever scaling of them a model has;
        used as float32. They are constants: no gradient flows to them.
      heads, kv_heads: of q; of k, and of v.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it and the
        kernel ran for such a problem on a GPU (bfloat16, head_dim 128, 4096 rows and more) or was measured to be faster,
        otherwise "xla".

    Returns:
      q [..., tokens, heads, head_dim], k and v [..., tokens, kv_heads, head_dim], of qkv's dtype, computed in float32 and
      rounded once.

    Works under jit, grad (reverse mode), vmap and shard_map. The gradient keeps cos and sin alone, and one kernel rotates the
    gradients of q and k back and joins them with that of v.

    Raises:
      ValueError: shapes that do not fit each other, heads that do not divide, an unknown backend, a config that cannot run.
      TypeError: not arrays of floats.

    Source: Su et al., arXiv:2104.09864; measurements in docs/ops/rotary_qkv.md.
    """
    call = RotaryCall.of(heads, kv_heads, config, backend)
    arrays = mesh.same_mesh_axes(*call.checked("rotary_qkv", qkv, cos, sin))
    lead, head_dim = np.shape(qkv)[:-1], arrays[0].shape[-1]
    q, k, v = _apart(call, *arrays)
    return q.reshape(*lead, heads, head_dim), k.reshape(*lead, kv_heads, head_dim), v.reshape(*lead, kv_heads, head_dim)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _apart(call: RotaryCall, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    return call.run(qkv, cos, sin)


def _forward(call: RotaryCall, qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> Any:
    return _apart(call, qkv, cos, sin), (cos, sin)


def _backward(call: RotaryCall, saved: Any, gradients: Any) -> tuple[jax.Array, jax.Array, jax.Array]:
    joined = call.backward().run(*gradients, *saved)
    return joined, *map(jnp.zeros_like, saved)


_apart.defvjp(_forward, _backward)


def _rule(call: RotaryCall, *_: jax.Array) -> partition.Rule:
    """Sequences and positions are split, not the heads, which are joined."""
    joined, apart = "batch t JOINED D", "batch t Q D, batch t KV D, batch t KV D"
    given, results = (apart, joined) if call.gradient else (joined, apart)
    return partition.Rule("rotary_qkv", f"{given}, t HALF, t HALF -> {results}")


@functools.cache
def _batchable(call: RotaryCall) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""

    def one_device(*arrays: jax.Array) -> Any:
        x, cos = arrays[0], arrays[-2]
        problem = Problem(x.shape[0], cos.shape[0], call.heads, call.kv_heads, x.shape[2], x.dtype.name, call.gradient)
        return dispatch.run(SPEC, problem, arrays, config=call.config, backend=call.backend)

    def of_sequences(*arrays: jax.Array) -> Any:
        """Of arrays [sequences, positions, heads, head_dim]."""
        *given, cos, sin = arrays
        out = one_device(*(lax.collapse(x, 0, 2) for x in given), cos, sin)
        return jax.tree.map(lambda y: y.reshape(*given[0].shape[:2], *y.shape[1:]), out)

    split = partition.partitioned(of_sequences, functools.partial(_rule, call), call.backend)

    @jax.custom_batching.custom_vmap
    def rotate(*arrays: jax.Array) -> Any:
        *given, cos, sin = arrays
        if not cos.shape[0] or not partition.applies(call.backend, *arrays):
            return one_device(*arrays)
        out = split(*(x.reshape(-1, cos.shape[0], *x.shape[1:]) for x in given), cos, sin)
        return jax.tree.map(lambda y: lax.collapse(y, 0, 2), out)

    @rotate.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        marks = True if call.gradient else (True, True, True)
        if all(batched[:-2]) and not any(batched[-2:]):  # more sequences
            out = run(*(lax.collapse(x, 0, 2) for x in arrays[:-2]), *arrays[-2:])
            return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), out), marks
        return one_after_the_other(run, batched, arrays), marks

    run = jax.jit(rotate)
    return run


def reference(problem: Problem, *arrays: jax.Array) -> Any:
    """The same through XLA: q, k and v, or the gradient of what is joined."""
    p, (*given, cos, sin) = problem, arrays
    dtype = np.promote_types(p.dtype, np.float32)
    cos, sin = (jnp.tile(x.astype(dtype), (p.rows // max(p.positions, 1), 1))[:, None] for x in (cos, sin))
    if p.gradient:
        sin = -sin

    def rotated(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x.astype(dtype), 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1).astype(p.dtype)

    q, k, v = given if p.gradient else jnp.split(given[0], (p.heads, p.heads + p.kv_heads), 1)
    parts = rotated(q), rotated(k), v
    return jnp.concatenate(parts, 1) if p.gradient else parts


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.rotary import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="rotary",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes=SHAPES,
    suites=SUITES,
    space=space,
    supports=supports,
    check=check,
    candidates=candidates,
    default=default,
    cost=cost,
    distance=distance,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=launch,
    reference=reference,
    tolerance=tolerance,
)

__all__ = ["SPEC", "Config", "Problem", "RotaryCall", "default", "launch", "reference", "rotary_qkv", "smem_bytes"]
