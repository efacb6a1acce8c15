"""The kernel ahead of the dk/dv kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.attention import backward_prepare
from mgpu_ops.attention.flash_attention import BACKWARD
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import BackwardArrays
from mgpu_ops.attention.problem import prepares_rows
from mgpu_ops.core import aot, engine

LATER = BACKWARD.Config("fused", 64, 128, 2, 1, 24, "next", "apart")
SAME = BACKWARD.Config("fused", 64, 128, 1, 1, 24)


@pytest.mark.parametrize("config", [LATER, SAME], ids=["next", "same"])
@pytest.mark.parametrize("head_dim", [64, 128])
def test_it_makes_delta_lse_and_zeros(head_dim, config):
    problem = BACKWARD.Problem(2, 128, 128, 3, 3, head_dim)
    keys = jax.random.split(jax.random.key(head_dim), 3)
    out, out_grad = (jax.random.normal(key, (2, 128, 3, head_dim), jnp.bfloat16) for key in keys[:2])
    lse = jax.random.normal(keys[2], (2, 3, 128)).at[1, 2, 5:9].set(jnp.inf)
    out_grad = out_grad.at[1, 5:9, 2].set(jnp.nan)  # of rows that see nothing
    arrays = BackwardArrays(out, out, out, out_grad, lse, out, Inputs(jnp.ones(3)))
    found = backward_prepare.launch(problem, config, arrays, (1, 2, 3, 128, head_dim), interpret=True)
    assert not engine.races_found()
    sees = np.isfinite(lse)
    wanted = np.einsum("btnd,btnd->bnt", np.float64(out), np.nan_to_num(np.float64(out_grad)))
    np.testing.assert_allclose(found.delta, backward_prepare.sign_of_delta(config) * np.where(sees, wanted, 0), atol=1e-4)
    np.testing.assert_allclose(np.asarray(found.lse)[sees], np.asarray(lse)[sees] * np.log2(np.e), rtol=1e-6)
    assert np.isposinf(np.asarray(found.lse)[~sees]).all()
    assert found.zeros.shape == (1, 2, 3, 128, head_dim)
    assert not found.zeros.any()
    assert not found.counter.any()


@pytest.mark.parametrize(
    ("changes", "runs"),
    [
        ({}, True),
        ({"head_dim": 64, "lengths": True}, True),
        ({"q_tokens": 100}, False),
        ({"deterministic": True}, False),  # dq is stored before it is added to
        ({"head_dim": 120}, False),  # heads that are padded
        ({"v_head_dim": 64}, False),
        ({"sinks": True}, False),
    ],
    ids=str,
)
def test_where_it_runs(changes, runs):
    shape = {"batch": 1, "q_tokens": 128, "kv_tokens": 128, "q_heads": 1, "kv_heads": 1, "head_dim": 128}
    assert prepares_rows(BACKWARD.Problem(**shape | changes), LATER) == runs


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_output_and_gradients_are_four_kernels():
    x, lengths = jax.ShapeDtypeStruct((32, 512, 12, 64), jnp.bfloat16), jax.ShapeDtypeStruct((32,), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return mgpu_ops.flash_attention(q, k, v, kv_lengths=lengths, backend="mosaic").astype(jnp.float32).sum()

    report = aot.compile_for("h200", jax.grad(loss, (0, 1, 2)), x, x, x, lengths)
    assert len(report.kernels) == 4
    (prepares,) = (kernel for kernel in report.kernels if "prepare" in kernel.name)
    assert prepares.spill_stores == prepares.spill_loads == 0
