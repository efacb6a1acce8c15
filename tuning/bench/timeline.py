"""Where a kernel's time goes: traces of Mosaic GPU's profiler, read, drawn and written for Perfetto (ui.perfetto.dev).

A trace holds ranges of regions (`core/regions.py`) of each warpgroup of each block, in clock cycles of its SM. The clocks of
warpgroups are aligned at their first range, the kernel's start. A recorded kernel runs a little slower than it does otherwise.
"""

from __future__ import annotations

import dataclasses
import functools
import json
import statistics
import tempfile
from collections.abc import Iterator, Sequence
from pathlib import Path
from typing import Any

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.spec import Config, OpSpec, Problem

CYCLES = 1000.0  # of Mosaic's traces a microsecond
OTHER = "other"
COLORS = {
    "load": "#4477aa",
    "wait": "#dddddd",
    "multiply": "#228833",
    "softmax": "#ee7733",
    "store": "#aa3377",
    OTHER: "#ffffff",
}
FEWEST = 32  # ranges a warpgroup, below which a record tells nothing


class TraceError(ValueError):
    """A trace that is none of a recorded kernel."""


@dataclasses.dataclass(frozen=True)
class Span:
    """From `start` to `end`, in cycles since the warpgroup's first range."""

    region: str
    start: float
    end: float


@dataclasses.dataclass(frozen=True)
class Block:
    """One thread block: the spans of its warpgroups, the producer's last."""

    number: int
    sm: int
    warpgroups: tuple[tuple[Span, ...], ...]

    @property
    def cycles(self) -> float:
        """How long all of its warpgroups were recorded: the shortest one, since a record ends when it is full."""
        return min(spans[-1].end for spans in self.warpgroups)

    def shares(self) -> list[dict[str, float]]:
        """Of each warpgroup, the share of each region in `cycles`, largest first; what is in none is "other"."""
        shares = []
        for spans in self.warpgroups:
            sums: dict[str, float] = {}
            for span in spans:
                inside = max(0.0, min(span.end, self.cycles) - span.start)
                sums[span.region] = sums.get(span.region, 0.0) + inside / self.cycles
            sums[OTHER] = sums.get(OTHER, 0.0) + max(0.0, 1.0 - sum(sums.values()))
            shares.append(dict(sorted(sums.items(), key=lambda item: -item[1])))
        return shares


@dataclasses.dataclass(frozen=True)
class Timeline:
    """What was recorded of one kernel."""

    kernel: str
    blocks: tuple[Block, ...]

    def typical(self) -> Block:
        """The block whose consumers' multiply shares are nearest to the median of all."""
        share = lambda block: sum(one.get("multiply", 0.0) for one in block.shares()[:-1])  # noqa: E731
        middle = statistics.median(map(share, self.blocks))
        return min(self.blocks, key=lambda block: (abs(share(block) - middle), block.number))


def role(warpgroup: int, block: Block) -> str:
    """What a warpgroup of a block does."""
    return "producer" if warpgroup == len(block.warpgroups) - 1 else f"consumer {warpgroup}"


# --- Reading


def read(path: Path, kernel: str, warpgroups: int) -> Timeline:
    """The trace of a kernel with so many warpgroups a block, as Mosaic wrote it. TraceError where it is none."""
    threads: dict[int, list[dict[str, Any]]] = {}
    try:
        for event in json.loads(path.read_text())["traceEvents"]:
            threads.setdefault(int(event["tid"]) - 1, []).append(event)
        blocks: dict[int, list[tuple[int, tuple[Span, ...], int]]] = {}
        for thread, events in threads.items():
            found = blocks.setdefault(thread // warpgroups, [])
            found.append((thread % warpgroups, tuple(_spans(events)), int(events[0]["pid"]) - 1))
    except (OSError, KeyError, TypeError, ValueError) as error:
        raise TraceError(f"{path} is no trace of a recorded kernel: {error}") from None
    whole = {
        number: sorted(found) for number, found in blocks.items() if len(found) == warpgroups and all(s for _, s, _ in found)
    }
    if not whole:
        raise TraceError(f"{path}: no block of it has all of its {warpgroups} warpgroups")
    return Timeline(kernel, tuple(Block(n, f[0][2], tuple(spans for _, spans, _ in f)) for n, f in sorted(whole.items())))


def _spans(events: Sequence[dict[str, Any]]) -> Iterator[Span]:
    """Ranges from their begin and end events; of ranges within each other, the innermost has the time."""
    first = float(events[0]["ts"])
    open_: list[str] = []
    since = 0.0
    for event in events:
        now = (float(event["ts"]) - first) * CYCLES
        if open_ and now > since:
            yield Span(open_[-1] if open_[-1] in COLORS else OTHER, since, now)
        since = now
        if event["ph"] == "B":
            open_.append(str(event["name"]))
        elif event["ph"] == "E" and open_ and open_.pop() == event["name"]:
            pass
        else:
            raise ValueError(f"a range ends that has not begun: {event}")
    if open_:
        raise ValueError(f"ranges do not end: {', '.join(open_)}")


# --- Recording


def record(spec: OpSpec, problem: Problem, config: Config, gpu: Gpu, ranges: int) -> tuple[list[Timeline], Config, int]:
    """Runs the kernels of a problem once to warm up and once recorded: their traces, the config and the ranges that had room.

    The record takes shared memory. Where the config leaves less than `FEWEST` ranges, one with a pipeline stage less runs.
    Raises ValueError where that does not fit either.
    """
    import jax

    from mgpu_ops.core import regions

    arrays = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(0))
    with tempfile.TemporaryDirectory(prefix="mgpu-ops-") as name:
        folder = Path(name)
        for chosen, room in _attempts(spec, problem, config, gpu, ranges):
            with regions.recorded(folder, room) as kernels:
                run = functools.partial(spec.run, problem, chosen, gpu)
                try:
                    compiled = jax.jit(lambda *arrays: run(*arrays)).lower(*arrays).compile()  # noqa: B023
                except ValueError as error:
                    if "shared memory" not in str(error):
                        raise
                    continue
            for _ in range(2):  # the first warms up
                for old in folder.glob("*.json"):
                    old.unlink()
                jax.block_until_ready(compiled(*arrays))
                jax.effects_barrier()  # the traces are written
            files = sorted(folder.glob("*.json"), key=lambda path: int(path.stem.split("-")[-2]))
            if len(files) != len(kernels):
                raise TraceError(f"{len(kernels)} kernels ran and {len(files)} traces were written")
            return [read(path, k.name, k.warpgroups) for path, k in zip(files, kernels, strict=True)], chosen, room
    raise ValueError(f"{spec.name} {problem}: no record fits beside {config} in shared memory")


def _attempts(spec: OpSpec, problem: Problem, config: Config, gpu: Gpu, ranges: int) -> Iterator[tuple[Config, int]]:
    """Configs and ranges, the best first."""
    configs = [config]
    stages = getattr(config, "max_concurrent_steps", 0)
    for fewer in range(stages - 1, 0, -1):
        other: Any = dataclasses.replace(config, max_concurrent_steps=fewer)  # type: ignore[type-var]
        if spec.check(problem, other, gpu) is None:
            configs.append(other)
    for one in configs:
        room = ranges
        while room >= FEWEST:
            yield one, room
            room //= 2


# --- Writing


def write_perfetto(timeline: Timeline, path: Path, blocks: int) -> None:
    """Some blocks of a trace in Chrome's trace event format; a microsecond of it is a thousand clock cycles."""
    events: list[dict[str, Any]] = []
    for block in timeline.blocks[:blocks]:
        named = {"ph": "M", "pid": block.number}
        events.append(
            {**named, "name": "process_name", "args": {"name": f"{timeline.kernel} block {block.number}, SM {block.sm}"}}
        )
        for number, spans in enumerate(block.warpgroups):
            events.append({**named, "tid": number, "name": "thread_name", "args": {"name": role(number, block)}})
            for s in spans:
                at = {"ts": s.start / CYCLES, "dur": (s.end - s.start) / CYCLES}
                events.append({"ph": "X", "pid": block.number, "tid": number, "name": s.region, **at})
    path.write_text(json.dumps({"displayTimeUnit": "ns", "traceEvents": events}))


def draw(timeline: Timeline, title: str, stem: Path) -> list[Path]:
    """One block's warpgroups over time, whole and a part of it, with the share of each region."""
    from mgpu_ops.tuning.bench import plot

    block = timeline.typical()
    shares = block.shares()
    used = [name for name in COLORS if any(one.get(name, 0.0) >= 0.0005 for one in shares)]
    whole = (0.0, block.cycles)
    height = 1.6 + 0.5 * len(block.warpgroups)
    with plot.figure_of(2, 1, (11.0, 2 * height), title) as (figure, axes):
        for ax, (left, right) in zip(axes.flat, (whole, _part(block)), strict=True):
            for number, spans in enumerate(block.warpgroups):
                for name in used:
                    bars = [(s.start, s.end - s.start) for s in spans if s.region == name and s.end > left and s.start < right]
                    ax.broken_barh(bars, (number - 0.4, 0.8), facecolors=COLORS[name], linewidth=0)
            ax.set_xlim(left, right)
            ax.set_ylim(len(block.warpgroups) - 0.5, -0.5)
            ax.set_yticks(range(len(block.warpgroups)), [role(number, block) for number in range(len(block.warpgroups))])
            ax.grid(visible=False)
        for number, one in enumerate(shares):
            told = "  ".join(f"{name} {share:.0%}" for name, share in one.items() if share >= 0.005)
            axes.flat[0].text(whole[1], number - 0.42, told, ha="right", va="bottom", fontsize=8)
        axes.flat[1].set_xlabel(f"clock cycles since the kernel began, of block {block.number} on SM {block.sm}")
        patches = [figure_patch(name) for name in used if name != OTHER]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        return plot.save(figure, stem)


def figure_patch(name: str) -> Any:
    """The sample of a region's colour in a legend."""
    from matplotlib.patches import Patch

    return Patch(facecolor=COLORS[name], label=name)


def _part(block: Block) -> tuple[float, float]:
    """A part in the middle in which single ranges can be seen: some 24 of the first consumer."""
    spans = [span for span in block.warpgroups[0] if span.end <= block.cycles]
    middle = len(spans) // 2
    part = spans[max(0, middle - 12) : middle + 12]
    return (part[0].start, part[-1].end) if part else (0.0, block.cycles)
