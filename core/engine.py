"""What kernels use beside JAX's own `plgpu` and `pl`, compiled or interpreted, for jax 0.11.2 to 0.12.

- `kernel` makes a function that launches a kernel body on the GPU, or in JAX's interpreter with race detection.
- `specialize` splits a block into a producer warpgroup and consumer warpgroups.
- `Accumulators`, `wgmma` and `accumulated` are the tensor cores' sums: JAX's accumulators in registers when compiled.
  Interpreted, they lie in simulated shared memory, because JAX's interpreter cannot reset an accumulator inside a pipeline.
- `operand_transforms` is the shared-memory layout (tiling and swizzle) that wgmma and TMA agree on.
- `copy_gmem_to_smem` also takes arrays whose sides swizzle tiles do not divide (`core/tma.py`). Windows of rows are in
  `core/rows.py`, what the blocks of a cluster send each other in `core/cluster.py`.
- `races_found` and `reset_interpreter` read and clear the interpreter's race detector.
"""

from __future__ import annotations

import abc
import contextlib
import dataclasses
import functools
import math
from collections.abc import Callable, Iterator, Mapping, Sequence
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _interpreter
from jax._src.state import AbstractRef
from jax.experimental import pallas as pl
from jax.experimental.mosaic.gpu import fragmented_array
from jax.experimental.mosaic.gpu import utils as mosaic
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.extend.mlir import ir
from jax.typing import DTypeLike

from mgpu_ops.core import (
    block_start,
    early_compile,
    fast_lowering,
    hazards,
    inflight,
    jax_patches,
    latency,
    lowered_kernels,
    parallel_compile,
    ptxas,
    regions,
    threads,
    tma,
)
from mgpu_ops.core.interpreter import interpreted, interpreting
from mgpu_ops.core.mesh import same_mesh_axes
from mgpu_ops.core.registers import laid_out

# Each patch of JAX is applied here, once: core/jax_patches.py lists what they change and for whom.
tma.copy_any_shape()
jax_patches.add_in_float32()
jax_patches.narrow_products()
jax_patches.share_descriptors()
block_start.initialize_by_warps()
block_start.number_by_rank()
jax_patches.copy_alone()
jax_patches.announce_relaxed()
jax_patches.promote_loads()
jax_patches.name_replicas()
jax_patches.forget_numbers()
jax_patches.simplify_bottom_up()
fast_lowering.lower_fast(jax_patches.is_marked)
parallel_compile.compile_at_once()
lowered_kernels.keep_lowered(jax_patches.PREFIX)
latency.tell_scheduler()
early_compile.compile_early()
jax_patches.lower_with_32_bits()
jax_patches.call_with_numpy()
jax_patches.forget_by_device()
threads.run_on_own_client()
threads.run_as_traced()


class ScratchType(abc.ABC):
    """What a kernel receives as a handle, made of its own refs: `Accumulators`, or the types of `core/cluster.py`."""

    @abc.abstractmethod
    def scratch(self, interpret: bool) -> list[Any]:
        """The scratch types of the refs that the handle is made of."""

    def inbox(self) -> tuple[int, ...]:
        """Interpreted, the shape of what a cluster's blocks send each other, in global memory. (): nothing."""
        return ()

    @abc.abstractmethod
    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> Any:
        """The handle. scratch: the refs; received: where `inbox` lies, for each cluster."""


@dataclasses.dataclass(frozen=True)
class Accumulators(ScratchType):
    """Scratch type: accumulators of `shapes` in the registers of each of `warpgroups` consumer warpgroups; int32 for integers.

    A kernel receives a handle. A consumer warpgroup calls `handle.scope(fn)`, which runs `fn(*accs)` with accumulators of its
    own, set to zero, and returns what it returns; `handle.scope(fn, which)` with some of them. `acc[...]` waits for all wgmma
    and reads, `accumulated(acc, n)` waits for all but the last n, and `acc[...] = x` writes. A loop or branch that starts a
    wgmma must also wait for it (`core/inflight.py`).
    """

    shapes: tuple[tuple[int, int], ...]
    warpgroups: int
    dtype: Any = jnp.float32

    def scratch(self, interpret: bool) -> list[Any]:
        """Interpreted, accumulators are in shared memory."""
        return [plgpu.SMEM((self.warpgroups, *shape), self.dtype) for shape in self.shapes] if interpret else []

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _Registers | _Simulated:
        return _Simulated(scratch) if interpret else _Registers(self.shapes, self.dtype)


@dataclasses.dataclass(frozen=True)
class BlockBarrier(ScratchType):
    """Scratch type: a barrier for all threads of a block of so many warpgroups (`bar.sync 0`).

    `handle.wait()` returns once all have arrived; what they stored before in shared memory is then visible.
    """

    warpgroups: int

    def scratch(self, interpret: bool) -> list[Any]:
        return [plgpu.Barrier(num_arrivals=self.warpgroups)] if interpret else []

    def handle(self, scratch: list[Any], received: Any, interpret: bool) -> _BlockBarrier:
        return _BlockBarrier(scratch)


@dataclasses.dataclass(frozen=True)
class _BlockBarrier:
    scratch: list[Any]

    def wait(self) -> None:
        if interpreting():
            plgpu.barrier_arrive(*self.scratch)
            plgpu.barrier_wait(*self.scratch)
            return

        @plgpu.inline_mgpu()
        def barrier(_: Any) -> None:
            mosaic.inline_ptx("bar.sync 0;", has_side_effects=True, convergent=True)

        barrier()


class _Registers:
    def __init__(self, shapes: tuple[tuple[int, int], ...], dtype: Any):
        self._shapes, self._dtype = shapes, dtype

    def scope(self, fn: Callable[..., Any], which: Sequence[int] | None = None) -> Any:
        def run(*accs: Any) -> Any:
            with inflight.scope():
                return fn(*accs)

        shapes = self._shapes if which is None else [self._shapes[i] for i in which]
        return pl.run_scoped(run, *(plgpu.ACC(shape, self._dtype) for shape in shapes))


class _Simulated:
    """Accumulators in the interpreter: one slice of shared memory each per consumer warpgroup."""

    def __init__(self, refs: list[Any]):
        self._refs = refs

    def scope(self, fn: Callable[..., Any], which: Sequence[int] | None = None) -> Any:
        refs = self._refs if which is None else [self._refs[i] for i in which]
        accs = [ref.at[lax.axis_index("wg")] for ref in refs]
        for acc in accs:
            acc[...] = jnp.zeros(acc.shape, acc.dtype)
        with inflight.scope():
            return fn(*accs)


def accumulated(acc: Any, in_flight: int) -> jax.Array:
    """The accumulator's values after all wgmma but the last `in_flight`, which must add to other accumulators."""
    inflight.reads(acc, in_flight)
    return acc[...] if interpreting() else plgpu.wgmma_accumulator_load(acc, wait_n=in_flight)


def wgmma(acc: Any, a: Any, b: Any, depth: int | None = None) -> None:
    """acc[m, n] += sum_k a[m, k] b[k, n] on the tensor cores, asynchronously: `wgmma_wait(n)` leaves n in flight.

    depth: how many of k are multiplied, in multiples of 32 bytes: the others are zeros.

    a and b are shared-memory refs (see `operand_transforms`) of 16 or, stored along k, 8 bits or float32, of which
    the first 11 bits are multiplied (tf32); a may be registers instead, but not of float32.
    m % 64 == 0, n % 8 == 0, n <= 256. Source: PTX ISA, "wgmma.mma_async".
    """
    inflight.starts(acc, a, b)
    if not interpreting():
        if isinstance(a, jax.Array):
            ptxas.warn_of_register_operands()
        if depth is not None:
            _shorten_wgmma(depth * a.dtype.itemsize)
        plgpu.wgmma(acc, a, b)
        if depth is not None:
            _shorten_wgmma(0)
    else:  # the interpreter wants a fence between loads and the next TMA write; wgmma's own loads need none
        acc[...] += jnp.dot(a[...][:, :depth], b[...][:depth], preferred_element_type=acc.dtype)
        plgpu.commit_smem()


def wgmma_wait(in_flight: int) -> None:
    """Waits until all wgmma are done but the last `in_flight`."""
    inflight.waits(in_flight)
    plgpu.wgmma_wait(in_flight)


def barrier_arrive(barrier: Any, in_flight: int = 0) -> None:
    """Arrives at a barrier. At an `empty` barrier of a `Pipeline`, no wgmma in flight may read the pipeline's buffers.

    in_flight: how many of the last wgmma are excepted, as they read other stages.
    """
    inflight.arrives(barrier, in_flight)
    plgpu.barrier_arrive(barrier)


def copy_gmem_to_smem(src: Any, dst: Any, barrier: Any, **options: Any) -> None:
    """Starts the copy dst = src from global to shared memory, as `plgpu.copy_gmem_to_smem`; arrives at `barrier` when done."""
    inflight.copies(dst, barrier)
    plgpu.copy_gmem_to_smem(src, dst, barrier, **options)


def operand_transforms(minor: int, dtype: DTypeLike, swizzle: int | None = None) -> tuple[Any, ...]:
    """Tiling and swizzle of a shared-memory buffer whose rows hold `minor` elements: 8 rows of `swizzle` bytes a tile.

    `swizzle` (128, 64 or 32 bytes) defaults to the largest that divides a row. Both operands of one wgmma need the same.
    """
    bits = _bits(dtype)
    swizzle = swizzle or plgpu.find_swizzle(minor * bits)
    return (plgpu.TilingTransform((8, 8 * swizzle // bits)), plgpu.SwizzleTransform(swizzle))


def _bits(dtype: DTypeLike) -> int:
    return 4 if jnp.dtype(dtype) == jnp.int4 else 8 * jnp.dtype(dtype).itemsize


def global_memory_fence() -> None:
    """Orders TMA copies after it behind stores to global memory that a signal, waited for before, has released.

    Source: PTX ISA, "fence.proxy.async": TMA and ordinary accesses go through different proxies.
    """
    _proxy_fence("fence.proxy.async;")


def shared_memory_fence() -> None:
    """Orders TMA copies after it behind loads from shared memory: it waits until all that were started have come.

    Source: as `global_memory_fence`.
    """
    _proxy_fence("fence.proxy.async.shared::cta;")


def _proxy_fence(instruction: str) -> None:
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def fence(_: Any) -> None:
        mosaic.inline_ptx(instruction, has_side_effects=True)

    fence()


def signal_all(semaphore: Any, device_ids: Sequence[Any]) -> None:
    """Adds 1 to the semaphore on each of several GPUs, given by mesh indices, after the warpgroup's stores are visible to them.

    One fence releases the stores to all GPUs. `semaphore_signal` would fence once for each GPU, as long each time.
    """

    @plgpu.inline_mgpu(arg_types=[plgpu.RefType()] * len(device_ids))
    def signal(_: Any, *semaphores: Any) -> None:
        mosaic.warpgroup_barrier()
        with mosaic.single_thread(scope=mosaic.ThreadSubset.WARPGROUP):
            mosaic.fence_release_sys()
            always = mosaic.c(1, ir.IntegerType.get_signless(1))
            for one in semaphores:
                mosaic.SemaphoreRef(mosaic.memref_ptr(one)).signal(1, predicate=always, relaxed=True)

    signal(*(plgpu.remote_ref(semaphore, device) for device in device_ids))


def warpgroup_barrier() -> None:
    """The threads of a warpgroup wait for each other."""
    if interpreting():
        return

    @plgpu.inline_mgpu()
    def barrier(_: Any) -> None:
        mosaic.warpgroup_barrier()

    barrier()


def opaque(x: jax.Array) -> jax.Array:
    """x, an int32, which the compiler takes for any number: it does not unroll a loop of so many iterations."""
    if interpreting():
        return x
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(arg_types=(scalar,), return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar))
    def same(_: Any, x: Any) -> Any:
        word = ir.IntegerType.get_signless(32)
        found = mosaic.inline_ptx("mov.u32 $0, $1;", x.registers.item(), result_types=word, has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(found, (), is_signed=True)

    found: jax.Array = same(laid_out(x, scalar))
    return found


def add_tile(src: Any, dst: Any) -> None:
    """Starts dst += src, float32, from shared to global memory. Several blocks may add to the same place, in any order.

    The interpreter has no such copies and overwrites dst: there, each block needs a dst of its own.
    """
    plgpu.copy_smem_to_gmem(src, dst, reduction_op=None if interpreting() else "add")


def warp() -> jax.Array | None:
    """Which of the four warps of a warpgroup this is, for what each does on its own. None in the interpreter, which has none.

    Nothing in which a warpgroup's warps meet may be in there. They may wait at barriers, and arrive by `arrive_as_warp`.
    """
    if interpreting():
        return None
    scalar = plgpu.Layout.WG_SPLAT

    @plgpu.inline_mgpu(return_type=plgpu.ShapeDtypeStruct((), jnp.dtype(jnp.int32), layout=scalar))
    def number(_: Any) -> Any:
        code = "{ .reg .u32 t; mov.u32 t, %tid.x; shr.u32 t, t, 5; and.b32 $0, t, 3; }"
        word = mosaic.inline_ptx(code, result_types=ir.IntegerType.get_signless(32), has_side_effects=True)
        return fragmented_array.FragmentedArray.splat(word, (), is_signed=True)

    own: jax.Array = number()
    return own


def arrive_as_warp(barrier: Any) -> None:
    """One of the four warps of a warpgroup arrives in place of all of them: see `warp`."""
    for _ in range(1 if interpreting() else 4):
        plgpu.barrier_arrive(barrier)


def frozen(ref: Any, *operands: jax.Array) -> jax.Array:
    """The array in a `jax.new_ref` that a kernel of `operands` has written. The ref is not used after this.

    Inside `jax.shard_map` the array varies over the mesh axes of the operands. JAX does not know this of the ref.
    """
    return same_mesh_axes(jax.freeze(ref), *operands)[0]


def transpose_ref(ref: Any) -> Any:
    """A view of a rank-2 shared-memory ref with its dimensions swapped. wgmma reads 16-bit operands in both orders."""
    return ref.transpose((1, 0))


_REDUCTION_BYTES = 2048  # Mosaic's default


@dataclasses.dataclass(frozen=True)
class Launch:
    """The blocks that run a kernel.

    name: what profilers and dumps call the kernel.
    grid: number of blocks, or of clusters, along each named axis. The body asks `lax.axis_index` for its own place.
    warpgroups: of 128 threads each, in a block. The body runs once in each; their axis is "wg".
    cluster: number of blocks in a cluster along each named axis, of which a compiled kernel has one; {} for none.
    approx_math: exponentials and divisions may be the GPU's fast approximations.
    interpret: run in JAX's GPU interpreter, on any machine, with race detection, instead of compiling.
    share: of the time of the call that launches it.
    reduces_across_warps: whether some sum or maximum is over elements of several warps, which takes 2 KB of shared memory.
    """

    name: str
    grid: Mapping[str, int]
    warpgroups: int
    cluster: Mapping[str, int] = dataclasses.field(default_factory=dict)
    approx_math: bool = False
    interpret: bool = False
    reduces_across_warps: bool = True
    share: float = 1.0


def kernel(
    body: Callable[..., None],
    launch: Launch,
    *,
    out_type: Any,
    scratch_types: Mapping[str, Any],
    equal_over: tuple[str, ...] = (),
    constant: tuple[int, ...] = (),
) -> Callable[..., Any]:
    """A function of arrays that runs `body(*input_refs, *output_refs, **scratch)` as one GPU kernel.

    Args:
      body: the kernel, as one warpgroup of one block runs it.
      launch: how many blocks of how many warpgroups run it.
      out_type: shape and dtype of the outputs (a pytree of `jax.ShapeDtypeStruct`).
      scratch_types: the buffers and barriers of a block by name; of a `ScratchType` the body gets the handle.
      equal_over: mesh axes over whose devices the outputs are equal although the inputs differ. The kernel guarantees it.
      constant: numbers of outputs that depend on no input, as zeros for another kernel to add to: only of such an array can a
        `jax.new_ref` be an input of a kernel inside `jax.shard_map`.

    A compiled kernel whose cluster has several axes raises ValueError, as does one that needs more shared memory than the GPU
    has, when it is lowered. One that would fault or race on a GPU although it compiles raises `inflight.InFlight` or
    `hazards.UnsafeKernel` when it is traced.
    """
    interpret = launch.interpret
    if not interpret and len(launch.cluster) > 1:  # `block_start.number_by_rank`
        raise ValueError(f"cluster={launch.cluster} must have one axis where the kernel is compiled")
    if interpret:  # it simulates one cluster at a time, and waits for it in one more thread
        threads.provide(math.prod(launch.cluster.values()) * launch.warpgroups + 1)
    else:
        ptxas.prefer_newest()
    ours = {k: t for k, t in scratch_types.items() if isinstance(t, ScratchType)}
    buffers = {k: ours[k].scratch(interpret) if k in ours else t for k, t in scratch_types.items()}
    inboxes: dict[str, jax.ShapeDtypeStruct] = {}  # interpreted, further outputs, which the caller does not see
    if interpret:
        clusters = math.prod(launch.grid.values())
        inboxes = {k: jax.ShapeDtypeStruct((clusters, *t.inbox()), jnp.float32) for k, t in ours.items() if t.inbox()}

    def fresh_body(*refs: Any, **scratch: Any) -> None:
        received = dict(zip(inboxes, refs[len(refs) - len(inboxes) :], strict=True))
        refs = refs[: len(refs) - len(inboxes)]
        for key, t in ours.items():
            scratch[key] = t.handle(scratch[key], received.get(key), interpret)
        with interpreted(interpret), inflight.watched(), regions.named_primitives():
            if not interpret:
                _mark(launch)
            body(*refs, **scratch)
            hazards.check({**launch.grid, **launch.cluster}, launch.warpgroups)

    run = plgpu.kernel(
        fresh_body,
        out_type=(*(out_type if isinstance(out_type, tuple) else (out_type,)), *inboxes.values()) if inboxes else out_type,
        scratch_types=buffers,
        grid=tuple(launch.grid.values()),
        grid_names=tuple(launch.grid),
        cluster=tuple(launch.cluster.values()),
        cluster_names=tuple(launch.cluster),
        num_threads=launch.warpgroups,
        thread_name="wg",
        kernel_name=launch.name,
        compiler_params=latency.compiler_params(
            launch.share,
            lowering_semantics=plgpu.LoweringSemantics.Warpgroup,
            approx_math=launch.approx_math,
            reduction_scratch_bytes=_REDUCTION_BYTES if launch.reduces_across_warps else 0,
            **({} if interpret else regions.compiler_params(launch.name, launch.warpgroups)),
        ),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )

    def call(*arrays: Any) -> Any:
        # Inside jax.shard_map an output varies over every mesh axis that an input varies over.
        values = [x for x in arrays if not isinstance(jax.typeof(x), AbstractRef)]
        with jax.enable_x64(False):  # kernels count in 32 bits: a Python number beside an int32 must not be wider
            outputs = run(*arrays)
        if inboxes:
            outputs = tuple(outputs[: -len(inboxes)]) if isinstance(out_type, tuple) else outputs[0]
        outputs, tree = jax.tree.flatten(outputs)
        typed = (x if i in constant else same_mesh_axes(x, *values, but=equal_over)[0] for i, x in enumerate(outputs))
        return jax.tree.unflatten(tree, typed)

    return call


def _mark(launch: Launch) -> None:
    """Marks the kernel being traced: it gets the patches that others' kernels do not."""
    plgpu.inline_mgpu()(functools.partial(jax_patches.mark, warps=4 * launch.warpgroups))()


def narrow_wgmma(whole: int, columns: int) -> None:
    """From here on a kernel's wgmma of `whole` columns compute the first `columns` of them: of a wider operand B."""
    if not interpreting():
        plgpu.inline_mgpu()(functools.partial(jax_patches.narrow_wgmma, whole=whole, columns=columns))()


def load_whole_lines(*refs: Any, columns: int | None = None) -> None:
    """The kernel's TMA copies bring whole lines of 128 bytes to L2, also where they ask for a part of one.

    refs: arrays in global memory whose rows are loaded. columns: where each begins, in multiples; by default at the array's
      rows. Nothing changes where all begin at lines.
    """
    within = any((columns or ref.shape[-1]) * _bits(ref.dtype) % (8 * 128) for ref in refs)
    if within and not interpreting():
        plgpu.inline_mgpu()(jax_patches.load_whole_lines)()


def describe_from_start() -> None:
    """The kernel's wgmma operands are described by their distance from the start of their buffer: fewer instructions each."""
    if not interpreting():
        plgpu.inline_mgpu()(jax_patches.describe_from_start)()


def _shorten_wgmma(depth: int) -> None:
    """From here on wgmma multiplies the first `depth` bytes of k; 0: all."""
    plgpu.inline_mgpu()(functools.partial(jax_patches.shorten_wgmma, depth=depth))()


@contextlib.contextmanager
def _copies_alone() -> Iterator[None]:
    """Within it warps start TMA copies without waiting for their warpgroup's others."""

    def start_alone(alone: bool) -> None:
        if not interpreting():
            plgpu.inline_mgpu()(functools.partial(jax_patches.start_alone, alone=alone))()

    start_alone(True)
    yield
    start_alone(False)


def specialize(
    producer: Callable[[], None],
    consumer: Callable[[], None],
    *,
    consumers: int,
    producer_registers: int,
    consumer_registers: int,
    helper: Callable[[], None] | None = None,
    helper_registers: int = 0,
    copies_alone: bool = False,
) -> None:
    """Splits a block by role: its first `consumers` warpgroups run `consumer`, the next one `producer`, all at the same time.

    helper: what one more warpgroup runs, behind the producer's. Default: there is none.
    copies_alone: whether the producer starts its TMA copies without a barrier of its four warps before each. Its warps must
      not read or write where these copies write, which the interpreter does not check.

    Registers are per thread, multiples of 8. The warpgroups together may not have more than the block was launched with.
    Source: PTX ISA, "setmaxnreg".
    """
    wg = lax.axis_index("wg")

    def produce() -> None:
        plgpu.set_max_registers(producer_registers, action="decrease")
        with _copies_alone() if copies_alone else contextlib.nullcontext():
            producer()

    def consume() -> None:
        plgpu.set_max_registers(consumer_registers, action="increase")
        consumer()

    if helper is None:
        pl.when(wg == consumers)(produce)
        pl.when(wg < consumers)(consume)
        return

    def help_along() -> None:
        plgpu.set_max_registers(helper_registers, action="decrease")
        helper()

    # One within the other: what consumers need would otherwise be live, and be spilled, in code with few registers.
    def others() -> None:
        lax.cond(wg == consumers, produce, help_along)

    lax.cond(wg < consumers, consume, others)


def races_found() -> bool:
    """Whether the last interpreted kernel had a data race. Raises RuntimeError where none was interpreted yet."""
    state = _interpreter._races
    if state is None:
        raise RuntimeError("no kernel was interpreted since the start or reset_interpreter()")
    return bool(state.races_found)


def reset_interpreter() -> None:
    """Clears the interpreter after a kernel raised in it; without this the next one may fail for the old reason."""
    _interpreter.reset_gpu_interpret_mode_state()
