"""Numbers of 8 and 4 bits as 16-bit floats: in wgmma's registers (`load_upcast`, and `order_columns` for the other operand), or
in shared memory (`widen`).

wgmma's left operand has two neighbours along k in a register, and those 8 further on in another. A thread loads 32 bits from
shared memory, 4 or 8 neighbours, so that what lies together in one register belongs to several threads. Either the threads of a
row exchange bytes. Or k is summed in another order, in which each thread multiplies what it has loaded (`column_order`): the
columns of the other operand are put in that order in shared memory, which takes less where it has few rows.

Integers become floats without a conversion instruction, which is slow. Exchanged, their bits are set into the mantissa of a
power of two, which is then subtracted. In order, they are the smallest floats, and are multiplied (`unit`). Source: PTX ISA
(ldmatrix, prmt, lop3, shfl; fma.bf16x2 and fma.f16x2 take subnormal numbers).
"""

from __future__ import annotations

import itertools
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

from mgpu_ops.core import jax_patches
from mgpu_ops.core.engine import operand_transforms
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import i32, laid_out

_TINY = {"bfloat16": -133, "float16": -24}  # the exponent of the smallest float
_FACTOR = {"bfloat16": 127, "float16": 15}  # of the largest power of two


def unit(dtype: DTypeLike) -> float:
    """What 1 becomes in `load_upcast(..., ordered=True)`: a power of two."""
    name = jnp.dtype(dtype).name
    return 2.0 ** (_TINY[name] + _FACTOR[name])


def load_upcast(ref: Any, dtype: DTypeLike, half: Any = 0, ordered: bool = False) -> jax.Array:
    """128 int8 or int4 numbers of 64 rows in shared memory as bfloat16 or float16 in wgmma's layout, exact.

    ref: [64, 128], or [64, 256] of int4, of which `half` 0 or 1 is loaded; with a swizzle of whole rows, 128 or 64 bytes.
    ordered: the numbers times `unit(dtype)`, with columns in the order of `column_order`: no thread needs what another loads.
    """
    dtype, bits = jnp.dtype(dtype), 4 if ref.dtype == jnp.int4 else 8
    if interpreting():
        values = ref[...] if ref.shape[1] == COLUMNS else jnp.where(half == 1, ref[:, COLUMNS:], ref[:, :COLUMNS])
        return (values.astype(jnp.float32) * unit(dtype)).astype(dtype) if ordered else values.astype(dtype)
    result = plgpu.ShapeDtypeStruct((64, COLUMNS), dtype, layout=plgpu.Layout.WGMMA)
    if ref.shape[1] == COLUMNS and not (bits == 8 and ordered):
        layout = plgpu.Layout.WGMMA_UPCAST_2X if bits == 8 else plgpu.Layout.WGMMA_UPCAST_4X

        @plgpu.inline_mgpu(arg_types=(layout,), return_type=result)
        def upcast(_: Any, words: Any) -> Any:
            return _pairs({(index[1], index[4]): word for index, word in np.ndenumerate(words.registers)}, bits, dtype, ordered)

        loaded: jax.Array = upcast(plgpu.load(ref, layout=layout))
        return loaded
    scalar = plgpu.Layout.WG_SPLAT
    given = [] if isinstance(half, int) else [laid_out(half, scalar)]  # of a number that is known there would be no register

    @plgpu.inline_mgpu(
        arg_types=(plgpu.RefType(operand_transforms(ref.shape[1], ref.dtype)), *(scalar for _ in given)), return_type=result
    )
    def load(_: Any, ref: Any, *given: Any) -> Any:
        which = given[0].registers.item() if given else i32(half)
        return _pairs(_words(ref, bits, which), bits, dtype, ordered)

    found: jax.Array = load(ref, *given)
    return found


COLUMNS = 128  # that `load_upcast` loads


def _words(ref: Any, bits: int, half: Any) -> dict[tuple[int, int], Any]:
    """32 bits of neighbours for each 4 threads of a row, by their place along k and by whether the row is 8 further down.

    ldmatrix loads four matrices of 8 rows of 16 bytes, each from the address of a thread: here neighbours along k.
    """
    word = ir.IntegerType.get_signless(32)
    base = _ptx("mov.u32 $0, $1;", mosaic.memref_ptr(ref))
    thread = mosaic.thread_idx()
    lane, warp = arith.remui(thread, i32(32)), arith.divui(arith.remui(thread, i32(128)), i32(32))
    row, matrix = arith.remui(lane, i32(8)), arith.divui(lane, i32(8))
    place = arith.shli(arith.addi(arith.shli(warp, i32(4)), row), i32(7))
    place = arith.addi(place, arith.shli(arith.xori(matrix, row), i32(4)))
    if bits == 4:
        starts = [arith.xori(place, arith.shli(half, i32(6)))]
    else:
        starts = [place, arith.xori(place, i32(64))]
    found = {}
    for i, start in enumerate(starts):
        at = arith.addi(base, start)
        for down in range(2):
            code = f"ldmatrix.sync.aligned.m8n8.x4.shared.b16 {{$0, $1, $2, $3}}, [$4+{1024 * down}];"
            four = mosaic.inline_ptx(code, at, result_types=[word] * 4, has_side_effects=True, convergent=True)
            found.update({(4 * i + j, down): one for j, one in enumerate(four)})
    return found


def _pairs(words: dict[tuple[int, int], Any], bits: int, dtype: Any, ordered: bool) -> Any:
    """The array of the pairs of floats that each word becomes."""
    spread = _in_order(bits, dtype) if ordered else (_four_bits if bits == 4 else _eight_bits)(dtype == jnp.bfloat16)
    layout = fragmented_array.WGMMA_LAYOUT
    pair = ir.VectorType.get((2,), ir.BF16Type.get() if dtype == jnp.bfloat16 else ir.F16Type.get())
    found = np.empty(layout.registers_shape((64, COLUMNS)), dtype=object)
    rest = (0,) * (found.ndim - 5)
    for (place, down), word in words.items():
        pairs = spread(mosaic.bitcast(word, ir.IntegerType.get_signless(32)))
        for i, one in enumerate(pairs):
            found[0, place * len(pairs) + i, 0, 0, down, *rest] = mosaic.bitcast(one, pair)
    return fragmented_array.FragmentedArray(_registers=found, _layout=layout, _is_signed=None)


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


def _in_order(bits: int, dtype: Any) -> Any:
    """Of a thread's 32 bits its pairs: numbers 16 bits apart.

    The smallest floats of a format lie at equal distances: up to 255 of bfloat16 and beyond it of float16, the bits of an
    integer are the float `integer * tiny`. The sign, turned over, makes it unsigned, and the addition takes that back.
    """
    name = jnp.dtype(dtype).name
    wide = "bf16x2" if name == "bfloat16" else "f16x2"
    addend = _pair(name, -(2.0 ** (bits - 1)) * unit(name))

    def floats(word: Any, mask: int, sign: int, shift: int) -> Any:
        factor = _pair(name, 2.0 ** (_FACTOR[name] - shift))
        code = (
            f"{{ .reg .b32 x, f, c; lop3.b32 x, $1, 0x{mask:08x}, 0x{sign:08x}, 0x6a;"
            f" mov.b32 f, 0x{factor:08x}; mov.b32 c, 0x{addend:08x}; fma.rn.{wide} $0, x, f, c; }}"
        )
        return _ptx(code, word)

    def spread(word: Any) -> list[Any]:
        upper = arith.shrui(word, i32(8))
        if bits == 8:
            return [floats(one, 0x00FF00FF, 0x00800080, 0) for one in (word, upper)]
        nibbles = ((0x000F000F, 0x00080008, 0), (0x00F000F0, 0x00800080, 4))
        return [floats(one, *nibble) for one in (word, upper) for nibble in nibbles]

    return spread


def _pair(dtype: str, value: float) -> int:
    """A float of the dtype in both halves of 32 bits."""
    return int(np.full(2, value).astype(jnp.dtype(dtype)).view(np.uint32)[0])


UNIT = 32  # columns that `order_columns` permutes among themselves


def column_order(bits: int) -> list[int]:
    """Which of 32 neighbours along k is in each column of `load_upcast(..., ordered=True)`.

    A thread of four (q) loads 32 bits, and has columns 2 q, 2 q + 1 of every eight.
    """
    count = 32 // bits  # neighbours that a thread loads
    eights = [[q * count + i + e * count // 2 for q in range(4) for e in range(2)] for i in range(count // 2)]
    one = [column for eight in eights for column in eight]
    return [start + column for start in range(0, UNIT, len(one)) for column in one]


def order_columns(ref: Any, bits: int) -> None:
    """Puts the columns of a shared-memory ref [panels, rows, columns] of 16 bits into `column_order`, in place.

    columns: 64 or 32, with the swizzle of as many bytes. By all threads of a warpgroup; `plgpu.commit_smem` comes after it.
    """
    if interpreting():
        ref[...] = ref[...]
        return
    panels, rows, width = ref.shape
    pitch = 2 * width
    units = panels * rows * width // UNIT
    order = column_order(bits)

    def place(number: Any) -> Any:
        """Where a unit's first 16 bytes lie, from the start of the ref: units of a column follow each other, row by row."""
        row, column = arith.remui(number, i32(rows)), arith.divui(number, i32(rows))
        panel, within = arith.divui(column, i32(width // UNIT)), arith.remui(column, i32(width // UNIT))
        start = arith.addi(arith.muli(panel, i32(rows * pitch)), arith.muli(row, i32(pitch)))
        start = arith.addi(start, arith.muli(within, i32(2 * UNIT)))
        turned = arith.shli(arith.andi(arith.shrui(start, i32(7)), i32(pitch // 16 - 1)), i32(4))
        return arith.xori(start, turned)

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(operand_transforms(width, ref.dtype)),))
    def permute(_: Any, ref: Any) -> None:
        base = _ptx("mov.u32 $0, $1;", mosaic.memref_ptr(ref))
        with jax_patches.opaque_threads():  # addresses are computed here, not for the whole kernel
            thread = arith.remui(mosaic.thread_idx(), i32(128))
        same_row = 128 % rows == 0 and 128 // rows % (width // UNIT) == 0
        own = arith.addi(base, place(thread))
        places = []
        for first in range(0, units, 128):
            number = arith.addi(thread, i32(first))
            if same_row:
                places.append((own, first // rows // (width // UNIT) * rows * pitch))
            else:
                places.append((arith.addi(base, place(number)), 0))
        whole = units // 128
        for i in range(0, whole, 2):
            _permute(places[i : min(i + 2, whole)], order)
        if units % 128:
            with mosaic.when(arith.cmpi(arith.CmpIPredicate.ult, thread, i32(units % 128))):
                _permute(places[-1:], order)

    permute(ref)


def _permute(places: list[tuple[Any, int]], order: list[int]) -> None:
    """Permutes 32 numbers of 16 bits at each place: the swizzled address of the first 16 bytes of 64, and an offset."""
    at = [([arith.xori(start, i32(16 * c)) for c in range(4)], offset) for start, offset in places]
    loaded = []
    for starts, offset in at:
        loaded.append([w for start in starts for w in _load_four(start, offset)])
    for (starts, offset), words in zip(at, loaded, strict=True):
        for c, start in enumerate(starts):
            found = []
            for low, high in itertools.batched(order[8 * c : 8 * c + 8], 2):
                selector = (0x32 if low % 2 else 0x10) | (0x7600 if high % 2 else 0x5400)
                found.append(_ptx(f"prmt.b32 $0, $1, $2, 0x{selector:04x};", words[low // 2], words[high // 2]))
            store = f"st.shared.v4.b32 [$0+{offset}], {{$1, $2, $3, $4}};"
            mosaic.inline_ptx(store, start, *found, has_side_effects=True)


def widen(src: Any, dst: Any) -> None:
    """dst[i, j] = src[i, j], exact, in shared memory: by all threads of a warpgroup; `plgpu.commit_smem` comes after it.

    src: [rows, columns] of int8 or float8_e4m3fn; dst: the same of float16. Both in whole rows with the widest swizzle
    (`operand_transforms(columns, dtype)`); columns are 64 or a multiple of 128, rows a multiple of 32.

    A thread loads 16 bytes at a time and stores them as twice 16. Eight threads use all banks of shared memory at a time: they
    load the first half of one row and the second half of its neighbour, and store the even 16 bytes of one and the odd ones of
    the other, as a swizzle turns them by the row's number.
    """
    if interpreting():
        dst[...] = src[...].astype(dst.dtype)
        return
    rows, columns = src.shape
    types = tuple(plgpu.RefType(operand_transforms(columns, x.dtype)) for x in (src, dst))
    floats = _spread_float8 if src.dtype == jnp.float8_e4m3fn else _spread_int8

    @plgpu.inline_mgpu(arg_types=types)
    def write(_: Any, src: Any, dst: Any) -> None:
        with jax_patches.opaque_threads():  # addresses are computed here, not for the whole kernel
            thread = arith.remui(mosaic.thread_idx(), i32(128))
        chunk, eight = arith.andi(thread, i32(7)), arith.shrui(thread, i32(3))
        upper = arith.shrui(chunk, i32(2))
        if columns == 64:
            at_once, row = 32, arith.addi(arith.shli(eight, i32(1)), upper)
        else:
            at_once = 16
            row = arith.addi(arith.andi(eight, i32(14)), arith.xori(upper, arith.andi(eight, i32(1))))
        tile, within = arith.shrui(row, i32(3)), arith.andi(row, i32(7))
        source, target = (_ptx("mov.u32 $0, $1;", mosaic.memref_ptr(x)) for x in (src, dst))
        width = max(columns // 128, 1)  # tiles of src side by side
        if columns == 64:
            turned = arith.xori(arith.andi(chunk, i32(3)), arith.shrui(within, i32(1)))
            source = _plus(source, (tile, 512), (within, 64), (turned, 16))
        else:
            source = _plus(source, (tile, 1024 * width), (within, 128), (arith.xori(chunk, within), 16))
        turned = arith.xori(arith.shli(arith.andi(chunk, i32(3)), i32(1)), within)
        target = _plus(target, (tile, 16 * columns), (within, 128), (turned, 16))
        if columns > 64:
            target = _plus(target, (upper, 1024))
        other = arith.xori(target, i32(16))
        places = [first * columns + panel * 1024 for first in range(0, rows, at_once) for panel in range(width)]
        for some in itertools.batched(places, _LOADED_AHEAD if width == 1 else 1):  # ptxas moves no load over a store
            loaded = [_load_four(source, place) for place in some]
            for place, words in zip(some, loaded, strict=True):
                pairs = [pair for word in words for pair in floats(word)]
                for start, half in ((target, pairs[:4]), (other, pairs[4:])):
                    store = f"st.shared.v4.b32 [$0+{2 * place}], {{$1, $2, $3, $4}};"
                    mosaic.inline_ptx(store, start, *half, has_side_effects=True)

    write(src, dst)


_LOADED_AHEAD = 4  # times 16 bytes; beside the sums of wider rows there are no registers for more than one


def _load_four(start: Any, offset: int) -> Any:
    """Four words of shared memory."""
    load = f"ld.shared.v4.b32 {{$0, $1, $2, $3}}, [$4+{offset}];"
    return mosaic.inline_ptx(load, start, result_types=[ir.IntegerType.get_signless(32)] * 4, has_side_effects=True)


def _plus(start: Any, *terms: tuple[Any, int]) -> Any:
    """start + the sum of numbers times powers of two."""
    for number, factor in terms:
        start = arith.addi(start, arith.muli(number, i32(factor)))
    return start


def _spread_float8(word: Any) -> list[Any]:
    """Of four e4m3 floats two pairs of float16. Source: PTX ISA (cvt.rn.f16x2.e4m3x2)."""
    half = "{{ .reg .b16 low, high; mov.b32 {{low, high}}, $1; cvt.rn.f16x2.e4m3x2 $0, {0}; }}"
    return [_ptx(half.format(name), word) for name in ("low", "high")]


def _spread_int8(word: Any) -> list[Any]:
    """Of four integers two pairs of float16: with the sign turned over, they are the last bits of 1024 and more."""
    word = arith.xori(word, i32(0x80808080 - 2**32))
    code = (
        "{{ .reg .b32 x, c; mov.b32 c, 0x64646464; prmt.b32 x, $1, c, 0x{0}; mov.b32 c, 0x64806480; sub.rn.f16x2 $0, x, c; }}"
    )
    return [_ptx(code.format(order), word) for order in ("4140", "4342")]
