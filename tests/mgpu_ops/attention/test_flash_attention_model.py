"""What the tuner and the dispatcher take for granted of attention's configs, for problems of any shape and mask."""

from __future__ import annotations

import dataclasses
import functools
import math
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st

from mgpu_ops import SPECS
from mgpu_ops.attention import cudnn, model
from mgpu_ops.attention.backward_check import backward_blocks, hands_out
from mgpu_ops.attention.heads import rounded
from mgpu_ops.attention.mask import MaskTerms, kv_blocks, q_blocks
from mgpu_ops.attention.problem import BackwardProblem, Problem, deals_tiles
from mgpu_ops.core import gpu
from tests.mgpu_ops.attention import cases
from tests.thorough import examples

FORWARD, BACKWARD = SPECS["flash_attention"], SPECS["flash_attention_backward"]
GPUS = [gpu.find(key) for key in ("h200", "h100-pcie", "h20")]
H200 = GPUS[0]
tokens = st.integers(1, 300) | st.integers(1, 40_000)
bounds = st.just(-1) | st.integers(0, 5000)


@st.composite
def problems(draw: Any, paged: bool = True) -> Problem:
    kv_heads = draw(st.integers(1, 16))
    page_size = draw(st.sampled_from([0, 0, 16, 48, 128])) if paged else 0
    kv_tokens = draw(tokens)
    return Problem(
        batch=draw(st.integers(1, 16)),
        q_tokens=draw(tokens),
        kv_tokens=kv_tokens if page_size == 0 else -(-kv_tokens // page_size) * page_size,
        q_heads=kv_heads * draw(st.integers(1, 8)),
        kv_heads=kv_heads,
        head_dim=draw(st.sampled_from([64, 128, 256]) | st.integers(1, 256)),
        dtype=draw(st.sampled_from(["bfloat16", "float16"])),
        causal=draw(st.booleans()),
        window_left=draw(bounds),
        window_right=draw(bounds),
        align=draw(st.sampled_from(["bottom_right", "top_left"])),
        lengths=draw(st.booleans()),
        segments=draw(st.booleans()),
        bias=draw(st.sampled_from(["none", "none", "bfloat16", "float32"])),
        soft_cap=draw(st.booleans()),
        sinks=draw(st.booleans()),
        page_size=page_size,
    )


def backward(problem: Problem, **changes: Any) -> BackwardProblem:
    return BackwardProblem(**dataclasses.asdict(problem), **changes)


gradients = st.builds(backward, problems(paged=False), deterministic=st.booleans(), bias_grad=st.booleans())


# --- what is tried and what runs untuned


@given(problem=problems(), device=st.sampled_from(GPUS))
def test_every_candidate_can_run_and_the_default_is_one_of_them(problem: Problem, device: Any) -> None:
    assert_candidates(FORWARD, problem, device)


@given(problem=gradients, device=st.sampled_from(GPUS))
def test_every_backward_candidate_can_run_and_the_default_is_one_of_them(problem: BackwardProblem, device: Any) -> None:
    assert_candidates(BACKWARD, problem, device)


def assert_candidates(spec: Any, problem: Any, device: Any) -> None:
    reason = spec.supports(problem, device)
    if reason is not None:
        with pytest.raises(ValueError, match="no config of flash_attention"):
            spec.candidates(problem, device)
        return
    found = spec.candidates(problem, device)
    costs = [spec.cost(problem, config, device) for config in found]
    assert spec.default(problem, device) in found
    assert {spec.check(problem, config, device) for config in found} == {None}
    assert costs == sorted(costs)
    assert 0 < costs[0] <= costs[-1] < math.inf


@pytest.mark.parametrize("name", FORWARD.shapes)
def test_the_default_of_long_sequences_is_what_was_measured_to_be_fastest(name: str) -> None:
    problem = FORWARD.shapes[name]
    narrow = problem.left is not None and problem.left < 1024  # a window of few tiles: none was measured
    if problem.q_tokens < 4096 or problem.head_dim not in (64, 128, 256) or narrow:
        return
    c = FORWARD.default(problem, H200)
    wanted = {64: (3, 128, 3, 2), 128: (2, 128, 2, 2), 256: (2, 64, 2, 1)}
    assert (c.compute_warpgroups, c.tile_kv, c.max_concurrent_steps, c.q_slots) == wanted[problem.head_dim]


@pytest.mark.parametrize("head_dim", [80, 96])
def test_tiles_are_wide_where_there_are_registers_for_them(head_dim: int) -> None:
    problem = Problem(1, 16384, 16384, 16, 16, head_dim)
    for mask in ({}, {"causal": True}):
        assert FORWARD.default(dataclasses.replace(problem, **mask), H200).tile_kv == 192
    for less in (
        {"kv_tokens": 2048, "q_tokens": 2048},
        {"causal": True, "window_left": 4000},
        {"lengths": True},
        {"segments": True},
        {"bias": "bfloat16"},
    ):
        assert FORWARD.default(dataclasses.replace(problem, **less), H200).tile_kv <= 128


@pytest.mark.parametrize(
    ("problem", "section"),
    [
        (Problem(14, 1280, 1280, 4, 4, 128, causal=True), 1024),  # keys and values of all heads stay in the L2
        (Problem(5, 2629, 2629, 64, 64, 112, causal=True), 4),
        (Problem(1, 32768, 32768, 32, 8, 128, causal=True), 1),
    ],
)
def test_the_more_keys_and_values_a_problem_has_the_shorter_its_sections_of_heads_are(problem: Problem, section: int) -> None:
    assert FORWARD.default(problem, H200).section_waves == section


@pytest.mark.parametrize("mask", [{"causal": True}, {}])
@pytest.mark.parametrize(("sizes", "tiles"), [((96, 96), (8, 4)), ((50, 70), (7, 5)), ((3, 9), (2, 4))])
def test_the_model_counts_the_blocks_of_keys_within_the_segments_of_random_inputs(
    mask: dict[str, Any], sizes: tuple[int, int], tiles: tuple[int, int]
) -> None:
    problem = Problem(1, *sizes, 1, 1, 64, segments=True, **mask)
    ids = [np.asarray(x) for x in FORWARD.inputs(problem, jax.random.key(0))[-2:]]
    seen = cases.visible((1, 1, *sizes), **mask, q_segment_ids=ids[0], kv_segment_ids=ids[1])[0, 0]
    steps, _ = model._segments_kv_blocks(problem, *tiles)
    rows = [seen[row : row + tiles[0]].any(0) for row in range(0, sizes[0], tiles[0])]
    ends = [(np.argmax(keys), len(keys) - np.argmax(keys[::-1])) if keys.any() else (0, 1) for keys in rows]
    assert steps.tolist() == [-(-end // tiles[1]) - first // tiles[1] for first, end in ends]


@given(problem=problems(paged=False), rows=st.integers(1, 64))
def test_a_single_warpgroup_works_on_few_rows(problem: Problem, rows: int) -> None:
    """Others would work on padding."""
    few = dataclasses.replace(problem, q_tokens=rows, bias="none")
    assert FORWARD.default(few, H200).compute_warpgroups == 1


@given(problem=problems())
def test_a_deterministic_gradient_is_never_a_sum_in_any_order(problem: Problem) -> None:
    exact = backward(problem, deterministic=True)
    if BACKWARD.supports(exact, H200) is None:
        in_turns = {(config.dq_step, config.q_order) for config in BACKWARD.candidates(exact, H200) if config.mode == "fused"}
        assert in_turns <= {("next", "apart")}


@pytest.mark.parametrize(
    ("changes", "reason"),
    [
        ({"compute_warpgroups": 1}, "turns='products' is for 2 or 3 compute_warpgroups, not 1: use 'none'"),
        ({"turns": "always"}, "turns='always' is neither 'none' nor 'products'"),
        ({"rescale": "never"}, "rescale='never' is neither 'always' nor 'conditional'"),
        ({"pv_wait": "never"}, "pv_wait='never' is not 'early', 'half' or 'late'"),
    ],
)
def test_turns_waits_and_rescales_that_cannot_be(changes: dict[str, Any], reason: str) -> None:
    problem = FORWARD.shapes["mha128-4096"]
    config = FORWARD.default(problem, H200)
    assert config.turns == "products"
    assert FORWARD.check(problem, dataclasses.replace(config, **changes), H200) == reason


def test_the_soft_cap_after_a_bias_needs_both() -> None:
    both = {"bias": "bfloat16", "soft_cap": True, "soft_cap_after_bias": True}
    for less in ({"bias": "none"}, {"soft_cap": False}):
        problem = dataclasses.replace(FORWARD.shapes["mha128-4096"], **both | less)
        assert "leave it out" in str(FORWARD.supports(problem, H200))
    problem = BackwardProblem(1, 256, 256, 2, 2, 64, bias_grad=True, **both)
    assert BACKWARD.supports(problem, H200) is None
    assert "beside soft_cap" in str(BACKWARD.supports(dataclasses.replace(problem, soft_cap_after_bias=False), H200))


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        ({}, {"dq_step": "later"}, "neither 'same' nor 'next'"),
        ({"head_dim": 64}, {}, "tile_q=64 must be 128"),
        ({"head_dim": 64}, {"tile_q": 128, "dk_operand": "registers"}, "use 'memory'"),
        ({"deterministic": True}, {"mode": "split"}, "mode='fused'"),
        ({"deterministic": True}, {}, "q_order='apart'"),
        ({"deterministic": True}, {"q_order": "apart", "max_concurrent_steps": 5}, "from 2 to 4"),
        ({"bias": "bfloat16"}, {}, "a bias"),
        ({"soft_cap": True}, {}, "soft cap"),
        ({}, {"max_concurrent_steps": 1}, "max_concurrent_steps=2"),
        ({}, {"q_order": "random"}, "neither 'together' nor 'apart'"),
        ({}, {"dk_operand": "cache"}, "neither 'memory' nor 'registers'"),
        ({}, {"dq_step": "same", "q_order": "apart"}, "use 'together' and 'memory'"),
        ({}, {"dq_step": "same", "dk_operand": "registers"}, "use 'together' and 'memory'"),
        ({}, {"dq_step": "same", "kv_slots": 2}, "kv_slots=2 is for dq_step='next': use 1"),
        ({}, {"kv_slots": 3}, "must be 1 or 2"),
        ({}, {"kv_slots": 2}, "for head dims up to 64"),
        ({"head_dim": 64, "q_heads": 4}, {"tile_q": 128, "kv_slots": 2}, "query heads that share keys"),
        ({"head_dim": 64, "deterministic": True}, {"tile_q": 128, "q_order": "apart", "kv_slots": 2}, "deterministic sums"),
        ({"head_dim": 64, "lengths": True}, {"tile_q": 128, "q_order": "together", "kv_slots": 2}, "no registers for lengths"),
        ({"head_dim": 64, "kv_tokens": 200}, {"tile_q": 128, "q_order": "together", "kv_slots": 2}, "kv_tokens=200"),
    ],
)
def test_dq_a_step_later_where_it_cannot_be(problem: dict[str, Any], changes: dict[str, Any], reason: str) -> None:
    config = BACKWARD.Config(**{"mode": "fused", "tile_q": 64, "tile_kv": 128, "max_concurrent_steps": 2, "section_waves": 1,
                                "memory_registers": 24, "dq_step": "next"} | changes)  # fmt: skip
    found = BACKWARD.check(BACKWARD.Problem(**{"batch": 1, "q_tokens": 256, "kv_tokens": 256, "q_heads": 2, "kv_heads": 2,
                                               "head_dim": 128} | problem), config, H200)  # fmt: skip
    assert reason in str(found)


MHA64 = BackwardProblem(32, 512, 512, 12, 12, 64)


@pytest.mark.parametrize(
    ("changes", "slots"),
    [
        ({}, 2),
        ({"causal": True}, 2),
        ({"window_left": 100, "window_right": 0}, 2),
        ({"lengths": True}, 2),
        ({"lengths": True, "kv_tokens": 256}, 2),
        ({"lengths": True, "kv_tokens": 256, "causal": True}, 1),
        ({"segments": True}, 1),
        ({"kv_heads": 4}, 1),
        ({"batch": 2, "q_heads": 16, "kv_heads": 2}, 1),  # in parts with one query head each
        ({"deterministic": True}, 1),
        ({"head_dim": 128}, 1),
    ],
    ids=str,
)
def test_two_places_for_kv_blocks_are_the_default_where_they_were_faster(changes: dict[str, Any], slots: int) -> None:
    problem = dataclasses.replace(MHA64, **changes)
    config = BACKWARD.default(problem, H200)
    assert config.kv_slots == slots
    other = dataclasses.replace(config, kv_slots=3 - slots)
    if BACKWARD.check(problem, other, H200) is None:  # so that no entry of a problem near by brings it
        assert BACKWARD.cost(problem, config, H200) < BACKWARD.cost(problem, other, H200)


@pytest.mark.parametrize(
    ("changes", "sharing", "handed_out"),
    [
        ({"lengths": True}, False, True),
        ({}, False, False),
        ({"lengths": True, "causal": True}, False, False),
        ({"lengths": True, "segments": True}, False, False),
        ({"lengths": True, "deterministic": True}, False, False),
        ({"lengths": True, "head_dim": 128}, False, False),
        ({"lengths": True, "batch": 2}, False, False),  # fewer kv blocks than SMs
        ({"lengths": True, "batch": 1024}, False, False),  # so many that short ones lie on all SMs
        ({"lengths": True}, True, False),  # in a program over several devices
    ],
    ids=str,
)
def test_kv_blocks_are_handed_out_with_lengths_alone(changes: dict[str, Any], sharing: bool, handed_out: bool) -> None:
    problem, device = dataclasses.replace(MHA64, **changes), dataclasses.replace(H200, shares_sms=sharing)
    config = BACKWARD.Config("fused", 8192 // problem.head_dim, 128, 3, 4, 24, "next", "apart")
    blocks = backward_blocks(problem, problem.batch * 12 * 4, device)
    assert hands_out(problem, config, blocks, device) == handed_out


@pytest.mark.parametrize("name", ["mha128-4096", "mha128-16384-causal", "llama3-70b-8192-causal"])
def test_the_schedule_that_was_fastest_is_the_default(name: str) -> None:
    config = BACKWARD.default(BACKWARD.shapes[name], H200)
    assert (config.dq_step, config.q_order, config.dk_operand, config.max_concurrent_steps) == ("next", "apart", "memory", 3)


@pytest.mark.parametrize(
    ("problem", "mode"),
    [
        (BACKWARD.shapes["mha128-4096"], "fused"),
        (BACKWARD.shapes["mha64-4096-causal"], "fused"),
        (BACKWARD.shapes["mistral-7b-16384-window"], "fused"),
        (BACKWARD.shapes["llama3-8b-512-causal"], "split"),
        (BACKWARD.Problem(4, 4096, 4096, 16, 16, 128, causal=True, lengths=True), "fused"),
        (BACKWARD.Problem(4, 4096, 4096, 16, 16, 128, lengths=True), "split"),
        (BACKWARD.Problem(4, 4096, 4096, 16, 16, 96, causal=True), "split"),
    ],
    ids=str,
)
def test_deterministic_gradients_take_turns_by_default_where_that_was_faster(problem: Any, mode: str) -> None:
    assert BACKWARD.default(dataclasses.replace(problem, deterministic=True), H200).mode == mode


@pytest.mark.parametrize("head_dim", [80, 96])
def test_long_sequences_of_80_and_96_columns_are_computed_as_128_with_dq_a_step_later(head_dim: int) -> None:
    assert BACKWARD.default(BACKWARD.Problem(1, 30000, 30000, 8, 4, head_dim, causal=True), H200).dq_step == "next"
    assert BACKWARD.default(BACKWARD.Problem(4, 512, 512, 8, 4, head_dim, causal=True), H200).dq_step == "same"


def test_groups_are_shared_out_where_heads_of_keys_do_not_fill_the_gpu() -> None:
    few, many = BACKWARD.Problem(2, 256, 256, 18, 2, 80, causal=True), BACKWARD.Problem(16, 4096, 4096, 16, 2, 128)
    assert BACKWARD.default(few, H200).group_splits == 9
    assert BACKWARD.default(many, H200).group_splits == 1


@pytest.mark.parametrize(
    ("shape", "kwargs", "splits"),
    [
        ((27, 278, 278, 11, 1, 96), {"lengths": True}, 2),
        ((19, 256, 256, 8, 1, 80), {"bias": "bfloat16"}, 3),
        ((2, 2048, 2048, 71, 1, 64), {"causal": True}, 8),
        ((1, 3840, 3840, 22, 2, 112), {"causal": True, "segments": True}, 11),
    ],
    ids=str,
)
def test_parts_of_a_group_differ_by_one_head_where_that_was_faster(shape: Any, kwargs: Any, splits: int) -> None:
    assert BACKWARD.default(BACKWARD.Problem(*shape, **kwargs), H200).group_splits == splits


@pytest.mark.parametrize("splits", [0, 4, 9])
def test_a_group_has_at_most_as_many_parts_as_query_heads(splits: int) -> None:
    problem = BACKWARD.Problem(1, 256, 256, 6, 2, 128)
    config = dataclasses.replace(BACKWARD.default(problem, H200), group_splits=splits)
    expected = f"group_splits={splits} must be from 1 to 3, the query heads of a head of keys"
    assert BACKWARD.check(problem, config, H200) == expected


@pytest.mark.parametrize("mask", [{"lengths": True}, {"segments": True, "causal": True}, {"causal": True, "window_left": 2000}])
def test_head_dim_64_has_dq_a_step_later_by_default_with_any_mask(mask: dict[str, Any]) -> None:
    assert BACKWARD.default(BACKWARD.Problem(4, 4096, 4096, 16, 16, 64, **mask), H200).dq_step == "next"


# --- the model of time


@pytest.mark.parametrize(("name", "tflops"), [("mha128-4096", 690), ("mha128-16384", 700), ("mha64-4096", 492)])
def test_the_model_is_near_what_was_measured(name: str, tflops: float) -> None:
    problem = FORWARD.shapes[name]
    time = FORWARD.cost(problem, FORWARD.default(problem, H200), H200)
    assert FORWARD.flops(problem) / time == pytest.approx(tflops * 1e12, rel=0.1)


@pytest.mark.parametrize("head_dim", [64, 96, 128, 160, 192, 256])
def test_the_fewer_keys_a_mask_leaves_the_less_time_it_takes(head_dim: int) -> None:
    whole = FORWARD.Problem(4, 8192, 8192, 16, 16, head_dim)
    config = FORWARD.default(whole, H200)
    masks = ({}, {"causal": True}, {"causal": True, "window_left": 2000}, {"causal": True, "window_left": 50})
    times = [FORWARD.cost(dataclasses.replace(whole, **mask), config, H200) for mask in masks]
    assert times == sorted(times, reverse=True)


@pytest.mark.parametrize("head_dim", [64, 80, 96, 112, 128, 160, 192, 256])
def test_cudnn_is_modelled_to_take_what_it_took(head_dim: int) -> None:
    problem = FORWARD.Problem(4, 4096, 4096, 16, 16, head_dim, causal=True)
    gradient = BACKWARD.Problem(**dataclasses.asdict(problem))
    assert 350e12 < FORWARD.flops(problem) / FORWARD.baseline_cost(problem, H200) < 650e12
    assert 300e12 < BACKWARD.flops(gradient) / BACKWARD.baseline_cost(gradient, H200) < 600e12


@pytest.mark.parametrize("spec", [FORWARD, BACKWARD])
@examples(20)
@given(data=st.data())
def test_cudnn_is_modelled_for_every_problem_that_it_takes(spec: Any, data: st.DataObject) -> None:
    problem = data.draw(problems(paged=False) if spec is FORWARD else gradients)
    if spec.supports(problem, H200) is None:
        time = spec.baseline_cost(problem, H200)
        assert (time is None) == (cudnn.refuses(problem) is not None)
        assert time is None or 0 < time < 1e6


@pytest.mark.parametrize(("head_dim", "computed"), [(40, 64), (72, 80), (200, 256)])
def test_cudnn_is_modelled_to_take_as_long_as_with_the_head_dim_that_it_computes(head_dim: int, computed: int) -> None:
    ours, theirs = (Problem(8, 4096, 4096, 8, 8, d) for d in (head_dim, computed))
    assert FORWARD.baseline_cost is not None
    assert FORWARD.baseline_cost(ours, H200) == pytest.approx(FORWARD.baseline_cost(theirs, H200), rel=0.01)


FEW_KEYS = [  # problem, and the tile_kv and q_slots that were fastest: results/2026-11-28-h200-flash_attention-few-keys.jsonl
    (Problem(128, 128, 128, 12, 12, 64), 64, 3),
    (Problem(16, 1024, 77, 20, 20, 64), 64, 3),
    (Problem(256, 77, 77, 12, 12, 64, causal=True), 64, 3),
    (Problem(256, 128, 128, 12, 12, 64, lengths=True), 128, 3),
    (Problem(64, 256, 256, 16, 16, 72), 64, 2),
    (Problem(64, 128, 128, 16, 16, 96), 64, 2),
    (Problem(32, 1024, 77, 16, 16, 128), 128, 3),
    (Problem(64, 128, 128, 8, 8, 256), 64, 2),
]


@pytest.mark.parametrize(("problem", "tile_kv", "q_slots"), FEW_KEYS, ids=str)
def test_the_default_of_few_keys_is_what_was_measured_to_be_fastest(problem: Problem, tile_kv: int, q_slots: int) -> None:
    config = FORWARD.default(problem, H200)
    assert (config.tile_kv, config.q_slots) == (tile_kv, q_slots)


@pytest.mark.parametrize(("head_dim", "heads", "copies"), [(72, 4, False), (40, 4, False), (36, 4, True), (40, 1, True)])
def test_xla_pads_no_head_dim_that_is_a_multiple_of_8_forward(head_dim: int, heads: int, copies: bool) -> None:
    """But where a row of all heads is narrower than a block."""
    problem = Problem(2, 256, 256, heads, heads, head_dim)
    arrays = jax.eval_shape(functools.partial(FORWARD.inputs, problem), jax.random.key(0))
    program = jax.make_jaxpr(functools.partial(FORWARD.run, problem, FORWARD.default(problem, H200), H200))(*arrays)
    assert (" pad[" in str(program)) == copies


def test_a_small_window_is_not_given_the_config_of_long_sequences() -> None:
    problem = FORWARD.Problem(6, 10624, 10624, 2, 1, 256, causal=True, window_left=43)  # 61 us with one consumer, 74 with two
    assert FORWARD.default(problem, H200).compute_warpgroups == 1


@pytest.mark.parametrize("changes", [{"kv_tokens": 4000}, {"lengths": True}, {"bias": "bfloat16"}, {"window_left": 2000}])
def test_the_producer_has_more_registers_where_windows_of_rows_end_anywhere(changes: dict[str, Any]) -> None:
    problem = FORWARD.Problem(1, 4096, 4096, 8, 8, 128, causal=True)
    found = FORWARD.default(dataclasses.replace(problem, **changes), H200)
    assert FORWARD.default(problem, H200).memory_registers == 24 < found.memory_registers


@examples(15)
@given(problem=problems(paged=False), tile=st.sampled_from([64, 128, 192]), step=st.sampled_from([64, 128]))
def test_the_steps_of_the_model_are_those_of_the_kernels(problem: Problem, tile: int, step: int) -> None:
    p = dataclasses.replace(
        problem, lengths=False, q_tokens=problem.q_tokens % 1000 + 1, kv_tokens=problem.kv_tokens % 1000 + 1
    )
    each = MaskTerms.of(p, p.q_tokens, p.kv_tokens)

    def steps(tiles: Any, count: int) -> list[int]:
        first, _, _, end = tiles(jnp.arange(0, count, tile), tile, step)
        return np.broadcast_to(end - first, (-(-count // tile),)).tolist()

    with jax.disable_jit():
        assert kv_blocks(p, tile, step).tolist() == steps(each.kv_range, p.q_tokens)
        assert q_blocks(p, tile, step).tolist() == steps(each.q_range, p.kv_tokens)


# --- how far problems are from each other


@given(x=problems(), y=problems())
def test_the_distance_is_the_same_both_ways_and_zero_to_itself_alone(x: Problem, y: Problem) -> None:
    assert_distances(x, y)


@given(x=gradients, y=gradients)
def test_the_distance_of_gradients_is_the_same_both_ways_and_zero_to_itself_alone(
    x: BackwardProblem, y: BackwardProblem
) -> None:
    assert_distances(x, y)


def assert_distances(x: Any, y: Any) -> None:
    assert model.distance(x, x) == 0
    there = model.distance(x, y)
    assert there == pytest.approx(model.distance(y, x))
    assert there is None or (there > 0) == (x != y)
    if rounded(x.head_dim) != rounded(y.head_dim) or (x.bias == "none") != (y.bias == "none"):
        assert there is None


@pytest.mark.parametrize("field", ["deterministic", "bias_grad"])
def test_a_config_of_one_kind_of_gradient_is_none_of_another(field: str) -> None:
    problem = BACKWARD.shapes["mha128-4096"]
    assert model.distance(problem, dataclasses.replace(problem, **{field: True})) is None


def test_a_neighbour_in_length_is_nearer_than_one_in_mask_is_nearer_than_a_far_one() -> None:
    problem = FORWARD.shapes["mha128-4096-causal"]

    def far(**changes: Any) -> float:
        found = model.distance(problem, dataclasses.replace(problem, **changes))
        assert found is not None
        return found

    assert far(dtype="float16") < far(causal=False) < far(q_tokens=8192, kv_tokens=8192) < far(q_tokens=512, kv_tokens=8192)
    assert model.distance(problem, dataclasses.replace(problem, q_tokens=1, kv_tokens=1)) is None


@pytest.mark.parametrize(
    ("fields", "consumers", "dealt"),
    [
        ({"segments": True, "causal": True}, 2, True),
        ({"lengths": True}, 1, True),
        ({"lengths": True, "causal": True}, 2, False),
        ({"segments": True}, 3, False),  # spills
        ({"causal": True}, 2, False),  # lengths of tiles are known
        ({"segments": True, "kv_tokens": 500, "batch": 9}, 2, False),  # short tiles, many for an SM
        ({"segments": True, "kv_tokens": 500, "batch": 8, "q_heads": 1, "kv_heads": 1}, 2, True),
        ({"segments": True, "batch": 20}, 2, False),  # so many that short ones lie on all SMs
    ],
)
def test_tiles_are_dealt_where_only_the_device_knows_which_are_short(fields, consumers, dealt):
    problem = Problem(
        **{"batch": 2, "q_tokens": 4096, "kv_tokens": 4096, "q_heads": 8, "kv_heads": 8, "head_dim": 128} | fields
    )
    config = dataclasses.replace(cases.BASE, compute_warpgroups=consumers, tile_kv=128)
    tiles = problem.batch * problem.q_heads * math.ceil(problem.q_tokens / (64 * consumers))
    assert deals_tiles(problem, config, tiles, H200) == dealt


def test_no_default_has_a_config_that_was_seen_to_spill_much():
    """By 712 and 1024 bytes, and took 1.3 and 1.4 times as long as another."""
    biased = Problem(2, 896, 896, 23, 23, 64, bias="bfloat16")
    lengths = Problem(8, 13500, 13500, 1, 1, 160, lengths=True)
    assert dataclasses.astuple(FORWARD.default(biased, GPUS[1]))[:2] != (3, 128)
    assert dataclasses.astuple(FORWARD.default(lengths, GPUS[1]))[:2] != (2, 128)
