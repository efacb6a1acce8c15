"""What the cross-entropy of a vocabulary is (`Problem`), how it may be run (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import REDUCTIONS, block_bytes, check_fields, itemsize_of, supports_sizes
from mgpu_ops.models import MODELS

LANES = 128  # columns of a part of a row: TMA copies a row as [vocabulary / 128, 128]
DTYPES = ("bfloat16", "float16", "float32")
MAX_ELEMENTS = 2**31 - 1  # of the logits, which the kernel addresses in 32 bits

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """lse[t] = log(sum_v exp(x[t, v])) and loss[t] = lse[t] - x[t, label[t]], or the gradient of the logits x.

    rows: of x, the tokens.
    vocabulary: columns of x.
    dtype: of x, "bfloat16", "float16" or "float32" in the kernel. loss and lse are float32.
    gradient: whether the result is exp(x[t, v] - lse[t]) p[t] - (v == label[t]) q[t], of dtype, of numbers p[t], q[t].
    """

    rows: int
    vocabulary: int
    dtype: str = "bfloat16"
    gradient: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result but for the order of its sum.

    blocks: on an SM at once, of one warpgroup each, which works on rows of its own: 1, 2 or 4.
    tile: columns that a block works on at a time: 128, 512, 1024, 2048, 4096 or 8192.
    stages: tiles that a block has loaded or is loading: 2, 3, 4, 6 or 8.
    """

    blocks: int
    tile: int
    stages: int


SPACE: dict[str, Sequence[int]] = {
    "blocks": (1, 2, 4),
    "tile": (128, 512, 1024, 2048, 4096, 8192),
    "stages": (2, 3, 4, 6, 8),
}

_MODELS = ("mistral-7b", "llama3-8b", "qwen3-30b-a3b", "gpt-oss-20b", "gemma2-9b")  # 32000 to 256000
_TOKENS = (512, 4096)


SHAPES = {f"{model}-{m}": Problem(m, MODELS[model].projections["logits"].n) for model in _MODELS for m in _TOKENS}
_FORWARD = list(SHAPES)
SHAPES |= {f"{name}-gradient": dataclasses.replace(SHAPES[name], gradient=True) for name in _FORWARD}
SUITES: dict[str, Sequence[str]] = {"llm": _FORWARD, "gradient": [name for name in SHAPES if name not in _FORWARD]}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU, the only ones that the kernel was written for; use backend='xla'"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype} is not one of {', '.join(DTYPES)}: cast, or use backend='xla'"
    if reason := supports_sizes(p, ("rows", "vocabulary")):
        return reason
    if p.vocabulary % LANES:
        padded = -(-p.vocabulary // LANES) * LANES
        return (
            f"vocabulary={p.vocabulary} is no multiple of {LANES}: pad the logits with -inf to {padded}, or use backend='xla'"
        )
    if p.rows * p.vocabulary > MAX_ELEMENTS:
        return f"{p.rows * p.vocabulary} logits are more than {MAX_ELEMENTS}: split the tokens, or use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason."""
    if reason := supports(problem, gpu) or outside(SPACE, config):
        return reason
    if config.tile > problem.vocabulary:
        return f"tile={config.tile} is more than the vocabulary, {problem.vocabulary}: take a smaller one"
    own = smem_bytes(problem, config)
    if config.blocks * (own + _OF_A_BLOCK) > gpu.smem_per_block + _OF_A_BLOCK:
        return f"{config.blocks} blocks of {own} bytes of shared memory do not fit on an SM of {gpu.name}: use fewer stages"
    return None


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    c, itemsize = config, itemsize_of(problem.dtype)
    buffers = [((c.stages, c.tile), itemsize)]
    if problem.gradient:
        return block_bytes([*buffers, ((2, c.tile), itemsize)], c.stages)
    return block_bytes(buffers, c.stages) + REDUCTIONS


_OF_A_BLOCK = 1024  # bytes of an SM's shared memory that the system takes for each block

# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """An exponential, a subtraction, and a sum, or a product, of each logit."""
    return 3 * problem.rows * problem.vocabulary


def bytes_moved(problem: Problem) -> int:
    """The logits read once, or read and written once, and what each token has: a label, loss and lse, or lse and p and q."""
    p = problem
    return (1 + p.gradient) * p.rows * p.vocabulary * itemsize_of(p.dtype) + p.rows * (16 if p.gradient else 12)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal logits and labels; for the gradient also their lse, and the p and q of the mean over tokens."""
    p = problem
    logits_key, labels_key = jax.random.split(key)
    logits = jax.random.normal(logits_key, (p.rows, p.vocabulary), p.dtype)
    labels = jax.random.randint(labels_key, (p.rows,), 0, p.vocabulary, jnp.int32)
    if not p.gradient:
        return logits, labels
    each = jnp.ones((p.rows,), jnp.float32)
    return logits, labels, jax.nn.logsumexp(logits.astype(jnp.float32), axis=1), each, each


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): a rounding of a gradient's dtype, or of float32 sums."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.dtype, 1e-4) if problem.gradient else 1e-4
