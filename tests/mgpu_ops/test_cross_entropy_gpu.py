"""cross_entropy on a GPU: random legal configs, and the defaults of real vocabularies."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import CrossEntropyProblem, cross_entropy, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.tuning import measure

pytestmark = pytest.mark.gpu
SPEC = spec_of("cross_entropy")


def check(problem: CrossEntropyProblem, config: Any, **options: Any) -> None:
    arrays = jax.jit(functools.partial(SPEC.inputs, problem))(jax.random.key(0))
    run = jax.jit(functools.partial(SPEC.run, problem, config, gpu.current(), **options))
    wanted = jax.jit(functools.partial(SPEC.reference, problem))(*arrays)
    found = run(*arrays)
    assert measure.error(found, wanted) <= SPEC.tolerance(problem)
    for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(run(*arrays)), strict=True):
        np.testing.assert_array_equal(x, y)  # the same bits


@pytest.mark.parametrize("seed", range(12))
def test_random_configs_are_right(seed: int) -> None:
    rng = random.Random(seed)
    rows, parts = rng.choice([1, 3, 131, 133, 700]), rng.choice([1, 7, 64, 250, 1002])
    dtype = rng.choice(["bfloat16", "float16", "float32"])
    problem = CrossEntropyProblem(rows, 128 * parts, dtype, gradient=seed % 2 == 1)
    check(problem, rng.choice(SPEC.candidates(problem, gpu.current())))


@pytest.mark.parametrize("seed", range(8))
def test_random_gradients_in_the_place_of_the_logits_are_right(seed: int) -> None:
    rng = random.Random(f"in place {seed}")
    problem = CrossEntropyProblem(rng.choice([131, 700, 2000]), 128 * rng.choice([7, 250, 251, 1002]), gradient=True)
    configs = [c for c in SPEC.candidates(problem, gpu.current()) if c.stages > 2 and problem.vocabulary % c.tile]
    check(problem, rng.choice(configs), in_place=True)


@pytest.mark.parametrize("name", ["llama3-8b-512", "llama3-8b-512-gradient", "gemma2-9b-4096", "gemma2-9b-4096-gradient"])
def test_the_default_of_a_real_vocabulary_is_right(name: str) -> None:
    problem = SPEC.shapes[name]
    check(problem, SPEC.default(problem, gpu.current()))


def test_a_loss_and_its_gradient_run_in_the_kernels() -> None:
    x = jax.random.normal(jax.random.key(0), (300, 32000), jnp.bfloat16)
    labels = jnp.arange(300) - 2  # two do not count

    def loss(x: jax.Array, backend: Any) -> jax.Array:
        losses, lse = cross_entropy(x, labels, return_lse=True, backend=backend)
        return losses.mean() + 1e-4 * jnp.square(lse).mean()

    ours, xla = (jax.jit(jax.value_and_grad(functools.partial(loss, backend=b)))(x) for b in ("mosaic", "xla"))
    assert measure.error(ours, xla) <= 8e-3
