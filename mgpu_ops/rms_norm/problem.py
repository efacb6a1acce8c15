"""What an RMS norm is (`Problem`), how it may be run (`Config`), and which of them fit together (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import REDUCTIONS, WARPGROUP, block_bytes, check_fields, itemsize_of, supports_dtypes, supports_sizes

LANES = 128  # columns of a part of a row: TMA copies a row as [width / 128, 128]
MAX_WIDTH = 8192  # rows, or of the gradient their sum, lie in the registers of one warpgroup
_KEPT_WIDTH = 4096  # up to which a row's x and g stay in registers, too

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[t, j] = x[t, j] r[t] w[j] with r[t] = 1 / sqrt(mean over j of x[t, j]^2 + epsilon), or the gradients of x and w.

    rows: of x.
    width: columns of x.
    dtype: of x, w and the result, "bfloat16" or "float16" in the kernel.
    gradient: whether the results are dx = r g w - x r^3 mean(g w x) and dw = sum over t of g x r, float32; g: of the result.
    residual: with `gradient`, whether another gradient of x is added to dx.
    """

    rows: int
    width: int
    dtype: str = "bfloat16"
    gradient: bool = False
    residual: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result but for the order of sums.

    blocks: on an SM at once, of one warpgroup each, which works on rows of its own: 1, 2 or 4.
    stages: rows that a block has loaded or is loading: 2, 3, 4, 6 or 8.
    """

    blocks: int
    stages: int


SPACE: dict[str, Sequence[int]] = {"blocks": (1, 2, 4), "stages": (2, 3, 4, 6, 8)}

_WIDTHS = {"llama3-8b": 4096, "llama3-70b": 8192, "qwen3-30b": 2048}
_TOKENS = (16, 1024, 8192)
SHAPES = {f"{model}-{m}": Problem(m, n) for model, n in _WIDTHS.items() for m in _TOKENS}
_FORWARD = list(SHAPES)
SHAPES |= {
    f"{name}-gradient": dataclasses.replace(SHAPES[name], gradient=True, residual=True)
    for name in _FORWARD
    if SHAPES[name].rows > 16
}
SUITES: dict[str, Sequence[str]] = {"llm": _FORWARD, "gradient": [name for name in SHAPES if name not in _FORWARD]}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if reason := supports_dtypes(p.dtype, p.dtype, gpu) or supports_sizes(p, ("rows", "width")):
        return reason
    if p.residual and not p.gradient:
        return "residual=True is of the gradient: leave it out"
    if p.width % LANES or p.width > MAX_WIDTH:
        return f"width={p.width} is no multiple of {LANES} up to {MAX_WIDTH}: use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason."""
    if reason := supports(problem, gpu) or outside(SPACE, config):
        return reason
    own = smem_bytes(problem, config)
    if config.blocks * (own + _OF_A_BLOCK) > gpu.smem_per_block + _OF_A_BLOCK:
        return f"{config.blocks} blocks of {own} bytes of shared memory do not fit on an SM of {gpu.name}: use fewer stages"
    taken, left = _registers(problem), min(255, gpu.registers_per_sm // (config.blocks * WARPGROUP))
    if taken > left:
        return f"a row takes {taken} registers a thread, and {config.blocks} blocks leave {left}: use fewer"
    return None


def reads_again(p: Problem) -> bool:
    """Whether a row of the gradient is read from shared memory again once a sum of it is known."""
    return p.gradient and p.width > _KEPT_WIDTH


def _registers(p: Problem) -> int:
    """Of a thread, about: x and w; or x, g, the sum of dw and what is stored, where w is read from shared memory again.

    Where all but the sum of dw is read again, that and what is at work.
    """
    arrays = 2 if not p.gradient or reads_again(p) else 4
    return arrays * p.width // WARPGROUP + 32


_OF_A_BLOCK = 1024  # bytes of an SM's shared memory that the system takes for each block


def inputs_of_a_row(p: Problem) -> int:
    """Arrays of x's shape that are read."""
    return 1 + p.gradient + p.residual


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes: the inputs' rows, w, and two rows of the result."""
    p, c, size = problem, config, itemsize_of(problem.dtype)
    rows = [((c.stages, p.width), size)] * inputs_of_a_row(p)
    return block_bytes([*rows, ((p.width,), size), ((2, p.width), size)], c.stages + 1) + REDUCTIONS


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """A product and a sum of each element's square, and two products; of the gradient as many again, and dw's."""
    return (10 if problem.gradient else 4) * problem.rows * problem.width


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    arrays = (inputs_of_a_row(p) + 1) * p.rows * p.width * itemsize_of(p.dtype)
    return arrays + p.width * (itemsize_of(p.dtype) + 4 * p.gradient)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal x and w, epsilon, and for the gradient g and what is added to dx."""
    p = problem
    keys = jax.random.split(key, 4)
    x, *others = (jax.random.normal(k, (p.rows, p.width), p.dtype) for k in keys[: inputs_of_a_row(p)])
    return x, jax.random.normal(keys[3], (p.width,), p.dtype), jnp.full((1,), 1e-5, jnp.float32), *others


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): a rounding of the dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.dtype, 1e-4)
