"""What the threads of a warp tell each other, as the interpreter computes it: arrays of 32 numbers."""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from hypothesis import given
from hypothesis import strategies as st
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import aot, engine, lanes
from mgpu_ops.core.interpreter import interpreted


def of_a_warp(function):
    """A function of values of a warp's 32 threads, traced as the interpreter traces it."""

    @jax.jit
    def traced(*args):
        with interpreted(True):
            return function(*args)

    return traced


def of_threads(values: st.SearchStrategy[int]) -> st.SearchStrategy[np.ndarray]:
    return st.lists(values, min_size=32, max_size=32).map(lambda values: np.array(values, np.int32))


SHARES = of_threads(st.integers(0, 2**20))


@given(SHARES, st.integers(2**20, 2**24))
def test_a_thread_has_the_sum_of_what_it_and_those_before_it_have_up_to_a_limit(values, most):
    sums, limited = of_a_warp(lambda x: (lanes.sums(x), lanes.sums(x, most)))(values)
    assert sums.tolist() == np.cumsum(values).tolist()
    assert limited.tolist() == np.minimum(np.cumsum(values), most).tolist()


@given(SHARES, st.integers(-3, 40))
def test_all_threads_get_what_one_of_them_has_and_how_many_agree(values, lane):
    found, count = of_a_warp(lambda x: (lanes.of_lane(x, jnp.int32(lane)), lanes.how_many(x > 2**19)))(values)
    assert found == values[np.clip(lane, 0, 31)]
    assert count == np.count_nonzero(values > 2**19)


@given(st.tuples(*[of_threads(st.integers(-2, 2))] * 3))
def test_of_equal_largest_numbers_the_first_one_of_the_first_thread_is_marked(values):
    found = of_a_warp(lambda *numbers: lanes.mark_largest(list(numbers), -9))(*values)
    of_thread = np.stack(values, 1)  # [32, 3]
    wanted = of_thread.copy().reshape(-1)
    wanted[np.argmax(wanted)] = -9
    np.testing.assert_array_equal(np.stack(found, 1).reshape(-1), wanted)


@pytest.mark.parametrize("neighbours", [1, 8, 32])
def test_neighbouring_threads_get_the_sum_of_what_they_have(neighbours):
    values = np.arange(32, dtype=np.float32)
    sums = values.reshape(-1, neighbours).sum(1, keepdims=True)
    found = of_a_warp(lambda x: lanes.total(x, neighbours))(values)
    np.testing.assert_array_equal(found.reshape(-1, neighbours), np.broadcast_to(sums, (32 // neighbours, neighbours)))


def through_memory(x: jax.Array, interpret: bool) -> tuple[jax.Array, jax.Array]:
    """Each thread reads two of x [64]; the first four bytes of x go through shared memory to one word of each thread."""

    def body(x: Any, added: Any, words: Any, smem: Any) -> None:
        own = lanes.number()
        first, second = lanes.load_global(x, 2 * own, 2, None)
        even = (own & 1) == 0
        lanes.store(added, 31 - own, lanes.float_of(first) + lanes.float_of(second), even)
        lanes.store(added, 31 - own, lanes.float_of(second), ~even)
        for i in range(4):
            lanes.store(smem, 4 * own + i, own + i)
        lanes.warp_barrier()
        lanes.store(words, own, lanes.load_shared(smem, own ^ 1))

    return engine.kernel(
        body,
        engine.Launch("lanes", {"block": 1}, 1, interpret=interpret),
        out_type=(jax.ShapeDtypeStruct((32,), jnp.float32), jax.ShapeDtypeStruct((32,), jnp.int32)),
        scratch_types={"smem": plgpu.SMEM((128,), jnp.int8)},
    )(x)


def test_a_thread_reads_neighbours_stores_where_it_shall_and_loads_four_bytes_as_one_word():
    x = np.random.default_rng(0).normal(size=64).astype(np.float32)
    added, words = through_memory(x, True)
    pairs, own = x.reshape(32, 2), np.arange(32)
    np.testing.assert_array_equal(added[::-1], np.where(own % 2, pairs[:, 1], pairs.sum(1)))
    stored = (own[:, None] + np.arange(4)).astype(np.uint8).reshape(-1).view(np.int32)
    np.testing.assert_array_equal(words, stored[own ^ 1])
    assert not engine.races_found()


@pytest.mark.skipif(aot.available() is not None, reason=str(aot.available()))
def test_compiled_threads_read_pairs_by_one_instruction_and_store_bytes():
    report = aot.compile_for("h200", lambda x: through_memory(x, False), jax.ShapeDtypeStruct((64,), jnp.float32))
    assert "LDG.E.64" in report.sass
    assert "STS.U8" in report.sass


def test_after_a_barrier_of_the_block_warpgroups_see_what_others_have_stored():
    def body(x: Any, out: Any, barrier: Any, smem: Any) -> None:
        own = lax.axis_index("wg")
        smem[own] = x[own]
        barrier.wait()
        out[own] = smem[1 - own]

    x = jnp.arange(256, dtype=jnp.float32).reshape(2, 128)
    found = engine.kernel(
        body,
        engine.Launch("barrier", {"block": 1}, 2, interpret=True),
        out_type=jax.ShapeDtypeStruct(x.shape, x.dtype),
        scratch_types={"barrier": engine.BlockBarrier(2), "smem": plgpu.SMEM(x.shape, x.dtype)},
    )(x)
    np.testing.assert_array_equal(found, x[::-1])
    assert not engine.races_found()
