"""Time on a GPU, in two ways: in bursts and sustained.

Bursts: kernel time from CUPTI, with a cold or a warm L2, several functions interleaved in one run.

Cold: before each call a buffer of `FLUSHED` times the L2's size is read, so that the L2 holds nothing of the call's arrays. It
was written once, long before: reading leaves no lines that the call would have to write back to memory in its own time. Warm:
before each call the same function runs on the same arrays, and nothing in between; what of them fits the L2 may still be there.

Only ratios of functions measured in turn, in one run, mean anything: a GPU under its power cap slows by several percent as it
warms up, and does so for whatever runs then.

Sustained: each function is called without pause for a second and more, then the next one, so that the GPU is at the clock that
its power cap leaves, as in a program. There what a call takes is decided by its energy. Nothing is flushed: in a program, too,
a product follows the one before, and a flush would be work of its own that draws power.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
import math
import statistics
import time
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning.nvml import Meter, Power, Unavailable
from mgpu_ops.tuning.outcome import Turn

HOST_BOUND = 50.0  # us of the GPUs: collectives in a row that take less may wait for the host, with 10 to 30 us each
QUEUED = 4  # calls
FLUSHED = 4  # times the L2's size that a flush reads
TURN = 1.0  # seconds for which a function runs without pause, where it is measured sustained
TURNS = 3  # of each function
AHEAD = 5000.0  # us of calls that are queued, so that the GPU never waits for the host
_MOST_AHEAD = 32  # calls: each holds its result
_WARM_TURN, _WARM_TURNS = 0.5, 10  # seconds, and how many at most, until a call takes as long as in the turn before
_SETTLED = 0.01  # of that time
_DRY = 0.01  # of a turn's calls may have come too late
DRIFT = 0.15  # of the baseline's time: at the power cap it varies by 12 %, as what ran before was hot or cool


class MeasurementError(RuntimeError):
    """The GPU could not be timed: the message says why and what to do."""


def median_us(samples: Sequence[float]) -> float:
    """The median of samples in microseconds."""
    return statistics.median(samples)


def spread_us(samples: Sequence[float]) -> float:
    """Distance of the 10th and 90th percentile of samples in microseconds; 0 for one sample."""
    if len(samples) < 2:
        return 0.0
    deciles = statistics.quantiles(samples, n=10, method="inclusive")
    return deciles[-1] - deciles[0]


def error(out: Any, ref: Any) -> float:
    """max |out - ref| / (|ref| + rms) in float32, the largest of all arrays where out and ref are several.

    rms: the root mean square of ref or of the element's row (its last dimension), whichever is larger. So the large
    first rows of causal attention, say, are not held against the small ones that follow. Equal elements have no error,
    infinities among them, and only finite ones count in an rms. NaN where one is not finite and the other differs, and
    where numbers of arrays or shapes differ.
    """
    outs, refs = jax.tree.leaves(out), jax.tree.leaves(ref)
    if [x.shape for x in outs] != [x.shape for x in refs]:
        return math.nan
    return float(np.max([float(_error(x, y)) for x, y in zip(outs, refs)], initial=0.0))  # of NaN is NaN, unlike max()


@jax.jit
def _error(out: jax.Array, ref: jax.Array) -> jax.Array:
    out, ref = out.astype(jnp.float32), ref.astype(jnp.float32)
    square, finite = ref * ref, jnp.isfinite(ref)
    rms = jnp.sqrt(jnp.mean(square, where=finite))
    if ref.ndim:
        counted = jnp.sum(square, axis=-1, keepdims=True, where=finite) / jnp.maximum(finite.sum(-1, keepdims=True), 1)
        rms = jnp.maximum(rms, jnp.sqrt(counted))
    relative = jnp.where(jnp.isfinite(out), jnp.abs(out - ref) / (jnp.abs(ref) + rms), jnp.nan)
    return jnp.max(jnp.where(out == ref, 0.0, relative), initial=0.0)


def same(out: Any, again: Any) -> bool:
    """Whether two results are the same, bit for bit."""
    pairs = zip(jax.tree.leaves(out), jax.tree.leaves(again), strict=True)
    return all(bool(_same(x, y)) for x, y in pairs)


def fingerprint(arrays: Any) -> tuple[int, ...]:
    """A number for each array, the sum of its bits read as integers."""
    return tuple(int(_sum(x)) for x in jax.tree.leaves(arrays))


@jax.jit
def _same(x: jax.Array, y: jax.Array) -> jax.Array:
    return jnp.array_equal(_as_integers(x), _as_integers(y))


@jax.jit
def _sum(x: jax.Array) -> jax.Array:
    return jnp.sum(_as_integers(x), dtype=jnp.uint32)


def _as_integers(x: jax.Array) -> jax.Array:
    """The bits of each number as an unsigned integer."""
    if x.dtype in (jnp.bool_, jnp.int4, jnp.uint4):  # in bytes of their own: two numbers of 4 bits share one in memory
        return x.astype(jnp.uint8)
    return jax.lax.bitcast_convert_type(x, {2: jnp.uint16, 4: jnp.uint32}.get(x.dtype.itemsize, jnp.uint8))


@dataclasses.dataclass
class Clock:
    """Whether the GPU is as fast as it was, by the baseline's median in microseconds: at first, and now."""

    first: float
    now: float

    def holds(self, us: float) -> bool:
        return abs(us / self.now - 1) <= DRIFT

    @property
    def scale(self) -> float:
        """What makes times of now comparable to the first ones; 1 unless the clock has drifted."""
        return 1.0 if abs(self.first / self.now - 1) <= DRIFT else self.first / self.now


def rounds_for(seconds: float, us: float, low: int = 5, high: int = 100) -> int:
    """How many rounds of `us` microseconds fit in `seconds`, within bounds."""
    return max(low, min(high, int(seconds * 1e6 / max(us, 1.0))))


def interleaved(
    functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int, devices: int = 1, calls: int = 1
) -> list[list[float]]:
    """Kernel time of each function in microseconds, one sample a round: functions take turns, each after an L2 flush.

    A sample sums all kernels that one call launches. Functions must be compiled, and launch the same kernels every time.
    A function of several `devices` makes `calls` calls in a row, which keeps the devices together: a sample is then the
    time of one call on the device that comes `last`, or of the host where that takes longer. No L2 is flushed: that sets
    the devices apart.
    Raises MeasurementError where CUPTI gives no or inconsistent timings.
    """
    if devices > 1:
        return _together(functions, rounds, devices, calls)
    flush = _flusher(gpu.l2_bytes)
    return _in_turn([(flush, f) for f in functions], rounds)


def warm(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """As `interleaved` on one GPU, but each function runs twice in a row, of which the second is the sample."""
    del gpu  # whatever the size of its L2
    return _in_turn([(f, f) for f in functions], rounds)


def typical(turns: Sequence[Turn]) -> Turn:
    """The median of each number of several turns."""

    def median(values: Iterable[float | None]) -> float | None:
        known = [value for value in values if value is not None]
        return statistics.median(known) if known else None

    us = median_us([turn.us for turn in turns])
    return Turn(us, *(median(getattr(turn, name) for turn in turns) for name in ("clock_mhz", "watts", "joules")))


def sustained(
    functions: Sequence[Callable[[], Any]], seconds: float = TURN, turns: int = TURNS, meter: Meter | None = None
) -> list[list[Turn]]:
    """The turns of each function, in each of which it runs for `seconds` without pause, by the wall clock.

    The functions take turns in another order each round. Before, the first one runs until its time has settled, which counts
    for none. Functions must be compiled. The results of calls that have ended are dropped, so that memory is bounded. `meter`,
    which must be open, tells clock, power and energy.
    Raises MeasurementError where calls are too short for the host to queue them without gaps.
    """
    depths = [_depth(f) for f in functions]
    line = _Line()
    for number in range(_WARM_TURNS):
        line.run(functions[0], depths[0], _WARM_TURN)
        if number > 2 and abs(line.us(number - 1) / line.us(number - 2) - 1) < _SETTLED:
            break
    numbers: list[list[int]] = [[] for _ in functions]
    for turn in range(turns):
        for i in np.random.default_rng(turn).permutation(len(functions)):
            numbers[i].append(line.run(functions[i], depths[i], seconds))
    line.run(functions[0], depths[0], _WARM_TURN)  # the GPU is at work until the last turn is over, and its energy counted
    line.drain()
    return [[line.turn(number, meter) for number in of_one] for of_one in numbers]


@contextlib.contextmanager
def metered(say: Callable[[str], None]) -> Iterator[Meter | None]:
    """An open meter of the GPU that JAX computes on; None where there is none, which is said."""
    try:
        meter = Meter(jax.devices()[0].local_hardware_id)
    except Unavailable as error:
        say(f"clock, watts and joules are not measured: {error}")
        yield None
        return
    with meter:
        yield meter


def sustained_seconds(functions: int, seconds: float) -> float:
    """How long `sustained` takes at most, but for the calls that are queued at the end."""
    return _WARM_TURN * (_WARM_TURNS + 1) + functions * TURNS * seconds


class _Line:
    """Calls in the order in which the GPU runs them: some microseconds of them are queued, the rest wait."""

    def __init__(self) -> None:
        self._queued: collections.deque[tuple[int, Any]] = collections.deque()  # of which turn, and what it returns
        self._calls: list[int] = []  # of each turn
        self._late: list[int] = []  # calls of each turn that came when no other was left
        self._ends = [time.perf_counter()]  # of each turn, after the beginning of the first

    def run(self, f: Callable[[], Any], depth: int, seconds: float) -> int:
        """Makes calls, of which up to `depth` are queued, until they have run for `seconds` since the last turn's end.

        Returns the turn's number.
        """
        number = len(self._calls)
        self._calls.append(0)
        self._late.append(0)
        self._ends.append(math.inf)
        while True:
            out = f()
            self._late[number] += bool(self._queued) and _ready(self._queued[-1][1])
            self._queued.append((number, out))
            self._calls[number] += 1
            while len(self._queued) > depth:
                self._wait()
            if self._queued[0][0] == number and time.perf_counter() - self._ends[number] >= seconds:
                return number

    def drain(self) -> None:
        while self._queued:
            self._wait()

    def _wait(self) -> None:
        """For the call that was queued first; its result is dropped."""
        number, out = self._queued.popleft()
        jax.block_until_ready(out)
        self._ends[number + 1] = time.perf_counter()

    def us(self, number: int) -> float:
        """Microseconds of a call, of a turn that is over."""
        return (self._ends[number + 1] - self._ends[number]) / self._calls[number] * 1e6

    def turn(self, number: int, meter: Meter | None) -> Turn:
        us, calls = self.us(number), self._calls[number]
        if self._late[number] > max(3, _DRY * calls):
            raise MeasurementError(
                f"the GPU waited for the host before {self._late[number]} of {calls} calls of {us:.4g} us: "
                "so short ones cannot be queued without gaps; measure them in bursts"
            )
        power = meter.between(self._ends[number], self._ends[number + 1]) if meter else Power()
        return Turn(us, power.clock_mhz, power.watts, None if power.joules is None else power.joules / calls)


def _depth(f: Callable[[], Any]) -> int:
    """How many calls to queue."""
    return max(2, min(_MOST_AHEAD, math.ceil(AHEAD / (wall(f, QUEUED) / QUEUED))))


def _ready(out: Any) -> bool:
    """Whether what a call returned is there."""
    return all(x.is_ready() for x in jax.tree.leaves(out))


def _in_turn(pairs: Sequence[tuple[Callable[[], Any], Callable[[], Any]]], rounds: int) -> list[list[float]]:
    """Kernel time of the second function of each pair, which starts as the first ends; one sample a round."""
    counts = {f: _count(f) for f in dict.fromkeys(f for pair in pairs for f in pair)}
    with _cupti() as timings:
        for _ in range(rounds):
            for before, f in pairs:
                before()
                jax.block_until_ready(f())
    times = [ms * 1e3 for _, ms in timings]
    if len(times) != rounds * sum(counts[f] for pair in pairs for f in pair):
        raise MeasurementError(
            f"CUPTI saw {len(times)} kernels where {rounds} rounds of {[counts[f] for _, f in pairs]} were launched: "
            "is another profiler (nsys, ncu) or another thread using this GPU?"
        )
    samples: list[list[float]] = [[] for _ in pairs]
    position = 0
    for _ in range(rounds):
        for i, (before, f) in enumerate(pairs):
            position += counts[before]
            samples[i].append(sum(times[position : position + counts[f]]))
            position += counts[f]
    return samples


def _together(functions: Sequence[Callable[[], Any]], rounds: int, devices: int, calls: int) -> list[list[float]]:
    """As `interleaved`, on several devices: CUPTI does not say whose kernels it saw, so that each sample is a session."""
    launches = [_count(f) for f in functions]
    samples: list[list[float]] = [[] for _ in functions]
    for _ in range(rounds):
        for i, f in enumerate(functions):
            timings = kernels(f)
            if len(timings) != launches[i]:
                raise MeasurementError(
                    f"CUPTI saw {len(timings)} kernels where {launches[i]} were launched: "
                    "is another profiler (nsys, ncu) or another thread using these GPUs?"
                )
            us = last(timings, devices)
            if us < HOST_BOUND * calls:
                us = max(us, wall(f, QUEUED) / QUEUED)
            samples[i].append(us / calls)
    return samples


def wall(f: Callable[[], Any], calls: int) -> float:
    """Microseconds from the start of calls that are queued, as JAX does by itself, to the end of what they run."""
    start = time.perf_counter()
    jax.block_until_ready([f() for _ in range(calls)])
    return (time.perf_counter() - start) * 1e6


def last(kernels: Iterable[tuple[str, float]], devices: int) -> float:
    """What kernels, each of which ran on all devices, take on the one that comes last: it waits for no other's start.

    Of each name, the shortest runs count, one in `devices`. When a device comes is the host's doing, not the kernels'.
    """
    runs = collections.defaultdict[str, list[float]](list)
    for name, us in kernels:
        runs[name].append(us)
    return sum(sum(sorted(of_one)[: max(1, len(of_one) // devices)]) for of_one in runs.values())


def kernels(f: Callable[[], Any]) -> list[tuple[str, float]]:
    """Name and microseconds of each kernel that a call launches, on any device, after another call brought these together."""
    jax.block_until_ready(f())
    with _cupti() as timings:
        jax.block_until_ready(f())
        jax.effects_barrier()
    return [(name, ms * 1e3) for name, ms in timings]


@functools.cache
def _flusher(l2_bytes: int) -> Callable[[], jax.Array]:
    """Reads `FLUSHED` times the L2's size: what it held is gone, and what was written is in memory."""
    buffer = jnp.ones((FLUSHED * l2_bytes // 4,), jnp.float32)
    read = jax.jit(jnp.sum).lower(buffer).compile()
    return lambda: read(buffer)


def _count(f: Callable[[], Any]) -> int:
    jax.block_until_ready(f())
    with _cupti() as timings:
        jax.block_until_ready(f())
        jax.effects_barrier()
    if not timings:
        raise MeasurementError(
            "CUPTI reported no kernel: it allows one subscriber, so run without nsys, ncu or cuda-gdb; "
            "and the function must run on the GPU"
        )
    return len(timings)


@contextlib.contextmanager
def _cupti() -> Iterator[list[tuple[str, float]]]:
    """Collects (kernel name, milliseconds) of what runs inside, in order, in the list it yields."""
    from jax._src.lib import mosaic_gpu

    extension = mosaic_gpu._mosaic_gpu_ext
    timings: list[tuple[str, float]] = []
    jax.block_until_ready(jax.device_put(0.0))
    try:
        extension._cupti_init()
    except Exception as e:
        raise MeasurementError(
            f"CUPTI cannot start ({e}): it allows one subscriber, so run without nsys, ncu or cuda-gdb"
        ) from e
    try:
        yield timings
    finally:
        timings.extend(extension._cupti_get_timings(False))
