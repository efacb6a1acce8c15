"""How Hopper's tensor cores add products of 8-bit floats, in NumPy: the bits that a GPU gives.

An instruction adds 32 products and the sum so far. All are aligned to the largest exponent among them, where a product has the
sum of its factors' exponents; of each, bits below 2^-13 of that are cut off, and so are those of the sum.
"""

from __future__ import annotations

from typing import Any

import numpy as np

BITS = 13  # kept behind the leading one of the largest addend
DEPTH = 32  # of k that an instruction adds
_NONE = -(2**20)  # the exponent of zero


def sums(a: Any, b: Any, block: int | None = None) -> np.ndarray:
    """a[m, k] b[n, k]^T of 8-bit floats, as float32. With `block`, sums of so many of k are added up in float32."""
    a, b = (np.asarray(x) for x in (a, b))
    exponents = [_exponents(x) for x in (a, b)]
    a, b = (x.astype(np.float64) for x in (a, b))
    total = np.zeros((len(a), len(b)), np.float32)
    acc = np.zeros(total.shape)
    for start in range(0, a.shape[1], DEPTH):
        part = slice(start, start + DEPTH)
        products = a[:, None, part] * b[None, :, part]
        exponent = np.where(products == 0, _NONE, exponents[0][:, None, part] + exponents[1][None, :, part]).max(-1)
        acc = _instruction(products, exponent, acc)
        if block and (start + DEPTH) % block == 0:
            total, acc = total + acc.astype(np.float32), np.zeros(total.shape)
    return total + acc.astype(np.float32)


def _instruction(products: np.ndarray, exponent: np.ndarray, acc: np.ndarray) -> np.ndarray:
    """acc + the sum of the products, whose largest exponent is `exponent`."""
    unit = _unit(np.maximum(exponent, _leading(acc)))
    acc = _cut(products, unit[..., None]).sum(-1) + _cut(acc, unit)
    return _cut(acc, _unit(_leading(acc)))


def _exponents(x: np.ndarray) -> np.ndarray:
    """Of the numbers' leading ones; subnormal numbers have the smallest normal one's, as they are stored."""
    return np.maximum(_leading(x.astype(np.float64)), {"float8_e4m3fn": -6, "float8_e5m2": -14}[x.dtype.name])


def _leading(x: np.ndarray) -> np.ndarray:
    return np.where(x == 0, _NONE, np.frexp(x)[1] - 1)


def _unit(exponent: np.ndarray) -> np.ndarray:
    return np.ldexp(1.0, np.maximum(exponent, -1000) - BITS)


def _cut(x: np.ndarray, unit: np.ndarray) -> np.ndarray:
    """x without what lies below the unit, towards zero."""
    return np.trunc(x / unit) * unit
