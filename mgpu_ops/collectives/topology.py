"""How the devices of some mesh axes reach each other: which axes lie within a host, and what the GPUs' driver allows.

The driver is only asked: nothing is allocated or mapped.
"""

from __future__ import annotations

import contextlib
import ctypes
import functools
import itertools
import math
import os
from collections.abc import Sequence
from typing import Any, Final

import jax
from jax import lax

from mgpu_ops.collectives.layout import Axes
from mgpu_ops.registry import job

_MULTICAST_SUPPORTED: Final = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
_SWITCHES: Final = ("NCCL_NVLS_ENABLE", "MGPU_OPS_MULTICAST")
_NO: Final = ("0", "false", "off", "no")


# --- Axes of the mesh


def axes_of(op: str, axis_name: Any) -> Axes:
    """The names and sizes of the axes that a call names. ValueError for one that is not there, or is named twice."""
    names = tuple(axis_name) if isinstance(axis_name, tuple | list) else (axis_name,)
    if not names:
        raise ValueError(f"axis_name={axis_name!r} names no axis: {op} runs over one or more axes of the mesh")
    with contextlib.suppress(NameError, TypeError):  # TypeError: a list among the names
        if len(set(names)) < len(names):
            raise ValueError(f"axis_name={axis_name!r} names an axis twice")
        if not any(isinstance(name, int) for name in names):  # JAX takes one for the number of a dimension
            return tuple((name, lax.axis_size(name)) for name in names)
    mesh = jax.sharding.get_abstract_mesh()
    there = [name for name in mesh.axis_names if name in mesh.manual_axes]
    known = f"the axes here are {', '.join(map(repr, there))}" if there else "there is none here"
    raise ValueError(f"axis_name={axis_name!r}: {known}. Call {op} inside jax.shard_map over that axis")


def unable(axes: Axes, transport: str) -> str | None:
    """Why the kernel cannot run over these axes by this transport, on any machine, or None."""
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


def unreachable(forbidden: str | None, transport: str) -> str | None:
    """Why this machine's GPUs cannot reach each other by this transport, or None. GPUs that are only compiled for can."""
    if transport == "multimem" and forbidden:
        return f"{forbidden} forbids multicast"
    devices = jax.local_devices()
    if devices[0].platform != "gpu":
        return None  # compiling for GPUs elsewhere
    numbers = [device.local_hardware_id for device in devices]
    return multicast(numbers) if transport == "multimem" else peer_access(numbers)


def _multicast_wanted() -> bool:
    return os.environ.get("MGPU_OPS_MULTICAST", "").strip() == "1" and multicast_forbidden() is None


def split(axes: Axes, across: str | Sequence[str] | None) -> tuple[Axes, Axes]:
    """The axes within a host, and those between hosts: the ones in `across`, by default as the job's processes have devices.

    Kernels with peers need a mesh whose devices are in the order of their numbers, host by host. So an axis lies within a host
    if the number of devices along it and the axes after it divides a host's devices.
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


# --- The GPUs of this machine


def multicast_forbidden() -> str | None:
    """The environment variable that forbids multicast between GPUs, with its value, or None."""
    for name in _SWITCHES:
        value = os.environ.get(name, "")
        if value.strip().lower() in _NO:
            return f"{name}={value}"
    return None


def peer_access(devices: Sequence[int]) -> str | None:
    """Why not each of these GPUs (local hardware numbers) can read the others' memory, or None."""
    for a, b in itertools.permutations(devices, 2):
        if not _can_access(a, b):
            return f"GPU {a} cannot access the memory of GPU {b}: they share no NVLink domain"
    return None


def multicast(devices: Sequence[int]) -> str | None:
    """Why not all of these GPUs can multicast, or None."""
    forbidden = multicast_forbidden()
    if forbidden:
        return f"{forbidden} forbids multicast"
    for device in devices:
        if not _attribute(device, _MULTICAST_SUPPORTED):
            return f"GPU {device} supports no multicast: its driver finds no switch that can"
    return peer_access(devices)


@functools.cache
def _driver() -> Any:
    try:
        cuda = ctypes.CDLL("libcuda.so.1")
    except OSError:
        return None
    return cuda if cuda.cuInit(0) == 0 else None


@functools.cache
def _device(number: int) -> int:
    device = ctypes.c_int()
    return device.value if _driver().cuDeviceGet(ctypes.byref(device), number) == 0 else -1


@functools.cache
def _attribute(number: int, attribute: int) -> int:
    value = ctypes.c_int()
    found = _driver() is not None and _driver().cuDeviceGetAttribute(ctypes.byref(value), attribute, _device(number)) == 0
    return value.value if found else 0


@functools.cache
def _can_access(a: int, b: int) -> bool:
    value = ctypes.c_int()
    found = _driver() is not None and _driver().cuDeviceCanAccessPeer(ctypes.byref(value), _device(a), _device(b)) == 0
    return bool(found and value.value)
