"""grouped_matmul and ragged_contraction on a Hopper GPU: what the interpreter and the compiler cannot show.

Guards against reading or writing elsewhere: rows of no group and matrices of empty groups are NaN, and outputs are put between
arrays of NaN that must stay as they are.
"""

from __future__ import annotations

import contextlib
import functools
import random
from collections.abc import Callable, Iterator, Sequence
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import (
    GroupedMatmulConfig,
    GroupedMatmulProblem,
    RaggedContractionProblem,
    grouped_matmul,
    ragged_contraction,
    spec_of,
    use_configs,
)
from mgpu_ops.core import gpu
from mgpu_ops.tuning import measure
from tests.mgpu_ops.grouped import ragged
from tests.mgpu_ops.grouped.ragged import BASE, static

pytestmark = pytest.mark.gpu

GROUPED, CONTRACTION = spec_of("grouped_matmul"), spec_of("ragged_contraction")
P, R = GroupedMatmulProblem, RaggedContractionProblem
BF16, F32 = jnp.bfloat16, jnp.float32
OPS = pytest.mark.parametrize("spec", [GROUPED, CONTRACTION], ids=lambda spec: spec.name)


def spec_for(problem: Any) -> Any:
    return GROUPED if isinstance(problem, P) else CONTRACTION


def operands(problem: Any, seed: int = 0) -> tuple[np.ndarray, ...]:
    """lhs, rhs and perhaps a bias and a row scale."""
    lhs, rhs, _, *bias = spec_for(problem).inputs(problem, jax.random.key(seed))
    return tuple(np.asarray(x) for x in (lhs, rhs, *bias))


@contextlib.contextmanager
def between_guards(problem: Any) -> Iterator[None]:
    """Leaves holes of the output's size, full of NaN, between arrays of NaN: where an allocator puts the next output.

    An element left unwritten then shows in the output. At the end the arrays around the holes must be as they were.
    """
    shape = (problem.m, problem.n) if isinstance(problem, P) else (problem.groups, problem.k, problem.n)
    blocks = [jnp.full(shape, jnp.nan, problem.out_dtype) for _ in range(9)]
    jax.block_until_ready(blocks)
    for hole in blocks[1::2]:
        hole.delete()
    yield
    assert all(bool(jnp.isnan(guard).all()) for guard in blocks[::2])


def public(problem: Any, lhs: Any, rhs: Any, sizes: Any, *bias: Any, **kwargs: Any) -> jax.Array:
    if isinstance(problem, R):
        return ragged_contraction(lhs, rhs, sizes, out_dtype=problem.out_dtype, backend="mosaic", **kwargs)
    return grouped_matmul(
        lhs,
        rhs,
        sizes,
        bias=bias[0] if bias else None,
        activation=problem.activation,
        out_dtype=problem.out_dtype,
        transpose_rhs=problem.layout == "nt",
        backend="mosaic",
        **kwargs,
    )


def assert_right_for(
    problem: Any, run: Callable[..., jax.Array], all_sizes: Sequence[Sequence[int]], assert_grouped: Any, seed: int = 0
) -> None:
    """`run(lhs, rhs, sizes, *bias)`, compiled once, is right for each of the sizes, traced, with all guards."""
    clean = operands(problem, seed)
    arrays = [clean[:2] + (np.zeros(problem.groups + problem.group_offset, np.int32),) + clean[2:]]
    compiled = jax.jit(run).lower(*arrays[0]).compile()
    for sizes in all_sizes:
        lhs, rhs, *bias = ragged.poisoned(problem, sizes, *clean)
        on_gpu = jax.device_put((lhs, rhs, np.array(sizes, np.int32), *bias))
        jax.block_until_ready(on_gpu)
        with between_guards(problem):
            out = np.asarray(compiled(*on_gpu))
        assert_grouped(problem, sizes, out, lhs, rhs, *bias)


def drawn_sizes(rng: np.random.Generator, rows: int, groups: int) -> list[int]:
    """Sizes of any kind: many or few groups with rows, rows left over or not."""
    shares = rng.gamma(rng.choice([0.1, 1.0, 10.0]), size=groups) + 1e-9
    return rng.multinomial(rng.choice([rows, rng.integers(0, rows + 1)]), shares / shares.sum()).tolist()


def kinds_of_sizes(rows: int, groups: int) -> list[list[int]]:
    """One-hot at both ends, none, all equal, single rows, negative and too large ones, and random ones."""
    rng = np.random.default_rng(rows + groups)
    first, last = ([rows if i == hot else 0 for i in range(groups)] for hot in (0, groups - 1))
    wild = rng.choice([-(2**31), -1, 0, 1, 65, 2**31 - 1], size=groups).tolist()
    single = [1 if i < rows else 0 for i in range(groups)]
    even = [rows // groups] * groups
    return [first, last, [0] * groups, even, single, wild, *(drawn_sizes(rng, rows, groups) for _ in range(3))]


# --- values

SHAPES = [  # m, n, k, groups
    (1, 8, 8, 1),
    (1, 72, 200, 5),
    (7, 136, 64, 3),
    (64, 64, 64, 4),
    (129, 264, 136, 2),
    (201, 1000, 520, 7),
    (1000, 520, 1032, 13),
    (1111, 776, 1032, 5),
    (4097, 136, 72, 33),
    (300, 64, 64, 256),
    (2048, 256, 72, 256),
    (3, 1032, 128, 64),
    (512, 512, 4096, 4),
    (3000, 1024, 512, 8),
]


@OPS
@pytest.mark.parametrize("shape", SHAPES, ids=str)
def test_any_shape_is_right_for_all_kinds_of_sizes(spec, shape, assert_grouped):
    problem = spec.Problem(*shape)
    assert_right_for(problem, functools.partial(public, problem), kinds_of_sizes(problem.m, problem.groups), assert_grouped)


@pytest.mark.parametrize(
    ("bias", "activation"), [(False, "none"), (True, "none"), (True, "relu"), (False, "silu"), (True, "gelu")]
)
@pytest.mark.parametrize("layout", ["nn", "nt"])
@pytest.mark.parametrize(("dtype", "out_dtype"), [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32")])
def test_any_layout_dtype_and_epilogue_is_right(dtype, out_dtype, layout, bias, activation, assert_grouped):
    problem = P(530, 328, 200, 6, dtype, out_dtype, layout, bias, activation)
    all_sizes = [[100, 0, 3, 250, 64, 70], [0, 0, 530, 0, 0, 0]]
    assert_right_for(problem, functools.partial(public, problem), all_sizes, assert_grouped)


@pytest.mark.parametrize(
    ("dtype", "out_dtype"),
    [("bfloat16", "bfloat16"), ("float16", "float16"), ("bfloat16", "float32"), ("float16", "float32")],
)
def test_any_dtype_of_a_contraction_is_right(dtype, out_dtype, assert_grouped):
    for n, k in ((328, 200), (384, 256)):
        problem = R(530, n, k, 6, dtype, out_dtype)
        all_sizes = [[100, 0, 3, 250, 64, 70], [0, 0, 530, 0, 0, 0]]
        assert_right_for(problem, functools.partial(public, problem), all_sizes, assert_grouped)


def draw(spec: Any, seed: int, schedule: str | None = None) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it, of a schedule where one is named."""
    rng = random.Random(seed)
    unit = rng.choice([8, 64])
    n, k = (unit * rng.randint(1, 1000 // unit) for _ in "nk")
    dtype = rng.choice(["bfloat16", "float16"])
    problem = spec.Problem(rng.randint(1, 2000), n, k, rng.choice([1, 3, 8, 40]), dtype, rng.choice([dtype, "float32"]))
    if spec is GROUPED:
        activation = rng.choice(["none", "relu", "silu", "gelu"])
        problem = replace(problem, layout=rng.choice(["nn", "nt"]), bias=rng.random() < 0.5, activation=activation)
    device = gpu.current()
    space = dict(spec.space(problem, device)) | ({"schedule": [schedule]} if schedule else {})
    if schedule:  # what is kept has 16 bits
        problem = replace(problem, out_dtype=problem.dtype)
    drawn = (GroupedMatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if spec.check(problem, c, device) is None)


def launch(problem: Any, config: Any) -> Callable[..., jax.Array]:
    return functools.partial(spec_for(problem).run, problem, config, gpu.current())


@OPS
@pytest.mark.parametrize("seed", range(20))
def test_random_legal_config_is_right(spec, seed, assert_grouped):
    problem, config = draw(spec, seed)
    rng = np.random.default_rng(seed)
    all_sizes = [drawn_sizes(rng, problem.m, problem.groups) for _ in range(4)]
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)


@OPS
@pytest.mark.parametrize("seed", range(8))
def test_random_shard_and_row_scale_is_right(spec, seed, assert_grouped):
    problem, config = draw(spec, 100 + seed)
    more = {"row_scale": seed % 2 == 0, "second": seed % 3 == 0} if spec is GROUPED else {}
    problem = replace(problem, group_offset=seed % 4 != 3, **more)
    rng = np.random.default_rng(seed)
    all_sizes = [drawn_sizes(rng, problem.m, problem.groups + problem.group_offset) for _ in range(4)]
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)


TWO = replace(BASE, tile_m=128, tile_n=128, max_concurrent_steps=3, compute_warpgroups=2)
OTHERS = [
    {},
    {"tile_m": 256},
    {"tile_n": 256},
    {"tile_m": 64, "compute_warpgroups": 1},
    {"tile_m": 192, "tile_n": 64, "compute_warpgroups": 1},
    {"tile_n": 192, "wg_dimension": "m"},
    {"wg_dimension": "n"},
    {"wg_dimension": "n", "tile_m": 64},
    {"tile_k": 128},
    {"max_concurrent_steps": 2},
    {"raster_width": 1},
    {"epilogue_tile_n": 128},
    {"epilogue_slots": 2},
    {"compute_warpgroups": 1, "epilogue_slots": 4},
    {"memory_registers": 24},
]


@OPS
@pytest.mark.parametrize("fields", OTHERS, ids=str)
def test_config_never_changes_the_answer(spec, fields, assert_grouped):
    problem, config = spec.Problem(1000, 384, 256, 9), replace(TWO, **fields)
    assert spec.check(problem, config, gpu.current()) is None
    rng = np.random.default_rng(0)
    all_sizes = [drawn_sizes(rng, problem.m, problem.groups) for _ in range(2)]
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped)


@pytest.mark.parametrize("fields", [{}, {"tile_n": 256}, {"wg_dimension": "n", "tile_n": 256}, {"tile_k": 128}], ids=str)
@pytest.mark.parametrize(
    "problem",
    [P(900, 264, 200, 7), P(900, 1000, 136, 7, bias=True, activation="silu"), P(900, 328, 264, 7, "float16", "float32")],
    ids=str,
)
def test_wide_tiles_of_rows_that_swizzle_tiles_do_not_divide_are_right(problem, fields, assert_grouped):
    """The last tile ends with the row and overlaps the one before."""
    row = 32 if problem.out_dtype == "float32" else 64
    config = replace(TWO, **fields, epilogue_tile_n=row)
    assert GROUPED.check(problem, config, gpu.current()) is None
    assert_right_for(problem, launch(problem, config), kinds_of_sizes(problem.m, problem.groups), assert_grouped)


@pytest.mark.parametrize(
    "fields",
    [
        {"compute_warpgroups": 1},
        {"wg_dimension": "n", "tile_n": 256},
        {"tile_m": 256},
        {"wg_dimension": "n", "tile_k": 128, "schedule": "dynamic"},
    ],
    ids=str,
)
@pytest.mark.parametrize("sides", [(264, 328), (1000, 320), (320, 520)], ids=str)
def test_wide_tiles_of_a_contraction_whose_sides_swizzle_tiles_do_not_divide_are_right(sides, fields, assert_grouped):
    problem, config = R(900, *sides, 7), replace(TWO, **fields)
    assert CONTRACTION.check(problem, config, gpu.current()) is None
    assert_right_for(problem, launch(problem, config), kinds_of_sizes(problem.m, problem.groups), assert_grouped)


@OPS
def test_hundreds_of_sizes_are_right(spec, assert_grouped):
    problem = spec.Problem(1000, 136, 72, 13)
    rng = np.random.default_rng(0)
    all_sizes = [drawn_sizes(rng, 1000, 13) for _ in range(150)]
    all_sizes += [rng.choice([-5, 0, 1, 63, 64, 200, 2**31 - 1, -(2**31)], size=13).tolist() for _ in range(50)]
    assert_right_for(problem, functools.partial(public, problem), all_sizes, assert_grouped)


@OPS
def test_nan_in_a_group_reaches_the_outputs_of_that_group_only(spec):
    problem, sizes = spec.Problem(600, 264, 136, 5), [130, 65, 0, 200, 150]
    lhs, rhs = operands(problem)
    run = jax.jit(functools.partial(public, problem))
    clean = np.asarray(run(lhs, rhs, np.array(sizes)))
    for group, rows in enumerate(ragged.spans(sizes, problem.m)):
        own: Any = rows if spec is GROUPED else group
        for poison_lhs in (True, False):
            x, y = lhs.copy(), rhs.copy()
            if poison_lhs:
                x[rows] = np.nan
            else:
                y[group if spec is GROUPED else rows] = np.nan
            out = np.asarray(run(x, y, np.array(sizes)))
            assert sizes[group] == 0 or np.isnan(out[own]).all()
            np.testing.assert_array_equal(np.delete(out, own, 0), np.delete(clean, own, 0))


@pytest.mark.parametrize(
    ("spec", "name"),
    [
        (GROUPED, "qwen3-30b-gate_up-64-random"),
        (GROUPED, "deepseek-v3-ep8-down-64-sparse"),
        (GROUPED, "mixtral-8x7b-down-128-random"),
        (GROUPED, "qwen3-30b-down-65536-skewed"),
        (CONTRACTION, "deepseek-v3-ep8-down-4096-even-drhs"),
    ],
    ids=lambda x: getattr(x, "name", x),
)
def test_shapes_of_models_agree_with_xla(spec, name):
    problem = replace(spec.shapes[name], m=min(spec.shapes[name].m, 65536))
    lhs, rhs, sizes, *bias = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(0))
    wanted = jax.jit(functools.partial(spec.reference, replace(problem, out_dtype="float32")))
    out = jax.jit(functools.partial(public, problem))(lhs, rhs, sizes, *bias)
    assert measure.error(out, wanted(lhs, rhs, sizes, *bias)) < spec.tolerance(problem)


# --- the same each time


@OPS
@pytest.mark.parametrize("seed", range(3))
def test_two_runs_give_the_same_bits(spec, seed):
    problem, config = draw(spec, seed)
    sizes = np.array(drawn_sizes(np.random.default_rng(seed), problem.m, problem.groups), np.int32)
    lhs, rhs, *bias = operands(problem, seed)
    run = jax.jit(launch(problem, config))
    first = np.asarray(run(lhs, rhs, sizes, *bias))
    for _ in range(3):
        np.testing.assert_array_equal(first, run(lhs, rhs, sizes, *bias))


@OPS
def test_many_launches_in_a_row_are_all_right(spec):
    """A barrier out of phase, or a store that outlives its block, shows now and then only."""
    problem = spec.Problem(1111, 1032, 520, 11)
    lhs, rhs = jax.device_put(operands(problem))
    rng = np.random.default_rng(0)
    all_sizes = [jnp.array(drawn_sizes(rng, 1111, 11), jnp.int32) for _ in range(4)]
    run = jax.jit(functools.partial(public, problem))
    wanted = [np.asarray(run(lhs, rhs, sizes)) for sizes in all_sizes]
    outs = [run(lhs, rhs, sizes) for _ in range(50) for sizes in all_sizes]
    for i, out in enumerate(outs):
        np.testing.assert_array_equal(out, wanted[i % 4])


# --- tiles handed out as blocks become free


def dynamic(config: Any) -> Any:
    return replace(config, schedule="dynamic")


def assert_same_bits(problem: Any, configs: tuple[Any, Any], all_sizes: Sequence[Sequence[int]], seed: int) -> None:
    lhs, rhs, *bias = jax.device_put(operands(problem, seed))
    one, other = (jax.jit(launch(problem, c)) for c in configs)
    for sizes in all_sizes:
        rows = np.array(sizes, np.int32)
        np.testing.assert_array_equal(one(lhs, rhs, rows, *bias), other(lhs, rhs, rows, *bias))


@OPS
@pytest.mark.parametrize("seed", range(8))
def test_handed_out_tiles_are_right_and_have_the_bits_of_fixed_ones(spec, seed, assert_grouped):
    problem, config = draw(spec, seed)
    problem = replace(problem, group_offset=seed % 2 == 1)
    groups = problem.groups + problem.group_offset
    all_sizes = kinds_of_sizes(problem.m, groups)
    assert_right_for(problem, launch(problem, dynamic(config)), all_sizes, assert_grouped, seed)
    assert_same_bits(problem, (static(config), dynamic(config)), all_sizes, seed)


@OPS
@pytest.mark.parametrize(
    "sizes", [[9000, 4500, 0, 3000, 1, 2250, 1800, 1500, 0, 949], [23000, *[0] * 9]], ids=["skewed", "one"]
)
def test_handed_out_tiles_give_the_same_bits_each_time(spec, sizes):
    """Many tiles a block, so that blocks get other tiles in each call."""
    problem, config = spec.Problem(23000, 1544, 1032, 10), dynamic(replace(TWO, tile_n=64))
    lhs, rhs = jax.device_put(operands(problem))
    rows = jnp.array(sizes, jnp.int32)
    wanted = np.asarray(jax.jit(launch(problem, static(config)))(lhs, rhs, rows))
    run = jax.jit(launch(problem, config))
    for out in [run(lhs, rhs, rows) for _ in range(20)]:
        np.testing.assert_array_equal(out, wanted)


@OPS
def test_calls_of_one_program_count_their_own_tiles(spec):
    """In a loop, and two that know nothing of each other."""
    problem, config = spec.Problem(3000, 520, 264, 5), dynamic(TWO)
    lhs, rhs = jax.device_put(operands(problem))
    all_sizes = jnp.array([[1000, 0, 700, 1, 1299], [3000, 0, 0, 0, 0], [0, 0, 0, 0, 0], [10, 20, 30, 40, 50]], jnp.int32)
    run = launch(problem, config)
    wanted = [np.asarray(jax.jit(launch(problem, TWO))(lhs, rhs, sizes)) for sizes in all_sizes]
    looped = jax.jit(lambda *x: jax.lax.map(lambda sizes: run(*x, sizes), all_sizes))
    both = jax.jit(lambda *x: (run(*x, all_sizes[0]), run(*x, all_sizes[1])))
    for _ in range(5):
        np.testing.assert_array_equal(looped(lhs, rhs), wanted)
        np.testing.assert_array_equal(both(lhs, rhs), wanted[:2])


# --- tiles stored while the next one is multiplied


@OPS
@pytest.mark.parametrize("seed", range(12))
def test_tiles_stored_beside_the_next_one_are_right_and_have_the_bits_of_those_stored_at_once(spec, seed, assert_grouped):
    problem, config = draw(spec, 300 + seed, ("deferred", "dynamic-deferred")[seed % 2])
    problem = replace(problem, group_offset=seed % 3 == 1)
    groups = problem.groups + problem.group_offset
    all_sizes = kinds_of_sizes(problem.m, groups)
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)
    assert_same_bits(problem, (static(config), config), all_sizes, seed)


# --- a group's last tile of at most 64 rows


@pytest.mark.parametrize("schedule", ["dynamic", "dynamic-deferred"])
@pytest.mark.parametrize("seed", range(6))
def test_short_tiles_are_right_and_have_the_bits_of_whole_ones(seed, schedule, assert_grouped):
    problem, _ = draw(GROUPED, 400 + seed, schedule)
    problem = replace(problem, n=128 + problem.n, group_offset=seed % 3 == 1)
    config = replace(TWO, tile_n=(128, 256)[seed % 2 * (problem.n >= 256)], epilogue_slots=1 + seed % 2, schedule=schedule)
    config = replace(config, epilogue_tile_n=64, short_tiles=True)
    assert GROUPED.check(problem, config, gpu.current()) is None
    all_sizes = kinds_of_sizes(problem.m, problem.groups + problem.group_offset)
    assert_right_for(problem, launch(problem, config), all_sizes, assert_grouped, seed)
    assert_same_bits(problem, (static(config), config), all_sizes, seed)


# --- gradients and transforms

GRADIENT_SIZES = [100, 0, 33, 250, 1]


def gradients(f: Callable[..., jax.Array], arrays: Sequence[jax.Array]) -> Any:
    """Gradients of a weighted sum of f's output with respect to each array."""

    def loss(*arrays: jax.Array) -> jax.Array:
        out = f(*arrays).astype(F32)
        return (out * jax.random.normal(jax.random.key(9), out.shape)).sum()

    return jax.jit(jax.grad(loss, argnums=tuple(range(len(arrays)))))(*arrays)


def assert_same_gradients(f: Any, plain: Any, arrays: Sequence[jax.Array], assert_near: Any) -> None:
    with jax.default_matmul_precision("highest"):
        wanted = gradients(plain, [x.astype(F32) for x in arrays])
    for x, y, argument in zip(gradients(f, arrays), wanted, arrays, strict=True):
        assert x.dtype == argument.dtype
        assert_near(x, y, 4e-2)  # the cotangent, and the argument of an activation, are rounded to bfloat16


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu"])
@pytest.mark.parametrize("layout", ["nn", "nt"])
def test_gradients_are_those_of_plain_jax(layout, activation, assert_near):
    problem = P(400, 264, 136, 5, layout=layout, bias=True, activation=activation)
    lhs, rhs, bias = map(jnp.asarray, operands(problem))
    kwargs: dict[str, Any] = {"activation": activation, "transpose_rhs": layout == "nt"}

    def of_arrays(f: Any, **more: Any) -> Any:
        return lambda lhs, rhs, bias: f(lhs, rhs, jnp.array(GRADIENT_SIZES), bias=bias, **kwargs, **more)

    ours, plain = of_arrays(grouped_matmul, backend="mosaic"), of_arrays(ragged.plain_grouped)
    assert_same_gradients(ours, plain, (lhs, rhs / 8, bias), assert_near)


def test_gradients_of_a_contraction_are_those_of_plain_jax(assert_near):
    lhs, rhs = map(jnp.asarray, operands(R(400, 264, 136, 5)))
    ours = lambda lhs, rhs: ragged_contraction(lhs, rhs, jnp.array(GRADIENT_SIZES), backend="mosaic")  # noqa: E731
    plain = lambda lhs, rhs: ragged.plain_contraction(lhs, rhs, jnp.array(GRADIENT_SIZES))  # noqa: E731
    assert_same_gradients(ours, plain, (lhs, rhs), assert_near)


def test_rows_of_no_group_have_no_gradient_whatever_they_are():
    lhs, rhs = map(jnp.asarray, operands(P(400, 264, 136, 5)))
    used = sum(GRADIENT_SIZES)
    lhs = lhs.at[used:].set(jnp.nan)

    @jax.jit
    def pulled_back(cotangent: jax.Array) -> Any:
        f = lambda lhs, rhs: grouped_matmul(lhs, rhs, jnp.array(GRADIENT_SIZES), backend="mosaic")  # noqa: E731
        return jax.vjp(f, lhs, rhs)[1](cotangent)

    ones = jnp.ones((400, 264), BF16)
    dlhs, drhs = pulled_back(ones.at[used:].set(jnp.nan))
    np.testing.assert_array_equal(dlhs[used:], 0)
    np.testing.assert_array_equal(drhs[1], 0)  # an empty group
    for x, y in zip((dlhs, drhs), pulled_back(ones)):
        np.testing.assert_array_equal(x, y)


@OPS
def test_vmap_is_right(spec, assert_grouped):
    problem = spec.Problem(300, 264, 136, 4)
    all_sizes = [[100, 0, 33, 150], [0, 0, 300, 0], [1, 2, 3, 4]]
    batches = [operands(problem, seed) for seed in range(3)]
    lhs, rhs = (np.stack(x) for x in zip(*batches))
    out = jax.vmap(functools.partial(public, problem))(lhs, rhs, np.array(all_sizes))
    for i, sizes in enumerate(all_sizes):
        assert_grouped(problem, sizes, out[i], lhs[i], rhs[i])


def test_vmap_of_rows_with_the_same_matrices_is_right(assert_grouped):
    problem = P(300, 264, 136, 4)
    all_sizes = [[100, 0, 33, 150], [0, 0, 300, 0], [1, 2, 3, 4]]
    batches = [operands(problem, seed) for seed in range(3)]
    rhs = batches[0][1]
    lhs = np.stack([poisoned_rows(x, sizes) for (x, *_), sizes in zip(batches, all_sizes)])
    out = jax.jit(jax.vmap(functools.partial(public, problem), (0, None, 0)))(lhs, rhs, np.array(all_sizes))
    for i, sizes in enumerate(all_sizes):
        assert_grouped(problem, sizes, out[i], batches[i][0], rhs)


def poisoned_rows(x: np.ndarray, sizes: Sequence[int]) -> np.ndarray:
    """With NaN in rows of no group."""
    x = np.array(x)
    x[sum(sizes) :] = np.nan
    return x


def test_scan_and_checkpoint_run_the_kernels(assert_near):
    x = jax.random.normal(jax.random.key(0), (256, 128), BF16)
    matrices = jax.random.normal(jax.random.key(1), (4, 3, 128, 128), BF16) / 12
    sizes = jnp.array([[100, 0, 156], [256, 0, 0], [3, 4, 5], [80, 80, 80]])

    def loss(f: Any, x: jax.Array, matrices: jax.Array) -> jax.Array:
        layer = jax.checkpoint(lambda x, layer: (x + f(x, *layer), None))
        return jax.lax.scan(layer, x, (matrices, sizes))[0].astype(F32).sum()

    ours = functools.partial(loss, functools.partial(grouped_matmul, backend="mosaic"))
    plain = functools.partial(loss, ragged.plain_grouped)
    grads = jax.jit(jax.grad(ours, argnums=(0, 1)))(x, matrices)
    for y, z in zip(grads, jax.jit(jax.grad(plain, argnums=(0, 1)))(x.astype(F32), matrices.astype(F32))):
        assert_near(y, z, 5e-2)  # four layers of roundings


def assert_right_over_experts(devices: int, assert_near: Any) -> None:
    """Each device has its experts, and the rows that were sent to them."""
    mesh = jax.make_mesh((devices,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:devices])
    shard = PartitionSpec("x")
    product = functools.partial(grouped_matmul, backend="mosaic")
    sharded = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(shard,) * 3, out_specs=shard))
    problem = P(512 * devices, 264, 136, 4 * devices)
    lhs, rhs = map(jnp.asarray, operands(problem))
    sizes = jnp.array([100, 0, 300, 65, 512, 0, 0, 0][: 4 * devices])

    def plain(lhs: jax.Array, rhs: jax.Array) -> jax.Array:
        shards = [jnp.split(x, devices) for x in (lhs, rhs, sizes)]
        return jnp.concatenate([ragged.plain_grouped(*shard) for shard in zip(*shards)])

    assert_near(sharded(lhs, rhs, sizes), plain(lhs.astype(F32), rhs.astype(F32)), GROUPED.tolerance(problem))
    assert_same_gradients(lambda lhs, rhs: sharded(lhs, rhs, sizes), plain, (lhs, rhs), assert_near)


def test_shard_map_and_its_gradients_on_one_device(assert_near):
    assert_right_over_experts(1, assert_near)


@pytest.mark.gpu(2)
def test_shard_map_over_the_experts_of_two_gpus_and_its_gradients(assert_near):
    assert_right_over_experts(2, assert_near)


# --- which kernel runs, and for how long


def test_default_backend_is_the_kernel():
    lhs, rhs = operands(P(256, 256, 256, 4))
    sizes = jnp.array([64, 64, 64, 64])
    assert "mosaic_gpu" in jax.jit(grouped_matmul).lower(lhs, rhs, sizes).as_text()
    assert "mosaic_gpu" in jax.jit(ragged_contraction).lower(lhs, lhs, sizes).as_text()


@OPS
def test_use_configs_and_the_argument_run_other_kernels_to_the_same_end(spec, assert_grouped):
    problem, sizes = spec.Problem(520, 512, 512, 4), [100, 0, 33, 300]
    lhs, rhs = operands(problem)
    other = replace(spec.default(problem, gpu.current()), max_concurrent_steps=2, raster_width=1)
    f = jax.jit(functools.partial(public, problem))
    assert_grouped(problem, sizes, f(lhs, rhs, np.array(sizes)), lhs, rhs)
    with use_configs({spec.name: other}):
        assert_grouped(problem, sizes, f(lhs, rhs, np.array(sizes)), lhs, rhs)
    assert_grouped(problem, sizes, public(problem, lhs, rhs, np.array(sizes), config=other), lhs, rhs)


@OPS
def test_rows_of_no_group_cost_no_arithmetic(spec):
    problem = spec.Problem(16384, 2048, 2048, 16)
    lhs, rhs, _ = jax.jit(functools.partial(spec.inputs, problem))(jax.random.key(0))
    run = jax.jit(functools.partial(public, problem))
    full, eighth = (jnp.full(16, rows, jnp.int32) for rows in (1024, 128))
    samples = measure.interleaved([functools.partial(run, lhs, rhs, sizes) for sizes in (full, eighth)], gpu.current(), 5)
    slow, fast = map(measure.median_us, samples)
    assert fast < 0.5 * slow
