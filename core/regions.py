"""What a kernel does with its time, as regions of Mosaic GPU's profiler: load, wait, multiply, softmax, store.

    with regions.recorded(folder, ranges=256):
        run(problem, config, gpu, *arrays)  # traced here, its kernels write a trace each to the folder when they run

While nothing is recorded, a kernel is traced as if there were no regions. While it is, the primitives below are regions
wherever they are called, in JAX's own pipelines too, and so is what a kernel marks with `region`. None lies within another.
A recorded kernel keeps its trace in shared memory, which its config must leave free, and takes some cycles for each range.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from pathlib import Path
from typing import Any
from unittest import mock

import jax
from jax._src.pallas.mosaic_gpu import primitives
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core.contexts import having

REGIONS = ("load", "wait", "multiply", "softmax", "store")
_PRIMITIVES = {
    "copy_gmem_to_smem": "load",
    "barrier_wait": "wait",
    "wgmma": "multiply",
    "wgmma_wait": "multiply",
    "wgmma_accumulator_load": "multiply",
    "copy_smem_to_gmem": "store",
    "wait_smem_to_gmem": "store",
}


@dataclasses.dataclass(frozen=True)
class Kernel:
    """A kernel that was traced to be recorded."""

    name: str
    warpgroups: int  # of a block, the producer last


@dataclasses.dataclass(frozen=True)
class _Recording:
    folder: Path
    ranges: int
    kernels: list[Kernel]


_recording: ContextVar[_Recording | None] = ContextVar("_recording", default=None)
_inside: ContextVar[bool] = ContextVar("_inside", default=False)


@contextlib.contextmanager
def recorded(folder: Path, ranges: int) -> Iterator[list[Kernel]]:
    """Kernels traced inside record up to `ranges` ranges of each warpgroup, the first ones, and write them to `folder`.

    Yields the list to which these kernels are added.
    """
    kernels: list[Kernel] = []
    with having(_recording, _Recording(folder, ranges, kernels)):
        yield kernels


@contextlib.contextmanager
def region(name: str) -> Iterator[None]:
    """What a kernel does inside is a region of this name, one of `REGIONS`, while it is recorded."""
    if _recording.get() is None or _inside.get():
        yield
        return
    with having(_inside, True), jax.named_scope(name):
        yield


def compiler_params(name: str, warpgroups: int) -> dict[str, Any]:
    """What the CompilerParams of a kernel say of recording."""
    found = _recording.get()
    if found is None:
        return {}
    found.kernels.append(Kernel(name, warpgroups))
    return {"profile_space": found.ranges, "profile_dir": str(found.folder), "profile_bounds_check": True}


@contextlib.contextmanager
def named_primitives() -> Iterator[None]:
    """While a kernel is traced that is recorded: the primitives are regions."""
    if _recording.get() is None:
        yield
        return
    with contextlib.ExitStack() as stack:
        for name, where in _PRIMITIVES.items():
            for module in (plgpu, primitives):
                if hasattr(module, name):
                    stack.enter_context(mock.patch.object(module, name, _as_region(where, getattr(module, name))))
        yield


def _as_region(name: str, primitive: Callable[..., Any]) -> Callable[..., Any]:
    @functools.wraps(primitive)
    def named(*args: Any, **options: Any) -> Any:
        with region(name):
            return primitive(*args, **options)

    return named
