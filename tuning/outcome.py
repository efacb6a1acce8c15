"""What became of a candidate config."""

from __future__ import annotations

import dataclasses
from typing import Literal

from mgpu_ops.registry.spec import Config

Kind = Literal["ok", "constraint", "compile", "timeout", "crash", "memory", "wrong"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`ok` with times, or the kind of failure with its reason.

    constraint: `check` refuses it. compile: it does not lower or compile, or spills registers. timeout: it compiled or ran past
    the limit and was killed. crash: it raised or took its process down. memory: it does not fit on the GPU. wrong: its result
    is not the reference's or not the same twice, or it writes elsewhere.

    Where the GPU's clock has drifted since the problem was opened, its times are scaled as the baseline's and `detail` says so.
    """

    kind: Kind
    us: float | None = None  # median kernel time, or the modelled time
    baseline_us: float | None = None  # the baseline's median in the same rounds
    error: float | None = None  # max |out - ref| / (|ref| + rms(ref))
    detail: str = ""
    samples: tuple[float, ...] = ()  # microseconds, in the order measured; `us` is their median

    @property
    def speed(self) -> float | None:
        """As a multiple of the baseline's speed; None if they were not both measured."""
        return self.baseline_us / self.us if self.us and self.baseline_us else None


@dataclasses.dataclass(frozen=True)
class Trial:
    """A candidate of a search, and what became of it."""

    number: int
    origin: str  # default, near, model, search, local
    config: Config
    outcome: Outcome


@dataclasses.dataclass(frozen=True)
class Turn:
    """What a function took while it ran without pause, for a second, say."""

    us: float  # of a call
    clock_mhz: float | None = None  # of the SMs, the mean; None, as of all that follow, where NVML does not tell
    watts: float | None = None  # the mean
    joules: float | None = None  # of a call


@dataclasses.dataclass(frozen=True)
class SustainedFinal:
    """Turns of the finalists and the baseline, in one run. A finalist that is not in it failed."""

    turns: dict[Config, list[Turn]]
    baseline: list[Turn]


@dataclasses.dataclass(frozen=True)
class Final:
    """Raw samples of the finalists and the baseline, in microseconds, measured in turn in one run.

    A finalist that is not in it failed when it was run again: it must not be stored.
    """

    samples: dict[Config, list[float]]  # config -> samples
    baseline: list[float]
