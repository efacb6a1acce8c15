"""`mgpu-tune compile`: compiles what a program runs for a GPU, on any machine."""

from __future__ import annotations

import argparse
import dataclasses
import functools
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.capture import NO_CALL, Program, function_arguments, program_of
from mgpu_ops.tuning.cli.shared import OK, WRONG, UsageError, answer, command, say
from mgpu_ops.tuning.terminal import brief, count

if TYPE_CHECKING:
    from mgpu_ops.core.aot import Report
    from mgpu_ops.core.gpu import Gpu
    from mgpu_ops.registry.resolution import Resolution
    from mgpu_ops.tuning.problems import TuningJob


def register(commands: Any) -> None:
    parser = command(
        commands,
        "compile",
        run,
        """
        mgpu-tune compile examples.moe:step --gpu h100-sxm        # on a laptop
        mgpu-tune compile model:layer --args 'bf16[4096,4096]' 'bf16[4096,14336]' --gpu h200
        mgpu-tune compile train:sharded_step --devices 8          # the kernels alone: its mesh is of this machine's devices
        mgpu-tune compile train:step --json | jq '.kernels[] | select(.error)'
        """,
    )
    function_arguments(parser)


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.core import aot
    from mgpu_ops.tuning import problems
    from mgpu_ops.tuning.labels import describe

    if reason := aot.available():
        raise UsageError(reason)
    program = program_of(arguments)
    captured = program.captured
    jobs = problems.of(captured)
    say(f"{arguments.function} for {captured.gpu.name}: {count(len(jobs), 'problem')}, the longest first")
    if not captured.uses:
        say(NO_CALL)
    compiled = [_kernel(job, captured.gpu, arguments.function) for job in jobs]
    skipped = [use for use in captured.uses if use.skipped is not None]
    for use in skipped:
        say(f"{use.count:6} x {use.op} {describe(use.problem)}: {use.skipped}")
    for note in captured.notes:
        say(f"note: {note}")
    if compiled:
        say(_sum(compiled))
    whole = _whole(program, arguments.devices)
    answer(
        arguments,
        {
            "function": arguments.function,
            "gpu": captured.gpu.key,
            "kernels": compiled,
            "skipped": [{"op": u.op, "problem": u.problem, "count": u.count, "reason": u.skipped} for u in skipped],
            "notes": captured.notes,
            "program": whole,
        },
    )
    return WRONG if any(found.get("error") for found in (*compiled, whole)) else OK


def _kernel(job: TuningJob, gpu: Gpu, function: str) -> dict[str, Any]:
    """Compiles the kernels of one problem with the config that a call of it uses, and says what came of it."""
    import jax

    from mgpu_ops.core import aot
    from mgpu_ops.registry import resolution
    from mgpu_ops.tuning.tables import assignments

    spec, problem = job.spec, job.problem
    chosen = resolution.resolve(spec, problem, gpu)
    us = spec.cost(problem, chosen.config, gpu) * 1e6
    found = {"op": job.op, "problem": problem, "count": job.count, "config": chosen.config, "source": chosen.source}
    found |= {"path": chosen.path, "runs": chosen.runs, "us": us, "kernels": (), "error": None}
    say(f"{job.count:6} x {job.op} {job.name}: {us:.1f} us modelled")
    say(f"         {assignments(dataclasses.asdict(chosen.config))} ({_where(chosen)})")
    if chosen.runs == "xla":
        say(f"         a call runs XLA{resolution.versus(chosen)}; this is the kernel of backend='mosaic'")
    shapes = jax.eval_shape(lambda: spec.inputs(problem, jax.random.key(0)))
    launch = functools.partial(spec.run, problem, chosen.config, gpu)
    try:
        report = aot.compile_for(gpu, launch, *shapes, devices=spec.devices(problem))
    except Exception as e:
        say(f"         does not compile: {brief(e)}")
        say(f"         {_advice(chosen, function)}")
        return found | {"error": brief(e)}
    _tell(report, spec.spills_outside_loops(chosen.config), chosen, function)
    fields = ("name", "registers", "spill_stores", "spill_loads", "smem_bytes", "serialized")
    return found | {"kernels": [{field: getattr(kernel, field) for field in fields} for kernel in report.kernels]}


def _sum(compiled: Sequence[Mapping[str, Any]]) -> str:
    """The time of all kernels that calls run."""
    run = [kernel for kernel in compiled if kernel["runs"] == "kernel"]
    us = sum(kernel["count"] * kernel["us"] for kernel in run)
    left = len(compiled) - len(run)
    without = f", without {count(left, 'problem')} that run{'s' * (left == 1)} XLA" if left else ""
    return f"in all {us:.1f} us of kernels by the ops' models{without}"


def _tell(report: Report, allowed: int, chosen: Resolution, function: str) -> None:
    for kernel in report.kernels:
        spills = kernel.spill_stores + kernel.spill_loads
        spilled = f"{spills} bytes a thread spilled" if spills else "no spills"
        smem = f"{kernel.smem_bytes / 1024:.1f} KiB of shared memory"
        say(f"         {kernel.name}: {kernel.registers} registers, {spilled}, {smem}")
    if report.spills > allowed or report.serialized:
        slow = f"ptxas serialises its tensor cores ({report.serialized})" if report.serialized else "it spills registers"
        say(f"         it runs, but slowly: {slow}. {_advice(chosen, function)}")
    if not report.kernels:
        say("         no kernel: with this config XLA runs it")


def _where(chosen: Resolution) -> str:
    return f"{chosen.source}, {chosen.path}" if chosen.path is not None else chosen.source


def _advice(chosen: Resolution, function: str) -> str:
    """What to do about a config that compiles badly or not at all."""
    if chosen.source in ("argument", "override", "environment"):
        return f"Name another config than that of {chosen.path or 'mgpu_ops.use_configs'}"
    again = f"mgpu-tune capture {function} --output problems.json && mgpu-tune run --from problems.json"
    return f"Tune it: {again}; until then, call it with backend='xla'"


def _whole(program: Program, devices: int | None) -> dict[str, Any]:
    """Compiles the program as a whole: the kernels and all that XLA makes of the rest."""
    from mgpu_ops.core import aot
    from mgpu_ops.registry.capture import of_arrays

    if devices:
        say("the whole program is not compiled: with --devices its mesh is of this machine's devices, not of GPUs")
        return {}
    traced, arrays = of_arrays(program.function, *program.arguments)
    try:
        made = aot.program(program.captured.gpu, traced, arrays)
    except Exception as e:
        say(f"the whole program does not compile: {brief(e)}")
        say(
            "The kernels above that compile are not the cause: look for what XLA cannot do without the GPU, or cannot do at all"
        )
        return {"error": brief(e)}
    say(
        f"the whole program compiles: {count(made.launches, 'launch', 'launches')} of our kernels in its text; "
        f"{_mib(made.argument_bytes)} of arguments, {_mib(made.output_bytes)} of results, "
        f"{_mib(made.temporary_bytes)} of temporaries"
    )
    return dataclasses.asdict(made)


def _mib(size: int) -> str:
    return f"{size / 2**20:.1f} MiB"
