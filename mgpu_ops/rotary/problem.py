"""What rotary embeddings of q, k and v are (`Problem`), how they may be run (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    WARP,
    WARPGROUP,
    Buffer,
    block_bytes,
    check_fields,
    itemsize_of,
    supports_dtypes,
    supports_sizes,
)

HEAD_DIMS = (64, 128, 256)
_MOST_HEADS = 256  # of a row, along a side of a TMA copy
_ALIGNED = 128  # numbers of q, whose halves are then multiples of 128 bytes, as TMA has copies begin in shared memory

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """q, k and v of rows that hold all heads, q's first and v's last; heads of q and k are rotated.

    left' = left cos - right sin and right' = right cos + left sin, of the halves of a head and the cosines and sines
    [head_dim / 2] of row % positions. The gradient is the way back: from q, k and v to what is joined, with -sin.

    With `normalised`, a head x of q or k is first x r w with r = 1 / sqrt(mean of x^2 + epsilon) and a weight w [head_dim]. The
    gradient is then dx = r g w - x r^3 mean(g w x), of a head g that is rotated back, and dw = sum of g x r over all rows and
    heads of q, or of k, in float32.

    rows: tokens of all sequences of a batch.
    positions: tokens of a sequence, whose cosines and sines there are.
    heads: of q.
    kv_heads: of k, and of v.
    head_dim: numbers of a head, 64, 128 or 256 in the kernel.
    dtype: of all, "bfloat16" or "float16" in the kernel.
    gradient: whether the result is the gradient of what is joined, from those of q, k and v; `normalised`: also of weights.
    normalised: whether heads of q and k are divided by their root mean square and multiplied by weights before.
    """

    rows: int
    positions: int
    heads: int
    kv_heads: int
    head_dim: int
    dtype: str = "bfloat16"
    gradient: bool = False
    normalised: bool = False

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def parts(self) -> tuple[int, int, int]:
        """Heads of q, k and v."""
        return self.heads, self.kv_heads, self.kv_heads

    @property
    def rotated(self) -> int:
        """Heads of q and k together."""
        return self.heads + self.kv_heads

    @property
    def by_row(self) -> int:
        """How many of the arrays that a problem takes have its rows: they come first."""
        return (3 + self.normalised) if self.gradient else 1


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result.

    blocks: on an SM at once, of one warpgroup each, which works on rows of its own: 1, 2, 4 or 8.
    stages: rows that a block has loaded, is loading or is storing: 3, 4, 6 or 8.
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
    """How many heads a warpgroup rotates at once: a thread has up to four numbers of each half of them; 0 where none fit.

    A head that is normalised lies within a warp, which adds up its squares.
    """
    half = p.head_dim // 2
    of_one = WARPGROUP // half  # with a number for each thread
    fits = (n for n in (4, 2, 1) if p.rotated % (of_one * n) == 0 and not (p.normalised and half > n * WARP))
    return next((of_one * n for n in fits), 0)


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
        how = "normalised in groups of four" if p.normalised else "rotated in equal groups"
        return f"{p.rotated} heads of q and k cannot be {how}: use backend='xla'"
    least = smem_bytes(p, Config(blocks=1, stages=min(SPACE["stages"])))
    if least > gpu.smem_per_block:
        what = f"{min(SPACE['stages'])} rows of {sum(p.parts)} heads of head_dim={p.head_dim}"
        what += " and of what was normalised" * (p.normalised and p.gradient)
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
    """Bytes of shared memory that a block takes: both halves of the rows, their cosines and sines, and what a norm takes."""
    p, c, half, at_once = problem, config, problem.head_dim // 2, heads_at_once(problem)
    buffers: list[Buffer] = [((c.stages, sum(p.parts), half), itemsize_of(p.dtype))] * 2
    if p.normalised and p.gradient:
        buffers += [((c.stages, p.rotated, half), itemsize_of(p.dtype))] * 2
    return block_bytes([*buffers, *[((c.stages, at_once, half), 4)] * 2], c.stages + p.normalised)


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Three operations for each number that is rotated, four for its norm, and eleven for the norm's gradients."""
    p = problem
    of_norm = (11 if p.gradient else 4) * p.normalised
    return (3 + of_norm) * p.rows * p.rotated * p.head_dim


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once. Of what was normalised, a gradient reads the heads of q and k."""
    p = problem
    numbers = p.rows * (2 * sum(p.parts) + (p.rotated if p.normalised and p.gradient else 0)) * p.head_dim
    weights = 2 * p.head_dim * 4 * (1 + p.gradient) * p.normalised
    return numbers * itemsize_of(p.dtype) + 2 * p.positions * (p.head_dim // 2) * 4 + weights


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal numbers, joined or of q, k and v, and cosines and sines of angles that grow with the token.

    With `normalised` the gradient has the joined ones too, and at the end are both weights, around 1, and epsilon.
    """
    p = problem
    parts = (*p.parts, sum(p.parts))[: p.by_row] if p.gradient else (sum(p.parts),)
    keys = jax.random.split(key, len(parts))
    given = (jax.random.normal(k, (p.rows, heads, p.head_dim), p.dtype) for k, heads in zip(keys, parts, strict=True))
    rates = 10_000.0 ** (-jnp.arange(0, p.head_dim, 2, dtype=jnp.float32) / p.head_dim)
    angles = jnp.arange(p.positions, dtype=jnp.float32)[:, None] * rates
    turned = *given, jnp.cos(angles), jnp.sin(angles)
    if not p.normalised:
        return turned
    weights = 1 + 0.3 * jax.random.normal(jax.random.fold_in(key, 1), (2, p.head_dim), jnp.float32)
    return *turned, *weights, jnp.full((1,), 1e-6, jnp.float32)


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): a rounding of the dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.dtype, 1e-5)
