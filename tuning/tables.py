"""Tables of trials and of database entries, for the terminal."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Collection, Iterable, Iterator, Mapping, Sequence
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from rich.table import Table  # of the extra "tune", without which a database can still be joined

    from mgpu_ops.registry.database import Entry
    from mgpu_ops.registry.spec import OpSpec
    from mgpu_ops.tuning.outcome import Trial

from mgpu_ops.registry import database, winner
from mgpu_ops.tuning.terminal import count, printable

SHOWN = 12  # trials


def trials_table(trials: Sequence[Trial], baseline: str | None) -> Table:
    """The fastest trials first, with what set them apart; the failed ones are counted elsewhere.

    `baseline` names what was timed beside them, if anything. Fields that all shown trials share are told once, in the caption.
    """
    from rich.table import Table

    ok = sorted((t for t in trials if t.outcome.kind == "ok"), key=lambda t: t.outcome.us or 0.0)[:SHOWN]
    configs = [dataclasses.asdict(t.config) for t in ok]
    fields = list(configs[0]) if configs else []
    varying = [f for f in fields if len({c[f] for c in configs}) > 1]
    shared = assignments(configs[0], [f for f in fields if f not in varying]) if configs else ""
    all_trials = count(len(trials), "trial")
    more = f"{len(ok)} best of {all_trials}" if len(trials) > len(ok) else all_trials
    table = Table(title=more, caption=f"all: {shared}" if shared else None, title_justify="left", caption_justify="left")
    measured = any(t.outcome.baseline_us for t in ok)
    for heading in ("trial", "from", "us", *((f"x {baseline}", "error") if measured else ()), "config"):
        table.add_column(heading, justify="left" if heading in ("from", "config") else "right", no_wrap=heading != "config")
    for trial, config in zip(ok, configs, strict=True):
        o = trial.outcome
        against = (
            [f"{x:{form}}" if x is not None else "-" for x, form in ((o.speed, ".3f"), (o.error, ".1e"))] if measured else []
        )
        table.add_row(str(trial.number), trial.origin, digits(o.us or 0.0), *against, assignments(config, varying))
    return table


HEADINGS = ("problem", "us", "x baseline", "x default", "runs", "evidence", "date", "config")
BETWEEN_GPUS = (
    "us of a collective: a call's kernels on the GPU that comes last, or, where these take less than 50 us and the host more, "
    "the host's time for a call; an entry does not say which"
)


def entry_cells(entry: Entry, spec: OpSpec, omitted: Collection[tuple[str, str]] = ()) -> tuple[str, ...]:
    """An entry under `HEADINGS`: "x" columns are times over ours, above 1 where ours is faster. `spec` is its op's.

    Under "runs" is what a call of the problem runs, as `winner.told` says it.

    Fields that are `omitted`, ("problem" or "config", name), are left out.
    """
    e = entry.evidence
    problem = {k: v for k, v in entry.problem.items() if ("problem", k) not in omitted}
    config = {k: v for k, v in in_order(entry.config, spec.Config).items() if ("config", k) not in omitted}
    of = "sustained" if e.objective == "sustained" else "kernel or host" if between_gpus(spec) else "kernel"
    kind = f"{e.kind}: {of}" if e.kind == "measured" else e.kind
    against = f"{e.baseline_us / e.median_us:.3f} {e.baseline or '?'}" if e.baseline_us else "-"
    default = f"{e.default_us / e.median_us:.3f}" if e.default_us else "-"
    runs = winner.told(entry, spec)
    return problem_text(problem, spec), f"{e.median_us:.1f}", against, default, runs, kind, e.date, assignments(config)


def between_gpus(spec: OpSpec) -> bool:
    """Whether the op is a collective."""
    return any(spec.devices(problem) > 1 for problem in spec.shapes.values())


def by_problem(entries: Sequence[Entry], spec: OpSpec) -> list[Entry]:
    """Sorted by the fields of a problem in their order, m, n, k ... or batch, tokens ...; collectives by GPUs, then size."""

    def key(entry: Entry) -> tuple[Any, ...]:
        problem = in_order(entry.problem, spec.Problem)
        values = [problem.get("devices", 0), *problem.values()]
        return [(isinstance(value, str), value) for value in values], database.kind(entry)

    return sorted(entries, key=key)


def entries_table(title: str, entries: Sequence[Entry], spec: OpSpec) -> Table:
    """Entries of a database file, for a terminal. What is the same in all of several is told once, in the caption."""
    from rich import box
    from rich.table import Table

    first, several = entries[0] if entries else None, len(entries) > 1
    shared = {
        (part, field)
        for part in ("problem", "config")
        for field, value in (getattr(first, part).items() if several else ())
        if all(getattr(entry, part).get(field) == value for entry in entries)
    }
    rows = [entry_cells(entry, spec, shared) for entry in entries]
    alike = [several and len({row[i] for row in rows}) == 1 for i in range(len(HEADINGS))]
    same = [is_alike and heading in ("evidence", "date") for is_alike, heading in zip(alike, HEADINGS)]
    runs = HEADINGS.index("runs")
    all_kernels = alike[runs] and rows[0][runs] == "kernel"
    told = []
    if first is not None and several:
        problem = problem_text({k: v for k, v in first.problem.items() if ("problem", k) in shared}, spec)
        config = {k: v for k, v in in_order(first.config, spec.Config).items() if ("config", k) in shared}
        told = [problem, *(cell for cell, dropped in zip(rows[0], same) if dropped), assignments(config)]
    caption = f"all: {'; '.join(filter(None, told))}" if any(told) else None
    style: Any = {"box": box.SIMPLE_HEAD, "title_justify": "left", "caption_justify": "left", "padding": (0, 1, 0, 0)}
    table = Table(title=title, caption=caption, **style)
    for heading, dropped in zip(HEADINGS, same):
        numbers = heading == "us" or heading[0] == "x"
        width: Any = {"problem": {"min_width": 15}, "config": {"min_width": 22}}.get(heading, {"no_wrap": True})
        if not dropped and not (all_kernels and heading == "runs"):
            table.add_column(heading, justify="right" if numbers else "left", **width)
    for row in rows:
        shown = [cell for i, (cell, dropped) in enumerate(zip(row, same)) if not dropped and not (all_kernels and i == runs)]
        table.add_row(*shown)
    return table


def entries_lines(entries: Sequence[Entry], spec: OpSpec) -> Iterator[str]:
    """The same for a file or a pipe: a line of headings and one for each entry, however long, in columns."""
    rows = [HEADINGS, *(tuple(map(printable, entry_cells(entry, spec))) for entry in entries)]
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    for row in rows:
        cells = (cell.rjust(n) if h == "us" else cell.ljust(n) for cell, n, h in zip(row, widths, HEADINGS, strict=True))
        yield "  ".join(cells).rstrip()


def problem_text(fields: Mapping[str, Any], spec: OpSpec | None = None) -> str:
    """A problem's fields, but for the masks and such that it does without.

    With its op, in the op's order and without what is the op's default; the dtype is told all the same.
    """
    usual = {f.name: f.default for f in dataclasses.fields(spec.Problem)} if spec else {}
    usual.pop("dtype", None)
    if "dtype" in fields and "out_dtype" in usual:
        usual["out_dtype"] = fields["dtype"]
    told = in_order(fields, spec.Problem) if spec else fields
    shown = {k: v for k, v in told.items() if k not in usual or v != usual[k]}
    return " ".join(f"{k}={v}" for k, v in shown.items() if v is not False and v not in (-1, "none"))


def in_order(fields: Mapping[str, Any], cls: type) -> dict[str, Any]:
    """The fields in the order of the class, then those that it does not have."""
    names = [field.name for field in dataclasses.fields(cls) if field.name in fields]
    return {name: fields[name] for name in dict.fromkeys([*names, *fields])}


def digits(x: float) -> str:
    """At least four digits of a number above 0, without an exponent; "0" of 0."""
    if x == 0:
        return "0"
    return f"{x:.{max(0, 3 - math.floor(math.log10(x)))}f}"


def assignments(fields: Mapping[str, Any], names: Iterable[str] | None = None) -> str:
    """ "tile_m=64 tile_n=128", of some of the fields or of all."""
    return " ".join(f"{name}={fields[name]}" for name in (fields if names is None else names))
