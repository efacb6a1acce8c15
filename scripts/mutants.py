"""Plants each bug of tests/mutants/ in a copy of the checkout, runs the tests named for it, and says which test catches it.

    python scripts/mutants.py [--jobs N] [--no-clean] [NAME ...]        # `make mutants`

A file tests/mutants/NAME.patch begins with a line that says what the bug is, and a line `tests:` with the files or tests that
should fail. First those run without any bug, and must pass. Exit status 1 where a bug is missed, a patch no longer applies, or
a named test fails without a bug.
"""

from __future__ import annotations

import argparse
import concurrent.futures
import dataclasses
import os
import re
import shutil
import signal
import subprocess
import sys
import tempfile
from collections import Counter
from collections.abc import Iterable, Sequence
from pathlib import Path

ROOT = Path(__file__).parents[1]
FOLDER = ROOT / "tests" / "mutants"
SECONDS = 900.0  # for the tests of one bug: one that makes them hang is caught, too


@dataclasses.dataclass(frozen=True)
class Hunk:
    """A place that a patch changes: these lines of a file, which stand there once, become those."""

    path: str
    old: str
    new: str


@dataclasses.dataclass(frozen=True)
class Mutant:
    path: Path
    what: str
    tests: tuple[str, ...]
    hunks: tuple[Hunk, ...]

    @property
    def name(self) -> str:
        return self.path.stem

    def stale(self, root: Path) -> str | None:
        """Why the patch no longer applies to the checkout at `root`, or None."""
        for test in self.tests:
            name, _, function = test.partition("::")
            if not (root / name).exists() or f"def {function}" not in (root / name).read_text():
                return f"there is no {test}"
        for hunk in self.hunks:
            file = root / hunk.path
            if not file.exists():
                return f"there is no {hunk.path}"
            if (count := file.read_text().count(hunk.old)) != 1:
                return f"{hunk.path} has {count} places that read:\n{hunk.old}"
        return None

    def plant(self, root: Path) -> None:
        for hunk in self.hunks:
            file = root / hunk.path
            file.write_text(file.read_text().replace(hunk.old, hunk.new))


def read(path: Path) -> Mutant:
    """ValueError where the file does not say what the bug is, which tests should fail, or what to change."""
    head, *files = re.split(r"^--- a/.*\n\+\+\+ b/(.*)\n", path.read_text(), flags=re.MULTILINE)
    what, *rest = head.splitlines() or [""]
    tests = [word for line in rest if line.startswith("tests:") for word in line.removeprefix("tests:").split()]
    hunks = [
        Hunk(name, _side(hunk, "-"), _side(hunk, "+"))
        for name, body in zip(files[::2], files[1::2], strict=True)
        for hunk in re.split(r"^@@.*\n", body, flags=re.MULTILINE)[1:]
    ]
    if not what or what.startswith("tests:") or not tests or not hunks:
        raise ValueError(f"{path.name}: wanted a line that says what the bug is, `tests:` with what should fail, and a patch")
    return Mutant(path, what, tuple(tests), tuple(hunks))


def _side(hunk: str, sign: str) -> str:
    return "".join(line[1:] for line in hunk.splitlines(keepends=True) if line[0] in (" ", sign))


def copy_of_the_checkout(folder: Path) -> None:
    """The files that git knows or does not ignore, with links as links."""
    command = ["git", "ls-files", "-z", "--cached", "--others", "--exclude-standard"]
    listed = subprocess.run(command, cwd=ROOT, check=True, capture_output=True, text=True)
    for name in filter(None, listed.stdout.split("\0")):
        source, target = ROOT / name, folder / name
        if source.is_symlink() or source.exists():
            target.parent.mkdir(parents=True, exist_ok=True)
            shutil.copy2(source, target, follow_symlinks=False)


def failure(folder: Path, tests: Sequence[str]) -> str | None:
    """The first of the tests that fails, or None; RuntimeError where pytest could not run them."""
    env = {**os.environ, "PYTHONPATH": str(folder), "PYTHONDONTWRITEBYTECODE": "1"}
    command = [sys.executable, "-m", "pytest", "-x", "-q", "-p", "no:cacheprovider", "--timeout", "300", *tests]
    with subprocess.Popen(
        command, cwd=folder, env=env, stdout=subprocess.PIPE, stderr=subprocess.STDOUT, text=True, start_new_session=True
    ) as process:
        try:
            output, _ = process.communicate(timeout=SECONDS)
        except subprocess.TimeoutExpired:
            os.killpg(process.pid, signal.SIGKILL)
            return f"{' '.join(tests)} (hangs)"
    if process.returncode == 0:
        return None
    failed = re.search(r"^(?:FAILED|ERROR) (\S+)", output, re.MULTILINE)
    if not failed or process.returncode not in (1, 2):  # 2: a module cannot be imported
        raise RuntimeError(f"pytest ended with {process.returncode}: {' '.join(output.strip().splitlines()[-1:])}")
    return failed[1]


def verdict(mutant: Mutant) -> tuple[str, str]:
    """ "caught" and by which test, "MISSED", "STALE" and why, or "ERROR" and which."""
    if reason := mutant.stale(ROOT):
        return "STALE", reason
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_of_the_checkout(Path(name))
        mutant.plant(Path(name))
        try:
            test = failure(Path(name), mutant.tests)
        except RuntimeError as error:
            return "ERROR", str(error)
    return ("caught", test) if test else ("MISSED", " ".join(mutant.tests))


def failing_without_a_bug(mutants: Iterable[Mutant]) -> list[str]:
    tests = sorted({test for mutant in mutants for test in mutant.tests})
    with tempfile.TemporaryDirectory(prefix="mutant-") as name:
        copy_of_the_checkout(Path(name))
        return [found for test in tests if (found := failure(Path(name), [test]))]


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("names", nargs="*", metavar="NAME", help="the bugs to plant (default: all)")
    parser.add_argument("--jobs", type=int, default=1, help="how many at a time (default: 1)")
    parser.add_argument("--no-clean", action="store_true", help="do not first run the named tests without a bug")
    given = parser.parse_args(arguments)
    mutants = {mutant.name: mutant for mutant in map(read, sorted(FOLDER.glob("*.patch")))}
    if unknown := set(given.names) - set(mutants):
        parser.error(f"no bug is called {', '.join(sorted(unknown))}")
    chosen = [mutant for name, mutant in mutants.items() if name in given.names or not given.names]
    failing = [] if given.no_clean else failing_without_a_bug(chosen)
    for test in failing:
        print(f"fails without a bug: {test}", flush=True)
    counts: Counter[str] = Counter()
    with concurrent.futures.ThreadPoolExecutor(given.jobs) as pool:
        for mutant, (found, why) in zip(chosen, pool.map(verdict, chosen), strict=True):
            counts[found] += 1
            print(f"{found:7} {mutant.name}: {mutant.what}\n        {why}", flush=True)
    print(f"{counts['caught']} of {len(chosen)} caught")
    return 0 if counts["caught"] == len(chosen) and not failing else 1


if __name__ == "__main__":
    sys.exit(main())
