"""The Mosaic GPU engine of mgpu_ops: it knows no op.

`mgpu_ops.core.kernel`, `.emit_pipeline_warp_specialized`, `.wgmma` and the rest of `mgpu_ops.core.engine` load on first
use, so that `import mgpu_ops` does not import Pallas.
"""

from __future__ import annotations

import typing

if typing.TYPE_CHECKING:
    from mgpu_ops.core.engine import *  # noqa: F403


def __getattr__(name: str) -> typing.Any:
    import importlib.util

    if name.startswith("__") or importlib.util.find_spec(f"{__name__}.{name}"):
        raise AttributeError(name)  # a module of this package: the import system goes on to load it
    engine = importlib.import_module("mgpu_ops.core.engine")
    try:
        return getattr(engine, name)
    except AttributeError:
        raise AttributeError(f"mgpu_ops.core has no {name!r}: what kernels may use is listed in core/engine.py") from None


def __dir__() -> list[str]:
    import importlib

    return [n for n in dir(importlib.import_module("mgpu_ops.core.engine")) if n[0] != "_"]
