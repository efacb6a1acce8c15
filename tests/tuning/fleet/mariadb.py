"""A MariaDB server of one's own, which speaks MySQL's protocol, on a free port of this machine. Not among the dev dependencies:
Debian's package mariadb-server-core has it, elsewhere a system's MariaDB."""

from __future__ import annotations

import contextlib
import os
import shutil
import socket
import subprocess
import tempfile
import time
from collections.abc import Iterator
from pathlib import Path
from typing import Any

from tests.tuning.fleet.postgres import PASSWORD, USER, account, free_port

SETUP = f"""
CREATE DATABASE studies;
CREATE USER '{USER}'@'%' IDENTIFIED BY '{PASSWORD}';
GRANT ALL ON studies.* TO '{USER}'@'%';
"""


def missing() -> str | None:
    """Why there is no server here; None where there is one."""
    if shutil.which("mariadb-install-db") is None or _program() is None:
        return "no MariaDB server on this machine"
    try:
        import pymysql  # noqa: F401
    except ImportError:
        return "no PyMySQL: the extra 'mysql'"
    return None


def _program() -> str | None:
    return shutil.which("mariadbd", path=os.pathsep.join([os.environ.get("PATH", ""), "/usr/sbin"]))


@contextlib.contextmanager
def server() -> Iterator[str]:
    """The URL of a fresh, empty database, with its password."""
    root = Path(tempfile.mkdtemp(prefix="mgpu-ops-mariadb-"))
    try:
        who = account()
        if who:
            os.chown(root, who["user"], who["group"])
        common: dict[str, Any] = {"cwd": root, "stdin": subprocess.DEVNULL, **who}
        make = ["mariadb-install-db", "--no-defaults", f"--datadir={root}/data", "--auth-root-authentication-method=normal"]
        subprocess.run([*make, "--skip-test-db"], check=True, capture_output=True, timeout=600, **common)
        (root / "setup.sql").write_text(SETUP)
        (root / "setup.sql").chmod(0o644)
        port = free_port()
        start = [_program(), "--no-defaults", f"--datadir={root}/data", f"--socket={root}/socket", f"--port={port}"]
        start += ["--bind-address=127.0.0.1", "--skip-name-resolve", f"--init-file={root}/setup.sql", f"--pid-file={root}/pid"]
        with open(root / "log", "w") as log:
            process = subprocess.Popen(start, stdout=log, stderr=log, **common)
        try:
            _wait(process, port, root / "log")
            yield f"mysql://{USER}:{PASSWORD.replace('+', '%2B')}@127.0.0.1:{port}/studies"
        finally:
            process.terminate()
            try:
                process.wait(10)
            except subprocess.TimeoutExpired:
                process.kill()
                process.wait()
    finally:
        shutil.rmtree(root, ignore_errors=True)


def _wait(process: subprocess.Popen[Any], port: int, log: Path) -> None:
    for _ in range(600):
        with contextlib.suppress(OSError), socket.create_connection(("127.0.0.1", port), 1):
            if "ready for connections" in log.read_text():
                return
        if process.poll() is not None:
            break
        time.sleep(0.05)
    raise RuntimeError(f"MariaDB did not start: {log.read_text()}")
