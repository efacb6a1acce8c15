"""The command `mgpu-tune`.

Exit codes: 0 done, 1 it ran but something is wrong (no candidate worked, a database is invalid, a result is wrong), 2 it was
asked wrongly or cannot run here, 130 stopped by Ctrl-C (what was found is stored).
"""

from __future__ import annotations

import argparse
import dataclasses
import datetime
import math
import os
import re
import sys
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mgpu_ops import SPECS
from mgpu_ops.core.op import BACKENDS
from mgpu_ops.grouped_matmul.problem import ACTIVATIONS
from mgpu_ops.groups import SPREADS

OK, WRONG, USAGE, INTERRUPTED = 0, 1, 2, 130

_DTYPES = {"bf16": "bfloat16", "f16": "float16", "fp16": "float16", "f32": "float32", "fp32": "float32"}


class UsageError(Exception):
    """A request that cannot be carried out; the message says why and what to do."""


def main(argv: Sequence[str] | None = None) -> int:
    """Runs one command; returns its exit code."""
    arguments = _parser().parse_args(argv)
    _prepare_jax()
    from mgpu_ops.core.database import DatabaseError
    from mgpu_ops.tuning.measure import MeasurementError
    from mgpu_ops.tuning.worker import WorkerError

    try:
        return int(arguments.run(arguments))
    except (UsageError, DatabaseError, MeasurementError, WorkerError, ValueError) as e:
        print(f"mgpu-tune: {e}", file=sys.stderr)
        return USAGE
    except KeyboardInterrupt:
        print("mgpu-tune: stopped", file=sys.stderr)
        return INTERRUPTED
    except BrokenPipeError:  # `mgpu-tune show | head`
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
        return OK


def _prepare_jax() -> None:
    """Before JAX starts: the CPU backend where there is no GPU, and threads enough to interpret kernels."""
    os.environ.setdefault("NPROC", str(max(64, os.cpu_count() or 1)))
    if not _has_gpu() and not os.environ.get("JAX_PLATFORMS"):
        import jax

        jax.config.update("jax_platforms", "cpu")


def _has_gpu() -> bool:
    return Path("/dev/nvidiactl").exists() or Path("/dev/nvidia0").exists()


# --- what can be asked ------------------------------------------------------------------------------------------------


def _parser() -> argparse.ArgumentParser:
    parser = _Parser(
        prog="mgpu-tune",
        description="Tunes mgpu_ops for a GPU, and shows, checks and benchmarks what is tuned.",
        epilog="exit codes: 0 done; 1 something is wrong; 2 asked wrongly, or not possible here; 130 Ctrl-C",
    )
    commands = parser.add_subparsers(metavar="COMMAND", required=True)

    run = _command(
        commands,
        "run",
        _run,
        "tune one problem, or a suite of them, and store the best configs",
        """
        mgpu-tune run matmul --m 4096 --n 4096 --k 4096 --dtype bf16
        mgpu-tune run matmul --shape llama3-8b-qkv-128 --trials 64 --budget 60s
        mgpu-tune run matmul --suite llm --budget 30s --database tuned.json
        mgpu-tune run grouped_matmul --suite moe --budget 60s
        mgpu-tune run grouped_matmul --m 16384 --n 28672 --k 4096 --groups 8 --spread skewed --dtype bf16
        mgpu-tune run ragged_contraction --suite mixtral-8x7b
        mgpu-tune run flash_attention --suite llm --budget 60s
        mgpu-tune run flash_attention_backward --shape llama3-8b-8192-causal
        mgpu-tune run matmul --m 8192 --n 8192 --k 8192 --gpu h100-sxm   # no GPU here: modelled, and said so
        """,
    )
    _problem_arguments(run, many=True)
    run.add_argument("--trials", type=_positive_int, default=32, metavar="N", help="candidates a problem (default 32)")
    run.add_argument(
        "--budget", type=_seconds, default=math.inf, metavar="TIME", help="a problem, e.g. 60s, 2m (default: no limit)"
    )
    run.add_argument("--seed", type=_seed, default=0, help="of the inputs and of the search (default 0)")
    run.add_argument("--gpu", help="tune for this GPU, by the model unless it is the one here: h200, h100-sxm ...")
    run.add_argument("--database", type=Path, metavar="FILE", help="where to store (default: your own, see `show`)")

    show = _command(
        commands,
        "show",
        _show,
        "list the tuned problems of a GPU",
        """
        mgpu-tune show
        mgpu-tune show matmul --gpu h200
        """,
    )
    show.add_argument("op", nargs="?", help="an op; all by default")
    show.add_argument("--gpu", help="h200, h100-sxm ...; default: the one here, else all that have entries")

    which = _command(
        commands,
        "which",
        _which,
        "say which config a problem runs with, and why",
        """
        mgpu-tune which matmul --m 4096 --n 4096 --k 4096 --gpu h200
        mgpu-tune which matmul --shape llama3-70b-down-256
        mgpu-tune which grouped_matmul --m 8192 --n 4096 --k 7168 --groups 32 --layout nt --bias --gpu h200
        mgpu-tune which flash_attention --batch 4 --q-tokens 4096 --kv-tokens 4096 --q-heads 16 --kv-heads 16 --head-dim 128 \\
          --causal --gpu h200
        """,
    )
    _problem_arguments(which)
    which.add_argument("--gpu", help="h200, h100-sxm ... (default: the one here)")

    validate = _command(
        commands,
        "validate",
        _validate,
        "check database files: schema, fields, and that every config can run",
        """
        mgpu-tune validate
        mgpu-tune validate tuned.json configs/h200/matmul.json
        """,
    )
    validate.add_argument("files", nargs="*", type=Path, help="default: your own and the shipped ones")

    bench = _command(
        commands,
        "bench",
        _bench,
        "measure beside other implementations; writes a CSV file and a picture (needs a Hopper GPU)",
        """
        mgpu-tune bench matmul --suite llm --against xla,jax-pallas
        mgpu-tune bench matmul --shape square-4096 --grad
        mgpu-tune bench grouped_matmul --suite moe --against dense,jax-pallas,tokamax
        mgpu-tune bench grouped_matmul --suite training --against dense,tokamax --grad --peer-seconds 30s
        mgpu-tune bench flash_attention --suite llm --against cudnn,tokamax,jax-pallas
        mgpu-tune bench flash_attention --suite d128 --against cudnn,tokamax --grad
        mgpu-tune bench flash_attention_backward --suite llm
        """,
    )
    _problem_arguments(bench, many=True)
    bench.add_argument("--against", metavar="A,B", help=f"{_peers_text()} (default: the first)")
    bench.add_argument("--grad", action="store_true", help="forward plus backward")
    bench.add_argument("--backend", choices=BACKENDS, help="that ours runs on (default: mosaic, or xla where it cannot)")
    bench.add_argument("--seconds", type=_seconds, default=1.0, metavar="TIME", help="of measuring a problem (default 1s)")
    bench.add_argument(
        "--peer-seconds", type=_seconds, default=60.0, metavar="TIME", help="a tuned peer may compile a problem (default 60s)"
    )
    bench.add_argument("--peers-from", type=Path, metavar="CSV", help="take the peers' settings from an earlier result")
    bench.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    bench.add_argument("--what", help="a word for the file's name: results/<date>-<gpu>-<op>-<what>.csv")

    _command(
        commands,
        "demo",
        _demo,
        "a tour on any machine: tune one matmul, store it, call it, print its error",
        """
        mgpu-tune demo
        """,
    )
    return parser


class _Parser(argparse.ArgumentParser):
    """Shows examples as they are written."""

    def __init__(self, **options: Any):
        super().__init__(formatter_class=argparse.RawDescriptionHelpFormatter, **options)


def _command(commands: Any, name: str, run: Any, what: str, examples: str) -> argparse.ArgumentParser:
    lines = "\n".join(f"  {line.strip()}" for line in examples.strip().splitlines())
    parser: argparse.ArgumentParser = commands.add_parser(
        name, help=what, description=what[0].upper() + what[1:] + ".", epilog=f"examples:\n{lines}"
    )
    parser.set_defaults(run=run)
    return parser


def _problem_arguments(parser: argparse.ArgumentParser, many: bool = False) -> None:
    parser.add_argument("op", help=", ".join(SPECS))
    group = parser.add_argument_group("problem", "a named one, or its sides")
    shapes = ", ".join(next(iter(spec.shapes)) for spec in SPECS.values())
    group.add_argument("--shape", metavar="NAME", help=f"of a real model, e.g. {shapes}")
    if many:
        suites = "; ".join(f"{name}: {', '.join(spec.suites)}" for name, spec in SPECS.items())
        group.add_argument("--suite", metavar="NAME", help=f"named shapes together ({suites})")
    for name, field in _problem_fields().items():
        group.add_argument(f"--{name.replace('_', '-')}", **_argument_of(field) | _FIELDS.get(name, {}))


def _problem_fields() -> dict[str, dataclasses.Field[Any]]:
    """The fields of all ops' problems, by name."""
    found: dict[str, dataclasses.Field[Any]] = {}
    for spec in SPECS.values():
        for field in dataclasses.fields(spec.Problem):
            found.setdefault(field.name, field)
    return found


def _argument_of(field: dataclasses.Field[Any]) -> dict[str, Any]:
    """How a field is given: a flag, a number that may be -1 if that is its default, a size, or what `_FIELDS` says."""
    if isinstance(field.default, bool):
        return {"action": "store_true", "default": None}
    return {} if isinstance(field.default, str) else {"type": _bound if field.default == -1 else _positive_int}


def _peers_text() -> str:
    from mgpu_ops.tuning.peers import PEERS

    return "; ".join(f"{op}: {', '.join(peers)}" for op, peers in PEERS.items())


def _positive_int(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = 0
    if value < 1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 1")
    return value


def _bound(text: str) -> int:
    try:
        value = int(text)
    except ValueError:
        value = -2
    if value < -1:
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number of at least 0, or -1 for no bound")
    return value


def _seed(text: str) -> int:
    if not (text.isdecimal() and int(text) < 2**32):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 0 to 2**32 - 1")
    return int(text)


def _dtype(text: str) -> str:
    name = _DTYPES.get(text, text)
    if name not in _DTYPES.values():
        raise argparse.ArgumentTypeError(f"{text!r} is not one of {', '.join(_DTYPES)}")
    return name


def _seconds(text: str) -> float:
    """Seconds of "90", "60s", "2m" or "1h"; finite and above 0."""
    match = re.fullmatch(r"(\d+(?:\.\d+)?|\.\d+)\s*(s|m|h)?", text.strip())
    value = float(match[1]) * {"s": 1, "m": 60, "h": 3600}[match[2] or "s"] if match else math.nan
    if not (math.isfinite(value) and value > 0):
        raise argparse.ArgumentTypeError(f"{text!r} must be a finite time above 0 such as 60s, 2m or 1h")
    return value


# What the fields of problems are, and how those are given of which `_argument_of` knows too little.
_FIELDS: dict[str, dict[str, Any]] = {
    "batch": {"help": "products in one launch (default 1); of attention, sequences"},
    "groups": {"help": "how many the rows of m belong to"},
    "dtype": {"type": _dtype, "help": "bf16 (default), f16"},
    "out_dtype": {"type": _dtype, "help": "default: dtype; or f32"},
    "layout": {"choices": ("nn", "nt", "tn", "tt"), "help": "of both operands: n as written (default nn), t transposed"},
    "bias": {
        "action": "store",
        "nargs": "?",
        "const": True,
        "type": _dtype,
        "metavar": "DTYPE",
        "help": "with a bias of each group; of attention, of the scores, in this dtype (default: dtype)",
    },
    "activation": {"choices": ACTIVATIONS, "help": "of the result (default none)"},
    "spread": {"choices": SPREADS, "help": "of the rows over the groups (default random)"},
    "head_dim": {"help": "columns of a head of q, k and v"},
    "causal": {"help": "no row sees a later key"},
    "window_left": {"help": "keys before its own that a row sees (default -1: all)"},
    "window_right": {"help": "keys after its own that a row sees (default -1: all)"},
    "align": {
        "choices": ("bottom_right", "top_left"),
        "help": "which query has the same place as which key: the last ones (default), the first",
    },
    "lengths": {"help": "each sequence has token counts of its own"},
    "segments": {"help": "a row sees its own segment only"},
    "soft_cap": {"help": "scores are capped"},
    "deterministic": {"help": "gradients bitwise equal from run to run"},
    "bias_grad": {"help": "with the gradient of the bias"},
}


def _problems(spec: Any, arguments: argparse.Namespace) -> dict[str, Any]:
    """Name -> Problem of what the arguments ask for."""
    from mgpu_ops.core.op import problem_of
    from mgpu_ops.tuning.bench import describe

    fields = {name: getattr(arguments, name, None) for name in _problem_fields()}
    given = {k: v for k, v in fields.items() if v is not None}
    if "bias" in given:
        given["bias"] = _bias(spec, given["bias"], given.get("dtype", "bfloat16"))
    needed = [f.name for f in dataclasses.fields(spec.Problem) if f.default is dataclasses.MISSING]
    suite = getattr(arguments, "suite", None)
    if sum(map(bool, (given, arguments.shape, suite))) != 1:
        raise UsageError(f"name the problem in one way: {_flags(needed)}, or --shape NAME, or --suite NAME")
    if suite:
        if suite not in spec.suites:
            raise UsageError(f"suite {suite!r} is not one of {', '.join(spec.suites)}")
        names: dict[Any, str] = {}  # a problem once, by its first name
        for name in spec.suites[suite]:
            names.setdefault(spec.shapes[name], name)
        return {name: problem for problem, name in names.items()}
    if arguments.shape:
        if arguments.shape not in spec.shapes:
            raise UsageError(f"shape {arguments.shape!r} is not one of {', '.join(spec.shapes)}")
        return {arguments.shape: spec.shapes[arguments.shape]}
    missing = [name for name in needed if name not in given]
    if missing:
        raise UsageError(f"{_flags(missing)} missing: a {spec.name} problem has {_flags(needed)}")
    problem = problem_of(spec, given)  # refuses what the op's problems do not have
    return {describe(problem): problem}


def _bias(spec: Any, given: bool | str, dtype: str) -> bool | str:
    """The bias of a problem of an op that says whether there is one, or of one that names its dtype."""
    default = {f.name: f.default for f in dataclasses.fields(spec.Problem)}.get("bias")
    if isinstance(default, str):
        return dtype if given is True else given
    if given is not True:
        raise UsageError(f"--bias of {spec.name} takes no dtype: leave {given} out")
    return True


def _flags(names: Sequence[str]) -> str:
    """ "--m, --n and --k" """
    *most, last = (f"--{name.replace('_', '-')}" for name in names)
    return f"{', '.join(most)} and {last}" if most else last


def _gpu_or_current(name: str | None) -> Any:
    from mgpu_ops.core import gpu

    found = gpu.find(name) if name else gpu.current()
    if found is None:
        raise UsageError(f"no NVIDIA GPU here: name one with --gpu ({', '.join(g.key for g in gpu.GPUS)})")
    return found


# --- run ----------------------------------------------------------------------------------------------------------------


def _run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import database

    spec = mgpu_ops.spec_of(arguments.op)
    problems = _problems(spec, arguments)
    device = _device(arguments.gpu)
    path = arguments.database or database.user_path(device.gpu.key, spec.name)
    try:
        if path.exists():
            database.read(path, gpu_key=device.gpu.key, op=spec.name)  # refused now, not after an hour of tuning
        worst = OK
        for name, problem in problems.items():
            code = _tune(spec, name, problem, device, path, arguments.trials, arguments.budget, arguments.seed)
            if code == INTERRUPTED:
                return code
            worst = max(worst, code)
        return worst
    finally:
        device.close()


def _device(name: str | None) -> Any:
    """The GPU here if there is one and it is the one asked for; else the model of the one asked for."""
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning.device import Measured, Modelled
    from mgpu_ops.tuning.worker import WorkerError

    wanted = gpu.find(name) if name else None
    here = None
    if _has_gpu():
        try:
            here = Measured()
        except WorkerError as e:  # another GPU than a Hopper does not keep one from being modelled
            if wanted is None:
                raise
            _say(str(e))
    if here is not None:
        if wanted is None or wanted.key == here.gpu.key:
            _say(f"measuring on {here.gpu.name}, driver {here.versions['driver']}")
            return here
        here.close()
    if wanted is None:
        raise UsageError(
            f"no Hopper GPU here to measure on: name the GPU to model with --gpu ({', '.join(g.key for g in gpu.GPUS)})"
        )
    device = Modelled(wanted)
    compiled = "each candidate is compiled for it" if device.compiles else "candidates are not compiled (extra 'aot')"
    _say(f"no {wanted.name} here: times are MODELLED, not measured; {compiled}. Tune again on the GPU itself.")
    return device


def _tune(spec: Any, name: str, problem: Any, device: Any, path: Path, trials: int, budget: float, seed: int) -> int:
    """Tunes one problem with a progress bar, prints its trials, stores its entry; the exit code."""
    from rich.console import Console
    from rich.progress import BarColumn, MofNCompleteColumn, Progress, TextColumn, TimeElapsedColumn

    from mgpu_ops.core import database
    from mgpu_ops.tuning import tables, tuner

    tuner.check_supported(spec, problem, device.gpu)  # before a progress bar is on the screen
    console = Console()
    columns = (
        TextColumn("{task.description}"),
        BarColumn(),
        MofNCompleteColumn(),
        TimeElapsedColumn(),
        TextColumn("{task.fields[best]}"),
    )
    with Progress(*columns, console=console) as bar:
        task = bar.add_task(f"{spec.name} {name}", total=trials, best="")
        best = math.inf

        def progress(trial: Any) -> None:
            nonlocal best
            best = min(best, trial.outcome.us or math.inf)
            bar.update(task, advance=1, best=f"best {best:.1f} us" if best < math.inf else "")

        result = tuner.tune(spec, problem, device, trials=trials, budget=budget, seed=seed, progress=progress)
    code = INTERRUPTED if result.ended == "interrupted" else OK
    console.print(tables.trials_table(result.trials, device.baseline))
    for (kind, detail), count in result.failures.items():
        _say(f"failed: {count} {kind}: {detail}")
    if result.entry is None:
        _say(f"no candidate worked: nothing is stored for {name}")
        return code or WRONG
    e = result.entry.evidence
    against = f", {e.baseline} {e.baseline_us:.1f} us ({e.baseline_us / e.median_us:.3f}x)" if e.baseline_us else ""
    default = f", default {e.default_us:.1f} us" if e.default_us else ""
    _say(f"best of {len(result.trials)} in {result.seconds:.1f} s: {e.median_us:.1f} us {e.kind}{default}{against}")
    database.update(path, [result.entry], gpu_key=device.gpu.key, op=spec.name)
    _say(f"stored as {e.kind} in {path}")
    return code


def _say(text: str) -> None:
    print(text, flush=True)


# --- show, which, validate, bench --------------------------------------------------------------------------------------


def _stored_files(spec: Any, keys: Sequence[str]) -> Iterator[tuple[str, str, Path]]:
    """(GPU, whose, path) of the database files there are."""
    from mgpu_ops.core import database

    for key in keys:
        for whose, path in (
            ("user", database.user_path(key, spec.name)),
            ("shipped", database.shipped_path(key, spec.name)),
        ):
            if path.exists():
                yield key, whose, path


def _show(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    import mgpu_ops
    from mgpu_ops.core import database, gpu
    from mgpu_ops.tuning import tables

    specs = [mgpu_ops.spec_of(arguments.op)] if arguments.op else list(mgpu_ops.SPECS.values())
    here = gpu.find(arguments.gpu) if arguments.gpu else gpu.current()
    keys = [here.key] if here else [g.key for g in gpu.GPUS]
    console, found, code = Console(), False, OK
    for spec in specs:
        for key, whose, path in _stored_files(spec, keys):
            found = True
            try:
                entries = database.read(path, gpu_key=key, op=spec.name).entries
            except database.DatabaseError as e:
                _say(f"mgpu-tune: {e}")
                code = WRONG
                continue
            console.print(tables.entries_table(f"{spec.name} on {key}, {whose}: {path}", entries))
    if not found:
        _say(f"nothing is tuned for {', '.join(keys)}: `mgpu-tune run` stores in {database.user_path(keys[0], specs[0].name)}")
    return code


def _which(arguments: argparse.Namespace) -> int:
    import mgpu_ops

    spec = mgpu_ops.spec_of(arguments.op)
    (problem,) = _problems(spec, arguments).values()
    gpu = _gpu_or_current(arguments.gpu)
    reason = spec.supports(problem, gpu)
    if reason is not None:
        _say(f"{spec.name} {problem} runs through XLA: {reason}")
        return OK
    _say(mgpu_ops.explain(spec.name, problem, gpu.key))
    return OK


def _validate(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import database, gpu

    files = list(arguments.files)
    if not files:
        keys = [g.key for g in gpu.GPUS]
        files = [path for spec in mgpu_ops.SPECS.values() for _, _, path in _stored_files(spec, keys)]
    bad = 0
    for path in files:
        try:
            file = database.read(path)
            faults = database.validate(path, mgpu_ops.SPECS.get(file.op))
            if file.op not in mgpu_ops.SPECS:
                faults.append(f"op {file.op!r} is not one of {', '.join(mgpu_ops.SPECS)}")
        except database.DatabaseError as e:
            faults = [e.reason]
        bad += bool(faults)
        _say(f"{path}: {_count(len(faults), 'fault') if faults else 'ok'}")
        for fault in faults:
            _say(f"  {fault}")
    return WRONG if bad else OK


def _count(number: int, what: str) -> str:
    """ "1 fault", "2 faults" """
    return f"{number} {what}{'s' * (number != 1)}"


def _bench(arguments: argparse.Namespace) -> int:
    from rich.console import Console

    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import bench, report
    from mgpu_ops.tuning.peers import PEERS

    spec = mgpu_ops.spec_of(arguments.op)
    problems = _problems(spec, arguments)
    here = gpu.current()
    if here is None or here.architecture != "hopper":
        raise UsageError("bench times kernels: it needs a Hopper GPU here")
    against = [name.strip() for name in (arguments.against or next(iter(PEERS[spec.name]))).split(",") if name.strip()]
    op = spec.name + ("+grad" if arguments.grad else "")
    today = datetime.date.today().isoformat()
    path = bench.output_path(arguments.output, today, here.key, op, arguments.what)
    try:
        earlier = bench.read_csv(arguments.peers_from) if arguments.peers_from else []
    except OSError as e:
        raise UsageError(f"{arguments.peers_from}: cannot be read ({e.strerror}): name a CSV file of `bench`") from None
    rows = bench.run(
        spec,
        problems,
        gpu=here,
        against=against,
        grad=arguments.grad,
        seconds=arguments.seconds,
        progress=_say,
        save=lambda rows: bench.write_csv(rows, path),
        peer_seconds=arguments.peer_seconds,
        earlier=earlier,
        backend=arguments.backend,
    )
    if not rows:
        return WRONG
    console = Console()
    console.print(report.table(rows))
    of = bench.yardsticks(bench.lines(rows))
    for line in bench.summary(rows):
        x = f" of {line.peer}" if line.peer in of else "x"
        versus = "" if line.peer in of else f" against {line.peer}"
        _say(f"{line.op}{versus}: geometric mean {line.geomean:.3f}{x} over {_count(line.problems, 'problem')}, "
             f"worst {line.worst:.3f}{x} ({line.worst_problem}), {line.wins} at 1.0x or more")  # fmt: skip
    _say(f"wrote {path} and {', '.join(str(p) for p in report.picture(rows, path.with_suffix('.png')))}")
    faults = bench.failures(rows, spec, problems, grad=arguments.grad)
    for fault in faults:
        _say(f"WRONG: {fault}")
    return WRONG if faults else OK


# --- demo -----------------------------------------------------------------------------------------------------------------


def _demo(arguments: argparse.Namespace) -> int:
    """Tunes a matmul and calls it: measured and 4096^3 on a Hopper GPU, else modelled and small enough to interpret."""
    import jax
    import numpy as np

    import mgpu_ops
    from mgpu_ops.core import database
    from mgpu_ops.tuning import measure

    spec = mgpu_ops.spec_of("matmul")
    device = _device_of_demo()
    side = 4096 if device.kind == "measured" else 512
    backend = "mosaic" if device.kind == "measured" else "interpret"
    problem = spec.Problem(side, side, side)
    path = database.user_path(device.gpu.key, spec.name)
    try:
        code = _tune(spec, f"{side}x{side}x{side}", problem, device, path, 24, 60.0, 0)
    finally:
        device.close()
    if code != OK:
        return code
    a, b = spec.inputs(problem, jax.random.key(1))
    out = mgpu_ops.matmul(a, b, backend=backend)
    wide = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    error, limit = measure.error(out, jax.numpy.asarray(wide)), spec.tolerance(problem)
    _say(
        f"mgpu_ops.matmul(a, b, backend={backend!r}) with that entry: max error {error:.2e} against float32 (limit {limit:.0e})"
    )
    _say("\n".join(mgpu_ops.explain("matmul", problem, device.gpu.key).splitlines()[:3]))
    return OK if error <= limit else WRONG


def _device_of_demo() -> Any:
    from mgpu_ops.tuning.worker import WorkerError

    try:
        return _device(None)
    except (UsageError, WorkerError):
        return _device("h200")


if __name__ == "__main__":
    sys.exit(main())
