"""Tiles of a GEMM kernel: which ones Hopper runs, what they take of an SM, and how long a pipeline step of one takes.

A block computes an output tile of tile_m x tile_n in pipeline steps of tile_k. Its consumer warpgroups share the tile along m
or n. The Configs of all GEMM ops have the fields of `Tiled`; what else an op asks of a config is in its own `check`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any, Protocol

from mgpu_ops.core import limits, rates
from mgpu_ops.core.gpu import Gpu

ROWS = 64  # of a wgmma, and so of an epilogue tile
_COLUMNS = 256  # at most, of a wgmma
_BOX = 256  # elements along a side of a TMA copy, at most
_ADDRESSES = 40  # registers of a consumer thread beside its accumulator, about
SLOTS = 4  # tiles handed out that a block has not finished, at most: so far may the producer be ahead of the consumers


class Tiled(Protocol):
    """The fields of a Config that describe its tile."""

    @property
    def tile_m(self) -> int: ...
    @property
    def tile_n(self) -> int: ...
    @property
    def tile_k(self) -> int: ...
    @property
    def max_concurrent_steps(self) -> int:
        """Stages of the pipeline."""

    @property
    def compute_warpgroups(self) -> int:
        """Consumer warpgroups."""

    @property
    def wg_dimension(self) -> str:
        """ "m" or "n": the side of the tile that consumer warpgroups share."""

    @property
    def epilogue_tile_n(self) -> int:
        """Columns of an epilogue tile, which has `ROWS` rows."""

    @property
    def memory_registers(self) -> int:
        """Registers of a producer thread."""

    @property
    def takes_turns(self) -> bool:
        """Whether each consumer warpgroup computes output tiles of its own, in turn."""


# --- What a consumer warpgroup has of a tile


SCHEDULES = ("cooperative", "pingpong")


def warpgroup_tile(c: Tiled) -> tuple[int, int]:
    """Rows and columns of the output tile that one consumer warpgroup computes."""
    if c.compute_warpgroups == 1 or c.takes_turns:
        return c.tile_m, c.tile_n
    sharing = c.compute_warpgroups
    return (c.tile_m // sharing, c.tile_n) if c.wg_dimension == "m" else (c.tile_m, c.tile_n // sharing)


def epilogue_tiles(c: Tiled) -> int:
    """Epilogue tiles in which one consumer warpgroup stores its part of the output tile."""
    wg_m, wg_n = warpgroup_tile(c)
    return (wg_m // ROWS) * math.ceil(wg_n / c.epilogue_tile_n)


def accumulator_registers(c: Tiled) -> int:
    """Registers of each consumer thread that hold float32 sums."""
    return math.prod(warpgroup_tile(c)) // limits.WARPGROUP


# --- Which tiles are legal. Each function returns the first reason against a config, or None.


def check_choices(c: Any, choices: Mapping[str, Sequence[Any]]) -> str | None:
    """Fields of a config with one of a few values. `Tiled` has two of them: call it before the other checks."""
    for field, allowed in {"compute_warpgroups": (1, 2), "wg_dimension": ("m", "n"), **choices}.items():
        if getattr(c, field) not in allowed:
            return f"{field}={getattr(c, field)!r} is not one of {allowed}"
    return None


def check_tile(c: Tiled) -> str | None:
    """TMA copies the tile's operands, and wgmma multiplies the part of each warpgroup."""
    for field in ("tile_m", "tile_n", "tile_k", "epilogue_tile_n"):
        if getattr(c, field) < 1:
            return f"{field}={getattr(c, field)} must be at least 1"
    if max(c.tile_m, c.tile_n, c.tile_k) > _BOX:
        return f"tile_m, tile_n and tile_k must be at most {_BOX}: a TMA box has at most {_BOX} elements a side"
    wg_m, wg_n = warpgroup_tile(c)
    sharing = 1 if c.takes_turns else c.compute_warpgroups
    by_m, by_n = (sharing, 1) if c.wg_dimension == "m" else (1, sharing)
    if wg_m % ROWS or wg_m * by_m != c.tile_m:
        return f"a warpgroup's {wg_m} rows of tile_m={c.tile_m} must be a multiple of {ROWS} (wgmma's M)"
    if wg_n % 8 or wg_n * by_n != c.tile_n or wg_n > _COLUMNS:
        return f"a warpgroup's {wg_n} columns of tile_n={c.tile_n} must be a multiple of 8 up to {_COLUMNS} (wgmma's N)"
    return None


def check_pipeline(c: Tiled) -> str | None:
    """The pipeline can load ahead, and `setmaxnreg` takes the producer's registers."""
    if c.max_concurrent_steps < 2:
        return f"max_concurrent_steps={c.max_concurrent_steps}: loading ahead takes at least 2 stages"
    return limits.check_producer_registers(c.memory_registers)


def check_epilogue(c: Tiled, unit: int) -> str | None:
    """Whole epilogue tiles make up a warpgroup's part of the output. `unit`: what their columns are a multiple of."""
    _, wg_n = warpgroup_tile(c)
    if wg_n % c.epilogue_tile_n or c.epilogue_tile_n % unit:
        return f"epilogue_tile_n={c.epilogue_tile_n} must divide a warpgroup's {wg_n} columns and be a multiple of {unit}"
    return None


def check_accumulator(c: Tiled, registers: int, accumulators: float = 1) -> str | None:
    """So many times the accumulator of a warpgroup's part of the tile fit into the `registers` of a consumer thread."""
    accumulator = int(accumulators * accumulator_registers(c))
    if accumulator + _ADDRESSES > registers:
        return (
            f"the accumulator takes {accumulator} registers a thread and addresses about {_ADDRESSES} more, but "
            f"{registers} are left: use smaller tiles or two consumer warpgroups"
        )
    return None


# --- Shared memory


@dataclasses.dataclass(frozen=True)
class Storage:
    """The shared memory of a block: the operands' tiles of each pipeline stage, and the buffers of the epilogue.

    epilogue_buffers: of each consumer warpgroup. out_itemsize: bytes of an element of the output.
    received: float32 epilogue tiles that each consumer warpgroup has room for, of other blocks of its cluster.
    barriers: beside those of the pipeline and of the cluster's sum.
    b_tiles: tiles of B of a pipeline stage. itemsize: bytes of an element of the operands.
    scales: how many float32 numbers a pipeline stage has beside the operands' tiles, in each of several buffers.
    is_dynamic: whether tiles are handed out as blocks become free (`core/dynamic_scheduler.py`): `SLOTS` numbers and barriers.
    vectors: how many float32 numbers are kept beside all of it, in each of several buffers.
    reduces: whether numbers are added up along rows, for which Mosaic takes `limits.REDUCTIONS`.
    columns_of_b: of a tile of B, where it has more than tile_n.
    """

    config: Tiled
    epilogue_buffers: int
    out_itemsize: int
    received: int = 0
    barriers: int = 0
    b_tiles: int = 1
    itemsize: int = 2
    scales: tuple[int, ...] = ()
    is_dynamic: bool = False
    vectors: tuple[int, ...] = ()
    reduces: bool = False
    columns_of_b: int = 0

    @property
    def out_shape(self) -> tuple[int, int, int, int]:
        """Of the epilogue's buffers: [consumer warpgroups, buffers, rows, columns]."""
        c = self.config
        return (c.compute_warpgroups, self.epilogue_buffers, ROWS, c.epilogue_tile_n)

    @property
    def bytes(self) -> int:
        """All of it, with a full and an empty barrier for each stage."""
        c, stages = self.config, self.config.max_concurrent_steps
        a, b = (
            ((stages, c.tile_m, c.tile_k), self.itemsize),
            ((stages, c.tile_k, max(c.tile_n, self.columns_of_b)), self.itemsize),
        )
        buffers, barriers = [a, (self.out_shape, self.out_itemsize), *[b] * self.b_tiles], 2 * stages + self.barriers
        buffers[1:1] = [((stages, numbers), 4) for numbers in self.scales]
        if self.received:  # they arrived at each warpgroup; they were taken
            buffers.append(((c.compute_warpgroups, self.received, ROWS, c.epilogue_tile_n), 4))
            barriers += c.compute_warpgroups + 1
        if self.is_dynamic:
            buffers.append(((limits.ALIGNMENT,), 1))  # of which it uses little
            barriers += 2 * SLOTS
        buffers += [((numbers,), 4) for numbers in self.vectors]
        if self.reduces:
            buffers.append(((limits.REDUCTIONS,), 1))
        return limits.block_bytes(buffers, barriers)


# --- Time


def efficiency(c: Tiled, least: float = 0.55) -> float:
    """What is left of the tensor cores' rate, from `least` to 1. A wgmma reads its part of B from shared memory.

    The wider it is, the better that overlaps.
    """
    wg_m, wg_n = warpgroup_tile(c)
    return least + (1.0 - least) * min(1.0, wg_n / 128, wg_m * wg_n / 8192)


def multiply_seconds(c: Tiled, gpu: Gpu, efficiency: float) -> float:
    """The tensor cores' time of a pipeline step of one SM."""
    return 2 * c.tile_m * c.tile_n * c.tile_k / (gpu.bf16_flops * rates.POWER / gpu.sms * efficiency)


def together(norm: float, *seconds: float) -> float:
    """The time of what overlaps, (sum of t^norm)^(1/norm): a little more than the longest."""
    longest = max(seconds)
    if longest <= 0:
        return longest
    return longest * sum((max(t, 0.0) / longest) ** norm for t in seconds) ** (1 / norm)


def store_seconds(c: Tiled, out_itemsize: int, gpu: Gpu) -> float:
    """The store of an output tile."""
    return c.tile_m * c.tile_n * out_itemsize / rates.load_bytes(gpu)


def raster_factor(width: int, best: int) -> float:
    """What strips of another width than the best one cost. Tiles in flight in a compact patch share operands in L2."""
    return 1.0 + 0.004 * abs(math.log2(width / best))
