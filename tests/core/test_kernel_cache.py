"""Files of kernels: whole, the user's own, within a bound, and nothing that fails where a folder cannot be used."""

from __future__ import annotations

import logging
import os
import stat
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops.core import kernel_cache
from mgpu_ops.core.kernel_cache import PREFIX, Folder


def key(number: int) -> str:
    return f"{PREFIX}test-{number}"


def names(folder: Path) -> list[str]:
    return sorted(file.name for file in folder.iterdir())


def aged(folder: Path, number: int, seconds: int) -> None:
    os.utime(folder / key(number), (seconds, seconds))


def test_another_process_finds_what_was_kept(tmp_path):
    folder = tmp_path / "a" / "b"
    assert Folder(folder).get(key(1)) is None
    Folder(folder).put(key(1), b"kernel")
    assert Folder(folder).get(key(1)) == b"kernel"
    assert names(folder) == [key(1)]
    assert stat.S_IMODE(folder.stat().st_mode) == 0o700
    assert stat.S_IMODE((folder / key(1)).stat().st_mode) == 0o600


@pytest.mark.parametrize("damage", [lambda kept: kept[:-1], lambda kept: b"", lambda kept: b"x" + kept[1:]])
def test_a_damaged_file_is_removed(tmp_path, damage):
    Folder(tmp_path).put(key(1), b"kernel")
    (tmp_path / key(1)).write_bytes(damage((tmp_path / key(1)).read_bytes()))
    assert Folder(tmp_path).get(key(1)) is None
    assert names(tmp_path) == []


def test_a_kernel_under_the_name_of_another_is_damaged(tmp_path):
    Folder(tmp_path).put(key(1), b"kernel")
    (tmp_path / key(1)).rename(tmp_path / key(2))
    assert Folder(tmp_path).get(key(2)) is None


def test_a_file_of_another_user_is_as_good_as_missing(tmp_path, monkeypatch):
    Folder(tmp_path).put(key(1), b"theirs")
    monkeypatch.setattr(os, "getuid", lambda: (tmp_path / key(1)).stat().st_uid + 1)
    assert Folder(tmp_path).get(key(1)) is None
    assert names(tmp_path) == [key(1)]


def test_above_the_bound_what_was_used_longest_ago_goes(tmp_path):
    size = 1000
    kernel = bytes(size - 32)
    for number in range(3):
        Folder(tmp_path, limit=3 * size).put(key(number), kernel)
        aged(tmp_path, number, seconds=number + 1)
    (tmp_path / "not-ours").write_bytes(bytes(size))
    assert Folder(tmp_path).get(key(0)) == kernel  # which is using it
    Folder(tmp_path, limit=3 * size).put(key(3), kernel)
    assert names(tmp_path) == [key(0), key(2), key(3), "not-ours"]


def test_a_process_holds_the_bound_for_as_long_as_it_writes(tmp_path):
    size = 1000
    folder = Folder(tmp_path, limit=3 * size)
    for number in range(10):
        folder.put(key(number), bytes(size - 32))
        aged(tmp_path, number, seconds=number + 1)
        assert len(names(tmp_path)) <= 3
    assert names(tmp_path) == [key(7), key(8), key(9)]


def test_what_a_process_that_was_killed_had_written_in_part_goes_too(tmp_path):
    part = tmp_path / f"{key(1)}.part"
    part.write_bytes(bytes(1000))
    os.utime(part, (1, 1))
    Folder(tmp_path, limit=1500).put(key(2), bytes(900))
    assert names(tmp_path) == [key(2)]


def test_a_file_that_another_process_removes_while_it_is_written_is_written_the_next_time(tmp_path, monkeypatch, caplog):
    folder, replace = Folder(tmp_path), os.replace

    def late(path: str, to: Path) -> None:
        os.unlink(path)
        replace(path, to)

    with caplog.at_level(logging.INFO, logger="mgpu_ops"), monkeypatch.context() as patch:
        patch.setattr(os, "replace", late)
        folder.put(key(1), b"kernel")
    assert names(tmp_path) == []
    assert not caplog.records
    folder.put(key(1), b"kernel")
    assert folder.get(key(1)) == b"kernel"


@pytest.mark.parametrize(("named", "level"), [("", logging.INFO), ("somewhere", logging.WARNING)])
def test_a_folder_that_cannot_be_used_is_told_once(tmp_path, monkeypatch, caplog, named, level):
    monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", named)
    (tmp_path / "file").write_text("")
    folder = Folder(tmp_path / "file" / "folder")
    with caplog.at_level(logging.INFO, logger="mgpu_ops"):
        for number in range(3):
            folder.put(key(number), b"kernel")
            assert folder.get(key(number)) is None
    (record,) = caplog.records
    assert record.levelno == level
    assert str(tmp_path / "file" / "folder") in record.getMessage()
    assert "name another folder in $MGPU_OPS_KERNEL_CACHE, or say off" in record.getMessage()


def test_a_folder_that_cannot_be_written_is_read(tmp_path, monkeypatch):
    Folder(tmp_path).put(key(1), b"kernel")

    def read_only(*_: Any, **__: Any) -> Any:
        raise OSError(30, "Read-only file system")

    for name in ("utime", "replace"):
        monkeypatch.setattr(os, name, read_only)
    folder = Folder(tmp_path)
    folder.put(key(2), b"another")
    assert folder.get(key(1)) == b"kernel"
    assert names(tmp_path) == [key(1)]


def test_the_folder_is_in_the_users_cache_or_where_the_variable_says(tmp_path, monkeypatch):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    monkeypatch.setenv("HOME", str(tmp_path / "home"))
    for named, folder in (("", "mgpu_ops/kernels"), (str(tmp_path / "here"), "here"), ("~/there", "home/there")):
        monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", named)
        cache = kernel_cache.current()
        assert cache is not None
        cache.put(key(1), b"kernel")
        assert names(tmp_path / folder) == [key(1)]


def test_without_a_home_directory_nothing_is_kept(monkeypatch, caplog):
    monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", "~nobody-of-that-name/kernels")
    with caplog.at_level(logging.INFO, logger="mgpu_ops"):
        assert [kernel_cache.current() for _ in range(2)] == [None, None]
    assert len(caplog.records) == 1
