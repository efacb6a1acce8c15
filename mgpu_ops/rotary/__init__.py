"""rotary_qkv: q, k and v taken apart from one projection, q and k normalised and rotated, in one pass; for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernel,
which is also that of the gradient. Here: the public function, its gradient and batching rules, the reference, the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike

from mgpu_ops import floats
from mgpu_ops.core import mesh, order
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rms_rows import checked_epsilon, factors
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
    """The arguments of a call other than its arrays. epsilon: of the norms; None where there are none."""

    heads: int
    kv_heads: int
    config: Config | None
    backend: dispatch.Backend | None
    gradient: bool = False
    epsilon: float | None = None

    @classmethod
    def of(cls, heads: int, kv_heads: int, config: Config | None, backend: dispatch.Backend | None) -> RotaryCall:
        """Raises for what is none of these."""
        for name, number in (("heads", heads), ("kv_heads", kv_heads)):
            if isinstance(number, bool) or not isinstance(number, int | np.integer) or number < 1:
                raise ValueError(f"{name}={number!r} must be an integer of at least 1")
        check_config("config", config, Config, "RotaryConfig")
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
        rows = mesh.as_rows("qkv", rows)  # JAX knows how this is sharded and how the next one, but not both in one
        return rows.reshape(rows.shape[0], every, head_dim), cos, sin

    def with_norms(
        self, op: str, head_dim: int, q_norm: ArrayLike | None, k_norm: ArrayLike | None, epsilon: float
    ) -> tuple[RotaryCall, list[jax.Array]]:
        """The call with the norms of q and k, and their weights as float32; itself and none without. See `checked_norms`."""
        weights, number = checked_norms(op, head_dim, q_norm, k_norm, epsilon)
        return (dataclasses.replace(self, epsilon=number) if weights else self), [w.astype(np.float32) for w in weights]

    def backward(self) -> RotaryCall:
        """The call of the gradient."""
        return dataclasses.replace(self, config=None, gradient=True)

    def problem(self, x: jax.Array, positions: int) -> Problem:
        """Of rows x [rows, heads, head_dim]."""
        return Problem(
            x.shape[0],
            positions,
            self.heads,
            self.kv_heads,
            x.shape[2],
            x.dtype.name,
            self.gradient,
            self.epsilon is not None,
        )

    def run(self, *arrays: jax.Array) -> Any:
        """q, k and v of what is joined, cosines and sines, and the weights of norms.

        With `gradient`, what is joined of q, k, v, cosines and sines. With norms, what is joined and the weights' gradients,
        of q, k, v, what was joined before the norm, cosines, sines and weights.
        """
        return _batchable(self)(*arrays)


def checked_norms(
    op: str, head_dim: int, q_norm: ArrayLike | None, k_norm: ArrayLike | None, epsilon: float
) -> tuple[list[jax.Array], float]:
    """The weights of the norms of q and k, none without norms; and epsilon.

    Raises for one weight alone, for weights that do not fit a head, and for what is no epsilon, without weights too.
    """
    number = checked_epsilon("epsilon", epsilon)
    given = {"q_norm": q_norm, "k_norm": k_norm}
    missing = [name for name, weight in given.items() if weight is None]
    if len(missing) == 2:
        return [], number
    if missing:
        raise ValueError(f"{missing[0]} is None: pass q_norm and k_norm, weights [head_dim] of both, or neither")
    weights = {name: floats.array(op, name, weight) for name, weight in given.items() if weight is not None}
    for name, weight in weights.items():
        if weight.shape != (head_dim,):
            raise ValueError(f"{name} has shape {weight.shape}: it is a weight of each number of a head, [{head_dim}]")
    return list(weights.values()), number


def rotary_qkv(
    qkv: ArrayLike,
    cos: ArrayLike,
    sin: ArrayLike,
    *,
    heads: int,
    kv_heads: int,
    q_norm: ArrayLike | None = None,
    k_norm: ArrayLike | None = None,
    epsilon: float = 1e-6,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """Takes q, k and v apart from one joined projection and rotates q and k (RoPE), after an RMS norm if asked for.

    left' = left cos - right sin and right' = right cos + left sin, of the left and right half of each head of q and k. With
    norms, a head x of q is first x q_norm / sqrt(mean of x^2 + epsilon), and one of k likewise with k_norm.

    Args:
      qkv: floats [..., tokens, (heads + 2 kv_heads) * head_dim]: the heads of q, then those of k, then those of v. For the
        kernel bfloat16 or float16 with a head_dim of 64, 128 or 256; others run through XLA.
      cos, sin: [tokens, head_dim / 2] of the angles position * base^(-2 i / head_dim), or whatever scaling of them a model has;
        used as float32. They are constants: no gradient flows to them.
      heads, kv_heads: how many heads q has; and k, and v.
      q_norm, k_norm: weights [head_dim] of an RMS norm of each head of q and of k, used as float32. Default: no norm.
      epsilon: of both norms, a Python number of at least 0.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it and
        XLA was not measured to be faster, otherwise "xla".

    Returns:
      q [..., tokens, heads, head_dim], k and v [..., tokens, kv_heads, head_dim], of qkv's dtype, computed in float32 and
      rounded once.

    Works under jit, grad (reverse mode, without norms also of a gradient: `jax.jacrev` of `jax.grad`, not `jax.hessian`, which
    takes forward mode), vmap and shard_map. The gradient keeps only cos and sin; one kernel rotates the
    gradients of q and k back and joins them with that of v. With norms it keeps qkv and the weights too, and the same kernel
    computes the weights' gradients, summed over all tokens and heads in float32; there is no second derivative then.

    Raises:
      ValueError: shapes that do not fit each other, heads that do not divide, one of q_norm and k_norm alone, an epsilon below
        0 or not finite, an unknown backend, a config that cannot run.
      TypeError: not arrays of floats.

    Example:
      >>> angles = jnp.arange(128)[:, None] * 10000.0 ** (-jnp.arange(32) / 32)
      >>> qkv = jnp.ones((2, 128, (4 + 2 * 2) * 64), jnp.bfloat16)
      >>> q, k, v = mgpu_ops.rotary_qkv(qkv, jnp.cos(angles), jnp.sin(angles), heads=4, kv_heads=2)
      >>> q.shape, k.shape
      ((2, 128, 4, 64), (2, 128, 2, 64))

    Source: Su et al., arXiv:2104.09864; norms of heads: Qwen3, arXiv:2505.09388; measurements in docs/ops/rotary_qkv.md.
    """
    call = RotaryCall.of(heads, kv_heads, config, backend)
    rows, cos, sin = call.checked("rotary_qkv", qkv, cos, sin)
    lead, head_dim = np.shape(qkv)[:-1], rows.shape[-1]
    call, weights = call.with_norms("rotary_qkv", head_dim, q_norm, k_norm, epsilon)
    q, k, v = (_normalised if weights else _turned)(call, *mesh.same_mesh_axes(rows, cos, sin, *weights))
    return q.reshape(*lead, heads, head_dim), k.reshape(*lead, kv_heads, head_dim), v.reshape(*lead, kv_heads, head_dim)


def _run(call: RotaryCall, *arrays: jax.Array) -> Any:
    return call.run(*arrays)


def _forward(call: RotaryCall, *arrays: jax.Array) -> Any:
    return _turned(call, *arrays), arrays[-2:]


def _backward(call: RotaryCall, turns: Any, gradients: Any) -> tuple[jax.Array, ...]:
    """The other way round; the gradient of that is the call itself."""
    back = dataclasses.replace(call, config=None, gradient=not call.gradient)
    given = _turned(back, *jax.tree.leaves(gradients), *turns)
    return *jax.tree.leaves(given), *map(jnp.zeros_like, turns)


def _forward_of_norms(call: RotaryCall, *arrays: jax.Array) -> Any:
    return call.run(*arrays), arrays


def _backward_of_norms(call: RotaryCall, saved: Any, gradients: Any) -> tuple[jax.Array, ...]:
    joined, *weights = call.backward().run(*gradients, *saved)
    _, cos, sin, *norms = saved
    weights = [dw.astype(w.dtype) for dw, w in zip(weights, norms, strict=True)]
    weights, joined = order.weights_first(weights, joined)  # or the blocks' parts of their sums would be kept
    return joined, *map(jnp.zeros_like, (cos, sin)), *weights


_turned = jax.custom_vjp(_run, nondiff_argnums=(0,))
_turned.defvjp(_forward, _backward)
_normalised = jax.custom_vjp(_run, nondiff_argnums=(0,))
_normalised.defvjp(*first_order("rotary_qkv with norms", _forward_of_norms, _backward_of_norms))


def _rule(call: RotaryCall, *_: jax.Array) -> partition.Rule:
    """Sequences and positions are split, not the heads, which are joined; the gradients of weights are their sums."""
    joined, apart = "batch t JOINED D", "batch t Q D, batch t KV D, batch t KV D"
    given, results = (apart, joined) if call.gradient else (joined, apart)
    turned = "t HALF, t HALF"
    if call.epsilon is None:
        return partition.Rule("rotary_qkv", f"{given}, {turned} -> {results}")
    given, results = (f"{given}, {joined}", f"{results}, D, D") if call.gradient else (given, results)
    return partition.Rule("rotary_qkv", f"{given}, {turned}, D, D -> {results}")


@functools.cache
def _batchable(call: RotaryCall) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""
    norms = call.epsilon is not None
    by_row = (3 + norms) if call.gradient else 1  # arrays of rows come first

    def of_rows(results: Any, change: Callable[[jax.Array], jax.Array]) -> Any:
        """The results, of which those of rows are changed: all but the gradients of weights."""
        if call.gradient and norms:
            return change(results[0]), *results[1:]
        return jax.tree.map(change, results)

    def one_device(*arrays: jax.Array) -> Any:
        problem = call.problem(arrays[0], arrays[by_row].shape[0])
        epsilon = () if call.epsilon is None else (jnp.full((1,), call.epsilon, np.float32),)
        return dispatch.run(SPEC, problem, (*arrays, *epsilon), config=call.config, backend=call.backend)

    def of_sequences(*arrays: jax.Array) -> Any:
        """Of arrays [sequences, positions, heads, head_dim]."""
        lead = arrays[0].shape[:2]
        out = one_device(*(lax.collapse(x, 0, 2) for x in arrays[:by_row]), *arrays[by_row:])
        return of_rows(out, lambda y: y.reshape(*lead, *y.shape[1:]))

    split = partition.partitioned(of_sequences, functools.partial(_rule, call), call.backend)

    @jax.custom_batching.custom_vmap
    def rotate(*arrays: jax.Array) -> Any:
        given, others = arrays[:by_row], arrays[by_row:]
        positions = others[0].shape[0]
        if not positions or not partition.applies(call.backend, *arrays):
            return one_device(*arrays)
        out = split(*(x.reshape(-1, positions, *x.shape[1:]) for x in given), *others)
        return of_rows(out, lambda y: lax.collapse(y, 0, 2))

    @rotate.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        marks = True if call.gradient and not norms else (True, True, True)
        sums = call.gradient and norms  # of the rows of one call
        if all(batched[:by_row]) and not any(batched[by_row:]) and not sums:  # more sequences
            out = run(*(lax.collapse(x, 0, 2) for x in arrays[:by_row]), *arrays[by_row:])
            return jax.tree.map(lambda y: y.reshape(*arrays[0].shape[:2], *y.shape[1:]), out), marks
        return one_after_the_other(run, batched, arrays), marks

    run = jax.jit(rotate)
    return run


def reference(problem: Problem, *arrays: jax.Array) -> Any:
    """The same through XLA: q, k and v, or the gradient of what is joined; with `normalised` also those of both weights."""
    p, given, (cos, sin, *norms) = problem, arrays[: problem.by_row], arrays[problem.by_row :]
    dtype = np.promote_types(p.dtype, np.float32)
    cos, sin = (jnp.tile(x.astype(dtype), (p.rows // max(p.positions, 1), 1))[:, None] for x in (cos, sin))
    if p.gradient:
        sin = -sin

    def rotated(x: jax.Array) -> jax.Array:
        left, right = jnp.split(x.astype(dtype), 2, -1)
        return jnp.concatenate([left * cos - right * sin, right * cos + left * sin], -1)

    def normalised(x: jax.Array, weight: jax.Array) -> jax.Array:
        return x * factors(x, norms[-1].astype(dtype)) * weight[None, None]

    def parts(joined: jax.Array) -> list[jax.Array]:
        return jnp.split(joined, (p.heads, p.rotated), 1)

    q, k, v = given[:3] if p.gradient else parts(given[0])
    if not p.gradient:
        if p.normalised:
            q, k = (normalised(x.astype(dtype), w.astype(dtype)) for x, w in zip((q, k), norms[:2], strict=True))
        return rotated(q).astype(p.dtype), rotated(k).astype(p.dtype), v
    q, k = rotated(q), rotated(k)
    if not p.normalised:
        return jnp.concatenate([q.astype(p.dtype), k.astype(p.dtype), v], 1)
    before = (x.astype(dtype) for x in parts(given[3])[:2])
    weights = (w.astype(dtype) for w in norms[:2])
    (q, dq_norm), (k, dk_norm) = (jax.vjp(normalised, x, w)[1](g) for x, w, g in zip(before, weights, (q, k), strict=True))
    return jnp.concatenate([q.astype(p.dtype), k.astype(p.dtype), v], 1), dq_norm, dk_norm


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

__all__ = [
    "SPEC",
    "Config",
    "Problem",
    "RotaryCall",
    "checked_norms",
    "default",
    "launch",
    "reference",
    "rotary_qkv",
    "smem_bytes",
]
