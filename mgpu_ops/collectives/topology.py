"""What the GPUs of this machine can do with each other's memory, as the CUDA driver says. Nothing is allocated or mapped."""

from __future__ import annotations

import ctypes
import functools
import itertools
import os
from collections.abc import Sequence
from typing import Any, Final

_MULTICAST_SUPPORTED: Final = 132  # CU_DEVICE_ATTRIBUTE_MULTICAST_SUPPORTED
_SWITCHES: Final = ("NCCL_NVLS_ENABLE", "MGPU_OPS_MULTICAST")
_NO: Final = ("0", "false", "off", "no")


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
