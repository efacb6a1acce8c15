"""One HTML page: what is tuned, what failed, and pictures, op by op. The file loads nothing and runs one script, page.js.

Names of problems, GPUs and files, and reasons of failures, may come from elsewhere. `_text` escapes all text of the page.
Pictures are embedded as images, in which a browser runs no script. A content security policy names the hash of page.js, which
filters and sorts tables, and forbids the rest. Folders of the machine that made the page are left out.
"""

from __future__ import annotations

import base64
import hashlib
import html
import math
import re
from collections.abc import Callable, Iterable, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.core import gpu
from mgpu_ops.registry import database, winner
from mgpu_ops.registry.database import Entry, File
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.bench import plot, report, results
from mgpu_ops.tuning.bench.sources import Sources
from mgpu_ops.tuning.tables import assignments, in_order
from mgpu_ops.tuning.terminal import count, printable

_FOLDER = Path(__file__).parent
_STYLE, _SCRIPT = ((_FOLDER / name).read_text(encoding="utf-8") for name in ("page.css", "page.js"))
_HASH = base64.b64encode(hashlib.sha256(_SCRIPT.encode()).digest()).decode()
_POLICY = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{_HASH}'"

Kind = str  # of a column: "short", "name", "long", "count", "number", "ratio", "of", "share", "error", "range"
Picture = tuple[str, str, Sequence[Path]]  # the op, what it shows, its files


def page(found: Sources, specs: Mapping[str, OpSpec], pictures: Iterable[Picture], date: str) -> str:
    """The page as text: a summary, then what there is of each op. Of a picture the SVG is embedded."""
    title = "mgpu_ops: what is tuned"
    sections = _sections(found, specs, list(pictures))
    taken = {"summary"}
    places = {op: plot.slug(op, taken) for op in sections}
    links = "".join(f"<li><a href='#{_text(place)}'>{_text(op)}</a></li>" for op, place in places.items())
    body = [f"<section id='summary'><h2>Summary</h2>\n{_summary(found, specs)}</section>\n"]
    for op, parts in sections.items():
        inside = "".join(f"<h3>{_text(heading)}</h3>\n{text}" for heading, text in parts)
        body.append(f"<section id='{_text(places[op])}'><h2>{_text(op)}</h2>\n{inside}</section>\n")
    sources = ", ".join(map(where, found.places)) or "nothing"
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n"
        f"<h1>{_text(title)}</h1>\n<p class='quiet'>Made on {_text(date)}</p>\n{_cards(found, specs)}"
        f"<nav aria-label='Contents'><ul><li><a href='#summary'>Summary</a></li>{links}</ul></nav>\n"
        "<div class='tools' hidden><label for='filter'>Filter</label>"
        "<input id='filter' type='search' autocomplete='off' placeholder='words that a row has, such as llama3 128'>"
        "<span class='quiet' role='status'></span></div>\n"
        f"{''.join(body)}<h2>Sources</h2>\n<p class='quiet'>{_text(sources)}</p>\n"
        f"<script>{_SCRIPT}</script>\n</body>\n</html>\n"
    )


def _sections(found: Sources, specs: Mapping[str, OpSpec], pictures: Sequence[Picture]) -> dict[str, list[tuple[str, str]]]:
    """Of each op, in the ops' order, its parts as (heading, HTML); the gradients' benchmarks are with their op."""
    parts: dict[str, list[tuple[str, str]]] = {}

    def add(op: str, heading: str, text: str) -> None:
        parts.setdefault(op.removesuffix(results.GRAD), []).append((heading, text))

    first = [picture for picture in pictures if picture[1].startswith(("TFLOP/s", "time and bus"))]
    for op, what, paths in first:
        add(op, what, _picture(what, paths))
    for path, file in _in_op_order(found.files, specs):
        add(file.op, *_entries(path, file, specs.get(file.op)))
    for op, heading, text in _benchmarks(found.rows):
        add(op, heading, text)
    for op, heading, text in _failures(found.runs):
        add(op, heading, text)
    for op, what, paths in pictures:
        if (op, what, paths) not in first:
            add(op, what, f"<details><summary>show</summary>{_picture(what, paths)}</details>\n")
    return {op: parts[op] for op in sorted(parts, key=lambda op: report.place(op, ""))}


def _cards(found: Sources, specs: Mapping[str, OpSpec]) -> str:
    """The numbers to read first."""
    entries = [(entry, specs.get(file.op)) for file, entry in found.taken(specs)]  # a problem of two databases counts once
    stale = sum(spec is not None and database.stale(entry, spec) is not None for entry, spec in entries)
    tried, failed = sum(len(run.trials) for run in found.runs), sum(sum(run.failures.values()) for run in found.runs)
    timed = len({(row.op, row.problem, row.gpu) for row in found.rows})
    numbers = [
        (len(entries), "tuned problems", ""),
        (sum(entry.evidence.kind == "modelled" for entry, _ in entries), "of them modelled, not measured", "warn"),
        (stale, "of them out of date", "warn"),
        (timed, "benchmarked problems", ""),
        (len(found.runs), "searches", ""),
        (tried, "trials", ""),
        (failed, "of them failed", ""),
    ]
    shown = [(number, what, look) for number, what, look in numbers if number]
    made = "".join(
        f"<div class='card {look}'><b>{number:,}</b><span>{_text(what)}</span></div>" for number, what, look in shown
    )
    return f"<div class='cards'>{made}</div>\n" if made else ""


def where(place: str) -> str:
    """A place without the folders of this machine: "shipped h200/matmul.json", "own h200/matmul.json", or a file's name."""
    if "://" in place:
        return place
    path = Path(place)
    roots = {
        "shipped": database.shipped_path("gpu", "op").parents[1],
        "own": database.user_path("gpu", "op").parents[1],
        "trials": storage.journal_path("gpu", "op").parents[1],
    }
    for whose, root in roots.items():
        if path.is_relative_to(root):
            return f"{whose} {path.relative_to(root)}"
    return path.name if path.is_absolute() else place


_FOLDERS = re.compile(r"(?<![\w/:.~])(?:/[^\s/:'\",()<>]+)+/(?=[^\s/])")  # /a/b/ of /a/b/c


def _text(anything: Any) -> str:
    return html.escape(printable(anything), quote=True)


# --- Tables ---------------------------------------------------------------------------------------


def _table(caption: str, columns: Sequence[tuple[str, Kind]], rows: Sequence[Sequence[Any]]) -> str:
    """A table as HTML. None is a dash; the numbers of a column have the same number of decimals; empty columns are left out.

    A ratio is above 1 where ours is faster.
    """
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)] or list(range(len(columns)))
    formats = {i: _format(columns[i][1], [row[i] for row in rows if _is_number(row[i])]) for i in kept}
    head = "".join(
        f"<th scope='col'{_class(columns[i][1])}><button type='button'>{_text(columns[i][0])}</button></th>" for i in kept
    )
    body = "\n".join(f"<tr>{''.join(_cell(row[i], columns[i][1], formats[i]) for i in kept)}</tr>" for row in rows)
    return (
        f"<figure><figcaption>{_text(caption)}</figcaption>\n"
        f"<div class='wide' tabindex='0' role='region' aria-label='{_text(caption)}'><table>\n"
        f"<thead><tr>{head}</tr></thead>\n<tbody>\n{body}\n</tbody>\n</table></div></figure>\n"
    )


def _is_number(value: Any) -> bool:
    return isinstance(value, int | float) and not isinstance(value, bool) and math.isfinite(value)


def _format(kind: Kind, numbers: Sequence[float]) -> Callable[[float], str]:
    fixed = {"count": "{:d}", "share": "{:.0%}", "error": "{:.1e}", "ratio": "{:.3f}", "of": "{:.3f}"}
    if kind in fixed:
        return fixed[kind].format
    least = min((abs(x) for x in numbers if x), default=1.0)
    return f"{{:.{min(3, max(0, 2 - math.floor(math.log10(least))))}f}}".format


def _class(kind: Kind, also: str = "") -> str:
    return f" class='{' '.join(filter(None, (kind if kind in ('short', 'name', 'long') else 'number', also)))}'"


def _cell(value: Any, kind: Kind, shown: Callable[[float], str]) -> str:
    if isinstance(value, results.Measurement):  # a result that is not right
        return f"<td{_class(kind, 'bad')}>wrong ({_text(f'{value.error:.2g}')})</td>"
    if kind == "range" and value is not None:
        return _range(*value)
    if not _is_number(value):
        text = "-" if value is None else str(value)
        whole = f" title='{_text(text)}'" if kind == "long" else ""  # it is cut off, and shown whole by a click
        return f"<td{_class(kind)}{whole}>{_named(text) if kind == 'name' else _text(text)}</td>"
    also = ("good" if value >= 1 else "bad") if kind == "ratio" else ""
    return f"<td{_class(kind, also)} data-v='{value:.6g}'>{_text(shown(value))}</td>"


def _named(problem: str) -> str:
    """A problem whose first word is a name, and its dimensions below it."""
    name, _, rest = problem.partition(" ")
    if not rest or re.match(r"\d+x\d|\w+=", name):
        return _text(problem)
    return f"{_text(name)}<small>{_text(rest)}</small>"


def _range(worst: float, mean: float, best: float) -> str:
    """Ratios on a logarithmic axis from 0.5 to 2 with a line at 1: a bar from the worst to the best, a mark at the mean."""

    def at(ratio: float) -> float:
        return 50 + 50 * max(-1.0, min(1.0, math.log2(ratio)))

    told = f"{worst:.2f} to {best:.2f}, mean {mean:.2f}"
    bar = f"<i style='left:{at(worst):.1f}%;width:{max(0.5, at(best) - at(worst)):.1f}%'></i>"
    mark = f"<b class='{'good' if mean >= 1 else 'bad'}' style='left:{at(mean):.1f}%'></b>"
    return f"<td class='range' data-v='{mean:.6g}'><div class='axis' role='img' aria-label='{told}'>{bar}{mark}</div></td>"


# --- What is on the page --------------------------------------------------------------------------


def _in_op_order(files: Iterable[tuple[Path, File]], specs: Mapping[str, OpSpec]) -> list[tuple[Path, File]]:
    ops = list(specs)
    return sorted(files, key=lambda found: (ops.index(found[1].op) if found[1].op in ops else len(ops), found[1].gpu))


def _summary(found: Sources, specs: Mapping[str, OpSpec]) -> str:
    shown = _what_is_tuned(found, specs) + _beside_others(found, specs)
    if found.runs:
        tried, failed = sum(len(run.trials) for run in found.runs), sum(sum(run.failures.values()) for run in found.runs)
        searches = count(len(found.runs), "search", "searches")
        shown += f"<p>{_text(f'{searches} with {count(tried, "trial")}, of which {failed} failed.')}</p>\n"
    return shown or "<p>Nothing is tuned, benchmarked or searched.</p>\n"


def _what_is_tuned(found: Sources, specs: Mapping[str, OpSpec]) -> str:
    """A line for each database."""
    tuned = []
    for path, file in _in_op_order(found.files, specs):
        spec = specs.get(file.op)
        kinds = [entry.evidence.kind for entry in file.entries]
        stale = sum(spec is not None and database.stale(entry, spec) is not None for entry in file.entries)
        tuned.append((file.op, file.gpu, where(str(path)), len(kinds), kinds.count("measured"), kinds.count("modelled"), stale))
    columns: list[tuple[str, Kind]] = [("op", "short"), ("GPU", "short"), ("database", "short")]
    columns += [(name, "count") for name in ("problems", "measured", "modelled", "out of date")]
    total = len(found.taken(specs))  # a problem may be in several databases
    return _table(f"What is tuned: {count(total, 'problem')}", columns, tuned) if tuned else ""


def _beside_others(found: Sources, specs: Mapping[str, OpSpec]) -> str:
    """A line for each op and what it is compared with: means, extremes and how often ours is the faster one."""
    rivals, measures = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    rates = sorted(found.rates(specs).items(), key=lambda item: (report.place(item[0][1], ""), item[0][0]))
    for (what, op), measured in rates:
        of = results.yardsticks(results.comparisons(measured))
        for s in results.summary(measured):
            source = "benchmark" if what == "bench" else "tuning"
            span = (s.worst, s.geomean, s.best) if s.problems and s.competitor not in of else None
            row = (op, s.competitor, s.problems, s.geomean, span, s.worst, f"{s.wins} of {s.problems}", s.wrong or None)
            (measures if s.competitor in of else rivals).append(
                (*row, source, s.gpu, s.worst_problem.partition(" ")[0] or None)
            )
    bar = "The bar, on an axis from 0.5 to 2, goes from the worst problem to the best; the mark is the mean."
    told = {"ratio": f"Times of others over ours: above 1 where ours is faster. {bar}"}
    told["of"] = "The part that ours reaches of the speed of a yardstick, something else that costs as much"
    shown = ""
    for kind, rows in (("ratio", rivals), ("of", measures)):
        columns: list[tuple[str, Kind]] = [("op", "short"), ("against", "short"), ("problems", "count")]
        columns += [("geometric mean", kind), ("worst to best", "range"), ("worst", kind), ("as fast or faster", "number")]
        columns += [("wrong results", "count"), ("measured in", "short"), ("GPU", "short"), ("worst problem", "short")]
        shown += _table(told[kind], columns, rows) if rows else ""
    return shown


def _entries(path: Path, file: File, spec: OpSpec | None) -> tuple[str, str]:
    """The entries of a database; a value that all have in common moves to the caption."""
    entries = [_entry(entry, file, spec) for entry in file.entries]
    entries.sort(key=lambda cells: report.place(file.op, str(cells["problem"])))
    baselines = list(
        dict.fromkeys(name for cells in entries for name in cells if name.startswith("x ") and name != "x default")
    )
    columns: list[tuple[str, Kind]] = [("problem", "name"), ("us", "number"), ("TFLOP/s", "number"), ("bus GB/s", "number")]
    columns += [("of roofline", "share"), *((name, "ratio") for name in ("x default", *baselines)), ("runs", "short")]
    columns += [("trials", "count"), ("evidence", "short"), ("config", "long"), ("found", "short"), ("remark", "short")]
    told = [count(len(entries), "problem"), where(str(path))]
    for name in ("evidence", "found", "remark"):
        values = {cells.get(name) for cells in entries}
        if len(values) == 1 and len(entries) > 1:
            told += filter(None, values)
            columns = [column for column in columns if column[0] != name]
    rows = [[cells.get(name) for name, _ in columns] for cells in entries]
    return f"Tuned on {file.gpu}", _table("; ".join(told), columns, rows)


def _entry(entry: Entry, file: File, spec: OpSpec | None) -> dict[str, Any]:
    e = entry.evidence
    cells: dict[str, Any] = {"problem": assignments(entry.problem), "remark": f"unknown op {file.op}"}
    config: Mapping[str, Any] = entry.config
    if spec is not None:
        cells = {"problem": plot.problem_label(spec, entry.problem), "remark": database.stale(entry, spec)}
        config = in_order(config, spec.Config)
        cells["runs"] = winner.told(entry, spec)
        drawn = {row.impl: row for row in plot.rows_of(spec, gpu.find(file.gpu), [entry])}
        if results.ROOFLINE in drawn:
            cells |= {"TFLOP/s": drawn[results.OURS].tflops, "of roofline": drawn[results.ROOFLINE].median_us / e.median_us}
        elif drawn:
            cells |= {"bus GB/s": drawn[results.OURS].bus_gbs}
    if e.baseline_us:
        cells[f"x {e.baseline or 'baseline'}"] = e.baseline_us / e.median_us
    return cells | {
        "us": e.median_us,
        "x default": e.default_us / e.median_us if e.default_us else None,
        "trials": e.trials,
        "evidence": e.kind,
        "config": assignments(config),
        "found": f"{e.date}, {e.gpu}, driver {e.driver or '-'}, jax {e.jax}",
    }


def _benchmarks(rows: Sequence[results.Measurement]) -> list[tuple[str, str, str]]:
    """A table for each op and GPU: ours, and each competitor's time and its ratio to ours."""
    sets: dict[tuple[str, str], list[results.Measurement]] = {}
    for row in results.merge(rows):
        sets.setdefault((row.op, row.gpu), []).append(row)
    shown = []
    for (op, its_gpu), of_set in sorted(sets.items(), key=lambda item: report.place(item[0][0], "", item[0][1])):
        every = results.comparisons(of_set)
        competitors, of = results.compared(every), results.yardsticks(every)
        columns: list[tuple[str, Kind]] = [("problem", "name"), ("us", "number"), ("warm us", "number"), ("TFLOP/s", "number")]
        columns += [("of roofline", "share"), ("kernels us", "number"), ("bus GB/s", "number")]
        columns += [("W", "number"), ("J", "number")]
        for competitor in competitors:
            columns += [(f"{competitor} us", "number")] * (competitor != results.BEST)
            columns += [(f"of {competitor}", "of") if competitor in of else (f"x {competitor}", "ratio")]
            columns += [(f"x J {competitor}", "ratio")] * (competitor != results.BEST)
        columns += [("error", "error"), ("config", "long")]
        told = [count(len(every), "problem")]
        for name in ("date", "driver", "jax", "cudnn", "cublas", "ptxas"):
            values = list(dict.fromkeys(filter(None, (getattr(row, name) for row in of_set))))
            told += [", ".join(values) if name == "date" else f"{name} {', '.join(values)}"] if values else []
        cells = [_cells(each, competitors) for each in report.ordered(every)]
        what = "Forward and backward timed" if op.endswith(results.GRAD) else "Timed"
        shown.append((op, f"{what} on {its_gpu}", _table("; ".join(told), columns, cells)))
    return shown


def _cells(comparison: results.Comparison, competitors: Sequence[str]) -> list[Any]:
    ours = comparison.ours if comparison.ours is not None and not results.wrong(comparison.ours) else None
    between = ours is not None and ours.devices is not None
    cells: list[Any] = [
        comparison.problem,
        ours.median_us if ours else comparison.ours,
        ours.warm_us if ours else None,
        ours.tflops if ours and not between else None,
        comparison.roofline.median_us / ours.median_us if ours and comparison.roofline else None,
        ours.own_us if ours else None,
        ours.bus_gbs if ours else None,
        ours.watts if ours else None,
        ours.joules if ours else None,
    ]
    for competitor in competitors:
        theirs = comparison.competitors.get(competitor)
        if competitor != results.BEST:
            cells.append(theirs if theirs is None or results.wrong(theirs) else theirs.median_us)
        cells.append(comparison.ratio(competitor))
        if competitor != results.BEST:
            cells.append(comparison.energy(competitor))
    return [*cells, comparison.ours.error if comparison.ours else None, comparison.ours.config if comparison.ours else None]


def _failures(runs: Sequence[plot.Run]) -> list[tuple[str, str, str]]:
    """A table for each op: how many trials of each problem failed, and why."""
    shown = []
    for op in dict.fromkeys(run.op for run in runs):
        of_op = sorted((run for run in runs if run.op == op), key=lambda run: report.place(op, run.problem, run.gpu))
        tried = sum(len(run.trials) for run in of_op)
        rows = [
            (run.problem, run.gpu, kind, number, _FOLDERS.sub("", detail))
            for run in of_op
            for (kind, detail), number in run.failures.most_common()
        ]
        searches = count(len(of_op), "search", "searches")
        told = f"{sum(row[3] for row in rows)} of {count(tried, 'trial')} of {searches} failed"
        columns = [("problem", "name"), ("GPU", "short"), ("kind", "short"), ("trials", "count"), ("reason", "long")]
        shown.append((op, "Failures", _table(told, columns, rows) if rows else f"<p>{_text(told)}.</p>\n"))
    return shown


def _picture(what: str, paths: Sequence[Path]) -> str:
    (drawn,) = (path for path in paths if path.suffix == ".svg")
    data = base64.b64encode(drawn.read_bytes()).decode()
    return f"<figure><div class='wide'><img alt='{_text(what)}' src='data:image/svg+xml;base64,{data}'></div></figure>\n"
