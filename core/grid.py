"""Counters in global memory, by which the blocks of one launch wait for each other's results, or take turns.

All blocks must be on the GPU at one time: a launch has as many as the GPU has SMs, at most, each of which takes an SM's shared
memory. Counters begin at 0. A counter is an int32 ref [1]. The interpreter runs a block after the other and waits for none: who
waits for results has one block there, which orders its warpgroups by other means.

Sources: PTX ISA, "memory consistency model": barriers of a block pass on what a release or acquire of one thread orders.
"""

from __future__ import annotations

from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import laid_out


def arrive(counter: Any) -> None:
    """counter += 1, once what this warpgroup has stored before is there for all blocks.

    Copies from shared memory count as stored when the warpgroup has waited for them, and not only for their reads.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def add(_: Any, counter: Any) -> None:
        mosaic.warpgroup_barrier()
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            place = mosaic.memref_ptr(counter)
            mosaic.inline_ptx("red.release.gpu.global.add.u32 [$0], 1;", place, has_side_effects=True)

    add(counter)


def wait(counter: Any, count: int) -> None:
    """This warpgroup waits until a counter is at least `count`: what was stored before these arrivals is then there.

    TMA copies of it come behind `engine.global_memory_fence`.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def until(_: Any, counter: Any) -> None:
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            code = f"""{{
                .reg .pred less;
                .reg .u32 found;
                again_${{:uid}}:
                ld.acquire.gpu.global.u32 found, [$0];
                setp.lt.u32 less, found, {count};
                @less bra again_${{:uid}};
            }}"""
            mosaic.inline_ptx(code, mosaic.memref_ptr(counter), has_side_effects=True)
        mosaic.warpgroup_barrier()

    until(counter)


def take_ticket(counter: Any, slot: Any) -> None:
    """slot[0], int32 in shared memory, = counter; counter += 1. What lower tickets' warpgroups have stored before is there."""
    if interpreting():
        slot[0] = counter[0]
        counter[0] = counter[0] + 1
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def take(_: Any, counter: Any, slot: Any) -> None:
        mosaic.warpgroup_barrier()
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            word = ir.IntegerType.get_signless(32)
            code = "atom.acq_rel.gpu.global.add.u32 $0, [$1], 1;"
            ticket = mosaic.inline_ptx(code, mosaic.memref_ptr(counter), result_types=word, has_side_effects=True)
            mosaic.inline_ptx("st.shared.b32 [$0], $1;", mosaic.memref_ptr(slot), ticket, has_side_effects=True)
        mosaic.warpgroup_barrier()

    take(counter, slot)


def await_turn(counter: Any, turn: Any) -> None:
    """This warp waits until a counter is `turn`, an int32 scalar: what it then adds to global memory comes after earlier turns.

    It only orders what is added. To read what others added, a block would have to invalidate its L1, which holds spilled
    registers: `wait` does, this does not.
    """
    if interpreting():
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def until(_: Any, counter: Any, turn: Any) -> None:
        code = """{
            .reg .pred other;
            .reg .u32 found;
            AGAIN:
            ld.relaxed.gpu.global.u32 found, [$0];
            setp.ne.u32 other, found, $1;
            @other bra AGAIN;
        }"""
        mosaic.inline_ptx(code, mosaic.memref_ptr(counter), turn.registers.item(), has_side_effects=True)

    until(counter, laid_out(turn, scalar))


def give_turn(counter: Any, turn: Any) -> None:
    """counter = turn, once all is there that was added to global memory before a barrier that this warp has waited at."""
    if interpreting():
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar))
    def give(_: Any, counter: Any, turn: Any) -> None:
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARP):
            code = "st.release.gpu.global.u32 [$0], $1;"
            mosaic.inline_ptx(code, mosaic.memref_ptr(counter), turn.registers.item(), has_side_effects=True)

    give(counter, laid_out(turn, scalar))
