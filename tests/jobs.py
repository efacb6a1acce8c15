"""Jobs of several real processes (`jax.distributed.initialize`) on this machine's CPU."""

from __future__ import annotations

import json
import os
import socket
import subprocess
import sys
from collections.abc import Sequence
from pathlib import Path
from typing import Any

ROOT = Path(__file__).parents[1]


def start(program: str, process: int, folder: Path, port: int, *words: str) -> subprocess.Popen[str]:
    env = {**os.environ, "PYTHONPATH": str(ROOT), "MGPU_OPS_CONFIG_DIR": str(folder), "JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", program, str(process), f"localhost:{port}", *words]
    return subprocess.Popen(command, env=env, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def run_job(program: str, folders: Sequence[Path], *words: str) -> list[dict[str, Any]]:
    """What each process prints on its last line, as JSON; its machine's database is one of `folders`, its words are its number,
    the coordinator's address and `words`.
    """
    with socket.socket() as free:
        free.bind(("localhost", 0))
        port = free.getsockname()[1]
    processes = [start(program, number, folder, port, *words) for number, folder in enumerate(folders)]
    try:
        done = [process.communicate(timeout=600) for process in processes]
    finally:
        for process in processes:
            process.kill()
    for process, (_, err) in zip(processes, done, strict=True):
        assert process.returncode == 0, err
    return [json.loads(out.splitlines()[-1]) for out, _ in done]
