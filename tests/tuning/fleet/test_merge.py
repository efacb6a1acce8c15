"""Joining, comparing, handing on and renewing databases: `mgpu-tune merge`, `diff`, `export`, `validate --stale`, `retune`."""

from __future__ import annotations

import argparse
import csv
import dataclasses
import itertools
import json
import subprocess
import sys
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import CollectiveProblem, MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database, resolution
from mgpu_ops.registry.database import Entry, Evidence
from mgpu_ops.tuning import neighbours
from mgpu_ops.tuning.cli import retune
from mgpu_ops.tuning.fleet import merge

H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
Command = Callable[..., Any]


def entry(
    size: int = 512, us: float = 12.5, kind: Any = "measured", *, config: dict[str, Any] | None = None, **more: Any
) -> Entry:
    problem = MatmulProblem(size, size, size)
    fields: dict[str, Any] = {
        "gpu": H200.name, "driver": "1.2", "jax": jax.__version__, "jaxlib": "0.11.2", "cuda": "13000",
        "kernel_version": MATMUL.version, "spread_us": 0.5, "default_us": max(15.0, us), "baseline": "xla", "baseline_us": 25.0,
        "error": 0.001, "trials": 48, "seed": 0, "date": "2025-11-20",
    }  # fmt: skip
    evidence = Evidence(kind=kind, median_us=us, **(fields | more))
    chosen = dataclasses.replace(MATMUL.default(problem, H200), **(config or {}))
    return database.to_entry(problem, chosen, evidence)


def store(path: Path, *entries: Entry) -> Path:
    database.update(path, entries, gpu_key="h200", op="matmul")
    return path


def stored(path: Path) -> list[tuple[int, str, float]]:
    return [(e.problem["m"], e.evidence.kind, e.evidence.median_us) for e in database.read(path).entries]  # type: ignore[misc]


# --- the rule


def test_a_sustained_entry_stays_beside_one_of_bursts() -> None:
    burst, slower = entry(us=10.0), entry(us=11.0)
    sustained, better = (entry(us=us, objective="sustained", default_us=None) for us in (14.0, 13.0))
    assert merge.best([slower, sustained], [burst, better]) == (burst, better)
    conflicts = merge.conflicts([slower, sustained], [burst, better])
    assert [(c.kept, c.dropped) for c in conflicts] == [(burst, slower), (better, sustained)]
    key = ("h200", "matmul")
    assert [d.what for d in merge.differences({key: [burst]}, {key: [burst, better]})] == ["added"]


POOL = [
    entry(size, us, kind, config={"raster_width": width}, kernel_version=version, spread_us=spread)
    for size, us, kind, width, version, spread in itertools.product(
        [256, 512], [10.0, 11.0], ["measured", "modelled"], [1, 8], [MATMUL.version - 1, MATMUL.version], [0.5, 1.0]
    )
]
entries = st.sampled_from(POOL)
databases = st.lists(entries, max_size=8)


@given(databases, databases, databases)
def test_no_order_of_files_matters(a: list[Entry], b: list[Entry], c: list[Entry]) -> None:
    assert merge.best(a, b) == merge.best(b, a) == merge.best([*b, *a])
    assert merge.best(merge.best(a, b), c) == merge.best(a, merge.best(b, c))


@given(databases, databases)
def test_merging_again_changes_nothing(a: list[Entry], b: list[Entry]) -> None:
    merged = merge.best(a, b)
    assert merge.best(merged) == merge.best(merged, merged) == merge.best(merged, a) == merge.best(b, merged) == merged
    assert merge.conflicts(merged) == []


@given(databases, databases)
def test_a_slower_measurement_never_replaces_a_faster_one_and_no_problem_is_lost(a: list[Entry], b: list[Entry]) -> None:
    merged = merge.best(a, b)
    for old in [*a, *b]:
        same = [e for e in merged if e.problem == old.problem]
        comparable = [e for e in same if e.evidence.kernel_version == old.evidence.kernel_version]
        newer = [e for e in same if e.evidence.kernel_version > old.evidence.kernel_version]
        if old.evidence.kind == "measured":
            measured = [e for e in comparable if e.evidence.kind == "measured"]
            assert any(e.evidence.median_us <= old.evidence.median_us for e in measured) or newer
        assert comparable or newer
    assert set(map(repr, merged)) <= set(map(repr, [*a, *b]))  # nothing is made up


@given(databases, databases)
def test_what_is_dropped_is_listed_and_what_is_listed_is_dropped(a: list[Entry], b: list[Entry]) -> None:
    merged, listed = merge.best(a, b), merge.conflicts(a, b)
    assert {repr(e) for e in [*a, *b]} == {repr(e) for e in merged} | {repr(c.dropped) for c in listed}
    assert not {repr(e) for e in merged} & {repr(c.dropped) for c in listed}
    assert {repr(c.kept) for c in listed} <= {repr(e) for e in merged}
    assert all(c.kept.problem == c.dropped.problem for c in listed)


@pytest.mark.parametrize(
    ("ours", "theirs", "why"),
    [
        (entry(us=10.0), entry(us=12.0), "1.200x as fast"),
        (entry(us=12.0), entry(us=10.0, kind="modelled"), "measured over modelled"),
        (entry(us=12.0), entry(us=10.0, kernel_version=MATMUL.version - 1), f"kernel version {MATMUL.version} over"),
        (entry(us=10.0, spread_us=0.1), entry(us=10.0), "equally fast"),
    ],
    ids=["faster", "measured", "newer kernel", "tie"],
)
def test_a_conflict_tells_who_wins_and_why(ours: Entry, theirs: Entry, why: str) -> None:
    (conflict,) = merge.conflicts([theirs], [ours])
    assert (conflict.kept, conflict.dropped) == (ours, theirs)
    assert conflict.why.startswith(why)


def test_a_modelled_entry_stays_beside_a_measured_one_of_an_older_kernel() -> None:
    """`resolve` passes the measured one over, and `retune` should still find it."""
    old, new = entry(kernel_version=MATMUL.version - 1), entry(us=20.0, kind="modelled")
    assert set(map(repr, merge.best([old], [new]))) == {repr(old), repr(new)}


# --- merge


def test_merge_keeps_the_fastest_of_each_problem_and_lists_both_times(tmp_path: Path, mgpu_tune: Command) -> None:
    a = store(tmp_path / "a.json", entry(us=12.5), entry(1024, us=30.0))
    b = store(tmp_path / "b.json", entry(us=11.0), entry(2048, us=99.0))
    into = tmp_path / "all.json"
    done = mgpu_tune("merge", a, b, "--into", into)
    assert (done.code, done.err) == (0, "")
    assert stored(into) == [(512, "measured", 11.0), (1024, "measured", 30.0), (2048, "measured", 99.0)]
    assert "kept 11 us measured on 2025-11-20, dropped 12.5 us measured on 2025-11-20 (1.136x as fast)" in done.out
    assert f"{into} holds 3 of matmul on h200, 0 before" in done.out
    assert "1 conflict, 0 left out" in done.out


def test_merge_joins_what_is_there_already(tmp_path: Path, mgpu_tune: Command) -> None:
    a, into = store(tmp_path / "a.json", entry(us=12.5)), store(tmp_path / "all.json", entry(us=11.0), entry(1024))
    assert mgpu_tune("merge", a, "--into", into).code == 0
    assert stored(into) == [(512, "measured", 11.0), (1024, "measured", 12.5)]


def test_a_dry_run_tells_the_same_and_writes_nothing(tmp_path: Path, mgpu_tune: Command) -> None:
    a, b = store(tmp_path / "a.json", entry(us=12.5)), store(tmp_path / "b.json", entry(us=11.0))
    before = b.read_bytes()
    dry = json.loads(mgpu_tune("merge", a, "--into", b, "--dry-run", "--json").out)
    assert b.read_bytes() == before
    assert json.loads(mgpu_tune("merge", a, "--into", b, "--json").out) == dry | {"dry_run": False}
    assert [c["dropped"]["evidence"]["median_us"] for c in dry["conflicts"]] == [12.5]
    assert [(f["before"], f["after"]) for f in dry["files"]] == [(1, 1)]
    assert "would hold" in mgpu_tune("merge", a, "--into", b, "--dry-run").out


def test_directories_merge_by_gpu_and_op(tmp_path: Path, mgpu_tune: Command) -> None:
    store(tmp_path / "a" / "h200" / "matmul.json", entry(us=12.5))
    store(tmp_path / "b" / "h200" / "matmul.json", entry(us=11.0))
    database.update(tmp_path / "b" / "h100-sxm" / "matmul.json", [], gpu_key="h100-sxm", op="matmul")
    assert mgpu_tune("merge", tmp_path / "a", tmp_path / "b", "--into", tmp_path / "all").code == 0
    assert stored(tmp_path / "all" / "h200" / "matmul.json") == [(512, "measured", 11.0)]
    assert (tmp_path / "all" / "h100-sxm" / "matmul.json").exists()


def test_merge_leaves_out_what_no_one_should_get(tmp_path: Path, mgpu_tune: Command) -> None:
    """A config that cannot run, and evidence of another GPU, however fast: also where the database has it already."""
    bad = entry(us=1.0, config={"tile_m": 100})
    foreign = entry(1024, us=1.0, gpu="NVIDIA H20")
    a = store(tmp_path / "a.json", bad, foreign, entry(2048))
    b = store(tmp_path / "b.json", entry(us=11.0), entry(1024, us=12.0))
    for first, into in ((a, b), (b, a)):
        place = tmp_path / f"into-{into.name}"
        place.write_bytes(into.read_bytes())
        done = mgpu_tune("merge", first, "--into", place)
        assert done.code == 1
        assert stored(place) == [(512, "measured", 11.0), (1024, "measured", 12.0), (2048, "measured", 12.5)]
        assert "must be a multiple of 64" in done.out
        assert "evidence of 'NVIDIA H20'" in done.out
        assert mgpu_tune("validate", place).code == 0


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("merge", "none.json", "--into", "x.json"), "none.json: cannot be read"),
        (("merge", "a.json"), "name where they go with --into"),
        (("merge", "a.json", "--storage", "no.journal"), "no.journal: there is no such journal"),
        (("merge", "--into", "x.json"), "name the databases to join, or the --storage of a fleet"),
        (("merge", "--storage"), "name the storage with --storage, or $MGPU_OPS_STORAGE"),
        (("merge", "--storage", "postgresql://u:hunter2@h/d"), "put the URL into $MGPU_OPS_STORAGE"),
        (("export", "--storage", "no.journal", "--output", "o"), "no.journal: there is no such journal"),
        (("merge", "--storage", "line.json", "--into", "x.json"), "line.json is no journal of optuna, or is corrupt"),
        (("export", "--storage", "line.json", "--output", "o"), "line.json is no journal of optuna, or is corrupt"),
        (("merge", "empty", "--into", "x.json"), "has no <gpu>/<op>.json inside"),
        (("merge", "a.json", "other.json", "--into", "x.json"), "one file holds one op on one GPU, and these are"),
        (("merge", "a.json", "--into", "other.json"), "is for GPU 'h100-sxm', not 'h200'"),
        (("merge", "a.json", "softmax.json", "--into", "all"), "op 'softmax' is not one of"),
        (("merge", "broken.json", "--into", "x.json"), "broken.json: is corrupt"),
        (("diff", "a.json", "none.json"), "none.json: cannot be read"),
        (("export", "--gpu", "h20", "--output", "x"), "nothing of that is tuned for h20"),
        (("export", "--gpu", "h200", "--output", "a.json"), "is a file: name a directory for --format json"),
        (("export", "softmax", "--output", "x"), "op 'softmax' is not one of"),
        (("export", "--gpu", "v100", "--output", "x"), "gpu='v100' is not a GPU"),
        (("retune", "--stale"), "no Hopper GPU here to measure on"),
        (("retune", "--database", "none.json"), "none.json: cannot be read"),
    ],
    ids=lambda value: " ".join(value) if isinstance(value, tuple) else "",
)
def test_a_wrong_request_names_the_file_and_the_way_out(
    words: Sequence[str], message: str, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    store(Path("a.json"), entry())
    database.update("other.json", [], gpu_key="h100-sxm", op="matmul")
    database.update("softmax.json", [], gpu_key="h200", op="softmax")
    Path("broken.json").write_text("{")
    Path("line.json").write_text(json.dumps(json.loads(Path("a.json").read_text())))
    Path("empty").mkdir()
    done = mgpu_tune(*words)
    assert done.code == 2
    assert message in done.err
    assert "Traceback" not in done.err
    assert not Path("x.json").exists()


# --- diff


def test_diff_tells_what_is_added_removed_and_changed_with_times_and_ratio(tmp_path: Path, mgpu_tune: Command) -> None:
    same = entry(256)
    a = store(tmp_path / "a.json", same, entry(us=12.0), entry(1024), entry(4096, kernel_version=MATMUL.version - 1))
    b = store(tmp_path / "b.json", same, entry(us=10.0, config={"raster_width": 16}), entry(2048), entry(4096, us=10.0))
    done = mgpu_tune("diff", a, b)
    assert done.code == 0
    assert "1 added, 1 removed, 2 changed" in done.out
    assert "m=512 n=512 k=512 dtype=bfloat16: measured 12 us -> 10 us (1.200x as fast)" in done.out
    assert "-> 16" in done.out
    found = json.loads(mgpu_tune("diff", a, b, "--json").out)["differences"]
    assert [(d["what"], d["problem"]["m"], d["ratio"]) for d in found] == [
        ("changed", 512, 1.2),
        ("removed", 1024, None),
        ("added", 2048, None),
        ("changed", 4096, None),  # times of two kernels do not compare
    ]
    assert json.loads(mgpu_tune("diff", a, a, "--json").out)["differences"] == []


# --- export


def test_export_is_a_directory_that_resolve_takes_on_another_machine(
    tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    store(database.user_path("h200", "matmul"), entry(config={"raster_width": 16}))
    done = mgpu_tune("export", "--gpu", "h200", "--output", tmp_path / "tuned")
    assert (done.code, done.err) == (0, "")
    assert f"use it with MGPU_OPS_CONFIG_PATH={tmp_path / 'tuned'}" in done.out
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "elsewhere"))
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(tmp_path / "tuned"))
    found = resolution.resolve(MATMUL, MatmulProblem(512, 512, 512), H200)
    assert (found.source, found.config.raster_width) == ("environment", 16)
    assert mgpu_tune("validate", *(tmp_path / "tuned").rglob("*.json")).code == 0


def test_a_file_with_another_name_of_its_gpu_is_joined_with_the_others_under_the_gpus_key(
    tmp_path: Path, mgpu_tune: Command
) -> None:
    """A folder named "NVIDIA H200" is one that no lookup would find."""
    a, b = store(tmp_path / "a.json", entry(us=12.5)), store(tmp_path / "NVIDIA H200" / "matmul.json", entry(us=11.0))
    for path in (a, b):
        path.write_text(path.read_text().replace('"gpu":"h200"', '"gpu":"NVIDIA H200"'))
    assert mgpu_tune("merge", a, tmp_path, "--into", tmp_path / "all").code == 0
    assert [str(path.relative_to(tmp_path)) for path in (tmp_path / "all").rglob("*.json")] == ["all/h200/matmul.json"]
    assert stored(tmp_path / "all" / "h200" / "matmul.json") == [(512, "measured", 11.0)]
    user = database.user_path("h200", "matmul")
    user.parent.mkdir(parents=True)
    b.rename(user)
    assert mgpu_tune("export", "matmul", "--gpu", "h200", "--own", "--output", tmp_path / "tuned").code == 0
    assert stored(tmp_path / "tuned" / "h200" / "matmul.json") == [(512, "measured", 11.0)]


@pytest.mark.parametrize("command", ["validate", "merge", "export"])
def test_a_problem_of_ten_million_gpus_is_named_at_once(command: str, tmp_path: Path, mgpu_tune: Command) -> None:
    spec = spec_of("all_reduce")
    problem = CollectiveProblem(2**19, 4)
    evidence = entry().evidence
    good = database.to_entry(problem, spec.default(problem, H200), evidence)
    bad = database.to_entry(dataclasses.replace(problem, devices=10**7), spec.default(problem, H200), evidence)
    path = database.user_path("h200", "all_reduce")
    database.update(path, [good, bad], gpu_key="h200", op="all_reduce")
    words = {
        "validate": (path,),
        "merge": (path, "--into", tmp_path / "all.json"),
        "export": ("all_reduce", "--own", "--output", tmp_path / "tuned"),
    }
    done = mgpu_tune(command, *words[command])
    assert done.code == 1
    assert "devices=10000000: the kernels are for up to 8 GPUs of one host" in done.out


def test_export_leaves_out_what_resolve_would_refuse(tmp_path: Path, mgpu_tune: Command) -> None:
    store(database.user_path("h20", "matmul"))
    path = database.user_path("h20", "matmul")
    good, old = (entry(size, gpu="NVIDIA H20", kernel_version=v) for size, v in ((512, MATMUL.version), (1024, 99)))
    path.unlink()
    database.update(path, [good, old], gpu_key="h20", op="matmul")
    done = mgpu_tune("export", "--gpu", "h20", "--output", tmp_path / "tuned")
    assert done.code == 1
    assert "for kernel version 99, not" in done.out
    assert stored(tmp_path / "tuned" / "h20" / "matmul.json") == [(512, "measured", 12.5)]


def test_export_takes_ones_own_or_the_measured_only(tmp_path: Path, mgpu_tune: Command) -> None:
    store(database.user_path("h200", "matmul"), entry(768), entry(1280, kind="modelled"))
    for number, (words, sizes) in enumerate(
        {("--own",): [768, 1280], ("--own", "--kind", "measured"): [768], ("--own", "--kind", "modelled"): [1280]}.items()
    ):
        place = tmp_path / str(number)
        assert mgpu_tune("export", "--gpu", "h200", *words, "--output", place).code == 0
        assert [m for m, *_ in stored(place / "h200" / "matmul.json")] == sizes
    assert mgpu_tune("export", "--gpu", "h200", "--output", tmp_path / "all").code == 0
    assert len(stored(tmp_path / "all" / "h200" / "matmul.json")) > 2


def test_export_as_one_table_has_a_row_an_entry_of_every_op(tmp_path: Path, mgpu_tune: Command) -> None:
    store(database.user_path("h200", "matmul"), entry(768, us=12.5))
    path = tmp_path / "all.csv"
    done = mgpu_tune("export", "--gpu", "h200", "--format", "csv", "--output", path, "--json")
    with path.open() as stream:
        rows = list(csv.DictReader(stream))
    assert json.loads(done.out)["files"] == [{"path": str(path), "entries": len(rows)}]
    assert {row["op"] for row in rows} >= {"matmul", "flash_attention"}
    (ours,) = [row for row in rows if row["op"] == "matmul" and row["problem.m"] == "768"]
    assert (ours["gpu"], ours["device"], ours["median_us"], ours["kind"]) == ("h200", "NVIDIA H200", "12.5", "measured")
    assert ours["config.tile_m"] == str(MATMUL.default(MatmulProblem(768, 768, 768), H200).tile_m)
    assert ours["problem.causal"] == ""


# --- stale


OLD = "0.0.1"


def test_validate_stale_counts_what_another_jax_left_which_is_no_fault(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(tmp_path / "a.json", entry(), entry(1024, jax=OLD), entry(2048, jax=OLD))
    told = f"tuned with jax {OLD}, not {jax.__version__}"
    plain, stale, details = (mgpu_tune("validate", path, *words) for words in ((), ("--stale",), ("--stale", "--details")))
    assert (plain.code, plain.out) == (0, f"{path}: ok\n")
    tail = "2 entries of another jax: used all the same; `mgpu-tune retune --stale` tunes them again\n"
    assert (stale.code, stale.out) == (0, f"{path}: ok; 2 {told}\n{tail}")
    head, *lines, last = details.out.splitlines(keepends=True)
    assert (details.code, head + last) == (0, stale.out)
    assert [("'m': 1024" in line, "'m': 2048" in line, told in line) for line in lines] == [
        (True, False, True),
        (False, True, True),
    ]
    fresh = mgpu_tune("validate", store(tmp_path / "b.json", entry()), "--stale")
    assert (fresh.code, fresh.out) == (0, f"{tmp_path / 'b.json'}: ok\n")


def test_an_entry_of_another_kernel_version_is_a_fault_and_counted_once(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(tmp_path / "a.json", entry(), entry(1024, jax=OLD), entry(2048, kernel_version=99, jax=OLD))
    for words in ((), ("--stale",)):
        done = mgpu_tune("validate", path, *words)
        assert done.code == 1
        assert f"{path}: 1 fault" in done.out
        assert "for kernel version 99, not" in done.out
    assert "; 1 tuned with jax" in done.out
    (file,) = json.loads(mgpu_tune("validate", path, "--stale", "--json").out)["files"]
    assert (len(file["faults"]), len(file["stale"])) == (1, 1)


def test_validate_stale_of_what_is_shipped_is_a_line_a_file(mgpu_tune: Command) -> None:
    files = mgpu_tune("validate").out.splitlines()
    done = mgpu_tune("validate", "--stale")
    assert done.code == 0
    assert len(done.out.splitlines()) <= len(files) + 1
    refused = mgpu_tune("validate", "--details")
    assert (refused.code, refused.err) == (2, "mgpu-tune: --details lists what --stale counts: say --stale too\n")


def test_retune_stale_tunes_those_again_and_no_others(tmp_path: Path, mgpu_tune: Command) -> None:
    path = store(
        tmp_path / "a.json",
        entry(kind="modelled"),
        entry(1024, kind="modelled", jax=OLD),
        entry(2048, kind="modelled", kernel_version=99),
    )
    words = ("retune", "--stale", "--database", path, "--trials", 3, "--gpu", "h200")
    done = mgpu_tune(*words)
    assert (done.code, done.err) == (0, "")
    assert "times are MODELLED, not measured" in done.out
    assert "2 problems tuned again, 0 failed, 0 skipped" in done.out
    trials = {e.problem["m"]: e.evidence.trials for e in database.read(path).entries}
    assert trials == {512: 48, 1024: 3, 2048: 3}
    assert mgpu_tune("validate", path, "--stale").code == 0
    assert "0 problems tuned again" in mgpu_tune(*words).out


def test_retune_skips_problems_that_the_op_no_longer_has(tmp_path: Path, mgpu_tune: Command) -> None:
    old = entry(kernel_version=99)
    path = store(tmp_path / "a.json", Entry({"rows": 5}, old.config, old.evidence))
    done = mgpu_tune("retune", "--stale", "--database", path, "--gpu", "h200", "--trials", 2)
    assert done.code == 1
    assert "skipped: " in done.out
    assert "unknown ['rows']" in done.out
    assert "0 problems tuned again, 0 failed, 1 skipped" in done.out


def test_a_problem_is_stale_until_it_has_an_entry_as_good_as_a_new_one() -> None:
    old, new = entry(jax=OLD), entry(kind="modelled")
    assert retune._problems(MATMUL, [old, entry()], "measured", True) == []
    assert retune._problems(MATMUL, [old, new], "modelled", True) == []
    assert retune._problems(MATMUL, [old, new], "measured", True) == [old.problem]
    assert retune._problems(MATMUL, [entry(), old], "measured", False) == [old.problem]


# --- several at once


def test_two_merges_at_once_lose_nothing(tmp_path: Path) -> None:
    """Each joins its own half into one file, many times: under the lock of every update."""
    code = (
        "import sys\n"
        "from pathlib import Path\n"
        "from mgpu_ops.registry import database\n"
        "from mgpu_ops.tuning.fleet import merge as merging\n"
        "source, into = map(Path, sys.argv[1:])\n"
        "for e in database.read(source).entries:\n"
        "    database.update(into, [e], gpu_key='h200', op='matmul', join=merging.best)\n"
    )
    halves = [
        store(tmp_path / f"{name}.json", *(entry(64 * (i + 1), us=us + i) for i in range(40)), entry(8192 + extra))
        for name, us, extra in (("a", 10.0, 0), ("b", 9.0, 64))
    ]
    into = tmp_path / "all.json"
    running = [subprocess.Popen([sys.executable, "-c", code, str(half), str(into)]) for half in halves]
    assert [process.wait(60) for process in running] == [0, 0]
    assert [e.evidence.median_us for e in database.read(into).entries][:40] == [9.0 + i for i in range(40)]
    assert len(database.read(into).entries) == 42


def test_retune_takes_as_many_gpus_as_an_ops_problems_take_and_are_here(
    own_database: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    spec = spec_of("all_reduce")
    old = entry(jax=OLD)
    entries = []
    for devices in (2, 4):
        problem = CollectiveProblem(1024, devices)
        entries.append(database.to_entry(problem, spec.default(problem, H200), old.evidence))
    path = own_database / "h200" / "all_reduce.json"
    database.update(path, entries, gpu_key="h200", op="all_reduce")
    for visible, gpus in ((1, 1), (2, 2), (3, 2), (8, 4)):
        monkeypatch.setattr(neighbours, "visible", lambda n=visible: [str(number) for number in range(n)])
        assert retune._gpus(spec, None) == retune._gpus(spec, database.read(path)) == gpus
    assert retune._gpus(MATMUL, None) == 1
    arguments = argparse.Namespace(database=None, stale=True)
    problems = retune._problems(spec, retune._entries(spec, "h200", None, arguments), "measured", stale=True)
    here: Any = argparse.Namespace(kind="measured", gpu=H200)
    skipped: list[dict[str, Any]] = []
    jobs = retune._jobs(spec, problems, here, 2, skipped)
    assert [job.problem.devices for job in jobs if job.problem.size == 1024] == [2]  # others are shipped
    assert {job.problem.devices for job in jobs} == {2}
    assert "takes 4 GPUs: retune all_reduce by itself where so many are" in skipped[0]["reason"]
