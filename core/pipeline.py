"""A ring of shared-memory slots between one warpgroup that copies and others that compute."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine


@dataclasses.dataclass(frozen=True)
class Ring:
    """`slots` slots that are filled and read in turn, one a step. Both sides count steps from 0 over the whole kernel, so
    that copying runs ahead over the ends of output tiles.

    `barriers` is what goes into a kernel's `scratch_types`; the kernel makes the Ring from the two refs it receives.
    """

    slots: int
    filled: Any
    released: Any

    def __post_init__(self) -> None:
        engine.is_ring(self.filled, self.released)

    @staticmethod
    def barriers(slots: int, *, copies: int, readers: int) -> dict[str, Any]:
        """`copies` arrive when a slot is filled, `readers` warpgroups when it may be overwritten."""
        return {
            "filled": plgpu.Barrier(num_arrivals=copies, num_barriers=slots),
            "released": plgpu.Barrier(num_arrivals=readers, num_barriers=slots),
        }

    def fill(self, step: Any, copy: Callable[[Any, Any], None]) -> None:
        """Waits until the slot of `step` is free, then starts `copy(slot, barrier)`."""
        slot = lax.rem(step, jnp.int32(self.slots))

        @pl.when(step >= self.slots)
        def _() -> None:
            plgpu.barrier_wait(self.released.at[slot])

        copy(slot, self.filled.at[slot])

    def drain(self, steps: Any) -> None:
        """Waits until all of `steps` steps were read: the copying warpgroup's last act."""
        for slot in range(self.slots):

            @pl.when(steps > slot)
            def _(slot: int = slot) -> None:
                plgpu.barrier_wait(self.released.at[slot])

    def read(self, step: Any, compute: Callable[[Any], None]) -> None:
        """Waits until the slot of `step` is filled, runs `compute(slot)`, which must be done with it, and releases it."""
        slot = lax.rem(step, jnp.int32(self.slots))
        plgpu.barrier_wait(self.filled.at[slot])
        compute(slot)
        engine.barrier_arrive(self.released.at[slot])
