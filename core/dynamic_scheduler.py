"""Tiles handed out to the blocks of a persistent kernel as these become free: a counter in global memory.

A block's first tile has the block's number. Each further one is what the counter, which begins at 0, gives, plus the number
of blocks. The producer asks while it still loads the tile before, and the answer goes to all warpgroups of the block through
shared memory: the hundreds of cycles that it takes are hidden. Which block gets a tile is left to chance, but each tile is
computed whole, by one block: results do not depend on it.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core import group_scheduler
from mgpu_ops.core.gemm import SLOTS
from mgpu_ops.core.group_scheduler import Groups, GroupTile, OrderedGroups
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.limits import WARPGROUP
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.registers import i32


def scratch_types(consumers: int) -> dict[str, Any]:
    """What a block has for its `DynamicScheduler`: the slots of the answers, and the barriers of their pipeline."""
    return {
        "work_smem": plgpu.SMEM((SLOTS,), jnp.int32),
        "answered": Pipeline.barriers(SLOTS, copies=1, consumers=consumers),
    }


@dataclasses.dataclass(frozen=True)
class DynamicScheduler:
    """The tiles of a block, which takes the next one when it is free.

    first, blocks: the block's number, and of how many.
    counter: an int32 in global memory, 0 when the kernel starts. It counts the tiles that were handed out.
    slots, answers: int32 [SLOTS] in shared memory, and the `Pipeline` of them: one step for each answer.
    most: at least as many as there are tiles; the interpreter's model ends there.
    """

    first: jax.Array
    blocks: int
    counter: Any
    slots: Any
    answers: Pipeline
    most: int

    def for_each_group_tile(
        self,
        groups: Groups | OrderedGroups,
        tiles: Callable[[jax.Array], jax.Array],
        body: Callable[[GroupTile, Any], Any],
        carry: Any,
        asks: bool,
    ) -> tuple[jax.Array, Any]:
        """`group_scheduler.for_each_group_tile` for the tiles of this block.

        Every warpgroup of the block calls it, one of them, which does not count as a consumer, with `asks`.
        """

        def counted(tile: GroupTile, state: Any) -> Any:
            carry, turn = state
            if asks:
                self._ask_for_next(turn)
            return body(tile, carry), turn + 1

        start = carry, jnp.int32(0)
        scheduler = _Answers(self, asks)
        end, (carry, answers) = group_scheduler.for_each_group_tile(groups, tiles, scheduler, counted, start)
        if asks:
            self.answers.drain(answers)
        return end, carry

    def for_each(
        self, count: int, body: Callable[[jax.Array, jax.Array, Any], Any], carry: Any, asks: bool
    ) -> tuple[jax.Array, Any]:
        """carry = body(i, tile, carry) for the i-th of this block's tiles, of `count` tiles in all. How many it had; the carry.

        asks: as in `for_each_group_tile`.
        """
        scheduler = _Answers(self, asks)

        def step(state: Any) -> Any:
            tile, carry, turn = state
            if asks:
                self._ask_for_next(turn)
            carry = body(turn, tile, carry)
            return scheduler.following(tile, (carry, turn + 1)), carry, turn + 1

        start = self.first, carry, jnp.int32(0)
        _, carry, turns = lax.while_loop(lambda state: state[0] < count, step, start)
        if asks:
            self.answers.drain(turns)
        return turns, carry

    def _ask_for_next(self, turn: jax.Array) -> None:
        """Starts the question for the tile after this one, once there is a slot for its answer."""
        self.answers.fill(turn, lambda slot, full: self._ask(turn, slot, full))

    def _ask(self, turn: jax.Array, slot: jax.Array, full: Any) -> None:
        """Starts a question, whose answer will be in a slot; arrives at `full` when it is there."""
        if interpreting():
            self.slots[slot] = self._modelled(turn)
        else:
            _add_one(self.counter, self.slots.at[slot], self.blocks)
        plgpu.barrier_arrive(full)

    def _modelled(self, turn: jax.Array) -> jax.Array:
        """The answer in the interpreter, where blocks run one after the other: the block's tiles are those it `owns`."""

        def found(s: Any) -> Any:
            tile, number = s
            tile = tile + 1
            return tile, number + owns(tile, self.first, self.blocks).astype(jnp.int32)

        start = jnp.int32(self.blocks - 1), jnp.int32(-1)
        tile: jax.Array = lax.while_loop(lambda s: (s[1] < turn) & (s[0] < self.most), found, start)[0]
        return tile


@dataclasses.dataclass(frozen=True)
class _Answers:
    """The `group_scheduler.Scheduler` of a warpgroup: it waits for the producer's question, whose number the carry has."""

    of: DynamicScheduler
    asks: bool

    @property
    def first(self) -> jax.Array:
        return self.of.first

    def following(self, tile: jax.Array, carry: Any) -> jax.Array:
        answers, turn = self.of.answers, carry[1] - 1
        if self.asks:  # which consumers then declare empty
            return self.of.slots[answers.wait(turn)]
        answer = []
        answers.read(turn, lambda slot: answer.append(self.of.slots[slot]))
        return answer[0]


def owns(tile: jax.Array, block: jax.Array, blocks: int) -> jax.Array:
    """Whether a block gets a tile beyond the first `blocks`, in the interpreter: any function of which one block is true.

    It stands for one of all orders in which blocks may become free: one by a hash, without a pattern.
    """
    mixed = (tile.astype(jnp.uint32) * jnp.uint32(2654435761)) >> 7
    return lax.rem(mixed, jnp.uint32(blocks)).astype(jnp.int32) == block


def _add_one(counter: Any, slot: Any, base: int) -> None:
    """slot = base + counter; counter = counter + 1, in one step, by one thread that issues no copies of the producer.

    Other threads go on. Source: PTX ISA, "atom".
    """

    @plgpu.inline_mgpu(arg_types=(plgpu.RefType(), plgpu.RefType()))
    def add(_: Any, counter: Any, slot: Any) -> None:
        thread = arith.remui(mosaic.thread_idx(), i32(WARPGROUP))
        with mosaic.when(arith.cmpi(arith.CmpIPredicate.eq, thread, i32(mosaic.WARP_SIZE))):
            word = ir.IntegerType.get_signless(32)
            place = mosaic.memref_ptr(counter)
            was = mosaic.inline_ptx(
                "atom.relaxed.gpu.global.add.u32 $0, [$1], 1;", place, result_types=word, has_side_effects=True
            )
            answer = arith.addi(was, i32(base))
            mosaic.inline_ptx("st.shared.b32 [$0], $1;", mosaic.memref_ptr(slot), answer, has_side_effects=True)

    add(counter, slot)
