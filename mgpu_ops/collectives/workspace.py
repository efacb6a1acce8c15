"""Memory that stays from call to call, with which small collectives need neither XLA's barrier nor zeroed scratch.

A call in a workspace is one kernel of one trip over the links. What would be settled before it follows from the calls before:
`core/exchange.py` says how.
"""

from __future__ import annotations

import dataclasses
import functools
import math
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mgpu_ops.collectives.problem import MAX_LINES, Config, Problem, exchange_of, itemsize
from mgpu_ops.core import exchange
from mgpu_ops.core.collective import Kind
from mgpu_ops.core.exchange import LINE_WORDS, ROW_BYTES, WORKSPACE_BLOCKS

PAYLOAD: Final = 2**18  # bytes, by default
SECOND_TRIP: Final = 355_000  # bytes that pass a link during the latency of one trip


@functools.partial(jax.tree_util.register_dataclass, data_fields=["ref"], meta_fields=["axis_name", "devices", "payload_bytes"])
@dataclasses.dataclass(frozen=True)
class Workspace:
    """What `collective_workspace` returns: a pytree with one `jax.Ref`, to be passed through jit and shard_map.

    axis_name: of the collectives that may use it. devices: that take part in one. payload_bytes: of the largest one.
    """

    ref: Any
    axis_name: tuple[str, ...]
    devices: int
    payload_bytes: int


def collective_workspace(mesh: Mesh, axis_name: str | Sequence[str], payload_bytes: int = PAYLOAD) -> Workspace:
    """Memory on the GPUs of `mesh` for small collectives over `axis_name`, that makes them a single kernel each.

    Pass it to the function under `jax.shard_map`, sharded over all axes of the mesh, and on to the collectives:

        workspace = mgpu_ops.collective_workspace(mesh, "model")

        def step(x, workspace):
            return mgpu_ops.all_reduce(x, "model", workspace=workspace)

        specs = P("model"), P(mesh.axis_names)
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=False))
        y = step(x, workspace)

    Args:
      mesh: its devices run the same programs in the same order, as those of one process do. After a program that failed on some
        of them, make a new workspace: they no longer agree on how many calls there were.
      axis_name: the axis, or several, of the collectives. Others need a workspace of their own.
      payload_bytes: of the largest all_reduce that uses it (of reduce_scatter and all_gather, n times as many); larger ones go
        the usual way. By default 256 KiB. For n devices it takes 4 n times as much memory on each.

    Raises:
      ValueError: an axis that the mesh has not, no bytes, or more than 1 MiB.
    """
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown or not names:
        raise ValueError(f"axis_name={axis_name!r} is not of the mesh, whose axes are {', '.join(map(repr, mesh.axis_names))}")
    n = math.prod(mesh.shape[name] for name in names)
    if not 0 < payload_bytes <= MAX_LINES:
        raise ValueError(f"payload_bytes={payload_bytes} must be 1 to {MAX_LINES}: larger collectives need no workspace")
    rows = exchange.workspace_rows(n, -(-payload_bytes // ROW_BYTES))
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    ref = jax.new_ref(jax.device_put(np.zeros((mesh.size, rows, LINE_WORDS), np.int32), sharding))
    jax.block_until_ready(jnp.copy(ref[...]))  # a peer may write to it from now on
    return Workspace(ref, names, n, payload_bytes)


def config_for(kind: Kind, problem: Problem, workspace: Workspace) -> Config | None:
    """How a collective runs in a workspace, or None where it is too large."""
    p, n = problem, problem.devices
    one, two = 2 * (n - 1), 4 * (n - 1) / n  # payloads over the link
    two_shot = kind == "all_reduce" and (one - two) * p.size * itemsize(p) > SECOND_TRIP
    config = Config("ll_two_shot" if two_shot else "ll_one_shot", WORKSPACE_BLOCKS, 4 * ROW_BYTES, 2)
    what = exchange_of(kind, p, config, (("device", n),))
    if what.parts("scratch") * what.rows > n * -(-workspace.payload_bytes // ROW_BYTES):
        return None
    granule = 4 * ROW_BYTES
    rows = what.rows * (n if kind == "all_gather" else 1)
    return dataclasses.replace(config, chunk=-(-rows * ROW_BYTES // (WORKSPACE_BLOCKS * granule)) * granule)
