"""The table of models: its products have as many parameters and operations as the models are published with."""

from __future__ import annotations

import dataclasses

import pytest

import mgpu_ops
from mgpu_ops.models import MODELS, Model


def billions(model: Model, experts: int = 1) -> float:
    """Parameters of all products, with the experts of so many GPUs."""
    matrices = sum(p.n * p.k * p.count for p in model.projections.values())
    return (matrices + experts * sum(e.n * e.k * e.groups * e.count for e in model.experts.values())) / 1e9


def active_billions(model: Model) -> float:
    """Parameters that one token meets."""
    matrices = sum(p.n * p.k * p.count for p in model.projections.values())
    return (matrices + sum(e.n * e.k * e.rows * e.count for e in model.experts.values())) / 1e9


# What the authors publish, less the embedding where it is a matrix of its own (the products have none), in billions.
PUBLISHED = {
    "llama3-8b": 8.03 - 128256 * 4096 / 1e9,
    "llama3-70b": 70.55 - 128256 * 8192 / 1e9,
    "mistral-7b": 7.24 - 32000 * 4096 / 1e9,
    "gemma2-9b": 9.24,
    "gpt2": 0.124,
    "mixtral-8x7b": 46.7 - 32000 * 4096 / 1e9,
    "qwen3-30b-a3b": 30.5 - 151936 * 2048 / 1e9,
    "qwen3-235b-a22b": 235 - 151936 * 4096 / 1e9,
    "deepseek-v3": 671 - 129280 * 7168 / 1e9,
    "gpt-oss-20b": 20.91 - 201088 * 2880 / 1e9,
    "gpt-oss-120b": 116.83 - 201088 * 2880 / 1e9,
}
ACTIVE = {"mixtral-8x7b": 12.9, "qwen3-30b-a3b": 3.3, "qwen3-235b-a22b": 22, "deepseek-v3": 37}
ACTIVE |= {"gpt-oss-20b": 3.61 + 0.579, "gpt-oss-120b": 5.13 + 0.579}  # published without the embedding


@pytest.mark.parametrize("name", MODELS)
def test_the_products_hold_the_parameters_of_the_model(name):
    assert billions(MODELS[name], experts=8 if name == "deepseek-v3" else 1) == pytest.approx(PUBLISHED[name], rel=0.01)


@pytest.mark.parametrize("name", ACTIVE)
def test_a_token_meets_the_active_parameters_of_the_model(name):
    embedding = next(p.n * p.k for what, p in MODELS[name].projections.items() if what == "logits") / 1e9
    assert active_billions(MODELS[name]) + embedding == pytest.approx(ACTIVE[name], rel=0.04)


@pytest.mark.parametrize("name", MODELS)
def test_attention_fits_the_products_before_and_after_it(name):
    model = MODELS[name]
    layers = model.projections["out"].count
    assert sum(a.count for a in model.attention.values()) == layers
    for a in model.attention.values():
        assert a.q_heads % a.kv_heads == 0
        if "qkv" in model.projections:
            assert model.projections["qkv"].n == (a.q_heads + 2 * a.kv_heads) * a.head_dim
            assert model.projections["out"].k == a.q_heads * a.head_dim


def test_the_named_shapes_of_the_ops_are_those_of_the_table():
    shapes = {op: spec.shapes for op, spec in mgpu_ops.SPECS.items()}
    assert shapes["matmul"]["llama3-70b-qkv-256"] == mgpu_ops.MatmulProblem(256, 10240, 8192)
    wanted = mgpu_ops.GroupedMatmulProblem(8 * 16384, 1536, 2048, 128)
    assert shapes["grouped_matmul"]["qwen3-30b-gate_up-16384-random"] == wanted
    wanted = mgpu_ops.FlashAttentionProblem(1, 16384, 16384, 32, 8, 128, causal=True, window_left=4095)
    assert shapes["flash_attention"]["mistral-7b-16384-window"] == wanted
    wanted = mgpu_ops.FlashAttentionProblem(1, 8192, 8192, 64, 8, 64, causal=True, window_left=127, sinks=True)
    assert shapes["flash_attention"]["gpt-oss-8192-window"] == wanted


def test_a_model_is_data():
    assert all(dataclasses.is_dataclass(model) for model in MODELS.values())
    with pytest.raises(dataclasses.FrozenInstanceError):
        MODELS["gpt2"].projections["up"].n = 1
