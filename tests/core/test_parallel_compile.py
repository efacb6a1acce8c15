"""The kernels of a program: lowered once each, compiled once each, all at the same time."""

from __future__ import annotations

import functools
import json
import os
import subprocess
import sys
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
from tests.thorough import only_in_all

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
import json, os, sys

os.sched_getaffinity = lambda _: range(8)  # a thread for each kernel, however few cores there are
import jax
from tests.core import test_parallel_compile as this

test = this.lowered(jax.grad(lambda x: this.layers(2, x)), this.X)
before = len(this.parallel_compile.kernels_of(test.compiler_ir("stablehlo")))
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
    mesh, spec = jax.sharding.AbstractMesh((2,), ("device",)), jax.sharding.PartitionSpec()
    function = jax.shard_map(jax.grad(functools.partial(layers, 1)), mesh=mesh, in_specs=spec, out_specs=spec)
    program = lowered(function, X, devices=2)
    alone: list[bytes] = []
    serialize = parallel_compile.program_of
    monkeypatch.setattr(parallel_compile, "program_of", lambda call: (alone.append(text := serialize(call)), text)[1])
    program.compile()
    assert len(set(alone)) == str(program.compiler_ir("stablehlo")).count("kernel_hash") >= 2


@only_in_all
@needs_compiler
def test_what_is_compiled_ahead_has_no_say_in_whether_a_program_compiles(monkeypatch):
    program = lowered(jax.grad(functools.partial(layers, 1)), X)
    monkeypatch.setattr(parallel_compile, "program_of", lambda call: b"no module")
    program.compile()


@needs_compiler
def test_layers_that_are_alike_trace_and_lower_their_kernels_once(monkeypatch):
    traced: list[str] = []
    lowered: list[str] = []
    mark, lower = engine._mark, lowering.lower_unpipelined_jaxpr_to_module

    def note_lowered(mesh: Any, jax_mesh: Any, jaxpr: Any, *args: Any, **options: Any) -> Any:
        lowered.append(jaxpr.debug_info.func_name)
        return lower(mesh, jax_mesh, jaxpr, *args, **options)

    monkeypatch.setattr(engine, "_mark", lambda launch: (traced.append("a kernel"), mark(launch))[1])
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
