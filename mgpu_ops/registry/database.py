"""The config database: one JSON file `<gpu key>/<op>.json` per GPU and op, data only.

What a file may hold, reading and writing it, where files lie, and what is wrong with one. `resolution.py`
chooses the entry that a call uses.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import errno
import fcntl
import json
import os
import stat
import sys
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple, get_args

import jax
import msgspec

from mgpu_ops.core.gpu import Gpu, find, key_of
from mgpu_ops.registry.places import folder_fault

if TYPE_CHECKING:
    from mgpu_ops.registry.spec import Config, OpSpec, Problem

SCHEMA = 1
MAX_BYTES = 2**25  # of a file, some 50,000 entries: more is no database

AnyPath = str | os.PathLike[str]
Fields = dict[str, int | str | bool]
Objective = Literal["burst", "sustained"]
OBJECTIVES: tuple[Objective, ...] = get_args(Objective)
Join = Callable[[Sequence["Entry"], Sequence["Entry"]], Sequence["Entry"]]
Positive = Annotated[float, msgspec.Meta(gt=0)]  # and finite: JSON has no infinity and no NaN
NotNegative = Annotated[float, msgspec.Meta(ge=0)]


class DatabaseError(ValueError):
    """A database file that cannot be used; it is left as it is. `reason` ends in the way out."""

    def __init__(self, path: AnyPath, reason: str):
        super().__init__(path, reason)
        self.path = Path(path)
        self.reason = reason

    def __str__(self) -> str:
        return f"{self.path}: {self.reason}"


# --- the schema


class Evidence(msgspec.Struct, frozen=True, forbid_unknown_fields=True, omit_defaults=True):
    """Why a config is believed to be fast. Times are of one run, in microseconds.

    The objective says which times `median_us`, `spread_us`, `default_us` and `baseline_us` are. "burst": of single calls, each
    after a flush of the L2. "sustained": of calls without pause for a second and more, at the clock that the power cap leaves.
    """

    kind: Literal["measured", "modelled"]
    gpu: str  # the device's name: "NVIDIA H200"
    driver: str | None
    jax: str
    jaxlib: str
    cuda: str | None
    kernel_version: int  # OpSpec.version at that time
    median_us: Positive
    spread_us: NotNegative
    default_us: Positive | None  # the op's default config
    baseline: str | None  # what the op was compared with: "xla"
    baseline_us: Positive | None
    error: NotNegative | None  # against the op's reference
    trials: Annotated[int, msgspec.Meta(ge=1)]
    seed: int
    date: str  # "2025-01-31"
    samples_us: list[Positive] | None = None
    objective: Objective = "burst"
    burst_us: Positive | None = None  # of a sustained entry: single calls in the same run, and the baseline's
    baseline_burst_us: Positive | None = None
    clock_mhz: Positive | None = None  # of a sustained entry, as all that follow: the SMs' clock; None where NVML tells nothing
    watts: Positive | None = None
    joules: Positive | None = None  # of one call
    baseline_watts: Positive | None = None
    baseline_joules: Positive | None = None
    previous_us: Positive | None = None  # the config that was stored before, in the same run

    def __post_init__(self) -> None:
        try:
            date = datetime.date.fromisoformat(self.date).isoformat()
        except ValueError:
            date = None
        if date != self.date:
            raise ValueError(f"date={self.date!r} must be a date that reads like 2025-01-31")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config of one problem. A problem has at most one entry of each kind of evidence and objective."""

    problem: Fields
    config: Fields
    evidence: Evidence


class File(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """One database file."""

    schema: Annotated[int, msgspec.Meta(ge=1, le=SCHEMA)]
    gpu: str  # Gpu.key
    op: str
    entries: tuple[Entry, ...]


class _Header(msgspec.Struct):
    schema: int


# --- reading


def decode(data: bytes, *, path: AnyPath, gpu_key: str | None = None, op: str | None = None) -> File:
    """A database file from its bytes. Its `gpu` is the GPU's key, whichever of its names the data have.

    Raises DatabaseError, which names `path`, for bytes that are no such file, or not one of `gpu_key` and `op`, where given.
    """
    try:
        file = msgspec.json.decode(data, type=File)
        json.loads(data, object_pairs_hook=_once, parse_int=_in_64_bits)  # what msgspec lets pass
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        way_out = "restore it from a backup, or move it away and tune again"
        reason = _newer(data) or f"is corrupt: {error}: {way_out}"
        raise DatabaseError(path, reason) from None
    file = msgspec.structs.replace(file, gpu=key_of(file.gpu))
    for what, wanted, found in (("GPU", gpu_key and key_of(gpu_key), file.gpu), ("op", op, file.op)):
        if wanted not in (None, found):
            raise DatabaseError(path, f"is for {what} {found!r}, not {wanted!r}: move it to <gpu>/<op>.json")
    if len({_identity(entry) for entry in file.entries}) != len(file.entries):
        raise DatabaseError(path, "has two entries of one kind for one problem: delete one")
    return file


def _once(pairs: list[tuple[str, Any]]) -> None:
    """Refuses an object with a key twice: readers differ in which one counts."""
    names = [name for name, _ in pairs]
    if len(set(names)) != len(names):
        raise ValueError(f"key {next(name for name in names if names.count(name) > 1)!r} stands twice in one object")


def _in_64_bits(text: str) -> None:
    """Refuses a whole number that could not be written back."""
    if not -(2**63) <= int(text) < 2**64:
        raise ValueError(f"{text} has more than 64 bits")


def read(path: AnyPath, *, gpu_key: str | None = None, op: str | None = None) -> File:
    """The database file at `path`, as `decode` reads it; DatabaseError too where there is none."""
    return decode(read_bytes(path), path=path, gpu_key=gpu_key, op=op)


def _newer(data: bytes) -> str | None:
    """Why a file of a later release cannot be read; None for any other file."""
    try:
        schema = msgspec.json.decode(data, type=_Header).schema
    except (msgspec.DecodeError, ValueError, RecursionError):
        return None
    if schema <= SCHEMA:
        return None
    return (
        f"was written by a newer mgpu_ops (schema {schema}, this one reads {SCHEMA}): "
        "upgrade mgpu_ops, or set MGPU_OPS_CONFIG_DIR to another directory"
    )


def read_bytes(path: AnyPath) -> bytes:
    """What a file holds; DatabaseError where it cannot be read."""
    if os.path.isdir(path):
        raise DatabaseError(path, "is a folder: name a file, of several ops <gpu>/<op>.json in it")
    try:
        return regular_bytes(path, MAX_BYTES)
    except OSError as error:
        raise DatabaseError(path, f"cannot be read ({error}): name a readable file") from error


def regular_bytes(path: AnyPath, most: int) -> bytes:
    """What a regular file holds; OSError for one of more than `most` bytes, and at once for a pipe, a device or a socket."""
    if not stat.S_ISREG(os.stat(path).st_mode):  # opening some devices does something
        raise OSError("it is no regular file")
    with open(os.open(path, os.O_RDONLY | os.O_CLOEXEC | os.O_NONBLOCK), "rb") as stream:
        if not stat.S_ISREG(os.fstat(stream.fileno()).st_mode):
            raise OSError("it is no regular file")
        data = stream.read(most + 1)
    if len(data) > most:
        raise OSError(f"it has more than {most} bytes")
    return data


def to_problem(spec: OpSpec, fields: Mapping[str, Any]) -> Any:
    """`spec.Problem` of an entry; ValueError for a missing, unknown or wrongly typed field, and for a value no problem has."""
    return fit(spec.Problem, fields)


def to_config(spec: OpSpec, fields: Mapping[str, Any]) -> Any:
    """`spec.Config` of an entry; ValueError for a missing, unknown or wrongly typed field.

    A field with a default may be missing: the entry is older than the field (`OpSpec`).
    """
    return fit(spec.Config, fields, older=True)


def to_entry(problem: Problem, config: Config, evidence: Evidence) -> Entry:
    """The entry that stores an op's Problem and Config."""
    return Entry(dataclasses.asdict(problem), dataclasses.asdict(config), evidence)


def fit(cls: type, fields: Mapping[str, Any], *, older: bool = False) -> Any:
    """A frozen dataclass from its fields; ValueError for a missing, unknown or wrongly typed one.

    A field whose default says that there is nothing, False, "none" or 0, may be missing: entries may be older than the field.
    older: so may any other that has a default.
    """
    # msgspec ignores unknown fields of a dataclass and fills missing ones from their defaults.
    names = {field.name for field in dataclasses.fields(cls)}
    defaults = {field.name: field.default for field in dataclasses.fields(cls) if field.default is not dataclasses.MISSING}
    later = {name for name, default in defaults.items() if older or _is_nothing(default)}
    what = f"{cls.__name__.lower()} {dict(fields)}"
    if not names - later <= fields.keys() <= names:
        missing, unknown = sorted(names - later - fields.keys()), sorted(fields.keys() - names)
        faults = [f"lacks {missing}"] * bool(missing) + [f"has unknown {unknown}"] * bool(unknown)
        raise ValueError(f"{what} {' and '.join(faults)}: tune again")
    try:
        return msgspec.convert(dict(fields), cls)
    except msgspec.ValidationError as error:
        raise ValueError(f"{what}: {error}: tune again") from None


# --- writing


def encode(file: File) -> bytes:
    """One entry a line, sorted by problem, keys in a fixed order: a diff reads well."""
    head = msgspec.json.encode({"schema": file.schema, "gpu": file.gpu, "op": file.op})
    entries = merge((), file.entries)
    lines = (msgspec.json.encode(entry, order="deterministic") for entry in entries)
    return head[:-1] + b',"entries":[\n' + b",\n".join(lines) + b"\n]}\n"


def merge(old: Iterable[Entry], new: Iterable[Entry]) -> tuple[Entry, ...]:
    """All entries, sorted; a later one replaces an earlier one of its problem, kind and objective."""
    entries = {_identity(entry): entry for entries in (old, new) for entry in entries}
    return tuple(sorted(entries.values(), key=lambda e: (_ordered(e.problem), e.evidence.kind, e.evidence.objective)))


def key_of_fields(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    """A key that equal problems share; those of 1 and of True differ. Any two keys can be ordered.

    A field that says that there is nothing counts as one that is missing (`fit`).
    """
    return _ordered({name: value for name, value in fields.items() if not _is_nothing(value)})


def _ordered(fields: Mapping[str, Any]) -> tuple[Any, ...]:
    # A list first: a generator takes twice as long, and an update does this for every entry.
    return tuple([(k, type(v).__name__, v) for k, v in sorted(fields.items())])


def _is_nothing(value: Any) -> bool:
    """Whether a field's value says that a problem has none of it: no bias, no activation, no size of its own."""
    return value is False or value == "none" or (type(value) is int and value == 0)


def _identity(entry: Entry) -> tuple[Any, ...]:
    return key_of_fields(entry.problem), entry.evidence.kind, entry.evidence.objective


def update(path: AnyPath, entries: Iterable[Entry], *, gpu_key: str, op: str, join: Join = merge) -> File:
    """Merges entries into the file at `path`, under a lock between processes; the file then.

    `join(old, new)` says which entries stay: by default all, a new one in place of the old one of its problem, kind
    and objective.
    A reader, and the disk after a crash or kill -9, sees the old file or the new one, never a mix. The new one has the old
    one's mode, and its owner where the system permits.
    DatabaseError, with the old file in place, where an entry breaks the schema, the existing file
    is not one that `decode` takes, or the disk refuses.
    """
    path = Path(os.path.realpath(path))  # replace what a link points to, not the link
    new = _storable(File(SCHEMA, key_of(gpu_key), op, merge((), entries)), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            old = read(path, gpu_key=gpu_key, op=op).entries if path.exists() else ()
            file = msgspec.structs.replace(new, entries=tuple(join(old, new.entries)))
            _replace(path, encode(file))
    except OSError as error:
        raise DatabaseError(path, f"cannot be written ({error}): make room, {_elsewhere(path, gpu_key, op)}") from error
    return file


def require_writable(path: AnyPath, *, gpu_key: str, op: str) -> None:
    """DatabaseError where `update` could not write the file at `path`, or not read what is there: before there is an entry."""
    real = Path(os.path.realpath(path))
    fault = os.strerror(errno.EISDIR) if real.is_dir() else folder_fault(real.parent)
    if str(path).startswith("~"):
        fault = "there is no such home directory"
    if fault is not None:
        raise DatabaseError(path, f"cannot be written ({fault}): {_elsewhere(real, gpu_key, op)}")
    if real.exists():
        read(path, gpu_key=gpu_key, op=op)


def _elsewhere(path: Path, gpu_key: str, op: str) -> str:
    own = path == Path(os.path.realpath(user_path(gpu_key, op)))
    return f"permit it, or {'set MGPU_OPS_CONFIG_DIR to another directory' if own else 'name another file'}"


def _storable(file: File, path: Path) -> File:
    """The file, once its own bytes gave it back: what could not be read is never written."""
    try:
        back = decode(encode(file), path=path)
    except (TypeError, ValueError, OverflowError) as error:
        raise DatabaseError(path, f"is left as it is, a new entry is no entry: {error}") from None
    if back != file:  # NaN and infinity become null
        raise DatabaseError(path, "is left as it is, a new entry is not finite: measure again")
    return file


@contextlib.contextmanager
def _locked(path: Path) -> Iterator[None]:
    """Excludes other processes and threads. The system releases the lock when its process dies.

    The lock file stays: another process may be waiting for this very file.
    """
    descriptor = os.open(path, os.O_RDONLY | os.O_CREAT, 0o666)
    try:
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        yield
    finally:
        os.close(descriptor)


def _replace(path: Path, data: bytes) -> None:
    # One writer at a time, so one name will do, and what a killed writer left goes away here.
    temporary = path.with_name(f".{path.name}.tmp")
    temporary.unlink(missing_ok=True)
    old = path.stat() if path.exists() else None
    try:
        # Private until it is known who may read it.
        mode = 0o666 if old is None else 0o600
        with open(os.open(temporary, os.O_WRONLY | os.O_CREAT | os.O_EXCL | os.O_CLOEXEC, mode), "wb") as stream:
            if old is not None:
                _like(stream.fileno(), old)
            stream.write(data)
            stream.flush()
            os.fsync(stream.fileno())
        os.replace(temporary, path)
    except BaseException:
        temporary.unlink(missing_ok=True)
        raise
    directory = os.open(path.parent, os.O_RDONLY | os.O_DIRECTORY)
    try:
        os.fsync(directory)  # so that the new name lasts, too
    finally:
        os.close(directory)


def _like(file: int, old: os.stat_result) -> None:
    """Gives a file the owner, the group and the mode of another; where the group cannot be kept, it gets no rights."""
    mode = stat.S_IMODE(old.st_mode)
    new = os.fstat(file)
    if old.st_uid != new.st_uid:
        with contextlib.suppress(OSError):
            os.fchown(file, old.st_uid, -1)
    if old.st_gid != new.st_gid:
        try:
            os.fchown(file, -1, old.st_gid)
        except OSError:
            mode &= ~stat.S_IRWXG
    os.fchmod(file, mode)


# --- places


def user_path(gpu_key: str, op: str) -> Path:
    """The user's own file: in `MGPU_OPS_CONFIG_DIR`, or where the system keeps user data. ~ stays if there is no home."""
    root = os.environ.get("MGPU_OPS_CONFIG_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_data_dir("mgpu_ops", appauthor=False)
    return Path(os.path.expanduser(root)) / gpu_key / f"{op}.json"


def shipped_path(gpu_key: str, op: str) -> Path:
    """The file that comes with the package."""
    # Not from __file__, which may resolve to outside the package through a link.
    return Path(sys.modules["mgpu_ops"].__path__[0]) / "configs" / gpu_key / f"{op}.json"


class Location(NamedTuple):
    """Where entries of one GPU and op may lie."""

    gpu_key: str
    owner: Literal["user", "shipped"]
    path: Path


def files(gpu_keys: Iterable[str], op: str) -> list[Location]:
    """The files of an op, in order of precedence: of each GPU the user's, then the shipped one. Any of them may be missing."""
    return [
        location
        for key in gpu_keys
        for location in (Location(key, "user", user_path(key, op)), Location(key, "shipped", shipped_path(key, op)))
    ]


def existing_files(gpu_keys: Iterable[str], op: str) -> list[Location]:
    """Those of `files` that there are."""
    return [location for location in files(gpu_keys, op) if location.path.exists()]


# --- checking


def validate(path: AnyPath, spec: OpSpec | None) -> list[str]:
    """What is wrong with a database file, one line each; empty where all is well.

    With `spec` also whether `resolve` would use every entry (`check_entry`), and that its error is within the op's tolerance.
    """
    try:
        file = read(path, op=spec.name if spec else None)
        gpu = find(file.gpu)
    except DatabaseError as error:
        return [str(error)]
    except ValueError as error:
        return [f"{path}: {error}"]
    faults = ((entry, fault_of(entry, gpu, spec) or (spec and error_of(entry, spec))) for entry in file.entries)
    return [f"{path}: {title(entry)}: {fault}" for entry, fault in faults if fault]


class CheckedEntry(NamedTuple):
    """An entry as the op's own types, and why not to use it. Types are None if the entry does not fit the op as it is now."""

    problem: Problem | None
    config: Config | None
    fault: str | None


def check_entry(entry: Entry, gpu: Gpu, spec: OpSpec) -> CheckedEntry:
    """Checks an entry of a file of `gpu` by the rules of a call: a file may hold anything."""
    if stale := stale_kernel(entry, spec):
        return CheckedEntry(None, None, f"{stale}: tune again")
    try:
        problem, config = to_problem(spec, entry.problem), to_config(spec, entry.config)
    except ValueError as error:
        return CheckedEntry(None, None, str(error))
    if reason := spec.supports(problem, gpu):
        return CheckedEntry(None, None, reason)
    return CheckedEntry(problem, config, _of_another_gpu(entry, gpu) or spec.check(problem, config, gpu) or _slow(entry))


def fault_of(entry: Entry, gpu: Gpu, spec: OpSpec | None) -> str | None:
    """Why `resolve` would not use an entry of a file of `gpu`, or None."""
    return _of_another_gpu(entry, gpu) if spec is None else check_entry(entry, gpu, spec).fault


def error_of(entry: Entry, spec: OpSpec) -> str | None:
    """Why an entry's result was not right, or None; of an entry without a fault."""
    error, limit = entry.evidence.error, spec.tolerance(to_problem(spec, entry.problem))
    if error is None or error <= limit:
        return None
    return f"error {error:.3g} is above {limit:.3g}, the tolerance of {spec.name}: tune again"


def _of_another_gpu(entry: Entry, gpu: Gpu) -> str | None:
    if entry.evidence.gpu in gpu.kinds:
        return None
    return f"evidence of {entry.evidence.gpu!r} in a file of {gpu.name}: tune on that GPU"


def _slow(entry: Entry) -> str | None:
    e = entry.evidence
    if e.default_us is None or e.median_us <= e.default_us:
        return None
    return f"{e.median_us:.4g} us are more than the {e.default_us:.4g} us of the default config in the same run: tune again"


def stale(entry: Entry, spec: OpSpec) -> str | None:
    """Why an entry is out of date: it was tuned with another kernel version, or another jax, than those of now."""
    reason = stale_kernel(entry, spec)
    if reason is None and entry.evidence.jax != jax.__version__:
        reason = f"tuned with jax {entry.evidence.jax}, not {jax.__version__}"
    return reason


def stale_kernel(entry: Entry, spec: OpSpec) -> str | None:
    """Why an entry does not fit the kernel of now: its config may mean something else."""
    version = entry.evidence.kernel_version
    return None if version == spec.version else f"for kernel version {version}, not {spec.version}"


def title(entry: Entry) -> str:
    return f"{kind(entry)} {entry.problem}"


def kind(entry: Entry) -> str:
    """ "measured", "modelled" or "measured sustained"."""
    evidence = entry.evidence
    return evidence.kind if evidence.objective == "burst" else f"{evidence.kind} {evidence.objective}"
