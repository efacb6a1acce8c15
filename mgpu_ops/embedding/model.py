"""Which configs of an embedding's gradient are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import math

from mgpu_ops.core.choices import Choices
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, require
from mgpu_ops.embedding.problem import SPACE, Config, Problem, bytes_moved, check, supports

_LAUNCH = 15e-6  # seconds, of the kernel, and of the sort before it
_LATENCY = 0.4e-6  # of loads that follow each other: which tokens, and their rows
# Of XLA, fitted to ten drawn problems of an H100 (results/2026-11-27-h100-embedding-anywhere.csv): s, and times the bytes of
# the result and of what the tokens have.
_XLA_LAUNCH, _XLA_OUT, _XLA_TOKENS = 4e-6, 1.95, 16.5
_FREQUENT = 1 / 32  # of the tokens that a text's most frequent word has, which one block adds up


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the memory's rate, or what a block waits for its loads."""
    require("embedding", supports(problem, gpu), problem, gpu)
    p, c = problem, config
    steps = math.ceil(p.vocabulary / (gpu.sms * c.blocks))  # of the busiest block
    memory = bytes_moved(p) / gpu.memory_bytes_per_s
    stored = p.width * itemsize_of(p.dtype) * c.blocks * gpu.sms / gpu.memory_bytes_per_s
    of_all = steps * (stored + _LATENCY) + 2 * math.ceil(p.rows / (gpu.sms * c.blocks)) * _LATENCY
    return _LAUNCH + max(memory, of_all, 2 * p.rows * _FREQUENT / c.loads * _LATENCY)


def baseline_cost(problem: Problem, gpu: Gpu) -> float:
    """Modelled seconds of XLA: zeros, and atomic additions for ids that are equally frequent; of others it takes longer."""
    p = problem
    out, tokens = (count * p.width * itemsize_of(p.dtype) for count in (p.vocabulary, p.rows))
    return _XLA_LAUNCH + (_XLA_OUT * out + _XLA_TOKENS * tokens) / gpu.memory_bytes_per_s


_choices = Choices("embedding", SPACE, Config, supports, check, cost)
space, candidates, default = _choices.space, _choices.candidates, _choices.default


def distance(a: Problem, b: Problem) -> float | None:
    """How far two problems are, in doublings of the width, of which tokens and words count a quarter."""
    if a.dtype != b.dtype:
        return None
    if a == b:
        return 0.0
    if min(a.rows, a.vocabulary, a.width, b.rows, b.vocabulary, b.width) < 1:
        return None
    rows = abs(math.log2(a.rows / b.rows)) + abs(math.log2(a.vocabulary / b.vocabulary))
    return abs(math.log2(a.width / b.width)) + 0.25 * rows
