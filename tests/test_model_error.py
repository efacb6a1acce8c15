"""`scripts/model_error.py`: how far the models of time are from what was measured."""

from __future__ import annotations

import collections
import math
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import SPECS, MatmulProblem
from mgpu_ops.matmul import xla
from scripts import model_error
from scripts.model_error import H200, Measured


def test_the_error_is_the_logarithm_of_modelled_over_measured_and_the_choice_is_over_the_fastest(tmp_path: Path) -> None:
    spec = SPECS["matmul"]
    problem = spec.shapes["square-2048"]
    by_cost = sorted(spec.candidates(problem, H200), key=lambda c: spec.cost(problem, c, H200))[:3]
    # The config that the model takes for the fastest is measured at twice its time, the others at 1.1 times theirs.
    times = [(c, 1e6 * spec.cost(problem, c, H200) * (2.0 if c == by_cost[0] else 1.1)) for c in by_cost]
    (found,) = [
        one for one in model_error.modelled([Measured("matmul", "made up", problem, times, None)]) if one.op == "matmul"
    ]
    fastest = min(us for _, us in times)
    assert (found.problems, found.chosen) == (1, (times[0][1] / fastest,))
    assert f"3 times; error median {math.log(1.1):.3f}" in str(found)
    assert f"the model's choice over the fastest: mean {times[0][1] / fastest:.3f}" in str(found)
    assert [path.suffix for path in model_error.picture([found], tmp_path / "p") if path.exists()] == [".png", ".svg"]


def test_every_recorded_sweep_and_what_was_drawn_is_counted() -> None:
    sources = {(one.op, one.source) for one in model_error.measured()}
    not_swept = {"rms_norm", "rotary", "embedding"}  # they have 16 configs at most
    swept = {op for op in SPECS if SPECS[op].devices(_any(op)) == 1} - not_swept
    assert {op for op, source in sources if source == "sweeps"} == swept
    assert {source for op, source in sources if op == "matmul"} == {
        *("sweeps", "drawn, warm", "drawn again, cold"),
        *("ping-pong, cold", "deferred, cold", "suite anywhere, cold", "few rows, cold", "float32, cold"),
        *("calls on an H100", "drawn with alternatives, cold", "128 to 2048 rows, cold", "drawn with a residual, warm"),
        "65 to 3000 rows, cold",
        *("few tiles, cold", "8 bits, cold", "decoding, cold", "routers, cold", "17 to 64 rows, cold", "65 to 192 rows, cold"),
        *("17 to 192 rows beside XLA, cold", "small, cold", "small, drawn, cold"),
    }
    assert {(op, "short tiles, warm") for op in ("grouped_matmul", "gated_grouped_matmul")} <= sources


def test_each_source_of_an_op_has_a_look_of_its_own_in_the_picture() -> None:
    sources = collections.Counter(op for op, _ in model_error.by_source(model_error.measured()))
    looks = set(zip(model_error._COLOURS, model_error._MARKERS, strict=True))
    assert len(looks) == len(model_error._COLOURS) >= max(sources.values())


def test_no_drawn_product_with_a_residual_runs_what_was_slower_by_3_percent() -> None:
    found = model_error.by_source(model_error.measured())["matmul", "drawn with a residual, warm"]
    assert len(found) == 40
    assert model_error.calls("matmul", "drawn with a residual, warm", model_error.gains(found)).endswith("below 0.97 in 0")


def ahead(holds: Callable[[Any], bool], low: float, high: float) -> list[float]:
    """XLA's time over that of the kernel, cold, by the choice of the models, where they have it so much of XLA's."""
    found = []
    for one in model_error.measured():
        if (
            one.op != "matmul"
            or one.gpu is not H200
            or "warm" in one.source
            or one.baseline_us is None
            or not holds(one.problem)
        ):
            continue
        times = dict(one.times)
        default = one.spec.default(one.problem, H200)
        config = default if default in times else min(times, key=lambda c: one.spec.cost(one.problem, c, H200))
        if low < one.spec.cost(one.problem, config, H200) / xla.cost(one.problem, H200) <= high:
            found.append(one.baseline_us / times[config])
    return found


def test_no_measured_product_of_few_tiles_that_the_smaller_margin_gives_to_the_kernel_was_slower() -> None:
    ratios = ahead(lambda p: p.dtype in xla.DTYPES and xla._has_few_tiles(p), 0.86, 0.94)
    assert len(ratios) >= 30
    assert min(ratios) >= 1.0


def test_no_measured_product_with_a_smaller_margin_was_slower_by_3_percent() -> None:
    ratios = ahead(lambda p: p.dtype in xla.DTYPES and xla.margin(p) >= 0.94, 0.0, 0.94)
    assert len(ratios) >= 100
    assert min(ratios) >= 0.97


def by_winner(source: str, op: str = "matmul") -> tuple[list[tuple[Any, float]], list[tuple[Any, float]]]:
    """Problems of a source that the models give to the kernel, and the others: with XLA's measured time over the kernel's."""
    found = model_error.by_source(model_error.measured())[op, source]
    pairs: tuple[list[tuple[Any, float]], list[tuple[Any, float]]] = [], []
    for one, (kernel, _) in zip(found, model_error.gains(found), strict=True):
        assert one.baseline_us is not None
        _, us = min(one.times, key=lambda pair, one=one: one.spec.cost(one.problem, pair[0], one.gpu))
        pairs[not kernel].append((one.problem, one.baseline_us / us))
    return pairs


def test_no_product_of_decoding_that_the_models_give_to_the_kernel_was_slower_by_3_percent() -> None:
    kernel, others = by_winner("decoding, cold")
    ratios = [ratio for _, ratio in kernel]
    assert (len(kernel), len(kernel) + len(others)) == (68, 96)
    assert min(ratios) >= 0.97
    assert math.prod(ratios) ** (1 / len(ratios)) >= 1.13


def test_no_drawn_product_of_17_to_192_rows_that_the_kernel_gets_was_slower_than_xla_s() -> None:
    kernel, others = by_winner("17 to 192 rows beside XLA, cold")
    ratios = [ratio for _, ratio in kernel]
    assert (len(kernel), len(kernel) + len(others)) == (30, 44)
    assert min(ratios) >= 1.1
    assert max(ratio for _, ratio in others) <= 1.03
    assert math.prod(ratios) ** (1 / len(ratios)) >= 2.0


@pytest.mark.parametrize(("source", "count", "few"), [("small, cold", 224, 135), ("small, drawn, cold", 90, 45)])
def test_no_small_product_that_the_kernel_gets_was_slower_than_xla_s_by_3_percent(source, count, few) -> None:
    """Of those drawn afterwards three were, before the margin of a short k and many rows was made for them too."""
    kernel, others = by_winner(source)
    ratios = [ratio for _, ratio in kernel]
    assert len(kernel) + len(others) == count
    assert len(kernel) >= few
    assert min(ratios) >= 0.97
    assert math.prod(ratios) ** (1 / len(ratios)) >= 1.6


def test_gated_products_by_weights_in_one_matrix_or_of_normalised_rows_get_the_kernel_where_it_was_faster() -> None:
    kernel, others = by_winner("few rows, joined", "gated_matmul")
    assert min(ratio for _, ratio in kernel) >= 1.019
    assert max(ratio for _, ratio in others) <= 1.02


def test_gated_products_of_few_rows_that_get_the_kernel_were_3_percent_faster_than_xla_s_or_more() -> None:
    kernel, others = by_winner("few rows", "gated_matmul")
    assert (len(kernel), len(kernel) + len(others)) == (10, 18)
    assert min(ratio for _, ratio in kernel) >= 1.03
    assert sum(ratio >= 1.05 for _, ratio in others) <= 1  # 64 x 8192 x 2048


def test_the_default_of_few_rows_and_integer_weights_is_near_the_fastest_of_drawn_problems_that_nothing_was_fitted_to() -> None:
    found = model_error.by_source(model_error.measured())["quantized_matmul", "few rows, drawn"]
    over = []
    for one in found:
        times = dict(one.times)
        default = one.spec.default(one.problem, H200)
        if default in times:
            over.append(times[default] / min(times.values()))
    assert len(over) >= 36
    assert sum(over) / len(over) <= 1.02
    assert max(over) <= 1.13


def test_no_product_with_a_router_that_the_kernel_gets_was_slower_than_xla_s_by_1_percent() -> None:
    """One row always; more rows by the largest ones, and where XLA's k is long or padded."""
    kernel, others = by_winner("routers, cold")
    assert (len(kernel), len(kernel) + len(others)) == (23, 40)
    assert min(ratio for _, ratio in kernel) >= 0.99  # timed before blocks began 0.4 us sooner
    assert max(ratio for _, ratio in others) < 1.9
    assert sum(problem.m == 1 for problem, _ in kernel) == 11


def test_passes_of_attention_and_weights_of_8_and_4_bits_are_counted_beside_the_sweeps() -> None:
    sets = model_error.by_source(model_error.measured())
    backward = sets["flash_attention_backward", "suite anywhere"]
    assert all(one.baseline_us and len(one.times) == 1 for one in backward)
    assert len(backward) == 27  # of head dim 112, 128 columns were computed then
    (named,) = [one for one in sets["flash_attention_backward", "head dim 128"] if one.problem.q_heads == 64]
    assert named.problem == SPECS["flash_attention_backward"].shapes["llama3-70b-8192-causal"]
    bits = {one.problem.w_dtype for one in sets["quantized_matmul", "layers of Llama 3"]}
    assert bits == {"int4", "int8"}


def test_where_the_baseline_computes_something_else_a_call_runs_the_kernel() -> None:
    spec = SPECS["flash_attention"]
    plain = spec.Problem(1, 4096, 4096, 8, 8, 128)
    found = []
    for problem in (plain, spec.Problem(1, 4096, 4096, 8, 8, 128, bias="bfloat16")):
        slow = (spec.default(problem, H200), 1e6 * spec.cost(problem, spec.default(problem, H200), H200))
        found.append(Measured("flash_attention", "made up", problem, [slow], 1.0))
    assert "runs the kernel in 2 of 2 problems" in model_error.calls("flash_attention", "made up", model_error.gains(found))


def test_a_call_without_an_entry_gains_what_the_kernel_gains_where_it_is_expected_to() -> None:
    spec = SPECS["matmul"]
    padded, plain = MatmulProblem(16, 4096, 4104), spec.shapes["square-4096"]  # XLA pads this k
    times = [(spec.default(padded, H200), 10.0)]
    found = [Measured("matmul", "made up", padded, times, 40.0)]
    found.append(Measured("matmul", "made up", plain, [(spec.default(plain, H200), 200.0)], 100.0))
    assert "runs the kernel in 1 of 2 problems" in (told := model_error.calls("matmul", "made up", model_error.gains(found)))
    assert told.endswith("mean 2.000, worst 1.000, below 0.97 in 0")


@pytest.mark.parametrize(
    ("op", "source", "least", "mean"),
    [
        ("matmul", "drawn again, cold", 0.97, 1.09),
        ("matmul", "deferred, cold", 0.97, 1.00),
        ("matmul", "few rows, cold", 0.99, 1.03),
        ("matmul", "65 to 3000 rows, cold", 0.97, 1.2),
        ("matmul", "few tiles, cold", 0.95, 1.42),  # one chosen config, of no call, is at 0.953x
        ("flash_attention", "drawn", 0.92, 1.3),
        ("flash_attention_backward", "drawn", 0.99, 1.17),
        ("flash_attention_backward", "head dim 128", 1.07, 1.11),
        ("flash_attention_backward", "long", 0.99, 1.10),
        ("flash_attention_backward", "close to cuDNN", 0.87, 1.11),  # one of them is 13 % behind
        ("flash_attention_backward", "suite anywhere", 0.98, 1.13),  # no constant is fitted to these
    ],
)
def test_a_call_without_an_entry_does_not_lose_to_the_baseline(op: str, source: str, least: float, mean: float) -> None:
    ratios = [ratio for _, ratio in model_error.gains(model_error.by_source(model_error.measured())[op, source])]
    assert min(ratios) >= least
    assert math.prod(ratios) ** (1 / len(ratios)) >= mean


def _any(op: str) -> object:
    return next(iter(SPECS[op].shapes.values()))
