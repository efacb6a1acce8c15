"""Reductions through the switch in float32, which Mosaic GPU does not ask it for.

`multimem.ld_reduce` of 16-bit floats adds them in any precision that is at least their own, unless it says `.acc::f32`.
`install` makes Mosaic say so. Source: PTX ISA, "multimem.ld_reduce".
"""

from __future__ import annotations

import functools
from typing import Any

from jax.experimental.mosaic.gpu import utils
from jax.extend.mlir import ir

_PACKED = {"bf16": "bf16x2", "f16": "f16x2"}


def install() -> None:
    """Sums of 16-bit floats in every kernel compiled afterwards in this process are formed in float32, then rounded."""
    load_reduce = utils.multimem_load_reduce

    @functools.wraps(load_reduce)
    def multimem_load_reduce(ty: Any, ptr: Any, reduction: Any, is_signed: bool | None = None) -> Any:
        packed = _PACKED.get(str(ty.element_type)) if isinstance(ty, ir.VectorType) else None
        if reduction != "add" or packed is None:
            return load_reduce(ty, ptr, reduction, is_signed)
        return _add_in_float32(ty, ptr, packed)

    utils.multimem_load_reduce = multimem_load_reduce  # type: ignore[assignment]


def _add_in_float32(ty: Any, ptr: Any, packed: str) -> Any:
    i32 = ir.IntegerType.get_signless(32)
    words = ty.shape[0] * utils.bitwidth(ty.element_type) // 32
    vector, registers = "", "$0"
    if words > 1:
        vector, registers = f".v{words}", "{" + ", ".join(f"${word}" for word in range(words)) + "}"
    loaded = utils.inline_ptx(
        f"multimem.ld_reduce.relaxed.sys.global.add.acc::f32{vector}.{packed} {registers}, [${words}];",
        ptr,
        result_types=[i32] * words,
        has_side_effects=True,
    )
    one = ir.VectorType.get((1,), i32)
    return utils.bitcast(utils.vector_concat([utils.bitcast(word, one) for word in loaded]), ty)
