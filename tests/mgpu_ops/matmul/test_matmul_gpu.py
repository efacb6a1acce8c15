"""matmul on a Hopper GPU: what the interpreter and the compiler cannot show."""

from __future__ import annotations

import functools
import random
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import MatmulConfig, MatmulProblem, matmul, spec_of, use_configs
from mgpu_ops.core import gpu
from mgpu_ops.tuning import measure

pytestmark = pytest.mark.gpu

MATMUL = spec_of("matmul")
P = MatmulProblem
BF16, F32 = jnp.bfloat16, jnp.float32


def poison(problem: Any) -> None:
    """Frees memory full of NaN, which the output will be put in: an element left unwritten shows."""
    elements = max(2**20, problem.batch * problem.m * problem.n)
    jnp.full(elements, jnp.nan, problem.out_dtype).block_until_ready()
    jnp.full(2 * elements, jnp.nan, problem.out_dtype).block_until_ready()


def compiled(problem: Any, config: Any, *arrays: jax.Array) -> Any:
    device = gpu.current()
    assert MATMUL.check(problem, config, device) is None
    return jax.jit(functools.partial(MATMUL.run, problem, config, device)).lower(*arrays).compile()


def launch(problem: Any, config: Any, *arrays: jax.Array) -> jax.Array:
    run = compiled(problem, config, *arrays)
    poison(problem)
    return run(*arrays)


def public(problem: Any, *arrays: jax.Array, **kwargs: Any) -> jax.Array:
    return matmul(
        *arrays,
        out_dtype=problem.out_dtype,
        transpose_a=problem.layout[0] == "t",
        transpose_b=problem.layout[1] == "t",
        backend="mosaic",
        **kwargs,
    )


PROBLEMS = [
    P(1, 8, 8),
    P(1, 4096, 4096),
    P(7, 72, 200),
    P(33, 264, 136),
    P(64, 64, 64),
    P(127, 128, 128),
    P(129, 136, 72),
    P(201, 1000, 520),
    P(257, 2056, 1032),
    P(1000, 1000, 1000),
    P(1111, 776, 2048),
    P(2048, 512, 8),
    P(3, 8192, 64),
    P(4097, 136, 136),
    P(512, 512, 8192),
    P(1024, 1024, 1024),
]


@pytest.mark.parametrize("problem", PROBLEMS, ids=lambda p: f"{p.m}x{p.n}x{p.k}")
def test_any_size_is_right_everywhere(problem, assert_matmul):
    arrays = MATMUL.inputs(problem, jax.random.key(0))
    poison(problem)
    assert_matmul(problem, public(problem, *arrays), *arrays)


@pytest.mark.parametrize("sizes", [(200, 24, 256), (5, 32, 3128), (1000, 8, 56), (3, 64, 512)])
def test_few_columns_of_float32_are_right_everywhere(sizes, assert_matmul):
    problem = P(*sizes, out_dtype="float32")
    arrays = MATMUL.inputs(problem, jax.random.key(0))
    poison(problem)
    assert_matmul(problem, public(problem, *arrays), *arrays)


@pytest.mark.parametrize("out_dtype", ["same", "float32"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_any_layout_and_dtype_is_right_everywhere(layout, dtype, out_dtype, assert_matmul):
    out_dtype = dtype if out_dtype == "same" else out_dtype
    for m, n, k in ((264, 520, 392), (512, 768, 640)):
        problem = P(m, n, k, dtype, out_dtype, layout)
        arrays = MATMUL.inputs(problem, jax.random.key(1))
        poison(problem)
        assert_matmul(problem, public(problem, *arrays), *arrays)


def draw(seed: int) -> tuple[Any, Any]:
    """A problem of any kind and a legal config for it."""
    rng = random.Random(seed)
    unit = rng.choice([8, 64])
    layout, dtype = rng.choice(["nn", "nt", "tn", "tt"]), rng.choice(["bfloat16", "float16"])
    m = rng.randint(1, 1500) if layout[0] == "n" else unit * rng.randint(1, 1500 // unit)
    n, k = (unit * rng.randint(1, 1500 // unit) for _ in "nk")
    problem = P(m, n, k, dtype, rng.choice([dtype, "float32"]), layout, rng.choice([1, 1, 3]))
    device = gpu.current()
    space = MATMUL.space(problem, device)
    drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    return problem, next(c for c in drawn if MATMUL.check(problem, c, device) is None)


@pytest.mark.parametrize("seed", range(40))
def test_random_legal_config_is_right_everywhere(seed, assert_matmul):
    problem, config = draw(seed)
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


def draw_schedule(seed: int, schedule: str) -> tuple[Any, Any]:
    """As `draw`, with a config of this schedule, whose stores run beside the next tile's steps."""
    rng = random.Random(seed)
    layout = rng.choice(["nn", "nt", "tn", "tt"])
    m, n, k = 64 * rng.randint(1, 60), 64 * rng.randint(1, 60), 8 * rng.randint(1, 150)
    if rng.random() < 0.5:
        m, n = m - 8, n - 24
    extra = {"bias": True, "activation": "silu", "residual": schedule != "deferred"} if rng.random() < 0.3 else {}
    problem = P(m, n, k, layout=layout, batch=rng.choice([1, 1, 3]), **extra)
    device = gpu.current()
    fixed = {"schedule": (schedule,), "compute_warpgroups": (2,)}
    fixed |= {"wg_dimension": ("m",)} if schedule == "pingpong" else {"tile_m": (128, 256), "tile_n": (128, 192, 256)}
    space = {**MATMUL.space(problem, device), **fixed, "cluster": ("none", "m", "n"), "split_k": (1, 1, 1, 2)}
    if schedule == "ahead":
        space |= {
            "cluster": ("none", "m", "n", "k", "k"),
            "split_k": (1, 2, 2, 4),
            "tile_m": (64, 128),
            "tile_n": (64, 128, 256),
        }
    drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    return problem, next(c for c in drawn if MATMUL.check(problem, c, device) is None)


@pytest.mark.parametrize("schedule", ["pingpong", "deferred", "ahead"])
@pytest.mark.parametrize("seed", range(24))
def test_random_config_of_a_schedule_is_right_everywhere(seed, schedule, assert_matmul):
    problem, config = draw_schedule(seed, schedule)
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize(
    "problem",
    [
        P(4096, 4096, 136, residual=True),
        P(4096, 4096, 136, layout="nt", residual=True),
        P(2312, 2112, 1032, layout="nt", batch=2, bias=True, activation="silu", residual=True),
        P(2312, 2112, 1032, batch=2, bias=True, activation="silu", residual=True),
        P(8, 64, 8, residual=True),
        P(1000, 8256, 64, dtype="float16", out_dtype="float16", residual=True),
    ],
)
@pytest.mark.parametrize("cluster", ["none", "m"])
def test_a_deferred_store_of_a_residual_is_right(problem, cluster, assert_matmul):
    config = MatmulConfig(128, 256, 64, 4, 2, "m", "none", "m", 8, 32, 1, 40, "deferred")
    if problem.m > 128 and -(-problem.m // 128) % 2 == 0:
        config = replace(config, cluster=cluster)
    arrays = MATMUL.inputs(problem, jax.random.key(1))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize("cluster", ["none", "m", "n"])
@pytest.mark.parametrize(
    "problem",
    [
        P(2312, 2112, 1032, batch=2, bias=True, activation="silu"),
        P(4096, 3072, 4096, layout="tn"),
        P(1000, 8256, 136, dtype="float16", out_dtype="float16", layout="nt"),
        P(8192, 6144, 256, layout="tt"),
        P(4000, 2056, 200, layout="nt", residual=True),
    ],
)
def test_three_consumers_without_a_producer_are_right(problem, cluster, assert_matmul):
    stages = 2 if problem.residual else 3
    config = MatmulConfig(192, 256, 64, stages, 3, "m", cluster, "m", 8, 64, 1, 40, "ahead")
    arrays = MATMUL.inputs(problem, jax.random.key(1))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


def draw_few_rows(seed: int) -> tuple[Any, Any]:
    """As `draw`, with few rows and a config that computes the transposed product, or adds up parts of k in a cluster."""
    rng = random.Random(seed)
    layout, batch = rng.choice(["nn", "nt"]), rng.choice([1, 1, 3])
    more = {"residual": rng.random() < 0.4, "bias": rng.random() < 0.3}
    n = 8 * rng.randint(1, rng.choice([150, 1500]))  # up to three tiles for a cluster of two
    problem = P(rng.randint(1, 64), n, 8 * rng.randint(1, 150), layout=layout, batch=batch, **more)
    device = gpu.current()
    space = {**MATMUL.space(problem, device), "cluster": ("none", "m", "n", "k", "k"), "epilogue_tile_n": (64,)}
    drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(50_000))
    legal = (c for c in drawn if (c.tile_m < 64 or c.cluster == "k") and MATMUL.check(problem, c, device) is None)
    return problem, next(legal)


@pytest.mark.parametrize("seed", range(40))
def test_random_config_for_few_rows_is_right_everywhere(seed, assert_matmul):
    problem, config = draw_few_rows(seed)
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


def draw_fitted(seed: int, clusters: tuple[str, ...] = ()) -> tuple[Any, Any]:
    """As `draw`, with a tile of other sides than powers of two: of the transposed product, or wider than rows of A or B.

    clusters: with any tile, in a cluster of these.
    """
    rng, device = random.Random(seed), gpu.current()
    while True:
        layout = rng.choice(["nn", "nt", "tn", "tt"])
        m, n, k = (8 * rng.randint(1, limit) for limit in (32, 150, 150))
        out_dtype, batch, bias = rng.choice(["bfloat16", "float32"]), rng.choice([1, 1, 3]), rng.random() < 0.3
        problem = P(m, n, k, out_dtype=out_dtype, layout=layout, batch=batch, bias=bias)
        space = {**MATMUL.space(problem, device), "tile_m": range(64, 257, 8), "epilogue_tile_n": (16, 32, 64)}
        space |= {"tile_n": range(64, 257, 8), "schedule": ("cooperative", "ahead", "deferred", "pingpong")}
        space |= {"cluster": clusters, "tile_m": (16, 32, 64, 96, 128, 256)} if clusters else {}
        drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(20_000))
        fitted = (c for c in drawn if clusters or c.tile_m % 64 or c.tile_n % 64 or (layout[0] == "t" and c.tile_m > m))
        for config in fitted:
            if MATMUL.check(problem, config, device) is None:
                return problem, config


@pytest.mark.parametrize("seed", range(60))
def test_a_tile_fitted_to_the_problem_is_right_everywhere(seed, assert_matmul):
    problem, config = draw_fitted(seed)
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize("seed", range(48))
def test_a_cluster_of_four_is_right_everywhere(seed, assert_matmul):
    problem, config = draw_fitted(seed, clusters=("m4", "n4"))
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize("sizes", [(72, 136, 72), (104, 136, 1720), (8, 72, 128), (248, 136, 64), (72, 72, 8)])
@pytest.mark.parametrize("layout", ["nn", "tn", "tt"])
def test_tiles_wider_than_a_row_are_right_everywhere(sizes, layout, assert_matmul):
    problem = P(*sizes, layout=layout, batch=2)
    tile_n = 256 if layout == "tt" and problem.m < 128 else 64 * -(-problem.n // 64)
    config = MatmulConfig(128 if problem.m < 128 else 256, tile_n, 64, 2, 2, "m", "none", "m", 8, 64, 1, 40)
    arrays = MATMUL.inputs(problem, jax.random.key(0))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize("sizes", [(2, 6144, 256), (8, 128, 424), (1184, 64, 128), (5, 64, 64)])
def test_tiles_that_reach_beyond_an_array_of_one_swizzle_tile_store_nothing_there(sizes, assert_matmul):
    problem = P(*sizes)
    arrays = MATMUL.inputs(problem, jax.random.key(0))
    base = replace(MATMUL.default(problem, gpu.current()), tile_n=128, split_k=1, cluster="none", compute_warpgroups=2)
    wide = replace(base, tile_m=128, tile_k=64, wg_dimension="m", max_concurrent_steps=4, epilogue_tile_n=64)
    for config in (wide, replace(wide, tile_m=16)):
        assert_matmul(problem, launch(problem, config, *arrays), *arrays)


@pytest.mark.parametrize("seed", range(4))
def test_two_runs_give_the_same_bits(seed):
    problem, config = draw(seed)
    arrays = MATMUL.inputs(problem, jax.random.key(seed))
    first = np.asarray(launch(problem, config, *arrays))
    for _ in range(3):
        np.testing.assert_array_equal(first, launch(problem, config, *arrays))


def test_many_launches_in_a_row_are_all_right():
    """A barrier out of phase, or a store that outlives its block, shows now and then only."""
    problem = P(1111, 1032, 520)
    a, b = MATMUL.inputs(problem, jax.random.key(0))
    step = jax.jit(lambda a, b: public(problem, a, b))
    wanted = np.asarray(step(a, b))
    outs = [step(a, b) for _ in range(200)]
    assert all((np.asarray(out) == wanted).all() for out in outs)


@pytest.mark.parametrize("shape", ["square-4096", "llama3-8b-qkv-128", "llama3-70b-down-256"])
def test_shapes_of_models_agree_with_xla(shape):
    problem = MATMUL.shapes[shape]
    arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
    wanted = jax.jit(functools.partial(MATMUL.reference, replace(problem, out_dtype="float32")))
    poison(problem)
    error = measure.error(public(problem, *arrays), wanted(*arrays))
    assert error < MATMUL.tolerance(problem)


def test_nan_and_infinity_stay_in_their_row_or_column():
    a, b = MATMUL.inputs(P(201, 136, 72), jax.random.key(0))
    a = a.at[5, 7].set(jnp.nan).at[200, 71].set(jnp.inf)
    b = b.at[0, 135].set(-jnp.inf)
    out = np.asarray(matmul(a, b, backend="mosaic"), np.float32)
    with np.errstate(invalid="ignore"):
        wanted = np.asarray(a, np.float32) @ np.asarray(b, np.float32)
    for kind in (np.isnan, np.isposinf, np.isneginf):
        np.testing.assert_array_equal(kind(out), kind(wanted))


def gradients(product: Any, weights: jax.Array, *args: jax.Array) -> Any:
    loss = lambda a, b: (product(a, b).astype(F32) * weights.astype(F32)).sum()  # noqa: E731
    return jax.jit(jax.grad(loss, argnums=(0, 1)))(*args)


@pytest.mark.parametrize("layout", ["nn", "nt", "tn", "tt"])
def test_gradients_are_those_of_a_float32_product(layout, assert_near):
    problem = P(264, 520, 392, layout=layout)
    a, b = MATMUL.inputs(problem, jax.random.key(0))
    weights = jax.random.normal(jax.random.key(1), (264, 520), BF16)

    def float32(a: jax.Array, b: jax.Array) -> jax.Array:
        a, b = (x.mT if t == "t" else x for x, t in zip((a, b), layout))
        return jnp.matmul(a, b, precision="highest")

    wanted = gradients(float32, weights, a.astype(F32), b.astype(F32))
    for x, y in zip(gradients(functools.partial(public, problem), weights, a, b), wanted):
        assert x.dtype == BF16
        assert_near(x, y, MATMUL.tolerance(problem))


@pytest.mark.parametrize("batched", ["a", "b", "ab"])
def test_vmap_is_right_everywhere(batched, assert_matmul):
    problem = P(201, 264, 136, batch=5)
    a, b = MATMUL.inputs(problem, jax.random.key(0))
    a, b = (x if name in batched else x[:1] for name, x in zip("ab", (a, b)))
    in_axes = tuple(0 if name in batched else None for name in "ab")
    args = (x if axis == 0 else x[0] for x, axis in zip((a, b), in_axes))
    poison(problem)
    out = jax.vmap(functools.partial(matmul, backend="mosaic"), in_axes)(*args)
    assert_matmul(problem, out, a, b)


def test_gradients_of_a_vmap(assert_near):
    a, b = MATMUL.inputs(P(136, 264, 136, batch=3), jax.random.key(0))
    weights = jax.random.normal(jax.random.key(1), (3, 136, 264), BF16)
    ours = gradients(jax.vmap(functools.partial(matmul, backend="mosaic")), weights, a, b)
    exact = functools.partial(jnp.matmul, precision="highest")
    wanted = gradients(exact, weights, a.astype(F32), b.astype(F32))
    for x, y in zip(ours, wanted):
        assert_near(x, y, MATMUL.tolerance(P(136, 264, 136)))


def test_scan_and_checkpoint_run_the_kernel(assert_near):
    x = jax.random.normal(jax.random.key(0), (256, 256), BF16)
    weights = jax.random.normal(jax.random.key(1), (4, 256, 256), BF16) / 16

    def loss(x: jax.Array, weights: jax.Array, product: Any) -> jax.Array:
        layer = jax.checkpoint(lambda x, w: (product(x, w), None))
        return jax.lax.scan(layer, x, weights)[0].astype(F32).sum()

    grad = jax.jit(jax.grad(loss, argnums=(0, 1)), static_argnums=2)
    ours = grad(x, weights, functools.partial(matmul, backend="mosaic"))
    exact = functools.partial(jnp.matmul, precision="highest")
    for y, z in zip(ours, grad(x.astype(F32), weights.astype(F32), exact)):
        assert_near(y, z, 5e-2)  # four layers of roundings


def test_shard_map_and_its_gradients_on_one_device(assert_matmul, assert_near):
    mesh = jax.make_mesh((1,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:1])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    product = functools.partial(matmul, backend="mosaic")
    sharded = jax.jit(jax.shard_map(product, mesh=mesh, in_specs=(rows, whole), out_specs=rows))
    problem = P(264, 520, 392)
    a, b = MATMUL.inputs(problem, jax.random.key(0))
    assert_matmul(problem, sharded(a, b), a, b)
    weights = jax.random.normal(jax.random.key(1), (264, 520), BF16)
    for x, y in zip(gradients(sharded, weights, a, b), gradients(product, weights, a, b)):
        assert_near(x, y, 1e-6)


@pytest.mark.parametrize("activation", ["none", "relu", "silu", "gelu", "gelu_erf"])
@pytest.mark.parametrize("sides", [(264, 520, 392), (17, 1024, 4096), (4096, 512, 256)], ids=str)
def test_epilogue_on_every_schedule(sides, activation, assert_matmul):
    device = gpu.current()
    for out_dtype in ("bfloat16", "float32"):
        problem = P(*sides, out_dtype=out_dtype, bias=True, activation=activation, residual=True)
        arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
        default = MATMUL.default(problem, device)
        few_rows = replace(default, tile_m=16, tile_n=64, compute_warpgroups=1, epilogue_tile_n=64, cluster="none", split_k=1)
        changes = [{}, {"split_k": 2, "cluster": "none"}, {"split_k": 2, "cluster": "k"}, {"wg_dimension": "m", "cluster": "n"}]
        configs = [few_rows, *(replace(default, **change) for change in changes)]
        runs = [config for config in configs if MATMUL.check(problem, config, device) is None]
        assert len(runs) >= 2
        for config in runs:
            out = jax.jit(functools.partial(MATMUL.run, problem, config, device))(*arrays)
            assert_matmul(problem, out, *arrays)


def test_default_backend_is_the_kernel():
    a, b = MATMUL.inputs(MATMUL.shapes["llama3-8b-out-128"], jax.random.key(0))  # stored, and faster than cuBLAS
    assert "mosaic_gpu" in jax.jit(matmul).lower(a, b).as_text()


def test_where_xla_was_faster_the_call_runs_it_to_the_same_end(assert_near):
    a, b = MATMUL.inputs(P(4096, 4096, 256, layout="tn"), jax.random.key(0))
    with use_configs({"matmul": "xla"}):
        run = jax.jit(functools.partial(matmul, transpose_a=True)).lower(a, b)
    assert "mosaic_gpu" not in run.as_text()
    assert_near(run.compile()(a, b), matmul(a, b, transpose_a=True, backend="mosaic"), 8e-3)


def test_use_configs_and_the_argument_run_other_kernels_to_the_same_end(assert_matmul):
    problem = P(520, 512, 512)
    a, b = MATMUL.inputs(problem, jax.random.key(0))
    device = gpu.current()
    default = MATMUL.default(problem, device)
    other = replace(default, max_concurrent_steps=2, raster_width=1)
    f = jax.jit(functools.partial(matmul, backend="mosaic"))
    assert_matmul(problem, f(a, b), a, b)
    with use_configs({"matmul": other}):
        assert_matmul(problem, f(a, b), a, b)
    assert_matmul(problem, matmul(a, b, config=other, backend="mosaic"), a, b)


def test_measured_times_are_positive_and_larger_for_more_work():
    device = gpu.current()
    functions = []
    for size in (1024, 4096):
        problem = P(size, size, size)
        a, b = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(0))
        product = jax.jit(functools.partial(public, problem))
        functions.append(functools.partial(product, a, b))
    samples = measure.interleaved(functions, device, 5)
    assert [len(s) for s in samples] == [5, 5]
    assert all(t > 0 for s in samples for t in s)
    small, large = map(measure.median_us, samples)
    assert large > 8 * small  # 64 times the work; the small one does not fill the GPU
    assert large > MATMUL.flops(P(4096, 4096, 4096)) / device.bf16_flops * 1e6


def few_rows(seed: int) -> tuple[Any, Any]:
    """A product of normalised rows, most of them few, with a legal config."""
    rng = random.Random(seed)
    m, n, k = rng.choice([1, 2, 7, 16, 33, 64, 100, 300]), 8 * rng.randint(1, 300), 8 * rng.randint(1, 300)
    if rng.random() < 0.6:
        n, k = -(-n // 256) * 256, -(-k // 512) * 512
    dtype = rng.choice(["bfloat16", "float16"])
    more = {"bias": rng.random() < 0.3, "residual": rng.random() < 0.5, "activation": rng.choice(["none", "gelu"])}
    problem = P(m, n, k, dtype, dtype, layout=rng.choice(["nn", "nt"]), normalised=True, **more)
    space = MATMUL.space(problem, gpu.current()) | {"schedule": ("cooperative",), "epilogue_tile_n": (32, 64, 64)}
    drawn = (MatmulConfig(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return problem, next(c for c in drawn if MATMUL.check(problem, c, gpu.current()) is None)


@pytest.mark.parametrize("seed", range(16))
def test_normalised_rows_are_right_everywhere(seed, assert_matmul):
    problem, config = few_rows(seed)
    arrays = jax.jit(functools.partial(MATMUL.inputs, problem))(jax.random.key(seed))
    assert_matmul(problem, launch(problem, config, *arrays), *arrays)
