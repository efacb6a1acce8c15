"""The search alone: what it names, in which order, and what it learns. No device."""

from __future__ import annotations

import dataclasses
import itertools
from typing import Any

import numpy as np
import pytest

from mgpu_ops.core import extras
from mgpu_ops.tuning import search
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.search import Search
from mgpu_ops.tuning.surrogate import Surrogate
from tests.tuning.toy import CHOICES, DEFAULT, GPU, OPTIMUM, PROBLEM, SPEC, Config, slope, store

SMALL = {"a": (1, 2, 4), "b": (16, 32), "c": (1,), "d": (8,), "mode": ("m", "n")}
SMALL_SPEC = dataclasses.replace(SPEC, space=lambda problem, gpu: SMALL)
EVERY = [Config(*values) for values in itertools.product(*SMALL.values())]


def searching(spec: Any = SPEC, **options: Any) -> Search:
    return Search(spec, PROBLEM, GPU, TuneOptions(**options))


def played(found: Search, trials: int) -> list[tuple[Config, str]]:
    """Each candidate told before the next one is asked for."""
    named = []
    while len(named) < trials and (asked := found.ask()) is not None:
        named.append(asked)
        found.tell(asked[0], Outcome("ok", slope(asked[0])))
    return named


@pytest.mark.parametrize("sampler", ["tpe", "random", "brute"])
@pytest.mark.parametrize("alone", [False, True])
def test_every_sampler_names_each_config_of_a_small_space_once_and_then_nothing(sampler: str, alone: bool) -> None:
    found = searching(SMALL_SPEC, sampler=sampler, sampler_only=alone)
    named = [config for config, _ in played(found, 100)]
    assert sorted(named, key=dataclasses.astuple) == sorted(EVERY, key=dataclasses.astuple)
    assert found.ask() is None


def test_brute_force_walks_in_the_order_of_the_space_and_asks_no_model() -> None:
    spec = dataclasses.replace(SMALL_SPEC, cost=lambda problem, config, gpu: 1.0 if config == DEFAULT else 1e9)
    assert [config for config, _ in played(searching(spec, sampler="brute"), 100)] == EVERY


@pytest.mark.parametrize("alone", [False, True])
def test_a_sampler_alone_has_no_seeds(alone: bool) -> None:
    store(1024, Config(2, 16, 1, 8, "m"))
    origins = [origin for _, origin in played(searching(sampler_only=alone), 16)]
    assert (set(origins) == {"search"}) == alone
    if not alone:
        assert origins[:2] == ["default", "near"]


def test_for_times_without_pause_thrifty_configs_are_tried_early_and_entries_of_such_times_count_first() -> None:
    in_bursts, without_pause, thrifty = (Config(a, 16, 1, 8, "n") for a in (2, 4, 8))
    store(1024, in_bursts)
    store(1024, without_pause, objective="sustained")
    spec = dataclasses.replace(SPEC, thrifty=lambda problem, gpu: [thrifty])
    assert played(searching(spec, objective="sustained"), 4) == [
        (DEFAULT, "default"),
        (without_pause, "near"),
        (in_bursts, "near"),
        (thrifty, "model"),
    ]
    named = [config for config, _ in played(searching(spec), 4)]
    assert named[1:3] == [in_bursts, without_pause]
    assert thrifty not in named


def test_what_nobody_measured_yet_is_not_named_twice() -> None:
    found = searching()
    named = [found.ask() for _ in range(40)]
    assert len({config for config, _ in named if config}) == 40  # type: ignore[misc]


def test_what_others_measured_is_learned_from_and_not_named_again() -> None:
    found = searching(SMALL_SPEC)
    for config in EVERY[:-1]:
        found.tell(config, Outcome("ok", slope(config)))
    assert [config for config, _ in played(found, 10)] == EVERY[-1:]


def test_a_candidate_that_another_process_has_is_dropped_for_good() -> None:
    found = searching(SMALL_SPEC)
    config, _ = found.ask() or (None, "")
    found.drop(config)
    assert config not in [c for c, _ in played(found, 100)]


def test_the_local_part_finds_the_optimum_of_a_separable_space_in_few_trials() -> None:
    for seed in range(3):
        named = played(searching(seed=seed, trials=64), 64)
        assert min(slope(config) for config, _ in named) <= slope(OPTIMUM) + 10.0  # one step of 33 away at most
        assert {"search", "local"} <= {origin for _, origin in named}


def test_what_the_model_puts_far_behind_is_never_named_but_by_seeds() -> None:
    spec = dataclasses.replace(SPEC, cost=lambda problem, config, gpu: 1.0 + (config.mode == "none"))
    assert all(config.mode != "none" for config, _ in played(searching(spec), 60))


def test_configs_are_told_to_optuna_as_indices_and_foreign_values_stand_at_the_nearest() -> None:
    params, distributions = searching().encode(Config(5, 16, 12, 40, "elsewhere"))
    assert params == {"a": 2, "b": 0, "c": 6, "d": 4, "mode": 0}
    assert {k: (d.low, d.high) for k, d in distributions.items()} == {k: (0, len(v) - 1) for k, v in CHOICES.items()}


def test_an_unknown_sampler_and_gp_without_pytorch_are_refused_with_the_way_out(monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ValueError, match="sampler 'anneal' is not one of tpe, gp, random, brute"):
        searching(sampler="anneal")
    monkeypatch.setattr(extras, "installed", lambda module: False)
    with pytest.raises(ValueError, match=r"sampler 'gp' needs scipy and torch: run `pip install '\.\[gp\]'` in a checkout"):
        searching(sampler="gp")


def test_the_config_held_for_a_problem_is_that_of_its_own_entry_of_that_kind() -> None:
    measured, modelled = Config(2, 16, 1, 8, "m"), Config(4, 16, 1, 8, "m")
    store(2048, Config(8, 16, 1, 8, "m"), kind="measured")
    assert search.stored_config(SPEC, PROBLEM, GPU, "measured") is None
    store(1024, measured, kind="measured")
    store(1024, modelled)
    assert search.stored_config(SPEC, PROBLEM, GPU, "measured") == measured
    assert search.stored_config(SPEC, PROBLEM, GPU, "modelled") == modelled
    assert search.stored_config(dataclasses.replace(SPEC, version=4), PROBLEM, GPU, "measured") is None


# --- effects


def effects(cost: Any = lambda config: 100e-6) -> Surrogate:
    found = searching()
    return Surrogate(CHOICES, lambda config: found.encode(config)[0], cost)


def test_an_effect_of_one_knob_is_learned_and_carried_over_to_other_configs() -> None:
    times = {Config(a, b, 1, 8, "m"): 100.0 - 20.0 * (b == 96) for a in (1, 8) for b in (16, 64, 96, 160)}
    fast, slow = Config(32, 96, 2, 8, "m"), Config(32, 16, 2, 8, "m")
    gains = effects().improvement(times, [], [fast, slow])
    assert gains[0] > 10 * gains[1]


def test_without_contrary_evidence_the_model_ranks() -> None:
    cost = {c: 1e-4 * (1 + i) for i, c in enumerate(EVERY)}
    gains = effects(cost.__getitem__).improvement({EVERY[3]: 400.0}, [], EVERY[:3] + EVERY[4:])
    assert np.argmax(gains) == 0
    assert min(gains[:3]) > max(gains[3:])


def test_what_is_pending_makes_its_doubles_less_promising() -> None:
    times = {Config(1, 16, 1, 8, "m"): 100.0}
    candidate = Config(16, 96, 1, 8, "m")
    alone = effects().improvement(times, [], [candidate])[0]
    beside = effects().improvement(times, [dataclasses.replace(candidate, a=32)], [candidate])[0]
    assert 0 < beside < alone
