"""Arguments that are True or False: a call says so where one is neither, and does not take "no" for yes."""

from __future__ import annotations

from typing import Any

import numpy as np


def checked(name: str, value: Any) -> bool:
    """`value` as a bool. TypeError, naming the argument, unless it is True or False (Python's or NumPy's)."""
    if isinstance(value, bool | np.bool_):
        return bool(value)
    raise TypeError(f"{name}={value!r:.80} is neither True nor False, which a call knows while it is traced")
