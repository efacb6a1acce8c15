"""Hatchling runs this before it builds a wheel or an sdist: the links mgpu_ops/core and mgpu_ops/tuning must lead to folders.

git with core.symlinks=false writes links as text files. A wheel built from those would lack both folders.
"""

from __future__ import annotations

from pathlib import Path
from typing import Any

from hatchling.builders.hooks.plugin.interface import BuildHookInterface


class LinksAreFolders(BuildHookInterface):  # type: ignore[type-arg]
    PLUGIN_NAME = "custom"

    def initialize(self, version: str, build_data: dict[str, Any]) -> None:
        for name in ("core", "tuning"):
            if not Path(self.root, "mgpu_ops", name).is_dir():
                self.app.abort(
                    f"mgpu_ops/{name} is not the link to ../{name} that git stores: on a file system with symbolic links, run "
                    "`git config core.symlinks true` and `git checkout -- mgpu_ops/core mgpu_ops/tuning`, then build again"
                )
