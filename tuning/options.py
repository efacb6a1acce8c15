"""How a problem is tuned: `TuneOptions`."""

from __future__ import annotations

import dataclasses
import math
from typing import Any, Literal

SAMPLERS = ("tpe", "gp", "random", "brute")
OBJECTIVES = ("burst", "sustained")
TRIALS = 32


@dataclasses.dataclass(frozen=True)
class TuneOptions:
    """How to search for a problem's fastest config, and how long.

    Attributes:
      trials: candidates given to devices, failed ones and those that the study holds already included.
      budget: seconds in all, from the call to the entry. The default config is tried whatever it is.
      target: the search ends once a candidate has this share of the baseline's speed: 0.98 is 2 % slower than XLA, say, 1.1 is
        10 % faster. None: no target.
      seed: of the inputs and of the search; with the same seed and times, the same trials.
      sampler: one of `SAMPLERS`. "brute" is no search: every legal config in order, the default first.
      sampler_only: the sampler by itself, without seeds, model and local search. `replay` compares the search with it.
      objective: "burst": the fastest in single calls, each with a cold L2. "sustained": the fastest where calls follow each
        other without pause, at the clock that the power cap leaves. The search is by bursts in either case; among its best,
        turns decide.
      turn: seconds for which each of them then runs, three times.
      neighbours: configs that were fast for near problems, the nearest first; None: those of the database.
    """

    trials: int = TRIALS
    budget: float = math.inf
    target: float | None = None
    seed: int = 0
    sampler: str = "tpe"
    sampler_only: bool = False
    neighbours: tuple[Any, ...] | None = None
    objective: Literal["burst", "sustained"] = "burst"
    turn: float = 1.0
