"""What the Problems of both ops share: which ones the kernels can run, and the problems of real models."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from typing import Protocol

from mgpu_ops import models
from mgpu_ops.core.limits import MAX_SIZE, itemsize_of, supports_rows, supports_sizes
from mgpu_ops.grouped.sizes import SPREADS


class GroupedProblem(Protocol):
    """The fields that the Problems of both ops have."""

    @property
    def m(self) -> int: ...
    @property
    def n(self) -> int: ...
    @property
    def k(self) -> int: ...
    @property
    def groups(self) -> int: ...
    @property
    def dtype(self) -> str: ...
    @property
    def out_dtype(self) -> str: ...
    @property
    def spread(self) -> str: ...
    @property
    def group_offset(self) -> bool: ...


class MixedProblem(GroupedProblem, Protocol):
    """One whose operands may have two dtypes."""

    @property
    def rhs_dtype(self) -> str:
        """ "none": dtype."""


MAX_ROWS = 2**28 - 256  # a window's first row is written eightfold, in 32 bits (core/tma.py)


def supports_sides(p: GroupedProblem, rows: Mapping[str, tuple[str, int]], tiles: Callable[[], int]) -> str | None:
    """Why no config of either kernel can run a problem of its sides, or None.

    rows: of "lhs" and "rhs", the dimension along their rows, and its length. tiles: the most output tiles, of 64 x 64.
    """
    if p.spread not in SPREADS:
        return f"spread {p.spread!r} is not one of {', '.join(SPREADS)}"
    reason = supports_sizes(p, ("m", "n", "k", "groups"))
    if reason is not None:
        return reason
    if p.m > MAX_ROWS:
        return f"m={p.m} rows are more than {MAX_ROWS}: split them, or pass backend='xla'"
    if tiles() > MAX_SIZE:
        return f"{tiles()} tiles of 64 x 64 are more than {MAX_SIZE}: split the groups, or pass backend='xla'"
    size = itemsize_of(p.dtype)
    of_operands = {name: (*row, size) for name, row in rows.items()}
    return supports_rows(of_operands | {"the output": ("n", p.n, itemsize_of(p.out_dtype))})


MAX_GATHERED = 2**34  # bytes of an lhs whose rows are gathered: a row's place is counted in 16 of them, in 31 bits


def supports_gathered(lhs_rows: int, k: int, itemsize: int) -> str | None:
    """Why the kernels cannot gather rows of an lhs of so many rows of k, or None."""
    if lhs_rows * k * itemsize > MAX_GATHERED:
        return f"lhs_rows={lhs_rows} of k={k} are more than {MAX_GATHERED} bytes: gather the rows before"
    return None


def dtype_of_rhs(p: MixedProblem) -> str:
    """The dtype of rhs."""
    return p.dtype if p.rhs_dtype == "none" else p.rhs_dtype


def flops(problem: GroupedProblem) -> int:
    """Multiplications and additions of a problem whose groups hold all rows."""
    return 2 * problem.m * problem.n * problem.k


def tolerance(problem: GroupedProblem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): about two roundings to the output's dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.out_dtype, 1e-4)


# --- Real models: mixtures of experts

# The products of one mixture-of-experts layer, gate and up fused, under the names of the models' shapes.
LAYERS = {
    f"{name}-{product}": experts
    for name, model in {
        "mixtral-8x7b": "mixtral-8x7b",
        "deepseek-v3-ep8": "deepseek-v3",
        "qwen3-30b": "qwen3-30b-a3b",
        "qwen3-235b": "qwen3-235b-a22b",
    }.items()
    for product, experts in models.MODELS[model].experts.items()
}


def layer_problem[P: GroupedProblem](problem: Callable[..., P], layer: str, tokens: int, spread: str) -> P:
    """The Problem of one product of a layer that so many tokens reach."""
    e = LAYERS[layer]
    return problem(e.rows * tokens, e.n, e.k, e.groups, spread=spread)


# (layer, tokens, spread) of training steps and prefills: hundreds of rows per expert, bound by arithmetic.
TRAINING = [
    ("mixtral-8x7b-gate_up", 2048, "even"),
    ("mixtral-8x7b-gate_up", 8192, "random"),
    ("mixtral-8x7b-down", 8192, "random"),
    ("mixtral-8x7b-down", 32768, "skewed"),
    ("deepseek-v3-ep8-gate_up", 4096, "random"),
    ("deepseek-v3-ep8-gate_up", 4096, "sparse"),
    ("deepseek-v3-ep8-down", 4096, "random"),
    ("deepseek-v3-ep8-down", 4096, "even"),
    ("qwen3-30b-gate_up", 16384, "random"),
    ("qwen3-30b-down", 65536, "skewed"),
    ("qwen3-235b-gate_up", 8192, "even"),
    ("qwen3-235b-gate_up", 8192, "skewed"),
]
# Small batches, and decoding: few rows per expert, bound by reading the weights.
DECODING = [
    ("mixtral-8x7b-gate_up", 16, "random"),
    ("mixtral-8x7b-down", 128, "random"),
    ("deepseek-v3-ep8-gate_up", 16, "random"),
    ("deepseek-v3-ep8-down", 64, "sparse"),
    ("qwen3-30b-gate_up", 64, "random"),
    ("qwen3-235b-gate_up", 256, "random"),
]
MODELS = ("mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b")
