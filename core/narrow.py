"""Numbers rounded to 8 bits: instructions for a kernel that has them in registers, or in shared memory (`narrow`).

They are PTX: cvt to 8 bits and div.full have no name in Mosaic. Source: PTX ISA.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.eight_bits import with_scale
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import WARPGROUP
from mgpu_ops.core.registers import i32, laid_out


def narrow(src: Any, dst: Any, scales: Any, first: jax.Array) -> None:
    """dst[i, j] = src[i, j] / scales[first + i], rounded, by all threads of a warpgroup; `plgpu.commit_smem` comes after it.

    src: 16-bit floats [rows, columns] in shared memory, untiled; dst: the same of float8_e4m3fn or int8. scales: float32 in
    global memory, flat. columns are a multiple of 4.
    """
    rows, columns = src.shape
    if interpreting():
        of_rows = jax.lax.dynamic_slice_in_dim(scales[...], first, rows)
        dst[...] = with_scale(src[...], of_rows[:, None], dst.dtype)
        return
    dtype, to = (jnp.dtype(x.dtype).name for x in (src, dst))

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType(), plgpu.RefType(), plgpu.Layout.WG_SPLAT))
    def write(_: Any, src: Any, dst: Any, scales: Any, first: Any) -> None:
        word = ir.IntegerType.get_signless(32)
        source, target = (mosaic.inline_ptx("mov.u32 $0, $1;", mosaic.memref_ptr(x), result_types=word) for x in (src, dst))
        start, thread = mosaic.memref_ptr(scales), arith.remui(mosaic.thread_idx(), i32(WARPGROUP))
        for some in range(0, rows * columns, 4 * WARPGROUP):
            at = arith.addi(arith.shli(thread, i32(2)), i32(some))
            with mosaic.when(arith.cmpi(arith.CmpIPredicate.ult, at, i32(rows * columns))):
                row = arith.addi(first.registers.item(), arith.divui(at, i32(columns)))
                code = "{ .reg .u64 a; mad.wide.u32 a, $2, 4, $1; ld.global.f32 $0, [a]; }"
                scale = mosaic.inline_ptx(code, start, row, result_types=ir.F32Type.get(), has_side_effects=True)
                place = arith.addi(source, arith.shli(at, i32(1)))
                code = "ld.shared.v2.b32 {$0, $1}, [$2];"
                words = mosaic.inline_ptx(code, place, result_types=[word] * 2, has_side_effects=True)
                narrowed = four(to, floats(dtype, words), [scale] * 4)
                mosaic.inline_ptx("st.shared.b32 [$0], $1;", arith.addi(target, at), narrowed, has_side_effects=True)

    write(src, dst, scales, laid_out(first, plgpu.Layout.WG_SPLAT))


def floats(dtype: str, words: Sequence[Any]) -> list[Any]:
    """The numbers of words as float32."""
    if dtype == "float32":
        return [mosaic.bitcast(word, ir.F32Type.get()) for word in words]
    code = {
        "bfloat16": "{ shl.b32 $0, $2, 16; and.b32 $1, $2, 0xffff0000; }",
        "float16": "{ .reg .b16 a, b; mov.b32 {a, b}, $2; cvt.f32.f16 $0, a; cvt.f32.f16 $1, b; }",
    }[dtype]
    return [x for word in words for x in mosaic.inline_ptx(code, word, result_types=[ir.F32Type.get()] * 2)]


def four(to: str, x: Sequence[Any], by: Sequence[Any]) -> Any:
    """Four numbers, each divided by its scale as XLA divides and rounded, as the bytes of a word.

    Rounding to 8 bits saturates, infinities too. Those of x become NaN in e4m3 (0 x + x), and 1 more than the largest number in
    e5m2, which is infinity. Integers are from -127 to 127, and 0 for NaN.
    """
    if to == "int8":
        each = "div.full.f32 q, ${}, ${}; max.NaN.f32 q, q, 0fC2FE0000; cvt.rni.sat.s8.f32 n{}, q;"  # -127
        rounded = " ".join(each.format(i + 1, i + 5, i) for i in range(4))
        joined = "prmt.b32 n0, n0, n1, 0x0040; prmt.b32 n2, n2, n3, 0x0040; prmt.b32 $0, n0, n2, 0x5410;"
        code = f"{{ .reg .f32 q; .reg .b32 n<4>; {rounded} {joined} }}"
        return mosaic.inline_ptx(code, *x, *by, result_types=ir.IntegerType.get_signless(32))
    narrow = {"float8_e4m3fn": "e4m3x2", "float8_e5m2": "e5m2x2"}[to]
    lines = ["{ .reg .f32 q<4>; .reg .b16 low, high; .reg .pred p;"]
    for i in range(4):
        if narrow == "e4m3x2":
            lines.append(f"fma.rn.f32 q{i}, ${i + 1}, 0f00000000, ${i + 1}; div.full.f32 q{i}, q{i}, ${i + 5};")
        else:
            lines.append(f"div.full.f32 q{i}, ${i + 1}, ${i + 5};")
    lines.append(f"cvt.rn.satfinite.{narrow}.f32 low, q1, q0; cvt.rn.satfinite.{narrow}.f32 high, q3, q2;")
    lines.append("mov.b32 $0, {low, high};")
    if narrow == "e5m2x2":
        lines += [f"testp.infinite.f32 p, ${i + 1}; @p add.u32 $0, $0, {1 << 8 * i};" for i in range(4)]
    return mosaic.inline_ptx(" ".join([*lines, "}"]), *x, *by, result_types=ir.IntegerType.get_signless(32))
