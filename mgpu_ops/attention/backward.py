"""The backward kernels of attention, for NVIDIA Hopper: dq, dk and dv of softmax(scale q k^T + bias, where visible) v.

Two modes (`BackwardConfig.mode`):

- "fused": the dk/dv kernel (`backward_dkdv.py`) computes dq too, five products for a tile of scores. It adds to dq in global
  memory, so that the order of the sums in dq varies from run to run, unless thread blocks take turns (`backward_ahead.py`).
- "split": the dk/dv kernel, and one for dq alone (`backward_dq.py`): seven products, all sums always in one order.

Ahead of both one more kernel makes what they read of each row, or XLA does (`backward_prepare.prepare`).

Sources: FlashAttention-2 (arXiv 2307.08691) and -3 (arXiv 2407.08608); PTX ISA (wgmma, cp.reduce.async.bulk.tensor).
"""

from __future__ import annotations

import dataclasses

import jax

from mgpu_ops.attention import backward_dkdv, backward_dq, backward_prepare, backward_round
from mgpu_ops.attention.heads import backward_dim
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.launch import BackwardArrays, pad_head
from mgpu_ops.attention.problem import BackwardConfig, BackwardProblem
from mgpu_ops.core.gpu import Gpu


def launch(
    p: BackwardProblem, c: BackwardConfig, gpu: Gpu, *arrays: jax.Array, interpret: bool = False
) -> tuple[jax.Array, ...]:
    """Runs the kernels on q, k, v, the output's gradient, lse, out_or_delta, `Inputs.arrays()`: dq, dk, dv, dbias.

    lse, as the forward kernel gives it, and out_or_delta: see `BackwardArrays`.
    """
    head_dim, v_dim, d = p.head_dim, p.v_dim, backward_dim(p.head_dim, c.dq_step)
    p = dataclasses.replace(p, head_dim=d, v_head_dim=0)
    q, k, v, out_grad = (pad_head(x, d) for x in arrays[:4])
    inputs = Inputs.of(p, arrays[6:])
    inputs = dataclasses.replace(inputs, sinks=None)  # they are in lse, and a key without a value adds nothing
    given = BackwardArrays(q, k, v, out_grad, arrays[4], arrays[5], inputs)
    prepared = backward_prepare.prepare(p, c, given, interpret)
    dq, dk, dv, dbias = backward_dkdv.launch(p, c, gpu, given, prepared, interpret)
    if dq is None:
        dq = backward_dq.launch(p, c, gpu, given, prepared, interpret)
    gradients = dq[..., :head_dim], dk[..., :head_dim], dv[..., :v_dim]
    return gradients if dbias is None else (*gradients, dbias)


def launch_joined(
    p: BackwardProblem,
    c: BackwardConfig,
    gpu: Gpu,
    turned: tuple[jax.Array, ...],
    *arrays: jax.Array,
    interpret: bool = False,
) -> jax.Array:
    """As `launch`, the gradient of what q, k and v were taken from and rotated, [batch, tokens, all heads, head_dim]."""
    q, k, v, out_grad, lse, out_or_delta, *options = arrays
    given = BackwardArrays(q, k, v, out_grad, lse, out_or_delta, Inputs.of(p, tuple(options)))
    prepared = backward_prepare.prepare(p, c, given, interpret)
    dq, dk, dv, _ = backward_dkdv.launch(p, c, gpu, given, prepared, interpret, as_tiles=True)
    assert dq is not None
    return backward_round.launch_joined(p, dq, dk, dv, given.inputs.options, turned, interpret)
