"""`mgpu-tune proxy`: lets many workers share one database through one process."""

from __future__ import annotations

import argparse
import os
import signal
from typing import Any

from mgpu_ops.tuning.cli.shared import INTERRUPTED, OK, UsageError, answer, command, say
from mgpu_ops.tuning.cli.storages import address_arguments, required_storage, storage_argument, warn_of_listening

PORT = 13000


def register(commands: Any) -> None:
    parser = command(
        commands,
        "proxy",
        run,
        """
        mgpu-tune proxy --storage postgresql://tuner@db.example/studies
        MGPU_OPS_STORAGE=postgresql://tuner:...@db.example/studies mgpu-tune proxy --port 13001
        ssh -N -R 13000:127.0.0.1:13000 gpu-host &   # then there: mgpu-tune worker --storage grpc://127.0.0.1:13000
        mgpu-tune proxy --host 10.0.0.5   # beyond this machine: no password, no encryption
        """,
        needs=("optuna", "grpc", "google.protobuf"),
    )
    storage_argument(parser, otherwise="an error")
    address_arguments(parser, PORT)


def run(arguments: argparse.Namespace) -> int:
    from mgpu_ops.tuning import storage

    where = required_storage(arguments)
    if where.partition("://")[0].partition("+")[0] not in storage.DRIVERS:
        raise UsageError(f"a proxy serves a database, not {storage.redact(where)}: name postgresql:// or mysql://")
    import optuna

    with storage.opened(where) as backend:
        warn_of_listening("the proxy", arguments.host, arguments.port)
        url = f"grpc://{arguments.host}:{arguments.port}"
        say(f"serving {storage.redact(where)} at {url}; Ctrl-C ends it")
        answer(arguments, {"storage": storage.redact(where), "url": url})
        signal.signal(signal.SIGINT, _stop)
        try:
            optuna.storages.run_grpc_proxy_server(backend, host=arguments.host, port=arguments.port)
        except RuntimeError as error:  # what grpc raises for a port that is taken
            raise UsageError(f"cannot listen on {arguments.host}:{arguments.port} ({error}): name another --port") from None
    return OK


def _stop(*_: Any) -> None:
    """Ends at once: grpc's callbacks may swallow an exception, and its threads outlive one. The database has all results."""
    os.write(2, b"mgpu-tune: stopped\n")
    os._exit(INTERRUPTED)
