"""What `mgpu_ops` offers: its ops, their problems and configs, and what tells and changes which config runs."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager
from typing import Any, Literal

from mgpu_ops import flags
from mgpu_ops.attention.dot_product_attention import dot_product_attention
from mgpu_ops.attention.flash_attention import flash_attention
from mgpu_ops.attention.problem import BackwardConfig as FlashAttentionBackwardConfig
from mgpu_ops.attention.problem import Config as FlashAttentionConfig
from mgpu_ops.attention.problem import Problem as FlashAttentionProblem
from mgpu_ops.collectives import Config as CollectiveConfig
from mgpu_ops.collectives import Problem as CollectiveProblem
from mgpu_ops.collectives import all_gather, all_reduce, collective_workspace, reduce_scatter
from mgpu_ops.core import extras
from mgpu_ops.core.gpu import target
from mgpu_ops.core.limits import unhashable_field
from mgpu_ops.cross_entropy import Config as CrossEntropyConfig
from mgpu_ops.cross_entropy import Problem as CrossEntropyProblem
from mgpu_ops.cross_entropy import cross_entropy
from mgpu_ops.embedding import Config as EmbeddingConfig
from mgpu_ops.embedding import Problem as EmbeddingProblem
from mgpu_ops.embedding import embedding
from mgpu_ops.fp8_grouped import fp8_grouped_matmul
from mgpu_ops.fp8_moe import fp8_moe, fp8_moe_experts
from mgpu_ops.grouped.config import Config as GroupedMatmulConfig
from mgpu_ops.grouped.dot_general import ragged_dot_general
from mgpu_ops.grouped.gated import Problem as GatedGroupedMatmulProblem
from mgpu_ops.grouped.gated import gated_grouped_matmul
from mgpu_ops.grouped.grouped_matmul import Problem as GroupedMatmulProblem
from mgpu_ops.grouped.grouped_matmul import grouped_matmul, ragged_dot
from mgpu_ops.grouped.ragged_contraction import Problem as RaggedContractionProblem
from mgpu_ops.grouped.ragged_contraction import ragged_contraction
from mgpu_ops.matmul import Config as MatmulConfig
from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.matmul import matmul
from mgpu_ops.matmul.dot_general import dot_general
from mgpu_ops.matmul.einsum import einsum
from mgpu_ops.matmul.fp8 import Fp8State, fp8_matmul
from mgpu_ops.matmul.fp8_gated import Fp8GatedState, fp8_gated_mlp
from mgpu_ops.matmul.gated import Config as GatedMatmulConfig
from mgpu_ops.matmul.gated import Problem as GatedMatmulProblem
from mgpu_ops.matmul.gated import gated_matmul
from mgpu_ops.matmul.gated.activation import gated_activation
from mgpu_ops.matmul.gated.layer import gated_mlp
from mgpu_ops.matmul.quantize import quantize
from mgpu_ops.matmul.quantized import Config as QuantizedMatmulConfig
from mgpu_ops.matmul.quantized import Problem as QuantizedMatmulProblem
from mgpu_ops.matmul.quantized import quantized_matmul
from mgpu_ops.matmul.quantizing import Config as QuantizeConfig
from mgpu_ops.matmul.quantizing import Problem as QuantizeProblem
from mgpu_ops.moe import MoeDispatch, moe, moe_combine, moe_dispatch, moe_experts, moe_route
from mgpu_ops.ops import SPECS, spec_of
from mgpu_ops.quantized_grouped import Problem as QuantizedGroupedMatmulProblem
from mgpu_ops.quantized_grouped import quantized_grouped_matmul
from mgpu_ops.quantized_moe import quantized_moe, quantized_moe_experts
from mgpu_ops.registry.capture import capture
from mgpu_ops.registry.database import AnyPath, DatabaseError
from mgpu_ops.rms_norm import Config as RmsNormConfig
from mgpu_ops.rms_norm import Problem as RmsNormProblem
from mgpu_ops.rms_norm import rms_norm
from mgpu_ops.rotary import Config as RotaryConfig
from mgpu_ops.rotary import Problem as RotaryProblem
from mgpu_ops.rotary import rotary_qkv
from mgpu_ops.rotary.into_cache import rotary_into_cache
from mgpu_ops.rotary_attention import rotary_attention

type OpName = Literal[
    "matmul",
    "gated_matmul",
    "quantized_matmul",
    "quantize",
    "grouped_matmul",
    "gated_grouped_matmul",
    "ragged_contraction",
    "quantized_grouped_matmul",
    "flash_attention",
    "flash_attention_backward",
    "cross_entropy",
    "rms_norm",
    "rotary",
    "embedding",
    "all_reduce",
    "reduce_scatter",
    "all_gather",
]


def explain(op: OpName, problem: Any, gpu: str | None = None) -> str:
    """Whether `op` runs `problem` in the kernel or through XLA, with both times, with which config, and why; as text.

    Args:
      op: one of `mgpu_ops.SPECS`: "matmul", "flash_attention", "all_reduce" ...
      problem: the op's Problem, or its fields as a mapping, e.g. `{"m": 4096, "n": 4096, "k": 4096}`.
      gpu: a name such as "h200" or "NVIDIA H200"; the running GPU by default.

    Raises ValueError for an unknown op or GPU, for what is no problem of the op, and for a field of another type.
    """
    from mgpu_ops.core import gpu as gpus
    from mgpu_ops.registry import resolution
    from mgpu_ops.registry.spec import problem_of

    spec = spec_of(op)
    if not isinstance(problem, spec.Problem):
        problem = problem_of(spec, problem)
    device = gpus.current() if gpu is None else gpus.find(gpu)
    if device is None:
        raise ValueError("no NVIDIA GPU is in use: name one, e.g. gpu='h200'")
    return resolution.explain(spec, problem, device)


def use_configs(configs: Mapping[str, Any] | AnyPath) -> AbstractContextManager[None]:
    """Uses `configs` inside a `with`, in this thread; the innermost block that has one wins.

    `configs` maps an op's name to a Config, for every problem, or to a list of (Problem, Config); or it is the path of a
    database file, read once here. In place of a Config, "xla" lets XLA run what it can run instead of the kernel
    (`Baseline.differs`). A jitted function is traced again where the configs differ. A backward pass that JAX traces after the
    block does not see them.

    Raises ValueError for an unknown op, TypeError for what is no Config or Problem of the op; a config that cannot run raises
    at the call.
    """
    from mgpu_ops.registry import resolution

    for op, answer in configs.items() if isinstance(configs, Mapping) else ():
        spec, found = spec_of(op), resolution.frozen(op, answer)
        for problem, config in found if isinstance(found, tuple) else [(None, found)]:
            for given, kind in ((problem, spec.Problem), (config, spec.Config)):
                if given is not None and given != "xla" and not isinstance(given, kind):
                    what = f"not a {_public_name(type(given))}, {given!r:.80}"
                    raise TypeError(f"use_configs: {op} takes a {_public_name(kind)}, {what}")
            if config != "xla" and (fault := unhashable_field(config)) is not None:
                raise TypeError(f"use_configs: {op}: {fault}")
    return resolution.use_configs(configs)


def _public_name(kind: type) -> str:
    """ "mgpu_ops.MatmulConfig": each op's Problem and Config have these names in its own module."""
    return next((f"mgpu_ops.{name}" for name in __all__ if globals()[name] is kind), kind.__qualname__)


def autotune(
    function: Callable[..., Any],
    *args: Any,
    gpu: str | None = None,
    trials: int = 32,
    budget: float = 60.0,
    store: bool = True,
) -> AbstractContextManager[None]:
    """Tunes what `function(*args)` would run, and returns the context to run it under: `with autotune(step, x): step(x)`.

    The problems are those of `capture`. One that has a measured entry of its own already, be it stored or shipped, is not tuned
    again: the second start of a program costs a trace. Tuning happens here and now, in worker processes on the GPU.

    Args:
      function, args: as `capture` takes them; nothing of them is run. Arrays may be `jax.ShapeDtypeStruct`.
      gpu: a GPU to model, e.g. "h200", where there is none to measure on.
      trials, budget: candidates and seconds for each problem, at most.
      store: keep what was found in the user's database.

    In a job of several processes all must call it, in the same order: process 0 tunes, the others wait for what it found.

    A program that calls it at its top level must do so under `if __name__ == "__main__":`, as every program whose processes
    start others, and before its own arrays fill the GPU, or with XLA_PYTHON_CLIENT_PREALLOCATE=false in the environment.

    Raises ValueError without a Hopper GPU and without `gpu`, for trials that are no whole number of at least 1 and a budget
    that is no number above 0; what `capture` raises; ImportError without the extra "tune".
    """
    extras.require("mgpu_ops.autotune", ["optuna"])
    from mgpu_ops.tuning.autotune import autotuned  # only here: nothing else in the package loads the tuner

    return autotuned(function, args, gpu=gpu, trials=trials, budget=budget, store=flags.checked("store", store))


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
    "Fp8GatedState",
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
    "dot_general",
    "dot_product_attention",
    "einsum",
    "embedding",
    "explain",
    "flash_attention",
    "fp8_gated_mlp",
    "fp8_grouped_matmul",
    "fp8_matmul",
    "fp8_moe",
    "fp8_moe_experts",
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
    "quantized_moe",
    "quantized_moe_experts",
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
