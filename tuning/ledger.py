"""The candidates of one problem in an optuna study: which process measures which, and with what result.

The study may be in memory, in a journal file that a killed tuner resumes from, or shared by the workers of a fleet. A candidate
is a trial: RUNNING while a process measures it, then COMPLETE with its time or PRUNED with its kind of failure (the state that
samplers learn from). FAIL is a candidate without a result: its process died or gave it back.

Two processes that claim one candidate at the same time both see both claims. The claim with the lower number is valid: no lock
is needed.
"""

from __future__ import annotations

import contextlib
import copy
import dataclasses
import functools
import math
import os
import socket
import threading
import time
import warnings
from collections.abc import Callable
from typing import Any

import msgspec
import optuna
from optuna.trial import FrozenTrial, TrialState

from mgpu_ops.registry.spec import Record
from mgpu_ops.tuning import storage
from mgpu_ops.tuning.outcome import Outcome

LEASE = 600.0  # seconds; a claim this old is a dead process's, where the storage knows no heartbeat
_PATIENCE = (1, 2, 4, 8)  # seconds between tries at a database that does not answer
_FINISHED = (TrialState.COMPLETE, TrialState.PRUNED)

Encoded = tuple[dict[str, Any], dict[str, Any]]  # params and distributions, as optuna's create_trial takes them


@dataclasses.dataclass(frozen=True)
class FinishedTrial[C]:
    """A candidate that somebody has measured."""

    config: C
    origin: str
    outcome: Outcome
    host: str


class Ledger[C: Record]:
    """Claims and results of configs in a study; one object a process and study. Not to be shared by threads."""

    def __init__(
        self,
        study: optuna.Study,
        Config: type[C],
        encode: Callable[[C], Encoded] = lambda config: ({}, {}),
        legal: Callable[[C], bool] = lambda config: True,
    ):
        """`encode` gives the params and distributions under which optuna and its dashboard know a `Config`.

        What is not `legal` does not count, whoever wrote it: a study is no more trusted than a database file.
        """
        self.study = study
        self._Config, self._encode, self._legal = Config, encode, legal
        self._storage = study._storage  # a study has no public way to write a whole trial that runs
        self._study_id = study._study_id
        self._claims: dict[C, int] = {}  # config -> id of its trial
        self._configs: dict[int, C | None] = {}  # what the trials' configs are, by number: they never change
        self._seen: set[int] = set()
        self._retired = -math.inf
        self._away = False  # the storage, however long it was asked
        self._pulse = _Pulse(self._storage)
        self._refresh()

    # --- what there is

    def new_results(self) -> list[FinishedTrial[C]]:
        """What was finished since the last call, by whomever: at first everything that the study holds."""
        fresh = [t for t in self._refresh() if t.number not in self._seen and t.state in _FINISHED]
        self._seen.update(trial.number for trial in fresh)
        return [finished for trial in fresh if (finished := self._finished(trial)) is not None]

    def taken(self, config: C) -> bool:
        """Whether a config was measured, is being measured by somebody, or took down its process again and again.

        As of the last call of another method: this one and `count` do not ask the storage.
        """
        return config in self._holders

    def holds(self, config: C) -> bool:
        """Whether this process claimed a config and has not recorded it yet."""
        return config in self._claims

    def count(self) -> int:
        """Candidates that are finished or being measured; what a dead process left is counted once it is taken over.

        Processes count and claim at the same time: a fleet may measure a few more or fewer than it was told.
        """
        return sum(trial.state == TrialState.RUNNING or trial.state in _FINISHED for trial in self._trials)

    def running(self) -> int:
        """Candidates that other processes are measuring."""
        mine = self._claims.values()
        return sum(t.state == TrialState.RUNNING and t._trial_id not in mine for t in self._refresh())

    def unfinished(self) -> int:
        """Candidates that other processes are measuring, or left when they died."""
        mine, open_ = self._claims.values(), (TrialState.RUNNING, TrialState.WAITING)
        return sum(t.state in open_ and t._trial_id not in mine for t in self._refresh())

    def waiting(self) -> int:
        """Candidates that dead processes left, and nobody has taken over yet."""
        self._retire()
        return sum(trial.state == TrialState.WAITING for trial in self._trials)

    # --- claims

    def claim(self, config: C, origin: str) -> bool:
        """Takes a candidate; False where another process was first: take another, it will be in `new_results`."""
        if self.taken(config):
            return False
        params, distributions = self._encode(config)
        trial = optuna.trial.create_trial(
            state=TrialState.RUNNING,
            params=params,
            distributions=distributions,
            user_attrs={"config": dataclasses.asdict(config), "origin": origin} | self._me(),
        )
        trial_id = self._call(self._storage.create_new_trial, self._study_id, trial)
        self._hold(config, trial_id)
        self._refresh()
        if self._holders[config]._trial_id != trial_id:
            self._end(config, TrialState.FAIL)
            return False
        return True

    def adopt(self, wanted: Callable[[C], bool] = lambda config: True) -> tuple[C, str] | None:
        """A candidate that a dead process left, and its origin: claimed, and to be measured before any new one."""
        self._retire()
        for trial in self._trials:
            config = self._config(trial)
            if trial.state != TrialState.WAITING or (config is not None and not wanted(config)):
                continue
            if not self._set_state(trial, TrialState.RUNNING):
                continue
            if config is None or self._holders[config].number != trial.number:  # measured after all
                self._set_state(trial, TrialState.FAIL)
                continue
            for key, value in self._me().items():
                self._call(self._storage.set_trial_user_attr, trial._trial_id, key, value)
            self._hold(config, trial._trial_id)
            self._refresh()
            return config, str(trial.user_attrs.get("origin", "search"))
        return None

    def record(self, config: C, outcome: Outcome) -> None:
        """Ends a claim with what came of it. It is kept even where this process was taken for dead meanwhile."""
        state = TrialState.COMPLETE if outcome.kind == "ok" else TrialState.PRUNED
        fields = {k: v for k, v in dataclasses.asdict(outcome).items() if v not in (None, "", ()) and k != "us"}
        trial_id = self._claims[config]
        try:
            for key, value in fields.items():
                self._call(self._storage.set_trial_user_attr, trial_id, key, value)
            self._end(config, state, outcome.us)
        except optuna.exceptions.UpdateFinishedTrialError:
            self._drop(config)
            params, distributions = self._encode(config)
            attrs = {"config": dataclasses.asdict(config), "origin": "late"} | self._me() | fields
            late = optuna.trial.create_trial(
                state=state,
                value=outcome.us if outcome.kind == "ok" else None,
                params=params,
                distributions=distributions,
                user_attrs=attrs,
            )
            self._call(self._storage.create_new_trial, self._study_id, late)

    def close(self) -> None:
        """Gives back what was claimed and not finished, for others to measure. Where the storage is gone, they find out."""
        try:
            for config in [] if self._away else list(self._claims):
                with contextlib.suppress(optuna.exceptions.UpdateFinishedTrialError):
                    self._end(config, TrialState.FAIL)
        finally:
            self._pulse.close()

    # --- within

    def _call(self, call: Callable[..., Any], *arguments: Any) -> Any:
        try:
            return _patiently(call, *arguments)
        except (optuna.exceptions.UpdateFinishedTrialError, KeyError):
            raise
        except Exception as error:
            self._away = storage.of_storage(error)
            raise

    def _refresh(self) -> list[FrozenTrial]:
        """All trials as they are now; and from them who holds which config: the first trial of it that did not fail."""
        self._trials: list[FrozenTrial] = list(self._call(self._storage.get_all_trials, self._study_id, False))
        self._holders: dict[C, FrozenTrial] = {}
        for trial in self._trials:
            retries = trial.system_attrs.get("retry_history")
            given_up = isinstance(retries, list) and len(retries) >= storage.RETRIES
            if (trial.state != TrialState.FAIL or given_up) and (config := self._config(trial)) is not None:
                self._holders.setdefault(config, trial)
        return self._trials

    def _config(self, trial: FrozenTrial) -> C | None:
        """None for what is not ours: another program's trial, or another version's."""
        if trial.number not in self._configs:
            fields = trial.user_attrs.get("config")
            names = {field.name for field in dataclasses.fields(self._Config)}
            try:
                config = msgspec.convert(fields, self._Config) if isinstance(fields, dict) and names == fields.keys() else None
            except (msgspec.ValidationError, ValueError):  # text that is not Unicode
                config = None
            self._configs[trial.number] = config if config is not None and self._legal(config) else None
        return self._configs[trial.number]

    def _finished(self, trial: FrozenTrial) -> FinishedTrial[C] | None:
        config, attrs = self._config(trial), trial.user_attrs
        try:
            us = (trial.values or [None])[0]  # `value` raises where another program's study has several
            outcome = msgspec.convert({"kind": "ok", **attrs, "us": us}, Outcome)
        except (msgspec.ValidationError, ValueError):  # text that is not Unicode
            return None
        if config is None or (outcome.kind == "ok") != (trial.state == TrialState.COMPLETE):
            return None
        return FinishedTrial(config, str(attrs.get("origin", "search")), outcome, str(attrs.get("host", "?")))

    def _me(self) -> dict[str, Any]:
        holder = {"process": _process(os.getpid()), "since": time.time(), "beats": self._pulse.interval is not None}
        return {"host": socket.gethostname(), "holder": holder}

    def _hold(self, config: C, trial_id: int) -> None:
        self._claims[config] = trial_id
        self._call(self._pulse.start, trial_id)

    def _drop(self, config: C) -> None:
        self._pulse.stop(self._claims.pop(config))

    def _end(self, config: C, state: TrialState, us: float | None = None) -> None:
        values = [us] if state == TrialState.COMPLETE and us is not None else None
        self._call(self._storage.set_trial_state_values, self._claims[config], state, values)
        self._drop(config)

    def _set_state(self, trial: FrozenTrial, state: TrialState) -> bool:
        """False where another process was first."""
        try:
            return bool(self._call(self._storage.set_trial_state_values, trial._trial_id, state))
        except optuna.exceptions.UpdateFinishedTrialError:
            return False

    def _retire(self) -> None:
        """Puts what dead processes were measuring up for others, at most as often as there are heartbeats."""
        if time.monotonic() - self._retired < (self._pulse.interval or 1.0):
            return
        self._retired = time.monotonic()
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", optuna.exceptions.ExperimentalWarning)
            self._call(optuna.storages.fail_stale_trials, self.study)
            for trial in self._refresh():
                if trial.state == TrialState.RUNNING and _dead(trial) and self._set_state(trial, TrialState.FAIL):
                    # which appends to the trial's own list of retries
                    optuna.storages.RetryHeartbeatStaleTrialCallback(storage.RETRIES)(self.study, copy.deepcopy(trial))
            self._refresh()


class _Pulse:
    """Signs of life for trials, from a thread, where the storage takes them."""

    def __init__(self, backend: Any):
        enabled = hasattr(backend, "record_heartbeat")
        self.interval: float | None = backend.get_heartbeat_interval() if enabled else None
        self._backend = backend
        self._trials: set[int] = set()
        self._stop = threading.Event()
        self._thread: threading.Thread | None = None

    def start(self, trial_id: int) -> None:
        if self.interval is None:
            return
        self._backend.record_heartbeat(trial_id)  # at once: a trial without any is never found to be dead
        self._trials.add(trial_id)
        if self._thread is None:
            self._thread = threading.Thread(target=self._beat, name="heartbeat", daemon=True)
            self._thread.start()

    def stop(self, trial_id: int) -> None:
        self._trials.discard(trial_id)

    def close(self) -> None:
        self._stop.set()
        if self._thread is not None:
            self._thread.join()

    def _beat(self) -> None:
        while not self._stop.wait(self.interval):
            for trial_id in list(self._trials):
                try:
                    self._backend.record_heartbeat(trial_id)
                except Exception:  # the database is away: the next beat may reach it, and `record` will tell if not
                    break


def _patiently(call: Callable[..., Any], *arguments: Any) -> Any:
    """Calls a storage, again where it does not answer: nothing that was measured is lost to a database's restart."""
    for pause in (*_PATIENCE, None):
        try:
            return call(*arguments)
        except (optuna.exceptions.UpdateFinishedTrialError, KeyError):
            raise
        except Exception as error:
            if pause is None or not storage.of_storage(error):
                raise
            time.sleep(pause)
    raise AssertionError("unreachable")


def _dead(trial: FrozenTrial) -> bool:
    """Whether the process that measures a trial is gone: one of this machine is looked up, others go by heartbeat or age."""
    holder = trial.user_attrs.get("holder")
    if not isinstance(holder, dict):
        return False  # not a claim of ours
    alive = _alive(str(holder.get("process")))
    if alive is not None or holder.get("beats"):
        return alive is False
    since = holder.get("since")
    return isinstance(since, int | float) and time.time() - since > LEASE


@functools.cache
def _machine() -> str:
    """This boot of this machine, and this container of it: where a process number means one process."""
    with open("/proc/sys/kernel/random/boot_id") as file:
        return f"{file.read().strip()}/{os.readlink('/proc/self/ns/pid')}"


def _process(pid: int) -> str:
    """A process for good: numbers are used again, starting times are not."""
    with open(f"/proc/{pid}/stat", "rb") as file:
        started = file.read().rpartition(b")")[2].split()[19].decode()
    return f"{_machine()}/{pid}/{started}"


def _alive(process: str) -> bool | None:
    """Whether a process is there; None for one of another machine."""
    machine, _, numbers = process.rpartition("/")[0].rpartition("/")
    if machine != _machine():
        return None
    try:
        return _process(int(numbers)) == process
    except (OSError, ValueError):
        return False
