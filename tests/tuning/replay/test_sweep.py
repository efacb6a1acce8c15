"""Sweeps: what is measured, that nothing measured is lost, and what the files say."""

from __future__ import annotations

import dataclasses
import gzip
import itertools
import json
import os
import signal
import threading
import time
from pathlib import Path
from typing import Any, Literal

import msgspec
import pytest

import mgpu_ops
from mgpu_ops.registry import database
from mgpu_ops.tuning.outcome import Outcome
from mgpu_ops.tuning.replay import sweep
from mgpu_ops.tuning.worker import Lost, WorkerError
from tests.tuning.conftest import Command
from tests.tuning.toy import DEFAULT, GPU, PROBLEM, SPEC, Config, FakeDevice, OneOfSeveral, machine_of, slope

SMALL = {"a": (1, 2, 4), "b": (16, 32), "c": (1,), "d": (8,), "mode": ("m", "n")}
SMALL_SPEC = dataclasses.replace(SPEC, space=lambda problem, gpu: SMALL)
COLLECTIVES = {"all_reduce", "reduce_scatter", "all_gather"}  # run on several GPUs, a sweep on one
CONFIGS = [Config(*values) for values in itertools.product(*SMALL.values())]


def measured(config: Config) -> Outcome:
    if config.a == 4:
        return Outcome("compile", detail="spills")
    us = slope(config)
    return dataclasses.replace(Outcome("ok", us, 150.0, 0.25), samples=(us - 1.0, us, us + 2.0))


def run(device: FakeDevice, folder: Path, spec: Any = SMALL_SPEC, **options: Any) -> sweep.Sweep:
    return sweep.measure_all(spec, "toy-1024", PROBLEM, device, sweep.SweepOptions(folder, **options))


def files(folder: Path) -> tuple[Path, Path]:
    return sweep.paths(folder, "toy", GPU.key, "toy-1024")


# --- which configs


def test_every_legal_config_of_the_grid_is_measured_once_with_its_raw_samples(tmp_path: Path) -> None:
    spec = dataclasses.replace(SMALL_SPEC, check=lambda p, c, gpu: "no" if c.mode == "n" and c.b == 32 else None)
    device = FakeDevice(measured)
    found = run(device, tmp_path, spec)
    legal = {c for c in CONFIGS if not (c.mode == "n" and c.b == 32)}
    assert len(device.judged) == len(legal)
    assert set(device.judged) == set(found.configs(spec)) == legal
    for config, row in zip(found.configs(spec), found.rows, strict=True):
        outcome = measured(config)
        assert (row.kind, row.samples, row.detail) == (outcome.kind, outcome.samples, outcome.detail)
    assert found.complete
    assert found.optimum == min(slope(c) for c in legal if c.a != 4)


def test_a_device_that_gives_no_samples_leaves_its_median(tmp_path: Path) -> None:
    found = run(FakeDevice(), tmp_path)
    assert {row.samples for row in found.rows} == {(slope(c),) for c in CONFIGS}


def test_a_grid_that_is_too_large_fixes_knobs_at_the_defaults_value_in_the_declared_order(
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setitem(sweep.GRIDS, "toy", {"a": (1, 2, 4), "b": (16, 32), "c": (1, 2), "d": (8,)})
    monkeypatch.setitem(sweep.FIXED, "toy", ("c", "b"))
    for limit, c, b in ((36, (1, 2), (16, 32)), (35, (1,), (16, 32)), (17, (1,), (16,)), (1, (1,), (16,))):
        choices, legal = sweep.grid(SPEC, PROBLEM, GPU, limit)
        assert (choices["c"], choices["b"], choices["mode"]) == (c, b, ("m", "n", "none"))
        assert len(legal) == 3 * len(b) * len(c) * 3


def test_what_a_search_or_the_database_may_name_is_measured_though_the_grid_lacks_it(tmp_path: Path) -> None:
    analytic = Config(64, 96, 2, 24, "none")
    spec = dataclasses.replace(SMALL_SPEC, candidates=lambda problem, gpu: [analytic])
    assert analytic in run(FakeDevice(), tmp_path, spec).configs(spec)


def test_what_is_shipped_for_the_problem_is_measured() -> None:
    spec = mgpu_ops.spec_of("matmul")
    problem = spec.shapes["llama3-8b-qkv-128"]
    entries = database.read(database.shipped_path("h200", "matmul")).entries
    (shipped,) = (e.config for e in entries if database.to_problem(spec, e.problem) == problem)
    assert spec.Config(**shipped) in sweep.extras(spec, problem, GPU)


def test_the_suite_has_20_problems_of_all_ops_each_large_enough_to_search_and_small_enough_to_measure() -> None:
    problems = sweep.suite(mgpu_ops.SPECS)
    assert len(problems) >= 20
    assert {spec.name for spec, _, _ in problems} == set(mgpu_ops.SPECS) - COLLECTIVES - {"rms_norm", "rotary", "embedding"}
    assert len({(spec.name, problem) for spec, _, problem in problems}) == len(problems)
    for spec, name, problem in problems:
        choices, legal = sweep.grid(spec, problem, GPU)
        assert 32 < len(legal) <= sweep.LIMIT, name
        space = spec.space(problem, GPU)
        assert all(set(values) <= set(space[parameter]) for parameter, values in choices.items()), name
        assert spec.default(problem, GPU) in sweep.extras(spec, problem, GPU)


# --- nothing is lost


@pytest.mark.parametrize("error", [KeyboardInterrupt(), WorkerError("the GPU has gone")])
def test_a_sweep_that_is_stopped_goes_on_where_it_was(tmp_path: Path, error: BaseException) -> None:
    first = FakeDevice(lambda config: error if len(first.judged) > 5 else measured(config))
    with pytest.raises(type(error)):
        run(first, tmp_path)
    partial = sweep.read(files(tmp_path)[0])
    assert not partial.complete
    assert len(partial.rows) == 5
    assert not files(tmp_path)[1].exists()
    assert sweep.read_all(tmp_path) == []

    second = FakeDevice(measured)
    found = run(second, tmp_path)
    assert found.complete
    assert set(second.judged).isdisjoint(first.judged[:5])
    assert len(second.judged) == len(CONFIGS) - 5
    assert [s.name for s in sweep.read_all(tmp_path)] == ["toy-1024"]
    third = FakeDevice(measured)
    assert run(third, tmp_path) == found
    assert third.judged == []


def test_what_is_measured_is_on_the_disk_before_the_end(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(sweep, "_SAVE_SECONDS", 0.0)
    seen = []

    def judgement(config: Config) -> Outcome:
        seen.append(len(sweep.read(files(tmp_path)[0]).rows) if files(tmp_path)[0].exists() else 0)
        return measured(config)

    run(FakeDevice(judgement), tmp_path)
    assert seen == list(range(len(CONFIGS)))


@pytest.mark.parametrize(("what", "value"), [("driver", "9.9"), ("jax", "0.12.0")])
def test_measurements_of_two_toolchains_are_not_mixed(tmp_path: Path, what: str, value: str) -> None:
    run(FakeDevice(measured), tmp_path)
    device = FakeDevice(measured)
    device.versions[what] = value
    with pytest.raises(sweep.SweepError, match=rf"measured with {what} .* here it is {value}: move it away"):
        run(device, tmp_path)


def test_a_modelled_device_is_refused(tmp_path: Path) -> None:
    with pytest.raises(sweep.SweepError, match="a sweep is measured, and this device's times are modelled"):
        run(FakeDevice(kind="modelled"), tmp_path)


# --- the files


def test_the_same_measurements_make_the_same_bytes(tmp_path: Path) -> None:
    run(FakeDevice(measured), tmp_path / "x")
    run(FakeDevice(measured, slots=1), tmp_path / "y", seed=0)
    for x, y in zip(files(tmp_path / "x"), files(tmp_path / "y"), strict=True):
        assert x.read_bytes() == y.read_bytes()


BAD = [b"", b"{", gzip.compress(b"[]"), gzip.compress(b"{}"), gzip.compress(b'{"schema":1}')[:-9]]


@pytest.mark.parametrize("data", BAD, ids=range(len(BAD)))
def test_a_file_that_is_no_sweep_is_refused_with_its_name_and_the_way_out(tmp_path: Path, data: bytes) -> None:
    path = tmp_path / "x.json.gz"
    path.write_bytes(data)
    with pytest.raises(sweep.SweepError, match=r"x\.json\.gz is no sweep .*: delete it and measure again"):
        sweep.read(path)


def test_the_file_has_the_keys_that_earlier_versions_wrote(tmp_path: Path) -> None:
    run(FakeDevice(measured), tmp_path)
    kept = json.loads(gzip.decompress(files(tmp_path)[0].read_bytes()))
    assert list(kept) == [
        "schema", "op", "name", "problem", "kind", "gpu", "device", "driver", "jax", "jaxlib", "cuda", "kernel_version",
        "baseline", "seed", "date", "complete", "grid", "knobs", "rows",
    ]  # fmt: skip
    assert kept["knobs"] == {k: sorted(v) for k, v in SMALL.items()}


def test_a_row_outside_of_the_parameters_and_a_later_schema_are_refused(tmp_path: Path) -> None:
    found = run(FakeDevice(measured), tmp_path)
    path = tmp_path / "x.json.gz"
    rows = (*found.rows, sweep.SweepRow((9, 0, 0, 0, 0), "ok", (1.0,)))
    sweep.write(msgspec.structs.replace(found, rows=rows), path)
    with pytest.raises(sweep.SweepError, match="outside of its 5 parameters"):
        sweep.read(path)
    sweep.write(msgspec.structs.replace(found, schema=sweep.SCHEMA + 1), path)
    with pytest.raises(sweep.SweepError, match="has schema 2, this mgpu_ops reads 1: upgrade it"):
        sweep.read(path)


class Times(msgspec.Struct, forbid_unknown_fields=True):
    """Here and below: what the T4 schema says of what is written, strictly."""

    runtimes: list[float]


class Measurement(msgspec.Struct, forbid_unknown_fields=True):
    name: str
    value: float
    unit: str


class Result(msgspec.Struct, forbid_unknown_fields=True):
    configuration: dict[str, Any]
    times: Times
    invalidity: Literal["timeout", "compile", "runtime", "correctness", "constraints", "correct"]
    correctness: Literal[0, 1]
    objectives: list[str]
    measurements: list[Measurement]


class Metadata(msgspec.Struct):
    compute_api: Literal["OpenCL", "CUDA", "Vulkan"]
    device: str
    autotuner: str
    timestamp: str
    timeunit: Literal["nanoseconds", "microseconds", "milliseconds", "seconds"]


class T4(msgspec.Struct, forbid_unknown_fields=True):
    schema_version: str
    metadata: Metadata
    results: list[Result]


def test_the_t4_file_holds_to_its_schema_and_tells_the_same(tmp_path: Path) -> None:
    kinds = {"n": "wrong", "m": "timeout"}

    def judgement(config: Config) -> Any:
        return Outcome(kinds[config.mode], detail="bad") if config.b == 32 else measured(config)  # type: ignore[arg-type]

    found = run(FakeDevice(judgement), tmp_path)
    document = msgspec.json.decode(gzip.decompress(files(tmp_path)[1].read_bytes()), type=T4)
    assert document.schema_version.split(".")[:2] == ["1", "1"]
    assert (document.metadata.device, document.metadata.timestamp) == (GPU.name, found.date)
    by_config = {Config(**r.configuration): r for r in document.results}
    assert set(by_config) == set(CONFIGS)
    ok = by_config[DEFAULT]
    us = slope(DEFAULT)
    assert ok.times.runtimes == [(us - 1) / 1e3, us / 1e3, (us + 2) / 1e3]
    assert (ok.invalidity, ok.correctness, ok.objectives) == ("correct", 1, ["time"])
    assert [(m.name, m.value, m.unit) for m in ok.measurements] == [("time", us / 1e3, "ms"), ("baseline_time", 0.15, "ms")]
    failed = {(r.configuration["b"], r.configuration["mode"], r.configuration["a"]): r for r in document.results}
    assert (failed[32, "n", 1].invalidity, failed[32, "n", 1].correctness) == ("correctness", 0)
    assert (failed[32, "m", 1].invalidity, failed[32, "m", 1].correctness) == ("timeout", 1)
    assert (failed[16, "m", 4].invalidity, failed[16, "m", 4].times.runtimes) == ("compile", [])


# --- the command


@pytest.mark.parametrize(
    ("words", "reason"),
    [
        ((), "name what to sweep in one way"),
        (("matmul", "--shape", "square-2048", "--suite", "llm"), "name what to sweep in one way"),
        (("--suite", "llm"), "--suite llm is an op's: name the op"),
        (("matmul", "--suite", "nothing"), "suite 'nothing' is not one of replay, llm"),
        (("matmul", "--shape", "nothing"), "shape 'nothing' is not one of square-2048"),
        (("conv", "--suite", "replay"), "op 'conv' is not one of matmul"),
        (("--suite", "replay"), "no NVIDIA GPU is here"),
    ],
)
def test_a_wrong_request_is_answered_with_the_way_out(mgpu_tune: Command, words: tuple[str, ...], reason: str) -> None:
    done = mgpu_tune("sweep", *words)
    assert done.code == 2
    assert reason in done.err
    assert "Traceback" not in done.err


def test_the_command_sweeps_a_suite_and_says_what_came_of_it(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    monkeypatch.setitem(mgpu_ops.SPECS, "toy", SMALL_SPEC)
    monkeypatch.setattr("mgpu_ops.tuning.cli.sweep.has_gpu", lambda: True)
    monkeypatch.setattr("mgpu_ops.tuning.devices.device_for", lambda name, gpus=1, **_: FakeDevice(measured))
    done = mgpu_tune("sweep", "toy", "--suite", "toys", "--output", tmp_path, "--json")
    assert done.code == 0
    told = json.loads(done.out)
    assert [(t["name"], t["configs"], t["failed"]) for t in told] == [("toy-1024", 12, 4), ("toy-2048", 12, 4)]
    assert {s.name for s in sweep.read_all(tmp_path)} == {"toy-1024", "toy-2048"}

    def interrupted(config: Config) -> Any:
        return KeyboardInterrupt()

    monkeypatch.setattr("mgpu_ops.tuning.devices.device_for", lambda name, gpus=1, **_: FakeDevice(interrupted))
    done = mgpu_tune("sweep", "toy", "--suite", "toys", "--output", tmp_path / "other")
    assert done.code == 130
    assert "goes on from there" in done.out


def sweep_on(monkeypatch: pytest.MonkeyPatch, mgpu_tune: Command, folder: Path, *devices: OneOfSeveral) -> Any:
    with machine_of(monkeypatch, *devices, spec=SMALL_SPEC):
        monkeypatch.setattr("mgpu_ops.tuning.cli.sweep.has_gpu", lambda: True)
        return mgpu_tune("sweep", "toy", "--suite", "toys", "--workers", "all", "--output", folder, "--json")


def slowly(config: Config) -> Outcome:
    time.sleep(0.01)
    return measured(config)


def test_each_gpu_sweeps_problems_of_its_own(mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    several = [OneOfSeveral(slowly), OneOfSeveral(slowly)]
    done = sweep_on(monkeypatch, mgpu_tune, tmp_path, *several)
    assert done.code == 0, done.err
    assert [set(device.judged) for device in several] == [set(CONFIGS)] * 2
    assert sorted(told["name"] for told in json.loads(done.out)) == ["toy-1024", "toy-2048"]
    assert {s.name for s in sweep.read_all(tmp_path)} == {"toy-1024", "toy-2048"}
    assert len(list(tmp_path.iterdir())) == 4  # two formats each, nothing half written


def test_ctrl_c_stops_the_sweeps_of_all_gpus_which_go_on_where_they_were(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    pressed = threading.Event()

    def judge(config: Config) -> Outcome:
        if all(len(device.judged) >= 3 for device in several) and not pressed.is_set():
            pressed.set()
            os.kill(os.getpid(), signal.SIGINT)
        return slowly(config)

    several = [OneOfSeveral(judge), OneOfSeveral(judge)]
    done = sweep_on(monkeypatch, mgpu_tune, tmp_path, *several)
    assert done.code == 130
    assert "goes on from there" in done.err
    kept = [sweep.read(path).rows for path in tmp_path.glob("*.json.gz")]
    assert [len(rows) >= 2 for rows in kept] == [True, True]
    again = [OneOfSeveral(slowly), OneOfSeveral(slowly)]
    assert sweep_on(monkeypatch, mgpu_tune, tmp_path, *again).code == 0
    assert sum(len(device.judged) for device in again) == 2 * len(CONFIGS) - sum(map(len, kept))
    assert len(sweep.read_all(tmp_path)) == 2


def test_a_problem_that_cannot_be_swept_and_a_gpu_that_is_lost_do_not_end_the_others(
    mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    class Small(OneOfSeveral):
        def open(self, spec: Any, problem: Any, seed: int) -> None:
            if problem.size == 2048:
                raise WorkerError("the worker could not prepare it: out of memory")

    lost = OneOfSeveral(lambda config: Lost("the GPU worker did not start"))
    done = sweep_on(monkeypatch, mgpu_tune, tmp_path, Small(measured), lost)
    assert done.code == 1
    assert "toy toy-2048: the worker could not prepare it: out of memory" in done.err
    assert [s.name for s in sweep.read_all(tmp_path)] == ["toy-1024"]
