"""`mgpu-tune profile` on a machine without a GPU, and what it writes of a trace."""

from __future__ import annotations

import json
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from mgpu_ops.core import gpu
from mgpu_ops.tuning.bench import timeline

Command = Callable[..., Any]
H200 = gpu.find("h200")
SPAN = timeline.Span
BLOCK = timeline.Block(
    3,
    17,
    ((SPAN("wait", 0, 20), SPAN("multiply", 20, 90), SPAN("store", 90, 100)), (SPAN("load", 0, 40), SPAN("wait", 40, 100))),
)


def test_without_a_gpu_it_says_what_it_needs(mgpu_tune: Command) -> None:
    done = mgpu_tune("profile", "matmul", "--shape", "square-2048")
    assert done.code == 2
    assert done.err.startswith("mgpu-tune: profile records a kernel while it runs: it needs a Hopper GPU here")


@pytest.fixture
def recorded(monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    """A GPU, on which every kernel leaves the same trace and has room for half of the ranges."""

    def record(spec: Any, problem: Any, config: Any, here: gpu.Gpu, ranges: int) -> Any:
        return [timeline.Timeline(f"mgpu_ops_{spec.name}", (BLOCK,))], config, ranges // 2

    monkeypatch.setattr(timeline, "record", record)
    monkeypatch.setattr(gpu, "current", lambda: H200)
    monkeypatch.chdir(tmp_path)


def test_it_writes_a_picture_and_a_trace_and_tells_the_shares(recorded: None, mgpu_tune: Command, tmp_path: Path) -> None:
    done = mgpu_tune("profile", "matmul", "--shape", "square-2048", "--ranges", 256, "--json")
    assert done.code == 0, done.err
    told = json.loads(done.out)
    assert (told["op"], told["gpu"], told["ranges"]) == ("matmul", "h200", 128)
    (kernel,) = told["kernels"]
    assert kernel["shares"][0] == pytest.approx({"multiply": 0.7, "wait": 0.2, "store": 0.1, "other": 0.0}, abs=1e-9)
    assert "consumer 0   multiply 70.0%  wait 20.0%  store 10.0%" in done.err
    assert "producer     wait 60.0%  load 40.0%" in done.err
    (trace,) = tmp_path.glob("results/*-h200-matmul-timeline.json")
    assert kernel["trace"] == str(trace.relative_to(tmp_path))
    assert {path.suffix for path in trace.parent.iterdir()} == {".json", ".png", ".svg"}
    assert len([e for e in json.loads(trace.read_text())["traceEvents"] if e["ph"] == "X"]) == 5


@pytest.mark.parametrize(
    ("words", "message"),
    [
        (("all_reduce", "--shape", "2x1KiB"), "profile records kernels of one GPU, and all_reduce runs on 2"),
        (("matmul", "--m", 8, "--n", 8, "--k", 100), "no kernel runs matmul"),
        (("matmul", "--shape", "square-2048", "--ranges", 8), "--ranges 8 tells nothing: record 32 at least"),
        (("matmul",), "name the problem in one way"),
    ],
)
def test_what_cannot_be_recorded_is_told(words: tuple[Any, ...], message: str, recorded: None, mgpu_tune: Command) -> None:
    done = mgpu_tune("profile", *words)
    assert done.code == 2
    assert message in done.err
