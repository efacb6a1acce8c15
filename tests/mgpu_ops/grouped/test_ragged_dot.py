"""What a user of `mgpu_ops.ragged_dot` relies on: it takes the place of `jax.lax.ragged_dot`.

`tests/run_jax_tests.py` runs JAX's own tests of that function on ours; here is what those leave out.
"""

from __future__ import annotations

import functools
import inspect
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.sharding import AxisType, NamedSharding, PartitionSpec
from jax.test_util import check_grads

from mgpu_ops import ragged_dot
from tests.arrays import normal

BF16, F16, F32, I8, I32 = jnp.bfloat16, jnp.float16, jnp.float32, jnp.int8, jnp.int32
TOLERANCE = {BF16: 8e-3, F16: 1e-3, F32: 1e-5}
M, K, N, GROUPS = 12, 8, 16, 3
SIZES = np.array([4, 0, 5], np.int32)  # three rows belong to no group


pytestmark = pytest.mark.usefixtures("no_races")


def array(seed: int, *shape: int, dtype: Any = F32) -> jax.Array:
    return (4 * normal(seed, *shape)).astype(dtype)


def operands(dtype: Any = F32, rhs_dtype: Any = None) -> tuple[jax.Array, jax.Array]:
    return array(0, M, K, dtype=dtype), array(1, GROUPS, K, N, dtype=rhs_dtype or dtype)


def is_ours(*args: Any, **kwargs: Any) -> bool:
    """Whether the call is computed by ours and not left to JAX's function."""
    return "ragged_dot_general" not in str(jax.make_jaxpr(lambda: ragged_dot(*args, **kwargs))())


def assert_same(ours: Any, jaxs: Any, near: Callable[[Any, Any, float], None]) -> None:
    assert (ours.shape, ours.dtype, ours.weak_type) == (jaxs.shape, jaxs.dtype, jaxs.weak_type)
    if ours.size and jnp.any(jaxs):
        ours, jaxs = (x.view(F32) if jnp.iscomplexobj(x) else x for x in (ours, jaxs))
        near(ours, jaxs, TOLERANCE.get(ours.dtype.type, 1e-5))


# --- the same arguments, the same values

GROUPED = {  # what ours computes
    "float32": (operands(), {}),
    "bfloat16": (operands(BF16), {}),
    "float16": (operands(F16), {}),
    "16 bits in, float32 out": (operands(BF16), {"preferred_element_type": F32}),
    "dtype by name": (operands(F16), {"preferred_element_type": "float32"}),
    "its own dtype": (operands(BF16), {"preferred_element_type": jnp.dtype(BF16)}),
    "default precision": (operands(), {"precision": lax.Precision.DEFAULT}),
    "default precision by name": (operands(), {"precision": "default"}),
    "16 bits and any precision": (operands(BF16), {"precision": lax.Precision.HIGHEST}),
    "numpy": (tuple(map(np.asarray, operands())), {}),
    "no rows": ((array(0, 0, K), operands()[1]), {}),
    "no columns": ((operands()[0], array(1, GROUPS, K, 0)), {}),
    "nothing to sum": ((array(0, M, 0), array(1, GROUPS, 0, N)), {}),
}
LEFT_TO_JAX = {
    "two float dtypes": (operands(BF16, F32), {}),
    "two 16-bit dtypes": (operands(F16, BF16), {}),
    "int8": (operands(I8), {}),
    "int8 into int32": (operands(I8), {"preferred_element_type": I32}),
    "int32": (operands(I32), {}),
    "complex": (operands(jnp.complex64), {}),
    "float8 into float32": (operands(jnp.float8_e4m3fn), {"preferred_element_type": F32}),
    "float32 into bfloat16": (operands(), {"preferred_element_type": BF16}),
    "bfloat16 into float16": (operands(BF16), {"preferred_element_type": F16}),
    "high precision": (operands(), {"precision": "highest"}),
    "a precision each": (operands(), {"precision": ("default", "highest")}),
    "no groups": ((operands()[0], array(1, 0, K, N), np.zeros(0, np.int32)), {}),
}


@pytest.mark.parametrize("case", GROUPED | LEFT_TO_JAX)
def test_values_shape_and_dtype_are_those_of_jax(case, assert_near):
    args, kwargs = (GROUPED | LEFT_TO_JAX)[case]
    args = (*args, SIZES)[:3]
    assert is_ours(*args, **kwargs) == (case in GROUPED)
    wanted = lax.ragged_dot(*args, **kwargs)
    assert_same(ragged_dot(*args, **kwargs), wanted, assert_near)
    assert_same(jax.jit(functools.partial(ragged_dot, **kwargs))(*args), wanted, assert_near)


def test_parameters_have_jaxs_names_order_and_defaults():
    ours, jaxs = (list(inspect.signature(f).parameters.values()) for f in (ragged_dot, lax.ragged_dot))
    assert [(p.name, p.default, p.kind) for p in ours[: len(jaxs)]] == [(p.name, p.default, p.kind) for p in jaxs]
    assert [p.name for p in ours[len(jaxs) :]] == ["backend"]


def test_arguments_by_position_and_by_keyword(assert_near):
    lhs, rhs = operands(BF16)
    wanted = lax.ragged_dot(lhs, rhs, SIZES, None, F32)
    assert_same(ragged_dot(lhs, rhs, SIZES, None, F32, None, None), wanted, assert_near)
    named = ragged_dot(group_sizes=SIZES, preferred_element_type=F32, rhs=rhs, lhs=lhs, group_offset=None, out_sharding=None)
    assert_same(named, wanted, assert_near)


def test_group_offset_which_jax_documents_and_does_not_compute(assert_near):
    lhs, rhs = operands(BF16)
    sizes = np.array([2, *SIZES, 1])
    lhs = jnp.concatenate([jnp.full((2, lhs.shape[1]), jnp.nan, BF16), lhs])
    out = ragged_dot(lhs, rhs, sizes, group_offset=np.int32(1))
    assert_near(out[2:], lax.ragged_dot(lhs[2:], rhs, SIZES), 8e-3)
    np.testing.assert_array_equal(out[:2], 0)
    grad = jax.grad(lambda rhs: ragged_dot(lhs, rhs, sizes, group_offset=np.int32(1)).astype(F32).sum())(rhs)
    assert_near(grad, jax.grad(lambda rhs: lax.ragged_dot(lhs[2:], rhs, SIZES).astype(F32).sum())(rhs), 2e-2)


SUMS = {
    "less than m": [4, 0, 5],
    "m": [4, 3, 5],
    "more than m": [4, 7, 5],
    "far more": [4, 20, 5],
    "none": [0, 0, 0],
    "one-hot": [0, 12, 0],
}


@pytest.mark.parametrize("sizes", SUMS.values(), ids=SUMS)
def test_sizes_of_any_sum_mean_what_they_mean_to_jax(sizes, assert_near):
    """Unlike `grouped_matmul`, which raises for a known sum above m."""
    lhs, rhs = operands()
    assert_same(ragged_dot(lhs, rhs, np.array(sizes)), lax.ragged_dot(lhs, rhs, np.array(sizes)), assert_near)


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int32, np.int64])
def test_sizes_of_any_integer_dtype(dtype, assert_near):
    lhs, rhs = array(0, 300, K), operands()[1]  # more rows than 8 bits count: JAX's sums of such sizes wrap around
    sizes = np.array([100, 20, 120], dtype)
    assert is_ours(lhs, rhs, sizes)
    assert_same(ragged_dot(lhs, rhs, sizes), lax.ragged_dot(lhs, rhs, sizes.astype(np.int32)), assert_near)


@pytest.mark.parametrize("dtype", ["int64", "uint32", "uint64"])
@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
def test_sizes_wider_than_int32_mean_what_they_mean_to_jax(dtype, jit, assert_near):
    lhs, rhs = operands()
    sizes = np.array([4, 2**31 + 1 if dtype == "uint32" else 2**32 + 1, 5], dtype)
    with jax.enable_x64(True):
        ours, jaxs = (jax.jit(f) if jit else f for f in (ragged_dot, lax.ragged_dot))
        assert_same(ours(lhs, rhs, sizes), jaxs(lhs, rhs, sizes), assert_near)
    assert_same(ragged_dot(lhs, rhs, sizes), lax.ragged_dot(lhs, rhs, np.array([4, M, 5])), assert_near)


def test_a_negative_size_counts_as_zero(assert_near):
    lhs, rhs = operands()
    assert_same(ragged_dot(lhs, rhs, np.array([4, -2, 5])), lax.ragged_dot(lhs, rhs, SIZES), assert_near)


# --- the same errors

LHS, RHS = operands()
WRONG = {
    "k": (array(0, M, K + 1), RHS, SIZES),
    "number of groups": (LHS, RHS, SIZES[:2]),
    "rank of lhs": (array(0, 2, M, K), RHS, SIZES),
    "rank of rhs": (LHS, array(0, K, N), SIZES),
    "batches": (array(0, 2, M, K), array(0, 2, GROUPS, K, N), np.ones((2, GROUPS), np.int32)),
    "scalar sizes": (LHS, RHS, np.int32(3)),
    "sizes of two dimensions": (LHS, RHS, np.ones((M, GROUPS), np.int32)),
    "float sizes": (LHS, RHS, SIZES.astype(np.float32)),
    "bool sizes": (LHS, RHS, SIZES.astype(bool)),
    "list of sizes": (LHS, RHS, [4, 0, 5]),
    "list as lhs": (np.asarray(LHS).tolist(), RHS, SIZES),
    "None as lhs": (None, RHS, SIZES),
    "no sizes": (LHS, RHS),
    "unknown precision": (LHS, RHS, SIZES, "exact"),
    "unknown dtype": (LHS, RHS, SIZES, None, "decimal"),
    "one argument too many": (LHS, RHS, SIZES, None, None, None, None, None),
}


@pytest.mark.parametrize("jit", [False, True], ids=["eager", "jit"])
@pytest.mark.parametrize("case", WRONG)
def test_errors_are_those_of_jax(case, jit):
    def error(f: Callable[..., Any]) -> Exception:
        call = functools.partial(f, *WRONG[case])
        with pytest.raises(Exception) as caught:
            (jax.jit(call) if jit else call)()
        return caught.value

    ours, jaxs = error(ragged_dot), error(lax.ragged_dot)
    assert type(ours) is type(jaxs)
    if "positional argument" not in str(jaxs):  # Python's own, which count ours
        assert str(ours).splitlines()[0] == str(jaxs).splitlines()[0]


def test_an_unknown_keyword_is_a_type_error():
    with pytest.raises(TypeError, match="transpose_rhs"):
        ragged_dot(LHS, RHS, SIZES, transpose_rhs=True)


@pytest.mark.parametrize("dtype", [F32, I32], ids=["float32", "int32"])
def test_an_unknown_backend_is_refused(dtype):
    with pytest.raises(ValueError, match="backend='cuda' is not one of mosaic, interpret, xla"):
        ragged_dot(*operands(dtype), SIZES, backend="cuda")


@pytest.mark.parametrize("backend", ["mosaic", "interpret"])
def test_a_named_kernel_is_not_replaced_by_jax_in_silence(backend):
    with pytest.raises(ValueError, match=f"backend='{backend}' cannot run this ragged_dot.*backend=None"):
        ragged_dot(*operands(I32), SIZES, backend=backend)


# --- transforms


def scalar(f: Callable[..., jax.Array], **kwargs: Any) -> Callable[..., jax.Array]:
    weights = jnp.cos(jnp.arange(M * N, dtype=F32)).reshape(M, N)
    return lambda lhs, rhs, sizes: jnp.sum(f(lhs, rhs, sizes, **kwargs).astype(F32) * weights)


@pytest.mark.parametrize(("dtype", "out"), [(F32, None), (BF16, F32), (F16, None)], ids=["float32", "bfloat16", "float16"])
def test_gradients_are_those_of_jax(dtype, out, assert_near):
    kwargs = {"preferred_element_type": out}
    ours, jaxs = (jax.grad(scalar(f, **kwargs), argnums=(0, 1))(*operands(dtype), SIZES) for f in (ragged_dot, lax.ragged_dot))
    for grad, wanted in zip(ours, jaxs):
        assert grad.dtype == dtype
        assert_near(grad, wanted, 2 * TOLERANCE[dtype])


def test_gradients_to_second_order_in_reverse_mode():
    """As in JAX's tests of its other products; they have none of this for ragged_dot."""
    check_grads(lambda lhs, rhs: ragged_dot(lhs, rhs, SIZES), operands(), order=2, modes=["rev"], atol=0.1, rtol=0.1)


def test_gradient_of_a_gradient(assert_near):
    def penalty(f: Callable[..., jax.Array]) -> jax.Array:
        slope = lambda lhs, rhs: jax.grad(lambda x: jnp.sum(f(x, rhs, SIZES) ** 2))(lhs)  # noqa: E731
        return jax.grad(lambda rhs: jnp.sum(slope(operands()[0], rhs) ** 2))(operands()[1])

    assert_near(penalty(ragged_dot), penalty(lax.ragged_dot), 1e-4)


def test_vmap_over_all_arguments_as_in_jax(assert_near):
    lhs, rhs, sizes = array(0, 2, M, K), array(1, 2, GROUPS, K, N), np.array([[4, 0, 5], [1, 2, 9]])
    assert_same(jax.vmap(ragged_dot)(lhs, rhs, sizes), jax.vmap(lax.ragged_dot)(lhs, rhs, sizes), assert_near)


def test_vmap_of_gradients(assert_near):
    """JAX does not map its own gradients."""
    lhs, rhs, sizes = array(0, 2, M, K), array(1, 2, GROUPS, K, N), np.array([[4, 0, 5], [1, 2, 9]])
    grads = jax.vmap(jax.grad(scalar(ragged_dot), argnums=(0, 1)))(lhs, rhs, sizes)
    for i in range(2):
        wanted = jax.grad(scalar(lax.ragged_dot), argnums=(0, 1))(lhs[i], rhs[i], sizes[i])
        assert_near(grads[0][i], wanted[0], 1e-5)
        assert_near(grads[1][i], wanted[1], 1e-5)


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, None), (None, None, 0), (1, None, 0)], ids=str)
def test_vmap_over_some_arguments_which_jax_does_not_do(axes, assert_near):
    stacked = [jnp.stack([x, x[::-1]], axis=axis or 0) for x, axis in zip((*operands(), jnp.asarray(SIZES)), axes)]
    args = [x if axis is not None else x[0] for x, axis in zip(stacked, axes)]
    out = jax.vmap(ragged_dot, in_axes=axes)(*args)
    for i in range(2):
        one = [x if axis is None else jnp.take(x, i, axis) for x, axis in zip(args, axes)]
        assert_near(out[i], lax.ragged_dot(*one), 1e-5)


def test_scan_over_layers(assert_near):
    lhs, layers = array(0, M, K), array(1, 2, GROUPS, K, K)

    def last(f: Callable[..., jax.Array]) -> jax.Array:
        return lax.scan(lambda x, w: (jnp.tanh(f(x, w, SIZES)), None), lhs, layers)[0]

    assert_near(jax.jit(functools.partial(last, ragged_dot))(), last(lax.ragged_dot), 1e-5)


def test_forward_mode_raises_and_says_what_it_is():
    """Unlike JAX's function; documented."""
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(lambda lhs: ragged_dot(lhs, RHS, SIZES), (LHS,), (LHS,))
    jax.jvp(lambda lhs: ragged_dot(lhs, RHS, SIZES, precision="highest"), (LHS,), (LHS,))  # JAX's own


def test_strict_promotion_as_some_programs_ask_for(assert_near):
    lhs, rhs = operands(BF16)
    wanted = lax.ragged_dot(lhs, rhs, SIZES)
    with jax.numpy_dtype_promotion("strict"), jax.numpy_rank_promotion("raise"):
        assert_same(ragged_dot(lhs, rhs, SIZES), wanted, assert_near)
        jax.grad(scalar(ragged_dot), argnums=(0, 1))(lhs, rhs, SIZES)


def test_64_bit_mode(assert_near):
    with jax.enable_x64(True), jax.numpy_dtype_promotion("strict"):
        lhs, rhs = (x.astype(jnp.float64) for x in operands())
        assert is_ours(lhs, rhs, SIZES.astype(np.int64))
        out = ragged_dot(lhs, rhs, SIZES.astype(np.int64))
        assert out.dtype == jnp.float64
        assert_near(out, lax.ragged_dot(lhs, rhs, SIZES), 1e-14)


def test_gradients_without_a_kernel_lower_to_no_transpose():
    """JAX's test of gradients asserts the same, on a GPU."""
    for argnum in (0, 1):
        grad = jax.jit(jax.grad(scalar(ragged_dot), argnums=argnum))
        assert "stablehlo.transpose" not in grad.lower(*operands(), SIZES).as_text()


# --- in place of JAX's


def test_it_can_be_put_in_the_place_of_jaxs_function(monkeypatch, assert_near):
    """Then what it leaves to JAX's function must not come back to it."""
    jaxs = lax.ragged_dot
    monkeypatch.setattr(lax, "ragged_dot", ragged_dot)
    for dtype in (BF16, I8):
        assert_same(lax.ragged_dot(*operands(dtype), SIZES), jaxs(*operands(dtype), SIZES), assert_near)


def test_export_with_a_symbolic_number_of_rows(assert_near):
    rows = jax.export.symbolic_shape("m")
    shapes = [jax.ShapeDtypeStruct(shape, F32) for shape in ((*rows, K), (GROUPS, K, N))]
    exported = jax.export.export(jax.jit(ragged_dot))(*shapes, jax.ShapeDtypeStruct((GROUPS,), I32))
    assert_same(exported.call(LHS, RHS, SIZES), lax.ragged_dot(LHS, RHS, SIZES), assert_near)


def test_explicit_shardings_are_jaxs_matter(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Explicit,))
    rows = NamedSharding(mesh, PartitionSpec("x", None))
    with jax.set_mesh(mesh):
        with pytest.raises(NotImplementedError, match="specify out_sharding"):
            ragged_dot(jax.device_put(LHS, rows), RHS, SIZES)
        out = ragged_dot(LHS, RHS, SIZES, out_sharding=PartitionSpec("x", None))
        assert out.sharding == rows
        assert_near(out, lax.ragged_dot(LHS, RHS, SIZES, out_sharding=PartitionSpec("x", None)), 1e-5)


def test_automatic_shardings_run_ours(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,))
    lhs = jax.device_put(LHS, NamedSharding(mesh, PartitionSpec("x", None)))
    assert is_ours(lhs, RHS, SIZES)
    assert_near(jax.jit(ragged_dot)(lhs, RHS, SIZES), lax.ragged_dot(LHS, RHS, SIZES), 1e-5)


# --- the kernel


def compare_with_jax(dtype: Any, backend: str, m: int, k: int, n: int, sizes: Any, near: Any) -> None:
    lhs, rhs = array(0, m, k, dtype=dtype), array(1, len(sizes), k, n, dtype=dtype)
    sizes = np.asarray(sizes)
    used = (np.arange(m) < sizes.sum())[:, None]
    near(ragged_dot(lhs, rhs, sizes, backend=backend), lax.ragged_dot(lhs, rhs, sizes), 2 * TOLERANCE[dtype])

    def loss(f: Callable[..., jax.Array], lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        return jnp.sum(jnp.where(used, f(lhs, rhs, sizes, preferred_element_type=F32), 0)) / 16

    grads = [
        jax.grad(functools.partial(loss, f), argnums=(0, 1))(lhs, rhs)
        for f in (functools.partial(ragged_dot, backend=backend), lax.ragged_dot)
    ]
    for ours, jaxs in zip(*grads):
        near(ours, jaxs, 2 * TOLERANCE[dtype])


def test_the_interpreted_kernel_agrees_with_jax(assert_near):
    compare_with_jax(BF16, "interpret", 40, 24, 40, [30, 0, 3], assert_near)


@pytest.mark.gpu
@pytest.mark.parametrize("dtype", [BF16, F16], ids=lambda d: d.__name__)
@pytest.mark.parametrize("sizes", [[300, 0, 511, 213], [1, 0, 0, 700], [0, 1024, 0, 0]], ids=str)
def test_the_kernel_agrees_with_jax(dtype, sizes, assert_near):
    compare_with_jax(dtype, "mosaic", 1024, 512, 264, sizes, assert_near)


@pytest.mark.gpu
def test_a_call_on_a_gpu_runs_the_kernel_where_it_can():
    wide, narrow = (
        jax.jit(ragged_dot).lower(array(0, M, K, dtype=d), array(1, GROUPS, K, N, dtype=d), SIZES) for d in (BF16, F32)
    )
    assert "mosaic_gpu" in wide.as_text()
    assert "mosaic_gpu" not in narrow.as_text()
