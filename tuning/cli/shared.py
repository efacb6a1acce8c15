"""What the commands of `mgpu-tune` share. Each is a module: `register` adds its arguments, `run` carries it out."""

from __future__ import annotations

import argparse
import re
import sys
from collections.abc import Callable, Iterable, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any, NoReturn

from mgpu_ops.registry import places
from mgpu_ops.tuning.terminal import printable

if TYPE_CHECKING:
    from mgpu_ops.core.gpu import Gpu

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130

# Command, which is also its module -> what it does. Only the module that is asked for loads, so that `--help` answers at once.
COMMANDS = {
    # tune a program
    "demo": "a tour on any machine: tune one matmul, store its config, call it, print its error",
    "capture": "list the problems that your function would run, and how often, without running it",
    "run": "tune one problem, or many, and store the best configs",
    "which": "show which config a call would use, and why",
    "show": "list the tuned problems of a GPU",
    # measure and look
    "bench": "time an op beside other implementations; writes a CSV file and a picture (needs a Hopper GPU)",
    "profile": "record what a kernel's warpgroups do over time: a picture, and a trace for Perfetto (needs a Hopper GPU)",
    "compile": "compile the kernels that your function would run, and the function, for a GPU that need not be here",
    "plot": "draw pictures of searches, tuned problems and benchmarks, as PNG and SVG",
    "report": "write one HTML page: what is tuned, what failed, and pictures",
    # databases
    "export": "write tuned configs to a directory for MGPU_OPS_CONFIG_PATH, or to one table",
    "merge": "join databases, and keep the fastest measured entry of each problem",
    "diff": "list what differs between two databases: entries added, removed or changed, and their times",
    "validate": "check database files: schema, fields, and whether every config can run",
    "check-in": "check a folder of databases before you share it: where files lie, faults, and the evidence of each entry",
    "retune": "tune again what was tuned with another jax or kernel version",
    # many hosts
    "worker": "tune the problems that `mgpu-tune run --queue` put into a storage, together with workers on other hosts",
    "proxy": "serve a storage to workers over gRPC, to this machine only unless told otherwise",
    "dashboard": "show trials in a browser (optuna-dashboard), to this machine only unless told otherwise",
    # develop the tuner
    "sweep": "measure every config of a grid, with raw samples, for `replay` (needs a Hopper GPU)",
    "replay": "run searches on recorded sweeps, without a GPU, and show how far from the optimum each sampler ends",
}


Run = Callable[[argparse.Namespace], int]  # carries a command out; its exit code


class UsageError(Exception):
    """A request that cannot be carried out; the message says why and what to do."""


class Parser(argparse.ArgumentParser):
    """Keeps the line ends of examples. An error is one line, and a second that says where help is.

    A value that begins with a minus, as the list of `--tokens -5,3`, is told with the option's rule.
    """

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)
        self._mistaken: dict[str, str] = {}  # "argument --gpu" -> what is told of the word after it

    def error(self, message: str) -> NoReturn:
        argument, expected, _ = message.partition(": expected ")
        if expected and argument in self._mistaken:
            message = f"{argument}: {self._mistaken[argument]}"
        self.exit(USAGE, f"{self.prog}: {printable(message)}\nsee `{self.prog} --help`\n")

    def parse_known_args(self, args: Iterable[str] | None = None, namespace: Any = None) -> Any:
        return super().parse_known_args(self._joined(sys.argv[1:] if args is None else args), namespace)

    def _joined(self, words: Iterable[str]) -> list[str]:
        """With "--tokens=-5,3" for "--tokens -5,3": by itself argparse takes what begins with a minus for an option.

        Only where a type or choices judge the value: a name or a path may be an option misspelt.
        """
        found: list[str] = []
        self._mistaken.clear()
        for word in words:
            may_be_value = re.match("-[^-]", word) and word not in self._option_string_actions and "--" not in found
            option = self._option(found[-1]) if found and may_be_value else None
            judged = option is not None and (option.choices is not None or option.type not in (None, Path))
            if option is not None and judged and option.nargs in (None, "?"):
                found[-1] += f"={word}"
                continue
            if option is not None and not re.fullmatch(r"-\d+|-\d*\.\d+|.* .*", word):  # those argparse takes for values
                told = f"{word!r} begins with a minus, as an option does: write {found[-1]}={word} if it is the value"
                self._mistaken[str(argparse.ArgumentError(option, "")).removesuffix(": ")] = told
            found.append(word)
        return found

    def _option(self, word: str) -> argparse.Action | None:
        """The option of that name, or whose name alone begins so, as argparse takes it."""
        known = self._option_string_actions
        names = [word] if word in known else [name for name in known if word.startswith("--") and name.startswith(word)]
        return known[names[0]] if len(names) == 1 else None


def command(commands: Any, name: str, run: Run, examples: str, needs: Sequence[str] = ()) -> argparse.ArgumentParser:
    """Adds the parser of a command. `needs`: modules of extras, without which it is refused before anything is done."""
    what = COMMANDS[name]
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", epilog=f"examples:\n{lines}"
    )
    parser.add_argument("--json", action="store_true", help="print the result as one line of JSON; other output goes to stderr")
    parser.set_defaults(run=run, parser=parser, needs=tuple(needs))
    return parser


def say(text: str) -> None:
    """Prints a line for people."""
    print(printable(text), flush=True)


def answer(arguments: argparse.Namespace, document: Any) -> None:
    """Prints the document where `--json` is given: one line, the only one on stdout."""
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


def is_directory(place: Path) -> bool:
    """Whether a place for databases is a directory, and not one file, whose name ends in .json."""
    return place.is_dir() or place.suffix != ".json"


def database_at(place: Path, gpu_key: str, op: str) -> Path:
    """The database of an op in such a place: the file itself, or <gpu>/<op>.json of the directory."""
    return place / gpu_key / f"{op}.json" if is_directory(place) else place


def gpu_or_current(name: str | None) -> Gpu:
    """The GPU of that name, or the one here."""
    from mgpu_ops.core import gpu

    found = gpu.find(name) if name else gpu.current()
    if found is None:
        raise UsageError(f"no NVIDIA GPU here: name one with --gpu ({', '.join(g.key for g in gpu.GPUS)})")
    return found
