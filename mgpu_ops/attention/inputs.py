"""The arguments of attention beside q, k and v."""

from __future__ import annotations

import dataclasses
import math
from typing import Any

import jax

from mgpu_ops.attention.problem import Problem

LOG2E = math.log2(math.e)


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Inputs:
    """The arguments of attention beside q, k and v: what a call, a reference and a kernel are all given.

    options: [3] float32: scale, soft cap and scale / soft cap (the last two 0 without one).
    lengths: (q_lengths, kv_lengths), int32 [batch] each. segments: (q_segments [batch, q_tokens], kv_segments [batch,
    kv_tokens]), int32. bias: [batch or 1, q_heads or 1, q_tokens, kv_tokens]. sinks: [batch or 1, q_heads], in the dtype of
    options. page_table: int32 [batch, kv_tokens / page_size], where k and v are pools of pages: an index out of range counts
    as the nearest, and one of a page without a token that counts is not used. kv_scales: (of keys, of values), where these
    have 8 bits: float32 [batch or 1, kv_heads] each.
    """

    options: Any
    lengths: Any = None
    segments: Any = None
    bias: Any = None
    sinks: Any = None
    page_table: Any = None
    kv_scales: Any = None

    @staticmethod
    def of(problem: Problem, arrays: tuple[Any, ...]) -> Inputs:
        """From the arrays that follow q, k and v in an op's flat list of arguments."""
        options, *rest = arrays
        lengths = (rest.pop(0), rest.pop(0)) if problem.lengths else None
        segments = (rest.pop(0), rest.pop(0)) if problem.segments else None
        bias = rest.pop(0) if problem.bias != "none" else None
        sinks = rest.pop(0) if problem.sinks else None
        page_table = rest.pop(0) if problem.page_size else None
        kv_scales = (rest.pop(0), rest.pop(0)) if problem.eight_bits else None
        assert not rest
        return Inputs(options, lengths, segments, bias, sinks, page_table, kv_scales)

    def arrays(self) -> tuple[Any, ...]:
        last = tuple(x for x in (self.bias, self.sinks, self.page_table) if x is not None)
        return (self.options, *(self.lengths or ()), *(self.segments or ()), *last, *(self.kv_scales or ()))
