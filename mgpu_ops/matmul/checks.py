"""Which problems the kernel of matmul can run (`supports`), and with which configs (`check`)."""

from __future__ import annotations

import math
from collections.abc import Callable
from typing import Any

from mgpu_ops.core import fp8, gemm, limits
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.fp8 import SCALES
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    DTYPES,
    FLOAT8,
    MAX_SIZE,
    itemsize_of,
    supports_dtypes,
    supports_gpu,
    supports_rows,
    supports_sizes,
)
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.problem import (
    Config,
    Problem,
    accumulators_in_all,
    as_computed,
    cluster_size,
    columns_of_b,
    computes_transposed,
    consumer_registers,
    dtype_of_b,
    k_steps,
    largest_swizzle,
    multiplied,
    neighbours,
    panel,
    partial_problem,
    products,
    residual_steps,
    steps_in_all,
    storage,
    swizzle_bytes,
    transposed,
)

LAYOUTS = ("nn", "nt", "tn", "tt")


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    if reason := _supports_operands(problem, gpu):
        return reason
    if reason := _supports_norm(problem):
        return reason
    if problem.activation not in ACTIVATIONS:
        return f"activation {problem.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if problem.layout not in LAYOUTS:
        return f"layout {problem.layout!r} is not one of {', '.join(LAYOUTS)}"
    reason = supports_sizes(problem, ("m", "n", "k", "batch"))
    if reason is not None:
        return reason
    if reason := supports_work(problem, problem.batch, gpu, "the batch"):
        return reason
    p = multiplied(problem, 8)
    terms = len(products(problem)) * p.k
    if terms > MAX_SIZE:
        what = f"the {len(products(problem))} products of algorithm={problem.algorithm!r}"
        return f"k={problem.k} in {what} is more than {MAX_SIZE} in all: split k, or use backend='xla'"
    a_t, b_t = transposed(p)
    rows = {  # what holds the row -> (the dimension along it, its length, bytes per element)
        "a": ("m" if a_t else "k", p.m if a_t else p.k, itemsize_of(p.dtype)),
        "b": ("k" if b_t else "n", p.k if b_t else p.n, itemsize_of(p.dtype)),
        "the output": ("n", p.n, itemsize_of(p.out_dtype)),
    }
    return supports_rows(rows)


def _supports_operands(p: Problem, gpu: Gpu) -> str | None:
    """Why wgmma cannot multiply operands of these dtypes and scales, stored so, or None."""
    if p.dtype == "int8" and p.b_dtype == "none":
        return supports_gpu(gpu) or _supports_integers(p)
    if p.dtype == "float32" and p.b_dtype == "none":
        return supports_gpu(gpu) or _supports_float32(p)
    if p.algorithm != "none":
        return f"algorithm={p.algorithm!r} is one of float32, not {p.dtype}: leave it out"
    if p.dtype not in FLOAT8 and p.b_dtype == "none":
        reason = supports_dtypes(p.dtype, p.out_dtype, gpu)
        if reason is None and p.scales != "none":
            return f"scales={p.scales!r} are of 8-bit floats, not {p.dtype}: multiply by them, or use backend='xla'"
        return reason
    if reason := supports_gpu(gpu):
        return reason
    if p.dtype not in FLOAT8 or dtype_of_b(p) not in FLOAT8:
        return f"a is {p.dtype} and b is {p.b_dtype}: only {' and '.join(FLOAT8)} mix; cast one, or use backend='xla'"
    if p.out_dtype not in (*DTYPES, "float32"):
        return f"out_dtype {p.out_dtype} is not one of bfloat16, float16, float32: cast the result, or use backend='xla'"
    if p.scales not in SCALES:
        return f"scales={p.scales!r} is not one of {', '.join(SCALES)}"
    return _supports_layout(p, "floats")


def _supports_norm(p: Problem) -> str | None:
    """Why the kernel cannot divide A's rows by their root mean square, or None."""
    if p.normalised and (p.dtype not in DTYPES or p.layout[:1] != "n" or p.batch > 1):
        return f"normalised rows of {p.dtype} in layout {p.layout}, batch {p.batch}: the kernel has those of one A of 16 bits"
    return None


def _supports_float32(p: Problem) -> str | None:
    """Why the kernel cannot multiply float32 so, or None."""
    if p.algorithm not in algorithms.KERNEL:
        return f"algorithm={p.algorithm!r} is not one of {', '.join(algorithms.KERNEL)}: use backend='xla'"
    if p.out_dtype != "float32":
        return f"out_dtype {p.out_dtype} of float32 operands is not float32: cast the result, or use backend='xla'"
    if p.scales != "none":
        return f"scales={p.scales!r} are of 8-bit floats, not {p.dtype}: multiply by them, or use backend='xla'"
    return None


def _supports_layout(p: Problem, what: str) -> str | None:
    """Why wgmma cannot read operands of 8 bits stored so, or None. what: the operands' kind of numbers."""
    if p.layout != "nt":
        return (
            f"layout {p.layout} of 8-bit {what}: wgmma reads them along k only; store a as [m, k] and b as [n, k] "
            "(transpose_b=True), or use backend='xla'"
        )
    return None


def _supports_integers(p: Problem) -> str | None:
    """Why the kernel cannot multiply int8 so, or None."""
    if p.scales not in ("none", "tensor", "row"):
        return f"scales={p.scales!r} of int8 are not one of none, tensor, row: use backend='xla'"
    if p.out_dtype not in (*DTYPES, "float32", "int32"):
        return f"out_dtype {p.out_dtype} is not one of bfloat16, float16, float32, int32: cast the result, or use backend='xla'"
    return _supports_layout(p, "integers")


def supports_work(p: Any, batch: int, gpu: Gpu, way_out: str) -> str | None:
    """Why 32 bits cannot count the tiles of `batch` products, or a block's steps of them, at 64 x 64 x 64; or None."""
    tiles = batch * math.ceil(p.m / gemm.ROWS) * math.ceil(p.n / gemm.ROWS)
    if tiles > MAX_SIZE:
        return f"{tiles} tiles of {gemm.ROWS} x {gemm.ROWS} are more than {MAX_SIZE}: split {way_out}, or use backend='xla'"
    steps = math.ceil(tiles / gpu.sms) * math.ceil(p.k / gemm.ROWS)
    if steps > MAX_SIZE:
        return f"{steps} steps of 64 of k in a block are more than {MAX_SIZE}: split {way_out}, or use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason. Kernel, tuner and tests ask here."""
    reason = (
        supports(problem, gpu)
        or gemm.check_choices(config, _CHOICES)
        or check_turns(config)
        or _check_three(problem, config)
        or _check_one(problem, config)
        or _check_deferred(problem, config)
        or check_norm(problem.normalised, config)
        or _check_blocks(problem, config)
        or _check_integers(problem, config)
        or _check_parts(problem, config)
    )
    if reason is not None:
        return reason
    if not computes_transposed(config):
        return _check(*as_computed(problem, config), gpu, _check_own_epilogue)
    where = f"tile_m={config.tile_m}, no multiple of {gemm.ROWS}"
    if config.epilogue_tile_n != gemm.ROWS:
        return f"epilogue_tile_n={config.epilogue_tile_n} must be {gemm.ROWS}, with {where}"
    stored = partial_problem(problem, config)  # an epilogue tile is transposed again, and stored in one piece

    def check_output(p: Problem, c: Config) -> str | None:
        return _check_epilogue(p, c, config.epilogue_tile_n) or _check_ragged_output(stored, config)

    reason = _check(*as_computed(problem, config), gpu, check_output)
    return reason and f"{reason} ({where}: m and n, A and B change places)"


SCHEDULES = (*gemm.SCHEDULES, "deferred", "ahead")
_CHOICES = {
    "compute_warpgroups": (1, 2, 3),
    "cluster": ("none", "m", "n", "m4", "n4", "k"),
    "raster_dimension": ("m", "n"),
    "schedule": SCHEDULES,
}


def check_turns(c: Config) -> str | None:
    """Consumer warpgroups can take turns."""
    if not c.takes_turns:
        return None
    for field, allowed, why in (
        ("compute_warpgroups", (2,), "which take turns"),
        ("wg_dimension", ("m",), "as no side of a tile is shared"),
        ("cluster", ("none", "m", "n", "m4", "n4"), "as the blocks of a cluster along k add up one tile at a time"),
    ):
        if getattr(c, field) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            return f"{field}={getattr(c, field)!r} must be {wanted} with schedule='pingpong', {why}"
    if computes_transposed(c):
        return f"tile_m={c.tile_m} must be a multiple of {gemm.ROWS} with schedule='pingpong'"
    return None


def _check_one(p: Problem, c: Config) -> str | None:
    """One consumer has registers for a tile of 128 x 128, with float32 results and the next step's wgmma in flight."""
    large = c.compute_warpgroups == 1 and c.schedule == "ahead" and c.tile_m * c.tile_n > 128 * 128
    if not large or itemsize_of(partial_problem(p, c).out_dtype) < 4:
        return None
    return (
        f"compute_warpgroups=1 with a tile of {c.tile_m} x {c.tile_n}, float32 results and schedule='ahead' spills registers: "
        "take 2, or at most 128 x 128"
    )


def _check_three(p: Problem, c: Config) -> str | None:
    """Three consumers share the rows of a tile, and start the copies themselves."""
    if c.compute_warpgroups < 3:
        return None
    for refused, what in (
        (c.schedule != "ahead", f"schedule={c.schedule!r}: they need 'ahead'"),
        (c.wg_dimension != "m", f"wg_dimension={c.wg_dimension!r}: they share rows, 'm'"),
        (c.cluster == "k", "cluster='k'"),
        (computes_transposed(c), f"tile_m={c.tile_m}, no multiple of {gemm.ROWS}"),
        (len(products(p)) > 1, f"algorithm={p.algorithm!r}"),
    ):
        if refused:
            return f"compute_warpgroups=3 does not run with {what}"
    return None


def _check_deferred(p: Problem, c: Config) -> str | None:
    """A tile is stored by the block and the warpgroups that computed it, as it lies in their registers."""
    if c.schedule != "deferred":
        return None
    for refused, what in (
        (c.cluster == "k", "cluster='k'"),
        (p.residual and not residual_steps(p, c), "this residual (see Config.schedule)"),
        (p.scales == "block", "scales of blocks"),
        (len(products(p)) > 1, f"algorithm={p.algorithm!r}"),
        (c.tile_m < gemm.ROWS, f"tile_m={c.tile_m} below {gemm.ROWS}"),
    ):
        if refused:
            return f"schedule='deferred' does not run with {what}: use 'cooperative'"
    return None


def check_norm(normalised: bool, c: Config) -> str | None:
    """A warpgroup multiplies 64 whole rows of A by themselves, which gives the sums of their squares.

    Those of parts of k are added up in a cluster, as an epilogue tile is.
    """
    if not normalised:
        return None
    for refused, what in (
        (c.schedule != "cooperative", f"schedule={c.schedule!r}"),
        (c.split_k > 1 and c.cluster != "k", f"split_k={c.split_k}"),
        (c.cluster == "k" and c.epilogue_tile_n != gemm.ROWS, f"epilogue_tile_n={c.epilogue_tile_n}"),
        (c.tile_m // (c.compute_warpgroups if c.wg_dimension == "m" else 1) != gemm.ROWS, f"tile_m={c.tile_m}"),
    ):
        if refused:
            return (
                f"{what}: with normalised rows a warpgroup has {gemm.ROWS} of them, schedule='cooperative', and parts of k are "
                f"added up with cluster='k' and epilogue_tile_n={gemm.ROWS}"
            )
    return None


def _check(p: Problem, c: Config, gpu: Gpu, check_output: Callable[[Problem, Config], str | None]) -> str | None:
    """`check` of a product and a config `as_computed`, whose choices are legal."""
    return (
        check_schedule(p, c, check_output)
        or check_counts(p, c, gpu)
        or gemm.check_accumulator(c, consumer_registers(c, gpu), accumulators_in_all(p, c))
        or limits.check_smem(storage(p, c).bytes, gpu)
    )


def check_schedule(p: Problem, c: Config, check_output: Callable[[Problem, Config], str | None] | None = None) -> str | None:
    """Tiles, pipeline and copies exist for a problem and a config `as_computed`; what they take of an SM is asked apart.

    check_output: why epilogue tiles of this output cannot be stored; without it they must be whole and as wide as a swizzle.
    """
    return (
        gemm.check_tile(c)
        or gemm.check_pipeline(c)
        or _check_order(p, c)
        or _check_swizzle(p, c)
        or (check_output or _check_whole_epilogue)(partial_problem(p, c), c)
        or _check_ragged_operands(p, c)
    )


def check_counts(p: Problem, c: Config, gpu: Gpu) -> str | None:
    """Tiles, steps of a block and elements of k can be counted in 32 bits, for a problem and a config `as_computed`."""
    steps, clusters = k_steps(p, c), limits.resident_clusters(cluster_size(c), gpu)
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n) * (1 if c.cluster == "k" else c.split_k)
    for what, count in (
        (f"{tiles} tiles of {c.tile_m} x {c.tile_n}", tiles),
        (f"{steps} steps of k for each of {tiles} tiles", math.ceil(tiles / clusters) * steps),
        (f"split_k={c.split_k} parts of {steps} steps of tile_k={c.tile_k}", c.split_k * steps * c.tile_k),
    ):
        if count >= 2**31:
            return f"{what} are more than a block counts in 32 bits: use larger tiles or a smaller split_k, or backend='xla'"
    return None


def _check_order(p: Problem, c: Config) -> str | None:
    """The order of tiles and the parts of k exist for this problem."""
    if c.raster_width < 1:
        return f"raster_width={c.raster_width} must be at least 1"
    if c.cluster == "k" and c.split_k not in (2, 4, 8):
        return f"split_k={c.split_k} must be 2, 4 or 8, the blocks of a cluster, with cluster='k'"
    if not 1 <= c.split_k <= steps_in_all(p, c):
        return f"split_k={c.split_k} must be from 1 to the {steps_in_all(p, c)} steps of k={p.k}"
    return _check_shared(p, c)


def _check_blocks(p: Problem, c: Config) -> str | None:
    """With scales of blocks, a step is one or two of k, and a warpgroup's part of the tile lies within one of n."""
    if p.scales != "block":
        return None
    if c.schedule != "cooperative":
        return f"schedule={c.schedule!r} must be 'cooperative' with scales of blocks"
    return fp8.check_blocks(c)


def _check_integers(p: Problem, c: Config) -> str | None:
    """int8: parts of k are not added up within the kernel, whose such sums are float32; and wgmma has fewer widths."""
    if p.dtype == "int8" and c.cluster == "k":
        return f"cluster={c.cluster!r} adds up float32, and sums of int8 are int32: use cluster='none', 'm' or 'n'"
    if p.dtype == "int8" and gemm.warpgroup_tile(c)[0 if computes_transposed(c) else 1] not in _INTEGER_COLUMNS:
        return f"tile_m={c.tile_m}, tile_n={c.tile_n} of int8: wgmma has 8, 16, 24 or a multiple of 16 columns a warpgroup"
    return None


def _check_parts(p: Problem, c: Config) -> str | None:
    """What products of parts of float32 add up is looked at before the last of them, in one block's sums over all of k."""
    if len(products(p)) > 1 and c.schedule in ("pingpong", "ahead") and c.split_k > 1:
        return f"split_k={c.split_k} must be 1 with schedule={c.schedule!r} and algorithm={p.algorithm!r}"
    return None


_INTEGER_COLUMNS = (8, 16, 24, *range(32, 257, 16))  # wgmma's N


def _check_shared(p: Problem, c: Config) -> str | None:
    """Each block of a cluster along m or n can load its part of the operand that they share."""
    a_t, b_t = transposed(p)
    down, across = neighbours(c)
    rows = (c.tile_k if a_t else c.tile_m) if across > 1 else (c.tile_n if b_t else c.tile_k) if down > 1 else 0
    if cluster_size(c) == 4 and rows % 32:
        return (
            f"cluster={c.cluster!r} shares tiles of {rows} rows: they must be a multiple of 32, of which four blocks load parts"
        )
    if rows // 8 % 2 and rows > 8:
        return (
            f"cluster={c.cluster!r} shares tiles of {rows} rows: they must be a multiple of 16, which two blocks load in halves"
        )
    return None


def _check_swizzle(p: Problem, c: Config) -> str | None:
    """A and B have a common swizzle."""
    if swizzle_bytes(p, c):
        return None
    a_t, b_t = transposed(p)
    return (
        f"tile_k={c.tile_k} and the operand tiles' rows must be multiples of 32 elements per warpgroup: "
        f"A and B need one common swizzle of 64 or 128 bytes (tile_m={c.tile_m} transposed={a_t}, "
        f"tile_n={c.tile_n} transposed={b_t})"
    )


def _check_whole_epilogue(p: Problem, c: Config) -> str | None:
    return gemm.check_epilogue(c, 8) or _check_ragged_output(p, c)


def _check_own_epilogue(p: Problem, c: Config) -> str | None:
    return _check_epilogue(p, c, c.epilogue_tile_n) or _check_ragged_output(p, c)


def _check_epilogue(p: Problem, c: Config, columns: int) -> str | None:
    """Epilogue tiles, with `columns` columns of the output p each, make up a warpgroup's part of the tile.

    Those that do not divide it overlap (`epilogue.tile_origins`), and so begin anywhere: each is one swizzle tile wide then.
    """
    row = columns * itemsize_of(p.out_dtype)
    whole = gemm.warpgroup_tile(c)[1] % c.epilogue_tile_n == 0
    small = max(p.m, p.n) < _LONGEST_RAGGED
    if whole or not small or c.epilogue_tile_n % 8 or c.epilogue_tile_n > gemm.warpgroup_tile(c)[1] or row > 128 or 128 % row:
        return gemm.check_epilogue(c, 8)
    return None


def _check_ragged_output(p: Problem, c: Config) -> str | None:
    """TMA clips stores at the output's ends: where epilogue tiles do not divide it, each is one swizzle tile wide."""
    itemsize = itemsize_of(p.out_dtype)
    tile = largest_swizzle(c.epilogue_tile_n * itemsize) // itemsize
    if not _tiles_divide(p.m, p.n, tile) and c.epilogue_tile_n != tile:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {tile}, one swizzle tile, because the output is {p.m} x {p.n}: "
            f"not a multiple of 8 x {tile}"
        )
    return None


_LONGEST_RAGGED = 2**25  # elements: 64 times as many fit in 32 bits (`tma.block_anywhere`)
_MOST_ROWS = 2**28  # of the output, where tiles begin anywhere: 8 times as many fit in 32 bits


def _check_ragged_operands(p: Problem, c: Config) -> str | None:
    """TMA copies blocks of operands that swizzle tiles do not divide: each one swizzle tile wide, or as `core/tma.py` can.

    core/tma.py takes wider blocks along m or n, not along k: the last block of a row ends with the row, so it overlaps the
    one before. Where rows are no multiple of 8, or shorter than a block, it copies the last ones tile by tile, which takes
    producer registers.
    """
    few_registers = c.memory_registers < 40
    a_t, b_t = transposed(p)
    tile = panel(p, c)
    operands = (  # name, rows and row length, and the block's row length and its field
        ("A", (p.k, p.m) if a_t else (p.m, p.k), *((c.tile_m, "tile_m") if a_t else (c.tile_k, "tile_k"))),
        ("B", (p.n, p.k) if b_t else (p.k, p.n), *((c.tile_k, "tile_k") if b_t else (c.tile_n, "tile_n"))),
    )
    for name, (rows, length), width, field in operands:
        if field == "tile_n" and columns_of_b(p, c) != c.tile_n:
            shared = neighbours(c)[0] > 1 and rows % 8
            if length >= _LONGEST_RAGGED or rows >= _MOST_ROWS or c.memory_registers < 40 or shared:
                return (
                    f"tile_n={c.tile_n} must be a multiple of {tile}, because B is stored as [k, n], {rows} x {length}, with "
                    f"cluster={c.cluster!r} and memory_registers={c.memory_registers}"
                )
            continue
        if _tiles_divide(rows, length, tile) or width == tile:
            continue
        by_tile = (rows % 8 and c.cluster != "none") or ((rows % 8 or width > length) and few_registers)  # the last rows
        if field == "tile_k" or length >= _LONGEST_RAGGED or by_tile:
            return (
                f"{field}={width} must be {tile}, one swizzle tile, because {name} is {rows} x {length}: "
                f"not a multiple of 8 x {tile}"
            )
        side, other, limit = ("n", p.n, _LONGEST_RAGGED) if field == "tile_m" else ("m", p.m, _MOST_ROWS)
        if length % tile and other >= limit:  # the output's tiles then begin anywhere, and 64 columns or 8 rows are a unit
            return (
                f"{field}={width} must be {tile}, one swizzle tile, because {length} is no multiple of {tile} and "
                f"{side}={other} is not below {limit}: 32-bit numbers place such tiles"
            )
    return None


def _tiles_divide(rows: int, columns: int, width: int) -> bool:
    """Whether swizzle tiles of 8 rows x `width` divide an array, or it is smaller than one."""
    return (rows <= 8 or rows % 8 == 0) and (columns <= width or columns % width == 0)
