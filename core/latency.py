"""Tells XLA's scheduler how long kernels take, in programs over several devices.

XLA runs a collective beside what it expects to take as long, and expects a custom call to take no time: it would gather the
weights of all layers before the first kernel, while nothing else runs. It reads the attribute `latency_metadata` of a call, in
nanoseconds. Source: xla/service/latency_hiding_scheduler.cc, `LatencyEstimator::GetLatencyFromMetadata`.

A kernel's time is the modelled one of the call that launches it: `of_call`. It is one of the kernel's compiler parameters, and
`tell_scheduler` writes it where the kernel is lowered.
"""

from __future__ import annotations

import contextlib
import contextvars
import dataclasses
import functools
from typing import Any

import numpy as np

from mgpu_ops.core import mesh
from mgpu_ops.core.contexts import having

_ATTRIBUTES = "mhlo.frontend_attributes"
_seconds: contextvars.ContextVar[float] = contextvars.ContextVar("seconds of a call", default=0.0)


def of_call(seconds: float) -> contextlib.AbstractContextManager[None]:
    """The kernels that are launched within take so long together. 0: nothing is told."""
    return having(_seconds, seconds)


@functools.cache
def _params_type() -> type:
    from jax.experimental.pallas import mosaic_gpu as plgpu

    return dataclasses.make_dataclass("CompilerParams", [("nanoseconds", int, 0)], bases=(plgpu.CompilerParams,), frozen=True)


def compiler_params(share: float, **params: Any) -> Any:
    """Pallas' compiler parameters, with the time of a kernel that takes this share of its call's."""
    return _params_type()(nanoseconds=round(share * _seconds.get() * 1e9), **params)


def tell_scheduler() -> None:
    """From here on kernels are lowered with their times."""
    from jax._src.pallas.mosaic_gpu import pallas_call_registration as registration

    lower = registration.mpmd_map_mgpu_lowering_rule

    @functools.wraps(lower)
    def lower_told(ctx: Any, *args: Any, **params: Any) -> Any:
        results = lower(ctx, *args, **params)
        nanoseconds = getattr(params["compiler_params"], "nanoseconds", 0)
        if not nanoseconds or not results:
            return results
        call = results[0].owner
        _mark(call, nanoseconds)
        return _in_a_loop(call, args, dict(params["input_output_aliases"])) if mesh.is_part() else results

    registration.mpmd_map_mgpu_lowering_rule = lower_told


def _mark(call: Any, nanoseconds: int) -> None:
    from jax.extend.mlir import ir

    others = call.attributes[_ATTRIBUTES] if _ATTRIBUTES in call.attributes else ()  # noqa: SIM401, it has no `get`
    told = {other.name: other.attr for other in others} | {"latency_metadata": ir.StringAttr.get(str(nanoseconds))}
    call.attributes[_ATTRIBUTES] = ir.DictAttr.get(told)


def _in_a_loop(call: Any, args: Any, aliases: dict[int, int]) -> list[Any]:
    """The results of a call, which is put into a loop of one turn.

    XLA's partitioner drops the attributes of the operations that it puts in a call's place, but not those of operations within
    them. Loops of one turn it takes apart later.

    aliases: from operands to the results that take their places.
    """
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo as hlo

    word = ir.RankedTensorType.get((), ir.IntegerType.get_signless(32))
    zero, one = (hlo.constant(ir.DenseElementsAttr.get(np.array(n, np.int32))) for n in (0, 1))
    source = {of_output: of_input for of_input, of_output in aliases.items()}
    first = [args[source[i]] if i in source else _zeros(result.type) for i, result in enumerate(call.results)]
    types = [word, *(x.type for x in first)]
    loop = hlo.WhileOp(types, [zero, *first])
    before, after = (region.blocks.append(*types) for region in loop.regions)
    with ir.InsertionPoint(before):
        hlo.return_([hlo.compare(before.arguments[0], one, hlo.ComparisonDirectionAttr.get("LT"))])
    with ir.InsertionPoint(after):
        end = hlo.return_([hlo.add(after.arguments[0], one), *call.results])
    call.move_before(end)
    for i, of_input in source.items():
        call.operands[of_input] = after.arguments[1 + i]
    return list(loop.results)[1:]


def _zeros(kind: Any) -> Any:
    """A constant of a type of arrays."""
    from jax.extend.mlir import ir
    from jax.extend.mlir.dialects import stablehlo as hlo

    element = kind.element_type
    zero = ir.FloatAttr.get(element, 0.0) if isinstance(element, ir.FloatType) else ir.IntegerAttr.get(element, 0)
    return hlo.constant(ir.DenseElementsAttr.get_splat(kind, zero))
