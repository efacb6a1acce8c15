"""The suite `other-models` of five ops: problems of models that no other list has, chosen and not drawn.

They stand for what people run beside the models of `mgpu_ops.models`: vision, diffusion, encoders, small and large language
models, adapters of low rank, other mixtures of experts, other sizes of quantized weights. As with `anywhere`, no entry of the
shipped databases is for one of them, so that they measure what a call gets for which nothing is stored.
"""

from __future__ import annotations

import functools
from typing import Any

from mgpu_ops.attention.problem import Problem as AttentionProblem
from mgpu_ops.grouped.grouped_matmul import Problem as GroupedMatmulProblem
from mgpu_ops.grouped.ragged_contraction import Problem as RaggedContractionProblem
from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.matmul.gated import Problem as GatedMatmulProblem
from mgpu_ops.matmul.quantized import Problem as QuantizedMatmulProblem


@functools.cache
def attention() -> dict[str, AttentionProblem]:
    """30 problems: vision, diffusion, encoders, language models, and prefills in chunks."""

    def full(batch: int, tokens: int, heads: int, head_dim: int, keys: int = 0, **fields: Any) -> AttentionProblem:
        return AttentionProblem(batch, tokens, keys or tokens, heads, heads, head_dim, **fields)

    def causal(
        batch: int, tokens: int, heads: int, kv_heads: int, head_dim: int, keys: int = 0, **fields: Any
    ) -> AttentionProblem:
        return AttentionProblem(batch, tokens, keys or tokens, heads, kv_heads, head_dim, causal=True, **fields)

    return {
        # vision
        "vit-base-197": full(128, 197, 12, 64),
        "clip-large-577": full(64, 577, 16, 64),
        "siglip-so400m-729": full(32, 729, 16, 72),
        "dinov2-giant-1370": full(16, 1370, 24, 64),
        # diffusion; the second number is that of the text's tokens
        "dit-xl-256": full(64, 256, 16, 72),
        "sd1.5-4096": full(8, 4096, 8, 40),
        "sdxl-4096": full(4, 4096, 10, 64),
        "sdxl-1024x77": full(16, 1024, 20, 64, 77),
        "sd3-medium-4429": full(2, 4429, 24, 64),
        "flux-4608": full(1, 4608, 24, 128),
        "wan2.1-1.3b-32760": full(1, 32760, 12, 128),
        "wan2.1-1.3b-32760x512": full(1, 32760, 12, 128, 512),
        # encoders
        "bert-base-128-lengths": full(256, 128, 12, 64, lengths=True),
        "bert-base-512-lengths": full(32, 512, 12, 64, lengths=True),
        "esm2-3b-1026-lengths": full(8, 1026, 40, 64, lengths=True),
        "whisper-encoder-1500": full(16, 1500, 20, 64),
        "modernbert-8192-window": full(4, 8192, 12, 64, window_left=64, window_right=64),
        # language models
        "llama3.2-1b-4096": causal(4, 4096, 32, 8, 64),
        "qwen2.5-0.5b-2048": causal(8, 2048, 14, 2, 64),
        "qwen2.5-7b-4096": causal(2, 4096, 28, 4, 128),
        "falcon-7b-2048": causal(4, 2048, 71, 1, 64),
        "phi2-2048": causal(8, 2048, 32, 32, 80),
        "starcoder2-15b-16384-window": causal(1, 16384, 48, 4, 128, window_left=4095),
        "gemma3-4b-8192-window": causal(1, 8192, 8, 4, 256, window_left=1023),
        "gemma3-27b-8192": causal(1, 8192, 32, 16, 128),
        "gemma3-27b-8192-window": causal(1, 8192, 32, 16, 128, window_left=1023),
        "deepseek-v2-lite-4096": causal(4, 4096, 16, 16, 192, v_head_dim=128),
        "grok-1-8192": causal(1, 8192, 48, 8, 128),
        # prefills of a chunk behind what the cache has
        "qwen2.5-7b-512x8704": causal(2, 512, 28, 4, 128, 8704),
        "llama3.1-8b-2048x34816": causal(1, 2048, 32, 8, 128, 34816),
    }


@functools.cache
def matmul() -> dict[str, MatmulProblem]:
    """The products of such models, in training and serving, with the biases, activations and residuals that they have."""
    return {
        # vision
        "vit-base-qkv": MatmulProblem(25216, 2304, 768, bias=True),
        "vit-base-up": MatmulProblem(25216, 3072, 768, bias=True, activation="gelu_erf"),
        "vit-base-down": MatmulProblem(25216, 768, 3072, bias=True, residual=True),
        "vit-base-up-db": MatmulProblem(768, 3072, 25216, layout="tn"),
        "siglip-so400m-up": MatmulProblem(23328, 4304, 1152, bias=True, activation="gelu"),
        "siglip-so400m-down": MatmulProblem(23328, 1152, 4304, bias=True, residual=True),
        "resnet50-28x28": MatmulProblem(25088, 512, 128),
        "resnet50-7x7": MatmulProblem(1568, 2048, 512),
        # diffusion
        "dit-xl-up": MatmulProblem(16384, 4608, 1152, bias=True, activation="gelu"),
        "sdxl-ff": MatmulProblem(16384, 5120, 640, bias=True),
        "sdxl-text": MatmulProblem(1232, 1280, 2048),
        "flux-qkv": MatmulProblem(4608, 9216, 3072, bias=True),
        "flux-single": MatmulProblem(4608, 21504, 3072, bias=True),
        "flux-modulation": MatmulProblem(1, 18432, 3072, bias=True),
        "wan2.1-1.3b-up": MatmulProblem(32760, 8960, 1536, bias=True, activation="gelu"),
        # encoders
        "bert-base-up": MatmulProblem(32768, 3072, 768, bias=True, activation="gelu_erf"),
        "bert-base-out": MatmulProblem(16384, 768, 768, bias=True, residual=True),
        "bert-base-out-db": MatmulProblem(768, 768, 16384, layout="tn"),
        "esm2-3b-up": MatmulProblem(8208, 10240, 2560, bias=True, activation="gelu_erf"),
        "whisper-large-up": MatmulProblem(24000, 5120, 1280, bias=True, activation="gelu_erf"),
        "t5-large-down": MatmulProblem(16384, 1024, 2816),
        # language models, training and prefill
        "qwen2.5-0.5b-qkv": MatmulProblem(16384, 1152, 896, bias=True),
        "qwen2.5-0.5b-down": MatmulProblem(16384, 896, 4864),
        "qwen2.5-0.5b-logits": MatmulProblem(4096, 151936, 896, layout="nt"),
        "qwen2.5-0.5b-logits-da": MatmulProblem(4096, 896, 151936),
        "qwen2.5-7b-qkv": MatmulProblem(8192, 4608, 3584, bias=True),
        "qwen2.5-7b-down": MatmulProblem(8192, 3584, 18944),
        "qwen2.5-7b-down-da": MatmulProblem(8192, 18944, 3584, layout="nt"),
        "phi2-up": MatmulProblem(16384, 10240, 2560, bias=True, activation="gelu"),
        "phi3.5-mini-qkv": MatmulProblem(8192, 9216, 3072),
        "gemma3-4b-down": MatmulProblem(8192, 2560, 10240),
        "gemma3-27b-out": MatmulProblem(4096, 5376, 4096),
        "llama3.2-1b-qkv": MatmulProblem(16384, 3072, 2048),
        "falcon-7b-qkv": MatmulProblem(8192, 4672, 4544),
        "falcon-7b-up": MatmulProblem(8192, 18176, 4544),
        "starcoder2-15b-down": MatmulProblem(4096, 6144, 24576, bias=True),
        "olmo2-13b-out": MatmulProblem(2048, 5120, 5120),
        "mamba2-2.7b-in": MatmulProblem(8192, 10576, 2560),
        "deepseek-v2-lite-kv_a": MatmulProblem(16384, 576, 2048),
        "deepseek-v2-lite-kv_b": MatmulProblem(16384, 4096, 512),
        "kimi-k2-q_b": MatmulProblem(4096, 12288, 1536),
        "olmoe-router": MatmulProblem(16384, 64, 2048, out_dtype="float32"),
        # language models, decoding
        "qwen2.5-7b-qkv-48": MatmulProblem(48, 4608, 3584, bias=True),
        "llama3.2-1b-down-24": MatmulProblem(24, 2048, 8192),
        "deepseek-v2-lite-absorb-64": MatmulProblem(64, 512, 128, batch=16),
        "gemma3-4b-logits-8": MatmulProblem(8, 262208, 2560, layout="nt"),
        # adapters of low rank
        "lora-16-in": MatmulProblem(8192, 16, 4096),
        "lora-16-out": MatmulProblem(8192, 4096, 16),
        "lora-16-in-db": MatmulProblem(4096, 16, 8192, layout="tn"),
        "lora-16-out-db": MatmulProblem(16, 4096, 8192, layout="tn"),
        "lora-64-in": MatmulProblem(8192, 64, 14336),
        "lora-64-out": MatmulProblem(8192, 14336, 64, residual=True),
        # scores of attention, written as products
        "scores-512": MatmulProblem(512, 512, 64, layout="nt", batch=384),
    }


_EXPERTS = {  # rows, n, k and groups
    "olmoe-gate_up-8192": (65536, 2048, 2048, 64),
    "olmoe-down-8192": (65536, 2048, 1024, 64),
    "qwen2-57b-a14b-gate_up-4096": (32768, 5120, 3584, 64),
    "dbrx-gate_up-4096": (16384, 21504, 6144, 16),
    "dbrx-down-4096": (16384, 6144, 10752, 16),
    "gpt-oss-20b-gate_up-8192": (32768, 5760, 2880, 32),
    "granite3-3b-gate_up-8192": (65536, 1024, 1536, 40),
    "granite3-3b-down-8192": (65536, 1536, 512, 40),
    "phi3.5-moe-gate_up-8192": (16384, 12800, 4096, 16),
    "deepseek-v2-lite-gate_up-8192": (49152, 2816, 2048, 64),
    "deepseek-v2-lite-down-8192": (49152, 2048, 1408, 64),
    "kimi-k2-ep8-gate_up-4096": (32768, 4096, 7168, 48),
    "glm4.5-air-gate_up-8192": (65536, 2816, 4096, 128),
    "llama4-scout-down-8192": (8192, 5120, 8192, 16),
}
_EXPERTS_DECODING = {
    "gpt-oss-20b-gate_up-64": (256, 5760, 2880, 32),
    "grok-1-down-64": (128, 6144, 32768, 8),
    "glm4.5-air-gate_up-32": (256, 2816, 4096, 128),
    "olmoe-down-8": (64, 2048, 1024, 64),
    # adapters of low rank, one for each group of requests
    "lora-16-in-512": (512, 16, 4096, 32),
    "lora-16-out-512": (512, 4096, 16, 32),
    "lora-64-out-4096": (4096, 14336, 64, 16),
}


@functools.cache
def grouped_matmul() -> dict[str, GroupedMatmulProblem]:
    """The products of other mixtures of experts, in training and decoding, and of adapters that groups of requests have."""
    return {name: GroupedMatmulProblem(*sizes) for name, sizes in (_EXPERTS | _EXPERTS_DECODING).items()}


@functools.cache
def ragged_contraction() -> dict[str, RaggedContractionProblem]:
    """The gradients of the experts' weights."""
    return {f"{name}-drhs": RaggedContractionProblem(*sizes) for name, sizes in _EXPERTS.items()}


@functools.cache
def gated_matmul() -> dict[str, GatedMatmulProblem]:
    """Gate and up of such models; the gradients are those that a training step has."""
    return {
        "qwen2.5-7b-8192": GatedMatmulProblem(8192, 18944, 3584),
        "qwen2.5-7b-16": GatedMatmulProblem(16, 18944, 3584),
        "qwen2.5-0.5b-16384": GatedMatmulProblem(16384, 4864, 896),
        "gemma3-4b-8192": GatedMatmulProblem(8192, 10240, 2560, activation="gelu"),
        "gemma3-27b-2048": GatedMatmulProblem(2048, 21504, 5376, activation="gelu"),
        "llama3.2-1b-16384": GatedMatmulProblem(16384, 8192, 2048),
        "llama3.2-1b-1": GatedMatmulProblem(1, 8192, 2048),
        "phi3.5-mini-8192": GatedMatmulProblem(8192, 8192, 3072, joined=True),
        "t5-xxl-4096": GatedMatmulProblem(4096, 10240, 4096, activation="gelu"),
        "dinov2-giant-21920": GatedMatmulProblem(21920, 4096, 1536, joined=True),
        "olmo2-13b-4096-gradient": GatedMatmulProblem(4096, 13824, 5120, gradient=True),
        "llama3.2-1b-16384-gradient": GatedMatmulProblem(16384, 8192, 2048, gradient=True),
    }


@functools.cache
def quantized_matmul() -> dict[str, QuantizedMatmulProblem]:
    """Weights of 8 and 4 bits of such models, in the groups that GPTQ, AWQ and GGUF use, from one token to a prefill."""

    def w4(m: int, n: int, k: int, **fields: Any) -> QuantizedMatmulProblem:
        return QuantizedMatmulProblem(m, n, k, "int4", **{"group_size": 128, **fields})

    return {
        "qwen2.5-7b-qkv-1-w4": w4(1, 4608, 3584, zero_points=True, bias=True),
        "qwen2.5-7b-gate_up-1-w4": w4(1, 37888, 3584, zero_points=True),
        "qwen2.5-7b-down-4-w4": w4(4, 3584, 18944, zero_points=True),
        "qwen2.5-7b-down-48-w4": w4(48, 3584, 18944, zero_points=True),
        "qwen2.5-7b-gate_up-2048-w4": w4(2048, 37888, 3584, zero_points=True),
        "gemma3-27b-qkv-8-w4": w4(8, 8192, 5376, group_size=32),
        "gemma3-27b-out-32-w4": w4(32, 5376, 4096, group_size=32),
        "gemma3-27b-down-512-w4": w4(512, 5376, 21504, group_size=32),
        "mistral-small-24b-gate_up-16-w4": w4(16, 65536, 5120),
        "mistral-small-24b-down-128-w4": w4(128, 5120, 32768),
        "llama3.2-3b-qkv-1-w8": QuantizedMatmulProblem(1, 5120, 3072),
        "llama3.2-3b-gate_up-16-w8": QuantizedMatmulProblem(16, 16384, 3072),
        "llama3.2-3b-down-64-w8": QuantizedMatmulProblem(64, 3072, 8192),
        "phi3.5-mini-out-256-w8": QuantizedMatmulProblem(256, 3072, 3072),
        "qwen2.5-32b-down-4096-w8": QuantizedMatmulProblem(4096, 5120, 27648),
        "qwen2.5-32b-gate_up-4-w8": QuantizedMatmulProblem(4, 55296, 5120),
    }
