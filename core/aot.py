"""Compiles a function for a named GPU on a machine without one: registers, spills, shared memory, PTX and SASS of its kernels.

    report = compile_for("h200", f, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))
    report.registers, report.spills, report.smem_bytes, "HGMMA" in report.sass

    executable = build("h200", f, jax.ShapeDtypeStruct((4096, 4096), jnp.bfloat16))  # in a process without a GPU
    load(executable)(x)  # in one that has it

XLA compiles for a GPU that is described to it (`jax.experimental.topologies`); Mosaic GPU writes
what it and ptxas produced to the folder that `MOSAIC_GPU_DUMP_TO` names. Mosaic reads that variable
anew for each kernel, so it is set for the one compilation and restored after it. Mosaic leaves a
folder of some 20 KB, `/tmp/mosaic-gpu-*` with the cubin, behind for each kernel it disassembles.
"""

from __future__ import annotations

import contextlib
import functools
import hashlib
import importlib.util
import os
import pathlib
import re
import sys
import tempfile
import threading
from collections.abc import Callable, Iterator
from dataclasses import dataclass
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax._src import xla_bridge
from jax.experimental import serialize_executable, topologies
from jax.extend.mlir import ir
from jax.sharding import AxisType, Mesh, NamedSharding, PartitionSpec

from mgpu_ops.core import extras
from mgpu_ops.core.gpu import Gpu, driver_version, find, target

_lock = threading.RLock()  # the environment belongs to the process, not to a thread


class AotUnavailable(RuntimeError):
    """This machine lacks what compiling for a GPU needs; the message says what to install."""


@dataclass(frozen=True)
class CompiledKernel:
    """One Mosaic GPU kernel as compiled."""

    name: str
    registers: int  # per thread, before any setmaxnreg
    spill_stores: int  # bytes per thread
    spill_loads: int  # bytes per thread
    serialized: str  # why ptxas lets no two wgmma overlap, "" where it does
    barriers: int  # named barriers of a block (bar.sync); mbarriers are in smem_bytes
    smem_bytes: int  # dynamic shared memory that a block's launch asks for, mbarriers included
    ptx: str
    sass: str


@dataclass(frozen=True)
class Report:
    """The distinct Mosaic GPU kernels of one function; code that XLA generates is not in it."""

    gpu: Gpu
    kernels: tuple[CompiledKernel, ...]

    @property
    def registers(self) -> int:
        return max((kernel.registers for kernel in self.kernels), default=0)

    @property
    def spills(self) -> int:
        """Bytes per thread, stores and loads, of all kernels together."""
        return sum(kernel.spill_stores + kernel.spill_loads for kernel in self.kernels)

    @property
    def serialized(self) -> str:
        """Why ptxas waits for each wgmma before the next, which costs a fifth of its speed or more; "" where it does not."""
        return "; ".join(dict.fromkeys(kernel.serialized for kernel in self.kernels if kernel.serialized))

    @property
    def barriers(self) -> int:
        return max((kernel.barriers for kernel in self.kernels), default=0)

    @property
    def smem_bytes(self) -> int:
        return max((kernel.smem_bytes for kernel in self.kernels), default=0)

    @property
    def ptx(self) -> str:
        return "\n".join(kernel.ptx for kernel in self.kernels)

    @property
    def sass(self) -> str:
        return "\n".join(kernel.sass for kernel in self.kernels)


def compile_for(gpu: Gpu | str, fn: Callable[..., Any], *shapes: Any, devices: int = 1) -> Report:
    """Traces, lowers and compiles `fn(*shapes)` for `gpu`, under `target(gpu)`; runs nothing.

    `shapes` are pytrees of arrays or `jax.ShapeDtypeStruct`s. With `devices` above one, `fn` runs
    over that many GPUs of one host: it shards itself with `jax.shard_map` over a
    `jax.sharding.AbstractMesh` of that size. A shape whose sharding is a NamedSharding over a mesh
    (abstract or not) of that size arrives so sharded, which explicit axes require; any other is
    replicated.

    Each call compiles afresh, past all of JAX's caches, so it can be repeated. Calls from several
    threads wait for each other. A Mosaic kernel that another thread compiles by other means at the
    same time would be counted too.

    Raises AotUnavailable where `available()` has a reason, ValueError for a name that is no known
    GPU, RuntimeError for a second compute capability in one process, and the compiler's own error
    where it refuses `fn`.
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    if reason := available():
        raise AotUnavailable(reason)
    _claim(gpu)
    topology = _topology(gpu, devices)
    with tempfile.TemporaryDirectory(prefix="mgpu-ops-") as folder:
        with _environment(MOSAIC_GPU_DUMP_TO=folder), _persistent_cache_unwritten(), target(gpu):
            launches, _ = _compile(fn, shapes, np.array(topology.devices))
        kernels = _kernels(pathlib.Path(folder))
    if launches and not kernels:
        raise RuntimeError(f"Mosaic GPU compiled {launches} kernels for {gpu.name} and dumped none")
    return Report(gpu, kernels)


@dataclass(frozen=True)
class Executable:
    """A function compiled for one GPU, and what ptxas reports of its Mosaic kernels. It can be pickled, for `load` elsewhere.

    Loading runs code: load only what you trust.
    """

    data: bytes
    trees: tuple[Any, Any]  # of the arguments and of the results
    registers: int  # per thread, the most of all kernels
    spills: int  # bytes per thread, stores and loads, of all kernels together
    devices: int = 1  # that it runs on
    serialized: str = ""  # as in Report
    warnings: tuple[str, ...] = ()  # of mgpu_ops, logged in the process that compiled it


def build(gpu: Gpu | str, fn: Callable[..., Any], *shapes: Any, devices: int = 1, topology: bytes | None = None) -> Executable:
    """Compiles `fn(*shapes)` as `compile_for` does, in a quarter of the time: nothing is dumped or disassembled.

    Args:
      topology: the GPUs whose first ones will run it, as `attached` describes them in a process that has them. None: any GPU of
        this model.

    ptxas reports on standard output, which is diverted meanwhile. Raises what `compile_for` raises.
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    if _plugin() is None:
        raise AotUnavailable(f"compiling for a GPU needs JAX's CUDA plugin: {extras.install('aot')}")
    _claim(gpu)
    described = _described(topology) if topology else _topology(gpu, devices)
    with _environment(MOSAIC_GPU_DUMP_PTXAS="1"), _persistent_cache_unwritten(), target(gpu), _diverted() as said:
        launches, compiled = _compile(fn, shapes, np.array(described.devices[:devices]))
        log = said()
    registers = _numbers(r"Used (\d+) registers", log)
    if launches and not registers:
        raise RuntimeError(f"Mosaic GPU compiled {launches} kernels for {gpu.name} and ptxas said nothing of them")
    data, *trees = serialize_executable.serialize(compiled)
    spills = sum(_numbers(r"(\d+) bytes spill", log))
    return Executable(data, (trees[0], trees[1]), max(registers, default=0), spills, devices, _serialized(log))


@dataclass(frozen=True)
class Program:
    """A function compiled as a whole: its launches of Mosaic kernels, and what XLA plans for its arrays, in bytes."""

    launches: int
    argument_bytes: int
    output_bytes: int
    temporary_bytes: int


def program(gpu: Gpu | str, fn: Callable[..., Any], *shapes: Any) -> Program:
    """Compiles `fn(*shapes)` with all that XLA makes of it, as `build` does. Raises what `compile_for` raises."""
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    if _plugin() is None:
        raise AotUnavailable(f"compiling for a GPU needs JAX's CUDA plugin: {extras.install('aot')}")
    _claim(gpu)
    with _persistent_cache_unwritten(), target(gpu):
        launches, compiled = _compile(fn, shapes, np.array(_topology(gpu, 1).devices))
    m = compiled.memory_analysis()
    return Program(launches, m.argument_size_in_bytes, m.output_size_in_bytes, m.temp_size_in_bytes)


def ptx(gpu: Gpu | str, fn: Callable[..., Any], *shapes: Any, devices: int = 1) -> tuple[str, ...]:
    """The PTX of each Mosaic kernel of `fn(*shapes)`, compiled as `build` compiles them, with standard output diverted.

    Raises what `compile_for` raises.
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    if _plugin() is None:
        raise AotUnavailable(f"compiling for a GPU needs JAX's CUDA plugin: {extras.install('aot')}")
    _claim(gpu)
    topology = _topology(gpu, devices)
    with _environment(MOSAIC_GPU_DUMP_PTX="1"), _persistent_cache_unwritten(), target(gpu), _diverted() as said:
        launches, _ = _compile(fn, shapes, np.array(topology.devices))
        _, *kernels = said().split(_PTX_BEGINS)
    if launches and not kernels:
        raise RuntimeError(f"Mosaic GPU compiled {launches} kernels for {gpu.name} and printed no PTX")
    return tuple(kernels)


def elsewhere(gpu: Gpu | str, devices: int = 1) -> tuple[contextlib.AbstractContextManager[None], Callable[[Any], Any]]:
    """To trace, lower and compile for a GPU that is not here, as `jax.jit` does: a context, and what places shapes on that GPU.

    Or on so many `devices` of one host. What the process has compiled already is not compiled again. Raises what `compile_for`
    raises.
    """
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    if _plugin() is None:
        raise AotUnavailable(f"compiling for a GPU needs JAX's CUDA plugin: {extras.install('aot')}")
    _claim(gpu)
    described: np.ndarray = np.array(_topology(gpu, devices).devices)

    @contextlib.contextmanager
    def context() -> Iterator[None]:
        with target(gpu), jax.default_device(described[0]):
            yield

    return context(), functools.partial(jax.tree.map, functools.partial(_place, devices=described))


_PTX_BEGINS = "// Generated by LLVM NVPTX Back-End\n"


def load(executable: Executable) -> Callable[..., Any]:
    """The compiled function, on this process's first devices; it is not compiled again."""
    _open_runtime()
    devices = jax.local_devices()[: executable.devices]
    return serialize_executable.deserialize_and_load(executable.data, *executable.trees, execution_devices=devices)


@functools.cache
def _open_runtime() -> None:
    # Loaded kernels call Mosaic's run-time library. Mosaic opens it when it first compiles, so compile an empty kernel.
    jax.jit(_nothing).lower().compile()


def _nothing() -> jax.Array:
    from mgpu_ops.core import engine

    def body(out: Any) -> None:
        out[...] = jnp.zeros(128, jnp.float32)

    out_type = jax.ShapeDtypeStruct((128,), jnp.float32)
    launch = engine.Launch("mgpu_ops_nothing", grid={"block": 1}, warpgroups=1)
    return engine.kernel(body, launch, out_type=out_type, scratch_types={})()


def attached() -> bytes:
    """This process's devices, described for `build`, with the versions of their driver and libraries."""
    return topologies.TopologyDescription(jax.local_devices()).serialize()


def available() -> str | None:
    """Why `compile_for` cannot run on this machine, or None where it can. Looks for files only."""
    missing = [] if _plugin() else ["JAX's CUDA plugin"]
    missing += [tool for tool in ("ptxas", "nvdisasm") if not (_cuda_root() / "bin" / tool).exists()]
    if not missing:
        return None
    return (
        f"compiling without a GPU needs {', '.join(missing)}: {extras.install('aot')}"
        " (or set CUDA_ROOT to a CUDA toolkit before importing jax, for the tools)"
    )


_claimed: list[tuple[int, int]] = []  # the compute capability that this process compiles for


def _claim(gpu: Gpu) -> None:
    # Mosaic builds its pass that calls ptxas once in a process, for the first capability it meets.
    _claimed[:] = _claimed or [gpu.compute_capability]
    if _claimed != [gpu.compute_capability]:
        mine, first = (".".join(map(str, c)) for c in (gpu.compute_capability, *_claimed))
        raise RuntimeError(
            f"{gpu.name} has compute capability {mine}, but this process has compiled for {first}"
            " and Mosaic GPU keeps to the first: compile in a new process"
        )


def _plugin() -> str | None:
    for name in ("jax_plugins.xla_cuda13", "jax_plugins.xla_cuda12"):
        with contextlib.suppress(ModuleNotFoundError):  # raised where not even jax_plugins exists
            if importlib.util.find_spec(name):
                return name
    return None


def _cuda_root() -> pathlib.Path:
    import jax.experimental.mosaic.gpu  # noqa: F401  sets the variable to what jax found

    return pathlib.Path(os.environ["MOSAIC_GPU_CUDA_ROOT"])


# What XLA asks of a device. Fields that are the same on every GPU in the table are written out.
_TARGET_CONFIG = """
gpu_device_info {{
  threads_per_block_limit: 1024 threads_per_warp: 32 threads_per_core_limit: 2048
  block_dim_limit_x: 2147483647 block_dim_limit_y: 65535 block_dim_limit_z: 65535
  shared_memory_per_block: 49152 shared_memory_per_core: 233472
  shared_memory_per_block_optin: {gpu.smem_per_block}
  registers_per_core_limit: {gpu.registers_per_sm} registers_per_block_limit: 65536
  core_count: {gpu.sms} fpus_per_core: 128 clock_rate_ghz: {clock_ghz}
  l2_cache_size: {gpu.l2_bytes} device_memory_size: {gpu.memory_bytes}
  memory_bandwidth: {gpu.memory_bytes_per_s:.0f}
  cuda_compute_capability {{
    major: {major} minor: {minor} feature_extension: ACCELERATED_FEATURES
  }}
}}
platform_name: "CUDA"
device_description_str: "{gpu.name}"
"""


def target_config(gpu: Gpu | str) -> str:
    """XLA's description of a GPU (a GpuTargetConfig as text), for `jax.experimental.topologies.get_topology_desc`."""
    gpu = find(gpu) if isinstance(gpu, str) else gpu
    major, minor = gpu.compute_capability
    return _TARGET_CONFIG.format(gpu=gpu, clock_ghz=gpu.clock_hz / 1e9, major=major, minor=minor)


@functools.cache
def _topology(gpu: Gpu, devices: int) -> topologies.TopologyDescription:
    describe = functools.partial(
        topologies.get_topology_desc,
        gpu.name,
        platform="cuda",
        topology=f"1x1x{devices}",
        target_config=target_config(gpu),
    )
    return _with_plugin(describe)


@functools.cache
def _described(topology: bytes) -> topologies.TopologyDescription:
    return _with_plugin(lambda: topologies.TopologyDescription.deserialize(topology))


def _with_plugin(describe: Callable[[], topologies.TopologyDescription]) -> topologies.TopologyDescription:
    # The plugin does not register without cuDNN and other libraries, none of which compiling
    # needs. Where there is a GPU its check is left on, since programs will run there too.
    skip = {} if driver_version() else {"JAX_SKIP_CUDA_CONSTRAINTS_CHECK": "1"}
    with _environment(**skip):
        xla_bridge._discover_and_register_pjrt_plugins()  # now, once: a plugin that registers a second time says so at length
        try:
            return describe()
        except (NotImplementedError, jax.errors.JaxRuntimeError):  # JAX had looked for plugins before, with the check on
            importlib.import_module(str(_plugin())).initialize()
            return describe()


def _compile(fn: Callable[..., Any], shapes: tuple[Any, ...], devices: np.ndarray) -> tuple[int, Any]:
    placed = jax.tree.map(functools.partial(_place, devices=devices), shapes)
    # Mosaic lowers for the default device's architecture. The new function misses JAX's caches.
    with jax.default_device(devices[0]):
        lowered = jax.jit(lambda *args: fn(*args)).lower(*placed)
    launches = _rename_kernels(lowered.compiler_ir("stablehlo"))
    return launches, lowered.compile()


def _place(leaf: Any, devices: np.ndarray) -> jax.ShapeDtypeStruct:
    wanted = getattr(leaf, "sharding", None)
    if isinstance(wanted, NamedSharding) and wanted.mesh.size == devices.size:
        sizes, names, types = wanted.mesh.axis_sizes, wanted.mesh.axis_names, wanted.mesh.axis_types
        sharding = NamedSharding(Mesh(devices.reshape(sizes), names, types), wanted.spec)
    else:
        # Auto: the argument's type says nothing of sharding, so any shard_map takes it.
        sharding = NamedSharding(Mesh(devices, ("device",), (AxisType.Auto,)), PartitionSpec())
    return jax.ShapeDtypeStruct(leaf.shape, leaf.dtype, sharding=sharding)


def _rename_kernels(module: Any) -> int:
    """Gives every Mosaic kernel a new hash, and counts its launches.

    A process compiles, and dumps, the kernel of a hash only once, and for the first GPU only.
    """
    launches, salt = 0, os.urandom(32)

    def visit(op: Any) -> Any:
        nonlocal launches
        if "mhlo.backend_config" in op.attributes:
            config = op.attributes["mhlo.backend_config"]
            if "kernel_hash" in config:
                launches += 1
                fields = {field.name: field.attr for field in config}
                fields["kernel_hash"] = ir.StringAttr.get(hashlib.sha256(salt + str(config["kernel_hash"]).encode()).digest())
                op.attributes["mhlo.backend_config"] = ir.DictAttr.get(fields)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return launches


def _kernels(folder: pathlib.Path) -> tuple[CompiledKernel, ...]:
    paths = sorted(folder.glob("*.ptx"), key=lambda path: path.stat().st_mtime_ns)
    return tuple(dict.fromkeys(_kernel(path) for path in paths))


def _kernel(ptx: pathlib.Path) -> CompiledKernel:
    log, code, sass = ptx.with_suffix(".ptxas").read_text(), ptx.read_text(), ptx.with_suffix(".sass_ctrl").read_text()
    return CompiledKernel(
        name="".join(re.findall(r"Compiling entry function '(\w+)'", log)[:1]),
        registers=max(_numbers(r"Used (\d+) registers", log), default=0),
        spill_stores=sum(_numbers(r"(\d+) bytes spill stores", log)),
        spill_loads=sum(_numbers(r"(\d+) bytes spill loads", log)),
        serialized=_serialized(log) or _serialized_unsaid(code, sass),
        barriers=max(_numbers(r"used (\d+) barriers", log), default=0),
        smem_bytes=_launched_smem(ptx.with_suffix(".mlir-passes.log")),
        ptx=code,
        sass=sass,
    )


def _serialized(log: str) -> str:
    found = re.findall(r"wgmma.mma_async instructions are serialized due to (.+?) (?:in|for) (?:the )?function", log)
    return "; ".join(dict.fromkeys(found))


def _serialized_unsaid(ptx: str, sass: str) -> str:
    """What ptxas does not report: where registers are scarce it ends a group, and waits, after each wgmma."""
    started, committed = ptx.count("wgmma.mma_async"), ptx.count("wgmma.commit_group")
    groups = [line for line in sass.splitlines() if "HGMMA" in line or "IGMMA" in line or "QGMMA" in line]
    ended = sum("gsb0" in line for line in groups)
    if ended * started <= 1.5 * committed * len(groups):  # code may be there more than once
        return ""
    return f"{ended} of {len(groups)} wgmma end a group of their own, where the kernel asks for {committed} of {started}"


def _numbers(pattern: str, text: str) -> list[int]:
    return [int(number) for number in re.findall(pattern, text)]


def _launched_smem(passes: pathlib.Path) -> int:
    # The log holds the module after every pass, tens of MB: stop at the first launch with a folded constant, of any name.
    constants: dict[str, int] = {}
    with passes.open() as lines:
        for line in lines:
            if "IR Dump" in line:
                constants.clear()  # names are of one module
            elif found := re.match(r"\s*(%\w+) = arith.constant (\d+) : i32\b", line):
                constants[found[1]] = int(found[2])
            elif (found := re.search(r"dynamic_shared_memory_size (%\w+)", line)) and found[1] in constants:
                return constants[found[1]]
    raise RuntimeError(f"no shared memory size in Mosaic GPU's dump {passes.name}")


@contextlib.contextmanager
def _environment(**values: str) -> Iterator[None]:
    with _lock:
        before = {name: os.environ.get(name) for name in values}
        os.environ.update(values)
        try:
            yield
        finally:
            for name, value in before.items():
                if value is None:
                    os.environ.pop(name, None)
                else:
                    os.environ[name] = value


@contextlib.contextmanager
def _diverted() -> Iterator[Callable[[], str]]:
    """Standard output, that of C++ included, goes to a file meanwhile; yields what reads it."""
    sys.stdout.flush()
    before = os.dup(1)
    with tempfile.TemporaryFile() as file:
        os.dup2(file.fileno(), 1)

        def said() -> str:
            file.seek(0)
            return file.read().decode(errors="replace")

        try:
            yield said
        finally:
            os.dup2(before, 1)
            os.close(before)


@contextlib.contextmanager
def _persistent_cache_unwritten() -> Iterator[None]:
    # Renamed kernels never hit JAX's persistent cache; nor shall they fill it.
    setting = "jax_persistent_cache_min_compile_time_secs"
    before = jax.config.jax_persistent_cache_min_compile_time_secs
    jax.config.update(setting, float("inf"))
    try:
        yield
    finally:
        jax.config.update(setting, before)
