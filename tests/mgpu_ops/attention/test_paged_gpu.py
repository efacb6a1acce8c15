"""flash_attention with a page_table on a Hopper GPU, with tables, lengths and configs drawn at random. The truth is float64."""

from __future__ import annotations

import functools
import random
from typing import Any

import jax
import numpy as np
import pytest

from mgpu_ops import flash_attention, spec_of
from mgpu_ops.attention.problem import PAGE_SIZES
from mgpu_ops.core import gpu
from tests.mgpu_ops.attention import cases, paged
from tests.mgpu_ops.grouped.ragged import float64

pytestmark = pytest.mark.gpu

FORWARD = spec_of("flash_attention")


def drawn(seed: int) -> tuple[dict[str, Any], Any]:
    """What `paged.draw` takes, and a legal config."""
    rng = random.Random(seed)
    page_size, head_dim, kv_heads = rng.choice(PAGE_SIZES), rng.choice([64, 80, 96, 128, 160, 256]), rng.choice([1, 2, 4])
    q_tokens, group = rng.choice([1, 1, 2, 7, 16]), rng.choice([1, 4, 8])
    batch, pages_each = rng.choice([1, 2, 5]), max(1, rng.choice([100, 1000, 3000]) // page_size)
    tokens = page_size * pages_each
    changes = {
        "page_size": page_size,
        "pages_each": pages_each,
        "batch": batch,
        "lengths": tuple(rng.choice([0, 1, rng.randint(0, tokens), tokens]) for _ in range(batch))
        if rng.random() < 0.8
        else None,
        "q_tokens": q_tokens,
        "q_heads": kv_heads * group,
        "kv_heads": kv_heads,
        "head_dim": head_dim,
        "dtype": rng.choice(["bfloat16", "float16"]),
        "sinks": rng.random() < 0.3,
        "causal": rng.random() < 0.5,
    }
    changes |= {"window": (rng.choice([0, 50, 700]), None)} if rng.random() < 0.3 else {}
    changes |= {"soft_cap": 20.0} if rng.random() < 0.3 else {}
    problem = FORWARD.Problem(batch, q_tokens, tokens, kv_heads * group, kv_heads, head_dim, page_size=page_size)
    space, device = FORWARD.space(problem, gpu.current()), gpu.current()
    configs = (FORWARD.Config(**{f: rng.choice(v) for f, v in space.items()}) for _ in range(100_000))
    return changes, next(c for c in configs if FORWARD.check(problem, c, device) is None)


def test_pages_have_the_bits_of_the_same_keys_without_pages():
    pages = paged.draw(0, page_size=64, pages_each=32, batch=4, head_dim=128, q_heads=8, garbage=False)
    config = FORWARD.default(FORWARD.Problem(4, 1, 2048, 8, 2, 128, page_size=64), gpu.current())
    run = functools.partial(flash_attention, config=config, backend="mosaic")
    q, k, v = pages.clean()
    np.testing.assert_array_equal(run(q, k, v, page_table=pages.table), run(q, *map(jax.numpy.asarray, pages.gathered())))


def test_indices_out_of_range_are_safe():
    pages = paged.draw(1, page_size=16, pages_each=64, batch=4, head_dim=128, garbage=False)
    table = np.random.default_rng(0).integers(-(2**31), 2**31, pages.table.shape).astype(np.int32)
    q, k, v = pages.clean()
    found = flash_attention(q, k, v, page_table=table, backend="mosaic")
    wanted = flash_attention(q, k, v, page_table=table, backend="xla")
    np.testing.assert_allclose(float64(found), float64(wanted), rtol=0.05, atol=0.02)


@pytest.mark.parametrize("seed", range(16))
def test_random_pages_are_right(seed, assert_near):
    changes, config = drawn(seed)
    pages = paged.draw(seed, **changes)
    run = functools.partial(flash_attention, return_lse=True, config=config, backend="mosaic", **pages.options)
    out, lse = jax.jit(lambda q, k, v, table: run(q, k, v, page_table=table))(*pages.arrays, pages.table.astype(np.int32))
    wanted = cases.truth(pages.q, *pages.gathered(), **pages.options)
    assert_near(out, wanted["out"], 0.1 if changes["dtype"] == "bfloat16" else 0.015)
    np.testing.assert_allclose(float64(lse), wanted["lse"], rtol=1e-3, atol=1e-3)
