"""The table of GPUs (names, SMs, memories, rates), and which of them is running.

Importing this module initialises no JAX backend.
"""

from __future__ import annotations

import dataclasses
import functools
import pathlib
import re
import subprocess
from contextlib import AbstractContextManager
from dataclasses import dataclass
from typing import Any

import jax


@dataclass(frozen=True)
class Gpu:
    """One model of GPU: sizes in bytes, rates per second. FLOP/s are dense (no sparsity)."""

    key: str  # the folder of its configs: "h200"
    name: str  # the canonical device_kind: "NVIDIA H200"
    kinds: tuple[str, ...]  # every device_kind that this GPU reports
    architecture: str  # "hopper" or "blackwell"
    compute_capability: tuple[int, int]
    sms: int
    smem_per_block: int  # what a block may opt in to: 227 KiB of the SM's 228
    registers_per_sm: int  # 32-bit registers
    l2_bytes: int
    memory_bytes: int  # the datasheet's gigabytes, 10^9 each
    memory_bytes_per_s: float
    bf16_flops: float  # tensor cores; a multiply-add counts as two
    clock_hz: float  # the boost clock; tensor-core-bound kernels run below it
    nvlink_bytes_per_s: float  # one direction, all links together
    source: str
    shares_sms: bool = False  # with kernels of other streams, as collectives: then one may hold some of the SMs for a while

    def flops(self, dtype: str) -> float:
        """FLOP/s of the tensor cores on operands of this dtype: on 8 bits, twice those on 16; on float32 (tf32), half of them.

        Source: the same datasheets.
        """
        return self.bf16_flops * (2 if dtype == "int8" or dtype.startswith("float8") else 0.5 if dtype == "float32" else 1)


def _hopper(key: str, *kinds: str, **numbers: Any) -> Gpu:
    return Gpu(
        key=key,
        name=kinds[0],
        kinds=kinds,
        architecture="hopper",
        compute_capability=(9, 0),
        smem_per_block=227 * 1024,
        registers_per_sm=65536,
        **numbers,
    )


# L2 sizes, clocks and SM counts are those the CUDA driver reports where a datasheet is silent.
_SIX_STACKS = "; L2 of the parts with six HBM stacks (60 MiB) as the CUDA driver reports it"

# fmt: off
GPUS: tuple[Gpu, ...] = (
    _hopper(
        "h100-sxm", "NVIDIA H100 80GB HBM3",
        sms=132, l2_bytes=50 * 2**20, memory_bytes=80 * 10**9, memory_bytes_per_s=3.35e12,
        bf16_flops=989.4e12, clock_hz=1.98e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA H100 Tensor Core GPU datasheet; NVIDIA H100 architecture whitepaper (SXM5)",
    ),
    _hopper(
        "h100-pcie", "NVIDIA H100 PCIe",
        sms=114, l2_bytes=50 * 2**20, memory_bytes=80 * 10**9, memory_bytes_per_s=2.0e12,
        bf16_flops=756.5e12, clock_hz=1.755e9, nvlink_bytes_per_s=300e9,
        source="NVIDIA H100 architecture whitepaper (PCIe); H100 PCIe product brief (NVLink)",
    ),
    _hopper(
        "h100-nvl", "NVIDIA H100 NVL",
        sms=132, l2_bytes=60 * 2**20, memory_bytes=94 * 10**9, memory_bytes_per_s=3.9e12,
        bf16_flops=835.5e12, clock_hz=1.785e9, nvlink_bytes_per_s=300e9,
        source="NVIDIA H100 NVL datasheet and product brief (NVLink bridge)" + _SIX_STACKS,
    ),
    _hopper(
        "h200", "NVIDIA H200",
        sms=132, l2_bytes=60 * 2**20, memory_bytes=141 * 10**9, memory_bytes_per_s=4.8e12,
        bf16_flops=989.4e12, clock_hz=1.98e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA H200 Tensor Core GPU datasheet (SXM)" + _SIX_STACKS,
    ),
    _hopper(
        "h200-nvl", "NVIDIA H200 NVL",
        sms=132, l2_bytes=60 * 2**20, memory_bytes=141 * 10**9, memory_bytes_per_s=4.8e12,
        bf16_flops=835.5e12, clock_hz=1.785e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA H200 Tensor Core GPU datasheet (NVL, NVLink bridge)" + _SIX_STACKS,
    ),
    _hopper(
        "gh200", "NVIDIA GH200 480GB", "NVIDIA GH200 120GB",  # named by the memory of the CPU
        sms=132, l2_bytes=60 * 2**20, memory_bytes=96 * 10**9, memory_bytes_per_s=4.0e12,
        bf16_flops=989.4e12, clock_hz=1.98e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA GH200 Grace Hopper Superchip datasheet (96 GB HBM3)" + _SIX_STACKS,
    ),
    _hopper(
        "gh200-144gb", "NVIDIA GH200 144G HBM3e",
        sms=132, l2_bytes=60 * 2**20, memory_bytes=144 * 10**9, memory_bytes_per_s=4.9e12,
        bf16_flops=989.4e12, clock_hz=1.98e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA GH200 Grace Hopper Superchip datasheet (144 GB HBM3e)" + _SIX_STACKS,
    ),
    _hopper(
        "h20", "NVIDIA H20",
        sms=78, l2_bytes=60 * 2**20, memory_bytes=96 * 10**9, memory_bytes_per_s=4.0e12,
        bf16_flops=148e12, clock_hz=1.98e9, nvlink_bytes_per_s=450e9,
        source="NVIDIA HGX H20 datasheet" + _SIX_STACKS,
    ),
    Gpu(
        key="b200", name="NVIDIA B200", kinds=("NVIDIA B200",), architecture="blackwell",
        compute_capability=(10, 0), sms=148, smem_per_block=227 * 1024, registers_per_sm=65536,
        l2_bytes=132644864, memory_bytes=180 * 10**9, memory_bytes_per_s=8.0e12,
        bf16_flops=2.25e15, clock_hz=1.965e9, nvlink_bytes_per_s=900e9,
        source="NVIDIA DGX B200 and HGX B200 datasheets; L2, clock as the CUDA driver reports them",
    ),
)
# fmt: on


def find(name: str) -> Gpu:
    """The GPU with this key, name or device_kind, in any case. ValueError if not in `GPUS`."""
    for gpu in GPUS:
        if str(name).casefold() in (s.casefold() for s in (gpu.key, *gpu.kinds)):
            return gpu
    known = ", ".join(f"{gpu.key} ({gpu.name})" for gpu in GPUS)
    raise ValueError(f"gpu={name!r} is not a GPU in the table: name one of {known}")


def key_of(name: str) -> str:
    """The key under which a GPU's configs lie, whichever of its names is given; a GPU that is not in `GPUS` goes by its own."""
    try:
        return find(name).key
    except ValueError:
        return name


def family(gpu: Gpu) -> tuple[Gpu, ...]:
    """The other GPUs of the same architecture and SM count, the closest memory bandwidth first."""
    same = [g for g in GPUS if (g.architecture, g.sms) == (gpu.architecture, gpu.sms)]
    others = [g for g in same if g.key != gpu.key]
    return tuple(sorted(others, key=lambda g: abs(g.memory_bytes_per_s - gpu.memory_bytes_per_s)))


def from_device(device: Any) -> Gpu | None:
    """The GPU that a JAX device, or a mesh's abstract device, is; None if no NVIDIA GPU we know.

    A Hopper that is not in the table (H800, a MIG slice) is described by the entry of the longest
    name that begins its device_kind, else by the one nearest in SM count. Its name, key and SM
    count are its own, and the tensor-core rate is scaled with the SMs. One of the table that tells of
    fewer SMs than it has, as a process with a share of a GPU may see it, has those alone.
    """
    kind, sms = device.device_kind, _sms(device)
    for gpu in GPUS:
        if kind in gpu.kinds:
            return gpu if sms is None or sms >= gpu.sms else _with_sms(gpu, sms)
    return _unlisted(kind, sms) if _is_hopper(device) else None


def _sms(device: Any) -> int | None:
    # The same number has another name on a concrete and on an abstract device.
    return getattr(device, "core_count", None) or getattr(device, "num_cores", None)


def _is_hopper(device: Any) -> bool:
    capability = getattr(device, "compute_capability", None)
    if capability is not None:
        return capability == "9.0"
    # An abstract device says no more than its name.
    return re.match(r"NVIDIA G?H\d", device.device_kind) is not None


def _unlisted(kind: str, sms: int | None) -> Gpu:
    hoppers = [gpu for gpu in GPUS if gpu.architecture == "hopper"]
    near = min(
        hoppers,
        key=lambda g: (-len(g.name) * kind.startswith(g.name), abs(g.sms - (sms or g.sms))),
    )
    key = re.sub(r"[^a-z0-9]+", "-", kind.lower().removeprefix("nvidia")).strip("-")
    return dataclasses.replace(_with_sms(near, sms or near.sms), key=key, name=kind, kinds=(kind,))


def _with_sms(gpu: Gpu, sms: int) -> Gpu:
    source = f"SM count from the device; the rest assumed from {gpu.name}"
    return dataclasses.replace(gpu, sms=sms, bf16_flops=gpu.bf16_flops * sms / gpu.sms, source=source)


# A user context is part of jax.jit's trace key: another target traces a function again.
_target = jax.make_user_context(None)


def target(gpu: Gpu | str | None) -> AbstractContextManager[None]:
    """`with mgpu_ops.target("h200"): ...`: what JAX traces inside is for that GPU instead of the running one.

    For programs that another machine will run (`jax.export`, ahead-of-time compilation). `target(None)` ends an outer target's
    effect. ValueError for what is no GPU in the table, nor None.
    """
    return _target(gpu if gpu is None or isinstance(gpu, Gpu) else find(gpu))


def targeted() -> Gpu | None:
    """The GPU of the `target` that this is in, or None."""
    return _target.value


def current() -> Gpu | None:
    """The GPU that code traced now is for: `target`, else the mesh's device, else the default one.

    None for a device that is no NVIDIA GPU we know. The default device initialises JAX's backend.
    """
    if _target.value is not None:
        return _target.value
    abstract = jax.sharding.get_abstract_mesh().abstract_device
    return from_device(_default_device() if abstract is None else abstract)


def _default_device() -> Any:
    device = jax.config.jax_default_device
    if device is None:
        return jax.local_devices()[0]
    return jax.local_devices(backend=device)[0] if isinstance(device, str) else device


_DRIVER = pathlib.Path("/proc/driver/nvidia/version")


@functools.cache
def driver_version() -> str | None:
    """The NVIDIA driver's version on this machine, such as "570.86.15"; None without one."""
    try:
        text = _DRIVER.read_text().partition("\n")[0]  # the second line is about gcc
    except OSError:
        text = _nvidia_smi()
    match = re.search(r"\b\d{3,}(\.\d+)+\b", text)
    return match and match.group()


def _nvidia_smi() -> str:
    command = ["nvidia-smi", "--query-gpu=driver_version", "--format=csv,noheader"]
    try:
        done = subprocess.run(command, check=False, capture_output=True, text=True, timeout=10)
    except (OSError, subprocess.SubprocessError):
        return ""
    return done.stdout
