"""The backward kernels of attention, for NVIDIA Hopper: dq, dk and dv of softmax(scale q k^T + bias, where visible) v.

A block keeps a tile of keys and values in shared memory while the query rows that see them go by, and computes, transposed so
that keys are wgmma's rows: S = k q^T, P = 2^(S - lse), dP = v dO^T, dS = P (dP - delta); dv += P dO and dk += dS q stay in
registers, with P and dS as operands from registers, and dq = dS^T k goes through shared memory and is added to dq in global
memory by TMA. One warpgroup copies (`backward_block.py`), two compute (`backward_narrow.py`, `backward_wide.py`). That is mode
"fused": five products; but the order of the sums in dq varies from run to run. In mode "split" a second kernel, whose blocks
keep query rows, computes dq (`backward_dq.py`): seven products, always in one order. Sources: FlashAttention-2
(arXiv 2307.08691) and -3 (arXiv 2407.08608); PTX ISA (wgmma, cp.reduce.async.bulk.tensor).
"""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention import backward_dq, backward_narrow, backward_wide
from mgpu_ops.attention.backward_block import Block, schedule
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import (
    Extras,
    as_blocks,
    as_rows,
    kernel,
    pad_head,
    pad_tokens,
    rows_like,
    specialize,
    swizzled,
)
from mgpu_ops.attention.operands import Operands
from mgpu_ops.attention.problem import PANEL, ROWS, BackwardConfig, BackwardProblem, padded
from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.pipeline import Pipeline

WARPGROUPS = 2  # that compute


def _kernel(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    bias_shape: tuple[int, int],
    *refs: Any,
    accumulators: Any,
    barriers: dict[str, Any],
    smem: dict[str, Any],
) -> None:
    """One block: its tiles of keys, each a loop over tiles of query rows."""
    table_ref, q_ref, k_ref, v_ref, do_ref, lse_ref, delta_ref, *extras, dk_ref, dv_ref = refs
    dbias_ref = extras.pop() if p.bias_grad else None
    dq_ref = extras.pop() if c.mode == "fused" else None
    block = Block(
        p=p,
        c=c,
        x=Operands.of(p, q_ref, k_ref, v_ref, extras, bias_shape),
        table=table_ref,
        out_grad=do_ref,
        stats={"lse": lse_ref, "delta": delta_ref},
        dq=dq_ref,
        dbias=dbias_ref,
        dk=dk_ref,
        dv=dv_ref,
        smem=smem,
        rows_pipeline=Pipeline(c.max_concurrent_steps, *barriers["rows"]),
        kv_pipeline=Pipeline(1, *barriers["kv"]),
    )
    compute: Any = backward_wide.compute if p.head_dim > 128 else backward_narrow.compute
    specialize(block.producer, lambda: compute(block, *barriers["between"], accumulators), WARPGROUPS, c, gpu)


def launch(
    p: BackwardProblem, c: BackwardConfig, gpu: Gpu, *arrays: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Runs the kernels on q, k, v, the output's gradient, lse, delta and `Inputs.arrays()`: dq, dk, dv and any bias's gradient.

    lse as the forward kernel gives it; delta [batch, q_heads, q_tokens]: the rows' sums of output times its gradient.
    """
    head_dim, p = p.head_dim, dataclasses.replace(p, head_dim=padded(p.head_dim))
    q, k, v, out_grad = (pad_head(x, p.head_dim) for x in arrays[:4])
    given = Inputs.of(p, arrays[6:])
    dq, dk, dv, dbias = _keys(p, c, gpu, q, k, v, out_grad, arrays[4], arrays[5], given, interpret)
    if dq is None:
        dq = backward_dq.launch(p, c, gpu, q, k, v, out_grad, arrays[4], arrays[5], given, interpret)
    gradients = tuple(x[..., :head_dim] for x in (dq, dk, dv))
    return gradients if dbias is None else (*gradients, dbias)


def _keys(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    out_grad: jax.Array,
    lse: jax.Array,
    delta: jax.Array,
    inputs: Inputs,
    interpret: bool,
) -> tuple[Any, jax.Array, jax.Array, Any]:
    """The kernel whose blocks keep keys: dq in mode "fused", else None; dk; dv; the gradient of the bias, or None."""
    lse, delta = pad_tokens(lse, c.tile_q, math.inf), pad_tokens(delta, c.tile_q)
    steps, fused, wide = c.max_concurrent_steps, c.mode == "fused", p.head_dim > 128
    rows, panels, tiles = lse.shape[2], p.head_dim // PANEL, math.ceil(p.kv_tokens / c.tile_kv)
    blocks = min(gpu.sms, p.batch * p.kv_heads * tiles)
    extras = Extras.of(inputs, "keys", c.tile_q, c.tile_kv, steps)
    smem = {
        "q_smem": swizzled((steps, c.tile_q, p.head_dim), p.dtype),
        "do_smem": swizzled((steps, c.tile_q, p.head_dim), p.dtype),
        "k_smem": swizzled((panels, c.tile_kv, PANEL), p.dtype),
        "v_smem": swizzled((panels, c.tile_kv, PANEL), p.dtype),
        "lse_smem": plgpu.SMEM((steps, c.tile_q), jnp.float32),
        "delta_smem": plgpu.SMEM((steps, c.tile_q), jnp.float32),
        "numbers_smem": plgpu.SMEM((WARPGROUPS, ROWS), jnp.int32),
        **extras.smem,
    }
    sums: list[Any] = []  # that blocks add to
    dq: Any = None
    dbias: Any = None
    if fused:
        # The interpreter cannot add in global memory: each tile of keys has an array of its own there.
        dq = jax.new_ref(jnp.zeros((tiles if interpret else 1, p.batch, rows, p.q_heads, p.head_dim), jnp.float32))
        sums.append(dq)
        smem["dq_smem"] = swizzled((WARPGROUPS, ROWS, PANEL), jnp.float32)
    if p.bias_grad:
        dbias = jax.new_ref(jnp.zeros((p.batch * p.q_heads, tiles * c.tile_kv, rows), p.dtype))
        sums.append(dbias)
    if wide:
        smem["weights_smem"] = swizzled((1, ROWS, ROWS), p.dtype)
    if fused or p.bias_grad:
        shape = (1, 1, ROWS, ROWS) if wide else (2, c.tile_q // ROWS, c.tile_kv, PANEL)
        smem["ds_smem"] = swizzled(shape, p.dtype)
    shapes = backward_wide.accumulators(p.head_dim) if wide else backward_narrow.accumulators(p.head_dim, fused)
    dk, dv = kernel(
        functools.partial(_kernel, p, c, gpu, extras.bias_shape),
        name="mgpu_ops_flash_attention_backward",
        blocks=blocks,
        compute_warpgroups=WARPGROUPS,
        out_type=(rows_like(k), rows_like(v)),
        accumulators=shapes,
        smem=smem,
        barriers={
            "rows": Pipeline.barriers(steps, copies=4 + len(extras.smem), consumers=WARPGROUPS),
            "kv": Pipeline.barriers(1, copies=2 * panels, consumers=WARPGROUPS),
            "between": [plgpu.Barrier(num_arrivals=1)] * 2 if wide else [plgpu.Barrier(num_arrivals=WARPGROUPS)],
        },
        interpret=interpret,
    )(
        schedule(p, c, blocks),
        as_blocks(q, c.tile_q, p),
        as_rows(k),
        as_rows(v),
        as_blocks(out_grad, c.tile_q, p),
        lse,
        delta,
        *extras.arrays,
        *sums,
    )
    if dq is not None:
        dq = (engine.frozen(dq, q, k).sum(0)[:, : p.q_tokens] * inputs.options[0]).astype(p.dtype)
    if dbias is not None:
        dbias = engine.frozen(dbias, q, k)[:, : p.kv_tokens, : p.q_tokens].swapaxes(1, 2).astype(jnp.float32)
        dbias = dbias.reshape(p.batch, p.q_heads, p.q_tokens, p.kv_tokens)
        for axis, size in enumerate(extras.bias_shape):
            dbias = dbias.sum(axis, keepdims=True) if size == 1 else dbias
        dbias = dbias.astype(inputs.bias.dtype)
    return dq, dk.reshape(k.shape), dv.reshape(v.shape), dbias
