"""Limits of wgmma, TMA and an SM that hold for the problems and configs of every op. core/gemm.py has those of GEMM tiles."""

from __future__ import annotations

import functools
import math
from collections.abc import Iterable, Sequence
from typing import Any, get_type_hints

from mgpu_ops.core.gpu import Gpu

DTYPES = ("bfloat16", "float16")
FLOAT8 = ("float8_e4m3fn", "float8_e5m2")
LINE = 128  # bytes that L2 keeps together, of memory
MAX_SIZE = 2**31 - 256  # of a dimension: 32 bits count up to the end of its last tile


def check_fields(problem: Any, least: dict[str, int] | None = None) -> None:
    """Raises ValueError for a field of a Problem that no call can have, as `field_fault` says."""
    if (fault := field_fault(problem, least)) is not None:
        raise ValueError(fault)


def field_fault(record: Any, least: dict[str, int] | None = None) -> str | None:
    """Which field of a Problem or Config no call can have, and why, or None.

    That is a value of another type than its annotation (`int`, `str` or `bool`), or a number below `least[field]`, by default
    below 0. A symbolic dimension counts as an `int`.
    """
    cls: Any = type(record)
    for name, kind in _kinds(cls):
        value = getattr(record, name)
        if type(value) is not kind:
            if kind is int and _is_symbolic(value):
                continue
            return f"{name}={value!r} of {cls.__name__} must be of type {kind.__name__}, not {type(value).__name__}"
        if kind is int and value < (lowest := (least or {}).get(name, 0)):
            return f"{name}={value} of {cls.__name__} must be at least {lowest}"
    return None


def check_config(name: str, config: Any, kind: type, public: str) -> None:
    """Raises TypeError for an argument that is neither None nor a Config, or is one that JAX cannot compare with others.

    kind: the op's Config, which is mgpu_ops.<public> for a caller.
    """
    if config is not None and not isinstance(config, kind):
        raise TypeError(f"{name} is {config!r}: pass a mgpu_ops.{public}")
    if config is not None and (fault := unhashable_field(config)) is not None:
        raise TypeError(f"{name}: {fault}")


def unhashable_field(config: Any) -> str | None:
    """Which field of a Config holds what is not hashable, such as a list, and what to put there, or None.

    A Config is part of the key by which JAX finds what it has traced.
    """
    try:
        hash(config)
    except TypeError:
        return f"{field_fault(config)}: give the field one such value (`mgpu-tune run` tries several)"
    return None


@functools.cache
def _kinds(cls: type) -> tuple[tuple[str, Any], ...]:
    return tuple(get_type_hints(cls).items())


def _is_symbolic(value: Any) -> bool:
    from jax import export

    return export.is_symbolic_dim(value)


@functools.cache
def itemsize_of(dtype: str) -> int:
    """Bytes of an element of this dtype."""
    return {"float64": 8, "float32": 4, "int32": 4, "int8": 1}.get(dtype, 1 if dtype.startswith("float8") else 2)


def result_dtype(dtype: str) -> str:
    """The dtype of a product's result where none is asked for: that of its operands; of 8 bits bfloat16 or int32."""
    return "int32" if dtype == "int8" else "bfloat16" if dtype.startswith("float8") else dtype


def supports_gpu(gpu: Gpu) -> str | None:
    """Why `gpu` has no wgmma, or None."""
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU: the kernel uses wgmma (sm_90a); use backend='xla'"
    return None


def supports_dtypes(dtype: str, out_dtype: str, gpu: Gpu) -> str | None:
    """Why wgmma on `gpu` cannot multiply `dtype` into `out_dtype`, or None."""
    if reason := supports_gpu(gpu):
        return reason
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(DTYPES)}: cast, or use backend='xla'"
    if out_dtype not in (dtype, "float32"):
        return f"out_dtype {out_dtype} is neither the inputs' {dtype} nor float32: cast the result, or use backend='xla'"
    return None


def supports_sizes(problem: Any, names: tuple[str, ...]) -> str | None:
    """Why a kernel cannot run along these dimensions of a problem (unknown, zero, or too large to count), or None."""
    for name in names:
        size = getattr(problem, name)
        if type(size) is not int:
            return f"{name}={size} is not known when the program is traced"
        if size < 1:
            return f"a dimension of {problem} is zero: there is nothing to compute"
        if size > MAX_SIZE:
            return f"{name}={size} is more than {MAX_SIZE}, which the kernels count in 32 bits: split it, or use backend='xla'"
    return None


def require(op: str, reason: str | None, problem: Any, gpu: Gpu) -> None:
    """Raises ValueError where there is a `reason` why no config of an op runs a problem."""
    if reason is not None:
        raise ValueError(f"no config of {op} fits {problem} on {gpu.name}: {reason}")


def first_of[C](configs: Sequence[C], problem: Any, gpu: Gpu) -> C:
    """The first config. Raises ValueError where there is none."""
    if not configs:
        raise ValueError(f"no config that the ops know of runs {problem} on {gpu.name}: use backend='xla'")
    return configs[0]


def supports_rows(rows: dict[str, tuple[str, int, int]]) -> str | None:
    """Why TMA cannot copy an array, or None.

    `rows`: array -> (the dimension along its rows, their length, bytes per element).
    """
    for what, (name, length, itemsize) in rows.items():
        if length * itemsize % 16:
            unit = 16 // itemsize
            return (
                f"{name}={length} needs 16-byte rows of {what} (TMA): pad to {-(-length // unit) * unit} or pass backend='xla'"
            )
    return None


# --- Registers

WARP, WARPGROUP = 32, 128  # threads


def check_producer_registers(registers: int) -> str | None:
    """Why a Config's `memory_registers` cannot be those of a producer thread, or None. Source: PTX ISA, "setmaxnreg"."""
    if registers % 8 or not 24 <= registers <= 128:
        return f"memory_registers={registers} must be a multiple of 8 from 24 to 128 (setmaxnreg)"
    return None


def consumer_registers(consumers: int, producer_registers: int, gpu: Gpu, helper_registers: int = 0) -> int:
    """Registers of a consumer thread under `engine.specialize`: a multiple of 8, at most 240.

    The `consumers` warpgroups share what the one producer warpgroup leaves, and a helper if there is one. At the launch, all
    warpgroups get equally many registers, a multiple of 8 a thread; setmaxnreg then moves them to consumers.
    """
    launched = launched_registers(consumers, gpu, helper_registers) * (consumers + 1 + (helper_registers > 0))
    return min(240, (launched - producer_registers - helper_registers) // consumers // 8 * 8)


def launched_registers(consumers: int, gpu: Gpu, helper_registers: int = 0) -> int:
    """Registers of each thread at the launch, as in `consumer_registers`: what ptxas compiles the kernel for."""
    warpgroups = consumers + 1 + (helper_registers > 0)
    return gpu.registers_per_sm // WARPGROUP // warpgroups // 8 * 8


# --- Shared memory

ALIGNMENT = 1024  # Mosaic starts every buffer at a multiple: a 128-byte swizzle repeats every 8 rows of 128 bytes
BARRIER_BYTES = 8  # an mbarrier is one 64-bit word
REDUCTIONS = 2048  # bytes that Mosaic takes where a kernel adds up, or looks for the largest, over a warpgroup

Buffer = tuple[tuple[int, ...], int]  # its shape and bytes per element


def check_smem(size: int, gpu: Gpu) -> str | None:
    """Why a block of `gpu` cannot have so many bytes of shared memory, or None."""
    if size > gpu.smem_per_block:
        return f"{size} bytes of shared memory exceed the {gpu.smem_per_block} of {gpu.name}: use fewer steps or smaller tiles"
    return None


def block_bytes(buffers: Iterable[Buffer], barriers: int) -> int:
    """Bytes of shared memory a block needs for `buffers` and `barriers` mbarriers."""
    size = 0
    for shape, itemsize in buffers:
        size = -(-size // ALIGNMENT) * ALIGNMENT + math.prod(shape) * itemsize
    return size + BARRIER_BYTES * barriers


_LEFT_OVER = 12  # SMs that clusters of more than two blocks cannot fill; measured on an H200 (docs/kernels/matmul.md)


def resident_clusters(blocks: int, gpu: Gpu) -> int:
    """How many clusters of `blocks` blocks run at once, at least, where a block fills an SM.

    A cluster lies within one GPC, and the numbers of SMs of the GPCs are no multiples of 4 or 8: some SMs are left over.
    """
    if blocks <= 2:
        return max(1, gpu.sms // blocks)
    return max(1, gpu.sms // blocks - math.ceil(_LEFT_OVER / blocks))


def columns_of_a_block(columns: int, blocks: int) -> int:
    """Columns of a tile that a block of a cluster gets: the fewest, in eights, that divide them. Some blocks may get none."""
    return next(own for own in range(8, columns + 1, 8) if columns % own == 0 and columns // own <= blocks)
