"""Rows of a tile in registers, each at an address of its own."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import aot, engine
from mgpu_ops.core.rows import load_scattered, store_scattered

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


def all_alike(src: jax.Array) -> jax.Array:
    """Loads and stores rows whose offsets and values are one number, which the compiler finds out when it simplifies."""

    def body(src: jax.Array, out: jax.Array) -> None:
        row = plgpu.broadcasted_iota(jnp.int32, (64,), 0, layout=plgpu.Layout.WGMMA.reduce(1))
        block = lax.axis_index("block")
        values = load_scattered(src, block + row - row)
        store_scattered(values, out, block * 64 + row)
        store_scattered(jnp.full((64,), 2.0), out, row * 0 + block)
        store_scattered(jnp.full((64, 8), 2.0), out, jnp.full((64,), 8))

    launch = engine.Launch("all_alike", {"block": 4}, warpgroups=1)
    return engine.kernel(body, launch, out_type=jax.ShapeDtypeStruct((256,), jnp.float32), scratch_types={})(src)


@needs_compiler
def test_offsets_and_values_that_are_the_same_for_all_rows_compile():
    assert aot.compile_for("h200", all_alike, jnp.zeros(256)).spills == 0
