"""The report in Chromium: its width, its colours, its filter, how it sorts and prints, and that it says no error."""

from __future__ import annotations

from collections.abc import Iterator
from pathlib import Path

import pytest

from mgpu_ops import SPECS
from mgpu_ops.registry import database
from mgpu_ops.tuning.bench import page, results, sources
from mgpu_ops.tuning.bench.report import picture
from tests.browser import Browser, started

RESULTS = Path(__file__).parents[3] / "results"
EVIL = "<script>window.bad = 1</script><img src=x onerror='window.bad = 1'>"


@pytest.fixture(scope="module")
def report(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """Of matmul and all_reduce: databases, benchmarks, a picture as wide as ours."""
    folder = tmp_path_factory.mktemp("report")
    tuned = [database.shipped_path("h200", op) for op in ("matmul", "all_reduce")]
    timed = [RESULTS / "2026-11-21-h200-matmul.csv", RESULTS / "2026-11-21-h200x2-all_reduce.csv"]
    found = sources.find(map(str, [*tuned, *timed]), SPECS)
    drawn = picture(results.read_csv(timed[0]), folder / "bench.png")[1]
    pictures = [
        ("matmul", "TFLOP/s of matmul, bench", [drawn]),
        (EVIL, EVIL, [drawn]),
    ]
    (folder / "report.html").write_text(page.page(found, SPECS, pictures, EVIL))
    return folder / "report.html"


@pytest.fixture(scope="module")
def browser(tmp_path_factory: pytest.TempPathFactory) -> Iterator[Browser]:
    with started(tmp_path_factory.mktemp("profile")) as one:
        yield one


ROWS = "[...document.querySelectorAll('tbody tr')]"
SHOWN = f"{ROWS}.filter((row) => row.getClientRects().length)"


def typed(words: str) -> str:
    return (
        f"(() => {{ const f = document.querySelector('#filter'); f.value = {words!r}; f.dispatchEvent(new Event('input')) }})()"
    )


@pytest.mark.parametrize("width", [1280, 400])
@pytest.mark.parametrize("dark", [False, True])
def test_the_report_fits_its_window_in_light_and_in_dark_without_an_error(
    browser: Browser, report: Path, width: int, dark: bool
) -> None:
    browser.open(report, width, dark=dark)
    assert browser.overflow() == 0
    red, *_ = browser.evaluate("getComputedStyle(document.body).backgroundColor.match(/\\d+/g).map(Number)")
    assert (red < 60) == dark
    assert browser.evaluate("window.bad ?? document.scripts.length") == 1
    assert browser.errors == []


def test_the_filter_leaves_the_rows_that_have_all_words(browser: Browser, report: Path) -> None:
    browser.open(report, 1280)
    every = browser.evaluate(f"{SHOWN}.length")
    assert every == browser.evaluate(f"{ROWS}.length") > 100
    browser.evaluate(typed("LLAMA3-8b  -128"))
    texts = browser.evaluate(f"{SHOWN}.map((row) => row.textContent)")
    assert texts
    assert all("llama3-8b" in text and "-128" in text for text in texts)
    assert browser.evaluate("document.querySelector('.tools span').textContent") == f"{len(texts)} of {every} rows"
    assert browser.evaluate("document.querySelector('#all-reduce').getClientRects().length") == 0
    browser.evaluate(typed("all_reduce"))  # the name of a section counts for its rows
    assert browser.evaluate(f"{SHOWN}.length") >= 16
    browser.evaluate(typed(""))
    assert browser.evaluate(f"{SHOWN}.length") == every
    assert browser.errors == []


def test_a_click_on_a_heading_sorts_by_numbers_and_a_third_one_restores(browser: Browser, report: Path) -> None:
    browser.open(report, 1280)
    browser.evaluate("window.head = [...document.querySelectorAll('#matmul th')].find((th) => th.textContent === 'us')")
    values = "[...head.closest('table').tBodies[0].rows].map((row) => Number(row.cells[head.cellIndex].textContent))"
    before = browser.evaluate(values)
    found = []
    for _ in range(3):
        browser.evaluate("head.querySelector('button').click()")
        found.append((browser.evaluate("head.ariaSort"), browser.evaluate(values)))
    assert found == [("ascending", sorted(before)), ("descending", sorted(before, reverse=True)), ("none", before)]
    browser.evaluate("window.head = document.querySelector('#matmul figure th'); head.querySelector('button').click()")
    assert browser.evaluate("head.ariaSort") == "ascending"
    assert browser.errors == []


def test_on_paper_and_without_scripts_everything_is_there(browser: Browser, report: Path) -> None:
    browser.open(report, 1000)
    browser.printed()
    shown = "getComputedStyle(document.querySelector({!r})).{}"
    assert browser.evaluate(shown.format(".tools", "display")) == "none"
    assert browser.evaluate(shown.format("td.long", "whiteSpace")) == "normal"
    assert browser.evaluate(shown.format(".wide", "overflowX")) == "visible"
    browser.open(report, 400, script=False)
    assert browser.overflow() == 0
    assert browser.evaluate(f"{SHOWN}.length === {ROWS}.length && {ROWS}.length > 100")
    assert browser.evaluate(shown.format(".tools", "display")) == "none"
    browser.open(report, 400)
    assert browser.errors == []
