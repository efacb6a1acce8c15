"""What a user of `mgpu_ops.dot_product_attention` relies on: it takes the place of `jax.nn.dot_product_attention`.

`tests/run_jax_tests.py` runs JAX's own tests of that function on ours; here is what those leave out.
"""

from __future__ import annotations

import functools
import inspect
import logging
from collections.abc import Callable
from typing import Any

import hypothesis
import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import strategies as st
from jax.sharding import AxisType, NamedSharding, PartitionSpec

from mgpu_ops import dot_product_attention
from tests.mgpu_ops.grouped.ragged import float64
from tests.thorough import cases as cases_of
from tests.thorough import examples

BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32
TOLERANCE = {BF16: 2e-2, F16: 3e-3, F32: 1e-5}  # of outputs; JAX rounds its weights to the inputs' dtype
B, T, S, N, K, H = 2, 5, 7, 4, 2, 8

QKV = ("query", "key", "value")

jaxs = jax.nn.dot_product_attention
pytestmark = pytest.mark.usefixtures("no_races")


def array(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
    return jnp.asarray(np.random.default_rng(seed).standard_normal(shape), dtype)


def qkv(dtype: Any = F32, b: int = B, t: int = T, s: int = S, n: int = N, k: int = K, h: int = H) -> tuple[jax.Array, ...]:
    return array(0, b, t, n, h, dtype=dtype), array(1, b, s, k, h, dtype=dtype), array(2, b, s, k, h, dtype=dtype)


def lengths(*each: int) -> np.ndarray:
    return np.array(each, np.int32)


def booleans(*shape: int) -> np.ndarray:
    """Two thirds True, also for the first key, which every row then sees."""
    out = np.random.default_rng(3).random(shape) < 0.67
    out[..., 0] = True
    return out


def is_ours(*args: Any, **kwargs: Any) -> bool:
    """Whether the call is computed by ours and not left to JAX's function."""
    return "custom_vjp" in str(jax.make_jaxpr(lambda: dot_product_attention(*args, **kwargs))())


def with_gradients(f: Callable[..., Any], arrays: dict[str, Any], out_grad: Any, blind: bool = True, **kwargs: Any) -> Any:
    """ "out" and "residual", and for out_grad the gradient with respect to each array by its name.

    Not `blind`: rows that see no key are zeros and bring no gradient.
    """
    (out, residual), pull = jax.vjp(lambda arrays: f(**arrays, **kwargs, return_residual=True), arrays)
    seen = blind | (residual.astype(F32) > -1e30)[..., None]
    (grads,) = pull((jnp.where(seen, out_grad, 0).astype(out.dtype), jnp.ones_like(residual)))
    return {"out": jnp.where(seen, out, 0), "residual": residual, **grads}


def assert_as_jax(
    near: Callable[[Any, Any, float], None], query: Any, key: Any, value: Any, bias: Any = None, **kw: Any
) -> Any:
    """Outputs, residuals and gradients are JAX's, but for rows that see no key. Returns ours."""
    arrays = {"query": query, "key": key, "value": value} | ({} if bias is None else {"bias": bias})
    assert is_ours(**arrays, **kw)

    @jax.jit
    def both(arrays: dict[str, Any], out_grad: jax.Array) -> Any:
        ours = with_gradients(dot_product_attention, arrays, out_grad, **kw)
        return ours, with_gradients(jaxs, arrays, out_grad, blind=False, **kw)

    assert_all_near(near, *both(arrays, array(9, *query.shape)))


def assert_all_near(near: Callable[[Any, Any, float], None], ours: dict[str, Any], wanted: dict[str, Any]) -> None:
    assert ours.keys() == wanted.keys()
    for name, x in ours.items():
        assert (x.shape, x.dtype) == (wanted[name].shape, wanted[name].dtype)
        tolerance = max(TOLERANCE[each.dtype.type] for each in (x, ours["out"])) * (1 if name == "out" else 4)
        if name == "residual":
            np.testing.assert_allclose(float64(x), float64(wanted[name]), rtol=tolerance, atol=tolerance)
        elif np.any(float64(wanted[name])):
            near(x, wanted[name], tolerance)
        else:
            np.testing.assert_array_equal(float64(x), 0)


# --- the same arguments, the same values

ARGUMENTS: dict[str, dict[str, Any]] = {
    "plain": {},
    "causal": {"is_causal": True},
    "window": {"local_window_size": (1, 2)},
    "window of one number": {"local_window_size": 2},
    "causal window": {"local_window_size": (3, 2), "is_causal": True},
    "lengths of queries": {"query_seq_lengths": lengths(3, 5)},
    "lengths of keys": {"key_value_seq_lengths": lengths(4, 7)},
    "lengths, causal": {"query_seq_lengths": lengths(3, 5), "key_value_seq_lengths": lengths(7, 4), "is_causal": True},
    "lengths out of range": {"query_seq_lengths": lengths(-1, 99), "key_value_seq_lengths": lengths(99, 7)},
    "full mask": {"mask": booleans(B, N, T, S)},
    "mask of batch entries": {"mask": booleans(B, 1, 1, S)},
    "bias": {"bias": array(3, B, N, T, S)},
    "16-bit bias": {"bias": array(3, 1, N, T, S, dtype=BF16)},
    "bias, mask and causal": {"bias": array(3, 1, N, T, S), "mask": booleans(T, S), "is_causal": True},
    "large bias": {"bias": jnp.where(booleans(1, 1, T, S), 0.0, -1e9)},
    "negative scale": {"scale": -0.5, "is_causal": True},
    "rows that see nothing, by mask": {"mask": booleans(1, 1, T, S) & (np.arange(T) != 2)[:, None]},
    "rows that see nothing, by window": {"local_window_size": (0, 0), "key_value_seq_lengths": lengths(2, 7)},
    "rows that see nothing, by lengths": {"key_value_seq_lengths": lengths(0, 7), "bias": array(3, N, T, S)},
}


IN_ALL = [  # what others show together or one by one
    "plain",
    "window of one number",
    "lengths of queries",
    "lengths of keys",
    "full mask",
    "bias",
    "causal",
    "negative scale",
    "causal window",
    "mask of batch entries",
]


@pytest.mark.parametrize("case", cases_of(ARGUMENTS, IN_ALL))
def test_values_residuals_and_gradients_are_those_of_jax(case, assert_near):
    assert_as_jax(assert_near, *qkv(), **ARGUMENTS[case])


SHAPES: dict[str, dict[str, int]] = {
    "one head, one query": {"n": 1, "k": 1, "t": 1},
    "as many heads of keys, fewer keys": {"k": N, "s": 3},
    "one head of keys, one key, head dim 1": {"k": 1, "s": 1, "h": 1},
}


@pytest.mark.parametrize("case", SHAPES)
def test_shapes_mean_what_they_mean_to_jax(case, assert_near):
    assert_as_jax(assert_near, *qkv(**SHAPES[case]), is_causal=True)


WRITTEN_OTHERWISE = {
    "numpy scale": ({"scale": np.float64(0.5)}, {"scale": 0.5}),
    "jax scale": ({"scale": jnp.bfloat16(0.5)}, {"scale": 0.5}),
    "whole scale": ({"scale": 2}, {"scale": 2.0}),
    "numpy boolean": ({"is_causal": np.bool_(True)}, {"is_causal": True}),
    "numpy window": ({"local_window_size": [np.int64(1), 1]}, {"local_window_size": 1}),
    "mask of one dimension": ({"mask": booleans(S)}, {"mask": booleans(S)[None, None, None]}),
    "bias of three dimensions": ({"bias": np.ones((N, 1, S))}, {"bias": jnp.ones((1, N, 1, S))}),
}


@pytest.mark.parametrize("case", WRITTEN_OTHERWISE)
def test_the_ways_to_write_an_argument_are_jaxs(case, assert_near):
    given, plain = WRITTEN_OTHERWISE[case]
    assert is_ours(*qkv(), **given)
    assert_near(dot_product_attention(*qkv(), **given), jaxs(*qkv(), **plain), 1e-5)


@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda d: d.__name__)
def test_16_bit_floats_keep_their_dtype(dtype, assert_near):
    """Against JAX in float32, which has no float16 on a CPU."""
    arrays = dict(zip(QKV, qkv(dtype)))
    found = jax.jit(functools.partial(with_gradients, dot_product_attention, is_causal=True))(arrays, array(9, B, T, N, H))
    assert {x.dtype for x in found.values()} == {jnp.dtype(dtype)}
    wide = {name: x.astype(F32) for name, x in arrays.items()}
    wanted = jax.jit(functools.partial(with_gradients, jaxs, is_causal=True))(wide, array(9, B, T, N, H))
    assert_all_near(assert_near, found, {name: x.astype(dtype) for name, x in wanted.items()})


@st.composite
def calls(draw: Any) -> tuple[dict[str, int], dict[str, Any]]:
    sizes = {name: draw(st.integers(1, most), label=name) for name, most in (("b", 2), ("t", 4), ("s", 5), ("k", 2), ("h", 3))}
    sizes["n"] = sizes["k"] * draw(st.integers(1, 2), label="group")
    b, t, s, n = (sizes[name] for name in "btsn")

    def some(label: str, strategy: Any) -> Any:
        return draw(st.none() | strategy, label=label)

    def scores() -> Any:
        return st.tuples(*(st.sampled_from([1, size]) for size in (b, n, t, s)))

    def of_batch(most: int) -> Any:
        return st.lists(st.integers(-1, most + 1), min_size=b, max_size=b)

    kwargs = {
        "bias": (shape := some("bias", scores())) and array(3, *shape),
        "mask": (shape := some("mask", scores())) and np.random.default_rng(4).random(shape) < 0.7,
        "scale": some("scale", st.sampled_from([2.0, -0.5])),
        "query_seq_lengths": (each := some("query lengths", of_batch(t))) and lengths(*each),
        "key_value_seq_lengths": (each := some("key lengths", of_batch(s))) and lengths(*each),
        "local_window_size": some("window", st.tuples(st.integers(0, 4), st.integers(0, 4))),
        "is_causal": draw(st.booleans(), label="causal"),
    }
    return sizes, kwargs


@examples(5, suppress_health_check=[hypothesis.HealthCheck.function_scoped_fixture])
@hypothesis.given(calls())
def test_any_combination_of_arguments_agrees_with_jax(assert_near, call):
    sizes, kwargs = call
    assert_as_jax(assert_near, *qkv(**sizes), **kwargs)


def test_parameters_have_jaxs_names_order_and_defaults():
    ours, theirs = (list(inspect.signature(f).parameters.values()) for f in (dot_product_attention, jaxs))
    assert [(p.name, p.default, p.kind) for p in ours[: len(theirs)]] == [(p.name, p.default, p.kind) for p in theirs]
    assert [p.name for p in ours[len(theirs) :]] == ["backend"]


def test_arguments_by_position_and_by_keyword(assert_near):
    q, k, v = qkv()
    bias, mask = array(3, 1, N, T, S), booleans(T, S)
    wanted = jaxs(q, k, v, bias, mask)
    assert_near(dot_product_attention(q, k, v, bias, mask), wanted, 1e-5)
    assert_near(dot_product_attention(mask=mask, bias=bias, value=v, key=k, query=q), wanted, 1e-5)


RANKS = {
    "no batch": [0, 0, 0],
    "query without batch": [0, slice(0, 1), slice(0, 1)],
    "value without batch": [slice(0, 1), slice(0, 1), 0],
    "all, in NumPy": [slice(None)] * 3,
}


@pytest.mark.parametrize("case", RANKS)
def test_leading_dimensions_may_be_left_out_as_in_jax(case, assert_near):
    arrays = [np.asarray(x)[index] for x, index in zip(qkv(), RANKS[case])]
    assert is_ours(*arrays)
    for ours, wanted in zip(*(f(*arrays, is_causal=True, return_residual=True) for f in (dot_product_attention, jaxs))):
        assert ours.shape == wanted.shape
        assert_near(ours, wanted, 1e-5)


def test_queries_of_one_token_may_lack_its_dimension_too(assert_near):
    q, k, v = (x[0] for x in qkv())
    assert_near(dot_product_attention(q[0], k, v), jaxs(q[0], k, v), 1e-5)


# --- what differs


def test_a_row_that_sees_nothing_is_zeros_with_zero_gradients_where_jax_takes_the_mean():
    q, k, v = qkv(BF16)
    hidden = {"mask": np.zeros((1, 1, T, S), bool)}
    np.testing.assert_array_equal(float64(dot_product_attention(q, k, v, **hidden)), 0)
    np.testing.assert_allclose(float64(jaxs(q, k, v, **hidden))[0, 0, 0], float64(v)[0, :, 0].mean(0), atol=0.02)
    loss = lambda q, k, v: jnp.sum(dot_product_attention(q, k, v, **hidden).astype(F32) ** 2 + 1)  # noqa: E731
    for grad in jax.grad(loss, argnums=(0, 1, 2))(q, k, v):
        np.testing.assert_array_equal(float64(grad), 0)


@pytest.mark.parametrize("dtype", [BF16, F16, F32], ids=lambda d: d.__name__)
def test_the_residual_of_a_row_that_sees_nothing_is_jaxs(dtype):
    args = {"key_value_seq_lengths": lengths(0, 7), "query_seq_lengths": lengths(5, 3), "return_residual": True}
    ours, wanted = (f(*qkv(dtype), **args)[1] for f in (dot_product_attention, jaxs))
    np.testing.assert_allclose(float64(ours)[0], float64(wanted)[0], rtol=1e-5)
    np.testing.assert_allclose(float64(ours)[1, 3:], float64(wanted)[1, 3:], rtol=1e-5)


def test_forward_mode_and_second_derivatives_raise_where_jaxs_do_not():
    q, k, v = qkv(b=1)
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda q: dot_product_attention(q, k, v), (q,), (q,))
    slope = jax.grad(lambda q: jnp.sum(dot_product_attention(q, k, v) ** 2))
    with pytest.raises(ValueError, match="flash_attention has a gradient, but no gradient of that"):
        jax.grad(lambda q: jnp.sum(slope(q) ** 2))(q)
    jax.jvp(lambda q: dot_product_attention(q, k, v, implementation="xla"), (q,), (q,))  # JAX's own


# --- what is JAX's

Q, KEYS, VALUES = qkv()
LEFT_TO_JAX: dict[str, tuple[Any, str]] = {  # arguments in the place of the plain ones -> part of the reason
    "named implementation": ({"implementation": "xla"}, "implementation='xla' asks for JAX's own"),
    "list": ({"key": np.asarray(KEYS).tolist()}, "key is no array but a list"),
    "list as mask": ({"mask": [True] * S}, "mask is no array but a list"),
    "integers": ({"query": Q.astype(int), "key": KEYS.astype(int), "value": VALUES.astype(int)}, "dtype int32 is not one of"),
    "integer bias": ({"bias": np.arange(S)}, "bias has dtype int32, not one of"),
    "boolean bias": ({"bias": booleans(S)}, "bias has dtype bool, not one of"),
    "zero scale": ({"scale": 0}, "scale=0 is 0 or out of float32's range"),
    "infinite scale": ({"scale": float("inf")}, "scale=inf is 0 or out"),
    "tiny scale": ({"scale": 1e-60}, "scale=1e-60 is 0 or out"),
    "scales": ({"scale": np.full((1, 1, 1, S), 0.5)}, "scale is no number but a ndarray"),
    "negative window": ({"local_window_size": (-1, 3)}, r"local_window_size=\(-1, 3\) is not one or two whole numbers"),
    "fractional window": ({"local_window_size": (0.5, 1.0)}, "local_window_size=.* is not one or two whole numbers"),
    "causal by number": ({"is_causal": 1}, "is_causal or return_residual is no bool"),
}


@pytest.mark.parametrize("case", LEFT_TO_JAX)
def test_what_only_jax_computes_is_its_own(case):
    replaced, reason = LEFT_TO_JAX[case]
    call = {"query": Q, "key": KEYS, "value": VALUES} | replaced
    assert not is_ours(**call)
    wanted = jaxs(**call)
    out = dot_product_attention(**call)
    assert out.dtype == wanted.dtype
    np.testing.assert_array_equal(float64(out), float64(wanted))
    with pytest.raises(ValueError, match=f"backend='mosaic' cannot run this dot_product_attention, as {reason}.*backend=None"):
        dot_product_attention(**call, backend="mosaic")


def test_a_traced_scale_is_jaxs_with_its_gradient(assert_near):
    of = lambda f: jax.grad(lambda scale: jnp.sum(f(Q, KEYS, VALUES, scale=scale) ** 2))(0.3)  # noqa: E731
    assert_near(of(dot_product_attention), of(jaxs), 1e-5)


def test_float64_is_jaxs():
    with jax.enable_x64(True):
        arrays = [x.astype(jnp.float64) for x in qkv()]
        assert not is_ours(*arrays)
        assert dot_product_attention(*arrays).dtype == jnp.float64
        assert not is_ours(*qkv(), bias=array(3, S, dtype=jnp.float64))
        assert is_ours(*qkv(), key_value_seq_lengths=lengths(3, 4))


def test_debug_infs_passes_as_it_does_in_jax():
    """Masks of ours hold infinities."""
    hidden = {"mask": booleans(T, S), "key_value_seq_lengths": lengths(4, 0)}
    with jax.debug_infs(True):
        dot_product_attention(Q, KEYS, VALUES, **hidden).block_until_ready()


def test_what_is_left_to_jax_is_said_once(caplog):
    def said() -> list[str]:
        return [record.getMessage() for record in caplog.records if "JAX's own" in record.getMessage()]

    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        dot_product_attention(Q, KEYS, VALUES, implementation="xla")  # asked for
        assert said() == []
        for _ in range(2):
            dot_product_attention(Q, KEYS, VALUES, local_window_size=(-3, 4))
    reason = "local_window_size=(-3, 4) is not one or two whole numbers from 0 on"
    assert said() == [f"dot_product_attention runs through JAX's own function: {reason}"]


def test_values_may_have_another_head_dim_which_jax_refuses(assert_near):
    q, k, v = qkv(b=B)
    out, residual = dot_product_attention(q, k, v[..., :3], is_causal=True, return_residual=True)
    wanted, wanted_residual = jaxs(q, k, v, is_causal=True, return_residual=True)
    assert_near(out, wanted[..., :3], 1e-5)
    np.testing.assert_allclose(residual, wanted_residual, rtol=1e-5)
    wide = dot_product_attention(q[0], k[0], jnp.concatenate([v, v], axis=3)[0])
    assert_near(wide, np.tile(jaxs(q, k, v)[0], 2), 1e-5)


# --- the same errors

WRONG: dict[str, dict[str, Any]] = {
    "head dims": {"query": array(0, B, T, N, H + 1)},
    "batches": {"query": array(0, B + 1, T, N, H)},
    "heads": {"query": array(0, B, T, 3, H)},
    "keys and values": {"value": VALUES[:, 1:]},
    "dtypes": {"query": Q.astype(BF16)},
    "five dimensions": {"query": Q[None]},
    "mask of floats": {"mask": np.ones((T, S), np.float32)},
    "mask of five dimensions": {"mask": np.ones((1, 1, 1, T, S), bool)},
    "mask of three heads": {"mask": np.ones((1, 3, T, S), bool)},
    "mask of other keys": {"mask": np.ones((T, S + 1), bool)},
    "bias of other rows": {"bias": array(3, T + 1, S)},
    "lengths of another batch": {"query_seq_lengths": lengths(1, 2, 3)},
    "one length": {"key_value_seq_lengths": np.int32(3)},
    "lengths as floats": {"key_value_seq_lengths": np.ones(B, np.float32)},
    "16-bit lengths": {"key_value_seq_lengths": np.ones(B, np.int16)},
    "None as query": {"query": None},
    "float8": {name: x.astype("float8_e4m3fn") for name, x in (("query", Q), ("key", KEYS), ("value", VALUES))},
    "complex scale": {"scale": 1j},
    "window of three": {"local_window_size": (1, 2, 3)},
    "unknown implementation": {"implementation": "flash"},
    "cudnn on a CPU": {"implementation": "cudnn"},
}


@pytest.mark.parametrize("case", WRONG)
def test_errors_are_those_of_jax(case):
    def error(f: Callable[..., Any]) -> Exception:
        with pytest.raises(Exception) as caught:
            f(**{"query": Q, "key": KEYS, "value": VALUES} | WRONG[case])
        return caught.value

    ours, theirs = error(dot_product_attention), error(jaxs)
    assert type(ours) is type(theirs)
    assert str(ours).splitlines()[:1] == str(theirs).splitlines()[:1]


def test_empty_dimensions_are_jaxs():
    for sizes in ({"b": 0}, {"t": 0}, {"s": 0}):
        arrays = qkv(**sizes)
        assert not is_ours(*arrays)
        np.testing.assert_array_equal(float64(dot_product_attention(*arrays)), float64(jaxs(*arrays)))


def test_an_unknown_backend_is_refused():
    for arrays in (qkv(), LEFT_TO_JAX["integers"][0].values()):
        with pytest.raises(ValueError, match="backend='cuda' is not one of mosaic, interpret, xla"):
            dot_product_attention(*arrays, backend="cuda")


# --- transforms


def scalar(f: Callable[..., jax.Array], **kwargs: Any) -> Callable[..., jax.Array]:
    return lambda *args: jnp.sum(jnp.sin(f(*args, **kwargs)))


def test_the_residual_carries_no_gradient():
    residual = lambda q: jnp.sum(dot_product_attention(q, KEYS, VALUES, return_residual=True)[1])  # noqa: E731
    np.testing.assert_array_equal(jax.grad(residual)(Q), 0)


VMAPS = {
    "all": (0, 0, 0, None, 0),
    "queries": (0, None, None, None, None),
    "values, on another axis": (None, None, 2, None, None),
    "bias": (None, None, None, 0, None),
    "lengths": (None, None, None, None, 0),
}


@pytest.mark.parametrize("axes", VMAPS.values(), ids=VMAPS)
def test_vmap_of_values_and_gradients(axes, assert_near):
    unmapped = (*qkv(t=3, s=4), array(3, 1, N, 3, 4), jnp.asarray(lengths(2, 4)))
    args = [x if a is None else jnp.stack([x, x[::-1]], a) for x, a in zip(unmapped, axes)]

    def both(f: Callable[..., jax.Array]) -> Any:
        def one(q: Any, k: Any, v: Any, bias: Any, lens: Any) -> Any:
            loss = lambda *floats: scalar(f, key_value_seq_lengths=lens, is_causal=True)(*floats)  # noqa: E731
            return jax.value_and_grad(loss, argnums=(0, 1, 2, 3))(q, k, v, bias)

        return jax.jit(jax.vmap(one, in_axes=axes))(*args)

    for ours, wanted in zip(*(jax.tree.leaves(both(f)) for f in (dot_product_attention, jaxs))):
        assert_near(ours, wanted, 1e-4)


def test_scan_over_layers_with_gradients(assert_near):
    def loss(f: Callable[..., jax.Array], x: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, scale: (x + scale * f(x, x, x, is_causal=True), None))
        return jnp.sum(jax.lax.scan(layer, x, jnp.array([0.3, 0.5]))[0] ** 2)

    ours, wanted = (jax.jit(jax.grad(functools.partial(loss, f)))(Q) for f in (dot_product_attention, jaxs))
    assert_near(ours, wanted, 1e-5)


def test_strict_promotion_of_ranks_and_dtypes():
    """JAX's tests run under the first; its function asks for promotion where a bias has 16 bits, ours never."""
    args = {"is_causal": True, "key_value_seq_lengths": lengths(4, 7), "query_seq_lengths": lengths(3, 5)}
    with jax.numpy_rank_promotion("raise"), jax.numpy_dtype_promotion("strict"):
        for dtype in (BF16, F32):
            jax.eval_shape(jax.grad(scalar(dot_product_attention, **args)), *qkv(dtype), array(3, 1, 1, T, S, dtype=BF16))
            jax.eval_shape(scalar(dot_product_attention, mask=booleans(S)), *qkv(dtype))


# --- in place of JAX's


def test_it_can_be_put_in_the_place_of_jaxs_function(monkeypatch, assert_near):
    """Then what it leaves to JAX's function must not come back to it."""
    monkeypatch.setattr(jax.nn, "dot_product_attention", dot_product_attention)
    for kwargs in ({}, {"implementation": "xla"}, {"scale": 0.0}):
        assert_near(jax.nn.dot_product_attention(*qkv(), **kwargs), jaxs(*qkv(), **kwargs), 1e-5)


def test_export_with_a_symbolic_number_of_tokens(assert_near):
    (tokens,) = jax.export.symbolic_shape("tokens")
    shapes = [jax.ShapeDtypeStruct((B, tokens, heads, H), F32) for heads in (N, K, K)]
    exported = jax.export.export(jax.jit(dot_product_attention))(*shapes)
    assert_near(exported.call(*qkv(t=S)), jaxs(*qkv(t=S)), 1e-5)


def test_explicit_shardings_are_jaxs_matter(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    with jax.set_mesh(mesh):
        arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in qkv()]
        assert not is_ours(*arrays)
        out = dot_product_attention(*arrays)
        assert out.sharding.is_equivalent_to(arrays[0].sharding, 4)
        assert_near(out, jaxs(*arrays), 1e-5)


def test_automatic_shardings_run_ours(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    arrays = [jax.device_put(x, NamedSharding(mesh, PartitionSpec("x"))) for x in qkv()]
    assert is_ours(*arrays)
    assert_near(jax.jit(dot_product_attention)(*arrays), jaxs(*qkv()), 1e-5)


def test_shard_map_over_batch_and_heads_with_gradients(assert_near):
    mesh = jax.make_mesh((2, 2), ("b", "n"), axis_types=(AxisType.Auto,) * 2)
    arrays, masks = (*qkv(), array(3, 1, N, T, S)), (booleans(T, S), jnp.asarray(lengths(4, 7)))
    spec = PartitionSpec("b", None, "n")
    specs = (spec, spec, spec, PartitionSpec(None, "n"), PartitionSpec(), PartitionSpec("b"))

    def attention(q: Any, k: Any, v: Any, bias: Any, mask: Any, lens: Any) -> jax.Array:
        return dot_product_attention(q, k, v, bias, mask, key_value_seq_lengths=lens, is_causal=True)

    def loss(*floats: jax.Array) -> jax.Array:
        return jnp.sum(jnp.sin(jax.shard_map(attention, mesh=mesh, in_specs=specs, out_specs=spec)(*floats, *masks)))

    ours = jax.jit(jax.grad(loss, argnums=(0, 1, 2, 3)))(*arrays)
    plain = lambda *floats: scalar(jaxs, mask=masks[0], key_value_seq_lengths=masks[1], is_causal=True)(*floats)  # noqa: E731
    for grad, wanted in zip(ours, jax.jit(jax.grad(plain, argnums=(0, 1, 2, 3)))(*arrays)):
        assert_near(grad, wanted, 1e-4)


# --- the kernel


def test_the_interpreted_kernel_aligns_rows_with_keys_as_jax_does(assert_near):
    """A row is aligned with the key of its own number, whatever the numbers of tokens and the lengths are."""
    arrays = qkv(BF16, b=1, t=70, s=130, n=1, k=1, h=64)
    args = {"is_causal": True, "local_window_size": (40, 3), "key_value_seq_lengths": lengths(90), "return_residual": True}
    ours, wanted = dot_product_attention(*arrays, **args, backend="interpret"), jaxs(*arrays, **args)
    for x, y in zip(ours, wanted):
        assert_near(x, y, TOLERANCE[BF16])


KERNEL = {
    "plain": {},
    "causal": {"is_causal": True},
    "window, lengths": {"local_window_size": (100, 30), "key_value_seq_lengths": lengths(200, 333)},
    "lengths of both, causal": {
        "query_seq_lengths": lengths(300, 17),
        "key_value_seq_lengths": lengths(150, 333),
        "is_causal": True,
    },
    "bias": {"bias": array(3, 1, N, 300, 333)},
    "mask": {"mask": booleans(B, 1, 300, 333)},
}


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("case", KERNEL)
def test_the_kernel_agrees_with_jax(dtype, case, assert_near):
    ours = functools.partial(dot_product_attention, backend="mosaic")
    out_grad = array(9, B, 300, N, 64)
    arrays = dict(zip(QKV, qkv(dtype, t=300, s=333, h=64)))
    args = dict(KERNEL[case])
    if "bias" in args:
        arrays["bias"] = args.pop("bias")
    found, wanted = (jax.jit(functools.partial(with_gradients, f, **args))(arrays, out_grad) for f in (ours, jaxs))
    assert_all_near(assert_near, found, wanted)


@pytest.mark.gpu
def test_a_call_on_a_gpu_runs_the_kernel_where_it_can():
    wide, narrow = (jax.jit(dot_product_attention).lower(*qkv(dtype, h=64)) for dtype in (BF16, F32))
    assert "mosaic_gpu" in wide.as_text()
    assert "mosaic_gpu" not in narrow.as_text()
