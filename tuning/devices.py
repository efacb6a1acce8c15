"""The choice of what candidates are judged on: the GPU here, several of them, or the model of one that is not here.

Importing this module imports no JAX: `mgpu-tune` asks `has_gpu` before JAX starts.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import TYPE_CHECKING

from mgpu_ops.core import extras
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.tuning.device import Device, Measured


class NoDevice(ValueError):
    """There is nothing here to tune on as asked; the message ends in the way out."""


def has_gpu() -> bool:
    """Whether this machine has an NVIDIA GPU, by its device files."""
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def device_for(name: str | None, gpus: int = 1, *, say: Callable[[str], None], option: str = "--gpu") -> Device:
    """The GPU here, or the first `gpus` of them, if `name` is None or theirs; else the model of the GPU of that name.

    `say` is told which it is. Raises NoDevice, which names the caller's `option`, where there is neither; WorkerError where a
    GPU is here, none is named, and it cannot be measured on; ValueError for an unknown name.
    """
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning.device import Modelled

    wanted = gpu.find(name) if name else None
    here = _here(wanted is None, gpus, say, option) if has_gpu() else None
    if here is not None:
        if wanted is None or wanted.key == here.gpu.key:
            say(f"measuring on {here.gpu.name}, driver {here.versions['driver']}")
            return here
        here.close()
    if wanted is None:
        known = ", ".join(g.key for g in gpu.GPUS)
        raise NoDevice(f"no Hopper GPU here to measure on: name the GPU to model with {option} ({known})")
    device = Modelled(wanted)
    uncompiled = f"candidates are not compiled ({extras.install('aot')})"
    compiled = "each candidate is compiled for it" if device.compiles else uncompiled
    say(f"no {wanted.name} here: times are MODELLED, not measured; {compiled}. Tune again on the GPU itself.")
    return device


def _here(needed: bool, gpus: int, say: Callable[[str], None], option: str) -> Measured | None:
    """The first `gpus` GPUs of this machine; None where they cannot be measured on and are not `needed`."""
    from mgpu_ops.tuning import device, neighbours
    from mgpu_ops.tuning.worker import WorkerError

    visible = neighbours.visible()
    if gpus > max(1, len(visible)) and needed:
        raise NoDevice(
            f"the problem takes {gpus} GPUs, and {len(visible)} are visible here: name one with {option} to model it"
        )
    try:
        return device.Measured(",".join(visible[:gpus]) or None)
    except WorkerError as error:
        if needed:
            raise
        say(str(error))
        return None


@contextlib.contextmanager
def devices_for(
    name: str | None, workers: int | None = 1, gpus: int = 1, *, say: Callable[[str], None]
) -> Iterator[list[Device]]:
    """The one of `device_for`, or as many GPUs of this machine as there are `workers` (None: all), with `gpus` for each.

    They are closed in the end. Raises NoDevice for several workers where no GPU is, or GPUs of several kinds, or another kind
    than `name`; and what `device_for` and `many.devices` raise.
    """
    if workers == 1:
        device = device_for(name, gpus, say=say)
        try:
            yield [device]
        finally:
            device.close()
        return
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import many

    if not has_gpu():
        raise NoDevice("--workers measures on the GPUs of this machine, and no NVIDIA GPU is here: leave it out, or go to one")
    with many.devices(workers, gpus) as found:
        names = list(dict.fromkeys(device.gpu.name for device in found))
        if len(names) > 1:
            raise NoDevice(f"the GPUs here are {' and '.join(names)}: let CUDA_VISIBLE_DEVICES name those of one kind")
        if name and gpu.find(name).key != found[0].gpu.key:
            raise NoDevice(f"--gpu {name} would be modelled, --workers measures on {names[0]}: leave one of them out")
        number = len(found) * gpus
        say(f"measuring on {count(number, 'GPU')}: {names[0]}, driver {found[0].versions['driver']}")
        yield list(found)
