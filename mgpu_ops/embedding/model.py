"""Which configs of an embedding's gradient are worth trying: a model of their time, and what follows."""

from __future__ import annotations

import math
from collections.abc import Sequence

from mgpu_ops.core.choices import cheapest
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of
from mgpu_ops.embedding.problem import SPACE, Config, Problem, bytes_moved, check, supports

_LAUNCH = 60e-6  # seconds, of the kernel, and of the sort before it
_LATENCY = 0.7e-6  # of loads that follow each other: which tokens, and their rows
_FREQUENT = 1 / 32  # of the tokens that a text's most frequent word has, which one block adds up


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence]:
    return dict(SPACE)


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds: the bytes at the memory's rate, or what a block waits for its loads."""
    if reason := supports(problem, gpu):
        raise ValueError(f"embedding cannot run {problem} on {gpu.name}: {reason}")
    p, c = problem, config
    steps = math.ceil(p.vocabulary / (gpu.sms * c.blocks))  # of the busiest block
    memory = bytes_moved(p) / gpu.memory_bytes_per_s
    stored = p.width * itemsize_of(p.dtype) * c.blocks * gpu.sms / gpu.memory_bytes_per_s
    of_all = steps * (stored + _LATENCY) + 2 * math.ceil(p.rows / (gpu.sms * c.blocks)) * _LATENCY
    return _LAUNCH + max(memory, of_all, 2 * p.rows * _FREQUENT / c.loads * _LATENCY)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """The configs that can run, the fastest by the model first."""
    return cheapest(SPACE, Config, lambda c: check(problem, c, gpu), lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    if reason := supports(problem, gpu):
        raise ValueError(f"no config of embedding fits {problem} on {gpu.name}: {reason}")
    config: Config = first_of(candidates(problem, gpu), problem, gpu)
    return config


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
