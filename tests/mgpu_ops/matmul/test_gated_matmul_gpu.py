"""gated_matmul on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mgpu_ops import GatedMatmulConfig, gated_matmul, spec_of
from mgpu_ops import GatedMatmulProblem as P
from mgpu_ops.core import gpu
from mgpu_ops.core.activations import activate
from mgpu_ops.tuning import measure

pytestmark = pytest.mark.gpu

GATED = spec_of("gated_matmul")
F32 = jnp.float32


def truth(problem: Any, *arrays: jax.Array) -> Any:
    """In float32, of exact products."""
    x, w_gate, w_up, *g = (a.astype(F32) for a in arrays)
    if problem.normalised:
        x = x / jnp.sqrt(jnp.mean(x * x, -1, keepdims=True) + g[0])
    product = functools.partial(jnp.matmul, precision="highest")
    gate, up = (product(x, w.mT if problem.layout == "nt" else w) for w in (w_gate, w_up))
    activated, vjp = jax.vjp(functools.partial(activate, problem.activation), gate)
    return (*vjp(g[0] * up), g[0] * activated) if problem.gradient else activated * up


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it."""
    rng = random.Random(seed)
    unit, dtype, gradient = rng.choice([8, 64]), rng.choice(["bfloat16", "float16"]), rng.random() < 0.5
    n, k = (unit * rng.randint(1, 1500 // unit) for _ in "nk")
    out = dtype if gradient else rng.choice([dtype, "float32"])
    activation = rng.choice(["none", "relu", "silu", "gelu", "gelu_erf"])
    problem = P(rng.randint(1, 1500), n, k, dtype, out, rng.choice(["nn", "nt"]), activation, gradient)
    device = gpu.current()
    drawn = (GatedMatmulConfig(**{f: rng.choice(v) for f, v in GATED.space(problem, device).items()}) for _ in range(50_000))
    return problem, next(c for c in drawn if GATED.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(12))
def test_any_legal_config_is_right_everywhere(seed, assert_near):
    problem, config = draw(seed)
    arrays = jax.jit(functools.partial(GATED.inputs, problem))(jax.random.key(seed))
    run = jax.jit(functools.partial(GATED.run, problem, config, gpu.current())).lower(*arrays).compile()
    jnp.full(4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype).block_until_ready()  # what is freed holds NaN
    for out, wanted in zip(jax.tree.leaves(run(*arrays)), jax.tree.leaves(truth(problem, *arrays)), strict=True):
        assert out.dtype == problem.out_dtype
        assert_near(out, wanted, GATED.tolerance(problem))


@pytest.mark.parametrize("gradient", [False, True])
@pytest.mark.parametrize("seed", range(6))
def test_a_stored_gate_is_right_everywhere(seed, gradient, assert_near):
    """Also where blocks have several tiles, and tiles end outside of the arrays."""
    rng, device = random.Random(seed), gpu.current()
    n, k = 8 * rng.randint(200, 600), 8 * rng.randint(1, 300)
    layout, activation = rng.choice(["nn", "nt"]), rng.choice(["silu", "gelu", "relu"])
    problem = P(rng.randint(1000, 6000), n, k, layout=layout, activation=activation, stored=True, gradient=gradient)
    space = {**GATED.space(problem, device), "tile_m": (64, 128)}
    drawn = (GatedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    config = next(c for c in drawn if GATED.check(problem, c, device) is None)
    arrays = jax.jit(functools.partial(GATED.inputs, problem))(jax.random.key(seed))
    run = jax.jit(functools.partial(GATED.run, problem, config, device)).lower(*arrays).compile()
    jnp.full(4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype).block_until_ready()  # what is freed holds NaN
    x, w, gate, *up = (a.astype(F32) for a in arrays)
    product = jnp.matmul(x, w.mT if layout == "nt" else w, precision="highest")
    activated, vjp = jax.vjp(functools.partial(activate, activation), gate)
    wanted = (*vjp(product * up[0]), product * activated) if gradient else (activated * product, product)
    found = run(*arrays)
    for out, exact in zip(found, wanted, strict=True):
        assert_near(out, exact, GATED.tolerance(problem))
    if gradient:
        in_place = jax.jit(functools.partial(GATED.run, problem, config, device, in_place=True))(*arrays)
        for out, apart in zip(in_place, found, strict=True):
            assert (out == apart).all()


@pytest.mark.parametrize("seed", range(8))
def test_normalised_rows_are_right_everywhere(seed, assert_near):
    rng, device = random.Random(seed), gpu.current()
    n, k = 256 * rng.randint(1, 16), 128 * rng.randint(1, 16)
    problem = P(rng.choice([1, 5, 16, 64, 100]), n, k, layout=rng.choice(["nn", "nt"]), normalised=True)
    space = GATED.space(problem, device)
    drawn = (GatedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    config = next(c for c in drawn if GATED.check(problem, c, device) is None)
    arrays = jax.jit(functools.partial(GATED.inputs, problem))(jax.random.key(seed))
    run = jax.jit(functools.partial(GATED.run, problem, config, device)).lower(*arrays).compile()
    jnp.full(4 * max(2**20, problem.m * problem.n), jnp.nan, problem.out_dtype).block_until_ready()
    assert_near(run(*arrays), truth(problem, *arrays), GATED.tolerance(problem))


@pytest.mark.parametrize("name", ["llama3-8b-128", "llama3-8b-4096", "gemma2-9b-4096"])
def test_gradients_of_a_layer_are_no_further_from_float32_than_xlas(name):
    problem = GATED.shapes[name]
    arrays = jax.jit(functools.partial(GATED.inputs, problem))(jax.random.key(0))

    def gradients(backend: str, *arrays: jax.Array) -> Any:
        f = functools.partial(gated_matmul, activation=problem.activation, backend=backend)
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a).astype(F32) ** 2).sum(), argnums=(0, 1, 2)))(*arrays)[1]

    ours, theirs = (gradients(backend, *arrays) for backend in ("mosaic", "xla"))
    with jax.default_matmul_precision("highest"):
        wanted = gradients("xla", *(a.astype(F32) for a in arrays))
    for mine, other, exact in zip(ours, theirs, wanted, strict=True):
        assert measure.error(mine, exact) <= 1.2 * measure.error(other, exact)
