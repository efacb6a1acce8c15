"""The epilogue: all epilogue tiles are stored, and none is overwritten before that."""

from __future__ import annotations

import contextlib
import io
from collections.abc import Iterator
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.epilogue import deferred_stores, store_tile

TILES, ROWS, COLUMNS = 3, 128, 64


@pytest.fixture(autouse=True)
def clean_interpreter() -> Iterator[None]:
    """Each test starts with no kernel interpreted; the race detector's pages go nowhere."""
    engine.reset_interpreter()
    with contextlib.redirect_stdout(io.StringIO()):
        yield
    engine.reset_interpreter()


def stored(buffers: int, height: int, width: int) -> Any:
    """A kernel that copies `TILES` tiles, in epilogue tiles of height x width."""

    def body(x_ref: Any, out_ref: Any, *, staging: Any) -> None:
        def tile(t: Any, _: Any) -> Any:
            def copy(staged: Any, i: int, j: int) -> None:
                plgpu.copy_smem_to_gmem(staged, out_ref.at[t, pl.ds(i, height), pl.ds(j, width)])

            store_tile(x_ref[t], staging, copy)
            return _

        lax.fori_loop(0, TILES, tile, ())
        plgpu.wait_smem_to_gmem(0)

    return engine.kernel(
        body,
        engine.Launch("test", {"block": 1}, warpgroups=1, interpret=True),
        out_type=jax.ShapeDtypeStruct((TILES, ROWS, COLUMNS), jnp.float32),
        scratch_types={"staging": plgpu.SMEM((buffers, height, width), jnp.float32)},
    )


X = np.arange(TILES * ROWS * COLUMNS, dtype=np.float32).reshape(TILES, ROWS, COLUMNS)


@pytest.mark.parametrize(
    ("buffers", "height", "width"), [(1, 128, 64), (1, 64, 64), (2, 64, 64), (1, 64, 32), (2, 64, 32), (3, 64, 32), (4, 64, 32)]
)
def test_all_epilogue_tiles_of_all_tiles_are_stored_without_a_race(buffers, height, width):
    np.testing.assert_array_equal(stored(buffers, height, width)(X), X)
    assert not engine.races_found()


@pytest.mark.parametrize("buffers", [1, 2, 4])
def test_detector_finds_a_tile_that_does_not_wait_for_its_buffer(buffers, monkeypatch):
    wait = plgpu.wait_smem_to_gmem

    def for_one_less(n: int, *, wait_read_only: bool = False) -> None:
        wait(n + 1 if wait_read_only else n, wait_read_only=wait_read_only)

    monkeypatch.setattr(plgpu, "wait_smem_to_gmem", for_one_less)
    try:
        stored(buffers, 64, 32)(X).block_until_ready()
        found = engine.races_found()
    except jax.errors.JaxRuntimeError as error:  # from jax 0.12 on a race raises
        found = "RACE DETECTED" in str(error)
    assert found


@pytest.mark.parametrize(
    ("tiles", "steps", "wanted"),
    [(4, 8, [[0], [1], [2], [3]]), (4, 3, [[0, 1], [2, 3]]), (5, 3, [[0, 1], [2, 3], [4]]), (3, 1, [[0, 1, 2]])],
)
def test_first_steps_store_all_epilogue_tiles_of_a_deferred_store(tiles, steps, wanted):
    assert [list(some) for some in deferred_stores(tiles, steps)] == wanted
