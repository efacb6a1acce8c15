"""What ptxas makes of the kernels: their products, and in their loops which waits for them come where."""

from __future__ import annotations

import collections
import dataclasses
import math
import re
from typing import Any

import jax
import pytest

from mgpu_ops import spec_of
from mgpu_ops.attention.problem import bias_steps, smem_bytes
from mgpu_ops.core import aot
from tests import thorough

pytestmark = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

FORWARD, BACKWARD = spec_of("flash_attention"), spec_of("flash_attention_backward")


def compiled(problem: Any, config: Any) -> str:
    """The SASS of a kernel that spills nothing, and does not wait for one product after the other."""
    gpu = aot.find("h200")
    arrays = jax.eval_shape(lambda key: FORWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: FORWARD.run(problem, config, gpu, *x), *arrays)
    assert report.spills == 0
    assert report.serialized == ""
    (sass,) = [k.sass for k in report.kernels]
    return sass


def loop_of(pv_wait: str) -> list[str]:
    """The waits and exponentials, in order, between the last two products with values: one pass of the loop over keys."""
    problem, gpu = FORWARD.Problem(1, 4096, 4096, 1, 1, 128), aot.find("h200")
    config = dataclasses.replace(FORWARD.default(problem, gpu), pv_wait=pv_wait, turns="none")
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2", compiled(problem, config))
    passes = "".join({"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "E"}[op] for op in found)
    loop = re.findall(r"H+([WE]+)", passes)  # first scores; the loop; the last products with values
    return [part for part in loop if part.count("E") > 10][1:]


def test_a_late_wait_for_the_products_with_values_comes_after_the_exponentials():
    (part,) = loop_of("late")
    assert re.fullmatch(r"WE+W", part), part  # the wait for the scores, the softmax, the wait for the products


def test_a_wait_for_the_products_with_values_comes_between_the_halves_of_the_exponentials():
    (part,) = loop_of("half")
    waits = re.fullmatch(r"W(E+)W(E+)", part)
    assert waits, part
    assert all(len(half) > 25 for half in waits.groups()), part  # of 66


def test_a_causal_mask_takes_one_comparison_and_one_choice_for_each_score():
    problem, gpu = FORWARD.Problem(4, 4096, 4096, 16, 16, 128, causal=True), aot.find("h200")
    sass = compiled(problem, FORWARD.default(problem, gpu))
    assert len(re.findall(r"\bISETP", sass)) < 64 + 40  # a thread has 64 scores of a masked block
    assert len(re.findall(r"\bFSEL", sass)) < 64 + 20


@pytest.mark.parametrize("rescale", ["always", "conditional"])
def test_a_conditional_rescale_branches_over_the_multiplications_of_the_output(rescale):
    problem, gpu = FORWARD.Problem(1, 4096, 4096, 1, 1, 256), aot.find("h200")
    config = dataclasses.replace(FORWARD.default(problem, gpu), rescale=rescale)
    names = {"HGMMA": "H", "VOTE.ANY": "V", "FMUL": "m", "BRA": "b"}
    found = re.findall(r"\bHGMMA|\bVOTE\.ANY|\bFMUL\b|\bBRA\b", compiled(problem, config))
    passes = "".join(names[op] for op in found)
    assert bool(re.search(r"Vm{0,4}bm{128}", passes)) == (rescale == "conditional"), passes  # a thread has 128 of the output
    assert ("V" in passes) == (rescale == "conditional")


def test_turns_surround_the_start_of_the_two_products_alone():
    problem, gpu = FORWARD.Problem(1, 4096, 4096, 1, 1, 128), aot.find("h200")
    config = dataclasses.replace(FORWARD.default(problem, gpu), turns="products")
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2|BAR\.SYNC|BAR\.ARV", compiled(problem, config))
    names = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "E", "BAR.SYNC": "s", "BAR.ARV": "a"}
    assert re.search(r"EsH{16}aW", "".join(names[op] for op in found).replace("ss", "s"))


@pytest.mark.parametrize("head_dim", thorough.cases([64, 128, 256], [64, 256]))
def test_products_of_a_small_window_overlap(head_dim):
    problem = FORWARD.Problem(4, 3000, 3000, 2, 2, head_dim, causal=True, window_left=50)
    config = FORWARD.Config(2, 64, 2, 2, 1, 40, "early") if head_dim < 256 else FORWARD.Config(1, 64, 2, 2, 1, 32, "early")
    assert compiled(problem, config).count("HGMMA") == 2 * (head_dim // 16 + 64 // 16)  # the first scores and the loop


def test_ptxas_moves_an_early_wait_ahead_of_the_exponentials():
    (part,) = loop_of("early")
    assert re.match(r"WW", part), part


HEAD_DIMS = {
    "80": (80, 80),
    "96": (96, 96),
    "112": (112, 112),
    "160": (160, 160),
    "192": (192, 192),
    "192, of values 128": (192, 128),
    "224": (224, 224),
}


@pytest.mark.parametrize("name", thorough.cases(HEAD_DIMS, ["80", "160", "192", "224"]))
def test_products_are_of_the_true_head_dim_and_nothing_spills(name):
    """Multiplications of each row with a key and its value, in each of the copies of a step that the kernel is made of."""
    head_dim, v_dim = HEAD_DIMS[name]
    problem = FORWARD.Problem(4, 4096, 4096, 32, 32, head_dim, v_head_dim=v_dim % head_dim)
    config = FORWARD.default(problem, aot.find("h200"))
    shapes = [tuple(map(int, x)) for x in re.findall(r"HGMMA\.64x(\d+)x(\d+)\.F32", compiled(problem, config))]
    of_step = (head_dim + v_dim) * config.tile_kv
    total = sum(math.prod(shape) for shape in shapes)
    assert total % of_step == 0, collections.Counter(shapes)
    assert total // of_step == 2  # the first scores with the last values, and the loop


REGISTERS = {  # of a producer or of consumers, what leaves few
    "bias of 32 bits": {"causal": True, "bias": "float32"},
    "bias of 32 bits, segments, window": {"window_left": 255, "window_right": 255, "segments": True, "bias": "float32"},
    "lengths, sinks": {"causal": True, "lengths": True, "sinks": True},
    "short, lengths, head dim 64": {"head_dim": 64, "batch": 1, "q_tokens": 1280, "kv_tokens": 1280, "lengths": True},
}


@pytest.mark.parametrize("name", thorough.cases(REGISTERS, ["lengths, sinks"]))
def test_defaults_beside_masks_and_biases_spill_nothing(name):
    sizes = {"batch": 4, "q_tokens": 1024, "kv_tokens": 1024, "q_heads": 8, "kv_heads": 4, "head_dim": 128}
    problem, gpu = FORWARD.Problem(**(sizes | REGISTERS[name])), aot.find("h200")
    config, arrays = FORWARD.default(problem, gpu), jax.eval_shape(lambda key: FORWARD.inputs(problem, key), jax.random.key(0))
    made = aot.build(gpu, lambda *x: FORWARD.run(problem, config, gpu, *x), *arrays)
    assert (made.spills, made.serialized) == (0, "")


FULL = {  # what leaves hardly any shared memory
    "bias beside head_dim of 256": ((256, "bfloat16"), FORWARD.Config(2, 64, 2, 1, 4, 24, "half"), 2),
    "bias of 32 bits": ((256, "float32"), FORWARD.Config(2, 64, 2, 1, 4, 48, "early"), 1),
}


@pytest.mark.parametrize("name", FULL)
def test_shared_memory_is_counted_to_the_byte_and_the_bias_has_the_stages_that_fit(name):
    (head_dim, bias), config, stages = FULL[name]
    problem, gpu = FORWARD.Problem(4, 4096, 4096, 4, 4, head_dim, bias=bias), aot.find("h200")
    arrays = jax.eval_shape(lambda key: FORWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: FORWARD.run(problem, config, gpu, *x), *arrays)
    assert report.smem_bytes == smem_bytes(problem, config, gpu)
    assert bias_steps(problem, config, gpu) == stages
    assert report.serialized == ""


def test_a_bias_is_read_before_the_wait_for_the_scores_and_its_place_is_free_when_something_of_all_of_it_is_stored():
    problem, gpu = FORWARD.Problem(2, 2048, 2048, 4, 4, 128, bias="bfloat16"), aot.find("h200")
    sass = compiled(problem, FORWARD.default(problem, gpu))
    names = {"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "E", "LDSM": "b", "STS ": "s", "SYNCS.ARRIVE": "a"}
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2|LDSM|STS |SYNCS\.ARRIVE", sass)
    # Scores and values are started; the keys' place is free; exponentials and stores of their sums; the bias' place is free.
    assert re.search(r"H{16}b+WaE{20,}(E*s){4}aE*WE+a", "".join(names[op] for op in found))


def test_where_a_bias_is_read_late_its_place_is_free_after_a_fence():
    problem, gpu = FORWARD.Problem(2, 2048, 2048, 4, 4, 256, bias="bfloat16"), aot.find("h200")
    sass = compiled(problem, FORWARD.default(problem, gpu))
    names = {"LDSM": "b", "FENCE.VIEW.ASYNC": "f", "SYNCS.ARRIVE": "a"}
    order = "".join(names[op] for op in re.findall(r"LDSM|FENCE\.VIEW\.ASYNC|SYNCS\.ARRIVE", sass))
    assert not re.search("ba", order)
    assert re.search("b{4,}fa", order)


def test_the_place_of_segments_is_free_when_their_ids_have_come():
    problem, gpu = FORWARD.Problem(2, 2048, 2048, 4, 4, 128, segments=True), aot.find("h200")
    sass = compiled(problem, FORWARD.default(problem, gpu))
    found = re.findall(r"LDS\.64|FENCE\.VIEW\.ASYNC|SYNCS\.ARRIVE", sass)
    names = {"LDS.64": "i", "FENCE.VIEW.ASYNC": "f", "SYNCS.ARRIVE": "a"}
    order = "".join(names[op] for op in found)
    assert not re.search("ia", order)
    assert re.search("i{16}fa", order)  # 128 ids are read, two at a time by four threads


# A pass of the loop over q blocks: scores and dq (s), dk (d), their wait (W), exponentials (E), additions to dq (A), dP, dv.
LOOP_OF_DK_FROM = {
    "memory": "s{16}d{4}W+.*s{8}.*d{4}W",
    "registers": "s{16}d{4}W+A{8}E{32}Ws{8}d{4}W",  # dk is waited for before dP, for whose registers it makes room
}


@pytest.mark.parametrize("dk_operand", LOOP_OF_DK_FROM)
@pytest.mark.parametrize("causal", thorough.cases([False, True], [False]))
def test_dq_a_step_later_spills_nothing_in_its_loop_and_its_products_overlap(causal, dk_operand):
    problem, gpu = BACKWARD.Problem(1, 4096, 4096, 4, 4, 128, causal=causal), aot.find("h200")
    config = BACKWARD.Config("fused", 64, 128, 3, 4, 24, "next", dk_operand=dk_operand)
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert report.serialized == ""
    assert report.spills < 128  # a few registers of a kv block, outside of the loop
    found = _order(report.sass)
    assert re.search(LOOP_OF_DK_FROM[dk_operand].replace(".", "[^L]"), found), found


@pytest.mark.parametrize("shares_sms", [False, True])
def test_products_of_the_backward_pass_overlap_where_a_block_has_two_tiles(shares_sms):
    problem, gpu = BACKWARD.Problem(1, 4096, 4096, 32, 8, 128, causal=True), aot.find("h200")
    config = BACKWARD.default(problem, gpu)
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    device = dataclasses.replace(gpu, shares_sms=shares_sms)
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, device, *x), *arrays)
    assert report.serialized == ""
    assert max(kernel.spill_stores for kernel in report.kernels) <= BACKWARD.spills_outside_loops(config)


def test_dq_leaves_ahead_of_the_exponentials_in_turns_too():
    problem, gpu = BACKWARD.Problem(1, 4096, 4096, 4, 4, 128, causal=True, deterministic=True), aot.find("h200")
    config = BACKWARD.Config("fused", 64, 128, 3, 8, 24, "next", "apart")
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert report.serialized == ""
    assert re.search("s{16}d{4}W+A{8}", _order(report.sass)), _order(report.sass)


@pytest.mark.parametrize("deterministic", thorough.cases([False, True], [True]))
def test_dq_a_step_later_at_head_dim_64_starts_the_scores_of_both_halves_first_and_overlaps(deterministic):
    problem, gpu = BACKWARD.Problem(1, 4096, 4096, 4, 4, 64, causal=True, deterministic=deterministic), aot.find("h200")
    config = BACKWARD.Config("fused", 128, 128, 3, 4, 24, "next", "apart")
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert report.serialized == ""
    # Of a step: scores of both halves, dq and dk, of which the first exponentials wait for the scores alone.
    found = re.sub("[LE]", "", _order(report.sass))
    assert re.search("s{24}W", found), found


@pytest.mark.parametrize(
    "how", thorough.cases(["two places", "handed out", "handed out, two places"], ["handed out, two places"])
)
def test_places_for_kv_blocks_and_handing_them_out_leave_the_loops_as_they_are(how):
    gpu, slots = aot.find("h200"), 1 + ("two places" in how)
    problem = BACKWARD.Problem(32, 512, 512, 12, 12, 64, lengths="handed out" in how)
    config = BACKWARD.Config("fused", 128, 128, 3, 4, 24, "next", "apart", kv_slots=slots)
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert report.serialized == ""
    assert max(kernel.spill_stores for kernel in report.kernels) <= BACKWARD.spills_outside_loops(config)
    found = re.sub("[LE]", "", _order(report.sass))
    assert re.search("s{24}W", found), found


def test_ptxas_has_no_registers_for_two_places_with_lengths_and_q_blocks_together():
    gpu, problem = aot.find("h200"), BACKWARD.Problem(4, 512, 512, 12, 12, 64, lengths=True)
    config = BACKWARD.Config("fused", 128, 128, 3, 4, 24, "next", "together", kv_slots=2)
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert "insufficient register resources" in report.serialized  # so `check` refuses it
    assert BACKWARD.check(problem, config, gpu) is not None


def _order(sass: str) -> str:
    """Products with 64 columns (s), with 128 (d), waits (W), exponentials (E), additions to dq (A), loads after a spill (L)."""
    found = re.findall(r"HGMMA\.64x64|HGMMA\.64x128|WARPGROUP\.DEPBAR|MUFU\.EX2|REDG|LDL", sass)
    names = {"HGMMA.64x64": "s", "HGMMA.64x128": "d", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "E", "REDG": "A", "LDL": "L"}
    return "".join(names[op] for op in found)


def gradients_of(problem: Any) -> list[collections.Counter[tuple[int, int]]]:
    """How many products of which (columns, depth) each backward kernel has that multiplies. Their loops do not spill."""
    gpu = aot.find("h200")
    config = BACKWARD.default(problem, gpu)
    arrays = jax.eval_shape(lambda key: BACKWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: BACKWARD.run(problem, config, gpu, *x), *arrays)
    assert report.spills < 256  # a few registers of a kv block, outside of the loops
    assert report.serialized == ""
    return [
        collections.Counter((int(n), int(k)) for n, k in re.findall(r"HGMMA\.64x(\d+)x(\d+)\.F32", kernel.sass))
        for kernel in sorted(report.kernels, key=lambda kernel: kernel.name)
        if "HGMMA" in kernel.sass
    ]


def test_gradients_multiply_the_true_head_dim():
    """In each of two loops: scores and dP, 64 columns of 6 steps each; dk and dv; dq's two shares of 64 and 32 columns."""
    (found,) = gradients_of(BACKWARD.Problem(4, 4096, 4096, 32, 32, 96))
    assert found == {(64, 16): 2 * (6 + 6 + 8), (96, 16): 2 * (4 + 4), (32, 16): 2 * 8}
