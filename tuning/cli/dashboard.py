"""`mgpu-tune dashboard`: optuna-dashboard on the studies of the tuner."""

from __future__ import annotations

import argparse
from typing import Any

from mgpu_ops.tuning.cli.shared import OK, UsageError, answer, command, say
from mgpu_ops.tuning.cli.storages import address_arguments, existing, storage_argument, storage_of, warn_of_listening

PORT = 8080


def register(commands: Any) -> None:
    parser = command(
        commands,
        "dashboard",
        run,
        """
        mgpu-tune dashboard matmul --gpu h200   # what `mgpu-tune run` keeps on this machine
        mgpu-tune dashboard --storage studies.journal
        mgpu-tune dashboard --storage postgresql://tuner@db.example/studies --port 8081
        """,
        needs=("optuna", "optuna_dashboard"),
    )
    parser.add_argument("op", nargs="?", help="open this op's journal, where no storage is named")
    parser.add_argument("--gpu", help="open the journal of this GPU (default: the one here)")
    storage_argument(parser, otherwise="the journal of an op")
    address_arguments(parser, PORT)


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.tuning import storage

    named = storage_of(arguments)
    where = existing(named) if named else _own_journal(arguments)
    import optuna_dashboard

    with storage.opened(where) as backend:
        warn_of_listening("the dashboard", arguments.host, arguments.port)
        url = f"http://{arguments.host}:{arguments.port}/"
        say(f"{storage.redact(where)} at {url}; Ctrl-C ends it")
        answer(arguments, {"storage": storage.redact(where), "url": url})
        try:
            optuna_dashboard.run_server(backend, host=arguments.host, port=arguments.port)
        except OSError as error:
            raise UsageError(f"cannot listen on {arguments.host}:{arguments.port} ({error}): name another --port") from None
    return OK


def _own_journal(arguments: argparse.Namespace) -> str:
    import mgpu_ops
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.cli.shared import gpu_or_current

    if arguments.op is None:
        raise UsageError("name an op, whose journal of this machine is opened, or another storage with --storage")
    path = storage.journal_path(gpu_or_current(arguments.gpu).key, mgpu_ops.spec_of(arguments.op).name)
    if not path.exists():
        raise UsageError(
            f"{path} is not there: no measured trials of {arguments.op} are kept on this machine for that GPU; "
            "modelled ones are kept with --storage alone"
        )
    return str(path)
