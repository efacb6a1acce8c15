"""Threads for JAX's GPU interpreter: simulated warpgroups run in Python's, and what they leave to XLA needs XLA's.

XLA makes its pool of CPU threads with the CPU client: as many as the machine has cores (or $NPROC says), and no fewer than
devices. Who interprets a kernel, or waits in one for another GPU, holds one of them. Where there may be fewer than warpgroups,
`provide` makes a second CPU client with enough of them, and after `run_on_own_client` the ops of warpgroups that NumPy has not
(`core/evaluate.py`) run on it: the interpreter hangs on no machine, whatever JAX did before.
"""

from __future__ import annotations

import functools
import threading
import weakref
from typing import Any

import jax
from jax._src.pallas.mosaic.interpret import thread_map
from jaxlib import xla_client

from mgpu_ops.core import evaluate

_FEWEST = 64
_lock = threading.Lock()
_own: dict[str, Any] = {"threads": 0, "device": None}  # of the second client, once there is one


def run_on_own_client() -> None:
    """Simulated warpgroups run op by op, and those ops that are XLA's on the second client, once there is one."""

    @functools.wraps(thread_map._run_jaxpr)
    def run_jaxpr(jaxpr: Any, consts: Any, *args: Any) -> None:
        with jax.default_device(_own["device"] or jax.local_devices(backend="cpu")[0]):
            evaluate.run(jaxpr, consts, *args)

    thread_map._run_jaxpr = run_jaxpr


def run_as_traced() -> None:
    """Simulated warpgroups run with `JAX_ENABLE_X64` on or off as it was when they were traced.

    They run on threads of their own, which know nothing of a `jax.enable_x64` around the call.
    """
    call, run = thread_map._call_threadmap_callback, thread_map._run_jaxpr
    traced_with: weakref.WeakKeyDictionary[Any, bool] = weakref.WeakKeyDictionary()

    @functools.wraps(call)
    def call_threads(token: Any, device_id: Any, jaxpr: Any, *args: Any) -> Any:
        traced_with[jaxpr] = jax.config.jax_enable_x64
        return call(token, device_id, jaxpr, *args)

    @functools.wraps(run)
    def run_jaxpr(jaxpr: Any, *args: Any) -> None:
        with jax.enable_x64(traced_with[jaxpr]):
            run(jaxpr, *args)

    thread_map._call_threadmap_callback, thread_map._run_jaxpr = call_threads, run_jaxpr


def provide(warpgroups: int) -> None:
    """Sees to it that so many simulated warpgroups can wait at a time."""
    if warpgroups > jax.local_device_count("cpu"):
        device(warpgroups)


def device(warpgroups: int = 1) -> Any:
    """The second client's device, for programs that wait for so many warpgroups, or for each other."""
    with _lock:
        if warpgroups > _own["threads"]:
            threads = max(_FEWEST, warpgroups)
            client: Any = xla_client.make_cpu_client(asynchronous=False, num_devices=threads)  # a thread for each device
            _own.update(threads=threads, device=client.local_devices()[0])
        return _own["device"]
