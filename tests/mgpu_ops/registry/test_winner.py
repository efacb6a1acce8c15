"""Kernel or XLA: which of them a call runs, by what is stored and by models, with a toy op whose kernel is a string."""

from __future__ import annotations

import dataclasses
import logging
import math
from pathlib import Path
from typing import Any

import jax
import msgspec
import pytest

from mgpu_ops.core import gpu as gpus
from mgpu_ops.registry import database, dispatch, resolution, winner
from mgpu_ops.registry.database import Evidence
from mgpu_ops.registry.spec import Baseline, OpSpec

GPU = gpus.find("h200")


@dataclasses.dataclass(frozen=True)
class Problem:
    m: int


@dataclasses.dataclass(frozen=True)
class Config:
    tile: int  # 0: XLA runs


def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool = False) -> Any:
    return ("interpreted" if interpret else "kernel", config.tile)


def through_library(problem: Any, *arrays: Any) -> Any:
    return "library", *arrays


def distance(a: Problem, b: Problem) -> float | None:
    apart = abs(math.log2(a.m / b.m))
    return apart if apart <= 4 else None


SPEC = OpSpec(
    name="toy",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes={},
    suites={},
    space=lambda problem, device: {"tile": (1, 2)},
    supports=lambda problem, device: None,
    check=lambda problem, config, device: None,
    candidates=lambda problem, device: [Config(1)],
    default=lambda problem, device: Config(1),
    cost=lambda problem, config, device: problem.m * 1e-6,
    distance=distance,
    flops=lambda problem: 1,
    bytes=lambda problem: 1,
    inputs=lambda problem, key: (),
    run=run,
    reference=lambda problem, *arrays: ("reference", *arrays),
    tolerance=lambda problem: 0.0,
    baseline=lambda problem: Baseline("library", through_library),
    leaves_to_xla=lambda config: config.tile == 0,
)


def with_baseline(**changes: Any) -> OpSpec:
    return dataclasses.replace(SPEC, baseline=lambda problem: Baseline("library", through_library, **changes))


def store(
    m: int, kernel_us: float, library_us: float | None, *, tile: int = 2, path: Path | None = None, **changes: Any
) -> Path:
    fields: dict[str, Any] = {
        "kind": "measured", "gpu": GPU.name, "driver": None, "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": None,
        "kernel_version": 1, "median_us": kernel_us, "spread_us": 0.0, "default_us": 1000.0,
        "baseline": "library" if library_us else None, "baseline_us": library_us, "error": 0.0, "trials": 1, "seed": 0,
        "date": "2026-11-22",
    }  # fmt: skip
    path = path or database.user_path(GPU.key, "toy")
    entry = database.to_entry(Problem(m), Config(tile), Evidence(**(fields | changes)))
    database.update(path, [entry], gpu_key=gpus.find(entry.evidence.gpu).key, op="toy")
    return path


def call(m: int = 64, spec: OpSpec = SPEC, backend: str | None = None, config: Any = None, instead: Any = None) -> Any:
    with gpus.target("h200"):
        return dispatch.run(spec, Problem(m), ("x",), config=config, backend=backend, instead=instead)


@pytest.fixture(autouse=True)
def nothing_logged(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(resolution, "_logged", set())


# --- an entry of this very problem


def test_where_an_entry_says_that_the_baseline_was_faster_the_call_runs_it() -> None:
    store(64, 12.0, 10.0)
    assert call() == ("library", "x")
    store(64, 10.0, 12.0)
    assert call() == ("kernel", 2)


def test_bursts_and_calls_without_pause_may_have_different_winners(monkeypatch: pytest.MonkeyPatch) -> None:
    store(64, 12.0, 10.0)
    store(64, 14.0, 15.0, objective="sustained")
    assert call() == ("library", "x")
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", "sustained")
    assert call() == ("kernel", 2)


@pytest.mark.parametrize(("library_us", "what"), [(100.0 / 1.0101, "library"), (100.0 / 1.009, "kernel"), (100.0, "kernel")])
def test_less_than_one_percent_is_noise_and_the_kernel_stays(library_us: float, what: str) -> None:
    assert winner.MEASURED_MARGIN == 1.01
    store(64, 100.0, library_us)
    assert call()[0] == what


@pytest.mark.parametrize(("library_us", "what"), [(100.0 / 1.031, "library"), (100.0 / 1.029, "kernel")])
def test_an_entry_of_another_gpu_of_the_family_must_have_it_faster_by_three_percent(library_us: float, what: str) -> None:
    cousin = gpus.find("h100-sxm")
    path = database.user_path(cousin.key, "toy")
    store(64, 100.0, library_us, path=path, gpu=cousin.name)
    assert call()[0] == what
    assert "measured on another GPU" in resolution.explain(SPEC, Problem(64), GPU)


@pytest.mark.parametrize(
    ("kernel_us", "library_us", "what"),
    [(200.0, 200.0 / 1.04, "kernel"), (200.0, 200.0 / 1.06, "library"), (90.0, 90.0 / 1.04, "library")],
)
def test_where_collectives_wait_for_sms_a_long_kernel_may_be_five_percent_slower(
    kernel_us: float, library_us: float, what: str
) -> None:
    store(64, kernel_us, library_us)
    assert call()[0] == "library"
    persistent = dataclasses.replace(SPEC, baseline_keeps_sms=True)
    assert call(spec=persistent)[0] == "library"
    mesh = jax.sharding.AbstractMesh((2,), ("data",), axis_types=(jax.sharding.AxisType.Manual,))
    with jax.sharding.use_abstract_mesh(mesh):
        assert call()[0] == "library"
        assert call(spec=persistent)[0] == what


def test_who_names_the_kernel_gets_it_with_the_tuned_config_though_the_baseline_was_faster() -> None:
    store(64, 12.0, 10.0)
    assert call(backend="mosaic") == ("kernel", 2)
    assert call(backend="interpret") == ("interpreted", 2)
    assert call(config=Config(4)) == ("kernel", 4)
    with resolution.use_configs({"toy": Config(8)}):
        assert call() == ("kernel", 8)


def test_a_named_file_means_what_its_entries_say(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path = store(64, 12.0, 10.0, path=tmp_path / "named.json")
    with resolution.use_configs(path):
        assert call() == ("library", "x")
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(path))
    assert call() == ("library", "x")


def test_xla_in_place_of_a_config_runs_the_baseline_or_the_kernel_where_that_computes_something_else() -> None:
    for configs in ({"toy": "xla"}, {"toy": [(Problem(64), "xla")]}):
        with resolution.use_configs(configs):
            assert call() == ("library", "x")
            assert call(backend="mosaic") == ("kernel", 1)
            assert call(spec=with_baseline(differs="it is another sum")) == ("kernel", 1)


@pytest.mark.parametrize(
    ("changes", "evidence"),
    [
        ({"differs": "it multiplies one matrix only"}, {}),
        ({"missing": lambda: "the library is not installed"}, {}),
        ({}, {"baseline": "another"}),
        ({}, {"kind": "modelled"}),
    ],
    ids=["another result", "not here", "measured beside something else", "not measured"],
)
def test_the_kernel_runs_where_the_baseline_cannot_take_its_place(changes: Any, evidence: Any) -> None:
    store(64, 12.0, 10.0, **evidence)
    assert call(spec=with_baseline(**changes)) == ("kernel", 2)


def test_a_call_may_have_its_own_way_to_the_baseline_or_none() -> None:
    store(64, 12.0, 10.0)
    assert call(instead=lambda x: ("own", x)) == ("own", "x")
    assert call(instead="it has no such gradient") == ("kernel", 2)
    prepared = with_baseline(arrays=lambda problem, *arrays: arrays)  # what `run` takes is not what a call has
    assert call(spec=prepared) == ("kernel", 2)
    assert call(spec=prepared, instead=lambda x: ("own", x)) == ("own", "x")


def test_an_older_entry_that_names_no_kernel_leaves_its_problem_to_xla_and_to_the_default_who_asks_for_it() -> None:
    store(64, 12.0, 12.0, tile=0)
    assert call() == ("library", "x")
    assert call(backend="mosaic") == ("kernel", 1)
    assert call(m=128) == ("library", "x")  # near


# --- no entry of this very problem


def with_model(ratio: float) -> OpSpec:
    """The baseline modelled at `ratio` times the kernel's time."""
    return dataclasses.replace(SPEC, baseline_cost=lambda problem, device: ratio * problem.m * 1e-6)


@pytest.mark.parametrize(("ratio", "what"), [(1.0, "library"), (1 / 0.951, "library"), (1 / 0.949, "kernel"), (1.2, "kernel")])
def test_without_an_entry_models_decide_and_in_unclear_cases_xla_runs(ratio: float, what: str) -> None:
    assert SPEC.modelled_margin == 0.95
    assert call(spec=with_model(ratio))[0] == what
    assert call(spec=with_model(ratio), backend="mosaic")[0] == "kernel"


@pytest.mark.parametrize(("objective", "what"), [("burst", "library"), ("sustained", "kernel"), ("", "library")])
def test_without_an_entry_the_objective_has_a_margin_of_its_own(
    objective: str, what: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setenv("MGPU_OPS_OBJECTIVE", objective)
    spec = dataclasses.replace(with_model(1 / 1.04), sustained_margin=lambda problem: 1.05)
    assert call(spec=spec)[0] == what
    assert call(spec=with_model(1 / 1.04))[0] == "library"


def test_without_an_entry_or_a_model_the_kernel_runs() -> None:
    assert call() == ("kernel", 1)
    assert call(spec=dataclasses.replace(SPEC, baseline_cost=lambda problem, device: None)) == ("kernel", 1)


def test_an_op_may_leave_to_xla_what_nobody_measured() -> None:
    cautious = dataclasses.replace(with_model(1.2), unmeasured=lambda problem: "it is new")
    assert call(spec=cautious) == ("library", "x")
    assert "runs      XLA: it is new" in resolution.explain(cautious, Problem(64), GPU)
    assert call(spec=cautious, backend="mosaic") == ("kernel", 1)
    store(128, 10.0, None)
    assert call(spec=cautious) == ("kernel", 2)
    store(128, 10.0, 8.0)
    assert call(spec=cautious) == ("library", "x")  # by the near problem's times, not by the model


def test_a_modelled_entry_does_not_make_xla_give_way_to_what_nobody_measured() -> None:
    store(64, 10.0, None, kind="modelled")
    cautious = dataclasses.replace(SPEC, unmeasured=lambda problem: "it is new")
    assert call() == ("kernel", 2)
    assert call(spec=cautious) == ("library", "x")
    assert "runs      XLA: it is new" in resolution.explain(cautious, Problem(64), GPU)


def test_a_near_entry_measured_of_another_kernel_says_nothing_of_one_that_nobody_measured() -> None:
    cautious = dataclasses.replace(SPEC, unmeasured=lambda problem: "it is new" if problem.m <= 64 else None)
    store(128, 10.0, 20.0)
    assert call(m=128, spec=cautious) == ("kernel", 2)
    assert call(m=64, spec=cautious) == ("library", "x")
    assert "runs      XLA: it is new" in resolution.explain(cautious, Problem(64), GPU)
    store(32, 10.0, 20.0)
    assert call(m=64, spec=cautious) == ("kernel", 2)


def test_what_was_measured_takes_precedence_over_the_model() -> None:
    store(64, 10.0, 12.0)
    assert call(spec=with_model(0.5)) == ("kernel", 2)


def test_a_near_entry_counts_half_with_each_step_of_distance_where_there_is_no_model() -> None:
    store(64, 116.0, 100.0)
    assert call(m=64) == ("library", "x")
    assert call(m=512) == ("library", "x")
    times = winner.expected_from(winner.Times(116.0, 100.0, "library", "measured"), 1.0, 200.0)
    assert times.kernel_us / times.baseline_us == pytest.approx(1.16**0.5)
    assert call(m=128, spec=with_model(1.2)) == ("kernel", 2)
    store(64, 100.0, 104.0)
    assert call(m=512) == ("kernel", 2)


# --- telling


def test_explain_and_the_log_tell_both_times_and_who_runs(caplog: pytest.LogCaptureFixture) -> None:
    store(64, 12.0, 10.0)
    told = resolution.explain(SPEC, Problem(64), GPU)
    assert "runs      XLA: kernel 12 us, library 10 us, measured" in told
    assert 'config    Config(tile=2), which backend="mosaic" runs' in told
    with caplog.at_level(logging.INFO, "mgpu_ops"):
        call()
    assert "; XLA runs: kernel 12 us, library 10 us, measured" in caplog.messages[0]
    store(64, 10.0, 12.0)
    assert "runs      the kernel: kernel 10 us, library 12 us, measured" in resolution.explain(SPEC, Problem(64), GPU)
    assert "modelled" in resolution.explain(with_model(0.5), Problem(2048), GPU)


@pytest.mark.parametrize(
    ("ratio", "told"),
    [
        (1.02, "XLA: kernel 64 us, library 65.28 us, modelled; the kernel runs where it takes over 5 % less\n"),
        (1.0, "XLA: kernel 64 us, library 64 us, modelled; the kernel runs where it takes over 5 % less\n"),
        (0.9, "XLA: kernel 64 us, library 57.6 us, modelled\n"),
        (1.2, "the kernel: kernel 64 us, library 76.8 us, modelled\n"),
    ],
)
def test_explain_tells_the_margin_where_the_kernel_is_modelled_ahead_and_xla_runs(ratio: float, told: str) -> None:
    assert f"  runs      {told}" in resolution.explain(with_model(ratio), Problem(64), GPU)


def test_explain_tells_the_margin_where_xla_is_ahead_and_the_kernel_runs() -> None:
    generous = dataclasses.replace(with_model(0.98), modelled_margin=1.05)
    told = "the kernel: kernel 64 us, library 62.72 us, modelled; library runs where the kernel takes 5 % longer\n"
    assert told in resolution.explain(generous, Problem(64), GPU)
    store(64, 10.0, 9.95)
    told = "the kernel: kernel 10 us, library 9.95 us, measured; library runs where the kernel takes 1 % longer\n"
    assert told in resolution.explain(SPEC, Problem(64), GPU)


def test_the_log_tells_the_margin_too(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.INFO, "mgpu_ops"):
        call(spec=with_model(1.02))
    assert caplog.messages[0].endswith("modelled; the kernel runs where it takes over 5 % less")


def test_an_entry_tells_what_its_own_problem_runs() -> None:
    def of(path: Path, spec: OpSpec = SPEC) -> Any:
        (entry,) = database.read(path).entries
        return winner.of_entry(entry, spec), winner.text(entry, spec)

    path = store(64, 12.0, 10.0)
    assert of(path) == ("xla", "; XLA is faster, and runs: kernel 12 us, library 10 us, measured")
    assert of(path, with_baseline(differs="it is another sum")) == ("kernel", "")
    assert of(store(64, 10.0, 12.0)) == ("kernel", "")
    assert of(store(64, 10.0, None, tile=0)) == ("xla", "; XLA is faster, and runs")
    assert of(path, dataclasses.replace(SPEC, Config=Problem)) == (None, "")


def test_an_entry_that_was_modelled_does_not_tell_what_runs_as_models_decide() -> None:
    (entry,) = database.read(store(64, 12.0, 10.0)).entries
    assert winner.told(entry, SPEC) == "xla 10.0 us"
    modelled = msgspec.structs.replace(entry, evidence=msgspec.structs.replace(entry.evidence, kind="modelled"))
    assert (winner.of_entry(modelled, SPEC), winner.told(modelled, SPEC)) == (None, "-")
