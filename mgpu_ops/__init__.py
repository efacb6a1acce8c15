"""Fast GPU ops for JAX on NVIDIA Hopper, tuned per GPU: `mgpu_ops.matmul(a, b)`, `mgpu_ops.grouped_matmul(lhs, rhs, sizes)`."""

from __future__ import annotations

from typing import Any

from mgpu_ops.core.database import DatabaseError, use_configs
from mgpu_ops.dot_product_attention import dot_product_attention
from mgpu_ops.flash_attention import BACKWARD as _FLASH_ATTENTION_BACKWARD
from mgpu_ops.flash_attention import FORWARD as _FLASH_ATTENTION
from mgpu_ops.flash_attention import flash_attention
from mgpu_ops.flash_attention.problem import BackwardConfig as FlashAttentionBackwardConfig
from mgpu_ops.flash_attention.problem import Config as FlashAttentionConfig
from mgpu_ops.flash_attention.problem import Problem as FlashAttentionProblem
from mgpu_ops.grouped_matmul import SPEC as _GROUPED_MATMUL
from mgpu_ops.grouped_matmul import Problem as GroupedMatmulProblem
from mgpu_ops.grouped_matmul import grouped_matmul, ragged_dot
from mgpu_ops.groups import Config as GroupedMatmulConfig
from mgpu_ops.matmul import SPEC as _MATMUL
from mgpu_ops.matmul import Config as MatmulConfig
from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.matmul import matmul
from mgpu_ops.ragged_contraction import SPEC as _RAGGED_CONTRACTION
from mgpu_ops.ragged_contraction import Problem as RaggedContractionProblem
from mgpu_ops.ragged_contraction import ragged_contraction

_OPS = (_MATMUL, _GROUPED_MATMUL, _RAGGED_CONTRACTION, _FLASH_ATTENTION, _FLASH_ATTENTION_BACKWARD)
SPECS = {spec.name: spec for spec in _OPS}


def explain(op: str, problem: Any, gpu: Any = None) -> str:
    """Which stored config `op` runs `problem` with, and why, as text.

    Args:
      op: "matmul", "grouped_matmul" or "ragged_contraction".
      problem: the op's Problem, or its fields as a mapping, e.g. `{"m": 4096, "n": 4096, "k": 4096}`.
      gpu: a name such as "h200" or "NVIDIA H200"; the running GPU by default.

    Raises ValueError for an unknown op or GPU, or a mapping that is no problem of the op.
    """
    from mgpu_ops.core import database
    from mgpu_ops.core import gpu as gpus
    from mgpu_ops.core.op import problem_of

    spec = spec_of(op)
    if not isinstance(problem, spec.Problem):
        problem = problem_of(spec, problem)
    device = gpus.current() if gpu is None else gpus.find(gpu)
    if device is None:
        raise ValueError("no NVIDIA GPU is in use: name one, e.g. gpu='h200'")
    return database.explain(spec, problem, device)


def spec_of(op: str) -> Any:
    """The OpSpec of an op by name; ValueError names what there is."""
    if op not in SPECS:
        raise ValueError(f"op {op!r} is not one of {', '.join(SPECS)}")
    return SPECS[op]


__all__ = [
    "SPECS",
    "DatabaseError",
    "FlashAttentionBackwardConfig",
    "FlashAttentionConfig",
    "FlashAttentionProblem",
    "GroupedMatmulConfig",
    "GroupedMatmulProblem",
    "MatmulConfig",
    "MatmulProblem",
    "RaggedContractionProblem",
    "dot_product_attention",
    "explain",
    "flash_attention",
    "grouped_matmul",
    "matmul",
    "ragged_contraction",
    "ragged_dot",
    "spec_of",
    "use_configs",
]
