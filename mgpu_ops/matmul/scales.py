"""The scales of a matmul's operands: which kind their shapes are, and the arrays that the op takes of them."""

from __future__ import annotations

import jax
import jax.numpy as jnp

from mgpu_ops.core.fp8 import BLOCK

type Shape = tuple[int, ...]
type Pair = tuple[jax.Array | None, jax.Array | None]


def checked_scales(scales: Pair, sides: tuple[int, int, int], leads: tuple[Shape, Shape]) -> tuple[str, Pair]:
    """The kind of two float32 scales, of `problem.SCALES`, and the scales in its shapes behind leading dimensions.

    sides: m, n, k. leads: the leading dimensions of a and b. One number, as a missing scale is, takes the shape that goes with
    the other scale. Raises ValueError for shapes that no kind has.
    """
    a, b = scales
    if a is None and b is None:
        return "none", (None, None)
    a, b = (jnp.ones((), jnp.float32) if x is None else x for x in (a, b))
    m, n, k = sides
    parts = -(-k // BLOCK)
    of_a, of_b = leads
    blocks_b = -(-n // BLOCK)
    shapes: dict[str, tuple[list[Shape], list[Shape]]] = {  # of scale_a and of scale_b; the first is that of the op's array
        "tensor": ([(1,)], [(1,)]),
        "row": ([(*of_a, m), (*of_a, m, 1)], [(*of_b, n), (*of_b, 1, n)]),
        "block": ([(*of_a, m, parts)], [(*of_b, blocks_b, parts)]),
    }
    for kind, (shapes_a, shapes_b) in shapes.items():
        if a.shape in ((), *shapes_a) and b.shape in ((), *shapes_b):
            return kind, (_as(a, shapes_a[0]), _as(b, shapes_b[0]))
    raise ValueError(
        f"scale_a has shape {a.shape} and scale_b {b.shape}: of a{(*of_a, m, k)} and b{(*of_b, k, n)} they are numbers, "
        f"or of rows and columns {(*of_a, m)} and {(*of_b, n)}, or of blocks of {BLOCK} {shapes['block'][0][0]} and "
        f"{shapes['block'][1][0]}"
    )


def _as(x: jax.Array, shape: Shape) -> jax.Array:
    return jnp.broadcast_to(x, shape) if x.ndim == 0 else x.reshape(shape)
