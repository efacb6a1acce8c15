"""How products of float32 are computed: on the tensor cores, which multiply tf32 or bfloat16, or on all others.

A float32 number has 24 significant bits. It is the sum of three bfloat16 numbers, its parts, which have 8 each, and nearly that
of the first two. The product of two numbers is that of all parts; the smallest of them are left out. u = 2^-24 is float32's
unit of rounding, and abs(A) abs(B) the product of the magnitudes.

| algorithm | what is multiplied | error of the products, times abs(A) abs(B) |
|---|---|---|
| tf32 | the first 11 bits | 2^-9 |
| bf16 | the first part | 2^-7 |
| bf16_x3 | two parts, three products | 2^-14 |
| bf16_x6 | three parts, six products | 2^-23 = 2 u, and as float32's own from k = 2 on |
| bf16_x9 | three parts, all nine | 0 |

Sums over k are float32 in each, and add their own error.
"""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax

# The products of parts (of A, of B) that are added up, the smallest first. Part 0 has the leading bits.
PRODUCTS: dict[str, tuple[tuple[int, int], ...]] = {
    "bf16": ((0, 0),),
    "bf16_x3": ((0, 1), (1, 0), (0, 0)),
    "bf16_x6": ((0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)),
    "bf16_x9": ((2, 2), (1, 2), (2, 1), (0, 2), (1, 1), (2, 0), (0, 1), (1, 0), (0, 0)),
}
KERNEL = ("tf32", *PRODUCTS)  # what the kernel computes; XLA also "tf32_x3" and "float32"

PRESETS = {  # JAX's names
    "tf32": lax.DotAlgorithmPreset.TF32_TF32_F32,
    "tf32_x3": lax.DotAlgorithmPreset.TF32_TF32_F32_X3,
    "bf16": lax.DotAlgorithmPreset.BF16_BF16_F32,
    "bf16_x3": lax.DotAlgorithmPreset.BF16_BF16_F32_X3,
    "bf16_x6": lax.DotAlgorithmPreset.BF16_BF16_F32_X6,
    "bf16_x9": lax.DotAlgorithmPreset.BF16_BF16_F32_X9,
    "float32": lax.DotAlgorithmPreset.F32_F32_F32,
}
_BY_PRESET = {preset: name for name, preset in PRESETS.items()} | {lax.DotAlgorithmPreset.DEFAULT: "tf32"}
_BY_PRECISION = {
    lax.Precision.DEFAULT: "tf32",
    lax.Precision.HIGH: "bf16_x3",
    lax.Precision.HIGHEST: "bf16_x6",
}
_EXACT = {  # of 16 bits: their products are exact in float32
    "bfloat16": {lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.BF16_BF16_F32},
    "float16": {lax.DotAlgorithmPreset.DEFAULT, lax.DotAlgorithmPreset.F16_F16_F32},
}


def algorithm_of(precision: lax.PrecisionLike, dtype: str) -> str:
    """The algorithm of a product of operands of this dtype: "none" but for float32.

    None: as `jax.default_matmul_precision` says. ValueError for what JAX does not know, and for an algorithm of other dtypes.
    """
    if precision is None:
        default = jax.config.jax_default_matmul_precision
        return "none" if dtype != "float32" else "tf32" if default is None else _algorithm(default, dtype)
    return _algorithm(precision, dtype)


def _algorithm(precision: Any, dtype: str) -> str:
    if isinstance(precision, str) and precision == "tensorfloat32" and dtype == "float32":  # which JAX counts as HIGH
        return "tf32"
    pair = precision if isinstance(precision, tuple | list) and len(precision) == 2 else (precision,)
    precisions = [x for x in map(_precision, pair) if x is not None]
    if len(precisions) == len(pair):
        wanted = [_BY_PRECISION[x] for x in precisions]
        return max(wanted, key=[*_BY_PRECISION.values()].index) if dtype == "float32" else "none"
    preset = _preset(precision)
    if preset is None:
        raise ValueError(
            f"precision={precision!r} is not a jax.lax.Precision or its name, two of them, or a jax.lax.DotAlgorithmPreset or "
            "its name"
        )
    allowed = _BY_PRESET.keys() if dtype == "float32" else _EXACT.get(dtype, {lax.DotAlgorithmPreset.DEFAULT})
    if preset not in allowed:
        raise ValueError(f"precision={preset} is no algorithm for {dtype} here: pass one of {', '.join(map(str, allowed))}")
    return _BY_PRESET[preset] if dtype == "float32" else "none"


def _precision(x: Any) -> lax.Precision | None:
    try:
        return lax.Precision(x) if isinstance(x, str | lax.Precision) else None
    except ValueError:
        return None


def _preset(x: Any) -> lax.DotAlgorithmPreset | None:
    return (
        lax.DotAlgorithmPreset.__members__.get(x)
        if isinstance(x, str)
        else x
        if isinstance(x, lax.DotAlgorithmPreset)
        else None
    )


def of_xla(algorithm: str, m: int, n: int) -> str:
    """The algorithm that XLA computes in place of one: float32's own where it is not what it says (docs/kernels/matmul.md).

    Its three products were as precise as stated with 33 rows and more, and imprecise as tf32 with a vector; so were its nine.
    """
    few = algorithm in ("bf16_x3", "tf32_x3") and isinstance(m, int) and isinstance(n, int) and min(m, n) < _FEW
    return "float32" if few or algorithm in ("bf16_x6", "bf16_x9") else algorithm


_FEW = 32  # rows or columns


def parts_of(algorithm: str) -> int:
    """How many bfloat16 numbers an operand's number is split into; 1 where it is not split."""
    return 1 + max((part for pair in PRODUCTS.get(algorithm, ()) for part in pair), default=0)


def split(x: jax.Array, parts: int, axis: int, unit: int) -> jax.Array:
    """The bfloat16 parts of float32 numbers, one after the other along `axis`, each padded with zeros to a multiple of `unit`.

    Numbers that are not finite are in the first part alone. Finite ones stay finite.
    """
    axis %= x.ndim
    found: list[jax.Array] = []
    rest = x
    for _ in range(parts):
        # Not a cast: XLA may take one there and back for none at all.
        part = lax.reduce_precision(rest, exponent_bits=8, mantissa_bits=7)
        if not found:  # the largest numbers would be rounded to infinity
            cut = lax.bitcast_convert_type(lax.bitcast_convert_type(x, np.uint32) & np.uint32(0xFFFF0000), np.float32)
            part = jnp.where(jnp.isfinite(x) & ~jnp.isfinite(part), cut, part)
        found.append(part.astype(jnp.bfloat16))
        rest = jnp.where(jnp.isfinite(x), rest - part, 0.0)
    pad = [(0, 0)] * x.ndim
    pad[axis] = (0, -x.shape[axis] % unit)
    return jnp.concatenate([jnp.pad(part, pad) for part in found], axis)


def packed(products: Sequence[tuple[int, int]], side: int) -> int:
    """The parts of A (side 0) or of B that products multiply, two bits each from the lowest up, as an int32. Behind them: 3."""
    bits = sum(pair[side] << 2 * i for i, pair in enumerate(products))
    return bits - (1 << 2 * len(products))  # all higher bits are ones
