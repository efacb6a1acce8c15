"""What mgpu_ops changes in JAX, once for a process: each function here applies one patch. `core/engine.py` calls them all.

| patch | what it changes | for whom |
|---|---|---|
| `tma.copy_any_shape` | TMA copies arrays that swizzle tiles do not divide, and windows of rows | kernels of `engine.kernel` |
| `add_in_float32` | the NVLink switch adds 16-bit floats in float32 | kernels of `engine.kernel` |
| `narrow_products` | wgmma multiplies a part of B's columns, or of k | kernels that ask for it |
| `share_descriptors` | operands of wgmma in one buffer are described by distances from its start | kernels that ask for it |
| `block_start.initialize_by_warps` | a block's warps share the initialisation of its barriers | kernels of `engine.kernel` |
| `block_start.number_by_rank` | a block reads its rank in its cluster, without a division | kernels named `mgpu_ops_*` |
| `copy_alone` | a warp starts a copy without waiting for its warpgroup's others | producers that ask for it |
| `announce_relaxed` | a block tells another how many bytes it sends without a fence | kernels of `engine.kernel` |
| `promote_loads` | TMA brings whole lines of 128 bytes to L2 | kernels that ask for it |
| `name_replicas` | kernels on a mesh without devices name their replicas, and so run | all Mosaic GPU kernels |
| `forget_numbers` | a kernel reads the same whichever kernels came before | kernels named `mgpu_ops_*` |
| `simplify_bottom_up` | a kernel's code is simplified fast, before Mosaic does it slowly | kernels named `mgpu_ops_*` |
| `fast_lowering.lower_fast` | kernels are lowered in less time, to the same code: the table there | all kernels, or ours |
| `parallel_compile.compile_at_once` | the kernels of a program compile at the same time | programs with our kernels |
| `lowered_kernels.keep_lowered` | a kernel that is kept on disk is not lowered again | kernels named `mgpu_ops_*` |
| `early_compile.compile_early` | a program is compiled while its kernels are lowered | programs for one GPU |
| `lower_with_32_bits` | a kernel reads the same with and without `JAX_ENABLE_X64` | kernels named `mgpu_ops_*` |
| `call_with_numpy` | the interpreter's Python functions take NumPy's arrays | all interpreted kernels |
| `forget_by_device` | a cluster that ends in the interpreter is forgotten by its own device alone | all interpreted kernels |
| `opaque_threads` | code generated in this context reads the number of a thread anew | what a kernel asks for |
| `threads.run_on_own_client` | simulated warpgroups run op by op on NumPy's arrays | all interpreted kernels |
| `threads.run_as_traced` | simulated warpgroups run with `JAX_ENABLE_X64` as they were traced | all interpreted kernels |

`engine.kernel` marks its kernels (`mark`); a patch that would change what others' kernels compute looks for the mark.
"""

from __future__ import annotations

import collections
import contextlib
import dataclasses
import functools
from collections.abc import Iterator
from contextvars import ContextVar
from typing import Any

import jax
import numpy as np
from jax._src import callback as callbacks
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.pallas.mosaic_gpu.interpret import interpret_pallas_call as interpreter
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.mosaic.gpu import dialect, dialect_lowering, launch_context, utils
from jax.extend.mlir import ir, passmanager
from jax.extend.mlir.dialects import arith, memref

from mgpu_ops.core import fast_lowering, parallel_compile
from mgpu_ops.core.contexts import having

# --- Kernels of engine.kernel

_MARK, _WARPS = "_mgpu_ops_kernel", "_mgpu_ops_warps"  # attributes of a kernel's LaunchContext


def mark(context: launch_context.LaunchContext, warps: int) -> None:
    """Marks the kernel that is being lowered as one of `engine.kernel`, with nothing left of one that could not be lowered.

    warps: of a block.
    """
    setattr(context, _MARK, True)
    setattr(context, _WARPS, warps)
    _depth.set(0)
    _alone.set(False)


def is_marked(context: launch_context.LaunchContext) -> bool:
    return getattr(context, _MARK, False)


def warps_of(context: launch_context.LaunchContext) -> int:
    """Of a block of a marked kernel."""
    warps: int = getattr(context, _WARPS)
    return warps


# --- Sums of the NVLink switch
#
# `multimem.ld_reduce` adds 16-bit floats in any precision that is at least their own, unless it says `.acc::f32`, as Mosaic GPU
# never does. Source: PTX ISA, "multimem.ld_reduce".

_PACKED = {"bf16": "bf16x2", "f16": "f16x2"}
_LOAD_REDUCE = "mosaic_gpu.multimem_load_reduce"
_in_float32: ContextVar[bool] = ContextVar("_in_float32", default=False)


def add_in_float32() -> None:
    """In marked kernels, the switch adds 16-bit floats in float32 and rounds the sum once."""
    lower, load_reduce = dialect_lowering._lowerings[_LOAD_REDUCE], utils.multimem_load_reduce

    @functools.wraps(lower)
    def lower_marked(context: Any, op: Any) -> Any:
        with having(_in_float32, is_marked(context.launch_context)):
            return lower(context, op)

    @functools.wraps(load_reduce)
    def multimem_load_reduce(ty: Any, ptr: Any, reduction: Any, is_signed: bool | None = None) -> Any:
        packed = _PACKED.get(str(ty.element_type)) if isinstance(ty, ir.VectorType) else None
        if not _in_float32.get() or reduction != "add" or packed is None:
            return load_reduce(ty, ptr, reduction, is_signed)
        return _add_in_float32(ty, ptr, packed)

    dialect_lowering._lowerings[_LOAD_REDUCE] = lower_marked
    utils.multimem_load_reduce = multimem_load_reduce  # type: ignore[assignment]


def _add_in_float32(ty: Any, ptr: Any, packed: str) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    words = ty.shape[0] * utils.bitwidth(ty.element_type) // 32
    vector, registers = "", "$0"
    if words > 1:
        vector, registers = f".v{words}", "{" + ", ".join(f"${word}" for word in range(words)) + "}"
    loaded = utils.inline_ptx(
        f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32{vector}.{packed} {registers}, [${words}];",
        ptr,
        result_types=[i32] * words,
        has_side_effects=True,
    )
    one = ir.VectorType.get((1,), i32)
    return utils.bitcast(utils.vector_concat([utils.bitcast(word, one) for word in loaded]), ty)


# --- wgmma of a part of B's columns, or of k
#
# Mosaic GPU multiplies all columns of B that are in shared memory, in whole swizzle panels. wgmma takes any multiple of 8.
# It multiplies whole swizzle rows of k, each in several instructions of 32 bytes.

_WGMMA = "mosaic_gpu.wgmma"
_COLUMNS = "_mgpu_ops_columns"  # attribute of a kernel's LaunchContext: {columns of B: those that are multiplied}
_DEPTH = "mgpu_ops.depth"  # attribute of a wgmma that multiplies a part of k: how many bytes
_depth: ContextVar[int] = ContextVar("_depth", default=0)  # bytes of k that wgmma multiply from here on; 0: all
_part: ContextVar[_Part | None] = ContextVar("_part", default=None)  # of the wgmma that is being lowered


@dataclasses.dataclass
class _Part:
    """What a wgmma multiplies: columns of B, by how many B has; and `depth` of its `row` bytes of k."""

    columns: dict[int, int]
    row: int
    depth: int
    from_start: bool
    number: int = 0  # of the next call of Mosaic's `wgmma_m64`

    def depth_of_next(self, swizzle: int) -> int:
        """Bytes of k of the next call, which has a swizzle row of them."""
        before = self.number * swizzle % self.row
        self.number += 1
        return min(max(self.depth - before, 0), swizzle)


def narrow_wgmma(context: launch_context.LaunchContext, whole: int, columns: int) -> None:
    """In this kernel wgmma with `whole` columns of B computes the first `columns` of them."""
    setattr(context, _COLUMNS, {whole: columns})


def shorten_wgmma(context: launch_context.LaunchContext, depth: int) -> None:
    """From here on wgmma multiplies the first `depth` bytes of k, a multiple of 32; 0: all."""
    del context
    _depth.set(depth)


def narrow_products() -> None:
    """Kernels can multiply a part of B's columns (`narrow_wgmma`) or of k (`shorten_wgmma`).

    The accumulator has all columns, the others unchanged.
    """
    module: Any = dialect_lowering.wgmma
    create, lower, multiply = dialect.wgmma, dialect_lowering._lowerings[_WGMMA], module.wgmma_m64

    @functools.wraps(create)
    def create_short(*args: Any, **options: Any) -> Any:
        result = create(*args, **options)
        if depth := _depth.get():
            result.owner.attributes[_DEPTH] = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), depth)
        return result

    @functools.wraps(lower)
    def lower_narrow(context: Any, op: Any) -> Any:
        all_bytes = op.a.type.shape[1] * utils.bitwidth(op.a.type.element_type) // 8
        depth = op.attributes[_DEPTH].value if _DEPTH in op.attributes else all_bytes
        kernel = context.launch_context
        part = _Part(getattr(kernel, _COLUMNS, {}), all_bytes, depth, getattr(kernel, _SHARED, False))
        with having(_part, part):
            return lower(context, op)

    @functools.wraps(multiply)
    def wgmma_m64(acc: Any, *args: Any, n: int, swizzle: int, **options: Any) -> Any:
        """A swizzle row of k of 64 rows of A: called for each of k, and so for each 64 rows."""
        part = _part.get()
        if part is None:
            return multiply(acc, *args, n=n, swizzle=swizzle, **options)
        depth, columns = part.depth_of_next(swizzle), part.columns.get(n, n)
        if not depth:
            return acc
        out, some = acc.copy(), acc.shape[1] * columns // n
        # It runs an instruction for each 32 bytes of `swizzle`; how the operands lie, their descriptors say.
        out[:, :some] = multiply(acc[:, :some].copy(), *args, n=columns, swizzle=depth, **options)
        return out

    dialect.wgmma = create_short
    dialect_lowering._lowerings[_WGMMA] = lower_narrow
    module.wgmma_m64 = wgmma_m64


# --- Descriptors of wgmma's operands
#
# A descriptor has the address of an operand in units of 16 bytes, 14 bits of it. Mosaic GPU takes these bits of each operand's
# own address, which ptxas computes anew for each: ten instructions for the four wgmma of 64 of k. Taken of the buffer's start,
# outside of all loops, the operand's distance from it can be added, as shared memory ends below the 15th bit: five.

_SHARED = "_mgpu_ops_descriptors"  # attribute of a kernel's LaunchContext


def describe_from_start(context: launch_context.LaunchContext) -> None:
    """In this kernel the operands of wgmma are described by their distance from the start of their buffer."""
    setattr(context, _SHARED, True)


def share_descriptors() -> None:
    """Kernels can have wgmma's operands described from the start of their buffer (`describe_from_start`)."""
    module: Any = dialect_lowering.wgmma
    encode = module.mma_utils.encode_descriptor

    @functools.wraps(encode)
    def encode_descriptor(ref: Any, *args: Any, **options: Any) -> Any:
        part = _part.get()
        if part is None or not part.from_start:
            return encode(ref, *args, **options)
        i64 = ir.IntegerType.get_signless(64)
        start, offset, *_ = memref.extract_strided_metadata(ref)
        sixteenths = 128 // utils.bitwidth(ir.MemRefType(ref.type).element_type)
        distance = arith.divui(arith.index_cast(i64, offset), utils.c(sixteenths, i64))
        return arith.addi(encode(utils.memref_ptr(start), *args, **options), distance)

    module.mma_utils.encode_descriptor = encode_descriptor


# --- Copies of a producer
#
# Before a TMA copy the four warps of a warpgroup wait for each other, so that what one of them still reads or writes there is
# done. A producer whose warps do neither can leave that out: each waits itself until the stage is empty, and all arrive at its
# full barrier, so that none can be a phase ahead.

_ASYNC_LOAD = "mosaic_gpu.async_load"
_ALONE = "mgpu_ops.alone"  # attribute of a copy before which no warp waits for the others
_alone: ContextVar[bool] = ContextVar("_alone", default=False)  # whether copies from here on have it


def start_alone(context: launch_context.LaunchContext, alone: bool) -> None:
    """From here on a warp starts its copies without waiting for the warpgroup's others; or as Mosaic GPU has it."""
    del context
    _alone.set(alone)


def copy_alone() -> None:
    """Producers can start copies without waiting for their other warps (`start_alone`)."""
    create, lower = dialect.async_load, dialect_lowering._lowerings[_ASYNC_LOAD]

    @functools.wraps(create)
    def create_alone(*args: Any, **options: Any) -> Any:
        op = create(*args, **options)
        if _alone.get():
            op.attributes[_ALONE] = ir.UnitAttr.get()
        return op

    @functools.wraps(lower)
    def lower_alone(context: Any, op: Any) -> Any:
        waits, alone = context.auto_barriers, _ALONE in op.attributes and is_marked(context.launch_context)
        context.auto_barriers = waits and not alone
        try:
            return lower(context, op)
        finally:
            context.auto_barriers = waits

    dialect.async_load = create_alone
    dialect_lowering._lowerings[_ASYNC_LOAD] = lower_alone


# --- Bytes that blocks of a cluster send each other
#
# Mosaic GPU's `async_store_smem` first arrives at the receiver's barrier, to announce the bytes, with `.release`: ptxas puts a
# fence before it that waits until the GPU sees all of the thread's stores and loads. Nothing is passed on by this arrival: the
# bytes themselves complete the barrier's phase when they are there. Source: PTX ISA, "mbarrier.arrive", "st.async".

_ASYNC_STORE = "mosaic_gpu.async_store_smem"
_announcing: ContextVar[bool] = ContextVar("_announcing", default=False)


def announce_relaxed() -> None:
    """In marked kernels, `async_store_smem` announces its bytes without a fence."""
    owner: Any = utils.BarrierRef
    lower, arrive = dialect_lowering._lowerings[_ASYNC_STORE], owner.arrive_expect_tx

    @functools.wraps(lower)
    def lower_marked(context: Any, op: Any) -> Any:
        with having(_announcing, is_marked(context.launch_context)):
            return lower(context, op)

    @functools.wraps(arrive)
    def arrive_expect_tx(self: Any, tx_count: Any, predicate: Any = None, **options: Any) -> None:
        if not _announcing.get():
            arrive(self, tx_count, predicate, **options)
            return
        count = utils.c(tx_count, ir.IntegerType.get_signless(32)) if isinstance(tx_count, int) else tx_count
        code = f"mbarrier.arrive.expect_tx.relaxed.cluster.shared::{self._ptx_scope}.b64 _, [$0], $1;"
        utils.inline_ptx(code, self.get_ptr(), count, predicate=predicate, has_side_effects=True, convergent=True)

    dialect_lowering._lowerings[_ASYNC_STORE] = lower_marked
    owner.arrive_expect_tx = arrive_expect_tx


# --- Lines of L2
#
# Where rows begin within a line of 128 bytes, a copy of 128 bytes of each asks for parts of two lines, and the next copy for
# the rest of the second. TMA can bring whole lines to L2 ("L2 promotion" of a descriptor). Mosaic GPU has the driver encode
# descriptors without. Those with it differ in one bit, which the host sets afterwards. That format is Hopper's; a GPU test
# compares it with what the driver encodes. Source: CUDA driver API, cuTensorMapEncodeTiled.

_LINES = "_mgpu_ops_lines"  # attribute of a kernel's LaunchContext
_DESCRIPTOR_BYTES = 128
PROMOTION = (8, 1 << 18)  # of a descriptor: the byte that an integer of 64 bits begins at, and its bit for lines of 128 bytes


def load_whole_lines(context: launch_context.LaunchContext) -> None:
    """This kernel's TMA copies bring whole lines of 128 bytes to L2."""
    setattr(context, _LINES, True)


def promote_loads() -> None:
    """Kernels can have TMA bring whole lines to L2 (`load_whole_lines`)."""
    owner: Any = launch_context.LaunchContext
    allocate = owner._alloc_scratch

    @functools.wraps(allocate)
    def allocate_descriptor(self: Any, size: int, **options: Any) -> Any:
        if size == _DESCRIPTOR_BYTES and getattr(self, _LINES, False):
            options["host_init"] = functools.partial(_encode, options["host_init"])
        return allocate(self, size, **options)

    owner._alloc_scratch = allocate_descriptor


def _encode(host_init: Any, descriptor: ir.Value) -> None:
    host_init(descriptor)
    promote(descriptor)


def promote(descriptor: ir.Value) -> None:
    """Host code that sets the bit of a descriptor."""
    start, bit = PROMOTION
    i64 = ir.IntegerType.get_signless(64)
    word = utils.getelementptr(descriptor, [start], ir.IntegerType.get_signless(8))
    llvm: Any = launch_context.llvm  # type: ignore[attr-defined]
    llvm.store(llvm.or_(llvm.load(i64, word), utils.c(bit, i64)), word)


# --- Replicas of a mesh without devices
#
# A kernel that reaches other GPUs names the replicas that take part. jax 0.11 reads them off the mesh's devices. On an
# AbstractMesh, which has none, the kernel compiles and fails when it runs. jax 0.12 names all replicas in order; Mosaic GPU
# cannot run another order.

_CONFIG, _IDS = "mhlo.backend_config", "xla_replica_ids"


def name_replicas() -> None:
    """Every kernel inside `jax.shard_map` names all replicas in order where it named none."""
    lower = mosaic._mosaic_gpu_lowering_rule

    @functools.wraps(lower)
    def lower_with_ids(ctx: Any, *args: Any, **params: Any) -> Any:
        results = lower(ctx, *args, **params)
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        if mesh is not None and results:
            _name(results[0].owner, mesh.size)
        return results

    mosaic._mosaic_gpu_lowering_rule = lower_with_ids  # that Pallas calls


def _name(call: Any, size: int) -> None:
    config = {entry.name: entry.attr for entry in call.attributes[_CONFIG]}
    if _IDS in config and not config[_IDS].value:
        config[_IDS] = ir.StringAttr.get(",".join(map(str, range(size))))
        call.attributes[_CONFIG] = ir.DictAttr.get(config)


# --- Kernels without numbers
#
# Mosaic GPU numbers the kernels of a process, for the names of the files that it dumps. jax 0.11 writes the number into the
# kernel's text, which is part of the key of JAX's persistent compilation cache: a process that lowers its kernels in another
# order compiles all of them again. jax 0.12 leaves the number out. Without one, compiling gives a kernel its next number.

_NUMBER = "mosaic_gpu.dump_basename"
PREFIX = "mgpu_ops_"  # of the names of our kernels


def forget_numbers() -> None:
    """Our kernels are serialised without their number."""
    lower = mosaic._mosaic_gpu_lowering_rule

    @functools.wraps(lower)
    def lower_without_number(ctx: Any, *args: Any, module: ir.Module, **params: Any) -> Any:
        if is_ours(module) and _NUMBER in module.operation.attributes:
            del module.operation.attributes[_NUMBER]
        return lower(ctx, *args, module=module, **params)

    mosaic._mosaic_gpu_lowering_rule = lower_without_number


def is_ours(kernel: Any) -> bool:
    """Whether a kernel's module is named `mgpu_ops_*`."""
    attributes = kernel.operation.attributes
    return "sym_name" in attributes and ir.StringAttr(attributes["sym_name"]).value.startswith(PREFIX)


# --- Simplified code
#
# Half of Mosaic's time before ptxas is that of MLIR's canonicalizer. It goes through a kernel from the top, and looks at a loop
# anew whenever one of the hundreds of values that the loop carries has changed. From the bottom up it comes to the same in a
# twentieth of the time, and then nothing is left to do for Mosaic's own.

_SIMPLIFY = "builtin.module(canonicalize{top-down=false})"


def simplify_bottom_up() -> None:
    """Our kernels are simplified before they are serialised. From then on programs are searched for kernels when compiled."""
    lower = mosaic._mosaic_gpu_lowering_rule

    @functools.wraps(lower)
    def lower_simplified(ctx: Any, *args: Any, module: ir.Module, **params: Any) -> Any:
        if is_ours(module):
            parallel_compile.lowered()
            passes = passmanager.PassManager.parse(_SIMPLIFY, module.context)
            passes.enable_verifier(False)  # Mosaic's own verifies
            passes.run(module.operation)
        return lower(ctx, *args, module=module, **params)

    mosaic._mosaic_gpu_lowering_rule = lower_simplified


# --- Kernels of 32-bit numbers
#
# `engine.kernel` traces a kernel with `JAX_ENABLE_X64` off. JAX traces parts of it anew to lower it, and all of it to interpret
# it: its Python numbers would be 64 bits wide there.


def lower_with_32_bits() -> None:
    """Our kernels are lowered and interpreted with `JAX_ENABLE_X64` off."""
    lower, interpret = lowering.lower_unpipelined_jaxpr_to_module, interpreter.interpret_pallas_call

    @functools.wraps(lower)
    def lower_kernel(mesh: Any, jax_mesh: Any, jaxpr: Any, *args: Any, **options: Any) -> Any:
        try:
            with _with_32_bits(jaxpr):
                return lower(mesh, jax_mesh, jaxpr, *args, **options)
        finally:
            fast_lowering.forget_kernel()

    @functools.wraps(interpret)
    def interpret_kernel(*args: Any, jaxpr: Any, **params: Any) -> Any:
        with _with_32_bits(jaxpr):
            return interpret(*args, jaxpr=jaxpr, **params)

    ours: tuple[Any, Any] = lower_kernel, interpret_kernel
    lowering.lower_unpipelined_jaxpr_to_module, interpreter.interpret_pallas_call = ours


def _with_32_bits(jaxpr: Any) -> contextlib.AbstractContextManager[None]:
    ours = jaxpr.debug_info.func_name.startswith(PREFIX)
    return jax.enable_x64(False) if ours else contextlib.nullcontext()


# --- Calls of the interpreter's functions
#
# An interpreted kernel calls Python functions thousands of times, with some ten numbers and an array each. XLA gives NumPy's
# arrays; JAX copies each to a device before the call, where the function makes a NumPy array of it again, and this took about
# as long as all that the functions do.

_INTERPRETER = interpreter.__name__.rpartition(".")[0]  # the package


def call_with_numpy() -> None:
    """The functions that interpreted kernels call get copies of NumPy's arrays, on no device."""
    call, to_int = callbacks.io_callback_impl, shared_memory._to_int

    @functools.wraps(call)
    def call_function(*args: Any, callback: Any, **params: Any) -> Any:
        function = callback.callback_func
        while isinstance(function, functools.partial):
            function = function.func
        if not getattr(function, "__module__", "").startswith(_INTERPRETER):
            return call(*args, callback=callback, **params)
        try:
            return [np.asarray(x) for x in callback(*map(np.array, args))]
        except BaseException:
            callbacks.logger.exception("jax.io_callback failed")
            raise

    @functools.wraps(to_int)
    def number(x: Any) -> Any:
        return x.item() if isinstance(x, np.ndarray) else to_int(x)

    callbacks.io_callback_impl, shared_memory._to_int = call_function, number


# --- Kernels that several devices interpret at once
#
# The interpreter simulates all devices of a shard_map in one memory, and forgets what the threads of a cluster have seen and
# waited for when it ends. JAX then forgets that of all devices: threads of another one, in the midst of a kernel, lose their
# clocks and named barriers, and what they did before counts as a race. A device that ends before the others takes barriers of
# theirs for its own, left over.

_BY_THREAD = (
    "next_regs_id",
    "pipelineable_async_tasks",
    "tcgen05_completion_clocks",
    "pending_tmem_stores",
    "pending_tmem_loads",
)
# Attributes of an interpreter's memory: how many threads of each device's cluster, and how many devices, are at the end.
_FINISHED, _AT_THE_END = "_mgpu_ops_finished", "_mgpu_ops_at_the_end"


def forget_by_device() -> None:
    """A cluster that ends is forgotten by the devices whose threads have all ended, and by no other.

    The last device looks for barriers that are left over, of all.
    """
    memory: Any = shared_memory.GPUSharedMemory
    reset, finished, check = memory.reset_per_cluster_state, memory.kernel_thread_finished, memory.assert_no_barriers_allocated

    @functools.wraps(finished)
    def thread_finished(self: Any, thread: Any) -> None:
        finished(self, thread)
        with self.lock:
            self.__dict__.setdefault(_FINISHED, collections.Counter())[thread.device_id] += 1

    @functools.wraps(reset)
    def reset_finished(self: Any) -> None:
        counts = self.__dict__.get(_FINISHED)
        if counts is None or self.num_devices == 1:
            reset(self)
            return
        with self.lock:
            threads = self.num_blocks_per_cluster * self.num_pallas_threads_per_block
            devices = {device for device, count in counts.items() if count == threads}
            for device in devices:
                del counts[device]
            _forget(self, devices)

    @functools.wraps(check)
    def check_last(self: Any) -> None:
        with self.lock:
            ended = self.__dict__.get(_AT_THE_END, 0) + 1
            setattr(self, _AT_THE_END, ended)
        if ended == self.num_devices:
            check(self)

    memory.kernel_thread_finished, memory.reset_per_cluster_state = thread_finished, reset_finished
    memory.assert_no_barriers_allocated = check_last


def _forget(memory: Any, devices: set[int]) -> None:
    """What `reset_per_cluster_state` does, of these devices' threads. Numbers that all share go on."""
    for thread in memory.all_concurrent_threads:
        if thread.device_id in devices:
            memory.clocks[thread] = memory.VectorClock(memory.vector_clock_size)
            memory.pending_smem_to_gmem_read_clocks[thread].clear()
            memory.pending_smem_to_gmem_write_clocks[thread].clear()
            for name in _BY_THREAD:
                getattr(memory, name).pop(thread, None)
            if hasattr(memory, "reallocation_checker"):  # of jax 0.12
                memory.reallocation_checker.deallocated.pop(thread, None)
    for key in [key for key in memory.named_barriers if key[0] in devices]:
        del memory.named_barriers[key]


# --- Numbers of threads


@contextlib.contextmanager
def opaque_threads() -> Iterator[None]:
    """In this context, code that is generated reads the number of a thread anew, and the compiler cannot know it.

    A block of Pallas is one row of threads.
    """
    known: Any = utils.thread_idx

    def thread_idx() -> Any:
        i32 = ir.IntegerType.get_signless(32)
        return utils.inline_ptx("mov.u32 $0, %tid.x;", result_types=i32, has_side_effects=True)

    setattr(utils, "thread_idx", thread_idx)  # noqa: B010 - mypy has a type of its own for it
    try:
        yield
    finally:
        utils.thread_idx = known
