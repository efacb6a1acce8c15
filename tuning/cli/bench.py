"""`mgpu-tune bench`: measures beside other implementations."""

from __future__ import annotations

import argparse
import contextlib
import dataclasses
import datetime
import math
from collections.abc import Callable, Mapping
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import BACKENDS, COMPETITORS, problem_arguments, seconds
from mgpu_ops.tuning.cli.selection import problems_of
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say, writable
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    from mgpu_ops.core.gpu import Gpu
    from mgpu_ops.registry.spec import OpSpec
    from mgpu_ops.tuning.bench.results import Measurement, Summary
    from mgpu_ops.tuning.bench.runner import BenchOptions


def register(commands: Any) -> None:
    parser = command(
        commands,
        "bench",
        run,
        """
        mgpu-tune bench matmul --suite llm --against xla,jax-pallas
        mgpu-tune bench matmul --suite fp8-llm --against xla,bf16     # products of 8-bit floats, beside ours of 16 bits too
        mgpu-tune bench matmul --shape square-4096 --grad
        mgpu-tune bench matmul --suite sustained --sustained          # without pause, at the clock that the power cap leaves
        mgpu-tune bench grouped_matmul --suite moe --against dense,jax-pallas,tokamax
        mgpu-tune bench grouped_matmul --suite training --against dense,tokamax --grad --peer-seconds 30s
        mgpu-tune bench moe --suite training --against tokamax --grad  # a whole layer of experts, beside one of others' parts
        mgpu-tune bench flash_attention --suite llm --against cudnn,tokamax,jax-pallas
        mgpu-tune bench flash_attention --suite d128 --against cudnn,tokamax --grad
        mgpu-tune bench flash_attention_backward --suite llm
        mgpu-tune bench all_reduce --suite 4-gpus
        """,
        needs=("matplotlib", "rich"),
    )
    problem_arguments(parser, many=True, layers=True)
    known = "; ".join(f"{op}: {', '.join(names)}" for op, names in COMPETITORS.items())
    parser.add_argument("--against", metavar="A,B", help=f"what to time it beside; {known} (default: the first)")
    parser.add_argument("--grad", action="store_true", help="forward and backward together")
    parser.add_argument("--backend", choices=BACKENDS, help="of ours (default: mosaic, or xla where no kernel runs)")
    parser.add_argument(
        "--seconds", type=seconds, default=1.0, metavar="TIME", help="how long to measure each problem (default 1s)"
    )
    parser.add_argument(
        "--sustained",
        type=seconds,
        nargs="?",
        const=1.0,
        metavar="TIME",
        help="in place of bursts, let each run without pause, in three turns of this time (default 1s), and tell its watts",
    )
    parser.add_argument(
        "--peer-seconds",
        dest="competitor_seconds",
        type=seconds,
        default=60.0,
        metavar="TIME",
        help="how long another implementation may compile its settings for a problem (default 60s)",
    )
    parser.add_argument(
        "--peers-from",
        dest="competitors_from",
        type=Path,
        metavar="CSV",
        help="take the settings of other implementations from an earlier result",
    )
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="where to write (default: results)")
    parser.add_argument("--what", metavar="WORD", help="a word in the file's name: results/<date>-<gpu>-<op>-<word>.csv")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.tuning.bench import layers, results, runner

    specs = mgpu_ops.SPECS | {layers.SPEC.name: layers.SPEC}
    if arguments.op not in specs:
        raise UsageError(f"op {arguments.op!r} is not one of {', '.join(specs)}")
    spec = specs[arguments.op]
    problems = problems_of(spec, arguments)
    here = _hopper_here()
    between_gpus = any(spec.devices(problem) > 1 for problem in problems.values())
    against = _against(spec, between_gpus, arguments)
    writable(arguments.output, "--output", folder=True)
    op = spec.name + results.GRAD * arguments.grad + results.SUSTAINED * (arguments.sustained is not None)
    path = results.output_path(arguments.output, datetime.date.today().isoformat(), here.key, op, arguments.what)
    earlier = _measurements_of(arguments.competitors_from) if arguments.competitors_from else []
    kept = _measurements_of(path) if path.exists() else []
    if kept:
        say(f"{path} has {count(len(kept), 'row')}: those of other problems stay")
    options = runner.BenchOptions(
        gpu=here,
        seconds=arguments.seconds,
        against=against,
        grad=arguments.grad,
        backend=arguments.backend,
        sustained=arguments.sustained,
        competitor_seconds=arguments.competitor_seconds,
        earlier=earlier,
    )
    rows = _measured(spec, problems, options, between_gpus, lambda new: results.write_csv(results.merge(kept, new), path))
    return _report(rows, results.failures(rows, spec, problems, grad=arguments.grad), path, arguments)


def _hopper_here() -> Gpu:
    from mgpu_ops.core import gpu

    here = gpu.current()
    if here is None or here.architecture != "hopper":
        raise UsageError("bench times kernels: it needs a Hopper GPU here")
    return here


def _against(spec: OpSpec, between_gpus: bool, arguments: argparse.Namespace) -> list[str]:
    """The names of the competitors: those of --against, else the op's first."""
    if between_gpus and (arguments.grad or arguments.against not in (None, "xla") or arguments.sustained):
        raise UsageError(
            f"bench {spec.name} times it beside xla, without gradients: leave out --grad, --sustained and --against"
        )
    if not (between_gpus or arguments.against or spec.name in COMPETITORS):
        raise UsageError(f"nothing is known to time beside {spec.name}: bench takes {', '.join(COMPETITORS)}")
    wanted = arguments.against or COMPETITORS.get(spec.name, ("",))[0]
    return [name.strip() for name in wanted.split(",") if name.strip()]


def _measured(
    spec: OpSpec,
    problems: Mapping[str, Any],
    options: BenchOptions,
    between_gpus: bool,
    save: Callable[[list[Measurement]], None],
) -> list[Measurement]:
    """What `bench` measures; processes that compile are started where a competitor is tuned."""
    from mgpu_ops.tuning import compile_pool
    from mgpu_ops.tuning.bench import collectives, implementations, runner

    if between_gpus:
        return collectives.run(spec, problems, options, progress=say, save=save)
    known = implementations.COMPETITORS.get(spec.name, {})
    tuned = any(name in known and known[name].tuned for name in options.against)
    with compile_pool.Pool() if tuned else contextlib.nullcontext() as pool:
        return runner.run(spec, problems, dataclasses.replace(options, pool=pool), progress=say, save=save)


def _report(rows: list[Measurement], faults: list[str], path: Path, arguments: argparse.Namespace) -> int:
    """Prints the table, the summaries and what is wrong; draws the picture; the exit code."""
    from mgpu_ops.tuning import terminal
    from mgpu_ops.tuning.bench import report, results

    summaries = [*results.summary(rows), *results.split(rows)]
    document = {"rows": rows, "summary": list(map(_summary_document, summaries)), "faults": faults, "files": []}
    if not rows:
        answer(arguments, document)
        return WRONG
    terminal.console().print(report.table(rows))
    yardsticks = results.yardsticks(results.comparisons(rows))
    for summary in summaries:
        say(_sentence(summary, summary.competitor in yardsticks))
    pictures = report.picture(rows, path.with_suffix(".png"))
    say(f"wrote {path} and {', '.join(map(str, pictures))}")
    for fault in faults:
        say(f"WRONG: {fault}")
    answer(arguments, document | {"files": [path, *pictures]})
    return WRONG if faults else OK


def _measurements_of(path: Path) -> list[Measurement]:
    from mgpu_ops.tuning.bench import results

    try:
        return results.read_csv(path)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: cannot be read ({e}): name a CSV file of `bench`") from None
    except ValueError as e:
        raise UsageError(str(e)) from None


def _sentence(summary: Summary, yardstick: bool) -> str:
    """A summary on one line. Beside a yardstick, it tells the share of its speed that ours reaches."""
    name = summary.competitor
    x, versus = (f" of {name}", "") if yardstick else ("x", f" against {name}")
    warm = "" if math.isnan(summary.warm_geomean) else f" ({summary.warm_geomean:.3f}{x} with a warm L2)"
    part = f", {summary.part}" if summary.part else ""
    return (
        f"{summary.op}{part}{versus}: geometric mean {summary.geomean:.3f}{x}{warm} over {count(summary.problems, 'problem')}, "
        f"worst {summary.worst:.3f}{x} ({summary.worst_problem}), {summary.losses} under 1.0x"
    )


def _summary_document(summary: Summary) -> dict[str, Any]:
    """A summary for JSON, with the names that scripts read: a competitor is a "peer" there."""
    from mgpu_ops.tuning.bench.results import BEST

    fields = dict(vars(summary))
    competitor = fields.pop("competitor")
    return fields | {"peer": "best peer" if competitor == BEST else competitor}
