"""`make test-all` sets MGPU_OPS_TEST_ALL=1: properties try ten times the examples, and tests run that repeat others."""

from __future__ import annotations

import os
from typing import Any

import hypothesis
import pytest

ALL = os.environ.get("MGPU_OPS_TEST_ALL") == "1"

only_in_all = pytest.mark.skipif(not ALL, reason="repeats what other tests show: it runs in `make test-all`")


def examples(count: int, **others: Any) -> hypothesis.settings:
    """So many examples of a property, ten times as many in `make test-all`."""
    return hypothesis.settings(max_examples=10 * count if ALL else count, **others)
