"""Suites whose problems are no named shapes of their op: what they are, and that nothing shipped was tuned for `anywhere`."""

from __future__ import annotations

import argparse
import dataclasses
from pathlib import Path
from typing import Any

import pytest

import mgpu_ops
from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning import labels, problems, suites
from mgpu_ops.tuning.cli import selection
from mgpu_ops.tuning.cli.arguments import positive_ints, problem_arguments
from scripts import draw_anywhere

MATMUL, H200 = spec_of("matmul"), gpu.find("h200")


def asked(*words: str, op: str = "matmul") -> dict[str, Any]:
    """The problems that the command line names."""
    parser = argparse.ArgumentParser()
    problem_arguments(parser, many=True)
    return selection.problems_of(spec_of(op), parser.parse_args([op, *words]))


def test_anywhere_is_what_its_script_draws() -> None:
    assert suites.ANYWHERE.read_text() == draw_anywhere.text(), "run `python scripts/draw_anywhere.py`"


def test_anywhere_is_96_problems_within_the_stated_rule() -> None:
    found = list(suites.problems(MATMUL, "anywhere").values())
    assert len(found) == 96
    assert {p.layout for p in found if p.batch > 1} == {p.layout for p in found} == {"nn", "nt", "tn", "tt"}
    for p in found:
        assert MATMUL.supports(p, H200) is None
        assert MATMUL.bytes(p) <= 4 * 2**30
        assert MATMUL.flops(p) / H200.bf16_flops < 0.03
    drawn, heads = found[:84], found[84:]
    assert all(1 <= p.m <= 16384 and min(p.n, p.k) >= 128 and max(p.n, p.k) <= 32768 for p in drawn)
    assert all(p.n % 8 == p.k % 8 == 0 and 1 <= p.batch <= 16 for p in drawn)
    assert {p.n for p in heads} == {32000, 128256, 129280, 152064, 256000}


def test_anywhere_with_epilogues_is_what_its_script_draws_within_the_stated_rule() -> None:
    assert suites.ANYWHERE_EPILOGUES.read_text() == draw_anywhere.epilogues_text(), "run `python scripts/draw_anywhere.py`"
    found = list(suites.problems(MATMUL, "anywhere-epilogues").values())
    assert len(found) == 48
    assert {(p.layout, p.bias, p.activation, p.residual) for p in found} == {
        (layout, kind.get("bias", False), kind.get("activation", "none"), kind.get("residual", False))
        for layout in ("nn", "nt")
        for kind in draw_anywhere.EPILOGUES
    }
    assert_short_products(found, least_rows=16, unit=8)


def assert_short_products(found: list[Any], least_rows: int, unit: int) -> None:
    for p in found:
        assert MATMUL.supports(p, H200) is None
        assert MATMUL.flops(p) <= 2e12
        assert least_rows <= p.m <= 16384
        assert min(p.n, p.k) >= 256
        assert max(p.n, p.k) <= 16384
        assert p.n % unit == p.k % unit == 0


def test_anywhere_of_8_bits_is_what_its_script_draws_within_the_stated_rule() -> None:
    assert suites.ANYWHERE_8_BITS.read_text() == draw_anywhere.eight_bits_text(), "run `python scripts/draw_anywhere.py`"
    found = list(suites.problems(MATMUL, "anywhere-8-bits").values())
    assert len(found) == 48
    assert [dataclasses.replace(p, m=1, n=1, k=1) for p in found] == [
        MatmulProblem(1, 1, 1, layout="nt", **kind) for kind in draw_anywhere.EIGHT_BITS
    ] * 8
    assert_short_products(found, least_rows=8, unit=16)


GROUPED = {op: suites.problems(spec_of(op), "anywhere") for op in ("grouped_matmul", "ragged_contraction")}


def test_anywhere_of_grouped_ops_is_what_its_script_draws_within_the_stated_rule() -> None:
    assert suites.ANYWHERE_GROUPED.read_text() == draw_anywhere.grouped_text(), "run `python scripts/draw_anywhere.py`"
    assert [len(found) for found in GROUPED.values()] == [32, 16]
    for op, found in GROUPED.items():
        spec = spec_of(op)
        for p in found.values():
            assert spec.supports(p, H200) is None
            assert spec.bytes(p) <= 4 * 2**30
            assert spec.flops(p) / H200.bf16_flops < 0.03
            assert 4 <= p.groups <= 256
            assert 2 * p.groups <= p.m <= 262144
            assert p.n % 8 == p.k % 8 == 0
        assert {p.spread for p in found.values()} == {"even", "random", "skewed", "sparse"}
        assert set(found.values()).isdisjoint(spec.shapes.values())
        for path in Path(mgpu_ops.__path__[0], "configs").glob(f"*/{op}.json"):
            shipped = {database.to_problem(spec, entry.problem) for entry in database.read(path).entries}
            assert shipped.isdisjoint(found.values())


LAYERS = {op: suites.problems(spec_of(op), "anywhere") for op in draw_anywhere.LAYER_KINDS}


def test_anywhere_of_a_models_other_ops_is_what_its_script_draws_of_models_that_nothing_is_tuned_for() -> None:
    assert suites.ANYWHERE_LAYERS.read_text() == draw_anywhere.layers_text(), "run `python scripts/draw_anywhere.py`"
    assert {op: len(found) for op, found in LAYERS.items()} == {op: n for op, (n, _) in draw_anywhere.LAYER_KINDS.items()}
    for op, found in LAYERS.items():
        spec = spec_of(op)
        assert all(spec.supports(p, H200) is None for p in found.values())
        assert set(found.values()).isdisjoint(spec.shapes.values())
        for path in Path(mgpu_ops.__path__[0], "configs").glob(f"*/{op}.json"):
            shipped = {database.to_problem(spec, entry.problem) for entry in database.read(path).entries}
            assert shipped.isdisjoint(found.values())


ATTENTION = spec_of("flash_attention")


def test_anywhere_of_attention_is_what_its_script_draws_within_the_stated_rule() -> None:
    assert suites.ANYWHERE_ATTENTION.read_text() == draw_anywhere.attention_text(), "run `python scripts/draw_anywhere.py`"
    found = list(suites.problems(ATTENTION, "anywhere").values())
    assert len(found) == 64
    assert {(p.head_dim, p.v_dim) for p in found} == {*((d, d) for d in (64, 80, 96, 112, 128, 160, 192, 256)), (192, 128)}
    for p in found:
        assert ATTENTION.supports(p, H200) is None
        assert ATTENTION.bytes(p) <= 2 * 2**30
        assert ATTENTION.flops(p) / H200.bf16_flops < 0.01
        assert 128 <= p.q_tokens == p.kv_tokens <= 65536
        assert p.q_heads <= 64
        assert p.q_heads // p.kv_heads <= 16
    kinds = {(p.causal, p.left is not None, p.segments, p.lengths, p.bias) for p in found}
    assert len(kinds) == 6
    assert {p.q_tokens % 2 for p in found} == {0, 1}
    assert max(p.q_tokens for p in found) > 60000
    assert asked("--suite", "anywhere", op="flash_attention") == suites.problems(ATTENTION, "anywhere")


@pytest.mark.parametrize("op", ["matmul", "flash_attention"])
def test_no_shipped_entry_is_for_a_problem_of_anywhere(op: str) -> None:
    spec = spec_of(op)
    held_out = set(suites.problems(spec, "anywhere").values())
    files = list(Path(mgpu_ops.__path__[0], "configs").glob(f"*/{op}.json"))
    assert files
    for path in files:
        assert held_out.isdisjoint(database.to_problem(spec, entry.problem) for entry in database.read(path).entries)


OTHER_MODELS = {
    "flash_attention": 30,
    "matmul": 53,
    "gated_matmul": 12,
    "quantized_matmul": 16,
    "grouped_matmul": 21,
    "ragged_contraction": 14,
}


@pytest.mark.parametrize("op", OTHER_MODELS)
def test_other_models_are_of_no_other_list_and_nothing_shipped_is_for_them(op: str) -> None:
    spec = spec_of(op)
    found = suites.problems(spec, "other-models")
    assert len(found) == OTHER_MODELS[op]
    lists = [name for name in suites.names(spec) if name != "other-models"]
    assert set(found.values()).isdisjoint({p for name in lists for p in suites.problems(spec, name).values()})
    assert all(spec.supports(p, H200) is None for p in found.values())
    fields = [field.name for field in dataclasses.fields(spec.Problem)]
    held_out = {tuple(getattr(p, name) for name in fields) for p in found.values()}
    for path in Path(mgpu_ops.__path__[0], "configs").glob(f"*/{op}*.json"):  # of its backward pass too
        of = spec_of(path.stem)
        for entry in database.read(path).entries:
            shipped = database.to_problem(of, entry.problem)
            assert tuple(getattr(shipped, name) for name in fields) not in held_out


def test_no_shipped_gradient_is_for_a_problem_of_anywhere() -> None:
    names = [field.name for field in dataclasses.fields(ATTENTION.Problem)]
    held_out = {tuple(getattr(p, name) for name in names) for p in suites.problems(ATTENTION, "anywhere").values()}
    spec = spec_of("flash_attention_backward")
    for path in Path(mgpu_ops.__path__[0], "configs").glob(f"*/{spec.name}.json"):
        for entry in database.read(path).entries:
            gradient = database.to_problem(spec, entry.problem)
            assert tuple(getattr(gradient, name) for name in names) not in held_out


def test_no_problem_of_anywhere_is_a_named_shape() -> None:
    """Named shapes are tuned for, and each adds contract tests."""
    for spec in (MATMUL, ATTENTION):
        assert set(suites.problems(spec, "anywhere").values()).isdisjoint(spec.shapes.values())


def test_a_suite_beside_the_shapes_is_asked_for_as_any_other() -> None:
    found = asked("--suite", "anywhere")
    assert found == suites.problems(MATMUL, "anywhere")
    name, problem = next(iter(found.items()))
    assert asked("--shape", name) == {name: problem}
    text = labels.label(MATMUL, name, problem)
    assert text == f"{name} {labels.describe(problem)}"
    assert labels.problem_of(MATMUL, text) == problem


def test_sustained_is_12_products_of_models_named_as_a_model_names_them() -> None:
    found = asked("--suite", "sustained")
    assert len(found) == 12
    assert min(p.m for p in found.values()) >= 4096
    of_models: dict[str, MatmulProblem] = {}
    for model in ("llama3-8b", "llama3-70b", "mixtral-8x7b", "qwen3-235b-a22b"):
        of_models |= {job.name: job.problem for job in problems.of_model(model, (8192, 16384), op="matmul", grad=True)}
    assert found == {name: of_models[name] for name in found}
    assert {"nn", "nt", "tn"} == {p.layout for p in found.values()}


@pytest.mark.parametrize("scales", ["tensor", "row", "block"])
def test_fp8_is_20_products_of_models_that_the_kernel_runs(scales: str) -> None:
    found = asked("--suite", "fp8" if scales == "tensor" else f"fp8-{scales}")
    of_models = {name: problem for name, problem in found.items() if not name.startswith("square")}
    assert len(of_models) == 20
    assert all(p.scales == scales and MATMUL.supports(p, H200) is None for p in found.values())


@pytest.mark.parametrize(("suite", "scales"), [("fp8-llm", "tensor"), ("fp8-block-llm", "block")])
def test_fp8_llm_is_20_products_with_many_tokens(suite: str, scales: str) -> None:
    found = asked("--suite", suite)
    assert len(set(found.values())) == 20
    assert {p.m for p in found.values()} == {4096, 8192, 16384}
    assert all(p.scales == scales and MATMUL.supports(p, H200) is None for p in found.values())


def test_moe_fp8_is_the_contractions_of_training_steps_with_room_for_padding() -> None:
    spec = spec_of("ragged_contraction")
    found = asked("--suite", "moe-fp8", op="ragged_contraction")
    assert list(found) == [f"{name}-fp8" for name in spec.shapes]
    for p, plain in zip(found.values(), spec.shapes.values(), strict=True):
        assert (p.n, p.k, p.groups, p.spread) == (plain.n, plain.k, plain.groups, plain.spread)
        assert 0 <= plain.m + 127 * p.groups - p.m < 128
        assert spec.supports(p, H200) is None
        assert 0 < spec.cost(p, spec.default(p, H200), H200) < spec.cost(plain, spec.default(plain, H200), H200)
    (own,) = asked(
        *("--m", "256", "--n", "64", "--k", "64", "--groups", "2", "--dtype", "f8e4m3", "--out-dtype", "bf16"),
        *("--rhs-dtype", "f8e5m2", "--transposed"),
        op="ragged_contraction",
    ).values()
    assert own.transposed
    assert own.rhs_dtype == "float8_e5m2"


def test_float32_is_four_products_with_each_algorithm_that_a_precision_names() -> None:
    found = asked("--suite", "float32")
    assert {p.algorithm for p in found.values()} == {"tf32", "bf16_x3", "bf16_x6"}
    assert len(found) == 12
    assert all(p.dtype == "float32" and MATMUL.supports(p, H200) is None for p in found.values())
    assert list(asked("--m", "64", "--n", "64", "--k", "64", "--dtype", "f32", "--algorithm", "bf16_x9").values()) == [
        MatmulProblem(64, 64, 64, "float32", "float32", algorithm="bf16_x9")
    ]


def test_a_model_is_benched_at_any_numbers_of_tokens() -> None:
    tokens = "1,8,16,32,64,128,256,512,1024,4096,8192,16384"
    found = asked("--suite", "llama3-8b", "--tokens", tokens)
    assert {p.m for p in found.values()} == set(positive_ints(tokens))
    assert found["llama3-8b-down-512"] == MatmulProblem(512, 4096, 14336)
    assert len(found) == 5 * 12  # qkv, out, logits, gate_up, down
    assert all(MATMUL.supports(p, H200) is None for p in found.values())


@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_backward"])
def test_cudnn_frontend_is_its_llama_3_1_full_and_causal(op: str) -> None:
    spec = spec_of(op)
    found = list(suites.problems(spec, "cudnn-frontend").values())
    assert {(p.batch, p.q_heads, p.kv_heads, p.head_dim) for p in found} == {(2, 64, 8, 128)}
    assert sorted((p.q_tokens, p.causal) for p in found) == [(n, c) for n in (4096, 16384, 32768) for c in (False, True)]
    assert all(spec.supports(p, H200) is None for p in found)


def test_sinks_is_a_suite_of_attention_with_and_without_windows_long_and_decoding() -> None:
    spec = spec_of("flash_attention")
    found = list(suites.problems(spec, "sinks").values())
    assert all(p.sinks and (p.q_heads, p.kv_heads, p.head_dim) == (64, 8, 64) for p in found)
    assert all(spec.supports(p, H200) is None for p in found)
    kinds = {(p.window_left, p.q_tokens == 1) for p in found}
    assert kinds == {(-1, False), (127, False), (-1, True), (127, True)}
    long = [p.q_tokens for p in found if p.q_tokens > 1]
    assert (min(long), max(long)) == (1024, 32768)
    words = ["flash_attention", "--suite", "sinks"]
    parser = argparse.ArgumentParser()
    problem_arguments(parser, many=True)
    assert list(selection.problems_of(spec, parser.parse_args(words)).values()) == found
