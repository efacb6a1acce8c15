"""gated_grouped_matmul of 8-bit floats: the kernel in the interpreter and compiled, and the public function beside float64."""

from __future__ import annotations

import functools
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GatedGroupedMatmulProblem, gated_grouped_matmul, quantize, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.gated import smem_bytes
from mgpu_ops.grouped.gated.problem import of_one
from tests import thorough
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.test_grouped_fp8 import BASE, HALVES, TWO
from tests.mgpu_ops.interpreter import FEW_SMS, quiet_interpreter

OP, H200 = spec_of("gated_grouped_matmul"), gpu.find("h200")
E4M3, E5M2, F32 = "float8_e4m3fn", "float8_e5m2", jnp.float32


def P(m: int, n: int, k: int, groups: int, **fields: Any) -> GatedGroupedMatmulProblem:
    return GatedGroupedMatmulProblem(m, n, k, groups, **{"dtype": E4M3, "layout": "nt", **fields})


CASES: dict[str, tuple[Any, Any, tuple[int, ...]]] = {
    "no scales, tails of all sides": (P(150, 72, 144, 4), BASE, (33, 0, 71, 1)),
    "scales of operands, gelu, weights of e5m2": (
        P(150, 72, 256, 4, scales="tensor", activation="gelu", rhs_dtype=E5M2),
        replace(BASE, tile_k=256),
        (-7, 40, 2**31 - 1, 5),
    ),
    "scales of rows and columns, rows shared": (P(150, 72, 272, 4, scales="row"), TWO, (33, 0, 71, 1)),
    "scales of blocks, ragged k, handed out": (
        P(150, 136, 272, 3, scales="block"),
        replace(BASE, schedule="dynamic"),
        (40, 0, 90),
    ),
    "scales of blocks, columns shared, a shard, float32": (
        P(150, 192, 256, 2, scales="block", group_offset=True, out_dtype="float32"),
        replace(HALVES, epilogue_tile_n=32),
        (65, 30, 20),
    ),
    "scales of blocks, rows shared": (P(150, 136, 256, 2, scales="block"), replace(TWO, tile_k=256), (90, 60)),
}
IN_ALL = CASES.keys() - {"scales of rows and columns, rows shared", "scales of blocks, ragged k, handed out"}


def arrays_of(problem: Any, sizes: Any) -> list[Any]:
    arrays = list(OP.inputs(problem, jax.random.key(0)))
    arrays[3] = jnp.array(sizes, jnp.int32)
    return arrays


def truth(problem: Any, lhs: Any, gate: Any, up: Any, sizes: Any, *scales: Any) -> np.ndarray:
    start, *sizes = np.asarray(sizes) if problem.group_offset else (0, *np.asarray(sizes))
    of_lhs, *others = scales or (None, None, None)
    both = [
        ragged.grouped(lhs, w, sizes, start=int(start), transpose_rhs=True, scale_lhs=of_lhs, scale_rhs=scale)
        for w, scale in zip((gate, up), others, strict=True)
    ]
    return ragged.ACTIVATIONS[problem.activation](both[0]) * both[1]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_reads_no_other_rows_and_has_no_race(name, assert_near):
    problem, config, sizes = CASES[name]
    assert OP.check(problem, config, FEW_SMS) is None
    arrays = arrays_of(problem, sizes)
    nowhere = ragged.rest(problem_like(problem), sizes)
    arrays[0] = jnp.where(jnp.asarray(nowhere)[:, None], jnp.nan, arrays[0].astype(F32)).astype(arrays[0].dtype)
    with quiet_interpreter():
        out = jax.jit(functools.partial(OP.run, problem, config, FEW_SMS, interpret=True))(*arrays)
        out = np.asarray(jax.block_until_ready(out)).astype(np.float64)
    assert (out[nowhere] == 0).all()
    assert_near(out[~nowhere], truth(problem, *arrays)[~nowhere], 8e-3 if problem.out_dtype == "bfloat16" else 1e-5)
    assert not engine.races_found()


def problem_like(problem: Any) -> Any:
    return of_one(problem)


needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))


@needs_compiler
@pytest.mark.parametrize("scales", thorough.cases(["none", "tensor", "row", "block"], ["none", "tensor", "row", "block"]))
def test_defaults_compile_without_spills_into_the_shared_memory_that_is_counted(scales):
    for m, n, k, groups in ((4096, 2048, 7168, 32), (128, 2048, 7168, 32)):
        problem = P(m, n, k, groups, scales=scales)
        config = OP.default(problem, H200)
        arrays = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
        report = aot.compile_for(H200, functools.partial(OP.run, problem, config, H200), *arrays)
        assert (report.spills, report.serialized) == (0, "")
        assert report.smem_bytes == smem_bytes(problem, config)


@pytest.mark.parametrize("kinds", [("tensor", "tensor"), ("row", "row"), ("block", "square")])
def test_quantized_arrays_give_the_layer_of_what_they_were(kinds):
    x, *weights = (jax.random.normal(jax.random.key(i), s, F32) for i, s in enumerate([(40, 256), (2, 48, 256), (2, 48, 256)]))
    sizes = jnp.array([25, 10])
    of_x, of_w = kinds
    (x8, scale_lhs), (gate8, scale_gate), (up8, scale_up) = quantize(x, of_x), *(quantize(w / 16, of_w) for w in weights)
    scales = {"scale_lhs": scale_lhs, "scale_gate": scale_gate, "scale_up": scale_up}
    out = gated_grouped_matmul(x8, gate8, up8, sizes, **scales, transpose_w=True)
    assert out.dtype == jnp.bfloat16
    wanted = gated_grouped_matmul(x, *(w / 16 for w in weights), sizes, transpose_w=True)
    error = out.astype(F32) - wanted
    assert 0 < float(jnp.sqrt((error**2).mean()) / jnp.std(wanted)) < 0.1


def small() -> Any:
    lhs, gate, up, sizes, *scales = arrays_of(P(24, 16, 32, 3, scales="row"), [5, 0, 11])
    return (lhs, gate, up, sizes), dict(zip(("scale_lhs", "scale_gate", "scale_up"), scales))


def test_there_is_no_gradient():
    arrays, scales = small()
    with pytest.raises(ValueError, match="has no gradient: 8 bits without a scale"):
        jax.grad(lambda s: gated_grouped_matmul(*arrays, **(scales | {"scale_up": s}), transpose_w=True).sum())(
            scales["scale_up"]
        )


def test_vmap_maps_rows_with_their_scales():
    (lhs, gate, up, sizes), scales = small()
    f = lambda lhs, scale: gated_grouped_matmul(  # noqa: E731
        lhs, gate, up, sizes, **(scales | {"scale_lhs": scale}), transpose_w=True
    )
    each = jnp.stack([lhs, lhs[::-1]]), jnp.stack([scales["scale_lhs"], scales["scale_lhs"] * 2])
    out = jax.vmap(f)(*each)
    for i in range(2):
        np.testing.assert_allclose(out[i].astype(F32), f(each[0][i], each[1][i]).astype(F32), rtol=1e-2)


def test_what_no_call_can_be_is_told():
    (lhs, gate, up, sizes), scales = small()
    call = functools.partial(gated_grouped_matmul, transpose_w=True)
    with pytest.raises(ValueError, match=r"scale_up .*kind 'tensor': both have one kind"):
        call(lhs, gate, up, sizes, scale_lhs=jnp.ones(()), scale_gate=scales["scale_gate"], scale_up=jnp.ones(3))
    with pytest.raises(ValueError, match="w_gate is float8_e4m3fn and w_up is float8_e5m2: both have one dtype"):
        call(lhs, gate, up.astype(E5M2), sizes)
    with pytest.raises(ValueError, match=r"scale_up \(5,\)"):
        call(lhs, gate, up, sizes, scale_up=jnp.ones(5))
    assert "store the weights as [groups, n, k] (transpose_w=True)" in OP.supports(P(64, 64, 64, 2, layout="nn"), H200)
