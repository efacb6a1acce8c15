"""Spaces in which every field of a config has its choices whatever the others are: their configs, and what lies outside."""

from __future__ import annotations

import dataclasses
import itertools
from collections.abc import Callable, Mapping, Sequence
from typing import Any

from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import first_of, require


def outside(space: Mapping[str, Sequence[Any]], config: Any) -> str | None:
    """Why `config` is not of `space`, or None: the first field that has another value than its choices."""
    for name, choices in space.items():
        if (value := getattr(config, name)) not in choices:
            return f"{name}={value} is not one of {', '.join(map(str, choices))}"
    return None


@dataclasses.dataclass(frozen=True)
class Choices[P, C]:
    """What such a space, with `check` and `cost`, says of an op's configs: three functions of its `OpSpec`."""

    op: str
    fields: Mapping[str, Sequence[Any]]
    Config: type[C]
    supports: Callable[[P, Gpu], str | None]
    check: Callable[[P, C, Gpu], str | None]
    cost: Callable[[P, C, Gpu], float]

    def space(self, problem: P, gpu: Gpu) -> dict[str, Sequence[Any]]:
        """The choices of each field, whatever the problem."""
        return dict(self.fields)

    def candidates(self, problem: P, gpu: Gpu) -> list[C]:
        """The configs that can run, the fastest by the model first."""
        every = (self.Config(*fields) for fields in itertools.product(*self.fields.values()))
        legal = (config for config in every if self.check(problem, config, gpu) is None)
        return sorted(legal, key=lambda config: (self.cost(problem, config, gpu), config))

    def default(self, problem: P, gpu: Gpu) -> C:
        """The first of the candidates. Raises ValueError where there is none."""
        require(self.op, self.supports(problem, gpu), problem, gpu)
        return first_of(self.candidates(problem, gpu), problem, gpu)
