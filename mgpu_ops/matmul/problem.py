"""What a matmul is (`Problem`), how it may be run (`Config`), and which of them fit together (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable, Sequence
from dataclasses import replace
from typing import Any

from mgpu_ops.core import fp8, gemm, limits
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.fp8 import BLOCK, SCALES, SCALES_IN_LINE
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    DTYPES,
    FLOAT8,
    MAX_SIZE,
    check_fields,
    itemsize_of,
    supports_dtypes,
    supports_gpu,
    supports_rows,
    supports_sizes,
)
from mgpu_ops.matmul import algorithms
from mgpu_ops.models import MODELS

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """`batch` products of A[m, k] and B[k, n], out = activation(A B + bias) + residual.

    m, n, k: rows of A, columns of B, and what is summed over.
    dtype: of A and B: in the kernel "bfloat16", "float16", "float32", or in layout "nt" "float8_e4m3fn", "float8_e5m2" or
      "int8".
    out_dtype: of the result, dtype or "float32"; of a product of 8 bits "bfloat16", "float16" or "float32", of int8 without an
      epilogue also "int32".
    layout: how A and B are stored, "n" as written, "t" transposed (A as [k, m], B as [n, k]); "nt" is A as written and B
      transposed.
    batch: how many products; an operand without this dimension is shared by all.
    bias: whether bias[n] is added to each row.
    activation: of `core.activations`.
    residual: whether an array of the result's shape and dtype is added last.
    b_dtype: of B where it is the other of the two 8-bit floats; "none" where it is dtype.
    scales: of `SCALES`, float32 numbers that A B is multiplied by before the bias: "none"; "tensor", scale_a[1] and scale_b[1];
      "row", scale_a[m] and scale_b[n]; "block", scale_a[m, k / 128] and scale_b[n / 128, k / 128], rounded up, where the
      product of each 128 of k is scaled and then added up.
    algorithm: how float32 is multiplied, of `algorithms.PRESETS`; "tf32" where none is given. "none" for other dtypes.
    normalised: rows of A are divided by their root mean square, sqrt(mean over k of A^2 + epsilon), epsilon[1] float32.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    batch: int = 1
    bias: bool = False
    activation: str = "none"
    residual: bool = False
    b_dtype: str = "none"
    scales: str = "none"
    algorithm: str = "none"
    normalised: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.dtype == "float32" and self.algorithm == "none":
            object.__setattr__(self, "algorithm", "tf32")
        if self.b_dtype == self.dtype:  # one problem, written in one way
            object.__setattr__(self, "b_dtype", "none")
        if (self.dtype, self.out_dtype) == ("int8", "int32") and (self.scales == "block" or has_epilogue(self)):
            raise ValueError(
                "out_dtype int32 of int8 has no scales, bias, activation or residual, which are floats: ask for out_dtype "
                "bfloat16, float16 or float32"
            )


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result, except the order of float32 sums over k.

    tile_m, tile_n: rows and columns of the output tile of a block. With tile_m below 64 the kernel computes the transposed
      product, out^T = B^T A^T: wgmma's 64 rows are then columns of the output, and a few rows of A fill a tile.
    tile_k: depth of one pipeline step.
    max_concurrent_steps: stages of the pipeline in shared memory.
    compute_warpgroups: consumer warpgroups, 1 or 2, beside the producer.
    wg_dimension: "m" or "n", the side of the output tile that two consumer warpgroups share.
    cluster: "none"; "m" or "n": two blocks, adjacent along it, load the operand they share once (multicast); "k": `split_k`
      blocks, 2, 4 or 8, compute parts of k of one tile and add them up through distributed shared memory.
    raster_dimension: "m" or "n", along which tiles are walked in strips that are `raster_width` tiles wide.
    raster_width: see raster_dimension.
    epilogue_tile_n: columns of an epilogue tile, the unit of up to 64 rows in which the output is stored; two are in flight.
    split_k: parts of k computed apart, in float32, and summed by a second kernel or, with cluster="k", within the cluster. It
      fills the GPU when tiles are few.
    memory_registers: registers of a producer thread; consumers share the rest.
    schedule: "cooperative", two consumer warpgroups share each output tile; or "pingpong", they compute whole tiles in turn, so
      that one stores its tile while the other multiplies. It has wg_dimension="m". "deferred": as cooperative, but a tile is
      kept in registers, and stored while the next one is multiplied. "ahead": as cooperative, but the wgmma of the next step
      of k starts before that of a step is waited for, and each block of a cluster along k adds up and stores a share of the
      tile; for few tiles, where a block has no other to multiply.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    compute_warpgroups: int
    wg_dimension: str
    cluster: str
    raster_dimension: str
    raster_width: int
    epilogue_tile_n: int
    split_k: int
    memory_registers: int
    schedule: str = "cooperative"

    @property
    def takes_turns(self) -> bool:
        return self.schedule == "pingpong"


_LAYER = ("qkv", "out", "gate_up", "down")  # the products of one layer: q, k and v fused, and gate and up fused
_MODELS = ("llama3-8b", "llama3-70b")

SHAPES: dict[str, Problem] = {
    **{f"square-{s}": Problem(s, s, s) for s in (2048, 4096, 8192, 16384)},
    **{
        f"{model}-{name}-{m}": Problem(m, MODELS[model].projections[name].n, MODELS[model].projections[name].k)
        for model in _MODELS
        for name in _LAYER
        for m in (128, 256, 4096)
    },
}
_LLM = list(SHAPES)


def _gradients(problem: Problem) -> dict[str, Problem]:
    """The products of a backward pass: da[m, k] = g B^T and db[k, n] = A^T g of an "nn" problem."""
    m, n, k = problem.m, problem.n, problem.k
    return {"da": replace(problem, n=k, k=n, layout="nt"), "db": replace(problem, m=k, k=m, layout="tn")}


SHAPES |= {
    f"llama3-8b-{name}-{m}-{side}": product
    for name in _LAYER
    for m in (128, 256, 4096)
    for side, product in _gradients(SHAPES[f"llama3-8b-{name}-{m}"]).items()
}
SUITES: dict[str, Sequence[str]] = {
    "llm": _LLM,
    "square": [s for s in _LLM if s.startswith("square")],
    "llama3-8b": [s for s in _LLM if s.startswith("llama3-8b")],
    "llama3-70b": [s for s in _LLM if s.startswith("llama3-70b")],
    "llama3-8b-backward": [s for s in SHAPES if s not in _LLM],
}

# --- What can run ---------------------------------------------------------------------------------------------------

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
        or _check_deferred(problem, config)
        or _check_shares(problem, config)
        or check_norm(problem.normalised, config)
        or _check_blocks(problem, config)
        or _check_integers(problem, config)
        or _check_parts(problem, config)
    )
    if reason is not None:
        return reason
    if not computes_transposed(config):
        return _check(*as_computed(problem, config), gpu, _check_ragged_output)
    if config.epilogue_tile_n != gemm.ROWS:
        return (
            f"epilogue_tile_n={config.epilogue_tile_n} must be {gemm.ROWS}, with tile_m={config.tile_m} less than {gemm.ROWS}"
        )
    stored = partial_problem(problem, config)  # an epilogue tile is transposed again, and stored in one piece
    reason = _check(*as_computed(problem, config), gpu, lambda p, c: _check_ragged_output(stored, config))
    return reason and f"{reason} (tile_m={config.tile_m} is less than {gemm.ROWS}: m and n, A and B change places)"


SCHEDULES = (*gemm.SCHEDULES, "deferred", "ahead")
SLOTS = 2  # epilogue buffers of a consumer warpgroup
_CHOICES = {
    "cluster": ("none", "m", "n", "k"),
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
        ("cluster", ("none", "m", "n"), "as the blocks of a cluster along k add up one tile at a time"),
    ):
        if getattr(c, field) not in allowed:
            wanted = " or ".join(map(repr, allowed))
            return f"{field}={getattr(c, field)!r} must be {wanted} with schedule='pingpong', {why}"
    if computes_transposed(c):
        return f"tile_m={c.tile_m} must be at least {gemm.ROWS} with schedule='pingpong'"
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
        (computes_transposed(c), f"tile_m={c.tile_m} below {gemm.ROWS}"),
    ):
        if refused:
            return f"schedule='deferred' does not run with {what}: use 'cooperative'"
    return None


def _check_shares(p: Problem, c: Config) -> str | None:
    """With schedule "ahead" each block of a cluster along k stores a share of the epilogue tiles of the sum."""
    if c.schedule != "ahead" or c.cluster != "k":
        return None
    if p.residual or computes_transposed(c):
        what = "a residual" if p.residual else f"tile_m={c.tile_m} below {gemm.ROWS}"
        return f"schedule='ahead' with cluster='k' does not run with {what}: use 'cooperative'"
    if c.split_k in (2, 4, 8) and gemm.check_tile(c) is None and gemm.check_epilogue(c, 8) is None:
        tiles = gemm.epilogue_tiles(c)
        if tiles % c.split_k:
            return f"{tiles} epilogue tiles of a warpgroup must be a multiple of the {c.split_k} blocks that share them"
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
        or gemm.check_accumulator(c, consumer_registers(c, gpu), _accumulators_in_all(p, c))
        or limits.check_smem(storage(p, c).bytes, gpu)
    )


def check_schedule(p: Problem, c: Config, check_output: Callable[[Problem, Config], str | None] | None = None) -> str | None:
    """Tiles, pipeline and copies exist for a problem and a config `as_computed`; what they take of an SM is asked apart."""
    return (
        gemm.check_tile(c)
        or gemm.check_pipeline(c)
        or _check_order(p, c)
        or _check_swizzle(p, c)
        or gemm.check_epilogue(c, 8)
        or (check_output or _check_ragged_output)(partial_problem(p, c), c)
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
    tiles_m, tiles_n = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    if (c.cluster == "m" and tiles_m % 2) or (c.cluster == "n" and tiles_n % 2):
        return f"cluster={c.cluster!r} needs an even number of tiles along it, but there are {tiles_m} x {tiles_n}"
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
    """Each of the two blocks of a cluster along m or n can load half of the operand that they share."""
    a_t, b_t = transposed(p)
    rows = {"n": c.tile_k if a_t else c.tile_m, "m": c.tile_n if b_t else c.tile_k}.get(c.cluster, 0)
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


def _check_ragged_output(p: Problem, c: Config) -> str | None:
    """TMA clips stores at the output's ends: where epilogue tiles do not divide it, each is one swizzle tile wide."""
    itemsize = itemsize_of(p.out_dtype)
    tile = _largest_swizzle(c.epilogue_tile_n * itemsize) // itemsize
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
    one before. Where rows are no multiple of 8, it copies the last ones tile by tile, which takes producer registers.
    """
    few_registers = c.memory_registers < 40 or c.cluster != "none"
    a_t, b_t = transposed(p)
    tile = panel(p, c)
    operands = (  # name, rows and row length, and the block's row length and its field
        ("A", (p.k, p.m) if a_t else (p.m, p.k), *((c.tile_m, "tile_m") if a_t else (c.tile_k, "tile_k"))),
        ("B", (p.n, p.k) if b_t else (p.k, p.n), *((c.tile_k, "tile_k") if b_t else (c.tile_n, "tile_n"))),
    )
    for name, (rows, length), width, field in operands:
        if _tiles_divide(rows, length, tile) or width == tile:
            continue
        if field == "tile_k" or width > length or length >= _LONGEST_RAGGED or (rows % 8 and few_registers):
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


# --- What a config takes --------------------------------------------------------------------------------------------


def dtype_of_b(p: Problem) -> str:
    """The dtype of B."""
    return p.dtype if p.b_dtype == "none" else p.b_dtype


def transposed(problem: Problem) -> tuple[bool, bool]:
    """Whether A and B are stored transposed."""
    return problem.layout[:1] == "t", problem.layout[1:] == "t"


def computes_transposed(c: Config) -> bool:
    """Whether the kernel computes out^T = B^T A^T."""
    return c.tile_m < gemm.ROWS


def products(p: Problem) -> tuple[tuple[int, int], ...]:
    """Which parts of A and B are multiplied one after the other, in `algorithms.PRODUCTS`."""
    return algorithms.PRODUCTS.get(p.algorithm, ((0, 0),))


def multiplied(p: Problem, tile_k: int = 1) -> Problem:
    """The product of the arrays that wgmma multiplies, which XLA makes of float32 before the kernel: p itself for other dtypes.

    tf32 is read along k only: other operands are transposed. bfloat16 parts lie one after the other along k, each padded to a
    multiple of tile_k; the problem has the k of one part.
    """
    if p.dtype != "float32":
        return p
    if p.algorithm not in algorithms.PRODUCTS:
        return replace(p, layout="nt")
    return replace(p, dtype="bfloat16", k=-(-p.k // tile_k) * tile_k)


def as_computed(p: Problem, c: Config) -> tuple[Problem, Config]:
    """The product that the kernel computes, of the arrays `multiplied`, and its config.

    Where it is the transposed one, m and n change places.
    """
    p = multiplied(p, c.tile_k)
    if not computes_transposed(c):
        return p, c
    a_t, b_t = transposed(p)
    swapped = {"m": "n", "n": "m"}
    c = replace(
        c,
        tile_m=c.tile_n,
        tile_n=c.tile_m,
        wg_dimension=swapped[c.wg_dimension],
        cluster=swapped.get(c.cluster, c.cluster),
        raster_dimension=swapped[c.raster_dimension],
    )
    c = replace(c, epilogue_tile_n=gemm.warpgroup_tile(c)[1])
    return replace(p, m=p.n, n=p.m, layout=("n" if b_t else "t") + ("n" if a_t else "t")), c


def has_epilogue(p: Problem) -> bool:
    """Whether anything is done with a product before it is stored."""
    return p.bias or p.residual or p.activation != "none" or p.normalised or scales_sums(p)


def scales_sums(p: Problem) -> bool:
    """Whether scales are factors of whole sums over k, and so belong to the epilogue."""
    return p.scales in ("tensor", "row")


def plain(p: Problem) -> Problem:
    """The same product, scaled, without the rest of an epilogue."""
    return replace(p, bias=False, activation="none", residual=False)


def residual_steps(p: Problem, c: Config) -> int:
    """The pipeline steps that bring the residual of a tile whose store is deferred: 64 rows each, in a stage's buffer of B.

    0 where there is no residual, or where they do not fit: the buffer then has other rows or another dtype.
    """
    if not p.residual or c.schedule != "deferred" or c.wg_dimension != "m" or c.split_k > 1:
        return 0
    fits = c.tile_m == gemm.ROWS * c.compute_warpgroups and c.tile_k == gemm.ROWS and c.tile_n % 128 == 0
    fits &= not transposed(p)[1] and p.dtype == p.out_dtype and swizzle_bytes(p, c) == 128
    return c.compute_warpgroups if fits and p.m % 8 == 0 and p.n % gemm.ROWS == 0 and not transposed(p)[0] else 0


def cluster_size(c: Config) -> int:
    """Blocks of a cluster."""
    return {"none": 1, "k": c.split_k}.get(c.cluster, 2)


def partial_problem(p: Problem, c: Config) -> Problem:
    """What the kernel itself stores: with split_k, unless a cluster adds up, `c.split_k` float32 parts of each product.

    The second kernel, which adds them up, has the epilogue then.
    """
    return p if c.split_k == 1 or c.cluster == "k" else _parts(p, c.split_k)


@functools.lru_cache(maxsize=1024)  # the choice of a default asks for each of its candidates
def _parts(p: Problem, split_k: int) -> Problem:
    scales = "none" if scales_sums(p) else p.scales
    sums = "int32" if p.dtype == "int8" else "float32"
    return replace(plain(p), out_dtype=sums, batch=p.batch * split_k, scales=scales)


def k_steps(p: Problem, c: Config) -> int:
    """Pipeline steps of one output tile: of k, or of a part of it. The last part's surplus steps read zeros."""
    return math.ceil(steps_in_all(p, c) / c.split_k)


def steps_in_all(p: Problem, c: Config) -> int:
    """Steps of k, once for each of the `products`."""
    return len(products(p)) * math.ceil(p.k / c.tile_k)


def consumer_registers(c: Config, gpu: Gpu) -> int:
    """Registers of a consumer thread: in steps of 8, 255 at most.

    As `emit_pipeline_warp_specialized` sets them, or `engine.specialize`.
    """
    if c.schedule != "cooperative":
        return limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)
    per_warpgroup = gpu.registers_per_sm // limits.WARPGROUP
    return min(255, (per_warpgroup - c.memory_registers) // c.compute_warpgroups // 8 * 8)


def accumulators(p: Problem, c: Config) -> tuple[tuple[int, int], ...]:
    """The shapes of a consumer warpgroup's accumulators; where rows are normalised, the last is of rows times themselves."""
    return (*fp8.accumulators(c, p.scales), *((gemm.ROWS, gemm.ROWS),) * p.normalised)


def _accumulators_in_all(p: Problem, c: Config) -> float:
    """What they take, in accumulators of a warpgroup's part of the tile, with what is kept of the tile before."""
    kept = itemsize_of(partial_problem(p, c).out_dtype) / 4 if c.schedule == "deferred" else 0.0
    if p.normalised:
        kept += gemm.ROWS**2 / math.prod(gemm.warpgroup_tile(c))
    return fp8.accumulators_in_all(c, p.scales) + kept


def swizzle_bytes(problem: Problem, c: Config) -> int:
    """The largest swizzle in bytes that divides the rows of both operands' tiles, and of what a warpgroup takes; 0 for none."""
    a_t, b_t = transposed(problem)
    wg_m, wg_n = gemm.warpgroup_tile(c)
    rows = (c.tile_k, wg_m if a_t else c.tile_k, c.tile_k if b_t else wg_n)
    return next((s for s in (128, 64) if all(r * itemsize_of(problem.dtype) % s == 0 for r in rows)), 0)


def panel(problem: Problem, c: Config) -> int:
    """Elements of an operand in a row of a swizzle."""
    return swizzle_bytes(problem, c) // itemsize_of(problem.dtype)


def _largest_swizzle(row_bytes: int) -> int:
    """The largest swizzle in bytes that divides a row."""
    return next(s for s in (128, 64, 32, 16) if row_bytes % s == 0)


def storage(problem: Problem, config: Config) -> gemm.Storage:
    """The shared memory of a block, of a config `as_computed`. Each consumer warpgroup has up to two epilogue buffers.

    With a residual it has all: the residual of the whole tile is loaded into them while the product is computed. But where
    consumers take turns, a residual comes in parts, while the other consumer multiplies.
    """
    stored, tiles = partial_problem(problem, config), gemm.epilogue_tiles(config)
    received = cluster_size(config) - 1 if config.cluster == "k" else 0  # epilogue tiles, from each other block one
    if config.schedule == "ahead":
        received *= tiles // config.split_k
    loads = stored.residual and not residual_steps(problem, config)
    whole = loads and not config.takes_turns
    barriers = config.compute_warpgroups * (1 if whole else SLOTS) if loads else 0
    barriers += config.max_concurrent_steps if config.takes_turns else 0  # each consumer has `full` barriers of its own
    buffers = tiles if whole else min(SLOTS, tiles)
    size = itemsize_of(stored.out_dtype)
    scales = _scales_of_a_step(config) if problem.scales == "block" else ()
    vector = config.compute_warpgroups * gemm.ROWS if problem.normalised and received else 0
    itemsize = itemsize_of(problem.dtype)
    return gemm.Storage(config, buffers, size, received, barriers, itemsize=itemsize, scales=scales, vector=vector)


def _scales_of_a_step(c: Config) -> tuple[int, int]:
    """At most so many scales of A and of B a pipeline step loads; A and B may have changed places."""
    parts, widest = c.tile_k // BLOCK, max(c.tile_m, c.tile_n)
    lines = math.ceil(widest / SCALES_IN_LINE)
    return parts * lines * SCALES_IN_LINE, parts * SCALES_IN_LINE * max(1, widest // gemm.ROWS)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    return storage(*as_computed(problem, config)).bytes
