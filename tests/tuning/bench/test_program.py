"""Steps of programs: what is told of their kernels, a layer's picture, and rows for results/."""

from __future__ import annotations

from pathlib import Path
from types import SimpleNamespace
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.profiler import ProfileData

from mgpu_ops.core import gpu as gpus
from mgpu_ops.tuning.bench import program, results
from mgpu_ops.tuning.bench.program import Kernel

LAYER = ("nvjet_sm90_tst", "loop_fusion", "cudnn_sdpa_flash_fprop")
BACK = ("cudnn_sdpa_flash_bprop_dot", "cudnn_sdpa_flash_bprop", "gemm_dgrad", "input_reduce_fusion")


def in_a_row(*names: str) -> list[Kernel]:
    """Kernels of 10 us each, one after the other."""
    return [Kernel(10.0 * i, 10.0, name) for i, name in enumerate(names)]


STEP = in_a_row(*LAYER * 3, "mgpu_ops_cross_entropy", "gemm_head", *BACK * 3)


def test_kernels_are_of_a_kind_by_their_names() -> None:
    kinds = {kernel.name: kernel.kind for kernel in STEP}
    assert kinds["nvjet_sm90_tst"] == kinds["gemm_dgrad"] == "product"
    assert kinds["cudnn_sdpa_flash_bprop_dot"] == Kernel(0.0, 1.0, "mgpu_ops_flash_attention_mosaic_gpu").kind == "attention"
    assert Kernel(0.0, 1.0, "void cudnn::fusion::convert_dq_to_16bits<true>(...)").kind == "attention"
    assert kinds["mgpu_ops_cross_entropy"] == "loss"
    assert kinds["input_reduce_fusion"] == "between"
    for name in ("mgpu_ops_ragged_contraction_mosaic_gpu_kernel", "body_mosaic_gpu_kernel"):
        assert Kernel(0.0, 1.0, name).kind == "product"


def test_a_step_s_milliseconds_are_those_of_kinds_and_gaps() -> None:
    kernels = [Kernel(0.0, 2e3, "gemm"), Kernel(1e3, 2e3, "fusion"), Kernel(4e3, 1e3, "sdpa")]  # two at once, then a gap
    told = program.kinds_ms(kernels)
    assert told == {"attention": 1.0, "loss": 0.0, "product": 2.0, "between": 2.0, "gaps": 1.0, "all": 5.0}


def test_kernels_of_one_name_are_a_line_the_longest_first() -> None:
    lines = program.kernel_table(in_a_row("fusion", "gemm", "gemm"))
    assert [line.split() for line in lines] == [
        ["20.0", "us", "2", "x", "product", "gemm"],
        ["10.0", "us", "1", "x", "between", "fusion"],
    ]


def test_a_layer_is_what_runs_between_the_ends_of_two_layers_attention() -> None:
    forward, backward = program.layers_of(STEP, 3)
    assert tuple(kernel.name for kernel in forward) == LAYER
    assert tuple(kernel.name for kernel in backward) == ("gemm_dgrad", "input_reduce_fusion", *BACK[:2])


@pytest.mark.parametrize("layers", [1, 2, 4])
def test_a_step_of_another_number_of_layers_is_told(layers: int) -> None:
    with pytest.raises(ValueError, match=f"6 runs of attention in a step of {layers} layers"):
        program.layers_of(STEP, layers)


def test_kernels_are_read_from_the_streams_of_a_profile() -> None:
    text = """
    planes { name: "/host:CPU" lines { name: "Stream #1" events { metadata_id: 1 offset_ps: 5000000 duration_ps: 1000000 } }
             event_metadata { key: 1 value { id: 1 name: "on the host" } } }
    planes { name: "/device:GPU:0"
      lines { name: "XLA Ops" events { metadata_id: 1 offset_ps: 5000000 duration_ps: 1000000 } }
      lines { name: "Stream #7(Compute)" timestamp_ns: 1000 events { metadata_id: 1 offset_ps: 5000000 duration_ps: 2000000 } }
      event_metadata { key: 1 value { id: 1 name: "gemm" } } }
    """
    profile = ProfileData.from_serialized_xspace(ProfileData.text_proto_to_serialized_xspace(text))
    assert program.kernels_in(profile) == [Kernel(6.0, 2.0, "gemm")]


def test_a_layer_is_drawn_for_each_backend(tmp_path: Path) -> None:
    pictures = program.draw_layer({"xla": STEP, "mgpu_ops": STEP}, 3, "One layer", tmp_path / "layer")
    assert pictures[0].read_bytes().startswith(b"\x89PNG")


def test_memory_counts_what_is_donated_once() -> None:
    grown = jax.jit(lambda x: x + 1, donate_argnums=0).lower(jnp.zeros(1000)).compile().memory_analysis()
    assert program.peak_bytes(grown) == pytest.approx(4000, abs=64)
    sizes = {"argument": 10, "output": 7, "temp": 5, "alias": 7}
    memory: Any = SimpleNamespace(**{f"{name}_size_in_bytes": size for name, size in sizes.items()})
    assert program.peak_bytes(memory) == 15


def test_rows_are_of_the_ops_that_two_backends_ran_and_join_those_of_the_file(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(gpus, "current", lambda: gpus.find("h200"))
    path = tmp_path / "rows.csv"
    ops = {"llama-step": {"xla": "xla", "mgpu_ops": "mgpu_ops"}, "llama-fp8-step": {"xla": "xla", "fp8": "mgpu_ops"}}
    for problem in ("8-tokens", "16-tokens"):  # each time a benchmark of its own
        bench = program.Bench(rounds=2, csv=path)
        step = jax.jit(lambda x: x + 1)
        programs = bench.compiled({"xla": step, "mgpu_ops": step}, dict.fromkeys(("xla", "mgpu_ops"), (jnp.zeros(8),)))
        calls = {name: lambda of=of: of.step(jnp.zeros(8)) for name, of in programs.items()}
        bench.measure(ops, problem, (1e6, 2e6), programs, calls, {"xla": 0.0, "mgpu_ops": 1e-3}, queued=2)
    rows = results.read_csv(path)
    assert [(row.op, row.problem, row.impl, row.error) for row in rows] == [
        ("llama-step", problem, *of) for problem in ("8-tokens", "16-tokens") for of in (("xla", 0.0), ("mgpu_ops", 1e-3))
    ]
    assert {row.peak_bytes for row in rows} == {64}
    assert all(row.tflops == pytest.approx(1 / row.median_us, rel=1e-4) for row in rows)
    assert [each.problem for each in results.comparisons(rows)] == ["8-tokens", "16-tokens"]
    assert "x of xla" in capsys.readouterr().out
