"""The kernel of gated_activation: a block of one warpgroup for some columns of a row, without copies through shared memory.

Each thread loads what it computes straight to registers. A block finds the norm of its row by itself, from the L2 cache.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl

from mgpu_ops.core import engine
from mgpu_ops.core.activations import in_registers
from mgpu_ops.core.row_norm import row_factor

_SIZES = (1024, 512, 256, 128)  # columns of a block: the most that divide n, so that a thread loads 16 bytes at once


def launch(activation: str, gate_up: jax.Array, *norm: jax.Array, interpret: bool = False) -> jax.Array:
    """activation(gate) * up, [rows, n]. norm: rows and epsilon, or nothing."""
    rows, n = gate_up.shape[0], gate_up.shape[1] // 2
    columns = next(size for size in _SIZES if n % size == 0)

    def body(x: Any, *rest: Any) -> None:
        *norm, out = rest
        row, first = lax.axis_index("row"), lax.axis_index("block") * columns
        gate = x[row, pl.ds(first, columns)].astype(jnp.float32)
        up = x[row, pl.ds(n + first, columns)].astype(jnp.float32)
        if norm:
            factor = row_factor(norm[0].at[row], norm[1][0])
            gate, up = gate * factor, up * factor
        out[row, pl.ds(first, columns)] = (in_registers(activation, gate) * up).astype(out.dtype)

    launched = engine.Launch(
        "mgpu_ops_gated_activation", {"row": rows, "block": n // columns}, warpgroups=1, approx_math=True, interpret=interpret
    )
    run = engine.kernel(body, launched, out_type=jax.ShapeDtypeStruct((rows, n), gate_up.dtype), scratch_types={})
    out: jax.Array = run(gate_up, *norm)
    return out
