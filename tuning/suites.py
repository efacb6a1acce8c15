"""Lists of problems beside an op's own: they are timed and tuned like any other, but none is one of `OpSpec.shapes`.

`anywhere`, of matmul: 96 problems that nobody chose, drawn by `scripts/draw_anywhere.py`, which states the rule. They measure
what a call gets for which nothing is stored, so that no entry of the shipped databases is for one of them.
"""

from __future__ import annotations

import functools
import json
from collections.abc import Callable, Mapping
from pathlib import Path

from mgpu_ops.matmul import Problem as MatmulProblem
from mgpu_ops.registry.spec import OpSpec, Problem

ANYWHERE = Path(__file__).with_name("anywhere.json")


@functools.cache
def _anywhere() -> dict[str, MatmulProblem]:
    drawn = json.loads(ANYWHERE.read_text())["problems"]
    return {f"anywhere-{i}": MatmulProblem(**fields) for i, fields in enumerate(drawn)}


_MORE: dict[str, dict[str, Callable[[], Mapping[str, Problem]]]] = {"matmul": {"anywhere": _anywhere}}  # by op and suite


def names(spec: OpSpec) -> list[str]:
    """The suites of an op."""
    return [*spec.suites, *_MORE.get(spec.name, {})]


def problems(spec: OpSpec, suite: str) -> dict[str, Problem]:
    """The problems of one of the op's suites, by name: each once, by its first name."""
    more = _MORE.get(spec.name, {}).get(suite)
    found: Mapping[str, Problem] = {name: spec.shapes[name] for name in spec.suites[suite]} if more is None else more()
    first: dict[Problem, str] = {}
    for name, problem in found.items():
        first.setdefault(problem, name)
    return {name: problem for problem, name in first.items()}


def named(spec: OpSpec, name: str) -> Problem | None:
    """The op's problem of that name, of its shapes or of a suite; None where there is none."""
    if name in spec.shapes:
        shape: Problem = spec.shapes[name]
        return shape
    for more in _MORE.get(spec.name, {}).values():
        if name in more():
            return more()[name]
    return None
