import dataclasses
import os
import pathlib
import subprocess
import sys
import threading

import jax
import jax.experimental.pallas as pl
import jax.experimental.pallas.mosaic_gpu as plgpu
import jax.numpy as jnp
import pytest
from jax.sharding import AbstractMesh, AxisType, NamedSharding, PartitionSpec

from mgpu_ops.core import aot, gpu

ROOT = pathlib.Path(aot.__file__).resolve().parents[1]
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

TILE = jax.ShapeDtypeStruct((64, 64), jnp.bfloat16)


def matmul(a, b):
    """One block, one warpgroup, one wgmma: the least that uses TMA, the tensor cores and SMEM."""
    (m, k), (_, n) = a.shape, b.shape
    tiled = (plgpu.TilingTransform((8, 64)), plgpu.SwizzleTransform(128))

    def body(a_gmem, b_gmem, out_gmem, a_smem, b_smem, out_smem, arrived):
        plgpu.copy_gmem_to_smem(a_gmem, a_smem, arrived)
        plgpu.copy_gmem_to_smem(b_gmem, b_smem, arrived)
        plgpu.barrier_wait(arrived)

        def multiply(acc):
            plgpu.wgmma(acc, a_smem, b_smem)
            return acc[...]

        out = pl.run_scoped(multiply, plgpu.ACC((m, n), jnp.float32))
        out_smem[...] = out.astype(jnp.bfloat16)
        plgpu.commit_smem()
        plgpu.copy_smem_to_gmem(out_smem, out_gmem)
        plgpu.wait_smem_to_gmem(0)

    return plgpu.kernel(
        body,
        out_type=jax.ShapeDtypeStruct((m, n), jnp.bfloat16),
        scratch_types=[
            *(plgpu.SMEM(s, jnp.bfloat16, transforms=tiled) for s in [(m, k), (k, n), (m, n)]),
            plgpu.Barrier(num_arrivals=2),
        ],
        compiler_params=plgpu.CompilerParams(lowering_semantics=plgpu.LoweringSemantics.Warpgroup),
    )(a, b)


def shapes(m, n, k):
    return jax.ShapeDtypeStruct((m, k), jnp.bfloat16), jax.ShapeDtypeStruct((k, n), jnp.bfloat16)


@needs_compiler
def test_the_shared_memory_of_a_kernel_whose_constants_are_named_after_its_place():
    import mgpu_ops

    batch = jax.ShapeDtypeStruct((2, 64, 64), jnp.bfloat16)
    report = aot.compile_for("h200", lambda a, b: mgpu_ops.matmul(a, b, backend="mosaic"), batch, batch)
    assert report.smem_bytes > 2 * 64 * 64 * 2


@needs_compiler
def test_the_report_of_a_wgmma_kernel():
    report = aot.compile_for("h200", matmul, TILE, TILE)
    (kernel,) = report.kernels
    assert report.gpu == gpu.find("h200")
    assert "HGMMA.64x64x16.F32.BF16" in report.sass
    assert "wgmma.mma_async" in report.ptx
    assert ".target sm_90a" in report.ptx
    assert report.smem_bytes == 3 * 64 * 64 * 2 + 8  # three tiles and an mbarrier
    assert 32 < report.registers <= 255  # the accumulator alone takes 32
    assert report.spills == 0
    assert report.barriers >= 1
    assert f".entry {kernel.name}" in kernel.ptx


@needs_compiler
def test_an_accumulator_beyond_the_register_file_spills():
    report = aot.compile_for("h200", matmul, *shapes(192, 256, 64))  # 384 of 255 registers
    (kernel,) = report.kernels
    assert report.registers == 255
    assert kernel.spill_stores > 0
    assert report.spills == kernel.spill_stores + kernel.spill_loads


def test_a_report_says_where_ptxas_lets_no_two_wgmma_overlap_and_is_silent():
    ptx = "wgmma.mma_async\n" * 4 + "wgmma.commit_group\n"
    one, last = "HGMMA.64x16x16.F32.BF16 R32, R24, gdesc[UR20], R32", ", gsb0"
    together = [one, one, one, one + last]
    apart = [one + last] * 4
    assert aot._serialized_unsaid(ptx, "\n".join(together)) == ""
    assert aot._serialized_unsaid(ptx, "\n".join(together * 2)) == ""  # a loop unrolled
    assert "4 of 4 wgmma end a group of their own" in aot._serialized_unsaid(ptx, "\n".join(apart))
    assert aot._serialized_unsaid("", "") == ""


SERIALIZED = "wgmma.mma_async instructions are serialized due to {} {} function 'attend'"


@pytest.mark.parametrize(
    ("lines", "where"),
    [
        ([], "in"),
        (
            ["non wgmma instructions defining accumulator registers of a wgmma between start and end of the pipeline stage"],
            "in",
        ),
        (["insufficient register resources for the wgmma pipeline", "the presence of Extern calls"], "in the"),
        (["insufficient register resources"], "for the"),
    ],
)
def test_a_report_says_why_ptxas_lets_no_two_wgmma_overlap(tmp_path, lines, where):
    log = ["ptxas info    : Compiling entry function 'attend' for 'sm_90a'"]
    log += [f"ptxas info    : (C7510) Potential Performance Loss: {SERIALIZED.format(line, where)}" for line in lines]
    log += [
        "ptxas info    : 0 bytes stack frame, 16 bytes spill stores, 8 bytes spill loads",
        "ptxas info    : Used 168 registers",
    ]
    files = {
        ".ptx": "",
        ".ptxas": "\n".join(log),
        ".sass_ctrl": "",
        ".mlir-passes.log": "%c_i32 = arith.constant 1024 : i32\ndynamic_shared_memory_size %c_i32 {",
    }
    for suffix, text in files.items():
        (tmp_path / f"kernel{suffix}").write_text(text)
    kernel = aot._kernel(tmp_path / "kernel.ptx")
    assert kernel.serialized == "; ".join(lines)
    assert aot.Report(gpu.find("h200"), (kernel, kernel)).serialized == kernel.serialized
    assert (kernel.name, kernel.registers, kernel.spill_stores, kernel.spill_loads) == ("attend", 168, 16, 8)


@needs_compiler
def test_the_same_function_compiles_again_in_full_for_the_same_and_for_another_gpu():
    jitted = jax.jit(matmul)
    first, again, other = (aot.compile_for(key, jitted, TILE, TILE) for key in ("h200", "h200", "h20"))
    assert first.sass
    assert dataclasses.replace(other, gpu=first.gpu) == again == first


@needs_compiler
def test_every_distinct_kernel_is_reported_beside_what_xla_compiles():
    def f(pair, c):
        a, b = pair["a"], pair["b"]
        return matmul(a, b) + matmul(b, a) + jax.nn.softmax(a @ b), matmul(c, c)

    wide = jax.ShapeDtypeStruct((128, 128), jnp.bfloat16)
    report = aot.compile_for("h200", f, {"a": jnp.ones((64, 64), jnp.bfloat16), "b": TILE}, wide)
    assert [kernel.smem_bytes for kernel in report.kernels] == [24584, 98312]
    assert report.smem_bytes == 98312
    assert report.registers == max(kernel.registers for kernel in report.kernels)
    assert report.sass.count("EXIT") >= 2


@needs_compiler
def test_a_function_without_kernels_has_an_empty_report():
    report = aot.compile_for("h200", lambda x: x + 1, TILE)
    assert report.kernels == ()
    assert (report.registers, report.spills, report.smem_bytes, report.sass) == (0, 0, 0, "")


@needs_compiler
def test_code_that_asks_for_the_gpu_sees_the_target():
    def f(x):
        return jnp.broadcast_to(x, (gpu.current().sms, *x.shape))

    seen = []
    for key in ("h20", "h100-pcie"):
        aot.compile_for(key, lambda x: seen.append(f(x).shape[0]) or x, TILE)
    assert seen == [78, 114]


@needs_compiler
@pytest.mark.parametrize("axes", [AxisType.Auto, AxisType.Explicit])
def test_a_kernel_under_shard_map_compiles_for_several_gpus(axes):
    mesh = AbstractMesh((4,), ("x",), axis_types=(axes,))
    rows, whole = PartitionSpec("x"), PartitionSpec()

    def f(a, b):
        shard = jax.shard_map(
            lambda a, b: jax.lax.psum(matmul(a, b), "x"),
            mesh=mesh,
            in_specs=(rows, whole),
            out_specs=whole,
            check_vma=False,
        )
        return shard(a, b)

    a, b = (
        jax.ShapeDtypeStruct(shape, jnp.bfloat16, sharding=NamedSharding(mesh, spec))
        for shape, spec in [((256, 64), rows), ((64, 64), whole)]
    )
    (kernel,) = aot.compile_for("h200", f, a, b, devices=4).kernels
    assert kernel.smem_bytes == 24584  # of a 64x64 shard, not of the 256 rows


@needs_compiler
def test_the_compilers_own_error_comes_out_and_nothing_is_left_set(monkeypatch, tmp_path):
    monkeypatch.setenv("MOSAIC_GPU_DUMP_TO", str(tmp_path))
    before = dict(os.environ)
    with pytest.raises(ValueError, match="smem"):
        aot.compile_for("h200", matmul, *shapes(256, 256, 256))
    with pytest.raises(ZeroDivisionError):
        aot.compile_for("h200", lambda x: x / (1 // 0), TILE)
    assert dict(os.environ) == before
    assert not list(tmp_path.iterdir())
    assert gpu.current() is None


@needs_compiler
def test_threads_take_turns():
    reports = {}

    def work(n):
        reports[n] = aot.compile_for("h200", matmul, *shapes(64, n, 64))

    threads = [threading.Thread(target=work, args=(n,)) for n in (64, 128)]
    for thread in threads:
        thread.start()
    for thread in threads:
        thread.join()
    assert {n: report.smem_bytes for n, report in reports.items()} == {n: 2 * (64 * 64 + 2 * 64 * n) + 8 for n in (64, 128)}


def test_another_architecture_in_the_same_process_is_refused(monkeypatch):
    monkeypatch.setattr(aot, "available", lambda: None)
    monkeypatch.setattr(aot, "_claimed", [(9, 0)])
    with pytest.raises(RuntimeError, match=r"NVIDIA B200 .* 10\.0.* 9\.0.*new process"):
        aot.compile_for("b200", lambda x: x, TILE)


def test_an_unknown_gpu_is_refused():
    with pytest.raises(ValueError, match="gpu='h300'"):
        aot.compile_for("h300", lambda x: x, TILE)


@pytest.mark.parametrize(
    ("name", "value", "missing"),
    [
        ("_plugin", None, "JAX's CUDA plugin"),
        ("_cuda_root", pathlib.Path("/nowhere"), "ptxas, nvdisasm"),
    ],
)
def test_what_is_missing_is_named_with_the_extra_to_install(monkeypatch, name, value, missing):
    monkeypatch.setattr(aot, name, lambda: value)
    assert missing in aot.available()
    with pytest.raises(aot.AotUnavailable, match=r"pip install '\.\[aot\]'` in a checkout"):
        aot.compile_for("h200", lambda x: x, TILE)


def run(program, **variables):
    env = {k: v for k, v in os.environ.items() if not k.startswith(("JAX_", "XLA_", "MOSAIC_"))}
    command = [sys.executable, "-c", program]
    subprocess.run(command, check=True, cwd=ROOT, env=env | variables, timeout=600)


@needs_compiler
def test_no_environment_variable_is_needed_even_after_jax_has_started():
    run("""
import logging; logging.disable()  # JAX reports the CUDA libraries that this machine lacks
import jax, jax.numpy as jnp
cpu = jax.devices()
from mgpu_ops.core import aot
aot.compile_for("h200", lambda x: x @ x, jax.ShapeDtypeStruct((64, 64), jnp.bfloat16))
assert jax.devices() == cpu and jnp.ones(2).sum() == 2
""")


@needs_compiler
def test_the_persistent_compilation_cache_is_not_filled_and_works_afterwards(tmp_path):
    program = """
import os, jax, jax.numpy as jnp
from mgpu_ops.core import aot
x = jnp.ones(64)
filled = set(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"]))
aot.compile_for("h200", lambda x: x * 3, x)
assert set(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])) == filled
jax.jit(lambda x: x * 3)(x)
assert set(os.listdir(os.environ["JAX_COMPILATION_CACHE_DIR"])) > filled
"""
    run(
        program,
        JAX_PLATFORMS="cpu",
        JAX_COMPILATION_CACHE_DIR=str(tmp_path),
        JAX_PERSISTENT_CACHE_MIN_COMPILE_TIME_SECS="0",
    )


def test_importing_gpu_and_aot_starts_no_backend():
    run("""
import mgpu_ops.core.aot
from jax._src import xla_bridge
assert not xla_bridge.backends_are_initialized()
""")


@needs_compiler
def test_a_process_that_compiles_for_a_described_gpu_first_registers_the_plugin_once(tmp_path):
    """JAX prints a traceback where it registers a second time."""
    described = tmp_path / "topology"
    described.write_bytes(aot._topology(gpu.find("h200"), 1).serialize())
    program = f"""
import jax, pathlib
from mgpu_ops.core import aot
aot._described(pathlib.Path({str(described)!r}).read_bytes())
assert jax.devices()[0].platform == "cpu"
"""
    done = subprocess.run(
        [sys.executable, "-c", program],
        cwd=ROOT,
        env=os.environ | {"JAX_PLATFORMS": "cpu"},
        capture_output=True,
        text=True,
        timeout=600,
    )
    assert (done.returncode, done.stderr) == (0, "")
