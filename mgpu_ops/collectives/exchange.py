"""What the executor is given: an `Exchange`, and a `Memory` for what stays from call to call."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp

from mgpu_ops.collectives.schedules import Buffer, Cut, Move, Schedule

type Axes = tuple[tuple[str, int], ...]  # of a mesh: names and sizes

ROW_BYTES: Final = 512  # 128 threads take four bytes each
LINE_WORDS: Final = 2 * ROW_BYTES // 4  # int32 of a row in lines
REDUCTIONS: Final = {"add": jnp.add, "min": jnp.minimum, "max": jnp.maximum}
WORKSPACE_BLOCKS: Final = 64  # of every call with a `Memory`: each counts its calls
OUTBOX = 2
ROWS_AT_ONCE: Final = 16  # that a warpgroup holds in registers, of each operand and of the sum


@dataclasses.dataclass(frozen=True)
class Exchange:
    """A schedule, and how the kernel cuts and stages what it moves.

    rows: of a slice, of ROW_BYTES each. reduction: "add", "min" or "max". axes: the mesh axes whose devices take part, with
    their sizes, the last the fastest. blocks: thread blocks a device. chunk: rows of a piece. stages: pieces under way a block.
    """

    schedule: Schedule
    rows: int
    dtype: Any
    reduction: str
    axes: Axes
    blocks: int
    chunk: int
    stages: int

    @property
    def names(self) -> tuple[str, ...]:
        """Of the axes."""
        return tuple(name for name, _ in self.axes)

    @property
    def slices(self) -> int:
        return self.schedule.slices

    @property
    def columns(self) -> int:
        return ROW_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def cut(self) -> Cut:
        return Cut(self.rows * self.slices, self.slices, min(self.chunk, self.rows), self.blocks)

    @property
    def staged(self) -> tuple[Move, ...]:
        """The moves that go through shared memory."""
        return tuple(move for move in self.schedule.moves if not move.through_switch and not move.in_lines)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, without barriers."""
        boxes = self.stages * max((len(move.reads) for move in self.staged), default=0)
        boxes += OUTBOX * any(len(move.reads) > 1 for move in self.staged)
        return boxes * self.cut.chunk * ROW_BYTES

    def parts(self, buffer: Buffer) -> int:
        kind = self.schedule.kind
        if buffer == "scratch":
            return self.schedule.scratch_slices // self.schedule.n * self.slices
        return 1 if (kind, buffer) in (("all_gather", "x"), ("reduce_scatter", "out")) else self.slices

    def shape(self, buffer: Buffer) -> tuple[int, int, int]:
        return self.parts(buffer), self.rows, self.columns


def reduced(reduction: str, values: Iterable[jax.Array]) -> jax.Array:
    """The values, each taken when its turn comes, reduced in this order, floats in float32, and rounded to their dtype once."""
    others = iter(values)
    first = next(others)
    wide = jnp.float32 if jnp.issubdtype(first.dtype, jnp.floating) else first.dtype
    total = first.astype(wide)
    for other in others:
        total = REDUCTIONS[reduction](total, other.astype(wide))
    return total.astype(first.dtype)


@dataclasses.dataclass(frozen=True)
class Memory:
    """For schedules in lines: lines that stay from call to call, at addresses that stay the same, which XLA does not know.

    The kernel then reaches peers without XLA's help: no look-up of addresses, no zeros, no barrier, and it goes into CUDA
    graphs. Calls take turns with the two halves: who begins the second call after this one has all that the others sent in the
    next one, so that they are done with this one.

    Calls are counted in an int32 that wraps: `turn`. A line that 2^32 - 2 calls left as it was would seem to be there at once.

    where: a ref of int32 [1, `where_words(n)`], which keeps the calls of a program in order: the device's index along the axes,
    and the addresses of its lines, of those of the next device, and so on, low words first.
    rows: lines have 2 halves of n times as many rows, and one more in which blocks count calls; zeros at first.
    """

    where: Any
    rows: int


def where_words(n: int) -> int:
    return 1 + 2 * n


def memory_rows(n: int, rows: int) -> int:
    """Of LINE_WORDS int32 each."""
    return 2 * n * rows + 1
