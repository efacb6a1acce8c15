"""scripts/carry_over.py: which of a family's configs another GPU keeps, and which it gets entries of its own for."""

from __future__ import annotations

import dataclasses
import json
from pathlib import Path

import pytest

from mgpu_ops import spec_of
from mgpu_ops.core import gpu
from mgpu_ops.registry import database
from mgpu_ops.tuning.outcome import Outcome
from scripts import carry_over
from scripts.carry_over import Stored
from tests.tuning.toy import DEFAULT, OPTIMUM, PROBLEM, SPEC, Config, FakeDevice

HELD = Config(32, 96, 3, 40, "none")


def measured(times: dict[Config, float | Outcome], runs: str = "kernel") -> carry_over.Measurement:
    """What is found where configs take these times, beside a baseline of 150 us."""
    device = FakeDevice(times.__getitem__)
    for config in times:
        device.submit(config)
    device.open(SPEC, PROBLEM, 0)
    return carry_over.measured(SPEC, Stored(PROBLEM, HELD, runs), list(times), device)  # type: ignore[arg-type]


def test_a_config_that_is_faster_here_gets_an_entry_with_all_times_of_the_run() -> None:
    entry = measured({HELD: 110.0, DEFAULT: 120.0, OPTIMUM: 100.0}).entry
    assert entry is not None
    assert Config(**entry.config) == OPTIMUM
    assert (entry.evidence.median_us, entry.evidence.default_us, entry.evidence.baseline_us) == (100.0, 120.0, 150.0)


@pytest.mark.parametrize("others", [99.5, 100.0, 130.0])
def test_a_config_that_is_as_fast_as_another_here_stays(others: float) -> None:
    found = measured({HELD: 100.0, OPTIMUM: others})
    assert found.entry is None
    assert set(found.times.samples) == ({HELD, OPTIMUM} if others < 120 else {HELD})


def test_where_xla_ran_by_the_familys_entry_and_the_kernel_is_faster_here_there_is_an_entry() -> None:
    assert measured({HELD: 100.0, DEFAULT: 100.0}, runs="xla").entry is not None
    assert measured({HELD: 160.0, DEFAULT: 160.0}, runs="xla").entry is None


def test_a_gain_without_the_default_beside_it_is_no_entry_that_others_could_rely_on() -> None:
    assert measured({HELD: 110.0, DEFAULT: Outcome("crash"), OPTIMUM: 100.0}).entry is None


def test_where_the_familys_config_fails_here_the_fastest_other_is_stored() -> None:
    found = measured({HELD: Outcome("wrong", detail="error 1 exceeds 0"), OPTIMUM: 100.0, DEFAULT: 110.0})
    assert found.entry is not None
    assert found.failed == {HELD: "wrong: error 1 exceeds 0"}
    assert measured({HELD: Outcome("crash"), OPTIMUM: Outcome("crash")}).entry is None


def test_a_run_passes_over_problems_whose_times_the_output_has(tmp_path: Path) -> None:
    output = tmp_path / "times.jsonl"
    assert carry_over.known(output) == set()
    device = FakeDevice({HELD: 100.0}.__getitem__)
    device.submit(HELD)
    device.open(SPEC, PROBLEM, 0)
    one = Stored(PROBLEM, HELD, "kernel")
    found = carry_over.measured(SPEC, one, [HELD], device)  # type: ignore[arg-type]
    output.write_text(json.dumps(carry_over.record(SPEC, one, found, device)) + "\n")  # type: ignore[arg-type]
    assert carry_over.known(output) == {(SPEC.name, database.key_of_fields(dataclasses.asdict(PROBLEM)))}


@pytest.mark.parametrize("op", ["matmul", "flash_attention_backward"])
def test_an_h100_tries_the_h200s_config_first_and_only_legal_ones(op: str) -> None:
    spec, here = spec_of(op), gpu.find("h100-sxm")
    entries = carry_over.stored(spec, here)
    assert entries
    for one in entries[:5]:
        first, *others = carry_over.to_try(spec, one, entries, here)
        assert first == one.config
        assert others
        assert len({first, *others}) == 1 + len(others)
        assert all(spec.check(one.problem, config, here) is None for config in others)
