"""Benchmark results to look at: a table for the terminal and a picture."""

from __future__ import annotations

import math
import os
from collections.abc import Iterable, Sequence
from pathlib import Path
from typing import Any

from rich.table import Table
from rich.text import Text

from mgpu_ops.tuning.bench import BEST, OURS, Line, Row, compared, lines, summary, wrong, yardsticks
from mgpu_ops.tuning.tables import digits

# --- A table --------------------------------------------------------------------------------------


def table(rows: Iterable[Row]) -> Table:
    """One line per problem: our time, rate and share of the roofline, each peer's time over ours, and the best peer's.

    "of" stands before a yardstick, of whose speed we reach that part. The last line of an op has the geometric means. "wrong"
    stands where a result is not right, "-" where there is none.
    """
    rows = list(rows)
    every = lines(rows)
    peers, of = compared(every), yardsticks(every)
    made = Table(title=_title(rows), title_justify="left")
    made.add_column("problem")
    for heading in ("us", "TFLOP/s", "roofline", *(f"{'of' if peer in of else 'x'} {peer}" for peer in peers)):
        made.add_column(heading, justify="right")
    means = {(s.op, s.gpu, s.peer): s.geomean for s in summary(rows)}
    for (op, gpu), of_op in _sets(every).items():
        for line in of_op:
            made.add_row(_problem(line, every), *_rates(line), *(_ratio(line, p) for p in peers))
        made.add_section()
        ratios = (_times(means.get((op, gpu, peer))) for peer in peers)
        made.add_row(f"{op}: geometric mean", "", "", "", *ratios)
        made.add_section()
    return made


def _sets(every: Iterable[Line]) -> dict[tuple[str, str], list[Line]]:
    """The lines of each op and GPU."""
    sets: dict[tuple[str, str], list[Line]] = {}
    for line in every:
        sets.setdefault((line.op, line.gpu), []).append(line)
    return sets


def _problem(line: Line, every: Sequence[Line]) -> str:
    """The problem, with its GPU or op where the lines have several."""
    several = [len({getattr(x, key) for x in every}) > 1 for key in ("op", "gpu")]
    parts = [line.op] * several[0] + [line.problem] + [f"({line.gpu})"] * several[1]
    return " ".join(parts)


def _rates(line: Line) -> tuple[str | Text, str, str]:
    if line.ours is None:
        return "-", "-", "-"
    if wrong(line.ours):
        return _wrong(line.ours), "-", "-"
    near = f"{line.roofline.median_us / line.ours.median_us:.0%}" if line.roofline else "-"
    return digits(line.ours.median_us), digits(line.ours.tflops), near


def _ratio(line: Line, peer: str) -> str | Text:
    theirs = line.peers.get(peer)
    if theirs is not None and wrong(theirs):
        return _wrong(theirs)
    return _times(line.ratio(peer))


def _times(ratio: float | None) -> str | Text:
    if ratio is None or math.isnan(ratio):
        return "-"
    return Text(f"{ratio:.2f}", style="green" if ratio >= 1.0 else "red")


def _wrong(row: Row) -> Text:
    return Text(f"wrong ({row.error:.2g})", style="bold red")


def _title(rows: Sequence[Row]) -> str:
    """What all rows have in common, and each value of what they do not."""

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

_COLOURS = ("#0b6e99", "#b8b8b8", "#e39b3b", "#7fb069", "#9a7aa0")  # ours first
_ACROSS = 14  # problems side by side; more take another panel


def picture(rows: Iterable[Row], path: str | os.PathLike[str]) -> list[Path]:
    """Draws TFLOP/s of each implementation of each problem, as PNG and SVG; returns both paths.

    A black line is the roofline of a problem; the number above our bar is how many times as fast as
    XLA (or, without it, as the fastest peer) we are. A wrong result has no bar and says so.
    ValueError without rows.
    """
    import matplotlib

    matplotlib.use("Agg")
    from matplotlib import pyplot

    rows = list(rows)
    panels = _panels(lines(rows))
    if not panels:
        raise ValueError("there are no rows to draw: run the benchmark first")
    impls = [OURS, *(peer for peer in compared(lines(rows)) if peer != BEST)]
    widest = max(4, *map(len, panels))
    figure, axes = pyplot.subplots(
        len(panels),
        figsize=(max(7.5, 1.15 * widest + 1.5), 0.8 + 3.9 * len(panels)),
        squeeze=False,
        layout="constrained",
    )
    try:
        for ax, panel in zip(axes[:, 0], panels):
            _draw(ax, panel, impls, _measure_of(lines(rows)), widest)
        # One legend for all; a panel may lack an implementation.
        handles = {text: handle for ax in axes[:, 0] for handle, text in zip(*ax.get_legend_handles_labels())}
        figure.suptitle(_title(rows), x=0.01, ha="left", fontsize=12)
        figure.legend(handles.values(), handles, loc="outside lower left", ncols=len(handles), frameon=False)
        return save_figure(figure, path)
    finally:
        pyplot.close(figure)


def save_figure(figure: Any, path: str | os.PathLike[str]) -> list[Path]:
    """As PNG and SVG; returns both paths."""
    paths = [Path(path).with_suffix(suffix) for suffix in (".png", ".svg")]
    paths[0].parent.mkdir(parents=True, exist_ok=True)
    for out in paths:
        figure.savefig(out, dpi=130)
    return paths


def _panels(every: Sequence[Line]) -> list[list[Line]]:
    """The lines of each op and GPU, in as few panels of about one length as `_ACROSS` allows."""
    panels = []
    for of_op in _sets(every).values():
        count = math.ceil(len(of_op) / _ACROSS)
        length = math.ceil(len(of_op) / count)
        panels += [of_op[i : i + length] for i in range(0, len(of_op), length)]
    return panels


def _measure_of(every: Sequence[Line]) -> str | None:
    """What the number above a bar compares with: XLA, the best peer, the only one, or a yardstick."""
    peers = compared(every)
    return next((peer for peer in ("xla", BEST) if peer in peers), next(iter(peers), None))


def _draw(ax: Any, panel: Sequence[Line], impls: Sequence[str], baseline: str | None, widest: int) -> None:
    width = 0.8 / len(impls)
    for number, impl in enumerate(impls):
        bars = [line.ours if impl == OURS else line.peers.get(impl) for line in panel]
        left = [x - 0.4 + number * width for x in range(len(panel))]
        heights = [0.0 if row is None or wrong(row) else row.tflops for row in bars]
        colour = _COLOURS[number % len(_COLOURS)]
        ax.bar(left, heights, width, align="edge", color=colour, label=impl)
        for x, row in zip(left, bars):
            if row is not None and wrong(row):
                _note(ax, x + width / 2, 0.0, "wrong", color="#c0392b", rotation=90)
    for x, line in enumerate(panel):
        if line.roofline:
            label = None if ax.get_legend_handles_labels()[1][-1:] == ["roofline"] else "roofline"
            ax.hlines(line.roofline.tflops, x - 0.45, x + 0.45, color="black", lw=1.2, label=label)
        ratio = line.ratio(baseline) if baseline else None
        if ratio is not None and line.ours:
            colour = "#1e7d32" if ratio >= 1.0 else "#c0392b"
            _note(ax, x - 0.4 + width / 2, line.ours.tflops, f"{ratio:.2f}", color=colour)
    shared = _shared(panel)
    ticks = [_tick(line, shared) for line in panel]
    ax.set_xticks(range(len(panel)), ticks, fontsize=8, rotation=25, ha="right")
    ax.tick_params(axis="x", length=0)
    for text in ax.get_xticklabels():
        text.set_rotation_mode("anchor")
    ax.set_xlim(-0.6, widest - 0.4)
    ax.set_ylabel("TFLOP/s")
    ax.margins(y=0.1)
    ax.grid(axis="y", color="#dddddd")
    ax.set_axisbelow(True)
    ax.spines[["top", "right"]].set_visible(False)
    what = f"   (number: times as fast as {baseline})" if baseline else ""
    ax.set_title(" ".join((panel[0].op, *shared, "on", panel[0].gpu)) + what, loc="left", fontsize=10)


def _note(ax: Any, x: float, y: float, text: str, **style: Any) -> None:
    ax.annotate(text, (x, y), (0, 2), textcoords="offset points", ha="center", fontsize=8, **style)


def _shared(panel: Sequence[Line]) -> list[str]:
    """The words that all problems have, such as dtype and layout; not a problem's first, its name or sizes."""
    first, *others = (line.problem.split()[1:] for line in panel)
    return [word for word in first if all(word in words for words in others)]


def _tick(line: Line, shared: Sequence[str]) -> str:
    """The problem's own words on two lines: its name; its sizes and the rest."""
    first, *words = line.problem.split()
    return "\n".join(filter(None, [first, " ".join(word for word in words if word not in shared)]))
