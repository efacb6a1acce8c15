"""What wgmma and TMA ask of any op's problems and configs: dtypes, rows of arrays, and how two warpgroups share a tile."""

from __future__ import annotations

from typing import Any

from mgpu_ops.core.gpu import Gpu

DTYPES = ("bfloat16", "float16")


def itemsize_of(dtype: str) -> int:
    return {"float64": 8, "float32": 4}.get(dtype, 2)


def supports_dtypes(dtype: str, out_dtype: str, gpu: Gpu) -> str | None:
    """Why wgmma on `gpu` cannot multiply `dtype` and give `out_dtype`, or None."""
    if gpu.architecture != "hopper":
        return f"{gpu.name} is not a Hopper GPU: the kernel uses wgmma (sm_90a); use backend='xla'"
    if dtype not in DTYPES:
        return f"dtype {dtype} is not one of {', '.join(DTYPES)}: cast, or use backend='xla'"
    if out_dtype not in (dtype, "float32"):
        return f"out_dtype {out_dtype} is neither the inputs' {dtype} nor float32: cast the result, or use backend='xla'"
    return None


def supports_rows(rows: dict[str, tuple[str, int, int]]) -> str | None:
    """Why TMA cannot copy an array, or None.

    `rows`: array -> (the dimension along its rows, their length, bytes per element).
    """
    for what, (name, length, itemsize) in rows.items():
        if length * itemsize % 16:
            unit = 16 // itemsize
            return (
                f"{name}={length} needs 16-byte rows of {what} (TMA): pad to {-(-length // unit) * unit} or pass backend='xla'"
            )
    return None


def warpgroup_tile(c: Any) -> tuple[int, int]:
    """Rows and columns of an output tile that one compute warpgroup of a Config has."""
    if c.compute_warpgroups == 1:
        return c.tile_m, c.tile_n
    return (c.tile_m // 2, c.tile_n) if c.wg_dimension == "m" else (c.tile_m, c.tile_n // 2)
