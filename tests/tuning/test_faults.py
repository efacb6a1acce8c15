"""Processes that are killed: what a run had started does not outlive it."""

from __future__ import annotations

import functools
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path

import pytest

from mgpu_ops.tuning.child import Child, Gone
from tests.tuning import serving

ROOT = Path(__file__).resolve().parents[2]

# A tuner: two children, one that computes and one that waits for a message, and no time to say goodbye.
TUNER = """
import functools, sys, time
sys.path.insert(0, {root!r})
from mgpu_ops.tuning.child import Child
from tests.tuning import serving
if __name__ == "__main__":
    children = [Child(functools.partial(serving.beget, path)) for path in {paths!r}]
    print([child.receive(600.0) for child in children], flush=True)
    time.sleep(600)
"""


def gone(pid: int) -> bool:
    """Whether a process has ended; one that nobody has waited for yet counts as ended."""
    try:
        return Path(f"/proc/{pid}/stat").read_text().rpartition(")")[2].split()[0] == "Z"
    except OSError:
        return True


def eventually(true: Callable[[], bool], seconds: float = 300.0) -> bool:
    end = time.monotonic() + seconds
    while not true() and time.monotonic() < end:
        time.sleep(0.02)
    return true()


def test_a_tuner_killed_with_9_leaves_no_worker_that_holds_the_gpu_and_no_compiler(tmp_path: Path) -> None:
    paths = [str(tmp_path / name) for name in "ab"]
    script = tmp_path / "tuner.py"
    script.write_text(TUNER.format(root=str(ROOT), paths=paths))
    tuner = subprocess.Popen([sys.executable, str(script)], stdout=subprocess.PIPE, text=True)
    assert tuner.stdout is not None
    assert tuner.stdout.readline() == "['ready', 'ready']\n"
    started = [int(pid) for path in paths for pid in Path(path).read_text().split()]
    assert len(started) == 4  # with what each has started itself
    assert not any(map(gone, started))
    tuner.send_signal(signal.SIGKILL)
    tuner.communicate()
    assert eventually(lambda: all(map(gone, started)))


def test_killing_a_process_kills_what_it_has_started(tmp_path: Path) -> None:
    """A compiler started by a process that is too slow would go on, on a core that others need."""
    path = tmp_path / "pids"
    child = Child(functools.partial(serving.beget, str(path)))
    assert child.receive(600.0) == "ready"
    started = [int(pid) for pid in path.read_text().split()]
    child.kill()
    assert eventually(lambda: all(map(gone, started)))


def test_ctrl_c_in_the_terminal_does_not_reach_children(tmp_path: Path) -> None:
    """They would die at once, and the tuner could not store what it has."""
    path = tmp_path / "pids"
    child = Child(functools.partial(serving.beget, str(path)))
    assert child.receive(600.0) == "ready"
    pid = int(path.read_text().split()[0])
    assert os.getpgid(pid) != os.getpgid(0)  # the terminal signals a group
    os.kill(pid, signal.SIGINT)
    assert not eventually(lambda: gone(pid), 0.3)
    child.kill()


def test_a_process_killed_with_9_while_it_owes_an_answer_says_so(tmp_path: Path) -> None:
    child = Child(functools.partial(serving.beget, str(tmp_path / "pids")))
    child.receive(600.0)
    assert child.send("compute")
    os.kill(child.pid, signal.SIGKILL)
    assert child.receive(600.0) == Gone("the process died (exit code -9)")
    assert not child.send("compute")
    child.kill()


def test_kernels_of_candidates_are_not_kept(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_KERNEL_CACHE", str(tmp_path))
    child = Child(serving.keeping)
    try:
        assert child.receive(300.0) is None
    finally:
        child.kill()
