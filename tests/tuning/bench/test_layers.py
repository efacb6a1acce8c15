"""`bench moe`: a whole layer of experts is timed, compared, and told beside one that is made of others' parts."""

from __future__ import annotations

import dataclasses
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops.core import gpu as gpus
from mgpu_ops.tuning.bench import implementations, layers, report, results, runner
from mgpu_ops.tuning.bench.settings import Precompiled, TuningContext
from mgpu_ops.tuning.labels import label, problem_of
from tests.arrays import normal
from tests.tuning.bench.test_runner import timer, warm

H200 = gpus.find("h200")
SMALL = {"small": layers.Problem(40, 16, 24, 4, 2)}


@pytest.mark.parametrize("grad", [False, True])
def test_a_layer_and_one_of_others_parts_are_right_and_told(grad: bool, tmp_path: Path) -> None:
    said: list[str] = []
    options = runner.BenchOptions(H200, 0.01, against=["lax"], grad=grad, backend="xla", timer=timer, warm_timer=warm)
    rows = runner.run(layers.SPEC, SMALL, options, progress=said.append)
    assert [row.impl for row in rows] == ["mgpu_ops", "lax", "roofline"], said
    assert {row.op for row in rows} == {"moe+grad" if grad else "moe"}
    assert results.failures(rows, layers.SPEC, SMALL, grad=grad) == []
    assert all(row.error is not None and row.error < 0.03 for row in rows)
    results.write_csv(rows, tmp_path / "rows.csv")
    assert results.read_csv(tmp_path / "rows.csv") == rows
    assert report.table(rows).row_count
    assert report.picture(rows, tmp_path / "rows.png")


def test_work_is_that_of_three_products_of_each_assignment() -> None:
    p = layers.SHAPES["d2560-e64-16384"]
    assert p.rows == 65536
    assert layers.flops(p) == 2 * 65536 * 2560 * 1280 * 3
    assert layers.flops(p) == sum(2 * q.m * q.n * q.k for q in (p.gate_up, p.down))


@pytest.mark.parametrize("spread", ["even", "random", "skewed", "sparse"])
def test_tokens_spread_over_the_experts_as_the_problem_says(spread: str) -> None:
    p = layers.Problem(2000, 8, 8, 16, 2, spread=spread)
    _, logits, *_ = layers.inputs(p, jax.random.key(0))
    counts = np.bincount(np.ravel(jax.lax.top_k(logits, 2)[1]), minlength=16) / 4000
    if spread == "sparse":
        assert (counts > 0).sum() == 8
    assert counts.std() / counts.mean() == pytest.approx(
        {"even": 0.05, "random": 0.4, "skewed": 0.9, "sparse": 1.1}[spread], abs=0.3
    )


def test_shapes_are_those_of_models_and_their_labels_read_back() -> None:
    for name, problem in layers.SHAPES.items():
        assert problem_of(layers.SPEC, label(layers.SPEC, name, problem)) == problem
    assert sorted(name for names in layers.SUITES.values() for name in names) == sorted(layers.SHAPES)


def test_lax_is_not_run_where_it_would_expand_its_operands_beyond_memory() -> None:
    lax = implementations.COMPETITORS["moe"]["lax"]
    assert "expands its operands" in str(lax.unavailable(layers.SHAPES["d2560-e64-16384"], H200))
    assert lax.unavailable(SMALL["small"], H200) is None


@pytest.mark.parametrize(("jaxs", "tokamaxs", "wanted"), [(2.0, 3.0, "jax"), (3.0, 2.0, "tokamax"), (None, 2.0, "tokamax")])
def test_the_fastest_parts_are_the_faster_of_the_kernels_that_run(
    jaxs: float | None, tokamaxs: float, wanted: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    times: dict[str, float] = {"jax": jaxs or 0.0, "tokamax": tokamaxs}
    context = TuningContext(None, H200, (np.ones(3),), lambda calls, gpu, rounds: [[times[str(call())]] for call in calls])

    def prepare(name: str) -> implementations.Prepared:
        if not times[name]:
            raise ValueError("none of 2 settings compiles")
        return Precompiled(lambda x: x, context.arrays, lambda: name), name

    monkeypatch.setattr(implementations, "_jax_grouped", lambda context: prepare("jax"))
    monkeypatch.setattr(implementations, "_tokamax", lambda context: prepare("tokamax"))
    assert implementations._faster(context)[1] == wanted


def test_answers_of_fused_weights_are_split_for_the_comparison() -> None:
    p = dataclasses.replace(SMALL["small"], dtype="float32")
    arrays = layers.inputs(p, jax.random.key(0))
    fused = layers.fused(p, *arrays)
    out, pull = jax.vjp(partial(layers.composed_of_lax, p), *fused)
    answers = layers.unfused((out, *pull(out)))
    assert [x.shape for x in answers] == [(40, 16), *(x.shape for x in arrays)]


def test_weights_of_8_and_4_bits_are_made_in_advance_and_timed_without_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "xla")
    problem, said = {"small": layers.Problem(40, 128, 128, 4, 2)}, list[str]()
    options = runner.BenchOptions(H200, 0.01, against=["int8", "int4"], timer=timer, warm_timer=warm)
    rows = runner.run(layers.SPEC, problem, options, progress=said.append)
    assert [row.impl for row in rows] == ["mgpu_ops", "int8", "int4", "roofline"], said
    assert [row.error is None for row in rows[1:3]] == [True, True]
    with_gradients = runner.run(layers.SPEC, problem, dataclasses.replace(options, grad=True), progress=said.append)
    assert [row.impl for row in with_gradients] == ["mgpu_ops", "roofline"]


@pytest.mark.parametrize(("w_dtype", "limit"), [("int8", 0.03), ("int4", 0.4)])
def test_a_layer_of_8_or_4_bits_is_nearly_that_of_16(w_dtype: str, limit: float) -> None:
    p = layers.Problem(40, 128, 256, 4, 2)
    arrays = layers.inputs(p, jax.random.key(0))
    quantized = layers.quantized(w_dtype, p, *arrays)
    assert [x.dtype for x in quantized[2:]] == [w_dtype, w_dtype, "bfloat16", "bfloat16"]
    wanted, out = (np.asarray(x, np.float64) for x in (layers.reference(p, *arrays), layers.of_quantized(p, *quantized)))
    assert np.linalg.norm(out - wanted) < limit * np.linalg.norm(wanted)
    assert layers.unfit("int8", SMALL["small"], H200) is None
    assert "multiples of 128, not 16 and 24" in str(layers.unfit("int4", SMALL["small"], H200))


@pytest.mark.parametrize(("rows", "k", "n"), [(1000, 2880, 768), (100, 192, 2880), (300, 128, 4096)])
def test_jax_s_kernels_have_blocks_that_divide_n_and_the_gradients_of_ragged_dot(
    rows: int, k: int, n: int, monkeypatch: pytest.MonkeyPatch
) -> None:
    pytest.importorskip("absl")  # JAX's samples import it
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu, transposed_ragged_dot_mgpu

    def product(lhs: Any, rhs: Any, *, group_sizes: Any, transpose_rhs: bool, **blocks: int) -> Any:
        columns = rhs.shape[1 if transpose_rhs else 2]
        assert columns % (blocks["block_n"] * blocks["grid_block_n"]) == 0
        assert blocks["block_m"] == (128 if rows > 192 else 64)
        return jax.lax.ragged_dot(lhs, rhs.mT if transpose_rhs else rhs, group_sizes)

    def contraction(lhs: Any, rhs: Any, *, group_sizes: Any, **blocks: int) -> Any:
        assert lhs.shape[1] % blocks["block_m"] == rhs.shape[1] % blocks["block_n"] == 0
        return jax.vjp(lambda w: jax.lax.ragged_dot(lhs, w, group_sizes), jnp.zeros((3, k, n)))[1](rhs)[0]

    monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", product)
    monkeypatch.setattr(transposed_ragged_dot_mgpu, "transposed_ragged_dot", contraction)
    lhs, rhs = normal(0, rows, k), normal(1, 3, k, n)
    sizes = jnp.array([rows // 2, 0, rows - rows // 2], jnp.int32)
    found, wanted = (
        jax.grad(lambda lhs, rhs, dot=dot: jnp.sum(dot(lhs, rhs, sizes) ** 2), (0, 1))(lhs, rhs)
        for dot in (layers.ragged_dot_of_jax, jax.lax.ragged_dot)
    )
    for one, other in zip(found, wanted, strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-3, atol=1e-2)
