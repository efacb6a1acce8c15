"""Databases of several machines and times: joined into one, compared, and asked what is out of date."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any, Literal, NamedTuple

import msgspec

from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.registry.database import DatabaseError, Entry, File
from mgpu_ops.registry.spec import OpSpec

Key = tuple[str, str]  # GPU's key, op


# --- which files


def files(places: Iterable[Path], ops: Iterable[str]) -> Iterator[tuple[Path, File]]:
    """The database files that are named, and of a directory its <gpu key>/<op>.json; DatabaseError for one that is none."""
    for place in places:
        if not place.is_dir():
            yield place, database.read(place)
            continue
        inside = [path for op in ops for path in sorted(place.glob(f"*/{op}.json"))]
        if not inside:
            raise DatabaseError(place, "has no <gpu>/<op>.json inside: name a database file or such a directory")
        yield from ((path, database.read(path, gpu_key=path.parent.name, op=path.stem)) for path in inside)


def tuned_in(where: str, ops: Iterable[str]) -> tuple[list[tuple[Path, File]], list[str]]:
    """What is done in a storage, as a file for each GPU and op; and what this version has no place for, with the reason.

    Raises StorageError for a storage that cannot be read.
    """
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import queue as fleet_queue

    grouped: dict[Key, list[Entry]] = {}
    left_out: dict[str, None] = {}
    known = list(ops)
    with storage.opened(where) as backend:
        for name, op, entry in fleet_queue.entries(backend):
            try:
                key = gpu.find(name).key, op
            except ValueError as error:
                left_out[str(error)] = None
                continue
            if op in known:
                grouped.setdefault(key, []).append(entry)
            else:
                left_out[f"op {op!r} is not one of {', '.join(known)}"] = None
    place = Path(storage.redact(where))
    return [(place, File(database.SCHEMA, *key, tuple(entries))) for key, entries in grouped.items()], list(left_out)


def entries_of(found: Iterable[tuple[Path, File]]) -> dict[Key, list[Entry]]:
    """All entries of each GPU and op, several for a problem where several files have it."""
    grouped: dict[Key, list[Entry]] = {}
    for _, file in found:
        grouped.setdefault((file.gpu, file.op), []).extend(file.entries)
    return grouped


# --- joining


class Conflict(NamedTuple):
    """Two entries for one problem, and why one stays."""

    kept: Entry
    dropped: Entry
    why: str


def best(*several: Iterable[Entry]) -> tuple[Entry, ...]:
    """The entries to keep of one GPU and op, whatever the order in which they come; sorted.

    Only times of one kernel version can be compared: of those the newest counts. Within it the faster entry wins, and a
    measured one beats every modelled one. A modelled entry stays beside a measured one of an older kernel version, and a
    sustained entry beside one of bursts.
    """
    return database.merge((), (e for of_problem in _by_problem(several).values() for e in _kept(of_problem)))


def conflicts(*several: Iterable[Entry]) -> list[Conflict]:
    """What `best` drops, but for what is the same in all."""
    found = []
    for of_problem in _by_problem(several).values():
        kept = _kept(of_problem)
        dropped = [entry for entry in of_problem if entry not in kept]
        for entry in {msgspec.json.encode(e, order="deterministic"): e for e in dropped}.values():
            winner = next((k for k in kept if database.kind(k) == database.kind(entry)), kept[0])
            found.append(Conflict(winner, entry, _why(winner, entry)))
    return found


def _by_problem(several: Iterable[Iterable[Entry]]) -> dict[Any, list[Entry]]:
    found: dict[Any, list[Entry]] = {}
    for entries in several:
        for entry in entries:
            found.setdefault(database.key_of_fields(entry.problem), []).append(entry)
    return found


def _kept(of_problem: Sequence[Entry]) -> list[Entry]:
    kinds: dict[str, Entry] = {}
    for entry in sorted(of_problem, key=_rank):
        kinds.setdefault(database.kind(entry), entry)
    measured = max((e.evidence.kernel_version for e in kinds.values() if e.evidence.kind == "measured"), default=None)
    return [
        entry
        for entry in kinds.values()
        if entry.evidence.kind == "measured" or measured is None or measured < entry.evidence.kernel_version
    ]


def _rank(entry: Entry) -> tuple[Any, ...]:
    """Newest kernel and least time first; ties are broken by what is in the entry, so that no order of files matters."""
    e = entry.evidence
    return -e.kernel_version, e.median_us, e.spread_us, msgspec.json.encode(entry, order="deterministic")


def _why(kept: Entry, dropped: Entry) -> str:
    ours, theirs = kept.evidence, dropped.evidence
    if ours.kernel_version != theirs.kernel_version:
        return f"kernel version {ours.kernel_version} over {theirs.kernel_version}"
    if ours.kind != theirs.kind:
        return f"{ours.kind} over {theirs.kind}"
    if ours.median_us == theirs.median_us:
        return "equally fast"
    return f"{theirs.median_us / ours.median_us:.3f}x as fast"


def usable(key: Key, entries: Iterable[Entry], specs: Mapping[str, OpSpec]) -> tuple[list[Entry], list[tuple[Entry, str]]]:
    """The entries that others may get, and those that no one should, with the reason: of another GPU, or that cannot run.

    An entry of another kernel version is usable: its fields may have been others. ValueError for an unknown GPU or op.
    """
    gpu_key, op = key
    device = gpu.find(gpu_key)
    if op not in specs:
        raise ValueError(f"op {op!r} is not one of {', '.join(specs)}: leave its file out")
    good, bad = [], []
    for entry in entries:
        known = specs[op] if entry.evidence.kernel_version == specs[op].version else None
        if fault := database.fault_of(entry, device, known):
            bad.append((entry, fault))
        else:
            good.append(entry)
    return good, bad


# --- comparing


@dataclasses.dataclass(frozen=True)
class Difference:
    """An entry that only one of two sides has, or that both have with another config or time."""

    gpu: str
    op: str
    what: Literal["added", "removed", "changed"]
    before: Entry | None
    after: Entry | None

    @property
    def entry(self) -> Entry:
        found = self.after or self.before
        assert found is not None
        return found

    @property
    def ratio(self) -> float | None:
        """The time before over the time after: above 1 where it became faster. None for times that do not compare."""
        if self.before is None or self.after is None:
            return None
        before, after = self.before.evidence, self.after.evidence
        return before.median_us / after.median_us if before.kernel_version == after.kernel_version else None


def differences(before: Mapping[Key, Iterable[Entry]], after: Mapping[Key, Iterable[Entry]]) -> list[Difference]:
    """What differs, by GPU, op, problem, kind of evidence and objective."""
    found = []
    for gpu_key, op in sorted({*before, *after}):
        old, new = (
            {(database.key_of_fields(e.problem), database.kind(e)): e for e in database.merge((), side.get((gpu_key, op), ()))}
            for side in (before, after)
        )
        for identity in sorted({*old, *new}):
            a, b = old.get(identity), new.get(identity)
            if a != b:
                found.append(Difference(gpu_key, op, "changed" if a and b else "added" if b else "removed", a, b))
    return found
