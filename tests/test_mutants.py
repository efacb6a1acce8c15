"""The planted bugs of tests/mutants: each still finds its place in the code, and `make mutants` tells caught from missed."""

from __future__ import annotations

import sys
from pathlib import Path

import pytest

ROOT = Path(__file__).parents[1]
sys.path.insert(0, str(ROOT / "scripts"))

import mutants  # noqa: E402

PATCHES = sorted(mutants.FOLDER.glob("*.patch"))


@pytest.mark.parametrize("path", PATCHES, ids=lambda path: path.stem)
def test_each_bug_finds_its_place_and_its_tests(path):
    """Else: write the patch anew, so that it plants the same bug in the code as it is now."""
    assert mutants.read(path).stale(ROOT) is None


def test_there_are_forty_bugs_or_more_in_all_rooms():
    assert len(PATCHES) >= 40
    places = {"/".join(hunk.path.split("/")[:2]) for path in PATCHES for hunk in mutants.read(path).hunks}
    rooms = {"core", "mgpu_ops/registry", "mgpu_ops/matmul", "mgpu_ops/attention", "mgpu_ops/grouped", "mgpu_ops/collectives"}
    rooms |= {"tuning", "tuning/fleet", "tuning/bench", "tuning/cli"}
    assert {room for room in rooms if not any(f"{place}/".startswith(f"{room}/") for place in places)} == set()


PATCH = """\
The sum is a difference
tests: tests/test_sum.py

--- a/sums.py
+++ b/sums.py
@@ -1,2 +1,2 @@
 def add(a, b):
-    return a + b
+    return a - b
"""


@pytest.fixture
def checkout(tmp_path, monkeypatch):
    """Of two files; writes a test and says what becomes of the bug."""
    (tmp_path / "tests").mkdir()
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return a + b\n")
    (tmp_path / "sum.patch").write_text(PATCH)
    monkeypatch.setattr(mutants, "ROOT", tmp_path)
    monkeypatch.setattr(mutants, "copy_of_the_checkout", lambda folder: copied(tmp_path, folder))

    def verdict(test):
        (tmp_path / "tests" / "test_sum.py").write_text(f"import sums\n\n\ndef test_add():\n    {test}\n")
        return mutants.verdict(mutants.read(tmp_path / "sum.patch"))

    return verdict


def copied(source, target):
    (target / "tests").mkdir()
    for name in ("sums.py", "tests/test_sum.py"):
        (target / name).write_text((source / name).read_text())


def test_a_bug_is_caught_by_the_test_that_fails_or_missed(checkout):
    assert checkout("assert sums.add(1, 2) == 3") == ("caught", "tests/test_sum.py::test_add")
    assert checkout("assert sums.add(1, 0) == 1") == ("MISSED", "tests/test_sum.py")


def test_a_patch_that_no_longer_applies_says_where(checkout, tmp_path):
    (tmp_path / "sums.py").write_text("def add(a, b):\n    return b + a\n")
    found, why = checkout("pass")
    assert found == "STALE"
    assert why.startswith("sums.py has 0 places that read:\ndef add(a, b):\n    return a + b")


@pytest.mark.parametrize("missing", ["The sum is a difference\n", "tests: tests/test_sum.py\n", PATCH.partition("\n\n")[2]])
def test_a_patch_that_lacks_a_part_is_an_error(missing, tmp_path):
    (tmp_path / "sum.patch").write_text(PATCH.replace(missing, ""))
    with pytest.raises(ValueError, match=r"sum\.patch: wanted a line that says what the bug is"):
        mutants.read(tmp_path / "sum.patch")
