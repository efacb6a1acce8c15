"""The activations of epilogues: what a kernel computes in registers is what JAX's functions are, and their derivatives."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops.core.activations import ACTIVATIONS, activate, checked_activation, in_registers, with_derivative

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


def test_none_is_no_activation_and_an_unknown_one_is_named():
    assert checked_activation(None) == "none"
    with pytest.raises(ValueError, match="activation='swish' is not one of none, relu, silu, gelu, gelu_erf"):
        checked_activation("swish")
