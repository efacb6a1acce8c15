"""What the tests of grouped_matmul and ragged_contraction share: a small config, and the truth in float64."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops import GroupedMatmulConfig, RaggedContractionProblem

BASE = GroupedMatmulConfig(
    tile_m=64,
    tile_n=64,
    tile_k=64,
    max_concurrent_steps=2,
    compute_warpgroups=1,
    wg_dimension="m",
    raster_width=2,
    epilogue_tile_n=64,
    epilogue_slots=1,
    memory_registers=40,
)

ACTIVATIONS = {
    "none": lambda x: x,
    "relu": lambda x: np.maximum(x, 0),
    "silu": lambda x: x / (1 + np.exp(-x)),
    "gelu": lambda x: 0.5 * x * (1 + np.tanh(np.sqrt(2 / np.pi) * (x + 0.044715 * x**3))),
}


def float64(x: Any) -> np.ndarray:
    return np.asarray(x).astype(np.float64)


def spans(sizes: Iterable[Any], rows: int) -> Iterator[slice]:
    """The rows of each group: a negative size is 0, and groups end where the rows end."""
    end = 0
    for size in sizes:
        start, end = end, min(end + max(int(size), 0), rows)
        yield slice(start, end)


def grouped(
    lhs: Any, rhs: Any, sizes: Any, bias: Any = None, *, activation: str = "none", transpose_rhs: bool = False
) -> np.ndarray:
    """The grouped matmul in float64; zeros for rows of no group."""
    lhs, rhs = float64(lhs), float64(rhs)
    rhs = rhs.swapaxes(1, 2) if transpose_rhs else rhs
    out = np.zeros((lhs.shape[0], rhs.shape[2]))
    for group, rows in enumerate(spans(sizes, lhs.shape[0])):
        values = lhs[rows] @ rhs[group]
        out[rows] = ACTIVATIONS[activation](values if bias is None else values + float64(bias)[group])
    return out


def contraction(lhs: Any, rhs: Any, sizes: Any) -> np.ndarray:
    """The ragged contraction in float64; zeros for an empty group."""
    lhs, rhs = float64(lhs), float64(rhs)
    return np.stack([lhs[rows].T @ rhs[rows] for rows in spans(sizes, lhs.shape[0])])


def truth(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *bias: Any) -> np.ndarray:
    """What a problem of either op gives, in float64."""
    if isinstance(problem, RaggedContractionProblem):
        return contraction(lhs, rhs, sizes)
    return grouped(lhs, rhs, sizes, *bias, activation=problem.activation, transpose_rhs=problem.layout == "nt")


def rest(problem: Any, sizes: Sequence[int]) -> Any:
    """Index of what must be zero in the output: rows of no group, or the contractions of empty groups."""
    groups = list(spans(sizes, problem.m))
    if isinstance(problem, RaggedContractionProblem):
        return np.array([rows.start == rows.stop for rows in groups])
    return slice(groups[-1].stop, None)


def poisoned(problem: Any, sizes: Sequence[int], lhs: Any, rhs: Any, *bias: Any) -> tuple[np.ndarray, ...]:
    """The operands, with NaN wherever the output does not depend on them: rows of no group, matrices of empty groups."""
    lhs, rhs, *bias = (np.array(x) for x in (lhs, rhs, *bias))
    groups = list(spans(sizes, problem.m))
    lhs[groups[-1].stop :] = np.nan
    if isinstance(problem, RaggedContractionProblem):
        rhs[groups[-1].stop :] = np.nan
    else:
        for x in (rhs, *bias):
            x[[rows.start == rows.stop for rows in groups]] = np.nan
    return lhs, rhs, *bias


def plain_grouped(
    lhs: jax.Array,
    rhs: jax.Array,
    sizes: jax.Array,
    bias: jax.Array | None = None,
    *,
    activation: str = "none",
    transpose_rhs: bool = False,
) -> jax.Array:
    """The grouped matmul in plain JAX, for gradients: each row times the matrix of its group."""
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    values = jnp.einsum("mk,mnk->mn" if transpose_rhs else "mk,mkn->mn", lhs, rhs[group], precision="highest")
    if bias is not None:
        values += bias[group]
    functions = {"none": lambda x: x, "relu": jax.nn.relu, "silu": jax.nn.silu, "gelu": jax.nn.gelu}
    return jnp.where(inside[:, None], functions[activation](values), 0)


def plain_contraction(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    group, inside = _group_of_rows(sizes, lhs.shape[0])
    member = (group[:, None] == jnp.arange(len(sizes))) & inside[:, None]
    return jnp.einsum("mg,mk,mn->gkn", member.astype(lhs.dtype), lhs, rhs, precision="highest")


def _group_of_rows(sizes: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    group = jnp.searchsorted(jnp.cumsum(sizes), jnp.arange(rows), side="right")
    return jnp.minimum(group, len(sizes) - 1), group < len(sizes)
