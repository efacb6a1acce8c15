"""What a block does before its body: warps initialise its barriers, and it reads its rank in its cluster.

Two patches of JAX (`core/jax_patches.py`), for how soon a kernel's first copy starts (docs/kernels/matmul.md).
"""

from __future__ import annotations

import functools
import itertools
from typing import Any

from jax.experimental.mosaic.gpu import dialect, dialect_lowering, utils
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import arith, memref

from mgpu_ops.core.jax_patches import is_marked, is_ours, warps_of

# --- Barriers of a block
#
# Mosaic GPU has one thread initialise all barriers, each by instructions of its own, which all warps fetch: a kernel with 28
# takes 0.4 us longer than one with four. Each warp can initialise one, or every so many-th, by the same instructions.

_INITIALIZE = "mosaic_gpu.initialize_barrier"
_BARRIERS = "_mgpu_ops_barriers"  # attribute of a kernel's LaunchContext: arrays of barriers that are not initialised yet
_MOST_BARRIERS = 32  # of an array, whose phases are bits of a number


def initialize_by_warps() -> None:
    """In marked kernels, a block's warps share the initialisation of its barriers; of a cluster's, where `is_ours` too."""
    owner: Any = utils.BarrierRef
    lower, initialize = dialect_lowering._lowerings[_INITIALIZE], owner.initialize

    @functools.wraps(lower)
    def lower_marked(context: Any, op: Any) -> Any:
        launch = context.launch_context
        if not is_marked(launch):
            return lower(context, op)
        threads = 1 if op.orders_tensor_core.value else utils.WARPGROUP_SIZE
        arrays = getattr(launch, _BARRIERS, [])
        arrays.append((op.base_pointer, op.num_barriers.value, op.arrival_count.value * threads))
        setattr(launch, _BARRIERS, arrays)
        if not _follows(op):
            setattr(launch, _BARRIERS, [])
            for first in range(0, sum(number for _, number, _ in arrays), warps_of(launch)):
                _initialize(arrays, first, context._single_thread_per_warp_predicate)
        return []

    @functools.wraps(initialize)
    def initialize_later(barriers: Any, arrival_count: int = 1) -> Any:
        """As those of a block alone, those of a cluster become an operation, which is lowered with the others."""
        [number] = ir.MemRefType(barriers.type).shape
        if number > _MOST_BARRIERS or not is_ours(_module()):
            return initialize(barriers, arrival_count)  # which refuses more
        pointer = utils.memref_ptr(barriers)
        dialect.initialize_barrier(pointer, arrival_count, number, True)  # threads are counted
        zero = utils.c(0, ir.IntegerType.get_signless(32))
        phases = memref.alloca(ir.MemRefType.get((), zero.type), [], [])
        memref.store(zero, phases, [])
        return owner(pointer, zero, phases, number)

    dialect_lowering._lowerings[_INITIALIZE] = lower_marked
    owner.initialize = staticmethod(initialize_later)


def _module() -> Any:
    """The module that is being written."""
    op: Any = ir.InsertionPoint.current.block.owner
    while op.parent is not None:
        op = op.parent
    return op


def _follows(op: Any) -> bool:
    """Whether another array of barriers of the block is initialised behind this one."""
    ops = list(op.operation.block.operations)
    own = next(i for i, other in enumerate(ops) if other.operation == op.operation)
    return any(other.operation.name == _INITIALIZE for other in ops[own + 1 :])


def _initialize(arrays: list[tuple[Any, int, int]], first: int, elected: Any) -> None:
    """A thread of each warp initialises the barrier with its warp's number, counted over the arrays from the `first` on."""
    i32, i64 = ir.IntegerType.get_signless(32), ir.IntegerType.get_signless(64)
    number = arith.addi(utils.warp_idx(), utils.c(first, i32))
    below = lambda end: arith.cmpi(arith.CmpIPredicate.ult, number, utils.c(end, i32))  # noqa: E731
    ends = list(itertools.accumulate(length for _, length, _ in arrays))
    starts = [utils.getelementptr(base, [length - end], i64) for (base, length, _), end in zip(arrays, ends, strict=True)]
    counts = [utils.c(arrivals, i32) for _, _, arrivals in arrays]
    start, count = starts[-1], counts[-1]
    for end, earlier, wanted in reversed(list(zip(ends, starts, counts, strict=True))[:-1]):
        start, count = arith.select(below(end), earlier, start), arith.select(below(end), wanted, count)
    utils.inline_ptx(
        "mbarrier.init.shared::cta.b64 [$0], $1;",
        utils.getelementptr(start, [number], i64),
        count,
        predicate=arith.andi(below(ends[-1]), elected),
        has_side_effects=True,
    )


# --- A block's rank in its cluster
#
# ptxas divides a block's index by the cluster's size, which it does not know: some 20 instructions before the first copy. In a
# cluster of one dimension the block's place along it is its rank, which a register has. Source: PTX ISA, "%cluster_ctarank".


def number_by_rank() -> None:
    """In our kernels, whose clusters have one dimension (`engine.kernel` refuses more), a block reads its rank."""
    gpu: Any = utils.gpu  # type: ignore[attr-defined]
    ask = gpu.cluster_block_id

    @functools.wraps(ask)
    def cluster_block_id(dimension: Any, **options: Any) -> Any:
        if dimension != gpu.Dimension.x or not is_ours(_module()):
            return ask(dimension, **options)
        return arith.index_castui(ir.IndexType.get(), cluster_rank())

    gpu.cluster_block_id = cluster_block_id


def cluster_rank() -> Any:
    """This block's rank in its cluster, an int32, in code that is being generated."""
    return utils.inline_ptx("mov.u32 $0, %cluster_ctarank;", result_types=ir.IntegerType.get_signless(32))
