"""How the kernels of attention are launched: their arrays as a thread block wants them, and the thread blocks themselves."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from typing import Any, Literal

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import PANEL, Part, has_room
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.operands import OptionalRefs
from mgpu_ops.attention.problem import BackwardConfig, Config, Problem
from mgpu_ops.core import engine, limits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.rows import rows_view

# --- Thread blocks ---------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BlockSpec:
    """What each thread block of a kernel has: one producer warpgroup, `consumers` consumer warpgroups, and what they share."""

    consumers: int
    accumulators: Sequence[tuple[int, int]]  # shapes, float32 in the registers of each consumer
    smem: Mapping[str, Any]
    barriers: Mapping[str, Any]
    helpers: int = 0  # further warpgroups


@dataclasses.dataclass(frozen=True)
class Scratch:
    """A thread block's `BlockSpec` as the kernel's body receives it: handles and refs."""

    accumulators: Any  # .scope(consumer) runs consumer(*accumulators)
    smem: dict[str, Any]
    barriers: dict[str, Any]


def run(
    body: Callable[[Any, tuple[Any, ...], Scratch], None],
    name: str,
    blocks: int,
    spec: BlockSpec,
    inputs: Any,
    out_type: Sequence[jax.ShapeDtypeStruct],
    interpret: bool,
    share: float = 1.0,
) -> tuple[jax.Array, ...]:
    """The outputs of body(refs of `inputs`, refs of the outputs, scratch), run by `blocks` persistent thread blocks.

    inputs: a pytree of arrays, as a dataclass of them; the body receives the same pytree of refs. share: of the
      call's time.
    """
    arrays, tree = jax.tree.flatten(inputs)

    def with_trees(*refs: Any, **scratch: Any) -> None:
        body(jax.tree.unflatten(tree, refs[: len(arrays)]), refs[len(arrays) :], Scratch(**scratch))

    warpgroups = spec.consumers + 1 + spec.helpers
    launch = engine.Launch(
        name, {"block": blocks}, warpgroups, approx_math=True, interpret=interpret, reduces_across_warps=False, share=share
    )
    scratch = {
        "accumulators": engine.Accumulators(tuple(spec.accumulators), spec.consumers),
        "smem": dict(spec.smem),
        "barriers": dict(spec.barriers),
    }
    return engine.kernel(with_trees, launch, out_type=tuple(out_type), scratch_types=scratch)(*arrays)


def comes_in_rounds(gpu: Gpu, blocks: int) -> bool:
    """Whether blocks come in several rounds (`tile_scheduler.Rounds`): where there are more than run at one time, they do."""
    return gpu.shares_sms and blocks <= gpu.sms


def specialize(
    producer: Callable[[], None],
    consumer: Callable[[], None],
    consumers: int,
    config: Config | BackwardConfig,
    gpu: Gpu,
    helper: Callable[[], None] | None = None,
) -> None:
    """`engine.specialize`, with the registers shared out as the config says. A helper has as many as the producer.

    With copies alone some kernels are faster and some slower, 0.965 to 1.041x (results/2026-11-29-h200-copies-alone.jsonl).
    """
    helper_registers = config.memory_registers if helper is not None else 0
    engine.specialize(
        producer,
        consumer,
        consumers=consumers,
        producer_registers=config.memory_registers,
        consumer_registers=limits.consumer_registers(consumers, config.memory_registers, gpu, helper_registers),
        helper=helper,
        helper_registers=helper_registers,
    )


def swizzled(shape: tuple[int, ...], dtype: Any, swizzle: int = 128) -> Any:
    """Shared memory for tiles with rows of any number of panels of `swizzle` bytes, as wgmma and TMA take them."""
    return plgpu.SMEM(shape, dtype, transforms=engine.operand_transforms(swizzle // jnp.dtype(dtype).itemsize, dtype, swizzle))


def in_panels(part: Part, lead: tuple[int, ...], rows: int, dtype: Any) -> Any:
    """Shared memory for rows of a part of a head, one panel after the other: [*lead, panels, rows, panel]."""
    return swizzled((*lead, part.panels, rows, part.panel), dtype, part.swizzle)


def in_rows(part: Part, lead: tuple[int, ...], dtype: Any) -> Any:
    """Shared memory for rows of a part of a head: [*lead, columns]. wgmma takes all of them at once."""
    return swizzled((*lead, part.columns), dtype, part.swizzle)


# --- Arrays ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class BackwardArrays:
    """What the backward kernels are given; head_dim is padded, but for `out`."""

    q: jax.Array
    k: jax.Array
    v: jax.Array
    out_grad: jax.Array
    lse: jax.Array  # [batch, q_heads, q_tokens]
    out_or_delta: jax.Array  # output, or delta [batch, q_heads, q_tokens], the rows' sums of output times its gradient
    inputs: Inputs

    @property
    def out(self) -> jax.Array | None:
        """The output, where delta is not given."""
        return self.out_or_delta if self.out_or_delta.ndim == 4 else None


def rows_like(x: jax.Array | jax.ShapeDtypeStruct) -> jax.ShapeDtypeStruct:
    """An output of `rows.store_rows` that reshapes to [batch, tokens, heads, head_dim], as x."""
    batch, tokens, heads, head_dim = x.shape
    return jax.ShapeDtypeStruct((1, 1, batch * tokens, heads * head_dim), x.dtype)


def as_rows(x: jax.Array) -> jax.Array:
    """[batch, tokens, heads, head_dim] as rows of tokens for `rows.load_rows`, without a copy."""
    batch, tokens, heads, head_dim = x.shape
    return rows_view(x.reshape(batch * tokens, heads * head_dim))


def as_blocks(x: jax.Array, tile: int, problem: Problem) -> jax.Array:
    """As `Operands.load_block` takes it in tiles: x itself where they divide the tokens, else `as_rows(x)`.

    Copies from an array that tiles divide never need to be cut, and take less code; lengths cut any, and so do heads with fewer
    columns than the kernel computes.
    """
    cut = problem.lengths or x.shape[3] not in (problem.head_dim, problem.v_dim)
    return x if x.shape[1] % tile == 0 and not cut else as_rows(x)


def with_room(x: jax.Array, head_dim: int) -> jax.Array:
    """x itself where the kernel's copies can end with a head of fewer columns than it computes, else `pad_head(x)`."""
    _, _, heads, size = x.shape
    return x if has_room(heads, size) else pad_head(x, head_dim)


def pad_head(x: jax.Array, head_dim: int) -> jax.Array:
    """x[..., dim] with zeros up to head_dim: they add nothing to any score, and columns to the output."""
    return x if x.shape[-1] == head_dim else jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, head_dim - x.shape[-1])])


def pad_tokens(x: jax.Array, tile: int, value: float = 0) -> jax.Array:
    """x[..., tokens] with `value` up to whole tiles."""
    return jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, -x.shape[-1] % tile)], constant_values=value)


# --- Segments and bias -----------------------------------------------------------------------------------------------


def optional_refs(
    inputs: Inputs, loop: Literal["q", "kv"], tile_q: int, tile_kv: int, stages: int, bias_stages: int | None = None
) -> tuple[OptionalRefs, dict[str, Any]]:
    """`inputs` for a kernel whose thread blocks keep one tile while q blocks, or kv blocks, go by in a pipeline of `stages`.

    And the shared memory that such a block brings beside its tokens: "segments" and "bias", where there are any.

    bias_stages: of the bias, where they are others.
    """
    by_rows = loop == "kv"  # the thread block keeps query rows
    own, other = (tile_q, tile_kv) if by_rows else (tile_kv, tile_q)
    shared, bias_shape, smem = None, (1, 1), {}
    if inputs.segments is not None:
        q_ids, kv_ids = inputs.segments
        shared = segment_blocks(q_ids, kv_ids, own, other) if by_rows else segment_blocks(kv_ids, q_ids, own, other)
        inputs = dataclasses.replace(inputs, segments=(pad_tokens(q_ids, tile_q), pad_tokens(kv_ids, tile_kv)))
        smem["segments"] = plgpu.SMEM((stages, other), jnp.int32)
    if (bias := inputs.bias) is not None:
        bias_shape = bias.shape[:2]
        inputs = dataclasses.replace(inputs, bias=bias_rows(bias if by_rows else bias.swapaxes(2, 3)))
        smem["bias"] = swizzled((bias_stages or stages, own, other), bias.dtype)
    return OptionalRefs(inputs, shared, bias_shape), smem


def bias_rows(bias: jax.Array) -> jax.Array:
    """[batch, heads, rows, columns] as rows for `rows.load_rows`; columns are padded to whole panels."""
    bias = jnp.pad(bias, ((0, 0), (0, 0), (0, 0), (0, -bias.shape[3] % PANEL)))
    return rows_view(bias.reshape(-1, bias.shape[3]))


def segment_blocks(mine: jax.Array, others: jax.Array, tile: int, other_tile: int) -> jax.Array:
    """For each tile of tokens, the first block of the other side that may share a segment with it, and the end of them.

    mine: [batch, tokens], others: [batch, other tokens], int32. Returns [batch, tiles, 2]. Exact where ids grow with tokens;
    otherwise a block between the two may share none.
    """

    def ends(ids: jax.Array, tile: int) -> tuple[jax.Array, jax.Array]:
        whole = jnp.pad(ids, ((0, 0), (0, -ids.shape[1] % tile)), mode="edge")
        by_tile = whole.reshape(ids.shape[0], -1, tile)
        return by_tile.min(-1), by_tile.max(-1)

    # The barrier keeps XLA from looking at all tokens of a tile again for each pair of tiles.
    (low, high), (other_low, other_high) = lax.optimization_barrier((ends(mine, tile), ends(others, other_tile)))
    shared = (low[:, :, None] <= other_high[:, None, :]) & (other_low[:, None, :] <= high[:, :, None])
    blocks = jnp.arange(shared.shape[-1], dtype=jnp.int32)
    end = jnp.where(shared, blocks + 1, 0).max(-1)
    first = jnp.minimum(jnp.where(shared, blocks, len(blocks)).min(-1), end)
    return jnp.stack([first, end], -1)
