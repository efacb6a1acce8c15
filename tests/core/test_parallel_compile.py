"""The kernels of a program: lowered once each, compiled once each, all at the same time."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
import threading
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.pallas.mosaic_gpu import lowering
from jax.experimental.mosaic.gpu import core as mosaic
from jax.extend.mlir import passmanager

import mgpu_ops
from mgpu_ops.core import aot, engine, gpu, parallel_compile, ptxas

ROOT = Path(__file__).parents[2]
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
ATTENTION = mgpu_ops.spec_of("flash_attention").Config
X = jax.ShapeDtypeStruct((1, 128, 1, 64), jnp.bfloat16)


def layers(count: int, x: jax.Array) -> jax.Array:
    for _ in range(count):
        x = mgpu_ops.flash_attention(x, x, x, causal=True, backend="mosaic")
    return jnp.sum(x.astype(jnp.float32) ** 2)


def lowered(function: Any, *shapes: Any, devices: int = 1) -> Any:
    context, place = aot.elsewhere("h100-sxm", devices)
    with context:
        return jax.jit(lambda *x: function(*x)).lower(*place(shapes))


# A ptxas that notes each kernel of ours, and begins with the first ones when two of them are there to begin, or after 60 s.
PTXAS = """#!/bin/sh
for file in "$@"; do [ -f "$file" ] && grep -q mgpu_ops_ "$file" && ours=yes; done
if [ "$ours" ]; then
  : > {folder}/$$
  for i in $(seq 600); do [ $(ls {folder} | wc -l) -ge 2 ] && break; sleep 0.1; done
  [ $(ls {folder} | wc -l) -ge 2 ] || : > {folder}/$$.alone
fi
exec {ptxas} "$@"
"""

PROGRAM = """
import json, sys
import jax
from tests.core import test_parallel_compile as this

with this.parallel_compile.ahead(False):
    test = this.lowered(jax.grad(lambda x: this.layers(2, x)), this.X)
before = len(this.parallel_compile.alone(test.compiler_ir("stablehlo")))
test.compile()
print(json.dumps(before))
"""


@needs_compiler
def test_all_kernels_of_a_program_compile_at_the_same_time_and_once(tmp_path):
    real, fake, folder = ptxas.chosen(), tmp_path / "ptxas", tmp_path / "started"
    assert real is not None
    folder.mkdir()
    fake.write_text(PTXAS.format(folder=folder, ptxas=real.path))
    fake.chmod(0o755)
    env = {"JAX_PLATFORMS": "cpu", "MGPU_OPS_PTXAS": str(fake), "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", PROGRAM], cwd=ROOT, env=os.environ | env, capture_output=True, text=True)
    assert done.returncode == 0, done.stderr[-3000:]
    kernels, started = json.loads(done.stdout.splitlines()[-1]), sorted(path.name for path in folder.iterdir())
    assert kernels >= 2
    assert len(started) == kernels, "each kernel once, none alone"


@needs_compiler
def test_kernels_of_a_program_of_several_devices_compile_for_one_of_them(monkeypatch):
    alone: list[bytes] = []
    monkeypatch.setattr(parallel_compile, "_compile", lambda program, backend, device: alone.append(program))
    mesh, spec = jax.sharding.AbstractMesh((2,), ("device",)), jax.sharding.PartitionSpec()
    function = jax.shard_map(jax.grad(functools.partial(layers, 1)), mesh=mesh, in_specs=spec, out_specs=spec)
    monkeypatch.setattr(parallel_compile, "_begun", set())
    program = lowered(function, X, devices=2)
    parallel_compile.wait()
    assert len(set(alone)) == len(alone) == str(program.compiler_ir("stablehlo")).count("kernel_hash") >= 2


class NoCompilerError(Exception):
    pass


@pytest.fixture
def begun(monkeypatch):
    """The programs of kernels that begin to compile. Neither they nor other programs do."""

    def refuse(*_: Any) -> None:
        raise NoCompilerError

    programs: list[bytes] = []
    monkeypatch.setattr(parallel_compile, "_begun", set())
    monkeypatch.setattr(parallel_compile, "_compile", lambda program, backend, device: programs.append(program))
    monkeypatch.setattr(parallel_compile, "_compile_program", refuse)
    return programs


@needs_compiler
def test_a_kernel_begins_to_compile_when_it_is_lowered_and_only_once(begun):
    program = lowered(functools.partial(layers, 2), X)
    parallel_compile.wait()
    assert len(begun) == len(parallel_compile._begun) == 1
    lowered(lambda x: 2 * layers(1, x), X)
    with pytest.raises(NoCompilerError):
        program.compile()
    parallel_compile.wait()
    assert len(begun) == 1


@needs_compiler
def test_kernels_that_were_not_compiled_when_lowered_are_with_their_program(begun):
    with parallel_compile.ahead(False):
        program = lowered(jax.grad(functools.partial(layers, 1)), X)
    assert not begun
    with pytest.raises(NoCompilerError):
        program.compile()
    parallel_compile.wait()
    assert len(set(begun)) == len(begun) >= 2


@needs_compiler
def test_nothing_begins_to_compile_for_an_export_nor_where_a_cache_may_have_the_program(begun, tmp_path):
    with gpu.target("h100-sxm"):
        jax.export.export(jax.jit(functools.partial(layers, 1)), platforms=["cuda"])(X)
    jax.config.update("jax_compilation_cache_dir", str(tmp_path))
    try:
        lowered(functools.partial(layers, 1), X)
    finally:
        jax.config.update("jax_compilation_cache_dir", None)
    parallel_compile.wait()
    assert not begun


@needs_compiler
def test_what_fails_ahead_has_no_say_in_whether_a_program_compiles(monkeypatch):
    def fail(program: bytes, backend: Any, device: Any) -> None:
        raise RuntimeError("no compiler")

    monkeypatch.setattr(parallel_compile, "_begun", set())
    monkeypatch.setattr(parallel_compile, "_compile", fail)
    lowered(functools.partial(layers, 1), X).compile()


def test_threads_end_when_there_is_no_more_to_do_whatever_fails():
    threads, turns, done = parallel_compile.Threads(2), threading.Semaphore(2), []

    def job(number: int) -> None:
        if turns.acquire(blocking=False):  # else there are more than two at the same time
            done.append(number)
            turns.release()
        raise SystemExit if number % 2 else ValueError

    for number in range(20):
        threads.begin(functools.partial(job, number))
    threads.wait()
    assert sorted(done) == list(range(20))


AT_EXIT = """
import functools, time
from mgpu_ops.core import parallel_compile

threads = parallel_compile.Threads(1)
threads.begin(functools.partial(time.sleep, 0.2))
threads.begin(functools.partial(print, "dropped"))
print("end")
"""


def test_a_process_that_ends_drops_what_has_not_begun_to_compile():
    env = os.environ | {"JAX_PLATFORMS": "cpu", "PYTHONPATH": os.pathsep.join([str(ROOT), *sys.path])}
    done = subprocess.run([sys.executable, "-c", AT_EXIT], cwd=ROOT, env=env, capture_output=True, text=True, timeout=60)
    assert done.stdout.splitlines() == ["end"], done.stderr[-3000:]


@needs_compiler
def test_layers_that_are_alike_trace_and_lower_their_kernels_once(monkeypatch):
    traced: list[str] = []
    lowered: list[str] = []
    mark, lower = engine._mark, lowering.lower_unpipelined_jaxpr_to_module

    def note_lowered(mesh: Any, jax_mesh: Any, jaxpr: Any, *args: Any, **options: Any) -> Any:
        lowered.append(jaxpr.debug_info.func_name)
        return lower(mesh, jax_mesh, jaxpr, *args, **options)

    monkeypatch.setattr(engine, "_mark", lambda: (traced.append("a kernel"), mark())[1])
    monkeypatch.setattr(lowering, "lower_unpipelined_jaxpr_to_module", note_lowered)
    shape = jax.ShapeDtypeStruct((1, 192, 1, 64), jnp.bfloat16)  # that no other test has
    with gpu.target("h100-sxm"):
        jax.jit(jax.grad(functools.partial(layers, 4))).trace(shape).lower(lowering_platforms=("cuda",))
    assert "mgpu_ops_flash_attention" in lowered
    assert len(set(lowered)) == len(lowered) == len(traced)


@needs_compiler
def test_a_kernel_is_simplified_before_mosaic_does_it(monkeypatch):
    changed: list[bool] = []
    serialize = mosaic._run_serde_pass

    def compared(module: Any, **options: Any) -> Any:
        before = str(module)
        again = module.operation.clone(ip=False)
        with module.context:
            passes = passmanager.PassManager.parse("builtin.module(canonicalize)")
            passes.enable_verifier(False)
            passes.run(again)
        changed.append(str(again) != before)
        return serialize(module, **options)

    monkeypatch.setattr(mosaic, "_run_serde_pass", compared)
    lowered(jax.grad(functools.partial(layers, 1)), X)
    assert changed
    assert not any(changed)
