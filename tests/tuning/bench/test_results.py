"""Results of benchmarks: their files, which are right, and how ours compares with competitors."""

from __future__ import annotations

import csv
import dataclasses
import math
from pathlib import Path
from typing import Any

import pytest
from hypothesis import given
from hypothesis import strategies as st

from examples import llama
from mgpu_ops import SPECS
from mgpu_ops.tuning import labels
from mgpu_ops.tuning.bench import layers, results

ROOT = Path(__file__).parents[3]
MATMUL, GROUPED, ATTENTION = SPECS["matmul"], SPECS["grouped_matmul"], SPECS["flash_attention"]
BACKWARD = SPECS["flash_attention_backward"]


def row(impl: str = "mgpu_ops", us: float = 10.0, **changes: Any) -> results.Measurement:
    fields = {"op": "matmul", "problem": "p", "impl": impl, "config": "c", "median_us": us}
    numbers = {"spread_us": 0.1, "tflops": 1.0, "gbs": 1.0, "error": 0.001}
    stamp = {"gpu": "NVIDIA H200", "driver": "570.86.15", "jax": "0.11.2", "date": "2025-01-31"}
    return results.Measurement(**fields | numbers | stamp | changes)  # type: ignore[arg-type]


# --- Files ----------------------------------------------------------------------------------------


def test_result_files_sort_by_date_and_tell_gpu_and_op() -> None:
    path = results.output_path("results", "2025-01-31", "h200", "matmul")
    assert path == Path("results/2025-01-31-h200-matmul.csv")
    path = results.output_path("results", "2025-01-31", "h200", "matmul", "square", ".png")
    assert path == Path("results/2025-01-31-h200-matmul-square.png")


def test_the_columns_of_the_file_are_fixed(tmp_path: Path) -> None:
    results.write_csv([row()], tmp_path / "new" / "rows.csv")
    with (tmp_path / "new" / "rows.csv").open() as stream:
        header = next(csv.reader(stream))
    assert ",".join(header) == (
        "op,problem,impl,config,median_us,spread_us,tflops,gbs,error,gpu,driver,jax,date,"
        "warm_us,cudnn,cublas,ptxas,devices,bytes,own_us,around_us,chain_us,bus_gbs,watts,clock_mhz,joules,peak_bytes"
    )


def test_a_file_of_before_the_further_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    results.write_csv([row(warm_us=9.0, cudnn="9.19.0", devices=2)], path)
    cut = [",".join(line.split(",")[:13]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(cut))
    assert results.read_csv(path) == [row()]


def test_a_sustained_measurement_is_of_the_op_and_tells_watts_clock_and_energy(tmp_path: Path) -> None:
    ours = row(op="matmul-sustained", problem="64x64x64 bfloat16 nn", watts=695.5, clock_mhz=1402.0, joules=0.5)
    theirs = dataclasses.replace(ours, impl="xla", median_us=11.0, joules=0.6)
    results.write_csv([ours, theirs], tmp_path / "rows.csv")
    assert results.read_csv(tmp_path / "rows.csv") == [ours, theirs]
    (compared,) = results.comparisons([ours, theirs])
    assert (compared.ratio("xla"), compared.energy("xla")) == (pytest.approx(1.1), pytest.approx(1.2))
    (bursts,) = results.comparisons([row(), row("xla")])
    assert bursts.energy("xla") is None
    assert results.wrong(dataclasses.replace(ours, error=0.5))
    assert results.base_op("matmul-sustained") == results.base_op("matmul+grad-sustained") == "matmul"
    problems = {"p": MATMUL.Problem(64, 64, 64)}
    assert results.failures([ours], MATMUL, problems, grad=False) == []


@pytest.mark.parametrize("text", ["inf", "1e999", "-1.0", "nan"])
def test_a_rate_that_is_no_number_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    results.write_csv([row(), row(tflops=123.25)], path)
    path.write_text(path.read_text().replace("123.25", text))
    with pytest.raises(ValueError, match=f"line 3: tflops={text} must be a finite number, 0 or more: run the benchmark again"):
        results.read_csv(path)


@pytest.mark.parametrize("further", ["colour", "warm_us,warm_us"])
def test_a_further_column_that_is_not_known_is_refused(further: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*results.COLUMNS[:13], further]) + "\n")
    with pytest.raises(ValueError, match="run the benchmark again"):
        results.read_csv(path)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.csv")), ids=lambda path: path.stem)
def test_every_committed_result_is_read_and_its_problems_are_of_their_op(path: Path) -> None:
    rows = results.read_csv(path)
    assert rows
    for r in rows:
        op = results.base_op(r.op)
        if op.startswith("llama-"):  # a program of examples/, whose problems are named there
            assert any(r.problem.startswith(f"{model}-") for model in llama.MODELS)
            continue
        labels.problem_of(layers.SPEC if op == layers.SPEC.name else SPECS[op], r.problem)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=20)
_NUMBER = st.floats(0, allow_infinity=False)
_VALUES = {"str": _TEXT, "float": _NUMBER, "float | None": st.none() | _NUMBER, "int | None": st.none() | st.integers()}
_ABOVE_ZERO = st.floats(0, exclude_min=True, allow_infinity=False)
_ROWS = st.lists(
    st.builds(
        results.Measurement,
        **{f.name: _VALUES[str(f.type)] for f in dataclasses.fields(results.Measurement)}
        | dict.fromkeys(("op", "problem", "impl"), _TEXT.filter(bool))
        | {"median_us": _ABOVE_ZERO, "error": st.none() | st.floats()}
        | dict.fromkeys(("warm_us", "chain_us", "watts", "clock_mhz", "joules"), st.none() | _ABOVE_ZERO)
        | dict.fromkeys(("devices", "bytes", "peak_bytes"), st.none() | st.integers(1, 2**40)),
    ),
    max_size=4,
)


@given(_ROWS)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[results.Measurement]) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    results.write_csv(rows, path)
    assert repr(results.read_csv(path)) == repr(rows)  # by repr, as NaN is not NaN


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,problem\n")
    with pytest.raises(ValueError, match=r"rows\.csv: has columns \['op', 'problem'\]"):
        results.read_csv(path)


@pytest.mark.parametrize("damage", [("10.0", "fast"), ("10.0", ""), (",2025-01-31", "")])
def test_a_damaged_line_is_named(tmp_path: Path, damage: tuple[str, str]) -> None:
    path = tmp_path / "rows.csv"
    results.write_csv([row()], path)
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(ValueError, match=r"rows\.csv, line 2: "):
        results.read_csv(path)


# --- Comparisons ----------------------------------------------------------------------------------


def test_merging_keeps_the_rows_of_one_run_together() -> None:
    first = [row(), row("xla", 9.0), row("mgpu_ops", 5.0, problem="q")]
    second = [row(us=20.0), row("jax-pallas", 30.0), row("mgpu_ops", 1.0, gpu="NVIDIA H100")]
    merged = results.merge(first, second)
    assert merged == [second[0], second[1], first[2], second[2]]


def test_the_summary_is_the_geometric_mean_of_their_time_over_ours() -> None:
    rows = [
        *(row(problem="p"), row("xla", 20.0, problem="p"), row("roofline", 5.0, problem="p")),
        *(row(problem="q"), row("xla", 5.0, problem="q"), row("jax-pallas", 11.0, problem="q")),
        *(row(problem="r"), row("xla", 10.0, problem="r")),
        row("xla", 1.0, problem="ours failed"),
    ]
    xla, pallas, best = results.summary(rows)
    assert (xla.competitor, xla.problems, xla.wins, xla.wrong) == ("xla", 3, 2, 0)
    assert xla.geomean == pytest.approx(1.0)
    assert (xla.worst, xla.worst_problem) == (0.5, "q")
    assert (pallas.competitor, pallas.problems, pallas.geomean) == ("jax-pallas", 1, pytest.approx(1.1))
    assert (best.competitor, best.problems, best.geomean) == ("best competitor", 3, pytest.approx(xla.geomean))


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1))
def test_the_mean_lies_between_the_worst_and_the_best(times: list[tuple[float, float]]) -> None:
    rows = [row(impl, us, problem=str(i)) for i, pair in enumerate(times) for impl, us in zip(("mgpu_ops", "xla"), pair)]
    [found] = results.summary(rows)
    ratios = [theirs / ours for ours, theirs in times]
    assert found.worst == min(ratios)
    assert min(ratios) * (1 - 1e-9) <= found.geomean <= max(ratios) * (1 + 1e-9)
    assert found.wins == sum(r >= 1 for r in ratios)


def test_the_best_competitor_is_the_fastest_that_is_right_and_no_yardstick() -> None:
    rows = [row(), row("xla", 9.0, error=1.0), row("lax", 12.0), row("tokamax", 11.0), row("dense", 5.0, error=None)]
    [line] = results.comparisons(rows)
    assert line.best == rows[3]
    assert [line.ratio(competitor) for competitor in ("xla", "dense", results.BEST)] == [None, 0.5, 1.1]
    assert results.compared([line]) == ["xla", "lax", "tokamax", results.BEST, "dense"]
    assert results.yardsticks([line]) == {"dense"}
    assert [(s.competitor, s.problems, s.wrong) for s in results.summary(rows)][-2:] == [(results.BEST, 1, 0), ("dense", 1, 0)]


def test_warm_ratios_are_of_warm_times_and_the_best_competitor_may_be_another() -> None:
    rows = [row(warm_us=8.0), row("xla", 12.0, warm_us=8.8), row("lax", 11.0, warm_us=9.6), row("old", 12.0)]
    [line] = results.comparisons(rows)
    assert [line.ratio(competitor, warm=True) for competitor in ("xla", "lax", "old", results.BEST)] == pytest.approx(
        [1.1, 1.2, None, 1.1]
    )
    assert line.ratio(results.BEST) == pytest.approx(1.1)
    found = {s.competitor: s for s in results.summary(rows)}
    assert found["xla"].warm_geomean == pytest.approx(1.1)
    assert math.isnan(found["old"].warm_geomean)


def test_the_parts_of_matmul_are_from_2048_rows_on_and_those_of_attention_its_head_dims() -> None:
    problems = [("matmul", f"{m}x4096x4096 bfloat16 nn") for m in (128, 2048, 4096)]
    problems += [("flash_attention+grad", f"4096x4096x8x8x{d} bfloat16 causal") for d in (64, 128)]
    rows = [
        row(impl, us, op=op, problem=text)
        for i, (op, text) in enumerate(problems)
        for impl, us in (("mgpu_ops", 10.0), ("xla", 9.0 + i))
    ]
    found = [(s.op, s.part, s.problems, s.losses) for s in results.split(rows)]
    assert found == [
        ("matmul", "m < 2048", 1, 1),
        ("matmul", "m >= 2048", 2, 0),
        ("flash_attention+grad", "head dim 64", 1, 0),
        ("flash_attention+grad", "head dim 128", 1, 0),
    ]
    assert results.split(rows[:2]) == results.split([row(), row("xla")]) == []


def test_one_competitor_and_a_yardstick_have_no_best() -> None:
    assert results.compared(results.comparisons([row(), row("lax"), row("dense", error=None)])) == ["lax", "dense"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spec", [MATMUL, GROUPED, ATTENTION, BACKWARD, SPECS["all_gather"]], ids=lambda spec: spec.name)
def test_what_is_marked_as_wrong_is_what_failures_tells(spec: Any, grad: bool) -> None:
    """Each op by its own tolerance: 0.1 is right only for attention's gradients, 0.2 only for these with the forward pass."""
    name, problem = next(iter(spec.shapes.items()))
    text = labels.label(spec, name, problem)
    for error in (1e-4, 5e-3, 0.02, 0.1, 0.2, math.nan):
        ours = row(op=spec.name + results.GRAD * grad, problem=text, error=error, date="2026-11-22")
        assert results.wrong(ours) == bool(results.failures([ours], spec, {name: problem}, grad=grad))


def test_a_result_of_an_unknown_problem_is_held_to_the_loosest_tolerance_there_is() -> None:
    assert [results.wrong(row(problem="unheard-of", error=error)) for error in (8e-3, 0.02)] == [False, True]
    assert [results.wrong(row(op="sort", error=error)) for error in (0.26, 0.27)] == [False, True]
    assert not results.wrong(row(error=None))


@pytest.mark.parametrize(("name", "times"), [("d2560-e64-16384", 4), ("qwen3-30b-16384", 4), ("mixtral-8x7b-8192", 2)])
def test_gradients_of_a_layer_of_experts_may_be_off_the_more_the_fewer_experts_are_chosen(name: str, times: int) -> None:
    """Most logits have none, so that the error of the others is held against less."""
    problem = layers.SHAPES[name]
    assert results.tolerance(layers.SPEC, problem, grad=True) == times * results.tolerance(layers.SPEC, problem, grad=False)


def test_each_way_of_ours_has_a_line_beside_the_same_peers() -> None:
    rows = [row("mgpu_ops", 10.0), row("mgpu_ops, workspace", 5.0), row("xla", 20.0)]
    assert [(line.problem, line.ratio("xla")) for line in results.comparisons(rows)] == [("p", 2.0), ("p (workspace)", 4.0)]
    [found] = results.summary(rows)
    assert (found.problems, found.competitor, found.worst_problem) == (2, "xla", "p")


def test_a_wrong_competitor_is_no_win() -> None:
    [found] = results.summary([row(), row("xla", 100.0, error=math.nan)])
    assert (found.problems, found.wins, found.wrong) == (0, 0, 1)
    assert math.isnan(found.geomean)


def test_a_gradient_through_an_activation_may_be_wrong_by_one_rounding_more():
    plain, activated = MATMUL.Problem(512, 512, 512), MATMUL.Problem(512, 512, 512, activation="gelu")
    assert [results.tolerance(MATMUL, plain, grad) for grad in (False, True)] == [8e-3, 8e-3]
    assert [results.tolerance(MATMUL, activated, grad) for grad in (False, True)] == [8e-3, 16e-3]


def test_no_committed_result_of_ours_is_marked_as_wrong():
    files = sorted(Path("results").glob("*.csv"))
    ours = [(file.name, row) for file in files for row in results.read_csv(file) if row.variant is not None]
    assert len(ours) > 100
    assert [(name, row.problem) for name, row in ours if results.wrong(row)] == []
