"""The kernels that round dq, where the dk/dv kernel has added it up from registers (`dq_step="next"`).

dq then lies in tiles of 64 rows and 64 columns as `engine.add_fragments` lays them out: for each batch entry and q block, those
of each query head. Of `launch` a thread block reads the tiles of 64 rows of one head, and writes them times scale as rows.

`launch_joined` is for q, k and v that `rotary_qkv` has taken from one projection: it rotates dq and dk back, and writes them
with dv as the gradient of that projection. At head dim 128 a head's halves are the two panels of its tiles, so that a thread
has both numbers of each pair that is rotated.
"""

from __future__ import annotations

import math
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import PANEL
from mgpu_ops.attention.launch import BackwardArrays, as_rows, rows_like, swizzled
from mgpu_ops.attention.problem import ROWS, BackwardProblem
from mgpu_ops.core import engine
from mgpu_ops.core.rows import load_rows, store_rows


def tiles_shape(p: BackwardProblem, rows: int) -> tuple[int, int, int]:
    """Of dq with `rows` padded query rows: [tiles of 64 rows, panels, float32 of a panel]."""
    return p.batch * (rows // ROWS) * p.q_heads, p.head_dim // PANEL, engine.FRAGMENTS


def launch(p: BackwardProblem, dq: jax.Array, arrays: BackwardArrays, interpret: bool) -> jax.Array:
    """dq [batch, q_tokens, q_heads, head_dim] in the dtype of q, from its tiles in float32."""
    tiles, panels, _ = dq.shape

    def body(dq: Any, options: Any, out: Any, staging: Any) -> None:
        tile = lax.axis_index("tile")
        block, head = lax.div(tile, jnp.int32(p.q_heads)), lax.rem(tile, jnp.int32(p.q_heads))
        blocks = jnp.int32(tiles // p.q_heads // p.batch)
        start, row = lax.div(block, blocks) * p.q_tokens, lax.rem(block, blocks) * ROWS
        scale = options[0]
        # 1. Both panels are read before the first is written.
        values = [engine.load_fragments(dq.at[tile, panel]) for panel in range(panels)]
        for panel, value in enumerate(values):
            staging[panel] = (value * scale).astype(p.dtype)
        plgpu.commit_smem()  # TMA sees what was written
        # 2. They leave as rows.
        for panel in range(panels):
            store_rows(staging.at[panel], out, start + row, start + p.q_tokens, head * p.head_dim + panel * PANEL)
        plgpu.wait_smem_to_gmem(0)

    launch = engine.Launch("mgpu_ops_flash_attention_round_dq", {"tile": tiles}, warpgroups=1, interpret=interpret)
    scratch = {"staging": swizzled((panels, ROWS, PANEL), p.dtype)}
    out = engine.kernel(body, launch, out_type=rows_like(arrays.q), scratch_types=scratch)(dq, arrays.inputs.options)
    return out.reshape(arrays.q.shape)


def launch_joined(
    p: BackwardProblem,
    dq: jax.Array,
    dk: jax.Array,
    dv: jax.Array,
    options: jax.Array,
    turned: tuple[jax.Array, ...],
    interpret: bool,
) -> jax.Array:
    """The gradient of what q, k and v were taken from, [batch, tokens, q_heads + 2 kv_heads, head_dim].

    dq: its tiles. dk, dv: [batch, tokens, kv_heads, head_dim]. turned: cosines and sines, float32 [tokens, head_dim / 2].
    """
    blocks, tokens = dq.shape[0] // p.q_heads // p.batch, p.q_tokens
    at_once = math.gcd(p.q_heads, p.kv_heads, 4)  # heads of a thread block, all of q, of k or of v, with the same cosines
    ends = [p.q_heads // at_once, (p.q_heads + p.kv_heads) // at_once, (p.q_heads + 2 * p.kv_heads) // at_once]
    cos, sin = (jnp.pad(x, ((0, blocks * ROWS - tokens), (0, 0))) for x in turned)

    def body(dq: Any, dk: Any, dv: Any, cos: Any, sin: Any, options: Any, out: Any, heads: Any, full: Any) -> None:
        tile = lax.axis_index("tile")
        block, group = lax.div(tile, jnp.int32(ends[-1])), lax.rem(tile, jnp.int32(ends[-1]))
        first, row = lax.div(block, jnp.int32(blocks)) * tokens, lax.rem(block, jnp.int32(blocks)) * ROWS
        start, end = first + row, first + tokens

        def turns() -> list[jax.Array]:
            return [plgpu.load(x.at[pl.ds(row, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False) for x in (cos, sin)]

        def load(ref: Any, begin: int) -> None:
            for head in range(at_once):
                for panel in range(2):
                    column = ((group - begin) * at_once + head) * p.head_dim + panel * PANEL
                    load_rows(ref, start, end, column, heads.at[head, panel], full.at[head])

        def rotate_back(head: int, left: jax.Array, right: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
            heads[head, 0] = (left * cos + right * sin).astype(p.dtype)
            heads[head, 1] = (right * cos - left * sin).astype(p.dtype)
            plgpu.commit_smem()  # TMA sees what was written

        def store(head: int) -> None:
            for panel in range(2):
                column = (group * at_once + head) * p.head_dim + panel * PANEL
                store_rows(heads.at[head, panel], out, start, end, column)

        @pl.when(group < ends[0])
        def _() -> None:
            turned, scale = turns(), options[0]
            for head in range(at_once):
                of_head = dq.at[block * p.q_heads + group * at_once + head]
                left, right = (engine.load_fragments(of_head.at[panel]) * scale for panel in range(2))
                rotate_back(head, left, right, *turned)
                store(head)

        @pl.when((group >= ends[0]) & (group < ends[1]))
        def _() -> None:
            load(dk, ends[0])
            turned = turns()
            for head in range(at_once):
                plgpu.barrier_wait(full.at[head])
                left, right = (
                    plgpu.load(heads.at[head, panel], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for panel in range(2)
                )
                rotate_back(head, left, right, *turned)
                store(head)

        @pl.when(group >= ends[1])
        def _() -> None:
            load(dv, ends[1])
            for head in range(at_once):
                plgpu.barrier_wait(full.at[head])
                store(head)

        plgpu.wait_smem_to_gmem(0)

    tiles = p.batch * blocks * ends[-1]
    launch = engine.Launch("mgpu_ops_flash_attention_join", {"tile": tiles}, warpgroups=1, interpret=interpret)
    scratch = {
        "heads": swizzled((at_once, 2, ROWS, PANEL), p.dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=at_once),
    }
    every = jax.ShapeDtypeStruct((p.batch, tokens, ends[-1] * at_once, p.head_dim), p.dtype)
    run = engine.kernel(body, launch, out_type=rows_like(every), scratch_types=scratch)
    return run(dq, as_rows(dk), as_rows(dv), cos, sin, options).reshape(every.shape)
