"""gated_activation: values, gradients and transforms; the kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import gated_activation
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.core.activations import ACTIVATIONS, activate
from mgpu_ops.registry import dispatch
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
H200 = gpu.find("h200")


def written_out(gate_up: Any, rows: Any = None, epsilon: float = 0.0, activation: str = "silu") -> jax.Array:
    wide = jnp.asarray(gate_up, F32)
    if rows is not None:
        wide = wide / jnp.sqrt(jnp.mean(jnp.asarray(rows, F32) ** 2, -1, keepdims=True) + epsilon)
    gate, up = jnp.split(wide, 2, -1)
    return activate(activation, gate) * up


def arrays(*lead: int, n: int = 256, width: int = 384, dtype: Any = BF16) -> tuple[jax.Array, jax.Array]:
    return normal(0, *lead, 2 * n, dtype=dtype), 3 * normal(1, *lead, width, dtype=dtype)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("activation", thorough.cases(ACTIVATIONS, ["relu", "gelu", "none"]))
def test_values_with_and_without_a_norm(activation, backend, assert_near):
    gate_up, rows = arrays(5)
    run = jax.jit(functools.partial(gated_activation, activation=activation, backend=backend))
    assert_near(run(gate_up), written_out(gate_up, activation=activation), 6e-3)
    with_norm = jax.jit(functools.partial(gated_activation, activation=activation, backend=backend, rms_epsilon=0.5))
    out = with_norm(gate_up, rms_rows=rows)
    assert (out.shape, out.dtype) == ((5, 256), BF16)
    assert_near(out, written_out(gate_up, rows, 0.5, activation), 6e-3)
    assert backend == "xla" or not engine.races_found()


def test_gradients_and_vmap_and_leading_dimensions(assert_near):
    gate_up, rows = arrays(2, 3)
    assert_near(gated_activation(gate_up, rms_rows=rows), written_out(gate_up, rows, 1e-6), 6e-3)
    assert_near(jax.vmap(lambda x, r: gated_activation(x, rms_rows=r))(gate_up, rows), written_out(gate_up, rows, 1e-6), 6e-3)
    assert_near(jax.vmap(gated_activation)(gate_up), written_out(gate_up), 6e-3)
    shared = jax.vmap(lambda x: gated_activation(x, rms_rows=rows[0]))(gate_up)
    assert_near(shared, written_out(gate_up, jnp.stack([rows[0]] * 2), 1e-6), 6e-3)

    def loss(f: Any, *given: jax.Array) -> jax.Array:
        return jnp.sin(f(*given).astype(F32)).sum()

    found = jax.grad(functools.partial(loss, lambda x, r: gated_activation(x, rms_rows=r)), argnums=(0, 1))(gate_up, rows)
    wanted = jax.grad(functools.partial(loss, functools.partial(written_out, epsilon=1e-6)), argnums=(0, 1))
    for y, z in zip(found, wanted(gate_up.astype(F32), rows.astype(F32)), strict=True):
        assert y.dtype == BF16
        assert_near(y, z, 2e-2)


def test_a_mapped_axis_of_no_size_has_no_rows():
    assert jax.vmap(gated_activation)(jnp.ones((0, 3, 256), BF16)).shape == (0, 3, 128)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        (np.ones((4, 7), BF16), {}, ValueError, r"gate_up has shape \(4, 7\): it must be \[..., 2 n\]"),
        (np.ones((4, 8), int), {}, TypeError, "gate_up has dtype int"),
        (
            np.ones((4, 8), BF16),
            {"rms_rows": np.ones((3, 8), BF16)},
            ValueError,
            r"rms_rows\(3, 8\) and gate_up\(4, 8\) differ",
        ),
        (
            np.ones((4, 8), BF16),
            {"rms_rows": np.ones((4, 8), BF16), "rms_epsilon": -1.0},
            ValueError,
            "rms_epsilon=-1.0 must be",
        ),
        (
            np.ones((4, 8), BF16),
            {"rms_rows": np.ones((4, 8), BF16), "rms_epsilon": None},
            TypeError,
            "rms_epsilon=None is no Python number",
        ),
        (np.ones((4, 8), BF16), {"rms_epsilon": -1}, ValueError, "rms_epsilon=-1 must be a finite number of at least 0"),
        (np.ones((4, 8), BF16), {"activation": "swish"}, ValueError, "activation='swish' is not one of"),
        (np.ones((4, 8), BF16), {"backend": "interpret"}, ValueError, "cannot run .*n=4 is no multiple of 128"),
        (
            np.ones((4, 256), BF16),
            {"backend": "interpret", "rms_rows": np.ones((4, 8), BF16)},
            ValueError,
            "has width 8: a multi",
        ),
    ],
)
def test_error_names_the_value_and_the_rule(given, options, error, message):
    with pytest.raises(error, match=message):
        gated_activation(given, **options)


def test_rows_that_are_none_or_many_run_through_xla():
    assert gated_activation(np.ones((0, 512), BF16)).shape == (0, 256)
    with gpu.target("h200"):
        traced = [jax.jit(gated_activation).trace(jax.ShapeDtypeStruct((rows, 512), BF16)) for rows in (256, 257)]
        texts = [one.lower(lowering_platforms=("cuda",)).as_text() for one in traced]
    assert ["mosaic_gpu" in text for text in texts] == [True, False]


def test_why_xla_runs_few_rows_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    with caplog.at_level(logging.WARNING, "mgpu_ops"), gpu.target("h200"):
        for rows in (5, 6, 257):
            jax.eval_shape(lambda x: gated_activation(x), np.ones((rows, 200), BF16))
    assert [record.getMessage() for record in caplog.records] == [
        "gated_activation runs through XLA: n=100 is no multiple of 128"
    ]


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_a_thread_loads_8_bytes_at_once_and_nothing_spills():
    shapes = jax.eval_shape(functools.partial(arrays, 16, n=14336, width=4096))
    (kernel,) = aot.compile_for(H200, lambda x, r: gated_activation(x, rms_rows=r), *shapes).kernels
    assert kernel.spill_stores == 0
    assert "LDG.E.64" in kernel.sass


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(4))
def test_random_sizes_are_right(seed, assert_near):
    rng = np.random.default_rng(seed)
    rows, n, width = int(rng.integers(1, 200)), 128 * int(rng.integers(1, 100)), 128 * int(rng.integers(1, 65))
    gate_up, x = arrays(rows, n=n, width=width)
    run = jax.jit(functools.partial(gated_activation, backend="mosaic", activation=ACTIVATIONS[1 + seed]))
    assert_near(run(gate_up), written_out(gate_up, activation=ACTIVATIONS[1 + seed]), 6e-3)
    assert_near(run(gate_up, rms_rows=x), written_out(gate_up, x, 1e-6, ACTIVATIONS[1 + seed]), 6e-3)
