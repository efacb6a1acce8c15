"""Draws the problems of the suites `anywhere`: of matmul, both grouped ops, flash_attention, and a model's other ops.

    python scripts/draw_anywhere.py     # writes the files anywhere*.json in mgpu_ops/tuning, which tests compare

Of matmul:

84 problems are drawn from `SEED`: m from 1 to 16384, n and k from 128 to 32768 in steps of 8, each log-uniform. The layouts
nn, nt, tn and tt take turns; where A is stored transposed, m is rounded up to a multiple of 8, as its rows must have 16 bytes.
Every fifth problem has a batch from 2 to 16. A problem above `MOST_BYTES` or `MOST_FLOPS` is drawn again: at 600 TFLOP/s it
would take 27 ms.

12 more are the products before a model's logits, in decoding (m up to 96) and in training: see `HEADS`.

Of matmul with epilogues, 48 problems: `EPILOGUES` take turns, and so do the layouts nn and nt. m is 16 to 16384, n and k
256 to 16384 in steps of 8, each log-uniform, with at most `MOST_EPILOGUE_FLOPS` operations; every third is of float16.

Of matmul with 8 bits, 48 problems of layout nt: `EIGHT_BITS` take turns. m is 8 to 16384, n and k 256 to 16384 in steps of 16,
each log-uniform, with at most `MOST_EPILOGUE_FLOPS` operations.

Of grouped ops, 48 problems: every third is of ragged_contraction, the others of grouped_matmul with layouts nn and nt in turn.
Groups are 4 to 256, rows 2 to 4096 for each of them, up to 262144 in all, n and k from 256 to 16384 in steps of 8, each
log-uniform; the spreads take turns. The bounds on bytes and operations are the same.

Of flash_attention, 64 problems of as many queries as keys: `HEAD_DIMS` and `KINDS` take turns, so that each meets each.
Tokens are log-uniform from 128 to 65536, one problem in each 64th of that range, in random order; with a bias to 8192. Every
other number of tokens is a multiple of 128, the others are any. Query heads are 1 to 64, the batch 1 to 64, a window 32 keys
to half of the tokens, each log-uniform; the query heads of a head of keys are a random divisor up to 16. Heads and batch are
drawn again until the arrays have at most `MOST_ATTENTION_BYTES` and the two products `MOST_ATTENTION_FLOPS` operations, 12 ms
at 650 TFLOP/s, lengths and segments apart.

Of a model's other ops, those of `LAYER_KINDS`: the models of `LAYERS` take turns, in random order, and so do an op's kinds of
problems. Tokens are log-uniform from 1 to 16384, for gradients, the embedding and quantize from 128; those of quantize are
rounded to a multiple of 16. A third of the problems is of float16. No named problem is of one of these models.
"""

from __future__ import annotations

import dataclasses
import json
import math
import random
from collections.abc import Callable, Iterable
from typing import Any

from mgpu_ops import FlashAttentionProblem, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem, spec_of
from mgpu_ops.grouped.sizes import SPREADS
from mgpu_ops.registry.spec import Problem
from mgpu_ops.tuning.suites import (
    ANYWHERE,
    ANYWHERE_8_BITS,
    ANYWHERE_ATTENTION,
    ANYWHERE_EPILOGUES,
    ANYWHERE_GROUPED,
    ANYWHERE_LAYERS,
)

SEED = 15
DRAWN = 84
GROUPED_SEED = 18
GROUPED = 48
MOST_ROWS = 262144
MOST_BYTES = 4 * 2**30  # of A, B and the output
MOST_FLOPS = 16e12
ATTENTION_SEED = 16
ATTENTION = 64
MOST_ATTENTION_BYTES = 2 * 2**30
MOST_ATTENTION_FLOPS = 8e12
HEAD_DIMS = ((64, 0), (80, 0), (96, 0), (112, 0), (128, 0), (160, 0), (192, 0), (256, 0), (192, 128))  # the last: values of 128
KINDS = ("full", "causal", "window", "segments", "lengths", "bias")
LAYOUTS = ("nn", "nt", "tn", "tt")
EPILOGUE_SEED = 19
EPILOGUE_PROBLEMS = 48
MOST_EPILOGUE_FLOPS = 2e12
EPILOGUES: tuple[dict[str, Any], ...] = (
    {"bias": True},
    {"bias": True, "activation": "gelu"},
    {"bias": True, "activation": "gelu_erf"},
    {"activation": "silu"},
    {"bias": True, "activation": "relu"},
    {"residual": True},
    {"bias": True, "residual": True},
    {"activation": "gelu_erf"},
)
EIGHT_BITS_SEED = 20
EIGHT_BITS_PROBLEMS = 48
EIGHT_BITS: tuple[dict[str, Any], ...] = (
    {"dtype": "float8_e4m3fn", "scales": "tensor"},
    {"dtype": "float8_e4m3fn", "scales": "row"},
    {"dtype": "int8", "out_dtype": "int32"},
    {"dtype": "float8_e5m2", "b_dtype": "float8_e4m3fn", "scales": "tensor"},
    {"dtype": "int8", "scales": "row"},
    {"dtype": "float8_e4m3fn", "scales": "row", "bias": True},
)
RULE = "drawn by scripts/draw_anywhere.py, which states the rule"

# (width, vocabulary), then (m, layout). nt: tied to the embedding, [vocabulary, width]; tn: the gradient of the matrix, whose k
# is the tokens.
HEADS: dict[str, tuple[int, int, tuple[tuple[int, str], ...]]] = {
    "Llama 3 8B": (4096, 128256, ((4, "nn"), (6144, "nn"), (3072, "tn"))),
    "Llama 3 70B": (8192, 128256, ((24, "nn"), (3072, "nn"))),
    "Mistral 7B": (4096, 32000, ((12, "nn"), (6144, "nn"))),
    "Qwen2.5 72B": (8192, 152064, ((96, "nn"), (3072, "nn"))),
    "Gemma 2 9B": (3584, 256000, ((2, "nt"), (2048, "nt"))),
    "DeepSeek-V3": (7168, 129280, ((48, "nn"),)),
}

LAYERS_SEED = 17
# width, heads, heads of keys, head_dim, columns of gate, vocabulary
LAYERS: dict[str, tuple[int, int, int, int, int, int]] = {
    "Llama 3.2 1B": (2048, 32, 8, 64, 8192, 128256),
    "Llama 3.2 3B": (3072, 24, 8, 128, 8192, 128256),
    "Qwen3 0.6B": (1024, 16, 8, 128, 3072, 151936),
    "Qwen3 1.7B": (2048, 16, 8, 128, 6144, 151936),
    "Qwen3 4B": (2560, 32, 8, 128, 9728, 151936),
    "Qwen3 14B": (5120, 40, 8, 128, 17408, 151936),
    "Gemma 2 2B": (2304, 8, 4, 256, 9216, 256000),
    "Gemma 2 27B": (4608, 32, 16, 128, 36864, 256000),
    "Mistral Small 3": (5120, 32, 8, 128, 32768, 131072),
    "SmolLM2 1.7B": (2048, 32, 32, 64, 8192, 49152),
}
_E5M2 = {"to": "float8_e5m2"}
LAYER_KINDS: dict[str, tuple[int, tuple[dict[str, Any], ...]]] = {  # how many problems of an op, and what kinds there are
    "rms_norm": (15, ({}, {"gradient": True}, {"gradient": True, "residual": True})),
    "rotary": (12, ({}, {"gradient": True})),
    "embedding": (10, ({},)),
    "cross_entropy": (10, ({}, {"gradient": True})),
    "gated_matmul": (
        25,
        ({}, {"joined": True}, {"stored": True}, {"stored": True, "gradient": True}, {"gradient": True}),
    ),
    "quantize": (
        14,
        (
            {},
            {"of": "gate"},
            {"of": "gate_gradient"} | _E5M2,
            {"of": "gate", "amax": "only"},
            _E5M2,
            {"scheme": "row", "scheme_t": "row"},
            {"scheme": "block", "scheme_t": "square"},
        ),
    ),
}


def drawn(seed: int = SEED, count: int = DRAWN) -> list[MatmulProblem]:
    spec, rng = spec_of("matmul"), random.Random(seed)
    found: list[MatmulProblem] = []
    while len(found) < count:
        i = len(found)
        layout = LAYOUTS[i % 4]
        m = round(_log_uniform(rng, 1, 16384))
        n, k = (8 * round(_log_uniform(rng, 128, 32768) / 8) for _ in "nk")
        batch = 2 + int(15 * rng.random()) if i % 5 == 4 else 1
        problem = MatmulProblem(m + -m % 8 if layout[0] == "t" else m, n, k, layout=layout, batch=batch)
        if spec.bytes(problem) <= MOST_BYTES and spec.flops(problem) <= MOST_FLOPS and problem not in found:
            found.append(problem)
    return found


def epilogues() -> list[MatmulProblem]:
    def fields(i: int) -> dict[str, Any]:
        dtype = "float16" if i % 3 == 2 else "bfloat16"
        of_all = {"dtype": dtype, "out_dtype": dtype, "layout": ("nn", "nt")[i // len(EPILOGUES) % 2]}
        return of_all | EPILOGUES[i % len(EPILOGUES)]

    return _short_products(EPILOGUE_SEED, EPILOGUE_PROBLEMS, 16, 8, fields)


def _short_products(
    seed: int, count: int, least_rows: int, unit: int, fields: Callable[[int], dict[str, Any]]
) -> list[MatmulProblem]:
    """Of at most `MOST_EPILOGUE_FLOPS`. unit: of n and k. fields: the others of a problem, by its number."""
    spec, rng = spec_of("matmul"), random.Random(seed)
    found: list[MatmulProblem] = []
    while len(found) < count:
        m = round(_log_uniform(rng, least_rows, 16384))
        n, k = (unit * round(_log_uniform(rng, 256, 16384) / unit) for _ in "nk")
        problem = MatmulProblem(m, n, k, **fields(len(found)))
        if spec.flops(problem) <= MOST_EPILOGUE_FLOPS and problem not in found:
            found.append(problem)
    return found


def epilogues_text() -> str:
    """The file of matmul with epilogues, one problem a line: the fields that are not as by default."""
    return _file(EPILOGUE_SEED, (_not_default(problem) for problem in epilogues()))


def eight_bits() -> list[MatmulProblem]:
    kinds = [{"layout": "nt"} | kind for kind in EIGHT_BITS]
    return _short_products(EIGHT_BITS_SEED, EIGHT_BITS_PROBLEMS, 8, 16, lambda i: kinds[i % len(kinds)])


def eight_bits_text() -> str:
    """The file of matmul with 8 bits, one problem a line: the fields that are not as by default."""
    return _file(EIGHT_BITS_SEED, (_not_default(problem) for problem in eight_bits()))


def heads() -> list[MatmulProblem]:
    return [
        MatmulProblem(width, vocabulary, m, layout=layout)
        if layout == "tn"
        else MatmulProblem(m, vocabulary, width, layout=layout)
        for width, vocabulary, uses in HEADS.values()
        for m, layout in uses
    ]


def grouped() -> list[tuple[str, GroupedMatmulProblem | RaggedContractionProblem]]:
    """Each with the name of its op."""
    rng = random.Random(GROUPED_SEED)
    found: list[tuple[str, GroupedMatmulProblem | RaggedContractionProblem]] = []
    while len(found) < GROUPED:
        i = len(found)
        groups = round(_log_uniform(rng, 4, 256))
        m = round(groups * _log_uniform(rng, 2, 4096))
        n, k = (8 * round(_log_uniform(rng, 256, 16384) / 8) for _ in "nk")
        spread = SPREADS[i // 3 % len(SPREADS)]
        problem: GroupedMatmulProblem | RaggedContractionProblem
        if i % 3 == 2:
            op, problem = "ragged_contraction", RaggedContractionProblem(m, n, k, groups, spread=spread)
        else:
            op, problem = "grouped_matmul", GroupedMatmulProblem(m, n, k, groups, layout=("nn", "nt")[i % 3], spread=spread)
        spec = spec_of(op)
        fits = m <= MOST_ROWS and spec.bytes(problem) <= MOST_BYTES and spec.flops(problem) <= MOST_FLOPS
        if fits and (op, problem) not in found:
            found.append((op, problem))
    return found


def grouped_text() -> str:
    """The file of the grouped ops, one problem a line."""
    return _file(GROUPED_SEED, (_grouped_fields(op, problem) for op, problem in grouped()))


def _grouped_fields(op: str, p: GroupedMatmulProblem | RaggedContractionProblem) -> dict[str, Any]:
    fields = {"op": op, "m": p.m, "n": p.n, "k": p.k, "groups": p.groups, "spread": p.spread}
    return fields | ({"layout": p.layout} if isinstance(p, GroupedMatmulProblem) else {})


def attention() -> list[FlashAttentionProblem]:
    spec, rng = spec_of("flash_attention"), random.Random(ATTENTION_SEED)
    ranges = list(range(ATTENTION))
    rng.shuffle(ranges)
    found: list[FlashAttentionProblem] = []
    for i, part in enumerate(ranges):
        turn = i // len(HEAD_DIMS)
        head_dim, v_head_dim = HEAD_DIMS[i % len(HEAD_DIMS)]
        kind = KINDS[(i % len(HEAD_DIMS) + turn) % len(KINDS)]
        most = 8192 if kind == "bias" else 65536
        tokens = round(128 * (most / 128) ** ((part + rng.random()) / ATTENTION))
        tokens = max(128, tokens // 128 * 128) if i % 2 else tokens
        mask = _mask(kind, tokens, rng)
        while True:
            heads, batch = (round(_log_uniform(rng, 1, 64)) for _ in "hb")
            group = rng.choice([g for g in range(1, 17) if heads % g == 0])
            shape = (batch, tokens, tokens, heads, heads // group, head_dim)
            problem = FlashAttentionProblem(*shape, v_head_dim=v_head_dim, **mask)
            whole = dataclasses.replace(problem, lengths=False, segments=False)
            if spec.bytes(whole) <= MOST_ATTENTION_BYTES and spec.flops(whole) <= MOST_ATTENTION_FLOPS:
                break
        found.append(problem)
    return found


def _mask(kind: str, tokens: int, rng: random.Random) -> dict[str, Any]:
    """The fields of a problem that say which keys its rows see. Packed sequences (segments) are causal, as in training."""
    fields: dict[str, dict[str, Any]] = {
        "full": {},
        "causal": {"causal": True},
        "window": {"causal": True, "window_left": round(_log_uniform(rng, 32, max(33, tokens / 2)))},
        "segments": {"causal": True, "segments": True},
        "lengths": {"lengths": True},
        "bias": {"bias": "bfloat16"},
    }
    return fields[kind]


def attention_text() -> str:
    """The file of flash_attention, one problem a line: the fields that are not as by default."""
    return _file(ATTENTION_SEED, (_not_default(problem) for problem in attention()))


def layers() -> list[tuple[str, Problem]]:
    rng, found = random.Random(LAYERS_SEED), []
    for op, (count, kinds) in LAYER_KINDS.items():
        models: list[str] = []
        for i in range(count):
            models = models or rng.sample(list(LAYERS), len(LAYERS))
            kind = kinds[i % len(kinds)]
            least = 128 if kind.get("gradient") or op in ("embedding", "quantize") else 1
            tokens = round(_log_uniform(rng, least, 16384))
            dtype = "float16" if rng.random() < 1 / 3 else "bfloat16"
            found.append((op, _of_model(op, LAYERS[models.pop()], tokens, dtype, kind)))
    return found


def _of_model(op: str, sizes: tuple[int, ...], tokens: int, dtype: str, kind: dict[str, Any]) -> Problem:
    """An op's problem in a model with `LAYERS`' sizes."""
    width, heads, kv_heads, head_dim, hidden, vocabulary = sizes
    of_op: dict[str, dict[str, Any]] = {
        "rms_norm": {"rows": tokens, "width": width},
        "rotary": {"rows": tokens, "positions": tokens, "heads": heads, "kv_heads": kv_heads, "head_dim": head_dim},
        "embedding": {"rows": tokens, "vocabulary": vocabulary, "width": width},
        "cross_entropy": {"rows": tokens, "vocabulary": vocabulary},
        "gated_matmul": {"m": tokens, "n": hidden, "k": width, "out_dtype": dtype},
        "quantize": {"rows": tokens + -tokens % 16, "columns": hidden},
    }
    return spec_of(op).Problem(**of_op[op], dtype=dtype, **kind)


def layers_text() -> str:
    """The file of a model's other ops, one problem a line: the fields that are not as by default."""
    return _file(LAYERS_SEED, ({"op": op} | _not_default(problem) for op, problem in layers()))


def _not_default(problem: Problem) -> dict[str, Any]:
    defaults = {field.name: field.default for field in dataclasses.fields(problem)}
    return {name: x for name, x in vars(problem).items() if x != defaults[name]}


def _file(seed: int, problems: Iterable[dict[str, Any]]) -> str:
    """A file of drawn problems, one a line."""
    lines = ",\n".join(f"  {json.dumps(fields)}" for fields in problems)
    return f'{{\n"rule": {json.dumps(RULE)},\n"seed": {seed},\n"problems": [\n{lines}\n]\n}}\n'


def _log_uniform(rng: random.Random, low: float, high: float) -> float:
    return low * math.exp(math.log(high / low) * rng.random())


def text() -> str:
    """The file, one problem a line."""
    return _file(SEED, (_fields(problem) for problem in (*drawn(), *heads())))


def _fields(problem: MatmulProblem) -> dict[str, Any]:
    fields = {"m": problem.m, "n": problem.n, "k": problem.k, "layout": problem.layout}
    return fields | {"batch": problem.batch} if problem.batch > 1 else fields


if __name__ == "__main__":
    ANYWHERE.write_text(text())
    ANYWHERE_EPILOGUES.write_text(epilogues_text())
    ANYWHERE_8_BITS.write_text(eight_bits_text())
    ANYWHERE_GROUPED.write_text(grouped_text())
    ANYWHERE_ATTENTION.write_text(attention_text())
    ANYWHERE_LAYERS.write_text(layers_text())
