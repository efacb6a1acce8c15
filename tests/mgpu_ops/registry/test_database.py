"""The config database: strict reading, safe writing, and which config wins."""

import contextlib
import dataclasses
import errno
import json
import logging
import math
import os
import pickle
import socket
import stat
import subprocess
import sys
import tempfile
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import msgspec
import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core.gpu import find
from mgpu_ops.registry import database, resolution
from mgpu_ops.registry.database import DatabaseError, Entry, Evidence, File
from mgpu_ops.registry.spec import OpSpec

GPU = find("h200")
COUSIN = find("h100-sxm")
quiet = settings(deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])


@dataclasses.dataclass(frozen=True)
class Problem:
    m: int

    def __post_init__(self) -> None:
        if self.m < 0:
            raise ValueError(f"m={self.m} must be at least 0")


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int


def check(problem: Problem, config: Config, gpu: Any) -> str | None:
    return None if config.tile <= problem.m else f"tile={config.tile} exceeds m={problem.m}"


def distance(a: Problem, b: Problem) -> float | None:
    d = abs(math.log2(a.m / b.m))
    return d if d <= 4 else None


SPEC = OpSpec(
    name="scale",
    version=2,
    Problem=Problem,
    Config=Config,
    shapes={},
    suites={},
    space=lambda problem, gpu: {"tile": (1, 2, 4)},
    supports=lambda problem, gpu: None if problem.m else "m=0: there is nothing to scale",
    check=check,
    candidates=lambda problem, gpu: [Config(1)],
    default=lambda problem, gpu: Config(1),
    cost=lambda problem, config, gpu: 1.0,
    distance=distance,
    flops=lambda problem: problem.m,
    bytes=lambda problem: 8 * problem.m,
    inputs=lambda problem, key: (),
    run=lambda problem, config, gpu, *inputs, interpret=False: None,
    reference=lambda problem, *inputs: None,
    tolerance=lambda problem: 0.01,
)


def evidence(kind="measured", **changes) -> Evidence:
    fields: dict[str, Any] = {
        "kind": kind,
        "gpu": GPU.name,
        "driver": "570.86.15",
        "jax": "0.11.2",
        "jaxlib": "0.11.2",
        "cuda": "13.0",
        "kernel_version": SPEC.version,
        "median_us": 10.0,
        "spread_us": 0.1,
        "default_us": 15.0,
        "baseline": "xla",
        "baseline_us": 12.5,
        "error": 0.001,
        "trials": 32,
        "seed": 0,
        "date": "2025-11-20",
    }
    return Evidence(**(fields | changes))


def entry(m=64, tile=8, kind="measured", **changes) -> Entry:
    return database.to_entry(Problem(m), Config(tile), evidence(kind, **changes))


def file(*entries: Entry, **changes) -> File:
    return File(**({"schema": 1, "gpu": GPU.key, "op": "scale", "entries": entries} | changes))


def write(path: Path, *entries: Entry, gpu_key=GPU.key) -> Path:
    """Entries of the H200's are told to be of that GPU's."""
    name = find(gpu_key).name
    own = [msgspec.structs.replace(e, evidence=msgspec.structs.replace(e.evidence, gpu=name)) for e in entries]
    database.update(path, entries if gpu_key == GPU.key else own, gpu_key=gpu_key, op="scale")
    return path


def user(gpu_key=GPU.key) -> Path:
    return database.user_path(gpu_key, "scale")


def shipped(gpu_key=GPU.key) -> Path:
    return database.shipped_path(gpu_key, "scale")


def resolve(m=64, config=None) -> resolution.Resolution:
    return resolution.resolve(SPEC, Problem(m), GPU, config)


@pytest.fixture(autouse=True)
def own_places(tmp_path, monkeypatch):
    """Empty folders in place of the user's and the shipped files; nothing logged or warned yet."""
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "user"))
    monkeypatch.setattr(database, "shipped_path", lambda gpu, op: tmp_path / "shipped" / gpu / f"{op}.json")
    monkeypatch.setattr(resolution, "_warned", set())
    monkeypatch.setattr(resolution, "_logged", set())


# --- reading and writing bytes

positive = st.floats(min_value=0, exclude_min=True, allow_infinity=False, allow_subnormal=False)
integers = st.integers(-(2**63), 2**64 - 1)
fields = st.dictionaries(st.text(max_size=6), integers | st.text(max_size=6) | st.booleans())
evidences = st.builds(
    Evidence,
    kind=st.sampled_from(["measured", "modelled"]),
    gpu=st.text(max_size=6),
    driver=st.none() | st.text(max_size=6),
    jax=st.text(max_size=6),
    jaxlib=st.text(max_size=6),
    cuda=st.none() | st.text(max_size=6),
    kernel_version=integers,
    median_us=positive,
    spread_us=positive | st.just(0.0),
    default_us=st.none() | positive,
    baseline=st.none() | st.text(max_size=6),
    baseline_us=st.none() | positive,
    error=st.none() | positive,
    trials=st.integers(1, 10**6),
    seed=integers,
    date=st.dates().map(str),
    samples_us=st.none() | st.lists(positive, max_size=3),
)
entries = st.lists(st.builds(Entry, problem=fields, config=fields, evidence=evidences), max_size=4)


@given(entries, st.text(max_size=6), st.text(max_size=6))
@quiet
def test_what_is_encoded_decodes_to_the_same(entries, gpu, op):
    stored = file(*database.merge((), entries), gpu=gpu, op=op)
    data = database.encode(stored)
    assert database.decode(data, path="f", gpu_key=gpu, op=op) == stored
    assert database.encode(database.decode(data, path="f")) == data


def test_the_text_is_one_entry_a_line_sorted_by_value_whatever_the_order_given():
    given_order = file(entry(m=1024), entry(m=64, kind="modelled"), entry(m=64), entry(m=128))
    lines = database.encode(given_order).decode().splitlines()
    assert lines[0] == '{"schema":1,"gpu":"h200","op":"scale","entries":['
    assert lines[-1] == "]}"
    parsed = [json.loads(line.rstrip(",")) for line in lines[1:-1]]
    assert [(e["problem"]["m"], e["evidence"]["kind"]) for e in parsed] == [
        (64, "measured"),
        (64, "modelled"),
        (128, "measured"),
        (1024, "measured"),
    ]


GOOD = database.encode(file(entry(m=64), entry(m=128, samples_us=[9.9, 10.1])))


@given(
    st.lists(st.tuples(st.integers(0, len(GOOD) - 1), st.integers(0, 255)), min_size=1, max_size=4),
    st.integers(0, len(GOOD)),
)
@quiet
def test_changed_or_cut_bytes_decode_or_raise_a_database_error(changes, length):
    data = bytearray(GOOD)
    for place, byte in changes:
        data[place] = byte
    for mutant in (bytes(data), bytes(data[:length]), GOOD[:length]):
        try:
            decoded = database.decode(mutant, path="some/file.json")
        except DatabaseError:
            continue
        in_order = msgspec.structs.replace(decoded, entries=database.merge((), decoded.entries))
        assert database.decode(database.encode(decoded), path="f") == in_order


@given(st.binary(max_size=60))
@quiet
def test_any_bytes_decode_or_raise_a_database_error(data):
    with pytest.raises(DatabaseError, match=r"corrupt|newer"):
        database.decode(data, path="f")


def changed(**changes) -> bytes:
    """A good file with values changed: its own, its first entry's or that entry's evidence's."""
    tree = json.loads(GOOD)
    first = tree["entries"][0]
    for key, value in changes.items():
        levels = (tree, first, first["evidence"])
        next((level for level in levels if key in level), tree)[key] = value
    return json.dumps(tree).encode()


@pytest.mark.parametrize(
    ("data", "reason"),
    [
        (b"", "corrupt"),
        (GOOD[:-2], "corrupt"),
        (b"[" * 100_000, "corrupt"),
        (b'{"schema":1,"x":' + b"[" * 100_000, "corrupt"),
        (b'\xff{"schema":1}', "corrupt"),
        (changed(note="hand-made"), "unknown field `note`"),
        (GOOD.replace(b'"config":', b'"note":1,"config":', 1), "unknown field `note`"),
        (GOOD.replace(b'"driver":', b'"note":1,"driver":', 1), "unknown field `note`"),
        (GOOD.replace(b'"driver":"570.86.15",', b"", 1), "missing required field `driver`"),
        (changed(problem={"m": 1.5}), "float"),
        (changed(config={"tile": None}), "null"),
        (changed(config={"tile": [1]}), "array"),
        (changed(kind="guessed"), "guessed"),
        (changed(median_us=0), "median_us"),
        (changed(median_us=-1), "median_us"),
        (changed(spread_us=-0.1), "spread_us"),
        (changed(default_us=0), "default_us"),
        (changed(error=-1), "error"),
        (changed(trials=0), "trials"),
        (changed(median_us=math.nan), "corrupt"),
        (GOOD.replace(b'"median_us":10.0', b'"median_us":1e999', 1), "out of range"),
        (changed(date="2025-02-30"), "date"),
        (changed(date="20250203"), "2025-01-31"),
        (changed(schema=0), "schema"),
        (changed(schema=2), "newer mgpu_ops .schema 2, this one reads 1.: upgrade"),
        (changed(schema=2, whole_new_field={}), "newer mgpu_ops"),
        (changed(gpu="h20"), "for GPU 'h20', not 'h200'"),
        (changed(op="matmul"), "for op 'matmul', not 'scale'"),
        (GOOD.replace(b'{"m":64}', b'{"m":64,"m":65}', 1), "key 'm' stands twice in one object"),
        (GOOD.replace(b'"trials":32', b'"trials":32,"trials":33', 1), "key 'trials' stands twice in one object"),
        (GOOD.replace(b'"schema":1', b'"schema":1,"schema":1', 1), "key 'schema' stands twice in one object"),
        (changed(problem={"m": 2**64}), "18446744073709551616 has more than 64 bits"),
        (changed(config={"tile": -(2**63) - 1}), "-9223372036854775809 has more than 64 bits"),
        (GOOD.replace(b'"trials":32', b'"trials":' + b"9" * 5000, 1), "out of range"),
        (GOOD.replace(b'"median_us":10.0', b'"median_us":Infinity', 1), "corrupt"),
        (GOOD.replace(b'{"m":64}', b'{"m":' + b"[" * 100_000 + b"]" * 100_000 + b"}", 1), "array"),
        (changed(problem={"m": {"__reduce__": ["os.system", ["true"]]}}), "object"),
        (b"\x80\x04\x95" + GOOD, "corrupt"),
        (changed(problem={"m": 128}), "two entries of one kind for one problem"),
    ],
)
def test_a_bad_file_is_refused_with_its_path_and_reason_and_is_left_as_it_is(data, reason, tmp_path):
    path = tmp_path / "scale.json"
    path.write_bytes(data)
    with pytest.raises(DatabaseError, match=reason) as caught:
        database.read(path, gpu_key=GPU.key, op="scale")
    assert caught.value.path == path
    assert str(path) in str(caught.value)
    with pytest.raises(DatabaseError, match=reason):
        write(path, entry())
    assert path.read_bytes() == data


def test_a_missing_file_is_named():
    with pytest.raises(DatabaseError, match=r"no/such\.json: cannot be read"):
        database.read("no/such.json")


def special(kind: str, path: Path) -> None:
    if kind == "pipe":
        os.mkfifo(path)
    elif kind == "socket":
        with socket.socket(socket.AF_UNIX) as bound:
            bound.bind(str(path))
    elif kind == "directory":
        path.mkdir()
    else:
        path.symlink_to(kind)


@pytest.mark.parametrize("kind", ["pipe", "socket", "directory", "/dev/zero", "/dev/tty"])
def test_what_is_no_regular_file_is_refused_at_once(kind, monkeypatch):
    """Reading a pipe waits for a writer, reading /dev/zero for ever."""
    monkeypatch.chdir(user().parents[2])  # the name of a socket is short
    user().parent.mkdir(parents=True)
    special(kind, Path(os.path.relpath(user())))
    said = (
        "is a folder: name a file" if kind == "directory" else r"cannot be read \(it is no regular file\): name a readable file"
    )
    with pytest.raises(DatabaseError, match=said):
        database.read(user())
    with pytest.warns(UserWarning, match="goes on without this file"):
        assert resolve().source == "default"
    with pytest.raises(DatabaseError, match="is a folder" if kind == "directory" else "cannot be read"):
        write(user(), entry())


def test_a_file_of_more_bytes_than_any_database_has_is_refused(tmp_path, monkeypatch):
    monkeypatch.setattr(database, "MAX_BYTES", len(GOOD))
    path = tmp_path / "scale.json"
    path.write_bytes(GOOD)
    assert len(database.read(path).entries) == 2
    path.write_bytes(GOOD + b" ")
    with pytest.raises(DatabaseError, match=f"it has more than {len(GOOD)} bytes"):
        database.read(path)


@pytest.mark.parametrize("name", [GPU.name, "H200", "nvidia h200"])
def test_a_file_that_has_another_name_of_its_gpu_is_read_and_written_back_under_its_key(name):
    user().parent.mkdir(parents=True)
    user().write_bytes(changed(gpu=name))
    assert database.read(user(), gpu_key=GPU.key).gpu == database.read(user(), gpu_key=name).gpu == GPU.key
    assert resolve().source == "user"
    assert database.update(user(), [], gpu_key=name, op="scale").gpu == GPU.key
    assert b'"gpu":"h200","op"' in user().read_bytes()


def test_a_database_error_survives_pickling():
    error = pickle.loads(pickle.dumps(DatabaseError("a/b.json", "is odd")))
    assert (str(error), error.path, error.reason) == (
        "a/b.json: is odd",
        Path("a/b.json"),
        "is odd",
    )


def test_an_entry_older_than_a_field_is_one_that_has_none_of_it():
    """An epilogue was no part of a matmul's problem once; files of then count as they are."""
    spec, problem = spec_of("matmul"), MatmulProblem(64, 64, 64)
    new = dataclasses.asdict(problem)
    old = {name: value for name, value in new.items() if name not in ("bias", "activation", "residual")}
    assert database.to_problem(spec, old) == problem
    assert database.key_of_fields(old) == database.key_of_fields(new)
    assert database.key_of_fields(new) != database.key_of_fields(new | {"bias": True})
    assert database.key_of_fields(new) != database.key_of_fields(new | {"activation": "gelu"})


@pytest.mark.parametrize(
    ("cls", "fields", "reason"),
    [
        ("problem", {}, r"lacks \['m'\]: tune again"),
        ("problem", {"m": 1, "n": 2}, r"} has unknown \['n'\]: tune again"),
        ("problem", {"n": 2}, r"} lacks \['m'\] and has unknown \['n'\]: tune again"),
        ("problem", {"m": True}, "Expected `int`, got `bool`"),
        ("config", {"tile": "8"}, "Expected `int`, got `str`"),
    ],
)
def test_fields_that_do_not_fit_the_op_are_refused(cls, fields, reason):
    convert = database.to_problem if cls == "problem" else database.to_config
    with pytest.raises(ValueError, match=reason):
        convert(SPEC, fields)


def test_fields_that_fit_give_back_the_problem_and_config():
    stored = entry(m=64, tile=8)
    assert database.to_problem(SPEC, stored.problem) == Problem(64)
    assert database.to_config(SPEC, stored.config) == Config(8)


def test_the_json_schema_names_every_field_and_allows_no_other():
    definitions = msgspec.json.schema(database.File)["$defs"]
    assert set(definitions["Evidence"]["properties"]) == set(Evidence.__struct_fields__)
    assert all(definitions[name]["additionalProperties"] is False for name in ("File", "Entry"))


# --- update

small = st.builds(entry, st.sampled_from([1, 2, 3]), st.integers(1, 9), st.sampled_from(["measured", "modelled"]))


@given(st.lists(st.lists(small, max_size=4), max_size=4))
@quiet
def test_updates_keep_the_last_entry_of_each_problem_and_kind(batches):
    with tempfile.TemporaryDirectory() as folder:
        path = Path(folder, "new", "scale.json")
        expected = {}
        for batch in batches:
            expected |= {(e.problem["m"], e.evidence.kind): e for e in batch}
            write(path, *batch)
            stored = database.read(path, gpu_key=GPU.key, op="scale").entries
            assert {(e.problem["m"], e.evidence.kind): e for e in stored} == expected
            assert len(stored) == len(expected)


@given(st.lists(small, max_size=5), st.lists(small, max_size=5))
@quiet
def test_merging_twice_or_with_nothing_changes_nothing(old, new):
    once = database.merge(old, new)
    assert database.merge(once, new) == once
    assert database.merge((), once) == once


def test_update_returns_what_it_wrote_and_leaves_no_temporary_file(tmp_path):
    path = tmp_path / "scale.json"
    (tmp_path / ".scale.json.tmp").write_bytes(b"left by a killed writer")
    stored = database.update(path, [entry()], gpu_key=GPU.key, op="scale")
    assert stored == database.read(path) == file(entry())
    assert sorted(p.name for p in tmp_path.iterdir()) == [".scale.json.lock", "scale.json"]


@pytest.mark.parametrize("mode", [0o600, 0o640, 0o664])
def test_update_keeps_who_may_read_a_file(mode, tmp_path):
    path = write(tmp_path / "scale.json", entry(m=1))
    path.chmod(mode)
    write(path, entry(m=2))
    assert len(database.read(path).entries) == 2
    assert stat.S_IMODE(path.stat().st_mode) == mode


def test_a_new_file_has_the_mode_that_new_files_have(tmp_path):
    (tmp_path / "other").touch()
    assert write(tmp_path / "scale.json", entry()).stat().st_mode == (tmp_path / "other").stat().st_mode


def test_an_owner_or_a_group_that_cannot_be_kept_costs_no_update_and_gives_no_right_to_another_group(tmp_path, monkeypatch):
    path = write(tmp_path / "scale.json", entry(m=1))
    path.chmod(0o664)
    real = os.fstat

    def of_others(file):
        return os.stat_result((*real(file)[:4], path.stat().st_uid + 1, path.stat().st_gid + 1, *real(file)[6:]))

    def refuse(*args):
        raise PermissionError(errno.EPERM, os.strerror(errno.EPERM))

    monkeypatch.setattr(os, "fstat", of_others)
    monkeypatch.setattr(os, "fchown", refuse)
    write(path, entry(m=2))
    assert len(database.read(path).entries) == 2
    assert stat.S_IMODE(path.stat().st_mode) == 0o604


def test_update_through_a_link_keeps_the_link(tmp_path):
    target = write(tmp_path / "target.json", entry(m=1))
    link = tmp_path / "scale.json"
    link.symlink_to(target)
    write(link, entry(m=2))
    assert link.is_symlink()
    assert len(database.read(target).entries) == 2


@pytest.mark.parametrize(
    "bad",
    [
        entry(median_us=math.nan),
        entry(median_us=math.inf),
        entry(error=math.nan),
        entry(trials=0),
        entry(kind="guessed"),
        entry(driver="\ud800"),
        Entry({"m": 1.5}, {"tile": 1}, evidence()),  # type: ignore[dict-item]
        Entry({"m": object()}, {"tile": 1}, evidence()),  # type: ignore[dict-item]
    ],
)
def test_an_entry_that_could_not_be_read_back_is_never_written(bad, tmp_path):
    path = write(tmp_path / "scale.json", entry())
    before = path.read_bytes()
    with pytest.raises(DatabaseError, match="is left as it is"):
        write(path, bad)
    assert path.read_bytes() == before


def test_evidence_refuses_a_date_that_is_none():
    with pytest.raises(ValueError, match=r"date=.2025-02-30. must be a date"):
        evidence(date="2025-02-30")


@pytest.mark.parametrize("step", ["open", "fsync", "replace"])
@pytest.mark.parametrize("number", [errno.ENOSPC, errno.EROFS, errno.EACCES])
def test_a_disk_that_refuses_loses_nothing(step, number, tmp_path, monkeypatch):
    path = write(tmp_path / "scale.json", entry())
    before = path.read_bytes()

    def refuse(*args, **kwargs):
        raise OSError(number, os.strerror(number))

    with monkeypatch.context() as patch:
        patch.setattr(os, step, refuse)
        with pytest.raises(DatabaseError, match=os.strerror(number)) as caught:
            write(path, entry(m=128))
    assert caught.value.path == path
    assert "make room, permit it, or name another file" in caught.value.reason
    assert path.read_bytes() == before
    assert not list(tmp_path.glob(".*.tmp"))
    write(path, entry(m=128))
    assert len(database.read(path).entries) == 2


def test_the_files_of_an_op_are_the_users_and_the_shipped_one_of_each_gpu_in_order_of_precedence():
    named = [("h200", "user", user()), ("h200", "shipped", shipped())]
    named += [("h20", "user", user("h20")), ("h20", "shipped", shipped("h20"))]
    assert database.files(["h200", "h20"], "scale") == named
    assert database.existing_files(["h200", "h20"], "scale") == []
    write(shipped(), entry())
    assert database.existing_files(["h200", "h20"], "scale") == [("h200", "shipped", shipped())]


def test_a_file_that_could_not_be_updated_is_refused_before_there_is_an_entry():
    database.require_writable(user(), gpu_key="h200", op="scale")  # there is none yet
    user().parent.mkdir(parents=True)
    user().write_text("{")
    with pytest.raises(DatabaseError, match="is corrupt"):
        database.require_writable(user(), gpu_key="h200", op="scale")


def test_a_place_where_no_directory_can_be_made_is_named(tmp_path):
    (tmp_path / "occupied").write_text("a file")
    with pytest.raises(DatabaseError, match="cannot be written"):
        write(tmp_path / "occupied" / "scale.json", entry())


# --- precedence


def test_each_source_wins_over_all_after_it(tmp_path, monkeypatch):
    environment = write(tmp_path / "environment.json", entry(tile=3))
    write(user(), entry(tile=4))
    write(shipped(), entry(tile=5), entry(m=128, tile=7))
    write(shipped(COUSIN.key), entry(tile=6), gpu_key=COUSIN.key)
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(environment))

    def answer(config=None):
        found = resolve(config=config)
        return found.source, found.config.tile

    with resolution.use_configs({"scale": Config(2)}):
        assert answer(Config(1)) == ("argument", 1)
        assert answer() == ("override", 2)
    assert answer() == ("environment", 3)
    monkeypatch.delenv("MGPU_OPS_CONFIG_PATH")
    assert answer() == ("user", 4)
    user().unlink()
    assert answer() == ("shipped", 5)
    write(shipped(), entry(tile=100))  # cannot run: exceeds m
    assert answer() == ("family", 6)
    shipped(COUSIN.key).unlink()
    assert answer() == ("near", 7)
    shipped().unlink()
    assert answer() == ("default", 1)


placed = st.tuples(
    st.sampled_from(["user", "shipped", "family"]),
    st.sampled_from([32, 64, 128, 4096]),
    st.sampled_from([8, 16, 100]),  # 100 cannot run at m = 64
    st.sampled_from(["measured", "modelled"]),
    st.sampled_from([1, 2, 2]),  # of the kernel; 1 is stale
)


def place(rows, folder):
    with pytest.MonkeyPatch.context() as patch:
        patch.setenv("MGPU_OPS_CONFIG_DIR", str(Path(folder, "user")))
        patch.setattr(database, "shipped_path", lambda gpu, op: Path(folder, "shipped", gpu, f"{op}.json"))
        for source, m, tile, kind, version in rows:
            key = COUSIN.key if source == "family" else GPU.key
            path = user(key) if source == "user" else shipped(key)
            write(path, entry(m, tile, kind, kernel_version=version), gpu_key=key)
        return resolve()


@given(st.lists(placed, max_size=6, unique_by=lambda row: (row[0], row[1], row[3])))
@quiet
def test_the_stored_winner_can_run_and_no_better_one_exists(rows):
    with tempfile.TemporaryDirectory() as folder:
        found = place(rows, folder)
    runs = [row for row in rows if row[4] == SPEC.version and row[2] <= 64]
    exact = [row for row in runs if row[1] == 64]
    near = [row for row in runs if row[1] in (32, 128)]  # 4096 is not comparable
    assert check(Problem(64), found.config, GPU) is None
    for candidates, is_source in ((exact, lambda s: s != "near"), (near, lambda s: s == "near")):
        if candidates:
            measured = [row for row in candidates if row[3] == "measured"]
            best = measured or candidates
            levels = [row[0] for row in best]
            first = next(s for s in ("user", "shipped", "family") if s in levels)
            assert is_source(found.source)
            assert found.entry is not None
            assert found.entry.evidence.kind == best[0][3]
            if candidates is exact:
                assert found.source == first
            return
    assert found.source == "default"


@pytest.mark.parametrize("low", ["shipped", "family"])
def test_a_modelled_entry_never_hides_a_measured_one(low):
    key = GPU.key if low == "shipped" else COUSIN.key
    write(user(), entry(tile=4, kind="modelled"))
    assert resolve().config == Config(4)
    write(shipped(key), entry(tile=8, kind="measured"), gpu_key=key)
    assert (resolve().source, resolve().config) == (low, Config(8))
    write(user(), entry(tile=16, kind="measured"))
    assert (resolve().source, resolve().config) == ("user", Config(16))


def test_a_problem_has_an_entry_of_bursts_and_a_sustained_one_and_a_call_takes_that_of_its_objective(monkeypatch):
    burst, sustained = entry(tile=2), entry(tile=4, median_us=14.0, objective="sustained", watts=690.0, joules=0.0097)
    write(user(), burst)
    write(user(), sustained)
    assert database.read(user()).entries == (burst, sustained)
    assert resolve().config == Config(2)
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", "sustained")
    assert resolve().config == Config(4)
    told = resolution.explain(SPEC, Problem(64), GPU)
    assert "measured 14 us sustained" in told
    assert "690 W, 0.0097 J a call" in told
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(user()))
    assert resolve().config == Config(4)
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", "burst")
    assert resolve().config == Config(2)
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", "power")
    with pytest.raises(ValueError, match="MGPU_OPS_OBJECTIVE='power' is not one of burst, sustained"):
        resolve()


@pytest.mark.parametrize("objective", ["burst", "sustained"])
def test_an_entry_of_the_other_objective_is_used_where_there_is_no_other(objective, monkeypatch):
    write(user(), entry(tile=4, objective=objective))
    for wanted in ("burst", "sustained"):
        monkeypatch.setenv("MGPU_OPS_OBJECTIVE", wanted)
        assert resolve().config == Config(4)


def test_an_entry_without_an_objective_is_of_bursts_and_is_written_as_it_was():
    data = database.encode(file(entry()))
    assert b"objective" not in data
    assert database.decode(data, path="f").entries[0].evidence.objective == "burst"


def test_the_nearest_problem_whose_config_runs_is_used_and_its_distance_told():
    write(
        shipped(),
        entry(m=32, tile=4),
        entry(m=128, tile=128),  # as near, but cannot run at m = 64
        entry(m=256, tile=8),
        entry(m=65536, tile=2),
    )
    found = resolve(64)
    assert (found.source, found.config, found.distance) == ("near", Config(4), 1.0)
    assert resolve(96).distance == pytest.approx(math.log2(256 / 96))
    assert ("near", "tile=128 exceeds m=96") in [(source, what.rpartition(": ")[2]) for source, what in resolve(96).tried]


def test_a_near_entry_that_the_model_puts_behind_the_default_is_passed_over():
    write(shipped(), entry(m=32, tile=4), entry(m=256, tile=2))
    slow_for_4 = dataclasses.replace(SPEC, cost=lambda problem, config, gpu: 1.2 if config.tile == 4 else 1.0)
    found = resolution.resolve(slow_for_4, Problem(64), GPU)
    assert (found.source, found.config) == ("near", Config(2))
    assert any("modelled at 1200000.0 us here, the default at 1000000.0 us" in what for _, what in found.tried)
    assert resolution.resolve(slow_for_4, Problem(32), GPU).config == Config(4)  # measured for exactly this problem


def test_a_near_entry_promises_what_it_gained_over_the_default_there_as_the_model_changes_it():
    def chosen(default_us, slow=()):
        """Where tile=4 is modelled 1.5 % behind the default for the `slow` problems."""
        write(user(), entry(m=32, tile=4, default_us=default_us))
        cost = lambda problem, config, gpu: 1.015 if config.tile == 4 and problem.m in slow else 1.0  # noqa: E731
        return resolution.resolve(dataclasses.replace(SPEC, cost=cost), Problem(64), GPU)

    assert chosen(10.5).config == Config(4)
    assert chosen(10.0).source == "default"
    assert chosen(10.05).source == "default"  # 1.005x there is 1.0025x here, one unit away
    assert chosen(10.1, slow=(32, 64)).config == Config(4)
    found = chosen(10.1, slow=(64,))
    assert found.source == "default"
    assert any("1.010x as fast as the default there, which promises 0.990x here" in what for _, what in found.tried)
    write(user(), entry(m=32, tile=1, default_us=10.0))
    assert resolve().source == "near"  # the default, measured there as the best


def test_a_near_entry_whose_default_was_not_timed_is_used_unless_the_model_puts_it_behind():
    def chosen(us):
        """Where tile=4 is modelled at `us`, other configs at 1 us; one that gained much is farther away."""
        write(user(), entry(m=32, tile=4, default_us=None), entry(m=256, tile=2, default_us=20.0))
        cost = lambda problem, config, gpu: us * 1e-6 if config.tile == 4 else 1e-6  # noqa: E731
        return resolution.resolve(dataclasses.replace(SPEC, cost=cost), Problem(64), GPU)

    assert chosen(1.0).config == Config(4)
    found = chosen(1.01)
    assert (found.source, found.config) == ("default", Config(1))
    assert any("modelled at 1.0 us here, the default at 1.0 us" in what for _, what in found.tried)


def test_an_entry_of_another_kernel_version_is_passed_over_even_if_its_fields_were_others():
    old = evidence(kernel_version=1)
    write(user(), Entry({"m": 64}, {"rows": 3}, old), Entry({"length": 1}, {"rows": 3}, old))
    found = resolve()
    assert found.source == "default"
    assert any("for kernel version 1, not 2" in what for _, what in found.tried)


@pytest.mark.parametrize(
    "data",
    [
        b"{",
        changed(schema=2),
        changed(gpu="h20"),
    ],
)
def test_a_broken_user_file_warns_once_and_the_call_goes_on(data):
    write(shipped(), entry(tile=5))
    user().parent.mkdir(parents=True)
    user().write_bytes(data)
    with pytest.warns(UserWarning, match="goes on without this file") as caught:
        assert resolve().config == Config(5)
    assert str(user()) in str(caught[0].message)
    assert resolve(65).config == Config(5)  # and no second warning, which would be an error
    assert user().read_bytes() == data


BROKEN = {  # entries as fields that `changed` takes, and what is wrong with them
    "another type": ({"config": {"tile": "8"}}, "Expected `int`, got `str`"),
    "no field": ({"config": {}}, r"lacks ['tile']"),
    "a bool": ({"problem": {"m": True}}, "Expected `int`, got `bool`"),
    "negative": ({"problem": {"m": -1}}, "m=-1 must be at least 0"),
    "what no call has": ({"problem": {"m": 0}}, "m=0: there is nothing to scale"),
}


@pytest.mark.parametrize(("changes", "reason"), BROKEN.values(), ids=BROKEN)
def test_a_broken_entry_is_passed_over_with_one_warning_and_named_by_validate_and_the_others_count(changes, reason):
    """`distance` of this op divides by m: no problem reaches it that no call could have."""
    user().parent.mkdir(parents=True)
    user().write_bytes(changed(**changes))
    with pytest.warns(UserWarning, match="goes on without this entry: see `mgpu-tune validate`") as caught:
        assert (resolve(128).source, resolve(128).config) == ("user", Config(8))
    assert reason in str(caught[0].message)
    assert str(user()) in str(caught[0].message)
    assert resolve(130).source == "near"  # and no second warning, which would be an error
    (fault,) = database.validate(user(), SPEC)
    assert reason in fault


@pytest.mark.parametrize("changes", [changes for changes, _ in BROKEN.values()], ids=BROKEN)
def test_a_broken_entry_of_a_file_that_is_named_does_not_stop_another_problem(changes, tmp_path, monkeypatch):
    path = tmp_path / "scale.json"
    path.write_bytes(changed(**changes))
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(path))
    assert resolve(128).source == "environment"
    monkeypatch.delenv("MGPU_OPS_CONFIG_PATH")
    with resolution.use_configs(path):
        assert resolve(128).source == "override"


def test_an_entry_slower_than_the_default_in_its_own_run_is_passed_over_and_named_by_validate():
    write(user(), entry(tile=4, median_us=10.1, default_us=10.0), entry(m=128, tile=4, default_us=11.0))
    assert (resolve().source, resolve().config) == ("near", Config(4))
    assert any("10.1 us are more than the 10 us of the default config" in what for _, what in resolve().tried)
    (fault,) = database.validate(user(), SPEC)
    assert "{'m': 64}: 10.1 us are more than the 10 us of the default config in the same run: tune again" in fault


@given(st.lists(st.floats(0, 0.05), min_size=1, max_size=4))
@quiet
def test_validate_names_exactly_the_entries_whose_error_is_above_the_tolerance(errors):
    with tempfile.TemporaryDirectory() as folder:
        rows = [entry(m=64 + i, error=error) for i, error in enumerate(errors)]
        faults = database.validate(write(Path(folder, "scale.json"), entry(m=8, error=None), *rows), SPEC)
    named = [m for m in range(64, 68) if any(f"{{'m': {m}}}" in fault for fault in faults)]
    assert named == [64 + i for i, error in enumerate(errors) if error > 0.01]
    assert len(faults) == len(named)
    assert all("is above 0.01, the tolerance of scale: tune again" in fault for fault in faults)


def test_what_a_user_names_explicitly_raises_if_it_cannot_be_used(tmp_path, monkeypatch):
    with pytest.raises(ValueError, match=r"argument cannot run .* tile=100 exceeds m=64"):
        resolve(config=Config(100))
    with pytest.raises(TypeError, match=r"must be a .*Config"):
        resolve(config={"tile": 1})
    with (
        resolution.use_configs({"scale": Config(100)}),
        pytest.raises(ValueError, match="override cannot run"),
    ):
        resolve()
    path = write(tmp_path / "scale.json", entry(tile=100), entry(m=1, tile=1, kernel_version=1))
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(path))
    with pytest.raises(ValueError, match=r"environment: measured .* cannot run"):
        resolve()
    with pytest.raises(DatabaseError, match="for kernel version 1, not 2: tune again"):
        resolve(1)
    path.write_bytes(b"{")
    with pytest.raises(DatabaseError, match="corrupt"):
        resolve()
    path.write_bytes(changed(gpu="h20"))
    with pytest.raises(DatabaseError, match="h20"):
        resolve()
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(tmp_path / "none.json"))
    with pytest.raises(DatabaseError, match="does not exist: correct or unset"):
        resolve()


def test_the_environment_may_name_several_files_and_directories(tmp_path, monkeypatch):
    empty = tmp_path / "empty"
    empty.mkdir()
    other_op = tmp_path / "matmul.json"
    database.update(other_op, [entry(tile=9)], gpu_key=GPU.key, op="matmul")
    lone = write(tmp_path / "lone.json", entry(m=1, tile=1))
    write(tmp_path / "dir" / GPU.key / "scale.json", entry(tile=4), entry(tile=3, kind="modelled"))
    paths = (empty, other_op, lone, tmp_path / "dir")
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", os.pathsep.join(map(str, paths)))
    assert (resolve().config, resolve().source) == (Config(4), "environment")
    assert resolve(1).path == lone
    assert resolve(2).source != "environment"  # only exact problems: nothing here is for m = 2


def test_a_changed_file_is_noticed_even_within_one_tick_of_the_clock():
    write(user(), entry(tile=4))
    assert resolve().config == Config(4)
    stat = user().stat()
    write(user(), entry(tile=5))
    os.utime(user(), ns=(stat.st_atime_ns, stat.st_mtime_ns))
    assert user().stat().st_size == stat.st_size
    assert resolve().config == Config(5)


def test_each_choice_is_logged_once(caplog):
    caplog.set_level(logging.INFO, "mgpu_ops")
    for _ in range(2):
        resolve(64)
        resolve(128)
        resolve(64, Config(2))
    assert [record.getMessage() for record in caplog.records] == [
        "scale Problem(m=64) on h200: Config(tile=1) from default",
        "scale Problem(m=128) on h200: Config(tile=1) from default",
    ]


# --- use_configs


def test_nested_overrides_ask_the_innermost_first_and_end_with_their_block(tmp_path):
    path = write(tmp_path / "scale.json", entry(m=1, tile=1), entry(m=2, tile=2))
    outer = resolution.use_configs({"scale": Config(8), "other": Config(9)})
    middle = resolution.use_configs({"scale": [(Problem(64), Config(4))]})
    with outer:
        with middle, resolution.use_configs(path):
            path.unlink()  # was read on entry
            assert (resolve(2).config, resolve(2).path) == (Config(2), path)
            assert resolve(64).config == Config(4)
            assert resolve(65).config == Config(8)
        assert resolve(64).config == Config(8)
    assert resolve(64).source == "default"


@pytest.mark.parametrize("bad", [3, {"scale": 8}, {"scale": []}, {"scale": [Config(1)]}, {"scale": [(64, Config(1))]}])
def test_use_configs_refuses_what_is_no_config(bad):
    with pytest.raises(TypeError, match="use_configs"), resolution.use_configs(bad):
        pass


def test_a_jitted_function_is_traced_again_exactly_when_the_override_changes(tmp_path):
    traced = []

    @jax.jit
    def f(x):
        traced.append(resolve().config.tile)
        return x

    def call(*layers):
        with contextlib.ExitStack() as stack:
            for layer in layers:
                stack.enter_context(resolution.use_configs(layer))
            f(jnp.zeros(1))
            f(jnp.zeros(1))

    path = write(tmp_path / "scale.json", entry(tile=5))
    for _ in range(2):  # entering an equal override again finds the old trace
        call()
        call({"scale": Config(2)})
        call({"scale": Config(2)}, {"scale": [(Problem(64), Config(3))]})
        call(path)
        assert traced == [1, 2, 3, 5]
    write(path, entry(tile=6))
    call(path)
    assert traced == [1, 2, 3, 5, 6]


# --- explain and validate


def test_explain_tells_the_winner_its_evidence_and_what_was_passed_over():
    write(user(), entry(tile=100))
    write(shipped(), entry(tile=8))
    text = resolution.explain(SPEC, Problem(64), GPU)
    assert "config    Config(tile=8)" in text
    assert f"from      shipped: measured for this problem, in {shipped()}" in text
    assert "measured 10 us, spread 0.1 us, on NVIDIA H200; 1.5x as fast as the default" in text
    assert "1.25x as fast as xla (12.5 us); error 0.001; 32 trials on 2025-11-20" in text
    assert f"user: {user()}: 1 entries, measured for this problem" in text
    assert f"user: {user()}: measured for this problem passed over: tile=100 exceeds m=64" in text
    assert f"near, distance 1: measured for m=64, in {shipped()}" in resolution.explain(SPEC, Problem(128), GPU)
    assert "from      argument" in resolution.explain(SPEC, Problem(128), GPU, Config(2))


def test_explain_counts_trials_in_the_singular_where_there_is_one():
    write(user(), entry(trials=1))
    assert "; 1 trial on 2025-11-20" in resolution.explain(SPEC, Problem(64), GPU)


def test_validate_lists_every_fault_of_a_file(tmp_path):
    path = write(tmp_path / "scale.json", entry(), entry(m=128, gpu="NVIDIA H200", kind="modelled"))
    assert database.validate(path, SPEC) == database.validate(path, None) == []
    write(
        path,
        entry(m=1, tile=2),
        entry(m=2, tile=2, kernel_version=1),
        entry(m=3, gpu="NVIDIA H20"),
        Entry({"m": 4}, {"tile": True}, evidence()),
    )
    faults = database.validate(path, SPEC)
    assert len(faults) == 4
    assert all(str(path) in fault for fault in faults)
    for fault, reason in zip(
        faults,
        ("tile=2 exceeds m=1", "kernel version 1, not 2", "'NVIDIA H20'", "got `bool`"),
        strict=True,
    ):
        assert reason in fault
    assert len(database.validate(path, None)) == 1
    path.write_bytes(changed(gpu="abacus"))
    assert "gpu='abacus' is not a GPU in the table" in database.validate(path, SPEC)[0]
    path.write_bytes(b"{")
    assert "corrupt" in database.validate(path, SPEC)[0]


# --- places


def test_the_users_directory_follows_the_platform_unless_the_environment_names_one(monkeypatch):
    assert user().parts[-3:] == ("user", "h200", "scale.json")
    monkeypatch.delenv("MGPU_OPS_CONFIG_DIR")
    monkeypatch.setenv("XDG_DATA_HOME", "/data")
    if sys.platform == "linux":
        assert user() == Path("/data/mgpu_ops/h200/scale.json")


def test_importing_the_database_starts_no_backend_and_finds_the_shipped_files():
    code = (
        "import sys, mgpu_ops.registry.database as d\n"
        "from jax._src import xla_bridge\n"
        "assert not xla_bridge._backends and 'platformdirs' not in sys.modules\n"
        "print(d.shipped_path('h200', 'matmul'))"
    )
    root = Path(__file__).parents[3]
    environment = os.environ | {"PYTHONPATH": str(root)}
    done = subprocess.run([sys.executable, "-c", code], env=environment, capture_output=True, text=True, check=True)
    assert Path(done.stdout.strip()) == root / "mgpu_ops/configs/h200/matmul.json"
