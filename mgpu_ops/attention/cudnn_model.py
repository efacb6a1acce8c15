"""A model of cuDNN's time: which of the two a call runs for a problem that was not measured (`registry/winner.py`).

It has none of the problems that cuDNN refuses, whose baseline is XLA's reference: that one is far slower.

Fitted to an H200 and cuDNN 9.19 (results/2026-11-22-h200-flash_attention-drawn.jsonl, of the backward pass also
-backward-d128.jsonl and -backward-long.jsonl, and the shipped entries).
"""

from __future__ import annotations

import bisect
import dataclasses
import math
from collections.abc import Callable, Mapping

import numpy as np

from mgpu_ops.attention import cudnn, reference
from mgpu_ops.attention.mask import kv_blocks, q_blocks
from mgpu_ops.attention.problem import BackwardProblem, Problem, supports
from mgpu_ops.core import rates
from mgpu_ops.core.gpu import Gpu

_TILE = 128  # rows and keys


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """Seconds, and shares of the rate of the tensor cores by head dim: of those between, the next one's."""

    launch: float  # of the kernels: their start, the first loads and the last stores
    tile: float  # of 128 rows, or keys, beside their steps
    masked: float  # more where there is a causal mask
    window: float  # more where there is a window
    reached: Mapping[int, float]
    copied: float = 0.0  # bytes of each element of the queries that other kernels move through HBM


_FORWARD = _Fitted(
    launch=4.2e-6,
    tile=1.4e-6,
    masked=1.2e-6,
    window=0.15e-6,
    reached={64: 0.63, 80: 0.51, 96: 0.67, 112: 0.69, 128: 0.825, 160: 0.67, 192: 0.80, 256: 0.85},
)
_BACKWARD = _Fitted(
    launch=8.3e-6,
    tile=2.2e-6,
    masked=3.0e-6,
    window=0.3e-6,
    reached={64: 0.613, 80: 0.49, 96: 0.575, 112: 0.683, 128: 0.754, 160: 0.482, 192: 0.438, 256: 0.527},
    copied=21.3,
)


def cost(problem: Problem, gpu: Gpu) -> float | None:
    """Modelled time of cuDNN's forward pass, in seconds; None where it refuses the problem."""
    if cudnn.refuses(problem) is not None:
        return None
    return _cost(problem, _FORWARD, kv_blocks, 2, reference.bytes_moved(problem), gpu)


def backward_cost(problem: BackwardProblem, gpu: Gpu) -> float | None:
    """Modelled time of cuDNN's backward pass, in seconds; None where it refuses the problem."""
    p = problem
    if cudnn.refuses(p) is not None:
        return None
    copied = _BACKWARD.copied * p.batch * p.q_tokens * p.q_heads * p.head_dim / (gpu.memory_bytes_per_s * rates.HBM)
    return copied + _cost(p, _BACKWARD, q_blocks, 5, reference.backward_bytes_moved(p), gpu)


def _cost(problem: Problem, fit: _Fitted, blocks: Callable[..., np.ndarray], products: int, moved: int, gpu: Gpu) -> float:
    """Tiles, each of a step for each block that it visits, shared out over the SMs; at least the time of HBM."""
    if (reason := supports(problem, gpu)) is not None:
        raise ValueError(reason)
    p, dims = reference.of_mean_length(problem), sorted(fit.reached)
    head_dim = dims[min(bisect.bisect_left(dims, p.head_dim), len(dims) - 1)]  # that it computes
    step = 2 * products * _TILE * _TILE * head_dim * gpu.sms / (gpu.bf16_flops * rates.POWER * fit.reached[head_dim])
    tiles = blocks(p, _TILE, _TILE) * step + fit.tile
    tiles = tiles + fit.masked * (p.left is not None or p.right is not None) + fit.window * (p.left is not None)
    count = len(tiles) * p.batch * p.q_heads
    waves = math.ceil(count / gpu.sms)  # the last one counts as a whole one
    work = max(float(tiles.max()), waves * float(tiles.mean()))
    return fit.launch + max(work, moved / (gpu.memory_bytes_per_s * rates.HBM))
