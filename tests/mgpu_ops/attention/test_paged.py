"""flash_attention with a page_table: keys and values in pages, with lengths of their own for each entry."""

from __future__ import annotations

import dataclasses
import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import flash_attention, spec_of
from mgpu_ops.attention import decode
from mgpu_ops.attention.mask import MaskTerms
from mgpu_ops.attention.problem import MAX_ROWS, ONE_WARPGROUP, PAGE_SIZES, page_indices
from mgpu_ops.attention.reference import of_mean_length
from mgpu_ops.core import engine, gpu
from mgpu_ops.registry import resolution
from mgpu_ops.tuning import labels
from tests import thorough
from tests.mgpu_ops.attention import cases, compiled, paged
from tests.mgpu_ops.attention.compiled import needs_compiler
from tests.mgpu_ops.attention.paged import Pages
from tests.mgpu_ops.interpreter import quiet_interpreter

FORWARD, H200 = spec_of("flash_attention"), gpu.find("h200")
P = FORWARD.Problem
BASE = P(2, 1, 768, 8, 2, 64, page_size=64)
ONE = FORWARD.Config(tile_kv=64, max_concurrent_steps=2, kv_splits=1, **ONE_WARPGROUP)
WIDE = replace(ONE, tile_kv=128)


def assert_true(drawn: Pages, assert_near: Any, tolerance: float, **options: Any) -> None:
    out, lse = flash_attention(*drawn.arrays, page_table=drawn.table, return_lse=True, **drawn.options, **options)
    wanted = cases.truth(drawn.q, *drawn.gathered(), **drawn.options)
    assert out.dtype == drawn.q.dtype
    assert_near(out, wanted["out"], tolerance)
    np.testing.assert_allclose(np.asarray(lse), wanted["lse"], rtol=1e-4, atol=1e-4)


# --- interpreted

INTERPRETED: dict[str, tuple[dict[str, Any], Any]] = {
    "several pages a tile, a pipeline that wraps, an entry without keys": (
        {"page_size": 16, "lengths": (200, 0, 37), "pages_each": 15},
        ONE,
    ),
    "a cluster, tiles of 128, query tokens, window, sinks, soft cap": (
        {
            "page_size": 32,
            "lengths": (300, 150),
            "pages_each": 10,
            "q_heads": 2,
            "kv_heads": 1,
            "q_tokens": 3,
            "causal": True,
            "window": (120, None),
            "soft_cap": 3.0,
            "sinks": True,
        },
        replace(WIDE, kv_splits=2, kv_cluster=2),
    ),
    "pages larger than tiles, shares that begin within a page, no cluster": (
        {"page_size": 128, "lengths": (300,), "pages_each": 3, "dtype": "float16", "q_heads": 2, "kv_heads": 1},
        replace(ONE, kv_splits=4),
    ),
    "a page a tile, head_dim of 128, no lengths": ({"page_size": 64, "pages_each": 3, "batch": 1, "head_dim": 128}, ONE),
    "head_dim of 96, several pages a tile": (
        {"page_size": 16, "lengths": (150, 40), "pages_each": 10, "head_dim": 96, "q_heads": 4, "kv_heads": 2},
        replace(ONE, kv_splits=2, kv_cluster=2),
    ),
    "head_dim of 80, pages larger than tiles": ({"page_size": 128, "lengths": (300,), "pages_each": 3, "head_dim": 80}, ONE),
    "head_dim of 256": ({"page_size": 256, "lengths": (300,), "pages_each": 2, "head_dim": 256, "kv_heads": 1}, ONE),
}
IN_ALL = list(INTERPRETED)[3:]


@pytest.mark.parametrize("name", thorough.cases(INTERPRETED, IN_ALL))
def test_paged_kernel_is_right_and_has_no_race(name, assert_near):
    changes, config = INTERPRETED[name]
    with quiet_interpreter():
        assert_true(paged.draw(0, **changes), assert_near, 1.5e-2, backend="interpret", config=config)
    assert not engine.races_found()


@thorough.only_in_all
def test_more_indices_than_a_copy_brings_are_all_used(assert_near, monkeypatch):
    monkeypatch.setattr("mgpu_ops.attention.problem.PAGE_INDICES_COPIED", 4)
    monkeypatch.setattr(decode, "PAGE_INDICES_COPIED", 4)
    drawn = paged.draw(1, page_size=16, lengths=(170,), pages_each=11)
    assert page_indices(P(1, 1, 176, 4, 2, 64, page_size=16), ONE) == 16
    with quiet_interpreter():
        assert_true(drawn, assert_near, 1.5e-2, backend="interpret", config=ONE)


# --- through XLA


@pytest.mark.parametrize("seed", range(6))
def test_drawn_tables_through_xla(seed, assert_near):
    rng = np.random.default_rng(seed)
    page_size = int(rng.choice([3, 16, 64]))
    each, q_tokens = int(rng.integers(1, 6)), int(rng.integers(1, 5))
    lengths = tuple(int(n) for n in rng.integers(0, each * page_size + 1, 3))
    drawn = paged.draw(
        seed,
        page_size=page_size,
        lengths=lengths,
        pages_each=each,
        q_tokens=q_tokens,
        causal=bool(seed % 2),
        sinks=seed % 3 == 0,
        dtype="float32",
        head_dim=24,
    )
    assert_true(drawn, assert_near, 1e-4)


@pytest.mark.parametrize("options", [{"backend": "xla"}, {"backend": "interpret", "config": ONE}])
def test_an_index_out_of_range_that_counts_is_the_nearest_page(options, assert_near):
    drawn = paged.draw(2, page_size=64, lengths=(128,), pages_each=2, q_heads=2, kv_heads=1, garbage=False)
    table = jnp.asarray([[2**31 - 1, -(2**31)]], jnp.int32)
    wanted = cases.truth(drawn.q, *(replace(drawn, table=np.asarray([[drawn.pages - 1, 0]])).gathered()))["out"]
    with quiet_interpreter():
        found = flash_attention(*drawn.clean(), page_table=table, **options)
    assert_near(found, wanted, 1.5e-2)


def test_tables_of_any_integers_and_without_batch(assert_near):
    drawn = paged.draw(3, page_size=16, lengths=(20, 40), pages_each=3, garbage=False)
    q, k, v = drawn.arrays
    wanted = flash_attention(q, k, v, page_table=drawn.table, kv_lengths=[20, 40])
    for table in (drawn.table.astype(np.uint8), drawn.table.tolist(), jnp.asarray(drawn.table, jnp.uint32)):
        np.testing.assert_array_equal(flash_attention(q, k, v, page_table=table, kv_lengths=[20, 40]), wanted)
    for b, length in enumerate([20, 40]):
        one = flash_attention(q[b], k, v, page_table=drawn.table[b], kv_lengths=length)
        assert_near(one, wanted[b], 1e-2)


def test_mask_bias_and_segments_run_through_xla_and_hide_nan(assert_near):
    drawn = paged.draw(4, page_size=16, pages_each=2, batch=1, dtype="float32", garbage=False)
    q, k, v = drawn.arrays
    mask = np.arange(32) != 5
    k, v = (x.at[drawn.table[0, 0], 5].set(jnp.nan) for x in (k, v))
    bias = cases.normal(9, 1, 4, 1, 32)
    found = flash_attention(q, k, v, page_table=drawn.table, mask=mask, bias=bias)
    assert_near(found, cases.truth(q, *drawn.gathered(), mask=mask, bias=bias)["out"], 1e-4)


# --- batching, gradients


@pytest.mark.parametrize("axes", [(0, None, None, 0), (0, 0, 0, 0), (None, 0, None, None), (None, None, None, 0)])
def test_vmap_is_one_call_for_each_example(axes, assert_near):
    examples = [paged.draw(seed, page_size=16, pages_each=2, batch=2, garbage=False, dtype="float32") for seed in (5, 6, 7)]
    each = [(*x.clean(), jnp.asarray(x.table)) for x in examples]
    arrays = [jnp.stack(x) if axis == 0 else x[0] for x, axis in zip(zip(*each, strict=True), axes, strict=True)]
    found = jax.vmap(lambda q, k, v, table: flash_attention(q, k, v, page_table=table), axes)(*arrays)
    for i in range(3):
        q, k, v, table = (x[i] if axis == 0 else x for x, axis in zip(arrays, axes, strict=True))
        assert_near(found[i], flash_attention(q, k, v, page_table=table), 1e-5)


def test_a_gradient_names_the_way_out():
    drawn = paged.draw(8, page_size=16, pages_each=2)
    with pytest.raises(TypeError, match=r"page_table has no gradient: gather the pages, k\[page_table\]"):
        jax.grad(lambda q: flash_attention(q, *drawn.arrays[1:], page_table=drawn.table).astype(jnp.float32).sum())(drawn.q)


# --- what cannot be

Q, POOL = jnp.zeros((2, 1, 4, 64), jnp.bfloat16), jnp.zeros((5, 16, 2, 64), jnp.bfloat16)
TABLE = np.zeros((2, 3), np.int32)


@pytest.mark.parametrize(
    ("arguments", "error", "said"),
    [
        ((Q, POOL, POOL, TABLE.astype(np.float32)), TypeError, "page_table has dtype float32: it must hold integers"),
        ((Q, POOL, POOL, TABLE[:1]), ValueError, r"page_table has shape \(1, 3\): it must be \[batch, pages of a sequence\]"),
        ((Q, POOL, POOL, TABLE[0]), ValueError, r"page_table has shape \(3,\): it must be \[batch, pages"),
        ((Q, POOL, POOL, TABLE[:, :0]), ValueError, r"page_table has shape \(2, 0\): each sequence needs room for one page"),
        (
            (Q, POOL[0], POOL[0], TABLE),
            ValueError,
            r"k has shape \(16, 2, 64\): with a page_table it must be \[pages, page_size",
        ),
        ((Q, POOL, POOL[:4], TABLE), ValueError, "each key needs a value"),
        ((Q, POOL, POOL[..., :32], TABLE), ValueError, "differ in head_dim: with a page_table they must be equal"),
        ((Q, POOL[..., :32], POOL[..., :32], TABLE), ValueError, "differ in head_dim: 64 != 32"),
        ((Q, POOL[:0], POOL[:0], TABLE), ValueError, "an empty dimension leaves nothing to attend to"),
        ((Q, POOL.astype(jnp.float32), POOL, TABLE), ValueError, "k has dtype float32 and q bfloat16: cast them to one"),
        ((Q[:, :, :3], POOL, POOL, TABLE), ValueError, "q has 3 heads and k 2"),
    ],
)
def test_what_does_not_fit_says_why(arguments, error, said):
    *arrays, table = arguments
    with pytest.raises(error, match=said):
        flash_attention(*arrays, page_table=table)


def test_no_config_of_the_backward_kernels_takes_pages():
    backward = spec_of("flash_attention_backward")
    problem = backward.Problem(**dataclasses.asdict(BASE))
    assert "there is no gradient with pages: gather them" in backward.supports(problem, H200)


def test_a_pool_of_more_rows_than_the_kernel_counts():
    pool = jax.ShapeDtypeStruct((MAX_ROWS // 16 + 1, 16, 2, 64), jnp.bfloat16)
    call = functools.partial(flash_attention, page_table=TABLE)
    with pytest.raises(ValueError, match="268435216 tokens in pages are more than the 268435200 that the kernel counts"):
        jax.eval_shape(call, Q, pool, pool)
    assert jax.eval_shape(functools.partial(call, backend="xla"), Q, pool, pool).shape == Q.shape


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        (
            {"page_size": 48},
            "page_size=48 is not one of 16, 32, 64, 128, 256: make pages of such a size, or use backend='xla'",
        ),
        (
            {"head_dim": 72},
            "head_dim=72 is not one of 64, 80, 96, 112, 128, 160, 192, 224, 256, and to pad it would copy all pages at each "
            "call: make pages of 80 columns, zeros at the end",
        ),
        ({"segments": True}, "the kernel with pages takes no segments: gather the pages, or use backend='xla'"),
        ({"bias": "bfloat16"}, "the kernel with pages takes no bias, mask or segments: gather the pages, or use backend='xla'"),
        ({"q_tokens": 65}, "is for 256 query tokens times query heads of a head of keys, not 260: gather the pages"),
        ({"v_head_dim": 32}, "v_head_dim=32 must be 0 with pages, as padding would copy them: pad values to 64 columns"),
        ({"dtype": "float32"}, "dtype float32 is not one of"),
        ({"kv_tokens": 2**28, "page_size": 16}, "the table is more than thread blocks can keep in shared memory; make larger"),
    ],
)
def test_problems_that_no_kernel_runs_say_why(changes, reason):
    assert reason in FORWARD.supports(replace(BASE, **changes), H200)


def test_fields_that_no_call_can_have():
    with pytest.raises(ValueError, match="page_size=-16 of Problem must be at least 0"):
        replace(BASE, page_size=-16)
    with pytest.raises(ValueError, match="kv_tokens=770 are no whole pages of page_size=64: make them 832"):
        replace(BASE, kv_tokens=770)


def test_configs_that_cannot_read_pages_say_why():
    assert "kv_splits=0 reads no pages: use kv_splits of 1 or more" in FORWARD.check(BASE, cases.BASE, H200)
    long = replace(BASE, kv_tokens=2**20, page_size=16)
    assert "of which the table of pages takes 263168: or split keys over more blocks" in FORWARD.check(long, ONE, H200)
    assert FORWARD.check(long, replace(ONE, kv_splits=32), H200) is None


def test_keys_are_split_until_the_table_of_a_share_fits():
    long = P(32, 1, 2**26, 64, 8, 128, page_size=16)
    config = FORWARD.default(long, H200)
    assert FORWARD.check(long, config, H200) is None
    assert config.kv_splits == 128


# --- what a share of the table and of the keys is


@pytest.mark.parametrize("page_size", PAGE_SIZES)
def test_a_share_never_has_more_indices_than_room(page_size):
    for tile_kv, splits, pages in [(64, 1, 5), (64, 4, 9), (128, 8, 33), (128, 32, 7), (64, 2, 600)]:
        problem = P(1, 1, pages * page_size, 8, 2, 64, page_size=page_size)
        config = replace(ONE, tile_kv=tile_kv, kv_splits=splits)
        blocks, room = -(-problem.kv_tokens // tile_kv), page_indices(problem, config)
        for i in range(splits):
            first, end = (blocks * n // splits for n in (i, i + 1))
            assert -(-end * tile_kv // page_size) - first * tile_kv // page_size + 3 <= room


@pytest.mark.parametrize("length", [0, 1, 64, 65, 700])
def test_blocks_behind_a_length_are_nobodys_share(length):
    problem, splits = P(1, 1, 8192, 8, 2, 64, lengths=True), 8
    seen = MaskTerms.of(problem, 1, jnp.int32(length)).kv_range(0, 1, 64)
    wanted = list(range(max(1, -(-length // 64))))  # of no keys, one block of zeros that nothing is read for
    for run in (False, True):
        shares = [decode._Share.of(seen, jnp.int32(i), splits, run) for i in range(splits)]
        blocks = [[int(share.kv_block(n)) for n in range(int(share.blocks.end - share.blocks.first))] for share in shares]
        assert sorted(n for found in blocks for n in found) == wanted
        assert run or all(found[0] == i for i, found in enumerate(blocks) if found)  # which needs no length


def test_blocks_without_a_mask_are_visited_first_and_each_once():
    problem, splits = P(1, 3, 3000, 8, 2, 64, causal=True, window_left=1000), 3
    seen = MaskTerms.of(problem, 3, problem.kv_tokens).kv_range(0, 3, 64)
    assert seen.first < seen.whole < seen.whole_end < seen.end
    for run in (False, True):
        shares = [decode._Share.of(seen, jnp.int32(i), splits, run) for i in range(splits)]
        blocks = [[int(share.kv_block(n)) for n in range(int(share.blocks.end - share.blocks.first))] for share in shares]
        assert sorted(n for found in blocks for n in found) == list(range(int(seen.first), int(seen.end)))
        for share, found in zip(shares, blocks, strict=True):
            masked = [not seen.whole <= n < seen.whole_end for n in found]
            assert masked == sorted(masked)
            assert sum(masked) == len(found) - int(share.unmasked)


# --- compiled for a GPU

COMPILED: dict[str, tuple[Any, Any]] = {
    "pages of 16": (
        P(16, 1, 8192, 32, 8, 128, page_size=16, lengths=True),
        replace(WIDE, max_concurrent_steps=3, kv_splits=2),
    ),
    "pages larger than tiles, window, sinks, query tokens, a cluster": (
        P(4, 5, 8192, 64, 8, 128, causal=True, window_left=4095, sinks=True, lengths=True, page_size=256),
        replace(ONE, max_concurrent_steps=3, kv_splits=8, kv_cluster=8),
    ),
    "head_dim of 256, soft cap": (P(4, 4, 8192, 16, 8, 256, soft_cap=True, page_size=64), ONE),
    "as many query heads as heads of keys, sinks": (P(5, 1, 96, 2, 2, 128, "float16", sinks=True, page_size=32), ONE),
    "a table of no whole 16 bytes": (P(3, 1, 80, 8, 2, 64, page_size=16), ONE),
    "head_dim of 64, more indices than a copy brings": (P(1, 1, 131072, 32, 8, 64, page_size=16), WIDE),
}


@needs_compiler
@pytest.mark.parametrize(
    "name", thorough.cases(COMPILED, [name for name in COMPILED if name not in ("pages of 16", "a table of no whole 16 bytes")])
)
def test_paged_kernel_compiles_without_spills(name):
    report = compiled.without_spills(*COMPILED[name])
    if name == "pages of 16":  # eight pages are one arrival: two for q, two for the table, three for each place of loads
        assert report.sass.count("SYNCS.ARRIVE.TRANS64") <= 13


# --- the tuner and the database


def bytes_of_the_table(problem: Any) -> int:
    """Four bytes a page that is read; of lengths, also the rows that fill the last page of the mean one."""
    mean = of_mean_length(replace(problem, page_size=0)).kv_tokens
    pages = -(-mean // problem.page_size)
    row = problem.kv_heads * 2 * problem.head_dim * 2
    return problem.batch * (4 * pages + (pages * problem.page_size - mean) * row)


@pytest.mark.parametrize("name", FORWARD.suites["paged"])
def test_problems_of_the_suite_have_a_default_and_a_label(name):
    problem = FORWARD.shapes[name]
    assert FORWARD.check(problem, FORWARD.default(problem, H200), H200) is None
    assert labels.problem_of(FORWARD, labels.describe(problem)) == problem
    plain = replace(problem, page_size=0)
    assert FORWARD.bytes(problem) - FORWARD.bytes(plain) == bytes_of_the_table(problem)
    assert FORWARD.cost(problem, FORWARD.default(problem, H200), H200) > 0


def test_calls_run_the_kernel_with_pages():
    assert resolution.resolve(FORWARD, BASE, H200, None).runs == "kernel"


def test_explain_tells_the_config_of_a_paged_problem():
    text = str(mgpu_ops.explain("flash_attention", dataclasses.asdict(BASE), gpu="h200"))
    assert "page_size=64" in text
    assert "kv_splits=" in text
