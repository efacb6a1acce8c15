"""`JAX_ENABLE_X64`: every op compiles the kernel that it compiles without, and interpreted it gives what XLA gives."""

from __future__ import annotations

import functools
import os
import re
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import SPECS
from mgpu_ops.core import gpu
from mgpu_ops.registry.spec import OpSpec
from tests.thorough import ALL, cases

H200 = gpu.find("h200")


def kernels(run: Callable[..., Any], *shapes: Any) -> list[str]:
    """The code of each Mosaic kernel of run(*shapes), with the shapes of what it reads and writes."""
    with gpu.target(H200):
        text = jax.jit(run).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    return re.findall(r"custom_call @mosaic_gpu\S*?\(.*?\) (\{.*)", text)


@pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
def test_every_op_has_the_same_kernel_with_x64_as_without(spec: OpSpec):
    problem = min(spec.shapes.values(), key=spec.bytes)
    run = functools.partial(spec.run, problem, spec.default(problem, H200), H200)
    shapes = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
    without = kernels(run, *shapes)
    with jax.enable_x64(True):
        assert kernels(run, *shapes) == without
    assert without


def draw(*shape: int) -> np.ndarray:
    return np.random.default_rng(0).standard_normal(shape).astype(jnp.bfloat16)


def gradients(function: Callable[..., jax.Array], *arrays: np.ndarray) -> tuple[jax.Array, ...]:
    argnums = tuple(range(len(arrays)))
    return jax.grad(lambda *arrays: function(*arrays).astype("float32").sum(), argnums)(*arrays)


def on_two_devices(collective: Callable[[jax.Array], jax.Array]) -> jax.Array:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
    each = jax.shard_map(lambda x: collective(x[0])[None], mesh=mesh, in_specs=jax.P("d"), out_specs=jax.P("d"))
    return jax.jit(each)(draw(2, 2, 512))


A, W, Q, FEW, KEYS = draw(64, 64), draw(2, 64, 64), draw(1, 64, 2, 64), draw(1, 1, 4, 64), draw(1, 128, 2, 64)
NEXT = mgpu_ops.FlashAttentionBackwardConfig("fused", 64, 128, 3, 4, 24, "next", "apart", "memory")
SIZES, LOGITS, TURNS = np.array([30, 34]), draw(64, 256), np.ones((64, 32))
CASES: dict[str, Callable[..., Any]] = {  # with the backend, by what is called
    "matmul": lambda **b: gradients(functools.partial(mgpu_ops.matmul, **b), A, W[0]),
    "matmul of vmap": lambda **b: jax.vmap(functools.partial(mgpu_ops.matmul, activation="gelu", bias=A[0], **b))(W, W),
    "gated_matmul": lambda **b: gradients(functools.partial(mgpu_ops.gated_matmul, **b), A, W[0], W[1]),
    "gated_mlp": lambda **b: gradients(functools.partial(mgpu_ops.gated_mlp, **b), A, W[0], W[1], W[0].T),
    "quantized_matmul": lambda **b: mgpu_ops.quantized_matmul(
        A, np.arange(64 * 64).astype(np.int8).reshape(64, 64), W[0, :1], transpose_w=True, **b
    ),
    "quantized_grouped_matmul": lambda **b: mgpu_ops.quantized_grouped_matmul(
        A, np.arange(2 * 64 * 64).astype(np.int8).reshape(2, 64, 64), W[:, 0], jnp.asarray(SIZES), transpose_rhs=True, **b
    ),
    "grouped_matmul": lambda **b: gradients(lambda a, w: mgpu_ops.grouped_matmul(a, w, jnp.asarray(SIZES), **b), A, W),
    "gated_grouped_matmul": lambda **b: gradients(
        lambda a, w, v: mgpu_ops.gated_grouped_matmul(a, w, v, jnp.asarray(SIZES), **b), A, W, W
    ),
    "ragged_contraction": lambda **b: mgpu_ops.ragged_contraction(A, A, jnp.asarray(SIZES), **b),
    "flash_attention": lambda **b: gradients(functools.partial(mgpu_ops.flash_attention, causal=True, **b), Q, Q, Q),
    "decoding": lambda **b: mgpu_ops.flash_attention(FEW, KEYS, KEYS, kv_lengths=jnp.asarray([100]), **b),
    "rms_norm": lambda **b: gradients(lambda x, w: mgpu_ops.rms_norm(x, w, **b), LOGITS, LOGITS[0]),
    "rotary_qkv": lambda **b: gradients(
        lambda x: jnp.concatenate(mgpu_ops.rotary_qkv(x, TURNS, TURNS, heads=2, kv_heads=2, **b), 1), draw(64, 384)
    ),
    "rotary_qkv with norms": lambda **b: gradients(
        lambda x, w: jnp.concatenate(
            mgpu_ops.rotary_qkv(x, TURNS, TURNS, heads=2, kv_heads=2, q_norm=w[0], k_norm=w[1], **b), 1
        ),
        draw(64, 384),
        draw(2, 64),
    ),
    "rotary_into_cache with norms": lambda **b: mgpu_ops.rotary_into_cache(
        *(draw(2, 12 * 64), TURNS[:2], TURNS[:2], draw(2, 8, 4, 64), draw(2, 8, 4, 64), np.array([3, 4])),
        rms_rows=draw(2, 128),
        q_norm=np.ones(64),
        k_norm=np.ones(64),
        **b,
    ),
    "rotary_attention": lambda **b: gradients(
        lambda x: mgpu_ops.rotary_attention(x, *2 * [np.ones((64, 64))], heads=2, kv_heads=2, backward_config=NEXT, **b),
        draw(64, 768),
    ),
    "embedding": lambda **b: gradients(lambda x: mgpu_ops.embedding(x, np.arange(64) // 3, **b), LOGITS),
    "cross_entropy": lambda **b: gradients(lambda x: mgpu_ops.cross_entropy(x, np.arange(64), **b), LOGITS),
    "all_reduce": lambda **b: on_two_devices(functools.partial(mgpu_ops.all_reduce, axis_name="d", **b)),
    "reduce_scatter": lambda **b: on_two_devices(functools.partial(mgpu_ops.reduce_scatter, axis_name="d", **b)),
    "all_gather": lambda **b: on_two_devices(functools.partial(mgpu_ops.all_gather, axis_name="d", **b)),
}
IN_PROCESS, IN_CONTEXT = ("matmul of vmap", "all_reduce"), ("matmul of vmap", "decoding")


def check(case: str) -> None:
    """The interpreted kernel gives what XLA gives, in the same dtype."""
    ours, xla = (jax.tree.leaves(CASES[case](backend=backend)) for backend in ("interpret", "xla"))
    for out, wanted in zip(ours, xla, strict=True):
        assert out.dtype == wanted.dtype == "bfloat16"
        out, wanted = np.asarray(out, np.float64), np.asarray(wanted, np.float64)
        assert np.abs(out - wanted).max() < 0.06 * np.abs(wanted).max(), case


def test_interpreted_in_a_process_with_x64_every_op_is_right():
    """The variable is set for all threads of the process."""
    code = f"from tests.mgpu_ops.test_x64 import check\nfor case in {tuple(CASES) if ALL else IN_PROCESS}:\n    check(case)"
    done = subprocess.run(
        [sys.executable, "-c", code], env=os.environ | {"JAX_ENABLE_X64": "1"}, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize("case", cases(CASES, in_all=CASES.keys() - IN_CONTEXT))
def test_interpreted_within_enable_x64_every_op_is_right(case):
    """Only the calling thread has x64 then: not those that the interpreter starts."""
    with jax.enable_x64(True):
        check(case)
