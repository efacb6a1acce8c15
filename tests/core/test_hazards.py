"""Faults and races on a GPU that neither the compiler nor the interpreter sees are found when a kernel is traced."""

from __future__ import annotations

import contextlib
from collections.abc import Callable
from typing import Any

import jax
import jax.numpy as jnp
import pytest
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.hazards import UnsafeKernel


def traced(
    body: Callable[..., None], array: Any, *, warpgroups: int = 1, blocks: int = 4, interpret: bool = False, **scratch: Any
) -> None:
    """Traces body(x, out, **scratch), of arrays alike in global memory. Nothing is compiled or run."""
    launch = engine.Launch("test", {"block": blocks}, warpgroups=warpgroups, interpret=interpret)
    jax.eval_shape(engine.kernel(body, launch, out_type=array, scratch_types=scratch), array)


def f32(*shape: int) -> Any:
    return jax.ShapeDtypeStruct(shape, jnp.float32)


def smem(*shape: int, **options: Any) -> Any:
    return plgpu.SMEM(shape, jnp.float32, **options)


# --- Where in shared memory a copy begins


PLAIN = plgpu.OOBFillMode.UNDEFINED  # a load of a contiguous window is then a plain bulk copy, as each store of one is


def staged(
    columns: int,
    width: int,
    *,
    dtype: Any = jnp.float32,
    interpret: bool = False,
    stored: bool = False,
    oob_mode: plgpu.OOBFillMode | None = None,
) -> None:
    """Copies windows [2, width] of an array [64, columns], into or out of a stage that a counter chooses."""

    def body(x: Any, out: Any, *, buffer: Any, full: Any) -> None:
        def turn(i: Any, _: None) -> None:
            stage = buffer.at[lax.rem(i, jnp.int32(3))]
            window = (pl.ds(i * 2, 2), pl.ds(0, width))
            if stored:
                plgpu.copy_smem_to_gmem(stage, out.at[window])
            else:
                engine.copy_gmem_to_smem(x.at[window], stage, full, oob_mode=oob_mode)

        lax.fori_loop(0, 8, turn, None)

    array = jax.ShapeDtypeStruct((64, columns), dtype)
    traced(body, array, interpret=interpret, buffer=plgpu.SMEM((3, 2, width), dtype), full=plgpu.Barrier())


@pytest.mark.parametrize("interpret", [False, True])
@pytest.mark.parametrize("stored", [False, True])
def test_a_tensor_copy_of_a_stage_that_begins_between_multiples_of_128_bytes_is_an_error(interpret, stored):
    staged(64, 16, interpret=interpret, stored=stored)  # stages of 128 bytes
    error = (
        r"test_hazards.py:\d+ begins at multiples of 32 bytes of its buffer float32\[3, 2, 4\] .* needs multiples of 128.*Pad"
    )
    with pytest.raises(UnsafeKernel, match=error):
        staged(64, 4, interpret=interpret, stored=stored)


@pytest.mark.parametrize("options", [{"stored": True}, {"oob_mode": PLAIN}], ids=["stored", "loaded"])
def test_a_contiguous_copy_begins_at_multiples_of_16_bytes(options):
    """It is a plain bulk copy."""
    staged(8, 8, **options)
    staged(2, 2, **options)  # stages of 16 bytes
    with pytest.raises(UnsafeKernel, match=r"multiples of 8 bytes of its buffer .* needs multiples of 16"):
        staged(2, 2, dtype=jnp.bfloat16, **options)


def test_a_contiguous_load_that_fills_with_zeros_is_a_tensor_copy():
    """By default: seen in SASS, "UTMALDG.1D", with both ends of jax's range."""
    staged(16, 16)
    for oob_mode in (None, plgpu.OOBFillMode.ZEROS):
        with pytest.raises(UnsafeKernel, match=r"multiples of 64 bytes of its buffer .* needs multiples of 128"):
            staged(8, 8, oob_mode=oob_mode)


def test_an_index_that_is_always_a_multiple_keeps_a_copy_aligned():
    def body(x: Any, out: Any, *, buffer: Any, full: Any, step: int) -> None:
        def turn(i: Any, _: None) -> None:
            engine.copy_gmem_to_smem(x.at[pl.ds(0, 2), pl.ds(0, 16)], buffer.at[pl.ds(i * step, 2)], full)

        lax.fori_loop(0, 8, turn, None)

    def run(step: int) -> None:
        traced(lambda *refs, **s: body(*refs, **s, step=step), f32(64, 64), buffer=smem(64, 16), full=plgpu.Barrier())

    run(2)
    with pytest.raises(UnsafeKernel, match="multiples of 64 bytes"):
        run(1)


def test_stages_of_swizzle_tiles_are_aligned():
    def body(x: Any, out: Any, *, buffer: Any, full: Any) -> None:
        stage = lax.rem(lax.axis_index("block"), jnp.int32(3))
        engine.copy_gmem_to_smem(x.at[pl.ds(0, 8), pl.ds(32, 32)], buffer.at[stage, :, pl.ds(32, 32)], full)

    tiles = engine.operand_transforms(32, jnp.float32)
    traced(body, f32(64, 64), buffer=smem(3, 8, 64, transforms=tiles), full=plgpu.Barrier())


# --- Where in global memory a copy begins


@pytest.mark.parametrize("rows", [1, 2])
def test_a_copy_that_begins_between_multiples_of_16_bytes_of_a_row_is_an_error(rows):
    """As a tensor map has it too, though NVIDIA states it for the array alone: a GPU calls it an illegal instruction."""

    def copied(start: Callable[[Any], Any]) -> None:
        def body(x: Any, out: Any, *, buffer: Any, full: Any) -> None:
            window = x.at[pl.ds(0, rows), pl.ds(start(lax.axis_index("block")), 32)]
            engine.copy_gmem_to_smem(window, buffer, full, oob_mode=plgpu.OOBFillMode.ZEROS)

        traced(body, f32(4, 128), buffer=smem(rows, 32), full=plgpu.Barrier())

    with pytest.raises(
        UnsafeKernel, match=r"begins at multiples of 8 bytes of a row in global memory.*4 elements, and copy more"
    ):
        copied(lambda i: i * 2)
    copied(lambda i: lax.div(i * 2, jnp.int32(4)) * 4)
    copied(lambda i: i * 8 + 4)


# --- Where in global memory a plain copy ends


def windows(
    start: Callable[[Any], Any], *, parts: int, width: int = 8, columns: int | None = None, stored: bool = True
) -> None:
    """Copies windows [width, columns] of an array [4, parts, 128] from `start(block)` on."""
    columns = columns or 128

    def body(x: Any, out: Any, *, buffer: Any, full: Any) -> None:
        def turn(i: Any, _: None) -> None:
            window = (lax.axis_index("block"), pl.ds(start(i), width), pl.ds(0, columns))
            if stored:
                plgpu.copy_smem_to_gmem(buffer, out.at[window])
            else:
                engine.copy_gmem_to_smem(x.at[window], buffer, full, oob_mode=PLAIN)

        lax.fori_loop(0, -(-parts // width), turn, None)

    traced(body, f32(4, parts, 128), buffer=smem(width, columns), full=plgpu.Barrier())


@pytest.mark.parametrize("stored", [False, True])
def test_a_contiguous_window_that_may_reach_beyond_its_row_is_an_error_that_says_where_it_may_begin(stored):
    error = r"of 8 elements may reach beyond dimension 1 of size 20: .* plain bytes .* jnp.minimum\(start, 12\), pad"
    with pytest.raises(UnsafeKernel, match=error):
        windows(lambda i: i * 8, parts=20, stored=stored)
    windows(lambda i: jnp.minimum(i * 8, 12), parts=20, stored=stored)
    windows(lambda i: i * 8, parts=24, stored=stored)


def test_a_window_of_which_tma_clips_each_row_may_reach_beyond_the_array():
    windows(lambda i: i * 8, parts=20, columns=64)


def test_a_window_that_a_loop_never_moves_beyond_the_array_is_no_error():
    """Bounds follow counters through loops, remainders and comparisons."""
    windows(lambda i: jnp.minimum(i, 1) * 8, parts=20)
    windows(lambda i: lax.rem(i, 2) * 8 + 4, parts=20)
    windows(lambda i: jnp.clip(i * 8, 0, 12), parts=20)
    windows(lambda i: jnp.where(i < 2, i * 4, 12), parts=20)
    with pytest.raises(UnsafeKernel):
        windows(lambda i: jnp.where(i < 2, i * 4, 13), parts=20)


@pytest.mark.parametrize(("last", "found"), [(2, False), (1, True)])
def test_a_branch_that_runs_only_where_a_window_fits_is_believed(last, found):
    """As a last chunk that is shorter, and has a branch of its own."""

    def body(x: Any, out: Any, *, buffer: Any) -> None:
        def turn(i: Any, _: None) -> None:
            shorter = lax.rem(i, jnp.int32(3)) == last

            def store(rows: int) -> None:
                window = out.at[pl.ds(lax.rem(i, jnp.int32(3)) * 8, rows)]
                plgpu.copy_smem_to_gmem(buffer.at[pl.ds(0, rows)], window)

            pl.when(shorter)(lambda: store(4))
            pl.when(~shorter)(lambda: store(8))

        lax.fori_loop(0, 6, turn, None)

    with pytest.raises(UnsafeKernel, match="beyond dimension 0 of size 20") if found else contextlib.nullcontext():
        traced(body, f32(20, 128), buffer=smem(8, 128))


# --- Reductions across warps


def reducing(reduce: Callable[[Any], Any], *, warpgroups: int, only: int | None = None) -> None:
    def body(x: Any, out: Any, *, buffer: Any) -> None:
        wg = lax.axis_index("wg")

        def one() -> None:
            out[...] = jnp.broadcast_to(reduce(buffer[...]), out.shape)

        if only is None:
            one()
        else:
            pl.when(wg == only)(one)

    traced(body, f32(64, 64), warpgroups=warpgroups, buffer=smem(64, 64))


@pytest.mark.parametrize("reduce", [jnp.sum, jnp.max, lambda x: jnp.sum(x, axis=0)])
def test_reductions_across_warps_in_two_warpgroups_are_an_error(reduce):
    reducing(reduce, warpgroups=1)
    reducing(reduce, warpgroups=2, only=1)
    with pytest.raises(
        UnsafeKernel, match=r"float32\[64,64\] .*across warps, and 2 warpgroups .*one warpgroup.* or reduce each row"
    ):
        reducing(reduce, warpgroups=2)


def test_each_warpgroup_may_reduce_rows():
    reducing(lambda x: jnp.max(x, axis=1)[:, None], warpgroups=2)


@pytest.mark.parametrize("by", ["consumer", "producer", "both"])
def test_a_reduction_of_a_specialized_block_counts_for_the_warpgroups_that_run_it(by):
    def body(x: Any, out: Any, *, buffer: Any) -> None:
        def total() -> None:
            out[...] = jnp.broadcast_to(jnp.sum(buffer[...]), out.shape)

        nothing = lambda: None  # noqa: E731
        engine.specialize(
            nothing if by == "consumer" else total,
            nothing if by == "producer" else total,
            consumers=1,
            producer_registers=40,
            consumer_registers=232,
        )

    def run() -> None:
        traced(body, f32(64, 64), warpgroups=2, buffer=smem(64, 64))

    if by != "both":
        run()
    else:
        with pytest.raises(UnsafeKernel, match="2 warpgroups"):
            run()
