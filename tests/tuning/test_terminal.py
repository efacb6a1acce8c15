"""Text of others in the answers of `mgpu-tune`: names in files and paths, jobs in a storage."""

from __future__ import annotations

import functools
import os
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st
from rich.table import Table

from mgpu_ops import MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning import cli, terminal
from mgpu_ops.tuning.cli import session, worker

Command = Callable[..., Any]
EVIL = "[/x][red]\x1b]0;title\x07\x1b[2J\nmgpu-tune: done\r\u202e\x9b"
TAME = r"[/x][red]\x1b]0;title\x07\x1b[2J\nmgpu-tune: done\r\u202e\x9b"
H200 = gpu.find("h200")
MATMUL = spec_of("matmul")


def test_a_number_of_things_is_worded_as_one_or_as_several():
    assert [terminal.count(number, "trial") for number in (0, 1, 2)] == ["0 trials", "1 trial", "2 trials"]
    assert [terminal.count(number, "entry", "entries") for number in (0, 1, 2)] == ["0 entries", "1 entry", "2 entries"]


def entry(size: int = 512, text: str = EVIL, **evidence: Any) -> database.Entry:
    """A good problem and config, with a text of others in the evidence."""
    found = database.Evidence(
        kind="measured", gpu=H200.name, driver=text, jax=text, jaxlib=text, cuda=text, kernel_version=MATMUL.version,
        median_us=12.5, spread_us=0.5, default_us=15.0, baseline=text, baseline_us=25.0, error=0.001, trials=48, seed=0,
        date="2025-11-20",
    )  # fmt: skip
    problem = MatmulProblem(size, size, size)
    return database.to_entry(problem, MATMUL.default(problem, H200), msgspec.structs.replace(found, **evidence))


def odd(text: str = EVIL) -> database.Entry:
    """An entry whose problem and config are of something else."""
    return database.Entry({text: text}, {text: text}, entry().evidence)


def tame(*texts: str) -> str:
    """Checks that nothing in the output steers a terminal; returns it."""
    shown = "".join(texts)
    assert all(c == "\n" or c.isprintable() for c in shown), ascii(shown)
    assert "\nmgpu-tune: done" not in shown
    return shown


@given(st.text())
def test_a_printable_text_is_one_line_and_keeps_what_prints(text: str) -> None:
    shown = terminal.printable(text)
    assert shown.isprintable()
    assert (shown == text) == text.isprintable()


def test_a_name_with_bytes_that_are_no_text_is_printable() -> None:
    assert terminal.printable(Path("a\udcff")) == r"a\udcff"
    assert terminal.printable("Größe 大") == "Größe 大"


def test_a_table_shows_text_as_it_is(capsys: pytest.CaptureFixture[str]) -> None:
    table = Table(title=EVIL, caption=EVIL)
    table.add_column(EVIL, no_wrap=True)
    table.add_row(EVIL)
    table.add_row(":smile: [bold]")
    terminal.console(width=200).print(table)
    shown = tame(capsys.readouterr().out)
    assert shown.count(TAME) == 4
    assert ":smile: [bold]" in shown


def test_work_goes_on_where_the_reader_of_a_pipe_has_gone() -> None:
    reader, writer = os.pipe()
    os.close(reader)
    done = []
    with os.fdopen(writer, "w") as stream:
        console = terminal.console(file=stream)
        for line in range(3):
            console.print(f"line {line}")
            done.append(line)
    assert done == [0, 1, 2]


@pytest.mark.parametrize("where", ["terminal", "pipe"])
def test_show_prints_names_of_entries_and_folders_as_text(
    where: str, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    if where == "terminal":
        wide = functools.partial(terminal.console, force_terminal=True, color_system=None, width=2000)
        monkeypatch.setattr(terminal, "console", wide)
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "[/x]\x1b[2J\n"))
    database.update(database.user_path("h200", "matmul"), [entry(), odd()], gpu_key="h200", op="matmul")
    done = mgpu_tune("show", "matmul", "--gpu", "h200")
    assert done.code == 0, done.err
    shown = tame(done.out, done.err)
    assert r"[/x]\x1b[2J\n" in shown
    assert shown.count(TAME) >= 3


def test_validate_prints_names_of_files_and_faults_as_text(tmp_path: Path, mgpu_tune: Command) -> None:
    path = tmp_path / "[/x]\x1b[2J\n" / "x.json"
    database.update(path, [odd()], gpu_key="h200", op="matmul")
    done = mgpu_tune("validate", path, tmp_path / "\x1bno\n.json")
    assert done.code == 1
    shown = tame(done.out, done.err)
    assert r"[/x]\x1b[2J\n/x.json: 1 fault" in shown
    assert r"/\x1bno\n.json" in shown


def test_which_prints_the_evidence_as_text(tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "[/x]\x1b[2J\n"))
    database.update(database.user_path("h200", "matmul"), [entry()], gpu_key="h200", op="matmul")
    done = mgpu_tune("which", "matmul", "--m", 512, "--n", 512, "--k", 512, "--gpu", "h200")
    assert done.code == 0
    shown = tame(done.out, done.err)
    assert r"[/x]\x1b[2J\n" in shown
    assert TAME in shown


def test_diff_prints_problems_and_configs_as_text(tmp_path: Path, mgpu_tune: Command) -> None:
    changed = msgspec.structs.replace(odd(), config={EVIL: 1})
    for name, entries in (("a.json", [odd(), entry()]), ("b.json", [changed])):
        database.update(tmp_path / name, entries, gpu_key="h200", op="matmul")
    done = mgpu_tune("diff", tmp_path / "a.json", tmp_path / "b.json")
    assert done.code == 0, done.err
    assert TAME in tame(done.out, done.err)


def test_the_error_of_a_command_prints_names_as_text(tmp_path: Path, mgpu_tune: Command) -> None:
    done = mgpu_tune("diff", tmp_path / EVIL.replace("/", ""), tmp_path)
    assert done.code == 2
    assert done.err.count("\n") == 1
    tame(done.out, done.err)


def test_report_names_places_and_skipped_files_as_text(tmp_path: Path, mgpu_tune: Command) -> None:
    path = tmp_path / "[x]\x1b[2J\n" / "x.json"
    database.update(path, [entry(), odd()], gpu_key="h200", op="matmul")
    (path.parent / "\x1bno\n.json").write_text("[]")
    done = mgpu_tune("report", "--from", path.parent, "--no-pictures", "--output", tmp_path / "r.html")
    assert done.code == 0, done.err
    assert r"\x1bno\n.json" in tame(done.out, done.err)
    page = tame((tmp_path / "r.html").read_text())
    assert r"\x1b[2J" in page


def test_a_job_of_a_storage_is_told_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    job = SimpleNamespace(op="matmul", name=EVIL)
    for ended in (
        SimpleNamespace(job=job, entry=None, reason=EVIL),
        SimpleNamespace(job=job, entry=entry(), trials=3, hosts=["a"]),
    ):
        worker.say(worker.sentence(ended, Path("x")))
    shown = tame(capsys.readouterr().out)
    assert shown.count("\n") == 2
    assert TAME in shown


def test_the_bar_of_a_run_shows_a_jobs_name_as_text(capsys: pytest.CaptureFixture[str]) -> None:
    with session.progress_bar() as bar:
        bar.add_task(terminal.printable(f"matmul {EVIL}"), total=1, best="[/x]")
    assert r"[/x][red]\x1b" in capsys.readouterr().out


def test_what_is_asked_wrongly_is_told_first_and_short(mgpu_tune: Command) -> None:
    for command in cli.COMMANDS:
        done = mgpu_tune(command, "--no-such-thing\x1b[2J")
        assert done.code == 2
        first, second = tame(done.out, done.err).splitlines()
        assert first.startswith(f"mgpu-tune {command}: "), first
        assert second == f"see `mgpu-tune {command} --help`"
    first, second = mgpu_tune("--nothing").err.splitlines()
    assert first.startswith("mgpu-tune: ")
    assert second == "see `mgpu-tune --help`"


def test_json_of_a_path_that_is_no_text_is_written_all_the_same(
    tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "a\udcff"))
    database.update(database.user_path("h200", "matmul"), [entry()], gpu_key="h200", op="matmul")
    done = mgpu_tune("show", "matmul", "--gpu", "h200", "--json")
    assert done.code == 0
    assert r"a\\udcff" in done.out
