"""Problems as text, and back."""

from __future__ import annotations

import dataclasses
from typing import Any

import pytest

from mgpu_ops import SPECS, CollectiveProblem, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem
from mgpu_ops.tuning import labels

SPEC, GROUPED, CONTRACTION = SPECS["matmul"], SPECS["grouped_matmul"], SPECS["ragged_contraction"]
ATTENTION, BACKWARD = SPECS["flash_attention"], SPECS["flash_attention_backward"]
HEADS = ATTENTION.Problem(1, 16, 16, 4, 2, 8)


def test_attention_is_named_by_its_sizes_and_masks() -> None:
    assert labels.describe(HEADS) == "16x16x4x2x8 bfloat16"
    rich = dataclasses.replace(HEADS, batch=3, causal=True, window_left=0, bias="float32", align="top_left", soft_cap=True)
    assert labels.describe(rich) == "16x16x4x2x8 bfloat16 window_left=0 align=top_left bias=float32 causal soft_cap batch=3"
    shape = "mistral-7b-16384-window"
    text = f"{shape} 16384x16384x32x8x128 bfloat16 window_left=4095 causal"
    assert labels.label(ATTENTION, "x", ATTENTION.shapes[shape]) == text


def test_a_problem_is_named_as_it_was_asked_for() -> None:
    same = SPEC.shapes["square-4096"]
    assert SPEC.shapes["llama3-8b-out-4096"] == same
    texts = [labels.label(SPEC, name, same) for name in ("square-4096", "llama3-8b-out-4096", "mine")]
    assert [text.split()[0] for text in texts] == [
        "square-4096",
        "llama3-8b-out-4096",
        "square-4096",
    ]
    assert {text.split(maxsplit=1)[1] for text in texts} == {"4096x4096x4096 bfloat16 nn"}


def test_a_problem_as_text_tells_dtypes_layout_and_batch() -> None:
    problem = MatmulProblem(8, 16, 24, "float16", "float32", "tn", 4)
    assert labels.describe(problem) == "8x16x24 float16->float32 tn batch=4"


def test_a_grouped_problem_as_text_tells_groups_spread_and_epilogue() -> None:
    assert labels.describe(GroupedMatmulProblem(16384, 28672, 4096, 8)) == "16384x28672x4096 g=8 bfloat16 nn random"
    rich = GroupedMatmulProblem(8, 16, 24, 2, out_dtype="float32", layout="nt", bias=True, activation="silu", spread="even")
    assert labels.describe(rich) == "8x16x24 g=2 bfloat16->float32 nt silu even bias"
    assert labels.describe(RaggedContractionProblem(8, 16, 24, 2, spread="sparse")) == "8x16x24 g=2 bfloat16 sparse"
    name = "mixtral-8x7b-down-8192-random"
    assert labels.label(GROUPED, name, GROUPED.shapes[name]) == f"{name} 16384x4096x14336 g=8 bfloat16 nn random"


@pytest.mark.parametrize("name", SPECS)
def test_a_problems_text_is_read_back(name: str) -> None:
    spec = SPECS[name]
    for shape, problem in spec.shapes.items():
        assert labels.problem_of(spec, labels.label(spec, shape, problem)) == problem
        assert labels.problem_of(spec, labels.describe(problem)) == problem
    with pytest.raises(ValueError, match=f"is no problem of {name}"):
        labels.problem_of(spec, "unheard-of")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (SPEC, MatmulProblem(8, 16, 24, "float16", "float32", "tn", 4)),
        (GROUPED, GroupedMatmulProblem(8, 16, 24, 2, "float16", "float32", "nt", True, "silu", "even")),
        (CONTRACTION, RaggedContractionProblem(8, 16, 24, 2, spread="sparse")),
        (ATTENTION, dataclasses.replace(HEADS, batch=3, causal=True, window_left=0, bias="float32", align="top_left")),
        (BACKWARD, BACKWARD.Problem(**dataclasses.asdict(HEADS), deterministic=True)),
        (SPECS["all_reduce"], CollectiveProblem(96, 3, "int32", "max", "multimem")),
    ],
)
def test_a_problem_of_no_name_is_read_back(spec: Any, problem: Any) -> None:
    assert labels.problem_of(spec, labels.label(spec, "mine", problem)) == problem
    assert labels.problem_of(spec, f"a-name-of-old {labels.describe(problem)}") == problem
