"""`mgpu-tune which`: says which config a problem runs with, or that XLA runs, and why."""

from __future__ import annotations

import argparse
import dataclasses
from typing import Any

from mgpu_ops.tuning.cli.arguments import problem_arguments
from mgpu_ops.tuning.cli.selection import problems_of
from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, gpu_or_current, say


def register(commands: Any) -> None:
    parser = command(
        commands,
        "which",
        run,
        """
        mgpu-tune which matmul --m 4096 --n 4096 --k 4096 --gpu h200
        mgpu-tune which matmul --shape llama3-70b-down-256
        mgpu-tune which grouped_matmul --m 8192 --n 4096 --k 7168 --groups 32 --layout nt --bias --gpu h200
        mgpu-tune which flash_attention --batch 4 --q-tokens 4096 --kv-tokens 4096 --q-heads 16 --kv-heads 16 --head-dim 128 \\
          --causal --gpu h200
        """,
    )
    problem_arguments(parser)
    parser.add_argument("--gpu", help="which GPU: h200, h100-sxm ... (default: the one here)")


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import dispatch, resolution
    from mgpu_ops.tuning import public

    spec = mgpu_ops.spec_of(arguments.op)
    (problem,) = problems_of(spec, arguments).values()
    gpu = gpu_or_current(arguments.gpu)
    asked = {"op": spec.name, "problem": problem, "gpu": gpu.key}
    backend = dispatch.requested_backend(None)
    reason = spec.supports(problem, gpu)
    if reason is not None and (refusal := public.refusal(spec, problem)):
        raise UsageError(f"{spec.name} refuses {problem}: {refusal}")
    if reason is not None and backend in ("mosaic", "interpret"):
        raise UsageError(f"MGPU_OPS_BACKEND={backend!r} cannot run {spec.name} {problem}: {reason}")
    if backend is not None:
        say(f"MGPU_OPS_BACKEND={backend!r}: every call runs on that backend. Without it:")
    if reason is not None:
        say(f"{spec.name} {problem} runs through XLA: {reason}")
        answer(arguments, asked | {"backend": "xla", "reason": reason})
        return OK
    for line in resolution.explain(spec, problem, gpu).split("\n"):
        say(line)
    found = resolution.resolve(spec, problem, gpu)
    chosen = backend or ("mosaic" if found.runs == "kernel" else "xla")
    answer(arguments, asked | {"backend": chosen} | dataclasses.asdict(found))
    return OK
