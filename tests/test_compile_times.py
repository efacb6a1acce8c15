"""`scripts/compile_times.py` tells the medians of its processes, and why one did not run."""

from __future__ import annotations

import json
import subprocess
from typing import Any

import pytest

from mgpu_ops.core import aot
from scripts import compile_times
from tests.thorough import only_in_all


def run(seconds: float) -> dict[str, Any]:
    return {"times": dict.fromkeys(compile_times.STAGES, (seconds, 2 * seconds)), "gpu": "h200", "jax": "0.12"}


def test_rows_have_the_median_of_each_stage_and_of_their_sum():
    rows = list(compile_times.Measured("llama", "xla", [run(1.0), run(9.0), run(2.0)]).rows())
    assert [row["stage"] for row in rows] == [*compile_times.STAGES, "all"]
    assert [(row["seconds"], row["cpu_seconds"]) for row in rows] == [(2.0, 4.0)] * 5 + [(6.0, 12.0)]
    assert {row["processes"] for row in rows} == {3}


def test_what_does_not_run_is_told_and_left_out(monkeypatch, capsys):
    failed = subprocess.CompletedProcess([], 1, "", "Traceback\nModuleNotFoundError: No module named 'tokamax'\n")
    monkeypatch.setattr(compile_times.subprocess, "run", lambda *args, **options: failed)
    assert compile_times.in_processes("attention", "tokamax", None, 3) is None
    assert "No module named 'tokamax'" in capsys.readouterr().out


def test_with_a_cache_the_process_that_fills_it_does_not_count(monkeypatch):
    folders = []

    def done(*args: Any, env: dict[str, str], **options: Any) -> Any:
        folders.append((env.get("JAX_COMPILATION_CACHE_DIR"), env["MGPU_OPS_KERNEL_CACHE"]))
        return subprocess.CompletedProcess([], 0, json.dumps(run(float(len(folders)))), "")

    monkeypatch.setattr(compile_times.subprocess, "run", done)
    monkeypatch.setenv("JAX_COMPILATION_CACHE_DIR", "/of/the/user")
    found = compile_times.in_processes("attention", "mgpu_ops", None, 3, cached="jax")
    assert found is not None
    assert [one["times"]["trace"][0] for one in found.runs] == [2.0, 3.0, 4.0]
    ((folder, same),) = set(folders)
    assert folder == same != "/of/the/user"
    compile_times.in_processes("attention", "mgpu_ops", None, 1, cached="kernels")
    assert folders[-1][0] is None
    assert folders[-1][1] not in ("off", folder)
    compile_times.in_processes("attention", "mgpu_ops", None, 1)
    assert folders[-1] == (None, "off")


@only_in_all
@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_a_case_is_measured_without_a_gpu():
    found = compile_times.in_processes("rms_norm", "mgpu_ops", "h100-sxm", 1)
    assert found is not None
    assert all(found.seconds(name, which) > 0 for name in ("trace", "lower", "compile", "all") for which in (0, 1))
