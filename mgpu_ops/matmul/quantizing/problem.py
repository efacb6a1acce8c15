"""What the kernel of `quantize` rounds and stores twice (`Problem`), how (`Config`), and which of them fit together."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp

from mgpu_ops.core.choices import outside
from mgpu_ops.core.fp8 import BLOCK
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import FLOAT8, MAX_SIZE, check_fields, itemsize_of, supports_sizes

ROWS = 16  # that a warp takes at a time: a thread then has 16 bytes of each of its columns
WARPS = 4  # of a block
DTYPES = ("bfloat16", "float16", "float32")
OF = ("array", "gate", "gate_gradient")
AMAX = ("none", "also", "only")
SCHEMES = ("tensor", "row", "block", "square")
MAX_ELEMENTS = 2**31 - 1


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """values[r, c] = round(x[r, c] / scale) in 8 bits, and values_t[c, r] = round(x[r, c] / scale_t), of one or two arrays x.

    rows: of x.
    columns: of x.
    dtype: of what is read, "bfloat16", "float16" or "float32" in the kernel.
    to: dtype of the values, "float8_e4m3fn" or "float8_e5m2".
    of: what x is: "array", what is read; "gate", silu(gate) up, of gate and up, in float32; "gate_gradient", the two arrays
      d up silu'(gate) and d silu(gate), of a gradient d, gate and up.
    amax: whether the largest finite absolute value of x is a result: "none"; "also"; or "only", without values.
    scheme: what shares a scale in values, as in `quantize`: "tensor" or "row", of given scales ([rows] and [columns]); "block"
      or "square", of scales that are found, and results too.
    scheme_t: the same of values_t; "tensor" and "row" are of both.
    batch: of arrays [batch, rows, columns], with the scales of one array; values_t is [batch, columns, rows].
    gathered: 0; or the rows of the array that is read, where an int32 [rows] names one for each row of x (none: zeros).
    row_scale: whether a gate, or its gradients, are multiplied by a float32 for each row. With gradients, that of this scale,
      the sum of d silu(gate) up over a row, is one more result, float32 [rows].
    """

    rows: int
    columns: int
    dtype: str = "bfloat16"
    to: str = "float8_e4m3fn"
    of: str = "array"
    amax: str = "none"
    scheme: str = "tensor"
    scheme_t: str = "tensor"
    batch: int = 1
    gathered: int = 0
    row_scale: bool = False

    def __post_init__(self) -> None:
        check_fields(self)
        for name, choices in (("of", OF), ("amax", AMAX), ("scheme", SCHEMES), ("scheme_t", SCHEMES)):
            if getattr(self, name) not in choices:
                raise ValueError(f"{name}={getattr(self, name)!r} is not one of {', '.join(choices)}")

    @property
    def sources(self) -> int:
        """Arrays that are read."""
        return 1 + OF.index(self.of)

    @property
    def results(self) -> int:
        """Arrays x."""
        return 2 if self.of == "gate_gradient" else 1

    @property
    def writes(self) -> bool:
        """Whether values are written."""
        return self.amax != "only"

    @property
    def by_tile(self) -> bool:
        """Whether scales are found, tile by tile."""
        return self.scheme in ("block", "square")

    @property
    def sums_rows(self) -> bool:
        """Whether the gradient of the row scale is found."""
        return self.row_scale and self.of == "gate_gradient" and self.writes

    @property
    def given(self) -> int:
        """Arrays that are read, and the numbers and scales of rows."""
        return self.sources + (self.gathered > 0) + self.row_scale

    @property
    def finds(self) -> bool:
        """Whether the largest absolute values are found."""
        return self.amax != "none"


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How a block, which is one warpgroup, works on its tile. Every field is tuned; none changes the result.

    tile_rows: rows of a tile, 128 or 256.
    lane: columns of a thread, 4 or 8, so that a tile has 128 or 256.
    ahead: rows that a thread loads before it rounds the first of them: 2, 4, 8 or 16; 0: as the compiler likes.
    order: along which tiles follow each other, "rows" or "columns".
    """

    tile_rows: int
    lane: int
    ahead: int
    order: str

    @property
    def tile_columns(self) -> int:
        return 32 * self.lane


SPACE: dict[str, Sequence[Any]] = {
    "tile_rows": (128, 256),
    "lane": (4, 8),
    "ahead": (0, 2, 4, 8, 16),
    "order": ("rows", "columns"),
}

# The arrays of a training step of 8192 tokens in 8 bits, of Llama-3 8B's layers (examples/llama.py).
_TOKENS, _WIDTH, _QKV, _HIDDEN = 8192, 4096, 6144, 14336
SHAPES = {
    "llama3-8b-x": Problem(_TOKENS, _WIDTH),
    "llama3-8b-w-qkv": Problem(_WIDTH, _QKV),
    "llama3-8b-w-out": Problem(_WIDTH, _WIDTH),
    "llama3-8b-w-up": Problem(_WIDTH, _HIDDEN),
    "llama3-8b-w-down": Problem(_HIDDEN, _WIDTH),
    "llama3-8b-hidden": Problem(_TOKENS, _HIDDEN),
    "llama3-8b-dx": Problem(_TOKENS, _WIDTH, to="float8_e5m2"),
    "llama3-8b-dqkv": Problem(_TOKENS, _QKV, to="float8_e5m2"),
    "llama3-8b-dhidden": Problem(_TOKENS, _HIDDEN, to="float8_e5m2"),
    "llama3-8b-gate": Problem(_TOKENS, _HIDDEN, of="gate"),
    "llama3-8b-gate-amax": Problem(_TOKENS, _HIDDEN, of="gate", amax="only"),
    "llama3-8b-gate-gradient": Problem(_TOKENS, _HIDDEN, to="float8_e5m2", of="gate_gradient"),
    "llama3-8b-gate-gradient-amax": Problem(_TOKENS, _HIDDEN, to="float8_e5m2", of="gate_gradient", amax="only"),
    "llama3-8b-w-up-amax": Problem(_WIDTH, _HIDDEN, amax="only"),
    "llama3-8b-hidden-delayed": Problem(_TOKENS, _HIDDEN, amax="also"),
    "llama3-8b-hidden-row": Problem(_TOKENS, _HIDDEN, scheme="row", scheme_t="row"),
    "llama3-8b-hidden-block": Problem(_TOKENS, _HIDDEN, scheme="block", scheme_t="block"),
    "llama3-8b-w-up-square": Problem(_WIDTH, _HIDDEN, scheme="square", scheme_t="square"),
    "llama3-8b-dhidden-block": Problem(_TOKENS, _HIDDEN, to="float8_e5m2", scheme="block", scheme_t="square"),
}
# Those of a layer of 64 experts of 2560 x 1280, top-4, of 16384 tokens (docs/kernels/moe.md): rows padded for each expert.
_ROWS, _D, _H = 73600, 2560, 1280
_MOE = {
    "moe-x": Problem(_ROWS, _D, gathered=16384),
    "moe-dy": Problem(_ROWS, _D, to="float8_e5m2", gathered=16384),
    "moe-w-gate": Problem(_D, _H, batch=64),
    "moe-w-down": Problem(_H, _D, batch=64),
    "moe-gate": Problem(_ROWS, _H, of="gate", row_scale=True),
    "moe-gate-amax": Problem(_ROWS, _H, of="gate", amax="only", row_scale=True),
    "moe-gate-gradient": Problem(_ROWS, _H, to="float8_e5m2", of="gate_gradient", row_scale=True),
    "moe-gate-gradient-amax": Problem(_ROWS, _H, to="float8_e5m2", of="gate_gradient", amax="only", row_scale=True),
}
SUITES: dict[str, Sequence[str]] = {"llama3-8b": list(SHAPES), "fp8-moe": list(_MOE)}
SHAPES |= _MOE

# --- What can run ---------------------------------------------------------------------------------------------------


def supports(problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernel can run `problem` on `gpu`, or None."""
    p = problem
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU, the only ones that the kernel was written for; use backend='xla'"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype} is not one of {', '.join(DTYPES)}: cast, or use backend='xla'"
    if p.to not in FLOAT8:
        return f"to={p.to} is not one of {', '.join(FLOAT8)}"
    if reason := supports_sizes(p, ("rows", "columns", "batch")):
        return reason
    for name in ("rows", "columns"):
        if (size := getattr(p, name)) % ROWS:
            return f"{name}={size} is no multiple of {ROWS}: pad it to {math.ceil(size / ROWS) * ROWS}, or use backend='xla'"
    if p.scheme != p.scheme_t and not {p.scheme, p.scheme_t} <= {"block", "square"}:
        return f"scheme={p.scheme} and scheme_t={p.scheme_t} are not of one kind: take one of them, or block and square"
    if p.scheme != "tensor" and (p.of, p.amax) != ("array", "none"):
        return f"scheme={p.scheme} is of an array and without its largest value, not of={p.of} and amax={p.amax}"
    if p.scheme != "tensor" and p.dtype == "float32":
        return f"scheme={p.scheme} of float32 takes more registers than there are: cast to bfloat16, or use backend='xla'"
    if (p.batch > 1 or p.gathered) and (p.of, p.scheme) != ("array", "tensor"):
        return f"batch={p.batch} and gathered={p.gathered} are of an array with one scale, not of={p.of}, scheme={p.scheme}"
    if p.batch > 1 and p.gathered:
        return f"batch={p.batch} and gathered={p.gathered}: rows are gathered of one matrix"
    if p.gathered > MAX_SIZE:
        return f"gathered={p.gathered} rows are more than {MAX_SIZE}: split the array, or use backend='xla'"
    if p.row_scale and p.of == "array":
        return "row_scale is of gates and their gradients, not of=array: multiply before"
    if (numbers := max(p.rows, p.gathered) * p.columns) > MAX_ELEMENTS:
        return f"{numbers} numbers are more than {MAX_ELEMENTS}: split the array, or use backend='xla'"
    if (found := p.batch * math.prod(tiles(p, _SMALLEST))) > MAX_SIZE:
        return f"{found} tiles are more than {MAX_SIZE}: split the array, or use backend='xla'"
    return None


def check(problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None: the first reason."""
    if reason := supports(problem, gpu) or outside(SPACE, config):
        return reason
    p, c = problem, config
    if p.scheme != "tensor" and (c.tile_rows, c.lane, c.ahead) != (128, 4, 0):
        return f"scheme={p.scheme} takes tiles of 128 x 128: tile_rows=128, lane=4 and ahead=0, not {c}"
    registers = p.sources * (c.ahead or 4) * c.lane * itemsize_of(p.dtype) // 4 + p.results * p.writes * 4 * c.lane
    if registers > _REGISTERS:
        return f"numbers take {registers} registers a thread, more than {_REGISTERS}: use a smaller lane or ahead"
    return None


_SMALLEST = Config(128, 4, 0, "rows")
_REGISTERS = 128  # of 255, without addresses and what is being computed


def tiles(problem: Problem, config: Config) -> tuple[int, int]:
    """Tiles below each other, and beside each other, of one matrix."""
    return math.ceil(problem.rows / config.tile_rows), math.ceil(problem.columns / config.tile_columns)


def smem_bytes(problem: Problem, config: Config) -> int:
    """Bytes of shared memory that a block takes: the tile of each result."""
    found = 4 * WARPS * config.tile_columns if problem.by_tile else 0  # largest values of a warp's columns
    return problem.results * problem.writes * config.tile_rows * config.tile_columns + found


# --- What a problem takes and gives --------------------------------------------------------------------------------


def computed(of: str, *x: jax.Array, by: jax.Array | None = None) -> tuple[jax.Array, ...]:
    """The arrays x of `Problem`, float32, of those that are read. by: a factor of each row."""
    x = tuple(array.astype(jnp.float32) for array in x)
    if of == "array":
        return x
    *gradient, gate, up = x
    s = jax.nn.sigmoid(gate)
    if of == "gate":
        found: tuple[jax.Array, ...] = (gate * s * up,)
    else:
        found = gradient[0] * up * (s * (1 + gate * (1 - s))), gradient[0] * (gate * s)
    return found if by is None else tuple(array * by[:, None] for array in found)


def of_row_scale(gradient: jax.Array, gate: jax.Array, up: jax.Array) -> jax.Array:
    """The gradient of the row scale of a gate, float32 [rows]."""
    gradient, gate, up = (array.astype(jnp.float32) for array in (gradient, gate, up))
    return jnp.sum(gradient * (gate * jax.nn.sigmoid(gate)) * up, 1)


def row_of(index: jax.Array, rows: int) -> tuple[jax.Array, jax.Array]:
    """Which row each index names, and whether it names one of so many."""
    return jnp.clip(index, 0, rows - 1), (index >= 0) & (index < rows)


def flops(problem: Problem) -> int:
    """A division of each number; or what a gate and its gradient take."""
    return {"array": 1, "gate": 6, "gate_gradient": 14}[problem.of] * problem.batch * problem.rows * problem.columns


def bytes_moved(problem: Problem) -> int:
    """Each array read once and its values written twice; of one whose rows are gathered, each row once."""
    p = problem
    scales = sum(4 * math.prod(shape) for shape in scale_shapes(p))
    of_rows = 4 * p.rows * ((p.gathered > 0) + p.row_scale + p.sums_rows)
    read = (min(p.rows, p.gathered) or p.rows) * p.columns * p.sources * itemsize_of(p.dtype)
    return p.batch * (read + p.rows * p.columns * 2 * p.results * p.writes) + scales + of_rows


def scale_shapes(p: Problem) -> list[tuple[int, ...]]:
    """Of what values and values_t are divided by."""
    if not p.writes:
        return []
    if p.scheme == "tensor":
        return [()] * p.results
    shapes = []
    for scheme, rows, columns in ((p.scheme, p.rows, p.columns), (p.scheme_t, p.columns, p.rows)):
        down, across = (math.ceil(size / BLOCK) for size in (rows, columns))
        shapes.append({"row": (rows,), "block": (rows, across), "square": (down, across)}[scheme])
    return shapes


def inputs(problem: Problem, key: Any) -> tuple[jax.Array, ...]:
    """Random normal numbers, and a scale for each result: with it, few saturate."""
    p = problem
    shape = (*(p.batch,) * (p.batch > 1), p.gathered or p.rows, p.columns)
    of_rows = jax.random.fold_in(key, 0)
    arrays = [jax.random.normal(one, shape, p.dtype) for one in jax.random.split(key, p.sources)]
    if p.gathered:  # one in sixteen names no row
        arrays.append(jax.random.randint(of_rows, (p.rows,), -(p.gathered // 16) - 1, p.gathered))
    if p.row_scale:
        arrays.append(jax.random.uniform(of_rows, (p.rows,), jnp.float32))
    given = [] if p.by_tile else scale_shapes(p)
    return (*arrays, *(jnp.full(shape, 8.0 / float(jnp.finfo(p.to).max), jnp.float32) for shape in given))


def tolerance(problem: Problem) -> float:
    """Largest allowed error, max |out - ref| / (|ref| + rms): of an array none, of a gate the next number of 8 bits."""
    if problem.of == "array" or not problem.writes:
        return 1e-5
    return {"float8_e4m3fn": 0.13}.get(problem.to, 0.26)
