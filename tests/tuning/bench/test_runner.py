"""Benchmarks: what a run measures, and how it reports what went wrong.

XLA on the CPU stands in for a GPU.
"""

from __future__ import annotations

import dataclasses
import math
import re
import sys
import types
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mgpu_ops import SPECS, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem
from mgpu_ops.attention import cudnn, reference
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry import database, winner
from mgpu_ops.tuning import public
from mgpu_ops.tuning.bench import implementations, results, runner, settings
from mgpu_ops.tuning.bench.results import Measurement
from mgpu_ops.tuning.outcome import Turn

SPEC = SPECS["matmul"]
H200 = gpus.find("h200")
ROOT = Path(__file__).parents[3]
SMALL = {"small": MatmulProblem(64, 32, 128)}


def timer(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """Runs each function once and pretends that the i-th takes 10 (i + 1) us, give or take 1."""
    for function in functions:
        jax.block_until_ready(function())
    return [[10.0 * (i + 1) + (r % 3 - 1) for r in range(rounds)] for i in range(len(functions))]


def warm(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """As `timer`, in 0.8 of the time."""
    return [[0.8 * us for us in samples] for samples in timer(functions, gpu, rounds)]


def run(problems: dict[str, Any] | None = None, *, spec: Any = SPEC, **changes: Any) -> tuple[list[Measurement], list[str]]:
    said: list[str] = []
    save = changes.pop("save", None)
    options: dict[str, Any] = {"gpu": H200, "against": ["xla"], "seconds": 0.01, "backend": "xla"}
    options = {"timer": timer, "warm_timer": warm} | options | changes
    problems = SMALL if problems is None else problems
    return runner.run(spec, problems, runner.BenchOptions(**options), progress=said.append, save=save), said


def problem_run(spec: Any, problem: Any, **changes: Any) -> runner._ProblemRun:
    options = runner.BenchOptions(H200, seconds=1.0, **changes)
    return runner._ProblemRun(spec, problem, "p", options, runner.stamp_of(spec.name, H200), print)


# --- Running --------------------------------------------------------------------------------------


def test_a_problem_gives_a_row_for_ours_each_competitor_and_the_roofline() -> None:
    rows, said = run()
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert {(r.op, r.problem, r.gpu) for r in rows} == {("matmul", "64x32x128 bfloat16 nn", "NVIDIA H200")}
    assert [r.median_us for r in rows[:2]] == [10.0, 20.0]
    assert rows[0].spread_us == 2.0
    assert all(0 < r.error <= 8e-3 for r in rows[:2])
    assert [r.warm_us for r in rows] == [8.0, 16.0, None]
    assert "mgpu_ops 10 us (8 warm), xla 20 us (16 warm)" in said[-1]


def test_a_run_says_what_it_does_before_it_does_it() -> None:
    _, said = run()
    steps = [line.partition(": ")[2] for line in said]
    assert steps[0].startswith("compiles and runs the same in float32")
    assert steps[1:-1] == ["compiles mgpu_ops", "compiles xla", "times mgpu_ops, xla"]


def test_rows_tell_the_versions_of_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = types.SimpleNamespace(cudnn_get_version=lambda: 91900, cublas_get_version=lambda: 130205)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    monkeypatch.setattr(runner.ptxas, "isa", lambda: 93)
    runner._libraries.cache_clear()
    rows, _ = run()
    runner._libraries.cache_clear()
    assert {(r.cudnn, r.cublas, r.ptxas) for r in rows} == {("9.19.0", "13.2.5", "9.3")}


def test_versions_of_what_is_not_here_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    monkeypatch.setattr(runner.ptxas, "isa", lambda: None)
    runner._libraries.cache_clear()
    found = runner._libraries()
    runner._libraries.cache_clear()
    assert found == {"cudnn": "", "cublas": "", "ptxas": ""}


def test_rates_are_work_over_time() -> None:
    rows, _ = run({"f": MatmulProblem(64, 32, 128, out_dtype="float32")})
    assert rows[0].tflops == pytest.approx(2 * 64 * 32 * 128 / 10e-6 / 1e12, rel=1e-5)
    moved = 2 * (64 * 128 + 128 * 32) + 4 * 64 * 32
    assert rows[0].gbs == pytest.approx(moved / 10e-6 / 1e9, rel=1e-5)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("grad", [False, True])
def test_every_layout_is_right_with_and_without_gradients(layout: str, grad: bool) -> None:
    problems = {"p": MatmulProblem(16, 32, 64, "float16", "float16", layout)}
    rows, _ = run(problems, grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert results.failures(rows, SPEC, problems, grad=grad) == []


def test_what_runs_without_pause_has_a_row_with_watts_and_says_once_where_nvml_tells_none(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    asked: list[tuple[float, Any]] = []

    def turns(functions: Sequence[Callable[[], Any]], seconds: float, meter: Any) -> list[list[Turn]]:
        asked.append((seconds, meter))
        return [[Turn(10.0 * (i + 1) + t, 1400.0, 700.0, 0.007) for t in range(3)] for i in range(len(functions))]

    monkeypatch.setitem(sys.modules, "pynvml", None)
    several = {"a": MatmulProblem(64, 32, 128), "b": MatmulProblem(64, 64, 128)}
    found, said = run(several, sustained=2.0, sustained_timer=turns)
    assert [(r.op, r.impl, r.median_us, r.warm_us) for r in found[:2]] == [
        ("matmul-sustained", "mgpu_ops", 11.0, None),
        ("matmul-sustained", "xla", 21.0, None),
    ]
    assert {(r.watts, r.clock_mhz, r.joules) for r in found if r.impl != "roofline"} == {(700.0, 1400.0, 0.007)}
    assert found[0].tflops == pytest.approx(2 * 64 * 32 * 128 / 11e-6 / 1e12, rel=1e-5)
    assert asked == [(2.0, None)] * 2
    assert len([line for line in said if "clock, watts and joules are not measured" in line]) == 1
    assert "mgpu_ops 11 us (700 W), xla 21 us (700 W)" in said[-1]
    assert results.failures(found, SPEC, several, grad=False) == []


def test_integers_are_compared_with_sums_of_floats() -> None:
    rows, said = run({"small": MatmulProblem(64, 32, 128, "int8", "int32", layout="nt")})
    assert [(row.impl, row.error) for row in rows if row.impl != "roofline"] == [("mgpu_ops", 0.0), ("xla", 0.0)], said


def test_a_gradient_of_integers_is_refused() -> None:
    rows, said = run({"small": MatmulProblem(64, 32, 128, "int8", "int32", layout="nt")}, grad=True)
    assert not rows
    assert "results in int32 have no gradient: measure them without --grad" in said[-1]


def test_a_batch_runs() -> None:
    rows, _ = run({"b": MatmulProblem(16, 32, 64, batch=3)})
    assert rows[0].problem == "16x32x64 bfloat16 nn batch=3"
    assert rows[0].error <= 8e-3


def test_gradients_do_three_times_the_work() -> None:
    forward, _ = run()
    both, _ = run(grad=True)
    assert both[0].op == "matmul+grad"
    assert both[0].tflops == pytest.approx(3 * forward[0].tflops, rel=1e-5)
    assert both[-1].median_us == pytest.approx(3 * forward[-1].median_us, rel=1e-5)


def test_the_gradient_of_a_loss_moves_the_logits_three_times_and_each_tokens_numbers_once_more() -> None:
    spec = SPECS["cross_entropy"]
    problem = spec.Problem(8, 256)
    logits = 8 * 256 * 2
    one, both = (problem_run(spec, problem, grad=grad).work() for grad in (False, True))
    assert one == (3 * 8 * 256, logits + 8 * 12)
    assert both == (6 * 8 * 256, 3 * logits + 8 * (12 + 16))


def test_the_roofline_is_the_datasheets() -> None:
    large, tall = MatmulProblem(4096, 4096, 4096), MatmulProblem(8, 4096, 4096)
    large_us, tall_us = (problem_run(SPEC, problem).roofline().median_us for problem in (large, tall))
    assert large_us == pytest.approx(2 * 4096**3 / 989.4e12 * 1e6, rel=1e-5)
    assert tall_us == pytest.approx(2 * (4096**2 + 2 * 8 * 4096) / 4.8e12 * 1e6, rel=1e-5)


def test_our_row_says_which_config_ran_and_where_it_came_from() -> None:
    rows, _ = run({"p": MatmulProblem(64, 64, 64)}, backend="interpret", against=[])
    config = SPEC.default(MatmulProblem(64, 64, 64), H200)
    assert f"tile_m={config.tile_m} tile_n={config.tile_n}" in rows[0].config
    assert rows[0].config.partition("; source=")[2] in ("default", "near", "shipped")
    assert rows[0].error <= 8e-3


def test_the_config_of_a_call_that_xla_won_is_xla_with_both_times() -> None:
    entries = database.read(database.shipped_path("h200", "matmul")).entries
    problem = next(MatmulProblem(**entry.problem) for entry in entries if winner.of_entry(entry, SPEC) == "xla")  # type: ignore[arg-type]
    told = runner.config_text(SPEC, problem, H200)
    assert re.fullmatch(r"xla, kernel [\d.]+ us, xla [\d.]+ us, measured; source=shipped", told)
    assert "tile_m=" in runner.config_text(SPEC, problem, H200, "mosaic")
    assert runner.config_text(SPEC, problem, H200, "xla") == "backend=xla"


def test_our_row_says_when_it_went_through_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "xla")
    rows, _ = run(backend=None)
    assert rows[0].config == "backend=xla"
    monkeypatch.delenv("MGPU_OPS_BACKEND")
    rows, _ = run({"p": MatmulProblem(16, 16, 16, "float32")}, backend=None)
    assert rows[0].config.startswith("backend=xla, for out_dtype bfloat16 of float32")


def test_more_seconds_mean_more_rounds() -> None:
    asked: list[int] = []

    def counting(functions: Sequence[Any], gpu: Gpu, rounds: int) -> list[list[float]]:
        asked.append(rounds)
        return timer(functions, gpu, rounds)

    run(seconds=0.001, timer=counting)
    run(seconds=0.01, timer=counting)
    assert asked[1] < asked[3]


def test_a_competitor_that_cannot_run_has_no_row_and_its_reason_is_told() -> None:
    rows, said = run(against=["jax-pallas", "xla"])
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert any("jax-pallas has no tile that divides m=64" in line for line in said)


def test_a_competitor_without_a_gradient_is_told() -> None:
    rows, said = run({"p": MatmulProblem(128, 128, 64)}, against=["jax-pallas"], grad=True)
    assert [r.impl for r in rows] == ["mgpu_ops", "roofline"]
    assert any("jax-pallas is measured forward only" in line for line in said)


def test_a_competitor_that_fails_does_not_take_the_others_along() -> None:
    # Its kernel does not compile for a CPU.
    rows, said = run({"p": MatmulProblem(128, 128, 64)}, against=["jax-pallas", "xla"])
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert any("jax-pallas failed: ValueError: none of" in line for line in said)


def test_an_unknown_competitor_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cutlass' is no competitor of matmul: name one of xla"):
        run(against=["cutlass"])


def test_a_failing_problem_is_told_and_the_run_goes_on() -> None:
    problems = {"bad": MatmulProblem(64, 32, 128, dtype="int32"), **SMALL}
    saved: list[int] = []
    rows, said = run(problems, save=lambda rows: saved.append(len(rows)))
    assert {r.problem for r in rows} == {"64x32x128 bfloat16 nn"}
    assert any(line.startswith("64x32x128 int32->bfloat16 nn: failed: ") for line in said)
    assert saved == [3]
    assert results.failures(rows, SPEC, problems, grad=False) == ["64x32x128 int32->bfloat16 nn: no result"]


@pytest.mark.parametrize(("factor", "shown"), [(math.nan, "nan"), (1.5, "0.")])
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_result_is_visible(factor: float, shown: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = public.CALLS["matmul"]

    def broken(problem: Any, backend: str | None) -> Callable[..., jax.Array]:
        if problem.dtype == "float32":  # what gradients are compared with
            return right(problem, backend)
        return lambda a, b: right(problem, backend)(a, b) * jnp.asarray(factor, problem.out_dtype)

    monkeypatch.setitem(public.CALLS, "matmul", broken)
    rows, said = run(grad=grad)
    assert not rows[0].error <= 8e-3
    assert any(f"WRONG RESULT of mgpu_ops: error {shown}" in line for line in said)
    assert "is above" in results.failures(rows, SPEC, SMALL, grad=grad)[0]
    [against_xla] = results.summary(rows)
    assert (against_xla.problems, against_xla.wrong) == (0, 1)


# --- Grouped products -----------------------------------------------------------------------------

GROUPED, CONTRACTION = SPECS["grouped_matmul"], SPECS["ragged_contraction"]


@pytest.mark.parametrize(
    ("layout", "spread", "grad"), [("nn", "skewed", True), ("nt", "skewed", True), ("nt", "sparse", False)]
)
def test_a_grouped_matmul_and_its_gradients_are_right_beside_jaxs_own(layout: str, spread: str, grad: bool) -> None:
    problems = {"p": GroupedMatmulProblem(40, 32, 16, 5, layout=layout, spread=spread)}
    rows, said = run(problems, spec=GROUPED, against=["dense", "lax"], grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "lax", "roofline"]
    assert results.failures(rows, GROUPED, problems, grad=grad) == []
    assert not [line for line in said if "WRONG" in line or "failed" in line]
    assert all(r.error is not None and r.error <= 0.02 for r in rows if r.impl == "lax")


def test_a_ragged_contraction_is_right_beside_jaxs_own() -> None:
    problems = {"p": RaggedContractionProblem(40, 32, 16, 5, out_dtype="float32", spread="skewed")}
    rows, said = run(problems, spec=CONTRACTION, against=["dense", "lax"])
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "lax", "roofline"]
    assert results.failures(rows, CONTRACTION, problems, grad=False) == []
    assert not [line for line in said if "WRONG" in line]


def test_a_yardstick_of_another_shape_has_gradients_too() -> None:
    problems = {"p": RaggedContractionProblem(40, 32, 16, 5, out_dtype="float32", spread="even")}
    rows, said = run(problems, spec=CONTRACTION, against=["dense", "lax"], grad=True)
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "roofline"]
    assert results.failures(rows, CONTRACTION, problems, grad=True) == []
    assert any("lax is measured forward only" in line for line in said)


@pytest.mark.parametrize("grad", [False, True])
def test_bias_and_activation_are_in_our_row_and_no_competitor_has_them(grad: bool) -> None:
    problems = {"p": GroupedMatmulProblem(40, 32, 16, 5, "float16", "float16", bias=True, activation="gelu", spread="skewed")}
    rows, said = run(problems, spec=GROUPED, against=["lax", "jax-pallas", "tokamax"], grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "roofline"]
    assert results.failures(rows, GROUPED, problems, grad=grad) == []
    assert sum("adds no bias and applies no activation" in line for line in said) == 3


def test_gradients_are_those_of_floats_only() -> None:
    """Of lhs, rhs and bias, not of the sizes; a wrong gradient of any shows."""
    problem = GroupedMatmulProblem(24, 16, 16, 3, bias=True, spread="even")
    arrays = GROUPED.inputs(problem, jax.random.key(0))
    ours = public.CALLS["grouped_matmul"](problem, "xla")
    answers = runner._with_gradient(ours)(*arrays, ours(*arrays))
    assert [x.shape for x in answers] == [(24, 16), (24, 16), (3, 16, 16), (3, 16)]


def test_a_yardstick_has_a_time_and_no_error(tmp_path: Path) -> None:
    rows, said = run({"p": GroupedMatmulProblem(40, 32, 16, 5, spread="even")}, spec=GROUPED, against=["dense"])
    assert not any("WRONG" in line for line in said)
    assert (rows[1].impl, rows[1].median_us, rows[1].error) == ("dense", 20.0, None)
    results.write_csv(rows, tmp_path / "rows.csv")
    assert ",,NVIDIA H200," in (tmp_path / "rows.csv").read_text()
    assert results.read_csv(tmp_path / "rows.csv") == rows


def test_gradients_of_grouped_products_do_three_times_the_work() -> None:
    problem = GroupedMatmulProblem(40, 32, 16, 5, spread="even")
    both, _ = run({"p": problem}, spec=GROUPED, against=[], grad=True)
    assert both[0].op == "grouped_matmul+grad"
    assert both[0].tflops == pytest.approx(3 * 2 * 40 * 32 * 16 / 10e-6 / 1e12, rel=1e-5)


def test_a_competitors_settings_are_taken_from_an_earlier_result(monkeypatch: pytest.MonkeyPatch) -> None:
    contexts: list[settings.TuningContext] = []

    def prepare(context: settings.TuningContext) -> settings.Prepared:
        contexts.append(context)
        return public.CALLS["matmul"](context.problem, "xla"), "tile=8 steps=2; fastest of 3"

    competitor = implementations.Competitor(lambda problem, gpu: None, prepare, differentiable=True, tuned=True)
    monkeypatch.setitem(implementations.COMPETITORS["matmul"], "tuned", competitor)
    first, of_first = run(against=["tuned"], competitor_seconds=5.0)
    _, of_known = run(against=["tuned"], earlier=first)
    _, of_others = run(against=["tuned"], earlier=first, grad=True)  # of another op's name
    told = [
        next(line for line in said if "compiles tuned" in line).partition("compiles tuned, ")[2]
        for said in (of_first, of_known, of_others)
    ]
    assert told == [
        "its settings for up to 5 s",
        "those that won before for up to 60 s",
        "its settings (no earlier ones of matmul+grad for it) for up to 60 s",
    ]
    assert [(c.seconds, "tile=8 steps=2" in c.known) for c in contexts] == [(5.0, False), (60.0, True), (60.0, False)]


# --- Attention ------------------------------------------------------------------------------------

ATTENTION, BACKWARD = SPECS["flash_attention"], SPECS["flash_attention_backward"]
HEADS = ATTENTION.Problem(1, 16, 16, 4, 2, 8)


@pytest.fixture
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.nn's own attention through XLA stands in for cuDNN's, with the same arguments."""
    monkeypatch.setattr(cudnn, "_IMPLEMENTATION", "xla")


def attention(problem: Any, **changes: Any) -> tuple[list[Measurement], list[str]]:
    spec = BACKWARD if isinstance(problem, BACKWARD.Problem) else ATTENTION
    rows, said = run({"p": problem}, spec=spec, **{"against": ["cudnn"]} | changes)
    assert [r.impl for r in rows] == ["mgpu_ops", "cudnn", "roofline"]
    assert results.failures(rows, spec, {"p": problem}, grad=changes.get("grad", False)) == []
    return rows, said


@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "window_left": 5},
        {"causal": True, "kv_tokens": 24, "align": "top_left"},
        {"lengths": True, "bias": "float16"},
    ],
)
def test_attention_is_right_beside_cudnn_and_its_rate_is_of_what_is_visible(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(HEADS, **changes)
    rows, said = attention(problem)
    assert not [line for line in said if "WRONG" in line or "failed" in line]
    assert rows[0].tflops == pytest.approx(4 * 4 * 8 * reference.pairs(problem) / 10e-6 / 1e12, rel=1e-5)


@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize("bias", ["none", "bfloat16"])
def test_the_gradient_of_attention_does_its_own_work(bias: str) -> None:
    """Five products beside the forward pass's two; the gradient of a bias is one of what is compared."""
    problem = dataclasses.replace(HEADS, causal=True, bias=bias)
    rows, said = attention(problem, grad=True)
    assert rows[0].op == "flash_attention+grad"
    assert rows[0].tflops == pytest.approx(7 / 2 * ATTENTION.flops(problem) / 10e-6 / 1e12, rel=1e-5)
    assert not [line for line in said if "WRONG" in line or "failed" in line]


@pytest.mark.usefixtures("no_cudnn")
def test_the_backward_op_is_right_beside_the_backward_pass_of_cudnn_alone() -> None:
    rows, said = attention(BACKWARD.Problem(**dataclasses.asdict(HEADS)))
    assert rows[1].error is not None
    assert rows[1].error <= 0.03
    assert not [line for line in said if "WRONG" in line or "failed" in line]


@pytest.mark.usefixtures("no_cudnn")
def test_a_competitor_that_masks_otherwise_is_found_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "refuses", lambda problem: None)
    problem = dataclasses.replace(HEADS, causal=True, kv_tokens=24)  # the last rows are aligned by us, the first by it
    rows, said = attention(problem)
    assert [results.wrong(row) for row in rows] == [False, True, False]
    assert any("WRONG RESULT of cudnn" in line for line in said)


def test_our_row_tells_the_configs_of_both_passes() -> None:
    forward, backward = problem_run(ATTENTION, ATTENTION.shapes["mha128-4096"], grad=True).our_config().split(" | ")
    assert forward.startswith("forward compute_warpgroups=")
    assert backward.startswith("backward mode=")
    assert "; source=" in forward
    assert "; source=" in backward


def test_a_gradient_has_no_gradient() -> None:
    with pytest.raises(ValueError, match="flash_attention_backward is a gradient itself: measure it without --grad"):
        run({"p": BACKWARD.shapes["mha64-4096"]}, spec=BACKWARD, against=[], grad=True)
