"""embedding: values, gradients and transforms; the gradient's kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import EmbeddingConfig as C
from mgpu_ops import EmbeddingProblem as P
from mgpu_ops import capture, embedding, explain, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.embedding.kernel import sorted_tokens
from tests import thorough
from tests.arrays import normal

EMBEDDING, H200 = spec_of("embedding"), gpu.find("h200")
FEW_SMS = replace(H200, sms=2)
BF16, F32 = jnp.bfloat16, jnp.float32

CASES = {
    "words with many tokens": (P(50, 3, 1024), C(4, 4)),
    "words without tokens, fewer blocks than words": (P(9, 40, 768, "float16"), C(2, 2)),
    "one token, one word": (P(1, 1, 256), C(2, 8)),
}


def summed(g: jax.Array, tokens: jax.Array, vocabulary: int) -> np.ndarray:
    """In float64."""
    out = np.zeros((vocabulary, g.shape[1]))
    np.add.at(out, np.asarray(tokens), np.asarray(g, np.float64))
    return out


@pytest.mark.parametrize("name", thorough.cases(CASES, list(CASES)[:2]))
def test_kernel_is_right_and_has_no_race(name, assert_near):
    problem, config = CASES[name]
    g, tokens = EMBEDDING.inputs(problem, jax.random.key(0))
    assert EMBEDDING.check(problem, config, FEW_SMS) is None
    out = jax.jit(functools.partial(EMBEDDING.run, problem, config, FEW_SMS, interpret=True))(g, tokens)
    assert_near(out, summed(g, tokens, problem.vocabulary), EMBEDDING.tolerance(problem) / 2)
    assert not engine.races_found()


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_rows_of_no_word_are_not_summed(backend, assert_near):
    """Those of the words that another device has."""
    problem, config = P(50, 6, 256), C(2, 2)
    g, tokens = EMBEDDING.inputs(problem, jax.random.key(0))
    tokens = tokens.at[::3].set(6)
    run = EMBEDDING.reference if backend == "xla" else functools.partial(EMBEDDING.run, interpret=True)
    out = run(problem, *((config, FEW_SMS) if backend == "interpret" else ()), g, tokens)
    assert_near(out, summed(g, tokens, 7)[:6], EMBEDDING.tolerance(problem) / 2)


@pytest.mark.parametrize("vocabulary", [7, 2**28], ids=["one sorted array", "two"])
def test_tokens_are_sorted_by_word(vocabulary):
    tokens = jax.random.randint(jax.random.key(0), (100,), 0, 7, jnp.int32) * (vocabulary // 7)
    words, order = sorted_tokens(P(100, vocabulary, 256), tokens)
    assert np.array_equal(words, np.sort(tokens))
    assert np.array_equal(tokens[order], words)
    assert np.array_equal(np.sort(order), np.arange(100))


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_nothing_spills():
    problem = EMBEDDING.shapes["llama3-8b-8192"]
    config = EMBEDDING.default(problem, H200)
    shapes = jax.eval_shape(functools.partial(EMBEDDING.inputs, problem), jax.random.key(0))
    assert aot.build(H200, functools.partial(EMBEDDING.run, problem, config, H200), *shapes).spills == 0


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_result_and_gradient_are_those_in_float64(backend, assert_near):
    table, weights = normal(0, 11, 256, dtype=BF16), normal(1, 2, 30, 256, dtype=BF16)
    tokens = np.random.default_rng(0).integers(0, 11, (2, 30))
    look_up = functools.partial(embedding, backend=backend)
    assert np.array_equal(look_up(table, tokens), table[tokens])
    found = jax.grad(lambda table: (look_up(table, tokens) * weights).astype(F32).sum())(table)
    assert (found.dtype, found.shape) == (BF16, table.shape)
    assert_near(found, summed(weights.reshape(60, 256), tokens.reshape(-1), 11), 8e-3)


def test_a_sum_of_many_tokens_is_rounded_once():
    table, tokens = jnp.zeros((2, 256), BF16), np.zeros(1001, np.int32)
    found = jax.grad(lambda table: embedding(table, tokens, backend="interpret").astype(F32).sum())(table)
    assert np.array_equal(found[0], np.full(256, 1001, F32).astype(BF16))  # which sums in bfloat16 never reach


def test_the_gradient_is_a_kernel_and_keeps_the_tokens_alone():
    table, tokens = jax.ShapeDtypeStruct((16384, 4096), BF16), jax.ShapeDtypeStruct((2, 4096), np.int32)
    found = capture(jax.grad(lambda t, x: embedding(t, x).astype(F32).sum()), gpu="h200")(table, tokens)
    assert [p.problem for p in found.problems] == [P(8192, 16384, 4096)]
    _, vjp = jax.eval_shape(lambda t, x: jax.vjp(lambda t: embedding(t, x), t), table, tokens)
    assert sum(x.size for x in jax.tree.leaves(vjp)) == 8192


@pytest.mark.parametrize(
    ("problem", "runs"),
    [
        (P(8192, 16384, 4096), "the kernel"),
        (P(4096, 128256, 2048), "the kernel"),
        (P(512, 16384, 4096), "the kernel"),
        (P(8192, 16384, 768), "the kernel"),
        (P(8192, 16384, 4096, "float16"), "the kernel"),
        (P(30, 1024, 256), "XLA"),
        (P(92, 8192, 512), "XLA"),
    ],
    ids=str,
)
def test_a_call_runs_the_kernel_but_for_small_tables_and_few_tokens(problem, runs):
    assert explain("embedding", problem, gpu="h200").splitlines()[1].split(":")[0].split(maxsplit=1)[1].startswith(runs)


def test_tokens_out_of_range_count_as_the_nearest():
    table, tokens = normal(0, 5, 256, dtype=BF16), np.array([-3, 9, 2**40, 4], np.int64)
    assert np.array_equal(embedding(table, tokens), table[jnp.array([0, 4, 4, 4])])
    found = jax.grad(lambda table: embedding(table, tokens, backend="interpret").astype(F32).sum())(table)
    assert np.array_equal(found[:, 0], [1, 0, 0, 0, 3])


def test_vmap_and_shard_map(assert_near):
    table, tokens = normal(0, 5, 256), jnp.array([[0, 1, 4], [4, 4, 2]])

    def loss(table: jax.Array, tokens: jax.Array) -> jax.Array:
        return (embedding(table, tokens) ** 2).sum()

    wanted = [jax.grad(lambda table, x=x: (table[x] ** 2).sum())(table) for x in tokens]
    for y, z in zip(jax.vmap(jax.grad(loss), (None, 0))(table, tokens), wanted, strict=True):
        assert_near(y, z, 1e-6)
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    f = jax.shard_map(embedding, mesh=mesh, in_specs=(whole, rows), out_specs=rows)
    assert_near(jax.grad(lambda table: (f(table, tokens) ** 2).sum())(table), sum(wanted), 1e-6)


def test_an_empty_list_of_tokens_has_no_rows():
    assert embedding(np.ones((3, 2), BF16), []).shape == (0, 2)


@pytest.mark.parametrize(
    ("given", "options", "error", "message"),
    [
        ((np.ones(3, BF16), [0]), {}, ValueError, r"table has shape \(3,\): it is \[vocabulary, width\]"),
        ((np.ones((0, 3), BF16), [0]), {}, ValueError, r"table has shape \(0, 3\)"),
        ((np.ones((3, 2), int), [0]), {}, TypeError, "table has dtype int.*cast it first"),
        ((np.ones((3, 2), BF16), [0.5]), {}, TypeError, "tokens has dtype float64: it must hold integers"),
        ((np.ones((3, 2), BF16), [0]), {"config": 3}, TypeError, "pass a mgpu_ops.EmbeddingConfig"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(given: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        embedding(*given, **options)


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(64, 64, 4096), C(4, 2), None),
        (P(64, 64, 4096), C(3, 2), "blocks=3 is not one of 2, 4, 6, 8"),
        (P(64, 64, 4096), C(8, 8), "registers a thread, and 8 blocks leave 64"),
        (P(64, 64, 100), C(4, 2), "width=100 is no multiple of 256 up to 8192"),
        (P(64, 64, 8448), C(4, 2), "width=8448 is no multiple of 256 up to 8192"),
        (P(64, 2**31 - 1, 256), C(4, 2), "which the kernels count in 32 bits"),
        (P(64, 64, 256, "float32"), C(4, 2), "float32"),
    ],
    ids=str,
)
def test_a_config_runs_or_the_reason_names_the_rule(problem, config, reason):
    found = EMBEDDING.check(problem, config, H200)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(6))
def test_random_problems_and_configs_are_right(seed, assert_near):
    rng, device = np.random.default_rng(seed), gpu.current()
    problem = P(int(rng.integers(1, 5000)), int(rng.integers(1, 5000)), 256 * int(rng.integers(1, 33)))
    legal = EMBEDDING.candidates(problem, device)
    config = legal[rng.integers(len(legal))]
    given = EMBEDDING.inputs(problem, jax.random.key(seed))
    out = jax.jit(functools.partial(EMBEDDING.run, problem, config, device))(*given)
    assert_near(out, EMBEDDING.reference(problem, *given), EMBEDDING.tolerance(problem))
