"""The activations of epilogues: through XLA (`activate`), and in a kernel's registers, with derivatives."""

from __future__ import annotations

import functools
import math
from collections.abc import Callable
from typing import Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# "relu" and "silu" as in jax.nn; "gelu" is jax.nn.gelu, the tanh approximation, and "gelu_erf" the exact one.
type Activation = Literal["none", "relu", "silu", "gelu", "gelu_erf"]
ACTIVATIONS: tuple[Activation, ...] = get_args(Activation.__value__)

_OF_JAX: dict[str, Callable[[jax.Array], jax.Array]] = {
    "relu": jax.nn.relu,
    "silu": jax.nn.silu,
    "gelu": jax.nn.gelu,
    "gelu_erf": functools.partial(jax.nn.gelu, approximate=False),
}


def checked_activation(activation: str | None) -> Activation:
    """The activation, "none" for None. ValueError for an unknown one."""
    if activation is None:
        return "none"
    if not isinstance(activation, str) or activation not in ACTIVATIONS:
        raise ValueError(f"activation={activation!r:.80} is not one of {', '.join(ACTIVATIONS)}")
    return activation


def activate(activation: str, x: jax.Array) -> jax.Array:
    """The activation of x through XLA, computed in float32 at least, in x's dtype."""
    if activation == "none":
        return x
    return _OF_JAX[activation](x.astype(np.promote_types(x.dtype, np.float32))).astype(x.dtype)


def activate_as_kernels(activation: str, x: jax.Array) -> jax.Array:
    """As `activate`, in the formulas of kernels, for a product whose activation a gradient needs.

    They take fewer instructions than XLA's, whose gelu_erf takes longer than to read and write x. float64 has `activate`.
    """
    if x.dtype == np.float64:
        return activate(activation, x)
    return in_registers(activation, x.astype(np.float32)).astype(x.dtype)


def gradient(activation: str, x: jax.Array, g: jax.Array) -> jax.Array:
    """The gradient of x from g, that of `activate_as_kernels`: in x's dtype."""
    if x.dtype == np.float64:
        found: jax.Array = jax.vjp(functools.partial(activate, activation), x)[1](g)[0]
        return found
    return (g.astype(np.float32) * with_derivative(activation, x.astype(np.float32))[1]).astype(x.dtype)


# --- In a kernel: float32 values in registers. Exponentials and reciprocal square roots are one instruction each.

_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715  # gelu(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))


def _sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), the quotient as the square of a reciprocal square root: a division takes ten instructions."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


# gelu(x) = max(x, 0) - a t(a) with a = |x| and t(a) = 1 - gelu(a) / a, which falls from 0.5 to nothing. Its logarithm to base 2
# is nearly a parabola: these polynomials give a t(a) to 2e-7 and 6e-7, from 0 to 6, and take one exponential where the formulas
# take two functions that an SM computes 16 times in a clock, and products and sums 128 times.
_TAIL = {
    "gelu_erf": (-0.999999464, -1.15113246, -0.458992958, -0.0531108677, 0.00788637809, -0.00071057427, 2.64685859e-05),
    "gelu": (
        *(-0.999997675, -1.15121055, -0.458486021, -0.0531878285),
        *(0.00917170849, -0.000207477991, -0.000844703405, 0.000114939474),
    ),
}
_END_OF_TAIL = 6.0  # a t(a) is 6e-9 there, and from there on


def _tail(activation: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """a = |x|, 6 at most, and t(a): no infinity times zero."""
    a = jnp.minimum(jnp.abs(x), _END_OF_TAIL)
    last, *coefficients = reversed(_TAIL[activation])
    power = last * a + coefficients[0]
    for coefficient in coefficients[1:]:
        power = power * a + coefficient
    return a, jnp.exp2(power)


def in_registers(activation: str, x: jax.Array) -> jax.Array:
    """The activation of float32 values of a kernel."""
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "silu":
        return x * _sigmoid(x)
    if activation in _TAIL:
        a, tail = _tail(activation, x)
        return jnp.maximum(x, 0.0) - a * tail
    return x


def with_derivative(activation: str, x: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The activation of float32 values of a kernel, and its derivative."""
    if activation == "relu":  # 0 at 0, as in jax.nn
        return jnp.maximum(x, 0.0), jnp.where(x > 0.0, 1.0, 0.0)
    if activation == "silu":
        s = _sigmoid(x)
        return x * s, s * (1.0 + x * (1.0 - s))
    if activation == "gelu":  # x sigmoid(x q), q = a + b x^2; the derivative of x q is 3 q - 2 a
        q = 2 * _TANH_SCALE * (1.0 + _TANH_CUBIC * x * x)
        s = _sigmoid(x * q)
        y = x * s
        return y, s + y * (1.0 - s) * (3.0 * q - 4 * _TANH_SCALE)
    if activation == "gelu_erf":
        a, tail = _tail(activation, x)
        cdf = jnp.where(x > 0.0, 1.0 - tail, tail)
        return jnp.maximum(x, 0.0) - a * tail, cdf + x * (jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    return x, jnp.ones_like(x)
