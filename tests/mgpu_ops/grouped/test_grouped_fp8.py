"""grouped_matmul of 8-bit floats: the kernel in the interpreter, the public function beside float64, and which problems run.

As in `test_grouped_interpret.py`, rows of no group and matrices of empty groups are NaN, with their scales.
"""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulProblem, spec_of
from mgpu_ops.core import engine, gpu
from tests import thorough
from tests.arrays import inputs
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter

GROUPED = spec_of("grouped_matmul")
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"
H200 = gpu.find("h200")


def P(m: int, n: int, k: int, groups: int, **fields: Any) -> GroupedMatmulProblem:
    return GroupedMatmulProblem(m, n, k, groups, E4M3, **{"layout": "nt", **fields})


BASE = replace(ragged.BASE, tile_k=128)
TWO = replace(BASE, tile_m=128, compute_warpgroups=2)
HALVES = replace(BASE, tile_n=128, compute_warpgroups=2, wg_dimension="n")
LONG = replace(TWO, tile_n=128, tile_k=256)

ODD, WILD = (33, 0, 71, 1), (-7, 40, 2**31 - 1, 5)
CASES: dict[str, tuple[Any, Any, tuple[Any, ...]]] = {
    "no scales, tails in m, n and k": (P(150, 72, 144, 4), BASE, (ODD, WILD)),
    "scales of operands, steps of 256, bias, silu": (
        P(150, 136, 256, 4, scales="tensor", bias=True, activation="silu"),
        replace(HALVES, tile_k=256),
        (ODD,),
    ),
    "scales of rows and columns, e5m2 weights, row scale": (
        P(150, 72, 272, 4, scales="row", rhs_dtype=E5M2, row_scale=True),
        TWO,
        (ODD, WILD),
    ),
    "scales of blocks, ragged k": (P(150, 200, 272, 4, scales="block"), BASE, (ODD, WILD)),
    "scales of blocks, e5m2 and e4m3, rows shared, steps of 256, bias, float32 out": (
        replace(P(300, 264, 512, 4, scales="block", bias=True, out_dtype="float32"), dtype=E5M2, rhs_dtype=E4M3),
        replace(LONG, epilogue_tile_n=32),
        ((280, 0, 2, 10),),
    ),
    "scales of blocks, columns shared, a shard": (
        P(150, 192, 256, 3, scales="block", group_offset=True, row_scale=True, activation="relu"),
        HALVES,
        ((65, 30, 1, 2), (2**31 - 1, 5, 5, 5)),
    ),
    "scales of blocks, 192 columns, handed out": (
        P(150, 200, 128, 4, scales="block"),
        replace(TWO, tile_n=192, schedule="dynamic"),
        (ODD,),
    ),
}
IN_ALL = ["no scales, tails in m, n and k", "scales of blocks, 192 columns, handed out"]


@functools.cache
def operands(problem: Any) -> tuple[np.ndarray, ...]:
    lhs, rhs, _, *extra = inputs(GROUPED, problem)
    return tuple(np.asarray(x) for x in (lhs, rhs, *extra))


def assert_right(problem: Any, config: Any, all_sizes: Any, assert_grouped: Any) -> None:
    assert GROUPED.check(problem, config, FEW_SMS) is None
    run = jax.jit(functools.partial(GROUPED.run, problem, config, FEW_SMS, interpret=True))
    for sizes in all_sizes:
        lhs, rhs, *extra = ragged.poisoned(problem, sizes, *operands(problem))
        with quiet_interpreter():
            out = run(lhs, rhs, np.array(sizes, np.int32), *extra).block_until_ready()
        assert not engine.races_found()
        assert_grouped(problem, sizes, out, lhs, rhs, *extra)


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_grouped):
    assert_right(*CASES[name], assert_grouped)
