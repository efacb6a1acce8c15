"""What the tests of the command line share: `mgpu-tune` in this process, as on a machine without a GPU."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable

import pytest

from mgpu_ops.core import aot
from mgpu_ops.tuning import cli


@dataclasses.dataclass(frozen=True)
class Done:
    code: int
    out: str
    err: str


Command = Callable[..., Done]


@pytest.fixture
def mgpu_tune(monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]) -> Command:
    """Runs `mgpu-tune` with these words. No GPU is seen and candidates are not compiled, which takes seconds each."""
    monkeypatch.setattr("mgpu_ops.tuning.devices.has_gpu", lambda: False)
    monkeypatch.setattr(aot, "available", lambda: "not in this test")
    monkeypatch.setenv("NPROC", "64")  # else `main` sets it, for all tests that follow
    monkeypatch.setenv("COLUMNS", "200")

    def run(*words: object) -> Done:
        capsys.readouterr()
        try:
            code = cli.main([str(word) for word in words])
        except SystemExit as e:  # argparse
            code = int(e.code or 0)
        return Done(code, *capsys.readouterr())

    return run
