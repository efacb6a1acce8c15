"""The commands of `mgpu-tune`, one module each: `register` says what it takes, `run` carries it out.

What they share is here and in `arguments`.
"""

from __future__ import annotations

import argparse
import contextlib
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any, NoReturn

from mgpu_ops.core import extras
from mgpu_ops.registry import places
from mgpu_ops.tuning.terminal import printable

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130


class UsageError(Exception):
    """A request that cannot be carried out; the message says why and what to do."""


class Parser(argparse.ArgumentParser):
    """Shows examples as they are written. What is asked wrongly is one line, and one that says where help is."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)

    def error(self, message: str) -> NoReturn:
        self.exit(USAGE, f"{self.prog}: {printable(message)}\nsee `{self.prog} --help`\n")


def command(commands: Any, name: str, run: Any, what: str, examples: str, needs: Sequence[str] = ()) -> argparse.ArgumentParser:
    """`needs`: modules of extras, without which the command is refused before anything is done."""
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", epilog=f"examples:\n{lines}"
    )
    parser.add_argument("--json", action="store_true", help="print one line of JSON; what is for people goes to stderr")
    parser.set_defaults(run=run, parser=parser, needs=tuple(needs))
    return parser


def say(text: str) -> None:
    """Prints a line for people."""
    print(printable(text), flush=True)


def answer(arguments: argparse.Namespace, document: Any) -> None:
    """Prints what `--json` asks for, if it does: one line, the only one on stdout."""
    if arguments.json:
        import msgspec

        # A path may hold bytes that are no text.
        as_text = lambda path: str(path).encode(errors="backslashreplace").decode()  # noqa: E731
        print(msgspec.json.encode(document, enc_hook=as_text).decode(), file=arguments.stdout, flush=True)


def writable(path: Path, option: str, *, folder: bool = False) -> None:
    """Refuses, before the work, a file or a `folder` for results in which nothing can be written."""
    fault = (places.folder_fault if folder else places.file_fault)(path)
    if fault is not None:
        raise UsageError(f"{path}: cannot be written ({fault}): name another {option}")


def count(number: int, what: str) -> str:
    """ "1 fault", "2 faults" """
    return f"{number} {what}{'s' * (number != 1)}"


def has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


def gpu_or_current(name: str | None) -> Any:
    from mgpu_ops.core import gpu

    found = gpu.find(name) if name else gpu.current()
    if found is None:
        raise UsageError(f"no NVIDIA GPU here: name one with --gpu ({', '.join(g.key for g in gpu.GPUS)})")
    return found


def device_for(name: str | None, gpus: int = 1) -> Any:
    """The GPU here if there is one and it is the one asked for, or so many of them; else the model of the one asked for."""
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import neighbours
    from mgpu_ops.tuning.device import Measured, Modelled
    from mgpu_ops.tuning.worker import WorkerError

    wanted = gpu.find(name) if name else None
    here = None
    if has_gpu():
        visible = neighbours.visible()
        if gpus > max(1, len(visible)) and wanted is None:
            raise UsageError(
                f"the problem takes {gpus} GPUs, and {len(visible)} are visible here: name one with --gpu to model it"
            )
        try:
            here = Measured(",".join(visible[:gpus]) or None)
        except WorkerError as e:  # another GPU than a Hopper does not keep one from being modelled
            if wanted is None:
                raise
            say(str(e))
    if here is not None:
        if wanted is None or wanted.key == here.gpu.key:
            say(f"measuring on {here.gpu.name}, driver {here.versions['driver']}")
            return here
        here.close()
    if wanted is None:
        raise UsageError(
            f"no Hopper GPU here to measure on: name the GPU to model with --gpu ({', '.join(g.key for g in gpu.GPUS)})"
        )
    device = Modelled(wanted)
    uncompiled = f"candidates are not compiled ({extras.install('aot')})"
    compiled = "each candidate is compiled for it" if device.compiles else uncompiled
    say(f"no {wanted.name} here: times are MODELLED, not measured; {compiled}. Tune again on the GPU itself.")
    return device


@contextlib.contextmanager
def devices_for(arguments: argparse.Namespace, gpus: int = 1) -> Iterator[list[Any]]:
    """The device that `--gpu` names, or the GPUs that `--workers` asks for, `gpus` for each worker; closed in the end."""
    if arguments.workers == 1:
        device = device_for(arguments.gpu, gpus)
        try:
            yield [device]
        finally:
            device.close()
        return
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import many

    if not has_gpu():
        raise UsageError(
            "--workers measures on the GPUs of this machine, and no NVIDIA GPU is here: leave it out, or go to one"
        )
    with many.devices(arguments.workers, gpus) as devices:
        names = list(dict.fromkeys(device.gpu.name for device in devices))
        if len(names) > 1:
            raise UsageError(f"the GPUs here are {' and '.join(names)}: let CUDA_VISIBLE_DEVICES name those of one kind")
        if arguments.gpu and gpu.find(arguments.gpu).key != devices[0].gpu.key:
            raise UsageError(
                f"--gpu {arguments.gpu} would be modelled, --workers measures on {names[0]}: leave one of them out"
            )
        say(f"measuring on {count(len(devices) * gpus, 'GPU')}: {names[0]}, driver {devices[0].versions['driver']}")
        yield devices


def stored_files(spec: Any, keys: Sequence[str]) -> Iterator[tuple[str, str, Path]]:
    """(GPU, whose, path) of the database files there are."""
    from mgpu_ops.registry import database

    for key in keys:
        for whose, path in (
            ("user", database.user_path(key, spec.name)),
            ("shipped", database.shipped_path(key, spec.name)),
        ):
            if path.exists():
                yield key, whose, path
