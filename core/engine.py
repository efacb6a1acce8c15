"""What kernels use beside JAX's own `plgpu` and `pl`, compiled or interpreted, for jax 0.11.2 to 0.12.

- `kernel` makes a function that launches a kernel body on the GPU, or in JAX's interpreter with race detection.
- `specialize` splits a block into a producer warpgroup and consumer warpgroups.
- `Accumulators`, `wgmma` and `accumulated` are the tensor cores' float32 sums: JAX's accumulators in registers when compiled.
  Interpreted, they lie in simulated shared memory, because JAX's interpreter cannot reset an accumulator inside a pipeline.
- `operand_transforms` is the shared-memory layout (tiling and swizzle) that wgmma and TMA agree on.
- `load_rows` and `store_rows` copy windows of rows that begin and end anywhere. Other TMA copies may touch arrays whose sides
  swizzle tiles do not divide (`core/tma.py`).
- `races_found` and `reset_interpreter` read and clear the interpreter's race detector.
"""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextvars import ContextVar
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _interpreter
from jax._src.state import AbstractRef
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, vector
from jax.typing import DTypeLike

from mgpu_ops.core import cluster, inflight, jax_patches, ptxas, regions, threads, tma
from mgpu_ops.core.mesh import same_mesh_axes
from mgpu_ops.core.tile_scheduler import Int

# Each patch of JAX is applied here, once: core/jax_patches.py lists what they change and for whom.
tma.copy_any_shape()
jax_patches.add_in_float32()
jax_patches.name_replicas()
jax_patches.forget_numbers()
jax_patches.lower_with_32_bits()
threads.run_on_own_client()
threads.run_as_traced()

last_start = tma.last_start


@dataclasses.dataclass(frozen=True)
class Accumulators:
    """Scratch type: float32 accumulators of `shapes` in the registers of each of `warpgroups` consumer warpgroups.

    A kernel receives a handle. A consumer warpgroup calls `handle.scope(fn)`, which runs `fn(*accs)` with accumulators of its
    own, set to zero. `acc[...]` waits for all wgmma and reads, `accumulated(acc, n)` waits for all but the last n, and
    `acc[...] = x` writes. A loop or branch that starts a wgmma must also wait for it (`core/inflight.py`).
    """

    shapes: tuple[tuple[int, int], ...]
    warpgroups: int

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, accumulators are in shared memory."""
        return [plgpu.SMEM((self.warpgroups, *shape), jnp.float32) for shape in self.shapes] if interpret else []

    def inbox(self) -> tuple[int, ...]:
        """Nothing comes from other blocks."""
        return ()

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _Registers | _Simulated:
        return _Simulated(scratch) if interpret else _Registers(self.shapes)


@dataclasses.dataclass(frozen=True)
class ClusterSum:
    """Scratch type: adds up float32 values of `shape`, of each of `warpgroups` warpgroups, over the `blocks` of a cluster.

    A kernel receives a handle, `_ClusterSum`. The first block along the cluster's axis `axis` gets the sum; the others send it
    their values through distributed shared memory. Source: PTX ISA, "st.async".
    """

    shape: tuple[int, int]
    warpgroups: int
    blocks: int
    axis: str

    def inbox(self) -> tuple[int, ...]:
        """The shape of what the first block receives: from each other block, from each of its warpgroups."""
        return (self.blocks - 1, self.warpgroups, *self.shape)

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _ClusterSum:
        return _SimulatedClusterSum(self, received, *scratch) if interpret else _ClusterSum(self, *scratch)

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, the inbox is in global memory."""
        all_blocks = plgpu.ClusterBarrier(collective_axes=(self.axis,), num_arrivals=self.warpgroups)
        if interpret:
            return [all_blocks, all_blocks]
        inbox = plgpu.SMEM(self.inbox(), jnp.float32, transforms=operand_transforms(self.shape[1], jnp.float32))
        return [inbox, plgpu.Barrier(num_arrivals=self.blocks - 1, num_barriers=self.warpgroups), all_blocks]


@dataclasses.dataclass(frozen=True)
class ClusterColumns:
    """Scratch type: the blocks of a cluster share out the columns of their tiles, once in a kernel of one warpgroup.

    Every block has a float32 tile [64, columns], of which the first `rows` rows matter, with a number for each row. Afterwards
    block b of `blocks` along `axis`, the cluster's only one, has columns [b, b + 1) * columns / blocks of all tiles, and all
    numbers. They come through distributed shared memory (`core/cluster.py`), into memory that `before`, other scratch types by
    name, had until then. A kernel receives a handle, `_ClusterColumns`.
    """

    columns: int
    rows: int
    blocks: int
    axis: str
    before: Mapping[str, Any]

    @property
    def own(self) -> int:
        """Columns of a block, a multiple of 8."""
        return self.columns // self.blocks

    def inbox(self) -> tuple[int, ...]:
        """The shape of what a cluster's blocks receive: to each, from each; its columns, and the number of the row."""
        return (self.blocks, self.blocks, 64, self.own + 1) if self.blocks > 1 else ()

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _ClusterColumns:
        return _SimulatedClusterColumns(self, received, *scratch) if interpret else _ClusterColumns(self, *scratch)

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, the inbox is in global memory."""
        before = dict(self.before)
        if interpret:
            return [before, plgpu.ClusterBarrier(collective_axes=(self.axis,), num_arrivals=1)] if self.blocks > 1 else [before]
        inbox = [
            plgpu.SMEM((self.blocks, 64, self.own), jnp.float32),
            plgpu.SMEM((self.blocks, 64), jnp.float32),
            plgpu.SMEM((cluster.BARRIER_WORDS,), jnp.int32),
        ]
        return [plgpu.RefUnion(before, inbox) if self.blocks > 1 else before]


_interpreting: ContextVar[bool] = ContextVar("_interpreting", default=False)


@contextlib.contextmanager
def _interpreted(value: bool) -> Iterator[None]:
    """A kernel traced in this context is for the interpreter, or not."""
    token = _interpreting.set(value)
    try:
        yield
    finally:
        _interpreting.reset(token)


class _Registers:
    def __init__(self, shapes: tuple[tuple[int, int], ...]):
        self._shapes = shapes

    def scope(self, fn: Callable[..., None]) -> None:
        def run(*accs: Any) -> None:
            with inflight.scope():
                fn(*accs)

        pl.run_scoped(run, *(plgpu.ACC(shape, jnp.float32) for shape in self._shapes))


class _Simulated:
    """Accumulators in the interpreter: one slice of shared memory each per consumer warpgroup."""

    def __init__(self, refs: list[Any]):
        self._refs = refs

    def scope(self, fn: Callable[..., None]) -> None:
        accs = [ref.at[lax.axis_index("wg")] for ref in self._refs]
        for acc in accs:
            acc[...] = jnp.zeros(acc.shape, jnp.float32)
        with inflight.scope():
            fn(*accs)


class _ClusterSum:
    """What a kernel has of a `ClusterSum`. Its inbox is free when `taken` by the first block, and holds what has `arrived`."""

    def __init__(self, kind: ClusterSum, inbox: Any, arrived: Any, taken: Any):
        self._kind, self._inbox, self._arrived, self._taken = kind, inbox, arrived, taken

    def add(self, values: jax.Array, number: jax.Array, use: Callable[[jax.Array], None]) -> None:
        """Runs `use(sum over the blocks)` in the cluster's first block.

        Every consumer warpgroup of every block calls it, for the sums `number` = 0, 1, ... of the whole kernel, and in the end
        `finish`. Blocks are added in their order, so that the same values give the same bits.
        """
        first = lax.axis_index(self._kind.axis) == 0
        pl.when(number > 0)(self.finish)  # the inbox is free again

        @pl.when(jnp.logical_not(first))
        def _() -> None:
            self._send(values)

        @pl.when(first)
        def _() -> None:
            total = values
            for part in self._receive():
                total += part
            use(total)

        plgpu.barrier_arrive(self._taken)

    def finish(self) -> None:
        """Waits until the last sum is made: a block that ends before would take its shared memory from under the others."""
        plgpu.barrier_wait(self._taken)

    def _send(self, values: jax.Array) -> None:
        wg, axis = lax.axis_index("wg"), self._kind.axis
        there = self._inbox.at[lax.axis_index(axis) - 1, wg]
        plgpu.async_store_smem(values, there, self._arrived.at[wg], cluster_idx=jnp.int32(0), cluster_dim=axis)

    def _receive(self) -> Iterator[jax.Array]:
        wg = lax.axis_index("wg")
        plgpu.barrier_wait(self._arrived.at[wg])
        for part in range(self._kind.blocks - 1):
            yield self._inbox[part, wg]


class _SimulatedClusterSum(_ClusterSum):
    """In the interpreter, which has no distributed shared memory: values go through global memory, [clusters, *inbox]."""

    def _send(self, values: jax.Array) -> None:
        inbox = self._inbox.at[lax.axis_index("block")]
        inbox[lax.axis_index(self._kind.axis) - 1, lax.axis_index("wg")] = values
        plgpu.barrier_arrive(self._arrived)
        plgpu.barrier_wait(self._arrived)  # each phase of a barrier must be seen by all who share it

    def _receive(self) -> Iterator[jax.Array]:
        plgpu.barrier_arrive(self._arrived)
        plgpu.barrier_wait(self._arrived)
        for part in range(self._kind.blocks - 1):
            yield self._inbox[lax.axis_index("block"), part, lax.axis_index("wg")]


type Exchange = Callable[[jax.Array, jax.Array], list[tuple[jax.Array, jax.Array]]]  # `_ClusterColumns.exchange`


class _ClusterColumns:
    """What a kernel has of a `ClusterColumns`: `before`, refs until `exchange`."""

    def __init__(self, kind: ClusterColumns, memory: Any):
        self._kind = kind
        self.before: dict[str, Any]
        self._inbox: list[Any]
        self.before, self._inbox = memory if kind.blocks > 1 else (memory, [])

    def exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """This block's columns of each block's tile [64, columns], and each block's numbers [64], in the order of the blocks.

        Every block of the cluster calls it, when no copy or wgmma uses `before` any more. Nothing may use it afterwards.
        """
        return [(tile, numbers)] if self._kind.blocks == 1 else self._exchange(tile, numbers)

    def _exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        tiles, others, _ = self._inbox
        cluster.send_columns(tile, numbers, self._kind.rows, self._kind.blocks, self._inbox)
        layout = plgpu.Layout.WGMMA
        return [
            (
                plgpu.load(tiles.at[i], layout=layout, optimized=False),
                plgpu.load(others.at[i], layout=layout.reduce(1), optimized=False),
            )
            for i in range(self._kind.blocks)
        ]


class _SimulatedClusterColumns(_ClusterColumns):
    """In the interpreter, which has no distributed shared memory: tiles go through global memory, [clusters, *inbox]."""

    def __init__(self, kind: ClusterColumns, received: Any, before: Any, all_blocks: Any = None):
        self._kind, self._received, self._all_blocks = kind, received, all_blocks
        self.before = before

    def _exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        own, rows, me = self._kind.own, pl.ds(0, self._kind.rows), lax.axis_index(self._kind.axis)
        inboxes = self._received.at[lax.axis_index("block")]
        for block in range(self._kind.blocks):
            inbox = inboxes.at[block, me]
            inbox[rows, pl.ds(0, own)] = tile[: self._kind.rows, block * own : (block + 1) * own]
            inbox[rows, pl.ds(own, 1)] = numbers[: self._kind.rows, None]
        plgpu.barrier_arrive(self._all_blocks)
        plgpu.barrier_wait(self._all_blocks)
        return [(inboxes[me, i, :, pl.ds(0, own)], inboxes[me, i, :, own]) for i in range(self._kind.blocks)]


def accumulated(acc: Any, in_flight: int) -> jax.Array:
    """The accumulator's values after all wgmma but the last `in_flight`, which must add to other accumulators."""
    inflight.reads(acc, in_flight)
    return acc[...] if _interpreting.get() else plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """acc[m, n] += sum_k a[m, k] b[k, n] on the tensor cores, asynchronously: `wgmma_wait(n)` leaves n in flight.

    a and b are shared-memory refs (see `operand_transforms`), 16-bit floats; a may be registers instead. m % 64 == 0,
    n % 8 == 0, n <= 256. Source: PTX ISA, "wgmma.mma_async".
    """
    inflight.starts(acc, a, b)
    if not _interpreting.get():
        if isinstance(a, jax.Array):
            ptxas.warn_of_register_operands()
        plgpu.wgmma(acc, a, b)
    else:  # the interpreter wants a fence between loads and the next TMA write; wgmma's own loads need none
        acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        plgpu.commit_smem()


def wgmma_wait(in_flight: int) -> None:
    """Waits until all wgmma are done but the last `in_flight`."""
    inflight.waits(in_flight)
    plgpu.wgmma_wait(in_flight)


def barrier_arrive(barrier: Any) -> None:
    """Arrives at a barrier. At an `empty` barrier of a `Pipeline`, no wgmma in flight may read the pipeline's buffers."""
    inflight.arrives(barrier)
    plgpu.barrier_arrive(barrier)


def copy_gmem_to_smem(src: Any, dst: Any, barrier: Any, **options: Any) -> None:
    """Starts the copy dst = src from global to shared memory, as `plgpu.copy_gmem_to_smem`; arrives at `barrier` when done."""
    inflight.copies(dst, barrier)
    plgpu.copy_gmem_to_smem(src, dst, barrier, **options)


def operand_transforms(minor: int, dtype: DTypeLike, swizzle: int | None = None) -> tuple[Any, ...]:
    """Tiling and swizzle of a shared-memory buffer whose rows hold `minor` elements: 8 rows of `swizzle` bytes a tile.

    `swizzle` (128, 64 or 32 bytes) defaults to the largest that divides a row. Both operands of one wgmma need the same.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or plgpu.find_swizzle(minor * itemsize * 8)
    return (plgpu.TilingTransform((8, swizzle // itemsize)), plgpu.SwizzleTransform(swizzle))


def block_start(index: Int, width: int, length: int, dtype: DTypeLike, swizzle: int) -> Int:
    """The first element of block `index` when `copy_gmem_to_smem` copies a row of `length` in blocks of `width`.

    It is index * width, with one exception. TMA cannot clip a block of several swizzle tiles where these do not divide the row:
    the last block then ends with the row and overlaps the one before. The interpreter clips it instead.
    """
    last = tma.last_start(length, width, swizzle // jnp.dtype(dtype).itemsize)
    start = index * width
    return start if last is None or _interpreting.get() else jnp.minimum(start, jnp.int32(last))


def block_anywhere(ref: Any, *index: Any) -> Any:
    """The block of an array [1, ..., rows, columns] at `index`, for a copy. Its two slices may begin at any multiple of 8.

    Mosaic accepts only starts that it can prove to be multiples of the swizzle tile. So the starts are written multiplied by
    the tile's sides, and the copy divides them again (`core/tma.py`).
    """
    *lead, rows, columns = index
    if _interpreting.get():
        return ref.at[(0, *index)]
    there = (pl.ds(rows.start * tma.ROW_UNIT, rows.size), pl.ds(columns.start * tma.COLUMN_UNIT, columns.size))
    return ref.at[(jnp.int32(tma.ANYWHERE), *lead, *there)]


def rows_view(x: jax.Array) -> jax.Array:
    """[rows, columns] as [1, 1, rows, columns], for `load_rows` and `store_rows`. The first two indices mark windows."""
    return x.reshape(1, 1, *x.shape)


def load_rows(src: Any, row: Int, end: Int, column: Int, dst: Any, barrier: Any) -> None:
    """Starts the copy dst[i, j] = src[row + i, column + j], with zeros from row `end` on; arrives at `barrier` when done.

    src: a `rows_view` in global memory of fewer than 2^28 rows.
    row, end: traced integers of any value, end <= the rows of src.
    column: a multiple of 64, as the compiler can see.
    dst: [rows, columns] in shared memory, tiled with the 128-byte swizzle (`operand_transforms`). If it is
      wider than one swizzle tile, tiles divide the rows of src.
    """
    rows, columns = dst.shape
    inflight.copies(dst, barrier)
    if not _interpreting.get():
        plgpu.copy_gmem_to_smem(_window(src, row, end, column, dst.shape), dst, barrier)
        return
    dst[...] = jnp.zeros(dst.shape, dst.dtype)
    for offset, count, some in _binary(jnp.clip(end - row, 0, rows), rows):

        @pl.when(some)
        def _(offset: jax.Array = offset, count: int = count) -> None:
            # The row may end inside of the block: pad with zeros.
            whole = jnp.pad(src[0, 0, pl.ds(row + offset, count), :], ((0, 0), (0, columns)))
            dst[pl.ds(offset, count), :] = lax.dynamic_slice(whole, (jnp.int32(0), jnp.int32(column)), (count, columns))

    plgpu.commit_smem()
    plgpu.barrier_arrive(barrier)


def store_rows(src: Any, dst: Any, row: Int, end: Int, column: Int) -> None:
    """Starts the copy dst[row + i, column + j] = src[i, j] of the rows before `end`, the reverse of `load_rows`.

    It is a group of copies of its own for `wait_smem_to_gmem`.
    """
    rows, columns = src.shape
    if not _interpreting.get():
        plgpu.copy_smem_to_gmem(src, _window(dst, row, end, column, src.shape))
        return
    length = jnp.clip(end - row, 0, rows)
    for offset, count, some in _binary(length, rows):

        @pl.when(some)
        def _(offset: jax.Array = offset, count: int = count) -> None:
            window = dst.at[0, 0, pl.ds(row + offset, count), pl.ds(column, columns)]
            plgpu.copy_smem_to_gmem(src.at[pl.ds(offset, count), :], window, commit_group=False)

    plgpu.commit_smem_to_gmem_group()
    # The interpreter counts copies instead of groups, and would miss an empty group.
    pl.when(length == 0)(functools.partial(plgpu.wait_smem_to_gmem, 0, wait_read_only=True))


def _window(ref: Any, row: Int, end: Int, column: Int, shape: tuple[int, int]) -> Any:
    """A window of rows as `core/tma.py` takes it. Mosaic only takes multiples of 8 rows, so the row is written times 8."""
    return ref.at[jnp.int32(end), jnp.int32(tma.WINDOW), pl.ds(row * tma.ROW_UNIT, shape[0]), pl.ds(column, shape[1])]


def _binary(length: jax.Array, limit: int) -> Iterator[tuple[jax.Array, int, jax.Array]]:
    """A traced length <= limit as a sum of powers of two: (offset, power, whether the length has it), the largest first."""
    offset, size = jnp.int32(0), 1 << (limit.bit_length() - 1)
    while size:
        yield offset, size, length & size != 0
        offset, size = offset + (length & size), size // 2


def global_memory_fence() -> None:
    """Orders TMA copies after it behind stores to global memory that a signal, waited for before, has released.

    Source: PTX ISA, "fence.proxy.async": TMA and ordinary accesses go through different proxies.
    """
    if _interpreting.get():
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mosaic.inline_ptx("fence.proxy.async;", has_side_effects=True)

    fence()


def signal_all(semaphore: Any, device_ids: Sequence[Any]) -> None:
    """Adds 1 to the semaphore on each of several GPUs, given by mesh indices, after the warpgroup's stores are visible to them.

    One fence releases the stores to all GPUs. `semaphore_signal` would fence once for each GPU, as long each time.
    """

    @plgpu.inline_mgpu(arg_types=[plgpu.RefType()] * len(device_ids))
    def signal(_: Any, *semaphores: Any) -> None:
        mosaic.warpgroup_barrier()
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            mosaic.fence_release_sys()
            always = mosaic.c(1, ir.IntegerType.get_signless(1))
            for one in semaphores:
                mosaic.SemaphoreRef(mosaic.memref_ptr(one)).signal(1, predicate=always, relaxed=True)

    signal(*(plgpu.remote_ref(semaphore, device) for device in device_ids))


def warpgroup_barrier() -> None:
    """The threads of a warpgroup wait for each other."""
    if _interpreting.get():
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        mosaic.warpgroup_barrier()

    barrier()


def store_volatile(values: jax.Array, ref: Any) -> None:
    """ref[i] = values[i] in shared memory, a float32 for each of a warpgroup's 64 rows, with stores that ptxas does not move.

    ptxas moves a wait for wgmma ahead of arithmetic that does not need it; the arithmetic then runs after the tensor cores
    instead of beside them. A wait that follows this store stays behind all that `values` depends on.
    """
    if _interpreting.get():
        ref[...] = values
        return
    layout = plgpu.Layout.WGMMA.reduce(1)

    @plgpu.inline_mgpu(arg_types=(layout, plgpu.RefType()))
    def store(_: Any, values: Any, ref: Any) -> None:
        # Layout of wgmma's rows: warp w has rows 16 w to 16 w + 15. Four threads share a row and the one 8 below it.
        i32 = ir.IntegerType.get_signless(32)
        lane = mosaic.thread_idx()
        row = arith.addi(
            arith.muli(arith.divui(arith.remui(lane, mosaic.c(128, i32)), mosaic.c(32, i32)), mosaic.c(16, i32)),
            arith.divui(arith.remui(lane, mosaic.c(32, i32)), mosaic.c(4, i32)),
        )
        start = mosaic.getelementptr(mosaic.memref_ptr(ref), [row], ir.F32Type.get())
        for i, register in enumerate(values.registers.flat):
            word = vector.extract(register, dynamic_position=[], static_position=[0])
            mosaic.inline_ptx(f"st.volatile.shared.f32 [$0+{32 * i}], $1;", start, word, has_side_effects=True)

    store(values, ref)


def store_scattered(values: jax.Array, dst: Any, offsets: jax.Array) -> None:
    """dst[offsets[i] + j] = values[i, j] in global memory, for the rows i of a warpgroup's 64 whose offset is not negative.

    values: [64, columns] with columns a multiple of 8, or [64] for one column, in wgmma's layout. dst: rank 1. Offsets are even
    where there are several columns.
    """
    columns = 1 if values.ndim == 1 else values.shape[1]
    if _interpreting.get():

        def row(i: jax.Array, _: None) -> None:
            start = lax.dynamic_index_in_dim(offsets, i, keepdims=False)
            pl.when(start >= 0)(lambda: _set(dst, start, columns, lax.dynamic_index_in_dim(values, i, keepdims=False)))

        lax.fori_loop(0, 64, row, None)
        return
    cluster.store_scattered(values, dst, offsets)


def load_scattered(src: Any, offsets: jax.Array) -> jax.Array:
    """src[offsets[i]] in global memory for each of a warpgroup's 64 rows i: float32 [64] in wgmma's layout.

    src: float32 of rank 1. offsets: int32 [64] in that layout.
    """
    if _interpreting.get():
        rows = jnp.zeros((64,), jnp.float32)
        return lax.fori_loop(0, 64, lambda i, rows: rows.at[i].set(src[offsets[i]]), rows)
    return cluster.load_scattered(src, offsets)


def _set(dst: Any, start: jax.Array, columns: int, values: jax.Array) -> None:
    dst[pl.ds(start, columns)] = values.reshape(columns)


def interpreting() -> bool:
    """Whether the kernel that is being traced is for the interpreter."""
    return _interpreting.get()


def add_tile(src: Any, dst: Any) -> None:
    """Starts dst += src, float32, from shared to global memory. Several blocks may add to the same place, in any order.

    The interpreter has no such copies and overwrites dst: there, each block needs a dst of its own.
    """
    plgpu.copy_smem_to_gmem(src, dst, reduction_op=None if _interpreting.get() else "add")


def frozen(ref: Any, *operands: jax.Array) -> jax.Array:
    """The array in a `jax.new_ref` that a kernel of `operands` has written. The ref is not used after this.

    Inside `jax.shard_map` the array varies over the mesh axes of the operands. JAX does not know this of the ref.
    """
    return same_mesh_axes(jax.freeze(ref), *operands)[0]


def transpose_ref(ref: Any) -> Any:
    """A view of a rank-2 shared-memory ref with its dimensions swapped. wgmma reads 16-bit operands in both orders."""
    return ref.transpose((1, 0))


@dataclasses.dataclass(frozen=True)
class Launch:
    """The blocks that run a kernel.

    name: what profilers and dumps call the kernel.
    grid: number of blocks, or of clusters, along each named axis. The body asks `lax.axis_index` for its own place.
    warpgroups: of 128 threads each, in a block. The body runs once in each; their axis is "wg".
    cluster: number of blocks in a cluster along each named axis; {} for none.
    approx_math: exponentials and divisions may be the GPU's fast approximations.
    interpret: run in JAX's GPU interpreter, on any machine, with race detection, instead of compiling.
    """

    name: str
    grid: Mapping[str, int]
    warpgroups: int
    cluster: Mapping[str, int] = dataclasses.field(default_factory=dict)
    approx_math: bool = False
    interpret: bool = False


def kernel(
    body: Callable[..., None],
    launch: Launch,
    *,
    out_type: Any,
    scratch_types: Mapping[str, Any],
    equal_over: tuple[str, ...] = (),
) -> Callable[..., Any]:
    """A function of arrays that runs `body(*input_refs, *output_refs, **scratch)` as one GPU kernel.

    Args:
      body: the kernel, as one warpgroup of one block runs it.
      launch: how many blocks of how many warpgroups run it.
      out_type: shape and dtype of the outputs (a pytree of `jax.ShapeDtypeStruct`).
      scratch_types: the buffers and barriers of a block by name; `Accumulators` become their handle.
      equal_over: mesh axes over whose devices the outputs are equal although the inputs differ. The kernel guarantees it.

    A kernel that needs more shared memory than the GPU has raises ValueError when it is lowered.
    """
    interpret = launch.interpret
    if interpret:  # it simulates one cluster at a time, and waits for it in one more thread
        threads.provide(math.prod(launch.cluster.values()) * launch.warpgroups + 1)
    else:
        ptxas.prefer_newest()
    ours = {k: t for k, t in scratch_types.items() if isinstance(t, (Accumulators, ClusterSum, ClusterColumns))}
    buffers = {k: ours[k].scratch(interpret) if k in ours else t for k, t in scratch_types.items()}
    inboxes: dict[str, jax.ShapeDtypeStruct] = {}  # interpreted, further outputs, which the caller does not see
    if interpret:
        clusters = math.prod(launch.grid.values())
        inboxes = {k: jax.ShapeDtypeStruct((clusters, *t.inbox()), jnp.float32) for k, t in ours.items() if t.inbox()}

    def fresh_body(*refs: Any, **scratch: Any) -> None:
        received = dict(zip(inboxes, refs[len(refs) - len(inboxes) :], strict=True))
        refs = refs[: len(refs) - len(inboxes)]
        for key, t in ours.items():
            scratch[key] = t.handle(scratch[key], received.get(key), interpret)
        with _interpreted(interpret), inflight.watched(), regions.named_primitives():
            if not interpret:
                _mark()
            body(*refs, **scratch)

    run = plgpu.kernel(
        fresh_body,
        out_type=(*(out_type if isinstance(out_type, tuple) else (out_type,)), *inboxes.values()) if inboxes else out_type,
        scratch_types=buffers,
        grid=tuple(launch.grid.values()),
        grid_names=tuple(launch.grid),
        cluster=tuple(launch.cluster.values()),
        cluster_names=tuple(launch.cluster),
        num_threads=launch.warpgroups,
        thread_name="wg",
        kernel_name=launch.name,
        compiler_params=plgpu.CompilerParams(
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=launch.approx_math,
            **({} if interpret else regions.compiler_params(launch.name, launch.warpgroups)),
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )

    def call(*arrays: Any) -> Any:
        # Inside jax.shard_map an output varies over every mesh axis that an input varies over.
        values = [x for x in arrays if not isinstance(jax.typeof(x), AbstractRef)]
        with jax.enable_x64(False):  # kernels count in 32 bits: a Python number beside an int32 must not be wider
            outputs = run(*arrays)
        if inboxes:
            outputs = tuple(outputs[: -len(inboxes)]) if isinstance(out_type, tuple) else outputs[0]
        return jax.tree.map(lambda out: same_mesh_axes(out, *values, but=equal_over)[0], outputs)

    return call


def _mark() -> None:
    """Marks the kernel being traced: it gets the patches that others' kernels do not."""
    plgpu.inline_mgpu()(jax_patches.mark)()


def specialize(
    producer: Callable[[], None],
    consumer: Callable[[], None],
    *,
    consumers: int,
    producer_registers: int,
    consumer_registers: int,
) -> None:
    """Splits a block by role: its first `consumers` warpgroups run `consumer`, the last one `producer`, all at the same time.

    Registers are per thread, multiples of 8. The warpgroups together may not have more than the block was launched with.
    Source: PTX ISA, "setmaxnreg".
    """
    wg = lax.axis_index("wg")

    @pl.when(wg == consumers)
    def _() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        producer()

    @pl.when(wg < consumers)
    def _() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        consumer()


def races_found() -> bool:
    """Whether the last interpreted kernel had a data race. Raises RuntimeError where none was interpreted yet."""
    state = _interpreter._races
    if state is None:
        raise RuntimeError("no kernel was interpreted since the start or reset_interpreter()")
    return bool(state.races_found)


def reset_interpreter() -> None:
    """Clears the interpreter after a kernel raised in it; without this the next one may fail for the old reason."""
    _interpreter.reset_gpu_interpret_mode_state()
