"""Pictures of searches and their results: convergence, time against each parameter, failures, TFLOP/s."""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import math
import re
import statistics
from collections import Counter
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.database import Entry
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning.bench import collectives as collective_bench
from mgpu_ops.tuning.bench import report
from mgpu_ops.tuning.bench.implementations import COMPETITORS
from mgpu_ops.tuning.bench.results import OURS, ROOFLINE, SUSTAINED, Measurement, Stamp, Texts
from mgpu_ops.tuning.labels import label
from mgpu_ops.tuning.terminal import count, printable

if TYPE_CHECKING:
    import optuna
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

    from mgpu_ops.tuning.replay.sweep import Sweep

# --- What is drawn --------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Trial:
    """One candidate, in the order tried: its fields, and its time in microseconds or its kind of failure and the reason."""

    origin: str  # default, near, model, search, local, sweep
    config: Mapping[str, Any]
    kind: str  # "ok", or of failure
    us: float | None = None
    detail: str = ""
    baseline_us: float | None = None  # in the same rounds


@dataclasses.dataclass(frozen=True)
class Run:
    """All trials of one problem. `ordered`: they were tried one after the other, so that convergence can be drawn."""

    op: str
    problem: str
    gpu: str
    kind: str  # measured, modelled, recorded
    trials: tuple[Trial, ...]
    ordered: bool = True

    @property
    def title(self) -> str:
        told = "" if self.kind == "measured" else f", {self.kind.upper()}, not measured"
        return f"{self.op} {self.problem} on {self.gpu}{told}"

    @property
    def ok(self) -> list[Trial]:
        return [trial for trial in self.trials if trial.us is not None]

    @property
    def best(self) -> Trial | None:
        return min(self.ok, key=lambda trial: trial.us or math.inf, default=None)

    @property
    def varying(self) -> list[str]:
        """The fields that are not the same in all trials that worked."""
        fields = self.best.config if self.best else ()
        return [field for field in fields if len({trial.config.get(field) for trial in self.ok}) > 1]

    @property
    def baseline_us(self) -> float | None:
        times = [trial.baseline_us for trial in self.ok if trial.baseline_us]
        return statistics.median(times) if times else None

    @property
    def failures(self) -> Counter[tuple[str, str]]:
        """How many trials failed, by kind and reason."""
        return Counter((trial.kind, trial.detail) for trial in self.trials if trial.us is None)


def run_of_study(study: optuna.Study, specs: Mapping[str, OpSpec]) -> Run | None:
    """The finished trials of an optuna study that the tuner made; None for a study of something else."""
    identity = study.user_attrs.get("identity")
    if not isinstance(identity, dict) or str(identity.get("op")) not in specs:
        return None
    trials = [_of_optuna(trial) for trial in study.get_trials(deepcopy=False) if trial.state.name in ("COMPLETE", "PRUNED")]
    return Run(
        op=str(identity["op"]),
        problem=problem_label(specs[identity["op"]], identity.get("problem", {})),
        gpu=str(identity.get("gpu")),
        kind=str(identity.get("kind")),
        trials=tuple(trials),
    )


def _of_optuna(trial: optuna.trial.FrozenTrial) -> Trial:
    told = trial.user_attrs
    config = told.get("config")
    value = (trial.values or [None])[0] if told.get("kind", "ok") == "ok" else None
    return Trial(
        origin=str(told.get("origin", "search")),
        config=config if isinstance(config, dict) else trial.params,
        kind="ok" if value is not None else str(told.get("kind", "unknown")),
        us=value,
        detail=str(told.get("detail", "")),
        baseline_us=told.get("baseline_us"),
    )


def run_of_sweep(sweep: Sweep, specs: Mapping[str, OpSpec]) -> Run:
    """The configs of a sweep, whose order means nothing."""
    trials = [
        Trial(
            origin="sweep",
            config={k: v[i] for (k, v), i in zip(sweep.parameters.items(), row.config)},
            kind=row.kind,
            us=row.us if row.kind == "ok" else None,
            detail=row.detail,
            baseline_us=row.baseline_us,
        )
        for row in sweep.rows
    ]
    text = problem_label(specs[sweep.op], sweep.problem) if sweep.op in specs else sweep.name
    return Run(sweep.op, text, sweep.device, sweep.kind, tuple(trials), ordered=False)


def problem_label(spec: OpSpec, fields: Mapping[str, Any]) -> str:
    """The problem as `bench` names it; its fields as they are, if this version of the op has others."""
    from mgpu_ops.registry import database

    if not isinstance(fields, Mapping):  # a journal may hold anything
        return str(fields)
    try:
        return label(spec, "", database.to_problem(spec, fields))
    except (TypeError, ValueError):
        return " ".join(f"{k}={v}" for k, v in fields.items())


def rows_of(spec: OpSpec, gpu: Gpu, entries: Iterable[Entry]) -> list[Measurement]:
    """Measured entries as measurements: ours, the baseline of the same run, and, but for collectives, the roofline.

    Modelled entries and those of other versions of the op are left out. All count as right, as nothing else is ever stored: an
    entry's error may have been computed differently then.
    """
    from mgpu_ops.registry import database

    rows = []
    for entry in entries:
        if entry.evidence.kind == "measured" and not database.fault_of(entry, gpu, spec):
            rows += _rows_of(spec, gpu, entry)
    return rows


def _rows_of(spec: OpSpec, gpu: Gpu, entry: Entry) -> list[Measurement]:
    from mgpu_ops.registry import database

    e = entry.evidence
    problem = database.to_problem(spec, entry.problem)
    op = spec.name + SUSTAINED * (e.objective == "sustained")
    stamp: Stamp = {"op": op, "gpu": e.gpu, "driver": e.driver or "", "jax": e.jax, "date": e.date}
    text = label(spec, "", problem)
    times: list[tuple[str, float, float, float | None]] = [(OURS, e.median_us, e.spread_us, 0.0)]
    if e.baseline and e.baseline_us:
        competitor = COMPETITORS.get(spec.name, {}).get(e.baseline)
        times.append((e.baseline, e.baseline_us, 0.0, None if competitor is not None and competitor.yardstick else 0.0))
    if spec.devices(problem) > 1:
        rows = []
        for impl, us, spread, _ in times:
            texts: Texts = {**stamp, "problem": text, "impl": impl, "config": ""}
            rows.append(collective_bench.measurement(spec, problem, texts, {"median_us": us, "spread_us": spread}, 0.0))
        return rows
    flops, moved = spec.flops(problem), spec.bytes(problem)
    least_us = max(flops / gpu.bf16_flops, moved / gpu.memory_bytes_per_s) * 1e6
    times.append((ROOFLINE, least_us, 0.0, 0.0))
    return [
        Measurement(
            problem=text,
            impl=impl,
            config="",
            median_us=us,
            spread_us=spread,
            tflops=flops / us / 1e6,
            gbs=moved / us / 1e3,
            error=error,
            watts={OURS: e.watts, e.baseline: e.baseline_watts}.get(impl),
            clock_mhz=e.clock_mhz if impl == OURS else None,
            joules={OURS: e.joules, e.baseline: e.baseline_joules}.get(impl),
            **stamp,
        )
        for impl, us, spread, error in times
    ]


# --- Pictures -------------------------------------------------------------------------------------

_ORIGINS = {
    "default": "#222222",
    "near": "#e39b3b",
    "model": "#9a7aa0",
    "search": "#0b6e99",
    "local": "#7fb069",
    "sweep": "#0b6e99",
}
_KINDS = {
    "constraint": "#b8b8b8",
    "compile": "#e39b3b",
    "timeout": "#9a7aa0",
    "crash": "#c0392b",
    "wrong": "#0b6e99",
}
_OTHER = "#6b6b6b"
_FAILED = "#c0392b"
_BEST = "#c0392b"
_MARKERS = "osD^v<>ph"  # so that colours are not all that tells origins apart
_HATCHES = ("", "///", "...", "xx", "\\\\\\", "--")  # nor kinds of failures
_ROWS = 24  # problems in a picture of failures; the others are counted


def _shown(run: Run) -> Run:
    """With its texts escaped, so that a picture can show them."""

    def text(value: Any) -> Any:
        return printable(value) if isinstance(value, str) else value

    trials = tuple(
        dataclasses.replace(
            trial, origin=text(trial.origin), kind=text(trial.kind), config={text(k): text(v) for k, v in trial.config.items()}
        )
        for trial in run.trials
    )
    return Run(text(run.op), text(run.problem), text(run.gpu), text(run.kind), trials, run.ordered)


def convergence(run: Run, stem: Path, suffixes: Sequence[str] = report.SUFFIXES) -> list[Path]:
    """Time of each trial, coloured by origin, and the best so far. ValueError where no trial worked."""
    run = _shown(run)
    if run.best is None:
        raise ValueError(f"{run.title}: no trial worked, so there is no time to draw")
    with figure_of(1, 1, (9.0, 4.6), run.title) as (figure, axes):
        ax = axes[0][0]
        numbered = list(enumerate(run.trials, 1))
        for place, origin in enumerate(dict.fromkeys(trial.origin for trial in run.trials)):
            points = [(n, t.us) for n, t in numbered if t.us is not None and t.origin == origin]
            if points:
                look: Any = {"color": _ORIGINS.get(origin, _OTHER), "marker": _MARKERS[place % len(_MARKERS)]}
                ax.scatter(*zip(*points), s=32, label=origin, zorder=3, lw=0, **look)
        so_far = list(itertools.accumulate((t.us or math.inf for t in run.trials), min))
        first = next(n for n, us in enumerate(so_far) if us < math.inf)  # those before it failed
        line = {"color": _BEST, "lw": 1.5, "label": "best so far", "zorder": 2}
        ax.step(range(first + 1, len(so_far) + 1), so_far[first:], where="post", **line)
        if run.baseline_us:
            ax.axhline(run.baseline_us, color="black", lw=1, ls="--", label=f"baseline {_us(run.baseline_us)}", zorder=1)
        _time_axis(ax, [t.us for t in run.ok if t.us], run.baseline_us)
        failed = [n for n, t in numbered if t.us is None]
        if failed:
            transform = ax.get_xaxis_transform()
            ax.plot(failed, [0.985] * len(failed), "x", color=_FAILED, ms=6, transform=transform, label="failed", zorder=3)
        ax.set_xlim(0.3, len(numbered) + 0.7)
        ax.set_xlabel("trial")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.set_title(f"best {_us(run.best.us)} at trial {so_far.index(min(so_far)) + 1} of {len(numbered)}", **_SMALL)
        figure.legend(loc="outside lower left", ncols=8, frameon=False, fontsize=8)
        return save(figure, stem, suffixes)


def parameters(run: Run, stem: Path, suffixes: Sequence[str] = report.SUFFIXES) -> list[Path]:
    """Time against each field that varies: all trials, the best of each value, the best of all."""
    run = _shown(run)
    best = run.best
    if best is None or best.us is None:
        raise ValueError(f"{run.title}: no trial worked, so there is no time to draw")
    fields = run.varying
    if not fields:
        raise ValueError(f"{run.title}: all trials that worked have one config, so no parameter varies")
    across = min(4, len(fields))
    down = math.ceil(len(fields) / across)
    with figure_of(down, across, (3.0 * across + 0.6, 2.5 * down + 0.9), run.title) as (figure, axes):
        panels = [ax for row in axes for ax in row]
        for ax, field in zip(panels, fields):
            values = sorted({t.config.get(field) for t in run.ok}, key=lambda v: (str(type(v)), v))
            groups = [[t.us for t in run.ok if t.config.get(field) == v and t.us is not None] for v in values]
            for x, times in enumerate(groups):
                spread = [x + 0.3 * (i / max(1, len(times) - 1) - 0.5) for i in range(len(times))]  # side by side, not jittered
                ax.scatter(spread, times, s=12, color=_ORIGINS["search"], alpha=0.55, lw=0)
            ax.plot(range(len(values)), [min(times) for times in groups], color="#444444", lw=1.2, marker="_", ms=12)
            ax.scatter([values.index(best.config[field])], [best.us], s=42, color=_BEST, marker="D", lw=0, zorder=3)
            ax.set_xticks(range(len(values)), [str(v) for v in values], fontsize=8)
            ax.set_xlim(-0.6, len(values) - 0.4)
            ax.set_xlabel(field, fontsize=9)
            _time_axis(ax, [t.us for t in run.ok if t.us], None)
        for ax in panels[len(fields) :]:
            ax.set_visible(False)
        fixed = [f"{k}={v}" for k, v in best.config.items() if k not in fields]
        told = [f"{count(len(run.ok), 'trial')}; line: best of each value; diamond: best of all, {_us(best.us)}"]
        told += ["always " + " ".join(fixed)] if fixed else []
        figure.supxlabel("\n".join(report.wrapped(line, figure.get_figwidth(), 8) for line in told), fontsize=8)
        return save(figure, stem, suffixes)


def failures(runs: Sequence[Run], stem: Path, suffixes: Sequence[str] = report.SUFFIXES) -> list[Path]:
    """How many trials of each problem failed, by kind. ValueError where none did."""
    failing = sorted((_shown(run) for run in runs if run.failures), key=lambda run: -run.failures.total())
    if not failing:
        raise ValueError("no trial failed, so there is nothing to draw")
    shown, rest = failing[:_ROWS], failing[_ROWS:]
    several = len({run.op for run in shown}) > 1
    title = "failed trials by kind" if several else f"{shown[0].op}: failed trials by kind"
    with figure_of(1, 1, (9.0, 1.7 + 0.36 * len(shown)), title) as (figure, axes):
        ax = axes[0][0]
        counts = [_by_kind(run) for run in shown]
        left = [0] * len(shown)
        for place, kind in enumerate(sorted({kind for count in counts for kind in count})):
            widths = [count[kind] for count in counts]
            look: Any = {"color": _KINDS.get(kind, _OTHER), "hatch": _HATCHES[place % len(_HATCHES)]}
            ax.barh(range(len(shown)), widths, 0.7, left=left, label=kind, edgecolor="#ffffff", linewidth=0, **look)
            left = [a + b for a, b in zip(left, widths)]
        for y, run in enumerate(shown):
            text = f"{left[y]} of {len(run.trials)}"
            ax.annotate(text, (left[y], y), (4, 0), textcoords="offset points", va="center", fontsize=8)
        names = [" ".join([run.op] * several + [run.problem]) for run in shown]
        ax.set_yticks(range(len(shown)), [_short(name, 70) for name in names], fontsize=8)
        ax.set_ylim(len(shown) - 0.4, -0.6)
        ax.set_xlim(0, max(left) * 1.15)
        ax.set_xlabel("trials")
        ax.xaxis.get_major_locator().set_params(integer=True)
        ax.grid(axis="y", visible=False)
        if rest:
            ax.set_title(f"and {sum(r.failures.total() for r in rest)} of {len(rest)} more problems", **_SMALL)
        figure.legend(loc="outside lower left", ncols=8, frameon=False, fontsize=8)
        return save(figure, stem, suffixes)


def rates(rows: Sequence[Measurement], stem: Path, suffixes: Sequence[str] = report.SUFFIXES) -> list[Path]:
    """TFLOP/s beside the competitors and the roofline, of collectives time and bus bandwidth."""
    return report.picture(rows, stem.with_name(stem.name + ".png"), suffixes)


def draw(
    runs: Sequence[Run],
    rows: Mapping[tuple[str, str], Sequence[Measurement]],
    directory: Path,
    suffixes: Sequence[str] = report.SUFFIXES,
) -> Iterator[tuple[str, str, list[Path]]]:
    """All pictures there are, as (op, what it shows, its files: one for each of `suffixes`).

    Of each run its convergence, if it has an order, and time against each parameter; the failures of each op; and the rates
    of `rows`, by (what, op).
    """
    taken: set[str] = set()

    def stem(*words: str) -> Path:
        return directory / slug("-".join(words), taken)

    for (what, op), group in sorted(rows.items(), key=lambda item: (item[0][0], report.place(item[0][1], ""))):
        between = any(row.devices is not None for row in group)
        told, word = ("time and bus bandwidth", "bandwidth") if between else ("TFLOP/s", "tflops")
        yield op, f"{told} of {op}, {what}", rates(group, stem(op, what, word), suffixes)
    for op in dict.fromkeys(run.op for run in runs):
        of_op = [run for run in runs if run.op == op]
        if any(run.failures for run in of_op):
            yield op, f"failures of {op}", failures(of_op, stem(op, "failures"), suffixes)
        for run in of_op:
            if run.ordered and run.best is not None:
                yield op, f"convergence of {run.title}", convergence(run, stem(op, run.problem, "convergence"), suffixes)
            if run.varying:
                yield op, f"parameters of {run.title}", parameters(run, stem(op, run.problem, "parameters"), suffixes)


def slug(text: str, taken: set[str]) -> str:
    """A text as a file's name, of letters, digits, dots and dashes, that is not in `taken`; it is added there."""
    name = re.sub(r"[^A-Za-z0-9.]+", "-", text).strip("-.")[:100] or "run"
    number = 1
    while (found := name if number == 1 else f"{name}-{number}") in taken:
        number += 1
    taken.add(found)
    return found


_SMALL: dict[str, Any] = {"loc": "left", "fontsize": 9, "color": "#444444"}


@contextlib.contextmanager
def figure_of(down: int, across: int, size: tuple[float, float], title: str) -> Iterator[tuple[Figure, Any]]:
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(report.STYLE):
        figure, axes = pyplot.subplots(down, across, figsize=size, squeeze=False, layout="constrained")
        try:
            figure.suptitle(report.wrapped(title, size[0], 11), x=0.01, ha="left", fontsize=11)
            for ax in axes.flat:
                ax.grid(color="#dddddd")
                ax.set_axisbelow(True)
                ax.spines[["top", "right"]].set_visible(False)
            yield figure, axes
        finally:
            pyplot.close(figure)


def save(figure: Figure, stem: Path, suffixes: Sequence[str] = report.SUFFIXES) -> list[Path]:
    return report.save_figure(figure, stem.with_name(stem.name + ".png"), suffixes)


def _time_axis(ax: Axes, times: Sequence[float], also: float | None) -> None:
    """An axis of microseconds in plain numbers, logarithmic where the times are far apart."""
    from matplotlib.ticker import FuncFormatter, LogLocator, NullFormatter

    low, high = min([*times, also or math.inf]), max([*times, also or 0.0])
    if high > 4 * low:
        ax.set_yscale("log")
        subs = (1, 2, 5) if high < 100 * low else (1,)
        ax.yaxis.set_major_locator(LogLocator(subs=subs, numticks=12))
        ax.yaxis.set_minor_formatter(NullFormatter())
        room = (high / low) ** 0.07
        ax.set_ylim(low / room, high * room)
    else:
        room = 0.07 * (high - low) or 0.05 * high
        ax.set_ylim(low - room, high + room)
    ax.yaxis.set_major_formatter(FuncFormatter(lambda us, _: f"{us:g}"))
    ax.set_ylabel("time (us)", fontsize=9)
    ax.tick_params(labelsize=8)


def _by_kind(run: Run) -> Counter[str]:
    counts: Counter[str] = Counter()
    for (kind, _), number in run.failures.items():
        counts[kind] += number
    return counts


def _us(us: float | None) -> str:
    return f"{us:.4g} us"


def _short(text: str, most: int) -> str:
    return text if len(text) <= most else text[: most - 3] + "..."
