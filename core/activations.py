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


# --- In a kernel: float32 values in registers. Exponentials and reciprocal square roots are one instruction each.

_TANH_SCALE, _TANH_CUBIC = math.sqrt(2 / math.pi), 0.044715  # gelu(x) = x sigmoid(2 sqrt(2/pi) (x + 0.044715 x^3))


def _sigmoid(x: jax.Array) -> jax.Array:
    """1 / (1 + exp(-x)), the quotient as the square of a reciprocal square root: a division takes ten instructions."""
    root = lax.rsqrt(1.0 + jnp.exp(-x))
    return root * root


def _normal_cdf(x: jax.Array) -> jax.Array:
    """0.5 (1 + erf(x / sqrt 2)) to 1e-7: Mosaic has no erf for a warpgroup's registers.

    Source: Abramowitz and Stegun, Handbook of Mathematical Functions, 7.1.26.
    """
    distance = jnp.abs(x) * math.sqrt(0.5)
    root = lax.rsqrt(1.0 + 0.3275911 * distance)
    t = root * root
    series = 1.061405429 * t - 1.453152027
    for coefficient in (1.421413741, -0.284496736, 0.254829592):
        series = series * t + coefficient
    half = 0.5 - 0.5 * series * t * jnp.exp(-0.5 * x * x)
    return 0.5 + jnp.sign(x) * half


def in_registers(activation: str, x: jax.Array) -> jax.Array:
    """The activation of float32 values of a kernel."""
    if activation == "relu":
        return jnp.maximum(x, 0.0)
    if activation == "silu":
        return x * _sigmoid(x)
    if activation == "gelu":
        return x * _sigmoid(2 * _TANH_SCALE * (x + _TANH_CUBIC * x * x * x))
    if activation == "gelu_erf":
        return x * _normal_cdf(x)
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
        cdf = _normal_cdf(x)
        return x * cdf, cdf + x * (jnp.exp(-0.5 * x * x) * (1 / math.sqrt(2 * math.pi)))
    return x, jnp.ones_like(x)
