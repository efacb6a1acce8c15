"""What a collective is (`Problem`), how fast it can run (`Config`), and which configs can run it (`supports`, `check`).

all_reduce, reduce_scatter and all_gather share all of it: the kind comes first in every function here.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Final

import jax
import jax.numpy as jnp

from mgpu_ops.collectives import layout, schedules
from mgpu_ops.collectives.layout import ROW_BYTES, Axes, CollectiveKernel
from mgpu_ops.collectives.schedules import Kind, Schedule, Transport
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_fields

KINDS: Final[tuple[Kind, ...]] = ("all_reduce", "reduce_scatter", "all_gather")
DTYPES: Final = ("bfloat16", "float16", "float32", "int32", "uint32")
REDUCTIONS: Final = tuple(layout.REDUCTIONS)
TRANSPORTS: Final[tuple[Transport, ...]] = ("peer", "multimem")
XLA: Final = "xla"  # as an algorithm, of a config that leaves the problem to lax.psum and the like: no kernel has it
MAX_BYTES: Final = 2**33
MAX_SCRATCH: Final = 2**28
MAX_LL_BYTES: Final = 2**20  # of a payload in LL: beyond, twice the bytes cost more than a handshake
MAX_CHUNK: Final = 256 * ROW_BYTES  # TMA takes 256 rows at a time


@dataclasses.dataclass(frozen=True, order=True)
class Problem:
    """A collective between the GPUs of a host.

    size: elements of the payload on each device: x of all_reduce and reduce_scatter, the result of all_gather.
    devices: how many GPUs, 2 to 8.
    dtype: of the payload, "bfloat16", "float16", "float32", "int32" or "uint32".
    reduction: "add", "min" or "max"; all_gather has "add".
    transport: how GPUs reach each other, "peer" (NVLink, TMA) or "multimem" (the switch reduces and copies).
    """

    size: int
    devices: int
    dtype: str = "bfloat16"
    reduction: str = "add"
    transport: str = "peer"

    def __post_init__(self) -> None:
        check_fields(self)


@dataclasses.dataclass(frozen=True, order=True)
class Config:
    """How the kernel works. Every field is tuned; none changes the answer by more than rounding.

    algorithm: one of schedules.py, such as "one_shot", "two_shot" or "ring"; or "xla": XLA runs, no other field counts.
    blocks: thread blocks a device, 1 to the number of SMs: all must be resident at once.
    chunk: bytes that a block moves at a time, a multiple of 2048 up to 131072.
    stages: chunks in flight in a block, 2 to 16.
    """

    algorithm: str
    blocks: int
    chunk: int
    stages: int


def payload_bytes(problem: Problem) -> int:
    return problem.size * itemsize(problem)


def itemsize(problem: Problem) -> int:
    return jnp.dtype(problem.dtype).itemsize


def size_text(size: int, gap: str = "") -> str:
    """ "64KiB" """
    for unit, factor in (("GiB", 2**30), ("MiB", 2**20), ("KiB", 2**10)):
        if size % factor == 0:
            return f"{size // factor}{gap}{unit}"
    return f"{size}{gap}B"


# From what one token's activations take to a layer's gradients; bfloat16.
SIZES: Final = tuple(2**power for power in range(10, 29, 2))
DEVICES: Final = (2, 4, 8)
SHAPES = {f"{n}x{size_text(size)}": Problem(size // 2, n) for n in DEVICES for size in SIZES}
SUITES: dict[str, Sequence[str]] = {f"{n}-gpus": [f"{n}x{size_text(size)}" for size in SIZES] for n in DEVICES}


def supports(kind: Kind, problem: Problem, gpu: Gpu) -> str | None:
    """Why no config of the kernels can run `problem` on `gpu`, or None."""
    p = problem
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU"
    if p.dtype not in DTYPES:
        return f"dtype {p.dtype} is not one of {', '.join(DTYPES)}"
    if p.reduction not in REDUCTIONS:
        return f"reduction {p.reduction!r} is not one of {', '.join(REDUCTIONS)}"
    if p.transport not in TRANSPORTS:
        return f"transport {p.transport!r} is not one of {', '.join(TRANSPORTS)}"
    if p.devices < 2:
        return f"devices={p.devices}: a collective needs 2 or more"
    if p.devices > 8:
        return f"devices={p.devices}: the kernels are for up to 8 GPUs of one host"
    if p.size < 1:
        return "the payload is empty: there is nothing to exchange"
    if kind != "all_reduce" and p.size % p.devices:
        return f"size={p.size} is no multiple of devices={p.devices}"
    if payload_bytes(p) > MAX_BYTES:
        return f"a payload of {payload_bytes(p)} bytes is more than {MAX_BYTES}: split it"
    if p.transport == "multimem" and p.reduction != "add" and p.dtype == "float32" and kind != "all_gather":
        return f"multimem has no {p.reduction} of float32: take transport='peer'"
    return None


@functools.lru_cache(256)
def _schedule(kind: Kind, algorithm: str, devices: int, transport: str) -> Schedule:
    return schedules.schedule(kind, algorithm, devices, transport, entry_barrier=True)


def schedule(kind: Kind, problem: Problem, config: Config) -> Schedule:
    """The schedule of a config's algorithm. XLA puts a barrier of all devices before every kernel that accesses peers."""
    return _schedule(kind, config.algorithm, problem.devices, problem.transport)


def kernel_of(kind: Kind, problem: Problem, config: Config, axes: Axes) -> CollectiveKernel:
    """What the kernel is given for a problem and a config. A slice of the payload is padded to whole rows."""
    p, c = problem, config
    plan = schedule(kind, p, c)
    slice_bytes = -(-p.size // plan.slices) * itemsize(p)
    return CollectiveKernel(
        plan,
        rows=-(-slice_bytes // ROW_BYTES),
        dtype=jnp.dtype(p.dtype),
        reduction=p.reduction,
        axes=axes,
        blocks=c.blocks,
        chunk=c.chunk // ROW_BYTES,
        stages=c.stages,
    )


def check(kind: Kind, problem: Problem, config: Config, gpu: Gpu) -> str | None:
    """Why `config` cannot run `problem` on `gpu`, or None. The kernel, the tuner and the tests all ask here."""
    reason = supports(kind, problem, gpu)
    if reason is not None:
        return reason
    p, c = problem, config
    known = (*schedules.algorithms(kind, p.transport), XLA)
    if c.algorithm not in known:
        return f"algorithm={c.algorithm!r} is not one of {', '.join(known)}"
    if not 1 <= c.blocks <= gpu.sms:
        return f"blocks={c.blocks} must be 1 to {gpu.sms}, an SM each: blocks that wait for peers must all be resident"
    if not 4 * ROW_BYTES <= c.chunk <= MAX_CHUNK or c.chunk % (4 * ROW_BYTES):
        return f"chunk={c.chunk} must be a multiple of {4 * ROW_BYTES} bytes up to {MAX_CHUNK}"
    if not 2 <= c.stages <= 16:
        return f"stages={c.stages} must be 2 to 16"
    if c.algorithm == XLA:
        return None
    kernel = kernel_of(kind, p, c, (("device", p.devices),))
    needed = kernel.smem_bytes + 1024
    if needed > gpu.smem_per_block:
        return (
            f"chunk={c.chunk} with stages={c.stages} needs {needed} bytes of shared memory: {gpu.name} has {gpu.smem_per_block}"
        )
    if kernel.schedule.ll:
        if payload_bytes(p) > MAX_LL_BYTES:
            return f"algorithm={c.algorithm!r} is for payloads up to {MAX_LL_BYTES} bytes: it sends twice as many"
        if c.stages != 2:
            return f"stages={c.stages} must be 2 with algorithm={c.algorithm!r}, which has none"
    scratch = kernel.parts("scratch") * kernel.rows * ROW_BYTES
    if scratch > MAX_SCRATCH:
        return f"algorithm={c.algorithm!r} needs {scratch} bytes of scratch memory a device, more than {MAX_SCRATCH}"
    return None


def flops(kind: Kind, problem: Problem) -> int:
    """Of one device: n - 1 operations for each element of the slice that it reduces."""
    return 0 if kind == "all_gather" else (problem.devices - 1) * problem.size // problem.devices


def bytes_moved(kind: Kind, problem: Problem) -> int:
    """Of one device: its input read once, its output written once."""
    whole = payload_bytes(problem)
    return 2 * whole if kind == "all_reduce" else whole + whole // problem.devices


def inputs(kind: Kind, problem: Problem, key: jax.Array) -> tuple[jax.Array, ...]:
    """Random x of all devices, [devices, elements]: normal, or integers from -1000 to 1000."""
    p = problem
    shape = (p.devices, p.size // p.devices if kind == "all_gather" else p.size)
    if jnp.issubdtype(p.dtype, jnp.integer):
        low = 0 if p.dtype.startswith("u") else -1000
        return (jax.random.randint(key, shape, low, 1000).astype(p.dtype),)
    return (jax.random.normal(key, shape, p.dtype),)


def tolerance(problem: Problem) -> float:
    """Of the error, over the rms: a ring rounds at each of its n - 1 steps, the other algorithms once; integers are exact."""
    epsilon = {"bfloat16": 2**-8, "float16": 2**-11, "float32": 2**-22}.get(problem.dtype, 2**-40)
    return problem.devices * epsilon


def distance(a: Problem, b: Problem) -> float | None:
    """In octaves of the payload. A config carries over within a factor of four, between the same devices and transport."""
    if (a.devices, a.transport) != (b.devices, b.transport) or not {a.dtype, b.dtype} <= {*DTYPES}:
        return None
    sizes = sorted(map(payload_bytes, (a, b)))
    if sizes[0] == 0 or sizes[1] > 4 * sizes[0]:
        return None
    return (
        math.log2(sizes[1] / sizes[0])
        + 0.1 * (a.dtype != b.dtype)
        + 0.1 * (a.reduction != b.reduction)
        + 1e-6 * abs(a.size - b.size) / max(a.size, b.size)
    )
