"""Compiles a program while its kernels are still being lowered.

JAX lowers a program from its start to its end, and compiles it then. Kernels take nearly all of the time to lower, in Python.
So each kernel is left out at first, and a call of nothing stands in its place. XLA begins to compile this draft in a thread. It
fails where XLA generates code for the calls; by then XLA has autotuned the program's own products, which is most of its work,
and keeps what it found for the process. Meanwhile the kernels are lowered in their places, the largest first, and each begins
to compile when it is lowered (`parallel_compile.py`). Kernels that are equal are lowered once.

The program has the same text as if its kernels had been lowered in order.
"""

from __future__ import annotations

import collections
import dataclasses
import functools
import io
import threading
from collections.abc import Callable, Sequence
from typing import Any

from jax._src import core as jax_core
from jax._src.interpreters import mlir, pxla
from jax._src.lib import _jax
from jax._src.sharding_impls import ShardingContext
from jax.extend.mlir import ir
from jax.extend.mlir.dialects import stablehlo
from jax.sharding import AbstractMesh, Sharding

from mgpu_ops.core import parallel_compile

_TARGET = "mgpu_ops_draft"  # of the calls of nothing
_CONFIG, _NUMBER = "mhlo.backend_config", "number"


@dataclasses.dataclass(frozen=True)
class _Kernel:
    """A kernel that was left out. lower: called as JAX's rule; key: equal for kernels that are lowered to the same."""

    lower: Callable[..., Any]
    key: Callable[[], str | None]
    ctx: Any
    params: dict[str, Any]
    location: Any
    size: int


class _Program(threading.local):
    """That is being lowered by this thread.

    device: that it is for, unless it is compiled with options of its own. kernels: those left out so far.
    begin: starts to compile.
    """

    device: Any = None
    kernels: list[_Kernel] | None = None
    begin: Callable[[], None] | None = None


_program = _Program()


def compile_early() -> None:
    """Programs for one GPU are compiled while their kernels are lowered from here on."""
    lower_program, lower_function = pxla.lower_sharding_computation, mlir.lower_jaxpr_to_fun

    @functools.wraps(lower_program)
    def lower_for_device(closed_jaxpr: Any, api_name: str, fun_name: str, *args: Any, **options: Any) -> Any:
        before = _program.device
        _program.device = None if options["compiler_options_kvs"] else _device(args[:2])
        try:
            return lower_program(closed_jaxpr, api_name, fun_name, *args, **options)
        finally:
            _program.device = before

    @functools.wraps(lower_function)
    def lower_and_complete(ctx: Any, *args: Any, main_function: bool = False, **options: Any) -> Any:
        before, kernels = _program.kernels, list[_Kernel]()
        if main_function and _has_one_gpu(ctx):
            _program.kernels = kernels
        try:
            made = lower_function(ctx, *args, main_function=main_function, **options)
        finally:
            _program.kernels = before
        if kernels:
            _complete(ctx, kernels)
        return made

    pxla.lower_sharding_computation = lower_for_device
    mlir.lower_jaxpr_to_fun = lower_and_complete


def _device(shardings: Sequence[Any]) -> Any:
    """The device of a program of such arguments and results, if it is one."""
    concrete = [s for many in shardings for s in many if isinstance(s, Sharding)]
    placed = [s for s in concrete if not isinstance(getattr(s, "mesh", None), AbstractMesh)]
    if not placed:
        return pxla.get_default_device()
    devices = placed[0]._device_assignment
    return devices[0] if len(devices) == 1 else None


def _has_one_gpu(ctx: Any) -> bool:
    one = isinstance(ctx.axis_context, ShardingContext) and ctx.axis_context.num_devices == 1
    return one and tuple(ctx.platforms) == ("cuda",) and not ctx.lowering_parameters.for_export


def leave_out(lower: Callable[..., Any], key: Callable[[], str | None], ctx: Any, args: Any, params: dict[str, Any]) -> Any:
    """The results of a call of nothing in place of `lower(ctx, *args, **params)`, where the program will be completed."""
    kernels = _program.kernels
    if kernels is None:
        return lower(ctx, *args, **params)
    number = ir.IntegerAttr.get(ir.IntegerType.get_signless(32), len(kernels))
    kernels.append(_Kernel(lower, key, ctx, params, ir.Location.current, _size(params["jaxprs"][0])))
    types, _ = mlir.ir_tree_registry.flatten([mlir.aval_to_ir_type(ctx.module_context, aval) for aval in ctx.avals_out])
    return mlir.custom_call(
        call_target_name=_TARGET,
        result_types=types,
        operands=args,
        operand_layouts=[[*reversed(range(aval.ndim))] for aval in ctx.avals_in],
        result_layouts=[[*reversed(range(aval.ndim))] for aval in ctx.avals_out],
        backend_config={_NUMBER: number},
        operand_output_aliases=dict(params["input_output_aliases"]),
        api_version=4,
    ).results


def lowers_anew() -> None:
    """Notes that a kernel is about to be lowered: so no cache has the program, and there is time to begin to compile it."""
    if _program.begin is not None:
        _program.begin()


def _size(jaxpr: Any) -> int:
    """How many operations it has, with those of its loops and branches."""
    inner = (_size(getattr(x, "jaxpr", x)) for eqn in jaxpr.eqns for x in jax_core.jaxprs_in_params(eqn.params))
    return len(jaxpr.eqns) + sum(inner)


def _complete(ctx: Any, kernels: list[_Kernel]) -> None:
    """Lowers the kernels that were left out of the program of `ctx`, in their places."""
    places: dict[int, list[Any]] = {}
    autotuned = False

    def visit(op: Any) -> Any:
        nonlocal autotuned
        autotuned = autotuned or _is_autotuned(op)
        if op.name == "stablehlo.custom_call" and ir.StringAttr(op.attributes["call_target_name"]).value == _TARGET:
            places.setdefault(ir.IntegerAttr(op.attributes[_CONFIG][_NUMBER]).value, []).append(op)
        return ir.WalkResult.ADVANCE

    ctx.module.operation.walk(visit)
    similar = collections.Counter((kernels[number].params["name"], kernels[number].size) for number in places)
    known: dict[Any, Any] = {}  # the call of a kernel, by its key
    with _Ahead(ctx, worthwhile=len(places) > 1 and autotuned) as ahead:
        for number in sorted(places, key=lambda number: kernels[number].size, reverse=True):
            kernel = kernels[number]
            key = (similar[kernel.params["name"], kernel.size] > 1 and kernel.key()) or number
            for place in places[number]:
                with ir.InsertionPoint(place), kernel.location:
                    if key in known:
                        results = _again(known[key], place)
                    else:
                        results = list(kernel.lower(kernel.ctx, *place.operands, **kernel.params))
                        if is_all(results[0].owner, results, place.operands):
                            known[key] = results[0].owner
                            ahead.compile(results[0].owner)
                _replace(place, results)


def _is_autotuned(op: Any) -> bool:
    """Whether it is a product or convolution of matrices. Without any, XLA's own part takes a tenth of a second."""
    if op.name != "stablehlo.dot_general":
        return bool(op.name == "stablehlo.convolution")
    numbers = stablehlo.DotDimensionNumbers(op.attributes["dot_dimension_numbers"])
    summed = len(numbers.lhs_batching_dimensions) + len(numbers.lhs_contracting_dimensions)
    return all(operand.type.rank > summed for operand in op.operands)


def is_all(call: Any, results: Sequence[Any], operands: Sequence[Any]) -> bool:
    """Whether a kernel was lowered to this call alone."""
    same = len(call.operands) == len(operands) and len(call.results) == len(results)
    return same and call.name == "stablehlo.custom_call"


def _again(call: Any, place: Any) -> list[Any]:
    """The results of the same call on the operands of `place`."""
    copy = call.operation.clone()
    for number, operand in enumerate(place.operands):
        copy.operands[number] = operand
    return list(copy.results)


def _replace(place: Any, results: list[Any]) -> None:
    """What JAX has added to the call of nothing since, such as metadata, goes to the kernel's."""
    call = results[0].owner
    call.location = place.location
    for name, attribute in place.attributes.items():
        if name not in call.attributes:
            call.attributes[name] = attribute
    for old, new in zip(list(place.results), results, strict=True):
        old.replace_all_uses_with(new)
    place.operation.erase()


class _Ahead:
    """Compiles what there is of a program in threads, from where the first of its kernels is lowered that no cache has."""

    def __init__(self, ctx: Any, worthwhile: bool):
        self._ctx, self._worthwhile = ctx, worthwhile
        self._threads: parallel_compile.Threads | None = None

    def __enter__(self) -> _Ahead:
        self._outer, _program.begin = _program.begin, self._begin
        return self

    def __exit__(self, *_: object) -> None:
        _program.begin = self._outer
        if self._threads is not None:
            self._threads.close(wait=False)

    def compile(self, call: Any) -> None:
        """Only while XLA compiles the draft. A kernel that begins later than another would wait for that one to end."""
        if self._threads is not None and parallel_compile.drafts():
            self._threads.compile_kernel(call)

    def _begin(self) -> None:
        if self._threads is None and self._worthwhile and _runs_here(_program.device):
            self._threads = parallel_compile.Threads(_program.device.client, _program.device)
            text = io.BytesIO()
            self._ctx.module.operation.write_bytecode(text)
            self._threads.compile_draft(text.getvalue())


def _runs_here(device: Any) -> bool:
    """Whether it is a GPU of this process, and not one that is described to it."""
    if device is None or device.platform != "gpu" or parallel_compile.dumping():
        return False
    return device.process_index == device.client.process_index() and not isinstance(device.client, _jax.CompileOnlyPyClient)
