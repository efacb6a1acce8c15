"""Compiles the kernels of a program at the same time, in threads, where XLA would compile one after the other.

XLA asks Mosaic for each kernel as it comes to it. Mosaic keeps what the process has compiled, by a kernel's hash; who asks
for a kernel that is being compiled waits for it. So each kernel is compiled in a program of its own, the largest first, while
XLA compiles the whole; neither Mosaic nor ptxas holds Python's lock. With enough cores all kernels of a program take as long as
the largest of them.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from typing import Any

from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

TARGET = "mosaic_gpu_v2"  # of Mosaic's custom calls
_CONFIG, _HASH, _PEERS = "mhlo.backend_config", "kernel_hash", "xla_replica_ids"
_DUMPS = "MOSAIC_GPU_DUMP_"  # of variables that make Mosaic print what it does, a kernel after the other
_lowered = False


def lowered() -> None:
    """Notes that this process has lowered a kernel: until then programs are not searched for any."""
    global _lowered
    _lowered = True


def dumping() -> bool:
    """Whether Mosaic prints what it does."""
    return any(name.startswith(_DUMPS) for name in os.environ)


def compile_at_once() -> None:
    """Programs with several kernels are compiled so from here on."""
    compile_program = compiler.backend_compile_and_load

    @functools.wraps(compile_program)
    def compile_with_kernels(backend: Any, module: Any, executable_devices: Any, *args: Any, **kwargs: Any) -> Any:
        run = functools.partial(compile_program, backend)
        kernels = alone(module) if _lowered and not dumping() else []
        with _compiling(run, kernels, _of_process(backend, executable_devices)) if kernels else contextlib.nullcontext():
            return run(module, executable_devices, *args, **kwargs)

    compiler.backend_compile_and_load = compile_with_kernels


def _of_process(backend: Any, devices: Any) -> list[Any]:
    """Those of `devices` that this process of a job has."""
    return [device for device in devices if device.process_index == backend.process_index()]


@contextlib.contextmanager
def _compiling(compile_program: Any, kernels: list[bytes], devices: list[Any]) -> Iterator[None]:
    """Compiles each of `kernels` meanwhile, for the first of `devices`. XLA raises what fails, when it comes to it."""
    if not devices:
        yield
        return
    device = devices[0]
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=[[device.id]])
    own = xla_client.DeviceList((device,))

    def compile_one(program: bytes) -> None:
        with mlir.make_ir_context():
            compile_program(ir.Module.parse(program), own, options, [])

    threads = max(2, len(os.sched_getaffinity(0)))
    with ThreadPoolExecutor(min(threads, len(kernels)), thread_name_prefix="mgpu_ops_compile") as pool:
        for program in sorted(kernels, key=len, reverse=True):
            pool.submit(compile_one, program)
        yield


def alone(module: Any) -> list[bytes]:
    """For each distinct kernel of a StableHLO module, a module that runs it alone, as bytecode; [] where there is but one.

    Kernels that reach other GPUs are left out: they do not run in a program of one device.
    """
    calls: dict[bytes, Any] = {}

    def visit(op: Any) -> Any:
        if is_kernel(op):
            calls.setdefault(ir.StringAttr(op.attributes[_CONFIG][_HASH]).value_bytes, op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        return [program_of(call) for call in calls.values()] if len(calls) > 1 else []


def is_kernel(op: Any) -> bool:
    """Whether an operation of StableHLO calls a kernel that stays on its GPU."""
    if op.name != "stablehlo.custom_call" or _CONFIG not in op.attributes:
        return False
    return ir.StringAttr(op.attributes["call_target_name"]).value == TARGET and _PEERS not in op.attributes[_CONFIG]


def program_of(call: Any) -> bytes:
    """A module that has this call alone, as bytecode."""
    with ir.Location.unknown(call.context):
        program = ir.Module.create()
        one = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), 1)
        for name in ("mhlo.num_partitions", "mhlo.num_replicas"):
            program.operation.attributes[name] = one
        program.operation.attributes["sym_name"] = ir.StringAttr.get("mgpu_ops_kernel")
        with ir.InsertionPoint(program.body):
            main = func.FuncOp("main", ([x.type for x in call.operands], [x.type for x in call.results]))
        block = main.add_entry_block()
        with ir.InsertionPoint(block):
            copy = call.operation.clone()
            for number, argument in enumerate(block.arguments):
                copy.operands[number] = argument
            func.ReturnOp(copy.results)
        text = io.BytesIO()
        program.operation.write_bytecode(text)
        return text.getvalue()
