"""The arguments of `flash_attention`: their checks (`Arguments`), and what of them is known while JAX traces (`Call`)."""

from __future__ import annotations

import dataclasses
import math
from collections.abc import Sequence
from typing import Any

import jax
import jax.numpy as jnp
import numpy as np
from jax.typing import ArrayLike

from mgpu_ops import flags, floats, integers, kv_cache
from mgpu_ops.attention.inputs import Inputs
from mgpu_ops.attention.problem import BIASES, MAX_ROWS, BackwardConfig, Config, Problem
from mgpu_ops.core import mesh
from mgpu_ops.core.limits import check_config
from mgpu_ops.registry import dispatch

type Window = Sequence[int | None]
type Integers = ArrayLike | Sequence[int] | Sequence[Sequence[int]]
type Array = jax.Array | jax.ShapeDtypeStruct  # of which the shape matters


@dataclasses.dataclass(frozen=True)
class Call:
    """What a call says beside its arrays: hashable, so that JAX traces once for all calls that are equal here."""

    causal: bool
    window: tuple[int, int]  # -1: no bound
    align: str
    lengths: bool
    segments: bool
    soft_cap: bool
    soft_cap_after_bias: bool
    sinks: bool
    deterministic: bool
    bias_grad: bool  # the bias is more than a mask
    lse_grad: bool  # the logarithms of the rows' sums are a result, and may have a gradient
    hides: bool  # a mask or segments may hide a token from all others, and what it holds then does not matter
    scale: float  # of the scores, above 0
    config: Config | None
    backward_config: BackwardConfig | None
    backend: dispatch.Backend | None

    def problem(self, q: jax.Array, k: jax.Array, v: jax.Array, inputs: Inputs) -> Problem:
        """The problem of these arrays (or their shapes); v has no more columns than k."""
        bias, pages = inputs.bias, inputs.page_table
        return Problem(
            batch=q.shape[0],
            q_tokens=q.shape[1],
            kv_tokens=k.shape[1] * (1 if pages is None else pages.shape[1]),
            q_heads=q.shape[2],
            kv_heads=k.shape[2],
            head_dim=q.shape[3],
            dtype=q.dtype.name,
            causal=self.causal,
            window_left=self.window[0],
            window_right=self.window[1],
            align=self.align,
            lengths=self.lengths,
            segments=self.segments,
            bias="none" if bias is None else bias.dtype.name,
            soft_cap=self.soft_cap,
            sinks=self.sinks,
            v_head_dim=v.shape[3] if v.shape[3] < k.shape[3] else 0,
            page_size=0 if pages is None else k.shape[1],
            soft_cap_after_bias=self.soft_cap_after_bias,
            kv_dtype="none" if k.dtype == q.dtype else k.dtype.name,
        )


@dataclasses.dataclass(frozen=True)
class Arguments:
    """The arguments of `flash_attention` as they were passed, but q, k and v checked and with a batch.

    k and v with a page_table: pools of pages, [pages, page_size, kv_heads, head_dim].
    align: "bottom_right", the last query is aligned with the last key, or "top_left", the first with the first.
    lse_grad: whether a gradient may reach the logarithms of the rows' sums.
    """

    q: jax.Array
    k: jax.Array
    v: jax.Array
    bias: ArrayLike | None = None
    mask: ArrayLike | None = None
    causal: bool = False
    window: Window | None = None
    align: str = "bottom_right"
    q_lengths: Integers | None = None
    kv_lengths: Integers | None = None
    q_segment_ids: Integers | None = None
    kv_segment_ids: Integers | None = None
    scale: float | None = None
    soft_cap: float | None = None
    soft_cap_after_bias: bool = False
    sinks: ArrayLike | None = None
    page_table: Integers | None = None
    k_scale: ArrayLike | None = None
    v_scale: ArrayLike | None = None
    deterministic: bool = False
    lse_grad: bool = False
    config: Config | None = None
    backward_config: BackwardConfig | None = None
    backend: dispatch.Backend | None = None

    @property
    def has_lengths(self) -> bool:
        return self.q_lengths is not None or self.kv_lengths is not None

    @property
    def has_segments(self) -> bool:
        return self.q_segment_ids is not None or self.kv_segment_ids is not None

    @property
    def hides_tokens(self) -> bool:
        """Whether the mask or segments may hide a token from all others."""
        others = self.kv_segment_ids is not None and self.kv_segment_ids is not self.q_segment_ids
        return self.mask is not None or others or (self.has_lengths and self.has_segments)

    def call(self) -> Call:
        """Raises for a window, a config or a backend that is none."""
        return Call(
            causal=flags.checked("causal", self.causal),
            window=_checked_window(self.window),
            align=self.align,
            lengths=self.has_lengths,
            segments=self.has_segments,
            soft_cap=self.soft_cap is not None,
            soft_cap_after_bias=flags.checked("soft_cap_after_bias", self.soft_cap_after_bias)
            and self.soft_cap is not None
            and self.bias is not None,
            sinks=self.sinks is not None,
            deterministic=flags.checked("deterministic", self.deterministic),
            bias_grad=self.bias is not None,
            lse_grad=self.lse_grad,
            hides=self.hides_tokens and self.page_table is None,  # XLA hides where it has gathered the pages
            scale=abs(self.checked_scale()),
            config=_checked_config("config", self.config, Config),
            backward_config=_checked_config("backward_config", self.backward_config, BackwardConfig),
            backend=dispatch.requested_backend(self.backend),
        )

    def inputs(self) -> Inputs:
        """Lengths, segments, bias, sinks and options, checked. The mask is part of the bias; the scale is taken positive."""
        page_table = None if self.page_table is None else _checked_pages(self.q, self.k, self.page_table, self.backend)
        k = self.k if page_table is None else _gathered(self.k, page_table)
        lengths = _checked_lengths(self.q, k, self.q_lengths, self.kv_lengths) if self.has_lengths else None
        segments = _checked_segments(self.q, k, self.q_segment_ids, self.kv_segment_ids) if self.has_segments else None
        bias = _checked_bias(self.q, k, self.bias, self.mask)
        scale = abs(self.checked_scale())
        cap = 0.0 if self.soft_cap is None else _checked_number("soft_cap", self.soft_cap, positive=True)
        options = [scale, cap, scale / cap if cap else 0.0]
        accurate = np.promote_types(self.q.dtype, np.float32)
        sinks = None if self.sinks is None else _checked_sinks(self.q, self.sinks).astype(accurate)[None]
        if self.k.dtype == self.q.dtype:
            kv_cache.without_scales(self.k.dtype, self.k_scale, self.v_scale)
            kv_scales = None
        else:
            kv_scales = kv_cache.checked_scales("flash_attention", len(self.q), self.k.shape[2], self.k_scale, self.v_scale)
        return Inputs(jnp.array(options, accurate), lengths, segments, bias, sinks, page_table, kv_scales)

    def checked_scale(self) -> float:
        """The scale of the scores, 1 / sqrt(head_dim) by default."""
        return 1.0 / math.sqrt(self.q.shape[-1]) if self.scale is None else _checked_number("scale", self.scale, positive=False)


def check_qkv(q: jax.Array, k: jax.Array, v: jax.Array, paged: bool = False) -> bool:
    """Raises for q, k and v that do not fit each other; whether they have a batch. paged: k and v are pools of pages."""
    for name, x in (("q", q), ("k", k), ("v", v)):
        if paged and name != "q" and x.ndim != 4:
            raise ValueError(f"{name} has shape {x.shape}: with a page_table it must be [pages, page_size, kv_heads, head_dim]")
        if x.ndim not in (3, 4) or (x.ndim != q.ndim and not paged):
            raise ValueError(
                f"{name} has shape {x.shape}: q, k and v must all be [batch, tokens, heads, head_dim] or all [tokens, heads, "
                "head_dim]"
            )
        if x.dtype != q.dtype and x.dtype.name not in kv_cache.DTYPES:
            raise ValueError(
                f"{name} has dtype {x.dtype} and q {q.dtype}: cast them to one, or k and v to {' or '.join(kv_cache.DTYPES)}"
            )
        if not all(isinstance(n, int) for n in x.shape[-3:]):
            raise ValueError(
                f"{name} has shape {x.shape}: only the batch may be symbolic. Export a function for each number of tokens, or "
                "for the most there are, and say with q_lengths and kv_lengths how many count"
            )
        if 0 in x.shape:
            raise ValueError(f"{name} has shape {x.shape}: an empty dimension leaves nothing to attend to")
        integers.check_count(f"the tokens of {name}", x.shape[-3])
    if k.dtype != v.dtype:
        raise ValueError(f"k has dtype {k.dtype} and v {v.dtype}: cast them to one")
    if not paged and q.shape[:-3] != k.shape[:-3]:
        raise ValueError(f"q{q.shape} and k{k.shape} differ in batch: {q.shape[0]} != {k.shape[0]}")
    if k.shape[:-1] != v.shape[:-1]:
        raise ValueError(
            f"k{k.shape} and v{v.shape} differ: each key needs a value, so all but the last dimension must be equal"
        )
    if q.shape[-1] != k.shape[-1]:
        raise ValueError(f"q{q.shape} and k{k.shape} differ in head_dim: {q.shape[-1]} != {k.shape[-1]}")
    if paged and k.shape != v.shape:
        raise ValueError(
            f"k{k.shape} and v{v.shape} differ in head_dim: with a page_table they must be equal, as padding would copy all "
            "pages at each call; make both of the larger one, with zeros at the end"
        )
    if q.shape[-2] % k.shape[-2]:
        raise ValueError(
            f"q has {q.shape[-2]} heads and k {k.shape[-2]}: each key head serves the same number of query heads, so the first "
            "must be a multiple of the second"
        )
    return q.ndim == 4


def _checked_window(window: Window | None) -> tuple[int, int]:
    """(left, right) with -1 for no bound."""
    if window is None:
        return -1, -1
    if not isinstance(window, Sequence) or len(window) != 2:
        raise ValueError(f"window={window!r} must be (left, right): keys before and after the aligned one, None for all")
    for name, side in zip(("left", "right"), window, strict=True):
        if side is None:
            continue
        if not isinstance(side, int | np.integer) or isinstance(side, bool):
            raise TypeError(f"window={window!r}: {name} must be a whole number of keys, or None for all")
        if side < 0:
            raise ValueError(f"window={window!r}: {name} must be 0 or more keys, or None for all")
    left, right = (-1 if side is None else min(int(side), 2**30) for side in window)
    return left, right


def _checked_number(name: str, value: Any, *, positive: bool) -> float:
    if isinstance(value, jax.core.Tracer):
        raise TypeError(f"{name} is traced: it must be known before the function runs (scale q by a traced value instead)")
    number = floats.number(value)
    if number is None:
        raise TypeError(f"{name}={value!r:.80} is no number")
    if not math.isfinite(number) or number == 0 or (positive and number < 0):
        raise ValueError(f"{name}={value!r:.80} must be a finite number {'above' if positive else 'other than'} 0")
    return number


def _checked_config[C: (Config, BackwardConfig)](name: str, config: C | None, kind: type[C]) -> C | None:
    check_config(name, config, kind, f"FlashAttention{'Backward' * ('back' in name)}Config")
    return config


def _check_shape(name: str, x: jax.Array, shape: tuple[int, ...], meaning: str) -> None:
    if x.shape != shape:
        raise ValueError(f"{name} has shape {x.shape}: it must be {meaning} = {shape}")


def _checked_lengths(
    q: jax.Array, k: Array, q_lengths: Integers | None, kv_lengths: Integers | None
) -> tuple[jax.Array, jax.Array]:
    def one(name: str, lengths: Integers | None, x: Array) -> jax.Array:
        if lengths is None:
            return mesh.split_as(_all_tokens(*x.shape[:2]), q)
        found = integers.array(name, lengths)
        found = found.reshape(1) if found.ndim == 0 and x.shape[0] == 1 else found
        _check_shape(name, found, x.shape[:1], "[batch]")
        return integers.clipped(found, x.shape[1])

    return one("q_lengths", q_lengths, q), one("kv_lengths", kv_lengths, k)


def _all_tokens(batch: Any, tokens: Any) -> jax.Array:
    """Lengths that leave out no token: any from `tokens` on. XLA writes equal ones in each call, by a kernel of its own."""
    if not (isinstance(batch, int) and isinstance(tokens, int)):  # symbolic ones
        return jnp.full((batch,), tokens, jnp.int32)
    return jnp.asarray(np.where(np.arange(batch) % 2, integers.INT32.max, tokens).astype(np.int32))


def _checked_segments(q: jax.Array, k: Array, q_ids: Integers | None, kv_ids: Integers | None) -> tuple[jax.Array, jax.Array]:
    if q_ids is None:
        raise ValueError("kv_segment_ids without q_segment_ids: give the queries' segments too")
    if kv_ids is None and q.shape[1] != k.shape[1]:
        raise ValueError(f"q has {q.shape[1]} tokens and k {k.shape[1]}: give kv_segment_ids beside q_segment_ids")

    def one(name: str, ids: Any, x: Array) -> Any:
        ids = integers.array(name, ids)
        ids = ids[None] if ids.ndim == 1 and x.shape[0] == 1 else ids
        _check_shape(name, ids, x.shape[:2], "[batch, tokens]")
        return ids

    names = "q_segment_ids", "kv_segment_ids"
    q_ids, kv_ids = one(names[0], q_ids, q), one(names[1], q_ids if kv_ids is None else kv_ids, k)
    return integers.comparable(names[0], q_ids, names[1], kv_ids)


def _checked_pages(q: jax.Array, k: jax.Array, table: Integers, backend: str | None) -> jax.Array:
    """The table of pages, int32 [batch, pages of a sequence], for queries with a batch and a pool of keys."""
    found = integers.array("page_table", table)
    found = found[None] if found.ndim == 1 and q.shape[0] == 1 else found
    found = kv_cache.page_table(found, q.shape[0], ", or without batch where q has none")
    pages, page_size = k.shape[:2]
    if isinstance(pages, int) and pages * page_size > MAX_ROWS and dispatch.requested_backend(backend) != "xla":
        raise ValueError(
            f"k has shape {k.shape}: {pages * page_size} tokens in pages are more than the {MAX_ROWS} that the kernel counts; "
            "divide the pages among several arrays and the batch among calls, or use backend='xla'"
        )
    return integers.clipped(found, pages - 1)


def _gathered(k: jax.Array, table: jax.Array) -> jax.ShapeDtypeStruct:
    """What a pool of keys is when each sequence's pages are put together, [batch, tokens, kv_heads, head_dim]."""
    return jax.ShapeDtypeStruct((table.shape[0], table.shape[1] * k.shape[1], *k.shape[2:]), k.dtype)


def _checked_sinks(q: jax.Array, sinks: ArrayLike) -> jax.Array:
    sinks = floats.array("flash_attention", "sinks", sinks)
    _check_shape("sinks", sinks, q.shape[2:3], "[q_heads]")
    return sinks


def _checked_bias(q: jax.Array, k: Array, bias: ArrayLike | None, mask: ArrayLike | None) -> jax.Array | None:
    """bias, -inf where the mask is False: [batch or 1, q_heads or 1, q_tokens, kv_tokens], or None."""
    shape = q.shape[0], q.shape[2], q.shape[1], k.shape[1]

    def four(name: str, x: jax.Array) -> jax.Array:
        full = (1,) * (4 - x.ndim) + x.shape
        if len(full) != 4 or any(have not in (1, want) for have, want in zip(full, shape, strict=True)):
            raise ValueError(
                f"{name} has shape {x.shape}: it must broadcast to [batch, q_heads, q_tokens, kv_tokens] = {shape}"
            )
        return x.reshape(full)

    if bias is not None:
        bias = floats.any_array("flash_attention", "bias", bias, "floats")
        if not jnp.issubdtype(bias.dtype, jnp.floating):
            raise TypeError(f"bias has dtype {bias.dtype}: it must hold floats; pass booleans as mask")
        bias = four("bias", bias)
        if bias.dtype.name not in BIASES and bias.dtype != q.dtype:
            bias = bias.astype(jnp.float32)
    if mask is not None:
        mask = floats.any_array("flash_attention", "mask", mask, "booleans")
        if mask.dtype != jnp.bool_:
            raise TypeError(f"mask has dtype {mask.dtype}: it must hold booleans; pass floats as bias")
        dtype = q.dtype if q.dtype.name in BIASES else jnp.float32
        bias = jnp.where(four("mask", mask), jnp.zeros((), dtype) if bias is None else bias, -jnp.inf)
    return None if bias is None else jnp.broadcast_to(bias, (*bias.shape[:2], *shape[2:]))
