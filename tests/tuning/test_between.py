"""Benchmarks of collectives, on a CPU of eight devices with the times of a made-up CUPTI."""

from __future__ import annotations

import csv
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
from mgpu_ops import CollectiveConfig, CollectiveProblem, collective_workspace
from mgpu_ops.core import gpu
from mgpu_ops.tuning import between, measure
from mgpu_ops.tuning.between import COLUMNS, Row
from mgpu_ops.tuning.sharing import first_devices, shared_out

H200 = gpu.find("h200")
SPEC = mgpu_ops.spec_of("all_reduce")


@pytest.fixture
def cupti(monkeypatch: pytest.MonkeyPatch) -> None:
    """Each of 16 turns on 4 devices: 6 us of XLA's barrier, and a kernel of 10 us, for which three wait up to 4 us more. A call
    takes 40 us.
    """

    def kernels(call: Any) -> list[tuple[str, float]]:
        jax.block_until_ready(call())
        turn = [("multi_gpu_barrier_kernel", 6.0)] * 4 + [("mgpu_ops_all_reduce", 10.0 + wait) for wait in (3, 0, 4, 1)]
        return [("loop_broadcast_fusion", 1.0)] * 4 + turn * 16

    turns = itertools.cycle([16, 16, 48, 48])  # ours and XLA's, then both in longer programs
    times: dict[int, float] = {}
    kept: list[Any] = []

    def compiled(function: Any, arrays: Any) -> Any:
        call = functools.partial(jax.jit(function), *arrays)
        kept.append(call)
        times[id(call)] = 500 + 40.0 * next(turns)
        return call

    monkeypatch.setattr(measure, "kernels", kernels)
    monkeypatch.setattr(measure, "wall", lambda call, programs: programs * times[id(call)])
    monkeypatch.setattr(between, "compiled", compiled)


def measured(said: list[str], **problems: CollectiveProblem) -> list[Row]:
    return between.run(SPEC, problems, gpu=H200, seconds=0.001, progress=said.append, backend="xla")


@pytest.mark.usefixtures("cupti")
def test_a_row_tells_the_kernel_from_what_is_around_it_and_from_the_call():
    said: list[str] = []
    ours, xla = measured(said, small=CollectiveProblem(32768, 4, "float32"))
    assert (ours.impl, xla.impl) == ("mgpu_ops", "xla")
    for row in (ours, xla):
        assert (row.devices, row.bytes, row.dtype, row.transport) == (4, 131072, "float32", "peer")
        assert row.own_us == pytest.approx(10.0)
        assert row.around_us == pytest.approx(6.0 + 1 / 16)
        assert row.call_us == pytest.approx(40.0)
        assert row.chain_us == pytest.approx(500 + 16 * 40.0)
        assert row.bus_gbs == pytest.approx(1.5 * 131072 / 40e-6 / 1e9, rel=1e-4)
        assert row.error < 1e-6
    assert "algorithm=xla" in ours.config
    assert said == ["small: mgpu_ops 10 us of its own, 40 us a call, xla 10 us of its own, 40 us a call"]


@pytest.mark.usefixtures("cupti")
def test_a_problem_that_fails_is_said_and_told_at_the_end():
    said: list[str] = []
    problems = {"wide": CollectiveProblem(1024, 16), "good": CollectiveProblem(1024, 2, "float32")}
    rows = measured(said, **problems)
    assert said[0] == "wide: failed: ValueError: it takes 16 GPUs, and 8 are here"
    assert between.faults(rows, SPEC, problems) == ["wide: no result"]
    wrong = [dataclasses.replace(row, error=0.5) for row in rows]
    assert between.faults(wrong, SPEC, {"good": problems["good"]}) == ["good: mgpu_ops: error 0.5 is above 4.8e-07"]


def rows() -> list[Row]:
    made = []
    for devices in (2, 4):
        for size in (1024, 1 << 20, 1 << 28):
            for impl, slower in (("mgpu_ops", 1.0), ("mgpu_ops, workspace", 0.5), ("xla", 1.5)):
                us = slower * (10 + size / 3e5)
                made.append(
                    Row("all_reduce", devices, size, "bfloat16", "add", "peer", impl, "", us / 2, 6.0, us, 20 * us,
                        size / us / 1e3, 0.0, "NVIDIA H200", "1.2", "0.11.2", "2026-01-31")
                )  # fmt: skip
    return made


def test_the_file_has_a_line_for_each_row(tmp_path: Path):
    between.write_csv(rows(), tmp_path / "made" / "rows.csv")
    with (tmp_path / "made" / "rows.csv").open() as stream:
        lines = list(csv.DictReader(stream))
    assert tuple(lines[0]) == COLUMNS
    assert [line["bytes"] for line in lines[::3]] == ["1024", "1048576", "268435456"] * 2


def test_the_table_puts_ours_over_xla():
    from rich.console import Console

    console = Console(width=160)
    with console.capture() as capture:
        console.print(between.table(rows()))
    text = capture.get()
    assert "256 MiB" in text
    assert "256 MiB*" in text
    assert text.count("0.67") == text.count("0.33") == 18  # of own time, call and chain


def test_the_picture_is_drawn_as_png_and_svg(tmp_path: Path):
    paths = between.picture(rows(), tmp_path / "picture.csv")
    assert [path.suffix for path in paths] == [".png", ".svg"]
    assert all(path.stat().st_size > 10_000 for path in paths)
    with pytest.raises(ValueError, match="no rows to draw"):
        between.picture([], tmp_path / "none")


@pytest.mark.parametrize(("op", "factor"), [("all_reduce", 1.5), ("reduce_scatter", 0.75), ("all_gather", 0.75)])
def test_bus_bytes_are_what_nccl_tests_counts(op, factor):
    assert between.bus_bytes(op, 1000, 4) == factor * 1000


@pytest.mark.parametrize("kind", ["all_reduce", "reduce_scatter", "all_gather"])
def test_the_public_function_is_what_is_measured(kind):
    spec = mgpu_ops.spec_of(kind)
    problem = CollectiveProblem(64, 4, "float32")
    (x,) = shared_out(spec.inputs(problem, jax.random.key(0)), 4, first_devices(4))
    mesh = first_devices(4)
    memory = collective_workspace(mesh, "device")
    for function in (
        between.public(spec, problem, H200, "xla"),
        lambda x: between.in_workspace(spec, problem, mesh)(memory.open(), x),
    ):
        np.testing.assert_allclose(jax.jit(function)(x), spec.reference(problem, x), rtol=1e-6)


def test_what_the_tuner_left_to_xla_is_measured_so(monkeypatch):
    """A named transport would run a kernel all the same."""
    problem = CollectiveProblem(512, 2)
    entries = {"xla": CollectiveConfig("xla", 1, 2048, 2), "ll_one_shot": CollectiveConfig("ll_one_shot", 1, 2048, 2)}
    for algorithm, config in entries.items():
        found = types.SimpleNamespace(config=config)
        monkeypatch.setattr(between.resolution, "resolve", lambda *_, found=found: found)
        asked = {}
        monkeypatch.setattr(between, "_one", lambda spec, problem, asked=asked, **how: asked.update(how) or (lambda x: x))
        between.public(mgpu_ops.spec_of("all_reduce"), problem, H200)
        assert asked["transport"] == (None if algorithm == "xla" else "peer")
