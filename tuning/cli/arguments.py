"""Arguments that several commands share: problems, times and numbers.

The ops are written down here as tables, since importing the ops takes a second (JAX) and `--help` answers at once. A test
compares the tables with the ops.
"""

from __future__ import annotations

import argparse
import math
import re
from pathlib import Path
from typing import Any

from mgpu_ops.models import MODELS

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}
_DTYPES |= {"f8e4m3": "float8_e4m3fn", "f8e5m2": "float8_e5m2"}  # matmul only
_DTYPES |= {"i8": "int8", "i32": "int32", "u32": "uint32"}  # matmul; collectives, and results of i8

SUITES: dict[str, tuple[str, ...]] = {  # op -> its named lists of problems
    "matmul": (
        "llm",
        "square",
        "llama3-8b",
        "llama3-70b",
        "llama3-8b-backward",
        "sustained",
        "llm-rows",
        "anywhere",
        "anywhere-epilogues",
        "anywhere-8-bits",
        "fp8",
        "fp8-row",
        "fp8-block",
        "fp8-llm",
        "fp8-block-llm",
        "float32",
        "other-models",
    ),
    "gated_matmul": ("llm", "gradient", "stored", "llama3-8b", "llama3-70b", "gemma2-9b", "anywhere", "other-models"),
    "quantized_matmul": ("w8", "w4", "llama3-8b", "llama3-70b", "other-models"),
    "quantize": ("llama3-8b", "fp8-moe", "anywhere"),
    "grouped_matmul": (
        "moe",
        "training",
        "decoding",
        "dlhs",
        "mixtral-8x7b",
        "deepseek-v3-ep8",
        "qwen3-30b",
        "qwen3-235b",
        "anywhere",
        "fp8",
        "fp8-row",
        "fp8-block",
        "other-models",
    ),
    "quantized_grouped_matmul": ("w8", "w4", "mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b"),
    "gated_grouped_matmul": (
        "moe",
        "training",
        "decoding",
        "gradient",
        "mixtral-8x7b",
        "deepseek-v3-ep8",
        "qwen3-30b",
        "qwen3-235b",
    ),
    "ragged_contraction": (
        *("moe", "mixtral-8x7b", "deepseek-v3-ep8", "qwen3-30b", "qwen3-235b"),
        *("anywhere", "moe-fp8", "other-models"),
    ),
    "flash_attention": (
        *("llm", "d64", "d128", "d256", "heads", "decode", "decode-heads"),
        *("sinks", "paged", "kv8", "cudnn-frontend", "other-models", "anywhere"),
    ),
    "flash_attention_backward": ("llm", "d64", "d128", "d256", "heads", "cudnn-frontend"),
    "cross_entropy": ("llm", "gradient", "anywhere"),
    "rms_norm": ("llm", "gradient", "anywhere"),
    "rotary": ("llm", "gradient", "anywhere"),
    "embedding": ("llm", "anywhere"),
    "all_reduce": ("2-gpus", "4-gpus", "8-gpus"),
    "reduce_scatter": ("2-gpus", "4-gpus", "8-gpus"),
    "all_gather": ("2-gpus", "4-gpus", "8-gpus"),
}
LAYERS: dict[str, tuple[str, ...]] = {
    "moe": ("training", "decoding", "other-models")
}  # what `bench` alone takes, of several ops
COMPETITORS: dict[str, tuple[str, ...]] = {  # op -> what `bench` times beside it
    "matmul": ("xla", "jax-pallas", "bf16"),
    "gated_matmul": ("xla",),
    "quantized_matmul": ("xla",),
    "quantize": ("xla",),
    "grouped_matmul": ("dense", "jax-pallas", "tokamax", "lax"),
    "quantized_grouped_matmul": ("xla",),
    "gated_grouped_matmul": ("dense",),
    "ragged_contraction": ("dense", "jax-pallas", "tokamax", "lax"),
    "moe": ("fastest-parts", "tokamax", "tokamax-default", "lax", "fp8", "fp8-delayed", "int8", "int4"),
    "flash_attention": ("cudnn", "tokamax", "jax-pallas"),
    "flash_attention_backward": ("cudnn",),
    "cross_entropy": ("xla",),
    "rms_norm": ("xla",),
    "rotary": ("xla",),
    "embedding": ("xla",),
}
BACKENDS = ("mosaic", "interpret", "xla")
_SHAPES = "square-2048 of matmul, mixtral-8x7b-gate_up-2048-even of grouped_matmul, llama3-8b-8192-causal of flash_attention"


# --- Values ---------------------------------------------------------------------------------------


def positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    if value >= 2**63:
        raise argparse.ArgumentTypeError(f"{text} is more than an array can have, 2**63 - 1")
    return value


def positive_ints(text: str) -> tuple[int, ...]:
    """Numbers of "1,16,4096", each once, in order."""
    return tuple(dict.fromkeys(positive_int(part.strip()) for part in text.split(",")))


def byte_sizes(text: str) -> tuple[int, ...]:
    """The sizes of "1KiB:256MiB": the first, four times as many bytes, and so on up to the last. "64KiB" is one size."""
    first, _, last = text.partition(":")
    size, end = _bytes(first), _bytes(last or first)
    if size > end:
        raise argparse.ArgumentTypeError(f"{text!r} begins above its end: write the smaller size first")
    return tuple(size * 4**i for i in range(40) if size * 4**i <= end)


def _bytes(text: str) -> int:
    match = re.fullmatch(r"(\d+)\s*(B|KiB|MiB|GiB)?", text.strip())
    value = int(match[1]) * {"B": 1, "KiB": 2**10, "MiB": 2**20, "GiB": 2**30}[match[2] or "B"] if match else 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a size such as 4096, 64KiB or 1MiB")
    return value


def _bound(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -2
    if value < -1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0, or -1 for no bound")
    return value


def workers_argument(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--workers",
        type=_workers,
        default=1,
        metavar="N",
        help="how many GPUs of this machine to use, or all (default 1)",
    )


def _workers(text: str) -> int | None:
    return None if text == "all" else positive_int(text)


def seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2**32 - 1")
    return int(text)


def dtype(text: str) -> str:
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return name


def seconds(text: str) -> float:
    """Seconds of "90", "60s", "2m" or "1h"; finite and above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|m|h)?", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite time above 0 such as 60s, 2m or 1h")
    return value


# --- Problems -------------------------------------------------------------------------------------

_SIZE: dict[str, Any] = {"type": positive_int, "metavar": "N"}
_FLAG: dict[str, Any] = {"action": "store_true", "default": None}
_BOUND: dict[str, Any] = {"type": _bound, "metavar": "N"}

# Title of a group in the help -> the fields of problems in it, and how each is given. An option may belong to several ops.
FIELD_GROUPS: dict[str, dict[str, dict[str, Any]]] = {
    "problem of any op, by its fields": {
        "dtype": {
            "type": dtype,
            "help": "dtype of the inputs: bf16 (default) or f16; matmul with --layout nt also f8e4m3, f8e5m2 or i8; "
            "collectives also f32, i32 or u32",
        },
    },
    "matmul, gated_matmul, quantized_matmul, grouped_matmul, gated_grouped_matmul, ragged_contraction, "
    "quantized_grouped_matmul": {
        "m": _SIZE | {"help": "rows of the left operand in [m, k] x [k, n]; grouped ops: rows of all groups together"},
        "n": _SIZE | {"help": "columns of the right operand"},
        "k": _SIZE | {"help": "columns of the left operand, rows of the right one"},
        "out_dtype": {
            "type": dtype,
            "metavar": "DTYPE",
            "help": "dtype of the output: --dtype (default; for f8 inputs bf16, for i8 i32) or f32",
        },
        "layout": {
            "choices": ("nn", "nt", "tn", "tt"),
            "help": "how each operand is stored: n as [m, k] and [k, n], t transposed (default nn)",
        },
        "groups": _SIZE | {"help": "grouped ops: number of groups (experts) that the m rows are divided into"},
        "activation": {
            "choices": ("none", "relu", "silu", "gelu", "gelu_erf"),
            "help": "activation of the output (default none); gated ops: of the gate (default silu)",
        },
        "residual": _FLAG
        | {
            "help": "matmul, quantized_matmul, grouped_matmul: add an array of the output's shape; rms_norm with --gradient: "
            "one of x's shape"
        },
        "gradient": _FLAG
        | {
            "help": "the op's backward kernel. gated ops: gradients of gate and up; cross_entropy: of the logits; "
            "rms_norm: of x and the weight; rotary: of the joined q, k, v, with --normalised also of the norms' weights"
        },
        "stored": _FLAG | {"help": "gated_matmul: gate (for gradients also up) is an input, and only one product is computed"},
        "joined": _FLAG | {"help": "gated_matmul: gate and up are the columns of one weight"},
        "group_offset": _FLAG | {"help": "grouped ops: compute the groups of one shard, whose rows begin at an offset"},
        "row_scale": _FLAG | {"help": "grouped_matmul, quantize of gates: multiply each output row by a factor"},
        "second": _FLAG | {"help": "grouped_matmul: add the product of a second pair of operands"},
        "normalised": _FLAG
        | {"help": "matmul, gated_matmul: RMS norm of the left operand's rows, without a weight; rotary: of heads of q and k"},
        "b_dtype": {"type": dtype, "metavar": "DTYPE", "help": "matmul: dtype of the right operand, the other f8 than --dtype"},
        "scales": {
            "choices": ("none", "tensor", "row", "block"),
            "help": "scales of f8 or i8 operands (grouped ops: f8): per tensor, per row and column, or per block of 128 "
            "(default none)",
        },
        "rhs_dtype": {
            "type": dtype,
            "metavar": "DTYPE",
            "help": "grouped_matmul, gated_grouped_matmul, ragged_contraction: dtype of the right operand if the left is f8: "
            "f8e4m3 or f8e5m2",
        },
        "transposed": _FLAG
        | {"help": "ragged_contraction of f8: operands are stored transposed, groups padded to multiples of 128 of --m"},
        "keep": _FLAG | {"help": "gated_grouped_matmul: also store gate and up, for the backward pass"},
        "lhs_rows": _SIZE
        | {"help": "grouped_matmul, gated_grouped_matmul: rows of lhs that row indices select from (default: none are given)"},
        "gated_gradient": _FLAG | {"help": "grouped_matmul: compute the gradients of gate and up in the epilogue"},
        "algorithm": {
            "choices": ("tf32", "bf16", "bf16_x3", "bf16_x6", "bf16_x9", "tf32_x3", "float32"),
            "help": "matmul of f32: how it multiplies (default tf32; bf16_x3 is precision=high, bf16_x6 is highest)",
        },
        "w_dtype": {"choices": ("int8", "int4"), "help": "quantized ops: dtype of the weights (default int8)"},
        "group_size": _SIZE | {"help": "quantized ops: weights along k that share a scale (default: all)"},
        "zero_points": _FLAG | {"help": "quantized ops: the weights have zero points, as many as scales"},
        "scale_dtype": {"type": dtype, "metavar": "DTYPE", "help": "quantized ops: dtype of the scales (default bf16)"},
        "spread": {
            "choices": ("even", "random", "skewed", "sparse"),
            "help": "grouped ops: how the rows are spread over the groups (default random); it matters for the time only",
        },
        "batch": _SIZE | {"help": "products or arrays in one launch (default 1); attention: sequences"},
        "bias": {
            "nargs": "?",
            "const": True,
            "type": dtype,
            "metavar": "DTYPE",
            "help": "add a bias to the output (grouped ops: one for each group); attention: add one of this dtype to the "
            "scores (default: --dtype)",
        },
    },
    "flash_attention, flash_attention_backward (--batch and --bias too)": {
        "q_tokens": _SIZE | {"help": "query tokens of each sequence"},
        "kv_tokens": _SIZE | {"help": "key and value tokens of each sequence"},
        "q_heads": _SIZE | {"help": "query heads"},
        "kv_heads": _SIZE | {"help": "key and value heads; must divide --q-heads"},
        "head_dim": _SIZE | {"help": "elements of a head"},
        "v_head_dim": _SIZE | {"help": "elements of a head of v, if fewer than --head-dim (default: the same)"},
        "causal": _FLAG | {"help": "no query sees a later key"},
        "window_left": _BOUND | {"help": "how many keys before its own a query sees (default -1: all)"},
        "window_right": _BOUND | {"help": "how many keys after its own a query sees (default -1: all)"},
        "align": {
            "choices": ("bottom_right", "top_left"),
            "help": "which query and key share a position: the last of each (bottom_right, default) or the first of each",
        },
        "lengths": _FLAG | {"help": "each sequence has its own length"},
        "segments": _FLAG | {"help": "packed sequences (segment ids): a query sees only keys of its own segment"},
        "soft_cap": _FLAG | {"help": "scores go through cap * tanh(score / cap)"},
        "soft_cap_after_bias": _FLAG | {"help": "with --soft-cap: the bias is added before the cap, not after it"},
        "sinks": _FLAG | {"help": "attention sinks: each query head has one more logit in its softmax's sum"},
        "page_size": _SIZE | {"help": "paged KV cache: tokens of a page, 16, 32, 64, 128 or 256 (default: no pages)"},
        "kv_dtype": {
            "choices": ("none", "float8_e4m3fn", "int8"),
            "help": "of the keys and values: 8 bits for a quantized KV cache (default: none, that of the queries)",
        },
        "deterministic": _FLAG | {"help": "backward: gradients have the same bits in every run"},
        "bias_grad": _FLAG | {"help": "backward: also compute the gradient of the bias"},
    },
    "cross_entropy (--dtype also f32, --gradient too), rms_norm (--gradient and --residual too), embedding": {
        "rows": _SIZE | {"help": "rows of the logits or of x (tokens)"},
        "vocabulary": _SIZE | {"help": "columns of the logits; rows of the embedding table"},
        "width": _SIZE | {"help": "columns of x or of the embedding table"},
    },
    "rotary (--rows, --kv-heads, --head-dim, --gradient and --normalised too)": {
        "positions": _SIZE | {"help": "tokens of a sequence; --rows is a multiple of it"},
        "heads": _SIZE | {"help": "query heads"},
    },
    "quantize (--rows, --batch and --row-scale too, --dtype also f32)": {
        "columns": _SIZE | {"help": "columns of the array"},
        "to": {"type": dtype, "metavar": "DTYPE", "help": "dtype of the result: f8e4m3 (default) or f8e5m2"},
        "of": {
            "choices": ("array", "gate", "gate_gradient"),
            "help": "what to quantize: an array (default), silu(gate) * up, or its gradients",
        },
        "scheme": {
            "choices": ("tensor", "row", "block", "square"),
            "help": "what shares a scale: the tensor (default), a row, a block of 1 x 128, or a square of 128 x 128",
        },
        "scheme_t": {"choices": ("tensor", "row", "block", "square"), "help": "the same for the transposed copy"},
        "amax": {
            "choices": ("none", "also", "only"),
            "help": "compute the largest absolute value: no (default), also, or nothing else",
        },
        "gathered": _SIZE
        | {"help": "rows of the array that is read, of which numbers name the rows to quantize (default: all)"},
    },
    "all_reduce, reduce_scatter, all_gather": {
        "size": _SIZE | {"help": "elements of the payload on each GPU"},
        "devices": _SIZE | {"help": "how many GPUs"},
        "reduction": {"choices": ("add", "min", "max"), "help": "how to combine the GPUs' values (default add)"},
        "transport": {
            "choices": ("peer", "multimem"),
            "help": "peer (default): GPUs access each other's memory over NVLink; multimem: the NVLink switch adds and copies",
        },
    },
}
FIELDS = {name: options for group in FIELD_GROUPS.values() for name, options in group.items()}


def problem_arguments(
    parser: argparse.ArgumentParser, many: bool = False, every_op: bool = False, layers: bool = False
) -> None:
    """Adds the ways to name a problem. `many`: also suites. `every_op`: the op may be left out with a suite or a file.
    `layers`: it may be one of `LAYERS`."""
    ops = SUITES | LAYERS if layers else SUITES
    if every_op:
        parser.add_argument("op", nargs="?", help=f"{', '.join(ops)}; default: every op of the suite or file")
    else:
        parser.add_argument("op", help=", ".join(ops))
    group = parser.add_argument_group("problem by name")
    group.add_argument("--shape", metavar="NAME", help=f"a problem of a real model, e.g. {_SHAPES}")
    if many:
        suites = "; ".join(f"{op}: {', '.join(names)}" for op, names in ops.items())
        group.add_argument(
            "--suite",
            metavar="NAME",
            help=f"all problems of a model ({', '.join(MODELS)}), or a named list of problems of an op ({suites})",
        )
        group.add_argument(
            "--tokens",
            type=positive_ints,
            metavar="N,N",
            help="with --suite MODEL: numbers of tokens, e.g. 1,16,4096 (default: the op's list of that name, else "
            "128,256,4096); attention is over one causal sequence, from 128 tokens on",
        )
    if every_op:
        group.add_argument("--grad", action="store_true", help="with --suite MODEL: also the problems of the backward pass")
        group.add_argument(
            "--from", dest="file", type=Path, metavar="FILE", help="tune the problems of a file of `mgpu-tune capture --output`"
        )
    if many:
        group.add_argument(
            "--bytes",
            type=byte_sizes,
            metavar="A:B",
            help="collectives, with --devices: payloads from A to B, each four times the last, e.g. 1KiB:256MiB",
        )
    for title, fields in FIELD_GROUPS.items():
        group = parser.add_argument_group(title)
        for name, options in fields.items():
            group.add_argument(f"--{name.replace('_', '-')}", **options)
