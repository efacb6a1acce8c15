"""Runs schedules of `mgpu_ops/collectives/schedules.py` on the CPU, in any order of events that hardware might take, and finds
races, deadlocks and wrong results.

Each device has its memory, its blocks and its program, the stream of XLA's other kernels. For each call the program of a device
writes a new x, and garbage to all that is idle, since XLA reuses buffers as soon as it may; runs the kernel, and reads out.
Only signals order devices (and barriers, where the schedule has one). A load reads at some time between its issue and the wait
for it. A store lands at some time before its block next waits for its stores. A `Chooser` decides what comes next.

Races are found by vector clocks: two accesses to an element, one of them a write, must be ordered by signals, even where the
order of this run is harmless. So a run of each order of signals (`explore`) is a proof, for its size, under this model: signals
are release and acquire at system scope, and nothing else orders devices.
"""

from __future__ import annotations

import contextlib
import dataclasses
import itertools
import random
from collections import defaultdict, deque
from collections.abc import Callable, Generator, Hashable, Iterator, Sequence
from typing import Any, Literal

import numpy as np

from mgpu_ops.collectives import schedules
from mgpu_ops.collectives.schedules import MULTICAST, Cut, Kind, Move, Place, Schedule, Signal, Wait


class Fault(Exception):
    """A fault that a run found."""


class Race(Fault):
    """Two accesses to the same element, at least one a write, that no signal orders."""


class Deadlock(Fault):
    """All actors wait."""


class Wrong(Fault):
    """A result is not what it should be."""


class Unspent(Fault):
    """A flag is not zero where it must be: at an entry barrier and at the end."""


# Which of so many options comes next. The second argument returns the state, by which `explore` knows where it was before.
type Chooser = Callable[[int, Callable[[], Hashable]], int]


def lazily(options: int, _: object) -> int:
    """Device 0 runs as far ahead as it can; loads and stores happen as late as they may."""
    return 0


def eagerly(options: int, _: object) -> int:
    """Loads and stores happen at once; the last device runs ahead."""
    return options - 1


def scripted(script: bytes, seed: int = 0) -> Chooser:
    """Choices from a script, then random ones: something for hypothesis to shrink."""
    choices, rest = iter(script), random.Random(seed)

    def choose(options: int, _: object) -> int:
        choice = next(choices, None)
        return rest.randrange(options) if choice is None else choice % options

    return choose


@dataclasses.dataclass(frozen=True)
class Kernel:
    """How a schedule is carried out: what a kernel may get wrong where the schedule is right. The defaults are right.

    chunks: of a part, those that a block has. position: of a read in the order of reduction. drains: whether the Signal at step
    i waits for the stores before it. stages: for how many chunks loads are in flight at once.
    """

    chunks: Callable[[Cut, bool, int], Iterator[tuple[int, int]]] = Cut.chunks
    position: Callable[[Move, int, int, int], int] = Move.position
    drains: Callable[[int], bool] = lambda step: True
    stages: int = 2


@dataclasses.dataclass(frozen=True)
class Call:
    """Runs a schedule on each host by itself, with these of the program's buffers as its x and out.

    scratch: other names are memory, and flags, that nothing else touches between calls: halves of a workspace.
    """

    schedule: Schedule
    x: str = "x"
    out: str = "out"
    scratch: str = "scratch"

    def flag(self, name: str) -> str:
        return name if self.scratch == "scratch" else f"{name} of {self.scratch}"


@dataclasses.dataclass(frozen=True)
class Across:
    """Reduces a buffer in place over the devices of equal index on all hosts: XLA's all-reduce, which nobody leaves early."""

    buffer: str


def two_level(reduce_scatter: Schedule, all_gather: Schedule) -> tuple[Call | Across, ...]:
    """An all-reduce over hosts: each host reduces and scatters, equal indices reduce across, each host gathers."""
    return Call(reduce_scatter, "x", "middle"), Across("middle"), Call(all_gather, "middle", "out")


def simulate(
    stages: Schedule | Sequence[Call | Across],
    size: int,
    *,
    hosts: int = 1,
    blocks: int = 1,
    chunk: int = 4,
    granule: int = 1,
    calls: int = 2,
    op: Literal["add", "min", "max"] = "add",
    inputs: np.ndarray | None = None,
    choose: Chooser = lazily,
    local_first: bool = False,
    kernel: Kernel = Kernel(),
) -> np.ndarray:
    """Calls a collective `calls` times in a row on `hosts` times n devices and checks results, races and flags.

    size: elements of the payload. blocks, chunk, granule: see `Cut`. inputs: float32 [calls, devices, elements of x], by
    default small integers. local_first: what touches no flag is not put off, so that only the order of signals is chosen.
    Returns float32 [calls, devices, elements of out]. Raises Fault.
    """
    if isinstance(stages, Schedule):
        stages = (Call(stages),)
    n = next(stage.schedule.n for stage in stages if isinstance(stage, Call))
    machine = _Machine(tuple(stages), hosts, Cut(size, n, chunk, blocks, granule), op, kernel, choose, local_first)
    if inputs is None:
        inputs = np.random.default_rng(0).integers(-8, 8, (calls, machine.devices, machine.sizes["x"])).astype(np.float32)
    machine.run(inputs)
    machine.check_flags("at the end", range(machine.devices))
    outputs = np.array(machine.outputs, np.float32)
    for call in range(calls):
        machine.check_results(call, inputs[call], outputs[call])
    return outputs


class _Seen(Exception):
    """This state was explored before."""


def explore(*args: Any, **kwargs: Any) -> int:
    """`simulate` for every order of signals and waits; returns how many states there are. Raises the first Fault.

    Signals that reach a flag in another order make another state, and what happens after a state does not depend on the way
    to it: each is left in every direction once. For two devices, or three and a short schedule.
    """
    seen: set[Hashable] = set()
    todo: list[tuple[int, ...]] = [()]
    while todo:
        path = list(todo.pop())
        depth = itertools.count()

        def choose(options: int, state: Callable[[], Hashable], path: Any = path, depth: Any = depth) -> int:
            step = next(depth)
            if step == len(path):
                here = state()
                if here in seen:
                    raise _Seen
                seen.add(here)
                todo.extend((*path, other) for other in range(1, options))
                path.append(0)
            return path[step]

        with contextlib.suppress(_Seen):
            simulate(*args, choose=choose, local_first=True, **kwargs)
    return len(seen)


def reference(kind: Kind, x: np.ndarray, cut: Cut, op: str = "add") -> np.ndarray:
    """What each device's out should be, [devices, ...]: reduced in float32 in the order of the devices.

    x: float32 [devices, ...]. What lies beyond the payload's end is zero.
    """
    if kind == "all_gather":
        return np.tile(x.reshape(-1)[: cut.size], (len(x), 1))
    total = x[0].astype(np.float32)
    for other in x[1:]:
        total = _OPS[op](total, other)
    if kind == "all_reduce":
        return np.tile(total, (len(x), 1))
    return np.pad(total, (0, cut.length(True) - cut.size)).reshape(cut.n, cut.slice)


_OPS: dict[str, Any] = {"add": np.add, "min": np.minimum, "max": np.maximum}
_IN_FLIGHT = np.iinfo(np.int64).max  # later than every clock
_Verb = Literal["reads", "writes"]


class _Memory:
    """A buffer of a device: values, and for each actor when it last read and wrote each element, and which access that was."""

    def __init__(self, name: str, size: int, actors: int) -> None:
        self.name = name
        self.values = np.full(size, np.nan, np.float32)
        self.done = {verb: np.zeros((actors, size), np.int64) for verb in ("reads", "writes")}
        self.which = {verb: np.zeros((actors, size), np.int32) for verb in ("reads", "writes")}


@dataclasses.dataclass(eq=False)
class _Access:
    """A load or a store in flight. `values` are stored, or receive what is loaded."""

    actor: _Actor
    verb: _Verb
    memory: _Memory
    where: slice
    values: np.ndarray
    happened: bool = False

    def happen(self) -> None:
        values = self.memory.values[self.where]  # may be shorter: clipped where the buffer ends
        if self.verb == "reads":
            self.values[: len(values)] = values
        else:
            values[:] = self.values[: len(values)]
        self.happened = True

    def complete(self) -> None:
        """A later release by the actor covers this access."""
        self.memory.done[self.verb][self.actor.number, self.where] = self.actor.clock[self.actor.number]


@dataclasses.dataclass(frozen=True)
class _Blocked:
    """A point at which an actor waits until `free()`. `what()`: what it waits for; None: for its own blocks."""

    free: Callable[[], bool]
    what: Callable[[], str] | None = None


# Where an actor may be interrupted: before something that only it sees, before something that others do, or blocked.
_LOCAL: Literal["local"] = "local"
_SHARED: Literal["shared"] = "shared"
type _Point = Literal["local", "shared"] | _Blocked
type _Routine = Generator[_Point]


class _Actor:
    """Something that runs by itself: a device's program, or one of its blocks."""

    def __init__(self, name: str, number: int, actors: int) -> None:
        self.name, self.number = name, number
        self.clock = np.zeros(actors, np.int64)  # how much of what each actor did is known to have happened before
        self.clock[number] = 1
        self.stores: list[_Access] = []
        self.to_tell: list[int] = []  # relative devices that a Signal has not reached yet
        self.progress = 0
        self.call = self.step = -1
        self.routine: _Routine | None = None
        self.point: _Point = _LOCAL

    def start(self, routine: _Routine) -> None:
        self.routine, self.point = routine, _LOCAL

    def advance(self) -> None:
        assert self.routine is not None
        self.progress += 1
        try:
            self.point = next(self.routine)
        except StopIteration:
            self.routine = None

    def ready(self) -> bool:
        return self.routine is not None and (not isinstance(self.point, _Blocked) or self.point.free())

    def release(self) -> np.ndarray:
        """The clock that an acquire of this release merges with its own."""
        known = self.clock.copy()
        self.clock[self.number] += 1
        return known

    def acquire(self, known: np.ndarray) -> None:
        np.maximum(self.clock, known, out=self.clock)

    def place(self) -> str:
        return f"{self.name} in call {self.call}" + (f", step {self.step}" if self.step >= 0 else "")


def _live(stages: Sequence[Call | Across]) -> set[str]:
    """The buffers on whose values before these stages the result depends."""
    live = {"out"}
    for stage in reversed(stages):
        if isinstance(stage, Call):
            live = live - {stage.out} | {stage.x}
    return live


class _Machine:
    """The devices of all hosts, their memory, and everything that runs on them."""

    def __init__(
        self,
        stages: tuple[Call | Across, ...],
        hosts: int,
        cut: Cut,
        op: str,
        kernel: Kernel,
        choose: Chooser,
        local_first: bool,
    ) -> None:
        self.stages, self.hosts, self.op, self.kernel = stages, hosts, op, kernel
        self.choose, self.local_first = choose, local_first
        self.schedules = [stage.schedule for stage in stages if isinstance(stage, Call)]
        self.cut, self.n, self.blocks = cut, cut.n, cut.blocks
        self.devices, blocks = hosts * cut.n, cut.blocks
        self.sizes, kept = self.buffer_sizes(), {stage.scratch for stage in stages if isinstance(stage, Call)} - {"scratch"}
        self.idle = [sorted(set(self.sizes) - kept - _live(stages[number:])) for number in range(len(stages))]
        actors = self.devices * (1 + blocks)
        self.programs = [_Actor(f"the program of device {d}", d, actors) for d in range(self.devices)]
        self.block_actors = [
            [_Actor(f"device {d} block {b}", self.devices + d * blocks + b, actors) for b in range(blocks)]
            for d in range(self.devices)
        ]
        self.actors = self.programs + list(itertools.chain(*self.block_actors))
        self.memory = [
            {name: _Memory(f"{name} of device {d}", size, actors) for name, size in self.sizes.items()}
            for d in range(self.devices)
        ]
        # The signals that a flag holds, each what its sender knew. A wait takes the first ones and learns from no other.
        self.flags: defaultdict[tuple[int, int, str], deque[np.ndarray]] = defaultdict(deque)
        self.arrived: defaultdict[Hashable, list[Any]] = defaultdict(list)  # at each barrier, what was known
        self.in_flight: list[_Access] = []
        self.log: list[str] = [""]
        self.outputs: list[list[np.ndarray | None]] = []

    def buffer_sizes(self) -> dict[str, int]:
        """Elements of each buffer of a device."""
        sizes = {"scratch": 0}
        for stage in self.stages:
            if isinstance(stage, Call):
                kind, scratch = stage.schedule.kind, stage.schedule.scratch_slices * self.cut.slice
                sizes[stage.scratch] = max(sizes.get(stage.scratch, 0), scratch)
                sizes[stage.x] = self.cut.slice if kind == "all_gather" else self.cut.size
                sizes[stage.out] = self.cut.slice if kind == "reduce_scatter" else self.cut.size
        return sizes

    # Running

    def run(self, inputs: np.ndarray) -> None:
        self.outputs = [[None] * self.devices for _ in inputs]
        for device, program in enumerate(self.programs):
            program.start(self.program(device, inputs[:, device]))
        while ready := [actor for actor in self.actors if actor.ready()]:
            while True:
                actor = self.next_actor(ready)
                before = actor.point
                actor.advance()
                if actor.routine is None or (before, actor.point) != (_LOCAL, _LOCAL):
                    break  # otherwise nobody else is concerned, and the same are ready
        blocked = [(actor, actor.point) for actor in self.actors if actor.routine and isinstance(actor.point, _Blocked)]
        stuck = [f"{actor.place()} waits for {point.what()}" for actor, point in blocked if point.what]
        if stuck:
            raise Deadlock("deadlock: " + "; ".join(stuck))

    def pick(self, options: int) -> int:
        return self.choose(options, self.state) if options > 1 else 0

    def next_actor(self, ready: list[_Actor]) -> _Actor:
        """The actor to go on, after the loads and stores that were chosen to happen before it does."""
        local = next((actor for actor in ready if actor.point == _LOCAL), None) if self.local_first else None
        if local:
            return local
        while True:
            chosen = self.pick(len(ready) + (0 if self.local_first else len(self.in_flight)))
            if chosen < len(ready):
                return ready[chosen]
            self.in_flight.pop(chosen - len(ready)).happen()

    def state(self) -> Hashable:
        """All that the future depends on: how far each actor is and, in their order, the signals not yet waited for."""
        pending = tuple((key, tuple(known.tobytes() for known in queue)) for key, queue in sorted(self.flags.items()) if queue)
        return tuple((actor.progress, *actor.to_tell) for actor in self.actors), pending

    # What actors do

    def program(self, device: int, inputs: np.ndarray) -> _Routine:
        """A device's stream: x written anew; the stages, before each of them all idle buffers overwritten; out read."""
        me = self.programs[device]
        for call, x in enumerate(inputs):
            me.call = call
            yield _LOCAL
            self.at_once(me, "writes", self.memory[device]["x"], x)
            for number, stage in enumerate(self.stages):
                yield _LOCAL
                for name in self.idle[number]:
                    memory = self.memory[device][name]
                    self.at_once(me, "writes", memory, np.full_like(memory.values, np.nan))
                if isinstance(stage, Across):
                    yield from self.across(device, stage, (call, number))
                else:
                    yield from self.launch(device, stage, (call, number))
            yield _LOCAL
            self.outputs[call][device] = self.at_once(me, "reads", self.memory[device]["out"], np.empty(self.sizes["out"]))

    def launch(self, device: int, stage: Call, number: tuple[int, int]) -> _Routine:
        me, host = self.programs[device], device // self.n
        if stage.schedule.entry_barrier:
            group, when = range(host * self.n, (host + 1) * self.n), f"at the entry barrier of call {me.call}"
            yield from self.barrier(me, ("entry", number, host), self.n, lambda: self.check_flags(when, group))
        known = me.release()
        blocks = self.block_actors[device]
        for block, actor in enumerate(blocks):
            actor.call = me.call
            actor.acquire(known)
            actor.start(self.block(device, block, stage))
        yield _Blocked(lambda: all(a.routine is None for a in blocks))
        for actor in blocks:
            me.acquire(actor.release())

    def across(self, device: int, stage: Across, number: tuple[int, int]) -> _Routine:
        me, local, memory = self.programs[device], device % self.n, self.memory[device][stage.buffer]
        yield _LOCAL
        mine = self.at_once(me, "reads", memory, np.empty_like(memory.values))
        everyone = self.arrived["values", number, local]
        everyone.append((device, mine))
        yield from self.barrier(me, ("across", number, local), self.hosts)
        total, *others = (values for _, values in sorted(everyone, key=lambda pair: pair[0]))
        for other in others:
            total = _OPS[self.op](total, other)
        self.at_once(me, "writes", memory, total)

    def barrier(self, me: _Actor, key: Hashable, members: int, on_last: Callable[[], None] = lambda: None) -> _Routine:
        yield _SHARED
        here = self.arrived[key]
        here.append(me.release())
        if len(here) == members:
            on_last()
        yield _Blocked(lambda: len(here) == members, lambda: f"a barrier, where {len(here)} of {members} have come")
        for known in here:
            me.acquire(known)

    def block(self, device: int, block: int, stage: Call) -> _Routine:
        me, base, own, n = self.block_actors[device][block], device - device % self.n, device % self.n, self.n
        for number, step in enumerate(stage.schedule.steps):
            me.step = number
            match step:
                case Move():
                    yield from self.move(me, step, stage, base, own, block)
                case Wait(flag, count):
                    yield from self.wait(me, self.flags[device, block, stage.flag(flag)], flag, count)
                case Signal(to, flag):
                    if self.kernel.drains(number):
                        self.drain(me)
                    me.to_tell = list(range(n) if to == MULTICAST else to)
                    while me.to_tell:  # at about the same time, hence in any order
                        yield _SHARED
                        target = me.to_tell.pop(self.pick(len(me.to_tell)))
                        there = base + schedules.relative(target, own, n)
                        self.flags[there, block, stage.flag(flag)].append(me.release())
        self.drain(me)

    def wait(self, me: _Actor, signals: deque[np.ndarray], flag: str, count: int) -> _Routine:
        yield _Blocked(lambda: len(signals) >= count, lambda: f"{count} of {flag!r} and has {len(signals)}")
        for _ in range(count):
            me.acquire(signals.popleft())

    def move(self, me: _Actor, move: Move, stage: Call, base: int, own: int, block: int) -> _Routine:
        loading: deque[tuple[int, int, list[list[_Access]]]] = deque()
        chunks = list(self.kernel.chunks(self.cut, move.whole, block))
        for start, stop in chunks:
            loads: list[list[_Access]] = []
            loading.append((start, stop, loads))
            for place in move.reads:
                loads.append([])
                for memory, where in self.find(place, move.whole, stage, base, own, start, stop):
                    yield _LOCAL
                    loads[-1].append(self.issue(me, "reads", memory, where, np.zeros(stop - start, np.float32)))
            if len(loading) == self.kernel.stages:
                yield from self.store(me, move, stage, base, own, *loading.popleft())
        while loading:
            yield from self.store(me, move, stage, base, own, *loading.popleft())

    def store(
        self, me: _Actor, move: Move, stage: Call, base: int, own: int, start: int, stop: int, loads: list[list[_Access]]
    ) -> _Routine:
        """Waits for the loads of a chunk, reduces and stores them."""
        for load in itertools.chain(*loads):
            self.finish(load)
        values: list[np.ndarray] = [np.empty(0)] * len(loads)
        for k, of_place in enumerate(loads):
            # In which order the switch reduces is its own business: here another for each reader and chunk.
            first = (own + start) % len(of_place)
            values[self.kernel.position(move, k, own, self.n)] = self.reduce(of_place[first:] + of_place[:first])
        total, *others = values
        for other in others:
            total = _OPS[self.op](total, other)
        for place in move.writes:
            for memory, where in self.find(place, move.whole, stage, base, own, start, stop):
                yield _LOCAL
                me.stores.append(self.issue(me, "writes", memory, where, total))

    def reduce(self, loads: Sequence[_Access]) -> np.ndarray:
        total = loads[0].values
        for load in loads[1:]:
            total = _OPS[self.op](total, load.values)
        return total

    def find(
        self, place: Place, whole: bool, stage: Call, base: int, own: int, start: int, stop: int
    ) -> Iterator[tuple[_Memory, slice]]:
        """Where a chunk of a place lies, on one device or on all. TMA clips it at the buffer's end."""
        name = {"x": stage.x, "out": stage.out, "scratch": stage.scratch}[place.buffer]
        number = 0 if place.part is None else schedules.relative(place.part, own, self.n) + place.bank * self.n
        part = number * self.cut.length(whole)
        devices = range(self.n) if place.device == MULTICAST else [schedules.relative(place.device, own, self.n)]
        for device in devices:
            yield self.memory[base + device][name], slice(part + start, part + stop)

    # Accesses

    def issue(self, me: _Actor, verb: _Verb, memory: _Memory, where: slice, values: np.ndarray) -> _Access:
        """Begins an access, after a look at all that conflict with it and are not known to be over."""
        for other in ("reads", "writes") if verb == "writes" else ("writes",):
            late = memory.done[other][:, where] > me.clock[:, None]
            if late.any():
                actor = int(np.argwhere(late)[0, 0])
                elements = np.flatnonzero(late[actor]) + where.start
                first = self.log[memory.which[other][actor, elements[0]]]
                raise Race(
                    f"race on {memory.name}, elements {elements[0]} to {elements[-1]}: "
                    f"{me.place()} {verb} them, {first} {other} them, and no signal orders the two"
                )
        memory.done[verb][me.number, where] = _IN_FLIGHT
        memory.which[verb][me.number, where] = len(self.log)
        self.log.append(me.place())
        access = _Access(me, verb, memory, where, values)
        self.in_flight.append(access)
        return access

    def finish(self, access: _Access) -> None:
        if not access.happened:
            self.in_flight.remove(access)
            access.happen()
        access.complete()

    def drain(self, me: _Actor) -> None:
        for store in me.stores:
            self.finish(store)
        me.stores.clear()

    def at_once(self, me: _Actor, verb: _Verb, memory: _Memory, values: np.ndarray) -> np.ndarray:
        self.finish(self.issue(me, verb, memory, slice(0, len(values)), values))
        return values

    # Checks

    def check_flags(self, when: str, devices: range) -> None:
        for (device, block, flag), queue in self.flags.items():
            if queue and device in devices:
                raise Unspent(f"{when} flag {flag!r} of device {device} block {block} is {len(queue)}, not 0")

    def check_results(self, call: int, x: np.ndarray, out: np.ndarray) -> None:
        """Compares with `reference`: exactly where the order of sums is defined or does not matter, else within a bound."""
        across = len(self.stages) > len(self.schedules)
        first, last = self.schedules[0].kind, self.schedules[-1].kind
        kind: Kind = "all_reduce" if across or (first, last) == ("reduce_scatter", "all_gather") else first
        group = self.devices if across else self.n
        expected = np.concatenate([reference(kind, some, self.cut, self.op) for some in np.split(x, len(x) // group)])
        in_order = not across and all(schedule.in_device_order for schedule in self.schedules)
        exact = in_order or self.op != "add" or (x == np.trunc(x)).all()
        bound = 0 if exact else group * 2.0**-24 * np.abs(x).sum(0).max()
        right = np.abs(out - expected) <= bound  # NaN is not
        if not right.all():
            device, element = (int(i) for i in np.argwhere(~right)[0])
            raise Wrong(
                f"wrong result in call {call}: out[{element}] of device {device} is {out[device, element]}, "
                f"not {expected[device, element]}"
            )
        if kind == "all_reduce" and all(schedule.same_on_all for schedule in self.schedules):
            for device in range(len(out)):
                leader = device - device % group
                if (out[device] != out[leader]).any():
                    raise Wrong(f"wrong result in call {call}: devices {leader} and {device} hold different bits")
