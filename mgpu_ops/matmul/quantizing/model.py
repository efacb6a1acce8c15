"""Which configs of quantize's kernel are worth trying: models of their time and of XLA's, and what follows."""

from __future__ import annotations

import math

from mgpu_ops.core.choices import Choices
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import require
from mgpu_ops.matmul.quantizing.problem import SPACE, Config, Problem, bytes_moved, check, supports, tiles

_LAUNCH = 3e-6  # seconds
_MEMORY = 0.85  # of the memory's rate that is reached
_TILE = 1e-6  # s that a tile takes at least, from its first load to its last store
_BLOCKS = 4  # of an SM at once
# XLA's, on an H200 in a run that was not kept; on an H100 the drawn problems take 0.70 to 0.94 times what the model says.
_XLA_LAUNCH, _XLA_MEMORY = 2.6e-6, 0.5
# A largest value alone is one pass at this share of the memory rate (results/2026-11-27-h100-quantize-largest.jsonl), or takes
# so many seconds for a number: gates on an H200 (results/2026-11-27-h200-fp8-delayed-kernels.txt, whose clock was 6 % slow).
_XLA_READS, _XLA_COMPUTES = 0.92, {"gate": 1.3e-12, "gate_gradient": 1.65e-12}


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the memory's rate, of all tiles as large as the whole ones, and the last tiles alone."""
    require("quantize", supports(problem, gpu), problem, gpu)
    p, c = problem, config
    down, across = tiles(p, c)
    whole = down * c.tile_rows * across * c.tile_columns / (p.rows * p.columns)
    size = c.tile_rows * c.tile_columns / (128 * 128)
    waves = math.ceil(p.batch * down * across / (gpu.sms * _BLOCKS))
    held = (
        1 + 0.02 * abs(math.log2((c.ahead or 32) / _best_ahead(p))) + 0.02 * (c.order == ("rows" if p.row_scale else "columns"))
    )
    return _LAUNCH + whole**0.5 * held * bytes_moved(p) / (_MEMORY * gpu.memory_bytes_per_s) + size * _TILE * (1 + 0.01 * waves)


def _best_ahead(p: Problem) -> int:
    """results/2026-11-27-h200-quantize-largest.jsonl, and with scales of rows results/2026-11-27-h100-quantize-moe.jsonl."""
    if p.of == "gate_gradient":
        return 16 if p.row_scale and not p.finds else 8
    return 4 if p.finds or p.row_scale else 8


def baseline_cost(problem: Problem, gpu: Gpu) -> float | None:
    """Modelled seconds of XLA's kernels, one of which rounds and one transposes bytes; None with scales of rows or blocks.

    With these XLA takes 3 to 13 times as long as the kernel (results/2026-11-27-h100-quantize-anywhere.csv).
    """
    if problem.scheme != "tensor":
        return None
    if problem.writes:
        return _XLA_LAUNCH + bytes_moved(problem) / (_XLA_MEMORY * gpu.memory_bytes_per_s)
    computing = _XLA_COMPUTES.get(problem.of, 0.0) * problem.batch * problem.rows * problem.columns
    return _XLA_LAUNCH + max(bytes_moved(problem) / (_XLA_READS * gpu.memory_bytes_per_s), computing)


_choices = Choices("quantize", SPACE, Config, supports, check, cost)
space, candidates, default = _choices.space, _choices.candidates, _choices.default


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of rows, columns and the batch."""
    kinds = ((p.dtype, p.of, p.amax, p.scheme, p.scheme_t, p.gathered > 0, p.row_scale) for p in (a, b))
    if len(set(kinds)) > 1:
        return None
    if a == b:
        return 0.0
    sides = [(p.rows, p.columns, p.batch) for p in (a, b)]
    if min(map(min, sides)) < 1:
        return None
    far = sum(abs(math.log2(x / y)) for x, y in zip(*sides, strict=True))
    return 0.5 * far + 0.05 * (a.to != b.to)
