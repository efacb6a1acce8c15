"""Arrays inside `jax.shard_map`: over which mesh axes their values differ."""

from __future__ import annotations

import jax
from jax import lax


def same_mesh_axes(*arrays: jax.Array, but: tuple[str, ...] = ()) -> tuple[jax.Array, ...]:
    """The arrays, each typed as varying over every mesh axis that any of them varies over inside `jax.shard_map`.

    Axes in `but` are not added. JAX's own operations do this to their operands, too. The transpose then sums a replicated
    operand's cotangent over the mesh.
    """
    varying = [jax.typeof(x).manual_axis_type.varying for x in arrays]
    every = frozenset().union(*varying) - set(but)
    return tuple(
        lax.pcast(x, tuple(sorted(every - v)), to="varying") if every - v else x for x, v in zip(arrays, varying, strict=True)
    )
