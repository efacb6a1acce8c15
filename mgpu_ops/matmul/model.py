"""Configs worth trying for a matmul, and a model of their time. The tuner and the default use both."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_ops.core import gemm, rates
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of, require, resident_clusters
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.checks import SCHEDULES, check, supports
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    adds_shares,
    as_computed,
    cluster_size,
    columns_of_b,
    computes_transposed,
    crowds,
    k_steps,
    multiplied,
    neighbours,
    partial_problem,
    products,
    smem_bytes,
    swizzle_bytes,
    transposed,
)
from mgpu_ops.matmul.quantities import bytes_moved


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run.

    The transposed product is for few rows; warpgroups take turns, or store later, where there are more tiles than blocks.
    """
    p = problem
    fitted = list(_fitted(problem, gpu))
    rows = {m for m, _ in fitted} | {64, 128, 192, 256} | set(_FEW_ROWS if p.m <= _MOST_FEW_ROWS else ())
    columns = {n for _, n in fitted} | {64, 96, 128, 160, 192, 224, 256}
    rows |= _widths(p, gpu, turned=True)
    columns |= _widths(p, gpu, turned=False)
    return {
        "tile_m": tuple(sorted(rows)),
        "tile_n": tuple(sorted(columns)),
        "tile_k": (_line(problem), 2 * _line(problem)),
        "max_concurrent_steps": _STEPS,
        "compute_warpgroups": (1, 2, 3),
        "wg_dimension": ("m", "n"),
        "cluster": ("none", "m", "n", "m4", "n4", "k"),
        "raster_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 11, 16),  # 11: a wave of 132 tiles is 11 x 12
        "epilogue_tile_n": (16, 32, 64, 128) if any(n % 64 for _, n in fitted) else (32, 64, 128),
        "split_k": tuple(sorted({1, 2, 3, 4, 6, 8} | _parts(p, gpu))),
        "memory_registers": (24, 40),
        "schedule": SCHEDULES if _many_tiles(p, gpu) else ("cooperative", "ahead"),
    }


def _many_tiles(p: Problem, gpu: Gpu) -> bool:
    """Whether there are more tiles than SMs, so that one's store can run beside the next one's steps."""
    return p.batch * math.ceil(p.m / 128) * math.ceil(p.n / 128) > gpu.sms


_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12)


def _widths(p: Problem, gpu: Gpu, *, turned: bool) -> set[int]:
    """The widths of tiles along n, or of the transposed product along m, that `candidates` has for a problem."""
    return {width for _, width, _ in _waves(p, gpu, turned)}


def _parts(p: Problem, gpu: Gpu) -> set[int]:
    """The parts of k with which the tiles of `candidates` are one wave."""
    return {filling_parts(p, *tile, gpu) for tile in _tiles(p)}


def _line(problem: Problem) -> int:
    """Elements of k in a swizzle row of 128 bytes."""
    return 128 // itemsize_of(multiplied(problem).dtype)


# Fitted to nine recorded sweeps, 260 drawn problems, 24 of few rows and 92 stored entries of an H200 (docs/kernels/matmul.md).
_RATE = 1.27  # of rates.POWER: bursts draw less power than what a program sustains
_ONE_WARPGROUP = 0.7325  # of the rate is left with one consumer: nothing multiplies while it stores or waits,
_ONE_AHEAD = 0.9634  # and where the next step is in flight
_OVERLAPPED = 1.02  # times the rate, power included, where stores run beside wgmma: there is always one in flight
_AHEAD = 0.9246  # times the rate, where the next step's wgmma is in flight
_NOT_HIDDEN = {"deferred": 0.5666, "pingpong": 0.841}  # of a store's time takes its tile longer all the same: short k
_SWIZZLE_64 = 0.807  # of the rate is left with 64-byte swizzles: wgmma's reads have bank conflicts
_SMEM, _SMEM_BYTES_PER_CLOCK = 0.8241, 128  # of the time at which shared memory is read and written, at the boost clock
_LOADS = 0.6674  # of the time at rates.LOAD_BYTES_PER_CLOCK
_STORE = 1.206  # of the time at rates.LOAD_BYTES_PER_CLOCK: nothing of a tile multiplies meanwhile
# Times as long take the loads of rows that do not all begin at 128-byte lines, by the bytes they begin at multiples of: such a
# row of a swizzle tile lies in two lines, and in part of a sector of 32 bytes more.
_ACROSS_LINES = {128: 1.0, 64: 1.085, 32: 1.321, 16: 2.243}
_STORE_NARROW = {16: 2.578}  # as long take stores in epilogue tiles of so many columns
_STORE_ACROSS = {128: 1.0, 64: 1.101, 32: 1.272, 16: 2.06}  # as long take the stores of such rows of the output
_ZEROS = 2.372  # times as long as to load a row takes TMA to fill one outside the array with zeros
_MULTICAST = {1: 1.0, 2: 0.715, 4: 0.1456}  # of the time is left to loads of an operand that so many blocks share,
_MULTICAST_ACROSS = {1: 1.0, 2: 0.4634, 4: 0.1343}  # and of what they take longer across lines
_AHEAD_SHARED = 1.05  # times as long with the next wgmma in flight, across lines: a stage is held longer, and others wait
_LATENCY = 7.307e-07  # s from a TMA request to its data
_LAUNCH = 1.092e-06  # s
_APART = 0.8986  # of that time is left where blocks begin with steps of their own
_ISSUE = {
    "cooperative": 7.146e-08,
    "deferred": 8.642e-08,
    "pingpong": 4.162e-08,
    "ahead": 1.945e-08,
}  # s of a step in which nothing multiplies
_ISSUE_SHARED = {1: 0, 2: 1.777e-08, 4: 3.034e-09}  # and more where so many blocks share an operand: each waits for the others
_START_SHARED = {1: 0.0, 2: 2.046e-07, 4: 4.188e-07}  # s later begin the blocks of a cluster: each waits for the others
_CROWD = 7.275e-11  # s for each row of a line that blocks ask for at once, and each block: see `_crowded`
_SOONER = 2.507e-07  # s less, where the kernel has its own pipeline and not Pallas's
_COLD = 6.633e-07  # s more, in products of a few microseconds, until operands that are not in L2 arrive
_PARTS = 3.164  # times the parts of a split k at HBM's rate: they are written, read, and partly in L2
_SUM_RESIDUAL = 1e-6  # s that the kernel which adds them up takes more with a residual
_SUM = 4.257e-07  # s that a sum in a cluster takes,
_SUM_OWN = 2.705  # and times the store of a float32 tile: for the block that adds up,
_SUM_PART = 2.549  # and for each other block
_SHARED = 0.421  # of that is left where each block adds up a share of the tile
_HBM = 1.053  # of the time at the datasheet's rate,
_HBM_ACROSS_LINES = {128: 1.0, 64: 1.133, 32: 1.119, 16: 1.038}  # and times as long for an operand of such rows
_AGAIN = 0.6  # of that time takes what tiles of B have in vain (`columns_of_b`), which the next tile loads too: partly from HBM
_STEP_NORM = 4.8  # arithmetic, loads and latency of a step overlap nearly wholly,
_MEMORY_NORM = 3.016  # all steps and HBM less so
_POWER_CAP = 0.82  # of the datasheet's FLOP/s, with all SMs at work
_HOT, _HEATING = 0.08, 2e-3  # how much longer a product takes under the power cap, and s until then
_FOUR_ALIGNED = 32  # bytes that rows begin at multiples of: with more, clusters of four along m were slower than modelled
_STRIP = 8  # tiles: the best width of strips

# Of 8-bit floats: fitted to 8 problems of an H200 (docs/kernels/matmul.md, "Eight bits").
# As `_MULTICAST`, of tiles of 128 x 192 on and of smaller ones: the blocks of a cluster wait as long for these. For the wider
# ones they do not, and `_ISSUE_SHARED` is none.
_MULTICAST_8 = (0.97, 1.05)
_BLOCKS_OF_A_STEP = {1: 0.72, 2: 0.86}  # of the rate is left with scales of blocks, by how many of k a step has
_SHORT_STEPS = 1.04  # times as long, where few rows fill a tile and a step has 128 of k: as 64 of 16 bits


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds, with at least the time of HBM.

    step = |2 tm tn tk / rate, bytes / load rate, latency / (steps in flight)|, of one SM
    steps = waves * (k steps * step + store) (`_of_a_block`), or what the power cap allows, and slower within milliseconds
    time = launch + latency, from a cold L2, + |steps, HBM bytes / HBM rate| + sum of the split_k parts
    |...|: the times joined by a norm (`gemm.together`), not much more than the longest
    float32: and the kernels before it that split or transpose operands (`_prepared`)
    """
    p, c = as_computed(partial_problem(problem, config), config)
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    down, across = neighbours(c)
    clusters = p.batch * math.ceil(math.ceil(p.m / c.tile_m) / down) * math.ceil(math.ceil(p.n / c.tile_n) / across)
    waves = math.ceil(clusters / resident_clusters(cluster_size(c), gpu))
    efficiency = _RATE * gpu.flops(p.dtype) / gpu.bf16_flops
    if c.compute_warpgroups == 1:
        efficiency *= _ONE_AHEAD if c.schedule == "ahead" else _ONE_WARPGROUP
    efficiency *= _SWIZZLE_64 if swizzle_bytes(p, c) == 64 else 1.0
    if p.normalised:  # rows times themselves beside each product
        columns = gemm.warpgroup_tile(c)[1]
        efficiency *= columns / (columns + gemm.ROWS)
    efficiency *= _BLOCKS_OF_A_STEP.get(c.tile_k // BLOCK, 1.0) if p.scales == "block" else 1.0
    efficiency *= _AHEAD if c.schedule == "ahead" else 1.0
    held = 2 if c.schedule == "ahead" else 1  # stages that are read, and so not filled
    arithmetic = gemm.multiply_seconds(c, gpu, efficiency) + _ISSUE[c.schedule]
    if itemsize_of(p.dtype) > 1 or not _is_wide(c):
        arithmetic += _ISSUE_SHARED[max(down, across)]
    crowded = _crowded(problem, config, gpu) * (_APART if crowds(p, c) else 1.0)
    latency = _LATENCY / max(c.max_concurrent_steps - held, 0.5)
    loaded = _loaded(p, c) / rates.load_bytes(gpu)
    step = gemm.together(_STEP_NORM, arithmetic, loaded, _shared_memory(p, c) / gpu.clock_hz, latency, crowded)
    store = _STORE * gemm.store_seconds(c, itemsize_of(p.out_dtype), gpu)
    store *= _STORE_ACROSS[_aligned(problem.n * itemsize_of(p.out_dtype))] * _STORE_NARROW.get(config.epilogue_tile_n, 1.0)
    steps = _of_a_block(c, waves, k_steps(p, c), step, store) * gemm.raster_factor(c.raster_width, _STRIP)
    under_power = 2 * tiles * c.tile_m * c.tile_n * c.tile_k * k_steps(p, c) / (_POWER_CAP * gpu.flops(p.dtype))
    overlapped = c.schedule in ("pingpong", "deferred") and waves > 1
    if c.schedule == "ahead" and max(down, across) > 1 and min(alignments(p)) < 128:
        steps *= _AHEAD_SHARED
    steps = slowdown(max(steps, under_power)) / (_OVERLAPPED if overlapped else 1.0)
    memory = _HBM * _moved(multiplied(problem)) / gpu.memory_bytes_per_s
    if computes_transposed(config) and itemsize_of(p.dtype) == 1 and c.tile_k == BLOCK:
        memory *= _SHORT_STEPS
    read_again = p.batch * p.n * p.k * itemsize_of(p.dtype) * (columns_of_b(p, c) / c.tile_n - 1)
    memory += _AGAIN * read_again / gpu.memory_bytes_per_s
    reduction = _prepared(problem, gpu)
    if c.cluster == "k":
        summed = _SUM + (_SUM_OWN + _SUM_PART * (c.split_k - 1)) * gemm.store_seconds(c, 4, gpu)
        reduction += waves * (_SHARED * summed if adds_shares(p, c) else summed)
    elif c.split_k > 1:
        reduction += (
            _LAUNCH + _SUM_RESIDUAL * problem.residual + _PARTS * p.batch * p.m * p.n * 4 / (2 * gpu.memory_bytes_per_s)
        )
    own_pipeline = 0.0 if c.schedule == "cooperative" else _SOONER
    at_once, clusters = resident_clusters(cluster_size(c), gpu), max(clusters, 1)
    waves = max(waves, 1)
    last = clusters - (waves - 1) * at_once
    wave = gemm.together(_MEMORY_NORM, steps / waves, memory * at_once / clusters)
    last_wave = gemm.together(_MEMORY_NORM, steps / waves, memory * last / clusters)
    start = _LAUNCH + _LATENCY + crowded + _COLD + _START_SHARED[max(down, across)] - own_pipeline
    return start + (waves - 1) * wave + last_wave + reduction


def _prepared(p: Problem, gpu: Gpu) -> float:
    """Seconds that XLA takes to split operands of float32 into parts, or to transpose them: at HBM's rate, each in a kernel."""
    if p.dtype != "float32":
        return 0.0
    a, b = p.batch * p.m * p.k, p.batch * p.n * p.k
    if p.algorithm in algorithms.PRODUCTS:
        sizes, written = [a, b], 2 * algorithms.parts_of(p.algorithm)
    else:
        sizes, written = [a] * (p.layout[0] == "t") + [b] * (p.layout[1] == "n"), 4
    return sum(_LAUNCH + size * (4 + written) / (rates.HBM * gpu.memory_bytes_per_s) for size in sizes)


def _of_a_block(c: Config, waves: int, steps: int, step: float, store: float) -> float:
    """Seconds that a block takes for its tiles, of so many steps each.

    Where warpgroups take turns, a store runs beside the other's steps, but for the last. Where it is deferred, beside the next
    tile's. Not all of it is hidden then.
    """
    if c.schedule == "deferred":
        return waves * (max(steps * step, store) + _NOT_HIDDEN[c.schedule] * store) + store
    if c.takes_turns:
        return waves * (max(steps * step, (steps * step + store) / 2) + _NOT_HIDDEN[c.schedule] * store) + store
    return waves * (steps * step + store)


def slowdown(seconds: float) -> float:
    """What becomes of a time at the clock of a short burst: within milliseconds the power cap lowers the clock."""
    return seconds * (1.0 + _HOT * min(1.0, seconds / _HEATING))


def _moved(p: Problem) -> float:
    """What is read and written counts as, in bytes, for a problem `multiplied`: operands once for each product of parts."""
    a, b = (len(products(p)) * _HBM_ACROSS_LINES[aligned] for aligned in alignments(p))
    more = (a - 1.0) * p.m + (b - 1.0) * p.n
    return bytes_moved(p) + itemsize_of(p.dtype) * p.batch * p.k * more


def _loaded(p: Problem, c: Config) -> float:
    """What the loads of a pipeline step count as, in bytes: rows across lines take longer, shared operands less long."""
    a_aligned, b_aligned = alignments(p)
    down, across = neighbours(c)
    columns = columns_of_b(p, c)
    if columns != c.tile_n:  # such tiles do not all begin at lines
        b_aligned = min(b_aligned, _aligned(c.tile_n * itemsize_of(p.dtype)))

    def times(aligned: int, blocks: int) -> float:
        if itemsize_of(p.dtype) == 1:
            return _ACROSS_LINES[aligned] * (_MULTICAST_8[not _is_wide(c)] if blocks == 2 else 1.0)
        return _MULTICAST[blocks] + (_ACROSS_LINES[aligned] - 1.0) * _MULTICAST_ACROSS[blocks]

    a_t, b_t = transposed(p)
    own = c.schedule != "cooperative" or columns != c.tile_n
    rows = (c.tile_m if a_t else _rows_loaded(p.m, c.tile_m, across, own)) * times(a_aligned, across)
    rows += (_rows_loaded(p.n, c.tile_n, down, own) if b_t else columns) * times(b_aligned, down)
    return _LOADS * itemsize_of(p.dtype) * c.tile_k * rows


def _rows_loaded(side: int, tile: int, blocks: int, own: bool) -> float:
    """What the rows of a tile count as that lies along k: TMA fills those outside the array with zeros, and that takes longer.

    With a pipeline of its own the kernel does not load them, but for what makes each of the blocks that share it load eights.
    They count where there is one tile along the side, so that each block has them.
    """
    inside = min(side, tile)
    if own:
        return min(_up(inside, 8 * blocks), tile)
    return inside + _ZEROS * (tile - inside)


def _is_wide(c: Config) -> bool:
    """Whether a tile is one of those whose clusters, with operands of 8 bits, are no slower (`_MULTICAST_8`)."""
    return c.tile_m * c.tile_n >= 128 * 192


def _shared_memory(p: Problem, c: Config) -> float:
    """Clocks in which shared memory takes a step's tiles and gives them to wgmma, which reads all columns for each 64 rows."""
    rows, columns = gemm.warpgroup_tile(c)
    read = (1 if c.takes_turns else c.compute_warpgroups) * (rows + rows // gemm.ROWS * columns)
    return _SMEM * itemsize_of(p.dtype) * c.tile_k * (read + c.tile_m + columns_of_b(p, c)) / _SMEM_BYTES_PER_CLOCK


def _crowded(p: Problem, c: Config, gpu: Gpu) -> float:
    """Seconds that a step takes where all blocks read an operand whose rows along m or n are shorter than a line of 128 bytes.

    Each block asks for each row of a step, all at about the same time, and the rows lie in few lines. Those of a cluster that
    share it ask once.
    """
    a_t, b_t = transposed(p)
    down, across = neighbours(c)
    sides = ((a_t, p.m, p.n / c.tile_n / across), (not b_t, p.n, p.m / c.tile_m / down))
    asking = (min(blocks, gpu.sms) for along, length, blocks in sides if along and 0 < length * itemsize_of(p.dtype) < 128)
    return _CROWD * c.tile_k * sum(asking)


def alignments(p: Problem) -> tuple[int, int]:
    """What the first bytes of rows of A and of B are multiples of, 128 at most."""
    a_t, b_t = transposed(p)
    size = itemsize_of(p.dtype)
    return _aligned((p.m if a_t else p.k) * size), _aligned((p.k if b_t else p.n) * size)


def _aligned(row_bytes: int) -> int:
    """What all rows begin at multiples of, of 128, 64, 32 and 16 bytes."""
    return max(16, math.gcd(row_bytes, 128))


_TILES = (
    *((128, 256), (256, 128), (128, 192), (192, 128), (192, 256), (256, 192)),
    *((128, 128), (64, 256), (128, 64), (64, 128), (64, 64)),
)
_TILES_8 = ((256, 128), *(tile for tile in _TILES if tile != (256, 128)))  # of 8 bits: it was faster than 128 x 256
_TILES_IN_TURN = ((128, 192), (128, 160))  # that one of two warpgroups computes; others were slower
_DEFERRED = (128, 256)  # the tile whose store is deferred
_FEW_ROWS = (8, 16, 24, 32, 48)  # tile_m of the transposed product
_MOST_FEW_ROWS = 256  # of A, with which the tuner tries it
_MOST_PARTS = 4  # tiles of fitted rows that a problem's rows are
_MOST_WAVES = 3  # of tiles of fitted columns
_MOST_AHEAD = 12  # of the best configs, which are candidates with the next step's wgmma in flight too
_WAVE_ROWS = (128, 192, 256)  # of tiles whose width is fitted to a problem
_WAVE_K = 128  # at least
_HALF_PANEL = 32  # columns
_ONE_WAVE_WIDTH = 160  # columns of such tiles, up to which more waves were slower
_WAVE_SPLITS = {  # (cluster, split_k) by the blocks of a cluster
    1: (("none", 1), ("m", 1), ("n", 1), ("none", 2), ("k", 2)),
    2: (("m", 1), ("n", 1)),
    4: (("m4", 1), ("n4", 1)),
}
_MOST_WAVES_IN_PARTS = 4  # with k divided, of such tiles
_WAVE_MORE = 16  # columns that a tile costs beside its own: rows of its other operand
IN_FLIGHT = 112 * 1024  # bytes of B in a block's pipeline that are enough
_MOST_SUMS = 256 * 192  # elements of a tile that two consumers add up, with 40 registers left to a producer thread
_MOST_DEFERRED = 128 * 256  # elements of a tile that is kept in registers
_MOST_TURNED = {128: 240, 256: 104}  # columns of such a tile of so many rows, of the transposed product of a B stored [k, n]
_SHORT_K = 128  # up to which no store is deferred by default
_LONG_K = 1024  # with which the default may be ping-pong
_DIVISIONS = ((2, "n"), (2, "m"), (1, "n"))  # consumer warpgroups, and the side that they share
_SMALLEST = 64  # rows and columns of the tile that no two consumers share: each would read all of A (docs/kernels/matmul.md)
_ONE_CONSUMER = 64 * 64  # elements of a tile that one consumer warpgroup computes, at most; twice as many where k is long
_SPLITS = (
    ("none", 1),
    ("m", 1),
    ("n", 1),
    ("m4", 1),
    ("n4", 1),
    ("k", 2),
    ("none", 2),
    ("none", 3),
    ("none", 4),
    ("none", 8),
)  # (cluster, split_k)


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: of each tile, split of k, wg_dimension and size of
    cluster one.

    The pipeline is as deep as shared memory allows, and strips are 8 tiles wide. With at most 48 rows, some compute the
    transposed product. Raises ValueError where `supports` has a reason.
    """
    return [config for _, config in _ranked(problem, gpu)]


def _ranked(problem: Problem, gpu: Gpu, most: int | None = None) -> list[tuple[float, Config]]:
    """The `candidates` with their cost; with `most`, of tiles no more than so many."""
    require("matmul", supports(problem, gpu), problem, gpu)
    ranked = list(itertools.islice(_best_of_each(problem, gpu), most))
    known = [config for _, config in ranked]
    ahead = (deepest(problem, config, gpu) for config in _ahead(problem, known, gpu))
    ranked += [(cost(problem, config, gpu), config) for config in ahead if config is not None and config not in known]
    return sorted(ranked, key=lambda pair: pair[0])


def _best_of_each(problem: Problem, gpu: Gpu) -> Iterator[tuple[float, Config]]:
    """Of each tile, split of k, wg_dimension, schedule and size of cluster the config of least cost, the least first.

    Few are asked for, mostly. A config costs no less than with the deepest pipeline and the widest epilogue tile, whether these
    fit or not. So what fits is looked at of those alone which come first by that.
    """
    shapes = itertools.chain(_shapes(problem, gpu), _overlapped(problem, gpu), _by_waves(problem, gpu))
    queue = [(cost(problem, config, gpu), False, number, config) for number, config in enumerate(shapes)]
    heapq.heapify(queue)
    seen = set()
    while queue:
        seconds, fits, number, config = heapq.heappop(queue)
        found = config if fits else deepest(problem, config, gpu)
        if found is None:
            continue
        if not fits:
            heapq.heappush(queue, (cost(problem, found, gpu), True, number, found))
            continue
        key = (found.tile_m, found.tile_n, found.tile_k, found.wg_dimension, found.split_k, found.schedule, cluster_size(found))
        if key not in seen:
            seen.add(key)
            yield seconds, found


def thrifty(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs for large products without pause, where the power cap makes the fastest of what takes the least energy.

    Steps of 128 of k have half as many barriers and waits; the tiles of three consumers load 22 % less than those of two.
    """
    if itemsize_of(multiplied(problem).dtype) != 2 or not _many_tiles(problem, gpu):
        return []
    long_steps = dataclasses.replace(_shape(*_DEFERRED, 128), schedule="deferred", raster_width=2 * _STRIP)
    large_tile = dataclasses.replace(_shape(192, 256, 64), schedule="ahead", compute_warpgroups=3)
    found = (deepest(problem, config, gpu) for config in (long_steps, large_tile))
    return [config for config in found if config is not None]


def _tiles(problem: Problem) -> list[tuple[int, int, int]]:
    """Tiles for any problem, and for few rows those of the transposed product."""
    few = next((rows for rows in _FEW_ROWS if problem.m <= rows), None)
    line = _line(problem)
    tiles = [(few, n, k) for n in (64, 128, 192, 256) for k in (line, 2 * line)] if few else []
    if itemsize_of(problem.dtype) == 1:
        return tiles + [(128, 128, 2 * line), *((m, n, line) for m, n in _TILES_8)]
    return tiles + [(m, n, line) for m, n in _TILES]


def _shapes(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles, and how they are divided, with as many steps as any of them may have."""
    divided: list[tuple[tuple[int, int, int], Sequence[tuple[int, str]], Sequence[tuple[str, int]]]] = []
    for tile in _tiles(problem):
        parts = filling_parts(problem, *tile, gpu)
        more = (("none", parts),) if parts > 1 and ("none", parts) not in _SPLITS else ()
        divided.append((tile, _DIVISIONS, (*_SPLITS, *more)))
    divided += [((m, n, _line(problem)), _DIVISIONS, _SPLITS[:5]) for m, n in _fitted(problem, gpu)]
    for (tile_m, tile_n, tile_k), divisions, splits in divided:
        shape = _shape(tile_m, tile_n, tile_k)
        for warpgroups, wg_dimension in divisions:
            if warpgroups == 2 and tile_m == tile_n == _SMALLEST:
                continue
            large = warpgroups == 1 and tile_m * tile_n > _ONE_CONSUMER
            if large and (problem.k < _LONG_K or tile_m * tile_n > 2 * _ONE_CONSUMER or problem.normalised):
                continue
            for cluster, split_k in splits:
                if _too_few(problem, tile_m, tile_n, cluster):
                    continue
                config = dataclasses.replace(
                    shape, compute_warpgroups=warpgroups, wg_dimension=wg_dimension, cluster=cluster, split_k=split_k
                )
                if not large:
                    yield config
                elif cluster != "k":  # that alone keeps the tensor cores busy
                    yield dataclasses.replace(config, schedule="ahead")


def _too_few(p: Problem, tile_m: int, tile_n: int, cluster: str) -> bool:
    """Whether a cluster has one tile, or more than one of four blocks none, or operands are not those that were measured."""
    if cluster not in ("m", "n", "m4", "n4"):
        return False
    tiles = math.ceil(p.m / tile_m if cluster[0] == "m" else p.n / tile_n)
    if cluster in ("m", "n"):
        return tiles < 2
    whole_lines = cluster == "m4" and min(alignments(p)) > _FOUR_ALIGNED
    return tiles < 3 or itemsize_of(multiplied(p).dtype) != 2 or whole_lines


def filling_parts(p: Problem, tile_m: int, tile_n: int, tile_k: int, gpu: Gpu) -> int:
    """Into how many parts k is divided where the parts of all tiles are one wave: no part without a step of k."""
    tiles, steps = p.batch * math.ceil(p.m / tile_m) * math.ceil(p.n / tile_n), math.ceil(p.k / tile_k)
    at_once = max(1, min(gpu.sms // tiles, steps)) if tiles else 1
    return math.ceil(steps / math.ceil(steps / at_once)) if steps else 1


def _too_many(p: Problem, tile_m: int, tile_n: int, split_k: int, gpu: Gpu) -> bool:
    """Whether k is divided though the parts of all tiles are several waves: no such product was measured."""
    tiles = p.batch * math.ceil(p.m / tile_m) * math.ceil(p.n / tile_n)
    return split_k > 1 and tiles * split_k > _MOST_WAVES_IN_PARTS * gpu.sms


def _fitted(problem: Problem, gpu: Gpu) -> Iterator[tuple[int, int]]:
    """Rows and columns of tiles that follow from the problem's sides: those along wgmma's N, which come in eights.

    Rows of the transposed product that few tiles have in common; columns with which all tiles are one to three whole waves.
    """
    p = problem
    if itemsize_of(multiplied(p).dtype) != 2:
        return
    a_t, b_t = transposed(p)
    if not a_t:
        for parts in range(1, _MOST_PARTS + 1):
            rows = _up(math.ceil(p.m / parts), 8)
            if rows % gemm.ROWS and _FEW_ROWS[-1] < rows < 256:
                yield from ((rows, columns) for columns in (64, 128, 192, 256))
    if b_t:
        for tile_m in (64, 128, 192, 256):
            for waves in range(1, _MOST_WAVES + 1):
                across = gpu.sms * waves // (p.batch * math.ceil(p.m / tile_m))
                columns = _up(math.ceil(p.n / across), 32) if across else 0  # narrower epilogue tiles are slow
                if columns % gemm.ROWS and gemm.ROWS < columns < 256 and tile_m < p.m + gemm.ROWS:
                    yield tile_m, columns


def _up(size: int, unit: int) -> int:
    """The next multiple of unit."""
    return -(-size // unit) * unit


def _by_waves(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles of other widths than `_TILES` have, along n or, of the transposed product, along m, that fill waves better."""
    p = problem
    for turned in (False, True):
        schedules = ("ahead", "deferred") if _in_whole_panels(p, turned) else ("cooperative", "ahead", "deferred")
        for rows, width, splits in _waves(p, gpu, turned):
            tile_m, tile_n = (width, rows) if turned else (rows, width)
            registers = 24 if rows * width > _MOST_SUMS else 40
            shape = _shape(tile_m, tile_n, 64, registers, "n" if turned != (rows % 128 != 0) else "m")
            for schedule, (cluster, split_k) in itertools.product(schedules, splits):
                if _too_few(p, tile_m, tile_n, cluster) or _too_many(p, tile_m, tile_n, split_k, gpu):
                    continue
                if schedule != "deferred" or (_defers(p, rows, width, turned) and split_k == 1 and _many_tiles(p, gpu)):
                    yield dataclasses.replace(shape, schedule=schedule, cluster=cluster, split_k=split_k)


def _defers(p: Problem, rows: int, width: int, turned: bool) -> bool:
    """Whether two consumers have registers for a tile and the one before it.

    Of 192 rows, whose columns they share, they have not; nor of the widest with the transposed product of a B stored [k, n].
    """
    if rows % 128 or rows * width > _MOST_DEFERRED:
        return False
    return not turned or p.layout[1] == "t" or width <= _MOST_TURNED[rows]


def _waves(p: Problem, gpu: Gpu, turned: bool) -> Iterator[tuple[int, int, Sequence[tuple[str, int]]]]:
    """Rows and width of tiles, and the clusters and splits to try them with; of the transposed product where turned.

    Where the operand of that side lies along it, tiles end between panels (`columns_of_b`). Where its rows begin at lines too,
    what pays is half panels, k in one part, and 96 or 160 columns for one wave alone (docs/kernels/matmul.md).
    """
    if itemsize_of(p.dtype) != 2 or p.residual or p.normalised or p.m <= gemm.ROWS or p.k < _WAVE_K:
        return
    across, along = (p.n, p.m) if turned else (p.m, p.n)
    along_k = p.layout[0] == "n" if turned else p.layout[1] == "t"
    whole = _in_whole_panels(p, turned)
    if whole and p.layout != "nn":  # not measured
        return
    for rows in _WAVE_ROWS:
        both = rows % 128 == 0  # two warpgroups share the rows; those of 192 share the columns
        if rows - gemm.ROWS >= across or not (both or along_k):  # a tile of fewer rows would do
            continue
        tiles = p.batch * math.ceil(across / rows)
        for blocks, splits in _WAVE_SPLITS.items():
            step = _HALF_PANEL if whole else 8 if both else 16
            for width in widths_by_waves(along, rows, tiles, gpu, blocks, step)[: 2 if blocks == 1 else 1]:
                if not whole:
                    yield rows, width, splits
                elif width > _ONE_WAVE_WIDTH or tiles * math.ceil(along / width) <= gpu.sms:
                    yield rows, width, [split for split in splits if split[1] == 1]


def _in_whole_panels(p: Problem, turned: bool) -> bool:
    """Whether the operand of tiles' width lies along it in rows that panels of a swizzle divide."""
    across, stored = (p.m, p.layout[0] == "t") if turned else (p.n, p.layout[1] == "n")
    return stored and across % gemm.ROWS == 0


def widths_by_waves(side: int, rows: int, tiles: int, gpu: Gpu, blocks: int = 1, step: int = 8) -> list[int]:
    """The widths, multiples of step but not of 64, of tiles of so many rows, those that take the least time by waves first.

    side: what the tiles divide. tiles: how many there are across it, of the whole batch. blocks: of a cluster, which the tiles
    along the side fill.
    """
    time, at_once = {}, blocks * resident_clusters(blocks, gpu)
    for width in range(96, 257, step):
        count = math.ceil(side / width)
        if width % gemm.ROWS and width == step * math.ceil(side / count / step):  # else fewer columns would do
            time[width] = math.ceil(tiles * _up(count, blocks) / at_once) * rows * (width + _WAVE_MORE)
    return sorted(time, key=time.__getitem__)


def _overlapped(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles of schedules whose stores run beside the next tile's steps, for problems like those measured.

    These have several tiles a block, each of several steps. Where k is short, a step has two lines of it.
    """
    if problem.k <= _SHORT_K or itemsize_of(multiplied(problem).dtype) != 2:
        return
    tile_m, tile_n = _DEFERRED
    if problem.batch * math.ceil(problem.m / tile_m) * math.ceil(problem.n / tile_n) > gpu.sms:
        tile_k = 128 if problem.k < _LONG_K else 64
        for cluster in ("none", "m", "n"):
            if not _too_few(problem, tile_m, tile_n, cluster):
                yield dataclasses.replace(_shape(tile_m, tile_n, tile_k), schedule="deferred", cluster=cluster)
    if problem.k < _LONG_K or problem.residual:
        return
    for tile_m, tile_n in _TILES_IN_TURN:
        tiles = problem.batch * math.ceil(problem.m / tile_m) * math.ceil(problem.n / tile_n)
        if tiles > 2 * gpu.sms:
            yield dataclasses.replace(_shape(tile_m, tile_n, 64), schedule="pingpong")


def _ahead(problem: Problem, ranked: Sequence[Config], gpu: Gpu) -> Iterator[Config]:
    """The best of few tiles, with the next step's wgmma in flight, for problems like those measured."""
    if problem.normalised or itemsize_of(multiplied(problem).dtype) != 2:
        return
    for config in ranked[:_MOST_AHEAD]:
        few = computes_transposed(config) and config.tile_m < gemm.ROWS
        if problem.residual and not few:
            continue
        tiles = problem.batch * math.ceil(problem.m / config.tile_m) * math.ceil(problem.n / config.tile_n) * config.split_k
        alone = config.cluster != "k" or few or (config.compute_warpgroups == 2 and not computes_transposed(config))
        if config.schedule == "cooperative" and alone and tiles <= 4 * gpu.sms:
            yield dataclasses.replace(config, schedule="ahead", max_concurrent_steps=_STEPS[-1])


def _shape(tile_m: int, tile_n: int, tile_k: int, memory_registers: int = 40, wg_dimension: str = "m") -> Config:
    """A tile of two consumer warpgroups, with as many steps as any may have."""
    return Config(
        tile_m=tile_m,
        tile_n=tile_n,
        tile_k=tile_k,
        max_concurrent_steps=_STEPS[-1],
        compute_warpgroups=2,
        wg_dimension=wg_dimension,
        cluster="none",
        raster_dimension="m",
        raster_width=_STRIP,
        epilogue_tile_n=64,
        split_k=1,
        memory_registers=memory_registers,
    )


def deepest(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """The config with as many steps as fit, and the widest epilogue tile that runs. A deeper pipeline is slower in few cases.

    Where stores run beside wgmma, the narrowest: they take no time of the tensor cores. But with A transposed and the store
    deferred these spill, and with two lines of k a step they are slower. The narrowest too where a step has 256 of k with 8
    bits: a third stage is worth more.
    """
    widths = (64,) if computes_transposed(config) else (64, 32)
    few_stages = itemsize_of(problem.dtype) == 1 and config.tile_k > BLOCK and _fits(problem, config, gpu, 3, 32)
    short_steps = config.tile_k <= _line(problem) and not transposed(problem)[0]
    beside_wgmma = config.takes_turns or (config.schedule == "deferred" and short_steps)
    narrow = beside_wgmma or (few_stages and not _fits(problem, config, gpu, 3, 64))
    narrowest = () if computes_transposed(config) else (16,)  # for a part of fewer columns than 32
    for columns in (*(reversed(widths) if narrow else widths), *narrowest):
        if steps := min(_most_steps(problem, _alike(config), gpu, columns), _enough(problem, config)):
            found = dataclasses.replace(config, max_concurrent_steps=steps, epilogue_tile_n=columns)
            if check(problem, found, gpu) is None:  # what refuses it refuses it with fewer steps
                return found
    return None


def _alike(config: Config) -> Config:
    """The first of the configs that take as much shared memory as this one, whatever shares operands and parts of k."""
    if config.cluster == "k" or (config.cluster, config.split_k) in (("none", 1), ("none", 2)):
        return config
    return dataclasses.replace(config, cluster="none", split_k=min(config.split_k, 2))


def _enough(problem: Problem, config: Config) -> int:
    """Steps with which a deeper pipeline is slower: of few rows that wait for HBM, where blocks along k leave no SM idle.

    What is in flight then lies in so many rows of B that HBM's pages are opened again (docs/kernels/matmul.md).
    """
    if config.cluster != "k" or not computes_transposed(config):
        return _STEPS[-1]
    step = config.tile_n * config.tile_k * itemsize_of(problem.dtype)
    return _STEPS[bisect.bisect_right(_STEPS, max(IN_FLIGHT // step, _STEPS[0])) - 1]


@functools.lru_cache(maxsize=1024)  # several `candidates` are alike
def _most_steps(problem: Problem, config: Config, gpu: Gpu, columns: int) -> int:
    """The most of `_STEPS` whose stages fit into shared memory, 0 for none."""
    fitting = bisect.bisect_right(_STEPS, 0, key=lambda steps: not _fits(problem, config, gpu, steps, columns))
    return _STEPS[fitting - 1] if fitting else 0


def _fits(problem: Problem, config: Config, gpu: Gpu, steps: int, columns: int) -> bool:
    """Whether so many steps and such an epilogue tile leave room in shared memory."""
    found = dataclasses.replace(config, max_concurrent_steps=steps, epilogue_tile_n=columns)
    return smem_bytes(problem, found) <= gpu.smem_per_block


@functools.lru_cache(maxsize=256)  # `resolve` compares each near entry with it
def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`. Raises ValueError where there is none."""
    best = [config for _, config in _ranked(problem, gpu, most=_MOST_AHEAD)]
    return first_of(best, problem, gpu)


def distance(x: Problem, y: Problem) -> float | None:
    """How far problem `y` is from `x`, for which a config was tuned; None where the config does not carry over.

    The sum of |log2| of the ratios of m, n, k and batch, and a small step for another dtype of as many bits, another layout or
    epilogue, which tile alike: what was tuned for a plain product carries over to the same one with an epilogue.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.batch, y.batch))
    if itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype) or 0 in itertools.chain(*sides):
        return None
    if itemsize_of(x.dtype) != itemsize_of(y.dtype) or (x.scales == "block") != (y.scales == "block"):
        return None
    if x.algorithm != y.algorithm:
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * ((x.dtype, x.b_dtype) != (y.dtype, y.b_dtype)) + 0.05 * (x.scales != y.scales) + 0.5 * (x.layout != y.layout)
    near += 0.05 * (x.bias != y.bias) + 0.05 * (x.activation != y.activation) + 0.1 * (x.residual != y.residual)
    return near if near <= 4.0 else None
