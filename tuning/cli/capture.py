"""`mgpu-tune capture`: lists the problems that a program runs, for `mgpu-tune run --from`."""

from __future__ import annotations

import argparse
import dataclasses
import importlib
import inspect
import os
import re
import sys
import traceback
from collections.abc import Callable
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import positive_int
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say, writable
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    import jax

    from mgpu_ops.registry.capture import Captured

NO_CALL = "no call of an op: is the function built on mgpu_ops, and does it return what it computes?"

# As JAX prints them; all others go by their names.
_DTYPES = {f"{kind[0]}{bits}": f"{kind}{bits}" for kind in ("int", "uint", "float") for bits in (8, 16, 32, 64)}
_DTYPES["bf16"] = "bfloat16"


def register(commands: Any) -> None:
    parser = command(
        commands,
        "capture",
        run,
        """
        mgpu-tune capture examples.moe:step                           # a function without arguments
        mgpu-tune capture model:layer --args 'bf16[4096,4096]' 'bf16[4096,14336]'
        mgpu-tune capture train:step --output problems.json && mgpu-tune run --from problems.json
        mgpu-tune capture train:sharded_step --devices 8              # its mesh has 8 devices, this machine has not
        mgpu-tune capture train:step --json | jq '.problems[0]'
        """,
    )
    function_arguments(parser)
    parser.add_argument("--output", type=Path, metavar="FILE", help="write the problems to a file for `mgpu-tune run --from`")


def function_arguments(parser: argparse.ArgumentParser) -> None:
    """What names a function of the user's, its arrays and the GPU that will run it."""
    parser.add_argument(
        "function",
        metavar="MODULE:FUNCTION",
        help="a function that is imported from this folder and traced, not run: arrays that it makes are abstract and take no "
        "memory. It may return (function, *arguments), which is then traced",
    )
    parser.add_argument(
        "--args",
        nargs="+",
        default=[],
        metavar="SHAPE",
        help="its arrays, as JAX prints them: 'bf16[8,4096]' 'i32[8]'",
    )
    parser.add_argument("--gpu", help="the GPU that will run it: h200, h100-sxm ... (default: the one here, else h200)")
    parser.add_argument("--devices", type=positive_int, metavar="N", help="trace as on N devices, for a function with a mesh")


@dataclasses.dataclass(frozen=True)
class Program:
    """A user's function with its arguments, and what it runs."""

    captured: Captured
    function: Callable[..., Any]
    arguments: tuple[Any, ...]


def program_of(arguments: argparse.Namespace) -> Program:
    """The program that `function_arguments` name."""
    import jax

    if arguments.devices:
        jax.config.update("jax_platforms", "cpu")
        jax.config.update("jax_num_cpu_devices", arguments.devices)
    return _captured(arguments.function, [shape(text) for text in arguments.args], arguments.gpu)


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.tuning import problems
    from mgpu_ops.tuning.labels import describe

    if arguments.output:
        writable(arguments.output, "--output")
    captured = program_of(arguments).captured
    work = problems.of(captured)
    say(f"{arguments.function} on {captured.gpu.name}: {count(len(work), 'problem')}, the longest first")
    for w in work:
        say(f"{w.count:6} x {w.op} {w.name}")
    for use in captured.uses:
        if use.skipped is not None:
            say(f"{use.count:6} x {use.op} {describe(use.problem)}: nothing to tune, it {use.skipped}")
    for note in captured.notes:
        say(f"note: {note}")
    file = problems.to_file(captured, arguments.function)
    if arguments.output:
        problems.write(arguments.output, file)
        say(f"written: tune them with `mgpu-tune run --from {arguments.output}`")
    answer(arguments, file)
    if not captured.uses:
        say(NO_CALL)
    return OK if work else WRONG


def shape(text: str) -> jax.ShapeDtypeStruct:
    """The array that a text such as "bf16[8,4096]" describes."""
    import jax

    match = re.fullmatch(r"\s*([a-z]\w*)\[([\d\s,]*)\]\s*", text)
    try:
        name, sides = match.groups() if match else ("", "")
        dtype = jax.numpy.dtype(_DTYPES.get(name, name))
        return jax.ShapeDtypeStruct(tuple(int(side) for side in sides.split(",") if side.strip()), dtype)
    except (TypeError, ValueError):
        raise UsageError(f"--args {text!r} is no array: write it as JAX prints it, e.g. 'bf16[8,4096]' or 'i32[8]'") from None


def _captured(name: str, shapes: list[jax.ShapeDtypeStruct], gpu: str | None) -> Program:
    """The function and what it runs; or those of another one, which it returns with its arguments."""
    from mgpu_ops import capture
    from mgpu_ops.core import gpu as gpus

    if gpu:
        gpus.find(gpu)  # raises for a name that is in no table
    function, returned = _imported(name), []
    _require_arguments(name, function, len(shapes))

    def program(*arrays: Any) -> Any:
        result = function(*arrays)
        if isinstance(result, tuple) and result and callable(result[0]):
            returned.append((result[0], *_abstract(result[1:])))
            return ()
        return result

    try:
        found = capture(program, gpu)(*shapes)
        if not returned:
            return Program(found, function, tuple(shapes))
        inner, *inputs = returned[0]
        return Program(capture(inner, gpu)(*inputs), inner, tuple(inputs))
    except (Exception, SystemExit) as e:
        raise _told(name, e) from None


def _require_arguments(name: str, function: Callable[..., Any], given: int) -> None:
    """Raises where the function does not take as many arrays as --args names."""
    try:
        signature = inspect.signature(function)
    except ValueError:  # of some functions written in C
        return
    try:
        signature.bind(*[None] * given)
    except TypeError:
        raise UsageError(
            f"{name}{signature} does not take {count(given, 'array')}: describe each with --args 'bf16[8,4096]' ..., or name a "
            "function that makes its own"
        ) from None


def _abstract(arguments: Any) -> Any:
    """Shapes in place of arrays, because shapes outlive the trace that made them."""
    import jax

    return jax.tree.map(lambda x: jax.ShapeDtypeStruct(x.shape, x.dtype) if isinstance(x, jax.Array) else x, arguments)


def _imported(name: str) -> Callable[..., Any]:
    """The function that "package.module:function" names, from this folder or what is installed."""
    module, _, path = name.removeprefix("./").partition(":")
    if not (module and path):
        raise UsageError(f"{name!r} names no function: write MODULE:FUNCTION, e.g. examples.moe:step")
    if os.getcwd() not in sys.path:
        sys.path.insert(0, os.getcwd())
    found: Any = None
    try:
        found = importlib.import_module(module)
    except ModuleNotFoundError as e:
        if e.name is None or not f"{module}.".startswith(f"{e.name}."):
            raise _told(name, e) from None  # the module is there, what it imports is not
        dotted = module.removesuffix(".py").strip("/").replace("/", ".")  # of the path of a file
        hint = f", such as {dotted}:{path}" * (dotted != module)
        raise UsageError(f"no module {module!r} in {os.getcwd()} or installed: name it as Python imports it{hint}") from None
    except (Exception, SystemExit) as e:  # a script that ends itself
        raise _told(name, e) from None
    for part in path.split("."):
        found = getattr(found, part, None)
    if not callable(found):
        there = [k for k, v in vars(sys.modules[module]).items() if callable(v) and getattr(v, "__module__", None) == module]
        raise UsageError(f"{module!r} has no function {path!r}: it has {', '.join(there) or 'none'}")
    return found


def _told(name: str, error: BaseException) -> UsageError:
    """An error in the user's code as one line, with its place."""
    import jax

    text = (str(error).strip().splitlines() or [""])[0]
    others = str(Path(__file__).parents[2]), os.sep + "site-packages" + os.sep  # mgpu_ops, and what is installed
    here = [f for f in traceback.extract_tb(error.__traceback__) if f.filename.startswith(os.getcwd() + os.sep)]
    own = [f for f in here if not any(other in f.filename for other in others)]
    where = f" ({Path(own[-1].filename).relative_to(os.getcwd())}:{own[-1].lineno})" if own else ""
    way_out = ""
    if isinstance(error, jax.errors.ConcretizationTypeError):
        way_out = ": it asks for the value of an array; capture one step, not the loop that reads its results"
    return UsageError(f"{name} could not be traced: {type(error).__name__}: {text}{where}{way_out}")
