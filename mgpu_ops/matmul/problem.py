"""What a matmul is (`Problem`), how it may be run (`Config`), and what a config takes. `checks.py` says which fit together."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace

from mgpu_ops.core import fp8, gemm, limits
from mgpu_ops.core.fp8 import BLOCK, SCALES_IN_LINE
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    check_fields,
    itemsize_of,
)
from mgpu_ops.matmul import algorithms
from mgpu_ops.models import MODELS

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out = activation(A B + bias) + residual, of A[m, k] and B[k, n], `batch` times.

    m: rows of A and of the result.
    n: columns of B and of the result.
    k: what is summed over.
    dtype: of A and B. In the kernel "bfloat16", "float16", "float32"; in "nt" also "float8_e4m3fn", "float8_e5m2", "int8".
    out_dtype: of the result, dtype or "float32"; of 8-bit floats and int8 "bfloat16", "float16" or "float32"; of int8 without
      an epilogue also "int32".
    layout: how A and B are stored, "nn", "nt", "tn" or "tt": "n" as written, "t" transposed (A as [k, m], B as [n, k]).
    batch: how many products; an operand without this dimension is shared by all.
    bias: whether bias[n] is added to each row.
    activation: "none", "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf".
    residual: whether an array of the result's shape and dtype is added last.
    b_dtype: of B where it is the other of the two 8-bit floats; "none" where it is dtype.
    scales: float32 factors of A B, before the bias: "none"; "tensor", scale_a[1] and scale_b[1]; "row", scale_a[m] and
      scale_b[n]; "block", scale_a[m, k / 128] and scale_b[n / 128, k / 128], rounded up, of the product of each 128 of k.
    algorithm: how float32 is multiplied: "tf32" (default), "bf16", "bf16_x3", "bf16_x6", "bf16_x9"; "none" for other dtypes.
    normalised: whether rows of A are divided by sqrt(mean over k of A^2 + epsilon), epsilon[1] float32.
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

    tile_m: rows of a block's output tile, up to 256: a multiple of 64; or of 8, and the kernel computes out^T = B^T A^T.
    tile_n: columns of a block's output tile, up to 256.
    tile_k: depth of one pipeline step, in elements of k.
    max_concurrent_steps: stages of the pipeline in shared memory, 2 or more.
    compute_warpgroups: consumer warpgroups of a block, 1 or 2, beside the producer; or 3 without one (schedule="ahead").
    wg_dimension: the side of the output tile that two consumer warpgroups share, "m" or "n".
    cluster: which blocks work together: "none"; "m" or "n": two, adjacent along it, load a shared operand once (multicast);
      "m4" or "n4": four; "k": `split_k` blocks add up parts of k of one tile through distributed shared memory.
    raster_dimension: along which side tiles are walked in strips, "m" or "n".
    raster_width: tiles that such a strip is wide, 1 or more.
    epilogue_tile_n: columns of an epilogue tile, the unit of up to 64 rows in which the output is stored; two are in flight.
    split_k: parts of k that are computed apart in float32, 1 or more: summed by a second kernel, or with cluster="k" (2, 4 or
      8) within the cluster. It fills the GPU when tiles are few.
    memory_registers: registers of a producer thread, a multiple of 8 from 24 to 128; consumers share the rest.
    schedule: how consumer warpgroups share output tiles:
      "cooperative": they share each tile.
      "pingpong": they take whole tiles in turn, so that one stores while the other multiplies; with wg_dimension="m".
      "deferred": cooperative, but a tile stays in registers and is stored during the next; residuals as `residual_steps` says.
      "ahead": cooperative, but the next step's wgmma starts before this one's has ended; for few tiles. See `adds_shares`.
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

# --- What a config takes --------------------------------------------------------------------------------------------

SLOTS = 2  # epilogue buffers of a consumer warpgroup
SCALAR = 4  # elements that TMA copies of a vector of one, and zeros: 16 bytes


def dtype_of_b(p: Problem) -> str:
    """The dtype of B."""
    return p.dtype if p.b_dtype == "none" else p.b_dtype


def transposed(problem: Problem) -> tuple[bool, bool]:
    """Whether A and B are stored transposed."""
    return problem.layout[:1] == "t", problem.layout[1:] == "t"


def computes_transposed(c: Config) -> bool:
    """Whether the kernel computes out^T = B^T A^T: where tile_m is no multiple of wgmma's rows, but of 8, or few rows."""
    return c.tile_m < gemm.ROWS or (c.tile_m % gemm.ROWS != 0 and c.tile_m % 8 == 0)


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
    swapped = {"m": "n", "n": "m", "m4": "n4", "n4": "m4"}
    c = replace(
        c,
        tile_m=c.tile_n,
        tile_n=c.tile_m,
        wg_dimension=swapped[c.wg_dimension],
        cluster=swapped.get(c.cluster, c.cluster),
        raster_dimension=swapped[c.raster_dimension],
    )
    c = replace(c, epilogue_tile_n=min(gemm.ROWS, gemm.warpgroup_tile(c)[1]))
    layout = ("n" if b_t else "t") + ("n" if a_t else "t")
    return replace(p, m=p.n, n=p.m, dtype=dtype_of_b(p), b_dtype=p.dtype, layout=layout), c


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
    """The pipeline steps that bring the residual of a tile whose store is deferred, in a stage's buffers.

    Where B is stored [k, n], 64 rows each, in that of B; where [n, k], 128 columns each, half in that of A, half in that of B.
    0 where there is no residual, or where they do not fit: the buffers then have other rows or another dtype.
    """
    if not p.residual or c.schedule != "deferred" or c.wg_dimension != "m" or c.split_k > 1:
        return 0
    a_t, b_t = transposed(p)
    fits = c.tile_m == gemm.ROWS * c.compute_warpgroups and c.tile_k == gemm.ROWS and c.tile_n % 128 == 0
    fits &= p.dtype == p.out_dtype and swizzle_bytes(p, c) == 128 and p.m % 8 == 0 and p.n % gemm.ROWS == 0 and not a_t
    if not fits:
        return 0
    return c.tile_n // 128 if b_t else c.compute_warpgroups


def cluster_size(c: Config) -> int:
    """Blocks of a cluster."""
    return {"none": 1, "k": c.split_k, "m4": 4, "n4": 4}.get(c.cluster, 2)


def adds_shares(p: Problem, c: Config) -> bool:
    """Whether each block of a cluster along k adds up and stores a share of a tile, for a problem and a config `as_computed`.

    Otherwise the first block does, for the whole tile.
    """
    shared = gemm.epilogue_tiles(c) % c.split_k == 0
    return c.cluster == "k" and c.schedule == "ahead" and shared and not p.residual


def last_step(p: Problem, c: Config) -> int | None:
    """How many of k the last step of a tile multiplies, where fewer than other steps: wgmma takes 32 bytes of k at a time.

    None for a part of k or of a product, and where tiles begin with different steps.
    """
    if c.split_k > 1 or len(products(p)) > 1 or p.scales == "block" or crowds(p, c):
        return None
    depth = 32 // itemsize_of(p.dtype)
    left = math.ceil(p.k % c.tile_k / depth) * depth
    return left if 0 < left < c.tile_k else None


def crowds(p: Problem, c: Config) -> bool:
    """Whether blocks ask for an operand whose rows along m or n are shorter than a line of 128 bytes, each for itself.

    A line is then asked for once for each row in it by each block.
    """
    a_t, b_t = transposed(p)
    sides = [p.m] * a_t + [p.n] * (not b_t)
    return c.cluster == "none" and len(products(p)) == 1 and any(side * itemsize_of(p.dtype) < 128 for side in sides)


def neighbours(c: Config) -> tuple[int, int]:
    """How many tiles along m and along n a cluster has, whose blocks load the operand that they share once."""
    size = cluster_size(c)
    return (size if c.cluster in ("m", "m4") else 1), (size if c.cluster in ("n", "n4") else 1)


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


def has_producer(c: Config) -> bool:
    """Whether a block has a producer warpgroup beside its consumers: three of these would leave it too few registers."""
    return c.compute_warpgroups < 3


def consumer_registers(c: Config, gpu: Gpu) -> int:
    """Registers of a consumer thread: in steps of 8, 255 at most.

    As `emit_pipeline_warp_specialized` sets them, or `engine.specialize`.
    """
    if not has_producer(c):
        return gpu.registers_per_sm // limits.WARPGROUP // c.compute_warpgroups // 8 * 8
    if c.schedule != "cooperative":
        return limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)
    per_warpgroup = gpu.registers_per_sm // limits.WARPGROUP
    return min(255, (per_warpgroup - c.memory_registers) // c.compute_warpgroups // 8 * 8)


def accumulators(p: Problem, c: Config) -> tuple[tuple[int, int], ...]:
    """The shapes of a consumer warpgroup's accumulators; where rows are normalised, the last is of rows times themselves."""
    return (*fp8.accumulators(_widened(p, c), p.scales), *((gemm.ROWS, gemm.ROWS),) * p.normalised)


def accumulators_in_all(p: Problem, c: Config) -> float:
    """What they take, in accumulators of a warpgroup's part of the tile, with what is kept of the tile before."""
    kept = itemsize_of(partial_problem(p, c).out_dtype) / 4 if c.schedule == "deferred" else 0.0
    if p.normalised:
        kept += gemm.ROWS**2 / math.prod(gemm.warpgroup_tile(c))
    return fp8.accumulators_in_all(c, p.scales) + kept


def columns_of_b(p: Problem, c: Config) -> int:
    """Columns of a tile of B in shared memory, for a problem and a config `as_computed`: tile_n, or more.

    Where B is stored [k, n], a tile lies there in panels of a swizzle's 128 bytes along n. Where these do not divide it, and
    every consumer reads all of it, wgmma reads a part of the last panel, and the rest of that is loaded in vain.
    """
    panel, schedules = 128 // itemsize_of(p.dtype), ("pingpong", "deferred", "ahead")
    whole = gemm.warpgroup_tile(c)[1] == c.tile_n
    if transposed(p)[1] or not whole or c.schedule not in schedules or itemsize_of(p.dtype) != 2:
        return c.tile_n
    return math.ceil(c.tile_n / panel) * panel


def _widened(p: Problem, c: Config) -> Config:
    """The config with tiles as wide as those of B in shared memory."""
    columns = columns_of_b(p, c)
    return c if columns == c.tile_n else replace(c, tile_n=columns)


def swizzle_bytes(problem: Problem, c: Config) -> int:
    """The largest swizzle in bytes that divides the rows of both operands' tiles, and of what a warpgroup takes; 0 for none."""
    a_t, b_t = transposed(problem)
    wg_m, wg_n = gemm.warpgroup_tile(_widened(problem, c))
    rows = (c.tile_k, wg_m if a_t else c.tile_k, c.tile_k if b_t else wg_n)
    return next((s for s in (128, 64) if all(r * itemsize_of(problem.dtype) % s == 0 for r in rows)), 0)


def panel(problem: Problem, c: Config) -> int:
    """Elements of an operand in a row of a swizzle."""
    return swizzle_bytes(problem, c) // itemsize_of(problem.dtype)


def largest_swizzle(row_bytes: int) -> int:
    """The largest swizzle in bytes that divides a row."""
    return next(s for s in (128, 64, 32, 16) if row_bytes % s == 0)


def storage(problem: Problem, config: Config) -> gemm.Storage:
    """The shared memory of a block, of a config `as_computed`. Each consumer warpgroup has up to two epilogue buffers.

    With a residual it has all: the residual of the whole tile is loaded into them while the product is computed. But where
    consumers take turns, a residual comes in parts, while the other consumer multiplies.
    """
    stored, tiles = partial_problem(problem, config), gemm.epilogue_tiles(config)
    received = cluster_size(config) - 1 if config.cluster == "k" else 0  # epilogue tiles, from each other block one
    if adds_shares(problem, config):
        received *= tiles // config.split_k
    loads = stored.residual and not residual_steps(problem, config)
    whole = loads and not config.takes_turns
    barriers = config.compute_warpgroups * (1 if whole else SLOTS) if loads else 0
    barriers += config.max_concurrent_steps if config.takes_turns else 0  # each consumer has `full` barriers of its own
    buffers = tiles if whole else min(SLOTS, tiles)
    size = itemsize_of(stored.out_dtype)
    scales = _scales_of_a_step(config) if problem.scales == "block" else ()
    factors = (config.compute_warpgroups * gemm.ROWS,) if problem.normalised and received else ()
    barriers += config.compute_warpgroups if vector_names(stored) else 0
    itemsize = itemsize_of(problem.dtype)
    columns = columns_of_b(problem, config)
    return gemm.Storage(
        config,
        buffers,
        size,
        received,
        barriers,
        itemsize=itemsize,
        scales=scales,
        vectors=(*factors, *_rooms(stored, config)),
        reduces=problem.normalised,
        columns_of_b=columns,
    )


def vector_names(p: Problem) -> tuple[str, ...]:
    """The epilogue's vectors: each consumer loads its part for a tile into shared memory while it multiplies."""
    return ("scale_a", "scale_b") * scales_sums(p) + ("bias",) * p.bias


def _rooms(p: Problem, c: Config) -> tuple[int, ...]:
    """Room for the vectors of all consumers, in float32 numbers: of the scales, and of the bias.

    Barriers lie behind them, at a multiple of `limits.ALIGNMENT`.
    """
    (rows, columns), found = map(vector_room, gemm.warpgroup_tile(c)), []
    if scales_sums(p):
        found.append(rows + columns if p.scales == "row" else 2 * vector_room(SCALAR))
    if p.bias:
        found.append(max(rows, columns))
    unit = limits.ALIGNMENT // 4
    return tuple(math.ceil(c.compute_warpgroups * numbers / unit) * unit for numbers in found)


def vector_room(elements: int) -> int:
    """How many elements are set aside for so many of a vector: TMA writes to multiples of 128 bytes."""
    return math.ceil(elements / 64) * 64


def _scales_of_a_step(c: Config) -> tuple[int, int]:
    """At most so many scales of A and of B a pipeline step loads; A and B may have changed places."""
    parts, widest = c.tile_k // BLOCK, max(c.tile_m, c.tile_n)
    lines = math.ceil(widest / SCALES_IN_LINE)
    return parts * lines * SCALES_IN_LINE, parts * SCALES_IN_LINE * max(1, widest // gemm.ROWS)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    return storage(*as_computed(problem, config)).bytes
