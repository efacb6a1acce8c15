"""How the kernels of attention are launched: their arrays as a block wants them, and the blocks themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.problem import PANEL, BackwardConfig, Config, Problem
from mgpu_ops.core import engine, limits
from mgpu_ops.core.gpu import Gpu


@dataclasses.dataclass(frozen=True)
class Extras:
    """`Inputs` as a kernel receives them, for `Operands.of`, and the shared memory that they take there."""

    arrays: tuple[jax.Array, ...]  # segments padded to whole tiles, bias as rows; with segments, `segment_tiles` at the end
    bias_shape: tuple[int, int]  # batch entries and heads of the bias
    smem: dict[str, Any]  # what a tile that goes by brings beside keys or queries: "segments_smem", "bias_smem", where needed

    @staticmethod
    def of(inputs: Inputs, keeps: str, tile_q: int, tile_kv: int, steps: int) -> Extras:
        """For a kernel whose blocks keep a tile of "rows" or of "keys" while those of the other go by, `steps` at a time."""
        by_rows = keeps == "rows"
        own, other = (tile_q, tile_kv) if by_rows else (tile_kv, tile_q)
        sharing, bias_shape, smem = [], (1, 1), {}
        if inputs.segments is not None:
            q_ids, kv_ids = inputs.segments
            sharing = [segment_tiles(q_ids, kv_ids, own, other) if by_rows else segment_tiles(kv_ids, q_ids, own, other)]
            inputs = dataclasses.replace(inputs, segments=(pad_tokens(q_ids, tile_q), pad_tokens(kv_ids, tile_kv)))
            smem["segments_smem"] = plgpu.SMEM((steps, other), jnp.int32)
        if (bias := inputs.bias) is not None:
            bias_shape = bias.shape[:2]
            inputs = dataclasses.replace(inputs, bias=bias_rows(bias if by_rows else bias.swapaxes(2, 3)))
            smem["bias_smem"] = swizzled((steps, own, other), bias.dtype)
        return Extras((*inputs.arrays(), *sharing), bias_shape, smem)


def kernel(
    body: Callable[..., None],
    *,
    name: str,
    blocks: int,
    compute_warpgroups: int,
    out_type: Any,
    accumulators: Sequence[tuple[int, int]],
    smem: dict[str, Any],
    barriers: dict[str, Any],
    interpret: bool,
) -> Callable[..., Any]:
    """`engine.kernel` for persistent blocks with one producer warpgroup: body(*refs, accumulators=, smem=, barriers=)."""
    return engine.kernel(
        body,
        engine.Launch(name, {"block": blocks}, warpgroups=compute_warpgroups + 1, approx_math=True, interpret=interpret),
        out_type=out_type,
        scratch_types={
            "accumulators": engine.Accumulators(tuple(accumulators), compute_warpgroups),
            "smem": smem,
            "barriers": barriers,
        },
    )


def specialize(
    producer: Callable[[], None], consumer: Callable[[], None], compute_warpgroups: int, c: Config | BackwardConfig, gpu: Gpu
) -> None:
    """`engine.specialize`, the registers shared out as the config says."""
    engine.specialize(
        producer,
        consumer,
        consumers=compute_warpgroups,
        producer_registers=c.memory_registers,
        consumer_registers=limits.consumer_registers(compute_warpgroups, c.memory_registers, gpu),
    )


def swizzled(shape: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for tiles with rows of any number of 128-byte panels, as wgmma and TMA take them."""
    return plgpu.SMEM(shape, dtype, transforms=engine.operand_transforms(128 // jnp.dtype(dtype).itemsize, dtype, 128))


def rows_like(x: jax.Array) -> jax.ShapeDtypeStruct:
    """An output of `engine.store_rows` that reshapes to [batch, tokens, heads, head_dim], as x."""
    batch, tokens, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((1, 1, batch * tokens, heads * head_dim), x.dtype)


def as_rows(x: jax.Array) -> jax.Array:
    """[batch, tokens, heads, head_dim] as rows of tokens for `engine.load_rows`, without a copy."""
    batch, tokens, heads, head_dim = x.shape
    return engine.rows_view(x.reshape(batch * tokens, heads * head_dim))


def as_blocks(x: jax.Array, tile: int, problem: Problem) -> jax.Array:
    """As `Operands.load_block` takes it in tiles: x itself where they divide the tokens, else `as_rows(x)`.

    Copies from an array that tiles divide never need to be cut, and take less code; lengths cut any.
    """
    return x if x.shape[1] % tile == 0 and not problem.lengths else as_rows(x)


def pad_head(x: jax.Array, head_dim: int) -> jax.Array:
    """x[..., dim] with zeros up to head_dim: they add nothing to any score, and columns to the output."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def bias_rows(bias: jax.Array) -> jax.Array:
    """[batch, heads, rows, columns] as rows for `engine.load_rows`; columns are padded to whole panels."""
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, -bias.shape[3] % PANEL)))
    return engine.rows_view(bias.reshape(-1, bias.shape[3]))


def pad_tokens(x: jax.Array, tile: int, value: float = 0) -> jax.Array:
    """x[..., tokens] with `value` up to whole tiles."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % tile)], constant_values=value)


def segment_tiles(mine: jax.Array, others: jax.Array, tile: int, other_tile: int) -> jax.Array:
    """For each tile of tokens, the first tile of the other side that may share a segment with it, and the end of them.

    mine: [batch, tokens], others: [batch, other tokens], int32. Returns [batch, tiles, 2]. Exact where ids grow with tokens;
    otherwise a tile between the two may share none.
    """

    def ends(ids: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        last = jnp.take(ids, jnp.array([-1]), axis=1)
        whole = jnp.concatenate([ids, jnp.repeat(last, -ids.shape[1] % tile, axis=1)], axis=1)
        by_tile = whole.reshape(ids.shape[0], -1, tile)
        return by_tile.min(-1), by_tile.max(-1)

    (low, high), (other_low, other_high) = ends(mine, tile), ends(others, other_tile)
    shared = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    count = shared.shape[-1]
    first = jnp.where(shared.any(-1), jnp.argmax(shared, -1), 0)
    end = jnp.where(shared.any(-1), count - jnp.argmax(shared[..., ::-1], -1), 0)
    return jnp.stack([first, end], -1).astype(jnp.int32)
