"""The kernel that carries out a `Schedule` of `schedules.py` between GPUs: it knows no algorithm.

A buffer is [parts, rows, columns], a row of 512 bytes; a part is a slice of the payload. A piece is `chunk` rows of a part.
It comes through TMA into one of `stages` places of the inbox, is reduced in registers where several were read, and goes out
through TMA again, from the inbox or, reduced, from the outbox. The last piece of a slice may be shorter.

With the multimem transport, places on MULTICAST are read and written by `multimem.ld_reduce` and `multimem.st` between
registers and global memory, without TMA: the switch reduces and copies. Moves in lines go through registers too.

Interpreted, one kernel stands for all devices: they are blocks of one cluster, a peer's memory is another part of an array, and
a signal is a barrier of the cluster. So it shows that pieces, places, stages and drains are right, and finds races among them;
that the signals suffice is shown by `tests/mgpu_ops/collectives/simulator.py`.
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
from mgpu_ops.collectives.exchange import LINE_WORDS, OUTBOX, ROWS_AT_ONCE, Exchange, Memory, memory_rows, reduced
from mgpu_ops.collectives.schedules import MULTICAST, Buffer, Move, Place, Signal, Wait, relative
from mgpu_ops.core import engine


def turn(calls: Any) -> tuple[Any, Any, Any]:
    """Of a call with a `Memory`, from the count before it: its half, the flag of its lines, and the count after it. All int32.

    Whatever the count is, the next call has the other half, and no flag is 0, which lines have that were never written.
    """
    return calls & 1, calls + 1, jnp.where(calls == -2, 1, calls + 1)


@dataclasses.dataclass(frozen=True)
class Deadline:
    """For schedules in lines: how long to wait for them, and where to say whose did not come. The result is then undefined.

    late: a ref of int32 [n + 1], zeros at first: 1 for each device whose lines did not come in time, and last whether any.
    """

    late: Any
    seconds: float


def exchange(
    x: jax.Array,
    what: Exchange,
    *,
    memory: Memory | None = None,
    deadline: Deadline | None = None,
    equal: bool = False,
    interpret: bool = False,
) -> jax.Array:
    """Runs the kernel inside `jax.shard_map` over `what.axes`: x has `what.shape("x")`, the result `what.shape("out")`.

    equal: the result is the same on all devices, and so typed. Interpreted, x and the result have all devices' in front:
    [n, ...], no shard_map is needed, and there is no `memory` nor `deadline`.
    """
    n = what.schedule.n
    scratch_types: dict[str, Any] = {}
    lead = (n,) if interpret else ()
    box = (what.cut.chunk, what.columns)
    reads = sorted({len(move.reads) for move in what.staged})
    if reads:
        scratch_types["inbox"] = plgpu.SMEM((what.stages, reads[-1], *box), what.dtype)
    if reads and reads[-1] > 1:
        scratch_types["outbox"] = plgpu.SMEM((OUTBOX, *box), what.dtype)
    for r in reads:
        scratch_types[f"arrived_{r}"] = plgpu.Barrier(num_arrivals=r, num_barriers=what.stages)
    for step in what.schedule.steps:
        if isinstance(step, Wait) and interpret:
            scratch_types[f"flag_{step.flag}"] = plgpu.ClusterBarrier(collective_axes=("device",))
        elif isinstance(step, Wait) and not step.in_lines:
            scratch_types[f"flag_{step.flag}"] = plgpu.SemaphoreType.REGULAR
    inputs: dict[str, Any] = {"x": x}
    results: list[Buffer] = ["out"]
    if memory is not None:
        inputs["where"] = memory.where
    elif what.schedule.in_lines and not interpret:
        parts, rows, _ = what.shape("scratch")
        inputs["scratch"] = jax.new_ref(jnp.zeros((parts, rows, LINE_WORDS), jnp.int32))
    elif what.schedule.scratch_slices:
        results.append("scratch")
    if deadline is not None:
        inputs["late"] = deadline.late

    def body(*refs: Any, **scratch: Any) -> None:
        buffers = dict(zip((*inputs, *results), refs, strict=True))
        if memory is not None:
            block: _Block = _InMemory(what, buffers, scratch, memory.rows)
        else:
            block = (_Interpreted if interpret else _Block)(what, buffers, scratch)
        block.seconds = deadline.seconds if deadline else None
        block.run()

    launch = engine.Launch(
        f"mgpu_ops_{what.schedule.kind}_{what.schedule.algorithm}",
        grid={"all": 1} if interpret else {"block": what.blocks},
        cluster={"device": n, "block": what.blocks} if interpret else {},
        warpgroups=1,
        interpret=interpret,
    )
    return engine.kernel(
        body,
        launch,
        out_type=tuple(jax.ShapeDtypeStruct((*lead, *what.shape(buffer)), what.dtype) for buffer in results),
        scratch_types=scratch_types,
        equal_over=what.names if equal else (),
    )(*inputs.values())[0]


class _Block:
    """One block of one device, while the kernel is traced."""

    def __init__(self, what: Exchange, buffers: dict[str, Any], scratch: dict[str, Any]) -> None:
        self.what, self.buffers, self.scratch = what, buffers, scratch
        self.n = what.schedule.n
        self.own = self.index()
        self.signalled = dict.fromkeys(what.schedule.flags, 0)

    def run(self) -> None:
        for step in self.what.schedule.steps:
            if isinstance(step, Signal):
                self.signal(step)
            elif isinstance(step, Wait):
                self.wait(step)
            elif step.through_switch:
                self.move_through_switch(step)
            elif step.in_lines:
                self.move_in_lines(step)
            else:
                self.move(step)
        if self.what.staged:
            plgpu.wait_smem_to_gmem(0)

    # Other devices

    def index(self) -> Any:
        return lax.axis_index(self.what.names)

    def device(self, number: int) -> dict[str, Any]:
        """The mesh indices of the device that is so far from the own one. The host must be able to compute them: for TMA."""
        index = lax.rem(self.own + jnp.int32(number % self.n), jnp.int32(self.n))
        ids, stride = {}, 1
        for name, size in reversed(self.what.axes):
            ids[name] = lax.rem(lax.div(index, jnp.int32(stride)), jnp.int32(size)) if len(self.what.axes) > 1 else index
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
        """The warpgroup's stores are complete, then visible to all, then the flags are raised."""
        if step.in_lines:
            return
        plgpu.wait_smem_to_gmem(0)
        flag = self.scratch[f"flag_{step.flag}"]
        if step.to == MULTICAST:
            plgpu.semaphore_signal_multicast(flag, collective_axes=self.what.names)
            return
        engine.signal_all(flag, [self.device(number) for number in step.to])

    def wait(self, step: Wait) -> None:
        """Flags are zero when the kernel starts and only count up: reading one is cheaper than subtracting from it."""
        if step.in_lines:
            return
        self.signalled[step.flag] += step.count
        plgpu.semaphore_wait(self.scratch[f"flag_{step.flag}"], self.signalled[step.flag], decrement=False)
        engine.global_memory_fence()

    # Moving pieces

    def where(self, place: Place, move: Move, number: Any, rows: int) -> Any:
        """Which rows of a buffer a piece has at a place: indices into [parts, rows, columns]."""
        part, row = self.piece(move, number)
        if place.part is not None:
            there = relative(place.part, self.own, self.n) + place.bank * self.n
            part = part + there * (self.what.slices if move.whole else 1)
        return part, pl.ds(row, rows)

    def piece(self, move: Move, number: Any) -> tuple[Any, Any]:
        """The slice, within a whole part, and the row at which a piece begins."""
        cut = self.what.cut
        if not move.whole or cut.n == 1:
            return jnp.int32(0), number * cut.chunk
        return lax.div(number, jnp.int32(cut.per_slice)), lax.rem(number, jnp.int32(cut.per_slice)) * cut.chunk

    def each_length(self, number: Any, copy: Callable[[int], None]) -> None:
        """copy(rows) with how many rows the piece has, which is known for a piece that is the last of its slice or is not."""
        cut = self.what.cut
        last = cut.slice % cut.chunk
        if not last:
            copy(cut.chunk)
            return
        is_last = lax.rem(number, jnp.int32(cut.per_slice)) == cut.per_slice - 1
        pl.when(is_last)(lambda: copy(last))
        pl.when(~is_last)(lambda: copy(cut.chunk))

    def pieces(self, move: Move) -> tuple[Any, Any]:
        """The own block's first piece of a part, and how many it has."""
        cut, block = self.what.cut, lax.axis_index("block")
        every = cut.per_slice * (cut.n if move.whole else 1)
        return block, lax.div(every - block + cut.blocks - 1, jnp.int32(cut.blocks))

    def move(self, move: Move) -> None:
        """Each piece into the inbox, perhaps reduced into the outbox, and out."""
        stages, blocks = self.what.stages, self.what.blocks
        inbox, arrived = self.scratch["inbox"], self.scratch[f"arrived_{len(move.reads)}"]
        first, count = self.pieces(move)
        reduces = len(move.reads) > 1
        each = len(move.writes)  # copies a piece: each is a group of its own

        def load(i: Any) -> None:
            slot, number = lax.rem(i, jnp.int32(stages)), first + i * blocks

            def copy(rows: int) -> None:
                for k, place in enumerate(move.reads):
                    turn = move.turn(k, self.own, self.n) if reduces else 0
                    source = self.memory(place, self.where(place, move, number, rows))
                    engine.copy_gmem_to_smem(source, inbox.at[slot, turn, pl.ds(0, rows)], arrived.at[slot])

            self.each_length(number, copy)

        def store(source: Any, i: Any) -> None:
            number = first + i * blocks

            def copy(rows: int) -> None:
                for place in move.writes:
                    target = self.memory(place, self.where(place, move, number, rows))
                    plgpu.copy_smem_to_gmem(source.at[pl.ds(0, rows)], target)

            self.each_length(number, copy)

        pl.loop(0, jnp.minimum(stages, count))(lambda i: load(jnp.int32(i)))

        @pl.loop(0, count)
        def _(i: Any) -> None:
            i = jnp.int32(i)
            slot = lax.rem(i, jnp.int32(stages))
            plgpu.barrier_wait(arrived.at[slot])
            result = inbox.at[slot, 0]
            if reduces:
                result = self.scratch["outbox"].at[lax.rem(i, jnp.int32(OUTBOX))]
                plgpu.wait_smem_to_gmem((OUTBOX - 1) * each, wait_read_only=True)
                self.reduce(inbox.at[slot], len(move.reads), result)
                plgpu.commit_smem()
            store(result, i)
            # The next load goes to the place in the inbox that was read last: by registers, or by the stores before these.
            ahead = i + stages - (not reduces)
            if not reduces:
                plgpu.wait_smem_to_gmem(each, wait_read_only=True)
            pl.when((ahead < count) & (ahead >= stages))(lambda: load(ahead))

        plgpu.wait_smem_to_gmem(0, wait_read_only=True)

    def reduce(self, boxes: Any, count: int, result: Any) -> None:
        """result = boxes[0] + boxes[1] + ..., summed in float32, in this order."""
        what = self.what
        chunk = what.cut.chunk
        rows = max(r for r in range(1, ROWS_AT_ONCE + 1) if chunk % r == 0)
        layout = self.layout(rows)

        @pl.loop(0, chunk // rows)
        def _(group: Any) -> None:
            here = pl.ds(group * rows, rows)
            result[here] = reduced(
                what.reduction, (plgpu.load(boxes.at[k, here], layout=layout, optimized=False) for k in range(count))
            )

    def layout(self, rows: int, row: int = 16) -> Any:
        """Of so many rows in registers: each thread has up to `row` bytes in a row."""
        vector = math.gcd(rows, row // 4) * 4 // jnp.dtype(self.what.dtype).itemsize
        return plgpu.Layout.WG_STRIDED((rows, self.what.columns), vec_size=vector)

    # Through the switch

    def move_through_switch(self, move: Move) -> None:
        """Each piece from global memory to registers and back, reduced or copied to all on the way."""
        what = self.what
        first, count = self.pieces(move)
        (source,), (target,) = move.reads, move.writes
        chunk = what.cut.chunk
        rows = max(r for r in range(1, ROWS_AT_ONCE + 1) if math.gcd(chunk, what.rows) % r == 0)

        @pl.loop(0, count)
        def each(i: Any) -> None:
            number = first + i * what.blocks
            _, row = self.piece(move, number)

            @pl.loop(0, jnp.minimum(chunk, what.rows - row) // rows)
            def at_once(group: Any) -> None:
                def some(place: Place) -> Any:
                    part, where = self.where(place, move, number, rows)
                    return part, pl.ds(where.start + group * rows, rows)

                self.store_all(target, some(target), self.load_all(source, some(source), rows))

    def load_all(self, place: Place, where: Any, rows: int) -> Any:
        ref = self.buffers[place.buffer].at[where]
        if place.device != MULTICAST:
            return plgpu.load(ref, layout=self.layout(rows), optimized=False)
        reduction: Any = self.what.reduction
        value = plgpu.multimem_load_reduce(ref, collective_axes=self.what.names, reduction_op=reduction)
        return plgpu.layout_cast(value, self.layout(rows))

    def store_all(self, place: Place, where: Any, value: Any) -> None:
        ref = self.buffers[place.buffer]
        if place.device == MULTICAST:
            plgpu.multimem_store(value, ref.at[where], self.what.names)
        else:
            ref[where] = value

    # In lines

    flag: Any = 1  # that lines have when they are there; memory is zero before
    seconds: float | None = None  # of a `Deadline`

    def line_memory(self, place: Place, where: Any) -> Any:
        return self.memory(place, where)

    def move_in_lines(self, move: Move) -> None:
        """Each piece from global memory to registers and back, with its flags wherever scratch is concerned."""
        what = self.what
        first, count = self.pieces(move)

        @pl.loop(0, count)
        def each(i: Any) -> None:
            number = first + i * what.blocks

            def copy(rows: int) -> None:
                at_once = max(r for r in range(1, ROWS_AT_ONCE // len(move.reads) + 1) if rows % r == 0)

                def some(place: Place, group: Any) -> Any:
                    part, where = self.where(place, move, number, at_once)
                    return part, pl.ds(where.start + group * at_once, at_once)

                @pl.loop(0, rows // at_once)
                def _(group: Any) -> None:
                    reads = self.in_order(move, lambda place: some(place, group))
                    value = reduced(what.reduction, self.load_lines(reads, at_once))
                    for place in move.writes:
                        self.store_lines(place, some(place, group), value, at_once)

            self.each_length(number, copy)

    def in_order(self, move: Move, where: Callable[[Place], Any]) -> list[tuple[Place, Any]]:
        """What a move in lines reads, and where; in the order of the devices, where it reads all parts of the own scratch."""
        reads = [(place, where(place)) for place in move.reads]
        if len(reads) < self.n:
            return reads
        return [(move.reads[0], (jnp.int32(part), reads[0][1][1])) for part in range(self.n)]

    def load_lines(self, reads: list[tuple[Place, Any]], rows: int) -> Iterable[Any]:
        layout = self.layout(rows, 8)
        if reads[0][0].buffer != "scratch":
            return [plgpu.load(self.memory(*read), layout=layout, optimized=False) for read in reads]
        deadline = None
        if self.seconds is not None:
            senders = [jnp.int32(self.sender(place, part)) for place, (part, _) in reads]
            deadline = ll.Deadline(self.buffers["late"], senders, self.seconds)
        places, shape = [self.line_memory(*read) for read in reads], (rows, self.what.columns)
        return ll.load(places, shape, self.what.dtype, layout, self.flag, deadline)

    def sender(self, place: Place, part: Any) -> Any:
        """The index of the device that writes a part of the own scratch, of which there is one for each, once in each bank."""
        return lax.rem(part, jnp.int32(self.n))

    def store_lines(self, place: Place, where: Any, value: Any, rows: int) -> None:
        if place.buffer == "scratch":
            ll.store(value, self.line_memory(place, where), self.layout(rows, 8), self.flag)
        else:
            self.memory(place, where)[...] = value


class _InMemory(_Block):
    """The same with a `Memory`: the half of it whose turn it is, at addresses that `where` holds."""

    def __init__(self, what: Exchange, buffers: dict[str, Any], scratch: dict[str, Any], rows: int) -> None:
        super().__init__(what, buffers, scratch)
        self.rows = rows

    def index(self) -> Any:
        return self.buffers["where"][0, 0]  # lax.axis_index is of the peers that XLA knows

    def run(self) -> None:
        words = [self.buffers["where"][0, 1 + i] for i in range(2 * self.n)]
        self.addresses = list(zip(words[::2], words[1::2], strict=True))
        after_lines = (memory_rows(self.n, self.rows) - 1) * 4 * LINE_WORDS
        counter = ll.Address(*self.addresses[0], jnp.int32(after_lines) + 4 * lax.axis_index("block"))
        calls = ll.read_word(counter)  # before this one, the same on all devices
        self.half, self.flag, after = turn(calls)
        super().run()
        engine.warpgroup_barrier()  # all threads have read the counter
        ll.write_word(after, counter)

    def line_memory(self, place: Place, where: Any) -> Any:
        assert isinstance(place.device, int)
        part, rows = where
        row = self.half * (self.n * self.rows) + part * self.what.rows + rows.start
        return ll.Address(*self.addresses[place.device % self.n], row * (4 * LINE_WORDS))


class _Interpreted(_Block):
    """The same, one block of a cluster that stands for all devices."""

    def index(self) -> Any:
        return lax.axis_index("device")

    def memory(self, place: Place, where: Any) -> Any:
        assert isinstance(place.device, int)
        return self.buffers[place.buffer].at[(relative(place.device, self.own, self.n), *where)]

    def load_lines(self, reads: list[tuple[Place, Any]], rows: int) -> Iterable[Any]:
        return [self.memory(*read)[...] for read in reads]

    def store_lines(self, place: Place, where: Any, value: Any, rows: int) -> None:
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
        return reduced(self.what.reduction, (ref[(device, *where)] for device in range(self.n)))

    def store_all(self, place: Place, where: Any, value: Any) -> None:
        for device in range(self.n) if place.device == MULTICAST else (self.own,):
            self.buffers[place.buffer][(device, *where)] = value
