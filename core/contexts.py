"""A context variable that has a value for a while."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar


@contextlib.contextmanager
def having[T](variable: ContextVar[T], value: T) -> Iterator[None]:
    """Inside, the variable has this value."""
    token = variable.set(value)
    try:
        yield
    finally:
        variable.reset(token)
