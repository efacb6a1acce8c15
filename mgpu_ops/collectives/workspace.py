"""Memory that stays from call to call, at addresses that stay the same, with which a small collective is one plain kernel.

Nothing runs before the kernel: the host looks up no addresses of peers, no scratch is zeroed, and there is no barrier. XLA
takes the kernel into its CUDA graphs. The calls before it make sure of what the barrier otherwise would: `layout.LLMemory`.

XLA then knows nothing of what passes between the GPUs, so one thing that XLA sees to for kernels with peers must hold without
it: all GPUs have loaded a program's kernels before one of them waits in a later program. (A load waits until its GPU is idle,
and holds a lock that all loads of the process take.) It holds, because JAX dispatches a program to all GPUs of a process before
the next program. JAX's other client for GPUs (`_TFRT`) need not, and is refused.
"""

from __future__ import annotations

import dataclasses
import functools
import math
import os
from collections.abc import Sequence
from typing import Any, Final

import jax
import jax.numpy as jnp
import numpy as np
from jax.sharding import Mesh, NamedSharding, PartitionSpec

from mgpu_ops.collectives import layout
from mgpu_ops.collectives.layout import LL_WORDS, ROW_BYTES, WORKSPACE_BLOCKS, Axes, LLMemory
from mgpu_ops.collectives.problem import MAX_LL_BYTES, Config, Problem, itemsize, kernel_of, payload_bytes
from mgpu_ops.collectives.schedules import Kind
from mgpu_ops.core.jax_names import AbstractRef
from mgpu_ops.registry import job

SECOND_TRIP: Final = 355_000  # bytes that pass a link during the latency of one trip
_TFRT, _ALLOCATOR = "XLA_PYTHON_CLIENT_USE_TFRT_GPU_CLIENT", "XLA_PYTHON_CLIENT_ALLOCATOR"
_CALLS = 0  # the count of calls that a new workspace starts from
_kept: list[jax.Array] = []  # LL memory, to which peers may write whatever becomes of a workspace


@functools.partial(
    jax.tree_util.register_dataclass, data_fields=["where"], meta_fields=["axis_name", "devices", "payload_bytes", "mesh"]
)
@dataclasses.dataclass(frozen=True)
class Workspace:
    """What `collective_workspace` returns: a pytree with one small array, to be passed through jit and shard_map and opened.

    axis_name: of the collectives that may use it. devices: that take part in one. payload_bytes: of the largest one. mesh: the
    axes of the mesh, with their sizes.
    """

    where: Any  # addresses, [devices, `layout.where_words`]; in an open workspace a ref
    axis_name: tuple[str, ...]
    devices: int
    payload_bytes: int
    mesh: Axes

    def open(self) -> Workspace:
        """The workspace as collectives take it. Call it once a program, at the start of what shard_map runs: a workspace that
        is open keeps the program's collectives in order.
        """
        return self if self.opened else dataclasses.replace(self, where=jax.new_ref(self.where))

    @property
    def opened(self) -> bool:
        return isinstance(jax.typeof(self.where), AbstractRef)

    @property
    def memory(self) -> LLMemory:
        """For the kernel, of an open workspace."""
        return LLMemory(self.where, _rows(self.payload_bytes))


def collective_workspace(mesh: Mesh, axis_name: str | Sequence[str], payload_bytes: int = MAX_LL_BYTES) -> Workspace:
    """Memory on the GPUs of `mesh`, with which each small collective over `axis_name` is a single plain kernel.

    Pass it to the function under `jax.shard_map`, sharded over all axes of the mesh, open it there, and pass it to collectives:

        workspace = mgpu_ops.collective_workspace(mesh, "model")

        def step(x, workspace):
            workspace = workspace.open()
            return mgpu_ops.all_reduce(x, "model", workspace=workspace)

        specs = P("model"), P(mesh.axis_names)
        step = jax.jit(jax.shard_map(step, mesh=mesh, in_specs=specs, out_specs=P("model"), check_vma=False))
        y = step(x, workspace)

    Make one and keep it: its memory is not given back before the process ends.

    Args:
      mesh: its devices run the same programs in the same order, as those of one process do when one thread dispatches them.
        If a program failed on some of them, make a new workspace: they no longer agree on how many calls there were. The
        workspace is not used in a job of several processes, with JAX's memory allocators cuda_async or vmm, or without
        GPUs.
      axis_name: the axis, or several, of the collectives. Others need a workspace of their own.
      payload_bytes: of the largest all_reduce that uses it; larger ones run without it. By default 1 MiB, the maximum. For n
        devices the workspace takes 4 n times as much memory on each.

    Raises:
      TypeError: a mesh without devices. ValueError: an axis that the mesh has not, no bytes, or more than 1 MiB.
    """
    if not isinstance(mesh, Mesh):
        raise TypeError(
            f"mesh is of type {type(mesh).__name__}: pass a jax.sharding.Mesh, on whose devices the memory is to be"
        )
    names = (axis_name,) if isinstance(axis_name, str) else tuple(axis_name)
    unknown = [name for name in names if name not in mesh.axis_names]
    if unknown or not names:
        raise ValueError(f"axis_name={axis_name!r} is not of the mesh, whose axes are {', '.join(map(repr, mesh.axis_names))}")
    n = math.prod(mesh.shape[name] for name in names)
    if not 0 < payload_bytes <= MAX_LL_BYTES:
        raise ValueError(f"payload_bytes={payload_bytes} must be 1 to {MAX_LL_BYTES}: larger collectives need no workspace")
    sharding = NamedSharding(mesh, PartitionSpec(mesh.axis_names))
    where = np.zeros((mesh.size, layout.where_words(n)), np.int32)
    if unusable(mesh) is None:
        shape = mesh.size, layout.ll_memory_rows(n, _rows(payload_bytes)), LL_WORDS
        _kept.append(jax.jit(functools.partial(_new_ll_memory, shape, _CALLS), out_shardings=sharding)())
        jax.block_until_ready(_kept[-1])  # a peer may write to it from now on
        where = _addresses(mesh, names, _kept[-1])
    made = jax.make_array_from_callback(where.shape, sharding, lambda part: where[part])
    return Workspace(made, names, n, payload_bytes, tuple(mesh.shape.items()))


def _new_ll_memory(shape: tuple[int, ...], calls: int) -> jax.Array:
    """[devices, rows, LL_WORDS] of zeros; in the last row, the count of calls of each block."""
    return jnp.zeros(shape, jnp.int32).at[:, -1].set(calls)


def _rows(payload_bytes: int) -> int:
    """Of a part of the largest payload."""
    return -(-payload_bytes // ROW_BYTES)


def unusable(mesh: Mesh | None = None) -> str | None:
    """Why kernels cannot run in a workspace here, or None; without a mesh, as far as the job says."""
    if job.size() > 1:
        return "the job has several processes, which do not know each other's addresses"
    if os.environ.get(_TFRT, "0").strip() not in ("", "0"):
        return f"with {_TFRT} a GPU may wait for another whose kernel is not loaded yet"
    if os.environ.get(_ALLOCATOR, "").strip().lower() not in ("", "default", "bfc", "platform"):
        return f"{_ALLOCATOR}={os.environ[_ALLOCATOR]}, whose memory GPUs may not reach in each other"
    if mesh is not None and mesh.devices.flat[0].platform != "gpu":
        return "there are no GPUs"
    return None


def _addresses(mesh: Mesh, names: Sequence[str], memory: jax.Array) -> np.ndarray:
    """[devices, 1 + 2 n] words: a device's index along the axes, then the address of its memory and of the next devices'."""
    address = {shard.device: shard.data.unsafe_buffer_pointer() for shard in memory.addressable_shards}
    last = [i - len(names) for i in range(len(names))]
    groups = np.moveaxis(mesh.devices, [mesh.axis_names.index(name) for name in names], last)
    found = {}
    for group in groups.reshape(-1, math.prod(mesh.shape[name] for name in names)):
        for i, device in enumerate(group):
            addresses = np.array([address[peer] for peer in (*group[i:], *group[:i])], np.uint64)
            found[device] = np.concatenate([np.array([i], np.int32), addresses.view(np.int32)])
    return np.stack([found[device] for device in mesh.devices.flat])


def config_for(kind: Kind, problem: Problem, workspace: Workspace) -> Config | None:
    """How a collective runs in a workspace, or None where it is too large."""
    p, n = problem, problem.devices
    if payload_bytes(p) > MAX_LL_BYTES:
        return None
    one, two = 2 * (n - 1), 4 * (n - 1) / n  # payloads over the link
    two_shot = kind == "all_reduce" and (one - two) * p.size * itemsize(p) > SECOND_TRIP
    config = Config("ll_two_shot" if two_shot else "ll_one_shot", WORKSPACE_BLOCKS, 4 * ROW_BYTES, 2)
    kernel = kernel_of(kind, p, config, (("device", n),))
    if kernel.parts("scratch") * kernel.rows > n * _rows(workspace.payload_bytes):
        return None
    granule = 4 * ROW_BYTES
    rows = kernel.rows * (n if kind == "all_gather" else 1)
    return dataclasses.replace(config, chunk=-(-rows * ROW_BYTES // (WORKSPACE_BLOCKS * granule)) * granule)
