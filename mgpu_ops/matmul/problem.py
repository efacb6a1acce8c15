"""What a matmul is (`Problem`), how it may be run (`Config`), and which of them fit together (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax

from mgpu_ops.core import limits
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    MAX_SIZE,
    check_fields,
    itemsize_of,
    supports_dtypes,
    supports_rows,
    supports_sizes,
    warpgroup_tile,
)
from mgpu_ops.models import MODELS

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """`batch` products of A[m, k] and B[k, n].

    m, n, k: rows of A, columns of B, and what is summed over.
    dtype: of A and B, "bfloat16" or "float16" in the kernel.
    out_dtype: of the result, dtype or "float32".
    layout: how A and B are stored, "n" as written, "t" transposed (A as [k, m], B as [n, k]); "nt" is A as written and B
      transposed.
    batch: how many products; an operand without this dimension is shared by all.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    batch: int = 1

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Tuned; none of the fields changes the answer, but for the order of float32 sums over k.

    tile_m, tile_n: rows and columns of the output tile of a block.
    tile_k: depth of one pipeline step.
    max_concurrent_steps: stages of the shared-memory pipeline.
    compute_warpgroups: consumer warpgroups, 1 or 2, beside the producer.
    wg_dimension: "m" or "n", the side of the output tile that two consumer warpgroups share.
    cluster: "none", or "m" or "n": two blocks, adjacent along it, load the operand they share once (multicast).
    raster_dimension: "m" or "n", along which tiles are walked in strips that are `raster_width` tiles wide.
    raster_width: see raster_dimension.
    epilogue_tile_n: columns of an epilogue tile, the unit of 64 rows in which the output is stored; two are in flight.
    split_k: parts of k computed apart, in float32, and summed by a second kernel: fills the GPU when tiles are few.
    memory_registers: registers of a producer thread; consumers share the rest.
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

EPILOGUE_ROWS = 64  # one wgmma writes 64 rows
LAYOUTS = ("nn", "nt", "tn", "tt")


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    reason = supports_dtypes(problem.dtype, problem.out_dtype, gpu)
    if reason is not None:
        return reason
    if problem.layout not in LAYOUTS:
        return f"layout {problem.layout!r} is not one of {', '.join(LAYOUTS)}"
    reason = supports_sizes(problem, ("m", "n", "k", "batch"))
    if reason is not None:
        return reason
    tiles = problem.batch * math.ceil(problem.m / EPILOGUE_ROWS) * math.ceil(problem.n / EPILOGUE_ROWS)
    if tiles > MAX_SIZE:
        return f"{tiles} tiles of {EPILOGUE_ROWS} x {EPILOGUE_ROWS} are more than {MAX_SIZE}: split the batch"
    a_t, b_t = transposed(problem)
    rows = {  # what holds the row -> (the dimension along it, its length, bytes per element)
        "a": ("m" if a_t else "k", problem.m if a_t else problem.k, 2),
        "b": ("k" if b_t else "n", problem.k if b_t else problem.n, 2),
        "the output": ("n", problem.n, itemsize_of(problem.out_dtype)),
    }
    return supports_rows(rows)


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    reason = supports(problem, gpu)
    if reason is not None:
        return reason
    c = config
    choices = {
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "cluster": ("none", "m", "n"),
        "raster_dimension": ("m", "n"),
    }
    for field, allowed in choices.items():
        if getattr(c, field) not in allowed:
            return f"{field}={getattr(c, field)!r} is not one of {allowed}"
    if min(c.tile_m, c.tile_n, c.tile_k, c.raster_width, c.epilogue_tile_n) < 1:
        return "tiles and raster_width must be at least 1"
    if not 1 <= c.split_k <= math.ceil(problem.k / max(c.tile_k, 1)):
        return f"split_k={c.split_k} must be from 1 to the {math.ceil(problem.k / c.tile_k)} steps of k={problem.k}"
    if c.max_concurrent_steps < 2:
        return f"max_concurrent_steps={c.max_concurrent_steps}: loading ahead takes at least 2 stages"
    if c.memory_registers % 8 or not 24 <= c.memory_registers <= 128:
        return f"memory_registers={c.memory_registers} must be a multiple of 8 from 24 to 128 (setmaxnreg)"
    wg_m, wg_n = warpgroup_tile(c)
    if wg_m % 64:
        return f"a warpgroup's {wg_m} rows of tile_m={c.tile_m} must be a multiple of 64 (wgmma's M)"
    if wg_n % 8 or wg_n > 256:
        return f"a warpgroup's {wg_n} columns of tile_n={c.tile_n} must be a multiple of 8 up to 256 (wgmma's N)"
    if max(c.tile_m, c.tile_n, c.tile_k) > 256:
        return "tile_m, tile_n and tile_k must be at most 256: a TMA box has at most 256 elements a side"
    swizzle = swizzle_bytes(problem, c)
    if swizzle is None:
        a_t, b_t = transposed(problem)
        return (
            f"tile_k={c.tile_k} and the operand tiles' rows must be multiples of 32 elements per warpgroup: "
            f"A and B need one common swizzle of 64 or 128 bytes (tile_m={c.tile_m} transposed={a_t}, "
            f"tile_n={c.tile_n} transposed={b_t})"
        )
    if wg_n % c.epilogue_tile_n or c.epilogue_tile_n % 8:
        return f"epilogue_tile_n={c.epilogue_tile_n} must divide a warpgroup's {wg_n} columns and be a multiple of 8"
    ragged = _ragged_output(partial_problem(problem, c), c) or _ragged_operands(problem, c, swizzle)
    if ragged is not None:
        return ragged
    accumulator = wg_m * wg_n // 128  # float32 registers of each of a warpgroup's 128 threads
    limit = _consumer_registers(c, gpu)
    if accumulator + 40 > limit:
        return (
            f"the accumulator takes {accumulator} registers a thread and addresses about 40 more, but "
            f"{limit} are left: use smaller tiles or two consumer warpgroups"
        )
    tiles_m, tiles_n = math.ceil(problem.m / c.tile_m), math.ceil(problem.n / c.tile_n)
    if (c.cluster == "m" and tiles_m % 2) or (c.cluster == "n" and tiles_n % 2):
        return f"cluster={c.cluster!r} needs an even number of tiles along it, but there are {tiles_m} x {tiles_n}"
    size = smem_bytes(problem, c)
    if size > gpu.smem_per_block:
        return f"{size} bytes of shared memory exceed the {gpu.smem_per_block} of {gpu.name}: use fewer steps or smaller tiles"
    return None


def transposed(problem: Problem) -> tuple[bool, bool]:
    return problem.layout[:1] == "t", problem.layout[1:] == "t"


def partial_problem(p: Problem, c: Config) -> Problem:
    """What the kernel itself computes: with split_k, `p.batch` times `c.split_k` float32 products of a part of k each."""
    if c.split_k == 1:
        return p
    return replace(p, out_dtype="float32", batch=p.batch * c.split_k)


def k_steps(p: Problem, c: Config) -> int:
    """Pipeline steps of one output tile: of k, or of a part of it. The last part's surplus steps read zeros."""
    return math.ceil(math.ceil(p.k / c.tile_k) / c.split_k)


def _consumer_registers(c: Config, gpu: Gpu) -> int:
    """Registers a compute thread gets: what `emit_pipeline_warp_specialized` sets, in steps of 8, 255 at most."""
    per_warpgroup = gpu.registers_per_sm // 128
    return min(255, (per_warpgroup - c.memory_registers) // c.compute_warpgroups // 8 * 8)


def swizzle_bytes(problem: Problem, c: Config) -> int | None:
    """The largest swizzle in bytes that divides a row of both operands' tiles, and what one warpgroup takes of it."""
    a_t, b_t = transposed(problem)
    wg_m, wg_n = warpgroup_tile(c)
    rows = (c.tile_k, wg_m if a_t else c.tile_k, c.tile_k if b_t else wg_n)
    return next((s for s in (128, 64) if all(r * 2 % s == 0 for r in rows)), None)


def _ragged_output(p: Problem, c: Config) -> str | None:
    """Why TMA cannot clip epilogue tiles at the output's end: where they do not divide it, they are one swizzle tile wide."""
    itemsize = itemsize_of(p.out_dtype)
    tile = _largest_swizzle(c.epilogue_tile_n * itemsize) // itemsize
    divides = (p.m <= 8 or p.m % 8 == 0) and (p.n <= tile or p.n % tile == 0)
    if not divides and c.epilogue_tile_n != tile:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {tile}, one swizzle tile, because the output is {p.m} x {p.n}: "
            f"not a multiple of 8 x {tile}"
        )
    return None


_LONGEST_RAGGED = 2**25  # elements: 64 times as many fit in 32 bits (`engine.block_anywhere`)


def _ragged_operands(p: Problem, c: Config, swizzle: int) -> str | None:
    """Why operands that swizzle tiles do not divide cannot be copied in blocks that wide, or None.

    The last block of a row ends with the row, so that it must fit; along k it would bring elements twice. The last rows, where
    they are no eight, come tile by tile, which takes registers of the producer warpgroup.
    """
    few_registers = c.memory_registers < 40 or c.cluster != "none"
    a_t, b_t = transposed(p)
    tile = swizzle // 2
    operands = (  # name, rows and row length, and the block's row length and its field
        ("A", (p.k, p.m) if a_t else (p.m, p.k), *((c.tile_m, "tile_m") if a_t else (c.tile_k, "tile_k"))),
        ("B", (p.n, p.k) if b_t else (p.k, p.n), *((c.tile_k, "tile_k") if b_t else (c.tile_n, "tile_n"))),
    )
    for name, (rows, length), width, field in operands:
        divides = (rows <= 8 or rows % 8 == 0) and (length <= tile or length % tile == 0)
        if (
            not divides
            and width != tile
            and (field == "tile_k" or width > length or length >= _LONGEST_RAGGED or (rows % 8 and few_registers))
        ):
            return (
                f"{field}={width} must be {tile}, one swizzle tile, because {name} is {rows} x {length}: "
                f"not a multiple of 8 x {tile}"
            )
    return None


def _largest_swizzle(row_bytes: int) -> int:
    """The largest swizzle in bytes that divides a row."""
    return next(s for s in (128, 64, 32, 16) if row_bytes % s == 0)


def epilogue_buffers(c: Config) -> int:
    wg_m, wg_n = warpgroup_tile(c)
    return min(2, (wg_m // EPILOGUE_ROWS) * (wg_n // c.epilogue_tile_n))


def out_smem_shape(c: Config) -> tuple[int, int, int, int]:
    return (c.compute_warpgroups, epilogue_buffers(c), EPILOGUE_ROWS, c.epilogue_tile_n)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    c, steps = config, config.max_concurrent_steps
    return limits.block_bytes(
        [
            (out_smem_shape(c), itemsize_of(partial_problem(problem, c).out_dtype)),
            ((steps, c.tile_m, c.tile_k), 2),
            ((steps, c.tile_k, c.tile_n), 2),
        ],
        barriers=2 * steps,  # full and empty
    )


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem."""
    return 2 * problem.batch * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    return p.batch * ((p.m + p.n) * p.k * itemsize_of(p.dtype) + p.m * p.n * itemsize_of(p.out_dtype))


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, jax.Array]:
    """Random normal operands, stored as `problem.layout` says."""
    p = problem
    a_t, b_t = transposed(p)
    lead = (p.batch,) if p.batch > 1 else ()
    key_a, key_b = jax.random.split(key)
    a = jax.random.normal(key_a, (*lead, p.k, p.m) if a_t else (*lead, p.m, p.k), p.dtype)
    b = jax.random.normal(key_b, (*lead, p.n, p.k) if b_t else (*lead, p.k, p.n), p.dtype)
    return a, b


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): about two roundings of the output's dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.out_dtype, 1e-4)
