"""Arguments of the commands that take `--storage`, and of those that listen on a port."""

from __future__ import annotations

import argparse
import os
import sys
from pathlib import Path

from mgpu_ops.tuning.cli.shared import UsageError

LOOPBACK = ("127.0.0.1", "::1", "localhost")


def storage_argument(parser: argparse.ArgumentParser, *, otherwise: str) -> None:
    parser.add_argument(
        "--storage",
        metavar="WHERE",
        help="a journal file, postgresql://USER@HOST/NAME, mysql://USER@HOST/NAME or grpc://HOST:PORT of `mgpu-tune proxy`; "
        f"a URL with a password goes into $MGPU_OPS_STORAGE (default: that, else {otherwise})",
    )


def storage_of(arguments: argparse.Namespace) -> str | None:
    """Where the studies are: --storage, else $MGPU_OPS_STORAGE; None without either."""
    from mgpu_ops.tuning import storage

    if arguments.storage is not None:
        refuse_password("--storage", arguments.storage)
    return arguments.storage or os.environ.get(storage.VARIABLE) or None


def refuse_password(option: str, where: str, instead: str = "leave it out here") -> None:
    """Refuses a password on the command line, where every user of the machine can read it in the list of processes."""
    from mgpu_ops.tuning import storage

    if storage.has_password(where):
        raise UsageError(
            f"{option} {storage.redact(where)} has a password, which the list of processes shows: put the URL into "
            f"${storage.VARIABLE} and {instead}, or leave the password out and have it in ~/.pgpass or $PGPASSWORD"
        )


def finished_argument(parser: argparse.ArgumentParser, what: str) -> None:
    """--storage of a command that reads finished trials or entries; without the option, $MGPU_OPS_STORAGE is not used."""
    parser.add_argument(
        "--storage",
        nargs="?",
        const="",
        metavar="WHERE",
        help=f"{what} in a storage of `mgpu-tune worker` or `run`: a journal file or a URL; without WHERE, $MGPU_OPS_STORAGE",
    )


def finished_storage(arguments: argparse.Namespace) -> str | None:
    """The storage that `finished_argument` names; None where it is not given."""
    if arguments.storage is None:
        return None
    return existing(required_storage(arguments))


def existing(where: str) -> str:
    """The storage that was named, to be read; a journal that is not there is refused, not made."""
    if "://" not in where and not Path(os.path.expanduser(where)).is_file():
        from mgpu_ops.tuning import storage

        raise UsageError(f"{storage.redact(where)}: there is no such journal: name the storage with --storage")
    return where


def required_storage(arguments: argparse.Namespace) -> str:
    where = storage_of(arguments)
    if where is None:
        raise UsageError("name the storage with --storage, or $MGPU_OPS_STORAGE where its URL has a password")
    return where


def address_arguments(parser: argparse.ArgumentParser, port: int) -> None:
    parser.add_argument("--host", default="127.0.0.1", help="address to listen on (default 127.0.0.1: this machine alone)")
    parser.add_argument("--port", type=port_number, default=port, help=f"default {port}")


def port_number(text: str) -> int:
    if not (text.isdecimal() and 1 <= int(text) <= 65535):
        raise argparse.ArgumentTypeError(f"{text!r} must be a whole number from 1 to 65535")
    return int(text)


def warn_of_listening(what: str, host: str, port: int) -> None:
    """Warns where other machines can reach a server that has no password."""
    if host not in LOOPBACK:
        print(
            f"mgpu-tune: WARNING: {what} listens on {host}:{port}, beyond this machine. It has no password and no encryption: "
            "whoever reaches that port can read, change and delete the studies. Keep it behind a firewall, or leave --host "
            "out and come in through an SSH tunnel.",
            file=sys.stderr,
            flush=True,
        )
