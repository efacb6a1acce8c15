"""What ptxas makes of the forward kernel's loop: which waits for wgmma come before the exponentials, and which after."""

from __future__ import annotations

import dataclasses
import re

import jax
import pytest

from mgpu_ops import spec_of
from mgpu_ops.core import aot

pytestmark = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))

FORWARD = spec_of("flash_attention")


def loop_of(pv_wait: str) -> list[str]:
    """The waits and exponentials, in order, between the last two products with values: one pass of the loop over keys."""
    problem, gpu = FORWARD.Problem(1, 4096, 4096, 1, 1, 128), aot.find("h200")
    config = dataclasses.replace(FORWARD.default(problem, gpu), pv_wait=pv_wait)
    arrays = jax.eval_shape(lambda key: FORWARD.inputs(problem, key), jax.random.key(0))
    report = aot.compile_for(gpu, lambda *x: FORWARD.run(problem, config, gpu, *x), *arrays)
    assert (report.spills, report.serialized) == (0, "")
    (sass,) = [k.sass for k in report.kernels]
    found = re.findall(r"HGMMA|WARPGROUP\.DEPBAR|MUFU\.EX2", sass)
    passes = "".join({"HGMMA": "H", "WARPGROUP.DEPBAR": "W", "MUFU.EX2": "E"}[op] for op in found)
    loop = re.findall(r"H+([WE]+)", passes)  # first scores; the loop; the last products with values
    return [part for part in loop if part.count("E") > 10][1:]


def test_a_late_wait_for_the_products_with_values_comes_after_the_exponentials():
    (part,) = loop_of("late")
    assert re.fullmatch(r"WE+W", part), part  # the wait for the scores, the softmax, the wait for the products


def test_ptxas_moves_an_early_wait_ahead_of_the_exponentials():
    (part,) = loop_of("early")
    assert re.match(r"WW", part), part
