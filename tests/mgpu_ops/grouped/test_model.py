"""The model of time of grouped products, beside what was measured and what sizes are drawn."""

from __future__ import annotations

import dataclasses
import gzip
import json
import math
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.core.gpu import find
from mgpu_ops.grouped import model
from mgpu_ops.grouped.sizes import draw_sizes

H200 = find("h200")
RESULTS = Path(__file__).parents[3] / "results"
SPEC = mgpu_ops.spec_of("grouped_matmul")


def recorded(name: str) -> list[dict[str, Any]]:
    path = RESULTS / name
    with gzip.open(path, "rt") if path.suffix == ".gz" else path.open() as lines:
        return [of for of in map(json.loads, lines) if "problem" in of]


def modelled(of: dict[str, Any]) -> dict[str, float]:
    """The modelled seconds of a recorded problem's configs."""
    spec = mgpu_ops.spec_of(of["op"])
    problem = spec.Problem(**of["problem"])
    return {name: spec.cost(problem, spec.Config(**fields), H200) for name, fields in of["configs"].items()}


@pytest.mark.parametrize(
    ("op", "gain", "least"),
    [("grouped_matmul", 1.07, 0.94), ("ragged_contraction", 1.0, 0.84), ("gated_grouped_matmul", 1.01, 0.92)],
)
def test_what_the_model_prefers_of_two_defaults_is_faster_in_the_mean(op: str, gain: float, least: float) -> None:
    """Of drawn problems whose default another model of time changed (docs/kernels/grouped_matmul.md)."""
    gains = []
    for of in (of for of in recorded("2026-11-30-h200-grouped-drawn.jsonl.gz") if of["op"] == op):
        cost = modelled(of)
        gains.append(of["us"]["old"] / of["us"][min(cost, key=cost.__getitem__)])
    assert len(gains) >= 20
    assert math.prod(gains) ** (1 / len(gains)) > gain
    assert min(gains) > least


def test_what_the_model_prefers_for_few_rows_a_group_is_nearly_the_fastest_of_what_was_measured() -> None:
    """Of problems that the model was fitted to, and of others drawn by another seed."""
    for name, mean, worst in (("configs.jsonl.gz", 1.025, 1.13), ("drawn.jsonl", 1.006, 1.04)):
        times = []
        for of in recorded(f"2026-11-30-h200-grouped-few-rows-{name}"):
            cost = modelled(of)
            times.append(of["us"][min(cost, key=cost.__getitem__)] / min(of["us"].values()))
        assert len(times) >= 30
        assert math.prod(times) ** (1 / len(times)) < mean
        assert max(times) < worst


@pytest.mark.parametrize("spread", ["even", "random", "sparse"])
@pytest.mark.parametrize(("rows", "groups"), [(8, 128), (128, 128), (32, 128), (16, 8), (512, 64)])
def test_groups_that_have_rows_are_as_many_as_when_sizes_are_drawn(rows: int, groups: int, spread: str) -> None:
    drawn = [np.count_nonzero(draw_sizes(spread, rows, groups, jax.random.key(seed))) for seed in range(12)]
    problem = mgpu_ops.GroupedMatmulProblem(rows, 256, 256, groups, spread=spread)
    assert model._expected(problem) == pytest.approx(np.mean(drawn), rel=0.08)


@pytest.mark.parametrize(("rows", "groups"), [(4787, 128), (74, 128), (185, 7), (65536, 16), (5, 3), (1, 64)])
@pytest.mark.parametrize("size", [64, 128, 256])
def test_blocks_of_skewed_groups_are_those_of_the_sizes_that_are_drawn(rows: int, groups: int, size: int) -> None:
    sizes = np.asarray(draw_sizes("skewed", rows, groups, jax.random.key(0)))
    blocks = sum(math.ceil(of / size) for of in sizes.tolist())
    assert abs(model.row_blocks("skewed", rows, groups, size) - blocks) <= 0.05 * groups + 1


def test_loads_count_as_longer_where_rows_begin_within_a_line_and_longest_within_a_sector() -> None:
    small = dataclasses.replace(
        SPEC.default(mgpu_ops.GroupedMatmulProblem(512, 64, 4096, 8), H200), tile_m=64, tile_n=64, max_concurrent_steps=12
    )

    def seconds(k: int) -> float:
        """With k in the rows of both operands, and as many steps of 64."""
        return SPEC.cost(mgpu_ops.GroupedMatmulProblem(65536, 1024, k, 8, layout="nt"), small, H200)

    lines, across_lines, across_sectors = seconds(4096), seconds(4080), seconds(4088)
    assert lines < across_lines < 1.1 * lines < across_sectors
