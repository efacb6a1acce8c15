"""Which configs of an RMS norm are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import math

from mgpu_ops.core.choices import Choices
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, require
from mgpu_ops.rms_norm.problem import SPACE, Config, Problem, bytes_moved, check, inputs_of_a_row, reads_again, supports

_LAUNCH = 3e-6  # seconds
_ROW = 1e-6  # of a row that no other block hides: its sums over the threads
_LATENCY_BYTES = 16384  # on their way to an SM at full rate: half of the rate with as many


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the rate that those in flight allow, or the sums of the block with most rows."""
    require("rms_norm", supports(problem, gpu), problem, gpu)
    p, c = problem, config
    waves = math.ceil(p.rows / min(p.rows, gpu.sms * c.blocks))  # rows of the busiest block
    in_flight = c.blocks * (c.stages - 1) * p.width * inputs_of_a_row(p) * itemsize_of(p.dtype)
    share = in_flight / (in_flight + _LATENCY_BYTES)
    return _LAUNCH + bytes_moved(p) / (gpu.memory_bytes_per_s * share) + waves * (1 + p.gradient) * _ROW / c.blocks


_choices = Choices("rms_norm", SPACE, Config, supports, check, cost)
space, candidates, default = _choices.space, _choices.candidates, _choices.default


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of the width, of which the rows count a quarter."""
    if (a.dtype, a.gradient) != (b.dtype, b.gradient) or reads_again(a) != reads_again(b):
        return None
    if a == b:
        return 0.0
    if min(a.rows, a.width, b.rows, b.width) < 1:
        return None
    return abs(math.log2(a.width / b.width)) + 0.25 * abs(math.log2(a.rows / b.rows)) + 0.1 * (a.residual != b.residual)
