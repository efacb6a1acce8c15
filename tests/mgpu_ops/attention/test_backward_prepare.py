"""The kernel ahead of the dk/dv kernel."""

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.attention import backward_prepare
from mgpu_ops.attention.flash_attention import BACKWARD
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import BackwardArrays, pad_head
from mgpu_ops.core import aot, engine

LATER = BACKWARD.Config("fused", 64, 128, 2, 1, 24, "next", "apart")
SAME = BACKWARD.Config("fused", 64, 128, 1, 1, 24)
SPLIT = BACKWARD.Config("split", 64, 128, 1, 1, 24)


@pytest.mark.parametrize("config", [LATER, SAME, SPLIT], ids=["next", "same", "split"])
@pytest.mark.parametrize(("tokens", "columns", "head_dim"), [(128, 64, 64), (128, 128, 128), (77, 128, 128), (77, 72, 80)])
def test_it_makes_delta_lse_and_zeros(tokens, columns, head_dim, config):
    problem = BACKWARD.Problem(2, tokens, tokens, 3, 3, head_dim)
    keys = jax.random.split(jax.random.key(head_dim), 3)
    out, out_grad = (jax.random.normal(key, (2, tokens, 3, columns), jnp.bfloat16) for key in keys[:2])
    lse = jax.random.normal(keys[2], (2, 3, tokens)).at[1, 2, 5:9].set(jnp.inf)
    out_grad = out_grad.at[1, 5:9, 2].set(jnp.nan)  # of rows that see nothing
    arrays = BackwardArrays(out, out, out, pad_head(out_grad, head_dim), lse, out, Inputs(jnp.ones(3)))
    found = backward_prepare.prepare(problem, config, arrays, interpret=True)
    assert not engine.races_found()
    sees = np.pad(np.isfinite(lse), [(0, 0), (0, 0), (0, 128 - tokens)])
    wanted = np.einsum("btnd,btnd->bnt", np.float64(out), np.nan_to_num(np.float64(out_grad)))
    wanted = np.where(sees, np.pad(wanted, [(0, 0), (0, 0), (0, 128 - tokens)]), 0)
    np.testing.assert_allclose(found.delta, backward_prepare.sign_of_delta(config) * wanted, atol=1e-4)
    np.testing.assert_allclose(np.asarray(found.lse)[sees], np.asarray(lse)[sees[..., :tokens]] * np.log2(np.e), rtol=1e-6)
    assert np.isposinf(np.asarray(found.lse)[~sees]).all()
    if config is SPLIT:
        assert found.zeros is None
    else:
        assert found.zeros.size == 2 * 3 * 128 * head_dim
        assert not found.zeros.any()
    assert not found.counter.any()


def test_xla_prepares_rows_where_dq_is_stored_before_it_is_added_to():
    problem = BACKWARD.Problem(1, 128, 128, 1, 1, 64, deterministic=True)
    x, lse = jnp.ones((1, 128, 1, 64), jnp.bfloat16), jnp.zeros((1, 1, 128))
    arrays = BackwardArrays(x, x, x, x, lse, x, Inputs(jnp.ones(3)))
    assert backward_prepare.prepare(problem, LATER, arrays, interpret=True).counter is None


@pytest.mark.parametrize(("heads", "columns", "runs"), [(3, 64, True), (3, 100, False), (1, 16, False)])
def test_xla_prepares_rows_whose_heads_tma_cannot_take(heads, columns, runs):
    problem = BACKWARD.Problem(1, 128, 128, heads, heads, 64)
    x, lse = jnp.ones((1, 128, heads, columns), jnp.bfloat16), jnp.zeros((1, heads, 128))
    arrays = BackwardArrays(x, x, x, pad_head(x, 128), lse, x, Inputs(jnp.ones(3)))
    found = backward_prepare.prepare(problem, LATER, arrays, interpret=True)
    assert (found.counter is not None) == runs
    np.testing.assert_array_equal(found.delta, np.full((1, heads, 128), -columns))


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("tokens", [512, 500])
def test_output_and_gradients_are_four_kernels(tokens):
    x, lengths = jax.ShapeDtypeStruct((32, tokens, 12, 64), jnp.bfloat16), jax.ShapeDtypeStruct((32,), jnp.int32)

    def loss(q: jax.Array, k: jax.Array, v: jax.Array, lengths: jax.Array) -> jax.Array:
        return mgpu_ops.flash_attention(q, k, v, kv_lengths=lengths, backend="mosaic").astype(jnp.float32).sum()

    report = aot.compile_for("h200", jax.grad(loss, (0, 1, 2)), x, x, x, lengths)
    assert len(report.kernels) == 4
    (prepares,) = (kernel for kernel in report.kernels if "prepare" in kernel.name)
    assert prepares.spill_stores == prepares.spill_loads == 0
