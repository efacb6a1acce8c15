"""Database files and disks that the tuner cannot use: refused before it tunes, or told with the results on the screen."""

from __future__ import annotations

import errno
import json
import os
import pathlib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops import spec_of
from mgpu_ops.core import database
from mgpu_ops.tuning import tuner

RUN = ("run", "matmul", "--m", 512, "--n", 512, "--k", 512, "--gpu", "h200", "--trials", 6)
MATMUL = spec_of("matmul")
Command = Callable[..., Any]


def content(**changes: Any) -> bytes:
    return json.dumps({"schema": 1, "gpu": "h200", "op": "matmul", "entries": []} | changes).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (content(gpu="h100-sxm"), "is for GPU 'h100-sxm', not 'h200'"),
        (content(op="softmax"), "is for op 'softmax', not 'matmul'"),
        (content(schema=2), "was written by a newer mgpu_ops (schema 2, this one reads 1): upgrade mgpu_ops"),
        (content()[:-5], "is corrupt"),
        (b"", "is corrupt"),
    ],
    ids=["another GPU", "another op", "newer", "cut off", "empty"],
)
@pytest.mark.parametrize("named", [True, False], ids=["named", "own"])
def test_a_file_that_is_no_database_for_this_is_refused_before_tuning_and_left_as_it_is(
    data: bytes, reason: str, named: bool, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    def tune(*args: Any, **options: Any) -> Any:
        raise AssertionError("it tuned")

    monkeypatch.setattr(tuner, "tune", tune)
    path = tmp_path / "some.json" if named else database.user_path("h200", "matmul")
    path.parent.mkdir(parents=True, exist_ok=True)
    path.write_bytes(data)
    done = mgpu_tune(*RUN, *(("--database", path) if named else ()))
    assert done.code == 2
    assert str(path) in done.err
    assert reason in done.err
    assert path.read_bytes() == data


def refuse(number: int) -> Callable[..., Any]:
    def refused(*args: Any, **options: Any) -> Any:
        raise OSError(number, os.strerror(number))

    return refused


@pytest.mark.parametrize(
    ("owner", "step", "number"),
    [
        (os, "fsync", errno.ENOSPC),
        (os, "replace", errno.ENOSPC),
        (os, "open", errno.EROFS),
        (os, "open", errno.EACCES),
        (pathlib.Path, "mkdir", errno.EACCES),
        (pathlib.Path, "mkdir", errno.ENOSPC),
    ],
    ids=["full, in fsync", "full, in replace", "read-only system", "no permission", "no directory", "full, in mkdir"],
)
def test_a_disk_that_refuses_costs_no_result(
    owner: Any, step: str, number: int, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """The best config is on the screen, the old file is as it was, and the message says what to do."""
    path, other = tmp_path / "tuned.json", tmp_path / "other.json"
    path.write_bytes(before := content())
    with monkeypatch.context() as patch:
        update = database.update

        def fails(*args: Any, **options: Any) -> Any:
            patch.setattr(owner, step, refuse(number))
            try:
                return update(*args, **options)
            finally:
                patch.undo()

        patch.setattr(database, "update", fails)
        done = mgpu_tune(*RUN, "--database", path)
    assert done.code == 2
    assert f"{path}: cannot be written" in done.err
    assert os.strerror(number) in done.err
    assert "MGPU_OPS_CONFIG_DIR" in done.err
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
    assert mgpu_tune(*RUN, "--database", other).code == 0
    (entry,) = database.read(other).entries
    for field, value in entry.config.items():
        assert f"{field}={value}" in done.out.split()
    assert f"{entry.evidence.median_us:.1f} us modelled" in done.out
    assert "stored" not in done.out


def test_a_directory_that_cannot_be_made_is_named(tmp_path: Path, mgpu_tune: Command) -> None:
    (tmp_path / "occupied").write_text("a file")
    path = tmp_path / "occupied" / "tuned.json"
    done = mgpu_tune(*RUN, "--database", path)
    assert done.code == 2
    assert str(path) in done.err


def test_a_directory_in_place_of_the_database_is_refused_before_tuning(tmp_path: Path, mgpu_tune: Command) -> None:
    done = mgpu_tune(*RUN, "--database", tmp_path)
    assert done.code == 2
    assert f"{tmp_path}: cannot be read" in done.err
    assert "best of" not in done.out
