"""The commands of `mgpu-tune`, one module each: `register` says what it takes, `run` carries it out.

What they share is here and in `arguments`.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from pathlib import Path
from typing import Any, NoReturn

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


def gpu_or_current(name: str | None) -> Any:
    from mgpu_ops.core import gpu

    found = gpu.find(name) if name else gpu.current()
    if found is None:
        raise UsageError(f"no NVIDIA GPU here: name one with --gpu ({', '.join(g.key for g in gpu.GPUS)})")
    return found
