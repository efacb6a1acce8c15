"""How the devices of some mesh axes reach each other, and which of these axes lie within a host."""

from __future__ import annotations

import math
import os
from collections.abc import Sequence
from typing import Any

import jax
from jax import lax

from mgpu_ops.collectives import topology
from mgpu_ops.collectives.exchange import Axes
from mgpu_ops.collectives.schedules import Transport
from mgpu_ops.registry import job


def axes_of(op: str, axis_name: Any) -> Axes:
    """The names and sizes of the axes that a call names. ValueError for one that is not there, or is named twice."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names:
        raise ValueError(f"axis_name={axis_name!r} names no axis: {op} runs over one or more axes of the mesh")
    if len(set(names)) < len(names):
        raise ValueError(f"axis_name={axis_name!r} names an axis twice")
    try:
        return tuple((name, lax.axis_size(name)) for name in names)
    except NameError:
        mesh = jax.sharding.get_abstract_mesh()
        there = [name for name in mesh.axis_names if name in mesh.manual_axes]
        known = f"the axes here are {', '.join(map(repr, there))}" if there else "there is none here"
        raise ValueError(f"axis_name={axis_name!r}: {known}. Call {op} inside jax.shard_map over that axis") from None


def unable(axes: Axes, transport: Transport) -> str | None:
    """Why the kernel cannot go over these axes by this transport, wherever it runs, or None."""
    mesh = jax.sharding.get_abstract_mesh()
    names = [name for name, _ in axes]
    if not set(names) <= set(mesh.manual_axes):
        return f"{', '.join(map(repr, names))} is no axis of jax.shard_map's mesh (vmap and pmap have axes of their own)"
    if set(mesh.manual_axes) != set(mesh.axis_names):
        automatic = ", ".join(repr(name) for name in mesh.axis_names if name not in mesh.manual_axes)
        return f"jax.shard_map leaves {automatic} to XLA: kernels need all axes of the mesh to be manual"
    if transport == "multimem" and set(names) != set(mesh.axis_names):
        return "multicast reaches all devices of a mesh, and the call names only some of its axes"
    if job.size() > 1 and not _multicast_wanted():
        return (
            "the job has several processes, where JAX reaches peers through multicast only: one process a host, "
            "and MGPU_OPS_MULTICAST=1 where every GPU of it can"
        )
    return None


def unreachable(forbidden: str | None, transport: Transport) -> str | None:
    """Why this machine's GPUs cannot reach each other by this transport, or None. Where the GPU is a target, they can."""
    if transport == "multimem" and forbidden:
        return f"{forbidden} forbids multicast"
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return None  # compiling for GPUs elsewhere
    numbers = [device.local_hardware_id for device in devices]
    return topology.multicast(numbers) if transport == "multimem" else topology.peer_access(numbers)


def _multicast_wanted() -> bool:
    return os.environ.get("MGPU_OPS_MULTICAST", "").strip() == "1" and topology.multicast_forbidden() is None


def split(axes: Axes, across: str | Sequence[str] | None) -> tuple[Axes, Axes]:
    """The axes within a host, and those between hosts: those named by `across`, else what the processes' devices say.

    JAX's kernels want a mesh whose devices are in the order of their numbers, host by host, so that an axis stays within a host
    if what it and the axes after it span divides a host's devices.
    """
    if across is not None:
        named = {across} if isinstance(across, str) else set(across)
        unknown = named - {name for name, _ in axes}
        if unknown:
            raise ValueError(f"across={across!r} is not among axis_name={tuple(name for name, _ in axes)}")
        return tuple(a for a in axes if a[0] not in named), tuple(a for a in axes if a[0] in named)
    if job.size() == 1:
        return axes, ()
    mesh, here = jax.sharding.get_abstract_mesh(), jax.local_device_count()
    inside = {name for position, name in enumerate(mesh.axis_names) if here % math.prod(mesh.axis_sizes[position:]) == 0}
    return tuple(a for a in axes if a[0] in inside), tuple(a for a in axes if a[0] not in inside)
