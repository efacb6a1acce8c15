"""The table and the picture of benchmark results."""

from __future__ import annotations

import dataclasses
import math
import xml.etree.ElementTree as ElementTree
from pathlib import Path
from typing import Any

import pytest
from rich.console import Console

from mgpu_ops import SPECS
from mgpu_ops.tuning import labels
from mgpu_ops.tuning.bench import report, results
from mgpu_ops.tuning.bench.results import Measurement


def rows(problem: str = "square 64x64x64 bfloat16 nn", **changes: Any) -> list[Measurement]:
    """Ours at 10 us, XLA at 12, JAX's at 9, and a roofline of 8."""
    times = {"mgpu_ops": 10.0, "xla": 12.0, "jax-pallas": 9.0, "roofline": 8.0}
    fields: dict[str, Any] = {
        "op": "matmul",
        "problem": problem,
        "config": "c",
        "spread_us": 0.1,
        "gbs": 100.0,
        "error": 0.001,
        "gpu": "NVIDIA H200",
        "driver": "570.86.15",
        "jax": "0.11.2",
        "date": "2025-01-31",
    }
    return [
        Measurement(**fields | {"impl": impl, "median_us": us, "tflops": 5000 / us} | changes) for impl, us in times.items()
    ]


def text(of: list[Measurement]) -> str:
    console = Console(width=200, record=True, quiet=True)
    console.print(report.table(of))
    with console.capture() as capture:
        console.quiet = False
        console.print(report.table(of))
    return capture.get()


def cells(of: list[Measurement], first: str) -> list[str]:
    line = next(line for line in text(of).splitlines() if first in line)
    return [cell.strip() for cell in line.strip("│").split("│")]


def test_a_line_has_our_time_rate_share_of_the_roofline_and_the_ratios() -> None:
    assert cells(rows(), "square 64") == [
        *("square 64x64x64 bfloat16 nn", "10.00", "500.0", "80%"),
        *("1.20", "0.90", "0.90"),
    ]


def test_the_best_competitor_is_another_one_on_another_problem() -> None:
    xla_is_best = [dataclasses.replace(r, median_us=11.0) if r.impl == "jax-pallas" else r for r in rows("other", op="matmul")]
    slower = [dataclasses.replace(r, median_us=10.5) if r.impl == "xla" else r for r in xla_is_best]
    assert cells(rows() + slower, "other")[4:] == ["1.05", "1.10", "1.05"]
    assert "x best competitor" in text(rows())
    assert "best" not in text([r for r in rows() if r.impl != "xla"])


def test_a_yardstick_is_no_competitor_and_never_wrong() -> None:
    """Its result is another one on purpose: it has no error, the best competitor is not it, and its column says "of"."""
    dense = dataclasses.replace(rows()[1], impl="dense", median_us=5.0, error=None)
    assert cells([*rows(), dense], "square 64")[4:] == ["1.20", "0.90", "0.90", "0.50"]
    headings = next(line for line in text([*rows(), dense]).splitlines() if "TFLOP/s" in line)
    assert [h.strip() for h in headings.strip("┃").split("┃")][4:] == ["x xla", "x jax-pallas", "x best competitor", "of dense"]
    assert cells([*rows(), dense], "geometric mean")[-2:] == ["0.90", "0.50"]


def test_the_last_line_has_the_geometric_means() -> None:
    slower = [r for r in rows("other") if r.impl in ("mgpu_ops", "jax-pallas")]
    assert cells(rows() + slower, "geometric mean")[-3:] == ["1.20", "0.90", "0.90"]


def test_the_title_tells_gpu_driver_jax_and_date() -> None:
    assert "matmul on NVIDIA H200 | driver 570.86.15 | jax 0.11.2 | 2025-01-31" in text(rows())
    assert "driver unknown" in text(rows(driver=""))


def test_what_did_not_run_is_a_dash() -> None:
    assert cells([r for r in rows() if r.impl == "xla"], "square 64")[1:] == ["-", "-", "-", "-"]
    two = [r for r in rows("other") if r.impl == "mgpu_ops"]
    assert cells(rows() + two, "other")[-3:] == ["-", "-", "-"]


@pytest.mark.parametrize("error", [math.nan, math.inf, 0.5])
def test_a_wrong_result_shows_and_has_no_time(error: float) -> None:
    ours = rows(error=error)[:1] + rows()[1:]
    assert cells(ours, "square 64")[1:] == [f"wrong ({error:.2g})", "-", "-", "-", "-", "-"]
    theirs = [rows()[0], *rows(error=error)[1:2], *rows()[2:]]
    assert cells(theirs, "square 64")[4:] == [f"wrong ({error:.2g})", "0.90", "0.90"]


def test_lines_of_two_ops_or_gpus_are_told_apart() -> None:
    several = rows() + rows(op="matmul+grad", gpu="NVIDIA H100")
    assert "matmul+grad square 64x64x64 bfloat16 nn (NVIDIA H100)" in text(several)


def test_many_digits_have_no_exponent() -> None:
    long = [Measurement(**{**vars(r), "median_us": r.median_us * 12345}) for r in rows()]
    assert cells(long, "square 64")[1] == "123450"


def sustained(problem: str = "llama3-8b-qkv-8192 8192x6144x4096 bfloat16 nn", **changes: Any) -> list[Measurement]:
    """Ours takes 0.7 J at 700 W, XLA 0.77."""
    joules = {"mgpu_ops": 0.7, "xla": 0.77}
    found = rows(problem, op="matmul-sustained", **changes)[:2]
    return [dataclasses.replace(row, watts=700.0, clock_mhz=1400.0, joules=joules[row.impl]) for row in found]


def test_what_ran_without_pause_has_watts_and_a_ratio_of_energy() -> None:
    headings = next(line for line in text(sustained()).splitlines() if "problem" in line)
    assert [h.strip() for h in headings.strip("┃").split("┃")] == [
        "problem",
        "us",
        "TFLOP/s",
        "roofline",
        "W",
        "x xla",
        "x J xla",
    ]
    assert cells(sustained(), "8192x6144")[-3:] == ["700.0", "1.20", "1.10"]
    assert cells([*sustained(), *rows()[:2]], "square 64")[-2:] == ["1.20", "-"]


def test_the_picture_of_what_ran_without_pause_has_the_ratios_of_time_and_energy(tmp_path: Path) -> None:
    several = [*sustained(), *sustained("8192x4096x4096 bfloat16 nn"), *rows()]
    drawn = report.picture(several, tmp_path / "p.png")[1].read_text()
    for told in ("time of xla over ours", "energy of xla over ours", "above 1 ours takes less", "700 W"):
        assert drawn.count(f"<!-- {told} -->") + drawn.count(told) >= 1, told
    without = [dataclasses.replace(row, watts=None, joules=None) for row in sustained()]
    assert report.picture(without, tmp_path / "q.png")


def between(size: int = 1024, op: str = "all_reduce", devices: int = 2, **changes: Any) -> list[Measurement]:
    """Ours, with a workspace and without, and XLA's of a payload."""
    text = f"{devices}x{size}B {size // 2}x{devices} bfloat16"
    fields: dict[str, Any] = {"op": op, "problem": text, "devices": devices, "bytes": size, "own_us": 4.0, "chain_us": 300.0}
    (ours, xla, *_) = rows(**fields | {"bus_gbs": size / 1e4, "tflops": 1e-4} | changes)
    return [ours, dataclasses.replace(ours, impl="mgpu_ops, workspace", median_us=5.0), xla]


def test_a_collective_has_a_bus_bandwidth_and_its_kernels_time_in_place_of_a_rate() -> None:
    headings = next(line for line in text(between()).splitlines() if "problem" in line)
    assert [h.strip() for h in headings.strip("┃").split("┃")] == ["problem", "us", "kernels us", "bus GB/s", "x xla"]
    assert cells(between(), "2x1024B 512x2 bfloat16 (workspace)")[1:] == ["5.000", "4.000", "0.1024", "2.40"]
    both = text([*between(), *rows()])
    assert "TFLOP/s" in both
    assert "bus GB/s" in both


def test_the_picture_of_a_collective_is_time_and_bandwidth_against_the_payload(tmp_path: Path) -> None:
    many = [row for size in (1024, 2**20, 2**28) for n in (2, 4) for row in between(size, devices=n)]
    _, svg = report.picture(many, tmp_path / "bench.png")
    told = svg.read_text()
    for word in ("time (us)", "bus bandwidth (GB/s)", "payload on each GPU", "256 MiB", "mgpu_ops, workspace, a call"):
        assert f"<!-- {word} -->" in told
    for n in (2, 4):
        assert f"<!-- all_reduce, {n} GPUs: time (us) -->" in told
    assert "TFLOP/s" not in told


def test_a_wrong_result_of_a_collective_is_left_out_of_the_picture_and_counted(tmp_path: Path) -> None:
    wrong = [dataclasses.replace(row, error=0.5) if row.impl == "xla" else row for row in between()]
    assert "1 wrong results are left out" in report.picture(wrong, tmp_path / "a")[1].read_text()
    assert report.picture(between(error=math.nan, own_us=None), tmp_path / "b")


def test_collectives_and_others_are_not_drawn_in_one_unit(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="draw them apart"):
        report.picture([*between(), *rows()], tmp_path / "bench")


def test_problems_stand_by_model_or_head_dim_and_by_size_whatever_their_order_was() -> None:
    matmul, attention = SPECS["matmul"], SPECS["flash_attention"]
    names = ["square-2048", "square-16384", "llama3-8b-qkv-128", "llama3-8b-qkv-4096", "llama3-70b-qkv-128"]
    wanted = [labels.label(matmul, name, matmul.shapes[name]) for name in names] + ["64x8x8 bfloat16 nn", "128x8x8 bfloat16 nn"]
    names = ["gpt2-1024-causal", "mha64-4096", "mha128-4096", "llama3-8b-512-causal", "llama3-8b-8192-causal", "mha256-4096"]
    heads = [labels.label(attention, name, attention.shapes[name]) for name in names]
    both = [row for text in heads for row in rows(text, op="flash_attention")] + [row for text in wanted for row in rows(text)]
    for shuffled in (both, both[::-1]):
        found = report.ordered(results.comparisons(shuffled))
        assert [line.problem for line in found] == wanted + heads
        assert [report.group(line) for line in found[:7]] == ["square"] * 2 + ["llama3-8b"] * 2 + ["llama3-70b", "", ""]
        groups = [f"head dim {d}" for d in (64, 64, 128, 128, 128, 256)]
        assert [report.group(line) for line in found[7:]] == groups


def test_a_group_stays_in_one_panel_where_it_fits() -> None:
    shapes = SPECS["matmul"].shapes
    names = [name for name in shapes if name.startswith(("square", "llama3")) and not name.endswith(("da", "db"))]
    many = [row for name in names for row in rows(labels.label(SPECS["matmul"], name, shapes[name]))]
    panels = report._panels(report.ordered(results.comparisons(many)))
    assert [{report.group(line) for line in panel} for panel in panels] == [{"square", "llama3-8b"}, {"llama3-70b"}]
    many = [row for i in range(40) for row in rows(f"{i}x8x8 bfloat16 nn")]
    assert [len(panel) for panel in report._panels(report.ordered(results.comparisons(many)))] == [14, 14, 12]


def test_a_picture_tells_implementations_apart_without_colours_and_names_its_axes(tmp_path: Path) -> None:
    told = report.picture(rows(), tmp_path / "bench")[1].read_text()
    assert "<!-- problem -->" in told
    assert "<!-- TFLOP/s -->" in told
    assert told.count("<pattern") == 2  # of the competitors; ours is plain


def test_the_same_rows_give_the_same_picture(tmp_path: Path) -> None:
    first, again = (report.picture(rows(), tmp_path / name)[1].read_bytes() for name in "ab")
    assert first == again


def test_a_picture_shows_names_as_text(tmp_path: Path) -> None:
    evil = "\x1b[2J\x00\n$x$ <b>"
    svg = report.picture(rows(evil, gpu=evil, op=evil), tmp_path / "bench")[1]
    assert r"\x1b[2J\x00\n$x$" in svg.read_text()
    ElementTree.fromstring(svg.read_text())


def written(path: Path) -> bool:
    return path.stat().st_size > 5000


@pytest.mark.parametrize("count", [1, 28])
def test_the_picture_is_written_as_png_and_svg(tmp_path: Path, count: int) -> None:
    many = [r for i in range(count) for r in rows(f"shape-{i} {i}x64x64 bfloat16 nn")]
    png, svg = report.picture(many, tmp_path / "new" / "bench.png")
    assert png.read_bytes().startswith(b"\x89PNG")
    assert "</svg>" in svg.read_text()
    assert written(png)
    assert written(svg)


def test_the_picture_copes_with_wrong_and_missing_results(tmp_path: Path) -> None:
    some = rows(error=math.nan) + rows("other")[1:] + rows("third", op="matmul+grad")[:1]
    assert all(written(path) for path in report.picture(some, tmp_path / "bench"))


def test_what_all_problems_of_a_panel_share_is_told_once() -> None:
    sizes = ("64x32x16 g=8 bfloat16 nn random", "32x32x16 g=8 bfloat16 nn even")
    panel = results.comparisons([*rows(f"moe-1 {sizes[0]}"), *rows(f"moe-2 {sizes[1]}")])
    shared = report._shared(panel)
    assert shared == ["g=8", "bfloat16", "nn"]
    assert [report._tick(line, shared) for line in panel] == ["moe-1\n64x32x16 random", "moe-2\n32x32x16 even"]
    assert [report._tick(line, report._shared([line])) for line in panel[:1]] == ["moe-1"]


def test_a_result_file_with_dots_in_its_name_keeps_them(tmp_path: Path) -> None:
    paths = report.picture(rows(), tmp_path / "jax-0.12.png")
    assert [path.name for path in paths] == ["jax-0.12.png", "jax-0.12.svg"]


def test_a_picture_of_nothing_is_refused(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rows to draw"):
        report.picture([], tmp_path / "bench.png")
