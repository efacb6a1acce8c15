"""Rows of benchmarks that were timed with another config than a call uses now."""

from __future__ import annotations

import pytest

import mgpu_ops
from mgpu_ops.core import gpu
from mgpu_ops.tuning import labels
from mgpu_ops.tuning.bench import runner
from mgpu_ops.tuning.bench.earlier import earlier_config

H200 = gpu.find("h200")


def row(op: str, name: str) -> dict[str, str]:
    """What a benchmark writes today of a named problem of the op."""
    grad = op.endswith("+grad")
    spec = mgpu_ops.spec_of(op.removesuffix("+grad"))
    problem = spec.shapes[name]
    told = runner.our_config(spec, problem, H200, grad=grad)
    return {"op": op, "problem": labels.label(spec, name, problem), "config": told, "gpu": H200.name}


@pytest.mark.parametrize(
    ("op", "name"), [("matmul", "square-4096"), ("flash_attention", "mha128-4096"), ("flash_attention+grad", "mha128-4096")]
)
def test_a_row_of_today_is_current_until_a_field_of_its_config_changes(op: str, name: str) -> None:
    now = row(op, name)
    assert earlier_config(now) is False
    *first, last = now["config"].split(" | ")  # with gradients that of the backward pass
    field, _, value = last.removeprefix("backward ").partition(" ")[0].partition("=")
    assert earlier_config(now | {"config": " | ".join([*first, last.replace(f"{field}={value}", f"{field}=-1")])}) is True
    assert earlier_config(now | {"config": now["config"].replace("; source=", " gone=1; source=")}) is False


def test_a_kernel_s_time_where_xla_runs_now_is_of_an_earlier_config_and_the_reverse() -> None:
    now = row("matmul", "square-4096")
    assert earlier_config(now | {"config": "xla, kernel 9.1 us, xla 9 us, modelled; source=default"}) is True
    spec, problem = mgpu_ops.spec_of("matmul"), mgpu_ops.spec_of("matmul").shapes["square-4096"]
    with mgpu_ops.use_configs({"matmul": "xla"}):
        assert earlier_config(now) is True
        assert earlier_config(now | {"config": runner.our_config(spec, problem, H200)}) is False


@pytest.mark.parametrize(
    "changes",
    [
        {"config": "of its products"},
        {"config": ""},
        {"op": "matmul-sustained"},
        {"op": "never"},
        {"problem": "odd"},
        {"gpu": "odd"},
    ],
)
def test_nothing_is_said_of_rows_without_a_config_that_is_known(changes: dict[str, str]) -> None:
    assert earlier_config(row("matmul", "square-4096") | changes) is None
