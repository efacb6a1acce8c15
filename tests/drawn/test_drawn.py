"""The campaigns of drawn calls: they find what is wrong, and a few of their calls."""

from __future__ import annotations

import itertools
import os
import subprocess
import sys
from pathlib import Path

import jax
import ml_dtypes
import numpy as np
import pytest

from mgpu_ops import SPECS
from mgpu_ops.core import gpu
from tests.drawn import campaign, nonsense, ops, sharded
from tests.drawn.case import Wanted
from tests.mgpu_ops.interpreter import quiet_interpreter
from tests.thorough import only_in_all

ROOT = Path(__file__).parents[2]
NUMBERS = np.random.default_rng(0).standard_normal((40, 60))
QUICK = ("matmul", "quantize", "ragged_contraction")


def changed(at: object, to: float) -> np.ndarray:
    out = NUMBERS.copy()
    out[at] = to
    return out


@pytest.mark.parametrize(
    ("runs", "kind"),
    [
        ([NUMBERS, NUMBERS], "ok"),
        ([NUMBERS + 1e-4, NUMBERS + 1e-4], "ok"),
        ([NUMBERS, NUMBERS + 1e-12], "differs"),
        ([NUMBERS, changed((3, 4), np.nan)], "wrong"),
        ([changed((3, 4), 9.0)] * 2, "wrong"),
        ([changed(slice(7, 8), 0.0)] * 2, "wrong"),
        ([NUMBERS[:, :30]] * 2, "wrong"),
    ],
)
@pytest.mark.parametrize("by", ["largest", "norm"])
def test_what_is_wrong_is_found(runs: list[np.ndarray], kind: str, by: str) -> None:
    wanted = (Wanted("out", NUMBERS, 1e-3, by),)
    assert campaign.judge(wanted, [[x] for x in runs], True)[0] == kind
    if kind == "differs":
        assert campaign.judge(wanted, [[x] for x in runs], False)[0] == "ok"


def test_a_nan_that_is_wanted_is_right_and_zeros_are_held_against_a_floor() -> None:
    nan = (Wanted("out", changed((3, 4), np.nan), 1e-3),)
    assert campaign.judge(nan, [[nan[0].value]] * 2, True)[0] == "ok"
    assert campaign.judge(nan, [[NUMBERS]], True)[0] == "wrong"
    zeros = (Wanted("out", np.zeros(9), 0.1, floor=0.01),)
    assert [campaign.judge(zeros, [[np.full(9, x)]], True)[0] for x in (1e-4, 1e-2)] == ["ok", "wrong"]


def test_numbers_of_8_bits_may_be_rounded_to_their_other_neighbour_where_that_is_rare() -> None:
    values = NUMBERS.astype(ml_dtypes.float8_e4m3fn)
    wanted = (Wanted("values", values, 1e-4, "neighbours"),)
    bits = values.view(np.uint8)
    for count, kind in ((0, "ok"), (1, "ok"), (9, "wrong")):
        other = bits.copy()
        other.flat[:count] += 1
        assert campaign.judge(wanted, [[other.view(values.dtype)]], True)[0] == kind
    assert campaign.judge(wanted, [[changed((3, 4), 9.0)]], True)[0] == "wrong"


def test_where_float32_decides_either_number_of_8_bits_is_right() -> None:
    values = NUMBERS.astype(ml_dtypes.float8_e4m3fn)
    next_up = (values.view(np.uint8) + 1).view(values.dtype)
    near = np.arange(60) < 30  # columns
    wanted = (Wanted("values", values, 1e-4, "neighbours", either=np.where(near, next_up, values)),)
    assert campaign.judge(wanted, [[np.where(near, next_up, values)]], True)[0] == "ok"
    assert campaign.judge(wanted, [[next_up]], True)[0] == "wrong"


def test_the_values_of_quantize_that_float32_decides_are_those_near_the_middle() -> None:
    x = np.array([[1.5, 17.0, 19.0, 17.0 * (1 + 2.0**-23), 17.01]] * 16, np.float32)  # 17 and 19: between 16, 18 and 20
    problem = SPECS["quantize"].Problem(16, 16, "float32")
    values = x.astype(ml_dtypes.float8_e4m3fn)
    wanted = tuple(Wanted("", y, 1e-4, "neighbours") for y in (values, values.T))
    found = ops.near_the_middle(problem, (x, np.float32(1)), wanted)
    np.testing.assert_array_equal(found[0].either[0].astype(float), [1.5, 18, 18, 16, 18])
    np.testing.assert_array_equal(found[1].either.astype(float), found[0].either.T.astype(float))


def test_a_floor_may_be_of_each_row() -> None:
    wanted = (Wanted("out", np.zeros((2, 3)), 0.1, floor=np.array([[1.0], [0.01]])),)
    off = np.zeros((2, 3))
    for row, kind in ((0, "ok"), (1, "wrong")):
        out = off.copy()
        out[row] = 0.05
        assert campaign.judge(wanted, [[out]], True)[0] == kind


def test_every_kind_comes_and_seeds_go_on() -> None:
    drawn = list(itertools.islice(campaign.names(5, None), 2 * sum(campaign.WEIGHTS.values())))
    assert {name.split(":")[0] for name in drawn} == set(campaign.WEIGHTS) == set(campaign.drawers())
    assert len(set(drawn)) == len(drawn)
    assert list(itertools.islice(campaign.names(5, ["rotary"]), 3)) == ["rotary:5", "rotary:6", "rotary:7"]


@pytest.mark.parametrize("op", [op if op in QUICK[:2] else pytest.param(op, marks=only_in_all) for op in campaign.WEIGHTS])
def test_a_call_of_each_kind_is_drawn_alike_and_right_where_it_is_interpreted(op: str) -> None:
    draw = campaign.drawers()[op]
    case, again = (draw(1, gpu.find("h200"), True) for _ in range(2))
    assert case.label == again.label
    for x, y in zip(case.arrays, again.arrays, strict=True):
        np.testing.assert_array_equal(x.view(np.uint8), y.view(np.uint8))
    with quiet_interpreter():
        out = [np.asarray(x) for x in jax.tree.leaves(jax.jit(case.function("interpret"))(*case.arrays))]
    assert campaign.judge(case.wanted, [out], case.repeats)[0] == "ok"


@pytest.mark.filterwarnings("ignore")
def test_the_good_calls_of_all_functions_are_good() -> None:
    found = {f"{name} {i}": nonsense.outcome(name, x) for name, calls in nonsense.good().items() for i, x in enumerate(calls)}
    assert {name: text for name, (kind, text) in found.items() if kind != "accepted"} == {}


@pytest.mark.filterwarnings("ignore")  # of float64, which JAX takes as float32
@pytest.mark.parametrize("function", [f if f in QUICK else pytest.param(f, marks=only_in_all) for f in nonsense.good()])
def test_nonsense_is_told_by_name(function: str) -> None:
    found = {what: nonsense.outcome(function, arguments) for what, arguments in nonsense.calls(function)}
    assert {what: text for what, (kind, *text) in found.items() if kind not in ("told", "accepted")} == {}
    assert sum(kind == "told" for kind, *_ in found.values()) > 0.5 * len(found)


@pytest.mark.parametrize("seed", [1, 3])
def test_calls_of_sharded_arrays(seed: int) -> None:
    if jax.device_count() != 8:
        pytest.skip("needs the eight CPU devices of the tests")
    kind, what = sharded.run(seed)
    assert kind == "ok", what


@pytest.mark.gpu
def test_drawn_calls_are_right_and_the_same_each_time() -> None:
    command = [sys.executable, "-m", "tests.drawn.campaign", "--calls", "60", "--seconds", "400"]
    found = subprocess.run(command, cwd=ROOT, env=os.environ | {"PYTHONPATH": str(ROOT)}, capture_output=True, text=True)
    assert found.returncode == 0, found.stdout[-4000:] + found.stderr[-2000:]
    assert "60 ok" in found.stdout
