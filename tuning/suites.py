"""Lists of problems beside an op's own: they are timed and tuned like any other, but none is one of `OpSpec.shapes`.

`sustained`, of matmul: 12 products of real models with 4096 rows or more, in which the power cap of a GPU decides.

`llm-rows`, of matmul: the products of a layer of Llama-3 8B and 70B, those of the op's suite `llm`, with 1 to 16384 rows.

`fp8`, `fp8-row` and `fp8-block`, of matmul: 20 products of 8-bit floats (e4m3) of real models with 128 and 4096 rows, with
scales of each operand, of rows and columns, or of blocks of 128; `fp8` also 8192^3.

`fp8-llm` and `fp8-block-llm`, of matmul: 20 products of 8-bit floats of six models with 4096 to 16384 tokens, with scales of
each operand or of blocks.

`fp8`, `fp8-row` and `fp8-block`, of grouped_matmul: six products of experts of DeepSeek-V3 and Qwen3, likewise.

`moe-fp8`, of ragged_contraction: the gradients of the weights in training steps, those of the op's shapes, as products of 8-bit
floats (e4m3 and e5m2) that are stored transposed, with room for each group's padding.

`float32`, of matmul: four products of float32, each as tf32 and with three and six products of bfloat16 parts.

`cudnn-frontend`, of flash_attention and flash_attention_backward: problems whose speed NVIDIA's cudnn-frontend publishes as
Llama 3.1's: batch 2, 64 query heads over 8 of keys, head dim 128, full and causal, 4096, 16384 and 32768 tokens.

`other-models`, of flash_attention, matmul, gated_matmul, quantized_matmul, grouped_matmul and ragged_contraction: problems of
models that no other list has (`other_models.py`). As with `anywhere`, no entry of the shipped databases is for one of them.

`anywhere`, of matmul: 96 problems that nobody chose, drawn by `scripts/draw_anywhere.py`, which states the rule. They measure
what a call gets for which nothing is stored, so that no entry of the shipped databases is for one of them. `anywhere-epilogues`
of matmul: 48 with a bias, an activation or a residual, drawn likewise; `anywhere-8-bits`: 48 of 8 bits. `anywhere` of
grouped_matmul and of ragged_contraction: 32 and 16 problems, drawn likewise; of flash_attention: 64; of rms_norm, rotary,
embedding, cross_entropy, gated_matmul and quantize: 10 to 25 each, of ten models that no entry is of.
"""

from __future__ import annotations

import functools
import itertools
import json
from collections.abc import Callable, Mapping, Sequence
from dataclasses import replace
from pathlib import Path
from typing import Any

from mgpu_ops.attention.problem import BackwardProblem
from mgpu_ops.attention.problem import Problem as AttentionProblem
from mgpu_ops.cross_entropy import Problem as CrossEntropyProblem
from mgpu_ops.embedding import Problem as EmbeddingProblem
from mgpu_ops.grouped.grouped_matmul import Problem as GroupedMatmulProblem
from mgpu_ops.grouped.problem import layer_problem
from mgpu_ops.grouped.ragged_contraction import Problem as RaggedContractionProblem
from mgpu_ops.grouped.ragged_contraction.problem import PADDED
from mgpu_ops.grouped.ragged_contraction.problem import SHAPES as CONTRACTIONS
from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.matmul.gated import Problem as GatedMatmulProblem
from mgpu_ops.matmul.quantizing import Problem as QuantizeProblem
from mgpu_ops.models import MODELS
from mgpu_ops.registry.spec import OpSpec, Problem
from mgpu_ops.rms_norm import Problem as RmsNormProblem
from mgpu_ops.rotary import Problem as RotaryProblem
from mgpu_ops.tuning import other_models

ANYWHERE = Path(__file__).with_name("anywhere.json")
ANYWHERE_EPILOGUES = Path(__file__).with_name("anywhere_epilogues.json")
ANYWHERE_8_BITS = Path(__file__).with_name("anywhere_8_bits.json")
ANYWHERE_GROUPED = Path(__file__).with_name("anywhere_grouped.json")
ANYWHERE_ATTENTION = Path(__file__).with_name("anywhere_attention.json")
ANYWHERE_LAYERS = Path(__file__).with_name("anywhere_layers.json")


# Model, projection and tokens; "da" and "db" are the gradients of its two operands, as problems of `mgpu_ops.tuning.problems`.
_SUSTAINED = (
    ("llama3-8b", "qkv", 8192, ""),
    ("llama3-8b", "out", 8192, ""),
    ("llama3-8b", "gate_up", 8192, ""),
    ("llama3-8b", "down", 8192, ""),
    ("llama3-8b", "down", 8192, "da"),
    ("llama3-8b", "gate_up", 8192, "db"),
    ("llama3-70b", "qkv", 8192, ""),
    ("llama3-70b", "gate_up", 8192, ""),
    ("llama3-70b", "down", 8192, ""),
    ("llama3-70b", "down", 8192, "db"),
    ("mixtral-8x7b", "out", 16384, ""),
    ("qwen3-235b-a22b", "qkv", 8192, ""),
)


@functools.cache
def _sustained() -> dict[str, MatmulProblem]:
    found = {}
    for model, what, tokens, gradient in _SUSTAINED:
        p = MODELS[model].projections[what]
        found["-".join(filter(None, (model, what, str(tokens), gradient)))] = {
            "": MatmulProblem(tokens, p.n, p.k),
            "da": MatmulProblem(tokens, p.k, p.n, layout="nt"),
            "db": MatmulProblem(p.k, p.n, tokens, layout="tn"),
        }[gradient]
    return found


_ROWS = (1, 8, 16, 32, 64, 128, 256, 512, 1024, 4096, 8192, 16384)


@functools.cache
def _llm_rows() -> dict[str, MatmulProblem]:
    return {
        f"{model}-{what}-{m}": MatmulProblem(m, p.n, p.k)
        for model in ("llama3-8b", "llama3-70b")
        for what in ("qkv", "out", "gate_up", "down")
        for m in _ROWS
        for p in [MODELS[model].projections[what]]
    }


_FP8 = (  # models, projections and numbers of tokens
    ("llama3-8b", ("qkv", "out", "gate_up", "down"), (128, 4096)),
    ("llama3-70b", ("qkv", "out", "gate_up", "down"), (128, 4096)),
    ("deepseek-v3", ("q_b", "out", "shared_gate_up", "shared_down"), (4096,)),
)
_FP8_LLM = (
    ("llama3-8b", ("qkv", "out", "gate_up", "down"), (8192,)),
    ("llama3-70b", ("qkv", "out", "gate_up", "down"), (4096,)),
    ("deepseek-v3", ("q_a", "q_b", "kv_b", "out", "shared_gate_up", "shared_down"), (4096,)),
    ("mixtral-8x7b", ("qkv", "out"), (16384,)),
    ("qwen3-30b-a3b", ("qkv", "out"), (16384,)),
    ("qwen3-235b-a22b", ("qkv", "out"), (16384,)),
)


def _fp8(m: int, n: int, k: int, scales: str) -> MatmulProblem:
    return MatmulProblem(m, n, k, "float8_e4m3fn", "bfloat16", "nt", scales=scales)


@functools.cache
def _of_8_bits(scales: str) -> dict[str, MatmulProblem]:
    square = {"square-8192-fp8": _fp8(8192, 8192, 8192, scales)} if scales == "tensor" else {}
    return _of_models(_FP8, scales) | square


@functools.cache
def _llm_of_8_bits(scales: str) -> dict[str, MatmulProblem]:
    return _of_models(_FP8_LLM, scales)


def _of_models(products: Sequence[tuple[str, Sequence[str], Sequence[int]]], scales: str) -> dict[str, MatmulProblem]:
    end, found = "fp8" if scales == "tensor" else f"fp8-{scales}", {}
    for model, names, rows in products:
        for name, m in itertools.product(names, rows):
            p = MODELS[model].projections[name]
            found[f"{model}-{name}-{m}-{end}"] = _fp8(m, p.n, p.k, scales)
    return found


_FP8_EXPERTS = (  # layer, tokens and spread: training and prefills, then decoding
    ("deepseek-v3-ep8-gate_up", 4096, "random"),
    ("deepseek-v3-ep8-down", 4096, "even"),
    ("qwen3-235b-gate_up", 8192, "even"),
    ("qwen3-30b-gate_up", 16384, "random"),
    ("deepseek-v3-ep8-gate_up", 16, "random"),
    ("qwen3-235b-gate_up", 256, "random"),
)


@functools.cache
def _experts_of_8_bits(scales: str) -> dict[str, GroupedMatmulProblem]:
    end = "fp8" if scales == "tensor" else f"fp8-{scales}"
    return {
        f"{layer}-{tokens}-{spread}-{end}": replace(
            layer_problem(GroupedMatmulProblem, layer, tokens, spread), dtype="float8_e4m3fn", layout="nt", scales=scales
        )
        for layer, tokens, spread in _FP8_EXPERTS
    }


@functools.cache
def _contractions_of_8_bits() -> dict[str, RaggedContractionProblem]:
    dtypes: dict[str, Any] = {"dtype": "float8_e4m3fn", "rhs_dtype": "float8_e5m2", "transposed": True}
    return {
        f"{name}-fp8": replace(p, m=(p.m + (PADDED - 1) * p.groups) // PADDED * PADDED, **dtypes)
        for name, p in CONTRACTIONS.items()
    }


@functools.cache
def _float32() -> dict[str, MatmulProblem]:
    sizes = {
        "square-2048": (2048, 2048, 2048, "nn"),
        "square-8192-nt": (8192, 8192, 8192, "nt"),
        "llama3-8b-out-128": (128, 4096, 4096, "nn"),
        "llama3-8b-qkv-1024": (1024, 6144, 4096, "nn"),
    }
    return {
        f"{name}-{algorithm}": MatmulProblem(m, n, k, "float32", "float32", layout, algorithm=algorithm)
        for name, (m, n, k, layout) in sizes.items()
        for algorithm in ("tf32", "bf16_x3", "bf16_x6")
    }


@functools.cache
def _drawn(file: Path, make: Callable[..., Problem], name: str = "anywhere") -> dict[str, Problem]:
    """The problems in a file of one op."""
    return {f"{name}-{i}": make(**fields) for i, fields in enumerate(json.loads(file.read_text())["problems"])}


@functools.cache
def _anywhere_of(file: Path, op: str, make: Callable[..., Problem]) -> dict[str, Problem]:
    """An op's problems in a file of several ops."""
    drawn = json.loads(file.read_text())["problems"]
    own = [{name: value for name, value in fields.items() if name != "op"} for fields in drawn if fields["op"] == op]
    return {f"anywhere-{i}": make(**fields) for i, fields in enumerate(own)}


def _cudnn_frontend(make: Callable[..., Problem]) -> dict[str, Problem]:
    return {
        f"cudnn-frontend-{tokens}{'-causal' * causal}": make(2, tokens, tokens, 64, 8, 128, causal=causal)
        for tokens in (4096, 16384, 32768)
        for causal in (False, True)
    }


_MORE: dict[str, dict[str, Callable[[], Mapping[str, Problem]]]] = {  # by op and suite
    "matmul": {
        "sustained": _sustained,
        "llm-rows": _llm_rows,
        "anywhere": functools.partial(_drawn, ANYWHERE, MatmulProblem),
        "anywhere-epilogues": functools.partial(_drawn, ANYWHERE_EPILOGUES, MatmulProblem, "anywhere-epilogue"),
        "anywhere-8-bits": functools.partial(_drawn, ANYWHERE_8_BITS, MatmulProblem, "anywhere-8-bits"),
        "fp8": functools.partial(_of_8_bits, "tensor"),
        "fp8-row": functools.partial(_of_8_bits, "row"),
        "fp8-block": functools.partial(_of_8_bits, "block"),
        "fp8-llm": functools.partial(_llm_of_8_bits, "tensor"),
        "fp8-block-llm": functools.partial(_llm_of_8_bits, "block"),
        "float32": _float32,
        "other-models": other_models.matmul,
    },
    "quantized_matmul": {"other-models": other_models.quantized_matmul},
    "grouped_matmul": {
        "anywhere": functools.partial(_anywhere_of, ANYWHERE_GROUPED, "grouped_matmul", GroupedMatmulProblem),
        "fp8": functools.partial(_experts_of_8_bits, "tensor"),
        "fp8-row": functools.partial(_experts_of_8_bits, "row"),
        "fp8-block": functools.partial(_experts_of_8_bits, "block"),
        "other-models": other_models.grouped_matmul,
    },
    "ragged_contraction": {
        "anywhere": functools.partial(_anywhere_of, ANYWHERE_GROUPED, "ragged_contraction", RaggedContractionProblem),
        "moe-fp8": _contractions_of_8_bits,
        "other-models": other_models.ragged_contraction,
    },
    "flash_attention": {
        "cudnn-frontend": functools.partial(_cudnn_frontend, AttentionProblem),
        "other-models": other_models.attention,
        "anywhere": functools.partial(_drawn, ANYWHERE_ATTENTION, AttentionProblem),
    },
    "flash_attention_backward": {"cudnn-frontend": functools.partial(_cudnn_frontend, BackwardProblem)},
    **{
        op: {"anywhere": functools.partial(_anywhere_of, ANYWHERE_LAYERS, op, make)}
        for op, make in (
            ("rms_norm", RmsNormProblem),
            ("rotary", RotaryProblem),
            ("embedding", EmbeddingProblem),
            ("cross_entropy", CrossEntropyProblem),
            ("quantize", QuantizeProblem),
        )
    },
    "gated_matmul": {
        "anywhere": functools.partial(_anywhere_of, ANYWHERE_LAYERS, "gated_matmul", GatedMatmulProblem),
        "other-models": other_models.gated_matmul,
    },
}


def names(spec: OpSpec) -> list[str]:
    """The suites of an op."""
    return [*spec.suites, *_MORE.get(spec.name, {})]


def problems(spec: OpSpec, suite: str) -> dict[str, Problem]:
    """The problems of one of the op's suites, by name: each once, by its first name."""
    more = _MORE.get(spec.name, {}).get(suite)
    found: Mapping[str, Problem] = {name: spec.shapes[name] for name in spec.suites[suite]} if more is None else more()
    first: dict[Problem, str] = {}
    for name, problem in found.items():
        first.setdefault(problem, name)
    return {name: problem for problem, name in first.items()}


def all_names(spec: OpSpec) -> list[str]:
    """The names of all problems of an op: of its shapes, then of the suites beside them."""
    return [*spec.shapes, *(name for more in _MORE.get(spec.name, {}).values() for name in more())]


def named(spec: OpSpec, name: str) -> Problem | None:
    """The op's problem of that name, of its shapes or of a suite; None where there is none."""
    if name in spec.shapes:
        shape: Problem = spec.shapes[name]
        return shape
    for more in _MORE.get(spec.name, {}).values():
        if name in more():
            return more()[name]
    return None
