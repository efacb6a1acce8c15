"""rotary_attention: what rotary_qkv and flash_attention give, with one kernel less in the backward pass."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import FlashAttentionBackwardConfig, capture, flash_attention, rotary_attention, rotary_qkv
from mgpu_ops.attention import backward_round
from mgpu_ops.core import aot, engine
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
HEADS, KV_HEADS = 4, 2
NEXT = FlashAttentionBackwardConfig("fused", 64, 128, 3, 4, 24, "next", "apart", "memory")


def turns(tokens: int, head_dim: int = 128) -> tuple[jax.Array, jax.Array]:
    angles = jnp.arange(tokens)[:, None] * 100.0 ** (-jnp.arange(0, head_dim, 2) / head_dim)
    return jnp.cos(angles), jnp.sin(angles)


def joined(*lead: int, head_dim: int = 128, dtype: Any = BF16) -> jax.Array:
    return normal(0, *lead, (HEADS + 2 * KV_HEADS) * head_dim, dtype=dtype)


def ours(qkv: jax.Array, *turned: jax.Array, **options: Any) -> jax.Array:
    return rotary_attention(qkv, *turned, heads=HEADS, kv_heads=KV_HEADS, **options)


def apart(qkv: jax.Array, *turned: jax.Array, backend: Any = None, **options: Any) -> jax.Array:
    q, k, v = rotary_qkv(qkv, *turned, heads=HEADS, kv_heads=KV_HEADS, backend=backend)
    return flash_attention(q, k, v, backend=backend, **options)


def pulled(f: Any, qkv: jax.Array, *turned: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The output, and the gradient of qkv from a random one of it."""

    @jax.jit
    def both(qkv: jax.Array, *turned: jax.Array) -> tuple[jax.Array, jax.Array]:
        out, pull = jax.vjp(lambda qkv: f(qkv, *turned), qkv)
        return out, pull(normal(1, *out.shape, dtype=out.dtype))[0]

    return both(qkv, *turned)


OPTIONS: dict[str, dict[str, Any]] = {
    "causal": {"causal": True},
    "a window": {"causal": True, "window": (40, None)},
    "a scale below 0": {"scale": -0.1},
    "a soft cap": {"soft_cap": 3.0},
    "a window, a scale below 0, a soft cap": {"causal": True, "window": (40, None), "scale": -0.1, "soft_cap": 3.0},
}


@pytest.mark.parametrize("name", thorough.cases(OPTIONS, ["a window", "a scale below 0", "a soft cap"]))
def test_it_is_rotation_and_attention(name, assert_near):
    qkv, turned = joined(2, 70), turns(70)
    found, wanted = (pulled(functools.partial(f, backend="xla", **OPTIONS[name]), qkv, *turned) for f in (ours, apart))
    for y, z in zip(found, wanted, strict=True):
        assert (y.dtype, y.shape) == (BF16, z.shape)
        assert_near(y, z, 2e-2)


@pytest.mark.parametrize(("tokens", "batch"), [(70, 2), pytest.param(150, 1, marks=thorough.only_in_all)])
def test_the_kernel_that_joins_is_right_and_has_no_race(tokens, batch, assert_near, monkeypatch):
    """As for tokens that tiles do not divide, and more than one sequence."""
    ran = []
    launch = backward_round.launch_joined
    monkeypatch.setattr(backward_round, "launch_joined", lambda *given: ran.append(1) or launch(*given))
    qkv, turned = joined(batch, tokens), turns(tokens)
    found = pulled(functools.partial(ours, backend="interpret", causal=True, backward_config=NEXT), qkv, *turned)
    wanted = pulled(functools.partial(apart, backend="xla", causal=True), qkv.astype(F32), *turned)
    assert ran
    for y, z in zip(found, wanted, strict=True):
        assert_near(y, z, 5e-2)
    assert not engine.races_found()


def test_other_heads_take_the_kernels_of_both_ops(assert_near):
    qkv, turned = normal(0, 1, 40, 6 * 64, dtype=BF16), turns(40, 64)
    found, wanted = (
        pulled(functools.partial(rotary_attention, heads=2, kv_heads=2, backend=b), qkv, *turned) for b in ("interpret", "xla")
    )
    for y, z in zip(found, wanted, strict=True):
        assert_near(y, z, 3e-2)


@pytest.mark.parametrize("backend", ["xla", pytest.param("interpret", marks=thorough.only_in_all)])
def test_norms_are_those_of_rotary_qkv(backend, assert_near):
    """With all their gradients, and for a scale below 0, which turns q around."""
    qkv, turned, weights = normal(0, 2, 40, 10 * 64, dtype=BF16), turns(40, 64), [1 + normal(i, 64) / 3 for i in (1, 2)]
    heads = {"heads": 6, "kv_heads": 2}

    def options(q_norm: jax.Array, k_norm: jax.Array) -> dict[str, Any]:
        return {**heads, "q_norm": q_norm, "k_norm": k_norm, "epsilon": 0.1, "backend": backend}

    def attend(qkv: jax.Array, *norms: jax.Array) -> jax.Array:
        return rotary_attention(qkv, *turned, **options(*norms), causal=True, scale=-0.1)

    def both(qkv: jax.Array, *norms: jax.Array) -> jax.Array:
        q, k, v = rotary_qkv(qkv, *turned, **options(*norms))
        return flash_attention(q, k, v, causal=True, scale=-0.1, backend=backend)

    def loss(f: Any) -> Any:
        return jax.jit(jax.value_and_grad(lambda *x: (f(*x).astype(F32) ** 2).sum(), argnums=(0, 1, 2)))

    for y, z in zip(*(jax.tree.leaves(loss(f)(qkv, *weights)) for f in (attend, both)), strict=True):
        assert (y.dtype, y.shape) == (z.dtype, z.shape)
        assert np.abs(np.asarray(y, np.float32)).max() > 0
        assert_near(y, z, 1e-2)


def test_a_sequence_without_a_batch_may_have_norms():
    qkv, turned, w = normal(0, 9, 8 * 64), turns(9, 64), jnp.ones(64)
    assert rotary_attention(qkv, *turned, heads=4, kv_heads=2, q_norm=w, k_norm=w).shape == (9, 4, 64)


def test_a_step_captures_the_problems_of_both_ops():
    qkv, turned = jax.ShapeDtypeStruct((1, 8192, 6144), BF16), turns(8192)
    attend = functools.partial(rotary_attention, heads=32, kv_heads=8, causal=True)
    found = capture(jax.grad(lambda x: attend(x, *turned).astype(F32).sum()), gpu="h200")(qkv)
    assert sorted(p.op for p in found.problems) == ["flash_attention", "flash_attention_backward", "rotary", "rotary"]


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_the_backward_pass_of_a_training_step_joins():
    """Rotation, attention, two kernels of its gradients, and the one that joins: one less than a call of each op takes."""
    qkv, turned = jax.ShapeDtypeStruct((1, 8192, 48 * 128), BF16), jax.ShapeDtypeStruct((8192, 64), F32)
    options = {"heads": 32, "kv_heads": 8, "causal": True, "backend": "mosaic"}

    def loss(*given: jax.Array) -> jax.Array:
        return rotary_attention(*given, **options).astype(F32).sum()

    report = aot.compile_for("h200", jax.grad(loss), qkv, turned, turned)
    (joins,) = (kernel for kernel in report.kernels if "join" in kernel.name)
    assert len(report.kernels) == 5
    assert joins.spill_stores == joins.spill_loads == 0


def test_vmap_maps_sequences_and_angles(assert_near):
    qkv, (cos, sin) = joined(3, 20), turns(20)
    attend = functools.partial(ours, causal=True)

    @jax.jit
    def gradient(qkv: jax.Array, cos: jax.Array, sin: jax.Array) -> jax.Array:
        return jax.grad(lambda x: (attend(x, cos, sin).astype(F32) ** 2).sum())(qkv)

    wanted = jnp.stack([gradient(x, cos, sin) for x in qkv])
    assert_near(jax.jit(jax.vmap(gradient, (0, None, None)))(qkv, cos, sin), wanted, 2e-2)
    both = jax.jit(jax.vmap(gradient))(qkv, jnp.stack([cos] * 3), jnp.stack([sin] * 3))
    assert_near(both, wanted, 2e-2)


def test_a_mapped_axis_of_no_size_has_no_gradient():
    qkv, (cos, sin) = joined(3, 20)[:0], turns(20)
    assert jax.vmap(jax.grad(lambda x: ours(x, cos, sin).astype(F32).sum()))(qkv).shape == qkv.shape


def test_gradient_through_shard_map_over_sequences(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    qkv, turned = joined(2, 20), turns(20)
    f = jax.shard_map(ours, mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    assert_near(pulled(f, qkv, *turned)[1], pulled(ours, qkv, *turned)[1], 2e-2)


@pytest.mark.parametrize(
    ("qkv", "options", "message"),
    [
        (np.ones((9, 1000), BF16), {}, r"qkv has shape \(9, 1000\): .* width is 8 \(heads \+ 2 kv_heads\) times"),
        (np.ones((0, 9, 1024), BF16), {}, "an empty dimension leaves nothing to attend to"),
        (np.ones((9, 1024), BF16), {"heads": 3, "kv_heads": 2}, "width is 7"),
        (np.ones((9, 1024), BF16), {"window": (-2, 0)}, "window"),
        (np.ones((9, 1024), BF16), {"backend": "cuda"}, "backend='cuda' is not one of"),
        (np.ones((9, 1024), BF16), {"k_norm": np.ones(128)}, "q_norm is None: pass q_norm and k_norm"),
        (np.ones((9, 1024), BF16), {"q_norm": np.ones(64), "k_norm": np.ones(64)}, r"q_norm has shape \(64,\)"),
        (np.ones((9, 1024), BF16), {"epsilon": -1}, "epsilon=-1 must be a finite number of at least 0"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(qkv, options, message):
    with pytest.raises(ValueError, match=message):
        rotary_attention(qkv, *turns(9), **{"heads": HEADS, "kv_heads": KV_HEADS, **options})


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_are_about_as_near_to_float32_as_xla_in_16_bits(seed):
    rng = np.random.default_rng(seed)
    tokens, kv_heads = int(rng.integers(1, 1500)), 2 * int(rng.integers(1, 3))
    heads, batch = kv_heads * int(rng.integers(1, 5)), int(rng.integers(1, 4))
    qkv, turned = normal(seed, batch, tokens, (heads + 2 * kv_heads) * 128, dtype=BF16), turns(tokens)
    options = {"heads": heads, "kv_heads": kv_heads, "causal": bool(seed % 2)}
    found = pulled(functools.partial(rotary_attention, backend="mosaic", backward_config=NEXT, **options), qkv, *turned)
    of_xla = functools.partial(rotary_attention, backend="xla", **options)
    with jax.default_matmul_precision("highest"):
        wanted = pulled(of_xla, qkv.astype(F32), *turned)
    for kernels, xlas, exact in zip(found, pulled(of_xla, qkv, *turned), wanted, strict=True):
        kernels_error, xlas_error = (np.abs(np.float64(x) - np.float64(exact)) for x in (kernels, xlas))
        assert np.sqrt((kernels_error**2).mean()) < 1.2 * np.sqrt((xlas_error**2).mean())
        # The largest error is that of one element, of which rounding to 16 bits is up to half a step, for XLA's luckily none.
        worst = np.float64(exact).flat[kernels_error.argmax()]
        half_a_step = float(jnp.finfo(BF16).eps) / 2 * 2.0 ** (np.frexp(worst)[1] - 1)
        assert kernels_error.max() < 2 * xlas_error.max() + half_a_step
