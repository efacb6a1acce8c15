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


def drawn() -> list[dict[str, Any]]:
    with gzip.open(RESULTS / "2026-11-30-h200-grouped-drawn.jsonl.gz", "rt") as lines:
        return [of for of in map(json.loads, lines) if "problem" in of]


@pytest.mark.parametrize(
    ("op", "gain", "least"),
    [("grouped_matmul", 1.07, 0.94), ("ragged_contraction", 1.0, 0.84), ("gated_grouped_matmul", 1.01, 0.92)],
)
def test_what_the_model_prefers_of_two_defaults_is_faster_in_the_mean(op: str, gain: float, least: float) -> None:
    """Of drawn problems whose default another model of time changed (docs/kernels/grouped_matmul.md)."""
    spec, gains = mgpu_ops.spec_of(op), []
    for of in (of for of in drawn() if of["op"] == op):
        problem = spec.Problem(**of["problem"])
        cost = {name: spec.cost(problem, spec.Config(**fields), H200) for name, fields in of["configs"].items()}
        gains.append(of["us"]["old"] / of["us"][min(cost, key=cost.__getitem__)])
    assert len(gains) >= 20
    assert math.prod(gains) ** (1 / len(gains)) > gain
    assert min(gains) > least


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
