"""Where studies are kept: a journal file, a database that a fleet shares, or a gRPC proxy in front of one.

What is read is data. Of optuna's code only the Redis journal and the CMA-ES sampler unpickle what they read, and
neither is used here. A password is never part of a message: `redact` takes it out, and errors come as StorageError with
their cause cut off.
"""

from __future__ import annotations

import contextlib
import dataclasses
import fcntl
import hashlib
import json
import os
import re
import time
import traceback
import urllib.parse
import warnings
from collections.abc import Iterator, Mapping
from pathlib import Path
from typing import Any

import optuna
from optuna.storages.journal import JournalFileBackend

from mgpu_ops.core import extras
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import OpSpec, Problem

VARIABLE = "MGPU_OPS_STORAGE"
HEARTBEAT = 10  # seconds between the signs of life of a process that measures for a database
GRACE = 60  # seconds without one after which it counts as dead
RETRIES = 2  # times that a candidate whose process died is tried again; then it is left alone
DRIVERS = {  # by the URL's scheme: SQLAlchemy's, and the extra that brings it
    "postgresql": ("postgresql+psycopg", "postgresql"),
    "postgres": ("postgresql+psycopg", "postgresql"),  # as many services write it
    "mysql": ("mysql+pymysql", "mysql"),
}

_NEEDED = "name a journal file, postgresql://USER@HOST/NAME, mysql://USER@HOST/NAME or grpc://HOST:PORT"
_URL = re.compile(r"\w[\w+.-]*://")
_MISSPELT = re.compile(r"\b(?:postgres|mysql|grpc)[\w+.-]*:", re.IGNORECASE)  # such as postgresql:/tuner:password@host
_SECRET = re.compile(r"pass|pwd|secret|token|credential", re.IGNORECASE)  # in the name of an option


# What optuna raises for what it did not write.
_OF_CORRUPT = (ValueError, TypeError, AttributeError, IndexError, AssertionError)
_FIRST = b'{"op_code"'  # how a journal begins


class StorageError(ValueError):
    """A storage that cannot be used; the message holds no password and ends in the way out."""


# --- passwords


def redact(text: str) -> str:
    """A URL, or a text that ends in one, as SQLAlchemy reads it and without its password; all of a URL where that is in doubt.

    What holds none stays as it is.
    """
    found = _URL.search(text)
    if found is None:
        return "***" if _MISSPELT.search(text) and "@" in text else text
    start, url = text[: found.start()], text[found.start() :]
    parsed = _parsed(url)
    if parsed is None:
        return f"{start}{found[0]}***"
    if parsed.password is None and not _hides(url):
        return text
    options = "?***" if parsed.query else ""
    return start + parsed.set(query={}).render_as_string(hide_password=True) + options


def has_password(where: str) -> bool:
    plain = _decoded(where.partition("://")[2] or where)
    return redact(where) != where and (_SECRET.search(plain) is not None or re.search(":.*@", plain, re.DOTALL) is not None)


def _parsed(url: str) -> Any:
    """SQLAlchemy's URL; None where it is none, or where a piece of a password may pass for a name, a host or an option."""
    import sqlalchemy

    try:
        parsed = sqlalchemy.engine.make_url(url)
    except (ValueError, sqlalchemy.exc.ArgumentError):
        return None
    after = url.partition("://")[2]
    if parsed.password is None:
        doubtful = after.count("@") > 1 or not url.isprintable()
    else:  # it ends at the first @ behind a colon
        doubtful = "@" in after.partition(":")[2].partition("@")[2]
    names = _decoded(f"{parsed.host}/{parsed.database}")
    doubtful |= ":" in _decoded(parsed.username or "") or ("=" in names and _SECRET.search(names) is not None)
    return None if doubtful else parsed


def _hides(url: str) -> bool:
    """Whether a password may be among the options of a URL."""
    return _SECRET.search(_decoded(url.partition("?")[2])) is not None


def _secrets(where: str) -> set[str]:
    """What is a password in a URL that `_parsed` reads, or may be one."""
    parsed = _parsed(where)
    if parsed is None:
        return set()
    options = where.partition("?")[2].split("&") if _hides(where) else []
    return {secret for secret in (str(parsed.password or ""), *(o.partition("=")[2] or o for o in options)) if secret}


def _decoded(text: str) -> str:
    """Without escapes, nor escapes of escapes."""
    while (plain := urllib.parse.unquote_plus(text)) != text:
        text = plain
    return text


def _clean(error: BaseException, where: str) -> str:
    """The first line of what caused an error; nothing of it where it holds the password of `where`, however it is written."""
    while error.__cause__ is not None:  # optuna's and SQLAlchemy's words for it tell less
        error = error.__cause__
    text = str(error).strip().partition("\n")[0]
    for secret in _secrets(where):
        if secret in text or _decoded(secret) in _decoded(text) or repr(secret)[1:-1] in text:
            return f"{type(error).__name__}, whose message is not shown: it holds the password"
    return redact(text) or type(error).__name__


# --- opening


def open_storage(where: str | os.PathLike[str], heartbeat: int = HEARTBEAT, grace: int = GRACE) -> optuna.storages.BaseStorage:
    """The storage that a path or URL names. Raises StorageError where it cannot be opened.

    Args:
      where: path of a journal file, for the processes of one machine; `postgresql://` or `mysql://` URL; `grpc://host:port` of
        `mgpu-tune proxy`. A PostgreSQL password may stay in ~/.pgpass or $PGPASSWORD.
      heartbeat, grace: seconds, of a database.
    """
    where = os.fspath(where)
    scheme = where.partition("://")[0] if "://" in where else ""
    if not scheme and _MISSPELT.match(where.lstrip()):
        raise StorageError(f"{redact(where)} is no storage: {_NEEDED}")
    optuna.logging.set_verbosity(optuna.logging.WARNING)
    with as_storage_errors(where):
        if not scheme:
            return _journal(Path(os.path.expanduser(where)))
        if scheme == "grpc":
            return _grpc(where)
        if scheme.partition("+")[0] in DRIVERS:
            return _database(where, heartbeat, grace)
        raise StorageError(f"{redact(where)} is no storage: {_NEEDED}")


@contextlib.contextmanager
def opened(where: str | os.PathLike[str], **options: int) -> Iterator[optuna.storages.BaseStorage]:
    """The storage of `open_storage`, closed in the end. Its errors inside are raised `as_storage_errors`."""
    with as_storage_errors(os.fspath(where)):
        backend = open_storage(where, **options)
        try:
            yield backend
        finally:
            inner = getattr(backend, "_backend", None)  # of optuna's cache
            if isinstance(inner, optuna.storages.RDBStorage):
                inner.scoped_session.remove()
                inner.engine.dispose()
            elif isinstance(backend, optuna.storages.GrpcStorageProxy):
                backend.close()


@contextlib.contextmanager
def as_storage_errors(where: str) -> Iterator[None]:
    """Raises errors of a storage as StorageError, without password, and without the chain of causes, which may hold one."""
    try:
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)  # heartbeats, retries, the proxy
            yield
    except StorageError:
        raise
    except Exception as error:
        if of_storage(error):
            raise StorageError(f"storage {redact(where)}: {_clean(error, where)}") from None
        if isinstance(error, _OF_CORRUPT) and _within_optuna(error):
            raise StorageError(_corrupt(where, error)) from None
        raise


def of_storage(error: BaseException) -> bool:
    """Whether an error is the storage's own, and neither a bug of ours nor, say, a full disk elsewhere."""
    if type(error).__module__.startswith(("sqlalchemy", "psycopg", "pymysql", "grpc", "optuna")):
        return True
    # KeyError: the study was deleted meanwhile
    return isinstance(error, OSError | ImportError | KeyError) and _within_optuna(error)


def _within_optuna(error: BaseException) -> bool:
    """Whether an error was raised while a storage did what it was asked for."""
    frames = traceback.walk_tb(error.__traceback__)
    return any(frame.f_globals["__name__"].startswith("optuna.storages") for frame, _ in frames)


def _corrupt(where: str, error: BaseException) -> str:
    what = f"{redact(where)} is no journal of optuna, or is corrupt ({type(error).__name__}: {_clean(error, where)[:200]})"
    return f"{what}: move it away, or name another with --storage"


def _journal(path: Path) -> optuna.storages.BaseStorage:
    try:
        path.parent.mkdir(parents=True, exist_ok=True)
    except OSError as error:
        raise StorageError(f"{path}: its folder cannot be made ({error.strerror}): name another file with --storage") from None
    if path.exists() and not path.is_file():  # reading a pipe would wait for a writer
        raise StorageError(f"{path}: is no regular file: name another with --storage")
    backend = JournalFileBackend(str(path), lock_obj=_JournalLock(path))  # type: ignore[arg-type]  # its base is private
    try:
        opened = optuna.storages.JournalStorage(backend)
        _check_beginning(path)  # optuna passes over a last line that it cannot read, which may be the only one
        for study in opened.get_all_studies():
            trials = opened.get_all_trials(study._study_id, deepcopy=False)
            attributes = [study.user_attrs, *(attrs for t in trials for attrs in (t.user_attrs, t.system_attrs))]
            if not isinstance(study.study_name, str) or not all(isinstance(attrs, dict) for attrs in attributes):
                raise ValueError(f"a study named {study.study_name!r} has a name or attributes that are none")
    except (*_OF_CORRUPT, KeyError) as error:
        raise StorageError(_corrupt(str(path), error)) from None
    return opened


def _check_beginning(path: Path) -> None:
    with path.open("rb") as file:
        first = file.read(len(_FIRST))
    if first not in (b"", _FIRST):
        raise ValueError(f"it begins with {first!r}, a journal with {_FIRST!r}")


class _JournalLock:
    """Lets one process at a time append to a journal file, and cuts off a line that a killed process left unfinished.

    flock is let go by the kernel when its holder dies; optuna's own lock would make the next process wait for 30 s.
    """

    def __init__(self, path: Path):
        self._path = path
        self._descriptor: int | None = None

    def acquire(self) -> bool:
        descriptor = os.open(self._path, os.O_RDWR)
        fcntl.flock(descriptor, fcntl.LOCK_EX)
        _cut_unfinished_line(descriptor)
        self._descriptor = descriptor
        return True

    def release(self) -> None:
        if self._descriptor is not None:
            os.close(self._descriptor)
            self._descriptor = None


def _cut_unfinished_line(file: int) -> None:
    end = size = os.fstat(file).st_size
    while end > 0:
        start = max(0, end - 4096)
        newline = os.pread(file, end - start, start).rfind(b"\n")
        end = start if newline < 0 else start + newline + 1
        if newline >= 0:
            break
    if end < size:
        os.ftruncate(file, end)


def _database(url: str, heartbeat: int, grace: int) -> optuna.storages.BaseStorage:
    scheme, _, rest = url.partition("://")
    driver, extra = DRIVERS[scheme.partition("+")[0]]
    password = rest.rpartition("@")[0].partition(":")[2]
    if re.search(r"[@/#?\[\]\s]", password):  # else its pieces pass for a host or a name, and turn up in messages
        escapes = "@ / # ? [ ] of the password as %40 %2F %23 %3F %5B %5D, a blank as %20"
        raise StorageError(f"{redact(url)}: write {escapes}")
    if _parsed(url) is None:
        raise StorageError(f"{redact(url)} is no address of a database: {_NEEDED}")
    url = url if "+" in scheme else f"{driver}://{rest}"
    try:
        # with optuna's cache of what is finished
        return optuna.storages.get_storage(_made(url, heartbeat, grace))
    except ImportError:
        raise StorageError(f"{scheme}:// needs its driver: {extras.install(extra)}") from None


def _made(url: str, heartbeat: int, grace: int) -> optuna.storages.RDBStorage:
    import sqlalchemy.exc

    for attempt in (1, 2, 3):
        try:
            return optuna.storages.RDBStorage(
                url,
                engine_kwargs={"pool_pre_ping": True},  # a database that was restarted is met with a new connection
                heartbeat_interval=heartbeat,
                grace_period=grace,
                heartbeat_stale_trial_callback=optuna.storages.RetryHeartbeatStaleTrialCallback(RETRIES),
            )
        except (sqlalchemy.exc.IntegrityError, sqlalchemy.exc.ProgrammingError):
            if attempt == 3:  # the first workers of a fleet make the tables at the same time
                raise
            time.sleep(0.5)
    raise AssertionError("unreachable")


def _grpc(url: str) -> optuna.storages.BaseStorage:
    try:
        parts = urllib.parse.urlsplit(url)
        host, port, more = parts.hostname, parts.port, parts.path + parts.query + parts.fragment
    except ValueError:
        host = port = more = None
    if not host or not port or more or "@" in url:  # which asks for no password
        raise StorageError(f"{redact(url)} is no address of a proxy: name it as grpc://HOST:PORT")
    try:
        storage = optuna.storages.GrpcStorageProxy(host=host, port=port)
        storage.wait_server_ready(timeout=10)
    except ImportError:
        raise StorageError(f"grpc:// needs grpcio and protobuf: {extras.install('grpc')}") from None
    except ConnectionError:
        raise StorageError(f"no proxy answers at {host}:{port}: start one there with `mgpu-tune proxy`") from None
    return storage


def journal_path(gpu_key: str, op: str) -> Path:
    """The journal of `mgpu-tune run` on this machine: under $MGPU_OPS_STATE_DIR, or where the system keeps a user's state."""
    root = os.environ.get("MGPU_OPS_STATE_DIR")
    if not root:
        import platformdirs

        root = platformdirs.user_state_dir("mgpu_ops", appauthor=False)
    return Path(os.path.expanduser(root)) / "studies" / gpu_key / f"{op}.journal"


# --- studies


@dataclasses.dataclass(frozen=True)
class Identity:
    """What two measurements must have in common to be compared: only those share a study."""

    op: str
    kernel_version: int
    problem: Mapping[str, Any]
    gpu: str  # the device's name: "NVIDIA H200"
    kind: str  # "measured", "modelled", "recorded"
    versions: Mapping[str, str | None]  # driver, jax, jaxlib, cuda

    @classmethod
    def of(cls, spec: OpSpec, problem: Problem, gpu: Gpu, kind: str, versions: Mapping[str, str | None]) -> Identity:
        return cls(spec.name, spec.version, dataclasses.asdict(problem), gpu.name, kind, dict(versions))

    def name(self, run: str) -> str:
        """A study's name: for people to read, and different wherever the identity or the run is."""
        digest = hashlib.sha256(json.dumps(dataclasses.asdict(self), sort_keys=True).encode()).hexdigest()[:12]
        sizes = "x".join(str(v) for v in self.problem.values() if type(v) is int)
        words = [self.op, sizes[:80], self.gpu, self.kind, f"driver {self.versions.get('driver')}"]
        words += [f"jax {self.versions.get('jax')}", f"kernel {self.kernel_version}", digest, f"run {run}"]
        return " | ".join(words)


def open_study(
    storage: optuna.storages.BaseStorage,
    identity: Identity,
    run: str | None = None,
    *,
    sampler: Any = None,
    fresh: bool = False,
) -> optuna.Study:
    """The study of an identity, made where there is none.

    `run` tells repetitions apart. None: the newest that is not done, where `fresh` one of its own.
    """
    if run is None:
        studies = {study.study_name: study for study in storage.get_all_studies()}
        number = 1
        while (old := studies.get(identity.name(str(number)))) is not None and (fresh or "done" in old.user_attrs):
            number += 1
        run = str(number)
    study = optuna.create_study(storage=storage, sampler=sampler, study_name=identity.name(run), load_if_exists=True)
    if not study.user_attrs:
        study.set_user_attr("identity", dataclasses.asdict(identity))
    return study


def finish(study: optuna.Study, entry: Any) -> None:
    """Marks a study as done, with its Entry for the database, or None where no candidate worked."""
    import msgspec

    study.set_user_attr("done", {"entry": msgspec.to_builtins(entry)})
