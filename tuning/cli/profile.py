"""`mgpu-tune profile`: what the warpgroups of a kernel do over time."""

from __future__ import annotations

import argparse
import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import positive_int, problem_arguments
from mgpu_ops.tuning.cli.selection import problems_of
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, say, writable

if TYPE_CHECKING:
    from mgpu_ops.core.gpu import Gpu
    from mgpu_ops.registry.spec import OpSpec, Problem
    from mgpu_ops.tuning.bench.timeline import Timeline


def register(commands: Any) -> None:
    parser = command(
        commands,
        "profile",
        run,
        """
        mgpu-tune profile matmul --shape square-4096
        mgpu-tune profile flash_attention --shape llama3-8b-8192-causal --ranges 1024
        mgpu-tune profile grouped_matmul --m 8192 --n 4096 --k 7168 --groups 32 --output timelines
        """,
        needs=("matplotlib",),
    )
    problem_arguments(parser)
    parser.add_argument(
        "--ranges",
        type=positive_int,
        default=512,
        metavar="N",
        help="how many ranges of each warpgroup to record, 16 bytes of shared memory each; where the config leaves no room for "
        "them, half as many, and so on (default 512)",
    )
    parser.add_argument("--blocks", type=positive_int, default=4, metavar="N", help="blocks in the trace (default 4)")
    parser.add_argument("--output", type=Path, default=Path("results"), metavar="DIR", help="where to write (default: results)")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import resolution
    from mgpu_ops.tuning.bench import timeline

    spec = mgpu_ops.spec_of(arguments.op)
    ((name, problem),) = problems_of(spec, arguments).items()
    here = _fitting_gpu(spec, problem)
    if arguments.ranges < timeline.FEWEST:
        raise UsageError(f"--ranges {arguments.ranges} tells nothing: record {timeline.FEWEST} at least")
    writable(arguments.output, "--output", folder=True)
    chosen = resolution.resolve(spec, problem, here)
    try:
        traces, config, room = timeline.record(spec, problem, chosen.config, here, arguments.ranges)
    except ValueError as error:
        raise UsageError(str(error)) from None
    say(f"{spec.name} {name} on {here.name}: {config} ({chosen.source})")
    if config != chosen.config:
        say(f"with fewer pipeline stages than the config's {chosen.config.max_concurrent_steps}, to make room for the record")
    if chosen.runs == "xla":
        say("XLA is the faster here, so a call runs that; this is the kernel")
    say(f"the first {room} ranges of each warpgroup")
    told = [
        _write(trace, f"{spec.name} {name} on {here.name}", _stem(arguments.output, here, trace), arguments) for trace in traces
    ]
    answer(
        arguments,
        {"op": spec.name, "problem": problem, "gpu": here.key, "config": config, "ranges": room, "kernels": told},
    )
    return OK


def _fitting_gpu(spec: OpSpec, problem: Problem) -> Gpu:
    """The GPU here, which can run this problem's kernel."""
    from mgpu_ops.core import gpu

    here = gpu.current()
    if here is None or here.architecture != "hopper":
        raise UsageError("profile records a kernel while it runs: it needs a Hopper GPU here, and JAX with CUDA (extra cuda13)")
    if spec.devices(problem) > 1:
        raise UsageError(f"profile records kernels of one GPU, and {spec.name} runs on {spec.devices(problem)}")
    reason = spec.supports(problem, here)
    if reason is not None:
        raise UsageError(f"no kernel runs {spec.name} {problem}: {reason}")
    return here


def _stem(folder: Path, here: Gpu, trace: Timeline) -> Path:
    return folder / f"{datetime.date.today().isoformat()}-{here.key}-{trace.kernel.removeprefix('mgpu_ops_')}-timeline"


def _write(trace: Timeline, title: str, stem: Path, arguments: argparse.Namespace) -> dict[str, Any]:
    """Writes the trace and the picture of a kernel, and tells the shares of its typical block."""
    from mgpu_ops.tuning.bench import timeline

    stem.parent.mkdir(parents=True, exist_ok=True)
    perfetto = stem.with_name(stem.name + ".json")
    timeline.write_perfetto(trace, perfetto, arguments.blocks)
    pictures = timeline.draw(trace, f"{title}: {trace.kernel}", stem)
    block = trace.typical()
    say(f"{trace.kernel}, block {block.number} of {len(trace.blocks)}, {block.cycles:.0f} clock cycles:")
    shares = block.shares()
    for number, one in enumerate(shares):
        say(f"  {timeline.role(number, block):12} " + "  ".join(f"{region} {share:.1%}" for region, share in one.items()))
    say(f"  {', '.join(map(str, pictures))}; {perfetto} for ui.perfetto.dev")
    return {"kernel": trace.kernel, "block": block.number, "cycles": block.cycles, "shares": shares, "trace": perfetto}
