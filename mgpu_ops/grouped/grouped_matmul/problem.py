"""What a grouped matmul is (`Problem`), and which configs can run it (`supports`, `check`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core import fp8
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.gemm import ROWS, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import (
    DTYPES,
    FLOAT8,
    REDUCTIONS,
    check_fields,
    check_smem,
    itemsize_of,
    supports_dtypes,
    supports_gpu,
)
from mgpu_ops.grouped import config as blocks
from mgpu_ops.grouped import problem as common
from mgpu_ops.grouped.config import (
    PANEL,
    Config,
    check_deferred,
    check_gathered,
    check_last_tile,
    check_short_tiles,
    check_tiles,
    panel,
)
from mgpu_ops.grouped.problem import DECODING, MODELS, TRAINING, dtype_of_rhs, layer_problem
from mgpu_ops.grouped.sizes import draw_shard, draw_sizes

# --- What is computed -------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """out[m, n]: rows of group g of lhs[m, k] times rhs[g, k, n].

    m: rows of the result, and of lhs without `lhs_rows`.
    n: columns of the result.
    k: what is summed over.
    groups: how many matrices rhs holds.
    dtype: of lhs and rhs, in the kernel "bfloat16", "float16", or in layout "nt" "float8_e4m3fn" or "float8_e5m2".
    out_dtype: of the result, dtype or "float32"; of a product of 8 bits "bfloat16", "float16" or "float32".
    layout: "nn", or "nt" where rhs is stored as [g, n, k].
    bias: whether a row per group, [groups, n], is added.
    activation: applied last: "none", "relu", "silu", "gelu" (the tanh approximation) or "gelu_erf".
    spread: how rows are spread over groups, "even", "random", "skewed" or "sparse". Chooses configs, never the answer.
    group_offset: whether rhs holds a shard of the groups; the row where its first group begins then comes before the sizes.
    row_scale: whether each row is multiplied by a factor of its own, [m], after the activation.
    second: whether a second pair of lhs and rhs, of the same shapes and scales, is multiplied and added.
    rhs_dtype: of rhs where it is the other of the two 8-bit floats; "none" where it is dtype.
    scales: float32 factors of the product, before the bias: "none"; "tensor", scale_lhs[1] and scale_rhs[groups]; "row",
      scale_lhs[m] and scale_rhs[groups, n]; "block", scale_lhs[m, k / 128] and scale_rhs[groups, n / 128, k / 128], rounded up,
      of each 128 of k.
    gated_gradient: whether the product is the gradient u of activation(gate) * up, before the row scale. gate and up, [m, n],
      then follow the sizes, and there are four results (`gradient_kernel.py`).
    lhs_rows: rows of lhs, of which m are named by an index each; 0: lhs has the m rows in their order.
    residual: whether an array of the result's shape and dtype is added last, to the rows of groups.
    """

    m: int
    n: int
    k: int
    groups: int
    dtype: str = "bfloat16"
    out_dtype: str = "bfloat16"
    layout: str = "nn"
    bias: bool = False
    activation: str = "none"
    spread: str = "random"
    group_offset: bool = False
    row_scale: bool = False
    second: bool = False
    rhs_dtype: str = "none"
    scales: str = "none"
    gated_gradient: bool = False
    lhs_rows: int = 0
    residual: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        if self.rhs_dtype == self.dtype:  # one problem, written in one way
            object.__setattr__(self, "rhs_dtype", "none")


_TRAINING = {"-".join(map(str, case)): layer_problem(Problem, *case) for case in TRAINING}
_DECODING = {"-".join(map(str, case)): layer_problem(Problem, *case) for case in DECODING}
_DECODING["64x7168x2048-4096-even"] = Problem(4096, 2048, 7168, 64, spread="even")
_DLHS = {f"{name}-dlhs": replace(p, n=p.k, k=p.n, layout="nt") for name, p in _TRAINING.items()}
SHAPES: dict[str, Problem] = {**_TRAINING, **_DECODING, **_DLHS}
SUITES: dict[str, Sequence[str]] = {
    "moe": [*_TRAINING, *_DECODING],
    "training": list(_TRAINING),
    "decoding": list(_DECODING),
    "dlhs": list(_DLHS),
    **{model: [name for name in (*_TRAINING, *_DECODING) if name.startswith(model)] for model in MODELS},
}

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if p.layout not in ("nn", "nt"):
        return f"layout {p.layout!r} is neither 'nn' nor 'nt'"
    if p.activation not in ACTIVATIONS:
        return f"activation {p.activation!r} is not one of {', '.join(ACTIVATIONS)}"
    if p.gated_gradient and (reason := _supports_gated_gradient(p)):
        return reason
    if p.lhs_rows and (reason := _supports_gathered(p)):
        return reason
    rows = {"lhs": ("k", p.k), "rhs": ("k", p.k) if p.layout == "nt" else ("n", p.n)}
    return _supports_operands(p, gpu) or common.supports_sides(
        p, rows, lambda: (math.ceil(p.m / ROWS) + p.groups) * math.ceil(p.n / ROWS)
    )


def _supports_operands(p: Problem, gpu: Gpu) -> str | None:
    """Why wgmma cannot multiply operands of these dtypes and scales, stored so, or None."""
    if p.dtype not in FLOAT8 and p.rhs_dtype == "none":
        reason = supports_dtypes(p.dtype, p.out_dtype, gpu)
        if reason is None and p.scales != "none":
            return f"scales={p.scales!r} are of 8-bit floats, not {p.dtype}: multiply by them, or use backend='xla'"
        return reason
    if reason := supports_gpu(gpu):
        return reason
    if p.dtype not in FLOAT8 or dtype_of_rhs(p) not in FLOAT8:
        return f"lhs is {p.dtype} and rhs is {p.rhs_dtype}: only {' and '.join(FLOAT8)} mix; cast one, or use backend='xla'"
    if p.out_dtype not in (*DTYPES, "float32"):
        return f"out_dtype {p.out_dtype} is not one of bfloat16, float16, float32: cast the result, or use backend='xla'"
    if p.scales not in fp8.SCALES:
        return f"scales={p.scales!r} is not one of {', '.join(fp8.SCALES)}"
    if p.second and p.scales not in ("none", "tensor"):
        return (
            f"two products of 8-bit floats are added up in one with scales of operands, which both share, not scales={p.scales}"
        )
    if p.layout != "nt":
        return (
            f"layout {p.layout} of 8-bit floats: wgmma reads them along k only; store rhs as [groups, n, k] "
            "(transpose_rhs=True), or use backend='xla'"
        )
    return None


def _supports_gathered(p: Problem) -> str | None:
    """Why the kernel cannot load rows by index, or None."""
    if p.dtype in FLOAT8 or p.scales != "none" or p.second or p.gated_gradient:
        return f"lhs_rows={p.lhs_rows}: rows are gathered for one product of 16-bit floats; gather them before"
    return common.supports_gathered(p.lhs_rows, p.k, itemsize_of(p.dtype))


def _supports_gated_gradient(p: Problem) -> str | None:
    """Why a problem cannot be the gradient of gated hidden activations, or None."""
    if p.layout != "nt" or not p.row_scale or p.bias or p.second or p.residual:
        return "the gradient of gated hidden activations has layout 'nt', a row_scale, no bias, residual or second product"
    if p.out_dtype != p.dtype:
        return f"out_dtype {p.out_dtype} is not {p.dtype}: gradients have the inputs' dtype"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    p, c = problem, config
    return (
        supports(p, gpu)
        or check_tiles(c, itemsize_of(p.out_dtype), gpu, p.dtype, p.scales)
        or check_windows(p, c)
        or (check_gathered(c) if p.lhs_rows else None)
        or check_deferred(c, p, whole_tiles_of(p))
        or check_short_tiles(c, whole_tiles_of(p))
        or _check_gated_gradient(p, c)
        or check_smem(smem_bytes(p, c), gpu)
    )


def whole_tiles_of(p: Problem) -> str | None:
    """What of a problem takes all registers of a whole tile, or all of its rows in one warpgroup; or None."""
    return "a gated gradient" if p.gated_gradient else "scales of blocks" if p.scales == "block" else None


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes."""
    storage = replace(blocks.storage(problem, config, problem.scales), barriers=residual_barriers(problem, config))
    return storage.bytes + REDUCTIONS * problem.gated_gradient


def residual_barriers(problem: Problem, config: Config) -> int:
    """Of a block: one for each buffer of the epilogue that a residual is loaded into; none without one."""
    return config.compute_warpgroups * config.epilogue_slots if problem.residual else 0


def _check_gated_gradient(p: Problem, c: Config) -> str | None:
    """Why a stage of the pipeline cannot hold 64 columns of gate and of up, of all rows of a tile, or None."""
    if not p.gated_gradient:
        return None
    if c.compute_warpgroups == 2 and c.wg_dimension != "m":
        return "wg_dimension must be 'm' for a gated gradient: each warpgroup reads all columns of its rows of gate and up"
    if c.epilogue_tile_n != PANEL:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {PANEL} for a gated gradient: so many columns of gate and up a step"
        )
    if c.tile_k == PANEL and c.tile_n < c.tile_m:
        return f"tile_n={c.tile_n} must be at least tile_m={c.tile_m} with tile_k={PANEL}: up lies where rhs did"
    return None


def check_windows(p: Problem, c: Config) -> str | None:
    """Why TMA cannot copy the tiles of a config that `check_tiles` allows, or None."""
    _, wg_n = warpgroup_tile(c)
    if c.wg_dimension == "n" and c.compute_warpgroups == 2 and wg_n % PANEL and p.layout == "nn":
        return f"a warpgroup's {wg_n} columns of tile_n={c.tile_n} must be a multiple of {PANEL}, one swizzle row of rhs"
    if p.layout == "nn" and c.tile_n % PANEL:
        return f"tile_n={c.tile_n} must be a multiple of {PANEL}, one swizzle row of rhs"
    if p.layout == "nn" and (reason := check_last_tile("n", p.n, "tile_n", c.tile_n, c.tile_n)):
        return reason
    of_k = panel(p.dtype)
    if p.layout == "nt" and p.k % of_k and c.tile_k != of_k:
        return f"tile_k={c.tile_k} must be {of_k} because k={p.k} is no multiple of {of_k}: TMA clips one swizzle row only"
    row = 128 // itemsize_of(p.out_dtype)
    if p.n % row and c.epilogue_tile_n != row:
        return (
            f"epilogue_tile_n={c.epilogue_tile_n} must be {row} because n={p.n} is no multiple of it: "
            "TMA clips one swizzle row only"
        )
    return None


# --- What a problem takes and gives --------------------------------------------------------------------------------


def bytes_moved(problem: Problem) -> int:
    """Each input read once, of rhs only the groups that have rows, and each output written once."""
    p = problem
    used = min(p.groups, p.m) if p.spread != "sparse" else max(1, min(p.groups // 2, p.m))
    operands = bytes_of_lhs(p) + used * p.k * p.n * itemsize_of(p.dtype)
    operands = (1 + p.second) * operands + 4 * p.groups * (1 + p.n * p.bias)
    operands += 4 * p.m * p.row_scale + 4 * sum(map(math.prod, scale_shapes(p)))
    gate_and_up = 2 * p.m * p.n * itemsize_of(p.dtype) * p.gated_gradient
    operands += p.m * p.n * itemsize_of(p.out_dtype) * p.residual
    return operands + gate_and_up + bytes_written(p) + 4 * p.m * p.gated_gradient


def bytes_written(problem: Problem) -> int:
    """Of the output, or of the three arrays of its size that a gated gradient makes."""
    p = problem
    return (3 if p.gated_gradient else 1) * p.m * p.n * itemsize_of(p.out_dtype)


def bytes_of_lhs(p: Problem) -> int:
    """The rows of lhs that are read, each once, and their indices."""
    rows = min(p.m, p.lhs_rows) if p.lhs_rows else p.m
    return rows * p.k * itemsize_of(p.dtype) + (4 * p.m if p.lhs_rows else 0)


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal lhs and rhs, sizes spread as the problem says; scales, bias, row scale, residual and indices where it has
    them.

    Numbers of 8 bits are rounded. Scales are from 1/2 to 2, those of rhs divided by the square root of k. A residual's numbers
    are as large as the product's.
    """
    p = problem
    key_l, key_r, key_s, key_b = jax.random.split(key, 4)
    lhs = _normal(key_l, (p.lhs_rows or p.m, p.k), p.dtype)
    rhs = _normal(key_r, (p.groups, p.n, p.k) if p.layout == "nt" else (p.groups, p.k, p.n), dtype_of_rhs(p))
    sizes = draw_shard(p.spread, p.m, p.groups, key_s) if p.group_offset else draw_sizes(p.spread, p.m, p.groups, key_s)
    bias = [jax.random.normal(key_b, (p.groups, p.n), jnp.float32)] if p.bias else []
    scale = [jax.random.uniform(jax.random.fold_in(key, 4), (p.m,), jnp.float32)] if p.row_scale else []
    second = []
    if p.second:
        keys = jax.random.split(jax.random.fold_in(key, 5))
        second = [_normal(key, x.shape, x.dtype.name) for key, x in zip(keys, (lhs, rhs), strict=True)]
    if p.gated_gradient:
        rhs /= jnp.asarray(math.sqrt(max(p.k, 1)), p.dtype)
        second = [jax.random.normal(key, (p.m, p.n), p.dtype) for key in jax.random.split(jax.random.fold_in(key, 5))]
    factors = zip(scale_shapes(p), (1.0, 1.0 / math.sqrt(p.k or 1)), jax.random.split(jax.random.fold_in(key, 6)), strict=False)
    scales = (2.0 ** jax.random.uniform(key, x, jnp.float32, -1.0, 1.0) * factor for x, factor, key in factors)
    key_i = jax.random.fold_in(key, 7)
    indices = [jax.random.randint(key_i, (p.m,), 0, p.lhs_rows, jnp.int32)] if p.lhs_rows else []
    size = math.sqrt(p.k or 1) if p.scales == "none" else 1.0
    key_a = jax.random.fold_in(key, 8)
    residual = [(size * jax.random.normal(key_a, (p.m, p.n), jnp.float32)).astype(p.out_dtype)] if p.residual else []
    return lhs, rhs, sizes, *second, *scales, *bias, *scale, *residual, *indices


def _normal(key: Any, shape: tuple[int, ...], dtype: str) -> jax.Array:
    return jax.random.normal(key, shape, "bfloat16" if dtype in FLOAT8 else dtype).astype(dtype)


def scale_shapes(p: Problem) -> tuple[tuple[int, ...], ...]:
    """The shapes of scale_lhs and scale_rhs; none without scales."""
    parts = math.ceil(p.k / fp8.BLOCK)
    return {
        "tensor": ((1,), (p.groups,)),
        "row": ((p.m,), (p.groups, p.n)),
        "block": ((p.m, parts), (p.groups, math.ceil(p.n / fp8.BLOCK), parts)),
    }.get(p.scales, ())


def tolerance(problem: Problem) -> float:
    """`common.tolerance`, and of 8-bit floats what their sums add (`fp8.accumulation_error`)."""
    return common.tolerance(problem) + fp8.accumulation_error(problem.dtype, (1 + problem.second) * problem.k, problem.scales)


def flops(problem: Problem) -> int:
    """Multiplications and additions of a problem whose groups hold all rows."""
    return (1 + problem.second) * common.flops(problem)


def by_name(problem: Problem, extra: Sequence[Any]) -> dict[str, Any]:
    """The arrays that follow the sizes, by name."""
    names = ["lhs2", "rhs2"] * problem.second + ["scale_lhs", "scale_rhs"] * (problem.scales != "none")
    names += ["gate", "up"] * problem.gated_gradient
    names += ["bias"] * problem.bias + ["row_scale"] * problem.row_scale + ["residual"] * problem.residual
    names += ["row_indices"] * (problem.lhs_rows > 0)
    return dict(zip(names, extra, strict=True))


def plain(problem: Problem) -> Problem:
    """The problem whose entries count as this one's: one product of all groups and of rows in their order, neither scaled nor
    of gated activations, nothing added.
    """
    activation = "none" if problem.gated_gradient else problem.activation
    plain = replace(problem, group_offset=False, row_scale=False, second=False, gated_gradient=False, activation=activation)
    return replace(plain, lhs_rows=0, residual=False)
