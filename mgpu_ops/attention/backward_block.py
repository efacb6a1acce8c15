"""What the two forms of the dk/dv kernel share: what a thread block has, what its producer loads, the weights, the way out."""

from __future__ import annotations

import bisect
import dataclasses
import functools
import heapq
import math
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.backward_check import in_a_circle
from mgpu_ops.attention.heads import whole
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import along_columns, load_per_column, load_per_row, opaque
from mgpu_ops.attention.mask import BlockOrder, TurnOrder, q_blocks, rows_seeing
from mgpu_ops.attention.operands import BackwardRefs, Operands, OptionalRefs, Position, Stage
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem
from mgpu_ops.attention.score_mask import ScoreMask
from mgpu_ops.core import engine, fragments, regions, semaphore, tile_scheduler
from mgpu_ops.core.dynamic_scheduler import DynamicScheduler
from mgpu_ops.core.gemm import SLOTS
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import store_rows
from mgpu_ops.core.tile_scheduler import Int

CONSUMERS = 2
SQUARE = (ROWS, ROWS)
TILE_COST = 4  # what a kv block takes beside its q blocks, in tiles of 64 rows
# As turns are planned: the time of a step, and how much later the next kv block adds to the same rows. Longer than it takes
# (2.3 us, or 1.1 steps) they were slower.
STEP, TURN = 16, 18
MOST_PLANNED = 1 << 22  # turns


@tile_scheduler.cached
def schedule(p: BackwardProblem, c: BackwardConfig, blocks: int, sms: int, in_rounds: bool = False) -> np.ndarray:
    """Which thread block works on which kv blocks. There may be more than `blocks`: those of several rounds."""
    costs = _steps(p, c) * (c.tile_q // 64) + TILE_COST
    if in_turns(p, c) and _begin_together(p, c, blocks):
        return _in_circles(len(costs), p.batch * p.kv_heads, blocks)
    if in_turns(p, c) and dealt(p):
        order = _dealt_order(p, c, sms)
        table = tile_scheduler.assign_tiles(costs[order % len(costs)].tolist(), blocks)
        table[:, 1:] = order[table[:, 1:]]
        return table
    if in_turns(p, c) and in_a_line(p, c):
        return _falling(costs, p.batch * p.kv_heads, c.section_waves, blocks)
    return tile_scheduler.assign_heads(costs, p.batch * p.kv_heads, waves(c, blocks, sms), blocks, in_rounds)


def _steps(p: BackwardProblem, c: BackwardConfig) -> np.ndarray:
    """How many steps each kv block of a head takes, lengths and segments apart; of the largest part of a group."""
    return q_blocks(p, c.tile_kv, c.tile_q) * math.ceil(p.q_heads / p.kv_heads)


def waves(c: BackwardConfig, blocks: int, sms: int) -> float:
    """The length of a section of heads in tiles of a thread block, where blocks may be more than SMs."""
    return c.section_waves * min(1.0, sms / blocks)


def in_turns(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether thread blocks take turns at adding to dq, in an order that is always the same."""
    return p.deterministic and c.mode == "fused"


def skips_padding(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether no q block visits a kv block that is all padding. Not worth a branch where no entry has a second kv block."""
    return p.lengths and not p.segments and p.head_dim <= 128 and p.kv_tokens > c.tile_kv and not in_turns(p, c)


def dealt(p: BackwardProblem) -> bool:
    """Where thread blocks take turns: whether there are as many as tiles, which the GPU deals in the order of their numbers.

    With lengths and a causal mask, where tiles are so unequal that it is worth it.
    """
    return p.lengths and not p.segments and p.right is not None


def _dealt_order(p: BackwardProblem, c: BackwardConfig, sms: int) -> np.ndarray:
    """The kv blocks of all heads in the order in which they are dealt, in sections of heads.

    Those of a head come in the order of their turns: whoever waits, waits for blocks that were dealt before.
    """
    tiles, heads, section = math.ceil(p.kv_tokens / c.tile_kv), p.batch * p.kv_heads, _dealt_section(p, c, sms)
    order = _order_by_arrays(p, c, sms)[:, None]
    sections = [np.arange(first, min(first + section, heads)) for first in range(0, heads, section)]
    return np.concatenate([(order + some * tiles).ravel() for some in sections])


def _dealt_section(p: BackwardProblem, c: BackwardConfig, sms: int) -> int:
    """How many heads are dealt side by side."""
    return min(math.ceil(c.section_waves * sms * c.tile_kv / p.kv_tokens), p.batch * p.kv_heads)


def _order_by_arrays(p: BackwardProblem, c: BackwardConfig, sms: int) -> np.ndarray:
    """In which order the kv blocks of a head have their turns at a q block, of those that visit it: a permutation of them.

    From later keys to earlier ones, as those that begin at the same time come to a q block. Where kv blocks are dealt, so many
    of a head begin together as there are SMs for each head of a section, and the longest ones begin first.
    """
    numbers = np.arange(math.ceil(p.kv_tokens / c.tile_kv))
    if not dealt(p):
        return numbers[::-1]
    together = math.ceil(sms / _dealt_section(p, c, sms))
    longest_first = np.argsort(-_steps(p, c), kind="stable")
    return np.concatenate([np.sort(longest_first[i : i + together])[::-1] for i in range(0, len(numbers), together)])


def _falling(costs: np.ndarray, heads: int, waves: int, blocks: int) -> np.ndarray:
    """A table as of `tile_scheduler.assign_heads`, in which kv blocks of later keys come first, for which the others wait.

    It is that of a dynamic scheduler which gets sections of heads, in each the kv blocks of the earliest keys first, run
    backwards: all thread blocks end at about the same time, and the longest kv blocks are last.
    """
    section = math.ceil(waves * blocks / len(costs))
    assign = functools.partial(_falling_in, costs=costs, heads=heads, blocks=blocks)
    return tile_scheduler.in_sections(assign, costs, heads, section)[1]


def _falling_in(section: int, costs: np.ndarray, heads: int, blocks: int) -> np.ndarray:
    """`_falling` in sections of so many heads."""
    tiles = len(costs)
    order = [
        head * tiles + tile
        for first in range(0, heads, section)
        for tile in range(tiles)
        for head in range(first, min(first + section, heads))
    ]
    table = tile_scheduler.assign_tiles([float(costs[number % tiles]) for number in order], blocks)
    numbers = np.array(order)
    return tile_scheduler.table_of([numbers[row[1 : 1 + row[0]]][::-1].tolist() for row in table])


def _in_circles(tiles: int, heads: int, blocks: int) -> np.ndarray:
    """A table as of `tile_scheduler.assign_heads`, where the kv blocks of a head take turns in a circle and begin together."""
    together = blocks // tiles * tiles
    assigned = [range(block, heads * tiles, together) for block in range(together)]
    return tile_scheduler.table_of(assigned + [()] * (blocks - together))


def apart(p: BackwardProblem, c: BackwardConfig) -> int:
    """In a circle of turns: how many q blocks apart the kv blocks of a head are."""
    return -(-math.ceil(p.q_tokens / c.tile_q) // math.ceil(p.kv_tokens / c.tile_kv))


def _by_arrays(p: BackwardProblem) -> bool:
    """Whether arrays say which blocks visit each other."""
    return p.lengths or p.segments


def in_a_line(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether kv blocks of a head add to dq from later keys to earlier ones: no other order is known, or it is faster.

    It is where heads share keys: they visit a q block one after the other, so that kv blocks are as many steps apart.
    """
    if in_a_circle(p) or _by_arrays(p):
        return _by_arrays(p)
    numbers = p.batch * p.kv_heads * math.ceil(p.kv_tokens / c.tile_kv) * math.ceil(p.q_tokens / c.tile_q)
    return p.q_heads > p.kv_heads or (p.left, p.right) == (None, None) or numbers > MOST_PLANNED


def _begin_together(p: BackwardProblem, c: BackwardConfig, blocks: int) -> bool:
    """Whether all kv blocks of a head begin at the same time, each at a q block of its own."""
    return in_a_circle(p) and math.ceil(p.kv_tokens / c.tile_kv) <= blocks


def all_visited(p: BackwardProblem) -> bool:
    """Whether some kv block visits each q block, whatever lengths and segments are."""
    return p.left is None and (p.right is None or p.offset + p.right > -ROWS) and not _by_arrays(p)


def turn_numbers(p: BackwardProblem, c: BackwardConfig, optional: OptionalRefs, blocks: int, sms: int) -> Any:
    """int32 [heads, kv blocks, q blocks]: how many kv blocks add to dq of a q block before this one.

    By heads of keys in all batch entries, or one for all of them; by batch entries where arrays say which blocks visit
    each other.
    """
    if not _by_arrays(p):
        return _numbers_planned(p, c, blocks)
    entries = jnp.arange(p.batch, dtype=jnp.int32)[:, None, None]
    number = jnp.arange(math.ceil(p.kv_tokens / c.tile_kv), dtype=jnp.int32)[:, None]
    q_block = jnp.arange(math.ceil(p.q_tokens / c.tile_q), dtype=jnp.int32)
    visited = Operands(p, None, None, None, optional).q_range(entries, number * c.tile_kv, c.tile_kv, c.tile_q)
    visits = ((visited.first <= q_block) & (q_block < visited.end)).astype(jnp.int32)
    order = _order_by_arrays(p, c, sms)
    in_order = visits[:, order]
    return (lax.cumsum(in_order, 1) - in_order)[:, order.argsort()]


@tile_scheduler.cached
def _numbers_planned(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    first, count, rows = *_visited(p, c), np.arange(math.ceil(p.q_tokens / c.tile_q))
    place = rows - first[:, None]
    visits = (place >= 0) & (place < count[:, None])
    if in_a_line(p, c):
        return (visits[None, ::-1].cumsum(1)[:, ::-1] - visits).astype(np.int32)
    if in_a_circle(p):
        start = np.array([first_turn(p, c, number) for number in range(len(first))])
        place = (place - start[:, None]) % len(rows)
    begins = np.zeros((1, len(first))) if _begin_together(p, c, blocks) else plan(p, c, blocks)
    times = begins[:, :, None] + place * (STEP * (p.q_heads // p.kv_heads))
    times = np.where(visits, times, np.iinfo(np.int32).max).swapaxes(1, 2)
    numbers = times.argsort(2, stable=True).argsort(2)
    return np.ascontiguousarray(numbers.swapaxes(1, 2), np.int32)


def _visited(p: BackwardProblem, c: BackwardConfig) -> tuple[np.ndarray, np.ndarray]:
    """The first q block that visits each kv block, and how many do; lengths and segments apart."""
    first = rows_seeing(p, c.tile_kv)[0] // c.tile_q
    return np.minimum(first, math.ceil(p.q_tokens / c.tile_q) - 1), q_blocks(p, c.tile_kv, c.tile_q)


@tile_scheduler.cached
def plan(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    """When each kv block begins, as turns are planned: int32 [heads of keys in all batch entries, kv blocks].

    The time of a step is `STEP`. kv blocks begin as `schedule` has it, but at rows that both visit, any two are a turn apart:
    the second one begins that much later. So in the order of these times nobody waits for a kv block that begins later.
    """
    first, count = (x.tolist() for x in _visited(p, c))
    tiles, heads, step = len(first), p.batch * p.kv_heads, STEP * (p.q_heads // p.kv_heads)
    table = schedule(p, c, blocks, blocks).tolist()
    begins = np.zeros((heads, tiles), np.int32)
    planned: list[list[tuple[int, int]]] = [[] for _ in range(heads)]  # of each head: times of the first row, kv blocks
    idle = [(0, block, 1) for block in range(len(table))]
    while idle:
        time, block, i = heapq.heappop(idle)
        if i > table[block][0]:
            continue
        head, tile = divmod(table[block][i], tiles)
        begin = time + STEP * TILE_COST * 64 // c.tile_q
        if not in_a_circle(p):
            start = step * first[tile]
            begin = start + _apart_from(planned[head], begin - start, tile, first, count)
        begins[head, tile] = begin
        heapq.heappush(idle, (begin + step * count[tile], block, i + 1))
    return begins


def _apart_from(planned: list[tuple[int, int]], time: int, tile: int, first: Sequence[int], count: Sequence[int]) -> int:
    """The earliest time from `time` on a turn apart from those `planned` whose rows it visits too; it joins them."""
    for other, its in planned[bisect.bisect_left(planned, (time - TURN + 1, 0)) :]:
        if other >= time + TURN:
            break
        shared = min(first[tile] + count[tile], first[its] + count[its]) > max(first[tile], first[its])
        if shared and other > time - TURN:
            time = other + TURN
    bisect.insort(planned, (time, tile))
    return time


def first_turn(p: BackwardProblem, c: BackwardConfig, number: Int) -> Int | None:
    """In a circle: the q block that a kv block begins with. The kv blocks of a head begin apart."""
    if not in_a_circle(p):
        return None
    start = number * apart(p, c)
    return start * (start < math.ceil(p.q_tokens / c.tile_q))


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Refs(BackwardRefs):
    """The arguments of the dk/dv kernel: what both backward kernels read, and what this one adds to or writes."""

    # float32 [1, batch, rows, q_heads, head_dim], or with dq_step="next" [1, *backward_round.tiles_shape], or None: another
    # kernel computes it.
    dq: Any
    dbias: Any  # [batch * q_heads, keys, rows] or None
    # int32 for each batch entry, q block and query head: whose turn at dq it is. None: they take no turns.
    turns: Any = None
    numbers: Any = None  # `turn_numbers`
    # int32, the first of it, where kv blocks are handed out as thread blocks become free: `schedule` is their order.
    counter: Any = None


@dataclasses.dataclass(frozen=True)
class KvBlock:
    """A kv block that a thread block keeps: its first key, and the q blocks that visit it, in each head of its group."""

    at: Position
    q_blocks: BlockOrder | TurnOrder
    slot: Int  # of its keys and values in shared memory


@dataclasses.dataclass(frozen=True)
class ScoreTile:
    """A tile of scores, transposed: 64 keys of a kv block by 64 rows of a q block."""

    kv: KvBlock
    key_part: Int  # which 64 keys of the kv block
    stage: jax.Array  # of the q block
    part: int  # which 64 rows of the q block
    q_row: Int  # the q block's first row
    masked: bool

    @property
    def row(self) -> Int:
        """Its first row."""
        return self.q_row + self.part * ROWS

    @property
    def rows(self) -> pl.Slice:
        """Its rows within the q block."""
        return pl.ds(self.part * ROWS, ROWS)


@dataclasses.dataclass(frozen=True)
class ThreadBlock:
    """One thread block: what its warpgroups have in common, and what the producer does."""

    p: BackwardProblem  # with a head of keys for each of `group_splits` parts of a group
    c: BackwardConfig
    x: Operands
    refs: Refs
    dk: Any  # as `rows.store_rows` takes it
    dv: Any
    smem: dict[str, Any]
    q_pipeline: Pipeline  # q blocks, and all that comes with their rows
    kv_pipeline: Pipeline  # kv blocks
    mask: ScoreMask
    blocks: int  # thread blocks
    # Barriers, where thread blocks take turns at dq: it is this one's turn, and the consumers have added to dq.
    turn: tuple[Any, Any] | None = None
    answered: Any = None  # barriers, where kv blocks are handed out

    @staticmethod
    def of(
        p: BackwardProblem, c: BackwardConfig, refs: Refs, outputs: tuple[Any, ...], scratch: Scratch, blocks: int
    ) -> ThreadBlock:
        dk, dv, *_ = outputs
        return ThreadBlock(
            p=p,
            c=c,
            x=Operands(p, refs.q, refs.k, refs.v, refs.optional, c.group_splits),
            refs=refs,
            dk=dk,
            dv=dv,
            smem=scratch.smem,
            q_pipeline=Pipeline(c.max_concurrent_steps, *scratch.barriers["q"]),
            kv_pipeline=Pipeline(c.kv_slots, *scratch.barriers["kv"]),
            mask=ScoreMask(scratch.smem["numbers"], keys_first=True),
            blocks=blocks,
            turn=tuple(scratch.barriers["turn"]) if in_turns(p, c) else None,
            answered=scratch.barriers.get("answered"),
        )

    @property
    def panels(self) -> range:
        """Of a head of queries and keys."""
        return range(whole(self.p.head_dim).panels)

    def members(self, kv: KvBlock) -> Int:
        """How many query heads visit a kv block: those of its part of a group. Parts differ by one where they are not equal."""
        if self.p.q_heads % self.p.kv_heads == 0:
            return self.p.q_heads // self.p.kv_heads
        return self._first_head(kv.at.head + 1) - self._first_head(kv.at.head)

    def query_head(self, kv: KvBlock, member: Int) -> Int:
        """The number of one of these."""
        return self._first_head(kv.at.head) + member

    def _first_head(self, part: Int) -> Int:
        """The first query head of a part, of which `p.kv_heads` share out all query heads."""
        q_heads, parts = self.p.q_heads, self.p.kv_heads
        return part * (q_heads // parts) if q_heads % parts == 0 else lax.div(part * q_heads, jnp.int32(parts))

    @property
    def tiles(self) -> tile_scheduler.AssignedTiles:
        """The kv blocks of this thread block, unless they are handed out."""
        # Opaque: the compiler would compute once what producer and consumers have in common, and spill it for both.
        return tile_scheduler.AssignedTiles(self.refs.schedule, opaque(lax.axis_index("block")))

    def _for_each_tile(
        self, body: Callable[[jax.Array, jax.Array, jax.Array], jax.Array], asks: bool = False
    ) -> tuple[Callable[[], jax.Array], jax.Array]:
        """steps = body(i, number of the i-th kv block of this thread block, steps). How many there were, and the steps.

        asks: by the producer, as in `DynamicScheduler`. The number of kv blocks is for it alone.
        """
        tiles, none = self.tiles, jnp.int32(0)
        if self.refs.counter is None:
            steps = tiles.for_each(body, none)
            return lambda: tiles.count, steps  # read when it is asked for: no register is free for it
        table, answers = tiles.table, Pipeline(SLOTS, *self.answered)
        most = table.shape[0]
        first = jnp.int32(tiles.block)
        scheduler = DynamicScheduler(first, self.blocks, self.refs.counter.at[0], self.smem["work_smem"], answers, most)
        count, steps = scheduler.for_each(most, lambda i, tile, steps: body(i, table[tile, 1], steps), none, asks)
        return lambda: count, steps

    def place(self, name: str, slot: Int) -> Any:
        """Of the keys "k" or values "v" of a slot, in shared memory."""
        return self.smem[name] if self.c.kv_slots == 1 else self.smem[name].at[slot]

    def _slot(self, i: jax.Array) -> Int:
        """Of the i-th kv block of this thread block."""
        return 0 if self.c.kv_slots == 1 else lax.rem(i, jnp.int32(self.c.kv_slots))

    def kv_block(self, i: jax.Array, number: jax.Array) -> KvBlock:
        """The i-th kv block of this thread block, of that number."""
        slot = self._slot(i)
        at = Position.of(number, self.p.kv_tokens, self.p.kv_heads, self.c.tile_kv)
        if in_turns(self.p, self.c):
            blocks = self.x.q_range(at.batch, at.token, self.c.tile_kv, self.c.tile_q)
            start = first_turn(self.p, self.c, lax.div(at.token, jnp.int32(self.c.tile_kv)))
            front = self.p.right is not None
            back = self.p.left is not None or self.p.lengths or self.p.kv_tokens % self.c.tile_kv > 0
            if front and self.p.left is None:
                # Where keys are padding, all blocks have a mask: as the first ones, so that two loops suffice.
                whole = jnp.where(blocks.whole_end < blocks.end, blocks.end, blocks.whole)
                blocks, back = blocks._replace(whole=whole, whole_end=blocks.end), False
            return KvBlock(at, TurnOrder(blocks, start, front=front, back=back), slot)
        order = BlockOrder.of(self.x.q_range(at.batch, at.token, self.c.tile_kv, self.c.tile_q))
        if skips_padding(self.p, self.c):
            order = order.none_where(at.token >= self.x.mask_terms(at.batch).kv_end)
        if self.c.q_order == "apart":
            order = dataclasses.replace(order, start=self._start(at, order))
        return KvBlock(at, order, slot)

    def _start(self, at: Position, order: BlockOrder) -> Int:
        """Where a kv block starts among the q blocks without a mask, so that those of a head add to different rows of dq."""
        if self.p.right is not None:
            return 0  # the first one is another for each kv block
        own, blocks = lax.div(at.token, jnp.int32(self.c.tile_kv)), math.ceil(self.p.kv_tokens / self.c.tile_kv)
        return lax.div(own * order.unmasked, jnp.int32(blocks))

    def number(self, kv: KvBlock) -> jax.Array:
        """Of a kv block, among those of its head."""
        number: jax.Array = lax.div(kv.at.token, jnp.int32(self.c.tile_kv))
        return number

    def turn_number(self, kv: KvBlock, q_block: Int) -> jax.Array:
        """How many kv blocks add to dq of a q block before this one."""
        head: Int = kv.at.batch if _by_arrays(self.p) else kv.at.batch * self.p.kv_heads + kv.at.head
        head = 0 if self.refs.numbers.shape[0] == 1 else head
        number: jax.Array = self.refs.numbers[head, self.number(kv), q_block]
        return number

    # --- The producer

    def producer(self) -> None:
        """Loads each kv block, then its q blocks, each as soon as a stage is empty. Consumers compute meanwhile."""
        count, steps = self._for_each_tile(self._load_kv_block, asks=True)
        # The producer ends when the consumers have declared every stage empty.
        self.q_pipeline.drain(steps)
        self.kv_pipeline.drain(count())

    def _load_kv_block(self, i: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
        kv, x = self.kv_block(i, number), self.x

        def copy(slot: jax.Array, full: Any) -> None:
            at = kv.at
            if self.c.group_splits > 1:
                at = at._replace(head=lax.div(at.head, jnp.int32(self.c.group_splits)))
            x.load_keys(x.k, at, self.place("k", slot), full, whole(self.p.head_dim))
            x.load_keys(x.v, at, self.place("v", slot), full, whole(self.p.head_dim))

        # Waits until dk and dv of the last kv block there have left: they leave from the place of its keys and values.
        self.kv_pipeline.fill(i, copy)
        if isinstance(kv.q_blocks, TurnOrder):
            return self._load_in_turns(kv, kv.q_blocks, step)
        return kv.q_blocks.for_each(functools.partial(self._load_q_block, kv), step, members=self.members(kv))

    def _load_in_turns(self, kv: KvBlock, order: TurnOrder, step: jax.Array) -> jax.Array:
        def load(i: jax.Array, step: jax.Array) -> jax.Array:
            return self._load_q_block(kv, *order.visit(i, self.members(kv)), step, False)

        loaded: jax.Array = lax.fori_loop(0, order.count * self.members(kv), load, step)
        return loaded

    # --- The helper, where thread blocks take turns

    def take_turns(self) -> None:
        """Lets consumers add to dq of each q block when it is the kv block's turn, and gives the turn on when they have.

        A warp that polls, or that waits until sums are in global memory, waits for a trip there. So as many warps as there are
        stages take the q blocks one by one, each those of a stage of its own.
        """
        own = engine.warp()

        def run() -> None:
            self._for_each_tile(functools.partial(self._take_turns, own))

        run() if own is None else pl.when(own < self.c.max_concurrent_steps)(run)

    def _take_turns(self, own: jax.Array | None, i: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
        kv, stages = self.kv_block(i, number), jnp.int32(self.c.max_concurrent_steps)
        order = kv.q_blocks
        assert isinstance(order, TurnOrder)
        visits = order.count * self.members(kv)
        first, by = (
            (jnp.int32(0), jnp.int32(1)) if own is None else (lax.rem(own + stages - lax.rem(step, stages), stages), stages)
        )

        def visit(j: jax.Array, _: None) -> None:
            i = first + j * by
            stage = lax.rem(step + i, stages) if own is None else own
            self._take_turn(kv, stage, *order.visit(i, self.members(kv)))

        lax.fori_loop(0, lax.div(visits - first + by - 1, by), visit, None)
        return step + visits

    def _take_turn(self, kv: KvBlock, stage: jax.Array, member: Int, q_block: Int) -> None:
        assert self.turn is not None
        own, added = self.turn_number(kv, q_block), self._added(kv, member, q_block)
        tile = self.dq_tile(kv, self.query_head(kv, member), q_block * (self.c.tile_q // ROWS))
        self.smem["turns"][stage] = 2 * tile + (own == 0).astype(jnp.int32)
        semaphore.wait(added, own)
        engine.arrive_as_warp(self.turn[0].at[stage])
        plgpu.barrier_wait(self.turn[1].at[stage])
        semaphore.release(added, own + 1)

    def _added(self, kv: KvBlock, member: Int, q_block: Int) -> Any:
        """How many kv blocks have added to dq of a q block, in global memory."""
        blocks = self.refs.lse.shape[2] // self.c.tile_q
        head = self.query_head(kv, member)
        return self.refs.turns.at[pl.ds((kv.at.batch * blocks + q_block) * self.p.q_heads + head, 1)]

    def _load_q_block(self, kv: KvBlock, member: Int, block: Int, step: jax.Array, masked: bool) -> jax.Array:
        del masked
        row = block * self.c.tile_q
        at = Position(kv.at.batch, self.query_head(kv, member), row)
        x, refs, smem = self.x, self.refs, self.smem

        def copy(stage: jax.Array, full: Any) -> None:
            x.load_block(x.q, "q", at, smem["q"].at[stage], full)
            x.load_block(refs.out_grad, "q", at, smem["do"].at[stage], full)
            for name, ref in (("lse", refs.lse), ("delta", refs.delta)):
                values = ref.at[at.batch, at.head, pl.ds(at.token, self.c.tile_q)]
                engine.copy_gmem_to_smem(values, smem[name].at[stage], full)
            x.load_optional("q", at._replace(token=kv.at.token), at.token, Stage(smem, stage, full))

        self.q_pipeline.fill(step, copy)
        return step + 1

    # --- What consumers do

    def for_each_kv_block(self, body: Callable[[KvBlock, Any], Any]) -> None:
        """body(kv block, steps done so far) -> steps done, once the block's keys and values are there; it releases them."""

        def step(i: jax.Array, number: jax.Array, done: jax.Array) -> jax.Array:
            plgpu.barrier_wait(self.kv_pipeline.full.at[self._barrier(self._slot(i))])
            return body(self.kv_block(i, number), done)

        self._for_each_tile(step)
        plgpu.wait_smem_to_gmem(0)

    def for_each_q_block(self, kv: KvBlock, step: Callable[..., Any], done: jax.Array) -> jax.Array:
        """step(kv block, member of the group, q block, steps done, masked) -> steps done, for all that visit a kv block."""
        masks = self.p.masks(self.c.tile_kv)
        assert isinstance(kv.q_blocks, BlockOrder)  # with dq_step="same" there are no turns
        return kv.q_blocks.for_each(functools.partial(step, kv), done, masks=masks, members=self.members(kv))

    def release_keys(self, kv: KvBlock) -> None:
        """Waits until dk and dv have left the place of the keys and values, and declares it empty."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        engine.barrier_arrive(self.kv_pipeline.empty.at[self._barrier(kv.slot)])

    def _barrier(self, slot: Int) -> Int:
        """The number of a slot's barriers."""
        return opaque_zero() if self.c.kv_slots == 1 else slot

    @regions.region("softmax")
    def weights(self, tile: ScoreTile, s: jax.Array, wg: Int) -> tuple[jax.Array, jax.Array | None]:
        """The weights 2^(scores - lse) from products of keys and queries, 0 where not visible.

        Second, what to multiply the scores' gradient by for a soft cap, or None.
        """
        p, x, smem = self.p, self.x, self.smem
        at, row, own = tile.kv.at, tile.row, tile.key_part * ROWS
        first_key = at.token + own
        lse = load_per_column(smem["lse"].at[tile.stage, tile.rows])
        s, slope = x.scores(s, smem["bias"].at[tile.stage, pl.ds(own, ROWS), tile.rows] if p.bias != "none" else None)
        weights = jnp.exp2(s - along_columns(lse, SQUARE))
        if x.inputs.segments is not None:
            q_ids = load_per_column(smem["segments"].at[tile.stage, tile.rows])
            kv_ids = load_per_row(x.inputs.segments[1].at[at.batch, pl.ds(first_key, ROWS)])
            weights = self.mask.hide_by_segment(weights, 0.0, kv_ids, q_ids)
        if tile.masked:
            tokens = self.mask.tokens(SQUARE, first_key, self.mask.column_numbers(wg) + row)
            weights = self.mask.hide_by_position(weights, 0.0, x.mask_terms(at.batch), tokens)
        return weights, slope

    def delta(self, tile: ScoreTile) -> jax.Array:
        """delta of the tile's rows."""
        return along_columns(load_per_column(self.smem["delta"].at[tile.stage, tile.rows]), SQUARE)

    # --- The way out

    def tile_in_turn(self, stage: jax.Array) -> tuple[jax.Array, jax.Array]:
        """`dq_tile` of the first rows of a stage's q block; whether (1 or 0) this adds first: it stores, as dq is not zeros.

        Once it is the thread block's turn. The helper knows both, which takes registers that consumers do not have.
        """
        word = self.smem["turns"][stage]
        return lax.shift_right_logical(word, 1), word & 1

    def dq_tile(self, kv: KvBlock, head: Int, rows: Int) -> jax.Array:
        """Which tile of dq, in `backward_round.tiles_shape`, some 64 rows of a head are."""
        tile: jax.Array = (kv.at.batch * (self.refs.lse.shape[2] // ROWS) + rows) * self.p.q_heads + head
        return tile

    def add_dq(self, kv: KvBlock, src: Any, at: Position, column: Int) -> None:
        """Starts adding `src` [64, columns] in shared memory to the gradient of the 64 query rows from `at` on."""
        dst = self.refs.dq.at[self.dq_part(kv), at.batch, pl.ds(at.token, ROWS), at.head, pl.ds(column, src.shape[1])]
        engine.add_tile(src, dst)

    def dq_part(self, kv: KvBlock) -> Int:
        """Which array of dq a kv block adds to. The interpreter cannot add: each kv block has one of its own there."""
        return lax.div(kv.at.token, jnp.int32(self.c.tile_kv)) if interpreting() else 0

    @regions.region("store")
    def store(self, ref: Any, at: Position, staging: Any, values: jax.Array) -> None:
        """Starts the copies of dk or dv of the 64 keys from `at` on, through `staging` [panels, 64, panel] or [64, columns].

        Where staging has fewer panels than values, they take turns.
        """
        p, start, zero = self.p, at.batch * self.p.kv_tokens, opaque_zero()
        d = values.shape[1]
        places = staging.shape[0] if len(staging.shape) == 3 else 1
        width = d if len(staging.shape) == 2 else staging.shape[2]
        for panel in range(d // width):
            if panel >= places:
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
            place = staging if len(staging.shape) == 2 else staging.at[zero + panel % places]
            part = values[:, panel * width : (panel + 1) * width].astype(p.dtype)
            if self.c.dq_step == "next":  # no register is free
                fragments.write_tile(part, place)
            else:
                place[...] = part
            plgpu.commit_smem()  # TMA sees what was written
            column = at.head * d + panel * width
            store_rows(place, ref, start + at.token, start + p.kv_tokens, column)


def opaque_zero() -> jax.Array:
    """0, but the compiler does not know that: see `layouts.opaque`."""
    return opaque(jnp.int32(0))
