"""What the public functions of the grouped ops share: checks of their arguments."""

from __future__ import annotations

import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import DTypeLike

from mgpu_ops import flags, floats, integers
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.grouped.sizes import SPREADS, Spread, of_shard


def checked_operands(op: str, *operands: tuple[str, Any, int], mixed: Sequence[str] = ()) -> list[jax.Array]:
    """Operands (name, argument, rank) as arrays. Raises for another rank, for one that is no floats, and for two dtypes.

    mixed: dtypes that may be together.
    """
    arrays = [floats.array(op, name, x) for name, x, _ in operands]
    for (name, _, rank), x in zip(operands, arrays, strict=True):
        if x.ndim != rank:
            raise ValueError(f"{name} has shape {x.shape}: {op} takes rank {rank}; use jax.vmap for batches")
        if x.dtype != arrays[0].dtype and not {x.dtype.name, arrays[0].dtype.name} <= {*mixed}:
            raise ValueError(f"{operands[0][0]} is {arrays[0].dtype} and {name} is {x.dtype}: cast one with .astype")
    return arrays


def checked_out_dtype(out_dtype: DTypeLike | None, dtype: DTypeLike) -> str:
    """The name of `out_dtype`, by default `dtype`. TypeError for one that is no float."""
    found: str = floats.dtype("out_dtype", dtype if out_dtype is None else out_dtype).name
    return found


def checked_spread(spread: Spread) -> Spread:
    """`spread`. ValueError for an unknown one."""
    return flags.one_of("spread", spread, SPREADS)


def checked_sizes(op: str, sizes: Any, groups: int | None, rows: int, offset: Any = None, matrices: str = "rhs") -> jax.Array:
    """`group_sizes` as int32, or the error that tells what is wrong; with an offset, what `of_shard` makes of them.

    Sizes that are known (NumPy arrays, or JAX arrays outside of jit) are refused when one is negative or their sum exceeds the
    rows. Traced ones are safe whatever they are. matrices: the argument that has `groups` of them.
    """
    integers.check_count("the rows of lhs", rows)
    sizes = integers.array("group_sizes", sizes)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(f"group_sizes has shape {sizes.shape}: {op} takes one size per group, [groups], at least one")
    if groups == 0:
        raise ValueError(f"{matrices} has no groups: {op} takes at least one")
    if offset is not None and groups is not None and sizes.shape[0] < groups:
        raise ValueError(
            f"group_sizes has {sizes.shape[0]} entries but {matrices} has {groups} groups: with group_offset, {op} takes the "
            f"sizes of all groups, of which {matrices} has some"
        )
    if offset is None and groups is not None and sizes.shape[0] != groups:
        raise ValueError(
            f"group_sizes has {sizes.shape[0]} entries but {matrices} has {groups} groups: {op} takes one per group"
        )
    if not isinstance(sizes, jax.core.Tracer):
        known = np.asarray(sizes).tolist()  # Python's integers, whose sum is exact
        if min(known) < 0:
            raise ValueError(f"group_sizes[{known.index(min(known))}]={min(known)} is negative: a group has 0 rows or more")
        if sum(known) > rows:
            raise ValueError(f"group_sizes sum to {sum(known)}, more than the {rows} rows of lhs: {op} cannot serve all groups")
    if offset is None or groups is None:
        return integers.clipped(sizes, rows)
    return of_shard(integers.clipped(sizes, rows), rows, checked_offset(offset, sizes.shape[0], groups, matrices), groups)


def checked_offset(offset: Any, every: int, groups: int, matrices: str = "rhs") -> jax.Array:
    """`group_offset`, the shard's first of `every` group, as an int32 scalar, or the error that tells what is wrong."""
    offset = integers.array("group_offset", offset)
    if offset.shape not in ((), (1,)):
        raise ValueError(f"group_offset has shape {offset.shape}: it is one integer, of shape () or (1,)")
    if not isinstance(offset, jax.core.Tracer) and not 0 <= (known := np.asarray(offset).item()) <= every - groups:
        raise ValueError(
            f"group_offset={known} is not from 0 to {every - groups}: group_sizes has {every} groups, "
            f"of which {matrices} has {groups}"
        )
    return jnp.clip(integers.clipped(offset.reshape(()), every), -groups, every)


def checked_row_indices(indices: Any, rows: int) -> jax.Array:
    """`row_indices` of an lhs of so many rows as int32, or the error that tells what is wrong; traced ones clipped to them."""
    indices = integers.array("row_indices", indices)
    if indices.ndim != 1:
        raise ValueError(f"row_indices has shape {indices.shape}: it is [m], a row of lhs for each row of the result")
    if not rows and indices.size:
        raise ValueError(f"row_indices has {indices.size} entries, but lhs has no rows for them to name")
    return integers.rows("row_indices", indices, "lhs", rows)


def checked_row_scale(op: str, scale: Any, rows: int) -> jax.Array:
    """`row_scale` as float32, or wider where it is."""
    scale = floats.array(op, "row_scale", scale)
    if scale.shape != (rows,):
        raise ValueError(f"row_scale has shape {scale.shape}: it must be [m] = {(rows,)}")
    return scale.astype(np.promote_types(scale.dtype, np.float32))


def checked_residual(op: str, residual: Any, shape: tuple[int, int], out_dtype: str) -> jax.Array:
    """`residual`, of the result's shape and dtype."""
    residual = floats.array(op, "residual", residual)
    if residual.shape != shape:
        raise ValueError(f"residual has shape {residual.shape}: it must be [m, n] = {shape}")
    if residual.dtype != out_dtype:
        raise ValueError(f"residual is {residual.dtype} and the result {out_dtype}: cast it, or pass its dtype as out_dtype")
    return residual


def checked_scales(
    scales: tuple[Any, Any], sides: tuple[int, int, int], groups: int, of_rhs: str = "scale_rhs"
) -> tuple[str, dict[str, jax.Array]]:
    """The kind of scale_lhs and scale_rhs, of `fp8.SCALES`, and the two as float32 arrays of its shapes, or none.

    sides: m, n, k. One number, as a missing scale is, takes the shape that goes with the other scale. Raises ValueError for
    shapes that no kind has. of_rhs: the argument that is scale_rhs.
    """
    if all(x is None for x in scales):
        return "none", {}
    names = ("scale_lhs", "scale_rhs")
    found = [
        jnp.ones((), jnp.float32)
        if x is None
        else floats.array("a grouped product", of_rhs if name == "scale_rhs" else name, x).astype(jnp.float32)
        for name, x in zip(names, scales, strict=True)
    ]
    m, n, k = sides
    parts, across = math.ceil(k / BLOCK), math.ceil(n / BLOCK)
    kinds: dict[str, tuple[Shapes, Shapes]] = {  # the first is that of the op's array
        "tensor": (((1,),), ((groups,),)),
        "row": (((m,), (m, 1)), ((groups, n), (groups, 1, n))),
        "block": (((m, parts),), ((groups, across, parts),)),
    }
    for kind, shapes in kinds.items():
        if all(x.shape in ((), *allowed) for x, allowed in zip(found, shapes, strict=True)):
            return kind, {
                name: jnp.broadcast_to(x, own) if x.ndim == 0 else x.reshape(own)
                for name, x, (own, *_) in zip(names, found, shapes, strict=True)
            }
    raise ValueError(
        f"scale_lhs has shape {found[0].shape} and {of_rhs} {found[1].shape}: of m={m}, n={n}, k={k} and {groups} groups "
        f"they are a number and ({groups},), or of rows and columns {(m,)} and {(groups, n)}, or of blocks of {BLOCK} "
        f"{(m, parts)} and {(groups, across, parts)}"
    )


def check_finite_scales(sizes: jax.Array, group_offset: bool, **scales: Any) -> None:
    """Raises ValueError for known scales, of shapes that fit, of which one is not finite.

    Those of rows count where a group has the row, and so where the sizes are known too: as `checked_sizes` gives them.
    """
    for name, scale in scales.items():
        rows = None
        if name == "scale_lhs" and not isinstance(scale, jax.core.Tracer) and np.size(scale) > 1:
            if isinstance(sizes, jax.core.Tracer):
                continue
            known = np.asarray(sizes).tolist()
            first = known.pop(0) if group_offset else 0
            rows = slice(first, first + sum(known))
        floats.check_finite(name, scale, np.float32, rows)


type Shapes = tuple[tuple[int, ...], ...]
