"""What became of a candidate config."""

from __future__ import annotations

import dataclasses
from typing import Any, Literal

Kind = Literal["ok", "constraint", "compile", "timeout", "crash", "wrong"]


@dataclasses.dataclass(frozen=True)
class Outcome:
    """`ok` with times, or the kind of failure with its reason.

    constraint: `check` refuses it. compile: it does not lower or compile, or spills registers. timeout: it ran past the
    limit and was killed. crash: it raised or took its process down. wrong: its result is not the reference's.
    """

    kind: Kind
    us: float | None = None  # median kernel time, or the modelled time
    baseline_us: float | None = None  # the baseline's median in the same rounds
    error: float | None = None  # max |out - ref| / (|ref| + rms(ref))
    detail: str = ""


@dataclasses.dataclass(frozen=True)
class Final:
    """Raw samples of the finalists and the baseline, in microseconds, measured in turn in one run."""

    samples: dict[Any, list[float]]  # config -> samples
    baseline: list[float]
