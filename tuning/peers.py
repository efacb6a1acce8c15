"""Other implementations of an op, for `bench` to measure beside ours."""

from __future__ import annotations

import itertools
import os
from collections.abc import Callable, Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass
from functools import partial
from typing import Any

import jax

from mgpu_ops import SPECS
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning.measure import median_us

Timer = Callable[[Sequence[Callable[[], Any]], Gpu, int], list[list[float]]]  # measure.interleaved


@dataclass(frozen=True)
class Peer:
    """Another implementation of an op.

    `unavailable(problem, gpu)` says why it cannot run a problem, or None. `prepare(problem, gpu,
    arrays, timer)` gives a function of `arrays` that jax.jit can trace, tuned for the problem, and
    its settings as text.
    """

    unavailable: Callable[[Any, Gpu], str | None]
    prepare: Callable[[Any, Gpu, tuple, Timer], tuple[Callable[..., Any], str]]
    differentiable: bool


def compiled(function: Callable[..., Any], arrays: tuple) -> Callable[[], Any]:
    """The call `function(*arrays)`, compiled ahead."""
    return partial(jax.jit(function).lower(*arrays).compile(), *arrays)


def brief(error: BaseException) -> str:
    """An exception as one short line."""
    first = str(error).strip().partition("\n")[0]
    return f"{type(error).__name__}: {first[:300]}".rstrip(": ")


# --- XLA ------------------------------------------------------------------------------------------


def _xla(op: str) -> Peer:
    """The op's reference under jit: cuBLAS or XLA's own kernels, as XLA's autotuning chooses."""

    def prepare(problem: Any, gpu: Gpu, arrays: tuple, timer: Timer) -> tuple[Callable[..., Any], str]:
        flags = os.environ.get("XLA_FLAGS", "").split()
        return partial(SPECS[op].reference, problem), " ".join(["jit", *flags])

    return Peer(lambda problem, gpu: None, prepare, differentiable=True)


# --- jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu -------------------------------------------

_TILE_K, _STEPS, _STRIP = 64, 4, 8


def pallas_tilings(problem: Any) -> Iterator[dict[str, Any]]:
    """The settings of JAX's own Hopper matmul that divisibility and registers allow.

    Its tile_m and tile_n are those of one of two warpgroups, and the tile of both must divide the
    problem. The space is that of the tuning loop in its own main(), with smaller and wider tiles
    added and one strip width instead of three.
    """
    for tile_m, tile_n, wg in itertools.product((64, 128), (64, 128, 256), "MN"):
        rows, columns = tile_m * (1 + (wg == "M")), tile_n * (1 + (wg == "N"))
        if tile_m * tile_n // 128 > 200:  # registers of each thread for the accumulator
            continue
        if problem.m % rows or problem.n % columns or problem.k % _TILE_K:
            continue
        one_strip = problem.m == rows or problem.n == columns  # then both orders are the same
        for minor in "N" if one_strip else "MN":
            yield {
                "tile_m": tile_m,
                "tile_n": tile_n,
                "tile_k": _TILE_K,
                "max_concurrent_steps": _STEPS,
                "wg_dimension": wg,
                "grid_minor_dim": minor,
                "grid_tile_width": _STRIP,
            }


def _pallas_unavailable(problem: Any, gpu: Gpu) -> str | None:
    if gpu.architecture != "hopper":
        return f"is for Hopper GPUs, not for {gpu.name}"
    if problem.layout != "nn" or problem.batch != 1:
        return f"takes layout nn and batch 1, not layout {problem.layout} and batch {problem.batch}"
    if problem.dtype not in ("bfloat16", "float16") or problem.out_dtype != problem.dtype:
        return f"gives a 16-bit input's dtype, not {problem.dtype} to {problem.out_dtype}"
    if next(pallas_tilings(problem), None) is None:
        return f"has no tile that divides m={problem.m}, n={problem.n}, k={problem.k}"
    try:
        from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu  # noqa: F401
    except ImportError as error:
        return f"cannot be imported ({error}): it needs absl, `pip install absl-py`"
    return None


def _pallas_call(tiling: dict[str, Any]) -> Callable[..., Any]:
    from jax.experimental.pallas.ops.gpu import hopper_matmul_mgpu as theirs

    sides = {key: theirs.MatmulDimension[tiling[key]] for key in ("wg_dimension", "grid_minor_dim")}
    config = theirs.TuningConfig(**{**tiling, **sides})
    return lambda a, b: theirs.matmul(a, b, None, config)


def _runnable(tiling: dict[str, Any], arrays: tuple) -> Callable[[], Any] | str:
    """The compiled call, or why there is none: its limits, as of shared memory, raise."""
    try:
        return compiled(_pallas_call(tiling), arrays)
    except Exception as error:
        return brief(error)


def _pallas_prepare(problem: Any, gpu: Gpu, arrays: tuple, timer: Timer) -> tuple[Callable[..., Any], str]:
    """The fastest of its settings in three interleaved rounds."""
    tilings = list(pallas_tilings(problem))
    with ThreadPoolExecutor(4) as pool:
        calls = list(pool.map(partial(_runnable, arrays=arrays), tilings))
    legal = [(tiling, call) for tiling, call in zip(tilings, calls) if not isinstance(call, str)]
    if not legal:
        raise ValueError(f"none of {len(tilings)} settings compiles; the last: {calls[-1]}")
    samples = timer([call for _, call in legal], gpu, 3)
    _, best = min((median_us(s), i) for i, s in enumerate(samples))
    tiling = legal[best][0]
    text = " ".join(f"{key}={value}" for key, value in tiling.items())
    return _pallas_call(tiling), f"{text}; fastest of {len(legal)}"


PEERS: dict[str, dict[str, Peer]] = {
    "matmul": {
        "xla": _xla("matmul"),
        "jax-pallas": Peer(_pallas_unavailable, _pallas_prepare, differentiable=False),
    }
}
