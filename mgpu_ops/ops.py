"""The ops that there are, by name."""

from __future__ import annotations

from mgpu_ops.attention.flash_attention import BACKWARD as _FLASH_ATTENTION_BACKWARD
from mgpu_ops.attention.flash_attention import FORWARD as _FLASH_ATTENTION
from mgpu_ops.collectives import SPECS as _COLLECTIVES
from mgpu_ops.cross_entropy import SPEC as _CROSS_ENTROPY
from mgpu_ops.embedding import SPEC as _EMBEDDING
from mgpu_ops.grouped.gated import SPEC as _GATED_GROUPED_MATMUL
from mgpu_ops.grouped.grouped_matmul import SPEC as _GROUPED_MATMUL
from mgpu_ops.grouped.ragged_contraction import SPEC as _RAGGED_CONTRACTION
from mgpu_ops.matmul import SPEC as _MATMUL
from mgpu_ops.matmul.gated import SPEC as _GATED_MATMUL
from mgpu_ops.matmul.quantized import SPEC as _QUANTIZED_MATMUL
from mgpu_ops.matmul.quantizing import SPEC as _QUANTIZE
from mgpu_ops.quantized_grouped import SPEC as _QUANTIZED_GROUPED_MATMUL
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.rms_norm import SPEC as _RMS_NORM
from mgpu_ops.rotary import SPEC as _ROTARY

_OPS = (
    _MATMUL,
    _GATED_MATMUL,
    _QUANTIZED_MATMUL,
    _QUANTIZE,
    _GROUPED_MATMUL,
    _GATED_GROUPED_MATMUL,
    _RAGGED_CONTRACTION,
    _QUANTIZED_GROUPED_MATMUL,
    _FLASH_ATTENTION,
    _FLASH_ATTENTION_BACKWARD,
    _CROSS_ENTROPY,
    _RMS_NORM,
    _ROTARY,
    _EMBEDDING,
    *_COLLECTIVES.values(),
)
SPECS: dict[str, OpSpec] = {spec.name: spec for spec in _OPS}


def spec_of(op: str) -> OpSpec:
    """The OpSpec of an op by name; ValueError names what there is."""
    if not isinstance(op, str) or op not in SPECS:
        raise ValueError(f"op {op!r} is not one of {', '.join(SPECS)}; `mgpu-tune capture` lists those that a function runs")
    return SPECS[op]
