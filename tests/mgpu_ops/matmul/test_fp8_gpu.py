"""Products of 8 bits on a Hopper GPU: what the interpreter cannot show, the sums of its tensor cores above all."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import Fp8GatedState, Fp8State, MatmulProblem, fp8_gated_mlp, fp8_matmul, matmul, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.matmul.quantities import scale_shapes
from tests.configs import BASE
from tests.mgpu_ops.matmul import hopper_sums

pytestmark = pytest.mark.gpu

MATMUL = spec_of("matmul")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
SIDES = [(256, 512, 1024), (200, 136, 272), (17, 4096, 4096), (1, 264, 144), (1000, 1032, 2000)]
SIDES_OF_MANY_TILES = [(4096, 4224, 1040), (3999, 4096, 2048)]  # for which stores may be deferred, and consumers take turns


def by_schedule(problem: Any, device: Any) -> list[Any]:
    """The best modelled candidates that differ in schedule, six of them at most, and one with steps of 256 of k."""
    candidates, kinds = MATMUL.candidates(problem, device), {}
    for c in candidates:
        kinds.setdefault((c.schedule, c.tile_m % 64 > 0, c.cluster, c.split_k > 1), c)
    assert len(kinds) > 2
    found = list(kinds.values())[:6]
    return [*found, *[c for c in candidates if c.tile_k == 256 and c not in found][:1]]


@pytest.mark.parametrize("scales", ["none", "tensor", "row", "block"])
@pytest.mark.parametrize("sides", SIDES, ids=str)
def test_product_and_epilogue_on_every_schedule(sides, scales, assert_matmul):
    device = gpu.current()
    for b_dtype, out_dtype, more in ((E4M3, "bfloat16", False), (E5M2, "float32", True)):
        epilogue = {"bias": more, "activation": "gelu" if more else "none", "residual": more}
        problem = MatmulProblem(*sides, E4M3, out_dtype, "nt", **epilogue, b_dtype=b_dtype, scales=scales)
        arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
        for config in by_schedule(problem, device):
            out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(*arrays)
            assert_matmul(problem, out, *arrays)


@pytest.mark.parametrize(("dtype", "scales"), [(E4M3, "tensor"), (E4M3, "row"), ("int8", "row")])
@pytest.mark.parametrize("sides", SIDES_OF_MANY_TILES, ids=str)
def test_stores_beside_the_next_tile_s_steps_are_right(sides, dtype, scales, assert_matmul):
    problem = MatmulProblem(*sides, dtype, layout="nt", bias=True, scales=scales)
    arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    best = {c.schedule: c for c in reversed(MATMUL.candidates(problem, gpu.current()))}
    assert {"deferred", "pingpong"} <= best.keys()
    for schedule in ("deferred", "pingpong"):
        assert_matmul(problem, jax.jit(functools.partial(MATMUL.run, problem, best[schedule], gpu.current()))(*arrays), *arrays)


@pytest.mark.parametrize("b_dtype", [E4M3, E5M2])
@pytest.mark.parametrize("scales", ["none", "block"])
@pytest.mark.parametrize("one_sign", [False, True], ids=["both signs", "one sign"])
def test_sums_are_those_of_the_documented_arithmetic_to_the_bit(one_sign, scales, b_dtype):
    """docs/kernels/matmul.md, "Eight bits". With one sign every addend that is cut off makes the sum smaller."""
    k = 4096
    a, b = (jax.random.normal(jax.random.key(i), (72, k)) for i in range(2))
    a, b = (x.astype(dtype) for x, dtype in zip((jnp.abs(a), jnp.abs(b)) if one_sign else (a, b), (E4M3, b_dtype)))
    problem = MatmulProblem(72, 72, k, E4M3, "float32", "nt", b_dtype=b_dtype, scales=scales)
    arrays = (a, b, *(jnp.ones(shape) for shape in scale_shapes(problem)))
    config = replace(BASE, tile_m=64, tile_n=64, tile_k=128, max_concurrent_steps=4, compute_warpgroups=1, epilogue_tile_n=32)
    assert MATMUL.check(problem, config, gpu.current()) is None
    out = np.asarray(jax.jit(functools.partial(MATMUL.run, problem, config, gpu.current()))(*arrays))
    wanted = np.asarray(a).astype(np.float64) @ np.asarray(b).astype(np.float64).T
    errors = np.abs(out - wanted) / np.abs(wanted) if one_sign else np.abs(out - wanted) / np.sqrt(np.mean(wanted**2))
    print(f"{b_dtype} {scales} {'one sign' if one_sign else 'both signs'}: largest error {errors.max():.3g}")
    np.testing.assert_array_equal(out, hopper_sums.sums(a, b, 128 if scales == "block" else None))


def test_nan_stays_in_its_row_and_columns_of_zeros_are_zero():
    a = jax.random.normal(jax.random.key(0), (200, 512)).astype(E4M3).at[3, 5].set(jnp.nan)
    b = jnp.ones((136, 512), E4M3).at[7].set(0)
    out = np.asarray(matmul(a, b, transpose_b=True, out_dtype="float32", backend="mosaic"))
    assert np.isnan(out[3]).all()
    assert np.isfinite(np.delete(out, 3, 0)).all()
    assert not np.delete(out, 3, 0)[:, 7].any()


@pytest.mark.parametrize("sides", [(256, 512, 1024), (200, 136, 272), (17, 4096, 4096), (1000, 1040, 2000)], ids=str)
@pytest.mark.parametrize("kind", ["int32", "tensor", "row"])
def test_products_of_int8_on_every_schedule(kind, sides, assert_matmul):
    device, exact = gpu.current(), kind == "int32"
    epilogue = {} if exact else {"bias": True, "activation": "relu", "residual": True, "scales": kind}
    problem = MatmulProblem(*sides, "int8", "int32" if exact else "float32", "nt", **epilogue)
    arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    for config in by_schedule(problem, device):
        out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(*arrays)
        if exact:
            np.testing.assert_array_equal(out, np.asarray(arrays[0], np.int64) @ np.asarray(arrays[1], np.int64).T)
        else:
            assert_matmul(problem, out, *arrays)


@pytest.mark.parametrize("seed", range(8))
def test_random_problems_with_a_random_candidate(seed, assert_matmul):
    """Of 8 bits of every kind; what is drawn, `random` of the seed alone decides."""
    draw, device = random.Random(seed), gpu.current()
    dtype = draw.choice([E4M3, E5M2, "int8"])
    scales = draw.choice(["none", "tensor", "row"] if dtype == "int8" else ["tensor", "row", "block", "block"])
    sides = (draw.randint(1, 600), 8 * draw.randint(1, 90), 16 * draw.randint(1, 160))
    problem = MatmulProblem(
        *sides,
        dtype,
        draw.choice(["bfloat16", "float16", "float32"]),
        "nt",
        draw.choice([1, 1, 3]),
        draw.random() < 0.5,
        draw.choice(["none", "relu", "silu", "gelu", "gelu_erf"]),
        draw.random() < 0.5,
        draw.choice([E4M3, E5M2]) if dtype != "int8" else "none",
        scales,
    )
    arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(seed))
    for config in draw.sample(MATMUL.candidates(problem, device), 3):
        out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(*arrays)
        assert_matmul(problem, out, *arrays)


@pytest.mark.parametrize("recipe", ["tensor", "row", "block", "delayed"])
def test_fp8_matmul_and_its_gradients_in_the_kernels_are_those_of_xla(recipe):
    shapes = [(256, 512), (512, 384), (256, 384)]
    arrays = [jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes)]
    more = {"state": Fp8State.init(4)} if recipe == "delayed" else {"scheme": recipe}

    @functools.partial(jax.jit, static_argnums=0)
    def step(backend: str, x: jax.Array, w: jax.Array, g: jax.Array) -> Any:
        out, backward = jax.vjp(lambda x, w: fp8_matmul(x, w, backend=backend, **more), x, w)
        return out, *backward(g)

    for found, wanted in zip(step("mosaic", *arrays), step("xla", *arrays), strict=True):
        found, wanted = (np.asarray(each).astype(np.float32) for each in (found, wanted))
        assert np.linalg.norm(found - wanted) < 0.01 * np.linalg.norm(wanted)


@pytest.mark.parametrize("delayed", [False, True])
def test_fp8_gated_mlp_its_gradients_and_next_state_in_the_kernels_are_those_of_xla(delayed):
    shapes = [(256, 512), (512, 384), (512, 384), (384, 512), (256, 512)]
    x, *weights, g = (jax.random.normal(jax.random.key(i), shape, jnp.bfloat16) for i, shape in enumerate(shapes))
    weights = [(w / 20).astype(w.dtype) for w in weights]

    @functools.partial(jax.jit, static_argnums=0)
    def step(backend: str, state: Any, *arrays: jax.Array) -> Any:
        out, backward = jax.vjp(lambda state, *arrays: fp8_gated_mlp(*arrays, state=state, backend=backend), state, *arrays)
        return out, backward(g)

    state = Fp8GatedState.init(4) if delayed else None
    for _ in range(2 if delayed else 1):
        (out, (following, *found)), (wanted, (expected, *others)) = (step(b, state, x, *weights) for b in ("mosaic", "xla"))
        for one, other in zip((out, *found), (wanted, *others), strict=True):
            one, other = (np.asarray(each).astype(np.float32) for each in (one, other))
            assert np.linalg.norm(one - other) < 0.03 * np.linalg.norm(other)
        for one, other in zip(jax.tree.leaves(following), jax.tree.leaves(expected), strict=True):
            np.testing.assert_allclose(one, other, rtol=0.05)
        state = following
