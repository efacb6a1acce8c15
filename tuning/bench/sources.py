"""What `mgpu-tune plot` and `report` read: studies of a journal or a fleet's storage, sweeps, databases, benchmarks."""

from __future__ import annotations

import dataclasses
import os
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.core import gpu
from mgpu_ops.registry import database, resolution
from mgpu_ops.registry.database import Entry, File
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.bench import plot, results

_KINDS = ("*/*.json", "*.json", "*.json.gz", "*.csv", "*.journal")  # of files that a directory is asked for


class SourceError(ValueError):
    """A place with nothing to read; the message names it."""


@dataclasses.dataclass
class Sources:
    """What was read, and the places it is from, without passwords."""

    places: list[str] = dataclasses.field(default_factory=list)
    runs: list[plot.Run] = dataclasses.field(default_factory=list)
    files: list[tuple[Path, File]] = dataclasses.field(default_factory=list)
    rows: list[results.Measurement] = dataclasses.field(default_factory=list)  # of benchmarks
    skipped: list[str] = dataclasses.field(default_factory=list)  # files of a directory that are something else, and why

    def of(self, op: str | None, device: gpu.Gpu | None) -> Sources:
        """The part that is about one op and one GPU; None stands for all of them."""

        def wanted(its_op: str, its_gpu: str) -> bool:
            about = op in (None, results.base_op(its_op))
            return about and (device is None or its_gpu in (device.key, *device.kinds))

        return Sources(
            self.places,
            [run for run in self.runs if wanted(run.op, run.gpu)],
            [(path, file) for path, file in self.files if wanted(file.op, file.gpu)],
            [row for row in self.rows if wanted(row.op, row.gpu)],
            self.skipped,
        )

    def taken(self, specs: Mapping[str, OpSpec], objective: database.Objective | None = None) -> list[tuple[File, Entry]]:
        """Of each problem the entry that a call would take, of those here, in the order of `resolution.resolve`.

        One that a call can use, then measured before modelled, of the objective ($MGPU_OPS_OBJECTIVE), of the first file.
        """
        wanted = objective or resolution.objective()
        best: dict[tuple[Any, ...], tuple[tuple[bool, bool, bool], File, Entry]] = {}
        for _, file in self.files:
            spec, device = specs.get(file.op), gpu.find(file.gpu)
            for entry in file.entries:
                evidence = entry.evidence
                fault = database.fault_of(entry, device, spec)
                rank = (fault is not None, evidence.kind == "modelled", evidence.objective != wanted)
                key = (file.op, file.gpu, database.key_of_fields(entry.problem))
                if key not in best or rank < best[key][0]:
                    best[key] = (rank, file, entry)
        return [(file, entry) for _, file, entry in best.values()]

    def rates(self, specs: Mapping[str, OpSpec]) -> dict[tuple[str, str], list[results.Measurement]]:
        """("bench" or "tuned", op) -> measurements of one picture: those of benchmarks, and those of the databases' entries."""
        drawn: dict[tuple[str, str], list[results.Measurement]] = {}
        for row in results.merge(self.rows):
            drawn.setdefault(("bench", row.op), []).append(row)
        for objective in database.OBJECTIVES:
            for file, entry in self.taken(specs, objective):
                if file.op in specs and entry.evidence.objective == objective:
                    for row in plot.rows_of(specs[file.op], gpu.find(file.gpu), [entry]):
                        drawn.setdefault(("tuned", row.op), []).append(row)
        return {key: results.merge(rows) for key, rows in drawn.items() if rows}


def find(places: Iterable[str], specs: Mapping[str, OpSpec]) -> Sources:
    """Reads the places: files, directories of such files, or URLs of storages.

    Raises SourceError for a place with nothing in it, and the readers' own errors for a named file that is broken:
    DatabaseError, SweepError, StorageError, ValueError.
    """
    found = Sources()
    for place in places:
        found.places.append(storage.redact(place))
        if "://" in place:
            found.runs += _studies(place, specs)
            continue
        path = Path(os.path.expanduser(place))
        if not path.exists():
            raise SourceError(f"{path}: there is no such file: name a journal, a database, a sweep or a CSV file of `bench`")
        if not path.is_dir():
            _read(path, specs, found)
            continue
        inside = sorted({file for kind in _KINDS for file in path.glob(kind)})
        if not inside:
            raise SourceError(f"{path}: holds neither databases, sweeps, journals nor CSV files: name another directory")
        for file in inside:
            try:
                _read(file, specs, found)
            except ValueError as error:  # all readers' errors are some
                found.skipped.append(str(error))
    return found


def own(specs: Mapping[str, OpSpec], keys: Sequence[str]) -> list[str]:
    """The places that are read by default: your databases and the shipped ones, and the journals of `mgpu-tune run`."""
    stored = [location.path for op in specs for location in database.existing_files(keys, op)]
    journals = [storage.journal_path(key, op) for key in keys for op in specs]
    return [str(path) for path in (*stored, *journals) if path.exists()]


def _read(path: Path, specs: Mapping[str, OpSpec], found: Sources) -> None:
    name = path.name
    if name.endswith(".t4.json.gz"):
        return  # a sweep's other format
    if name.endswith(".json.gz"):
        from mgpu_ops.tuning.replay import sweep

        found.runs.append(plot.run_of_sweep(sweep.read(path), specs))
    elif name.endswith(".csv"):
        try:
            found.rows += results.read_csv(path)
        except (OSError, UnicodeDecodeError) as error:
            raise SourceError(f"{path}: cannot be read ({error}): name a CSV file of `bench`") from None
    elif name.endswith(".json"):
        found.files.append((path, database.read(path)))
    else:
        found.runs += _studies(str(path), specs)


def _studies(where: str, specs: Mapping[str, OpSpec]) -> Iterator[plot.Run]:
    import optuna

    with storage.opened(where) as backend:
        studies: list[Any] = [optuna.load_study(study_name=s.study_name, storage=backend) for s in backend.get_all_studies()]
        runs = [plot.run_of_study(study, specs) for study in studies]
    yield from (run for run in runs if run is not None and run.trials)
