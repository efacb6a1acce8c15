"""What the gradient of an embedding is (`Problem`), how it may be run (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import WARPGROUP, check_fields, itemsize_of, supports_dtypes, supports_sizes

_WORDS = (8, 4, 2)  # numbers that a thread loads at once, 16, 8 or 4 bytes
MAX_WIDTH = 8192  # sums of a row lie in the registers of a warpgroup

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[v, j] = sum over the tokens t that are v of g[t, j], in float32, rounded once: the gradient of table[tokens].

    rows: of g, one for each token.
    vocabulary: rows of out, zeros for words that no token is.
    width: columns of both.
    dtype: of g and out, "bfloat16" or "float16" in the kernel.
    """

    rows: int
    vocabulary: int
    width: int
    dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result but for the order of sums.

    blocks: on an SM at once, of one warpgroup each, which works on words of its own: 2, 4, 6 or 8.
    loads: tokens whose rows a block loads at once, 2, 4 or 8.
    """

    blocks: int
    loads: int


SPACE: dict[str, Sequence[int]] = {"blocks": (2, 4, 6, 8), "loads": (2, 4, 8)}

_SIZES = {"llama3-8b": (128256, 4096), "llama3-8b-eighth": (16384, 4096), "qwen3-30b": (151936, 2048)}
SHAPES = {f"{model}-{m}": Problem(m, *sizes) for model, sizes in _SIZES.items() for m in (8192, 32768)}
SUITES: dict[str, Sequence[str]] = {"llm": list(SHAPES)}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if reason := supports_dtypes(p.dtype, p.dtype, gpu) or supports_sizes(p, ("rows", "vocabulary", "width")):
        return reason
    if not word(p) or p.width > MAX_WIDTH:
        return f"width={p.width} is no multiple of {_WORDS[-1] * WARPGROUP} up to {MAX_WIDTH}: use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason."""
    if reason := supports(problem, gpu) or outside(SPACE, config):
        return reason
    p, c = problem, config
    taken, left = _registers(p, c), min(255, gpu.registers_per_sm // (c.blocks * WARPGROUP))
    if taken > left:
        return f"{c.loads} rows of {p.width} columns take {taken} registers a thread, and {c.blocks} blocks leave {left}"
    return None


def word(p: Problem) -> int:
    """How many numbers of a row a thread loads at once: 8, 4 or 2, or 0 where none of them fits."""
    return next((n for n in _WORDS if p.width % (n * WARPGROUP) == 0), 0)


def _registers(p: Problem, c: Config) -> int:
    """Of a thread, about: float32 sums, and the rows that are loaded, two numbers to a register."""
    each = p.width // WARPGROUP
    return each + c.loads * each // 2 + 32


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """One sum for each number of g."""
    return problem.rows * problem.width


def bytes_moved(problem: Problem) -> int:
    """g read once, and the table's gradient written once."""
    p = problem
    return (p.rows + p.vocabulary) * p.width * itemsize_of(p.dtype) + 4 * p.rows


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal gradients, and tokens that are drawn evenly."""
    p = problem
    of_g, of_tokens = jax.random.split(key)
    g = jax.random.normal(of_g, (p.rows, p.width), p.dtype)
    return g, jax.random.randint(of_tokens, (p.rows,), 0, p.vocabulary, jnp.int32)


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): a rounding of the dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.dtype, 1e-4)
