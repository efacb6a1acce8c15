"""The version of the package: that of git's tags in a checkout, else what it was built or installed as."""

from __future__ import annotations

import importlib.metadata
import os
import re
import subprocess
import tomllib
from email.parser import HeaderParser
from pathlib import Path

_DESCRIBED = re.compile(r"v(?P<release>\d+(?:\.\d+)*)-(?P<commits>\d+)-(?P<node>g[0-9a-f]+)")


def version_of(root: Path) -> str:
    """The version of what lies in `root`: a checkout, an unpacked sdist, or the folder that packages are installed in.

    "unknown" where the package is none of these: a copy of its folder.
    """
    if _is_ours(root / "pyproject.toml"):
        found = of_checkout(root) or _of_sdist(root / "PKG-INFO")
        if found:
            return found
    try:
        return importlib.metadata.version("mgpu-ops")
    except importlib.metadata.PackageNotFoundError:
        return "unknown"


def of_checkout(root: Path) -> str | None:
    """By the rule of hatch-vcs, so that a build has the same: 0.1.0 at the tag v0.1.0, 0.1.1.dev5+gabc five commits later.

    None where `root` is not the top of a repository, or git does not run.
    """
    if not (root / ".git").exists():
        return None
    described = _git(root, "describe", "--tags", "--long", "--abbrev=9", "--match", "v[0-9]*")
    if described is None:  # no tag yet
        commits, node = _git(root, "rev-list", "--count", "HEAD"), _git(root, "rev-parse", "--short=9", "HEAD")
        described = f"v0.0-{commits}-g{node}"
    match = _DESCRIBED.fullmatch(described)
    if match is None:
        return None
    if match["commits"] == "0":
        return match["release"]
    *first, last = match["release"].split(".")
    return f"{'.'.join([*first, str(int(last) + 1)])}.dev{match['commits']}+{match['node']}"


def _is_ours(pyproject: Path) -> bool:
    try:
        return bool(tomllib.loads(pyproject.read_text(encoding="utf-8"))["project"]["name"] == "mgpu-ops")
    except (OSError, ValueError, KeyError):
        return False


def _of_sdist(info: Path) -> str | None:
    try:
        return HeaderParser().parsestr(info.read_text(encoding="utf-8"))["Version"]
    except (OSError, ValueError):
        return None


def _git(root: Path, *words: str) -> str | None:
    """What git says of the repository in `root`, whatever repository the caller's environment names."""
    environment = {name: value for name, value in os.environ.items() if not name.startswith("GIT_")}
    try:
        done = subprocess.run(["git", "-C", root, *words], capture_output=True, text=True, env=environment, check=False)
    except OSError:
        return None
    return done.stdout.strip() if done.returncode == 0 else None
