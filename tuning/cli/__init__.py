"""The command `mgpu-tune`.

Exit codes: 0 done; 1 it ran, but something is wrong (no candidate worked, a database is invalid, a result is wrong); 2 a wrong
request, or one that is not possible here; 130 stopped by Ctrl-C (what was found is stored).
"""

from __future__ import annotations

import argparse
import contextlib
import importlib
import io
import os
import signal
import sys
from collections.abc import Sequence

from mgpu_ops.core import extras
from mgpu_ops.tuning import devices
from mgpu_ops.tuning.cli.shared import COMMANDS, INTERRUPTED, OK, USAGE, Parser, UsageError
from mgpu_ops.tuning.terminal import printable

STOPPED = "mgpu-tune: stopped"


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code. Without `argv`, as the program itself, it also handles Ctrl-C."""
    words = sys.argv[1:] if argv is None else argv
    if argv is None and isinstance(sys.stdout, io.TextIOWrapper):
        sys.stdout.reconfigure(errors="backslashreplace")  # names that the terminal's encoding lacks, as stderr does
    interrupts = _Interrupts(argv is None and signal.getsignal(signal.SIGINT) is signal.default_int_handler)
    try:
        code = _carry_out(words, interrupts)
        if sys.stdout is not None:
            sys.stdout.flush()  # here, where a reader who has gone is no error
    except KeyboardInterrupt:
        code = INTERRUPTED
    except OSError as e:  # of standard output itself: `_carry_out` tells those of files
        if sys.stdout is not None:
            os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        code = OK if isinstance(e, BrokenPipeError) else _refuse(e)  # `mgpu-tune show | head`
    if code == OK and interrupts.seen:
        code = INTERRUPTED  # a library took it for its own
    if code == INTERRUPTED:
        print(STOPPED, file=sys.stderr)
    return code


def _carry_out(words: Sequence[str], interrupts: _Interrupts) -> int:
    parser = _parser(words)
    arguments, more = parser.parse_known_args(words)
    if more:
        getattr(arguments, "parser", parser).error(f"unrecognized arguments: {' '.join(more)}")
    if not hasattr(arguments, "run"):
        parser.error("the command comes first: mgpu-tune COMMAND ...")  # mgpu-tune -- show
    try:
        extras.require(f"mgpu-tune {words[0]}", arguments.needs)
        _prepare_jax()
    except extras.MissingExtra as e:
        return _refuse(e)
    arguments.stdout = sys.stdout
    people = contextlib.redirect_stdout(sys.stderr) if arguments.json else contextlib.nullcontext()
    try:
        with people, interrupts:
            return int(arguments.run(arguments))
    except _refusals() as e:
        return _refuse(e)
    except OSError as e:  # of a place that no command has words for: a name that is too long
        if e.filename is None:
            raise
        return _refuse(UsageError(f"{e.filename}: {e.strerror}: name another"))
    except ModuleNotFoundError as e:
        if not extras.brought(e.name):
            raise
        return _refuse(extras.missing(f"mgpu-tune {words[0]}", [str(e.name)]))


def _refusals() -> tuple[type[Exception], ...]:
    """Errors whose message is all that a user needs. A module that is not loaded has raised none."""
    elsewhere = {"mgpu_ops.tuning.measure": "MeasurementError", "mgpu_ops.tuning.worker": "WorkerError"}
    loaded = [getattr(sys.modules[module], name) for module, name in elsewhere.items() if module in sys.modules]
    return UsageError, extras.MissingExtra, ValueError, *loaded


def _refuse(why: Exception) -> int:
    print(f"mgpu-tune: {printable(why)}", file=sys.stderr)
    return USAGE


class _Interrupts:
    """What Ctrl-C does: inside of `with`, where a command runs, it raises KeyboardInterrupt; elsewhere it ends the program.

    Before and after a command nothing would be lost, and an exception in the middle of an import may be swallowed.
    """

    def __init__(self, own: bool):
        self.own, self.seen = own, False
        self.__exit__()

    def __enter__(self) -> None:
        if self.own:
            signal.signal(signal.SIGINT, self._raise)

    def __exit__(self, *_: object) -> None:
        if self.own:
            signal.signal(signal.SIGINT, self._end)

    def _raise(self, *_: object) -> None:
        self.seen = True
        raise KeyboardInterrupt

    def _end(self, *_: object) -> None:
        os.write(2, f"{STOPPED}\n".encode())
        os._exit(INTERRUPTED)


class _Version(argparse.Action):
    def __call__(self, parser: argparse.ArgumentParser, *_: object) -> None:
        from mgpu_ops.tuning.cli import versions

        print(versions.text(devices.has_gpu()))
        parser.exit()


def _prepare_jax() -> None:
    """Imports JAX, with the CPU backend where there is no GPU, and threads enough to interpret kernels."""
    os.environ.setdefault("NPROC", str(max(64, os.cpu_count() or 1)))
    import jax

    if not devices.has_gpu() and not os.environ.get("JAX_PLATFORMS"):
        jax.config.update("jax_platforms", "cpu")


_EPILOG = """\
to tune a program:
  mgpu-tune capture train:step --output problems.json   # the step() of train.py; needs no GPU
  mgpu-tune run --from problems.json --budget 60s       # on the GPU; the program then uses what was found
  mgpu-tune which matmul --m 4096 --n 14336 --k 4096    # which config a call uses, and why

exit codes: 0 done; 1 something is wrong; 2 a wrong request, or one that is not possible here; 130 Ctrl-C"""


def _parser(words: Sequence[str]) -> argparse.ArgumentParser:
    parser = Parser(
        prog="mgpu-tune",
        description="Tunes mgpu_ops for a GPU; shows, checks and benchmarks tuned configs.",
        epilog=_EPILOG,
    )
    parser.add_argument(
        "--version", action=_Version, nargs=0, help="print the versions of mgpu_ops, Python, JAX, ptxas and the GPU's driver"
    )
    known = parser.add_subparsers(metavar="COMMAND", required=True)
    for name, what in COMMANDS.items():
        if [name] == list(words[:1]):
            importlib.import_module(f"mgpu_ops.tuning.cli.{name.replace('-', '_')}").register(known)
        else:
            known.add_parser(name, help=what)
    return parser
