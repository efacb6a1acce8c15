"""Semaphores in global memory, by which the blocks of one launch take turns, as CUTLASS's `Semaphore`.

All blocks must be on the GPU at one time: a launch has as many as the GPU has SMs, at most, each of which takes an SM's shared
memory. Or each waits for blocks of lower numbers alone: the GPU starts blocks in the order of their numbers. Of the first kind
only one launch may run at a time, as two would keep each other's blocks out: by default XLA runs kernels one after the other.
A semaphore is an int32 ref [1] and begins at 0. The interpreter runs a block after the other and waits for none.

Sources: PTX ISA, "memory consistency model": barriers of a block pass on what a release or acquire of one thread orders.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import laid_out


def wait(semaphore: Any, value: Any) -> None:
    """Waits until a semaphore is `value`, an int32 scalar: what this warp then adds to global memory comes after earlier turns.

    It only orders what is added. To read what others added, a block would have to invalidate its L1, which holds spilled
    registers: this does not.
    """
    if interpreting():
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def until(_: Any, semaphore: Any, value: Any) -> None:
        code = """{
            .reg .pred other;
            .reg .u32 found;
            AGAIN:
            ld.relaxed.gpu.global.u32 found, [$0];
            setp.ne.u32 other, found, $1;
            @other bra AGAIN;
        }"""
        mosaic.inline_ptx(code, mosaic.memref_ptr(semaphore), value.registers.item(), has_side_effects=True)

    until(semaphore, laid_out(value, scalar))


def release(semaphore: Any, value: Any) -> None:
    """semaphore = value, once all is there that was added to global memory before a barrier that this warp has waited at."""
    if interpreting():
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def give(_: Any, semaphore: Any, value: Any) -> None:
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARP):
            code = "st.release.gpu.global.u32 [$0], $1;"
            mosaic.inline_ptx(code, mosaic.memref_ptr(semaphore), value.registers.item(), has_side_effects=True)

    give(semaphore, laid_out(value, scalar))
