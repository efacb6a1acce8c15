"""The gated gradient, a grouped matmul whose epilogue makes four results: beside float64, interpreted and compiled."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulProblem, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.grouped_matmul.problem import by_name, smem_bytes
from tests import thorough
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE, needs_compiler
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter

SPEC = spec_of("grouped_matmul")
H200 = gpu.find("h200")
P = functools.partial(GroupedMatmulProblem, layout="nt", row_scale=True, gated_gradient=True, activation="silu")
TWO = replace(BASE, tile_m=128, tile_n=128, compute_warpgroups=2)


def operands(problem: Any, sizes: Any) -> list[Any]:
    """The op's inputs with these sizes, and NaN in the rows of no group."""
    arrays = [np.asarray(x) for x in SPEC.inputs(problem, jax.random.key(0))]
    outside = ragged.rest(problem, sizes)
    for i, x in enumerate(arrays):
        if x.shape[0] == problem.m:
            arrays[i] = np.where(outside.reshape(-1, *[1] * (x.ndim - 1)), np.nan, x).astype(x.dtype)
    arrays[2] = np.array(sizes, np.int32)
    return arrays


def truth(problem: Any, sizes: Any, g: Any, w_down: Any, _: Any, *rest: Any) -> tuple[np.ndarray, ...]:
    """The four results in float64, by JAX's own derivative of the activation."""
    p = problem
    start, *groups = sizes if p.group_offset else (0, *sizes)
    u = ragged.grouped(g, w_down, groups, start=start, transpose_rhs=True)
    extra = {name: np.nan_to_num(ragged.float64(x)) for name, x in by_name(p, rest).items()}
    scale, gate, up = extra["row_scale"][:, None], extra["gate"], extra["up"]
    activated = ragged.ACTIVATIONS[p.activation](gate)
    step = 1e-6
    slope = (ragged.ACTIVATIONS[p.activation](gate + step) - ragged.ACTIVATIONS[p.activation](gate - step)) / (2 * step)
    values = scale * u * up * slope, scale * u * activated, scale * activated * up, (u * activated * up).sum(axis=1)
    outside = ragged.rest(p, sizes)
    return tuple(np.where(outside.reshape(-1, *[1] * (x.ndim - 1)), 0, x) for x in values)


def assert_right(problem: Any, sizes: Any, outs: Any, arrays: Any, assert_near: Any) -> None:
    outside = ragged.rest(problem, sizes)
    for out, value in zip(outs, truth(problem, sizes, *arrays), strict=True):
        np.testing.assert_array_equal(np.asarray(out)[outside], 0)
        assert_near(out, value, 1e-3 if value.ndim == 1 else SPEC.tolerance(problem)) if value.any() else None


ODD, WILD = (33, 0, 71, 1), (-7, 40, 2**31 - 1, 5)
CASES: dict[str, tuple[Any, Any, Any]] = {
    "tails, one warpgroup": (P(150, 72, 72, 4), BASE, (ODD, (0, 0, 0, 0))),
    "two warpgroups, two columns of tiles, gelu": (P(150, 192, 72, 4, activation="gelu"), TWO, (ODD, WILD)),
    "steps of 128, shard, float16, ring of two": (
        P(150, 136, 128, 3, "float16", "float16", group_offset=True),
        replace(TWO, tile_n=64, tile_k=128, epilogue_slots=1, max_concurrent_steps=3),
        ((33, 1, 0, 71),),
    ),
    "tall tiles of one warpgroup": (P(150, 64, 64, 4), replace(BASE, tile_m=128, tile_n=128, epilogue_slots=4), (ODD,)),
}


@pytest.mark.parametrize("name", thorough.cases(CASES, [name for name in CASES if "shard" not in name]))
def test_kernel_is_right_for_all_sizes_and_has_no_race(name, assert_near):
    problem, config, all_sizes = CASES[name]
    assert SPEC.check(problem, config, FEW_SMS) is None
    run = jax.jit(functools.partial(SPEC.run, problem, config, FEW_SMS, interpret=True))
    for sizes in all_sizes:
        arrays = operands(problem, sizes)
        with quiet_interpreter():
            outs = run(*arrays)
        assert not engine.races_found()
        assert_right(problem, sizes, outs, arrays, assert_near)


def test_through_xla_it_is_the_same(assert_near):
    problem = P(72, 40, 24, 3, group_offset=True)
    arrays = operands(problem, (5, 30, 0, 33))
    assert_right(problem, (5, 30, 0, 33), SPEC.reference(problem, *map(jnp.asarray, arrays)), arrays, assert_near)


@needs_compiler
def test_default_compiles_without_spills_into_the_bytes_that_check_counts():
    problem = P(8192, 1280, 2560, 8)
    config = SPEC.default(problem, H200)
    assert (config.tile_k, config.max_concurrent_steps) == (64, 4)
    arrays = jax.eval_shape(functools.partial(SPEC.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(SPEC.run, problem, config, H200), *arrays)
    assert report.smem_bytes == smem_bytes(problem, config)
    assert (report.spills, report.serialized) == (0, "")


@pytest.mark.parametrize(
    ("problem", "config", "reason"),
    [
        (P(150, 72, 72, 4, layout="nn"), BASE, "has layout 'nt', a row_scale, no bias"),
        (P(150, 72, 72, 4, row_scale=False), BASE, "has layout 'nt', a row_scale, no bias"),
        (P(150, 72, 72, 4, out_dtype="float32"), BASE, "out_dtype float32 is not bfloat16: gradients have the inputs' dtype"),
        (P(150, 128, 72, 4), replace(TWO, tile_m=64, wg_dimension="n"), "wg_dimension must be 'm'"),
        (P(150, 128, 128, 4), replace(TWO, epilogue_tile_n=128), "epilogue_tile_n=128 must be 64 for a gated gradient"),
        (
            P(150, 72, 72, 4),
            replace(TWO, tile_n=64),
            "tile_n=64 must be at least tile_m=128 with tile_k=64: up lies where rhs did",
        ),
    ],
)
def test_check_says_why_a_config_cannot_run(problem, config, reason):
    assert reason in str(SPEC.check(problem, config, H200))
