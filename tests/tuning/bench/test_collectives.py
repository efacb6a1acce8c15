"""Benchmarks of collectives, on a CPU of eight devices with the times of a made-up CUPTI."""

from __future__ import annotations

import dataclasses
import functools
import itertools
import types
from pathlib import Path
from typing import Any

import jax
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import CollectiveProblem, collective_workspace
from mgpu_ops.core import gpu
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench import collectives as collective_bench
from mgpu_ops.tuning.bench import results
from mgpu_ops.tuning.bench.runner import BenchOptions
from mgpu_ops.tuning.sharing import first_devices, shared_out

H200 = gpu.find("h200")
SPEC = mgpu_ops.spec_of("all_reduce")


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 16 calls on 4 devices: 6 us of XLA's barrier, and a kernel of 10 us, for which three wait up to 4 us more. A call
    takes 40 us.
    """

    def kernels(call: Any) -> list[tuple[str, float]]:
        jax.block_until_ready(call())
        turn = [("multi_gpu_barrier_kernel", 6.0)] * 4 + [("mgpu_ops_all_reduce", 10.0 + wait) for wait in (3, 0, 4, 1)]
        return [("loop_broadcast_fusion", 1.0)] * 4 + turn * 16

    calls = itertools.cycle([16, 16, 48, 48])  # ours and XLA's, then both in longer programs
    times: dict[int, float] = {}
    kept: list[Any] = []

    def compiled(function: Any, arrays: Any) -> Any:
        call = functools.partial(jax.jit(function), *arrays)
        kept.append(call)
        times[id(call)] = 500 + 40.0 * next(calls)
        return call

    monkeypatch.setattr(measure, "kernels", kernels)
    monkeypatch.setattr(measure, "wall", lambda call, programs: programs * times[id(call)])
    monkeypatch.setattr(collective_bench, "compiled", compiled)


def measured(said: list[str], **problems: CollectiveProblem) -> list[results.Measurement]:
    options = BenchOptions(H200, seconds=0.001, backend="xla")
    return collective_bench.run(SPEC, problems, options, progress=said.append)


@pytest.mark.usefixtures("cupti")
def test_a_row_tells_the_kernel_from_what_is_around_it_and_from_the_call():
    said: list[str] = []
    ours, xla = measured(said, small=CollectiveProblem(32768, 4, "float32"))
    assert (ours.impl, xla.impl) == ("mgpu_ops", "xla")
    for row in (ours, xla):
        assert (row.problem, row.devices, row.bytes) == ("32768x4 float32", 4, 131072)
        assert row.own_us == pytest.approx(10.0)
        assert row.around_us == pytest.approx(6.0 + 1 / 16)
        assert row.median_us == pytest.approx(40.0)
        assert row.spread_us == pytest.approx(0.0)
        assert row.gbs == pytest.approx(2 * 131072 / 40e-6 / 1e9, rel=1e-4)
        assert row.warm_us is None
        assert row.chain_us == pytest.approx(500 + 16 * 40.0)
        assert row.bus_gbs == pytest.approx(1.5 * 131072 / 40e-6 / 1e9, rel=1e-4)
        assert row.error < 1e-6
    assert ours.config == "backend=xla"
    times = "mgpu_ops 40 us a call, 10 us of its own, xla 40 us a call, 10 us of its own"
    assert said == [f"32768x4 float32: {times}"]


@pytest.mark.usefixtures("cupti")
def test_a_problem_that_fails_is_said_and_told_at_the_end():
    said: list[str] = []
    problems = {"wide": CollectiveProblem(1024, 16), "good": CollectiveProblem(1024, 2, "float32")}
    rows = measured(said, **problems)
    assert said[0] == "1024x16 bfloat16: failed: ValueError: it takes 16 GPUs, and 8 are here"
    assert results.failures(rows, SPEC, problems, grad=False) == ["1024x16 bfloat16: no result"]
    wrong = [dataclasses.replace(row, error=0.5) for row in rows]
    told = results.failures(wrong, SPEC, {"good": problems["good"]}, grad=False)
    assert told == ["1024x2 float32: error 0.5 is above 4.8e-07"]
    in_workspace = dataclasses.replace(wrong[0], impl=collective_bench.IN_WORKSPACE)
    told = results.failures([rows[0], in_workspace], SPEC, {"good": problems["good"]}, grad=False)
    assert told == ["1024x2 float32 (workspace): error 0.5 is above 4.8e-07"]


@pytest.mark.usefixtures("cupti")
def test_a_call_that_is_lost_in_the_hosts_noise_is_no_result(monkeypatch: pytest.MonkeyPatch):
    monkeypatch.setattr(measure, "wall", lambda call, programs: 100.0 * programs)  # as long for 48 calls as for 16
    said: list[str] = []
    assert measured(said, small=CollectiveProblem(1024, 2, "float32")) == []
    assert "a call of mgpu_ops takes less than the host's noise (0 us): measure it again" in said[0]


@pytest.mark.usefixtures("cupti")
def test_rows_are_written_and_read_as_those_of_any_op(tmp_path: Path):
    rows = measured([], small=CollectiveProblem(32768, 4, "float32"))
    results.write_csv(rows, tmp_path / "rows.csv")
    assert results.read_csv(tmp_path / "rows.csv") == rows
    [line] = results.comparisons(rows)
    assert line.ratio("xla") == 1.0


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75)])
def test_bus_bytes_are_what_nccl_tests_counts(op, factor):
    assert collective_bench.bus_bytes(op, 1000, 4) == factor * 1000


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_public_function_is_what_is_measured(kind):
    spec = mgpu_ops.spec_of(kind)
    problem = CollectiveProblem(64, 4, "float32")
    (x,) = shared_out(spec.inputs(problem, jax.random.key(0)), 4, first_devices(4))
    mesh = first_devices(4)
    memory = collective_workspace(mesh, "device")
    for function in (
        collective_bench.public(spec, problem, H200, "xla"),
        lambda x: collective_bench.in_workspace(spec, problem, mesh)(memory.open(), x),
    ):
        np.testing.assert_allclose(jax.jit(function)(x), spec.reference(problem, x), rtol=1e-6)


def test_what_the_tuner_left_to_xla_is_measured_so(monkeypatch):
    """A named transport would run a kernel all the same."""
    problem = CollectiveProblem(512, 2)
    for runs in ("xla", "kernel"):
        found = types.SimpleNamespace(runs=runs, source="shipped", times=None)
        monkeypatch.setattr(collective_bench.resolution, "resolve", lambda *_, found=found: found)
        asked = {}
        monkeypatch.setattr(
            collective_bench, "_on_each_device", lambda spec, problem, asked=asked, **how: asked.update(how) or (lambda x: x)
        )
        collective_bench.public(mgpu_ops.spec_of("all_reduce"), problem, H200)
        assert asked["transport"] == (None if runs == "xla" else "peer")
