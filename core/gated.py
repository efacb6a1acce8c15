"""The epilogue of gated products: what is stored is made of two sums in registers, gate and up."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core.activations import in_registers, with_derivative
from mgpu_ops.core.epilogue import Copy, store_in_turn, store_tile, tile_origins


def store_gated(activation: str, gate: jax.Array, up: jax.Array, staging: Any, copy: Copy) -> None:
    """Consumer: stores activation(gate) * up in epilogue tiles, as `epilogue.store_tile` does."""

    def finish(part: jax.Array, _: Any, i: int, j: int) -> jax.Array:
        return in_registers(activation, part) * _part(up, staging, i, j)

    store_tile(gate, staging, copy, finish=finish)


def store_gated_and_kept(
    activation: str, gate: jax.Array, up: jax.Array, staging: Any, copy: Copy, copy_gate: Copy, copy_up: Copy
) -> None:
    """Consumer: stores activation(gate) * up, gate and up in epilogue tiles."""

    def parts() -> Iterator[tuple[jax.Array, Copy, int, int]]:
        _, height, width = staging.shape
        for i, j in tile_origins(gate.shape, height, width):
            of_gate, of_up = (_part(x, staging, i, j) for x in (gate, up))
            yield of_gate, copy_gate, i, j
            yield of_up, copy_up, i, j
            yield in_registers(activation, of_gate) * of_up, copy, i, j

    store_in_turn(staging, parts())


def store_gated_gradients(
    activation: str,
    gate: jax.Array,
    up: jax.Array,
    g_smem: Any,
    staging: Any,
    copy_gate: Copy,
    copy_up: Copy,
) -> None:
    """Consumer: stores the gradients of gate and up, g * up * activation'(gate) and g * activation(gate).

    g_smem: the result's gradient, which has arrived; a buffer for each epilogue tile. The gradient of gate goes through the
    buffer that g lies in, which is not needed again; that of up through one of `staging`.
    """
    buffers, height, width = staging.shape
    for number, (i, j) in enumerate(tile_origins(gate.shape, height, width)):
        of_gate, of_up = g_smem.at[number], staging.at[number % buffers]
        g = of_gate[...].astype(jnp.float32)
        activated, slope = with_derivative(activation, _part(gate, staging, i, j))
        if number >= buffers:  # of the copies, two for each epilogue tile, the one from this buffer has read it
            plgpu.wait_smem_to_gmem(2 * buffers - 1, wait_read_only=True)
        of_up[...] = (g * activated).astype(of_up.dtype)
        of_gate[...] = (g * _part(up, staging, i, j) * slope).astype(of_gate.dtype)
        plgpu.commit_smem()  # TMA sees what was written
        copy_up(of_up, i, j)
        copy_gate(of_gate, i, j)


def gate_stored(activation: str, product: jax.Array, gate_smem: Any, up_smem: Any, gradient: bool) -> None:
    """Consumer: what an epilogue tile of a product becomes where gate, and for the gradient up, lies in shared memory.

    In their place: activation(gate) * up, and up, which is the product; or with g the product, the gradient of
    activation(gate) * up, those of gate and of up, g * up * activation'(gate) and g * activation(gate).
    """
    gate = gate_smem[...].astype(jnp.float32)
    if gradient:
        up = up_smem[...].astype(jnp.float32)
        activated, slope = with_derivative(activation, gate)
        gate_smem[...] = (product * up * slope).astype(gate_smem.dtype)
        up_smem[...] = (product * activated).astype(up_smem.dtype)
    else:
        gate_smem[...] = (in_registers(activation, gate) * product).astype(gate_smem.dtype)
        up_smem[...] = product.astype(up_smem.dtype)


def _part(values: jax.Array, staging: Any, i: int, j: int) -> jax.Array:
    """The epilogue tile of a sum that begins at row i and column j."""
    _, height, width = staging.shape
    return values[i : i + height, j : j + width]
