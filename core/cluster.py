"""Distributed shared memory by hand: what the thread blocks of a cluster send each other, without a fence for each message.

Mosaic's own `async_store_smem` arrives at the receiver's barrier with every tile, and waits each time until all stores before
it are visible on the whole GPU. Here a receiver declares once how many bytes will come. Ops call `engine.ClusterColumns`.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector

FLOAT = 4  # bytes
BARRIER_WORDS = 2  # 32-bit words of an mbarrier


def send_columns(tile: jax.Array, numbers: jax.Array, rows: int, blocks: int, inbox: list[Any]) -> None:
    """Sends each block of the cluster its columns of the first `rows` rows of `tile`, with `numbers`; waits for those of all.

    tile: float32 [64, columns], numbers: float32 [64], in wgmma's layout. The inbox of a block, in shared memory: float32
    [blocks, 64, columns / blocks] and [blocks, 64], by sender, and int32 [BARRIER_WORDS] for a barrier. It may lie where other
    data were: before it is used, the blocks wait for each other. Once in a kernel, by the one warpgroup of every block of the
    cluster, which has one axis. Source: PTX ISA, "mbarrier", "barrier.cluster", "st.async".
    """
    layout = plgpu.Layout.WGMMA
    own = tile.shape[1] // blocks
    refs = (plgpu.RefType(),) * 3

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1), *refs))
    def send(_: Any, tile: Any, numbers: Any, tiles_ref: Any, numbers_ref: Any, barrier_ref: Any) -> None:
        i32 = ir.IntegerType.get_signless(32)
        to = [mosaic.memref_ptr(ref) for ref in (tiles_ref, numbers_ref, barrier_ref)]
        _expect(to[2], blocks * rows * (own + 1) * FLOAT)
        me = mosaic.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=i32)
        lane = mosaic.thread_idx()
        row, column = _row_and_column(lane)
        for half in range(2):
            at = arith.addi(row, _i32(8 * half))
            entry = arith.addi(arith.muli(me, _i32(64)), at)  # of this row in an inbox
            tile_start = arith.addi(arith.muli(entry, _i32(own * FLOAT)), arith.muli(column, _i32(FLOAT)))
            number_start = arith.muli(entry, _i32(FLOAT))
            with mosaic.when(arith.cmpi(arith.CmpIPredicate.ult, at, _i32(rows))):
                for block in range(blocks):
                    tiles, others, barrier = (_there(pointer, block) for pointer in to)
                    start = arith.addi(tiles, tile_start)
                    for n in range(own // 8):
                        register = tile.registers.flat[2 * (block * (own // 8) + n) + half]
                        _send(register, arith.addi(start, _i32(8 * n * FLOAT)), barrier)
                    with mosaic.when(arith.cmpi(arith.CmpIPredicate.eq, column, _i32(0))):
                        _send(numbers.registers.flat[half], arith.addi(others, number_start), barrier)
        mosaic.inline_ptx(_WAIT, to[2], has_side_effects=True, convergent=True)

    send(tile, numbers, *inbox)


# Until the first phase of a barrier is over.
_WAIT = """{
.reg .pred done;
again_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0;
@!done bra again_${:uid};
}"""


def _expect(barrier: Any, size: int) -> None:
    """A new barrier, over when `size` bytes have come; then all threads of all blocks of the cluster meet."""
    mosaic.warpgroup_barrier()  # nothing else is in the barrier's place any more
    with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
        mosaic.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", barrier, has_side_effects=True)
        mosaic.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        mosaic.inline_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", barrier, _i32(size), has_side_effects=True)
    for step in ("arrive.relaxed", "wait.acquire"):
        mosaic.inline_ptx(f"barrier.cluster.{step}.aligned;", has_side_effects=True, convergent=True)


def _row_and_column(thread: Any) -> tuple[Any, Any]:
    """The first row of a thread and its first column of eight, in wgmma's layout: warp w has rows 16 w to 16 w + 15.

    Four threads share a row and the one 8 below it.
    """
    lane, warp = arith.remui(thread, _i32(32)), arith.divui(arith.remui(thread, _i32(128)), _i32(32))
    row = arith.addi(arith.muli(warp, _i32(16)), arith.divui(lane, _i32(4)))
    return row, arith.muli(arith.remui(lane, _i32(4)), _i32(2))


def _there(pointer: Any, block: int) -> Any:
    """The address of the same place in another block's shared memory, as 32 bits."""
    i32 = ir.IntegerType.get_signless(32)
    return mosaic.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", pointer, _i32(block), result_types=i32)


def _send(register: Any, address: Any, barrier: Any) -> None:
    """Stores a vector of one or two float32 there, and counts its bytes at the barrier."""
    bits = 32 * ir.VectorType(register.type).shape[0]
    word = mosaic.bitcast(register, ir.IntegerType.get_signless(bits))
    store = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.b{bits} [$0], $1, [$2];"
    mosaic.inline_ptx(store, address, word, barrier, has_side_effects=True)


def store_scattered(values: jax.Array, dst: Any, offsets: jax.Array) -> None:
    """`engine.store_scattered`, compiled."""
    layout = plgpu.Layout.WGMMA
    columns = 1 if values.ndim == 1 else values.shape[1]

    @plgpu.inline_mgpu(arg_types=(layout if values.ndim == 2 else layout.reduce(1), layout.reduce(1), plgpu.RefType()))
    def store(_: Any, values: Any, offsets: Any, dst: Any) -> None:
        start, element = mosaic.memref_ptr(dst), ir.MemRefType(dst.type).element_type
        _, column = _row_and_column(mosaic.thread_idx())
        for half, one in enumerate(offsets.registers.flat):
            offset = vector.extract(one, dynamic_position=[], static_position=[0])
            mine = arith.cmpi(arith.CmpIPredicate.sge, offset, _i32(0))
            if columns == 1:
                mine = arith.andi(mine, arith.cmpi(arith.CmpIPredicate.eq, column, _i32(0)))
                kept = [(0, values.registers.flat[half])]
            else:
                offset = arith.addi(offset, column)
                kept = [(8 * n, values.registers.flat[2 * n + half]) for n in range(columns // 8)]
            with mosaic.when(mine):
                first = mosaic.getelementptr(start, [offset], element)
                for further, register in kept:
                    _store_global(register, mosaic.getelementptr(first, [further], element))

    store(values, offsets, dst)


def load_scattered(src: Any, offsets: jax.Array) -> jax.Array:
    """`engine.load_scattered`, compiled."""
    per_row = plgpu.Layout.WGMMA.reduce(1)
    result = plgpu.ShapeDtypeStruct((64,), jnp.dtype(jnp.float32), layout=per_row)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), per_row), return_type=result)
    def load(_: Any, src: Any, offsets: Any) -> Any:
        start, element = mosaic.memref_ptr(src), ir.F32Type.get()
        registers = np.empty_like(offsets.registers)
        for i, one in np.ndenumerate(offsets.registers):
            pointer = mosaic.getelementptr(start, [vector.extract(one, dynamic_position=[], static_position=[0])], element)
            word = mosaic.inline_ptx("ld.global.f32 $0, [$1];", pointer, result_types=element, has_side_effects=True)
            registers[i] = vector.broadcast(ir.VectorType.get((1,), element), word)
        return mosaic_gpu.FragmentedArray(_registers=registers, _layout=offsets.layout, _is_signed=None)

    loaded: jax.Array = load(src, offsets)
    return loaded


def _store_global(register: Any, pointer: Any) -> None:
    """Stores a vector of 32 or 64 bits."""
    kind = ir.VectorType(register.type)
    bits = kind.shape[0] * mosaic.bitwidth(kind.element_type)
    word = mosaic.bitcast(register, ir.IntegerType.get_signless(bits))
    mosaic.inline_ptx(f"st.global.b{bits} [$0], $1;", pointer, word, has_side_effects=True)


def _i32(x: int) -> Any:
    return mosaic.c(x, ir.IntegerType.get_signless(32))
