"""Draws problems of every op, below its public function: each field of its Problem, a config, and arrays.

Arrays hold what a caller may give: sizes of groups that are zero, negative or too many, labels that are none, numbers that are
not finite; and NaN wherever the result must not depend on them. The truth is the op's reference, run on a CPU.
"""

from __future__ import annotations

import dataclasses
import functools
import random
from collections.abc import Callable
from typing import Any

import jax
import numpy as np

from mgpu_ops import SPECS
from mgpu_ops.core.activations import ACTIVATIONS
from mgpu_ops.core.fp8 import BLOCK, SCALES
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.grouped.grouped_matmul.problem import by_name
from mgpu_ops.grouped.sizes import SPREADS
from mgpu_ops.matmul.algorithms import PRESETS
from tests.drawn.case import Case, Wanted, config_of, often, short, side
from tests.mgpu_ops.grouped import ragged

FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
SIXTEEN = ("bfloat16", "float16")
_RARELY = 1e-4  # share of numbers of 8 bits that may be rounded to their other neighbour all the same
_NEAR = 2.0**-21  # of a quotient: how near the middle of two numbers of 8 bits float32 decides
_PROBLEMS = 200  # drawn before one that the kernel takes

type Arrays = tuple[np.ndarray, ...]


@dataclasses.dataclass(frozen=True)
class Sizes:
    """The largest sides that are drawn."""

    rows: int
    columns: int
    depth: int

    @staticmethod
    def of(tiny: bool) -> Sizes:
        return Sizes(150, 300, 300) if tiny else Sizes(1500, 1500, 2500)

    @property
    def large(self) -> Sizes:
        """For all of a GPU's SMs."""
        return Sizes(3 * self.rows, 2 * self.columns, self.depth)


def case(op: str, seed: int, gpu: Gpu, tiny: bool) -> Case:
    rng = random.Random(f"{op} {seed}")
    spec = SPECS[op]
    large, sizes = not tiny and rng.random() < 0.2, Sizes.of(tiny)
    gpu = dataclasses.replace(gpu, sms=gpu.sms if large else 3 if tiny else rng.choice((3, 6, 16, gpu.sms)))
    for _ in range(_PROBLEMS):
        try:
            problem = PROBLEMS[op](rng, sizes.large if large else sizes)
        except ValueError:
            continue
        if spec.supports(problem, gpu) is None:
            break
    else:
        raise RuntimeError(f"no problem of {op} was found that the kernel takes")
    config = config_of(spec, problem, gpu, rng)
    with jax.default_device(jax.devices("cpu")[0]):
        arrays = tuple(np.array(x) for x in jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(seed)))
        note, arrays = ARRAYS.get(op, _some_zeros)(problem, arrays, rng)
        true, given = problem, arrays
        if getattr(problem, "normalised", False):  # the reference rounds these rows to their dtype
            true, given = _wide(problem), tuple(x.astype(np.float32) for x in arrays)
        results = jax.tree.leaves(jax.jit(functools.partial(spec.reference, true))(*given))
        by, limit = (
            ("neighbours", _RARELY) if op == "quantize" and problem.of == "array" else ("largest", spec.tolerance(problem))
        )
        wanted = tuple(Wanted(f"result {i}", np.asarray(x), limit, by) for i, x in enumerate(results))
        if by == "neighbours" and problem.writes:
            wanted = near_the_middle(problem, arrays, wanted)

    def function(backend: str) -> Callable[..., Any]:
        return functools.partial(spec.run, problem, config, gpu, interpret=backend == "interpret")

    label = f"{short(problem)} {short(config)} sms={gpu.sms}{note}"
    return Case(label, gpu, function, arrays, wanted, getattr(problem, "deterministic", True))


def near_the_middle(problem: Any, arrays: Arrays, wanted: tuple[Wanted, ...]) -> tuple[Wanted, ...]:
    """Values of `quantize` may be either neighbour where float32 decides: a number of 16 bits that does so comes often."""
    given = arrays[1:] if len(arrays) > 1 else [x.value for x in wanted[2:]]
    scales = (given[0], given[0] if problem.scheme == "tensor" else given[1])
    largest, found = float(jax.numpy.finfo(problem.to).max), []
    for x, scale, one in zip((arrays[0], arrays[0].T), scales, wanted, strict=False):
        wide, scale = x.astype(np.float64), np.asarray(scale, np.float64)
        scale = scale[:, None] if scale.ndim == 1 else scale
        for axis in range(scale.ndim):
            if scale.shape[axis] not in (1, x.shape[axis]):
                scale = np.repeat(scale, BLOCK, axis).take(range(x.shape[axis]), axis)
        scaled = wide / scale
        low, high = (np.clip(scaled * (1 + off), -largest, largest).astype(one.value.dtype) for off in (-_NEAR, _NEAR))
        found.append(dataclasses.replace(one, either=np.where(one.value == low, high, low)))
    return (*found, *wanted[2:])


def _wide(problem: Any) -> Any:
    fields = {field.name for field in dataclasses.fields(problem)} & {"dtype", "out_dtype"}
    return dataclasses.replace(problem, **dict.fromkeys(fields, "float32"))


# --- problems


def _out(rng: random.Random, dtype: str) -> str:
    return often(rng, dtype, "float32")


def _matmul(rng: random.Random, s: Sizes) -> Any:
    kind = rng.choice(("16", "16", "32", "fp8", "fp8", "int8"))
    epilogue = {"bias": rng.random() < 0.4, "residual": rng.random() < 0.4}
    epilogue |= {"activation": often(rng, "none", *ACTIVATIONS)}
    more: dict[str, Any] = {"batch": often(rng, 1, 1, 2, 3, 5)}
    step, layout = 8, "nt"
    if kind == "16":
        dtype, layout = rng.choice(SIXTEEN), rng.choice(("nn", "nt", "tn", "tt"))
        more |= {"normalised": rng.random() < 0.25, "out_dtype": _out(rng, dtype)}
    elif kind == "32":
        dtype, layout = "float32", rng.choice(("nn", "nt", "tn", "tt"))
        more |= {"algorithm": rng.choice(list(PRESETS)), "out_dtype": "float32"}
    elif kind == "fp8":
        dtype, step = rng.choice(FLOAT8), 16
        more |= {
            "b_dtype": rng.choice(FLOAT8),
            "scales": rng.choice((*SCALES, "block")),
            "out_dtype": rng.choice((*SIXTEEN, "float32")),
        }
    else:
        dtype, step = "int8", 16
        more |= {"scales": rng.choice(("none", "tensor", "row")), "out_dtype": rng.choice((*SIXTEEN, "float32"))}
        if rng.random() < 0.25:
            more |= {"scales": "none", "out_dtype": "int32"}
            epilogue = {}
    m = side(rng, 1, s.rows, 8 if layout[0] == "t" else 1)
    n, k = side(rng, 8, s.columns, 8), side(rng, 8, s.depth, step)
    return SPECS["matmul"].Problem(m, n, k, dtype, layout=layout, **epilogue, **more)


def _gated_matmul(rng: random.Random, s: Sizes) -> Any:
    dtype = rng.choice(SIXTEEN)
    kind = rng.choice(
        ({}, {"normalised": True}, {"joined": True}, {"gradient": True}, {"stored": True}, {"stored": True, "gradient": True})
    )
    out = _out(rng, dtype) if kind in ({}, {"normalised": True}, {"joined": True}) else dtype
    m, n, k = side(rng, 1, s.rows), side(rng, 8, s.columns, 8), side(rng, 8, s.depth, 8)
    activation, layout = rng.choice(list(ACTIVATIONS)), rng.choice(("nn", "nt"))
    return SPECS["gated_matmul"].Problem(m, n, k, dtype, out, layout, activation, **kind)


def _weights(rng: random.Random, s: Sizes) -> dict[str, Any]:
    dtype, group = rng.choice(SIXTEEN), rng.choice((0, 32, 64, 128))
    m = side(rng, 1, 64) if rng.random() < 0.6 else side(rng, 1, s.rows)
    return {
        "m": m,
        "n": side(rng, 16, s.columns, 16),
        "k": side(rng, 128, s.depth, max(group, rng.choice((16, 32, 64)))),
        "w_dtype": rng.choice(("int8", "int4")),
        "group_size": group,
        "zero_points": rng.random() < 0.5,
        "dtype": dtype,
        "out_dtype": _out(rng, dtype),
        "layout": rng.choice(("nn", "nt")),
        "scale_dtype": rng.choice((*SIXTEEN, "float32")),
    }


def _quantized_matmul(rng: random.Random, s: Sizes) -> Any:
    added = {"bias": rng.random() < 0.4, "residual": rng.random() < 0.4}
    return SPECS["quantized_matmul"].Problem(**_weights(rng, s), **added)


def _quantized_grouped_matmul(rng: random.Random, s: Sizes) -> Any:
    more = {"groups": rng.randint(1, 9), "spread": rng.choice(SPREADS), "group_offset": rng.random() < 0.3}
    return SPECS["quantized_grouped_matmul"].Problem(**_weights(rng, s) | {"n": side(rng, 16, s.columns // 2, 16)}, **more)


def _quantize(rng: random.Random, s: Sizes) -> Any:
    scheme = rng.choice(("tensor", "tensor", "row", "block", "square"))
    other = rng.choice(("block", "square")) if scheme in ("block", "square") else scheme
    more = {"scheme": scheme, "scheme_t": other, "to": rng.choice(FLOAT8)}
    dtype = rng.choice(SIXTEEN)
    if scheme == "tensor":
        dtype = rng.choice((*SIXTEEN, "float32"))
        more |= {"of": rng.choice(("array", "gate", "gate_gradient")), "amax": rng.choice(("none", "also", "only"))}
    return SPECS["quantize"].Problem(side(rng, 16, s.rows, 16), side(rng, 16, s.columns, 16), dtype, **more)


def _groups(rng: random.Random, s: Sizes) -> dict[str, Any]:
    return {
        "m": side(rng, 1, s.rows),
        "n": side(rng, 8, s.columns // 2, 8),
        "k": side(rng, 8, s.depth // 2, 8),
        "groups": often(rng, 4, 1, 2, 3, 7, 16, 33),
        "spread": rng.choice(SPREADS),
        "group_offset": rng.random() < 0.3,
    }


def _grouped_matmul(rng: random.Random, s: Sizes) -> Any:
    fields = _groups(rng, s)
    kind = rng.choice(("plain", "plain", "fp8", "fp8", "second", "gathered", "gated"))
    dtype, layout = rng.choice(SIXTEEN), rng.choice(("nn", "nt"))
    fields |= {"dtype": dtype, "layout": layout, "out_dtype": _out(rng, dtype), "bias": rng.random() < 0.4}
    fields |= {"activation": often(rng, "none", *ACTIVATIONS), "row_scale": rng.random() < 0.4}
    fields |= {"residual": rng.random() < 0.3}
    if kind == "fp8":
        fields |= {
            "dtype": rng.choice(FLOAT8),
            "rhs_dtype": rng.choice(FLOAT8),
            "scales": rng.choice((*SCALES, "block")),
            "layout": "nt",
        }
        fields |= {"out_dtype": rng.choice((*SIXTEEN, "float32")), "k": -(-fields["k"] // 16) * 16}
    elif kind == "second":
        fields |= {"second": True}
    elif kind == "gathered":
        fields |= {"lhs_rows": side(rng, 1, s.rows)}
    elif kind == "gated":
        fields |= {"gated_gradient": True, "layout": "nt", "row_scale": True, "bias": False, "out_dtype": dtype}
        fields |= {"residual": False}
        fields |= {"activation": rng.choice(list(ACTIVATIONS))}
    return SPECS["grouped_matmul"].Problem(**fields)


def _gated_grouped_matmul(rng: random.Random, s: Sizes) -> Any:
    fields = _groups(rng, s) | {"activation": rng.choice(list(ACTIVATIONS)), "layout": rng.choice(("nn", "nt"))}
    dtype = rng.choice(SIXTEEN)
    fields |= {"dtype": dtype, "out_dtype": _out(rng, dtype)}
    kind = rng.choice(("plain", "fp8", "fp8", "gradient", "keep", "gathered", "gathered keep"))
    if kind == "fp8":
        fields |= {
            "dtype": rng.choice(FLOAT8),
            "rhs_dtype": rng.choice(FLOAT8),
            "scales": rng.choice((*SCALES, "block")),
            "layout": "nt",
        }
        fields |= {"out_dtype": rng.choice((*SIXTEEN, "float32")), "k": -(-fields["k"] // 16) * 16}
    if kind == "gradient":
        fields |= {"gradient": True, "out_dtype": dtype}
    if "keep" in kind:
        fields |= {"keep": True, "out_dtype": dtype}
    if "gathered" in kind:
        fields |= {"lhs_rows": side(rng, 1, s.rows)}
    return SPECS["gated_grouped_matmul"].Problem(**fields)


def _ragged_contraction(rng: random.Random, s: Sizes) -> Any:
    dtype = rng.choice(SIXTEEN)
    return SPECS["ragged_contraction"].Problem(**_groups(rng, s), dtype=dtype, out_dtype=_out(rng, dtype))


def _cross_entropy(rng: random.Random, s: Sizes) -> Any:
    dtype, vocabulary = rng.choice((*SIXTEEN, "float32")), side(rng, 8, s.columns * rng.choice((1, 20)), 8)
    return SPECS["cross_entropy"].Problem(side(rng, 1, s.rows), vocabulary, dtype, rng.random() < 0.5)


def _rms_norm(rng: random.Random, s: Sizes) -> Any:
    gradient = rng.random() < 0.5
    width = side(rng, 8, s.columns * rng.choice((1, 6)), 8)
    return SPECS["rms_norm"].Problem(
        side(rng, 1, s.rows), width, rng.choice(SIXTEEN), gradient, gradient and rng.random() < 0.5
    )


def _rotary(rng: random.Random, s: Sizes) -> Any:
    positions, kv_heads = side(rng, 1, s.rows // 3), rng.choice((1, 2, 3, 4, 8))
    heads = kv_heads * rng.choice((1, 2, 3, 4, 8))
    dims = rng.choice((64, 80, 96, 112, 128, 160, 192, 256))
    return SPECS["rotary"].Problem(
        positions * rng.randint(1, 3),
        positions,
        heads,
        kv_heads,
        dims,
        rng.choice(SIXTEEN),
        gradient=rng.random() < 0.5,
        normalised=rng.random() < 0.5,
    )


def _embedding(rng: random.Random, s: Sizes) -> Any:
    width = side(rng, 128, s.columns * 2, rng.choice((128, 256, 512)))
    return SPECS["embedding"].Problem(side(rng, 1, s.rows), side(rng, 1, s.rows * 2), width, rng.choice(SIXTEEN))


PROBLEMS: dict[str, Callable[[random.Random, Sizes], Any]] = {
    "matmul": _matmul,
    "gated_matmul": _gated_matmul,
    "quantized_matmul": _quantized_matmul,
    "quantize": _quantize,
    "grouped_matmul": _grouped_matmul,
    "gated_grouped_matmul": _gated_grouped_matmul,
    "ragged_contraction": _ragged_contraction,
    "quantized_grouped_matmul": _quantized_grouped_matmul,
    "cross_entropy": _cross_entropy,
    "rms_norm": _rms_norm,
    "rotary": _rotary,
    "embedding": _embedding,
}

# --- arrays


def _some_zeros(problem: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    """Now and then rows of the first array are zeros."""
    if rng.random() < 0.8:
        return "", arrays
    first = arrays[0].copy()
    first[..., :: rng.randint(2, 5), :] = 0
    return " rows of zeros", (first, *arrays[1:])


def _sizes(p: Any, sizes: np.ndarray, rng: random.Random) -> tuple[str, np.ndarray]:
    """Sizes of groups, some of them no sizes; with a group_offset the first is where the groups begin."""
    how = rng.choice(("as drawn", "few rows", "one has all", "negative", "too many", "none", "one row each"))
    new, first = sizes.copy(), int(p.group_offset)
    own = new[first:]
    if how == "few rows":
        own[:] = own * rng.random()
    elif how == "one has all":
        own[:] = 0
        own[rng.randrange(len(own))] = p.m
    elif how == "negative":
        own[rng.randrange(len(own))] = -rng.randint(1, 2**31 - 1)
    elif how == "too many":
        own[rng.randrange(len(own))] = rng.choice((p.m + 1, 2**31 - 1))
    elif how == "none":
        own[:] = 0
    elif how == "one row each":
        own[:] = 1
    return f" sizes {how}", new


def _spans(p: Any, sizes: np.ndarray) -> tuple[np.ndarray, np.ndarray]:
    """Which rows are of no group, and which groups have no row."""
    groups = ragged.spans_of(p, sizes)
    row = np.arange(p.m)
    return (row < groups[0].start) | (row >= groups[-1].stop), np.array([g.start == g.stop for g in groups])


def _ignored(p: Any, of_rows: list[np.ndarray], of_groups: list[np.ndarray], sizes: np.ndarray) -> None:
    """Puts NaN where the result depends on nothing."""
    outside, empty = _spans(p, sizes)
    for chosen, arrays in ((outside, of_rows), (empty, of_groups)):
        for x in arrays:
            if x.dtype.kind != "i" and "int" not in x.dtype.name:
                x[chosen] = np.nan


def _unnamed(p: Any, lhs: np.ndarray, indices: np.ndarray, sizes: np.ndarray) -> None:
    """NaN in the rows of lhs that no row of a group names."""
    outside, _ = _spans(p, sizes)
    lhs[~np.isin(np.arange(len(lhs)), indices[~outside])] = np.nan


def _of_grouped_matmul(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    lhs, rhs, sizes, *extra = (np.array(x) for x in arrays)
    note, sizes = _sizes(p, sizes, rng)
    names = by_name(p, extra)
    rows = [names[name] for name in ("lhs2", "gate", "up", "row_scale", "residual") if name in names]
    rows += [names["scale_lhs"]] if p.scales in ("row", "block") else []
    groups = [rhs, *(names[name] for name in ("rhs2", "bias", "scale_rhs") if name in names)]
    _ignored(p, rows if p.lhs_rows else [lhs, *rows], groups, sizes)
    if p.lhs_rows:
        _unnamed(p, lhs, names["row_indices"], sizes)
    return note, (lhs, rhs, sizes, *extra)


def _of_gated_grouped_matmul(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    lhs, gate, up, sizes, *extra = (np.array(x) for x in arrays)
    note, sizes = _sizes(p, sizes, rng)
    groups, rows = [gate, up], [] if p.lhs_rows else [lhs]
    if p.scales != "none":
        groups += extra[1:3]
        rows += [extra[0]] if p.scales in ("row", "block") and len(extra[0]) == p.m and not p.lhs_rows else []
    if p.gradient:
        rows += [extra[-1]]
    _ignored(p, rows, groups, sizes)
    if p.lhs_rows:
        _unnamed(p, lhs, extra[-1], sizes)
    return note, (lhs, gate, up, sizes, *extra)


def _of_ragged_contraction(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    lhs, rhs, sizes = (np.array(x) for x in arrays)
    note, sizes = _sizes(p, sizes, rng)
    _ignored(p, [lhs, rhs], [], sizes)
    return note, (lhs, rhs, sizes)


def _of_quantized_grouped_matmul(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    x, w, scales, sizes, *zero_points = (np.array(x) for x in arrays)
    note, sizes = _sizes(p, sizes, rng)
    _ignored(p, [x], [scales, *zero_points], sizes)
    return note, (x, w, scales, sizes, *zero_points)


def _of_quantize(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    how = rng.choice(("", "", "rows of zeros", "large", "small"))
    arrays = tuple(np.array(x) for x in arrays)
    factor = {"large": 2.0**7, "small": 2.0**-13}.get(how, 1.0)
    for x in arrays[: p.sources]:
        x *= np.asarray(factor, x.dtype)
        if how == "rows of zeros":
            x[:: rng.randint(2, 5)] = 0
    return how and f" {how}", arrays


def _of_cross_entropy(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    logits, labels, *rest = (np.array(x) for x in arrays)
    how = rng.choice(("", "no labels", "large", "-inf"))
    if how == "no labels" and not p.gradient:
        labels[:: rng.randint(1, 4)] = rng.choice((-1, -(2**31), p.vocabulary, 2**31 - 1))
    elif how == "large" and not p.gradient:
        logits *= np.asarray(30, logits.dtype)
    elif how == "-inf" and p.vocabulary > 16:
        logits[:, p.vocabulary - 9 :] = -np.inf
        labels %= p.vocabulary - 9
    return how and f" {how}", (logits, labels, *rest)


def _of_embedding(p: Any, arrays: Arrays, rng: random.Random) -> tuple[str, Arrays]:
    g, tokens = (np.array(x) for x in arrays)
    how = rng.choice(("", "one word", "two words", "sorted"))
    if how == "one word":
        tokens[:] = rng.randrange(p.vocabulary)
    elif how == "two words":
        tokens[:] = np.where(np.arange(len(tokens)) % 3, 0, p.vocabulary - 1)
    elif how == "sorted":
        tokens.sort()
    return how and f" {how}", (g, tokens)


ARRAYS: dict[str, Callable[[Any, Arrays, random.Random], tuple[str, Arrays]]] = {
    "grouped_matmul": _of_grouped_matmul,
    "gated_grouped_matmul": _of_gated_grouped_matmul,
    "ragged_contraction": _of_ragged_contraction,
    "quantized_grouped_matmul": _of_quantized_grouped_matmul,
    "quantize": _of_quantize,
    "cross_entropy": _of_cross_entropy,
    "embedding": _of_embedding,
    "rotary": lambda p, arrays, rng: ("", arrays),
}
