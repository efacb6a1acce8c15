"""Which configs of rotary embeddings are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import math

from mgpu_ops.core.choices import Choices
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, require
from mgpu_ops.rotary.problem import SPACE, Config, Problem, bytes_moved, check, supports

_LAUNCH = 3e-6  # seconds
_ROW = 1e-6  # of a row that no other block hides
_LATENCY_BYTES = 16384  # on their way to an SM at full rate: half of the rate with as many


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the rate that those in flight allow, and the rows of the block with most of them."""
    require("rotary", supports(problem, gpu), problem, gpu)
    p, c = problem, config
    waves = math.ceil(p.rows / min(p.rows, gpu.sms * c.blocks))  # rows of the busiest block
    of_a_row = sum(p.parts) + (p.rotated if p.normalised and p.gradient else 0)
    in_flight = c.blocks * (c.stages - 2) * of_a_row * p.head_dim * itemsize_of(p.dtype)
    share = in_flight / (in_flight + _LATENCY_BYTES)
    return _LAUNCH + bytes_moved(p) / (gpu.memory_bytes_per_s * share) + waves * _ROW / c.blocks


_choices = Choices("rotary", SPACE, Config, supports, check, cost)
space, candidates, default = _choices.space, _choices.candidates, _choices.default


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of the numbers of a row, of which the rows count a quarter."""
    if (a.dtype, a.gradient, a.normalised) != (b.dtype, b.gradient, b.normalised):
        return None
    if a == b:
        return 0.0
    sides = [sum(p.parts) * p.head_dim for p in (a, b)]
    if min(*sides, a.rows, b.rows) < 1:
        return None
    return abs(math.log2(sides[0] / sides[1])) + 0.25 * abs(math.log2(a.rows / b.rows)) + 0.1 * (a.head_dim != b.head_dim)
