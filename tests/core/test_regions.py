"""Regions of a kernel's time: which ones a recorded kernel has, and that the others are traced as if there were none."""

from __future__ import annotations

import functools
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import pytest
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.mosaic.gpu import profiler

import mgpu_ops
from mgpu_ops.core import gpu, regions

H200 = gpu.find("h200")
PROBLEMS: dict[str, Any] = {
    "matmul": mgpu_ops.MatmulProblem(512, 512, 512),
    "grouped_matmul": mgpu_ops.GroupedMatmulProblem(512, 512, 256, 4),
    "ragged_contraction": mgpu_ops.RaggedContractionProblem(512, 512, 256, 4),
    "flash_attention": mgpu_ops.FlashAttentionProblem(1, 512, 512, 4, 4, 64, causal=True),
    "flash_attention_backward": mgpu_ops.spec_of("flash_attention_backward").Problem(1, 512, 512, 4, 4, 64, causal=True),
}
ALWAYS = {"load", "wait", "multiply", "store"}


@pytest.fixture
def lowered(monkeypatch: pytest.MonkeyPatch) -> Callable[[str], tuple[list[bytes], list[set[str]]]]:
    """Lowers an op's default config: the text of its kernels, and the regions of those that are recorded."""
    monkeypatch.setattr(jax.debug, "callback", lambda *_, **__: None)  # takes the trace off the GPU, which is not here
    made: list[profiler.ProfilerSpec] = []
    init = profiler.ProfilerSpec.__init__

    def kept(self: profiler.ProfilerSpec, *args: Any, **options: Any) -> None:
        init(self, *args, **options)
        made.append(self)

    monkeypatch.setattr(profiler.ProfilerSpec, "__init__", kept)

    def lower(op: str) -> tuple[list[bytes], list[set[str]]]:
        spec, problem = mgpu_ops.spec_of(op), PROBLEMS[op]
        made.clear()
        monkeypatch.setattr(mosaic, "KNOWN_KERNELS", {})
        shapes = jax.eval_shape(functools.partial(spec.inputs, problem), jax.random.key(0))
        run = functools.partial(spec.run, problem, spec.default(problem, H200), H200)
        with gpu.target(H200):
            jax.jit(lambda *arrays: run(*arrays)).trace(*shapes).lower(lowering_platforms=("cuda",))
        return list(mosaic.KNOWN_KERNELS.values()), [set(one.interned_names) - {"Init"} for one in made]

    return lower


@pytest.mark.parametrize("op", PROBLEMS)
def test_a_recorded_kernel_has_regions_and_the_next_one_none(op: str, lowered: Callable[..., Any], tmp_path: Path) -> None:
    before, names = lowered(op)
    assert names == []
    with regions.recorded(tmp_path, ranges=64) as kernels:
        recorded, names = lowered(op)
    attention = op.startswith("flash_attention")
    assert names
    # The kernels ahead of dk/dv and that round dq have one warpgroup and multiply nothing. They are lowered in another order.
    kernels = [kernel for kernel in kernels if not kernel.name.endswith(("prepare", "round_dq"))]
    names = [found for found in names if "multiply" in found]
    assert len(names) == len(kernels)
    assert all(found == ALWAYS | ({"softmax"} if attention else set()) <= set(regions.REGIONS) for found in names)
    assert [kernel.name for kernel in kernels] == [f"mgpu_ops_{op}"] * len(names) or attention
    assert all(kernel.warpgroups >= 2 for kernel in kernels)
    assert lowered(op)[0] == before != recorded


def test_a_record_that_does_not_fit_is_refused_when_the_kernel_is_lowered(lowered: Callable[..., Any], tmp_path: Path) -> None:
    with regions.recorded(tmp_path, ranges=2**13), pytest.raises(ValueError, match="exceeds available shared memory"):
        lowered("matmul")
