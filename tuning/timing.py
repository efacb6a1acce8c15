"""How calls of an op are timed: alone, or several in a row as one.

The GPUs of a collective start apart, by more than a small collective takes. Of a row of calls, each of which waits for the one
before, only the first is blurred by that.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from dataclasses import dataclass
from typing import Any

import jax

from mgpu_ops.collectives.problem import KINDS
from mgpu_ops.collectives.schedules import Kind

_IN_A_ROW = 16  # calls of a collective


@dataclass(frozen=True)
class Timing:
    """The program that is timed in place of one call.

    calls: in a row, one at a time.
    following: following(out, *arrays) gives the arrays of a call that must wait for `out`, the result of the one before.
      None: the same arrays again.
    """

    calls: int = 1
    following: Callable[..., tuple] | None = None

    def program(self, run: Callable[..., Any]) -> Callable[..., Any]:
        """A function that makes the calls. It returns the result of one call, and of several the first and the last."""
        if self.calls == 1:
            return run
        once = jax.jit(run)  # so that JAX lowers it once

        def in_a_row(*arrays: Any) -> tuple[Any, Any]:
            first = last = once(*arrays)
            for _ in range(self.calls - 1):
                arrays = self.following(last, *arrays) if self.following else arrays
                last = once(*arrays)
            return first, last

        return in_a_row

    def result(self, returned: Any) -> Any:
        """The result of one call, from what `program` returned."""
        return returned if self.calls == 1 else returned[0]


def timing_of(op: str) -> Timing:
    """How calls of the op of that name are timed."""
    return _TIMINGS.get(op, _ONE_CALL)


def _following(kind: Kind, out: jax.Array, x: jax.Array) -> tuple[jax.Array]:
    """`out` itself, where it is of the shape of x; else x with some elements of `out`."""
    if kind == "all_reduce":
        return (out,)
    some = min(out.shape[1], x.shape[1], 8)
    return (x.at[:, :some].set(out[:, :some]),)


_ONE_CALL = Timing()
_TIMINGS: dict[str, Timing] = {kind: Timing(_IN_A_ROW, functools.partial(_following, kind)) for kind in KINDS}
