"""Whole programs as something to measure: a step of each of several backends, by the wall clock, its memory and its kernels.

`examples/llama.py` measures a model so. Kernels of an op are timed alone, with a cold L2. A program is timed from call to
result: gaps between kernels count, and each kernel finds in the L2 what the one before left.
"""

from __future__ import annotations

import dataclasses
import re
import tempfile
import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path
from typing import Any

import jax
import numpy as np

from mgpu_ops.core import gpu as gpus
from mgpu_ops.tuning import measure
from mgpu_ops.tuning.bench import results, runner
from mgpu_ops.tuning.bench.results import SUSTAINED, Measurement, six_digits
from mgpu_ops.tuning.outcome import Turn

WARM_CALLS = 2
KINDS = {  # of a kernel by its name; the first that fits
    "attention": re.compile(r"flash|sdpa|fmha|attention|cudnn::fusion", re.IGNORECASE),
    "loss": re.compile(r"cross_entropy"),
    # `body_` is what JAX's ragged_dot calls its kernels, which are named after a function.
    "product": re.compile(r"matmul|gemm|nvjet|xmma|cutlass|splitk|cublas|ragged|gated_gradient|^body_", re.IGNORECASE),
}
BETWEEN = "between"
COLORS = {"product": "#228833", "attention": "#ee7733", "loss": "#aa3377", BETWEEN: "#4477aa"}


# --- A program ----------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True)
class Program:
    """One backend's step, compiled.

    peak_bytes: of GPU memory that a step needs, as XLA planned it: arguments, results and all between.
    """

    step: Callable[..., Any]
    peak_bytes: int

    @classmethod
    def of(cls, lowered: Any) -> Program:
        step = lowered.compile()
        return cls(step, peak_bytes(step.memory_analysis()))


def peak_bytes(memory: Any) -> int:
    """Arguments, results that are no arguments, and temporary arrays, of a compiled program's `memory_analysis()`."""
    m = memory
    return int(m.argument_size_in_bytes + m.output_size_in_bytes + m.temp_size_in_bytes - m.alias_size_in_bytes)


# --- Times ------------------------------------------------------------------------------------------------------------


def in_turn(calls: Sequence[Callable[[], Any]], rounds: int, queued: int) -> list[list[float]]:
    """Microseconds of a step of each call, a sample a round, by the wall clock: in a round each makes `queued` calls in a row.

    The order is another one each round, so that none always follows the same. The first calls are not timed.
    """
    for call in calls:
        for _ in range(WARM_CALLS):
            jax.block_until_ready(call())
    samples: list[list[float]] = [[] for _ in calls]
    for number in range(rounds):
        for i in np.random.default_rng(number).permutation(len(calls)):
            samples[i].append(_queued_us(calls[i], queued))
    return samples


def _queued_us(call: Callable[[], Any], queued: int) -> float:
    """Of a call, where so many run in a row."""
    start = time.perf_counter()
    for _ in range(queued - 1):
        call()  # the GPU runs calls in order, so that the last one ends last
    jax.block_until_ready(call())
    return (time.perf_counter() - start) / queued * 1e6


# --- Kernels ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass(frozen=True, order=True)
class Kernel:
    """One that ran: when it began, in microseconds since the first did, and for how long."""

    start: float
    us: float
    name: str

    @property
    def end(self) -> float:
        return self.start + self.us

    @property
    def kind(self) -> str:
        return next((kind for kind, names in KINDS.items() if names.search(self.name)), BETWEEN)


def kernels_of(call: Callable[[], Any]) -> list[Kernel]:
    """What a call runs on the GPU, by XLA's profiler, in order. MeasurementError where it sees none."""
    from jax.profiler import ProfileData

    jax.block_until_ready(call())
    with tempfile.TemporaryDirectory(prefix="mgpu-ops-") as folder:
        with jax.profiler.trace(folder):
            jax.block_until_ready(call())
        files = list(Path(folder).rglob("*.xplane.pb"))
        found = [kernel for file in files for kernel in kernels_in(ProfileData.from_file(str(file)))]
    if not found:
        raise measure.MeasurementError("XLA's profiler saw no kernel: run on a GPU, without nsys, ncu or cuda-gdb")
    first = min(found).start
    return [dataclasses.replace(kernel, start=kernel.start - first) for kernel in sorted(found)]


def kernels_in(profile: Any) -> list[Kernel]:
    """The kernels and copies of the GPUs' streams in a `jax.profiler.ProfileData`, with times of the profile's own clock."""
    return [
        Kernel(event.start_ns / 1e3, event.duration_ns / 1e3, event.name)
        for plane in profile.planes
        if plane.name.startswith("/device:GPU")
        for line in plane.lines
        if line.name.startswith("Stream")
        for event in line.events
    ]


def kinds_ms(kernels: Sequence[Kernel]) -> dict[str, float]:
    """Milliseconds of each kind of kernel, of gaps in which none ran, and from the first to the last."""
    sums = dict.fromkeys((*KINDS, BETWEEN), 0.0)
    for kernel in kernels:
        sums[kernel.kind] += kernel.us / 1e3
    covered, end = 0.0, -np.inf
    for kernel in sorted(kernels):
        covered += max(0.0, kernel.end - max(end, kernel.start))
        end = max(end, kernel.end)
    whole = end - min(kernels).start
    return sums | {"gaps": (whole - covered) / 1e3, "all": whole / 1e3}


def kernel_table(kernels: Iterable[Kernel]) -> list[str]:
    """A line for each kernel's name, the one that took longest first: microseconds of all its runs, how often, kind, name."""
    of_name: dict[str, list[Kernel]] = {}
    for kernel in kernels:
        of_name.setdefault(kernel.name, []).append(kernel)
    sums = {name: sum(kernel.us for kernel in runs) for name, runs in of_name.items()}
    return [
        f"{sums[name]:10.1f} us {len(of_name[name]):4} x  {of_name[name][0].kind:9}  {name}"
        for name in sorted(sums, key=lambda name: -sums[name])
    ]


def layers_of(kernels: Sequence[Kernel], layers: int) -> tuple[list[Kernel], list[Kernel]]:
    """The kernels of one layer's forward pass and of one's backward pass: between the ends of two layers' attention.

    Raises ValueError where there are not twice as many runs of attention, apart from each other by products, as layers; and for
    a single layer, which has no next one.
    """
    ends: list[int] = []  # of each run of attention, the index after its last kernel
    fresh = True
    for i, kernel in enumerate(kernels):
        if kernel.kind == "attention":
            ends = [*ends, i + 1] if fresh else [*ends[:-1], i + 1]
            fresh = False
        elif kernel.kind == "product":
            fresh = True
    if layers < 2 or len(ends) != 2 * layers:
        raise ValueError(f"{len(ends)} runs of attention in a step of {layers} layers: a picture takes two of each of several")
    return list(kernels[ends[0] : ends[1]]), list(kernels[ends[layers] : ends[layers + 1]])


def draw_layer(steps: Mapping[str, Sequence[Kernel]], layers: int, title: str, stem: Path) -> list[Path]:
    """One layer of each backend's step over time, forward and backward, a colour for each kind of kernel."""
    from matplotlib.patches import Patch

    from mgpu_ops.tuning.bench import plot

    passes = {impl: layers_of(kernels, layers) for impl, kernels in steps.items()}
    with plot.figure_of(2, 1, (11.0, 2.2 + 0.9 * len(steps)), title) as (figure, axes):
        for number, (ax, name) in enumerate(zip(axes.flat, ("forward", "backward"), strict=True)):
            for place, both in enumerate(passes.values()):
                _bars(ax, place, both[number])
                last = both[number][-1].end - both[number][0].start
                ax.text(last / 1e3, place, f"  {last / 1e3:.2f} ms", va="center", fontsize=8)
            ax.set_yticks(range(len(passes)), list(passes))
            ax.set_ylim(len(passes) - 0.5, -0.5)
            ax.set_title(name, loc="left", fontsize=9)
            ax.grid(visible=False)
            ax.margins(x=0.08)
            ax.set_xlim(left=0.0)
        axes.flat[1].set_xlabel("milliseconds")
        patches = [Patch(facecolor=color, label=kind) for kind, color in COLORS.items()]
        figure.legend(handles=patches, loc="outside lower center", ncols=len(patches), frameon=False)
        return plot.save(figure, stem)


def _bars(ax: Any, place: int, kernels: Sequence[Kernel]) -> None:
    """The kernels of a pass on one line."""
    first = kernels[0].start
    for kind, color in COLORS.items():
        bars = [((k.start - first) / 1e3, k.us / 1e3) for k in kernels if k.kind == kind]
        ax.broken_barh(bars, (place - 0.35, 0.7), facecolors=color, edgecolors="white", linewidth=0.3)


# --- A benchmark ------------------------------------------------------------------------------------------------------------


@dataclasses.dataclass
class Bench:
    """Measures steps of several backends in turn, prints them, and gathers them as rows of results/.

    rounds: of all backends in turn. sustained: seconds for which each then runs without pause; 0: not at all.
    pictures: a folder for each step's kernels and a layer's picture. csv: where the rows go, beside those of other
    problems that are there; without a GPU there are none.
    """

    rounds: int
    sustained: float = 0.0
    pictures: Path | None = None
    csv: Path | None = None
    rows: list[Measurement] = dataclasses.field(default_factory=list)

    def compiled(self, steps: Mapping[str, Any], arguments: Mapping[str, tuple]) -> dict[str, Program]:
        """The programs of jitted functions, by the names of their backends.

        The first is compiled alone, so that the kernels that XLA measures and chooses for products are the same for all.
        """

        lowered = {name: step.lower(*arguments[name]) for name, step in steps.items()}
        first, *others = lowered
        programs = {first: Program.of(lowered[first])}
        with ThreadPoolExecutor(max(1, len(others))) as pool:
            return programs | dict(zip(others, pool.map(lambda name: Program.of(lowered[name]), others), strict=True))

    def measure(
        self,
        ops: Mapping[str, Mapping[str, str]],
        problem: str,
        work: tuple[float, float],
        programs: Mapping[str, Program],
        calls: Mapping[str, Callable[[], Any]],
        errors: Mapping[str, float],
        *,
        queued: int,
        layers: int = 0,
    ) -> None:
        """Times `calls`, which are steps of `programs`; the first is what the others are compared with.

        ops: of which backends, and as whose, rows are written, by the op's name. work: a step's operations and bytes.
        errors: how far each result is from the first's. queued: steps in a row that are timed together.
        layers: of the model; of two and more, one is drawn.
        """
        names = list(calls)
        samples = dict(zip(names, in_turn(list(calls.values()), self.rounds, queued), strict=True))
        first = measure.median_us(samples[names[0]])
        print(f"{next(iter(ops))} {problem}: ms, x of {names[0]}, TFLOP/s, peak GB")
        for name in names:
            us = measure.median_us(samples[name])
            told = f"{us / 1e3:9.3f} {first / us:7.3f} {work[0] / us / 1e6:7.1f} {programs[name].peak_bytes / 1e9:8.2f}"
            print(f"  {name:9} {told}", flush=True)
        known = {name: _Known(problem, work, programs[name].peak_bytes, errors[name]) for name in names}
        self._record(ops, "", {name: _row(known[name], samples[name]) for name in names})
        if self.pictures is not None:
            self._profile(f"{next(iter(ops))}-{problem}", calls, layers)
        if self.sustained:
            self._sustain(ops, calls, known)

    def _sustain(
        self, ops: Mapping[str, Mapping[str, str]], calls: Mapping[str, Callable[[], Any]], known: Mapping[str, _Known]
    ) -> None:
        with measure.metered(print) as meter:
            turns = measure.sustained(list(calls.values()), self.sustained, 1, meter)
        typical = {name: measure.typical(of_one) for name, of_one in zip(calls, turns, strict=True)}
        first = next(iter(typical.values())).us
        for name, turn in typical.items():
            power = "" if turn.watts is None else f", {turn.watts:.0f} W, {turn.clock_mhz:.0f} MHz"
            print(
                f"  {name:9} {turn.us / 1e3:9.3f} {first / turn.us:7.3f}  for {self.sustained:g} s without pause{power}",
                flush=True,
            )
        self._record(ops, SUSTAINED, {name: _sustained_row(known[name], turn) for name, turn in typical.items()})

    def _record(self, ops: Mapping[str, Mapping[str, str]], ending: str, found: Mapping[str, dict[str, Any]]) -> None:
        """Writes the rows of the ops that more than one backend was measured for."""
        gpu = gpus.current()
        if self.csv is None or gpu is None:
            return
        for op, impls in ops.items():
            if len(here := [name for name in impls if name in found]) > 1:
                stamp = runner.stamp_of(f"{op}{ending}", gpu)
                self.rows += [Measurement(impl=impls[name], **found[name], **stamp) for name in here]
        kept = results.read_csv(self.csv) if self.csv.exists() else []
        results.write_csv(results.merge(kept, self.rows), self.csv)

    def _profile(self, stem: str, calls: Mapping[str, Callable[[], Any]], layers: int) -> None:
        """Prints where a step's time goes, writes its kernels, and draws a layer."""
        assert self.pictures is not None
        self.pictures.mkdir(parents=True, exist_ok=True)
        steps = {name: kernels_of(call) for name, call in calls.items()}
        for name, kernels in steps.items():
            told = ", ".join(f"{kind} {ms:.3f}" for kind, ms in kinds_ms(kernels).items())
            print(f"  {name:9} ms of {told}", flush=True)
            lines = [f"# {stem}, {name}: milliseconds of {told}", *kernel_table(kernels)]
            (self.pictures / f"{stem}-{name}.txt").write_text("\n".join(lines) + "\n")
        if layers > 1:
            draw_layer(steps, layers, f"One layer of {stem}", self.pictures / stem)


@dataclasses.dataclass(frozen=True)
class _Known:
    """What is known of a step before it is timed."""

    problem: str
    work: tuple[float, float]
    peak_bytes: int
    error: float


def _row(known: _Known, samples: Sequence[float]) -> dict[str, Any]:
    """The columns of a measurement by the times of steps, but for whose it is."""
    us = measure.median_us(samples)
    flops, moved = known.work
    return {
        "problem": known.problem,
        "config": "",
        "median_us": six_digits(us),
        "spread_us": six_digits(measure.spread_us(samples)),
        "tflops": six_digits(flops / us / 1e6),
        "gbs": six_digits(moved / us / 1e3),
        "error": six_digits(known.error),
        "peak_bytes": known.peak_bytes,
    }


def _sustained_row(known: _Known, turn: Turn) -> dict[str, Any]:
    power = {"watts": turn.watts, "clock_mhz": turn.clock_mhz, "joules": turn.joules}
    return _row(known, [turn.us]) | {name: value and six_digits(value) for name, value in power.items()}
