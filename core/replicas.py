"""Kernels that reach other GPUs, inside `jax.shard_map` over an `AbstractMesh`: jax 0.11 compiles them and fails to run them.

Such a kernel names the replicas that take part, which jax 0.11 reads off a mesh's devices; an abstract mesh has none.
`install` names them all, in order, as jax 0.12 does. With other orders of devices Mosaic GPU cannot deal anyway.
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.mosaic.gpu import core as mosaic
from jax.extend.mlir import ir

_CONFIG, _IDS = "mhlo.backend_config", "xla_replica_ids"


def install() -> None:
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
