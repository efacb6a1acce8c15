"""How the kernels hide scores: the mask of `mask.py`, applied to a tile in registers. All three kernels call it."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
from jax import lax
from jax.experimental.pallas import mosaic_gpu as plgpu

from mgpu_ops.attention.layouts import PER_COLUMN, PER_ROW, TILE, along_columns, along_rows, load_per_column
from mgpu_ops.attention.mask import MaskTerms
from mgpu_ops.core.tile_scheduler import Int


@dataclasses.dataclass(frozen=True)
class ScoreMask:
    """Masks tiles of 64 query rows by some keys, or with `keys_first`, as the dk/dv kernel has them, 64 keys by some rows.

    numbers: int32 [consumer warpgroups, columns] in shared memory. Each warpgroup keeps 0, 1, 2... there, which takes registers
    only while a tile is masked.
    """

    numbers: Any
    keys_first: bool = False

    def write_numbers(self, wg: Int | None = None) -> None:
        """Called once by each consumer warpgroup, before its first tile. wg: its number, if the caller has it already."""
        numbers = plgpu.broadcasted_iota(jnp.int32, (self.numbers.shape[1],), 0, layout=PER_COLUMN)
        self.numbers[lax.axis_index("wg") if wg is None else wg] = numbers

    def column_numbers(self, wg: Int) -> jax.Array:
        """0, 1, 2... for the columns of a tile. Added to its first token, they are the columns' tokens."""
        return load_per_column(self.numbers.at[wg])

    def tokens(self, shape: tuple[int, ...], first: Int, columns: jax.Array) -> tuple[jax.Array, jax.Array]:
        """The query rows and the keys of a tile. first: the token of its first row; columns: the tokens of its columns."""
        tokens = plgpu.broadcasted_iota(jnp.int32, shape, 0, layout=TILE) + first, along_columns(columns, shape)
        return tokens[::-1] if self.keys_first else tokens

    def hide_by_position(
        self, tile: jax.Array, hidden: float, terms: MaskTerms, tokens: tuple[jax.Array, jax.Array]
    ) -> jax.Array:
        """`hidden` where a row does not see a key by window, causal mask or length. tokens: of `self.tokens`."""
        return jnp.where(terms.sees(*tokens), tile, hidden)

    def hide_keys(self, tile: jax.Array, hidden: float, terms: MaskTerms, row: Int, key: Int, columns: jax.Array) -> jax.Array:
        """`hide_by_position` of a tile of rows from `row` on by keys from `key` on. columns: of `self.column_numbers`.

        With a causal mask alone, the last key that a row sees is compared with numbers of columns: nothing is computed for
        each score but that, 1 to 5 % of short sequences (docs/kernels/flash_attention.md).
        """
        shape, last = tile.shape, terms.last_key
        if last is None:
            return self.hide_by_position(tile, hidden, terms, self.tokens(shape, row, columns + key))
        rows = plgpu.broadcasted_iota(jnp.int32, shape[:1], 0, layout=PER_ROW) + row
        return jnp.where(along_columns(columns, shape) <= along_rows(last(rows) - key, shape), tile, hidden)

    def hide_by_segment(self, tile: jax.Array, hidden: float, row_ids: jax.Array, column_ids: jax.Array) -> jax.Array:
        """`hidden` where row and key differ in segment. row_ids, column_ids: the ids of the tile's rows and columns."""
        same = along_rows(row_ids, tile.shape) == along_columns(column_ids, tile.shape)
        return jnp.where(same, tile, hidden)
