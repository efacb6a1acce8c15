"""Tables of trials and of database entries, for the terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Mapping, Sequence
from typing import Any

from rich.table import Table

SHOWN = 12  # trials


def trials_table(trials: Sequence[Any], baseline: str | None) -> Table:
    """The fastest trials first, with what set them apart; the failed ones are counted elsewhere.

    `baseline` names what was timed beside them, if anything. Fields that all shown trials share are told once, in the caption.
    """
    ok = sorted((t for t in trials if t.outcome.kind == "ok"), key=lambda t: t.outcome.us)[:SHOWN]
    configs = [dataclasses.asdict(t.config) for t in ok]
    fields = list(configs[0]) if configs else []
    varying = [f for f in fields if len({c[f] for c in configs}) > 1]
    shared = _assignments(configs[0], [f for f in fields if f not in varying]) if configs else ""
    more = f"{len(ok)} best of {len(trials)} trials" if len(trials) > len(ok) else f"{len(trials)} trials"
    table = Table(title=more, caption=f"all: {shared}" if shared else None, title_justify="left", caption_justify="left")
    measured = any(t.outcome.baseline_us for t in ok)
    for heading in ("trial", "from", "us", *((f"x {baseline}", "error") if measured else ()), "config"):
        table.add_column(heading, justify="left" if heading in ("from", "config") else "right", no_wrap=heading != "config")
    for trial, config in zip(ok, configs, strict=True):
        o = trial.outcome
        against = [f"{o.baseline_us / o.us:.3f}", f"{o.error:.1e}"] if measured else []
        table.add_row(str(trial.number), trial.origin, digits(o.us), *against, _assignments(config, varying))
    return table


def entries_table(title: str, entries: Sequence[Any]) -> Table:
    """Problems of a database file with their times and configs. What all problems share is told once, in the caption."""
    problems = [entry.problem for entry in entries]
    first = problems[0] if len(problems) > 1 else {}
    shared = {k: v for k, v in first.items() if all(p.get(k) == v for p in problems)}
    told = [f"all: {problem_text(shared)}"] if problem_text(shared) else []
    if entries:
        told.append(f"config: {' '.join(entries[0].config)}")
    table = Table(title=title, caption="\n".join(told), title_justify="left", caption_justify="left", padding=(0, 0))
    for heading in ("problem", "evidence", "us", "x baseline", "x default", "config", "date"):
        numbers = heading[0] in "ux"
        table.add_column(
            heading,
            justify="right" if numbers else "left",
            min_width={"problem": 15, "config": 12}.get(heading),
            max_width=8 if heading[0] == "x" else None,
            no_wrap=heading == "date",
        )
    for entry in entries:
        e = entry.evidence
        table.add_row(
            problem_text({k: v for k, v in entry.problem.items() if k not in shared}),
            e.kind,
            f"{e.median_us:.1f}",
            f"{e.baseline_us / e.median_us:.3f}" if e.baseline_us else "-",
            f"{e.default_us / e.median_us:.3f}" if e.default_us else "-",
            " ".join(str(v) for v in entry.config.values()),
            e.date,
        )
    return table


def problem_text(fields: Mapping[str, Any]) -> str:
    """A problem's fields, but for the masks and such that it does without."""
    return " ".join(f"{k}={v}" for k, v in fields.items() if v is not False and v not in (-1, "none"))


def digits(x: float) -> str:
    """At least four digits of a number above 0, without an exponent."""
    return f"{x:.{max(0, 3 - math.floor(math.log10(x)))}f}"


def _assignments(config: dict[str, Any], fields: Sequence[str]) -> str:
    return " ".join(f"{field}={config[field]}" for field in fields)
