"""Which configs can run the gradients of attention (`supports_backward`, `check_backward`), and what their kernels need."""

from __future__ import annotations

from mgpu_ops.attention.heads import PANEL, backward_dim, rounded
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem, supports
from mgpu_ops.core import gemm, limits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of

DQ_TILE_Q, DQ_TILE_KV = 2 * ROWS, 64  # of the kernel for dq alone


def backward_spills_outside_loops(config: BackwardConfig) -> int:
    """With dq a step later, a few numbers of a kv block are in local memory, and the loop over q blocks uses none of them."""
    return 448 if config.dq_step == "next" else 0


def supports_backward(problem: BackwardProblem, gpu: Gpu) -> str | None:
    """Why no config of the backward kernels can run `problem` on `gpu`, or None."""
    if problem.page_size:
        return "there is no gradient with pages: gather them, and leave page_table (page_size) out"
    if problem.eight_bits:
        return f"there is no gradient with kv_dtype={problem.kv_dtype}: cast keys and values to q's dtype"
    if problem.bias_grad and problem.soft_cap and not problem.soft_cap_after_bias:
        return "the gradient of a bias beside soft_cap is not in the kernels: pass a mask in its place, or backend='xla'"
    return supports(problem, gpu)


def check_backward(problem: BackwardProblem, config: BackwardConfig, gpu: Gpu) -> str | None:
    """Why the backward kernels cannot run `problem` with `config` on `gpu`, or None."""
    reason = supports_backward(problem, gpu)
    if reason is not None:
        return reason
    p, c = problem, config
    d = backward_dim(p.head_dim, c.dq_step)
    wide = d > 128
    if c.mode not in ("fused", "split"):
        return f"mode={c.mode!r} is neither 'fused' nor 'split'"
    if c.mode == "fused" and wide:
        return f"mode='fused' has no registers for dq of head_dim={p.head_dim}: use 'split'"
    if c.mode == "fused" and p.deterministic and (reason := _check_turns(c)):
        return reason
    tile_kv = ROWS if wide else 2 * ROWS
    if c.tile_kv != tile_kv:
        return f"tile_kv={c.tile_kv} must be {tile_kv} for head_dim={p.head_dim}: {ROWS} keys of each warpgroup's gradients"
    if c.tile_q not in (ROWS, 2 * ROWS) or (c.tile_q == 2 * ROWS and d > 64):
        return f"tile_q={c.tile_q} must be {ROWS}, or {2 * ROWS} where head_dim is at most 64"
    if c.mode == "fused" and d == 64 and c.tile_q == ROWS:
        return f"tile_q={c.tile_q} must be {2 * ROWS} with mode='fused' and head_dim={p.head_dim}: dq's rows are shared out"
    if not 1 <= c.max_concurrent_steps <= 16:
        return f"max_concurrent_steps={c.max_concurrent_steps} must be from 1 to 16"
    if reason := _check_dq_step(p, c):
        return reason
    if not 1 <= c.section_waves <= 1024:
        return f"section_waves={c.section_waves} must be from 1 to 1024"
    if not 1 <= c.group_splits <= p.q_heads // p.kv_heads:
        return f"group_splits={c.group_splits} must be from 1 to {p.q_heads // p.kv_heads}, the query heads of a head of keys"
    if reason := limits.check_producer_registers(c.memory_registers):
        return reason
    sizes = [backward_smem_bytes(p, c)] + ([dq_smem_bytes(p)] if c.mode == "split" else [])
    return limits.check_smem(max(sizes), gpu)


def _check_turns(c: BackwardConfig) -> str | None:
    """Why thread blocks cannot take turns at adding to dq, so that the sums are always in one order, or None."""
    if (c.dq_step, c.q_order) != ("next", "apart"):
        return "mode='fused' adds to dq in any order: use 'split', or dq_step='next' with q_order='apart'"
    if c.max_concurrent_steps > 4:
        return f"max_concurrent_steps={c.max_concurrent_steps} must be from 2 to 4 where a warp waits for turns at each stage"
    if c.group_splits > 1:
        return f"group_splits={c.group_splits} must be 1 with mode='fused' and deterministic: turns are of whole groups"
    return None


def in_a_circle(p: BackwardProblem) -> bool:
    """Where thread blocks take turns at adding to dq: whether every kv block of a head takes them in a circle.

    That is where all rows see all keys, at head dim 128: at 64 a turn takes as long as the kv blocks are apart.
    """
    return p.left is None and p.right is None and not p.lengths and not p.segments and backward_dim(p.head_dim, "next") == 128


def may_hand_out(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether kv blocks may be handed out to thread blocks as these become free.

    With lengths alone at head dim 64: with other masks and at 128 there are no registers for it.
    """
    lengths_alone = p.lengths and not p.segments and p.left is None and p.right is None
    return lengths_alone and c.dq_step == "next" and backward_dim(p.head_dim, c.dq_step) == ROWS and not p.deterministic


_EVENED_OUT = 128  # tiles of an SM with lengths or segments: where there are more, short ones lie on all SMs
_LONG_SEGMENTS = 1024  # keys: with segments, beginnings and ends of shorter tiles weigh


def backward_blocks(p: BackwardProblem, tiles: int, gpu: Gpu) -> int:
    """Thread blocks for so many tiles of a gradient: persistent ones, or with lengths or segments as many as tiles.

    Which tiles are short is known on the device only: there the GPU gives each SM the next tile when it is idle, or persistent
    blocks take it themselves (`hands_out`).
    """
    each = p.lengths or (p.segments and p.kv_tokens >= _LONG_SEGMENTS)
    return tiles if each and tiles <= _EVENED_OUT * gpu.sms else min(gpu.sms, tiles)


def hands_out(p: BackwardProblem, c: BackwardConfig, blocks: int, gpu: Gpu) -> bool:
    """Whether kv blocks are handed out to persistent thread blocks as these become free, where the GPU would deal them."""
    return may_hand_out(p, c) and blocks > gpu.sms and not gpu.shares_sms


def _check_dq_step(p: BackwardProblem, c: BackwardConfig) -> str | None:
    """Why the dk/dv kernel cannot compute dq in the step that `c.dq_step` says, or None."""
    if c.dq_step not in ("same", "next"):
        return f"dq_step={c.dq_step!r} is neither 'same' nor 'next'"
    if c.q_order not in ("together", "apart"):
        return f"q_order={c.q_order!r} is neither 'together' nor 'apart'"
    if c.dk_operand not in ("memory", "registers"):
        return f"dk_operand={c.dk_operand!r} is neither 'memory' nor 'registers'"
    if c.dq_step == "same":
        if (c.q_order, c.dk_operand) != ("together", "memory"):
            return f"q_order={c.q_order!r} and dk_operand={c.dk_operand!r} are for dq_step='next': use 'together' and 'memory'"
        return None if c.kv_slots == 1 else check_second_slot(p, c)
    if c.mode != "fused":
        return f"dq_step='next' is for mode='fused', not {c.mode!r}: use 'same'"
    if c.dk_operand == "registers" and backward_dim(p.head_dim, "next") == 64:
        return "dk_operand='registers' is for head_dim=128: dS of 128 rows takes too many, use 'memory'"
    if p.bias != "none" or p.soft_cap:
        return "dq_step='next' has no registers for a bias or a soft cap: use 'same'"
    if c.kv_slots not in (1, 2):
        return f"kv_slots={c.kv_slots} must be 1 or 2"
    if c.kv_slots == 2 and (reason := check_second_slot(p, c)) is not None:
        return reason
    if c.max_concurrent_steps < 2:
        return "dq_step='next' reads two q blocks at a time: use max_concurrent_steps=2 or more"
    return None


def check_second_slot(p: BackwardProblem, c: BackwardConfig) -> str | None:
    """Why the dk/dv kernel cannot have two places for kv blocks, or None."""
    if c.dq_step != "next":
        return f"kv_slots={c.kv_slots} is for dq_step='next': use 1"
    if backward_dim(p.head_dim, "next") != ROWS:
        return "kv_slots=2 is for head dims up to 64: wider keys leave no shared memory for three stages beside it, use 1"
    if p.deterministic or p.q_heads > p.kv_heads * c.group_splits:
        return "kv_slots=2 has no registers for query heads that share keys or for deterministic sums: use 1"
    if c.q_order == "together" and (p.lengths or p.kv_tokens % c.tile_kv):
        return (
            f"kv_slots=2 with q_order='together' has no registers for lengths, or for kv_tokens={p.kv_tokens} that are no "
            f"multiple of tile_kv={c.tile_kv}: products would wait for each other; use q_order='apart' or kv_slots=1"
        )
    return None


def dq_steps(problem: BackwardProblem) -> int:
    """Stages of the dq kernel's pipeline of keys."""
    return 1 if rounded(problem.head_dim) > 128 and problem.bias != "none" else 2


def dq_value_steps(problem: BackwardProblem) -> int:
    """Stages of its pipeline of values: head dim 256 leaves room for one."""
    return 1 if rounded(problem.head_dim) > 128 else 2


def backward_smem_bytes(problem: BackwardProblem, config: BackwardConfig) -> int:
    """Bytes of shared memory of a thread block of the dk/dv kernel, likewise; at most, where kv blocks may be handed out."""
    p, c, steps = problem, config, config.max_concurrent_steps
    d = backward_dim(p.head_dim, c.dq_step)
    wide, fused, stats = d > 128, c.mode == "fused", ((steps, c.tile_q), 4)
    buffers: list[limits.Buffer] = [((steps, c.tile_kv, c.tile_q), itemsize_of(p.bias))] if p.bias != "none" else []
    buffers += [stats, ((steps, c.tile_q, d), 2)]  # delta, the output's gradient
    buffers += [((ROWS, d if d % PANEL else 2 * PANEL), 4)] if fused and c.dq_step == "same" else []  # dq
    turns = fused and p.deterministic
    ds = (ROWS, ROWS) if wide else (1 if c.dq_step == "next" else 2, c.tile_q, c.tile_kv)
    buffers += [(ds, 2)] if fused or p.bias_grad else []
    buffers += [((2, 4), 4)] if c.dq_step == "next" else []  # here
    kv_blocks = (c.kv_slots, c.tile_kv, d), 2
    buffers += [kv_blocks, stats, ((2, ROWS), 4), ((steps, c.tile_q, d), 2)]  # keys, lse, numbers, queries
    buffers += [((steps, c.tile_q), 4)] if p.segments else []
    buffers += [((steps,), 4)] if turns else []
    buffers += [kv_blocks] + ([((ROWS, ROWS), 2)] if wide else [])  # values, weights
    barriers = (4 if turns else 2) * steps + 2 * c.kv_slots + (2 if wide else 1)
    if may_hand_out(p, c):  # numbers of kv blocks, which take little of it, and the barriers of their pipeline
        buffers, barriers = [*buffers, ((limits.ALIGNMENT,), 1)], barriers + 2 * gemm.SLOTS
    return limits.block_bytes(buffers, barriers=barriers)


def dq_smem_bytes(problem: BackwardProblem) -> int:
    """Bytes of shared memory of a thread block of the dq kernel, likewise."""
    p, d = problem, backward_dim(problem.head_dim)
    k_steps, v_steps = dq_steps(p), dq_value_steps(p)
    buffers: list[limits.Buffer] = [((k_steps, 2 * ROWS, ROWS), itemsize_of(p.bias))] if p.bias != "none" else []
    buffers += [((2 * ROWS, d), 2), ((k_steps, ROWS, d), 2), ((2, ROWS), 4), ((2 * ROWS, d), 2)]
    buffers += [((k_steps, ROWS), 4)] if p.segments else []
    return limits.block_bytes([*buffers, ((v_steps, ROWS, d), 2)], barriers=2 * (1 + k_steps + v_steps))
