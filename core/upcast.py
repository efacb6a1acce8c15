"""Integers of 8 and 4 bits as 16-bit floats, in registers in wgmma's layout: `load_upcast`.

wgmma's left operand has two neighbours along k in a register, and those 8 further on in another. A thread loads 32 bits from
shared memory, 4 or 8 neighbours; the threads that share a row then exchange bytes, because what lies together in one register
belongs to several threads.

Integers become floats without a conversion instruction, which is slow. The smallest floats of a format lie at equal distances:
up to 255 of bfloat16 and beyond it of float16, the bits of an integer are the float `integer * tiny`. One multiplication and
addition makes that (integer - zero point) * `unit(dtype)`, exact for differences below 256. Source: PTX ISA (prmt, lop3, shfl;
fma.bf16x2 and fma.f16x2 take subnormal numbers).
"""

from __future__ import annotations

from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.typing import DTypeLike

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32

_TINY = {"bfloat16": -133, "float16": -24}  # the exponent of the smallest float
_FACTOR = {"bfloat16": 127, "float16": 15}  # of the largest power of two


def unit(dtype: DTypeLike) -> float:
    """What 1 becomes in `load_upcast`: a power of two."""
    name = jnp.dtype(dtype).name
    return 2.0 ** (_TINY[name] + _FACTOR[name])


def load_upcast(ref: Any, dtype: DTypeLike, zero_points: Sequence[jax.Array] = ()) -> jax.Array:
    """(integers - zero points) * unit(dtype) of int8 or int4 in shared memory, [64, columns], in wgmma's layout.

    dtype: bfloat16 or float16. The ref has rows of 128 numbers and the swizzle of that many bytes: 128 of int8, 64 of int4.
    zero_points: float32 [64] in wgmma's layout for each of equal parts of the columns; rounded to whole numbers. Default: 0.
    """
    dtype, bits = jnp.dtype(dtype), 4 if ref.dtype == jnp.int4 else 8
    if interpreting():
        values, each = ref[...].astype(jnp.float32), ref.shape[1] // max(1, len(zero_points))
        if zero_points:
            values -= jnp.concatenate([jnp.broadcast_to(jnp.round(z)[:, None], (64, each)) for z in zero_points], 1)
        return (values * unit(dtype)).astype(dtype)
    loaded, per_row = _loaded_layout(bits), plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(loaded, *(per_row for _ in zero_points)),
        return_type=plgpu.ShapeDtypeStruct(ref.shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def upcast(_: Any, words: Any, *zero_points: Any) -> Any:
        return _upcast(words, zero_points, bits, dtype.name)

    result: jax.Array = upcast(plgpu.load(ref, layout=loaded), *zero_points)
    return result


def _loaded_layout(bits: int) -> Any:
    """In which a thread has 32 bits of neighbours."""
    return plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X


def _upcast(words: Any, zero_points: Sequence[Any], bits: int, dtype: str) -> Any:
    """The array in wgmma's layout of one in `_loaded_layout`."""
    layout, columns = fragmented_array.WGMMA_LAYOUT, words.shape[1]
    pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get())
    found = np.empty(layout.registers_shape(words.shape), dtype=object)
    parts = max(1, len(zero_points))
    halves = [z.registers.flat for z in zero_points] or [(None, None)]  # of rows that a thread has, in each part
    addends = [[_addend(zero_point, bits, dtype) for zero_point in both] for both in halves]
    pairs_of = (_four_bits if bits == 4 else _eight_bits)(dtype)
    rest = (0,) * (found.ndim - 5)
    for index, word in np.ndenumerate(words.registers):
        block, half = index[0], index[4]
        pairs = pairs_of(mosaic.bitcast(word, ir.IntegerType.get_signless(32)))
        for i, finish in enumerate(pairs):
            column = index[1] * len(pairs) + i  # of 8
            addend = addends[column * 8 * parts // columns][half]
            found[block, column, 0, 0, half, *rest] = mosaic.bitcast(finish(addend), pair)
    return fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


def _addend(zero_point: Any, bits: int, dtype: str) -> Any:
    """-(what makes the integer unsigned + zero point) * unit, in both halves of 32 bits."""
    offset = 1 << (bits - 1)
    if zero_point is None:
        return i32(_pair(dtype, -offset * unit(dtype)))
    if isinstance(zero_point.type, ir.VectorType):
        zero_point = vector.extract(zero_point, dynamic_position=[], static_position=[0])
    wide = "bf16x2" if dtype == "bfloat16" else "f16x2"
    code = (
        f"{{ .reg .f32 z; cvt.rni.f32.f32 z, $1; fma.rn.f32 z, z, {_f32(-unit(dtype))}, {_f32(-offset * unit(dtype))};"
        f" cvt.rn.{wide}.f32 $0, z, z; }}"
    )
    return mosaic.inline_ptx(code, zero_point, result_types=ir.IntegerType.get_signless(32))


def _f32(value: float) -> str:
    return f"0f{np.float32(value).view(np.uint32):08X}"


def _pair(dtype: str, low: float, high: float | None = None) -> int:
    """Two floats of the dtype as 32 bits, signed."""
    both = np.array([low, low if high is None else high]).astype(jnp.dtype(dtype)).view(np.uint32)
    return int(both.view(np.int32)[0])


def _by_lane(bit: int, clear: int, set_: int) -> Any:
    """The constant of threads whose number has this bit clear, or that of those that have it set."""
    lane = arith.andi(mosaic.thread_idx(), i32(bit))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0)), i32(clear), i32(set_))


def _ptx(code: str, *args: Any) -> Any:
    return mosaic.inline_ptx(code, *args, result_types=ir.IntegerType.get_signless(32))


def _fma(dtype: str) -> str:
    return "fma.rn.bf16x2" if dtype == "bfloat16" else "fma.rn.f16x2"


type Pair = Callable[[Any], Any]  # of an addend, two floats in 32 bits


def _eight_bits(dtype: str) -> Callable[[Any], list[Pair]]:
    """Of 4 bytes the two pairs of this thread: its own first or last two, and the same ones of the thread beside it.

    prmt spreads two bytes, and lop3 clears what is between them and turns the signs over, which makes them unsigned.
    """
    low, high = _by_lane(1, 0x1100, 0x7766), _by_lane(1, 0x5544, 0x3322)
    factor = _pair(dtype, 2.0 ** _FACTOR[dtype]) & 0xFFFFFFFF
    code = (
        "{ .reg .b32 x, f; lop3.b32 x, $1, 0x00ff00ff, 0x00800080, 0x6a;"
        f" mov.b32 f, 0x{factor:08x}; {_fma(dtype)} $0, x, f, $2; }}"
    )

    def pairs(word: Any) -> list[Pair]:
        other = mosaic.shfl_bfly(word, 1)
        spread = [mosaic.prmt(word, other, which) for which in (low, high)]
        return [lambda addend, x=x: _ptx(code, x, addend) for x in spread]

    return pairs


def _four_bits(dtype: str) -> Callable[[Any], list[Pair]]:
    """Of 8 numbers in 4 bytes the four pairs of this thread: the four threads of a row transpose their bytes.

    lop3 takes the lower and the upper halves of all bytes, unsigned; the upper ones are 16 times their number, and have a
    smaller factor. prmt then makes pairs: a lower half, the zeros that are its sign, an upper one, and zeros.
    """
    across, beside = _by_lane(2, 0x5410, 0x3276), _by_lane(1, 0x6240, 0x3715)
    largest = 2.0 ** _FACTOR[dtype]
    factor = _pair(dtype, largest, largest / 16) & 0xFFFFFFFF

    def pairs(word: Any) -> list[Pair]:
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 2), across)
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 1), beside)
        lower = _ptx("lop3.b32 $0, $1, 0x0f0f0f0f, 0x08080808, 0x6a;", word)
        upper = _ptx("lop3.b32 $0, $1, 0xf0f0f0f0, 0x80808080, 0x6a;", word)

        def pair(byte: int) -> Pair:
            code = (
                f"{{ .reg .b32 x, f; prmt.b32 x, $1, $2, 0x8{4 + byte}8{byte};"
                f" mov.b32 f, 0x{factor:08x}; {_fma(dtype)} $0, x, f, $3; }}"
            )
            return lambda addend: _ptx(code, lower, upper, addend)

        return [pair(byte) for byte in range(4)]

    return pairs
