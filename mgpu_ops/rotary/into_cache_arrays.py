"""What `rotary_into_cache` takes, for its kernel and for the same through XLA."""

from __future__ import annotations

from collections.abc import Sequence
from typing import NamedTuple

import jax

from mgpu_ops.core.limits import WARP, WARPGROUP

AT_ONCE = WARPGROUP // WARP  # heads that are normalised: a head lies within a warp


class Arrays(NamedTuple):
    """The arrays of a call.

    qkv [batch, all heads * head_dim], cos and sin [batch or 1, head_dim / 2], both caches, positions [batch or 1].
    page_table: int32 [batch, pages of a sequence], of caches that are pools of pages, or nothing.
    of_rows: rows and epsilon [1], or nothing. of_heads: weights [head_dim] of the norms of q and k, of one dtype, and epsilon
      [1], or nothing.
    scales: of keys and of values in caches of 8 bits, [batch or 1, kv_heads] each, or nothing.
    """

    qkv: jax.Array
    cos: jax.Array
    sin: jax.Array
    k: jax.Array
    v: jax.Array
    positions: jax.Array
    page_table: Sequence[jax.Array] = ()
    of_rows: Sequence[jax.Array] = ()
    of_heads: Sequence[jax.Array] = ()
    scales: Sequence[jax.Array] = ()
