"""Spaces in which every field of a config has its choices whatever the others are: their configs, and what lies outside."""

from __future__ import annotations

import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any


def outside(space: Mapping[str, Sequence[Any]], config: Any) -> str | None:
    """Why `config` is not of `space`, or None: the first field that has another value than its choices."""
    for name, choices in space.items():
        if (value := getattr(config, name)) not in choices:
            return f"{name}={value} is not one of {', '.join(map(str, choices))}"
    return None


def cheapest[C](
    space: Mapping[str, Sequence[Any]], Config: type[C], reason: Callable[[C], str | None], cost: Callable[[C], float]
) -> list[C]:
    """The configs of `space` that can run (`reason` has none against them), the fastest by the model first."""
    every = (Config(*fields) for fields in itertools.product(*space.values()))
    return sorted((config for config in every if reason(config) is None), key=lambda config: (cost(config), config))
