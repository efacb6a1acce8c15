"""grouped_matmul of 8-bit floats: the kernel in the interpreter, the public function beside float64, and which problems run.

As in `test_grouped_interpret.py`, rows of no group and matrices of empty groups are NaN, with their scales.
"""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops import GroupedMatmulConfig, GroupedMatmulProblem, RaggedContractionProblem, grouped_matmul, quantize, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.grouped.config import smem_bytes
from mgpu_ops.grouped.grouped_matmul import Call, sum_of_two
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
    "two products, scales of operands": (P(150, 72, 272, 4, second=True, scales="tensor"), TWO, (ODD, WILD)),
    "two products without scales, e5m2 and e4m3, columns shared, float32 out": (
        replace(P(150, 136, 144, 4, second=True, out_dtype="float32"), dtype=E5M2, rhs_dtype=E4M3),
        replace(HALVES, epilogue_tile_n=32),
        (ODD, (0, 0, 0, 0)),
    ),
    "two products, scales of operands, handed out, steps of 256": (
        P(150, 200, 512, 4, second=True, scales="tensor", rhs_dtype=E5M2),
        replace(LONG, schedule="dynamic"),
        (ODD,),
    ),
    "scales of blocks, 192 columns, handed out": (
        P(150, 200, 128, 4, scales="block"),
        replace(TWO, tile_n=192, schedule="dynamic"),
        (ODD,),
    ),
}
IN_ALL = [
    "no scales, tails in m, n and k",
    "two products, scales of operands, handed out, steps of 256",
    "scales of blocks, 192 columns, handed out",
]


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


@pytest.mark.parametrize("seed", thorough.seeds(1, 6))
def test_random_legal_config_is_right_and_has_no_race(seed, assert_grouped):
    rng = random.Random(seed)
    sides = rng.randint(1, 200), 8 * rng.randint(1, 30), 16 * rng.randint(1, 20), 4
    scales = rng.choice(["none", "tensor", "row", "block"])
    second = scales in ("none", "tensor") and rng.random() < 0.5
    problem = P(*sides, scales=scales, rhs_dtype=rng.choice([E4M3, E5M2]), second=second)
    space = GROUPED.space(problem, FEW_SMS)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    config = next(c for c in drawn if GROUPED.check(problem, c, FEW_SMS) is None)
    sizes = np.random.default_rng(seed).multinomial(rng.randint(0, sides[0]), np.ones(4) / 4)
    assert_right(problem, config, (sizes.tolist(),), assert_grouped)


# --- the public function

SIZES = (40, 0, 60, 21)


@pytest.fixture(scope="module")
def arrays() -> tuple[jax.Array, jax.Array]:
    keys = jax.random.split(jax.random.key(0))
    return jax.random.normal(keys[0], (130, 272), jnp.bfloat16), jax.random.normal(keys[1], (4, 200, 272), jnp.bfloat16)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
@pytest.mark.parametrize(("of_x", "of_w"), [("tensor", "tensor"), ("row", "row"), ("block", "square")])
def test_quantized_arrays_give_the_product_of_the_numbers_that_they_stand_for(of_x, of_w, backend, arrays):
    if (backend, of_x) == ("interpret", "tensor"):
        pytest.skip("repeats the kernel's own test")
    (x8, scale_lhs), (w8, scale_rhs) = quantize(arrays[0], of_x), quantize(arrays[1], of_w)
    out = grouped_matmul(x8, w8, SIZES, scale_lhs=scale_lhs, scale_rhs=scale_rhs, transpose_rhs=True, backend=backend)
    assert out.dtype == jnp.bfloat16
    square = scale_rhs.reshape(1) if of_w == "tensor" else scale_rhs
    wanted = ragged.grouped(x8, w8, SIZES, transpose_rhs=True, scale_lhs=scale_lhs, scale_rhs=square)
    np.testing.assert_allclose(ragged.float64(out), wanted, atol=0.02 * np.abs(wanted).max())


def test_one_scale_for_each_group_and_numbers_beside_other_scales(arrays):
    (x8, scale), (w8, of_rows) = quantize(arrays[0], "tensor"), quantize(arrays[1], "row")
    of_groups = jnp.array([1.0, 2.0, 0.5, 4.0])
    plain = ragged.grouped(x8, w8, SIZES, transpose_rhs=True)
    factors = np.zeros((130, 1))
    factors[: sum(SIZES), 0] = np.repeat(np.asarray(of_groups), SIZES)
    run = functools.partial(grouped_matmul, x8, w8, SIZES, transpose_rhs=True, out_dtype="float32")
    for given, wanted in (
        ({"scale_rhs": of_groups}, plain * factors),
        ({"scale_lhs": scale, "scale_rhs": of_groups}, plain * factors * float(scale)),
        ({"scale_lhs": 0.5}, plain * 0.5),
    ):
        np.testing.assert_allclose(run(**given), wanted, rtol=1e-4, atol=1e-3)
    mixed = run(scale_lhs=scale, scale_rhs=of_rows)
    np.testing.assert_array_equal(run(scale_lhs=np.float32(scale), scale_rhs=np.asarray(of_rows)), mixed)
    ones = np.ones(len(x8), np.float32)
    np.testing.assert_array_equal(run(scale_lhs=ones), run(scale_lhs=jnp.asarray(ones)))
    wanted = ragged.grouped(x8, w8, SIZES, transpose_rhs=True, scale_lhs=np.full(1, scale), scale_rhs=of_rows)
    np.testing.assert_allclose(mixed, wanted, rtol=1e-4, atol=1e-3)


def test_shards_add_up_and_vmap_maps_scales(arrays):
    (x8, scale_lhs), (w8, scale_rhs) = quantize(arrays[0], "block"), quantize(arrays[1], "square")
    run = functools.partial(grouped_matmul, transpose_rhs=True, out_dtype="float32")
    whole = run(x8, w8, SIZES, scale_lhs=scale_lhs, scale_rhs=scale_rhs)
    parts = [run(x8, w8[i : i + 2], SIZES, scale_lhs=scale_lhs, scale_rhs=scale_rhs[i : i + 2], group_offset=i) for i in (0, 2)]
    np.testing.assert_array_equal(sum(parts), whole)
    both = jax.vmap(lambda s: run(x8, w8, jnp.array(SIZES), scale_lhs=s, scale_rhs=scale_rhs))(
        jnp.stack([scale_lhs, 2 * scale_lhs])
    )
    np.testing.assert_allclose(both, np.stack([whole, 2 * np.asarray(whole)]), rtol=1e-5, atol=1e-4)


@pytest.mark.parametrize("backend", ["xla", "interpret"])
def test_the_sum_of_two_is_that_of_both_products_rounded_once(backend, arrays):
    """As in `fp8_moe`: scales of both pairs are the same, and rows of no group are zeros."""
    x, w = arrays
    pairs = (x.astype(E5M2), w.astype(E4M3)), ((-2 * x[::-1]).astype(E5M2), w[::-1].astype(E4M3))
    scale_lhs, scale_rhs = jnp.full(1, 0.5), jnp.array([1.0, 2.0, 0.5, 0.25])
    call = Call(True, "bfloat16", "none", "random", None, backend, scales="tensor")
    (lhs, rhs), (lhs2, rhs2) = pairs
    with quiet_interpreter():
        out = sum_of_two(call, lhs, rhs, jnp.array(SIZES, jnp.int32), lhs2, rhs2, scale_lhs, scale_rhs)
    of = {"transpose_rhs": True, "scale_lhs": scale_lhs, "scale_rhs": scale_rhs}
    wanted = sum(ragged.grouped(*pair, SIZES, **of) for pair in pairs)
    assert out.dtype == jnp.bfloat16
    np.testing.assert_allclose(ragged.float64(out), wanted, atol=0.01 * np.abs(wanted).max())
    np.testing.assert_array_equal(ragged.float64(out)[sum(SIZES) :], 0)


def test_gradient_of_8_bits_names_the_op_that_has_one(arrays):
    x8, w8 = (x.astype(E4M3) for x in arrays)
    with pytest.raises(ValueError, match="fp8_grouped_matmul"):
        jax.grad(lambda s: grouped_matmul(x8, w8, SIZES, scale_lhs=s, transpose_rhs=True).astype("float32").sum())(1.0)


def test_wrong_scales_and_dtypes_are_told(arrays):
    x8, w8 = (x.astype(E4M3) for x in arrays)
    with pytest.raises(ValueError, match=r"scale_lhs has shape \(131,\).*\(130,\) and \(4, 200\)"):
        grouped_matmul(x8, w8, SIZES, scale_lhs=jnp.ones(131), transpose_rhs=True)
    with pytest.raises(ValueError, match="lhs is bfloat16 and rhs is float8_e4m3fn"):
        grouped_matmul(arrays[0], w8, SIZES, transpose_rhs=True)
    with pytest.raises(TypeError, match="scale_rhs"):
        grouped_matmul(x8, w8, SIZES, scale_rhs="4", transpose_rhs=True)


TWO_IN_ONE = "two products of 8-bit floats are added up in one with scales of operands, which both share"


@pytest.mark.parametrize(
    ("problem", "reason"),
    [
        (P(64, 64, 128, 2, layout="nn"), "wgmma reads them along k only; store rhs as"),
        (P(64, 64, 72, 2), "k=72 needs 16-byte rows of lhs"),
        (P(64, 64, 128, 2, scales="column"), "scales='column' is not one of"),
        *((P(64, 64, 128, 2, second=True, scales=scales), f"{TWO_IN_ONE}, not scales={scales}") for scales in ("row", "block")),
        (P(64, 64, 128, 2, out_dtype=E4M3), "out_dtype float8_e4m3fn is not one of"),
        (P(64, 64, 128, 2, rhs_dtype="bfloat16"), "lhs is float8_e4m3fn and rhs is bfloat16"),
        (GroupedMatmulProblem(64, 64, 128, 2, scales="row"), "scales='row' are of 8-bit floats"),
    ],
    ids=str,
)
def test_what_the_kernel_cannot_multiply_is_told(problem, reason):
    assert reason in GROUPED.supports(problem, H200)


def test_contraction_of_8_bits_is_told_to_cast():
    problem = RaggedContractionProblem(64, 64, 128, 2, E4M3)
    assert "cast both to bfloat16" in spec_of("ragged_contraction").supports(problem, H200)


def test_tiles_that_blocks_of_scales_cannot_have_are_told():
    problem = P(64, 256, 256, 2, scales="block")
    assert GROUPED.check(problem, BASE, H200) is None
    assert "tile_k=64" in GROUPED.check(problem, replace(BASE, tile_k=64), H200)
    assert "more spill" in GROUPED.check(problem, replace(BASE, tile_m=192), H200)
    wide = replace(TWO, tile_n=256)
    assert "accumulator takes 256 registers" in GROUPED.check(problem, wide, H200)
    assert GROUPED.check(replace(problem, scales="row"), wide, H200) is None


@ragged.needs_compiler
@pytest.mark.parametrize("scales", ["block", "row"])
def test_default_of_deepseek_compiles_without_spills(scales):
    problem = P(32768, 4096, 7168, 32, scales=scales)
    config = GROUPED.default(problem, H200)
    shapes = jax.eval_shape(functools.partial(GROUPED.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(GROUPED.run, problem, config, H200), *shapes)
    assert report.spills == 0
    assert report.smem_bytes == smem_bytes(problem, config, scales)
    assert "QGMMA" in report.sass
    assert "UBLKCP" not in report.sass  # plain copies begin at multiples of 16 bytes; scales begin anywhere


@ragged.needs_compiler
@pytest.mark.parametrize("sides", [(73600, 2560, 1280, 64), (1536, 256, 384, 8)], ids=str)
def test_two_products_in_one_compile_without_spills_and_without_waits_between_products(sides):
    problem = replace(P(*sides, scales="tensor", second=True), dtype=E5M2, rhs_dtype=E4M3)
    config = GROUPED.default(problem, H200)
    shapes = jax.eval_shape(functools.partial(GROUPED.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(GROUPED.run, problem, config, H200), *shapes)
    assert report.spills == 0
    assert report.serialized == ""
    assert report.smem_bytes == smem_bytes(problem, config, "tensor")
    assert "QGMMA" in report.sass
