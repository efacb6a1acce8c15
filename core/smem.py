"""How much shared memory a block of a Mosaic GPU kernel takes: one count for kernels, `check` functions and tests."""

from __future__ import annotations

import math
from collections.abc import Iterable

ALIGNMENT = 1024  # Mosaic starts every buffer at a multiple: a 128-byte swizzle repeats every 8 rows of 128 bytes
BARRIER_BYTES = 8  # an mbarrier is one 64-bit word


def block_bytes(buffers: Iterable[tuple[tuple[int, ...], int]], barriers: int) -> int:
    """Bytes of shared memory a block needs for `buffers`, each (shape, bytes per element), and `barriers` mbarriers."""
    size = 0
    for shape, itemsize in buffers:
        size = -(-size // ALIGNMENT) * ALIGNMENT + math.prod(shape) * itemsize
    return size + BARRIER_BYTES * barriers
