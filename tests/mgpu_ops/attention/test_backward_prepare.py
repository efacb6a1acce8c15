"""The kernel ahead of the backward ones, and XLA in its place."""

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.attention import backward_prepare
from mgpu_ops.attention.flash_attention import BACKWARD
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import BackwardArrays, pad_head
from mgpu_ops.attention.reference import delta_of
from mgpu_ops.core import aot, engine, gpu

NEXT = BACKWARD.Config("fused", 64, 128, 2, 1, 24, "next", "apart")
NEXT_64 = dataclasses.replace(NEXT, tile_q=128)
SAME = BACKWARD.Config("fused", 64, 128, 1, 1, 24)
SPLIT = BACKWARD.Config("split", 64, 128, 1, 1, 24)


@pytest.mark.parametrize(
    ("config", "tokens", "columns", "head_dim", "dtype"),
    [
        (NEXT, 128, 128, 128, "bfloat16"),
        (NEXT, 77, 128, 128, "float16"),
        (NEXT, 77, 96, 128, "bfloat16"),  # heads that XLA pads
        (NEXT_64, 200, 64, 64, "bfloat16"),
        (SAME, 77, 72, 80, "bfloat16"),
        (SAME, 130, 112, 112, "float16"),
        (SPLIT, 77, 128, 192, "bfloat16"),  # values narrower than keys
        (SPLIT, 65, 256, 256, "bfloat16"),
    ],
)
def test_rows_are_prepared_by_the_kernel(config, tokens, columns, head_dim, dtype):
    arrays, wanted = given_and_wanted(tokens, columns, head_dim, dtype, config)
    problem = BACKWARD.Problem(2, tokens, tokens, 3, 3, head_dim, dtype)
    found = backward_prepare.prepare(problem, config, arrays, interpret=True)
    assert not engine.races_found()
    assert_rows(found, wanted)
    assert not found.counter.any()
    if config is SPLIT:
        assert found.zeros is None
    else:
        assert found.zeros.size == 2 * 3 * found.lse.shape[2] * head_dim
        assert not found.zeros.any()


@pytest.mark.parametrize(
    ("config", "columns", "delta", "deterministic"),
    [
        (NEXT, 100, False, False),  # TMA takes heads of whole 16 bytes
        (SPLIT, 16, False, False),  # and a block of 64 columns is wider than three heads of these
        (NEXT, 128, True, False),  # given, as sinks need it
        (NEXT, 128, False, True),  # dq is stored before it is added to
    ],
    ids=["columns", "few columns", "delta", "turns"],
)
def test_xla_prepares_the_same_rows_where_the_kernel_does_not(config, columns, delta, deterministic):
    arrays, wanted = given_and_wanted(77, columns, 128, "bfloat16", config)
    if delta:
        arrays = dataclasses.replace(arrays, out_or_delta=delta_of(arrays.out, arrays.out_grad, arrays.lse))
    problem = BACKWARD.Problem(2, 77, 77, 3, 3, 128, deterministic=deterministic)
    found = backward_prepare.prepare(problem, config, arrays, interpret=True)
    assert found.counter is None
    assert found.zeros is None
    assert_rows(found, wanted)


def given_and_wanted(
    tokens: int, columns: int, head_dim: int, dtype: str, config: Any
) -> tuple[BackwardArrays, tuple[np.ndarray, np.ndarray]]:
    """Arrays of two batch entries and three heads, some of whose rows see nothing; lse and delta of whole tiles."""
    keys = jax.random.split(jax.random.key(head_dim), 3)
    out, out_grad = (jax.random.normal(key, (2, tokens, 3, columns), dtype) for key in keys[:2])
    lse = jax.random.normal(keys[2], (2, 3, tokens)).at[1, 2, 5:9].set(jnp.inf)
    delta = np.einsum("btnd,btnd->bnt", np.float64(out), np.float64(out_grad))
    delta = np.where(np.isfinite(lse), delta, 0) * (-1 if config.dq_step == "next" else 1)
    out_grad = out_grad.at[1, 5:9, 2].set(jnp.nan)  # of rows that see nothing
    rest = [(0, 0), (0, 0), (0, -tokens % (128 if config is SPLIT else config.tile_q))]
    wanted = np.pad(np.float64(lse) * np.log2(np.e), rest, constant_values=np.inf), np.pad(delta, rest)
    return BackwardArrays(out, out, out, pad_head(out_grad, head_dim), lse, out, Inputs(jnp.ones(3))), wanted


def assert_rows(found: backward_prepare.Prepared, wanted: tuple[np.ndarray, np.ndarray]) -> None:
    np.testing.assert_allclose(found.lse, wanted[0], rtol=1e-6)
    np.testing.assert_allclose(found.delta, wanted[1], atol=1e-4)


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


def test_nothing_between_the_kernels_pads_or_cuts_odd_tokens():
    x = jax.ShapeDtypeStruct((2, 500, 12, 64), jnp.bfloat16)

    def gradients(q: jax.Array, k: jax.Array, v: jax.Array, out_grad: jax.Array) -> Any:
        out, pull = jax.vjp(functools.partial(mgpu_ops.flash_attention, backend="mosaic"), q, k, v)
        return out, pull(out_grad)

    with gpu.target("h200"):
        text = jax.jit(gradients).trace(x, x, x, x).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 4
    for op in ("pad", "slice", "reduce", "dot_general", "multiply"):
        assert f"stablehlo.{op} " not in text
