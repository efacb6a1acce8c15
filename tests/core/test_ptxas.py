"""Versions of ptxas that miscompile are named, once, to those whose kernels they may hit."""

from __future__ import annotations

import logging
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import pytest

from mgpu_ops import core
from mgpu_ops.core import aot, ptxas


@pytest.fixture
def said(monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture) -> Iterator[Any]:
    """What was logged, in a process that has a ptxas of CUDA 13.0 and has traced no kernel yet."""
    monkeypatch.setattr(ptxas, "isa", lambda: 90)
    ptxas.warn_of_register_operands.cache_clear()
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        yield lambda: [record.getMessage() for record in caplog.records]
    ptxas.warn_of_register_operands.cache_clear()


@pytest.mark.parametrize(("isa", "name"), [(80, "8.0"), (88, "8.8"), (90, "9.0"), (92, "9.2")])
def test_a_ptxas_before_cuda_13_3_is_named_with_the_way_out(isa, name):
    reason = ptxas.register_operand_bug(isa)
    assert f"PTX ISA {name}," in reason
    assert "nvidia-cuda-nvcc" in reason


@pytest.mark.parametrize("isa", [93, 95, 100])
def test_a_ptxas_from_cuda_13_3_on_is_fine(isa):
    assert ptxas.register_operand_bug(isa) is None


def trace(*, registers: bool) -> None:
    """A kernel with one wgmma, whose first operand comes from registers or from shared memory."""

    def body(out_ref: Any, *, a: Any, acc: Any) -> None:
        def multiply(acc: Any) -> None:
            core.wgmma(acc, jnp.zeros((64, 64), jnp.bfloat16) if registers else a, a)
            out_ref[...] = acc[...]

        acc.scope(multiply)

    tile = core.SMEM((64, 64), jnp.bfloat16, transforms=core.operand_transforms(64, jnp.bfloat16))
    launch = core.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((64, 64), jnp.float32),
        scratch_types={"a": tile, "acc": core.Accumulators(((64, 64),), 1)},
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        name="test",
    )
    jax.eval_shape(launch)


def test_kernels_with_operands_in_registers_warn_once(said):
    for _ in range(2):
        trace(registers=True)
    assert said() == [ptxas.register_operand_bug(90)]


def test_kernels_with_operands_in_shared_memory_do_not_warn(said):
    trace(registers=False)
    assert said() == []


@pytest.mark.parametrize("isa", [93, None])
def test_a_fixed_ptxas_and_none_at_all_do_not_warn(said, monkeypatch, isa):
    monkeypatch.setattr(ptxas, "isa", lambda: isa)
    trace(registers=True)
    assert said() == []


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_mosaics_ptxas_is_asked():
    assert ptxas.isa() >= 80
