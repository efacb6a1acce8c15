"""Gradients that have no gradient of their own: an error that names the function, where JAX's names none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import jax

type Rule = Callable[..., Any]


def first_order(name: str, forward: Rule, backward: Rule) -> tuple[Rule, Rule]:
    """Both rules of a `jax.custom_vjp` of a function `name`. What would differentiate them raises ValueError.

    JAX differentiates them where it takes a second derivative, and only there.
    """

    @functools.wraps(forward)
    def forward_rule(call: Any, *arrays: Any) -> Any:
        return forward(call, *_constant(name, arrays))

    @functools.wraps(backward)
    def backward_rule(call: Any, saved: Any, g: Any) -> Any:
        return backward(call, *_constant(name, (saved, g)))

    return forward_rule, backward_rule


def refuse_8_bits(op: str, instead: str, *arrays: jax.Array, scales: str = "none") -> None:
    """Raises ValueError for an array of 8 bits, whose gradient would have 8 bits too, and for scales of wider ones.

    instead: what to train with. scales: "none" where the call has none.
    """
    dtypes = " and ".join(dict.fromkeys(x.dtype.name for x in arrays))
    constant = "or hold the arrays constant with jax.lax.stop_gradient"
    if any(x.dtype.itemsize == 1 for x in arrays):
        raise ValueError(
            f"{op} of {dtypes} has no gradient: 8 bits without a scale of its own would lose it. Train with {instead} of the "
            f"16-bit arrays, {constant}"
        )
    if scales != "none":
        raise ValueError(
            f"{op} of {dtypes} has no gradient with scales of operands, which are for 8 bits: multiply the operand or the "
            f"result by the scale instead, {constant}"
        )


def _constant(name: str, values: Any) -> Any:
    """The values, of which no array can be differentiated. Others, such as a bool that a rule saves, stay as they are."""
    leaves, tree = jax.tree.flatten(values)
    arrays = iter(_constants(name, [x for x in leaves if isinstance(x, jax.Array)]))
    return jax.tree.unflatten(tree, [next(arrays) if isinstance(x, jax.Array) else x for x in leaves])


@functools.partial(jax.custom_jvp, nondiff_argnums=(0,))
def _constants(name: str, arrays: list[jax.Array]) -> list[jax.Array]:
    return arrays


@_constants.defjvp
def _(name: str, *_: Any) -> Any:
    raise ValueError(
        f"{name} has a gradient, but no gradient of that, which jax.hessian and penalties on gradients need: for these compute "
        "it in jax.numpy, or hold its arguments constant (jax.lax.stop_gradient)"
    )
