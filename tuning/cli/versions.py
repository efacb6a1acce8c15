"""What `mgpu-tune --version` prints, for bug reports. Imports no JAX."""

from __future__ import annotations

import importlib.metadata
import importlib.util
import os
import platform
import re
import shutil
import subprocess
from pathlib import Path

import mgpu_ops
from mgpu_ops.tuning import neighbours


def text(has_gpu: bool) -> str:
    """Versions of the package, Python, jax, the CUDA plugin, ptxas and, with `has_gpu`, the GPUs; a line each."""
    lines = [
        f"mgpu_ops {mgpu_ops.__version__} ({mgpu_ops.__path__[0]})",
        f"Python {platform.python_version()}",
        f"jax {_version('jax')}, jaxlib {_version('jaxlib')}, jax-cuda13-plugin {_version('jax-cuda13-plugin')}",
        f"ptxas {_ptxas() or 'not found'}",
        *(_gpus() if has_gpu else ["no NVIDIA GPU"]),
    ]
    return "\n".join(lines)


def _version(distribution: str) -> str:
    try:
        return importlib.metadata.version(distribution)
    except importlib.metadata.PackageNotFoundError:
        return "not installed"


def _ptxas() -> str | None:
    """Release and path of the ptxas where JAX looks for one: $CUDA_ROOT, its wheel, PATH, /usr/local/cuda."""
    roots = [os.environ.get("CUDA_ROOT")]
    try:
        wheel = importlib.util.find_spec("nvidia.cu13")
    except (ImportError, ValueError):
        wheel = None
    roots += (wheel.submodule_search_locations or []) if wheel else []
    paths = [shutil.which("ptxas", path=Path(root, "bin")) for root in roots if root]
    for path in [*paths, shutil.which("ptxas"), shutil.which("ptxas", path="/usr/local/cuda/bin")]:
        if path is not None:
            match = re.search(r"\bV(\d+[\d.]*)", _said_by(path, "--version"))
            return f"{match[1] if match else 'of an unknown release'} ({path})"
    return None


def _gpus() -> list[str]:
    """ "2 x NVIDIA H200, driver 580.159.04", as nvidia-smi says."""
    listed = neighbours.asked("--query-gpu=name,driver_version") or []
    found = [line.rpartition(", ") for line in dict.fromkeys(listed)]
    return [f"{listed.count(f'{name}, {driver}')} x {name}, driver {driver}" for name, _, driver in found] or [
        "an NVIDIA GPU of which nvidia-smi says nothing"
    ]


def _said_by(*command: str) -> str:
    try:
        return subprocess.run(command, check=False, capture_output=True, text=True, timeout=10).stdout
    except (OSError, subprocess.SubprocessError, UnicodeDecodeError):
        return ""
