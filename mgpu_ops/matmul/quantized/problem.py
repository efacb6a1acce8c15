"""What a product with quantized weights is (`Problem`), how it may be run (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax

from mgpu_ops.core import limits
from mgpu_ops.core.gemm import ROWS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_fields, itemsize_of, supports_dtypes, supports_rows, supports_sizes
from mgpu_ops.matmul import checks
from mgpu_ops.matmul.problem import Problem as MatmulProblem
from mgpu_ops.models import MODELS

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Product:
    """x times quantized weights: of one matrix (`Problem`), or of one for each group of rows (`quantized_grouped`)."""

    m: int
    n: int
    k: int
    w_dtype: str = "int8"
    group_size: int = 0
    zero_points: bool = False
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nt"
    scale_dtype: str = "bfloat16"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def bias(self) -> bool:
        """Whether a bias is added."""
        return False

    @property
    def residual(self) -> bool:
        """Whether a residual is added."""
        return False


@dataclasses.dataclass(frozen=True, order=True)
class Problem(Product):
    """out[m, n] = sum_k x[m, k] (w[n, k] - zero_points[g, n]) scales[g, n] + bias[n] + residual[m, n] with g = k / group_size.

    m: rows of x (tokens) and of the result.
    n: columns of the result.
    k: what is summed over.
    w_dtype: of the weights, "int8" or "int4", two of which lie in a byte.
    group_size: neighbours along k that share a scale: 32, 64 or 128 in the kernel; 0 where all of k does, and scales are [n].
    zero_points: whether zero points of the scales' shape are subtracted from the weights.
    dtype: of x, "bfloat16" or "float16" in the kernel.
    out_dtype: of the result, dtype or "float32".
    layout: how weights are stored, "nt" as [n, k] (for the kernel), "nn" as [k, n].
    scale_dtype: of scales and zero points, "float32", "bfloat16" or "float16".
    bias: whether bias[n] is added to each row.
    residual: whether an array of the result's shape and out_dtype is added last.
    """

    bias: bool = False
    residual: bool = False


def names(p: Product) -> tuple[str, ...]:
    """The names of a product's arrays, in their order."""
    more = ("zero_points", "bias", "residual")
    return ("x", "w", "scales", *(name for name in more if getattr(p, name)))


def plain(problem: Problem) -> Problem:
    """The same product without bias and residual."""
    return dataclasses.replace(problem, bias=False, residual=False)


def as_matmul(p: Product) -> MatmulProblem:
    """The product of floats that XLA has in place of it, with its epilogue."""
    return MatmulProblem(p.m, p.n, p.k, p.dtype, p.out_dtype, "nt", bias=p.bias, residual=p.residual)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result, except the order of float32 sums over k.

    tile_m: rows of x of an output tile; they are wgmma's columns, as the kernel computes out^T = w x^T.
    tile_n: columns of the result of an output tile, in units of wgmma's 64 rows.
    tile_k: depth of one pipeline step, 128, 256 or 512 elements of k.
    max_concurrent_steps: stages of the pipeline in shared memory, 2 or more.
    compute_warpgroups: consumer warpgroups of a block, 1 to 4, beside the producer.
    wg_dimension: what these share: "n", the tile's columns; "k", a step's depth; "steps", they take whole steps in turn, so
      that each stage has one reader. With "k" and "steps" they add up their sums.
    cluster: which blocks work together: "none"; "n": two, adjacent along n, load their rows of x once (multicast); "k":
      `split_k` blocks add up parts of k of one tile through distributed shared memory.
    split_k: blocks of a cluster along k, 2, 4 or 8; else 1.
    memory_registers: registers of a producer thread, a multiple of 8 from 24 to 128; consumers share the rest.
    exchange: what moves so that each thread has the weights it multiplies: "weights", shuffled among the threads of a row; or
      "x", whose columns one more warpgroup puts in the order of the weights.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    compute_warpgroups: int
    wg_dimension: str
    cluster: str
    split_k: int
    memory_registers: int
    exchange: str = "weights"


_LAYER = ("qkv", "out", "gate_up", "down")
_TOKENS = (1, 8, 16, 64)
_KINDS: dict[str, dict[str, Any]] = {"w8": {}, "w4": {"w_dtype": "int4", "group_size": 128}}


def _decoding(model: str, kind: str) -> dict[str, Problem]:
    """The products of a layer, for a token of each of a few sequences."""
    layer = MODELS[model].projections
    return {
        f"{model}-{name}-{m}-{kind}": Problem(m, layer[name].n, layer[name].k, **_KINDS[kind])
        for name in _LAYER
        for m in _TOKENS
    }


_MODELS = ("llama3-8b", "llama3-70b")
SHAPES: dict[str, Problem] = {
    name: problem for kind in _KINDS for model in _MODELS for name, problem in _decoding(model, kind).items()
}
SUITES: dict[str, Sequence[str]] = {
    **{kind: [name for name in SHAPES if name.endswith(kind)] for kind in _KINDS},
    **{model: [name for name in SHAPES if name.startswith(model)] for model in _MODELS},
}

# --- What can run ---------------------------------------------------------------------------------------------------

PANEL = 128  # of k: weights that a warpgroup makes floats of at once
GROUPS = (0, 32, 64, 128)
W_DTYPES = ("int8", "int4")
SCALE_DTYPES = ("float32", "bfloat16", "float16")
_TILE_K = (128, 256, 512)
_WARPGROUPS = (1, 2, 3, 4)
_OF_WGMMA = 30  # registers beside its sum, as ptxas says
_ADDRESSES = {"weights": 48, "x": 32}  # registers of a consumer thread for addresses, weights as loaded, and scales, about


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if reason := supports_operands(p, gpu) or checks.supports_work(p, 1, gpu, "the rows"):
        return reason
    if p.out_dtype == "float32" and p.m > 8 and p.m % 8:
        return f"m={p.m} rows in float32 are no multiple of 8: ask for out_dtype={p.dtype}, pad them, or use backend='xla'"
    return None


def supports_operands(p: Product, gpu: Gpu, transpose: str = "transpose_w") -> str | None:
    """Why no config can multiply operands of these dtypes and sides, stored so, or None. transpose: the call's argument."""
    if reason := supports_dtypes(p.dtype, p.out_dtype, gpu):
        return reason
    for field, allowed in (("w_dtype", W_DTYPES), ("scale_dtype", SCALE_DTYPES)):
        if getattr(p, field) not in allowed:
            return f"{field} {getattr(p, field)} is not one of {', '.join(allowed)}: cast, or use backend='xla'"
    if p.layout != "nt":
        return (
            f"layout {p.layout} of weights: bytes cannot be transposed on their way to the tensor cores; store them once as "
            f"[n, k] ({transpose}=True), or use backend='xla'"
        )
    if p.group_size not in GROUPS:
        return (
            f"group_size={p.group_size} is not one of {', '.join(map(str, GROUPS[1:]))}, or 0 for all of k: use backend='xla'"
        )
    if reason := supports_sizes(p, ("m", "n", "k")):
        return reason
    if p.group_size and p.k % p.group_size:
        return f"k={p.k} is no multiple of group_size={p.group_size}: pad it, or use backend='xla'"
    if p.w_dtype == "int4" and p.k % PANEL:
        return f"k={p.k} is no multiple of {PANEL}, which int4 weights are read in: pad it, or use backend='xla'"
    if p.out_dtype == "float32" and p.n % ROWS:
        return (
            f"n={p.n} columns in float32 are no multiple of {ROWS}: ask for out_dtype={p.dtype}, pad them, or use backend='xla'"
        )
    rows = {"x": ("k", p.k, 2), "the weights": ("k", p.k, 1), "the output": ("n", p.n, itemsize_of(p.out_dtype))}
    return supports_rows(rows)


_MEASURED_ROWS = 2048


def unmeasured(problem: Problem) -> str | None:
    """Why XLA runs a problem that the kernel could, until it was measured; or None."""
    if problem.m > _MEASURED_ROWS:
        return f"the kernel was measured with up to {_MEASURED_ROWS} rows, not with m={problem.m}: backend='mosaic' runs it"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason. Kernel, tuner and tests ask here."""
    return supports(problem, gpu) or check_config(problem, config, gpu)


def check_config(p: Product, c: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run a problem that `supports` allows, or None."""
    return (
        _check_choices(c)
        or _check_tile(p, c)
        or limits.check_producer_registers(c.memory_registers)
        or _check_cluster(p, c)
        or _check_groups(p, c)
        or _check_registers(p, c, gpu)
        or limits.check_smem(smem_bytes(p, c), gpu)
    )


def _check_choices(c: Config) -> str | None:
    choices: dict[str, tuple[Any, ...]] = {
        "tile_k": _TILE_K,
        "compute_warpgroups": _WARPGROUPS,
        "wg_dimension": ("n", "k", "steps"),
        "cluster": ("none", "n", "k"),
        "exchange": ("weights", "x"),
    }
    for field, allowed in choices.items():
        if getattr(c, field) not in allowed:
            return f"{field}={getattr(c, field)!r} is not one of {allowed}"
    return None


def _check_tile(p: Product, c: Config) -> str | None:
    """wgmma multiplies the tile, and consumer warpgroups can share it."""
    if c.tile_m % 8 or not 8 <= c.tile_m <= 256:
        return f"tile_m={c.tile_m} must be a multiple of 8 from 8 to 256 (wgmma's N)"
    if c.tile_n % ROWS or not ROWS <= c.tile_n <= 256:
        return f"tile_n={c.tile_n} must be a multiple of {ROWS} (wgmma's M) from {ROWS} to 256"
    if c.tile_k % stored_panel(p):
        return f"tile_k={c.tile_k} must be a multiple of {stored_panel(p)}, which {p.w_dtype} weights are loaded in"
    if c.wg_dimension == "n" and c.tile_n % (c.compute_warpgroups * ROWS):
        return f"tile_n={c.tile_n} must give each of {c.compute_warpgroups} warpgroups a multiple of {ROWS} columns"
    if c.wg_dimension == "k" and (c.compute_warpgroups == 1 or c.tile_k % (c.compute_warpgroups * PANEL)):
        return (
            f"tile_k={c.tile_k} must give each of {c.compute_warpgroups} warpgroups, 2 or more, a multiple of {PANEL} with "
            "wg_dimension='k'"
        )
    if c.wg_dimension == "steps" and (c.compute_warpgroups == 1 or c.max_concurrent_steps % c.compute_warpgroups):
        return (
            f"max_concurrent_steps={c.max_concurrent_steps} must be a multiple of {c.compute_warpgroups} warpgroups, "
            "2 or more, with wg_dimension='steps': a stage has one reader"
        )
    if c.max_concurrent_steps < 2:
        return f"max_concurrent_steps={c.max_concurrent_steps}: loading ahead takes at least 2 stages"
    return None


def _check_cluster(p: Product, c: Config) -> str | None:
    """The blocks of a cluster have tiles, or parts of k, and can share loads."""
    columns, steps = math.ceil(p.n / c.tile_n), math.ceil(p.k / c.tile_k)
    if c.cluster == "n" and columns % 2:
        return f"cluster='n' needs an even number of tiles along n, but there are {columns}"
    if c.cluster == "n" and c.tile_m % 16:
        return f"tile_m={c.tile_m} must be a multiple of 16 with cluster='n': each of two blocks loads half of the rows of x"
    if c.cluster == "n" and p.m > 8 and p.m % 8:
        return f"cluster='n' shares rows of x in units of 8, and m={p.m} is no multiple"
    if c.cluster == "k" and c.split_k not in (2, 4, 8):
        return f"split_k={c.split_k} must be 2, 4 or 8, the blocks of a cluster, with cluster='k'"
    if c.cluster == "k" and c.split_k > steps:
        return f"split_k={c.split_k} is more than the {steps} steps of k={p.k}"
    if c.cluster != "k" and c.split_k != 1:
        return f"split_k={c.split_k} must be 1 without cluster='k'"
    return None


def _check_groups(p: Product, c: Config) -> str | None:
    """TMA copies the scales of a step: as one row, which it does not clip, or as several."""
    if p.group_size == c.tile_k and p.n % c.tile_n:
        return f"tile_n={c.tile_n} must divide n={p.n}, or tile_k={c.tile_k} be more than group_size={p.group_size}"
    if p.group_size and c.tile_n == p.n and p.k % c.tile_k:
        return f"tile_k={c.tile_k} must divide k={p.k}, or tile_n={c.tile_n} be less than n: TMA clips no whole rows of scales"
    return None


def _check_registers(p: Product, c: Config, gpu: Gpu) -> str | None:
    """Sums, products and weights fit into a consumer thread's registers."""
    accumulator = c.tile_m * ROWS // limits.WARPGROUP
    rows = warpgroup_rows(c) // ROWS
    count = rows + (2 if p.group_size else 0)
    registers = limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu, helper_registers(c))
    units = 1 if waits_for_each(c) else 2 if p.group_size else rows * warpgroup_panels(c)
    others = units * PANEL * ROWS // limits.WARPGROUP // 2 + _ADDRESSES[c.exchange]
    if count * accumulator + others > registers:
        return (
            f"{count} sums take {count * accumulator} registers a thread, and weights and addresses about {others} more, but "
            f"{registers} are left: use smaller tiles or fewer consumer warpgroups"
        )
    launched = limits.launched_registers(c.compute_warpgroups, gpu, helper_registers(c))
    if accumulator + _OF_WGMMA > launched:
        return (
            f"a wgmma of tile_m={c.tile_m} takes {accumulator + _OF_WGMMA} registers a thread, which all warps are launched "
            f"with, but {launched} are left: use a smaller tile_m, fewer consumer warpgroups or exchange='weights'"
        )
    return None


# --- What a config takes --------------------------------------------------------------------------------------------


def bits_of(p: Product) -> int:
    """Bits of a weight."""
    return 4 if p.w_dtype == "int4" else 8


def stored_panel(p: Product) -> int:
    """Weights along k in a row in shared memory: where k allows 128 bytes, so that copies read whole lines of global memory."""
    return 2 * PANEL if p.w_dtype == "int4" and p.k % (2 * PANEL) == 0 else PANEL


def x_panel(p: Product) -> int:
    """Elements of x in a row of a swizzle: what a wgmma takes of k, not more than a group."""
    return 32 if p.group_size == 32 else 64


def warpgroup_rows(c: Config) -> int:
    """Columns of the result that one consumer warpgroup multiplies, in wgmma's rows."""
    return c.tile_n // c.compute_warpgroups if c.wg_dimension == "n" else c.tile_n


def warpgroup_panels(c: Config) -> int:
    """Panels of weights along k that one consumer warpgroup multiplies in a step."""
    panels = c.tile_k // PANEL
    return panels // c.compute_warpgroups if c.wg_dimension == "k" else panels


def epilogue_rows(c: Config) -> int:
    """Rows of x of an epilogue tile, which has 64 columns of the result."""
    return next(rows for rows in range(min(c.tile_m, ROWS), 0, -8) if c.tile_m % rows == 0)


def epilogue_buffers(p: Product, c: Config) -> int:
    """Buffers of the epilogue of a warpgroup that stores: up to two; with a residual, which is loaded into them, all."""
    tiles = c.tile_m // epilogue_rows(c)
    return warpgroup_rows(c) // ROWS * tiles if p.residual else min(2, tiles)


def cluster_size(c: Config) -> int:
    """Blocks of a cluster."""
    return {"none": 1, "k": c.split_k}.get(c.cluster, 2)


def clusters_of_tiles(p: Product, c: Config) -> int:
    """How many output tiles, or pairs of them in clusters along n, there are."""
    columns = math.ceil(p.n / c.tile_n)
    return math.ceil(p.m / c.tile_m) * (columns // 2 if c.cluster == "n" else columns)


def k_steps(p: Product, c: Config) -> int:
    """Pipeline steps of one output tile, or of a block's part of it. The last part's surplus steps read zeros."""
    return math.ceil(math.ceil(p.k / c.tile_k) / c.split_k)


def waits_for_each(c: Config) -> bool:
    """Whether a wgmma begins when the one before it is done. With so few registers, ptxas would wait more often than that."""
    return c.compute_warpgroups > 2


def helper_registers(c: Config) -> int:
    """Registers of a thread that puts the columns of x in order; 0 where none does."""
    return 56 if c.exchange == "x" else 0


def storing_warpgroups(c: Config) -> int:
    """Consumer warpgroups that store: the first, where they add up their sums."""
    return c.compute_warpgroups if c.wg_dimension == "n" else 1


def readers(c: Config) -> int:
    """Consumer warpgroups that read a step."""
    return 1 if c.wg_dimension == "steps" else c.compute_warpgroups


def weights_bytes(p: Product, count: int) -> int:
    """Bytes of so many weights."""
    return count * bits_of(p) // 8


def smem_bytes(p: Product, c: Config) -> int:
    """Bytes of shared memory that a block takes."""
    stages, tile, storing, others = c.max_concurrent_steps, c.tile_m * ROWS, storing_warpgroups(c), c.compute_warpgroups - 1
    buffers: list[limits.Buffer] = []
    barriers = (2 + (c.exchange == "x")) * stages
    if c.cluster == "k":
        buffers.append((((c.split_k - 1) * storing, tile), 4))
        barriers += storing + 1
    buffers.append(((storing, epilogue_buffers(p, c), epilogue_rows(c), ROWS), itemsize_of(p.out_dtype)))
    barriers += storing * p.residual
    if c.wg_dimension != "n":
        buffers.append(((others, warpgroup_rows(c) // ROWS, tile), 4))
        barriers += 2
    if p.group_size:
        buffers += [((stages, c.tile_k // p.group_size, c.tile_n), itemsize_of(p.scale_dtype))] * (1 + p.zero_points)
    buffers.append(((stages, weights_bytes(p, c.tile_n * c.tile_k)), 1))
    buffers.append(((stages, c.tile_m, c.tile_k), 2))
    return limits.block_bytes(buffers, barriers)


# --- What a problem takes and gives --------------------------------------------------------------------------------


def groups(p: Product) -> int:
    """Groups along k that have scales of their own."""
    return p.k // p.group_size if p.group_size else 1


def flops(problem: Problem) -> int:
    """Multiplications and additions of the product."""
    return 2 * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and the output written once; weights packed."""
    p = problem
    scales = groups(p) * p.n * itemsize_of(p.scale_dtype) * (1 + p.zero_points)
    outputs = (1 + p.residual) * p.m * p.n * itemsize_of(p.out_dtype) + p.bias * p.n * itemsize_of(p.dtype)
    return p.m * p.k * itemsize_of(p.dtype) + weights_bytes(p, p.n * p.k) + scales + outputs


def inputs(problem: Product, key: Any) -> tuple[jax.Array, ...]:
    """The arrays of `names`: random, with results about as large as x. A bias has x's dtype."""
    p = problem
    largest = 8 if p.w_dtype == "int4" else 128
    keys = jax.random.split(key, 4)
    x = jax.random.normal(keys[0], (p.m, p.k), p.dtype)
    w = jax.random.randint(keys[1], (p.n, p.k) if p.layout == "nt" else (p.k, p.n), -largest, largest, "int8")
    shape = (p.k // p.group_size, p.n) if p.group_size else (p.n,)
    size = largest * math.sqrt((p.k or 1) / 3)  # of a sum of k weights
    scales = (2.0 ** jax.random.uniform(keys[2], shape, "float32", -1.0, 1.0) / size).astype(p.scale_dtype)
    zero_points = [jax.random.randint(keys[3], shape, -largest, largest, "int8").astype(p.scale_dtype)] * p.zero_points
    added = [((p.n,), p.dtype)] * p.bias + [((p.m, p.n), p.out_dtype)] * p.residual
    keys = jax.random.split(jax.random.fold_in(key, 1), 2)
    extra = (jax.random.normal(k, *x) for k, x in zip(keys, added, strict=False))
    return x, w.astype(p.w_dtype), scales, *zero_points, *extra


def tolerance(problem: Product) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): two roundings of the output, one of the reference's weights."""
    rounding = {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.out_dtype, 1e-4)
    weights = {"bfloat16": 6e-3, "float16": 8e-4}.get(problem.dtype, 0.0) if problem.group_size else 0.0
    return rounding + weights
