"""A fleet on a real PostgreSQL, and on MariaDB where there is one: several workers, one killed with -9; and its commands."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import json
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import msgspec
import optuna
import pytest

from mgpu_ops.core import extras
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.fleet import queue as fleet_queue
from mgpu_ops.tuning.fleet.queue import Job
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.storage import StorageError, open_storage
from mgpu_ops.tuning.worker import Lost, WorkerError
from tests.tuning import toy
from tests.tuning.fleet import fleet_worker, mariadb, postgres

ROOT = Path(__file__).parents[3]
TRIALS = 16
SIZES = (256, 512)
FINISHED = (optuna.trial.TrialState.COMPLETE,)


@pytest.fixture(scope="module")
def database(request: pytest.FixtureRequest) -> Iterator[str]:
    """A PostgreSQL, unless a test asks for another."""
    if getattr(request, "param", "postgresql") == "mysql":
        if reason := mariadb.missing():
            pytest.skip(reason)
        with mariadb.server() as url:
            yield url
        return
    programs = postgres.programs()
    if programs is None:
        pytest.skip("no PostgreSQL server: neither the wheel of the dev dependencies nor the system has one that runs here")
    with postgres.server(programs) as url:
        yield url


def job(size: int, **changes: Any) -> Job:
    return Job(**({"op": "toy", "problem": {"size": size}, "name": f"toy-{size}", "trials": TRIALS} | changes))


@pytest.fixture
def start(database: str) -> Iterator[Callable[..., subprocess.Popen[str]]]:
    """Starts workers of the fleet on that database; none outlives the test."""
    with contextlib.ExitStack() as stack:

        def started(*words: str) -> subprocess.Popen[str]:
            process = stack.enter_context(_start(database, *words))
            stack.callback(process.kill)
            return process

        yield started


def _start(url: str, *words: str) -> subprocess.Popen[str]:
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", storage.VARIABLE: url}
    command = [sys.executable, "-m", "tests.tuning.fleet.fleet_worker", *words]
    pipe = subprocess.PIPE
    return subprocess.Popen(command, env=environment, cwd=ROOT, stdout=pipe, stderr=pipe, text=True)


@pytest.mark.parametrize("database", ["postgresql", "mysql"], indirect=True)
def test_workers_share_a_queue_and_one_killed_with_9_loses_nothing(
    database: str, start: Callable[..., subprocess.Popen[str]]
) -> None:
    with storage.opened(database) as backend:
        fleet_queue.enqueue(backend, [job(size) for size in SIZES])
        share(backend, start)


def share(backend: optuna.storages.BaseStorage, start: Callable[..., subprocess.Popen[str]]) -> None:
    victim = start("stuck")
    assert victim.stdout is not None
    assert victim.stdout.readline() == "stuck\n"
    workers = [start() for _ in range(2)]
    shown = b"".join(Path(f"/proc/{process.pid}/cmdline").read_bytes() for process in [victim, *workers])
    assert postgres.PASSWORD.encode() not in shown
    time.sleep(fleet_worker.GRACE + 1)  # it lives, its heart beats: nobody takes what it holds
    (shared,) = [study for study in studies(backend) if any(map(victims, study.trials))]
    held = {t.number for t in shared.trials if victims(t) and t.state.name == "RUNNING"}
    kept = [t for t in shared.trials if victims(t) and t.state.name == "COMPLETE"]
    assert (len(held), len(kept)) == (fleet_worker.SLOTS, 2)
    victim.kill()
    told = [worker.communicate(timeout=600) for worker in workers]
    assert [worker.returncode for worker in workers] == [0, 0], told
    ended = [json.loads(line) for out, _ in told for line in out.splitlines()]
    assert sorted(problem["size"] for problem, _ in ended) == list(SIZES)  # each ended by one worker
    for study in studies(backend):
        done = collections.Counter(json.dumps(t.user_attrs["config"]) for t in study.trials if t.state.name == "COMPLETE")
        assert set(done.values()) == {1}  # nothing is measured twice
        assert abs(len(done) - TRIALS) <= len(workers)  # which count and claim at the same time
        assert all(t.state.is_finished() for t in study.trials)
        assert all(t.value == toy.slope(toy.Config(**t.user_attrs["config"])) for t in study.trials if t.value)
    trials = shared.get_trials()
    assert {trials[number].state.name for number in held} == {"FAIL"}
    again = [t for t in trials if t.system_attrs.get("failed_trial") in held]  # optuna's retry
    assert [t.state.name for t in again] == ["COMPLETE"] * fleet_worker.SLOTS
    assert [trials[t.number].value for t in kept] == [t.value for t in kept]
    stored = {
        entry.problem["size"]: entry for gpu, op, entry in fleet_queue.entries(backend) if (gpu, op) == (toy.GPU.name, "toy")
    }
    assert {size: entry.config for size, entry in stored.items()} == {problem["size"]: config for problem, config in ended}
    counts = {s.user_attrs["identity"]["problem"]["size"]: len(s.get_trials(states=FINISHED)) for s in studies(backend)}
    assert {size: entry.evidence.trials for size, entry in stored.items()} == counts
    assert all(entry.evidence.median_us == toy.slope(toy.Config(**entry.config)) for entry in stored.values())
    assert not any(postgres.PASSWORD in text for out_and_err in told for text in out_and_err)


def studies(backend: optuna.storages.BaseStorage) -> list[optuna.Study]:
    names = [study.study_name for study in backend.get_all_studies() if study.study_name.startswith("toy")]
    return [optuna.load_study(study_name=name, storage=backend) for name in names]


def victims(trial: optuna.trial.FrozenTrial) -> bool:
    return str(trial.user_attrs["holder"]["process"]).startswith("another machine")


def test_a_wrong_password_is_told_without_telling_any(database: str) -> None:
    wrong = database.replace("s3cret", "wr0ng")
    with pytest.raises(
        StorageError, match=r"storage postgresql://tuner:\*\*\*@127.0.0.1:\d+/postgres: .*authentication failed"
    ):
        open_storage(wrong)


def test_the_password_may_stay_in_the_environment(database: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("PGPASSWORD", postgres.PASSWORD)
    url = database.replace(f":{postgres.PASSWORD.replace('+', '%2B')}", "")
    assert not storage.has_password(url)
    with storage.opened(url) as backend:
        backend.get_all_studies()


def test_a_proxy_serves_the_database_to_this_machine(database: str) -> None:
    port = postgres.free_port()
    environment = os.environ | {"PYTHONPATH": str(ROOT), "JAX_PLATFORMS": "cpu", storage.VARIABLE: database}
    command = [sys.executable, "-m", "mgpu_ops.tuning.cli", "proxy", "--port", str(port)]
    with subprocess.Popen(command, env=environment, stdout=subprocess.PIPE, stderr=subprocess.PIPE, text=True) as proxy:
        try:
            assert proxy.stdout is not None
            said = proxy.stdout.readline()
            assert "serving postgresql://tuner:***@127.0.0.1:" in said
            assert f"grpc://127.0.0.1:{port}; Ctrl-C ends it" in said
            identity = storage.Identity.of(toy.SPEC, toy.Problem(4096), toy.GPU, "measured", {})
            with storage.opened(f"grpc://127.0.0.1:{port}") as through, storage.opened(database) as direct:
                ours, theirs = (Ledger(storage.open_study(b, identity), toy.Config) for b in (through, direct))
                assert ours.claim(toy.OPTIMUM, "search")
                assert not theirs.claim(toy.OPTIMUM, "search")
                ours.record(toy.OPTIMUM, Outcome("ok", 100.0, samples=(99.0, 100.0, 101.0)))
                assert [done.outcome.samples for done in theirs.new_results()] == [(99.0, 100.0, 101.0)]
        finally:
            proxy.send_signal(signal.SIGINT)
        _, err = proxy.communicate(timeout=600)
    assert proxy.returncode == 130
    assert "WARNING" not in err
    assert "Traceback" not in err


# --- the queue, on a journal file


@pytest.fixture
def backend(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> optuna.storages.BaseStorage:
    monkeypatch.setattr(fleet_queue, "POLL", 0.01)
    return open_storage(tmp_path / "fleet.journal")


def worker(backend: optuna.storages.BaseStorage, **device: Any) -> fleet_queue.Worker:
    def spec_of(op: str) -> Any:
        if op != "toy":
            raise ValueError(f"op {op!r} is not one of toy")
        return toy.SPEC

    return fleet_queue.Worker(backend, toy.FakeDevice(final=fleet_worker.toy_final, **device), spec_of)


def test_a_job_queued_twice_is_one_and_when_done_is_tuned_anew(backend: optuna.storages.BaseStorage) -> None:
    fleet_queue.enqueue(backend, [job(512)])
    fleet_queue.enqueue(backend, [job(512, trials=6), job(1024, trials=6)])
    assert [(j.problem["size"], j.trials, j.number) for j in fleet_queue.queued(backend)] == [(512, 6, 1), (1024, 6, 1)]
    assert [ended.trials for ended in worker(backend).work()] == [6, 6]
    assert list(worker(backend).work()) == []
    fleet_queue.enqueue(backend, [job(512, trials=8)])
    assert [(ended.job.number, ended.trials) for ended in worker(backend).work()] == [(2, 8)]
    assert [entry.evidence.trials for _, _, entry in fleet_queue.entries(backend)] == [6, 6, 8]


def test_every_kind_of_gpu_and_toolchain_tunes_a_job_for_itself(backend: optuna.storages.BaseStorage) -> None:
    fleet_queue.enqueue(backend, [job(512, trials=4), job(1024, trials=4, gpu="h100-sxm")])
    first, other = worker(backend), worker(backend)
    other._device.versions = {**first._device.versions, "driver": "another"}
    for here in (first, other):
        assert [ended.job.problem["size"] for ended in here.work()] == [512]
    assert len(studies(backend)) == 2


def test_what_a_worker_cannot_do_is_said_once_and_left_to_others(backend: optuna.storages.BaseStorage) -> None:
    said: list[str] = []
    fleet_queue.enqueue(backend, [job(511), job(512, op="newer"), job(512, trials=4)])
    here = worker(backend)
    here._say = said.append
    assert len(list(here.work())) == 1
    assert [text.split(": ")[0] for text in said] == [
        "toy toy-511 is left to other workers",
        "newer toy-512 is left to other workers",
    ]
    assert "size is odd: pad it" in said[0]


@pytest.mark.parametrize(
    ("changes", "device", "reason"),
    [
        ({"sampler": "gp"}, {}, "sampler 'gp' needs scipy and torch: run `pip install"),
        ({"target": 1.1}, {"kind": "modelled"}, "a target is a share of a baseline's speed, and modelled times have none"),
        ({"seed": -1}, {}, "seed -1 must be a whole number from 0 to"),
        ({"trials": 0}, {}, "trials 0 must be at least 1"),
        ({"sampler": "anneal"}, {}, "sampler 'anneal' is not one of tpe"),
        ({"budget": -1.0}, {}, "budget -1.0 must be a number above 0"),
    ],
)
def test_a_job_that_this_worker_cannot_do_keeps_it_from_no_other(
    changes: dict[str, Any],
    device: dict[str, Any],
    reason: str,
    backend: optuna.storages.BaseStorage,
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    said: list[str] = []
    hard = job(256, **changes)
    fleet_queue._fleet(backend).set_user_attr(hard.key, msgspec.to_builtins(hard))  # as an earlier version may have queued it
    fleet_queue.enqueue(backend, [job(512, trials=4)])
    here = worker(backend, **device)
    here._say = said.append
    with monkeypatch.context() as patch:
        patch.setattr(extras, "installed", lambda module: False)
        assert [ended.job.problem["size"] for ended in here.work()] == [512]
    (line,) = said
    assert line.startswith(f"toy toy-256 is left to other workers: {reason}")
    if "target" in changes:
        assert 256 in [ended.job.problem["size"] for ended in worker(backend).work()]


@pytest.mark.parametrize("error", [ValueError("not here"), WorkerError("the worker could not prepare it")])
def test_a_job_that_fails_only_when_it_is_tried_is_left_too(
    error: Exception, backend: optuna.storages.BaseStorage, monkeypatch: pytest.MonkeyPatch
) -> None:
    def open_(spec: Any, problem: Any, seed: int) -> None:
        if problem.size == 256:
            raise error

    said: list[str] = []
    fleet_queue.enqueue(backend, [job(256, trials=4), job(512, trials=4)])
    here = worker(backend)
    here._say = said.append
    monkeypatch.setattr(here._device, "open", open_)
    assert [ended.job.problem["size"] for ended in here.work()] == [512]
    assert said == [f"toy toy-256 is left to other workers: {error}"]
    assert [ended.job.problem["size"] for ended in worker(backend).work()] == [256]


def test_a_gpu_that_is_lost_ends_its_worker(backend: optuna.storages.BaseStorage, monkeypatch: pytest.MonkeyPatch) -> None:
    def open_(spec: Any, problem: Any, seed: int) -> None:
        raise Lost("gone")

    fleet_queue.enqueue(backend, [job(256)])
    here = worker(backend)
    monkeypatch.setattr(here._device, "open", open_)
    with pytest.raises(Lost):
        list(here.work())


def test_what_no_worker_could_do_is_not_queued(backend: optuna.storages.BaseStorage) -> None:
    with pytest.raises(ValueError, match="toy toy-512 cannot be queued: seed -1 must be a whole number"):
        fleet_queue.enqueue(backend, [job(256), job(512, seed=-1)])
    assert fleet_queue.queued(backend) == []


def test_a_job_of_which_no_candidate_works_is_done_too(backend: optuna.storages.BaseStorage) -> None:
    fleet_queue.enqueue(backend, [job(512, trials=4)])
    here = worker(backend, judgement=lambda config: Outcome("crash", detail="always"))
    (ended,) = here.work()
    assert (ended.entry, ended.reason) == (None, "no candidate worked")
    assert list(fleet_queue.entries(backend)) == []
    assert list(worker(backend).work()) == []


def test_the_end_that_a_dead_worker_owed_is_brought_by_another(backend: optuna.storages.BaseStorage) -> None:
    class Killed(BaseException):
        pass

    def die(config: Any) -> Any:
        raise Killed

    fleet_queue.enqueue(backend, [job(512, trials=4)])
    dying = worker(backend)
    dying._device.final = die
    generator = dying.work()
    with pytest.raises(Killed):
        next(generator)
    assert [ended.trials for ended in worker(backend).work()] == [4]


def test_ctrl_c_gives_back_what_is_under_way(backend: optuna.storages.BaseStorage) -> None:
    judged: list[Any] = []

    def judge(config: Any) -> Any:
        judged.append(config)
        return KeyboardInterrupt() if len(judged) == 5 else toy.slope(config)

    fleet_queue.enqueue(backend, [job(512, trials=12)])
    with pytest.raises(KeyboardInterrupt):
        list(worker(backend, judgement=judge).work())
    (study,) = studies(backend)
    assert collections.Counter(t.state.name for t in study.trials) == {"COMPLETE": 4, "FAIL": 8}
    (ended,) = worker(backend).work()
    assert ended.trials == 12


def test_what_lies_in_the_queue_and_is_no_job_is_passed_over(backend: optuna.storages.BaseStorage) -> None:
    good = fleet_queue.enqueue(backend, [job(512)])
    queue = fleet_queue._fleet(backend)
    for key, value in {"job 1": {}, "job 2": 7, "other": "x", "job 3": {"op": "toy", "more": 1}}.items():
        queue.set_user_attr(key, value)
    assert fleet_queue.queued(backend) == good
    broken = optuna.create_study(storage=backend, study_name="toy broken")
    broken.set_user_attr("done", {"entry": {"problem": {}}})
    storage.finish(optuna.create_study(storage=backend, study_name="toy nameless"), None)
    assert list(fleet_queue.entries(backend)) == []


# --- the commands

Command = Callable[..., Any]


@pytest.mark.parametrize("name", ["worker", "proxy", "dashboard"])
def test_every_command_has_a_help_with_examples(name: str, mgpu_tune: Command) -> None:
    done = mgpu_tune(name, "--help")
    assert (done.code, done.err) == (0, "")
    assert f"examples:\n  mgpu-tune {name}" in done.out


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("worker",), "name the storage with --storage, or $MGPU_OPS_STORAGE"),
        (("worker", "--storage", "postgresql://u:hunter2@h/d"), "put the URL into $MGPU_OPS_STORAGE"),
        (("proxy", "--storage", "postgresql://u:hunter2@h/d"), "has a password, which the list of processes shows"),
        (("dashboard", "--storage", "postgresql://u:hunter2@h/d"), "has a password"),
        (("worker", "--storage", "sqlite:///x"), "sqlite:///x is no storage: name a journal file"),
        (("worker", "--storage", "x.journal", "--op", "softmax"), "op 'softmax' is not one of"),
        (("proxy", "--storage", "x.journal"), "a proxy serves a database, not x.journal"),
        (("proxy", "--storage", "postgresql://h/d", "--port", "0"), "'0' must be a whole number from 1 to 65535"),
        (("dashboard",), "name an op, whose journal of this machine is opened"),
        (("dashboard", "matmul", "--gpu", "h200"), "no measured trials of matmul are kept on this machine for that GPU"),
        (("dashboard", "--storage", "no.journal"), "no.journal: there is no such journal: name the storage with --storage"),
    ],
)
def test_what_is_asked_wrongly_is_told_with_the_way_out(
    words: tuple[str, ...], message: str, mgpu_tune: Command, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setenv("MGPU_OPS_STATE_DIR", str(tmp_path))
    done = mgpu_tune(*words)
    assert done.code == 2
    assert message in done.err
    assert "hunter2" not in done.err + done.out
    assert not Path("no.journal").exists()


@pytest.mark.parametrize("words", ["run matmul --m 512 --n 512 --k 512 --gpu h200 --queue", "worker --gpu h200"])
@pytest.mark.parametrize("content", ["hello", '{"schema": 1, "gpu": "h200", "op": "matmul", "entries": []}', "{\n"])
def test_a_file_that_is_no_journal_is_neither_queued_into_nor_wiped(
    words: str, content: str, mgpu_tune: Command, tmp_path: Path
) -> None:
    path = tmp_path / "some.json"
    path.write_text(content)
    done = mgpu_tune(*words.split(), "--storage", path)
    assert done.code == 2
    assert f"{path} is no journal of optuna, or is corrupt" in done.err
    assert path.read_text() == content


@pytest.mark.parametrize("command", ["proxy", "dashboard"])
def test_servers_stay_on_loopback_unless_told_otherwise_and_then_warn(
    command: str, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import optuna_dashboard

    served: list[tuple[str, int]] = []

    def serve(backend: Any, host: str, port: int) -> None:
        served.append((host, port))

    monkeypatch.setattr(optuna_dashboard, "run_server", serve)
    monkeypatch.setattr(optuna.storages, "run_grpc_proxy_server", serve)
    monkeypatch.setattr(storage, "open_storage", lambda where: optuna.storages.InMemoryStorage())
    monkeypatch.setenv(storage.VARIABLE, "postgresql://u:hunter2@h/d")
    quiet, loud = mgpu_tune(command), mgpu_tune(command, "--host", "0.0.0.0", "--port", 9000, "--json")
    assert (quiet.code, loud.code) == (0, 0)
    assert [host for host, _ in served] == ["127.0.0.1", "0.0.0.0"]
    assert quiet.err == ""
    assert "WARNING" in loud.err
    assert "listens on 0.0.0.0:9000, beyond this machine. It has no password" in loud.err
    told = json.loads(loud.out)
    assert told["storage"] == "postgresql://u:***@h/d"
    assert "://0.0.0.0:9000" in told["url"]
    assert "hunter2" not in quiet.out + loud.out + loud.err


def test_the_dashboard_opens_on_a_journal(tmp_path: Path) -> None:
    """Its own web server, in this process: the studies and the trials of a journal are what a browser asks it for."""
    from optuna_dashboard import wsgi

    backend = open_storage(tmp_path / "studies.journal")
    fleet_queue.enqueue(backend, [job(512, trials=4)])
    list(worker(backend).work())
    app = wsgi(open_storage(tmp_path / "studies.journal"))

    def get(path: str) -> Any:
        environment: dict[str, Any] = {"REQUEST_METHOD": "GET", "PATH_INFO": path, "wsgi.errors": sys.stderr}
        status: list[str] = []
        body = b"".join(app(environment | {"SERVER_NAME": "x", "SERVER_PORT": "1"}, lambda s, h, e=None: status.append(s)))
        assert status == ["200 OK"], body
        return json.loads(body)

    (shown,) = [study for study in get("/api/studies")["study_summaries"] if study["study_name"].startswith("toy")]
    trials = get(f"/api/studies/{shown['study_id']}")["trials"]
    assert [trial["state"] for trial in trials] == ["Complete"] * 4
    assert any(param["name"] == "a" for param in trials[0]["params"])


def test_the_worker_command_stores_what_it_tuned(tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    from mgpu_ops import spec_of
    from mgpu_ops.registry import database as databases

    problem = spec_of("matmul").Problem(512, 512, 512)
    where = tmp_path / "fleet.journal"
    queued = Job("matmul", dataclasses.asdict(problem), "512x512x512", 6)
    fleet_queue.enqueue(open_storage(where), [queued])
    assert mgpu_tune("worker", "--storage", where, "--op", "flash_attention", "--gpu", "h200").code == 0
    done = mgpu_tune("worker", "--storage", where, "--gpu", "h200")
    assert (done.code, done.err) == (0, "")
    assert "matmul 512x512x512: best of 6, measured by 1 host: " in done.out
    (entry,) = databases.read(databases.user_path("h200", "matmul"), gpu_key="h200", op="matmul").entries
    assert (entry.evidence.kind, entry.evidence.trials) == ("modelled", 6)
    fleet_queue.enqueue(open_storage(where), [queued])
    monkeypatch.setenv(storage.VARIABLE, str(where))
    done = mgpu_tune("worker", "--gpu", "h200", "--json")
    (told,) = json.loads(done.out)["ended"]
    assert (told["op"], told["trials"], told["config"]) == ("matmul", 6, entry.config)


SIDES = ("--m", 512, "--n", 512, "--k", 512)


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("matmul", *SIDES, "--database", "a.json"), "--database is the workers' to say, not of --queue: leave it out"),
        (("matmul", *SIDES, "--workers", "all"), "--workers is the workers' to say"),
        (("matmul", *SIDES[:-1], 100), "matmul 512x512x100 bfloat16 nn cannot be tuned: k=100 needs 16-byte rows"),
        (("matmul", *SIDES, "--gpu", "b200"), "cannot be tuned: NVIDIA B200 is not a Hopper GPU"),
        (("matmul", *SIDES, "--gpu", "v100"), "gpu='v100' is not a GPU in the table"),
    ],
)
def test_a_queue_refuses_what_no_worker_could_do(
    words: tuple[Any, ...], message: str, mgpu_tune: Command, tmp_path: Path
) -> None:
    where = tmp_path / "fleet.journal"
    done = mgpu_tune("run", *words, "--queue", "--storage", where)
    assert done.code == 2
    assert message in done.err
    assert not where.exists()


def test_brute_is_queued_for_every_config_unless_told_otherwise(mgpu_tune: Command, tmp_path: Path) -> None:
    where = tmp_path / "fleet.journal"
    assert mgpu_tune("run", "matmul", *SIDES, "--sampler", "brute", "--queue", "--storage", where).code == 0
    (queued,) = fleet_queue.queued(open_storage(where))
    assert queued.trials == 2**31


def test_a_worker_that_writes_one_file_takes_the_jobs_of_its_op_alone(mgpu_tune: Command, tmp_path: Path) -> None:
    where, path = tmp_path / "fleet.journal", tmp_path / "tuned.json"
    mgpu_tune("run", "matmul", *SIDES, "--trials", 2, "--queue", "--storage", where)
    mgpu_tune("run", "ragged_contraction", *SIDES, "--groups", 2, "--trials", 2, "--queue", "--storage", where)
    words = ("worker", "--storage", where, "--gpu", "h200", "--database", path)
    refused = mgpu_tune(*words)
    assert (refused.code, refused.err) == (2, f"mgpu-tune: --database {path} is a file of one op: name that with --op\n")
    assert mgpu_tune(*words, "--op", "matmul").code == 0
    done = mgpu_tune(*words)  # the file says which
    assert (done.code, "0 problems ended here" in done.out) == (0, True)


@pytest.mark.parametrize("shared", ["journal", "database"])
def test_several_gpus_of_one_machine_share_a_queue(
    shared: str, request: pytest.FixtureRequest, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(fleet_queue, "POLL", 0.01)
    where = str(tmp_path / "fleet.journal") if shared == "journal" else request.getfixturevalue("database")
    monkeypatch.setenv(storage.VARIABLE, where)
    sizes = [1 << 14, 1 << 15]  # no other test's
    with storage.opened(where) as backend:
        fleet_queue.enqueue(backend, [job(size) for size in (*sizes, 511)])
    several = [toy.OneOfSeveral(slowly, fleet_worker.toy_final) for _ in range(2)]
    with toy.machine_of(monkeypatch, *several):
        done = mgpu_tune("worker", "--workers", "all", "--json")
    assert done.code == 0, done.err
    assert set(sizes) <= {ended["problem"]["size"] for ended in json.loads(done.out)["ended"]}
    assert done.err.count("toy toy-511 is left to other workers: ") == 1
    assert all(device.judged for device in several)
    with storage.opened(where) as backend:
        found = [s for s in studies(backend) if s.user_attrs["identity"]["problem"]["size"] in sizes]
        assert len(found) == 2
        for study in found:
            ok = [t for t in study.trials if t.state.name == "COMPLETE"]
            assert len({json.dumps(t.user_attrs["config"]) for t in ok}) == len(ok)  # nothing is measured twice


def slowly(config: toy.Config) -> float:
    time.sleep(0.01)
    return toy.slope(config)


def test_ctrl_c_ends_workers_that_wait_for_jobs(tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch) -> None:
    several = [toy.OneOfSeveral() for _ in range(2)]
    with toy.machine_of(monkeypatch, *several):
        timer = threading.Timer(1.0, os.kill, (os.getpid(), signal.SIGINT))
        timer.start()
        done = mgpu_tune("worker", "--storage", tmp_path / "fleet.journal", "--workers", 2, "--wait", "1h", "--json")
        timer.join()
    assert (done.code, json.loads(done.out)) == (130, {"ended": []})


def tuned(backend: optuna.storages.BaseStorage, *sizes: int, slower: float = 1.0) -> None:
    fleet_queue.enqueue(backend, [job(size, trials=4) for size in sizes])
    here = worker(backend)
    here._device.final = lambda config: [slower * toy.slope(config)]  # type: ignore[attr-defined]
    assert len(list(here.work())) == len(sizes)


def test_one_command_writes_what_a_fleet_tuned_into_databases(
    backend: optuna.storages.BaseStorage, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    import mgpu_ops
    from mgpu_ops.registry import database as databases

    where = tmp_path / "fleet.journal"
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", toy.SPEC)
    assert "nothing is tuned" in mgpu_tune("merge", "--storage", where, "--into", tmp_path / "none").out
    tuned(backend, 512)
    tuned(backend, 512, 1024, slower=2.0)  # 512 again, and slower
    monkeypatch.setenv(storage.VARIABLE, str(where))
    done = mgpu_tune("merge", "--storage")
    assert (done.code, done.err) == (0, "")
    assert "1 conflict, 0 left out" in done.out
    entries = databases.read(databases.user_path("h200", "toy"), gpu_key="h200", op="toy").entries
    assert [e.problem["size"] for e in entries] == [512, 1024]
    assert 2 * entries[0].evidence.median_us == entries[1].evidence.median_us
    for words in (("merge", "--storage", "--into"), ("export", "toy", "--own", "--storage", where, "--output")):
        done = mgpu_tune(*words, tmp_path / words[0], "--json")
        assert done.code == 0, done.err
        assert databases.read(tmp_path / words[0] / "h200" / "toy.json").entries == entries
    before = where.read_bytes()
    assert mgpu_tune("merge", "--storage", "--into", tmp_path / "more").code == 0
    assert where.read_bytes() == before


def test_what_this_version_does_not_know_stays_in_the_storage(
    backend: optuna.storages.BaseStorage, tmp_path: Path, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """An op that it does not have, a GPU that it does not know, a config that cannot run."""
    import mgpu_ops

    tuned(backend, 512)
    words = ("merge", "--storage", tmp_path / "fleet.journal", "--into", tmp_path / "all")
    done = mgpu_tune(*words)
    assert "left out: op 'toy' is not one of matmul" in done.out
    strict = dataclasses.replace(toy.SPEC, check=lambda problem, config, gpu: "it cannot run")
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", strict)
    done = mgpu_tune(*words)
    assert done.code == 1
    assert "it cannot run" in done.out
    (study,) = studies(backend)
    study.set_user_attr("identity", study.user_attrs["identity"] | {"gpu": "NVIDIA X1"})
    assert "left out: gpu='NVIDIA X1' is not a GPU in the table" in mgpu_tune(*words).out


def test_a_database_lost_in_the_middle_of_a_run_keeps_what_was_measured(
    database: str, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    """It sends its clients away and takes no new ones; then it is back."""
    import mgpu_ops
    from mgpu_ops.tuning import ledger

    def judge(config: toy.Config) -> float:
        if len(first.judged) == 6:
            open_to_clients(database, False)
        return toy.slope(config)

    first, second = toy.FakeDevice(judge), toy.FakeDevice()
    devices = [first, second]
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", toy.SPEC)
    monkeypatch.setattr("mgpu_ops.tuning.devices.device_for", lambda name, gpus=1, **_: devices.pop(0))
    monkeypatch.setattr(ledger, "_PATIENCE", (0.1, 0.1))
    monkeypatch.setenv(storage.VARIABLE, database)
    try:
        lost = mgpu_tune("run", "toy", "--shape", "toy-1024", "--trials", 20)
    finally:
        open_to_clients(database, True)
    assert lost.code == 2
    assert "mgpu-tune: storage postgresql://tuner:***@127.0.0.1:" in lost.err
    assert "not currently accepting connections" in lost.err
    assert "Traceback" not in lost.err
    assert "s3cret" not in lost.out + lost.err
    again = mgpu_tune("run", "toy", "--shape", "toy-1024", "--trials", 20, "--json")
    assert again.code == 0, again.err
    assert not set(first.judged[:5]) & set(second.judged)
    (told,) = json.loads(again.out)["problems"]
    assert [toy.Config(**trial["config"]) for trial in told["trials"][:5]] == first.judged[:5]


def open_to_clients(url: str, allowed: bool) -> None:
    import psycopg

    with psycopg.connect(url.rpartition("/")[0] + "/template1", autocommit=True) as connection:
        connection.execute(f"ALTER DATABASE postgres ALLOW_CONNECTIONS {'true' if allowed else 'false'}".encode())
        if not allowed:
            connection.execute("SELECT pg_terminate_backend(pid) FROM pg_stat_activity WHERE datname = 'postgres'")
