"""The arrays that a kernel of attention receives, and how a block finds its part of them; `launch.py` lays them out."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax.numpy as jnp
from jax import lax
from jax.experimental import pallas as pl
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.inputs import LOG2E, Inputs
from mgpu_ops.attention.mask import BlockRange, MaskTerms
from mgpu_ops.attention.problem import PANEL, Problem
from mgpu_ops.core import engine


@dataclasses.dataclass(frozen=True)
class Operands:
    """q, k, v and `Inputs` in global memory, as a block of a kernel sees them."""

    problem: Problem
    q: Any  # rows of [batch * q_tokens, q_heads * head_dim], as `engine.load_rows` takes them
    k: Any  # [batch * kv_tokens, kv_heads * head_dim], likewise
    v: Any
    inputs: Inputs  # segments padded to whole tiles, bias as rows
    bias_shape: tuple[int, int]  # batch entries and heads of the bias
    tiles: Any = None  # [batch, tiles, 2]: the first tile on the other side that shares a segment, and the end of them

    @staticmethod
    def of(problem: Problem, q: Any, k: Any, v: Any, extras: Sequence[Any], bias_shape: tuple[int, int]) -> Operands:
        """extras: `launch.Extras.arrays`."""
        inputs, tiles = (extras[:-1], extras[-1]) if problem.segments else (extras, None)
        return Operands(problem, q, k, v, Inputs.of(problem, tuple(inputs)), bias_shape, tiles)

    def mask_terms(self, b: Any) -> MaskTerms:
        p = self.problem
        q_end: Any = p.q_tokens
        kv_end: Any = p.kv_tokens
        if self.inputs.lengths is not None:  # whatever the lengths are, nothing lies outside the arrays
            q_end, kv_end = (
                jnp.clip(ref[b], 0, tokens) for ref, tokens in zip(self.inputs.lengths, (p.q_tokens, p.kv_tokens), strict=True)
            )
        return MaskTerms(p, q_end, kv_end, kv_end - q_end if p.align == "bottom_right" else 0)

    def kv_range(self, b: Any, row: Any, rows: int, tile_kv: int) -> BlockRange:
        """`MaskTerms.kv_range`, less the blocks at both ends in which no key shares a segment with one of the rows."""
        return self._within_segments(b, row, rows, self.mask_terms(b).kv_range(row, rows, tile_kv))

    def q_range(self, b: Any, key: Any, keys: int, tile_q: int) -> BlockRange:
        """`MaskTerms.q_range`, less the blocks at both ends in which no row shares a segment with one of the keys."""
        return self._within_segments(b, key, keys, self.mask_terms(b).q_range(key, keys, tile_q))

    def _within_segments(self, b: Any, token: Any, tokens: int, blocks: BlockRange) -> BlockRange:
        if self.tiles is None:
            return blocks
        own = lax.div(token, jnp.int32(tokens))
        first = jnp.minimum(jnp.maximum(blocks.first, self.tiles[b, own, 0]), blocks.end - 1)
        end = jnp.maximum(jnp.minimum(blocks.end, self.tiles[b, own, 1]), first + 1)
        whole = jnp.clip(blocks.whole, first, end)
        return BlockRange(first, whole, jnp.clip(blocks.whole_end, whole, end), end)

    def load_rows(self, src: Any, b: Any, n: Any, row: Any, dst: Any, full: Any) -> None:
        """Starts the copies of query rows of one head, with zeros from the last on: dst is [panels, rows, PANEL].

        Zeros too where lengths end, here and below: whatever the padding holds, be it NaN, has no say.
        """
        self._load_panels(src, b * self.problem.q_tokens, self.mask_terms(b).q_end, n, row, dst, full)

    def load_keys(self, src: Any, b: Any, n: Any, key: Any, dst: Any, full: Any) -> None:
        """Starts the copies of keys or values of one of their heads, zeros from the last on: dst is [panels, keys, PANEL]."""
        self._load_panels(src, b * self.problem.kv_tokens, self.mask_terms(b).kv_end, n, key, dst, full)

    def _load_panels(self, src: Any, start: Any, end: Any, n: Any, token: Any, dst: Any, full: Any) -> None:
        for panel in range(dst.shape[0]):
            column = n * self.problem.head_dim + panel * PANEL
            engine.load_rows(src, start + token, start + end, column, dst.at[panel], full)

    def load_block(self, src: Any, kind: str, b: Any, n: Any, token: Any, dst: Any, full: Any) -> None:
        """Starts the copy of "rows" or "keys" of one head, with zeros from the last on: dst is [tokens, head_dim].

        A product with a whole row of head_dim takes fewer instructions than with one of panels. src: see `launch.as_blocks`.
        """
        rows, d = dst.shape
        if src.shape[:2] != (1, 1):
            engine.copy_gmem_to_smem(src.at[b, pl.ds(token, rows), n], dst, full)
            return
        p, t = self.problem, self.mask_terms(b)
        tokens, end = (p.q_tokens, t.q_end) if kind == "rows" else (p.kv_tokens, t.kv_end)
        engine.load_rows(src, b * tokens + token, b * tokens + end, n * d, dst, full)

    def load_extras(self, keeps: str, b: Any, n: Any, own: Any, other: Any, smem: Any, stage: Any, full: Any) -> None:
        """Starts the copies of what goes beside the tokens from `other` on, into `stage` of `launch.Extras.smem`.

        keeps: "rows" or "keys", of which the block keeps those from `own` on.
        """
        if self.inputs.segments is not None:
            dst = smem["segments_smem"].at[stage]
            ids = self.inputs.segments[1 if keeps == "rows" else 0].at[b, pl.ds(other, dst.shape[0])]
            engine.copy_gmem_to_smem(ids, dst, full)
        if self.inputs.bias is not None:
            self._load_bias(b, n, own, other, smem["bias_smem"].at[stage], full)

    def _load_bias(self, b: Any, n: Any, row: Any, column: Any, dst: Any, full: Any) -> None:
        batch, heads = self.bias_shape
        rows = self.inputs.bias.shape[2] // (batch * heads)
        start = ((b if batch > 1 else 0) * heads + (n if heads > 1 else 0)) * rows
        engine.load_rows(self.inputs.bias, start + row, start + rows, column, dst, full)

    def capped(self, s: Any) -> Any:
        """The hyperbolic tangent of a soft cap: tanh(s scale / cap), from an exponential accurate to float32."""
        return 1.0 - 2.0 / (jnp.exp2(s * (self.inputs.options[2] * (2 * LOG2E))) + 1.0)

    def scores(self, s: Any, bias: Any) -> tuple[Any, Any]:
        """Products of queries and keys to scores times log2(e); and the slope of the soft cap there, or None without one.

        bias: its tile in shared memory, or None.
        """
        slope = None
        if self.problem.soft_cap:
            tanh = self.capped(s)
            s, slope = tanh * (self.inputs.options[1] * LOG2E), 1.0 - tanh * tanh
        else:
            s = s * (self.inputs.options[0] * LOG2E)
        return s if bias is None else s + self.bias_term(bias), slope

    def bias_term(self, tile: Any) -> Any:
        """What a tile of the bias in shared memory adds to scores times log2(e)."""
        return plgpu.load(tile, layout=plgpu.Layout.WGMMA, optimized=False).astype(jnp.float32) * LOG2E


def place(number: Any, tokens: int, heads: int, tile: int) -> tuple[Any, Any, Any]:
    """Batch entry, head and first token of a tile of `tile_scheduler.assign_heads`; it counts the heads of all entries."""
    tiles = jnp.int32(math.ceil(tokens / tile))
    head, own = lax.div(number, tiles), lax.rem(number, tiles)
    return lax.div(head, jnp.int32(heads)), lax.rem(head, jnp.int32(heads)), own * tile
