"""The mixture-of-experts layer and its parts: exact beside a dense layer in float64, in any routing, with gradients."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

import mgpu_ops
from mgpu_ops import fp8_moe_experts, moe, moe_combine, moe_dispatch, moe_experts, moe_route
from mgpu_ops.core import aot, gpu
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
pytestmark = pytest.mark.usefixtures("no_races")


def layer(tokens: int, d: int, hidden: int, experts: int, dtype: Any = BF16) -> tuple[jax.Array, ...]:
    """x, router_logits, w_gate, w_up and w_down, so that outputs are about normal."""
    x = normal(0, tokens, d, dtype=dtype)
    logits = normal(1, tokens, experts, dtype=F32)
    gate, up = (normal(seed, experts, d, hidden, dtype=dtype) / np.sqrt(d).astype(dtype) for seed in (2, 3))
    return x, logits, gate, up, normal(4, experts, hidden, d, dtype=dtype) / np.sqrt(hidden).astype(dtype)


def dense(x: Any, logits: Any, gate: Any, up: Any, down: Any, top_k: int, norm_topk_prob: bool = True) -> jax.Array:
    """Every expert computes every token, in x's dtype; the weights of those not chosen are zero."""
    rank = jnp.sum(logits[:, None, :] > logits[:, :, None], axis=2)  # how many experts score higher
    weights = jnp.where(rank < top_k, jax.nn.softmax(logits.astype(x.dtype)), 0)
    if norm_topk_prob:
        weights /= weights.sum(axis=1, keepdims=True)
    product = functools.partial(jnp.einsum, precision="highest")
    hidden = jax.nn.silu(product("td,edh->teh", x, gate)) * product("td,edh->teh", x, up)
    return product("te,teh,ehd->td", weights, hidden, down)


compiled = jax.jit(moe, static_argnums=5)


def truth(*arrays: Any, **kwargs: Any) -> np.ndarray:
    with jax.enable_x64(True):
        return np.asarray(dense(*(jnp.asarray(np.asarray(x), "float64") for x in arrays), **kwargs))


# Hidden activations are rounded to bfloat16, each expert's result is, and so is their sum.
TOLERANCE = 1.5e-2


@pytest.mark.parametrize(("top_k", "norm_topk_prob"), [(1, True), (3, False), (5, True)])
def test_the_layer_is_the_dense_one_with_unused_experts_masked(top_k, norm_topk_prob, assert_near):
    arrays = layer(70, 24, 40, 5)
    out = jax.jit(functools.partial(moe, top_k=top_k, norm_topk_prob=norm_topk_prob))(*arrays)
    assert out.dtype == BF16
    assert_near(out, truth(*arrays, top_k=top_k, norm_topk_prob=norm_topk_prob), TOLERANCE)


def test_in_float64_it_is_exact(assert_near):
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(np.asarray(x), "float64") for x in layer(70, 24, 40, 5, F32))
        assert_near(compiled(*arrays, 2), jax.jit(dense, static_argnums=5)(*arrays, 2), 1e-13)


@pytest.mark.parametrize("backend", thorough.cases(["xla", "interpret"], ["interpret"]))
def test_gradients_are_those_of_the_dense_layer(backend, assert_near):
    arrays = layer(40, 24, 40, 4)
    weight = normal(9, 40, 24, dtype=F32)

    def loss(f: Any, *arrays: jax.Array) -> jax.Array:
        return (f(*arrays).astype(F32) * weight).sum()

    ours, wanted = (
        jax.jit(jax.grad(functools.partial(loss, f), (0, 1, 2, 3, 4)))(*of)
        for f, of in (
            (functools.partial(moe, top_k=2, backend=backend), arrays),
            (functools.partial(dense, top_k=2), tuple(x.astype(F32) for x in arrays)),
        )
    )
    for x, y, argument in zip(ours, wanted, arrays, strict=True):
        assert x.dtype == argument.dtype
        assert_near(x, y, 3e-2)


def test_gradients_in_float64_are_exact(assert_near):
    with jax.enable_x64(True):
        arrays = tuple(jnp.asarray(np.asarray(x), "float64") for x in layer(30, 8, 16, 4, F32))
        ours, wanted = (
            jax.jit(jax.grad(lambda *a, f=f: (f(*a, top_k=2, norm_topk_prob=False) ** 2).sum(), (0, 1, 2, 3, 4)))(*arrays)  # type: ignore[misc]
            for f in (moe, dense)
        )
        for x, y in zip(ours, wanted, strict=True):
            assert_near(x, y, 1e-12)


# --- any routing


def test_all_tokens_to_one_expert_drops_none(assert_near):
    x, logits, *weights = layer(70, 24, 40, 5)
    logits = logits.at[:, 3].set(20)
    assert_near(compiled(x, logits, *weights, 1), truth(x, logits, *weights, top_k=1), TOLERANCE)


def test_an_expert_without_tokens_changes_nothing_and_gets_no_gradient(assert_near):
    x, logits, gate, up, down = layer(70, 24, 40, 5)
    logits = logits.at[:, 1].set(-30)
    clean = compiled(x, logits, gate, up, down, 2)
    gate, down = gate.at[1].set(jnp.nan), down.at[1].set(jnp.nan)
    np.testing.assert_array_equal(compiled(x, logits, gate, up, down, 2), clean)
    grads = jax.jit(jax.grad(lambda *a: moe(x, logits, *a, 2).astype(F32).sum(), (0, 1, 2)))(gate, up, down)
    for grad in grads:
        np.testing.assert_array_equal(grad[1], 0)
        assert np.isfinite(np.asarray(grad, np.float32)).all()


def test_no_tokens():
    x, logits, *weights = layer(0, 24, 40, 5)
    f = lambda x, *w: moe(x, logits, *w, 2).astype(F32).sum()  # noqa: E731
    assert moe(x, logits, *weights, 2).shape == (0, 24)
    dx, *dw = jax.grad(f, (0, 1, 2, 3))(x, *weights)
    assert dx.shape == x.shape
    assert not any(np.asarray(d, np.float32).any() for d in dw)


@pytest.mark.parametrize("where", ["x", "logits"])
def test_nan_stays_in_its_token(where):
    x, logits, *weights = layer(70, 24, 40, 5)
    clean = compiled(x, logits, *weights, 2)
    bad = (x.at[7].set(jnp.nan), logits) if where == "x" else (x, logits.at[7].set(jnp.nan))
    out = compiled(*bad, *weights, 2)
    assert np.isnan(out[7]).all()
    np.testing.assert_array_equal(np.delete(out, 7, 0), np.delete(clean, 7, 0))


def test_leading_dimensions_are_tokens():
    x, logits, *weights = layer(24, 16, 24, 4)
    out = moe(x.reshape(2, 3, 4, 16), logits.reshape(2, 3, 4, 4), *weights, 2)
    np.testing.assert_array_equal(out.reshape(24, 16), moe(x, logits, *weights, 2))


# --- transforms


def test_checkpoint_scan_and_vmap(assert_near):
    x, logits, *weights = layer(24, 16, 24, 4, F32)
    f = lambda x, *w: moe(x, logits, *w, 2).sum()  # noqa: E731
    plain, again = (jax.jit(jax.grad(g, (0, 1, 2, 3)))(x, *weights) for g in (f, jax.checkpoint(f)))
    for saved, computed_again in zip(plain, again, strict=True):
        assert_near(saved, computed_again, 1e-5)
    scanned, _ = jax.lax.scan(lambda x, _: (x + moe(x, logits, *weights, 2), None), x, length=2)
    step = x + compiled(x, logits, *weights, 2)
    assert_near(scanned, step + compiled(step, logits, *weights, 2), 1e-5)
    xs, all_logits = jnp.stack([x, -x]), jnp.stack([logits, 2 - logits])
    mapped = jax.jit(jax.vmap(lambda x, logits: moe(x, logits, *weights, 2)))(xs, all_logits)
    assert_near(mapped, jnp.stack([compiled(x, logits, *weights, 2) for x, logits in zip(xs, all_logits)]), 1e-6)


@pytest.mark.parametrize("tokens", [50, 20000])
@pytest.mark.parametrize("top_k", [1, 4, 17])
def test_route_finds_the_largest_logits_in_order_whatever_they_are(top_k, tokens):
    values = [0.0, -0.0, 1.5, -1.5, np.inf, -np.inf, 1e-30, 3e38, -3e38]
    logits = np.random.default_rng(0).choice(values, (tokens, 20)).astype(np.float32)
    _, experts = jax.jit(functools.partial(moe_route, top_k=top_k))(logits)
    np.testing.assert_array_equal(experts, np.argsort(-logits, axis=1, kind="stable")[:, :top_k])
    _, experts = moe_route(np.where(logits == 1.5, np.nan, logits), top_k)
    assert all(len(set(row)) == top_k for row in experts.tolist())
    _, experts = moe_route(np.where(np.arange(20) == 7, np.float32("nan"), logits), top_k)
    assert (experts[:, 0] == 7).all()


@pytest.mark.parametrize("tokens", [64, 1024])
def test_under_vmap_routing_and_sort_are_those_of_each_entry_and_compare_no_more_than_alone(tokens):
    """64 entries of 1024 tokens would be 268 million comparisons for the sort, in each of two kernels."""
    logits, x = normal(0, 64, tokens, 8), jnp.zeros((64, tokens, 1))
    weights, experts = jax.jit(jax.vmap(lambda of: moe_route(of, 2)))(logits)
    wanted, chosen = moe_route(logits.reshape(-1, 8), 2)
    np.testing.assert_array_equal(experts.reshape(-1, 2), chosen)
    np.testing.assert_allclose(weights.reshape(-1, 2), wanted, rtol=1e-6)
    dispatch = jax.vmap(lambda x, experts: moe_dispatch(x, experts, 8))
    for found, one in zip(jax.jit(dispatch)(x, experts), moe_dispatch(x[63], experts[63], 8), strict=True):
        np.testing.assert_array_equal(found[63], one)
    made = max(int(np.prod(v.aval.shape)) for v in variables(jax.make_jaxpr(dispatch)(x, experts).jaxpr))
    assert made <= 64 * 2 * tokens * 128  # a block of 128 assignments is compared with itself
    gradient, of_all = (
        jax.jit(jax.grad(lambda of, route=route: jnp.sum(route(of)[0][..., 0] ** 2)))(logits)
        for route in (jax.vmap(lambda of: moe_route(of, 2)), lambda of: moe_route(of, 2))
    )
    np.testing.assert_allclose(gradient, of_all, atol=1e-6)


@pytest.mark.parametrize(("tokens", "top_k", "experts"), [(0, 2, 3), (1, 1, 1), (43, 3, 5), (64, 2, 1), (5000, 2, 7)])
def test_dispatch_sorts_stably_whatever_the_number_of_assignments(tokens, top_k, experts):
    chosen = np.random.default_rng(0).integers(-1, experts + 1, (tokens, top_k))  # some name no expert
    rows, sizes, order, positions = moe_dispatch(np.zeros((tokens, 1)), chosen, experts)
    key = np.where((chosen >= 0) & (chosen < experts), chosen, experts).ravel()
    np.testing.assert_array_equal(order, np.argsort(key, kind="stable"))
    np.testing.assert_array_equal(positions.ravel()[order], np.arange(key.size))
    np.testing.assert_array_equal(sizes, np.bincount(key, minlength=experts + 1)[:-1])
    assert rows.shape == (tokens * top_k, 1)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(("tokens", "kernels", "fusions"), [(1, 3, 1), (64, 3, 1), (65, 2, 10)])
def test_a_layer_of_few_tokens_is_two_products_and_few_small_kernels(tokens, kernels, fusions):
    """In decoding each takes about a microsecond. Of 65 tokens they route, sort, count, and put tokens and weights in order."""
    experts, d, hidden = 128, 256, 128
    shapes = [(tokens, d), (tokens, experts), (experts, d, hidden), (experts, d, hidden), (experts, hidden, d)]
    context, place = aot.elsewhere("h200")
    with context:
        arrays = place([jax.ShapeDtypeStruct(s, F32 if i == 1 else BF16) for i, s in enumerate(shapes)])
        compiled = jax.jit(functools.partial(moe, top_k=8)).lower(*arrays).compile().as_text()
    program = compiled[compiled.index("\nENTRY") :]
    assert program.count(" custom-call(") == kernels
    assert program.count(" fusion(") <= fusions


def test_nothing_as_large_as_tokens_times_experts_times_width_is_made():
    tokens, d, hidden, experts, top_k = 2048, 64, 128, 64, 2  # of few tokens, each logit is compared with all others
    shapes = [(tokens, d), (tokens, experts), (experts, d, hidden), (experts, d, hidden), (experts, hidden, d)]
    arrays = [jax.ShapeDtypeStruct(s, F32 if i == 1 else BF16) for i, s in enumerate(shapes)]
    loss = lambda *a: moe(*a, top_k, backend="mosaic").astype(F32).sum()  # noqa: E731
    with gpu.target("h200"):
        jaxpr = jax.make_jaxpr(jax.grad(loss, (0, 1, 2, 3, 4)))(*arrays)
    sizes = [int(np.prod(v.aval.shape)) for v in variables(jaxpr.jaxpr)]
    assert max(sizes) <= max(experts * d * hidden, tokens * top_k * hidden)
    rows = [size for size in sizes if size % tokens == 0 and size > tokens * top_k * hidden]
    assert set(rows) <= {experts * d * hidden}  # the weights


def variables(jaxpr: Any) -> Any:
    """Of a jaxpr and of those inside of it, kernels left out."""
    for eqn in jaxpr.eqns:
        yield from (v for v in eqn.outvars if hasattr(v.aval, "shape"))
        if "mosaic" not in eqn.primitive.name and "core_map" not in eqn.primitive.name and "pallas" not in eqn.primitive.name:
            for inner in jax.tree.leaves(
                list(eqn.params.values()), is_leaf=lambda p: hasattr(p, "eqns") or hasattr(p, "jaxpr")
            ):
                if hasattr(inner, "eqns") or hasattr(inner, "jaxpr"):
                    yield from variables(getattr(inner, "jaxpr", inner))


# --- experts on several devices

X, WHOLE = PartitionSpec("x"), PartitionSpec()


def test_a_share_of_the_experts_each_adds_up_to_the_layer(assert_near):
    """Each device gathers all tokens, computes its experts' part, and the parts are summed to each device's tokens."""
    x, logits, *weights = layer(64, 16, 24, 8, F32)
    devices = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def shard(x: jax.Array, logits: jax.Array, *weights: jax.Array) -> jax.Array:
        routed = moe_route(logits, 2)
        x, *routed = (jax.lax.all_gather(y, "x", tiled=True) for y in (x, *routed))
        first = jax.lax.axis_index("x") * weights[0].shape[0]
        part = moe_experts(x, *routed, *weights, num_experts=8, group_offset=first)
        return jax.lax.psum_scatter(part, "x", tiled=True)

    f = jax.jit(jax.shard_map(shard, mesh=devices, in_specs=(X,) * 5, out_specs=X))
    assert_near(f(x, logits, *weights), compiled(x, logits, *weights, 2), 1e-5)
    ours, wanted = (
        jax.jit(jax.grad(lambda *a, g=g: (g(*a) ** 2).sum(), (0, 1, 2, 3, 4)))(x, logits, *weights)  # type: ignore[misc]
        for g in (f, functools.partial(moe, top_k=2))
    )
    for x, y in zip(ours, wanted, strict=True):
        assert_near(x, y, 1e-4)


# --- the parts


def test_route_gives_the_likeliest_experts_and_their_weights():
    logits = jnp.array([[0.0, 2.0, 1.0, 2.0], [5.0, -1.0, 0.0, 0.0]])
    weights, experts = moe_route(logits, 2)
    np.testing.assert_array_equal(experts, [[1, 3], [0, 2]])  # of equals, the first
    np.testing.assert_allclose(weights, [[0.5, 0.5], np.exp([5, 0]) / np.exp([5, 0]).sum()], rtol=1e-6)
    unnormalised, _ = moe_route(logits, 2, norm_topk_prob=False)
    np.testing.assert_allclose(unnormalised, np.take_along_axis(np.asarray(jax.nn.softmax(logits)), np.asarray(experts), 1))
    assert weights.dtype == F32
    assert moe_route(logits.astype(BF16), 2)[0].dtype == F32


@pytest.mark.parametrize("number", [2**32 + 1, -(2**32) + 1, 2**63 + 1, 4, -1])
def test_a_number_that_names_no_expert_does_not_wrap_around_to_one(number):
    x, weights = normal(0, 2, 8, dtype=BF16), jnp.ones((2, 1))
    experts = np.array([[1], [number]], np.uint64 if number >= 2**63 else np.int64)
    np.testing.assert_array_equal(moe_dispatch(x, experts, 4).group_sizes, [0, 1, 0, 0])
    w = normal(1, 4, 8, 16, dtype=BF16)
    out = np.asarray(moe_experts(x, weights, experts, w, w, w.mT), np.float32)
    assert out[0].any()
    assert not out[1].any()


@pytest.mark.parametrize(("dtype", "count"), [("int8", 200), ("uint8", 300), ("int4", 9), ("uint4", 40), ("uint32", 5)])
def test_more_experts_than_the_dtype_of_their_numbers_holds(dtype, count):
    experts = jnp.asarray([[0], [4], [7], [1]], jnp.int32).astype(dtype)
    x = normal(0, 4, 8, dtype=BF16)
    found, wanted = (moe_dispatch(x, numbers, count) for numbers in (experts, experts.astype("int32")))
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_array_equal(one, other)
    w = normal(1, count, 8, 16, dtype=BF16)
    for layer in (moe_experts, fp8_moe_experts):
        run = functools.partial(layer, x, jnp.ones((4, 1)), w_gate=w, w_up=w, w_down=w.mT)
        for share in ({}, {"num_experts": count, "group_offset": jnp.int32(0)}):
            np.testing.assert_array_equal(run(experts, **share), run(experts.astype("int32"), **share))


def test_dispatch_sorts_rows_by_expert_in_the_order_of_tokens_and_combine_takes_them_back():
    experts = np.array([[2, 0], [0, 2], [9, 0], [2, -1]])  # 9 and -1 name no expert
    x = jnp.arange(4.0)[:, None] + jnp.zeros((4, 8))
    rows, sizes, order, positions = moe_dispatch(x, experts, 3)
    np.testing.assert_array_equal(sizes, [3, 0, 3])
    np.testing.assert_array_equal(rows[:, 0], [0, 1, 2, 0, 1, 3, 2, 3])
    np.testing.assert_array_equal(order, [1, 2, 5, 0, 3, 6, 4, 7])
    np.testing.assert_array_equal(np.ravel(positions)[np.asarray(order)], np.arange(8))
    np.testing.assert_array_equal(moe_combine(rows, order, positions), 2 * x)
    np.testing.assert_array_equal(jax.grad(lambda x: moe_dispatch(x, experts, 3).rows[:6].sum())(x)[:, 0], [2, 2, 1, 1])
    grad = jax.grad(lambda rows: (moe_combine(rows, order, positions) * x).sum())(rows)
    np.testing.assert_array_equal(grad, rows)


def test_numbers_of_rows_that_do_not_exist_count_as_the_nearest_in_a_jitted_combine():
    rows = jnp.arange(4.0)[:, None] + jnp.zeros((4, 8))
    with jax.enable_x64(True):
        out = jax.jit(moe_combine)(rows, jnp.arange(4), jnp.array([[2**32 + 1], [1], [-(2**40)], [4]]))
    np.testing.assert_array_equal(out[:, 0], [3, 1, 0, 3])


def test_an_assignment_to_no_expert_adds_nothing(assert_near):
    x, logits, *weights = layer(40, 16, 24, 4, F32)
    scale, experts = moe_route(logits, 2)
    dropped = experts.at[:, 1].set(jnp.where(jnp.arange(40) % 2, experts[:, 1], 4))
    out = moe_experts(x, scale, dropped, *weights)
    wanted = moe_experts(x, scale * jnp.where(dropped < 4, 1.0, 0.0), experts, *weights)
    assert_near(out, wanted, 1e-6)


OK = layer(8, 16, 24, 4)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: moe(OK[0][:7], *OK[1:], 2), ValueError, r"x\(7, 16\) and router_logits\(8, 4\) differ"),
        (lambda: moe(OK[0], OK[1][:, :3], *OK[2:], 2), ValueError, r"router_logits\(8, 3\) are of 3 experts, w_gate.* of 4"),
        (lambda: moe(*OK, 5), ValueError, "top_k=5 is not from 1 to the 4 experts"),
        (lambda: moe(*OK, 0), ValueError, "top_k=0 is not from 1 to the 4 experts"),
        (lambda: moe(*OK, 1.5), TypeError, "top_k=1.5 is no integer"),
        (lambda: moe(*OK, True), TypeError, "top_k=True is no integer"),
        (lambda: moe_dispatch(OK[0], jnp.zeros((8, 2), int), True), TypeError, "num_experts=True is no integer"),
        (lambda: moe(*OK[:3], OK[3][..., :8], OK[4], 2), ValueError, r"w_gate\(4, 16, 24\) and w_up\(4, 16, 8\) differ"),
        (lambda: moe(*OK[:4], OK[4].mT, 2), ValueError, r"w_gate\(4, 16, 24\) and w_down\(4, 16, 24\) do not fit x\(8, 16\)"),
        (lambda: moe_route(jnp.ones((2, 3), int), 1), TypeError, "router_logits has dtype int32: moe_route takes floats"),
        (lambda: moe(OK[0][0], jnp.float32(1), *OK[2:], 2), ValueError, r"x\(16,\) and router_logits\(\) differ"),
        (lambda: moe(*OK[:3], None, OK[4], 2), TypeError, "w_up is None, which is no array"),
        (lambda: moe(OK[0].astype("float16"), *OK[1:], 2), ValueError, "x is float16 and w_gate is .*: cast one"),
        (lambda: moe_dispatch(None, jnp.zeros((8, 2), int), 4), TypeError, "x is None, which is no array: moe_dispatch takes"),
        (lambda: moe_combine(OK[0], [[*range(8)]], jnp.zeros((4, 2), int)), ValueError, r"order\(1, 8\) .*\[assignments\]"),
        (lambda: moe_combine(OK[0], [*range(8)], [[0, 1]] * 4, out_dtype=int), TypeError, "out_dtype int.* is not a float"),
        (
            lambda: moe_combine(OK[0], [*range(8)], [[2**32]] + [[1]] * 7),
            ValueError,
            r"positions\[0, 0\]=4294967296 is not from",
        ),
        (lambda: moe_combine(OK[0], [*range(7), -1], [[0]] * 8), ValueError, r"order\[7\]=-1 is not from 0 to 7: rows has 8"),
        (lambda: moe_dispatch(OK[0], jnp.zeros((7, 2), int), 4), ValueError, r"x\(8, 16\) and experts\(7, 2\)"),
        (lambda: moe_dispatch(OK[0], jnp.zeros((8, 2)), 4), TypeError, "experts has dtype float32: it must hold integers"),
        (lambda: moe_dispatch(OK[0], jnp.zeros((8, 2), int), 0), ValueError, "num_experts=0 is not at least 1"),
        (
            lambda: moe_dispatch(OK[0], jnp.zeros((8, 2), int), 2**40),
            ValueError,
            f"num_experts={2**40} must be below {2**31 - 1}",
        ),
        (lambda: moe_dispatch(OK[0], jnp.zeros((8, 2), int), "4"), TypeError, "num_experts='4' is no integer"),
        (lambda: moe_combine(OK[0], jnp.arange(8.0), jnp.zeros((4, 2), int)), TypeError, "order has dtype float.*integers"),
        (
            lambda: moe_combine(OK[0].astype(int), jnp.arange(8), jnp.zeros((4, 2), int)),
            TypeError,
            "rows has dtype int.*floats",
        ),
        (
            lambda: moe_combine(OK[0], jnp.arange(8), jnp.zeros((4, 3), int)),
            ValueError,
            r"positions\(4, 3\): moe_combine takes",
        ),
        (
            lambda: moe_experts(OK[0], jnp.ones((8, 2)), np.zeros((8, 2), int), *OK[2:], num_experts=8),
            ValueError,
            "num_experts=8 and group_offset=None: a share of the experts takes both",
        ),
        (
            lambda: moe_experts(OK[0], jnp.ones((8, 2)), jnp.zeros((8, 2), int), *OK[2:], num_experts=2, group_offset=0),
            ValueError,
            "num_experts=2 is less than the 4 experts of w_gate",
        ),
    ],
)
def test_error_names_the_value_and_the_rule(call, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_a_symbolic_number_of_tokens_is_refused_with_a_way_out():
    tokens = jax.export.symbolic_shape("t")
    x, logits, weights = (jax.ShapeDtypeStruct(shape, jnp.float32) for shape in ((*tokens, 16), (*tokens, 4), (4, 16, 16)))
    layer = functools.partial(moe, top_k=2)
    with pytest.raises(ValueError, match=r"x\(t, 16\) has a symbolic number of tokens.*export a function for each number"):
        jax.export.export(jax.jit(layer))(x, logits, weights, weights, weights)


@pytest.mark.parametrize("sides", ["16, h", "d, 24", "d, h"])
def test_a_symbolic_width_and_hidden_width_are_exported_with_the_gradients(sides, assert_near):
    d, hidden = jax.export.symbolic_shape(sides)
    shapes = ((8, d), (8, 4), (4, d, hidden), (4, d, hidden), (4, hidden, d))
    step = jax.jit(jax.value_and_grad(lambda *arrays: (moe(*arrays, 2) ** 2).sum(), tuple(range(5))))
    exported = jax.export.export(step)(*(jax.ShapeDtypeStruct(shape, F32) for shape in shapes))
    forward = jax.export.export(jax.jit(functools.partial(moe, top_k=2)))(*(jax.ShapeDtypeStruct(s, F32) for s in shapes))
    arrays = [x.astype(F32) for x in layer(8, 16, 24, 4)]
    assert_near(forward.call(*arrays), moe(*arrays, 2), 1e-5)
    for ours, wanted in zip(jax.tree.leaves(exported.call(*arrays)), jax.tree.leaves(step(*arrays)), strict=True):
        assert_near(ours, wanted, 1e-5)


def test_captured_problems_are_those_of_the_kernels():
    x, _, *weights = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layer(64, 64, 128, 4))
    loss = lambda x, *w: (moe(x, jnp.zeros((64, 4)), *w, 2).astype(F32) ** 2).sum()  # noqa: E731
    found = mgpu_ops.capture(jax.jit(jax.grad(loss, (0, 1, 2, 3))))(x, *weights)
    counts = {op: sum(use.count for use in found.uses if use.op == op) for op in {use.op for use in found.uses}}
    assert counts == {"gated_grouped_matmul": 1, "grouped_matmul": 3, "ragged_contraction": 3}


@pytest.mark.parametrize(("hidden", "lhs_rows"), [(128, 64), (2048, 0)])
def test_without_gradients_experts_of_few_columns_take_rows_by_index(hidden, lhs_rows):
    x, _, *weights = (jax.ShapeDtypeStruct(x.shape, x.dtype) for x in layer(64, 64, hidden, 4))
    found = mgpu_ops.capture(lambda x, *w: moe(x, jnp.zeros((64, 4)), *w, 2))(x, *weights)
    (first,) = (use.problem for use in found.uses if use.op == "gated_grouped_matmul")
    assert (first.m, first.lhs_rows) == (128, lhs_rows)
