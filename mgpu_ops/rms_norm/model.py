"""Which configs of an RMS norm are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mgpu_ops.core.choices import cheapest
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of
from mgpu_ops.rms_norm.problem import SPACE, Config, Problem, bytes_moved, check, inputs_of_a_row, reads_again, supports

_LAUNCH = 3e-6  # seconds
_ROW = 1e-6  # of a row that no other block hides: its sums over the threads
_LATENCY_BYTES = 16384  # on their way to an SM at full rate: half of the rate with as many


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence]:
    return dict(SPACE)


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the rate that those in flight allow, or the sums of the block with most rows."""
    if reason := supports(problem, gpu):
        raise ValueError(f"rms_norm cannot run {problem} on {gpu.name}: {reason}")
    p, c = problem, config
    waves = math.ceil(p.rows / min(p.rows, gpu.sms * c.blocks))  # rows of the busiest block
    in_flight = c.blocks * (c.stages - 1) * p.width * inputs_of_a_row(p) * itemsize_of(p.dtype)
    share = in_flight / (in_flight + _LATENCY_BYTES)
    return _LAUNCH + bytes_moved(p) / (gpu.memory_bytes_per_s * share) + waves * (1 + p.gradient) * _ROW / c.blocks


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """The configs that can run, the fastest by the model first."""
    return cheapest(SPACE, Config, lambda c: check(problem, c, gpu), lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    if reason := supports(problem, gpu):
        raise ValueError(f"no config of rms_norm fits {problem} on {gpu.name}: {reason}")
    config: Config = first_of(candidates(problem, gpu), problem, gpu)
    return config


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of the width, of which the rows count a quarter."""
    if (a.dtype, a.gradient) != (b.dtype, b.gradient) or reads_again(a) != reads_again(b):
        return None
    if a == b:
        return 0.0
    if min(a.rows, a.width, b.rows, b.width) < 1:
        return None
    return abs(math.log2(a.width / b.width)) + 0.25 * abs(math.log2(a.rows / b.rows)) + 0.1 * (a.residual != b.residual)
