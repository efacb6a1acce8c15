"""What a second process need not do again: trace (an exported program), compile (JAX's persistent cache). No GPU is needed.

Kernels are lowered and compiled for an H100. What only a GPU can show is whether they then run.
"""

from __future__ import annotations

import importlib.util
import json
import os
import re
import subprocess
import sys
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest

import mgpu_ops
from mgpu_ops.core import aot

ROOT = Path(__file__).parents[2]
needs_flatbuffers = pytest.mark.skipif(importlib.util.find_spec("flatbuffers") is None, reason="flatbuffers is not installed")
needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

STEP = """
import json, os, sys
import jax
import jax.numpy as jnp

BF16 = jnp.bfloat16
SHAPES = (
    jax.ShapeDtypeStruct((1, 256, 2, 64), BF16),
    jax.ShapeDtypeStruct((128, 128), BF16),
    jax.ShapeDtypeStruct((4, 128, 64), BF16),
    jax.ShapeDtypeStruct((4,), jnp.int32),
)

def loss(x, w, experts, sizes):
    import mgpu_ops
    x = mgpu_ops.matmul(mgpu_ops.flash_attention(x, x, x, causal=True).reshape(256, 128), w, backend="mosaic")
    return jnp.sum(mgpu_ops.grouped_matmul(x, experts, sizes).astype(jnp.float32) ** 2)

def step(x, w, experts, sizes):
    return jax.grad(loss, argnums=(0, 1, 2))(x, w, experts, sizes)
"""


def run(program: str, *words: object, **environment: str) -> Any:
    """What a fresh process that runs this program prints last, as JSON."""
    env = {k: v for k, v in os.environ.items() if k != "XLA_FLAGS"} | {"JAX_PLATFORMS": "cpu"}
    command = [sys.executable, "-c", STEP + program, *map(str, words)]
    done = subprocess.run(command, cwd=ROOT, env=env | environment, capture_output=True, text=True, timeout=300)
    assert done.returncode == 0, done.stderr[-3000:]
    return json.loads(done.stdout.splitlines()[-1])


def blocks(heading: str) -> list[str]:
    """The Python of a section of docs/start-up.md."""
    (section,) = re.findall(
        rf"^## {heading}\n(.*?)(?=^## |\Z)", (ROOT / "docs/start-up.md").read_text(), re.DOTALL | re.MULTILINE
    )
    return re.findall(r"```python\n(.*?)```", section, re.DOTALL)


# --- JAX's persistent compilation cache

CACHED = """
folder, first = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", folder)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)

import mgpu_ops
jax.jit(lambda a, b: mgpu_ops.matmul(a, b)).lower(*[jax.ShapeDtypeStruct((64, 64), BF16)] * 2).compile()

from mgpu_ops.core import aot, gpu
import numpy as np
if first == "other":  # what the process lowers before must not matter
    with gpu.target("h100-sxm"):
        jax.jit(mgpu_ops.matmul).trace(*[jax.ShapeDtypeStruct((64, 64), BF16)] * 2).lower(lowering_platforms=("cuda",))
(device,) = aot._topology(gpu.find("h100-sxm"), 1).devices
shapes = jax.tree.map(lambda x: aot._place(x, np.array([device])), SHAPES)
with jax.default_device(device), gpu.target("h100-sxm"):
    lowered = jax.jit(loss).lower(*shapes)
from jax._src import cache_key, compiler
options = compiler.get_compile_options(num_replicas=1, num_partitions=1)
key = cache_key.get(lowered.compiler_ir("stablehlo"), np.array([device]), options, device.client)
print(json.dumps({"hits": len(hits), "key": key}))
"""


@needs_compiler
def test_another_process_finds_a_program_in_jaxs_persistent_cache(tmp_path: Path) -> None:
    """On the CPU it is a hit. For a GPU, the key is the same, whatever was lowered before and however Python hashes."""
    one = run(CACHED, tmp_path, "this", PYTHONHASHSEED="1", MGPU_OPS_KERNEL_CACHE="")
    two = run(CACHED, tmp_path, "other", PYTHONHASHSEED="2", MGPU_OPS_KERNEL_CACHE="")
    assert (one["hits"], two["hits"] > 0) == (0, True)
    assert one["key"] == two["key"]


# --- Lowered kernels, which are kept without any setting

LOWERED = """
import hashlib
from jax._src.pallas.mosaic_gpu import lowering
lower, names = lowering.lower_unpipelined_jaxpr_to_module, []
def counted(mesh, jax_mesh, jaxpr, *args, **options):
    names.append(jaxpr.debug_info.func_name)
    return lower(mesh, jax_mesh, jaxpr, *args, **options)
lowering.lower_unpipelined_jaxpr_to_module = counted
import mgpu_ops
with mgpu_ops.target("h100-sxm"):
    product = jax.jit(lambda a, b: mgpu_ops.matmul(a, b, backend="mosaic"))
    text = product.trace(*[jax.ShapeDtypeStruct((64, 64), BF16)] * 2).lower(lowering_platforms=("cuda",)).as_text()
print(json.dumps({"lowered": names, "text": hashlib.sha256(text.encode()).hexdigest()}))
"""


def test_another_process_finds_the_kernels_that_the_first_has_lowered(tmp_path: Path) -> None:
    """In the user's cache folder, where JAX's persistent cache is not in use."""
    environment = {"XDG_CACHE_HOME": str(tmp_path), "MGPU_OPS_KERNEL_CACHE": ""}
    one = run(LOWERED, **environment, PYTHONHASHSEED="1")
    two = run(LOWERED, **environment, PYTHONHASHSEED="2")
    assert [one["lowered"], two["lowered"]] == [["mgpu_ops_matmul"], []]
    assert one["text"] == two["text"]
    folder = tmp_path / "mgpu_ops" / "kernels"
    assert folder.stat().st_mode & 0o777 == 0o700
    assert [file.name[:16] for file in folder.iterdir()] == ["mgpu_ops-kernel-"]


# --- jax.export

EXPORT = """
import mgpu_ops
from jax import export
with mgpu_ops.target("h100-sxm"):
    exported = export.export(jax.jit(step), platforms=["cuda"])(*SHAPES)
open(sys.argv[1], "wb").write(exported.serialize())
print(json.dumps(exported.mlir_module().count("mosaic_gpu_v2")))
"""

COMPILE = """
from jax import export
import jax.experimental.mosaic.gpu  # sets where Mosaic GPU finds its run-time library and ptxas
from jax.experimental import topologies
from jax.sharding import Mesh, NamedSharding, PartitionSpec

exported = export.deserialize(open(sys.argv[1], "rb").read())
from jax._src import xla_bridge
xla_bridge._discover_and_register_pjrt_plugins()
gpus = topologies.get_topology_desc("NVIDIA H100 80GB HBM3", platform="cuda", topology="1x1x1", target_config=sys.argv[2])
sharding = NamedSharding(Mesh(gpus.devices, ("gpu",)), PartitionSpec())
shapes = [jax.ShapeDtypeStruct(x.shape, x.dtype, sharding=sharding) for x in exported.in_avals]
compiled = jax.jit(exported.call).lower(*shapes).compile()
print(json.dumps([[list(x.shape) for x in exported.out_avals], "mgpu_ops" in sys.modules, len(compiled.as_text()) > 0]))
"""


@needs_flatbuffers
@needs_compiler
def test_a_process_without_mgpu_ops_compiles_an_exported_program(tmp_path: Path) -> None:
    """Forward and backward kernels, exported without a GPU; the other process has neither this library nor its database."""
    assert run(EXPORT, tmp_path / "step") == 10
    device = aot.target_config("h100-sxm")
    answer = run(COMPILE, tmp_path / "step", device, JAX_SKIP_CUDA_CONSTRAINTS_CHECK="1")
    assert answer == [[[1, 256, 2, 64], [128, 128], [4, 128, 64]], False, True]


@needs_flatbuffers
def test_the_page_exports_a_program_as_it_says(tmp_path: Path) -> None:
    first, second = blocks("Export a program")
    names = {"jax": jax, "jnp": jnp, "mgpu_ops": mgpu_ops, "path": tmp_path / "step"}
    exec(first, names)
    assert names["exported"].mlir_module().count("mosaic_gpu_v2") == 1  # of the gradient: the product itself is not needed
    assert (tmp_path / "step").stat().st_size > 1000
    assert second.startswith("import jax.experimental.mosaic.gpu ")


def test_the_cache_is_shared_between_folders_with_the_setting_that_the_page_names() -> None:
    page = (ROOT / "docs/start-up.md").read_text()
    ((option, pattern),) = re.findall(r'jax\.config\.update\("(jax_hlo\w+)", "(.*?)"\)', page)
    text = run(FOLDERS, option, pattern.replace("site-packages", ROOT.name))
    assert text == {"kernels": 1, "with the folder": 0}


FOLDERS = """
jax.config.update(sys.argv[1], sys.argv[2])
import mgpu_ops
from jax.experimental.mosaic.gpu import core
with mgpu_ops.target("h100-sxm"):
    product = jax.jit(lambda a, b: mgpu_ops.matmul(a, b, backend="mosaic"))
    product.trace(*[jax.ShapeDtypeStruct((64, 64), BF16)] * 2).lower(lowering_platforms=("cuda",)).as_text()
texts = list(core.KNOWN_KERNELS.values())
print(json.dumps({"kernels": len(texts), "with the folder": sum(os.getcwd().encode() in text for text in texts)}))
"""


# --- on a GPU

ON_GPU = """
hits = []
jax.monitoring.register_event_listener(lambda event, **_: hits.append(event) if event.endswith("/cache_hits") else None)
path, cache = sys.argv[1:]
jax.config.update("jax_compilation_cache_dir", cache)
jax.config.update("jax_persistent_cache_min_compile_time_secs", 0)
jax.config.update("jax_persistent_cache_min_entry_size_bytes", -1)
from jax import export
import jax.experimental.mosaic.gpu

keys = jax.random.split(jax.random.key(0), 3)
arrays = [0.1 * jax.random.normal(key, x.shape, x.dtype) for key, x in zip(keys, SHAPES)]
arrays.append(jnp.array([100, 28, 0, 128], jnp.int32))
hits.clear()
out = jax.block_until_ready(jax.jit(export.deserialize(open(path, "rb").read()).call)(*arrays))
alone, found = "mgpu_ops" not in sys.modules, len(hits)

os.environ["MGPU_OPS_BACKEND"] = "xla"
wanted = jax.jit(step)(*arrays)
error = lambda x, y: float(jnp.max(jnp.abs(x - y)) / jnp.max(jnp.abs(y)))
errors = [error(x.astype(jnp.float32), y.astype(jnp.float32)) for x, y in zip(out, wanted)]
print(json.dumps({"alone": alone, "hits": found, "error": max(errors)}))
"""


@needs_flatbuffers
@pytest.mark.gpu
def test_an_exported_program_runs_and_the_next_process_finds_it_compiled(tmp_path: Path) -> None:
    """Exported in a process that sees no GPU; run in two that have no mgpu_ops until they compute what is expected."""
    kind = jax.local_devices()[0].device_kind
    run(EXPORT.replace('"h100-sxm"', repr(kind)), tmp_path / "step")
    words = (ON_GPU, tmp_path / "step", tmp_path / "cache")
    first, second = (run(*words, JAX_PLATFORMS="cuda", XLA_PYTHON_CLIENT_PREALLOCATE="false") for _ in range(2))
    assert [first["alone"], second["alone"]] == [True, True]
    assert (first["hits"], second["hits"] > 0) == (0, True)
    assert max(first["error"], second["error"]) < 0.05
