"""Rendezvous of devices on the host: to see that all arrive (`debug=True`), and to interpret one kernel for all of them."""

from __future__ import annotations

import dataclasses
import itertools
import math
import os
import threading
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

from mgpu_ops.collectives.layout import Axes
from mgpu_ops.core.jax_names import io_callback
from mgpu_ops.core.mesh import same_mesh_axes


@dataclasses.dataclass
class _Rendezvous:
    """A point that `size` threads, one a device, pass together, again and again.

    combine: from the values of all devices, in their order, to the result that each gets; the last to arrive runs it.
    arrived: the values of the devices that have arrived in this round.
    result: of the last round, or the exception that ended it.
    """

    size: int
    combine: Callable[[list[Any]], Any]
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    arrived: dict[int, np.ndarray | None] = dataclasses.field(default_factory=dict)
    round: int = 0
    result: Any = None

    def wait(self, device: int, value: np.ndarray | None, timeout: float | None) -> Any:
        """The result, once all devices have arrived. TimeoutError, with the missing devices, after `timeout` seconds."""
        with self.changed:
            this_round = self.round
            self.arrived[device] = value
            if len(self.arrived) == self.size:
                try:
                    self.result = self.combine([self.arrived[d] for d in range(self.size)])
                except Exception as error:
                    self.result = error
                self.round, self.arrived = this_round + 1, {}
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.round != this_round, timeout):
                raise TimeoutError(sorted(set(range(self.size)) - self.arrived.keys()))
            if isinstance(self.result, Exception):
                raise self.result
            return self.result


def _on_host(
    axes: Axes,
    x: jax.Array,
    out: jax.ShapeDtypeStruct,
    combine: Callable[[list[Any]], Any],
    wait: Callable[[_Rendezvous, int, np.ndarray], Any],
) -> jax.Array:
    """`wait(rendezvous, own index, x)` on the host, for each device. Devices that differ along the `axes` alone meet."""
    names = tuple(name for name, _ in axes)
    others = tuple(name for name in jax.sharding.get_abstract_mesh().manual_axes if name not in names)
    points: dict[int, _Rendezvous] = {}
    lock = threading.Lock()

    def call(x: jax.Array, own: jax.Array, group: jax.Array) -> Any:
        with lock:
            point = points.setdefault(int(group), _Rendezvous(math.prod(size for _, size in axes), combine))
        return wait(point, int(own), np.asarray(x))

    own = lax.axis_index(names)
    result = io_callback(call, out, x, own, lax.axis_index(others) if others else jnp.int32(0))
    return same_mesh_axes(result, x, own)[0]


# --- To see that all arrive

_calls = itertools.count()


def timeout() -> float:
    """Seconds that a device waits for the others: $MGPU_OPS_DEBUG_TIMEOUT, 60 by default. ValueError for no positive number."""
    value = os.environ.get("MGPU_OPS_DEBUG_TIMEOUT", "60")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < math.inf:
        raise ValueError(f"MGPU_OPS_DEBUG_TIMEOUT={value!r} is no positive number of seconds")
    return limit


def wait_for_all(op: str, axes: Axes, x: jax.Array) -> jax.Array:
    """x, once all devices of the axes have arrived here. The program raises an error where one does not in time."""
    limit, number = timeout(), next(_calls)

    def wait(point: _Rendezvous, own: int, _: np.ndarray) -> Any:
        try:
            return point.wait(own, None, limit)
        except TimeoutError as error:
            raise _missing(op, axes, number, limit, own, *error.args) from None

    done = _on_host(axes, x.reshape(-1)[:1], jax.ShapeDtypeStruct((), jnp.int32), lambda _: np.int32(0), wait)
    return lax.optimization_barrier((same_mesh_axes(x, done)[0], done))[0]


def raise_if_late(op: str, axes: Axes, out: jax.Array, late: jax.Array, limit: float) -> jax.Array:
    """out of a kernel that waited `limit` seconds at most. The program raises an error where `Deadline.late` names devices."""
    number = next(_calls)

    def report(late: jax.Array, own: jax.Array) -> np.int32:
        missing = np.flatnonzero(np.asarray(late)[:-1]).tolist()
        if missing:
            raise _missing(op, axes, number, limit, int(own), missing)
        return np.int32(0)

    done = io_callback(report, jax.ShapeDtypeStruct((), jnp.int32), late, lax.axis_index(tuple(name for name, _ in axes)))
    return lax.optimization_barrier((out, done))[0]


def _missing(op: str, axes: Axes, number: int, limit: float, own: int, missing: list[int]) -> RuntimeError:
    names, size = ", ".join(name for name, _ in axes), math.prod(size for _, size in axes)
    return RuntimeError(
        f"{op} over {names} (call {number} of this program): after {limit:g} s device {own} of {size} still "
        f"waits for {', '.join(map(str, missing))}. Does a cond or an error keep them from this call?"
    )


# --- To interpret


def interpret_on_all(
    axes: Axes, out: jax.ShapeDtypeStruct, kernel: Callable[[jax.Array], jax.Array], x: jax.Array
) -> jax.Array:
    """The own row of `kernel(x of all devices [n, ...])`, which runs once for all: JAX's interpreter knows one device only."""

    from mgpu_ops.core import threads  # not above: it imports Pallas

    def interpret(values: list[np.ndarray]) -> np.ndarray:
        # On a client of its own: each thread of the usual one may be waiting here, for the last device to arrive.
        with _one_kernel, jax.default_device(threads.device()):
            return np.asarray(jax.jit(kernel)(np.stack(values)))

    return _on_host(axes, x, out, interpret, lambda point, own, x: point.wait(own, x, None)[own])


_one_kernel = threading.Lock()  # the interpreter's memory belongs to the process
