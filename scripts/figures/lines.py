"""Benchmarks in results/ as the problems that they timed, and the lines of tables that are made of them."""

from __future__ import annotations

import csv
import functools
import math
import re
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from pathlib import Path

from mgpu_ops.tuning.bench.earlier import earlier_config

HEAD = ("| | beside | problems | mean | worst | best | below 1x | earlier config |", "|---|---|---|---|---|---|---|---|")

Row = dict[str, str]
Ratio = Callable[["Problem"], float]


@dataclass(frozen=True)
class Problem:
    """What was timed in turn on one problem: a row for each implementation."""

    name: str  # square-2048
    shape: tuple[int, ...]  # (2048, 2048, 2048)
    file: Path
    rows: dict[str, Row]

    def us(self, impl: str) -> float:
        return float(self.rows[impl]["median_us"])

    def rate(self, impl: str) -> float:
        return float(self.rows[impl]["tflops"])

    @functools.cached_property
    def earlier_config(self) -> bool | None:
        return earlier_config(self.rows["mgpu_ops"])


def newest(results: Path, what: str) -> Iterator[tuple[Path, list[Row]]]:
    """The CSV files results/<date>-<what>.csv, oldest first, where `what` is a regular expression."""
    for path in sorted(results.glob("*.csv")):
        if re.fullmatch(r"\d{4}-\d\d-\d\d-" + what, path.stem):
            with path.open(newline="", encoding="utf-8") as stream:
                yield path, list(csv.DictReader(stream))


def problems(results: Path, what: str, *others: str) -> list[Problem]:
    """Of the benchmarks `what`, each problem from the newest file that has it and `others`. LookupError where there is none."""
    found: dict[tuple[str, str], Problem] = {}
    for path, rows in newest(results, what):
        here: dict[tuple[str, str], dict[str, Row]] = {}
        for row in rows:
            here.setdefault((row["op"], row["problem"]), {})[row["impl"]] = row
        for key, impls in here.items():
            if not {*others} <= impls.keys():
                continue
            name, shape = key[1].split()[:2]
            found[key] = Problem(name, tuple(int(n) for n in shape.split("x")), path, impls)
    if not found:
        raise LookupError(f"{results} has no benchmark {what}")
    return list(found.values())


MATMULS = "h200-matmul(-llm-rows)?"  # of the published suite, some of which are among the layers of Llama 3 too


def published_matmuls(results: Path) -> list[Problem]:
    """matmul's published suite: each problem by its newest time."""
    names = {p.name for p in problems(results, "h200-matmul")}
    return [p for p in problems(results, MATMULS) if p.name in names]


@dataclass(frozen=True)
class Strip:
    """Ratios of some problems beside the fastest of some competitors: a line of a table, or of the picture."""

    what: str
    beside: str
    ratios: list[tuple[float, str]]  # with the problem's name, the smallest first
    earlier: int | None = None  # how many of them were timed with another config than a call uses now; None: not known of any

    @property
    def mean(self) -> float:
        return math.exp(math.fsum(math.log(r) for r, _ in self.ratios) / len(self.ratios))


def strip(
    what: str, beside: str, found: Iterable[Problem], *competitors: str, ratio: Ratio | None = None, least: int | None = None
) -> Strip:
    """The ratios of those problems that at least `least` of `competitors` ran, by default all. LookupError where there is none.

    ratio: by default the time of the fastest of these over ours.
    """
    ratio = ratio or (lambda p: min(p.us(name) for name in competitors if name in p.rows) / p.us("mgpu_ops"))
    least = len(competitors) if least is None else least
    timed = [p for p in found if len({*competitors} & p.rows.keys()) >= least]
    if not timed:
        raise LookupError(f"no problem of {what!r} was timed beside {', '.join(competitors)}")
    known = [p.earlier_config for p in timed if p.earlier_config is not None]
    return Strip(what, beside, sorted((ratio(p), p.name) for p in timed), sum(known) if known else None)


def line(what: str, beside: str, found: Iterable[Problem], *competitors: str, ratio: Ratio | None = None) -> str:
    """A line of a table, of a `strip`: geometric mean, extremes with their problems, and how many are below 1."""
    return line_of(strip(what, beside, found, *competitors, ratio=ratio))


def line_of(s: Strip) -> str:
    (worst, worst_name), (best, best_name) = s.ratios[0], s.ratios[-1]
    below = sum(r < 1 for r, _ in s.ratios)
    extremes = (f"{worst:.3f}x ({worst_name})", f"{best:.3f}x ({best_name})")
    cells = (s.what, s.beside, len(s.ratios), f"{s.mean:.3f}x", *extremes, below, "" if s.earlier is None else s.earlier)
    return f"| {' | '.join(map(str, cells))} |"


def of_dense(p: Problem) -> float:
    return p.rate("mgpu_ops") / p.rate("dense")


def sources(*files: Path) -> Iterator[str]:
    """Where a table is from, and the picture that lies beside the first file."""
    found = list(dict.fromkeys(files))
    yield f"\nFrom {', '.join(f'`results/{path.name}`' for path in found)}."
    if found[0].with_suffix(".png").exists():
        yield f"\n![{found[0].stem}](results/{found[0].stem}.png)"


def files(*groups: list[Problem]) -> list[Path]:
    return [p.file for group in groups for p in group]
