"""What the dispatcher, the tuner and the benchmarks take for granted of every op in `SPECS`."""

from __future__ import annotations

import contextlib
import dataclasses
import functools
import json
import math
import random
from pathlib import Path
from typing import Any, get_type_hints

import jax
import pytest
from hypothesis import given
from hypothesis import strategies as st

import mgpu_ops
from mgpu_ops import SPECS, MatmulProblem, api
from mgpu_ops.core import gpu
from mgpu_ops.registry import resolution
from mgpu_ops.registry.spec import OpSpec
from tests.thorough import only_in_all

GPUS = [gpu.find(key) for key in ("h200", "h100-sxm", "h100-pcie", "h20")]
H200 = GPUS[0]
CASES = [(spec, name) for spec in SPECS.values() for name in spec.shapes]

every_spec = pytest.mark.parametrize("spec", SPECS.values(), ids=lambda spec: spec.name)
IDS = [f"{spec.name}-{name}" for spec, name in CASES]
every_shape = pytest.mark.parametrize(("spec", "shape"), CASES, ids=IDS)
every_eighth_shape = pytest.mark.parametrize(
    ("spec", "shape"), [pytest.param(*case, marks=only_in_all) if i % 8 else case for i, case in enumerate(CASES)], ids=IDS
)


def field_names(cls: type) -> list[str]:
    return [field.name for field in dataclasses.fields(cls)]


# --- the types


@every_spec
def test_problem_and_config_are_frozen_and_hold_what_json_holds(spec):
    for cls in (spec.Problem, spec.Config):
        assert dataclasses.is_dataclass(cls)
        assert cls.__dataclass_params__.frozen
        assert set(get_type_hints(cls).values()) <= {int, str, bool}


ADDED_LATER = {
    "flash_attention": {"kv_splits": 0, "kv_cluster": 1, "turns": "none", "rescale": "always", "kv_heads_per_tile": 1},
    "flash_attention_backward": {
        "dq_step": "same",
        "q_order": "together",
        "dk_operand": "memory",
        "group_splits": 1,
        "kv_slots": 1,
    },
    **{key: {"schedule": "cooperative"} for key in ("matmul", "gated_matmul")},
    **{key: {"exchange": "weights"} for key in ("quantized_matmul", "quantized_grouped_matmul")},
    **{
        key: {"schedule": "static", "short_tiles": False}
        for key in ("grouped_matmul", "gated_grouped_matmul", "ragged_contraction")
    },
}


@every_spec
def test_config_has_no_defaults(spec):
    """A stored entry that lacks a field is an error, not a guess: but for one that came later, and says what was then."""
    fields = dataclasses.fields(spec.Config)
    assert {f.name: f.default for f in fields if f.default is not dataclasses.MISSING} == ADDED_LATER.get(spec.name, {})


@every_spec
def test_spec_is_listed_under_its_name_with_a_version(spec):
    assert isinstance(spec, OpSpec)
    assert mgpu_ops.spec_of(spec.name) is spec
    assert spec.version >= 1


@every_spec
def test_suites_name_shapes_that_exist_each_once(spec):
    assert spec.shapes
    assert spec.suites
    for names in spec.suites.values():
        assert names
        assert len(set(names)) == len(names)
        assert set(names) <= spec.shapes.keys()


# --- every named problem on every GPU


@every_eighth_shape
def test_default_runs_and_has_a_modelled_time_on_every_gpu(spec, shape):
    problem = spec.shapes[shape]
    for device in GPUS:
        assert spec.supports(problem, device) is None, device
        config = spec.default(problem, device)
        assert isinstance(config, spec.Config)
        assert spec.check(problem, config, device) is None, device
        assert spec.default(problem, device) == config
        time = spec.cost(problem, config, device)
        assert 0 < time < math.inf
        # No model may promise more than the datasheet does.
        assert time > spec.flops(problem) / device.bf16_flops, device
        assert time > spec.bytes(problem) / device.memory_bytes_per_s, device


@every_shape
def test_space_has_ordered_choices_for_each_field_of_config(spec, shape):
    problem = spec.shapes[shape]
    space = spec.space(problem, H200)
    assert list(space) == field_names(spec.Config)
    kinds = get_type_hints(spec.Config)
    for field, choices in space.items():
        assert len(set(choices)) == len(choices) > 0
        assert {type(choice) for choice in choices} == {kinds[field]}
        if kinds[field] is int:
            assert list(choices) == sorted(choices)


@every_eighth_shape
def test_space_contains_the_default_on_every_gpu(spec, shape):
    """So that the tuner can start from it and never ends below it."""
    problem = spec.shapes[shape]
    for device in GPUS:
        config = dataclasses.asdict(spec.default(problem, device))
        space = spec.space(problem, device)
        assert {f: v for f, v in config.items() if v not in space[f]} == {}, device


@every_eighth_shape
def test_inputs_fit_the_reference_and_the_kernel(spec, shape):
    problem = spec.shapes[shape]
    inputs = functools.partial(spec.inputs, problem)
    arrays = jax.eval_shape(inputs, jax.random.key(0))
    wanted = jax.eval_shape(functools.partial(spec.reference, problem), *arrays)
    run = functools.partial(spec.run, problem, spec.default(problem, H200), H200)
    out = jax.eval_shape(run, *arrays)
    assert [(x.shape, x.dtype) for x in jax.tree.leaves(out)] == [(x.shape, x.dtype) for x in jax.tree.leaves(wanted)]
    devices = getattr(problem, "devices", 1)  # arrays are those of all devices
    size = sum(x.size * x.dtype.itemsize for x in jax.tree.leaves((arrays, wanted))) / devices
    windowed = getattr(problem, "window_left", -1) >= 0
    assert (0 if windowed else size / 3) < spec.bytes(problem) <= size  # matrices of empty groups, unseen keys are not read
    assert (spec.flops(problem) > 0) == (spec.name != "all_gather")


@every_spec
def test_inputs_are_the_same_for_the_same_key(spec):
    problem = min(spec.shapes.values(), key=spec.bytes)
    sizes = {field: min(value, 64) for field, value in vars(problem).items() if type(value) is int}
    problem = dataclasses.replace(problem, **sizes)
    inputs = jax.jit(functools.partial(spec.inputs, problem))
    first, second, other = (inputs(jax.random.key(seed)) for seed in (0, 0, 1))
    same = lambda x, y: all((p == q).all() for p, q in zip(x, y))  # noqa: E731
    assert same(first, second)
    assert not same(first, other)


@every_spec
def test_distance_is_zero_to_itself_and_the_same_both_ways(spec):
    problems = list(spec.shapes.values())
    for x in problems:
        assert spec.distance(x, x) == 0
        for y in problems:
            there, back = spec.distance(x, y), spec.distance(y, x)
            assert (there is None) == (back is None)
            if there is not None:
                assert there == pytest.approx(back)
                assert there > 0 or x == y


# Attention rounds its weights too, and its gradients are differences of rounded terms. A ring of eight GPUs rounds seven times.
LARGEST_TOLERANCE = {"flash_attention": 0.03, "flash_attention_backward": 0.15}
LARGEST_TOLERANCE |= {"gated_matmul": 0.015}  # of its reference, which rounds gate and up
LARGEST_TOLERANCE |= {"quantize": 0.26}  # of gates, whose reference may round to the next number of 8 bits
LARGEST_TOLERANCE |= {
    "quantized_matmul": 0.015,
    "quantized_grouped_matmul": 0.015,
}  # of its reference, which rounds scaled weights
LARGEST_TOLERANCE |= dict.fromkeys(("all_reduce", "reduce_scatter", "all_gather"), 0.04)


@every_spec
def test_tolerance_is_a_small_positive_number(spec):
    largest = LARGEST_TOLERANCE.get(spec.name, 0.01)
    assert all(0 < spec.tolerance(problem) <= largest for problem in spec.shapes.values())


@pytest.mark.parametrize("op", ["matmul", "gated_matmul"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
def test_normalised_rows_are_rounded_by_the_reference_whatever_the_output_is(op, dtype):
    spec = SPECS[op]
    found = [spec.tolerance(spec.Problem(64, 64, 64, dtype, out, normalised=True)) for out in (dtype, "float32")]
    assert found[0] == found[1] > 1e-3


# --- check


@every_spec
@pytest.mark.parametrize("broken", [-1, 0, 3, 10_007, "sideways"])
def test_check_rejects_every_field_that_is_broken_alone(spec, broken):
    problem = spec.shapes[next(iter(spec.shapes))]
    config = spec.default(problem, H200)
    for field, kind in get_type_hints(spec.Config).items():
        if kind is not type(broken) or field in UNBOUNDED.get((spec.name, broken), ()):
            continue
        reason = spec.check(problem, dataclasses.replace(config, **{field: broken}), H200)
        assert isinstance(reason, str), f"{field}={broken!r}"
        assert reason


# Fields that take any positive number, or that number.
UNBOUNDED = {
    ("matmul", 3): {"raster_width", "max_concurrent_steps", "split_k"},
    ("matmul", 10_007): {"raster_width"},
    ("gated_matmul", 3): {"raster_width", "max_concurrent_steps"},
    ("gated_matmul", 10_007): {"raster_width"},
    ("quantized_matmul", 3): {"max_concurrent_steps"},
    ("quantized_grouped_matmul", 3): {"max_concurrent_steps"},
    ("grouped_matmul", 3): {"raster_width", "max_concurrent_steps"},
    ("gated_grouped_matmul", 3): {"raster_width", "max_concurrent_steps"},
    ("ragged_contraction", 3): {"raster_width", "max_concurrent_steps"},
    ("quantize", 0): {"ahead"},
    ("flash_attention", 0): {"kv_splits"},
    ("flash_attention", 3): {"compute_warpgroups", "max_concurrent_steps", "q_slots", "section_waves"},
    ("flash_attention_backward", 3): {"max_concurrent_steps", "section_waves"},
    ("cross_entropy", 3): {"stages"},
    ("rms_norm", 3): {"stages"},
    ("rotary", 3): {"stages"},
    ("embedding", 3): {"blocks"},
    **{(kind, 3): {"blocks", "stages"} for kind in ("all_reduce", "reduce_scatter", "all_gather")},
}


def choices(spec: Any, problem: Any) -> st.SearchStrategy[Any]:
    space = spec.space(problem, H200)
    return st.builds(spec.Config, **{f: st.sampled_from(list(v)) for f, v in space.items()})


def wild(spec: Any) -> st.SearchStrategy[Any]:
    kinds = {
        int: st.integers(-(2**40), 2**40) | st.integers(-2, 300),
        str: st.text(max_size=3) | st.sampled_from(["m", "n", "none"]),
        bool: st.booleans(),
    }
    return st.builds(spec.Config, **{f: kinds[k] for f, k in get_type_hints(spec.Config).items()})


@every_spec
@given(data=st.data())
def test_check_answers_for_every_config_of_the_space(spec, data):
    problem = data.draw(st.sampled_from(list(spec.shapes.values())))
    config = data.draw(choices(spec, problem))
    device = data.draw(st.sampled_from(GPUS))
    reason = spec.check(problem, config, device)
    assert reason is None or (isinstance(reason, str) and reason)
    if reason is None:
        assert 0 < spec.cost(problem, config, device) < math.inf


@every_spec
@given(data=st.data())
def test_check_answers_for_wild_configs(spec, data):
    problem = data.draw(st.sampled_from(list(spec.shapes.values())))
    reason = spec.check(problem, data.draw(wild(spec)), H200)
    assert reason is None or (isinstance(reason, str) and reason)


@every_shape
def test_space_holds_many_configs_that_run(spec, shape):
    rng = random.Random(0)
    problem = spec.shapes[shape]
    space = spec.space(problem, H200)
    drawn = [spec.Config(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(500)]
    assert sum(spec.check(problem, config, H200) is None for config in drawn) >= 5


# --- problems that no call has

NONSENSE = (0, -1, 2**31, 2**62, "x", "float7", True, None, 1.5)
SOUND = {  # what of it a field may well hold
    "size": (2**31,),  # 4 GiB of bfloat16
    "window_left": (0, -1),
    "window_right": (0, -1),
    "causal": (True,),
    "lengths": (True,),
    "segments": (True,),
    "soft_cap": (True,),
    "sinks": (True,),
    "v_head_dim": (0,),
    "deterministic": (True,),
    "bias_grad": (True,),
    "residual": (True,),
    "keep": (True,),
    "lhs_rows": (0,),
    "gathered": (0,),
    "gradient": (True,),
    "stored": (True,),
    "joined": (True,),
    "normalised": (True,),
    "page_size": (0,),
    "group_size": (0,),
    "zero_points": (True,),
    "group_offset": (True,),
    "row_scale": (True,),
    "second": (True,),
}


def nonsensical(spec: Any, field: str) -> list[Any]:
    """Values that no call gives the field; True is a sound `bias` of products, where it is a bool."""
    kinds = get_type_hints(spec.Problem)
    sound = (SOUND | ({"bias": (True,)} if kinds.get("bias") is bool else {})).get(field, ())
    return [v for v in NONSENSE if not any(v is s or (v == s and type(v) is type(s)) for s in sound)]


FIELDS = [(spec, field) for spec in SPECS.values() for field in get_type_hints(spec.Problem)]


@pytest.mark.parametrize(("spec", "field"), FIELDS, ids=[f"{spec.name}-{field}" for spec, field in FIELDS])
def test_a_nonsensical_problem_is_refused_and_stops_nothing(spec, field):
    """A database may hold one: what is asked of it answers, or raises ValueError, at once."""
    sound = spec.shapes[next(iter(spec.shapes))]
    config = spec.default(sound, H200)
    for value in nonsensical(spec, field):
        try:
            problem = dataclasses.replace(sound, **{field: value})
        except ValueError:
            continue  # which names them: below
        reason = spec.supports(problem, H200)
        assert isinstance(reason, str), f"{problem}"
        assert reason
        assert isinstance(spec.check(problem, config, H200), str), f"{problem}"
        for there, back in ((sound, problem), (problem, sound), (problem, problem)):
            assert spec.distance(there, back) is None or spec.distance(there, back) >= 0, f"{problem}"
        with contextlib.suppress(ValueError):
            spec.cost(problem, config, H200)
        with contextlib.suppress(ValueError):
            spec.default(problem, H200)


@pytest.mark.parametrize(("value", "rule"), [(-1, "must be at least 0"), ("x", "int, not str"), (True, "int, not bool")])
def test_a_problem_that_cannot_be_made_names_the_field_the_value_and_the_rule(value, rule):
    with pytest.raises(ValueError, match=f"n={value!r} of Problem .*{rule}"):
        MatmulProblem(64, value, 64)


@every_spec
def test_a_config_with_a_field_of_another_type_is_refused_before_anything_computes_with_it(spec):
    problem = spec.shapes[next(iter(spec.shapes))]
    good = spec.default(problem, H200)
    for field, kind in get_type_hints(spec.Config).items():
        value = {int: "64", str: 64, bool: "yes"}[kind]
        rule = f"cannot run .*: {field}={value!r} of {spec.Config.__name__} must be of type {kind.__name__}, not "
        with pytest.raises(ValueError, match=rule):
            resolution.resolve(spec, problem, H200, dataclasses.replace(good, **{field: value}))
    assert resolution.resolve(spec, problem, H200, good).config == good


@every_spec
def test_an_error_can_name_the_config_as_a_caller_does(spec):
    assert getattr(mgpu_ops, api._public_name(spec.Config).removeprefix("mgpu_ops.")) is spec.Config


# --- matmul: any size

sizes = st.integers(1, 2500).map(lambda i: 8 * i)


@given(
    m=st.integers(1, 20_000),
    n=sizes,
    k=sizes,
    layout=st.sampled_from(["nn", "nt", "tn", "tt"]),
    dtypes=st.sampled_from([("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")]),
    batch=st.sampled_from([1, 3]),
    device=st.sampled_from(GPUS),
)
def test_matmul_of_any_size_has_a_default_or_a_reason(m, n, k, layout, dtypes, batch, device):
    spec = SPECS["matmul"]
    problem = MatmulProblem(m, n, k, *dtypes, layout, batch)
    reason = spec.supports(problem, device)
    if reason is not None:
        assert layout[0] == "t"
        assert m % 8
        assert f"m={m} needs 16-byte rows of a" in reason
        assert f"pad to {-(-m // 8) * 8} or pass backend='xla'" in reason
        return
    config = spec.default(problem, device)
    assert spec.check(problem, config, device) is None
    assert 0 < spec.cost(problem, config, device) < math.inf


@given(n=st.integers(1, 5000), k=st.integers(1, 5000))
def test_matmul_says_how_far_to_pad(n, k):
    spec = SPECS["matmul"]
    reason = spec.supports(MatmulProblem(64, n, k), H200)
    assert (reason is None) == (n % 8 == 0 and k % 8 == 0)
    padded = MatmulProblem(64, -(-n // 8) * 8, -(-k // 8) * 8)
    assert spec.supports(padded, H200) is None
    if reason is not None:
        name, size = ("k", k) if k % 8 else ("n", n)
        assert f"{name}={size} " in reason
        assert f"pad to {-(-size // 8) * 8} " in reason


def test_matmul_refuses_what_the_kernel_cannot_do():
    spec = SPECS["matmul"]
    wrong = {
        "dtype float64": MatmulProblem(64, 64, 64, "float64", "float64"),
        "out_dtype float16": MatmulProblem(64, 64, 64, "bfloat16", "float16"),
        "zero": MatmulProblem(0, 64, 64),
    }
    for text, problem in wrong.items():
        assert text in spec.supports(problem, H200)
    assert "not a Hopper GPU" in spec.supports(MatmulProblem(64, 64, 64), gpu.find("b200"))


# --- the shipped configs, as data

SHIPPED = sorted(Path(mgpu_ops.__path__[0], "configs").glob("*/*.json"))


@pytest.mark.parametrize("path", SHIPPED, ids=lambda path: f"{path.parent.name}/{path.name}")
def test_space_contains_the_shipped_configs(path):
    """So that the tuner can start from them."""
    spec = mgpu_ops.spec_of(path.stem)
    device = gpu.find(path.parent.name)
    for entry in json.loads(path.read_text())["entries"]:
        space = spec.space(spec.Problem(**entry["problem"]), device)
        if spec.leaves_to_xla(spec.Config(**entry["config"])):
            continue  # no kernel to start from
        assert {f: v for f, v in entry["config"].items() if v not in space[f]} == {}
