"""cross_entropy: its values, gradients and rules through XLA and in the interpreter, and what it refuses."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import CrossEntropyConfig, CrossEntropyProblem, cross_entropy, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.registry import resolution
from tests import thorough

H200 = gpu.find("h200")
SPEC = spec_of("cross_entropy")
BACKENDS = ["xla", "interpret"]
LABELS = np.array([0, 130, 383, 5, 200, 383, 64])


def logits(rows: int = 7, vocabulary: int = 384, dtype: Any = jnp.float32, scale: float = 3.0) -> jax.Array:
    return (scale * jax.random.normal(jax.random.key(rows), (rows, vocabulary))).astype(dtype)


def truth(x: Any, labels: np.ndarray) -> tuple[np.ndarray, np.ndarray, np.ndarray]:
    """(loss, lse, gradient of the sum of losses) in float64."""
    x = np.asarray(x, np.float64)
    top = x.max(1, keepdims=True)
    lse = top[:, 0] + np.log(np.exp(x - top).sum(1))
    return lse - x[np.arange(len(x)), labels], lse, np.exp(x - lse[:, None]) - np.eye(x.shape[1])[labels]


@pytest.mark.parametrize("dtype", thorough.cases(["bfloat16", "float16", "float32"], ["float16"]))
@pytest.mark.parametrize("backend", BACKENDS)
def test_loss_lse_and_gradient_are_right(backend: Any, dtype: str) -> None:
    x = logits(dtype=dtype)
    loss, lse = cross_entropy(x, LABELS, return_lse=True, backend=backend)
    gradient = jax.grad(lambda x: cross_entropy(x, LABELS, backend=backend).sum())(x)
    wanted = truth(x.astype(jnp.float32), LABELS)
    assert (loss.dtype, lse.dtype, gradient.dtype) == (jnp.float32, jnp.float32, x.dtype)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5, atol=1e-5)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-5)
    rounding = {"bfloat16": 4e-3, "float16": 5e-4, "float32": 1e-5}[dtype]
    np.testing.assert_allclose(gradient.astype(jnp.float32), wanted[2], rtol=rounding, atol=rounding)


@pytest.mark.parametrize(
    ("config", "rows", "vocabulary"),
    [
        (CrossEntropyConfig(1, 1024, 2), 5, 2432),  # the last tile begins within the one before; more tiles than stages
        (CrossEntropyConfig(1, 1024, 3), 5, 2432),  # in place it is waited for before that one is stored
        (CrossEntropyConfig(2, 1024, 6), 5, 1152),  # in two tiles of a row, fewer than stages
        (CrossEntropyConfig(2, 1024, 3), 7, 2048),  # rows that the blocks do not divide
        (CrossEntropyConfig(4, 128, 4), 3, 384),  # fewer rows than blocks
    ],
)
def test_the_kernels_are_right_and_have_no_race(config: CrossEntropyConfig, rows: int, vocabulary: int) -> None:
    few = dataclasses.replace(H200, sms=2)
    for gradient, options in ((False, {}), (True, {}), (True, {"in_place": True})):
        problem = CrossEntropyProblem(rows, vocabulary, "bfloat16", gradient)
        arrays = SPEC.inputs(problem, jax.random.key(0))
        found = SPEC.run(problem, config, few, *arrays, interpret=True, **options)
        assert not engine.races_found()
        for x, y in zip(jax.tree.leaves(found), jax.tree.leaves(SPEC.reference(problem, *arrays)), strict=True):
            rounding = 8e-3 if gradient else 1e-5
            np.testing.assert_allclose(x.astype(jnp.float32), y.astype(jnp.float32), rtol=rounding, atol=1e-5)


@pytest.mark.parametrize("backend", BACKENDS)
def test_large_and_infinite_logits_do_not_overflow(backend: Any) -> None:
    x = jnp.concatenate([logits(1, scale=1e4), logits(1) - 1e5, jnp.full((1, 384), -jnp.inf).at[0, 3].set(2.0)])
    labels = np.array([1, 2, 3])
    loss, lse = cross_entropy(x, labels, return_lse=True, backend=backend)
    wanted = truth(x, labels)
    np.testing.assert_allclose(loss, wanted[0], rtol=1e-5, atol=1e-2)
    np.testing.assert_allclose(lse, wanted[1], rtol=1e-6)
    loss, lse = cross_entropy(x[:1].at[0, 9].set(jnp.inf), labels[:1], return_lse=True, backend=backend)
    assert lse[0] == loss[0] == jnp.inf


@pytest.mark.parametrize("backend", BACKENDS)
@pytest.mark.parametrize("place", thorough.cases([0, 130, 383], [0, 130]))
def test_nan_shows_in_its_row_and_no_other(place: int, backend: Any) -> None:
    x = logits().at[2, place].set(jnp.nan)
    loss, pull = jax.vjp(lambda x: cross_entropy(x, LABELS, backend=backend), x)
    (gradient,) = pull(jnp.ones_like(loss))
    for found in (np.isnan(loss), np.isnan(gradient).any(1)):
        np.testing.assert_array_equal(found, np.arange(7) == 2)


@pytest.mark.parametrize("backend", BACKENDS)
def test_negative_labels_do_not_count_and_labels_beyond_the_vocabulary_are_nan(backend: Any) -> None:
    labels = np.array([0, -1, -100, 384, 383, 2**31 - 1, 5])
    (loss, lse), pull = jax.vjp(lambda x: cross_entropy(x, labels, return_lse=True, backend=backend), logits())
    (gradient,) = pull((jnp.ones(7), jnp.zeros(7)))
    nothing, wrong = (labels < 0), (labels >= 384)
    np.testing.assert_array_equal(np.asarray(loss)[nothing], 0)
    np.testing.assert_array_equal(np.asarray(gradient)[nothing], 0)
    np.testing.assert_array_equal(np.isnan(loss), wrong)
    np.testing.assert_array_equal(np.isnan(gradient).all(1), wrong)
    assert np.isfinite(lse).all()
    (z,) = pull((jnp.zeros(7), jnp.ones(7)))  # of lse, which every token has
    np.testing.assert_allclose(np.asarray(z)[~wrong], jax.nn.softmax(logits())[~wrong], rtol=1e-5, atol=1e-7)


def test_jaxs_debug_nans_passes_labels_that_count_and_tells_of_others() -> None:
    loss = lambda x, labels: cross_entropy(x, labels).sum()  # noqa: E731
    with jax.debug_nans(True):
        gradient = jax.grad(loss)(logits(), np.r_[-1, LABELS[1:]])
        with pytest.raises(FloatingPointError, match="nan"):
            jax.grad(loss)(logits(), np.r_[384, LABELS[1:]])
    assert np.isfinite(gradient).all()


@pytest.mark.parametrize("dtype", [np.int8, np.uint8, np.int16, np.uint32, np.int64, np.uint64])
def test_labels_of_any_integer_dtype_mean_the_same(dtype: Any) -> None:
    labels = np.array([0, 127, 3, 5, 100, 64, 2], dtype)
    wanted = truth(logits(), labels.astype(int))[0]
    np.testing.assert_allclose(cross_entropy(logits(), labels), wanted, rtol=1e-5)
    np.testing.assert_allclose(cross_entropy(logits(), jnp.asarray(labels)), wanted, rtol=1e-5)
    if labels.dtype.itemsize == 8:  # no wrap to a label that there is
        assert np.isnan(cross_entropy(logits(), labels + np.array(2**32, dtype))).all()


@pytest.mark.parametrize("backend", BACKENDS)
def test_logits_that_a_program_uses_again_are_not_overwritten_by_their_gradient(backend: Any) -> None:
    @jax.jit
    def step(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        y = x + 1.0
        gradient = jax.grad(lambda y: cross_entropy(y, LABELS, backend=backend).sum())(y)
        return gradient, jax.lax.optimization_barrier((y, gradient))[0]

    gradient, after = step(logits())
    np.testing.assert_allclose(gradient, truth(logits() + 1.0, LABELS)[2], atol=1e-5)
    np.testing.assert_array_equal(after, logits() + 1.0)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("vocabulary", thorough.cases([16384, 128256, 32000], [128256]))
def test_in_a_program_the_gradient_takes_the_memory_of_the_logits(vocabulary: int) -> None:
    def loss(x: jax.Array, w: jax.Array) -> jax.Array:
        return cross_entropy(x @ w, jnp.zeros(8192, jnp.int32)).sum()

    shapes = (jax.ShapeDtypeStruct(sides, jnp.bfloat16) for sides in ((8192, 256), (256, vocabulary)))
    planned = aot.program("h200", jax.grad(loss, 1), *shapes)
    assert planned.launches > 0
    assert planned.temporary_bytes < 1.5 * 2 * 8192 * vocabulary


@pytest.mark.parametrize("backend", BACKENDS)
def test_batches_and_vmap_are_more_tokens(backend: Any) -> None:
    x, labels = logits(6).reshape(2, 3, 384), LABELS[:6].reshape(2, 3)
    whole = cross_entropy(x, labels, backend=backend)
    assert whole.shape == (2, 3)
    mapped = jax.vmap(lambda x, y: cross_entropy(x, y, backend=backend))(x, labels)
    np.testing.assert_allclose(mapped, whole, rtol=1e-6)
    shared = jax.vmap(lambda y: jax.grad(lambda x: cross_entropy(x, y, backend=backend).sum())(x[0]))(labels)
    np.testing.assert_allclose(shared[1], jax.grad(lambda x: cross_entropy(x, labels[1], backend="xla").sum())(x[0]), atol=1e-6)
    assert jax.vmap(lambda x, y: cross_entropy(x, y))(x[:0], labels[:0]).shape == (0, 3)
    assert cross_entropy(x[:0], labels[:0]).shape == (0, 3)


def test_float64_stays_float64() -> None:
    with jax.enable_x64(True):
        x = jnp.asarray(np.asarray(logits(), np.float64))
        loss, gradient = jax.value_and_grad(lambda x: cross_entropy(x, LABELS).sum())(x)
        wanted = truth(x, LABELS)
        assert (loss.dtype, gradient.dtype) == (jnp.float64, jnp.float64)
        np.testing.assert_allclose(loss, wanted[0].sum(), rtol=1e-13)
        np.testing.assert_allclose(gradient, wanted[2], atol=1e-13)


@pytest.mark.parametrize(
    ("x", "labels", "options", "error", "message"),
    [
        (jnp.ones((2, 8), jnp.int32), [0, 1], {}, TypeError, "logits has dtype int32: cross_entropy takes floats"),
        (None, [0, 1], {}, TypeError, "logits is None, which is no array: cross_entropy takes arrays of floats"),
        (jnp.ones((2, 8)), [0.0, 1.0], {}, TypeError, "labels has dtype float.*cast it first"),
        (jnp.ones((2, 8)), None, {}, TypeError, "labels is None, which is no array of integers"),
        (jnp.ones((2, 8)), "ab", {}, TypeError, "labels is 'ab', which is no array of integers"),
        (jnp.ones((2, 8)), {"a": 1}, {}, TypeError, "labels is {'a': 1}, which is no array of integers"),
        (jnp.ones((2, 8)), [[0, 1], [2]], {}, TypeError, r"labels is \[\[0, 1\], \[2\]\], which is no array of integers"),
        (jnp.ones((2, 8)), 2**70, {}, TypeError, "labels is 11805.*, which is no array of integers"),
        (jnp.ones((2, 8)), jax.ShapeDtypeStruct((2,), int), {}, TypeError, "labels is Shape.*; jax.eval_shape takes shapes"),
        (jnp.ones((2, 8)), jax.random.key(0), {}, TypeError, "labels has dtype key<fry>: it must hold integers"),
        (jnp.ones((2, 8)), [0], {}, ValueError, r"logits\(2, 8\) and labels\(1,\) do not fit"),
        (jnp.ones((2, 0)), [0, 0], {}, ValueError, "empty vocabulary"),
        (jnp.ones((2, 8)), [0, 1], {"backend": "triton"}, ValueError, "backend='triton' is not one of"),
        (jnp.ones((2, 8)), [0, 1], {"backend": "interpret"}, ValueError, "vocabulary=8 is no multiple of 128: pad the logits"),
        (jnp.ones((2, 8)), [0, 1], {"config": 3}, TypeError, "pass a mgpu_ops.CrossEntropyConfig"),
    ],
)
def test_what_no_call_can_be_is_refused(x: Any, labels: Any, options: Any, error: Any, message: str) -> None:
    with pytest.raises(error, match=message):
        cross_entropy(x, labels, **options)


@pytest.mark.parametrize("gradient", [False, True])
def test_on_an_h200_a_call_runs_the_kernel_for_tuned_problems_and_others(gradient: bool) -> None:
    for rows, vocabulary, source in ((4096, 128256, "shipped"), (1000, 50304, "default")):
        found = resolution.resolve(SPEC, CrossEntropyProblem(rows, vocabulary, gradient=gradient), H200)
        assert (found.source, found.runs) == (source, "kernel")


def test_capture_finds_loss_and_gradient() -> None:
    shapes = jax.ShapeDtypeStruct((16, 256), jnp.bfloat16), jax.ShapeDtypeStruct((16,), jnp.int32)
    found = mgpu_ops.capture(jax.grad(lambda x, y: cross_entropy(x, y).mean()), "h200")(*shapes).problems
    assert {use.problem for use in found} == {CrossEntropyProblem(16, 256), CrossEntropyProblem(16, 256, gradient=True)}


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("name", ["llama3-8b-4096", "llama3-8b-4096-gradient"])
def test_the_default_compiles_without_spills_into_the_memory_it_is_said_to_take(name: str) -> None:
    problem = SPEC.shapes[name]
    config = SPEC.default(problem, H200)
    shapes = jax.eval_shape(lambda: SPEC.inputs(problem, jax.random.key(0)))
    report = aot.compile_for("h200", lambda *arrays: SPEC.run(problem, config, H200, *arrays), *shapes)
    assert report.spills == 0
    from mgpu_ops.cross_entropy.problem import smem_bytes

    assert report.smem_bytes == smem_bytes(problem, config)


def test_a_tile_wider_than_a_row_is_refused_as_its_store_would_not_be_clipped() -> None:
    problem = CrossEntropyProblem(3, 384, gradient=True)
    assert "tile=512 is more than the vocabulary" in str(SPEC.check(problem, CrossEntropyConfig(1, 512, 2), H200))
