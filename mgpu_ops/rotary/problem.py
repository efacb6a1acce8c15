"""What rotary embeddings of q, k and v are (`Problem`), how they may be run (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import WARPGROUP, block_bytes, check_fields, itemsize_of, supports_dtypes, supports_sizes

HEAD_DIMS = (64, 128, 256)
_MOST_HEADS = 256  # of a row, along a side of a TMA copy
_ALIGNED = 128  # numbers of q, whose halves are then multiples of 128 bytes, as TMA has copies begin in shared memory

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """q, k and v of a row with all heads joined, q's first and v's last, of which those of q and k are rotated.

    left' = left cos - right sin and right' = right cos + left sin, of the halves of a head and the cosines and sines
    [head_dim / 2] of row % positions. The gradient is the way back: from q, k and v to what is joined, with -sin.

    rows: of a batch of sequences.
    positions: tokens of a sequence, whose cosines and sines there are.
    heads, kv_heads: of q; of k, and of v.
    head_dim: numbers of a head.
    dtype: of all, "bfloat16" or "float16" in the kernel.
    gradient: from the gradients of q, k and v compute that of what is joined.
    """

    rows: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    gradient: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Heads of q, k and v."""
        return self.heads, self.kv_heads, self.kv_heads


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result.

    blocks: on an SM at once, of one warpgroup each, which works on rows of its own: 1, 2, 4 or 8.
    stages: rows that a block has loaded, is loading or is storing.
    """

    blocks: int
    stages: int


SPACE: dict[str, Sequence[int]] = {"blocks": (1, 2, 4, 8), "stages": (3, 4, 6, 8)}

_HEADS = {"llama3-8b": (32, 8, 128), "llama3-70b": (64, 8, 128), "qwen3-30b": (32, 4, 128), "llama3-1b": (32, 8, 64)}
SHAPES = {f"{model}-{m}": Problem(m, m, *heads) for model, heads in _HEADS.items() for m in (1024, 8192)}
_FORWARD = list(SHAPES)
SHAPES |= {f"{name}-gradient": dataclasses.replace(SHAPES[name], gradient=True) for name in _FORWARD}
SUITES: dict[str, Sequence[str]] = {"llm": _FORWARD, "gradient": [name for name in SHAPES if name not in _FORWARD]}

# --- What can run ---------------------------------------------------------------------------------------------------


def heads_at_once(p: Problem) -> int:
    """How many heads a warpgroup rotates at once: a thread has up to four numbers of each half of them; 0 where none fit."""
    of_one = WARPGROUP // (p.head_dim // 2)  # with a number for each thread
    return next((of_one * n for n in (4, 2, 1) if (p.heads + p.kv_heads) % (of_one * n) == 0), 0)


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if reason := supports_dtypes(p.dtype, p.dtype, gpu) or supports_sizes(p, ("rows", "positions", "heads", "kv_heads")):
        return reason
    if p.rows % p.positions:
        return f"rows={p.rows} are no whole sequences of positions={p.positions}"
    if p.head_dim not in HEAD_DIMS:
        return f"head_dim={p.head_dim} is not one of {', '.join(map(str, HEAD_DIMS))}: use backend='xla'"
    if sum(p.parts) > _MOST_HEADS:
        return f"{sum(p.parts)} heads of q, k and v are more than {_MOST_HEADS}: use backend='xla'"
    if p.heads * p.head_dim % _ALIGNED:
        return f"heads={p.heads} of head_dim={p.head_dim} are no multiple of {_ALIGNED} numbers: use backend='xla'"
    if not heads_at_once(p):
        return f"{p.heads + p.kv_heads} heads of q and k cannot be rotated in equal groups: use backend='xla'"
    least = smem_bytes(p, Config(blocks=1, stages=min(SPACE["stages"])))
    if least > gpu.smem_per_block:
        what = f"{min(SPACE['stages'])} rows of {sum(p.parts)} heads of head_dim={p.head_dim}"
        return f"{what} take {least} bytes of shared memory, more than {gpu.smem_per_block}: use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason."""
    if reason := supports(problem, gpu) or outside(SPACE, config):
        return reason
    own = smem_bytes(problem, config)
    if config.blocks * (own + _OF_A_BLOCK) > gpu.smem_per_block + _OF_A_BLOCK:
        return f"{config.blocks} blocks of {own} bytes of shared memory do not fit on an SM of {gpu.name}: use fewer stages"
    return None


_OF_A_BLOCK = 1024  # bytes of an SM's shared memory that the system takes for each block


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes: both halves of the rows, their cosines and sines."""
    p, c, half = problem, config, problem.head_dim // 2
    rows = [((c.stages, sum(p.parts), half), itemsize_of(p.dtype))] * 2
    return block_bytes([*rows, *[((c.stages, heads_at_once(p), half), 4)] * 2], c.stages)


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Three operations for each number that is rotated."""
    p = problem
    return 3 * p.rows * (p.heads + p.kv_heads) * p.head_dim


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    return 2 * p.rows * sum(p.parts) * p.head_dim * itemsize_of(p.dtype) + 2 * p.positions * (p.head_dim // 2) * 4


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal numbers, joined or of q, k and v, and cosines and sines of angles that grow with the token."""
    p = problem
    parts = p.parts if p.gradient else (sum(p.parts),)
    keys = jax.random.split(key, len(parts))
    given = (jax.random.normal(k, (p.rows, heads, p.head_dim), p.dtype) for k, heads in zip(keys, parts, strict=True))
    rates = 10_000.0 ** (-jnp.arange(0, p.head_dim, 2, dtype=jnp.float32) / p.head_dim)
    angles = jnp.arange(p.positions, dtype=jnp.float32)[:, None] * rates
    return *given, jnp.cos(angles), jnp.sin(angles)


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): a rounding of the dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.dtype, 1e-5)
