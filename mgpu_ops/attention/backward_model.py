"""Which configs of attention's backward pass are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax

from mgpu_ops.attention import reference
from mgpu_ops.attention.backward_check import (
    DQ_TILE_KV,
    DQ_TILE_Q,
    backward_blocks,
    check_backward,
    check_second_slot,
    hands_out,
    supports_backward,
)
from mgpu_ops.attention.heads import PANEL, backward_dim, has_room
from mgpu_ops.attention.model import (
    SECTION,
    SECTION_WAVES,
    cached_kv_blocks,
    cached_q_blocks,
    hbm,
    inputs,
    load_rate,
    raise_for,
    rate,
    shared_out,
    typical_problem,
)
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.core import rates
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, require


def backward_inputs(problem: BackwardProblem, key: jax.Array) -> tuple[jax.Array, ...]:
    """`inputs`, a random gradient of the output, and the lse and output that the forward pass leaves."""
    p = problem
    q, k, v, *rest = inputs(p, key)
    out, lse = reference.forward(p, q, k, v, *rest)
    out_grad = jax.random.normal(jax.random.fold_in(key, 1), out.shape, out.dtype)
    return (q, k, v, out_grad, lse, out, *rest)


def backward_space(problem: BackwardProblem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of BackwardConfig, in order; `check_backward` says which combinations run."""
    d = backward_dim(problem.head_dim)
    next_step = d <= 128
    return {
        "mode": ("fused", "split"),
        "tile_q": (64, 128),
        "tile_kv": (64, 128),
        "max_concurrent_steps": (1, 2, 3),
        "section_waves": SECTION_WAVES,
        "memory_registers": (24, 40),
        "dq_step": ("same", "next") if next_step else ("same",),
        "q_order": ("apart", "together") if next_step else ("together",),
        "dk_operand": ("memory", "registers") if 64 < d <= 128 else ("memory",),
        "group_splits": _group_splits(problem, gpu),
        "kv_slots": (1, 2) if d <= ROWS else (1,),
    }


def _group_splits(problem: BackwardProblem, gpu: Gpu) -> tuple[int, ...]:
    """Parts of a group of query heads: up to four, a power of two, or equal ones; 1 alone where the kv blocks of all heads fill
    the GPU several times."""
    p, group = problem, problem.q_heads // max(1, problem.kv_heads)  # supports_backward has a reason where there are none
    whole = p.batch * p.kv_heads * math.ceil(p.kv_tokens / (2 * ROWS)) >= _FULL * gpu.sms
    return (1,) if whole else tuple(n for n in range(1, group + 1) if n <= 4 or n.bit_count() == 1 or group % n == 0)


def backward_candidates(problem: BackwardProblem, gpu: Gpu) -> list[BackwardConfig]:
    """All configs that `check_backward` accepts, with one choice of `section_waves`, the least `backward_cost` first.

    Raises ValueError where there is none.
    """
    require("flash_attention_backward", supports_backward(problem, gpu), problem, gpu)
    choices = backward_space(problem, gpu) | {"section_waves": (SECTION,), "memory_registers": (24,), "kv_slots": (1,)}
    every = [BackwardConfig(**dict(zip(choices, chosen))) for chosen in itertools.product(*choices.values())]
    every = [
        dataclasses.replace(c, memory_registers=_backward_producer_registers(problem, c), kv_slots=_kv_slots(problem, c))
        for c in every
    ]
    if problem.deterministic and (problem.left, problem.right) != (None, None):  # in long sections, fewer wait for their turn
        section = _TURNS_SECTION_OF_SEGMENTS if problem.segments else _TURNS_SECTION
        every = [dataclasses.replace(c, section_waves=section) if c.mode == "fused" else c for c in every]
    legal = [c for c in every if check_backward(problem, c, gpu) is None]
    reason = None if legal else "none of the space takes so little shared memory and so few registers"
    require("flash_attention_backward", reason, problem, gpu)
    return sorted(legal, key=lambda c: backward_cost(problem, c, gpu))


def _backward_producer_registers(problem: BackwardProblem, config: BackwardConfig) -> int:
    """With more, accumulators spill in one kernel; with fewer, the producers of two kernels: of heads in narrow panels, of
    windows of rows that end anywhere, of a float32 bias."""
    p, d = problem, backward_dim(problem.head_dim)
    anywhere = p.lengths or p.segments or p.q_tokens % config.tile_q != 0 or p.kv_tokens % config.tile_kv != 0
    narrow = d > 128 and d % PANEL != 0
    return 40 if config.mode == "split" and (narrow or anywhere or p.bias == "float32") else 24


def _kv_slots(problem: BackwardProblem, config: BackwardConfig) -> int:
    """Two where that can be, but where a second place gained nothing (lengths beside a mask, segments), and where query heads
    share keys: in parts of their own (`group_splits`) it was not measured."""
    p = problem
    unequal = p.segments or (p.lengths and (p.left is not None or p.right is not None))
    return 1 if unequal or p.q_heads != p.kv_heads or check_second_slot(p, config) else 2


def backward_default(problem: BackwardProblem, gpu: Gpu) -> BackwardConfig:
    """The first fused one of the `backward_candidates`, unless two kernels are modelled well ahead of one with dq_step="same".

    Of long sequences two kernels were not measured beside it, and at short ones dq a step later gains little. With lengths and
    segments two kernels have to be well ahead of that first one (results/2026-11-27-h100-flash_attention-defaults.jsonl). With
    `deterministic`, turns where the default is one kernel, but with lengths alone and where heads would be padded for them:
    there they were not measured.
    """
    ranked = backward_candidates(problem, gpu)
    if problem.deterministic:
        in_any_order = backward_default(dataclasses.replace(problem, deterministic=False), gpu)
        measured = (not problem.lengths or problem.right is not None) and backward_dim(problem.head_dim) in (64, 128)
        in_turns = [c for c in ranked if c.mode == "fused" and in_any_order.mode == "fused" and measured]
        return in_turns[0] if in_turns else next(c for c in ranked if c.mode == "split")
    best = next(c for c in ranked if c.dq_step == "same")
    fused = [c for c in ranked if c.mode == "fused"] or [best]
    beside, margin = next(c for c in fused if c.dq_step == "same"), _FUSED_MARGIN
    if problem.lengths or problem.segments:
        beside, margin = fused[0], _FUSED_MARGIN_UNKNOWN
    return best if backward_cost(problem, best, gpu) < margin * backward_cost(problem, beside, gpu) else fused[0]


# Fitted to an H200 (results/2026-11-22-h200-flash_attention-drawn.jsonl, -backward-d128.jsonl, -backward-long.jsonl, and the
# shipped entries).
_FUSED_MARGIN, _FUSED_MARGIN_UNKNOWN = 0.95, 0.93
_TURNS_SECTION = 8
_TURNS_SECTION_OF_SEGMENTS = 1024  # all heads: their kv blocks are short
_REACHED = {  # of the rate of the tensor cores, by mode and head dim
    "fused": {64: 0.653, 80: 0.487, 96: 0.619, 112: 0.55, 128: 0.72},
    "split": {64: 0.89, 80: 0.654, 96: 0.864, 112: 0.7, 128: 0.994, 160: 0.785, 192: 0.834, 224: 0.88, 256: 0.956},
}
_ROUND = 0.06e-6  # s of a tile of 64 x 128 scores beside its products
_KEYS_TILE = 2.4e-6  # s of an output tile of dk and dv beside its steps,
# s less with a second kv slot, and where tiles are handed out (results/2026-11-29-h200-flash_attention-backward-slots.jsonl)
_SECOND_SLOT, _HANDED_OUT = 1.3e-6, 1.1e-6
_SECOND_SLOT_LOSS = 1.03  # of the kernel's time, where `_kv_slots` has one: up to that there
_ROWS_TILE = 6.9e-6  # likewise of dq
# s of the kernels, with what XLA runs before and after them; by whether head dims are above 128. There, and for head dims
# between 64 and 128, where a kernel prepares rows, fitted to results/2026-11-29-h200-flash_attention-backward-drawn.jsonl, but
# not to its problems of seed 16, that of the suite `anywhere`.
_STARTS = {("fused", False): 8.2e-6, ("split", False): 7.2e-6, ("split", True): 2.6e-6}
# s less of "fused" where a kernel prepares rows and zeros (results/2026-11-29-h200-flash_attention-backward-prepare.jsonl)
_PREPARED, _PREPARED_BETWEEN = 2.3e-6, 3.8e-6
_PADS = 5.5e-6  # s of the copies that pad a head dim, beside their bytes
_ADDS = 3.5e-6  # s of the kernels that add up dk and dv of a group's parts, beside their bytes
# times as long with segments and parts of a group that are not equal: fewer and longer tiles even out less; of one problem,
# which took 1.07 times as long (results/2026-11-29-h200-flash_attention-backward-unequal-parts.jsonl)
_UNEQUAL_OF_SEGMENTS = 1.05
_FULL = 4  # times as many kv blocks as SMs: more are shared out evenly
_COPIED = 1.81  # times as long as by HBM's rate alone the copies before and after take
# Of a step's time, by head dim, where products of two q blocks overlap while a third one loads
# (results/2026-11-22-h200-flash_attention-backward-d128.txt, results/2026-11-23-h200-flash_attention-backward-d64.txt); and
# what registers for dS take of that again.
_AHEAD, _HELD = {64: 0.92, 128: 0.831}, 0.063


def backward_cost(problem: BackwardProblem, config: BackwardConfig, gpu: Gpu) -> float:
    """Modelled time in seconds, with what is done around the kernels: delta, zeros for dq and its conversion, padding.

    Fused: a thread block keeps a kv block while q blocks of all heads that share it go by. A tile of scores takes five
    products, and dq is added to global memory in float32. Split: four in the dk/dv kernel, three in the dq kernel.
    """
    p, c = problem, config
    raise_for(supports_backward(p, gpu))
    typical, group, size = typical_problem(p), p.q_heads // p.kv_heads, itemsize_of(p.dtype)
    d, entries = backward_dim(p.head_dim, c.dq_step), typical.batch
    queries = p.batch * p.q_tokens * p.q_heads
    keys = cached_q_blocks(typical, c.tile_kv, c.tile_q) * math.ceil(group / c.group_splits)
    columns, copied = (5, 10 * queries * d) if c.mode == "fused" else (4, 0)  # dq: zeros, float32 read, 16 bits written
    step = _gradient_step(p, c, columns * d, 2 * c.tile_q * d * size + (4 * c.tile_q * d if c.mode == "fused" else 0), gpu)
    gains = c.kv_slots > 1 and _kv_slots(p, c) > 1
    tile = _KEYS_TILE - _SECOND_SLOT * gains
    kv_blocks = p.batch * p.kv_heads * c.group_splits * math.ceil(p.kv_tokens / c.tile_kv)
    tile -= _HANDED_OUT * hands_out(p, c, backward_blocks(p, kv_blocks, gpu), gpu)
    work = shared_out(keys * step + tile, entries * p.kv_heads * c.group_splits, gpu)
    work *= _SECOND_SLOT_LOSS if c.kv_slots > 1 and not gains else 1.0
    work *= _UNEQUAL_OF_SEGMENTS if p.segments and group % c.group_splits else 1.0
    if c.mode == "split":
        rows = cached_kv_blocks(typical, DQ_TILE_Q, DQ_TILE_KV)  # whatever the tiles of the dk/dv kernel
        of_dq = dataclasses.replace(c, tile_q=DQ_TILE_Q, tile_kv=DQ_TILE_KV)
        step = _gradient_step(p, of_dq, 3 * d, 2 * DQ_TILE_KV * d * size, gpu)
        work += shared_out(rows * step + _ROWS_TILE, entries * p.q_heads, gpu)
    moved = reference.backward_bytes_moved(p)
    copied += queries * (2 * p.head_dim * size + 8)  # delta
    padding = _PADS + 2 * moved / hbm(gpu) if d != p.head_dim else 0.0
    if c.group_splits > 1:
        padding += _ADDS + 2 * (c.group_splits + 1) * p.batch * p.kv_tokens * p.kv_heads * d * size / hbm(gpu)
    prepared = c.mode == "fused" and not (p.deterministic or p.sinks) and has_room(p.q_heads, p.v_dim)
    starts = _STARTS[c.mode, d > 128] - (_PREPARED_BETWEEN if 64 < p.head_dim < 128 else _PREPARED) * prepared
    return starts + max(work, moved / hbm(gpu)) + _COPIED * copied / hbm(gpu) + padding


def _gradient_step(p: BackwardProblem, c: BackwardConfig, columns: int, moved: int, gpu: Gpu) -> float:
    """Seconds of one tile of scores: products of so many columns, and the work on each score. Several stages overlap loads."""
    scores = c.tile_q * c.tile_kv
    d = backward_dim(p.head_dim, c.dq_step)
    reached = _REACHED[c.mode][d]
    compute = 2 * columns * scores / (reached * rate(gpu)) + _ROUND * scores / (ROWS * 2 * ROWS)
    moving = moved / load_rate(gpu) + (scores * itemsize_of(p.bias) / load_rate(gpu) if p.bias != "none" else 0.0)
    if c.max_concurrent_steps == 1:
        return compute + moving + rates.LOAD_LATENCY
    if c.dq_step == "next" and c.max_concurrent_steps > 2:
        compute *= _AHEAD[d] + (_HELD if c.dk_operand == "registers" else 0.0)
    return max(compute, moving, rates.LOAD_LATENCY / c.max_concurrent_steps)
