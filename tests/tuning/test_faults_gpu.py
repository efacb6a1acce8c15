"""Faults for real: kernels that go wrong on a Hopper GPU, each survived by the next candidate. Every fault prints a line."""

from __future__ import annotations

import functools
import os
import signal
import threading
from collections.abc import Iterator

import pytest

from mgpu_ops.tuning import compile_pool, worker
from mgpu_ops.tuning.device import Measured
from mgpu_ops.tuning.outcome import Outcome
from tests.tuning import faulty

pytestmark = pytest.mark.gpu

PROBLEM = faulty.Problem(4096)
NONE = faulty.Config("none")


@pytest.fixture(scope="module")
def device() -> Iterator[Measured]:
    pool = compile_pool.Pool(2, seconds=5.0, serve=functools.partial(compile_pool.compile_jobs, specs=faulty.spec_of))
    with pool:
        made = Measured(pool=pool, serve=functools.partial(worker.serve, specs=faulty.spec_of))
        made.open(faulty.SPEC, PROBLEM, 0)
        yield made
        made.close()


def judge(device: Measured, fault: str) -> Outcome:
    device.submit(faulty.Config(fault))
    return device.next()[1]


@pytest.mark.parametrize(
    ("fault", "kind", "detail"),
    [
        ("slow compile", "timeout", "compiling took more than 5 s"),
        ("wrong", "wrong", "exceeds 0.001"),
        ("nan", "wrong", "exceeds 0.001"),
        ("varies", "wrong", "two runs on the same inputs differ"),
        ("overwrites", "wrong", ""),
        ("memory", "memory", "RESOURCE_EXHAUSTED"),  # XLA waits 10 s for somebody to free some
        ("illegal", "crash", ""),
        ("hang", "timeout", "no answer for 15 s"),
    ],
)
def test_a_fault_costs_its_candidate_and_the_next_is_measured(
    fault: str, kind: str, detail: str, device: Measured, capsys: pytest.CaptureFixture[str]
) -> None:
    bad, good = judge(device, fault), judge(device, "none")
    with capsys.disabled():
        print(f"\n{fault}: {bad.kind}: {bad.detail}; the next: {good.kind} {good.us} us {good.detail}")
    assert bad.kind == kind
    assert detail in bad.detail
    assert bad.us is None
    assert good.kind == "ok"


def test_a_worker_killed_with_9_loses_no_candidate(device: Measured, capsys: pytest.CaptureFixture[str]) -> None:
    killed = device._child.pid
    device.submit(faulty.Config("hang"))
    threading.Timer(2.0, os.kill, (killed, signal.SIGKILL)).start()  # at the first try; the second runs into the limit
    _, outcome = device.next()
    good = judge(device, "none")
    with capsys.disabled():
        print(f"\nkilled -9: tried again: {outcome.kind}: {outcome.detail}; the next: {good.kind} {good.us} us")
    assert outcome.kind == "timeout"
    assert good.kind == "ok"
    assert device._child.pid != killed


def test_a_finalist_that_fails_is_left_out(device: Measured) -> None:
    final = device.finals([NONE, faulty.Config("again"), faulty.Config("varies")], 0.1)
    assert set(final.samples) == {NONE, faulty.Config("again")}
    assert len(final.baseline) >= 11
