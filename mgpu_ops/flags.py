"""Arguments that are True or False, or one of some words: a call says so where one is not, and does not take "no" for yes."""

from __future__ import annotations

from typing import Any

import numpy as np


def checked(name: str, value: Any) -> bool:
    """`value` as a bool. TypeError, naming the argument, unless it is True or False (Python's or NumPy's)."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r:.80} is neither True nor False, which a call knows while it is traced")


def one_of[T: str](name: str, value: T, choices: tuple[T, ...]) -> T:
    """`value`. ValueError, naming the argument, unless it is one of these."""
    if isinstance(value, str) and value in choices:
        return value
    raise ValueError(f"{name}={value!r:.80} is not one of {', '.join(choices)}")
