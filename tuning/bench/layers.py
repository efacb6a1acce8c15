"""A whole mixture-of-experts layer as something to measure: `mgpu-tune bench moe`, beside the same made of others' parts.

It is no op of `mgpu_ops.SPECS`: it has no config of its own, and those of its products are theirs.
"""

from __future__ import annotations

import dataclasses
import logging
import math
from collections.abc import Callable, Sequence
from functools import partial
from typing import Any

import jax
import jax.numpy as jnp

import mgpu_ops
from mgpu_ops import GroupedMatmulProblem
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_fields, itemsize_of
from mgpu_ops.grouped.calls import checked_spread
from mgpu_ops.registry import dispatch
from mgpu_ops.registry.spec import OpSpec


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """`mgpu_ops.moe` of x[tokens, d], with matrices [d, hidden] and [hidden, d] of each of the groups, the experts.

    spread: how the tokens spread over the experts, as in `grouped_matmul`; "sparse" sends them to half of the experts.
    """

    tokens: int
    d: int
    hidden: int
    groups: int
    top_k: int
    dtype: str = "bfloat16"
    spread: str = "random"

    def __post_init__(self) -> None:
        check_fields(self)

    @property
    def rows(self) -> int:
        """Assignments."""
        return self.tokens * self.top_k

    @property
    def gate_up(self) -> GroupedMatmulProblem:
        """Both first products in one."""
        return GroupedMatmulProblem(self.rows, 2 * self.hidden, self.d, self.groups, self.dtype, self.dtype, spread=self.spread)

    @property
    def down(self) -> GroupedMatmulProblem:
        return GroupedMatmulProblem(self.rows, self.d, self.hidden, self.groups, self.dtype, self.dtype, spread=self.spread)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """Nothing: the products have configs of their own."""


SHAPES = {
    "d2560-e64-16384": Problem(16384, 2560, 1280, 64, 4),
    "mixtral-8x7b-8192": Problem(8192, 4096, 14336, 8, 2),
    "deepseek-v3-ep8-4096": Problem(4096, 7168, 2048, 32, 8),
    "qwen3-30b-16384": Problem(16384, 2048, 768, 128, 8),
    "qwen3-235b-8192": Problem(8192, 4096, 1536, 128, 8),
    "qwen3-235b-8192-skewed": Problem(8192, 4096, 1536, 128, 8, spread="skewed"),
    "qwen3-30b-64": Problem(64, 2048, 768, 128, 8),
    "mixtral-8x7b-16": Problem(16, 4096, 14336, 8, 2),
}
_OTHER_MODELS = {  # of which no config is shipped for the products
    "olmoe-8192": Problem(8192, 2048, 1024, 64, 8),
    "gpt-oss-20b-8192": Problem(8192, 2880, 2880, 32, 4),
    "granite3-3b-8192": Problem(8192, 1536, 512, 40, 8),
    "deepseek-v2-lite-8192": Problem(8192, 2048, 1408, 64, 6),
    "glm4.5-air-8192": Problem(8192, 4096, 1408, 128, 8),
    "phi3.5-moe-8192": Problem(8192, 4096, 6400, 16, 2),
    "qwen2-57b-a14b-4096": Problem(4096, 3584, 2560, 64, 8),
    "llama4-scout-8192": Problem(8192, 5120, 8192, 16, 1),
    "gpt-oss-20b-64": Problem(64, 2880, 2880, 32, 4),
    "glm4.5-air-32": Problem(32, 4096, 1408, 128, 8),
}
SUITES: dict[str, Sequence[str]] = {
    "training": [name for name, p in SHAPES.items() if p.tokens >= 4096],
    "decoding": [name for name, p in SHAPES.items() if p.tokens < 4096],
    "other-models": list(_OTHER_MODELS),
}
SHAPES |= _OTHER_MODELS

# --- What it takes ----------------------------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Of the three products of each assignment; the router's is not in the layer."""
    return 6 * problem.rows * problem.d * problem.hidden


def bytes_moved(problem: Problem) -> int:
    """x and logits read, the matrices of the experts that have rows read once, the result written once."""
    p = problem
    used = min(p.groups, p.rows) if p.spread != "sparse" else max(1, min(p.groups // 2, p.rows))
    return (2 * p.tokens * p.d + 3 * used * p.d * p.hidden) * itemsize_of(p.dtype) + 4 * p.tokens * p.groups


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """x, router_logits, w_gate, w_up and w_down, so that results are about normal and tokens spread as the problem says."""
    p = problem
    keys = jax.random.split(key, 6)
    shapes = ((p.groups, p.d, p.hidden), (p.groups, p.d, p.hidden), (p.groups, p.hidden, p.d))
    weights = [jax.random.normal(k, shape, p.dtype) / math.sqrt(shape[1]) for k, shape in zip(keys, shapes, strict=False)]
    x = jax.random.normal(keys[3], (p.tokens, p.d), p.dtype)
    scores = jax.random.gumbel(keys[4], (p.tokens, p.groups), jnp.float32)  # a top_k of them draws without replacement
    return x, scores + _popularity(p, keys[5]), *weights


def _popularity(p: Problem, key: Any) -> jax.Array:
    """The logarithm of how likely each expert is."""
    rank = jax.random.permutation(key, jnp.arange(p.groups))
    if p.spread == "even":
        return jnp.zeros(p.groups)
    if p.spread == "skewed":
        return -jnp.log1p(rank.astype(jnp.float32))
    likely = jnp.log(jax.random.gamma(key, 4.0, (p.groups,)))
    return jnp.where(rank < max(p.top_k, p.groups // 2), likely, -1e9) if p.spread == "sparse" else likely


def reference(problem: Problem, *arrays: jax.Array) -> jax.Array:
    """The layer through XLA."""
    return call(problem, "xla")(*arrays)


def call(problem: Problem, backend: dispatch.Backend | None) -> Callable[..., jax.Array]:
    """The public function."""
    spread = checked_spread(problem.spread)  # type: ignore[arg-type]
    return partial(mgpu_ops.moe, top_k=problem.top_k, spread=spread, backend=backend)


def in_8_bits(problem: Problem, *arrays: jax.Array, state: mgpu_ops.Fp8GatedState | None = None) -> jax.Array:
    """The same by `mgpu_ops.fp8_moe`."""
    spread = checked_spread(problem.spread)  # type: ignore[arg-type]
    return partial(mgpu_ops.fp8_moe, top_k=problem.top_k, state=state, spread=spread)(*arrays)


GROUP = 128  # along k, of int4's scales


def quantized(w_dtype: str, problem: Problem, x: jax.Array, logits: jax.Array, *matrices: jax.Array) -> tuple[jax.Array, ...]:
    """The arrays of `of_quantized`, made in advance and untimed: int8 with scales of columns, or int4 with scales of groups."""
    gate, up, down = matrices
    found = []
    for w in (jnp.concatenate([gate, up], axis=2), down):
        groups, k, n = w.shape
        most, parts = (127, 1) if w_dtype == "int8" else (7, k // GROUP)
        values = w.astype(jnp.float32).reshape(groups, parts, k // parts, n)
        scales = (jnp.maximum(jnp.abs(values).max(2), 1e-30) / most).astype(x.dtype)
        rounded = jnp.clip(jnp.round(values / scales[:, :, None]), -most, most)
        found.append((rounded.reshape(w.shape).mT.astype(w_dtype), scales))
    (w_gate_up, of_gate_up), (w_down, of_down) = found
    return x, logits, w_gate_up, w_down, of_gate_up, of_down


def of_quantized(problem: Problem, *arrays: jax.Array) -> jax.Array:
    """The same by `mgpu_ops.quantized_moe`, of weights of 8 or 4 bits."""
    spread = checked_spread(problem.spread)  # type: ignore[arg-type]
    return partial(mgpu_ops.quantized_moe, top_k=problem.top_k, spread=spread)(*arrays)


def unfit(w_dtype: str, problem: Problem, gpu: Gpu) -> str | None:
    """Why a problem has no weights of this dtype, or None: groups do not divide it."""
    p = problem
    if w_dtype == "int4" and (p.d % GROUP or p.hidden % GROUP):
        return f"takes d and hidden in multiples of {GROUP}, not {p.d} and {p.hidden}"
    return None


def state_after(problem: Problem, arrays: tuple[jax.Array, ...], steps: int = 2) -> mgpu_ops.Fp8GatedState:
    """What delayed scaling knows of these arrays after some steps, the gradient of whose result is random."""
    g = jax.random.normal(jax.random.key(3), arrays[0].shape, arrays[0].dtype)

    def value(state: mgpu_ops.Fp8GatedState, *arrays: jax.Array) -> jax.Array:
        out = in_8_bits(problem, *arrays, state=state)
        return jnp.sum(out.astype(jnp.float32) * g)

    state, step = mgpu_ops.Fp8GatedState.init(16), jax.jit(jax.grad(value))
    for _ in range(steps):
        state = step(state, *arrays)
    return state


def _nothing(*_: Any) -> None:
    return None


SPEC = OpSpec(
    name="moe",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes=SHAPES,
    suites=SUITES,
    space=lambda problem, gpu: {},
    supports=_nothing,
    check=_nothing,
    candidates=lambda problem, gpu: [Config()],
    default=lambda problem, gpu: Config(),
    cost=lambda problem, config, gpu: bytes_moved(problem) / gpu.memory_bytes_per_s,
    distance=lambda x, y: 0.0 if x == y else None,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=lambda problem, config, gpu, *arrays, interpret=False: reference(problem, *arrays),
    reference=reference,
    tolerance=lambda problem: 3e-2,  # hidden activations, an expert's result and their sum are each rounded to 16 bits
)


# --- The same of others' parts ----------------------------------------------------------------------------------------

type Product = Callable[[jax.Array, jax.Array, jax.Array], jax.Array]  # of rows, matrices and group sizes


def fused(problem: Problem, x: jax.Array, logits: jax.Array, gate: jax.Array, up: jax.Array, down: jax.Array) -> tuple:
    """The arrays of `composed`: matrices of gate and up side by side, made in advance and untimed."""
    return x, logits, jnp.concatenate([gate, up], axis=2), down


def unfused(answers: tuple) -> tuple:
    """A result of `composed` with the gradients that ours has, for comparison."""
    out, *gradients = jax.tree.leaves(answers)
    if not gradients:
        return (out,)
    dx, dlogits, dgate_up, ddown = gradients
    return (out, dx, dlogits, *jnp.split(dgate_up, 2, axis=2), ddown)


def composed(
    problem: Problem, gate_up: Product, down: Product, x: jax.Array, logits: jax.Array, w_gate_up: jax.Array, w_down: jax.Array
) -> jax.Array:
    """A layer as programs write it: tokens gathered by a sort, two grouped products, XLA between them, a scatter-add."""
    weights, experts = jax.lax.top_k(jax.nn.softmax(logits), problem.top_k)
    weights /= weights.sum(axis=1, keepdims=True)
    order = jnp.argsort(experts.reshape(-1), stable=True)
    token = order // problem.top_k
    sizes = jnp.bincount(experts.reshape(-1), length=problem.groups).astype(jnp.int32)
    gate, up = jnp.split(gate_up(x[token], w_gate_up, sizes), 2, axis=1)
    rows = down(jax.nn.silu(gate) * up, w_down, sizes).astype(jnp.float32) * weights.reshape(-1)[order][:, None]
    return jnp.zeros(x.shape, jnp.float32).at[token].add(rows).astype(x.dtype)


def composed_of_lax(problem: Problem, *arrays: jax.Array) -> jax.Array:
    return composed(problem, jax.lax.ragged_dot, jax.lax.ragged_dot, *arrays)


@jax.custom_vjp
def ragged_dot_of_jax(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """`jax.lax.ragged_dot` by JAX's Pallas kernels for Hopper GPUs, with its gradients.

    lhs: [m, k]; rhs: [groups, k, n]; k and n in multiples of 64. The settings are those that won most often where they were
    tuned (results/2026-11-23-h200-moe+grad-fastest.csv), with blocks that divide n, and of 64 rows where a group has that few.
    Of a contraction the raster need not divide n.
    """
    return _ragged_dot_of_jax(lhs, rhs, sizes, transposed=False)


def _ragged_dot_of_jax(lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, transposed: bool) -> jax.Array:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu as theirs

    if rhs.shape[1] % 64 or rhs.shape[2] % 64:
        raise ValueError(f"rhs{rhs.shape}: JAX's ragged_dot takes k and n in multiples of 64")
    n = rhs.shape[1 if transposed else 2]
    block_n = next(block for block in (128, 192, 64) if n % block == 0)
    raster = next(raster for raster in (4, 2, 1) if n % (raster * block_n) == 0)
    block_m = 128 if lhs.shape[0] > 64 * len(sizes) else 64
    blocks: dict[str, Any] = {"block_m": block_m, "block_n": block_n, "block_k": 64, "max_concurrent_steps": 5}
    blocks["grid_block_n"] = raster
    out: jax.Array = theirs.ragged_dot(lhs, rhs, group_sizes=sizes, transpose_rhs=transposed, **blocks)
    return out


def _ragged_gradients(saved: tuple[jax.Array, ...], g: jax.Array) -> tuple[jax.Array, jax.Array, None]:
    from jax.experimental.pallas.ops.gpu import transposed_ragged_dot_mgpu as theirs

    lhs, rhs, sizes = saved
    block_m, block_n = (128 if size % 128 == 0 else 64 for size in rhs.shape[1:])
    blocks = {"block_m": block_m, "block_n": block_n, "block_k": 64, "max_concurrent_steps": 5, "grid_block_n": 4}
    weights = theirs.transposed_ragged_dot(lhs, g, group_sizes=sizes, **blocks)
    return _ragged_dot_of_jax(g, rhs, sizes, transposed=True), weights, None


ragged_dot_of_jax.defvjp(lambda *arrays: (ragged_dot_of_jax(*arrays), arrays), _ragged_gradients)


def composed_of_tokamax(problem: Problem, *arrays: jax.Array) -> jax.Array:
    """With tokamax's ragged_dot as it chooses its own kernel and config."""
    logging.getLogger("absl").setLevel(logging.ERROR)
    import tokamax  # type: ignore[import-not-found, unused-ignore]

    return composed(problem, tokamax.ragged_dot, tokamax.ragged_dot, *arrays)


def expanded_bytes(problem: Problem, gpu: Gpu) -> str | None:
    """Why `jax.lax.ragged_dot`, which multiplies all rows for each group, is not run."""
    p = problem
    size = p.groups * p.rows * (p.d + 2 * p.hidden) * itemsize_of(p.dtype)
    if size > gpu.memory_bytes / 8:
        return f"is not run: it expands its operands to {size / 1e9:.0f} GB, and takes {p.groups} times the arithmetic"
    return None
