"""What mgpu_ops changes in JAX reaches its own kernels; those of others stay as they are."""

from __future__ import annotations

import ctypes
import dataclasses
import functools
import subprocess
import sys
import threading
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.interpreters import mlir
from jax._src.pallas.mosaic_gpu import core as gpu_core
from jax._src.pallas.mosaic_gpu import lowering
from jax._src.pallas.mosaic_gpu.interpret import shared_memory
from jax._src.state import indexing
from jax.experimental import io_callback
from jax.experimental import pallas as pl
from jax.experimental.mosaic import gpu
from jax.experimental.mosaic.gpu import constraints
from jax.experimental.pallas import mosaic_gpu as plgpu

import mgpu_ops
from mgpu_ops.core import aot, engine, fast_lowering, jax_patches
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import target

PLAIN = """
import jax, jax.numpy as jnp
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AbstractMesh, AxisType, PartitionSpec

def lowered(kernel):
    def body(x_ref, out_ref):
        value = plgpu.multimem_load_reduce(x_ref, collective_axes=("device",), reduction_op="add")
        out_ref[...] = plgpu.layout_cast(value, plgpu.Layout.WG_STRIDED((8, 256), vec_size=8))

    x = jax.ShapeDtypeStruct((8, 256), jnp.bfloat16)
    mesh = AbstractMesh((2,), ("device",), axis_types=(AxisType.Auto,))
    run = jax.shard_map(kernel(body, x), mesh=mesh, in_specs=PartitionSpec(), out_specs=PartitionSpec(), check_vma=False)
    with aot.target(gpu.find("h200")):
        return jax.jit(run).trace(x).lower(lowering_platforms=("cuda",)).as_text()

def plain(body, x):
    params = plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup)
    names = dict(grid=(1,), grid_names=("block",), num_threads=1, thread_name="wg")
    return plgpu.kernel(body, out_type=x, compiler_params=params, **names)

from mgpu_ops.core import aot, gpu
before = lowered(plain)
from mgpu_ops.core import engine
after = lowered(plain)
launch = engine.Launch("test", {"block": 1}, warpgroups=1)
own = lowered(lambda body, x: engine.kernel(body, launch, out_type=x, scratch_types={}))
print("ld_reduce" in before, "acc::f32" in before, "acc::f32" in after, "acc::f32" in own)
"""


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_the_switch_adds_in_float32_in_kernels_of_this_library_alone():
    result = subprocess.run([sys.executable, "-c", PLAIN], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr
    assert result.stdout.split() == ["True", "False", "False", "True"]


def test_functions_that_other_programs_call_get_jaxs_arrays_as_ever():
    given: list[type] = []

    def note(x: Any) -> Any:
        given.append(type(x))
        return x

    jax.jit(lambda x: io_callback(note, x, x))(jnp.ones(3)).block_until_ready()
    assert engine.kernel  # with all patches
    assert issubclass(given[0], jax.Array)


def test_a_cluster_that_ends_is_forgotten_by_its_own_device_alone():
    one = threading.Barrier(1)
    memory = shared_memory.GPUSharedMemory(
        num_devices=2, num_threads_per_block=1, num_blocks_per_cluster=2, num_tma_threads_per_device=2,
        out_of_bounds_reads="raise", dma_execution_mode="eager", uninitialized_memory="nan", detect_races=True,
        barrier=one, clean_up_barrier=one,
    )  # fmt: skip
    first, second = ([shared_memory.Warpgroup(device, 0, block, 0) for block in range(2)] for device in range(2))
    seen = lambda thread: int(memory.get_clock(thread).generic_clock.clock.max())  # noqa: E731
    for thread in (*first, *second):
        memory.incr_clock(thread)
        memory.named_barrier(thread, 0, 1)
    for thread in first:
        memory.kernel_thread_finished(thread)
    memory.kernel_thread_finished(second[0])  # of two blocks
    memory.reset_per_cluster_state()
    assert [seen(thread) for thread in (*first, *second)] == [0, 0, 1, 1]
    assert {device for device, *_ in memory.named_barriers} == {1}
    memory.kernel_thread_finished(second[1])
    memory.reset_per_cluster_state()
    assert [seen(thread) for thread in second] == [0, 0]
    assert not memory.named_barriers


def test_equal_variables_are_all_that_others_lead_to():
    a, b, c, d, e, f = map(constraints.Variable, "abcdef")
    pairs = [(a, b), (c, d), (e, f), (d, b)]
    system = constraints.ConstraintSystem(constraints=[constraints.Equals(*pair) for pair in pairs])
    equal = {x: set(others) for x, others in fast_lowering._equal_variables(system).items()}
    assert equal == {x: group - {x} for group in ({a, b, c, d}, {e, f}) for x in group}
    assert equal == {x: set(others) for x, others in constraints.compute_transitively_equal_vars(system).items()}


def test_a_layout_of_warp_level_mma_is_made_once_and_is_the_same():
    fresh, again = gpu.MMALayouts(jnp.bfloat16, m_warps=2), gpu.MMALayouts(jnp.float16, m_warps=2)
    assert again.lhs is fresh.lhs
    for other in (gpu.MMALayouts(jnp.bfloat16), gpu.MMALayouts(jnp.int8, m_warps=2)):
        assert other.lhs != fresh.lhs
        assert other.rhs != fresh.rhs


def test_an_index_changes_places_with_a_swizzle_as_it_is():
    whole = indexing.NDIndexer.from_indices_shape((slice(None), slice(None)), (8, 64))
    part = indexing.NDIndexer.from_indices_shape((slice(None), slice(32, 64)), (8, 64))
    swizzle, aval = gpu_core.UnswizzleRef(128), jax.core.ShapedArray((8, 64), jnp.bfloat16)
    commute = functools.partial(lowering._commute_transform, aval)
    with mlir.make_ir_context():
        assert lowering._lower_fn_with_avals(commute, (swizzle, whole))(None, swizzle, whole) == ((whole, swizzle),) * 2
        with pytest.raises(ValueError, match="cannot be sliced"):
            lowering._lower_fn_with_avals(commute, (swizzle, part))(None, swizzle, part)


DECODING = mgpu_ops.FlashAttentionProblem(4, 1, 1024, 8, 8, 128)
GROUPED = mgpu_ops.GroupedMatmulProblem(256, 512, 512, 4)
INT4 = mgpu_ops.QuantizedGroupedMatmulProblem(64, 512, 512, "int4", 128, groups=4)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
@pytest.mark.parametrize(
    ("op", "problem", "within"),
    [
        ("matmul", mgpu_ops.MatmulProblem(512, 512, 512), {"k": 520}),
        ("grouped_matmul", GROUPED, {"k": 520}),
        ("ragged_contraction", mgpu_ops.RaggedContractionProblem(256, 512, 512, 4), {"n": 520}),
        ("gated_grouped_matmul", mgpu_ops.GatedGroupedMatmulProblem(256, 512, 512, 4), {"n": 520}),
        ("quantized_grouped_matmul", INT4, {"k": 640}),  # a row of 320 bytes
        ("flash_attention", DECODING, {"head_dim": 80}),
        ("flash_attention", dataclasses.replace(DECODING, page_size=64), {"head_dim": 96}),  # whose rows of all heads are lines
    ],
)
def test_rows_that_begin_within_a_line_have_tma_bring_whole_lines(op, problem, within, monkeypatch):
    promote, promoted = jax_patches.promote, []
    monkeypatch.setattr(jax_patches, "promote", lambda descriptor: (promoted.append(descriptor), promote(descriptor)))
    spec, gpu = mgpu_ops.spec_of(op), gpus.find("h200")

    def descriptors(p: Any) -> int:
        promoted.clear()
        arrays = jax.eval_shape(functools.partial(spec.inputs, p), jax.random.key(0))
        aot.compile_for("h200", functools.partial(spec.run, p, spec.default(p, gpu), gpu), *arrays)
        return len(promoted)

    assert descriptors(problem) == 0
    assert descriptors(dataclasses.replace(problem, **within)) > 2


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_a_kernel_that_could_not_be_lowered_leaves_products_of_the_next_one_whole():
    def of_a_step() -> float:
        """The instructions of a step of 64 of k, however often a loop is unrolled."""
        a, b = (jax.ShapeDtypeStruct(shape, jnp.bfloat16) for shape in ((128, 512), (512, 512)))
        default = mgpu_ops.spec_of("matmul").default(mgpu_ops.MatmulProblem(128, 512, 512), gpus.find("h200"))
        (ptx,) = aot.ptx("h200", functools.partial(mgpu_ops.matmul, config=dataclasses.replace(default, tile_k=64)), a, b)
        return ptx.count("wgmma.mma_async") / ptx.count("wgmma.commit_group")

    def fail(_: Any) -> None:
        raise RuntimeError("not lowered")

    def body(out: Any) -> None:
        plgpu.inline_mgpu()(functools.partial(jax_patches.shorten_wgmma, depth=32))()
        plgpu.inline_mgpu()(fail)()
        out[...] = jnp.zeros(128, jnp.float32)

    launch, out_type = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=1), jax.ShapeDtypeStruct((128,), jnp.float32)
    with pytest.raises(RuntimeError, match="not lowered"):
        aot.ptx("h200", engine.kernel(body, launch, out_type=out_type, scratch_types={}))
    assert of_a_step() == 4


def barriers_of(kernel: Any) -> int:
    """How often a kernel of x[2, 128] has a warpgroup wait for all of its warps."""
    (ptx,) = aot.ptx("h200", kernel, jax.ShapeDtypeStruct((2, 128), jnp.int32))
    return ptx.count("bar.sync")


def copied(alone: bool, then: Any = None) -> Any:
    """A kernel: the sum of the rows of x, which a producer copies one by one. then: what its lowering calls after that."""

    def body(x_ref: Any, out_ref: Any, *, x: Any, full: Any) -> None:
        def producer() -> None:
            for row in range(2):
                engine.copy_gmem_to_smem(x_ref.at[row], x.at[row], full)
            if then is not None:
                plgpu.inline_mgpu()(then)()

        def consumer() -> None:
            plgpu.barrier_wait(full)
            out_ref[...] = x[0] + x[1]

        engine.specialize(producer, consumer, consumers=1, producer_registers=40, consumer_registers=232, copies_alone=alone)

    launch, out_type = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=2), jax.ShapeDtypeStruct((128,), jnp.int32)
    scratch = {"x": plgpu.SMEM((2, 128), jnp.int32), "full": plgpu.Barrier(num_arrivals=2)}
    return engine.kernel(body, launch, out_type=out_type, scratch_types=scratch)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_copies_start_without_a_barrier_in_producers_that_ask_for_it_alone():
    def body(x_ref: Any, out_ref: Any, x: Any, full: Any) -> None:  # of another library
        plgpu.copy_gmem_to_smem(x_ref, x, full)
        plgpu.barrier_wait(full)
        out_ref[...] = x[...]

    others = plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((2, 128), jnp.int32),
        scratch_types=[plgpu.SMEM((2, 128), jnp.int32), plgpu.Barrier()],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        grid=(1,),
        grid_names=("block",),
        num_threads=1,
        thread_name="wg",
    )

    def fail(_: Any) -> None:
        raise RuntimeError("not lowered")

    before = barriers_of(others)
    assert before > 0
    assert barriers_of(copied(alone=False)) == barriers_of(copied(alone=True)) + 2
    with pytest.raises(RuntimeError, match="not lowered"):
        barriers_of(copied(alone=True, then=fail))
    assert barriers_of(others) == before


BARRIERS = {"one": (6, 1), "two": (12, 2)}  # name: how many barriers there are, and after how many arrivals a phase ends


def meeting(kernel: Any, **scratch: Any) -> Any:
    """A kernel of two warpgroups that meet at all of its barriers in turn; out[i] is i + 1, stored ahead of barrier i."""

    def body(out_ref: Any, x: Any, one: Any, two: Any, **others: Any) -> None:
        wg = jax.lax.axis_index("wg")

        def arrive_and_wait(number: int, barrier: Any, arrives: Any) -> None:
            @pl.when(wg == 0)
            def _() -> None:
                x[number] = jnp.full((128,), number + 1, jnp.int32)
                plgpu.barrier_arrive(barrier)

            pl.when(jnp.logical_and(wg == 1, arrives))(lambda: plgpu.barrier_arrive(barrier))
            plgpu.barrier_wait(barrier)

            @pl.when(wg == 1)
            def _() -> None:
                out_ref[jax.lax.axis_index("block"), jax.lax.axis_index("cluster"), number] = x[number]

        number = 0
        for barriers, (count, arrivals) in zip((one, two), BARRIERS.values(), strict=True):
            for i in range(count):
                arrive_and_wait(number, barriers.at[i], arrivals == 2)
                number += 1
        for barrier in others.values():
            plgpu.barrier_arrive(barrier)
            plgpu.barrier_wait(barrier)

    total = sum(count for count, _ in BARRIERS.values())
    barriers = {k: plgpu.Barrier(num_arrivals=arrivals, num_barriers=count) for k, (count, arrivals) in BARRIERS.items()}
    out_type = jax.ShapeDtypeStruct((1, 2, total, 128), jnp.int32)
    return kernel(body, out_type, {"x": plgpu.SMEM((total, 128), jnp.int32), **barriers, **scratch})


def own(body: Any, out_type: Any, scratch: Any) -> Any:
    launch = engine.Launch("mgpu_ops_test", {"block": 1}, cluster={"cluster": 2}, warpgroups=2)
    return engine.kernel(body, launch, out_type=out_type, scratch_types=scratch)


def of_others(body: Any, out_type: Any, scratch: Any) -> Any:
    return plgpu.kernel(
        body,
        out_type=out_type,
        scratch_types=scratch,
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
        grid=(1,),
        grid_names=("block",),
        cluster=(2,),
        cluster_names=("cluster",),
        num_threads=2,
        thread_name="wg",
    )


def cluster_barrier() -> Any:
    return plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_the_warps_of_a_block_share_the_initialisation_of_its_barriers_and_read_its_rank_in_kernels_of_this_library_alone():
    def found(kernel: Any) -> tuple[int, bool]:
        ptx = aot.compile_for("h200", meeting(kernel, met=cluster_barrier())).ptx
        return ptx.count("mbarrier.init.shared"), "%cluster_ctarank" in ptx

    assert found(of_others) == (19, False)
    assert found(own) == (3, True)  # by each of eight warps
    assert found(of_others) == (19, False)


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_more_barriers_of_a_cluster_than_jax_takes_are_refused_as_ever():
    many = plgpu.ClusterBarrier(collective_axes=("cluster",), num_arrivals=2, num_barriers=40)
    with pytest.raises(NotImplementedError, match="up to 32 barriers"):
        aot.compile_for("h200", own(lambda out, many: None, jax.ShapeDtypeStruct((8,), jnp.int32), {"many": many}))


@pytest.mark.gpu
def test_each_barrier_of_a_block_ends_its_phase_after_its_own_arrivals():
    found = meeting(own, met=cluster_barrier())()
    assert jnp.array_equal(found, jnp.broadcast_to(jnp.arange(1, 19)[:, None], (1, 2, 18, 128)))


@pytest.mark.gpu
def test_the_drivers_descriptors_that_bring_whole_lines_differ_in_that_bit():
    jax.devices()  # the driver is initialised
    encode = ctypes.CDLL("libcuda.so.1").cuTensorMapEncodeTiled
    longs, ints = (ctypes.c_uint64 * 2)(4096, 4096), (ctypes.c_uint32 * 2)
    bfloat16, swizzle_of_128_bytes = 9, 3

    def encoded(promotion: int) -> int:
        memory = (ctypes.c_uint8 * 256)()
        start = -ctypes.addressof(memory) % 64
        descriptor = ctypes.c_void_p(ctypes.addressof(memory) + start)
        shape = longs, (ctypes.c_uint64 * 1)(8192), ints(64, 64), ints(1, 1)
        failed = encode(
            descriptor, bfloat16, 2, ctypes.c_void_p(1 << 30), *shape, 0, swizzle_of_128_bytes, promotion, 0
        )  # an address that nothing reads
        assert not failed
        return int.from_bytes(bytes(memory[start : start + 128]), "little")

    start, bit = jax_patches.PROMOTION
    assert encoded(2) ^ encoded(0) == bit << 8 * start


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_whether_a_layout_can_be_stored_is_found_out_once(monkeypatch):
    asked: list[str] = []

    class Noted(constraints.func.FuncOp):
        def __init__(self, name: str, *args: Any, **kwargs: Any):
            asked.append(name)
            super().__init__(name, *args, **kwargs)

    monkeypatch.setattr(constraints.func, "FuncOp", Noted)
    x = jax.ShapeDtypeStruct((128, 192), jnp.bfloat16)
    counts = []
    for _ in range(2):
        jax.clear_caches()
        with target("h100-sxm"):
            jax.jit(lambda a: mgpu_ops.matmul(a, a.T, backend="mosaic")).trace(x).lower(lowering_platforms=("cuda",))
        counts.append(asked.count("dummy_transfer_test"))
    assert counts[1] == counts[0]
