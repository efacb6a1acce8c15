"""`mgpu-tune run`: its budgets, samplers and studies. The device is a table of times."""

from __future__ import annotations

import json
from typing import Any

import pytest

import mgpu_ops
from mgpu_ops.core import database
from mgpu_ops.tuning.commands import run as run_command
from tests.tuning.conftest import Command
from tests.tuning.toy import GPU, PROBLEM, SPEC, Config, FakeDevice, slope


@pytest.fixture
def devices(monkeypatch: pytest.MonkeyPatch) -> list[FakeDevice]:
    """What `run` measures on, in turn; the last one again and again."""
    found = [FakeDevice()]
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", SPEC)
    monkeypatch.setattr(run_command, "device_for", lambda name: found.pop(0) if len(found) > 1 else found[0])
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


def test_every_sampler_stores_a_config(mgpu_tune: Command, devices: list[FakeDevice]) -> None:
    for sampler in ("tpe", "random", "brute"):
        assert mgpu_tune("run", "toy", "--shape", "toy-1024", "--sampler", sampler, "--trials", 12).code == 0
    entry = database.resolve(SPEC, PROBLEM, GPU)
    assert entry.source == "user"
    assert isinstance(entry.config, Config)


def test_problems_can_be_left_to_workers(mgpu_tune: Command, devices: list[FakeDevice], tmp_path: Any) -> None:
    where = str(tmp_path / "fleet.journal")
    done = mgpu_tune("run", "toy", "--suite", "toys", "--storage", where, "--queue", "--trials", 9)
    assert done.code == 0
    assert "queued 2 problems" in done.out
    assert devices[0].judged == []
    from mgpu_ops.tuning import fleet, storage

    jobs = fleet.queued(storage.open_storage(where))
    assert sorted((job.name, job.trials) for job in jobs) == [("toy-1024", 9), ("toy-2048", 9)]


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        (("--target", "0"), "must be a number above 0, such as 0.98"),
        (("--target", "0.98", "--gpu", "h200"), "target=0.98 is a share of a baseline's speed"),
        (("--workers", "0"), "must be a whole number of at least 1"),
        (("--workers", "all"), "no NVIDIA GPU is here"),
        (("--sampler", "anneal"), "invalid choice: 'anneal'"),
        (("--queue",), "name the storage with --storage"),
    ],
)
def test_what_cannot_be_done_is_refused_with_the_way_out(mgpu_tune: Command, words: tuple[str, ...], reason: str) -> None:
    done = mgpu_tune("run", "matmul", "--shape", "square-2048", *words)
    assert done.code == 2
    assert reason in done.err
    assert "Traceback" not in done.err
