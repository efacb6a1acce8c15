"""Which configs of attention are worth trying, and a model of their time. It ranks configs where none was measured."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.attention import reference
from mgpu_ops.attention.heads import HEAD_DIMS, PANEL, backward_dim, rounded, rounded_values
from mgpu_ops.attention.mask import keys_seen, kv_blocks, q_blocks, whole_kv_blocks
from mgpu_ops.attention.problem import (
    DEALT,
    KV_CLUSTERS,
    MAX_SPLITS,
    ONE_WARPGROUP,
    PORTABLE_CLUSTER,
    ROWS,
    SPLIT_TILES_KV,
    BackwardProblem,
    Config,
    Problem,
    blocks_of_an_sm,
    check,
    least_splits,
    loads_heads_together,
    masks_all,
    output_tiles,
    split_stages,
    splits_keys,
    supports,
)
from mgpu_ops.core import limits, rates
from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import LINE, itemsize_of, require

# --- Random inputs --------------------------------------------------------------------------------------------------

SOFT_CAP = 30.0  # of the inputs of problems with one


def inputs(problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random normal q, k and v, and `Inputs.arrays()`: lengths of at least half the tokens and one, segments, a bias, sinks.

    With pages, each page of the two pools is some sequence's, in random order. Keys and values of 8 bits are such as scales of
    about 1 / 32 belong to.
    """
    p = problem
    keys = jax.random.split(key, 8)
    pages = p.batch * p.kv_tokens // p.page_size if p.page_size else 0
    kv = (pages, p.page_size, p.kv_heads) if pages else (p.batch, p.kv_tokens, p.kv_heads)
    shapes = ((p.batch, p.q_tokens, p.q_heads, p.head_dim), (*kv, p.head_dim), (*kv, p.v_dim))
    qkv = [jax.random.normal(k, s, p.dtype) for k, s in zip(keys, shapes, strict=False)]
    if p.eight_bits:
        qkv[1:] = [with_scale(x, jnp.float32(1 / _SCALED), p.kv_dtype) for x in qkv[1:]]
    cap = SOFT_CAP if p.soft_cap else 0.0
    scale = 1 / math.sqrt(p.head_dim)
    rest = [jnp.array([scale, cap, scale / cap if cap else 0.0], jnp.float32)]
    if p.lengths:
        rest += [
            jax.random.randint(k, (p.batch,), reference.least_length(n), n + 1)
            for k, n in zip(keys[3:], (p.q_tokens, p.kv_tokens), strict=False)
        ]
    if p.segments:
        rest += [
            jnp.broadcast_to(jnp.arange(n) * reference.SEGMENTS // n, (p.batch, n)).astype(jnp.int32)
            for n in (p.q_tokens, p.kv_tokens)
        ]
    if p.bias != "none":
        rest.append(jax.random.normal(keys[5], (1, p.q_heads, p.q_tokens, p.kv_tokens), p.bias))
    if p.sinks:
        rest.append(jax.random.normal(keys[6], (1, p.q_heads), jnp.float32))
    if pages:
        rest.append(jax.random.permutation(keys[7], pages).astype(jnp.int32).reshape(p.batch, -1))
    if p.eight_bits:
        rest += [jax.random.uniform(k, (1, p.kv_heads), jnp.float32, 0.5 / _SCALED, 2 / _SCALED) for k in keys[5:7]]
    return (*qkv, *rest)


_SCALED = 32  # what random keys and values of 8 bits are multiplied by


# --- Forward --------------------------------------------------------------------------------------------------------


_FEW_TOKENS = 16  # query tokens: up to here keys are split
SECTION_WAVES = (1, 2, 4, 8, 1024)  # the last: all heads together
SECTION = 4
_LONG = 8192  # query tokens: beyond, sections as in `_MEASURED`
_KEPT = 0.6  # of the L2: keys and values of all heads that take less stay there


def space(problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices for each field of Config, in order; `check` says which combinations run."""
    if splits_keys_by_default(problem):
        choices: dict[str, Sequence[Any]] = {name: (value,) for name, value in ONE_WARPGROUP.items()}
        choices |= {
            "tile_kv": SPLIT_TILES_KV,
            "max_concurrent_steps": (2, 3, 4, 5, 6, 7),
            "kv_splits": tuple(sorted({n for heads in _heads_of_a_tile(problem) for n in _splits(problem, heads, gpu)})),
            "kv_cluster": KV_CLUSTERS,
            "kv_heads_per_tile": _heads_of_a_tile(problem),
        }
        return {field.name: choices[field.name] for field in dataclasses.fields(Config)}
    return {
        "compute_warpgroups": (1, 2, 3),
        "tile_kv": (64, 128, 192, 256),
        "max_concurrent_steps": (2, 3, 4),
        "q_slots": (1, 2, 3),
        "section_waves": SECTION_WAVES,
        "memory_registers": (24, 32, 40, 48, 56, 72),
        "pv_wait": ("half", "early", "late"),
        "kv_splits": (0,),
        "kv_cluster": (1,),
        "turns": ("none", "products"),
        "rescale": ("always", "conditional"),
        "kv_heads_per_tile": (1,),
    }


def _heads_of_a_tile(problem: Problem) -> tuple[int, ...]:
    """The choices for `kv_heads_per_tile`."""
    return (1,) if loads_heads_together(problem) else (1, problem.kv_heads)


def _splits(problem: Problem, heads: int, gpu: Gpu) -> tuple[int, ...]:
    """Powers of two, and what gives each SM one, two or three blocks; no more than there are kv blocks of 64 keys.

    Or more, where tables of pages do not fit otherwise. heads: `kv_heads_per_tile`.
    """
    p = problem
    tiles = p.batch * (p.kv_heads // heads) * math.ceil(p.q_tokens * (p.q_heads // p.kv_heads) * heads / ROWS)
    found = {1, 2, 4, 8, 16, 32, *(blocks * gpu.sms // tiles for blocks in (1, 2, 3))}
    splits = sorted(n for n in found if 1 <= n <= min(MAX_SPLITS, math.ceil(p.kv_tokens * heads / 64)))
    least = least_splits(p, gpu) or 1
    return (*splits, least) if least > splits[-1] else tuple(splits)


def splits_keys_by_default(problem: Problem) -> bool:
    """Whether it has few query tokens, and the kernel with `kv_splits` runs it."""
    other = problem.page_size > 0 or problem.eight_bits  # what no kernel without splits reads
    few = problem.q_tokens <= _FEW_TOKENS or other
    return few and splits_keys(problem) is None


# The fastest found on an H200 for long sequences, by head dims of keys and values (docs/kernels/flash_attention.md).
_MEASURED = {
    (64, 64): Config(3, 128, 3, 2, 1, 32, "half", turns="products"),
    (80, 80): Config(2, 128, 3, 2, 1, 40, "half", turns="products"),
    (96, 96): Config(2, 128, 3, 2, 1, 40, "half", turns="products"),
    (112, 112): Config(2, 128, 2, 2, 1, 40, "half", turns="products", rescale="conditional"),
    (128, 128): Config(2, 128, 2, 2, 1, 24, "half", turns="products"),
    (160, 160): Config(2, 128, 2, 1, 4, 40, "half", turns="products", rescale="conditional"),
    (192, 128): Config(2, 128, 2, 1, 1, 24, "half", turns="products"),
    (192, 192): Config(2, 64, 2, 2, 4, 24, "half", turns="products", rescale="conditional"),
    (256, 256): Config(2, 64, 2, 1, 4, 24, "early", rescale="conditional"),
}
# With a bias, where another was faster.
_MEASURED_WITH_BIAS = {
    (80, 80): Config(3, 64, 3, 2, 4, 48, "half", turns="products"),
    (256, 256): Config(2, 64, 2, 1, 4, 24, "half", rescale="conditional"),
}
# Where all rows see all keys or a causal mask's, `_WIDE_FROM` or more. There are no registers for what else a problem may have.
_MEASURED_WIDE = {
    (80, 80): Config(2, 192, 3, 2, 1, 40, "half", turns="products", rescale="conditional"),
    (96, 96): Config(2, 192, 2, 2, 1, 40, "half", turns="products", rescale="conditional"),
}
# Of up to `_SHORT_KEYS` keys, without a window, segments and a bias. Where a tile is over before the next queries could load,
# with three stages of them.
_MEASURED_SHORT = {
    (64, 64): Config(2, 64, 3, 3, 1, 40, "half", turns="products"),
    (80, 80): Config(2, 64, 3, 2, 1, 48, "half", turns="products"),
    (96, 96): Config(2, 64, 3, 2, 1, 48, "half", turns="products"),
    (112, 112): Config(2, 64, 3, 2, 1, 48, "half", turns="products", rescale="conditional"),
    (128, 128): Config(2, 128, 2, 3, 1, 40, "half", turns="products"),
    (256, 256): Config(1, 64, 2, 2, 1, 72, "early", rescale="conditional"),
}
_SHORT_KEYS = 128
_WIDE_FROM = 4096  # keys: 2048 took 2 % longer than with steps of 128
# A config modelled this much faster than the measured one is the default in its place: by tiles of the measured one for an SM.
_MARGIN_FEW, _MARGIN_MANY, _FEW_TILES = 1.05, 1.10, 16


def candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """Analytic choices, none measured, the least modelled `cost` first. Raises ValueError where `supports` has a reason.

    For each number of consumers, tile_kv and q_slots, the deepest pipeline of up to three stages: two load while consumers work
    on one. For few query tokens `_split_candidates`.
    """
    require("flash_attention", supports(problem, gpu), problem, gpu)
    if splits_keys_by_default(problem):
        return _split_candidates(problem, gpu)
    measured, section = _measured(problem, gpu), _section(problem, gpu, SECTION)
    found = [] if measured is None else [measured]
    pv_wait, turns = "early", "none"
    # Of wide outputs: of narrower ones only the measured configs were faster so.
    rescale = measured.rescale if measured is not None and rounded_values(problem.head_dim, problem.v_dim) > 128 else "always"
    if measured is not None and measured.turns != "none":  # faster at that head dim than the others, which come next
        pv_wait, turns = measured.pv_wait, measured.turns
        found += [dataclasses.replace(measured, turns="none"), dataclasses.replace(measured, pv_wait="early", turns="none")]
    for warpgroups, tile_kv, q_slots in itertools.product((1, 2, 3), (64, 128, 192, 256), (2, 1)):
        order, registers = turns if warpgroups > 1 else "none", _producer_registers(problem, warpgroups, tile_kv)
        blocks = Config(warpgroups, tile_kv, 3, q_slots, section, registers, pv_wait, turns=order, rescale=rescale)
        pipelines = [blocks, dataclasses.replace(blocks, max_concurrent_steps=2)]
        found += [c for c in pipelines if check(problem, c, gpu) is None][:1]
    legal = [c for c in dict.fromkeys(found) if check(problem, c, gpu) is None]
    legal = [c for c in legal if not _spills(problem, c, gpu)] or legal
    return sorted(legal, key=lambda c: (cost(problem, c, gpu), c.compute_warpgroups))


def _section(problem: Problem, gpu: Gpu, of_long: int) -> int:
    """`section_waves` where nothing was measured: all heads together where their keys and values stay in the L2.

    `cost` does not know the L2. Shorter sections end unevenly where they do not divide the heads, by up to a fifth of a
    problem's time (results/2026-11-23-h200-flash_attention-defaults.jsonl).
    """
    p = problem
    if p.batch * p.kv_heads * p.kv_tokens * (p.head_dim + p.v_dim) * itemsize_of(p.dtype) <= _KEPT * gpu.l2_bytes:
        return SECTION_WAVES[-1]
    return SECTION if p.q_tokens <= _LONG else of_long


def _measured(problem: Problem, gpu: Gpu) -> Config | None:
    """The config of `_MEASURED` for its head dims, with as many registers for the producer as the problem takes."""
    dims = rounded(problem.head_dim), rounded_values(problem.head_dim, problem.v_dim)
    wide = problem.kv_tokens >= _WIDE_FROM and problem.left is None and not problem.segments and not problem.lengths
    special = _MEASURED_WITH_BIAS if problem.bias != "none" else _MEASURED_WIDE if wide else {}
    found = _measured_short(problem) or special.get(dims) or _MEASURED.get(dims)
    if found is None:
        return None
    least = _producer_registers(problem, found.compute_warpgroups, found.tile_kv)
    section = _section(problem, gpu, found.section_waves)
    if problem.bias != "none" and output_tiles(problem, found) <= gpu.sms:
        found = dataclasses.replace(found, q_slots=1)  # a block has one tile, and a bias takes the room of the next queries
    return dataclasses.replace(found, section_waves=section, memory_registers=max(found.memory_registers, least))


def _measured_short(problem: Problem) -> Config | None:
    """The config of `_MEASURED_SHORT`, where it is for the problem: of head dim 80 also with up to twice as many keys."""
    p, dims = problem, (rounded(problem.head_dim), rounded_values(problem.head_dim, problem.v_dim))
    if p.kv_tokens > _SHORT_KEYS * (1 + (dims[0] == 80)) or p.left is not None or p.segments or p.bias != "none":
        return None
    found = _MEASURED_SHORT.get(dims)
    if p.lengths and found is not None and dims == (PANEL, PANEL):
        return dataclasses.replace(found, tile_kv=128, memory_registers=48)
    return found


def _producer_registers(problem: Problem, warpgroups: int, tile_kv: int) -> int:
    """So many that the producer's addresses do not spill: of narrow panels, of windows of rows that end anywhere, of a bias.

    Two consumers have 232 registers each beside 40 and 240 beside 24; one has 240 beside any of these.
    """
    p, d = problem, rounded(problem.head_dim)
    if warpgroups == 1:
        return 72
    if p.bias == "float32":
        return 72 if warpgroups == 2 else 56  # its tiles' rows are two swizzle rows
    if d % PANEL:
        # Of a bias at 112 there is room for one stage: copies for each consumer.
        return 72 if p.bias != "none" and (warpgroups, tile_kv, d) == (2, 128, 112) else 48
    if warpgroups == 3:
        return 32
    if d == 256 and warpgroups == 2 and (p.lengths or p.segments or p.left is not None):
        return 32
    if d == 256 and warpgroups == 2 and p.bias == "bfloat16":
        return 24
    if p.segments and (p.lengths or p.left is not None) and d < 256:
        return 56
    if p.bias != "none" or (p.lengths and (p.sinks or p.soft_cap) and d < 256):
        return 48
    anywhere = p.lengths or p.segments or p.kv_tokens % tile_kv != 0 or p.left is not None
    return 40 if anywhere else 24


def _spills(problem: Problem, config: Config, gpu: Gpu) -> bool:
    """Whether its consumers would spill, by what was compiled: addresses and masks take 48 to 56 registers beside the tiles."""
    p, c = problem, config
    if c.tile_kv > 128 and rounded(p.head_dim) > PANEL and (c.tile_kv > 192 or p.segments or p.left is not None):
        return True
    if c.tile_kv > 128 and (p.lengths or p.bias != "none"):
        return True
    if c.compute_warpgroups == 3 and c.tile_kv > PANEL and p.bias != "none":
        return True
    if p.lengths and c.tile_kv > PANEL and rounded(p.head_dim) > PANEL * 2 and rounded_values(p.head_dim, p.v_dim) > PANEL * 2:
        return True
    wide_bias = p.bias == "float32"
    # Of 16 bits, what a tile of the bias takes is part of the rest, but beside a window.
    counts = wide_bias or (p.bias != "none" and c.compute_warpgroups < 3 and p.left is not None)
    tiles = c.tile_kv // 2 + rounded_values(p.head_dim, p.v_dim) // 2 + c.tile_kv // 4
    tiles += c.tile_kv * itemsize_of(p.bias) // 8 if counts else 0
    rest, measured = 48 if c.compute_warpgroups == 3 else 52, _measured(p, gpu)
    split = p.left is not None and not masks_all(p, c)
    shape = c.compute_warpgroups, c.tile_kv
    if measured is not None and not wide_bias and (measured.compute_warpgroups, measured.tile_kv) == shape:
        rest = 56 if split and c.compute_warpgroups == 2 else 24  # what it takes is known, but for a window
    elif split:
        rest = 56
    return tiles + rest > limits.consumer_registers(c.compute_warpgroups, c.memory_registers, gpu)


def default(problem: Problem, gpu: Gpu) -> Config:
    """The config that was measured to be the fastest for the head dim.

    Or the best candidate, where that one cannot run, has a warpgroup more than there are rows for, is modelled well behind, or
    the window is a small one.
    """
    best, *_ = ranked = candidates(problem, gpu)
    if best.kv_splits:
        return best
    measured = _measured(problem, gpu)
    if (
        measured is None
        or measured not in ranked
        or masks_all(problem, measured)
        or problem.q_tokens <= ROWS * (measured.compute_warpgroups - 1)
    ):
        return best
    if _measured_short(problem) is not None:  # `cost` knows too little of how tiles follow one another
        return measured if output_tiles(problem, measured) > gpu.sms else best
    margin = _MARGIN_FEW if output_tiles(problem, measured) <= _FEW_TILES * gpu.sms else _MARGIN_MANY
    return measured if cost(problem, measured, gpu) <= margin * cost(problem, best, gpu) else best


_EXPONENTIALS = 16  # a clock, of an SM (arXiv 2407.08608, section 3.1)
_LANES = 128  # float32 operations a clock, of an SM
_WIDENING_OPERATIONS = 1.2  # of a number of 8 bits that becomes one of 16: load, conversion, store
_SCORE_OPERATIONS = 5  # scale, maximum, sum, rounding: of the kernel with `kv_splits`


@dataclasses.dataclass(frozen=True)
class _Fitted:
    """Constants of `cost`, fitted to an H200: results/2026-11-23-h200-flash_attention-defaults.txt says to what. s: seconds."""

    operations: float = 2.35  # of a score: scale, maximum, sum, rounding
    mask_operations: float = 10.5  # more of one that is masked
    causal_operations: float = 2.8  # likewise, by a causal mask alone
    segment_operations: float = 10.6  # more of one with segments
    bias_operations: float = 17.5  # more of one with a bias
    exposed: tuple[float, float, float] = (0.5, 0.36, 0.33)  # of the shorter of products and softmax, by consumers
    step: float = 0.136e-6  # s of a step for each consumer: barriers, tensor cores that begin and end
    alone: float = 0.28e-6  # s more where nothing of it overlaps with the next one
    own_softmax: float = 0.7  # of its share of all consumers' softmax, that one consumer takes by itself
    tile: float = 1.5e-6  # s of an output tile beside its steps
    tile_ahead: float = 1.05e-6  # likewise, of few keys with three stages of queries, which load before the tile begins
    refill: float = 2.5e-6  # s more where the next queries cannot load before the output is stored
    uneven: float = 0.23  # of an average tile, that the last block ends later where tiles differ
    # Of results/2026-11-27-h100-flash_attention-defaults.jsonl:
    short_causal: float = 0.5  # times as long steps of 64 keys take, where a causal mask is of few keys
    not_dealt: float = 1.3  # of the time of blocks, where others' tiles are dealt (`deals_tiles`)
    launch: float = 3.35e-6  # s of a kernel: its start, the first loads and the last stores
    schedule: float = 0.1e-6  # s more where a block reads which tiles are its own


_FIT = _Fitted()
_SHORT = 256  # keys


def cost(problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled time in seconds: the steps of all visited kv blocks, shared out over the SMs; at least the time of HBM.

    A step takes the longest of four: products and softmax of all consumers, which overlap where there are several; those of
    one, one after the other; the loads of keys and values; and the latency of a load over the stages in flight. Steps with a
    mask overlap with nothing in their consumer, unless all are masked (`masks_all`): then each consumer has its own number.
    """
    p, c = problem, config
    raise_for(supports(p, gpu))
    if c.kv_splits:
        return _split_cost(p, c, gpu)
    typical, rows = reference.of_mean_length(p), ROWS * c.compute_warpgroups
    steps, unseen = (
        _segments_kv_blocks(typical, rows, c.tile_kv) if p.segments else (cached_kv_blocks(typical, rows, c.tile_kv), 0)
    )
    if masks_all(p, c):
        tiles = _own_kv_blocks(typical, c.compute_warpgroups, c.tile_kv) * _step(p, c, gpu, masked=True, alone=False)
    else:
        whole = cached_whole_kv_blocks(typical, rows, c.tile_kv) - unseen
        whole = np.clip(whole, 0, steps - 1)  # the first one overlaps with nothing
        masks = p.left is not None or p.right is not None
        tiles = whole * _step(p, c, gpu, masked=False, alone=False)
        tiles = tiles + (steps - whole) * _step(p, c, gpu, masked=masks, alone=masks)
    entries, start = typical.batch * p.q_heads, _FIT.launch
    several = len(tiles) * entries > gpu.sms  # for a block
    if c.tile_kv < 2 * ROWS and p.kv_tokens <= _SHORT and p.right is not None and p.left is None and not p.segments:
        tiles = tiles * _FIT.short_causal
    ahead = c.q_slots == 3 and p.kv_tokens <= _SHORT_KEYS
    tiles = tiles + (_FIT.tile_ahead if ahead else _FIT.tile) + _FIT.refill * (c.q_slots == 1 and several)
    work = shared_out(tiles, entries, gpu)
    every = output_tiles(p, c)
    unlike = p.segments or (p.lengths and p.batch > 1)
    if unlike and c.compute_warpgroups == 3 and gpu.sms < every <= DEALT * gpu.sms:
        work *= _FIT.not_dealt
    if several:
        start += _FIT.schedule
        work += _FIT.uneven * float(tiles.mean()) * bool(tiles.min() < tiles.max())
    return start + max(work, reference.bytes_moved(p) / hbm(gpu))


def _step(p: Problem, c: Config, gpu: Gpu, masked: bool, alone: bool) -> float:
    """Seconds of a step of the forward kernel."""
    consumers, d, v_d = c.compute_warpgroups, rounded(p.head_dim), rounded_values(p.head_dim, p.v_dim)
    rows = ROWS * consumers
    scores, bias = rows * c.tile_kv, p.bias != "none"
    causal = p.right is not None and p.left is None and not p.segments
    operations = _FIT.operations + _FIT.bias_operations * bias + _FIT.segment_operations * p.segments
    operations += (_FIT.causal_operations if causal else _FIT.mask_operations) * masked
    products = 2 * scores * (d + v_d) / rate(gpu)
    # A branch saves nothing where it spares few multiplications: results/2026-11-27-h100-flash_attention-rescale.jsonl.
    rescaled = 1.5 * rows * v_d if c.rescale == "always" or v_d <= 128 else 0.0
    softmax = (scores / _EXPONENTIALS + (operations * scores + rescaled) / _LANES) / gpu.clock_hz
    loaded = 2 * c.tile_kv * (d + v_d) + (scores * itemsize_of(p.bias) if bias else 0)
    return max(
        max(products, softmax) + _FIT.exposed[consumers - 1] * min(products, softmax),
        (_FIT.step + _FIT.alone * alone) * consumers + (products + _FIT.own_softmax * softmax) / consumers,
        loaded / load_rate(gpu),
        rates.LOAD_LATENCY / c.max_concurrent_steps,
    )


def typical_problem(problem: Problem) -> Problem:
    """A problem without lengths and segments that takes as long: of the mean length, and of each segment on its own."""
    p = reference.of_mean_length(problem)
    if not p.segments:
        return p
    q, kv = (math.ceil(n / reference.SEGMENTS) for n in (p.q_tokens, p.kv_tokens))
    return dataclasses.replace(p, batch=p.batch * reference.SEGMENTS, q_tokens=q, kv_tokens=kv, segments=False)


_IN_CLUSTERS = 120 / 132  # of the SMs hold clusters of 4 or 8 (results/2026-11-22-h200-resident-clusters.txt)
# Fitted to an H200 (results/2026-11-23-h200-flash_attention-decode-configs.jsonl).
_READING = 1.08  # times as fast as `hbm`, where nothing is written
_BLOCK = 0.5e-6  # s by which a block's start and end hold up its SM
_EXCHANGE = 0.4e-6  # s in which the blocks of a cluster add up their outputs
_ADDED_UP = 1.9e-6  # s of the kernel that adds up those of several clusters
_ADDED_UP_PART = 0.01e-6  # s more for each of them
_CROWDED = 1.14  # times as long a block takes, where there are fewer clusters of 4 or 8 than there is room for
_UNEVEN = 0.3  # times as much longer HBM takes as blocks are missing to give all SMs the same number of them
_ENOUGH, _DEEP = 80 * 1024, 0.01  # bytes on the way to an SM, and how much longer HBM takes with as many more
_WAITS = 0.32e-6  # s of a step in which a warpgroup waits: for barriers, and for the tensor cores to begin and end
_LEAST_IN_FLIGHT = 1.5  # steps: with two stages values are asked for a step ahead, keys two
_SHARED_LINES = 0.45  # of the lines' bytes that are of other heads, that memory is asked for
_TOGETHER = 0.5e-6  # s more of a block's start and end, where a tile has the keys of all heads
_MOST_TOGETHER = 88  # of `kv_splits` with such blocks: of three sequences
_UNEQUAL_TOGETHER = 0.03  # times longer such blocks take with lengths, as they are few
_PAGES = 0.3e-6  # s more of a step that starts copies of pages


def _split_candidates(problem: Problem, gpu: Gpu) -> list[Config]:
    """For each number of splits, cluster that any GPU has and number of blocks that share an SM, the deepest pipeline.

    Of three or four stages: deeper ones were never faster, and two hardly hide the latency of a load. But with lengths, where
    pairs of blocks share a head's keys, three blocks of two stages on an SM were faster than two of three. With keys of 8 bits
    two blocks with steps of 128 keys were fastest nearly everywhere.

    Heads that share lines of memory are loaded together too (`_together`).
    """
    found = _together(problem, gpu) if _lines_over_row(problem) > 1 else []
    for kv_splits, kv_cluster, tile_kv in itertools.product(_splits(problem, 1, gpu), KV_CLUSTERS, SPLIT_TILES_KV):
        if kv_splits % kv_cluster or kv_cluster > PORTABLE_CLUSTER:
            continue
        blocks = dict(ONE_WARPGROUP, tile_kv=tile_kv, kv_splits=kv_splits, kv_cluster=kv_cluster)
        pipelines = [Config(max_concurrent_steps=n, **blocks) for n in (4, 3, 2)]
        legal = [c for c in pipelines if check(problem, c, gpu) is None]
        in_pairs = problem.lengths and not problem.page_size and kv_splits == kv_cluster == 2
        least = 2 if in_pairs and rounded(problem.head_dim) == 2 * PANEL and tile_kv == 64 else 3
        least = 2 if problem.eight_bits and tile_kv == 128 else least
        for shared in (1, 2, 3):
            found += [c for c in legal if c.max_concurrent_steps >= least and blocks_of_an_sm(problem, c, gpu) >= shared][:1]
        found += legal[-1:] if len(legal) == 1 else []
    return sorted(dict.fromkeys(found), key=lambda c: (cost(problem, c, gpu), c.kv_splits))


def _together(problem: Problem, gpu: Gpu) -> list[Config]:
    """Of `_split_candidates`: with all heads' keys in a tile, and two blocks of two stages on each SM.

    The default, of these and of heads apart, takes 1.02 times as long as the fastest timed in the mean of 39 problems
    (results/2026-11-30-h200-flash_attention-decode-together.jsonl.gz). Of one or two sequences those timed were slower.
    """
    p, splits = problem, 2 * gpu.sms // problem.batch
    if splits > _MOST_TOGETHER or loads_heads_together(p):
        return []
    splits = max(1, min(math.ceil(p.kv_tokens * p.kv_heads / SPLIT_TILES_KV[-1]), splits))
    for tile_kv in reversed(SPLIT_TILES_KV):
        blocks = dict(ONE_WARPGROUP, tile_kv=tile_kv, max_concurrent_steps=2, kv_heads_per_tile=p.kv_heads)
        every = itertools.product(sorted({splits, splits // 2 * 2 or 1}), (1, 2))
        configs = [Config(kv_splits=kv_splits, kv_cluster=kv_cluster, **blocks) for kv_splits, kv_cluster in every]
        if found := [c for c in configs if check(p, c, gpu) is None and blocks_of_an_sm(p, c, gpu) > 1]:
            return found
    return []


def _split_cost(p: Problem, c: Config, gpu: Gpu) -> float:
    """Modelled time of the kernel with `kv_splits`: waves of blocks, one after the other, each takes at least HBM's time.

    With lengths it is the mean of two: all are full, or they are of any size, and the block of the longest one ends last.
    """
    heads, clusters, parts = c.kv_heads_per_tile, c.kv_cluster > 2, c.kv_splits // c.kv_cluster
    rows = p.q_tokens * (p.q_heads // p.kv_heads) * heads
    blocks = p.batch * (p.kv_heads // heads) * math.ceil(rows / ROWS) * c.kv_splits
    sms = gpu.sms * (_IN_CLUSTERS if clusters else 1.0)
    at_once = int(sms * min(4, blocks_of_an_sm(p, c, gpu)))
    steps = int(cached_kv_blocks(p, p.q_tokens, c.tile_tokens).max())
    longest_share = math.ceil(steps / c.kv_splits) * c.kv_splits / steps  # over the mean one
    read = reference.bytes_moved(dataclasses.replace(p, lengths=False)) * longest_share
    of_hbm = read / (_READING * hbm(gpu)) / blocks  # s of a block
    ends = _BLOCK + _EXCHANGE * (c.kv_cluster > 1) + _TOGETHER * (heads > 1)
    work = ends / 2
    for waves, wave in ((blocks // at_once, at_once), (1, blocks % at_once)):
        if waves and wave:
            shared = math.ceil(wave / sms)  # blocks of an SM at a time
            through_hbm = of_hbm * wave * (1 + _UNEVEN * (1 - wave / (shared * sms)))
            in_flight = shared * sum(split_stages(c)) * p.kv_itemsize * c.tile_kv * rounded(p.head_dim)
            through_hbm *= 1 + _DEEP * max(0.0, in_flight / _ENOUGH - 1)
            crowded = _CROWDED if clusters and wave < at_once else 1.0
            steps_of_wave = max(_split_block(p, c, shared, gpu) * crowded, through_hbm)
            work += waves * (steps_of_wave + ends / min(2, shared))  # another block of the SM works on meanwhile
    if p.lengths:
        alone = _split_block(p, c, 1, gpu)
        work = (work + max(alone, work / 2 + alone / 2 * (blocks > at_once))) / 2
    work *= 1 + (_SHARED_LINES * (_lines_over_row(p) - 1) if heads == 1 else _UNEQUAL_TOGETHER * p.lengths)
    if parts > 1:
        written = 4 * parts * p.batch * p.q_tokens * p.q_heads * rounded(p.head_dim)
        work += _ADDED_UP + _ADDED_UP_PART * parts + 3 * written / hbm(gpu)
    return rates.LAUNCH + work


@functools.lru_cache(4096)
def _lines_over_row(p: Problem) -> float:
    """Bytes of the memory's lines in which a head's row of keys lies, over the row's, in the mean of all heads.

    1 where rows of one head follow each other, and for keys of 8 bits, to whose times the model was not fitted so.
    """
    if p.kv_heads == 1 or p.eight_bits:
        return 1.0
    row = rounded(p.head_dim) * p.kv_itemsize
    lines = [math.ceil((head + 1) * row / LINE) - head * row // LINE for head in range(p.kv_heads)]
    return sum(lines) * LINE / (p.kv_heads * row)


def _split_block(p: Problem, c: Config, shared: int, gpu: Gpu) -> float:
    """Seconds of the steps of a block on an SM that it shares with others, where HBM is no bound.

    A step takes the longest of: its products and its softmax, which overlap with nothing in the block; its share of what its SM
    loads; and the latency of a load over the bytes in flight.
    """
    d = rounded(p.head_dim)
    steps = math.ceil(int(cached_kv_blocks(p, p.q_tokens, c.tile_tokens).max()) / c.kv_splits)
    scores, loaded = ROWS * c.tile_kv, 2 * p.kv_itemsize * c.tile_kv * d
    compute = 4 * scores * d / rate(gpu)
    widened = 0 if not p.eight_bits else 2 * c.tile_kv * d
    operations = _SCORE_OPERATIONS * scores + 1.5 * ROWS * d + _WIDENING_OPERATIONS * widened
    compute += (scores / _EXPONENTIALS + operations / _LANES) / gpu.clock_hz
    waits = _WAITS + _PAGES * (p.page_size > 0)
    in_flight = max((sum(split_stages(c)) - 1) / 2, _LEAST_IN_FLIGHT)  # steps
    return steps * max(compute + waits, shared * compute, shared * loaded / load_rate(gpu), rates.LOAD_LATENCY / in_flight)


def distance(x: Problem, y: Problem) -> float | None:
    """How far `x` is from `y`, to reuse a config: |log2| ratios of sizes and windows, and a little for each other difference.

    None where a config cannot be reused: the head dims that the kernels compute with differ, one alone has a bias or
    pages or keys of 8 bits, or gradients differ in `deterministic` or `bias_grad`.
    """
    sizes = [size for p in (x, y) for size in (p.batch, p.q_tokens, p.kv_tokens, p.q_heads)]
    if min(sizes) < 1 or max(x.head_dim, y.head_dim) > HEAD_DIMS[-1]:
        return None
    kinds = [(*_head_dims(p), p.bias != "none", p.page_size > 0, p.kv_dtype, _gradient_kind(p)) for p in (x, y)]
    if kinds[0] != kinds[1]:
        return None
    sides = ((x.batch * x.q_heads, y.batch * y.q_heads), (x.q_tokens, y.q_tokens), (x.kv_tokens, y.kv_tokens))
    near = sum(abs(math.log2(u / v)) for u, v in sides)
    near += 0.5 * abs(math.log2(_reach(x) / _reach(y))) + 0.5 * ((x.right is None) != (y.right is None))
    near += 0.05 * sum(getattr(x, f.name) != getattr(y, f.name) for f in dataclasses.fields(x))
    return near if near <= 6.0 else None


def _head_dims(p: Problem) -> tuple[int, int]:
    """Of queries and values, that the kernel computes with."""
    if isinstance(p, BackwardProblem):
        return (backward_dim(p.head_dim),) * 2
    return rounded(p.head_dim), rounded_values(p.head_dim, p.v_dim)


def _reach(p: Problem) -> int:
    """How many keys up to its own a row sees at most."""
    return p.kv_tokens if p.left is None else min(p.kv_tokens, p.left + 1)


def _gradient_kind(p: Problem) -> tuple[bool, bool] | None:
    return (p.deterministic, p.bias_grad) if isinstance(p, BackwardProblem) else None


# --- What both share ------------------------------------------------------------------------------------------------


def raise_for(reason: str | None) -> None:
    """Raises ValueError where `supports` has a reason: to count the blocks of sizes that no kernel takes could take hours."""
    if reason is not None:
        raise ValueError(reason)


def rate(gpu: Gpu) -> float:
    """FLOP/s of one SM."""
    return gpu.bf16_flops * rates.POWER / gpu.sms


def load_rate(gpu: Gpu) -> float:
    """Bytes per second from L2 into one SM."""
    return rates.LOAD_BYTES_PER_CLOCK * gpu.clock_hz


def hbm(gpu: Gpu) -> float:
    return gpu.memory_bytes_per_s * rates.HBM


def shared_out(tiles: np.ndarray, entries: int, gpu: Gpu) -> float:
    """Seconds until the SMs are through with tiles of these seconds, each `entries` times.

    Unequal ones are assigned so that all SMs end at about the same time, equal ones go in waves.
    """
    longest, total = float(tiles.max()), float(tiles.sum()) * entries
    if tiles.min() == longest:
        return math.ceil(len(tiles) * entries / gpu.sms) * longest
    return max(longest, total / gpu.sms)


# Cached, as the tuner models thousands of configs. The arrays are shared: do not write to them.
cached_kv_blocks = functools.lru_cache(4096)(kv_blocks)
cached_whole_kv_blocks = functools.lru_cache(4096)(whole_kv_blocks)
cached_q_blocks = functools.lru_cache(4096)(q_blocks)


@functools.lru_cache(4096)
def _segments_kv_blocks(problem: Problem, tile_q: int, tile_kv: int) -> tuple[np.ndarray, np.ndarray]:
    """How many kv blocks each q block visits with the segments of `inputs`, and how many before them it would without."""
    p, count = problem, reference.SEGMENTS
    rows = np.arange(0, p.q_tokens, tile_q)
    low, high = (x * count // p.q_tokens for x in (rows, np.minimum(rows + tile_q, p.q_tokens) - 1))
    first, end = keys_seen(p, tile_q)
    before = np.maximum(0, -(-low * p.kv_tokens // count) - first) // tile_kv
    first, end = np.maximum(first, -(-low * p.kv_tokens // count)), np.minimum(end, -(-(high + 1) * p.kv_tokens // count))
    return np.maximum(1, -(-end // tile_kv) - first // tile_kv), before


@functools.lru_cache(4096)
def _own_kv_blocks(problem: Problem, consumers: int, tile_kv: int) -> np.ndarray:
    """How many kv blocks the consumer of each output tile visits that visits most of them."""
    own = kv_blocks(problem, ROWS, tile_kv)
    own = np.pad(own, (0, -len(own) % consumers))
    most: np.ndarray = own.reshape(-1, consumers).max(1)
    return most
