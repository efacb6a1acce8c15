"""dot_product_attention: takes the place of `jax.nn.dot_product_attention`, with its arguments, through `flash_attention`."""

from __future__ import annotations

import dataclasses
import functools
import logging
from typing import Any, Literal, TypedDict, Unpack, overload

import jax
import jax.numpy as jnp
import numpy as np
from jax import lax
from jax.sharding import AxisType
from jax.typing import ArrayLike

from mgpu_ops.attention.arguments import Arguments
from mgpu_ops.attention.flash_attention import attend
from mgpu_ops.registry import dispatch

DTYPES = ("bfloat16", "float16", "float32")
_HIDDEN = -0.7 * float(np.finfo(np.float32).max)  # JAX's score of a key that a row does not see
_jax_dot_product_attention = jax.nn.dot_product_attention  # bound here: a program may put ours in its place


class _Options(TypedDict, total=False):
    """The options of `dot_product_attention`, for its overloads."""

    scale: ArrayLike | None
    is_causal: bool
    query_seq_lengths: ArrayLike | None
    key_value_seq_lengths: ArrayLike | None
    local_window_size: int | tuple[int, int] | None
    implementation: Literal["xla", "cudnn"] | None
    backend: dispatch.Backend | None


@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[False] = False,
    **options: Unpack[_Options],
) -> jax.Array: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: Literal[True],
    **options: Unpack[_Options],
) -> tuple[jax.Array, jax.Array]: ...
@overload
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    return_residual: bool,
    **options: Unpack[_Options],
) -> jax.Array | tuple[jax.Array, jax.Array]: ...
def dot_product_attention(
    query: ArrayLike,
    key: ArrayLike,
    value: ArrayLike,
    bias: ArrayLike | None = None,
    mask: ArrayLike | None = None,
    *,
    scale: ArrayLike | None = None,
    is_causal: bool = False,
    query_seq_lengths: ArrayLike | None = None,
    key_value_seq_lengths: ArrayLike | None = None,
    local_window_size: int | tuple[int, int] | None = None,
    implementation: Literal["xla", "cudnn"] | None = None,
    return_residual: bool = False,
    backend: dispatch.Backend | None = None,
) -> jax.Array | tuple[jax.Array, jax.Array]:
    """`jax.nn.dot_product_attention` with its arguments, through `flash_attention` where that computes the same, else JAX's.

    query[B, T, N, H], key[B, S, K, H], value[B, S, K, V], leading dimensions left out or not -> [B, T, N, V] and, with
    `return_residual`, the natural logarithm of each row's sum of exponentials, [B, T, N] of key's dtype, without a gradient.
    Causal masks and windows align row t with key t, unlike those of `flash_attention`.

    `flash_attention` runs bfloat16, float16 and float32 arrays of known dimensions, without explicit mesh axes, with a bias of
    any of these dtypes and a scale that is known and not 0. Every other call runs through JAX's own function, and so does one
    that names an `implementation` or that has an error in its arguments; the log says why, once per reason.

    Where `flash_attention` runs, four things differ from JAX:
      - Values may have another head dim than keys: V need not be H.
      - A row that sees no key is zeros with zero gradients, not the mean of all values; its residual is JAX's. A key with a
        score below -1e30, as a bias may give, counts as not seen.
      - Forward-mode differentiation (`jax.jvp`, `jax.hessian`) raises TypeError and a gradient of a gradient ValueError: call
        `jax.nn.dot_product_attention` for them.
      - A 16-bit bias needs no promotion of dtypes, so that it passes under `jax.numpy_dtype_promotion("strict")`.

    `backend` is as in `flash_attention`. Raises ValueError where it is unknown, or a kernel that is named cannot run this.
    """
    wanted = dispatch.requested_backend(backend)
    call = JaxArguments(
        query,
        key,
        value,
        bias,
        mask,
        scale=scale,
        is_causal=is_causal,
        query_seq_lengths=query_seq_lengths,
        key_value_seq_lengths=key_value_seq_lengths,
        local_window_size=local_window_size,
        implementation=implementation,
        return_residual=return_residual,
    )
    reason = why_jax(call)
    if reason is None:
        return _through_ours(call, wanted)
    if backend not in (None, "xla"):
        raise ValueError(f"backend={backend!r} cannot run this dot_product_attention, as {reason}: pass backend=None")
    result = _jax_dot_product_attention(**vars(call))
    if implementation is None:
        _log_once(reason)
    return result


@dataclasses.dataclass(frozen=True)
class JaxArguments:
    """The arguments of `jax.nn.dot_product_attention`, by their names there, as they were passed: nothing is checked yet."""

    query: Any
    key: Any
    value: Any
    bias: Any = None
    mask: Any = None
    scale: Any = None
    is_causal: Any = False
    query_seq_lengths: Any = None
    key_value_seq_lengths: Any = None
    local_window_size: Any = None
    implementation: Any = None
    return_residual: Any = False

    @property
    def arrays(self) -> dict[str, Any]:
        """Those that should be arrays, by name."""
        optional = {name: getattr(self, name) for name in ("bias", "mask", "query_seq_lengths", "key_value_seq_lengths")}
        given = {name: x for name, x in optional.items() if x is not None}
        return {"query": self.query, "key": self.key, "value": self.value, **given}


def _through_ours(call: JaxArguments, backend: dispatch.Backend | None) -> jax.Array | tuple[jax.Array, jax.Array]:
    """The call through `flash_attention`, which computes the same: `why_jax` has no reason."""
    window = call.local_window_size
    q, k, v = (jnp.asarray(x).reshape(_four(np.shape(x))) for x in (call.query, call.key, call.value))
    out, lse = attend(
        Arguments(
            q,
            k,
            v,
            bias=call.bias,
            mask=call.mask,
            causal=bool(call.is_causal),
            window=(window, window) if isinstance(window, int) else window,
            align="top_left",
            q_lengths=call.query_seq_lengths,
            kv_lengths=call.key_value_seq_lengths,
            scale=None if call.scale is None else float(np.asarray(call.scale)),
            backend=backend,
        )
    )
    rows = np.shape(call.query)[:-1]
    out = out.reshape(*rows, v.shape[3])
    if not call.return_residual:
        return out
    residual = jnp.maximum(lse, _HIDDEN).swapaxes(1, 2).astype(k.dtype)
    return out, lax.stop_gradient(residual.reshape(rows))


def why_jax(call: JaxArguments) -> str | None:
    """Why a call runs through JAX's own function; None: `flash_attention` computes the same."""
    if call.implementation is not None:
        return f"implementation={call.implementation!r} asks for JAX's own"
    for name, x in call.arrays.items():
        if not isinstance(x, jax.Array | np.ndarray):
            return f"{name} is no array but a {type(x).__name__}"
    types = {name: jax.typeof(x) for name, x in call.arrays.items()}
    if not all(isinstance(size, int) for x in types.values() for size in x.shape):
        return "a dimension is symbolic"  # in an exported function
    if any(AxisType.Explicit in x.sharding.mesh.axis_types for x in types.values()):
        return "a mesh axis is explicit"
    if not _fit(types):
        return "the arguments do not fit each other"
    if types["query"].dtype.name not in DTYPES:
        return f"dtype {types['query'].dtype} is not one of {', '.join(DTYPES)}"
    if "bias" in types and types["bias"].dtype.name not in DTYPES:
        return f"bias has dtype {types['bias'].dtype}, not one of {', '.join(DTYPES)}"
    if not all(isinstance(x, bool | np.bool_) for x in (call.is_causal, call.return_residual)):
        return "is_causal or return_residual is no bool"
    if jax.config.jax_debug_infs:
        return "jax_debug_infs is on, and masks hold infinities"
    return _why_jax_scales(call.scale) or _why_jax_windows(call.local_window_size)


def _fit(types: dict[str, Any]) -> bool:
    """Whether JAX takes these shapes and dtypes and each dimension of a bias or mask is 1 or that of the scores.

    Values of another head dim, which JAX does not take, fit too.
    """
    query, key, value = (types[name] for name in ("query", "key", "value"))
    if max(x.ndim for x in types.values()) > 4 or 0 in query.shape + key.shape + value.shape:
        return False
    (b, t, n, h), (key_b, s, k, key_h) = _four(query.shape), _four(key.shape)
    scores = [types[name].shape for name in ("bias", "mask") if name in types]
    lengths = [x for name, x in types.items() if name.endswith("lengths")]
    return (
        (b, h) == (key_b, key_h)
        and n % k == 0
        and _four(value.shape)[:3] == (b, s, k)
        and query.dtype == key.dtype == value.dtype
        and all(have in (1, want) for shape in scores for have, want in zip(_four(shape), (b, n, t, s)))
        and ("mask" not in types or types["mask"].dtype == jnp.bool_)
        and all(x.shape == (b,) and x.dtype == jnp.int32 for x in lengths)
    )


def _four(shape: tuple[int, ...]) -> tuple[int, ...]:
    """The shape of four dimensions that JAX's function makes of it."""
    return (1,) * (4 - len(shape)) + shape


def _why_jax_scales(scale: Any) -> str | None:
    """Why a call with this scale runs through JAX's own function, or None."""
    if scale is None:
        return None
    if isinstance(scale, jax.core.Tracer):
        return "scale is traced"
    number = isinstance(scale, int | float | np.integer | np.floating) or (
        isinstance(scale, jax.Array) and scale.ndim == 0 and jnp.isdtype(scale.dtype, "real floating")
    )
    if not number:
        return f"scale is no number but a {type(scale).__name__}"
    numbers = np.finfo(np.float32)
    return None if numbers.tiny <= abs(float(scale)) <= numbers.max else f"scale={scale} is 0 or out of float32's range"


def _why_jax_windows(window: Any) -> str | None:
    """Why a call with this window runs through JAX's own function, or None."""
    sides = (window, window) if isinstance(window, int) else window
    if sides is None or (
        isinstance(sides, tuple | list)
        and len(sides) == 2
        and all(isinstance(x, int | np.integer) and not isinstance(x, bool) and x >= 0 for x in sides)
    ):
        return None
    return f"local_window_size={window} is not one or two whole numbers from 0 on"


@functools.cache
def _log_once(reason: str) -> None:
    logging.getLogger("mgpu_ops").warning("dot_product_attention runs through JAX's own function: %s", reason)
