"""`mgpu-tune bench`: measures beside other implementations."""

from __future__ import annotations

import argparse
import contextlib
import datetime
import math
from pathlib import Path
from typing import Any

from mgpu_ops.tuning.cli.arguments import BACKENDS, PEERS, problem_arguments, problems_of, seconds
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, count, say, writable


def register(commands: Any) -> None:
    parser = command(
        commands,
        "bench",
        run,
        "measure beside other implementations; writes a CSV file and a picture (needs a Hopper GPU)",
        """
        mgpu-tune bench matmul --suite llm --against xla,jax-pallas
        mgpu-tune bench matmul --shape square-4096 --grad
        mgpu-tune bench grouped_matmul --suite moe --against dense,jax-pallas,tokamax
        mgpu-tune bench grouped_matmul --suite training --against dense,tokamax --grad --peer-seconds 30s
        mgpu-tune bench flash_attention --suite llm --against cudnn,tokamax,jax-pallas
        mgpu-tune bench flash_attention --suite d128 --against cudnn,tokamax --grad
        mgpu-tune bench flash_attention_backward --suite llm
        mgpu-tune bench all_reduce --suite 4-gpus
        """,
        needs=("matplotlib", "rich"),
    )
    problem_arguments(parser, many=True)
    peers = "; ".join(f"{op}: {', '.join(names)}" for op, names in PEERS.items())
    parser.add_argument("--against", metavar="A,B", help=f"{peers} (default: the first)")
    parser.add_argument("--grad", action="store_true", help="forward plus backward")
    parser.add_argument("--backend", choices=BACKENDS, help="that ours runs on (default: mosaic, or xla where it cannot)")
    parser.add_argument("--seconds", type=seconds, default=1.0, metavar="TIME", help="of measuring a problem (default 1s)")
    parser.add_argument(
        "--peer-seconds", type=seconds, default=60.0, metavar="TIME", help="a tuned peer may compile a problem (default 60s)"
    )
    parser.add_argument("--peers-from", type=Path, metavar="CSV", help="take the peers' settings from an earlier result")
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="default: results")
    parser.add_argument("--what", help="a word for the file's name: results/<date>-<gpu>-<op>-<what>.csv")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.core import gpu
    from mgpu_ops.tuning import compile_pool, terminal
    from mgpu_ops.tuning.bench import collectives as collective_bench
    from mgpu_ops.tuning.bench import implementations, report, runner

    spec = mgpu_ops.spec_of(arguments.op)
    problems = problems_of(spec, arguments)
    here = gpu.current()
    if here is None or here.architecture != "hopper":
        raise UsageError("bench times kernels: it needs a Hopper GPU here")
    between_gpus = any(spec.devices(problem) > 1 for problem in problems.values())
    if between_gpus and (arguments.grad or arguments.against not in (None, "xla")):
        raise UsageError(f"bench {spec.name} times it beside xla, without gradients: leave out --grad and --against")
    if not (between_gpus or arguments.against or spec.name in PEERS):
        raise UsageError(f"nothing is known to time beside {spec.name}: bench takes {', '.join(PEERS)}")
    wanted = arguments.against or PEERS.get(spec.name, ("",))[0]
    against = [name.strip() for name in wanted.split(",") if name.strip()]
    op = spec.name + ("+grad" if arguments.grad else "")
    today = datetime.date.today().isoformat()
    writable(arguments.output, "--output", folder=True)
    path = runner.output_path(arguments.output, today, here.key, op, arguments.what)
    earlier = _rows_of(arguments.peers_from) if arguments.peers_from else []
    kept = _rows_of(path) if path.exists() else []
    if kept:
        say(f"{path} has {count(len(kept), 'row')}: those of other problems stay")
    shared: dict[str, Any] = {"gpu": here, "seconds": arguments.seconds, "backend": arguments.backend, "progress": say}
    shared["save"] = lambda rows: runner.write_csv(runner.merge(kept, rows), path)
    if between_gpus:
        rows = collective_bench.run(spec, problems, **shared)
    else:
        tuned = any(peer.tuned for name, peer in implementations.PEERS.get(spec.name, {}).items() if name in against)
        with compile_pool.Pool() if tuned else contextlib.nullcontext() as pool:
            rows = runner.run(
                spec,
                problems,
                against=against,
                grad=arguments.grad,
                peer_seconds=arguments.peer_seconds,
                earlier=earlier,
                pool=pool,
                **shared,
            )
    faults = runner.failures(rows, spec, problems, grad=arguments.grad)
    document = {"rows": rows, "summary": [*runner.summary(rows), *runner.split(rows)], "faults": faults, "files": []}
    if not rows:
        answer(arguments, document)
        return WRONG
    terminal.console().print(report.table(rows))
    of = runner.yardsticks(runner.lines(rows))
    for line in [*runner.summary(rows), *runner.split(rows)]:
        say(_told(line, "of" if line.peer in of else "against"))
    pictures = report.picture(rows, path.with_suffix(".png"))
    say(f"wrote {path} and {', '.join(map(str, pictures))}")
    for fault in faults:
        say(f"WRONG: {fault}")
    answer(arguments, document | {"files": [path, *pictures]})
    return WRONG if faults else OK


def _rows_of(path: Path) -> list[Any]:
    from mgpu_ops.tuning.bench import runner

    try:
        return runner.read_csv(path)
    except (OSError, UnicodeDecodeError) as e:
        raise UsageError(f"{path}: cannot be read ({e}): name a CSV file of `bench`") from None
    except ValueError as e:
        raise UsageError(str(e)) from None


def _told(line: Any, how: str) -> str:
    """A summary as a line: `how` we compare, "of" a yardstick, of whose speed we reach a part, or "against" a peer."""
    x, versus = (f" of {line.peer}", "") if how == "of" else ("x", f" against {line.peer}")
    warm = "" if math.isnan(line.warm_geomean) else f" ({line.warm_geomean:.3f}{x} with a warm L2)"
    part = f", {line.part}" if line.part else ""
    return (
        f"{line.op}{part}{versus}: geometric mean {line.geomean:.3f}{x}{warm} over {count(line.problems, 'problem')}, "
        f"worst {line.worst:.3f}{x} ({line.worst_problem}), {line.losses} under 1.0x"
    )
