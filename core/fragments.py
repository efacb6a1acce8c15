"""Tiles [64, columns] as wgmma leaves them in a warpgroup's registers, stored and added by PTX that JAX does not write.

ptxas moves arithmetic across waits for wgmma, and LLVM keeps addresses in registers: these functions are where that is slower.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

from mgpu_ops.core import jax_patches
from mgpu_ops.core.engine import operand_transforms
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32, laid_out, row_and_column


def store_volatile(values: jax.Array, ref: Any) -> None:
    """ref[i] = values[i] in shared memory, a float32 for each of a warpgroup's 64 rows, with stores that ptxas does not move.

    Of values [64, 8], one of each row's.

    ptxas moves a wait for wgmma ahead of arithmetic that does not need it; the arithmetic then runs after the tensor cores
    instead of beside them. A wait that follows this store stays behind all that `values` depends on.
    """
    if interpreting():
        ref[...] = values if values.ndim == 1 else values[:, 0]
        return
    layout = plgpu.Layout.WGMMA.reduce(1) if values.ndim == 1 else plgpu.Layout.WGMMA

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_: Any, values: Any, ref: Any) -> None:
        row, _ = row_and_column(mosaic.thread_idx())
        start = mosaic.getelementptr(mosaic.memref_ptr(ref), [row], ir.F32Type.get())
        for i, register in enumerate(values.registers.flat):
            for j in range(ir.VectorType(register.type).shape[0]):  # of a tile, a thread's columns follow each other
                word = vector.extract(register, dynamic_position=[], static_position=[j])
                mosaic.inline_ptx(f"st.volatile.shared.f32 [$0+{32 * (i % 2)}], $1;", start, word, has_side_effects=True)

    store(laid_out(values, layout), ref)


def compute_here(values: jax.Array, ref: Any) -> None:
    """Computes values [64, columns] of 16 bits, in wgmma's layout, before any wait for wgmma that follows.

    ptxas moves such a wait ahead of arithmetic that does not need it, which then runs after the tensor cores and not beside
    them, and takes more registers. So a word that depends on all values goes to `ref`, int32 in shared memory, by a store that
    ptxas does not move.
    """
    if interpreting():
        return

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType()))
    def store(_: Any, values: Any, ref: Any) -> None:
        pair = ir.VectorType.get((1,), ir.IntegerType.get_signless(32))
        words = (vector.bitcast(pair, register) for register in values.registers.flat)
        words = (vector.extract(word, dynamic_position=[], static_position=[0]) for word in words)
        word = functools.reduce(arith.ori, words)
        mosaic.inline_ptx("st.volatile.shared.u32 [$0], $1;", mosaic.memref_ptr(ref), word, has_side_effects=True)

    store(laid_out(values, plgpu.Layout.WGMMA), ref)


def any_of_warp(condition: jax.Array) -> jax.Array:
    """Whether `condition` [64], a bool for each of a warpgroup's rows, holds for one of a warp's 16 rows, as int32.

    Warps get different answers, and may branch by them as long as nothing in the branch is for the whole warpgroup: no wgmma,
    no barrier. The interpreter, which has no warps, asks all 64 rows.
    """
    if interpreting():
        return jnp.any(condition).astype(jnp.int32)
    scalar, layout = plgpu.Layout.WG_SPLAT, plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(layout,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar))
    def vote(_: Any, rows: Any) -> Any:
        words = (vector.extract(register, dynamic_position=[], static_position=[0]) for register in rows.registers.flat)
        word = functools.reduce(arith.ori, words)
        code = (
            "{ .reg .pred own, any; setp.ne.u32 own, $1, 0; vote.sync.any.pred any, own, 0xffffffff; selp.u32 $0, 1, 0, any; }"
        )
        found = mosaic.inline_ptx(code, word, result_types=ir.IntegerType.get_signless(32), has_side_effects=True)
        return mosaic_gpu.FragmentedArray.splat(found, (), is_signed=True)

    any_row: jax.Array = vote(laid_out(condition.astype(jnp.int32), layout))
    return any_row


def write_tile(values: jax.Array, ref: Any) -> None:
    """ref[...] = values, [64, columns] in wgmma's layout, in shared memory with `operand_transforms` of the 128-byte swizzle.

    Addresses are computed where they are used: the compiler does not know that the number of a thread is always the same.
    Otherwise LLVM computes them once for the whole block, and they are spilled where registers are scarce. As with TMA copies,
    the caller waits until nobody reads `ref`, and calls `plgpu.commit_smem`.
    """
    if interpreting():
        ref[...] = values
        return
    columns = 128 // values.dtype.itemsize

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(operand_transforms(columns, values.dtype))))
    def store(_: Any, values: Any, ref: Any) -> None:
        with jax_patches.opaque_threads():
            values.store_tiled(ref, swizzle=128)

    store(laid_out(values, plgpu.Layout.WGMMA), ref)


SIZE = 4096  # float32 of a tile [64, 64] of `add`


def add(values: jax.Array, ref: Any, first: jax.Array | None = None) -> None:
    """ref += values, float32 [64, 64] in wgmma's layout, from registers to `ref` [4096] in global memory, in any order.

    first: where it is not 0, ref = values.

    There, the values of a thread lie together: for each 8 columns of a tile, for each thread of the warpgroup, the 2 columns of
    each of its 2 rows, as `load` reads them. A warp then adds 512 bytes at a time. The interpreter overwrites `ref`.
    """
    if interpreting():
        ref[...] = values.reshape(4, 2, 8, 8, 4, 2).transpose(3, 0, 2, 4, 1, 5).reshape(SIZE)
        return

    scalar = plgpu.Layout.WG_SPLAT
    flags = () if first is None else (laid_out(first, scalar),)

    @plgpu.inline_mgpu(arg_types=(plgpu.Layout.WGMMA, plgpu.RefType(), *[scalar] * len(flags)))
    def red(_: Any, values: Any, ref: Any, *flags: Any) -> None:
        with jax_patches.opaque_threads():
            start, fours = _of_thread(ref), list(_words_of_thread(values))
            if not flags:
                for eight, words in enumerate(fours):
                    code = f"red.relaxed.gpu.global.add.v4.f32 [$0+{2048 * eight}], {{$1, $2, $3, $4}};"
                    mosaic.inline_ptx(code, start, *words, has_side_effects=True)
                return
            names = ("{" + ", ".join(f"${4 * eight + i}" for i in range(1, 5)) + "}" for eight in range(len(fours)))
            places = [f"[$0+{2048 * eight}], {four};" for eight, four in enumerate(names)]
            adds = " ".join(f"red.relaxed.gpu.global.add.v4.f32 {place}" for place in places)
            stores = " ".join(f"st.global.v4.f32 {place}" for place in places)
            flag = f"${1 + 4 * len(fours)}"
            code = f"{{ .reg .pred add; setp.eq.u32 add, {flag}, 0; @add bra ADD; {stores} bra DONE; ADD: {adds} DONE: }}"
            mosaic.inline_ptx(code, start, *itertools.chain(*fours), flags[0].registers.item(), has_side_effects=True)

    red(laid_out(values, plgpu.Layout.WGMMA), ref, *flags)


def load(ref: Any) -> jax.Array:
    """The tile [64, 64] that `add` has summed up, float32 in wgmma's layout."""
    if interpreting():
        tile: jax.Array = ref[...].reshape(8, 4, 8, 4, 2, 2).transpose(1, 4, 2, 0, 3, 5).reshape(64, 64)
        return tile
    result = plgpu.ShapeDtypeStruct((64, 64), jnp.dtype(jnp.float32), layout=plgpu.Layout.WGMMA)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(),), return_type=result)
    def read(_: Any, ref: Any) -> Any:
        start, f32 = _of_thread(ref), ir.F32Type.get()
        pair = ir.VectorType.get((2,), f32)
        tile = mosaic_gpu.FragmentedArray.splat(mosaic.c(0.0, f32), (64, 64), mosaic_gpu.WGMMA_LAYOUT)
        registers = np.empty_like(tile.registers)
        for eight in range(8):
            get = f"ld.global.v4.f32 {{$0, $1, $2, $3}}, [$4+{2048 * eight}];"
            words = mosaic.inline_ptx(get, start, result_types=(f32,) * 4, has_side_effects=True)
            for half in range(2):
                registers.flat[2 * eight + half] = vector.from_elements(pair, words[2 * half : 2 * half + 2])
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=tile.layout, _is_signed=None)

    loaded: jax.Array = read(ref)
    return loaded


def _of_thread(ref: Any) -> Any:
    """Where the first four float32 of a thread lie in a tile of `add`."""
    thread = arith.remui(mosaic.thread_idx(), i32(128))
    return mosaic.getelementptr(mosaic.memref_ptr(ref), [arith.muli(thread, i32(4))], ir.F32Type.get())


def _words_of_thread(values: Any) -> Iterator[list[Any]]:
    """A thread's float32 of a tile in wgmma's layout, for each 8 columns: 2 columns of a row, then of the row 8 below."""
    registers = list(values.registers.flat)
    for first in range(0, len(registers), 2):
        yield [
            vector.extract(register, dynamic_position=[], static_position=[i])
            for register in registers[first : first + 2]
            for i in range(2)
        ]
