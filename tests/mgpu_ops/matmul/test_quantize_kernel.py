"""The kernel of `mgpu_ops.quantize` and `fp8_matmul`, interpreted and compiled: the bits of XLA's way."""

from __future__ import annotations

import dataclasses
import functools
import itertools
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest

import mgpu_ops
from mgpu_ops import QuantizeConfig as C
from mgpu_ops import QuantizeProblem as P
from mgpu_ops import fp8_matmul, quantize, spec_of
from mgpu_ops.core import aot, engine, gpu
from mgpu_ops.matmul import quantizing
from mgpu_ops.registry import resolution
from tests.arrays import normal

OP, H200 = spec_of("quantize"), gpu.find("h200")
RUN = quantizing.dispatch.run
E4M3, E5M2 = "float8_e4m3fn", "float8_e5m2"


def bits(x: Any) -> np.ndarray:
    return np.asarray(x).view(np.uint8) if x.dtype.itemsize == 1 else np.asarray(x)


@pytest.mark.parametrize(
    ("problem", "config"),
    [
        (P(144, 272, amax="also"), C(128, 4, 8, "rows")),  # tiles that the array's end cuts, both ways
        (P(16, 16, "float32", E5M2), C(256, 8, 0, "columns")),
        (P(48, 144, "float16", E4M3, "gate", "only"), C(128, 4, 4, "rows")),
        (P(48, 144, "bfloat16", E5M2, "gate_gradient", "also"), C(128, 4, 4, "columns")),
        (P(48, 144, batch=3, amax="also"), C(128, 4, 8, "rows")),
        (P(144, 32, "float32", batch=2), C(128, 4, 0, "columns")),
        (P(144, 272, gathered=40, amax="also"), C(128, 8, 4, "columns")),
        (P(48, 144, "float16", E5M2, gathered=100), C(128, 4, 0, "rows")),
        (P(48, 144, of="gate", row_scale=True, amax="also"), C(128, 4, 4, "rows")),
        (P(144, 272, to=E5M2, of="gate_gradient", row_scale=True, amax="also"), C(128, 4, 4, "columns")),
        (P(48, 144, to=E5M2, of="gate_gradient", row_scale=True, amax="only"), C(128, 4, 4, "rows")),
        (P(144, 272, scheme="row", scheme_t="row"), C(128, 4, 0, "rows")),
        (P(272, 144, "float16", scheme="block", scheme_t="block"), C(128, 4, 0, "rows")),
        (P(144, 48, to=E5M2, scheme="block", scheme_t="square"), C(128, 4, 0, "columns")),
        (P(272, 32, to=E5M2, scheme="square", scheme_t="square"), C(128, 4, 0, "columns")),
    ],
    ids=str,
)
def test_the_interpreted_kernel_gives_the_bits_of_xla_without_races(problem: P, config: C) -> None:
    assert OP.check(problem, config, H200) is None
    arrays = OP.inputs(problem, jax.random.key(0))
    found = OP.run(problem, config, H200, *arrays, interpret=True)
    assert not engine.races_found()
    for one, other in zip(found, OP.reference(problem, *arrays), strict=True):
        assert (one.dtype, one.shape) == (other.dtype, other.shape)
        exact = problem.of == "array" and not problem.by_tile
        if exact or one.dtype == jnp.float32:
            of_rows = problem.sums_rows and one.ndim == 1  # sums of numbers of both signs
            np.testing.assert_allclose(bits(one), bits(other), rtol=0 if exact else 1e-6, atol=1e-4 if of_rows else 0)
        else:  # compiled, XLA computes gates and scales otherwise than operation by operation: the next number at times
            assert np.abs(bits(one).astype(int) - bits(other).astype(int)).max() <= 1
            assert (bits(one) == bits(other)).mean() > 0.99


def test_gates_are_those_of_jax_within_their_rounding() -> None:
    gradient, gate, up = normal(0, 3, 32, 48)
    (hidden,) = quantizing.computed("gate", gate, up)
    wanted, pull = jax.vjp(lambda gate, up: jax.nn.silu(gate) * up, gate, up)
    np.testing.assert_allclose(hidden, wanted, rtol=1e-5, atol=1e-6)
    for one, other in zip(quantizing.computed("gate_gradient", gradient, gate, up), pull(gradient), strict=True):
        np.testing.assert_allclose(one, other, rtol=1e-5, atol=1e-6)


@pytest.mark.parametrize("dtype", ["bfloat16", "float32"])
def test_quantize_and_fp8_matmul_run_the_kernel_where_it_was_measured(dtype: str, monkeypatch: pytest.MonkeyPatch) -> None:
    """As calls on a GPU: with the same results, and each array rounded once for all its products."""
    x, w = normal(0, 32, 48).astype(dtype), normal(1, 48, 64).astype(dtype)
    step = jax.value_and_grad(lambda x, w: jnp.sum(fp8_matmul(x, w).astype(jnp.float32)), (0, 1))
    wanted = jax.tree.map(np.asarray, (quantize(x, "tensor", transpose=True), step(x, w)))
    ran: list[P] = []

    def run(spec: Any, problem: Any, arrays: Any, **options: Any) -> Any:
        if spec is not OP:
            return RUN(spec, problem, arrays, **options)
        ran.append(problem)
        return spec.run(problem, spec.default(problem, H200), H200, *arrays, interpret=True)

    monkeypatch.setattr(quantizing.dispatch, "run", run)
    monkeypatch.setattr(quantizing.partition, "applies", lambda *_: False)  # as with one GPU: interpreted kernels are not split
    quantizing._batchable.cache_clear()
    found = quantize(x, "tensor", transpose=True), step(x, w)
    quantizing._batchable.cache_clear()
    jax.tree.map(lambda a, b: np.testing.assert_array_equal(bits(a), bits(b)), found, wanted)
    assert set(ran) == {P(32, 48, dtype), P(48, 64, dtype), P(32, 64, dtype, E5M2)}


@pytest.mark.parametrize("name", ["llama3-8b-hidden", "llama3-8b-gate-gradient", "llama3-8b-gate", "llama3-8b-hidden-delayed"])
def test_the_default_compiles_without_spills_into_the_memory_it_is_said_to_take(name: str) -> None:
    if reason := aot.available():
        pytest.skip(reason)
    problem = OP.shapes[name]
    shapes = jax.eval_shape(functools.partial(OP.inputs, problem), jax.random.key(0))
    config = OP.default(problem, H200)
    report = aot.compile_for("h200", functools.partial(OP.run, problem, config, H200), *shapes)
    assert report.spills == 0
    assert report.smem_bytes == quantizing.smem_bytes(problem, config)
    assert report.sass.count("MUFU.RCP") <= (1 if problem.of == "array" else 10**6)  # of the scale, once
    assert "CALL" not in report.sass


@pytest.mark.parametrize(
    "problem", [P(8192, 4096), P(8192, 14336, of="gate"), P(8192, 14336, of="gate_gradient", to=E5M2)], ids=str
)
def test_that_largest_values_are_found_too_takes_no_registers_of_the_numbers(problem: P) -> None:
    if reason := aot.available():
        pytest.skip(reason)

    def registers(amax: str) -> int:
        p = dataclasses.replace(problem, amax=amax)
        shapes = jax.eval_shape(functools.partial(OP.inputs, p), jax.random.key(0))
        report = aot.compile_for("h200", functools.partial(OP.run, p, OP.default(p, H200), H200), *shapes)
        return max(kernel.registers for kernel in report.kernels)

    assert registers("also") < registers("none") + 32  # it was 53 to 55 more, when ptxas put the maxima off to the end


def test_rows_gathered_of_an_array_without_any_are_zeros() -> None:
    x, index, scale = jnp.zeros((0, 32), jnp.bfloat16), jnp.arange(-1, 15, dtype=jnp.int32), jnp.ones(())
    values, values_t, largest = quantizing.both_ways((x,), (scale,), E4M3, amax="also", index=index)
    assert (values.shape, values_t.shape, values.dtype) == ((16, 32), (32, 16), E4M3)
    assert not any(bits(found).any() for found in (values, values_t, largest))


def test_what_the_kernel_does_not_take_is_told_and_runs_xla() -> None:
    assert "rows=40 is no multiple of 16: pad it to 48" in OP.supports(P(40, 64), H200)
    assert "dtype float64 is not one of" in OP.supports(P(48, 64, "float64"), H200)
    assert "to=bfloat16 is not one of" in OP.supports(P(48, 64, to="bfloat16"), H200)
    with pytest.raises(ValueError, match="of='half' is not one of array, gate, gate_gradient"):
        P(48, 64, of="half")
    with mgpu_ops.target("h200"):
        values, _, values_t, _ = jax.eval_shape(lambda x: quantize(x, "tensor", transpose=True), jnp.ones((3, 5)))
    assert (values.shape, values_t.shape) == ((3, 5), (5, 3))


def test_every_config_of_the_space_has_tiles_that_cover_the_array() -> None:
    for config in itertools.starmap(C, itertools.product(*OP.space(P(16, 16), H200).values())):
        for rows, columns in ((16, 16), (144, 272), (8192, 14336)):
            down, across = quantizing.problem.tiles(P(rows, columns), config)
            assert 0 <= down * config.tile_rows - rows < config.tile_rows
            assert 0 <= across * config.tile_columns - columns < config.tile_columns
    assert dataclasses.replace(config, tile_rows=64) not in OP.candidates(P(16, 16), H200)


@pytest.mark.parametrize(
    ("problem", "on_h200", "on_h100"),
    [
        (P(8192, 4096), "kernel", "kernel"),
        (P(8192, 4096, scheme="row", scheme_t="row"), "kernel", "kernel"),
        (P(272, 8192, scheme="block", scheme_t="square"), "kernel", "kernel"),
        (P(10208, 6144, "float16", of="gate"), "kernel", "kernel"),
        (P(176, 8192, "float16"), "xla", "xla"),
        (P(8192, 14336, amax="only"), "xla", "xla"),
        (P(8192, 14336, of="gate", amax="only"), "kernel", "xla"),  # XLA computes gates slower than an H200 reads
        (P(8192, 14336, to=E5M2, of="gate_gradient", amax="only"), "kernel", "xla"),
    ],
    ids=str,
)
def test_a_call_runs_the_kernel_but_for_small_arrays_and_their_largest_values(problem: P, on_h200: str, on_h100: str) -> None:
    assert resolution.resolve(OP, problem, H200).runs == on_h200
    assert resolution.resolve(OP, problem, gpu.find("h100-sxm")).runs == on_h100
