"""Warpgroups of a thread block that take turns, by named barriers: one of a block's 16 for each."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.interpreter import interpreting

_FIRST = 8  # barrier: Mosaic uses 0 for the thread block and 1 to 5 for the warpgroups
_WARPGROUP = 128  # threads


@dataclasses.dataclass(frozen=True)
class Turns:
    """Of warpgroups 0 to `warpgroups` - 1, in this order, again and again. Warpgroup 0 begins.

    All call `start` once, and then `wait` and `release` in pairs, each equally often. Interpreted, nobody waits: turns change
    when something is done, never what.
    """

    warpgroups: int  # 2 or 3

    def start(self) -> None:
        """Gives the first turn to warpgroup 0."""
        last = self.warpgroups - 1
        self._run(f"{{ .reg .pred p; setp.eq.u32 p, $0, {last}; @p bar.arrive {_FIRST}, {2 * _WARPGROUP}; }}", lambda wg: wg)

    def wait(self) -> None:
        """Waits for this warpgroup's turn: until its threads and those that released it arrived (PTX ISA, "bar.sync")."""
        self._run(f"bar.sync $0, {2 * _WARPGROUP};", lambda wg: arith.addi(wg, mosaic.c(_FIRST, wg.type)))

    def release(self) -> None:
        """Gives the turn to the next warpgroup, without waiting for it."""

        def following(wg: Any) -> Any:
            first, after = mosaic.c(_FIRST, wg.type), arith.addi(wg, mosaic.c(_FIRST + 1, wg.type))
            last = arith.cmpi(arith.CmpIPredicate.eq, wg, mosaic.c(self.warpgroups - 1, wg.type))
            return arith.select(last, first, after)

        self._run(f"bar.arrive $0, {2 * _WARPGROUP};", following)

    def _run(self, ptx: str, operand: Callable[[Any], Any]) -> None:
        """PTX with one operand, made of the warpgroup's number."""
        if interpreting():
            return

        @plgpu.inline_mgpu()
        def run(_: Any) -> None:
            mosaic.inline_ptx(ptx, operand(mosaic.warpgroup_idx(sync=True)), has_side_effects=True)

        run()
