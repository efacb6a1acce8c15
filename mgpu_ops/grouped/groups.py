"""What grouped_matmul and ragged_contraction share: groups of rows, the Config of both, and what any config must fulfil.

`group_sizes[g]` consecutive rows belong to group g.

Sizes are values, not shapes: the kernels read them on the device. What they may be cannot be checked when a function is
traced, so that any values are safe: a negative size counts as 0, groups end where the rows end, and rows that belong to no
group come after all groups.
"""

from __future__ import annotations

import dataclasses
import itertools
import math
from collections.abc import Callable, Sequence
from typing import Any, Literal, get_args

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops import integers, models
from mgpu_ops.core import gemm, limits, rates
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import itemsize_of, supports_dtypes, supports_rows, supports_sizes

# --- Sizes ----------------------------------------------------------------------------------------------------------

# How sizes are spread over groups. A database cannot hold sizes: what a config was tuned for is one of these.
type Spread = Literal["even", "random", "skewed", "sparse"]
SPREADS: tuple[Spread, ...] = get_args(Spread.__value__)
_BLOCK = 128  # rows that the XLA reference takes at a time


def draw_sizes(spread: str, rows: int, groups: int, key: Any) -> jax.Array:
    """Sizes of `groups` groups, int32, that sum to `rows`.

    "even": equal, up to one row. "random": shares drawn from a Dirichlet distribution of concentration 4, a coefficient of
    variation near 0.5, as routers with a load-balancing loss give. "skewed": the g-th share is proportional to 1 / (g + 1), in
    random order. "sparse": half of the groups, at random, are empty; the others are as in "random".
    """
    key_shares, key_order = jax.random.split(key)
    if spread == "even":
        shares = jnp.ones(groups)
    elif spread == "skewed":
        shares = jax.random.permutation(key_order, 1.0 / jnp.arange(1, groups + 1))
    elif spread in ("random", "sparse"):
        shares = jax.random.gamma(key_shares, 4.0, (groups,))
        if spread == "sparse":
            shares *= jax.random.permutation(key_order, jnp.arange(groups)) < max(1, groups // 2)
    else:
        raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
    ends = jnp.round(jnp.cumsum(shares) / jnp.sum(shares) * rows).astype(jnp.int32)
    return jnp.diff(ends.at[-1].set(rows), prepend=0)


def safe_sizes(sizes: jax.Array, rows: int) -> jax.Array:
    """The sizes that count: negative ones as 0, cut where the rows end."""
    ends = lax.associative_scan(lambda a, b: jnp.minimum(a + b, rows), jnp.clip(sizes, 0, rows))
    return jnp.diff(ends, prepend=0).astype(jnp.int32)


def checked_sizes(op: str, sizes: Any, groups: int | None, rows: int) -> jax.Array:
    """`group_sizes` as int32, or the error that says what is wrong with it.

    Sizes that are known (NumPy arrays, or JAX arrays outside of jit) are refused when one is negative or their sum exceeds the
    rows. Traced ones are safe whatever they are.
    """
    if not hasattr(sizes, "dtype"):
        sizes = np.asarray(sizes)
    if sizes.ndim != 1 or not sizes.size:
        raise ValueError(f"group_sizes has shape {sizes.shape}: {op} takes one size per group, [groups], at least one")
    if not jnp.issubdtype(sizes.dtype, jnp.integer):
        raise TypeError(f"group_sizes has dtype {sizes.dtype}: {op} counts rows; cast it to int32")
    if groups is not None and sizes.shape[0] != groups:
        raise ValueError(f"group_sizes has {sizes.shape[0]} entries but rhs has {groups} groups: {op} takes one per group")
    if not isinstance(sizes, jax.core.Tracer):
        known = np.asarray(sizes).tolist()  # Python's integers, whose sum is exact
        if min(known) < 0:
            raise ValueError(f"group_sizes[{known.index(min(known))}]={min(known)} is negative: a group has 0 rows or more")
        if sum(known) > rows:
            raise ValueError(f"group_sizes sum to {sum(known)}, more than the {rows} rows of lhs: {op} cannot serve all groups")
    return integers.clipped(sizes, rows)


def for_each_block(sizes: jax.Array, rows: int, body: Callable[..., Any], carry: Any) -> Any:
    """carry = body(carry, group, index[block], inside[block]) for blocks of rows of one group each, through XLA.

    `index` are the rows, within the array; `inside` says which of them belong to the group. Empty groups have no block.
    """
    block = max(1, min(_BLOCK, rows))
    sizes = safe_sizes(sizes, rows)
    ends = jnp.cumsum(sizes, dtype=jnp.int32)  # not the int64 that JAX's 64-bit mode would take
    blocks = -(-sizes // block)
    last = jnp.cumsum(blocks, dtype=jnp.int32)

    def step(i: Any, carry: Any) -> Any:
        group = jnp.searchsorted(last, i, side="right").astype(jnp.int32)
        first = ends[group] - sizes[group] + (i - (last[group] - blocks[group])) * block
        row = first + jnp.arange(block, dtype=jnp.int32)
        return body(carry, group, jnp.minimum(row, rows - 1), row < ends[group])

    return lax.fori_loop(jnp.int32(0), last[-1], step, carry)


def looped(product: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """`product` jitted, so that eager calls trace once, and turned by vmap into a loop of launches."""
    batchable = jax.custom_batching.custom_vmap(product)

    @batchable.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return one_after_the_other(run, batched, arrays), True

    run = jax.jit(batchable)
    return run


def one_after_the_other(function: Callable[..., Any], batched: Any, arrays: tuple[jax.Array, ...]) -> jax.Array:
    """The function mapped over the leading axis of those arrays that are batched, in a loop."""
    mapped = [x for x, is_batched in zip(arrays, batched, strict=True) if is_batched]

    def call(slices: list[jax.Array]) -> jax.Array:
        each = iter(slices)
        return function(*(next(each) if is_batched else x for x, is_batched in zip(arrays, batched, strict=True)))

    return lax.map(call, mapped)


def check_floats(op: str, *arrays: tuple[str, jax.Array, int]) -> None:
    """Raises for an operand (name, array, rank) of another rank, for one that is no float, and for two dtypes."""
    for name, x, rank in arrays:
        if x.ndim != rank:
            raise ValueError(f"{name} has shape {x.shape}: {op} takes rank {rank}; use jax.vmap for batches")
        if not jnp.issubdtype(x.dtype, jnp.floating):
            raise TypeError(f"{name} has dtype {x.dtype}: {op} takes floats; cast it first")
    (first, a, _), (second, b, _) = arrays
    if a.dtype != b.dtype:
        raise ValueError(f"{first} is {a.dtype} and {second} is {b.dtype}: cast one with .astype")


def checked_out_dtype(out_dtype: Any, dtype: Any) -> str:
    out = jnp.dtype(dtype if out_dtype is None else out_dtype)
    if not jnp.issubdtype(out, jnp.floating):
        raise TypeError(f"out_dtype {out} is not a float: cast the result instead")
    return out.name


def checked_spread(spread: Spread) -> Spread:
    if spread not in SPREADS:
        raise ValueError(f"spread={spread!r} is not one of {', '.join(SPREADS)}")
    return spread


# --- How fast, and for which models ---------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of grouped_matmul or ragged_contraction works. Tuned; none of the fields changes the answer.

    tile_m, tile_n: rows and columns of the output tile of a block; a group's first tile begins at its first row.
    tile_k: depth of one pipeline step.
    max_concurrent_steps: stages of the shared-memory pipeline.
    compute_warpgroups: consumer warpgroups, 1 or 2, beside the producer.
    wg_dimension: "m" or "n", the side of the output tile that two consumer warpgroups share.
    raster_width: a group's tiles are walked in strips of this many tile rows, column by column.
    epilogue_tile_n: columns stored at a time; such an epilogue tile goes through one of a warpgroup's `epilogue_slots` buffers.
    epilogue_slots: buffers of a warpgroup for epilogue tiles.
    memory_registers: registers of a producer thread; consumers share the rest.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    compute_warpgroups: int
    wg_dimension: str
    raster_width: int
    epilogue_tile_n: int
    epilogue_slots: int
    memory_registers: int


# The products of one mixture-of-experts layer, gate and up fused, under the names of the models' shapes.
LAYERS = {
    f"{name}-{product}": experts
    for name, model in {
        "mixtral-8x7b": "mixtral-8x7b",
        "deepseek-v3-ep8": "deepseek-v3",
        "qwen3-30b": "qwen3-30b-a3b",
        "qwen3-235b": "qwen3-235b-a22b",
    }.items()
    for product, experts in models.MODELS[model].experts.items()
}


def layer_problem(problem: Callable[..., Any], layer: str, tokens: int, spread: str) -> Any:
    """The Problem of one product of a layer that so many tokens reach."""
    e = LAYERS[layer]
    return problem(e.rows * tokens, e.n, e.k, e.groups, spread=spread)


# (layer, tokens, spread) of training steps and prefills: hundreds of rows per expert, bound by arithmetic.
TRAINING = [
    ("mixtral-8x7b-gate_up", 2048, "even"),
    ("mixtral-8x7b-gate_up", 8192, "random"),
    ("mixtral-8x7b-down", 8192, "random"),
    ("mixtral-8x7b-down", 32768, "skewed"),
    ("deepseek-v3-ep8-gate_up", 4096, "random"),
    ("deepseek-v3-ep8-gate_up", 4096, "sparse"),
    ("deepseek-v3-ep8-down", 4096, "random"),
    ("deepseek-v3-ep8-down", 4096, "even"),
    ("qwen3-30b-gate_up", 16384, "random"),
    ("qwen3-30b-down", 65536, "skewed"),
    ("qwen3-235b-gate_up", 8192, "even"),
    ("qwen3-235b-gate_up", 8192, "skewed"),
]
# Small batches, and decoding: few rows per expert, bound by reading the weights.
DECODING = [
    ("mixtral-8x7b-gate_up", 16, "random"),
    ("mixtral-8x7b-down", 128, "random"),
    ("deepseek-v3-ep8-gate_up", 16, "random"),
    ("deepseek-v3-ep8-down", 64, "sparse"),
    ("qwen3-30b-gate_up", 64, "random"),
    ("qwen3-235b-gate_up", 256, "random"),
]
MODELS = ("mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b")

# --- What can run ---------------------------------------------------------------------------------------------------

PANEL = 64  # 16-bit elements of a row of a 128-byte swizzle: the unit in which windows of rows are copied


MAX_ROWS = 2**28 - 256  # a window's first row is written eightfold, in 32 bits (core/tma.py)


def supports(p: Any, gpu: Gpu, rhs_row: tuple[str, int]) -> str | None:
    """Why no config of either kernel can run a problem, or None; `rhs_row` is the dimension along rhs's rows and its length."""
    reason = supports_dtypes(p.dtype, p.out_dtype, gpu)
    if reason is not None:
        return reason
    if p.spread not in SPREADS:
        return f"spread {p.spread!r} is not one of {', '.join(SPREADS)}"
    reason = supports_sizes(p, ("m", "n", "k", "groups"))
    if reason is not None:
        return reason
    if p.m > MAX_ROWS:
        return f"m={p.m} rows are more than {MAX_ROWS}: split them, or pass backend='xla'"
    return supports_rows({"lhs": ("k", p.k, 2), "rhs": (*rhs_row, 2), "the output": ("n", p.n, itemsize_of(p.out_dtype))})


def check_tiles(c: Config, out_itemsize: int, gpu: Gpu) -> str | None:
    """Why neither kernel can run a config, whatever the problem, or None: the first reason."""
    return (
        gemm.check_choices(c, {"tile_k": (64, 128)})
        or gemm.check_tile(c)
        or gemm.check_pipeline(c)
        or _check_order(c)
        or _check_epilogue(c, 128 // out_itemsize)
        or gemm.check_accumulator(c, consumer_registers(c, gpu))
    )


def _check_order(c: Config) -> str | None:
    if not 1 <= c.raster_width <= 1024:
        return f"raster_width={c.raster_width} must be from 1 to 1024: strips that wide hold any group"
    return None


def _check_epilogue(c: Config, row: int) -> str | None:
    """Windows of rows are stored in 128-byte swizzle rows of `row` elements, through buffers that are all used."""
    if reason := gemm.check_epilogue(c, row):
        return f"{reason}: windows of rows are stored in 128-byte swizzle rows"
    tiles = gemm.epilogue_tiles(c)
    if not 1 <= c.epilogue_slots <= tiles:
        return f"epilogue_slots={c.epilogue_slots} must be from 1 to the {tiles} epilogue tiles of a warpgroup"
    return None


def check_smem(problem: Any, config: Config, gpu: Gpu) -> str | None:
    return limits.check_smem(smem_bytes(problem, config), gpu)


def consumer_registers(c: Config, gpu: Gpu) -> int:
    """Registers of a consumer thread."""
    return limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)


def storage(problem: Any, config: Config) -> gemm.Storage:
    """The shared memory of a block of either kernel."""
    return gemm.Storage(config, config.epilogue_slots, itemsize_of(problem.out_dtype))


def smem_bytes(problem: Any, config: Config) -> int:
    """Bytes of shared memory that a block of either kernel takes."""
    return storage(problem, config).bytes


def flops(problem: Any) -> int:
    """Multiplications and additions of a problem whose groups hold all rows."""
    return 2 * problem.m * problem.n * problem.k


def tolerance(problem: Any) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): about two roundings of the output's dtype."""
    return {"bfloat16": 8e-3, "float16": 1e-3}.get(problem.out_dtype, 1e-4)


# --- What is worth trying -------------------------------------------------------------------------------------------


def space(problem: Any, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    del problem, gpu
    return {
        "tile_m": (64, 128, 192, 256),
        "tile_n": (64, 128, 192, 256),
        "tile_k": (64, 128),
        "max_concurrent_steps": (2, 3, 4, 5, 6, 7, 8, 10, 12),
        "compute_warpgroups": (1, 2),
        "wg_dimension": ("m", "n"),
        "raster_width": (1, 2, 4, 8, 16, 32),
        "epilogue_tile_n": (32, 64, 128, 192, 256),
        "epilogue_slots": (1, 2, 4),
        "memory_registers": (24, 40),
    }


_TILES = ((128, 256), (256, 128), (128, 128), (64, 256), (64, 128), (128, 64), (64, 64))


def candidates(epilogues: Callable[[int], Sequence[tuple[int, int]]], legal: Callable[[Config], bool]) -> list[Config]:
    """For each tile, depth of a step, split between warpgroups and way out: the deepest pipeline that is legal.

    Strips of 16 tile rows keep a group's operands in L2. `epilogues` gives (epilogue_tile_n, epilogue_slots) for the columns of
    a warpgroup.
    """
    found = []
    for (tile_m, tile_n), tile_k, wg_dimension in itertools.product(_TILES, (64, 128), ("m", "n")):
        warpgroups = 2 if tile_m * tile_n > 64 * 64 else 1
        wg_n = tile_n // warpgroups if wg_dimension == "n" else tile_n
        for epilogue_tile_n, buffers in epilogues(wg_n):
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
                )
                if legal(config):
                    found.append(config)
                    break  # a deeper pipeline is never slower
    return list(dict.fromkeys(found))


def require_rows(p: Any) -> None:
    """Raises ValueError for a problem that has no time, as it has no rows, columns or groups."""
    if min(p.m, p.n, p.k, p.groups) < 1:
        raise ValueError(f"a dimension of {p} is zero: there is nothing to compute")


def pieces(spread: str, rows: int, groups: int, size: int) -> float:
    """How many pieces of `size` rows the groups are cut into, as expected from how they are spread."""
    used = min(rows, max(1, groups // 2) if spread == "sparse" else groups)
    if spread == "even":
        return used * math.ceil(rows / used / size)
    return max(used, rows / size + used / 2)  # the last piece of a group is half full on average


# Measured on an H200 (docs/kernels/grouped_matmul.md).
_HBM_LATENCY = 2.2e-6  # s that data takes longer from HBM than from L2
_STRIP = 16  # tile rows: of the best width of strips
_STEP = 10e-9  # s of a step that a longer step saves: barriers
_OVERLAP = 0.1  # of the shorter of arithmetic and memory time is not hidden behind the longer
_EPILOGUE_TILE = 0.12e-6  # s that a warpgroup waits for each epilogue tile that has no buffer of its own


def cost(c: Config, tiles: float, steps: float, out_itemsize: int, moved: int, gpu: Gpu, narrow: float = 1.0) -> float:
    """Modelled time in seconds: the slowest of arithmetic, loads and latency per step, in whole waves, above HBM.

    step = max(2 tm tn tk / rate, bytes / load rate, latency / (steps in flight)) of one SM; `narrow` is what is left of the
    rate where a warpgroup is less than 256 columns wide
    time = launch + latency + the longer of waves * (steps * step + store) and HBM bytes / HBM rate + a part of the shorter
    """
    waves = max(1.0, tiles / gpu.sms)
    waves = math.ceil(waves) if waves < 8 else waves + 0.5
    _, wg_n = gemm.warpgroup_tile(c)
    from_hbm = min(1.0, moved / (tiles * steps * gemm.step_bytes(c)))
    latency = (rates.LOAD_LATENCY + _HBM_LATENCY * from_hbm) / c.max_concurrent_steps
    step = _STEP + gemm.step_seconds(c, gpu, gemm.efficiency(c) * (narrow if wg_n < 256 else 1.0), latency)
    store = gemm.store_seconds(c, out_itemsize, gpu) + _EPILOGUE_TILE * (gemm.epilogue_tiles(c) - c.epilogue_slots)
    compute = waves * (steps * step + store) * gemm.raster_factor(c.raster_width, _STRIP)
    memory = moved / (gpu.memory_bytes_per_s * rates.HBM)
    return rates.LAUNCH + rates.LOAD_LATENCY + max(compute, memory) + _OVERLAP * min(compute, memory)


def distance(x: Any, y: Any, other: float = 0.0) -> float | None:
    """How far a config tuned for `x` is from `y`: |log2| ratios of m, n, k and groups; None where it does not carry over.

    `other` is what an op adds for fields of its own.
    """
    sides = ((x.m, y.m), (x.n, y.n), (x.k, y.k), (x.groups, y.groups))
    if itemsize_of(x.out_dtype) != itemsize_of(y.out_dtype) or 0 in itertools.chain(*sides):
        return None
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.05 * (x.dtype != y.dtype) + 0.25 * (x.spread != y.spread) + other
    return near if near <= 4.0 else None
