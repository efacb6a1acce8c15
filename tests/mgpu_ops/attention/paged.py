"""What the tests of paged attention share: pools of pages, with tables drawn at random, and the keys that these stand for."""

from __future__ import annotations

import dataclasses
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np

from tests.mgpu_ops.attention.cases import normal


@dataclasses.dataclass(frozen=True)
class Pages:
    """Arguments of a call. What must not matter is NaN in `arrays` and garbage in `table`."""

    q: jax.Array
    k: np.ndarray  # [pages, page_size, kv_heads, head_dim], without NaN
    v: np.ndarray
    counts: np.ndarray  # booleans [pages, page_size]: the tokens that some entry has
    table: np.ndarray  # [batch, pages of a sequence]
    options: dict[str, Any]

    @property
    def pages(self) -> int:
        return len(self.counts)

    @property
    def arrays(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """q and the pools of keys and values, NaN where nothing counts."""
        hidden = ~self.counts[..., None, None]
        return self.q, *(jnp.where(hidden, jnp.nan, x).astype(self.q.dtype) for x in (self.k, self.v))

    def clean(self) -> tuple[jax.Array, jax.Array, jax.Array]:
        """The same without NaN."""
        return self.q, jnp.asarray(self.k), jnp.asarray(self.v)

    def gathered(self) -> tuple[np.ndarray, np.ndarray]:
        """The keys and values of each entry, one after the other: [batch, tokens, kv_heads, head_dim]."""
        pages = np.clip(self.table, 0, self.pages - 1)
        k, v = (np.asarray(x)[pages].reshape(len(pages), -1, *x.shape[2:]) for x in (self.k, self.v))
        return k, v


def draw(
    seed: int,
    *,
    page_size: int,
    pages_each: int,
    lengths: tuple[int, ...] | None = None,
    batch: int = 2,
    q_tokens: int = 1,
    q_heads: int = 4,
    kv_heads: int = 2,
    head_dim: int = 64,
    dtype: str = "bfloat16",
    sinks: bool = False,
    garbage: bool = True,
    **options: Any,
) -> Pages:
    """Tables whose pages are scattered over the pool, the first page of all entries the same one; some pages are nobody's.

    lengths: of the keys of each entry; None: all that its pages hold. garbage: in entries of the table behind a length.
    """
    rng = np.random.default_rng(seed)
    batch = batch if lengths is None else len(lengths)
    pages = batch * pages_each + 3
    table = rng.permutation(pages)[: batch * pages_each].reshape(batch, pages_each)
    table[:, 0] = table[0, 0]
    ends = [pages_each * page_size] * batch if lengths is None else lengths
    counts = np.zeros((pages, page_size), bool)
    for b, end in enumerate(ends):
        for s in range(end):
            counts[table[b, s // page_size], s % page_size] = True
        behind = -(-end // page_size)
        if garbage:
            table[b, behind:] = rng.choice([-1, 2**31 - 1, -(2**31), pages, 10**6], pages_each - behind)
    shape = pages, page_size, kv_heads, head_dim
    named = options | ({} if lengths is None else {"kv_lengths": jnp.asarray(lengths, jnp.int32)})
    named |= {"sinks": normal(seed + 4, q_heads)} if sinks else {}
    return Pages(
        normal(seed, batch, q_tokens, q_heads, head_dim, dtype=dtype),
        np.asarray(normal(seed + 1, *shape, dtype=dtype)),
        np.asarray(normal(seed + 2, *shape, dtype=dtype)),
        counts,
        table,
        named,
    )
