"""Many writers of one database file, and writers that are killed: nothing is lost or mixed."""

import os
import subprocess
import sys
import threading
from pathlib import Path

import pytest

from mgpu_ops.registry import database

ROOT = Path(__file__).parents[3]

PRELUDE = """
import os, random, signal, sys, time
from mgpu_ops.registry import database

def entry(m, trials=1):
    evidence = database.Evidence(
        kind="measured", gpu="NVIDIA H200", driver=None, jax="0.11.2", jaxlib="0.11.2", cuda=None,
        kernel_version=1, median_us=1.0, spread_us=0.0, default_us=None, baseline=None,
        baseline_us=None, error=None, trials=trials, seed=0, date="2025-11-20")
    return database.Entry({"m": m}, {"tile": m}, evidence)

def write(*entries):
    database.update(sys.argv[1], entries, gpu_key="h200", op="scale")

def problems():
    return {e.problem["m"] for e in database.read(sys.argv[1], gpu_key="h200", op="scale").entries}
"""
scope: dict = {}
exec(PRELUDE, scope)  # the same helpers here and in the processes below
entry = scope["entry"]


def start(code: str, *arguments: object) -> subprocess.Popen:
    command = [sys.executable, "-c", PRELUDE + code, *map(str, arguments)]
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    return subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True)


def finish(process: subprocess.Popen) -> str:
    out, err = process.communicate(timeout=600)
    assert process.returncode == 0, err
    return out


def problems(path: Path) -> set:
    return {e.problem["m"] for e in database.read(path, gpu_key="h200", op="scale").entries}


def test_two_processes_with_100_updates_each_lose_none(tmp_path):
    path = tmp_path / "scale.json"
    code = "for m in range(int(sys.argv[2]), 200, 2): write(entry(m))"
    for process in [start(code, path, first) for first in (0, 1)]:
        finish(process)
    assert problems(path) == set(range(200))


def test_threads_of_one_process_lose_none(tmp_path):
    path = tmp_path / "scale.json"

    def work(first):
        for m in range(first, 60, 3):
            database.update(path, [entry(m)], gpu_key="h200", op="scale")

    threads = [threading.Thread(target=work, args=(first,)) for first in range(3)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert problems(path) == set(range(60))


def test_a_reader_never_sees_half_a_file(tmp_path):
    path = tmp_path / "scale.json"
    database.update(path, [entry(m) for m in range(100)], gpu_key="h200", op="scale")
    writer = start("for m in range(100, 250): write(entry(m))", path)
    seen = 0
    while writer.poll() is None:
        found = problems(path)
        assert found == set(range(len(found)))  # in the order written, and all before
        assert len(found) >= seen
        seen = len(found)
    finish(writer)
    assert problems(path) == set(range(250))


def test_a_writer_killed_at_any_moment_leaves_the_old_file_or_the_new_one(tmp_path):
    code = """
write(*(entry(m) for m in range(300)))
random.seed(0)
kill = 0
while kill < 25 or len(problems()) <= 301:  # until some children did write
    before = problems()
    child = os.fork()
    if child == 0:
        for m in range(1000 * (kill + 1), 1000 * (kill + 2)):
            write(entry(m), entry(m + 1_000_000))
    time.sleep(random.uniform(0.001, 0.03))
    os.kill(child, signal.SIGKILL)
    os.waitpid(child, 0)
    after = problems()
    assert before <= after
    new = after - before
    assert {m for m in new if m >= 1_000_000} == {m + 1_000_000 for m in new if m < 1_000_000}
    kill += 1
write(entry(-1))  # no lock was left behind
print(len(problems()), os.listdir(os.path.dirname(sys.argv[1])))
"""
    assert ".tmp" not in finish(start(code, tmp_path / "scale.json"))


@pytest.mark.parametrize(("step", "new"), [("before fsync", False), ("before replace", False), ("after replace", True)])
def test_a_writer_killed_at_each_step_leaves_one_whole_file(step, new, tmp_path):
    code = """
when, name = sys.argv[2].split()
real = getattr(os, name)
def die(*args):
    if when == "after":
        real(*args)
    os.kill(os.getpid(), signal.SIGKILL)
setattr(os, name, die)
write(entry(2))
"""
    path = tmp_path / "scale.json"
    database.update(path, [entry(1)], gpu_key="h200", op="scale")
    process = start(code, path, step)
    process.communicate(timeout=600)
    assert process.returncode == -9
    assert problems(path) == ({1, 2} if new else {1})
    assert (tmp_path / ".scale.json.tmp").exists() is not new
    database.update(path, [entry(3)], gpu_key="h200", op="scale")
    assert problems(path) == ({1, 2, 3} if new else {1, 3})
    assert not (tmp_path / ".scale.json.tmp").exists()
