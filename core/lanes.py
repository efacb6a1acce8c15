"""What the 32 threads of a warp do together: each has a number of its own and part of the work, and they tell each other.

A kernel's numbers are the same in all threads of a warpgroup, but for what `number` gives and what is computed from that. Such
must not decide a branch; `how_many` and `of_lane` make of them what is the same in all threads again. In the interpreter, which
has no threads, they are arrays of 32 numbers. Each warp of a warpgroup does the same.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax.experimental.mosaic import gpu as mosaic_gpu
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir

from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.registers import laid_out

LANES = 32


def number() -> jax.Array:
    """Which thread of its warp this is, 0 to 31, int32."""
    if interpreting():
        return jnp.arange(LANES, dtype=jnp.int32)
    return _ptx("mov.u32 $0, %laneid;")


def readable(ref: Any) -> Any:
    """What a thread may read at an index of its own of a ref in global memory."""
    return ref[...] if interpreting() else ref


def of_lane(x: jax.Array, lane: jax.Array) -> jax.Array:
    """The x of one thread, 0 to 31, int32; of the nearest one where there is no such thread."""
    lane = jnp.clip(lane, 0, LANES - 1)
    if interpreting():
        return jnp.take(x, lane)
    return _ptx("shfl.sync.idx.b32 $0, $1, $2, 0x1f, 0xffffffff;", x, lane)


def sums(x: jax.Array, most: int | None = None) -> jax.Array:
    """The sum of the x of this thread and of those before it, int32; no more than `most`, which is at least 0 and each x."""
    own, distance = number(), 1
    while distance < LANES:
        before = of_lane(x, own - distance)
        x += jnp.where(own >= distance, before, 0)
        x = x if most is None else jnp.minimum(x, most)
        distance *= 2
    return x


def how_many(condition: jax.Array) -> jax.Array:
    """How many threads have a condition that holds, int32."""
    if interpreting():
        return jnp.sum(condition.reshape(1, LANES), axis=1, dtype=jnp.int32)[0]
    word = condition.astype(jnp.int32)
    vote = "setp.ne.u32 own, $1, 0; vote.sync.ballot.b32 all, own, 0xffffffff;"
    code = f"{{ .reg .pred own; .reg .b32 all; {vote} popc.b32 $0, all; }}"
    return _ptx(code, word)


def _ptx(code: str, *words: jax.Array) -> jax.Array:
    """The int32 that PTX leaves in $0, of int32 in $1 and so on. Source: PTX ISA, "shfl.sync", "vote.sync", "popc"."""
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(
        arg_types=(scalar,) * len(words), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar)
    )
    def run(_: Any, *words: Any) -> Any:
        given = (word.registers.item() for word in words)
        word = mosaic.inline_ptx(code, *given, result_types=ir.IntegerType.get_signless(32), has_side_effects=True)
        return mosaic_gpu.FragmentedArray.splat(word, (), is_signed=True)

    found: jax.Array = run(*(laid_out(word, scalar) for word in words))
    return found
