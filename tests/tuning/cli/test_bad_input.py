"""Database files and disks that the tuner cannot use: refused before it tunes, or told with the results on the screen."""

from __future__ import annotations

import errno
import json
import os
import pathlib
import re
import tempfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import pytest

import mgpu_ops
from mgpu_ops import spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database, places
from mgpu_ops.tuning import many, tuner
from mgpu_ops.tuning.bench import runner, sources, timeline
from mgpu_ops.tuning.cli import capture
from mgpu_ops.tuning.fleet import merge
from mgpu_ops.tuning.replay import replay

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
    assert "make room, permit it, or name another file" in done.err
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


def test_a_directory_in_place_of_the_database_of_a_worker_is_refused_before_tuning(tmp_path: Path, mgpu_tune: Command) -> None:
    done = mgpu_tune(*WORK["worker"][0], "--database", tmp_path)
    assert done.code == 2
    assert f"{tmp_path}: is a folder: name a file" in done.err
    assert "best of" not in done.out


# --- places in which nothing can be written: refused before the work


H200 = gpu.find("h200")
SHIPPED = database.shipped_path("h200", "matmul")
WORK: dict[str, tuple[tuple[Any, ...], str, bool]] = {  # request, option of the place, whether that is a folder
    "run": (RUN, "--database", False),
    "retune": (("retune", "matmul", "--gpu", "h200", "--trials", 2), "--database", False),
    "worker": (("worker", "--storage", "x.journal", "--gpu", "h200", "--op", "matmul"), "--database", False),
    "merge": (("merge", SHIPPED), "--into", False),
    "merge into a folder": (("merge", SHIPPED), "--into", True),
    "export": (("export", "matmul", "--gpu", "h200"), "--output", True),
    "export csv": (("export", "matmul", "--gpu", "h200", "--format", "csv"), "--output", False),
    "plot": (("plot", "matmul", "--gpu", "h200"), "--output", True),
    "report": (("report", "matmul", "--gpu", "h200"), "--output", False),
    "capture": (("capture", "program:step"), "--output", False),
    "replay": (("replay", "--from", "."), "--picture", False),
    "sweep": (("sweep", "--suite", "replay"), "--output", True),
    "bench": (("bench", "matmul", "--m", 512, "--n", 512, "--k", 512), "--output", True),
    "profile": (("profile", "matmul", "--m", 512, "--n", 512, "--k", 512), "--output", True),
}


@pytest.fixture
def no_work(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """Whatever a command writes comes of one of these."""

    def work(*args: Any, **options: Any) -> Any:
        raise AssertionError("it worked")

    monkeypatch.chdir(tmp_path)
    for owner, name in (
        (tuner, "tune"), (database, "update"), (sources, "find"), (merge, "best"), (replay, "play_all"), (runner, "run"),
        (many, "each"), (capture, "_captured"), (timeline, "record"),
    ):  # fmt: skip
        monkeypatch.setattr(owner, name, work)
    monkeypatch.setattr("mgpu_ops.tuning.cli.sweep.has_gpu", lambda: True)
    monkeypatch.setattr(gpu, "current", lambda: H200)


PLACES = ("below a file", "of another kind", "refused")
EITHER = ("merge", "run")  # whose place may be a file or a folder
CASES = [(name, place) for name in WORK for place in PLACES if not (name in EITHER and place == "of another kind")]


@pytest.mark.parametrize(("name", "place"), CASES)
def test_a_place_in_which_nothing_can_be_written_is_refused_before_the_work(
    name: str, place: str, no_work: None, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    words, option, folder = WORK[name]
    (tmp_path / "occupied").write_text("a file")
    path = tmp_path / "occupied" / "x.json"
    if place == "of another kind":
        path = tmp_path / "occupied" if folder else tmp_path / "x.png"
        folder or path.mkdir()
    elif place == "refused":
        path = tmp_path / "new" / "deep" / ("x" if folder else "x.json")
        monkeypatch.setattr(tempfile, "TemporaryFile", refuse(errno.EROFS))
    before = {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*")}
    done = mgpu_tune(*words, option, path)
    assert (done.code, done.out) == (2, "") or "MODELLED" in done.out
    (line,) = done.err.splitlines()
    assert line.startswith("mgpu-tune: ")
    assert (
        re.search(rf"{re.escape(str(tmp_path))}\S*: (cannot be written|cannot be read|is a file|is a folder) ?", line)
        or option in line
    )
    assert "MGPU_OPS_CONFIG_DIR" not in line
    assert {p: p.stat().st_mtime_ns for p in tmp_path.rglob("*") if p.name not in ("x.journal", "__pycache__")} == before


@pytest.mark.parametrize("command", ["run", "demo", "worker"])
def test_an_own_database_that_cannot_be_written_is_told_before_tuning_with_its_variable(
    command: str, no_work: None, own_database: Path, mgpu_tune: Command
) -> None:
    own_database.write_text("a file")
    done = mgpu_tune(*{"run": RUN, "demo": ("demo",), "worker": WORK["worker"][0]}[command])
    assert done.code == 2
    assert done.err.count("\n") == 1
    assert "cannot be written" in done.err
    assert "permit it, or set MGPU_OPS_CONFIG_DIR to another directory" in done.err


def test_asking_whether_a_place_can_be_written_changes_nothing(tmp_path: Path) -> None:
    (tmp_path / "old").write_text("kept")
    before = (tmp_path / "old").stat().st_mtime_ns
    assert places.file_fault(tmp_path / "old") is None
    assert places.file_fault(tmp_path / "deep" / "new") is None
    assert places.folder_fault(tmp_path / "deep") is None
    assert places.file_fault(Path("/dev/null")) is None
    assert ((tmp_path / "old").read_text(), (tmp_path / "old").stat().st_mtime_ns) == ("kept", before)
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["old"]
    assert not (tmp_path / "deep").exists()
    assert places.file_fault(tmp_path / ("x" * 300)) == os.strerror(errno.ENAMETOOLONG)


def test_a_dry_run_writes_nothing_and_asks_for_no_place(tmp_path: Path, mgpu_tune: Command) -> None:
    (tmp_path / "occupied").write_text("a file")
    assert mgpu_tune("merge", SHIPPED, "--into", tmp_path / "occupied" / "x.json", "--dry-run").code == 0


def test_autotune_notices_before_it_tunes_that_it_cannot_store(own_database: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def step() -> Any:
        a = jnp.ones((640, 640), jnp.bfloat16)
        return mgpu_ops.matmul(a, a)

    def tune(*args: Any, **options: Any) -> Any:
        raise AssertionError("it tuned")

    monkeypatch.setattr(tuner, "tune", tune)
    own_database.write_text("a file")
    with pytest.raises(mgpu_ops.DatabaseError, match=r"cannot be written .*: permit it, or set MGPU_OPS_CONFIG_DIR"):
        mgpu_ops.autotune(step, gpu="h200")
