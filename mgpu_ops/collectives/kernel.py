"""From a problem and a config to the kernel: how the payload is laid out, and the launch."""

from __future__ import annotations

import math

import jax
import jax.numpy as jnp

from mgpu_ops.collectives import rendezvous
from mgpu_ops.collectives.exchange import Axes, Exchange, Memory
from mgpu_ops.collectives.executor import Deadline, exchange
from mgpu_ops.collectives.problem import Config, Problem, check, exchange_of
from mgpu_ops.collectives.schedules import Buffer, Kind
from mgpu_ops.core import engine
from mgpu_ops.core.gpu import Gpu


def launch(
    kind: Kind,
    axes: Axes,
    problem: Problem,
    config: Config,
    gpu: Gpu,
    x: jax.Array,
    *,
    memory: Memory | None = None,
    equal: bool,
    seconds: float | None = None,
    interpret: bool = False,
) -> jax.Array:
    """The collective of a flat x, through the kernel, inside `jax.shard_map` over `axes`; equal: the result is, on all devices.
    memory: of a workspace, for schedules in lines. seconds: how long these wait for lines before they raise; None: for ever.

    Interpreted, x and the result are those of all devices, [n, elements], and no shard_map is needed.
    """
    reason = check(kind, problem, config, gpu)
    if reason is not None:
        raise ValueError(f"{config} cannot run {kind} {problem} on {gpu.name}: {reason}")
    what = exchange_of(kind, problem, config, axes)
    rows = _fill(x, what.shape("x"), groups=_groups(what, "x"))
    if seconds is None or interpret or not what.schedule.in_lines:
        out = exchange(rows, what, memory=memory, equal=equal, interpret=interpret)
    else:
        deadline = Deadline(jax.new_ref(jnp.zeros(problem.devices + 1, jnp.int32)), seconds)
        out = exchange(rows, what, memory=memory, deadline=deadline, equal=equal)
        out = rendezvous.lines_came(kind, axes, out, engine.frozen(deadline.late, rows), seconds)
    return _cut(out, problem.size if kind == "all_reduce" else problem.size // problem.devices, groups=_groups(what, "out"))


def _groups(what: Exchange, buffer: Buffer) -> int:
    """Into how many stretches of elements a buffer falls, each of which is filled up with zeros to whole rows."""
    return 1 if what.schedule.kind == "all_reduce" else what.parts(buffer)


def _fill(x: jax.Array, shape: tuple[int, int, int], groups: int) -> jax.Array:
    x = x.reshape(*x.shape[:-1], groups, -1)
    missing = math.prod(shape) // groups - x.shape[-1]
    if missing:
        x = jnp.pad(x, [(0, 0)] * (x.ndim - 1) + [(0, missing)])
    return x.reshape(*x.shape[:-2], *shape)


def _cut(rows: jax.Array, elements: int, groups: int) -> jax.Array:
    lead = rows.shape[:-3]
    return rows.reshape(*lead, groups, -1)[..., :elements].reshape(*lead, -1)
