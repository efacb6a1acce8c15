"""How the kernel lays out and stages what a collective moves (`CollectiveKernel`), and the memory of a workspace
(`LLMemory`).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable
from typing import Any, Final

import jax
import jax.numpy as jnp

from mgpu_ops.collectives.schedules import Buffer, Cut, Move, Schedule

type Axes = tuple[tuple[str, int], ...]  # of a mesh: names and sizes

ROW_BYTES: Final = 512  # 128 threads take four bytes each
LL_WORDS: Final = 2 * ROW_BYTES // 4  # int32 of a row with its LL flags
REDUCTIONS: Final = {"add": jnp.add, "min": jnp.minimum, "max": jnp.maximum}
WORKSPACE_BLOCKS: Final = 64  # of every call in a workspace: each block counts its calls
OUTBOX_STAGES: Final = 2
ROWS_AT_ONCE: Final = 16  # that a warpgroup holds in registers, of each operand and of the sum


@dataclasses.dataclass(frozen=True)
class CollectiveKernel:
    """A schedule, and how the kernel cuts and stages what it moves.

    rows: of a slice, of ROW_BYTES each.
    dtype: of the payload. reduction: "add", "min" or "max".
    axes: the mesh axes whose devices take part, with their sizes, the last the fastest.
    blocks: thread blocks a device. chunk: rows of a chunk. stages: chunks in flight in a block.
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
        """Elements of a row."""
        return ROW_BYTES // jnp.dtype(self.dtype).itemsize

    @property
    def cut(self) -> Cut:
        """The payload as chunks, in rows."""
        return Cut(self.rows * self.slices, self.slices, min(self.chunk, self.rows), self.blocks)

    @property
    def tma_moves(self) -> tuple[Move, ...]:
        """The moves that go through shared memory."""
        return tuple(move for move in self.schedule.moves if not move.through_switch and not move.ll)

    @property
    def smem_bytes(self) -> int:
        """Shared memory of a block, without barriers: the inbox's stages, and the outbox's where a move reduces."""
        chunks = self.stages * max((len(move.reads) for move in self.tma_moves), default=0)
        chunks += OUTBOX_STAGES * any(len(move.reads) > 1 for move in self.tma_moves)
        return chunks * self.cut.chunk * ROW_BYTES

    def parts(self, buffer: Buffer) -> int:
        """How many slices a buffer holds."""
        kind = self.schedule.kind
        if buffer == "scratch":
            return self.schedule.scratch_slices // self.schedule.n * self.slices
        return 1 if (kind, buffer) in (("all_gather", "x"), ("reduce_scatter", "out")) else self.slices

    def shape(self, buffer: Buffer) -> tuple[int, int, int]:
        return self.parts(buffer), self.rows, self.columns


def reduced(reduction: str, values: Iterable[jax.Array]) -> jax.Array:
    """The values, reduced in their order, and rounded to their dtype once; floats are reduced in float32.

    Each value is asked for just before it is added, so that two are in registers at a time.
    """
    others = iter(values)
    first = next(others)
    wide = jnp.float32 if jnp.issubdtype(first.dtype, jnp.floating) else first.dtype
    total = first.astype(wide)
    for other in others:
        total = REDUCTIONS[reduction](total, other.astype(wide))
    return total.astype(first.dtype)


@dataclasses.dataclass(frozen=True)
class LLMemory:
    """For LL schedules: memory that stays from call to call, at addresses that stay the same, and of which XLA knows nothing.

    The kernel reaches peers without XLA's help: it needs no look-up of addresses, no zeroed memory and no barrier before it,
    and it goes into CUDA graphs. The memory has two halves, which calls use alternately. When a device begins the second call
    after this one, it has received all that the others sent in the next call. So they have finished this one: its half is free.

    Calls are counted in an int32 that wraps (`executor.half_and_flag`). A word that 2^32 - 2 calls left as it was would pass
    for new.

    where: a ref of int32 [1, `where_words(n)`], which keeps the calls of a program in order: the device's index along the axes,
      and the addresses of its memory, of that of the next device, and so on, low words first.
    rows: of a part. Each half has n times as many rows; one more row, after both, holds the blocks' counts of calls. All is
      zero at first.
    """

    where: Any
    rows: int


def where_words(n: int) -> int:
    """int32 of `LLMemory.where` for n devices."""
    return 1 + 2 * n


def ll_memory_rows(n: int, rows: int) -> int:
    """Rows of an `LLMemory` for n devices, of LL_WORDS int32 each."""
    return 2 * n * rows + 1
