"""The one door to Mosaic GPU: everything an op's kernel uses, under one name, for jax 0.11.2 to 0.12.

What is here is JAX's own (`jax.experimental.pallas.mosaic_gpu`; its documentation applies), except for five things that
this module adds because every op needs them:

- `kernel` runs a body compiled or interpreted (`interpret=True`), and gives each call a function object of its own: a body
  that is shared by two configs kept the grid of the first in jax 0.11.0 to 0.11.2 (jax#40847).
- `Accumulator` and `wgmma` stand for the tensor core's float32 accumulator in registers. Compiled, they are JAX's; interpreted,
  the accumulator lies in simulated shared memory, because JAX's interpreter cannot reset one inside a pipeline.
- `operand_transforms` is the shared-memory layout (tiling and swizzle) that wgmma and TMA agree on.
- TMA copies may touch arrays whose sides are no multiple of the swizzle tile, as long as the copied block is one tile wide
  (`_allow_ragged_arrays`).
- `races_found` and `reset_interpreter` ask and clear the interpreter's race detector.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Callable, Mapping
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax._src.pallas.mosaic_gpu.interpret import gpu_callbacks as _interpreter
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core.mesh import same_mesh_axes

# Memory spaces, types of scratch buffers, and how a block moves between memories.
GMEM = plgpu.GMEM
SMEM = plgpu.SMEM
REGS = plgpu.REGS
BlockSpec = plgpu.BlockSpec
Barrier = plgpu.Barrier
ClusterBarrier = plgpu.ClusterBarrier
SemaphoreType = plgpu.SemaphoreType
RefUnion = plgpu.RefUnion
Layout = plgpu.Layout
layout_cast = plgpu.layout_cast
TilingTransform = plgpu.TilingTransform
SwizzleTransform = plgpu.SwizzleTransform
CompilerParams = plgpu.CompilerParams
LoweringSemantics = plgpu.LoweringSemantics
ShapeDtypeStruct = plgpu.ShapeDtypeStruct
find_swizzle = plgpu.find_swizzle

# Pipelines and loops.
emit_pipeline = plgpu.emit_pipeline
emit_pipeline_warp_specialized = plgpu.emit_pipeline_warp_specialized
PipelinePipeline = plgpu.PipelinePipeline
nd_loop = plgpu.nd_loop
planar_snake = plgpu.planar_snake
run_scoped = pl.run_scoped
when = pl.when
loop = pl.loop
ds = pl.ds
cdiv = pl.cdiv

# Copies, barriers, registers.
copy_gmem_to_smem = plgpu.copy_gmem_to_smem
copy_smem_to_gmem = plgpu.copy_smem_to_gmem
wait_smem_to_gmem = plgpu.wait_smem_to_gmem
commit_smem = plgpu.commit_smem
commit_smem_to_gmem_group = plgpu.commit_smem_to_gmem_group
async_prefetch = plgpu.async_prefetch
async_store_smem = plgpu.async_store_smem
barrier_arrive = plgpu.barrier_arrive
barrier_wait = plgpu.barrier_wait
set_max_registers = plgpu.set_max_registers
load = plgpu.load
broadcasted_iota = plgpu.broadcasted_iota
inline_mgpu = plgpu.inline_mgpu
wgmma_wait = plgpu.wgmma_wait
warp_map = plgpu.warp_map

# Between blocks of a cluster and between GPUs.
cluster_ref = plgpu.cluster_ref
remote_ref = plgpu.remote_ref
multicast_ref = plgpu.multicast_ref
multimem_load_reduce = plgpu.multimem_load_reduce
multimem_store = plgpu.multimem_store
semaphore_signal = plgpu.semaphore_signal
semaphore_signal_multicast = plgpu.semaphore_signal_multicast
semaphore_wait = plgpu.semaphore_wait
atomic_add = plgpu.atomic_add

# Profile traces: `with trace(name):` marks a region in the trace of a kernel compiled with
# `CompilerParams(profile_space=..., profile_dir=...)`.
trace = jax.named_scope


@dataclasses.dataclass(frozen=True)
class Accumulator:
    """Scratch type: a float32 accumulator of `shape` in the registers of each of `warpgroups` compute warpgroups.

    A kernel receives a handle for it; `handle.scope(fn)`, called by a compute warpgroup, runs `fn(acc)` with a zeroed
    accumulator of that warpgroup's own. `acc[...]` reads it (after all wgmma in flight), `acc[...] = x` sets it.
    """

    shape: tuple[int, int]
    warpgroups: int


_ACC_TYPE = type(plgpu.ACC((64, 8), jnp.float32).get_ref_aval())


class _Registers:
    def __init__(self, shape: tuple[int, int]):
        self._shape = shape

    def scope(self, fn: Callable[[Any], None]) -> None:
        run_scoped(lambda acc: fn(acc), plgpu.ACC(self._shape, jnp.float32))


class _Simulated:
    """An accumulator in the interpreter: one slice of shared memory per compute warpgroup."""

    def __init__(self, ref: Any, thread_name: str):
        self._ref = ref
        self._thread_name = thread_name

    def scope(self, fn: Callable[[Any], None]) -> None:
        acc = self._ref.at[lax.axis_index(self._thread_name)]
        acc[...] = jnp.zeros(acc.shape, jnp.float32)
        fn(acc)


def wgmma(acc: Any, a: Any, b: Any) -> None:
    """acc[m, n] += sum_k a[m, k] b[k, n] on the tensor cores, asynchronously: `wgmma_wait(n)` leaves n in flight.

    a and b are shared-memory refs (see `operand_transforms`), 16-bit floats; m % 64 == 0, n % 8 == 0, n <= 256.
    Source: PTX ISA, "wgmma.mma_async".
    """
    if isinstance(getattr(acc, "aval", None), _ACC_TYPE):
        plgpu.wgmma(acc, a, b)
    else:  # interpreted: these loads stand for the tensor core's, which need no fence before the next TMA write
        acc[...] += jnp.dot(a[...], b[...], preferred_element_type=jnp.float32)
        commit_smem()


def operand_transforms(minor: int, dtype: Any, swizzle: int | None = None) -> tuple[Any, ...]:
    """Tiling and swizzle of a shared-memory buffer whose rows hold `minor` elements: 8 rows of `swizzle` bytes a tile.

    `swizzle` (128, 64 or 32 bytes) defaults to the largest that divides a row. Both operands of one wgmma need the same.
    """
    itemsize = jnp.dtype(dtype).itemsize
    swizzle = swizzle or find_swizzle(minor * itemsize * 8)
    return (TilingTransform((8, swizzle // itemsize)), SwizzleTransform(swizzle))


def transpose_ref(ref: Any) -> Any:
    """A view of a rank-2 shared-memory ref with its dimensions swapped; wgmma reads 16-bit operands either way."""
    return ref.transpose((1, 0))


def kernel(
    body: Callable[..., None],
    *,
    out_type: Any,
    scratch_types: Mapping[str, Any],
    grid: tuple[int, ...],
    grid_names: tuple[str, ...],
    cluster: tuple[int, ...] = (),
    cluster_names: tuple[str, ...] = (),
    num_threads: int,
    thread_name: str = "wg",
    name: str,
    interpret: bool = False,
    compiler_params: CompilerParams | None = None,
) -> Callable[..., Any]:
    """A function of arrays that launches `body(*input_refs, *output_refs, **scratch)` as one GPU kernel.

    Args:
      body: the kernel; it runs once per warpgroup of each block.
      out_type: shape and dtype of the outputs (a pytree of `jax.ShapeDtypeStruct`).
      scratch_types: the buffers and barriers of a block by name; an `Accumulator` becomes its handle.
      grid, cluster: blocks launched, and blocks per cluster, with the axis names the body asks `lax.axis_index` for.
      num_threads: warpgroups per block (128 CUDA threads each), of axis `thread_name`.
      name: what profilers and dumps call the kernel.
      interpret: run in JAX's GPU interpreter on any machine, with race detection, instead of compiling.

    A kernel that needs more shared memory than the GPU has raises ValueError when it is lowered.
    """
    if interpret:
        _require_threads(math.prod(cluster) * num_threads + 1)  # clusters take turns; one waits for them
    accumulators = {k: t for k, t in scratch_types.items() if isinstance(t, Accumulator)}
    buffers = {k: t for k, t in scratch_types.items() if k not in accumulators}
    if interpret:
        buffers |= {k: SMEM((t.warpgroups, *t.shape), jnp.float32) for k, t in accumulators.items()}

    def fresh_body(*refs: Any, **scratch: Any) -> None:
        for key, t in accumulators.items():
            scratch[key] = _Simulated(scratch[key], thread_name) if interpret else _Registers(t.shape)
        body(*refs, **scratch)

    run = plgpu.kernel(
        fresh_body,
        out_type=out_type,
        scratch_types=buffers,
        grid=grid,
        grid_names=grid_names,
        cluster=cluster,
        cluster_names=cluster_names,
        num_threads=num_threads,
        thread_name=thread_name,
        kernel_name=name,
        compiler_params=compiler_params or CompilerParams(lowering_semantics=LoweringSemantics.Warpgroup),
        interpret=plgpu.InterpretGPUParams(detect_races=True) if interpret else None,
    )

    def launch(*arrays: Any) -> Any:
        # Inside jax.shard_map an output varies over every mesh axis that an input varies over.
        return jax.tree.map(lambda out: same_mesh_axes(out, *arrays)[0], run(*arrays))

    return launch


def _require_threads(warpgroups: int) -> None:
    """Raises where the interpreter could hang: each simulated warpgroup may block one thread of XLA's CPU pool."""
    pool = max(int(os.environ.get("NPROC") or os.cpu_count() or 1), jax.local_device_count("cpu"))
    if warpgroups > pool:
        raise RuntimeError(
            f"interpreting {warpgroups} warpgroups at a time needs as many CPU threads, but XLA has {pool} and could hang: "
            f"set NPROC={max(64, warpgroups)} in the environment before Python starts"
        )


def _allow_ragged_arrays() -> None:
    """Lets Mosaic copy blocks one swizzle tile wide from and to arrays of any shape.

    Mosaic views a global array in tiles of 8 rows by one swizzle width, and refuses an array that they do not divide. A block
    that is one tile wide lies in shared memory as plain rows, so TMA can copy it without that view, and then clips at the
    array's true end. (Wider blocks interleave tiles; clipping them would take one copy per tile.)
    """
    from jax.experimental.mosaic.gpu import launch_context, utils

    copy = launch_context.LaunchContext.async_copy

    @functools.wraps(copy)
    def async_copy(self: Any, *, src_ref: Any, dst_ref: Any, gmem_transform: Any = (), **options: Any) -> None:
        to_smem = utils.is_smem_ref(dst_ref)
        gmem, smem = (src_ref, dst_ref) if to_smem else (dst_ref, src_ref)
        match gmem_transform:
            case (launch_context.TileTransform(tiling=(rows, columns)),):
                *_, m, n = gmem.type.shape
                ragged = (m > rows and m % rows) or (n > columns and n % columns)
                if ragged and len(smem.type.shape) == 4 and smem.type.shape[1] == 1:
                    smem, gmem_transform = utils.memref_fold(smem, 0, 3), ()
        src_ref, dst_ref = (gmem, smem) if to_smem else (smem, gmem)
        copy(self, src_ref=src_ref, dst_ref=dst_ref, gmem_transform=gmem_transform, **options)

    launch_context.LaunchContext.async_copy = async_copy  # type: ignore[method-assign]


_allow_ragged_arrays()


def races_found() -> bool:
    """Whether the last interpreted kernel had a data race. Raises RuntimeError where none was interpreted yet."""
    state = _interpreter._races
    if state is None:
        raise RuntimeError("no kernel was interpreted since the start or reset_interpreter()")
    return bool(state.races_found)


def reset_interpreter() -> None:
    """Clears the interpreter after a kernel raised in it; without this the next one may fail for the old reason."""
    _interpreter.reset_gpu_interpret_mode_state()
