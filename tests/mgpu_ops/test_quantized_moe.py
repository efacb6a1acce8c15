"""The layer of experts with int8 and int4 weights: beside the dense layer of the same numbers in float64, in any routing."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, NamedSharding, PartitionSpec

import mgpu_ops
from mgpu_ops import moe_route, quantized_moe, quantized_moe_experts
from mgpu_ops.core.activations import ACTIVATIONS, activate
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
pytestmark = pytest.mark.usefixtures("no_races")

TOKENS, D, HIDDEN, EXPERTS = 70, 64, 96, 5
type Arrays = dict[str, Any]


def matrix(seed: int, experts: int, n: int, k: int, dtype: str, group: int, zero_points: bool, of: str) -> Arrays:
    """Weights [experts, n, k] of about 1 / sqrt(k), their scales, and zero points if wanted. group: 0 for scales of columns."""
    rng = np.random.default_rng(seed)
    most = 127 if dtype == "int8" else 7
    w = jnp.asarray(rng.integers(-most, most + 1, (experts, n, k)).astype(np.int8)).astype(dtype)
    shape = (experts, k // group, n) if group else (experts, n)
    scales = rng.uniform(0.5, 1.5, shape).astype(np.float32) * np.float32(1.7 / most / k**0.5)
    found = {f"w_{of}": w, f"{of}_scales": jnp.asarray(scales)}
    if zero_points:
        found[f"{of}_zero_points"] = jnp.asarray(rng.integers(-most // 4, most // 4 + 1, shape).astype(np.float32))
    return found


def matrices(
    dtype: str = "int8",
    group: int = 0,
    zero_points: bool = False,
    *,
    d: int = D,
    hidden: int = HIDDEN,
    experts: int = EXPERTS,
) -> Arrays:
    both = matrix(2, experts, 2 * hidden, d, dtype, group, zero_points, "gate_up")
    return both | matrix(3, experts, d, hidden, dtype, group, zero_points, "down")


def tokens(count: int = TOKENS, d: int = D, experts: int = EXPERTS, dtype: Any = BF16) -> tuple[jax.Array, jax.Array]:
    """x and router_logits."""
    return normal(0, count, d, dtype=dtype), normal(1, count, experts, dtype=F32)


def dequantised(given: Arrays, of: str) -> np.ndarray:
    """[experts, k, n] in float64."""
    w = np.asarray(given[f"w_{of}"].astype(jnp.int8), np.float64).swapaxes(1, 2)

    def along_k(name: str) -> np.ndarray:
        a = np.asarray(given[name], np.float64)
        return a[:, None] if a.ndim == 2 else a.repeat(w.shape[1] // a.shape[1], 1)

    zero = along_k(f"{of}_zero_points") if f"{of}_zero_points" in given else 0.0
    found: np.ndarray = (w - zero) * along_k(f"{of}_scales")
    return found


def dense(
    x: Any, logits: Any, gate_up: Any, down: Any, top_k: int, norm_topk_prob: bool = True, activation: str = "silu"
) -> jax.Array:
    """Every expert computes every token, in x's dtype; the weights of those not chosen are zero."""
    rank = jnp.sum(logits[:, None, :] > logits[:, :, None], axis=2)  # how many experts score higher
    weights = jnp.where(rank < top_k, jax.nn.softmax(logits.astype(x.dtype)), 0)
    if norm_topk_prob:
        weights /= weights.sum(axis=1, keepdims=True)
    return by_weight(x, weights, gate_up, down, activation)


def by_weight(x: Any, weights: Any, gate_up: Any, down: Any, activation: str = "silu") -> jax.Array:
    """The same of weights [tokens, experts]."""
    product = functools.partial(jnp.einsum, precision="highest")
    gate, up = jnp.split(product("td,edh->teh", x, gate_up), 2, axis=2)
    return product("te,teh,ehd->td", weights, activate(activation, gate) * up, down)


def truth(x: Any, logits: Any, given: Arrays, **kwargs: Any) -> np.ndarray:
    with jax.enable_x64(True):
        arrays = [np.asarray(a, np.float64) for a in (x, logits)]
        arrays += [dequantised(given, "gate_up"), dequantised(given, "down")]
        return np.asarray(dense(*map(jnp.asarray, arrays), **kwargs))


# Gate and up, what is made of them, each expert's result, and their sum are rounded to bfloat16.
TOLERANCE = 4e-2

KINDS = {
    "int8, columns": ("int8", 0, False),
    "int8, groups of 16, zero points": ("int8", 16, True),
    "int4, columns, zero points": ("int4", 0, True),
    "int4, groups of 32": ("int4", 32, False),
}


@pytest.mark.parametrize("kind", KINDS)
def test_the_layer_is_the_dense_one_of_the_same_numbers(kind, assert_near):
    x, logits = tokens()
    given = matrices(*KINDS[kind])
    out = jax.jit(functools.partial(quantized_moe, top_k=2))(x, logits, **given)
    assert out.dtype == BF16
    assert_near(out, truth(x, logits, given, top_k=2), TOLERANCE)


@pytest.mark.parametrize(("top_k", "norm_topk_prob"), [(1, True), (3, False), (EXPERTS, True)])
def test_any_number_of_experts_a_token(top_k, norm_topk_prob, assert_near):
    x, logits = tokens()
    given, options = matrices(), {"top_k": top_k, "norm_topk_prob": norm_topk_prob}
    out = jax.jit(functools.partial(quantized_moe, **options))(x, logits, **given)
    assert_near(out, truth(x, logits, given, **options), TOLERANCE)


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_every_activation(activation, assert_near):
    x, logits = tokens(dtype=F32)
    given = matrices("int4", 32)
    out = jax.jit(functools.partial(quantized_moe, top_k=2, activation=activation))(x, logits, **given)
    assert_near(out, truth(x, logits, given, top_k=2, activation=activation), 1e-5)


def test_in_float64_it_is_exact(assert_near):
    with jax.enable_x64(True):
        x, logits = (a.astype("float64") for a in tokens(dtype=F32))
        given = matrices("int8", 16, True)
        given = {name: a if name.startswith("w") else a.astype("float64") for name, a in given.items()}
        out = jax.jit(functools.partial(quantized_moe, top_k=2))(x, logits, **given)
        assert out.dtype == "float64"
    assert_near(out, truth(x, logits, given, top_k=2), 1e-13)


@pytest.mark.parametrize("kind", thorough.cases(["int8, columns", "int4, groups of 128, zero points"], ["int8, columns"]))
def test_interpreted_kernels_are_the_layer_and_have_no_race(kind, assert_near):
    w_dtype, group, zero_points = ("int8", 0, False) if kind == "int8, columns" else ("int4", 128, True)
    x, logits = tokens(20, 128, 3)
    given = matrices(w_dtype, group, zero_points, d=128, hidden=128, experts=3)
    logits = logits.at[:, 1].set(-30)  # one expert has no rows
    with mgpu_ops.target("h200"):  # which runs no kernel but interpreted ones
        out = quantized_moe(x, logits, **given, top_k=2, backend="interpret")
    assert_near(out, truth(x, logits, given, top_k=2), TOLERANCE)


# --- any routing


def test_experts_without_tokens_change_nothing(assert_near):
    x, logits = tokens()
    logits = logits.at[:, 1].set(-30)
    given = matrices()
    poisoned = given | {name: given[name].at[1].set(jnp.nan) for name in ("gate_up_scales", "down_scales")}
    run = jax.jit(functools.partial(quantized_moe, top_k=2))
    assert_near(run(x, logits, **poisoned), truth(x, logits, given, top_k=2), TOLERANCE)


def test_all_tokens_to_one_expert_drops_none(assert_near):
    x, logits = tokens()
    logits, given = logits.at[:, 3].set(20), matrices()
    assert_near(quantized_moe(x, logits, **given, top_k=1), truth(x, logits, given, top_k=1), TOLERANCE)


def test_one_token_and_none(assert_near):
    given = matrices()
    x, logits = tokens(1)
    assert_near(quantized_moe(x, logits, **given, top_k=2), truth(x, logits, given, top_k=2), TOLERANCE)
    x, logits = tokens(0)
    assert quantized_moe(x, logits, **given, top_k=2).shape == (0, D)
    dx, dlogits = jax.grad(lambda *a: quantized_moe(*a, **given, top_k=2).astype(F32).sum(), (0, 1))(x, logits)
    assert (dx.shape, dlogits.shape) == (x.shape, logits.shape)


@pytest.mark.parametrize("where", ["x", "logits"])
def test_nan_stays_in_its_token(where, assert_near):
    x, logits = tokens()
    given = matrices()
    wanted = truth(x, logits, given, top_k=2)
    bad = (x.at[7].set(jnp.nan), logits) if where == "x" else (x, logits.at[7].set(jnp.nan))
    out = jax.jit(functools.partial(quantized_moe, top_k=2))(*bad, **given)
    assert np.isnan(out[7]).all()
    assert_near(np.delete(np.asarray(out), 7, 0), np.delete(wanted, 7, 0), TOLERANCE)


def test_leading_dimensions_are_tokens(assert_near):
    x, logits = tokens(24)
    given = matrices()
    out = quantized_moe(x.reshape(2, 3, 4, D), logits.reshape(2, 3, 4, EXPERTS), **given, top_k=2)
    assert out.shape == (2, 3, 4, D)
    assert_near(out.reshape(24, D), truth(x, logits, given, top_k=2), TOLERANCE)


@pytest.mark.parametrize("weight", [1.0, np.nan, np.inf])
def test_an_assignment_to_no_expert_adds_nothing_whatever_its_weight(weight, assert_near):
    x, logits = tokens(dtype=F32)
    given = matrices()
    weights, experts = moe_route(logits, 2)
    none = jnp.array([-1, EXPERTS, 2**31 - 1, -(2**31)])[jnp.arange(TOKENS) % 4]
    odd = jnp.arange(TOKENS) % 2 == 1
    dropped = experts.at[:, 1].set(jnp.where(odd, none, experts[:, 1]))
    of_none = weights.at[:, 1].set(jnp.where(odd, weight, weights[:, 1]))
    loss = lambda x, weights: quantized_moe_experts(x, weights, dropped, **given)  # noqa: E731
    out, pull = jax.vjp(loss, x, of_none)
    each = np.asarray(weights)[..., None] * np.eye(EXPERTS)[np.asarray(experts)]
    each[np.asarray(odd), 1] = 0
    wanted = by_weight(
        x, jnp.asarray(each.sum(1), F32), *(jnp.asarray(dequantised(given, of), F32) for of in ("gate_up", "down"))
    )
    assert_near(out, wanted, 1e-5)
    dx, dweights = pull(normal(5, TOKENS, D, dtype=F32))
    assert np.isfinite(dx).all()
    assert not np.asarray(dweights)[np.asarray(odd), 1].any()


@pytest.mark.parametrize("number", [2**32 + 1, -(2**32) + 1, 2**63 + 1, EXPERTS, -1])
def test_a_number_that_names_no_expert_does_not_wrap_around_to_one(number):
    experts = np.array([[1], [number]], np.uint64 if number >= 2**63 else np.int64)
    out = np.asarray(quantized_moe_experts(tokens(2)[0], jnp.ones((2, 1)), experts, **matrices()), np.float32)
    assert out[0].any()
    assert not out[1].any()


def share(given: Arrays, first: int, count: int) -> Arrays:
    return {name: a[first : first + count] for name, a in given.items()}


@pytest.mark.parametrize("traced", [False, True])
def test_shares_of_the_experts_add_up_to_the_layer(traced, assert_near):
    x, logits = tokens(dtype=F32)
    given = matrices("int4", 16, True)
    routed = moe_route(logits, 2)

    def part(offset: Any, count: int, first: int) -> jax.Array:
        of = share(given, first, count)
        return quantized_moe_experts(x, *routed, **of, num_experts=EXPERTS, group_offset=offset)

    run = jax.jit(part, static_argnums=(1, 2)) if traced else part
    parts = [run(first, count, first) for first, count in ((0, 2), (2, 1), (3, 2))]
    assert_near(sum(parts), truth(x, logits, given, top_k=2), 1e-5)
    if traced:  # a share of experts that there are not adds nothing
        assert not any(np.asarray(run(offset, 2, 0)).any() for offset in (EXPERTS, -2, 2**31 - 1))


# --- gradients and transforms


@pytest.mark.parametrize("kind", ["int8, columns", "int8, groups of 16, zero points", "int4, groups of 32"])
def test_gradients_of_x_and_logits_are_those_of_the_dense_layer(kind, assert_near):
    x, logits = tokens(40)
    given = matrices(*KINDS[kind])
    cotangent = normal(9, 40, D, dtype=F32)
    floats = [jnp.asarray(dequantised(given, of), F32) for of in ("gate_up", "down")]

    def gradients(f: Any, x: jax.Array) -> Any:
        loss = lambda x, logits: (f(x, logits).astype(F32) * cotangent).sum()  # noqa: E731
        return jax.jit(jax.grad(loss, (0, 1)))(x, logits)

    options = {"top_k": 3, "norm_topk_prob": False}
    wanted = gradients(lambda x, logits: dense(x, logits, *floats, **options), x.astype(F32))
    ours = gradients(lambda x, logits: quantized_moe(x, logits, **given, **options), x)
    exact = gradients(lambda x, logits: quantized_moe(x, logits, **given, **options), x.astype(F32))
    for in_16, in_32, of_dense, argument in zip(ours, exact, wanted, (x, logits), strict=True):
        assert in_16.dtype == argument.dtype
        assert_near(in_16, of_dense, 5e-2)
        assert_near(in_32, of_dense, 1e-4)


@pytest.mark.parametrize("name", ["gate_up_scales", "down_scales", "gate_up_zero_points", "down_zero_points"])
def test_gradients_of_scales_and_zero_points_are_refused_and_constants_are_not(name):
    x, logits = tokens()
    given = matrices("int8", 16, True)

    def loss(a: Any, hold: bool) -> Any:
        of = given | {name: jax.lax.stop_gradient(a) if hold else a}
        return quantized_moe(x, logits, **of, top_k=2).astype(F32).sum()

    with pytest.raises(ValueError, match="no gradient of scales or zero points: hold them constant"):
        jax.grad(loss)(given[name], False)
    assert not jax.grad(loss)(given[name], True).any()


def test_checkpoint_scan_and_vmap(assert_near):
    x, logits = tokens(24, dtype=F32)
    given = matrices("int4", 32)
    layer = lambda x, logits: quantized_moe(x, logits, **given, top_k=2)  # noqa: E731
    step = jax.jit(layer)
    plain, again = (jax.jit(jax.grad(lambda *a, f=f: f(*a).sum(), (0, 1)))(x, logits) for f in (layer, jax.checkpoint(layer)))
    for saved, computed_again in zip(plain, again, strict=True):
        assert_near(saved, computed_again, 1e-4)
    scanned, _ = jax.lax.scan(lambda x, _: (x + layer(x, logits), None), x, length=2)
    once = x + step(x, logits)
    assert_near(scanned, once + step(once, logits), 1e-5)
    xs, all_logits = jnp.stack([x, -x]), jnp.stack([logits, 2 - logits])
    wanted = jnp.stack([step(*both) for both in zip(xs, all_logits)])
    assert_near(jax.jit(jax.vmap(layer))(xs, all_logits), wanted, 1e-5)
    every = {name: jnp.stack([a, a]) for name, a in given.items()}
    of_each = lambda x, logits, given: quantized_moe(x, logits, **given, top_k=2)  # noqa: E731
    assert_near(jax.jit(jax.vmap(of_each))(xs, all_logits, every), wanted, 1e-5)
    mapped = jax.vmap(jax.grad(lambda *a: layer(*a).sum(), (0, 1)))(xs, all_logits)
    for of_all, of_first in zip(mapped, plain, strict=True):
        assert_near(of_all[0], of_first, 1e-4)


# --- several devices


def test_each_device_has_some_of_the_experts_inside_shard_map(assert_near):
    x, logits = tokens(64, experts=8, dtype=F32)
    given = matrices("int4", 16, True, experts=8)
    devices = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:4])

    def shard(x: jax.Array, logits: jax.Array, given: Arrays) -> jax.Array:
        routed = moe_route(logits, 2)
        x, *routed = (jax.lax.all_gather(y, "x", tiled=True) for y in (x, *routed))
        first = jax.lax.axis_index("x") * given["w_down"].shape[0]
        part = quantized_moe_experts(x, *routed, **given, num_experts=8, group_offset=first)
        return jax.lax.psum_scatter(part, "x", tiled=True)

    of = PartitionSpec("x")
    f = jax.jit(jax.shard_map(shard, mesh=devices, in_specs=(of,) * 3, out_specs=of))
    assert_near(f(x, logits, given), truth(x, logits, given, top_k=2), 1e-5)
    ours, wanted = (
        jax.jit(jax.grad(lambda *a, g=g: (g(*a, given) ** 2).sum(), (0, 1)))(x, logits)
        for g in (f, lambda x, logits, given: quantized_moe(x, logits, **given, top_k=2))
    )
    for a, b in zip(ours, wanted, strict=True):
        assert_near(a, b, 1e-4)


@pytest.mark.parametrize("kind", [AxisType.Auto, AxisType.Explicit])
def test_tokens_may_be_split_over_the_axes_of_a_mesh(kind, assert_near):
    x, logits = tokens(64, dtype=F32)
    given = matrices("int8", 16, True) | matrix(3, EXPERTS, D, HIDDEN, "int4", 0, False, "down")
    del given["down_zero_points"]
    devices = jax.make_mesh((4,), ("x",), axis_types=(kind,), devices=jax.devices()[:4])
    of_tokens, whole = (NamedSharding(devices, PartitionSpec(*axes)) for axes in (("x",), ()))
    with jax.set_mesh(devices):
        split = jax.device_put((x, logits), of_tokens)
        everywhere = jax.device_put(given, whole)

        def loss(x: jax.Array, logits: jax.Array, given: Arrays) -> Any:
            out = quantized_moe(x, logits, **given, top_k=2)
            return (out**2).sum(), out

        gradients, out = jax.jit(jax.grad(loss, (0, 1), has_aux=True))(*split, everywhere)
        weights, experts = moe_route(split[1], 2)
        part = {name: a[1:3] for name, a in everywhere.items()}
        shared = jax.jit(functools.partial(quantized_moe_experts, num_experts=EXPERTS))(
            split[0], weights, experts, **part, group_offset=1
        )
    assert out.sharding.is_equivalent_to(of_tokens, 2)
    assert_near(out, truth(x, logits, given, top_k=2), 1e-5)
    one = quantized_moe_experts(x, *moe_route(logits, 2), **share(given, 1, 2), num_experts=EXPERTS, group_offset=1)
    assert_near(shared, one, 1e-5)
    on_one = jax.grad(lambda *both: loss(*both, given)[0], (0, 1))(x, logits)
    for a, b in zip(gradients, on_one, strict=True):
        assert_near(a, b, 1e-4)


def test_over_explicit_axes_what_has_to_move_is_told():
    x, logits = tokens(64)
    devices = jax.make_mesh((4,), ("x",), axis_types=(AxisType.Explicit,), devices=jax.devices()[:4])
    with jax.set_mesh(devices):
        x = jax.device_put(x, NamedSharding(devices, PartitionSpec("x")))
        with pytest.raises(ValueError, match=r"^quantized_moe .*operand 1 is .*reshard\(x, P\('x', None\)\)"):
            quantized_moe(x, logits, **matrices(), top_k=2)


def test_a_captured_layer_has_two_products_the_first_of_gate_and_up():
    x, logits = tokens()
    given = matrices("int4", 32)
    shapes = jax.tree.map(lambda a: jax.ShapeDtypeStruct(a.shape, a.dtype), (x, logits, given))
    layer = lambda x, logits, given: quantized_moe(x, logits, **given, top_k=2, spread="skewed")  # noqa: E731
    found = mgpu_ops.capture(layer)(*shapes)
    problems = [use.problem for use in found.uses for _ in range(use.count) if use.op == "quantized_grouped_matmul"]
    assert {(p.m, p.n, p.k) for p in problems} == {(2 * TOKENS, 2 * HIDDEN, D), (2 * TOKENS, D, HIDDEN)}
    assert len(problems) == len(found.uses) == 2
    assert {(p.groups, p.layout, p.w_dtype, p.group_size, p.spread) for p in problems} == {
        (EXPERTS, "nt", "int4", 32, "skewed")
    }


# --- errors

X, LOGITS = tokens(8)
GIVEN = matrices("int8", 16, True)
ROUTED = (jnp.ones((8, 2)), np.zeros((8, 2), int))


def layer(x: Any = X, logits: Any = LOGITS, top_k: Any = 2, **changed: Any) -> jax.Array:
    return quantized_moe(x, logits, **GIVEN | changed, top_k=top_k)


def experts_of(x: Any = X, routed: Any = ROUTED, **changed: Any) -> jax.Array:
    return quantized_moe_experts(x, *routed, **GIVEN | changed)


@pytest.mark.parametrize(
    ("call", "error", "message"),
    [
        (lambda: layer(X[:7]), ValueError, r"x\(7, 64\) and router_logits\(8, 5\) differ"),
        (lambda: layer(logits=LOGITS[:, :3]), ValueError, r"router_logits\(8, 3\) are of 3 experts, w_gate_up.* of 5"),
        (lambda: layer(top_k=6), ValueError, "top_k=6 is not from 1 to the 5 experts"),
        (lambda: layer(top_k=True), TypeError, "top_k=True is no integer"),
        (lambda: layer(w_down=None), TypeError, "w_down is None, which is no array: quantized_moe takes"),
        (lambda: layer(gate_up_scales="x"), TypeError, "gate_up_scales is 'x', which is no array: quantized_moe takes"),
        (lambda: layer(X.astype(jnp.int8)), TypeError, "x has dtype int8: quantized_moe takes floats"),
        (
            lambda: layer(w_gate_up=GIVEN["w_gate_up"].astype(BF16)),
            TypeError,
            "w_gate_up has dtype bfloat16: quantized_moe takes int8 or int4; mgpu_ops.moe takes floats",
        ),
        (
            lambda: experts_of(w_down=GIVEN["w_down"].astype(F32)),
            TypeError,
            "w_down has dtype float32: quantized_moe_experts takes int8 or int4; mgpu_ops.moe_experts takes floats",
        ),
        (lambda: layer(w_gate_up=GIVEN["w_gate_up"][0]), ValueError, r"w_gate_up has shape \(192, 64\): .* use jax.vmap"),
        (
            lambda: layer(w_gate_up=GIVEN["w_gate_up"][:, :191]),
            ValueError,
            r"w_gate_up\(5, 191, 64\) does not fit x\(8, 64\): it is \[experts, 2 hidden, d\], .* transposed",
        ),
        (
            lambda: layer(w_gate_up=GIVEN["w_gate_up"][:, :, :32]),
            ValueError,
            r"w_gate_up\(5, 192, 32\) does not fit x\(8, 64\)",
        ),
        (
            lambda: layer(w_down=GIVEN["w_down"].mT),
            ValueError,
            r"w_gate_up\(5, 192, 64\) and w_down\(5, 96, 64\) differ: .*\[experts, d, hidden\], transposed",
        ),
        (
            lambda: layer(gate_up_scales=GIVEN["gate_up_scales"][:, :3]),
            ValueError,
            r"gate_up_scales has shape \(5, 3, 192\): for 5 groups, k=64 and n=192 it is",
        ),
        (
            lambda: layer(down_scales=jnp.ones((5, 5, 64))),
            ValueError,
            r"down_scales has shape \(5, 5, 64\): for 5 groups, k=96 and n=64 .* a size that divides k",
        ),
        (
            lambda: layer(down_scales=jnp.ones((5, 64), int)),
            TypeError,
            "down_scales has dtype int.*: quantized_moe takes floats",
        ),
        (
            lambda: layer(down_zero_points=jnp.ones((5, 64))),
            ValueError,
            r"down_zero_points has shape \(5, 64\) and down_scales \(5, 6, 64\): they have one shape",
        ),
        (
            lambda: layer(gate_up_zero_points=jnp.ones((5, 4, 192), bool)),
            TypeError,
            "gate_up_zero_points has dtype bool: pass integers",
        ),
        (lambda: layer(activation="swish"), ValueError, "activation='swish' is not one of"),
        (lambda: layer(spread="wide"), ValueError, "spread='wide' is not one of"),
        (lambda: layer(backend="cuda"), ValueError, "backend='cuda' is not one of"),
        (lambda: layer(norm_topk_prob="no"), TypeError, "norm_topk_prob='no' is neither True nor False"),
        (lambda: layer(backend="interpret"), ValueError, "cannot run quantized_grouped_matmul"),
        (lambda: experts_of(X[0]), ValueError, r"x has shape \(64,\): quantized_moe_experts takes rank 2; use jax.vmap"),
        (
            lambda: experts_of(routed=(jnp.ones((8, 2)), np.zeros((8, 3), int))),
            ValueError,
            r"weights\(8, 2\) and experts\(8, 3\) differ",
        ),
        (
            lambda: experts_of(routed=(jnp.ones((7, 2)), np.zeros((7, 2), int))),
            ValueError,
            r"x\(8, 64\) and experts\(7, 2\): quantized_moe_experts takes \[tokens, d\] and \[tokens, top_k\]",
        ),
        (
            lambda: experts_of(routed=(jnp.ones((8, 2)), jnp.zeros((8, 2)))),
            TypeError,
            "experts has dtype float32: it must hold integers",
        ),
        (
            lambda: quantized_moe_experts(X, *ROUTED, **share(GIVEN, 0, 0)),
            ValueError,
            r"w_gate_up\(0, 192, 64\) has no experts: quantized_moe_experts takes at least one",
        ),
        (
            lambda: experts_of(num_experts=8),
            ValueError,
            "num_experts=8 and group_offset=None: a share of the experts takes both",
        ),
        (
            lambda: experts_of(num_experts=2, group_offset=0),
            ValueError,
            "num_experts=2 is less than the 5 experts of w_gate_up",
        ),
        (lambda: experts_of(num_experts=8, group_offset=4), ValueError, "group_offset=4 is not from 0 to 3"),
    ],
)  # fmt: skip
def test_error_names_the_value_and_the_rule(call, error, message):
    with pytest.raises(error, match=f"(?s){message}"):
        call()


def test_second_derivatives_by_the_logits_are_those_of_a_dense_layer(assert_near):
    x, logits, top_k = normal(0, 3, D), normal(1, 3, 4), 2
    w_gate_up, w_down = (normal(seed, 4, *shape) for seed, shape in ((2, (2 * HIDDEN, D)), (3, (D, HIDDEN))))
    w_gate_up, w_down = (jnp.round(10 * w) for w in (w_gate_up, w_down))

    def by_op(logits: jax.Array) -> jax.Array:
        scales = jnp.full((4, 2 * HIDDEN), 0.01), jnp.full((4, D), 0.01)
        return quantized_moe(x, logits, w_gate_up.astype(jnp.int8), w_down.astype(jnp.int8), *scales, top_k)

    def dense(logits: jax.Array) -> jax.Array:
        chosen = logits >= jnp.sort(logits, 1)[:, -top_k, None]
        gate, up = jnp.split(jnp.einsum("td,ehd->teh", x, 0.01 * w_gate_up), 2, -1)
        weights = jax.nn.softmax(jnp.where(chosen, logits, -jnp.inf))
        return jnp.einsum("te,teh,edh->td", weights, jax.nn.silu(gate) * up, 0.01 * w_down)

    def twice(layer: Any) -> jax.Array:
        return jax.grad(lambda of: jnp.sum(jax.grad(lambda one: jnp.sum(layer(one) ** 2))(of) ** 2))(logits)

    assert_near(twice(by_op), twice(dense), 1e-4)
