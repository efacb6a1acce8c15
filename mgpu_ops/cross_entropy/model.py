"""Which configs of cross-entropy are worth trying: a model of their time, not fitted to any GPU yet, and what follows."""

from __future__ import annotations

import math

from mgpu_ops.core.choices import Choices
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, require
from mgpu_ops.cross_entropy.problem import SPACE, Config, Problem, bytes_moved, check, supports

_LAUNCH = 3e-6  # seconds
_STEP = 0.3e-6  # of a tile that no other block hides: its maximum and sum over the threads
_LATENCY_BYTES = 16384  # on their way to an SM at full rate: half of the rate with as many
_SM_SHARE = 2.0  # of its share of the memory's rate that an SM takes where others have nothing to do


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the rate that those in flight allow, and the steps of the block with most rows."""
    require("cross_entropy", supports(problem, gpu), problem, gpu)
    p, c = problem, config
    blocks = min(p.rows, gpu.sms * c.blocks)
    waves = math.ceil(p.rows / blocks)  # rows of the busiest block
    in_flight = c.blocks * (c.stages - 1) * c.tile * itemsize_of(p.dtype)
    share = in_flight / (in_flight + _LATENCY_BYTES)
    rate = min(1.0, _SM_SHARE * math.ceil(blocks / c.blocks) / gpu.sms) * gpu.memory_bytes_per_s * share
    uneven = waves * blocks / p.rows
    steps = waves * math.ceil(p.vocabulary / c.tile) * _STEP / c.blocks
    return _LAUNCH + bytes_moved(p) * uneven / rate + steps


_choices = Choices("cross_entropy", SPACE, Config, supports, check, cost)
space, candidates, default = _choices.space, _choices.candidates, _choices.default


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of the vocabulary, of which the tokens count a quarter."""
    if (a.dtype, a.gradient) != (b.dtype, b.gradient):
        return None
    if a == b:
        return 0.0
    if min(a.rows, a.vocabulary, b.rows, b.vocabulary) < 1:
        return None
    return abs(math.log2(a.vocabulary / b.vocabulary)) + 0.25 * abs(math.log2(a.rows / b.rows))
