"""`mgpu_ops.autotune`: a program's problems are tuned where it starts, and run with what was found. No GPU is needed."""

from __future__ import annotations

import dataclasses
import logging
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import MatmulProblem, matmul, spec_of
from mgpu_ops.core import aot, gpu
from mgpu_ops.registry import database, resolution
from mgpu_ops.tuning import autotune, device, devices, tuner
from mgpu_ops.tuning.worker import WorkerError
from tests.jobs import run_job

MATMUL = spec_of("matmul")
H200 = gpu.find("h200")
A, B = (jax.ShapeDtypeStruct((512, 512), jnp.bfloat16),) * 2
PROBLEM = MatmulProblem(512, 512, 512)


@pytest.fixture(autouse=True)
def nothing_is_compiled(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(aot, "available", lambda: "not in this test")
    monkeypatch.setattr("mgpu_ops.tuning.devices.has_gpu", lambda: False)


def config_at_the_kernel(monkeypatch: pytest.MonkeyPatch, call: Callable[[], Any]) -> Any:
    """The config that the kernel is built with when `call` is traced for an H200."""
    seen: list[Any] = []

    def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool) -> Any:
        seen.append(config)
        return MATMUL.reference(problem, *arrays)

    monkeypatch.setattr(sys.modules["mgpu_ops.matmul"], "SPEC", dataclasses.replace(MATMUL, run=run))
    with gpu.target("h200"):
        call()
    (config,) = seen
    return config


def stored() -> list[database.Entry]:
    path = database.user_path("h200", "matmul")
    return list(database.read(path).entries) if path.exists() else []


def test_what_was_tuned_runs_inside_the_context_and_is_stored(monkeypatch: pytest.MonkeyPatch) -> None:
    odd = dataclasses.replace(MATMUL.default(PROBLEM, H200), raster_width=16)
    asked: list[Any] = []
    tune = tuner.tune

    def tuned(spec: Any, problem: Any, device: Any, options: Any) -> Any:
        asked.append((problem, options.trials, options.budget, device.kind))
        result = tune(spec, problem, device, options)
        return dataclasses.replace(result, entry=database.to_entry(problem, odd, result.entry.evidence))

    monkeypatch.setattr(tuner, "tune", tuned)
    context = mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=2, budget=5.0)
    assert asked == [(PROBLEM, 2, 5.0, "modelled")]
    step = jax.jit(lambda a, b: matmul(a, b))
    with context:
        assert config_at_the_kernel(monkeypatch, lambda: jax.eval_shape(step, A, B)) == odd
    (entry,) = stored()
    assert (entry.problem, entry.config) == (dataclasses.asdict(PROBLEM), dataclasses.asdict(odd))


def test_every_op_of_a_program_is_tuned_the_longest_first(caplog: pytest.LogCaptureFixture) -> None:
    def loss(x: Any, q: Any) -> Any:
        return jnp.sum(matmul(x, x, out_dtype=jnp.float32)) + jnp.sum(mgpu_ops.flash_attention(q, q, q))

    q = jax.ShapeDtypeStruct((4, 2048, 8, 64), jnp.bfloat16)
    with caplog.at_level(logging.INFO, "mgpu_ops"):
        context = mgpu_ops.autotune(jax.grad(loss), A, q, gpu="h200", trials=1)
    told = [r.getMessage().split()[1] for r in caplog.records if r.getMessage().startswith("autotune:")]
    assert told == ["flash_attention", "matmul", "matmul", "matmul"]
    attention = mgpu_ops.FlashAttentionProblem(4, 2048, 2048, 8, 8, 64)
    with context:
        assert resolution.resolve(MATMUL, MatmulProblem(512, 512, 512, layout="nt"), H200).source == "override"
        assert resolution.resolve(spec_of("flash_attention"), attention, H200).source == "override"


def test_a_second_start_tunes_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=2)
    (entry,) = stored()
    monkeypatch.setattr(tuner, "tune", None)
    with mgpu_ops.autotune(matmul, A, B, gpu="h200"):
        found = resolution.resolve(MATMUL, PROBLEM, H200)
    assert (found.source, dataclasses.asdict(found.config)) == ("override", entry.config)


def test_an_entry_of_another_kernel_version_or_one_that_cannot_run_is_tuned_again() -> None:
    mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=1)
    h200 = devices.device_for("h200", say=print)
    assert autotune._stored(MATMUL, PROBLEM, h200) is not None
    assert autotune._stored(dataclasses.replace(MATMUL, version=2), PROBLEM, h200) is None
    assert autotune._stored(dataclasses.replace(MATMUL, check=lambda *_: "no"), PROBLEM, h200) is None
    assert autotune._stored(MATMUL, MatmulProblem(512, 512, 1024), h200) is None


def test_store_false_leaves_the_database_alone(own_database: Path) -> None:
    with mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=1, store=False):
        assert resolution.resolve(MATMUL, PROBLEM, H200).source == "override"
    assert resolution.resolve(MATMUL, PROBLEM, H200).source != "override"
    assert not own_database.exists()


def test_a_problem_of_which_no_candidate_works_is_left_to_the_database(
    monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    tune = tuner.tune
    monkeypatch.setattr(tuner, "tune", lambda *a, **k: dataclasses.replace(tune(*a, **k), entry=None))
    with mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=1):
        assert resolution.resolve(MATMUL, PROBLEM, H200).source != "override"
    assert stored() == []
    assert "autotune: no candidate of matmul" in caplog.text


def test_ctrl_c_keeps_what_was_found_and_ends_the_program(monkeypatch: pytest.MonkeyPatch) -> None:
    tune = tuner.tune
    monkeypatch.setattr(tuner, "tune", lambda *a, **k: dataclasses.replace(tune(*a, **k), ended="interrupted"))
    with pytest.raises(KeyboardInterrupt):
        mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=1)
    assert len(stored()) == 1


@pytest.mark.parametrize(
    ("options", "message"),
    [
        *(({"trials": trials}, f"^trials={trials} must be a whole number of at least 1") for trials in (0, 1.5, True)),
        *(({"budget": budget}, f"^budget={budget!r} must be a finite number of seconds") for budget in (-1.0, "60s", None)),
    ],
)
def test_what_is_no_search_is_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        mgpu_ops.autotune(lambda: None, gpu="h200", **options)


def test_numbers_of_numpy_bound_a_search_too(monkeypatch: pytest.MonkeyPatch) -> None:
    asked: list[Any] = []
    monkeypatch.setattr(autotune, "TuneOptions", lambda *bounds: asked.append(bounds))
    mgpu_ops.autotune(lambda: None, gpu="h200", trials=np.int64(3), budget=np.float32(60))
    assert [type(bound) for bound in asked[0]] == [int, float]


def test_without_a_gpu_one_must_be_named() -> None:
    with pytest.raises(ValueError, match=r"no Hopper GPU here to measure on: .* gpu= \(h100-sxm, "):
        mgpu_ops.autotune(matmul, A, B)
    with pytest.raises(ValueError, match="h300"):
        mgpu_ops.autotune(matmul, A, B, gpu="h300")


def test_a_gpu_that_is_no_hopper_does_not_keep_another_from_being_modelled(monkeypatch: pytest.MonkeyPatch) -> None:
    def no_hopper(name: str | None) -> Any:
        raise WorkerError("the GPU worker did not start: NVIDIA A100 is not a Hopper GPU")

    monkeypatch.setattr(devices, "has_gpu", lambda: True)
    monkeypatch.setattr(device, "Measured", no_hopper)
    with mgpu_ops.autotune(matmul, A, B, gpu="h200", trials=1):
        assert [entry.evidence.kind for entry in stored()] == ["modelled"]
    with pytest.raises(WorkerError, match="A100"):
        mgpu_ops.autotune(matmul, A, B)


def test_a_broken_database_is_refused_before_tuning(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(tuner, "tune", None)
    path = database.user_path("h200", "matmul")
    path.parent.mkdir(parents=True)
    path.write_text("{")
    with pytest.raises(mgpu_ops.DatabaseError, match="is corrupt"):
        mgpu_ops.autotune(matmul, A, B, gpu="h200")


def test_a_function_without_ops_gives_an_empty_context() -> None:
    with mgpu_ops.autotune(jnp.sin, A, gpu="h200"):
        assert resolution.resolve(MATMUL, PROBLEM, H200).source != "override"


PROGRAM = """
import dataclasses, json, sys
import jax
process, address = int(sys.argv[1]), sys.argv[2]
jax.distributed.initialize(address, 2, process)
import jax.numpy as jnp
import mgpu_ops
from mgpu_ops.core import aot, gpu; from mgpu_ops.registry import database, resolution
aot.available = lambda: "not in this test"
if process == 1:  # it does not tune: it is told
    import mgpu_ops.tuning.tuner
    mgpu_ops.tuning.tuner.tune = None

a = jax.ShapeDtypeStruct((512, 512), jnp.bfloat16)
spec, problem = mgpu_ops.spec_of("matmul"), mgpu_ops.MatmulProblem(512, 512, 512)
with mgpu_ops.autotune(mgpu_ops.matmul, a, a, gpu="h200", trials=2):
    found = resolution.resolve(spec, problem, gpu.find("h200"))
stored = database.user_path("h200", "matmul").exists()
print(json.dumps({"source": found.source, "config": dataclasses.asdict(found.config), "stored": stored}))
"""


def test_in_a_job_process_0_tunes_and_all_run_with_what_it_found(tmp_path: Path) -> None:
    zero, one = run_job(PROGRAM, [tmp_path / "zero", tmp_path / "one"])
    assert (zero["source"], one["source"]) == ("override", "override")
    assert zero["config"] == one["config"]
    assert (zero["stored"], one["stored"]) == (True, False)
