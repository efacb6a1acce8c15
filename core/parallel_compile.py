"""Compiles the kernels of a program at the same time, in threads, where XLA would compile one after the other.

XLA asks Mosaic for each kernel as it comes to it. Mosaic keeps what the process has compiled, by a kernel's hash; who asks
for a kernel that is being compiled waits for it. So each kernel is compiled in a program of its own, the largest first, while
XLA compiles the whole; neither Mosaic nor ptxas holds Python's lock. With enough cores all kernels of a program take as long as
the largest of them. With fewer cores than kernels XLA may come to one just when a thread does: then both compile it.

They begin together: Mosaic and XLA set LLVM's options for the whole process, so that each generates code only while the other
does not. A program that XLA begins to compile while a kernel is being compiled waits for its end.
"""

from __future__ import annotations

import contextlib
import functools
import io
import os
from collections.abc import Iterator
from concurrent.futures import Future, ThreadPoolExecutor, wait
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
_compile = compiler.backend_compile_and_load
_begun: set[bytes] = set()  # hashes of kernels that are compiled since before their program
_drafts: set[Future[None]] = set()  # that are being compiled


def lowered() -> None:
    """Notes that this process has lowered a kernel: until then programs are not searched for any."""
    global _lowered
    _lowered = True


def drafts() -> bool:
    """Whether a draft of a program is being compiled."""
    return bool(_drafts)


def dumping() -> bool:
    """Whether Mosaic prints what it does."""
    return any(name.startswith(_DUMPS) for name in os.environ)


def compile_at_once() -> None:
    """Programs with several kernels are compiled so from here on."""

    @functools.wraps(_compile)
    def compile_with_kernels(backend: Any, module: Any, executable_devices: Any, *args: Any, **kwargs: Any) -> Any:
        kernels = kernels_of(module) if _lowered and not dumping() else {}
        with _compiling(kernels, backend, executable_devices) if len(kernels) > 1 else contextlib.nullcontext():
            return _compile(backend, module, executable_devices, *args, **kwargs)

    compiler.backend_compile_and_load = compile_with_kernels


@contextlib.contextmanager
def _compiling(kernels: dict[bytes, Any], backend: Any, devices: Any) -> Iterator[None]:
    """Compiles each of `kernels` meanwhile, for the first of `devices`. XLA raises what fails, when it comes to it."""
    wait(_drafts.copy())  # the draft of this program among them
    programs = [program_of(call) for key, call in kernels.items() if key not in _begun]
    here = [device for device in devices if device.process_index == backend.process_index()]  # of all those of a job
    if not here:
        yield
        return
    threads = Threads(backend, here[0])
    try:
        for program in sorted(programs, key=len, reverse=True):
            threads.compile(program)
        yield
    finally:
        threads.close(wait=True)


class Threads:
    """Threads that compile programs for a device."""

    def __init__(self, backend: Any, device: Any):
        self._backend, self._devices = backend, xla_client.DeviceList((device,))
        self._options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=[[device.id]])
        self._pool = ThreadPoolExecutor(max(2, len(os.sched_getaffinity(0))), thread_name_prefix="mgpu_ops_compile")

    def compile(self, program: bytes) -> Future[None]:
        return self._pool.submit(self._run, program)

    def compile_kernel(self, call: Any) -> None:
        """One of a program that is still being lowered."""
        if is_kernel(call):
            _begun.add(_hash(call))
            self.compile(program_of(call))

    def compile_draft(self, program: bytes) -> None:
        """Of a program that is still being lowered: it is compiled when this has ended."""
        draft = self.compile(program)
        _drafts.add(draft)
        draft.add_done_callback(_drafts.discard)

    def close(self, *, wait: bool) -> None:
        self._pool.shutdown(wait=wait)

    def _run(self, program: bytes) -> None:
        with mlir.make_ir_context():
            _compile(self._backend, ir.Module.parse(program), self._devices, self._options, [])


def kernels_of(module: Any) -> dict[bytes, Any]:
    """By its hash, a call of each distinct kernel of a StableHLO module.

    Kernels that reach other GPUs are left out: they do not run in a program of one device.
    """
    calls: dict[bytes, Any] = {}

    def visit(op: Any) -> Any:
        if is_kernel(op):
            calls.setdefault(_hash(op), op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
    return calls


def _hash(call: Any) -> bytes:
    value: bytes = ir.StringAttr(call.attributes[_CONFIG][_HASH]).value_bytes
    return value


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
