"""How much shared memory a block of a Mosaic GPU kernel takes: one count for kernels, `check` functions and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable

ALIGNMENT = 1024  # Mosaic starts every buffer at a multiple: a 128-byte swizzle repeats every 8 rows of 128 bytes
BARRIER_BYTES = 8  # an mbarrier is one 64-bit word

Buffer = tuple[tuple[int, ...], int]  # its shape and bytes per element


def block_bytes(buffers: Iterable[Buffer], barriers: int) -> int:
    """Bytes of shared memory a block needs for `buffers` and `barriers` mbarriers."""
    size = 0
    for shape, itemsize in buffers:
        size = -(-size // ALIGNMENT) * ALIGNMENT + math.prod(shape) * itemsize
    return size + BARRIER_BYTES * barriers
