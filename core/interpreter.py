"""Whether the kernel that is being traced is for JAX's interpreter, asked by the functions that then do something else."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator
from contextvars import ContextVar

_interpreting: ContextVar[bool] = ContextVar("_interpreting", default=False)


def interpreting() -> bool:
    """Whether the kernel that is being traced is for the interpreter."""
    return _interpreting.get()


@contextlib.contextmanager
def interpreted(value: bool) -> Iterator[None]:
    """A kernel traced in this context is for the interpreter, or not."""
    token = _interpreting.set(value)
    try:
        yield
    finally:
        _interpreting.reset(token)
