"""How a call reaches a backend, with a toy op: the kernel is a string."""

from __future__ import annotations

import dataclasses
import logging
from dataclasses import dataclass
from typing import Any

import pytest

from mgpu_ops.core import gpu
from mgpu_ops.registry import dispatch as op
from mgpu_ops.registry import resolution
from mgpu_ops.registry.spec import OpSpec


@dataclass(frozen=True)
class Problem:
    m: int


@dataclass(frozen=True)
class Config:
    tile: int


def supports(problem: Any, device: Any) -> str | None:
    return f"m={problem.m} is odd: pad to {problem.m + 1}" if problem.m % 2 else None


def check(problem: Any, config: Any, device: Any) -> str | None:
    return None if config.tile > 0 else f"tile={config.tile} must be positive"


def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool = False) -> Any:
    return ("interpreted" if interpret else "compiled", config.tile, device.key, *arrays)


SPEC = OpSpec(
    name="toy",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes={},
    suites={},
    space=lambda problem, device: {"tile": (1, 2)},
    supports=supports,
    check=check,
    candidates=lambda problem, device: [Config(1)],
    default=lambda problem, device: Config(1),
    cost=lambda problem, config, device: 1.0,
    distance=lambda x, y: None,
    flops=lambda problem: 1,
    bytes=lambda problem: 1,
    inputs=lambda problem, key: (),
    run=run,
    reference=lambda problem, *arrays: ("xla", *arrays),
    tolerance=lambda problem: 0.0,
)


def dispatch(m: int, backend: str | None = None, config: Any = None) -> Any:
    return op.run(SPEC, Problem(m), ("x", "y"), config=config, backend=backend)


@pytest.fixture(autouse=True)
def nothing_said(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(op, "_said", set())


@pytest.mark.parametrize("name", [None, *op.BACKENDS])
def test_backend_is_the_argument_or_else_the_environment(name, monkeypatch):
    assert op.requested_backend(name) == name
    monkeypatch.setenv("MGPU_OPS_BACKEND", "interpret")
    assert op.requested_backend(name) == (name or "interpret")
    monkeypatch.setenv("MGPU_OPS_BACKEND", "")
    assert op.requested_backend(name) == name


def test_unknown_backend_names_where_it_is_from_and_what_there_is(monkeypatch):
    with pytest.raises(ValueError, match=r"^backend='gpu' is not one of mosaic, interpret, xla$"):
        op.requested_backend("gpu")
    monkeypatch.setenv("MGPU_OPS_BACKEND", "gpu")
    with pytest.raises(ValueError, match=r"^MGPU_OPS_BACKEND='gpu' is not one of"):
        op.requested_backend(None)
    assert op.requested_backend("xla") == "xla"


@pytest.mark.parametrize("backend", [None, "mosaic"])
def test_kernel_is_compiled_for_the_gpu_in_use(backend):
    with gpu.target("h20"):
        assert dispatch(2, backend) == ("compiled", 1, "h20", "x", "y")


def test_interpreter_runs_for_the_gpu_in_use_or_else_for_an_h200():
    assert dispatch(2, "interpret") == ("interpreted", 1, "h200", "x", "y")
    with gpu.target("b200"):
        assert dispatch(2, "interpret") == ("interpreted", 1, "h200", "x", "y")
    with gpu.target("h20"):
        assert dispatch(2, "interpret") == ("interpreted", 1, "h20", "x", "y")


@pytest.mark.parametrize("m", [1, 2])
def test_xla_by_name_takes_every_problem_and_logs_nothing(m, caplog):
    with caplog.at_level(logging.DEBUG, "mgpu_ops"):
        assert dispatch(m, "xla") == ("xla", "x", "y")
    assert not caplog.records


def test_without_a_name_what_the_kernel_cannot_run_goes_through_xla_and_says_why_once(caplog):
    with caplog.at_level(logging.WARNING, "mgpu_ops"):
        for _ in range(2):
            assert dispatch(2) == ("xla", "x", "y")
            with gpu.target("h200"):
                assert dispatch(3) == ("xla", "x", "y")
    assert [record.getMessage() for record in caplog.records] == [
        "toy runs through XLA: no NVIDIA GPU is in use",
        "toy runs through XLA: m=3 is odd: pad to 4",
    ]


def test_named_kernel_backend_runs_or_raises():
    with pytest.raises(ValueError, match=r"backend='mosaic' cannot run toy.*no NVIDIA GPU"):
        dispatch(2, "mosaic")
    with pytest.raises(ValueError, match=r"backend='interpret' cannot run toy.*m=3 is odd: pad"):
        dispatch(3, "interpret")


def test_what_speaks_against_the_kernel_beside_problem_and_gpu_counts_as_they_do():
    why = "the GPUs do not reach each other"
    with gpu.target("h200"):
        assert op.choose(SPEC, Problem(2), None).backend == "mosaic"
        found = op.choose(SPEC, Problem(2), None, why)
        assert (found.backend, found.reason) == ("xla", why)
        with pytest.raises(ValueError, match=f"backend='mosaic' cannot run toy.*{why}"):
            op.choose(SPEC, Problem(2), "mosaic", why)


def test_config_is_the_argument_or_else_the_databases():
    with gpu.target("h200"):
        assert dispatch(2, config=Config(2))[1] == 2
        with resolution.use_configs({"toy": Config(4)}):
            assert dispatch(2)[1] == 4
            assert dispatch(2, config=Config(2))[1] == 2
        assert dispatch(2)[1] == 1


def test_no_config_that_cannot_run_reaches_the_kernel_wherever_it_is_from(monkeypatch):
    with gpu.target("h200"), pytest.raises(ValueError, match=r"from argument cannot run .*tile=0 must be positive"):
        dispatch(2, config=Config(0))
    bad_default = dataclasses.replace(SPEC, default=lambda problem, device: Config(0))
    with gpu.target("h200"), pytest.raises(ValueError, match=r"from default cannot run .*tile=0 must be positive"):
        op.run(bad_default, Problem(2), ("x", "y"), config=None, backend=None)
