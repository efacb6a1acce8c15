"""How far the ops' models of time are from what was measured: over recorded sweeps and drawn problems under results/.

    python scripts/model_error.py --picture results/DATE-GPU-model-error > results/DATE-GPU-model-error.txt

The error of a time is |log(modelled / measured)|, about the relative error. What the model chooses is the config of a problem
with the least modelled time of those that were measured; it is given as its time over that of the fastest.
"""

from __future__ import annotations

import argparse
import dataclasses
import gzip
import json
from collections.abc import Iterable, Iterator, Sequence
from pathlib import Path
from typing import Any

import numpy as np

from mgpu_ops import SPECS, MatmulConfig, MatmulProblem
from mgpu_ops.core import gpu
from mgpu_ops.registry import database, winner
from mgpu_ops.registry.spec import Config, OpSpec, Problem, baseline_of
from mgpu_ops.tuning.bench import report, results
from mgpu_ops.tuning.labels import problem_of
from mgpu_ops.tuning.replay import sweep

RESULTS = Path(__file__).parents[1] / "results"
DRAWN = RESULTS / "2026-11-22-h200-matmul-drawn.json.gz"
DRAWN_AGAIN = ("2026-11-22-h200-matmul-drawn-2.jsonl.gz", "2026-11-22-h200-matmul-drawn-3.jsonl.gz")
PING_PONG = "2026-11-22-h200-matmul-pingpong.jsonl.gz"
ANYWHERE = "2026-11-23-h200-matmul-anywhere-tuned.jsonl"
ALTERNATIVES = "2026-11-24-h200-matmul-drawn-2411-configs.jsonl"
FEW_ROWS = "2026-11-23-h200-matmul-few-rows-configs.jsonl"
HALF_PANELS = ("2026-11-28-h200-matmul-half-panels.jsonl", "2026-11-28-h200-matmul-mid.jsonl")
MID_ROWS = "2026-11-29-h200-matmul-65-to-3000-rows.jsonl.gz"
FEW_TILES = (
    "2026-11-29-h200-matmul-few-tiles.jsonl.gz",
    "2026-11-29-h200-matmul-few-tiles-again.jsonl",
    "2026-11-29-h200-matmul-few-tiles-margin.jsonl",
)
DECODING = "2026-11-30-h200-matmul-decoding.jsonl.gz"
SHORT_ROWS = ("2026-11-30-h200-matmul-17-to-64-rows.jsonl.gz", "2026-11-30-h200-matmul-65-to-192-rows.jsonl.gz")
BESIDE_XLA = "2026-11-30-h200-matmul-17-to-192-rows-beside-xla.jsonl"
SMALL = ("2026-11-30-h200-matmul-small.jsonl.gz", "2026-11-30-h200-matmul-small-drawn.jsonl")
ROUTERS = "2026-11-30-h200-matmul-routers.jsonl"
EIGHT_BITS = "2026-11-29-h200-matmul-8-bits.jsonl.gz"
ON_H100 = ("2026-11-23-h100-matmul-anywhere.csv", "2026-11-23-h100-matmul-llm-rows.csv")
DEFERRED = ("2026-11-22-h200-matmul-deferred.jsonl.gz", "2026-11-22-h200-matmul-deferred-2.jsonl.gz")
FLOAT32 = "2026-11-22-h200-matmul-float32.jsonl"
ATTENTION = {
    "drawn": "2026-11-22-h200-flash_attention-drawn.jsonl",
    "suite anywhere": "2026-11-22-h200-flash_attention-anywhere-models.jsonl",
    "head dim 128": "2026-11-22-h200-flash_attention-backward-d128.jsonl",
    "long": "2026-11-22-h200-flash_attention-backward-long.jsonl",
    "close to cuDNN": "2026-11-29-h200-flash_attention-backward-drawn.jsonl",
}
GROUPED = {
    "suite anywhere": "2026-11-22-h200-grouped_matmul-anywhere.jsonl",
    "drawn, cold": "2026-11-30-h200-grouped-drawn.jsonl.gz",
    "8 bits, cold": "2026-11-30-h200-grouped-8-bits.jsonl.gz",
    "few rows, cold": "2026-11-30-h200-grouped-few-rows-configs.jsonl.gz",
    "few rows, drawn first, cold": "2026-11-30-h200-grouped-few-rows-defaults.jsonl",
    "few rows, drawn, cold": "2026-11-30-h200-grouped-few-rows-drawn.jsonl",
}
SHORT_TILES = "2026-11-28-h200-grouped_matmul-short-tiles.jsonl.gz"
RESIDUALS = "2026-11-29-h200-matmul-residual-drawn.jsonl.gz"
QUANTIZED_ROWS = "2026-11-22-h200-quantized_matmul-rows.jsonl"
QUANTIZED_FEW = "2026-11-30-h200-quantized_matmul-few-rows.jsonl.gz"
GATED_FEW = ("2026-11-30-h200-gated_matmul-few-rows.jsonl.gz", "2026-11-30-h200-gated_matmul-few-rows-joined.jsonl")
QUANTIZED = ("2026-11-30-h200-quantized_matmul-w4.csv", "2026-11-30-h200-quantized_matmul-w8.csv")
H200, H100 = gpu.find("h200"), gpu.find("h100-sxm")


@dataclasses.dataclass(frozen=True)
class Measured:
    """The times of one problem in microseconds: of configs, and of its baseline."""

    op: str
    source: str  # "sweeps", or what was drawn
    problem: Problem
    times: Sequence[tuple[Config, float]]
    baseline_us: float | None
    gpu: gpu.Gpu = H200

    @property
    def spec(self) -> OpSpec:
        return SPECS[self.op]


def measured() -> list[Measured]:
    """All that there is, of configs whose kernel is the present one; of calls on an H100, also with producers that waited."""
    return [
        *_sweeps(),
        *_no_faster_since(_drawn()),
        *_no_faster_since(_drawn_again()),
        *_timed("ping-pong, cold", PING_PONG),
        *_timed("deferred, cold", *DEFERRED),
        *_no_faster_since(_timed("suite anywhere, cold", ANYWHERE)),
        *_timed("few rows, cold", FEW_ROWS),
        *_no_faster_since(_timed("drawn with alternatives, cold", ALTERNATIVES, now=True)),
        *_no_faster_since(_timed("128 to 2048 rows, cold", *HALF_PANELS, now=True)),
        *_timed("65 to 3000 rows, cold", MID_ROWS, now=True),
        *_timed("few tiles, cold", *FEW_TILES, now=True),
        *_decoding(),
        *_timed("17 to 64 rows, cold", SHORT_ROWS[0], now=True),
        *_timed("65 to 192 rows, cold", SHORT_ROWS[1], now=True),
        *_timed("17 to 192 rows beside XLA, cold", BESIDE_XLA, now=True),
        *_timed("routers, cold", ROUTERS, now=True),
        *_timed("small, cold", SMALL[0], now=True),
        *_timed("small, drawn, cold", SMALL[1], now=True),
        *_timed("8 bits, cold", EIGHT_BITS, now=True),
        *_benched("matmul", "calls on an H100", *ON_H100, on=H100),
        *_float32(),
        *(one for source, name in ATTENTION.items() for one in _attention(source, name)),
        *_no_faster_since(_residuals()),
        *(one for source, name in GROUPED.items() for one in _grouped(source, name)),
        *_short_tiles(),
        *_gated_few("few rows", GATED_FEW[0]),
        *_gated_few("few rows, joined", GATED_FEW[1]),
        *_quantized(),
        *_quantized_few("few rows", held=False),
        *_quantized_few("few rows, drawn", held=True),
        *_benched("quantized_matmul", "layers of Llama 3", *QUANTIZED),
    ]


def _sweeps() -> Iterator[Measured]:
    """The recorded sweeps, with a cold L2."""
    for found in sweep.read_all(RESULTS / "replay"):
        spec = SPECS[found.op]
        pairs = [(c, row) for c, row in zip(found.configs(spec), found.rows, strict=True) if row.kind == "ok"]
        baseline = [row.baseline_us for _, row in pairs if row.baseline_us is not None]
        times = [(config, row.us) for config, row in pairs]
        problem = database.to_problem(spec, found.problem)
        yield Measured(found.op, "sweeps", problem, times, float(np.median(baseline)) if baseline else None)


def _drawn() -> Iterator[Measured]:
    """Drawn problems, with a warm L2. Of the first run without the configs whose copies the kernel has changed since."""
    for number, run in enumerate(json.loads(gzip.decompress(DRAWN.read_bytes()))["runs"]):
        for entry in run["problems"]:
            p = MatmulProblem(**entry["problem"])
            pairs = [(MatmulConfig(**c["config"]), c["us"]) for c in entry["configs"]]
            if number == 0:
                pairs = [(c, us) for c, us in pairs if not _ragged(p, c)]
            if pairs:
                yield Measured("matmul", "drawn, warm", p, pairs, entry["xla_us"])


def _drawn_again() -> Iterator[Measured]:
    """Drawn problems, with a cold L2; schedules for few rows and sums in a cluster are among the configs.

    Without those that were timed again, with the config that a call runs, in `DECODING`.
    """
    since = {one.problem for one in _decoding()}
    return (one for one in _timed("drawn again, cold", *DRAWN_AGAIN) if one.problem not in since)


def _decoding() -> Iterator[Measured]:
    """Few rows by matrices of a model's kind of sides."""
    return _timed("decoding, cold", DECODING, now=True)


def _timed(source: str, *names: str, now: bool = False) -> Iterator[Measured]:
    """Problems of matmul with a cold L2, a line each. now: the kernel loaded what is inside the arrays (`_reaches_outside`)."""
    for line in b"".join(_read(RESULTS / name) for name in names).splitlines():
        entry = json.loads(line)
        if "problem" not in entry:
            continue
        pairs = [
            (MatmulConfig(**c["config"]), c["us"]) for c in entry["configs"] if c.get("us") is not None and not c.get("spills")
        ]
        pairs = [(c, us) for c, us in pairs if c.cluster != "k" or c.split_k == 2]  # some clusters of more had to wait
        if not now:
            pairs = [(c, us) for c, us in pairs if not _reaches_outside(MatmulProblem(**entry["problem"]), c)]
        if pairs:
            yield Measured("matmul", source, MatmulProblem(**entry["problem"]), pairs, entry["xla_us"])


def _no_faster_since(found: Iterable[Measured]) -> Iterator[Measured]:
    """Of matmuls whose producers' warps waited before each copy, the times that are no shorter since these do not.

    Steps of small tiles took as long as their copies, but with up to 64 rows, where HBM takes longer.
    """
    for one in found:
        problem: Any = one.problem
        every: Sequence[tuple[Any, float]] = one.times
        few = problem.m <= 64
        times = [(c, us) for c, us in every if few or c.schedule == "cooperative" or c.tile_m * c.tile_n >= 128 * 128]
        if times:
            yield dataclasses.replace(one, times=times)


def _reaches_outside(p: MatmulProblem, c: MatmulConfig) -> bool:
    """Whether tiles reach outside the arrays in a kernel with its own pipeline: it loaded what is there, and does not now."""
    sides = ((p.m, c.tile_m), (p.n, c.tile_n), (p.k, c.tile_k))
    return c.schedule != "cooperative" and any(side % tile for side, tile in sides)


def _read(path: Path) -> bytes:
    return gzip.decompress(path.read_bytes()) if path.suffix == ".gz" else path.read_bytes()


def _float32() -> Iterator[Measured]:
    """Products of float32, with a cold L2: a line each config, and each of XLA's algorithms."""
    rows = [json.loads(line) for line in (RESULTS / FLOAT32).read_text().splitlines()]
    for sides, layout in dict.fromkeys((tuple(row["sides"]), row["layout"]) for row in rows):
        m, n, k = sides
        of_one = [row for row in rows if (tuple(row["sides"]), row["layout"]) == (sides, layout)]
        of_xla = {row["xla"]: row["us"] for row in of_one if "xla" in row}
        for algorithm, baseline in (("tf32", "default"), ("bf16_x3", "X3"), ("bf16_x6", "highest")):
            problem = MatmulProblem(m, n, k, "float32", "float32", layout, algorithm=algorithm)
            pairs = [(MatmulConfig(**row["config"]), row["us"]) for row in of_one if row.get("algorithm") == algorithm]
            yield Measured("matmul", "float32, cold", problem, pairs, of_xla[baseline])


def _attention(source: str, name: str) -> Iterator[Measured]:
    """Passes of attention with a cold L2: a line each, with the times of configs and of cuDNN; without what cannot run now."""
    for line in (RESULTS / name).read_text().splitlines():
        entry = json.loads(line)
        if not isinstance(entry.get("us"), dict):
            continue  # of results, not of times
        op = "flash_attention" + "_backward" * (entry.get("what", "backward") == "backward")
        spec, found = SPECS[op], entry.get("problem")
        problem = spec.Problem(**found) if found else spec.shapes[entry["name"]]
        configs = {key: spec.Config(**fields) for key, fields in entry["configs"].items()}
        pairs = [(c, entry["us"][key]) for key, c in configs.items() if spec.check(problem, c, H200) is None]
        pairs = [(c, us) for c, us in pairs if not (op.endswith("backward") and _padded_then(name, problem, c))]
        if pairs:
            yield Measured(op, source, problem, pairs, entry["us"].get("cudnn"))


def _padded_then(name: str, problem: Any, config: Any) -> bool:
    """Whether a gradient was computed with more columns when this file's times were taken than it is now."""
    return name.startswith("2026-11-22") and problem.head_dim == 112 and config.dq_step == "same"


def _grouped(source: str, name: str) -> Iterator[Measured]:
    """Products and contractions of groups, drawn, with a cold L2. XLA multiplies all rows by each group's matrix."""
    for line in _read(RESULTS / name).splitlines():
        entry = json.loads(line)
        if "problem" not in entry:
            continue
        spec = SPECS[entry["op"]]
        pairs = [(spec.Config(**config), entry["us"][key]) for key, config in entry["configs"].items()]
        yield Measured(entry["op"], source, spec.Problem(**entry["problem"]), pairs, entry["us"].get("xla"))


def _short_tiles() -> Iterator[Measured]:
    """Grouped products with and without short tiles, with a warm L2: a line for each config of a run. Not what is refused."""
    found: dict[tuple[str, int, Problem], list[tuple[Config, float]]] = {}
    for line in _read(RESULTS / SHORT_TILES).splitlines()[1:]:
        entry = json.loads(line)
        spec = SPECS[entry["op"]]
        problem, config = spec.Problem(**entry["problem"]), spec.Config(**entry["config"])
        if not entry["later"] and spec.check(problem, config, H200) is None:
            found.setdefault((entry["op"], entry["run"], problem), []).append((config, entry["us"]))
    for (op, _, problem), pairs in found.items():
        yield Measured(op, "short tiles, warm", problem, pairs, None)


def _residuals() -> Iterator[Measured]:
    """Drawn products with a residual or another epilogue, with a warm L2: a line for XLA's time, then one for each config."""
    found: list[tuple[Problem, float, list[tuple[Config, float]]]] = []
    for line in _read(RESULTS / RESIDUALS).splitlines()[1:]:
        entry = json.loads(line)
        if entry["config"] == "xla":
            found.append((MatmulProblem(**entry["p"]), entry["us"], []))
        else:
            found[-1][2].append((MatmulConfig(**entry["config"]), entry["us"]))
    for problem, xla_us, pairs in found:
        yield Measured("matmul", "drawn with a residual, warm", problem, pairs, xla_us)


def _gated_few(source: str, name: str) -> Iterator[Measured]:
    """1, 16 and 64 rows of x by gate and up in two matrices or one, with a cold L2, beside XLA; of configs the candidates."""
    spec = SPECS["gated_matmul"]
    for line in _read(RESULTS / name).splitlines()[1:]:
        entry = json.loads(line)
        pairs = [(spec.Config(**c["config"]), c["us"]) for c in entry["configs"] if "us" in c and not c["spills"]]
        problem = spec.Problem(**entry["problem"])
        chosen = spec.candidates(problem, H200)
        yield Measured("gated_matmul", source, problem, [(c, us) for c, us in pairs if c in chosen], entry["xla_us"])


def _quantized() -> Iterator[Measured]:
    """Weights of 8 and 4 bits, and from 16 to 1024 rows, with a cold L2, beside XLA; without what is refused now."""
    spec = SPECS["quantized_matmul"]
    for line in (RESULTS / QUANTIZED_ROWS).read_text().splitlines():
        entry = json.loads(line)
        problem = spec.Problem(**entry["problem"])
        pairs = [(spec.Config(**config), entry["us"][key]) for key, config in entry["configs"].items()]
        pairs = [(c, us) for c, us in pairs if spec.check(problem, c, H200) is None]
        yield Measured("quantized_matmul", "many rows", problem, pairs, entry["us"]["xla"])


def _quantized_few(source: str, held: bool) -> Iterator[Measured]:
    """Weights of 8 and 4 bits, and up to 64 rows, with a cold L2, of blocks whose warps share barriers. held: to no fit."""
    spec = SPECS["quantized_matmul"]
    for line in _read(RESULTS / QUANTIZED_FEW).splitlines():
        entry = json.loads(line)
        if entry.get("start") != "after" or entry["held"] != held:
            continue
        problem = spec.Problem(**entry["problem"])
        pairs = [(spec.Config(**c["config"]), c["us"]) for c in entry["configs"] if "us" in c and not c["spills"]]
        pairs = [(c, us) for c, us in pairs if spec.check(problem, c, H200) is None]
        yield Measured("quantized_matmul", source, problem, pairs, None)


def _benched(op: str, source: str, *names: str, on: gpu.Gpu = H200) -> Iterator[Measured]:
    """What `mgpu-tune bench` measured beside XLA; no time of the kernel where a call ran XLA."""
    spec = SPECS[op]
    kinds = {field.name: str(field.type) for field in dataclasses.fields(spec.Config)}
    for one in results.comparisons(row for name in names for row in results.read_csv(RESULTS / name)):
        if one.ours is None:
            continue
        times: list[tuple[Config, float]] = []
        if one.ours.config.startswith(next(iter(kinds))):
            words = (word.split("=") for word in one.ours.config.partition(";")[0].split())
            config = spec.Config(**{name: int(value) if kinds[name] == "int" else value for name, value in words})
            times = [(config, one.ours.median_us)]
        theirs = one.competitors.get("xla")
        yield Measured(op, source, problem_of(spec, one.problem), times, theirs.median_us if theirs else None, on)


def _ragged(p: MatmulProblem, c: MatmulConfig) -> bool:
    """Whether an operand's rows end within a swizzle tile, and its blocks are wider than one."""
    a = p.layout[0] == "t" and p.m % 64 and c.tile_m > 64
    return bool(a or (p.layout[1] == "n" and p.n % 64 and c.tile_n > 64))


# --- Modelled beside measured


@dataclasses.dataclass(frozen=True)
class Modelled:
    """Modelled and measured times in microseconds, of kernels or of baselines."""

    op: str
    source: str
    modelled: np.ndarray
    measured: np.ndarray
    problems: int
    chosen: tuple[float, ...] = ()  # time of the model's choice over the fastest, of each problem

    def __str__(self) -> str:
        error = np.abs(np.log(self.modelled / self.measured))
        text = (
            f"{self.op}, {self.source}: {self.problems} problems, {len(error)} times; error median {np.median(error):.3f}, "
            f"95th percentile {np.quantile(error, 0.95):.3f}"
        )
        if not self.chosen:
            return text
        mean = np.exp(np.mean(np.log(self.chosen)))
        return f"{text}; the model's choice over the fastest: mean {mean:.3f}, worst {max(self.chosen):.3f}"


def by_source(every: Iterable[Measured]) -> dict[tuple[str, str], list[Measured]]:
    """By op and source."""
    sets: dict[tuple[str, str], list[Measured]] = {}
    for one in every:
        sets.setdefault((one.op, one.source), []).append(one)
    return sets


def modelled(every: Iterable[Measured]) -> list[Modelled]:
    """For each op and source: its kernels, and its baseline where the op has a model of that."""
    sets = by_source(every)
    found = [_kernels(*key, [one for one in of_set if one.times]) for key, of_set in sets.items()]
    told = {key: [one for one in of_set if one.baseline_us is not None] for key, of_set in sets.items()}
    return found + [_baselines(*key, of_set) for key, of_set in told.items() if of_set and SPECS[key[0]].baseline_cost]


def _kernels(op: str, source: str, of_set: Sequence[Measured]) -> Modelled:
    theirs, ours, chosen = [], [], []
    for one in of_set:
        us = np.array([time for _, time in one.times])
        cost = np.array([1e6 * one.spec.cost(one.problem, config, one.gpu) for config, _ in one.times])
        theirs.append(cost)
        ours.append(us)
        chosen.append(float(us[np.argmin(cost)] / us.min()))
    return Modelled(op, source, np.concatenate(theirs), np.concatenate(ours), len(of_set), tuple(chosen))


def _baselines(op: str, source: str, of_set: Sequence[Measured]) -> Modelled:
    cost = SPECS[op].baseline_cost
    assert cost is not None
    pairs = [(time, one.baseline_us) for one in of_set if (time := cost(one.problem, one.gpu)) is not None]
    theirs, ours = np.array(pairs).T * [[1e6], [1.0]]
    return Modelled(f"{op}'s baseline", source, theirs, ours, len(pairs))


def gains(of_set: Sequence[Measured]) -> list[tuple[bool, float]]:
    """Of each call without an entry: whether it runs the kernel, as `winner` has it, and the baseline's time over its own."""
    found = []
    for one in of_set:
        if not one.times:
            continue
        config, us = min(one.times, key=lambda pair: one.spec.cost(one.problem, pair[0], one.gpu))
        baseline = baseline_of(one.spec, one.problem)
        times = winner.expected(one.spec, one.problem, config, one.gpu, baseline)
        if times is None or one.baseline_us is None:
            continue
        kernel = times.winner == "kernel" or baseline.differs is not None
        found.append((kernel, one.baseline_us / us if kernel else 1.0))
    return found


def calls(op: str, source: str, found: Sequence[tuple[bool, float]]) -> str:
    """What calls without an entry gain, by their `gains`: with the config that the model chooses, or the baseline."""
    ratios = [ratio for _, ratio in found]
    mean = np.exp(np.mean(np.log(ratios)))
    return (
        f"{op}, {source}: a call without an entry runs the kernel in {sum(kernel for kernel, _ in found)} of {len(found)} "
        f"problems; the baseline's time over its own: mean {mean:.3f}, worst {min(ratios):.3f}, "
        f"below 0.97 in {sum(ratio < 0.97 for ratio in ratios)}"
    )


# --- The picture

_COLOURS = (
    "#0b6e99",
    "#b36a00",
    "#3f8f3f",
    "#9a7aa0",
    "#a03030",
    "#555555",
    "#7a5a3a",
    "#2aa198",
    "#cc6699",
    "#8a8a00",
    "#4455cc",
    "#222222",
    "#e08080",
    "#6a3d9a",
    "#c9a227",
    "#5f9ea0",
    "#c2b280",
    "#7fb069",
    "#d94f70",
    "#3b5b3b",
    "#b0c4de",
    "#8b4513",
)
_MARKERS: tuple[Any, ...] = (*"os^Dv<>phXd*PH8.", *((points, 1) for points in range(3, 9)))  # the last are stars
_ACROSS = 3


def picture(found: Sequence[Modelled], stem: Path) -> list[Path]:
    """Modelled against measured time of each op, as PNG and SVG."""
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    ops = list(dict.fromkeys(one.op for one in found))
    down = -(-len(ops) // _ACROSS)
    with pyplot.rc_context(report.STYLE):
        figure, axes = pyplot.subplots(down, _ACROSS, figsize=(12, 0.5 + 3.9 * down), squeeze=False, layout="constrained")
        for ax in axes.flat[len(ops) :]:
            ax.set_visible(False)
        for ax, op in zip(axes.flat, ops):
            _draw(ax, op, [one for one in found if one.op == op])
        figure.suptitle(
            "Modelled and measured times on an H200, and on an H100 where said: on the line they are equal, dotted 25 % apart",
            x=0.01,
            ha="left",
        )
        paths = report.save_figure(figure, stem.with_name(stem.name + ".png"))
        pyplot.close(figure)
    return paths


def _draw(ax: Any, op: str, of_op: Sequence[Modelled]) -> None:
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    every = np.concatenate([np.concatenate([one.modelled, one.measured]) for one in of_op])
    ends = np.array([every.min() / 1.2, every.max() * 1.2])
    for factor in (0.8, 1.0, 1.25):
        ax.plot(ends, factor * ends, color="#444444", lw=1.0, ls="-" if factor == 1.0 else ":", zorder=1)
    for one, colour, marker in zip(of_op, _COLOURS[: len(of_op)], _MARKERS[: len(of_op)], strict=True):
        look = {"color": colour, "marker": marker, "ms": 3, "mew": 0, "alpha": 0.45, "ls": "", "rasterized": True}
        ax.plot(one.measured, one.modelled, label=f"{one.source} ({len(one.measured)})", **look)
    ax.set_xscale("log")
    ax.set_yscale("log")
    ax.set_xlim(ends)
    ax.set_ylim(ends)
    ax.set_aspect("equal")
    subs = (1, 2, 5) if ends[1] < 100 * ends[0] else (1,)
    for axis in (ax.xaxis, ax.yaxis):
        axis.set_major_locator(LogLocator(subs=subs, numticks=12))
        axis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
        axis.set_minor_formatter(NullFormatter())
    ax.tick_params(labelsize=8)
    ax.set_xlabel("measured (us)")
    ax.set_ylabel("modelled (us)")
    ax.set_title(op, loc="left", fontsize=10)
    ax.grid(color="#dddddd")
    crowded = len(of_op) > 8
    ax.legend(
        frameon=False, fontsize=6 if crowded else 8, labelspacing=0.2 if crowded else 0.5, loc="upper left", markerscale=2
    )


if __name__ == "__main__":
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--picture", type=Path, metavar="STEM", help="also draw STEM.png and STEM.svg")
    arguments = parser.parse_args()
    every = measured()
    shown = modelled(every)
    for one in shown:
        print(one)
    for (op, source), of_set in by_source(every).items():
        if not SPECS[op].baseline_cost or source in ("sweeps", "calls on an H100"):  # these had entries, or chose already
            continue
        found = gains(of_set)
        print(calls(op, source, found) if found else f"{op}, {source}: its baseline was not timed")
    if arguments.picture:
        picture(shown, arguments.picture)
