"""`mgpu_ops.capture`: what a function would run, through JAX's transformations, without running it."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AbstractMesh, AxisType
from jax.sharding import PartitionSpec as P

import mgpu_ops
from examples import moe
from mgpu_ops import (
    FlashAttentionProblem,
    GatedGroupedMatmulProblem,
    GroupedMatmulProblem,
    MatmulConfig,
    MatmulProblem,
    RaggedContractionProblem,
    capture,
    matmul,
)
from mgpu_ops.core import gpu
from mgpu_ops.registry import resolution
from mgpu_ops.registry.capture import Captured

M, N, K = 128, 256, 512
FORWARD = MatmulProblem(M, N, K)
DA = MatmulProblem(M, K, N, layout="nt")
DB = MatmulProblem(K, N, M, layout="tn")


def shaped(*sides: int, dtype: Any = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(sides, dtype)


A, B, W = shaped(M, K), shaped(K, N), shaped(M, M)


def total(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    """A loss whose gradient needs the function's output, so that the forward pass cannot be dropped."""
    return lambda *args: jnp.sum(jnp.sin(function(*args).astype(jnp.float32)))


def counts(captured: Captured) -> dict[Any, int]:
    assert len({(use.op, use.problem, use.skipped) for use in captured.uses}) == len(captured.uses)
    return {use.problem: use.count for use in captured.problems}


def test_a_call_counts_once_as_for_the_gpu_that_will_run_it():
    captured = capture(matmul)(A, B)
    assert counts(captured) == {FORWARD: 1}
    assert (captured.gpu.key, captured.notes) == ("h200", ())
    assert capture(matmul, "h20")(A, B).gpu is gpu.find("h20")
    with gpu.target("h100-sxm"):
        assert capture(matmul)(A, B).gpu.key == "h100-sxm"


@pytest.mark.parametrize("jitted", [False, True])
def test_gradients_count_with_the_forward_pass_that_they_need(jitted):
    gradient = jax.grad(total(matmul), argnums=(0, 1))
    assert counts(capture(jax.jit(gradient) if jitted else gradient)(A, B)) == {FORWARD: 1, DA: 1, DB: 1}


def test_what_the_results_of_a_jitted_function_do_not_need_does_not_count():
    linear = lambda a, b: jnp.sum(matmul(a, b, out_dtype=jnp.float32))  # noqa: E731
    only_b = capture(jax.jit(jax.grad(linear, argnums=1)))(A, B)
    assert counts(only_b) == {DB: 1}

    def two(a, b):
        return matmul(a, b), matmul(b.T, a.T)

    first = lambda a, b: jax.jit(two)(a, b)[0]  # noqa: E731
    assert sum(counts(capture(first)(A, B)).values()) == 2  # the inner function runs whole
    assert counts(capture(jax.jit(first))(A, B)) == {FORWARD: 1}  # XLA sees that half of it is not needed


def test_a_jitted_function_that_is_called_often_counts_each_time():
    def layers(x, w):
        for _ in range(32):
            x = square(x, w)
        return x

    square = jax.jit(matmul)
    wanted = {MatmulProblem(M, M, M): 32}
    assert counts(capture(layers)(W, W)) == counts(capture(jax.jit(layers))(W, W)) == wanted
    nested = lambda x, w: jax.jit(layers)(jax.jit(layers)(x, w), w)  # noqa: E731
    assert counts(capture(nested)(W, W)) == {MatmulProblem(M, M, M): 64}


def layers_of(function: Callable[..., jax.Array]) -> Callable[..., jax.Array]:
    return lambda x, ws: jax.lax.scan(lambda x, w: (function(x, w), None), x, ws)[0]


def test_scan_counts_times_its_length_also_in_a_gradient_and_in_another_scan():
    ws = shaped(7, M, M)
    square, t = MatmulProblem(M, M, M), functools.partial(MatmulProblem, M, M, M, layout="tn")
    assert counts(capture(layers_of(matmul))(W, ws)) == {square: 7}
    back = counts(capture(jax.grad(total(layers_of(matmul)), argnums=(0, 1)))(W, ws))
    assert back == {square: 7, MatmulProblem(M, M, M, layout="nt"): 7, t(): 7}
    assert counts(capture(layers_of(layers_of(matmul)))(W, shaped(3, 7, M, M))) == {square: 21}


def test_checkpoint_counts_what_it_computes_again():
    def block(x, w):
        return jnp.tanh(matmul(jnp.tanh(matmul(x, w)), w))

    square = MatmulProblem(M, M, M)
    gradient = jax.jit(jax.grad(total(block)))
    assert counts(capture(gradient)(W, W))[square] == 2
    assert counts(capture(jax.jit(jax.grad(total(jax.checkpoint(block)))))(W, W))[square] == 4


def test_vmap_of_matmul_and_of_grouped_matmul_is_one_launch():
    assert counts(capture(jax.vmap(matmul))(shaped(3, M, K), shaped(3, K, N))) == {MatmulProblem(M, N, K, batch=3): 1}
    assert counts(capture(jax.vmap(matmul, (0, None)))(shaped(3, M, K), B)) == {MatmulProblem(3 * M, N, K): 1}
    sizes = shaped(3, 4, dtype=jnp.int32)
    many = capture(jax.vmap(mgpu_ops.grouped_matmul))(shaped(3, M, K), shaped(3, 4, K, N), sizes)
    assert counts(many) == {GroupedMatmulProblem(3 * M, N, K, 12): 1}


@pytest.mark.parametrize("wrap", [lambda f: f, jax.jit])
def test_shard_map_counts_the_shapes_that_a_device_sees(wrap):
    mesh = AbstractMesh((4,), ("x",), axis_types=(AxisType.Auto,))
    specs = (P(None, "x"), P("x"))

    def product(a, b):
        return jax.lax.psum(matmul(a, b), "x")

    sharded = jax.shard_map(product, mesh=mesh, in_specs=specs, out_specs=P())
    assert counts(capture(wrap(sharded))(A, B)) == {MatmulProblem(M, N, K // 4): 1}
    back = counts(capture(wrap(jax.grad(total(sharded), argnums=(0, 1))))(A, B))
    assert back == {
        MatmulProblem(M, N, K // 4): 1,
        MatmulProblem(M, K // 4, N, layout="nt"): 1,
        MatmulProblem(K // 4, N, M, layout="tn"): 1,
    }


def test_a_while_loop_counts_one_turn_and_a_cond_all_branches_and_both_are_said():
    def loop(x, w):
        return jax.lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: matmul(x, w), x)

    def branch(x, w):
        return jax.lax.cond(jnp.sum(x) < 3, lambda: matmul(x, w), lambda: matmul(x, w, transpose_b=True))

    looped, branched = capture(loop)(W, W), capture(jax.jit(branch))(W, W)
    square = MatmulProblem(M, M, M)
    assert counts(looped) == {square: 1}
    assert [note.partition(":")[0] for note in looped.notes] == ["a while loop counts as one turn"]
    assert counts(branched) == {square: 1, MatmulProblem(M, M, M, layout="nt"): 1}
    assert [note.partition(":")[0] for note in branched.notes] == ["a cond counts as all its branches"]
    assert "a while loop counts as one turn" in str(looped)


def test_a_loop_without_an_op_inside_needs_no_note():
    counted = lambda x, w: matmul(jax.lax.while_loop(lambda x: jnp.sum(x) < 3, lambda x: x + 1, x), w)  # noqa: E731
    assert capture(counted)(W, W).notes == ()


def test_attention_and_its_backward_pass_are_two_ops():
    q, k = shaped(2, 256, 8, 128), shaped(2, 256, 2, 128)
    attention = functools.partial(mgpu_ops.flash_attention, causal=True)
    captured = capture(jax.grad(total(attention), argnums=(0, 1, 2)))(q, k, k)
    forward = FlashAttentionProblem(2, 256, 256, 8, 2, 128, causal=True)
    assert [(use.op, use.count) for use in captured.problems] == [("flash_attention", 1), ("flash_attention_backward", 1)]
    assert captured.problems[0].problem == forward
    through_jax_nn = capture(functools.partial(mgpu_ops.dot_product_attention, is_causal=True))(q, k, k)
    assert [use.op for use in through_jax_nn.problems] == ["flash_attention"]


def test_a_step_of_the_example_counts_its_products_and_their_gradients():
    layer = moe.Layer()
    rows, (width, hidden, experts) = 1024 * layer.top_k, (layer.width, layer.hidden, layer.experts)
    gradient = GroupedMatmulProblem(rows, hidden, width, experts, layout="nt")
    assert counts(capture(moe.step)()) == {
        GatedGroupedMatmulProblem(rows, hidden, width, experts, keep=True): 1,
        GroupedMatmulProblem(rows, width, hidden, experts, row_scale=True): 1,
        dataclasses.replace(gradient, activation="silu", row_scale=True, gated_gradient=True): 1,
        RaggedContractionProblem(rows, width, hidden, experts): 1,
        RaggedContractionProblem(rows, hidden, width, experts): 2,
    }


# --- What is not to tune


def test_calls_through_xla_are_listed_with_the_reason():
    captured = capture(lambda a: (matmul(a, a, out_dtype="float16"), matmul(a, a, backend="xla")))(shaped(M, M))
    assert captured.problems == ()
    reasons = [use.skipped for use in captured.uses]
    assert "runs through XLA: out_dtype float16 is neither" in reasons[0]
    assert reasons[1] == "runs through XLA: backend='xla'"
    assert str(captured).count("runs through XLA") == 2
    blackwell = capture(matmul, "b200")(A, B)
    assert "not a Hopper GPU" in blackwell.uses[0].skipped


def test_a_named_backend_that_cannot_run_raises_as_it_would_in_the_program():
    with pytest.raises(ValueError, match="backend='mosaic' cannot run matmul"):
        capture(functools.partial(matmul, backend="mosaic"))(shaped(M, 3), shaped(3, N))


def test_a_call_that_brings_its_config_is_not_to_tune():
    config = mgpu_ops.spec_of("matmul").default(FORWARD, gpu.find("h200"))
    assert isinstance(config, MatmulConfig)
    (use,) = capture(functools.partial(matmul, config=config))(A, B).uses
    assert (use.problem, use.count) == (FORWARD, 1)
    assert "runs with the config that the call gives it: Config(" in use.skipped


# --- Arguments, and what stays as it was


def test_arguments_without_a_shape_are_passed_on_and_arrays_are_not_read():
    def program(flag: str, times: int, arrays: dict[str, Any], *, last: bool) -> Any:
        assert (flag, times, last) == ("on", 3, True)
        for _ in range(times):
            out = matmul(arrays["a"], arrays["b"])
        return {"out": out, "name": "text"}

    arrays = {"a": np.ones((M, K), jnp.bfloat16), "b": jnp.ones((K, N), jnp.bfloat16)}
    assert counts(capture(program)("on", 3, arrays, last=True)) == {FORWARD: 3}


@pytest.mark.parametrize("what", [3, None, jnp.ones(2)], ids=["number", "None", "array"])
def test_what_is_no_function_is_refused_before_it_is_called(what):
    with pytest.raises(TypeError, match=f"^capture takes a function, not {re.escape(repr(what))}: capture.step..x."):
        capture(what)


def test_a_function_that_looks_at_values_raises_as_under_jit():
    with pytest.raises(jax.errors.ConcretizationTypeError):
        capture(moe.train)(moe.Layer(), 2, 64)


def test_capture_neither_uses_nor_leaves_traces_of_the_program():
    """A jitted function keeps what it was traced to: with marks it could not run, without them nothing would be found."""
    product = jax.jit(lambda a, b: matmul(a, b))
    a, b = jnp.ones((16, 32), jnp.bfloat16), jnp.ones((32, 8), jnp.bfloat16)
    before = product(a, b)
    assert counts(capture(product)(a, b)) == {MatmulProblem(16, 8, 32): 1}
    np.testing.assert_array_equal(product(a, b), before)
    fresh = jax.jit(lambda a, b: matmul(a, b))
    assert counts(capture(fresh)(a, b)) == {MatmulProblem(16, 8, 32): 1}
    np.testing.assert_array_equal(fresh(a, b), before)


def test_capture_asks_no_database(monkeypatch):
    monkeypatch.setattr(resolution, "resolve", None)
    assert counts(capture(matmul)(A, B)) == {FORWARD: 1}


def test_a_function_without_ops_gives_nothing():
    captured = capture(jnp.sin)(A)
    assert (captured.uses, str(captured)) == ((), "no call of an op")
