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

import dataclasses
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
_SCALED = {"bfloat16": -26, "float16": 0}  # of what 1 times a scale of 1 becomes: bfloat16 has room for scales up to 2^20


def unit(dtype: DTypeLike, scaled: bool = False) -> float:
    """What 1, or 1 times a scale of 1, becomes in `load_upcast`: a power of two."""
    name = jnp.dtype(dtype).name
    return 2.0 ** _SCALED[name] if scaled else 2.0 ** (_TINY[name] + _FACTOR[name])


def load_upcast(
    ref: Any, dtype: DTypeLike, zero_points: Sequence[jax.Array] = (), scales: Sequence[jax.Array] = ()
) -> jax.Array:
    """(integers - zero points) scales * unit(dtype) of int8 or int4 in shared memory, [64, columns], in wgmma's layout.

    dtype: bfloat16 or float16. The ref has rows of 128 numbers and the swizzle of that many bytes: 128 of int8, 64 of int4.
    zero_points: float32 [64] in wgmma's layout for each of equal parts of the columns; rounded to whole numbers. Default: 0.
    scales: likewise, rounded to dtype; the product is rounded again. Default: 1, and nothing is rounded.
    """
    dtype, bits = jnp.dtype(dtype), 4 if ref.dtype == jnp.int4 else 8
    if interpreting():
        return _interpreted(ref, dtype, zero_points, scales)
    loaded, per_row = _loaded_layout(bits), plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(
        arg_types=(loaded, *(per_row for _ in (*zero_points, *scales))),
        return_type=plgpu.ShapeDtypeStruct(ref.shape, dtype, layout=plgpu.Layout.WGMMA),
    )
    def upcast(_: Any, words: Any, *of_rows: Any) -> Any:
        return _upcast(words, of_rows[: len(zero_points)], of_rows[len(zero_points) :], bits, dtype.name)

    result: jax.Array = upcast(plgpu.load(ref, layout=loaded), *zero_points, *scales)
    return result


def _interpreted(ref: Any, dtype: Any, zero_points: Sequence[jax.Array], scales: Sequence[jax.Array]) -> jax.Array:
    def of_columns(parts: Sequence[jax.Array]) -> jax.Array:
        each = ref.shape[1] // len(parts)
        return jnp.concatenate([jnp.broadcast_to(part[:, None], (part.shape[0], each)) for part in parts], 1)

    values = ref[...].astype(jnp.float32)
    if zero_points:
        values -= jnp.round(of_columns(zero_points))
    if scales:
        values *= of_columns(scales).astype(dtype).astype(jnp.float32)
    return (values * unit(dtype, bool(scales))).astype(dtype)


def _loaded_layout(bits: int) -> Any:
    """In which a thread has 32 bits of neighbours."""
    return plgpu.Layout.WGMMA_UPCAST_4X if bits == 4 else plgpu.Layout.WGMMA_UPCAST_2X


def _upcast(words: Any, zero_points: Sequence[Any], scales: Sequence[Any], bits: int, dtype: str) -> Any:
    """The array in wgmma's layout of one in `_loaded_layout`."""
    layout, columns = fragmented_array.WGMMA_LAYOUT, words.shape[1]
    pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == "bfloat16" else ir.F16Type.get())
    found = np.empty(layout.registers_shape(words.shape), dtype=object)
    parts = max(1, len(zero_points), len(scales))
    steps = [  # of each part of the columns, and of each of the two rows that a thread has
        [_Steps.of(_number(zero_points, part, half), _number(scales, part, half), bits, dtype) for half in range(2)]
        for part in range(parts)
    ]
    pairs_of = _four_bits if bits == 4 else _eight_bits
    spread, rest = pairs_of(), (0,) * (found.ndim - 5)
    for index, word in np.ndenumerate(words.registers):
        block, half = index[0], index[4]
        pairs = spread(mosaic.bitcast(word, ir.IntegerType.get_signless(32)))
        for i, bits_of_two in enumerate(pairs):
            column = index[1] * len(pairs) + i  # of 8
            two = steps[column * 8 * parts // columns][half].floats(bits_of_two)
            found[block, column, 0, 0, half, *rest] = mosaic.bitcast(two, pair)
    return fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


def _number(parts: Sequence[Any], part: int, half: int) -> Any:
    """A thread's float32 number of a row; None where there are none."""
    if not parts:
        return None
    number = parts[part].registers.flat[half]
    if isinstance(number.type, ir.VectorType):
        number = vector.extract(number, dynamic_position=[], static_position=[0])
    return number


@dataclasses.dataclass(frozen=True)
class _Steps:
    """bits * factor + addend, and then times `scale` if there is one: pairs of floats in 32 bits.

    Where no zero point makes the addend inexact, and the format has room for it, the scale is in factor and addend already.
    """

    dtype: str
    factor: Any
    addend: Any
    scale: Any = None

    @staticmethod
    def of(zero_point: Any, scale: Any, bits: int, dtype: str) -> _Steps:
        offset, one = 1 << (bits - 1), unit(dtype)
        upper = 1.0 if bits == 8 else 1 / 16  # of int4, the second of a pair is 16 times its number
        factors, largest = [1.0, upper], 2.0 ** _FACTOR[dtype]
        if scale is not None and zero_point is None and dtype == "bfloat16":
            smaller = unit(dtype, True) / one
            return _Steps(
                dtype,
                _scaled_pair(dtype, scale, [f * largest * smaller for f in factors]),
                _scaled_pair(dtype, scale, [-offset * one * smaller] * 2),
            )
        factor = i32(_pair(dtype, *(f * largest for f in factors)))
        addend = i32(_pair(dtype, -offset * one, -offset * one))
        if zero_point is not None:
            whole = _ptx_float("cvt.rni.f32.f32 $0, $1;", zero_point)
            addend = _two(dtype, _ptx_float(f"fma.rn.f32 $0, $1, {_f32(-one)}, {_f32(-offset * one)};", whole))
        scale = None if scale is None else _scaled_pair(dtype, scale, [unit(dtype, True) / one] * 2)
        return _Steps(dtype, factor, addend, scale)

    def floats(self, bits_of_two: Any) -> Any:
        kind = "bf16x2" if self.dtype == "bfloat16" else "f16x2"
        two = _ptx(f"fma.rn.{kind} $0, $1, $2, $3;", bits_of_two, self.factor, self.addend)
        return two if self.scale is None else _ptx(f"mul.rn.{kind} $0, $1, $2;", two, self.scale)


def _scaled_pair(dtype: str, scale: Any, factors: Sequence[float]) -> Any:
    """A scale, rounded to the dtype, times two powers of two."""
    kind = "bf16x2" if dtype == "bfloat16" else "f16x2"
    return _ptx(f"mul.rn.{kind} $0, $1, $2;", _two(dtype, scale), i32(_pair(dtype, *factors)))


def _two(dtype: str, number: Any) -> Any:
    """A float32 number, rounded to the dtype, in both halves of 32 bits."""
    return _ptx(f"cvt.rn.{'bf16x2' if dtype == 'bfloat16' else 'f16x2'}.f32 $0, $1, $1;", number)


def _f32(value: float) -> str:
    return f"0f{np.float32(value).view(np.uint32):08X}"


def _pair(dtype: str, low: float, high: float) -> int:
    """Two floats of the dtype as 32 bits, signed."""
    return int(np.array([low, high]).astype(jnp.dtype(dtype)).view(np.int32)[0])


def _by_lane(bit: int, clear: int, set_: int) -> Any:
    """The constant of threads whose number has this bit clear, or that of those that have it set."""
    lane = arith.andi(mosaic.thread_idx(), i32(bit))
    return arith.select(arith.cmpi(arith.CmpIPredicate.eq, lane, i32(0)), i32(clear), i32(set_))


def _ptx(code: str, *args: Any) -> Any:
    return mosaic.inline_ptx(code, *args, result_types=ir.IntegerType.get_signless(32))


def _ptx_float(code: str, *args: Any) -> Any:
    return mosaic.inline_ptx(code, *args, result_types=ir.F32Type.get())


def _eight_bits() -> Callable[[Any], list[Any]]:
    """Of 4 bytes the two pairs of this thread: its own first or last two, and the same ones of the thread beside it.

    prmt spreads two bytes, and lop3 clears what is between them and turns the signs over, which makes them unsigned.
    """
    low, high = _by_lane(1, 0x1100, 0x7766), _by_lane(1, 0x5544, 0x3322)

    def pairs(word: Any) -> list[Any]:
        other = mosaic.shfl_bfly(word, 1)
        spread = [mosaic.prmt(word, other, which) for which in (low, high)]
        return [_ptx("lop3.b32 $0, $1, 0x00ff00ff, 0x00800080, 0x6a;", x) for x in spread]

    return pairs


def _four_bits() -> Callable[[Any], list[Any]]:
    """Of 8 numbers in 4 bytes the four pairs of this thread: the four threads of a row transpose their bytes.

    lop3 takes the lower and the upper halves of all bytes, unsigned; the upper ones are 16 times their number. prmt then makes
    pairs: a lower half, the zeros that are its sign, an upper one, and zeros.
    """
    across, beside = _by_lane(2, 0x5410, 0x3276), _by_lane(1, 0x6240, 0x3715)

    def pairs(word: Any) -> list[Any]:
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 2), across)
        word = mosaic.prmt(word, mosaic.shfl_bfly(word, 1), beside)
        lower = _ptx("lop3.b32 $0, $1, 0x0f0f0f0f, 0x08080808, 0x6a;", word)
        upper = _ptx("lop3.b32 $0, $1, 0xf0f0f0f0, 0x80808080, 0x6a;", word)
        return [_ptx(f"prmt.b32 $0, $1, $2, 0x8{4 + byte}8{byte};", lower, upper) for byte in range(4)]

    return pairs
