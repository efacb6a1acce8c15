"""flash_attention with few query tokens: heads packed into the rows of a tile, keys split over thread blocks (`kv_splits`)."""

from __future__ import annotations

import functools
import gzip
import json
import math
import pathlib
import re
import statistics
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import flash_attention, spec_of
from mgpu_ops.attention import decode_sum
from mgpu_ops.attention.problem import MAX_SPLITS, ONE_WARPGROUP
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import database
from tests import thorough
from tests.mgpu_ops.attention import cases, compiled
from tests.mgpu_ops.attention.cases import BASE, FUSED_64, Shape
from tests.mgpu_ops.attention.compiled import needs_compiler
from tests.mgpu_ops.attention.test_flash_attention_interpret import assert_forward, changed
from tests.mgpu_ops.interpreter import quiet_interpreter

FORWARD, H200 = spec_of("flash_attention"), gpu.find("h200")
P = FORWARD.Problem
ONE = FORWARD.Config(tile_kv=64, max_concurrent_steps=3, kv_splits=1, **ONE_WARPGROUP)
SPLIT = {n: replace(ONE, kv_splits=n, kv_cluster=min(n, 8)) for n in (1, 2, 4, 8, 16)}

TOGETHER = {
    n: replace(ONE, tile_kv=128, max_concurrent_steps=2, kv_splits=16, kv_cluster=2, kv_heads_per_tile=n) for n in (8, 32)
}

RESULTS = pathlib.Path(__file__).parents[3] / "results/2026-11-23-h200-flash_attention-decode-configs.jsonl"
TOGETHER_RESULTS = RESULTS.with_name("2026-11-30-h200-flash_attention-decode-together.jsonl.gz")

# --- interpreted

CASES: dict[str, tuple[Any, Any]] = {
    "one block, grouped heads, a pipeline that wraps, float16": (P(2, 1, 330, 4, 2, 64, "float16"), ONE),
    "two clusters, fewer kv blocks than thread blocks, two tiles, causal, window, soft cap, sinks": (
        P(1, 3, 180, 23, 1, 64, causal=True, window_left=100, soft_cap=True, sinks=True),
        replace(SPLIT[4], kv_cluster=2, max_concurrent_steps=2),
    ),
    "clusters of eight, fewer kv blocks than thread blocks": (
        P(1, 3, 300, 23, 1, 64, causal=True, window_left=150, soft_cap=True, sinks=True),
        replace(SPLIT[16], max_concurrent_steps=2),
    ),
    "a cluster, head_dim padded": (P(1, 1, 700, 3, 1, 72, causal=True), replace(SPLIT[2], max_concurrent_steps=2)),
    "head_dim of 96 in panels of two widths, a cluster of eight of which six have columns": (
        P(1, 1, 700, 6, 3, 96),
        replace(SPLIT[8], max_concurrent_steps=2),
    ),
    "head_dim of 80, lengths, clusters that another kernel adds up": (
        P(2, 2, 330, 6, 3, 80, causal=True, lengths=True, sinks=True),
        replace(SPLIT[4], kv_cluster=2),
    ),
    "head_dim of 112, one block, tiles that divide the keys": (P(2, 1, 256, 3, 3, 112, "float16"), ONE),
    "head_dim of 160, window, a cluster of two": (P(1, 3, 300, 4, 2, 160, causal=True, window_left=150), SPLIT[2]),
    "values of 128 beside keys of 192": (P(1, 2, 300, 4, 1, 192, v_head_dim=128, lengths=True), SPLIT[4]),
    "head_dim of 224, no cluster": (P(1, 1, 200, 2, 1, 224), replace(ONE, kv_splits=2, max_concurrent_steps=2)),
    "lengths, causal, tiles of 128 keys": (
        P(3, 2, 300, 2, 1, 64, causal=True, lengths=True),
        replace(SPLIT[4], tile_kv=128, max_concurrent_steps=2),
    ),
    "no cluster, columns of a row added up by several blocks": (P(1, 1, 130, 2, 1, 256), replace(ONE, kv_splits=2)),
    "no cluster, all added up by XLA": (P(1, 1, 300, 2, 1, 64), replace(ONE, kv_splits=4)),
    "a number of splits that is no power of two": (P(1, 2, 450, 2, 1, 64, causal=True), replace(ONE, kv_splits=3)),
    "head_dim of 256": (P(1, 1, 130, 2, 1, 256), replace(SPLIT[2], max_concurrent_steps=2)),
    "sinks, grouped heads, rows that see nothing": (P(1, 3, 130, 4, 2, 64, lengths=True, causal=True, sinks=True), SPLIT[2]),
    "fewer keys than query tokens, so that the first see none": (P(1, 9, 5, 2, 2, 64, causal=True), SPLIT[2]),
    "heads of keys together, sinks, lengths, causal": (
        P(3, 2, 90, 8, 4, 64, causal=True, lengths=True, sinks=True),
        replace(SPLIT[2], kv_heads_per_tile=4),
    ),
    "heads of keys together, a window, a soft cap, two clusters, fewer kv blocks than thread blocks": (
        P(1, 3, 45, 16, 16, 64, "float16", causal=True, window_left=30, soft_cap=True),
        replace(SPLIT[16], max_concurrent_steps=2, kv_heads_per_tile=16),
    ),
    "heads of keys together, head_dim of 80, whole tiles": (P(2, 1, 96, 6, 2, 80), replace(ONE, kv_heads_per_tile=2)),
    "a bias, grouped heads, lengths": (P(2, 1, 330, 4, 2, 64, bias="bfloat16", lengths=True), SPLIT[2]),
    "a bias of 32 bits in odd rows, soft cap, causal, two tiles, two clusters": (
        P(1, 3, 181, 23, 1, 64, causal=True, soft_cap=True, bias="float32"),
        replace(SPLIT[4], kv_cluster=2, max_concurrent_steps=2),
    ),
    "a bias of 16 bits in odd rows before the soft cap, sinks, head_dim of 96": (
        P(2, 2, 131, 4, 2, 96, "float16", soft_cap=True, soft_cap_after_bias=True, bias="float16", sinks=True),
        replace(SPLIT[2], tile_kv=128, max_concurrent_steps=2),
    ),
}
IN_ALL = [
    "clusters of eight, fewer kv blocks than thread blocks",
    "one block, grouped heads, a pipeline that wraps, float16",
    "lengths, causal, tiles of 128 keys",
    "a cluster, head_dim padded",
    "no cluster, all added up by XLA",
    "a number of splits that is no power of two",
    "head_dim of 256",
    "head_dim of 96 in panels of two widths, a cluster of eight of which six have columns",
    "head_dim of 80, lengths, clusters that another kernel adds up",
    "values of 128 beside keys of 192",
    "fewer keys than query tokens, so that the first see none",
    "a bias, grouped heads, lengths",
    "a bias of 32 bits in odd rows, soft cap, causal, two tiles, two clusters",
    "a bias of 16 bits in odd rows before the soft cap, sinks, head_dim of 96",
]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_split_keys_are_right_and_have_no_race(name, assert_near):
    assert_forward(*CASES[name], assert_near)


@pytest.mark.parametrize("shape", [(2, 1, 1, 200), (1, 4, 3, 200)], ids=["of entries", "of heads and query tokens"])
def test_mask_hides_keys_of_entries_or_heads(shape, assert_near):
    """Also all keys of some rows, which then give zeros; what hidden keys hold has no say."""
    mask = np.random.default_rng(0).random(shape) < 0.5
    mask[..., 0, 64:128] = False
    mask[0, -1] = False
    mask[..., 10:14] = False
    q, k, v = cases.qkv(Shape(2, 3, 200, 4, 2, 64), "bfloat16")
    dirty = [x.at[:, 10:14].set(jnp.nan) for x in (k, v)]
    with quiet_interpreter():
        out = flash_attention(q, *dirty, mask=mask, backend="interpret", config=SPLIT[2])
    assert not engine.races_found()
    assert_near(out, cases.truth(q, k, v, mask=mask)["out"], 1.5e-2)


@pytest.mark.parametrize("heads", [1, 2])
def test_entries_without_keys_and_nan_in_padding(heads, assert_near):
    problem = P(3, 1, 200, 4, 2, 64, lengths=True)
    arrays = changed(problem, lengths=(jnp.asarray([1, 1, 0], jnp.int32), jnp.asarray([0, 70, 200], jnp.int32)))
    dirty = functools.partial(nan_in_padding, lengths=(0, 70, 200))
    assert_forward(problem, replace(SPLIT[2], kv_heads_per_tile=heads), assert_near, arrays, padding=dirty)


@pytest.mark.parametrize("head_dim", [32, 60, 64, 120, 128, 256])
def test_heads_whose_rows_are_whole_lines_are_loaded_apart(head_dim):
    """As they are loaded: 60 in 64 columns."""
    for lengths in (False, True):
        assert FORWARD.default(P(16, 1, 4096, 32, 32, head_dim, lengths=lengths), H200).kv_heads_per_tile == 1


def nan_in_padding(arrays: tuple[Any, ...], lengths: tuple[int, ...]) -> tuple[Any, ...]:
    q, *kv = arrays
    padding = np.arange(kv[0].shape[1]) >= np.asarray(lengths)[:, None]
    return q.at[2].set(jnp.nan), *(jnp.where(padding[..., None, None], jnp.nan, x).astype(x.dtype) for x in kv)


@pytest.mark.parametrize("sinks", [False, True])
def test_outputs_of_parts_are_weighted_by_their_sums_of_exponentials(sinks, assert_near):
    problem = P(1, 3, 300, 5, 1, 64, "float16", sinks=sinks)  # 15 rows of half a thread block
    outs, lses = cases.normal(0, 3, 1, 3, 5, 64), 3 * cases.normal(1, 3, 1, 5, 3)
    lses = lses.at[1].set(-jnp.inf).at[:, 0, 4, 2].set(-jnp.inf)  # a part without keys, and a row
    outs = jnp.where(jnp.isinf(lses).swapaxes(2, 3)[..., None], 0.0, outs)
    sink = cases.normal(2, 5) if sinks else None
    flat = jnp.pad(outs.reshape(-1), (0, 128), constant_values=jnp.nan)
    with quiet_interpreter():
        out, lse = decode_sum.add_up(problem, 3, flat, lses.reshape(-1), sink, interpret=True)
    weights = np.exp2(np.float64(lses)).swapaxes(2, 3)  # [parts, batch, q_tokens, q_heads]
    total = weights.sum(0)
    sums = np.where(total == 0, 0, total + (np.exp(np.float64(sink)) if sinks else 0))
    wanted = (weights[..., None] * np.float64(outs)).sum(0) / np.where(sums == 0, 1, sums)[..., None]
    assert_near(out[: 15 * 64].reshape(wanted.shape), wanted, 2e-3)
    with np.errstate(divide="ignore"):
        logs = np.where(sums == 0, np.inf, np.log(sums)).swapaxes(1, 2)
    np.testing.assert_allclose(lse.reshape(logs.shape), logs, rtol=1e-5, atol=1e-5)


@thorough.only_in_all
def test_gradient_through_split_keys(assert_near):
    arrays = cases.qkv(Shape(1, 2, 150, 4, 2, 64), "bfloat16")
    f = functools.partial(
        flash_attention, causal=True, backend="interpret", config=SPLIT[2], backward_config=FUSED_64, return_lse=True
    )
    with quiet_interpreter():
        (out, lse), pull = jax.vjp(f, *arrays)
        out_grad, lse_grad = cases.normal(7, *out.shape, dtype=out.dtype), cases.normal(8, *lse.shape, dtype=lse.dtype)
        gradients = pull((out_grad, lse_grad))
    assert not engine.races_found()
    wanted = cases.truth(*arrays, causal=True, out_grad=out_grad, lse_grad=lse_grad)
    for found, name in zip((out, *gradients), ["out", "q", "k", "v"]):
        assert_near(found, wanted[name], 3e-2)


# --- compiled for a GPU

COMPILED: dict[str, tuple[Any, Any]] = {
    "head_dim of 64": (P(4, 1, 8192, 12, 12, 64), replace(SPLIT[8], max_concurrent_steps=6)),
    "head_dim of 128, lengths, window, query tokens, sinks": (
        P(4, 5, 8191, 56, 8, 128, causal=True, lengths=True, window_left=4095, sinks=True),
        SPLIT[16],
    ),
    "a cluster of 16": (P(1, 1, 65536, 32, 8, 128), replace(SPLIT[16], kv_cluster=16)),
    "head_dim of 80, lengths, a cluster of eight of which five have columns": (
        P(4, 1, 8192, 32, 32, 80, lengths=True),
        SPLIT[8],
    ),
    "head_dim of 96, query tokens": (P(4, 3, 8192, 32, 8, 96, causal=True), SPLIT[4]),
    "head_dim of 112, soft cap, a last tile of keys that is not whole": (P(4, 1, 8191, 16, 8, 112, soft_cap=True), SPLIT[2]),
    "head_dim of 160, lengths": (P(4, 1, 8192, 32, 8, 160, lengths=True), SPLIT[4]),
    "values of 128 beside keys of 192": (P(4, 1, 8192, 16, 16, 192, v_head_dim=128, lengths=True), SPLIT[8]),
    "a bias, lengths": (P(4, 1, 8192, 32, 8, 128, bias="bfloat16", lengths=True), SPLIT[4]),
    "a bias of 32 bits in odd rows, query tokens": (P(4, 4, 8191, 32, 8, 128, bias="float32", causal=True), SPLIT[2]),
    "heads of keys together, head_dim of 80, lengths": (P(16, 1, 4096, 32, 32, 80, lengths=True), TOGETHER[32]),
    "heads of keys together, head_dim of 160, sinks, a last tile that is not whole": (
        P(16, 1, 4093, 40, 8, 160, sinks=True),
        replace(TOGETHER[8], tile_kv=64),
    ),
    "heads of keys together, head_dim of 128, window, query tokens": (
        P(16, 2, 4096, 32, 8, 128, causal=True, lengths=True, window_left=1000),
        TOGETHER[8],
    ),
    "head_dim of 256, soft cap, query tokens": (P(4, 4, 8192, 16, 8, 256, soft_cap=True, lengths=True), SPLIT[2]),
}


@needs_compiler
@pytest.mark.parametrize(
    "name",
    thorough.cases(
        COMPILED,
        [
            "head_dim of 64",
            "a cluster of 16",
            "head_dim of 80, lengths, a cluster of eight of which five have columns",
            "head_dim of 112, soft cap, a last tile of keys that is not whole",
            "values of 128 beside keys of 192",
            "a bias, lengths",
            "heads of keys together, head_dim of 80, lengths",
            "head_dim of 256, soft cap, query tokens",
        ],
    ),
)
def test_split_keys_compile_without_spills_and_meet_once_in_a_cluster(name):
    report = compiled.without_spills(*COMPILED[name])
    assert "HGMMA" in report.sass
    # Outputs go to the other blocks' shared memory, without a fence for each: the blocks wait once, beside Mosaic's own time.
    assert "STAS" in report.sass
    assert len(re.findall("UCGABAR_WAIT", report.sass)) == 2
    fences = re.findall(r"MEMBAR\.[.A-Z]+", report.sass)
    assert set(fences) <= ({"MEMBAR.ALL.CTA"} if COMPILED[name][0].bias != "none" else set())  # zeros over what a mask hides


@needs_compiler
@pytest.mark.parametrize("head_dim", [80, 96, 112, 160, 192])
def test_keys_and_values_are_read_where_they_lie(head_dim):
    """Not from padded copies, which would take more bytes than the kernel reads."""
    problem = P(4, 1, 8192, 8, 8, head_dim, lengths=True)
    program = aot.program(H200, functools.partial(FORWARD.run, problem, FORWARD.default(problem, H200), H200), *shapes(problem))
    cache = 2 * 4 * 8192 * 8 * head_dim * 2
    assert program.argument_bytes >= cache
    assert program.temporary_bytes < cache / 100


@needs_compiler
def test_a_mask_costs_no_copy_of_keys_and_values():
    q, cache = jax.ShapeDtypeStruct((4, 1, 8, 128), "bfloat16"), jax.ShapeDtypeStruct((4, 8192, 8, 128), "bfloat16")
    mask = jax.ShapeDtypeStruct((4, 1, 1, 8192), "bool")
    program = aot.program(
        H200, lambda q, k, v, mask: flash_attention(q, k, v, mask=mask, backend="mosaic"), q, cache, cache, mask
    )
    assert program.launches >= 1
    assert program.temporary_bytes < 2 * 4 * 8192 * 8 * 128 * 2 / 50


def shapes(problem: Any) -> Any:
    return jax.eval_shape(functools.partial(FORWARD.inputs, problem), jax.random.key(0))


@needs_compiler
@pytest.mark.parametrize(("window_left", "first"), [(-1, "UTMALDG"), (99, "LDG")])
def test_the_first_keys_are_asked_for_before_the_lengths_unless_these_say_which_they_are(window_left, first):
    problem = P(4, 1, 4096, 8, 2, 64, lengths=True, window_left=window_left)
    arrays = jax.eval_shape(functools.partial(FORWARD.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(FORWARD.run, problem, SPLIT[2], H200), *arrays)
    assert re.findall(r"\b(UTMALDG|LDG)\b", report.sass)[0] == first


@needs_compiler
def test_as_many_parts_as_a_config_may_have_are_added_up():
    """By a kernel of a term for each, which Mosaic's recursive search for layouts has to get through."""
    problem, parts = P(1, 1, 65536, 1, 1, 64), MAX_SPLITS
    arrays = jax.ShapeDtypeStruct((parts * 64 + 128,), jnp.float32), jax.ShapeDtypeStruct((parts,), jnp.float32)
    context, place = aot.elsewhere(H200)
    with context:
        jax.jit(lambda outs, lses: decode_sum.add_up(problem, parts, outs, lses, None, False)).lower(*place(arrays))


# --- which problems it is for


@pytest.mark.parametrize("name", FORWARD.shapes)
def test_keys_are_split_by_default_for_few_query_tokens_alone(name):
    problem = FORWARD.shapes[name]
    decoding = "-decode-" in name or "-verify-" in name
    assert (FORWARD.default(problem, H200).kv_splits > 0) == (problem.q_tokens <= 16) == decoding


def config_of(label: str) -> Any:
    """Of a label in results/: heads are apart where it has no fifth number."""
    names = ("tile_kv", "max_concurrent_steps", "kv_splits", "kv_cluster", "kv_heads_per_tile")
    return replace(ONE, **dict(zip(names, map(int, label.split("/")))))


def test_the_model_ranks_first_what_was_measured_to_be_fast():
    """In results/: configs of 24 problems, measured in turn on an H200."""
    for line in RESULTS.read_text().splitlines():
        measured = json.loads(line)
        problem, times = P(**measured["problem"]), measured["us"]
        first = min(times, key=lambda label: FORWARD.cost(problem, config_of(label), H200))
        assert times[first] < 1.05 * min(times.values())


def test_heads_that_share_lines_of_memory_are_loaded_together_where_that_was_measured_to_be_faster():
    """In results/: configs of 98 problems, of which half have such heads. Three are out, whose default was not timed.

    Where head dim 112, grouped heads and drawn lengths meet, it is slower than heads apart.
    """
    slower, faster = [], []
    lines = gzip.decompress(TOGETHER_RESULTS.read_bytes()).decode().splitlines()
    for line in lines[1:]:
        measured = json.loads(line)
        problem, times = P(**measured["problem"]), {config_of(label): us for label, us in measured["us"].items()}
        if problem.head_dim not in (80, 96, 112, 160) or problem.batch < 3:
            assert FORWARD.default(problem, H200).kv_heads_per_tile == 1
            continue
        candidates = [config for config in FORWARD.candidates(problem, H200) if config in times]
        if len({config.kv_heads_per_tile for config in candidates}) == 2:
            apart = next(config for config in candidates if config.kv_heads_per_tile == 1)
            slower.append(times[candidates[0]] / min(times.values()))
            faster.append(times[apart] / times[candidates[0]])
    assert len(slower) == 39
    assert min(faster) > 0.94
    assert statistics.geometric_mean(slower) < 1.03
    assert statistics.geometric_mean(faster) > 1.04


@pytest.mark.parametrize(("batch", "kv_heads"), [(1, 8), (1, 1), (3, 8), (5, 4)])
def test_few_heads_and_many_keys_fill_the_gpu(batch, kv_heads):
    problem = P(batch, 1, 131072, 4 * kv_heads, kv_heads, 128)
    config = FORWARD.default(problem, H200)
    waves = batch * kv_heads * config.kv_splits / H200.sms
    assert waves / math.ceil(waves) >= 0.9


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (P(1, 1, 100, 1, 1, 64, segments=True), {}, "takes no segments: use kv_splits=0"),
        (
            P(2**12, 1, 2**15, 32, 1, 64, bias="bfloat16"),
            {},
            "kv_splits counts the elements of a bias in 32 bits, and 4294967296 are too many: use kv_splits=0",
        ),
        (P(1, 65, 100, 4, 1, 64), {}, "256 query tokens times query heads of a head of keys, not 260"),
        (P(1, 1, 100, 1, 1, 64), {"kv_splits": 257}, "kv_splits=257 must be from 0 to 256"),
        (P(1, 1, 100, 1, 1, 64), {"kv_cluster": 2}, "kv_cluster=2 must be 1, 2, 4, 8 or 16 and divide kv_splits=1"),
        (P(1, 1, 100, 1, 1, 64), {"kv_splits": 0, "kv_cluster": 2}, "kv_cluster=2 must be 1 with kv_splits=0"),
        (
            P(1, 1, 100, 4, 2, 64),
            {"kv_splits": 0, "kv_heads_per_tile": 2},
            "kv_heads_per_tile=2 must be 1 with kv_splits=0",
        ),
        (P(1, 1, 100, 8, 4, 64), {"kv_heads_per_tile": 2}, "kv_heads_per_tile=2 must be 1 or kv_heads=4"),
        (
            P(1, 1, 100, 12, 12, 64),
            {"kv_heads_per_tile": 12},
            "kv_heads_per_tile=12: kv_heads=12 is no power of two from 2 to 64; use 1",
        ),
        (
            P(1, 5, 100, 16, 4, 64),
            {"kv_heads_per_tile": 4},
            "kv_heads_per_tile=4: query tokens times query heads are 80, of 64 at most; use 1",
        ),
        (
            P(1, 1, 100, 8, 4, 64, bias="float32"),
            {"kv_heads_per_tile": 4},
            "kv_heads_per_tile=4: there is a bias, pages or keys of 8 bits; use 1",
        ),
        (
            P(2**10, 1, 2**15, 32, 32, 64),
            {"kv_heads_per_tile": 32},
            "tokens times heads of keys are 1073741824, of 268435200 at most; use 1",
        ),
        (P(1, 1, 100, 1, 1, 64), {"kv_splits": 16, "kv_cluster": 16}, "fewer than 8 columns of head_dim=64"),
        (
            P(1, 1, 100, 1, 1, 128),
            {"kv_splits": 16, "kv_cluster": 16, "max_concurrent_steps": 7},
            "kv_cluster=16 needs blocks of which an SM holds two",
        ),
        (P(2**14, 4, 100, 64, 1, 128), {"kv_splits": 256}, "makes outputs of more elements than are counted in 32 bits"),
        (P(1, 1, 100, 1, 1, 64), {"tile_kv": 192}, "tile_kv=192 must be 64 or 128"),
        (P(1, 1, 100, 1, 1, 64), {"compute_warpgroups": 2}, "compute_warpgroups=2 must be 1 with kv_splits=1"),
        (P(1, 1, 100, 1, 1, 256), {"tile_kv": 128}, "leaves no registers"),
        (P(1, 1, 100, 1, 1, 256), {"max_concurrent_steps": 4}, "bytes of shared memory exceed"),
    ],
)
def test_what_cannot_be_split_says_why(problem, changes, reason):
    assert reason in FORWARD.check(problem, replace(ONE, **changes), H200)


def test_segments_and_many_rows_run_without_splits():
    for problem in (P(1, 1, 9, 1, 1, 64, segments=True), P(1, 16, 9, 64, 1, 64)):
        assert FORWARD.default(problem, H200).kv_splits == 0


def test_an_entry_of_before_there_were_splits_means_none():
    fields = {name: value for name, value in vars(BASE).items() if name not in ("kv_splits", "kv_cluster", "kv_heads_per_tile")}
    assert database.to_config(FORWARD, fields) == BASE
    with pytest.raises(ValueError, match=r"lacks \['pv_wait'\]"):
        database.to_config(FORWARD, {name: value for name, value in fields.items() if name != "pv_wait"})
