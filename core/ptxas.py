"""The ptxas that Mosaic GPU compiles with: which one that is, and warnings of a known bug of older ones.

When it first compiles in a process, Mosaic takes the first ptxas in PATH, else that of the nvidia-cuda-nvcc wheel, and keeps to
it; CUDA_ROOT and XLA's --xla_gpu_cuda_data_dir, which XLA's own kernels heed, do not move it. `prefer_newest` puts the newest
one there is first in PATH, for this process and those that it starts.
"""

from __future__ import annotations

import atexit
import dataclasses
import functools
import logging
import os
import re
import shutil
import subprocess
import tempfile
from collections.abc import Iterator
from pathlib import Path

VARIABLE = "MGPU_OPS_PTXAS"
_FIXED = 93  # the PTX ISA of CUDA 13.3
_log = logging.getLogger("mgpu_ops")


@dataclasses.dataclass(frozen=True)
class Ptxas:
    """A ptxas: its path, its CUDA version as (13, 5, 37), () where unknown, and where it was found."""

    path: Path
    version: tuple[int, ...]
    found: str

    def __str__(self) -> str:
        return f"ptxas {'.'.join(map(str, self.version)) or 'of unknown version'} ({self.path}, {self.found})"


def register_operand_bug(isa: int) -> str | None:
    """A warning of what may go wrong where wgmma reads its first operand from registers; None for a ptxas without the bug.

    isa: the newest PTX ISA that ptxas knows, 93 for 9.3. Such a ptxas may give the operand's registers to something else before
    the asynchronous wgmma has read them. Source: triton-lang/triton#11781, which saw wrong sums with 12.9 and right ones with
    13.4, and names the release notes of CUDA 13.3 for the fix; kernels that it hits are rare.
    """
    if isa >= _FIXED:
        return None
    return (
        f"Mosaic GPU compiles with a ptxas of PTX ISA {isa // 10}.{isa % 10}, older than CUDA 13.3: it may overwrite registers "
        "that a wgmma still reads, so that results of attention may be wrong (triton-lang/triton#11781). Upgrade "
        f"nvidia-cuda-nvcc or the CUDA toolkit to 13.3 or newer; {VARIABLE} and CUDA_ROOT may name an older one"
    )


def chosen() -> Ptxas | None:
    """The ptxas that kernels of this library compile with, as the environment is now; None where there is none.

    $MGPU_OPS_PTXAS, a path, or "path" for the first in PATH; else that of $CUDA_ROOT, where that is set and has one; else the
    newest of those in PATH and in the nvidia-cuda-nvcc wheel, of equal ones the first in PATH. Raises ValueError where
    $MGPU_OPS_PTXAS names no executable file.
    """
    wanted = os.environ.get(VARIABLE, "").strip()
    in_path = list(_in_path())
    if wanted == "path":
        return _asked(in_path[0], f"the first in PATH, by {VARIABLE}") if in_path else None
    if wanted:
        if not _runs(Path(wanted)):
            raise ValueError(f'{VARIABLE}={wanted!r} is no executable file: name a ptxas, or "path" for the first in PATH')
        return _asked(Path(wanted).absolute(), f"by {VARIABLE}")
    root = os.environ.get("CUDA_ROOT")
    if root and _runs(at := Path(root) / "bin" / "ptxas"):
        return _asked(at.absolute(), "by CUDA_ROOT")
    candidates = [(path, "in PATH") for path in in_path] + [(path, "in the nvidia-cuda-nvcc wheel") for path in _in_wheel()]
    distinct = {path.resolve(): (path, found) for path, found in reversed(candidates)}.values()
    every = [_asked(path, found) for path, found in reversed(distinct)]
    return max(every, key=lambda one: one.version, default=None)


@functools.cache
def prefer_newest() -> Ptxas | None:
    """Makes Mosaic compile with `chosen()`, once for the process, and logs which that is. Mosaic must not have compiled before.

    Where another comes first in PATH, a folder with a link to it and nothing else is put before that.
    """
    found = chosen()
    if found is None:
        return None
    first = next(_in_path(), None)
    if first is None or first.resolve() != found.path.resolve():
        folder = tempfile.mkdtemp(prefix="mgpu-ops-ptxas-")
        atexit.register(shutil.rmtree, folder, ignore_errors=True)
        Path(folder, "ptxas").symlink_to(found.path)
        os.environ["PATH"] = os.pathsep.join([folder, *filter(None, [os.environ.get("PATH")])])
    _log.info("Mosaic GPU compiles with %s", found)
    return found


def _in_path() -> Iterator[Path]:
    for folder in os.environ.get("PATH", "").split(os.pathsep):
        if folder and _runs(path := Path(folder, "ptxas")):
            yield path


def _in_wheel() -> Iterator[Path]:
    """Where jax looks, whatever CUDA_ROOT says."""
    from jax._src import lib

    for name in ("nvidia.cu13", "nvidia.cuda_nvcc"):
        for folder in _folders(name):
            if _runs(path := Path(folder, "bin", "ptxas")):
                yield path
    if lib.cuda_path and _runs(path := Path(lib.cuda_path, "bin", "ptxas")):
        yield path


def _folders(package: str) -> list[str]:
    import importlib.util

    try:
        spec = importlib.util.find_spec(package)
    except ModuleNotFoundError:  # not even its parent
        return []
    return list(spec.submodule_search_locations or []) if spec else []


def _runs(path: Path) -> bool:
    return path.is_file() and os.access(path, os.X_OK)


def _asked(path: Path, found: str) -> Ptxas:
    return Ptxas(path, _version(path), found)


@functools.cache
def _version(path: Path) -> tuple[int, ...]:
    try:
        said = subprocess.run([path, "--version"], capture_output=True, text=True, timeout=60).stdout
    except (OSError, subprocess.SubprocessError):
        return ()
    numbers = re.search(r"\bV(\d+(?:\.\d+)+)", said) or re.search(r"release (\d+(?:\.\d+)+)", said)
    return tuple(int(number) for number in numbers[1].split(".")) if numbers else ()


@functools.cache
def isa() -> int | None:
    """The newest PTX ISA that Mosaic's ptxas knows, 93 for 9.3: Mosaic's own answer. None where there is no ptxas."""
    from jax._src.lib import mosaic_gpu

    prefer_newest()
    try:
        return mosaic_gpu._mosaic_gpu_ext._get_ptxas_isa_version()
    except (AttributeError, RuntimeError):  # no CUDA plugin; no ptxas
        return None


@functools.cache
def warn_of_register_operands() -> None:
    """Logs `register_operand_bug` of this process's ptxas, if any, the first time that a kernel is traced that it may hit."""
    found = isa()
    reason = None if found is None else register_operand_bug(found)
    if reason is not None:
        _log.warning("%s", reason)
