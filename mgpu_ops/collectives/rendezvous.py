"""Devices that meet on the host: to see that all come (`debug=True`), and to interpret one kernel for all of them."""

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
from jax.experimental import io_callback

from mgpu_ops.collectives.exchange import Axes
from mgpu_ops.core.mesh import same_mesh_axes


@dataclasses.dataclass
class _Meeting:
    """`size` devices that meet again and again. `brought`: by those that came to the meeting under way."""

    size: int
    together: Callable[[list[Any]], Any]  # from what each brought to what they get; the last to come runs it
    changed: threading.Condition = dataclasses.field(default_factory=threading.Condition)
    brought: dict[int, Any] = dataclasses.field(default_factory=dict)
    number: int = 0
    result: Any = None  # of the last meeting, or the exception that ended it

    def attend(self, device: int, brings: Any, seconds: float | None) -> Any:
        """What `together` made, once all have come. TimeoutError, with the devices that had not, after so many seconds."""
        with self.changed:
            number = self.number
            self.brought[device] = brings
            if len(self.brought) == self.size:
                try:
                    self.result = self.together([self.brought[d] for d in range(self.size)])
                except Exception as error:
                    self.result = error
                self.number, self.brought = number + 1, {}
                self.changed.notify_all()
            elif not self.changed.wait_for(lambda: self.number != number, seconds):
                raise TimeoutError(sorted(set(range(self.size)) - self.brought.keys()))
            if isinstance(self.result, Exception):
                raise self.result
            return self.result


def _meet(axes: Axes, x: jax.Array, out: Any, together: Callable[[list[Any]], Any], attend: Callable[..., Any]) -> jax.Array:
    """`attend(meeting, own, x)` on the host, for each device of the axes; other axes hold meetings of their own."""
    names = tuple(name for name, _ in axes)
    others = tuple(name for name in jax.sharding.get_abstract_mesh().manual_axes if name not in names)
    meetings: dict[int, _Meeting] = {}
    lock = threading.Lock()

    def call(x: Any, own: Any, group: Any) -> Any:
        with lock:
            meeting = meetings.setdefault(int(group), _Meeting(math.prod(size for _, size in axes), together))
        return attend(meeting, int(own), np.asarray(x))

    own = lax.axis_index(names)
    result = io_callback(call, out, x, own, lax.axis_index(others) if others else jnp.int32(0))
    return same_mesh_axes(result, x, own)[0]


# --- To see that all come

_calls = itertools.count()


def seconds() -> float:
    """How long a device waits for the others: $MGPU_OPS_DEBUG_TIMEOUT, 60 by default. ValueError for no positive number."""
    value = os.environ.get("MGPU_OPS_DEBUG_TIMEOUT", "60")
    try:
        limit = float(value)
    except ValueError:
        limit = 0.0
    if not 0 < limit < math.inf:
        raise ValueError(f"MGPU_OPS_DEBUG_TIMEOUT={value!r} is no positive number of seconds")
    return limit


def all_arrive(op: str, axes: Axes, x: jax.Array) -> jax.Array:
    """x, once all devices of the axes have come here. Raises in the program where one has not in time."""
    limit, number = seconds(), next(_calls)

    def attend(meeting: _Meeting, own: int, _: Any) -> Any:
        try:
            return meeting.attend(own, None, limit)
        except TimeoutError as error:
            raise _missing(op, axes, number, limit, own, *error.args) from None

    came = _meet(axes, x.reshape(-1)[:1], jax.ShapeDtypeStruct((), jnp.int32), lambda _: np.int32(0), attend)
    return lax.optimization_barrier((same_mesh_axes(x, came)[0], came))[0]


def lines_came(op: str, axes: Axes, out: jax.Array, late: jax.Array, limit: float) -> jax.Array:
    """out of a kernel that waited so many seconds at most. Raises in the program where its `Deadline.late` names devices."""
    number = next(_calls)

    def report(late: Any, own: Any) -> Any:
        missing = np.flatnonzero(np.asarray(late)[:-1]).tolist()
        if missing:
            raise _missing(op, axes, number, limit, int(own), missing)
        return np.int32(0)

    came = io_callback(report, jax.ShapeDtypeStruct((), jnp.int32), late, lax.axis_index(tuple(name for name, _ in axes)))
    return lax.optimization_barrier((out, came))[0]


def _missing(op: str, axes: Axes, number: int, limit: float, own: int, missing: list[int]) -> RuntimeError:
    names, size = ", ".join(name for name, _ in axes), math.prod(size for _, size in axes)
    return RuntimeError(
        f"{op} over {names} (call {number} of this program): after {limit:g} s device {own} of {size} still "
        f"waits for {', '.join(map(str, missing))}. Does a cond or an error keep them from this call?"
    )


# --- To interpret


def interpret_together(axes: Axes, out: Any, kernel: Callable[[jax.Array], jax.Array], x: jax.Array) -> jax.Array:
    """What `kernel`, of x of all devices [n, ...], returns for the own one. JAX's interpreter knows one device only."""

    from mgpu_ops.core import threads  # not above: it imports Pallas

    def together(brought: list[Any]) -> Any:
        # On a client of its own: each thread of the usual one may be waiting here, for the last device to come.
        with _one_kernel, jax.default_device(threads.device()):
            return np.asarray(jax.jit(kernel)(np.stack(brought)))

    return _meet(axes, x, out, together, lambda meeting, own, x: meeting.attend(own, x, None)[own])


_one_kernel = threading.Lock()  # the interpreter's memory belongs to the process
