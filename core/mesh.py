"""Arrays over the devices of a mesh: inside `jax.shard_map`, or in a program that XLA partitions."""

from __future__ import annotations

import contextlib
import contextvars
import math
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax
from jax._src import core as _core
from jax._src import mesh as _mesh
from jax._src.sharding_impls import ShardingContext, SPMDAxisContext
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops.core import gpu
from mgpu_ops.core.contexts import having


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


def mesh_of(arrays: Sequence[jax.Array]) -> jax.sharding.AbstractMesh:
    """The mesh that code traced now is for, so far as context and the arrays' types say: for automatic axes often none."""
    mesh = jax.sharding.get_abstract_mesh()
    if not mesh.empty:
        return mesh
    return next((own for x in arrays if not (own := jax.typeof(x).sharding.mesh).empty), mesh)


def explicit_axes(mesh: jax.sharding.AbstractMesh) -> tuple[str, ...]:
    """Those over which the arrays' types say how they are split."""
    return tuple(n for n, t in zip(mesh.axis_names, mesh.axis_types, strict=True) if t == AxisType.Explicit)


def as_rows(name: str, x: jax.Array, kept: int = 1) -> jax.Array:
    """The argument `name` with all its dimensions but the last `kept` ones in one.

    ValueError where JAX says that explicit axes split one of them which is not the first: equal parts of rows are then no rows.
    """
    lead = x.shape[: x.ndim - kept]
    try:
        return x.reshape(math.prod(lead), *x.shape[x.ndim - kept :])
    except _core.ShardingTypeError:
        raise ValueError(
            f"{name} is {jax.typeof(x)}: its first {len(lead)} dimensions become one, and over explicit axes of a mesh only "
            f"the first of them is split: pass jax.sharding.reshard({name}, jax.P(axes of the mesh))"
        ) from None


def split_as(x: jax.Array, other: jax.Array) -> jax.Array:
    """x with its leading dimension split over explicit axes as that of `other` is; over other axes XLA splits it."""
    sharding = jax.typeof(other).sharding
    if not explicit_axes(sharding.mesh) or sharding.spec[0] is None:
        return x
    return jax.sharding.reshard(x, PartitionSpec(sharding.spec[0]))


def all_axes() -> contextlib.AbstractContextManager[Any]:
    """`jax.shard_map` may then split over all axes, also over one of a dimension that vmap maps, as our ops take it whole."""
    return _core.remove_explicit_mesh_axis_names(_core.get_axis_env().explicit_mesh_axis_names)


def may_be_partitioned(mesh: jax.sharding.AbstractMesh) -> bool:
    """Whether XLA may partition what is traced now. Where no type names a mesh, any of several devices may be in one."""
    if mesh.empty:
        return gpu.targeted() is None and jax.device_count() > 1
    if not jax.sharding.get_abstract_mesh().empty and _mesh.get_concrete_mesh().empty:
        return False  # inside `jax.shard_map`, or for no devices
    return AxisType.Auto in mesh.axis_types and mesh.size > 1 and mesh.abstract_device is not None


_part: contextvars.ContextVar[bool] = contextvars.ContextVar("a part of a partitioned program", default=False)


def within_part(context: Any) -> contextlib.AbstractContextManager[None]:
    """What is traced and lowered within, in this `mlir.ModuleContext`, stands for a call on one device.

    With several devices it is what XLA's partitioner puts in the call's place.
    """
    return having(_part, isinstance(context.axis_context, SPMDAxisContext))


def is_part() -> bool:
    """Whether what is traced or lowered now is what XLA's partitioner puts in a call's place."""
    return _part.get()


def is_for_several_devices() -> bool:
    """Whether what is traced now runs on each of several devices, in a program that may have collectives."""
    mesh = jax.sharding.get_abstract_mesh()
    axes = zip(mesh.axis_sizes, mesh.axis_types, strict=True)
    return is_part() or any(size > 1 and kind == AxisType.Manual for size, kind in axes)


def is_partitioned(context: Any) -> bool:
    """Whether XLA partitions the program that is lowered in this `mlir.ModuleContext`, over a mesh that is known."""
    axes = context.axis_context
    if not isinstance(axes, ShardingContext) or axes.num_devices == 1 or context.lowering_parameters.for_export:
        return False
    return axes.abstract_mesh is not None or not _mesh.thread_resources.env.physical_mesh.empty
