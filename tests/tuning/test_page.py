"""The HTML report: one file that shows everything as text, loads nothing and runs nothing."""

from __future__ import annotations

import base64
import dataclasses
import json
from collections.abc import Callable
from html.parser import HTMLParser
from pathlib import Path
from typing import Any

import msgspec
import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from mgpu_ops import SPECS, MatmulProblem, spec_of
from mgpu_ops.core import database, gpu
from mgpu_ops.tuning import bench, page, plot
from mgpu_ops.tuning.sources import Found

Command = Callable[..., Any]
H200 = gpu.find("h200")
MATMUL = spec_of("matmul")
EVIL = "<script>alert(1)</script>\"'><img src=x onerror=alert(2)>&amp;"
TAGS = {
    "html", "head", "meta", "title", "style", "body", "h1", "h2", "p", "div", "table", "tr", "th", "td",
    "details", "summary", "figure", "img",
}  # fmt: skip
ATTRIBUTES = {"lang", "charset", "http-equiv", "content", "class", "alt", "src", "open"}


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


def found_with(text: str) -> Found:
    """One of everything, with a text wherever there may be one of others."""
    trial = plot.Trial(text, {text: text}, "ok", 10.0, text, 12.0)
    failed = plot.Trial(text, {text: text}, text, None, text)
    row = bench.Row(text, text, bench.OURS, text, 1.0, 0.1, 1.0, 1.0, 0.0, text, text, text, text)
    return Found(
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
    return seen


def test_everything_that_others_name_is_shown_as_text(tmp_path: Path) -> None:
    picture = tmp_path / "x.svg"
    picture.write_text("<svg/>")
    text = page.page(found_with(EVIL), SPECS, [(EVIL, [tmp_path / "x.png", picture])], EVIL)
    seen = check_safe(text)
    shown = "\n".join(seen.texts)
    # places, op, file, problem, config, evidence, rows, failures, pictures
    assert shown.count("<script>alert(1)</script>") >= 15
    assert "<script" not in text
    assert "<img src=x" not in text


@settings(max_examples=30)
@given(st.text())
def test_no_text_becomes_a_tag(tmp_path_factory: pytest.TempPathFactory, text: str) -> None:
    seen = check_safe(page.page(found_with("a" + text.replace("\0", "")), SPECS, [], text))
    assert seen.tags.count("h1") == 1


def test_the_page_allows_no_script_and_no_network() -> None:
    text = page.page(Found(), SPECS, [], "2025-01-31")
    assert "default-src 'none'; img-src data:; style-src 'unsafe-inline'" in {value for _, value in Reader(text).attributes}
    assert "http://" not in text
    assert "https://" not in text


def test_the_page_tells_times_rates_failures_and_what_is_stale() -> None:
    problem = MatmulProblem(512, 512, 512)
    file = database.File(1, "h200", "matmul", (entry(gpu=H200.name, jax="0.0.1", baseline="xla"),))
    trials = [plot.Trial("search", {}, "crash", None, "illegal address")] * 3 + [plot.Trial("search", {}, "ok", 9.0)]
    found = Found(["here"], [plot.Run("matmul", "p", "NVIDIA H200", "measured", tuple(trials))], [(Path("f.json"), file)])
    cells = Reader(page.page(found, SPECS, [], "2025-01-31")).texts
    rate = MATMUL.flops(problem) / 12.5 / 1e6
    for cell in ("matmul on h200", "512x512x512 bfloat16 nn", "12.5", f"{rate:.4g}", "1.2", "2.000 (xla)"):
        assert cell in cells
    assert any(cell.startswith("tuned with jax 0.0.1, not") for cell in cells)
    assert {"3 of 4 trials of 1 searches failed.", "crash", "3", "illegal address"} <= set(cells)


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
    assert "<script" not in text
