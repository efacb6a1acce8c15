"""`mgpu-tune compile`: what a user's program runs, compiled for a GPU that is not here."""

from __future__ import annotations

import dataclasses
import json
import re
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax.numpy as jnp
import msgspec
import pytest

import mgpu_ops
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import database

Command = Callable[..., Any]
AVAILABLE = aot.available()  # `mgpu_tune` hides it
needs_compiler = pytest.mark.skipif(AVAILABLE is not None, reason=str(AVAILABLE))

PROGRAM = """
import jax
import jax.numpy as jnp
import mgpu_ops

def layer(x, w):
    return mgpu_ops.matmul(x, w), None

def step():
    x, ws = jnp.ones((256, 256), jnp.bfloat16), jnp.ones((3, 256, 256), jnp.bfloat16)
    return jax.lax.scan(layer, x, ws)[0], mgpu_ops.matmul(jnp.ones((8, 8)), jnp.ones((8, 8)), out_dtype="float16")
"""
KERNEL = aot.CompiledKernel("mgpu_ops_matmul_kernel", 168, 0, 0, "", 1, 2048, "", "")


@pytest.fixture
def program(tmp_path: Path, monkeypatch: pytest.MonkeyPatch, mgpu_tune: Command) -> None:
    """A user's program in the folder in which the command runs, and a compiler."""
    (tmp_path / "program.py").write_text(PROGRAM)
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "path", list(sys.path))
    monkeypatch.delitem(sys.modules, "program", raising=False)
    monkeypatch.setattr(aot, "available", lambda: None)


@pytest.fixture
def compiles(monkeypatch: pytest.MonkeyPatch) -> Callable[..., None]:
    """Makes every kernel compile to `KERNEL` with these changes, and the whole program; or raise what it is given."""

    def set_to(error: Exception | None = None, whole: Exception | None = None, **changes: Any) -> None:
        def compile_for(on: gpu.Gpu, *_: Any, **__: Any) -> aot.Report:
            if error is not None:
                raise error
            return aot.Report(on, (dataclasses.replace(KERNEL, **changes),))

        def whole_program(*_: Any) -> aot.Program:
            if whole is not None:
                raise whole
            return aot.Program(1, 2**20, 2**21, 0)

        monkeypatch.setattr(aot, "compile_for", compile_for)
        monkeypatch.setattr(aot, "program", whole_program)

    return set_to


def store(path: Path) -> Path:
    """A measured entry for the program's problem."""
    spec, h200, problem = mgpu_ops.spec_of("matmul"), gpu.find("h200"), mgpu_ops.MatmulProblem(256, 256, 256)
    evidence = database.Evidence(
        kind="measured", gpu=h200.name, driver="1.2", jax="0.11.2", jaxlib="0.11.2", cuda="13000", kernel_version=spec.version,
        median_us=12.5, spread_us=0.5, default_us=15.0, baseline="xla", baseline_us=25.0, error=0.001, trials=48, seed=0,
        date="2025-11-20",
    )  # fmt: skip
    entry = database.to_entry(problem, spec.default(problem, h200), evidence)
    database.update(path, [entry], gpu_key="h200", op="matmul")
    return path


@needs_compiler
def test_compile_tells_of_each_kernel_what_came_out_and_of_the_program_what_it_takes(program: None, mgpu_tune: Command) -> None:
    done = mgpu_tune("compile", "program:step", "--gpu", "h100-sxm", "--json")
    assert done.code == 0, done.err
    assert "program:step for NVIDIA H100 80GB HBM3: 1 problem, the longest first" in done.err
    assert "3 x matmul 256x256x256 bfloat16 nn: " in done.err
    assert "1 x matmul 8x8x8 float32->float16 nn algorithm=tf32: runs through XLA: out_dtype" in done.err
    assert "the whole program compiles: 1 launch of our kernels in its text" in done.err
    told = json.loads(done.out)
    (matmul,) = told["kernels"]
    assert (told["gpu"], matmul["op"], matmul["count"], matmul["error"]) == ("h100-sxm", "matmul", 3, None)
    problem = mgpu_ops.MatmulProblem(256, 256, 256)
    h100, spec = gpu.find("h100-sxm"), mgpu_ops.spec_of("matmul")
    assert matmul["problem"] == dataclasses.asdict(problem)
    config = spec.Config(**matmul["config"])
    assert matmul["us"] == pytest.approx(spec.cost(problem, config, h100) * 1e6)
    (kernel,) = matmul["kernels"]
    assert kernel["name"].startswith("mgpu_ops_matmul")
    assert 32 <= kernel["registers"] <= 255
    assert mgpu_ops.matmul(jnp.ones((8, 8)), jnp.ones((8, 8))).shape == (8, 8)  # this process goes on
    assert kernel["smem_bytes"] <= h100.smem_per_block
    assert told["program"]["launches"] == 1
    assert 256 * 256 * 2 + 8 * 8 * 2 <= told["program"]["output_bytes"] < 2**18  # XLA adds its tuple of results


def test_compile_says_where_a_config_comes_from(program: None, compiles: Callable[..., None], mgpu_tune: Command) -> None:
    compiles()
    done = mgpu_tune("compile", "program:step", "--gpu", "h200")
    assert done.code == 0
    assert re.search(r"memory_registers=40 .*\(default\)\n", done.out)
    assert "mgpu_ops_matmul_kernel: 168 registers, no spills, 2.0 KiB of shared memory" in done.out
    path = store(database.user_path("h200", "matmul"))
    assert f"(user, {path})" in mgpu_tune("compile", "program:step").out


def test_the_sum_of_kernels_leaves_out_what_runs_xla(
    program: None, compiles: Callable[..., None], mgpu_tune: Command, tmp_path: Path
) -> None:
    compiles()
    (tmp_path / "program.py").write_text(
        PROGRAM
        + "    # and\n"
        + """
def both():
    y = mgpu_ops.matmul(jnp.ones((256, 128), jnp.bfloat16), jnp.ones((128, 128), jnp.bfloat16))
    return step(), y
"""
    )
    path = store(database.user_path("h200", "matmul"))
    slow, spec, h200 = mgpu_ops.MatmulProblem(256, 128, 128), mgpu_ops.spec_of("matmul"), gpu.find("h200")
    evidence = msgspec.structs.replace(database.read(path).entries[0].evidence, baseline_us=10.0)
    database.update(path, [database.to_entry(slow, spec.default(slow, h200), evidence)], gpu_key="h200", op="matmul")
    done = mgpu_tune("compile", "program:both", "--gpu", "h200", "--json")
    assert done.code == 0, done.err
    kernels = {kernel["runs"]: kernel for kernel in json.loads(done.out)["kernels"]}
    assert sorted(kernels) == ["kernel", "xla"]
    us = kernels["kernel"]["count"] * kernels["kernel"]["us"]
    assert f"in all {us:.1f} us of kernels by the ops' models, without 1 problem that runs XLA" in done.err
    assert f"         a call runs XLA: kernel {evidence.median_us:.4g} us, xla 10 us, measured; " in done.err
    done = mgpu_tune("compile", "program:step", "--gpu", "h200")
    assert done.out.count("of kernels by the ops' models\n") == 1


def test_a_kernel_that_does_not_compile_is_told_with_a_way_out(
    program: None, compiles: Callable[..., None], mgpu_tune: Command
) -> None:
    compiles(error=ValueError("too much shared memory\nand more"))
    done = mgpu_tune("compile", "program:step")
    assert (done.code, done.err) == (1, "")
    assert "does not compile: ValueError: too much shared memory\n" in done.out
    assert "mgpu-tune capture program:step --output problems.json && mgpu-tune run --from problems.json" in done.out
    assert "backend='xla'" in done.out


def test_a_program_that_does_not_compile_though_its_kernels_do(
    program: None, compiles: Callable[..., None], mgpu_tune: Command
) -> None:
    compiles(whole=RuntimeError("no cuDNN here"))
    done = mgpu_tune("compile", "program:step")
    assert (done.code, done.err) == (1, "")
    assert "the whole program does not compile: RuntimeError: no cuDNN here" in done.out


@pytest.mark.parametrize(
    ("changes", "told"),
    [
        ({"spill_stores": 8, "spill_loads": 8}, "16 bytes a thread spilled"),
        ({"spill_stores": 8, "spill_loads": 8}, "it runs, but slowly: it spills registers. Tune it: mgpu-tune capture"),
        ({"serialized": "a call"}, "it runs, but slowly: ptxas serialises its tensor cores (a call)."),
    ],
)
def test_a_slow_kernel_is_told_and_is_no_fault(
    changes: dict[str, Any], told: str, program: None, compiles: Callable[..., None], mgpu_tune: Command
) -> None:
    compiles(**changes)
    done = mgpu_tune("compile", "program:step")
    assert done.code == 0
    assert told in done.out


def test_a_config_of_the_environment_is_not_tuned_away(
    program: None, compiles: Callable[..., None], mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch, tmp_path: Path
) -> None:
    path = store(tmp_path / "own.json")
    monkeypatch.setenv("MGPU_OPS_CONFIG_PATH", str(path))
    compiles(error=ValueError("no"))
    done = mgpu_tune("compile", "program:step")
    assert done.code == 1
    assert f"Name another config than that of {path}" in done.out


def test_compile_without_a_compiler_says_what_to_install(
    program: None, mgpu_tune: Command, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(aot, "available", lambda: "compiling without a GPU needs ptxas: pip install it")
    done = mgpu_tune("compile", "program:step")
    assert done.code == 2
    assert done.err == "mgpu-tune: compiling without a GPU needs ptxas: pip install it\n"
