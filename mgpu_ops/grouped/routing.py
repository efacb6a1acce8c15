"""Routing and sort of few tokens by one kernel, for a layer whose gradient is not asked for: of many, XLA's kernels do it."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

import jax
import numpy as np

from mgpu_ops import sorting
from mgpu_ops.core import gpu, mesh
from mgpu_ops.core.limits import WARP
from mgpu_ops.registry import capture, partition

_MOST_TOKENS = 64  # the most that were timed: one block does all, so that more take ever longer
_MOST_EXPERTS = 512  # the most that ran on a GPU; 256 were timed


class Sorted(NamedTuple):
    """Assignments sorted by expert, those of an expert in the order of tokens.

    tokens, weights: of each, int32 and float32 [assignments]. group_sizes: int32 [experts], how many each expert has.
    positions: int32 [tokens, top_k], the row of each token's assignments, the likeliest first.
    """

    tokens: jax.Array
    weights: jax.Array
    group_sizes: jax.Array
    positions: jax.Array

    def unknown(self) -> tuple[np.ndarray, np.ndarray]:
        """Weights and experts of tokens, zeros, for checks of what is called with those."""
        return np.zeros(self.positions.shape, np.float32), np.zeros(self.positions.shape, np.int32)


type Route = Callable[[jax.Array], Sorted]  # of logits [tokens, experts]


def kernel(logits: jax.Array, top_k: int, normalised: bool, backend: str | None) -> Route | None:
    """The kernel for logits [tokens, experts]; None where there is none for such, on this machine, or over several devices."""
    tokens, experts = logits.shape
    if not isinstance(tokens, int) or not 0 < tokens <= _MOST_TOKENS or capture.capturing():
        return None
    if logits.dtype != np.float32 or top_k > WARP or experts > _MOST_EXPERTS:
        return None
    if backend == "xla" or mesh.is_for_several_devices() or partition.applies(backend, logits):  # XLA could not split it
        return None
    device = gpu.current()
    if backend != "interpret" and (device is None or device.architecture != "hopper"):
        return None

    def route(logits: jax.Array) -> Sorted:
        from mgpu_ops.grouped import routing_kernel  # it imports Pallas

        return Sorted(*routing_kernel.launch(logits, top_k, normalised, interpret=backend == "interpret"))

    return route


def of_few(few: Callable[..., jax.Array], many: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`few`; under vmap, which may make many of few, and for gradients `many`, of the same arrays and result.

    `many` is differentiated only by those of the arrays by which the call is: it may have no gradient of others.
    """

    def forward(*given: Any) -> tuple[jax.Array, Any]:
        def of(*perturbed: jax.Array) -> jax.Array:
            some = iter(perturbed)
            return many(*(next(some) if one.perturbed else one.value for one in given))

        out, back = jax.vjp(of, *(one.value for one in given if one.perturbed))
        return out, (back, tuple(() if one.perturbed else None for one in given))  # which, without an array to keep

    def backward(saved: Any, g: jax.Array) -> tuple[Any, ...]:
        back, perturbed = saved
        some = iter(back(g))
        return tuple(None if one is None else next(some) for one in perturbed)

    run = jax.custom_vjp(sorting.of_few(few, many))
    run.defvjp(forward, backward, symbolic_zeros=True)
    return run
