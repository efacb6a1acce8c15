"""The kernel that rounds dq, where the dk/dv kernel has added it up from registers (`dq_step="next"`).

dq then lies in tiles of 64 rows and 64 columns as `engine.add_fragments` lays them out: for each batch entry and q block, those
of each query head. A thread block reads the tiles of 64 rows of one head, and writes them times scale as rows.
"""

from __future__ import annotations

from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.heads import PANEL
from mgpu_ops.attention.launch import BackwardArrays, rows_like, swizzled
from mgpu_ops.attention.problem import ROWS, BackwardProblem
from mgpu_ops.core import engine
from mgpu_ops.core.rows import store_rows


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
