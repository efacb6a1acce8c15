"""What the two forms of the dk/dv kernel share: what a thread block has, what its producer loads, the weights, the way out."""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import whole
from mgpu_ops.attention.launch import Scratch
from mgpu_ops.attention.layouts import along_columns, load_per_column, load_per_row, opaque
from mgpu_ops.attention.mask import BlockOrder, TurnOrder, q_blocks
from mgpu_ops.attention.operands import BackwardRefs, Operands, OptionalRefs, Position, Stage
from mgpu_ops.attention.problem import ROWS, BackwardConfig, BackwardProblem, in_a_circle
from mgpu_ops.attention.score_mask import ScoreMask
from mgpu_ops.core import engine, regions, tile_scheduler
from mgpu_ops.core.interpreter import interpreting
from mgpu_ops.core.pipeline import Pipeline
from mgpu_ops.core.rows import store_rows
from mgpu_ops.core.tile_scheduler import Int

CONSUMERS = 2
SQUARE = (ROWS, ROWS)
TILE_COST = 4  # what a kv block takes beside its q blocks, in tiles of 64 rows


@tile_scheduler.cached
def schedule(p: BackwardProblem, c: BackwardConfig, blocks: int) -> np.ndarray:
    """Which thread block works on which kv blocks."""
    steps = q_blocks(p, c.tile_kv, c.tile_q) * (p.q_heads // p.kv_heads) * (c.tile_q // 64)
    if in_turns(p, c) and in_a_circle(p):
        return _in_circles(len(steps), p.batch * p.kv_heads, blocks)
    if in_turns(p, c):
        return _falling(steps + TILE_COST, p.batch * p.kv_heads, c.section_waves, blocks)
    return tile_scheduler.assign_heads(steps + TILE_COST, p.batch * p.kv_heads, c.section_waves, blocks)


def in_turns(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether thread blocks take turns at adding to dq, in an order that is always the same."""
    return p.deterministic and c.mode == "fused"


def _falling(costs: np.ndarray, heads: int, waves: int, blocks: int) -> np.ndarray:
    """A table as of `tile_scheduler.assign_heads`, in which kv blocks of later keys come first, for which the others wait.

    It is that of a dynamic scheduler which gets sections of heads, in each the kv blocks of the earliest keys first, run
    backwards: all thread blocks end at about the same time, and the longest kv blocks are last.
    """
    tiles = len(costs)
    section = math.ceil(waves * blocks / tiles)
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


def stores_first(p: BackwardProblem, c: BackwardConfig) -> bool:
    """Whether the first kv block that has a turn at a tile of dq stores, so that dq need not be zeros. Each tile has one."""
    return in_turns(p, c) and p.left is None and (p.right is None or p.offset + p.right > -ROWS) and not _by_arrays(p)


def turn_order(p: BackwardProblem, c: BackwardConfig, optional: OptionalRefs, rows: int) -> tuple[jax.Array, jax.Array | None]:
    """Which kv block is the first to add to dq of each batch entry, q block and query head, int32, for `rows` padded rows.

    And for each batch entry, q block and kv block, which one is the next, where arrays say which blocks visit each other.
    """
    q_block = jnp.arange(rows // c.tile_q, dtype=jnp.int32)
    numbers = jnp.arange(math.ceil(p.kv_tokens / c.tile_kv), dtype=jnp.int32)
    following = None
    if in_a_circle(p):
        first = (q_block // apart(p, c))[None]
    else:  # from the last one that visits it to the first one
        entries = jnp.arange(p.batch, dtype=jnp.int32)[:, None]
        blocks = Operands(p, None, None, None, optional).q_range(entries, numbers[None] * c.tile_kv, c.tile_kv, c.tile_q)
        begin, end = (jnp.broadcast_to(x, (p.batch, len(numbers)))[:, None, :] for x in (blocks.first, blocks.end))
        visits = jnp.where((begin <= q_block[:, None]) & (q_block[:, None] < end), numbers, -1)
        first = visits.max(2)
        if _by_arrays(p):
            following = jnp.pad(lax.cummax(visits, 2), ((0, 0), (0, 0), (1, 0)), constant_values=-1)[:, :, :-1]
    return jnp.broadcast_to(first[:, :, None], (p.batch, len(q_block), p.q_heads)).reshape(-1), following


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
    following: Any = None  # `turn_order`'s second


@dataclasses.dataclass(frozen=True)
class KvBlock:
    """A kv block that a thread block keeps: its first key, and the q blocks that visit it, in each head of its group."""

    at: Position
    q_blocks: BlockOrder | TurnOrder


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

    p: BackwardProblem
    c: BackwardConfig
    x: Operands
    refs: Refs
    dk: Any  # as `rows.store_rows` takes it
    dv: Any
    smem: dict[str, Any]
    q_pipeline: Pipeline  # q blocks, and all that comes with their rows
    kv_pipeline: Pipeline  # of one stage: the kv block
    mask: ScoreMask
    # Barriers, where thread blocks take turns at dq: it is this one's turn, and the consumers have added to dq.
    turn: tuple[Any, Any] | None = None

    @staticmethod
    def of(p: BackwardProblem, c: BackwardConfig, refs: Refs, outputs: tuple[Any, ...], scratch: Scratch) -> ThreadBlock:
        dk, dv, *_ = outputs
        return ThreadBlock(
            p=p,
            c=c,
            x=Operands(p, refs.q, refs.k, refs.v, refs.optional),
            refs=refs,
            dk=dk,
            dv=dv,
            smem=scratch.smem,
            q_pipeline=Pipeline(c.max_concurrent_steps, *scratch.barriers["q"]),
            kv_pipeline=Pipeline(1, *scratch.barriers["kv"]),
            mask=ScoreMask(scratch.smem["numbers"], keys_first=True),
            turn=tuple(scratch.barriers["turn"]) if in_turns(p, c) else None,
        )

    @property
    def panels(self) -> range:
        """Of a head of queries and keys."""
        return range(whole(self.p.head_dim).panels)

    @property
    def group(self) -> int:
        """How many query heads share a kv head."""
        return self.p.q_heads // self.p.kv_heads

    @property
    def tiles(self) -> tile_scheduler.AssignedTiles:
        """The kv blocks of this thread block."""
        # Opaque: the compiler would compute once what producer and consumers have in common, and spill it for both.
        return tile_scheduler.AssignedTiles(self.refs.schedule, opaque(lax.axis_index("block")))

    def kv_block(self, number: jax.Array) -> KvBlock:
        at = Position.of(number, self.p.kv_tokens, self.p.kv_heads, self.c.tile_kv)
        if in_turns(self.p, self.c):
            blocks = self.x.q_range(at.batch, at.token, self.c.tile_kv, self.c.tile_q)
            start = self._first_turn(at) if in_a_circle(self.p) else None
            back = self.p.left is not None or self.p.lengths or self.p.kv_tokens % self.c.tile_kv > 0
            return KvBlock(at, TurnOrder(blocks, start, front=self.p.right is not None, back=back))
        order = BlockOrder.of(self.x.q_range(at.batch, at.token, self.c.tile_kv, self.c.tile_q))
        if self.c.q_order == "apart":
            order = dataclasses.replace(order, start=self._start(at, order))
        return KvBlock(at, order)

    def _start(self, at: Position, order: BlockOrder) -> Int:
        """Where a kv block starts among the q blocks without a mask, so that those of a head add to different rows of dq."""
        if self.p.right is not None:
            return 0  # the first one is another for each kv block
        own, blocks = lax.div(at.token, jnp.int32(self.c.tile_kv)), math.ceil(self.p.kv_tokens / self.c.tile_kv)
        return lax.div(own * order.unmasked, jnp.int32(blocks))

    def _first_turn(self, at: Position) -> Int:
        """Without a mask: the q block that a kv block begins with. The kv blocks of a head begin apart, in a circle."""
        start = lax.div(at.token, jnp.int32(self.c.tile_kv)) * apart(self.p, self.c)
        return jnp.where(start < math.ceil(self.p.q_tokens / self.c.tile_q), start, 0)

    def number(self, kv: KvBlock) -> jax.Array:
        """Of a kv block, among those of its head."""
        number: jax.Array = lax.div(kv.at.token, jnp.int32(self.c.tile_kv))
        return number

    def following(self, kv: KvBlock, q_block: Int) -> Int:
        """The kv block that adds to dq of a q block after `kv`: one of earlier keys, in a circle."""
        own = self.number(kv)
        if self.refs.following is not None:
            return self.refs.following[kv.at.batch, q_block, own]
        return jnp.where(own == 0, math.ceil(self.p.kv_tokens / self.c.tile_kv), own) - 1

    def is_first(self, kv: KvBlock, q_block: Int) -> jax.Array | None:
        """Whether (1 or 0) a kv block is the first that adds to dq of a q block: it stores. None: dq is zeros before."""
        if not stores_first(self.p, self.c):
            return None
        own = self.number(kv)
        if in_a_circle(self.p):
            return (own == lax.div(q_block, jnp.int32(apart(self.p, self.c)))).astype(jnp.int32)
        following = self.x.q_range(kv.at.batch, kv.at.token + self.c.tile_kv, self.c.tile_kv, self.c.tile_q).first
        last = own == math.ceil(self.p.kv_tokens / self.c.tile_kv) - 1
        return (last | (q_block < following)).astype(jnp.int32)

    # --- The producer

    def producer(self) -> None:
        """Loads each kv block, then its q blocks, each as soon as a stage is empty. Consumers compute meanwhile."""
        tiles = self.tiles
        steps = tiles.for_each(self._load_kv_block, jnp.int32(0))
        # The producer ends when the consumers have declared every stage empty.
        self.q_pipeline.drain(steps)
        self.kv_pipeline.drain(tiles.count)

    def _load_kv_block(self, i: jax.Array, number: jax.Array, step: jax.Array) -> jax.Array:
        kv, x, smem = self.kv_block(number), self.x, self.smem

        def copy(stage: jax.Array, full: Any) -> None:
            del stage
            x.load_keys(x.k, kv.at, smem["k"], full, whole(self.p.head_dim))
            x.load_keys(x.v, kv.at, smem["v"], full, whole(self.p.head_dim))

        # Waits until dk and dv of the last kv block have left: they leave from the place of its keys and values.
        self.kv_pipeline.fill(i, copy)
        if isinstance(kv.q_blocks, TurnOrder):
            return self._load_in_turns(kv, kv.q_blocks, step)
        return kv.q_blocks.for_each(functools.partial(self._load_q_block, kv), step, members=self.group)

    def _load_in_turns(self, kv: KvBlock, order: TurnOrder, step: jax.Array) -> jax.Array:
        """Loads the q blocks that visit a kv block, and lets consumers add to dq when it is this kv block's turn.

        Here, as who polls or fences waits for a trip to memory, and a consumer would have nothing to do meanwhile. The turn at
        a q block is looked for while consumers are at their next step but one to it, so many steps after its load.
        """
        visits, behind = order.count * self.group, self.c.max_concurrent_steps - 1

        def load(i: jax.Array) -> None:
            self._load_q_block(kv, *order.visit(i, self.group), step + i, False)

        def visit(i: jax.Array, _: None) -> None:
            pl.when(i >= behind)(lambda: self._await_turn(kv, *order.visit(i - behind, self.group)))
            pl.when(i < visits)(lambda: load(i))
            pl.when(i >= behind)(lambda: self._give_turn(kv, *order.visit(i - behind, self.group)))

        lax.fori_loop(0, visits + behind, visit, None)
        return step + visits

    def _await_turn(self, kv: KvBlock, member: Int, q_block: Int) -> None:
        """Waits until it is this kv block's turn at dq of a q block, and tells the consumers."""
        assert self.turn is not None
        engine.await_count(self._turn_at(kv, member, q_block), self.number(kv))
        engine.barrier_arrive(self.turn[0])

    def _give_turn(self, kv: KvBlock, member: Int, q_block: Int) -> None:
        """Gives the turn on when the consumers have added to dq."""
        assert self.turn is not None
        following = self.following(kv, q_block)
        plgpu.barrier_wait(self.turn[1])
        engine.set_count(self._turn_at(kv, member, q_block), following)

    def _turn_at(self, kv: KvBlock, member: Int, q_block: Int) -> Any:
        """Whose turn it is at dq of a q block, in global memory."""
        blocks = self.refs.lse.shape[2] // self.c.tile_q
        head = kv.at.head * self.group + member
        return self.refs.turns.at[pl.ds((kv.at.batch * blocks + q_block) * self.p.q_heads + head, 1)]

    def _load_q_block(self, kv: KvBlock, member: Int, block: Int, step: jax.Array, masked: bool) -> jax.Array:
        del masked
        row = block * self.c.tile_q
        at = Position(kv.at.batch, kv.at.head * self.group + member, row)
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
            del i
            plgpu.barrier_wait(self.kv_pipeline.full.at[opaque_zero()])
            return body(self.kv_block(number), done)

        self.tiles.for_each(step, jnp.int32(0))
        plgpu.wait_smem_to_gmem(0)

    def for_each_q_block(self, kv: KvBlock, step: Callable[..., Any], done: jax.Array) -> jax.Array:
        """step(kv block, member of the group, q block, steps done, masked) -> steps done, for all that visit a kv block."""
        masks = self.p.masks(self.c.tile_kv)
        assert isinstance(kv.q_blocks, BlockOrder)  # with dq_step="same" there are no turns
        return kv.q_blocks.for_each(functools.partial(step, kv), done, masks=masks, members=self.group)

    def release_keys(self) -> None:
        """Waits until dk and dv have left the place of the keys and values, and declares it empty."""
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        engine.barrier_arrive(self.kv_pipeline.empty.at[opaque_zero()])

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

    def wait_for_turn(self) -> None:
        """A consumer waits until it may add to dq of a q block, where thread blocks take turns."""
        if self.turn is not None:
            plgpu.barrier_wait(self.turn[0])

    def end_turn(self) -> None:
        """A consumer tells that it has."""
        if self.turn is not None:
            engine.barrier_arrive(self.turn[1])

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
                engine.write_tile(part, place)
            else:
                place[...] = part
            plgpu.commit_smem()  # TMA sees what was written
            column = at.head * d + panel * width
            store_rows(place, ref, start + at.token, start + p.kv_tokens, column)


def opaque_zero() -> jax.Array:
    """0, but the compiler does not know that: see `layouts.opaque`."""
    return opaque(jnp.int32(0))
