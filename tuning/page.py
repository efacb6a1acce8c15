"""One HTML page of what is tuned, what failed and the pictures: a file of its own that loads nothing and runs nothing.

Names of problems, GPUs and files, and reasons of failures, come from others: all text passes through `_text`, the only way into
the page, and pictures are data of images, in which a browser runs no script. A policy in the page forbids the rest.
"""

from __future__ import annotations

import base64
import html
from collections.abc import Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.core import database, gpu
from mgpu_ops.core.database import Entry, File
from mgpu_ops.core.op import OpSpec
from mgpu_ops.tuning import bench, plot
from mgpu_ops.tuning.sources import Found
from mgpu_ops.tuning.terminal import printable

_STYLE = """
body { font: 15px/1.45 system-ui, sans-serif; color: #222; max-width: 1200px; margin: 2em auto; padding: 0 1em }
table { border-collapse: collapse; margin: .5em 0 1.5em; font-size: 13px }
th, td { border-bottom: 1px solid #ddd; padding: .25em .7em; text-align: left; vertical-align: top }
th { background: #f4f4f4 } td.number { text-align: right; font-variant-numeric: tabular-nums }
img { max-width: 100%; height: auto } figure { margin: 1em 0 } .quiet { color: #666 } .bad { color: #b3261e }
.wide { overflow-x: auto } summary { cursor: pointer }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"


def page(found: Found, specs: Mapping[str, OpSpec], pictures: Iterable[tuple[str, Sequence[Path]]], date: str) -> str:
    """The page. `pictures` are (what it shows, its files), of which the SVG is shown."""
    title = "mgpu_ops: what is tuned"
    body = [
        f"<h1>{_text(title)}</h1>",
        f"<p class='quiet'>Made on {_text(date)} from {_text(', '.join(found.places) or 'nothing')}</p>",
        *(_entries(path, file, specs) for path, file in found.files),
        _benchmarks(found.rows),
        _failures(found.runs),
        _pictures(pictures),
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(body)}\n</body>\n</html>\n"
    )


def _text(anything: Any) -> str:
    return html.escape(printable(anything), quote=True)


def _table(headings: Sequence[str], rows: Iterable[Sequence[Any]]) -> str:
    """Floats stand to the right, with four digits; None is a dash."""
    head = "".join(f"<th>{_text(heading)}</th>" for heading in headings)
    body = "\n".join(f"<tr>{''.join(map(_cell, row))}</tr>" for row in rows)
    return f"<div class='wide'><table>\n<tr>{head}</tr>\n{body}\n</table></div>\n"


def _cell(value: Any) -> str:
    if isinstance(value, int | float) and not isinstance(value, bool):
        shown = f"{value:.4g}" if isinstance(value, float) else str(value)
        return f"<td class='number'>{_text(shown)}</td>"
    return f"<td>{_text('-' if value is None else value)}</td>"


def _entries(path: Path, file: File, specs: Mapping[str, OpSpec]) -> str:
    spec = specs.get(file.op)
    headings = ("problem", "evidence", "us", "TFLOP/s", "of roofline", "x default", "x baseline", "config", "found", "remark")
    rows = [_entry(entry, file, spec) for entry in file.entries]
    number = f"{len(rows)} problem{'s' * (len(rows) != 1)}"
    above = f"<h2>{_text(file.op)} on {_text(file.gpu)}</h2>\n<p class='quiet'>{number}, {_text(path)}</p>\n"
    return above + _table(headings, rows)


def _entry(entry: Entry, file: File, spec: OpSpec | None) -> list[Any]:
    e = entry.evidence
    name, remark, rate, near = " ".join(f"{k}={v}" for k, v in entry.problem.items()), f"unknown op {file.op}", None, None
    if spec is not None:
        name, remark = plot.problem_label(spec, entry.problem), database.stale(entry, spec) or ""
        drawn = {row.impl: row for row in plot.rows_of(spec, gpu.find(file.gpu), [entry])}
        if drawn:
            rate, near = drawn[bench.OURS].tflops, f"{drawn[bench.ROOFLINE].median_us / e.median_us:.0%}"
    against = f"{e.baseline_us / e.median_us:.3f} ({e.baseline})" if e.baseline_us else None
    return [
        name,
        e.kind,
        e.median_us,
        rate,
        near,
        e.default_us / e.median_us if e.default_us else None,
        against,
        " ".join(f"{k}={v}" for k, v in entry.config.items()),
        f"{e.date}, {e.gpu}, driver {e.driver or '-'}, jax {e.jax}, {e.trials} trials",
        remark,
    ]


def _benchmarks(rows: Sequence[bench.Row]) -> str:
    if not rows:
        return ""
    headings = ("op", "problem", "implementation", "us", "TFLOP/s", "GB/s", "error", "GPU", "date", "config")
    columns = ("op", "problem", "impl", "median_us", "tflops", "gbs", "error", "gpu", "date", "config")
    shown = [[getattr(row, column) for column in columns] for row in bench.merge(rows)]
    return "<h2>Benchmarks</h2>\n" + _table(headings, shown)


def _failures(runs: Sequence[plot.Run]) -> str:
    if not runs:
        return ""
    tried = sum(len(run.trials) for run in runs)
    rows = [
        (run.op, run.problem, run.gpu, kind, number, detail)
        for run in runs
        for (kind, detail), number in run.failures.most_common()
    ]
    told = f"<h2>Failures</h2>\n<p>{sum(row[4] for row in rows)} of {tried} trials of {len(runs)} searches failed.</p>\n"
    return told + (_table(("op", "problem", "GPU", "kind", "trials", "reason"), rows) if rows else "")


def _pictures(pictures: Iterable[tuple[str, Sequence[Path]]]) -> str:
    shown = []
    for what, paths in pictures:
        (drawn,) = (path for path in paths if path.suffix == ".svg")
        data = base64.b64encode(drawn.read_bytes()).decode()
        image = f"<img alt='{_text(what)}' src='data:image/svg+xml;base64,{data}'>"
        shown.append(f"<details open><summary>{_text(what)}</summary><figure>{image}</figure></details>\n")
    return "<h2>Pictures</h2>\n" + "".join(shown) if shown else ""
