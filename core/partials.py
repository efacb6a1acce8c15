"""Sums of parts of k of output tiles, which the blocks of a kernel leave for each other in global memory.

A thread reads what the same thread of another block's warpgroup wrote, so that the order of values is that of its registers.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Sequence
from typing import Any

import jax
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32
from mgpu_ops.core.tile_scheduler import Int

_CHUNK = 16  # bytes that a thread stores at once; those of a warpgroup lie side by side
_THREADS = 128


@dataclasses.dataclass(frozen=True)
class Partials:
    """What warpgroups leave: each once in a kernel, in the place of its number, for another one to add up.

    values: float32 [places, tiles, 64 * columns of a tile]. arrived: int32 [places], zeros when the kernel starts. Both are
    refs in global memory. A warpgroup waits for places of the warpgroup of its own number, of blocks that run at the same time
    or before.
    """

    values: Any
    arrived: Any

    def leave(self, place: Int, tiles: Sequence[jax.Array]) -> None:
        """Stores tiles [64, columns] in wgmma's layout, and says that they are there."""
        for number, tile in enumerate(tiles):
            _store(tile, self.values.at[place], number)
        if not interpreting():  # which runs one cluster after another
            _signal(self.arrived.at[place])

    def wait(self, place: Int) -> None:
        """Waits until a place is filled."""
        if not interpreting():
            _wait(self.arrived.at[place])

    def add(self, tile: jax.Array, number: int, place: Int) -> jax.Array:
        """tile + tile `number` of a place that was waited for."""
        return _add(tile, self.values.at[place], number)


def _store(tile: jax.Array, ref: Any, number: int) -> None:
    if interpreting():
        ref[number] = tile.reshape(-1)
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, tile: Any, ref: Any) -> None:
        for address, offset, pair in _chunks(tile, ref, number):
            words = [mosaic.bitcast(register, ir.IntegerType.get_signless(64)) for register in pair]
            mosaic.inline_ptx(f"st.global.v2.b64 [$0+{offset}], {{$1, $2}};", address, *words, has_side_effects=True)

    store(tile, ref)


def _add(tile: jax.Array, ref: Any, number: int) -> jax.Array:
    if interpreting():
        return tile + ref[number].reshape(tile.shape)
    layout = plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(
        arg_types=(layout, plgpu.RefType()), return_type=plgpu.ShapeDtypeStruct(tile.shape, tile.dtype, layout=layout)
    )
    def add(_: Any, tile: Any, ref: Any) -> Any:
        i64 = ir.IntegerType.get_signless(64)
        loaded = []
        for address, offset, pair in _chunks(tile, ref, number):
            words = mosaic.inline_ptx(
                f"ld.global.v2.b64 {{$0, $1}}, [$2+{offset}];", address, result_types=[i64, i64], has_side_effects=True
            )
            loaded += [mosaic.bitcast(word, register.type) for word, register in zip(words, pair, strict=True)]
        registers = np.empty_like(tile.registers)
        for i, (own, other) in enumerate(zip(tile.registers.flat, loaded, strict=True)):
            registers.flat[i] = arith.addf(own, other)
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    added: jax.Array = add(tile, ref)
    return added


def _chunks(tile: Any, ref: Any, number: int) -> list[tuple[Any, int, list[Any]]]:
    """Of each chunk of a thread in tile `number`: an address, the offset from it in bytes, and two pairs of registers.

    All tiles of a place have one address, so that few registers are taken beside the sums.
    """
    thread = arith.remui(mosaic.thread_idx(), i32(_THREADS))
    address = mosaic.getelementptr(mosaic.memref_ptr(ref), [arith.muli(thread, i32(_CHUNK // 4))], ir.F32Type.get())
    pairs = list(tile.registers.flat)
    chunks = len(pairs) // 2
    first = number * chunks
    return [(address, (first + i) * _CHUNK * _THREADS, pairs[2 * i : 2 * i + 2]) for i in range(chunks)]


def _signal(flag: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def signal(_: Any, flag: Any) -> None:
        mosaic.warpgroup_barrier()  # all threads have stored
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            mosaic.inline_ptx("fence.acq_rel.gpu;", has_side_effects=True)
            mosaic.inline_ptx("st.release.gpu.global.b32 [$0], $1;", mosaic.memref_ptr(flag), i32(1), has_side_effects=True)

    signal(flag)


# Until the flag is set.
_WAIT = """{
.reg .pred unset;
.reg .b32 flag;
again_${:uid}:
ld.acquire.gpu.global.b32 flag, [$0];
setp.eq.u32 unset, flag, 0;
@unset bra again_${:uid};
}"""


def _wait(flag: Any) -> None:
    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),))
    def wait(_: Any, flag: Any) -> None:
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            mosaic.inline_ptx(_WAIT, mosaic.memref_ptr(flag), has_side_effects=True)
        mosaic.warpgroup_barrier()

    wait(flag)
