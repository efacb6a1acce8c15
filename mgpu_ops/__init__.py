"""Fast GPU ops for JAX on NVIDIA Hopper, tuned per GPU: `mgpu_ops.matmul(a, b)`, `mgpu_ops.grouped_matmul(lhs, rhs, sizes)`.

The first use of a name of `mgpu_ops.api` imports it, and with it JAX: `mgpu-tune --help` needs neither.
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
    __all__ = [
        "SPECS",
        "CollectiveConfig",
        "CollectiveProblem",
        "CrossEntropyConfig",
        "CrossEntropyProblem",
        "DatabaseError",
        "EmbeddingConfig",
        "EmbeddingProblem",
        "FlashAttentionBackwardConfig",
        "FlashAttentionConfig",
        "FlashAttentionProblem",
        "Fp8State",
        "GatedGroupedMatmulProblem",
        "GatedMatmulConfig",
        "GatedMatmulProblem",
        "GroupedMatmulConfig",
        "GroupedMatmulProblem",
        "MatmulConfig",
        "MatmulProblem",
        "MoeDispatch",
        "QuantizeConfig",
        "QuantizeProblem",
        "QuantizedGroupedMatmulProblem",
        "QuantizedMatmulConfig",
        "QuantizedMatmulProblem",
        "RaggedContractionProblem",
        "RmsNormConfig",
        "RmsNormProblem",
        "RotaryConfig",
        "RotaryProblem",
        "all_gather",
        "all_reduce",
        "autotune",
        "capture",
        "collective_workspace",
        "cross_entropy",
        "decoding_layer",
        "dot_general",
        "dot_product_attention",
        "einsum",
        "embedding",
        "explain",
        "flash_attention",
        "fp8_gated_mlp",
        "fp8_grouped_matmul",
        "fp8_matmul",
        "gated_activation",
        "gated_grouped_matmul",
        "gated_matmul",
        "gated_mlp",
        "grouped_matmul",
        "matmul",
        "moe",
        "moe_combine",
        "moe_dispatch",
        "moe_experts",
        "moe_route",
        "quantize",
        "quantized_grouped_matmul",
        "quantized_matmul",
        "ragged_contraction",
        "ragged_dot",
        "ragged_dot_general",
        "reduce_scatter",
        "rms_norm",
        "rotary_attention",
        "rotary_into_cache",
        "rotary_qkv",
        "spec_of",
        "target",
        "use_configs",
    ]

    def __getattr__(name):
        import importlib.util

        if name == "__version__":
            globals()[name] = _version()
        elif name in __all__:
            from mgpu_ops import api

            globals().update({public: getattr(api, public) for public in __all__})
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
