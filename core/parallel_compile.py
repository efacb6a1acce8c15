"""Compiles the kernels of a program at the same time, in threads, each as soon as it is lowered.

XLA asks Mosaic for each kernel as it comes to it, one after the other. Mosaic keeps what the process has compiled, by its
hash; who asks for a kernel that is being compiled waits for it. So each kernel is compiled in a program of its own. That begins
while JAX lowers the next kernel, as neither Mosaic nor ptxas holds Python's lock; kernels that were not (`ahead`) begin with
their program, the largest first. With enough cores, kernels that begin together take as long as the largest.

Mosaic and XLA give LLVM different options, which belong to the process: while one generates code the other waits. A kernel
that begins while others are compiled waits for those, and XLA generates code for its part of a program before or after kernels.

A kernel that does not compile fails here without a word: XLA raises the error when it comes to it.
"""

from __future__ import annotations

import collections
import contextlib
import functools
import io
import os
import threading
from collections.abc import Callable, Iterator
from contextvars import ContextVar
from typing import Any

import jax
from jax._src import compiler
from jax._src.interpreters import mlir
from jax._src.lib import xla_client
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import func

TARGET = "mosaic_gpu_v2"  # of Mosaic's custom calls
_CONFIG, _HASH, _PEERS = "mhlo.backend_config", "kernel_hash", "xla_replica_ids"
_DUMPS = "MOSAIC_GPU_DUMP_"  # of variables that make Mosaic print what it does, a kernel after the other
_ahead: ContextVar[bool] = ContextVar("_ahead", default=True)


class Threads:
    """Threads that end where there is no more to do. What has not begun when the process ends is dropped."""

    def __init__(self, most: int):
        self._most, self._running = most, 0
        self._jobs: collections.deque[Callable[[], Any]] = collections.deque()
        self._changed = threading.Condition()

    def begin(self, job: Callable[[], Any]) -> None:
        with self._changed:
            self._jobs.append(job)
            if self._running == self._most:
                return
            self._running += 1
        threading.Thread(target=self._run, name="mgpu_ops_compile").start()

    def wait(self) -> None:
        """Returns when all that has begun is done."""
        with self._changed:
            self._changed.wait_for(lambda: self._running == 0)

    def _run(self) -> None:
        while job := self._next():
            with contextlib.suppress(BaseException):
                job()

    def _next(self) -> Callable[[], Any] | None:
        with self._changed:
            if self._jobs and threading.main_thread().is_alive():
                return self._jobs.popleft()
            self._running -= 1
            self._changed.notify_all()
            return None


_threads = Threads(max(2, len(os.sched_getaffinity(0))))
_begun: set[bytes] = set()  # hashes of the kernels that this process has begun to compile
_lowered = False
_compile_program = compiler.backend_compile_and_load  # JAX's own


def _forked() -> None:
    """A process has none of the threads of the one that it was forked from, nor what they would have compiled."""
    global _threads
    _threads = Threads(max(2, len(os.sched_getaffinity(0))))
    _begun.clear()


os.register_at_fork(after_in_child=_forked)


def wait() -> None:
    """Returns when no kernel is compiled in a thread of this module."""
    _threads.wait()


@contextlib.contextmanager
def ahead(value: bool) -> Iterator[None]:
    """Whether the kernels that are lowered in this context are compiled at once. Default: they are."""
    token = _ahead.set(value)
    try:
        yield
    finally:
        _ahead.reset(token)


def lowered(context: Any, call: Any) -> None:
    """Begins to compile the kernel of a custom call that was just lowered. context: the ModuleContext in which it was.

    It waits for the program where JAX has a persistent cache, which may hold the program, and for what is not lowered to be
    compiled here.
    """
    global _lowered
    _lowered = True  # until then programs are not searched for kernels
    backend = context.backend
    if backend is None or context.lowering_parameters.for_export or jax.config.jax_compilation_cache_dir:
        return
    here = tuple(context.platforms) == (getattr(backend, "_raw_platform", backend.platform),)
    if here and _ahead.get() and not _dumping() and _runs_alone(call):
        devices = backend.devices()
        if len({device.device_kind for device in devices}) == 1:  # else nobody knows yet for which the program is
            _begin(_hash(call), functools.partial(_alone, call), backend, devices)


def compile_at_once() -> None:
    """The kernels of a program that have not begun to compile all do when the program does."""

    @functools.wraps(_compile_program)
    def compile_with_kernels(backend: Any, module: Any, executable_devices: Any, *args: Any, **kwargs: Any) -> Any:
        if _lowered and not _dumping():
            programs = alone(module)
            for kernel in sorted(programs, key=lambda kernel: len(programs[kernel]), reverse=True):
                _begin(kernel, functools.partial(programs.__getitem__, kernel), backend, executable_devices)
        return _compile_program(backend, module, executable_devices, *args, **kwargs)

    compiler.backend_compile_and_load = compile_with_kernels


def _dumping() -> bool:
    return any(name.startswith(_DUMPS) for name in os.environ)


def _begin(kernel: bytes, program: Callable[[], bytes], backend: Any, devices: Any) -> None:
    """Compiles the program of a kernel in a thread, for the first of `devices` that this process of a job has."""
    own = [device for device in devices if device.process_index == backend.process_index()]
    if own and kernel not in _begun:
        _begun.add(kernel)
        _threads.begin(functools.partial(_compile, program(), backend, own[0]))


def _compile(program: bytes, backend: Any, device: Any) -> None:
    options = compiler.get_compile_options(num_replicas=1, num_partitions=1, device_assignment=[[device.id]])
    with mlir.make_ir_context():
        _compile_program(backend, ir.Module.parse(program), xla_client.DeviceList((device,)), options, [])


def alone(module: Any) -> dict[bytes, bytes]:
    """By its hash, each kernel of a StableHLO module in a module that runs it alone, as bytecode; {} where there is but one.

    Left out are those that have begun to compile, and those that reach other GPUs, as these do not run in a program of one.
    """
    calls: dict[bytes, Any] = {}

    def visit(op: Any) -> Any:
        if _runs_alone(op):
            calls.setdefault(_hash(op), op)
        return ir.WalkResult.ADVANCE

    with module.context:
        module.operation.walk(visit)
        wanted = calls.keys() - _begun if len(calls) > 1 else ()
        return {kernel: _alone(calls[kernel]) for kernel in wanted}


def _runs_alone(op: Any) -> bool:
    """Whether it is the call of a kernel that reaches no other GPU."""
    if op.name != "stablehlo.custom_call" or _CONFIG not in op.attributes:
        return False
    return ir.StringAttr(op.attributes["call_target_name"]).value == TARGET and _PEERS not in op.attributes[_CONFIG]


def _hash(call: Any) -> bytes:
    return ir.StringAttr(call.attributes[_CONFIG][_HASH]).value_bytes


def _alone(call: Any) -> bytes:
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
