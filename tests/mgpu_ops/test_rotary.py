"""rotary_qkv: values, gradients and transforms; the kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import RotaryConfig as C
from mgpu_ops import RotaryProblem as P
from mgpu_ops import capture, explain, rotary_qkv, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.rotary import smem_bytes
from tests import thorough
from tests.arrays import normal

ROTARY, H200 = spec_of("rotary"), gpu.find("h200")
FEW_SMS = replace(H200, sms=2)
BF16, F32 = jnp.bfloat16, jnp.float32
TOKENS, HEADS, KV_HEADS, HEAD_DIM = 9, 4, 2, 128


def turns(tokens: int = TOKENS, head_dim: int = HEAD_DIM) -> tuple[jax.Array, jax.Array]:
    angles = jnp.arange(tokens)[:, None] * 100.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def written_out(qkv: Any, cos: Any, sin: Any, heads: int = HEADS, kv_heads: int = KV_HEADS) -> list[jax.Array]:
    """In float32 or more, by complex numbers: the left half of a head is real, the right one imaginary."""
    x = qkv.astype(jnp.promote_types(qkv.dtype, F32)).reshape(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
    left, right = jnp.split(x, 2, -1)
    turned = (left + 1j * right) * (cos + 1j * sin)[:, None]
    rotated = jnp.concatenate([turned.real, turned.imag], -1)
    return [rotated[..., :heads, :], rotated[..., heads : heads + kv_heads, :], x[..., heads + kv_heads :, :]]


def exact(problem: P, *arrays: jax.Array) -> list[np.ndarray]:
    """What a problem with norms gives, in float64: by complex numbers, and JAX's gradients of that."""
    p, epsilon = problem, float(arrays[-1][0])

    def normalised(x: Any, weight: Any) -> Any:
        return x / jnp.sqrt(jnp.mean(x**2, -1, keepdims=True) + epsilon) * weight

    def forward(joined: Any, q_norm: Any, k_norm: Any, cos: Any, sin: Any) -> list[jax.Array]:
        q, k, v = jnp.split(joined, (p.heads, p.rotated), 1)
        x = jnp.concatenate([normalised(q, q_norm), normalised(k, k_norm), v], 1).reshape(
            -1, p.positions, sum(p.parts) * p.head_dim
        )
        parts = written_out(x, cos, sin, p.heads, p.kv_heads)
        return [part.reshape(p.rows, -1, p.head_dim) for part in parts]

    with jax.enable_x64(True):
        *given, cos, sin, q_norm, k_norm, _ = (jnp.asarray(np.asarray(x, np.float64)) for x in arrays)
        if not p.gradient:
            return [np.asarray(x) for x in jax.jit(forward)(given[0], q_norm, k_norm, cos, sin)]
        pull = jax.jit(lambda *xs: jax.vjp(lambda *ys: forward(*ys, *xs[3:5]), *xs[:3])[1](list(xs[5:])))
        return [np.asarray(x) for x in pull(given[3], q_norm, k_norm, cos, sin, *given[:3])]


def joined(*lead: int) -> jax.Array:
    return normal(0, *lead, TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM, dtype=BF16)


def ours(qkv: jax.Array, *turned: jax.Array, **options: Any) -> tuple[jax.Array, ...]:
    return rotary_qkv(qkv, *(turned or turns()), heads=HEADS, kv_heads=KV_HEADS, **options)


CASES = {
    "more rows than stages, two sequences": (P(22, 11, 2, 2, 128), C(1, 3)),
    "small heads, fewer rows than blocks": (P(3, 3, 4, 4, 64, "float16"), C(4, 4)),
    "large heads, one of keys": (P(7, 7, 2, 1, 256), C(2, 3)),
    "gradient": (P(11, 11, 4, 2, 128, gradient=True), C(1, 3)),
    "gradient, small heads": (P(12, 4, 6, 2, 64, gradient=True), C(2, 6)),
}


@pytest.mark.parametrize("name", thorough.cases(CASES, ["large heads, one of keys", "gradient, small heads"]))
def test_kernel_is_right_and_has_no_race(name, assert_near):
    problem, config = CASES[name]
    *given, cos, sin = ROTARY.inputs(problem, jax.random.key(0))
    assert ROTARY.check(problem, config, FEW_SMS) is None
    out = jax.jit(functools.partial(ROTARY.run, problem, config, FEW_SMS, interpret=True))(*given, cos, sin)
    count, shape = problem.rows // problem.positions, (problem.rows, sum(problem.parts) * problem.head_dim)
    forward = functools.partial(
        written_out,
        cos=jnp.tile(cos, (count, 1)),
        sin=jnp.tile(sin, (count, 1)),
        heads=problem.heads,
        kv_heads=problem.kv_heads,
    )
    if problem.gradient:
        wanted = jax.vjp(forward, jnp.zeros(shape))[1]([x.astype(F32) for x in given])
    else:
        wanted = forward(given[0].reshape(shape))
    for y, z in zip(jax.tree.leaves(out), wanted, strict=True):
        assert_near(y, z.reshape(y.shape), ROTARY.tolerance(problem) / 2)
    assert not engine.races_found()


OF_NORMS = {
    "a group of heads of q and k, more rows than stages": (P(22, 11, 6, 2, 128, normalised=True), C(1, 3)),
    "groups of q, of both and of k": (P(5, 5, 6, 6, 64, "float16", normalised=True), C(4, 4)),
    "large heads, of q and of k": (P(7, 7, 4, 4, 256, normalised=True), C(2, 3)),
    "gradient": (P(11, 11, 6, 2, 128, gradient=True, normalised=True), C(1, 3)),
    "gradient, small heads, groups of q, of both and of k": (P(12, 4, 6, 6, 64, gradient=True, normalised=True), C(2, 6)),
    "gradient, large heads, fewer rows than blocks": (P(3, 3, 2, 2, 256, gradient=True, normalised=True), C(2, 3)),
}


@pytest.mark.parametrize(
    "name",
    thorough.cases(OF_NORMS, ["large heads, of q and of k", "gradient, large heads, fewer rows than blocks", "gradient"]),
)
def test_kernel_with_norms_is_right_and_has_no_race(name, assert_near):
    problem, config = OF_NORMS[name]
    *given, _ = ROTARY.inputs(problem, jax.random.key(0))
    given = *given, jnp.full(1, 0.1)
    assert ROTARY.check(problem, config, FEW_SMS) is None
    out = jax.jit(functools.partial(ROTARY.run, problem, config, FEW_SMS, interpret=True))(*given)
    for y, z in zip(jax.tree.leaves(out), exact(problem, *given), strict=True):
        assert_near(y, z, ROTARY.tolerance(problem) / 2)
    assert not engine.races_found()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    "problem",
    [
        pytest.param(P(8192, 8192, 32, 8, 128), marks=thorough.only_in_all),
        P(8192, 8192, 32, 8, 128, gradient=True),
        pytest.param(P(8192, 8192, 32, 8, 64, normalised=True), marks=thorough.only_in_all),
        P(8192, 8192, 30, 2, 128, normalised=True),
        pytest.param(P(8192, 8192, 16, 8, 256, normalised=True), marks=thorough.only_in_all),
        pytest.param(P(8192, 8192, 32, 8, 64, gradient=True, normalised=True), marks=thorough.only_in_all),
        P(8192, 8192, 32, 8, 128, gradient=True, normalised=True),
        pytest.param(P(8192, 8192, 16, 8, 256, gradient=True, normalised=True), marks=thorough.only_in_all),
        P(8192, 8192, 200, 24, 64, gradient=True, normalised=True),  # most groups of heads
    ],
    ids=str,
)
def test_nothing_spills_and_shared_memory_is_as_computed(problem):
    config = ROTARY.default(problem, H200)
    shapes = jax.eval_shape(functools.partial(ROTARY.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(ROTARY.run, problem, config, H200), *shapes)
    assert (report.spills, report.smem_bytes) == (0, smem_bytes(problem, config))


@pytest.mark.parametrize("backend", ["xla", pytest.param("interpret", marks=thorough.only_in_all)])
def test_result_and_gradient_are_those_in_float32(backend, assert_near):
    qkv, weights = joined(2), [normal(i, 2, TOKENS, heads, HEAD_DIM) for i, heads in ((1, HEADS), (2, KV_HEADS), (3, KV_HEADS))]

    def loss(f: Any, qkv: jax.Array) -> jax.Array:
        return sum((x.astype(F32) * w).sum() for x, w in zip(f(qkv), weights, strict=True))

    rotate = functools.partial(ours, backend=backend)
    for y, z in zip(rotate(qkv), written_out(qkv, *turns()), strict=True):
        assert (y.dtype, y.shape) == (BF16, z.shape)
        assert_near(y, z, 8e-3)
    found = jax.grad(functools.partial(loss, rotate))(qkv)
    wanted = jax.grad(functools.partial(loss, lambda x: written_out(x, *turns())))(qkv.astype(F32))
    assert (found.dtype, found.shape) == (BF16, qkv.shape)
    assert_near(found, wanted, 1.5e-2)  # cotangents are rounded to bfloat16


def test_the_gradient_has_a_gradient_mapped_or_not(assert_near):
    qkv = normal(0, 2, TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM)

    def penalty(f: Any, qkv: jax.Array) -> jax.Array:
        loss = lambda x: sum(jnp.sin(y).sum() for y in f(x, *turns()))  # noqa: E731
        return (jax.grad(loss)(qkv) ** 2).sum()

    ours_of = functools.partial(rotary_qkv, heads=HEADS, kv_heads=KV_HEADS)
    found, wanted = (jax.jit(jax.grad(functools.partial(penalty, f))) for f in (ours_of, written_out))
    assert_near(found(qkv), wanted(qkv), 1e-5)
    assert_near(jax.vmap(found)(qkv), wanted(qkv), 1e-5)


def test_forward_over_reverse_is_refused_and_reverse_over_reverse_is_its_way_out(assert_near):
    def loss(f: Any, x: jax.Array, scale: jax.Array) -> jax.Array:
        return sum(jnp.sin(y * scale).sum() for y in f(x, *turns()))

    qkv, tangent = (normal(seed, TOKENS, (HEADS + 2 * KV_HEADS) * HEAD_DIM) for seed in (0, 1))
    ours_of = functools.partial(rotary_qkv, heads=HEADS, kv_heads=KV_HEADS)
    ours, plain = (jax.grad(functools.partial(loss, f, scale=1.5)) for f in (ours_of, written_out))
    with pytest.raises(TypeError, match="forward-mode"):
        jax.jvp(ours, (qkv,), (tangent,))
    (found,) = jax.vjp(ours, qkv)[1](tangent)  # a Hessian is symmetric
    assert_near(found, jax.jvp(plain, (qkv,), (tangent,))[1], 1e-5)


def norms(seed: int = 0, head_dim: int = HEAD_DIM, dtype: Any = F32) -> dict[str, jax.Array]:
    """Weights of both norms, which are different."""
    q_norm, k_norm = 1 + 0.3 * normal(seed, 2, head_dim)
    return {"q_norm": q_norm.astype(dtype), "k_norm": 0.5 * k_norm.astype(dtype)}


@pytest.mark.parametrize("dtype", [BF16, F32])
@pytest.mark.parametrize("backend", ["xla", pytest.param("interpret", marks=thorough.only_in_all)])
def test_heads_are_normalised_and_all_gradients_are_those_in_float64(backend, dtype, assert_near):
    """With weights of either dtype, a small row whose norm epsilon decides, and fewer heads of k than of q."""
    heads, kv_heads, rows = 6, 2, 2 * TOKENS
    qkv = normal(0, 2, TOKENS, (heads + 2 * kv_heads) * HEAD_DIM, dtype=BF16).at[0, 0].multiply(1e-3)
    gradients = [normal(i, 2, TOKENS, n, HEAD_DIM, dtype=BF16) for i, n in ((1, heads), (2, kv_heads), (3, kv_heads))]
    weights = norms(dtype=dtype)

    def run(qkv: jax.Array, q_norm: jax.Array, k_norm: jax.Array) -> tuple[jax.Array, ...]:
        options: Any = {"heads": heads, "kv_heads": kv_heads, "epsilon": 1e-5, "backend": backend}
        return rotary_qkv(qkv, *turns(), q_norm=q_norm, k_norm=k_norm, **options)

    found, pull = jax.vjp(jax.jit(run), qkv, *weights.values())
    problem = P(rows, TOKENS, heads, kv_heads, HEAD_DIM, normalised=True)
    given = qkv.reshape(rows, -1, HEAD_DIM), [x.reshape(rows, -1, HEAD_DIM) for x in gradients]
    others = *turns(), *weights.values(), jnp.full(1, 1e-5)
    for y, z in zip(found, exact(problem, given[0], *others), strict=True):
        assert y.dtype == BF16
        assert_near(y.reshape(z.shape), z, 4e-3)  # one rounding
    dqkv, *dweights = pull(tuple(gradients))
    dx, *of_weights = exact(replace(problem, gradient=True), *given[1], given[0], *others)
    assert (dqkv.dtype, dqkv.shape) == (BF16, qkv.shape)
    assert_near(dqkv.reshape(dx.shape), dx, 4e-3)
    for y, z in zip(dweights, of_weights, strict=True):
        assert (y.dtype, y.shape) == (dtype, (HEAD_DIM,))
        assert_near(y, z, 4e-3 if dtype == BF16 else 1e-5)


def test_rotations_leave_scores_of_equal_distances_equal():
    """What rotary embeddings are for: q k^T depends on the distance of two tokens alone."""
    same = jnp.tile(joined()[:1].astype(F32), (TOKENS, 1))
    q, k, _ = ours(same)
    scores = jnp.einsum("thd,shd->hts", q[:, :KV_HEADS], k)
    for distance in range(1, TOKENS):
        of_distance = jnp.diagonal(scores, -distance, 1, 2)
        assert np.allclose(of_distance, of_distance[:, :1], atol=1e-2)


def test_norms_leave_v_and_what_no_norm_is_asked_for_as_they_are():
    qkv = joined(2)
    plain, normalised = ours(qkv), ours(qkv, **norms())
    np.testing.assert_array_equal(plain[2], normalised[2])
    for x, y in zip(ours(qkv, epsilon=3.0), plain, strict=True):
        np.testing.assert_array_equal(x, y)


def test_heads_are_integers_of_any_kind():
    qkv = joined(2)
    counted = rotary_qkv(qkv, *turns(), heads=np.int64(HEADS), kv_heads=np.int32(KV_HEADS))
    for found, wanted in zip(counted, rotary_qkv(qkv, *turns(), heads=HEADS, kv_heads=KV_HEADS), strict=True):
        np.testing.assert_array_equal(found, wanted)


def test_forward_and_backward_pass_are_a_kernel_each_and_keep_nothing_of_qkv():
    qkv = jax.ShapeDtypeStruct((1, 8192, 6144), BF16)
    rotate = functools.partial(rotary_qkv, heads=32, kv_heads=8)
    found = capture(jax.grad(lambda x: sum(y.astype(F32).sum() for y in rotate(x, *turns(8192)))), gpu="h200")(qkv)
    assert [p.problem for p in found.problems] == [P(8192, 8192, 32, 8, 128), P(8192, 8192, 32, 8, 128, gradient=True)]
    _, vjp = jax.eval_shape(lambda x: jax.vjp(lambda x: rotate(x, *turns(8192)), x), qkv)
    assert {x.shape for x in jax.tree.leaves(vjp)} == {(8192, 64)}


def test_with_norms_both_passes_are_a_kernel_too_which_keep_qkv_and_the_weights():
    qkv, weights = jax.ShapeDtypeStruct((1, 8192, 6144), BF16), norms()

    def loss(qkv: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        return sum(y.astype(F32).sum() for y in rotary_qkv(qkv, *turns(8192), heads=32, kv_heads=8, **weights))

    found = capture(jax.grad(loss, argnums=(0, 1)), gpu="h200")(qkv, weights)
    problem = P(8192, 8192, 32, 8, 128, normalised=True)
    assert [p.problem for p in found.problems] == [problem, replace(problem, gradient=True)]
    _, vjp = jax.eval_shape(lambda *given: jax.vjp(loss, *given), qkv, weights)
    assert {(x.shape, x.dtype.name) for x in jax.tree.leaves(vjp) if x.ndim} == {
        ((8192, 48, 128), "bfloat16"),
        ((8192, 64), "float32"),
        ((128,), "float32"),
    }


@pytest.mark.parametrize(
    ("problem", "runs"),
    [
        (P(8192, 8192, 32, 8, 128), "the kernel"),
        (P(8192, 8192, 16, 4, 128, gradient=True), "the kernel"),
        (P(8192, 8192, 32, 8, 64), "the kernel"),
        (P(1024, 1024, 32, 8, 128), "the kernel"),
        (P(8192, 8192, 9, 1, 128), "the kernel"),
        (P(8192, 8192, 8, 1, 128), "XLA"),
        (P(8192, 8192, 32, 8, 128, normalised=True), "the kernel"),
        (P(8192, 8192, 32, 8, 128, gradient=True, normalised=True), "the kernel"),
    ],
    ids=str,
)
def test_a_call_runs_the_kernel_where_it_can(problem, runs):
    assert explain("rotary", problem, gpu="h200").splitlines()[1].split(":")[0].split(maxsplit=1)[1].startswith(runs)


def test_vmap_maps_sequences_and_angles(assert_near):
    qkv, (cos, sin) = joined(3), turns()
    rotate = functools.partial(ours, backend="xla")
    for y, z in zip(jax.vmap(lambda x: rotate(x, cos, sin))(qkv), written_out(qkv, cos, sin), strict=True):
        assert_near(y, z, 8e-3)
    each = jnp.stack([cos, -cos, 2 * cos])
    found = jax.vmap(lambda x, cos: rotate(x, cos, sin))(qkv, each)
    for y, z in zip(found, jax.vmap(lambda x, cos: written_out(x, cos, sin))(qkv, each), strict=True):
        assert_near(y, z, 8e-3)


def test_vmap_maps_sequences_and_weights_of_norms(assert_near):
    qkv, weights = joined(3), norms()
    each = {name: jnp.stack([w, -w, 2 * w]) for name, w in weights.items()}

    def loss(qkv: jax.Array, weights: dict[str, jax.Array]) -> jax.Array:
        return sum((y.astype(F32) ** 3).mean() for y in ours(qkv, backend="xla", **weights))

    gradient = jax.jit(jax.grad(loss, argnums=(0, 1)))
    for axes, given in (((0, None), weights), ((0, 0), each)):
        of_one = [gradient(x, weights if given is weights else {n: w[i] for n, w in each.items()}) for i, x in enumerate(qkv)]
        found = jax.vmap(gradient, axes)(qkv, given)
        for y, *parts in zip(*map(jax.tree.leaves, (found, *of_one)), strict=True):
            assert_near(y, jnp.stack(parts), 8e-3 if y.dtype == BF16 else 1e-5)
    summed = jax.jit(jax.grad(lambda w: sum(jax.vmap(loss, (0, None))(qkv, w))))(weights)
    for name, total in summed.items():
        assert_near(total, sum(gradient(x, weights)[1][name] for x in qkv), 1e-5)


def test_a_mapped_axis_of_no_size_has_no_sequences():
    qkv, (cos, sin) = joined(3)[:0], turns()
    for options in ({}, norms()):
        assert [x.shape[0] for x in jax.vmap(lambda x: ours(x, cos, sin, backend="xla", **options))(qkv)] == [0, 0, 0]  # noqa: B023


def test_gradient_through_shard_map_over_sequences(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    rotate = functools.partial(ours, backend="xla")
    f = jax.shard_map(rotate, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    qkv = joined(2)
    found = jax.grad(lambda x: sum((y.astype(F32) ** 2).sum() for y in f(x, *turns())))(qkv)
    assert_near(found, 2 * qkv.astype(F32), 3e-2)  # a rotation changes no length


def test_gradients_of_norms_through_shard_map_are_sums_over_its_devices(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    run = lambda qkv, cos, sin, weights: ours(qkv, cos, sin, backend="xla", **weights)  # noqa: E731
    f = jax.shard_map(run, mesh=mesh, in_specs=(rows, whole, whole, whole), out_specs=rows)

    def gradient(f: Any) -> Any:
        loss = lambda x, weights: sum((y.astype(F32) ** 3).sum() for y in f(x, *turns(), weights))  # noqa: E731
        return jax.jit(jax.grad(loss, argnums=(0, 1)))(joined(2), norms())

    for y, z in zip(*map(jax.tree.leaves, (gradient(f), gradient(run))), strict=True):
        assert_near(y, z, 8e-3 if y.dtype == BF16 else 1e-5)


QKV, COS = np.ones((9, 1024), BF16), np.ones((9, 64), np.float32)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((QKV, COS, COS[:8]), {}, ValueError, r"sin has shape \(8, 64\): .* it is \[tokens, head_dim / 2\] = \(9, 64\)"),
        ((QKV[:, :1000], COS, COS), {}, ValueError, r"qkv has shape \(9, 1000\): .* width is 8 \(heads \+ 2 kv_heads\) times"),
        ((QKV[0], COS, COS), {}, ValueError, r"qkv has shape \(1024,\)"),
        ((QKV.astype(int), COS, COS), {}, TypeError, "qkv has dtype int.*cast it first"),
        ((QKV, COS, COS), {"heads": 0}, ValueError, "heads=0 must be an integer of at least 1"),
        ((QKV, COS, COS), {"config": 3}, TypeError, "pass a mgpu_ops.RotaryConfig"),
        (
            (QKV[:, :256], COS[:, :16], COS[:, :16]),
            {"backend": "interpret"},
            ValueError,
            "head_dim=32 is not one of 64, 128, 256",
        ),
        ((QKV, COS, COS), {"q_norm": COS[0]}, ValueError, r"k_norm is None: pass q_norm and k_norm, .* or neither"),
        ((QKV, COS, COS), {"q_norm": COS, "k_norm": COS}, ValueError, r"q_norm has shape \(9, 64\): .* a head, \[128\]"),
        ((QKV, COS, COS), {"q_norm": QKV[0, :128], "k_norm": COS[0]}, ValueError, r"k_norm has shape \(64,\)"),
        ((QKV, COS, COS), {"q_norm": range(128), "k_norm": COS[0]}, TypeError, "q_norm has dtype int.*cast it first"),
        ((QKV, COS, COS), {"epsilon": -1}, ValueError, "epsilon=-1 must be a finite number of at least 0"),
        ((QKV, COS, COS), {"epsilon": "x"}, TypeError, "epsilon='x' is no Python number"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(given: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        rotary_qkv(*given, **{"heads": 4, "kv_heads": 2, **options})


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(64, 64, 32, 8, 128), C(4, 3), None),
        (P(64, 64, 32, 8, 128), C(3, 3), "blocks=3 is not one of 1, 2, 4, 8"),
        (P(64, 64, 32, 8, 128), C(8, 3), "bytes of shared memory do not fit"),
        (P(64, 48, 32, 8, 128), C(1, 3), "rows=64 are no whole sequences of positions=48"),
        (P(64, 64, 2, 1, 64), C(1, 3), "3 heads of q and k cannot be rotated in equal groups"),
        (P(64, 64, 3, 1, 128, normalised=True), C(1, 3), None),
        (P(64, 64, 4, 2, 128, normalised=True), C(1, 3), "6 heads of q and k cannot be normalised in groups of four"),
        (
            P(64, 64, 4, 2, 256, gradient=True, normalised=True),
            C(1, 3),
            "6 heads of q and k cannot be normalised in groups of four",
        ),
        (P(64, 64, 9, 3, 64), C(1, 3), "heads=9 of head_dim=64 are no multiple of 128 numbers"),
        (P(64, 64, 256, 8, 64), C(1, 3), "272 heads of q, k and v are more than 256"),
        (P(64, 64, 112, 16, 256), C(1, 3), "3 rows of 144 heads of head_dim=256 take 233496 bytes of shared memory, more than"),
        (P(64, 64, 4, 4, 64, "float32"), C(1, 3), "float32"),
    ],
    ids=str,
)
def test_a_config_runs_or_the_reason_names_the_rule(problem, config, reason):
    found = ROTARY.check(problem, config, H200)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_and_configs_are_right(seed, assert_near):
    rng, device = np.random.default_rng(seed), gpu.current()
    tokens, head_dim = int(rng.integers(1, 1000)), int(rng.choice([64, 128, 256]))
    heads, kv_heads = 2 * int(rng.integers(1, 20)), 2 * int(rng.integers(1, 5))
    problem = P(
        tokens * int(rng.integers(1, 4)), tokens, heads + (heads + kv_heads) % 4, kv_heads, head_dim, gradient=bool(seed % 2)
    )
    legal = ROTARY.candidates(problem, device)
    config = legal[rng.integers(len(legal))]
    given = ROTARY.inputs(problem, jax.random.key(seed))
    out = jax.jit(functools.partial(ROTARY.run, problem, config, device))(*given)
    for y, z in zip(jax.tree.leaves(out), jax.tree.leaves(ROTARY.reference(problem, *given)), strict=True):
        assert_near(y, z, ROTARY.tolerance(problem))


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(12))
def test_random_problems_with_norms_are_those_in_float64(seed, assert_near):
    """In memory that was full of NaN, of either dtype, and the same in every run."""
    rng, device = np.random.default_rng(seed), gpu.current()
    tokens, head_dim = int(rng.integers(1, 600)), int(rng.choice([64, 128, 256]))
    heads, kv_heads = 2 * int(rng.integers(1, 16)), 2 * int(rng.integers(1, 5))
    problem = P(
        tokens * int(rng.integers(1, 4)),
        tokens,
        heads + (heads + kv_heads) % 4,
        kv_heads,
        head_dim,
        str(rng.choice(["bfloat16", "float16"])),
        gradient=bool(seed % 2),
        normalised=True,
    )
    legal = ROTARY.candidates(problem, device)
    given = ROTARY.inputs(problem, jax.random.key(seed))
    wanted = exact(problem, *given)
    for config in rng.choice(np.array(legal, object), min(3, len(legal)), replace=False):
        run = jax.jit(functools.partial(ROTARY.run, problem, config, device)).lower(*given).compile()
        jax.block_until_ready([jnp.full(x.shape, jnp.nan, problem.dtype) for x in wanted for _ in range(3)])
        first, second = (jax.tree.leaves(run(*given)) for _ in range(2))
        for y, again, z in zip(first, second, wanted, strict=True):
            assert_near(y, z, ROTARY.tolerance(problem) if y.ndim == 3 else 1e-4)
            np.testing.assert_array_equal(y, again)


@pytest.mark.gpu
@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_calls_with_norms_give_what_xla_gives(head_dim, assert_near):
    qkv, turned, weights = normal(0, 2, 300, 16 * head_dim, dtype=BF16), turns(300, head_dim), norms(1, head_dim)

    def loss(qkv: jax.Array, weights: dict[str, jax.Array], backend: Any) -> jax.Array:
        parts = rotary_qkv(qkv, *turned, heads=8, kv_heads=4, backend=backend, **weights)
        return sum((x.astype(F32) ** 3).sum() for x in parts)

    found, wanted = (
        jax.jit(jax.value_and_grad(functools.partial(loss, backend=backend), argnums=(0, 1)))(qkv, weights)
        for backend in ("mosaic", "xla")
    )
    for y, z in zip(*map(jax.tree.leaves, (found, wanted)), strict=True):
        assert_near(y, z, 2e-2)
