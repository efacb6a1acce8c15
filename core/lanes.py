"""What the 32 threads of a warp do together: each has a number of its own and part of the work, and they tell each other.

A kernel's numbers are the same in all threads of a warpgroup, but for what `number` gives and what is computed from that. A
number that differs between threads must not decide a branch; `how_many`, `of_lane` and others make one that does not. In the
interpreter, which has no threads, they are arrays of 32 numbers. Each warp of a warpgroup does the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import WARP
from mgpu_ops.core.registers import laid_out


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


def least(x: jax.Array) -> jax.Array:
    """The least int32 x of all threads."""
    return jnp.min(x.reshape(1, WARP), axis=1)[0] if interpreting() else _ptx("redux.sync.min.s32 $0, $1, 0xffffffff;", x)


def total(x: jax.Array) -> jax.Array:
    """The sum of the float32 x of all threads, in pairs of neighbours first."""
    own, distance = number(), 1
    while distance < WARP:
        x += float_of(of_lane(bits_of(x), own ^ distance))
        distance *= 2
    return x


def store(ref: Any, index: jax.Array, value: jax.Array, here: jax.Array) -> None:
    """ref[index] = value, int32 or float32 of rank 1 in global memory, by each thread for which `here` holds."""
    if interpreting():
        ref[...] = ref[...].at[jnp.where(here, index, ref.shape[0])].set(value, mode="drop")
        return
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), scalar, scalar, scalar))
    def write(_: Any, ref: Any, index: Any, value: Any, here: Any) -> None:
        word = value.registers.item()
        place = mosaic.getelementptr(mosaic.memref_ptr(ref), [index.registers.item()], word.type)
        code = "{ .reg .pred here; setp.ne.u32 here, $2, 0; @here st.global.b32 [$0], $1; }"
        bits = mosaic.bitcast(word, ir.IntegerType.get_signless(32))
        mosaic.inline_ptx(code, place, bits, here.registers.item(), has_side_effects=True)

    write(ref, *(laid_out(x, scalar) for x in (index, value, here.astype(jnp.int32))))


def bits_of(x: jax.Array) -> jax.Array:
    """The bits of a float32, as int32."""
    return lax.bitcast_convert_type(x, jnp.int32) if interpreting() else _ptx("mov.b32 $0, $1;", x)


def float_of(x: jax.Array) -> jax.Array:
    """The float32 of such bits."""
    return lax.bitcast_convert_type(x, jnp.float32) if interpreting() else _ptx("mov.b32 $0, $1;", x, dtype=jnp.float32)


def _ptx(code: str, *words: jax.Array, dtype: Any = jnp.int32) -> jax.Array:
    """The int32 or float32 that PTX leaves in $0, of numbers in $1 and so on.

    Source: PTX ISA, "shfl.sync", "vote.sync", "popc", "redux.sync".
    """
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(scalar,) * len(words), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(dtype), layout=scalar)
    )
    def run(_: Any, *words: Any) -> Any:
        integer = dtype == jnp.int32
        result = ir.IntegerType.get_signless(32) if integer else ir.F32Type.get()
        given = (word.registers.item() for word in words)
        word = mosaic.inline_ptx(code, *given, result_types=result, has_side_effects=True)
        return mosaic_gpu.FragmentedArray.splat(word, (), is_signed=True if integer else None)

    found: jax.Array = run(*(laid_out(word, scalar) for word in words))
    return found
