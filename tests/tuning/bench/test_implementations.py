"""Competitors: what they take, how they are tuned, their gradients. No GPU, no kernel."""

from __future__ import annotations

import dataclasses
import itertools
import sys
import types
from collections.abc import Callable, Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import SPECS, GroupedMatmulProblem, MatmulProblem, RaggedContractionProblem
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.tuning import measure, public
from mgpu_ops.tuning.bench import implementations, runner, settings

H200 = gpus.find("h200")
GROUPED, CONTRACTION = SPECS["grouped_matmul"], SPECS["ragged_contraction"]
LARGE = GroupedMatmulProblem(16384, 3072, 4096, 8)
SMALL = GroupedMatmulProblem(24, 16, 8, 3, spread="skewed")


def equal(functions: Sequence[Callable[[], Any]], gpu: Gpu, rounds: int) -> list[list[float]]:
    return [[1.0] * rounds for _ in functions]


def context(problem: Any = SMALL, timer: settings.Timer = equal, **changes: Any) -> settings.TuningContext:
    spec = GROUPED if isinstance(problem, GroupedMatmulProblem) else CONTRACTION
    return settings.TuningContext(problem, H200, spec.inputs(problem, jax.random.key(0)), timer, **changes)


# --- the settings of JAX's own kernels


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
    found = implementations.COMPETITORS["matmul"]["jax-pallas"].unavailable(problem, gpus.find(gpu))
    assert found is None if reason is None else reason in str(found)


def test_a_missing_package_is_named(monkeypatch: pytest.MonkeyPatch) -> None:
    import sys

    monkeypatch.setitem(sys.modules, "jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", None)
    monkeypatch.delattr("jax.experimental.pallas.ops.gpu.hopper_matmul_mgpu", raising=False)
    reason = implementations.COMPETITORS["matmul"]["jax-pallas"].unavailable(MatmulProblem(256, 256, 256), H200)
    assert "pip install absl-py" in str(reason)


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


@pytest.mark.parametrize("n", [1536, 2048, 3072, 4096, 7168, 14336, 28672])
def test_the_settings_of_jaxs_grouped_matmul_are_those_of_its_own_loop_and_few_in_the_first_pass(n: int) -> None:
    settings = list(implementations.jax_grouped_settings(dataclasses.replace(LARGE, n=n)))
    for s in settings:
        assert n % (s["block_n"] * s["grid_block_n"]) == 0
        assert s["block_m"] * s["block_n"] < 192 * 192
        assert s["block_k"] == 64
    first = {tuple(v for k, v in s.items() if k != "grid_block_n") for s in settings}
    assert 20 <= len(first) <= 32  # and the last pass has at most four other rasters for each of two


def test_the_settings_of_jaxs_contraction_divide_its_output() -> None:
    settings = list(implementations.jax_contraction_settings(RaggedContractionProblem(4096, 192, 64, 8)))
    assert {(s["block_m"], s["block_n"]) for s in settings} == {(64, 64)}
    wide = list(implementations.jax_contraction_settings(RaggedContractionProblem(4096, 2048, 4096, 8)))
    assert (
        len({tuple(v for k, v in s.items() if k != "grid_block_n") for s in wide}) == 25
    )  # of 32 those that fit shared memory
    assert min(s["max_concurrent_steps"] for s in wide) == 2


def test_jaxs_kernels_are_called_with_each_setting_and_the_layout(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.gpu import ragged_dot_mgpu

    problem = GroupedMatmulProblem(64, 64, 64, 4, layout="nt", spread="even")
    calls: list[dict[str, Any]] = []

    def ragged_dot(lhs: jax.Array, rhs: jax.Array, **options: Any) -> jax.Array:
        calls.append(options)
        return lhs @ rhs[0].T

    monkeypatch.setattr(ragged_dot_mgpu, "ragged_dot", ragged_dot)
    function, text = implementations.COMPETITORS["grouped_matmul"]["jax-pallas"].prepare(context(problem))
    function(*context(problem).arrays)
    assert all(options["transpose_rhs"] for options in calls)
    assert {frozenset(options) for options in calls} == {frozenset([*next(implementations.jax_grouped_settings(problem)),
                                                                    "group_sizes", "transpose_rhs"])}  # fmt: skip
    settings = [{k: options[k] for k in next(implementations.jax_grouped_settings(problem))} for options in calls]
    assert all(s in list(implementations.jax_grouped_settings(problem)) for s in settings)
    assert text.startswith("block_m=")


# --- tokamax, which is not installed here


@dataclasses.dataclass(frozen=True)
class Config:
    block_m: int
    block_n: int
    block_k: int
    num_stages: int
    persistent: bool
    grid_minor_dim: int
    grid_tile_width: int


class Op:
    def __init__(self, config: Config | None = None):
        self.config = config

    def replace(self, config: Config, vjp: Any = None) -> Op:
        return Op(config)


@pytest.fixture
def tokamax(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for tokamax: computes through XLA; returns the implementations it was asked for."""
    asked: list[Any] = []

    def ragged_dot_general(
        lhs: Any, rhs: Any, sizes: Any, dims: Any, *, preferred_element_type: Any, implementation: Any
    ) -> Any:
        asked.append(implementation if isinstance(implementation, str) else implementation[0].config)
        return jax.lax.ragged_dot_general(lhs, rhs, sizes, dims, preferred_element_type=jnp.dtype(preferred_element_type))

    def get_bound_args(function: Callable[..., Any], *arrays: Any) -> list[Any]:
        function.lower(*arrays)  # type: ignore[attr-defined]
        configs = {
            Config(block_m, 64, block_k, 2, persistent, minor, grid_tile_width=1)
            for block_m in (16, 64, 128)
            for block_k in (128, 512)
            for persistent in (True, False)
            for minor in (0, 1)
        }
        own = Config(64, 64, 128, 2, True, 0, grid_tile_width=1)
        return [types.SimpleNamespace(op=Op(), autotuning_configs=configs, heuristics_config=own)]

    module = types.ModuleType("tokamax")
    module.ragged_dot_general = ragged_dot_general  # type: ignore[attr-defined]
    module.autotuning = types.SimpleNamespace(get_bound_args=get_bound_args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return asked


def test_tokamax_is_tuned_over_its_own_and_wider_configs_but_those_that_cannot_compile(tokamax: list[Any]) -> None:
    function, text = implementations.COMPETITORS["grouped_matmul"]["tokamax"].prepare(context())
    assert tokamax[0] == "mosaic"
    configs = tokamax[1:]
    assert {c.block_m for c in configs} == {64, 128}
    assert {c.block_n for c in configs} == {64, 128}
    assert {c.block_k for c in configs} == {64, 128}
    assert Config(64, 64, 128, 2, True, 0, grid_tile_width=1) in configs
    assert text.endswith(f"fastest of {len(set(configs))}")
    out = function(*context().arrays)
    assert measure.error(out, GROUPED.reference(SMALL, *context().arrays)) <= 8e-3


def test_tokamaxs_contraction_is_not_tuned_over_what_it_does_not_read(tokamax: list[Any]) -> None:
    problem = RaggedContractionProblem(24, 16, 8, 3, spread="skewed")
    function, _ = implementations.COMPETITORS["ragged_contraction"]["tokamax"].prepare(context(problem))
    assert {(c.persistent, c.grid_minor_dim, c.grid_tile_width) for c in tokamax[1:]} == {(False, 0, 1)}
    out = function(*context(problem).arrays)
    assert measure.error(out, CONTRACTION.reference(problem, *context(problem).arrays)) <= 8e-3


@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_a_kernel_without_a_gradient_gets_one_of_its_own_tuned_products(layout: str, tokamax: list[Any]) -> None:
    problem = dataclasses.replace(SMALL, layout=layout)
    asked = context(problem, grad=True)
    function, text = implementations.COMPETITORS["grouped_matmul"]["tokamax"].prepare(asked)
    assert text.count("block_m=") == 3
    assert text.count(" | ") == 2
    cotangent = jax.random.normal(jax.random.key(2), (problem.m, problem.n), problem.dtype)
    ours = public.CALLS["grouped_matmul"](problem, "xla")
    theirs, right = (jax.jit(runner._with_gradient(f))(*asked.arrays, cotangent) for f in (function, ours))
    assert [measure.error(x, y) <= 8e-3 for x, y in zip(theirs, right, strict=True)] == [True] * 3


def test_a_missing_tokamax_is_named_with_what_to_do(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "tokamax", None)
    for op, problem in (("grouped_matmul", LARGE), ("ragged_contraction", RaggedContractionProblem(64, 64, 64, 2))):
        assert "pip install tokamax" in str(implementations.COMPETITORS[op]["tokamax"].unavailable(problem, H200))


# --- what they cannot do


@pytest.mark.parametrize(
    ("competitor", "changes", "gpu", "reason"),
    [
        ("jax-pallas", {}, "h200", None),
        ("jax-pallas", {"layout": "nt"}, "h200", None),
        ("jax-pallas", {"n": 4000}, "h200", "n=4000"),
        ("jax-pallas", {"k": 4000}, "h200", "k=4000"),
        ("jax-pallas", {"out_dtype": "float32"}, "h200", "bfloat16 to float32"),
        ("jax-pallas", {"bias": True}, "h200", "no bias"),
        ("jax-pallas", {"activation": "silu"}, "h200", "no activation"),
        ("jax-pallas", {}, "b200", "NVIDIA B200"),
        ("tokamax", {"dtype": "float32"}, "h200", "not float32"),
        ("tokamax", {"bias": True}, "h200", "no bias"),
        ("tokamax", {}, "b200", "NVIDIA B200"),
        ("lax", {}, "h200", None),
        ("lax", {"bias": True}, "h200", "no bias"),
        ("lax", {"m": 131072, "groups": 128}, "h200", "GB of [groups, m, k] and [groups, m, n], and takes 128 times"),
        ("dense", {"bias": True, "m": 131072, "groups": 128}, "b200", None),
    ],
)
def test_a_competitor_says_what_it_cannot_do(competitor: str, changes: dict[str, Any], gpu: str, reason: str | None) -> None:
    found = implementations.COMPETITORS["grouped_matmul"][competitor].unavailable(
        dataclasses.replace(LARGE, **changes), gpus.find(gpu)
    )
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("op", ["grouped_matmul", "ragged_contraction"])
def test_yardsticks_are_the_dense_product_and_ours_of_16_bits(op: str) -> None:
    assert [name for name, competitor in implementations.COMPETITORS[op].items() if competitor.yardstick] == ["dense"]
    assert [name for name, competitor in implementations.COMPETITORS["matmul"].items() if competitor.yardstick] == ["bf16"]


@pytest.mark.parametrize(
    "changes",
    [
        {"scales": "tensor"},
        {"scales": "block"},
        {"scales": "row", "b_dtype": "float8_e5m2", "bias": True, "residual": True, "batch": 2},
        {"dtype": "int8", "layout": "nn"},
    ],
)
def test_a_product_of_8_bits_is_compared_with_ours_of_its_numbers_in_bfloat16(changes: dict[str, Any]) -> None:
    fields: dict[str, Any] = {"dtype": "float8_e4m3fn", "layout": "nt"} | changes
    problem = MatmulProblem(64, 160, 256, **fields)
    arrays, bf16 = SPECS["matmul"].inputs(problem, jax.random.key(0)), implementations.COMPETITORS["matmul"]["bf16"]
    assert bf16.unavailable(problem, H200) is None
    assert bf16.arrays is not None
    wide = bf16.arrays(problem, *arrays)
    assert {x.dtype.name for x in wide[:2]} == {"bfloat16"}
    assert wide[1].shape[-2:] == (256, 160)
    function, _ = bf16.prepare(settings.TuningContext(problem, H200, wide, equal))
    error = measure.error((function(*wide),), (SPECS["matmul"].reference(problem, *arrays),))
    assert error <= SPECS["matmul"].tolerance(problem)


def test_bf16_says_which_products_it_is_not_for() -> None:
    bf16 = implementations.COMPETITORS["matmul"]["bf16"]
    assert "not bfloat16" in str(bf16.unavailable(MatmulProblem(64, 64, 64), H200))
    assert "int8 to int32" in str(bf16.unavailable(MatmulProblem(64, 64, 64, "int8", "int32"), H200))


# --- attention

ATTENTION = SPECS["flash_attention"]
CAUSAL = ATTENTION.Problem(4, 4096, 4096, 16, 4, 128, causal=True)
TINY = ATTENTION.Problem(1, 16, 16, 4, 2, 8, causal=True, window_left=3)


@pytest.mark.parametrize("changes", [{"sinks": True}, {"page_size": 4}])
def test_the_public_function_is_given_the_sinks_and_pages_of_a_problem(changes: dict[str, Any]) -> None:
    problem = dataclasses.replace(TINY, dtype="float32", **changes)
    arrays = ATTENTION.inputs(problem, jax.random.key(0))
    out = public.CALLS["flash_attention"](problem, "xla")(*public.arrays_of(ATTENTION, arrays))
    np.testing.assert_allclose(out, ATTENTION.reference(problem, *arrays)[0], rtol=1e-4, atol=1e-5)


def attention_context(problem: Any, **changes: Any) -> settings.TuningContext:
    arrays = public.arrays_of(ATTENTION, ATTENTION.inputs(problem, jax.random.key(0)))
    return settings.TuningContext(problem, H200, arrays, equal, **changes)


@pytest.mark.parametrize(
    ("competitor", "changes", "reason"),
    [
        ("cudnn", {}, None),
        ("cudnn", {"window_left": 100}, None),
        ("cudnn", {"causal": False, "window_right": 0, "window_left": 100}, None),
        ("cudnn", {"causal": False, "kv_tokens": 512, "lengths": True}, None),
        ("cudnn", {"kv_tokens": 512, "align": "top_left"}, None),
        ("cudnn", {"bias": "float32"}, None),
        ("cudnn", {"kv_tokens": 512}, "aligns the first query with the first key"),
        ("cudnn", {"lengths": True}, "aligns the first query with the first key"),
        ("cudnn", {"causal": False, "window_left": 100}, "no window without a causal mask"),
        ("cudnn", {"causal": False, "window_right": 5}, "window_right=5"),
        ("cudnn", {"segments": True}, "no segment ids"),
        ("cudnn", {"soft_cap": True}, "no soft cap"),
        ("cudnn", {"sinks": True}, "takes no sinks"),
        ("cudnn", {"causal": False, "page_size": 16, "lengths": True}, None),
        ("cudnn", {"page_size": 16}, "without causal mask, window or bias"),
        ("cudnn", {"causal": False, "page_size": 16, "soft_cap": True}, "no soft cap"),
        ("tokamax", {"page_size": 16}, "takes no pages"),
        ("cudnn", {"dtype": "float32"}, "not float32"),
        ("cudnn", {"head_dim": 100}, "not 100"),
        ("jax-pallas", {}, None),
        ("jax-pallas", {"causal": False, "kv_tokens": 512}, None),
        ("jax-pallas", {"kv_tokens": 512, "align": "top_left"}, "as many queries as keys"),
        ("jax-pallas", {"window_left": 100}, "no window"),
        ("jax-pallas", {"bias": "bfloat16"}, "adds no bias"),
        ("jax-pallas", {"soft_cap": True}, "caps no scores"),
        ("jax-pallas", {"head_dim": 80}, "multiples of 64, not 80"),
        ("jax-pallas", {"causal": False, "kv_tokens": 4000}, "has no tile that divides q_tokens=4096 and kv_tokens=4000"),
        ("jax-pallas", {"segments": True}, "only as a mask"),
        ("tokamax", {"sinks": True}, "takes no sinks"),
        ("tokamax", {"lengths": True}, "only as a mask"),
        ("tokamax", {"kv_tokens": 512}, "aligns the first query with the first key"),
        ("tokamax", {"soft_cap": True, "bias": "bfloat16"}, "caps scores after the bias"),
        ("tokamax", {"dtype": "float32"}, "not float32"),
    ],
)
def test_a_competitor_of_attention_says_what_it_cannot_do(competitor: str, changes: dict[str, Any], reason: str | None) -> None:
    found = implementations.COMPETITORS["flash_attention"][competitor].unavailable(dataclasses.replace(CAUSAL, **changes), H200)
    assert found is None if reason is None else reason in str(found)


@pytest.mark.parametrize("head_dim", [64, 128, 256])
def test_the_settings_of_jaxs_attention_divide_the_problem_and_fit(head_dim: int) -> None:
    problem = dataclasses.replace(CAUSAL, head_dim=head_dim, q_tokens=1152, kv_tokens=1152)
    settings = list(implementations.jax_attention_settings(problem))
    assert {s["block_kv"] for s in settings} <= {64, 128}
    assert {s["block_q"] for s in settings} <= {64}
    assert (head_dim == 256) == (max(s["max_concurrent_steps"] for s in settings) == 2)


def test_jaxs_attention_gets_scaled_queries_in_the_only_dtype_it_has(monkeypatch: pytest.MonkeyPatch) -> None:
    from jax.experimental.pallas.ops.gpu import attention_mgpu

    configs: list[Any] = []

    def theirs(q: jax.Array, k: jax.Array, v: jax.Array, config: Any) -> jax.Array:
        configs.append(config)
        assert {x.dtype.name for x in (q, k, v)} == {"float16"}
        return jax.nn.dot_product_attention(*(x.astype("float32") for x in (q, k, v)), scale=1.0, is_causal=config.causal)

    monkeypatch.setattr(attention_mgpu, "attention", theirs)
    problem = ATTENTION.Problem(1, 128, 128, 2, 1, 64, causal=True)
    competitor, given = implementations.COMPETITORS["flash_attention"]["jax-pallas"], attention_context(problem)
    assert competitor.arrays is not None
    arrays = competitor.arrays(problem, *given.arrays)
    function, text = competitor.prepare(dataclasses.replace(given, arrays=arrays))
    assert text.startswith("float16 block_q=64 block_kv=")
    assert {config.causal for config in configs} == {True}
    right, _ = ATTENTION.reference(problem, *ATTENTION.inputs(problem, jax.random.key(0)))
    assert measure.error(function(*arrays), right) <= 0.03


@dataclasses.dataclass(frozen=True)
class Blocks:
    block_q: int
    num_stages: int = 2


@dataclasses.dataclass(frozen=True)
class BackwardBlocks:
    block_q_dq: int
    num_stages: int = 2


class Forward:
    def __init__(self, config: Blocks | None = None, vjp: Any = None):
        self.config, self.vjp = config, vjp

    def replace(self, **changes: Any) -> Forward:
        return Forward(**{"config": self.config, "vjp": self.vjp} | changes)


class Backward:
    def __init__(self, config: BackwardBlocks | None = None):
        self.config = config

    def replace(self, config: BackwardBlocks) -> Backward:
        return Backward(config)


@pytest.fixture
def tokamax_attention(monkeypatch: pytest.MonkeyPatch) -> list[Any]:
    """Stands in for tokamax, through XLA; returns the (forward, backward) configs it was called with."""
    asked: list[Any] = []

    def dot_product_attention(
        q: Any, k: Any, v: Any, bias: Any = None, *, implementation: Any, logits_soft_cap: Any, **rest: Any
    ) -> Any:
        assert logits_soft_cap is None
        if implementation != "mosaic":
            (op,) = implementation
            asked.append((op.config, op.vjp and op.vjp.config))
        return jax.nn.dot_product_attention(q, k, v, bias, **rest)

    def get_bound_args(function: Callable[..., Any], *arrays: Any) -> list[Any]:
        outs = jax.tree.leaves(jax.eval_shape(function, *arrays))
        forward = types.SimpleNamespace(
            op=Forward(), autotuning_configs={Blocks(64), Blocks(128)}, heuristics_config=Blocks(64)
        )
        settings = {BackwardBlocks(64), BackwardBlocks(128)}
        backward = types.SimpleNamespace(op=Backward(), autotuning_configs=settings, heuristics_config=BackwardBlocks(128))
        return [forward] if len(outs) == 1 else [forward, backward]

    module = types.ModuleType("tokamax")
    module.dot_product_attention = dot_product_attention  # type: ignore[attr-defined]
    module.autotuning = types.SimpleNamespace(get_bound_args=get_bound_args)  # type: ignore[attr-defined]
    monkeypatch.setitem(sys.modules, "tokamax", module)
    return asked


def test_tokamaxs_attention_is_tuned_and_sees_what_ours_sees(tokamax_attention: list[Any]) -> None:
    given = attention_context(TINY)
    function, text = implementations.COMPETITORS["flash_attention"]["tokamax"].prepare(given)
    assert {config for config, _ in tokamax_attention} == {Blocks(64), Blocks(128)}
    assert text.startswith("block_q=")
    right, _ = ATTENTION.reference(TINY, *ATTENTION.inputs(TINY, jax.random.key(0)))
    assert measure.error(function(*given.arrays), right) <= 0.03


def test_the_gradient_of_tokamaxs_attention_is_tuned_after_with_the_forward_pass_as_found(tokamax_attention: list[Any]) -> None:
    _, text = implementations.COMPETITORS["flash_attention"]["tokamax"].prepare(attention_context(TINY, grad=True))
    forward, backward = text.split(" | ")
    assert (forward.split("=")[0], backward.split("=")[0]) == ("block_q", "block_q_dq")
    best = Blocks(int(forward.split()[0].removeprefix("block_q=")))
    assert {pair for pair in tokamax_attention if pair[1]} == {(best, BackwardBlocks(64)), (best, BackwardBlocks(128))}


@pytest.mark.parametrize(("left", "right", "window"), [(3, -1, (3, 16)), (-1, 2, (16, 2)), (3, 2, (3, 2)), (3, 0, (3, 0))])
def test_tokamax_is_told_of_a_side_without_bound_by_all_tokens(left: int, right: int, window: tuple[int, int]) -> None:
    problem = dataclasses.replace(TINY, causal=False, window_left=left, window_right=right)
    assert implementations._tokamax_window(problem) == window
