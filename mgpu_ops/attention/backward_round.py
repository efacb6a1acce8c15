"""The kernels that round dq, where the dk/dv kernel has added it up from registers (`dq_step="next"`).

dq then lies in tiles of 64 rows and 64 columns as `fragments.add` lays them out: for each batch entry and q block, those
of each query head. Of `launch` a thread block reads the tiles of 64 rows of one head, and writes them times scale as rows.

`launch_joined` is for q, k and v that `rotary_qkv` has taken from one projection: it rotates dq and dk back, and writes them
with dv as the gradient of that projection. At head dim 128 a head's halves are the two panels of its tiles, so that a thread
has both numbers of each pair that is rotated.
"""

from __future__ import annotations

import dataclasses
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
from mgpu_ops.core import engine, fragments
from mgpu_ops.core.rows import load_rows, store_rows
from mgpu_ops.core.tile_scheduler import Int

_SHARE = 0.05  # of the backward pass' time, about


def tiles_shape(p: BackwardProblem, rows: int) -> tuple[int, int, int]:
    """Of dq with `rows` padded query rows: [tiles of 64 rows, panels, float32 of a panel]."""
    return p.batch * (rows // ROWS) * p.q_heads, p.head_dim // PANEL, fragments.SIZE


@jax.tree_util.register_dataclass
@dataclasses.dataclass(frozen=True)
class Tiles:
    """dq in float32: arrays outside of a kernel, refs in global memory within."""

    values: Any  # of `tiles_shape`
    # How many kv blocks have added to each q block of 64 or 128 rows, int32 in the order of tiles: where none has, `values` may
    # be anything and dq is 0. None: some has, everywhere.
    added: Any

    def load(self, p: BackwardProblem, tile: Int, panel: int) -> jax.Array:
        """A panel of a tile, float32 [64, 64] in wgmma's layout."""
        values = fragments.load(self.values.at[tile, panel])
        if self.added is None:
            return values
        rows = self.values.shape[0] // self.added.shape[0]  # tiles of a q block
        block, head = lax.div(tile, jnp.int32(p.q_heads * rows)), lax.rem(tile, jnp.int32(p.q_heads))
        some = jnp.broadcast_to(self.added[block * p.q_heads + head] > 0, values.shape)
        return jnp.where(some, values, jnp.zeros_like(values))


def launch(p: BackwardProblem, dq: Tiles, arrays: BackwardArrays, interpret: bool) -> jax.Array:
    """dq [batch, q_tokens, q_heads, head_dim] in the dtype of q, from its tiles in float32."""
    tiles, panels, _ = dq.values.shape
    given, tree = jax.tree.flatten(dq)

    def body(*refs: Any, staging: Any) -> None:
        dq, options, out = jax.tree.unflatten(tree, refs[: len(given)]), *refs[len(given) :]
        tile = lax.axis_index("tile")
        block, head = lax.div(tile, jnp.int32(p.q_heads)), lax.rem(tile, jnp.int32(p.q_heads))
        blocks = jnp.int32(tiles // p.q_heads // p.batch)
        start, row = lax.div(block, blocks) * p.q_tokens, lax.rem(block, blocks) * ROWS
        scale = options[0]
        # 1. Both panels are read before the first is written.
        values = [dq.load(p, tile, panel) for panel in range(panels)]
        for panel, value in enumerate(values):
            staging[panel] = (value * scale).astype(p.dtype)
        plgpu.commit_smem()  # TMA sees what was written
        # 2. They leave as rows.
        for panel in range(panels):
            store_rows(staging.at[panel], out, start + row, start + p.q_tokens, head * p.head_dim + panel * PANEL)
        plgpu.wait_smem_to_gmem(0)

    launch = engine.Launch(
        "mgpu_ops_flash_attention_round_dq", {"tile": tiles}, warpgroups=1, interpret=interpret, share=_SHARE
    )
    scratch = {"staging": swizzled((panels, ROWS, PANEL), p.dtype)}
    out = engine.kernel(body, launch, out_type=rows_like(arrays.q), scratch_types=scratch)(*given, arrays.inputs.options)
    return out.reshape(arrays.q.shape)


def launch_joined(
    p: BackwardProblem,
    dq: Tiles,
    dk: jax.Array,
    dv: jax.Array,
    options: jax.Array,
    turned: tuple[jax.Array, ...],
    interpret: bool,
) -> jax.Array:
    """The gradient of what q, k and v were taken from, [batch, tokens, q_heads + 2 kv_heads, head_dim].

    dk, dv: [batch, tokens, kv_heads, head_dim]. turned: cosines and sines, float32 [tokens, head_dim / 2].
    """
    cut = _Cut(p, blocks=dq.values.shape[0] // p.q_heads // p.batch)
    cos, sin = (jnp.pad(x, ((0, cut.blocks * ROWS - p.q_tokens), (0, 0))) for x in turned)
    launch = engine.Launch(
        "mgpu_ops_flash_attention_join", {"tile": cut.tiles}, warpgroups=1, interpret=interpret, share=_SHARE
    )
    scratch = {
        "heads": swizzled((cut.at_once, 2, ROWS, PANEL), p.dtype),
        "full": plgpu.Barrier(num_arrivals=2, num_barriers=cut.at_once),
    }
    every = jax.ShapeDtypeStruct((p.batch, p.q_tokens, p.q_heads + 2 * p.kv_heads, p.head_dim), p.dtype)

    given, tree = jax.tree.flatten(dq)

    def body(*refs: Any, heads: Any, full: Any) -> None:
        dq, (dk, dv, cos, sin, options, out) = jax.tree.unflatten(tree, refs[: len(given)]), refs[len(given) :]
        _Join(cut, dq, dk, dv, cos, sin, options, out, heads, full).run()

    run = engine.kernel(body, launch, out_type=rows_like(every), scratch_types=scratch)
    return run(*given, as_rows(dk), as_rows(dv), cos, sin, options).reshape(every.shape)


@dataclasses.dataclass(frozen=True)
class _Cut:
    """How `launch_joined` deals q blocks, `blocks` of each batch entry, and heads to thread blocks."""

    p: BackwardProblem
    blocks: int

    @property
    def at_once(self) -> int:
        """Heads of a thread block: all of q, of k or of v, with the same cosines."""
        return math.gcd(self.p.q_heads, self.p.kv_heads, 4)

    @property
    def ends(self) -> tuple[int, int, int]:
        """Behind the thread blocks of q, of k and of v."""
        q, kv = self.p.q_heads // self.at_once, self.p.kv_heads // self.at_once
        return q, q + kv, q + 2 * kv

    @property
    def tiles(self) -> int:
        return self.p.batch * self.blocks * self.ends[-1]


@dataclasses.dataclass(frozen=True)
class _Join:
    """A thread block of `launch_joined`, and its refs. heads, full: tiles in shared memory, and whether they have come."""

    cut: _Cut
    dq: Tiles
    dk: Any
    dv: Any
    cos: Any
    sin: Any
    options: Any
    out: Any
    heads: Any
    full: Any

    def run(self) -> None:
        cut, tokens = self.cut, self.cut.p.q_tokens
        q, k, v = cut.ends
        tile = lax.axis_index("tile")
        block, group = lax.div(tile, jnp.int32(v)), lax.rem(tile, jnp.int32(v))
        first, row = lax.div(block, jnp.int32(cut.blocks)) * tokens, lax.rem(block, jnp.int32(cut.blocks)) * ROWS
        rows = first + row, first + tokens  # of this block, and where those of its sequence end

        @pl.when(group < q)
        def _() -> None:
            turned, scale = self._turns(row), self.options[0]
            for head in range(cut.at_once):
                tile = block * cut.p.q_heads + group * cut.at_once + head
                left, right = (self.dq.load(cut.p, tile, panel) * scale for panel in range(2))
                self._rotate_back(head, left, right, *turned)
                self._store(head, group, rows)

        @pl.when((group >= q) & (group < k))
        def _() -> None:
            self._load(self.dk, group - q, rows)
            turned = self._turns(row)
            for head in range(cut.at_once):
                plgpu.barrier_wait(self.full.at[head])
                left, right = (
                    plgpu.load(self.heads.at[head, panel], layout=plgpu.Layout.WGMMA).astype(jnp.float32) for panel in range(2)
                )
                self._rotate_back(head, left, right, *turned)
                self._store(head, group, rows)

        @pl.when(group >= k)
        def _() -> None:
            self._load(self.dv, group - k, rows)
            for head in range(cut.at_once):
                plgpu.barrier_wait(self.full.at[head])
                self._store(head, group, rows)

        plgpu.wait_smem_to_gmem(0)

    def _turns(self, row: jax.Array) -> list[jax.Array]:
        """Cosines and sines of the block's rows."""
        both = self.cos, self.sin
        return [plgpu.load(x.at[pl.ds(row, ROWS)], layout=plgpu.Layout.WGMMA, optimized=False) for x in both]

    def _column(self, group: jax.Array, head: int, panel: int) -> jax.Array:
        """Where a panel of a head of a group of heads begins."""
        return (group * self.cut.at_once + head) * self.cut.p.head_dim + panel * PANEL

    def _load(self, ref: Any, group: jax.Array, rows: tuple[jax.Array, jax.Array]) -> None:
        for head in range(self.cut.at_once):
            for panel in range(2):
                column = self._column(group, head, panel)
                load_rows(ref, *rows, column, self.heads.at[head, panel], self.full.at[head])

    def _rotate_back(self, head: int, left: jax.Array, right: jax.Array, cos: jax.Array, sin: jax.Array) -> None:
        self.heads[head, 0] = (left * cos + right * sin).astype(self.cut.p.dtype)
        self.heads[head, 1] = (right * cos - left * sin).astype(self.cut.p.dtype)
        plgpu.commit_smem()  # TMA sees what was written

    def _store(self, head: int, group: jax.Array, rows: tuple[jax.Array, jax.Array]) -> None:
        for panel in range(2):
            store_rows(self.heads.at[head, panel], self.out, *rows, self._column(group, head, panel))
