"""The kernel that carries out a `Schedule` of `schedules.py` between GPUs: it knows no algorithm.

A buffer is [parts, rows, columns], a row of 512 bytes; a part is a slice of the payload. A chunk is `chunk` rows of a part; the
last chunk of a slice may be shorter. One warpgroup a block moves chunks in one of three ways:

- through TMA: the chunk is copied into a stage of the inbox, in shared memory, one copy for each device that the move reads.
  Where it reads several, registers reduce them into a stage of the outbox. From the inbox or the outbox, TMA copies the result
  out. `stages` chunks are in flight.
- through the switch (multimem transport): places on MULTICAST are read by `multimem.ld_reduce` and written by `multimem.st`,
  between registers and global memory.
- in LL (`ll.py`): between registers and global memory, each word with a flag of its own.

Interpreted, one kernel stands for all devices: they are blocks of one cluster, a peer's memory is another part of an array, and
a signal is a barrier of the cluster. This shows that chunks, places, stages and waits for stores are right, and finds races
among them. That the signals suffice is shown by `tests/mgpu_ops/collectives/simulator.py`.
"""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Callable, Iterable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.collectives import ll
from mgpu_ops.collectives.layout import (
    LL_WORDS,
    OUTBOX_STAGES,
    ROWS_AT_ONCE,
    CollectiveKernel,
    LLMemory,
    ll_memory_rows,
    reduced,
)
from mgpu_ops.collectives.schedules import MULTICAST, Buffer, Move, Place, Signal, Wait, relative
from mgpu_ops.core import engine


def half_and_flag(calls: jax.Array) -> tuple[jax.Array, jax.Array, jax.Array]:
    """For a call with an `LLMemory`, from the count of calls before it: its half, its flag, and the count after it. All int32.

    Whatever the count is, the next call has the other half, and no flag is 0, the value of memory that was never written.
    """
    return calls & 1, calls + 1, jnp.where(calls == -2, 1, calls + 1)


@dataclasses.dataclass(frozen=True)
class Deadline:
    """For LL schedules: how long to wait for data, and where to write whose did not come. The result is then undefined.

    late: a ref of int32 [n + 1], zeros at first: 1 for each device whose data did not come in time, and last whether any.
    """

    late: Any
    seconds: float


def run(
    x: jax.Array,
    kernel: CollectiveKernel,
    *,
    memory: LLMemory | None = None,
    deadline: Deadline | None = None,
    equal: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel inside `jax.shard_map` over `kernel.axes`: x has `kernel.shape("x")`, the result `kernel.shape("out")`.

    equal: the result is the same on all devices, and so typed. Interpreted, x and the result have all devices' in front:
    [n, ...], no shard_map is needed, and there is no `memory` nor `deadline`.
    """
    n = kernel.schedule.n
    inputs: dict[str, Any] = {"x": x}
    results: list[Buffer] = ["out"]
    if memory is not None:
        inputs["where"] = memory.where
    elif kernel.schedule.ll and not interpret:
        parts, rows, _ = kernel.shape("scratch")
        inputs["scratch"] = jax.new_ref(jnp.zeros((parts, rows, LL_WORDS), jnp.int32))
    elif kernel.schedule.scratch_slices:
        results.append("scratch")
    if deadline is not None:
        inputs["late"] = deadline.late

    def body(*refs: Any, **scratch: Any) -> None:
        buffers = dict(zip((*inputs, *results), refs, strict=True))
        if memory is not None:
            block: _Block = _InWorkspace(kernel, buffers, scratch, memory.rows)
        else:
            block = (_Interpreted if interpret else _Block)(kernel, buffers, scratch)
        block.timeout = deadline.seconds if deadline else None
        block.run()

    lead = (n,) if interpret else ()
    launch = engine.Launch(
        f"mgpu_ops_{kernel.schedule.kind}_{kernel.schedule.algorithm}",
        grid={"all": 1} if interpret else {"block": kernel.blocks},
        cluster={"device": n, "block": kernel.blocks} if interpret else {},
        warpgroups=1,
        interpret=interpret,
    )
    return engine.kernel(
        body,
        launch,
        out_type=tuple(jax.ShapeDtypeStruct((*lead, *kernel.shape(buffer)), kernel.dtype) for buffer in results),
        scratch_types=_scratch_types(kernel, interpret),
        equal_over=kernel.names if equal else (),
    )(*inputs.values())[0]


def _scratch_types(kernel: CollectiveKernel, interpret: bool) -> dict[str, Any]:
    """Inbox and outbox, a barrier a stage of the inbox for each number of copies that fill one, and the schedule's flags."""
    types: dict[str, Any] = {}
    chunk = (kernel.cut.chunk, kernel.columns)
    reads = sorted({len(move.reads) for move in kernel.tma_moves})
    if reads:
        types["inbox"] = plgpu.SMEM((kernel.stages, reads[-1], *chunk), kernel.dtype)
    if reads and reads[-1] > 1:
        types["outbox"] = plgpu.SMEM((OUTBOX_STAGES, *chunk), kernel.dtype)
    for r in reads:
        types[f"full_{r}"] = plgpu.Barrier(num_arrivals=r, num_barriers=kernel.stages)
    for step in kernel.schedule.steps:
        if isinstance(step, Wait) and interpret:
            types[f"flag_{step.flag}"] = plgpu.ClusterBarrier(collective_axes=("device",))
        elif isinstance(step, Wait) and not step.ll:
            types[f"flag_{step.flag}"] = plgpu.SemaphoreType.REGULAR
    return types


class _Block:
    """One block of one device, while the kernel is traced."""

    flag: Any = 1  # of LL data that are there; memory is zero before
    timeout: float | None = None  # seconds: of a `Deadline`

    def __init__(self, kernel: CollectiveKernel, buffers: dict[str, Any], scratch: dict[str, Any]) -> None:
        self.kernel, self.buffers, self.scratch = kernel, buffers, scratch
        self.n = kernel.schedule.n
        self.own = self.index()
        self.signalled = dict.fromkeys(kernel.schedule.flags, 0)

    def run(self) -> None:
        for step in self.kernel.schedule.steps:
            if isinstance(step, Signal):
                self.signal(step)
            elif isinstance(step, Wait):
                self.wait(step)
            elif step.through_switch:
                self.move_through_switch(step)
            elif step.ll:
                self.move_in_ll(step)
            else:
                self.move_through_tma(step)
        if self.kernel.tma_moves:
            plgpu.wait_smem_to_gmem(0)  # the last stores are complete when the kernel ends

    # --- Other devices

    def index(self) -> jax.Array:
        """The own device's index along the axes."""
        return lax.axis_index(self.kernel.names)

    def device(self, number: int) -> dict[str, Any]:
        """The mesh indices of the device `number` after the own one. The host must be able to compute them: for TMA."""
        index = lax.rem(self.own + jnp.int32(number % self.n), jnp.int32(self.n))
        ids, stride = {}, 1
        for name, size in reversed(self.kernel.axes):
            ids[name] = lax.rem(lax.div(index, jnp.int32(stride)), jnp.int32(size)) if len(self.kernel.axes) > 1 else index
            stride *= size
        return ids

    def memory(self, place: Place, where: Any) -> Any:
        """A ref to part of a buffer of some device."""
        assert isinstance(place.device, int)
        ref = self.buffers[place.buffer].at[where]
        if place.device % self.n == 0:
            return ref
        peer: Any = self.device(place.device)
        return plgpu.remote_ref(ref, peer)

    def signal(self, step: Signal) -> None:
        """Waits until the warpgroup's stores are complete, makes them visible to all devices, then raises the flags."""
        if step.ll:
            return
        plgpu.wait_smem_to_gmem(0)
        flag = self.scratch[f"flag_{step.flag}"]
        if step.to == MULTICAST:
            plgpu.semaphore_signal_multicast(flag, collective_axes=self.kernel.names)
            return
        engine.signal_all(flag, [self.device(number) for number in step.to])

    def wait(self, step: Wait) -> None:
        """Waits until the flag has all signals of this step and of those before. A flag is zero when the kernel starts
        and never reset: to read it is cheaper than to subtract from it.
        """
        if step.ll:
            return
        self.signalled[step.flag] += step.count
        plgpu.semaphore_wait(self.scratch[f"flag_{step.flag}"], self.signalled[step.flag], decrement=False)
        engine.global_memory_fence()

    # --- Which chunks, and where they lie

    def own_chunks(self, move: Move) -> tuple[jax.Array, jax.Array]:
        """This block's first chunk of a part, and how many it has; it takes each `blocks`-th."""
        cut, block = self.kernel.cut, lax.axis_index("block")
        every = cut.per_slice * (cut.n if move.whole else 1)
        return block, lax.div(every - block + cut.blocks - 1, jnp.int32(cut.blocks))

    def chunk_start(self, move: Move, number: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The slice, within a whole part, and the row at which a chunk begins."""
        cut = self.kernel.cut
        if not move.whole or cut.n == 1:
            return jnp.int32(0), number * cut.chunk
        return lax.div(number, jnp.int32(cut.per_slice)), lax.rem(number, jnp.int32(cut.per_slice)) * cut.chunk

    def where(self, place: Place, move: Move, number: jax.Array, rows: int) -> Any:
        """Where a chunk of so many rows lies at a place: indices into [parts, rows, columns]."""
        part, row = self.chunk_start(move, number)
        if place.part is not None:
            there = relative(place.part, self.own, self.n) + place.bank * self.n
            part = part + there * (self.kernel.slices if move.whole else 1)
        return part, pl.ds(row, rows)

    def with_length(self, number: jax.Array, body: Callable[[int], None]) -> None:
        """body(rows of the chunk). Copies have static lengths, so a slice's last chunk, if shorter, has a branch of its own."""
        cut = self.kernel.cut
        last = cut.slice % cut.chunk
        if not last:
            body(cut.chunk)
            return
        is_last = lax.rem(number, jnp.int32(cut.per_slice)) == cut.per_slice - 1
        pl.when(is_last)(lambda: body(last))
        pl.when(~is_last)(lambda: body(cut.chunk))

    def layout(self, rows: int, row: int = 16) -> Any:
        """Of so many rows in registers: each thread has up to `row` bytes in a row."""
        vector = math.gcd(rows, row // 4) * 4 // jnp.dtype(self.kernel.dtype).itemsize
        return plgpu.Layout.WG_STRIDED((rows, self.kernel.columns), vec_size=vector)

    # --- Through TMA

    def move_through_tma(self, move: Move) -> None:
        """Copies each chunk into the inbox, reduces several into the outbox, and copies the result out.

        While a chunk is reduced, the copies of the next chunks arrive and the stores of earlier ones leave.
        """
        stages, blocks = self.kernel.stages, self.kernel.blocks
        inbox, full = self.scratch["inbox"], self.scratch[f"full_{len(move.reads)}"]
        first, count = self.own_chunks(move)
        reduces = len(move.reads) > 1
        stores = len(move.writes)  # that TMA starts for a chunk

        def load(i: jax.Array) -> None:
            stage = lax.rem(i, jnp.int32(stages))
            self.load_chunk(move, first + i * blocks, inbox.at[stage], full.at[stage])

        # The first loads: one for each stage of the inbox.
        pl.loop(0, jnp.minimum(stages, count))(lambda i: load(jnp.int32(i)))

        @pl.loop(0, count)
        def _(i: jax.Array) -> None:
            i = jnp.int32(i)
            stage = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(full.at[stage])  # all copies of this chunk have arrived
            result = inbox.at[stage, 0]
            if reduces:
                result = self.scratch["outbox"].at[lax.rem(i, jnp.int32(OUTBOX_STAGES))]
                # The stores that read this stage of the outbox last have read it; those of the other stage may be in flight.
                plgpu.wait_smem_to_gmem((OUTBOX_STAGES - 1) * stores, wait_read_only=True)
                self.reduce(inbox.at[stage], len(move.reads), result)
                plgpu.commit_smem()  # TMA sees what registers wrote
            self.store_chunk(move, first + i * blocks, result)
            # The next load overwrites a stage of the inbox. Registers have just read this chunk's. Without a reduction
            # TMA reads it still: then the load takes the stage of the chunk before, whose stores have read it after this wait.
            ahead = i + (stages if reduces else stages - 1)
            if not reduces:
                plgpu.wait_smem_to_gmem(stores, wait_read_only=True)
            pl.when((ahead < count) & (ahead >= stages))(lambda: load(ahead))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the next move may overwrite all stages

    def load_chunk(self, move: Move, number: jax.Array, stage: Any, full: Any) -> None:
        """Starts the copies of a chunk into a stage of the inbox, one from each place that the move reads."""

        def copy(rows: int) -> None:
            for k, place in enumerate(move.reads):
                position = move.position(k, self.own, self.n) if len(move.reads) > 1 else 0
                source = self.memory(place, self.where(place, move, number, rows))
                engine.copy_gmem_to_smem(source, stage.at[position, pl.ds(0, rows)], full)

        self.with_length(number, copy)

    def store_chunk(self, move: Move, number: jax.Array, source: Any) -> None:
        """Starts the copies of a chunk from shared memory, one to each place that the move writes."""

        def copy(rows: int) -> None:
            for place in move.writes:
                target = self.memory(place, self.where(place, move, number, rows))
                plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target)

        self.with_length(number, copy)

    def reduce(self, chunks: Any, count: int, result: Any) -> None:
        """result = chunks[0] + chunks[1] + ..., summed in float32, in this order."""
        kernel = self.kernel
        chunk = kernel.cut.chunk
        rows = max(r for r in range(1, ROWS_AT_ONCE + 1) if chunk % r == 0)
        layout = self.layout(rows)

        @pl.loop(0, chunk // rows)
        def _(group: jax.Array) -> None:
            here = pl.ds(group * rows, rows)
            result[here] = reduced(
                kernel.reduction, (plgpu.load(chunks.at[k, here], layout=layout, optimized=False) for k in range(count))
            )

    # --- Through the switch

    def move_through_switch(self, move: Move) -> None:
        """Each chunk from global memory to registers and back, reduced or copied to all on the way.

        A thread's loads and stores are plain: it waits for a load before it stores. Blocks work at the same time, and hide it.
        """
        kernel = self.kernel
        first, count = self.own_chunks(move)
        (source,), (target,) = move.reads, move.writes
        chunk = kernel.cut.chunk
        rows = max(r for r in range(1, ROWS_AT_ONCE + 1) if math.gcd(chunk, kernel.rows) % r == 0)

        @pl.loop(0, count)
        def each(i: jax.Array) -> None:
            number = first + i * kernel.blocks
            _, row = self.chunk_start(move, number)

            @pl.loop(0, jnp.minimum(chunk, kernel.rows - row) // rows)
            def at_once(group: jax.Array) -> None:
                def some(place: Place) -> Any:
                    part, where = self.where(place, move, number, rows)
                    return part, pl.ds(where.start + group * rows, rows)

                self.store_all(target, some(target), self.load_all(source, some(source), rows))

    def load_all(self, place: Place, where: Any, rows: int) -> Any:
        """Rows of one device, or, on MULTICAST, those of all devices as the switch reduces them."""
        ref = self.buffers[place.buffer].at[where]
        if place.device != MULTICAST:
            return plgpu.load(ref, layout=self.layout(rows), optimized=False)
        reduction: Any = self.kernel.reduction
        value = plgpu.multimem_load_reduce(ref, collective_axes=self.kernel.names, reduction_op=reduction)
        return plgpu.layout_cast(value, self.layout(rows))

    def store_all(self, place: Place, where: Any, value: jax.Array) -> None:
        """Stores to one device, or, on MULTICAST, to all of them."""
        ref = self.buffers[place.buffer]
        if place.device == MULTICAST:
            plgpu.multimem_store(value, ref.at[where], self.kernel.names)
        else:
            ref[where] = value

    # --- In LL

    def ll_memory(self, place: Place, where: Any) -> Any:
        """Where LL data of the scratch of some device lie: a ref or an `ll.Address`."""
        return self.memory(place, where)

    def move_in_ll(self, move: Move) -> None:
        """Each chunk from global memory to registers and back. Loads from scratch wait for the flag of each word.

        Nothing else waits: stores go out one after the other while the words of peers are still on their way.
        """
        kernel = self.kernel
        first, count = self.own_chunks(move)

        @pl.loop(0, count)
        def each(i: jax.Array) -> None:
            number = first + i * kernel.blocks

            def copy(rows: int) -> None:
                at_once = max(r for r in range(1, ROWS_AT_ONCE // len(move.reads) + 1) if rows % r == 0)

                def some(place: Place, group: jax.Array) -> Any:
                    part, where = self.where(place, move, number, at_once)
                    return part, pl.ds(where.start + group * at_once, at_once)

                @pl.loop(0, rows // at_once)
                def _(group: jax.Array) -> None:
                    reads = self.ll_reads(move, lambda place: some(place, group))
                    # The words of all reads are polled in one loop; then each thread reduces its own in registers.
                    value = reduced(kernel.reduction, self.load_ll(reads, at_once))
                    for place in move.writes:
                        self.store_ll(place, some(place, group), value, at_once)

            self.with_length(number, copy)

    def ll_reads(self, move: Move, where: Callable[[Place], Any]) -> list[tuple[Place, Any]]:
        """What an LL move reads, and where. If it reads all parts of the own scratch, they are in the order of the devices."""
        reads = [(place, where(place)) for place in move.reads]
        if len(reads) < self.n:
            return reads
        return [(move.reads[0], (jnp.int32(part), reads[0][1][1])) for part in range(self.n)]

    def load_ll(self, reads: list[tuple[Place, Any]], rows: int) -> Iterable[Any]:
        """The data at all places. Of scratch, this waits for all of their flags in one loop."""
        layout = self.layout(rows, 8)
        if reads[0][0].buffer != "scratch":
            return [plgpu.load(self.memory(*read), layout=layout, optimized=False) for read in reads]
        deadline = None
        if self.timeout is not None:
            senders = [jnp.int32(self.sender(part)) for _, (part, _) in reads]
            deadline = ll.Deadline(self.buffers["late"], senders, self.timeout)
        places, shape = [self.ll_memory(*read) for read in reads], (rows, self.kernel.columns)
        return ll.load(places, shape, self.kernel.dtype, layout, self.flag, deadline)

    def sender(self, part: jax.Array) -> jax.Array:
        """The index of the device that writes a part of the own scratch: each bank has one part for each device."""
        return lax.rem(part, jnp.int32(self.n))

    def store_ll(self, place: Place, where: Any, value: jax.Array, rows: int) -> None:
        """Stores with flags to scratch, plainly elsewhere."""
        if place.buffer == "scratch":
            ll.store(value, self.ll_memory(place, where), self.layout(rows, 8), self.flag)
        else:
            self.memory(place, where)[...] = value


class _InWorkspace(_Block):
    """A block whose scratch is an `LLMemory`: the half of this call, at the addresses in `where`."""

    def __init__(self, kernel: CollectiveKernel, buffers: dict[str, Any], scratch: dict[str, Any], rows: int) -> None:
        super().__init__(kernel, buffers, scratch)
        self.rows = rows

    def index(self) -> jax.Array:
        return self.buffers["where"][0, 0]  # `lax.axis_index` is for kernels of whose peers XLA knows

    def run(self) -> None:
        words = [self.buffers["where"][0, 1 + i] for i in range(2 * self.n)]
        self.addresses = list(zip(words[::2], words[1::2], strict=True))
        after_halves = (ll_memory_rows(self.n, self.rows) - 1) * 4 * LL_WORDS
        counter = ll.Address(*self.addresses[0], jnp.int32(after_halves) + 4 * lax.axis_index("block"))
        calls = ll.read_word(counter)  # before this one, the same on all devices
        self.half, self.flag, after = half_and_flag(calls)
        super().run()
        engine.warpgroup_barrier()  # all threads have read the counter
        ll.write_word(after, counter)

    def ll_memory(self, place: Place, where: Any) -> Any:
        assert isinstance(place.device, int)
        part, rows = where
        row = self.half * (self.n * self.rows) + part * self.kernel.rows + rows.start
        return ll.Address(*self.addresses[place.device % self.n], row * (4 * LL_WORDS))


class _Interpreted(_Block):
    """A block of the cluster that stands for all devices."""

    def index(self) -> jax.Array:
        return lax.axis_index("device")

    def memory(self, place: Place, where: Any) -> Any:
        assert isinstance(place.device, int)
        return self.buffers[place.buffer].at[(relative(place.device, self.own, self.n), *where)]

    def load_ll(self, reads: list[tuple[Place, Any]], rows: int) -> Iterable[Any]:
        return [self.memory(*read)[...] for read in reads]

    def store_ll(self, place: Place, where: Any, value: jax.Array, rows: int) -> None:
        self.memory(place, where)[...] = value

    def signal(self, step: Signal) -> None:
        plgpu.wait_smem_to_gmem(0)
        engine.barrier_arrive(self.scratch[f"flag_{step.flag}"])

    def wait(self, step: Wait) -> None:
        plgpu.barrier_wait(self.scratch[f"flag_{step.flag}"])

    def load_all(self, place: Place, where: Any, rows: int) -> Any:
        ref = self.buffers[place.buffer]
        if place.device != MULTICAST:
            return ref[(self.own, *where)]
        return reduced(self.kernel.reduction, (ref[(device, *where)] for device in range(self.n)))

    def store_all(self, place: Place, where: Any, value: jax.Array) -> None:
        for device in range(self.n) if place.device == MULTICAST else (self.own,):
            self.buffers[place.buffer][(device, *where)] = value
