"""Fast GPU ops for JAX on NVIDIA Hopper, tuned per GPU: `mgpu_ops.matmul(a, b)`, `mgpu_ops.grouped_matmul(lhs, rhs, sizes)`.

The first use of a name imports it, and with it JAX, but no other op: `mgpu-tune --help` needs neither.
"""

# ruff: noqa: F403, F405
from __future__ import annotations

import sys as _sys
from types import ModuleType as _ModuleType
from typing import TYPE_CHECKING

if TYPE_CHECKING:
    from mgpu_ops.api import *
    from mgpu_ops.api import __all__ as __all__

    __version__: str
else:
    # Where each public name comes from, which its first use imports.
    _HOMES = {
        "SPECS": "ops.SPECS",
        "CollectiveConfig": "collectives.Config",
        "CollectiveProblem": "collectives.Problem",
        "CrossEntropyConfig": "cross_entropy.Config",
        "CrossEntropyProblem": "cross_entropy.Problem",
        "DatabaseError": "registry.database.DatabaseError",
        "EmbeddingConfig": "embedding.Config",
        "EmbeddingProblem": "embedding.Problem",
        "FlashAttentionBackwardConfig": "attention.problem.BackwardConfig",
        "FlashAttentionConfig": "attention.problem.Config",
        "FlashAttentionProblem": "attention.problem.Problem",
        "Fp8GatedState": "matmul.fp8_gated.Fp8GatedState",
        "Fp8State": "matmul.fp8.Fp8State",
        "GatedGroupedMatmulProblem": "grouped.gated.Problem",
        "GatedMatmulConfig": "matmul.gated.Config",
        "GatedMatmulProblem": "matmul.gated.Problem",
        "GroupedMatmulConfig": "grouped.config.Config",
        "GroupedMatmulProblem": "grouped.grouped_matmul.Problem",
        "MatmulConfig": "matmul.Config",
        "MatmulProblem": "matmul.Problem",
        "MoeDispatch": "moe.MoeDispatch",
        "QuantizeConfig": "matmul.quantizing.Config",
        "QuantizeProblem": "matmul.quantizing.Problem",
        "QuantizedGroupedMatmulProblem": "quantized_grouped.Problem",
        "QuantizedMatmulConfig": "matmul.quantized.Config",
        "QuantizedMatmulProblem": "matmul.quantized.Problem",
        "RaggedContractionProblem": "grouped.ragged_contraction.Problem",
        "RmsNormConfig": "rms_norm.Config",
        "RmsNormProblem": "rms_norm.Problem",
        "RotaryConfig": "rotary.Config",
        "RotaryProblem": "rotary.Problem",
        "all_gather": "collectives.all_gather",
        "all_reduce": "collectives.all_reduce",
        "autotune": "api.autotune",
        "capture": "registry.capture.capture",
        "collective_workspace": "collectives.collective_workspace",
        "cross_entropy": "cross_entropy.cross_entropy",
        "dot_general": "matmul.dot_general.dot_general",
        "dot_product_attention": "attention.dot_product_attention.dot_product_attention",
        "einsum": "matmul.einsum.einsum",
        "embedding": "embedding.embedding",
        "explain": "api.explain",
        "flash_attention": "attention.flash_attention.flash_attention",
        "fp8_gated_mlp": "matmul.fp8_gated.fp8_gated_mlp",
        "fp8_grouped_matmul": "fp8_grouped.fp8_grouped_matmul",
        "fp8_matmul": "matmul.fp8.fp8_matmul",
        "fp8_moe": "fp8_moe.fp8_moe",
        "fp8_moe_experts": "fp8_moe.fp8_moe_experts",
        "gated_activation": "matmul.gated.activation.gated_activation",
        "gated_grouped_matmul": "grouped.gated.gated_grouped_matmul",
        "gated_matmul": "matmul.gated.gated_matmul",
        "gated_mlp": "matmul.gated.layer.gated_mlp",
        "grouped_matmul": "grouped.grouped_matmul.grouped_matmul",
        "matmul": "matmul.matmul",
        "moe": "moe.moe",
        "moe_combine": "moe.moe_combine",
        "moe_dispatch": "moe.moe_dispatch",
        "moe_experts": "moe.moe_experts",
        "moe_route": "moe.moe_route",
        "quantize": "matmul.quantize.quantize",
        "quantized_grouped_matmul": "quantized_grouped.quantized_grouped_matmul",
        "quantized_matmul": "matmul.quantized.quantized_matmul",
        "quantized_moe": "quantized_moe.quantized_moe",
        "quantized_moe_experts": "quantized_moe.quantized_moe_experts",
        "ragged_contraction": "grouped.ragged_contraction.ragged_contraction",
        "ragged_dot": "grouped.grouped_matmul.ragged_dot",
        "ragged_dot_general": "grouped.dot_general.ragged_dot_general",
        "reduce_scatter": "collectives.reduce_scatter",
        "rms_norm": "rms_norm.rms_norm",
        "rotary_attention": "rotary_attention.rotary_attention",
        "rotary_into_cache": "rotary.into_cache.rotary_into_cache",
        "rotary_qkv": "rotary.rotary_qkv",
        "spec_of": "ops.spec_of",
        "target": "core.gpu.target",
        "use_configs": "api.use_configs",
    }
    __all__ = [*_HOMES]

    def __getattr__(name):
        import importlib.util

        if name == "__version__":
            globals()[name] = _version()
        elif name in _HOMES:
            module, _, own = _HOMES[name].rpartition(".")
            globals()[name] = getattr(importlib.import_module(f"{__name__}.{module}"), own)
        elif name.startswith("_") or importlib.util.find_spec(f"{__name__}.{name}") is None:
            raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
        else:
            importlib.import_module(f"{__name__}.{name}")  # mgpu_ops.core
        return globals()[name]

    def __dir__():
        return sorted({*globals(), *__all__, "__version__"})


class _Package(_ModuleType):
    """`mgpu_ops.matmul` is the function also after `import mgpu_ops.matmul.problem`, which would put its module there."""

    def __setattr__(self, name: str, value: object) -> None:
        super().__setattr__(name, vars(value).get(name, value) if isinstance(value, _ModuleType) else value)


_sys.modules[__name__].__class__ = _Package


def _version() -> str:
    from pathlib import Path

    from mgpu_ops.core.version import version_of

    return version_of(Path(__path__[0]).parent)
