"""Who measures which candidate: claims, results, and what a dead process leaves to others."""

from __future__ import annotations

import dataclasses
import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import optuna
import pytest

from mgpu_ops.tuning import ledger as ledgers
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.ledger import Ledger
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.storage import Identity
from tests.tuning import toy

ROOT = Path(__file__).parents[2]
IDENTITY = Identity.of(toy.SPEC, toy.PROBLEM, toy.GPU, "measured", {})
CONFIGS = [dataclasses.replace(toy.DEFAULT, a=a) for a in toy.CHOICES["a"]]
OUTCOMES = [
    Outcome("ok", 12.5, 20.0, 0.001, samples=(12.0, 12.5, 13.0)),
    Outcome("ok", 0.25),
    Outcome("compile", detail="16 bytes of registers spill"),
    Outcome("wrong", error=0.5, detail="x" * 3000),
    Outcome("timeout"),
    Outcome("crash", detail="CUDA_ERROR_ILLEGAL_ADDRESS 'quoted' \"twice\" ünïcode"),
]


@pytest.fixture(params=["memory", "journal"])
def study(request: pytest.FixtureRequest, tmp_path: Path) -> optuna.Study:
    path = tmp_path / "studies.journal"
    backend = optuna.storages.InMemoryStorage() if request.param == "memory" else storage.open_storage(path)
    return storage.open_study(backend, IDENTITY)


@pytest.mark.parametrize("outcome", OUTCOMES, ids=lambda o: o.kind)
def test_a_result_is_read_as_it_was_recorded(study: optuna.Study, outcome: Outcome) -> None:
    ledger, other = Ledger(study, toy.Config), Ledger(study, toy.Config)
    assert ledger.claim(toy.OPTIMUM, "near")
    ledger.record(toy.OPTIMUM, outcome)
    (done,) = other.new_results()
    assert (done.config, done.origin, done.outcome) == (toy.OPTIMUM, "near", outcome)
    assert done.host == os.uname().nodename
    assert other.new_results() == []


def test_a_trial_of_optuna_shows_the_time_the_choices_and_the_kind_of_failure(study: optuna.Study) -> None:
    def encode(config: toy.Config) -> Any:
        return {"a": toy.CHOICES["a"].index(config.a)}, {"a": optuna.distributions.IntDistribution(0, 7)}

    ledger = Ledger(study, toy.Config, encode)
    for config, outcome in zip(CONFIGS[1:3], (OUTCOMES[0], OUTCOMES[2])):
        assert ledger.claim(config, "search")
        ledger.record(config, outcome)
    good, bad = study.get_trials()
    assert (good.state.name, good.value, good.params) == ("COMPLETE", 12.5, {"a": 1})
    assert (bad.state.name, bad.value, bad.params) == ("PRUNED", None, {"a": 2})
    assert bad.user_attrs["config"] == dataclasses.asdict(CONFIGS[2])
    assert (bad.user_attrs["kind"], bad.user_attrs["detail"]) == ("compile", "16 bytes of registers spill")
    assert study.best_trial.number == good.number


def test_a_candidate_is_claimed_by_one(study: optuna.Study) -> None:
    ledger, other = Ledger(study, toy.Config), Ledger(study, toy.Config)
    assert ledger.claim(CONFIGS[0], "default")
    assert not ledger.claim(CONFIGS[0], "search")
    assert not other.claim(CONFIGS[0], "default")  # though it looked before the other claimed
    assert other.claim(CONFIGS[1], "model")
    assert (ledger.running(), other.running(), ledger.count()) == (1, 1, 2)
    assert other.taken(CONFIGS[0])
    ledger.record(CONFIGS[0], OUTCOMES[0])
    assert not other.claim(CONFIGS[0], "local")
    assert (ledger.running(), other.running(), ledger.count()) == (1, 0, 2)


def test_what_is_given_back_can_be_claimed_again(study: optuna.Study) -> None:
    ledger, other = Ledger(study, toy.Config), Ledger(study, toy.Config)
    assert ledger.claim(CONFIGS[0], "default")
    ledger.close()
    assert (other.count(), other.adopt()) == (0, None)
    assert other.claim(CONFIGS[0], "default")


def killed(study: optuna.Study, config: Any, *, process: str, since: float = 0.0) -> None:
    """A trial that another process claimed."""
    holder = {"process": process, "since": since, "beats": False}
    attrs = {"config": dataclasses.asdict(config), "origin": "near", "holder": holder}
    running = optuna.trial.TrialState.RUNNING
    study.add_trial(optuna.trial.create_trial(state=running, params={}, distributions={}, user_attrs=attrs))


def dead_process() -> str:
    """The name of a process of this machine that is gone."""
    with subprocess.Popen(["sleep", "60"]) as process:
        name = ledgers._process(process.pid)
        process.kill()
    return name


def test_the_candidate_of_a_dead_process_is_adopted_once(study: optuna.Study) -> None:
    killed(study, CONFIGS[3], process=dead_process())
    first, second = Ledger(study, toy.Config), Ledger(study, toy.Config)
    assert (first.waiting(), first.count(), first.running()) == (1, 0, 0)
    assert first.adopt() == (CONFIGS[3], "near")
    assert (first.adopt(), second.adopt()) == (None, None)
    assert not second.claim(CONFIGS[3], "search")
    first.record(CONFIGS[3], OUTCOMES[0])
    assert [done.outcome for done in second.new_results()] == [OUTCOMES[0]]


def test_what_one_does_not_want_is_left_to_others(study: optuna.Study) -> None:
    killed(study, CONFIGS[3], process=dead_process())
    assert Ledger(study, toy.Config).adopt(lambda config: config != CONFIGS[3]) is None
    assert Ledger(study, toy.Config).adopt(lambda config: config == CONFIGS[3]) == (CONFIGS[3], "near")


def test_a_living_process_keeps_its_candidates_however_long(study: optuna.Study) -> None:
    killed(study, CONFIGS[0], process=ledgers._process(os.getppid()), since=0.0)
    assert Ledger(study, toy.Config).adopt() is None


def test_a_candidate_of_another_machine_is_adopted_after_the_lease(
    study: optuna.Study, monkeypatch: pytest.MonkeyPatch
) -> None:
    killed(study, CONFIGS[0], process="another-boot/pid:[1]/17/17", since=1000.0)
    monkeypatch.setattr(ledgers.time, "time", lambda: 1000.0 + ledgers.LEASE - 1)
    assert Ledger(study, toy.Config).adopt() is None
    monkeypatch.setattr(ledgers.time, "time", lambda: 1000.0 + ledgers.LEASE + 1)
    assert Ledger(study, toy.Config).adopt() == (CONFIGS[0], "near")


def test_a_candidate_that_takes_down_every_process_is_left_alone_after_the_third(study: optuna.Study) -> None:
    process = dead_process()
    killed(study, CONFIGS[0], process=process)
    for _ in range(storage.RETRIES):
        ledger = Ledger(study, toy.Config)
        assert ledger.adopt() == (CONFIGS[0], "near")
        (trial_id,) = ledger._claims.values()
        study._storage.set_trial_user_attr(trial_id, "holder", {"process": process})
    last = Ledger(study, toy.Config)
    assert last.adopt() is None
    last.new_results()
    assert last.taken(CONFIGS[0])
    assert not last.claim(CONFIGS[0], "search")


def test_a_result_that_comes_after_its_process_was_given_up_is_kept(study: optuna.Study) -> None:
    ledger, other = Ledger(study, toy.Config), Ledger(study, toy.Config)
    assert ledger.claim(CONFIGS[0], "default")
    (trial_id,) = ledger._claims.values()
    study._storage.set_trial_state_values(trial_id, optuna.trial.TrialState.FAIL)
    ledger.record(CONFIGS[0], OUTCOMES[0])
    assert [done.outcome for done in other.new_results()] == [OUTCOMES[0]]
    ledger.close()


def test_trials_that_are_not_ours_are_passed_over(study: optuna.Study) -> None:
    for config in ({}, {"a": 1}, dataclasses.asdict(toy.DEFAULT) | {"a": "1"}, [1], None):
        study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs={"config": config}))
    fields = dataclasses.asdict(toy.DEFAULT)
    study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs={"config": fields, "kind": "new kind"}))
    study.add_trial(optuna.trial.create_trial(value=1.0, user_attrs={"config": fields, "kind": "crash"}))
    study.add_trial(optuna.trial.create_trial(value=1.0))
    assert Ledger(study, toy.Config).new_results() == []


def test_what_cannot_run_is_neither_believed_nor_adopted(study: optuna.Study) -> None:
    killed(study, CONFIGS[1], process=dead_process())
    ledger = Ledger(study, toy.Config)
    assert ledger.claim(CONFIGS[0], "search")
    ledger.record(CONFIGS[0], Outcome("ok", 0.001))
    strict = Ledger(study, toy.Config, legal=lambda config: config.a > 2)
    assert (strict.new_results(), strict.adopt()) == ([], None)


def test_a_database_that_does_not_answer_is_asked_again(monkeypatch: pytest.MonkeyPatch) -> None:
    import sqlalchemy.exc

    pauses: list[float] = []
    monkeypatch.setattr(ledgers.time, "sleep", pauses.append)
    answers = [sqlalchemy.exc.OperationalError("select", {}, OSError("gone"))] * 2 + [ValueError("a bug")]

    def call(word: str) -> str:
        if answers:
            raise answers.pop(0)
        return word

    with pytest.raises(ValueError, match="a bug"):
        ledgers._patiently(call, "hello")
    assert ledgers._patiently(call, "hello") == "hello"
    assert pauses == [1, 2]


MEASURE = """
import os, signal, sys
from tests.tuning import toy
from mgpu_ops.tuning import ledger, outcome, storage
identity = storage.Identity.of(toy.SPEC, toy.PROBLEM, toy.GPU, "measured", {})
study = storage.open_study(storage.open_storage(sys.argv[1]), identity)
mine = ledger.Ledger(study, toy.Config)
for a in (1, 2, 4):
    assert mine.claim(toy.Config(a, 16, 1, 8, "m"), "search")
for a in (1, 2):
    mine.record(toy.Config(a, 16, 1, 8, "m"), outcome.Outcome("ok", 10.0 * a, samples=(1.0, 2.0)))
storage._JournalLock(sys.argv[1]).acquire()  # killed in the middle of a line, with the lock held
with open(sys.argv[1], "ab") as file:
    file.write(b'{"op_code":4,"tri')
os.kill(os.getpid(), signal.SIGKILL)
"""


def test_what_a_process_killed_with_9_measured_is_there_and_what_it_was_at_is_adopted(tmp_path: Path) -> None:
    path = tmp_path / "studies.journal"
    environment = os.environ | {"PYTHONPATH": str(ROOT)}
    done = subprocess.run([sys.executable, "-c", MEASURE, str(path)], env=environment)
    assert done.returncode == -signal.SIGKILL
    ledger = Ledger(storage.open_study(storage.open_storage(path), IDENTITY), toy.Config)
    assert [(d.config.a, d.outcome.us, d.outcome.samples) for d in ledger.new_results()] == [
        (1, 10.0, (1.0, 2.0)),
        (2, 20.0, (1.0, 2.0)),
    ]
    assert ledger.adopt() == (CONFIGS[2], "search")  # at once: optuna's own lock would wait for 30 s
    assert ledger.count() == 3
    ledger.record(CONFIGS[2], Outcome("ok", 30.0))
    assert len(Ledger(storage.open_study(storage.open_storage(path), IDENTITY), toy.Config).new_results()) == 3
