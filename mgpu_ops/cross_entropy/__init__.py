"""cross_entropy: the loss of a language model over its vocabulary, in one pass over the logits, for NVIDIA Hopper.

`problem.py`: what is computed, and which configs run it. `model.py`: which configs are worth trying. `kernel.py`: the kernels.
Here: the public function, its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any, Literal, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mgpu_ops import flags, floats, integers
from mgpu_ops.core import mesh
from mgpu_ops.core.derivatives import first_order
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.cross_entropy.model import candidates, cost, default, distance, space
from mgpu_ops.cross_entropy.problem import (
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
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True)
class _Call:
    """The arguments of a call other than its arrays."""

    config: Config | None
    backend: dispatch.Backend | None
    gradient: bool = False
    in_place: bool = False  # of the gradient: where the logits lie


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[False] = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array: ...


@overload
def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: Literal[True],
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> tuple[jax.Array, jax.Array]: ...


def cross_entropy(
    logits: ArrayLike,
    labels: ArrayLike,
    *,
    return_lse: bool = False,
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """Softmax cross-entropy of logits with integer labels, in one pass over the logits that stores no probabilities.

    lse[...] = log(sum_v exp(logits[..., v])), loss[...] = lse[...] - logits[..., labels[...]]

    Args:
      logits: floats [..., vocabulary]. For the kernel bfloat16, float16 or float32 with a vocabulary that is a multiple of 128;
        others run through XLA.
      labels: integers [...] of any dtype. The loss of a negative label is 0, and so is its gradient: for tokens that do not
        count. The loss of a label of the vocabulary's size or more is NaN.
      return_lse: return also lse, e.g. for a loss on its square. It is differentiable.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection; any
        machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it and
        XLA was not measured to be faster for this problem or one near it, otherwise "xla".

    Returns:
      The loss of each token, float32 [...] (float64 of float64 logits); with `return_lse` (loss, lse).

    Works under jit, grad (reverse mode), vmap (one launch) and shard_map. The gradient keeps the logits and lse, and a kernel
    computes it in one pass: exp(logits - lse), less 1 at the label, times the gradient of the token's loss, of logits' dtype.
    Inside of jit it is written in the place of the logits: if the program uses these for nothing else, that saves an array of
    their size. (Not by a config of two stages whose tile does not divide the vocabulary.)

    Raises:
      ValueError: shapes that do not fit each other, an empty vocabulary, an unknown backend, a config that cannot run.
      TypeError: logits that are no floats, labels that are no integers.

    Measurements are in docs/ops/cross_entropy.md.
    """
    x = floats.array("cross_entropy", "logits", logits)
    y = integers.array("labels", labels)
    if x.ndim == 0 or x.shape[:-1] != y.shape:
        raise ValueError(f"logits{x.shape} and labels{y.shape} do not fit: they are [..., vocabulary] and [...]")
    if x.shape[-1] == 0:
        raise ValueError(f"logits{x.shape} has an empty vocabulary: there is no label")
    integers.check_count("the words of logits", x.shape[-1])
    check_config("config", config, Config, "CrossEntropyConfig")
    call, return_lse = _Call(config, dispatch.requested_backend(backend)), flags.checked("return_lse", return_lse)
    known = mesh.as_rows("labels", _known_labels(y, x.shape[-1]), 0)
    loss, lse = _losses(call, *mesh.same_mesh_axes(mesh.as_rows("logits", x), known))
    loss, lse = loss.reshape(y.shape), lse.reshape(y.shape)
    return (loss, lse) if return_lse else loss


def _known_labels(labels: Any, vocabulary: int) -> jax.Array:
    """As int32: all that are negative as -1, all beyond the vocabulary as its size, whatever the dtype can hold."""
    holds = jnp.iinfo(labels.dtype)
    clip = (jnp if isinstance(labels, jax.Array) else np).clip
    return jnp.asarray(clip(labels, max(-1, holds.min), min(vocabulary, holds.max)), jnp.int32)


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _losses(call: _Call, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
    """(loss, lse) of logits [tokens, vocabulary]."""
    found: tuple[jax.Array, jax.Array] = _batchable(call)(logits, labels)
    return found


def _forward(call: _Call, logits: jax.Array, labels: jax.Array) -> Any:
    loss, lse = _losses(call, logits, labels)
    return (loss, lse), (logits, labels, lse)


def _backward(call: _Call, saved: Any, gradients: tuple[jax.Array, jax.Array]) -> tuple[jax.Array, None]:
    """By the kernel: exp(x - lse) (dloss + dlse) - (v == label) dloss, without dloss where the label is negative."""
    logits, labels, lse = saved
    dloss, dlse = gradients
    of_loss = _counted(dloss, labels, logits.shape[1])
    # In a larger program nothing reads the logits after this; where something does, XLA copies them.
    again = dataclasses.replace(call, config=None, gradient=True, in_place=isinstance(logits, jax.core.Tracer))
    return _batchable(again)(logits, labels, lse, of_loss + dlse, of_loss), None


_losses.defvjp(*first_order("cross_entropy", _forward, _backward))


def _rule(call: _Call, logits: jax.Array, *_: jax.Array) -> partition.Rule:
    """Tokens and words are split."""
    vocabulary = logits.shape[1]

    def gradient(parts: int, number: jax.Array, logits: jax.Array, labels: jax.Array, *rows: jax.Array) -> Any:
        return _of_rows(call, logits, _within(labels, number, vocabulary // parts), *rows)

    def losses(parts: int, number: jax.Array, logits: jax.Array, labels: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The label's logit, where it is one of a device's, and lse of all of these."""
        own = _within(labels, number, vocabulary // parts)
        at_label = jnp.take_along_axis(logits, jnp.maximum(own, 0)[:, None], axis=1)[:, 0]
        lse = _of_rows(call, logits, own)[1]
        return jnp.where(own < 0, 0, at_label.astype(lse.dtype)), lse

    def finish(at_label: jax.Array, lse: jax.Array, logits: jax.Array, labels: jax.Array) -> Any:
        return _counted(lse - at_label, labels, vocabulary), lse

    name, words = "cross_entropy", "v"
    if call.gradient:
        return partition.Rule(name, "rows v, rows, rows, rows, rows -> rows v", counted=words, of_part=gradient)
    rule = partition.Rule(name, "rows v, rows -> rows, rows", counted=words, of_part=losses)
    return dataclasses.replace(rule, logarithms=(1,), finish=finish)


def _within(labels: jax.Array, number: jax.Array, words: int) -> jax.Array:
    """Labels counted from the first word of a part of so many; -1 for those of other parts."""
    own = labels - number * words
    return jnp.where((own >= 0) & (own < words) & (labels >= 0), own, -1)


def _counted(loss: jax.Array, labels: jax.Array, vocabulary: int) -> jax.Array:
    """The loss, or its gradient, but 0 of negative labels, and NaN of those beyond the vocabulary."""
    return jnp.where(labels < 0, 0, jnp.where(labels < vocabulary, loss, jnp.nan))


def _of_rows(call: _Call, *arrays: jax.Array) -> Any:
    """On one device."""
    rows, vocabulary = arrays[0].shape
    problem = Problem(rows, vocabulary, arrays[0].dtype.name, call.gradient)
    spec = _IN_PLACE if call.in_place else SPEC
    return dispatch.run(spec, problem, arrays, config=call.config, backend=call.backend)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays. It is jitted, so that eager calls trace once."""
    of_rows, rule = functools.partial(_of_rows, call), functools.partial(_rule, call)
    losses = jax.custom_batching.custom_vmap(partition.partitioned(of_rows, rule, call.backend))

    @losses.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[Any, Any]:
        """More tokens."""
        whole = [
            x if is_batched else jnp.broadcast_to(x, (size, *x.shape)) for x, is_batched in zip(arrays, batched, strict=True)
        ]
        out = run(*(x.reshape(-1, *x.shape[2:]) for x in whole))
        split = jax.tree.map(lambda y: y.reshape(size, -1, *y.shape[1:]), out) if size else _nothing(out, whole[0])
        return split, jax.tree.map(lambda _: True, out)

    run = jax.jit(losses)
    return run


def _nothing(out: Any, logits: jax.Array) -> Any:
    """The results of a mapped axis of size 0."""
    return jax.tree.map(lambda y: y.reshape(0, logits.shape[1], *y.shape[1:]), out)


def reference(problem: Problem, logits: jax.Array, labels: jax.Array, *rows: jax.Array) -> Any:
    """The same through XLA: (loss, lse), or with lse, p and q of the tokens the gradient of the logits."""
    wide = logits.astype(np.promote_types(problem.dtype, np.float32))
    if problem.gradient:
        lse, p, q = (x[:, None] for x in rows)
        at_label = jnp.arange(problem.vocabulary)[None] == labels[:, None]
        return (jnp.exp(wide - lse) * p - jnp.where(at_label, q, 0)).astype(problem.dtype)
    lse = jax.nn.logsumexp(wide, axis=1)
    seen = jnp.clip(labels, 0, problem.vocabulary - 1)
    loss = lse - jnp.take_along_axis(wide, seen[:, None], axis=1)[:, 0]
    return _counted(loss, labels, problem.vocabulary), lse


def launch(
    problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False, in_place: bool = False
) -> Any:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.cross_entropy import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret, in_place=in_place)


SPEC = OpSpec(
    name="cross_entropy",
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
_IN_PLACE = dataclasses.replace(SPEC, run=functools.partial(launch, in_place=True))

__all__ = ["SPEC", "Config", "Problem", "cross_entropy", "default", "launch", "reference", "smem_bytes"]
