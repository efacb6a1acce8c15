"""Configs worth trying for a matmul, by the model of their time. The tuner and the default use both."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import itertools
import math
from collections.abc import Iterator, Sequence
from typing import Any

from mgpu_ops.core import gemm
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, itemsize_of, require, resident_clusters
from mgpu_ops.matmul.checks import SCHEDULES, check, supports
from mgpu_ops.matmul.model import STRIP, alignments, cost, round_up
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    cluster_size,
    computes_transposed,
    has_epilogue,
    k_steps,
    multiplied,
    scales_sums,
    smem_bytes,
    transposed,
)

_STEPS = (2, 3, 4, 5, 6, 7, 8, 10, 12)
_FOUR_ALIGNED = 32  # bytes that rows begin at multiples of: with more, clusters of four along m were slower than modelled
_TILES = (
    *((128, 256), (256, 128), (128, 192), (192, 128), (192, 256), (256, 192)),
    *((128, 128), (64, 256), (128, 64), (64, 128), (64, 64)),
)
_TILES_IN_TURN = ((128, 192), (128, 160))  # that one of two warpgroups computes; others were slower,
_TILES_IN_TURN_OF_EPILOGUES = ((128, 192), (128, 128))  # and with an epilogue
_STEPS_THAT_SPILL = 4  # of a tile, where consumers of 128 x 192 take turns and sums have scales
_DEFERRED = (128, 256)  # the tile whose store is deferred
_FEW_ROWS = (8, 16, 24, 32, 48)  # tile_m of the transposed product
_MOST_FEW_ROWS = 256  # of A, with which the tuner tries it
_MOST_PARTS = 4  # tiles of fitted rows that a problem's rows are
_MOST_WAVES = 3  # of tiles of fitted columns
_MOST_AHEAD = 12  # of the best configs, which are candidates with the next step's wgmma in flight too
_WAVE_ROWS = (128, 192, 256)  # of tiles whose width is fitted to a problem
_WAVE_K = 128  # at least, in elements of 16 bits
_HALF_PANEL = 32  # columns
_ONE_WAVE_WIDTH = 160  # columns of such tiles, up to which more waves were slower
_WAVE_SPLITS = {  # (cluster, split_k) by the blocks of a cluster
    1: (("none", 1), ("m", 1), ("n", 1), ("none", 2), ("k", 2)),
    2: (("m", 1), ("n", 1)),
    4: (("m4", 1), ("n4", 1)),
}
_MOST_WAVES_IN_PARTS = 4  # with k divided, of such tiles
_WAVE_MORE = 16  # columns that a tile costs beside its own: rows of its other operand
_UNROLLED = range(11, 14)  # steps of a part of k for which a block has fewer stages than 11
_IN_FLIGHT = 112 * 1024  # bytes of B in a block's pipeline that are enough
_MOST_SUMS = 256 * 192  # elements of a tile that two consumers add up, with 40 registers left to a producer thread
_MOST_DEFERRED = 128 * 256  # elements of a tile that is kept in registers
_MOST_TURNED = {128: 240, 256: 104}  # columns of such a tile of so many rows, of the transposed product of a B stored [k, n]
# k in elements of 16 bits (`_depth`):
_SHORT_K = 128  # up to which no store is deferred by default, but with a residual
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


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The values of each Config field, in order. `check` tells which combinations run.

    The transposed product is for few rows; warpgroups take turns, or store later, where there are more tiles than blocks.
    """
    p = problem
    fitted = list(_fitted(problem, gpu))
    rows = (
        {m for m, _ in fitted}
        | {*_parts_of_few_rows(problem)}
        | {64, 128, 192, 256}
        | set(_FEW_ROWS if p.m <= _MOST_FEW_ROWS else ())
    )
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


def _widths(p: Problem, gpu: Gpu, *, turned: bool) -> set[int]:
    """The widths of tiles along n, or of the transposed product along m, that `candidates` has for a problem."""
    return {width for _, width, _ in _waves(p, gpu, turned)}


def _parts(p: Problem, gpu: Gpu) -> set[int]:
    """The parts of k with which the tiles of `candidates` are one wave."""
    return {filling_parts(p, *tile, gpu) for tile in _tiles(p)}


def _line(problem: Problem) -> int:
    """Elements of k in a swizzle row of 128 bytes."""
    return 128 // itemsize_of(multiplied(problem).dtype)


def _has_all_schedules(p: Problem) -> bool:
    """Whether operands have at most 16 bits, and no scales of blocks: what all schedules and tiles were measured with."""
    return itemsize_of(multiplied(p).dtype) <= 2 and p.scales != "block"


def _depth(p: Problem) -> int:
    """k in elements of 16 bits: 8 bits take as long as 16 with half of k, in wgmma and in memory."""
    return p.k // 2 if itemsize_of(p.dtype) == 1 else p.k


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Configs chosen without measurements, the least modelled `cost` first: of each tile, split of k, wg_dimension and size of
    cluster one.

    The pipeline is as deep as shared memory allows, and strips are 8 tiles wide. Some compute the transposed product. Raises
    ValueError where `supports` has a reason.
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
    long_steps = dataclasses.replace(_shape(*_DEFERRED, 128), schedule="deferred", raster_width=2 * STRIP)
    large_tile = dataclasses.replace(_shape(192, 256, 64), schedule="ahead", compute_warpgroups=3)
    found = (deepest(problem, config, gpu) for config in (long_steps, large_tile))
    return [config for config in found if config is not None]


def _tiles(problem: Problem) -> list[tuple[int, int, int]]:
    """Tiles for any problem, and for few rows those of the transposed product."""
    few = next((rows for rows in _FEW_ROWS if problem.m <= rows), None)
    line = _line(problem)
    tiles = [(few, n, k) for n in (64, 128, 192, 256) for k in (line, 2 * line)] if few else []
    if itemsize_of(problem.dtype) == 1:
        tiles.append((128, 128, 2 * line))
    return tiles + [(m, n, line) for m, n in _TILES]


def _shapes(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles, and how they are divided, with as many steps as any of them may have."""
    divided: list[tuple[tuple[int, int, int], Sequence[tuple[int, str]], Sequence[tuple[str, int]]]] = []
    for tile in _tiles(problem):
        parts = filling_parts(problem, *tile, gpu)
        more = (("none", parts),) if parts > 1 and ("none", parts) not in _SPLITS else ()
        divided.append((tile, _DIVISIONS, (*_SPLITS, *more)))
    divided += [((m, n, _line(problem)), _DIVISIONS, _SPLITS[:5]) for m, n in _fitted(problem, gpu)]
    divided += _parts_as_tiles(problem)
    for (tile_m, tile_n, tile_k), divisions, splits in divided:
        shape = _shape(tile_m, tile_n, tile_k)
        for warpgroups, wg_dimension in divisions:
            if warpgroups == 2 and tile_m == tile_n == _SMALLEST:
                continue
            large = warpgroups == 1 and tile_m * tile_n > _ONE_CONSUMER
            if large and (_depth(problem) < _LONG_K or tile_m * tile_n > 2 * _ONE_CONSUMER or problem.normalised):
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
    return tiles < 3 or not _has_all_schedules(p) or whole_lines


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
    if not _has_all_schedules(p):
        return
    _, b_t = transposed(p)
    for rows in _rows_of_parts(p):
        if _FEW_ROWS[-1] < rows < 256:
            yield from ((rows, columns) for columns in (64, 128, 192, 256))
    if b_t:
        for tile_m in (64, 128, 192, 256):
            for waves in range(1, _MOST_WAVES + 1):
                across = gpu.sms * waves // (p.batch * math.ceil(p.m / tile_m))
                columns = round_up(math.ceil(p.n / across), 32) if across else 0  # narrower epilogue tiles are slow
                if columns % gemm.ROWS and gemm.ROWS < columns < 256 and tile_m < p.m + gemm.ROWS:
                    yield tile_m, columns


def _parts_of_few_rows(problem: Problem) -> Iterator[int]:
    """Rows of a tile of the transposed product where two to four tiles hold all rows of A: so more SMs have one.

    B is read once from HBM, and once more from L2 for each other part.
    """
    if _has_all_schedules(problem):
        yield from (rows for rows in _rows_of_parts(problem, least=2) if _FEW_ROWS[1] <= rows <= _FEW_ROWS[-1])


def _parts_as_tiles(p: Problem) -> Iterator[tuple[tuple[int, int, int], Sequence[tuple[int, str]], Sequence[tuple[str, int]]]]:
    """Tiles of `_parts_of_few_rows`, how consumers divide them, and clusters (docs/kernels/matmul.md, "Parts of few rows")."""
    line, at_lines = _line(p), min(alignments(p)) == 128
    rows = [*_parts_of_few_rows(p)]
    if itemsize_of(p.dtype) != 2:  # no others were timed
        yield from (((m, _SMALLEST, line), _DIVISIONS, _SPLITS[:1]) for m in rows)
        return
    if p.m > gemm.ROWS and rows:
        rows.append(gemm.ROWS)
    for m in rows:
        parts = math.ceil(p.m / m)
        more = parts == 2 or p.m > gemm.ROWS  # of thirds and quarters of fewer rows, wide tiles and clusters were slower
        clusters = [("none", 1)] + [("m", 1)] * (more and at_lines and parts % 2 == 0)
        yield from (((m, n, k), ((1, "n"),), clusters) for n in ((64, 128) if more else (64,)) for k in (line, 2 * line))


def _rows_of_parts(p: Problem, least: int = 1) -> Iterator[int]:
    """The rows of A in equal parts, in eights but not in 64s: tiles of the transposed product, where A is stored along k."""
    if transposed(p)[0]:
        return
    for parts in range(least, _MOST_PARTS + 1):
        rows = round_up(math.ceil(p.m / parts), 8)
        if rows % gemm.ROWS:
            yield rows


def _by_waves(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles of other widths than `_TILES` have, along n or, of the transposed product, along m, that fill waves better."""
    p = problem
    for turned in (False, True):
        schedules = ("ahead", "deferred") if _in_whole_panels(p, turned) else ("cooperative", "ahead", "deferred")
        for rows, width, splits in _waves(p, gpu, turned):
            tile_m, tile_n = (width, rows) if turned else (rows, width)
            registers = 24 if rows * width > _MOST_SUMS else 40
            shape = _shape(tile_m, tile_n, _line(p), registers, "n" if turned != (rows % 128 != 0) else "m")
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
    if not _has_all_schedules(p) or itemsize_of(p.dtype) > 2 or p.residual or p.normalised:
        return
    if p.m <= gemm.ROWS or _depth(p) < _WAVE_K:
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
            time[width] = math.ceil(tiles * round_up(count, blocks) / at_once) * rows * (width + _WAVE_MORE)
    return sorted(time, key=time.__getitem__)


def _overlapped(problem: Problem, gpu: Gpu) -> Iterator[Config]:
    """Tiles of schedules whose stores run beside the next tile's steps, for problems like those measured.

    These have several tiles a block, each of several steps. Where k is short, a step has two lines of it.
    """
    depth, line = _depth(problem), _line(problem)
    if (depth <= _SHORT_K and not problem.residual) or not _has_all_schedules(problem):
        return
    tile_m, tile_n = _DEFERRED
    if problem.batch * math.ceil(problem.m / tile_m) * math.ceil(problem.n / tile_n) > gpu.sms:
        tile_k = 2 * line if gemm.ROWS < depth < _LONG_K else line
        for cluster in ("none", "n") if scales_sums(problem) else ("none", "m", "n"):  # with scales those along m spill
            if not _too_few(problem, tile_m, tile_n, cluster):
                yield dataclasses.replace(_shape(tile_m, tile_n, tile_k), schedule="deferred", cluster=cluster)
    if depth < _LONG_K and not has_epilogue(problem):
        return
    for tile_m, tile_n in _TILES_IN_TURN_OF_EPILOGUES if has_epilogue(problem) else _TILES_IN_TURN:
        tiles = problem.batch * math.ceil(problem.m / tile_m) * math.ceil(problem.n / tile_n)
        spills = scales_sums(problem) and tile_n > 128 and math.ceil(problem.k / line) == _STEPS_THAT_SPILL
        if tiles > 2 * gpu.sms and not spills:
            yield dataclasses.replace(_shape(tile_m, tile_n, line), schedule="pingpong")


def _ahead(problem: Problem, ranked: Sequence[Config], gpu: Gpu) -> Iterator[Config]:
    """The best of few tiles, with the next step's wgmma in flight, for problems like those measured."""
    if problem.normalised or not _has_all_schedules(problem):
        return
    for config in ranked[:_MOST_AHEAD]:
        few = computes_transposed(config) and config.tile_m < gemm.ROWS
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
        raster_width=STRIP,
        epilogue_tile_n=64,
        split_k=1,
        memory_registers=memory_registers,
    )


def deepest(problem: Problem, config: Config, gpu: Gpu) -> Config | None:
    """The config with as many steps as fit, and the widest epilogue tile that runs. A deeper pipeline is slower in few cases.

    Where stores run beside wgmma, the narrowest: they take no time of the tensor cores. But with A transposed and the store
    deferred these spill, and with two lines of k a step they are slower; and where consumers take turns, an epilogue takes less
    time in wide ones, which counts where k is short. The narrowest too where a third or a fourth stage of 8 bits then fits:
    that is worth more.
    """
    widths = (64,) if computes_transposed(config) else (64, 32)
    wide, narrower = (_most_steps(problem, _alike(config), gpu, columns) for columns in (64, 32))
    stage_more = itemsize_of(problem.dtype) == 1 and wide < min(narrower, 4) and narrower > 2
    short_steps = config.tile_k <= _line(problem) and not transposed(problem)[0]
    short_turns = has_epilogue(problem) and _depth(problem) < _LONG_K
    beside_wgmma = (config.takes_turns and not short_turns) or (config.schedule == "deferred" and short_steps)
    narrow = beside_wgmma or stage_more
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

    What is in flight then lies in so many rows of B that HBM's pages are opened again (docs/kernels/matmul.md). With about as
    many stages as a part of k has steps, ptxas unrolls the producer's loop, whose few registers spill.
    """
    if config.cluster != "k" or not computes_transposed(config):
        return _STEPS[-1]
    steps = steps_in_flight(config.tile_n * config.tile_k * itemsize_of(problem.dtype))
    if k_steps(problem, config) in _UNROLLED:
        steps = min(steps, _UNROLLED.start - 1)
    return _STEPS[bisect.bisect_right(_STEPS, steps) - 1]


def steps_in_flight(step: int) -> int:
    """Steps that have enough of B on their way, of so many bytes each."""
    return max(_IN_FLIGHT // step, _STEPS[0])


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
