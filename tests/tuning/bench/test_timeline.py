"""Traces of recorded kernels: read, summed up, drawn and written. The trace is made as Mosaic GPU writes it."""

from __future__ import annotations

import json
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.tuning.bench import timeline

Image = pytest.importorskip("PIL.Image")  # comes with matplotlib, which draws
Range = tuple[str, float, float]  # region, begin, end in cycles


def events(ranges: Iterable[Range], sm: int, thread: int, start: float = 5e6) -> list[dict[str, Any]]:
    """Begin and end events of ranges, which may lie within each other, in the order of time."""
    at = {"pid": 1 + sm, "tid": 1 + thread}
    both = [(end, 0, name, "E") for name, _, end in ranges] + [(begin, 1, name, "B") for name, begin, _ in ranges]
    return [{"name": name, "ph": ph, "ts": (start + t) / 1e3, **at} for t, _, name, ph in sorted(both)]


CONSUMER = [("Init", 0, 10), ("wait", 10, 30), ("multiply", 30, 80), ("store", 80, 90)]
PRODUCER = [("Init", 0, 10), ("load", 20, 60), ("wait", 60, 120)]
BUSY = [("Init", 0, 10), ("wait", 10, 20), ("multiply", 20, 95), ("store", 95, 100)]


@pytest.fixture
def trace(tmp_path: Path) -> Path:
    """Three blocks of two warpgroups; the third block has lost its producer."""
    told = [
        *events(CONSUMER, sm=7, thread=0),
        *events(PRODUCER, sm=7, thread=1, start=5e6 + 400),  # whose clock says otherwise
        *events(BUSY, sm=9, thread=2),
        *events(PRODUCER, sm=9, thread=3),
        *events(CONSUMER, sm=11, thread=4),
    ]
    path = tmp_path / "mgpu_ops_matmul-123-trace.json"
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": told}))
    return path


def test_a_trace_has_the_blocks_whose_warpgroups_are_all_there(trace: Path) -> None:
    found = timeline.read(trace, "mgpu_ops_matmul", 2)
    assert [(b.number, b.sm, round(b.cycles)) for b in found.blocks] == [(0, 7, 90), (1, 9, 100)]
    consumer, producer = found.blocks[0].warpgroups
    assert [(s.region, pytest.approx(s.start), pytest.approx(s.end)) for s in consumer][1:] == CONSUMER[1:]
    assert producer[1].region == "load"
    assert producer[1].start == pytest.approx(20)  # from its own first range
    assert [timeline.role(i, found.blocks[0]) for i in range(2)] == ["consumer 0", "producer"]


def test_shares_are_of_the_time_that_all_warpgroups_recorded(trace: Path) -> None:
    consumer, producer = timeline.read(trace, "mgpu_ops_matmul", 2).blocks[0].shares()
    assert list(consumer) == ["multiply", "wait", "other", "store"]  # the largest first
    assert consumer == pytest.approx({"multiply": 5 / 9, "wait": 2 / 9, "other": 1 / 9, "store": 1 / 9}, abs=1e-6)
    assert producer == pytest.approx({"load": 4 / 9, "wait": 3 / 9, "other": 2 / 9}, abs=1e-6)  # it ends at 90


def test_of_ranges_within_each_other_the_innermost_has_the_time(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(json.dumps({"traceEvents": events([("store", 0, 100), ("wait", 20, 50)], 0, 0)}))
    (block,) = timeline.read(path, "k", 1).blocks
    assert block.shares() == [pytest.approx({"store": 0.7, "wait": 0.3, "other": 0.0}, abs=1e-6)]


def test_the_typical_block_is_the_one_in_the_middle(tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    told = [event for i, ranges in enumerate((BUSY, CONSUMER, BUSY)) for event in events(ranges, i, i * 2)]
    told += [event for i in range(3) for event in events(PRODUCER, i, i * 2 + 1)]
    path.write_text(json.dumps({"traceEvents": told}))
    assert timeline.read(path, "k", 2).typical().number == 0


@pytest.mark.parametrize(
    "text",
    [
        "",
        "[]",
        "{}",
        '{"traceEvents": [{"name": "wait"}]}',
        '{"traceEvents": [{"name": "wait", "ph": "E", "ts": 1, "pid": 1, "tid": 1}]}',
        '{"traceEvents": [{"name": "wait", "ph": "B", "ts": 1, "pid": 1, "tid": 1}]}',
        '{"traceEvents": []}',
    ],
)
def test_what_is_no_trace_is_told_with_its_path(text: str, tmp_path: Path) -> None:
    path = tmp_path / "t.json"
    path.write_text(text)
    with pytest.raises(timeline.TraceError, match=r"t\.json"):
        timeline.read(path, "k", 1)


def test_perfetto_gets_blocks_as_processes_and_warpgroups_as_threads(trace: Path, tmp_path: Path) -> None:
    path = tmp_path / "out.json"
    timeline.write_perfetto(timeline.read(trace, "mgpu_ops_matmul", 2), path, blocks=1)
    told = json.loads(path.read_text())["traceEvents"]
    assert [e["args"]["name"] for e in told if e["ph"] == "M"] == ["mgpu_ops_matmul block 0, SM 7", "consumer 0", "producer"]
    (multiply,) = (e for e in told if e["name"] == "multiply")
    assert (multiply["ts"], multiply["dur"]) == (pytest.approx(0.030), pytest.approx(0.050))
    assert {e["pid"] for e in told} == {0}


def test_the_picture_shows_each_region_in_its_colour_as_long_as_it_took(trace: Path, tmp_path: Path) -> None:
    found = timeline.read(trace, "mgpu_ops_matmul", 2)
    paths = timeline.draw(found, "a title", tmp_path / "picture")
    assert {path.suffix for path in paths} == {".png", ".svg"}
    picture = Image.open(tmp_path / "picture.png").convert("RGB")
    colors = {name: tuple(int(c[i : i + 2], 16) for i in (1, 3, 5)) for name, c in timeline.COLORS.items()}
    counts = {color: n for n, color in picture.getcolors(2**24)}
    (consumer, producer) = found.typical().shares()
    seen = {name: counts.get(colors[name], 0) for name in ("multiply", "load")}
    assert seen["multiply"] / seen["load"] == pytest.approx(consumer["multiply"] / producer["load"], rel=0.15)


def test_a_record_that_does_not_fit_is_shortened_before_the_config_is_changed() -> None:
    h200, spec = gpu.find("h200"), mgpu_ops.spec_of("matmul")
    problem = mgpu_ops.MatmulProblem(4096, 4096, 4096)
    config = spec.default(problem, h200)
    tried = list(timeline._attempts(spec, problem, config, h200, 128))
    assert tried[:4] == [(config, 128), (config, 64), (config, 32), (tried[3][0], 128)]
    assert tried[3][0].max_concurrent_steps == config.max_concurrent_steps - 1
    assert all(spec.check(problem, one, h200) is None for one, _ in tried)


@pytest.mark.gpu
@pytest.mark.parametrize(
    "op", ["matmul", "grouped_matmul", "ragged_contraction", "flash_attention", "flash_attention_backward"]
)
def test_kernels_are_recorded(op: str, tmp_path: Path) -> None:
    here, spec = gpu.current(), mgpu_ops.spec_of(op)
    assert here is not None
    problem = next(iter(spec.shapes.values()))
    traces, _, _ = timeline.record(spec, problem, spec.default(problem, here), here, 256)
    for trace in traces:
        assert len(trace.blocks) > here.sms // 2
        for one in trace.typical().shares()[:-1]:
            assert one["multiply"] > 0.1
            assert one.get("other", 0.0) < 0.6
        assert trace.typical().shares()[-1].keys() >= {"load", "wait"}
        assert timeline.draw(trace, op, tmp_path / trace.kernel)
