"""matmul: out[m, n] = sum_k A[m, k] B[k, n], float32 accumulation, for NVIDIA Hopper.

A warp-specialised, persistent kernel: each block (or cluster of two blocks) takes output tiles in turn. One warpgroup
copies tiles of A and B into a ring of shared-memory slots with TMA, one or two warpgroups multiply them with wgmma. There is
a single pipeline over all (tile, k) steps of a block, so that the copies for the next output tile run while the previous
one is being stored. Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax

from mgpu_ops import core
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh, op, schedule, smem
from mgpu_ops.core.gpu import Gpu

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """`batch` products of A[m, k] and B[k, n]. `layout` says how A and B are stored: "n" as written, "t" transposed
    (A as [k, m], B as [n, k]); "nt" is A as written and B transposed. dtypes: "bfloat16", "float16", "float32" (out only).
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    batch: int = 1


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """Tuned. None of the fields changes the answer, apart from the order of float32 additions over k."""

    tile_m: int  # rows of the output tile of a block
    tile_n: int  # columns of the output tile of a block
    tile_k: int  # depth of one pipeline step
    max_concurrent_steps: int  # slots of the shared-memory ring
    compute_warpgroups: int  # 1 or 2, beside the one that copies
    wg_dimension: str  # "m" or "n": the side of the output tile that two compute warpgroups share out
    cluster: str  # "none", or "m"/"n": two blocks, adjacent along it, load the operand they share once (multicast)
    raster_dimension: str  # "m" or "n": tiles are walked in strips that are `raster_width` wide along it
    raster_width: int
    epilogue_tile_n: int  # columns stored at a time; two such pieces are in flight
    split_k: int  # parts of k computed apart, in float32, and summed by a second kernel: fills the GPU when tiles are few
    memory_registers: int  # of a thread of the copying warpgroup; the compute warpgroups share out the rest


def _llama(hidden: int, qkv: int, ffn: int) -> dict[str, tuple[int, int]]:
    """(n, k) of a Llama block's projections, q, k and v fused and gate and up fused."""
    return {
        "qkv": (qkv, hidden),
        "out": (hidden, hidden),
        "gate_up": (2 * ffn, hidden),
        "down": (hidden, ffn),
    }


_MODELS = {"llama3-8b": _llama(4096, 6144, 14336), "llama3-70b": _llama(8192, 10240, 28672)}

SHAPES: dict[str, Problem] = {
    **{f"square-{s}": Problem(s, s, s) for s in (2048, 4096, 8192, 16384)},
    **{
        f"{model}-{name}-{m}": Problem(m, n, k)
        for model, projections in _MODELS.items()
        for name, (n, k) in projections.items()
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
    for name in _MODELS["llama3-8b"]
    for m in (256, 4096)
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

_DTYPES = ("bfloat16", "float16")
_EPILOGUE_ROWS = 64  # one wgmma writes 64 rows


def _itemsize(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU: the kernel uses wgmma (sm_90a); use backend='xla'"
    if problem.dtype not in _DTYPES:
        return f"dtype {problem.dtype} is not one of {', '.join(_DTYPES)}: cast, or use backend='xla'"
    if problem.out_dtype not in (problem.dtype, "float32"):
        return (
            f"out_dtype {problem.out_dtype} is neither the inputs' {problem.dtype} nor float32: "
            "cast the result, or use backend='xla'"
        )
    if 0 in (problem.m, problem.n, problem.k, problem.batch):
        return f"a dimension of {problem} is zero: there is nothing to multiply"
    a_t, b_t = _transposed(problem)
    rows = {  # what holds the row -> (the dimension along it, its length, bytes per element)
        "a": ("m" if a_t else "k", problem.m if a_t else problem.k, 2),
        "b": ("k" if b_t else "n", problem.k if b_t else problem.n, 2),
        "the output": ("n", problem.n, _itemsize(problem.out_dtype)),
    }
    for what, (name, length, itemsize) in rows.items():
        if length * itemsize % 16:
            unit = 16 // itemsize
            return (
                f"{name}={length} needs 16-byte rows of {what} (TMA): pad to {-(-length // unit) * unit} or pass backend='xla'"
            )
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
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
        return f"max_concurrent_steps={c.max_concurrent_steps}: copying ahead takes at least 2 slots"
    if c.memory_registers % 8 or not 24 <= c.memory_registers <= 128:
        return f"memory_registers={c.memory_registers} must be a multiple of 8 from 24 to 128 (setmaxnreg)"
    wg_m, wg_n = _warpgroup_tile(c)
    if wg_m % 64:
        return f"a warpgroup's {wg_m} rows of tile_m={c.tile_m} must be a multiple of 64 (wgmma's M)"
    if wg_n % 8 or wg_n > 256:
        return f"a warpgroup's {wg_n} columns of tile_n={c.tile_n} must be a multiple of 8 up to 256 (wgmma's N)"
    if max(c.tile_m, c.tile_n, c.tile_k) > 256:
        return "tile_m, tile_n and tile_k must be at most 256: a TMA box has at most 256 elements a side"
    swizzle = _swizzle(problem, c)
    if swizzle is None:
        a_t, b_t = _transposed(problem)
        return (
            f"tile_k={c.tile_k} and the operand tiles' rows must be multiples of 32 elements per warpgroup: "
            f"A and B need one common swizzle of 64 or 128 bytes (tile_m={c.tile_m} transposed={a_t}, "
            f"tile_n={c.tile_n} transposed={b_t})"
        )
    if wg_n % c.epilogue_tile_n or c.epilogue_tile_n % 8:
        return f"epilogue_tile_n={c.epilogue_tile_n} must divide a warpgroup's {wg_n} columns and be a multiple of 8"
    ragged = _ragged(_partial(problem, c), c, swizzle)
    if ragged is not None:
        return ragged
    accumulator = wg_m * wg_n // 128  # float32 registers of each of a warpgroup's 128 threads
    limit = _compute_registers(c, gpu)
    if accumulator + 40 > limit:
        return (
            f"the accumulator takes {accumulator} registers a thread and addresses about 40 more, but "
            f"{limit} are left: use smaller tiles or two compute warpgroups"
        )
    tiles_m, tiles_n = math.ceil(problem.m / c.tile_m), math.ceil(problem.n / c.tile_n)
    if (c.cluster == "m" and tiles_m % 2) or (c.cluster == "n" and tiles_n % 2):
        return f"cluster={c.cluster!r} needs an even number of tiles along it, but there are {tiles_m} x {tiles_n}"
    size = smem_bytes(problem, c)
    if size > gpu.smem_per_block:
        return f"{size} bytes of shared memory exceed the {gpu.smem_per_block} of {gpu.name}: use fewer steps or smaller tiles"
    return None


def _transposed(problem: Problem) -> tuple[bool, bool]:
    return problem.layout[0] == "t", problem.layout[1] == "t"


def _partial(p: Problem, c: Config) -> Problem:
    """What the kernel itself computes: with split_k, `p.batch` times `c.split_k` float32 products of a part of k each."""
    if c.split_k == 1:
        return p
    return replace(p, out_dtype="float32", batch=p.batch * c.split_k)


def _k_steps(p: Problem, c: Config) -> int:
    """Pipeline steps of one output tile: of k, or of a part of it. The last part's surplus steps read zeros."""
    return math.ceil(math.ceil(p.k / c.tile_k) / c.split_k)


def _warpgroup_tile(c: Config) -> tuple[int, int]:
    if c.compute_warpgroups == 1:
        return c.tile_m, c.tile_n
    return (c.tile_m // 2, c.tile_n) if c.wg_dimension == "m" else (c.tile_m, c.tile_n // 2)


def _compute_registers(c: Config, gpu: Gpu) -> int:
    """Registers a compute thread gets: what `emit_pipeline_warp_specialized` sets, in steps of 8, 255 at most."""
    per_warpgroup = gpu.registers_per_sm // 128
    return min(255, (per_warpgroup - c.memory_registers) // c.compute_warpgroups // 8 * 8)


def _swizzle(problem: Problem, c: Config) -> int | None:
    """The largest swizzle in bytes that divides a row of both operands' tiles, and what one warpgroup takes of it."""
    a_t, b_t = _transposed(problem)
    wg_m, wg_n = _warpgroup_tile(c)
    rows = (c.tile_k, wg_m if a_t else c.tile_k, c.tile_k if b_t else wg_n)
    return next((s for s in (128, 64) if all(r * 2 % s == 0 for r in rows)), None)


def _ragged(p: Problem, c: Config, swizzle: int) -> str | None:
    """Why TMA cannot clip at the end of an array: only blocks one swizzle tile wide may touch what tiles do not divide."""
    a_t, b_t = _transposed(p)
    out_swizzle = _largest_swizzle(c.epilogue_tile_n * _itemsize(p.out_dtype))
    blocks = (  # array, its rows and row length, the block's row length and field, elements of a swizzle tile's row
        (
            "a",
            (p.k, p.m) if a_t else (p.m, p.k),
            *((c.tile_m, "tile_m") if a_t else (c.tile_k, "tile_k")),
            swizzle // 2,
        ),
        (
            "b",
            (p.n, p.k) if b_t else (p.k, p.n),
            *((c.tile_k, "tile_k") if b_t else (c.tile_n, "tile_n")),
            swizzle // 2,
        ),
        ("the output", (p.m, p.n), c.epilogue_tile_n, "epilogue_tile_n", out_swizzle // _itemsize(p.out_dtype)),
    )
    for what, (rows, length), width, field, tile in blocks:
        divides = (rows <= 8 or rows % 8 == 0) and (length <= tile or length % tile == 0)
        if not divides and width != tile:
            return (
                f"{field}={width} must be {tile}, one swizzle tile, because {what} is {rows} x {length}: "
                f"not a multiple of 8 x {tile}"
            )
    return None


def _largest_swizzle(row_bytes: int) -> int:
    """The largest swizzle in bytes that divides a row."""
    return next(s for s in (128, 64, 32, 16) if row_bytes % s == 0)


def _epilogue_slots(c: Config) -> int:
    wg_m, wg_n = _warpgroup_tile(c)
    return min(2, (wg_m // _EPILOGUE_ROWS) * (wg_n // c.epilogue_tile_n))


def _out_shape(c: Config) -> tuple[int, int, int, int]:
    return (c.compute_warpgroups, _epilogue_slots(c), _EPILOGUE_ROWS, c.epilogue_tile_n)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    c, steps = config, config.max_concurrent_steps
    return smem.block_bytes(
        [
            (_out_shape(c), _itemsize(_partial(problem, c).out_dtype)),
            ((steps, c.tile_m, c.tile_k), 2),
            ((steps, c.tile_k, c.tile_n), 2),
        ],
        barriers=2 * steps,  # a slot is filled; a slot is consumed
    )


# --- What to try, and a model of its time -----------------------------------------------------------------------------


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    del gpu
    return {
        "tile_m": (64, 128, 192, 256),
        "tile_n": (64, 96, 128, 160, 192, 224, 256),
        "tile_k": (64, 128),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "cluster": ("none", "m", "n"),
        "raster_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 16),
        "epilogue_tile_n": (32, 64, 128),
        "split_k": (1, 2, 3, 4, 6, 8),
        "memory_registers": (24, 40),
    }


# Rates that a datasheet does not give, measured on an H200 (docs/kernels/matmul.md).
_POWER = 0.83  # of the datasheet's dense rate is left under the power cap on random data
_HBM = 0.88  # of the datasheet's bandwidth is reached
_LOAD_BYTES_PER_CLOCK = 44  # what TMA brings an SM from L2
_LOAD_LATENCY = 1.3e-6  # s from a TMA request to its data, under load
_LAUNCH = 2.0e-6  # s of a kernel that does nothing
_SWIZZLE_64 = 0.72  # of the rate is left with 64-byte swizzles: wgmma's reads then meet bank conflicts
_ONE_WARPGROUP = 0.9  # nothing multiplies while the only warpgroup stores or waits


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: the slowest of arithmetic, loads and latency per step, in whole waves, above HBM.

    step = max(2 tm tn tk / rate, bytes / load rate, latency / (steps in flight)) of one SM
    time = launch + latency + max(waves * (k steps * step + store), HBM bytes / HBM rate) + sum of the split_k parts
    """
    p, c = _partial(problem, config), config
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    waves = math.ceil(tiles / gpu.sms)
    rate = gpu.bf16_flops * _POWER / gpu.sms
    load_rate = _LOAD_BYTES_PER_CLOCK * gpu.clock_hz
    wg_m, wg_n = _warpgroup_tile(c)
    # A wgmma of 64 rows reads all of B's tile from shared memory: the wider it is, the better that overlaps.
    efficiency = 0.55 + 0.45 * min(1.0, wg_n / 128, wg_m * wg_n / 8192)
    efficiency *= _ONE_WARPGROUP if c.compute_warpgroups == 1 else 1.0
    efficiency *= _SWIZZLE_64 if _swizzle(problem, c) == 64 else 1.0
    step = max(
        2 * c.tile_m * c.tile_n * c.tile_k / (rate * efficiency),
        (c.tile_m + c.tile_n) * c.tile_k * 2 / load_rate,
        _LOAD_LATENCY / (c.max_concurrent_steps - 1),
    )
    store = c.tile_m * c.tile_n * _itemsize(p.out_dtype) / load_rate
    # A wave's tiles share operands in L2 when they form a compact patch: strips of about 8 tiles.
    raster = 1.0 + 0.004 * abs(math.log2(c.raster_width / 8))
    compute = waves * (_k_steps(p, c) * step + store) * raster
    hbm = gpu.memory_bytes_per_s * _HBM
    reduction = 0.0
    if c.split_k > 1:  # the parts mostly lie in L2, which reads at about twice the rate
        reduction = _LAUNCH + p.batch * p.m * p.n * 4 / (2 * hbm)
    return _LAUNCH + _LOAD_LATENCY + max(compute, bytes_moved(problem) / hbm) + reduction


_TILES = ((128, 256), (256, 128), (128, 192), (128, 128), (128, 64), (64, 128), (64, 64))


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first, one for each tile, split and order of warpgroups.

    tile_k = 64 is one 128-byte swizzle row, the ring takes the shared memory there is, strips of 8 tiles keep operands in L2,
    and k is split where tiles are few. Raises ValueError where `supports` has a reason.
    """
    reason = supports(problem, gpu)
    if reason is not None:
        raise ValueError(f"no config of matmul fits {problem} on {gpu.name}: {reason}")
    shapes = [
        (tile_m, tile_n, wg_dimension, cluster, split_k)
        for tile_m, tile_n in _TILES
        for wg_dimension in ("n", "m")
        for cluster in ("none", "m")
        for split_k in (1, 2, 4, 8)
    ]
    best: dict[tuple[Any, ...], Config] = {}
    for tile_m, tile_n, wg_dimension, cluster, split_k in shapes:
        for steps in range(8, 1, -1):
            config = Config(
                tile_m=tile_m,
                tile_n=tile_n,
                tile_k=64,
                max_concurrent_steps=steps,
                compute_warpgroups=2 if tile_m * tile_n > 64 * 64 else 1,
                wg_dimension=wg_dimension,
                cluster=cluster,
                raster_dimension="m",
                raster_width=8,
                epilogue_tile_n=64 if split_k == 1 and _itemsize(problem.out_dtype) == 2 else 32,
                split_k=split_k,
                memory_registers=40,
            )
            if check(problem, config, gpu) is None:
                key = (tile_m, tile_n, wg_dimension, split_k)
                if key not in best or cost(problem, config, gpu) < cost(problem, best[key], gpu):
                    best[key] = config
                break  # a deeper ring is never slower
    return sorted(best.values(), key=lambda c: cost(problem, c, gpu))


def default(problem: Problem, gpu: Gpu) -> Config:
    """The first of the `candidates`."""
    return candidates(problem, gpu)[0]


# --- The kernel -------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Tile:
    """An output tile: which product of the batch, which part of k, and row and column in tiles (traced int32)."""

    batch: Any
    part: Any
    row: Any
    column: Any


def _tile(p: Problem, c: Config, blocks: int, step: Any) -> _Tile:
    """The `step`-th output tile of this block; the blocks of a cluster take neighbours along `c.cluster`."""
    rows, columns = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    rows //= 2 if c.cluster == "m" else 1
    columns //= 2 if c.cluster == "n" else 1
    index = step * blocks + lax.axis_index("block")
    batch, index = (
        (lax.div(index, jnp.int32(rows * columns)), lax.rem(index, jnp.int32(rows * columns)))
        if p.batch > 1
        else (jnp.int32(0), index)
    )
    row, column = schedule.raster(index, (rows, columns), 0 if c.raster_dimension == "m" else 1, c.raster_width)
    if c.cluster == "m":
        row = row * 2 + lax.axis_index("cluster")
    if c.cluster == "n":
        column = column * 2 + lax.axis_index("cluster")
    part = jnp.int32(0)
    if c.split_k > 1:
        batch, part = lax.div(batch, jnp.int32(c.split_k)), lax.rem(batch, jnp.int32(c.split_k))
    return _Tile(batch, part, row, column)


def _load(p: Problem, c: Config, blocks: int, a_ref: Any, b_ref: Any) -> list[Any]:
    """What the copying warpgroup brings for step (tile, k): a tile of A and one of B, as they are stored.

    TMA fills what lies outside an array with zeros, so ragged m, n and k need no masks. In a cluster, each block loads
    half of the shared operand and multicasts it to both.
    """
    a_t, b_t = _transposed(p)
    swizzle = _swizzle(p, c)

    def spec(ref: Any, tile: tuple[int, int], index: Any, shared: bool) -> Any:
        batched = ref.ndim == 3

        def where(t: Any, k: Any) -> tuple[Any, ...]:
            at = _tile(p, c, blocks, t)
            if c.split_k > 1:
                k = k + at.part * _k_steps(p, c)
            return ((at.batch,) if batched else ()) + index(at, k)

        return core.BlockSpec(
            (None, *tile) if batched else tile,
            where,
            transforms=core.operand_transforms(tile[1], ref.dtype, swizzle),
            memory_space=core.SMEM,
            collective_axes=("cluster",) if shared else (),
        )

    def a_index(at: _Tile, k: Any) -> tuple[Any, Any]:
        return (k, at.row) if a_t else (at.row, k)

    def b_index(at: _Tile, k: Any) -> tuple[Any, Any]:
        return (at.column, k) if b_t else (k, at.column)

    a_tile = (c.tile_k, c.tile_m) if a_t else (c.tile_m, c.tile_k)
    b_tile = (c.tile_n, c.tile_k) if b_t else (c.tile_k, c.tile_n)
    return [
        spec(a_ref, a_tile, a_index, shared=c.cluster == "n"),
        spec(b_ref, b_tile, b_index, shared=c.cluster == "m"),
    ]


def _warpgroup_origin(c: Config) -> tuple[Any, Any]:
    """First row and column of this compute warpgroup within the block's tile."""
    if c.compute_warpgroups == 1:
        return 0, 0
    wg = lax.axis_index("wg")
    wg_m, wg_n = _warpgroup_tile(c)
    return (wg * wg_m, 0) if c.wg_dimension == "m" else (0, wg * wg_n)


def _multiply(p: Problem, c: Config, acc: Any, a_smem: Any, b_smem: Any) -> None:
    """acc += A tile @ B tile, this warpgroup's share."""
    a_t, b_t = _transposed(p)
    wg_m, wg_n = _warpgroup_tile(c)
    row, column = _warpgroup_origin(c)
    if wg_m < c.tile_m:
        a_smem = a_smem.at[:, core.ds(row, wg_m)] if a_t else a_smem.at[core.ds(row, wg_m), :]
    if wg_n < c.tile_n:
        b_smem = b_smem.at[core.ds(column, wg_n), :] if b_t else b_smem.at[:, core.ds(column, wg_n)]
    core.wgmma(
        acc,
        core.transpose_ref(a_smem) if a_t else a_smem,
        core.transpose_ref(b_smem) if b_t else b_smem,
    )
    core.wgmma_wait(0)


def _store(p: Problem, c: Config, tile: _Tile, acc: Any, out_smem: Any, out_ref: Any) -> None:
    """Rounds the accumulator to the output's dtype and stores it piece by piece, two pieces in flight.

    TMA clips what lies outside the array. The last pieces drain while the next tile is multiplied.
    """
    wg_m, wg_n = _warpgroup_tile(c)
    wg = lax.axis_index("wg")
    row, column = _warpgroup_origin(c)
    values = acc[...].astype(out_ref.dtype)
    slots = _epilogue_slots(c)
    pieces = [(i, j) for i in range(0, wg_m, _EPILOGUE_ROWS) for j in range(0, wg_n, c.epilogue_tile_n)]
    for number, (i, j) in enumerate(pieces):
        slot = number % slots
        # The slot's last copy has read it. At a new tile all are waited for: they started a whole main loop ago.
        core.wait_smem_to_gmem(slots - 1 if number else 0, wait_read_only=True)
        out_smem[wg, slot] = values[i : i + _EPILOGUE_ROWS, j : j + c.epilogue_tile_n]
        core.commit_smem()
        rows = core.ds(tile.row * c.tile_m + row + i, _EPILOGUE_ROWS)
        columns = core.ds(tile.column * c.tile_n + column + j, c.epilogue_tile_n)
        product = tile.batch * c.split_k + tile.part
        where = (product, rows, columns) if out_ref.ndim == 3 else (rows, columns)
        core.copy_smem_to_gmem(out_smem.at[wg, slot], out_ref.at[where])


def _kernel(
    p: Problem, c: Config, blocks: int, a_ref: Any, b_ref: Any, out_ref: Any, *, accumulator: Any, out_smem: Any
) -> None:
    """One block: a pipeline over (its output tiles) x (steps of k), with a store at the end of each tile."""
    k_steps = _k_steps(p, c)
    groups = _tile_groups(p, c)
    my_tiles = schedule.tiles_of_block(groups, lax.axis_index("block"), blocks)

    def step(indices: tuple[Any, Any], a_smem: Any, b_smem: Any, acc: Any) -> Any:
        t, k = indices
        _multiply(p, c, acc, a_smem, b_smem)

        @core.when(k == k_steps - 1)
        def _() -> None:
            _store(p, c, _tile(p, c, blocks, t), acc, out_smem, out_ref)
            acc[...] = jnp.zeros(acc.shape, jnp.float32)

        return acc

    def compute(pipeline: Any) -> None:
        accumulator.scope(lambda acc: (pipeline(acc), None)[1])

    core.emit_pipeline_warp_specialized(
        step,
        grid=(my_tiles, k_steps),
        in_specs=_load(p, c, blocks, a_ref, b_ref),
        max_concurrent_steps=c.max_concurrent_steps,
        num_compute_wgs=c.compute_warpgroups,
        memory_registers=c.memory_registers,
        wg_axis="wg",
        compute_context=compute,
    )(a_ref, b_ref)
    core.wait_smem_to_gmem(0, wait_read_only=True)  # shared memory outlives the copies that read it


def _tile_groups(p: Problem, c: Config) -> int:
    """Output tiles, counted in clusters."""
    tiles = p.batch * math.ceil(p.m / c.tile_m) * math.ceil(p.n / c.tile_n)
    return tiles // (1 if c.cluster == "none" else 2)


def _launch(p: Problem, c: Config, gpu: Gpu, a: jax.Array, b: jax.Array, *, interpret: bool = False) -> jax.Array:
    """Runs the kernel: A and B as stored, each with or without a leading batch dimension."""
    out_dtype, batched = p.out_dtype, 3 in (a.ndim, b.ndim)
    p = _partial(p, c)
    cluster = 1 if c.cluster == "none" else 2
    blocks = min(gpu.sms // cluster, _tile_groups(p, c))
    out = core.kernel(
        functools.partial(_kernel, p, c, blocks),
        out_type=jax.ShapeDtypeStruct((p.batch, p.m, p.n) if batched or c.split_k > 1 else (p.m, p.n), p.out_dtype),
        scratch_types={
            "accumulator": core.Accumulator(_warpgroup_tile(c), c.compute_warpgroups),
            "out_smem": core.SMEM(
                _out_shape(c),
                jnp.dtype(p.out_dtype),
                transforms=core.operand_transforms(c.epilogue_tile_n, p.out_dtype),
            ),
        },
        grid=(blocks,),
        grid_names=("block",),
        cluster=(cluster,),
        cluster_names=("cluster",),
        num_threads=c.compute_warpgroups + 1,
        name="mgpu_ops_matmul",
        interpret=interpret,
    )(a, b)
    if c.split_k > 1:  # in a fixed order: the result is the same from run to run
        parts = out.reshape(*((-1,) if batched else ()), c.split_k, p.m, p.n)
        out = parts.sum(-3).astype(out_dtype)
    return out


# --- The public function ----------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class _Call:
    """What a call says beside its arrays."""

    transpose_a: bool
    transpose_b: bool
    out_dtype: str
    config: Config | None
    backend: str | None


def matmul(
    a: jax.Array,
    b: jax.Array,
    *,
    out_dtype: Any = None,
    transpose_a: bool = False,
    transpose_b: bool = False,
    config: Config | None = None,
    backend: str | None = None,
) -> jax.Array:
    """out[m, n] = sum_k A[m, k] B[k, n], accumulated in float32, by the kernel tuned for the running GPU.

    Args:
      a: A, [m, k], or [k, m] with `transpose_a`. bfloat16 or float16 for the kernel; other floats run through XLA.
      b: B, [k, n], or [n, k] with `transpose_b`, of a's dtype.
      out_dtype: of the result; a's dtype by default. "float32" keeps the accumulator as it is.
      transpose_a, transpose_b: the operand is stored transposed; it is read in place, not copied.
      config: runs the forward kernel with this Config instead of the database's.
      backend: "mosaic" (the kernel; a Hopper GPU), "interpret" (the kernel in JAX's GPU interpreter, with race detection;
        any machine, slow), "xla" (`reference`). Default: $MGPU_OPS_BACKEND, else "mosaic" where GPU and problem allow it
        and otherwise "xla", logging once why.

    Returns:
      [m, n] of out_dtype. A zero-size k gives zeros, as in `jax.numpy.matmul`.

    Works under jit, grad (both gradients run the same kernels, on cotangents rounded to a's dtype; reverse mode only), vmap
    (one launch for the whole batch) and shard_map. The config is looked up when a shape is traced: `mgpu_ops.explain` says
    which one and why.

    Raises:
      ValueError: rank other than 2, different k, different dtypes, an unknown backend, a config that cannot run.
      TypeError: not arrays of floats.

    Source: the kernel's own, in mgpu_ops/matmul.py; measurements in docs/kernels/matmul.md.
    """
    a, b = jnp.asarray(a), jnp.asarray(b)
    for name, x in (("a", a), ("b", b)):
        if jnp.ndim(x) != 2:
            raise ValueError(f"{name} has shape {jnp.shape(x)}: matmul takes rank 2; use jax.vmap for batches")
        if not jnp.issubdtype(jnp.result_type(x), jnp.floating):
            raise TypeError(f"{name} has dtype {jnp.result_type(x)}: matmul takes floats; cast it first")
    if a.dtype != b.dtype:
        raise ValueError(f"a is {a.dtype} and b is {b.dtype}: cast one with .astype")
    k_a, k_b = a.shape[0 if transpose_a else 1], b.shape[1 if transpose_b else 0]
    if k_a != k_b:
        raise ValueError(
            f"a{a.shape} and b{b.shape} differ in k: {k_a} != {k_b} (transpose_a={transpose_a}, transpose_b={transpose_b})"
        )
    if config is not None and not isinstance(config, Config):
        raise TypeError(f"config is {config!r}: pass a mgpu_ops.MatmulConfig")
    out = jnp.dtype(a.dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"out_dtype {out} is not a float: cast the result instead")
    call = _Call(bool(transpose_a), bool(transpose_b), out.name, config, op.backend(backend))
    return _matmul(call, *mesh.same_mesh_axes(a, b))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def _matmul(call: _Call, a: jax.Array, b: jax.Array) -> jax.Array:
    return _batchable(call)(a, b)


def _forward(call: _Call, a: jax.Array, b: jax.Array) -> Any:
    return _matmul(call, a, b), (a, b)


def _backward(call: _Call, saved: Any, g: jax.Array) -> tuple[jax.Array, jax.Array]:
    """dA = g B^T and dB = A^T g, written so that each stored operand is read in place."""
    a, b = saved
    g = g.astype(a.dtype)
    ta, tb = call.transpose_a, call.transpose_b

    def product(x: jax.Array, y: jax.Array, tx: bool, ty: bool) -> jax.Array:
        return _matmul(_Call(tx, ty, a.dtype.name, None, call.backend), x, y)

    da = product(b, g, tb, True) if ta else product(g, b, False, not tb)
    db = product(g, a, True, ta) if tb else product(a, g, not ta, False)
    return da, db


_matmul.defvjp(_forward, _backward)


@functools.cache
def _batchable(call: _Call) -> Any:
    """The call as a function of arrays that vmap turns into one launch. It is jitted, so that eager calls trace once."""

    @jax.custom_batching.custom_vmap
    def product(a: jax.Array, b: jax.Array) -> jax.Array:
        return op.dispatch(SPEC, _problem(call, a, b), (a, b), config=call.config, backend=call.backend)

    @product.def_vmap
    def _(size: int, batched: Sequence[bool], a: jax.Array, b: jax.Array) -> tuple[jax.Array, bool]:
        if not batched[1] and b.ndim == 2 and not call.transpose_a:  # one product with more rows
            out = run(a.reshape(-1, a.shape[-1]), b)
            return out.reshape(*a.shape[:-1], out.shape[-1]), True
        inner = max(x.ndim - is_batched for x, is_batched in zip((a, b), batched, strict=True)) == 3
        if not inner:
            return run(a, b), True
        lead = (size, next(x.shape[-3] for x, y in zip((a, b), batched, strict=True) if x.ndim - y == 3))

        def flat(x: jax.Array, is_batched: bool) -> jax.Array:
            if x.ndim - is_batched == 2:
                if not is_batched:
                    return x
                x = x[:, None]
            return jnp.broadcast_to(x, (*lead, *x.shape[-2:])).reshape(-1, *x.shape[-2:])

        out = run(flat(a, batched[0]), flat(b, batched[1]))
        return out.reshape(*lead, *out.shape[-2:]), True

    run = jax.jit(product)
    return run


def _problem(call: _Call, a: jax.Array, b: jax.Array) -> Problem:
    m, k = a.shape[-2:][::-1] if call.transpose_a else a.shape[-2:]
    n = b.shape[-2] if call.transpose_b else b.shape[-1]
    batch = max((x.shape[0] for x in (a, b) if x.ndim == 3), default=1)
    layout = "nt"[call.transpose_a] + "nt"[call.transpose_b]
    return Problem(m, n, k, a.dtype.name, call.out_dtype, layout, batch)


# --- What the tuner, the benchmarks and the tests ask ------------------------------------------------------------------


def reference(problem: Problem, a: jax.Array, b: jax.Array) -> jax.Array:
    """The same through XLA (cuBLAS on a GPU): float32 accumulation, then rounding to out_dtype."""
    a_t, b_t = _transposed(problem)
    wide = jnp.promote_types(problem.dtype, jnp.float32)
    if problem.dtype == problem.out_dtype:
        wide = jnp.dtype(problem.dtype)  # XLA accumulates 16-bit floats in float32; asking for it costs a second pass
    if gpus.current() is None:  # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others
        wide = jnp.promote_types(problem.dtype, jnp.float32)
        a, b = a.astype(wide), b.astype(wide)
    return jnp.matmul(a.mT if a_t else a, b.mT if b_t else b, preferred_element_type=wide).astype(problem.out_dtype)


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem."""
    return 2 * problem.batch * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    return p.batch * ((p.m + p.n) * p.k * _itemsize(p.dtype) + p.m * p.n * _itemsize(p.out_dtype))


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, jax.Array]:
    """Random normal operands, stored as `problem.layout` says."""
    p = problem
    a_t, b_t = _transposed(p)
    lead = (p.batch,) if p.batch > 1 else ()
    key_a, key_b = jax.random.split(key)
    a = jax.random.normal(key_a, (*lead, p.k, p.m) if a_t else (*lead, p.m, p.k), p.dtype)
    b = jax.random.normal(key_b, (*lead, p.n, p.k) if b_t else (*lead, p.k, p.n), p.dtype)
    return a, b


def distance(x: Problem, y: Problem) -> float | None:
    """How far a config tuned for `x` is from `y`: |log2| ratios of m, n, k and batch; None where it does not carry over.

    A tenfold batch of tokens changes the best tile; 16-bit dtypes and layouts tile alike but are told apart by a small step.
    """
    if _itemsize(x.out_dtype) != _itemsize(y.out_dtype):
        return None
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.batch, y.batch))
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.5 * (x.layout != y.layout)
    return near if near <= 4.0 else None


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms(ref)): about two roundings of the output's dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.out_dtype, 1e-4)


SPEC = op.OpSpec(
    name="matmul",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes=SHAPES,
    suites=SUITES,
    space=space,
    supports=supports,
    check=check,
    candidates=candidates,
    default=default,
    cost=cost,
    distance=distance,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=_launch,
    reference=reference,
    tolerance=tolerance,
)
