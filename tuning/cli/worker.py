"""`mgpu-tune worker`: tunes the problems in a fleet's queue, on any host."""

from __future__ import annotations

import argparse
import functools
from collections.abc import Collection, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from mgpu_ops.tuning.cli.arguments import seconds, workers_argument
from mgpu_ops.tuning.cli.shared import INTERRUPTED, OK, WRONG, UsageError, answer, command, say
from mgpu_ops.tuning.cli.storages import required_storage, storage_argument
from mgpu_ops.tuning.devices import devices_for
from mgpu_ops.tuning.terminal import count

if TYPE_CHECKING:
    import optuna

    from mgpu_ops.tuning.device import Device
    from mgpu_ops.tuning.fleet.queue import TunedJob


def register(commands: Any) -> None:
    parser = command(
        commands,
        "worker",
        run,
        """
        mgpu-tune worker --storage postgresql://tuner@db.example/studies
        MGPU_OPS_STORAGE=postgresql://tuner:...@db.example/studies mgpu-tune worker --wait 1h
        mgpu-tune worker --storage grpc://127.0.0.1:13000 --op matmul --op flash_attention
        mgpu-tune worker --storage studies.journal --workers all         # on every GPU of this machine
        """,
        needs=("optuna",),
    )
    storage_argument(parser, otherwise="an error")
    workers_argument(parser)
    parser.add_argument("--op", action="append", metavar="OP", help="only problems of this op; may be given several times")
    parser.add_argument(
        "--wait",
        type=seconds,
        default=0.0,
        metavar="TIME",
        help="wait so long for new problems once the queue is empty (default: do not wait)",
    )
    parser.add_argument("--gpu", help="tune for this GPU: h200, h100-sxm ...; if it is not the one here, by the cost model")
    parser.add_argument(
        "--database",
        type=Path,
        metavar="FILE",
        help="where to store as well (default: your own, see `mgpu-tune show`)",
    )


def run(arguments: argparse.Namespace) -> int:
    import mgpu_ops
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import storage

    where = required_storage(arguments)
    ops = {mgpu_ops.spec_of(op).name for op in arguments.op or ()}
    if arguments.database:
        ops = {_op_of(arguments.database, ops)}
    with storage.opened(where) as backend, devices_for(arguments.gpu, arguments.workers, say=say) as devices:
        gpu_key = devices[0].gpu.key
        for op in ops or mgpu_ops.SPECS:
            path = arguments.database or database.user_path(gpu_key, op)
            database.require_writable(path, gpu_key=gpu_key, op=op)
        results, code = _work(backend, devices, ops, arguments)
    say(f"{count(len(results), 'problem')} ended here; {'stopped' if code else 'the queue has no more for this GPU'}")
    answer(arguments, {"ended": results})
    return code or (WRONG if any(result["config"] is None for result in results) else OK)


def _work(
    backend: optuna.storages.BaseStorage, devices: Sequence[Device], ops: Collection[str], arguments: argparse.Namespace
) -> tuple[list[dict[str, Any]], int]:
    """Tunes jobs of these ops (none: of all) until the queue is empty: the results for JSON, and INTERRUPTED or OK."""
    import mgpu_ops
    from mgpu_ops.registry import database
    from mgpu_ops.tuning import many
    from mgpu_ops.tuning.fleet import queue as fleet_queue

    results: list[dict[str, Any]] = []
    say_once = functools.cache(say)  # a sentence that several GPUs have

    def work(_: int, device: Device) -> None:
        worker = fleet_queue.Worker(backend, device, mgpu_ops.spec_of, say_once)
        for ended in worker.work(lambda job: not ops or job.op in ops, arguments.wait):
            path = arguments.database or database.user_path(device.gpu.key, ended.job.op)
            if ended.entry is not None:
                database.update(path, [ended.entry], gpu_key=device.gpu.key, op=ended.job.op)
            say(sentence(ended, path))
            results.append(document(ended))

    try:
        for done in many.each(range(len(devices)), devices, work):
            if done.error is not None:
                raise done.error
    except KeyboardInterrupt:
        return results, INTERRUPTED
    return results, OK


def _op_of(path: Path, ops: Collection[str]) -> str:
    """The op of a database file: of the one that exists, or of --op for one that is to be made."""
    from mgpu_ops.registry import database

    known = {database.read(path).op} if path.exists() else set(ops)
    if len(known) != 1 or (ops and not known <= set(ops)):
        raise UsageError(f"--database {path} is a file of one op: name that with --op")
    return known.pop()


def sentence(ended: TunedJob, path: Path) -> str:
    """What came of a job, on one line."""
    what = f"{ended.job.op} {ended.job.name}"
    if ended.entry is None:
        return f"{what}: {ended.reason}, nothing is stored"
    e, hosts = ended.entry.evidence, count(len(ended.hosts), "host")
    return f"{what}: best of {ended.trials}, measured by {hosts}: {e.median_us:.1f} us {e.kind}, stored in {path}"


def document(ended: TunedJob) -> dict[str, Any]:
    """What came of a job, for JSON."""
    told = {"op": ended.job.op, "problem": ended.job.problem, "trials": ended.trials, "hosts": ended.hosts}
    if ended.entry is None:
        return told | {"config": None, "reason": ended.reason}
    e = ended.entry.evidence
    return told | {"config": ended.entry.config, "kind": e.kind, "median_us": e.median_us, "default_us": e.default_us}
