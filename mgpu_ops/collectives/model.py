"""Which configs of a collective are worth trying: a model of its time.

A call is three kernels: XLA fills the flags with zeros, XLA's barrier waits for all devices, and ours moves the data. Ours
takes the time of its handshakes, and of its bytes at the slowest of three rates: of the link, of the memory, and of the chunks
in flight over the latency.
"""

from __future__ import annotations

import functools
import itertools
from collections.abc import Sequence
from typing import Any, Final

from mgpu_ops.collectives import schedules
from mgpu_ops.collectives.layout import ROW_BYTES, ROWS_AT_ONCE
from mgpu_ops.collectives.problem import XLA, Config, Problem, check, payload_bytes, schedule, supports
from mgpu_ops.collectives.schedules import Kind
from mgpu_ops.core import rates
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import require

# From two and four H200s: docs/kernels/all_reduce.md.
ENTRY: Final = 3.2e-6  # s of XLA's barrier before ours; its fill of zeros is one for a whole program
START: Final = 1.0e-6  # s of a kernel that does nothing
HANDSHAKE: Final = 1.2e-6  # s from a signal, its drains included, to the other side of a wait
WRITES: Final = 0.79  # of NVLink's rate is reached
READS: Final = 0.65
REMOTE_LATENCY: Final = 0.7e-6  # s from a request for a peer's memory to the data, or for what is sent in LL
PER_CHUNK: Final = 0.1e-6  # s that a block needs for a chunk beside its transfer: barriers, signals of TMA
XLA_CALL: Final = 4e-6  # s of XLA's small collectives
XLA_BUS: Final = 260e9  # bytes/s of NCCL's bus without multicast

BLOCKS: Final = (1, 2, 4, 8, 16, 24, 32, 48, 64, 96, 132)
CHUNKS: Final = (2048, 4096, 8192, 16384, 32768, 65536)
STAGES: Final = (2, 3, 4, 6, 8)


def space(kind: Kind, problem: Problem, gpu: Gpu) -> dict[str, Sequence[Any]]:
    """The choices of each field of Config."""
    return {
        "algorithm": tuple(schedules.algorithms(kind, problem.transport)),
        "blocks": tuple(b for b in BLOCKS if b <= gpu.sms),
        "chunk": CHUNKS,
        "stages": STAGES,
    }


def cost(kind: Kind, problem: Problem, config: Config, gpu: Gpu) -> float:
    """Modelled seconds of a call."""
    p, c = problem, config
    require(kind, supports(kind, p, gpu), p, gpu)
    size = payload_bytes(p)
    memory = rates.HBM * gpu.memory_bytes_per_s
    if c.algorithm == XLA:
        passes = 2 if kind == "all_reduce" else 1
        return XLA_CALL + passes * (p.devices - 1) / p.devices * size / XLA_BUS
    plan = schedule(kind, p, c)
    traffic = schedules.traffic(plan, size)
    handshakes = sum(isinstance(step, schedules.Wait) and not step.ll for step in plan.steps)
    time = ENTRY + START + handshakes * HANDSHAKE
    link = gpu.nvlink_bytes_per_s
    first = True  # of the moves that reach peers at the same time
    for move in plan.steps:
        if isinstance(move, schedules.Wait):
            first = True
        if not isinstance(move, schedules.Move):
            continue
        length = (size if move.whole else -(-size // p.devices)) * (1 + move.ll)
        chunk = min(c.chunk * (1 + move.ll), length)
        chunks = -(-length // chunk)
        busy = min(c.blocks, chunks)
        rounds = -(-chunks // c.blocks)
        if move.ll:  # as many rows as there are registers for go at once
            rounds *= -(-chunk // 2 * len(move.reads) // (ROWS_AT_ONCE * ROW_BYTES))
        in_flight = busy * min(c.stages, rounds) * chunk * len(move.reads)
        rate = in_flight / REMOTE_LATENCY
        # Others read from a device as much as it reads, so that reads load each direction of its link as writes do.
        reads, writes = (sum(place.device != 0 for place in places) * length for places in (move.reads, move.writes))
        transfer = reads / (READS * link) + writes / (WRITES * link)
        time += rounds * PER_CHUNK + max(transfer, len(move.reads) * length / rate)
        if first and (reads or writes):
            time, first = time + REMOTE_LATENCY, False
    return max(time, (traffic.local + traffic.scratch) / memory)


def candidates(kind: Kind, problem: Problem, gpu: Gpu) -> list[Config]:
    """The fastest by the model of each algorithm, and one with small chunks: all that pass `check`.

    Raises ValueError where `supports` has a reason.
    """
    require(kind, supports(kind, problem, gpu), problem, gpu)
    return list(_candidates(kind, problem, gpu))


@functools.lru_cache(1024)
def _candidates(kind: Kind, problem: Problem, gpu: Gpu) -> tuple[Config, ...]:
    best: list[Config] = []
    for algorithm in schedules.algorithms(kind, problem.transport):
        legal = [Config(algorithm, *rest) for rest in itertools.product(*list(space(kind, problem, gpu).values())[1:])]
        legal = [config for config in legal if check(kind, problem, config, gpu) is None]
        by_cost = sorted(legal, key=lambda config: cost(kind, problem, config, gpu))
        fine = [config for config in by_cost if config.chunk == CHUNKS[0]]  # which keeps more links busy than the model knows
        best += dict.fromkeys((*by_cost[:1], *fine[:1], *by_cost[1:2]))
    return tuple(sorted(best, key=lambda config: cost(kind, problem, config, gpu)))


def default(kind: Kind, problem: Problem, gpu: Gpu) -> Config:
    """What runs where the kernel is asked for and nothing is tuned.

    Raises ValueError where `supports` has a reason.
    """
    require(kind, supports(kind, problem, gpu), problem, gpu)
    return _candidates(kind, problem, gpu)[0]
