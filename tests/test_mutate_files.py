"""Broken files end in a result or in one line of words: some of those that scripts/mutate_files.py makes."""

from __future__ import annotations

import dataclasses
import importlib.util
from collections.abc import Callable
from pathlib import Path
from types import ModuleType

import pytest

import mgpu_ops

COUNTS = {"database": 100, "journal": 200, "csv": 500, "problems": 500}
NO_OTHER = {  # fields that have one value in all problems that a kernel runs
    "quantized_matmul": {"layout"},
    "quantized_grouped_matmul": {"layout"},
    "flash_attention_backward": {"kv_dtype", "page_size"},
    "all_gather": {"reduction"},
}


@pytest.fixture(scope="module")
def script() -> ModuleType:
    spec = importlib.util.spec_from_file_location("mutate_files", Path(__file__).parents[1] / "scripts/mutate_files.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("kind", COUNTS)
def test_a_broken_file_stops_no_program_and_no_command(kind: str, script: ModuleType, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(script, "WAITING", 600.0)  # of a test machine nobody knows how busy it is
    monkeypatch.setattr(script, "SECONDS", 60.0)
    told: list[str] = []
    outcomes = script.try_kind(kind, list(mgpu_ops.SPECS.values()), COUNTS[kind], 0, told.append)
    assert told == []
    assert set(outcomes) == {"taken", "refused"}
    assert sum(outcomes.values()) == COUNTS[kind]
    assert min(outcomes.values()) > COUNTS[kind] / 10  # some are broken, and some no longer so that it shows


def test_the_sound_files_have_problems_with_every_field(script: ModuleType) -> None:
    for name, spec in mgpu_ops.SPECS.items():
        problems = script.problems_in(name)
        alike = {
            field.name
            for field in dataclasses.fields(spec.Problem)
            if field.default is not dataclasses.MISSING and all(getattr(p, field.name) == field.default for p in problems)
        }
        assert alike <= NO_OTHER.get(name, set()), name


def test_a_reader_that_raises_or_hangs_is_told(script: ModuleType, monkeypatch: pytest.MonkeyPatch, tmp_path: Path) -> None:
    monkeypatch.setattr(script, "SECONDS", 0.05)

    def hang(path: Path, spec: object) -> bool:
        while True:
            pass

    def divide(path: Path, spec: object) -> bool:
        return 1 / len(path.name[:0]) > 0

    def trial(read: Callable[[Path, object], bool]) -> str:
        return str(script.trial(read, tmp_path, None))

    assert trial(hang).startswith("hang\n")
    assert "ZeroDivisionError" in trial(divide)
    assert trial(lambda path, spec: True) == "taken"
    assert trial(lambda path, spec: False) == "refused"
