"""`tests/run_tokamax_tests.py` shows what it says; with tokamax installed, some of tokamax's tests pass on ours."""

from __future__ import annotations

import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from tests import run_tokamax_tests
from tests.thorough import only_in_all

FAKE = {
    "__init__.py": "import xprof_of_nobody.cli",
    "_src/__init__.py": "",
    "_src/quantization.py": "as_array = lambda x: x",
    "_src/ops/__init__.py": "",
    "_src/ops/attention/__init__.py": "",
    "_src/ops/attention/base.py": """
import dataclasses
from typing import Any


class AUTO:
    pass


@dataclasses.dataclass(frozen=True)
class CausalMask:
    offset: int = 0
    window_size: int | None = None


@dataclasses.dataclass(frozen=True)
class Mask:
    bool_mask: Any = None
    causal_mask: Any = None
    q_start: Any = None
    q_end: Any = None
    k_start: Any = None
    k_end: Any = None

    def __bool__(self):
        return any(x is not None for x in vars(self).values())

    def __and__(self, other):
        return dataclasses.replace(self, causal_mask=other)

    def as_array(self, q, k):
        return self.bool_mask
""",
    "_src/ops/attention/test_base.py": """
import unittest
import jax.numpy as jnp
from tokamax._src.ops.attention import base

X = jnp.arange(24.0).reshape(1, 3, 2, 4)


class AttentionTestBase(unittest.TestCase):
    def __init__(self, name, attention_fn, **supports):
        super().__init__(name)
        self.attend = attention_fn

    def _run_test_with_inputs(self):
        pass

    def test_window(self):
        for mask in (base.CausalMask(window_size=1), base.Mask(jnp.eye(3, dtype=bool)[None, None])):
            self.assertEqual(self.attend(X, X, X, mask=mask).tolist(), X.tolist())

    def test_residuals(self):
        out, (shift, total) = self.attend(X, 0 * X, X, is_causal=True, return_residuals=True, normalize_output=False)
        self.assertEqual(jnp.exp(shift)[0, 0].round().tolist(), [1, 2, 3])
        self.assertEqual(out[0, 2].tolist(), X.mean(1)[0].tolist())

    def test_paging(self):
        self.attend(X, X, X, paging_info=3)

    def test_dropout(self):
        self.fail("it is left out")

    def test_bias0(self):
        self.skipTest("no such device")

    test_bias1 = test_bias2 = test_bias0
""",
}


@pytest.fixture
def wheel(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    """A folder with a package tokamax, which needs nothing but a package that is not there."""
    for name, text in FAKE.items():
        path = tmp_path / "tokamax" / name
        path.parent.mkdir(parents=True, exist_ok=True)
        path.write_text(text)
    monkeypatch.setattr(run_tokamax_tests, "NEEDED", ())
    monkeypatch.setattr(run_tokamax_tests, "UNUSED", ("xprof_of_nobody",))

    def imported() -> list[str]:
        return [name for name in sys.modules if name.partition(".")[0] in ("tokamax", "xprof_of_nobody")]

    for name in imported():
        monkeypatch.delitem(sys.modules, name)
    yield str(tmp_path)
    for name in imported():
        del sys.modules[name]


def test_passes_where_all_tests_did_and_ours_computed(wheel: str, capsys: Any) -> None:
    assert run_tokamax_tests.main(["--wheel", wheel, "-k", "window|residuals|dropout|bias", "--limit", "1"]) == 0
    lines = capsys.readouterr().out.splitlines()
    assert "left out test_dropout: flash_attention has no dropout" in lines
    assert "skipped  test_bias0: no such device" in lines
    assert any(line.startswith("passed   test_window: 2 calls") for line in lines)
    assert "2 passed, 1 skipped" in lines


def test_fails_where_a_test_does_and_says_why(wheel: str, capsys: Any) -> None:
    assert run_tokamax_tests.main(["--wheel", wheel, "-k", "paging|window"]) == 1
    out = capsys.readouterr().out
    assert "NotImplementedError: flash_attention has no paging_info" in out
    assert "1 FAILED, 1 passed" in out


@pytest.mark.parametrize(("words", "reason"), [(["-k", "bias"], "this shows nothing"), (["--kernel", "-k", "bias"], "nothing")])
def test_fails_where_ours_computed_nothing(words: list[str], reason: str, wheel: str, capsys: Any) -> None:
    assert run_tokamax_tests.main(["--wheel", wheel, *words]) == 1
    assert reason in capsys.readouterr().out


def test_says_what_is_missing(tmp_path: Path, capsys: Any, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(run_tokamax_tests, "NEEDED", ("no_such_package",))
    assert run_tokamax_tests.main(["--wheel", str(tmp_path)]) == 1
    assert capsys.readouterr().out == "tokamax's tests need no_such_package\n"


@only_in_all
def test_tokamaxs_own_tests_pass(capsys: Any) -> None:
    if reason := run_tokamax_tests.missing():
        pytest.skip(reason)
    assert run_tokamax_tests.main(["--limit", "1"]) == 0, capsys.readouterr().out
