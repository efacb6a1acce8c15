"""A model of the time that a matmul takes with a config, fitted to what was measured."""

from __future__ import annotations

import math

from mgpu_ops.core import gemm, rates
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, resident_clusters
from mgpu_ops.matmul import algorithms
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
    swizzle_bytes,
    transposed,
)
from mgpu_ops.matmul.quantities import bytes_moved

# Fitted to nine recorded sweeps, 260 drawn problems, 24 of few rows and 92 stored entries of an H200 (docs/kernels/matmul.md).
# `_ISSUE` of "ahead", `_STEP_NORM_AHEAD` and `_FIRST_STEP`: to 44 drawn problems of 65 to 3000 rows
# (results/2026-11-29-h200-matmul-65-to-3000-rows.jsonl.gz). The first and the last, `_LOADS_ALONE`, `_START_SHARED`, `_PARTS`
# and `_SUM...` also to 37 of few tiles (results/2026-11-29-h200-matmul-few-tiles.jsonl.gz).
_RATE = 1.27  # of rates.POWER: bursts draw less power than what a program sustains
_ONE_WARPGROUP = 0.7325  # of the rate is left with one consumer: nothing multiplies while it stores or waits,
_ONE_AHEAD = 0.9634  # and where the next step is in flight
_OVERLAPPED = 1.02  # times the rate, power included, where stores run beside wgmma: there is always one in flight
_NOT_HIDDEN = {"deferred": 0.5666, "pingpong": 0.841}  # of a store's time takes its tile longer all the same: short k
_SWIZZLE_64 = 0.807  # of the rate is left with 64-byte swizzles: wgmma's reads have bank conflicts
_SMEM, _SMEM_BYTES_PER_CLOCK = 0.8241, 128  # of the time at which shared memory is read and written, at the boost clock
_LOADS = 0.6674  # of the time at rates.LOAD_BYTES_PER_CLOCK
_LOADS_ALONE = 0.243  # of that time a block saves where it loads alone; in proportion to the SMs that do nothing
_STORE = 1.206  # of the time at rates.LOAD_BYTES_PER_CLOCK: nothing of a tile multiplies meanwhile
# Times as long take the loads of rows that do not all begin at 128-byte lines, by the bytes they begin at multiples of: such a
# row of a swizzle tile lies in two lines, and in part of a sector of 32 bytes more.
_ACROSS_LINES = {128: 1.0, 64: 1.085, 32: 1.321, 16: 2.243}
_STORE_NARROW = {16: 2.578}  # as long take stores in epilogue tiles of so many columns
_STORE_ACROSS = {128: 1.0, 64: 1.101, 32: 1.272, 16: 2.06}  # as long take the stores of such rows of the output
# Clocks of an SM for an element of the epilogue, which takes so long where nothing multiplies beside it.
_FINISH = {"relu": 0.004, "silu": 0.114, "gelu": 0.085, "gelu_erf": 0.083}
_FINISH_BIAS = 0.022
_FINISH_RESIDUAL = {"cooperative": 0.1, "ahead": 0.1, "deferred": 0.03, "pingpong": 0.06}
_RESIDUAL_TWO_STAGES = 1.15  # times as long takes a step, where the residual's buffers leave room for two stages
_RESIDUAL_IN_TURN = 5.8e-7  # s until an epilogue tile of a residual is loaded, where consumers take turns
_ZEROS = 2.372  # times as long as to load a row takes TMA to fill one outside the array with zeros
_MULTICAST = {1: 1.0, 2: 0.715, 4: 0.1456}  # of the time is left to loads of an operand that so many blocks share,
_MULTICAST_ACROSS = {1: 1.0, 2: 0.4634, 4: 0.1343}  # and of what they take longer across lines
_AHEAD_SHARED = 1.05  # times as long with the next wgmma in flight, across lines: a stage is held longer, and others wait
_LATENCY = 7.307e-07  # s from a TMA request to its data
_LAUNCH = 1.092e-06  # s
# s less in kernels of up to `_SAVED_WHOLE`, and nothing from `_SAVED_UNTIL` on: 224 drawn problems, those of up to 5 us 0.2 to
# 0.5 us faster than modelled before (results/2026-11-30-h200-matmul-small.jsonl.gz).
_SAVED, _SAVED_WHOLE, _SAVED_UNTIL = 0.5e-6, 2.5e-6, 6.5e-6
_APART = 0.8986  # of that time is left where blocks begin with steps of their own
_ISSUE = {
    "cooperative": 7.146e-08,
    "deferred": 8.642e-08,
    "pingpong": 4.162e-08,
    "ahead": 4.088e-08,
}  # s of a step in which nothing multiplies
_ISSUE_SHARED = {1: 0, 2: 1.777e-08, 4: 3.034e-09}  # and more where so many blocks share an operand: each waits for the others
_START_SHARED = {1: 0.0, 2: 1.889e-07, 4: 3.533e-07}  # s later begin the blocks of a cluster: each waits for the others
_CROWD = 7.275e-11  # s for each row of a line that blocks ask for at once, and each block: see `_crowded`
_SOONER = 2.507e-07  # s less, where the kernel has its own pipeline and not Pallas's
_FIRST_STEP = 0.572  # of a step is added once with the next step's wgmma in flight: nothing hides the first step's loads
_COLD = 6.633e-07  # s more, in products of a few microseconds, until operands that are not in L2 arrive
_PARTS = 3.2  # times the parts of a split k at HBM's rate: they are written, read, and partly in L2
_SUM_RESIDUAL = 1e-6  # s that the kernel which adds them up takes more with a residual
_SUM = 4.506e-07  # s that a sum in a cluster takes,
_SUM_OWN = 2.793  # and times the store of a float32 tile: for the block that adds up,
_SUM_PART = 2.739  # and for each other block
_SHARED = 0.421  # of that is left where each block adds up a share of the tile
_HBM = 1.053  # of the time at the datasheet's rate,
_HBM_ACROSS_LINES = {128: 1.0, 64: 1.133, 32: 1.119, 16: 1.038}  # and times as long for an operand of such rows
_AGAIN = 0.6  # of that time takes what tiles of B have in vain (`columns_of_b`), which the next tile loads too: partly from HBM
_STEP_NORM = 4.8  # arithmetic, loads and latency of a step overlap nearly wholly,
_STEP_NORM_AHEAD = 7.11  # the more so where the next step's wgmma is in flight,
_MEMORY_NORM = 3.016  # all steps and HBM less so
# Of short tiles (`_is_short`), fitted to results/2026-11-30-h200-matmul-17-to-64-rows.jsonl.gz and the models' products of
# -65-to-192-rows.jsonl.gz. A step takes at least so many seconds, by consumers, in tiles of fewer than 64 rows:
_LEAST_STEP = {1: 1.02e-07, 2: 1.89e-07}
_MOST_SHORT = 192  # rows of the product
_PARTS_SUMMED = 0.12  # of the time is added where a cluster adds up parts of k of some of the rows (three timed)
# With more than so many rows, and k in one part: what is left of the time of loads and of shared memory, where rows begin at
# 128-byte lines; steps and HBM overlap more.
_FEWEST = 16
_COPIES_SHORT = 0.8
_MEMORY_NORM_SHORT = 3.47
_POWER_CAP = 0.82  # of the datasheet's FLOP/s, with all SMs at work
_HOT, _HEATING = 0.08, 2e-3  # how much longer a product takes under the power cap, and s until then
STRIP = 8  # tiles: the best width of strips

# Of 8 bits, whose other constants are those of 16. The first two are fitted to 54 drawn problems without scales of blocks
# (results/2026-11-29-h200-matmul-8-bits*.jsonl.gz), the others to eight of FP8 (docs/kernels/matmul.md, "Eight bits").
_STORE_8_BITS = 1.31  # times as long take stores
_FINISH_SCALES = {"tensor": 0.033, "row": 0.044}  # clocks for an element of the epilogue, as `_FINISH`
# With scales of blocks, as `_MULTICAST`, of tiles of 128 x 192 on and of smaller ones: the blocks of a cluster wait as long for
# these. For the wider ones they do not, and `_ISSUE_SHARED` is none.
_MULTICAST_BLOCKS = (0.97, 1.05)
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
    held = 2 if c.schedule == "ahead" else 1  # stages that are read, and so not filled
    arithmetic = gemm.multiply_seconds(c, gpu, efficiency) + _ISSUE[c.schedule]
    if p.scales != "block" or not _is_wide(c):
        arithmetic += _ISSUE_SHARED[max(down, across)]
    crowded = _crowded(problem, config, gpu) * (_APART if crowds(p, c) else 1.0)
    latency = _LATENCY / max(c.max_concurrent_steps - held, 0.5)
    at_work = min(1.0, clusters * cluster_size(c) / gpu.sms)  # of the SMs
    loaded = _loaded(p, c) / rates.load_bytes(gpu) * (1.0 - _LOADS_ALONE * (1.0 - at_work))
    norm = _STEP_NORM_AHEAD if c.schedule == "ahead" else _STEP_NORM
    shared = _shared_memory(p, c) / gpu.clock_hz
    short = _is_short(problem, config)
    hidden = short and problem.m > _FEWEST and config.split_k == 1
    if hidden and min(alignments(p)) == 128:
        loaded, shared = _COPIES_SHORT * loaded, _COPIES_SHORT * shared
    least = _LEAST_STEP[min(c.compute_warpgroups, 2)] if short and config.tile_m < gemm.ROWS else 0.0
    step = gemm.together(norm, arithmetic, loaded, shared, latency, crowded, least)
    step *= _RESIDUAL_TWO_STAGES if p.residual and c.max_concurrent_steps == 2 else 1.0
    store = _STORE * gemm.store_seconds(c, itemsize_of(p.out_dtype), gpu)
    store *= _STORE_8_BITS if itemsize_of(p.dtype) == 1 and p.scales != "block" else 1.0
    store *= _STORE_ACROSS[_aligned(problem.n * itemsize_of(p.out_dtype))] * _STORE_NARROW.get(config.epilogue_tile_n, 1.0)
    finish = _finish(p, c, gpu)
    steps = _of_a_block(c, waves, k_steps(p, c), step, store, finish) * gemm.raster_factor(c.raster_width, STRIP)
    under_power = 2 * tiles * c.tile_m * c.tile_n * c.tile_k * k_steps(p, c) / (_POWER_CAP * gpu.flops(p.dtype))
    if p.activation != "none" and not c.takes_turns:  # at the power cap too nothing multiplies meanwhile
        under_power += waves * finish
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
    memory_norm = _MEMORY_NORM_SHORT if hidden else _MEMORY_NORM
    wave = gemm.together(memory_norm, steps / waves, memory * at_once / clusters)
    last_wave = gemm.together(memory_norm, steps / waves, memory * last / clusters)
    start = _LAUNCH + _LATENCY + crowded + _COLD + _START_SHARED[max(down, across)] - own_pipeline
    start += _FIRST_STEP * step if c.schedule == "ahead" else 0.0
    if short and c.cluster == "k" and config.tile_m < problem.m:
        reduction += _PARTS_SUMMED * last_wave
    seconds = start + (waves - 1) * wave + last_wave + reduction
    return seconds - _saved(seconds) if itemsize_of(problem.dtype) == 2 else seconds


def _saved(seconds: float) -> float:
    """What a kernel modelled to take `seconds` takes less since the warps of a block share its start (docs/kernels/matmul.md).

    The constants above were fitted to times from before. In longer kernels they make up for it.
    """
    return _SAVED * min(1.0, max(0.0, (_SAVED_UNTIL - seconds) / (_SAVED_UNTIL - _SAVED_WHOLE)))


def _is_short(p: Problem, c: Config) -> bool:
    """Whether a tile has fewer rows than the 64 of a wgmma, or is a part of few rows, with the next step's wgmma in flight.

    Of 16 bits, A stored along k: others were not timed.
    """
    rows = c.tile_m < gemm.ROWS or c.tile_m == gemm.ROWS < p.m
    timed = itemsize_of(p.dtype) == 2 and not transposed(p)[0]
    return rows and p.m <= _MOST_SHORT and c.schedule == "ahead" and timed


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


def _of_a_block(c: Config, waves: int, steps: int, step: float, store: float, finish: float) -> float:
    """Seconds that a block takes for its tiles, of so many steps each. finish: of the epilogue, before the store.

    Where warpgroups take turns, both run beside the other's steps, but for the last. Where a store is deferred, beside the next
    tile's. Not all of it is hidden then.
    """
    if c.schedule == "deferred":
        return waves * (max(steps * step, store) + _NOT_HIDDEN[c.schedule] * store + finish) + store
    if c.takes_turns:
        beside = max(steps * step, (steps * step + store + finish) / 2)
        return waves * (beside + _NOT_HIDDEN[c.schedule] * store) + store + finish
    return waves * (steps * step + store + finish)


def _finish(p: Problem, c: Config, gpu: Gpu) -> float:
    """Seconds of a tile's epilogue between its sums and its store."""
    clocks = _FINISH.get(p.activation, 0.0) + _FINISH_BIAS * p.bias + _FINISH_RESIDUAL[c.schedule] * p.residual
    clocks += _FINISH_SCALES.get(p.scales, 0.0)
    loaded = _RESIDUAL_IN_TURN * gemm.epilogue_tiles(c) if p.residual and c.takes_turns else 0.0
    return c.tile_m * c.tile_n * clocks / gpu.clock_hz + loaded


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
        if p.scales == "block":
            return _ACROSS_LINES[aligned] * (_MULTICAST_BLOCKS[not _is_wide(c)] if blocks == 2 else 1.0)
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
        return min(round_up(inside, 8 * blocks), tile)
    return inside + _ZEROS * (tile - inside)


def _is_wide(c: Config) -> bool:
    """Whether a tile is one of those whose clusters, with scales of blocks, are no slower (`_MULTICAST_BLOCKS`)."""
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


def round_up(size: int, unit: int) -> int:
    """The next multiple of unit."""
    return -(-size // unit) * unit
