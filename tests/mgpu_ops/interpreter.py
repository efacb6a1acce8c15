"""What the tests of kernels in JAX's GPU interpreter share: a small GPU, quiet, and whether it sees races."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Callable, Iterator
from dataclasses import replace
from typing import Any

import jax
import pytest
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine, gpu

FEW_SMS = replace(gpu.find("h200"), sms=3)  # a block works through several tiles, and its pipeline of stages wraps


_RACE = "RACE DETECTED"  # what the interpreter says; of one that it noted before another error, a note


@contextlib.contextmanager
def quiet_interpreter() -> Iterator[None]:
    """Keeps the race detector's pages to itself, and leaves no failed kernel behind."""
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            yield
    except BaseException as error:
        with contextlib.suppress(RuntimeError):  # no kernel was interpreted
            if engine.races_found():
                error.add_note(_RACE)
        engine.reset_interpreter()
        raise


def has_a_race(run: Callable[[], Any]) -> bool:
    """Up to jax 0.11 the interpreter notes a race and goes on, be it to another error; from 0.12 it raises.

    Where threads are slow, a stage that is filled too early first shows as one filled twice before anyone looked.
    """
    engine.reset_interpreter()
    try:
        with contextlib.redirect_stdout(io.StringIO()):
            jax.block_until_ready(run())
        return engine.races_found()
    except jax.errors.JaxRuntimeError as error:
        told = (str(error), *getattr(error, "__notes__", ()))
        if any(_RACE in text or "no threads observed phase" in text for text in told) or engine.races_found():
            return True
        raise
    finally:
        engine.reset_interpreter()


def wait_for_all_stores_only(monkeypatch: pytest.MonkeyPatch) -> None:
    """A fault: kernels no longer wait for the one store whose place they need next."""
    wait = plgpu.wait_smem_to_gmem

    def only_for_all(n: int, **kwargs: Any) -> None:
        if n == 0:
            wait(n, **kwargs)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", only_for_all)
