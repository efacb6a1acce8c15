"""The HTML report: one file that shows everything as text, loads nothing and runs nothing."""

from __future__ import annotations

import base64
import dataclasses
import errno
import hashlib
import json
import os
import re
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import SPECS, MatmulProblem, spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning.bench import page, plot, results, sources
from mgpu_ops.tuning.bench.sources import Sources
from tests.thorough import examples

Command = Callable[..., Any]
H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "h3", "p", "div", "table", "thead", "tbody", "tr", "th", "td",
    "details", "summary", "figure", "figcaption", "img", "nav", "ul", "li", "a", "section", "span", "small", "b", "i", "button",
    "label", "input", "script",
}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "class", "alt", "src", "open", "name", "href", "id"}
ATTRIBUTES |= {"scope", "tabindex", "role", "aria-label", "hidden", "for", "type", "autocomplete", "placeholder", "title"}
ATTRIBUTES |= {"style", "data-v"}  # of numbers alone


class Reader(HTMLParser):
    """What a browser would see: tags, attributes and texts."""

    def __init__(self, text: str):
        super().__init__(convert_charrefs=True)
        self.tags: list[str] = []
        self.attributes: list[tuple[str, str | None]] = []
        self.texts: list[str] = []
        self.feed(text)
        self.close()

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.tags.append(tag)
        self.attributes += attrs

    def handle_data(self, data: str) -> None:
        self.texts.append(data)


def entry(text: str = "x", **changes: Any) -> database.Entry:
    evidence = database.Evidence(
        kind="measured", gpu=text, driver=text, jax=text, jaxlib=text, cuda=text, kernel_version=MATMUL.version,
        median_us=12.5, spread_us=0.5, default_us=15.0, baseline=text, baseline_us=25.0, error=0.001, trials=48, seed=0,
        date="2025-11-20",
    )  # fmt: skip
    problem = MatmulProblem(512, 512, 512)
    good = database.to_entry(problem, MATMUL.default(problem, H200), msgspec.structs.replace(evidence, **changes))
    return good if text == "x" else database.Entry({text: text}, {text: text}, good.evidence)


def found_with(text: str) -> Sources:
    """One of everything, with a text wherever there may be one of others."""
    trial = plot.Trial(text, {text: text}, "ok", 10.0, text, 12.0)
    failed = plot.Trial(text, {text: text}, text, None, text)
    row = results.Measurement(text, text, results.OURS, text, 1.0, 0.1, 1.0, 1.0, 0.0, text, text, text, text)
    return Sources(
        places=[text],
        runs=[plot.Run(text, text, text, text, (trial, failed))],
        files=[(Path(text), database.File(1, "h200", op, (entry(text),))) for op in ("matmul", text)],
        rows=[row],
    )


def check_safe(text: str) -> Reader:
    seen = Reader(text)
    assert set(seen.tags) <= TAGS
    assert {name for name, _ in seen.attributes} <= ATTRIBUTES
    assert all(value and value.startswith("data:image/svg+xml;base64,") for name, value in seen.attributes if name == "src")
    assert seen.tags.count("script") == 1
    assert text.count(f"<script>{page._SCRIPT}</script>") == 1
    numbers = re.compile(r"(?:(?:left|width):)?-?[\d.]+(?:e[+-]?\d+)?%?(?:;width:[\d.]+%)?")
    assert all(numbers.fullmatch(value or "") for name, value in seen.attributes if name in ("style", "data-v"))
    ids = [value for name, value in seen.attributes if name == "id"]
    assert len(set(ids)) == len(ids)
    assert {f"#{value}" for value in ids} - {"#filter"} == {value for name, value in seen.attributes if name == "href"}
    return seen


def test_everything_that_others_name_is_shown_as_text(tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    picture.write_text("<svg/>")
    text = page.page(found_with(EVIL), SPECS, [(EVIL, EVIL, [tmp_path / "x.png", picture])], EVIL)
    seen = check_safe(text)
    shown = "\n".join(seen.texts)
    # places, op, file, problem, config, evidence, rows, failures, pictures
    assert shown.count("<script>alert(1)</script>") >= 15
    assert "<img src=x" not in text


@examples(30)
@given(st.text())
def test_no_text_becomes_a_tag(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    seen = check_safe(page.page(found_with("a" + text.replace("\0", "")), SPECS, [], text))
    assert seen.tags.count("h1") == 1


def test_the_page_allows_its_own_script_and_no_other_and_no_network() -> None:
    text = page.page(Sources(), SPECS, [], "2025-01-31")
    digest = base64.b64encode(hashlib.sha256(Path(page.__file__).with_name("page.js").read_bytes()).digest()).decode()
    policy = f"default-src 'none'; img-src data:; style-src 'unsafe-inline'; script-src 'sha256-{digest}'"
    assert policy in {value for _, value in Reader(text).attributes}
    assert "</script" not in page._SCRIPT
    assert "http://" not in text
    assert "https://" not in text


def test_the_page_tells_times_rates_failures_and_what_is_stale() -> None:
    problem = MatmulProblem(512, 512, 512)
    file = database.File(1, "h200", "matmul", (entry(gpu=H200.name, jax="0.0.1", baseline="xla"),))
    trials = [plot.Trial("search", {}, "crash", None, "illegal address")] * 3 + [plot.Trial("search", {}, "ok", 9.0)]
    found = Sources(["here"], [plot.Run("matmul", "p", "NVIDIA H200", "measured", tuple(trials))], [(Path("f.json"), file)])
    cells = Reader(page.page(found, SPECS, [], "2025-01-31")).texts
    rate = MATMUL.flops(problem) / 12.5 / 1e6
    for cell in ("Tuned on h200", "512x512x512 bfloat16 nn", "12.5", f"{rate:.1f}", "1.200", "x xla", "2.000"):
        assert cell in cells
    assert any(cell.startswith("tuned with jax 0.0.1, not") for cell in cells)
    assert {"3 of 4 trials of 1 search failed", "crash", "3", "illegal address"} <= set(cells)


def test_the_page_tells_where_xla_is_faster_and_its_time() -> None:
    for us, runs in ((10.0, "xla 10.0 us"), (25.0, "kernel")):
        file = database.File(1, "h200", "matmul", (entry(gpu=H200.name, baseline="xla", baseline_us=us),))
        assert runs in Reader(page.page(Sources(files=[(Path("f.json"), file)]), SPECS, [], "2025-01-31")).texts


def bench_row(impl: str, us: float, problem: str = "p 8x8x8", **changes: Any) -> results.Measurement:
    stamp = {"gpu": "NVIDIA H200", "driver": "580", "jax": "0.11.2", "date": "2025-01-31"}
    row = results.Measurement("matmul", problem, impl, "c", us, 0.1, 5000 / us, 1.0, 1e-3, **stamp)
    return dataclasses.replace(row, **changes)


def test_a_summary_on_top_has_the_mean_and_the_worst_against_each_competitor() -> None:
    rows = [
        *(bench_row(results.OURS, 10.0), bench_row("xla", 12.0), bench_row("jax-pallas", 20.0)),
        *(bench_row(results.OURS, 10.0, "q 8x8x16"), bench_row("xla", 9.0, "q 8x8x16"), bench_row("dense", 5.0, error=None)),
    ]
    seen = check_safe(page.page(Sources(rows=rows), SPECS, [], "2025-01-31"))
    texts = seen.texts
    assert texts.index("Summary") < texts.index("Timed on NVIDIA H200")
    mean = f"{(1.2 * 0.9) ** 0.5:.3f}"
    row = next(i for i, text in enumerate(texts) if text == "xla")
    assert texts[row - 1 : row + 5] == ["matmul", "xla", "2", mean, "0.900", "1 of 2"]
    assert "0.90 to 1.20, mean 1.04" in {value for name, value in seen.attributes if name == "aria-label"}
    assert "q" in texts[row : row + 12]
    assert "The part that ours reaches of the speed of a yardstick, something else that costs as much" in texts
    of = next(i for i, text in enumerate(texts) if text == "dense")
    assert texts[of - 1 : of + 5] == ["matmul", "dense", "1", "0.500", "0.500", "0 of 1"]


def test_the_contents_link_to_every_section_and_every_table_has_a_caption() -> None:
    found = found_with("x")
    seen = check_safe(page.page(found, SPECS, [], "2025-01-31"))  # each link leads somewhere, each section has one
    assert seen.tags.count("a") >= 3
    assert seen.tags.count("figcaption") == seen.tags.count("table")
    assert seen.tags.index("nav") < seen.tags.index("h2")


def test_numbers_of_a_column_have_one_precision() -> None:
    rows = [
        row
        for us in (1234.5678, 20.0, 3.25)
        for row in (bench_row(results.OURS, us, f"p {us}"), bench_row("xla", 7.0, f"p {us}"))
    ]
    texts = check_safe(page.page(Sources(rows=rows), SPECS, [], "2025-01-31")).texts
    assert {"1234.57", "20.00", "3.25"} <= set(texts)
    assert {"0.006", "0.350", "2.154"} <= set(texts)


def test_collectives_have_their_bandwidth_in_the_report(tmp_path: Path, mgpu_tune: Command) -> None:
    results = Path(__file__).parents[3] / "results"
    csv = next(iter(results.glob("*x2-all_reduce.csv")))
    done = mgpu_tune("report", "--from", csv, database.shipped_path("h200", "all_reduce"), "--output", tmp_path / "r.html")
    assert (done.code, done.err) == (0, "")
    texts = check_safe((tmp_path / "r.html").read_text()).texts
    assert {"bus GB/s", "kernels us", "x xla", "time and bus bandwidth of all_reduce, bench"} <= set(texts)
    assert "TFLOP/s" not in texts
    assert any("(workspace)" in text for text in texts)


def test_a_wrong_result_says_so_and_has_no_ratio() -> None:
    rows = [bench_row(results.OURS, 10.0), bench_row("xla", 12.0, error=0.5)]
    texts = check_safe(page.page(Sources(rows=rows), SPECS, [], "2025-01-31")).texts
    assert "wrong (0.5)" in texts
    assert "1.200" not in texts


def test_the_page_fits_a_narrow_screen() -> None:
    """It has the width of the screen, and what is wider scrolls in a box of its own."""
    text = page.page(found_with("x"), SPECS, [], "2025-01-31")
    values = {value for _, value in Reader(text).attributes}
    assert {"viewport", "width=device-width, initial-scale=1"} <= values
    assert text.count("<table>") == text.count("<div class='wide' tabindex='0' role='region'")
    assert ".wide { overflow-x: auto;" in text
    assert "overflow-wrap: anywhere" in text


def test_the_page_names_no_folder_of_the_machine(tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_CONFIG_DIR", str(tmp_path / "own"))
    good = entry(gpu=H200.name)
    database.update(database.user_path("h200", "matmul"), [good], gpu_key="h200", op="matmul")
    database.update(tmp_path / "other.json", [good], gpu_key="h200", op="matmul")
    assert mgpu_tune("report", "matmul", "--gpu", "h200", "--no-pictures", "--output", tmp_path / "a.html").code == 0
    assert mgpu_tune("report", "--from", tmp_path / "other.json", "--no-pictures", "--output", tmp_path / "b.html").code == 0
    first, second = ((tmp_path / name).read_text() for name in ("a.html", "b.html"))
    for text in (first, second):
        assert str(tmp_path) not in text
        assert str(Path(page.__file__).parents[3]) not in text
    assert "own h200/matmul.json, shipped h200/matmul.json" in first
    assert "; other.json; " in second or "other.json</p>" in second
    failed = plot.Trial("search", {}, "compile", None, "ptxas: /tmp/a/b/kernel.ptx line 3, see https://host/a/b and 1/2")
    text = page.page(Sources(runs=[plot.Run("matmul", "p", "g", "measured", (failed,))]), SPECS, [], "2025-01-31")
    assert "ptxas: kernel.ptx line 3, see https://host/a/b and 1/2" in text


def test_a_full_disk_leaves_the_report_that_was_there(
    tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    out = tmp_path / "report.html"
    out.write_text("the old one")

    def full(file: int) -> None:
        raise OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))

    monkeypatch.setattr(os, "fsync", full)
    done = mgpu_tune("report", "matmul", "--gpu", "h200", "--no-pictures", "--output", out)
    assert done.code == 2
    assert f"{out}: cannot be written (No space left on device)" in done.err
    assert [path.name for path in tmp_path.iterdir() if path.is_file()] == ["report.html"]
    assert out.read_text() == "the old one"


def test_a_device_is_written_to_and_stays_one(mgpu_tune: Command) -> None:
    done = mgpu_tune("report", "matmul", "--gpu", "h200", "--no-pictures", "--output", "/dev/full")
    assert done.code == 2
    assert "/dev/full: cannot be written (No space left on device)" in done.err
    assert Path("/dev/full").is_char_device()


def test_the_report_of_a_machine_is_one_file_with_its_pictures(tmp_path: Path, mgpu_tune: Command) -> None:
    out = tmp_path / "deep" / "report.html"
    shipped = database.shipped_path("h200", "ragged_contraction")
    done = mgpu_tune("report", "--from", shipped, "--output", out)
    number = len(database.read(shipped).entries)
    assert (done.code, done.err) == (0, "")
    assert f"wrote {out}: {number} tuned problems, 0 searches, 1 picture" in done.out
    seen = check_safe(out.read_text())
    (source,) = [value or "" for name, value in seen.attributes if name == "src"]
    assert base64.b64decode(source.partition(",")[2]).startswith(b"<?xml")
    assert list(out.parent.iterdir()) == [out]
    document = json.loads(mgpu_tune("report", "--from", shipped, "--output", out, "--no-pictures", "--json").out)
    assert (document["file"], document["entries"], document["pictures"]) == (str(out), number, 0)


def test_a_hostile_database_makes_a_harmless_report(tmp_path: Path, mgpu_tune: Command) -> None:
    """Through the command: a database file with scripts in its names, in a file with one in its own."""
    path = tmp_path / "<script>alert(3)<" / "x.json"
    hostile = entry(EVIL)
    good = dataclasses.asdict(MatmulProblem(512, 512, 512))
    database.update(
        path, [hostile, database.Entry({**good, "m": 640}, {EVIL: EVIL}, hostile.evidence)], gpu_key="h200", op="matmul"
    )
    done = mgpu_tune("report", "--from", path, "--output", tmp_path / "report.html")
    assert done.code == 0
    text = (tmp_path / "report.html").read_text()
    check_safe(text)


def test_a_problem_of_two_databases_counts_once_with_the_entry_that_a_call_would_take(
    tmp_path: Path, mgpu_tune: Command
) -> None:
    """A measured entry comes before a modelled one, else your own file before the shipped one."""
    kinds = {"both": ("measured", "measured"), "modelled": ("modelled", "measured"), "alone": ("measured", None)}
    problems = {name: MatmulProblem(512 * (i + 1), 512, 512) for i, name in enumerate(kinds)}
    paths = [tmp_path / whose / "h200" / "matmul.json" for whose in ("own", "shipped")]
    for i, path in enumerate(paths):
        entries = [
            database.to_entry(
                problems[name],
                MATMUL.default(problems[name], H200),
                msgspec.structs.replace(
                    entry().evidence, kind=of[i], gpu="NVIDIA H200", median_us=10.0 + i, baseline="xla", baseline_us=20.0
                ),
            )
            for name, of in kinds.items()
            if of[i] is not None
        ]
        database.update(path, entries, gpu_key="h200", op="matmul")
    found = sources.find(map(str, paths), SPECS)
    taken = {entry.problem["m"]: entry.evidence.median_us for _, entry in found.taken(SPECS)}
    assert taken == {512: 10.0, 1024: 11.0, 1536: 10.0}
    text = page.page(found, SPECS, [], "2025-01-31")
    assert "<b>3</b><span>tuned problems</span>" in text
    assert "of them modelled" not in text
    assert "What is tuned: 3 problems" in text
    (rows,) = found.rates(SPECS).values()
    assert sorted(row.median_us for row in rows if row.impl == results.OURS) == [10.0, 10.0, 11.0]
    out = tmp_path / "report.html"
    done = mgpu_tune("report", "--from", paths[0], paths[1], "--output", out, "--no-pictures")
    assert f"wrote {out}: 3 tuned problems" in done.out
