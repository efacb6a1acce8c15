"""ragged_contraction: lhs^T rhs over the rows of each group, float32 accumulation, for NVIDIA Hopper.

`problem.py` says what is computed and which configs can run it, `model.py` which are worth trying, `kernel.py` is the kernel
from load to store; here are the public function with its gradient and batching rules, the reference, and the op's SPEC.
"""

from __future__ import annotations

import dataclasses
import functools
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.typing import ArrayLike, DTypeLike

from mgpu_ops import integers
from mgpu_ops.core import gpu as gpus
from mgpu_ops.core import mesh
from mgpu_ops.core.batching import one_after_the_other
from mgpu_ops.core.gpu import Gpu
from mgpu_ops.core.limits import check_config
from mgpu_ops.grouped.batches import batchable
from mgpu_ops.grouped.calls import checked_operands, checked_out_dtype, checked_sizes, checked_spread
from mgpu_ops.grouped.config import Config
from mgpu_ops.grouped.problem import flops
from mgpu_ops.grouped.ragged_contraction.model import candidates, cost, default, distance, space
from mgpu_ops.grouped.ragged_contraction.problem import (
    SHAPES,
    SUITES,
    Problem,
    bytes_moved,
    check,
    inputs,
    padded,
    plain,
    supports,
    tolerance,
)
from mgpu_ops.grouped.sizes import Spread, for_each_block
from mgpu_ops.registry import dispatch, partition
from mgpu_ops.registry.spec import Baseline, OpSpec


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call says beside its arrays."""

    out_dtype: str
    spread: Spread
    config: Config | None
    backend: dispatch.Backend | None
    group_offset: bool = False  # the sizes are those of a shard, as `sizes.of_shard` gives them


def ragged_contraction(
    lhs: ArrayLike,
    rhs: ArrayLike,
    group_sizes: ArrayLike | Sequence[int],
    *,
    group_offset: ArrayLike | None = None,
    num_groups: int | None = None,
    out_dtype: DTypeLike | None = None,
    spread: Spread = "random",
    config: Config | None = None,
    backend: dispatch.Backend | None = None,
) -> jax.Array:
    """out[g, k, n] = sum over the rows i of group g of lhs[i, k] rhs[i, n], accumulated in float32; zeros for an empty group.

    It is the gradient of `grouped_matmul` with respect to its weights, and `jax.lax.ragged_dot_general` with a ragged
    contracting dimension.

    Args:
      lhs: [m, k]. bfloat16 or float16 for the kernel; other floats run through XLA.
      rhs: [m, n], of lhs's dtype.
      group_sizes: [groups], integers, in rows, as in `grouped_matmul`; rows beyond their sum are not read.
      group_offset, num_groups: for a shard, the first of its groups and how many it has, of those in group_sizes; the result
        has the shard's groups. group_offset is as in `grouped_matmul`. num_groups is needed with it, and all groups without.
      out_dtype: of the result; lhs's dtype by default, or "float32".
      spread: how sizes are usually spread over the groups, as in `grouped_matmul`: chooses the config, never the answer.
      config: runs the kernel with this Config (tile_m: of k; tile_k: rows a step) instead of the database's.
      backend: "mosaic", "interpret" or "xla", as in `grouped_matmul`.

    Returns:
      [groups, k, n] of out_dtype.

    Works under jit, grad (reverse mode: both gradients are grouped matmuls), vmap (one launch, as `grouped_matmul`), scan and
    shard_map.

    Raises:
      ValueError: ranks, shapes or dtypes that do not fit each other, known sizes that are negative or exceed m, an unknown
        spread or backend, a config that cannot run.
      TypeError: floats or integers expected and not found.

    Source: the kernel's own, in kernel.py; measurements in docs/kernels/grouped_matmul.md.
    """
    lhs, rhs = checked_operands("ragged_contraction", ("lhs", lhs, 2), ("rhs", rhs, 2))
    if lhs.shape[0] != rhs.shape[0]:
        raise ValueError(f"lhs{lhs.shape} and rhs{rhs.shape} differ in rows: {lhs.shape[0]} != {rhs.shape[0]}")
    if (group_offset is None) != (num_groups is None):
        raise ValueError(f"group_offset={group_offset} and num_groups={num_groups}: a shard of the groups takes both")
    every = integers.array("group_sizes", group_sizes).size
    if num_groups is not None and (not isinstance(num_groups, int | np.integer) or not 1 <= num_groups <= every):
        raise ValueError(f"num_groups={num_groups!r} is not from 1 to the {every} groups of group_sizes")
    groups = None if num_groups is None else int(num_groups)
    sizes = checked_sizes("ragged_contraction", group_sizes, groups, lhs.shape[0], group_offset, "the result")
    check_config("config", config, Config, "GroupedMatmulConfig")
    out, wanted = checked_out_dtype(out_dtype, lhs.dtype), dispatch.requested_backend(backend)
    call = Call(out, checked_spread(spread), config, wanted, group_offset=group_offset is not None)
    return contraction(call, *mesh.same_mesh_axes(lhs, rhs, sizes))


@functools.partial(jax.custom_vjp, nondiff_argnums=(0,))
def contraction(call: Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> jax.Array:
    """`ragged_contraction` of arguments that were checked. `gradients.py` makes it differentiable."""
    return _batchable(call)(lhs, rhs, sizes)


@functools.cache
def _batchable(call: Call) -> Any:
    """The call as a function of arrays."""

    def product(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _problem(call, *arrays), arrays, config=call.config, backend=call.backend)

    plain = functools.partial(_batchable, dataclasses.replace(call, group_offset=False))
    return batchable(
        product, ("rows", "rows", "sizes"), "matrices", 1, call.group_offset, plain, rule=_rule, backend=call.backend
    )


def _rule(*_: jax.Array) -> partition.Rule:
    """Both sides of the results are split."""
    return partition.Rule("ragged_contraction", "ROWS k, ROWS n, SIZES -> GROUPS k n")


def transposed_contraction(call: Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, scale: jax.Array) -> jax.Array:
    """out[g, k, n] = scale * sum over the columns i of group g of lhs[k, i] rhs[n, i], accumulated in float32.

    lhs, rhs: [k, m] and [n, m], float8_e4m3fn or float8_e5m2 each. Group g's columns begin at 128 * sum over the groups h < g
      of ceil(sizes[h] / 128), and those between a group's end and the next begin, and behind the last group, are zeros in both.
    sizes: int32 [groups], without the padding. scale: float32 [1], the product of what both were divided by.

    m is a multiple of 128. It has no gradient.
    """
    if call.group_offset:
        raise ValueError("a shard's operands, stored transposed, hold the columns of its groups alone: pass no group_offset")
    return _transposed(call)(*mesh.same_mesh_axes(lhs, rhs, sizes, scale))


@functools.cache
def _transposed(call: Call) -> Any:
    """The call as a function of arrays, under jit; vmap runs one after the other."""

    def product(*arrays: jax.Array) -> jax.Array:
        return dispatch.run(SPEC, _transposed_problem(call, *arrays), arrays, config=call.config, backend=call.backend)

    mapped = jax.custom_batching.custom_vmap(partition.partitioned(product, _transposed_rule, call.backend))

    @mapped.def_vmap
    def _(size: int, batched: Sequence[bool], *arrays: jax.Array) -> tuple[jax.Array, bool]:
        return one_after_the_other(run, batched, arrays), True

    run = jax.jit(mapped)
    return run


def _transposed_rule(*_: jax.Array) -> partition.Rule:
    """Both sides of the results are split."""
    return partition.Rule("ragged_contraction", "k ROWS, n ROWS, SIZES, ONE -> SIZES k n")


def _transposed_problem(call: Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, scale: jax.Array) -> Problem:
    (k, m), n = lhs.shape, rhs.shape[0]
    names = lhs.dtype.name, call.out_dtype, call.spread
    return Problem(m, n, k, sizes.shape[0], *names, rhs_dtype=rhs.dtype.name, transposed=True)


def _problem(call: Call, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array) -> Problem:
    (m, k), n = lhs.shape, rhs.shape[1]
    groups = sizes.shape[0] - call.group_offset
    return Problem(m, n, k, groups, lhs.dtype.name, call.out_dtype, call.spread, call.group_offset)


def reference(problem: Problem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *scale: jax.Array) -> jax.Array:
    """The same through XLA, in blocks of rows of one group: float32 accumulation, then rounding to out_dtype."""
    p = problem
    if p.transposed:
        lhs, rhs = lax.optimization_barrier((lhs, rhs))  # a GPU's XLA would leave out a rounding to 8 bits
        lhs, rhs, sizes = lhs.T, rhs.T, padded(sizes, p.m)
    wide = np.promote_types(p.dtype, np.float32)
    # XLA's CPU backend sums some products of 16-bit floats in 16 bits, and lacks others.
    exact = gpus.current() is None or p.rhs_dtype != "none"

    def block(out: jax.Array, group: Any, rows: jax.Array, inside: jax.Array) -> jax.Array:
        a, b = (jnp.where(inside[:, None], x[rows], 0) for x in (lhs, rhs))
        if exact:
            a, b = a.astype(wide), b.astype(wide)
        return out.at[group].add(lax.dot_general(a, b, (((0,), (0,)), ((), ())), preferred_element_type=wide))

    zeros, *_ = mesh.same_mesh_axes(jnp.zeros((p.groups, p.k, p.n), wide), lhs)
    done = zeros if 0 in (p.m, p.n, p.k) else for_each_block(sizes, p.m, block, zeros, p.group_offset)
    return (done * scale[0][0] if scale else done).astype(p.out_dtype)


def dense(problem: Problem, lhs: jax.Array, rhs: jax.Array, sizes: jax.Array, *_: jax.Array) -> jax.Array:
    """A plain matmul through XLA of as many operations: what a ragged contraction is measured against."""
    if problem.transposed:
        return lax.dot_general(lhs, rhs, (((1,), (1,)), ((), ())), preferred_element_type=problem.out_dtype)
    return jnp.matmul(lhs.T, rhs)


def launch(problem: Problem, config: Config, gpu: Gpu, *arrays: jax.Array, interpret: bool = False) -> jax.Array:
    """Runs the kernel, whose module imports Pallas: only here, and so when the first kernel runs."""
    from mgpu_ops.grouped.ragged_contraction import kernel

    return kernel.launch(problem, config, gpu, *arrays, interpret=interpret)


SPEC = OpSpec(
    name="ragged_contraction",
    version=1,
    Problem=Problem,
    Config=Config,
    shapes=SHAPES,
    suites=SUITES,
    space=space,
    supports=supports,
    check=check,
    candidates=candidates,
    default=default,
    cost=cost,
    distance=distance,
    flops=flops,
    bytes=bytes_moved,
    inputs=inputs,
    run=launch,
    reference=reference,
    tolerance=tolerance,
    plain=plain,
    baseline=lambda problem: Baseline("dense", dense, differs="it is one product, of all rows"),
)

__all__ = ["SPEC", "Problem", "default", "launch", "ragged_contraction", "reference"]
