"""decoding_layer: values, gradients and transforms; the kernel interpreted, and compiled for an H200."""

from __future__ import annotations

import functools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import decoding_layer
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.decoding import kernel
from mgpu_ops.decoding.products import Cut, counters_of, products_of, supports
from tests import thorough
from tests.arrays import normal

BF16, F32 = jnp.bfloat16, jnp.float32
H200 = gpu.find("h200")
LLAMA = [(4096, 4096), (4096, 28672), (14336, 4096), (4096, 6144)]  # Llama-3 8B's


def arrays(
    rows: int = 3, k: int = 256, width: int = 384, hidden: int = 256, n: int = 128, seed: int = 0, dtype: Any = BF16
) -> list[Any]:
    """attended, x, w_out, w_gate_up, w_down and w_next (n = 0: none), whose results are about as large as x."""
    sizes = [(k, width), (width, 2 * hidden), (hidden, width), (width, n)][: 4 if n else 3]
    weights = [normal(seed + 2 + i, *s) / s[0] ** 0.5 for i, s in enumerate(sizes)]
    return [a.astype(dtype) for a in (normal(seed, rows, k), normal(seed + 1, rows, width), *weights)]


def written_out(given: list[Any], next_normalised: bool = False, epsilon: float = 1e-6) -> list[np.ndarray]:
    """In float64, without rounding anything between."""
    attended, x, w_out, w_gate_up, w_down, *w_next = (np.array(a, np.float64) for a in given)

    def norm(x: np.ndarray) -> np.ndarray:
        return x / np.sqrt(np.mean(x * x, -1, keepdims=True) + epsilon)

    x = x + attended @ w_out
    gate, up = np.split(norm(x) @ w_gate_up, 2, -1)
    x = x + (gate / (1 + np.exp(-gate)) * up) @ w_down
    return [x, *((norm(x) if next_normalised else x) @ w for w in w_next)]


CASES: dict[str, dict[str, Any]] = {
    "one row": {"rows": 1},
    "rows that 8 does not divide, parts of k": {"rows": 13, "k": 1024, "width": 256, "hidden": 1024},
    "no product behind": {"n": 0},
    "64 rows, float16": {"rows": 64, "dtype": jnp.float16},
    "a wide product behind": {"rows": 8, "n": 512},
}


@pytest.mark.parametrize("backend", [None, "xla", "interpret"])
@pytest.mark.parametrize("case", thorough.cases(CASES, ["64 rows, float16", "a wide product behind"]))
def test_all_products_with_norms_and_residuals(case, backend, assert_near):
    given = arrays(**CASES[case])
    normalised = case == "one row"
    out = jax.jit(functools.partial(decoding_layer, next_normalised=normalised, backend=backend))(*given)
    assert len(out) == len(given) - 4
    for y, z in zip(out, written_out(given, normalised), strict=True):
        assert (y.shape, y.dtype) == (z.shape, given[0].dtype)
        assert_near(y, z, 2e-2)  # what is rounded between the products adds up
    assert backend != "interpret" or not engine.races_found()


def test_an_activation_an_epsilon_and_leading_dimensions(assert_near):
    given = arrays(6)
    flat = [a.reshape(2, 3, -1) for a in given[:2]]
    x, product = decoding_layer(*flat, *given[2:], activation="relu", rms_epsilon=0.5)
    assert (x.shape, product.shape) == ((2, 3, 384), (2, 3, 128))
    wide = [np.array(a, np.float64) for a in given]
    rows = wide[1] + wide[0] @ wide[2]
    gate, up = np.split(rows / np.sqrt(np.mean(rows * rows, -1, keepdims=True) + 0.5) @ wide[3], 2, -1)
    assert_near(x.reshape(6, -1), rows + (np.maximum(gate, 0) * up) @ wide[4], 2e-2)


def test_vmap_gives_it_more_rows_and_weights_of_their_own_run_too(assert_near):
    given, other = arrays(2), arrays(2, seed=20)
    both = [jnp.stack(pair) for pair in zip(given[:2], other[:2], strict=True)]
    out = jax.vmap(functools.partial(decoding_layer, backend="interpret"), (0, 0, *[None] * 4))(*both, *given[2:])
    for i, of in enumerate((given, [*other[:2], *given[2:]])):
        for y, z in zip(out, written_out(of), strict=True):
            assert_near(y[i], z, 2e-2)
    out = jax.vmap(decoding_layer)(*(jnp.stack(pair) for pair in zip(given, other, strict=True)))
    for y, z in zip(out, written_out(other), strict=True):
        assert_near(y[1], z, 2e-2)


def test_gradients_are_those_of_the_formula():
    given = [a.astype(F32) for a in arrays(2)]
    loss = lambda backend, *a: sum(y.astype(F32).sum() for y in decoding_layer(*a, backend=backend))  # noqa: E731
    low = [a.astype(BF16) for a in given]
    found = jax.grad(functools.partial(loss, "interpret"), argnums=(0, 3))(*low)
    wanted = jax.grad(functools.partial(loss, "xla"), argnums=(0, 3))(*given)
    for y, z in zip(found, wanted, strict=True):
        assert np.linalg.norm(np.array(y, np.float64) - np.array(z, np.float64)) < 0.05 * np.linalg.norm(z)


@pytest.mark.parametrize("tiles", [2, 4])
@pytest.mark.parametrize("rows", [1, 16, 64])
def test_every_unit_has_a_block_and_every_count_is_reached(rows, tiles):
    shapes = [jax.ShapeDtypeStruct(s, BF16) for s in LLAMA]
    cut = Cut.of(rows, H200, tiles)
    products = products_of(cut, jax.ShapeDtypeStruct((rows, 4096), BF16), shapes, True, 132)
    units = [128, 224 if tiles == 2 else 112, 128, 96]
    assert [(p.units, p.parts) for p in products] == list(zip(units, [2 * tiles, 1, 2 * tiles, tiles], strict=True))
    places = counters_of(products)
    numbers = [n for c in places for n in range(c.done, c.end)]
    assert numbers == list(range(places[-1].end))  # no two counters share a place
    for before, product, place in zip(products, products[1:], places, strict=False):
        assert (place.chunks, before.groups % product.parts) == (product.parts, 0)
        chunks = [group * place.chunks // before.groups for group in range(before.groups)]
        for chunk in range(product.parts):  # the columns of a chunk are those that a part of k reads
            columns = [group * before.columns for group in range(before.groups) if chunks[group] == chunk]
            assert len(columns) == before.groups // product.parts
            share = product.k // product.parts
            assert (columns[0], columns[-1] + before.columns) == (chunk * share, (chunk + 1) * share)
    assert cut.stages >= 4


def test_a_call_that_names_no_backend_runs_through_xla():
    given = arrays(2)
    with gpu.target(H200):
        traced = str(jax.make_jaxpr(decoding_layer)(*given))
        named = str(jax.make_jaxpr(functools.partial(decoding_layer, backend="mosaic"))(*given))
    assert ("mgpu_ops_decoding_layer" in traced, "mgpu_ops_decoding_layer" in named) == (False, True)


def test_what_cannot_run_is_told_and_runs_through_xla():
    given: Any = arrays(2, k=192)
    assert "multiple of 128" in str(supports(given[0], given[1], given[2:], H200))
    assert decoding_layer(*given)[0].shape == (2, 384)
    with pytest.raises(ValueError, match="multiple of 128"):
        decoding_layer(*given, backend="interpret")
    for rows, told in ((65, "1 to 64"), (64, "None")):
        attended, x, *weights = arrays(rows)
        assert told in str(supports(attended, x, weights, H200))
    with pytest.raises(ValueError, match="do not fit"):
        decoding_layer(*[*given[:2], *given[3:5], given[2]])
    with pytest.raises(ValueError, match="cast one"):
        decoding_layer(*[given[0].astype(F32), *given[1:]])
    with pytest.raises(ValueError, match="w_next has shape"):
        decoding_layer(*[*given[:5], given[2][:7]])
    with pytest.raises(ValueError, match="finite"):
        decoding_layer(*given, rms_epsilon=float("nan"))
    with pytest.raises(TypeError, match="floats"):
        decoding_layer(*[jnp.zeros((2, 192), int), *given[1:]])


@pytest.mark.parametrize("rows", thorough.cases({"16": 16, "64": 64}, ["64"]))
def test_compiled_for_an_h200_without_spills(rows):
    if reason := aot.available():
        pytest.skip(reason)
    count = int(rows)
    shapes = [(count, 4096), (count, 4096), (1,), *LLAMA]
    report = aot.compile_for(
        "h200",
        functools.partial(kernel.launch, "silu", True, H200),
        *(jax.ShapeDtypeStruct(s, F32 if s == (1,) else BF16) for s in shapes),
    )
    (found,) = report.kernels
    assert (found.spill_stores, found.serialized) == (0, "")
    assert mgpu_ops.decoding_layer is decoding_layer


@pytest.mark.gpu
@pytest.mark.parametrize("seed", range(8))
def test_random_sizes_are_right_and_have_the_same_bits_again(seed, assert_near):
    rng = np.random.default_rng(seed)
    rows = [1, 8, 16, 64, *map(int, rng.integers(1, 65, 4))][seed]
    k, width, hidden, n = (128 * int(rng.integers(1, most)) for most in (33, 33, 65, 65))
    given = arrays(rows, k, width, hidden, n * (seed % 4 > 0), seed, [BF16, jnp.float16][seed % 2])
    jax.block_until_ready(jnp.full(2**26, jnp.nan))  # what results may find in memory
    run = jax.jit(functools.partial(decoding_layer, next_normalised=seed % 3 == 0, backend="mosaic"))
    out = run(*given)
    for y, z in zip(out, written_out(given, seed % 3 == 0), strict=True):
        assert_near(y, z, 2e-2)
    for y, z in zip(out, run(*given), strict=True):
        np.testing.assert_array_equal(np.array(y, np.float32), np.array(z, np.float32))
