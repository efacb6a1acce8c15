"""The search: what it tries, in which order, when it ends, and which entry it makes of it. No GPU: a table of times."""

from __future__ import annotations

import dataclasses
import itertools
import math
import random
import time
from collections.abc import Sequence
from typing import Any

import optuna
import pytest

from mgpu_ops.registry import database, resolution, winner
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import ranking, search, tuner
from mgpu_ops.tuning.options import TuneOptions
from mgpu_ops.tuning.outcome import Final, Outcome, SustainedFinal, Trial
from mgpu_ops.tuning.worker import WorkerError
from tests.tuning.toy import (
    CHOICES,
    DEFAULT,
    GPU,
    OPTIMUM,
    PROBLEM,
    SPEC,
    Clock,
    Config,
    FakeDevice,
    Problem,
    Sustaining,
    slope,
    store,
)


@pytest.fixture
def clock(monkeypatch: pytest.MonkeyPatch) -> Clock:
    clock = Clock()
    monkeypatch.setattr(time, "monotonic", clock)
    return clock


def tune(device: FakeDevice, spec: OpSpec = SPEC, **options: Any) -> tuner.Result:
    rest = {name: options.pop(name) for name in ("study", "final", "progress") if name in options}
    return tuner.tune(spec, PROBLEM, device, TuneOptions(**options), **rest)


def stored_config(result: tuner.Result) -> Config:
    assert result.entry is not None
    return Config(**result.entry.config)


# --- what is tried, and in which order


def test_the_default_is_tried_first_then_the_nearest_stored_configs() -> None:
    near, farther, farthest = Config(2, 16, 1, 8, "m"), Config(4, 16, 1, 8, "m"), Config(8, 16, 1, 8, "m")
    store(4096, farther)
    store(1024, near)
    store(8192, farthest)
    result = tune(FakeDevice(), trials=10)
    assert [(t.origin, t.config) for t in result.trials[:4]] == [
        ("default", DEFAULT),
        ("near", near),
        ("near", farther),
        ("near", farthest),
    ]
    assert [t.number for t in result.trials] == list(range(10))


def test_stored_configs_that_cannot_run_this_problem_are_not_tried() -> None:
    bad = Config(2, 16, 1, 8, "m")
    store(2048, bad)
    spec = dataclasses.replace(SPEC, check=lambda p, c, gpu: "no" if c == bad else None)
    assert bad not in (t.config for t in tune(FakeDevice(), spec, trials=20).trials)


@pytest.mark.parametrize("data", [b"{", b'{"schema":99,"gpu":"h200","op":"toy","entries":[]}'], ids=["corrupt", "newer"])
def test_a_database_that_cannot_be_read_gives_no_seeds_and_stops_nothing(data: bytes) -> None:
    path = database.user_path(GPU.key, "toy")
    path.parent.mkdir(parents=True)
    path.write_bytes(data)
    result = tune(FakeDevice(), trials=10)
    assert result.entry is not None
    assert "near" not in {t.origin for t in result.trials}


def test_the_ops_analytic_candidates_follow_the_default() -> None:
    analytic = [DEFAULT, Config(2, 32, 1, 8, "m"), Config(4, 64, 1, 8, "n")]
    spec = dataclasses.replace(SPEC, candidates=lambda problem, gpu: analytic)
    result = tune(FakeDevice(), spec, trials=8)
    assert [t.config for t in result.trials[:3]] == analytic
    assert [t.origin for t in result.trials[:3]] == ["default", "model", "model"]


def test_no_config_is_judged_twice_and_none_that_check_refuses() -> None:
    def check(problem: Any, config: Config, gpu: Any) -> str | None:
        return "too much" if config.a * config.c > 128 else None

    device = FakeDevice()
    result = tune(device, dataclasses.replace(SPEC, check=check), trials=80)
    assert len(device.judged) == len(set(device.judged)) == len(result.trials) == 80
    assert all(check(None, config, None) is None for config in device.judged)


def test_what_the_model_puts_far_behind_never_reaches_the_device() -> None:
    spec = dataclasses.replace(SPEC, cost=lambda p, c, gpu: 10.0 if c.mode == "none" else 1.0)
    assert {t.config.mode for t in tune(FakeDevice(), spec, trials=60).trials} == {"m", "n"}


def test_the_default_is_tried_even_where_the_model_puts_it_far_behind() -> None:
    spec = dataclasses.replace(SPEC, cost=lambda p, c, gpu: 10.0 if c.mode == "m" else 1.0)
    assert tune(FakeDevice(), spec, trials=2).trials[0].config == DEFAULT


def test_the_device_is_opened_for_the_problem_and_seed() -> None:
    device = FakeDevice()
    tune(device, trials=1, seed=7)
    assert device.opened == (SPEC, PROBLEM, 7)


def test_progress_is_called_with_each_trial_in_order() -> None:
    told: list[Trial] = []
    result = tune(FakeDevice(), trials=20, progress=told.append)
    assert tuple(told) == result.trials


def test_the_same_seed_gives_the_same_trials_and_another_seed_others() -> None:
    first, again, other = (tune(FakeDevice(), trials=40, seed=seed).trials for seed in (1, 1, 2))
    assert first == again
    assert [t.config for t in first] != [t.config for t in other]


@pytest.mark.parametrize("seed", range(4))
def test_the_optimum_of_a_separable_space_is_found(seed: int) -> None:
    """5,880 configs, the model says nothing, the default is 17 steps away."""
    result = tune(FakeDevice(), trials=100, seed=seed)
    assert stored_config(result) == OPTIMUM
    assert result.entry is not None
    assert result.entry.evidence.median_us == 100.0


@pytest.mark.parametrize("seed", range(2))
def test_failures_in_half_of_the_space_do_not_keep_the_optimum_from_being_found(seed: int) -> None:
    def judgement(config: Config) -> Any:
        return Outcome("compile", detail="spills") if config.b > 96 else slope(config)

    assert stored_config(tune(FakeDevice(judgement), trials=100, seed=seed)) == OPTIMUM


# --- when it ends


@pytest.mark.parametrize("trials", [1, 7, 8, 9, 33])
def test_no_more_than_the_trials_asked_for_are_judged(trials: int) -> None:
    device = FakeDevice()
    result = tune(device, trials=trials)
    assert len(device.judged) == len(result.trials) == trials
    assert result.ended == "trials"


def test_the_end_of_the_space_ends_the_search() -> None:
    spec = dataclasses.replace(SPEC, space=lambda p, gpu: CHOICES | {"a": (1, 2), "b": (16, 32), "c": (1,), "d": (8,)})
    device = FakeDevice()
    result = tune(device, spec, trials=1000)
    assert result.ended == "exhausted"
    assert len(device.judged) == len(set(device.judged)) == 2 * 2 * 3
    assert stored_config(result) == Config(2, 32, 1, 8, "n")


def test_the_few_configs_that_can_run_in_a_large_space_are_all_tried_and_the_end_is_found_soon() -> None:
    """30 of 5,880: TPE would name the other 5,850 again and again."""
    few = set(random.Random(0).sample([Config(*values) for values in itertools.product(*CHOICES.values())], 30))
    spec = dataclasses.replace(
        SPEC,
        check=lambda p, c, gpu: None if c in few | {DEFAULT} else "no",
        supports=lambda problem, gpu: None,
    )
    device = FakeDevice()
    result = tune(device, spec, trials=1000)
    assert result.ended == "exhausted"
    assert set(device.judged) == few | {DEFAULT}


def test_a_space_too_large_to_walk_ends_too(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(search, "_WALKED", 0)
    monkeypatch.setattr(search, "_POOLED", 0)
    spec = dataclasses.replace(SPEC, space=lambda p, gpu: CHOICES | {"a": (1, 2), "b": (16, 32), "c": (1,), "d": (8,)})
    device = FakeDevice()
    assert tune(device, spec, trials=1000).ended == "exhausted"
    assert len(device.judged) == 12


def test_the_budget_ends_a_modelled_search_within_it(clock: Clock) -> None:
    result = tune(FakeDevice(kind="modelled", clock=clock), trials=1000, budget=20.0)
    assert result.ended == "budget"
    assert 10 <= len(result.trials) <= 20
    assert result.seconds <= 20.0
    assert result.entry is not None


@pytest.mark.parametrize("budget", [15.0, 20.0, 30.0, 47.0])
def test_the_budget_ends_a_measured_search_within_it(budget: float, clock: Clock) -> None:
    result = tune(FakeDevice(clock=clock), trials=1000, budget=budget)
    assert result.ended == "budget"
    assert budget / 2 <= result.seconds <= budget
    assert result.entry is not None


@pytest.mark.parametrize("kind", ["measured", "modelled"])
def test_the_default_is_tried_and_kept_whatever_the_budget(kind: str, clock: Clock) -> None:
    result = tune(FakeDevice(kind=kind, clock=clock), budget=0.001)
    assert result.trials[0].config == DEFAULT
    assert result.entry is not None
    assert result.entry.evidence.default_us == slope(DEFAULT)


def test_without_a_budget_time_does_not_matter(clock: Clock) -> None:
    assert tune(FakeDevice(clock=clock), trials=50).ended == "trials"


def test_a_problem_that_the_kernel_cannot_run_is_refused_with_the_reason() -> None:
    device = FakeDevice()
    with pytest.raises(ValueError, match=r"toy Problem\(size=3\) cannot be tuned: size is odd: pad it"):
        tuner.tune(SPEC, Problem(3), device)
    assert device.opened is None


# --- failures


def test_failures_of_every_kind_are_kept_with_their_reasons_and_end_nothing() -> None:
    kinds = {1: "compile", 2: "timeout", 4: "crash", 8: "wrong"}

    def judgement(config: Config) -> Any:
        kind: Any = kinds.get(config.a)
        return Outcome(kind, detail=f"reason {kind}") if kind else slope(config)

    one_of_each = [dataclasses.replace(DEFAULT, a=a) for a in kinds]
    spec = dataclasses.replace(SPEC, candidates=lambda problem, gpu: one_of_each)
    result = tune(FakeDevice(judgement), spec, trials=80)
    assert result.ended == "trials"
    assert len(result.trials) == 80
    assert set(result.failures) == {(k, f"reason {k}") for k in kinds.values()}
    assert sum(result.failures.values()) == sum(t.config.a in kinds for t in result.trials)
    assert stored_config(result) == OPTIMUM


def test_there_is_no_entry_where_nothing_worked() -> None:
    device = FakeDevice(lambda config: Outcome("crash", detail="always"))
    result = tune(device, trials=20)
    assert result.entry is None
    assert len(result.trials) == 20
    assert result.failures == {("crash", "always"): 20}
    assert device.finalists is None


def test_a_default_that_fails_has_no_time_in_the_evidence() -> None:
    device = FakeDevice(lambda config: Outcome("wrong", detail="bad") if config == DEFAULT else slope(config))
    result = tune(device, trials=20)
    assert result.entry is not None
    assert result.entry.evidence.default_us is None
    assert stored_config(result) != DEFAULT


def test_where_every_finalist_fails_when_it_runs_again_nothing_is_stored() -> None:
    class Fails(FakeDevice):
        def finals(self, configs: Sequence[Config], seconds: float) -> Final:
            return Final({}, [1.0])

    result = tune(Fails(), trials=20)
    assert result.entry is None
    assert len(result.trials) == 20


def test_finalists_that_cannot_be_measured_again_do_not_lose_the_search() -> None:
    class Hangs(FakeDevice):
        def finals(self, configs: Sequence[Config], seconds: float) -> Final:
            raise WorkerError("the finalists could not be measured: no answer in time")

    result = tune(Hangs(), trials=20)
    best = min(result.trials, key=lambda t: t.outcome.us or math.inf)
    assert stored_config(result) == best.config


# --- sustained


def test_with_the_objective_sustained_turns_decide_and_the_entry_tells_power_and_both_times() -> None:
    device = Sustaining(hungry=OPTIMUM)
    result = tune(device, trials=80, objective="sustained")
    assert result.burst is not None
    assert (Config(**result.burst.config), result.burst.evidence.objective) == (OPTIMUM, "burst")
    assert result.entry is not None
    chosen, e = stored_config(result), result.entry.evidence
    assert slope(chosen) == 110.0  # a step from the optimum
    assert (e.objective, e.median_us, e.burst_us, e.default_us) == ("sustained", 165.0, 110.0, 1.5 * slope(DEFAULT))
    assert (e.baseline_us, e.baseline_burst_us) == (300.0, 150.0)
    assert (e.clock_mhz, e.watts, e.joules) == (1500.0, 690.0, 0.11385)
    assert (e.baseline_watts, e.baseline_joules) == (700.0, 0.21)
    assert result.entries == [result.burst, result.entry]
    assert DEFAULT in device.sustained_configs
    assert len(device.sustained_configs) == 9


def test_half_of_what_runs_without_pause_is_of_other_kinds_than_the_fastest() -> None:
    def fields_apart(a: Config, b: Config) -> int:
        return sum(x != y for x, y in zip(dataclasses.astuple(a), dataclasses.astuple(b)))

    device = Sustaining(judgement=lambda config: 1000 + slope(config))  # so that many are within a tenth of the fastest
    result = tune(device, trials=80, objective="sustained")
    times = {t.config: t.outcome.us or math.inf for t in result.trials}
    *configs, default = device.sustained_configs
    assert default == DEFAULT
    assert set(configs[:4]) <= set(sorted(times, key=lambda c: times[c])[:8])
    others = configs[4:]
    assert all(fields_apart(a, b) > 1 for i, a in enumerate(others) for b in [*configs[:4], *others[:i]])
    assert max(times[c] for c in configs) <= 1.1 * min(times.values())


def test_the_incumbent_of_an_objective_is_the_stored_entry_of_that_objective() -> None:
    first = tune(Sustaining(hungry=OPTIMUM), trials=80, objective="sustained")
    database.update(database.user_path(GPU.key, "toy"), first.entries, gpu_key=GPU.key, op="toy")
    again = tune(Sustaining(hungry=OPTIMUM), trials=80, objective="sustained", seed=1)
    assert stored_config(again) == stored_config(first)
    assert again.burst is not None
    assert Config(**again.burst.config) == OPTIMUM


def test_what_cannot_be_measured_sustained_has_an_entry_of_bursts_and_a_warning(caplog: pytest.LogCaptureFixture) -> None:
    class TooShort(Sustaining):
        def sustained(self, configs: Sequence[Config], seconds: float) -> SustainedFinal:
            raise WorkerError("so short ones cannot be queued without gaps")

    result = tune(TooShort(), trials=20, objective="sustained")
    assert result.burst is None
    assert result.entry is not None
    assert result.entry.evidence.objective == "burst"
    assert "so short ones cannot be queued without gaps: the entry is of bursts" in caplog.text


@pytest.mark.parametrize(
    ("device", "options", "spec", "message"),
    [
        (FakeDevice(kind="modelled"), {}, SPEC, "times that are modelled have none"),
        (Sustaining(), {"budget": 30.0}, SPEC, "the turns alone may take 38 s: give a larger budget"),
        (Sustaining(), {}, dataclasses.replace(SPEC, devices=lambda problem: 2), "it runs between GPUs"),
    ],
)
def test_where_nothing_can_be_sustained_that_is_told_before_the_search(
    device: FakeDevice, options: dict[str, Any], spec: OpSpec, message: str
) -> None:
    with pytest.raises(ValueError, match=message):
        tune(device, spec, trials=5, objective="sustained", **options)
    assert device.judged == []


# --- Ctrl-C


@pytest.mark.parametrize("after", [1, 3, 8, 30])
def test_ctrl_c_keeps_the_best_so_far_and_says_so(after: int) -> None:
    device = FakeDevice(lambda config: KeyboardInterrupt() if len(device.judged) > after else slope(config))
    result = tune(device, trials=64)
    assert result.ended == "interrupted"
    assert len(result.trials) == after
    assert stored_config(result) == min((t.config for t in result.trials), key=slope)
    assert device.finalists is None  # the worker may be in the middle of something
    evidence = result.entry.evidence  # type: ignore[union-attr]
    assert (evidence.trials, evidence.default_us, evidence.baseline_us) == (after, slope(DEFAULT), 150.0)


def test_ctrl_c_before_the_first_result_leaves_no_entry() -> None:
    result = tune(FakeDevice(lambda config: KeyboardInterrupt()))
    assert (result.ended, result.entry, result.trials) == ("interrupted", None, ())


def test_ctrl_c_in_the_final_keeps_the_best_of_the_trials() -> None:
    class Interrupted(FakeDevice):
        def finals(self, configs: Sequence[Config], seconds: float) -> Final:
            raise KeyboardInterrupt

    result = tune(Interrupted(), trials=20)
    assert result.ended == "interrupted"
    assert len(result.trials) == 20
    assert stored_config(result) == min((t.config for t in result.trials), key=slope)


# --- the entry


def test_the_final_decides_not_the_trials() -> None:
    """In the trials a lucky config looks best; measured in turn it is not."""
    device = FakeDevice(final=lambda c: [300.0 - slope(c)] * 3)
    result = tune(device, trials=30)
    assert device.finalists is not None
    ranking = sorted({t.config: t.outcome.us or 0.0 for t in result.trials}.items(), key=lambda pair: pair[1])
    fastest = [config for config, us in ranking[: tuner.FINALISTS]]
    assert set(device.finalists) >= {c for c, us in ranking if us < slope(fastest[-1])}
    assert DEFAULT in device.finalists
    assert len(device.finalists) <= tuner.FINALISTS + 1
    assert stored_config(result) == DEFAULT


@pytest.mark.parametrize("seed", range(3))
def test_the_entry_is_never_slower_than_the_default_of_the_same_run(seed: int) -> None:
    noise = {c: 80.0 + hash((seed, dataclasses.astuple(c)[:4])) % 40 for c in (DEFAULT, OPTIMUM)}
    device = FakeDevice(final=lambda c: [noise.get(c, slope(c)) + jitter for jitter in (-1.0, 0.0, 2.0)])
    entry = tune(device, trials=40, seed=seed).entry
    assert entry is not None
    assert entry.evidence.default_us is not None
    assert entry.evidence.median_us <= entry.evidence.default_us


def test_the_evidence_tells_what_was_measured_and_where() -> None:
    device = FakeDevice(final=lambda c: [slope(c) + j for j in (-4.0, 0.0, 4.0)])
    result = tune(device, trials=24, seed=5)
    assert result.entry is not None
    assert result.entry.problem == {"size": 1024}
    e = result.entry.evidence
    best = slope(stored_config(result))
    assert (e.kind, e.gpu, e.driver, e.jax, e.jaxlib, e.cuda) == (
        "measured", GPU.name, "1.2", "0.11.2", "0.11.2", "13000",
    )  # fmt: skip
    assert (e.kernel_version, e.trials, e.seed) == (3, 24, 5)
    assert (e.median_us, e.default_us) == (best, slope(DEFAULT))
    assert 6.4 <= e.spread_us <= 8.0  # 10th to 90th percentile of those three samples, or of more runs of them
    assert (e.baseline, e.baseline_us, e.error) == ("xla", 150.0, 0.002)
    database.update(database.user_path(GPU.key, "toy"), [result.entry], gpu_key=GPU.key, op="toy")
    resolved = resolution.resolve(SPEC, PROBLEM, GPU)
    assert (resolved.source, resolved.config) == ("user", stored_config(result))


def test_where_the_baseline_is_faster_in_the_same_run_the_entry_says_so_and_keeps_the_best_config() -> None:
    result = tune(FakeDevice(lambda config: 60.0 + slope(config)), trials=100)  # the baseline takes 150
    assert result.entry is not None
    assert winner.of_entry(result.entry, SPEC) == "xla"
    database.update(database.user_path(GPU.key, "toy"), [result.entry], gpu_key=GPU.key, op="toy")
    found = resolution.resolve(SPEC, PROBLEM, GPU)
    assert (found.runs, found.config) == ("xla", OPTIMUM)
    assert found.times == winner.Times(60.0 + slope(OPTIMUM), 150.0, "xla", "measured")


def test_a_modelled_entry_says_so_and_has_no_baseline() -> None:
    entry = tune(FakeDevice(kind="modelled"), trials=10).entry
    assert entry is not None
    assert (entry.evidence.kind, entry.evidence.baseline, entry.evidence.baseline_us) == ("modelled", None, None)


# --- the re-ranking


def test_a_near_tie_goes_to_what_the_database_holds_so_that_reruns_agree() -> None:
    incumbent = dataclasses.replace(OPTIMUM, d=32)
    store(1024, incumbent, kind="measured")

    def nearly(config: Config) -> float:
        return 100.2 if config == incumbent else slope(config)

    assert stored_config(tune(FakeDevice(nearly), trials=100)) == incumbent
    assert stored_config(tune(FakeDevice(lambda c: 101.0 if c == incumbent else slope(c)), trials=100)) == OPTIMUM


def test_what_the_database_holds_is_not_stored_again_as_slower_than_the_default() -> None:
    """Such an entry would be passed over, and the near tie decides between candidates only."""
    incumbent = dataclasses.replace(OPTIMUM, d=32)
    store(1024, incumbent, kind="measured")
    entry = tune(FakeDevice(lambda c: {incumbent: 90.1, DEFAULT: 90.0}.get(c, slope(c))), trials=100).entry
    assert entry is not None
    assert database.to_config(SPEC, entry.config) == DEFAULT
    assert entry.evidence.median_us == entry.evidence.default_us == 90.0


def test_who_is_faster_is_told_with_a_confidence_from_ratios_within_rounds() -> None:
    drift = [100.0 * (1 + 0.01 * n) for n in range(21)]  # a clock that falls by 20 %
    faster = [0.99 * us for us in drift]
    assert ranking.confidence_faster(faster, drift, 0.003, 0) == 1.0
    assert ranking.confidence_faster(drift, faster, 0.0, 0) == 0.0
    assert ranking.confidence_faster(faster, drift, 0.02, 0) == 0.0
    noise = random.Random(0)
    a, b = ([100.0 + noise.gauss(0, 1) for _ in range(31)] for _ in range(2))
    assert 0.01 < ranking.confidence_faster(a, b, 0.0, 0) < 0.99


def test_what_is_not_told_apart_is_measured_again_and_what_lags_is_not() -> None:
    noise = random.Random(1)
    runs: list[list[Config]] = []

    class Noisy(FakeDevice):
        def finals(self, configs: Sequence[Config], seconds: float) -> Final:
            runs.append(list(configs))
            base = {c: 100.0 if slope(c) <= 110.0 else slope(c) for c in configs}
            return Final({c: [us + noise.gauss(0, 0.5) for _ in range(15)] for c, us in base.items()}, [150.0] * 15)

    result = tune(Noisy(), trials=100)
    assert len(runs) == ranking.RUNS
    assert all(slope(c) <= 110.0 or c == DEFAULT for c in runs[1])
    assert DEFAULT in runs[-1]
    assert slope(stored_config(result)) <= 110.0
    assert result.confidence is not None
    assert 0.0 < result.confidence <= 1.0


def test_a_finalist_that_fails_when_it_runs_again_is_not_stored() -> None:
    class Fails(FakeDevice):
        def finals(self, configs: Sequence[Config], seconds: float) -> Final:
            return Final({c: [slope(c)] * 5 for c in configs if c != OPTIMUM}, [150.0] * 5)

    result = tune(Fails(), trials=100)
    assert OPTIMUM in {t.config for t in result.trials}
    assert stored_config(result) != OPTIMUM


# --- targets, studies and fleets


def test_a_target_ends_the_search_at_that_share_of_the_baselines_speed() -> None:
    result = tune(FakeDevice(), trials=100, target=1.0)  # the baseline takes 150
    assert result.ended == "target"
    assert len(result.trials) < 100
    assert any(slope(t.config) <= 150.0 for t in result.trials)
    assert tune(FakeDevice(), trials=40, target=9.0).ended == "trials"


def test_a_target_without_a_baseline_is_refused() -> None:
    with pytest.raises(
        ValueError, match=r"target=0\.98 is a share of a baseline's speed, and times that are modelled have none"
    ):
        tune(FakeDevice(kind="modelled"), target=0.98)


@pytest.mark.parametrize("slots", [1, 3, 8])
def test_no_more_are_in_flight_than_the_device_takes_and_nothing_is_left_there(slots: int) -> None:
    device = FakeDevice(slots=slots)  # which refuses one too many
    assert len(tune(device, trials=20).trials) == 20
    assert not device.flying


def test_what_a_study_holds_is_not_measured_again_and_counts() -> None:
    study = optuna.create_study()
    first = FakeDevice(lambda config: KeyboardInterrupt() if len(first.judged) > 12 else slope(config))
    assert tune(first, trials=20, study=study).ended == "interrupted"
    second = FakeDevice()
    result = tune(second, trials=20, study=study)
    assert len(result.trials) == 20
    assert len(second.judged) == 8
    assert set(second.judged).isdisjoint(first.judged[:12])
    assert stored_config(result) == min((t.config for t in result.trials), key=slope)


def test_another_of_the_fleet_may_do_the_re_ranking() -> None:
    device = FakeDevice()
    result = tune(device, trials=10, final=lambda: False)
    assert (result.entry, result.ended, device.finalists) == (None, "elsewhere", None)


def test_brute_force_tries_every_config_and_keeps_the_best() -> None:
    spec = dataclasses.replace(SPEC, space=lambda p, gpu: CHOICES | {"a": (1, 2), "b": (16, 32), "c": (1,), "d": (8,)})
    device = FakeDevice()
    result = tune(device, spec, trials=10**6, sampler="brute")
    assert result.ended == "exhausted"
    assert len(device.judged) == 2 * 2 * 3
    assert stored_config(result) == Config(2, 32, 1, 8, "n")
