"""The kernel of gated_matmul: activation(x w_gate) * (x w_up), float32 accumulation, for NVIDIA Hopper.

As the kernel of matmul, with two tiles of weights in each pipeline step and two accumulators: both products share the tile of
x, and what is stored is made of both sums in registers. The gradient is the same kernel with another epilogue: it computes both
products again, and stores the gradients of gate and up.

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

from mgpu_ops.core import engine, tile_scheduler
from mgpu_ops.core.gated import store_gated, store_gated_gradients
from mgpu_ops.core.gemm import ROWS, epilogue_tiles, warpgroup_tile
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import resident_clusters
from mgpu_ops.matmul.gated.problem import Config, Problem, as_matmul, buffers, gradient_buffers, of_one
from mgpu_ops.matmul.kernel import load, multiply
from mgpu_ops.matmul.problem import cluster_size, k_steps
from mgpu_ops.matmul.work import Place, Work, clusters_of_tiles, ends_with_rows, epilogue_origins


@dataclasses.dataclass(frozen=True)
class _Block:
    """What a block has: the schedule of one product, arrays in global memory, and the epilogue's buffers.

    outs: the result, or the gradients of gate and up. g: the result's gradient, or None; it is loaded into `g_smem`, which has
    a buffer for each epilogue tile and on whose barrier it has `g_arrived`. out_smem: up to two buffers of each warpgroup.
    """

    problem: Problem
    work: Work
    outs: tuple[Any, ...]
    out_smem: Any
    g: Any = None
    g_smem: Any = None
    g_arrived: Any = None

    def load_gradient(self, t: jax.Array) -> None:
        """Consumer: starts to load g of tile number t; the buffers' last stores have read them, long ago."""
        place, wg = Place.of(self.work, t), lax.axis_index("wg")
        plgpu.wait_smem_to_gmem(0, wait_read_only=True)
        for number, (i, j) in enumerate(epilogue_origins(self.work.config)):
            engine.copy_gmem_to_smem(place.block(self.g, i, j), self.g_smem.at[wg, number], self.g_arrived.at[wg])

    def store(self, t: jax.Array, gate: jax.Array, up: jax.Array) -> None:
        """Consumer: makes of both sums what tile number t stores."""
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
    g, outs = (rest[0], rest[1:]) if problem.gradient else (None, rest)
    block = _Block(problem, work, outs, g=g, **smem)
    steps = k_steps(p, c)
    own_tiles = tile_scheduler.tiles_of_block(clusters_of_tiles(p, c), lax.axis_index("block"), work.blocks)

    # As in matmul's kernel: the producer loads ahead, also over the end of an output tile.
    def step(indices: tuple[jax.Array, jax.Array], x_smem: Any, gate_smem: Any, up_smem: Any, accs: Any) -> Any:
        t, k = indices
        gate, up = accs
        if problem.gradient:  # it arrives while the second half of k is multiplied

            @pl.when(k == steps // 2)
            def _() -> None:
                block.load_gradient(t)

        multiply(p, c, gate, x_smem, gate_smem)
        multiply(p, c, up, x_smem, up_smem)
        engine.wgmma_wait(0)  # the stage may be refilled when the step is done, so no wgmma may still read it

        # After the last step of k both sums are complete. The copies to global memory run on under the next tile's steps.
        @pl.when(k == steps - 1)
        def _() -> None:
            store = block.store_gradients if problem.gradient else block.store
            store(t, gate[...], up[...])
            gate[...] = jnp.zeros(gate.shape, jnp.float32)
            up[...] = jnp.zeros(up.shape, jnp.float32)

        return accs

    plgpu.emit_pipeline_warp_specialized(
        step,
        grid=(own_tiles, steps),
        in_specs=load(work, x, w_gate, w_up),
        max_concurrent_steps=c.max_concurrent_steps,
        num_compute_wgs=c.compute_warpgroups,
        memory_registers=c.memory_registers,
        wg_axis="wg",
        compute_context=lambda pipeline: accumulators.scope(lambda *accs: (pipeline(accs), None)[1]),
    )(x, w_gate, w_up)
    plgpu.wait_smem_to_gmem(0, wait_read_only=True)  # the last copies have read shared memory before the block ends


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> Any:
    """Runs the kernel on x, w_gate and w_up as stored, and g where the problem is the gradient's; then two results."""
    p, c = of_one(problem), as_matmul(config)
    cluster = cluster_size(c)
    work = Work(p, c, min(resident_clusters(cluster, gpu), clusters_of_tiles(p, c)), transposed=False)
    shape = (1, 1, p.m, p.n) if ends_with_rows(p, c) else (p.m, p.n)
    out = jax.ShapeDtypeStruct(shape, p.out_dtype)
    gradients = [g.reshape(shape) for g in arrays[3:]]
    results = engine.kernel(
        functools.partial(_kernel, problem, work),
        engine.Launch(
            "mgpu_ops_gated_matmul",
            grid={"block": work.blocks},
            cluster={"cluster": cluster},
            warpgroups=c.compute_warpgroups + 1,
            approx_math=True,
            interpret=interpret,
        ),
        out_type=(out, out) if problem.gradient else out,
        scratch_types=_scratch(problem, config),
    )(*arrays[:3], *gradients)
    return jax.tree.map(lambda result: result.reshape(p.m, p.n), tuple(results) if problem.gradient else results)


def _scratch(p: Problem, c: Config) -> dict[str, Any]:
    """Accumulators of gate and up, the buffers of the epilogue, and where the result's gradient arrives."""
    transforms = engine.operand_transforms(c.epilogue_tile_n, p.out_dtype)

    def staging(count: int) -> Any:
        return plgpu.SMEM((c.compute_warpgroups, count, ROWS, c.epilogue_tile_n), jnp.dtype(p.out_dtype), transforms=transforms)

    scratch = {
        "accumulators": engine.Accumulators((warpgroup_tile(c),) * 2, c.compute_warpgroups),
        "out_smem": staging(buffers(p, c) - gradient_buffers(p, c)),
    }
    if p.gradient:
        scratch["g_smem"] = staging(gradient_buffers(p, c))
        scratch["g_arrived"] = plgpu.Barrier(num_arrivals=epilogue_tiles(c), num_barriers=c.compute_warpgroups)
    return scratch
