"""Which kernels `mgpu_ops.fp8_moe` runs: captured, interpreted as a whole, and compiled."""

from __future__ import annotations

import functools
import logging
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import Fp8GatedState, GroupedMatmulProblem, QuantizeProblem, RaggedContractionProblem, fp8_moe, spec_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.fp8_moe import padded_rows
from mgpu_ops.matmul import quantizing
from mgpu_ops.registry import dispatch
from tests.mgpu_ops.test_fp8_moe import ALIKE, NAMES, share
from tests.mgpu_ops.test_moe import layer
from tests.thorough import only_in_all

H200 = gpu.find("h200")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def step(top_k: int, backend: Any = None, **options: Any) -> Any:
    """The result and the gradients of all arrays, and of a state."""

    def found(*arrays: Any) -> Any:
        *arrays, state = arrays
        call = lambda *a: fp8_moe(*a[:5], top_k, state=a[5], backend=backend, **options)  # noqa: E731
        out, back = jax.vjp(call, *arrays, state)
        weights = np.random.default_rng(9).standard_normal(out.shape).astype(np.float32)
        return out, back(jnp.asarray(weights, out.dtype))

    return found


# --- captured


@pytest.mark.parametrize("tokens", [63, 200])
def test_each_array_is_rounded_once_and_all_nine_products_are_of_8_bits(tokens: int) -> None:
    d, hidden, experts = 64, 48, 4
    with mgpu_ops.target("h200"):
        seen = mgpu_ops.capture(step(2))(*layer(tokens, d, hidden, experts), None)
    assert seen.problems == seen.uses, "some of it runs through XLA"
    rows, of_gradients = padded_rows(2 * tokens, experts), {"to": E5M2}
    rounded = {
        QuantizeProblem(rows, d, gathered=tokens): 1,
        QuantizeProblem(d, hidden, batch=experts): 2,
        QuantizeProblem(hidden, d, batch=experts): 1,
        QuantizeProblem(rows, hidden, of="gate", amax="only", row_scale=True): 1,
        QuantizeProblem(rows, hidden, of="gate", row_scale=True): 1,
        QuantizeProblem(rows, d, gathered=tokens, **of_gradients): 1,
        QuantizeProblem(rows, hidden, of="gate_gradient", amax="only", row_scale=True, **of_gradients): 1,
        QuantizeProblem(rows, hidden, of="gate_gradient", row_scale=True, **of_gradients): 1,
    }
    of_8 = functools.partial(GroupedMatmulProblem, rows, layout="nt", scales="tensor", groups=experts)
    backward = {"dtype": E5M2, "rhs_dtype": E4M3}
    products = {
        of_8(hidden, d, dtype=E4M3): 2,
        of_8(d, hidden, dtype=E4M3): 1,
        of_8(hidden, d, **backward): 1,
        of_8(d, hidden, second=True, **backward): 1,  # two in one
    }
    of_matrices = functools.partial(RaggedContractionProblem, rows, groups=experts, dtype=E4M3, rhs_dtype=E5M2, transposed=True)
    contractions = {of_matrices(hidden, d): 2, of_matrices(d, hidden): 1}
    assert {use.problem: use.count for use in seen.uses} == rounded | products | contractions


def test_the_gradients_of_float32_matrices_are_computed_in_float32() -> None:
    x, logits, *matrices = layer(63, 64, 48, 4)
    with mgpu_ops.target("h200"):
        seen = mgpu_ops.capture(step(2))(x, logits, *(w.astype("float32") for w in matrices), None)
    products = [use.problem for use in seen.uses if use.op != "quantize"]
    out_dtypes = {type(p): {q.out_dtype for q in products if type(q) is type(p)} for p in products}
    assert out_dtypes == {GroupedMatmulProblem: {"bfloat16"}, RaggedContractionProblem: {"float32"}}


def test_the_spread_is_that_of_all_products_and_only_chooses_configs() -> None:
    with mgpu_ops.target("h200"):
        seen = mgpu_ops.capture(step(2, spread="skewed"))(*layer(63, 64, 48, 4), None)
    assert {use.problem.spread for use in seen.uses if use.op != "quantize"} == {"skewed"}


def test_without_gradients_nothing_of_the_backward_pass_runs() -> None:
    with mgpu_ops.target("h200"):
        seen = mgpu_ops.capture(lambda *a: fp8_moe(*a, 2))(*layer(63, 64, 48, 4))
    assert sum(use.count for use in seen.uses if use.op == "grouped_matmul") == 3
    assert not [use for use in seen.uses if use.op == "ragged_contraction" or use.problem.dtype == E5M2]


@pytest.mark.parametrize(("d", "hidden", "told"), [(40, 64, "columns=40"), (64, 40, "columns=40")])
def test_sides_that_the_kernels_do_not_take_run_through_xla_and_a_log_line_says_why(
    d: int, hidden: int, told: str, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    monkeypatch.setattr(dispatch, "_said", set())
    arrays = layer(40, d, hidden, 4)
    with mgpu_ops.target("h200"), caplog.at_level(logging.WARNING, "mgpu_ops"):
        jax.eval_shape(step(2), *arrays, None)
        seen = mgpu_ops.capture(step(2))(*arrays, None)
    assert f"quantize runs through XLA: {told} is no multiple of 16: pad it to 48, or use backend='xla'" in caplog.messages
    assert any(message.startswith("grouped_matmul runs through XLA: ") for message in caplog.messages)
    assert len(seen.problems) < len(seen.uses)
    with pytest.raises(ValueError, match="backend='mosaic' cannot run grouped_matmul"), mgpu_ops.target("h200"):
        jax.eval_shape(step(2, "mosaic"), *arrays, None)


# --- interpreted


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("state", [None, pytest.param(Fp8GatedState.init(2), marks=only_in_all)], ids=["current", "delayed"])
def test_the_interpreted_kernels_together_are_xlas_layer_without_races(state: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    """The kernel of `quantize` runs too, as on a GPU."""
    arrays = *layer(24, 32, 48, 3), state
    wanted = jax.jit(step(2, "xla"))(*arrays)
    run, of, ran = dispatch.run, spec_of("quantize"), []

    def interpreted(spec: Any, problem: Any, arrays: Any, **options: Any) -> Any:
        if spec is not of or options["backend"] == "xla":
            return run(spec, problem, arrays, **options)
        ran.append(problem)
        return spec.run(problem, spec.default(problem, H200), H200, *arrays, interpret=True)

    monkeypatch.setattr(dispatch, "run", interpreted)
    monkeypatch.setattr(quantizing.partition, "applies", lambda *_: False)  # as with one GPU: interpreted kernels are not split
    quantizing._batchable.cache_clear()
    found = jax.jit(step(2, "interpret"))(*arrays)
    jax.block_until_ready(found)
    quantizing._batchable.cache_clear()
    assert len({*ran}) == (6 if state else 8)
    for name, one, other in zip(NAMES, (found[0], *found[1][:5]), (wanted[0], *wanted[1][:5]), strict=True):
        assert share(one, other) < ALIKE, name
    for one, other in zip(jax.tree.leaves(found[1][5]), jax.tree.leaves(wanted[1][5]), strict=True):
        np.testing.assert_allclose(one, other, rtol=0.05)


# --- compiled, without a GPU


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize("state", [None, pytest.param(Fp8GatedState.init(2), marks=only_in_all)], ids=["current", "delayed"])
def test_a_whole_step_compiles_without_spills_and_without_waits_between_products(state: Any) -> None:
    """Also the kernel of `quantize`, in whose place XLA runs for arrays as small as these."""
    shapes = *jax.eval_shape(lambda: layer_of_zeros(512, 256, 384, 8)), state
    of = spec_of("quantize")
    with mgpu_ops.target("h200"):
        uses = mgpu_ops.capture(step(2))(*shapes).uses
    rounding = {use.problem for use in uses if use.op == of.name}
    with mgpu_ops.use_configs({of.name: [(problem, of.default(problem, H200)) for problem in rounding]}):
        report = aot.compile_for("h200", step(2), *shapes)
    assert len(report.kernels) == len({use.problem for use in uses})
    assert report.spills == 0
    assert report.serialized == ""
    assert "QGMMA" in report.sass
    assert "HGMMA" not in report.sass


def layer_of_zeros(tokens: int, d: int, hidden: int, experts: int) -> tuple[jax.Array, ...]:
    of = functools.partial(jnp.zeros, dtype=jnp.bfloat16)
    matrices = of((experts, d, hidden)), of((experts, d, hidden)), of((experts, hidden, d))
    return of((tokens, d)), jnp.zeros((tokens, experts)), *matrices
