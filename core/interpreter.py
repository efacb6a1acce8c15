"""Whether the kernel that is being traced is for JAX's interpreter, asked by the functions that then do something else."""

from __future__ import annotations

import contextlib
from contextvars import ContextVar

from mgpu_ops.core.contexts import having

_interpreting: ContextVar[bool] = ContextVar("_interpreting", default=False)


def interpreting() -> bool:
    """Whether the kernel that is being traced is for the interpreter."""
    return _interpreting.get()


def interpreted(value: bool) -> contextlib.AbstractContextManager[None]:
    """A kernel traced in this context is for the interpreter, or not."""
    return having(_interpreting, value)
