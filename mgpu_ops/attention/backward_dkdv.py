"""The dk/dv kernel: the gradients of keys and values, of the bias, and in mode "fused" dq too.

A persistent thread block keeps a kv block in shared memory while the q blocks that see it go by. Scores are transposed, so
that keys are wgmma's rows: S = k q^T, P = 2^(S - lse), dP = v dO^T, dS = P (dP - delta). dv += P dO and dk += dS q stay in
registers, with P and dS as operands from registers. dq = dS^T k is added to dq in global memory, from shared memory by TMA or
with `dq_step="next"` from registers.

One producer warpgroup loads (`backward_block.py`) while two consumers compute: `backward_narrow.py` for head dims up to 128,
`backward_ahead.py` for 64 and 128 with `dq_step="next"`, `backward_wide.py` above. A full barrier says that a stage's copies
have arrived, an empty one that both consumers are done with it.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention import backward_ahead, backward_narrow, backward_round, backward_wide
from mgpu_ops.attention.backward_block import (
    CONSUMERS,
    Refs,
    ThreadBlock,
    all_visited,
    dealt,
    in_turns,
    schedule,
    turn_numbers,
)
from mgpu_ops.attention.backward_check import backward_blocks, hands_out
from mgpu_ops.attention.backward_prepare import Prepared
from mgpu_ops.attention.heads import PANEL, whole
from mgpu_ops.attention.launch import (
    BackwardArrays,
    BlockSpec,
    Scratch,
    as_blocks,
    as_rows,
    comes_in_rounds,
    in_panels,
    in_rows,
    optional_refs,
    rows_like,
    run,
    specialize,
    swizzled,
)
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.core import dynamic_scheduler, engine, tile_scheduler
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline


def launch(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    arrays: BackwardArrays,
    prepared: Prepared,
    interpret: bool,
    as_tiles: bool = False,
) -> tuple[Any, jax.Array, jax.Array, jax.Array | None]:
    """dq in mode "fused", else None; dk; dv; the gradient of the bias, or None.

    as_tiles: with `dq_step="next"`, dq as `backward_round.Tiles`, without scale.
    """
    p = dataclasses.replace(p, kv_heads=p.kv_heads * c.group_splits)
    optional, smem = optional_refs(arrays.inputs, "q", c.tile_q, c.tile_kv, c.max_concurrent_steps)
    tiles, rows = math.ceil(p.kv_tokens / c.tile_kv), math.ceil(p.q_tokens / c.tile_q) * c.tile_q
    by_rows = p.batch, rows, p.q_heads, p.head_dim
    shape_of_dq = backward_round.tiles_shape(p, rows) if c.dq_step == "next" else by_rows
    delta = prepared.delta
    blocks = backward_blocks(p, p.batch * p.kv_heads * tiles, gpu)
    if in_turns(p, c) and not dealt(p):  # all of them have to be on the GPU at one time
        blocks = min(gpu.sms, blocks)
    handed_out = hands_out(p, c, blocks, gpu)
    # Blocks that take turns are planned in one round.
    table = schedule(p, c, blocks, gpu.sms, not in_turns(p, c) and comes_in_rounds(gpu, blocks))
    if optional.share_bias and not in_turns(p, c):
        table = tile_scheduler.entries_together(table, tiles, p.batch, p.kv_heads)
    launched = gpu.sms if handed_out else len(table)
    dq: Any = None
    dq_type: Any = None  # where it is an output
    dbias: Any = None
    if c.mode == "fused":
        # The interpreter cannot add in global memory: each kv block has an array of its own there.
        if in_turns(p, c) and not interpret:  # who has the first turn at a tile stores it
            dq_type = jax.ShapeDtypeStruct((1, *shape_of_dq), jnp.float32)
        else:
            if prepared.zeros is not None:
                zeros = prepared.zeros.reshape(1, *shape_of_dq)
            else:  # after delta, or XLA would write the zeros of all layers at the program's start, and keep them
                zeros, delta = lax.optimization_barrier((jnp.zeros((), jnp.float32), delta))
            dq = jax.new_ref(jnp.broadcast_to(zeros, (tiles if interpret else 1, *shape_of_dq)))
    turns: Any = None
    numbers: Any = None
    if in_turns(p, c):
        numbers = turn_numbers(p, c, optional, blocks, gpu.sms)
        turns = jax.new_ref(jnp.zeros(p.batch * (rows // c.tile_q) * p.q_heads, jnp.int32))
    if p.bias_grad:
        dbias = jax.new_ref(jnp.zeros((p.batch * p.q_heads, tiles * c.tile_kv, rows), p.dtype))

    def body(refs: Refs, outputs: tuple[Any, ...], scratch: Scratch) -> None:
        if dq_type is not None:
            refs = dataclasses.replace(refs, dq=outputs[2])
        block = ThreadBlock.of(p, c, refs, outputs, scratch, launched)
        narrow = backward_ahead if c.dq_step == "next" else backward_narrow
        consumers = backward_wide if p.head_dim > 128 else narrow
        helper = block.take_turns if in_turns(p, c) else None
        specialize(block.producer, functools.partial(consumers.consume, block, scratch), CONSUMERS, c, gpu, helper)

    refs = Refs(
        schedule=table,
        q=as_blocks(arrays.q, c.tile_q, p),
        k=as_rows(arrays.k),
        v=as_rows(arrays.v),
        out_grad=as_blocks(arrays.out_grad, c.tile_q, p),
        lse=prepared.lse,
        delta=delta,
        optional=optional,
        dq=dq,
        dbias=dbias,
        turns=turns,
        numbers=numbers,
        counter=jax.new_ref(jnp.zeros(1, jnp.int32) if prepared.counter is None else prepared.counter) if handed_out else None,
    )
    gradient = jax.ShapeDtypeStruct((p.batch, p.kv_tokens, p.kv_heads, p.head_dim), p.dtype)
    out_type = rows_like(gradient), rows_like(gradient), *([] if dq_type is None else [dq_type])
    share = 1.0 if c.mode == "fused" else 4 / 7  # of the products; the others are those of dq
    dk, dv, *outputs = run(
        body,
        "mgpu_ops_flash_attention_backward",
        launched,
        _block_spec(p, c, smem, handed_out),
        refs,
        out_type,
        interpret,
        share,
    )
    if c.mode == "fused":
        dq = (outputs[0] if outputs else engine.frozen(dq, arrays.q, arrays.k)).sum(0)
        if c.dq_step == "next":
            added = None if turns is None or interpret or all_visited(p) else engine.frozen(turns, arrays.q, arrays.k)
            tiles_of_dq = backward_round.Tiles(dq, added)
            dq = tiles_of_dq if as_tiles else backward_round.launch(p, tiles_of_dq, arrays, interpret)
        else:
            dq = (dq[:, : p.q_tokens] * arrays.inputs.options[0]).astype(p.dtype)
    if dbias is not None:
        dbias = _summed(p, engine.frozen(dbias, arrays.q, arrays.k), arrays.inputs.bias)
    return dq, *(_of_groups(x.reshape(gradient.shape), c.group_splits) for x in (dk, dv)), dbias


def _of_groups(gradient: jax.Array, splits: int) -> jax.Array:
    """The gradient of keys or values [batch, tokens, heads, head_dim] from that of each of `splits` parts of a group."""
    if splits == 1:
        return gradient
    batch, tokens, heads, head_dim = gradient.shape
    of_parts = gradient.reshape(batch, tokens, heads // splits, splits, head_dim)
    return of_parts.astype(jnp.float32).sum(3).astype(gradient.dtype)


def _block_spec(p: BackwardProblem, c: BackwardConfig, optional_smem: dict[str, Any], handed_out: bool) -> BlockSpec:
    stages, fused, wide, turns = c.max_concurrent_steps, c.mode == "fused", p.head_dim > 128, in_turns(p, c)
    part, shares = whole(p.head_dim), backward_narrow.shares(p.head_dim) if fused else None
    slots = (c.kv_slots,) if c.kv_slots > 1 else ()
    smem = {
        "q": in_rows(part, (stages, c.tile_q), p.dtype),
        "do": in_rows(part, (stages, c.tile_q), p.dtype),
        "k": in_panels(part, slots, c.tile_kv, p.dtype) if shares is None else in_rows(part, (c.tile_kv,), p.dtype),
        "v": in_panels(part, slots, c.tile_kv, p.dtype),
        "lse": plgpu.SMEM((stages, c.tile_q), jnp.float32),
        "delta": plgpu.SMEM((stages, c.tile_q), jnp.float32),
        "numbers": plgpu.SMEM((CONSUMERS, ROWS), jnp.int32),
        **optional_smem,
    }
    if shares is not None:  # in tiles that divide dq in global memory too
        smem |= {f"dq{wg}": swizzled((1, ROWS, n), jnp.float32, 4 * part.panel) for wg, n in enumerate(shares)}
    elif fused and c.dq_step == "same":
        smem["dq"] = swizzled((CONSUMERS, ROWS, PANEL), jnp.float32)
    if wide:
        smem["weights"] = swizzled((1, ROWS, ROWS), p.dtype)
    if c.dq_step == "next":
        if turns:
            smem["turns"] = plgpu.SMEM((stages,), jnp.int32)
        smem["here"] = plgpu.SMEM((CONSUMERS, 4), jnp.int32)
    if fused or p.bias_grad:
        shape: tuple[int, ...] = (1, 1, ROWS, ROWS) if wide else (2, c.tile_q // ROWS, c.tile_kv, PANEL)
        if c.dq_step == "next":
            shape = shape[1:]
        smem["ds"] = swizzled(shape, p.dtype, 128 if wide else part.swizzle)  # as the keys, beside which it is an operand
    answers = dynamic_scheduler.scratch_types(CONSUMERS) if handed_out else {}
    if handed_out:
        smem["work_smem"] = answers.pop("work_smem")
    return BlockSpec(
        consumers=CONSUMERS,
        helpers=turns,
        accumulators=_accumulators(p, c),
        smem=smem,
        barriers={
            "q": Pipeline.barriers(stages, copies=4 + len(optional_smem), consumers=CONSUMERS),
            "kv": Pipeline.barriers(c.kv_slots, copies=(1 if shares else part.panels) + part.panels, consumers=CONSUMERS),
            "between": [plgpu.Barrier(num_arrivals=1)] * 2 if wide else [plgpu.Barrier(num_arrivals=CONSUMERS)],
            **({"turn": [plgpu.Barrier(num_arrivals=n, num_barriers=stages) for n in (1, CONSUMERS)]} if turns else {}),
            **answers,
        },
    )


def _accumulators(p: BackwardProblem, c: BackwardConfig) -> tuple[tuple[int, int], ...]:
    if p.head_dim > 128:
        return backward_wide.accumulators(p)
    return backward_ahead.accumulators(p, c) if c.dq_step == "next" else backward_narrow.accumulators(p, c.mode == "fused")


def _summed(p: BackwardProblem, dbias: jax.Array, bias: jax.Array) -> jax.Array:
    """The gradient of the bias from that of each head and batch entry, [batch * q_heads, keys, rows] with padding."""
    dbias = dbias[:, : p.kv_tokens, : p.q_tokens].swapaxes(1, 2).astype(jnp.float32)
    dbias = dbias.reshape(p.batch, p.q_heads, p.q_tokens, p.kv_tokens)
    for axis, size in enumerate(bias.shape[:2]):
        dbias = dbias.sum(axis, keepdims=True) if size == 1 else dbias
    return dbias.astype(bias.dtype)
