"""Which configs of both ops are worth trying, and a model of their time."""

from __future__ import annotations

import functools
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any

from mgpu_ops.core import gemm, rates
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of
from mgpu_ops.grouped.config import PANEL, SCHEDULES, Config, defers, heights, is_dynamic, panel
from mgpu_ops.grouped.problem import GroupedProblem


def space(problem: GroupedProblem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    del gpu
    row = panel(problem.dtype)
    return {
        "tile_m": (64, 128, 192, 256),
        "tile_n": (64, 128, 192, 256),
        "tile_k": (row, 2 * row),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 16, 32),
        "epilogue_tile_n": (32, 64, 128, 192, 256),
        "epilogue_slots": (1, 2, 4),
        "memory_registers": (40, 56) if getattr(problem, "lhs_rows", 0) else (24, 40),
        "schedule": SCHEDULES,
        "short_tiles": (False,),
    }


_DEFERRED = 128 * 256, PANEL, 2  # elements of the tile, columns and buffers of its epilogue tiles: of others it gained nothing
TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))


def candidates(
    epilogues: Callable[[int], Sequence[tuple[int, int]]],
    legal: Callable[[Config], bool],
    tiles: Sequence[tuple[int, int]] = TILES,
    schedules: Sequence[str] = ("static",),
    row: int = PANEL,
    short_tiles: str = "",
) -> list[Config]:
    """For each tile, tile_k, split between consumers and epilogue: the config with the most stages that is legal.

    epilogues: from the columns of a consumer's part of the tile to pairs (epilogue_tile_n, epilogue_slots).
    row: elements of a swizzle row of the operands, the least tile_k.
    short_tiles: a schedule that is tried with short tiles.
    Strips of 16 tile rows keep a group's operands in L2.
    """
    found = []
    for (tile_m, tile_n), tile_k, wg_dimension in itertools.product(tiles, (row, 2 * row), ("m", "n")):
        warpgroups = 2 if tile_m * tile_n > 64 * 64 else 1
        wg_n = tile_n // warpgroups if wg_dimension == "n" else tile_n
        kinds = [(schedule, False) for schedule in schedules] + [(short_tiles, True)] * (short_tiles != "")
        for (schedule, short), (epilogue_tile_n, buffers) in itertools.product(kinds, epilogues(wg_n)):
            if schedule.endswith("deferred") and (tile_m * tile_n, epilogue_tile_n, buffers) != _DEFERRED:
                continue
            for steps in range(8, 1, -1):
                config = Config(
                    tile_m=tile_m,
                    tile_n=tile_n,
                    tile_k=tile_k,
                    max_concurrent_steps=steps,
                    compute_warpgroups=warpgroups,
                    wg_dimension=wg_dimension,
                    raster_width=16,
                    epilogue_tile_n=epilogue_tile_n,
                    epilogue_slots=buffers,
                    memory_registers=40,
                    schedule=schedule,
                    short_tiles=short,
                )
                if legal(config):
                    found.append(config)
                    break  # more stages are never slower
    return list(dict.fromkeys(found))


def short_tiles(p: Any, schedule: str) -> str:
    """The schedule, where short tiles are worth trying: rows by index and products of 8 bits gained nothing with them."""
    return "" if p.lhs_rows or itemsize_of(p.dtype) == 1 else schedule


def require_rows(p: GroupedProblem) -> None:
    """Raises ValueError for a problem without rows, columns or groups, which takes no time."""
    if min(p.m, p.n, p.k, p.groups) < 1:
        raise ValueError(f"a dimension of {p} is zero: there is nothing to compute")


def row_blocks(spread: str, rows: int, groups: int, size: int) -> float:
    """How many blocks of `size` rows the groups are cut into, as expected from how their sizes are spread."""
    used = _used(spread, rows, groups)
    if spread == "even":
        return used * math.ceil(rows / used / size)
    if spread == "skewed":
        return sum(min(1.0, share) * math.ceil(share / size) for share in _skewed(rows, groups))
    return max(used, rows / size + used / 2)  # the last block of a group is half full on average


@functools.lru_cache(maxsize=256)
def _skewed(rows: int, groups: int) -> tuple[float, ...]:
    """The groups' rows, where the g-th share is proportional to 1/g; below 1 it is how likely a row is."""
    return tuple(rows / (harmonic(groups) * g) for g in range(1, groups + 1))


@functools.lru_cache(maxsize=256)
def harmonic(groups: int) -> float:
    """The sum of 1/g of all groups."""
    return sum(1 / (g + 1) for g in range(groups))


def _used(spread: str, rows: int, groups: int) -> int:
    """How many groups have rows."""
    return min(rows, max(1, groups // 2) if spread == "sparse" else groups)


def of_whole_tiles(p: GroupedProblem, c: Config) -> float:
    """Of the time of as many whole tiles, what a product takes whose groups' last tiles may be short."""
    if not c.short_tiles:
        return 1.0
    used = _used(p.spread, p.m, p.groups)
    if p.spread in ("even", "skewed"):
        shares = (p.m / used,) * used if p.spread == "even" else _skewed(p.m, p.groups)
        short = sum(min(1.0, share) * (0 < math.ceil(share) % c.tile_m <= gemm.ROWS) for share in shares)
    else:
        short = used / 2
    return 1 - (1 - _SHORT_TILE) * short / row_blocks(p.spread, p.m, p.groups, c.tile_m)


# Fitted to the recorded sweeps and to 48 drawn problems of an H200 (results/2026-11-22-h200-grouped_matmul-anywhere.jsonl).
_RATE = 1.10  # of rates.POWER: bursts draw less power than what a program sustains
_LAUNCH = 2.7e-6  # s of a kernel, and of the first loads
_HBM_LATENCY = 0.24e-6  # s that data takes longer from HBM than from L2
_STRIP = 16  # tile rows of the fastest strips
_STEP = 7.6e-9  # s of a step beside its copies and its arithmetic: barriers
_OVERLAP = 0.22  # of the shorter of arithmetic and memory time is not hidden behind the longer
_EPILOGUE_TILE = 0.10e-6  # s that a warpgroup waits for each epilogue tile that has no buffer of its own
_STORE = 1.37  # of the time at rates.LOAD_BYTES_PER_CLOCK
# Of its store's time a tile of a product takes less where the store is deferred (results/2026-11-23-h200-grouped-deferred.jsonl
# and -retuned.jsonl, and 23 drawn products).
_HIDDEN = 0.40
# Times as long take the loads of rows that do not begin at lines of 128 bytes, as each lies in two of them; and of those that
# begin within a sector of 32 bytes.
_ACROSS_LINES, _ACROSS_SECTORS = 1.05, 1.38
# Times as long, less one, take stores of such rows; and of those that begin within a sector of 32 bytes, where other tiles'
# parts of a sector come later: for all of them, and for tiles of 64 columns. Where tiles are handed out, neighbours are stored
# at about one time (results/2026-11-23-h200-ragged_contraction-writes.jsonl).
_STORED_ACROSS_LINES, _STORED_ACROSS_SECTORS, _STORED_APART, _STORED_TOGETHER = 0.07, 0.50, 0.70, 0.17
_LINE, _SECTOR = 128, 32  # bytes
# Of products of 16 bits, fitted to 36 of them (results/2026-11-28-h200-grouped_matmul-short-tiles.jsonl.gz).
_TWO_STAGES, _TWO_SHORT_STAGES = 1.012, 1.04  # times as long, where two long steps are all that fits, or two of 64
_SHORT_TILE = 0.75  # of a tile's time
_HANDED_OUT = 1e-6  # s of XLA's zero in the counter
_OUT_OF_STEP = 0.2  # of reads' share of the time: tiles that share weights do not begin together, and some are read twice


def _across(row: int) -> float:
    """Times as long take the loads of rows of so many bytes."""
    return _ACROSS_SECTORS if row % _SECTOR else _ACROSS_LINES if row % _LINE else 1.0


def stored(columns: int, itemsize: int, c: Config) -> float:
    """What the stores of rows of so many columns count as: 1 where they begin at lines."""
    if columns * itemsize % _SECTOR:
        return 1.0 + _STORED_ACROSS_SECTORS + (_STORED_TOGETHER if is_dynamic(c) else _STORED_APART) * 64 / c.tile_n
    return 1.0 + _STORED_ACROSS_LINES * bool(columns * itemsize % _LINE)


def as_run(p: Any, c: Config, seconds: float, read: float, moved: int, gpu: Gpu) -> float:
    """The time of a product of so many seconds by what `cost` leaves out: few stages, tiles handed out, rows by index.

    read, moved: bytes that are read, and that are read and written.
    """
    if itemsize_of(p.dtype) > 1 and c.max_concurrent_steps == 2:
        seconds *= _TWO_STAGES if c.tile_k > PANEL else _TWO_SHORT_STAGES
    return _gathered(p, c, _handed_out(c, seconds, read, gpu), moved, gpu)


def _handed_out(c: Config, seconds: float, read: float, gpu: Gpu) -> float:
    """The time of a product of so many seconds that reads so many bytes, where its tiles are handed out."""
    if not is_dynamic(c):
        return seconds
    reads = read / (gpu.memory_bytes_per_s * rates.HBM)
    apart = _OUT_OF_STEP * reads * min(1.0, reads / seconds) if c.short_tiles else 0.0
    return _HANDED_OUT + seconds + apart


def _gathered(p: Any, c: Config, seconds: float, moved: int, gpu: Gpu) -> float:
    """The time of a product of so many seconds where its rows come by index: the longer, the fewer stages are on their way.

    One that is bound by what it moves takes no longer.
    """
    if not p.lhs_rows or seconds < 2 * moved / (gpu.memory_bytes_per_s * rates.HBM):
        return seconds
    return seconds * {2: 1.13, 3: 1.08}.get(c.max_concurrent_steps, 1.05)


# Of few rows a group: fitted to 40 products of decoding (results/2026-11-30-h200-grouped-few-rows-configs.jsonl.gz) and to 42
# others, most of them drawn (results/2026-11-30-h200-grouped-few-rows-defaults.jsonl).
_FEW_ROWS = 16  # of a group that has some
_FEW_LAUNCH, _FEW_TILE, _FEW_STEP = 4.3e-6, 0.98e-6, 0.034e-6  # s of a kernel; of a tile and of a step beside the loads
_FEW_HBM = 0.912  # of the datasheet's bandwidth
_FEW_LATENCY, _FEW_BYTES_PER_S = 0.71e-6, 72.7e9  # s until a load is there, and what an SM alone brings from HBM
_FEW_WIDTH = {64: 1.018, 128: 1.0, 192: 1.02, 256: 1.015}  # times as long, by the columns of a step
_FEW_WIDEST = 1.045  # of more columns
_FEW_SHORT, _FEW_TWO_STAGES = 0.015, 0.025  # more of it: in steps of one swizzle row, with two stages
_FEW_TALL = {1: 1.29, 2: 1.033}  # where half of a tile's rows at least are none, by the matrices of a group
_FEW_ACROSS_LINES = 0.21  # less one, of tiles of 64, where rows begin within lines


def has_few_rows(p: Any) -> bool:
    """Whether reading the weights is all that takes time: `cost_of_few_rows` is for such products."""
    return p.m <= _FEW_ROWS * _expected(p)


def _expected(p: Any) -> float:
    """How many groups have rows, as expected from how their sizes are spread.

    Of a group with a share of y rows some is there with probability min(1, y); "random" shares are of a gamma distribution.
    """
    used = _used(p.spread, p.m, p.groups)
    if p.spread not in ("random", "sparse"):
        return used
    groups = max(1, p.groups // 2) if p.spread == "sparse" else p.groups
    mean = p.m / groups
    below = [1 - math.exp(-4 / mean) * sum((4 / mean) ** i / math.factorial(i) for i in range(k)) for k in (4, 5)]
    return min(used, groups * (1 - below[0] + mean * below[1]))


def cost_of_few_rows(p: Any, c: Config, matrices: int, gpu: Gpu) -> float:
    """Modelled time in seconds of a product with few rows a group: a launch, and reading the weights of groups that have rows.

    A wave of tiles takes as long as its bytes at HBM's rate, and at least as long as one of its blocks takes for a tile.

    matrices: of a group, 1 or 2, whose tiles a step brings.
    """
    groups, itemsize = _expected(p), itemsize_of(p.dtype)
    blocks = max(groups, p.m / c.tile_m + groups / 2)
    waves = blocks * math.ceil(p.n / c.tile_n) / gpu.sms
    columns, rows = matrices * c.tile_n, min(p.m / blocks, c.tile_m)
    height = next(x for x in heights(c, p.m, p.groups, bool(p.lhs_rows)) if x >= rows)
    step = itemsize * c.tile_k * (columns + height)
    rate = min(c.max_concurrent_steps * step / _FEW_LATENCY, _FEW_BYTES_PER_S)
    tall = _FEW_TALL[matrices] if c.tile_m > gemm.ROWS else 1.0
    tile = tall * (math.ceil(p.k / c.tile_k) * (step / rate + _FEW_STEP) + _FEW_TILE)
    row, side = (p.k, c.tile_k) if p.layout == "nt" else (p.n, c.tile_n)
    slower = max(_FEW_SHORT * (c.tile_k == panel(p.dtype)), _FEW_TWO_STAGES * (c.max_concurrent_steps == 2))
    longer = tall * (_FEW_WIDTH.get(columns, _FEW_WIDEST) + slower)
    longer *= 1 + _FEW_ACROSS_LINES * PANEL / side * bool(itemsize * row % _LINE)
    reading = groups * matrices * itemsize * p.k * p.n / (gpu.memory_bytes_per_s * _FEW_HBM) * longer
    whole = math.floor(waves)
    seconds = max(whole * tile, reading * whole / waves) if whole else 0.0
    if waves > whole:
        seconds += max(tile, reading * (waves - whole) / waves)
    return _FEW_LAUNCH + seconds + _HANDED_OUT * is_dynamic(c)


def cost(
    p: GroupedProblem,
    c: Config,
    tiles: float,
    steps: float,
    moved: tuple[float, float],
    rows: tuple[int, int],
    gpu: Gpu,
    rate: float = 1.0,
    hidden: float = _HIDDEN,
) -> float:
    """Modelled time in seconds of `tiles` output tiles of so many `steps` each.

    step = the longest of arithmetic, loads, and latency / stages, in one SM
    time = launch + the longer of waves * (steps * step + store) and HBM bytes / HBM rate + a part of the shorter
    where a store is deferred, what is not hidden of it takes its place, but for a block's last one

    moved: bytes of HBM that are read, and that are written. rows: elements of a row of lhs and of rhs in memory. rate: of
    arithmetic, in parts of that of 16 bits. hidden: how much of a deferred store is.
    """
    waves = max(1.0, tiles / gpu.sms)
    waves = math.ceil(waves) if waves < 8 else waves + 0.5
    itemsize, across = itemsize_of(p.dtype), stored(p.n, itemsize_of(p.out_dtype), c)
    sides = zip((c.tile_m, c.tile_n), rows, strict=True)
    loaded = sum(itemsize * c.tile_k * side * _across(row * itemsize) for side, row in sides)
    from_hbm = min(1.0, sum(moved) / (tiles * steps * loaded))
    latency = (rates.LOAD_LATENCY + _HBM_LATENCY * from_hbm) / c.max_concurrent_steps
    arithmetic = gemm.multiply_seconds(c, gpu, _RATE * rate * gemm.efficiency(c))
    step = _STEP + max(arithmetic, loaded / rates.load_bytes(gpu), latency)
    store = _STORE * across * gemm.store_seconds(c, itemsize_of(p.out_dtype), gpu)
    waiting = _EPILOGUE_TILE * (gemm.epilogue_tiles(c) - c.epilogue_slots)
    stores = waves * (store + waiting)
    if defers(c):
        stores = (waves - 1) * (1 - hidden) * (store + waiting) + store + waiting
    compute = (waves * steps * step + stores) * gemm.raster_factor(c.raster_width, _STRIP) * of_whole_tiles(p, c)
    memory = (moved[0] + across * moved[1]) / (gpu.memory_bytes_per_s * rates.HBM)
    return _LAUNCH + max(compute, memory) + _OVERLAP * min(compute, memory)


def distance(x: GroupedProblem, y: GroupedProblem, other: float = 0.0) -> float | None:
    """How far apart two problems are: the sum of the |log2| ratios of m, n, k and groups, and what other fields add.

    None where a config does not carry over. other: what an op's own fields add.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.groups, y.groups))
    if itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype) or 0 in itertools.chain(*sides):
        return None
    if itemsize_of(x.dtype) != itemsize_of(y.dtype):
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.25 * (x.spread != y.spread) + other
    return near if near <= 4.0 else None
