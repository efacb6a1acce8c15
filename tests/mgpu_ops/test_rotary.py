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
    """In float32, by complex numbers: the left half of a head is real, the right one imaginary."""
    x = qkv.astype(F32).reshape(*qkv.shape[:-1], heads + 2 * kv_heads, -1)
    left, right = jnp.split(x, 2, -1)
    turned = (left + 1j * right) * (cos + 1j * sin)[:, None]
    rotated = jnp.concatenate([turned.real, turned.imag], -1)
    return [rotated[..., :heads, :], rotated[..., heads : heads + kv_heads, :], x[..., heads + kv_heads :, :]]


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


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("name", thorough.cases(["llama3-8b-8192", "llama3-8b-8192-gradient"], ["llama3-8b-8192"]))
def test_nothing_spills_and_shared_memory_is_as_computed(name):
    problem = ROTARY.shapes[name]
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


def test_rotations_leave_scores_of_equal_distances_equal():
    """What rotary embeddings are for: q k^T depends on the distance of two tokens alone."""
    same = jnp.tile(joined()[:1].astype(F32), (TOKENS, 1))
    q, k, _ = ours(same)
    scores = jnp.einsum("thd,shd->hts", q[:, :KV_HEADS], k)
    for distance in range(1, TOKENS):
        of_distance = jnp.diagonal(scores, -distance, 1, 2)
        assert np.allclose(of_distance, of_distance[:, :1], atol=1e-2)


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


@pytest.mark.parametrize(
    ("problem", "runs"),
    [
        (P(8192, 8192, 32, 8, 128), "the kernel"),
        (P(8192, 8192, 16, 4, 128, gradient=True), "the kernel"),
        (P(8192, 8192, 32, 8, 64), "the kernel"),
        (P(1024, 1024, 32, 8, 128), "the kernel"),
        (P(8192, 8192, 9, 1, 128), "the kernel"),
        (P(8192, 8192, 8, 1, 128), "XLA"),
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


def test_a_mapped_axis_of_no_size_has_no_sequences():
    qkv, (cos, sin) = joined(3)[:0], turns()
    assert [x.shape[0] for x in jax.vmap(lambda x: ours(x, cos, sin, backend="xla"))(qkv)] == [0, 0, 0]


def test_gradient_through_shard_map_over_sequences(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    rotate = functools.partial(ours, backend="xla")
    f = jax.shard_map(rotate, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    qkv = joined(2)
    found = jax.grad(lambda x: sum((y.astype(F32) ** 2).sum() for y in f(x, *turns())))(qkv)
    assert_near(found, 2 * qkv.astype(F32), 3e-2)  # a rotation changes no length


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
