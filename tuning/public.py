"""Calls of the ops' public functions on a problem: what benchmarks time, and whether a call is refused."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import mgpu_ops
from mgpu_ops import (
    CrossEntropyProblem,
    EmbeddingProblem,
    FlashAttentionProblem,
    GatedGroupedMatmulProblem,
    GatedMatmulProblem,
    GroupedMatmulProblem,
    MatmulProblem,
    QuantizedGroupedMatmulProblem,
    QuantizedMatmulProblem,
    QuantizeProblem,
    RaggedContractionProblem,
    RmsNormProblem,
    RotaryProblem,
)
from mgpu_ops.attention.arguments import Arguments
from mgpu_ops.attention.flash_attention import attend
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.model import SOFT_CAP
from mgpu_ops.grouped.grouped_matmul.problem import by_name
from mgpu_ops.matmul import algorithms
from mgpu_ops.matmul.epilogue import names
from mgpu_ops.matmul.quantities import EPSILON
from mgpu_ops.matmul.quantized import problem as quantized
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.spec import OpSpec, Problem
from mgpu_ops.tuning.terminal import brief

BACKWARD = {"flash_attention": "flash_attention_backward"}  # the ops whose gradient is an op of its own


def _matmul(problem: MatmulProblem, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    p = problem
    options: dict[str, Any] = {"activation": p.activation, "out_dtype": p.out_dtype, "backend": backend}
    options |= {"transpose_a": p.layout[0] == "t", "transpose_b": p.layout[1] == "t"}
    options |= {"precision": algorithms.PRESETS.get(p.algorithm), "rms_epsilon": EPSILON if p.normalised else None}

    def call(a: jax.Array, b: jax.Array, *extra: jax.Array) -> jax.Array:
        arrays: dict[str, Any] = dict(zip(names(p)[2:], extra, strict=True))
        arrays.pop("epsilon", None)
        return mgpu_ops.matmul(a, b, **arrays, **options)

    return call


def _gated_matmul(problem: GatedMatmulProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for the gradients of gate and up and with a stored gate, as `jax.grad` runs them, the op itself."""
    if problem.gradient or problem.stored:
        return lambda *arrays: dispatch.run(mgpu_ops.spec_of("gated_matmul"), problem, arrays, config=None, backend=backend)
    options: dict[str, Any] = {"activation": problem.activation, "out_dtype": problem.out_dtype, "backend": backend}
    options |= {"transpose_w": problem.layout == "nt", "rms_epsilon": EPSILON if problem.normalised else None}

    def call(x: jax.Array, w_gate: jax.Array, w_up: jax.Array, *_: jax.Array) -> jax.Array:
        return mgpu_ops.gated_matmul(x, w_gate, None if problem.joined else w_up, **options)

    return call


def _quantized_matmul(problem: QuantizedMatmulProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    options: dict[str, Any] = {"out_dtype": problem.out_dtype, "transpose_w": problem.layout == "nt", "backend": backend}
    return lambda *arrays: mgpu_ops.quantized_matmul(**dict(zip(quantized.names(problem), arrays, strict=True)), **options)


def _quantized_grouped_matmul(problem: QuantizedGroupedMatmulProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for a shard, whose sizes the op takes otherwise, the op itself."""
    if problem.group_offset:
        spec = mgpu_ops.spec_of("quantized_grouped_matmul")
        return lambda *arrays: dispatch.run(spec, problem, arrays, config=None, backend=backend)
    options: dict[str, Any] = {"out_dtype": problem.out_dtype, "spread": problem.spread, "backend": backend}
    return partial(mgpu_ops.quantized_grouped_matmul, transpose_rhs=problem.layout == "nt", **options)


def _quantize(problem: QuantizeProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The op itself, with scales that are known; users call it through `quantize` and `fp8_matmul`."""
    return lambda *arrays: dispatch.run(mgpu_ops.spec_of("quantize"), problem, arrays, config=None, backend=backend)


def _grouped_matmul(problem: GroupedMatmulProblem, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    """The public function; for a shard, whose sizes the op takes otherwise, and for two products the op itself."""
    if problem.group_offset or problem.second:
        return lambda *arrays: dispatch.run(mgpu_ops.spec_of("grouped_matmul"), problem, arrays, config=None, backend=backend)
    options: dict[str, Any] = {"activation": problem.activation, "out_dtype": problem.out_dtype, "spread": problem.spread}
    options |= {"transpose_rhs": problem.layout == "nt", "backend": backend}

    def call(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *extra: jax.Array) -> jax.Array:
        return mgpu_ops.grouped_matmul(lhs, rhs, sizes, **by_name(problem, extra), **options)

    return call


def _gated_grouped_matmul(problem: GatedGroupedMatmulProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for a shard, the gradients of gate and up, where these are kept and with scales, the op itself."""
    spec = mgpu_ops.spec_of("gated_grouped_matmul")
    if problem.gradient or problem.group_offset or problem.keep or problem.scales != "none":
        return lambda *arrays: dispatch.run(spec, problem, arrays, config=None, backend=backend)
    options: dict[str, Any] = {"activation": problem.activation, "out_dtype": problem.out_dtype, "spread": problem.spread}
    options |= {"transpose_w": problem.layout == "nt", "backend": backend}

    def call(
        lhs: jax.Array, gate: jax.Array, up: jax.Array, sizes: jax.Array, row_indices: jax.Array | None = None
    ) -> jax.Array:
        return mgpu_ops.gated_grouped_matmul(lhs, gate, up, sizes, row_indices=row_indices, **options)

    return call


def _ragged_contraction(problem: RaggedContractionProblem, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    """The public function; for a shard, whose sizes the op takes otherwise, and for 8 bits stored transposed the op itself."""
    if problem.group_offset or problem.transposed:
        spec = mgpu_ops.spec_of("ragged_contraction")
        return lambda *arrays: dispatch.run(spec, problem, arrays, config=None, backend=backend)
    options: dict[str, Any] = {"out_dtype": problem.out_dtype, "spread": problem.spread, "backend": backend}
    return partial(mgpu_ops.ragged_contraction, **options)


def _flash_attention(problem: FlashAttentionProblem, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    p = problem
    if p.align == "top_left" and (p.segments or p.soft_cap or p.sinks or p.page_size or p.eight_bits):
        raise ValueError(
            "dot_product_attention, which aligns first tokens, has no segment ids, soft cap, sinks, pages or keys of 8 bits"
        )

    def call(q: jax.Array, k: jax.Array, v: jax.Array, *extra: jax.Array) -> jax.Array:
        inputs = Inputs.of(p, (None, *extra))
        lengths, segments = inputs.lengths or (None, None), inputs.segments or (None, None)
        left, right = (None if side < 0 else side for side in (p.window_left, p.window_right))
        shared: dict[str, Any] = {"bias": inputs.bias, "causal": p.causal, "window": (left, right), "backend": backend}
        shared |= {"q_lengths": lengths[0], "kv_lengths": lengths[1]}
        if p.align == "top_left":
            return attend(Arguments(q, k, v, align="top_left", **shared))[0]
        cap = SOFT_CAP if p.soft_cap else None
        shared |= {"q_segment_ids": segments[0], "kv_segment_ids": segments[1]}
        shared |= {"page_table": inputs.page_table, "sinks": None if inputs.sinks is None else inputs.sinks[0]}
        if inputs.kv_scales is not None:
            shared |= dict(zip(("k_scale", "v_scale"), inputs.kv_scales, strict=True))
        shared |= {"soft_cap": cap, "soft_cap_after_bias": p.soft_cap_after_bias}
        out = mgpu_ops.flash_attention(q, k, v, return_lse=False, **shared)
        assert isinstance(out, jax.Array)
        return out

    return call


def _flash_attention_backward(
    problem: FlashAttentionProblem, backend: dispatch.Backend | None
) -> Callable[..., tuple[jax.Array, ...]]:
    """The op itself, which users call through `jax.grad` of the forward op."""
    spec = mgpu_ops.spec_of("flash_attention_backward")
    return lambda *arrays: dispatch.run(spec, problem, arrays, config=None, backend=backend)


def _cross_entropy(problem: CrossEntropyProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for the gradient, which users get through `jax.grad`, the op itself."""
    if problem.gradient:
        return lambda *arrays: dispatch.run(mgpu_ops.spec_of("cross_entropy"), problem, arrays, config=None, backend=backend)
    return partial(mgpu_ops.cross_entropy, return_lse=True, backend=backend)


def _rms_norm(problem: RmsNormProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for the gradient, which users get through `jax.grad`, the op itself."""
    if problem.gradient:
        return lambda *arrays: dispatch.run(mgpu_ops.spec_of("rms_norm"), problem, arrays, config=None, backend=backend)
    return lambda x, w, _: mgpu_ops.rms_norm(x, w, epsilon=1e-5, backend=backend)


def _rotary(problem: RotaryProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The public function; for the gradient, which users get through `jax.grad`, the op itself."""
    p = problem
    if p.gradient:
        return lambda *arrays: dispatch.run(mgpu_ops.spec_of("rotary"), p, arrays, config=None, backend=backend)
    sequences = p.rows // max(p.positions, 1)
    rotate = partial(mgpu_ops.rotary_qkv, heads=p.heads, kv_heads=p.kv_heads, backend=backend)

    def call(qkv: jax.Array, cos: jax.Array, sin: jax.Array, *norms: jax.Array) -> Any:
        weights: dict[str, Any] = dict(zip(("q_norm", "k_norm"), norms, strict=False))  # and epsilon, which is the default
        parts = rotate(qkv.reshape(sequences, p.positions, -1), cos, sin, **weights)
        return jax.tree.map(lambda part: part.reshape(p.rows, *part.shape[2:]), parts)

    return call


def _embedding(problem: EmbeddingProblem, backend: dispatch.Backend | None) -> Callable[..., Any]:
    """The op itself, a gradient, which users get through `jax.grad`."""
    return lambda *arrays: dispatch.run(mgpu_ops.spec_of("embedding"), problem, arrays, config=None, backend=backend)


# op -> call(problem, backend): the public function on the arrays of `arrays_of`
CALLS: dict[str, Callable[[Any, dispatch.Backend | None], Callable[..., Any]]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "quantized_matmul": _quantized_matmul,
    "quantize": _quantize,
    "grouped_matmul": _grouped_matmul,
    "gated_grouped_matmul": _gated_grouped_matmul,
    "quantized_grouped_matmul": _quantized_grouped_matmul,
    "ragged_contraction": _ragged_contraction,
    "flash_attention": _flash_attention,
    "flash_attention_backward": _flash_attention_backward,
    "cross_entropy": _cross_entropy,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "embedding": _embedding,
}


def refusal(spec: OpSpec, problem: Problem) -> str | None:
    """The public function's error for a problem that no kernel runs; None where it runs the problem through XLA.

    Nothing is computed. None for collectives, whose arrays are on several GPUs.
    """
    if spec.name not in CALLS:
        return None
    if spec.name in BACKWARD.values():  # the public function is the forward one
        spec = mgpu_ops.spec_of(next(forward for forward, backward in BACKWARD.items() if backward == spec.name))
        fields = dataclasses.asdict(problem)
        problem = spec.Problem(**{field.name: fields[field.name] for field in dataclasses.fields(spec.Problem)})
    dtype = dataclasses.asdict(problem)["dtype"]
    floats = dataclasses.replace(problem, dtype="bfloat16")  # `inputs` may not make random numbers of every dtype
    try:
        arrays = jax.eval_shape(partial(spec.inputs, floats), jax.random.key(0))
    except (ArithmeticError, IndexError):  # nothing to make random numbers of
        return None
    as_asked = [jax.ShapeDtypeStruct(x.shape, dtype) if x.dtype == jnp.bfloat16 else x for x in arrays]
    try:
        jax.eval_shape(CALLS[spec.name](problem, "xla"), *arrays_of(spec, tuple(as_asked)))
    except (TypeError, ValueError, OverflowError) as error:
        return brief(error)
    return None


def arrays_of(spec: OpSpec, inputs: tuple) -> tuple:
    """The op's `inputs` that the call takes as arrays: attention's fourth, its scale and soft cap, are other arguments."""
    return (*inputs[:3], *inputs[4:]) if spec.name == "flash_attention" else inputs
