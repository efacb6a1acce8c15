"""What a gated matmul is (`Problem`), how it may be run (`Config`), and which of them fit together (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import gemm, limits
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_fields, itemsize_of, supports_dtypes, supports_rows, supports_sizes
from mgpu_ops.matmul import checks
from mgpu_ops.matmul import problem as matmul
from mgpu_ops.matmul.quantities import EPSILON
from mgpu_ops.models import MODELS

# --- What is computed, and how fast -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[m, n] = activation(gate) * up with gate = x[m, k] w_gate[k, n] and up = x w_up, or the gradients of gate and up.

    With `stored`, gate is an input, and one product is computed: up = x w_up, and out. With `gradient` too, up is an input as
    well, and x w is the gradient of out: a later product's gradient times its weights.

    m: rows of x and of the result.
    n: columns of each weight and of the result.
    k: what is summed over.
    dtype: of x and the weights, "bfloat16" or "float16" in the kernel.
    out_dtype: of the result, dtype or "float32".
    layout: "nn", or "nt" where both weights are stored as [n, k].
    activation: "none", "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf".
    gradient: whether the results are g up activation'(gate) and g activation(gate), of the result's gradient g, both of dtype.
    stored: whether gate, and for the gradient up, are inputs.
    normalised: whether rows of x are divided by sqrt(mean over k of x^2 + epsilon), epsilon[1] float32.
    joined: whether gate and up are the columns of one weight, [k, 2 n], gate's first. XLA then has one product.
    """

    m: int
    n: int
    k: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    activation: str = "silu"
    gradient: bool = False
    stored: bool = False
    normalised: bool = False
    joined: bool = False

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block of the kernel works. Every field is tuned. None changes the result.

    tile_m: rows of a block's output tile, up to 256.
    tile_n: columns of a block's output tile, up to 256; there is an accumulator of that size for each product.
    tile_k: depth of one pipeline step, in elements of k: it loads a tile of x and one of each weight.
    max_concurrent_steps: stages of the pipeline in shared memory, 2 or more.
    compute_warpgroups: consumer warpgroups of a block, 1 or 2, beside the producer.
    wg_dimension: the side of the output tile that two consumer warpgroups share, "m" or "n".
    cluster: which blocks load a shared operand once (multicast): "none"; "m" or "n": two, adjacent along it.
    raster_dimension: along which side tiles are walked in strips, "m" or "n".
    raster_width: tiles that such a strip is wide, 1 or more.
    epilogue_tile_n: columns of an epilogue tile, the unit of up to 64 rows in which results are stored.
    memory_registers: registers of a producer thread, a multiple of 8 from 24 to 128; consumers share the rest.
    schedule: as matmul's: "cooperative" for two products, "pingpong" for one.
    """

    tile_m: int
    tile_n: int
    tile_k: int
    max_concurrent_steps: int
    compute_warpgroups: int
    wg_dimension: str
    cluster: str
    raster_dimension: str
    raster_width: int
    epilogue_tile_n: int
    memory_registers: int
    schedule: str = "cooperative"

    @property
    def takes_turns(self) -> bool:
        return self.schedule == "pingpong"


_MODELS = {"llama3-8b": "silu", "llama3-70b": "silu", "gemma2-9b": "gelu"}  # Mistral 7B's is that of Llama-3 8B
_TOKENS = (128, 4096, 8192)


def _of_model(name: str, tokens: int) -> Problem:
    layer = MODELS[name].projections["gate_up"]
    return Problem(tokens, layer.n // 2, layer.k, activation=_MODELS[name])


SHAPES: dict[str, Problem] = {f"{model}-{m}": _of_model(model, m) for model in _MODELS for m in _TOKENS}
_FORWARD = list(SHAPES)
SHAPES |= {f"{name}-gradient": replace(SHAPES[name], gradient=True) for name in _FORWARD}
_BOTH = list(SHAPES)
SHAPES |= {f"{name}-stored": replace(SHAPES[name], stored=True) for name in _FORWARD if SHAPES[name].m > 128}
SHAPES |= {
    f"{name}-gradient": replace(p, gradient=True, layout="nt") for name, p in [*SHAPES.items()] if name.endswith("-stored")
}
SUITES: dict[str, Sequence[str]] = {
    "llm": _FORWARD,
    "gradient": [name for name in _BOTH if name not in _FORWARD],
    "stored": [name for name in SHAPES if name not in _BOTH],
    **{model: [name for name in SHAPES if name.startswith(model)] for model in _MODELS},
}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if reason := supports_dtypes(p.dtype, p.out_dtype, gpu):
        return reason
    if p.layout not in ("nn", "nt"):
        return f"layout {p.layout!r} is neither 'nn' nor 'nt'"
    if p.activation not in ACTIVATIONS:
        return f"activation {p.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if p.gradient and p.out_dtype != p.dtype:
        return f"out_dtype {p.out_dtype} is not {p.dtype}: gradients have the inputs' dtype"
    if p.normalised and (p.gradient or p.stored):
        return "normalised rows have no gradient of their own, and no stored gate: x is normalised before"
    if p.joined and (p.gradient or p.stored):
        return "gradients, and products with a stored gate, are of weights that lie apart: leave joined out"
    if p.stored and p.out_dtype != p.dtype:
        return f"out_dtype {p.out_dtype} is not {p.dtype}: with a stored gate all arrays have the inputs' dtype"
    if reason := supports_sizes(p, ("m", "n", "k")):
        return reason
    if reason := checks.supports_work(p, 1, gpu, "the rows"):
        return reason
    weights = ("k", p.k, 2) if p.layout == "nt" else ("n", p.n, 2)
    output = ("n", p.n, itemsize_of(p.out_dtype))
    return supports_rows({"x": ("k", p.k, 2), "the weights": weights, "the output": output})


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason. Kernel, tuner and tests ask here."""
    reason = supports(problem, gpu) or gemm.check_choices(config, _CHOICES) or _check_turns(problem, config)
    if reason is not None:
        return reason
    p, c = of_one(problem), as_matmul(config)
    return (
        checks.check_norm(problem.normalised, c)
        or checks.check_schedule(p, c)
        or _check_stored(problem, config)
        or _check_cluster(p, c)
        or checks.check_counts(p, c, gpu)
        or gemm.check_accumulator(c, matmul.consumer_registers(c, gpu), accumulators=_accumulators_in_all(problem, c))
        or limits.check_smem(smem_bytes(problem, config), gpu)
    )


_CHOICES = {"cluster": ("none", "m", "n"), "raster_dimension": ("m", "n"), "schedule": gemm.SCHEDULES}


def _check_turns(p: Problem, c: Config) -> str | None:
    """One product's warpgroups take turns, so that the epilogue's reads and writes take no time; those of two share tiles."""
    if c.takes_turns != p.stored:
        wanted = "pingpong" if p.stored else "cooperative"
        return f"schedule={c.schedule!r} must be {wanted!r} {'with' if p.stored else 'without'} a stored gate"
    return checks.check_turns(as_matmul(c))


def _check_stored(p: Problem, c: Config) -> str | None:
    """Tiles of weights are as wide as those of the output."""
    if not p.stored or matmul.columns_of_b(of_one(p), as_matmul(c)) == c.tile_n:
        return None
    return f"tile_n={c.tile_n} must be a multiple of 64 with a stored gate and weights stored [k, n]"


def _check_cluster(p: matmul.Problem, c: matmul.Config) -> str | None:
    """Each block of a cluster has a tile."""
    tiles_m, tiles_n = math.ceil(p.m / c.tile_m), math.ceil(p.n / c.tile_n)
    if (c.cluster == "m" and tiles_m % 2) or (c.cluster == "n" and tiles_n % 2):
        return f"cluster={c.cluster!r} needs an even number of tiles along it, but there are {tiles_m} x {tiles_n}"
    return None


# --- What a config takes --------------------------------------------------------------------------------------------


def of_one(p: Problem) -> matmul.Problem:
    """One of both products, as a matmul."""
    return matmul.Problem(p.m, p.n, p.k, p.dtype, p.out_dtype, p.layout)


def as_matmul(c: Config) -> matmul.Config:
    """The config of one product, as a matmul's."""
    return matmul.Config(**vars(c), split_k=1)


SLOTS = 2  # pairs of epilogue tiles that a consumer warpgroup loads or stores at once, with a stored gate


def buffers(p: Problem, c: Config) -> int:
    """Epilogue buffers of a consumer warpgroup: two at most for a result, and those of `gradient_buffers`; or pairs of them."""
    if p.stored:
        return 2 * SLOTS
    return min(2, gemm.epilogue_tiles(c)) + gradient_buffers(p, c)


def gradient_buffers(p: Problem, c: Config) -> int:
    """Buffers into which the result's gradient is loaded while the products are computed: all of the tile."""
    return gemm.epilogue_tiles(c) if p.gradient else 0


def _accumulators_in_all(p: Problem, c: matmul.Config) -> float:
    """What accumulators take, in those of one product: both, and that of a warpgroup's rows times themselves."""
    squares = gemm.ROWS**2 / math.prod(gemm.warpgroup_tile(c)) if p.normalised else 0.0
    return (1 if p.stored else 2) + squares


def smem_bytes(p: Problem, c: Config) -> int:
    """Bytes of shared memory that a block takes."""
    barriers = c.compute_warpgroups if p.gradient else 0
    if p.stored:  # each consumer has `full` barriers of its own
        barriers = SLOTS * c.compute_warpgroups + c.max_concurrent_steps
    b_tiles = 1 if p.stored else 2
    return gemm.Storage(
        c, buffers(p, c), itemsize_of(p.out_dtype), barriers=barriers, b_tiles=b_tiles, reduces=p.normalised
    ).bytes


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Multiplications and additions of both products, or of the one."""
    return (2 if problem.stored else 4) * problem.m * problem.n * problem.k


def bytes_moved(problem: Problem) -> int:
    """Each input read once and each output written once."""
    p = problem
    arrays = (3 if p.gradient else 1) + 2 * p.stored - (p.stored and p.gradient)  # of the result's size
    weights = 1 if p.stored else 2
    return (p.m + weights * p.n) * p.k * itemsize_of(p.dtype) + arrays * p.m * p.n * itemsize_of(p.out_dtype)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """x, w_gate and w_up, and the gradient of the result where the problem has one; gate and up are about normal.

    With a stored gate x, its weight and gate, and for the gradient up. A joined weight comes twice.
    """
    p = problem
    keys = jax.random.split(key, 4)
    if p.stored:
        w = jax.random.normal(keys[0], (p.n, p.k) if p.layout == "nt" else (p.k, p.n), p.dtype) / math.sqrt(p.k)
        given = (jax.random.normal(k, (p.m, p.n), p.dtype) for k in keys[2 : 4 if p.gradient else 3])
        return jax.random.normal(keys[1], (p.m, p.k), p.dtype), w, *given
    shape = (p.n, p.k) if p.layout == "nt" else (p.k, p.n)
    weights = [jax.random.normal(k, shape, p.dtype) / math.sqrt(p.k) for k in keys[:2]]
    if p.joined:
        weights = 2 * [join(p, *weights)]
    x = jax.random.normal(keys[2], (p.m, p.k), p.dtype)
    epsilon = [jnp.full((1,), EPSILON, "float32")] * p.normalised
    return x, *weights, *epsilon, *([jax.random.normal(keys[3], (p.m, p.n), p.dtype)] if p.gradient else [])


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms). XLA, which rounds gate and up too, reaches 0.012 in bfloat16.

    With normalised rows, which it rounds before, 0.020, also with a float32 output.
    """
    if problem.normalised:
        return 1.5 * {"bfloat16": 1.5e-2, "float16": 2e-3}.get(problem.dtype, 1e-4)
    return {"bfloat16": 1.5e-2, "float16": 2e-3}.get(problem.out_dtype, 1e-4)


# --- Weights as one matrix ----------------------------------------------------------------------------------------------


def halves(problem: Problem, w: jax.Array) -> tuple[jax.Array, jax.Array]:
    """The weights of gate and of up of a joined one."""
    gate, up = jnp.split(w, 2, _columns_axis(problem))
    return gate, up


def join(problem: Problem, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The reverse of `halves`."""
    return jnp.concatenate([gate, up], _columns_axis(problem))


def _columns_axis(problem: Problem) -> int:
    return 0 if problem.layout == "nt" else 1
