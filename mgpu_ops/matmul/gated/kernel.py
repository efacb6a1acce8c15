"""The kernel of gated_matmul: activation(x w_gate) * (x w_up), float32 accumulation, for NVIDIA Hopper.

As the kernel of matmul, with two tiles of weights in each pipeline step and two accumulators: both products share the tile of
x, and what is stored is made of both sums in registers. The gradient is the same kernel with another epilogue: it computes both
products again, and stores the gradients of gate and up.

Where gate is stored, as in training, one product is left in either pass, in whose epilogue the gate is applied: matmul's
schedule of consumers in turn, with an epilogue that reads up to two arrays and writes two while the other consumer multiplies.

Sources: CUDA PTX ISA (wgmma, cp.async.bulk.tensor); JAX's Pallas Mosaic GPU documentation.
"""

from __future__ import annotations

import dataclasses
import functools
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.core import engine
from mgpu_ops.core.epilogue import epilogue_origins
from mgpu_ops.core.gated import gate_stored, store_gated, store_gated_gradients
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.matmul.gated.problem import (
    SLOTS,
    Config,
    Problem,
    as_matmul,
    buffers,
    gradient_buffers,
    halves,
    of_one,
)
from mgpu_ops.matmul.mainloop import compute_ahead, load, multiply, square_rows, stages_of
from mgpu_ops.matmul.problem import cluster_size, k_steps
from mgpu_ops.matmul.store import row_factors
from mgpu_ops.matmul.work import Place, Work, ends_with_rows


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block has: the schedule of one product, arrays in global memory, and the epilogue's buffers.

    outs: the result, or the gradients of gate and up. g: the result's gradient, or None; it is loaded into `g_smem`, which has
    a buffer for each epilogue tile and on whose barrier it has `g_arrived`. out_smem: up to two buffers of each warpgroup.
    epsilon: of the norm of x's rows, or None.
    """

    problem: Problem
    work: Work
    outs: tuple[Any, ...]
    out_smem: Any
    epsilon: Any = None
    g: Any = None
    g_smem: Any = None
    g_arrived: Any = None

    def load_gradient(self, t: jax.Array) -> None:
        """Consumer: starts to load g of tile number t; the buffers' last stores have read them, long ago."""
        place, wg = Place.of(self.work, t), lax.axis_index("wg")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (i, j) in enumerate(epilogue_origins(self.work.config)):
            engine.copy_gmem_to_smem(place.block(self.g, i, j), self.g_smem.at[wg, number], self.g_arrived.at[wg])

    def store(self, t: jax.Array, gate: jax.Array, up: jax.Array, rows_squared: Any = None) -> None:
        """Consumer: makes of both sums what tile number t stores, divided by the norm of x's rows where there is one."""
        if rows_squared is not None:
            factors = row_factors(rows_squared[...], self.problem.k, self.epsilon)
            gate, up = (x * lax.broadcast_in_dim(factors, x.shape, (0,)) for x in (gate, up))
        (out,), place = self.outs, Place.of(self.work, t)

        def copy(staged: Any, i: int, j: int) -> None:
            plgpu.copy_smem_to_gmem(staged, place.block(out, i, j))

        store_gated(self.problem.activation, gate, up, self.out_smem.at[lax.axis_index("wg")], copy)

    def store_gradients(self, t: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        """Consumer: makes of both sums, and of g, the gradients of gate and up of tile number t, and stores them."""
        place, wg = Place.of(self.work, t), lax.axis_index("wg")
        dgate, dup = (
            lambda staged, i, j, out=out: plgpu.copy_smem_to_gmem(staged, place.block(out, i, j)) for out in self.outs
        )
        plgpu.barrier_wait(self.g_arrived.at[wg])
        staging = self.g_smem.at[wg], self.out_smem.at[wg]
        store_gated_gradients(self.problem.activation, gate, up, *staging, dgate, dup)


def _kernel(problem: Problem, work: Work, x: Any, w_gate: Any, w_up: Any, *rest: Any, accumulators: Any, **smem: Any) -> None:
    """One block: a pipeline over (its output tiles) x (steps of k), with a store after the last step of each tile."""
    p, c = work.problem, work.config
    given, outs = rest[: problem.gradient + problem.normalised], rest[problem.gradient + problem.normalised :]
    of_problem = dict(zip(("epsilon",) if problem.normalised else ("g",), given, strict=False))
    block = _Block(problem, work, outs, **of_problem, **smem)
    steps = k_steps(p, c)
    own_tiles = work.own_tiles()

    # As in matmul's kernel: the producer loads ahead, also over the end of an output tile.
    def step(indices: tuple[jax.Array, jax.Array], x_smem: Any, gate_smem: Any, up_smem: Any, accs: Any) -> Any:
        t, k = indices
        gate, up, *rows_squared = accs
        if problem.gradient:  # it arrives while the second half of k is multiplied

            @pl.when(k == steps // 2)
            def _() -> None:
                block.load_gradient(t)

        multiply(p, c, gate, x_smem, gate_smem)
        multiply(p, c, up, x_smem, up_smem)
        for squares in rows_squared:
            square_rows(c, squares, x_smem)
        engine.wgmma_wait(0)  # the stage may be refilled when the step is done, so no wgmma may still read it

        # After the last step of k both sums are complete. The copies to global memory run on under the next tile's steps.
        @pl.when(k == steps - 1)
        def _() -> None:
            store = block.store_gradients if problem.gradient else block.store
            store(t, gate[...], up[...], *rows_squared)
            for acc in accs:
                acc[...] = jnp.zeros(acc.shape, jnp.float32)

        return accs

    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(own_tiles, steps),
        in_specs=load(work, x, w_gate, w_up, shifts=(0, p.n // c.tile_n if problem.joined else 0)),
        max_concurrent_steps=c.max_concurrent_steps,
        num_compute_wgs=c.compute_warpgroups,
        memory_registers=c.memory_registers,
        wg_axis="wg",
        compute_context=lambda pipeline: accumulators.scope(lambda *accs: (pipeline(accs), None)[1]),
    )(x, w_gate, w_up)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends


def _stored_kernel(
    problem: Problem,
    work: Work,
    gpu: Gpu,
    x: Any,
    w: Any,
    *rest: Any,
    accumulator: Any,
    stages: Any,
    staged: Any,
    arrived: Any,
) -> None:
    """One block, whose consumers compute output tiles in turn; `rest` are gate, for the gradient up, and two results.

    Or gate and up alone, which the gradients overwrite: what a tile loads it stores itself, later.
    """
    given, outs = (rest, rest) if problem.gradient and len(rest) == 2 else (rest[:-2], rest[-2:])
    origins = epilogue_origins(work.config)

    def load(place: Place, number: int) -> None:
        """Starts to load what is given of an epilogue tile into its slot."""
        wg, slot = lax.axis_index("wg"), number % SLOTS
        for ref, smem in zip(given, (staged.at[wg, slot, 0], staged.at[wg, slot, 1]), strict=False):
            engine.copy_gmem_to_smem(place.block(ref, *origins[number]), smem, arrived.at[wg * SLOTS + slot])

    def begin(t: jax.Array) -> None:  # the first ones arrive while the tile is multiplied
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last tile's stores have read the slots, long ago
        place = Place.of(work, t)
        for number in range(min(SLOTS, len(origins))):
            load(place, number)

    def store(t: jax.Array, acc: Any) -> None:
        place, wg, sums = Place.of(work, t), lax.axis_index("wg"), acc[...]
        for number, (i, j) in enumerate(origins):
            slot = number % SLOTS
            of_gate, of_up = staged.at[wg, slot, 0], staged.at[wg, slot, 1]
            plgpu.barrier_wait(arrived.at[wg * SLOTS + slot])
            part = sums[i : i + ROWS, j : j + work.config.epilogue_tile_n]
            gate_stored(problem.activation, part, of_gate, of_up, problem.gradient)
            plgpu.commit_smem()  # TMA sees what was written
            for smem, out in zip((of_gate, of_up), outs, strict=True):
                plgpu.copy_smem_to_gmem(smem, place.block(out, i, j))
            if number + SLOTS < len(origins):  # into the slot once its stores have read it
                plgpu.wait_smem_to_gmem(0, wait_read_only=True)
                load(place, number + SLOTS)

    compute_ahead(work, gpu, (x, w), accumulator, stages, begin, store)


def launch(
    problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False, in_place: bool = False
) -> Any:
    """Runs the kernel on x, w_gate and w_up as stored, and g where the problem is the gradient's; then two results.

    With a stored gate on x, its weight and gate, and for the gradient up; always two results. Weights that are one matrix, with
    gate's columns before up's, come twice.

    in_place: the gradients take the places of a stored gate and up, if no two tiles share any of these.
    """
    p, c = of_one(problem), as_matmul(config)
    if problem.joined and p.n % c.tile_n:  # tiles of up do not begin where blocks of columns do
        arrays = (arrays[0], *halves(problem, arrays[1]), *arrays[3:])
        problem = dataclasses.replace(problem, joined=False)
    cluster = cluster_size(c)
    work = Work.of(p, c, gpu)
    shape = (1, 1, p.m, p.n) if ends_with_rows(p, c) else (p.m, p.n)
    out = jax.ShapeDtypeStruct(shape, p.out_dtype)
    operands = (2 if problem.stored else 3) + problem.normalised
    further: list[Any] = [g.reshape(shape) for g in arrays[operands:]]
    in_place = in_place and problem.stored and problem.gradient and not ends_with_rows(p, c)
    if in_place:
        further = [jax.new_ref(g) for g in further]
    two = problem.gradient or problem.stored
    results = engine.kernel(
        functools.partial(_stored_kernel, problem, work, gpu) if problem.stored else functools.partial(_kernel, problem, work),
        engine.Launch(
            "mgpu_ops_gated_matmul",
            grid={"block": work.rounds.blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + 1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=() if in_place else (out, out) if two else out,
        scratch_types=_scratch(problem, config),
    )(*arrays[:operands], *further)
    if in_place:
        results = [engine.frozen(ref, *arrays) for ref in further]
    return jax.tree.map(lambda result: result.reshape(p.m, p.n), tuple(results) if two else results)


def _scratch(p: Problem, c: Config) -> dict[str, Any]:
    """Accumulators of gate and up, the buffers of the epilogue, and where the result's gradient arrives."""
    transforms = engine.operand_transforms(c.epilogue_tile_n, p.out_dtype)

    def staging(*count: int) -> Any:
        shape = (c.compute_warpgroups, *count, ROWS, c.epilogue_tile_n)
        return plgpu.SMEM(shape, jnp.dtype(p.out_dtype), transforms=transforms)

    if p.stored:
        given = 2 if p.gradient else 1
        return {
            "accumulator": engine.Accumulators((warpgroup_tile(c),), c.compute_warpgroups),
            "stages": stages_of(of_one(p), as_matmul(c)),
            "staged": staging(SLOTS, 2),
            "arrived": plgpu.Barrier(num_arrivals=given, num_barriers=SLOTS * c.compute_warpgroups),
        }
    scratch = {
        "accumulators": engine.Accumulators((warpgroup_tile(c),) * 2 + ((ROWS, ROWS),) * p.normalised, c.compute_warpgroups),
        "out_smem": staging(buffers(p, c) - gradient_buffers(p, c)),
    }
    if p.gradient:
        scratch["g_smem"] = staging(gradient_buffers(p, c))
        scratch["g_arrived"] = plgpu.Barrier(num_arrivals=epilogue_tiles(c), num_barriers=c.compute_warpgroups)
    return scratch
