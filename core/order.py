"""In which order XLA computes what does not depend on each other."""

from __future__ import annotations

import functools
from typing import Any

import jax
from jax import lax

from mgpu_ops.core import mesh


def weights_first[W, T](weights: W, others: T) -> tuple[W, T]:
    """The same arrays; what is computed from `others` after this is computed after `weights`, gradients of weights.

    Nothing of a backward pass needs these, so that XLA leaves them to the end of a program, and until then keeps all that they
    are computed from: of every layer the inputs of its products and the gradients of their results. Gradients that nobody asks
    for are not computed. Outside of a trace, where all is computed in the order of the program, nothing happens.

    Nor in a program that XLA partitions: gradients of weights are sums over devices there, for which nothing else should wait.
    """
    leaves = jax.tree.leaves((weights, others))
    if not any(isinstance(x, jax.core.Tracer) for x in leaves):
        return weights, others
    over = mesh.mesh_of(leaves)
    if mesh.explicit_axes(over):
        return weights, others
    if not mesh.may_be_partitioned(over):
        return lax.optimization_barrier((weights, others))
    flat, structure = jax.tree.flatten((weights, others))
    ordered: tuple[W, T] = jax.tree.unflatten(structure, _ordered(*flat))
    return ordered


@jax.custom_jvp
def _ordered(*arrays: jax.Array) -> list[jax.Array]:
    return _operation().bind(*arrays)


@_ordered.defjvp
def _(arrays: Any, tangents: Any) -> Any:
    return _ordered(*arrays), list(tangents)


@functools.cache
def _operation() -> Any:
    """A barrier, but in a program that XLA partitions."""
    from jax.extend.core import Primitive
    from jax.interpreters import batching, mlir

    primitive = Primitive("mgpu_ops_ordered")
    primitive.multiple_results = True
    primitive.def_abstract_eval(lambda *arrays: list(arrays))
    primitive.def_impl(lambda *arrays: list(arrays))

    def lower(ctx: Any, *values: Any) -> Any:
        if mesh.is_partitioned(ctx.module_context):
            return values
        return mlir.lower_fun(lambda *arrays: lax.optimization_barrier(arrays), multiple_results=True)(ctx, *values)

    mlir.register_lowering(primitive, lower)
    batching.primitive_batchers[primitive] = lambda arrays, axes: (primitive.bind(*arrays), axes)
    return primitive
