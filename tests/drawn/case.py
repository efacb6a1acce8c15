"""A drawn call: what is run, on what, and what must come out."""

from __future__ import annotations

import dataclasses
import math
import random
from collections.abc import Callable, Sequence
from typing import Any

import numpy as np

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import OpSpec

_STEPS = 60  # of a random walk over a search space
_DEFAULT = 0.3  # share of cases that run the default config


@dataclasses.dataclass(frozen=True)
class Wanted:
    """One result, and how far it may be off: the largest error of an element, the norm of all errors, or the share of numbers
    of 8 bits that are rounded to their other neighbour.

    floor: of the size that errors are a share of, where a result is a difference that may be 0; for all, or for each row.
    either: of 8 bits, numbers that are as right as `value`, where they differ.
    """

    name: str
    value: np.ndarray
    limit: float
    by: str = "largest"  # "norm", "neighbours"
    floor: Any = 1e-30
    either: np.ndarray | None = None

    def error(self, out: Any) -> float:
        if self.either is not None and np.shape(out) == self.value.shape:
            out = np.where(out == self.either, self.value, out)
        return _ERRORS[self.by](out, self.value, self.floor)


@dataclasses.dataclass(frozen=True)
class Case:
    """label: the problem, its config and what is special about the arrays, for a report.

    function(backend): what is run, a function of `arrays`. repeats: whether equal inputs must give equal bits.
    """

    label: str
    gpu: Gpu  # that it is compiled for: often one of few SMs, so that a block works through several tiles
    function: Callable[[str], Callable[..., Any]]
    arrays: tuple[np.ndarray, ...]
    wanted: tuple[Wanted, ...]
    repeats: bool = True


def error(out: Any, wanted: Any, floor: Any) -> float:
    """As `tuning.measure.error`, in float64; a NaN that is wanted is no error."""
    out, wanted = (np.asarray(x).astype(np.float64) for x in (out, wanted))
    if out.shape != wanted.shape:
        return math.nan
    if not out.size:
        return 0.0
    finite = np.isfinite(wanted)
    square = np.where(finite, wanted, 0.0) ** 2
    rms = np.maximum(floor, np.sqrt(square.sum() / max(finite.sum(), 1)))
    if out.ndim:
        rms = np.maximum(rms, np.sqrt(square.sum(-1, keepdims=True) / np.maximum(finite.sum(-1, keepdims=True), 1)))
    same = (out == wanted) | (np.isnan(out) & np.isnan(wanted))
    with np.errstate(all="ignore"):
        off = np.where(np.isfinite(out) & finite, np.abs(out - wanted) / (np.abs(wanted) + rms), np.nan)
    return float(np.max(np.where(same, 0.0, off)))


def norm_of_error(out: Any, wanted: Any, floor: float) -> float:
    """|out - wanted| / |wanted| of the arrays as vectors."""
    out, wanted = (np.asarray(x).astype(np.float64) for x in (out, wanted))
    if out.shape != wanted.shape:
        return math.nan
    with np.errstate(all="ignore"):
        same = (out == wanted) | (np.isnan(out) & np.isnan(wanted))
        off = np.linalg.norm(np.where(same, 0.0, out - wanted))
    size = np.linalg.norm(np.where(np.isfinite(wanted), wanted, 0.0))
    return float(off / max(size, floor * math.sqrt(max(wanted.size, 1))))


def other_neighbours(out: Any, wanted: Any, floor: float) -> float:
    """The share of numbers that differ, but for one; NaN where one differs by more than two numbers of 8 bits do."""
    out, wanted = (np.asarray(x).astype(np.float64) for x in (out, wanted))
    if not error(out, wanted, floor) <= 0.26:
        return math.nan
    different = (out != wanted) & ~(np.isnan(out) & np.isnan(wanted))
    return max(0, int(different.sum()) - 1) / max(out.size, 1)


_ERRORS = {"largest": error, "norm": norm_of_error, "neighbours": other_neighbours}


def where_wrong(out: Any, one: Wanted) -> str:
    """How many elements are off, and the first of them."""
    out, wanted = (np.asarray(x).astype(np.float64) for x in (out, one.value))
    if out.shape != wanted.shape:
        return f"shape {out.shape}, not {wanted.shape}"
    rms = np.maximum(one.floor, np.sqrt(np.mean(np.where(np.isfinite(wanted), wanted, 0.0) ** 2)))
    with np.errstate(all="ignore"):
        bad = ~(
            (np.abs(out - wanted) <= one.limit * (np.abs(wanted) + rms)) | (out == wanted) | (np.isnan(out) & np.isnan(wanted))
        )
    if not bad.any():
        return ""
    first = tuple(int(x) for x in np.argwhere(bad)[0])
    return f"{bad.sum()} of {bad.size} off, first at {first}: {out[first]:.5g} for {wanted[first]:.5g}"


def side(rng: random.Random, low: int, high: int, step: int = 1) -> int:
    """Log-uniform, in steps, more often a large one; a third are multiples of 64."""
    least = max(low, high // 8) if rng.random() < 0.6 else low
    drawn = math.exp(rng.uniform(math.log(least), math.log(high)))
    step = math.lcm(step, 64) if rng.random() < 0.33 and drawn >= 64 else step
    return max(step, round(drawn / step) * step)


def often(rng: random.Random, *choices: Any) -> Any:
    """The first in half of the draws, else any: rare options meet each other often."""
    return choices[0] if rng.random() < 0.5 else rng.choice(choices)


def config_of(spec: OpSpec, problem: Any, gpu: Gpu, rng: random.Random) -> Any:
    """The default, or one that a random walk over the search space finds, where each schedule, cluster ... is as likely."""
    default = spec.default(problem, gpu)
    if rng.random() < _DEFAULT:
        return default
    space: dict[str, Sequence[Any]] = {name: list(choices) for name, choices in spec.space(problem, gpu).items()}
    words = [name for name, choices in space.items() if isinstance(choices[0], str)]
    candidates = [c for c in spec.candidates(problem, gpu)[:60] if not spec.leaves_to_xla(c)] or [default]
    found: dict[tuple[Any, ...], list[Any]] = {}
    for start in (default, *rng.sample(candidates, min(3, len(candidates)))):
        config = start
        for _ in range(_STEPS):
            fields = rng.choices([*space, *words, *words], k=rng.randint(1, 4))
            changed = dataclasses.replace(config, **{name: rng.choice(space[name]) for name in fields})
            if spec.check(problem, changed, gpu) is None and not spec.leaves_to_xla(changed):
                config = changed
                found.setdefault(tuple(getattr(config, name) for name in words), []).append(config)
    return rng.choice(found[rng.choice(list(found))]) if found else default


def short(record: Any) -> str:
    """A Problem or Config without what is default."""
    fields = [f for f in dataclasses.fields(record) if getattr(record, f.name) != f.default]
    return f"{type(record).__name__}({', '.join(f'{f.name}={getattr(record, f.name)!r}' for f in fields)})"
