"""One HTML page: what is tuned, what failed, and pictures. The file loads nothing and runs no script.

Names of problems, GPUs and files, and reasons of failures, may come from elsewhere. `_text` escapes all text of the page.
Pictures are embedded as images, in which a browser runs no script, and a content security policy forbids the rest. Folders
of the machine that made the page are left out.
"""

from __future__ import annotations

import base64
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
from mgpu_ops.tuning.terminal import printable

_STYLE = """
:root { color-scheme: light }
* { box-sizing: border-box }
body { font: 15px/1.5 system-ui, sans-serif; color: #222; max-width: 1240px; margin: 0 auto; padding: 1.2em 1em 3em;
  overflow-wrap: anywhere }
h1 { font-size: 1.7em; margin: .3em 0 .1em }
h2 { font-size: 1.3em; margin: 2em 0 .4em; border-bottom: 2px solid #0b6e99 }
h3 { font-size: 1.05em; margin: 1.4em 0 .3em }
a { color: #0b5f85 }
nav { background: #f4f7f9; padding: .4em 1em; font-size: .93em }
nav ul { columns: 18em; padding: 0; margin: .4em 0; list-style: none }
nav li { break-inside: avoid } nav .under { padding-left: 1.2em }
.quiet { color: #5a5a5a; font-size: .92em } .good { color: #1e6b28 } .bad { color: #b3261e }
figure { margin: .5em 0 1.3em } figcaption { color: #5a5a5a; font-size: 13px; margin: .3em 0 }
.wide { overflow-x: auto; border: 1px solid #ddd; border-radius: 4px }
table { border-collapse: collapse; font-size: 13px; min-width: 100%; overflow-wrap: normal }
th, td { border-bottom: 1px solid #e4e4e4; padding: .28em .7em; text-align: left; vertical-align: top }
tbody tr:last-child td { border-bottom: 0 } tbody tr:nth-child(even) td { background: #fafafa }
th { background: #eef2f4; white-space: nowrap } .short { white-space: nowrap }
.number { text-align: right; white-space: nowrap; font-variant-numeric: tabular-nums }
.long { min-width: 54em } .name { min-width: 15em }
img { display: block; min-width: 640px; max-width: 100%; height: auto }
summary { cursor: pointer; padding: .2em 0 }
"""
_POLICY = "default-src 'none'; img-src data:; style-src 'unsafe-inline'"

Kind = str  # of a column: "short", "name", "long", "count", "number", "ratio", "of", "share", "error"


def page(found: Sources, specs: Mapping[str, OpSpec], pictures: Iterable[tuple[str, Sequence[Path]]], date: str) -> str:
    """The page as text. `pictures` are (what each shows, its files); the SVG is embedded."""
    title, taken = "mgpu_ops: what is tuned", set[str]()
    groups = [
        ("Tuned", [_entries(path, file, specs.get(file.op)) for path, file in _in_op_order(found.files, specs)]),
        ("Benchmarks", _benchmarks(found.rows)),
        ("Failures", _failures(found.runs)),
        ("Pictures", [_picture(what, paths) for what, paths in pictures]),
    ]
    contents, body = [("summary", "Summary", False)], [f"<h2 id='summary'>Summary</h2>\n{_summary(found, specs)}"]
    for name, sections in groups:
        if not sections:
            continue
        contents.append((place := plot.slug(name.lower(), taken), name, False))
        body.append(f"<h2 id='{_text(place)}'>{_text(name)}</h2>\n")
        for heading, inside in sections:
            contents.append((place := plot.slug(f"{name.lower()}-{heading}", taken), heading, True))
            body.append(f"<h3 id='{_text(place)}'>{_text(heading)}</h3>\n{inside}")
    sources = ", ".join(map(where, found.places)) or "nothing"
    top = [
        f"<h1>{_text(title)}</h1>\n<p class='quiet'>Made on {_text(date)}</p>\n{_contents(contents)}",
        *body,
        f"<h2>Sources</h2>\n<p class='quiet'>{_text(sources)}</p>\n",
    ]
    return (
        "<!doctype html>\n<html lang='en'>\n<head>\n<meta charset='utf-8'>\n"
        "<meta name='viewport' content='width=device-width, initial-scale=1'>\n"
        f'<meta http-equiv="Content-Security-Policy" content="{_text(_POLICY)}">\n'
        f"<title>{_text(title)}</title>\n<style>{_STYLE}</style>\n</head>\n<body>\n{''.join(top)}\n</body>\n</html>\n"
    )


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


def _contents(entries: Iterable[tuple[str, str, bool]]) -> str:
    shown = []
    for place, name, under in entries:
        link = f"<a href='#{_text(place)}'>{_text(name)}</a>"
        shown.append(f"<li class='under'>{link}</li>" if under else f"<li>{link}</li>")
    return f"<nav aria-label='Contents'><ul>\n{chr(10).join(shown)}\n</ul></nav>\n"


def _table(caption: str, columns: Sequence[tuple[str, Kind]], rows: Sequence[Sequence[Any]]) -> str:
    """A table as HTML. None is a dash; the numbers of a column have the same number of decimals; empty columns are left out.

    A ratio is above 1 where ours is faster.
    """
    kept = [i for i in range(len(columns)) if any(row[i] is not None for row in rows)] or list(range(len(columns)))
    formats = {i: _format(columns[i][1], [row[i] for row in rows if _is_number(row[i])]) for i in kept}
    head = "".join(f"<th scope='col'{_class(columns[i][1])}>{_text(columns[i][0])}</th>" for i in kept)
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
    if not _is_number(value):
        return f"<td{_class(kind)}>{_text('-' if value is None else value)}</td>"
    also = ("good" if value >= 1 else "bad") if kind == "ratio" else ""
    return f"<td{_class(kind, also)}>{_text(shown(value))}</td>"


# --- What is on the page --------------------------------------------------------------------------


def _in_op_order(files: Iterable[tuple[Path, File]], specs: Mapping[str, OpSpec]) -> list[tuple[Path, File]]:
    ops = list(specs)
    return sorted(files, key=lambda found: (ops.index(found[1].op) if found[1].op in ops else len(ops), found[1].gpu))


def _summary(found: Sources, specs: Mapping[str, OpSpec]) -> str:
    shown, tuned = "", []
    columns: list[tuple[str, Kind]]
    for path, file in _in_op_order(found.files, specs):
        spec = specs.get(file.op)
        kinds = [entry.evidence.kind for entry in file.entries]
        stale = sum(spec is not None and database.stale(entry, spec) is not None for entry in file.entries)
        tuned.append((file.op, file.gpu, where(str(path)), len(kinds), kinds.count("measured"), kinds.count("modelled"), stale))
    if tuned:
        columns = [("op", "short"), ("GPU", "short"), ("database", "short")]
        columns += [(name, "count") for name in ("problems", "measured", "modelled", "out of date")]
        total = sum(row[3] for row in tuned)
        shown += _table(f"What is tuned: {total} problem{'s' * (total != 1)}", columns, tuned)
    rivals, measures = list[tuple[Any, ...]](), list[tuple[Any, ...]]()
    rates = sorted(found.rates(specs).items(), key=lambda item: (report.place(item[0][1], ""), item[0][0]))
    for (what, op), measured in rates:
        of = results.yardsticks(results.comparisons(measured))
        for s in results.summary(measured):
            source = "benchmark" if what == "bench" else "tuning"
            row = (op, s.competitor, s.problems, s.geomean, s.worst, f"{s.wins} of {s.problems}", s.wrong or None)
            (measures if s.competitor in of else rivals).append((*row, source, s.gpu, s.worst_problem or None))
    told = {"ratio": "Times of others over ours: above 1 where ours is faster"}
    told["of"] = "The part that ours reaches of the speed of a yardstick, something else that costs as much"
    for kind, rows in (("ratio", rivals), ("of", measures)):
        columns = [("op", "short"), ("against", "short"), ("problems", "count"), ("geometric mean", kind), ("worst", kind)]
        columns += [("as fast or faster", "number"), ("wrong results", "count"), ("measured in", "short"), ("GPU", "short")]
        shown += _table(told[kind], [*columns, ("worst problem", "short")], rows) if rows else ""
    number = sum(len(run.trials) for run in found.runs)
    if found.runs:
        failed = sum(sum(run.failures.values()) for run in found.runs)
        searches = f"{len(found.runs)} search{'es' * (len(found.runs) != 1)}"
        shown += f"<p>{_text(f'{searches} with {number} trials, of which {failed} failed.')}</p>\n"
    return shown or "<p>Nothing is tuned, benchmarked or searched.</p>\n"


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
    told = [f"{len(entries)} problem{'s' * (len(entries) != 1)}", where(str(path))]
    for name in ("evidence", "found", "remark"):
        values = {cells.get(name) for cells in entries}
        if len(values) == 1 and len(entries) > 1:
            told += filter(None, values)
            columns = [column for column in columns if column[0] != name]
    rows = [[cells.get(name) for name, _ in columns] for cells in entries]
    return f"{file.op} on {file.gpu}", _table("; ".join(told), columns, rows)


def _entry(entry: Entry, file: File, spec: OpSpec | None) -> dict[str, Any]:
    e = entry.evidence
    cells: dict[str, Any] = {"problem": assignments(entry.problem), "remark": f"unknown op {file.op}"}
    config: Mapping[str, Any] = entry.config
    if spec is not None:
        cells = {"problem": plot.problem_label(spec, entry.problem), "remark": database.stale(entry, spec)}
        config = in_order(config, spec.Config)
        runs = winner.of_entry(entry, spec)
        cells["runs"] = f"xla {e.baseline_us:.4g} us" if runs == "xla" and e.baseline_us else runs
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


def _benchmarks(rows: Sequence[results.Measurement]) -> list[tuple[str, str]]:
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
        told = [f"{len(every)} problem{'s' * (len(every) != 1)}"]
        for name in ("date", "driver", "jax", "cudnn", "cublas", "ptxas"):
            values = list(dict.fromkeys(filter(None, (getattr(row, name) for row in of_set))))
            told += [", ".join(values) if name == "date" else f"{name} {', '.join(values)}"] if values else []
        cells = [_cells(each, competitors) for each in report.ordered(every)]
        shown.append((f"{op} on {its_gpu}", _table("; ".join(told), columns, cells)))
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


def _failures(runs: Sequence[plot.Run]) -> list[tuple[str, str]]:
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
        searches = f"{len(of_op)} search{'es' * (len(of_op) != 1)}"
        told = f"{sum(row[3] for row in rows)} of {tried} trials of {searches} failed"
        columns = [("problem", "name"), ("GPU", "short"), ("kind", "short"), ("trials", "count"), ("reason", "long")]
        shown.append((op, _table(told, columns, rows) if rows else f"<p>{_text(told)}.</p>\n"))
    return shown


def _picture(what: str, paths: Sequence[Path]) -> tuple[str, str]:
    (drawn,) = (path for path in paths if path.suffix == ".svg")
    data = base64.b64encode(drawn.read_bytes()).decode()
    image = f"<img alt='{_text(what)}' src='data:image/svg+xml;base64,{data}'>"
    return what, f"<details open><summary>show or hide</summary><figure><div class='wide'>{image}</div></figure></details>\n"
