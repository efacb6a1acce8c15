"""The Config of both kernels, and which configs they can run, whatever the problem."""

from __future__ import annotations

import dataclasses

from mgpu_ops.core import fp8, gemm, limits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.grouped.problem import GroupedProblem

PANEL = 64  # 16-bit elements of a row of a 128-byte swizzle: the unit in which windows of rows are copied


def panel(dtype: str) -> int:
    """Elements of a row of a 128-byte swizzle."""
    return 128 // itemsize_of(dtype)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of grouped_matmul or ragged_contraction works. Every field is tuned; none changes the answer.

    tile_m: rows of a block's output tile, up to 256; a group's first tile begins at its first row.
    tile_n: columns of a block's output tile, up to 256.
    tile_k: depth of one pipeline step, 64 or 128 elements of 16 bits, or 128 or 256 of 8.
    max_concurrent_steps: stages of the pipeline in shared memory, 2 or more.
    compute_warpgroups: consumer warpgroups of a block, 1 or 2, beside the producer.
    wg_dimension: the side of the output tile that two consumer warpgroups share, "m" or "n".
    raster_width: tile rows of a strip, 1 to 1024: a group's tiles are walked in strips, column by column.
    epilogue_tile_n: columns that are stored at a time, an epilogue tile.
    epilogue_slots: buffers of a warpgroup for epilogue tiles, 1 or more.
    memory_registers: registers of a producer thread, a multiple of 8 from 24 to 128; consumers share the rest.
    schedule: how blocks get output tiles, and when they store them:
      "static": each block has every so-many-th tile.
      "dynamic": blocks take tiles as they become free, after a small kernel of XLA's; for groups of uneven sizes.
      "deferred", "dynamic-deferred": the same, but a tile stays in registers and is stored while the next one is multiplied.
    short_tiles: whether a group's last tile, if at most 64 rows are left, has 64, shared along n. For dynamic schedules.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    compute_warpgroups: int
    wg_dimension: str
    raster_width: int
    epilogue_tile_n: int
    epilogue_slots: int
    memory_registers: int
    schedule: str = "static"
    short_tiles: bool = False

    @property
    def takes_turns(self) -> bool:
        return False


SCHEDULES = ("static", "dynamic", "deferred", "dynamic-deferred")


def is_dynamic(c: Config) -> bool:
    """Whether blocks take tiles as they become free."""
    return c.schedule.startswith("dynamic")


def defers(c: Config) -> bool:
    """Whether a tile is stored while the next one is multiplied."""
    return c.schedule.endswith("deferred")


def short(c: Config) -> Config:
    """How the consumers share a short tile, for what `core/gemm.py` says of a config's tile."""
    return dataclasses.replace(c, tile_m=gemm.ROWS, wg_dimension="n", short_tiles=False)


def check_short_tiles(c: Config, refused: str | None) -> str | None:
    """Why a group's last tile cannot be a short one, or None. refused: what of a problem it does not run with."""
    if not c.short_tiles:
        return None
    if refused is not None:
        return f"short_tiles=True does not run with {refused}: use False"
    if not is_dynamic(c):
        return f"short_tiles=True takes tiles handed out, not schedule={c.schedule!r}: blocks would fall out of step"
    if c.compute_warpgroups != 2 or c.wg_dimension != "m" or c.tile_m != 2 * gemm.ROWS:
        return (
            f"short_tiles=True is for two consumers that share tile_m={2 * gemm.ROWS} along m, not {c.compute_warpgroups} that "
            f"share tile_m={c.tile_m} along {c.wg_dimension}"
        )
    if c.tile_n // 2 % c.epilogue_tile_n:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must divide the {c.tile_n // 2} columns that a consumer has of a short tile"
        )
    if c.tile_n // 2 % PANEL:
        return (
            f"tile_n={c.tile_n} must be a multiple of {2 * PANEL} with short_tiles=True: each consumer has whole swizzle rows"
        )
    return None


def check_deferred(c: Config, problem: GroupedProblem, refused: str | None) -> str | None:
    """Why a tile cannot be kept in registers until the next one is multiplied, or None. refused: what of a problem it is."""
    if not defers(c):
        return None
    if refused is not None:
        return f"schedule={c.schedule!r} does not run with {refused}: use 'static' or 'dynamic'"
    if itemsize_of(problem.out_dtype) > 2:
        return f"schedule={c.schedule!r} keeps tiles of 16 bits, not of {problem.out_dtype}: use 'static' or 'dynamic'"
    return None


def check_tiles(c: Config, out_itemsize: int, gpu: Gpu, dtype: str = "bfloat16", scales: str = "none") -> str | None:
    """Why no kernel can run a config on operands of a dtype, whatever the sides, or None: the first reason."""
    row = panel(dtype)
    return (
        gemm.check_choices(c, {"tile_k": (row, 2 * row), "schedule": SCHEDULES})
        or gemm.check_tile(c)
        or gemm.check_pipeline(c)
        or _check_order(c)
        or _check_epilogue(c, 128 // out_itemsize)
        or (_check_scales(c) if scales == "block" else None)
        or gemm.check_accumulator(c, consumer_registers(c, gpu), fp8.accumulators_in_all(c, scales) + 0.5 * defers(c))
    )


_HEIGHTS = (8, 16, 32, 64, 128)  # rows of a tile that one copy can load, besides all of them


def heights(c: Config, rows: int, groups: int, gathered: bool) -> tuple[int, ...]:
    """How many rows of a tile of a product its loads of lhs can have, from the fewest to all. rows: of all groups.

    gathered: they come by index, 16 at a time; of many rows a group all, as the loops of more heights would take longer than
    they gain.
    """
    if gathered and rows >= 64 * groups:
        return (c.tile_m,)
    return (*(x for x in _HEIGHTS if (16 if gathered else 8) <= x < c.tile_m), c.tile_m)


def check_gathered(c: Config) -> str | None:
    """Why the producer has too few registers to load rows by index, or None. A thread holds the places of tile_m / 16 rows."""
    least = 40 if c.tile_m <= 128 else 56
    if c.memory_registers < least:
        return f"memory_registers={c.memory_registers} must be at least {least} where {c.tile_m} rows come by index"
    return None


def _check_scales(c: Config) -> str | None:
    """Why a config's tiles cannot have scales of blocks, or None."""
    if c.tile_m > 192:
        return f"tile_m={c.tile_m} must be at most 192 with scales of blocks: TMA copies those of 32 rows more, 256 at most"
    return fp8.check_blocks(c)


def _check_order(c: Config) -> str | None:
    """Why the tiles of a group cannot be walked in the config's strips, or None."""
    if not 1 <= c.raster_width <= 1024:
        return f"raster_width={c.raster_width} must be from 1 to 1024: strips that wide hold any group"
    return None


def _check_epilogue(c: Config, row: int) -> str | None:
    """Why the epilogue cannot store windows of rows, in swizzle rows of `row` elements, or None."""
    if reason := gemm.check_epilogue(c, row):
        return f"{reason}: windows of rows are stored in 128-byte swizzle rows"
    tiles = gemm.epilogue_tiles(c)
    if not 1 <= c.epilogue_slots <= tiles:
        return f"epilogue_slots={c.epilogue_slots} must be from 1 to the {tiles} epilogue tiles of a warpgroup"
    return None


_LONGEST_RAGGED = 2**25  # elements: 64 times as many fit in 32 bits (core/tma.py)


def check_last_tile(name: str, length: int, field: str, tile: int, width: int) -> str | None:
    """Why TMA cannot copy the last tile of a row of `length` that swizzle rows do not divide, or None.

    A block of one swizzle row is clipped. A wider one, of `width`, belongs to a tile that ends with the row.
    """
    if length % PANEL == 0 or width == PANEL:
        return None
    if tile > length:
        return (
            f"{field}={tile} must be at most {name}={length}, which is no multiple of {PANEL}: TMA clips one swizzle row only, "
            "and a wider block ends with the row"
        )
    if length >= _LONGEST_RAGGED:
        return f"{field}={tile} must be {PANEL}: blocks that end with a row of {name}={length} begin below {_LONGEST_RAGGED}"
    return None


def check_smem(problem: GroupedProblem, config: Config, gpu: Gpu, scales: str = "none") -> str | None:
    """Why a block's shared memory does not suffice, or None."""
    return limits.check_smem(smem_bytes(problem, config, scales), gpu)


def consumer_registers(c: Config, gpu: Gpu) -> int:
    """Registers of a consumer thread."""
    return limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)


def storage(problem: GroupedProblem, config: Config, scales: str = "none") -> gemm.Storage:
    """The shared memory of a block of either kernel. scales: of `fp8.SCALES`."""
    return gemm.Storage(
        config,
        config.epilogue_slots,
        itemsize_of(problem.out_dtype),
        itemsize=itemsize_of(problem.dtype),
        scales=scales_of_a_step(config) if scales == "block" else (),
        is_dynamic=is_dynamic(config),
    )


def scales_of_a_step(c: Config) -> tuple[int, int]:
    """How many scales of lhs and of rhs a pipeline step has room for, where blocks have scales."""
    parts = c.tile_k // fp8.BLOCK
    return parts * (c.tile_m + fp8.SCALES_IN_LINE), parts * fp8.SCALES_IN_LINE


def smem_bytes(problem: GroupedProblem, config: Config, scales: str = "none") -> int:
    """Bytes of shared memory that a block of either kernel takes."""
    return storage(problem, config, scales).bytes
