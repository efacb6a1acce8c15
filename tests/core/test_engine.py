"""The engine without an op: kernels in the interpreter, races, and what `mgpu_ops.core` offers."""

from __future__ import annotations

import contextlib
import functools
import io
import os
import subprocess
import sys
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops.core import aot, engine
from tests.arrays import normal

INT32 = jax.ShapeDtypeStruct((128,), jnp.int32)


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """Each test starts with no kernel interpreted; the race detector's pages go nowhere."""
    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    engine.reset_interpreter()


def interpreted(
    body: Any,
    *,
    out_type: Any = INT32,
    scratch_types: Any = (),
    blocks: int = 1,
    warpgroups: int = 1,
    interpret: bool = True,
) -> Any:
    launch = engine.Launch("test", {"block": blocks}, warpgroups=warpgroups, interpret=interpret)
    return engine.kernel(body, launch, out_type=out_type, scratch_types=dict(scratch_types))


def handover(*, ordered: bool) -> Any:
    """Warpgroup 0 fills a buffer in shared memory, warpgroup 1 adds one and stores it."""

    def body(out_ref: Any, *, smem: Any, full: Any) -> None:
        @pl.when(lax.axis_index("wg") == 0)
        def _() -> None:
            smem[...] = jnp.full(128, 7, jnp.int32)
            engine.barrier_arrive(full)

        @pl.when(lax.axis_index("wg") == 1)
        def _() -> None:
            if ordered:
                plgpu.barrier_wait(full)
            smem[...] = smem[...] + 1
            out_ref[...] = smem[...]
            if not ordered:
                plgpu.barrier_wait(full)

    scratch = {"smem": plgpu.SMEM((128,), jnp.int32), "full": plgpu.Barrier()}
    return interpreted(body, scratch_types=scratch, warpgroups=2)


def has_a_race(kernel: Any) -> bool:
    """Up to jax 0.11 the interpreter notes a race and goes on, from 0.12 it raises."""
    try:
        kernel().block_until_ready()
    except jax.errors.JaxRuntimeError as error:
        return "RACE DETECTED" in str(error)
    return engine.races_found()


def test_detector_is_silent_where_a_barrier_orders_two_warpgroups():
    out = handover(ordered=True)()
    np.testing.assert_array_equal(out, np.full(128, 8))
    assert not engine.races_found()


def test_detector_finds_two_warpgroups_that_share_a_buffer_without_a_barrier():
    assert has_a_race(handover(ordered=False))


def test_a_clean_kernel_after_a_race_is_judged_alone():
    assert has_a_race(handover(ordered=False))
    engine.reset_interpreter()
    assert not has_a_race(handover(ordered=True))


def test_asking_for_races_before_any_kernel_ran_is_an_error():
    with pytest.raises(RuntimeError, match="no kernel was interpreted"):
        engine.races_found()


def test_interpreter_works_again_after_a_kernel_failed_in_it_and_a_reset():
    def reads_beyond_its_array(x_ref: Any, out_ref: Any) -> None:
        out_ref[...] = x_ref[pl.ds(lax.axis_index("block") + 64, 128)]

    with pytest.raises(Exception, match=r"[Oo]ut.of.bounds"):
        interpreted(reads_beyond_its_array)(jnp.zeros(128, jnp.int32)).block_until_ready()
    engine.reset_interpreter()
    np.testing.assert_array_equal(handover(ordered=True)(), np.full(128, 8))


def test_another_kernel_adds_to_a_constant_output_inside_shard_map():
    """On one device. Any other output varies over the mesh, and JAX refuses refs of arrays that do."""

    def makes_zeros(x_ref: Any, copy_ref: Any, zeros_ref: Any) -> None:
        copy_ref[...] = x_ref[...]
        zeros_ref[...] = jnp.zeros(128, jnp.int32)

    def adds(sum_ref: Any, x_ref: Any, copy_ref: Any) -> None:
        sum_ref[...] = sum_ref[...] + x_ref[...]
        copy_ref[...] = x_ref[...]

    def first(constant: tuple[int, ...], x: jax.Array) -> tuple[jax.Array, jax.Array]:
        launch = engine.Launch("test", {"block": 1}, warpgroups=1, interpret=True)
        return engine.kernel(makes_zeros, launch, out_type=(INT32, INT32), scratch_types={}, constant=constant)(x)

    def both(constant: tuple[int, ...], x: jax.Array) -> jax.Array:
        copy, zeros = first(constant, x)
        total = jax.new_ref(zeros)
        copy = interpreted(adds)(total, copy)
        return engine.frozen(total, copy)

    mesh = jax.make_mesh((1,), ("d",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    x, spec = jnp.arange(128, dtype=jnp.int32), PartitionSpec("d")
    run = functools.partial(jax.shard_map, mesh=mesh, in_specs=spec, out_specs=spec)
    np.testing.assert_array_equal(jax.jit(run(functools.partial(both, (1,))))(x), x)
    with pytest.raises(ValueError, match="does not support Refs with varying"):
        jax.jit(run(functools.partial(both, ())))(x)


FEW_THREADS = """
import os, jax, jax.numpy as jnp, numpy as np
os.sched_setaffinity(0, sorted(os.sched_getaffinity(0))[:1])
x = jnp.arange(2 * 128 * 64, dtype=jnp.bfloat16).reshape(2, 128, 64) % 8 - 3  # JAX has its CPU client from here on
import mgpu_ops
from jax.sharding import PartitionSpec as P
y = mgpu_ops.matmul(x[0], x[1].T, out_dtype=jnp.float32, backend="interpret")
np.testing.assert_array_equal(y, np.asarray(x[0], np.float32) @ np.asarray(x[1], np.float32).T)
each = lambda x: mgpu_ops.all_reduce(x, "d", backend="interpret")
mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,))
z = jax.jit(jax.shard_map(each, mesh=mesh, in_specs=P("d"), out_specs=P("d"), check_vma=False))(x)
np.testing.assert_array_equal(z[0], x[0] + x[1])
assert not mgpu_ops.core.engine.races_found()
"""


@pytest.mark.skipif(not hasattr(os, "sched_setaffinity"), reason="needs a system that can keep a process to one core")
@pytest.mark.parametrize("nproc", [None, "1"])
def test_the_interpreter_needs_no_more_than_one_core_and_no_setting(nproc):
    """It takes four CPU threads for a matmul of three warpgroups; JAX has made its own for one core, or two devices."""
    environment = {k: v for k, v in os.environ.items() if k not in ("NPROC", "XLA_FLAGS")} | {"JAX_PLATFORMS": "cpu"}
    environment |= {"XLA_FLAGS": "--xla_force_host_platform_device_count=2"} | ({"NPROC": nproc} if nproc else {})
    result = subprocess.run([sys.executable, "-c", FEW_THREADS], capture_output=True, text=True, env=environment, timeout=300)
    assert result.returncode == 0, result.stderr


def test_one_body_launched_with_two_grids_runs_each_grid():
    """A shared function object kept the first grid in jax 0.11.0 to 0.11.2 (jax#40847)."""

    def body(out_ref: Any) -> None:
        block = lax.axis_index("block")
        out_ref[pl.ds(block * 128, 128)] = jnp.full(128, block + 1, jnp.int32)

    for blocks in (2, 4, 3):
        out_type = jax.ShapeDtypeStruct((blocks * 128,), jnp.int32)
        out = interpreted(body, blocks=blocks, out_type=out_type)()
        np.testing.assert_array_equal(out, np.repeat(np.arange(1, blocks + 1), 128))


@pytest.mark.parametrize("transposed", [False, True])
def test_wgmma_adds_into_an_accumulator_that_starts_at_zero(transposed):
    def body(a_ref: Any, b_ref: Any, out_ref: Any, *, a: Any, b: Any, acc: Any, full: Any) -> None:
        for ref, buffer in ((a_ref, a), (b_ref, b)):
            engine.copy_gmem_to_smem(ref, buffer, full)
        plgpu.barrier_wait(full)

        def multiply(acc: Any) -> None:
            for _ in range(2):  # twice: it adds
                engine.wgmma(acc, a, engine.transpose_ref(b) if transposed else b)
                engine.wgmma_wait(0)
            out_ref[...] = acc[...]

        acc.scope(multiply)

    x, y = (normal(seed, 64, 64, dtype="bfloat16") for seed in (0, 1))
    tile = plgpu.SMEM((64, 64), jnp.bfloat16, transforms=engine.operand_transforms(64, jnp.bfloat16))
    scratch = {
        "a": tile,
        "b": tile,
        "acc": engine.Accumulators(((64, 64),), 1),
        "full": plgpu.Barrier(num_arrivals=2),
    }
    out_type = jax.ShapeDtypeStruct((64, 64), jnp.float32)
    out = interpreted(body, scratch_types=scratch, out_type=out_type)(x, y)
    wanted = 2 * np.asarray(x, np.float64) @ np.asarray(y.mT if transposed else y, np.float64)
    np.testing.assert_allclose(out, wanted, rtol=1e-5, atol=1e-4)
    assert not engine.races_found()


def two_products(*, interpret: bool) -> Any:
    """A function of x[64, 64]: half of the columns of x x^T, added to ones; and x (2 y + z) of its halves y and z."""

    def body(x_ref: Any, sum_ref: Any, out_ref: Any, *, x: Any, staged: Any, accs: Any, full: Any) -> None:
        engine.copy_gmem_to_smem(x_ref, x, full)
        plgpu.barrier_wait(full)

        def multiply(first: Any, second: Any) -> None:
            engine.wgmma(first, x, engine.transpose_ref(x))
            engine.wgmma(second, plgpu.load(x, layout=plgpu.Layout.WGMMA, optimized=False), x.at[:, pl.ds(0, 32)])
            staged[0] = engine.accumulated(first, 1)[:, :32]  # the second product may still go on
            second[...] = engine.accumulated(second, 0) * 2.0
            engine.wgmma(second, x, x.at[:, pl.ds(32, 32)])
            staged[1] = engine.accumulated(second, 0)
            plgpu.commit_smem()
            engine.add_tile(staged.at[0], sum_ref)
            plgpu.copy_smem_to_gmem(staged.at[1], out_ref)
            plgpu.wait_smem_to_gmem(0)

        accs.scope(multiply)

    half = engine.operand_transforms(32, jnp.bfloat16)  # panels of 32 columns, which is as wide as a product below
    scratch = {
        "x": plgpu.SMEM((64, 64), jnp.bfloat16, transforms=half),
        "staged": plgpu.SMEM((2, 64, 32), jnp.float32, transforms=engine.operand_transforms(32, jnp.float32)),
        "accs": engine.Accumulators(((64, 64), (64, 32)), 1),
        "full": plgpu.Barrier(),
    }
    out = jax.ShapeDtypeStruct((64, 32), jnp.float32)
    run = interpreted(body, scratch_types=scratch, out_type=out, interpret=interpret)

    def launch(x: jax.Array) -> tuple[jax.Array, jax.Array]:
        total = jax.new_ref(jnp.ones((64, 32), jnp.float32))
        out = run(x, total)
        return jax.freeze(total), out

    return launch


def test_an_accumulator_can_be_read_before_the_others_products_are_done_and_be_set():
    x = normal(0, 64, 64, dtype="bfloat16")
    total, out = two_products(interpret=True)(x)
    y = np.asarray(x, np.float64)
    np.testing.assert_allclose(total, (y @ y.T)[:, :32], rtol=1e-5, atol=1e-4)  # not added to: see `add_tile`
    np.testing.assert_allclose(out, 2 * y @ y[:, :32] + y @ y[:, 32:], rtol=1e-5, atol=1e-4)
    assert not engine.races_found()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_tiles_are_added_in_global_memory_by_tma():
    report = aot.compile_for("h200", two_products(interpret=False), jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
    assert report.ptx.count("cp.reduce.async.bulk.tensor") == 1
    assert ".add" in report.ptx
    assert (report.spills, report.serialized) == (0, "")


@pytest.mark.parametrize(
    ("minor", "dtype", "swizzle", "wanted"),
    [
        (64, jnp.bfloat16, None, (64, 128)),
        (128, jnp.float16, None, (64, 128)),
        (32, jnp.bfloat16, None, (32, 64)),
        (96, jnp.bfloat16, None, (32, 64)),
        (64, jnp.bfloat16, 64, (32, 64)),
        (32, jnp.float32, None, (32, 128)),
        (16, jnp.bfloat16, None, (16, 32)),
    ],
)
def test_operand_transforms_take_the_largest_swizzle_of_a_row(minor, dtype, swizzle, wanted):
    row, swizzle_bytes = wanted
    assert engine.operand_transforms(minor, dtype, swizzle) == (
        plgpu.TilingTransform((8, row)),
        plgpu.SwizzleTransform(swizzle_bytes),
    )


def test_more_shared_memory_than_a_gpu_has_is_an_error_when_lowered():
    def body(out_ref: Any, *, smem: Any) -> None:
        smem[...] = jnp.zeros(smem.shape, jnp.float32)
        out_ref[...] = smem[0].astype(jnp.int32)

    scratch = {"smem": plgpu.SMEM((512, 128), jnp.float32)}
    launch = jax.jit(interpreted(body, scratch_types=scratch, interpret=False))
    with pytest.raises(ValueError, match=r"[Ss]hared memory|SMEM|smem"):
        launch.trace().lower(lowering_platforms=("cuda",))


def test_importing_mgpu_ops_does_not_import_pallas():
    code = (
        "import sys, mgpu_ops; assert not [m for m in sys.modules if 'pallas' in m];"
        "import mgpu_ops.core.engine; assert 'jax.experimental.pallas' in sys.modules"
    )
    result = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True)
    assert result.returncode == 0, result.stderr


def test_a_compiled_kernels_cluster_has_one_axis():
    launch = engine.Launch("mgpu_ops_test", {"block": 1}, warpgroups=1, cluster={"row": 2, "column": 2})
    with pytest.raises(ValueError, match=r"cluster=\{'row': 2, 'column': 2\} must have one axis"):
        engine.kernel(lambda out: None, launch, out_type=jax.ShapeDtypeStruct((8,), jnp.float32), scratch_types={})
