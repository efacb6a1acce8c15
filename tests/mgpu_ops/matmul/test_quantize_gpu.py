"""The kernel of quantize on a Hopper GPU, beside XLA's way: every legal config, odd shapes, numbers that are not finite."""

from __future__ import annotations

import dataclasses
import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import QuantizeConfig, fp8_matmul, spec_of
from mgpu_ops import QuantizeProblem as P
from mgpu_ops.core import gpu
from mgpu_ops.matmul import quantizing

pytestmark = pytest.mark.gpu

OP = spec_of("quantize")
PLAIN = 32  # seeds of problems without a batch, gathered rows or scales of rows


def draw(seed: int) -> tuple[P, QuantizeConfig]:
    rng = random.Random(seed)
    dtype, to = rng.choice(["bfloat16", "bfloat16", "float16", "float32"]), rng.choice(["float8_e4m3fn", "float8_e5m2"])
    of, amax = rng.choice(["array", "array", "gate", "gate_gradient"]), rng.choice(["none", "also", "only"])
    problem = P(16 * rng.randint(1, 40), 16 * rng.randint(1, 60), dtype, to, of, amax)
    if seed >= PLAIN:
        changes = {"batch": rng.randint(2, 9)} if rng.random() < 0.5 else {"gathered": rng.randint(1, 700)}
        problem = dataclasses.replace(problem, **({"row_scale": True} if of != "array" else changes))
    drawn = (QuantizeConfig(*(rng.choice(v) for v in OP.space(problem, gpu.current()).values())) for _ in range(1000))
    return problem, next(c for c in drawn if OP.check(problem, c, gpu.current()) is None)


def with_odd_numbers(x: jax.Array, seed: int) -> jax.Array:
    """Infinities, NaN, zeros of both signs, small and large numbers in some places."""
    odd = jnp.asarray([np.inf, -np.inf, np.nan, 0.0, -0.0, 1e-30, -1e-30, 3e4, -6e4, 1e-7], x.dtype)
    key, other = jax.random.split(jax.random.key(seed))
    return jnp.where(jax.random.bernoulli(key, 0.02, x.shape), odd[jax.random.randint(other, x.shape, 0, len(odd))], x)


def steps_apart(found: Any, wanted: Any) -> int:
    """How many numbers of 8 bits lie between; 0 where both are NaN."""
    one, other = (np.asarray(x).view(np.uint8).astype(int) for x in (found, wanted))
    nan = np.isnan(np.asarray(found, np.float32)) & np.isnan(np.asarray(wanted, np.float32))
    return int(np.where(nan, 0, np.abs(one - other)).max())


@pytest.mark.parametrize("seed", range(PLAIN + 24))
def test_any_legal_config_has_the_bits_of_xla_everywhere(seed: int) -> None:
    problem, config = draw(seed)
    arrays = jax.jit(functools.partial(OP.inputs, problem))(jax.random.key(seed))
    if seed % 2:
        changed = [with_odd_numbers(x, seed + i) for i, x in enumerate(arrays[: problem.sources])]
        arrays = (*changed, *arrays[problem.sources :])
    found = jax.jit(functools.partial(OP.run, problem, config, gpu.current()))(*arrays)
    wanted = jax.jit(functools.partial(OP.reference, problem))(*arrays)
    for one, other in zip(found, wanted, strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        if one.ndim == 0:
            assert float(one) == pytest.approx(float(other), rel=0 if problem.of == "array" else 1e-4)
        elif one.ndim == 1:  # sums of rows; those of large numbers of both signs lose more
            largest = float(np.max(np.abs(other), where=np.isfinite(other), initial=0.0))
            np.testing.assert_allclose(one, other, rtol=1e-4, atol=1e-4 * largest)
        else:  # of a gate, XLA's exponential rounds otherwise
            assert steps_apart(one, other) <= (0 if problem.of == "array" else 1)
    for values, transposed in zip(found[0 : 2 * problem.results * problem.writes : 2], found[1::2], strict=False):
        np.testing.assert_array_equal(np.asarray(values).view(np.uint8).mT, np.asarray(transposed).view(np.uint8))


def test_fp8_matmul_with_the_kernel_gives_the_bits_that_it_gives_without(monkeypatch: pytest.MonkeyPatch) -> None:
    x = jax.random.normal(jax.random.key(0), (272, 384), jnp.bfloat16)
    w = jax.random.normal(jax.random.key(1), (384, 208), jnp.bfloat16)

    def results(reason: str | None) -> Any:
        monkeypatch.setattr(
            quantizing, "SPEC", dataclasses.replace(quantizing.SPEC, unmeasured=lambda problem: reason, baseline_cost=None)
        )
        jax.clear_caches()
        return jax.jit(jax.value_and_grad(lambda x, w: jnp.sum(fp8_matmul(x, w).astype(jnp.float32) ** 2), (0, 1)))(x, w)

    for one, other in zip(jax.tree.leaves(results(None)), jax.tree.leaves(results("not yet")), strict=True):
        np.testing.assert_array_equal(np.asarray(one, np.float32), np.asarray(other, np.float32))
