"""Replays of sweeps: that the recorded device is honest, what the numbers mean, and that the search holds its bounds.

The sweeps here are made: the op's model of time, each parameter perturbed, with noise and failures. Recorded sweeps must hold
the bounds as well, where there are any.
"""

from __future__ import annotations

import dataclasses
import itertools
import json
import math
from pathlib import Path
from typing import Any

import msgspec
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops.core.gpu import find
from mgpu_ops.registry import resolution
from mgpu_ops.tuning.replay import replay, sweep
from mgpu_ops.tuning.replay.sweep import Sweep, SweepRow
from tests.thorough import ALL, only_in_all
from tests.tuning.conftest import Command

GPU = find("h200")
RECORDED = Path(__file__).parents[3] / "results" / "replay"
MEDIAN, P95 = 0.01, 0.03  # regrets within 32 trials that the default search is held to


def made(op: str, name: str, seed: int = 0) -> Sweep:
    """A sweep of the problem's grid: the model, off by some percent a choice and a pair of choices, by 1 % a config; noise."""
    spec = mgpu_ops.spec_of(op)
    problem, rng = spec.shapes[name], np.random.default_rng(seed)
    grid, legal = sweep.grid(spec, problem, GPU)
    configs = list(dict.fromkeys(legal + sweep.extras(spec, problem, GPU)))
    parameters = {k: tuple(sorted({getattr(c, k) for c in configs})) for k in grid}
    places = np.array([[values.index(getattr(c, k)) for k, values in parameters.items()] for c in configs])
    log = np.log([spec.cost(problem, c, GPU) * 1e6 for c in configs]) + rng.normal(0, 0.01, len(configs))
    sizes = [len(v) for v in parameters.values()]
    for i, size in enumerate(sizes):
        log += np.cumsum(rng.normal(0, 0.04, size))[places[:, i]]
    for i, j in itertools.combinations(range(len(sizes)), 2):
        log += rng.normal(0, 0.015, (sizes[i], sizes[j]))[places[:, i], places[:, j]]
    failed = rng.random(len(configs)) < 0.05
    failed[configs.index(spec.default(problem, GPU))] = False
    rows = []
    for place, us, bad in zip(places.tolist(), np.exp(log), failed, strict=True):
        samples = () if bad else tuple(float(x) for x in us * np.exp(rng.normal(0, 0.004, 12)))
        rows.append(SweepRow(tuple(place), "compile" if bad else "ok", samples, None if bad else 100.0))
    return Sweep(
        schema=1, op=op, name=name, problem=dataclasses.asdict(problem), kind="measured", gpu="h200", device=GPU.name,
        driver="1", jax="0", jaxlib="0", cuda=None, kernel_version=spec.version, baseline="xla", seed=0, date="2025-11-20",
        complete=True, grid=grid, parameters=parameters, rows=tuple(sorted(rows, key=lambda row: row.config)),
    )  # fmt: skip


@pytest.fixture(scope="module")
def sweeps() -> list[Sweep]:
    names = {op: found[:2] for op, found in sweep.REPLAY.items()}
    return [made(op, name, seed) for seed, (op, found) in enumerate(names.items()) for name in found]


def test_a_sweep_of_any_op_is_read_back_as_it_was_written(sweeps: list[Sweep], tmp_path: Path) -> None:
    for found in sweeps:
        path, _ = sweep.paths(tmp_path, found.op, "h200", found.name)
        sweep.write(found, path)
        assert sweep.read(path) == found


# --- the bounds


def bounds(found: list[Sweep], seeds: int) -> None:
    ((_, score),) = replay.play_all(found, ["ours"], trials=32, seeds=seeds)
    assert score.median_regret <= MEDIAN
    assert score.p95_regret <= P95


@only_in_all  # the recorded ones below show as much; these fail more often and have more noise
def test_the_default_search_holds_its_bounds_on_made_sweeps(sweeps: list[Sweep]) -> None:
    bounds(sweeps, seeds=1)


def test_the_default_search_holds_its_bounds_on_recorded_sweeps() -> None:
    found = sweep.read_all(RECORDED) if RECORDED.exists() else []
    if not found:
        pytest.skip("no sweep is recorded in results/replay")
    assert len(found) >= 36
    bounds(found, seeds=10 if ALL else 1)


def test_problems_that_were_not_tuned_get_nearly_the_optimum_on_recorded_sweeps() -> None:
    found = sweep.read_all(RECORDED) if RECORDED.exists() else []
    if not found:
        pytest.skip("no sweep is recorded in results/replay")
    held = replay.held_out(found)
    assert held.median_share >= 0.95
    assert held.smallest_of_default >= 1


# --- the recorded device


def test_a_recorded_device_draws_what_was_measured_and_fails_what_failed(sweeps: list[Sweep]) -> None:
    spec, problem = replay.recorded_spec(sweeps[0])
    device = replay.Recorded(sweeps[0], spec, seed=3)
    device.open(spec, problem, 0)
    configs = sweeps[0].configs(spec)
    works, row = next((c, row) for c, row in zip(configs, sweeps[0].rows, strict=True) if row.kind == "ok")
    times = set()
    for _ in range(20):
        device.submit(works)
        _, outcome = device.next()
        times.add(outcome.us)
        assert set(outcome.samples) <= set(row.samples)
    assert len(times) > 1, "no noise"
    broken = next(c for c, row in zip(configs, sweeps[0].rows, strict=True) if row.kind != "ok")
    device.submit(broken)
    assert device.next()[1].kind == "compile"
    with pytest.raises(LookupError):
        device.next()
    final = device.finals([works, works], 1.0)
    assert all(set(samples) <= set(row.samples) for samples in final.samples.values())


def test_only_what_was_measured_is_searched_and_nothing_stored_helps(sweeps: list[Sweep]) -> None:
    for found in sweeps:
        spec, problem = replay.recorded_spec(found)
        measured, space = set(found.configs(spec)), spec.space(problem, GPU)
        assert all(getattr(config, parameter) in choices for config in measured for parameter, choices in space.items())
        assert spec.default(problem, GPU) in measured
        assert set(spec.candidates(problem, GPU)) <= measured
        assert spec.distance(problem, problem) is None
        number = next(name for name, value in dataclasses.asdict(spec.default(problem, GPU)).items() if type(value) is int)
        other = dataclasses.replace(spec.default(problem, GPU), **{number: 10**6})
        assert spec.check(problem, other, GPU) == "it was not measured"


# --- the numbers


def small(times: list[float]) -> Sweep:
    """A sweep of as many configs, that differ in one parameter."""
    base = made("flash_attention_backward", "gpt2-1024-causal")
    rows = tuple(
        SweepRow((0,) * 5 + (i,), "ok" if us < math.inf else "crash", (us,) if us < math.inf else ())
        for i, us in enumerate(times)
    )
    parameters = {k: v[:1] for k, v in base.parameters.items()} | {"memory_registers": tuple(range(len(times)))}
    return msgspec.structs.replace(base, rows=rows, parameters=parameters)


def test_the_expected_best_of_a_random_search_is_the_mean_over_all_orders() -> None:
    times = [3.0, 1.0, 4.0, math.inf, 5.0]
    counted = [t if t < math.inf else 5.0 for t in times]
    orders = list(itertools.permutations(counted))
    expected = [np.mean([min(order[: n + 1]) for order in orders]) for n in range(5)]
    assert replay.random_curve(small(times), 7) == pytest.approx([*expected, 1.0, 1.0])


def test_the_score_is_1_at_the_optimum_from_the_first_trial_and_0_for_what_random_search_expects() -> None:
    times = [float(t) for t in range(100, 140)]
    found = small(times)
    assert replay.willemsen(found, [[0.0] * 32]) == pytest.approx(1.0)
    expected = replay.random_curve(found, 32) / 100.0 - 1
    assert replay.willemsen(found, [list(expected)]) == pytest.approx(0.0, abs=1e-9)
    assert replay.willemsen(found, [[0.39] * 32]) < 0


def test_scores_are_of_all_searches() -> None:
    found = small([100.0, 110.0])
    searches = [replay.Played(0.0, (0.1, 0.0)), replay.Played(0.1, (0.1, 0.1)), replay.Played(0.02, (0.1, 0.005))]
    score = replay.score([(found, searches)])
    assert score.median_regret == 0.02
    assert score.p95_regret == pytest.approx(float(np.quantile([0.0, 0.02, 0.1], 0.95)))
    assert score.rerun_spread == pytest.approx(0.1)
    assert score.trials_to_1_percent == 2
    assert score.curve == (0.1, 0.005)
    assert replay.factors([found], score) == (0.75, 1.0)  # (2 + 1) / (1 + 1) and 2 configs, over 2 trials


def test_held_out_problems_get_what_the_database_finds_without_their_own_entry(
    sweeps: list[Sweep], monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(resolution, "NEAR_SLACK", 2.0)  # made times are not the model's: it shall not speak against an entry
    matmuls = [s for s in sweeps if s.op == "matmul"]
    held = replay.held_out([matmuls[0]])
    spec, problem = replay.recorded_spec(matmuls[0])
    rows = dict(zip(matmuls[0].configs(spec), matmuls[0].rows, strict=True))
    default = rows[spec.default(problem, GPU)].us
    assert held.median_share == pytest.approx(matmuls[0].optimum / default)  # nothing is near: the default
    assert held.smallest_of_default == 1.0
    twin = msgspec.structs.replace(matmuls[0], problem=matmuls[0].problem | {"m": 2 * problem.m})
    assert replay.held_out([matmuls[0], twin]).median_share > held.median_share


# --- the command


def test_the_command_tells_the_numbers_on_one_line_and_draws_them(
    mgpu_tune: Command, sweeps: list[Sweep], tmp_path: Path
) -> None:
    for found in sweeps[-2:]:
        sweep.write(found, sweep.paths(tmp_path, found.op, "h200", found.name)[0])
    options: list[Any] = ["--from", tmp_path, "--seeds", 1, "--sampler", "ours", "--sampler", "random"]
    done = mgpu_tune("replay", *options, "--json", "--picture", tmp_path / "regret")
    assert done.code == 0, done.err
    assert done.out.count("\n") == 1
    told = json.loads(done.out)
    assert (told["problems"], told["trials"]) == (2, 32)
    assert 0 <= told["median_regret"] <= told["p95_regret"] <= P95
    assert set(told["samplers"]) == {"ours", "random"}
    assert (tmp_path / "regret.png").read_bytes()[:4] == b"\x89PNG"
    assert "<svg" in (tmp_path / "regret.svg").read_text()


def test_without_sweeps_the_command_says_how_to_get_some(mgpu_tune: Command, tmp_path: Path) -> None:
    done = mgpu_tune("replay", "--from", tmp_path)
    assert done.code == 2
    assert "no complete sweep in" in done.err
    assert "mgpu-tune sweep" in done.err
