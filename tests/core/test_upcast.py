"""Integers of 8 and 4 bits become floats: all values, through the instructions that a GPU runs, in the threads of a row."""

from __future__ import annotations

import itertools
import re
from types import SimpleNamespace
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from mgpu_ops.core import upcast

THREADS = np.arange(4, dtype=np.uint32)[:, None]  # words: of each thread, and of each of several rows


def permute_bytes(a: Any, b: Any, selectors: Any) -> Any:
    """prmt: byte i of the result is the one of `a` and `b` that 4 bits of the selector name; with the highest bit, its sign."""
    both = [np.right_shift(word, 8 * i) & 0xFF for word in (a, b) for i in range(4)]
    found = np.uint32(0)
    for i in range(4):
        which = np.right_shift(selectors, 4 * i) & 0xF
        byte = np.choose(which & 7, both)
        found = found | np.where(which & 8, (byte >> 7) * 0xFF, byte) << 8 * i
    return found.astype(np.uint32)


def of_bits(function: int, a: Any, b: Any, c: Any) -> Any:
    """lop3: the bits of three words by a table of eight."""
    cases = itertools.product((0, 1), repeat=3)
    words = [[~np.uint32(x), np.uint32(x)] for x in (a, b, c)]
    rows = [words[0][i] & words[1][j] & words[2][k] for i, j, k in cases if function >> (4 * i + 2 * j + k) & 1]
    return np.bitwise_or.reduce(np.broadcast_arrays(*rows))


def halves(words: Any, dtype: Any) -> Any:
    """The two floats of each word."""
    return np.ascontiguousarray(words).view(dtype).reshape(*words.shape, 2)


def run(code: str, *args: Any) -> Any:
    """The result of a line of PTX on NumPy's words."""
    values: dict[str, Any] = {f"${i}": arg for i, arg in enumerate(args, 1)}

    def value(name: str) -> Any:
        return values[name] if name in values else np.uint32(int(name, 16))

    for line in re.findall(r"(?:lop3|mov|prmt|sub|fma)\.[^;]+", code):
        name, operands = line.split(maxsplit=1)
        into, *given = operands.split(", ")
        words = [value(x) for x in given]
        if name == "lop3.b32":
            values[into] = of_bits(int(given[3], 16), *words[:3])
        elif name == "prmt.b32":
            values[into] = permute_bytes(*words)
        elif name == "mov.b32":
            values[into] = words[0]
        else:
            dtype = jnp.dtype("bfloat16" if "bf16" in name else "float16")
            x, y, *z = (halves(word, dtype).astype(np.float64) for word in np.broadcast_arrays(*words))
            exact = x * y + z[0] if name.startswith("fma") else x - y
            rounded = exact.astype(dtype)
            assert (rounded.astype(np.float64) == exact).all()
            values[into] = rounded.reshape(*rounded.shape[:-2], -1).view(np.uint32)
    return values["$0"]


@pytest.fixture
def simulated(monkeypatch):
    """`upcast` computes with NumPy's words instead of writing code."""
    arithmetic = SimpleNamespace(
        andi=np.bitwise_and,
        shrui=np.right_shift,
        cmpi=lambda _, x, y: x == y,
        select=np.where,
        CmpIPredicate=SimpleNamespace(eq="eq"),
    )
    gpu = SimpleNamespace(
        thread_idx=lambda: THREADS,
        shfl_bfly=lambda word, distance: word[THREADS[:, 0] ^ distance],
        prmt=permute_bytes,
    )
    for name, fake in {"arith": arithmetic, "mosaic": gpu, "i32": np.uint32, "_ptx": run}.items():
        monkeypatch.setattr(upcast, name, fake)


@pytest.mark.parametrize("ordered", [False, True], ids=["exchanged", "in order"])
@pytest.mark.parametrize("dtype", ["bfloat16", "float16"])
@pytest.mark.parametrize("bits", [4, 8])
def test_each_integer_becomes_its_float_at_its_column(bits, dtype, ordered, simulated):
    count = 32 // bits  # neighbours that a thread loads
    neighbours = np.arange(4 * count)[:, None] * 7 + np.arange(2**bits)  # each takes all values, one in each row
    stored = (neighbours & (2**bits - 1)).astype(np.uint32).reshape(4, count, -1)
    if bits == 8 and not ordered:
        stored = stored[[0, 2, 1, 3]]  # as Layout.WGMMA_UPCAST_2X loads them; so that one shuffle is enough
    words = np.bitwise_or.reduce([stored[:, i] << np.uint32(bits * i) for i in range(count)]).astype(np.uint32)
    wide = jnp.dtype(dtype)
    exchanged = upcast._four_bits if bits == 4 else upcast._eight_bits
    spread = upcast._in_order(bits, wide) if ordered else exchanged(dtype == "bfloat16")
    found = [halves(pair, wide) for pair in spread(words)]
    values = (neighbours & (2**bits - 1)).astype(np.int64)
    values -= (values >> bits - 1) << bits
    order = upcast.column_order(bits) if ordered else range(4 * count)
    for i, thread, side in itertools.product(range(count // 2), range(4), range(2)):
        wanted = values[order[8 * i + 2 * thread + side]] * (upcast.unit(wide) if ordered else 1.0)
        assert (found[i][thread, :, side].astype(np.float64) == wanted).all()
