"""A toy op, whose times a function gives, and a device that judges by it: no GPU, no kernel."""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import math
import threading
from collections.abc import Callable, Iterator, Sequence
from pathlib import Path
from typing import Any

import pytest

import mgpu_ops
from mgpu_ops.core.gpu import find
from mgpu_ops.registry import database
from mgpu_ops.registry.spec import OpSpec
from mgpu_ops.tuning import many
from mgpu_ops.tuning.outcome import Final, Outcome, SustainedFinal, Turn

GPU = find("h200")


@dataclasses.dataclass(frozen=True)
class Problem:
    size: int


@dataclasses.dataclass(frozen=True)
class Config:
    a: int
    b: int
    c: int
    d: int
    mode: str


CHOICES: dict[str, tuple[Any, ...]] = {
    "a": (1, 2, 4, 8, 16, 32, 64, 128),
    "b": (16, 32, 64, 96, 128, 160, 192),
    "c": (1, 2, 3, 4, 6, 8, 12),
    "d": (8, 16, 24, 32, 40),
    "mode": ("m", "n", "none"),
}
OPTIMUM = Config(32, 96, 3, 40, "n")
DEFAULT = Config(1, 16, 1, 8, "m")
PROBLEM = Problem(1024)


def slope(config: Config) -> float:
    """Separable: 100 at OPTIMUM, 10 more for each step away from it in any field."""
    steps = (abs(v.index(getattr(config, k)) - v.index(getattr(OPTIMUM, k))) for k, v in CHOICES.items())
    return 100.0 + 10.0 * sum(steps)


SPEC = OpSpec(
    name="toy",
    version=3,
    Problem=Problem,
    Config=Config,
    shapes={"toy-1024": PROBLEM, "toy-2048": Problem(2048)},
    suites={"toys": ("toy-1024", "toy-2048")},
    space=lambda problem, gpu: CHOICES,
    supports=lambda problem, gpu: "size is odd: pad it" if problem.size % 2 else None,
    check=lambda problem, config, gpu: None,
    candidates=lambda problem, gpu: [DEFAULT],
    default=lambda problem, gpu: DEFAULT,
    cost=lambda problem, config, gpu: 1.0,  # tells nothing: the search has to
    distance=lambda x, y: abs(math.log2(x.size / y.size)),
    flops=lambda problem: problem.size,
    bytes=lambda problem: problem.size,
    inputs=lambda problem, key: (),
    run=lambda problem, config, gpu, *inputs, interpret=False: None,
    reference=lambda problem, *inputs: None,
    tolerance=lambda problem: 0.0,
)


class Clock:
    """time.monotonic, which only the fake device moves: one second a candidate."""

    def __init__(self) -> None:
        self.now = 1000.0

    def __call__(self) -> float:
        return self.now


class FakeDevice:
    """Judges by a function: microseconds, an Outcome, or an exception to raise."""

    gpu = GPU

    def __init__(
        self,
        judgement: Callable[[Config], Any] = slope,
        final: Callable[[Config], list[float]] | None = None,
        kind: str = "measured",
        clock: Clock | None = None,
        slots: int = 8,
    ):
        self.kind, self.baseline = kind, "xla" if kind == "measured" else None
        self.versions: dict[str, str | None] = {"driver": "1.2", "jax": "0.11.2", "jaxlib": "0.11.2", "cuda": "13000"}
        self.slots = slots
        self.notes: list[str] = []
        self.judgement = judgement
        self.final = final or (lambda config: [judgement(config)])
        self.clock = clock
        self.flying: collections.deque[Config] = collections.deque()
        self.judged: list[Config] = []
        self.finalists: list[Config] | None = None
        self.opened: tuple[Any, ...] | None = None

    def open(self, spec: OpSpec, problem: Any, seed: int) -> None:
        self.opened = (spec, problem, seed)

    def submit(self, config: Config) -> None:
        assert len(self.flying) < self.slots
        self.flying.append(config)

    def next(self) -> tuple[Config, Outcome]:
        if not self.flying:
            raise LookupError("nothing is in flight")
        config = self.flying.popleft()
        self.judged.append(config)
        if self.clock:
            self.clock.now += 1.0
        answer = self.judgement(config)
        if isinstance(answer, BaseException):
            raise answer
        return config, answer if isinstance(answer, Outcome) else Outcome("ok", answer, 150.0, 0.002)

    def finals(self, configs: Sequence[Config], seconds: float) -> Final:
        self.finalists = self.finalists or list(configs)
        return Final({c: self.final(c) for c in configs}, [150.0, 151.0, 149.0] if self.baseline else [])

    def close(self) -> None:
        pass


class Sustaining(FakeDevice):
    """Where `hungry` runs without pause, it takes twice its time, and others take half of it more."""

    def __init__(self, hungry: Config | None = None, **more: Any):
        super().__init__(**more)
        self.hungry = hungry
        self.sustained_configs: list[Config] = []

    def sustained(self, configs: Sequence[Config], seconds: float) -> SustainedFinal:
        self.sustained_configs = list(configs)
        times = {config: slope(config) * (2.0 if config == self.hungry else 1.5) for config in configs}
        turns = {config: [Turn(us, 1500.0, 690.0, us * 690e-6)] * 3 for config, us in times.items()}
        return SustainedFinal(turns, [Turn(300.0, 1600.0, 700.0, 0.21)] * 3)


class OneOfSeveral(FakeDevice):
    """As `many.each` takes it: another thread's `stop` ends what it waits for."""

    def __init__(self, *arguments: Any, **options: Any):
        super().__init__(*arguments, **options)
        self.stopped = threading.Event()

    def next(self) -> tuple[Config, Outcome]:
        self.wait(0.0)
        return super().next()

    def wait(self, seconds: float) -> None:
        if self.stopped.wait(seconds):
            raise KeyboardInterrupt

    def stop(self) -> None:
        self.stopped.set()


@contextlib.contextmanager
def machine_of(monkeypatch: pytest.MonkeyPatch, *devices: FakeDevice, spec: OpSpec = SPEC) -> Iterator[None]:
    """A machine whose GPUs are these, for `--workers`, and which has the toy op."""
    with monkeypatch.context() as patch:
        patch.setitem(mgpu_ops.SPECS, "toy", spec)
        patch.setattr("mgpu_ops.tuning.devices.has_gpu", lambda: True)
        patch.setattr(many, "devices", lambda workers, gpus=1: contextlib.nullcontext(list(devices[:workers])))
        yield


def store(
    size: int, config: Config, path: Path | None = None, kind: str = "modelled", objective: database.Objective = "burst"
) -> None:
    """Puts an entry into the user's database, or the file at `path`."""
    evidence = database.Evidence(
        kind=kind,  # type: ignore[arg-type]
        gpu=GPU.name, driver=None, jax="0", jaxlib="0", cuda=None, kernel_version=3, median_us=1.0, spread_us=0.0,
        default_us=None, baseline=None, baseline_us=None, error=None, trials=1, seed=0, date="2025-11-20",
        objective=objective,
    )  # fmt: skip
    entry = database.to_entry(Problem(size), config, evidence)
    database.update(path or database.user_path(GPU.key, "toy"), [entry], gpu_key=GPU.key, op="toy")
