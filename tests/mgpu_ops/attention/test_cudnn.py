"""Calls that run cuDNN where it is the faster: the same custom calls as JAX's own function makes. No GPU is needed."""

from __future__ import annotations

import dataclasses
import functools
import re
import sys
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax._src.cudnn import fused_attention_stablehlo
from jax.sharding import PartitionSpec

from mgpu_ops import FlashAttentionProblem, flash_attention, spec_of
from mgpu_ops.attention import cudnn
from mgpu_ops.attention.problem import BackwardProblem
from mgpu_ops.core import gpu, jax_names
from mgpu_ops.registry import dispatch, resolution, winner
from mgpu_ops.registry.spec import baseline_of

Q, K = (jax.ShapeDtypeStruct((2, 256, heads, 64), jnp.bfloat16) for heads in (8, 4))


@pytest.fixture
def cudnn_here(monkeypatch: pytest.MonkeyPatch) -> None:
    """As on a machine with a Hopper GPU and cuDNN 9.19, for tracing and lowering."""
    monkeypatch.setattr(fused_attention_stablehlo, "check_cudnn_version", lambda: 91900)
    monkeypatch.setattr(fused_attention_stablehlo, "check_compute_capability", lambda _: True)
    monkeypatch.setattr(jax_names, "why_no_cudnn", lambda: None)


def forward_and_backward(function: Callable[..., jax.Array]) -> list[str]:
    """The custom calls of a function of q, k and v and of its gradient, as lowered for a GPU: name, options, types."""

    def both(q: Any, k: Any, v: Any, g: Any) -> Any:
        out, pull = jax.vjp(function, q, k, v)
        return out, *pull(g)

    with gpu.target("h200"):
        return custom_calls(jax.jit(both).trace(Q, K, K, Q).lower(lowering_platforms=("cuda",)).as_text())


def custom_calls(text: str) -> list[tuple[str, str]]:
    return re.findall(r"custom_call @(\S+?)\(.*?\) (\{.*\})", text)


XLA_ALWAYS = {"flash_attention": "xla", "flash_attention_backward": "xla"}


@pytest.mark.usefixtures("cudnn_here")
@pytest.mark.parametrize(
    ("ours", "theirs"),
    [
        ({}, {}),
        ({"causal": True}, {"is_causal": True}),
        ({"causal": True, "window": (99, None)}, {"is_causal": True, "local_window_size": (99, 0)}),
        ({"scale": 0.3}, {"scale": 0.3}),
    ],
    ids=["full", "causal", "window", "scale"],
)
def test_where_cudnn_wins_the_forward_and_the_backward_pass_are_jaxs_own_calls_of_it(ours: Any, theirs: Any) -> None:
    with resolution.use_configs(XLA_ALWAYS):
        found = forward_and_backward(lambda q, k, v: flash_attention(q, k, v, **ours))
        jaxs = forward_and_backward(lambda q, k, v: jax.nn.dot_product_attention(q, k, v, implementation="cudnn", **theirs))
    assert [name for name, _ in found] == ["__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"]
    assert found == jaxs


@pytest.mark.usefixtures("cudnn_here")
def test_under_shard_map_vmap_and_checkpoint_cudnn_is_called_for_both_passes() -> None:
    mesh = jax.make_mesh((2,), ("d",), axis_types=(jax.sharding.AxisType.Auto,), devices=jax.local_devices()[:2])
    attend = functools.partial(flash_attention, causal=True, scale=0.4)
    sharded = jax.shard_map(attend, mesh=mesh, in_specs=PartitionSpec("d"), out_specs=PartitionSpec("d"))
    mapped = lambda q, k, v: jax.vmap(attend)(q[:, None], k[:, None], v[:, None])[:, 0]  # noqa: E731
    for function in (sharded, mapped, jax.checkpoint(attend)):
        with resolution.use_configs(XLA_ALWAYS):
            calls = [name for name, _ in forward_and_backward(function)]
        assert {name for name in calls if "cudnn" in name} == {"__cudnn$fmhaSoftmax", "__cudnn$fmhaSoftmaxBackward"}


@pytest.mark.usefixtures("cudnn_here")
def test_each_of_the_two_passes_decides_for_itself(monkeypatch: pytest.MonkeyPatch) -> None:
    ran: list[str] = []

    def kernel(spec: Any) -> Any:
        def run(problem: Any, config: Any, device: Any, *arrays: Any, interpret: bool) -> Any:
            ran.append(spec.name)
            return spec.reference(problem, *arrays)

        return run

    room = sys.modules["mgpu_ops.attention.flash_attention"]
    for name in ("FORWARD", "BACKWARD"):
        spec = getattr(room, name)
        monkeypatch.setattr(room, name, dataclasses.replace(spec, run=kernel(spec)))
    attend = lambda q, k, v: flash_attention(q, k, v, scale=0.7)  # noqa: E731
    for one, other in (("flash_attention", "flash_attention_backward"), ("flash_attention_backward", "flash_attention")):
        ran.clear()
        jax.clear_caches()
        kernel_config = spec_of(other).default(spec_of(other).Problem(2, 256, 256, 8, 4, 64), gpu.find("h200"))
        with resolution.use_configs({one: "xla", other: kernel_config}):
            calls = forward_and_backward(attend)
        assert ran == [other]
        assert [name for name, _ in calls if "cudnn" in name] == ["__cudnn$fmhaSoftmax" + "Backward" * one.endswith("backward")]


PROBLEM = FlashAttentionProblem(2, 256, 256, 8, 4, 64, causal=True)


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({}, None),
        ({"window_left": 99}, None),
        ({"bias": "bfloat16"}, "rounds a bias"),
        ({"lengths": True, "align": "top_left"}, "a row sees no key"),
        ({"q_tokens": 512, "align": "top_left", "window_left": 99}, "a row sees no key"),
    ],
)
def test_cudnn_takes_the_kernels_place_only_where_it_computes_the_same(changes: dict[str, Any], reason: str | None) -> None:
    fields = vars(PROBLEM) | changes
    for spec, problem in (
        (spec_of("flash_attention"), FlashAttentionProblem(**fields)),
        (spec_of("flash_attention_backward"), BackwardProblem(**fields)),
    ):
        baseline = spec.baseline(problem)
        assert baseline.name == "cudnn"
        assert baseline.differs is None if reason is None else reason in baseline.differs


@pytest.mark.usefixtures("cudnn_here")
def test_cudnn_runs_no_call_with_sinks() -> None:
    for spec, kind in (
        (spec_of("flash_attention"), FlashAttentionProblem),
        (spec_of("flash_attention_backward"), BackwardProblem),
    ):
        assert spec.baseline(kind(**vars(PROBLEM) | {"sinks": True})) is None
    with resolution.use_configs(XLA_ALWAYS):
        calls = forward_and_backward(functools.partial(flash_attention, sinks=jnp.zeros(8)))
    assert not [name for name, _ in calls if "cudnn" in name]


@pytest.mark.parametrize("op", ["flash_attention", "flash_attention_backward"])
@pytest.mark.parametrize(
    "changes", [{"segments": True}, {"soft_cap": True}, {"sinks": True}, {"causal": False, "window_left": 64}, {"head_dim": 84}]
)
def test_cudnns_modelled_time_is_none_of_the_reference_that_xla_runs_where_cudnn_refuses(op: str, changes: Any) -> None:
    spec, h200 = spec_of(op), gpu.find("h200")
    fields = vars(FlashAttentionProblem(43, 128, 128, 9, 9, 80, causal=True)) | changes
    problem = spec.Problem(**fields)
    assert spec.baseline(problem) is None
    assert winner.expected(spec, problem, spec.default(problem, h200), h200, baseline_of(spec, problem)) is None
    assert resolution.resolve(spec, problem, h200, None).runs == "kernel"


@pytest.mark.usefixtures("cudnn_here")
def test_what_the_tuner_times_is_what_a_call_would_run() -> None:
    spec = spec_of("flash_attention")
    arrays = jax.eval_shape(functools.partial(spec.inputs, PROBLEM), jax.random.key(0))
    timed = functools.partial(spec.baseline(PROBLEM).run, PROBLEM)
    with gpu.target("h200"):
        text = jax.jit(timed).trace(*arrays).lower(lowering_platforms=("cuda",)).as_text()
    with resolution.use_configs(XLA_ALWAYS):
        called = forward_and_backward(functools.partial(flash_attention, causal=True))
    assert custom_calls(text) == called[:1]


def test_deterministic_gradients_stay_with_the_kernel() -> None:
    assert "differ from run to run" in cudnn.differs(BackwardProblem(**vars(PROBLEM), deterministic=True))
    assert cudnn.differs(BackwardProblem(**vars(PROBLEM))) is None


def test_a_gpu_without_cudnn_runs_the_kernel_and_explain_says_why(monkeypatch: pytest.MonkeyPatch) -> None:
    assert cudnn.missing() is None  # no GPU: nothing is missed
    spec = spec_of("flash_attention_backward")
    problem = spec.shapes["llama3-8b-32768-causal"]
    h200 = gpu.find("h200")
    with resolution.use_configs(XLA_ALWAYS):
        assert resolution.resolve(spec, problem, h200).runs == "xla"
    monkeypatch.setattr(jax_names, "why_no_cudnn", lambda: "cuDNN cannot be loaded")
    with gpu.target("h200"), resolution.use_configs(XLA_ALWAYS):
        assert resolution.resolve(spec, problem, h200).runs == "kernel"
        assert "cudnn cannot run instead: cuDNN cannot be loaded" in resolution.explain(spec, problem, h200)


@pytest.mark.usefixtures("cudnn_here")
def test_a_gradient_of_the_lse_is_the_kernels(monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[Any] = []
    run = dispatch.run
    monkeypatch.setattr(dispatch, "run", lambda *given, instead, **named: seen.append(instead) or run(*given, **named))

    def loss(q: Any, k: Any, v: Any) -> Any:
        out, lse = flash_attention(q, k, v, scale=0.9, return_lse=True, backend="xla")
        return out.astype(jnp.float32).sum() + lse.sum()

    jax.eval_shape(jax.grad(loss), Q, K, K)
    assert callable(seen[0])
    assert seen[-1] == "cuDNN has no gradient of the lse"
