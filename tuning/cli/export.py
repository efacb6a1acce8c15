"""`mgpu-tune export`: writes tuned configs for others to use."""

from __future__ import annotations

import argparse
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.merge import shared_files
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say, writable
from mgpu_ops.tuning.cli.storages import finished_argument, finished_storage
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.registry.database import Entry

Key = tuple[str, str]  # GPU's key, op
Exported = dict[Key, "tuple[Entry, ...]"]


def register(commands: Any) -> None:
    parser = command(
        commands,
        "export",
        run,
        """
        mgpu-tune export --gpu h200 --output tuned
        MGPU_OPS_CONFIG_PATH=tuned python train.py   # on another machine
        mgpu-tune export --gpu h200 --kind measured --own --output mgpu_ops/configs   # to contribute what you measured
        mgpu-tune export matmul --format csv --output matmul.csv
        mgpu-tune export --storage postgresql://tuner@db.example/studies --output tuned   # with what a fleet has tuned
        """,
    )
    parser.add_argument("op", nargs="?", help="an op (default: all)")
    parser.add_argument("--gpu", help="which GPU: h200, h100-sxm ... (default: all that have entries)")
    parser.add_argument(
        "--format", choices=("json", "csv"), default="json", help="json (default): <gpu>/<op>.json; csv: a table"
    )
    parser.add_argument("--kind", choices=("measured", "modelled"), help="only entries of this kind")
    finished_argument(parser, "also the entries")
    parser.add_argument("--own", action="store_true", help="leave out what is shipped with mgpu_ops")
    parser.add_argument(
        "--output",
        required=True,
        type=Path,
        metavar="PLACE",
        help="a directory, joined with what is in it; of csv, a file",
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu

    if arguments.format == "json" and arguments.output.is_file():
        raise UsageError(f"{arguments.output}: is a file: name a directory for --format json")
    writable(arguments.output, "--output", folder=arguments.format == "json")
    ops = [mgpu_ops.spec_of(arguments.op).name] if arguments.op else list(mgpu_ops.SPECS)
    keys = [gpu.find(arguments.gpu).key] if arguments.gpu else [g.key for g in gpu.GPUS]
    exported, left_out = _chosen(_entries(ops, keys, arguments), arguments.kind)
    if not exported:
        raise UsageError(f"nothing of that is tuned for {', '.join(keys)}: see `mgpu-tune show`, or tune with `mgpu-tune run`")
    written = _write_csv(exported, arguments.output) if arguments.format == "csv" else _write(exported, arguments.output)
    _say_written(written, left_out, arguments)
    files = [{"path": path, "entries": number} for path, number in written.items()]
    answer(arguments, {"files": files, "left_out": left_out})
    return WRONG if left_out else OK


def _entries(ops: Collection[str], keys: Sequence[str], arguments: argparse.Namespace) -> dict[Key, list[Entry]]:
    """All entries of these ops and GPUs: of your own files, the shipped ones, and the storage."""
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge

    stored = [
        (path, database.read(path, gpu_key=key, op=op))
        for op in ops
        for key, whose, path in database.existing_files(keys, op)
        if whose == "user" or not arguments.own
    ]
    shared = [(path, file) for path, file in shared_files(finished_storage(arguments)) if file.gpu in keys and file.op in ops]
    return merge.entries_of([*stored, *shared])


def _chosen(found: dict[Key, list[Entry]], kind: str | None) -> tuple[Exported, list[dict[str, Any]]]:
    """The best entries of this kind; and those that are left out because they cannot run, for JSON."""
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge

    exported: Exported = {}
    left_out: list[dict[str, Any]] = []
    for (key, op), entries in found.items():
        good = []
        for entry in entries:
            if kind in (None, entry.evidence.kind):
                if fault := database.fault_of(entry, gpu.find(key), mgpu_ops.SPECS[op]):
                    left_out.append({"gpu": key, "op": op, "problem": entry.problem, "fault": fault})
                else:
                    good.append(entry)
        if good:
            exported[key, op] = merge.best(good)
    return exported, left_out


def _say_written(written: dict[Path, int], left_out: Sequence[dict[str, Any]], arguments: argparse.Namespace) -> None:
    from mgpu_ops.tuning.tables import problem_text

    for entry in left_out:
        say(f"left out: {entry['op']} on {entry['gpu']} {problem_text(entry['problem'])}: {entry['fault']}")
    for path, number in written.items():
        say(f"{path}: {count(number, 'problem')}")
    if arguments.format == "json":
        say(f"use it with MGPU_OPS_CONFIG_PATH={arguments.output}")


def _write(exported: Exported, directory: Path) -> dict[Path, int]:
    """Files <gpu>/<op>.json, as MGPU_OPS_CONFIG_PATH reads them: path -> number of entries."""
    from mgpu_ops.registry import database
    from mgpu_ops.tuning.fleet import merge

    written = {}
    for (gpu, op), entries in exported.items():
        path = directory / gpu / f"{op}.json"
        written[path] = len(database.update(path, entries, gpu_key=gpu, op=op, join=merge.best).entries)
    return written


def _write_csv(exported: Exported, path: Path) -> dict[Path, int]:
    """A row for each entry: GPU, op, the fields of problem ("problem.m"), of config ("config.tile_m"), what runs, evidence."""
    import csv

    import msgspec

    import mgpu_ops
    from mgpu_ops.registry import winner

    rows: list[dict[str, Any]] = []
    for (gpu, op), entries in exported.items():
        for entry in entries:
            parts = {f"{part}.{k}": v for part in ("problem", "config") for k, v in getattr(entry, part).items()}
            evidence = msgspec.structs.asdict(entry.evidence) | {"gpu": gpu, "device": entry.evidence.gpu}
            del evidence["samples_us"]
            runs = winner.of_entry(entry, mgpu_ops.SPECS[op])
            rows.append({"gpu": gpu, "op": op, **parts, "runs": runs, **evidence})
    groups = ("gpu", "op", "problem", "config", "runs")
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
