"""What a user of `mgpu_ops.fp8_moe` relies on: values and gradients of any routing, transforms, meshes, what is refused."""

from __future__ import annotations

import functools
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mgpu_ops import (
    Fp8GatedState,
    Fp8State,
    fp8_grouped_matmul,
    fp8_matmul,
    fp8_moe,
    fp8_moe_experts,
    moe_combine,
    moe_dispatch,
    moe_experts,
    moe_route,
)
from mgpu_ops.core import aot
from mgpu_ops.fp8_moe import padded_rows, sorted_and_padded
from tests import thorough
from tests.arrays import normal
from tests.mgpu_ops.test_moe import dense, layer

BF16, F32 = jnp.bfloat16, jnp.float32
NAMES = "out", "x", "router_logits", "w_gate", "w_up", "w_down"
# The norm of errors as a share of what is exact: 0.07 of results and 0.1 of gradients were measured.
OF_RESULTS, OF_GRADIENTS = 0.12, 0.16
ALIKE = 0.05  # two programs: some numbers are rounded to their other neighbour


def share(found: Any, wanted: Any) -> float:
    """The error's norm as a share of what is wanted."""
    found, wanted = (np.asarray(x).astype(np.float64) for x in (found, wanted))
    assert found.shape == wanted.shape
    norm = np.linalg.norm(wanted)
    return float(np.linalg.norm(found - wanted) / norm) if norm else float(np.linalg.norm(found))


def with_gradients(function: Callable[..., jax.Array], *arrays: jax.Array) -> list[jax.Array]:
    """The result, and the gradients of all arrays that are floats of its sum with random weights."""
    of = [i for i, array in enumerate(arrays) if jnp.issubdtype(array.dtype, jnp.floating)]

    def value(*arrays: jax.Array) -> Any:
        out = function(*arrays)
        return jnp.sum(out.astype(F32) * normal(9, *out.shape)), out

    grads, out = jax.jit(jax.grad(value, of, has_aux=True))(*arrays)
    assert [(g.dtype, g.shape) for g in grads] == [(arrays[i].dtype, arrays[i].shape) for i in of]
    return [out, *grads]


def exact(top_k: int, *arrays: jax.Array, **options: Any) -> list[jax.Array]:
    """Those of the layer in which every expert computes every token, in float32."""
    return with_gradients(lambda *a: dense(*a, top_k, **options), *(x.astype(F32) for x in arrays))


def assert_right(found: list[jax.Array], wanted: list[jax.Array]) -> None:
    for name, one, other in zip(NAMES, found, wanted, strict=True):
        assert share(one, other) < (OF_RESULTS if name == "out" else OF_GRADIENTS), name


# --- values and gradients


@pytest.mark.parametrize(
    ("x_dtype", "w_dtype", "top_k", "norm_topk_prob"),
    [
        ("bfloat16", "bfloat16", 2, True),
        ("bfloat16", "float32", 3, False),
        pytest.param("float32", "float32", 2, True, marks=thorough.only_in_all),
        pytest.param("float16", "bfloat16", 2, False, marks=thorough.only_in_all),
        pytest.param("bfloat16", "bfloat16", 5, True, marks=thorough.only_in_all),
    ],
)
def test_values_and_gradients_are_those_of_the_dense_layer_within_rounding(
    x_dtype: str, w_dtype: str, top_k: int, norm_topk_prob: bool
) -> None:
    x, logits, *matrices = layer(70, 48, 80, 5, F32)
    arrays = (x.astype(x_dtype), logits, *(w.astype(w_dtype) for w in matrices))
    found = with_gradients(functools.partial(fp8_moe, top_k=top_k, norm_topk_prob=norm_topk_prob), *arrays)
    assert found[0].dtype == x_dtype
    assert_right(found, exact(top_k, *arrays, norm_topk_prob=norm_topk_prob))


def of_grouped(x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> jax.Array:
    """The layer of products by `fp8_grouped_matmul`: gradients of matrices are of 16 bits, and rows are weighted at the end."""
    weights, experts = moe_route(logits, 2)
    rows, sizes, order, positions = moe_dispatch(x, experts, gate.shape[0])
    product = functools.partial(fp8_grouped_matmul, group_sizes=sizes, scheme="tensor")
    hidden = jax.nn.silu(product(rows, gate)) * product(rows, up)
    scaled = product(hidden, down) * weights.reshape(-1)[order][:, None]
    return moe_combine(scaled, order, positions, out_dtype=x.dtype)


def of_products(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
    """The layer of products by `fp8_matmul`, of all tokens and each expert: as in `fp8_moe` all nine are of 8 bits."""
    weights, experts = moe_route(logits, 2)
    parts = []
    for number, (gate, up, down) in enumerate(zip(*matrices, strict=True)):
        weight = jnp.sum(jnp.where(experts == number, weights, 0), 1, keepdims=True)
        hidden = jax.nn.silu(fp8_matmul(x, gate)) * fp8_matmul(x, up) * weight
        parts.append(fp8_matmul(hidden.astype(x.dtype), down).astype(F32))
    return functools.reduce(jnp.add, parts).astype(x.dtype)


def test_it_is_not_farther_from_what_is_exact_than_products_one_by_one() -> None:
    arrays = layer(40, 32, 48, 3)
    wanted, found = exact(2, *arrays), with_gradients(functools.partial(fp8_moe, top_k=2), *arrays)
    of_experts, of_each = (with_gradients(f, *arrays) for f in (of_grouped, of_products))
    for name, one, by_expert, each, truth in zip(NAMES, found, of_experts, of_each, wanted, strict=True):
        for other in [by_expert, each] if name in ("out", "x") else [each]:
            assert share(one, truth) < 1.25 * share(other, truth), name


@pytest.mark.parametrize(
    ("which", "weight"),
    [
        ("some", 1e-30),
        ("all", 0.0),
        *(pytest.param(*case, marks=thorough.only_in_all) for case in (("some", 0.0), ("all", 1e-30))),
    ],
)
def test_gradients_of_weights_that_are_zero_or_tiny_are_right(which: str, weight: float) -> None:
    """They are no quotients of what was multiplied by the weights."""
    x, weights, experts, *matrices = routed(40, np.random.default_rng(1).integers(0, 4, (40, 2)), 4)
    weights = weights.at[:, 1 if which == "some" else slice(None)].set(weight)

    def loss(f: Any, weights: jax.Array, x: jax.Array, *matrices: jax.Array) -> jax.Array:
        return jnp.sum(f(x, weights, experts, *matrices).astype(F32) * normal(9, 40, 32))

    found = jax.jit(jax.grad(functools.partial(loss, fp8_moe_experts)))(weights, x, *matrices)
    wanted = jax.jit(jax.grad(functools.partial(loss, moe_experts)))(weights, *(a.astype(F32) for a in (x, *matrices)))
    assert np.isfinite(found).all()
    assert share(found[:, 1], wanted[:, 1]) < OF_GRADIENTS
    assert share(found, wanted) < OF_GRADIENTS
    if weight == 0 and which == "all":
        assert not np.asarray(compiled(x, weights, experts, *matrices), np.float32).any()


# --- any routing


def routed(tokens: int, experts: jax.Array | np.ndarray, count: int, d: int = 32, hidden: int = 48) -> tuple[Any, ...]:
    """x, weights, experts and three matrices."""
    x, _, *matrices = layer(tokens, d, hidden, count)
    weights = jnp.asarray(np.random.default_rng(5).uniform(0.1, 1, experts.shape), F32)
    return x, weights, jnp.asarray(experts), *matrices


compiled = jax.jit(fp8_moe_experts)


def in_float32(*arrays: Any) -> list[jax.Array]:
    """`moe_experts` in float32, which is exact here, with its gradients."""
    return with_gradients(moe_experts, *(a if jnp.issubdtype(a.dtype, jnp.integer) else a.astype(F32) for a in arrays))


@hypothesis.given(data=strategies.data())
@thorough.examples(2)
def test_any_routing_gives_the_experts_results_and_gradients(data: Any) -> None:
    tokens = data.draw(strategies.sampled_from([1, 5, 40]))
    count = data.draw(strategies.sampled_from([1, 3, 6]))
    top_k = data.draw(strategies.integers(1, 4))
    chosen = np.random.default_rng(data.draw(strategies.integers(0, 99))).integers(-1, count + 1, (tokens, top_k))
    arrays = routed(tokens, chosen.astype(np.int32), count)  # a token may name an expert twice, and none
    found, wanted = with_gradients(fp8_moe_experts, *arrays), in_float32(*arrays)
    known = int(((chosen >= 0) & (chosen < count)).sum())
    typical = 2 * np.sqrt(known)  # that of few weights is a sum that may be near 0: its error is a share of what others are
    off = np.linalg.norm(np.asarray(found[2] - wanted[2]))
    assert off <= OF_GRADIENTS * max(typical, np.linalg.norm(wanted[2]))
    assert_right([*found[:2], wanted[2], *found[3:]], wanted)
    np.testing.assert_array_equal(np.asarray(found[2])[(chosen < 0) | (chosen >= count)], 0)
    for of_matrix in found[3:]:
        of_unused = np.asarray(of_matrix, np.float32)[~np.isin(np.arange(count), chosen)]
        assert not of_unused.any()


@pytest.mark.parametrize(
    ("tokens", "top_k", "experts"), [(200, 1, 4), (1, 4, 4), pytest.param(33, 4, 4, marks=thorough.only_in_all)]
)
def test_all_tokens_to_one_expert_one_token_and_all_experts(tokens: int, top_k: int, experts: int) -> None:
    x, logits, *matrices = layer(tokens, 32, 48, experts)
    logits = logits.at[:, 2].set(20) if top_k == 1 else logits
    arrays = x, logits, *matrices
    found, wanted = with_gradients(functools.partial(fp8_moe, top_k=top_k), *arrays), exact(top_k, *arrays)
    if top_k == 1:  # its weight is 1, whatever the logits are
        found[2] = wanted[2] = jnp.zeros(())
    assert_right(found, wanted)


def test_an_expert_without_tokens_changes_nothing_but_the_scale() -> None:
    """It may hold NaN, which counts for no scale."""
    x, logits, *matrices = layer(40, 32, 48, 4)
    logits = logits.at[:, 1].set(-30)
    poisoned = [w.at[1].set(jnp.nan) for w in matrices]
    found = with_gradients(lambda *a: fp8_moe(x, logits, *a, 2), *poisoned)
    for of_matrix in found[1:]:
        np.testing.assert_array_equal(of_matrix[1], 0)
    wanted = with_gradients(lambda *a: fp8_moe(x, logits, *a, 2), *(w.at[1].set(0) for w in matrices))
    for one, other in zip(found, wanted, strict=True):
        assert share(one, other) < ALIKE


def test_no_tokens() -> None:
    arrays = layer(0, 32, 48, 4)
    out, *grads = with_gradients(lambda *a: fp8_moe(*a, 2), *arrays)
    assert out.shape == (0, 32)
    assert not any(np.asarray(g, np.float32).any() for g in grads)


def test_an_index_that_no_int32_holds_names_no_expert() -> None:
    x, weights, _, *matrices = routed(2, np.zeros((2, 1), np.int32), 4)
    out = np.asarray(fp8_moe_experts(x, weights, np.array([[1], [2**32 + 1]]), *matrices), np.float32)
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize("where", thorough.cases(["x", "logits"], ["logits"]))
def test_nan_stays_in_its_token(where: str) -> None:
    x, logits, *matrices = layer(40, 32, 48, 4)
    x, logits = (x.at[7].set(jnp.nan), logits) if where == "x" else (x, logits.at[7].set(jnp.nan))

    def value(x: jax.Array, logits: jax.Array) -> Any:
        out = fp8_moe(x, logits, *matrices, 2)
        return jnp.sum(out.astype(F32) * normal(9, 40, 32)), out

    grads, out = jax.jit(jax.grad(value, (0, 1), has_aux=True))(x, logits)
    assert np.isnan(out[7]).all()
    for rows in (out, *grads):
        others = np.delete(np.asarray(rows, np.float32), 7, 0)
        assert np.isfinite(others).all()
        assert others.any(1).all()


# --- the order of rows


@hypothesis.given(
    tokens=strategies.integers(0, 300),
    top_k=strategies.integers(1, 4),
    count=strategies.integers(1, 9),
    seed=strategies.integers(0, 99),
)
@thorough.examples(8)
def test_assignments_are_sorted_by_expert_and_each_begins_at_a_multiple_of_128(
    tokens: int, top_k: int, count: int, seed: int
) -> None:
    experts = np.random.default_rng(seed).integers(-1, count + 1, (tokens, top_k)).astype(np.int32)
    if seed % 3 == 0:
        experts[:] = seed % count
    rows = padded_rows(experts.size, count)
    sizes, token, row = np.zeros(count, int), np.full(rows, tokens), np.full((tokens, top_k), rows)
    start = 0
    for expert in range(count):
        for t, j in np.argwhere(experts == expert):
            row[t, j] = start + sizes[expert]
            token[row[t, j]] = t
            sizes[expert] += 1
        start += -(-sizes[expert] // 128) * 128
    assert rows % 128 == 0
    assert start <= rows <= tokens * top_k + 127 * min(count, tokens * top_k)
    run = jax.jit(sorted_and_padded, static_argnums=1)
    for found in (run(experts, count) for _ in range(2)):
        for one, other in zip(found, (sizes, token, row), strict=True):
            assert one.dtype == jnp.int32
            np.testing.assert_array_equal(one, other)


# --- a share of the experts, and transforms


layer_of_two = jax.jit(functools.partial(fp8_moe, top_k=2))


def test_shares_of_the_experts_add_up_to_the_layer() -> None:
    x, logits, *matrices = layer(40, 32, 48, 4, F32)

    def of_shares(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
        arrays = x, *moe_route(logits, 2)
        parts = [
            fp8_moe_experts(*arrays, *(w[first:end] for w in matrices), num_experts=4, group_offset=first)
            for first, end in ((0, 3), (3, 4))
        ]
        return parts[0] + parts[1]

    arrays = x, logits, *matrices
    assert_right(with_gradients(of_shares, *arrays), exact(2, *arrays))
    whole = layer_of_two(*arrays)
    assert share(jax.jit(of_shares)(*arrays), whole) < 0.1  # each share has scales of its own
    every = jax.jit(lambda *a: fp8_moe_experts(*a, num_experts=9, group_offset=jnp.int32(3)))
    weights, experts = jax.jit(moe_route, static_argnums=1)(logits, 2)
    assert share(every(x, weights, experts + 3, *matrices), whole) < ALIKE


def test_a_token_of_no_expert_counts_for_no_scale() -> None:
    x, logits, *matrices = layer(40, 32, 48, 4)
    weights, experts = moe_route(logits, 2)
    experts = experts.at[:3].set(-1)

    @jax.jit
    def step(x: jax.Array, g: jax.Array) -> Any:
        out, back = jax.vjp(lambda x, *w: fp8_moe_experts(x, weights, experts, *w), x, *matrices)
        return out, *back(g)

    found, loud = step(x, x[::-1]), step(x.at[:3].set(1e4), x[::-1].at[:3].set(1e4))
    for one, other in zip(found, loud, strict=True):  # one program
        np.testing.assert_array_equal(one, other)
    np.testing.assert_array_equal(found[0][:3], 0)


@pytest.mark.parametrize("offset", [-(2**31), -2, 2, 6, 2**31 - 1])
def test_a_share_has_the_experts_that_moe_experts_gives_it_wherever_a_traced_offset_is(offset: int) -> None:
    """Also where it reaches beyond all experts: what names none of them adds nothing."""
    experts = np.array([[-(2**31)], [-1], [0], [1], [3], [5], [7], [8], [9], [2**31 - 1]], np.int32)
    x, weights, _, *matrices = routed(10, experts, 4)
    found, wanted = (f(x, weights, experts, *matrices, jnp.int32(offset)) for f in (of_share, of_share_in_16_bits))
    np.testing.assert_array_equal(*(np.asarray(out, np.float32).any(1) for out in (found, wanted)))
    assert share(found, wanted) < OF_RESULTS


@jax.jit
def of_share(*arrays: jax.Array) -> jax.Array:
    return fp8_moe_experts(*arrays[:6], num_experts=8, group_offset=arrays[6])


@jax.jit
def of_share_in_16_bits(*arrays: jax.Array) -> jax.Array:
    return moe_experts(*arrays[:6], num_experts=8, group_offset=arrays[6])


def test_leading_dimensions_are_tokens_and_vmap_has_scales_for_each() -> None:
    x, logits, *matrices = layer(24, 32, 48, 4)
    out = layer_of_two(x.reshape(2, 3, 4, 32), logits.reshape(2, 3, 4, 4), *matrices)
    assert share(out.reshape(24, 32), layer_of_two(x, logits, *matrices)) < ALIKE
    xs = jnp.stack([x, 64 * x])
    of_x = lambda x: with_gradients(lambda x, *w: fp8_moe(x, logits, *w, 2), x, *matrices)  # noqa: E731
    for mapped, *each in zip(jax.vmap(of_x)(xs), *map(of_x, xs), strict=True):
        for one, other in zip(mapped, each, strict=True):
            assert share(one, other) < ALIKE


def test_checkpoint_and_scan() -> None:
    x, logits, *matrices = layer(40, 32, 48, 4, F32)
    f = lambda x, *w: fp8_moe(x, logits, *w, 2)  # noqa: E731
    for saved, again in zip(with_gradients(f, x, *matrices), with_gradients(jax.checkpoint(f), x, *matrices), strict=True):
        assert share(saved, again) < ALIKE
    scanned = lambda x: jax.lax.scan(lambda x, _: (x + f(x, *matrices), None), x, length=2)[0]  # noqa: E731
    step = lambda x: x + f(x, *matrices)  # noqa: E731
    twice = lambda x: step(step(x))  # noqa: E731
    for one, other in zip(with_gradients(scanned, x), with_gradients(twice, x), strict=True):
        assert share(one, other) < ALIKE


X, WHOLE = PartitionSpec("x"), PartitionSpec()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_copies_of_gate_and_up_are_gone_before_the_gradients_of_matrices_are_there() -> None:
    """The memory that XLA plans, in experts' matrices of 8 bits: 7 of two layers, 7.6 with the gradients of matrices first."""
    tokens, experts, d, hidden = 1024, 8, 512, 2048

    def loss(x: jax.Array, layers: Any) -> jax.Array:
        for router, *matrices in layers:
            x += fp8_moe(x, x.astype(F32) @ router, *matrices, 2)
        return x.astype(F32).sum()

    x, up, down = (jax.ShapeDtypeStruct(of, BF16) for of in ((tokens, d), (experts, d, hidden), (experts, hidden, d)))
    matrices = jax.ShapeDtypeStruct((d, experts), F32), up, up, down
    planned = aot.program("h200", jax.grad(loss, 1), x, [matrices] * 2)
    assert planned.temporary_bytes <= 7.1 * experts * d * hidden


def four(kind: AxisType) -> jax.sharding.Mesh:
    return jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])


def test_inside_shard_map_shares_of_devices_add_up() -> None:
    """Each device gathers all tokens, computes its experts' part, and the parts are summed to each device's tokens."""
    arrays = layer(32, 32, 48, 8, F32)

    def shard(x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> jax.Array:
        x, *routes = (jax.lax.all_gather(y, "x", tiled=True) for y in (x, *moe_route(logits, 2)))
        first = jax.lax.axis_index("x") * matrices[0].shape[0]
        part = fp8_moe_experts(x, *routes, *matrices, num_experts=8, group_offset=first)
        return jax.lax.psum_scatter(part, "x", tiled=True)

    layer_of_devices = jax.shard_map(shard, mesh=four(AxisType.Auto), in_specs=(X,) * 5, out_specs=X)
    assert_right(with_gradients(layer_of_devices, *arrays), exact(2, *arrays))


TENSOR_PARALLEL = WHOLE, WHOLE, PartitionSpec(None, None, "x"), PartitionSpec(None, None, "x"), PartitionSpec(None, "x")


@pytest.mark.parametrize(
    ("kind", "specs"),
    [(AxisType.Auto, (X, X, WHOLE, WHOLE, WHOLE)), (AxisType.Auto, TENSOR_PARALLEL), (AxisType.Explicit, (X, X, *[WHOLE] * 3))],
    ids=["automatic, tokens", "automatic, columns", "explicit, tokens"],
)
def test_axes_of_a_mesh_change_the_result_within_rounding(kind: AxisType, specs: Any) -> None:
    """Automatic ones have one scale for all devices, explicit ones a scale for each device's tokens."""
    arrays, mesh = layer(40, 32, 48, 4), four(kind)
    placed = [jax.device_put(x, NamedSharding(mesh, spec)) for x, spec in zip(arrays, specs, strict=True)]
    weights = jax.device_put(normal(9, 40, 32), NamedSharding(mesh, specs[0]))

    def value(*arrays: jax.Array) -> Any:
        out = fp8_moe(*arrays, 2)
        return jnp.sum(out.astype(F32) * weights), out

    with jax.set_mesh(mesh):
        step = jax.jit(jax.grad(value, range(5), has_aux=True)).lower(*placed).compile()
        grads, out = step(*placed)
    assert_right([out, *grads], exact(2, *arrays))
    if kind == AxisType.Auto:
        assert max(map(share, [out, *grads], with_gradients(layer_of_two, *arrays))) < ALIKE
    if specs is TENSOR_PARALLEL:
        assert " all-gather(" not in step.as_text()
        assert [g.sharding.spec for g in grads[2:]] == [*specs[2:]]


# --- errors

OK = layer(8, 32, 48, 4)
ROUTED = OK[0], jnp.ones((8, 2)), jnp.zeros((8, 2), jnp.int32), *OK[2:]


def changed(i: int, array: Any, of: Any = OK) -> list[Any]:
    return [array if i == j else one for j, one in enumerate(of)]


def explicit() -> list[Any]:
    with_mesh = NamedSharding(four(AxisType.Explicit), WHOLE)
    return [jax.device_put(x, with_mesh) for x in OK]


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: fp8_moe(*changed(0, OK[0].astype(int)), 2), TypeError, "x has dtype int32: fp8_moe takes floats"),
        (
            lambda: fp8_moe(*(x if x is OK[1] else x.astype("float8_e4m3fn") for x in OK), 2),
            ValueError,
            "x is float8_e4m3fn: fp8_moe_experts quantizes bfloat16, float16, float32; cast it",
        ),
        (
            lambda: fp8_moe(*changed(3, OK[3].astype("float8_e5m2")), 2),
            ValueError,
            "x is bfloat16 and w_up is float8_e5m2: cast one",
        ),
        (lambda: fp8_moe(*changed(4, None), 2), TypeError, "w_down is None, which is no array"),
        (lambda: fp8_moe(*changed(0, OK[0][:7]), 2), ValueError, r"x\(7, 32\) and router_logits\(8, 4\) differ"),
        (lambda: fp8_moe(*changed(1, OK[1][:, :3]), 2), ValueError, r"router_logits\(8, 3\) are of 3 experts, w_gate.* of 4"),
        (lambda: fp8_moe(*changed(3, OK[3][..., :16]), 2), ValueError, r"w_gate\(4, 32, 48\) and w_up\(4, 32, 16\) differ"),
        (lambda: fp8_moe(*changed(4, OK[4].mT), 2), ValueError, r"w_gate\(4, 32, 48\) and w_down\(4, 32, 48\) do not fit x"),
        (lambda: fp8_moe(*OK, 5), ValueError, "top_k=5 is not from 1 to the 4 experts"),
        (lambda: fp8_moe(*OK, 1.5), TypeError, "top_k=1.5 is no integer"),
        (lambda: fp8_moe(*OK, 2, norm_topk_prob="no"), TypeError, "norm_topk_prob='no' is neither True nor False"),
        (lambda: fp8_moe(*OK, 2, spread="wide"), ValueError, "spread='wide' is not one of"),
        (lambda: fp8_moe(*OK, 2, backend="cuda"), ValueError, "backend='cuda'"),
        (
            lambda: fp8_moe_experts(*changed(1, jnp.ones((8, 3)), ROUTED)),
            ValueError,
            r"weights\(8, 3\) and experts\(8, 2\) differ: both are \[tokens, top_k\]",
        ),
        (
            lambda: fp8_moe_experts(*changed(2, jnp.zeros((8, 2)), ROUTED)),
            TypeError,
            "experts has dtype float32: it must hold integers",
        ),
        (
            lambda: fp8_moe_experts(*ROUTED, num_experts=8),
            ValueError,
            "num_experts=8 and group_offset=None: a share of the experts takes both",
        ),
        (
            lambda: fp8_moe_experts(*ROUTED, num_experts=2, group_offset=0),
            ValueError,
            "num_experts=2 is less than the 4 experts of w_gate",
        ),
        (
            lambda: fp8_moe_experts(*ROUTED, num_experts=8, group_offset=5),
            ValueError,
            "group_offset=5 is not from 0 to 4: group_sizes has 8 groups, of which w_gate has 4",
        ),
        (
            lambda: fp8_moe_experts(OK[0][:7], *ROUTED[1:]),
            ValueError,
            r"x\(7, 32\) and experts\(8, 2\): fp8_moe_experts takes \[tokens, d\] and \[tokens, top_k\]",
        ),
        (
            lambda: fp8_moe_experts(OK[0], jnp.ones(8), jnp.zeros(8, jnp.int32), *OK[2:]),
            ValueError,
            r"x\(8, 32\) and experts\(8,\): fp8_moe_experts takes \[tokens, d\] and \[tokens, top_k\]",
        ),
        (
            lambda: fp8_moe_experts(*ROUTED[:3], *(w[:0] for w in OK[2:])),
            ValueError,
            r"w_gate\(0, 32, 48\) has no experts: fp8_moe_experts takes at least one",
        ),
        (
            lambda: fp8_moe(*OK, 2, state=Fp8State.init()),
            TypeError,
            r"state is Fp8State.*: pass a mgpu_ops.Fp8GatedState, as Fp8GatedState.init\(\) makes it",
        ),
        (
            lambda: fp8_moe(*OK, 2, state=Fp8GatedState.init()._replace(up=None)),
            TypeError,
            "state.up is None: pass a mgpu_ops.Fp8State",
        ),
        (
            lambda: fp8_moe(*explicit(), 2, state=Fp8GatedState.init(2)),
            ValueError,
            "fp8_moe_experts has no state over explicit axes of a mesh: call it in jax.shard_map, or leave the state out",
        ),
        (
            lambda: jax.grad(lambda x: jax.grad(lambda x: fp8_moe(x, *OK[1:], 2).sum())(x).sum())(OK[0]),
            ValueError,
            "fp8_moe has a gradient, but no gradient of that",
        ),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(call: Callable[[], Any], error: Any, message: str) -> None:
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_float64_is_refused() -> None:
    with jax.enable_x64(True):
        wide = [x.astype("float64") for x in OK]
        with pytest.raises(ValueError, match=r"x is float64: fp8_moe_experts quantizes bfloat16, .*float32; cast it"):
            fp8_moe(*wide, 2)
        with pytest.raises(ValueError, match="x is bfloat16 and w_down is float64: cast one"):
            fp8_moe(*OK[:4], wide[4], 2)
