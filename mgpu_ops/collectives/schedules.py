"""Collectives as schedules: who reads, reduces and writes which part of which buffer, and who signals whom.

A collective runs on the n devices of a mesh axis, in equally many thread blocks on each. A `Schedule` lists its steps, the same
for every block of every device: devices and parts are counted from a device's own index. Block b of every device works on the
same chunks of every part (`Cut`) and exchanges signals with block b of others only. The kernel is generated from a schedule,
and `tests/mgpu_ops/collectives/simulator.py` runs one: neither knows an algorithm.

The payload is n equal slices, the last ones possibly cut off where x or out ends. Device d's slice is the d-th.

| kind           | x       | out                                       |
|----------------|---------|-------------------------------------------|
| all_reduce     | payload | payload: x of all devices, reduced        |
| reduce_scatter | payload | one slice: the own one of what is reduced |
| all_gather     | a slice | payload: x of all devices, side by side   |

While a device is inside a call, others read its x and write its out and scratch. Hence the handshakes: no device touches
another before that one has entered ("start"), and none leaves before the others are done with it ("end"; or "data", where a
device that has all data knows so).
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator
from typing import Any, Final, Literal, get_args

type Kind = Literal["all_reduce", "reduce_scatter", "all_gather"]
type Transport = Literal["peer", "multimem"]
type Buffer = Literal["x", "out", "scratch"]

MULTICAST: Final = "multicast"  # as a device: all n of them, the own one too, through the switch


@dataclasses.dataclass(frozen=True)
class Place:
    """A part of a buffer of some device.

    buffer: which one.
    device: relative to the own index, or MULTICAST: read, the switch reduces all; written, it stores to all.
    part: the buffer is a row of parts, each as long as the move: the part's number relative to the own index. None: the first.
    bank: of scratch, which of several such rows of n parts.
    """

    buffer: Buffer
    device: int | Literal["multicast"] = 0
    part: int | None = None
    bank: int = 0


@dataclasses.dataclass(frozen=True)
class Move:
    """For each chunk of a part that this block has: loads all reads, reduces them, stores the result to all writes.

    Several reads are reduced in float32 (integers: in their own type) in the order of `position`, and rounded to the payload's
    dtype once. No load is issued before an earlier Wait is over. Stores may be in flight until the next Signal or the kernel's
    end: a move that reads what another one wrote needs a Signal between the two; other moves may overlap.
    whole: a part is the payload; else a slice.
    ll: each word in scratch carries a flag of its own (`ll.py`), for which a reader waits.
    """

    reads: tuple[Place, ...]
    writes: tuple[Place, ...]
    whole: bool = False
    ll: bool = False

    @property
    def through_switch(self) -> bool:
        return _multicast((*self.reads, *self.writes))

    def position(self, k: int, own: Any, n: int) -> Any:
        """The position of the k-th read in the order of reduction, on device `own` (an int or a traced int32).

        Where a device reads one part from each of n, the k-th is that of device own + k. These are reduced in the order of the
        devices, so that the sum has the same bits wherever it is computed. Other moves reduce two reads, and two commute.
        """
        return (own + k) % n if len(self.reads) == n else k


@dataclasses.dataclass(frozen=True)
class Signal:
    """Adds 1 to a flag of the same block on other devices, relative to the own index. MULTICAST: on all, the own one too.

    First all earlier loads and stores of this block are complete, and visible to whoever waits for the flag (release).
    ll: nothing is sent. The flags in the data of the LL moves before and after it take the signal's place.
    """

    to: tuple[int, ...] | Literal["multicast"]
    flag: str
    ll: bool = False


@dataclasses.dataclass(frozen=True)
class Wait:
    """Waits until this block's flag is at least `count`, then subtracts it. Later steps see what was signalled (acquire).

    ll: as of the Signal.
    """

    flag: str
    count: int
    ll: bool = False


type Step = Move | Signal | Wait


@dataclasses.dataclass(frozen=True)
class Schedule:
    """A collective on one transport: what every block of every device does.

    entry_barrier: the kernel runs behind a barrier of all devices, in stream order, which takes the place of "start": each
    device has its x, its out and scratch may be written, its flags are zero. Without the barrier, flags keep their values from
    call to call, because a signal may arrive before its receiver has entered.
    """

    kind: Kind
    algorithm: str
    n: int
    transport: str
    entry_barrier: bool
    steps: tuple[Step, ...]

    @property
    def name(self) -> str:
        return f"{self.kind}/{self.algorithm}/{self.transport}/{self.n}" + ("/entry_barrier" if self.entry_barrier else "")

    @property
    def moves(self) -> tuple[Move, ...]:
        return tuple(step for step in self.steps if isinstance(step, Move))

    @property
    def slices(self) -> int:
        """How many slices the payload is cut into: one a device, or one in all where every move takes the whole payload."""
        return 1 if all(move.whole for move in self.moves) else self.n

    @property
    def flags(self) -> tuple[str, ...]:
        """The flags of each block, in order of use."""
        return tuple(dict.fromkeys(step.flag for step in self.steps if isinstance(step, Wait)))

    @property
    def ll(self) -> bool:
        """Whether all data pass between devices in LL. Scratch is then an LL buffer, and begins as zeros."""
        return any(move.ll for move in self.moves)

    @property
    def reads_at_once(self) -> int:
        """The most parts that a move holds at once."""
        return max(len(move.reads) for move in self.moves)

    @property
    def scratch_slices(self) -> int:
        """Length of the scratch buffer in slices."""
        parts = [self.n * move.whole or 1 for move in self.moves if any(w.buffer == "scratch" for w in move.writes)]
        banks = 1 + max((write.bank for move in self.moves for write in move.writes), default=0)
        return self.n * max(parts, default=0) * banks

    @property
    def in_device_order(self) -> bool:
        """Whether every sum is formed in the order of the devices, in float32, and rounded once."""
        reducing = [move for move in self.moves if len(move.reads) > 1 or _multicast(move.reads)]
        return self.repeatable and all(len(move.reads) == self.n for move in reducing) and len(reducing) < 2

    @property
    def repeatable(self) -> bool:
        """Whether each run gives the same bits. The order in which the switch reduces is not documented."""
        return not any(_multicast(move.reads) for move in self.moves)

    @property
    def same_on_all(self) -> bool:
        """Whether all devices of an all_reduce hold the same bits: an element is reduced once, or by all in one order."""
        return self.repeatable or not any(_multicast(move.reads) and move.whole for move in self.moves)


def relative(index: int, own: Any, n: int) -> Any:
    """The absolute number of the device or part that is `index` after `own` (an int or a traced int32)."""
    return (own + index % n) % n


@dataclasses.dataclass(frozen=True)
class Cut:
    """A payload of `size` elements as n slices, of chunks of `chunk` elements. A block has each `blocks`-th chunk.

    Slices are equally long, in multiples of `granule`. n of them may reach beyond the payload's end: what lies there loads as
    zeros and is not stored, as TMA does by itself. A chunk never reaches beyond its slice: the last one may be shorter.
    """

    size: int
    n: int
    chunk: int
    blocks: int = 1
    granule: int = 1

    @property
    def slice(self) -> int:
        return -(-self.size // (self.n * self.granule)) * self.granule

    def length(self, whole: bool) -> int:
        """Elements of a part, with what lies beyond the payload's end."""
        return self.slice * (self.n if whole else 1)

    @property
    def per_slice(self) -> int:
        """Chunks of a slice."""
        return -(-self.slice // self.chunk)

    def chunks(self, whole: bool, block: int) -> Iterator[tuple[int, int]]:
        """Start and stop within a part of each chunk that `block` has."""
        for number in range(block, self.per_slice * (self.n if whole else 1), self.blocks):
            begin, inside = number // self.per_slice * self.slice, number % self.per_slice * self.chunk
            yield begin + inside, begin + min(inside + self.chunk, self.slice)


@dataclasses.dataclass(frozen=True)
class Traffic:
    """What a call costs, for models of time. Bytes are those of one device.

    sent, received: over its links. local: which it loads from and stores to its own memory.
    waits: one after the other, each at least the latency of a signal.
    roundings: how often a sum is rounded to the payload's dtype.
    """

    sent: int
    received: int
    local: int
    scratch: int
    flags: int
    waits: int
    roundings: int


def traffic(schedule: Schedule, payload: int) -> Traffic:
    """The traffic of a call whose payload, the n slices, has `payload` bytes. In LL all counts twice.

    Every device does the same: where it reads from r others, r others read from it. To reduce, the switch takes a copy of each
    device's part, the reader's too, and sends one to the reader. To store, it sends a copy to each device, the writer too.
    """
    n = schedule.n
    slice_bytes = -(-payload // n)
    sent = received = local = 0
    for move in schedule.moves:
        length = (payload if move.whole else slice_bytes) * (1 + move.ll)
        for places, through_switch in ((move.reads, (n, 1)), (move.writes, (1, n))):
            for place in places:
                if place.device == MULTICAST:
                    sent += through_switch[0] * length
                    received += through_switch[1] * length
                elif place.device % n:
                    sent += length
                    received += length
                else:
                    local += length
    return Traffic(
        sent,
        received,
        local,
        scratch=schedule.scratch_slices * slice_bytes * (1 + schedule.ll),
        flags=0 if schedule.ll else len(schedule.flags),
        waits=sum(isinstance(step, Wait) for step in schedule.steps),
        roundings=sum(len(move.reads) > 1 or _multicast(move.reads) for move in schedule.moves),
    )


def schedule(kind: Kind, algorithm: str, n: int, transport: str = "peer", *, entry_barrier: bool = False) -> Schedule:
    """The schedule of a collective on n devices, 2 or more. `algorithms` lists what there is. Raises ValueError."""
    if n < 2:
        raise ValueError(f"n={n}: a collective needs 2 devices or more; on one, out is x")
    build = _ALGORITHMS.get((kind, transport), {}).get(algorithm)
    if build is None:
        known = algorithms(kind, transport)
        raise ValueError(
            f"algorithm={algorithm!r} is none of {kind} on transport {transport!r}: {', '.join(known)}"
            if known
            else f"kind={kind!r}, transport={transport!r}: kinds are {_named(Kind)}, transports {_named(Transport)}"
        )
    start, work = build(n)
    return Schedule(kind, algorithm, n, transport, entry_barrier, (() if entry_barrier else start) + work)


def algorithms(kind: Kind, transport: str = "peer") -> tuple[str, ...]:
    """The names of the algorithms for a kind of collective on a transport."""
    return tuple(_ALGORITHMS.get((kind, transport), {}))


def _named(alias: Any) -> str:
    return ", ".join(get_args(alias.__value__))


def _multicast(places: tuple[Place, ...]) -> bool:
    return any(place.device == MULTICAST for place in places)


# Algorithms, and what they consist of. An algorithm returns its first handshake, which an entry barrier replaces, and the other
# steps.

type Steps = tuple[Step, ...]


def _of_all(buffer: Buffer, n: int, part: int | None) -> tuple[Place, ...]:
    """The same part of all devices, the own one first. Each device starts with another peer: all links have equal loads."""
    return tuple(Place(buffer, device, part) for device in range(n))


def _of_peers(buffer: Buffer, n: int, part: int | None) -> tuple[Place, ...]:
    return _of_all(buffer, n, part)[1:]


def _from_peers(n: int) -> tuple[Place, ...]:
    """What peers wrote into their parts of the own scratch."""
    return tuple(Place("scratch", 0, device) for device in range(1, n))


def _all_parts(n: int) -> tuple[Place, ...]:
    """What all devices wrote into their parts of the own scratch, the own one first."""
    return tuple(Place("scratch", 0, device) for device in range(n))


def _handshake(n: int, flag: str, ll: bool = False) -> Steps:
    return (Signal(tuple(range(1, n)), flag, ll), Wait(flag, n - 1, ll))


def _multicast_handshake(n: int, flag: str) -> Steps:
    return (Signal(MULTICAST, flag), Wait(flag, n))


def _between(n: int, *moves: Move) -> tuple[Steps, Steps]:
    """Moves that access peers, between two handshakes: peers may leave only afterwards."""
    return _handshake(n, "start"), moves + _handshake(n, "end")


def _between_multicast(n: int, *moves: Move) -> tuple[Steps, Steps]:
    return _multicast_handshake(n, "start"), moves + _multicast_handshake(n, "end")


# all_reduce


def _one_shot(n: int) -> tuple[Steps, Steps]:
    """Each device reads the whole x of all. The fewest steps, n - 1 times the bytes."""
    return _between(n, Move(_of_all("x", n, None), (Place("out"),), whole=True))


def _push_one_shot(n: int) -> tuple[Steps, Steps]:
    """Each device writes its x to the scratch of all, and reduces what it received: one trip over the link.

    No handshake is needed at the end. Peers read nothing of a device, and one that has received all data is written to no more.
    """
    push = Move((Place("x"),), _of_peers("scratch", n, 0), whole=True)
    reduce = Move((Place("x"), *_from_peers(n)), (Place("out"),), whole=True)
    return _handshake(n, "start"), (push, *_handshake(n, "data"), reduce)


def _ll_one_shot(n: int) -> tuple[Steps, Steps]:
    """As push_one_shot, but in LL: one trip over the link in all, for twice the bytes. A device writes to itself, too."""
    push = Move((Place("x"),), _of_all("scratch", n, 0), whole=True, ll=True)
    reduce = Move(_all_parts(n), (Place("out"),), whole=True, ll=True)
    return _handshake(n, "start"), (push, *_handshake(n, "data", ll=True), reduce)


def _two_shot(n: int) -> tuple[Steps, Steps]:
    """Each device reduces its slice and writes it to all: 2 (n - 1) / n payloads over the links, the least possible."""
    return _between(n, Move(_of_all("x", n, 0), _of_all("out", n, 0)))


def _push_slices(n: int) -> Steps:
    """Each device writes to the scratch of every peer that peer's slice of its own x."""
    return tuple(Move((Place("x", 0, device),), (Place("scratch", device, 0),)) for device in range(1, n))


def _push_slices_ll(n: int) -> Steps:
    """The same in LL. A device writes to itself, too, so that all parts of its scratch are alike."""
    return tuple(Move((Place("x", 0, d),), (Place("scratch", d, 0),), ll=True) for d in (*range(1, n), 0))


def _push_two_shot(n: int) -> tuple[Steps, Steps]:
    """As two_shot, but peers write the slices that a device reduces, instead of being read."""
    reduce = Move((Place("x", 0, 0), *_from_peers(n)), _of_all("out", n, 0))
    return _handshake(n, "start"), (*_push_slices(n), *_handshake(n, "data"), reduce, *_handshake(n, "end"))


def _ll_two_shot(n: int) -> tuple[Steps, Steps]:
    """As push_two_shot, but in LL: two trips over the link, for 4 (n - 1) / n times the payload."""
    results = tuple(Place("scratch", device, 0, bank=1) for device in range(1, n))
    reduce = Move(_all_parts(n), (*results, Place("out", 0, 0)), ll=True)
    copies = tuple(Move((Place("scratch", 0, d, bank=1),), (Place("out", 0, d),), ll=True) for d in range(1, n))
    handshakes = (_handshake(n, flag, ll=True) for flag in ("data", "result"))
    return _handshake(n, "start"), (*_push_slices_ll(n), *next(handshakes), reduce, *next(handshakes), *copies)


def _ring(n: int) -> tuple[Steps, Steps]:
    """A reduce-scatter ring, then an all-gather ring: 2 n - 2 steps, in which a device accesses its two neighbours only."""
    start, scatter = _ring_scatter(n, _of_all("out", n, 0)[:2])
    return start, (*scatter, *_SIGNAL_NEXT, *_ring_forward(n))


# In a ring, the neighbour before a device writes to its scratch and out, once the device has signalled "start". The neighbour
# signals after each write, the last one too, so no handshake is needed at the end.
_RING_START: Steps = (Signal((-1,), "start"), Wait("start", 1))
_SIGNAL_NEXT: Steps = (Signal((1,), "data"),)
_WAIT_FOR_PREVIOUS: Steps = (Wait("data", 1),)


def _ring_scatter(n: int, result: tuple[Place, ...]) -> tuple[Steps, Steps]:
    """Slice s starts at device s + 1 and goes round the ring. The sum ends at device s, in `result`.

    Each device adds its own x, and rounds the sum to the payload's dtype.
    """
    steps: list[Step] = []
    for hop in range(1, n):
        so_far = () if hop == 1 else (Place("scratch", 0, -hop),)
        steps += Move((*so_far, Place("x", 0, -hop)), (Place("scratch", 1, -hop),)), *_SIGNAL_NEXT, *_WAIT_FOR_PREVIOUS
    return _RING_START, (*steps, Move((Place("scratch", 0, 0), Place("x", 0, 0)), result))


def _ring_forward(n: int) -> Steps:
    """Each device passes on the slice that it received, until all have all. Its own slice was sent before."""
    steps: list[Step] = []
    for hop in range(1, n - 1):
        steps += *_WAIT_FOR_PREVIOUS, Move((Place("out", 0, -hop),), (Place("out", 1, -hop),)), *_SIGNAL_NEXT
    return (*steps, *_WAIT_FOR_PREVIOUS)


def _multimem_one_shot(n: int) -> tuple[Steps, Steps]:
    return _between_multicast(n, Move((Place("x", MULTICAST),), (Place("out"),), whole=True))


def _multimem_two_shot(n: int) -> tuple[Steps, Steps]:
    return _between_multicast(n, Move((Place("x", MULTICAST, 0),), (Place("out", MULTICAST, 0),)))


# reduce_scatter


def _reduce_scatter(n: int) -> tuple[Steps, Steps]:
    return _between(n, Move(_of_all("x", n, 0), (Place("out"),)))


def _push_reduce_scatter(n: int) -> tuple[Steps, Steps]:
    reduce = Move((Place("x", 0, 0), *_from_peers(n)), (Place("out"),))
    return _handshake(n, "start"), (*_push_slices(n), *_handshake(n, "data"), reduce)


def _ll_reduce_scatter(n: int) -> tuple[Steps, Steps]:
    reduce = Move(_all_parts(n), (Place("out"),), ll=True)
    return _handshake(n, "start"), (*_push_slices_ll(n), *_handshake(n, "data", ll=True), reduce)


def _ring_reduce_scatter(n: int) -> tuple[Steps, Steps]:
    return _ring_scatter(n, (Place("out"),))


def _multimem_reduce_scatter(n: int) -> tuple[Steps, Steps]:
    return _between_multicast(n, Move((Place("x", MULTICAST, 0),), (Place("out"),)))


# all_gather


def _all_gather(n: int) -> tuple[Steps, Steps]:
    return _between(n, Move((Place("x"),), _of_all("out", n, 0)))


def _ll_all_gather(n: int) -> tuple[Steps, Steps]:
    push = Move((Place("x"),), (*_of_peers("scratch", n, 0), Place("out", 0, 0)), ll=True)
    copies = tuple(Move((Place("scratch", 0, d),), (Place("out", 0, d),), ll=True) for d in range(1, n))
    return _handshake(n, "start"), (push, *_handshake(n, "data", ll=True), *copies)


def _ring_all_gather(n: int) -> tuple[Steps, Steps]:
    return _RING_START, (Move((Place("x"),), _of_all("out", n, 0)[:2]), *_SIGNAL_NEXT, *_ring_forward(n))


def _multimem_all_gather(n: int) -> tuple[Steps, Steps]:
    return _between_multicast(n, Move((Place("x"),), (Place("out", MULTICAST, 0),)))


_ALGORITHMS: dict[tuple[str, str], dict[str, Callable[[int], tuple[Steps, Steps]]]] = {
    ("all_reduce", "peer"): {
        "one_shot": _one_shot,
        "push_one_shot": _push_one_shot,
        "ll_one_shot": _ll_one_shot,
        "two_shot": _two_shot,
        "push_two_shot": _push_two_shot,
        "ll_two_shot": _ll_two_shot,
        "ring": _ring,
    },
    ("all_reduce", "multimem"): {"one_shot": _multimem_one_shot, "two_shot": _multimem_two_shot},
    ("reduce_scatter", "peer"): {
        "one_shot": _reduce_scatter,
        "push_one_shot": _push_reduce_scatter,
        "ll_one_shot": _ll_reduce_scatter,
        "ring": _ring_reduce_scatter,
    },
    ("reduce_scatter", "multimem"): {"one_shot": _multimem_reduce_scatter},
    ("all_gather", "peer"): {"one_shot": _all_gather, "ll_one_shot": _ll_all_gather, "ring": _ring_all_gather},
    ("all_gather", "multimem"): {"one_shot": _multimem_all_gather},
}
