"""The kernels of attention in JAX's GPU interpreter: right on every schedule, and free of data races.

A case takes seconds, most of them to trace what simulates the kernel: one shows several things where they do not meet, tests
that differ in arrays only share a problem and a config, and which key a row sees is for `test_mask.py`. The
GPU has three SMs here, so that a block works through several tiles and its pipelines of stages wrap. What the interpreter's
memory holds before it is written is NaN, in shared memory and in outputs: an output without NaN was written everywhere.
"""

from __future__ import annotations

import functools
import importlib
import random
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops import FlashAttentionConfig, FlashAttentionProblem, flash_attention, spec_of
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.core import engine, gpu
from mgpu_ops.core.pipeline import Pipeline
from tests import thorough
from tests.mgpu_ops.attention import cases
from tests.mgpu_ops.attention.cases import (
    AHEAD_64,
    AHEAD_128,
    BASE,
    FUSED_64,
    FUSED_128,
    SPLIT_64,
    SPLIT_128,
    SPLIT_256,
    one_step,
)
from tests.mgpu_ops.grouped.ragged import float64
from tests.mgpu_ops.interpreter import FEW_SMS, has_a_race, quiet_interpreter

FORWARD, BACKWARD = spec_of("flash_attention"), spec_of("flash_attention_backward")
P = FlashAttentionProblem
TOLERANCE = {"bfloat16": 1.5e-2, "float16": 2e-3}


@functools.cache
def compiled(op: str, problem: Any, config: Any, device: Any) -> Callable[..., Any]:
    return jax.jit(functools.partial(spec_of(op).run, problem, config, device, interpret=True))


def interpreted(spec: Any, problem: Any, config: Any, arrays: tuple[Any, ...], device: Any = FEW_SMS) -> tuple[np.ndarray, ...]:
    assert spec.supports(problem, device) is None
    assert spec.check(problem, config, device) is None
    with quiet_interpreter():
        return tuple(np.asarray(x) for x in compiled(spec.name, problem, config, device)(*arrays))


def arguments_of(problem: Any, rest: tuple[Any, ...]) -> dict[str, Any]:
    """`Inputs.arrays()` as `attention.truth` takes them."""
    inputs = Inputs.of(problem, rest)
    scale, cap, _ = np.asarray(inputs.options, np.float64)
    window = tuple(None if side < 0 else side for side in (problem.window_left, problem.window_right))
    lengths = dict(zip(("q_lengths", "kv_lengths"), inputs.lengths or ()))
    segments = dict(zip(("q_segment_ids", "kv_segment_ids"), inputs.segments or ()))
    named = {"causal": problem.causal, "window": window, "align": problem.align, "bias": inputs.bias, **lengths, **segments}
    sinks = None if inputs.sinks is None else inputs.sinks[0]
    named |= {"soft_cap": cap if problem.soft_cap else None, "soft_cap_after_bias": problem.soft_cap_after_bias}
    return named | {"scale": scale, "sinks": sinks}


def assert_forward(
    problem: Any, config: Any, assert_near: Any, arrays: Any = None, device: Any = FEW_SMS, padding: Callable[..., Any] = tuple
) -> None:
    """Output and lse are right everywhere, zeros and +inf for rows that see nothing, sinks or not, and there was no race.

    padding: what is done to q, k and v where that must not matter.
    """
    arrays = cases.arguments(problem) if arrays is None else arrays
    out, lse = interpreted(FORWARD, problem, config, (*padding(arrays[:3]), *arrays[3:]), device)
    assert not engine.races_found()
    q, k, v, *rest = arrays
    wanted = cases.truth(q, k, v, **arguments_of(problem, tuple(rest)))
    nothing = np.isneginf(wanted["lse"]) if not problem.sinks else ~wanted["out"].any(-1).swapaxes(1, 2)
    assert out.dtype == q.dtype
    assert_near(out, wanted["out"], TOLERANCE[problem.dtype])
    np.testing.assert_array_equal(float64(out).swapaxes(1, 2)[nothing], 0)
    np.testing.assert_array_equal(np.isposinf(lse), nothing)
    np.testing.assert_allclose(lse[~nothing], wanted["lse"][~nothing], rtol=1e-5, atol=1e-5)


def assert_backward(
    problem: Any,
    config: Any,
    assert_near: Any,
    arrays: Any = None,
    lse_grad: Any = None,
    padding: Callable[..., Any] = tuple,
    sinks: Any = None,
) -> None:
    """The gradients are right everywhere, and there was no race. `arrays`: of the forward op; `padding` as above.

    sinks: in the lse that the kernels are given.
    """
    q, k, v, *rest = cases.arguments(problem) if arrays is None else arrays
    out_grad = cases.normal(9, *q.shape[:3], v.shape[3], dtype=q.dtype)
    arguments = arguments_of(problem, tuple(rest)) | {"sinks": sinks}
    exact = cases.truth(q, k, v, **arguments)
    delta_of = functools.partial(np.einsum, "btnd,btnd->bnt", float64(out_grad))
    if lse_grad is None:  # delta is that of the output as it is rounded, as if lse had the gradient of this difference
        out_or_delta = jnp.asarray(exact["out"], q.dtype)
        lse_grad = delta_of(exact["out"] - float64(out_or_delta))
    else:
        out_or_delta = jnp.asarray(delta_of(exact["out"]) - lse_grad, jnp.float32)
    wanted = cases.truth(q, k, v, out_grad=out_grad, lse_grad=lse_grad, **arguments)
    wanted.pop("sinks", None)
    lse = np.where(np.isneginf(wanted["lse"]), np.inf, wanted["lse"])
    given = *padding((q, k, v)), out_grad, jnp.asarray(lse, jnp.float32), out_or_delta, *rest
    found = interpreted(BACKWARD, problem, config, given)
    assert not engine.races_found()
    names = ["q", "k", "v", "bias"] if problem.bias_grad else ["q", "k", "v"]
    gradients = dict(zip(names, map(float64, found), strict=True))
    nothing = np.isneginf(wanted["lse"]).swapaxes(1, 2)
    np.testing.assert_array_equal(gradients["q"][nothing], 0)
    unseen = ~wanted["v"].any(-1)  # keys
    np.testing.assert_array_equal(gradients["k"][unseen], 0)
    np.testing.assert_array_equal(gradients["v"][unseen], 0)
    for name, x in gradients.items():
        if np.abs(wanted[name]).max() < 1e-6:  # rows that see one key have none with respect to q and k
            np.testing.assert_allclose(x, 0, atol=1e-6)
        else:
            assert_near(x, wanted[name], 2 * TOLERANCE[problem.dtype])


TWO = replace(BASE, compute_warpgroups=2)
THREE = replace(BASE, compute_warpgroups=3, memory_registers=32)

MANY_TILES = P(3, 70, 100, 1, 1, 64), BASE  # six on three SMs; the last rows and keys of each batch entry fill no tile
SEGMENTS = P(1, 150, 210, 1, 1, 64, segments=True, causal=True), TWO

FORWARD_CASES: dict[str, tuple[Any, Any]] = {
    # schedules
    "one warpgroup, odd lengths, blocks with several tiles": MANY_TILES,
    "two query stages, grouped heads": (P(1, 66, 65, 4, 2, 64), replace(BASE, q_slots=2)),
    "two warpgroups, two query stages, three steps": (
        P(1, 200, 200, 2, 2, 64),
        replace(TWO, q_slots=2, max_concurrent_steps=3),
    ),
    "the wait for the products with values behind the softmax": (P(1, 70, 330, 1, 1, 64), replace(TWO, pv_wait="late")),
    "row sums by lanes, turns": (P(1, 200, 330, 1, 1, 64), replace(TWO, pv_wait="half", turns="products")),
    "row sums by lanes, turns of three, causal, sinks, lengths": (
        P(2, 200, 330, 1, 1, 64, causal=True, sinks=True, lengths=True),
        replace(THREE, pv_wait="half", turns="products"),
    ),
    "rescaled by condition, head_dim of 256, causal, sinks": (
        P(1, 70, 330, 1, 1, 256, causal=True, sinks=True),
        replace(BASE, pv_wait="late", rescale="conditional"),
    ),
    "rescaled by condition, many masked tiles, lengths": (
        P(2, 70, 330, 1, 1, 64, causal=True, window_left=200, lengths=True),
        replace(BASE, rescale="conditional"),
    ),
    "three warpgroups, keys in whole tiles, float16": (P(1, 200, 192, 1, 1, 64, "float16"), THREE),
    "tiles of 192 keys, the last one short, a pipeline longer than all": (
        P(1, 64, 250, 2, 1, 64),
        replace(BASE, tile_kv=192, max_concurrent_steps=4),
    ),
    "head_dim of 72, computed as 80, two warpgroups": (P(1, 70, 130, 2, 2, 72), TWO),
    "head_dim of 40, computed as 64, lengths, three heads": (P(2, 70, 130, 3, 3, 40, lengths=True), BASE),
    "head_dim of 200, computed as 224, a head of keys for two": (P(1, 70, 70, 4, 2, 200), BASE),
    "values of 72 beside keys of 104, keys in whole tiles": (P(1, 64, 128, 2, 2, 104, v_head_dim=72), BASE),
    "one head of keys of 40, too narrow for a copy": (P(1, 64, 64, 2, 1, 40), BASE),
    "three query stages, lengths": (P(3, 150, 130, 2, 1, 64, lengths=True), replace(BASE, q_slots=3)),
    "head_dim of 256": (P(1, 10, 70, 1, 1, 256), BASE),
    "head_dim of 96 in narrow panels, odd heads, two warpgroups, causal": (P(1, 70, 130, 3, 1, 96, causal=True), TWO),
    "head_dim of 80, the wait for the products behind the softmax": (P(1, 70, 200, 1, 1, 80), replace(BASE, pv_wait="late")),
    "head_dim of 112 in seven panels, lengths, sinks": (P(2, 70, 130, 2, 2, 112, lengths=True, sinks=True), BASE),
    "head_dim of 160, segments, two query stages": (P(1, 70, 130, 2, 1, 160, segments=True), replace(BASE, q_slots=2)),
    "head_dim of 192, bias, soft cap": (P(1, 70, 70, 1, 1, 192, bias="bfloat16", soft_cap=True), BASE),
    "head_dim of 224, float16": (P(1, 70, 70, 1, 1, 224, "float16"), BASE),
    "values of 128 beside keys of 192, lengths, causal": (
        P(2, 70, 130, 2, 1, 192, lengths=True, causal=True, v_head_dim=128),
        BASE,
    ),
    "values of 40 beside keys of 90, both padded": (P(1, 70, 70, 2, 1, 90, v_head_dim=40), BASE),
    "one row, one key": (P(1, 1, 1, 1, 1, 64, causal=True), BASE),
    # masks
    "causal, aligned, wide tiles that divide the keys": (P(1, 256, 256, 1, 1, 64, causal=True), replace(TWO, tile_kv=128)),
    "causal, fewer keys, so that the first rows see none, soft cap": (
        P(1, 150, 70, 1, 1, 64, causal=True, soft_cap=True),
        BASE,
    ),
    "window to both sides": (P(1, 200, 260, 1, 1, 64, window_left=70, window_right=20), TWO),
    "window, causal, of less than a tile": (P(1, 200, 200, 1, 1, 64, causal=True, window_left=10), replace(BASE, q_slots=2)),
    "small window, three warpgroups that see other keys, blocks with several tiles": (
        P(1, 333, 400, 4, 2, 64, window_left=20, window_right=10),
        replace(THREE, q_slots=2, max_concurrent_steps=2),
    ),
    "the same with one stage of a bias, fewer than the last blocks that rows pass over": (
        P(1, 333, 400, 4, 2, 128, window_left=20, window_right=10, bias="float32"),
        replace(THREE, q_slots=2),
    ),
    "window of which most keys need no mask, three warpgroups": (P(1, 200, 700, 1, 1, 64, causal=True, window_left=400), THREE),
    "lengths, causal, window, top left": (P(2, 70, 150, 1, 1, 64, "bfloat16", True, 40, -1, "top_left", lengths=True), BASE),
    "segments, causal, odd lengths": SEGMENTS,
    "segments, causal, six tiles of which each block has one": (P(1, 150, 210, 3, 1, 64, segments=True, causal=True), TWO),
    "segments, causal, eight tiles in three blocks": (P(2, 150, 210, 2, 1, 64, segments=True, causal=True), TWO),
    "sinks, grouped heads, lengths, causal": (P(2, 70, 70, 2, 1, 64, causal=True, lengths=True, sinks=True), BASE),
    # bias
    "bias, float32, two warpgroups": (P(1, 70, 70, 1, 1, 64, bias="float32"), TWO),
    "bias, float16, soft cap, window, three steps": (
        P(1, 10, 130, 1, 1, 64, "float16", bias="float16", soft_cap=True, window_left=100),
        replace(BASE, max_concurrent_steps=3),
    ),
    "bias in fewer stages than keys": (P(1, 70, 200, 1, 1, 256, bias="float32"), TWO),
    "bias before the soft cap, causal": (
        P(1, 70, 130, 2, 1, 64, bias="bfloat16", soft_cap=True, soft_cap_after_bias=True, causal=True),
        TWO,
    ),
    "everything": (P(2, 70, 150, 1, 1, 64, "bfloat16", True, 90, -1, "bottom_right", True, True, "bfloat16", True, True), BASE),
}


FORWARD_IN_ALL = [  # what others show together or one by one
    "two query stages, grouped heads",
    "row sums by lanes, turns of three, causal, sinks, lengths",
    "rescaled by condition, many masked tiles, lengths",
    "three warpgroups, keys in whole tiles, float16",
    "causal, aligned, wide tiles that divide the keys",
    "window, causal, of less than a tile",
    "window of which most keys need no mask, three warpgroups",
    "bias, float32, two warpgroups",
    "head_dim of 80, the wait for the products behind the softmax",
    "head_dim of 200, computed as 224, a head of keys for two",
    "values of 72 beside keys of 104, keys in whole tiles",
    "head_dim of 112 in seven panels, lengths, sinks",
    "head_dim of 160, segments, two query stages",
    "head_dim of 192, bias, soft cap",
    "head_dim of 224, float16",
    "values of 40 beside keys of 90, both padded",
    "one row, one key",
    "sinks, grouped heads, lengths, causal",
    "bias, float16, soft cap, window, three steps",
    "head_dim of 256",  # a bias in fewer stages than keys
    "window to both sides",  # a small window
    "causal, fewer keys, so that the first rows see none, soft cap",  # lengths of zero; everything
    "lengths, causal, window, top left",  # what jax's attention aligns by
    "bias before the soft cap, causal",  # a bias that hides keys
]


def test_nan_stays_in_its_batch_entry():
    """Whose last tiles reach into the next one."""
    problem, config = MANY_TILES
    q, k, v, options = cases.arguments(problem)
    out, lse = interpreted(FORWARD, problem, config, (*(x.at[1].set(jnp.nan) for x in (q, k, v)), options))
    wanted = cases.truth(q, k, v)
    assert np.isnan(float64(out)[1]).all()
    assert np.isnan(lse[1]).all()
    for b in (0, 2):
        np.testing.assert_allclose(float64(out)[b], wanted["out"][b], atol=2e-2)
        np.testing.assert_allclose(lse[b], wanted["lse"][b], atol=1e-4)


def test_large_scores(assert_near):
    q, *others = cases.arguments(MANY_TILES[0])
    assert_forward(*MANY_TILES, assert_near, (q * 1000, *others))


@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_output_is_rescaled_by_condition_where_scores_grow(dtype, assert_near):
    """Blocks come from the last one on: by less than the threshold in some rows, by far more in others, or not at all."""
    problem = P(1, 70, 330, 2, 1, 64, dtype)
    config = replace(TWO, pv_wait="half", turns="products", rescale="conditional")
    q, k, v, options = cases.arguments(problem)
    growth = jnp.linspace(12, 0.5, 330)[None, :, None, None]  # of keys, to the first one
    rows = jnp.where(jnp.arange(70) % 3 == 0, 0.1, 1.0)[None, :, None, None]
    assert_forward(problem, config, assert_near, ((q * rows).astype(q.dtype), (k * growth).astype(k.dtype), v, options))


@pytest.mark.parametrize("name", thorough.cases(FORWARD_CASES, FORWARD_IN_ALL))
def test_forward_kernel_is_right_and_has_no_race(name, assert_near):
    assert_forward(*FORWARD_CASES[name], assert_near)


def changed(problem: Any, **fields: Any) -> tuple[Any, ...]:
    """The arrays of `problem`, some fields of their `Inputs` replaced."""
    q, k, v, *rest = cases.arguments(problem)
    return q, k, v, *replace(Inputs.of(problem, tuple(rest)), **fields).arrays()


LENGTHS = jnp.array([0, 70, 100, -5]), jnp.array([100, 0, 200, -3])  # of 70 and 100 tokens


def hiding_bias() -> jax.Array:
    """As of a boolean mask for 70 rows and 200 keys: whole tiles of -inf first, last and between, and in some rows all."""
    bias = np.random.default_rng(0).standard_normal((1, 1, 70, 200))
    bias[..., 64:128] = -np.inf
    bias[..., :5, :64] = bias[..., 5:9, 128:] = bias[..., 9:12, :] = -np.inf
    return jnp.asarray(bias, jnp.bfloat16)


def test_lengths_of_zero_and_out_of_range(assert_near):
    problem = P(4, 70, 100, 1, 1, 64, lengths=True, causal=True)
    assert_forward(problem, BASE, assert_near, changed(problem, lengths=LENGTHS))


def nan_from(q_end: int, kv_end: int) -> Callable[..., Any]:
    """Fills q, k and v from there on: the weight of a padded value is zero, and zero times NaN is NaN."""
    return lambda arrays: tuple(x.at[:, end:].set(jnp.nan) for x, end in zip(arrays, (q_end, kv_end, kv_end)))


def test_nan_in_padding_has_no_say(assert_near):
    problem = P(2, 70, 128, 1, 1, 64, lengths=True, causal=True)  # whole tiles of keys, that lengths cut
    arrays = changed(problem, lengths=(jnp.full(2, 40, jnp.int32), jnp.full(2, 70, jnp.int32)))
    assert_forward(problem, BASE, assert_near, arrays, padding=nan_from(40, 70))


def test_segments_in_any_order_that_some_rows_share_with_no_key(assert_near):
    problem, config = SEGMENTS
    rng = np.random.default_rng(0)
    ids = jnp.asarray(rng.integers(-1, 4, (1, 150)), jnp.int32), jnp.asarray(rng.integers(0, 5, (1, 210)), jnp.int32)
    assert_forward(problem, config, assert_near, changed(problem, segments=ids))


@pytest.mark.parametrize("cap", [{}, {"soft_cap": True, "soft_cap_after_bias": True}], ids=["", "before the soft cap"])
def test_bias_that_hides_keys_and_whole_rows(cap, assert_near):
    problem = P(1, 70, 200, 2, 1, 64, bias="bfloat16", **cap)
    assert_forward(problem, BASE, assert_near, changed(problem, bias=hiding_bias()))


@pytest.mark.parametrize("seed", thorough.seeds(1, 4))
def test_random_legal_config_is_right_and_has_no_race(seed, assert_near):
    rng = random.Random(seed)
    problem = P(1, rng.randint(1, 150), rng.randint(1, 200), 1, 1, rng.choice([64, 128]), causal=rng.random() < 0.5)
    space = FORWARD.space(problem, FEW_SMS)
    drawn = (FlashAttentionConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    config = next(c for c in drawn if FORWARD.check(problem, c, FEW_SMS) is None)
    assert_forward(problem, config, assert_near)


def test_default_config_is_right_on_a_gpu_of_full_size(assert_near):
    problem, h200 = P(1, 150, 150, 2, 1, 64, causal=True), gpu.find("h200")
    assert_forward(problem, FORWARD.default(problem, h200), assert_near, device=h200)


# --- the backward kernels

B = BACKWARD.Problem

GROUPED = B(1, 70, 130, 4, 2, 64, "float16"), FUSED_64

BACKWARD_CASES: dict[str, tuple[Any, Any]] = {
    "odd lengths, grouped heads, float16": GROUPED,
    "bias before the soft cap, with its gradient": (
        B(1, 70, 130, 2, 1, 64, bias="bfloat16", soft_cap=True, soft_cap_after_bias=True, bias_grad=True),
        one_step(FUSED_64),
    ),
    "bias before the soft cap, in two kernels": (
        B(1, 70, 70, 1, 1, 256, bias="bfloat16", soft_cap=True, soft_cap_after_bias=True, deterministic=True),
        SPLIT_256,
    ),
    "head_dim padded, soft cap": (B(1, 70, 130, 1, 1, 72, soft_cap=True), FUSED_128),
    "head_dim of 96, odd heads, causal": (B(1, 70, 130, 3, 1, 96, causal=True), FUSED_128),
    "head_dim of 80, bias with gradient": (B(1, 70, 130, 1, 1, 80, bias="bfloat16", bias_grad=True), one_step(FUSED_128)),
    "head_dim of 112, segments": (B(1, 70, 130, 2, 1, 112, segments=True), FUSED_128),
    "head_dim of 112, split, lengths": (B(2, 70, 130, 2, 1, 112, lengths=True, deterministic=True), SPLIT_128),
    "head_dim of 96, values of 64, split, lengths": (
        B(2, 70, 130, 2, 1, 96, lengths=True, v_head_dim=64, deterministic=True),
        SPLIT_128,
    ),
    "head_dim of 160, window": (B(1, 70, 130, 1, 1, 160, window_left=20), SPLIT_256),
    "values of 128 beside keys of 192, causal, lengths": (
        B(2, 70, 100, 2, 1, 192, causal=True, lengths=True, v_head_dim=128),
        SPLIT_256,
    ),
    "values of 40 beside keys of 90, both padded": (B(1, 70, 70, 1, 1, 90, v_head_dim=40), FUSED_128),
    "one row, one key": (B(1, 1, 1, 1, 1, 64, causal=True), FUSED_64),
    "causal, aligned": (B(1, 256, 256, 1, 1, 64, causal=True), FUSED_64),
    "causal, fewer keys, so that the first rows see none": (B(1, 270, 130, 1, 1, 64, causal=True), FUSED_64),
    "window to both sides": (B(1, 200, 260, 1, 1, 64, window_left=70, window_right=20), FUSED_64),
    "keys that no row sees": (B(1, 10, 300, 1, 1, 128, window_left=10), FUSED_128),
    "lengths, causal, window": (B(2, 70, 150, 1, 1, 128, causal=True, window_left=40, lengths=True), FUSED_128),
    "segments, causal, more keys": (B(1, 150, 210, 1, 1, 128, segments=True, causal=True), FUSED_128),
    "bias with gradient, keys in whole tiles": (B(1, 70, 256, 2, 1, 64, bias="bfloat16", bias_grad=True), one_step(FUSED_64)),
    "bias with gradient of all batch entries, one head of keys, causal, window": (
        B(2, 70, 130, 2, 1, 128, causal=True, window_left=50, bias="float32", bias_grad=True),
        one_step(FUSED_128),
    ),
    # query heads of a head of keys shared out among thread blocks
    "group in two parts, head_dim of 96, causal": (B(1, 70, 130, 4, 1, 96, causal=True), replace(FUSED_128, group_splits=2)),
    "group in parts, bias with gradient": (
        B(1, 70, 130, 4, 2, 64, bias="bfloat16", bias_grad=True),
        replace(one_step(FUSED_64), group_splits=2),
    ),
    "group in three parts, head_dim of 256, lengths": (
        B(2, 70, 70, 3, 1, 256, lengths=True),
        replace(SPLIT_256, group_splits=3),
    ),
    "group in parts, head_dim of 80 as 128, dq a step later, segments": (
        B(1, 200, 150, 4, 2, 80, segments=True),
        replace(AHEAD_128, group_splits=2),
    ),
    # query heads in parts that differ by one
    "group in parts of one and two heads, bias with gradient": (
        B(1, 70, 130, 6, 2, 64, bias="bfloat16", bias_grad=True),
        replace(one_step(FUSED_64), group_splits=2),
    ),
    "group in unequal parts, head_dim of 192, two entries": (B(2, 70, 70, 5, 1, 192), replace(SPLIT_256, group_splits=3)),
    "group in unequal parts, dq a step later, lengths": (
        B(2, 200, 150, 6, 2, 128, lengths=True),
        replace(AHEAD_128, group_splits=2),
    ),
    "group in unequal parts, head_dim of 64, dq a step later, causal, segments": (
        B(1, 200, 150, 5, 1, 64, causal=True, segments=True),
        replace(AHEAD_64, group_splits=4),
    ),
    # dk and dq a step after the scores
    "dq a step later, causal, odd lengths, grouped heads": (B(1, 200, 150, 2, 1, 128, causal=True), AHEAD_128),
    "dq a step later, lengths, window, two steps": (
        B(2, 70, 150, 1, 1, 128, causal=True, window_left=40, lengths=True),
        replace(AHEAD_128, max_concurrent_steps=2),
    ),
    "dq a step later, segments, more steps than there are": (
        B(1, 150, 210, 1, 1, 112, "float16", segments=True),
        AHEAD_128,
    ),
    "dq a step later, dk from registers, blocks apart, rows cut": (
        B(2, 200, 260, 2, 1, 128),
        replace(AHEAD_128, q_order="apart", dk_operand="registers"),
    ),
    "dq a step later, head_dim of 64, causal, odd lengths, grouped heads": (B(1, 200, 330, 2, 1, 64, causal=True), AHEAD_64),
    "dq a step later, head_dim of 64, lengths, window": (
        B(2, 70, 150, 1, 1, 64, causal=True, window_left=40, lengths=True),
        AHEAD_64,
    ),
    "dq a step later, head_dim of 64, segments, blocks apart, two steps": (
        B(1, 200, 520, 1, 1, 64, "float16", segments=True),
        replace(AHEAD_64, q_order="apart", max_concurrent_steps=2),
    ),
    "dq a step later, head_dim of 64, causal, two places for kv blocks": (
        B(1, 200, 520, 2, 2, 64, causal=True),
        replace(AHEAD_64, q_order="apart", kv_slots=2),
    ),
    "dq a step later, lengths, kv blocks handed out": (B(2, 200, 330, 2, 2, 64, lengths=True), AHEAD_64),
    "dq a step later, lengths, kv blocks handed out, two places for them": (
        B(3, 200, 200, 2, 2, 64, lengths=True),
        replace(AHEAD_64, q_order="apart", kv_slots=2, max_concurrent_steps=2),
    ),
    # dq added in turns
    "in turns, causal, fewer rows, grouped heads": (
        B(1, 200, 330, 2, 1, 128, causal=True, deterministic=True),
        replace(AHEAD_128, q_order="apart"),
    ),
    "in turns, a circle, blocks cut, float16": (
        B(1, 330, 260, 1, 1, 128, "float16", deterministic=True),
        replace(AHEAD_128, q_order="apart", dk_operand="registers"),
    ),
    "in turns, window to both sides, grouped heads": (
        B(1, 330, 520, 2, 1, 128, window_left=150, window_right=40, deterministic=True),
        replace(AHEAD_128, q_order="apart"),
    ),
    "in turns, head_dim of 64, causal": (
        B(1, 330, 520, 1, 1, 64, causal=True, deterministic=True),
        replace(AHEAD_64, q_order="apart"),
    ),
    "in turns, lengths, head_dim of 64": (
        B(2, 330, 300, 1, 1, 64, lengths=True, deterministic=True),
        replace(AHEAD_64, q_order="apart", max_concurrent_steps=2),
    ),
    "in turns, segments, causal, fewer keys": (
        B(1, 330, 260, 1, 1, 128, causal=True, segments=True, deterministic=True),
        replace(AHEAD_128, q_order="apart"),
    ),
    # two kernels, and sums in one order
    "split, odd lengths, grouped heads, three steps": (
        B(1, 130, 150, 2, 1, 64, deterministic=True),
        replace(SPLIT_64, max_concurrent_steps=3),
    ),
    "split, causal, fewer keys, lengths, soft cap": (
        B(2, 100, 70, 1, 1, 128, deterministic=True, causal=True, lengths=True, soft_cap=True),
        SPLIT_128,
    ),
    "split, segments, causal, more keys": (B(1, 150, 210, 1, 1, 64, deterministic=True, segments=True, causal=True), SPLIT_64),
    "split, bias with gradient, window to both sides": (
        B(1, 150, 200, 1, 1, 64, window_left=40, window_right=20, bias="bfloat16", bias_grad=True, deterministic=True),
        one_step(SPLIT_64),
    ),
    "head_dim of 256, keys in whole tiles": (B(1, 70, 128, 2, 1, 256), SPLIT_256),
    "head_dim of 256, causal, lengths, segments, soft cap, float16": (
        B(2, 70, 70, 1, 1, 256, "float16", causal=True, lengths=True, segments=True, soft_cap=True),
        SPLIT_256,
    ),
    "head_dim padded to 256, bias with gradient, window": (
        B(1, 70, 130, 1, 1, 136, window_left=20, bias="bfloat16", bias_grad=True),
        one_step(SPLIT_256),
    ),
}


BACKWARD_IN_ALL = [  # what others show together or one by one
    "head_dim padded to 256, bias with gradient, window",
    "split, odd lengths, grouped heads, three steps",
    "causal, fewer keys, so that the first rows see none",
    "bias before the soft cap, in two kernels",
    "one row, one key",
    "causal, aligned",
    "dq a step later, lengths, window, two steps",
    "dq a step later, segments, more steps than there are",
    "window to both sides",
    "keys that no row sees",
    "split, segments, causal, more keys",
    "lengths, causal, window",
    "bias with gradient, keys in whole tiles",
    "head_dim of 256, keys in whole tiles",
    "head_dim of 256, causal, lengths, segments, soft cap, float16",
    "odd lengths, grouped heads, float16",
    "head_dim padded, soft cap",
    "head_dim of 80, bias with gradient",
    "head_dim of 112, segments",
    "head_dim of 96, values of 64, split, lengths",
    "head_dim of 160, window",
    "values of 40 beside keys of 90, both padded",
    "head_dim of 96, odd heads, causal",  # a group in two parts
    "dq a step later, head_dim of 64, causal, two places for kv blocks",
    "dq a step later, lengths, kv blocks handed out, two places for them",
    "dq a step later, head_dim of 64, lengths, window",  # in turns, lengths; in turns, window
    "in turns, segments, causal, fewer keys",  # in turns, causal; dq a step later, segments
]


@pytest.mark.parametrize("name", thorough.cases(BACKWARD_CASES, BACKWARD_IN_ALL))
def test_backward_kernel_is_right_and_has_no_race(name, assert_near):
    assert_backward(*BACKWARD_CASES[name], assert_near)


@thorough.only_in_all
def test_gradient_of_the_lse(assert_near):
    assert_backward(*GROUPED, assert_near, lse_grad=np.random.default_rng(0).standard_normal((1, 4, 70)))


def test_gradients_beside_sinks_which_the_lse_alone_tells_of(assert_near):
    lse_grad = np.random.default_rng(0).standard_normal((1, 4, 70))
    assert_backward(*GROUPED, assert_near, lse_grad=lse_grad, sinks=np.array([0.5, 3.0, -2.0, 6.0]))


def test_the_backward_kernels_are_the_same_with_sinks():
    problem, config = GROUPED
    arrays = (*(cases.arguments(problem)[i] for i in (0, 1, 2, 0)), *[jnp.zeros((1, 4, 70))] * 2, jnp.zeros(3))

    def traced(problem: Any, *sinks: Any) -> str:
        return str(jax.make_jaxpr(lambda *x: BACKWARD.run(problem, config, FEW_SMS, *x, *sinks, interpret=True))(*arrays))

    assert traced(replace(problem, sinks=True), jnp.zeros((1, 4))) == traced(problem)


def test_backward_with_lengths_of_zero_and_out_of_range(assert_near):
    problem = B(4, 70, 100, 1, 1, 64, lengths=True, causal=True)
    assert_backward(problem, FUSED_64, assert_near, changed(problem, lengths=LENGTHS))


@pytest.mark.parametrize("config", [FUSED_64, pytest.param(SPLIT_64, marks=thorough.only_in_all)], ids=["fused", "split"])
def test_nan_in_padding_has_no_say_in_gradients(config, assert_near):
    problem = B(1, 128, 128, 1, 1, 64, lengths=True, causal=True, deterministic=config is SPLIT_64)
    arrays = changed(problem, lengths=(jnp.full(1, 40, jnp.int32), jnp.full(1, 70, jnp.int32)))
    assert_backward(problem, config, assert_near, arrays, padding=nan_from(40, 70))


def test_gradients_of_rows_that_see_nan_are_nan():
    problem, config = GROUPED
    q, k, v, options = cases.arguments(problem)
    lse = jnp.zeros((1, 4, 70), jnp.float32).at[:, :2].set(jnp.nan)  # as the forward pass gives it
    given = q, k.at[0, 100, 0].set(jnp.nan), v, q, lse, jnp.zeros_like(lse), options
    dq, dk, dv = (np.isnan(float64(x)) for x in interpreted(BACKWARD, problem, config, given))
    for x, heads in ((dq, 2), (dk, 1), (dv, 1)):
        assert x[:, :, :heads].all()
        assert not x[:, :, heads:].any()


def test_nan_that_a_mask_hides_from_all_rows_has_no_say(assert_near):
    rows, keys = np.arange(70) % 7 != 3, np.arange(100) % 5 != 2
    mask, arrays = rows[:, None] & keys[None, :], cases.qkv(cases.Shape(1, 70, 100, 1, 1, 64), "bfloat16")
    dirty = [jnp.where(kept[:, None, None], x, jnp.nan) for x, kept in zip(arrays, (rows, keys, keys))]
    out_grad = cases.normal(9, *arrays[0].shape, dtype="bfloat16")
    f = functools.partial(
        flash_attention, mask=mask, backend="interpret", config=BASE, backward_config=one_step(FUSED_64), return_lse=True
    )
    with quiet_interpreter():
        (out, lse), pull = jax.vjp(f, *dirty)
        gradients = pull((out_grad, jnp.zeros_like(lse)))
    wanted = cases.truth(*arrays, mask=mask, out_grad=out_grad)
    np.testing.assert_array_equal(np.isneginf(lse), np.isneginf(wanted["lse"]))
    for found, name in zip((out, *gradients), ["out", "q", "k", "v"]):
        assert_near(found, wanted[name], 2 * TOLERANCE["bfloat16"])
    assert not engine.races_found()


def test_backward_with_a_bias_that_hides_keys_and_whole_rows(assert_near):
    problem = B(1, 70, 200, 1, 1, 64, bias="bfloat16")
    assert_backward(problem, one_step(FUSED_64), assert_near, changed(problem, bias=hiding_bias()))


# --- what passes above is not passed by a detector that is off


class Hasty(Pipeline):
    """Fills a stage while consumers may still read it."""

    def fill(self, step: Any, copy: Callable[[Any, Any], None]) -> None:
        stage = jax.lax.rem(step, jnp.int32(self.stages))
        copy(stage, self.full.at[stage])


def many_tiles() -> Any:
    """In which the detector finds nothing as the kernel is: see the first of the cases."""
    problem, config = MANY_TILES
    return FORWARD.run(problem, config, FEW_SMS, *cases.arguments(problem), interpret=True)


def test_detector_finds_a_slot_that_is_filled_before_it_was_released(monkeypatch):
    monkeypatch.setattr(importlib.import_module("mgpu_ops.attention.forward"), "Pipeline", Hasty)
    assert has_a_race(many_tiles)


def test_detector_finds_a_store_whose_place_is_filled_again_too_early(monkeypatch):
    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", lambda *_, **__: None)
    assert has_a_race(many_tiles)
