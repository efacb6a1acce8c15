"""Integers of 8 and 4 bits as 16-bit floats, in registers in wgmma's layout: `load_upcast`.

wgmma's left operand has two neighbours along k in a register, and those 8 further on in another. A thread loads 32 bits from
shared memory, 4 or 8 neighbours; the threads that share a row then exchange bytes, because what lies together in one register
belongs to several threads. Integers become floats without a conversion instruction, which is slow: their bits are set into the
mantissa of a power of two, which is then subtracted. Source: PTX ISA (prmt, lop3, shfl).
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith
from jax.typing import DTypeLike

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32


def load_upcast(ref: Any, dtype: DTypeLike) -> jax.Array:
    """The int8 or int4 numbers of a shared-memory ref [64, columns] as bfloat16 or float16 in wgmma's layout, exact.

    The ref has rows of 128 numbers and the swizzle of that many bytes: 128 of int8, 64 of int4.
    """
    dtype, bits = jnp.dtype(dtype), 4 if ref.dtype == jnp.int4 else 8
    if interpreting():
        return ref[...].astype(dtype)
    loaded = plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X
    words = plgpu.load(ref, layout=loaded)

    @plgpu.inline_mgpu(arg_types=(loaded,), return_type=plgpu.ShapeDtypeStruct(ref.shape, dtype, layout=plgpu.Layout.WGMMA))
    def upcast(_: Any, words: Any) -> Any:
        layout = fragmented_array.WGMMA_LAYOUT
        pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
        found = np.empty(layout.registers_shape(ref.shape), dtype=object)
        spread = (_four_bits if bits == 4 else _eight_bits)(dtype == jnp.bfloat16)
        rest = (0,) * (found.ndim - 5)
        for index, word in np.ndenumerate(words.registers):
            pairs = spread(mosaic.bitcast(word, ir.IntegerType.get_signless(32)))
            for i, one in enumerate(pairs):
                block, column, half = index[0], index[1] * len(pairs) + i, index[4]
                found[block, column, 0, 0, half, *rest] = mosaic.bitcast(one, pair)
        return fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)

    result: jax.Array = upcast(words)
    return result


def _by_lane(bit: int, clear: int, set_: int) -> Any:
    """The constant of threads whose number has this bit clear, or that of those that have it set."""
    lane = arith.andi(mosaic.thread_idx(), i32(bit))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0)), i32(clear), i32(set_))


def _ptx(code: str, *args: Any) -> Any:
    return mosaic.inline_ptx(code, *args, result_types=ir.IntegerType.get_signless(32))


def _eight_bits(bfloat16: bool) -> Any:
    """Of 4 bytes the two pairs of this thread: its own first or last two, and the same ones of the thread beside it.

    prmt takes each byte with its sign, so that a pair has 16 bits each. bfloat16: 7 bits are the mantissa of 128, less 128 or,
    where the sign is set, 256. float16: 8 bits, the sign turned over, are the mantissa of 1024.
    """
    low, high = _by_lane(1, 0x9180, 0xF7E6), _by_lane(1, 0xD5C4, 0xB3A2)

    def floats(pair: Any) -> Any:
        if not bfloat16:
            return _ptx(
                "{ .reg .b32 x, c; lop3.b32 x, $1, 0x00ff00ff, 0x64806480, 0x6a; mov.b32 c, 0x64806480;"
                " sub.rn.f16x2 $0, x, c; }",
                pair,
            )
        return _ptx(
            "{ .reg .b32 x, y; lop3.b32 x, $1, 0x007f007f, 0x43004300, 0xea; lop3.b32 y, $1, 0x00800080, 0x43004300, 0xea;"
            " sub.bf16x2 $0, x, y; }",
            pair,
        )

    def spread(word: Any) -> list[Any]:
        other = mosaic.shfl_bfly(word, 1)
        return [floats(mosaic.prmt(word, other, which)) for which in (low, high)]

    return spread


def _four_bits(bfloat16: bool) -> Any:
    """Of 8 numbers in 4 bytes the four pairs of this thread: the four threads of a row transpose their bytes.

    A number, its sign turned over, is the mantissa of 128 (bfloat16) or 1024 (float16).
    """
    across, beside = _by_lane(2, 0x5410, 0x3276), _by_lane(1, 0x6240, 0x3715)
    magic = "0x43084308" if bfloat16 else "0x64086408"
    subtract = "sub.bf16x2" if bfloat16 else "sub.rn.f16x2"

    def spread(word: Any) -> list[Any]:
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 2), across)
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 1), beside)
        upper = arith.shrui(word, i32(4))
        code = (
            "{{ .reg .b32 x, c; prmt.b32 x, $1, $2, 0x0{second}0{first}; lop3.b32 x, x, 0x000f000f, {magic}, 0x6a;"
            " mov.b32 c, {magic}; {subtract} $0, x, c; }}"
        )
        return [
            _ptx(code.format(first=byte, second=4 + byte, magic=magic, subtract=subtract), word, upper) for byte in range(4)
        ]

    return spread
