"""rotary_into_cache: values and transforms; the kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import rotary_into_cache
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import dispatch
from mgpu_ops.rotary import into_cache
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
H200 = gpu.find("h200")


def arrays(
    batch: int = 3, tokens: int = 5, q_heads: int = 4, kv_heads: int = 2, head_dim: int = 128, dtype: Any = BF16
) -> list[Any]:
    """qkv, cos, sin, both caches, and positions."""
    angles = normal(1, batch, head_dim // 2)
    caches = [normal(seed, batch, tokens, kv_heads, head_dim, dtype=dtype) for seed in (2, 3)]
    positions = jax.random.randint(jax.random.key(4), (batch,), 0, tokens)
    return [
        normal(0, batch, (q_heads + 2 * kv_heads) * head_dim, dtype=dtype),
        jnp.cos(angles),
        jnp.sin(angles),
        *caches,
        positions,
    ]


def written_out(qkv: Any, cos: Any, sin: Any, k: Any, v: Any, positions: Any) -> list[np.ndarray]:
    """With complex numbers, one head after the other, in float64."""
    qkv, cos, sin, k, v = (np.array(x, np.float64) for x in (qkv, cos, sin, k, v))
    batch, _, kv_heads, head_dim = k.shape
    heads = qkv.reshape(batch, -1, head_dim)
    turned = (heads[..., : head_dim // 2] + 1j * heads[..., head_dim // 2 :]) * (cos + 1j * sin)[:, None]
    turned = np.concatenate([turned.real, turned.imag], -1)
    for b, at in enumerate(np.clip(np.broadcast_to(positions, (batch,)), 0, k.shape[1] - 1)):
        k[b, at], v[b, at] = turned[b, -2 * kv_heads : -kv_heads], heads[b, -kv_heads:]
    return [turned[:, None, : -2 * kv_heads], k, v]


def norms(head_dim: int = 128, dtype: Any = F32) -> dict[str, Any]:
    """Weights of the norms of q and k, which are different."""
    q_norm, k_norm = 1 + 0.3 * normal(6, 2, head_dim)
    return {"q_norm": q_norm.astype(dtype), "k_norm": 0.5 * k_norm.astype(dtype)}


EPSILONS = {"epsilon": 0.1, "rms_epsilon": 0.5}  # which count


def normalised(given: list[Any], q_norm: Any, k_norm: Any, rms_rows: Any = None) -> list[np.ndarray]:
    """`written_out` of rows that are divided by the norm of `rms_rows`, whose heads of q and k are then normalised."""
    rows, q_norm, k_norm = (np.array(x, np.float64) for x in (given[0], q_norm, k_norm))
    batch, _, kv_heads, head_dim = given[3].shape
    if rms_rows is not None:
        rows /= np.sqrt(np.mean(np.array(rms_rows, np.float64) ** 2, -1, keepdims=True) + EPSILONS["rms_epsilon"])
    heads = rows.reshape(batch, -1, head_dim)
    of_q, of_k, of_v = np.split(heads, (-2 * kv_heads, -kv_heads), 1)
    of_q, of_k = (
        x / np.sqrt(np.mean(x**2, -1, keepdims=True) + EPSILONS["epsilon"]) * weight
        for x, weight in ((of_q, q_norm), (of_k, k_norm))
    )
    return written_out(np.concatenate([of_q, of_k, of_v], 1).reshape(rows.shape), *given[1:])


CASES: dict[str, dict[str, Any]] = {
    "two groups": {},
    "one group, float16": {"q_heads": 2, "dtype": jnp.float16},
    "head dim 64": {"kv_heads": 4, "head_dim": 64},
    "head dim 96": {"q_heads": 16, "kv_heads": 8, "head_dim": 96},
    "head dim 80, float16": {"q_heads": 16, "kv_heads": 16, "head_dim": 80, "dtype": jnp.float16},
    "head dim 112": {"q_heads": 16, "kv_heads": 16, "head_dim": 112},
}


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("case", thorough.cases(CASES, ["one group, float16", "head dim 112"]))
def test_rotated_and_written_where_positions_say(case, backend, assert_near):
    given = arrays(**CASES[case])
    out = jax.jit(functools.partial(rotary_into_cache, backend=backend))(*given)
    for y, z in zip(out, written_out(*given), strict=True):
        assert (y.shape, y.dtype) == (z.shape, given[0].dtype)
        assert_near(y, z, 4e-3)
    kept = np.array(given[3] == out[1]).all((2, 3))  # all rows but one of each sequence
    assert kept.sum() == kept.size - len(kept)
    assert backend == "xla" or not engine.races_found()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("position", [-7, 99, jnp.int32(-1), jnp.array([-1, -7, 99])], ids=str)
def test_a_position_out_of_range_is_the_nearest(position, backend, assert_near):
    given = [*arrays()[:5], position]
    for y, z in zip(rotary_into_cache(*given, backend=backend), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)


PAGES = [[4, -1, 2], [1, 0, 9], [6, 5, 3]]  # of three sequences; 9 is none of seven


def paged(positions: list[int], dtype: Any = BF16, **sizes: Any) -> tuple[list[Any], dict[str, Any]]:
    """Arguments with pools of seven pages of four rows, and their table."""
    given = arrays(batch=3, dtype=dtype, **sizes)
    pools = [normal(seed, 7, 4, *given[3].shape[2:], dtype=dtype) for seed in (7, 8)]
    return [*given[:3], *pools, jnp.array(positions)], {"page_table": jnp.array(PAGES, jnp.int32)}


def into_pages(given: list[Any], rows: list[tuple[int, int] | None]) -> list[np.ndarray]:
    """`written_out`, whose new rows are put where `rows` says: page and row, or None for nowhere."""
    contiguous = [normal(0, len(rows), 1, *given[3].shape[2:], dtype=given[3].dtype)] * 2
    q, *new = written_out(*given[:3], *contiguous, jnp.zeros(len(rows), jnp.int32))
    pools = [np.array(pool, np.float64) for pool in given[3:5]]
    for b, at in enumerate(rows):
        for pool, of in zip(pools, new, strict=True):
            if at is not None:
                pool[at] = of[b, 0]
    return [q, *pools]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("table", [jnp.int32, np.int64, np.uint32])
def test_with_a_page_table_rows_are_written_to_the_pages_that_it_names(table, backend, assert_near):
    given, more = paged([9, 2, 99])  # the last position is beyond the three pages, and counts as their last row
    more["page_table"] = np.array(PAGES if np.dtype(table).kind == "i" else np.abs(PAGES), table)
    out = jax.jit(functools.partial(rotary_into_cache, backend=backend))(*given, **more)
    for y, z in zip(out, into_pages(given, [(2, 1), (1, 2), (3, 3)]), strict=True):
        assert y.dtype == BF16
        assert_near(y, z, 4e-3)
    assert (np.array(given[4] != out[2]).any((2, 3))).sum() == 3  # no other row
    assert backend == "xla" or not engine.races_found()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("table", [jnp.int32, np.int64])
def test_nothing_is_written_where_a_table_names_no_page(table, backend, assert_near):
    given, more = paged([4, 11, 0])
    more["page_table"] = np.array(PAGES, table)
    out = rotary_into_cache(*given, **more, backend=backend)
    for y, z in zip(out, into_pages(given, [None, None, (6, 0)]), strict=True):
        assert_near(y, z, 4e-3)


@pytest.mark.parametrize("dtype", ["float8_e4m3fn", "int8"])
def test_pages_of_8_bits_and_norms_are_those_of_a_contiguous_cache(dtype):
    given, more = paged([9, 2, 7], kv_heads=4, q_heads=8)
    pools = [jnp.zeros(pool.shape, dtype) for pool in given[3:5]]
    scales = {"k_scale": jnp.array([[0.02, 0.03, 0.04, 0.05]] * 3), "v_scale": 0.03}
    scales |= norms() | EPSILONS | {"rms_rows": normal(9, 3, 256, dtype=BF16)}
    through = functools.partial(rotary_into_cache, *given[:3], backend="interpret")
    q, *of_pages = through(*pools, given[5], **more, **scales)
    zeros = [jnp.zeros((3, 12, 4, 128), dtype)] * 2
    wanted_q, *wanted = through(*zeros, given[5], **scales)
    np.testing.assert_array_equal(q, wanted_q)
    for pool, cache in zip(of_pages, wanted, strict=True):
        for b, position in enumerate((9, 2, 7)):
            page = PAGES[b][position // 4]
            found, expected = (np.asarray(x.astype(F32)) for x in (pool[page, position % 4], cache[b, position]))
            np.testing.assert_array_equal(found, expected)


def test_what_is_written_to_pages_is_what_attention_reads_there(assert_near):
    given, more = paged([9, 2, 7], kv_heads=4, q_heads=8)
    q, k, v = rotary_into_cache(*given, **more, backend="interpret")
    lengths, table = given[5] + 1, jnp.maximum(more["page_table"], 0)
    out = mgpu_ops.flash_attention(q, k, v, kv_lengths=lengths, page_table=table)
    gathered = [x[jnp.minimum(table, 6)].reshape(3, 12, 4, 128) for x in given[3:5]]
    contiguous = rotary_into_cache(*given[:3], *gathered, given[5], backend="interpret")
    assert_near(out, mgpu_ops.flash_attention(*contiguous, kv_lengths=lengths), 1.6e-2)  # two programs, of bfloat16


def test_each_of_several_pools_has_its_own_rows_under_vmap(assert_near):
    given, more = paged([9, 2, 7])
    pools = [jnp.stack([pool, 2 * pool]) for pool in given[3:5]]
    call = lambda k, v: rotary_into_cache(*given[:3], k, v, given[5], **more, backend="xla")  # noqa: E731
    out = jax.vmap(call)(*pools)
    for i in range(2):
        for y, z in zip(out, call(*(pool[i] for pool in pools)), strict=True):
            assert_near(y[i], z, 8e-3)  # two programs: they may round apart


def test_over_devices_sequences_of_one_pool_are_written_together(assert_near):
    given, more = paged([9, 2, 7])
    mesh = jax.make_mesh((3,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:3])
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    placed = [jax.device_put(x, whole if x.ndim == 4 else split) for x in given]
    out = jax.jit(rotary_into_cache)(*placed, page_table=jax.device_put(more["page_table"], split))
    for y, z in zip(out, into_pages(given, [(2, 1), (1, 2), (5, 3)]), strict=True):
        assert_near(y, z, 4e-3)


@pytest.mark.parametrize(
    ("table", "error", "message"),
    [
        (jnp.zeros((2, 3), jnp.int32), ValueError, r"page_table has shape \(2, 3\): it must be \[batch, pages of a sequence\]"),
        (jnp.zeros((3, 0), jnp.int32), ValueError, r"page_table has shape \(3, 0\)"),
        (jnp.zeros((3, 2)), TypeError, "page_table has dtype float32: it must hold integers"),
    ],
)
def test_what_is_no_page_table_is_refused(table, error, message):
    with pytest.raises(error, match=message):
        rotary_into_cache(*paged([0, 0, 0])[0], page_table=table)
    with pytest.raises(ValueError, match=r"must both be \[pages, page_size, kv_heads, head_dim\], with a page_table"):
        rotary_into_cache(*arrays()[:3], *[jnp.ones((4, 2, 128), BF16)] * 2, jnp.zeros(3, jnp.int32), page_table=PAGES)


def test_angles_without_a_batch_and_vmap_over_sequences(assert_near):
    qkv, cos, sin, k, v, positions = arrays()
    of_both = rotary_into_cache(qkv, cos, sin[0], k, v, positions, backend="interpret")
    for y, z in zip(of_both, written_out(qkv, cos, sin[:1], k, v, positions), strict=True):
        assert_near(y, z, 4e-3)
    for y, z in zip(rotary_into_cache(qkv, cos[0], sin[0], k, v, 2), written_out(qkv, cos[:1], sin[:1], k, v, 2), strict=True):
        assert_near(y, z, 4e-3)
    one = jax.vmap(lambda x, k, v, at: rotary_into_cache(x[None], cos[0], sin[0], k[None], v[None], at), (0, 0, 0, 0))
    for y, z in zip(one(qkv, k, v, positions), written_out(qkv, cos[:1], sin[:1], k, v, positions), strict=True):
        assert_near(y[:, 0], z, 4e-3)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_a_product_of_rows_is_divided_by_their_norm(backend, assert_near):
    qkv, *others = arrays()
    rows = 3 * normal(5, 3, 384, dtype=BF16)
    norm = jnp.sqrt(jnp.mean(rows.astype(F32) ** 2, -1, keepdims=True) + 0.5)
    found = rotary_into_cache(qkv, *others, rms_rows=rows, rms_epsilon=0.5, backend=backend)
    for y, z in zip(found, written_out((qkv.astype(F32) / norm).astype(BF16), *others), strict=True):
        assert_near(y, z, 8e-3)
    mapped = jax.vmap(lambda *x: rotary_into_cache(*(y[None] for y in x[:-1]), rms_rows=x[-1][None], rms_epsilon=0.5))
    for y, z in zip(mapped(qkv, *others, rows), found, strict=True):
        assert_near(y[:, 0], z, 8e-3)


OF_NORMS: dict[str, tuple[dict[str, Any], bool]] = {  # arrays, and whether their rows are divided before
    "two groups of q": ({"q_heads": 8, "kv_heads": 4}, False),
    "more heads than at once, float16": ({"q_heads": 8, "kv_heads": 8, "dtype": jnp.float16}, False),
    "head dim 64, norms of rows": ({"q_heads": 8, "kv_heads": 8, "head_dim": 64}, True),
    "head dim 256": ({"q_heads": 4, "kv_heads": 4, "head_dim": 256}, False),
    "head dim 128, norms of rows": ({"q_heads": 16, "kv_heads": 8}, True),
    "head dim 256, norms of rows": ({"q_heads": 8, "kv_heads": 4, "head_dim": 256}, True),
}


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize("case", thorough.cases(OF_NORMS, ["two groups of q", "head dim 128, norms of rows", "head dim 256"]))
def test_heads_are_normalised_before_they_are_turned_and_rounded_once(case, backend, assert_near):
    sizes, of_rows = OF_NORMS[case]
    given, options = arrays(**sizes), norms(sizes.get("head_dim", 128), BF16)
    if of_rows:
        options["rms_rows"] = 3 * normal(5, 3, 384, dtype=BF16)
    out = jax.jit(functools.partial(rotary_into_cache, backend=backend, **EPSILONS))(*given, **options)
    for y, z in zip(out, normalised(given, **options), strict=True):
        assert (y.shape, y.dtype) == (z.shape, given[0].dtype)
        assert_near(y, z, 4e-3)
    kept = np.array(given[3] == out[1]).all((2, 3))
    assert kept.sum() == kept.size - len(kept)
    assert backend == "xla" or not engine.races_found()


@pytest.mark.parametrize(
    ("head_dim", "dtypes", "read"),
    [
        (128, (BF16, BF16), BF16),
        (128, (jnp.float16, jnp.float16), jnp.float16),
        (64, (BF16, BF16), F32),  # a half has 64 bytes, and a TMA copy begins at a multiple of 128
        (128, (BF16, jnp.float16), F32),
        (64, (F32, F32), F32),
    ],
)
def test_weights_of_norms_are_read_as_they_are_where_a_copy_brings_their_halves(head_dim, dtypes, read, assert_near):
    options = {name: w.astype(dtype) for (name, w), dtype in zip(norms(head_dim).items(), dtypes, strict=True)}
    assert {w.dtype for w in into_cache._as_the_kernel_reads([*options.values()])} == {jnp.dtype(read)}
    given = arrays(q_heads=8, kv_heads=4, head_dim=head_dim)
    for y, z in zip(rotary_into_cache(*given, **options, **EPSILONS), normalised(given, **options), strict=True):
        assert_near(y, z, 4e-3)


def test_norms_leave_values_and_what_no_norm_is_asked_for_as_they_are():
    given = arrays()
    plain, with_norms = rotary_into_cache(*given), rotary_into_cache(*given, **norms())
    np.testing.assert_array_equal(plain[2], with_norms[2])
    for x, y in zip(rotary_into_cache(*given, epsilon=3.0), plain, strict=True):
        np.testing.assert_array_equal(x, y)


def test_vmap_maps_sequences_rows_and_weights_of_norms(assert_near):
    given, weights, rows = arrays(), norms(), 3 * normal(5, 3, 384, dtype=BF16)

    def one(xs: list[jax.Array], row: jax.Array, weights: dict[str, jax.Array]) -> Any:
        return rotary_into_cache(*(x[None] for x in xs), rms_rows=row[None], **weights, **EPSILONS)

    found = jax.vmap(one, (0, 0, None))(given, rows, weights)
    for y, z in zip(found, normalised(given, **weights, rms_rows=rows), strict=True):
        assert_near(y[:, 0], z, 4e-3)
    each = {name: jnp.stack([w, -w, 2 * w]) for name, w in weights.items()}
    found = jax.vmap(one)(given, rows, each)
    for i, of_one in enumerate(zip(*found, strict=True)):
        own, its = [x[i : i + 1] for x in given], {name: w[i] for name, w in each.items()}
        for y, z in zip(of_one, normalised(own, **its, rms_rows=rows[i : i + 1]), strict=True):
            assert_near(y, z, 4e-3)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_over_devices_sequences_are_split_and_weights_of_norms_are_not(kind, assert_near):
    given, options = arrays(batch=4), norms() | {"rms_rows": 3 * normal(5, 4, 384, dtype=BF16)}
    mesh = jax.make_mesh((2,), ("x",), axis_types=(kind,), devices=jax.devices()[:2])
    split, whole = NamedSharding(mesh, PartitionSpec("x")), NamedSharding(mesh, PartitionSpec())
    placed = [jax.device_put(x, split) for x in given]
    others = {name: jax.device_put(x, split if name == "rms_rows" else whole) for name, x in options.items()}
    program = jax.jit(functools.partial(rotary_into_cache, **EPSILONS)).lower(*placed, **others).compile()
    assert not [name for name in ("all-gather", "all-reduce", "all-to-all", "permute") if name in program.as_text()]
    for y, z in zip(program(*placed, **others), normalised(given, **options), strict=True):
        assert y.sharding.is_equivalent_to(split, y.ndim)
        assert_near(y, z, 4e-3)


def test_there_is_no_gradient_and_the_error_names_what_has_one():
    qkv, *others = arrays()
    told = "rotary_into_cache has no gradient: .* Train with mgpu_ops.rotary_qkv or mgpu_ops.rotary_attention, .*stop_gradient"
    with pytest.raises(TypeError, match=told):
        jax.grad(lambda x: rotary_into_cache(x, *others)[0].astype(F32).sum())(qkv)
    k_norm = jnp.ones(128)
    with pytest.raises(TypeError, match=told):
        jax.grad(lambda w: rotary_into_cache(qkv, *others, q_norm=w, k_norm=k_norm)[0].astype(F32).sum())(k_norm)


@pytest.mark.parametrize(
    ("changed", "error", "message"),
    [
        ({0: jnp.ones((3, 128), BF16)}, ValueError, r"qkv\(3, 128\) does not fit k_cache\(3, 5, 2, 128\)"),
        ({0: jnp.ones((2, 1024), BF16)}, ValueError, "does not fit .* batch=3"),
        ({0: jnp.ones((3, 1024), F32)}, ValueError, "qkv is float32, k_cache bfloat16"),
        ({4: jnp.ones((3, 6, 2, 128), BF16)}, ValueError, "must both be"),
        ({1: jnp.ones((3, 128))}, ValueError, r"cos has shape \(3, 128\): it must be \[batch, head_dim / 2\] = \(3, 64\)"),
        ({5: jnp.zeros((2,), jnp.int32)}, ValueError, r"positions has shape \(2,\): it must be \[batch\] = \(3,\)"),
        ({5: 0.5}, TypeError, "positions"),
    ],
)
def test_error_names_the_value_and_the_rule(changed, error, message):
    given = arrays()
    for i, x in changed.items():
        given[i] = x
    with pytest.raises(error, match=message):
        rotary_into_cache(*given)


WEIGHT = np.ones(128, np.float32)


@pytest.mark.parametrize(
    ("options", "error", "message"),
    [
        ({"q_norm": WEIGHT}, ValueError, r"k_norm is None: pass q_norm and k_norm, weights \[head_dim\] of both, or neither"),
        ({"q_norm": WEIGHT, "k_norm": WEIGHT[:64]}, ValueError, r"k_norm has shape \(64,\): .* of a head, \[128\]"),
        (
            {"q_norm": range(128), "k_norm": WEIGHT},
            TypeError,
            "q_norm has dtype int32: rotary_into_cache takes floats; cast it first",
        ),
        ({"epsilon": -1}, ValueError, "^epsilon=-1 must be a finite number of at least 0"),
        ({"epsilon": "x"}, TypeError, "^epsilon='x' is no Python number"),
        (
            {"q_norm": WEIGHT, "k_norm": WEIGHT, "backend": "interpret"},
            ValueError,
            "kv_heads=2 and head_dim=128: norms of heads take kv_heads that are a multiple of 4 and a head_dim of 64, 128, 256",
        ),
    ],
)
def test_an_error_about_norms_names_the_value_and_the_rule(options, error, message):
    with pytest.raises(error, match=message):
        rotary_into_cache(*arrays(), **options)


def test_a_mapped_axis_of_no_size_has_no_sequences():
    found = jax.vmap(rotary_into_cache)(*(jnp.zeros((0, *x.shape), x.dtype) for x in map(jnp.asarray, arrays())))
    assert [x.shape for x in found] == [(0, *x.shape) for x in rotary_into_cache(*arrays())]


def test_an_epsilon_that_is_none_is_refused_without_rows_too():
    with pytest.raises(ValueError, match="rms_epsilon=-1 must be a finite number of at least 0"):
        rotary_into_cache(*arrays(), rms_epsilon=-1)


def test_what_the_kernel_does_not_take_runs_through_xla_or_says_why(assert_near):
    given = arrays(kv_heads=1, head_dim=64)
    with pytest.raises(ValueError, match=r"backend='interpret' cannot run .*kv_heads \* head_dim = 64 is no multiple of 256"):
        rotary_into_cache(*given, backend="interpret")
    for y, z in zip(rotary_into_cache(*given), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)


def test_halves_of_heads_in_a_cache_of_eight_bits_are_whole_16_bytes():
    given = in_eight_bits(arrays(q_heads=16, kv_heads=16, head_dim=80), "int8")
    with pytest.raises(
        ValueError, match="head_dim=80 of int8 is no multiple of 32, whose halves are whole 16 bytes: pad it, or"
    ):
        rotary_into_cache(*given, backend="interpret")


def test_why_xla_runs_is_logged_once(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    given = arrays(kv_heads=1, head_dim=64)
    with caplog.at_level(logging.WARNING, "mgpu_ops"), gpu.target("h200"):
        for _ in range(2):
            jax.eval_shape(lambda *x: rotary_into_cache(*x), *given)
        jax.eval_shape(lambda *x: rotary_into_cache(*x, backend="xla"), *given)
    reason = "kv_heads * head_dim = 64 is no multiple of 256"
    assert [record.getMessage() for record in caplog.records] == [f"rotary_into_cache runs through XLA: {reason}"]


def test_with_norms_of_heads_a_kernel_runs(caplog, monkeypatch):
    monkeypatch.setattr(dispatch, "_said", set())
    with caplog.at_level(logging.WARNING, "mgpu_ops"), gpu.target("h200"):
        program = jax.make_jaxpr(lambda *x: rotary_into_cache(*x, **norms()))(*arrays(kv_heads=4))
    assert "mgpu_ops_rotary_normalised_into_cache" in str(program)
    assert not caplog.records


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    ("kv_heads", "head_dim", "width", "weights"),
    [
        (8, 128, 4096, F32),
        (8, 128, 4096, BF16),
        *(pytest.param(*sizes, F32, marks=thorough.only_in_all) for sizes in ((8, 64, 0), (4, 256, 0), (44, 256, 4096))),
    ],
)
def test_the_kernel_with_norms_spills_nothing_and_takes_weights_as_they_are(kv_heads, head_dim, width, weights):
    shapes = jax.eval_shape(functools.partial(arrays, 16, 512, 2 * kv_heads, kv_heads, head_dim))
    weight, rows = jax.ShapeDtypeStruct((head_dim,), weights), [jax.ShapeDtypeStruct((16, width), BF16)] if width else []

    def step(*xs: Any) -> Any:
        *xs, q_norm, k_norm = xs
        return rotary_into_cache(*xs[:6], rms_rows=xs[6] if width else None, q_norm=q_norm, k_norm=k_norm, backend="mosaic")

    (kernel,) = aot.compile_for(H200, step, *shapes, *rows, weight, weight).kernels
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0)
    context, place = aot.elsewhere(H200)
    with context:
        compiled = jax.jit(step, donate_argnums=(3, 4)).lower(*place((*shapes, *rows, weight, weight))).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < shapes[3].size  # no copy of a cache
    assert compiled.as_text().count(" fusion(") == 1  # cosines and sines, as without norms


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("dtype", [BF16, jnp.float8_e4m3fn])
def test_one_kernel_writes_to_the_pages_of_a_donated_pool_in_place(dtype):
    shapes = jax.eval_shape(functools.partial(arrays, batch=16, tokens=512, q_heads=32, kv_heads=8))
    pools, table = [jax.ShapeDtypeStruct((128, 64, 8, 128), dtype)] * 2, jax.ShapeDtypeStruct((16, 8), jnp.int32)
    given = [*shapes[:3], *pools, shapes[5], table]

    def step(*given: Any) -> Any:
        return rotary_into_cache(*given[:6], page_table=given[6], backend="mosaic")

    (kernel,) = aot.compile_for(H200, step, *given).kernels
    assert (kernel.spill_stores, kernel.spill_loads) == (0, 0)
    context, place = aot.elsewhere(H200)
    with context:
        compiled = jax.jit(step, donate_argnums=(3, 4)).lower(*place(given)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < pools[0].size  # no copy of a pool


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(("kv_heads", "head_dim"), [(8, 128), (32, 96), (32, 80)])
def test_one_kernel_writes_a_donated_cache_in_place(kv_heads, head_dim):
    shapes = jax.eval_shape(functools.partial(arrays, 16, 512, 32, kv_heads, head_dim))
    rows = jax.ShapeDtypeStruct((16, 4096), BF16)
    report = aot.compile_for(H200, lambda *given: rotary_into_cache(*given[:-1], rms_rows=given[-1]), *shapes, rows)
    (kernel,) = report.kernels
    assert kernel.spill_stores == 0
    context, place = aot.elsewhere(H200)
    with context:
        compiled = jax.jit(rotary_into_cache, donate_argnums=(3, 4)).lower(*place(shapes)).compile()
    assert compiled.memory_analysis().temp_size_in_bytes < shapes[3].size  # no copy of a cache
    assert compiled.as_text().count(" fusion(") == 1  # XLA's kernels: cosines and sines as the kernel reads them


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(9))
def test_random_sizes_are_right(seed, assert_near):
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = [(8, 128), (4, 64), (2, 256), (16, 64), (8, 192), (1, 256), (32, 96), (32, 80), (16, 112)][seed]
    batch, tokens, group = (int(rng.integers(1, n)) for n in (70, 300, 9))
    given = arrays(batch, tokens, kv_heads * group, kv_heads, head_dim)
    run = jax.jit(functools.partial(rotary_into_cache, backend="mosaic"), donate_argnums=(3, 4))
    for y, z in zip(run(*given[:3], *(jnp.copy(x) for x in given[3:5]), given[5]), written_out(*given), strict=True):
        assert_near(y, z, 4e-3)
    rows = normal(5, batch, 128 * int(rng.integers(1, 65)), dtype=BF16)
    wanted = rotary_into_cache(*given, rms_rows=rows, backend="xla")
    for y, z in zip(run(*given, rms_rows=rows), wanted, strict=True):
        assert_near(y, z, 8e-3)
    assert mgpu_ops.rotary_into_cache is rotary_into_cache


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_sizes_with_norms_of_heads_are_those_in_float64(seed, assert_near):
    """Of either dtype, with and without norms of rows, and the same in every run."""
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = [(8, 128), (4, 64), (4, 256), (16, 64), (4, 128), (8, 256), (44, 256), (16, 128)][seed]
    batch, tokens, group = (int(rng.integers(1, n)) for n in (70, 300, 3 if kv_heads == 44 else 9))
    given = arrays(batch, tokens, kv_heads * group, kv_heads, head_dim, jnp.float16 if seed % 4 == 1 else BF16)
    rows = 3 * normal(5, batch, 128 * int(rng.integers(1, 65)), dtype=BF16)
    run = jax.jit(functools.partial(rotary_into_cache, backend="mosaic", **EPSILONS), donate_argnums=(3, 4))
    for options in (norms(head_dim), norms(head_dim) | {"rms_rows": rows}):
        caches = [[jnp.copy(x) for x in given[3:5]] for _ in range(2)]
        first, second = (run(*given[:3], *both, given[5], **options) for both in caches)
        for y, again, z in zip(first, second, normalised(given, **options), strict=True):
            assert_near(y, z, 4e-3)
            np.testing.assert_array_equal(y, again)


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_pages_are_right_and_no_others_are_written(seed, assert_near):
    rng = np.random.default_rng(seed)
    kv_heads, head_dim = [(8, 128), (4, 64), (2, 256), (16, 64), (8, 192), (1, 256)][seed]
    batch, group, page_size, pages = (int(rng.integers(1, n)) for n in (70, 9, 65, 20))
    table = rng.permutation(batch * pages + 2)[: batch * pages].reshape(batch, pages)
    table[rng.random(table.shape) < 0.2] = rng.choice([-1, -(2**31), batch * pages + 2, 2**31 - 1])
    given = arrays(batch, 1, kv_heads * group, kv_heads, head_dim)
    given[3:5] = [normal(of, batch * pages + 2, page_size, kv_heads, head_dim, dtype=BF16) for of in (7, 8)]
    given[5] = jnp.asarray(rng.integers(0, pages * page_size, batch))
    rows = [(int(table[b, at // page_size]), at % page_size) for b, at in enumerate(given[5].tolist())]
    wanted = into_pages(given, [row if 0 <= row[0] < batch * pages + 2 else None for row in rows])
    run = jax.jit(functools.partial(rotary_into_cache, backend="mosaic"), donate_argnums=(3, 4))
    for y, z in zip(run(*given, page_table=jnp.asarray(table, jnp.int32)), wanted, strict=True):
        assert_near(y, z, 4e-3)


# --- A cache of 8 bits

KV_DTYPES = ["float8_e4m3fn", "int8"]


def in_eight_bits(given: list[Any], kv_dtype: str) -> list[Any]:
    """The same with caches of 8 bits."""
    return [*given[:3], *((20 * x.astype(F32)).astype(kv_dtype) for x in given[3:5]), given[5]]


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize(
    ("kv_dtype", "heads", "head_dim"), [(KV_DTYPES[0], 2, 128), (KV_DTYPES[1], 2, 128), (KV_DTYPES[0], 8, 96)]
)
def test_a_cache_of_eight_bits_gets_rows_divided_by_scales(kv_dtype, heads, head_dim, backend, assert_near):
    sizes = {"q_heads": 2 * heads, "kv_heads": heads, "head_dim": head_dim}
    given = in_eight_bits(arrays(**sizes), kv_dtype)
    k_scale = np.resize(np.float32([[0.03, 0.05], [0.02, 0.04], [0.1, 0.06]]), (3, heads))  # of entries
    v_scale = np.resize(np.float32([0.02, 0.07]), heads)
    run = functools.partial(rotary_into_cache, backend=backend, k_scale=k_scale, v_scale=v_scale)
    q, k, v = jax.jit(run)(*given)
    wanted = written_out(*arrays(**sizes))
    assert_near(q, wanted[0], 4e-3)
    assert (k.dtype, v.dtype) == (given[3].dtype,) * 2
    for b, at in enumerate(np.asarray(given[5])):
        for found, truth, scale in ((k, wanted[1], k_scale[b]), (v, wanted[2], v_scale)):
            one, truth = (np.asarray(x[b, at]).astype(np.float64) for x in (found, truth))
            largest = scale[:, None] * (127 if kv_dtype == "int8" else 448)
            one, truth = one * scale[:, None], np.clip(truth, -largest, largest)
            step = 0.51 * scale[:, None] if kv_dtype == "int8" else 2.0**-4 * np.abs(truth) + 2.0**-10 * scale[:, None]
            assert (np.abs(one - truth) <= step + 4e-3 * (1 + np.abs(truth))).all()
    kept = np.array(given[3] == k).all((2, 3))
    assert kept.sum() >= kept.size - len(kept)  # all rows but one of each sequence
    assert backend == "xla" or not engine.races_found()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_what_is_beyond_eight_bits_is_saturated(backend):
    qkv, *others = in_eight_bits(arrays(), "float8_e4m3fn")
    _, _, v = rotary_into_cache(1e6 * qkv, *others, backend=backend)
    written = np.asarray(v.astype(F32))[np.arange(3), np.asarray(others[-1])]
    assert (np.abs(written) == 448).mean() > 0.9
    _, _, v = rotary_into_cache(jnp.full_like(qkv, jnp.nan), *in_eight_bits(arrays(), "int8")[1:], backend=backend)
    assert not np.asarray(v)[np.arange(3), np.asarray(others[-1])].any()  # NaN is 0


def test_scales_and_caches_that_do_not_fit_say_why():
    given = arrays()
    with pytest.raises(TypeError, match="k_scale is for keys and values of 8 bits, and they are bfloat16"):
        rotary_into_cache(*given, k_scale=1.0)
    eight_bits = in_eight_bits(given, "int8")
    with pytest.raises(ValueError, match=r"v_scale has shape \(3,\): it must be a scalar, \[kv_heads\] = \(2,\) or \[batch"):
        rotary_into_cache(*eight_bits, v_scale=np.ones(3, np.float32))
    with pytest.raises(ValueError, match="k_cache int8 and v_cache bfloat16: cast them to one, or both caches to"):
        rotary_into_cache(*eight_bits[:4], given[4], given[5])


def test_vmap_over_caches_and_scales():
    given, scales = in_eight_bits(arrays(), "int8"), np.float32([0.03, 0.05, 0.1])

    def one(x: Any, k: Any, v: Any, at: Any, scale: Any) -> Any:
        return rotary_into_cache(x[None], given[1][0], given[2][0], k[None], v[None], at, k_scale=scale, v_scale=0.1)

    found = jax.vmap(one)(given[0], *given[3:], scales)
    for i in range(3):
        wanted = one(given[0][i], given[3][i], given[4][i], given[5][i], scales[i])
        for x, y in zip(found, wanted, strict=True):
            difference = np.abs(np.asarray(x[i]).astype(np.float64) - np.asarray(y).astype(np.float64))
            assert difference.max() <= 1  # a rotation may be rounded the other way
