"""gated_matmul: values, gradients and transforms, the kernel interpreted on every schedule, and compiled for an H200."""

from __future__ import annotations

import dataclasses
import functools
import re
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax.sharding import AxisType, PartitionSpec

from mgpu_ops import GatedMatmulConfig, MatmulConfig, gated_matmul, spec_of, use_configs
from mgpu_ops import GatedMatmulProblem as P
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.core.activations import ACTIVATIONS, activate
from mgpu_ops.matmul.gated import smem_bytes
from tests import thorough
from tests.arrays import inputs, normal
from tests.mgpu_ops.interpreter import has_a_race, quiet_interpreter, wait_for_all_stores_only

GATED, H200 = spec_of("gated_matmul"), gpu.find("h200")
FEW_SMS = replace(H200, sms=4)
BF16, F16, F32 = jnp.bfloat16, jnp.float16, jnp.float32

BASE = GatedMatmulConfig(
    tile_m=128,
    tile_n=64,
    tile_k=64,
    max_concurrent_steps=3,
    compute_warpgroups=2,
    wg_dimension="m",
    cluster="none",
    raster_dimension="m",
    raster_width=8,
    epilogue_tile_n=64,
    memory_registers=40,
)
ONE = replace(BASE, tile_m=64, compute_warpgroups=1)
TURNS = replace(BASE, schedule="pingpong", epilogue_tile_n=32)


def arrays_of(problem: P) -> list[jax.Array]:
    """Gate and up are about normal."""
    if problem.stored:
        x, w, *given = inputs(GATED, problem)
        return [x, (w / np.sqrt(problem.k)).astype(w.dtype), *given]
    x, *weights, last = inputs(GATED, problem if problem.normalised else replace(problem, gradient=True))
    weights = [(w / np.sqrt(problem.k)).astype(w.dtype) for w in weights]
    return [x, *weights, last][: 4 if problem.gradient or problem.normalised else 3]


def truth(problem: P, *arrays: Any) -> tuple[np.ndarray, ...]:
    """The result, or the gradients of gate and up, in float64; with a stored gate also up."""
    x, *weights = (np.asarray(a).astype(np.float64) for a in arrays)
    weights, rest = (weights[:1], weights[1:]) if problem.stored else (weights[:2], weights[2:])
    if problem.normalised:
        x = x / np.sqrt(np.mean(x**2, -1, keepdims=True) + rest[0])
    products = [x @ (w.T if problem.layout == "nt" else w) for w in weights]
    if problem.stored:  # of gate, up and g
        gate, up, g = rest[0], (rest[1] if problem.gradient else products[0]), products
    else:
        (gate, up), g = products, rest
    with jax.enable_x64(True):
        activated, vjp = jax.vjp(functools.partial(activate, problem.activation), jnp.asarray(gate))
        if not problem.gradient:
            return (np.asarray(activated) * up, *([up] if problem.stored else []))
        return np.asarray(vjp(jnp.asarray(g[0] * up))[0]), g[0] * np.asarray(activated)


# --- the kernel, interpreted


def interpret(problem: P, config: GatedMatmulConfig, arrays: Any, **options: Any) -> Any:
    assert GATED.check(problem, config, FEW_SMS) is None
    with quiet_interpreter():
        out = jax.jit(functools.partial(GATED.run, problem, config, FEW_SMS, interpret=True, **options))(*arrays)
        return jax.block_until_ready(out)


CASES = {
    "tails, one warpgroup": (P(200, 136, 72), ONE),
    "two warpgroups share rows": (P(200, 320, 192, activation="gelu"), BASE),
    "two warpgroups share columns": (P(200, 320, 192), replace(BASE, tile_n=128, wg_dimension="n")),
    "columns that end with the row": (P(200, 328, 136, activation="relu"), replace(BASE, tile_n=128)),
    "weights shared in a cluster": (P(200, 320, 192), replace(BASE, cluster="m")),
    "x shared in a cluster, transposed weights": (P(100, 256, 192, layout="nt"), replace(ONE, cluster="n")),
    "float32": (P(200, 136, 136, out_dtype="float32", activation="gelu_erf"), replace(ONE, epilogue_tile_n=32)),
    "float16, three epilogue tiles": (P(72, 192, 136, "float16", "float16"), replace(ONE, tile_n=192)),
    "normalised rows": (P(37, 136, 72, normalised=True), ONE),
    "normalised rows, two warpgroups share columns": (
        P(64, 256, 192, normalised=True),
        replace(BASE, tile_m=64, tile_n=128, wg_dimension="n"),
    ),
    "gradient, tails, one warpgroup": (P(200, 136, 72, gradient=True), ONE),
    "gradient, several tiles": (P(450, 320, 192, gradient=True, activation="gelu"), replace(BASE, tile_n=128)),
    "gradient, more epilogue tiles than buffers": (
        P(128, 192, 64, gradient=True, activation="relu"),
        replace(BASE, tile_n=192, wg_dimension="m", max_concurrent_steps=2, epilogue_tile_n=32),
    ),
    "gradient, columns that end with the row": (
        P(200, 328, 136, gradient=True),
        replace(BASE, tile_n=128, wg_dimension="n"),
    ),
    "gradient, cluster, transposed weights": (
        P(200, 320, 192, layout="nt", gradient=True, activation="none"),
        replace(BASE, cluster="m"),
    ),
    "stored, tails, more epilogue tiles than slots": (P(200, 328, 136, stored=True), TURNS),
    "stored, one epilogue tile": (
        P(150, 192, 72, stored=True, activation="gelu"),
        replace(TURNS, tile_m=64, epilogue_tile_n=64),
    ),
    "stored, float16, x shared in a cluster": (
        P(200, 384, 136, "float16", "float16", stored=True, activation="relu"),
        replace(TURNS, tile_n=192, cluster="n", epilogue_tile_n=64),
    ),
    "stored, gradient, several tiles": (
        P(200, 320, 136, layout="nt", stored=True, gradient=True),
        replace(TURNS, tile_n=160),
    ),
    "stored, gradient, weights shared in a cluster": (
        P(200, 320, 136, stored=True, gradient=True, activation="gelu_erf"),
        replace(TURNS, tile_m=64, cluster="m", epilogue_tile_n=64),
    ),
}
IN_ALL = [
    "stored, tails, more epilogue tiles than slots",
    "stored, float16, x shared in a cluster",
    "stored, gradient, weights shared in a cluster",
    "two warpgroups share rows",
    "weights shared in a cluster",
    "float16, three epilogue tiles",
    "gradient, tails, one warpgroup",
    "gradient, columns that end with the row",
]


@pytest.mark.parametrize("name", thorough.cases(CASES, IN_ALL))
def test_kernel_is_right_and_has_no_race(name, assert_near):
    problem, config = CASES[name]
    arrays = arrays_of(problem)
    for out, wanted in zip(jax.tree.leaves(interpret(problem, config, arrays)), truth(problem, *arrays), strict=True):
        assert out.dtype == problem.out_dtype
        assert_near(out, wanted, GATED.tolerance(problem) / 2)  # the kernel rounds once
    assert not engine.races_found()


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        CASES["stored, gradient, several tiles"],
        CASES["stored, gradient, weights shared in a cluster"],
        (P(70, 328, 136, stored=True, gradient=True), TURNS),  # tiles that share columns: not in place
    ],
)
def test_gradients_in_the_place_of_gate_and_up_are_the_same_and_have_no_race(problem, config):
    arrays = arrays_of(problem)
    for out, apart in zip(interpret(problem, config, arrays, in_place=True), interpret(problem, config, arrays), strict=True):
        np.testing.assert_array_equal(out, apart)
    assert not engine.races_found()


def test_detector_finds_a_gradient_that_does_not_wait_for_its_buffer(monkeypatch):
    wait_for_all_stores_only(monkeypatch)
    problem, config = CASES["gradient, more epilogue tiles than buffers"]
    assert has_a_race(lambda: interpret(problem, config, arrays_of(problem)))


# --- the kernel, compiled

needs_compiler = pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
STORED = [f"llama3-8b-8192-stored{kind}" for kind in ("", "-gradient")]


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(STORED, STORED))
def test_with_a_stored_gate_two_products_are_in_flight_and_nothing_spills(name):
    problem = GATED.shapes[name]
    config = GATED.default(problem, H200)
    arrays = jax.eval_shape(functools.partial(GATED.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(GATED.run, problem, config, H200), *arrays)
    (kernel,) = report.kernels
    assert (report.spills, kernel.serialized) == (0, "")
    assert report.smem_bytes == smem_bytes(problem, config)
    # The first step's and those of the loop, which waits for all but the last
    assert kernel.sass.count("HGMMA") == 2 * config.tile_k // 16 * config.tile_m // 64


@needs_compiler
def test_normalised_rows_take_the_shared_memory_that_was_counted():
    problem = replace(GATED.shapes["llama3-8b-128"], normalised=True)
    config = GATED.default(problem, H200)
    arrays = jax.eval_shape(functools.partial(GATED.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(GATED.run, problem, config, H200), *arrays)
    assert (report.spills, report.smem_bytes) == (0, smem_bytes(problem, config))


@pytest.mark.parametrize("m", [1, 16, 64])
@pytest.mark.parametrize(("n", "k"), [(14336, 4096), (9728, 2560), (8192, 2048)])
def test_few_rows_have_as_much_of_the_weights_on_their_way_as_is_fast(m, n, k):
    problem = replace(GATED.shapes["llama3-8b-128"], m=m, n=n, k=k, normalised=True, joined=True)
    config = GATED.default(problem, H200)
    step = 2 * config.tile_n * config.tile_k * 2  # bytes
    assert 80 * 1024 <= config.max_concurrent_steps * step <= 112 * 1024


SHIPPED = [f"{model}-{m}{kind}" for model in ("llama3-8b", "gemma2-9b") for m in (128, 4096) for kind in ("", "-gradient")]


@needs_compiler
@pytest.mark.parametrize("name", thorough.cases(SHIPPED, set(SHIPPED) - {"llama3-8b-128", "gemma2-9b-4096-gradient"}))
def test_a_step_is_eight_products_and_one_wait_and_nothing_spills(name):
    problem = GATED.shapes[name]
    config = GATED.default(problem, H200)
    arrays = jax.eval_shape(functools.partial(GATED.inputs, problem), jax.random.key(0))
    report = aot.compile_for(H200, functools.partial(GATED.run, problem, config, H200), *arrays)
    (kernel,) = report.kernels
    assert report.spills == 0
    assert report.smem_bytes == smem_bytes(problem, config)
    first, *_, last = (match.start() for match in re.finditer("HGMMA", kernel.sass))
    products = config.tile_k // 16 * 2 * (config.tile_m // 64 if config.wg_dimension == "n" else config.tile_m // 128)
    assert kernel.sass.count("HGMMA") == products
    assert "DEPBAR" not in kernel.sass[first:last]  # they are all in flight together


# --- the function


def written_out(activation: str, x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
    x, w_gate, w_up = (a.astype(F32) for a in (x, w_gate, w_up))
    product = functools.partial(jnp.matmul, precision="highest")
    return activate(activation, product(x, w_gate)) * product(x, w_up)


def layer(*lead: int) -> tuple[jax.Array, ...]:
    return normal(0, *lead, 72, 64, dtype=BF16), *(normal(i, 64, 136, dtype=BF16) / 8 for i in (1, 2))


@pytest.mark.parametrize("activation", ACTIVATIONS)
def test_the_activation_is_that_of_the_gate(activation, assert_near):
    out = gated_matmul(*layer(), activation=activation, backend="xla")
    assert out.dtype == BF16
    assert_near(out, written_out(activation, *layer()), 1e-2)


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(("backend", "transpose"), [("xla", False), ("xla", True), ("interpret", False)])
def test_gradients_are_those_in_float32(backend, transpose, assert_near):
    x, w_gate, w_up = layer(2)
    weights = normal(3, 2, 72, 136)

    def ours(x: jax.Array, w_gate: jax.Array, w_up: jax.Array) -> jax.Array:
        gate, up = (w.T if transpose else w for w in (w_gate, w_up))
        return gated_matmul(x, gate, up, transpose_w=transpose, backend=backend)

    def gradients(f: Callable[..., jax.Array], *args: jax.Array) -> Any:
        return jax.jit(jax.value_and_grad(lambda *a: (f(*a).astype(F32) * weights).sum(), argnums=(0, 1, 2)))(*args)[1]

    wanted = gradients(functools.partial(written_out, "silu"), *(a.astype(F32) for a in (x, w_gate, w_up)))
    for y, z, argument in zip(gradients(ours, x, w_gate, w_up), wanted, (x, w_gate, w_up)):
        assert y.dtype == argument.dtype
        assert_near(y, z, 2e-2)  # the gradients of gate and up are rounded to bfloat16


@pytest.mark.usefixtures("no_races")
@pytest.mark.parametrize(("backend", "transpose"), [("xla", False), ("xla", True), ("interpret", False)])
@pytest.mark.parametrize("tile_n", [64, 128])  # which divides n, and which does not
def test_one_weight_of_gate_and_up_gives_what_two_give(backend, transpose, tile_n, assert_near):
    x, *weights = normal(0, 24, 64, dtype=BF16), *(normal(i, 64, 192, dtype=BF16) / 8 for i in (1, 2))
    both = jnp.concatenate(weights, 1)
    options = {"backend": backend, "transpose_w": transpose, "rms_epsilon": 1e-5}
    if backend == "interpret":
        options["config"] = replace(BASE, tile_m=64, tile_n=tile_n, max_concurrent_steps=2, compute_warpgroups=1)

    def ours(x: jax.Array, *weights: jax.Array) -> jax.Array:
        found = gated_matmul(x, *(w.T if transpose else w for w in weights), *(None,) * (len(weights) == 1), **options)
        assert found.shape == (24, 192)
        return found

    assert_near(ours(x, both), ours(x, *weights), 1e-2)
    if backend == "interpret":
        return
    of_both = jax.grad(lambda *a: (ours(*a).astype(F32) ** 2).sum(), argnums=(0, 1))(x, both)
    dx, *dweights = jax.grad(lambda *a: (ours(*a).astype(F32) ** 2).sum(), argnums=(0, 1, 2))(x, *weights)
    for y, z in zip(of_both, (dx, jnp.concatenate(dweights, 1)), strict=True):
        assert_near(y, z, 1e-2)
    assert_near(jax.vmap(ours, (0, None))(x[None], both)[0], ours(x, both), 1e-2)


@needs_compiler
def test_one_weight_is_read_in_place():
    shapes = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((16, 512), (512, 512))]
    run = functools.partial(
        gated_matmul, backend="mosaic", config=replace(BASE, tile_m=64, tile_n=128, max_concurrent_steps=4, wg_dimension="n")
    )
    with gpu.target("h200"):
        text = jax.jit(lambda x, w: run(x, w, None)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert {op for op in re.findall(r"stablehlo\.(\w+)", text) if op != "custom_call"} <= {"reshape"}


def test_one_weight_of_few_rows_is_multiplied_by_matmuls_kernel_where_that_has_a_config():
    shapes = [jax.ShapeDtypeStruct(shape, BF16) for shape in ((1, 4096), (4096, 28672))]
    product = MatmulConfig(**dataclasses.asdict(ONE) | {"split_k": 1})
    with gpu.target("h200"), use_configs({"matmul": product}):
        text = jax.jit(lambda x, w: gated_matmul(x, w, None)).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 2  # and the one of the gate
    assert "dot_general" not in text


def test_the_forward_pass_writes_and_the_gradient_keeps_nothing_of_the_results_size_but_the_result():
    shapes = [jax.ShapeDtypeStruct(a.shape, a.dtype) for a in layer()]
    with gpu.target("h200"):
        f = functools.partial(gated_matmul, backend="mosaic")
        text = jax.jit(f).trace(*shapes).lower(lowering_platforms=("cuda",)).as_text()
        _, vjp = jax.eval_shape(lambda *arrays: jax.vjp(f, *arrays), *shapes)
    assert text.count("stablehlo.custom_call @mosaic_gpu") == 1
    assert {op for op in re.findall(r"stablehlo\.(\w+)", text) if op != "custom_call"} <= {"reshape"}
    assert {x.shape for x in jax.tree.leaves(vjp)} == {(72, 64), (64, 136)}


@pytest.mark.parametrize("axes", [(0, None, None), (None, 0, 0), (0, 0, None)], ids=str)
def test_vmap_maps_any_of_the_arrays(axes, assert_near):
    arrays = [jnp.stack([a, a[::-1]]) if axis == 0 else a for a, axis in zip(layer(), axes)]
    ours = functools.partial(gated_matmul, backend="xla")
    out = jax.vmap(ours, axes)(*arrays)
    assert_near(out, jax.vmap(functools.partial(written_out, "silu"), axes)(*arrays), 1e-2)
    grads = jax.grad(lambda *a: jax.vmap(ours, axes)(*a).astype(F32).sum(), argnums=(0, 1, 2))(*arrays)
    wide = [a.astype(F32) for a in arrays]
    wanted = jax.grad(lambda *a: jax.vmap(functools.partial(written_out, "silu"), axes)(*a).sum(), argnums=(0, 1, 2))(*wide)
    for y, z in zip(grads, wanted):
        assert_near(y, z, 3e-2)


def test_gradients_through_shard_map_over_rows(assert_near):
    mesh = jax.make_mesh((2,), ("x",), axis_types=(AxisType.Auto,), devices=jax.devices()[:2])
    rows, whole = PartitionSpec("x"), PartitionSpec()
    f = jax.shard_map(functools.partial(gated_matmul, backend="xla"), mesh=mesh, in_specs=(rows, whole, whole), out_specs=rows)
    grads = jax.grad(lambda *a: f(*a).astype(F32).sum(), argnums=(0, 1, 2))(*layer())
    wanted = jax.grad(lambda *a: written_out("silu", *a).sum(), argnums=(0, 1, 2))(*(a.astype(F32) for a in layer()))
    for y, z in zip(grads, wanted):
        assert_near(y, z, 2e-2)


X, W = np.zeros((8, 16), BF16), np.zeros((16, 24), BF16)


@pytest.mark.parametrize(
    ("arrays", "options", "error", "message"),
    [
        ((X, W, W[:, :8]), {}, ValueError, r"w_gate\(16, 24\) and w_up\(16, 8\) differ"),
        ((X, W[:, :23], None), {}, ValueError, r"w_gate\(16, 23\) has an odd number of columns"),
        ((X, W.T, W.T), {}, ValueError, r"x\(8, 16\) and w_gate\(24, 16\) differ in k: 16 != 24 \(transpose_w=False\)"),
        ((X, W[None], W), {}, ValueError, r"w_gate has shape \(1, 16, 24\): .* use jax.vmap"),
        ((X, W, W.astype(F16)), {}, ValueError, "x is bfloat16 and w_up is float16: cast one with .astype"),
        ((X.astype(int), W, W), {}, TypeError, "x has dtype int.*cast it first"),
        ((X, W, W), {"activation": "swish"}, ValueError, "activation='swish' is not one of none, relu"),
        ((X, W.T, W.T), {"transpose_w": "yes"}, TypeError, "transpose_w='yes' is neither True nor False"),
        ((X, W, W), {"out_dtype": int}, TypeError, "out_dtype int.* is not a float"),
        ((X, W, W), {"config": {"tile_m": 64}}, TypeError, "pass a mgpu_ops.GatedMatmulConfig"),
        ((X, W[:, :4], W[:, :4]), {"backend": "interpret"}, ValueError, "n=4 needs 16-byte rows of the weights"),
    ],
)
def test_error_names_the_value_the_rule_and_the_way_out(arrays, options, error, message):
    with pytest.raises(error, match=message):
        gated_matmul(*arrays, **options)


@pytest.mark.parametrize(
    ("problem", "changes", "reason"),
    [
        (P(512, 512, 512), {}, None),
        (P(512, 512, 512), {"tile_m": 32}, "must be a multiple of 64"),
        (P(512, 512, 512), {"tile_n": 256, "max_concurrent_steps": 2}, "the accumulator takes 256 registers"),
        (P(512, 512, 512), {"tile_n": 128, "max_concurrent_steps": 5}, "bytes of shared memory exceed"),
        (P(512, 512, 512, gradient=True), {"tile_n": 128, "max_concurrent_steps": 4}, "bytes of shared memory exceed"),
        (P(512, 512, 512), {"cluster": "k"}, "cluster='k' is not one of"),
        (P(512, 512, 512, out_dtype="float32", gradient=True), {}, "gradients have the inputs' dtype"),
        (P(512, 512, 512, stored=True), {}, "schedule='cooperative' must be 'pingpong' with a stored gate"),
        (P(512, 512, 512), {"schedule": "pingpong"}, "schedule='pingpong' must be 'cooperative' without a stored gate"),
        (P(512, 512, 512, stored=True), {"schedule": "pingpong", "wg_dimension": "n"}, "must be 'm' with schedule='pingpong'"),
        (P(512, 512, 512, stored=True), {"schedule": "pingpong"}, None),
        (
            P(512, 512, 512, stored=True),
            {"schedule": "pingpong", "tile_n": 96, "epilogue_tile_n": 32},
            "tile_n=96 must be a multiple of 64 with a stored gate",
        ),
        (
            P(512, 512, 512, layout="nt", stored=True),
            {"schedule": "pingpong", "tile_n": 96, "epilogue_tile_n": 32, "max_concurrent_steps": 2},
            None,
        ),
        (P(512, 512, 512, out_dtype="float32", stored=True), {}, "with a stored gate all arrays have the inputs' dtype"),
    ],
    ids=str,
)
def test_a_config_runs_or_the_reason_names_the_rule(problem, changes, reason):
    found = GATED.check(problem, replace(BASE, **changes), H200)
    assert (found is None) == (reason is None)
    assert reason is None or reason in found
