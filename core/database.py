"""The config database: one JSON file `<gpu key>/<op>.json` per GPU and op, data only.

Where a config comes from; the first that answers wins (`resolve`):

1. Explicit: `argument`, `override` (`use_configs`), `environment` (`MGPU_OPS_CONFIG_PATH`). What
   cannot be read or cannot run raises.
2. Stored for exactly this problem: `user`, `shipped`, `family` (the user's and the shipped files of
   other GPUs with the same architecture and SM count). Every measured entry comes before every
   modelled one, whichever file it is in: a modelled entry never hides a measured one.
3. `near`: the entry of those files for the nearest other problem, again measured before modelled, unless the op's model
   puts its config behind the default for this problem.
4. `default`: the op's analytic choice.

In a job of several processes (`jax.distributed.initialize`), whose machines may have other files, the first process to resolve
a problem from files or by default decides for all of them and for as long as the job lasts: the others' source is `job`.

In 2 and 3 an entry that fails the op's `check` or is for another kernel version is passed over, and
a file that cannot be read is passed over with one warning.

This happens while JAX traces. `use_configs` is part of jit's trace key; a file or an environment
variable that changes later does not retrace a function that is already traced.
"""

from __future__ import annotations

import contextlib
import dataclasses
import datetime
import fcntl
import functools
import json
import logging
import os
import sys
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Annotated, Any, Literal, NamedTuple

import jax
import msgspec

from mgpu_ops.core import job
from mgpu_ops.core.gpu import Gpu, family, find

if TYPE_CHECKING:
    from mgpu_ops.core.op import OpSpec

SCHEMA = 1
NEAR_SLACK = 1.05  # a near entry's config may be modelled this much slower than the default: the model is no better than that

AnyPath = str | os.PathLike[str]
Fields = dict[str, int | str | bool]
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
    """Why a config is believed to be fast. Times are of one run, in microseconds."""

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

    def __post_init__(self) -> None:
        try:
            date = datetime.date.fromisoformat(self.date).isoformat()
        except ValueError:
            date = None
        if date != self.date:
            raise ValueError(f"date={self.date!r} must be a date that reads like 2025-01-31")


class Entry(msgspec.Struct, frozen=True, forbid_unknown_fields=True):
    """The config of one problem. A problem has at most one entry of each kind of evidence."""

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


def json_schema() -> dict[str, Any]:
    """The JSON schema of a database file."""
    return msgspec.json.schema(File)


# --- reading


def decode(data: bytes, *, path: AnyPath, gpu_key: str | None = None, op: str | None = None) -> File:
    """The file in `data`, for `gpu_key` and `op` where given; else DatabaseError naming `path`."""
    try:
        file = msgspec.json.decode(data, type=File)
        json.loads(data, object_pairs_hook=_once, parse_int=_in_64_bits)  # what msgspec lets pass
    except (msgspec.DecodeError, ValueError, RecursionError) as error:
        way_out = "restore it from a backup, or move it away and tune again"
        reason = _newer(data) or f"is corrupt: {error}: {way_out}"
        raise DatabaseError(path, reason) from None
    for what, wanted, found in (("GPU", gpu_key, file.gpu), ("op", op, file.op)):
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
    return decode(_bytes(path), path=path, gpu_key=gpu_key, op=op)


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


def _bytes(path: AnyPath) -> bytes:
    try:
        return Path(path).read_bytes()
    except OSError as error:
        raise DatabaseError(path, f"cannot be read ({error}): name a readable file") from error


def to_problem(spec: OpSpec, fields: Mapping[str, Any]) -> Any:
    """`spec.Problem` of an entry; ValueError for a missing, unknown or wrongly typed field."""
    return _fit(spec.Problem, fields)


def to_config(spec: OpSpec, fields: Mapping[str, Any]) -> Any:
    """`spec.Config` of an entry; ValueError for a missing, unknown or wrongly typed field."""
    return _fit(spec.Config, fields)


def to_entry(problem: Any, config: Any, evidence: Evidence) -> Entry:
    """The entry that stores an op's Problem and Config."""
    return Entry(dataclasses.asdict(problem), dataclasses.asdict(config), evidence)


def _fit(cls: type, fields: Mapping[str, Any]) -> Any:
    # msgspec ignores unknown fields of a dataclass and fills missing ones from their defaults.
    names = {field.name for field in dataclasses.fields(cls)}
    what = f"{cls.__name__.lower()} {dict(fields)}"
    if names != fields.keys():
        missing, unknown = sorted(names - fields.keys()), sorted(fields.keys() - names)
        raise ValueError(f"{what} lacks {missing} and has unknown {unknown}: tune again")
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
    """All entries, sorted; a later one replaces an earlier one of its problem and kind."""
    entries = {_identity(entry): entry for entries in (old, new) for entry in entries}
    return tuple(entries[identity] for identity in sorted(entries))


def _identity(entry: Entry) -> tuple[Any, ...]:
    # The type's name keeps 1 and True apart and lets any two identities be ordered.
    # A list first: a generator takes twice as long, and an update does this for every entry.
    fields = [(k, type(v).__name__, v) for k, v in sorted(entry.problem.items())]
    return tuple(fields), entry.evidence.kind


def update(path: AnyPath, entries: Iterable[Entry], *, gpu_key: str, op: str, join: Join = merge) -> File:
    """Merges entries into the file at `path`, under a lock between processes; the file then.

    `join(old, new)` says which entries stay: by default all, a new one in place of the old one of its problem and kind.
    A reader, and the disk after a crash or kill -9, sees the old file or the new one, never a mix.
    DatabaseError, with the old file in place, where an entry breaks the schema, the existing file
    is not one that `decode` takes, or the disk refuses.
    """
    path = Path(os.path.realpath(path))  # replace what a link points to, not the link
    new = _storable(File(SCHEMA, gpu_key, op, merge((), entries)), path)
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
        with _locked(path.with_name(f".{path.name}.lock")):
            old = read(path, gpu_key=gpu_key, op=op).entries if path.exists() else ()
            file = msgspec.structs.replace(new, entries=tuple(join(old, new.entries)))
            _replace(path, encode(file))
    except OSError as error:
        way_out = "make room or permit it, or set MGPU_OPS_CONFIG_DIR to another directory"
        raise DatabaseError(path, f"cannot be written ({error}): {way_out}") from error
    return file


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
    """Excludes other processes and threads; the kernel lets go when the holder dies.

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
    try:
        with open(temporary, "xb") as stream:
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


# --- places


def user_path(gpu_key: str, op: str) -> Path:
    """The user's own file: in `MGPU_OPS_CONFIG_DIR`, or where the system keeps user data."""
    root = os.environ.get("MGPU_OPS_CONFIG_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_data_dir("mgpu_ops", appauthor=False)
    return Path(root).expanduser() / gpu_key / f"{op}.json"


def shipped_path(gpu_key: str, op: str) -> Path:
    """The file that comes with the package."""
    # Not from __file__, which may resolve to outside the package through a link.
    return Path(sys.modules["mgpu_ops"].__path__[0]) / "configs" / gpu_key / f"{op}.json"


def _environment_paths(gpu_key: str, op: str) -> Iterator[Path]:
    """What MGPU_OPS_CONFIG_PATH names: files, or directories that may hold <gpu key>/<op>.json."""
    for part in filter(None, os.environ.get("MGPU_OPS_CONFIG_PATH", "").split(os.pathsep)):
        path = Path(part).expanduser()
        if not path.exists():
            raise DatabaseError(path, "does not exist: correct or unset MGPU_OPS_CONFIG_PATH")
        if not path.is_dir():
            yield path
        elif (inside := path / gpu_key / f"{op}.json").exists():
            yield inside


def _behind(query: _Query, config: Any) -> str | None:
    """Why a config that was fast for a near problem is not to be trusted for this one: the op's model prefers the default.

    Half the rows can turn one full wave of tiles into half a wave; the nearest measurement does not know that, the model does.
    """
    spec, problem, gpu, _ = query
    ours, default = (spec.cost(problem, c, gpu) for c in (config, spec.default(problem, gpu)))
    if ours <= NEAR_SLACK * default:
        return None
    return f"modelled at {ours * 1e6:.1f} us here, the default at {default * 1e6:.1f} us"


def _stored_paths(gpu: Gpu, op: str) -> Iterator[tuple[str, str, Path]]:
    """(source, GPU's key, path) of every file that may hold a config, in order of precedence."""
    yield "user", gpu.key, user_path(gpu.key, op)
    yield "shipped", gpu.key, shipped_path(gpu.key, op)
    for other in family(gpu):
        yield "family", other.key, user_path(other.key, op)
        yield "family", other.key, shipped_path(other.key, op)


# --- overrides


class _Snapshot(NamedTuple):
    """A database file as it was when `use_configs` was entered: hashable, for jit's trace key."""

    path: Path
    data: bytes


# Layers, innermost first; each a tuple of (op, Config | ((Problem, Config), ...) | _Snapshot).
_overrides: Any = jax.make_user_context(default_value=None)


@contextlib.contextmanager
def use_configs(configs: Mapping[str, Any] | AnyPath) -> Iterator[None]:
    """Uses `configs` inside a `with`, in this thread; the innermost block that has one wins.

    `configs` maps an op's name to a Config, for every problem, or to a list of (Problem, Config);
    or it is the path of a database file, read once here. A jitted function is traced again where
    the configs differ. A backward pass that JAX traces after the block does not see them.
    TypeError for anything else; a config that cannot run raises at the call.
    """
    layer = _layer(configs)
    with _overrides((layer, *(_overrides.value or ()))):
        yield


def _layer(configs: Mapping[str, Any] | AnyPath) -> tuple[tuple[str, Any], ...]:
    if isinstance(configs, str | os.PathLike):
        snapshot = _Snapshot(Path(configs), _bytes(configs))
        return ((decode(snapshot.data, path=configs).op, snapshot),)
    if isinstance(configs, Mapping):
        return tuple((op, _frozen(op, configs[op])) for op in sorted(configs))
    raise TypeError(f"use_configs takes {{op: config}} or a path, not {configs!r}")


def _frozen(op: str, answer: Any) -> Any:
    if dataclasses.is_dataclass(answer):
        return answer
    pairs = [p for p in answer if _is_pair(p)] if isinstance(answer, Sequence) else []
    if not pairs or len(pairs) != len(answer):
        raise TypeError(f"use_configs: {op} takes a Config or [(Problem, Config)], not {answer!r}")
    return tuple(map(tuple, pairs))


def _is_pair(pair: Any) -> bool:
    return isinstance(pair, Sequence) and len(pair) == 2 and all(map(dataclasses.is_dataclass, pair))


# --- resolution


@dataclasses.dataclass(frozen=True)
class Resolution:
    """Which config a call uses, and why."""

    config: Any
    source: str  # argument, override, environment, user, shipped, family, near, default or job
    path: Path | None = None  # the file it came from
    entry: Entry | None = None
    distance: float | None = None  # of a `near` entry's problem
    tried: tuple[tuple[str, str], ...] = ()  # (source, what was found or why it was passed over)


class _Query(NamedTuple):
    spec: OpSpec
    problem: Any
    gpu: Gpu
    tried: list[tuple[str, str]]

    def note(self, source: str, what: str) -> None:
        self.tried.append((source, what))


class _Row(NamedTuple):
    """An entry in the op's own types; problem and config are None for another kernel version's."""

    path: Path
    entry: Entry
    problem: Any
    config: Any


_logged: set[tuple[Any, ...]] = set()
_warned: set[str] = set()


def resolve(spec: OpSpec, problem: Any, gpu: Gpu, config: Any = None) -> Resolution:
    """The config for a problem on a GPU, by the order at the top of this module.

    Logs a choice once, at INFO to the logger "mgpu_ops", unless it is the `config` given.
    Where an explicit source is wrong: ValueError (DatabaseError for its file), or TypeError if it
    holds something else than a `spec.Config`.
    """
    result = _resolve(spec, problem, gpu, config)
    key = (spec.name, problem, gpu.key, result.source, result.config)
    if result.source != "argument" and key not in _logged:
        _logged.add(key)
        logging.getLogger("mgpu_ops").info(
            "%s %s on %s: %s from %s", spec.name, problem, gpu.key, result.config, _place(result)
        )
    return result


def _resolve(spec: OpSpec, problem: Any, gpu: Gpu, config: Any) -> Resolution:
    query = _Query(spec, problem, gpu, [])
    said = _argument(query, config) or _override(query)  # by the program, which is the same in every process
    found = said or _environment(query)
    if found is not None:
        _require(query, found)
    else:
        found = _stored(query) or Resolution(spec.default(problem, gpu), "default")
    found = said or _agreed(query, found)
    return dataclasses.replace(found, tried=tuple(query.tried))


def _agreed(query: _Query, found: Resolution) -> Resolution:
    """What the first process of the job to ask found; files may differ between machines."""
    spec, problem, gpu, _ = query
    if job.size() == 1:
        return found
    fields, mine = (msgspec.json.encode(dataclasses.asdict(x)).decode() for x in (problem, found.config))
    first = job.first(f"config/{gpu.key}/{spec.name}/{spec.version}/{fields}", mine)
    if first == mine:
        return found
    query.note("job", f"another process of this job chose first; here it would be {found.config} from {_place(found)}")
    agreed = Resolution(to_config(spec, msgspec.json.decode(first)), "job")
    _require(query, agreed)
    return agreed


def _argument(query: _Query, config: Any) -> Resolution | None:
    if config is not None:
        return Resolution(config, "argument")
    query.note("argument", "no config= was given")
    return None


def _override(query: _Query) -> Resolution | None:
    layers = _overrides.value or ()
    for answer in (answer for layer in layers for op, answer in layer if op == query.spec.name):
        if isinstance(answer, _Snapshot):
            if found := _exact(query, "override", answer.path, answer.data):
                return found
            continue
        config = dict(answer).get(query.problem) if isinstance(answer, tuple) else answer
        if config is not None:
            return Resolution(config, "override")
    query.note("override", "no use_configs has one for this problem")
    return None


def _environment(query: _Query) -> Resolution | None:
    what = "MGPU_OPS_CONFIG_PATH names no file for this GPU and op"
    for path in _environment_paths(query.gpu.key, query.spec.name):
        data = _bytes(path)
        if decode(data, path=path).op != query.spec.name:  # the paths may name one file per op
            continue
        if found := _exact(query, "environment", path, data):
            return found
        what = f"{path}: no entry for this problem"
    query.note("environment", what)
    return None


def _exact(query: _Query, source: str, path: Path, data: bytes) -> Resolution | None:
    """The answer of a file named explicitly; raises if it is for another kernel version only."""
    fields = dataclasses.asdict(query.problem)
    rows = _rows(query.spec, query.gpu.key, path, data)
    matches = [row for row in rows if row.entry.problem == fields]
    if not matches:
        return None
    row = min(matches, key=lambda r: (r.config is None, r.entry.evidence.kind == "modelled"))
    if row.config is None:
        raise DatabaseError(path, f"{fields}: {_stale(row.entry, query.spec)}: tune again")
    return Resolution(row.config, source, path, row.entry)


def _require(query: _Query, found: Resolution) -> None:
    """Raises for an explicit config that cannot run."""
    spec, problem, gpu, _ = query
    what = f"{spec.name}: {found.config} from {_place(found)}"
    if not isinstance(found.config, spec.Config):
        raise TypeError(f"{what} must be a {spec.Config.__module__}.{spec.Config.__qualname__}")
    reason = spec.check(problem, found.config, gpu)
    if reason is not None:
        raise ValueError(f"{what} cannot run {problem} on {gpu.key}: {reason}")


def _stored(query: _Query) -> Resolution | None:
    """The best entry of the user's, the shipped and the family's files that can run."""
    spec, problem, gpu, _ = query
    fields = dataclasses.asdict(problem)
    ranked = []
    for level, (source, gpu_key, path) in enumerate(_stored_paths(gpu, spec.name)):
        for row in _stored_rows(query, source, gpu_key, path):
            modelled = row.entry.evidence.kind == "modelled"
            if row.entry.problem == fields:
                ranked.append(((False, modelled, 0.0, level), source, row))
            elif row.problem is not None:
                distance = spec.distance(problem, row.problem)
                if distance is not None:
                    ranked.append(((True, modelled, distance, level), "near", row))

    failed = 0
    for (near, _, distance, _), source, row in sorted(ranked, key=lambda candidate: candidate[0]):
        reason = (
            _stale(row.entry, spec) or spec.check(problem, row.config, gpu) or (near and _behind(query, row.config)) or None
        )
        if reason is None:
            return Resolution(row.config, source, row.path, row.entry, distance if near else None)
        failed += near
        if failed <= 3:  # enough to see why
            query.note(source, f"{row.path}: {_title(row.entry)} passed over: {reason}")
    query.note("near", f"none of {failed} entries for comparable problems can run this one")
    return None


def _stored_rows(query: _Query, source: str, gpu_key: str, path: Path) -> tuple[_Row, ...]:
    """The rows of a file that nobody named: it may be missing, and if it is broken one warns."""
    try:
        rows = _rows(query.spec, gpu_key, path, _bytes(path))
    except DatabaseError as error:
        if not isinstance(error.__cause__, FileNotFoundError):
            query.note(source, f"passed over: {error}")
            _warn_once(f"{error}. mgpu_ops goes on without this file.")
        elif source != "family":
            query.note(source, f"{path}: no such file")
        return ()
    fields = dataclasses.asdict(query.problem)
    kinds = [row.entry.evidence.kind for row in rows if row.entry.problem == fields]
    what = f"{path}: {len(rows)} entries, {' and '.join(kinds) or 'none'} for this problem"
    query.note(source, what)
    return rows


def _warn_once(message: str) -> None:
    if message not in _warned:
        _warned.add(message)
        warnings.warn(message, stacklevel=2)


def stale(entry: Entry, spec: OpSpec) -> str | None:
    """Why an entry is of another time: it was found with another kernel, or another jax, than there are now."""
    reason = _stale(entry, spec)
    if reason is None and entry.evidence.jax != jax.__version__:
        reason = f"tuned with jax {entry.evidence.jax}, not {jax.__version__}"
    return reason


def _stale(entry: Entry, spec: OpSpec) -> str | None:
    version = entry.evidence.kernel_version
    return None if version == spec.version else f"for kernel version {version}, not {spec.version}"


def _rows(spec: OpSpec, gpu_key: str, path: Path, data: bytes) -> tuple[_Row, ...]:
    return _parsed(data, path, gpu_key, spec.name, spec.version, spec.Problem, spec.Config)


# Keyed by content: a changed file is always noticed, and a trace costs one read and one hash.
@functools.lru_cache(maxsize=64)
def _parsed(data: bytes, path: Path, gpu_key: str, op: str, version: int, problem: type, config: type) -> tuple[_Row, ...]:
    def row(entry: Entry) -> _Row:
        if entry.evidence.kernel_version != version:  # its fields may have been others
            return _Row(path, entry, None, None)
        try:
            return _Row(path, entry, _fit(problem, entry.problem), _fit(config, entry.config))
        except ValueError as error:
            raise DatabaseError(path, str(error)) from None

    return tuple(map(row, decode(data, path=path, gpu_key=gpu_key, op=op).entries))


# --- telling and checking


def explain(spec: OpSpec, problem: Any, gpu: Gpu, config: Any = None) -> str:
    """What `resolve` chooses, on what evidence, and what it looked at: text of several lines."""
    result = _resolve(spec, problem, gpu, config)
    lines = [
        f"{spec.name} {problem} on {gpu.key}",
        f"  config    {result.config}",
        f"  from      {_place(result)}",
    ]
    if result.entry is not None:
        lines.append(f"  evidence  {_summary(result.entry.evidence)}")
    return "\n".join([*lines, "  tried", *(f"    {s}: {what}" for s, what in result.tried)])


def _place(result: Resolution) -> str:
    """ "near, distance 0.5: measured {'m': 64} of /path"."""
    text = result.source
    if result.distance is not None:
        text += f", distance {result.distance:.3g}"
    if result.entry is not None:
        text += f": {_title(result.entry)} of {result.path}"
    return text


def _title(entry: Entry) -> str:
    return f"{entry.evidence.kind} {entry.problem}"


def _summary(e: Evidence) -> str:
    parts = [f"{e.kind} {e.median_us:.4g} us, spread {e.spread_us:.2g} us, on {e.gpu}"]
    for name, time in (("the default", e.default_us), (e.baseline, e.baseline_us)):
        if time is not None:
            parts.append(f"{time / e.median_us:.3g}x as fast as {name} ({time:.4g} us)")
    if e.error is not None:
        parts.append(f"error {e.error:.2g}")
    parts.append(f"{e.trials} trials on {e.date}, jax {e.jax}, kernel version {e.kernel_version}")
    return "; ".join(parts)


def validate(path: AnyPath, spec: OpSpec | None) -> list[str]:
    """What is wrong with a database file, one line each; empty where all is well.

    With `spec` also whether `resolve` would use every entry: its kernel version, its fields, and
    that its config passes the op's `check` on the file's GPU.
    """
    try:
        file = read(path, op=spec.name if spec else None)
        gpu = find(file.gpu)
    except DatabaseError as error:
        return [str(error)]
    except ValueError as error:
        return [f"{path}: {error}"]
    faults = ((entry, fault_of(entry, gpu, spec)) for entry in file.entries)
    return [f"{path}: {_title(entry)}: {fault}" for entry, fault in faults if fault]


def fault_of(entry: Entry, gpu: Gpu, spec: OpSpec | None) -> str | None:
    """Why `resolve` would not use an entry of a file of `gpu`, or None."""
    if entry.evidence.gpu not in gpu.kinds:
        return f"evidence of {entry.evidence.gpu!r} in a file of {gpu.name}: tune on that GPU"
    if spec is None:
        return None
    if stale := _stale(entry, spec):
        return f"{stale}: tune again"
    try:
        return spec.check(to_problem(spec, entry.problem), to_config(spec, entry.config), gpu)
    except ValueError as error:
        return str(error)
