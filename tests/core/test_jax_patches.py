"""What mgpu_ops changes in JAX reaches its own kernels; those of others stay as they are."""

from __future__ import annotations

import subprocess
import sys
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax.experimental import io_callback

from mgpu_ops.core import aot, engine

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
