"""What a type checker and `help` say of the public API: overloads, names that are chosen from, NumPy arrays, fields."""

from __future__ import annotations

import dataclasses
import re
import runpy
from pathlib import Path
from typing import get_args

import pytest

import mgpu_ops
from mgpu_ops import api, collectives

ROOT = Path(__file__).parents[2]

PROGRAM = """
from typing import assert_type

import jax
import numpy as np

import mgpu_ops

rng = np.random.default_rng(0)
a, b = (rng.standard_normal((16, 16)).astype(np.float32) for _ in range(2))
q = rng.standard_normal((2, 8, 2, 16)).astype(np.float32)
sizes, mask = np.array([9, 7]), np.ones((8, 8), bool)
Arrays = tuple[jax.Array, jax.Array]

assert_type(mgpu_ops.matmul(a, b, out_dtype=np.float32, backend="xla"), jax.Array)
assert_type(mgpu_ops.matmul(a, b, bias=np.ones(16), activation="silu", residual=a), jax.Array)
assert_type(mgpu_ops.matmul(a, b, precision="highest"), jax.Array)
assert_type(mgpu_ops.einsum("ij,jk->ik", a, b, precision=jax.lax.Precision.HIGH, optimize="greedy"), jax.Array)
assert_type(mgpu_ops.gated_matmul(a, b, b, activation="gelu"), jax.Array)
assert_type(mgpu_ops.gated_mlp(a, b, b, b, activation="gelu", residual=a), jax.Array)
assert_type(mgpu_ops.grouped_matmul(a, np.stack([b, b]), sizes, bias=np.ones((2, 16)), activation="gelu"), jax.Array)
assert_type(mgpu_ops.grouped_matmul(a, np.stack([b, b]), [9, 7], spread="even"), jax.Array)
assert_type(mgpu_ops.grouped_matmul(a, np.stack([b, b]), [9, 4, 3], row_scale=a[0], group_offset=1), jax.Array)
assert_type(mgpu_ops.gated_grouped_matmul(a, np.stack([b, b]), np.stack([b, b]), sizes), jax.Array)
assert_type(mgpu_ops.ragged_contraction(a, b, sizes, out_dtype="float32"), jax.Array)
w8, scales = np.ones((2, 32, 16), np.int8), np.ones((2, 32))
experts = (w8, w8.reshape(2, 16, 32)[:, :, :16], scales, scales[:, :16])
assert_type(mgpu_ops.quantized_moe(a, a[:, :2], *experts, 2, down_zero_points=scales[:, :16]), jax.Array)
assert_type(mgpu_ops.quantized_moe_experts(a, a[:, :2], np.ones((16, 2), int), *experts, activation="gelu"), jax.Array)
assert_type(mgpu_ops.ragged_dot(a, np.stack([b, b]), sizes), jax.Array)

assert_type(mgpu_ops.flash_attention(q, q, q, mask=mask, bias=np.zeros((8, 8)), window=(3, None)), jax.Array)
assert_type(mgpu_ops.flash_attention(q, q, q, q_lengths=np.array([8, 3]), kv_lengths=[8, 3]), jax.Array)
assert_type(mgpu_ops.flash_attention(q, q, q, q_segment_ids=np.zeros((2, 8), int), return_lse=False), jax.Array)
assert_type(mgpu_ops.flash_attention(q, q, q, causal=True, return_lse=True, backend="xla"), Arrays)
both = bool(rng.integers(2))
assert_type(mgpu_ops.flash_attention(q, q, q, return_lse=both), jax.Array | Arrays)

assert_type(mgpu_ops.dot_product_attention(q, q, q, np.zeros((1, 2, 8, 8), np.float32), is_causal=True), jax.Array)
assert_type(mgpu_ops.dot_product_attention(q, q, q, mask=mask, return_residual=True), Arrays)
mgpu_ops.explain("matmul", mgpu_ops.MatmulProblem(64, 64, 64), "h200")


def reduced(x: jax.Array) -> jax.Array:
    return mgpu_ops.all_reduce(np.asarray(x), "d", "max", transport="peer", backend="interpret")
"""

MISTAKES = """

def mistakes(x: jax.Array) -> None:
    mgpu_ops.matmul(x, x, backend="cuda")  # type: ignore[arg-type]
    mgpu_ops.matmul("x", x)  # type: ignore[arg-type]
    mgpu_ops.gated_matmul(x, x, x, activation="swish")  # type: ignore[arg-type]
    mgpu_ops.grouped_matmul(x, x, x, activation="swish")  # type: ignore[arg-type]
    mgpu_ops.ragged_contraction(x, x, x, spread="wide")  # type: ignore[arg-type]
    mgpu_ops.flash_attention(x, x, x, backend="cuda")  # type: ignore[call-overload]
    mgpu_ops.flash_attention(x, x, x, dropout=0.1)  # type: ignore[call-overload]
    mgpu_ops.flash_attention(x, x, x, return_lse=True).sum()  # type: ignore[attr-defined]
    mgpu_ops.dot_product_attention(x, x, x, backend="cuda")  # type: ignore[call-overload]
    mgpu_ops.all_reduce(x, "d", "mean")  # type: ignore[arg-type]
    mgpu_ops.explain("matmull", {})  # type: ignore[arg-type]
"""


def test_a_type_checker_knows_what_each_call_returns_and_which_names_there_are(tmp_path, monkeypatch):
    """In mypy's own cache, which `make test` has filled: without it, this takes a minute."""
    mypy = pytest.importorskip("mypy.api")
    monkeypatch.setenv("MYPYPATH", str(ROOT))
    program = tmp_path / "program.py"
    program.write_text(PROGRAM + MISTAKES)
    config = ["--config-file", str(ROOT / "pyproject.toml"), "--cache-dir", str(ROOT / ".mypy_cache")]
    said, errors, _ = mypy.run([*config, "--follow-imports", "silent", "--warn-unused-ignores", str(program)])
    assert errors == ""
    assert [line for line in said.splitlines() if line.startswith(str(program))] == []
    assert "Success" in said or "Found" in said


def test_numpy_arrays_run_as_they_type_check(tmp_path):
    program = tmp_path / "program.py"
    program.write_text(PROGRAM)
    runpy.run_path(str(program))


PUBLIC = [cls for cls in (getattr(mgpu_ops, name) for name in mgpu_ops.__all__) if dataclasses.is_dataclass(cls)]


@pytest.mark.parametrize("cls", PUBLIC, ids=lambda cls: f"{cls.__module__}.{cls.__name__}")
def test_help_of_a_problem_or_config_explains_each_field(cls):
    explained = {
        name for names in re.findall(r"^ *([a-z_, ]+): ", str(cls.__doc__), re.MULTILINE) for name in names.split(", ")
    }
    assert {field.name for field in dataclasses.fields(cls)} <= explained


def test_names_that_are_chosen_from_are_those_that_are_taken():
    assert get_args(api.OpName.__value__) == tuple(mgpu_ops.SPECS)
    assert get_args(collectives.Reduction.__value__) == tuple(collectives.REDUCTIONS)
    assert get_args(collectives.Transport.__value__) == (*collectives.TRANSPORTS, collectives.XLA)
