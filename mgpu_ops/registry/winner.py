"""Kernel or XLA: which of the two a call runs, where its op has a baseline that computes the same.

An entry that was measured has both times, of one run in which the two took turns: kernel times with a cold L2, times of calls
without pause in a sustained entry, or times of a call between GPUs. XLA wins where it was faster by `MEASURED_MARGIN`. The
entry stores the fastest config of the kernel all the same, which a call with `backend="mosaic"` runs.

An entry of another GPU of the family must have it faster by `FAMILY_MARGIN`. Where a problem has no entry, what decides is
- the op's models of both times (`OpSpec.cost` and `OpSpec.baseline_cost`): the kernel runs where it is faster by
  `OpSpec.modelled_margin`, so that in unclear cases a call takes as long as it would without this library, and with the
  objective "sustained" by `OpSpec.sustained_margin`, as what decides there is energy, of which the models know nothing; or,
- where its baseline is not modelled, the entry of a near problem, the one that the config is from or that is the
  nearest: the logarithm of its ratio of times halves with each unit of `OpSpec.distance`, as what it says of this problem.
Where nothing is known of the baseline, the kernel runs. But where the op has a reason to wait (`OpSpec.unmeasured`), models do
not count, and XLA runs until the kernel was measured for this problem, or for a near one for which the reason is the same.

In a program over several devices a baseline that holds all SMs to its end (`OpSpec.baseline_keeps_sms`) must be faster than a
long kernel by `SHARED_MARGIN`: collectives that could run beside it wait. Ours free some SMs earlier (`tile_scheduler.Rounds`).
"""

from __future__ import annotations

import dataclasses
from typing import Literal

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.registry.database import Entry, Objective, to_config, to_problem
from mgpu_ops.registry.spec import Baseline, Config, OpSpec, Problem, baseline_of

MEASURED_MARGIN = 1.01  # times as fast as the kernel XLA must be in an entry's run: less is noise
FAMILY_MARGIN = 1.03  # times as fast it must be on another GPU
NEAR_MARGIN = 1.0  # by a near problem, whichever is faster
SHARED_MARGIN = 1.05  # in a program over several devices, of kernels of at least _LONG
_LONG = 100  # microseconds: beside shorter ones no collective would be done

type Winner = Literal["kernel", "xla"]


@dataclasses.dataclass(frozen=True)
class Times:
    """The time of the kernel and that of the baseline, in microseconds, and how they are known.

    how: "measured" in one run on this GPU, or on another of its "family"; "modelled"; or "near": the kernel's modelled, the
      baseline's in proportion to a near problem's.
    """

    kernel_us: float
    baseline_us: float
    baseline: str
    how: Literal["measured", "family", "modelled", "near"]
    modelled_margin: float = 1.0  # of the op
    shares_sms: bool = False  # whether collectives wait for SMs that the baseline holds

    @property
    def margin(self) -> float:
        """How many times as fast as the kernel the baseline must be to win."""
        margin = {
            "measured": MEASURED_MARGIN,
            "family": FAMILY_MARGIN,
            "near": NEAR_MARGIN,
            "modelled": self.modelled_margin,
        }[self.how]
        return max(margin, SHARED_MARGIN) if self.shares_sms and self.kernel_us >= _LONG else margin

    @property
    def winner(self) -> Winner:
        return "xla" if self.kernel_us >= self.margin * self.baseline_us else "kernel"

    @property
    def rule(self) -> str:
        """ "; the kernel runs where it takes over 14 % less", or when XLA does, where the margin decides; else nothing."""
        ratio = self.kernel_us / self.baseline_us
        if self.margin < 1 and self.margin <= ratio <= 1:
            return f"; the kernel runs where it takes over {100 * (1 - self.margin):.3g} % less"
        if 1 <= ratio < self.margin:
            return f"; {self.baseline} runs where the kernel takes {100 * (self.margin - 1):.3g} % longer"
        return ""

    def __str__(self) -> str:
        how = {"near": "by a near problem", "family": "measured on another GPU"}.get(self.how, self.how)
        return f"kernel {self.kernel_us:.4g} us, {self.baseline} {self.baseline_us:.4g} us, {how}"


def measured(entry: Entry, baseline: Baseline) -> Times | None:
    """The times of an entry for its own problem; None where it was not measured beside this baseline, or that differs."""
    e = entry.evidence
    if e.kind != "measured" or e.baseline_us is None or e.baseline != baseline.name or baseline.differs is not None:
        return None
    return Times(e.median_us, e.baseline_us, baseline.name, "measured")


def expected(
    spec: OpSpec, problem: Problem, config: Config, gpu: Gpu, baseline: Baseline, objective: Objective = "burst"
) -> Times | None:
    """The times by the op's models; None where it does not model its baseline, or not that of this problem."""
    theirs = None if spec.baseline_cost is None else spec.baseline_cost(problem, gpu)
    if theirs is None:
        return None
    ours, margin = spec.cost(problem, config, gpu), spec.modelled_margin
    if objective == "sustained" and spec.sustained_margin is not None:
        margin = spec.sustained_margin
    margin = margin(problem) if callable(margin) else margin
    return Times(ours * 1e6, theirs * 1e6, baseline.name, "modelled", margin)


def expected_from(near: Times, distance: float, kernel_us: float) -> Times:
    """The times of a problem whose kernel takes `kernel_us`, from those of a near problem."""
    ratio = (near.baseline_us / near.kernel_us) ** (0.5**distance)
    return Times(kernel_us, kernel_us * ratio, near.baseline, "near")


def of_entry(entry: Entry, spec: OpSpec) -> Winner | None:
    """What a call of the entry's own problem runs by this entry.

    None where it does not say: it was modelled, so that the models decide, or the op has no such problem or config.
    """
    try:
        problem, config = to_problem(spec, entry.problem), to_config(spec, entry.config)
    except ValueError:
        return None
    if spec.leaves_to_xla(config):
        return "xla"
    if entry.evidence.kind != "measured":
        return None
    times = measured(entry, baseline_of(spec, problem))
    return times.winner if times else "kernel"


def told(entry: Entry, spec: OpSpec) -> str:
    """The same for a table: "kernel", "xla 595.7 us", or "-"."""
    runs, us = of_entry(entry, spec), entry.evidence.baseline_us
    return f"xla {us:.1f} us" if runs == "xla" and us else runs or "-"


def text(entry: Entry, spec: OpSpec) -> str:
    """ "; XLA is faster, and runs: (both times)" where a call of the entry's own problem runs XLA, else nothing."""
    if of_entry(entry, spec) != "xla":
        return ""
    times = measured(entry, baseline_of(spec, to_problem(spec, entry.problem)))
    return f"; XLA is faster, and runs{f': {times}' if times else ''}"
