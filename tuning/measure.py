"""Time on a GPU: kernel time from CUPTI, cold L2, several functions interleaved in one run.

Only ratios of functions measured in turn, in one run, mean anything: a GPU under its power cap slows by several percent as it
warms up, and does so for whatever runs then.
"""

from __future__ import annotations

import contextlib
import functools
import math
import statistics
from collections.abc import Callable, Iterator, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from mgpu_ops.core.gpu import Gpu


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
    """max |out - ref| / (|ref| + rms(ref)) in float32, the largest of all arrays where out and ref are several.

    Equal elements have no error, infinities among them, and the rms is that of ref's finite ones. NaN where one is not finite
    and the other differs, and where numbers of arrays or shapes differ.
    """
    outs, refs = jax.tree.leaves(out), jax.tree.leaves(ref)
    if [x.shape for x in outs] != [x.shape for x in refs]:
        return math.nan
    return float(np.max([float(_error(x, y)) for x, y in zip(outs, refs)], initial=0.0))  # of NaN is NaN, unlike max()


@jax.jit
def _error(out: jax.Array, ref: jax.Array) -> jax.Array:
    out, ref = out.astype(jnp.float32), ref.astype(jnp.float32)
    rms = jnp.sqrt(jnp.mean(ref * ref, where=jnp.isfinite(ref)))
    relative = jnp.where(jnp.isfinite(out), jnp.abs(out - ref) / (jnp.abs(ref) + rms), jnp.nan)
    return jnp.max(jnp.where(out == ref, 0.0, relative), initial=0.0)


def rounds_for(seconds: float, us: float, low: int = 5, high: int = 100) -> int:
    """How many rounds of `us` microseconds fit in `seconds`, within bounds."""
    return max(low, min(high, int(seconds * 1e6 / max(us, 1.0))))


def interleaved(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """Kernel time of each function in microseconds, one sample a round: functions take turns, each after an L2 flush.

    A sample sums all kernels that one call launches. Functions must be compiled, and launch the same kernels every time.
    Raises MeasurementError where CUPTI gives no or inconsistent timings.
    """
    flush = _flusher(gpu.l2_bytes)
    launches = [_count(f) for f in (flush, *functions)]
    with _cupti() as timings:
        for _ in range(rounds):
            for f in functions:
                flush()
                jax.block_until_ready(f())
    times = [ms * 1e3 for _, ms in timings]
    if len(times) != rounds * (len(functions) * launches[0] + sum(launches[1:])):
        raise MeasurementError(
            f"CUPTI saw {len(times)} kernels where {rounds} rounds of {launches} were launched: "
            "is another profiler (nsys, ncu) or another thread using this GPU?"
        )
    samples: list[list[float]] = [[] for _ in functions]
    position = 0
    for _ in range(rounds):
        for i, count in enumerate(launches[1:]):
            position += launches[0]
            samples[i].append(sum(times[position : position + count]))
            position += count
    return samples


@functools.cache
def _flusher(l2_bytes: int) -> Callable[[], jax.Array]:
    """Overwrites twice the L2's size, so that nothing a function reads is still there."""
    buffer = jnp.ones((2 * l2_bytes // 4,), jnp.float32)
    write = jax.jit(lambda x: x + 1)

    return lambda: write(buffer)


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
