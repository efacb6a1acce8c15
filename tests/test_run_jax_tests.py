"""`tests/run_jax_tests.py` shows what it says: it fails where a test does, and where nothing of ours was run."""

from __future__ import annotations

import os
import subprocess
import sys
from pathlib import Path

import jax
import pytest

from tests import run_jax_tests

FAKE = """
import unittest
from functools import partial
import jax
import jax.numpy as jnp
from jax import nn
from jax._src import test_util
from jax.lax import ragged_dot

X = jnp.ones((1, 3, 1, 4))


def _check_cudnn_backend(function, *args):
    return "cudnn" in jax.jit(function).lower(*args).as_text()


class FakeTest(unittest.TestCase):
{tests}

    def test_other_things(self):
        self.fail("it is no test of that function and does not run")
"""
TESTS = {
    "works": """
    def test_ragged_dot(self):
        for function in (jax.lax.ragged_dot, ragged_dot):
            out = function(jnp.ones((5, 3)), jnp.ones((2, 3, 7)), group_sizes=jnp.array([1, 3]))
            self.assertEqual(out[:, 0].tolist(), [3, 3, 3, 3, 0])
""",
    "fails": """
    def test_ragged_dot_of_integers(self):
        out = jax.lax.ragged_dot(jnp.ones((5, 3), int), jnp.ones((2, 3, 7), int), jnp.array([1, 3]))
        self.assertEqual(out[0, 0], 4)
""",
    "integers": """
    def test_ragged_dot_of_integers(self):
        jax.lax.ragged_dot(jnp.ones((5, 3), int), jnp.ones((2, 3, 7), int), jnp.array([1, 3]))
""",
    "no call": """
    def test_ragged_dot_general(self):
        self.assertTrue(callable(jax.lax.ragged_dot_general))
""",
    "skipped": """
    @unittest.skip("no such device")
    def test_ragged_dot_elsewhere(self):
        self.fail("skipped")
""",
    "many": """
    def test_RaggedDot_wanted(self):
        self.assertTrue(callable(jax.lax.ragged_dot))

"""
    + "".join(f"    test_ragged_dot_small_m{i} = test_RaggedDot_wanted\n" for i in range(10)),
    "attention": """
    def testDotProductAttention(self):
        answer, reference = (partial(nn.dot_product_attention, implementation=i) for i in ("cudnn", None))
        mask = jnp.zeros((3, 3), bool)
        self.assertEqual([float(f(X, X, X, mask=mask).sum()) for f in (answer, reference)], [0, 12])
        self.assertFalse(test_util.is_cuda_version_at_least(13, 0))
        self.assertTrue(_check_cudnn_backend(answer, X, X, X))
""",
    "attention of its own": """
    def testDotProductAttentionWithout(self):
        nn.dot_product_attention(X, X, X, scale=0)
""",
    "cuDNN's attention": """

class DotProductAttentionF8Test(unittest.TestCase):
    def test_fp8_0(self):
        self.fail("it is cuDNN's")

    test_fp8_1 = test_fp8_0


class Rest:
""",
}


def fake(folder: Path, *tests: str, name: str = "lax_test") -> str:
    """A checkout of JAX with these tests in one of its files."""
    file = folder / f"jax/tests/{name}.py"
    file.parent.mkdir(parents=True)
    file.write_text(FAKE.format(tests="".join(TESTS[name] for name in tests)))
    return str(folder / "jax")


def test_passes_where_ours_was_called_and_computed(tmp_path, capsys):
    jaxs = jax.lax.ragged_dot
    assert run_jax_tests.main([fake(tmp_path, "works", "integers", "no call", "skipped")]) == 0
    assert jax.lax.ragged_dot is jaxs
    lines = capsys.readouterr().out.splitlines()
    assert "passed   FakeTest.test_ragged_dot: 2 calls, 1 xla" in lines
    assert "passed   FakeTest.test_ragged_dot_of_integers: 1 calls, 1 jax" in lines
    assert "skipped  FakeTest.test_ragged_dot_elsewhere: no such device" in lines
    assert lines[-2] == "1 passed, 1 passed by JAX's own function, 1 passed without it, 1 skipped"
    assert lines[-1] == "mgpu_ops.ragged_dot: 3 calls, traced 0 x kernel, 1 x XLA, left 1 to JAX's own"


def test_a_second_run_counts_the_same(tmp_path, capsys):
    path = fake(tmp_path, "works")
    assert [run_jax_tests.main([path]) for _ in range(2)] == [0, 0]
    assert capsys.readouterr().out.count("test_ragged_dot: 2 calls, 1 xla") == 2


def test_fails_where_a_test_fails_and_prints_why(tmp_path, capsys):
    assert run_jax_tests.main([fake(tmp_path, "works", "fails")]) == 1
    out = capsys.readouterr().out
    assert "FAILED   FakeTest.test_ragged_dot_of_integers: " in out
    assert "AssertionError: Array(3, dtype=int32) != 4" in out
    assert "\n1 FAILED, 1 passed\n" in out


@pytest.mark.parametrize("tests", [["no call"], ["integers"], ["skipped"], ["attention of its own"]], ids=str)
def test_fails_where_ours_computed_nothing(tests, tmp_path, capsys):
    assert run_jax_tests.main([fake(tmp_path, *tests)]) == 1
    assert "this shows nothing: no call was computed by ours (kernel or xla)" in capsys.readouterr().out


def test_fails_where_there_is_no_test(tmp_path, capsys):
    assert run_jax_tests.main([fake(tmp_path)]) == 1
    assert capsys.readouterr().out == "no test was found\n"


def test_fails_where_one_of_two_functions_was_not_computed(tmp_path, capsys):
    assert run_jax_tests.main([fake(tmp_path, "works", "attention of its own")]) == 1
    out = capsys.readouterr().out
    assert "mgpu_ops.ragged_dot: 2 calls, traced 0 x kernel, 1 x XLA, left none to JAX's own" in out
    assert "mgpu_ops.dot_product_attention: 1 calls, traced 0 x kernel, 0 x XLA, left 1 to JAX's own" in out


def test_attention_is_ours_where_a_test_names_another_implementation_than_its_reference(tmp_path, capsys):
    """The test tells them apart by what a row gives that sees nothing."""
    jaxs = jax.nn.dot_product_attention
    assert run_jax_tests.main([fake(tmp_path, "attention", "cuDNN's attention", name="nn_test")]) == 0
    assert jax.nn.dot_product_attention is jaxs
    lines = capsys.readouterr().out.splitlines()
    assert "left out DotProductAttentionF8Test.test_fp8, 2 cases: calls cuDNN's function itself, not jax.nn's" in lines
    assert "passed   FakeTest.testDotProductAttention: 1 calls, 1 xla" in lines
    assert lines[-1] == "mgpu_ops.dot_product_attention: 1 calls, traced 0 x kernel, 1 x XLA, left none to JAX's own"


def test_with_kernel_a_look_for_cudnns_call_is_one_for_ours():
    plain = jax.numpy.ones(3)
    assert not run_jax_tests.lowers_to_a_kernel(jax.numpy.sin, plain)


def test_kernel_needs_a_kernel(tmp_path, capsys):
    assert run_jax_tests.main([fake(tmp_path, "works"), "--kernel"]) == 1
    assert "no call was computed by ours (kernel)" in capsys.readouterr().out


def test_limit_takes_cases_evenly_and_k_chooses_by_name(tmp_path, capsys):
    path = fake(tmp_path, "many")
    assert run_jax_tests.main([path, "--limit", "4", "-k", "small_m"]) == 1  # nothing was called
    names = [line.split()[1] for line in capsys.readouterr().out.splitlines() if line.startswith("passed")]
    assert names == [f"FakeTest.test_ragged_dot_small_m{i}:" for i in (0, 3, 6, 9)]


def test_a_path_without_tests_is_refused(tmp_path, capsys):
    with pytest.raises(SystemExit) as stop:
        run_jax_tests.main([str(tmp_path)])
    assert stop.value.code == 2
    assert "is neither a test file nor a checkout of JAX" in capsys.readouterr().err


def test_it_runs_as_a_script_from_any_folder(tmp_path):
    """tests/ holds a folder mgpu_ops, which must not be taken for the package."""
    file = Path(fake(tmp_path, "works"), "tests/lax_test.py")
    env = {**os.environ, "PYTHONPATH": ""}
    result = subprocess.run(
        [sys.executable, run_jax_tests.__file__, str(file)], cwd=tmp_path, env=env, capture_output=True, text=True, check=False
    )
    assert result.returncode == 0, result.stderr
    assert "passed   FakeTest.test_ragged_dot: 2 calls, 1 xla" in result.stdout
