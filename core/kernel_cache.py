"""Where lowered kernels are kept: JAX's persistent compilation cache where one is in use, else a folder of the user's.

What is kept is run on the GPU. So the folder is the user's alone, and a file of another user is as good as missing.
"""

from __future__ import annotations

import abc
import contextlib
import functools
import hashlib
import logging
import os
import tempfile
from pathlib import Path

import jax
from jax._src import compilation_cache, lru_cache
from jax._src.lru_cache import LRUCache

VARIABLE = "MGPU_OPS_KERNEL_CACHE"
PREFIX = "mgpu_ops-kernel-"  # of all keys
BYTES = 512 * 2**20  # that the folder may have, about
_NO = ("0", "false", "off", "no")
_log = logging.getLogger("mgpu_ops")


def current() -> Cache | None:
    """Where kernels are kept as the settings are now. None: nowhere, by $MGPU_OPS_KERNEL_CACHE or JAX's switch."""
    named = os.environ.get(VARIABLE, "").strip()
    if named.lower() in _NO or not jax.config.jax_enable_compilation_cache:
        return None
    if compilation_cache.is_persistent_cache_enabled():
        compilation_cache._initialize_cache()
        if isinstance(jaxs := compilation_cache._cache, LRUCache):  # others take nothing but executables
            return _InJaxs(jaxs)
    return _folder(named or _default())


def _default() -> str:
    import platformdirs

    return os.path.join(platformdirs.user_cache_dir("mgpu_ops", appauthor=False), "kernels")


@functools.cache
def _folder(name: str) -> Cache | None:
    path = os.path.expanduser(name)
    if path.startswith("~"):
        _log.info("lowered kernels are not kept: there is no home directory for %s, nor a folder in $%s", name, VARIABLE)
        return None
    return Folder(Path(path).absolute())


class Cache(abc.ABC):
    """Kernels by their keys. What cannot be read or written is logged, and never fails."""

    def get(self, key: str) -> bytes | None:
        """The kernel that was kept with this key. What is damaged or written in part is as good as missing, and removed."""
        try:
            found = self._read(key)
        except OSError as error:
            self._tell("read", error)
            return None
        if found is None:
            return None
        kernel = found[32:]
        if _seal(key, kernel) != found[:32]:
            with contextlib.suppress(OSError):  # another process that is writing it loses no more
                self._path(key).unlink(missing_ok=True)
            return None
        return kernel

    def put(self, key: str, kernel: bytes) -> None:
        """Keeps a kernel with this key."""
        try:
            self._write(key, _seal(key, kernel) + kernel)
        except OSError as error:
            self._tell("written", error)

    @abc.abstractmethod
    def _path(self, key: str) -> Path: ...

    @abc.abstractmethod
    def _read(self, key: str) -> bytes | None: ...

    @abc.abstractmethod
    def _write(self, key: str, data: bytes) -> None: ...

    @abc.abstractmethod
    def _tell(self, failed: str, error: OSError) -> None: ...


def _seal(key: str, kernel: bytes) -> bytes:
    """What shows that a file is whole, and was not another's."""
    return hashlib.sha256(key.encode() + b"\0" + kernel).digest()


class _InJaxs(Cache):
    """Kernels in JAX's persistent compilation cache, which has a bound of its own."""

    def __init__(self, cache: LRUCache):
        self._cache = cache

    def _path(self, key: str) -> Path:
        return Path(self._cache.path, f"{key}{lru_cache._CACHE_SUFFIX}")

    def _read(self, key: str) -> bytes | None:
        return self._cache.get(key)

    def _write(self, key: str, data: bytes) -> None:
        self._cache.put(key, data)

    def _tell(self, failed: str, error: OSError) -> None:
        _log.warning("lowered kernels are not kept, as JAX's compilation cache cannot be %s: %s", failed, error)


class Folder(Cache):
    """Kernels in files of a folder. Several processes may read and write it at once.

    limit: in bytes. Above it the files that were read or written longest ago are removed. A process looks at the folder when it
    first writes, and again when it has written what there was room for: so there may be more for a while.
    """

    def __init__(self, path: Path, limit: int = BYTES):
        self._folder, self._limit = path, limit
        self._room = 0  # for so many bytes, as far as this process knows
        self._told = False

    def _path(self, key: str) -> Path:
        return self._folder / key

    def _read(self, key: str) -> bytes | None:
        try:
            file = self._path(key).open("rb")
        except (FileNotFoundError, PermissionError):  # of another user
            return None
        with file:
            if hasattr(os, "getuid") and os.fstat(file.fileno()).st_uid != os.getuid():
                return None
            found = file.read()
        with contextlib.suppress(OSError):
            os.utime(self._path(key))
        return found

    def _write(self, key: str, data: bytes) -> None:
        if self._told:
            return
        self._folder.mkdir(mode=0o700, parents=True, exist_ok=True)
        if len(data) > self._room:
            self._room = self._make_room(len(data))
        self._room -= len(data)
        number, path = tempfile.mkstemp(dir=self._folder, prefix=f"{key}.")
        try:
            with open(number, "wb") as file:
                file.write(data)
            os.replace(path, self._path(key))  # in one step: another process finds all of it or nothing
        except FileNotFoundError:  # another process has made room
            return
        except OSError:
            os.unlink(path)
            raise

    def _make_room(self, wanted: int) -> int:
        """The bytes for which there is room, at least a tenth of all once files must go."""
        files = []
        with os.scandir(self._folder) as entries:
            for entry in entries:
                if entry.name.startswith(PREFIX):
                    with contextlib.suppress(FileNotFoundError):  # another process makes room too
                        status = entry.stat(follow_symlinks=False)
                        files.append((status.st_mtime_ns, status.st_size, entry.path))
        room = self._limit - sum(size for _, size, _ in files)
        if room < wanted:
            for _, size, path in sorted(files):
                if room >= max(wanted, self._limit // 10):
                    break
                with contextlib.suppress(FileNotFoundError):
                    os.unlink(path)
                room += size
        return room

    def _tell(self, failed: str, error: OSError) -> None:
        """Once, and nothing is written from then on."""
        if self._told:
            return
        self._told = True
        # One that the user has named is expected to work; a home directory may well be read-only.
        level = logging.WARNING if os.environ.get(VARIABLE, "").strip() else logging.INFO
        text = "lowered kernels are not kept, as %s cannot be %s (%s): name another folder in $%s, or say off there"
        _log.log(level, text, self._folder, failed, error, VARIABLE)
