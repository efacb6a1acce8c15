"""`mgpu-tune export`: writes what is tuned for others to use."""

from __future__ import annotations

import argparse
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.merge import shared_files
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, count, say, writable
from mgpu_ops.tuning.cli.storages import finished_argument, finished_storage


def register(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        run,
        "write what is tuned: a directory for MGPU_OPS_CONFIG_PATH, or one table",
        """
        mgpu-tune export --gpu h200 --output tuned
        MGPU_OPS_CONFIG_PATH=tuned python train.py   # on another machine
        mgpu-tune export --gpu h200 --kind measured --own --output mgpu_ops/configs   # to contribute what you measured
        mgpu-tune export matmul --format csv --output matmul.csv
        mgpu-tune export --storage postgresql://tuner@db.example/studies --output tuned   # with what a fleet has tuned
        """,
    )
    parser.add_argument("op", nargs="?", help="an op; all by default")
    parser.add_argument("--gpu", help="h200, h100-sxm ...; default: all that have entries")
    parser.add_argument("--format", choices=("json", "csv"), default="json", help="default json: <gpu>/<op>.json")
    parser.add_argument("--kind", choices=("measured", "modelled"), help="only these entries")
    finished_argument(parser, "also what is tuned")
    parser.add_argument("--own", action="store_true", help="leave out what is shipped with mgpu_ops")
    parser.add_argument(
        "--output", required=True, type=Path, metavar="PLACE", help="the directory, joined if it exists; of csv, the file"
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge
    from mgpu_ops.tuning.tables import problem_text

    if arguments.format == "json" and arguments.output.is_file():
        raise UsageError(f"{arguments.output}: is a file: name a directory for --format json")
    writable(arguments.output, "--output", folder=arguments.format == "json")
    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    keys = [gpu.find(arguments.gpu).key] if arguments.gpu else [g.key for g in gpu.GPUS]
    found = [
        (path, database.read(path, gpu_key=key, op=spec.name))
        for spec in specs
        for key, whose, path in database.existing_files(keys, spec.name)
        if whose == "user" or not arguments.own
    ]
    exported: dict[tuple[str, str], Any] = {}
    left_out: list[dict[str, Any]] = []
    shared = [(p, f) for p, f in shared_files(finished_storage(arguments)) if f.gpu in keys and f.op in [s.name for s in specs]]
    for key, entries in merge.entries_of([*found, *shared]).items():
        spec, device = mgpu_ops.SPECS[key[1]], gpu.find(key[0])
        wanted = [e for e in entries if arguments.kind in (None, e.evidence.kind)]
        faults = [(e, fault) for e in wanted if (fault := database.fault_of(e, device, spec))]
        left_out += [{"gpu": key[0], "op": key[1], "problem": e.problem, "fault": fault} for e, fault in faults]
        if good := merge.best(e for e in wanted if e not in [e for e, _ in faults]):
            exported[key] = good
    if not exported:
        raise UsageError(f"nothing of that is tuned for {', '.join(keys)}: see `mgpu-tune show`, or tune with `mgpu-tune run`")
    written = _write_csv(exported, arguments.output) if arguments.format == "csv" else _write(exported, arguments.output)
    for entry in left_out:
        say(f"left out: {entry['op']} on {entry['gpu']} {problem_text(entry['problem'])}: {entry['fault']}")
    for path, number in written.items():
        say(f"{path}: {count(number, 'problem')}")
    if arguments.format == "json":
        say(f"use it with MGPU_OPS_CONFIG_PATH={arguments.output}")
    files = [{"path": path, "entries": number} for path, number in written.items()]
    answer(arguments, {"files": files, "left_out": left_out})
    return WRONG if left_out else OK


def _write(exported: dict[tuple[str, str], Any], directory: Path) -> dict[Path, int]:
    """As MGPU_OPS_CONFIG_PATH takes it, and as the shipped configs are."""
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge

    written = {}
    for (gpu, op), entries in exported.items():
        path = directory / gpu / f"{op}.json"
        written[path] = len(database.update(path, entries, gpu_key=gpu, op=op, join=merge.best).entries)
    return written


def _write_csv(exported: dict[tuple[str, str], Any], path: Path) -> dict[Path, int]:
    """One row an entry: GPU, op, then the fields of problems, of configs and of the evidence, under prefixed names."""
    import csv

    import msgspec

    rows: list[dict[str, Any]] = []
    for (gpu, op), entries in exported.items():
        for entry in entries:
            parts = {f"{part}.{k}": v for part in ("problem", "config") for k, v in getattr(entry, part).items()}
            evidence = msgspec.structs.asdict(entry.evidence) | {"gpu": gpu, "device": entry.evidence.gpu}
            del evidence["samples_us"]
            rows.append({"gpu": gpu, "op": op, **parts, **evidence})
    groups = ("gpu", "op", "problem", "config")
    columns = dict.fromkeys(column for row in rows for column in row)
    ordered = sorted(columns, key=lambda column: (*groups, column.partition(".")[0]).index(column.partition(".")[0]))
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with path.open("w", newline="", encoding="utf-8") as stream:
            writer = csv.DictWriter(stream, ordered, lineterminator="\n")
            writer.writeheader()
            writer.writerows(rows)
    except OSError as e:
        raise UsageError(f"{path}: cannot be written ({e.strerror}): name another --output") from None
    return {path: len(rows)}
