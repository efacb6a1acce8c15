"""The activations of epilogues: what a kernel computes in registers is what JAX's functions are, and their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops.core.activations import (
    ACTIVATIONS,
    activate,
    activate_as_kernels,
    checked_activation,
    gradient,
    in_registers,
    with_derivative,
)

X = np.concatenate([np.linspace(-12, 12, 4001), [-1e4, 1e4, 0.0]]).astype(np.float32)  # exp(1e4) is infinite


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_registers_hold_the_activation_and_its_derivative(activation):
    with jax.enable_x64(True):
        wide = jnp.asarray(X, "float64")
        wanted = np.asarray(activate(activation, wide))
        slope = np.asarray(jax.vmap(jax.grad(lambda x: activate(activation, x)))(wide))
    values, derivative = with_derivative(activation, jnp.asarray(X))
    np.testing.assert_allclose(in_registers(activation, jnp.asarray(X)), wanted, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(values, wanted, rtol=2e-6, atol=2e-6)
    np.testing.assert_allclose(derivative, slope, rtol=2e-6, atol=4e-6)


@pytest.mark.parametrize("activation", ["relu", "silu", "gelu", "gelu_erf"])
def test_infinity_and_nan_are_what_jax_makes_of_them(activation):
    x = jnp.asarray([jnp.inf, jnp.nan], "float32")
    for found in (in_registers(activation, x), with_derivative(activation, x)[0], activate_as_kernels(activation, x)):
        np.testing.assert_array_equal(found, [np.inf, np.nan])


@pytest.mark.parametrize("dtype", ["bfloat16", "float16", "float32", "float64"])
@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_what_a_gradient_s_passes_compute_rounds_as_jax_s_functions(activation, dtype):
    with jax.enable_x64(dtype == "float64"):
        x, g = jnp.asarray(X, dtype), jnp.asarray(np.cos(X), dtype)
        wanted, back = activate(activation, x), jax.vjp(lambda x: activate(activation, x), x)[1]
        found, slope = activate_as_kernels(activation, x), gradient(activation, x, g)
        assert (found.dtype, slope.dtype) == (wanted.dtype, x.dtype)
        bound = {"float64": 0.0, "float32": 4e-6}.get(dtype, float(jnp.finfo(dtype).eps))  # a last digit of 16 bits
        np.testing.assert_allclose(*(np.asarray(y, "float64") for y in (found, wanted)), rtol=bound, atol=bound)
        np.testing.assert_allclose(*(np.asarray(y, "float64") for y in (slope, back(g)[0])), rtol=bound, atol=bound)


def test_none_is_no_activation_and_an_unknown_one_is_named():
    assert checked_activation(None) == "none"
    with pytest.raises(ValueError, match="activation='swish' is not one of none, relu, silu, gelu, gelu_erf"):
        checked_activation("swish")
