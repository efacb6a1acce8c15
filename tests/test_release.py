"""`make release` refuses, in a sentence, what must not become a release; building and trying one takes minutes, by hand."""

from __future__ import annotations

import os
import shutil
import subprocess
import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]


@pytest.fixture
def checkout(tmp_path: Path) -> Path:
    """A repository at the tag v0.1.0 whose package says that this is its version."""
    (tmp_path / "scripts").mkdir()
    shutil.copy(ROOT / "scripts/release.sh", tmp_path / "scripts")
    (tmp_path / "mgpu_ops.py").write_text("__version__ = '0.1.0'\n")
    (tmp_path / "CHANGELOG.md").write_text("# Changelog\n\n## [Unreleased]\n")
    (tmp_path / ".gitignore").write_text("__pycache__\n")
    git(tmp_path, "init")
    git(tmp_path, "add", "-A")
    git(tmp_path, "commit", "-m", "x")
    git(tmp_path, "tag", "v0.1.0")
    return tmp_path


def git(folder: Path, *words: str) -> None:
    who = ("-c", "user.name=x", "-c", "user.email=x@y", "-c", "commit.gpgsign=false", "-c", "tag.gpgsign=false")
    subprocess.run(["git", "-C", folder, *who, *words], check=True, capture_output=True)


def refused(folder: Path) -> str:
    """The one sentence that `scripts/release.sh` ends with, before it has made anything."""
    environment = {name: value for name, value in os.environ.items() if name != "PYTHONPATH"} | {"PYTHON": sys.executable}
    done = subprocess.run(["scripts/release.sh"], cwd=folder, env=environment, capture_output=True, text=True, check=False)
    assert done.returncode == 1
    assert not (folder / "dist").exists()
    (line,) = done.stderr.splitlines()
    return line


def test_what_is_not_committed_is_refused(checkout: Path) -> None:
    (checkout / "new.py").touch()
    assert refused(checkout).startswith("release: commit or remove what is not committed")


def test_a_tag_without_its_section_in_the_changelog_is_refused(checkout: Path) -> None:
    assert "CHANGELOG.md has no section '## [0.1.0] - <date>'" in refused(checkout)


def test_a_tag_of_another_version_is_refused(checkout: Path) -> None:
    git(checkout, "tag", "-d", "v0.1.0")
    git(checkout, "tag", "v0.2.0")
    assert "the tag is v0.2.0, but the version is 0.1.0" in refused(checkout)
