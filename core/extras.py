"""The optional dependencies: which modules each extra installs, and how to install a missing one. Imports none of them."""

from __future__ import annotations

import importlib.util
import sys
from collections.abc import Iterable, Sequence

BRINGS = {  # of pyproject.toml; the modules that a user may meet
    "tune": ("matplotlib", "optuna", "pynvml", "rich"),
    "gp": ("scipy", "torch"),
    "grpc": ("google.protobuf", "grpc"),
    "postgresql": ("psycopg",),
    "mysql": ("pymysql",),
    "dashboard": ("optuna_dashboard",),
}


class MissingExtra(ImportError):
    """A module of an extra is not installed. The message is one line that ends in how to install it."""


def require(what: str, modules: Iterable[str]) -> None:
    """Raises MissingExtra where `what`, a command or function, lacks one of these modules of `BRINGS`."""
    lacking = [module for module in modules if not installed(module)]
    if lacking:
        raise missing(what, lacking)


def missing(what: str, modules: Sequence[str]) -> MissingExtra:
    return MissingExtra(f"{what} needs {' and '.join(modules)}: {way_to(modules)}")


def brought(module: str | None) -> bool:
    """Whether an extra brings it."""
    return any(module in modules for modules in BRINGS.values())


def installed(module: str) -> bool:
    if sys.modules.get(module) is not None:
        return True
    try:
        return importlib.util.find_spec(module) is not None
    except (ImportError, ValueError):
        return False


def way_to(modules: Iterable[str]) -> str:
    """What brings these modules of `BRINGS`. The package is on no index: an extra comes from a checkout."""
    wanted = set(modules)
    return install(*(extra for extra, brings in BRINGS.items() if wanted & {*brings}))


def install(*extras: str) -> str:
    return f"run `pip install '.[{','.join(extras)}]'` in a checkout of mgpu_ops"
