"""`mgpu-tune demo`: a tour on any machine."""

from __future__ import annotations

import argparse
from typing import TYPE_CHECKING, Any, Literal

from mgpu_ops.tuning.cli.session import Session, progress_bar
from mgpu_ops.tuning.cli.shared import OK, WRONG, answer, command, say
from mgpu_ops.tuning.devices import NoDevice, device_for

if TYPE_CHECKING:
    from mgpu_ops.tuning.device import Device


def register(commands: Any) -> None:
    command(
        commands,
        "demo",
        run,
        """
        mgpu-tune demo
        """,
        needs=("optuna", "rich"),
    )


def run(arguments: argparse.Namespace) -> int:
    """Tunes a matmul and calls it: measured and 4096^3 on a Hopper GPU, else modelled and small enough to interpret."""
    import jax
    import numpy as np

    import mgpu_ops
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import measure
    from mgpu_ops.tuning.options import TuneOptions
    from mgpu_ops.tuning.problems import TuningJob

    spec = mgpu_ops.spec_of("matmul")
    device = _device_of_demo()
    side = 4096 if device.kind == "measured" else 512
    backend: Literal["mosaic", "interpret"] = "mosaic" if device.kind == "measured" else "interpret"
    job = TuningJob(spec.name, spec.Problem(side, side, side), 1, f"{side}x{side}x{side}")
    path = database.user_path(device.gpu.key, spec.name)
    try:
        database.require_writable(path, gpu_key=device.gpu.key, op=spec.name)
        session = Session(TuneOptions(trials=24, budget=60.0), {spec.name: path})
        with progress_bar() as bar:
            code = session.tune(job, device, bar)
    finally:
        device.close()
    if code != OK:
        answer(arguments, {"problems": session.results})
        return code
    a, b = spec.inputs(job.problem, jax.random.key(1))
    out = mgpu_ops.matmul(a, b, backend=backend)
    wide = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    error, limit = measure.error(out, jax.numpy.asarray(wide)), spec.tolerance(job.problem)
    say(
        f"mgpu_ops.matmul(a, b, backend={backend!r}) with that entry: max error {error:.2e} against float32 (limit {limit:.0e})"
    )
    for line in mgpu_ops.explain("matmul", job.problem, device.gpu.key).split("\n")[:3]:
        say(line)
    answer(arguments, {"problems": session.results, "backend": backend, "error": error, "limit": limit})
    return OK if error <= limit else WRONG


def _device_of_demo() -> Device:
    from mgpu_ops.tuning.worker import WorkerError

    try:
        return device_for(None, say=say)
    except (NoDevice, WorkerError):
        return device_for("h200", say=say)
