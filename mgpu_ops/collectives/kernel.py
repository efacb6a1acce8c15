"""From a call and its plan to the kernel: how the payload is laid out, and the launch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mgpu_ops.collectives import executor, rendezvous
from mgpu_ops.collectives.layout import CollectiveKernel, LLMemory
from mgpu_ops.collectives.plan import Call, Plan
from mgpu_ops.collectives.problem import kernel_of
from mgpu_ops.collectives.schedules import Buffer
from mgpu_ops.core import engine


def launch(call: Call, plan: Plan, x: jax.Array, *, memory: LLMemory | None = None) -> jax.Array:
    """The collective of a flat x, through the kernel, inside `jax.shard_map` over the call's axes.

    memory: of a workspace, for LL schedules.

    Interpreted, x and the result are those of all devices, [n, elements], and no shard_map is needed.
    """
    problem, config, interpret = plan.problem, plan.config, plan.backend == "interpret"
    assert config is not None
    kernel = kernel_of(call.kind, problem, config, call.axes)
    rows = _fill(x, kernel.shape("x"), groups=_groups(kernel, "x"))
    if call.timeout is None or interpret or not kernel.schedule.ll:
        out = executor.run(rows, kernel, memory=memory, equal=call.equal and not interpret, interpret=interpret)
    else:
        deadline = executor.Deadline(jax.new_ref(jnp.zeros(problem.devices + 1, jnp.int32)), call.timeout)
        out = executor.run(rows, kernel, memory=memory, deadline=deadline, equal=call.equal)
        late = engine.frozen(deadline.late, rows)
        out = rendezvous.raise_if_late(call.kind, call.axes, out, late, call.timeout)
    elements = problem.size if call.kind == "all_reduce" else problem.size // problem.devices
    return _cut(out, elements, groups=_groups(kernel, "out"))


def _groups(kernel: CollectiveKernel, buffer: Buffer) -> int:
    """How many groups of elements a buffer holds, each of which is filled up with zeros to whole rows."""
    return 1 if kernel.schedule.kind == "all_reduce" else kernel.parts(buffer)


def _fill(x: jax.Array, shape: tuple[int, int, int], groups: int) -> jax.Array:
    x = x.reshape(*x.shape[:-1], groups, -1)
    missing = math.prod(shape) // groups - x.shape[-1]
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-2], *shape)


def _cut(rows: jax.Array, elements: int, groups: int) -> jax.Array:
    lead = rows.shape[:-3]
    return rows.reshape(*lead, groups, -1)[..., :elements].reshape(*lead, -1)
