"""What a gated grouped matmul is (`Problem`), and which configs of grouped matmuls can run it (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import numpy as np

from mgpu_ops.core import fp8, gemm, limits
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, check_fields, itemsize_of
from mgpu_ops.grouped.config import (
    Config,
    check_deferred,
    check_gathered,
    check_short_tiles,
    check_tiles,
    consumer_registers,
    is_dynamic,
    scales_of_a_step,
)
from mgpu_ops.grouped.grouped_matmul import problem as grouped
from mgpu_ops.grouped.problem import DECODING, LAYERS, MODELS, TRAINING
from mgpu_ops.grouped.sizes import draw_shard, draw_sizes


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[m, n] = activation(gate) * up with gate = lhs[m, k] w_gate[g, k, n] and up = lhs w_up, or the gradients of both.

    m, n, k, groups, dtype, out_dtype, layout, spread, group_offset: as in grouped_matmul, for both products.
    activation: "none", "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf".
    gradient: whether the results are the gradients of gate and of up, of dtype, from that of the result [m, n].
    keep: whether gate and up are results too, of dtype: what a backward pass needs that computes neither again.
    rhs_dtype: of both matrices, as in grouped_matmul.
    scales: as in grouped_matmul. scale_lhs, scale_gate and scale_up, factors of gate and up before activation, follow sizes.
    lhs_rows: rows of lhs, of which m are named by an index each; 0: lhs has the m rows in their order.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    activation: str = "silu"
    spread: str = "random"
    gradient: bool = False
    group_offset: bool = False
    keep: bool = False
    rhs_dtype: str = "none"
    scales: str = "none"
    lhs_rows: int = 0

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rhs_dtype == self.dtype:  # one problem, written in one way
            object.__setattr__(self, "rhs_dtype", "none")


def _layer(name: str, tokens: int, spread: str) -> Problem:
    e = LAYERS[f"{name}-gate_up"]
    return Problem(e.rows * tokens, e.n // 2, e.k, e.groups, spread=spread)


def _cases(cases: Sequence[tuple[str, int, str]]) -> dict[str, Problem]:
    """Those of gate and up, without which product it is."""
    found = [(layer.removesuffix("-gate_up"), tokens, spread) for layer, tokens, spread in cases if "gate_up" in layer]
    return {"-".join(map(str, case)): _layer(*case) for case in found}


_TRAINING, _DECODING = _cases(TRAINING), _cases(DECODING)
_GRADIENTS = {f"{name}-gradient": replace(p, gradient=True) for name, p in _TRAINING.items()}
SHAPES: dict[str, Problem] = {**_TRAINING, **_DECODING, **_GRADIENTS}
SUITES: dict[str, Sequence[str]] = {
    "moe": [*_TRAINING, *_DECODING],
    "training": list(_TRAINING),
    "decoding": list(_DECODING),
    "gradient": list(_GRADIENTS),
    **{model: [name for name in SHAPES if name.startswith(model)] for model in MODELS},
}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if p.activation not in ACTIVATIONS:
        return f"activation {p.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if (p.gradient or p.keep) and p.out_dtype != p.dtype:
        what = "gradients have" if p.gradient else "what is kept has"
        return f"out_dtype {p.out_dtype} is not {p.dtype}: {what} the inputs' dtype"
    if p.gradient and p.keep:
        return "gate and up are kept by the forward pass: gradient and keep exclude each other"
    if p.gradient and p.lhs_rows:
        return f"lhs_rows={p.lhs_rows} of a gradient: it takes the m rows in their order, gathered before"
    reason = grouped.supports(of_one(p), gpu)
    return reason and reason.replace("store rhs", "store the weights").replace("transpose_rhs", "transpose_w")


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    p, c = problem, config
    return (
        supports(p, gpu)
        or check_tiles(c, itemsize_of(p.out_dtype), gpu, p.dtype, p.scales)
        or grouped.check_windows(of_one(p), c)
        or (check_gathered(c) if p.lhs_rows else None)
        or check_deferred(c, p, "gates")
        or check_short_tiles(c, whole_tiles_of(p))
        or _check_scales(p, c)
        or gemm.check_accumulator(c, consumer_registers(c, gpu), accumulators_in_all(p, c))
        or limits.check_smem(smem_bytes(p, c), gpu)
    )


def whole_tiles_of(p: Problem) -> str | None:
    """What of a problem keeps its tiles whole, or None."""
    return "a gradient" if p.gradient else "scales of blocks" if p.scales == "block" else None


_MOST_REGISTERS = 128  # of a thread for sums and products with scales of blocks: with 192, all that were compiled spilled


def _check_scales(p: Problem, c: Config) -> str | None:
    """Why scales of blocks leave too few registers, or None."""
    registers = int(accumulators_in_all(p, c) * gemm.accumulator_registers(c))
    if p.scales == "block" and registers > _MOST_REGISTERS:
        return f"sums and products take {registers} registers a thread, more than {_MOST_REGISTERS}: use smaller tiles"
    return None


# --- What a config takes --------------------------------------------------------------------------------------------


def of_one(p: Problem) -> grouped.Problem:
    """One of both products, as a grouped matmul."""
    one = grouped.Problem(p.m, p.n, p.k, p.groups, p.dtype, p.out_dtype, p.layout)
    one = replace(one, spread=p.spread, group_offset=p.group_offset, lhs_rows=p.lhs_rows)
    return replace(one, rhs_dtype=p.rhs_dtype, scales=p.scales)


def results(p: Problem) -> int:
    """How many arrays [m, n] a problem gives."""
    return 2 if p.gradient else 3 if p.keep else 1


def gradient_buffers(p: Problem, c: Config) -> int:
    """Buffers of a warpgroup into which the result's gradient is loaded while the products are computed: all of the tile."""
    return gemm.epilogue_tiles(c) if p.gradient else 0


def accumulators(p: Problem, c: Config) -> tuple[tuple[int, int], ...]:
    """The shapes of a consumer warpgroup's accumulators: those of gate, those of up, and with scales of blocks the products."""
    of_one = fp8.accumulators(c, p.scales)
    sums = sums_of_one(p, c)
    return of_one[:sums] * 2 + of_one[sums:]


def sums_of_one(p: Problem, c: Config) -> int:
    """How many accumulators the sums of gate take, and those of up."""
    rows, columns = gemm.warpgroup_tile(c)
    return rows // gemm.ROWS * max(1, columns // gemm.ROWS) if p.scales == "block" else 1


def accumulators_in_all(p: Problem, c: Config) -> float:
    """What they take, in accumulators of a warpgroup's part of the tile."""
    return sum(map(math.prod, accumulators(p, c))) / math.prod(gemm.warpgroup_tile(c))


def smem_bytes(p: Problem, c: Config) -> int:
    """Bytes of shared memory that a block takes."""
    buffers = c.epilogue_slots + gradient_buffers(p, c)
    barriers = c.compute_warpgroups if p.gradient else 0
    size = itemsize_of(p.out_dtype)
    rows, columns = scales_of_a_step(c) if p.scales == "block" else (0, 0)
    scales = (rows, columns, columns) if p.scales == "block" else ()
    itemsize = itemsize_of(p.dtype)
    return gemm.Storage(
        c, buffers, size, barriers=barriers, b_tiles=2, itemsize=itemsize, scales=scales, is_dynamic=is_dynamic(c)
    ).bytes


# --- What a problem takes and gives --------------------------------------------------------------------------------


def flops(problem: Problem) -> int:
    """Multiplications and additions of both products, where the groups hold all rows."""
    return 2 * grouped.flops(of_one(problem))


def bytes_moved(problem: Problem) -> int:
    """Each input read once, of the weights only the groups that have rows, and each output written once."""
    p = problem
    one, lhs = grouped.bytes_moved(of_one(p)), grouped.bytes_of_lhs(of_one(p))
    result = p.m * p.n * itemsize_of(p.out_dtype)
    matrices = one - lhs - result - 4 * p.groups - sum(4 * math.prod(x) for x in grouped.scale_shapes(of_one(p))[:1])
    return one + matrices + (results(p) - 1 + p.gradient) * result


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random lhs, w_gate and w_up, so that gate and up are about normal; sizes; the result's gradient where there is one, or
    indices of rows.
    """
    p = problem
    keys = jax.random.split(key, 5)
    shape = (p.groups, p.n, p.k) if p.layout == "nt" else (p.groups, p.k, p.n)
    if p.dtype in FLOAT8:
        lhs, *rest = _inputs_of_8_bits(replace(p, lhs_rows=0), key)
        if not p.lhs_rows:
            return lhs, *rest
        indices = jax.random.randint(keys[4], (p.m,), 0, p.lhs_rows, "int32")
        return lhs[np.arange(p.lhs_rows) % max(p.m, 1)], *rest, indices
    weights = [jax.random.normal(k, shape, p.dtype) / math.sqrt(max(p.k, 1)) for k in keys[:2]]
    lhs = jax.random.normal(keys[2], (p.lhs_rows or p.m, p.k), p.dtype)
    sizes = (draw_shard if p.group_offset else draw_sizes)(p.spread, p.m, p.groups, keys[3])
    if p.lhs_rows:
        return lhs, *weights, sizes, jax.random.randint(keys[4], (p.m,), 0, p.lhs_rows, "int32")
    return lhs, *weights, sizes, *([jax.random.normal(keys[4], (p.m, p.n), p.dtype)] if p.gradient else [])


def _inputs_of_8_bits(p: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Two of grouped_matmul's, with one lhs; without scales, weights so small that gate and up are about normal."""
    lhs, gate, sizes, *scales = grouped.inputs(of_one(p), key)
    _, up, _, *others = grouped.inputs(of_one(p), jax.random.fold_in(key, 7))
    if p.scales == "none":
        size = math.sqrt(max(p.k, 1))
        gate, up = ((x.astype("float32") / size).astype(x.dtype) for x in (gate, up))
    return lhs, gate, up, sizes, *scales, *others[1:]


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): the activation's exponentials are approximate."""
    p = problem
    rounding = {"bfloat16": 8e-3, "float16": 1e-3}.get(p.out_dtype, 1e-4)
    return rounding + 3 * fp8.accumulation_error(p.dtype, p.k, p.scales)  # of both sums


def plain(problem: Problem) -> Problem:
    """The problem whose entries count as this one's: the same of all groups, of rows in their order, and nothing kept."""
    return replace(problem, group_offset=False, keep=False, lhs_rows=0)
