"""What int32 cannot count is refused by name, before anything overflows inside of JAX."""

from __future__ import annotations

import jax
import jax.numpy as jnp
import pytest

import mgpu_ops

TOO_MANY = 2**31


def X(*shape: int, dtype: object = jnp.bfloat16) -> jax.ShapeDtypeStruct:
    return jax.ShapeDtypeStruct(shape, dtype)  # no array of such a size is made


@pytest.mark.parametrize(
    ("function", "arguments", "what"),
    [
        (mgpu_ops.flash_attention, (X(TOO_MANY, 1, 64), X(8, 1, 64), X(8, 1, 64)), "the tokens of q"),
        (mgpu_ops.flash_attention, (X(8, 1, 64), X(TOO_MANY, 1, 64), X(TOO_MANY, 1, 64)), "the tokens of k"),
        (mgpu_ops.grouped_matmul, (X(TOO_MANY, 64), X(2, 64, 64), X(2, dtype=jnp.int32)), "the rows of lhs"),
        (mgpu_ops.ragged_contraction, (X(TOO_MANY, 64), X(TOO_MANY, 64), X(2, dtype=jnp.int32)), "the rows of lhs"),
        (mgpu_ops.cross_entropy, (X(4, TOO_MANY), X(4, dtype=jnp.int32)), "the words of logits"),
        (mgpu_ops.embedding, (X(TOO_MANY, 64), X(4, dtype=jnp.int32)), "the words of table"),
        (
            lambda x, logits, w: mgpu_ops.moe(x, logits, w, w, w, 2),
            (X(TOO_MANY // 2, 64), X(TOO_MANY // 2, 8), X(8, 64, 64)),
            "the rows of all experts",
        ),
        (
            lambda x, logits, w, scales: mgpu_ops.quantized_moe(x, logits, w, w[:, :, :32], scales, scales, 2),
            (X(TOO_MANY // 2, 64), X(TOO_MANY // 2, 8), X(8, 64, 64, dtype=jnp.int8), X(8, 64)),
            "the rows of all experts",
        ),
        (
            lambda x, logits, w: mgpu_ops.fp8_moe(x, logits, w, w, w, 2),
            (X((TOO_MANY - 8 * 127) // 2, 64), X((TOO_MANY - 8 * 127) // 2, 8), X(8, 64, 64)),
            "the rows of all experts, each padded to 128,",
        ),
    ],
    ids=lambda value: value if isinstance(value, str) else "",
)
def test_more_rows_than_int32_numbers_are_refused_by_name(function, arguments, what):
    with pytest.raises(ValueError, match=f"{what}.* are {TOO_MANY}: .*split the array"):
        jax.eval_shape(function, *arguments)
