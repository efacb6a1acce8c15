"""`make test-all` sets MGPU_OPS_TEST_ALL=1: properties try ten times the examples, and tests run that repeat others."""

from __future__ import annotations

import os
from collections.abc import Collection, Iterable
from typing import Any

import hypothesis
import pytest

ALL = os.environ.get("MGPU_OPS_TEST_ALL") == "1"

only_in_all = pytest.mark.skipif(not ALL, reason="repeats what other tests show: it runs in `make test-all`")


def cases(names: Iterable[str], in_all: Collection[str]) -> list[Any]:
    """`names` of cases to parametrize a test with; those of `in_all`, which repeat what others show, run in `make test-all`."""
    names = list(names)
    if unknown := set(in_all).difference(names):
        raise ValueError(f"no case is called {', '.join(sorted(unknown))}")
    return [pytest.param(name, marks=only_in_all) if name in in_all else name for name in names]


def seeds(count: int, in_all: int) -> range:
    """Seeds of drawn examples: `in_all` of them in `make test-all`."""
    return range(in_all if ALL else count)


def examples(count: int, **others: Any) -> hypothesis.settings:
    """So many examples of a property, ten times as many in `make test-all`."""
    return hypothesis.settings(max_examples=10 * count if ALL else count, **others)
