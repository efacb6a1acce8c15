"""Kernels with `kv_splits`, compiled for an H200 that need not be there."""

from __future__ import annotations

import functools
from typing import Any

import jax
import pytest

from mgpu_ops import spec_of
from mgpu_ops.attention.problem import split_smem_bytes
from mgpu_ops.core import aot, gpu

FORWARD, H200 = spec_of("flash_attention"), gpu.find("h200")
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


def without_spills(problem: Any, config: Any) -> aot.Report:
    """What `config` compiles to: nothing spilled, no wgmma that waits for another, as much shared memory as is computed."""
    assert FORWARD.check(problem, config, H200) is None
    arrays = jax.eval_shape(functools.partial(FORWARD.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(FORWARD.run, problem, config, H200), *arrays)
    assert (report.spills, report.serialized) == (0, "")
    assert report.smem_bytes == split_smem_bytes(problem, config)
    return report
