"""What mgpu_ops changes in JAX's Mosaic GPU for the whole process, where it lacks or gets wrong what kernels need.

Each function patches one thing, once; `core/engine.py` calls them all. `core/tma.py` does the same for copies.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.mosaic.gpu import core as mosaic
from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir

# --- Reductions through the switch in float32

# Reductions through the switch in float32, which Mosaic GPU does not ask it for.
#
# `multimem.ld_reduce` of 16-bit floats adds them in any precision that is at least their own, unless it says `.acc::f32`.
# `add_in_float32` makes Mosaic say so. Source: PTX ISA, "multimem.ld_reduce".

_PACKED = {"bf16": "bf16x2", "f16": "f16x2"}


def add_in_float32() -> None:
    """Sums of 16-bit floats in every kernel compiled afterwards in this process are formed in float32, then rounded."""
    load_reduce = utils.multimem_load_reduce

    @functools.wraps(load_reduce)
    def multimem_load_reduce(ty: Any, ptr: Any, reduction: Any, is_signed: bool | None = None) -> Any:
        packed = _PACKED.get(str(ty.element_type)) if isinstance(ty, ir.VectorType) else None
        if reduction != "add" or packed is None:
            return load_reduce(ty, ptr, reduction, is_signed)
        return _add_in_float32(ty, ptr, packed)

    utils.multimem_load_reduce = multimem_load_reduce  # type: ignore[assignment]


def _add_in_float32(ty: Any, ptr: Any, packed: str) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    words = ty.shape[0] * utils.bitwidth(ty.element_type) // 32
    vector, registers = "", "$0"
    if words > 1:
        vector, registers = f".v{words}", "{" + ", ".join(f"${word}" for word in range(words)) + "}"
    loaded = utils.inline_ptx(
        f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32{vector}.{packed} {registers}, [${words}];",
        ptr,
        result_types=[i32] * words,
        has_side_effects=True,
    )
    one = ir.VectorType.get((1,), i32)
    return utils.bitcast(utils.vector_concat([utils.bitcast(word, one) for word in loaded]), ty)


# --- Kernels that reach other GPUs, on a mesh without devices

# Kernels that reach other GPUs, inside `jax.shard_map` over an `AbstractMesh`: jax 0.11 compiles them and fails to run them.
#
# Such a kernel names the replicas that take part, which jax 0.11 reads off a mesh's devices; an abstract mesh has none.
# `name_replicas` names them all, in order, as jax 0.12 does. With other orders of devices Mosaic GPU cannot deal anyway.

_CONFIG, _IDS = "mhlo.backend_config", "xla_replica_ids"


def name_replicas() -> None:
    """Every kernel lowered afterwards in this process names its replicas."""
    lower = mosaic._mosaic_gpu_lowering_rule

    @functools.wraps(lower)
    def lower_with_ids(ctx: Any, *args: Any, **params: Any) -> Any:
        results = lower(ctx, *args, **params)
        mesh = getattr(ctx.module_context.axis_context, "mesh", None)
        if mesh is not None and results:
            _name(results[0].owner, mesh.size)
        return results

    mosaic._mosaic_gpu_lowering_rule = lower_with_ids  # that Pallas calls


def _name(call: Any, size: int) -> None:
    config = {entry.name: entry.attr for entry in call.attributes[_CONFIG]}
    if _IDS in config and not config[_IDS].value:
        config[_IDS] = ir.StringAttr.get(",".join(map(str, range(size))))
        call.attributes[_CONFIG] = ir.DictAttr.get(config)
