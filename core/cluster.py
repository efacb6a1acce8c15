"""What the thread blocks of a cluster send each other through distributed shared memory: sums, and columns of their tiles.

Both are scratch types of `engine.kernel`. `ClusterSum` sends with Mosaic's own `async_store_smem`, which arrives at the
receiver's barrier with every tile. `ClusterColumns` does it by hand: a receiver declares once how many bytes will come. JAX's
interpreter has no distributed shared memory: there everything goes through an array in global memory.
"""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith

from mgpu_ops.core.block_start import cluster_rank
from mgpu_ops.core.engine import ScratchType, operand_transforms
from mgpu_ops.core.limits import columns_of_a_block
from mgpu_ops.core.registers import i32, laid_out, row_and_column

_FLOAT = 4  # bytes
_BARRIER_WORDS = 2  # 32-bit words of an mbarrier


@dataclasses.dataclass(frozen=True)
class ClusterSum(ScratchType):
    """Scratch type: adds up float32 values of `shape`, of each of `warpgroups` warpgroups, over the `blocks` of a cluster.

    A kernel receives a handle, `_ClusterSum`. The first block along the cluster's axis `axis` gets the sum; the others send it
    their values through distributed shared memory. Source: PTX ISA, "st.async".
    """

    shape: tuple[int, int]
    warpgroups: int
    blocks: int
    axis: str

    def inbox(self) -> tuple[int, ...]:
        """The shape of what the first block receives: from each other block, from each of its warpgroups."""
        return (self.blocks - 1, self.warpgroups, *self.shape)

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _ClusterSum:
        return _SimulatedClusterSum(self, received, *scratch) if interpret else _ClusterSum(self, *scratch)

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, the inbox is in global memory."""
        all_blocks = plgpu.ClusterBarrier(collective_axes=(self.axis,), num_arrivals=self.warpgroups)
        if interpret:
            return [all_blocks, all_blocks]
        inbox = plgpu.SMEM(self.inbox(), jnp.float32, transforms=operand_transforms(self.shape[1], jnp.float32))
        return [inbox, plgpu.Barrier(num_arrivals=self.blocks - 1, num_barriers=self.warpgroups), all_blocks]


@dataclasses.dataclass(frozen=True)
class ClusterShares(ScratchType):
    """Scratch type: as `ClusterSum`, of `tiles` float32 tiles of `shape` at once, of which each block gets the sums of a share.

    `tiles` is a multiple of `blocks`. Block b gets tiles b, b + blocks, ...: all blocks add up and store at the same time.
    """

    shape: tuple[int, int]
    tiles: int
    warpgroups: int
    blocks: int
    axis: str

    def received(self) -> tuple[int, ...]:
        """The shape of what a block receives: of each of its tiles, from each other block, from each of its warpgroups."""
        return (self.tiles // self.blocks, self.blocks - 1, self.warpgroups, *self.shape)

    def inbox(self) -> tuple[int, ...]:
        """What the blocks of a cluster receive."""
        return (self.blocks, *self.received())

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _ClusterShares:
        return _SimulatedClusterShares(self, received, *scratch) if interpret else _ClusterShares(self, *scratch)

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, the inboxes are in global memory."""
        all_blocks = plgpu.ClusterBarrier(collective_axes=(self.axis,), num_arrivals=self.warpgroups)
        if interpret:
            return [all_blocks, all_blocks]
        inbox = plgpu.SMEM(self.received(), jnp.float32, transforms=operand_transforms(self.shape[1], jnp.float32))
        arrivals = self.tiles // self.blocks * (self.blocks - 1)
        return [inbox, plgpu.Barrier(num_arrivals=arrivals, num_barriers=self.warpgroups), all_blocks]


@dataclasses.dataclass(frozen=True)
class ClusterColumns(ScratchType):
    """Scratch type: the blocks of a cluster share out the columns of their tiles, once in a kernel of one warpgroup.

    Every block has a float32 tile [64, columns], of which the first `rows` rows matter, with a number for each row. Afterwards
    block b of the first `owners` of `blocks` along `axis`, the cluster's only one, has columns [b, b + 1) * own of all tiles,
    and all numbers; others have none. They come into memory that `before`, other scratch types by name, had until then. A
    kernel receives a handle, `_ClusterColumns`.
    """

    columns: int
    rows: int
    blocks: int
    axis: str
    before: Mapping[str, Any]

    @property
    def own(self) -> int:
        """Columns of a block that has any, a multiple of 8."""
        return columns_of_a_block(self.columns, self.blocks)

    @property
    def owners(self) -> int:
        """How many blocks have columns."""
        return self.columns // self.own

    def inbox(self) -> tuple[int, ...]:
        """The shape of what a cluster's blocks receive: to each, from each; its columns, and the number of the row."""
        return (self.blocks, self.blocks, 64, self.own + 1) if self.blocks > 1 else ()

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _ClusterColumns:
        return _SimulatedClusterColumns(self, received, *scratch) if interpret else _ClusterColumns(self, *scratch)

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, the inbox is in global memory."""
        before = dict(self.before)
        if interpret:
            return [before, plgpu.ClusterBarrier(collective_axes=(self.axis,), num_arrivals=1)] if self.blocks > 1 else [before]
        inbox = [
            plgpu.SMEM((self.blocks, 64, self.own), jnp.float32),
            plgpu.SMEM((self.blocks, 64), jnp.float32),
            plgpu.SMEM((_BARRIER_WORDS,), jnp.int32),
        ]
        return [plgpu.RefUnion(before, inbox) if self.blocks > 1 else before]


class _Inbox[Kind]:
    """What a kernel has of sums over a cluster: memory that blocks send to, and barriers, when all `arrived` and is `taken`."""

    def __init__(self, kind: Kind, inbox: Any, arrived: Any, taken: Any):
        self._kind, self._inbox, self._arrived, self._taken = kind, inbox, arrived, taken

    def finish(self) -> None:
        """Waits until all have their last sums: a block that ends before would take its shared memory from under the others."""
        plgpu.barrier_wait(self._taken)


class _ClusterSum(_Inbox[ClusterSum]):
    """What a kernel has of a `ClusterSum`. Its inbox is free when `taken` by the first block, and holds what has `arrived`."""

    def add(self, values: jax.Array, number: jax.Array, use: Callable[[jax.Array], None]) -> None:
        """Runs `use(sum over the blocks)` in the cluster's first block.

        Every consumer warpgroup of every block calls it, for the sums `number` = 0, 1, ... of the whole kernel, and in the end
        `finish`. Blocks are added in their order, so that the same values give the same bits.
        """
        first = lax.axis_index(self._kind.axis) == 0
        pl.when(number > 0)(self.finish)  # the inbox is free again

        @pl.when(jnp.logical_not(first))
        def _() -> None:
            self._send(values)

        @pl.when(first)
        def _() -> None:
            total = values
            for part in self._receive():
                total += part
            use(total)

        plgpu.barrier_arrive(self._taken)

    def _send(self, values: jax.Array) -> None:
        wg, axis = lax.axis_index("wg"), self._kind.axis
        there = self._inbox.at[lax.axis_index(axis) - 1, wg]
        plgpu.async_store_smem(values, there, self._arrived.at[wg], cluster_idx=jnp.int32(0), cluster_dim=axis)

    def _receive(self) -> Iterator[jax.Array]:
        wg = lax.axis_index("wg")
        plgpu.barrier_wait(self._arrived.at[wg])
        for part in range(self._kind.blocks - 1):
            yield self._inbox[part, wg]


class _SimulatedClusterSum(_ClusterSum):
    """In the interpreter, which has no distributed shared memory: values go through global memory, [clusters, *inbox]."""

    def _send(self, values: jax.Array) -> None:
        inbox = self._inbox.at[lax.axis_index("block")]
        inbox[lax.axis_index(self._kind.axis) - 1, lax.axis_index("wg")] = values
        plgpu.barrier_arrive(self._arrived)
        plgpu.barrier_wait(self._arrived)  # each phase of a barrier must be seen by all who share it

    def _receive(self) -> Iterator[jax.Array]:
        plgpu.barrier_arrive(self._arrived)
        plgpu.barrier_wait(self._arrived)
        for part in range(self._kind.blocks - 1):
            yield self._inbox[lax.axis_index("block"), part, lax.axis_index("wg")]


class _ClusterShares(_Inbox[ClusterShares]):
    """What a kernel has of a `ClusterShares`. Its inbox is free when `taken` by all blocks, and holds what has `arrived`."""

    def add(self, tiles: Sequence[jax.Array], round: jax.Array, use: Callable[[int, jax.Array], None]) -> None:
        """Runs `use(i, sum over the blocks of tiles[i])` for each i of this block.

        Every consumer warpgroup of every block calls it, in rounds 0, 1, ... of the whole kernel, and in the end `finish`. The
        order of the blocks in a sum is always the same, so that the same values give the same bits.
        """
        blocks, block = self._kind.blocks, lax.axis_index(self._kind.axis)
        pl.when(round > 0)(self.finish)  # the inboxes are free again
        for number, values in enumerate(tiles):
            owner = number % blocks

            @pl.when(block != owner)
            def _(number: int = number, owner: int = owner, values: jax.Array = values) -> None:
                sender = block - owner - 1  # of the others, in the order from the owner on
                self._send(values, owner, number // blocks, jnp.where(sender < 0, sender + blocks, sender))

        self._wait()
        for number, values in enumerate(tiles):

            @pl.when(block == number % blocks)
            def _(number: int = number, total: jax.Array = values) -> None:
                for sender in range(blocks - 1):
                    total += self._received(number // blocks, sender)
                use(number, total)

        plgpu.barrier_arrive(self._taken)

    def _send(self, values: jax.Array, owner: int, tile: int, sender: jax.Array) -> None:
        wg, axis = lax.axis_index("wg"), self._kind.axis
        there = self._inbox.at[tile, sender, wg]
        plgpu.async_store_smem(values, there, self._arrived.at[wg], cluster_idx=jnp.int32(owner), cluster_dim=axis)

    def _wait(self) -> None:
        plgpu.barrier_wait(self._arrived.at[lax.axis_index("wg")])

    def _received(self, tile: int, sender: int) -> jax.Array:
        values: jax.Array = self._inbox[tile, sender, lax.axis_index("wg")]
        return values


class _SimulatedClusterShares(_ClusterShares):
    """In the interpreter, which has no distributed shared memory: values go through global memory, [clusters, *inbox]."""

    def _send(self, values: jax.Array, owner: int, tile: int, sender: jax.Array) -> None:
        inbox = self._inbox.at[lax.axis_index("block"), owner]
        inbox[tile, sender, lax.axis_index("wg")] = values

    def _wait(self) -> None:
        plgpu.barrier_arrive(self._arrived)
        plgpu.barrier_wait(self._arrived)

    def _received(self, tile: int, sender: int) -> jax.Array:
        inbox = self._inbox.at[lax.axis_index("block"), lax.axis_index(self._kind.axis)]
        values: jax.Array = inbox[tile, sender, lax.axis_index("wg")]
        return values


type Exchange = Callable[[jax.Array, jax.Array], list[tuple[jax.Array, jax.Array]]]  # `_ClusterColumns.exchange`


class _ClusterColumns:
    """What a kernel has of a `ClusterColumns`: `before`, refs until `exchange`."""

    def __init__(self, kind: ClusterColumns, memory: Any):
        self._kind = kind
        self.before: dict[str, Any]
        self._inbox: list[Any]
        self.before, self._inbox = memory if kind.blocks > 1 else (memory, [])

    def exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        """This block's columns of each block's tile [64, columns], and each block's numbers [64], in the order of the blocks.

        Every block of the cluster calls it, when no copy or wgmma uses `before` any more. Nothing may use it afterwards.
        """
        return [(tile, numbers)] if self._kind.blocks == 1 else self._exchange(tile, numbers)

    def _exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        tiles, others, _ = self._inbox
        _send_columns(tile, numbers, self._kind, self._inbox)
        layout = plgpu.Layout.WGMMA
        return [
            (
                plgpu.load(tiles.at[i], layout=layout, optimized=False),
                plgpu.load(others.at[i], layout=layout.reduce(1), optimized=False),
            )
            for i in range(self._kind.blocks)
        ]


class _SimulatedClusterColumns(_ClusterColumns):
    """In the interpreter, which has no distributed shared memory: tiles go through global memory, [clusters, *inbox]."""

    def __init__(self, kind: ClusterColumns, received: Any, before: Any, all_blocks: Any = None):
        self._kind, self._received, self._all_blocks = kind, received, all_blocks
        self.before = before

    def _exchange(self, tile: jax.Array, numbers: jax.Array) -> list[tuple[jax.Array, jax.Array]]:
        own, rows, me = self._kind.own, pl.ds(0, self._kind.rows), lax.axis_index(self._kind.axis)
        inboxes = self._received.at[lax.axis_index("block")]
        for block in range(self._kind.owners):
            inbox = inboxes.at[block, me]
            inbox[rows, pl.ds(0, own)] = tile[: self._kind.rows, block * own : (block + 1) * own]
            inbox[rows, pl.ds(own, 1)] = numbers[: self._kind.rows, None]
        plgpu.barrier_arrive(self._all_blocks)
        plgpu.barrier_wait(self._all_blocks)
        return [(inboxes[me, i, :, pl.ds(0, own)], inboxes[me, i, :, own]) for i in range(self._kind.blocks)]


def _send_columns(tile: jax.Array, numbers: jax.Array, kind: ClusterColumns, inbox: list[Any]) -> None:
    """Sends each owner in the cluster its columns of the first rows of `tile`, with `numbers`; waits for those of all.

    tile: float32 [64, columns], numbers: float32 [64], in wgmma's layout. The inbox of a block, in shared memory: float32
    [blocks, 64, own columns] and [blocks, 64], by sender, and int32 [_BARRIER_WORDS] for a barrier. It may lie where other
    data were: before it is used, the blocks wait for each other. Once in a kernel, by the one warpgroup of every block of the
    cluster, which has one axis. Source: PTX ISA, "mbarrier", "barrier.cluster", "st.async".
    """
    layout = plgpu.Layout.WGMMA
    rows, blocks, own, owners = kind.rows, kind.blocks, kind.own, kind.owners
    refs = (plgpu.RefType(),) * 3

    @plgpu.inline_mgpu(arg_types=(layout, layout.reduce(1), *refs))
    def send(_: Any, tile: Any, numbers: Any, tiles_ref: Any, numbers_ref: Any, barrier_ref: Any) -> None:
        to = [mosaic.memref_ptr(ref) for ref in (tiles_ref, numbers_ref, barrier_ref)]
        me = cluster_rank()
        comes = i32(blocks * rows * (own + 1) * _FLOAT)
        if owners < blocks:
            comes = arith.select(arith.cmpi(arith.CmpIPredicate.ult, me, i32(owners)), comes, i32(0))
        _expect(to[2], comes)
        lane = mosaic.thread_idx()
        row, column = row_and_column(lane)
        for half in range(2):
            at = arith.addi(row, i32(8 * half))
            entry = arith.addi(arith.muli(me, i32(64)), at)  # of this row in an inbox
            tile_start = arith.addi(arith.muli(entry, i32(own * _FLOAT)), arith.muli(column, i32(_FLOAT)))
            number_start = arith.muli(entry, i32(_FLOAT))
            with mosaic.when(arith.cmpi(arith.CmpIPredicate.ult, at, i32(rows))):
                for block in range(owners):
                    tiles, others, barrier = (_there(pointer, block) for pointer in to)
                    start = arith.addi(tiles, tile_start)
                    for n in range(own // 8):
                        register = tile.registers.flat[2 * (block * (own // 8) + n) + half]
                        _send(register, arith.addi(start, i32(8 * n * _FLOAT)), barrier)
                    with mosaic.when(arith.cmpi(arith.CmpIPredicate.eq, column, i32(0))):
                        _send(numbers.registers.flat[half], arith.addi(others, number_start), barrier)
        mosaic.inline_ptx(_WAIT, to[2], has_side_effects=True, convergent=True)

    send(laid_out(tile, layout), laid_out(numbers, layout.reduce(1)), *inbox)


# Until the first phase of a barrier is over.
_WAIT = """{
.reg .pred done;
again_${:uid}:
mbarrier.try_wait.parity.shared::cta.b64 done, [$0], 0;
@!done bra again_${:uid};
}"""


def _expect(barrier: Any, size: Any) -> None:
    """A new barrier, over when `size` bytes have come; then all threads of all blocks of the cluster meet."""
    mosaic.warpgroup_barrier()  # nothing else is in the barrier's place any more
    with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
        mosaic.inline_ptx("mbarrier.init.shared::cta.b64 [$0], 1;", barrier, has_side_effects=True)
        mosaic.inline_ptx("fence.mbarrier_init.release.cluster;", has_side_effects=True)
        mosaic.inline_ptx("mbarrier.arrive.expect_tx.shared::cta.b64 _, [$0], $1;", barrier, size, has_side_effects=True)
    for step in ("arrive.relaxed", "wait.acquire"):
        mosaic.inline_ptx(f"barrier.cluster.{step}.aligned;", has_side_effects=True, convergent=True)


def _there(pointer: Any, block: int) -> Any:
    """The address of the same place in another block's shared memory, as 32 bits."""
    word = ir.IntegerType.get_signless(32)
    return mosaic.inline_ptx("mapa.shared::cluster.u32 $0, $1, $2;", pointer, i32(block), result_types=word)


def _send(register: Any, address: Any, barrier: Any) -> None:
    """Stores a vector of one or two float32 there, and counts its bytes at the barrier."""
    bits = 32 * ir.VectorType(register.type).shape[0]
    word = mosaic.bitcast(register, ir.IntegerType.get_signless(bits))
    store = f"st.async.shared::cluster.mbarrier::complete_tx::bytes.b{bits} [$0], $1, [$2];"
    mosaic.inline_ptx(store, address, word, barrier, has_side_effects=True)
