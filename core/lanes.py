"""What the 32 threads of a warp do together: each has a number of its own and part of the work, and they tell each other.

A kernel's numbers are the same in all threads of a warpgroup, but for what `number` gives and what is computed from that. A
number that differs between threads must not decide a branch; `how_many`, `of_lane` and others make one that does not. In the
interpreter, which has no threads, they are arrays of 32 numbers. Each warp of a warpgroup does the same, unless a kernel gives
it work of its own (`engine.warp`).
"""

from __future__ import annotations

import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.state.types import TransformedRef
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import WARP
from mgpu_ops.core.registers import i32, laid_out

_INT32 = plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=plgpu.Layout.WG_SPLAT)


def number() -> jax.Array:
    """Which thread of its warp this is, 0 to 31, int32."""
    if interpreting():
        return jnp.arange(WARP, dtype=jnp.int32)
    return _ptx("mov.u32 $0, %laneid;")


def readable(ref: Any) -> Any:
    """What a thread may read at an index of its own of a ref in global memory."""
    return ref[...] if interpreting() else ref


def of_lane(x: jax.Array, lane: jax.Array) -> jax.Array:
    """The x of one thread, 0 to 31, int32; of the nearest one where there is no such thread."""
    lane = jnp.clip(lane, 0, WARP - 1)
    if interpreting():
        return jnp.take(x, lane)
    return _ptx("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", x, lane)


def sums(x: jax.Array, most: int | None = None) -> jax.Array:
    """The sum of the x of this thread and of those before it, int32; no more than `most`, which is at least 0 and each x."""
    own, distance = number(), 1
    while distance < WARP:
        before = of_lane(x, own - distance)
        x += jnp.where(own >= distance, before, 0)
        x = x if most is None else jnp.minimum(x, most)
        distance *= 2
    return x


def how_many(condition: jax.Array) -> jax.Array:
    """How many threads have a condition that holds, int32."""
    if interpreting():
        return jnp.sum(condition.reshape(1, WARP), axis=1, dtype=jnp.int32)[0]
    word = condition.astype(jnp.int32)
    vote = "setp.ne.u32 own, $1, 0; vote.sync.ballot.b32 all, own, 0xffffffff;"
    code = f"{{ .reg .pred own; .reg .b32 all; {vote} popc.b32 $0, all; }}"
    return _ptx(code, word)


def largest(x: jax.Array) -> jax.Array:
    """The largest int32 x of all threads."""
    return jnp.max(x.reshape(1, WARP), axis=1)[0] if interpreting() else _ptx("redux.sync.max.s32 $0, $1, 0xffffffff;", x)


def mark_largest(numbers: list[jax.Array], mark: int | jax.Array) -> list[jax.Array]:
    """Int32 numbers of all threads, of which the largest one is replaced by `mark`: of equal ones the first thread's first.

    mark: the same in all threads.
    """
    if interpreting():
        own, found = functools.reduce(jnp.maximum, numbers), []
        here = own == largest(own)
        here = here & (jnp.cumsum(here) == 1)
        for number in numbers:
            found.append(jnp.where(here & (number == own), mark, number))
            here = here & (number != own)
        return found
    count, marks = len(numbers), () if isinstance(mark, int) else (mark,)
    given, new = [f"${count + i}" for i in range(count)], f"${2 * count}" if marks else mark
    code = [
        f".reg .pred here, this<{count}>;",
        f".reg .b32 own, best, all, earlier, found<{count}>;",
        f"mov.b32 own, {given[0]};",
        *(f"max.s32 own, own, {x};" for x in given[1:]),
        "redux.sync.max.s32 best, own, 0xffffffff;",
        "setp.eq.s32 here, own, best;",
        "vote.sync.ballot.b32 all, here, 0xffffffff;",
        "mov.u32 earlier, %lanemask_lt;",
        "and.b32 earlier, earlier, all;",
        "setp.eq.and.s32 here, earlier, 0, here;",
        # Two comparisons take less time than one with two results, of which ptxas makes two in sequence.
        *(f"setp.eq.and.s32 this{i}, {x}, best, here; setp.ne.and.s32 here, {x}, best, here;" for i, x in enumerate(given)),
        *(f"selp.b32 found{i}, {new}, {x}, this{i};" for i, x in enumerate(given)),
        *(f"mov.b32 ${i}, found{i};" for i in range(count)),
    ]
    return _ptx_of_several(code, *numbers, *marks, dtypes=[jnp.int32] * count)


def total(x: jax.Array, threads: int = WARP) -> jax.Array:
    """The sum of the float32 x of so many neighbouring threads, a power of two, in pairs first."""
    distance = 1
    while distance < threads:
        if interpreting():
            other = x[jnp.arange(WARP) ^ distance]
        else:
            other = _ptx(f"shfl.sync.bfly.b32 $0, $1, {distance}, 0x1f, 0xffffffff;", x, dtype=jnp.float32)
        x += other
        distance *= 2
    return x


def warp_barrier() -> None:
    """The threads of a warp wait for each other, and then see what each has stored."""
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        mosaic.warp_barrier()

    barrier()


def load_global(ref: Any, index: jax.Array, count: int, here: jax.Array | None = None) -> list[jax.Array]:
    """The bits of 1, 2 or 4 float32 from an index on, of a ref of rank 1 in global memory to which the kernel does not store.

    index: a multiple of count. here: which threads get them; None: all. Others get any.
    """
    if interpreting():
        found = lax.bitcast_convert_type(ref[...], jnp.int32)[index[:, None] + jnp.arange(count)]
        return [found[:, i] for i in range(count)]
    scalar = plgpu.Layout.WG_SPLAT
    given = [index] if here is None else [index, here.astype(jnp.int32)]

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), *(scalar for _ in given)), return_type=(_INT32,) * count)
    def read(_: Any, ref: Any, index: Any, *here: Any) -> Any:
        place = mosaic.getelementptr(mosaic.memref_ptr(ref), [index.registers.item()], ir.F32Type.get())
        words = [f"word{i}" for i in range(count)]
        code = [
            f".reg .pred here; .reg .b32 {', '.join(words)};",
            f"setp.ne.s32 here, ${count + 1}, 0; @here " if here else "",
            f"ld.global.nc.v{count}.b32 {{{', '.join(words)}}}, [${count}];" if count > 1 else "ld.global.nc.b32 word0, [$1];",
            *(f"mov.b32 ${i}, {word};" for i, word in enumerate(words)),
        ]
        return _run(code, place, *(x.registers.item() for x in here), dtypes=[jnp.int32] * count)

    return list(read(ref, *(laid_out(x, scalar) for x in given)))


def load_shared(ref: Any, index: jax.Array) -> jax.Array:
    """ref[index] of a ref of rank 1 in shared memory: an int32, or four int8 as one, the first in the lowest bits."""
    if interpreting():
        words = ref[...]
        return (lax.bitcast_convert_type(words.reshape(-1, 4), jnp.int32) if words.dtype == jnp.int8 else words)[index]
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar), return_type=(_INT32,))
    def read(_: Any, ref: Any, index: Any) -> Any:
        return _run("ld.shared.b32 $0, [$1];", _shared(ref, index, 4), dtypes=[jnp.int32])

    found: jax.Array = read(ref, laid_out(index, scalar))[0]
    return found


def store(ref: Any, index: jax.Array, value: jax.Array, here: jax.Array | None = None) -> None:
    """ref[index] = value by each thread for which `here` holds, by default by all, of a ref of rank 1.

    ref: int32 or float32 in global memory; int32 in shared memory, or int8 for an int32's lowest bits.
    """
    here = number() >= 0 if here is None else here
    if interpreting():
        _store_interpreted(ref, index, value.astype(ref.dtype), jnp.broadcast_to(here, (WARP,)))
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar, scalar))
    def write(_: Any, ref: Any, index: Any, value: Any, here: Any) -> None:
        word, shared = value.registers.item(), mosaic.is_smem_ref(ref)
        bits = mosaic.bitwidth(ir.MemRefType(ref.type).element_type)
        if shared:
            place = _shared(ref, index, bits // 8)
        else:
            place = mosaic.getelementptr(mosaic.memref_ptr(ref), [index.registers.item()], word.type)
        code = f"setp.ne.u32 here, $2, 0; @here st.{'shared' if shared else 'global'}.b{bits} [$0], $1;"
        word = mosaic.bitcast(word, ir.IntegerType.get_signless(32))
        mosaic.inline_ptx(f"{{ .reg .pred here; {code} }}", place, word, here.registers.item(), has_side_effects=True)

    write(ref, *(laid_out(x, scalar) for x in (index, value, here.astype(jnp.int32))))


def _store_interpreted(ref: Any, index: jax.Array, value: jax.Array, here: jax.Array) -> None:
    """Global memory is stored to element by element: between them may be those of other warpgroups."""
    of = ref.ref if isinstance(ref, TransformedRef) else ref
    if jax.typeof(of).memory_space == plgpu.SMEM:
        ref[...] = ref[...].at[jnp.where(here, index, ref.shape[0])].set(value, mode="drop")
        return

    def store_next(i: jax.Array, _: None) -> None:
        ref[index[order[i]]] = value[order[i]]

    order = jnp.argsort(~here)  # those that store come first
    lax.fori_loop(0, how_many(here), store_next, None)


def _shared(ref: Any, index: Any, size: int) -> Any:
    """The address of an element of so many bytes in shared memory."""
    word = ir.IntegerType.get_signless(32)
    start = mosaic.inline_ptx("mov.u32 $0, $1;", mosaic.memref_ptr(ref), result_types=word)
    return arith.addi(start, arith.muli(index.registers.item(), i32(size)))


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of a float32, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32) if interpreting() else _ptx("mov.b32 $0, $1;", x)


def float_of(x: jax.Array) -> jax.Array:
    """The float32 of such bits."""
    return lax.bitcast_convert_type(x, jnp.float32) if interpreting() else _ptx("mov.b32 $0, $1;", x, dtype=jnp.float32)


def _ptx(code: str, *words: jax.Array, dtype: Any = jnp.int32) -> jax.Array:
    """The int32 or float32 that PTX leaves in $0, of numbers in $1 and so on.

    Source: PTX ISA, "shfl.sync", "vote.sync", "popc", "redux.sync", "setp".
    """
    return _ptx_of_several(code, *words, dtypes=[dtype])[0]


def _ptx_of_several(code: str | list[str], *words: jax.Array, dtypes: Sequence[Any]) -> list[jax.Array]:
    """What PTX leaves in $0 and so on, of the numbers in the registers after those."""
    scalar = plgpu.Layout.WG_SPLAT
    types = tuple(plgpu.ShapeDtypeStruct((), jnp.dtype(dtype), layout=scalar) for dtype in dtypes)

    @plgpu.inline_mgpu(arg_types=(scalar,) * len(words), return_type=types)
    def run(_: Any, *words: Any) -> Any:
        return _run(code, *(word.registers.item() for word in words), dtypes=dtypes)

    return list(run(*(laid_out(word, scalar) for word in words)))


def _run(code: str | list[str], *words: Any, dtypes: Sequence[Any]) -> tuple[Any, ...]:
    """code: a list is a block, with registers of its own."""
    code = code if isinstance(code, str) else f"{{ {' '.join(code)} }}"
    types = [ir.IntegerType.get_signless(32) if dtype == jnp.int32 else ir.F32Type.get() for dtype in dtypes]
    found = mosaic.inline_ptx(code, *words, result_types=types, has_side_effects=True, convergent=True)
    splat = mosaic_gpu.FragmentedArray.splat
    return tuple(splat(x, (), is_signed=True if t == jnp.int32 else None) for x, t in zip(found, dtypes, strict=True))
