"""Names of JAX that are not in its stable API. The ops import them from here, so that one file follows where JAX moves them."""

from __future__ import annotations

from typing import Any

import jax
from jax._src.cudnn import fused_attention_stablehlo as _cudnn
from jax._src.dispatch import prim_requires_devices_during_lowering as primitives_with_devices
from jax._src.lib import cuda_versions as _cuda_versions
from jax._src.sharding_impls import parse_flatten_op_sharding
from jax._src.state import AbstractRef
from jax.experimental import io_callback
from jax.experimental.custom_partitioning import custom_partitioning
from jax.experimental.layout import Layout, with_layout_constraint


def why_no_cudnn() -> str | None:
    """Why cuDNN cannot be called by this process, or None."""
    if _cuda_versions is None:
        return "JAX has no CUDA plugin here"
    try:
        _cuda_versions.cudnn_get_version()
    except RuntimeError as error:
        return f"cuDNN cannot be loaded: {error}"
    return None


def _cudnn_mask(causal: bool) -> Any:
    return _cudnn.MaskType.CAUSAL if causal else _cudnn.MaskType.NO_MASK


def cudnn_attention(
    q: jax.Array, k: jax.Array, v: jax.Array, scale: float, causal: bool, window: int | None
) -> tuple[jax.Array, jax.Array]:
    """Attention by cuDNN, of arrays [batch, tokens, heads, head_dim]: the output, and the natural logarithm of each row's sum
    of exponentials, [batch, heads, tokens] float32, which `jax.nn.dot_product_attention` rounds to q's dtype.

    causal: query i sees keys up to i. window: and with it no more than so many, its own included.
    """
    return _cudnn.dot_product_attention(
        q, k, v, scale=scale, mask_type=_cudnn_mask(causal), sliding_window_length=window, return_residual=True
    )


def cudnn_paged_attention(
    q: jax.Array, pools: tuple[jax.Array, jax.Array], table: jax.Array, lengths: tuple[jax.Array, jax.Array], scale: float
) -> jax.Array:
    """Attention by cuDNN of q [batch, tokens, heads, head_dim] and pools of pages [pages, page_size, kv_heads, head_dim].

    table: int32 [batch, pages of a sequence], with as many entries as there are pages. lengths: int32 [batch], of q and keys.
    """
    pages = table[:, None, :, None]
    out: jax.Array = _cudnn.paged_attention(q, *pools, *lengths, pages, pages, scale=scale, mask_type=_cudnn.MaskType.PADDING)
    return out


def cudnn_attention_gradients(
    q: jax.Array,
    k: jax.Array,
    v: jax.Array,
    forward: tuple[jax.Array, jax.Array],
    out_grad: jax.Array,
    scale: float,
    causal: bool,
    window: int | None,
) -> tuple[jax.Array, jax.Array, jax.Array]:
    """The gradients of q, k and v from that of the output, by cuDNN.

    forward: what `cudnn_attention` returns, whoever made it.
    """
    out, lse = forward
    none = jax.numpy.zeros(0, q.dtype)  # biases, lengths, offsets and page tables
    options = {
        "scale": scale,
        "seed": 42,
        "dropout_rate": 0.0,
        "variadic_args": (False, False),
        "mask_type": _cudnn_mask(causal),
        "layout": _cudnn.AttentionLayout.BTNH.value,
        "sliding_window_length": window,
    }
    if jax.__version_info__ >= (0, 12):
        options["score_mod"] = None
    gradients = _cudnn._dot_product_attention_bwd_p_wrapper
    return tuple(gradients.bind(q, k, v, none, none, none, none, none, none, none, lse, out, out_grad, **options))


__all__ = [
    "AbstractRef",
    "Layout",
    "cudnn_attention",
    "cudnn_attention_gradients",
    "cudnn_paged_attention",
    "custom_partitioning",
    "io_callback",
    "parse_flatten_op_sharding",
    "primitives_with_devices",
    "why_no_cudnn",
    "with_layout_constraint",
]
