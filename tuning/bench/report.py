"""Results of benchmarks as a table for the terminal and as a picture, and the order of problems in both."""

from __future__ import annotations

import dataclasses
import io
import itertools
import math
import os
import re
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, Literal

from rich.table import Table
from rich.text import Text

import mgpu_ops
from mgpu_ops.collectives.problem import size_text
from mgpu_ops.tuning import files, suites
from mgpu_ops.tuning.bench.results import (
    BEST,
    OURS,
    SUSTAINED,
    Comparison,
    Measurement,
    base_op,
    by_op_and_gpu,
    compared,
    comparisons,
    summary,
    wrong,
    yardsticks,
)
from mgpu_ops.tuning.labels import problem_of
from mgpu_ops.tuning.tables import digits
from mgpu_ops.tuning.terminal import printable

if TYPE_CHECKING:
    from matplotlib.axes import Axes
    from matplotlib.figure import Figure

# --- An order -------------------------------------------------------------------------------------


def ordered(every: Iterable[Comparison]) -> list[Comparison]:
    """By op and GPU; of these first the problems that have a name, in the op's order, then the others by size."""
    return sorted(every, key=lambda each: place(each.op, each.problem, each.gpu))


def place(op: str, problem: str, gpu: str = "") -> tuple[Any, ...]:
    """The key by which `ordered` sorts."""
    ops, base = list(mgpu_ops.SPECS), base_op(op)
    known = ops.index(base) if base in ops else len(ops)
    named = suites.all_names(mgpu_ops.SPECS[base]) if base in ops else []
    name = problem.partition(" ")[0]
    listed = named.index(name) if name in named else len(named)
    return known, op, gpu, listed, _head_dim(op, problem) or 0, _numbers_as_such(problem)


def group(comparison: Comparison) -> str:
    """The group a problem belongs to in pictures: its head dim, or its model; "" where it has neither."""
    head_dim = _head_dim(comparison.op, comparison.problem)
    if head_dim is not None:
        return f"head dim {head_dim}"
    name = comparison.problem.partition(" ")[0]
    spec = mgpu_ops.SPECS.get(base_op(comparison.op))
    if spec is None or suites.named(spec, name) is None:
        return ""
    return re.split(r"-(?:qkv|out|gate_up|down)-|-\d+$", name)[0]


def _head_dim(op: str, problem: str) -> int | None:
    spec = mgpu_ops.SPECS.get(base_op(op))
    if spec is None or "head_dim" not in {field.name for field in dataclasses.fields(spec.Problem)}:
        return None
    try:
        return int(problem_of(spec, problem).head_dim)
    except ValueError:
        return None


def _numbers_as_such(text: str) -> list[tuple[int, str]]:
    return [(int(part), "") if part.isdecimal() else (-1, part) for part in re.split(r"(\d{1,18})", text)]


# --- A table --------------------------------------------------------------------------------------


def table(rows: Iterable[Measurement]) -> Table:
    """A line for each problem: our time, rate and share of the roofline, and each competitor's time over ours.

    A column "of NAME" is of a yardstick: the share of its speed that ours reaches; "x J NAME" is the energy of its call over
    that of ours. The last line of an op has geometric means. "wrong" stands for a result that is not right, "-" for none. A
    collective's rate is its bus bandwidth, in GB/s; the time of its kernels follows that of a call.
    """
    rows = list(rows)
    every = ordered(comparisons(rows))
    competitors, of = compared(comparisons(rows)), yardsticks(every)
    made = Table(title=_title(rows), title_justify="left")
    made.add_column("problem")
    between = {row.devices is not None for row in rows}
    columns = ["us", *["TFLOP/s", "roofline"] * (False in between), *["kernels us", "bus GB/s"] * (True in between)]
    columns += ["W"] * any(row.watts is not None for row in rows)
    energetic = [name for name in competitors if any(each.energy(name) is not None for each in every)]
    against = [f"{'of' if competitor in of else 'x'} {competitor}" for competitor in competitors]
    for heading in (*columns, *against, *(f"x J {name}" for name in energetic)):
        made.add_column(heading, justify="right")
    means = {(s.op, s.gpu, s.competitor): s.geomean for s in summary(rows)}
    for (op, gpu), of_op in by_op_and_gpu(every).items():
        for each in of_op:
            rates = _rates(each)
            ratios = [*(_ratio(each, p) for p in competitors), *(_times(each.energy(p)) for p in energetic)]
            made.add_row(_problem(each, every), *(rates.get(c, "-") for c in columns), *ratios)
        made.add_section()
        ratios = [_times(means.get((op, gpu, competitor))) for competitor in competitors]
        made.add_row(f"{op}: geometric mean", *("" for _ in columns), *ratios)
        made.add_section()
    return made


def _problem(comparison: Comparison, every: Sequence[Comparison]) -> str:
    """The problem, with its op or GPU where there are several of them."""
    several = [len({getattr(x, key) for x in every}) > 1 for key in ("op", "gpu")]
    parts = [comparison.op] * several[0] + [comparison.problem] + [f"({comparison.gpu})"] * several[1]
    return " ".join(parts)


def _rates(comparison: Comparison) -> Mapping[str, str | Text]:
    """Our times and rates, by heading, as far as there are any."""
    if comparison.ours is None:
        return {}
    if wrong(comparison.ours):
        return {"us": _wrong(comparison.ours)}
    told = {"us": digits(comparison.ours.median_us)}
    if comparison.ours.devices is None:
        told["TFLOP/s"] = digits(comparison.ours.tflops)
    if comparison.roofline:
        told["roofline"] = f"{comparison.roofline.median_us / comparison.ours.median_us:.0%}"
    if comparison.ours.watts is not None:
        told["W"] = digits(comparison.ours.watts)
    if comparison.ours.own_us:
        told["kernels us"] = digits(comparison.ours.own_us)
    if comparison.ours.bus_gbs:
        told["bus GB/s"] = digits(comparison.ours.bus_gbs)
    return told


def _ratio(comparison: Comparison, competitor: str) -> str | Text:
    theirs = comparison.competitors.get(competitor)
    if theirs is not None and wrong(theirs):
        return _wrong(theirs)
    return _times(comparison.ratio(competitor))


def _times(ratio: float | None) -> str | Text:
    if ratio is None or math.isnan(ratio):
        return "-"
    return Text(f"{ratio:.2f}", style="green" if ratio >= 1.0 else "red")


def _wrong(row: Measurement) -> Text:
    return Text(f"wrong ({row.error:.2g})", style="bold red")


def _title(rows: Sequence[Measurement]) -> str:
    """Op, GPU, versions and date: every value that occurs in the rows."""

    def values(field: str) -> str:
        return ", ".join(filter(None, dict.fromkeys(getattr(row, field) for row in rows)))

    parts = (
        f"{values('op')} on {values('gpu')}",
        f"driver {values('driver') or 'unknown'}",
        f"jax {values('jax')}",
        values("date"),
    )
    return " | ".join(parts)


# --- A picture ------------------------------------------------------------------------------------

_COLOURS = ("#0b6e99", "#c9c9c9", "#e39b3b", "#7fb069", "#9a7aa0")  # ours first
_HATCHES = ("", "///", "...", "xx", "\\\\\\")  # so that colours are not all that tells them apart
_LINES = ("#0b6e99", "#3f8f3f", "#b36a00", "#9a7aa0")
_MARKERS = "os^D"
_ACROSS = 16  # problems side by side; more take another panel
SUFFIXES = (".png", ".svg")  # of a picture's files
STYLE: Any = {  # names are text, whatever dollar signs are in them; the same rows give the same bytes
    "text.parse_math": False,
    "svg.hashsalt": "mgpu_ops",
    "axes.unicode_minus": False,
    "hatch.linewidth": 0.6,
}


def picture(rows: Iterable[Measurement], path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """Draws each implementation of each problem, a file for each of `suffixes`; returns their paths.

    TFLOP/s as bars; a black line is the roofline of a problem. The number above our bar is how many times as fast as XLA ours
    is, or where XLA is missing, as the fastest competitor. A wrong result is marked and has no bar. Of what ran without pause:
    the same, and the ratios of time and energy. For collectives: time and bus bandwidth against the payload. ValueError without
    rows, and for collectives together with other ops.
    """
    rows = [_shown(row) for row in rows]
    if not rows:
        raise ValueError("there are no rows to draw: run the benchmark first")
    between = {row.devices is not None for row in rows}
    if len(between) > 1:
        raise ValueError("collectives have no TFLOP/s, and others no bus bandwidth: draw them apart")
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    with pyplot.rc_context(STYLE):
        figure = _between_gpus(rows) if between == {True} else _bars(rows)
        try:
            figure.suptitle(wrapped(_title(rows), figure.get_figwidth(), 12), x=0.01, ha="left", fontsize=12)
            return save_figure(figure, path, suffixes)
        finally:
            pyplot.close(figure)


def save_figure(figure: Figure, path: str | os.PathLike[str], suffixes: Sequence[str] = SUFFIXES) -> list[Path]:
    """As PNG, of at most 64 colours, and SVG, or one of them, each whole or not at all; returns the paths."""
    from PIL import Image

    paths = [Path(path).with_suffix(suffix) for suffix in suffixes]
    for out in paths:
        drawn = io.BytesIO()
        figure.savefig(drawn, format=out.suffix[1:], dpi=130, metadata={"Date": None} if out.suffix == ".svg" else None)
        if out.suffix == ".png":  # a third of the bytes
            image = Image.open(drawn).convert("RGB").quantize(64, dither=Image.Dither.NONE)
            drawn = io.BytesIO()
            image.save(drawn, "PNG", optimize=True)
        files.replace(out, drawn.getvalue())
    return paths


def wrapped(text: str, inches: float, size: float) -> str:
    """The text in lines that are no wider than a picture's part of so many inches, in a font of so many points."""
    from matplotlib.font_manager import FontProperties
    from matplotlib.textpath import text_to_path

    font, most = FontProperties(size=size), 72 * (inches - 0.15) / 1.05  # glyphs that are drawn are up to so much wider

    def fits(line: str) -> bool:
        return len(line) < 2 or text_to_path.get_text_width_height_descent(line, font, ismath=False)[0] <= most

    lines, line = [], ""
    for word in text.split():
        both = f"{line} {word}".strip()
        if not line or fits(both):
            line = both
        else:
            lines.append(line)
            line = word
        while not fits(line):  # one word
            end = next(n for n in range(len(line) - 1, 0, -1) if fits(line[:n]))
            lines.append(line[:end])
            line = line[end:]
    return "\n".join([*lines, line])


def _entitle(ax: Axes, text: str) -> None:
    """The title of one of a figure's columns of axes, beside which is room for the numbers of its y axis."""
    figure, grid = ax.get_figure(root=True), ax.get_subplotspec()
    assert figure is not None
    assert grid is not None
    inches = figure.get_figwidth() / grid.get_gridspec().ncols
    ax.set_title(wrapped(text, inches - 0.8, 10), loc="left", fontsize=10)


def _shown(row: Measurement) -> Measurement:
    """With its texts escaped, so that a picture can show them."""
    texts: dict[str, Any] = {name: printable(value) for name, value in vars(row).items() if isinstance(value, str)}
    return dataclasses.replace(row, **texts)


def _bars(rows: Sequence[Measurement]) -> Figure:
    from matplotlib import pyplot

    every = ordered(comparisons(rows))
    competitors = compared(comparisons(rows))
    panels, impls = _panels(every), [OURS, *(competitor for competitor in competitors if competitor != BEST)]
    widest, baseline = max(4, *map(len, panels)), _compared_with(every)
    ratios = [panel for panel in panels if baseline and panel[0].op.endswith(SUSTAINED)]
    figure, axes = pyplot.subplots(
        len(panels) + len(ratios),
        figsize=(max(7.5, 1.15 * widest + 1.5), 0.8 + 4.2 * (len(panels) + len(ratios))),
        squeeze=False,
        layout="constrained",
    )
    for ax, panel in zip(axes[:, 0], panels):
        _draw(ax, panel, impls, baseline, widest)
    for ax, panel in zip(axes[len(panels) :, 0], ratios):
        _draw_ratios(ax, panel, baseline or "", widest)
    _legend(figure, axes[:, 0])
    return figure


def _legend(figure: Figure, axes: Iterable[Axes], across: int = 6) -> None:
    """One for all panels, below them; a panel may lack an implementation."""
    handles = {text: handle for ax in axes for handle, text in zip(*ax.get_legend_handles_labels())}
    figure.legend(handles.values(), handles, loc="outside lower left", ncols=min(len(handles), across), frameon=False)


def _panels(every: Sequence[Comparison]) -> list[list[Comparison]]:
    """The problems of each op and GPU in as few panels as `_ACROSS` allows, of about one length; longer groups are split."""
    panels: list[list[Comparison]] = []
    for of_op in by_op_and_gpu(every).values():
        groups = [list(members) for _, members in itertools.groupby(of_op, group)]
        fewest = len(_filled(groups, _ACROSS))
        panels += next(made for across in range(1, _ACROSS + 1) if len(made := _filled(groups, across)) == fewest)
    return panels


def _filled(groups: Iterable[Sequence[Comparison]], across: int) -> list[list[Comparison]]:
    """Panels of at most `across` problems; a group that fits into one panel stays whole."""
    panels: list[list[Comparison]] = [[]]
    for members in groups:
        for i in range(0, len(members), across):
            part = members[i : i + across]
            if len(panels[-1]) + len(part) > across:
                panels.append([])
            panels[-1] += part
    return panels


def _compared_with(every: Sequence[Comparison]) -> str | None:
    """What the number above a bar compares with: XLA, else the best competitor, else the only one, else a yardstick."""
    competitors = compared(every)
    return next((competitor for competitor in ("xla", BEST) if competitor in competitors), next(iter(competitors), None))


def _draw(ax: Axes, panel: Sequence[Comparison], impls: Sequence[str], baseline: str | None, widest: int) -> None:
    width = 0.8 / len(impls)
    for number, impl in enumerate(impls):
        bars = [each.ours if impl == OURS else each.competitors.get(impl) for each in panel]
        left = [x - 0.4 + number * width for x in range(len(panel))]
        heights = [0.0 if row is None or wrong(row) else row.tflops for row in bars]
        look: Any = {"color": _COLOURS[number % len(_COLOURS)], "hatch": _HATCHES[number % len(_HATCHES)]}
        ax.bar(left, heights, width, align="edge", edgecolor="#ffffff", linewidth=0, label=impl, **look)
        for x, row in zip(left, bars):
            if row is not None and wrong(row):
                _note(ax, x + width / 2, 0.0, "wrong", color="#c0392b", rotation=90)
    for x, each in enumerate(panel):
        if each.roofline:
            labelled = ax.get_legend_handles_labels()[1][-1:] == ["roofline"]
            label = "_nolegend_" if labelled else "roofline"
            ax.hlines(each.roofline.tflops, x - 0.45, x + 0.45, color="black", lw=1.2, label=label)
        ratio = each.ratio(baseline) if baseline else None
        if ratio is not None and each.ours:
            colour = "#1e7d32" if ratio >= 1.0 else "#c0392b"
            _note(ax, x - 0.4 + width / 2, each.ours.tflops, f"{ratio:.2f}", color=colour)
        if x and group(each) != group(panel[x - 1]):
            ax.axvline(x - 0.5, color="#999999", lw=0.8, ls=":")
    shared = _shared(panel)
    ticks = [_tick(each, shared) for each in panel]
    ax.set_xticks(range(len(panel)), ticks, fontsize=8, rotation=25, ha="right")
    ax.tick_params(axis="x", length=0)
    for text in ax.get_xticklabels():
        text.set_rotation_mode("anchor")
    ax.set_xlim(-0.6, widest - 0.4)
    ax.set_xlabel("problem", loc="left", fontsize=9)
    ax.set_ylabel("TFLOP/s")
    ax.margins(y=0.1)
    _plain(ax, axis="y")
    of = ", ".join(dict.fromkeys(filter(None, map(group, panel))))
    what = f"   (number: times as fast as {baseline})" if baseline else ""
    named = " ".join((panel[0].op, *shared, "on", panel[0].gpu))
    _entitle(ax, f"{named}{f': {of}' if of else ''}{what}")


def _draw_ratios(ax: Axes, panel: Sequence[Comparison], baseline: str, widest: int) -> None:
    """A competitor's time and energy over ours, without pause; above the line at 1 ours takes less."""
    ax.axhline(1.0, color="black", lw=1.0)
    kinds = (("time", [each.ratio(baseline) for each in panel]), ("energy", [each.energy(baseline) for each in panel]))
    for number, (what, ratios) in enumerate(kinds):
        points = [(x + 0.12 * (2 * number - 1), ratio) for x, ratio in enumerate(ratios) if ratio is not None]
        if points:
            look: Any = {"color": _LINES[2 * number], "marker": _MARKERS[number], "label": f"{what} of {baseline} over ours"}
            ax.plot(*zip(*points), ls="", ms=6, zorder=3, **look)
    watts = [f"{each.ours.watts:.0f} W" if each.ours and each.ours.watts is not None else "" for each in panel]
    shared = _shared(panel)
    ticks = ["\n".join(filter(None, (_tick(each, shared), told))) for each, told in zip(panel, watts)]
    ax.set_xticks(range(len(panel)), ticks, fontsize=8, rotation=25, ha="right", rotation_mode="anchor")
    ax.set_xlim(-0.6, widest - 0.4)
    ax.set_ylabel("ratio")
    ax.margins(y=0.15)
    _plain(ax, axis="y")
    _entitle(ax, f"{panel[0].op} on {panel[0].gpu}: above 1 ours takes less (watts: ours)")


def _plain(ax: Axes, axis: Literal["both", "x", "y"] = "both") -> None:
    ax.grid(axis=axis, color="#dddddd")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)


def _note(ax: Axes, x: float, y: float, text: str, **style: Any) -> None:
    ax.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8, **style)


def _shared(panel: Sequence[Comparison]) -> list[str]:
    """The words that all problems share, such as dtype and layout; never the first word, the name or sizes."""
    first, *others = (each.problem.split()[1:] for each in panel)
    return [word for word in first if all(word in words for words in others)]


def _tick(comparison: Comparison, shared: Sequence[str]) -> str:
    """The problem on two lines, without the shared words: its name; its sizes and the rest."""
    first, *words = comparison.problem.split() or [""]
    return "\n".join(filter(None, [first, " ".join(word for word in words if word not in shared)]))


def _between_gpus(rows: Sequence[Measurement]) -> Figure:
    """Time and bus bandwidth against the payload; for each op and number of GPUs, a row of two panels."""
    from matplotlib import pyplot

    sets: dict[tuple[str, str, int], list[Measurement]] = {}
    for row in sorted(rows, key=lambda row: (row.op, row.gpu, row.devices or 0, row.bytes or 0)):
        sets.setdefault((row.op, row.gpu, row.devices or 0), []).append(row)
    ours, others = (sorted({row.impl for row in rows if row.impl.startswith(OURS) is mine}) for mine in (True, False))
    impls = [*enumerate(ours), *enumerate(others, 2)]  # XLA looks alike in all pictures, with a workspace of ours or without
    figure, axes = pyplot.subplots(len(sets), 2, figsize=(12, 1.2 + 3.9 * len(sets)), squeeze=False, layout="constrained")
    for (times, rates), ((op, _, devices), of_set) in zip(axes, sets.items()):
        right = [row for row in of_set if not wrong(row)]
        for number, impl in impls:
            mine = [row for row in right if row.impl == impl]
            sizes = [row.bytes for row in mine]
            look: Any = {"color": _LINES[number % len(_LINES)], "marker": _MARKERS[number % len(_MARKERS)], "ms": 5}
            times.plot(sizes, [row.median_us for row in mine], label=f"{impl}, a call", **look)
            own = [row.own_us or math.nan for row in mine]
            if not all(map(math.isnan, own)):
                times.plot(sizes, own, ls=":", mfc="white", label=f"{impl}, its kernels alone", **look)
            rates.plot(sizes, [row.bus_gbs or math.nan for row in mine], label=f"{impl}, a call", **look)
        left_out = f" ({len(of_set) - len(right)} wrong results are left out)" if len(right) < len(of_set) else ""
        ticks = sorted({row.bytes for row in of_set if row.bytes})
        ticks = ticks[:: math.ceil(len(ticks) / 12)]
        for ax, name in ((times, "time (us)"), (rates, "bus bandwidth (GB/s)")):
            ax.set_xscale("log", base=2)
            ax.set_xticks(ticks, [size_text(tick, " ") for tick in ticks], rotation=25)
            ax.minorticks_off()
            ax.set_xlabel("payload on each GPU")
            ax.set_ylabel(name)
            _entitle(ax, f"{op}, {devices} GPUs: {name}{left_out}")
            _plain(ax)
        if right:
            times.set_yscale("log")
            times.yaxis.set_major_formatter("{x:g}")
    _legend(figure, axes.flat, across=len(impls))
    return figure
