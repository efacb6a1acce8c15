"""Named problems of attention, those of real models among them, and the suites that the tuner and the benchmarks know."""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

from mgpu_ops.attention.problem import BackwardProblem, Problem
from mgpu_ops.models import MODELS


def _mha(head_dim: int, batch: int, tokens: int, heads: int, kv_heads: int | None = None, **mask: Any) -> Problem:
    return Problem(batch, tokens, tokens, heads, kv_heads or heads, head_dim, **mask)


def _decode_mha(head_dim: int, batch: int, kv_tokens: int, heads: int, kv_heads: int | None = None, **mask: Any) -> Problem:
    return Problem(batch, 1, kv_tokens, heads, kv_heads or heads, head_dim, **mask)


def _of(model: str, batch: int, tokens: int, **mask: Any) -> Problem:
    heads = MODELS[model].attention["attention"]
    return _mha(heads.head_dim, batch, tokens, heads.q_heads, heads.kv_heads, causal=True, **mask)


def _decode(model: str, batch: int, kv_tokens: int, q_tokens: int = 1, **mask: Any) -> Problem:
    """The last tokens of a sequence of `kv_tokens`. One alone needs no causal mask: it sees them all."""
    heads = MODELS[model].attention["attention"]
    causal = q_tokens > 1 or "window_left" in mask
    return Problem(batch, q_tokens, kv_tokens, heads.q_heads, heads.kv_heads, heads.head_dim, causal=causal, **mask)


_LONG: dict[str, Problem] = {
    "bert-large-512": _mha(64, 32, 512, 16),
    "gpt2-1024-causal": _of("gpt2", 16, 1024),
    "whisper-cross-448x1500": Problem(16, 448, 1500, 20, 20, 64),
    "mha64-4096": _mha(64, 4, 4096, 32),
    "mha64-4096-causal": _mha(64, 4, 4096, 32, causal=True),
    "mha64-16384-causal": _mha(64, 1, 16384, 32, causal=True),
    "mha128-4096": _mha(128, 4, 4096, 16),
    "mha128-4096-causal": _mha(128, 4, 4096, 16, causal=True),
    "mha128-16384": _mha(128, 1, 16384, 16),
    "mha128-16384-causal": _mha(128, 1, 16384, 16, causal=True),
    "llama3-8b-512-causal": _of("llama3-8b", 16, 512),
    "llama3-8b-2048-causal": _of("llama3-8b", 4, 2048),
    "llama3-8b-8192-causal": _of("llama3-8b", 1, 8192),
    "llama3-8b-32768-causal": _of("llama3-8b", 1, 32768),
    "llama3-70b-8192-causal": _of("llama3-70b", 1, 8192),
    "mistral-7b-16384-window": _of("mistral-7b", 1, 16384, window_left=4095),
    "mha256-4096": _mha(256, 4, 4096, 8),
    "mha256-4096-causal": _mha(256, 4, 4096, 8, causal=True),
    "gemma2-9b-8192-causal": _of("gemma2-9b", 1, 8192),
    "gemma2-9b-8192-window": _of("gemma2-9b", 1, 8192, window_left=4095),
}
_DECODE: dict[str, Problem] = {
    "llama3-8b-decode-1x8192": _decode("llama3-8b", 1, 8192),
    "llama3-8b-decode-1x131072": _decode("llama3-8b", 1, 131072),
    "llama3-8b-decode-16x8192": _decode("llama3-8b", 16, 8192),
    "llama3-8b-decode-64x1024": _decode("llama3-8b", 64, 1024),
    "llama3-8b-decode-256x1024": _decode("llama3-8b", 256, 1024),
    "llama3-8b-verify-16x8192": _decode("llama3-8b", 16, 8192, 8),
    "llama3-70b-decode-1x32768": _decode("llama3-70b", 1, 32768),
    "llama3-70b-decode-64x8192-lengths": _decode("llama3-70b", 64, 8192, lengths=True),
    "qwen3-235b-a22b-decode-16x32768": _decode("qwen3-235b-a22b", 16, 32768),
    "mistral-7b-decode-64x8192-window": _decode("mistral-7b", 64, 8192, window_left=4095),
    "gemma2-9b-decode-16x8192": _decode("gemma2-9b", 16, 8192),
    "gpt2-decode-64x1024": _decode("gpt2", 64, 1024),
}
_WINDOW = {"window_left": 127}
_SINKS: dict[str, Problem] = {  # gpt-oss-20b and 120b, whose attention is the same
    "gpt-oss-1024": _of("gpt-oss-20b", 16, 1024, sinks=True),
    "gpt-oss-8192": _of("gpt-oss-20b", 1, 8192, sinks=True),
    "gpt-oss-8192-window": _of("gpt-oss-20b", 1, 8192, sinks=True, **_WINDOW),
    "gpt-oss-32768": _of("gpt-oss-20b", 1, 32768, sinks=True),
    "gpt-oss-32768-window": _of("gpt-oss-20b", 1, 32768, sinks=True, **_WINDOW),
    "gpt-oss-decode-1x32768": _decode("gpt-oss-20b", 1, 32768, sinks=True),
    "gpt-oss-decode-64x8192": _decode("gpt-oss-20b", 64, 8192, sinks=True),
    "gpt-oss-decode-64x8192-window": _decode("gpt-oss-20b", 64, 8192, sinks=True, **_WINDOW),
}
_HEADS: dict[str, Problem] = {  # head dims other than 64, 128 and 256
    "vit-huge-257": _mha(80, 64, 257, 16),
    "stablelm-3b-4096-causal": _mha(80, 4, 4096, 32, causal=True),
    "phi3-mini-4096-causal": _mha(96, 4, 4096, 32, causal=True),
    "gpt-neox-20b-2048-causal": _mha(96, 4, 2048, 64, causal=True),
    "mha96-4096": _mha(96, 4, 4096, 16),
    "mha112-4096-causal": _mha(112, 4, 4096, 16, causal=True),
    "stablelm2-12b-4096-causal": _mha(160, 4, 4096, 32, 8, causal=True),
    "nemotron4-340b-4096-causal": _mha(192, 1, 4096, 96, 8, causal=True),
    "deepseek-v3-4096-causal": _mha(192, 1, 4096, 128, causal=True, v_head_dim=128),
    "deepseek-v3-16384-causal": _mha(192, 1, 16384, 16, causal=True, v_head_dim=128),  # 16 heads: one GPU of eight
    "zamba2-7b-4096-causal": _mha(224, 1, 4096, 32, causal=True),
}
_DECODE_HEADS: dict[str, Problem] = {  # likewise
    "stablelm-3b-decode-16x4096": _decode_mha(80, 16, 4096, 32),
    "phi3-mini-decode-1x4096": _decode_mha(96, 1, 4096, 32),
    "phi3-mini-decode-16x4096": _decode_mha(96, 16, 4096, 32),
    "phi3-mini-decode-paged16-16x4096": _decode_mha(96, 16, 4096, 32, page_size=16),
    "gpt-neox-20b-decode-64x2048-lengths": _decode_mha(96, 64, 2048, 64, lengths=True),
    "mha112-decode-16x4096": _decode_mha(112, 16, 4096, 32),
    "stablelm2-12b-decode-16x4096": _decode_mha(160, 16, 4096, 32, 8),
    "nemotron4-340b-decode-8x8192": _decode_mha(192, 8, 8192, 96, 8),
    "zamba2-7b-decode-16x4096": _decode_mha(224, 16, 4096, 32),
}
_PAGED: dict[str, Problem] = {
    f"{model}-decode-paged{page_size}-{batch}x{kv_tokens}{'-lengths' * lengths}": _decode(
        model, batch, kv_tokens, page_size=page_size, lengths=lengths
    )
    for model, batch, kv_tokens, page_size, lengths in (
        ("llama3-8b", 1, 8192, 16, False),
        ("llama3-8b", 1, 131072, 16, False),
        ("llama3-8b", 1, 131072, 64, False),
        ("llama3-8b", 16, 8192, 16, False),
        ("llama3-8b", 16, 8192, 64, False),
        ("llama3-8b", 16, 8192, 128, False),
        ("llama3-8b", 64, 1024, 16, False),
        ("llama3-8b", 256, 1024, 64, False),
        ("llama3-70b", 1, 32768, 16, False),
        ("llama3-70b", 64, 8192, 64, True),
        ("llama3-70b", 64, 8192, 16, True),
        ("llama3-70b", 256, 4096, 128, False),
    )
}
_ALSO_IN_EIGHT_BITS = (
    "llama3-8b-decode-1x8192",
    "llama3-8b-decode-1x131072",
    "llama3-8b-decode-16x8192",
    "llama3-8b-decode-256x1024",
    "llama3-8b-verify-16x8192",
    "llama3-70b-decode-64x8192-lengths",
    "llama3-70b-decode-paged64-64x8192-lengths",
    "gpt2-decode-64x1024",
)
_EIGHT_BITS: dict[str, Problem] = {  # a quantized KV cache
    f"{name}-{label}": dataclasses.replace(p, kv_dtype=kv_dtype)
    for name, p in (_DECODE | _PAGED).items()
    for label, kv_dtype in (("fp8", "float8_e4m3fn"), ("int8", "int8"))
    if name in _ALSO_IN_EIGHT_BITS
}
SHAPES = _LONG | _HEADS | _DECODE | _DECODE_HEADS | _SINKS | _PAGED | _EIGHT_BITS
SUITES: dict[str, Sequence[str]] = {
    "llm": list(_LONG),
    **{f"d{d}": [name for name, p in _LONG.items() if p.head_dim == d] for d in (64, 128, 256)},
    "heads": list(_HEADS),
    "decode": list(_DECODE),
    "decode-heads": list(_DECODE_HEADS),
    "sinks": list(_SINKS),
    "paged": list(_PAGED),
    "kv8": list(_EIGHT_BITS),
}
BACKWARD_SHAPES = {name: BackwardProblem(**dataclasses.asdict(p)) for name, p in (_LONG | _HEADS).items()}
BACKWARD_SUITES = {name: names for name, names in SUITES.items() if name in ("llm", "d64", "d128", "d256", "heads")}
