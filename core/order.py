"""In which order XLA computes what does not depend on each other."""

from __future__ import annotations

import jax
from jax import lax


def weights_first[W, T](weights: W, others: T) -> tuple[W, T]:
    """The same arrays; what is computed from `others` after this is computed after `weights`, gradients of weights.

    Nothing of a backward pass needs these, so that XLA leaves them to the end of a program, and until then keeps all that they
    are computed from: of every layer the inputs of its products and the gradients of their results. Gradients that nobody asks
    for are not computed. Outside of a trace, where all is computed in the order of the program, nothing happens.
    """
    if not any(isinstance(x, jax.core.Tracer) for x in jax.tree.leaves((weights, others))):
        return weights, others
    ordered: tuple[W, T] = lax.optimization_barrier((weights, others))
    return ordered
