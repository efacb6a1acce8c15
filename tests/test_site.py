"""The site: it builds without a warning, has every public name, and loads nothing from a network."""

from __future__ import annotations

import html
import re
import subprocess
import sys
from html.parser import HTMLParser
from pathlib import Path

import pytest

import mgpu_ops
from mgpu_ops.tuning import cli
from tests import browser

ROOT = Path(__file__).parents[1]
DOCS = ROOT / "docs"


def test_the_reference_has_every_public_name_once() -> None:
    pages = (path.read_text() for path in (DOCS / "reference").glob("*.md"))
    named = [
        name for text in pages for name in re.findall(r"^\.\. (?:auto)?(?:function|class|exception|data):: (\w+)", text, re.M)
    ]
    assert sorted(named) == sorted(mgpu_ops.__all__)


@pytest.fixture(scope="module")
def site(tmp_path_factory: pytest.TempPathFactory) -> Path:
    pytest.importorskip("sphinx", reason="needs the extra docs")
    out = tmp_path_factory.mktemp("site")
    words = [
        "-m",
        "sphinx",
        "--fail-on-warning",
        "--keep-going",
        "-q",
        "-b",
        "html",
        "-d",
        out / "doctrees",
        DOCS,
        out / "html",
    ]
    done = subprocess.run([sys.executable, *words], cwd=ROOT, capture_output=True, text=True, check=False)
    assert done.returncode == 0, done.stderr
    return out / "html"


class Loaded(HTMLParser):
    """What a page makes a browser load: no link that somebody must click."""

    def __init__(self, text: str) -> None:
        super().__init__()
        self.addresses: list[str] = []
        self.feed(text)

    def handle_starttag(self, tag: str, attrs: list[tuple[str, str | None]]) -> None:
        self.addresses += [
            value or "" for name, value in attrs if name in ("src", "srcset") or (tag == "link" and name == "href")
        ]


def test_the_site_is_whole_and_loads_nothing_from_a_network(site: Path) -> None:
    reference = "".join(path.read_text() for path in (site / "reference").glob("*.html"))
    ids = {html.unescape(name) for name in re.findall(r'id="mgpu_ops\.(\w+)"', reference)}
    assert ids == set(mgpu_ops.__all__)
    assert "ForwardRef(" not in reference  # types are written as in the code: ArrayLike | None
    told = (site / "reference/commands.html").read_text()
    assert all(f'<section id="{name}">' in told and f"usage: mgpu-tune {name} " in told for name in cli.COMMANDS)
    pages = list(site.rglob("*.html"))
    assert len(pages) > len(list(DOCS.rglob("*.md")))  # and the index and the search
    for page in pages:
        for address in Loaded(page.read_text()).addresses:
            assert not re.match(r"(\w+:)?//", address), f"{page.name} loads {address}"
            there = page.parent / address.partition("?")[0].partition("#")[0]
            assert there.exists() or address.startswith("data:"), f"{page.name} loads {address}, which is not there"
    for style in (site / "_static").rglob("*.css"):
        assert not re.search(r"(@import|url\()\s*[\"']?(https?:)?//", style.read_text()), f"{style.name} loads from a network"


def test_every_page_fits_a_narrow_window_and_the_first_a_wide_one_without_an_error(site: Path, tmp_path: Path) -> None:
    with browser.started(tmp_path / "profile") as shown:
        for page, width in [(site / "index.html", 1280), *((page, 400) for page in sorted(site.rglob("*.html")))]:
            shown.open(page, width)
            assert shown.overflow() == 0, f"{page.relative_to(site)} at {width} pixels"
        assert shown.errors == []
