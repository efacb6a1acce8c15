"""`mgpu-tune run`: its budgets, samplers and studies. The device is a table of times."""

from __future__ import annotations

import json
import math
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import optuna
import pytest
import sqlalchemy.exc
from optuna.storages.journal import JournalFileBackend

import mgpu_ops
from mgpu_ops.registry import database, resolution
from mgpu_ops.tuning import ledger, storage
from mgpu_ops.tuning.worker import WorkerError
from tests.tuning.conftest import Command
from tests.tuning.toy import (
    DEFAULT,
    GPU,
    OPTIMUM,
    PROBLEM,
    SPEC,
    Config,
    FakeDevice,
    OneOfSeveral,
    Sustaining,
    machine_of,
    slope,
    store,
)

ROOT = Path(__file__).parents[3]


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """What `run` measures on, in turn; the last one again and again."""
    found = [FakeDevice()]
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", SPEC)
    monkeypatch.setattr(
        "mgpu_ops.tuning.devices.device_for", lambda name, gpus=1, **_: found.pop(0) if len(found) > 1 else found[0]
    )
    return found


def test_a_run_that_was_stopped_goes_on_where_it_was_and_one_that_ended_starts_anew(
    mgpu_tune: Command, devices: list[FakeDevice]
) -> None:
    stopped = FakeDevice(lambda config: KeyboardInterrupt() if len(stopped.judged) > 10 else slope(config))
    second, third = FakeDevice(), FakeDevice()
    devices[:] = [stopped, second, third]
    words = ("run", "toy", "--shape", "toy-1024")
    assert mgpu_tune(*words).code == 130
    assert mgpu_tune(*words).code == 0
    assert len(second.judged) == 22
    assert set(second.judged).isdisjoint(stopped.judged[:10])
    assert mgpu_tune(*words).code == 0
    assert len(third.judged) == 32


def test_fresh_ignores_what_was_measured(mgpu_tune: Command, devices: list[FakeDevice]) -> None:
    stopped = FakeDevice(lambda config: KeyboardInterrupt() if len(stopped.judged) > 10 else slope(config))
    second = FakeDevice()
    devices[:] = [stopped, second]
    assert mgpu_tune("run", "toy", "--shape", "toy-1024").code == 130
    assert mgpu_tune("run", "toy", "--shape", "toy-1024", "--fresh").code == 0
    assert len(second.judged) == 32


def test_the_target_and_the_confidence_are_told(mgpu_tune: Command, devices: list[FakeDevice]) -> None:
    done = mgpu_tune("run", "toy", "--shape", "toy-1024", "--target", "1.0", "--trials", 200, "--json")
    assert done.code == 0
    (told,) = json.loads(done.out)["problems"]
    assert told["ended"] == "target"
    assert told["confidence"] == 1.0
    assert "no other finalist is faster by more than 0.3%, with a confidence of 100%" in done.err


def test_with_the_objective_sustained_both_winners_are_stored_and_the_energy_is_told(
    mgpu_tune: Command, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    devices[:] = [Sustaining(hungry=OPTIMUM)]
    words = ("run", "toy", "--shape", "toy-1024", "--trials", 80, "--objective", "sustained", "--turn", "2s")
    done = mgpu_tune(*words)
    assert done.code == 0
    assert "165.0 us measured sustained" in done.out
    assert "0.1139 J a call, xla 0.21 J (1.845x)" in done.out
    assert "stored as measured and measured sustained in" in done.out
    assert resolution.resolve(SPEC, PROBLEM, GPU).config == OPTIMUM
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", "sustained")
    assert slope(resolution.resolve(SPEC, PROBLEM, GPU).config) == 110.0
    shown = mgpu_tune("show", "toy", "--gpu", "h200").out
    assert "measured: sustained" in shown


def test_every_sampler_stores_a_config(mgpu_tune: Command, devices: list[FakeDevice]) -> None:
    for sampler in ("tpe", "random", "brute"):
        assert mgpu_tune("run", "toy", "--shape", "toy-1024", "--sampler", sampler, "--trials", 12).code == 0
    entry = resolution.resolve(SPEC, PROBLEM, GPU)
    assert entry.source == "user"
    assert isinstance(entry.config, Config)


def test_problems_can_be_left_to_workers(mgpu_tune: Command, devices: list[FakeDevice], tmp_path: Any) -> None:
    where = str(tmp_path / "fleet.journal")
    done = mgpu_tune("run", "toy", "--suite", "toys", "--storage", where, "--queue", "--trials", 9)
    assert done.code == 0
    assert "queued 2 problems" in done.out
    assert devices[0].judged == []
    from mgpu_ops.tuning import storage
    from mgpu_ops.tuning.fleet import queue as fleet_queue

    jobs = fleet_queue.queued(storage.open_storage(where))
    assert sorted((job.name, job.trials) for job in jobs) == [("toy-1024", 9), ("toy-2048", 9)]


# --- the storage


class Lost(optuna.storages.InMemoryStorage):
    """Answers so many times that a trial begins, then never again."""

    def __init__(self, times: float):
        super().__init__()
        self.left = times

    def create_new_trial(self, *arguments: Any, **options: Any) -> int:
        self.left -= 1
        if self.left < 0:
            raise sqlalchemy.exc.OperationalError("insert", {}, OSError("no route to tuner:hunter2@db.example"))
        return super().create_new_trial(*arguments, **options)


@pytest.fixture
def shared(monkeypatch: pytest.MonkeyPatch) -> Callable[..., list[str]]:
    """Puts a stand-in in the place of a database; what was opened since."""

    def prepared(times: float = math.inf) -> list[str]:
        opened: list[str] = []
        backend = Lost(times)
        monkeypatch.setattr(storage, "open_storage", lambda where: opened.append(str(where)) or backend)
        monkeypatch.setenv(storage.VARIABLE, "postgresql://tuner:hunter2@db.example/studies")
        monkeypatch.setattr(ledger, "_PATIENCE", (0.0, 0.0))
        return opened

    return prepared


def test_a_database_is_opened_once_for_all_problems(
    mgpu_tune: Command, devices: list[FakeDevice], shared: Callable[..., list[str]]
) -> None:
    opened = shared()
    assert mgpu_tune("run", "toy", "--suite", "toys", "--trials", 6).code == 0
    assert len(opened) == 1
    assert len(devices[0].judged) == 12


def test_a_database_lost_in_the_middle_is_told_without_its_password(
    mgpu_tune: Command, devices: list[FakeDevice], shared: Callable[..., list[str]]
) -> None:
    shared(20)
    done = mgpu_tune("run", "toy", "--suite", "toys", "--trials", 12)
    assert done.code == 2
    assert "mgpu-tune: storage postgresql://tuner:***@db.example/studies: " in done.err
    assert "the same command goes on from it" in done.out
    assert "hunter2" not in done.out + done.err
    assert "Traceback" not in done.err
    assert [e.problem["size"] for e in database.read(database.user_path(GPU.key, "toy")).entries]  # of the first problem


def test_a_full_disk_under_the_journal_is_told_with_its_path(
    mgpu_tune: Command, devices: list[FakeDevice], monkeypatch: pytest.MonkeyPatch
) -> None:
    def full(self: Any, logs: Any) -> None:
        raise OSError(28, "No space left on device")

    monkeypatch.setattr(ledger, "_PATIENCE", ())
    devices[:] = [FakeDevice(lambda config: monkeypatch.setattr(JournalFileBackend, "append_logs", full) or 1.0)]
    done = mgpu_tune("run", "toy", "--shape", "toy-1024")
    assert done.code == 2
    assert f"storage {storage.journal_path(GPU.key, 'toy')}: [Errno 28] No space left" in done.err


# --- killed


SLOW = """
import os, sys, time
from mgpu_ops.core import aot
from mgpu_ops.tuning import cli, device, devices
aot.available = lambda: "not in this test"
devices.has_gpu = lambda: False
judge = device.Modelled.next
def slowly(self):
    config, outcome = judge(self)
    with open(os.environ["LOG"], "a") as log:
        print(config, file=log)
    time.sleep(float(os.environ["PAUSE"]))
    return config, outcome
device.Modelled.next = slowly
sys.exit(cli.main())
"""


def test_a_run_killed_with_9_goes_on_and_measures_nothing_twice(tmp_path: Path, own_database: Path) -> None:
    """The command in a process of its own, on a modelled GPU that takes its time; twice the same words."""
    program, journal, logs = tmp_path / "mgpu-tune", tmp_path / "studies.journal", [tmp_path / "first", tmp_path / "second"]
    program.write_text(SLOW)
    words = ["run", "matmul", "--m", "512", "--n", "512", "--k", "512", "--gpu", "h200", "--trials", "16"]
    command = [sys.executable, str(program), *words, "--storage", str(journal), "--json"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu"}
    with subprocess.Popen(command, env=environment | {"LOG": str(logs[0]), "PAUSE": "0.1"}, stdout=subprocess.DEVNULL) as first:
        deadline = time.monotonic() + 600
        while not logs[0].exists() or logs[0].read_text().count("\n") < 6:
            assert time.monotonic() < deadline
            time.sleep(0.01)
        first.kill()
    assert not own_database.exists()
    done = subprocess.run(
        command, env=environment | {"LOG": str(logs[1]), "PAUSE": "0"}, capture_output=True, text=True, timeout=600
    )
    assert done.returncode == 0, done.stderr
    (told,) = json.loads(done.stdout)["problems"]
    assert [trial["kind"] for trial in told["trials"]] == ["ok"] * 16
    before, after = (path.read_text().splitlines() for path in logs)
    assert len({json.dumps(trial["config"]) for trial in told["trials"]}) == 16
    assert not set(before[:-1]) & set(after)  # all but the one that it was at
    assert len(before[:-1]) + len(after) == 16
    assert (own_database / "h200" / "matmul.json").exists()


def test_entries_of_several_ops_go_into_files_of_a_directory(tmp_path: Path, mgpu_tune: Command) -> None:
    products = ["matmul", "gated_matmul"]
    fields = {"m": 128, "n": 256, "k": 128, "dtype": "bfloat16"}
    problems = [{"op": op, "problem": fields, "count": 1} for op in products]
    captured = {"schema": 1, "gpu": "h200", "function": "train:step", "problems": problems}
    (tmp_path / "problems.json").write_text(json.dumps(captured))
    place = tmp_path / "tuned"
    done = mgpu_tune("run", "--from", tmp_path / "problems.json", "--gpu", "h200", "--trials", 2, "--database", place)
    assert done.code == 0, done.err
    assert sorted(p.relative_to(place).as_posix() for p in place.rglob("*.json")) == [
        "h200/gated_matmul.json",
        "h200/matmul.json",
    ]
    assert [len(database.read(place / "h200" / f"{op}.json").entries) for op in products] == [1, 1]


def test_a_file_in_the_place_of_the_directory_is_refused_and_left_as_it_is(tmp_path: Path, mgpu_tune: Command) -> None:
    path = tmp_path / "tuned"
    path.write_text("a file")
    request = ("run", "matmul", "--m", 128, "--n", 256, "--k", 128, "--gpu", "h200", "--trials", 2)
    done = mgpu_tune(*request, "--database", path)
    assert done.code == 2
    assert f"{path / 'h200' / 'matmul.json'}: cannot be " in done.err
    assert path.read_text() == "a file"


# --- several GPUs


def test_each_gpu_tunes_problems_of_its_own(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [OneOfSeveral(lambda config: time.sleep(0.005) or slope(config)) for _ in range(2)]
    with machine_of(monkeypatch, *several):
        done = mgpu_tune("run", "toy", "--suite", "toys", "--workers", "all", "--trials", 12, "--json")
    assert done.code == 0, done.err
    assert "measuring on 2 GPUs: NVIDIA H200, driver 1.2" in done.err
    assert sorted(problem["name"] for problem in json.loads(done.out)["problems"]) == ["toy-1024", "toy-2048"]
    assert [len(device.judged) for device in several] == [12, 12]
    assert len(database.read(database.user_path(GPU.key, "toy")).entries) == 2


@pytest.mark.parametrize("workers", [1, 2])
def test_a_problem_that_fails_does_not_end_the_others(
    workers: int, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    class Small(OneOfSeveral):
        def open(self, spec: Any, problem: Any, seed: int) -> None:
            if problem.size == 2048:
                raise WorkerError("the worker could not prepare it: out of memory")

    several = [Small(), Small()]
    monkeypatch.setattr("mgpu_ops.tuning.devices.device_for", lambda name, gpus=1, **_: several[0])
    with machine_of(monkeypatch, *several):
        done = mgpu_tune("run", "toy", "--suite", "toys", "--workers", workers, "--trials", 6, "--json")
    assert done.code == 1
    assert "toy toy-2048: the worker could not prepare it: out of memory" in done.err
    told = {problem["name"]: problem for problem in json.loads(done.out)["problems"]}
    assert told["toy-2048"]["fault"].endswith("out of memory")
    assert told["toy-1024"]["entry"]


def test_ctrl_c_stops_all_gpus_and_stores_what_each_found(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    pressed = threading.Event()

    def judge(config: Config) -> float:
        if sum(len(device.judged) for device in several) >= 20 and not pressed.is_set():
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)
        time.sleep(0.005)
        return slope(config)

    several = [OneOfSeveral(judge) for _ in range(2)]
    with machine_of(monkeypatch, *several):
        done = mgpu_tune("run", "toy", "--suite", "toys", "--workers", 2, "--trials", 2000, "--sampler", "random", "--json")
    assert done.code == 130
    assert [problem["ended"] for problem in json.loads(done.out)["problems"]] == ["interrupted"] * 2
    assert len(database.read(database.user_path(GPU.key, "toy")).entries) == 2


@pytest.mark.parametrize("words", [("run", "toy", "--shape", "toy-1024"), ("retune", "toy")])
def test_workers_measure_and_do_not_model_another_gpu(
    words: tuple[str, ...], mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    with machine_of(monkeypatch, OneOfSeveral(), OneOfSeveral()):
        done = mgpu_tune(*words, "--workers", 2, "--gpu", "h100-sxm")
    assert done.code == 2
    assert "--gpu h100-sxm would be modelled, --workers measures on NVIDIA H200: leave one of them out" in done.err


def test_retune_takes_several_gpus_and_a_storage(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    for size in (512, 1024):
        store(size, DEFAULT)
    several = [OneOfSeveral(lambda config: time.sleep(0.005) or slope(config)) for _ in range(2)]
    words = ("retune", "toy", "--stale", "--workers", 2, "--trials", 8, "--storage", tmp_path / "studies.journal", "--json")
    with machine_of(monkeypatch, *several):
        done = mgpu_tune(*words)
    assert done.code == 0, done.err
    assert len(json.loads(done.out)["tuned"]) == 2
    assert [len(device.judged) for device in several] == [8, 8]
    assert (tmp_path / "studies.journal").exists()


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--target", "0"), "must be a number above 0, such as 0.98"),
        (("--target", "0.98", "--gpu", "h200"), "target=0.98 is a share of a baseline's speed"),
        (("--workers", "0"), "must be a whole number of at least 1"),
        (("--workers", "all"), "no NVIDIA GPU is here"),
        (("--sampler", "anneal"), "invalid choice: 'anneal'"),
        (("--queue",), "name the storage with --storage"),
        (("--queue", "--storage", "fleet.journal", "--objective", "sustained"), "--objective sustained is not for --queue"),
        (("--objective", "sustained", "--gpu", "h200"), "times that are modelled have none"),
        (("--objective", "watts"), "invalid choice: 'watts'"),
        (("--turn", "0"), "must be a finite time above 0"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(mgpu_tune: Command, words: tuple[str, ...], reason: str) -> None:
    done = mgpu_tune("run", "matmul", "--shape", "square-2048", *words)
    assert done.code == 2
    assert reason in done.err
    assert "Traceback" not in done.err
