"""What README and docs/ say: figures are those of the files they name, examples run, commands parse, names and files exist."""

from __future__ import annotations

import argparse
import contextlib
import csv
import functools
import importlib
import importlib.util
import io
import json
import pkgutil
import re
import runpy
import shlex
import sys
import tomllib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import pytest

import mgpu_ops
from mgpu_ops.core import aot, engine
from mgpu_ops.registry import database
from mgpu_ops.tuning import cli
from scripts import figures
from scripts.figures import lines, ops, programs

ROOT = Path(__file__).parents[1]
DOCS = [*(ROOT / name for name in ("README.md", "CONTRIBUTING.md", "SECURITY.md")), *sorted((ROOT / "docs").rglob("*.md"))]
TEXTS = {str(path.relative_to(ROOT)): path.read_text() for path in DOCS}
README, SUPPORT = TEXTS["README.md"], TEXTS["docs/support.md"]

# --- figures


def test_the_page_on_tuning_shows_what_which_says() -> None:
    shown = re.search(r"```\nmgpu-tune (which .*)\n```\n\n```text\n((?:  .*\n)+)```", TEXTS["docs/tuning.md"])
    assert shown is not None
    with contextlib.redirect_stdout(io.StringIO()) as said:
        cli.main(shlex.split(shown[1]))
    for line in shown[2].splitlines():
        assert line.removesuffix("...)") in said.getvalue()


def test_tables_and_the_picture_are_those_of_the_files_they_name() -> None:
    shown = []
    for path in figures.pages():
        text = path.read_text()
        assert figures.of_page(path) == text, f"{path}: run `python -m scripts.figures --write`"
        shown += [name for _, name, _ in figures.MARKS.findall(text)]
    assert sorted(shown) == sorted(figures.TABLES)
    picture = figures.PICTURE.read_text()
    assert figures.picture(ROOT / "results") == picture, "run `python -m scripts.figures --write`"
    assert all(24 <= float(x) <= 616 for x in re.findall(r'<circle cx="([-.\d]+)"', picture)), "a dot beyond its axis"


@pytest.mark.parametrize("name", [name for name in TEXTS if re.match(r"README|docs/(index|support|hopper|ops/|howto/)", name)])
def test_no_ratio_is_typed_beside_the_tables(name: str) -> None:
    assert not re.findall(r"\d\.\d+x", figures.MARKS.sub("", TEXTS[name])), "a ratio that no file holds the page to"


def test_tuned_problems_are_counted_rightly() -> None:
    entries = {op: database.read(path).entries for op, path in shipped().items()}
    tuned = {op: len({database.key_of_fields(entry.problem) for entry in of_op}) for op, of_op in entries.items()}
    (said,) = re.findall(r"^\| tuned \| (.*?) \|$", SUPPORT, re.MULTILINE)
    assert said.startswith(f"{sum(tuned.values())} problems on the H200")
    assert {op: int(count) for count, op in re.findall(r"(\d+) of (\w+)", said)} == tuned
    sustained = [entry for of_op in entries.values() for entry in of_op if entry.evidence.objective == "sustained"]
    assert f"Of an H200 {len(sustained)} such entries are shipped" in TEXTS["docs/tuning.md"]


def shipped() -> dict[str, Path]:
    return {path.stem: path for path in (ROOT / "mgpu_ops/configs/h200").glob("*.json")}


def write(path: Path, rows: list[tuple[str, str, float]]) -> None:
    with path.open("w", newline="") as stream:
        csv.writer(stream).writerows([("op", "problem", "impl", "median_us"), *(("matmul", *row) for row in rows)])


def test_a_line_has_the_geometric_mean_the_extremes_and_how_many_are_slower(tmp_path: Path) -> None:
    a, b, c = "a 4096x1x1 bfloat16", "b 128x1x1 bfloat16", "c 128x1x1 bfloat16"
    ours = [(a, "mgpu_ops", 10.0), (b, "mgpu_ops", 10.0), (c, "mgpu_ops", 10.0)]
    write(
        tmp_path / "2025-01-01-h200-matmul.csv", [*ours, (a, "xla", 5.0), (b, "xla", 20.0), (c, "xla", 10.0), (b, "fast", 8.0)]
    )
    found = lines.problems(tmp_path, "h200-matmul")
    assert lines.line("all", "XLA", found, "xla") == "| all | XLA | 3 | 1.000x | 0.500x (a) | 2.000x (b) | 1 |  |"
    assert lines.line("all", "both", found, "xla", "fast") == "| all | both | 1 | 0.800x | 0.800x (b) | 0.800x (b) | 1 |  |"
    with pytest.raises(LookupError, match="no problem of 'all' was timed beside tokamax"):
        lines.line("all", "tokamax", found, "tokamax")


def test_the_newest_file_of_a_problem_counts_and_is_named(tmp_path: Path) -> None:
    first, second = "a 4096x1x1 bfloat16", "b 128x1x1 bfloat16"
    old, new = tmp_path / "2025-01-01-h200-matmul.csv", tmp_path / "2025-01-02-h200-matmul.csv"
    write(old, [(first, "mgpu_ops", 1.0), (second, "mgpu_ops", 1.0)])
    write(new, [(second, "mgpu_ops", 2.0)])
    write(tmp_path / "2025-01-03-h200-matmul-variants.csv", [(first, "mgpu_ops", 9.0)])
    assert [(p.name, p.us("mgpu_ops"), p.file) for p in lines.problems(tmp_path, "h200-matmul")] == [
        ("a", 1.0, old),
        ("b", 2.0, new),
    ]
    new.with_suffix(".png").touch()
    told = "\n".join(lines.sources(new, old))
    assert f"From `results/{new.name}`, `results/{old.name}`." in told
    assert f"![{new.stem}](results/{new.stem}.png)" in told
    with pytest.raises(LookupError, match="has no benchmark h100-matmul"):
        lines.problems(tmp_path, "h100-matmul")


def test_a_landmark_stands_beside_the_datasheet_s_bound_and_the_fastest_other(tmp_path: Path) -> None:
    with (tmp_path / "2025-01-01-h200-matmul.csv").open("w", newline="") as stream:
        rows = [("mgpu_ops", 20.0, 1, 1), ("xla", 25.0, 1, 1), ("fast", 22.0, 1, 1), ("roofline", 10.0, 500.0, 2000.0)]
        head = ("op", "problem", "impl", "median_us", "tflops", "gbs")
        csv.writer(stream).writerows([head, *(("matmul", "a 4096x1x1 bfloat16", *row) for row in rows)])
    landmarks = [("h200-matmul", label, "a", others) for label, others in (("", ("xla", "fast")), ("alone", ()))]
    told = list(ops.rooflines(tmp_path, *landmarks))
    assert told[2:4] == ["| a | 250 | 10 | 20 | 50 % | 22 |", "| alone | 250 | 10 | 20 | 50 % |  |"]
    assert "2025-01-01-h200-matmul.csv" in told[4]


def test_steps_of_a_program_are_those_of_the_newest_file_in_the_order_of_their_sizes(tmp_path: Path) -> None:
    def steps(day: int, *rows: tuple[str, str, str, float]) -> None:
        with (tmp_path / f"2025-01-0{day}-h200-llama.csv").open("w", newline="") as stream:
            head = ("op", "problem", "impl", "median_us", "peak_bytes")
            csv.writer(stream).writerows([head, *((*row, 2_500_000_000) for row in rows)])

    few, many, tokens = "llama3-8b-4-layers-16384-2x4096", "llama3-8b-4-layers-16384-16x4096", "llama3-8b-4-layers-16384-8192"
    old = [(op, of, impl, 9e3) for op, of in (("llama-decode", many), ("llama-step", tokens)) for impl in ("xla", "mgpu_ops")]
    steps(1, *old)
    steps(2, *(("llama-decode", of, impl, us) for of in (many, few) for impl, us in (("xla", 600.0), ("mgpu_ops", 500.0))))
    steps(3, ("llama-step-sustained", tokens, "xla", 9e3), ("llama-step-sustained", tokens, "mgpu_ops", 6e3))
    assert list(programs.program(tmp_path))[2:-1] == [
        "| training, 8192 tokens | 9 | 9 | 1.000x | 2.50 | 2.50 |",
        "| training, without pause, 8192 tokens | 9 | 6 | 1.500x | 2.50 | 2.50 |",
        "| decoding, 2 sequences of 4096 tokens | 0.6 | 0.5 | 1.200x | 2.50 | 2.50 |",
        "| decoding, 16 sequences of 4096 tokens | 0.6 | 0.5 | 1.200x | 2.50 | 2.50 |",
    ]


def test_where_a_step_s_time_went_is_told_by_kind_and_size_of_the_newest_file_that_has_it(tmp_path: Path) -> None:
    def kernels(name: str, products: str, *steps: str) -> None:
        told = f"milliseconds of attention 1.040, loss {{}}, product {products}, between 5.7, gaps 0.25, all 83.0\n   140.7 us"
        text = "\n".join(f"# {step}: {told.format('0.2' if 'mgpu_ops' in step else '0.000')}" for step in steps)
        (tmp_path / f"2025-01-02-h200-llama-kernels{name}.txt").write_text(f"# One H200: kernels, of one step.\n\n{text}\n")

    few, many = "llama-step-llama3-8b-4-layers-16384-8192", "llama-step-llama3-8b-4-layers-16384-32768"
    decoding = "llama-decode-llama3-8b-4-layers-16384"
    kernels("", "70.0", f"{many}, xla", f"{few}, xla", f"{few}, mgpu_ops", f"{few}, fp8", f"{decoding}-16x4096, xla")
    kernels("-again", "60.56", f"{few}, xla", f"{few}, mgpu_ops", f"{decoding}-1x4096, xla")
    lines = list(programs.program_kernels(tmp_path))
    assert lines[:8] == [
        "| training, 8192 tokens, ms | xla | mgpu_ops |",
        "|---|---|---|",
        "| products | 60.6 | 60.6 |",
        "| attention | 1.0 | 1.0 |",
        "| loss | with between | 0.2 |",
        "| between | 5.7 | 5.7 |",
        "| gaps | 0.2 | 0.2 |",
        "| all | 83.0 | 83.0 |",
    ]
    assert [line for line in lines if line.endswith("ms | xla |") or "decoding" in line] == [
        "| training, 32768 tokens, ms | xla |",
        "| decoding, ms | xla, batch 1 | xla, batch 16 |",
    ]
    assert lines[-1] == ("From `results/2025-01-02-h200-llama-kernels.txt`, `results/2025-01-02-h200-llama-kernels-again.txt`.")
    (tmp_path / "empty").mkdir()
    with pytest.raises(LookupError, match="has no kernels"):
        programs.profiles(tmp_path / "empty")


# --- examples in Python


def blocks(text: str, language: str) -> list[tuple[str, str]]:
    """The code blocks of a language, each with the heading it stands under."""
    found, heading = [], ""
    for title, kind, code in re.findall(r"^#+ ([^\n]*)$|^```([\w{}-]*)[^\n]*\n(.*?)^```$", text, re.DOTALL | re.MULTILINE):
        heading = title or heading
        if code and kind == language:
            found.append((heading, code))
    return found


OWN_TESTS = ("docs/frameworks/", "docs/start-up.md", "docs/howto/pytorch.md")  # tests/mgpu_ops has theirs
PROGRAMS = {
    name: "".join(code for _, code in blocks(text, "python"))
    for name, text in TEXTS.items()
    if "```python" in text and not name.startswith(OWN_TESTS)
}


@pytest.mark.parametrize("name", PROGRAMS)
def test_the_examples_of_a_page_are_one_program_that_runs(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    """From the page's first line of Python to its last, with nothing around them."""

    def traced(function: Callable[..., Any], *args: Any) -> contextlib.AbstractContextManager[None]:
        assert mgpu_ops.capture(function)(*args).problems is not None  # tuning them is for tests/tuning/test_autotune.py
        return contextlib.nullcontext()

    if "compile_for" in PROGRAMS[name] and (missing := aot.available()):
        pytest.skip(missing)
    monkeypatch.setattr(mgpu_ops, "autotune", traced)
    engine.reset_interpreter()
    try:
        exec(compile(PROGRAMS[name], name, "exec"), {"__name__": "__main__"})
    finally:
        engine.reset_interpreter()


# --- commands


COMMANDS = [
    (name, command.strip())
    for name, text in TEXTS.items()
    for heading, code in blocks(text, "")
    if heading != "Architecture"  # a tree of folders
    for line in code.splitlines()
    for command in line.split(" | ")
]


class Parsed(Exception):
    """A program has read its arguments."""


def parse_as_python(words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """Of `python FILE ...` or `python -m MODULE ...`, the words behind `python`."""
    of_module = words[0] == "-m"
    parse_with_its_own_parser(words[1] if of_module else ROOT / words[0], words[1 + of_module :], monkeypatch)


def parse_with_its_own_parser(program: Path | str, words: list[str], monkeypatch: pytest.MonkeyPatch) -> None:
    """program: a script, or the name of a module that has a function `main`."""
    parse = argparse.ArgumentParser.parse_args

    def stop(self: argparse.ArgumentParser, *args: Any) -> None:
        parse(self, *args)
        raise Parsed

    monkeypatch.setattr(argparse.ArgumentParser, "parse_args", stop)
    monkeypatch.setattr(sys, "argv", [str(program), *words])
    if isinstance(program, Path):
        run = functools.partial(runpy.run_path, str(program), run_name="__main__")
    else:
        run = importlib.import_module(program).main
    with pytest.raises(Parsed):
        run()


@pytest.mark.parametrize(("name", "line"), COMMANDS, ids=lambda text: text)
def test_a_line_of_a_shell_is_one_that_its_program_takes(name: str, line: str, monkeypatch: pytest.MonkeyPatch) -> None:
    program, *words = shlex.split(line, comments=True)
    if program == "mgpu-tune":
        cli._parser(words).parse_args(words)
    elif program == "make":
        assert set(words) <= set(targets())
    elif program == "pip":
        assert set(re.findall(r"\[(.*)\]", line)[0].split(",")) <= set(extras())
    elif program == "python":
        parse_as_python(words, monkeypatch)
    else:
        assert program in ("export", "jq"), f"{name}: who runs {line!r}?"


@pytest.mark.parametrize("name", TEXTS)
def test_commands_named_in_passing_exist_with_the_options_named(
    name: str, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    prose = re.sub(r"^```.*?^```$", "", TEXTS[name], flags=re.DOTALL | re.MULTILINE)
    for program, rest in re.findall(r"`(mgpu-tune|make|python|pip) ([^`]+)`", prose):
        words = shlex.split(rest)
        if program == "mgpu-tune":
            with pytest.raises(SystemExit):
                cli.main([words[0], "--help"])
            told = capsys.readouterr().out
            assert all(word in told for word in words if word.startswith("--")), f"mgpu-tune {rest}"
        elif program == "make":
            assert words[0] in targets()
        elif program == "python":
            with monkeypatch.context() as patch:
                parse_as_python(words, patch)
        else:
            assert set(re.findall(r"\[(.*)\]", rest)[0].split(",")) <= set(extras())


def targets() -> list[str]:
    return re.findall(r"^([a-z-]+):", (ROOT / "Makefile").read_text(), re.MULTILINE)


def extras() -> dict[str, list[str]]:
    return tomllib.loads((ROOT / "pyproject.toml").read_text())["project"]["optional-dependencies"]


# --- names and files


@pytest.mark.parametrize("name", TEXTS)
def test_what_is_named_exists(name: str) -> None:
    text = TEXTS[name]
    for dotted in set(re.findall(r"\bmgpu_ops(?:\.[a-zA-Z_]\w*)+", text)) - {"mgpu_ops.png"}:
        if not dotted.startswith("mgpu_ops.torch") or importlib.util.find_spec("torch"):
            pkgutil.resolve_name(dotted)
    tops = "core|tuning|mgpu_ops|tests|results|docs|examples|scripts"
    for path in set(re.findall(rf"`((?:{tops})/[\w./+-]+)`", text)):
        assert (ROOT / path).exists(), f"{name} names {path}, which is not there"
    assert list(results_missing(text)) == [], f"{name} names files of results/ by these ends"
    for link in re.findall(r"\]\(([^)]+)\)", re.sub(r"^```.*?^```$", "", text, flags=re.DOTALL | re.MULTILINE)):
        there = (ROOT / name).parent.joinpath(link.partition("#")[0])  # the site's build knows the headings
        assert link.startswith("http") or there.exists(), f"{name} links to {link}, which is not there"


def results_missing(text: str) -> Iterator[str]:
    """Of the ends that stand for a file of results/: `-4096.csv`, of any one, and `-2`, of the file named before it."""
    files, before = [path.name for path in (ROOT / "results").iterdir()], ""
    for path, end in re.findall(r"`results/([\w.+-]+)`|`(-(?:\d|[\w+-]+\.(?:csv|jsonl|json|txt|log)(?:\.gz)?))`", text):
        before = path or before
        begin = re.sub(r"(-\d)?\..*", "", before) if end[1:].isdigit() else ""
        if not path and not any(file.startswith(begin + end) if begin else file.endswith(end) for file in files):
            yield end


def test_a_file_of_results_named_by_its_end_is_looked_for() -> None:
    kept = "`results/2026-11-22-h200-matmul-fp8.jsonl`, `-2`"
    assert not list(results_missing(f"{kept}, `-anywhere-tuned.csv`, `--json`"))
    assert list(results_missing(f"{kept}, `-9` and `-never.csv`")) == ["-9", "-never.csv"]


def test_the_changelog_has_the_form_that_contributing_describes() -> None:
    """Releases with dates under Unreleased, newest first; in each, sections by kind, each once, of entries."""
    releases = re.split(r"^## ", (ROOT / "CHANGELOG.md").read_text(), flags=re.MULTILINE)[1:]
    heads = [release.partition("\n")[0] for release in releases]
    assert heads[0] == "[Unreleased]"
    dated = [re.fullmatch(r"\[(\d+)\.(\d+)\.(\d+)\] - (\d{4}-\d\d-\d\d)", head) for head in heads[1:]]
    assert all(dated), heads
    versions = [tuple(map(int, match.groups()[:3])) for match in dated if match]
    assert versions == sorted(set(versions), reverse=True)
    for head, release in zip(heads, releases):
        above, *sections = re.split(r"^### ", release.partition("\n")[2], flags=re.MULTILINE)
        kinds = [section.partition("\n")[0] for section in sections]
        assert set(kinds) <= {"Added", "Changed", "Deprecated", "Removed", "Fixed", "Security"}, head
        assert len(set(kinds)) == len(kinds), head
        assert not above.strip(), head
        for section in sections:
            lines = [line for line in section.splitlines()[1:] if line]
            assert all(line.startswith(("- ", "  ")) for line in lines), f"{head}: an entry begins with '- '"


def test_the_readme_reads_in_two_minutes() -> None:
    """550 words outside of programs and tables."""
    prose = re.sub(r"```.*?```", "", README, flags=re.DOTALL)
    prose = re.sub(r"^\|.*$|\]\([^)]*\)", "", prose, flags=re.MULTILINE)
    assert len(re.findall(r"[A-Za-z][\w'-]+", prose)) <= 550


def test_every_file_of_core_is_described() -> None:
    described = re.findall(r"^\| `(core/\w+\.py)` \|", TEXTS["docs/architecture.md"], re.MULTILINE)
    assert sorted(described) == sorted(str(path.relative_to(ROOT)) for path in (ROOT / "core").glob("[!_]*.py"))


def test_compile_times_are_told_by_stage_by_the_newest_processes(tmp_path: Path) -> None:
    stages = [
        {"case": "llama", "implementation": implementation, "stage": stage, "seconds": n * seconds}
        for implementation, seconds in (("mgpu_ops", 2.0), ("xla", 3.0))
        for n, stage in enumerate(("trace", "lower", "compile", "all"))
    ]
    (tmp_path / "2025-01-02-h200-compile-times.jsonl").write_text("\n".join(map(json.dumps, stages)))
    with pytest.raises(LookupError, match="-early"):
        list(programs.compile_times(tmp_path))
    of = {"case": "llama", "implementation": "mgpu_ops", "trace": 1.0, "lower": 1.0, "compile": 1.0}
    turns = [of | {"what": what, "all": seconds} for what, seconds in (("before", 9), ("now", 7), ("now", 3), ("now", 4))]
    (tmp_path / "2025-01-03-h200-compile-times-early.jsonl").write_text("\n".join(map(json.dumps, turns)))
    assert list(programs.compile_times(tmp_path))[2:-1] == [
        "| a training step of 4 layers | ours | 1.00 | 1.00 | 1.00 | 4.00 |",
        "| a training step of 4 layers | XLA and cuDNN | 0.00 | 3.00 | 6.00 | 9.00 |",
    ]
