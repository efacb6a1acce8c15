"""Benchmarks: what a run measures, how it reports what went wrong, and its files.

XLA on the CPU stands in for a GPU.
"""

from __future__ import annotations

import csv
import dataclasses
import itertools
import math
import types
from collections.abc import Callable, Sequence
from concurrent.futures import Future
from functools import partial
from pathlib import Path
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import SPECS, CollectiveProblem, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem
from mgpu_ops.attention import cudnn, reference
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.aot import Executable
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning import compile_pool, labels
from mgpu_ops.tuning.bench import implementations, runner
from mgpu_ops.tuning.outcome import Outcome

SPEC = SPECS["matmul"]
H200 = gpus.find("h200")
ROOT = Path(__file__).parents[3]
SMALL = {"small": MatmulProblem(64, 32, 128)}


def timer(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """Runs each function once and pretends that the i-th takes 10 (i + 1) us, give or take 1."""
    for function in functions:
        jax.block_until_ready(function())
    return [[10.0 * (i + 1) + (r % 3 - 1) for r in range(rounds)] for i in range(len(functions))]


def warm(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    """As `timer`, in 0.8 of the time."""
    return [[0.8 * us for us in samples] for samples in timer(functions, gpu, rounds)]


def run(problems: dict[str, Any] | None = None, *, spec: Any = SPEC, **changes: Any) -> tuple[list[runner.Row], list[str]]:
    said: list[str] = []
    options: dict[str, Any] = {"against": ["xla"], "grad": False, "seconds": 0.01, "backend": "xla"}
    rows = runner.run(
        spec,
        SMALL if problems is None else problems,
        **options | {"gpu": H200, "progress": said.append, "timer": timer, "warm": warm} | changes,
    )
    return rows, said


def row(impl: str = "mgpu_ops", us: float = 10.0, **changes: Any) -> runner.Row:
    fields = {"op": "matmul", "problem": "p", "impl": impl, "config": "c", "median_us": us}
    numbers = {"spread_us": 0.1, "tflops": 1.0, "gbs": 1.0, "error": 0.001}
    stamp = {"gpu": "NVIDIA H200", "driver": "570.86.15", "jax": "0.11.2", "date": "2025-01-31"}
    return runner.Row(**fields | numbers | stamp | changes)  # type: ignore[arg-type]


# --- Running --------------------------------------------------------------------------------------


def test_a_problem_gives_a_row_for_ours_each_peer_and_the_roofline() -> None:
    rows, said = run()
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert {(r.op, r.problem, r.gpu) for r in rows} == {("matmul", "64x32x128 bfloat16 nn", "NVIDIA H200")}
    assert [r.median_us for r in rows[:2]] == [10.0, 20.0]
    assert rows[0].spread_us == 2.0
    assert all(0 < r.error <= 8e-3 for r in rows[:2])
    assert [r.warm_us for r in rows] == [8.0, 16.0, None]
    assert "mgpu_ops 10 us (8 warm), xla 20 us (16 warm)" in said[-1]


def test_rows_tell_the_versions_of_what_ran(monkeypatch: pytest.MonkeyPatch) -> None:
    versions = types.SimpleNamespace(cudnn_get_version=lambda: 91900, cublas_get_version=lambda: 130205)
    monkeypatch.setattr("jax._src.lib.cuda_versions", versions)
    monkeypatch.setattr(runner.ptxas, "isa", lambda: 93)
    runner._libraries.cache_clear()
    rows, _ = run()
    runner._libraries.cache_clear()
    assert {(r.cudnn, r.cublas, r.ptxas) for r in rows} == {("9.19.0", "13.2.5", "9.3")}


def test_versions_of_what_is_not_here_are_empty(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("jax._src.lib.cuda_versions", None)
    monkeypatch.setattr(runner.ptxas, "isa", lambda: None)
    runner._libraries.cache_clear()
    found = runner._libraries()
    runner._libraries.cache_clear()
    assert found == {"cudnn": "", "cublas": "", "ptxas": ""}


def test_rates_are_work_over_time() -> None:
    rows, _ = run({"f": MatmulProblem(64, 32, 128, out_dtype="float32")})
    assert rows[0].tflops == pytest.approx(2 * 64 * 32 * 128 / 10e-6 / 1e12, rel=1e-5)
    moved = 2 * (64 * 128 + 128 * 32) + 4 * 64 * 32
    assert rows[0].gbs == pytest.approx(moved / 10e-6 / 1e9, rel=1e-5)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
@pytest.mark.parametrize("grad", [False, True])
def test_every_layout_is_right_with_and_without_gradients(layout: str, grad: bool) -> None:
    problems = {"p": MatmulProblem(16, 32, 64, "float16", "float16", layout)}
    rows, _ = run(problems, grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert runner.failures(rows, SPEC, problems, grad=grad) == []


def test_a_batch_runs() -> None:
    rows, _ = run({"b": MatmulProblem(16, 32, 64, batch=3)})
    assert rows[0].problem == "16x32x64 bfloat16 nn batch=3"
    assert rows[0].error <= 8e-3


def test_gradients_do_three_times_the_work() -> None:
    forward, _ = run()
    both, _ = run(grad=True)
    assert both[0].op == "matmul+grad"
    assert both[0].tflops == pytest.approx(3 * forward[0].tflops, rel=1e-5)
    assert both[-1].median_us == pytest.approx(3 * forward[-1].median_us, rel=1e-5)


def test_the_roofline_is_the_datasheets() -> None:
    large, tall = MatmulProblem(4096, 4096, 4096), MatmulProblem(8, 4096, 4096)
    stamp = dict.fromkeys(("op", "problem", "gpu", "driver", "jax", "date"), "")
    large_us, tall_us = (
        runner._roofline(runner._Case(SPEC, p, H200, False, 1.0, 0, None, timer), stamp).median_us for p in (large, tall)
    )
    assert large_us == pytest.approx(2 * 4096**3 / 989.4e12 * 1e6, rel=1e-5)
    assert tall_us == pytest.approx(2 * (4096**2 + 2 * 8 * 4096) / 4.8e12 * 1e6, rel=1e-5)


def test_our_row_says_which_config_ran_and_where_it_came_from() -> None:
    rows, _ = run({"p": MatmulProblem(64, 64, 64)}, backend="interpret", against=[])
    config = SPEC.default(MatmulProblem(64, 64, 64), H200)
    assert f"tile_m={config.tile_m} tile_n={config.tile_n}" in rows[0].config
    assert rows[0].config.partition("; source=")[2] in ("default", "near", "shipped")
    assert rows[0].error <= 8e-3


def test_our_row_says_when_it_went_through_xla(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setenv("MGPU_OPS_BACKEND", "xla")
    rows, _ = run(backend=None)
    assert rows[0].config == "backend=xla"
    monkeypatch.delenv("MGPU_OPS_BACKEND")
    rows, _ = run({"p": MatmulProblem(16, 16, 16, "float32", "float32")}, backend=None)
    assert rows[0].config.startswith("backend=xla, for dtype float32")


def test_more_seconds_mean_more_rounds() -> None:
    asked: list[int] = []

    def counting(functions: Sequence[Any], gpu: Gpu, rounds: int) -> list[list[float]]:
        asked.append(rounds)
        return timer(functions, gpu, rounds)

    run(seconds=0.001, timer=counting)
    run(seconds=0.01, timer=counting)
    assert asked[1] < asked[3]


def test_a_peer_that_cannot_run_has_no_row_and_its_reason_is_told() -> None:
    rows, said = run(against=["jax-pallas", "xla"])
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert any("jax-pallas has no tile that divides m=64" in line for line in said)


def test_a_peer_without_a_gradient_is_told() -> None:
    rows, said = run({"p": MatmulProblem(128, 128, 64)}, against=["jax-pallas"], grad=True)
    assert [r.impl for r in rows] == ["mgpu_ops", "roofline"]
    assert any("jax-pallas is measured forward only" in line for line in said)


def test_a_peer_that_fails_does_not_take_the_others_along() -> None:
    # Its kernel does not compile for a CPU.
    rows, said = run({"p": MatmulProblem(128, 128, 64)}, against=["jax-pallas", "xla"])
    assert [r.impl for r in rows] == ["mgpu_ops", "xla", "roofline"]
    assert any("jax-pallas failed: ValueError: none of" in line for line in said)


def test_an_unknown_peer_is_refused_by_name() -> None:
    with pytest.raises(ValueError, match="'cutlass' is no peer of matmul: name one of xla"):
        run(against=["cutlass"])


def test_a_failing_problem_is_told_and_the_run_goes_on() -> None:
    problems = {"bad": MatmulProblem(64, 32, 128, dtype="int8"), **SMALL}
    saved: list[int] = []
    rows, said = run(problems, save=lambda rows: saved.append(len(rows)))
    assert {r.problem for r in rows} == {"64x32x128 bfloat16 nn"}
    assert any(line.startswith("64x32x128 int8->bfloat16 nn: failed: ") for line in said)
    assert saved == [3]
    assert runner.failures(rows, SPEC, problems, grad=False) == ["64x32x128 int8->bfloat16 nn: no result"]


@pytest.mark.parametrize(("factor", "shown"), [(math.nan, "nan"), (1.5, "0.")])
@pytest.mark.parametrize("grad", [False, True])
def test_a_wrong_result_is_visible(factor: float, shown: str, grad: bool, monkeypatch: pytest.MonkeyPatch) -> None:
    right = runner._PUBLIC["matmul"]

    def broken(problem: Any, backend: str | None) -> Callable[..., jax.Array]:
        if problem.dtype == "float32":  # what gradients are compared with
            return right(problem, backend)
        return lambda a, b: right(problem, backend)(a, b) * jnp.asarray(factor, problem.out_dtype)

    monkeypatch.setitem(runner._PUBLIC, "matmul", broken)
    rows, said = run(grad=grad)
    assert not rows[0].error <= 8e-3
    assert any(f"WRONG RESULT of mgpu_ops: error {shown}" in line for line in said)
    assert "is above" in runner.failures(rows, SPEC, SMALL, grad=grad)[0]
    [against_xla] = runner.summary(rows)
    assert (against_xla.problems, against_xla.wrong) == (0, 1)


def test_their_kernel_is_offered_only_tiles_that_divide_the_problem() -> None:
    problem = MatmulProblem(128, 512, 256)
    tilings = list(implementations.pallas_tilings(problem))
    assert tilings
    for t in tilings:
        rows = t["tile_m"] * (1 + (t["wg_dimension"] == "M"))
        columns = t["tile_n"] * (1 + (t["wg_dimension"] == "N"))
        assert (problem.m % rows, problem.n % columns) == (0, 0)
        clusters = {None: (1, 1), "M": (2, 1), "N": (1, 2)}[t["cluster_dimension"]]
        assert (problem.m % (rows * clusters[0]), problem.n % (columns * clusters[1])) == (0, 0)
        assert t["tile_m"] * t["tile_n"] <= 200 * 128
    assert not list(implementations.pallas_tilings(MatmulProblem(128, 512, 100)))


@pytest.mark.parametrize(
    ("problem", "gpu", "reason"),
    [
        (MatmulProblem(256, 256, 256, layout="nt"), "h200", "layout nt"),
        (MatmulProblem(256, 256, 256, batch=2), "h200", "batch 2"),
        (MatmulProblem(256, 256, 256, out_dtype="float32"), "h200", "bfloat16 to float32"),
        (MatmulProblem(256, 256, 256), "b200", "NVIDIA B200"),
        (MatmulProblem(256, 256, 256), "h200", None),
    ],
)
def test_their_kernel_says_what_it_cannot_do(problem: Any, gpu: str, reason: str | None) -> None:
    found = implementations.PEERS["matmul"]["jax-pallas"].unavailable(problem, gpus.find(gpu))
    assert found is None if reason is None else reason in str(found)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", None)
    monkeypatch.delattr("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", raising=False)
    reason = implementations.PEERS["matmul"]["jax-pallas"].unavailable(MatmulProblem(256, 256, 256), H200)
    assert "pip install absl-py" in str(reason)


def by_speed(ranks: Callable[[Any], float]) -> Callable[..., Any]:
    """A timer: a function takes as many us as `ranks` says of its setting, which it has as `.setting`."""

    def timer(functions: Sequence[Any], gpu: Gpu, rounds: int) -> list[list[float]]:
        return [[ranks(f()["setting"])] * rounds for f in functions]

    return timer


def tuned(
    settings: Sequence[Any], ranks: Callable[[Any], float], passes: Any = (), **changes: Any
) -> tuple[Any, str, list[Any]]:
    """What `_best` keeps of settings that compile unless they rank at infinity, and which it built, in order."""
    built: list[Any] = []

    def build(setting: Any) -> Callable[..., Any]:
        built.append(setting)
        if ranks(setting) == math.inf:
            raise_it: Callable[..., Any] = lambda x: 1 / 0  # noqa: E731
            return raise_it
        return lambda x: {"x": x}

    def compiled(function: Any, arrays: tuple) -> Any:
        setting = built[[id(f) for f in functions].index(id(function))]
        function(*arrays)
        return lambda: {"setting": setting}

    functions: list[Any] = []

    def remembered(setting: Any) -> Any:
        functions.append(build(setting))
        return functions[-1]

    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(implementations, "compiled", compiled)
        task = implementations.Task(None, H200, (1.0,), by_speed(ranks), **changes)
        best, call, said = implementations._best(task, settings, remembered, passes)
    assert call()["setting"] == best
    return best, said, built


TILES = [(("tile", t), ("steps", s), ("raster", r)) for t in (3, 1, 2) for s in (4, 2) for r in (8, 1)]
PASSES = (("tile",), ("steps",), ("raster",))


def test_all_settings_are_tried_where_there_are_no_passes_and_what_does_not_compile_is_passed_over() -> None:
    best, said, built = tuned(TILES, lambda s: math.inf if dict(s)["tile"] == 1 else sum(dict(s).values()))
    assert built == TILES
    assert best == (("tile", 2), ("steps", 2), ("raster", 1))
    assert said == "tile=2 steps=2 raster=1; fastest of 8"


def test_passes_try_a_field_after_the_other_from_the_two_fastest_so_far() -> None:
    best, said, built = tuned(TILES, lambda s: 100 * dict(s)["tile"] + 10 * dict(s)["steps"] + dict(s)["raster"], PASSES)
    assert best == (("tile", 1), ("steps", 2), ("raster", 1))
    first = [(("tile", t), ("steps", 4), ("raster", 8)) for t in (3, 1, 2)]  # the first of each tile
    assert built[:3] == first
    assert set(built[3:5]) == {(("tile", t), ("steps", 2), ("raster", 8)) for t in (1, 2)}  # of the two fastest
    assert set(built[5:]) == {(("tile", 1), ("steps", s), ("raster", 1)) for s in (4, 2)}
    assert said.endswith("; fastest of 7")


def test_what_won_before_is_all_that_is_tried() -> None:
    known = frozenset({"tile=2 steps=4 raster=1"})
    best, said, built = tuned(TILES, lambda s: sum(dict(s).values()), PASSES, known=known)
    assert built == [best] == [(("tile", 2), ("steps", 4), ("raster", 1))]
    assert said.endswith("; fastest of 1 that won before")


def test_a_peer_of_which_nothing_compiles_says_why() -> None:
    with pytest.raises(ValueError, match="none of 12 settings compiles; the last: ZeroDivisionError"):
        tuned(TILES, lambda s: math.inf)


class FakePool:
    """Answers each call at once, as processes would: with what `answer` makes of its setting, or not at all."""

    def __init__(self, answer: Callable[[Any], Any]):
        self.answer, self.calls = answer, list[compile_pool.Call]()

    def submit(self, call: compile_pool.Call) -> Future[Any]:
        self.calls.append(call)
        future: Future[Any] = Future()
        found = self.answer(call.function.args[0])
        if isinstance(found, Exception):
            future.set_exception(found)
        elif found is not None:
            future.set_result(found)
        return future


def product(setting: int, a: jax.Array) -> jax.Array:
    return a * setting


def in_a_pool(pool: FakePool, **changes: Any) -> tuple[Callable[..., Any], str]:
    def timer(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
        return [[float(f()[0])] * rounds for f in functions]

    task = implementations.Task(None, H200, (jnp.ones(3),), timer, pool=pool, **changes)  # type: ignore[arg-type]
    return implementations._fastest(task, [3, 2, 1], lambda setting: partial(product, setting), text=str)


def test_settings_compile_in_the_pool_and_what_won_is_not_compiled_again(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations.aot, "load", lambda executable: partial(product, executable.registers))
    pool = FakePool(lambda s: Outcome("compile", detail="no") if s == 1 else Executable(b"", (None, None), s, 0))
    function, said = in_a_pool(pool)
    assert said == "2; fastest of 2"
    assert [(call.function.args, call.shapes[0].shape, call.gpu) for call in pool.calls] == [
        ((s,), (3,), H200) for s in (3, 2, 1)
    ]
    monkeypatch.setattr(jax, "jit", None)
    assert implementations.compiled(function, function.arrays)()[0] == 2.0


def test_what_the_pool_does_not_answer_in_time_is_passed_over_and_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(implementations.aot, "load", lambda executable: partial(product, executable.registers))
    _, said = in_a_pool(FakePool(lambda s: Executable(b"", (None, None), s, 0) if s == 3 else None), seconds=0.01)
    assert said == "3; fastest of 1, 2 were not in time"


def test_what_no_process_can_compile_or_no_gpu_loads_compiles_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    def refuses(executable: Any) -> Any:
        raise RuntimeError("INVALID_ARGUMENT: unexpected PJRT version")

    monkeypatch.setattr(implementations.aot, "load", refuses)
    for answer in (Executable(b"", (None, None), 1, 0), Outcome("compile", detail="no CUDA here")):
        assert in_a_pool(FakePool(lambda s, answer=answer: answer))[1] == "1; fastest of 3"


def test_a_function_that_pickle_does_not_take_compiles_in_threads(monkeypatch: pytest.MonkeyPatch) -> None:
    """A process that were asked all the same would have to be replaced."""
    monkeypatch.setattr(implementations.pickle, "dumps", lambda call: 1 / 0)
    pool = FakePool(lambda s: None)
    assert in_a_pool(pool)[1] == "1; fastest of 3"
    assert pool.calls == []


def test_tilings_of_the_tuning_loop_of_jaxs_own_kernel_are_all_tried_with_clusters_and_deeper_pipelines() -> None:
    settings = [tuple(t.items()) for t in implementations.pallas_tilings(MatmulProblem(4096, 8192, 4096))]
    assert len(set(settings)) == len(settings)
    values = {name: {dict(s)[name] for s in settings} for name in dict(settings[0])}
    assert values["max_concurrent_steps"] == {2, 3, 4, 5, 6, 8}
    assert values["cluster_dimension"] == {None, "M", "N"}
    theirs = itertools.product((128, 256), (64, 128), "MN", (4, 8, 16), "MN")
    legal = [c for c in theirs if c[0] * c[1] <= 200 * 128 and (c[0], c[-1]) != (256, "M")]  # registers and shared memory
    found = {
        tuple(dict(s)[f] for f in ("tile_m", "tile_n", "grid_minor_dim", "grid_tile_width", "wg_dimension"))
        for s in settings
        if (dict(s)["max_concurrent_steps"], dict(s)["tile_k"], dict(s)["cluster_dimension"]) == (4, 64, None)
    }
    assert set(legal) <= found


# --- Grouped products -----------------------------------------------------------------------------

GROUPED, CONTRACTION = SPECS["grouped_matmul"], SPECS["ragged_contraction"]


@pytest.mark.parametrize(
    ("layout", "spread", "grad"), [("nn", "skewed", True), ("nt", "skewed", True), ("nt", "sparse", False)]
)
def test_a_grouped_matmul_and_its_gradients_are_right_beside_jaxs_own(layout: str, spread: str, grad: bool) -> None:
    problems = {"p": GroupedMatmulProblem(40, 32, 16, 5, layout=layout, spread=spread)}
    rows, said = run(problems, spec=GROUPED, against=["dense", "lax"], grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "lax", "roofline"]
    assert runner.failures(rows, GROUPED, problems, grad=grad) == []
    assert not [line for line in said if "WRONG" in line or "failed" in line]
    assert all(r.error is not None and r.error <= 0.02 for r in rows if r.impl == "lax")


def test_a_ragged_contraction_is_right_beside_jaxs_own() -> None:
    problems = {"p": RaggedContractionProblem(40, 32, 16, 5, out_dtype="float32", spread="skewed")}
    rows, said = run(problems, spec=CONTRACTION, against=["dense", "lax"])
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "lax", "roofline"]
    assert runner.failures(rows, CONTRACTION, problems, grad=False) == []
    assert not [line for line in said if "WRONG" in line]


def test_a_yardstick_of_another_shape_has_gradients_too() -> None:
    problems = {"p": RaggedContractionProblem(40, 32, 16, 5, out_dtype="float32", spread="even")}
    rows, said = run(problems, spec=CONTRACTION, against=["dense", "lax"], grad=True)
    assert [r.impl for r in rows] == ["mgpu_ops", "dense", "roofline"]
    assert runner.failures(rows, CONTRACTION, problems, grad=True) == []
    assert any("lax is measured forward only" in line for line in said)


@pytest.mark.parametrize("grad", [False, True])
def test_bias_and_activation_are_in_our_row_and_no_peer_has_them(grad: bool) -> None:
    problems = {"p": GroupedMatmulProblem(40, 32, 16, 5, "float16", "float16", bias=True, activation="gelu", spread="skewed")}
    rows, said = run(problems, spec=GROUPED, against=["lax", "jax-pallas", "tokamax"], grad=grad)
    assert [r.impl for r in rows] == ["mgpu_ops", "roofline"]
    assert runner.failures(rows, GROUPED, problems, grad=grad) == []
    assert sum("adds no bias and applies no activation" in line for line in said) == 3


def test_gradients_are_those_of_floats_only() -> None:
    """Of lhs, rhs and bias, not of the sizes; a wrong gradient of any shows."""
    problem = GroupedMatmulProblem(24, 16, 16, 3, bias=True, spread="even")
    arrays = GROUPED.inputs(problem, jax.random.key(0))
    ours = runner._PUBLIC["grouped_matmul"](problem, "xla")
    answers = runner._with_gradient(ours)(*arrays, ours(*arrays))
    assert [x.shape for x in answers] == [(24, 16), (24, 16), (3, 16, 16), (3, 16)]


def test_a_yardstick_has_a_time_and_no_error(tmp_path: Path) -> None:
    rows, said = run({"p": GroupedMatmulProblem(40, 32, 16, 5, spread="even")}, spec=GROUPED, against=["dense"])
    assert not any("WRONG" in line for line in said)
    assert (rows[1].impl, rows[1].median_us, rows[1].error) == ("dense", 20.0, None)
    runner.write_csv(rows, tmp_path / "rows.csv")
    assert ",,NVIDIA H200," in (tmp_path / "rows.csv").read_text()
    assert runner.read_csv(tmp_path / "rows.csv") == rows


def test_gradients_of_grouped_products_do_three_times_the_work() -> None:
    problem = GroupedMatmulProblem(40, 32, 16, 5, spread="even")
    both, _ = run({"p": problem}, spec=GROUPED, against=[], grad=True)
    assert both[0].op == "grouped_matmul+grad"
    assert both[0].tflops == pytest.approx(3 * 2 * 40 * 32 * 16 / 10e-6 / 1e12, rel=1e-5)


def test_a_peers_settings_are_taken_from_an_earlier_result(monkeypatch: pytest.MonkeyPatch) -> None:
    tasks: list[implementations.Task] = []

    def prepare(task: implementations.Task) -> implementations.Prepared:
        tasks.append(task)
        return runner._PUBLIC["matmul"](task.problem, "xla"), "tile=8 steps=2; fastest of 3"

    peer = implementations.Peer(lambda problem, gpu: None, prepare, differentiable=True)
    monkeypatch.setitem(implementations.PEERS["matmul"], "tuned", peer)
    first, _ = run(against=["tuned"], peer_seconds=5.0)
    run(against=["tuned"], earlier=first)
    run(against=["tuned"], earlier=first, grad=True)  # of another op's name
    assert [(task.seconds, "tile=8 steps=2" in task.known) for task in tasks] == [(5.0, False), (60.0, True), (60.0, False)]


# --- Attention ------------------------------------------------------------------------------------

ATTENTION, BACKWARD = SPECS["flash_attention"], SPECS["flash_attention_backward"]
HEADS = ATTENTION.Problem(1, 16, 16, 4, 2, 8)


@pytest.fixture
def no_cudnn(monkeypatch: pytest.MonkeyPatch) -> None:
    """jax.nn's own attention through XLA stands in for cuDNN's, with the same arguments."""
    monkeypatch.setattr(cudnn, "_IMPLEMENTATION", "xla")


def attention(problem: Any, **changes: Any) -> tuple[list[runner.Row], list[str]]:
    spec = BACKWARD if isinstance(problem, BACKWARD.Problem) else ATTENTION
    rows, said = run({"p": problem}, spec=spec, **{"against": ["cudnn"]} | changes)
    assert [r.impl for r in rows] == ["mgpu_ops", "cudnn", "roofline"]
    assert runner.failures(rows, spec, {"p": problem}, grad=changes.get("grad", False)) == []
    return rows, said


@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize(
    "changes",
    [
        {"causal": True, "window_left": 5},
        {"causal": True, "kv_tokens": 24, "align": "top_left"},
        {"lengths": True, "bias": "float16"},
    ],
)
def test_attention_is_right_beside_cudnn_and_its_rate_is_of_what_is_visible(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(HEADS, **changes)
    rows, said = attention(problem)
    assert not [line for line in said if "WRONG" in line or "failed" in line]
    assert rows[0].tflops == pytest.approx(4 * 4 * 8 * reference.pairs(problem) / 10e-6 / 1e12, rel=1e-5)


@pytest.mark.usefixtures("no_cudnn")
@pytest.mark.parametrize("bias", ["none", "bfloat16"])
def test_the_gradient_of_attention_does_its_own_work(bias: str) -> None:
    """Five products beside the forward pass's two; the gradient of a bias is one of what is compared."""
    problem = dataclasses.replace(HEADS, causal=True, bias=bias)
    rows, said = attention(problem, grad=True)
    assert rows[0].op == "flash_attention+grad"
    assert rows[0].tflops == pytest.approx(7 / 2 * ATTENTION.flops(problem) / 10e-6 / 1e12, rel=1e-5)
    assert not [line for line in said if "WRONG" in line or "failed" in line]


@pytest.mark.usefixtures("no_cudnn")
def test_the_backward_op_is_right_beside_the_backward_pass_of_cudnn_alone() -> None:
    rows, said = attention(BACKWARD.Problem(**dataclasses.asdict(HEADS)))
    assert rows[1].error is not None
    assert rows[1].error <= 0.03
    assert not [line for line in said if "WRONG" in line or "failed" in line]


@pytest.mark.usefixtures("no_cudnn")
def test_a_peer_that_masks_otherwise_is_found_out_by_name(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(cudnn, "refuses", lambda problem: None)
    problem = dataclasses.replace(HEADS, causal=True, kv_tokens=24)  # the last rows are aligned by us, the first by it
    rows, said = attention(problem)
    assert [runner.wrong(row) for row in rows] == [False, True, False]
    assert any("WRONG RESULT of cudnn" in line for line in said)


def test_our_row_tells_the_configs_of_both_passes() -> None:
    case = runner._Case(ATTENTION, HEADS, H200, True, 1.0, 0, None, timer)
    forward, backward = runner._our_config(case).split(" | ")
    assert forward.startswith("forward compute_warpgroups=")
    assert backward.startswith("backward mode=")
    assert "; source=" in forward
    assert "; source=" in backward


def test_a_gradient_has_no_gradient() -> None:
    with pytest.raises(ValueError, match="flash_attention_backward is a gradient itself: measure it without --grad"):
        run({"p": BACKWARD.shapes["mha64-4096"]}, spec=BACKWARD, against=[], grad=True)


def test_attention_is_named_by_its_sizes_and_masks() -> None:
    assert labels.describe(HEADS) == "16x16x4x2x8 bfloat16"
    rich = dataclasses.replace(HEADS, batch=3, causal=True, window_left=0, bias="float32", align="top_left", soft_cap=True)
    assert labels.describe(rich) == "16x16x4x2x8 bfloat16 window_left=0 align=top_left bias=float32 causal soft_cap batch=3"
    shape = "mistral-7b-16384-window"
    text = f"{shape} 16384x16384x32x8x128 bfloat16 window_left=4095 causal"
    assert labels.label(ATTENTION, "x", ATTENTION.shapes[shape]) == text


# --- Names and files ------------------------------------------------------------------------------


def test_a_problem_is_named_as_it_was_asked_for() -> None:
    same = SPEC.shapes["square-4096"]
    assert SPEC.shapes["llama3-8b-out-4096"] == same
    texts = [labels.label(SPEC, name, same) for name in ("square-4096", "llama3-8b-out-4096", "mine")]
    assert [text.split()[0] for text in texts] == [
        "square-4096",
        "llama3-8b-out-4096",
        "square-4096",
    ]
    assert {text.split(maxsplit=1)[1] for text in texts} == {"4096x4096x4096 bfloat16 nn"}


def test_a_problem_as_text_tells_dtypes_layout_and_batch() -> None:
    problem = MatmulProblem(8, 16, 24, "float16", "float32", "tn", 4)
    assert labels.describe(problem) == "8x16x24 float16->float32 tn batch=4"


def test_a_grouped_problem_as_text_tells_groups_spread_and_epilogue() -> None:
    assert labels.describe(GroupedMatmulProblem(16384, 28672, 4096, 8)) == "16384x28672x4096 g=8 bfloat16 nn random"
    rich = GroupedMatmulProblem(8, 16, 24, 2, out_dtype="float32", layout="nt", bias=True, activation="silu", spread="even")
    assert labels.describe(rich) == "8x16x24 g=2 bfloat16->float32 nt silu even bias"
    assert labels.describe(RaggedContractionProblem(8, 16, 24, 2, spread="sparse")) == "8x16x24 g=2 bfloat16 sparse"
    name = "mixtral-8x7b-down-8192-random"
    assert labels.label(GROUPED, name, GROUPED.shapes[name]) == f"{name} 16384x4096x14336 g=8 bfloat16 nn random"


@pytest.mark.parametrize("name", SPECS)
def test_a_problems_text_is_read_back(name: str) -> None:
    spec = SPECS[name]
    for shape, problem in spec.shapes.items():
        assert labels.problem_of(spec, labels.label(spec, shape, problem)) == problem
        assert labels.problem_of(spec, labels.describe(problem)) == problem
    with pytest.raises(ValueError, match=f"is no problem of {name}"):
        labels.problem_of(spec, "unheard-of")


@pytest.mark.parametrize(
    ("spec", "problem"),
    [
        (SPEC, MatmulProblem(8, 16, 24, "float16", "float32", "tn", 4)),
        (GROUPED, GroupedMatmulProblem(8, 16, 24, 2, "float16", "float32", "nt", True, "silu", "even")),
        (CONTRACTION, RaggedContractionProblem(8, 16, 24, 2, spread="sparse")),
        (ATTENTION, dataclasses.replace(HEADS, batch=3, causal=True, window_left=0, bias="float32", align="top_left")),
        (BACKWARD, BACKWARD.Problem(**dataclasses.asdict(HEADS), deterministic=True)),
        (SPECS["all_reduce"], CollectiveProblem(96, 3, "int32", "max", "multimem")),
    ],
)
def test_a_problem_of_no_name_is_read_back(spec: Any, problem: Any) -> None:
    assert labels.problem_of(spec, labels.label(spec, "mine", problem)) == problem
    assert labels.problem_of(spec, f"a-name-of-old {labels.describe(problem)}") == problem


def test_result_files_sort_by_date_and_tell_gpu_and_op() -> None:
    path = runner.output_path("results", "2025-01-31", "h200", "matmul")
    assert path == Path("results/2025-01-31-h200-matmul.csv")
    path = runner.output_path("results", "2025-01-31", "h200", "matmul", "square", ".png")
    assert path == Path("results/2025-01-31-h200-matmul-square.png")


def test_the_columns_of_the_file_are_fixed(tmp_path: Path) -> None:
    runner.write_csv([row()], tmp_path / "new" / "rows.csv")
    with (tmp_path / "new" / "rows.csv").open() as stream:
        header = next(csv.reader(stream))
    assert ",".join(header) == (
        "op,problem,impl,config,median_us,spread_us,tflops,gbs,error,gpu,driver,jax,date,"
        "warm_us,cudnn,cublas,ptxas,devices,bytes,own_us,around_us,chain_us,bus_gbs"
    )


def test_a_file_of_before_the_further_columns_is_read(tmp_path: Path) -> None:
    path = tmp_path / "old.csv"
    runner.write_csv([row(warm_us=9.0, cudnn="9.19.0", devices=2)], path)
    cut = [",".join(line.split(",")[:13]) for line in path.read_text().splitlines()]
    path.write_text("\n".join(cut))
    assert runner.read_csv(path) == [row()]


@pytest.mark.parametrize("text", ["inf", "1e999", "-1.0", "nan"])
def test_a_rate_that_is_no_number_is_refused_with_its_line(text: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    runner.write_csv([row(), row(tflops=123.25)], path)
    path.write_text(path.read_text().replace("123.25", text))
    with pytest.raises(ValueError, match=f"line 3: tflops={text} must be a finite number, 0 or more: run the benchmark again"):
        runner.read_csv(path)


@pytest.mark.parametrize("further", ["colour", "warm_us,warm_us"])
def test_a_further_column_that_is_not_known_is_refused(further: str, tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text(",".join([*runner.COLUMNS[:13], further]) + "\n")
    with pytest.raises(ValueError, match="run the benchmark again"):
        runner.read_csv(path)


@pytest.mark.parametrize("path", sorted((ROOT / "results").glob("*.csv")), ids=lambda path: path.stem)
def test_every_committed_result_is_read_and_its_problems_are_of_their_op(path: Path) -> None:
    rows = runner.read_csv(path)
    assert rows
    for r in rows:
        labels.problem_of(SPECS[r.op.removesuffix(runner.GRAD)], r.problem)


_TEXT = st.text(st.characters(exclude_categories=["Cs"], exclude_characters="\0\r"), max_size=20)
_NUMBER = st.floats(0, allow_infinity=False)
_VALUES = {"str": _TEXT, "float": _NUMBER, "float | None": st.none() | _NUMBER, "int | None": st.none() | st.integers()}
_ABOVE_ZERO = st.floats(0, exclude_min=True, allow_infinity=False)
_ROWS = st.lists(
    st.builds(
        runner.Row,
        **{f.name: _VALUES[str(f.type)] for f in dataclasses.fields(runner.Row)}
        | dict.fromkeys(("op", "problem", "impl"), _TEXT.filter(bool))
        | {"median_us": _ABOVE_ZERO, "error": st.none() | st.floats()}
        | dict.fromkeys(("warm_us", "chain_us"), st.none() | _ABOVE_ZERO)
        | dict.fromkeys(("devices", "bytes"), st.none() | st.integers(1, 2**40)),
    ),
    max_size=4,
)


@given(_ROWS)
def test_what_is_written_is_read_back(tmp_path_factory: pytest.TempPathFactory, rows: list[runner.Row]) -> None:
    path = tmp_path_factory.mktemp("csv") / "rows.csv"
    runner.write_csv(rows, path)
    assert repr(runner.read_csv(path)) == repr(rows)  # by repr, as NaN is not NaN


def test_a_file_with_other_columns_is_refused(tmp_path: Path) -> None:
    path = tmp_path / "rows.csv"
    path.write_text("op,problem\n")
    with pytest.raises(ValueError, match=r"rows\.csv: has columns \['op', 'problem'\]"):
        runner.read_csv(path)


@pytest.mark.parametrize("damage", [("10.0", "fast"), ("10.0", ""), (",2025-01-31", "")])
def test_a_damaged_line_is_named(tmp_path: Path, damage: tuple[str, str]) -> None:
    path = tmp_path / "rows.csv"
    runner.write_csv([row()], path)
    path.write_text(path.read_text().replace(*damage))
    with pytest.raises(ValueError, match=r"rows\.csv, line 2: "):
        runner.read_csv(path)


# --- What the rows say ----------------------------------------------------------------------------


def test_merging_keeps_the_rows_of_one_run_together() -> None:
    first = [row(), row("xla", 9.0), row("mgpu_ops", 5.0, problem="q")]
    second = [row(us=20.0), row("jax-pallas", 30.0), row("mgpu_ops", 1.0, gpu="NVIDIA H100")]
    merged = runner.merge(first, second)
    assert merged == [second[0], second[1], first[2], second[2]]


def test_the_summary_is_the_geometric_mean_of_their_time_over_ours() -> None:
    rows = [
        *(row(problem="p"), row("xla", 20.0, problem="p"), row("roofline", 5.0, problem="p")),
        *(row(problem="q"), row("xla", 5.0, problem="q"), row("jax-pallas", 11.0, problem="q")),
        *(row(problem="r"), row("xla", 10.0, problem="r")),
        row("xla", 1.0, problem="ours failed"),
    ]
    xla, pallas, best = runner.summary(rows)
    assert (xla.peer, xla.problems, xla.wins, xla.wrong) == ("xla", 3, 2, 0)
    assert xla.geomean == pytest.approx(1.0)
    assert (xla.worst, xla.worst_problem) == (0.5, "q")
    assert (pallas.peer, pallas.problems, pallas.geomean) == ("jax-pallas", 1, pytest.approx(1.1))
    assert (best.peer, best.problems, best.geomean) == ("best peer", 3, pytest.approx(xla.geomean))


@given(st.lists(st.tuples(st.floats(0.1, 1e6), st.floats(0.1, 1e6)), min_size=1))
def test_the_mean_lies_between_the_worst_and_the_best(times: list[tuple[float, float]]) -> None:
    rows = [row(impl, us, problem=str(i)) for i, pair in enumerate(times) for impl, us in zip(("mgpu_ops", "xla"), pair)]
    [found] = runner.summary(rows)
    ratios = [theirs / ours for ours, theirs in times]
    assert found.worst == min(ratios)
    assert min(ratios) * (1 - 1e-9) <= found.geomean <= max(ratios) * (1 + 1e-9)
    assert found.wins == sum(r >= 1 for r in ratios)


def test_the_best_peer_is_the_fastest_that_is_right_and_no_yardstick() -> None:
    rows = [row(), row("xla", 9.0, error=1.0), row("lax", 12.0), row("tokamax", 11.0), row("dense", 5.0, error=None)]
    [line] = runner.lines(rows)
    assert line.best == rows[3]
    assert [line.ratio(peer) for peer in ("xla", "dense", runner.BEST)] == [None, 0.5, 1.1]
    assert runner.compared([line]) == ["xla", "lax", "tokamax", runner.BEST, "dense"]
    assert runner.yardsticks([line]) == {"dense"}
    assert [(s.peer, s.problems, s.wrong) for s in runner.summary(rows)][-2:] == [(runner.BEST, 1, 0), ("dense", 1, 0)]


def test_warm_ratios_are_of_warm_times_and_the_best_peer_may_be_another() -> None:
    rows = [row(warm_us=8.0), row("xla", 12.0, warm_us=8.8), row("lax", 11.0, warm_us=9.6), row("old", 12.0)]
    [line] = runner.lines(rows)
    assert [line.ratio(peer, warm=True) for peer in ("xla", "lax", "old", runner.BEST)] == pytest.approx([1.1, 1.2, None, 1.1])
    assert line.ratio(runner.BEST) == pytest.approx(1.1)
    found = {s.peer: s for s in runner.summary(rows)}
    assert found["xla"].warm_geomean == pytest.approx(1.1)
    assert math.isnan(found["old"].warm_geomean)


def test_the_parts_of_matmul_are_from_2048_rows_on_and_those_of_attention_its_head_dims() -> None:
    problems = [("matmul", f"{m}x4096x4096 bfloat16 nn") for m in (128, 2048, 4096)]
    problems += [("flash_attention+grad", f"4096x4096x8x8x{d} bfloat16 causal") for d in (64, 128)]
    rows = [
        row(impl, us, op=op, problem=text)
        for i, (op, text) in enumerate(problems)
        for impl, us in (("mgpu_ops", 10.0), ("xla", 9.0 + i))
    ]
    found = [(s.op, s.part, s.problems, s.losses) for s in runner.split(rows)]
    assert found == [
        ("matmul", "m < 2048", 1, 1),
        ("matmul", "m >= 2048", 2, 0),
        ("flash_attention+grad", "head dim 64", 1, 0),
        ("flash_attention+grad", "head dim 128", 1, 0),
    ]
    assert runner.split(rows[:2]) == runner.split([row(), row("xla")]) == []


def test_one_peer_and_a_yardstick_have_no_best() -> None:
    assert runner.compared(runner.lines([row(), row("lax"), row("dense", error=None)])) == ["lax", "dense"]


@pytest.mark.parametrize("grad", [False, True])
@pytest.mark.parametrize("spec", [SPEC, GROUPED, ATTENTION, BACKWARD, SPECS["all_gather"]], ids=lambda spec: spec.name)
def test_what_is_marked_as_wrong_is_what_failures_tells(spec: Any, grad: bool) -> None:
    """Each op by its own tolerance: 0.1 is right for gradients of attention, and wrong for any other."""
    name, problem = next(iter(spec.shapes.items()))
    text = labels.label(spec, name, problem)
    for error in (1e-4, 5e-3, 0.02, 0.1, 0.2, math.nan):
        ours = row(op=spec.name + runner.GRAD * grad, problem=text, error=error, date="2026-11-22")
        assert runner.wrong(ours) == bool(runner.failures([ours], spec, {name: problem}, grad=grad))


def test_a_result_of_an_unknown_problem_is_held_to_the_loosest_tolerance_there_is() -> None:
    assert [runner.wrong(row(problem="unheard-of", error=error)) for error in (8e-3, 0.02)] == [False, True]
    assert [runner.wrong(row(op="sort", error=error)) for error in (0.15, 0.16)] == [False, True]
    assert not runner.wrong(row(error=None))


def test_each_way_of_ours_has_a_line_beside_the_same_peers() -> None:
    rows = [row("mgpu_ops", 10.0), row("mgpu_ops, workspace", 5.0), row("xla", 20.0)]
    assert [(line.problem, line.ratio("xla")) for line in runner.lines(rows)] == [("p", 2.0), ("p (workspace)", 4.0)]
    [found] = runner.summary(rows)
    assert (found.problems, found.peer, found.worst_problem) == (2, "xla", "p")


def test_a_wrong_peer_is_no_win() -> None:
    [found] = runner.summary([row(), row("xla", 100.0, error=math.nan)])
    assert (found.problems, found.wins, found.wrong) == (0, 0, 1)
    assert math.isnan(found.geomean)


def test_an_error_is_held_to_the_limit_of_the_day_it_was_measured():
    """Attention's error was once taken over the rms of a whole gradient, where it is larger."""
    text = "mha64-4096 4096x4096x32x32x64 bfloat16 batch=4"
    then = row("cudnn", op="flash_attention+grad", problem=text, error=0.2, date="2026-11-21")
    assert not runner.wrong(then)
    assert runner.wrong(dataclasses.replace(then, date="2026-11-22"))
    assert runner.wrong(dataclasses.replace(then, error=0.5))
    assert runner.wrong(dataclasses.replace(then, error=float("nan")))


def test_no_committed_result_is_marked_as_wrong():
    files = sorted(Path("results").glob("*.csv"))
    assert files
    assert [(file.name, row.problem, row.impl) for file in files for row in runner.read_csv(file) if runner.wrong(row)] == []
