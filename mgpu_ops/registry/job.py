"""Agreement between the processes of a job (`jax.distributed.initialize`), through the key-value store of its coordinator.

`first` waits for no process: it returns the value of whichever process called it first.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

import jax
from jax._src import distributed

_SOON = 60_000  # milliseconds: what is known to be there, or of a coordinator that does not answer
_PREFIX = "mgpu_ops/"


def size() -> int:
    """How many processes the job has; 1 where this one is alone. Initialises no backend."""
    return (distributed.global_state.num_processes or 1) if distributed.global_state.client is not None else 1


def first(key: str, mine: str) -> str:
    """The value of the first process to call this with `key`: `mine`, if this is it. The same in all, while the job lasts."""
    if size() == 1:
        return mine
    client: Any = distributed.global_state.client
    try:
        client.key_value_set(_PREFIX + key, mine)
    except jax.errors.JaxRuntimeError as error:
        if "ALREADY_EXISTS" not in str(error):
            raise
        return client.blocking_key_value_get(_PREFIX + key, _SOON)
    return mine


def from_zero(key: str, make: Callable[[], str], seconds: float) -> str:
    """What `make()` returns in process 0, in every process. All must call it, and wait up to `seconds` for process 0.

    What `make` raises in process 0 is raised there, and as RuntimeError in the others.
    """
    if size() == 1:
        return make()
    client: Any = distributed.global_state.client
    if distributed.global_state.process_id != 0:
        answer = client.blocking_key_value_get(_PREFIX + key, int(seconds * 1000))
        if answer.startswith("!"):
            raise RuntimeError(f"process 0 of the job failed: {answer[1:]}")
        return answer[1:]
    try:
        made = make()
    except BaseException as error:
        client.key_value_set(_PREFIX + key, f"!{type(error).__name__}: {error}")
        raise
    client.key_value_set(_PREFIX + key, f"={made}")
    return made
